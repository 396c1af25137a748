"""Plans: the order of Megatron, legality, and policies that users bring.

Proves: what each lane sees, lane by lane; that counts never queue behind the other microbatch's tokens; that chunks of
unequal depth, steps of one microbatch and synthetic chunks get plans; and that an illegal order is refused by name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from toys import batches, differences, eager_step, toy

import fxoverlap as fxo
from fxoverlap.errors import ConfigError, UnsupportedError
from fxoverlap.ir import ChunkGraph, Lane, NodeCost, Phase, Plan, ScheduleNode, Slot
from fxoverlap.schedule import build_plan
from fxoverlap.schedule.cost import default_costs

pytestmark = pytest.mark.usefixtures("shared_captures")

CONFIG = fxo.OverlapConfig()
MEGATRON = fxo.OverlapConfig(schedule="megatron")
Order = list[tuple[ScheduleNode, str]]


@functools.cache
def chunk(group: dist.ProcessGroup | None, pattern: str, **changes: Any) -> ChunkGraph:
    found = fxo.transform(toy(pattern, group, **changes), fxo.OverlapConfig(pattern), example_inputs=batches(1)[0])
    forward = found.plan("FB").forward
    assert forward is not None
    return forward


def lane(plan: Plan, which: Lane) -> list[str]:
    """What one lane sees: `L0.dispatch.F`; the microbatch is clear from the phase."""
    return [instance.node.name for instance in plan.order if instance.node.lane is which]


def synthetic(layers: int, moe: bool = True, effects: tuple[tuple[str, str], ...] = ()) -> ChunkGraph:
    """A chunk of MoE or dense layers without a graph: each node reads what the one before it makes."""
    slots = [Slot.PRE_DISPATCH, Slot.COUNTS, Slot.PERMUTE, Slot.DISPATCH, Slot.EXPERTS, Slot.COMBINE, Slot.POST_COMBINE]
    slots = slots if moe else [Slot.PRE_DISPATCH]
    comm = (Slot.COUNTS, Slot.DISPATCH, Slot.COMBINE)
    keys: list[tuple[int | None, Slot, Phase]] = [(None, Slot.PRE_PROCESS, Phase.F)]
    keys += [(layer, slot, Phase.F) for layer in range(layers) for slot in slots]
    keys += [(None, Slot.POST_PROCESS, Phase.F)]
    for layer, slot, _ in reversed(list(keys)):
        if slot not in (Slot.COUNTS, Slot.PERMUTE):
            keys.append((layer, slot, Phase.B))
            keys += [] if slot in comm else [(layer, slot, Phase.W)]
    nodes, last = [], "batch"
    for i, (layer, slot, phase) in enumerate(keys):
        where = Lane.COMM if slot in comm else Lane.COMPUTE
        nodes.append(ScheduleNode(layer, slot, phase, where, (f"op{i}",), (last,), (f"v{i}",)))
        last = last if phase is Phase.W else f"v{i}"
    costs = {node.name: NodeCost(flops=i) for i, node in enumerate(nodes)}
    return ChunkGraph(None, tuple(nodes), effects, layers, costs)


def check(plan: Plan) -> None:
    """Every node once; nothing is read before it is made, by microbatch."""
    expected = {(n.name, "F") for n in plan.forward.nodes if n.phase is Phase.F} if plan.forward else set()
    expected |= {(n.name, "B") for n in plan.backward.nodes if n.phase is not Phase.F} if plan.backward else set()
    placed = [(instance.node.name, instance.mb) for instance in plan.order]
    assert sorted(placed) == sorted(expected)
    made_later = {(i.mb, value) for i in plan.order for value in i.node.writes}
    for instance in plan.order:
        assert not {(instance.mb, value) for value in instance.node.reads} & made_later, instance
        made_later -= {(instance.mb, value) for value in instance.node.writes}


# --- Megatron's order -------------------------------------------------------------------------------------------


def test_lanes_of_three_moe_layers(group: dist.ProcessGroup) -> None:
    both = chunk(group, "[*E][*E][*E]")
    plan = build_plan(both, both, MEGATRON)
    check(plan)
    assert lane(plan, Lane.COMM) == [
        *("L0.counts.F", "L2.combine.B", "L0.dispatch.F", "L2.dispatch.B", "L0.combine.F"),
        *("L1.counts.F", "L1.combine.B", "L1.dispatch.F", "L1.dispatch.B", "L1.combine.F"),
        *("L2.counts.F", "L0.combine.B", "L2.dispatch.F", "L0.dispatch.B", "L2.combine.F"),
    ]
    assert lane(plan, Lane.COMPUTE) == [
        *("pre_process.F", "post_process.B"),
        *("L0.pre_dispatch.F", "L2.post_combine.B", "L0.permute.F", "post_process.W"),
        *("L2.experts.B", "L2.experts.W", "L0.experts.F", "L2.pre_dispatch.B", "L0.post_combine.F"),
        *("L1.pre_dispatch.F", "L1.post_combine.B", "L1.permute.F", "L2.pre_dispatch.W"),
        *("L1.experts.B", "L1.experts.W", "L1.experts.F", "L1.pre_dispatch.B", "L1.post_combine.F"),
        *("L2.pre_dispatch.F", "L0.post_combine.B", "L2.permute.F", "L1.pre_dispatch.W"),
        *("L0.experts.B", "L0.experts.W", "L2.experts.F", "L0.pre_dispatch.B", "L2.post_combine.F"),
        *("post_process.F", "L0.pre_dispatch.W", "pre_process.W"),
    ]


def lane_order(plan: Plan) -> list[str]:
    return [instance.node.name for instance in plan.order]


@pytest.mark.parametrize("layers", [(1, 1), (3, 3), (4, 2), (2, 4)])
def test_counts_are_launched_before_the_next_token_exchange(layers: tuple[int, int]) -> None:
    """A group's exchanges queue up and the host reads the counts: none may stand between them and their reader."""
    plan = build_plan(synthetic(layers[0]), synthetic(layers[1]), MEGATRON)
    order = [instance.node.name for instance in plan.order]
    for layer in range(layers[0]):
        launch, reader = order.index(f"L{layer}.counts.F"), order.index(f"L{layer}.permute.F")
        comm = [i.node for i in plan.order[launch + 1 : reader] if i.node.lane is Lane.COMM]
        assert all(node.phase is Phase.B and node.slot is Slot.COMBINE for node in comm)
        # What is in flight when the counts are launched was launched by this microbatch, or has been waited for.
        before = [i for i in plan.order[:launch] if i.node.lane is Lane.COMM]
        waited = {value for i in plan.order[:launch] for value in i.node.reads}
        assert all(set(i.node.writes) <= waited for i in before)


