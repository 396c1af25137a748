"""A stable text of a chunk's schedule nodes and its plan, for snapshot tests.

It holds no addresses, no symbol numbers and no op counts: nothing that moves with the torch version. A snapshot of it
changes only when the model's structure, the config, or fxoverlap's decisions change; those of `"auto"` depend on costs.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxoverlap.ir import ChunkGraph, Instance, Lane, Plan, ScheduleNode


def golden(chunk: ChunkGraph, plan: Plan) -> str:
    """The node table and the plan."""
    return f"nodes\n{node_table(chunk)}\n\nplan {plan.kind}\n{plan_table(plan)}\n"


def node_table(chunk: ChunkGraph) -> str:
    """One line a layer and phase: its slots in order; nodes that share a module with an earlier layer have a `=`."""
    first: dict[int, str] = {}
    rows: dict[tuple[str, str], list[str]] = {}
    for node in chunk.nodes:
        where = node.place or "-"
        module = chunk.modules.get(node.name)
        shared = module is not None and first.setdefault(id(module), node.name) != node.name
        rows.setdefault((where, node.phase.value), []).append(_slot(node) + ("=" if shared else ""))
    width = max(4, *(len(where) for where, _ in rows)) if rows else 0
    return "\n".join(f"  {where:{width}} {phase}  {'  '.join(slots)}" for (where, phase), slots in rows.items())


def _slot(node: ScheduleNode) -> str:
    return f"({node.slot.value})" if node.lane is Lane.COMM else node.slot.value


def plan_table(plan: Plan) -> str:
    """Two columns, one a lane; an exchange stands beside the compute that is issued while it is in flight."""
    width = max((len(_label(i)) for i in plan.order if i.node.lane is not Lane.COMM), default=0)
    lines = [f"  {'compute':{width}}  comm"]
    beside: dict[int, list[str]] = {}
    for start, end in arrivals(plan.order).items():
        for position in range(start + 1, end):
            beside.setdefault(position, []).append(_label(plan.order[start]))
    for position, instance in enumerate(plan.order):
        flying = beside.get(position, [])
        if instance.node.lane is Lane.COMM:
            lines.append(f"  {'':{width}}  > {_label(instance)}")
        else:
            lines.append(f"  {_label(instance):{width}}  {'| ' + ', '.join(flying) if flying else ''}".rstrip())
    return "\n".join(lines)


def _label(instance: Instance) -> str:
    return f"{instance.mb}:{instance.node.name}"


def arrivals(order: Iterable[Instance]) -> dict[int, int]:
    """Position of each launch -> position of the instance that waits for it."""
    order = list(order)
    made_by = {
        (i.mb, value): position
        for position, i in enumerate(order)
        if i.node.lane is Lane.COMM
        for value in i.node.writes
    }
    arrival: dict[int, int] = {}
    for position, instance in enumerate(order):
        for value in instance.node.reads:
            start = made_by.get((instance.mb, value))
            if start is not None:
                arrival.setdefault(start, position)
    return arrival
