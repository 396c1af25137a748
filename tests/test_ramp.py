"""`ramp="pair"`: two microbatches in the same phase beside each other, at both ends of a step.

Proves: which microbatch is in which round; that the plans have the other microbatch's work beside every token exchange
between the ends, and keep the order of gradients, draws and collectives; and that any order that keeps these
gives eager's bits.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from toys import Made, batches, differences, eager_step, random_order, toy, train_both

import fxoverlap as fxo
from fxoverlap.errors import UnsupportedError, VerifyError
from fxoverlap.ir import META, ChunkGraph, Lane, Phase, Plan, Slot, runs_forward
from fxoverlap.passes.verify import verify
from fxoverlap.pipeline import to_fused
from fxoverlap.report.golden import arrivals
from fxoverlap.schedule import build_pair, kind_of, plan, rounds_of
from fxoverlap.schedule.pairs import edges_between, labels_of
from fxoverlap.schedule.policies import Order

pytestmark = pytest.mark.usefixtures("shared_captures")

PAIR = fxo.OverlapConfig(ramp="pair")


def kinds(overlapped: fxo.OverlappedModel, count: int) -> list[str]:
    """The kinds of the rounds of a step."""
    return [kind_of(each) for each in overlapped._planner.rounds(count)]


@functools.cache
def chunk(group: dist.ProcessGroup | None, pattern: str = "[*E][*E]", **changes: Any) -> ChunkGraph:
    found = fxo.transform(toy(pattern, group, **changes), example_inputs=batches(1)[0]).plan("FB").forward
    assert found is not None
    return found


# --- rounds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "pair", "expected"),
    [
        (1, False, [{"F": 0}, {"B": 0}]),
        (1, True, [{"F": 0}, {"B": 0}]),
        (2, False, [{"F": 0}, {"F": 1, "B": 0}, {"B": 1}]),
        (2, True, [{"F0": 0, "F1": 1}, {"B0": 0, "B1": 1}]),
        (3, True, [{"F0": 0, "F1": 1}, {"F": 2, "B": 0}, {"B0": 1, "B1": 2}]),
        (4, True, [{"F0": 0, "F1": 1}, {"F": 2, "B": 0}, {"F": 3, "B": 1}, {"B0": 2, "B1": 3}]),
    ],
)
def test_rounds(count: int, pair: bool, expected: list[dict[str, int]]) -> None:
    assert rounds_of(count, pair) == expected


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_each_microbatch_runs_forward_then_backward_in_order(count: int, pair: bool) -> None:
    alive, most, begun, done = set(), 0, [], []
    for each in rounds_of(count, pair):
        forward = [i for mb, i in each.items() if runs_forward(mb)]
        backward = [i for mb, i in each.items() if not runs_forward(mb)]
        assert alive.issuperset(backward)
        begun, done = begun + forward, done + backward
        alive |= set(forward)
        most = max(most, len(alive))
        alive -= set(backward)
    assert begun == done == list(range(count)) and not alive
    assert most == min(count, 3 if pair else 2)


# --- plans ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["FF", "BB"])
def test_plan_of_a_pair(group: dist.ProcessGroup, kind: str) -> None:
    """Every token exchange has computation of the other microbatch beside it."""
    overlapped = fxo.transform(toy("[*E][*E]", group), PAIR, example_inputs=batches(1)[0])
    found = overlapped.plan(kind)
    first, second = labels_of(kind)
    assert found.kind == kind and list(found.chunks) == [first, second]
    assert len(overlapped.fused_graph(kind).graph.find_nodes(op="call_module")) == len(found.order)
    phases = {Phase.F} if kind == "FF" else {Phase.B, Phase.W}
    assert {i.node.phase for i in found.order} == phases
    for start, end in arrivals(found.order).items():
        launch, beside = found.order[start], found.order[start + 1 : end]
        if launch.node.slot is not Slot.COUNTS:
            assert any(i.mb != launch.mb and i.node.lane is Lane.COMPUTE for i in beside), launch
    if kind == "BB":
        flying = {i for start, end in arrivals(found.order).items() for i in found.order[start + 1 : end]}
        weights = {i for i in found.order if i.node.phase is Phase.W and i.node.layer == 1}
        assert weights and weights <= flying


@pytest.mark.parametrize("kind", ["FF", "BB"])
def test_sequential_pair_runs_one_after_the_other(group: dist.ProcessGroup, kind: str) -> None:
    found = build_pair(kind, chunk(group), chunk(group), fxo.OverlapConfig(schedule="sequential"))
    labels = [i.mb for i in found.order]
    assert labels == sorted(labels) and len(set(labels)) == 2


@pytest.mark.parametrize("ramp", ["none", "pair"])
def test_all_kinds_can_be_asked_for(group: dist.ProcessGroup, ramp: str) -> None:
    overlapped = fxo.transform(toy("[*E]", group), fxo.OverlapConfig(ramp=ramp), example_inputs=batches(1)[0])
    for kind in ("F", "FB", "B", "FF", "BB"):
        assert overlapped.plan(kind).kind == kind
        assert {i.mb[0] for i in overlapped.plan(kind).order} == set(kind)
    assert set(kinds(overlapped, 4)) == ({"F", "FB", "B"} if ramp == "none" else {"FF", "FB", "BB"})


def test_policy_is_asked_for_the_kinds_that_it_knows(group: dist.ProcessGroup) -> None:
    asked = []

    def policy(f: ChunkGraph | None, b: ChunkGraph | None, costs: Any, config: Any) -> Order:
        asked.append(("F" if f else "") + ("B" if b else ""))
        return plan.sequential(f, b, costs, config)

    overlapped = fxo.transform(toy("[*E]", group), fxo.OverlapConfig(schedule=policy, ramp="pair"))
    assert train_both(overlapped, lambda step: batches(4, seed=step), steps=1) == []
    assert asked == ["FB"]
    built_in = build_pair("FF", chunk(group, "[*E]"), chunk(group, "[*E]"), PAIR)
    assert [str(i) for i in overlapped.plan("FF").order] == [str(i) for i in built_in.order]


@pytest.mark.parametrize("kind", ["FF", "BB"])
def test_verify_tells_the_two_microbatches_apart(group: dist.ProcessGroup, kind: str) -> None:
    fused = to_fused(build_pair(kind, chunk(group), chunk(group), PAIR), PAIR, [])
    one, two = labels_of(kind)
    calls = [node for node in fused.module.graph.nodes if node.op == "call_module"]
    assert {node.name.split("_")[0] for node in calls} == {one.lower(), two.lower()}
    ours, theirs = (
        next(n for n in calls if n.meta[META].mb == mb and n.meta[META].node.slot is Slot.EXPERTS) for mb in (one, two)
    )
    mine, other = ours.args[0][0], theirs.args[0][0]
    theirs.replace_input_with(other, mine)
    with pytest.raises(VerifyError, match=f"wrong microbatch: .* runs for microbatch {two}, but reads .* of .* {one}"):
        verify(fused, PAIR)
    theirs.replace_input_with(mine, other)
    verify(fused, PAIR)
    ours.meta[META] = replace(ours.meta[META], mb=two)
    with pytest.raises(VerifyError, match=f"doubled: {ours.meta[META].node.name} runs 2 times for microbatch {two}"):
        verify(fused, PAIR)
    ours.meta[META] = replace(ours.meta[META], mb="F" if kind == "FF" else "B")
    with pytest.raises(VerifyError, match="wrong microbatch"):
        verify(fused, PAIR)


# --- what keeps its order -------------------------------------------------------------------------------------


def late(found: Plan, *moved: tuple[str, str]) -> Order:
    """The order of a plan with some instances, (node, label), at its end."""
    order = [(i.node, i.mb) for i in found.order]
    return [e for e in order if (e[0].name, e[1]) not in moved] + [e for e in order if (e[0].name, e[1]) in moved]


def test_earlier_gradient_that_comes_later_is_refused_by_name(group: dist.ProcessGroup) -> None:
    found = build_pair("BB", chunk(group), chunk(group), PAIR)
    moved = late(found, ("L1.experts.W", "B0"))
    words = r"L1\.experts\.W of microbatch 'B1' must follow L1\.experts\.W of microbatch 'B0', because both give a grad"
    with pytest.raises(UnsupportedError, match=words + r"ient of 'layers\.3\.w_(gate_up|down)'"):
        plan.plan_of(moved, found.chunks, found.costs)
    plan.plan_of(late(found, ("L1.experts.W", "B0"), ("L1.experts.W", "B1")), found.chunks, found.costs)


def test_w_that_is_left_out_keeps_the_order(group: dist.ProcessGroup) -> None:
    found = build_pair("BB", chunk(group), chunk(group), PAIR)
    order = [(i.node, i.mb) for i in found.order if i.node.phase is not Phase.W]
    completed = plan.plan_of(order, found.chunks, found.costs)
    assert {i.mb for i in completed.order if i.node.phase is Phase.W} == {"B0", "B1"}
    with pytest.raises(UnsupportedError, match=r"of microbatch 'B1' must follow .* of microbatch 'B0'"):
        order = [e for e in late(found) if e[0].phase is not Phase.W or e[1] == "B1"]
        plan.plan_of(order, found.chunks, found.costs)


def random_pair(chunks: Mapping[str, ChunkGraph], kind: str, choose: random.Random) -> Order:
    """Any order that is legal, and in which what must keeps its order between the two microbatches."""
    one, two = chunks
    edges = edges_between(*chunks.values(), kind)
    return random_order(chunks, choose, [((each.earlier, one), (each.later, two)) for each in edges])


def in_random_order(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Let the nodes of pairs come in random legal orders."""
    choose = random.Random(seed)
    monkeypatch.setattr(plan, "pair", lambda chunks, costs, config, kind: random_pair(chunks, kind, choose))


