"""Agreement of the ranks before a step runs.

Every rank of the expert-parallel group says, in one small all-reduce before any node runs, whether it is ready, how
many microbatches it has, whether its last step failed, whether it has news to share, and the hash of the plans that it
is about to run. A rank that failed, unequal numbers, and different plans raise PlanMismatchError on every rank, naming
the rank and the first difference. Where every rank refuses what it was given, each raises its own error instead. A rank
that has died, or that reports a failure instead of coming, is named too.

If a rank has news, plans are not compared yet: the ranks share what they know (`share`), plan, and agree once more.

A fingerprint is a list of lines: the config's fields, then the nodes and plans of the step. It holds no shapes, costs
or tensors, so ranks with other sequence lengths agree.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fxoverlap.errors import (
    CaptureError,
    ConfigError,
    FxOverlapError,
    PlanMismatchError,
    StepError,
    UnsupportedError,
)
from fxoverlap.runtime.peers import PeerFailedError, Peers, check_usable, mark_unusable, report_failure

T = TypeVar("T")

REFUSALS = (ConfigError, CaptureError, UnsupportedError)
"""What a user is told of a model or of microbatches; where every rank is told so, the ranks do not differ."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must be equal on all ranks.

    Attributes:
        lines: the text that is compared.
        digest: its hash, as two integers.
    """

    lines: tuple[str, ...] = ()
    digest: tuple[int, int] = (0, 0)

    @staticmethod
    def of(lines: Sequence[str]) -> Fingerprint:
        """The fingerprint of some lines."""
        found = hashlib.sha256("\n".join(lines).encode()).digest()
        return Fingerprint(tuple(lines), (int.from_bytes(found[:7], "big"), int.from_bytes(found[7:14], "big")))


@dataclass(frozen=True, slots=True)
class Standing:
    """What one rank tells the others before a step.

    Attributes:
        microbatches: how many it has.
        plans: what it is about to run.
        failure: what kept it from getting ready, or None.
        last_failed: whether its last step failed after all ranks had begun it.
        has_news: whether it knows what the others have to hear before they plan; then it has no plans yet.
    """

    microbatches: int
    plans: Fingerprint = Fingerprint()
    failure: BaseException | None = None
    last_failed: bool = False
    has_news: bool = False


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the ranks agreed on.

    Attributes:
        session: a name for the step that begins now: the same on every rank, and of no other step.
        has_news: whether a rank has news, so that the ranks must share what they know and agree once more.
    """

    session: str
    has_news: bool


def agree(groups: Sequence[dist.ProcessGroup], own: Standing, session: str, before: str | None = None) -> Agreed:
    """Raise PlanMismatchError on every rank unless all are ready for the same step.

    Args:
        groups: the groups whose ranks must agree, in the same order on every rank. What a rank hears in one of them it
            says in the next, so that in a grid of groups all ranks hear of it.
        own: what this rank has to say.
        session: a text that is the same on every rank for this agreement, and for no other.
        before: the session before it, if it belongs to the same step.

    Raises:
        PlanMismatchError: the ranks differ, or a rank failed or is gone.
        ConfigError, CaptureError, UnsupportedError: that is what kept this rank from getting ready, and no rank is.
        StepError: a group was left out of step earlier.
        KeyboardInterrupt: that is what kept this rank from getting ready.
    """
    number, failure, has_news = secrets.randbits(62), own.failure, own.has_news
    for group in groups:
        try:
            with _together(group, session, before) as peers:
                said = replace(own, failure=failure, has_news=has_news)
                number, has_news = _Agreement(group, peers, said).reach(number)
        except FxOverlapError as error:
            failure = failure if isinstance(failure, (PlanMismatchError, KeyboardInterrupt)) else error
    if failure is not None:
        raise failure
    return Agreed(f"step/{number}", has_news)


def share(groups: Sequence[dist.ProcessGroup], own: T, combine: Callable[[list[T]], T], session: str, before: str) -> T:
    """What the ranks of all groups know, combined; the same on every rank.

    Args:
        groups, session, before: as for `agree`.
        own: what this rank knows; it must be picklable.
        combine: makes one of several; in any order, and of some of them twice, the result must be the same.

    Raises PlanMismatchError if a rank failed or is gone, StepError if a group was left out of step earlier.
    """
    for group in groups:
        try:
            with _together(group, session, before) as peers:
                own = combine(_gather(group, peers, own))
        except FxOverlapError as error:
            report_failure(session, error)  # ranks of the other groups wait for this one
            raise
    return combine([own])


