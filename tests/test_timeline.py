"""The trace of a profiled step, read back from its JSON: what Perfetto needs, and the figures of the report in it.

Two ranks with other numbers of tokens profile steps of several models; each test looks at what they wrote.
"""

from __future__ import annotations

import copy
import itertools
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from toys import RawMoE, batches, differences, eager_step, same_bits, toy
from two_ranks import TwoRanks

import fxoverlap as fxo
from fxoverlap.ir import Instance, Lane, Phase, ScheduleNode, Slot
from fxoverlap.report.measured import figures, node_times, transfers
from fxoverlap.report.timeline import trace
from fxoverlap.runtime import Flight, NodeRun, StepProfile
from fxoverlap.runtime.profile import Wait

pytestmark = pytest.mark.usefixtures("shared_captures")

MICROBATCHES = 3


class Net(nn.Module):
    """MoE blocks over some groups, behind a sum over all ranks as in tensor parallelism."""

    def __init__(self, *groups: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(RawMoE(16, 4, group) for group in groups)
        self.group = groups[0].group_name

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + funcol.all_reduce(x.detach().mean(), "sum", self.group)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def models() -> dict[str, nn.Module]:
    world = dist.group.WORLD
    return {
        "moe": toy("EE", world),
        "shared expert": toy("E-", world, shared_dim=16),
        "no exchange": toy("*-"),
        "raw collectives": Net(world),
        "all-to-alls of another group": Net(world, dist.new_group([0, 1])),
    }


def profiled(rank: int) -> dict[str, dict[str, Any]]:
    """By model: the trace of a step, the report, the plans, and how the step differs from eager."""
    found = {}
    for name, model in models().items():
        microbatches = batches(MICROBATCHES, rank, tokens=8 + 8 * rank)
        overlapped = fxo.transform(model, fxo.OverlapConfig(process_group=dist.group.WORLD))
        with overlapped.profile():
            result = overlapped.step(microbatches)
        gradients = {key: param.grad for key, param in model.named_parameters()}
        model.zero_grad()
        losses = eager_step(model, microbatches)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "timeline.json"
            overlapped.timeline(path)
            text = path.read_text()
        found[name] = {
            "text": text,
            "report": overlapped.report().to_dict(),
            "plans": {kind: overlapped.plan(kind).order for kind in ("F", "FB", "B")},
            "equal": all(map(same_bits, losses, result.losses))
            and all(
                (p.grad is None) == (gradients[key] is None) and (p.grad is None or same_bits(p.grad, gradients[key]))
                for key, p in model.named_parameters()
            ),
        }
    return found


def failing(rank: int) -> dict[str, Any]:
    """A profiled step that fails on rank 1 alone, and the one after it."""
    model = toy("E", dist.group.WORLD)
    overlapped = fxo.transform(model)
    microbatches = batches(MICROBATCHES, rank)
    overlapped.step(microbatches)
    model.zero_grad()

    def fail(gradient: Tensor) -> None:
        raise ValueError("a bad value")

    handle = model.layers[0].router.weight.register_hook(fail) if rank == 1 else None
    error = "none"
    with overlapped.profile():
        try:
            overlapped.step(microbatches)
        except fxo.StepError as caught:
            error = str(caught)
        if handle is not None:
            handle.remove()
        after_failure = overlapped.report().profiled_steps
        losses = overlapped.step(microbatches).losses
    eager = copy.deepcopy(model)
    eager.zero_grad()
    expected_losses = eager_step(eager, microbatches)
    equal = all(map(same_bits, losses, expected_losses)) and not differences(eager, model)
    steps = (after_failure, overlapped.report().profiled_steps)
    return {"error": error, "equal": equal, "steps": steps}


def both(rank: int) -> dict[str, dict[str, Any]]:
    return {**profiled(rank), "failing": failing(rank)}


@pytest.fixture(scope="module")
def ranks(two_ranks: TwoRanks) -> list[dict[str, dict[str, Any]]]:
    return two_ranks.run(both, timeout_s=300)


RAW = {
    "raw collectives": {"all_reduce": MICROBATCHES},
    # Of counts; of tokens, of their weights and of what experts made of them, in forward and in backward.
    "all-to-alls of another group": {"all_reduce": MICROBATCHES, "all_to_all_single": 7 * MICROBATCHES},
}
"""Collectives of a step that are no exchanges, by name."""

CASES = ("moe", "shared expert", "no exchange", "raw collectives", "all-to-alls of another group")


@pytest.fixture(params=[(rank, case) for rank in (0, 1) for case in CASES], ids=lambda p: f"rank {p[0]}, {p[1]}")
def seen(request: pytest.FixtureRequest, ranks: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """What one rank has seen of one model, with its events."""
    rank, case = request.param
    events = json.loads(ranks[rank][case]["text"])["traceEvents"]
    return {**ranks[rank][case], "rank": rank, "case": case, "events": events}


def slices(seen: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    """The complete events of some categories, or all of them."""
    return [e for e in seen["events"] if e["ph"] == "X" and (not kinds or e["cat"] in kinds)]


def ns(event: dict[str, Any]) -> tuple[int, int]:
    """Begin and end. Microseconds with three decimals are whole nanoseconds, which a float holds."""
    begin = round(event["ts"] * 1000)
    return begin, begin + round(event["dur"] * 1000)


def expected(seen: dict[str, Any], *lanes: Lane) -> list[tuple[str, int, int]]:
    """(node, microbatch, program) of each instance of the step on some lanes, in plan order."""
    kinds = ["F", *["FB"] * (MICROBATCHES - 1), "B"]
    return [
        (i.node.name, program if i.mb == "F" else program - 1, program)
        for program, kind in enumerate(kinds)
        for i in seen["plans"][kind]
        if i.node.lane in lanes
    ]


def test_a_profiled_step_equals_eager(seen: dict[str, Any]) -> None:
    assert seen["equal"]


def test_step_that_fails_on_one_rank_leaves_no_profile(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank, each in enumerate(ranks):
        found = each["failing"]
        assert "a bad value" in found["error"] and ("rank 1 failed" in found["error"]) == (rank == 0)
        assert "restart" not in found["error"]
        assert found["steps"] == (0, 1) and found["equal"]


def test_events_are_complete(seen: dict[str, Any]) -> None:
    assert slices(seen)
    for event in seen["events"]:
        assert event["name"] and event["pid"] == seen["rank"] and isinstance(event["tid"], int)
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
    last = max(ns(event)[1] for event in slices(seen))
    assert last <= round(seen["report"]["step_ms"] * 1e6)


def test_processes_and_rows_are_named(seen: dict[str, Any]) -> None:
    names = {(e["name"], e["tid"]): e["args"] for e in seen["events"] if e["ph"] == "M"}
    assert names["process_name", 0] == {"name": f"rank {seen['rank']}"}
    rows = {tid: args["name"] for (kind, tid), args in names.items() if kind == "thread_name"}
    assert {event["tid"] for event in slices(seen)} == set(rows)
    assert rows == {0: "compute"} | ({} if seen["case"] == "no exchange" else {1: "comm"})
    assert {tid for kind, tid in names if kind == "thread_sort_index"} == set(rows)


def test_slices_of_a_row_follow_one_another_or_nest(seen: dict[str, Any]) -> None:
    for tid in {event["tid"] for event in slices(seen)}:
        open_until: list[int] = []
        for begin, end in sorted(
            (ns(e) for e in slices(seen) if e["tid"] == tid), key=lambda each: (each[0], -each[1])
        ):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_compute_row_has_the_instances_in_plan_order(seen: dict[str, Any]) -> None:
    nodes = sorted(slices(seen, "node"), key=ns)
    assert {event["tid"] for event in nodes} == {0}
    found = [(e["name"], e["args"]["microbatch"], e["args"]["program"]) for e in nodes]
    assert found == expected(seen, Lane.COMPUTE)
    for event in nodes:
        layer, args = event["args"]["layer"], event["args"]
        prefix = "" if layer is None else f"L{layer}."
        assert event["name"] == f"{prefix}{args['slot']}.{args['phase']}"
    assert sum(event["args"]["mflop"] for event in nodes) > 0


def test_each_exchange_has_its_launch_its_flight_and_its_wait(seen: dict[str, Any]) -> None:
    instances = expected(seen, Lane.COMM)
    assert bool(instances) == (seen["case"] != "no exchange")

    def identity(event: dict[str, Any]) -> tuple[str, int, int]:
        return event["name"].split()[-1], event["args"]["microbatch"], event["args"]["program"]

    launches = [e for e in sorted(slices(seen, "launch"), key=ns) if "." in e["name"]]
    assert [identity(e) for e in launches] == instances
    flights = {identity(e): e for e in slices(seen, "exchange")}
    assert sorted(flights) == sorted(instances)
    # An exchange is waited for in its own microbatch, so the two names fit together.
    waits = {identity(e): e for e in slices(seen, "wait") if "." in e["name"]}
    assert sorted(waits) == sorted(instances)
    for event in launches:
        flight, wait = flights[identity(event)], waits[identity(event)]
        launched = ns(flight)[0] - round(flight["args"]["queue_us"] * 1000)
        assert ns(event)[0] <= launched <= ns(event)[1]
        assert ns(flight)[1] <= ns(wait)[1] and ns(event)[1] <= ns(wait)[0]
        assert flight["args"]["bytes_sent"] > 0 and flight["args"]["queue_us"] >= 0


def test_waits_lie_in_nodes_of_their_microbatch(seen: dict[str, Any]) -> None:
    nodes = slices(seen, "node")
    for wait in [e for e in slices(seen, "wait", "launch") if e["cat"] == "wait" or "." not in e["name"]]:
        [node] = [e for e in nodes if ns(e)[0] <= ns(wait)[0] and ns(wait)[1] <= ns(e)[1]]
        for key in ("microbatch", "phase", "slot", "program"):
            assert wait["args"][key] == node["args"][key]
    for node in nodes:
        inside = [e for e in slices(seen, "wait") if ns(node)[0] <= ns(e)[0] and ns(e)[1] <= ns(node)[1]]
        assert round(node["args"]["waited_us"] * 1000) == sum(ns(e)[1] - ns(e)[0] for e in inside)
    raw = Counter(e["name"] for e in slices(seen, "wait", "launch") if "." not in e["name"])
    expected_raw = RAW.get(seen["case"], {})
    assert raw == {f"{what} {op}": count for op, count in expected_raw.items() for what in ("launch", "wait")}


def by_sweep(flights: list[tuple[int, int]], idle: list[tuple[int, int]]) -> tuple[int, int]:
    """(time in which something is in flight, that part of it in which the rank computes) in ns, instant by instant."""
    edges = sorted({edge for interval in [*flights, *idle] for edge in interval})
    total = computing = 0
    for begin, end in itertools.pairwise(edges):
        if any(a <= begin and end <= b for a, b in flights):
            total += end - begin
            computing += 0 if any(a <= begin and end <= b for a, b in idle) else end - begin
    return total, computing


@pytest.mark.parametrize("part", ["whole", "steady"])
def test_events_add_up_to_the_figures_of_the_report(seen: dict[str, Any], part: str) -> None:
    def of_part(event: dict[str, Any]) -> bool:
        return part == "whole" or 0 < event["args"]["program"] < MICROBATCHES

    flights = []
    for event in filter(of_part, slices(seen, "exchange")):
        if event["args"]["slot"] != "counts":
            begin, end = ns(event)
            flights.append((begin - round(event["args"]["queue_us"] * 1000), end))
    waits = [ns(event) for event in filter(of_part, slices(seen, "wait"))]
    launches = [ns(event) for event in filter(of_part, slices(seen, "launch"))]
    total, computing = by_sweep(flights, [*waits, *launches])
    prefix = "" if part == "whole" else "steady_"
    report = {name: seen["report"][prefix + name] for name in ("comm_ms", "exposed_ms", "overlap_pct")}
    # The trace has whole nanoseconds, as the report has: what is left is the rounding of a division.
    assert report["comm_ms"] == pytest.approx(total / 1e6, rel=1e-12)
    assert report["exposed_ms"] == pytest.approx(sum(b - a for a, b in waits) / 1e6, rel=1e-12)
    if seen["case"] == "no exchange":
        assert report["overlap_pct"] is None and total == 0
    else:
        assert report["overlap_pct"] == pytest.approx(100 * computing / total, abs=1e-9)


# --- by hand --------------------------------------------------------------------------------------------------------


MS = 1_000_000


def run(slot: Slot, lane: Lane, begin: int, end: int) -> NodeRun:
    """A node instance that ran from one millisecond to another."""
    return NodeRun(0, Instance(ScheduleNode(0, slot, Phase.F, lane), "F"), 0, begin * MS, end * MS)


def exchange(slot: Slot, begin: int, launched: int, end: int, group: str = "ep") -> NodeRun:
    """An exchange whose launch took from one millisecond to another, and whose data came at a third."""
    found = run(slot, Lane.COMM, begin, launched)
    flight = Flight("all_to_all_single", found.instance.node.name, True, group, 64, begin * MS, launched * MS, end * MS)
    found.flights.append(flight)
    return found


def test_figures_of_a_step_by_hand() -> None:
    counts, dispatch = exchange(Slot.COUNTS, 10, 11, 15), exchange(Slot.DISPATCH, 12, 14, 40)
    experts = run(Slot.EXPERTS, Lane.COMPUTE, 20, 50)
    experts.waits.append(Wait(30 * MS, 42 * MS, dispatch.flights[0]))
    step = StepProfile(0, 100 * MS, (counts, dispatch, experts))
    found = figures([step])
    # In flight from 12 to 40; of that launching until 14 and waiting from 30.
    assert found["step_ms"] == 100 and found["comm_ms"] == 28 and found["exposed_ms"] == 12
    assert found["overlap_pct"] == pytest.approx(100 * 16 / 28)
    assert found["steady_ms"] is None and found["steady_overlap_pct"] is None
    # The tokens begin to travel when the counts have arrived.
    assert node_times([step]) == {
        "L0.counts.F": (5, 0),
        "L0.dispatch.F": (25, 3),
        "L0.experts.F": (18, 12),
    }


def test_an_exchange_that_passes_another_one_does_not_overlap_it() -> None:
    large, small = exchange(Slot.DISPATCH, 0, 1, 100), exchange(Slot.COUNTS, 10, 11, 20)
    other = exchange(Slot.COMBINE, 12, 13, 60, group="other")
    step = StepProfile(0, 200 * MS, (large, small, other))
    rows = [(t.group, t.launched // MS, t.begin // MS, t.end // MS) for t in transfers(step)]
    assert rows == [("ep", 10, 10, 20), ("other", 12, 12, 60), ("ep", 0, 20, 100)]
    names = {e["tid"]: e["args"]["name"] for e in trace(step, 0)["traceEvents"] if e["name"] == "thread_name"}
    assert names == {0: "compute", 1: "comm ep", 2: "comm other"}
