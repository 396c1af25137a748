"""Chunk pass `cut`: group the ops of a partitioned joint graph into schedule nodes.

In:  JointGraph after `exchanges`, `layers`, `partition`.
Out: ChunkGraph with F and B nodes, in an order in which one microbatch alone may run.

Steps:
1. Place every op on a stage of its phase's chain (`chain`, `place`).
2. Each stage is one compute node; each exchange's launches are one comm node.
3. A branch with real work that no launch of its layer needs becomes the movable node `shared`; what else a launch does
   not need runs behind it.
4. A view that another node reads is made again there, so that its base crosses instead of an alias.
5. What a node reads and writes is computed from the ops: nothing is listed by hand.

Raises UnsupportedError: an exchange needs what comes after it; the nodes form a cycle (names its members).
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import fx

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import META, ChunkGraph, DepthLayer, InputKind, JointGraph, Lane, Phase, Role, ScheduleNode, Slot
from fxoverlap.passes import op_facts
from fxoverlap.passes.chain import Chain, backward_chain, forward_chain
from fxoverlap.passes.place import Placement, phase_ops, place_backward, place_forward

Key = tuple[int | None, Slot, Phase]
"""(logical layer, slot, phase): which schedule node an op belongs to."""

Assignment = dict[fx.Node, Key]

COMM_SLOT = {Role.COUNTS: Slot.COUNTS, Role.DISPATCH: Slot.DISPATCH, Role.COMBINE: Slot.COMBINE}
COMM_SLOTS = frozenset(COMM_SLOT.values())


def cut(joint: JointGraph, config: OverlapConfig) -> ChunkGraph:
    """Cut a joint graph into schedule nodes."""
    del config
    forward = forward_chain(joint)
    backward = backward_chain(forward)
    placed_forward = place_forward(joint, forward)
    placed_backward = place_backward(joint, backward, placed_forward)
    keys = _stage_keys(placed_forward, forward) | _stage_keys(placed_backward, backward)
    _assign_launches(joint, forward, keys)
    weights = _weights(joint)
    for chain, placed in ((forward, placed_forward), (backward, placed_backward)):
        ranges = _gated_ranges(chain, forward)
        nodes = phase_ops(joint, chain.phase)
        _assign_shared(nodes, ranges, placed, keys, weights)
        _clear_the_way(nodes, chain, placed, keys)
        join_results(nodes, keys)
    remake_views(joint, keys)
    order = [*_key_order(forward), *_key_order(backward)]
    layers = 1 + max((stage.layer for stage in forward.stages if stage.layer is not None), default=-1)
    chunk = ChunkGraph(joint, (), layers=layers, depths=_depths(joint, forward))
    return with_nodes(chunk, keys, order)


cut.stage = "chunk"  # type: ignore[attr-defined]


def assignment(chunk: ChunkGraph) -> Assignment:
    """Which schedule node each op of a chunk belongs to."""
    assert chunk.joint is not None
    by_name = {node.name: node for node in chunk.joint.module.graph.nodes}
    return {by_name[op]: (node.layer, node.slot, node.phase) for node in chunk.nodes for op in node.ops}


def with_nodes(chunk: ChunkGraph, keys: Assignment, order: Iterable[Key]) -> ChunkGraph:
    """The chunk with the nodes that its ops are assigned to, in dependency order, ties in the order of `order`."""
    assert chunk.joint is not None
    nodes = make_nodes(chunk.joint, keys, order, chunk.depths)
    acting = _acting(chunk.joint, nodes)
    # Consecutive ones must keep their order.
    return replace(chunk, nodes=nodes, effects=tuple(pairwise(acting)), acting=acting)


def _depths(joint: JointGraph, forward: Chain) -> tuple[tuple[int, int], ...]:
    """For each depth of multi-token prediction the half-open range of its logical layers."""
    ranges: dict[int, set[int]] = {}
    ends = forward.exits()
    for index, layer in enumerate(joint.physical):
        if layer.depth is not None:
            held = forward.stages[forward.entry[index] : ends[index] + 1]
            ranges.setdefault(layer.depth, set()).update(stage.layer for stage in held if stage.layer is not None)
    return tuple((min(found), max(found) + 1) for _, found in sorted(ranges.items()))


def _stage_keys(placed: Placement, chain: Chain) -> Assignment:
    return {node: _key(chain, position) for node, position in placed.items()}


def _assign_launches(joint: JointGraph, forward: Chain, keys: Assignment) -> None:
    """Move launches out of their stages into comm nodes of their own."""
    by_name = {node.name: node for node in joint.module.graph.nodes}
    for exchange in joint.exchanges:
        layer = forward.stages[forward.gates[exchange.index]].layer
        for name in exchange.launches:
            keys[by_name[name]] = (layer, COMM_SLOT[exchange.role], exchange.phase)


def _assign_shared(
    nodes: list[fx.Node],
    ranges: list[tuple[int | None, int, int]],
    placed: Placement,
    keys: Assignment,
    weights: dict[fx.Node, int],
) -> None:
    """Make a node `shared` of the real work of a MoE layer that its launches do not need but later stages do.

    Real work is more than the largest product of one expert with one token. Work is counted a token, by the sizes of
    weights, and not by those of the batch, so that ranks with other lengths decide alike.
    """
    compute = _by(lambda node: placed[node], (node for node in nodes if keys[node][1] not in COMM_SLOTS))
    launched = _by(lambda node: keys[node][0], (node for node in nodes if keys[node][1] in COMM_SLOTS))
    for layer, first, last in ranges:
        region = {node for stage in range(first, last) for node in compute.get(stage, ())}
        launches = launched.get(layer, [])
        needed = op_facts.ancestors([source for launch in launches for source in launch.all_input_nodes], region)
        free = region - needed
        later = _reaching(region, last, placed)
        heavy = {node for node in free if op_facts.is_heavy(node) and node in later}
        branch = op_facts.descendants(heavy, free)
        branch |= _only_for(branch, free)
        work = sum(weights.get(node, 0) for node in branch)
        expert = max((weights.get(node, 0) for node in region if keys[node][1] is Slot.EXPERTS), default=0)
        is_worth_it = work > expert
        # A draw or a collective has its place in the order of effects, so a branch that holds one is not movable.
        if is_worth_it and not any(op_facts.has_effect(node) for node in branch):
            keys.update({node: (layer, Slot.SHARED, op_facts.tag(node).phase) for node in branch})


def _weights(joint: JointGraph) -> dict[fx.Node, int]:
    """For each product with a weight, the elements of the weight's matrix: of one expert's, where it holds several."""
    given = {each.value for each in joint.inputs if each.kind in (InputKind.LEAF, InputKind.TANGENT)}
    constant: set[fx.Node] = set()
    found: dict[fx.Node, int] = {}
    for node in joint.module.graph.nodes:
        sources = node.all_input_nodes
        if node.op == "output":
            continue
        if op_facts.is_heavy(node):
            matrices = [source.meta["val"].shape[-2:] for source in sources if source in constant]
            found[node] = max((math.prod(matrix) for matrix in matrices if len(matrix) == 2), default=0)
        is_input = not op_facts.is_op(node) and node.name not in given
        # What no input goes into, such as a range, may be as long as the batch.
        if is_input or (sources and all(source in constant for source in sources) and not op_facts.has_effect(node)):
            constant.add(node)
    return found


def _clear_the_way(nodes: list[fx.Node], chain: Chain, placed: Placement, keys: Assignment) -> None:
    """Move what a launch does not need from the stage in front of it to the one behind, launch after launch.

    What the layer's branch `shared` needs stays, and so does in the backward what nothing later needs and nothing
    moved makes: weight gradients, which `wgrad` will take out.
    """
    members = _by(lambda node: keys[node], nodes)
    launches = _by(lambda node: placed[node], (node for node in nodes if op_facts.is_launch(node)))
    for position in sorted(set(chain.gates.values())):
        here, behind = (_key(chain, i) for i in (position, position + 1))
        own = {node for node in members.get(here, ()) if keys[node] == here}
        waiting = [*members.get((here[0], Slot.SHARED, chain.phase), ()), *launches.get(position, ())]
        sources = [source for node in waiting for source in node.all_input_nodes]
        needed = op_facts.ancestors([*sources, *(node for node in own if op_facts.has_effect(node))], own)
        rest = own - needed
        starts = rest if chain.phase is Phase.F else rest & _reaching(own, position + 1, placed)
        moved = op_facts.descendants(starts, rest)
        for node in moved:
            placed[node], keys[node] = position + 1, behind
        members.setdefault(behind, []).extend(moved)


def join_results(nodes: Iterable[fx.Node], keys: Assignment) -> None:
    """Let the results of an op with several stay with it."""
    for node in nodes:
        if node.target is operator.getitem and keys[node] != keys[node.args[0]]:  # type: ignore[index]
            keys[node] = keys[node.args[0]]  # type: ignore[index]


def _key(chain: Chain, position: int) -> Key:
    stage = chain.stages[position]
    return stage.layer, stage.slot, chain.phase


def _gated_ranges(chain: Chain, forward: Chain) -> list[tuple[int | None, int, int]]:
    """For each MoE layer, (layer, first stage, last stage): what its exchanges span in the chain."""
    ranges: dict[int | None, tuple[int, int]] = {}
    for exchange, gate in sorted(chain.gates.items(), key=lambda item: item[1]):
        layer = forward.stages[forward.gates[exchange]].layer
        first, _ = ranges.get(layer, (gate, gate))
        ranges[layer] = (first, gate + 1)
    return [(layer, first, last) for layer, (first, last) in ranges.items()]


def _reaching(nodes: set[fx.Node], stage: int, placed: Placement) -> set[fx.Node]:
    """Those of `nodes`, which stand before `stage`, that an op of the same phase at `stage` or later needs."""
    starts = [node for node in nodes if any(placed.get(user, -1) >= stage for user in node.users)]
    return op_facts.ancestors(starts, nodes)


def _by(key: Callable[[fx.Node], Any], nodes: Iterable[fx.Node]) -> dict[Any, list[fx.Node]]:
    """The nodes in groups of one key, each in the order of `nodes`."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(key(node), []).append(node)
    return groups


