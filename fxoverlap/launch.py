"""Run one function in several ranks on this machine, joined by a gloo group over loopback.

`launch` starts the ranks as child processes, gives each one computing thread and a process group, and returns what
each rank's call returned. The promises that everything built on it relies on:

- All ranks or none. When a rank raises, dies or is killed, or when the caller is interrupted, every other rank is
  ended at once, by its own process id, and the caller gets one error that names the rank and the cause.
- No orphans. A rank dies with its parent, also when the parent is killed by SIGKILL (Linux only).
- No noise. A rank prints nothing of its own accord; its traceback is part of the error's text.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fxoverlap.errors import FxOverlapError

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
# When one rank fails, its peers fail too, over the broken connection. Wait this long for the first cause to show.
_GRACE_S = 0.3


class LaunchError(FxOverlapError, RuntimeError):
    """A rank failed or did not end in time. The text names the rank, the cause and, if it raised, its traceback.

    `rank` is the rank that failed first, or None if time ran out.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one rank's call came to."""

    rank: int
    at: float  # seconds of the machine's monotonic clock, which all ranks share; -inf if the process just ended
    result: Any = None
    cause: str | None = None  # one line; None if the call returned
    details: str = ""  # the traceback, if there is one


def launch(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout_s: float = 600.0,
    prepare: Callable[[int], object] | None = None,
) -> list[Any]:
    """Call `function(rank, *args)` in each of `ranks` new processes and return the results, by rank.

    `function`, `args` and the results must be picklable; tensors travel by value. Inside, the default process group
    is gloo over loopback and torch computes with one thread. `timeout_s` bounds the whole call, in seconds.
    `prepare(rank)` runs in the new process before its group is made: it can choose another network interface.

    Raises LaunchError if a rank fails or time runs out, and passes on KeyboardInterrupt; no rank is left either way.
    """
    if ranks < 1:
        raise ValueError(f"ranks: expected at least 1, got {ranks}")
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # here, because starting it lets go of the interrupts that are held below
    with tempfile.TemporaryDirectory(prefix="fxoverlap-") as folder:
        processes: list[SpawnProcess] = []
        receivers: list[Connection] = []
        try:
            for rank in range(ranks):
                receiver, sender = context.Pipe(duplex=False)
                store_path = str(Path(folder) / "store")
                process = context.Process(
                    target=_run_rank,
                    args=(os.getpid(), sender, store_path, rank, ranks, timeout_s, prepare, function, args),
                    name=f"fxoverlap-rank-{rank}",
                )
                with _interrupts_held():
                    process.start()
                    processes.append(process)
                receivers.append(receiver)
                sender.close()
            return _collect(processes, receivers, timeout_s)
        finally:
            _end(processes)


@contextlib.contextmanager
def one_rank_group() -> Iterator[dist.ProcessGroup]:
    """Give this process a gloo group of one rank for as long as the block lasts, and yield it.

    A default group that exists already is yielded as it is, and left alone.
    """
    ours = not dist.is_initialized()
    if ours:
        with _loopback():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        if ours:
            dist.destroy_process_group()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent`, which started it, ends. Linux only; else nothing.

    Exits at once if that parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def signal_text(number: int) -> str:
    """Name a signal for a message: `SIGKILL (signal 9)`."""
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def _run_rank(
    parent: int,
    sender: Connection,
    store_path: str,
    rank: int,
    ranks: int,
    timeout_s: float,
    prepare: Callable[[int], object] | None,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    """Be one rank: join the group, call, send the outcome, leave the group."""
    die_with_parent(parent)
    torch.set_num_threads(1)
    try:
        if prepare is not None:
            prepare(rank)
        store, timeout = dist.FileStore(store_path, ranks), timedelta(seconds=timeout_s)
        with _loopback():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        message = pickle.dumps(_Outcome(rank, time.monotonic(), result=function(rank, *args)))
        # A rank that leaves while a peer still sends to it would break that peer's last exchange. They meet in the
        # store, because the group may have been destroyed, or left with collectives that not every rank called.
        store.set(f"done/{rank}", "")
        store.wait([f"done/{each}" for each in range(ranks)], timeout)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        # Sent before this process ends, so that it reaches the parent before the peers' broken connections do.
        cause = f"{type(error).__name__}: {error}"
        message = pickle.dumps(_Outcome(rank, time.monotonic(), cause=cause, details=traceback.format_exc()))
    sys.stdout.flush()
    sender.send_bytes(message)
    sender.close()


def _collect(processes: list[SpawnProcess], receivers: list[Connection], timeout_s: float) -> list[Any]:
    """Wait for every rank's outcome and return the results by rank; LaunchError at the first failure."""
    deadline = time.monotonic() + timeout_s
    done: dict[int, _Outcome] = {}
    failed: list[_Outcome] = []
    while len(done) < len(processes):
        pending = {receivers[rank].fileno(): rank for rank in range(len(processes)) if rank not in done}
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        for descriptor in ready:
            assert isinstance(descriptor, int)
            outcome = _receive(pending[descriptor], processes, receivers)
            done[outcome.rank] = outcome
            if outcome.cause is not None:
                failed.append(outcome)
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if not ready:
            break
    if failed:
        first = min(failed, key=lambda outcome: outcome.at)
        message = f"rank {first.rank} of {len(processes)} failed: {first.cause}"
        if len(processes) > 1:
            message += "; the other ranks were ended"
        raise LaunchError(f"{message}\n{first.details}".rstrip(), first.rank)
    if len(done) < len(processes):
        late = ", ".join(str(rank) for rank in range(len(processes)) if rank not in done)
        raise LaunchError(
            f"rank {late} of {len(processes)} did not end within {timeout_s:g} s and was ended; if the work is really "
            "that long, raise timeout_s, else look for a collective that not every rank calls"
        )
    return [done[rank].result for rank in range(len(processes))]


def _receive(rank: int, processes: list[SpawnProcess], receivers: list[Connection]) -> _Outcome:
    """Read the outcome of a rank whose pipe is ready or at its end."""
    try:
        outcome = pickle.loads(receivers[rank].recv_bytes())
        assert isinstance(outcome, _Outcome)
        return outcome
    except EOFError:
        # The pipe closed with nothing in it: the process ended without a word.
        processes[rank].join()
        code = processes[rank].exitcode or 0
    if code < 0:
        cause = f"its process was killed by {signal_text(-code)}"
    else:
        cause = f"its process ended early, with exit status {code}"
    if -code == signal.SIGKILL:
        cause += "; if nobody sent that, the machine ran out of memory"
    # Peers of a broken connection raise; who ends without a word was not brought down by another rank, but came first.
    return _Outcome(rank, float("-inf"), cause=cause)


def _end(processes: list[SpawnProcess]) -> None:
    """Kill and reap every process that is left."""
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
        process.close()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back in this thread for as long as the block lasts.

    A child that starts in the block inherits this for good. A terminal sends Ctrl-C to the children too: left to
    themselves each would print a traceback. The parent ends them instead.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Have gloo bind to loopback while a group is made; by itself it would look up the host's own name."""
    name = "GLOO_SOCKET_IFNAME"
    if sys.platform != "linux" or name in os.environ:
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        del os.environ[name]
