"""What nodes cost: rooflines of presets, tables of users, measurements, and plans that follow them."""

from __future__ import annotations

import json
import math
import pickle
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from synthetic import synthetic
from toys import batches, toy, train_both

import fxoverlap as fxo
from fxoverlap.costing import Measured, NodeTime, reduced, structure_of
from fxoverlap.errors import ConfigError
from fxoverlap.hardware import PRESETS, Hardware
from fxoverlap.ir import CostTable, Instance, Lane, NodeCost, Phase, ScheduleNode, Slot
from fxoverlap.runtime import Flight, NodeRun, StepProfile
from fxoverlap.schedule.cost import all_to_all_bytes, default_costs, hardware_of, seconds
from fxoverlap.schedule.policies import megatron, sequential

pytestmark = pytest.mark.usefixtures("shared_captures")

MIB = 2**20
DISPATCH = ScheduleNode(0, Slot.DISPATCH, Phase.F, Lane.COMM)
EXPERTS = ScheduleNode(0, Slot.EXPERTS, Phase.F, Lane.COMPUTE)
machines = st.sampled_from(list(PRESETS.values()))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write a table; its path."""

    def written(found: Any, name: str = "costs.json") -> str:
        (tmp_path / name).write_text(found if isinstance(found, str) else json.dumps(found))
        return str(tmp_path / name)

    return written


# --- the roofline ---------------------------------------------------------------------------------------------------


def exchange(sent: int, ranks: int, hardware: Hardware) -> float:
    return seconds(DISPATCH, NodeCost(bytes_sent=sent, ranks=ranks), hardware)


def test_b82_an_exchange_is_no_all_gather() -> None:
    """4 ranks with 1 MiB each: 0.75 MiB leave each of them, where an all-gather would bring 3 MiB to it."""
    assert all_to_all_bytes(MIB, 4) == 0.75 * MIB
    cpu = PRESETS["cpu"]
    assert math.isclose(exchange(MIB, 4, cpu) - cpu.latency_s, 0.75 * MIB / cpu.network_bytes_per_s)
    h100 = PRESETS["h100"]
    fast = 0.75 * MIB / (h100.fast_bytes_per_s * h100.efficiency)
    assert math.isclose(exchange(MIB, 4, h100) - h100.latency_s, fast, rel_tol=1e-9)


@given(machines, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 144), st.integers(1, 144))
@example(PRESETS["gb200"], MIB, MIB, 72, 76)
def test_exchanges_take_longer_with_more_bytes_or_ranks(hardware: Hardware, a: int, b: int, m: int, n: int) -> None:
    few, many = sorted((m, n))
    assert exchange(a, few, hardware) <= exchange(a, many, hardware) * (1 + 1e-12)
    for ranks in (few, many):
        assert exchange(min(a, b), ranks, hardware) <= exchange(max(a, b), ranks, hardware)
        # No more than what all bytes take on the slower link, as all-gathers would.
        slowest = min(hardware.fast_bytes_per_s, hardware.network_bytes_per_s) * hardware.efficiency
        assert exchange(a, ranks, hardware) <= (hardware.latency_s + a / slowest) * (1 + 1e-12)


@given(machines, *[st.integers(0, 2**50)] * 4)
def test_compute_takes_longer_with_more_work_or_bytes(hardware: Hardware, a: int, b: int, x: int, y: int) -> None:
    less = NodeCost(flops=min(a, b), bytes_moved=min(x, y))
    more = NodeCost(flops=max(a, b), bytes_moved=max(x, y))
    assert seconds(EXPERTS, less, hardware) <= seconds(EXPERTS, more, hardware)


# --- what the user gives --------------------------------------------------------------------------------------------


def test_presets_by_name() -> None:
    assert hardware_of(fxo.OverlapConfig()) == PRESETS["cpu"]
    assert hardware_of(fxo.OverlapConfig(costs="h100")) == PRESETS["h100"]
    found = default_costs(synthetic("E"), fxo.OverlapConfig(costs="gb200"))
    assert (found.source, found.hardware, found.known) == ("roofline gb200", PRESETS["gb200"], frozenset())


def test_table_of_a_user(write: Callable[..., str]) -> None:
    rows = [
        *({"name": "L0.experts.F", "ms": 1.2}, {"name": "experts.F", "ms": 2}, {"name": "post_process.F", "ms": 0}),
        {"name": "L1.combine.B", "ms": None, "lane": "comm"},
    ]
    path = write({"hardware": {"preset": "h100", "latency_s": 0, "domain": 4}, "nodes": rows, "more": 1})
    chunk = synthetic("EEE")
    chunk = replace(chunk, costs={node.name: NodeCost(flops=1000 + i) for i, node in enumerate(chunk.nodes)})
    for costs in (path, Path(path)):
        config = fxo.OverlapConfig(costs=costs)
        found = default_costs(chunk, pickle.loads(pickle.dumps(config)))
        assert found.hardware == replace(PRESETS["h100"], latency_s=0, domain=4)
        assert found.source == f"table {path}"
        names = ("L0.experts.F", "L1.experts.F", "L2.experts.F", "post_process.F")
        assert [found[name].seconds for name in names] == [1.2e-3, 2e-3, 2e-3, 0]
        assert found.known == {*names}
        rest = [node for node in chunk.nodes if node.name not in found.known]
        assert rest and all(found[n.name].seconds == seconds(n, chunk.costs[n.name], found.hardware) for n in rest)


@pytest.mark.parametrize("given", [{}, {"nodes": []}, {"hardware": {}}], ids=str)
def test_both_keys_may_be_missing(write: Callable[..., str], given: dict) -> None:
    found = default_costs(synthetic("E"), fxo.OverlapConfig(costs=write(given)))
    assert found.nodes == default_costs(synthetic("E"), fxo.OverlapConfig()).nodes


def row(**changes: Any) -> dict[str, Any]:
    return {"nodes": [{"name": "experts.F", "ms": 1, **changes}]}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", ["no JSON", "hardware and nodes"]),
        ([], ["the file is []", "an object"]),
        ({"hardware": "h100"}, ["hardware is 'h100'", "an object"]),
        ({"hardware": {"preset": "h1000"}}, ["hardware.preset is 'h1000'", "gb200"]),
        ({"hardware": {"preset": ["h100"]}}, ["hardware.preset is ['h100']", "gb200"]),
        ({"hardware": {"latency": 1}}, ["a field of hardware is 'latency'", "latency_s"]),
        ({"hardware": {"latency_s": -1}}, ["hardware.latency_s is -1", "seconds from 0 on"]),
        ({"hardware": {"flops_per_s": 0}}, ["hardware.flops_per_s is 0", "above 0"]),
        ({"hardware": {"flops_per_s": "1e12"}}, ["hardware.flops_per_s is '1e12'", "a number"]),
        ({"hardware": {"flops_per_s": True}}, ["hardware.flops_per_s is True", "a number"]),
        ({"hardware": {"network_bytes_per_s": math.inf}}, ["hardware.network_bytes_per_s is inf"]),
        ({"hardware": {"domain": 1.5}}, ["hardware.domain is 1.5", "an integer"]),
        ({"hardware": {"domain": 0}}, ["hardware.domain is 0", "from 1 on"]),
        ({"hardware": {"efficiency": 0}}, ["hardware.efficiency is 0", "not 0"]),
        ({"hardware": {"comm_share": 1.1}}, ["hardware.comm_share is 1.1", "from 0 to 1"]),
        ({"hardware": {"host_runs_ahead": 1}}, ["hardware.host_runs_ahead is 1", "true or false"]),
        ({"hardware": {"name": 3}}, ["hardware.name is 3", "a text"]),
        ({"nodes": {"experts.F": 1}}, ["nodes is {'experts.F': 1}", "a list"]),
        ({"nodes": ["experts.F"]}, ["nodes[0] is 'experts.F'", "a row"]),
        (row(name=3), ["nodes[0].name is 3", "a schedule node"]),
        ({"nodes": [{"ms": 1}]}, ["nodes[0].name is None"]),
        (row(ms=-1), ["nodes[0].ms (experts.F) is -1", "from 0 on, or null"]),
        (row(ms=math.nan), ["nodes[0].ms (experts.F) is nan", "from 0 on, or null"]),
        (row(ms="1"), ["nodes[0].ms (experts.F) is '1'"]),
        (row(ms=False), ["nodes[0].ms (experts.F) is False"]),
        ({"nodes": row()["nodes"] * 2}, ["nodes[1].name is 'experts.F'", "each name once"]),
    ],
    ids=str,
)
def test_a_wrong_table_is_refused_when_the_config_is_built(write: Callable[..., str], given: Any, words: list) -> None:
    path = write(given)
    with pytest.raises(ConfigError) as caught:
        fxo.OverlapConfig(costs=path)
    assert all(word in str(caught.value) for word in [path, *words]), str(caught.value)


@pytest.mark.parametrize("costs", ["h1000", "", 3, True, {"nodes": []}, b"costs.json"], ids=repr)
def test_what_is_no_source_of_costs(costs: Any) -> None:
    with pytest.raises(ConfigError, match=r"OverlapConfig\.costs is .*allowed: None, cpu, .*\.json file"):
        fxo.OverlapConfig(costs=costs)


def test_a_file_that_cannot_be_read(tmp_path: Path, write: Callable[..., str]) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.json", str(tmp_path / "missing.json"), tmp_path, tmp_path / "bytes.json"):
        with pytest.raises(ConfigError, match=r"OverlapConfig\.costs is .*cannot be read"):
            fxo.OverlapConfig(costs=path)
    config = fxo.OverlapConfig(costs=write({}))
    Path(str(config.costs)).unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        fxo.transform(toy("*-"), config, example_inputs=batches(1)[0])


@pytest.mark.parametrize("name", ["L7.pre_dispatch.F", "pre_dispatch.X", "L.post_process.F", ""])
def test_a_name_that_no_node_has_is_refused_when_the_model_is_traced(write: Callable[..., str], name: str) -> None:
    config = fxo.OverlapConfig(costs=write({"nodes": [{"name": name, "ms": 1}]}))
    with pytest.raises(ConfigError, match=rf"the row '{name}' is for no schedule node.*L0\.pre_dispatch\.F"):
        fxo.transform(toy("*-"), config, example_inputs=batches(1)[0])


def test_a_table_may_name_what_a_later_capture_lacks(write: Callable[..., str]) -> None:
    config = fxo.OverlapConfig(costs=write({"nodes": [{"name": "pre_process.W", "ms": 1}]}))
    overlapped = fxo.transform(toy("*-"), config)
    overlapped.step(batches(2))
    overlapped.module.embed.requires_grad_(False)
    overlapped.step(batches(2))
    assert "pre_process.W" not in {each["name"] for each in overlapped.report().nodes}


def test_the_dict_of_a_report_is_a_table(group: dist.ProcessGroup, write: Callable[..., str]) -> None:
    model = toy("[*E]", group)
    first = fxo.transform(model, example_inputs=batches(1)[0])
    before = first.report()
    unmeasured = write(before.to_dict(), "unmeasured.json")
    with first.profile():
        first.step(batches(3))
    first.step(batches(3))
    report = first.report()
    assert report.costs_from == "measured"
    path = write(report.to_dict())
    second = fxo.transform(model, fxo.OverlapConfig(costs=path), example_inputs=batches(1)[0])
    again = second.report()
    assert again.costs_from == f"table {path}"
    assert second.golden() == first.golden()
    assert again.hardware == report.hardware
    # Seconds are kept, and a factor of 1000 forth and back may cost the last digits.
    for a, b in zip(again.nodes, report.nodes, strict=True):
        assert math.isclose(a["planned_ms"], b["planned_ms"])
    rooflines = fxo.transform(model, fxo.OverlapConfig(costs=unmeasured), example_inputs=batches(1)[0]).report()
    assert all(
        math.isclose(a["planned_ms"], b["planned_ms"]) for a, b in zip(rooflines.nodes, before.nodes, strict=True)
    )


# --- what is measured -----------------------------------------------------------------------------------------------


def profile_of(takes: list[tuple[ScheduleNode, int, int, int]], **more: Any) -> StepProfile:
    """A step of nodes (node, begin, end, processor time) in us; an exchange has arrived at its end."""
    runs = []
    for node, begin, end, processor in takes:
        run = NodeRun(0, Instance(node, "F"), 0, begin * 1000, end * 1000, processor * 1000)
        if node.lane is Lane.COMM:
            run.end = (begin + 1) * 1000
            run.flights = [Flight("all_to_all_single", node.name, True, "g", 8, begin * 1000, run.end, end * 1000)]
        runs.append(run)
    return StepProfile(0, 10**9, tuple(runs), ("a",), **more)


def test_measured_times_are_medians_of_processor_time_and_of_transfers() -> None:
    combine = ScheduleNode(0, Slot.COMBINE, Phase.F, Lane.COMM)
    steps = [
        # The second exchange begins when the first has arrived, and sends as much. Gaps between nodes: 5, 1, 4 us.
        profile_of([(EXPERTS, 0, 95, 60), (DISPATCH, 100, 200, 1), (combine, 102, 260, 1), (EXPERTS, 107, 207, 80)]),
        profile_of([(EXPERTS, 0, 900, 70)]),
    ]
    found = Measured.of(steps)
    expected = {"L0.experts.F": 70e-6, "L0.dispatch.F": 80e-6, "L0.combine.F": 80e-6}
    assert {name: time.seconds for name, time in found.times["a"].items()} == pytest.approx(expected)
    spread = statistics.pstdev([60, 80, 70]) / 70
    assert [time.spread for time in found.times["a"].values()] == pytest.approx([spread, 0, 0])
    assert found.node_s == pytest.approx(4e-6)
    assert found.launch_s == pytest.approx(1e-6)
    # 35 and 20 us without the processor; for 100 us the node runs while an exchange is in flight.
    assert found.comm_share == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("times", "spread"), [([5], 0.0), ([8, 10, 12], 0.2 * (2 / 3) ** 0.5), ([10, 10, 9000], 1.0), ([0, 0, 7], 0.0)]
)
def test_spread_of_a_node(times: list[float], spread: float) -> None:
    """The standard deviation as a share of the median; at most all of it, and none where there is no time."""
    assert NodeTime.of(times).spread == pytest.approx(spread)


@pytest.mark.parametrize(
    ("begin", "processor", "share"), [(20, 0, 1.0), (20, 90, 0.0), (20, 60, 0.25), (120, 60, None)]
)
def test_share_of_communication(begin: int, processor: int, share: float | None) -> None:
    """What a node of 80 us takes without the processor, where an exchange of 100 us is in flight; from 0 to 1."""
    step = profile_of([(DISPATCH, 0, 100, 1), (EXPERTS, begin, begin + 80, processor)])
    assert Measured.of([step]).comm_share == (share if share is None else pytest.approx(share))


def test_what_was_not_measured_keeps_its_roofline() -> None:
    table = default_costs(synthetic("E"), fxo.OverlapConfig())
    measured = Measured({"a": {"L0.experts.F": NodeTime(7.0, 0.1), "gone.F": NodeTime(1.0, 0.0)}}, None, None, 0.5)
    found = measured.over(table, "a")
    assert found["L0.experts.F"] == replace(table["L0.experts.F"], seconds=7.0, spread=0.1)
    assert found.known == {"L0.experts.F"}
    assert {k: v for k, v in found.items() if k not in found.known} == {
        k: v for k, v in table.items() if k not in found.known
    }
    assert found.hardware == replace(PRESETS["cpu"], name="measured", comm_share=0.5)
    assert measured.over(table, "another") is table


def test_processor_time_is_less_than_the_wall_clock_and_leaves_out_waits(group: dist.ProcessGroup) -> None:
    overlapped = fxo.transform(toy("[*E]", group))
    with overlapped.profile():
        overlapped.step(batches(2))
    [step] = overlapped._profiled
    assert all(0 < run.processor <= run.end - run.begin for run in step.runs)
    assert 0 < sum(run.processor for run in step.runs) <= step.end - step.begin
    assert len(step.structures) == 2


# --- plans from costs -----------------------------------------------------------------------------------------------


class ByCosts:
    """A policy: `megatron` where experts take long, else `sequential`; notes what it was given."""

    def __init__(self) -> None:
        self.seen: list[CostTable] = []

    def __call__(self, f: Any, b: Any, costs: CostTable, config: Any) -> Any:
        self.seen.append(costs)
        is_long = max(cost.seconds for name, cost in costs.items() if "experts" in name) > 1
        return (megatron if is_long else sequential)(f, b, costs, config)


def slow(name: str) -> Callable[..., Measured]:
    """`Measured.of` of steps in which nodes of one name take 2 s, all others none."""

    def of(steps: list[StepProfile]) -> Measured:
        nodes = {run.instance.node.name for step in steps for run in step.runs}
        times = {each: NodeTime(2.0 * (name in each), 0.0) for each in nodes}
        return Measured({steps[0].structures[0]: times}, 0.0, 0.0, 0.0)

    return of


@pytest.mark.parametrize("schedule", ["auto", "policy"])
def test_measured_costs_change_the_next_plan_and_no_bit(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    policy = ByCosts()
    config = fxo.OverlapConfig(schedule=policy if schedule == "policy" else "auto")
    overlapped = fxo.transform(toy("[*E][*E]", group), config, example_inputs=batches(1)[0])
    plans = [str(overlapped.plan("FB"))]
    for name in ("experts", "dispatch"):
        monkeypatch.setattr(Measured, "of", slow(name))
        with overlapped.profile():
            assert train_both(overlapped, lambda step: batches(3, seed=step), steps=1) == []
        assert str(overlapped.plan("FB")) == plans[-1]  # until the next step
        assert train_both(overlapped, lambda step: batches(3, seed=step), steps=2) == []
        plans.append(str(overlapped.plan("FB")))
        report = overlapped.report()
        assert report.costs_from == report.hardware["name"] == "measured"
        assert [r["planned_ms"] for r in report.nodes] == [2000.0 * (name in r["name"]) for r in report.nodes]
    assert plans[1] != plans[2]
    with overlapped.profile():
        pass  # which measures nothing
    assert not overlapped._planner.has_news(overlapped._planner.latest())
    if schedule == "policy":
        assert policy.seen[-1].hardware.name == "measured"
        assert all(isinstance(cost, NodeCost) for cost in policy.seen[-1].values())


@pytest.mark.parametrize("schedule", ["megatron", "sequential"])
def test_fixed_schedules_show_what_was_measured_and_stay(group: dist.ProcessGroup, schedule: str) -> None:
    overlapped = fxo.transform(toy("[*E]", group), fxo.OverlapConfig(schedule=schedule))
    with overlapped.profile():
        overlapped.step(batches(2))
    programs = [built.program for built in overlapped._planner._built.values()]
    assert overlapped.report().costs_from == "measured"
    overlapped.step(batches(2))
    after = [built.program for built in overlapped._planner._built.values()]
    assert len(programs) == 3 and all(a is b for a, b in zip(programs, after, strict=True))


def test_costs_that_the_user_names_are_not_measured(group: dist.ProcessGroup) -> None:
    overlapped = fxo.transform(toy("[*E]", group), fxo.OverlapConfig(costs="h100"))
    with overlapped.profile():
        overlapped.step(batches(2))
    overlapped.step(batches(2))
    report = overlapped.report()
    assert report.costs_from == "roofline h100" and report.hardware == asdict(PRESETS["h100"])
    assert "costs: roofline h100; 989000 GFLOP/s" in str(report)


def test_orders_are_chosen_by_structure_and_not_by_lengths(group: dist.ProcessGroup) -> None:
    policy = ByCosts()
    overlapped = fxo.transform(toy("[*E]", group), fxo.OverlapConfig(schedule=policy))
    overlapped.step(batches(3))
    overlapped.module.zero_grad()
    count = len(policy.seen)
    assert count == 3  # F, FB, B
    assert train_both(overlapped, lambda step: [*batches(2, tokens=9), *batches(1)], steps=1) == []
    assert len(policy.seen) == count and overlapped.report().variants == 2
    overlapped.module.layers[1].requires_grad_(False)  # no weight gradients of the experts
    overlapped.step(batches(3))
    assert len(policy.seen) > count


# --- one table of several -------------------------------------------------------------------------------------------

CHUNK = synthetic("E")
NAMES = [node.name for node in CHUNK.nodes]


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    known = draw(st.frozensets(st.sampled_from(NAMES)))
    nodes = {n: NodeCost(draw(st.integers(0, 3)), ranks=2, seconds=draw(st.integers(0, 3)) / 2) for n in NAMES}
    name = "measured" if known else draw(st.sampled_from(["cpu", "h100"]))
    preset = PRESETS[draw(st.sampled_from(["cpu", "h100"]))]
    hardware = replace(preset, name=name, node_s=draw(st.integers(0, 3)), comm_share=draw(st.integers(0, 2)) / 2)
    return CostTable(nodes, hardware, "measured" if known else f"roofline {name}", known)


@settings(max_examples=50, deadline=None)
@given(st.lists(tables(), min_size=1, max_size=4), st.randoms(use_true_random=False), st.integers(1, 4))
def test_reduction_minds_neither_order_nor_groups_nor_repeats(found: list, random: Any, cut: int) -> None:
    whole = reduced(found, CHUNK)
    mixed = [*found, *found[:1]]
    random.shuffle(mixed)
    parts = [reduced(part, CHUNK) for part in (mixed[:cut], mixed[cut:]) if part]
    assert reduced(parts, CHUNK) == whole
    for node in CHUNK.nodes:
        having = [t[node.name].seconds for t in found if node.name in t.known] or [t[node.name].seconds for t in found]
        assert whole[node.name].seconds == max(having)
        assert whole[node.name].flops == max(t[node.name].flops for t in found)
    measured = [t for t in found if t.hardware.name == "measured"] or found
    assert whole.hardware.node_s == max(t.hardware.node_s for t in measured)
    assert whole.hardware.comm_share == max(t.hardware.comm_share for t in measured)


def test_structure_is_equal_for_other_lengths_only(group: dist.ProcessGroup) -> None:
    def of(pattern: str, tokens: int, **changes: Any) -> str:
        model = toy(pattern, group, **changes)
        overlapped = fxo.transform(model, example_inputs=batches(1, tokens=tokens)[0])
        return structure_of(overlapped._planner.latest()[0].chunk)

    assert of("E", 8) == of("E", 12, expert_dim=16) != of("E", 8, shared_dim=8)
    chunk = synthetic("E")
    names = [node.name for node in chunk.nodes]
    changed = [
        replace(chunk, effects=((names[0], names[1]),)),
        replace(chunk, layers=2),
        replace(chunk, acting=(names[0],)),
        replace(chunk, nodes=(replace(chunk.nodes[0], lane=Lane.COMM), *chunk.nodes[1:])),
        replace(chunk, nodes=(*chunk.nodes[:-1], replace(chunk.nodes[-1], reads=()))),
    ]
    assert len({structure_of(each) for each in (chunk, *changed)}) == 6
