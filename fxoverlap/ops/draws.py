"""Random draws in the layout of a tensor.

Eager's dropout draws in place into memory like its input, so that what an element gets depends on the strides. The
functional `aten.bernoulli` that tracing makes of it draws into contiguous memory: other masks for a transposed input.
`torch.ops.fxoverlap.bernoulli_like` draws as the in-place op does, and returns the result.
"""

import torch
from torch import Tensor

torch.library.define(
    "fxoverlap::bernoulli_like", "(Tensor x, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)


@torch.library.impl("fxoverlap::bernoulli_like", "CompositeExplicitAutograd")
def _bernoulli_like(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x).bernoulli_(p)


@torch.library.register_fake("fxoverlap::bernoulli_like")
def _bernoulli_like_fake(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x)
