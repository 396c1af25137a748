"""The reference hybrid model of tests, demo and benchmarks: a causal language model, one layer a pattern symbol."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fxoverlap import pattern as layer_pattern
from fxoverlap.models.attention import Attention
from fxoverlap.models.mlp import MLP
from fxoverlap.models.moe import MoE


class HybridModel(nn.Module):
    """tokens int64 [batch, positions], targets int64 [batch, positions] -> loss fp32 [] (fp64 in fp64).

    The loss is the mean cross entropy plus the auxiliary losses of the MoE layers. `layers` holds one module for each
    symbol of the pattern: `*` attention, `-` SwiGLU, `E` mixture of experts; brackets do not change the model.

    Args:
        pattern: layer pattern, see `fxoverlap.pattern`.
        ffn_dim: width of the dense SwiGLU layers; None: 4 * `dim`.
        num_experts, expert_dim, top_k, router, aux_loss, z_loss, selection_bias, shared_dim: see `MoE`.
        dropout: probability, on the output of every layer before its residual.
        tied: the head uses the embedding's weight.
        group: expert-parallel process group; None: all experts are local and nothing is exchanged.
        max_positions: length of the longest sequence.
        seed: of the weights; None: they are drawn from torch's generator. One seed gives one model, on every rank and
            for every group size, a rank's experts being a slice of all.

    Raises:
        ValueError: the pattern or an argument of a layer is wrong.
    """

    def __init__(
        self,
        pattern: str,
        *,
        dim: int = 256,
        vocab_size: int = 1024,
        heads: int = 4,
        kv_heads: int = 2,
        ffn_dim: int | None = None,
        num_experts: int = 16,
        expert_dim: int = 128,
        top_k: int = 6,
        router: str = "softmax",
        aux_loss: float = 0.01,
        z_loss: float = 0.0,
        selection_bias: bool = False,
        shared_dim: int = 0,
        dropout: float = 0.0,
        tied: bool = False,
        group: dist.ProcessGroup | None = None,
        rope_theta: float = 10000.0,
        max_positions: int = 4096,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.pattern = layer_pattern.parse(pattern)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        layer: dict[str, Callable[[], nn.Module]] = {
            "*": partial(
                Attention,
                dim,
                heads,
                kv_heads,
                dropout=dropout,
                rope_theta=rope_theta,
                max_positions=max_positions,
                generator=generator,
            ),
            "-": partial(MLP, dim, ffn_dim or 4 * dim, dropout=dropout, generator=generator),
            "E": partial(
                MoE,
                dim,
                num_experts,
                expert_dim,
                top_k=top_k,
                router=router,
                aux_loss=aux_loss,
                z_loss=z_loss,
                selection_bias=selection_bias,
                shared_dim=shared_dim,
                dropout=dropout,
                group=group,
                generator=generator,
            ),
        }
        self.embed = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embed.weight, std=dim**-0.5, generator=generator)
        self.layers = nn.ModuleList(layer[symbol]() for symbol in self.pattern.symbols)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        else:
            nn.init.normal_(self.head.weight, std=dim**-0.5, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        auxiliary = []
        for layer in self.layers:
            if isinstance(layer, MoE):
                hidden, aux = layer(hidden)
                auxiliary.append(aux)
            else:
                hidden = layer(hidden)
        logits = self.head(self.norm(hidden).flatten(0, -2))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, targets.flatten())
        return sum((aux for aux in auxiliary if aux is not None), loss)
