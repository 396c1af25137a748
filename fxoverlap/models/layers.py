"""The layers of a pattern: building them by symbol, and running them one after another."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxoverlap.models.attention import Attention
from fxoverlap.models.delta import GatedDeltaNet
from fxoverlap.models.mamba import Mamba2
from fxoverlap.models.mla import LatentAttention
from fxoverlap.models.mlp import MLP
from fxoverlap.models.moe import MoE
from fxoverlap.models.tracker import LossTracker

SYMBOLS = "*+MG-E"
"""The symbols of the pattern language that there is a layer for."""


@dataclass(frozen=True, kw_only=True)
class LayerFactory:
    """Builds layers by pattern symbol, all of one model with the same arguments.

    Attributes:
        dim: width of the hidden state.
        heads: of attention, latent attention and the delta net; kv_heads: of attention.
        mla, mamba, delta: further arguments of `LatentAttention`, `Mamba2`, `GatedDeltaNet`, by name.
        ffn_dim: width of the dense SwiGLU layers; None: 4 * `dim`.
        num_experts, expert_dim, top_k, router, aux_loss, z_loss, selection_bias, shared_dim: see `MoE`.
        dropout: probability, on the output of every layer before its residual.
        tracker: of the auxiliary losses of MoE layers, see `MoE`; layers count from 0, in the order they are built in.
        group: expert-parallel process group; None: all experts are local and nothing is exchanged.
        max_positions: length of the longest row, however many sequences it packs.
        generator: of the weights, which are drawn in the order in which layers are built.
    """

    dim: int
    heads: int = 4
    kv_heads: int = 2
    mla: Mapping[str, Any] = field(default_factory=dict)
    mamba: Mapping[str, Any] = field(default_factory=dict)
    delta: Mapping[str, Any] = field(default_factory=dict)
    ffn_dim: int | None = None
    num_experts: int = 16
    expert_dim: int = 128
    top_k: int = 6
    router: str = "softmax"
    aux_loss: float = 0.01
    z_loss: float = 0.0
    selection_bias: bool = False
    shared_dim: int = 0
    dropout: float = 0.0
    tracker: LossTracker | None = None
    group: dist.ProcessGroup | None = None
    rope_theta: float = 10000.0
    max_positions: int = 4096
    generator: torch.Generator | None = None
    _built: Iterator[int] = field(default_factory=itertools.count, init=False)

    def layers(self, symbols: str) -> nn.ModuleList:
        """One new layer a symbol.

        Raises ValueError: there is no layer for a symbol, or an argument of a layer is wrong.
        """
        return nn.ModuleList(map(self.layer, symbols))

    def layer(self, symbol: str) -> nn.Module:
        """A new layer; raises as `layers`."""
        index = next(self._built)
        common: dict[str, Any] = {"dropout": self.dropout, "generator": self.generator}
        rotary: dict[str, Any] = {"rope_theta": self.rope_theta, "max_positions": self.max_positions}
        match symbol:
            case "*":
                return Attention(self.dim, self.heads, self.kv_heads, **rotary, **common)
            case "+":
                return LatentAttention(self.dim, self.heads, **rotary, **common, **self.mla)
            case "M":
                return Mamba2(self.dim, **common, **self.mamba)
            case "G":
                return GatedDeltaNet(self.dim, self.heads, **common, **self.delta)
            case "-":
                return MLP(self.dim, self.ffn_dim or 4 * self.dim, **common)
            case "E":
                return MoE(
                    self.dim,
                    self.num_experts,
                    self.expert_dim,
                    top_k=self.top_k,
                    router=self.router,
                    aux_loss=self.aux_loss,
                    z_loss=self.z_loss,
                    selection_bias=self.selection_bias,
                    shared_dim=self.shared_dim,
                    tracker=self.tracker,
                    layer=index,
                    group=self.group,
                    **common,
                )
        raise ValueError(f"LayerFactory: expected a symbol of {' '.join(SYMBOLS)}, got {symbol!r}; use one of these")


def run(layers: Iterable[nn.Module], hidden: Tensor, ids: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """The hidden state [batch, positions, dim] after layers, and the auxiliary losses [] of those that have one.

    `ids`: number of the sequence that each token is in, int64 [batch, positions]; None: each row is one sequence.
    """
    auxiliary = []
    for layer in layers:
        if isinstance(layer, MoE):
            hidden, aux = layer(hidden)
            auxiliary += [] if aux is None else [aux]
        else:
            hidden = layer(hidden) if ids is None or isinstance(layer, MLP) else layer(hidden, ids)
    return hidden, auxiliary