def test_shared_expert_and_its_gradients_cover_exchanges(group: dist.ProcessGroup) -> None:
    both = chunk(group, "[*E]", shared_dim=12)
    order = [i.node.name for i in build_plan(both, both, MEGATRON).order]
    assert order.index("L0.dispatch.F") < order.index("L0.shared.F") < order.index("L0.experts.F")
    assert order.index("L0.dispatch.B") < order.index("L0.shared.B") < order.index("L0.pre_dispatch.B")


# --- unequal layer counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "b"), [("[*E][*E][*E]", "[*E]"), ("[*E]", "[*E][*E][*E]"), ("*-", "[*E]"), ("[*E]", "*-")]
)
@pytest.mark.parametrize("schedule", ["megatron", "sequential"])
def test_leftover_layers_run_alone(group: dist.ProcessGroup, f: str, b: str, schedule: str) -> None:
    plan = build_plan(chunk(group, f), chunk(group, b), fxo.OverlapConfig(schedule=schedule))
    check(plan)
    assert plan.kind == "FB"


def test_leftover_layers_come_last(group: dist.ProcessGroup) -> None:
    """Layers are paired from the forward's first and the backward's last on; who has more goes on alone."""
    long, short = chunk(group, "[*E][*E][*E]"), chunk(group, "[*E]")
    order = [str(i).split("  lane")[0] for i in build_plan(long, short, MEGATRON).order]
    assert order.index("L0.pre_dispatch.B  mb=B") < order.index("L1.pre_dispatch.F  mb=F")
    order = [str(i).split("  lane")[0] for i in build_plan(short, long, MEGATRON).order]
    assert order.index("L0.post_combine.F  mb=F") < order.index("L1.post_combine.B  mb=B")
    # The loss of the forward and the last weight gradients close the step.
    assert order[-1] == "pre_process.W  mb=B"


