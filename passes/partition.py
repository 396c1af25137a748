"""Joint pass `partition`: give every op its phase, and drop what nothing needs.

In:  JointGraph with ops tagged as the tracer ran them.
Out: the same graph, in an order in which all F ops come before all B ops:
     - dead ops are gone, but no collective, random draw, write or assertion is;
     - sizes that only need F values are F ops;
     - no F op reads a B op;
     - every gradient is made by a B op, be it a copy of an input or of an F value.

Raises UnsupportedError: the backward draws random numbers, or writes to a buffer.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import META, JointGraph, OpTag, Phase
from fxoverlap.passes import op_facts


def partition(joint: JointGraph, config: OverlapConfig) -> JointGraph:
    """Make the joint graph fit to be cut."""
    del config
    graph = joint.module.graph
    _drop_dead(graph)
    for node in op_facts.ops(graph):
        tag = op_facts.tag(node)
        if tag.phase is Phase.B and op_facts.is_size(node) and _reads_only_forward(node):
            node.meta[META] = replace(tag, phase=Phase.F)
        elif tag.phase is Phase.F and not _reads_only_forward(node):
            node.meta[META] = replace(tag, phase=Phase.B)
        if op_facts.tag(node).phase is Phase.B and op_facts.is_random(node):
            raise UnsupportedError(
                f"The backward of module {tag.fqn!r} draws random numbers ({node.target}). Overlapped with another "
                f"microbatch's forward it would draw others than eager does. Draw in forward and save the result."
            )
        found = op_facts.schema(node)
        if op_facts.tag(node).phase is Phase.B and found is not None and found.is_mutable:
            raise UnsupportedError(
                f"The backward of module {tag.fqn!r} writes to a tensor in place ({node.target}). Another microbatch's "
                f"forward would read it too early or too late. Write in forward, or return the value."
            )
    joint = _own_gradients(joint)
    _sort_by_phase(graph)
    graph.lint()
    return joint


partition.stage = "joint"  # type: ignore[attr-defined]


def _reads_only_forward(node: fx.Node) -> bool:
    return all(not op_facts.is_op(s) or op_facts.tag(s).phase is Phase.F for s in node.all_input_nodes)


def _own_gradients(joint: JointGraph) -> JointGraph:
    """Let a B op make each gradient that is an input or an F value as it stands."""
    graph = joint.module.graph
    by_name = {node.name: node for node in graph.nodes}
    output = graph.output_node()
    gradients = []
    for value, target in joint.gradients:
        node = by_name[value]
        if not op_facts.is_op(node) or op_facts.tag(node).phase is Phase.F:
            with graph.inserting_before(output):
                copy = graph.call_function(op_facts.aten.clone.default, (node,))
            copy.meta = {"val": node.meta["val"], META: OpTag(Phase.B, None)}
            output.args = ([*output.args[0], copy],)  # type: ignore[misc]
            value = copy.name
        gradients.append((value, target))
    return replace(joint, gradients=tuple(gradients))


def _drop_dead(graph: fx.Graph) -> None:
    for node in reversed(list(op_facts.ops(graph))):
        if not node.users and not op_facts.has_effect(node):
            graph.erase_node(node)


def _sort_by_phase(graph: fx.Graph) -> None:
    """Move all B ops behind the last F op, keeping the order among them."""
    output = graph.output_node()
    for node in list(op_facts.ops(graph)):
        if op_facts.tag(node).phase is Phase.B:
            output.prepend(node)
