"""Which orders a step may have so that it stays below `OverlapConfig.memory_budget`.

In:  the config, and what steps take in memory at each *level* (`Level`).
Out: the level of each step: the first at which it takes no more than the budget on any rank.

Levels go from the most freedom to the least memory. All ranks go through them together, each with the bytes of its own
microbatches, so that they choose the same. A step is known by the structures of its microbatches; its level only rises,
until costs change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import ConfigError


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
        self._known: set[tuple[object, ...]] = set()

    def level(self, structures: Sequence[str]) -> Level:
        """The level of a step."""
        return self.levels[self.start(structures)]

    def start(self, structures: Sequence[str]) -> int:
        """The number of the lowest level that a step may still have."""
        return self._chosen.get(tuple(structures), 0)

    def is_open(self, variants: Sequence[object]) -> bool:
        """Whether the ranks have to find the level of a step over these captures."""
        return self.is_set and tuple(variants) not in self._known

    def excess(self, peak: int) -> int:
        """By how many bytes such a peak is above the budget; at most 0 where it is not."""
        assert self._config.memory_budget is not None
        return peak - self._config.memory_budget

    def choose(self, structures: Sequence[str], variants: Sequence[object], number: int) -> None:
        """A step has the level with this number."""
        self._chosen[tuple(structures)] = number
        self._known.add(tuple(variants))

    def forget(self) -> None:
        """What steps take has changed."""
        self._chosen.clear()
        self._known.clear()

    def refusal(self, excess: Sequence[int], microbatches: int) -> ConfigError:
        """The error for a step that takes too much at every level, given by how much."""
        config = self._config
        assert config.memory_budget is not None
        least = config.memory_budget + min(excess)
        many = "one microbatch" if microbatches == 1 else f"{microbatches} microbatches"
        search = "" if config.schedule == "auto" else ' or schedule="auto", which may find a smaller one'
        return ConfigError(
            f"OverlapConfig.memory_budget is {config.memory_budget} bytes, but the least peak of a step over {many} "
            f"is {least} bytes on the rank that needs most, with exchanges that bring {config.imbalance:g} times the "
            f"balanced number of rows. Set a budget of at least that, recompute more{search}, or make microbatches "
            f"smaller."
        )