def _only_for(branch: set[fx.Node], within: set[fx.Node]) -> set[fx.Node]:
    """The ops of `within` that only `branch` reads, directly or through one another."""
    found: set[fx.Node] = set()
    for node in sorted(within - branch, reverse=True):
        if node.users and all(user in branch or user in found for user in node.users):
            found.add(node)
    return found


def remake_views(joint: JointGraph, keys: Assignment) -> None:
    """Copy each view into the nodes that read it, the view that a view is made of included."""
    graph = joint.module.graph
    results = {value for value, _ in (*joint.gradients, *joint.mutations)} | {joint.loss, *joint.outputs}
    for node in reversed(list(op_facts.ops(graph))):
        if not (op_facts.is_free_view(node) or _is_part_of_input(node)):
            continue
        copies: dict[Key, fx.Node] = {}
        for user in list(node.users):
            if user.op == "output" or keys[user] == keys[node] or keys[user][1] in COMM_SLOTS:
                continue
            if keys[user] not in copies:
                with graph.inserting_after(node):
                    copy = graph.node_copy(node)
                keys[copy] = keys[user]
                copy.meta = {**node.meta, META: replace(op_facts.tag(node), phase=keys[user][2])}
                copies[keys[user]] = copy
            user.replace_input_with(node, copies[keys[user]])
        if not node.users and node.name not in results:
            graph.erase_node(node)
            del keys[node]


