"""What the ranks of a group tell one another when a step fails on one of them.

A rank that fails in the middle of a step no longer takes part in the exchanges that its peers wait for. So it says in
the store of the process groups where and why it stopped, and a rank that waits for a collective looks there now and
then. A rank that has died says nothing; its peers name it because everybody else spoke.

Terms: a *report* is what one rank wrote about one session; a *session* is one step, or the agreement before it. The
ranks are *in step* if they have launched the same collectives; only then can their group be used again. A rank that
has launched fewer catches up before the error is raised.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from fxoverlap import compat
from fxoverlap.errors import StepError
from fxoverlap.ops.collectives import WAIT
from fxoverlap.runtime import interrupts
from fxoverlap.runtime.launches import Launches, missing

# A rank looks into the store this often while it waits for a collective.
_POLL_S = 0.5
# A rank that has failed gives its peers this long to report too: a peer notices at its next wait.
_GRACE_S = 8.0
# Where a connection broke, whoever is alive has noticed already.
_GRACE_BROKEN_S = 3.0
# Collectives that all ranks have launched complete within this time.
_CATCH_UP_S = 3.0

_watch: ContextVar[Peers | None] = ContextVar("fxoverlap_watch", default=None)


# Groups whose ranks are no longer in step, and why.
_unusable: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def check_usable(group: dist.ProcessGroup) -> None:
    """Raise StepError if an earlier session left the ranks of a group out of step."""
    if group in _unusable:
        raise StepError(
            f"The process group {group.group_name!r} cannot be used: its ranks are no longer in step since an earlier "
            f"failure ({_unusable[group]}). Restart the processes, or make a new group and transform the model again."
        )


def mark_unusable(groups: Iterable[dist.ProcessGroup], why: str) -> None:
    """Remember that the ranks of groups are no longer in step."""
    for group in groups:
        _unusable[group] = why


def mark_usable(groups: Iterable[dist.ProcessGroup]) -> None:
    """Take `mark_unusable` back."""
    for group in groups:
        _unusable.pop(group, None)


def follows(error: BaseException) -> bool:
    """Whether a failure is only what another rank's failure led to."""
    return isinstance(error, PeerFailedError) or compat.is_connection_error(error)


def report_failure(session: str, failure: BaseException) -> None:
    """Tell whoever waits in an agreement that this rank will not come to it."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _write(session, dist.get_rank(), _Report(False, f"{type(failure).__name__}: {failure}", {}))


class PeerFailedError(RuntimeError):
    """Another rank failed, so what this rank waits for will not come."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a session that failed.

    Attributes:
        cause: what to say of the rank that failed first, if it was another one; else nothing.
        in_step: whether the group can be used again.
    """

    cause: str
    in_step: bool


class Peers:
    """The ranks of one or several groups during one session.

    Args:
        groups: groups of at least two ranks, this one included in each.
        session: a text that the ranks have in common for this session and for no other. Ranks of other groups may have
            it too.
        agreement: the session before, if a peer that stopped there may not have heard that this one has begun; then all
            who have `session` wait for one another, directly or through other groups.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], session: str, agreement: str | None = None) -> None:
        self._store = compat.default_store()
        self._session, self._agreement = session, agreement
        self._groups = {group.group_name for group in groups}
        self._ranks = sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)})
        self._own = dist.get_rank()
        self._waiter: _Waiter | None = None
        self.launches: dict[str, Launches] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Let waits of this thread end when a peer reports a failure, for as long as the block lasts."""
        token = _watch.set(self)
        self._waiter = _Waiter()
        try:
            yield
        finally:
            _watch.reset(token)
            self._waiter.close()

    def call(self, function: Callable[[], Any]) -> None:
        """Call what blocks until the peers do their part. Raises PeerFailedError when one reports a failure first."""
        assert self._waiter is not None
        self._waiter.start(function)
        while not self._waiter.is_idle(_POLL_S):
            interrupts.check()
            failed = self._first_failure()
            if failed is not None:
                raise PeerFailedError(failed)
        if self._waiter.failed is not None:
            raise self._waiter.failed

    def settle(self, reason: str, error: BaseException, in_flight: Sequence[torch.Tensor] | None = None) -> Verdict:
        """Report that this rank has failed, hear what the others have to say, and get back in step with them.

        Args:
            reason: what to tell the peers.
            error: the failure.
            in_flight: results of launches that nothing waits for any more; None: getting back in step is no use.
        """
        own = _Report(follows(error), reason, self.launches)
        try:
            _write(self._session, self._own, own)
            reports = self._reports_of_all(_GRACE_BROKEN_S if compat.is_connection_error(error) else _GRACE_S)
        except Exception as lost:
            return Verdict(f"The store of the process groups cannot be reached, so its host has ended: {lost}", False)
        silent = [rank for rank in self._ranks if rank not in reports]
        in_step = not silent and in_flight is not None and self._catch_up(reports, in_flight)
        # A PeerFailedError has named the rank already.
        return Verdict(_cause(reports, silent) if compat.is_connection_error(error) else "", in_step)

    def arrive(self, in_flight: Sequence[torch.Tensor]) -> bool:
        """Wait for launches. Whether they completed before a peer reported a failure."""
        try:
            for result in in_flight:
                wait(result)
        except PeerFailedError:
            return False
        return True

    def _first_failure(self) -> str | None:
        if self._agreement is None:
            return self._failure_in(self._session, self._ranks)
        first = f"{_prefix(self._session)}/first"
        ranks = [int(self._store.get(first))] if self._store.check([first]) else []
        return self._failure_in(self._session, ranks) or self._failure_in(self._agreement, self._ranks)

    def _failure_in(self, session: str, ranks: Sequence[int]) -> str | None:
        """What one of these ranks that failed by itself has reported."""
        if not self._store.check([f"{_prefix(session)}/first"]):
            return None
        for rank in ranks:
            if self._store.check([_key(session, rank)]):
                report = _read(session, rank)
                if not report.follows:
                    return f"rank {rank} failed: {report.reason}"
        return None

    def _reports_of_all(self, timeout_s: float) -> dict[int, _Report]:
        """The report of every rank that makes one in time."""
        deadline = time.monotonic() + timeout_s
        missing_ranks = set(self._ranks)
        while missing_ranks and time.monotonic() < deadline:
            missing_ranks = {rank for rank in missing_ranks if not self._store.check([_key(self._session, rank)])}
            time.sleep(0.02)
        return {rank: _read(self._session, rank) for rank in self._ranks if rank not in missing_ranks}

    def _catch_up(self, reports: dict[int, _Report], in_flight: Sequence[torch.Tensor]) -> bool:
        """Launch what peers have launched and this rank has not, and wait for all of it. Whether that worked."""
        assert self._waiter is not None
        results = list(in_flight)
        for group in self._groups & {name for report in reports.values() for name in report.launches}:
            launched = {rank: report.launches.get(group, Launches()) for rank, report in reports.items()}
            calls = missing(group, self._own, launched)
            if calls is None:
                return False
            results += [op(*args) for op, *args in calls]
        if not self._waiter.is_idle(_CATCH_UP_S):
            return False
        self._waiter.start(lambda: [WAIT(result) for result in results])
        return self._waiter.is_idle(_CATCH_UP_S) and not self._waiter.failed


def _cause(reports: dict[int, _Report], silent: list[int]) -> str:
    """What brought down the step of a rank that did not fail by itself."""
    first = next((rank for rank, report in reports.items() if not report.follows), None)
    if first is not None:
        return f"rank {first} failed: {reports[first].reason}"
    if silent:
        names = "rank" if len(silent) == 1 else "ranks"
        return f"{names} {', '.join(map(str, silent))} said nothing: the process has ended, or is busy in one node."
    return "every rank lost a connection, and none failed by itself."


@contextlib.contextmanager
def watched(peers: Peers | None) -> Iterator[None]:
    """`Peers.watched`, or nothing where there are no peers."""
    with peers.watched() if peers is not None else contextlib.nullcontext():
        yield


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a collective; inside `Peers.watched` only for as long as no peer reports a failure."""
    peers = _watch.get()
    if peers is None:
        return WAIT(tensor)
    peers.call(lambda: WAIT(tensor))
    # It has arrived; profilers and dispatch modes of this thread are to see the wait as well.
    return WAIT(tensor)