@pytest.fixture
def random_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    in_random_order(monkeypatch)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_that_keeps_the_edges_gives_the_same_bits(
    group: dist.ProcessGroup, random_pairs: None, seed: int
) -> None:
    """In gradients that are there already, so that the order in which they are added counts."""
    model = toy("*-[*E]", group, shared_dim=12, tied=True)
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    eager = copy.deepcopy(model)
    for given, param in zip(model.parameters(), eager.parameters(), strict=True):
        param.grad = given.grad.clone()
    given = batches(2 + seed, seed=seed)
    eager_step(eager, given)
    fxo.transform(model, PAIR).step(given)
    assert differences(eager, model) == []


@pytest.mark.parametrize("same", [True, False])
def test_gradients_of_microbatch_tensors_come_in_order(random_pairs: None, same: bool) -> None:
    """They may be one tensor, whose gradient is there already."""
    model = Made(lambda m, x, y: (m.linear(x).tanh() * y).square().mean())
    tensors = [torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def give() -> list[tuple[Tensor, Tensor]]:
        x, y, other, another = (each.clone().requires_grad_() for each in tensors)
        x.grad = torch.full_like(x, 0.1)
        return [(x, y), (x, y) if same else (other, another), (x, another)]

    ours, theirs = give(), give()
    overlapped = fxo.transform(model, PAIR)
    eager = Made(model.loss)
    for given in theirs:
        eager(*given).backward()
    overlapped.step(ours)
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(x.grad, y.grad) for x, y in zip(a, b, strict=True))
    both = overlapped.plan("BB").chunks
    leaves = [each for each in edges_between(*both.values(), "BB") if "microbatch tensor" in each.why]
    assert len(leaves) == 4
