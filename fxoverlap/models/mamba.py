"""Mamba-2: a selective state space layer, computed chunk by chunk."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fxoverlap.models.short_conv import ShortConv


class Mamba2(nn.Module):
    """Pre-norm Mamba-2 layer with residual: hidden [batch, positions, dim] -> the same shape.

    For each head, with x_t [head_dim], B_t and C_t [state_dim] of its group, and dt_t = softplus(raw + dt_bias):

        state_t = exp(-exp(A_log) * dt_t) * state_(t-1) + dt_t * B_t x_t^T
        y_t = C_t^T state_t + D * x_t

    x, B and C have gone through one `ShortConv`. The result is `out(norm(y * silu(z)) * gated_norm)`, where each group
    has a norm of its own. It is computed by the chunks of "Transformers are SSMs" (arXiv 2405.21060, section 6): inside
    a chunk as attention with decays for a mask, between chunks through their states. Decays are fp32 also in a bf16
    model (fp64 in fp64). Gradients cannot be differentiated again.

    With `sequence_ids` int64 [batch, positions], non-decreasing along positions, state and convolution start anew in
    each sequence.

    Args:
        expand: heads * head_dim is expand * dim.
        head_dim: None: 64, or a quarter of expand * dim if that is less.
        state_dim: None: 128, or a quarter of dim if that is less.
        groups: of heads that have B, C and norm in common.
        conv_width: taps of the convolution.
        chunk: most positions of a chunk.

    Raises:
        ValueError: `head_dim` does not divide expand * dim, or `groups` the number of heads, or a size is below 1.
    """

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,
        head_dim: int | None = None,
        state_dim: int | None = None,
        groups: int = 1,
        conv_width: int = 4,
        chunk: int = 64,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        inner = expand * dim
        head_dim = min(64, max(1, inner // 4)) if head_dim is None else head_dim
        state_dim = min(128, max(1, dim // 4)) if state_dim is None else state_dim
        if min(inner, head_dim, state_dim, groups, chunk) < 1 or inner % head_dim or inner // head_dim % groups:
            raise ValueError(
                "Mamba2: sizes must be positive, head_dim divide expand * dim and groups the number of heads, got "
                f"dim={dim}, expand={expand}, head_dim={head_dim}, state_dim={state_dim}, groups={groups}, "
                f"chunk={chunk}; change one of them"
            )
        self.heads, self.head_dim, self.state_dim, self.groups = inner // head_dim, head_dim, state_dim, groups
        self.chunk, self.dropout = chunk, dropout
        self.norm = nn.RMSNorm(dim)
        self.sizes = (inner, inner + 2 * groups * state_dim, self.heads)
        self.zxbcdt = nn.Linear(dim, sum(self.sizes), bias=False)
        self.conv = ShortConv(self.sizes[1], conv_width, bias=True, generator=generator)
        uniform = torch.rand(2, self.heads, generator=generator)
        self.A_log = nn.Parameter((1 + 15 * uniform[0]).log())
        dt = (math.log(1e-3) + uniform[1] * math.log(1e2)).exp()
        self.dt_bias = nn.Parameter(dt + (-(-dt).expm1()).log())  # softplus of it is dt
        self.D = nn.Parameter(torch.ones(self.heads))
        self.gated_norm = nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, dim, bias=False)
        nn.init.normal_(self.zxbcdt.weight, std=dim**-0.5, generator=generator)
        nn.init.normal_(self.out.weight, std=inner**-0.5, generator=generator)

    def forward(self, hidden: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
        batch, positions, dim = hidden.shape
        # Chunks of one size, which pads with less than one position a chunk. These come last, so nothing sees them.
        chunks = -(-positions // self.chunk)
        size = -(-positions // chunks)
        padding = chunks * size - positions
        x, ids = self.norm(hidden), sequence_ids
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
            ids = None if ids is None else F.pad(ids, (0, padding))
        z, xbc, dt = self.zxbcdt(x.flatten(0, 1)).split(self.sizes, 1)
        xbc = self.conv(xbc.view(batch, chunks * size, -1), ids)
        if ids is not None:
            ids = ids.view(batch, 1, 1, chunks, size, 1)
        y = self._scan(xbc, dt, ids, chunks)
        y = _GatedNorm.apply(y, F.silu(z), self.groups) * self.gated_norm
        out = self.out(y).view(batch, -1, dim)
        if padding:
            out = out[:, :positions]
        if self.dropout:
            out = F.dropout(out, self.dropout, self.training)
        return hidden + out

    def _scan(self, xbc: Tensor, dt: Tensor, ids: Tensor | None, chunks: int) -> Tensor:
        """x, B and C [batch, positions, channels], raw dt [batch * positions, heads] -> y [batch, positions, heads, p].

        All else is [batch, groups, heads of a group, chunks, positions of a chunk, ...], as `ids` are, or for products,
        [these but the last two, ...].
        """
        batch, positions, _ = xbc.shape
        size = positions // chunks
        g, h, n, p = self.groups, self.heads // self.groups, self.state_dim, self.head_dim
        dtype, wide = xbc.dtype, torch.promote_types(xbc.dtype, torch.float32)
        x, b, c = xbc.split((g * h * p, g * n, g * n), -1)
        x = x.view(batch, positions, g * h, p).transpose(1, 2).reshape(-1, size, p)
        b, c = (each.view(batch, chunks, size, g, 1, n).permute(0, 3, 4, 1, 2, 5) for each in (b, c))
        scores = torch.bmm(c.reshape(-1, size, n), b.reshape(-1, size, n).mT).view(batch, g, 1, chunks, size, size)

        # Contiguous, as its gradient is: a trace has softplus's gradient in the layout of the input, where they differ.
        dt = (dt.to(wide) + self.dt_bias.to(wide)).view(batch, chunks, size, g, h, 1).permute(0, 3, 4, 1, 2, 5)
        # The least number keeps the logarithm finite where softplus is 0.
        dt = F.softplus(dt.contiguous()) + torch.finfo(wide).tiny
        log = (dt * -self.A_log.to(wide).exp().view(g, h, 1, 1, 1)).cumsum(-2)
        # exp(log[i] - source[j]) is how much of x[j] is in the state at i, exp(log[i]) how much of the state before.
        source = log - dt.log()
        last = log[..., -1:, :]
        total = last.cumsum(-3).squeeze(-1)
        into, out_of = log.exp(), (last - source).exp()

        future = torch.full((size, size), -torch.inf, dtype=wide, device=x.device).triu(1)
        later = torch.full((chunks, chunks), -torch.inf, dtype=wide, device=x.device).triu()
        if ids is not None:
            first_id, last_id = ids[..., :1, :], ids[..., -1:, :]
            future = future.masked_fill(ids != ids.mT, -torch.inf)
            later = later.masked_fill(first_id.squeeze(-1) != last_id.squeeze(-1).mT, -torch.inf)
            into, out_of = into * (ids == first_id), out_of * (ids == last_id)

        mix = _Mix.apply(scores, log, source, self.D.to(wide).view(g, h, 1, 1, 1), future).view(-1, size, size)
        carry = (F.pad(total, (0, 0, 1, -1)) - total.mT + later).exp().to(dtype).view(-1, chunks, chunks)
        # The decays come first, for the product to have their layout.
        b = (out_of * b).to(dtype).view(-1, size, n)
        c = (into * c).to(dtype).view(-1, size, n)
        states = torch.bmm(b.mT, x).view(-1, chunks, n * p)
        states = torch.bmm(carry, states).view(-1, n, p)
        y = torch.baddbmm(torch.bmm(mix, x), c, states)
        return y.view(batch, g * h, positions, p).transpose(1, 2)


class _Mix(torch.autograd.Function):
    """The matrix between the x and the y of a chunk: `scores[i, j] * exp(rise[i] - fall[j] + mask[i, j])`, plus `skip`
    on the diagonal.

    `rise` and `fall` are [..., size, 1]; `mask` [..., size, size] is 0 or -inf. In the dtype of `scores`. What autograd
    makes of it has twice the operations: the gradients of exponential and product have a factor in common.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, rise: Tensor, fall: Tensor, skip: Tensor, mask: Tensor) -> Tensor:
        decay = (rise - fall.mT + mask).exp()
        ctx.save_for_backward(scores, decay)
        diagonal = skip * torch.eye(mask.shape[-1], dtype=skip.dtype, device=skip.device)
        return torch.addcmul(diagonal, scores.to(decay.dtype), decay).to(scores.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        scores, decay = ctx.saved_tensors
        to_scores = grad * decay
        to_exponent = to_scores * scores
        to_skip = grad.diagonal(dim1=-2, dim2=-1).sum((0, 3, 4), dtype=decay.dtype)
        return (
            to_scores.sum(2, keepdim=True).to(scores.dtype),
            to_exponent.sum(-1, keepdim=True),
            -to_exponent.sum(-2, keepdim=True).mT,
            to_skip.view(*to_skip.shape, 1, 1, 1),
            None,
        )


class _GatedNorm(torch.autograd.Function):
    """`y * gate` over its root mean square in each group of channels: y [B, T, H, P], gate [B * T, H * P] -> gate's.

    Half as many operations as autograd makes of it. `EPS` is added to the mean square, which small steps make small.
    """

    EPS = 1e-5

    @staticmethod
    def forward(ctx: Any, y: Tensor, gate: Tensor, groups: int) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        # The gate comes first, for the product to have its layout.
        product = (gate.view(y.shape) * y).view(len(gate), groups, -1).to(wide)
        scale = (product.square().mean(-1, keepdim=True) + _GatedNorm.EPS).rsqrt()
        normed = (product * scale).to(y.dtype)
        ctx.save_for_backward(y, gate, normed, scale)
        return normed.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        y, gate, normed, scale = ctx.saved_tensors
        grad = grad.view(normed.shape)
        along = (grad * normed).mean(-1, keepdim=True, dtype=scale.dtype)
        grad = (torch.addcmul(grad.to(scale.dtype), normed.to(scale.dtype), along, value=-1) * scale).to(y.dtype)
        grad = grad.view(y.shape)
        return gate.view(y.shape) * grad, (grad * y).view(gate.shape), None
