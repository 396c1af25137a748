"""Plan pass `lifetime`: decide with which instance each value dies.

In:  FusedGraph.
Out: the same graph; each call's `Instance.frees` names the values of its microbatch that die with it, added to what
     an earlier pass put there.

A value dies with the last instance that reads it, or that waits for a launch that reads it: a launch's input is alive
until its wait. Graph inputs belong to the user and do not die; what is handed on after the step does not either,
except gradients, which die when they have been delivered by the instance that made them.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxoverlap.config import OverlapConfig
from fxoverlap.ir import META, ChunkGraph, FusedGraph, Lane, Plan, ValueRef, runs_forward
from fxoverlap.passes.fuse import kept_after_forward


def lifetime(fused: FusedGraph, config: OverlapConfig) -> FusedGraph:
    """Fill in `Instance.frees`."""
    del config
    calls = [node for node in fused.module.graph.nodes if node.op == "call_module"]
    death = _deaths(calls)
    keep = _kept(fused.plan)
    by_position: dict[int, list[str]] = {}
    for ref, position in death.items():
        if ref not in keep:
            by_position.setdefault(position, []).append(ref.value)
    order = []
    for position, call in enumerate(calls):
        instance = call.meta[META]
        instance = replace(instance, frees=(*instance.frees, *by_position.get(position, ())))
        call.meta[META] = instance
        order.append(instance)
    return replace(fused, plan=replace(fused.plan, order=tuple(order)))


lifetime.stage = "plan"  # type: ignore[attr-defined]


def _deaths(calls: list[fx.Node]) -> dict[ValueRef, int]:
    """The position of the last instance that needs each value."""
    position = {call: i for i, call in enumerate(calls)}
    death: dict[ValueRef, int] = {}
    for i, call in enumerate(calls):
        instance = call.meta[META]
        for value in instance.node.writes:
            death[ValueRef(instance.mb, value)] = i
        for value in instance.node.reads:
            ref = ValueRef(instance.mb, value)
            death[ref] = max(death.get(ref, i), i)
        if instance.node.lane is Lane.COMM:
            waiters = [reader for result in call.users for reader in result.users if reader in position]
            arrival = max((position[reader] for reader in waiters), default=i)
            for value in instance.node.reads:
                ref = ValueRef(instance.mb, value)
                death[ref] = max(death[ref], arrival)
    return death


def _kept(plan: Plan) -> set[ValueRef]:
    kept: set[ValueRef] = set()
    for mb, chunk in plan.chunks.items():
        kept |= {ValueRef(mb, value) for value in _inputs(chunk)}
        if runs_forward(mb):
            kept |= {ValueRef(mb, value) for value in kept_after_forward(chunk)}
    return kept


def _inputs(chunk: ChunkGraph) -> set[str]:
    return {each.value for each in chunk.joint.inputs} if chunk.joint is not None else set()
