"""Dense SwiGLU layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up in one matrix: [..., dim] -> [..., dim]."""

    def __init__(self, dim: int, hidden: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        nn.init.normal_(self.gate_up.weight, std=dim**-0.5, generator=generator)
        nn.init.normal_(self.down.weight, std=hidden**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class MLP(nn.Module):
    """Pre-norm SwiGLU of width `ffn_dim` with residual: hidden [..., dim] -> [..., dim]."""

    def __init__(
        self, dim: int, ffn_dim: int, *, dropout: float = 0.0, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.RMSNorm(dim)
        self.swiglu = SwiGLU(dim, ffn_dim, generator=generator)

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.swiglu(self.norm(hidden).flatten(0, -2))  # one matrix: a view less than nodes around each product
        if self.dropout:
            out = F.dropout(out, self.dropout, self.training)
        return hidden + out.view_as(hidden)
