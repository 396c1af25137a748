"""The simulator: queues of process groups, a host that waits for counts, overlap, exposed time, and peak memory.

Times are in milliseconds, of nodes whose chunks are made by hand, so that every expected figure can be added up.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from fxoverlap.hardware import Hardware
from fxoverlap.ir import ChunkGraph, CostTable, Instance, Lane, NodeCost, Phase, Plan, Round, ScheduleNode, Slot
from fxoverlap.schedule.memory import peak_bytes
from fxoverlap.schedule.simulate import Machine, Simulation, simulate, simulate_plan, simulate_ranks
from fxoverlap.schedule.tasks import lower_bound, tasks_of

MS = 1e-3
GPU = Hardware("a gpu", 1e12, 1e12, 1e9, 8, 1e9, 0.0, 1.0, 0.0, 0.0, True, 0.0)
CPU = replace(GPU, name="a cpu", host_runs_ahead=False)

# Slot (and with it the lane), milliseconds, what it reads, what it writes.
Row = tuple[Slot, float, tuple[str, ...], tuple[str, ...]]
COMM = (Slot.COUNTS, Slot.DISPATCH, Slot.COMBINE)

WEIGHT: Row = (Slot.EXPERTS, 4, ("grad",), ())
COMBINE: Row = (Slot.COMBINE, 10, ("sent",), ("came",))
ROUTER: Row = (Slot.PRE_DISPATCH, 1, ("x",), ("count", "h"))
COUNTS: Row = (Slot.COUNTS, 2, ("count",), ("counts",))
PERMUTE: Row = (Slot.PERMUTE, 1, ("counts", "h"), ("rows",))
DISPATCH: Row = (Slot.DISPATCH, 5, ("rows",), ("got",))


def plan(*rows: Row, sizes: dict[str, int] | None = None, hardware: Hardware = GPU) -> Plan:
    """A plan of one microbatch that issues these nodes in order; a slot may come once."""
    nodes, costs = [], {}
    for slot, ms, reads, writes in rows:
        lane = Lane.COMM if slot in COMM else Lane.COMPUTE
        node = ScheduleNode(0, slot, Phase.F, lane, (), reads, writes)
        nodes.append(node)
        costs[node.name] = NodeCost(seconds=ms * MS)
    buffers = {value: (value, size) for value, size in (sizes or {}).items()}
    chunk = ChunkGraph(None, tuple(nodes), layers=1, buffers=buffers)
    order = tuple(Instance(node, "F") for node in nodes)
    return Plan("F", {"F": chunk}, order, CostTable(costs, hardware, "by hand"))


def run(*rows: Row, hardware: Hardware = GPU) -> Simulation:
    return simulate_plan(plan(*rows, hardware=hardware))


def spans(simulation: Simulation) -> dict[Slot, tuple[float, float]]:
    """(begin, end) of each node."""
    return {s.instance.node.slot: (round(s.begin / MS, 6), round(s.end / MS, 6)) for s in simulation.timeline}


@pytest.mark.parametrize(("groups", "ends"), [(("a", "a"), (10, 20)), (("a", "b"), (10, 10))])
def test_b65_a_group_runs_one_exchange_at_a_time(groups: tuple[str, str], ends: tuple[float, float]) -> None:
    machine = Machine(GPU)
    found = [machine.launch(10 * MS, 0.0, group) for group in groups]
    assert [end for _, _, end in found] == pytest.approx([end * MS for end in ends])


def test_b65_a_wait_pays_for_what_its_group_has_launched_before() -> None:
    """Both begin with nothing computed; the reader of the second waits for the first too."""
    reader: Row = (Slot.EXPERTS, 4, ("got",), ("made",))
    later: Row = (Slot.DISPATCH, 10, ("others",), ("got",))
    assert spans(run(COMBINE, later, reader)) == {
        Slot.COMBINE: (0, 10),
        Slot.DISPATCH: (10, 20),
        Slot.EXPERTS: (20, 24),
    }


def test_a_host_that_waits_for_counts_leaves_the_compute_lane_empty() -> None:
    """Counts queue behind a token exchange; what is issued behind their reader waits for both."""
    late = run(COMBINE, ROUTER, COUNTS, PERMUTE, WEIGHT)
    assert spans(late)[Slot.COUNTS] == (10, 12)
    assert spans(late)[Slot.EXPERTS] == (13, 17)
    assert late.exposed == pytest.approx(9 * MS)  # combine is in flight for 10, the router computes in 1 of them
    early = run(COMBINE, ROUTER, COUNTS, WEIGHT, PERMUTE)
    assert spans(early)[Slot.EXPERTS] == (1, 5)
    assert early.exposed == pytest.approx(5 * MS)
    assert (late.makespan, early.makespan) == pytest.approx((17 * MS, 13 * MS))
    # It is the host that waits: what follows the reader is not even issued before.
    issued = [{s.instance.node.slot: s.launched for s in each.timeline}[Slot.EXPERTS] for each in (late, early)]
    assert issued == pytest.approx([12 * MS, 0])


def test_counts_of_an_earlier_plan_are_there() -> None:
    step = plan(ROUTER, COUNTS, PERMUTE)
    assert simulate_plan(replace(step, order=step.order[2:])).makespan == pytest.approx(1 * MS)


def test_overlap_is_time_with_both_over_time_with_communication() -> None:
    """As Holistic Trace Analysis defines it. The dispatch begins when its rows are there, though issued at once."""
    found = run(ROUTER, COUNTS, PERMUTE, DISPATCH, WEIGHT)
    assert spans(found)[Slot.DISPATCH] == (4, 9) and spans(found)[Slot.EXPERTS] == (4, 8)
    assert found.overlap_pct == pytest.approx(80)
    assert found.exposed == pytest.approx(1 * MS)
    alone = run((Slot.PRE_DISPATCH, 20, ("x",), ("rows",)), DISPATCH)
    assert alone.overlap_pct == 0  # issued at 0, but in flight from 20 to 25
    assert run(ROUTER).overlap_pct is None
    assert run(ROUTER, COUNTS).overlap_pct is None  # counts are no tokens


def test_a_processor_computes_and_issues_in_turn() -> None:
    """Where the host does not run ahead, what is issued later begins later, and issuing takes time of the lane."""
    found = run(ROUTER, WEIGHT, COMBINE, hardware=replace(CPU, node_s=0.5 * MS))
    assert spans(found) == {Slot.PRE_DISPATCH: (0.5, 1.5), Slot.EXPERTS: (2, 6), Slot.COMBINE: (6.5, 16.5)}
    assert found.busy == pytest.approx({Lane.COMPUTE: 5 * MS, Lane.COMM: 10 * MS, Lane.HOST: 1.5 * MS})


def test_communication_takes_its_share_of_the_compute_lane() -> None:
    """A fifth of the lane, for 10 ms: 4 ms of compute take 5, and 12 ms take 14."""
    gpu = replace(GPU, comm_share=0.2)
    assert spans(run(COMBINE, WEIGHT, hardware=gpu))[Slot.EXPERTS] == (0, 5)
    assert spans(run(COMBINE, (Slot.EXPERTS, 12, (), ()), hardware=gpu))[Slot.EXPERTS] == (0, 14)
    # Issued behind the compute that it slows down: what follows that begins later.
    assert spans(run(WEIGHT, COMBINE, ROUTER, hardware=gpu))[Slot.PRE_DISPATCH] == (5, 6.25)


@pytest.mark.parametrize("hardware", [GPU, CPU])
def test_a_launch_takes_time_of_the_host(hardware: Hardware) -> None:
    """The exchange is under way meanwhile; what is issued next begins later."""
    found = spans(run(COMBINE, WEIGHT, hardware=replace(hardware, launch_s=0.5 * MS, node_s=0.25 * MS)))
    assert found[Slot.COMBINE][0] == 0.25
    assert found[Slot.EXPERTS][0] == 1.0


def test_a_step_lasts_until_its_last_launch_and_slowed_node_are_done() -> None:
    """Nothing is issued behind them whose begin would tell."""
    assert run(ROUTER, COUNTS, hardware=replace(CPU, launch_s=3 * MS)).makespan == pytest.approx(4 * MS)
    # The counts take a fifth of the lane from 1 to 3 ms.
    assert run(ROUTER, WEIGHT, COUNTS, hardware=replace(GPU, comm_share=0.2)).makespan == pytest.approx(5.4 * MS)


def test_a_reader_is_issued_while_the_exchange_is_in_flight() -> None:
    """So the bound counts no issue between the two."""
    after: Row = (Slot.POST_COMBINE, 1, ("came",), ())
    step = plan((Slot.PRE_DISPATCH, 1, ("x",), ("sent",)), COMBINE, after, hardware=replace(CPU, node_s=1 * MS))
    least = lower_bound(tasks_of(step.chunks, step.costs), step.costs.hardware)
    # Issue, compute, issue, exchange, compute.
    assert simulate_plan(step).makespan == pytest.approx(14 * MS) == pytest.approx(least)


def test_peak_is_that_of_a_hand_computed_example() -> None:
    sizes = {"h": 5, "count": 1, "counts": 1, "rows": 40, "got": 30}
    read = (Slot.EXPERTS, 1.0, ("got",), ())
    step = plan(ROUTER, COUNTS, PERMUTE, DISPATCH, read, sizes=sizes)
    rounds = [Round(step, {"F": 0})]
    # Rows and got are alive together; the rest is dead by then.
    assert peak_bytes(rounds) == 40 + 30
    # What the dispatch sends is alive until its result is read, so beside what is made in the meantime.
    between = (Slot.SHARED, 1.0, ("x",), ("aside",))
    step = plan(ROUTER, COUNTS, PERMUTE, DISPATCH, between, read, sizes=sizes | {"aside": 20})
    assert peak_bytes([Round(step, {"F": 0})]) == 40 + 30 + 20
    step = plan(ROUTER, COUNTS, PERMUTE, DISPATCH, replace_reads(read, "got", "h"), sizes=sizes)
    assert peak_bytes([Round(step, {"F": 0})]) == 40 + 30 + 5
    # Two microbatches, of which nothing of the first is left.
    assert peak_bytes([Round(step, {"F": 0}), Round(step, {"F": 1})]) == 40 + 30 + 5


def replace_reads(row: Row, *reads: str) -> Row:
    return row[0], row[1], reads, row[3]


def test_views_of_one_buffer_count_once() -> None:
    step = plan(ROUTER, (Slot.EXPERTS, 1, ("h", "count"), ()))
    chunk = replace(step.chunks["F"], buffers={"h": ("storage", 8), "count": ("storage", 8)})
    assert peak_bytes([Round(replace(step, chunks={"F": chunk}), {"F": 0})]) == 8


def test_rounds_follow_each_other_on_the_same_lanes() -> None:
    """The second microbatch computes while the first one's exchange is in flight."""
    step = plan((Slot.PRE_DISPATCH, 3, ("x",), ("rows",)), DISPATCH)
    found = simulate([Round(step, {"F": 0}), Round(step, {"F": 1})])
    assert [(round(s.begin / MS), round(s.end / MS)) for s in found.timeline] == [(0, 3), (3, 8), (3, 6), (8, 13)]


