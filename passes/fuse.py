"""Plan pass `fuse`: lower a plan to an FX graph with one call a node instance, in plan order.

In:  Plan over chunk graphs with modules.
Out: FusedGraph. Its placeholders are the values that are alive before the step: graph inputs, and for the backward's
     microbatch what its forward saved. Its outputs are the values that are alive after it. Calls carry their
     `Instance`, values their `ValueRef`; names are `f_<value>` and `b_<value>`.
"""

from __future__ import annotations

import operator

from torch import fx, nn

from fxoverlap import compat
from fxoverlap.config import OverlapConfig
from fxoverlap.flow import kept_after_forward
from fxoverlap.ir import META, ChunkGraph, FusedGraph, Instance, Plan, ValueRef, runs_forward


def fuse(plan: Plan, config: OverlapConfig) -> FusedGraph:
    """Build the fused graph of a plan."""
    del config
    graph, root, names = fx.Graph(), nn.Module(), _ModuleNames()
    env = {ref: _placeholder(graph, ref) for ref in _alive_before(plan)}
    for instance in plan.order:
        module = plan.chunks[instance.mb].modules[instance.node.name]
        target = names.of(module, instance)
        root.add_module(target, module)
        # One list, which the boxed module empties.
        args = [env[ValueRef(instance.mb, value)] for value in instance.node.reads]
        call = graph.create_node("call_module", target, (args,), name=_name(instance.mb, instance.node.name))
        call.meta[META] = instance
        for position, value in enumerate(instance.node.writes):
            ref = ValueRef(instance.mb, value)
            env[ref] = graph.create_node("call_function", operator.getitem, (call, position), name=_name(ref.mb, value))
            env[ref].meta[META] = ref
    graph.output(tuple(env[ref] for ref in _alive_after(plan)))
    return FusedGraph(plan, compat.lazy_module(root, graph, "FusedGraph"))


fuse.stage = "plan"  # type: ignore[attr-defined]


class _ModuleNames:
    """Names for shared modules: slot and phase, with a number where structures differ."""

    def __init__(self) -> None:
        self._by_module: dict[int, str] = {}
        self._count: dict[str, int] = {}

    def of(self, module: fx.GraphModule, instance: Instance) -> str:
        if id(module) not in self._by_module:
            base = f"{instance.node.slot.value}_{instance.node.phase.value}"
            number = self._count.get(base, 0)
            self._count[base] = number + 1
            self._by_module[id(module)] = f"{base}_{number}" if number else base
        return self._by_module[id(module)]


def _name(mb: str, text: str) -> str:
    return f"{mb.lower()}_{text.replace('.', '_')}"


def _placeholder(graph: fx.Graph, ref: ValueRef) -> fx.Node:
    node = graph.create_node("placeholder", _name(ref.mb, ref.value), name=_name(ref.mb, ref.value))
    node.meta[META] = ref
    return node


def _alive_before(plan: Plan) -> list[ValueRef]:
    made = {ValueRef(i.mb, value) for i in plan.order for value in i.node.writes}
    read = dict.fromkeys(ValueRef(i.mb, value) for i in plan.order for value in i.node.reads)
    return [ref for ref in read if ref not in made]


def _alive_after(plan: Plan) -> list[ValueRef]:
    """What is handed on: what the backward will read, the results of the forward, and gradients."""
    kept = {mb: _kept_after(mb, chunk) for mb, chunk in plan.chunks.items()}
    written = (ValueRef(i.mb, value) for i in plan.order for value in i.node.writes if value in kept[i.mb])
    return list(dict.fromkeys(written))


def _kept_after(mb: str, chunk: ChunkGraph) -> set[str]:
    """What is handed on of one microbatch of a plan."""
    return kept_after_forward(chunk) if runs_forward(mb) else {value for value, _ in _gradients(chunk)}


def _gradients(chunk: ChunkGraph) -> tuple[tuple[str, str], ...]:
    return chunk.joint.gradients if chunk.joint is not None else ()
