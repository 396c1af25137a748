"""Where the pass `mtp` merges gradients: what is made for gradients of parameters only follows what it reads."""

from __future__ import annotations

import torch.distributed as dist
from odd import Dense, Odd, moe
from torch import Tensor, nn
from toys import batches, train_both


def test_weight_gradients_of_a_norm_that_reads_the_merged_gradient(group: dist.ProcessGroup) -> None:
    """The norm of the heads stands in the trunk too, behind a detached state: it gives the trunk no gradient.

    Its backward has several results, is made for parameters only, and reads what has moved to the trunk.
    """

    def wire(m: Odd, x: Tensor) -> tuple[Tensor, Tensor]:
        x = m.layers[0](x)
        x = m.layers[1](x) + m.norm(x.detach())
        return x, m.loss(m.mtp[0](x), m.targets)

    model = Odd(wire, Dense(), moe(group), mtp=nn.ModuleList([Dense()]))
    assert train_both(model, lambda step: batches(3, seed=step), steps=1) == []
