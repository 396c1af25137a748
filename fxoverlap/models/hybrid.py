"""The reference hybrid model of tests, demo and benchmarks: a causal language model, one layer a pattern symbol."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fxoverlap import compat
from fxoverlap import pattern as layer_pattern
from fxoverlap.models.attention import Attention
from fxoverlap.models.delta import GatedDeltaNet
from fxoverlap.models.mamba import Mamba2
from fxoverlap.models.mla import LatentAttention
from fxoverlap.models.mlp import MLP
from fxoverlap.models.moe import MoE

SYMBOLS = {symbol: layer_pattern.SYMBOLS[symbol] for symbol in "*+MG-E"}
"""The symbols of the pattern language that `HybridModel` has a layer for, with what they stand for."""


def parse(text: str) -> layer_pattern.Pattern:
    """Parse the pattern of a `HybridModel`.

    Raises ValueError: the text is not a pattern, or it has a symbol that is not in `SYMBOLS`.
    """
    pattern = layer_pattern.parse(text)
    missing = [name for symbol, name in layer_pattern.SYMBOLS.items() if symbol in text and symbol not in SYMBOLS]
    if missing:
        raise ValueError(
            f"HybridModel: the pattern '{text}' has {', '.join(missing)}, expected any of {' '.join(SYMBOLS)}; the "
            "reference model has no other layers, use a model of your own for them"
        )
    return pattern


class HybridModel(nn.Module):
    """tokens int64 [batch, positions], targets int64 [batch, positions] -> loss fp32 [] (fp64 in fp64).

    The loss is the mean cross entropy plus the auxiliary losses of the MoE layers; targets of -100 do not count.
    `layers` holds one module for each symbol of the pattern: `*` attention, `+` latent attention, `M` Mamba-2, `G`
    gated delta net, `-` SwiGLU, `E` mixture of experts; brackets do not change the model.

    Several sequences may be packed: `cu_seqlens`, int [sequences + 1], 0 first and batch * positions last, says where
    each begins in the tokens, row after row. Nothing passes from one sequence, or row, to another, but for the
    experts' load and the losses. Boundaries that are equal are sequences of no tokens: with them the number of
    boundaries can be the same for all microbatches, which then need one capture.

    Args:
        pattern: layer pattern, see `fxoverlap.pattern`.
        heads: of attention, latent attention and the delta net; kv_heads: of attention.
        mla, mamba, delta: further arguments of `LatentAttention`, `Mamba2`, `GatedDeltaNet`, by name.
        ffn_dim: width of the dense SwiGLU layers; None: 4 * `dim`.
        num_experts, expert_dim, top_k, router, aux_loss, z_loss, selection_bias, shared_dim: see `MoE`.
        dropout: probability, on the output of every layer before its residual.
        tied: the head uses the embedding's weight.
        group: expert-parallel process group; None: all experts are local and nothing is exchanged.
        max_positions: length of the longest row, however many sequences it packs.
        seed: of the weights; None: they are drawn from torch's generator. One seed gives one model, on every rank and
            for every group size, a rank's experts being a slice of all.

    Raises:
        ValueError: the pattern, which has no layers but those of `SYMBOLS`, or an argument of a layer is wrong; in
            forward, `cu_seqlens` are of another kind.
        RuntimeError: in forward, `cu_seqlens` do not rise from 0 to the number of tokens.
    """

    def __init__(
        self,
        pattern: str,
        *,
        dim: int = 256,
        vocab_size: int = 1024,
        heads: int = 4,
        kv_heads: int = 2,
        mla: Mapping[str, Any] | None = None,
        mamba: Mapping[str, Any] | None = None,
        delta: Mapping[str, Any] | None = None,
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
        self.pattern = parse(pattern)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        common: dict[str, Any] = {"dropout": dropout, "generator": generator}
        rotary: dict[str, Any] = {"rope_theta": rope_theta, "max_positions": max_positions}
        layer: dict[str, Callable[[], nn.Module]] = {
            "*": lambda: Attention(dim, heads, kv_heads, **rotary, **common),
            "+": lambda: LatentAttention(dim, heads, **rotary, **common, **(mla or {})),
            "M": lambda: Mamba2(dim, **common, **(mamba or {})),
            "G": lambda: GatedDeltaNet(dim, heads, **common, **(delta or {})),
            "-": lambda: MLP(dim, ffn_dim or 4 * dim, **common),
            "E": lambda: MoE(
                dim,
                num_experts,
                expert_dim,
                top_k=top_k,
                router=router,
                aux_loss=aux_loss,
                z_loss=z_loss,
                selection_bias=selection_bias,
                shared_dim=shared_dim,
                group=group,
                **common,
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

    def forward(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        hidden = self.embed(tokens)
        ids = None if cu_seqlens is None else sequence_ids(cu_seqlens, tokens)
        auxiliary = []
        for layer in self.layers:
            if isinstance(layer, MoE):
                hidden, aux = layer(hidden)
                auxiliary.append(aux)
            else:
                hidden = layer(hidden) if ids is None or isinstance(layer, MLP) else layer(hidden, ids)
        logits = self.head(self.norm(hidden).flatten(0, -2))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, targets.flatten())
        return sum((aux for aux in auxiliary if aux is not None), loss)


def sequence_ids(cu_seqlens: Tensor, tokens: Tensor) -> Tensor:
    """The number of the sequence that each token [batch, positions] is in, from 0: int64, of the same shape.

    Raises ValueError unless `cu_seqlens` are integers [sequences + 1]; RuntimeError, where it runs, unless they rise
    from 0 to the number of tokens.
    """
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "HybridModel: cu_seqlens must be int32 or int64 [sequences + 1], "
            f"got {cu_seqlens.dtype} {list(cu_seqlens.shape)}; give the boundaries of one or more sequences"
        )
    ends = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == tokens.numel())
    compat.check_data(
        ends & (cu_seqlens.diff() >= 0).all(),
        f"HybridModel: cu_seqlens must rise from 0 to the number of tokens, {tokens.numel()}; give every boundary",
    )
    positions = torch.arange(tokens.numel(), device=tokens.device)
    return torch.searchsorted(cu_seqlens[1:], positions, right=True).view(tokens.shape)
