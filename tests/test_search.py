"""The searched order: never worse than the others, close to the bound, legal, and the same each time.

Costs are drawn at random over chunks without a model. The bound is not the optimum: where an order is above it, either
may be to blame.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from synthetic import random_costs, synthetic

import fxoverlap as fxo
from fxoverlap.ir import ChunkGraph, CostTable, Lane, NodeCost, Phase, Plan, ScheduleNode, Slot
from fxoverlap.pipeline import to_fused
from fxoverlap.schedule import build_plan, simulate, tasks
from fxoverlap.schedule.cost import PRESETS, Hardware
from fxoverlap.schedule.search import search
from fxoverlap.schedule.simulate import simulate_plan
from fxoverlap.schedule.tasks import lower_bound, tasks_of

CPU = replace(PRESETS["cpu"], node_s=0.0, launch_s=0.0, comm_share=0.0)
MACHINES = {
    "cpu": CPU,
    "cpu that communicates itself": replace(CPU, node_s=2e-5, launch_s=1e-4, comm_share=0.15),
    "gpu": replace(PRESETS["h100"], comm_share=0.0),
    "gpu that shares its processors": replace(PRESETS["h100"], comm_share=0.1),
}
POLICIES = ("auto", "megatron", "sequential")


def plan(f: ChunkGraph | None, b: ChunkGraph | None, costs: CostTable, schedule: str = "auto") -> Plan:
    return build_plan(f, b, fxo.OverlapConfig(schedule=schedule), costs)


def bound(found: Plan, costs: CostTable) -> float:
    return lower_bound(tasks_of(found.chunks, costs), costs.hardware)


def given(chunk: ChunkGraph, ms: Callable[[Slot, Phase], float], hardware: Hardware = CPU) -> CostTable:
    """Costs by slot and phase, in milliseconds."""
    return CostTable({n.name: NodeCost(seconds=ms(n.slot, n.phase) / 1e3) for n in chunk.nodes}, hardware, "test")


@dataclass(frozen=True)
class Case:
    """One random chunk beside itself, and what its policies take."""

    chunk: ChunkGraph
    costs: CostTable
    ratio: dict[str, float]


def cases(count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        kinds = "E" * 8 if rng.random() < 0.5 else "E" + "".join(rng.choice("EED") for _ in range(rng.randint(0, 7)))
        chunk = synthetic(kinds, shared=rng.random() < 0.4)
        hardware = MACHINES[rng.choice(sorted(MACHINES))]
        costs = CostTable(random_costs(chunk, rng, alike=rng.random() < 0.7), hardware, "test")
        plans = {schedule: plan(chunk, chunk, costs, schedule) for schedule in POLICIES}
        least = bound(plans["auto"], costs)
        ratio = {schedule: simulate_plan(each).makespan / least for schedule, each in plans.items()}
        to_fused(plans["auto"], fxo.OverlapConfig(), [])  # runs verify
        found.append(Case(chunk, costs, ratio))
    return found


def check_ranking(found: list[Case]) -> None:
    exact = 1 + 1e-9  # sums of floats in another order
    for case in found:
        assert case.ratio["auto"] * exact >= 1
        assert case.ratio["auto"] <= case.ratio["megatron"] * exact
        assert case.ratio["megatron"] <= case.ratio["sequential"] * exact
    print(f"\n{len(found)} random cost tables, makespan / bound of a fused step: median, 90th percentile, worst")
    for schedule in POLICIES:
        ratios = sorted(case.ratio[schedule] for case in found)
        print(f"{schedule:12} {statistics.median(ratios):.4f} {ratios[len(ratios) * 9 // 10]:.4f} {ratios[-1]:.4f}")
    assert statistics.median(case.ratio["auto"] for case in found) <= 1.02


@pytest.mark.parametrize("seed", range(4))
def test_no_order_undercuts_the_bound(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Any order, on any machine, with one process group or two: long issues and launches, all shares, empty nodes."""
    rng, groups = random.Random(seed), {}
    for module in (simulate, tasks):
        monkeypatch.setattr(module, "groups_of", lambda chunk: {n.name: groups.get(n.slot, "a") for n in chunk.nodes})
    for _ in range(40):
        groups[Slot.COMBINE] = rng.choice("ab")
        chunk = synthetic(rng.choice(("E", "EE", "EDE", "DD")), shared=rng.random() < 0.5)
        hardware = replace(
            CPU,
            node_s=rng.choice((0.0, 1e-4, 1e-3)),
            launch_s=rng.choice((0.0, 3e-3)),
            comm_share=rng.choice((0.0, 0.1, 0.5, 1.0)),
            host_runs_ahead=rng.random() < 0.5,
        )
        slow = rng.choice((1, 10))
        seconds = random_costs(chunk, rng, alike=False)
        nodes = {
            n.name: NodeCost(seconds=seconds[n.name].seconds * (slow if n.lane is Lane.COMM else rng.choice((0, 1))))
            for n in chunk.nodes
        }
        costs = CostTable(nodes, hardware, "test")
        chunks = dict.fromkeys(rng.choice((("F",), ("B",), ("F", "B"), ("B0", "B1"))), chunk)
        found = tasks_of(chunks, costs)
        order = tuple(found[i].instance for i in any_order(found, rng))
        least = lower_bound(found, hardware)
        assert least <= simulate_plan(Plan("", chunks, order, costs)).makespan * (1 + 1e-9)


