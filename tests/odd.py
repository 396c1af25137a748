"""A model whose wiring is a function, and layers for it: what the tests of odd models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import RawMoE

Wiring = Callable[["Odd", Tensor], Any]


def moe(group: Any) -> RawMoE:
    """A residual MoE layer with list splits."""
    return RawMoE(16, 4, group)


class Dense(nn.Module):
    """`x + relu(linear(norm(x)))`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Attention(nn.Module):
    """Causal attention with one head and residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Odd(nn.Module):
    """Embedding, layers, head, cross entropy. `wire` calls the layers, and gives the hidden state for the head, or
    (hidden state, what is added to the loss), or (hidden state, what is added, further outputs)."""

    def __init__(self, wire: Wiring, *layers: nn.Module, **others: Any) -> None:
        super().__init__()
        self.wire = wire
        self.embed = nn.Embedding(32, 16)
        self.layers: Any = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32)
        for name, value in others.items():
            setattr(self, name, value)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        self.targets = targets
        made = self.wire(self, self.embed(tokens))
        del self.targets
        hidden, added, *outputs = made if type(made) is tuple else (made, 0.0)
        loss = self.loss(hidden, targets) + added
        return (loss, *outputs) if outputs else loss


def in_turn(m: Odd, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x)
    return x
