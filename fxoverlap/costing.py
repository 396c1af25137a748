"""What the schedule nodes of a model cost: measured where steps were profiled, and the same on every rank.

Costs are kept by *structure*: what of a chunk graph an order may depend on, without lengths. Captures of other lengths,
on this rank or another one, have one structure, one cost table and so one order.

A rank's own table of a structure holds what it measured or what the user gave, and the roofline for the other nodes.
Tables of several ranks become one by `reduced`: every node takes its longest time, as the slowest rank decides how long
the ranks compute between two exchanges, and the slowest link how long those take. A time that some rank measured or was
given counts more than any roofline. The reduction does not mind the order of the tables, nor the same one twice, so it
may go through several groups of ranks in turn.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

from fxoverlap.config import OverlapConfig
from fxoverlap.flow import needs_of
from fxoverlap.hardware import Hardware
from fxoverlap.ir import ChunkGraph, CostTable, Lane, NodeCost, Slot
from fxoverlap.report.measured import Transfer, transfers
from fxoverlap.runtime import NodeRun, StepProfile
from fxoverlap.schedule.cost import default_costs
from fxoverlap.schedule.intervals import common
from fxoverlap.schedule.pairs import edges_between
from fxoverlap.schedule.simulate import groups_of

MEASURED = "measured"
"""`CostTable.source`, and the name of the hardware, where a rank has profiled."""

Tables = Mapping[str, CostTable]
"""Cost tables by structure."""


def structure_of(chunk: ChunkGraph) -> str:
    """A hash of the nodes, their lanes and groups, what they read from one another, and what must keep its order.

    It is equal for chunks that differ in lengths only. Groups are numbered by first appearance, because their names may
    differ between ranks. What the backward reads from the forward is left out: no plan runs both of one microbatch, and
    a length of zero may leave less to read.
    """
    needs = {**needs_of("F", chunk), **needs_of("B", chunk)}
    groups = groups_of(chunk)
    number = {group: i for i, group in enumerate(dict.fromkeys(groups.values()))}
    lines = [f"{chunk.layers} layers"]
    for node in chunk.nodes:
        sources = dict.fromkeys(need.node for need in needs[node.name] if need.value is not None)
        group = f" group {number[groups[node.name]]}" if node.name in groups else ""
        lines.append(f"{node.name} {node.lane.value}{group}: {' '.join(sources)}")
    lines += [f"{earlier} before {later}" for earlier, later in (*chunk.effects, *chunk.replays)]
    lines += [str(edge) for kind in ("FF", "BB") for edge in edges_between(chunk, chunk, kind)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


_MOST_SPREAD = 1.0
"""Where a hiccup of the machine makes for more, it says nothing about the node."""


class NodeTime(NamedTuple):
    """What a node takes: the median in seconds, and how much it varies, as `NodeCost.spread`."""

    seconds: float
    spread: float

    @staticmethod
    def of(times: Sequence[float]) -> NodeTime:
        """What these times tell, which are in nanoseconds; at least one."""
        median = statistics.median(times)
        return NodeTime(median / 1e9, min(statistics.pstdev(times) / median, _MOST_SPREAD) if median else 0.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """What profiled steps of this rank tell; medians, in seconds.

    A compute node takes the processor time of its thread: the wall clock would also hold what other processes and the
    thread that communicates took from it. An exchange of tokens takes as long as its bytes need at the rate of all
    token exchanges of the step: by itself, the rank that launches it first also waits for the others, and the rank that
    launches it last finds much of it arrived, which makes up for one another over a step.

    Attributes:
        times: by structure, then by name of the node.
        node_s: from the end of one node to the beginning of the next; None in steps of one node.
        launch_s: from the beginning of an exchange's node to its end, the mean; None without exchanges.
        comm_share: what compute nodes take on the wall clock without the processor, as a share of the time in which
            they run while exchanges are in flight; None if none does.
    """

    times: Mapping[str, Mapping[str, NodeTime]]
    node_s: float | None
    launch_s: float | None
    comm_share: float | None

    @staticmethod
    def of(steps: Sequence[StepProfile]) -> Measured:
        """What these steps tell; at least one."""
        times: dict[str, dict[str, list[float]]] = {}
        for step in steps:
            taken: list[tuple[NodeRun, float]] = [
                (run, run.processor) for run in step.runs if run.instance.node.lane is not Lane.COMM
            ]
            taken += _exchange_times(transfers(step))
            for run, took in taken:
                of_structure = times.setdefault(step.structures[run.microbatch], {})
                of_structure.setdefault(run.instance.node.name, []).append(took)
        gaps = [after.begin - before.end for step in steps for before, after in pairwise(step.runs)]
        launches = [run.end - run.begin for step in steps for run in step.runs if run.instance.node.lane is Lane.COMM]
        shares = [share for share in map(_comm_share, steps) if share is not None]
        return Measured(
            {key: {name: NodeTime.of(each) for name, each in by.items()} for key, by in times.items()},
            statistics.median(gaps) / 1e9 if gaps else None,
            statistics.mean(launches) / 1e9 if launches else None,
            statistics.median(shares) if shares else None,
        )

    def over(self, table: CostTable, structure: str) -> CostTable:
        """A table with what was measured of its structure; the table itself if nothing was."""
        times = self.times.get(structure)
        if times is None:
            return table
        known = frozenset(times) & table.keys()
        nodes = {name: replace(c, **times[name]._asdict()) if name in known else c for name, c in table.items()}
        hardware = replace(
            table.hardware,
            name=MEASURED,
            node_s=table.hardware.node_s if self.node_s is None else self.node_s,
            launch_s=table.hardware.launch_s if self.launch_s is None else self.launch_s,
            comm_share=table.hardware.comm_share if self.comm_share is None else self.comm_share,
        )
        return CostTable(nodes, hardware, MEASURED, known)


def _exchange_times(exchanges: Sequence[Transfer]) -> Iterator[tuple[NodeRun, float]]:
    """(node run, ns) of each exchange of a step; all token exchanges need the same time a byte."""
    tokens = [each for each in exchanges if each.run.instance.node.slot is not Slot.COUNTS]
    time, sent = sum(each.end - each.begin for each in tokens), sum(each.bytes_sent for each in tokens)
    for each in exchanges:
        by_rate = sent and each.run.instance.node.slot is not Slot.COUNTS
        yield each.run, each.bytes_sent * time / sent if by_rate else each.end - each.begin


def _comm_share(step: StepProfile) -> float | None:
    spans, lost = [], 0
    for run in step.runs:
        if run.instance.node.lane is not Lane.COMM:
            waited = sum(wait.end - wait.begin for wait in run.waits)
            spans.append((max((wait.end for wait in run.waits), default=run.begin), run.end))
            lost += max(0, run.end - run.begin - waited - run.processor)
    beside = common(spans, ((each.launched, each.end) for each in transfers(step)))
    return min(lost / beside, 1.0) if beside else None


def reduced(tables: Sequence[CostTable], chunk: ChunkGraph) -> CostTable:
    """One table of several of the same structure; at least one.

    Figures other than times, such as bytes, are the largest of any table.
    """
    known = frozenset().union(*(table.known for table in tables))
    nodes = {}
    for node in chunk.nodes:
        having = [table for table in tables if node.name in table.known] or tables
        every = [table[node.name] for table in tables]
        largest = NodeCost(*(max(getattr(cost, each.name) for cost in every) for each in fields(NodeCost)))
        times = {name: max(getattr(table[node.name], name) for table in having) for name in NodeTime._fields}
        nodes[node.name] = replace(largest, **times)
    sources = [table.source for table in tables if table.known] or [table.source for table in tables]
    return CostTable(nodes, _reduced_hardware([table.hardware for table in tables]), max(sources), known)


def _reduced_hardware(machines: Sequence[Hardware]) -> Hardware:
    """What was measured before what was not; of that the largest shares and times of the host."""
    having = [each for each in machines if each.name == MEASURED] or machines
    # Ranks with other presets are refused by nobody, so which of them it is must not depend on their order.
    base = max(having, key=lambda each: astuple(replace(each, node_s=0.0, launch_s=0.0, comm_share=0.0)))
    return replace(
        base,
        node_s=max(each.node_s for each in having),
        launch_s=max(each.launch_s for each in having),
        comm_share=max(each.comm_share for each in having),
    )


class Costs:
    """The cost tables of one model: this rank's own, and those that the ranks have agreed on."""

    def __init__(self, config: OverlapConfig) -> None:
        self._config = config
        self._defaults: dict[str, CostTable] = {}
        self._own: dict[str, CostTable] = {}
        self._agreed: dict[str, CostTable] = {}
        self._measured: Measured | None = None
        self._not_told: set[str] = set()  # structures that were measured since the ranks agreed on them

    @property
    def decide(self) -> bool:
        """Whether the order of a plan depends on costs; pairs are searched unless nothing overlaps."""
        schedule = self._config.schedule
        return callable(schedule) or schedule == "auto" or (self._config.ramp == "pair" and schedule != "sequential")

    def add(self, structure: str, chunk: ChunkGraph) -> None:
        """Let a structure be known. Raises ConfigError if the user's table names what no structure so far has."""
        if structure not in self._defaults:
            others = {name for table in self._defaults.values() for name in table}
            self._defaults[structure] = default_costs(chunk, self._config, others)

    def of(self, structure: str) -> CostTable:
        """What the ranks agreed on; before, and where no order depends on it, this rank's own."""
        return self._agreed[structure] if self.decide and structure in self._agreed else self.own(structure)

    def own(self, structure: str) -> CostTable:
        """What this rank knows by itself."""
        if structure not in self._own:
            table = self._defaults[structure]
            self._own[structure] = table if self._measured is None else self._measured.over(table, structure)
        return self._own[structure]

    def measure(self, steps: Sequence[StepProfile]) -> None:
        """Take what profiled steps, at least one, tell instead of what was measured before.

        Nothing changes if the user names the costs.
        """
        if self._config.costs is None:
            self._measured = Measured.of(steps)
            self._own.clear()
            self._not_told = set(self._measured.times)

    def has_news(self, structures: Iterable[str]) -> bool:
        """Whether orders of these structures depend on what the other ranks have not been told."""
        return self.decide and any(each not in self._agreed or each in self._not_told for each in structures)

    def agree(self, tables: Tables) -> bool:
        """Take what the ranks have agreed on; whether anything has changed."""
        before = dict(self._agreed)
        for structure, table in tables.items():
            # Orders are kept for as long as the tables are the same objects.
            known = (self._agreed.get(structure), self.own(structure))
            self._agreed[structure] = next((each for each in known if each == table), table)
        self._not_told -= tables.keys()
        return any(self._agreed[each] is not before.get(each) for each in tables)
