"""Joint pass `partition`: give every op its phase, and drop what nothing needs.

In:  JointGraph with ops tagged as the tracer ran them.
Out: the same graph, in an order in which all F ops come before all B ops:
     - dead ops are gone, but no collective, random draw, write or assertion is;
     - `detach` is erased, so that aliases are seen as what they are;
     - a size is computed once, by the first op that gives it, so that a number crosses instead of a tensor, and
       nothing asks a tensor in flight for its size;
     - sizes that only need F values are F ops;
     - no F op reads a B op.

Raises UnsupportedError: the backward draws random numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import META, JointGraph, Phase
from fxoverlap.passes import op_facts
from fxoverlap.passes.op_facts import aten


def partition(joint: JointGraph, config: OverlapConfig) -> JointGraph:
    """Make the joint graph fit to be cut."""
    del config
    graph = joint.module.graph
    joint = _renamed(joint, _erase_detach(graph))
    _compute_sizes_once(graph)
    _drop_dead(graph)
    for node in op_facts.ops(graph):
        tag = op_facts.tag(node)
        if tag.phase is Phase.B and op_facts.is_size(node) and _reads_only_forward(node):
            node.meta[META] = replace(tag, phase=Phase.F)
        elif tag.phase is Phase.F and any(_phase(source) is Phase.B for source in node.all_input_nodes):
            node.meta[META] = replace(tag, phase=Phase.B)
        if op_facts.tag(node).phase is Phase.B and op_facts.is_random(node):
            raise UnsupportedError(
                f"The backward of module {tag.fqn!r} draws random numbers ({node.target}). Overlapped with another "
                f"microbatch's forward it would draw others than eager does. Draw in forward and save the result."
            )
    _sort_by_phase(graph)
    graph.lint()
    return joint


partition.stage = "joint"  # type: ignore[attr-defined]


def _phase(node: fx.Node) -> Phase | None:
    return op_facts.tag(node).phase if op_facts.is_op(node) else None


def _reads_only_forward(node: fx.Node) -> bool:
    return all(_phase(source) is not Phase.B for source in node.all_input_nodes)


def _erase_detach(graph: fx.Graph) -> dict[str, str]:
    """Erase every detach; return the value that stands for each erased one."""
    stands_for: dict[str, str] = {}
    for node in list(graph.find_nodes(op="call_function", target=aten.detach.default)):
        base = node.args[0]
        assert isinstance(base, fx.Node)
        stands_for[node.name] = stands_for.get(base.name, base.name)
        node.replace_all_uses_with(base)
        graph.erase_node(node)
    return stands_for


def _renamed(joint: JointGraph, stands_for: dict[str, str]) -> JointGraph:
    """The ends of the graph under the names that are left."""

    def new(value: str) -> str:
        return stands_for.get(value, value)

    return replace(
        joint,
        loss=new(joint.loss),
        outputs=tuple(new(value) for value in joint.outputs),
        mutations=tuple((new(value), target) for value, target in joint.mutations),
        gradients=tuple((new(value), target) for value, target in joint.gradients),
    )


def _compute_sizes_once(graph: fx.Graph) -> None:
    """Let one op stand for all that give the same size, or the same expression of sizes."""
    first: dict[str, fx.Node] = {}
    for node in list(op_facts.ops(graph)):
        if not isinstance(node.meta.get("val"), torch.SymInt):
            continue
        known = first.setdefault(str(node.meta["val"]), node)
        if known is not node and op_facts.is_size(node):
            node.replace_all_uses_with(known)
            graph.erase_node(node)
    for node in list(op_facts.ops(graph)):
        if op_facts.is_size(node) and any(op_facts.is_launch(source) for source in node.all_input_nodes):
            launch = node.all_input_nodes[0]
            wait = next(user for user in launch.users if op_facts.is_wait(user))
            wait.append(node)
            node.replace_input_with(launch, wait)


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