def test_step_over_variants_of_other_lengths(group: dist.ProcessGroup) -> None:
    """Two captures meet in one plan: forward of 6 tokens beside backward of 8."""
    model, eager = toy("[*E]", group), toy("[*E]", group)
    overlapped = fxo.transform(model, fxo.OverlapConfig(pattern="[*E]"))
    microbatches = [batches(1, tokens=tokens, seed=tokens)[0] for tokens in (8, 6, 8)]
    overlapped.step(microbatches)
    eager_step(eager, microbatches)
    assert differences(eager, model) == []
    assert overlapped.report().variants == 2


# --- kinds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["megatron", "sequential"])
def test_plans_of_one_microbatch(group: dist.ProcessGroup, schedule: str) -> None:
    config = fxo.OverlapConfig(schedule=schedule)
    both = chunk(group, "[*E]")
    for f, b, kind in ((both, None, "F"), (None, both, "B"), (both, both, "FB")):
        plan = build_plan(f, b, config)
        check(plan)
        assert plan.kind == kind and (plan.forward is f) and (plan.backward is b)
    assert {i.mb for i in build_plan(both, None, config).order} == {"F"}
    assert {i.node.phase for i in build_plan(None, both, config).order} == {Phase.B, Phase.W}


def test_m_1_runs_f_and_b_plans_only(group: dist.ProcessGroup) -> None:
    """A policy sees which plans a step asks for."""
    asked = []

    def policy(f: ChunkGraph | None, b: ChunkGraph | None, costs: Any, config: Any) -> Order:
        asked.append(("F" if f else "") + ("B" if b else ""))
        return in_order(f, b, costs, config)

    overlapped = fxo.transform(toy("*-"), fxo.OverlapConfig(schedule=policy))
    overlapped.step(batches(1))
    assert asked == ["F", "B"]
    overlapped.step(batches(3))
    assert asked == ["F", "B", "FB"]


def test_text_of_a_plan_has_one_line_an_instance(group: dist.ProcessGroup) -> None:
    both = chunk(group, "[*E]")
    lines = str(build_plan(both, both, CONFIG)).splitlines()
    assert "L0.experts.B  mb=B  lane=compute" in lines and "L0.dispatch.F  mb=F  lane=comm" in lines
    assert len(lines) == len(both.nodes)
    with pytest.raises(ConfigError, match=r"'BF'; allowed.*F, FB, B"):
        fxo.transform(toy("*-"), example_inputs=batches(1)[0]).plan("BF")
    with pytest.raises(UnsupportedError, match="Nothing has been traced yet"):
        fxo.transform(toy("*-")).plan("FB")


# --- policies ---------------------------------------------------------------------------------------------------


def in_order(f: ChunkGraph | None, b: ChunkGraph | None, costs: Any, config: Any) -> Order:
    """Backward, then forward."""
    order = [(node, "B") for node in b.nodes if node.phase is not Phase.F] if b is not None else []
    return order + ([(node, "F") for node in f.nodes if node.phase is Phase.F] if f is not None else [])


def test_policy_receives_chunks_costs_and_config() -> None:
    f, b = synthetic(2), synthetic(1)
    seen: list[Any] = []

    def policy(*given: Any) -> Order:
        seen.extend(given)
        return in_order(*given)

    config = fxo.OverlapConfig(schedule=policy)
    check(build_plan(f, b, config))
    assert seen[0] is f and seen[1] is b and seen[3] is config
    of_f, of_b = ({n.name for n in c.nodes if (n.phase is Phase.F) == (c is f)} for c in (f, b))
    assert seen[2].keys() == of_f | of_b
    assert isinstance(seen[2]["L0.experts.F"], NodeCost)


def test_costs_of_two_chunks_are_told_apart() -> None:
    """Forward and backward may be different chunks: F costs are the one's, B and W costs the other's."""
    f, b = synthetic(1), synthetic(2)
    seen: list[Any] = []
    build_plan(f, b, fxo.OverlapConfig(schedule=lambda *given: seen.append(given[2]) or in_order(*given)))
    assert seen[0]["post_process.F"] == default_costs(f, CONFIG)["post_process.F"]
    assert seen[0]["post_process.F"].flops != b.costs["post_process.F"].flops
    assert seen[0]["post_process.B"] == default_costs(b, CONFIG)["post_process.B"]


