"""The node instances of one plan as scheduling tasks: how long each runs, where, and what it must follow.

In:  the chunk graphs of a plan by microbatch label (`Plan.chunks`), and the costs of their nodes.
Out: the tasks that the plan must order, those of one microbatch in the order in which it may run alone; and a lower
     bound of the time that any order of them takes on a machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fxoverlap.flow import needs_of
from fxoverlap.hardware import Hardware
from fxoverlap.ir import ChunkGraph, CostTable, Instance, Lane, nodes_of
from fxoverlap.schedule.simulate import counts_of, groups_of

Edge = tuple[tuple[str, str], tuple[str, str]]
"""((microbatch, node name) that must come first, the one that must follow)."""


@dataclass(frozen=True, slots=True)
class Task:
    """One node instance that a plan must place.

    Attributes:
        instance: what runs.
        seconds: time that it takes on its lane.
        group: process group of an exchange; None for a compute node.
        needs: positions of the tasks whose values it reads or whose effects it follows.
        counts: those of `needs` whose token counts it reads on the host.
        inside: bytes that it holds of its own while it runs.
    """

    instance: Instance
    seconds: float
    group: str | None
    needs: tuple[int, ...]
    counts: tuple[int, ...]
    inside: int = 0


def tasks_of(chunks: Mapping[str, ChunkGraph], costs: CostTable, edges: Iterable[Edge] = ()) -> list[Task]:
    """The tasks of a plan, one microbatch after the other.

    Args:
        chunks: the chunk graph of each microbatch.
        costs: by node name.
        edges: what must follow what besides the values and effects of one microbatch.
    """
    entries = [(mb, node) for mb, chunk in chunks.items() for node in nodes_of(mb, chunk)]
    position = {(mb, node.name): i for i, (mb, node) in enumerate(entries)}
    follows: dict[tuple[str, str], list[int]] = {}
    for first, then in edges:
        if first in position:
            follows.setdefault(then, []).append(position[first])
    needs = {mb: needs_of(mb, chunk) for mb, chunk in chunks.items()}
    counted = {mb: counts_of(chunk) for mb, chunk in chunks.items()}
    groups = {mb: groups_of(chunk) for mb, chunk in chunks.items()}
    tasks = []
    for mb, node in entries:
        own = {need: position[mb, need.node] for need in needs[mb][node.name]}
        before = dict.fromkeys([*own.values(), *follows.get((mb, node.name), ())])
        counts = dict.fromkeys(i for need, i in own.items() if need.value in counted[mb])
        group = groups[mb][node.name] if node.lane is Lane.COMM else None
        cost = costs[node.name]
        tasks.append(Task(Instance(node, mb), cost.seconds, group, tuple(before), tuple(counts), cost.inside))
    return tasks


def lower_bound(tasks: Sequence[Task], hardware: Hardware) -> float:
    """Seconds that no order of the tasks can undercut.

    The longest of: the work of the compute lane, with the share of it that the busiest process group's exchanges take;
    for each group the earliest that one of its exchanges can begin, their time, and the least that must follow one of
    them; and the longest chain of tasks that need each other. The first holds because where an exchange runs without
    compute beside it, which saves its share, the whole exchange is lost.
    """
    head = heads(tasks, hardware)
    tail = tails(tasks)
    times: dict[str | None, float] = {None: 0.0}
    for task in tasks:
        times[task.group] = times.get(task.group, 0.0) + task.seconds
    issuing = 0.0
    if not hardware.host_runs_ahead:
        issuing = sum(hardware.issue_s(task.group is not None) for task in tasks)
    # Exchanges do not slow down the issue of nodes.
    slower = hardware.comm_share * max([0.0, *(busy - issuing for group, busy in times.items() if group is not None)])
    compute = times.pop(None) + issuing + slower
    bounds = [compute, *(h + t.seconds + after for h, t, after in zip(head, tasks, tail, strict=True))]
    for group, busy in times.items():
        own = [i for i, t in enumerate(tasks) if t.group == group]
        bounds.append(min(head[i] for i in own) + busy + min(tail[i] for i in own))
    return max(bounds, default=0.0)


def heads(tasks: Sequence[Task], hardware: Hardware) -> list[float]:
    """For each task, the earliest that it can begin: what it needs takes that long, one after the other.

    Where the host is the compute lane, it issues a task behind the compute that the task needs; an exchange may be in
    flight meanwhile.
    """
    issue = 0.0 if hardware.host_runs_ahead else hardware.node_s
    head: list[float] = []
    for task in tasks:
        ends = [head[i] + tasks[i].seconds + (issue if tasks[i].group is None else 0.0) for i in task.needs]
        head.append(max([issue, *ends]))
    return head


def tails(tasks: Sequence[Task]) -> list[float]:
    """For each task, the longest chain of tasks that need it, without itself."""
    tail = [0.0] * len(tasks)
    for i in reversed(range(len(tasks))):
        for need in tasks[i].needs:
            tail[need] = max(tail[need], tail[i] + tasks[i].seconds)
    return tail