def any_order(found: list[tasks.Task], rng: random.Random) -> list[int]:
    """Positions of the tasks in a random order in which each follows what it needs."""
    order: list[int] = []
    while len(order) < len(found):
        left = [i for i in range(len(found)) if i not in order and all(need in order for need in found[i].needs)]
        order.append(rng.choice(left))
    return order


def test_names_of_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may differ between ranks."""
    chunk = synthetic("EED", shared=True)
    costs = CostTable(random_costs(chunk, random.Random(0), alike=False), MACHINES["gpu"], "test")
    orders = []
    for of_combine in "195":
        groups = {n.name: of_combine if n.slot is Slot.COMBINE else "5" for n in chunk.nodes}
        monkeypatch.setattr(tasks, "groups_of", lambda _, groups=groups: groups)
        orders.append(search(tasks_of({"F": chunk, "B": chunk}, costs), costs.hardware))
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("kinds", [(), "D", "E"])
def test_chunks_with_next_to_nothing(kinds: str) -> None:
    """No node, no exchange, one layer, weight gradients alone, no time."""
    chunk = synthetic(kinds) if kinds else ChunkGraph(None, ())
    weights = replace(chunk, nodes=tuple(n for n in chunk.nodes if n.phase is Phase.W))
    for each in (chunk, weights):
        costs = given(each, lambda *_: 0.0)
        found = plan(each, each, costs)
        assert len(found.order) == len(each.nodes) and bound(found, costs) == simulate_plan(found).makespan == 0


def test_launch_that_needs_a_branch_comes_behind_it() -> None:
    """Not together with the node before it in its chain, which the branch needs."""
    slots = (Slot.PRE_DISPATCH, Slot.SHARED, Slot.DISPATCH, Slot.EXPERTS)
    lanes = (Lane.COMPUTE, Lane.COMPUTE, Lane.COMM, Lane.COMPUTE)
    nodes = tuple(
        ScheduleNode(0, slot, Phase.F, lane, (), (str(i),), (str(i + 1),))
        for i, (slot, lane) in enumerate(zip(slots, lanes, strict=True))
    )
    chunk = ChunkGraph(None, nodes, layers=1)
    found = tasks_of({"F0": chunk, "F1": chunk}, given(chunk, lambda *_: 1.0))
    order = [found[i].instance for i in search(found, CPU)]
    for mb in ("F0", "F1"):
        assert [each.node for each in order if each.mb == mb] == list(nodes)


def test_ranking_and_bound_on_random_costs() -> None:
    check_ranking(cases(12, seed=0))


@pytest.mark.slow
def test_ranking_and_bound_on_a_thousand_random_costs() -> None:
    check_ranking(cases(1000, seed=1))