def swapped(first: str, second: str) -> Callable[..., Order]:
    """A policy that is in order, but for two nodes whose places are exchanged."""

    def policy(*given: Any) -> Order:
        order = in_order(*given)
        i, j = (next(k for k, (node, _) in enumerate(order) if node.name == name) for name in (first, second))
        order[i], order[j] = order[j], order[i]
        return order

    return policy


def changed(change: Callable[[Order], Any]) -> Callable[..., Any]:
    return lambda *given: change(in_order(*given))


EXPERTS = ScheduleNode(0, Slot.EXPERTS, Phase.F, Lane.COMPUTE)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            swapped("L0.dispatch.F", "L0.experts.F"),
            r"illegal for microbatch 'F': L0.experts.F reads 'v4', which L0.dispatch.F makes later. Place L0.disp",
        ),
        (swapped("L0.experts.B", "L0.experts.W"), r"illegal for microbatch 'B': L0.experts.W reads .* L0.experts.B"),
        (changed(lambda order: order[::-1]), r"illegal for microbatch 'F': post_process.F reads 'v7'"),
        (
            changed(lambda order: [e for e in order if e[0].slot is not Slot.COMBINE]),
            r"left out L0.combine.B, L0.combi",
        ),
        (changed(lambda order: [*order, order[0]]), r"placed post_process.B more than once"),
        (changed(lambda order: [*order, (EXPERTS, "B")]), r"placed L0.experts.F for microbatch 'B'.*no such node"),
        (changed(lambda order: [*order, (EXPERTS, "x")]), r"placed L0.experts.F for microbatch 'x'"),
        (changed(lambda order: [node for node, _ in order]), r'returned ScheduleNode.*expected pairs .* "F" or "B"'),
        (changed(lambda order: [(node.name, mb) for node, mb in order]), r"expected pairs of a ScheduleNode"),
    ],
    ids=["F edge", "W before B", "reversed", "left out", "twice", "wrong mb", "no mb", "nodes", "names"],
)
def test_illegal_order_is_refused_and_named(policy: Any, message: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        build_plan(synthetic(1), synthetic(1), fxo.OverlapConfig(schedule=policy))
    assert re.search(message, str(caught.value)), caught.value


W = ("post_process.W", "L0.experts.W", "L0.pre_dispatch.W")


@pytest.mark.parametrize(
    ("effects", "first"),
    [
        (((W[0], W[1]), (W[1], W[2])), W[1]),
        (((W[1], W[2]), (W[0], W[2])), W[1]),
    ],
    ids=["chain", "two before one"],
)
def test_order_of_effects_is_kept(effects: tuple, first: str) -> None:
    """Nothing else orders these nodes."""

    def late(order: Order) -> Order:
        return [e for e in order if e[0].name != first] + [e for e in order if e[0].name == first]

    config = fxo.OverlapConfig(schedule=changed(late))
    check(build_plan(synthetic(1), synthetic(1), config))
    with pytest.raises(UnsupportedError, match=rf"{W[2]} must follow {first}, because both"):
        build_plan(synthetic(1), synthetic(1, effects=effects), config)


def test_draws_of_a_chunk_keep_their_order_under_any_policy(group: dist.ProcessGroup) -> None:
    both = chunk(group, "*-", dropout=0.1)
    earlier, later = both.effects[0]
    assert (earlier, later) == ("L0.pre_dispatch.F", "L1.experts.F")
    with pytest.raises(UnsupportedError, match=r"illegal for microbatch 'F'"):
        build_plan(both, None, fxo.OverlapConfig(schedule=swapped(earlier, later)))


def test_w_that_a_policy_leaves_out_is_appended() -> None:
    no_w = changed(lambda order: [entry for entry in order if entry[0].phase is not Phase.W])
    both = synthetic(2)
    plan = build_plan(both, both, fxo.OverlapConfig(schedule=no_w))
    check(plan)
    weights = [node.name for node in both.nodes if node.phase is Phase.W]
    assert [instance.node.name for instance in plan.order[-len(weights) :]] == weights


# --- synthetic chunks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["megatron", "sequential", in_order])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (0, 2), (40, 40)])
def test_synthetic_chunks_get_plans(schedule: Any, shape: tuple[int, int]) -> None:
    """A chunk needs no graph to be planned."""
    config = fxo.OverlapConfig(schedule=schedule)
    f, b = synthetic(shape[0]), synthetic(shape[1], moe=shape[1] != 3)
    for each in ((f, b), (f, None), (None, b)):
        check(build_plan(*each, config))
