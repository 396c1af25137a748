"""Place every op of a partitioned joint graph on a stage of its phase's chain, by data flow.

An op's *earliest* stage is the maximum over its inputs of the same phase, over the gates crossed on the way, and over
the entry of its own physical layer. Its *latest* stage comes from its readers. Ops with room between the two:
- ops that need no tangent (B) or only parameters and batch (F) go to their first reader;
- other ops move later only where fewer bytes cross the stages for it;
- random draws keep their order and are never moved.
Launches stand at their exchange's gate. In front of a counts launch only what the launch needs is computed.
"""

from __future__ import annotations

import operator

from torch import fx

from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import InputKind, JointGraph, Phase, Slot
from fxoverlap.passes import op_facts
from fxoverlap.passes.chain import Chain
from fxoverlap.passes.sizes import Sizes

Placement = dict[fx.Node, int]
"""The stage of each op of one phase, as a position in its chain."""


def place_forward(joint: JointGraph, chain: Chain, sizes: Sizes) -> Placement:
    """Place the F ops."""
    nodes = phase_ops(joint, Phase.F)
    gates = _launch_gates(joint, chain)
    outside = _after_last_layer(nodes, joint)
    stage = _earliest(nodes, chain, gates, dict.fromkeys(outside, chain.last))
    _sink(nodes, stage, set(gates), _free(nodes, joint), sizes)
    _clear_the_way_to_counts(nodes, stage, chain, gates)
    return stage


def place_backward(joint: JointGraph, chain: Chain, forward: Placement, sizes: Sizes) -> Placement:
    """Place the B ops (W is split off later)."""
    nodes = phase_ops(joint, Phase.B)
    gates = _launch_gates(joint, chain)
    before = _fqns_before_layers(joint, forward)
    entry = {node: chain.last for node in nodes if op_facts.tag(node).fqn in before}
    stage = _earliest(nodes, chain, gates, entry)
    _sink(nodes, stage, set(gates), _free(nodes, joint), sizes)
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
    last_draw = 0
    for node in nodes:
        layer = op_facts.tag(node).layer
        found = entry.get(node, 0) if layer is None else chain.entry[layer]
        for source in node.all_input_nodes:
            if source in stage:
                found = max(found, stage[source] + (source in gates))
        if node in gates:
            found = _at_gate(node, found, gates[node], chain)
        if node.target is operator.getitem and node.args[0] in stage:
            found = stage[node.args[0]]  # type: ignore[index]
        if op_facts.is_random(node):
            found = last_draw = max(found, last_draw)
        stage[node] = found
    return stage


def _at_gate(node: fx.Node, earliest: int, gate: int, chain: Chain) -> int:
    if earliest > gate:
        raise UnsupportedError(
            f"The exchange launch {node.name} (module {op_facts.tag(node).fqn!r}) needs values of "
            f"{chain.stages[earliest]}, which comes after its own stage {chain.stages[gate]}. An exchange that waits "
            f"for a later layer's results cannot be scheduled."
        )
    return gate


def _after_last_layer(nodes: list[fx.Node], joint: JointGraph) -> set[fx.Node]:
    """F ops outside the layers that need a result of the last one: final norm, head, loss."""
    if not joint.physical:
        return set()
    last = len(joint.physical) - 1
    of_last = {node for node in nodes if op_facts.tag(node).layer == last}
    return {node for node in op_facts.descendants(of_last, set(nodes)) if op_facts.tag(node).layer is None}


def _fqns_before_layers(joint: JointGraph, forward: Placement) -> set[str]:
    """FQNs outside the layers whose F ops all stand in `pre_process`: embeddings."""
    before: set[str] = set()
    later: set[str] = set()
    for node, position in forward.items():
        tag = op_facts.tag(node)
        if tag.layer is None and tag.fqn:
            (before if position == 0 and joint.physical else later).add(tag.fqn)
    return before - later


def _sink(nodes: list[fx.Node], stage: Placement, fixed: set[fx.Node], free: set[fx.Node], sizes: Sizes) -> None:
    """Move ops that have room to a later stage, last op first."""
    for node in reversed(nodes):
        if node in fixed or op_facts.has_effect(node) or node.target is operator.getitem:
            continue
        group = [node, *(user for user in node.users if user.target is operator.getitem)]
        readers = [user for member in group for user in member.users if user not in group]
        if not readers or any(reader not in stage for reader in readers):
            continue
        latest = min(stage[reader] for reader in readers)
        if latest > stage[node] and (node in free or _fewer_bytes(node, latest, stage, sizes)):
            for member in group:
                stage[member] = latest


def _free(nodes: list[fx.Node], joint: JointGraph) -> set[fx.Node]:
    """Ops that need nothing of their own phase but other such ops: casts of parameters, powers of saved values."""
    tangents = {each.value for each in joint.inputs if each.kind is InputKind.TANGENT}
    own, free = set(nodes), set()
    for node in nodes:
        needs = [source for source in node.all_input_nodes if source in own or source.name in tangents]
        if not op_facts.has_effect(node) and all(source in free for source in needs):
            free.add(node)
    return free


def _fewer_bytes(node: fx.Node, latest: int, stage: Placement, sizes: Sizes) -> bool:
    """Whether fewer bytes cross the stages in between if `node` runs at `latest`."""
    prolonged = 0
    for source in node.all_input_nodes:
        root = op_facts.storage_root(source)
        if root.op == "call_function" and not _is_read_from(root, latest, node, stage):
            prolonged += sizes.of(root)
    return prolonged < sizes.of(node)


def _is_read_from(root: fx.Node, latest: int, besides: fx.Node, stage: Placement) -> bool:
    """Whether an op other than `besides` reads this storage at `latest` or later, or in another phase."""
    stack = [root]
    while stack:
        for user in stack.pop().users:
            if user is not besides and stage.get(user, latest) >= latest:
                return True
            if op_facts.view_base(user) is not None:
                stack.append(user)
    return False


def _clear_the_way_to_counts(nodes: list[fx.Node], stage: Placement, chain: Chain, gates: dict[fx.Node, int]) -> None:
    """Move what the counts launch does not need behind it, so that the counts travel while the rest is computed.

    Real work (matrix products) stays: `cut` makes a movable node of it.
    """
    for position, each in enumerate(chain.stages[:-1]):
        if chain.stages[position + 1].slot is not Slot.PERMUTE or each.slot is not Slot.PRE_DISPATCH:
            continue
        own = {node for node in nodes if stage[node] == position}
        keep = [node for node in own if node in gates or op_facts.has_effect(node) or op_facts.is_heavy(node)]
        for node in own - op_facts.ancestors(keep, own):
            if node.target is not operator.getitem:
                stage[node] = position + 1
        for node in nodes:
            if node.target is operator.getitem:
                stage[node] = stage[node.args[0]]  # type: ignore[index]