def _is_part_of_input(node: fx.Node) -> bool:
    """Whether the op parts an input into views, or takes one of them.

    A buffer may be written to before a later node reads its parts: that node must read the buffer of its microbatch.
    """
    base = op_facts.view_base(node)
    return base is not None and not op_facts.is_op(op_facts.storage_root(base))


def _key_order(chain: Chain) -> list[Key]:
    """The keys of one phase in an order in which they may run."""
    order: list[Key] = []
    phase = chain.phase
    gates = set(chain.gates.values())
    for position, stage in enumerate(chain.stages):
        order.append((stage.layer, stage.slot, phase))
        if position not in gates:
            continue
        following = chain.stages[position + 1]
        slot = {Slot.PERMUTE: Slot.COUNTS}.get(following.slot)
        if slot is None:
            before_experts = (following.slot is Slot.EXPERTS) == (phase is Phase.F)
            slot = Slot.DISPATCH if before_experts else Slot.COMBINE
        layer = following.layer if phase is Phase.B else stage.layer
        order.append((layer, slot, phase))
        order.append((layer, Slot.SHARED, phase))
    return order


def make_nodes(
    joint: JointGraph, keys: Assignment, order: Iterable[Key], depths: Sequence[tuple[int, int]]
) -> tuple[ScheduleNode, ...]:
    """Schedule nodes in dependency order, ties in the order of `order`; only those that hold ops.

    Args:
        joint: holds the ops.
        keys: which node each op belongs to.
        order: all keys.
        depths: as in `ChunkGraph`.

    Raises UnsupportedError if the nodes form a cycle.
    """
    members: dict[Key, list[fx.Node]] = {key: [] for key in order}
    for node in op_facts.ops(joint.module.graph):
        members[keys[node]].append(node)
    in_mtp = _depth_layers(depths)
    nodes = [_schedule_node(key, ops, in_mtp) for key, ops in members.items() if ops]
    made_by = {value: i for i, node in enumerate(nodes) for value in node.writes}
    missing = [{made_by[value] for value in node.reads if value in made_by} for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for i, sources in enumerate(missing):
        for source in sources:
            readers[source].append(i)
    ready = [i for i, sources in enumerate(missing) if not sources]
    sorted_nodes: list[ScheduleNode] = []
    while ready:
        i = heapq.heappop(ready)
        sorted_nodes.append(nodes[i])
        for reader in readers[i]:
            missing[reader].remove(i)
            if not missing[reader]:
                heapq.heappush(ready, reader)
    if len(sorted_nodes) < len(nodes):
        left = [node.name for node, sources in zip(nodes, missing, strict=True) if sources]
        raise UnsupportedError(
            f"The schedule nodes {', '.join(left)} need one another's results in a circle. "
            f"A layer's parts must run in one order; check that the layers glob matches whole layers."
        )
    return tuple(sorted_nodes)


def _depth_layers(depths: Sequence[tuple[int, int]]) -> dict[tuple[int, bool], DepthLayer]:
    """Where in multi-token prediction a logical layer is, and where its head (True) is."""
    found: dict[tuple[int, bool], DepthLayer] = {}
    for depth, (start, end) in enumerate(depths):
        for layer in range(start, end):
            found[layer, False] = DepthLayer(depth, layer - start if end - start > 1 else None)
        found[end - 1, True] = DepthLayer(depth)
    return found


def _schedule_node(key: Key, ops: list[fx.Node], in_mtp: Mapping[tuple[int, bool], DepthLayer]) -> ScheduleNode:
    own = set(ops)
    reads = dict.fromkeys(source.name for node in ops for source in node.all_input_nodes if source not in own)
    writes = tuple(node.name for node in ops if any(user not in own for user in node.users))
    layer, slot, phase = key
    lane = Lane.COMM if slot in COMM_SLOTS else Lane.COMPUTE
    mtp = None if layer is None else in_mtp.get((layer, slot is Slot.MTP_POST))
    return ScheduleNode(layer, slot, phase, lane, tuple(node.name for node in ops), tuple(reads), writes, mtp)


def _acting(joint: JointGraph, nodes: tuple[ScheduleNode, ...]) -> tuple[str, ...]:
    """The nodes that draw random numbers or have other effects, in the order of the trace.

    Raises UnsupportedError if they cannot run in it.
    """
    launches = {name for each in joint.exchanges for name in each.launches}
    ops = (op for op in op_facts.ops(joint.module.graph) if op_facts.keeps_order(op) and op.name not in launches)
    number = {op.name: i for i, op in enumerate(ops)}
    held = {node.name: own for node in nodes if (own := [number[op] for op in node.ops if op in number])}
    for (name, own), (other, later) in pairwise(held.items()):
        if own[-1] > later[0]:
            raise UnsupportedError(
                f"{name} and {other} draw random numbers, or have other effects, which the nodes cannot keep in the "
                f"order of the model. Let a layer, or a head, do all of its own at one place of forward."
            )
    return tuple(held)
