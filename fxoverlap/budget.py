"""Which orders a step may have so that it stays below `OverlapConfig.memory_budget`.

In:  the config, and what steps take in memory at each *level* (`Level`).
Out: the level of each step: the first at which it takes no more than the budget on any rank.

Levels go from the most freedom to the least memory. All ranks go through them together, each with the bytes of its own
microbatches, so that they choose the same. A step is known by the structures of its microbatches. It keeps its level
until costs change, and while its microbatches, of whatever lengths, fit into the budget on every rank; else the ranks
go on to the levels behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import ConfigError

_KEPT = 1024
"""Steps that are remembered to fit: with many lengths there may be any number."""


@dataclass(frozen=True, slots=True)
class Level:
    """What the orders of a step may do.

    Attributes:
        pairs: whether two microbatches may run beside each other in the same phase.
        room: as in `policies.auto`.
        in_turn: whether one microbatch runs after the other, which takes the least memory.
    """

    pairs: bool
    room: float | None = None
    in_turn: bool = False


def levels_of(config: OverlapConfig) -> tuple[Level, ...]:
    """The levels that a config allows; only the search of `"auto"` and the pairs can take less than they would."""
    pairs = [Level(True)] if config.ramp == "pair" else []
    if config.schedule != "auto":
        return (*pairs, Level(False))
    return (*pairs, *(Level(False, room) for room in (None, 0.5, 0.25, 0.0)), Level(False, in_turn=True))


class Budget:
    """The levels of one model's steps.

    Attributes:
        levels: all of them.
        terms: a text that is equal on two ranks if they can go through the levels together.
        is_set: whether there is a budget.
    """

    def __init__(self, config: OverlapConfig) -> None:
        self._config = config
        self.levels = levels_of(config)
        self.is_set = config.memory_budget is not None
        self.terms = f"{config.memory_budget} {self.levels}"
        self._chosen: dict[tuple[str, ...], int] = {}  # by structures of the microbatches
        self._fitting: dict[tuple[int, tuple[object, ...]], None] = {}  # number of the level, captures

    def level(self, structures: Sequence[str]) -> Level:
        """The level of a step."""
        return self.levels[self.start(structures)]

    def start(self, structures: Sequence[str]) -> int:
        """The number of the level that a step has, or of the first one."""
        return self._chosen.get(tuple(structures), 0)

    def numbers(self, start: int) -> list[int]:
        """The numbers of all levels, in the order in which they are tried from one on."""
        return [*range(start, len(self.levels)), *range(start)]

    def is_chosen(self, structures: Sequence[str]) -> bool:
        """Whether the ranks have found the level of a step."""
        return tuple(structures) in self._chosen

    def fits(self, structures: Sequence[str], variants: Sequence[object]) -> bool:
        """Whether a step over these captures is known to take no more than the budget on this rank at its level."""
        return (self.start(structures), tuple(variants)) in self._fitting

    def note(self, structures: Sequence[str], variants: Sequence[object]) -> None:
        """A step over these captures takes no more than the budget on this rank at its level."""
        if len(self._fitting) >= _KEPT:
            self._fitting.pop(next(iter(self._fitting)))
        self._fitting[self.start(structures), tuple(variants)] = None

    def excess(self, peak: int) -> int:
        """By how many bytes such a peak is above the budget; at most 0 where it is not."""
        assert self._config.memory_budget is not None
        return peak - self._config.memory_budget

    def choose(self, structures: Sequence[str], variants: Sequence[object], number: int) -> None:
        """A step has the level with this number."""
        self._chosen[tuple(structures)] = number
        self.note(structures, variants)

    def forget(self) -> None:
        """What steps take has changed."""
        self._chosen.clear()
        self._fitting.clear()

    def forget_captures(self) -> None:
        """Some captures are gone; levels are those of structures and stay."""
        self._fitting.clear()

    def refusal(self, excess: Sequence[int], microbatches: int) -> ConfigError:
        """The error for a step that takes too much at every level, given by how much."""
        config = self._config
        assert config.memory_budget is not None
        least = config.memory_budget + min(excess)
        many = "one microbatch" if microbatches == 1 else f"{microbatches} microbatches"
        # What "auto" may come down to is "sequential".
        search = "" if config.schedule in ("auto", "sequential") else 'set schedule="auto", which may take less, '
        return ConfigError(
            f"OverlapConfig.memory_budget is {config.memory_budget} bytes, but the least peak of a step over {many} "
            f"is {least} bytes on the rank that needs most, with exchanges that bring {config.imbalance:g} times the "
            f"balanced number of rows. That is beside parameters, buffers and microbatches; gradients that the step "
            f"makes count. Set a budget of at least that, {search}recompute more, or make microbatches smaller."
        )
