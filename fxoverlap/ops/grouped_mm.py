"""Products of consecutive groups of rows with a matrix each, and their weight gradients.

`torch.ops.fxoverlap.grouped_mm` and `torch.ops.fxoverlap.grouped_mm_wgrad` run in any floating dtype on any device;
the sizes of the groups are on the host. Both are differentiable, by each other. The gradient of a `grouped_mm` is at
most two nodes of a traced graph, one for the rows and one for the matrices, so that the second can be delayed.

Rows past the last group are padding: never read, and zero in every result that has rows.
"""

from typing import Any

import torch
from torch import Tensor

torch.library.define("fxoverlap::grouped_mm", "(Tensor x, Tensor w, Tensor group_rows) -> Tensor")
torch.library.define("fxoverlap::grouped_mm_wgrad", "(Tensor x, Tensor g, Tensor group_rows) -> Tensor")


def _check(x: Tensor, w: Tensor, group_rows: Tensor) -> None:
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1] or group_rows.shape != w.shape[:1]:
        raise ValueError(
            "grouped_mm: x, w and group_rows must be [N, K], [E, K, M] and [E], "
            f"got {list(x.shape)}, {list(w.shape)} and {list(group_rows.shape)}; transpose w, count all groups"
        )
    if x.dtype != w.dtype:
        raise ValueError(f"grouped_mm: x and w must have one dtype, got {x.dtype} and {w.dtype}; cast one of them")


def _sizes(rows: int, group_rows: Tensor) -> list[int]:
    """Sizes of the groups, and of the padding as one more."""
    sizes = group_rows.tolist()
    padding = rows - sum(sizes)
    if padding < 0:
        raise ValueError(
            f"grouped_mm: group_rows must sum to at most the {rows} rows of x, got {sizes}, sum {sum(sizes)}; "
            "pass the counts of these rows"
        )
    return [*sizes, padding]


@torch.library.impl("fxoverlap::grouped_mm", "default")
def _grouped_mm(x: Tensor, w: Tensor, group_rows: Tensor) -> Tensor:
    _check(x, w, group_rows)
    sizes = _sizes(x.shape[0], group_rows)
    out = x.new_empty(x.shape[0], w.shape[2])
    xs, ws, outs = x.split(sizes), w.unbind(), out.split(sizes)
    for e, rows in enumerate(sizes[:-1]):
        if rows:
            torch.mm(xs[e], ws[e], out=outs[e])
    outs[-1].zero_()
    return out


@torch.library.impl("fxoverlap::grouped_mm_wgrad", "default")
def _grouped_mm_wgrad(x: Tensor, g: Tensor, group_rows: Tensor) -> Tensor:
    sizes = _sizes(x.shape[0], group_rows)
    out = x.new_empty(len(group_rows), x.shape[1], g.shape[1])
    xs, gs, outs = x.t().split(sizes, 1), g.split(sizes), out.unbind()
    for e, rows in enumerate(sizes[:-1]):
        if rows:
            torch.mm(xs[e], gs[e], out=outs[e])
        else:
            outs[e].zero_()
    return out


@torch.library.register_fake("fxoverlap::grouped_mm")
def _grouped_mm_fake(x: Tensor, w: Tensor, group_rows: Tensor) -> Tensor:
    _check(x, w, group_rows)
    return x.new_empty(x.shape[0], w.shape[2])


@torch.library.register_fake("fxoverlap::grouped_mm_wgrad")
def _grouped_mm_wgrad_fake(x: Tensor, g: Tensor, group_rows: Tensor) -> Tensor:
    return x.new_empty(group_rows.shape[0], x.shape[1], g.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    a, b, group_rows = inputs
    # Each operand serves the gradient of the other one only.
    ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None, group_rows)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w, group_rows = ctx.saved_tensors
    x_grad = None if w is None else torch.ops.fxoverlap.grouped_mm(grad, w.transpose(1, 2), group_rows)
    w_grad = None if x is None else torch.ops.fxoverlap.grouped_mm_wgrad(x, grad, group_rows)
    return x_grad, w_grad, None


def _grouped_mm_wgrad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, g, group_rows = ctx.saved_tensors
    x_grad = None if g is None else torch.ops.fxoverlap.grouped_mm(g, grad.transpose(1, 2), group_rows)
    g_grad = None if x is None else torch.ops.fxoverlap.grouped_mm(x, grad, group_rows)
    return x_grad, g_grad, None


torch.library.register_autograd("fxoverlap::grouped_mm", _grouped_mm_backward, setup_context=_save)
torch.library.register_autograd("fxoverlap::grouped_mm_wgrad", _grouped_mm_wgrad_backward, setup_context=_save)


def grouped_mm(x: Tensor, w: Tensor, group_rows: Tensor) -> Tensor:
    """Multiply consecutive groups of rows by a matrix each: `out[rows of e] = x[rows of e] @ w[e]`.

    Args:
        x: [N, K], rows in order of their group; rows past the last group are padding and may hold anything.
        w: [E, K, M], dtype of `x`, any strides (a transposed view is not copied).
        group_rows: int64 CPU [E], rows of each group; sum at most N.

    Returns:
        [N, M], dtype of `x`; padding rows are zero, and so is the gradient of the padding rows of `x`. Under autocast
        both operands are cast first, as for any matrix product.

    Raises:
        ValueError: shapes or dtypes do not fit, or `group_rows` sums to more than N.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x, w = x.to(dtype), w.to(dtype)
    return torch.ops.fxoverlap.grouped_mm(x, w, group_rows)
