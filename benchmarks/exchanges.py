"""Take a step apart into what it computes and what it sends.

`recorded` lists every all-to-all that a run makes. With that list `without_exchanges` repeats the run with each one
replaced by a local copy that has the right number of rows (compute alone), and `exchange_again` repeats the all-to-alls
without the run (communication alone). Counts are handed out again as they were received, so that both have the rows,
and with them the work, of the recorded run.

What is replaced is the CPU kernel of the functional all-to-all, for as long as the block lasts: model and autograd run
as they are, at full speed. `computing_pct` replaces that of the wait as well, to see when a run computes.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxoverlap.report.measured import computing_pct as share_computing


@dataclass(frozen=True, slots=True)
class Exchange:
    """One all-to-all of a run."""

    sent: Tensor  # zeros, of the shape and dtype that were sent; exchanges share their memory
    out_splits: tuple[int, ...]  # rows received from each rank
    in_splits: tuple[int, ...]  # rows sent to each rank
    counts: Tensor | None  # what was received, if integers; None for tokens


def recorded(run: Callable[[], object], group: dist.ProcessGroup) -> list[Exchange]:
    """Call `run`, whose all-to-alls all use `group`, and return them in order."""
    exchanges: list[Exchange] = []
    zeros: dict[torch.dtype, Tensor] = {}  # flat

    def kernel(x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], group_name: str) -> Tensor:
        assert group_name == group.group_name, f"all-to-all on group {group_name}, expected {group.group_name}"
        received = x.new_empty(sum(out_splits), *x.shape[1:])
        dist.all_to_all_single(received, x, list(out_splits), list(in_splits), group=group)
        counts = None if x.is_floating_point() else received.clone()
        if x.dtype not in zeros or zeros[x.dtype].numel() < x.numel():
            zeros[x.dtype] = x.new_zeros(x.numel())
        sent = zeros[x.dtype][: x.numel()].view(x.shape)
        exchanges.append(Exchange(sent, tuple(out_splits), tuple(in_splits), counts))
        return received

    with _kernels(all_to_all_single=kernel):
        run()
    return exchanges


@contextlib.contextmanager
def without_exchanges(exchanges: Sequence[Exchange]) -> Iterator[None]:
    """Inside, the all-to-alls of the recorded run are local copies of the right shape. For exactly one run.

    Raises RuntimeError if the block makes fewer all-to-alls than were recorded.
    """
    left = iter(exchanges)

    def kernel(x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], group_name: str) -> Tensor:
        exchange = next(left)
        if exchange.counts is not None:
            return exchange.counts.clone()
        rows = sum(out_splits)
        received = x.new_empty(rows, *x.shape[1:])
        received[: len(x)] = x[:rows]
        received[len(x) :] = 0
        return received

    with _kernels(all_to_all_single=kernel):
        yield
    if next(left, None) is not None:
        raise RuntimeError("expected the all-to-alls of the recorded run, got fewer: repeat the same run in the block")


def exchange_again(exchanges: Sequence[Exchange], group: dist.ProcessGroup) -> None:
    """Make the recorded all-to-alls over `group` back to back, each launched and waited for."""
    functional = torch.ops._c10d_functional
    for exchange in exchanges:
        launched = functional.all_to_all_single(
            exchange.sent, exchange.out_splits, exchange.in_splits, group.group_name
        )
        functional.wait_tensor(launched)


def computing_pct(run: Callable[[], object], group: dist.ProcessGroup) -> float | None:
    """Call `run` and return in how much of the time that its token exchanges are in flight this rank computes, in %.

    An exchange is in flight from its launch until its data has arrived. Meanwhile the rank launches, waits, for this or
    another all-to-all, or computes. Eager code, which waits at once, comes to about 0. None without exchanges.
    """
    arrivals: dict[int, float] = {}  # by number of the exchange; all times are in seconds
    flights: list[tuple[float, float]] = []
    idle: list[tuple[float, float]] = []  # in a launch or a wait
    launched: dict[int, list[tuple[int, float, dist.Work]]] = {}  # by address; several if nothing is received
    numbers = itertools.count()

    def launch(x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], group_name: str) -> Tensor:
        began, number = time.perf_counter(), next(numbers)
        received = x.new_empty(sum(out_splits), *x.shape[1:])
        work = dist.all_to_all_single(received, x, list(out_splits), list(in_splits), group=group, async_op=True)
        if x.is_floating_point():
            work.get_future().add_done_callback(lambda _: arrivals.setdefault(number, time.perf_counter()))
        launched.setdefault(received.data_ptr(), []).append((number, began, work))
        idle.append((began, time.perf_counter()))
        return received

    def wait(x: Tensor) -> Tensor:
        waiting = time.perf_counter()
        for number, began, work in launched.pop(x.data_ptr(), []):
            work.wait()
            # The callback may run a moment later than this, when the interpreter lets it.
            arrived = min(time.perf_counter(), arrivals.get(number, math.inf))
            if x.is_floating_point():
                flights.append((began, arrived))
        idle.append((waiting, time.perf_counter()))
        return x

    dist.barrier(group)
    with _kernels(all_to_all_single=launch, wait_tensor=wait):
        run()
    return share_computing(flights, idle)


@contextlib.contextmanager
def _kernels(**kernels: Callable[..., Any]) -> Iterator[None]:
    """Have these do the functional collectives of the same names, for CPU tensors, while the block lasts."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CPU")
    try:
        yield
    finally:
        del library  # the kernels go with it
