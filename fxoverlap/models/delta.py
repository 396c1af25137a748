"""Gated delta net: linear attention whose state is a matrix that fades and is corrected by every token."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fxoverlap.models.short_conv import ShortConv


class GatedDeltaNet(nn.Module):
    """Pre-norm gated delta net with residual: hidden [batch, positions, dim] -> the same shape.

    The gated delta rule is that of arXiv 2412.06464, heads and gates are those of Qwen3-Next. Each value head has a
    state S [key_dim, value_dim], zero before a sequence begins. A token with rows q and k of norm one, v, g <= 0 and
    0 < beta < 1 makes of it

        S = exp(g) * (I - beta * k^T k) S + beta * k^T v,    and gives    o = q S.

    q, k and v come from one matrix, a short convolution and SiLU; beta = sigmoid(b) and g = -exp(A_log) * softplus(a +
    dt_bias), where b, a and the gate come from the same matrix. Value head h has the q and k of key head
    h // (heads / key_heads). The layer adds `out(norm(o) * out_norm * silu(gate))` to hidden, where the norm is RMSNorm
    for each head; it undoes any factor on q, so q has none.

    With `sequence_ids` (int64 [batch, positions], non-decreasing along positions) the tokens of equal id are one
    sequence, and state and convolution begin anew with each; without, each row is one sequence.

    What follows the convolution, up to the last matrix, is in fp32 or a wider dtype of `hidden`, also under autocast.
    Gradients cannot be differentiated again.

    Args:
        heads: value heads.
        key_heads: None: as many as `heads`.
        key_dim, value_dim: width of a key head and of a value head; None: `dim` // `heads`.
        conv_width: taps of the convolution.
        chunk: tokens that are computed at once. Does not change the result: a large one costs chunk ** 2 products a
            chunk, a small one more states and more operators.

    Raises:
        ValueError: a size is not positive, or `heads` no multiple of `key_heads`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        key_heads: int | None = None,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_width: int = 4,
        chunk: int = 64,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        key_heads = heads if key_heads is None else key_heads
        key_dim = dim // max(heads, 1) if key_dim is None else key_dim
        value_dim = dim // max(heads, 1) if value_dim is None else value_dim
        sizes = {"heads": heads, "key_heads": key_heads, "key_dim": key_dim, "value_dim": value_dim, "chunk": chunk}
        if min(sizes.values()) < 1 or heads % key_heads:
            raise ValueError(
                "GatedDeltaNet: sizes must be positive and heads a multiple of key_heads, got "
                + ", ".join(f"{name}={size}" for name, size in sizes.items())
                + "; change one of them"
            )
        self.heads, self.key_heads, self.key_dim, self.chunk, self.dropout = heads, key_heads, key_dim, chunk, dropout
        self.keys, self.values = key_heads * key_dim, heads * value_dim
        self.norm = nn.RMSNorm(dim)
        self.qkv_gate_b_a = nn.Linear(dim, 2 * self.keys + 2 * self.values + 2 * heads, bias=False)
        nn.init.normal_(self.qkv_gate_b_a.weight, std=dim**-0.5, generator=generator)
        self.conv = ShortConv(2 * self.keys + self.values, conv_width, generator=generator)
        # As Mamba-2 begins: rates between 1 and 16, steps between 0.001 and 0.1, evenly in their logarithm.
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16, generator=generator).log_())
        step = torch.empty(heads).uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
        self.dt_bias = nn.Parameter(step.expm1().log())  # softplus makes it the step
        self.out_norm = nn.Parameter(torch.ones(value_dim))
        self.out = nn.Linear(self.values, dim, bias=False)
        nn.init.normal_(self.out.weight, std=self.values**-0.5, generator=generator)

    def forward(self, hidden: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
        batch, positions, _ = hidden.shape
        size = min(self.chunk, positions)
        parts = self.qkv_gate_b_a(self.norm(hidden).flatten(0, 1)).view(batch, positions, -1)
        missing = -positions % size
        if missing:  # tokens after all others change nothing for them
            parts = F.pad(parts, (0, 0, 0, missing))
            sequence_ids = None if sequence_ids is None else F.pad(sequence_ids, (0, missing), value=-1)
        qkv, gate, b, a = parts.split((2 * self.keys + self.values, self.values, self.heads, self.heads), -1)
        qkv = self.conv(qkv, sequence_ids)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            qk, v = qkv.to(dtype).split((2 * self.keys, self.values), -1)
            qk = _Normalize.apply(qk.view(batch, -1, size, 2, self.key_heads, 1, self.key_dim), False)
            qk = qk.expand(-1, -1, -1, -1, -1, self.heads // self.key_heads, -1).permute(3, 0, 4, 5, 1, 2, 6)
            q, k = qk.reshape(2, -1, size, self.key_dim).unbind()
            beta = b.to(dtype).sigmoid()
            g = F.softplus(a.to(dtype) + self.dt_bias.to(dtype)) * -self.A_log.to(dtype).exp()
            v, beta, g = (self._by_chunk(x, size) for x in (v, beta, g))
            same = None if sequence_ids is None else self._same_sequence(sequence_ids, size)
            o = _DeltaRule.apply(q, k, v, beta, g, same, (positions + missing) // size)
            o = _Normalize.apply(o, True).view(batch, self.heads, positions + missing, -1).transpose(1, 2)
            o = o * self.out_norm * F.silu(gate.to(dtype)).view_as(o)
            o = o.to(gate.dtype)
        if missing:
            o = o[:, :positions]
        out = self.out(o.reshape(batch * positions, -1))
        if self.dropout:
            out = F.dropout(out, self.dropout, self.training)
        return hidden + out.view_as(hidden)

    def _by_chunk(self, x: Tensor, size: int) -> Tensor:
        """[B, T, heads * W] -> [B * heads * T / size, size, W]."""
        width = x.shape[2] // self.heads
        return x.view(x.shape[0], -1, size, self.heads, width).permute(0, 3, 1, 2, 4).reshape(-1, size, width)

    def _same_sequence(self, ids: Tensor, size: int) -> Tensor:
        """Whether a token's sequence is that of the last token before its chunk, and of each token of its chunk.

        ids [B, T] -> bool [B * heads * T / size, size, 1 + size].
        """
        near = F.pad(ids, (1, 0)).unfold(1, size + 1, size)  # the state before the first chunk is zero, whosever it is
        same = near[..., 1:, None] == near[..., None, :]
        return same.unsqueeze(1).expand(-1, self.heads, -1, -1, -1).flatten(0, 2)


class _DeltaRule(torch.autograd.Function):
    """q, k [G, C, K], v [G, C, V], beta, g [G, C, 1], same bool [G, C, 1 + C] or None -> o [G, C, V].

    G are chunks of C tokens, those of a row and head next to each other, `chunks` of them. `same` is that of
    `GatedDeltaNet._same_sequence`.

    With S the state that comes in, D_ij = exp(sum of g after token j up to i) for j <= i and e_i = exp(sum of g up to
    i), both zero where `same` is not, and u what the tokens add to the state, each along its k (the chunkwise form of
    arXiv 2412.06464):

        (I + L) u = beta v - (beta e k) S        where L is ((beta k) k^T) * D below the diagonal
        o = (e q) S + ((q k^T) * D) u
        S of the next chunk = e_C S + (D_C k)^T u

    As u = x - w S with (I + L) [w, x] = [beta e k, beta v], the next S is an affine function of S; `_before` has all.

    The gradient is written by hand. It follows from these three equations, in which w is not: its solve is as wide as
    v, not as k and v, and it has 40 operators fewer than the derivative of what the forward computes, of some 110.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, same: Tensor | None, chunks: int
    ) -> Tensor:
        # Exponents are negative or zero: those that would not be are zero before and their results after.
        total = g.cumsum(1)
        decay, into = (total - total.mT).tril().exp().tril(), total.exp()
        if same is not None:
            into, decay = into * same[..., :1], decay * same[..., 1:]
        k_beta, k_turned = k * beta, k.mT
        lower = torch.bmm(k_beta, k_turned) * decay
        right = torch.cat((k_beta * into, v * beta), -1)
        # Substitution, and not a product of powers of L: these are large where keys are alike, and cancel. On CPU it
        # is fastest from the right, on transposed matrices, whose memory is laid out as LAPACK wants it.
        solved = torch.linalg.solve_triangular(lower.mT, right.mT, upper=True, left=False, unitriangular=True).mT
        w, u = solved.split((k.shape[2], v.shape[2]), -1)
        k_out = k_turned * decay[:, -1:]
        kept = into[:, -1:] * torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
        step = torch.baddbmm(kept, k_out, w, alpha=-1)
        state = _before(step, torch.bmm(k_out, u), chunks)
        u = torch.baddbmm(u, w, state, alpha=-1)
        weights = torch.bmm(q, k_turned) * decay
        ctx.save_for_backward(q, k, v, beta, into, decay, k_beta, lower, w, k_out, step, state, u, weights)
        ctx.chunks = chunks
        return torch.baddbmm(torch.bmm(weights, u), q * into, state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, into, decay, k_beta, lower, w, k_out, step, state, u, weights = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad_u = torch.bmm(weights.mT, grad)
            grad_state = torch.baddbmm(torch.bmm((q * into).mT, grad), w.mT, grad_u, alpha=-1)
            grad_next = _before(step.mT, grad_state, ctx.chunks, reverse=True)
            grad_u = torch.baddbmm(grad_u, k_out.mT, grad_next)
            # The gradient of the right side of the solve: so of beta * v, and with -S^T of beta * e * k.
            y = torch.linalg.solve_triangular(lower, grad_u.mT, upper=False, left=False, unitriangular=True).mT
            u_turned, state_turned, out = u.mT, state.mT, decay[:, -1:].mT
            grad_weights, minus_grad_lower = torch.bmm(grad, u_turned), torch.bmm(y, u_turned)
            grad_qk, minus_grad_kk = grad_weights * decay, (minus_grad_lower * decay).tril(-1)
            q_state, minus_k_state = torch.bmm(grad, state_turned) * into, torch.bmm(y, state_turned) * into
            grad_k_out = torch.bmm(u, grad_next.mT) * out
            grad_q = torch.baddbmm(q_state, grad_qk, k)
            minus_grad_k_beta = torch.baddbmm(minus_k_state, minus_grad_kk, k)
            grad_k = torch.baddbmm(torch.baddbmm(grad_k_out, grad_qk.mT, q), minus_grad_kk.mT, k_beta, alpha=-1)
            grad_k = torch.addcmul(grad_k, beta, minus_grad_k_beta, value=-1)
            grad_beta = (v * y).sum(-1, keepdim=True) - (k * minus_grad_k_beta).sum(-1, keepdim=True)
            # What is passed on, times its gradient: rows get, the tokens and the next state, columns give, S and the
            # tokens. What passes over token l is in rows from l and columns up to l. Sums of differences would be
            # shorter, but what cancels there leaves traces in other sequences, and at rates of thousands large ones.
            state_to_tokens = (q * q_state - k_beta * minus_k_state).sum(-1, keepdim=True)
            between_tokens = torch.addcmul(grad_weights * weights, minus_grad_lower, lower, value=-1)
            tokens_to_state = (k * grad_k_out).sum(-1, keepdim=True).mT
            state_to_state = (grad_next * state).sum((1, 2), keepdim=True) * into[:, -1:]
            to_tokens = torch.cat((state_to_tokens, between_tokens), -1)
            passed = torch.cat((to_tokens, torch.cat((state_to_state, tokens_to_state), -1)), 1)
            grad_g = passed.cumsum(-1)[..., :-1].tril().sum(1).unsqueeze(-1)
            return grad_q, grad_k, y * beta, grad_beta, grad_g, None, None


def _before(step: Tensor, add: Tensor, count: int, reverse: bool = False) -> Tensor:
    """The states S before each of `count` maps S -> step S + add, from zero: [G, K, V].

    step [G, K, K] and add [G, K, V] hold the maps of G / count rows one after the other. `reverse` takes them from the
    last to the first.

    Neighbours are composed, the states before these pairs found in the same way, and those between the two of a pair
    follow: log2(count) levels of nine operators, and at most three products a map. For 4 rows of 8 maps, K = V = 64, in
    fp32 on one thread, both directions together take 1.3 ms, and 23 operators each; a loop over the maps 0.6 ms and 30,
    but its operators grow as their number; the scan that composes maps with those 1, 2, 4 before 1.6 ms and 38.
    """
    whole = 1 << (count - 1).bit_length()
    if whole != count:
        # More maps, which come last, make pairs of all; nobody asks for their states.
        more = (0, 0, 0, 0, whole - count, 0) if reverse else (0, 0, 0, 0, 0, whole - count)
        step, add = (F.pad(x.unflatten(0, (-1, count)), more).flatten(0, 1) for x in (step, add))
        states = _before(step, add, whole, reverse).unflatten(0, (-1, whole))
        return (states[:, whole - count :] if reverse else states[:, :count]).flatten(0, 1)
    if count == 1:
        return torch.zeros_like(add)
    first, second = (1, 0) if reverse else (0, 1)
    step_1, add_1 = step[first::2], add[first::2]
    if count == 2:
        before, between = torch.zeros_like(add_1), add_1
    else:
        step_2, add_2 = step[second::2], add[second::2]
        pairs = torch.bmm(step_2, step_1), torch.baddbmm(add_2, step_2, add_1)
        before = _before(*pairs, count // 2, reverse)
        between = torch.baddbmm(add_1, step_1, before)
    return torch.stack((between, before) if reverse else (before, between), 1).flatten(0, 1)


class _Normalize(torch.autograd.Function):
    """Rows x [..., W], divided by the root of their sum, or with `rms` their mean, of squares + 1e-6: [..., W].

    Rows of zeros stay zero and have finite gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rms: bool) -> Tensor:
        squares = x.square()
        scale = ((squares.mean(-1, keepdim=True) if rms else squares.sum(-1, keepdim=True)) + 1e-6).rsqrt()
        out = x * scale
        ctx.save_for_backward(out, scale)
        ctx.width = x.shape[-1] if rms else 1
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out, scale = ctx.saved_tensors
        along = (out * grad).sum(-1, keepdim=True)
        return torch.addcmul(grad, out, along, value=-1 / ctx.width) * scale, None
