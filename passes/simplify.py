"""Joint pass `simplify`: take out ops that compute nothing.

In:  JointGraph as exported.
Out: the same graph; the values and bits of everything that is left are the same:
     - `detach` is gone, so that aliases are seen as what they are;
     - a wait for what has been waited for is gone;
     - a transposition of a transposition is what was transposed;
     - a view of a view of a contiguous tensor is one view;
     - a launch that nothing reads is waited for, as every other one is;
     - a launch and a wait have one name, whatever namespace the model took them from;
     - a size is computed once, by the first op that gives it, so that a number crosses cuts instead of a tensor, and
       nothing asks a tensor in flight for its size.

A rule takes an op and returns the node that stands for it, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from fxoverlap.config import OverlapConfig
from fxoverlap.ir import JointGraph
from fxoverlap.ops.collectives import OTHER_NAMES
from fxoverlap.passes import op_facts
from fxoverlap.passes.op_facts import aten

Rule = Callable[[fx.Node], fx.Node | None]

RESHAPES = (aten.view.default, aten._unsafe_view.default)


def simplify(joint: JointGraph, config: OverlapConfig) -> JointGraph:
    """Apply the rules once to every op, in graph order."""
    del config
    graph = joint.module.graph
    stands_for: dict[str, str] = {}
    rules: tuple[Rule, ...] = (no_detach, one_wait, no_double_transpose, one_view, one_name, SizeOnce())
    for node in list(op_facts.ops(graph)):
        found = next((new for rule in rules if (new := rule(node)) is not None), None)
        if found is not None:
            stands_for[node.name] = stands_for.get(found.name, found.name)
            node.replace_all_uses_with(found)
            graph.erase_node(node)
    _wait_for_unread_launches(graph)
    _ask_after_the_wait(graph)
    return _renamed(joint, stands_for)


simplify.stage = "joint"  # type: ignore[attr-defined]


def no_detach(node: fx.Node) -> fx.Node | None:
    """detach(x) -> x: below autograd there is no graph to detach from."""
    return _first(node) if node.target is aten.detach.default else None


def one_wait(node: fx.Node) -> fx.Node | None:
    """wait(wait(x)) -> wait(x): functional collectives may wait by themselves while they are traced."""
    source = _first(node) if op_facts.is_wait(node) else None
    return source if source is not None and op_facts.is_wait(source) else None


def no_double_transpose(node: fx.Node) -> fx.Node | None:
    """t(t(x)) -> x."""
    inner = _first(node)
    twice = node.target is aten.t.default and inner is not None and inner.target is aten.t.default
    return _first(inner) if twice and inner is not None else None


def one_view(node: fx.Node) -> fx.Node | None:
    """view(view(x, a), b) -> view(x, b), where x is contiguous, so that both share its layout."""
    inner = _first(node)
    if node.target not in RESHAPES or inner is None or inner.target not in RESHAPES:
        return None
    base = _first(inner)
    if base is None or not _is_plainly_contiguous(base.meta.get("val")):
        return None
    with node.graph.inserting_before(node):
        new = node.graph.call_function(aten.view.default, (base, *node.args[1:]))
    new.meta = dict(node.meta)
    return new


def one_name(node: fx.Node) -> fx.Node | None:
    """A collective of another namespace -> the same op in the namespace that passes know."""
    known = OTHER_NAMES.get(node.target)
    if known is None:
        return None
    with node.graph.inserting_before(node):
        new = node.graph.call_function(known, node.args, node.kwargs)
    new.meta = dict(node.meta)
    return new


class SizeOnce:
    """size -> the first op that gave the same size, or the same expression of sizes."""

    def __init__(self) -> None:
        self._first: dict[str, fx.Node] = {}

    def __call__(self, node: fx.Node) -> fx.Node | None:
        """Apply the rule."""
        if not isinstance(node.meta.get("val"), torch.SymInt):
            return None
        known = self._first.setdefault(str(node.meta["val"]), node)
        return known if known is not node and op_facts.is_size(node) else None


def _first(node: fx.Node) -> fx.Node | None:
    """The first argument, if it is a node."""
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def _is_plainly_contiguous(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or any(isinstance(size, torch.SymInt) for size in value.shape):
        return False
    return value.is_contiguous()


def _wait_for_unread_launches(graph: fx.Graph) -> None:
    """Let a wait read each collective whose result nothing reads."""
    for node in list(op_facts.ops(graph)):
        is_unread = op_facts.is_collective(node) and not op_facts.is_wait(node) and not node.users
        if is_unread and isinstance(node.meta["val"], torch.Tensor):
            with graph.inserting_after(node):
                graph.call_function(op_facts.WAIT, (node,)).meta = dict(node.meta)


def _ask_after_the_wait(graph: fx.Graph) -> None:
    """Let a size op that asks a launch's result ask the waited tensor instead."""
    for node in list(op_facts.ops(graph)):
        if op_facts.is_size(node) and any(op_facts.is_launch(source) for source in node.all_input_nodes):
            launch = node.all_input_nodes[0]
            wait = next(user for user in launch.users if op_facts.is_wait(user))
            wait.append(node)
            node.replace_input_with(launch, wait)


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
