"""Chunk pass `wgrad`: split every backward node into B, what others wait for, and W, what nothing upstream needs.

In:  ChunkGraph whose backward nodes are all B.
Out: the same ops, in B and W nodes of the same layers and slots. With `delay_wgrad=False` nothing changes.

A backward op is B if it reaches a backward exchange, the gradient of a microbatch leaf, or an op of an earlier
physical layer, by a path that does not use an accumulation of a parameter's gradient. All others are W. So every
operator is split, not only linear layers; the first layer has a B; the weight gradient of a tied head is W although
the embedding adds to it.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from fxoverlap import compat
from fxoverlap.config import OverlapConfig
from fxoverlap.ir import ChunkGraph, InputKind, JointGraph, Phase, Slot
from fxoverlap.passes import op_facts
from fxoverlap.passes.cut import Assignment, Key, assignment, make_nodes, remake_views


def wgrad(chunk: ChunkGraph, config: OverlapConfig) -> ChunkGraph:
    """Split W off B."""
    joint = chunk.joint
    if not config.delay_wgrad or joint is None:
        return chunk
    keys = assignment(chunk)
    backward = [node for node in op_facts.ops(joint.module.graph) if keys[node][2] is Phase.B]
    needed = _needed_upstream(joint, backward, keys)
    order = [(node.layer, node.slot) for node in chunk.nodes if node.phase is Phase.B]
    rank = {place: i for i, place in enumerate(order)}
    for op in backward:
        if op not in needed:
            layer, slot = _latest_source(op, keys, rank)
            keys[op] = (layer, Slot.SHARED if _belongs_to_shared(slot, op, keys) else slot, Phase.W)
    remake_views(joint, keys)
    with_w: list[Key] = []
    for node in chunk.nodes:
        with_w.append((node.layer, node.slot, node.phase))
        if node.phase is Phase.B:
            with_w += [(node.layer, node.slot, Phase.W), (node.layer, Slot.SHARED, Phase.W)]
    return replace(chunk, nodes=make_nodes(joint, keys, with_w, chunk.depths))


wgrad.stage = "chunk"  # type: ignore[attr-defined]


def _needed_upstream(joint: JointGraph, backward: list[fx.Node], keys: Assignment) -> set[fx.Node]:
    """The backward ops that are B."""
    sums = _parameter_sums(joint)
    layer = _layers(joint, backward, keys)
    leaves = {each.value for each in joint.inputs if each.kind is InputKind.LEAF}
    leaf_gradients = {value for value, target in joint.gradients if target in leaves}
    starts = [
        node
        for node in backward
        if op_facts.is_launch(node)
        or op_facts.has_effect(node)
        or node.name in leaf_gradients
        or any(user in layer and user not in sums and layer[user] < layer[node] for user in node.users)
    ]
    needed = op_facts.ancestors(starts, set(backward))
    # A fused op that also gives weight gradients is one op: its results are not parted from it.
    return needed | {n for n in backward if n.target is operator.getitem and n.args[0] in needed}


def _parameter_sums(joint: JointGraph) -> set[fx.Node]:
    """The ops that add up the contributions to one parameter's gradient."""
    by_name = {node.name: node for node in joint.module.graph.nodes}
    params = {each.value for each in joint.inputs if each.kind is InputKind.PARAM}
    found: set[fx.Node] = set()
    stack = [by_name[value] for value, target in joint.gradients if target in params]
    while stack:
        node = stack.pop()
        if compat.is_gradient_accumulation(node):
            found.add(node)
        # Of a weight that autocast casts once for several uses, the gradients are summed behind the cast.
        if node in found or node.target is torch.ops.aten._to_copy.default:
            stack.extend(source for source in node.all_input_nodes if op_facts.is_op(source))
    return found


def _layers(joint: JointGraph, backward: list[fx.Node], keys: Assignment) -> dict[fx.Node, int]:
    """The physical layer of each backward op: -1 before the layers, their number behind them.

    An op without a label has the layer of its input that is farthest back.
    """
    layer: dict[fx.Node, int] = {}
    for node in backward:
        label = op_facts.tag(node).layer
        if keys[node][1] is Slot.PRE_PROCESS:
            layer[node] = -1
        elif label is not None:
            layer[node] = label
        else:
            inputs = (layer[source] for source in node.all_input_nodes if source in layer)
            layer[node] = min(inputs, default=len(joint.physical))
    return layer


def _latest_source(
    node: fx.Node, keys: Assignment, rank: dict[tuple[int | None, Slot], int]
) -> tuple[int | None, Slot]:
    """Layer and slot of the last node of the backward that a weight gradient reads, or of its own stage if later."""
    places = [keys[node][:2]]
    places += [keys[s][:2] for s in node.all_input_nodes if s in keys and keys[s][2] is not Phase.F]
    return max(places, key=lambda place: rank.get(place, -1))


def _belongs_to_shared(slot: Slot, node: fx.Node, keys: Assignment) -> bool:
    """Whether a weight gradient is that of the branch `shared`: it reads what that branch made."""
    return slot in (Slot.POST_COMBINE, Slot.EXPERTS) and any(
        source in keys and keys[source][1] is Slot.SHARED for source in node.all_input_nodes
    )