@contextlib.contextmanager
def _together(group: dist.ProcessGroup, session: str, before: str | None) -> Iterator[Peers]:
    """What one group does in one session; an error of whatever kind becomes one that names the rank it came from."""
    try:
        check_usable(group)
    except StepError as error:
        report_failure(session, error)
        raise
    peers = Peers([group], session, before)
    with peers.watched():
        try:
            yield peers
        except (PlanMismatchError, *REFUSALS):
            raise
        except (Exception, KeyboardInterrupt) as error:
            mark_unusable([group], f"{type(error).__name__}: {error}")
            verdict = peers.settle(f"{type(error).__name__}: {error}", error)
            if isinstance(error, KeyboardInterrupt):
                raise
            cause = str(error) if isinstance(error, PeerFailedError) else verdict.cause or str(error)
            raise PlanMismatchError(f"step: the ranks could not agree: {cause}") from error


def _gather(group: dist.ProcessGroup, peers: Peers, own: T) -> list[T]:
    """What each rank of a group says, by rank."""
    everyones: list[Any] = [None] * dist.get_world_size(group)
    peers.call(lambda: dist.all_gather_object(everyones, own, group=group))
    return everyones


class _Agreement:
    """The collectives of one agreement, and what follows from them."""

    def __init__(self, group: dist.ProcessGroup, peers: Peers, own: Standing) -> None:
        self.group, self.peers, self.own = group, peers, own
        self.ranks = dist.get_process_group_ranks(group)

    def reach(self, number: int) -> tuple[int, bool]:
        """(smallest number of the ranks, whether one of them has news)."""
        own = self.own
        numbers = [own.failure is not None, own.microbatches, own.last_failed, own.has_news, number, *own.plans.digest]
        rows = self._gather_numbers([int(each) for each in numbers])
        if any(row[0] for row in rows):
            self._raise_failure()
        if 0 < sum(row[2] for row in rows) < len(rows):
            failed = [str(rank) for rank, row in zip(self.ranks, rows, strict=True) if row[2]]
            raise PlanMismatchError(
                f"step: the last step failed on rank {', '.join(failed)} and not on the others, so their gradients are "
                f"not of the same step. Bring every rank to the same state, then go on."
            )
        counts = [row[1] for row in rows]
        if len(set(counts)) > 1:
            odd = next(i for i, count in enumerate(counts) if count != counts[0])
            raise PlanMismatchError(
                f"step: rank {self.ranks[odd]} has {counts[odd]} microbatches, rank {self.ranks[0]} has {counts[0]}. "
                f"Give every rank of the expert-parallel group the same number."
            )
        has_news = any(row[3] for row in rows)
        other = next((i for i, row in enumerate(rows) if row[5:] != rows[0][5:]), None)
        if other is not None and not has_news:
            self._raise_difference(other)
        return min(row[4] for row in rows), has_news

    def _gather_numbers(self, own: list[int]) -> list[list[int]]:
        """The numbers of every rank, by one all-reduce of a table in which each rank fills its own row."""
        table = torch.zeros(len(self.ranks), len(own), dtype=torch.int64)
        table[dist.get_rank(self.group)] = torch.tensor(own)
        self.peers.call(lambda: dist.all_reduce(table, group=self.group))
        return table.tolist()

    def _raise_failure(self) -> None:
        failure = self.own.failure
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        texts = _gather(self.group, self.peers, text)
        if None not in texts and isinstance(failure, REFUSALS):
            raise failure
        rank, text = next((rank, text) for rank, text in zip(self.ranks, texts, strict=True) if text is not None)
        raise PlanMismatchError(f"step: rank {rank} could not get ready, so no rank runs: {text}") from failure

    def _raise_difference(self, other: int) -> None:
        everyones = _gather(self.group, self.peers, self.own.plans.lines)
        pairs = zip_longest(everyones[0], everyones[other], fillvalue="(nothing)")
        a, b = next(((a, b) for a, b in pairs if a != b), ("", ""))
        one, two = self.ranks[0], self.ranks[other]
        raise PlanMismatchError(
            f"step: rank {two} has another plan than rank {one}. First difference: {a!r} on rank {one}, {b!r} on rank "
            f"{two}. Give every rank the same config, model structure and microbatch structure."
        )
