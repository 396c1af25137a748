"""The collectives that a rank has launched in a step, and how a rank that stopped early catches up with its peers.

A collective completes when all ranks of its group have launched it. After a failure each rank says how many it has
launched on each group, and describes the last ones. A rank that has launched fewer launches the missing ones too, on
zeros of the sizes that its peers expect; then nothing is in flight, and the groups can be used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fxoverlap import compat
from fxoverlap.ops.collectives import ALL_TO_ALL, EXCHANGE

# A rank is never further ahead of its peers than what it can launch without waiting for them.
_LAST = 64


@dataclass(frozen=True, slots=True)
class Launch:
    """One collective.

    Attributes:
        op: name of the functional collective.
        shape, dtype: of its input.
        args: its other arguments, without the group.
    """

    op: str
    shape: list[int]
    dtype: str
    args: list[Any]

    @staticmethod
    def of(op: Any, args: tuple[Any, ...]) -> Launch | None:
        """The record of a call; None if its arguments are no single tensor, numbers and texts."""
        x, *rest = args[:-1]
        if op is EXCHANGE:
            op, rest = ALL_TO_ALL, [rest[0].tolist(), rest[1].tolist()]
        if not isinstance(x, torch.Tensor) or not all(isinstance(each, (int, str, list, tuple)) for each in rest):
            return None
        return Launch(str(op), list(x.shape), str(x.dtype).removeprefix("torch."), list(rest))


@dataclass(slots=True)
class Launches:
    """What one rank has launched on one group in a step.

    Attributes:
        count: how many collectives.
        last: the last ones of them.
    """

    count: int = 0
    last: deque[Launch | None] = field(default_factory=lambda: deque(maxlen=_LAST))

    def note(self, op: Any, args: tuple[Any, ...]) -> None:
        """Add a call that has been made."""
        self.count += 1
        self.last.append(Launch.of(op, args))

    def at(self, number: int) -> Launch | None:
        """The collective with this number, None if it was not launched or is not known any more."""
        i = number - (self.count - len(self.last))
        return self.last[i] if 0 <= i < len(self.last) else None

    def to_json(self) -> dict[str, Any]:
        """The same as numbers, texts and lists."""
        return {"count": self.count, "last": [None if each is None else asdict(each) for each in self.last]}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Launches:
        """Back from `to_json`."""
        last = (None if each is None else Launch(**each) for each in found["last"])
        return Launches(found["count"], deque(last, maxlen=_LAST))


def missing(group: str, own: int, launched: Mapping[int, Launches]) -> list[tuple[Any, ...]] | None:
    """The calls that a rank has to make to catch up with the other ranks of a group: (op, *arguments).

    Args:
        group: its name.
        own: the global rank that has to catch up.
        launched: by global rank; every rank of the group is there.

    Returns:
        The calls in order; None if one of them cannot be told from what the peers say.
    """
    ranks = dist.get_process_group_ranks(compat.process_group(group))
    calls = []
    for number in range(launched[own].count, max(launched[rank].count for rank in ranks)):
        theirs = [launched[rank].at(number) for rank in ranks]
        known = next((each for each in theirs if each is not None), None)
        if known is None or any(e is None and launched[r].count > number for e, r in zip(theirs, ranks, strict=True)):
            return None
        calls.append(_call(known, theirs, ranks.index(own), group))
    return calls


def _call(known: Launch, theirs: list[Launch | None], position: int, group: str) -> tuple[Any, ...]:
    """The part of the rank at `position` in a collective that its peers have launched."""
    namespace, name, overload = known.op.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    shape, args = known.shape, known.args
    if op is ALL_TO_ALL:
        # Ranks that have not launched it either exchange nothing with this one.
        received = [0 if each is None else each.args[1][position] for each in theirs]
        sent = [0 if each is None else each.args[0][position] for each in theirs]
        shape, args = [sum(sent), *shape[1:]], [received, sent]
    return op, torch.zeros(shape, dtype=getattr(torch, known.dtype)), *args, group