def test_the_same_step_gives_the_same_figures() -> None:
    rows = (COMBINE, ROUTER, COUNTS, WEIGHT, PERMUTE, DISPATCH)
    assert run(*rows) == run(*rows)


def varied(spread: float, ranks: int, hardware: Hardware = CPU) -> list[Round]:
    """Two microbatches that compute, exchange and compute, in times that vary."""
    step = plan((Slot.PRE_DISPATCH, 3, ("x",), ("rows",)), DISPATCH, (Slot.EXPERTS, 4, ("got",), ()), hardware=hardware)
    nodes = {name: replace(cost, spread=spread) for name, cost in step.costs.items()}
    nodes["L0.dispatch.F"] = replace(nodes["L0.dispatch.F"], ranks=ranks)
    step = replace(step, costs=replace(step.costs, nodes=nodes))
    return [Round(step, {"F": 0}), Round(step, {"F": 1})]


@pytest.mark.parametrize(("spread", "ranks"), [(0.0, 4), (0.3, 1)])
def test_ranks_run_alike_without_spread_and_alone(spread: float, ranks: int) -> None:
    step = varied(spread, ranks)
    assert simulate_ranks(step) == [simulate(step)]


@pytest.mark.parametrize("hardware", [CPU, GPU])
def test_an_exchange_waits_for_the_last_rank(hardware: Hardware) -> None:
    """It ends at one time on all ranks, no earlier than the last of them could begin it."""
    first = simulate_ranks(varied(0.3, 3, hardware))[:3]
    exchanges = [[s for s in each.timeline if s.instance.node.lane is Lane.COMM] for each in first]
    for there in zip(*exchanges, strict=True):
        assert len({each.begin for each in there}) == 3 and len({each.end for each in there}) == 1
        assert there[0].end - max(each.begin for each in there) >= 0.1 * 5 * MS


def test_ranks_that_vary_take_longer_than_ranks_that_run_alike() -> None:
    """Each waits for the other in turn; the figures are the same in every call."""
    alike = simulate(varied(0.3, 2))
    found = simulate_ranks(varied(0.3, 2))
    assert found == simulate_ranks(varied(0.3, 2))
    assert statistics.mean(each.makespan for each in found) > 1.02 * alike.makespan
    assert len(found) >= 2 * 2000 / 6  # a short step is averaged over many draws


def test_the_largest_groups_are_simulated_by_four_ranks() -> None:
    assert len(simulate_ranks(varied(0.3, 64))) == 4 * len(simulate_ranks(varied(0.3, 2))) / 2
