"""Steps of few, many and unlike microbatches, losses in pieces, optional arguments: all are steps like any other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from toys import RawModel, RawMoE, batches, differences, eager_step, same_bits, toy, train_both

import fxoverlap as fxo

pytestmark = pytest.mark.usefixtures("shared_captures")


@pytest.mark.parametrize("schedule", ["auto", "megatron", "sequential"])
@pytest.mark.parametrize("ramp", ["none", "pair"])
def test_b15_step_that_only_fills_or_drains(group: dist.ProcessGroup, ramp: str, schedule: str) -> None:
    """One microbatch runs in no FB plan, nor two in pairs."""
    overlapped = fxo.transform(toy("[*E]", group), fxo.OverlapConfig(schedule=schedule, ramp=ramp))
    for count in (1, 2, 3):
        assert train_both(overlapped, lambda step, n=count: batches(n, seed=step), steps=2) == [], count


@pytest.mark.parametrize("ramp", ["none", "pair"])
def test_b15_steps_of_changing_length(group: dist.ProcessGroup, ramp: str) -> None:
    overlapped = fxo.transform(toy("[*E]", group), fxo.OverlapConfig(ramp=ramp))
    assert train_both(overlapped, lambda step: batches((3, 1, 2, 1)[step], seed=step), steps=4) == []


@pytest.mark.parametrize("ramp", ["none", "pair"])
def test_b104_four_microbatches_then_one_larger(group: dist.ProcessGroup, ramp: str) -> None:
    """The larger one has no partner, and the report says so."""
    overlapped = fxo.transform(toy("[*E]", group), fxo.OverlapConfig(ramp=ramp))
    assert train_both(overlapped, lambda step: batches(1, tokens=24) if step else batches(4), steps=2) == []
    reasons = [text.split(":")[0] for text in overlapped.report().little_hidden]
    assert "one microbatch" in reasons
    warned = [text for text in overlapped.report().warnings if "the last step had one microbatch" in text]
    assert len(warned) == (ramp == "pair")


class InChunks(RawModel):
    """The cross entropy of 8 pieces of the tokens, summed."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        pieces = zip(x.flatten(0, 1).chunk(8), targets.flatten().chunk(8), strict=True)
        losses = [F.cross_entropy(self.head(piece), target, reduction="sum") for piece, target in pieces]
        assert len(losses) == 8
        return sum(losses[1:], losses[0]) / targets.numel()


@pytest.mark.parametrize("tokens", [8, 32])
def test_b54_loss_in_chunks(group: dist.ProcessGroup, tokens: int) -> None:
    overlapped = fxo.transform(InChunks(group, blocks=1), example_inputs=batches(1, tokens=tokens)[0])
    layers = {i.node.layer for i in overlapped.plan("F").order}
    assert layers == {None, 0}, "the pieces are no layers"
    assert train_both(overlapped, lambda step: batches(3, tokens=tokens, seed=step), steps=2) == []


class Masked(nn.Module):
    """The mask is used by the routers' auxiliary losses only, which leave masked tokens out, and by a counter."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(MaskedMoE(16, 4, group) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        x, added = self.embed(tokens), 0.0
        for layer in self.layers:
            x, z = layer(x, mask)
            added = added + z
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()) + 0.1 * added


class MaskedMoE(RawMoE):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        z = self.router(self.norm(x)).logsumexp(-1).square()
        kept = torch.ones_like(z) if mask is None else mask.to(z.dtype)
        self.tokens += kept.sum().to(torch.int64)
        return super().forward(x), (z * kept).sum() / kept.sum()


def test_b09_mask_that_only_the_auxiliary_loss_reads(group: dist.ProcessGroup) -> None:
    """Called without and with; the two lead to different gradients and counts."""
    mask = torch.tensor([[True] * 5 + [False] * 3])
    without = batches(2)
    masked = [(*each, mask) for each in without]
    model = Masked(group)
    overlapped = fxo.transform(model)
    for given in (without, masked, [without[0], {"tokens": without[1][0], "targets": without[1][1], "mask": mask}]):
        model.zero_grad()
        eager = copy.deepcopy(model)
        losses = eager_step(eager, given)
        assert all(map(same_bits, losses, overlapped.step(given).losses))
        assert differences(eager, model) == []
    assert model.layers[0].tokens == 16 + 10 + 13
    assert not same_bits(*(eager_step(model, each)[0] for each in (without, masked)))
