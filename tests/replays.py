"""What tests of recompute ask of a chunk graph: what R nodes do, what the forward saves, and whether orders agree."""

from __future__ import annotations

import graphlib
import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

import fxoverlap as fxo
from fxoverlap.ir import ChunkGraph, Phase, Plan, ScheduleNode, Slot
from fxoverlap.ops.collectives import WAIT, is_collective
from fxoverlap.passes import op_facts


def chunk_of(model: torch.nn.Module, microbatch: tuple, **config: Any) -> ChunkGraph:
    """The chunk graph of a model; "sequential" needs no costs."""
    config = {"schedule": "sequential", **config}
    overlapped = fxo.transform(model, fxo.OverlapConfig(**config), example_inputs=microbatch)
    chunk = overlapped.plan("FB").backward
    assert chunk is not None
    return chunk


def ops_of(chunk: ChunkGraph) -> dict[str, fx.Node]:
    """The joint graph's nodes by name."""
    assert chunk.joint is not None
    return {node.name: node for node in chunk.joint.module.graph.nodes}


def replay_nodes(chunk: ChunkGraph) -> list[ScheduleNode]:
    return [node for node in chunk.nodes if node.phase is Phase.R]


def saved(chunk: ChunkGraph) -> dict[str, ScheduleNode]:
    """The values that F makes and B, W or R nodes read, each with the F node that makes it."""
    made = {value: node for node in chunk.nodes if node.phase is Phase.F for value in node.writes}
    read = dict.fromkeys(value for node in chunk.nodes if node.phase is not Phase.F for value in node.reads)
    return {value: made[value] for value in read if value in made}


def launches(chunk: ChunkGraph) -> Counter[tuple[str, str]]:
    """Number of exchanges by phase and role."""
    assert chunk.joint is not None
    return Counter((each.phase.value, each.role.value) for each in chunk.joint.exchanges)


def faults(chunk: ChunkGraph) -> list[str]:
    """What no chunk with replays may have."""
    assert chunk.joint is not None
    by_name = ops_of(chunk)
    exchanged = {name for each in chunk.joint.exchanges for name in (*each.launches, *each.waits)}
    found = []
    for node in replay_nodes(chunk):
        ops = [by_name[name] for name in node.ops]
        for op in ops:
            if is_collective(op.target) and op.name not in exchanged:
                found.append(f"{node.name} runs {op.target} again")
            if op_facts.has_effect(op) and not is_collective(op.target):
                found.append(f"{node.name} has the effect of {op.target}")
            if "unbacked_bindings" in op.meta or not isinstance(op.meta["val"], (torch.Tensor, tuple, list)):
                found.append(f"{node.name} makes the number {op}")
        if all(op_facts.view_base(op) is not None and op.target is not WAIT for op in ops):
            found.append(f"{node.name} makes nothing but views")
        if {op.target for op in ops} == {operator.getitem}:
            found.append(f"{node.name} only takes results of ops apart")
    for name in saved(chunk):
        op = by_name[name]
        if isinstance(op.meta["val"], (tuple, list)):
            found.append(f"all results of {op.target} are saved together")
        if is_collective(op.target) and op.target is not WAIT:
            found.append(f"what {op.name} launches is saved before it has arrived")
    return found + circles(chunk)


def circles(chunk: ChunkGraph) -> list[str]:
    """A circle of values and `replays`, if there is one."""
    made_by = {value: node.name for node in chunk.nodes for value in node.writes}
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for node in chunk.nodes:
        sorter.add(node.name, *(made_by[value] for value in node.reads if value in made_by))
    for earlier, later in chunk.replays:
        sorter.add(later, earlier)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return [f"circle: {' -> '.join(error.args[1])}"]
    return []


def disorder(plan: Plan) -> list[tuple[str, str]]:
    """The pairs of `ChunkGraph.replays` that a plan has the other way round."""
    position = {(each.mb, each.node.name): i for i, each in enumerate(plan.order)}
    return [
        (earlier, later)
        for mb, chunk in plan.chunks.items()
        if mb.startswith("B")
        for earlier, later in chunk.replays
        if position[mb, earlier] > position[mb, later]
    ]


def head_is_first(plan: Plan) -> bool:
    """Whether the backward of the head and the loss ends before the first replay of a layer, in each microbatch."""
    for mb in (mb for mb in plan.chunks if mb.startswith("B")):
        own = [each.node for each in plan.order if each.mb == mb]
        head = [i for i, node in enumerate(own) if node.slot is Slot.POST_PROCESS and node.phase is Phase.B]
        first = next(i for i, node in enumerate(own) if node.phase is Phase.R)
        if max(head) > first:
            return False
    return True
