"""Multi-token prediction: after the model, depth k of it predicts the token k + 1 positions ahead.

Depths follow one another. Depth k (from 1) projects the hidden state of the depth before it, or of the trunk, together
with the embedding of the token k positions ahead, and runs layers of its own; head and embedding are the model's.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2), whose loss of a depth is divided by the length of the sequence;
Megatron-LM, `megatron/core/transformer/multi_token_prediction.py` at commit
d98e8a64ddf34856e74b24714e3bedb2f5a39553, which divides it by the number of targets that the depth has, and where a
depth reads the hidden state behind the final norm of the one before. Here both are as there.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxoverlap.models import layers
from fxoverlap.models.loss import IGNORED


class MTPDepth(nn.Module):
    """One depth: hidden and embedded [batch, positions, dim], sequence ids -> hidden, auxiliary losses of the layers.

    The hidden state it returns is that behind `layers`: `norm` is for the model to apply, before the head.

    Args:
        physical: the depth's layers, `layers` as a child.
        projections: 1, `proj` maps [normed hidden, normed embedding], 2 * `dim` wide, to `dim`; 2, `hidden_proj` and
            `token_proj` map one each, and are added.

    Raises:
        ValueError: another number of projections.
    """

    def __init__(
        self, dim: int, physical: nn.ModuleList, *, projections: int = 1, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(dim)
        self.token_norm = nn.RMSNorm(dim)
        self.projections = projections
        if projections == 1:
            self.proj = nn.Linear(2 * dim, dim, bias=False)
            made = [self.proj]
        elif projections == 2:
            self.hidden_proj = nn.Linear(dim, dim, bias=False)
            self.token_proj = nn.Linear(dim, dim, bias=False)
            made = [self.hidden_proj, self.token_proj]
        else:
            raise ValueError(f"MTPDepth: projections must be 1 or 2, got {projections!r}; give one of these")
        for linear in made:
            nn.init.normal_(linear.weight, std=(2 * dim) ** -0.5, generator=generator)
        self.layers = physical
        self.norm = nn.RMSNorm(dim)

    def forward(self, hidden: Tensor, embedded: Tensor, ids: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        # Matrices through the products: each view less is two nodes less.
        state, token = self.hidden_norm(hidden).flatten(0, 1), self.token_norm(embedded).flatten(0, 1)
        if self.projections == 1:
            mixed = self.proj(torch.cat((state, token), -1))
        else:
            mixed = self.hidden_proj(state) + self.token_proj(token)
        return layers.run(self.layers, mixed.view_as(hidden), ids)


class Ahead(NamedTuple):
    """What one depth reads beside the hidden state, each [batch, positions].

    Attributes:
        tokens: int64, k positions ahead; 0 where the sequence has ended.
        targets: int64, k positions ahead; `IGNORED` where it does not count.
        mask: bool, which of the tokens are valid; None: all.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor | None


def ahead(tokens: Tensor, targets: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> Iterator[Ahead]:
    """What depths 1, 2, ... read, of a model that reads `tokens` and predicts `targets`, int64 [batch, positions].

    Nothing comes from another row, or another sequence: `ids` as in `layers.run`. A target counts if it is there, and
    if all tokens on the way to it, 1 to k positions ahead, are valid: `mask`, bool [batch, positions] (Megatron-LM
    pull request 6770).

    Raises ValueError: the mask is not bool, or not of the tokens' shape.
    """
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape):
        raise ValueError(
            f"HybridModel: mtp_input_mask must be bool {list(tokens.shape)}, as the tokens, "
            f"got {mask.dtype} {list(mask.shape)}; give one truth value a token"
        )
    invalid = None if mask is None else ~mask
    last = None if ids is None else ids != rolled(ids, -1)
    while True:
        if invalid is not None:
            # The paths that begin before an invalid token cross it. Those of deeper depths have its target moved on.
            targets = targets.masked_fill(invalid, IGNORED)
        tokens, targets = rolled(tokens, 0, last), rolled(targets, IGNORED, last)
        mask = None if mask is None else rolled(mask, True, last)
        yield Ahead(tokens, targets, mask)


def rolled(x: Tensor, fill: int | bool, last: Tensor | None = None) -> Tensor:
    """`x` [batch, positions] moved left by one; `fill` at the end of each row, and where `last`, bool, is true."""
    x = F.pad(x[:, 1:], (0, 1), value=fill)
    return x if last is None else x.masked_fill(last, fill)
