"""A small model with multi-token prediction whose layers, depths and their names a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxoverlap.ir import ChunkGraph


class Depth(nn.Module):
    """Norms, projection, layers, and a norm that the model applies."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.hidden_norm, self.token_norm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.proj = nn.Linear(32, 16)
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(16)

    def forward(self, hidden: Tensor, embedded: Tensor, others: Sequence[nn.Module] = ()) -> Tensor:
        x = self.proj(torch.cat((self.hidden_norm(hidden), self.token_norm(embedded)), -1))
        for layer in (*others, *self.layers):
            x = layer(x)
        return x


class Block(nn.Module):
    """A depth that computes by itself: `tanh(linear(hidden + embedded))`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden + embedded))


class Predicting(nn.Module):
    """Tokens, targets int64 [1, positions] -> loss. The heads of all depths run behind the main one.

    Args:
        layers: of the trunk.
        depths: modules of hidden and embedded state with a child `norm`.
        edit: changes the hidden state that a depth has made, before its norm.
        last_norm: False: the depths go on from before the final norm, and not from behind it.
        borrowed: so many of the trunk's layers, its last ones, run in each depth too, before its own.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        depths: Iterable[nn.Module],
        edit: Callable[[Tensor], Tensor] = lambda x: x,
        last_norm: bool = True,
        borrowed: int = 0,
    ) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(32, 16), nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32)
        self.mtp: Any = nn.ModuleList(depths)
        self.edit, self.last_norm, self.borrowed = edit, last_norm, borrowed

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        normed = self.norm(x)
        loss = self._loss(normed, targets)
        x = normed if self.last_norm else x
        for depth in self.mtp:
            tokens, targets = (F.pad(each[:, 1:], (0, 1)) for each in (tokens, targets))
            others = [self.layers[len(self.layers) - self.borrowed + i] for i in range(self.borrowed)]
            x = self.edit(depth(x, self.embed(tokens), others) if others else depth(x, self.embed(tokens)))
            normed = depth.norm(x)
            loss = loss + self._loss(normed, targets) * 0.1
            x = normed if self.last_norm else x
        return loss

    def _loss(self, normed: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(normed).flatten(0, 1), targets.flatten())


def needs(chunk: ChunkGraph) -> dict[str, set[str]]:
    """Node -> the nodes whose values it reads."""
    made_by = {value: node.name for node in chunk.nodes for value in node.writes}
    return {node.name: {made_by[value] for value in node.reads if value in made_by} for node in chunk.nodes}