def launch(op: Any, *args: Any) -> torch.Tensor:
    """Launch a functional collective; inside `Peers.watched` it is noted."""
    result = op(*args)
    note(op, args)
    return result


def note(op: Any, args: tuple[Any, ...]) -> None:
    """Note a launch that has been made; nothing outside `Peers.watched`."""
    peers = _watch.get()
    if peers is not None:
        peers.launches.setdefault(args[-1], Launches()).note(op, args)


@dataclass(frozen=True, slots=True)
class _Report:
    """What one rank says of a session that failed.

    Attributes:
        follows: whether its failure is only what another rank's failure led to.
        reason: why it failed.
        launches: what it has launched, by group.
    """

    follows: bool
    reason: str
    launches: Mapping[str, Launches]


def _prefix(session: str) -> str:
    return f"fxoverlap/{session}"


def _key(session: str, rank: int) -> str:
    return f"{_prefix(session)}/{rank}"


def _write(session: str, rank: int, report: _Report) -> None:
    launches = {group: each.to_json() for group, each in report.launches.items()}
    store = compat.default_store()
    store.set(_key(session, rank), json.dumps([report.follows, report.reason, launches]))
    if not report.follows:
        # The first of several stays: who reads it must find a report that does not follow.
        store.set(f"{_prefix(session)}/first", str(rank))


def _read(session: str, rank: int) -> _Report:
    follows, reason, launches = json.loads(compat.default_store().get(_key(session, rank)))
    return _Report(follows, reason, {group: Launches.from_json(each) for group, each in launches.items()})


class _Waiter:
    """A thread that makes one blocking call at a time, so that its owner can give up on it.

    Attributes:
        failed: what the last call raised, or None.
    """

    def __init__(self) -> None:
        self.failed: BaseException | None = None
        # Every wait of a step hands over twice; semaphores, which are written in Python, take longer.
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        self._busy = False
        threading.Thread(target=self._loop, daemon=True, name="fxoverlap-wait").start()

    def start(self, function: Callable[[], Any]) -> None:
        """Begin a call."""
        assert not self._busy
        self.failed, self._busy = None, True
        self._calls.put(function)

    def is_idle(self, timeout_s: float) -> bool:
        """Whether no call runs, or the one that does ends within a time."""
        if self._busy:
            with contextlib.suppress(Empty):
                self.failed = self._ends.get(timeout=timeout_s)
                self._busy = False
        return not self._busy

    def close(self) -> None:
        """End the thread, as soon as its call ends."""
        self._calls.put(None)

    def _loop(self) -> None:
        while (function := self._calls.get()) is not None:
            failed = None
            try:
                function()
            except BaseException as error:
                failed = error
            # What the call holds, and what it has raised, are its owner's now.
            del function
            self._ends.put(failed)
            del failed
