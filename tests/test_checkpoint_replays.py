"""Regions of the user's own `torch.utils.checkpoint` are replayed like those of `OverlapConfig.recompute`.

Proves: checkpointed layers give the R nodes that `uniform` gives; what a policy saves is not computed again; buffers
change once; regions outside the layers work; regions that overlap with those of the config are refused by both names.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from odd import Attention, Dense, Odd, in_turn, moe
from replays import disorder
from test_checkpoint_calls import both, plainly, selective, some
from torch import Tensor, nn
from toys import batches, differences, eager_step, toy, train_both

import fxoverlap as fxo
from fxoverlap.ir import ChunkGraph, Phase, Role, Slot

pytestmark = pytest.mark.usefixtures("shared_captures")

Recompute = fxo.Recompute


def each_with(checkpoint: Callable[..., Any]) -> Callable[[Odd, Tensor], Tensor]:
    """Every layer is checkpointed."""
    return lambda m, x: functools.reduce(lambda y, layer: checkpoint(layer, y), m.layers, x)


def first_with(checkpoint: Callable[..., Any], *numbers: int) -> Callable[[Odd, Tensor], Tensor]:
    """Only these layers are checkpointed."""

    def wire(m: Odd, x: Tensor) -> Tensor:
        for i, layer in enumerate(m.layers):
            x = checkpoint(layer, x) if i in numbers else layer(x)
        return x

    return wire


def chunk_of(model: nn.Module, recompute: Recompute | None = None) -> ChunkGraph:
    config = fxo.OverlapConfig(recompute=recompute)
    found = fxo.transform(model, config, example_inputs=batches(1)[0]).plan("FB").backward
    assert found is not None and found.joint is not None
    return found


def replayed(chunk: ChunkGraph) -> dict[str, list[str]]:
    """The ops of each R node."""
    assert chunk.joint is not None
    targets = {node.name: str(node.target) for node in chunk.joint.module.graph.nodes}
    return {node.name: [targets[op] for op in node.ops] for node in chunk.nodes if node.phase is Phase.R}


def exchanges(chunk: ChunkGraph) -> list[Role]:
    """What is sent again."""
    assert chunk.joint is not None
    return [each.role for each in chunk.joint.exchanges if each.phase is Phase.R]


@both
def test_checkpointed_layers_are_replayed_as_segments_are(
    group: dist.ProcessGroup, checkpoint: Callable[..., Any]
) -> None:
    chunk = chunk_of(Odd(each_with(checkpoint), moe(group), moe(group)))
    asked = chunk_of(Odd(in_turn, moe(group), moe(group)), Recompute("uniform"))
    views = {"aten.view.default", "aten.alias.default"}
    ours, theirs = (
        {name: sorted(op for op in ops if op not in views) for name, ops in replayed(each).items()}
        for each in (chunk, asked)
    )
    assert ours == theirs and len(ours) == 8
    assert exchanges(chunk) == exchanges(asked) == [Role.DISPATCH, Role.DISPATCH]


SAVED = [torch.ops._c10d_functional.all_to_all_single.default]


@pytest.mark.parametrize(
    "saved, absent, present",
    [
        (SAVED, "_c10d_functional.all_to_all_single.default", "aten.relu.default"),
        ([torch.ops.aten.relu.default], "aten.relu.default", "_c10d_functional.all_to_all_single.default"),
        ([torch.ops.aten.native_layer_norm.default], "aten.native_layer_norm.default", "aten.relu.default"),
    ],
    ids=["exchanges", "activation", "norm"],
)
def test_what_a_policy_saves_is_not_computed_again(
    group: dist.ProcessGroup, saved: list[Any], absent: str, present: str
) -> None:
    model = Odd(each_with(selective(saved)), moe(group), moe(group))
    again = [op for ops in replayed(chunk_of(model)).values() for op in ops]
    assert absent not in again and present in again
    assert train_both(model, some, steps=2) == []


def test_regions_of_parts_of_layers_are_replayed(group: dist.ProcessGroup) -> None:
    class Part(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return plainly(lambda y: super(Part, self).forward(y), x) + torch.tanh(x)

    model = Odd(in_turn, Part(), moe(group), Part(), moe(group))
    assert sorted(replayed(chunk_of(model))) == ["L0.pre_dispatch.R", "L1.pre_dispatch.R"]
    assert train_both(model, some, steps=2) == []


def test_results_that_are_views_do_not_join_regions(group: dist.ProcessGroup) -> None:
    """The view is made again in the next layer, and is no part of this one's region there."""

    class Turned(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return (2 * super().forward(x.transpose(0, 1))).transpose(0, 1)

    model = Odd(each_with(plainly), *(Turned(moe(group)) for _ in range(3)))
    assert ("L1.pre_dispatch.B", "L0.pre_dispatch.R") in chunk_of(model).replays
    assert train_both(model, some, steps=2) == []


def test_region_over_several_layers_is_one_replay(group: dist.ProcessGroup) -> None:
    model = Odd(lambda m, x: plainly(in_turn, m, x), moe(group), moe(group), moe(group))
    chunk = chunk_of(model)
    # Unlike three segments, this one sends what the layers in it hand on again too.
    assert exchanges(chunk).count(Role.COMBINE) == 2 and exchanges(chunk).count(Role.DISPATCH) == 3
    assert train_both(model, some, steps=2) == []


class Chunked(Odd):
    """The loss in checkpointed chunks, outside of all layers."""

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        rows = zip(self.norm(x).flatten(0, 1).chunk(4), targets.flatten().chunk(4), strict=True)
        return torch.stack([plainly(self.of_chunk, *each) for each in rows]).sum()

    def of_chunk(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), targets, reduction="sum")


