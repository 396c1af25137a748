"""Orders that hold few bytes: what counts as held, and what the search gives up for it.

Costs and bytes are drawn at random over chunks without a model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from synthetic import random_costs, synthetic
from test_search import MACHINES, any_order

import fxoverlap as fxo
from fxoverlap.ir import ChunkGraph, CostTable, Lane, NodeCost, Phase, Plan, ScheduleNode, Slot
from fxoverlap.pipeline import to_fused
from fxoverlap.schedule import build_plan, policies, search
from fxoverlap.schedule.holding import Block, blocks_of, held_bytes
from fxoverlap.schedule.memory import node_bytes, peak_bytes
from fxoverlap.schedule.search import _Partial
from fxoverlap.schedule.simulate import simulate_plan
from fxoverlap.schedule.tasks import Task, tasks_of

pytestmark = pytest.mark.usefixtures("shared_captures")

ROOMS = (None, 0.5, 0.25, 0.0)

MORE = 1.1
"""What found orders hold over what they may: what a beam has left out cannot be had again a few nodes later."""


def with_bytes(chunk: ChunkGraph, rng: random.Random) -> CostTable:
    """Random times and bytes; who has later readers keeps some for them."""
    costs = random_costs(chunk, rng, alike=rng.random() < 0.7)
    for node in chunk.nodes:
        size = rng.randint(1, 100)
        kept = 0 if node.lane is Lane.COMM or node.phase is Phase.W else rng.randint(0, 200)
        costs[node.name] = replace(costs[node.name], passed=size, kept=kept, inside=size + kept + rng.randint(0, 50))
    return CostTable(costs, MACHINES[rng.choice(sorted(MACHINES))], "test")


def drawn(rng: random.Random) -> tuple[ChunkGraph, CostTable]:
    kinds = "E" + "".join(rng.choice("EED") for _ in range(rng.randint(0, 4)))
    chunk = synthetic(kinds, shared=rng.random() < 0.4)
    return chunk, with_bytes(chunk, rng)


def held(plan: Plan) -> int:
    """Most bytes that the order of a plan holds."""
    tasks = tasks_of(plan.chunks, plan.costs)
    position = {task.instance: i for i, task in enumerate(tasks)}
    return held_bytes([position[each] for each in plan.order], tasks, blocks_of(plan.chunks, tasks, plan.costs))


def held_step_by_step(order: Sequence[int], tasks: Sequence[Task], blocks: Sequence[Block]) -> int:
    """`held_bytes` by its definition, in quadratic time."""
    at = {task: i for i, task in enumerate(order)}
    most = sum(block.bytes for block in blocks if block.made is None)
    for i, task in enumerate(order):
        behind = [b for b in blocks if not b.until or max(at[each] for each in b.until) >= i]
        before = sum(b.bytes for b in behind if b.made is None or at[b.made] < i)
        own = sum(b.bytes for b in blocks if b.made == task)
        most = max(most, before + max(own, tasks[task].inside))
    return most


# --- what is held -----------------------------------------------------------------------------------------------


def node(slot: Slot, phase: Phase, reads: str, writes: str, lane: Lane = Lane.COMPUTE) -> ScheduleNode:
    return ScheduleNode(0, slot, phase, lane, (), tuple(reads.split()), tuple(writes.split()))


SMALL = ChunkGraph(
    None,
    (
        node(Slot.PRE_DISPATCH, Phase.F, "", "a saved"),
        node(Slot.DISPATCH, Phase.F, "a", "b", Lane.COMM),
        node(Slot.EXPERTS, Phase.F, "b", "c view"),
        node(Slot.EXPERTS, Phase.B, "view saved", "d e"),
        node(Slot.DISPATCH, Phase.B, "d", "f", Lane.COMM),
        node(Slot.PRE_DISPATCH, Phase.B, "f", ""),
        node(Slot.EXPERTS, Phase.W, "e c", ""),
    ),
    layers=1,
    buffers={"a": ("a", 1), "saved": ("s", 2), "b": ("b", 4), "c": ("c", 8), "view": ("c", 8)}
    | {"d": ("d", 16), "e": ("e", 32), "f": ("f", 64)},
)
"""`view` stands in the storage of `c`."""


def test_bytes_of_nodes_by_hand() -> None:
    assert node_bytes(SMALL) == {
        "L0.pre_dispatch.F": {"passed": 1, "kept": 2, "inside": 3},
        "L0.dispatch.F": {"passed": 4, "kept": 0, "inside": 4},
        "L0.experts.F": {"passed": 0, "kept": 8, "inside": 8},
        "L0.experts.B": {"passed": 16, "kept": 32, "inside": 48},
        "L0.dispatch.B": {"passed": 64, "kept": 0, "inside": 64},
        "L0.pre_dispatch.B": {"passed": 0, "kept": 0, "inside": 0},
        "L0.experts.W": {"passed": 0, "kept": 0, "inside": 0},
    }


def test_blocks_and_held_bytes_by_hand() -> None:
    costs = CostTable({name: NodeCost(**own) for name, own in node_bytes(SMALL).items()}, MACHINES["cpu"], "test")
    tasks = tasks_of({"F": SMALL, "B": SMALL}, costs)
    names = [f"{task.instance.node.name} {task.instance.mb}" for task in tasks]
    blocks = blocks_of({"F": SMALL, "B": SMALL}, tasks, costs)
    assert [(b.bytes, None if b.made is None else names[b.made], [names[i] for i in b.until]) for b in blocks] == [
        (1, "L0.pre_dispatch.F F", ["L0.dispatch.F F", "L0.experts.F F"]),  # what is sent, until it has arrived
        (2, "L0.pre_dispatch.F F", []),
        (4, "L0.dispatch.F F", ["L0.experts.F F"]),
        (8, "L0.experts.F F", []),
        (2, None, ["L0.experts.B B"]),
        (8, None, ["L0.experts.W B", "L0.experts.B B"]),  # c and the view
        (16, "L0.experts.B B", ["L0.dispatch.B B", "L0.pre_dispatch.B B"]),
        (32, "L0.experts.B B", ["L0.experts.W B"]),
        (64, "L0.dispatch.B B", ["L0.pre_dispatch.B B"]),
    ]
    order = {name: i for i, name in enumerate(names)}
    backward = [order[f"L0.{each} B"] for each in ("experts.B", "dispatch.B", "pre_dispatch.B", "experts.W")]
    forward = [order[f"L0.{each} F"] for each in ("pre_dispatch.F", "dispatch.F", "experts.F")]
    # 8 of c, d and e behind experts.B, then f.
    assert held_bytes([*backward, *forward], tasks, blocks) == 8 + 16 + 32 + 64
    # The forward's 2 and 8 beside them.
    assert held_bytes([*forward, *backward], tasks, blocks) == 2 + 8 + 8 + 16 + 32 + 64
    w_first = [backward[0], backward[3], *backward[1:3]]
    assert held_bytes([*w_first, *forward], tasks, blocks) == 16 + 64


@pytest.mark.parametrize("seed", range(3))
def test_held_bytes_of_any_order(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        chunk, costs = drawn(rng)
        chunks = dict.fromkeys(rng.choice((("F",), ("B",), ("F", "B"), ("F0", "F1"))), chunk)
        tasks = tasks_of(chunks, costs)
        blocks, order = blocks_of(chunks, tasks, costs), any_order(tasks, rng)
        assert held_bytes(order, tasks, blocks) == held_step_by_step(order, tasks, blocks)


def test_blocks_count_what_the_exact_memory_does() -> None:
    """In a graph whose nodes are one op each, nothing is rounded: with one microbatch they are equal."""
    costs = CostTable({name: NodeCost(**own) for name, own in node_bytes(SMALL).items()}, MACHINES["cpu"], "test")
    for kind in "FB":
        tasks = tasks_of({kind: SMALL}, costs)
        order = tuple(task.instance for task in tasks)
        plan = Plan(kind, {kind: SMALL}, order, costs)
        exact = peak_bytes([fxo.ir.Round(plan, {kind: 0})])
        assert held(plan) == exact


# --- the search -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_orders_with_room(seed: int) -> None:
    """Legal, never slower than `sequential`, and little above what they may hold."""
    rng, config = random.Random(seed), fxo.OverlapConfig()
    for _ in range(4):
        chunk, costs = drawn(rng)
        last = build_plan(chunk, chunk, fxo.OverlapConfig(schedule="sequential"), costs)
        least, slowest = held(last), simulate_plan(last).makespan
        plans = {room: build_plan(chunk, chunk, config, costs, room) for room in ROOMS}
        free = held(plans[None])
        for room in ROOMS[1:]:
            to_fused(plans[room], config, [])  # runs verify
            assert simulate_plan(plans[room]).makespan <= slowest * (1 + 1e-9)
            assert held(plans[room]) <= MORE * (least + room * max(0, free - least))


@pytest.mark.parametrize("seed", range(4))
def test_the_search_counts_what_orders_hold(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The excess that it minimizes is that of `held_bytes`, and so is what is left behind the last node."""
    last: list[_Partial] = []
    path = _Partial.path
    monkeypatch.setattr(_Partial, "path", lambda self: last.append(self) or path(self))
    rng = random.Random(seed)
    for _ in range(8):
        chunk, costs = drawn(rng)
        chunks = dict.fromkeys(rng.choice((("F",), ("B",), ("F", "B"), ("B0", "B1"))), chunk)
        tasks = tasks_of(chunks, costs)
        blocks = blocks_of(chunks, tasks, costs)
        for room in (0, 500):
            order = search.search(tasks, costs.hardware, blocks, room)
            assert last[-1].excess == max(0, held_bytes(order, tasks, blocks) - room)
            assert last[-1].alive == sum(block.bytes for block in blocks if not block.until)


def test_blocks_change_nothing_without_room() -> None:
    rng = random.Random(0)
    changed = []
    for _ in range(6):
        chunk, costs = drawn(rng)
        chunks = {"F": chunk, "B": chunk}
        tasks = tasks_of(chunks, costs)
        blocks = blocks_of(chunks, tasks, costs)
        free = search.search(tasks, costs.hardware)
        assert free == search.search(tasks, costs.hardware, blocks)
        changed.append(free != search.search(tasks, costs.hardware, blocks, 0))
    assert any(changed)


def test_the_least_room_asks_for_no_free_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would decide nothing."""
    rooms: list[int | None] = []
    found = policies.search
    monkeypatch.setattr(policies, "search", lambda t, h, b, room: rooms.append(room) or found(t, h, b, room))
    chunk, costs = drawn(random.Random(1))
    for room in (0.5, 0.0):
        build_plan(chunk, chunk, fxo.OverlapConfig(), costs, room)
    assert [room is None for room in rooms] == [True, False, False]
