"""Chunk graphs without a model: schedule nodes of layers of any kind, with small modules and costs drawn at random.

Each F and B node reads what the one before it in its chain makes; a branch `shared` reads what its launch reads, too,
and is read where the branch joins; W reads its own B node; B nodes read what the F node of their slot saved.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import torch
from torch import fx

from fxoverlap import compat
from fxoverlap.ir import ChunkGraph, Lane, NodeCost, Phase, ScheduleNode, Slot

COMM = (Slot.COUNTS, Slot.DISPATCH, Slot.COMBINE)
MOE = (
    *(Slot.PRE_DISPATCH, Slot.COUNTS, Slot.PERMUTE, Slot.DISPATCH, Slot.SHARED, Slot.EXPERTS, Slot.COMBINE),
    Slot.POST_COMBINE,
)
Key = tuple[int | None, Slot, Phase]


def synthetic(kinds: Sequence[str], shared: bool = False, effects: tuple[tuple[str, str], ...] = ()) -> ChunkGraph:
    """A chunk of layers, each "E" (tokens are exchanged) or "D" (they are not), with modules."""
    forward: list[Key] = [(None, Slot.PRE_PROCESS, Phase.F)]
    for layer, kind in enumerate(kinds):
        slots = MOE if kind == "E" else (Slot.PRE_DISPATCH,)
        forward += [(layer, slot, Phase.F) for slot in slots if shared or slot is not Slot.SHARED]
    forward.append((None, Slot.POST_PROCESS, Phase.F))
    keys = list(forward)
    for layer, slot, _ in reversed(forward):
        if slot not in (Slot.COUNTS, Slot.PERMUTE):
            keys.append((layer, slot, Phase.B))
            keys += [] if slot in COMM else [(layer, slot, Phase.W)]
    made: dict[Key, ScheduleNode] = {}
    last = "batch"
    for i, key in enumerate(keys):
        node = _node(i, key, last, made)
        made[key] = node
        if key[2] is not Phase.W and key[1] is not Slot.SHARED:
            last = node.writes[0]
    nodes = tuple(made.values())
    modules = {node.name: _module(node, nodes) for node in nodes}
    return ChunkGraph(None, nodes, effects, len(kinds), modules=modules)


def _node(number: int, key: Key, last: str, made: dict[Key, ScheduleNode]) -> ScheduleNode:
    layer, slot, phase = key
    reads = [last]
    if phase is Phase.W:
        reads = [made[layer, slot, Phase.B].writes[0]]
    elif slot is Slot.SHARED:
        reads = [made[layer, Slot.PRE_DISPATCH if phase is Phase.F else Slot.POST_COMBINE, phase].writes[0]]
    elif slot is (Slot.POST_COMBINE if phase is Phase.F else Slot.PRE_DISPATCH):
        reads += [n.writes[0] for n in [made.get((layer, Slot.SHARED, phase))] if n is not None]
    if phase is Phase.B and slot not in COMM:
        reads.append(made[layer, slot, Phase.F].writes[0])
    lane = Lane.COMM if slot in COMM else Lane.COMPUTE
    return ScheduleNode(layer, slot, phase, lane, (f"op{number}",), tuple(reads), (f"v{number}",))


def _module(node: ScheduleNode, nodes: Sequence[ScheduleNode]) -> fx.GraphModule:
    """An exchange; or the wait for one among what is read, then a sum."""
    launched = {value for each in nodes if each.lane is Lane.COMM for value in each.writes}
    # What is saved for the backward has been waited for in the forward.
    arrives = tuple(value in launched and not (node.phase is Phase.B and i) for i, value in enumerate(node.reads))
    return _shared_module(node.lane is Lane.COMM, arrives)


@functools.cache
def _shared_module(launches: bool, arrives: tuple[bool, ...]) -> fx.GraphModule:
    graph = fx.Graph()
    graph.set_codegen(compat.BoxedCodeGen())
    values = [graph.placeholder(f"x{i}") for i in range(len(arrives))]
    functional = torch.ops._c10d_functional
    for i, waits in enumerate(arrives):
        if waits:
            values[i] = graph.call_function(functional.wait_tensor.default, (values[i],))
    result = graph.call_function(torch.ops.aten.neg.default, (values[0],))
    for value in values[1:]:
        result = graph.call_function(torch.ops.aten.add.Tensor, (result, value))
    if launches:
        result = graph.call_function(functional.all_to_all_single.default, (values[0], [1], [1], "0"))
        graph.erase_node(result.prev)
    graph.output((result,))
    return fx.GraphModule(torch.nn.Module(), graph)


def random_costs(chunk: ChunkGraph, rng: random.Random, alike: bool) -> dict[str, NodeCost]:
    """Times between 0.25 and 4 ms, less for what is always short; layers are alike, or each drawn by itself."""
    short = {Slot.PRE_PROCESS: 0.1, Slot.COUNTS: 0.02, Slot.PERMUTE: 0.1, Slot.POST_COMBINE: 0.2}
    drawn: dict[Key, float] = {}
    costs = {}
    for node in chunk.nodes:
        key = (None if alike else node.layer, node.slot, node.phase)
        if key not in drawn:
            drawn[key] = short.get(node.slot, 1.0) * 2 ** rng.uniform(-2, 2) * 1e-3
        costs[node.name] = NodeCost(seconds=drawn[key])
    return costs
