"""Causal grouped-query attention with rotary position embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Pre-norm attention with residual: hidden [batch, positions, dim] -> the same shape.

    Query, key and value come from one matrix. `sequence_ids` int64 [batch, positions] packs sequences into a row:
    tokens of equal id are one sequence, and attend to no other. Positions run on through the row, because rotary
    attention depends on their differences only; so it is the row that `max_positions` limits.

    Raises:
        ValueError: `dim` is no multiple of 2 * `heads`, or `heads` none of `kv_heads`; in forward, more positions
            than `max_positions`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        *,
        dropout: float = 0.0,
        rope_theta: float = 10000.0,
        max_positions: int = 4096,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if dim % (2 * heads) or heads % kv_heads:
            raise ValueError(
                "Attention: dim must be a multiple of 2 * heads and heads of kv_heads, "
                f"got dim={dim}, heads={heads}, kv_heads={kv_heads}; change one of them"
            )
        self.heads, self.kv_heads, self.head_dim, self.dropout = heads, kv_heads, dim // heads, dropout
        self.norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        for linear in (self.qkv, self.out):
            nn.init.normal_(linear.weight, std=dim**-0.5, generator=generator)
        # A table: made in forward, it would be ten more nodes in the graph of every layer.
        cos, sin = rotary_table(max_positions, self.head_dim, rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, hidden: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
        batch, positions, _ = hidden.shape
        check_positions("Attention", positions, len(self.cos))
        # Matrices through the products, and one transposition for q, k and v: each view less is two nodes less.
        qkv = self.qkv(self.norm(hidden).flatten(0, 1))
        qkv = qkv.view(batch, positions, -1, self.head_dim).transpose(1, 2)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 1)
        q, k = rotate(qk, self.cos[:positions], self.sin[:positions]).split((self.heads, self.kv_heads), 1)
        out = causal_attention(q, k, v, sequence_ids)
        out = self.out(out.transpose(1, 2).reshape(batch * positions, -1))
        if self.dropout:
            out = F.dropout(out, self.dropout, self.training)
        return hidden + out.view_as(hidden)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, sequence_ids: Tensor | None, scale: float | None = None
) -> Tensor:
    """Softmax attention of each token to itself and what precedes it, in its row or in its sequence.

    q, k, v are [batch, heads, positions, width]; k and v may have fewer heads, of which each serves as many of q's.
    `sequence_ids` int64 [batch, positions], or None: each row is one sequence. `scale` multiplies the scores, None:
    width ** -0.5. On CPU the fused kernel runs only if q, k and v are of one width.

    With `sequence_ids` a mask [batch, 1, positions, positions] of q's dtype is made, and kept for the backward.
    """
    # A mask takes the place of `is_causal`, so it is causal itself.
    mask = None if sequence_ids is None else (sequence_ids[:, None, :, None] == sequence_ids[:, None, None]).tril()
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)


def check_positions(layer: str, positions: int, limit: int) -> None:
    """Raise ValueError if a row has more positions than the rotary table of `layer`."""
    if positions > limit:
        raise ValueError(
            f"{layer}: sequences must have at most max_positions={limit} tokens, got {positions}; "
            "build the model with more"
        )


def rotary_table(positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for `rotate`, each fp32 [positions, head_dim]."""
    frequency = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(positions)[:, None] * torch.cat((-frequency, frequency))
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + width / 2) of `x` [..., positions, width] by the angles of `rotary_table`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
