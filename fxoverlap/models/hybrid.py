"""The reference hybrid model of tests, demo and benchmarks: a causal language model, one layer a pattern symbol."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxoverlap import compat
from fxoverlap import pattern as layer_pattern
from fxoverlap.models import layers, mtp
from fxoverlap.models.loss import count, mean_loss
from fxoverlap.models.tracker import LossTracker

SYMBOLS = {symbol: layer_pattern.SYMBOLS[symbol] for symbol in layers.SYMBOLS}
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

    The loss is the mean cross entropy plus the auxiliary losses of the MoE layers; targets of -100 do not count, and
    without any that does the cross entropy is 0. `layers` holds one module for each symbol of the pattern's trunk:
    `*` attention, `+` latent attention, `M` Mamba-2, `G` gated delta net, `-` SwiGLU, `E` mixture of experts; brackets
    and pipes do not change the model.

    Several sequences may be packed: `cu_seqlens`, int [sequences + 1], 0 first and batch * positions last, says where
    each begins in the tokens, row after row. Nothing passes from one sequence, or row, to another, but for the
    experts' load and the losses. Boundaries that are equal are sequences of no tokens: with them the number of
    boundaries can be the same for all microbatches, which then need one capture.

    Multi-token prediction: `mtp` holds one `MTPDepth` for each MTP part of the pattern. To the loss comes, for each,
    `mtp_weight / depths` times the mean cross entropy of its own targets, those of the model that many positions
    ahead, and the auxiliary losses of its layers. `mtp_input_mask`, bool [batch, positions], says which tokens a
    prediction may lead through: depth k at a position leads through tokens 1 to k positions ahead. Others are read, but
    the embedding is not trained on what a depth reads of them.

    Args:
        pattern: layer pattern, see `fxoverlap.pattern`.
        tied: the head uses the embedding's weight.
        mtp_weight: of the mean over depths (Megatron-LM's `mtp_loss_scaling_factor`).
        mtp_projections: 1 or 2, see `MTPDepth`.
        mtp_detach_head: the depths' losses do not train the head's weight; tied, they train it as embedding.
        mtp_detach_trunk: the depths' losses do not train trunk and embedding. With both, nothing but `mtp` is trained
            by them, which is Megatron-LM's `mtp_detach_heads`.
        per_token: the loss is multiplied by the number of targets that count, to be divided by the number of all
            microbatches with `grad_scale` (Megatron-LM's `calculate_per_token_loss`); a depth's loss by that of the
            model's targets too, not by that of its own.
        track_losses: sum the auxiliary losses of each layer in `tracker`, a `LossTracker`; else `tracker` is None.
        seed: of the weights; None: they are drawn from torch's generator. One seed gives one model, on every rank and
            for every group size, a rank's experts being a slice of all; and one trunk, with and without MTP.
        options: further arguments of `LayerFactory`, by name.

    Raises:
        ValueError: the pattern, which has no layers but those of `SYMBOLS`, or an argument of a layer is wrong; in
            forward, `cu_seqlens` or `mtp_input_mask` are of another kind.
        RuntimeError: in forward, `cu_seqlens` do not rise from 0 to the number of tokens.
    """

    def __init__(
        self,
        pattern: str,
        *,
        dim: int = 256,
        vocab_size: int = 1024,
        tied: bool = False,
        mtp_weight: float = 0.1,
        mtp_projections: int = 1,
        mtp_detach_head: bool = False,
        mtp_detach_trunk: bool = False,
        per_token: bool = False,
        track_losses: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.pattern = parse(pattern)
        self.mtp_weight, self.per_token = mtp_weight, per_token
        self.mtp_detach_head, self.mtp_detach_trunk = mtp_detach_head, mtp_detach_trunk
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        depth = self.pattern.mtp.symbols if self.pattern.mtp else ""
        physical = len(self.pattern.symbols) + self.pattern.depths * len(depth)
        self.tracker = LossTracker(physical) if track_losses else None
        factory = layers.LayerFactory(dim=dim, tracker=self.tracker, generator=generator, **options)
        self.embed = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embed.weight, std=dim**-0.5, generator=generator)
        self.layers = factory.layers(self.pattern.symbols)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        else:
            nn.init.normal_(self.head.weight, std=dim**-0.5, generator=generator)
        self.mtp = nn.ModuleList()
        for _ in range(self.pattern.depths):
            own = factory.layers(depth)
            self.mtp.append(mtp.MTPDepth(dim, own, projections=mtp_projections, generator=generator))

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor | None = None,
        mtp_input_mask: Tensor | None = None,
    ) -> Tensor:
        ids = None if cu_seqlens is None else sequence_ids(cu_seqlens, tokens)
        hidden, auxiliary = layers.run(self.layers, self.embed(tokens), ids)
        hidden = self.norm(hidden)
        loss = mean_loss(self.head(hidden.flatten(0, -2)), targets)
        read = mtp.ahead(tokens, targets, ids, mtp_input_mask)
        loss = sum([*auxiliary, *self._mtp_losses(hidden, ids, read)], loss)
        return loss * count(targets) if self.per_token else loss

    def _mtp_losses(self, hidden: Tensor, ids: Tensor | None, read: Iterable[mtp.Ahead]) -> list[Tensor]:
        """The depths' losses, weighted, each with the auxiliary losses of its layers behind it."""
        if self.mtp_detach_trunk:
            hidden = hidden.detach()
        losses = []
        for depth, each in zip(self.mtp, read, strict=False):
            embedded = self.embed(each.tokens)
            if each.mask is not None:
                embedded = torch.where(each.mask.unsqueeze(-1), embedded, embedded.detach())
            if self.mtp_detach_trunk:
                embedded = embedded.detach()
            hidden, auxiliary = depth(hidden, embedded, ids)
            assert isinstance(depth, mtp.MTPDepth)
            hidden = depth.norm(hidden)
            flat = hidden.flatten(0, -2)
            logits = F.linear(flat, self.head.weight.detach()) if self.mtp_detach_head else self.head(flat)
            losses += [mean_loss(logits, each.targets) * (self.mtp_weight / len(self.mtp)), *auxiliary]
        return losses


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
