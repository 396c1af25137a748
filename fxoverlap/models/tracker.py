"""The auxiliary losses of each layer, kept for a training log."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

KINDS = ("aux", "z")


class LossTracker(nn.Module):
    """Sums the auxiliary losses of MoE layers over forwards: one module, a child of each of them.

    Attributes:
        values: buffer, fp32 [kinds, layers], kept in fp32 by dtype casts, not in checkpoints: a row for each of
            `KINDS`, a column for each physical layer, those of the trunk first, then those of each multi-token
            prediction depth. Zero it after reading.
    """

    values: Tensor

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(len(KINDS), layers), persistent=False)

    def add(self, kind: str, layer: int, loss: Tensor) -> None:
        """Add a loss [] of a layer.

        Raises ValueError: it is of another kind, or there is no such layer.
        """
        layers = self.values.shape[1]
        if kind not in KINDS or not 0 <= layer < layers:
            raise ValueError(
                f"LossTracker: a loss must be one of {', '.join(KINDS)} and of a layer 0 to {layers - 1}, "
                f"got {kind!r} of layer {layer}; give the tracker as many layers as the model has, MTP included"
            )
        self.values[KINDS.index(kind), layer] += loss.detach().float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LossTracker":
        # In bf16 a sum over the microbatches of a log interval would stop growing.
        values = self.values
        super()._apply(fn, recurse)
        if self.values.dtype != values.dtype:
            self.values = values.to(self.values.device)
        return self
