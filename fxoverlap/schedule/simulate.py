"""A step as it would run on a machine: discrete events over lanes.

In:  the rounds of a step, whose plans know what their nodes cost and on what machine.
Out: a `Simulation`: when each node instance runs, and the figures that follow. Or several, of ranks whose nodes do not
     always take their time.

The machine:
- the host issues the instances in plan order, one after the other, and needs `node_s` for each, and behind an exchange
  `launch_s`. Where it does not run ahead (a CPU) it is the compute lane itself: it issues an instance when it is done
  with those before;
- the compute lane runs its instances in the order of issue, each when its inputs are there;
- exchanges of one process group run in the order of their launches, one at a time, each when what it sends is there;
- while exchanges run, the compute lane is slower: `comm_share` of it is theirs;
- a node that reads token counts blocks the host until they have come.

Ranks run alike if every node takes its time. Where times vary (`NodeCost.spread`), an exchange begins when the last
rank can begin it, and the others wait. Memory is counted in the order of issue (`schedule.memory`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fxoverlap.hardware import Hardware
from fxoverlap.ir import ChunkGraph, Instance, Lane, NodeCost, Plan, Round, ScheduleNode, Slot
from fxoverlap.schedule.intervals import common, length
from fxoverlap.schedule.memory import peak_bytes

Value = tuple[int, str]
"""(number of the microbatch, name of the value)."""

_RANKS = 4
"""Most ranks that are simulated beside one another; the time for it grows with their number."""

_ENOUGH = 2_000
"""Node instances over which times that vary are averaged: short steps are simulated several times."""

_LEAST = 0.1
"""Share of its time that a node takes at least, however much that varies."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One node instance of a simulated step.

    Attributes:
        instance: what runs.
        microbatch: number of its microbatch.
        launched: when the host has issued it, in seconds from the beginning of the step.
        begin, end: when it runs on its lane.
    """

    instance: Instance
    microbatch: int
    launched: float
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a step takes. Times are in seconds.

    Attributes:
        makespan: from the first issue until every lane is done.
        busy: by lane, the time in which it runs something; of the host, in which it issues nodes.
        exposed: time in which token exchanges are in flight and the compute lane does not run a node.
        overlap_pct: share of the time in which token exchanges are in flight in which the compute lane runs nodes, in
            %; None without token exchanges. As in Holistic Trace Analysis, an exchange that the host has issued, but
            that still waits for what it sends, is not in flight.
        peak_bytes: most bytes alive at one time, with exchanges that bring the imbalanced number of rows.
        timeline: every instance, in the order of issue.
    """

    makespan: float
    busy: Mapping[Lane, float]
    exposed: float
    overlap_pct: float | None
    peak_bytes: int
    timeline: tuple[Slice, ...]


@dataclass(slots=True)
class Machine:
    """The state of the lanes. Times are in seconds from the beginning of the step.

    Attributes:
        hardware: what it is.
        host, compute: when each can take the next instance.
        groups: when each process group is done with what was launched on it.
    """

    hardware: Hardware
    host: float = 0.0
    compute: float = 0.0
    groups: dict[str, float] = field(default_factory=dict)

    def copy(self) -> Machine:
        """The same state, which changes by itself."""
        return Machine(self.hardware, self.host, self.compute, self.groups.copy())

    def run(self, seconds: float, ready: float, counts: float | None) -> tuple[float, float, float]:
        """(issued, begin, end) of a compute node.

        Args:
            seconds: how long it runs.
            ready: when its inputs are there.
            counts: when the counts that it reads on the host are there, None if it reads none.
        """
        issued = self._issue(counts)
        begin = max(issued, self.compute, ready)
        beside = max(self.groups.values(), default=0.0) - begin
        self.compute = begin + slowed(seconds, beside, self.hardware.comm_share)
        return issued, begin, self.compute

    def launch(self, seconds: float, ready: float, group: str) -> tuple[float, float, float]:
        """(issued, begin, end) of an exchange whose other ranks are there when this one is."""
        issued, begin = self.offer(ready, group)
        return issued, begin, self.carry(begin, seconds, group)

    def offer(self, ready: float, group: str) -> tuple[float, float]:
        """(issued, earliest begin) of an exchange, which the other ranks may let wait."""
        issued = self._issue(None)
        return issued, max(issued, ready, self.groups.get(group, 0.0))

    def carry(self, begin: float, seconds: float, group: str) -> float:
        """When an exchange that was offered last, and that begins now, ends."""
        self.groups[group] = begin + seconds
        # What the lane has been given before, and what runs beside this exchange.
        given = max(0.0, self.compute - begin)
        self.compute += slowed(given, seconds, self.hardware.comm_share) - given
        if self.hardware.host_runs_ahead:
            self.host += self.hardware.launch_s
        else:
            self.compute += self.hardware.launch_s
        return self.groups[group]

    def _issue(self, counts: float | None) -> float:
        if not self.hardware.host_runs_ahead:
            self.host = self.compute + self.hardware.node_s
            self.compute = self.host
            return self.host
        self.host = max(self.host, counts or 0.0) + self.hardware.node_s
        return self.host


def slowed(seconds: float, beside: float, share: float) -> float:
    """How long a compute node takes that takes `seconds` by itself, if exchanges run for `beside` seconds from its
    begin on and have a share of the lane."""
    if beside <= 0.0:
        return seconds
    return min(seconds / (1 - share), seconds + share * beside) if share < 1 else seconds + beside