@pytest.mark.parametrize("recompute", [None, Recompute("uniform")], ids=["none", "uniform"])
def test_b54_checkpointed_chunks_of_a_loss(group: dist.ProcessGroup, recompute: Recompute | None) -> None:
    model = Chunked(in_turn, Dense(), moe(group))
    again = replayed(chunk_of(model, recompute))
    assert again["post_process.R"].count("aten._log_softmax.default") == 4
    assert train_both(model, some, fxo.OverlapConfig(recompute=recompute), steps=2) == []


def test_region_in_front_of_the_layers(group: dist.ProcessGroup) -> None:
    def wire(m: Odd, x: Tensor) -> Tensor:
        return in_turn(m, plainly(lambda y: F.dropout(torch.tanh(m.norm(y)), 0.3), x))

    model = Odd(wire, moe(group), moe(group))
    chunk = chunk_of(model)
    assert "aten.tanh.default" in replayed(chunk)["pre_process.R"]
    assert ("L1.pre_dispatch.B", "pre_process.R") in chunk.replays
    assert train_both(model, some, steps=2) == []


def test_regions_that_meet_inside_a_layer_are_replayed_together(group: dist.ProcessGroup) -> None:
    def wire(m: Odd, x: Tensor) -> Tensor:
        (a, b), (c, d), (e, f) = m.layers
        x = plainly(lambda y: c(b(a(y))), x)
        return f(plainly(lambda y: e(d(y)), x))

    model = Odd(wire, *(nn.Sequential(Dense(), moe(group)) for _ in range(3)))
    chunk = chunk_of(model)
    assert exchanges(chunk) == [Role.DISPATCH, Role.COMBINE] * 2
    # No replay waits for the backward of a layer that reads it.
    assert {earlier for earlier, _ in chunk.replays} == {"post_process.B", "post_process.W"}
    assert train_both(model, some, steps=2) == []


class Counts(Dense):
    """Counts its tokens, from a number and from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[..., 0].numel()
        self.tokens += rows
        self.first = torch.full((), rows) if self.first is None else self.first + rows
        return super().forward(x) / self.tokens


def test_b45_b46_buffers_in_a_region_change_once() -> None:
    """Where eager's own replay would change them again, and use the new value."""
    plain = Odd(in_turn, Counts())
    model = copy.deepcopy(plain)
    model.wire = each_with(plainly)
    overlapped = fxo.transform(model)
    microbatches = batches(3)
    eager_step(plain, microbatches)
    overlapped.step(microbatches)
    assert model.layers[0].tokens == 24 and model.layers[0].first == 24
    assert differences(plain, model) == []


@pytest.mark.parametrize(
    "recompute, wire, text",
    [
        (
            Recompute("uniform", 2),
            first_with(plainly, 1),
            r"the segment layers\.0 to layers\.2 and the torch\.utils\.checkpoint layers\.1#0 in the model overlap, .* "
            r"Switch activation checkpointing off in the model, or leave these layers out of recompute\.",
        ),
        (
            Recompute("selective", modules=("layers.*.norm",)),
            first_with(plainly, 0),
            r"module layers\.0\.norm and the torch\.utils\.checkpoint layers\.0#0 in the model overlap",
        ),
        (
            Recompute("selective", modules=("layers.1",)),
            lambda m, x: m.layers[1].linear(plainly(m.layers[1].norm, m.layers[1](m.layers[0](x)))),
            None,
        ),
        (Recompute("block", 1), first_with(plainly, 1), None),
    ],
    ids=["segment", "module", "twice", "beside"],
)
def test_b58_overlap_with_the_config_is_refused_by_both_names(
    group: dist.ProcessGroup, recompute: Recompute, wire: Callable[..., Tensor], text: str | None
) -> None:
    model = Odd(wire, moe(group), moe(group)) if text is None and recompute.method == "block" else None
    model = model or Odd(wire, Dense(), Dense(), moe(group))
    if text is None:
        assert train_both(model, some, fxo.OverlapConfig(recompute=recompute), steps=2) == []
        return
    with pytest.raises(fxo.UnsupportedError, match=text):
        chunk_of(model, recompute)


@pytest.mark.parametrize("schedule", ["auto", "megatron", "sequential"])
def test_a_depth_is_replayed_when_depths_and_heads_behind_it_are_done(schedule: str, group: dist.ProcessGroup) -> None:
    """Its own head is one of them, and the main head for the last depth: no logits are alive beside replayed values."""
    config = fxo.OverlapConfig(recompute=Recompute("uniform"), schedule=schedule)
    plan = fxo.transform(toy("[*E]/[*E]/[*E]", group), config, example_inputs=batches(1)[0]).plan("FB")
    order = [each.node for each in plan.order if each.mb == "B"]
    for depth, heads in (("MTP1", ("-", "MTP1")), ("MTP0", ("MTP0",))):
        first, late = (
            min(
                i
                for i, node in enumerate(order)
                if node.place == depth and node.phase is Phase.R and node.slot in slots
            )
            for slots in (tuple(Slot), (Slot.EXPERTS, Slot.POST_COMBINE))
        )
        for i, node in enumerate(order):
            is_head = node.slot in (Slot.MTP_POST, Slot.POST_PROCESS) and (node.place or "-") in heads
            if is_head or (depth == "MTP0" and node.place == "MTP1"):
                assert i < {Phase.W: late}.get(node.phase, first), (node.name, depth)
    assert disorder(plan) == []
