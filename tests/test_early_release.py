"""`early_release=True`: a layer's pre_dispatch.B comes before the experts.F of the layer beside it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch.distributed as dist
from test_schedule import synthetic
from toys import batches, toy, train_both

import fxoverlap as fxo
from fxoverlap.ir import ChunkGraph, Plan
from fxoverlap.schedule import build_plan, rounds_with
from fxoverlap.schedule.memory import peak_bytes
from fxoverlap.schedule.policies import early_release_edges

pytestmark = pytest.mark.usefixtures("shared_captures")


@functools.cache
def chunk(group: dist.ProcessGroup, pattern: str) -> ChunkGraph:
    found = fxo.transform(toy(pattern, group), example_inputs=batches(1, tokens=64)[0]).plan("FB").forward
    assert found is not None
    return found


def plan(f: ChunkGraph, b: ChunkGraph, schedule: Any, early: bool) -> Plan:
    return build_plan(f, b, fxo.OverlapConfig(schedule=schedule, early_release=early))


def broken(plan: Plan, edges: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The edges that a plan does not keep."""
    position = {(i.node.name, i.mb): k for k, i in enumerate(plan.order)}
    return [(first, then) for first, then in edges if position[first, "B"] > position[then, "F"]]


def test_edges_pair_the_first_layer_with_the_last() -> None:
    expected = [("L2.pre_dispatch.B", "L0.experts.F"), ("L1.pre_dispatch.B", "L1.experts.F")]
    assert early_release_edges(synthetic(3), synthetic(3)) == [*expected, ("L0.pre_dispatch.B", "L2.experts.F")]
    assert early_release_edges(synthetic(2), synthetic(3)) == expected
    assert early_release_edges(synthetic(3), synthetic(1)) == [("L0.pre_dispatch.B", "L0.experts.F")]
    assert early_release_edges(synthetic(2, moe=False), synthetic(2)) == []  # no experts in the forward


@pytest.mark.parametrize("schedule", ["auto", "megatron"])
@pytest.mark.parametrize(("f", "b"), [(1, 1), (3, 3), (5, 2), (2, 5)])
def test_backward_is_done_with_a_layer_before_the_forward_computes_experts(schedule: str, f: int, b: int) -> None:
    ours, theirs = synthetic(f), synthetic(b)
    edges = early_release_edges(ours, theirs)
    assert broken(plan(ours, theirs, schedule, True), edges) == []
    if schedule == "megatron":
        assert broken(plan(ours, theirs, schedule, False), edges) == edges


@pytest.mark.parametrize("pattern", ["[*E][*E]", "*-[*E][*E]", "[*E]-[*E]"])
def test_no_more_is_alive_in_a_step(group: dist.ProcessGroup, pattern: str) -> None:
    """In the order of `megatron`; `auto` may choose another order altogether."""
    both = chunk(group, pattern)
    edges = early_release_edges(both, both)
    assert edges and broken(plan(both, both, "auto", True), edges) == []
    peaks = {}
    for early in (True, False):
        config = fxo.OverlapConfig(schedule="megatron", early_release=early)
        plans = {
            "F": build_plan(both, None, config),
            "FB": build_plan(both, both, config),
            "B": build_plan(None, both, config),
        }
        peaks[early] = peak_bytes(rounds_with(plans, 4, pair=False))
    assert peaks[True] <= peaks[False]


@pytest.mark.parametrize(
    ("pattern", "schedule", "has_effect"),
    [("[*E]", "auto", True), ("[*E]", "megatron", True), ("[*E]", "sequential", False), ("*", "auto", False)],
)
def test_report_says_that_it_has_no_effect(
    group: dist.ProcessGroup, pattern: str, schedule: str, has_effect: bool
) -> None:
    for early in (True, False):
        config = fxo.OverlapConfig(schedule=schedule, early_release=early)
        overlapped = fxo.transform(toy(pattern, group), config, example_inputs=batches(1)[0])
        warned = [text for text in overlapped.report().warnings if text.startswith("early_release=True has no effect")]
        assert len(warned) == (early and not has_effect)


@pytest.mark.parametrize("schedule", ["auto", "megatron"])
def test_same_bits(group: dist.ProcessGroup, schedule: str) -> None:
    config = fxo.OverlapConfig(schedule=schedule, early_release=True)
    model = toy("[*E][*E]", group, shared_dim=12, dropout=0.1, tied=True)
    assert train_both(fxo.transform(model, config), lambda step: batches(3, seed=step), steps=2) == []
