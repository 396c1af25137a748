"""Causal multi-head latent attention, in its explicit and its absorbed form."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxoverlap.models.attention import causal_attention, check_positions, rotary_table, rotate


class LatentAttention(nn.Module):
    """Pre-norm latent attention with residual: hidden [batch, positions, dim] -> the same shape.

    Keys and values of all heads are made of one latent of width `kv_rank`, queries of one of width `q_rank`, each
    RMS-normalised. A head's query and key have `head_dim` features without position and `rope_dim` rotary ones; the
    rotary key does not come from the latent, and all heads share it. Scores are divided by
    sqrt(head_dim + rope_dim). DeepSeek-V2, arXiv 2405.04434, section 2.1.

    `absorbed` is the same function of the same parameters in another order of products: the matrix that makes keys of
    the latent is applied to the queries instead, the one that makes values to the result, and attention runs with one
    key and value head, the latent beside the rotary key.

    `sequence_ids` is what it is for `Attention`.

    Args:
        q_rank: width of the queries' latent; None or 0: queries are made of hidden itself.
        kv_rank: width of the keys' and values' latent; None: dim / 4.
        head_dim: None: dim / heads.
        rope_dim: even; None: head_dim / 2, made even.
        value_dim: width of a head's value; None: `head_dim`.
        max_positions: length of the longest row.

    Raises:
        ValueError: a size is not positive, `rope_dim` is odd, or `head_dim` is None and `heads` does not divide `dim`;
            in forward, more positions than `max_positions`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        q_rank: int | None = None,
        kv_rank: int | None = None,
        head_dim: int | None = None,
        rope_dim: int | None = None,
        value_dim: int | None = None,
        absorbed: bool = False,
        dropout: float = 0.0,
        rope_theta: float = 10000.0,
        max_positions: int = 4096,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None and (heads < 1 or dim % heads):
            raise ValueError(
                f"LatentAttention: dim must be a multiple of heads, got dim={dim}, heads={heads}; "
                "change one of them or give head_dim"
            )
        head_dim = dim // heads if head_dim is None else head_dim
        value_dim = head_dim if value_dim is None else value_dim
        rope_dim = max(2, head_dim // 4 * 2) if rope_dim is None else rope_dim
        kv_rank = max(1, dim // 4) if kv_rank is None else kv_rank
        q_rank = q_rank or 0
        sizes = {"heads": heads, "kv_rank": kv_rank, "head_dim": head_dim, "value_dim": value_dim, "rope_dim": rope_dim}
        if min(sizes.values()) < 1 or q_rank < 0 or rope_dim % 2:
            got = ", ".join(f"{name}={size}" for name, size in (sizes | {"q_rank": q_rank}).items())
            raise ValueError(
                "LatentAttention: sizes must be positive, q_rank may be 0, and rope_dim must be even, "
                f"got {got}; change what is not"
            )
        self.heads, self.head_dim, self.rope_dim, self.value_dim = heads, head_dim, rope_dim, value_dim
        self.q_rank, self.kv_rank, self.absorbed, self.dropout = q_rank, kv_rank, absorbed, dropout
        self.norm = nn.RMSNorm(dim)
        self.q_down = nn.Linear(dim, q_rank, bias=False) if q_rank else None
        self.q_norm = nn.RMSNorm(q_rank) if q_rank else None
        self.q_up = nn.Linear(q_rank or dim, heads * (head_dim + rope_dim), bias=False)
        self.kv_down = nn.Linear(dim, kv_rank + rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(kv_rank)
        self.kv_up = nn.Linear(kv_rank, heads * (head_dim + value_dim), bias=False)
        self.out = nn.Linear(heads * value_dim, dim, bias=False)
        for linear in (self.q_down, self.q_up, self.kv_down, self.kv_up, self.out):
            if linear is not None:
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5, generator=generator)
        cos, sin = rotary_table(max_positions, rope_dim, rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, hidden: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
        batch, positions, _ = hidden.shape
        check_positions("LatentAttention", positions, len(self.cos))
        q = x = self.norm(hidden).flatten(0, 1)
        if self.q_down is not None and self.q_norm is not None:
            q = self.q_norm(self.q_down(x))
        # Not in one matrix with q, which would be kept for as long as the latent is, a view beside it.
        latent, k_rope = self.kv_down(x).split((self.kv_rank, self.rope_dim), 1)
        cos, sin = self.cos[:positions], self.sin[:positions]
        # Heads before batch, as the absorbed form's products take it; attention gets a transposition.
        q = self.q_up(q).view(batch, positions, self.heads, -1).permute(2, 0, 1, 3)
        q, q_rope = q.split((self.head_dim, self.rope_dim), -1)
        q_rope, k_rope = rotate(q_rope, cos, sin), rotate(k_rope.view(batch, 1, positions, -1), cos, sin)
        attend = self._absorbed if self.absorbed else self._explicit
        out = self.out(attend(q, q_rope, self.kv_norm(latent), k_rope, sequence_ids))
        if self.dropout:
            out = F.dropout(out, self.dropout, self.training)
        return hidden + out.view_as(hidden)

    def _explicit(
        self, q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, sequence_ids: Tensor | None
    ) -> Tensor:
        """Attention with the keys and values of every head.

        Takes q [heads, batch, positions, head_dim], q_rope [heads, batch, positions, rope_dim], the normalised latent
        [batch * positions, kv_rank], k_rope [batch, 1, positions, rope_dim].
        Gives [batch * positions, heads * value_dim].
        """
        _, batch, positions, _ = q.shape
        kv = self.kv_up(latent).view(batch, positions, self.heads, -1).transpose(1, 2)
        k, v = kv.split((self.head_dim, self.value_dim), -1)
        q = torch.cat((q, q_rope), -1).transpose(0, 1)
        k = torch.cat((k, k_rope.expand(-1, self.heads, -1, -1)), -1)
        # A fused kernel takes one width. Zeros behind a query and key add nothing to their score, those behind a value
        # are cut off.
        width = max(q.shape[-1], self.value_dim)
        q, k, v = (_widen(x, width) for x in (q, k, v))
        out = causal_attention(q, k, v, sequence_ids, self._scale)
        return out[..., : self.value_dim].transpose(1, 2).reshape(batch * positions, -1)

    def _absorbed(
        self, q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, sequence_ids: Tensor | None
    ) -> Tensor:
        """`_explicit` with attention over latents."""
        _, batch, positions, _ = q.shape
        to_k, to_v = self.kv_up.weight.view(self.heads, -1, self.kv_rank).split((self.head_dim, self.value_dim), 1)
        q = torch.bmm(q.flatten(1, 2), to_k).view(self.heads, batch, positions, -1)
        q = torch.cat((q, q_rope), -1).transpose(0, 1)
        # Values are what keys are, for one width; what attention makes of the rotary part is cut off.
        kv = torch.cat((latent.view(batch, 1, positions, -1), k_rope), -1)
        out = causal_attention(q, kv, kv, sequence_ids, self._scale)[..., : self.kv_rank]
        out = torch.bmm(out.transpose(0, 1).flatten(1, 2), to_v.transpose(1, 2))
        return out.transpose(0, 1).flatten(1)

    @property
    def _scale(self) -> float:
        """Of the scores, in both forms."""
        return float((self.head_dim + self.rope_dim) ** -0.5)


def _widen(x: Tensor, width: int) -> Tensor:
    """`x` [..., n] with zeros behind it: [..., width]."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
