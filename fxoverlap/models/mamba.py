"""Mamba-2: a selective state space layer, computed chunk by chunk."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxoverlap.models.short_conv import ShortConv


class Mamba2(nn.Module):
    """Pre-norm Mamba-2 layer with residual: hidden [batch, positions, dim] -> the same shape.

    For each head, with x_t [head_dim], B_t and C_t [state_dim] of its group, and dt_t = softplus(raw + dt_bias):

        state_t = exp(-exp(A_log) * dt_t) * state_(t-1) + dt_t * B_t x_t^T
        y_t = C_t^T state_t + D * x_t

    x, B and C have gone through one `ShortConv`. The result is `out(norm(y * silu(z)) * gated_norm)`, where each group
    has a norm of its own. It is computed by the chunks of "Transformers are SSMs" (arXiv 2405.21060, section 6): inside
    a chunk as attention with decays for a mask, between chunks through their states. Decays are fp32 also in a bf16
    model (fp64 in fp64).

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
        y = self._scan(xbc, dt, ids, chunks) * F.silu(z)
        # Small steps make y small, for which the epsilon is larger than RMSNorm's own.
        y = y.unflatten(1, (self.groups, -1))
        y = F.rms_norm(y, y.shape[-1:], eps=1e-5).flatten(1)
        out = self.out(y * self.gated_norm).view(batch, -1, dim)
        if padding:
            out = out[:, :positions]
        if self.dropout:
            out = F.dropout(out, self.dropout, self.training)
        return hidden + out

    def _scan(self, xbc: Tensor, dt: Tensor, ids: Tensor | None, chunks: int) -> Tensor:
        """x, B and C [batch, positions, channels], raw dt [batch * positions, heads] -> y [batch * positions, inner].

        Tensors inside are [batch, groups, heads of a group, chunks, i, j], as `ids` are: i is a position of the chunk,
        j another one or a channel. Matrix products take the dimensions before i as one. Comments have the letters and
        section numbers of the paper.
        """
        batch, positions, _ = xbc.shape
        size = positions // chunks
        groups, share, state, width = self.groups, self.heads // self.groups, self.state_dim, self.head_dim
        dtype, wide = xbc.dtype, torch.promote_types(xbc.dtype, torch.float32)

        x, b, c = xbc.split((self.heads * width, groups * state, groups * state), -1)
        x = x.view(batch, positions, self.heads, width).transpose(1, 2).reshape(-1, size, width)
        b, c = (each.view(batch, chunks, size, groups, 1, state).permute(0, 3, 4, 1, 2, 5) for each in (b, c))

        dt = (dt.to(wide) + self.dt_bias.to(wide)).view(batch, chunks, size, groups, share, 1).permute(0, 3, 4, 1, 2, 5)
        # The least number keeps the logarithm finite where softplus is 0.
        dt = F.softplus(dt) + torch.finfo(wide).tiny
        a = -self.A_log.to(wide).exp().view(groups, share, 1, 1, 1)
        # exp(log_decay[i]) = A_i ... A_0, and exp(log_decay[i] - log_source[j]) = A_i ... A_(j+1) dt_j.
        log_decay = (dt * a).cumsum(-2)
        log_source = log_decay - dt.log()
        log_chunk = log_decay[..., -1:, :]
        log_end = log_chunk.squeeze(-1).cumsum(-2)  # of each chunk, from the beginning of the first
        log_begin = F.pad(log_end, (0, 0, 1, -1))
        from_begin, to_end = log_decay.exp(), (log_chunk - log_source).exp()

        # To be added to exponents: the exponential of what is masked may be inf, and inf * 0 in the backward is nan.
        future = torch.full((size, size), -torch.inf, dtype=wide, device=x.device).triu(1)
        later = torch.full((chunks, chunks), -torch.inf, dtype=wide, device=x.device).triu()
        if ids is not None:
            first_id, last_id = ids[..., :1, :], ids[..., -1:, :]
            future = future.masked_fill(ids != ids.mT, -torch.inf)
            later = later.masked_fill(first_id.squeeze(-1) != last_id.squeeze(-1).mT, -torch.inf)
            from_begin, to_end = from_begin * (ids == first_id), to_end * (ids == last_id)

        # Diagonal blocks (6.1): (L * C B^T) X, dt being in L.
        scores = torch.bmm(c.flatten(0, 3), b.flatten(0, 3).mT).view(batch, groups, 1, chunks, size, size)
        mix = scores * (log_decay - log_source.mT + future).exp()
        y = torch.bmm(mix.to(dtype).flatten(0, 3), x)
        # Right factors (6.2): what each chunk adds to the state, decayed to its end.
        states = torch.bmm((to_end * b).to(dtype).flatten(0, 3).mT, x)
        # Center factors: the state before each chunk, of what the chunks before added.
        carry = (log_begin - log_end.mT + later).exp().to(dtype).flatten(0, 2)
        states = torch.bmm(carry, states.view(-1, chunks, state * width)).view(-1, state, width)
        # Left factors: what each position reads of that state.
        y = torch.baddbmm(y, (from_begin * c).to(dtype).flatten(0, 3), states)

        # D x, past the state.
        x, y = (each.view(batch, self.heads, positions, width) for each in (x, y))
        y = torch.addcmul(y, x, self.D.to(dtype).view(-1, 1, 1))
        return y.transpose(1, 2).reshape(batch * positions, -1)
