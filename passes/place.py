"""Place every op of a partitioned joint graph on a stage of its phase's chain, by data flow.

An op's *earliest* stage is the maximum over its inputs of the same phase, over the gates crossed on the way, and over
the entry of its own physical layer. Its *latest* stage comes from its readers. Ops with room between the two:
- ops that need no tangent (B), or only parameters and batch (F), go to their first reader, but for the embedding of
  the trunk's input;
- other ops move later only within their layer, where less crosses the stages for it, and if they are no real work;
- random draws, collectives that are no exchange and other effects keep their order and are never moved.
Launches stand at their exchange's gate.

No decision depends on the length of a dimension, which may differ between ranks: plans must not.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import InputKind, JointGraph, Phase
from fxoverlap.passes import op_facts
from fxoverlap.passes.chain import Chain

Placement = dict[fx.Node, int]
"""The stage of each op of one phase, as a position in its chain."""


def place_forward(joint: JointGraph, chain: Chain) -> Placement:
    """Place the F ops."""
    nodes = phase_ops(joint, Phase.F)
    gates = _launch_gates(joint, chain)
    behind = _behind_layers(nodes, joint)
    stage = _earliest(nodes, chain, gates, dict.fromkeys(behind, chain.last))
    _sink(nodes, stage, chain, gates, joint)
    return stage


def place_backward(joint: JointGraph, chain: Chain, forward: Placement) -> Placement:
    """Place the B ops (W is split off later)."""
    nodes = phase_ops(joint, Phase.B)
    gates = _launch_gates(joint, chain)
    before = _before_layers(joint, forward)
    entry = {node: chain.last for node in nodes if op_facts.tag(node).layer is None and _calls(node) in before}
    stage = _earliest(nodes, chain, gates, entry)
    _sink(nodes, stage, chain, gates, joint)
    return stage


def phase_ops(joint: JointGraph, phase: Phase) -> list[fx.Node]:
    """The ops of one phase in graph order."""
    return [node for node in op_facts.ops(joint.module.graph) if op_facts.tag(node).phase is phase]


def _launch_gates(joint: JointGraph, chain: Chain) -> dict[fx.Node, int]:
    """Launch op -> the stage that it ends."""
    by_name = {node.name: node for node in joint.module.graph.nodes}
    return {
        by_name[name]: chain.gates[exchange.index]
        for exchange in joint.exchanges
        if exchange.phase is chain.phase
        for name in exchange.launches
    }


def _earliest(nodes: list[fx.Node], chain: Chain, gates: dict[fx.Node, int], entry: Placement) -> Placement:
    stage: Placement = {}
    last_effect = 0
    for node in nodes:
        layer = op_facts.tag(node).layer
        found = entry.get(node, 0) if layer is None else chain.entry[layer]
        for source in node.all_input_nodes:
            if source in stage:
                found = max(found, stage[source] + (source in gates))
        if node in gates:
            found = _at_gate(node, found, gates[node], chain)
        elif node.target is operator.getitem and node.args[0] in stage:
            found = stage[node.args[0]]  # type: ignore[index]
        elif op_facts.keeps_order(node):
            found = last_effect = max(found, last_effect)
        stage[node] = found
    return stage


def _at_gate(node: fx.Node, earliest: int, gate: int, chain: Chain) -> int:
    if earliest > gate:
        raise UnsupportedError(
            f"The exchange launch {node.name} (module {op_facts.tag(node).fqn!r}) needs values of "
            f"{chain.stages[earliest]}, which comes after its own stage {chain.stages[gate]}. An exchange that waits "
            f"for a later layer's results cannot be scheduled. Let the layers run in turn, the depths of multi-token "
            f"prediction behind those of the trunk; a depth that runs between others may be a layer (mtp_layers)."
        )
    return gate


def _behind_layers(nodes: list[fx.Node], joint: JointGraph) -> set[fx.Node]:
    """F ops outside the layers that need a result of the last one, and that no layer needs: final norm, head, loss.

    A depth of multi-token prediction has a last layer of its own. A head that draws, or has another effect, before a
    later layer does is not among them: effects keep their order.
    """
    physical = joint.physical
    last = {i for i, layer in enumerate(physical) if i + 1 == len(physical) or physical[i + 1].depth != layer.depth}
    own = set(nodes)
    behind = op_facts.descendants({node for node in nodes if op_facts.tag(node).layer in last}, own)
    found = {node for node in behind if op_facts.tag(node).layer is None}
    inside = [source for node in nodes if op_facts.tag(node).layer is not None for source in node.all_input_nodes]
    acting = [node for node in nodes if op_facts.keeps_order(node)]
    while acting and op_facts.tag(acting[-1]).layer is None:
        acting.pop()
    return found - op_facts.ancestors([*inside, *acting], found)


def _before_layers(joint: JointGraph, forward: Placement) -> set[tuple[str, ...]]:
    """Calls of modules outside the layers whose F ops all stand in `pre_process`: of embeddings."""
    before: set[tuple[str, ...]] = set()
    later: set[tuple[str, ...]] = set()
    for node, position in forward.items():
        tag = op_facts.tag(node)
        if tag.layer is None and tag.fqn:
            (before if position == 0 and joint.physical else later).add(_calls(node))
    return before - later


def _calls(node: fx.Node) -> tuple[str, ...]:
    tag = op_facts.tag(node)
    return tag.calls or (tag.fqn or "",)


def _sink(nodes: list[fx.Node], stage: Placement, chain: Chain, gates: dict[fx.Node, int], joint: JointGraph) -> None:
    """Move ops that have room to a later stage, last op first."""
    free, ends = _free(nodes, joint), chain.exits()
    of_depths = of_batch(nodes) if chain.phase is Phase.F else set()
    first_depth = min((chain.entry[i] for i, each in enumerate(joint.physical) if each.depth is not None), default=None)
    for node in reversed(nodes):
        if node in gates or op_facts.has_effect(node) or node.target is operator.getitem:
            continue
        group = op_facts.with_results(node)
        readers = {user for member in group for user in member.users if user in stage} - set(group)
        latest = min((stage[reader] for reader in readers), default=stage[node])
        embeds_for_depth = node in of_depths and first_depth is not None and latest >= first_depth
        if not (node in free or embeds_for_depth):
            layer = op_facts.tag(node).layer
            latest = min(latest, stage[node] if layer is None else ends[layer])
            if op_facts.is_heavy(node) or not _less_crosses(node, latest, stage, chain.phase):
                continue
        if latest > stage[node]:
            for member in group:
                stage[member] = latest


def _free(nodes: list[fx.Node], joint: JointGraph) -> set[fx.Node]:
    """Ops that nothing but their readers ties to a stage: casts of parameters, masks, powers of saved values.

    In F they need parameters only, or make indices and masks of the batch; in B they need no tangent.
    """
    tangents = {each.value for each in joint.inputs if each.kind is InputKind.TANGENT}
    leaves = {each.value for each in joint.inputs if each.kind is InputKind.LEAF}
    own, free = set(nodes), set()
    # What is an input, or an index or mask made of one.
    of_batch = {node for node in joint.module.graph.find_nodes(op="placeholder") if node.name in leaves}
    for node in nodes:
        sources = node.all_input_nodes
        tied = any(source.name in tangents or (source in own and source not in free) for source in sources)
        is_of_batch = any(source in of_batch for source in sources)
        embeds = is_of_batch and op_facts.tag(node).phase is Phase.F and _is_floating(node)
        if is_of_batch:
            of_batch.add(node)
        if not (tied or embeds or op_facts.has_effect(node)):
            free.add(node)
    return free


def of_batch(nodes: list[fx.Node]) -> set[fx.Node]:
    """F ops outside the layers that need nothing but parameters, buffers and batch: embeddings too."""
    own, found = set(nodes), set()
    for node in nodes:
        is_outside = op_facts.tag(node).layer is None and not op_facts.has_effect(node)
        if is_outside and all(source in found for source in node.all_input_nodes if source in own):
            found.add(node)
    return found


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in values)


def _less_crosses(node: fx.Node, latest: int, stage: Placement, phase: Phase) -> bool:
    """Whether less crosses the stages in between if `node` runs at `latest`, whatever the lengths of dimensions are.

    A tensor with fewer dimensions is less; of tensors with equally many, the bytes of an element decide.
    """
    value = node.meta.get("val")
    prolonged = []
    for source in node.all_input_nodes:
        root = op_facts.storage_root(source)
        if op_facts.is_op(root) and not _is_read_from(root, latest, node, stage, phase):
            prolonged.append(source)
    if not prolonged:
        return isinstance(value, (torch.Tensor, tuple, list))
    sources = [source.meta.get("val") for source in prolonged]
    if not all(op_facts.is_whole(source) for source in prolonged) or not isinstance(value, torch.Tensor):
        return False
    bytes_of_element = 0
    for each in sources:
        if not isinstance(each, torch.Tensor) or each.dim() > value.dim():
            return False
        bytes_of_element += each.element_size() if each.dim() == value.dim() else 0
    return bytes_of_element < value.element_size()


def _is_read_from(root: fx.Node, latest: int, besides: fx.Node, stage: Placement, phase: Phase) -> bool:
    """Whether an op other than `besides` reads this storage at `latest` or later; to F, all of B is later."""
    other_phase = latest if phase is Phase.F else -1
    stack = [root]
    while stack:
        for user in stack.pop().users:
            if user is not besides and stage.get(user, other_phase) >= latest:
                return True
            if op_facts.view_base(user) is not None:
                stack.append(user)
    return False