def simulate(rounds: Sequence[Round]) -> Simulation:
    """Run a step, of at least one round, on the machine that its first plan was made for; every node takes its time."""
    (found,) = _simulations(rounds, 1, lambda cost: cost.seconds, peak_bytes(rounds))
    return found


def simulate_ranks(rounds: Sequence[Round]) -> list[Simulation]:
    """What ranks see of a step whose nodes vary in time.

    Each node instance of each rank takes a time drawn from a normal distribution around its cost, the same in every
    call. The ranks are those of the largest group, four at most. Short steps run several times, so there may be more
    simulations than ranks; without any spread there is one.
    """
    costs = [each.plan.costs[instance.node.name] for each in rounds for instance in each.plan.order]
    ranks = min(max((cost.ranks for cost in costs), default=1), _RANKS)
    if ranks == 1 or not any(cost.spread for cost in costs):
        return [simulate(rounds)]
    draws, peak = random.Random(0), peak_bytes(rounds)

    def drawn(cost: NodeCost) -> float:
        return cost.seconds * max(_LEAST, 1 + cost.spread * draws.gauss(0, 1))

    return [each for _ in range(math.ceil(_ENOUGH / len(costs))) for each in _simulations(rounds, ranks, drawn, peak)]


def _simulations(
    rounds: Sequence[Round], ranks: int, seconds: Callable[[NodeCost], float], peak: int
) -> list[Simulation]:
    """Run a step on ranks that are all in one group of each name, with the time of a node as it is given."""
    machines = [Machine(rounds[0].plan.costs.hardware) for _ in range(ranks)]
    slices: list[list[Slice]] = [[] for _ in machines]
    ready: list[dict[Value, float]] = [{} for _ in machines]
    for each in rounds:
        counted = {mb: counts_of(chunk) for mb, chunk in each.plan.chunks.items()}
        groups = {mb: groups_of(chunk) for mb, chunk in each.plan.chunks.items()}
        for instance in each.plan.order:
            node, number = instance.node, each.microbatches[instance.mb]
            cost = each.plan.costs[node.name]
            inputs = [max((known.get((number, value), 0.0) for value in node.reads), default=0.0) for known in ready]
            if node.lane is Lane.COMM:
                times = _exchange(machines, inputs, groups[instance.mb][node.name], seconds(cost))
            else:
                read = [value for value in node.reads if value in counted[instance.mb]]
                counts = [max((known.get((number, value), 0.0) for value in read), default=None) for known in ready]
                each_rank = zip(machines, inputs, counts, strict=True)
                times = [machine.run(seconds(cost), own, there) for machine, own, there in each_rank]
            for known, own_slices, own_times in zip(ready, slices, times, strict=True):
                known.update(((number, value), own_times[2]) for value in node.writes)
                own_slices.append(Slice(instance, number, *own_times))
    hardware, lanes = machines[0].hardware, (s.instance.node.lane for s in slices[0])
    issuing = sum(hardware.issue_s(lane is Lane.COMM) for lane in lanes)
    return [_simulation(own, machine.compute, issuing, peak) for own, machine in zip(slices, machines, strict=True)]


def _exchange(
    machines: Sequence[Machine], inputs: Sequence[float], group: str, seconds: float
) -> list[tuple[float, float, float]]:
    """(issued, begin, end) of an exchange on each rank: it is in flight before the last rank lets data move."""
    offers = [machine.offer(ready, group) for machine, ready in zip(machines, inputs, strict=True)]
    moves = max(begin for _, begin in offers)
    ends = [machine.carry(moves, seconds, group) for machine in machines]
    return [(*offer, end) for offer, end in zip(offers, ends, strict=True)]


def simulate_plan(plan: Plan) -> Simulation:
    """Run one plan by itself."""
    return simulate([Round(plan, {mb: i for i, mb in enumerate(plan.chunks)})])


def counts_of(chunk: ChunkGraph) -> set[str]:
    """The values that hold token counts, which their reader takes to the host."""
    return {value for node in chunk.nodes if node.slot is Slot.COUNTS for value in node.writes}


def groups_of(chunk: ChunkGraph) -> dict[str, str]:
    """Process group by name of the node that launches on it; one group for all in a synthetic graph."""
    groups = {launch: each.group for each in (chunk.joint.exchanges if chunk.joint else ()) for launch in each.launches}
    return {n.name: groups.get(n.ops[0], "") if n.ops else "" for n in chunk.nodes if n.lane is Lane.COMM}


def _simulation(slices: list[Slice], computed: float, issuing: float, peak: int) -> Simulation:
    computing = _spans(slices, Lane.COMPUTE)
    flights = [(s.begin, s.end) for s in slices if _is_token_exchange(s.instance.node)]
    in_flight, both = length(flights), common(flights, computing)
    return Simulation(
        # A last launch, and what an exchange takes from nodes issued before it, come behind the last node's end.
        makespan=max([computed, *(s.end for s in slices)]),
        busy={lane: length(_spans(slices, lane)) for lane in (Lane.COMPUTE, Lane.COMM)} | {Lane.HOST: issuing},
        exposed=in_flight - both,
        overlap_pct=100 * both / in_flight if in_flight else None,
        peak_bytes=peak,
        timeline=tuple(slices),
    )


def _spans(slices: Iterable[Slice], lane: Lane) -> list[tuple[float, float]]:
    return [(s.begin, s.end) for s in slices if s.instance.node.lane is lane]


def _is_token_exchange(node: ScheduleNode) -> bool:
    return node.lane is Lane.COMM and node.slot is not Slot.COUNTS
