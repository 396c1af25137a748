"""The cross entropy of the reference model."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""A target that does not count, as in `torch.nn.functional.cross_entropy`."""


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over the targets that count; 0, with gradients of 0, where torch's is NaN: if there are none.

    logits [n, vocabulary], targets int64 of n elements -> fp32 [], fp64 in fp64.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / count(targets).clamp(min=1)


def count(targets: Tensor) -> Tensor:
    """How many targets count, int64 []."""
    return (targets != IGNORED).sum()
