"""Token exchanges: all-to-alls along dim 0 with sizes known on the host.

Two levels. `torch.ops.fxoverlap.exchange` is the launch alone, without a gradient: it returns before the data has
arrived, and its result must go through `torch.ops._c10d_functional.wait_tensor` before anything reads it. `exchange`
launches, waits and has a gradient; traced, it leaves a launch node and a wait node in forward, and the same in
backward.

Sizes are int64 CPU tensors and one integer, the number of rows received. A layer makes that integer once, by the host
read in `exchange_counts`, and gives it to all its exchanges: so a traced layer has one symbol.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

torch.library.define(
    "fxoverlap::exchange",
    "(Tensor x, Tensor out_splits, Tensor in_splits, SymInt out_rows, str group_name) -> Tensor",
)


@torch.library.impl("fxoverlap::exchange", "default")
def _launch(x: Tensor, out_splits: Tensor, in_splits: Tensor, out_rows: int, group_name: str) -> Tensor:
    received, sent = checked_splits(x, out_splits, in_splits, out_rows)
    return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), received, sent, group_name)


def checked_splits(x: Tensor, out_splits: Tensor, in_splits: Tensor, out_rows: int) -> tuple[list[int], list[int]]:
    """Rows to receive from and to send to each rank. Raises ValueError if they do not sum to `out_rows` and to x's."""
    received, sent = out_splits.tolist(), in_splits.tolist()
    if sum(received) != out_rows:
        raise ValueError(
            f"exchange: out_splits must sum to out_rows={out_rows}, got {received}, sum {sum(received)}; "
            "pass the out_rows that belong to these splits"
        )
    if sum(sent) != x.shape[0]:
        raise ValueError(
            f"exchange: in_splits must sum to the {x.shape[0]} rows of x, got {sent}, sum {sum(sent)}; "
            "pass all rows, sorted by destination"
        )
    return received, sent


@torch.library.register_fake("fxoverlap::exchange")
def _launch_fake(x: Tensor, out_splits: Tensor, in_splits: Tensor, out_rows: int, group_name: str) -> Tensor:
    return x.new_empty(out_rows, *x.shape[1:])


class _Exchange(torch.autograd.Function):
    """A launch and its wait. The gradient travels back by the exchange with the splits swapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out_splits: Tensor, in_splits: Tensor, out_rows: int, group_name: str) -> Tensor:
        ctx.save_for_backward(out_splits, in_splits)
        ctx.in_rows, ctx.group_name = x.shape[0], group_name
        launched = torch.ops.fxoverlap.exchange(x, out_splits, in_splits, out_rows, group_name)
        return torch.ops._c10d_functional.wait_tensor(launched)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        out_splits, in_splits = ctx.saved_tensors
        return _Exchange.apply(grad, in_splits, out_splits, ctx.in_rows, ctx.group_name), None, None, None, None


def exchange(x: Tensor, out_splits: Tensor, in_splits: Tensor, out_rows: int, group: dist.ProcessGroup | str) -> Tensor:
    """Send rows to the ranks of a group and receive theirs; differentiable in `x`, any number of times.

    Args:
        x: [rows, ...], any dtype, rows in order of their destination rank.
        out_splits: int64 CPU [group size], rows to receive from each rank.
        in_splits: int64 CPU [group size], rows to send to each rank.
        out_rows: sum of `out_splits`; while tracing, a SymInt.
        group: a process group or its name.

    Returns:
        [out_rows, ...], dtype of `x`, rows in order of their source rank, arrived.

    Raises:
        ValueError: the splits do not sum to the rows sent or received. Nothing has been sent then.
    """
    group_name = group if isinstance(group, str) else group.group_name
    return _Exchange.apply(x, out_splits, in_splits, out_rows, group_name)


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, int, Tensor]:
    """Tell every rank how many tokens it will receive for each of its experts. No gradient; one read by the host.

    Args:
        counts: int64 [group size * local experts], this rank's tokens for every expert of the group. The first rank
            holds the first experts, and so on; all ranks hold equally many.
        group: the process group.

    Returns:
        out_splits: int64 CPU [group size], tokens to receive from each rank.
        in_splits: int64 CPU [group size], tokens to send to each rank.
        out_rows: sum of `out_splits`; while tracing, an unbacked SymInt.
        recv_counts: int64 CPU [group size, local experts], tokens to receive from each rank for each local expert.

    Raises:
        ValueError: `counts` is not int64 of such a shape.
    """
    size = group.size()
    if counts.dtype != torch.int64 or counts.dim() != 1 or counts.shape[0] % size:
        raise ValueError(
            f"exchange_counts: counts must be int64 [{size} * local experts], got {counts.dtype} {list(counts.shape)}; "
            "count the tokens of every expert of the group, not only of the local ones"
        )
    sent = counts.view(size, -1)
    launched = torch.ops._c10d_functional.all_to_all_single(sent, [1] * size, [1] * size, group.group_name)
    received = torch.ops._c10d_functional.wait_tensor(launched)
    if counts.device.type != "cpu":
        sent, received = torch.stack((sent, received)).cpu().unbind()  # stacked: one read of the device
    in_splits, out_splits = sent.sum(1), received.sum(1)
    out_rows = out_splits.sum().item()
    torch._check(out_rows >= 0)
    return out_splits, in_splits, out_rows, received
