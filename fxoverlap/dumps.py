"""Graphs as texts, for people who look at what each pass did (`TORCH_TRACE=folder`, then tlparse or an editor).

A joint graph is its code and what passes know of its ops; a chunk graph is a line a node and the code of the distinct
modules; a plan is a line an instance; a fused graph is its plan, with what dies where, and its code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from fxoverlap import compat
from fxoverlap.ir import META, ChunkGraph, FusedGraph, JointGraph, OpTag, Plan


def dump(name: str, graph: Any) -> None:
    """Add a graph to torch's structured log, as the artifact `fxoverlap_<name>`; nothing if there is no log."""
    compat.trace_artifact(f"fxoverlap_{name}", lambda: text(graph))


def text(graph: Any) -> str:
    """A graph of any stage; `repr` of what is none."""
    if isinstance(graph, JointGraph):
        return _joined(_joint(graph))
    if isinstance(graph, ChunkGraph):
        return _joined(_chunk(graph))
    if isinstance(graph, Plan):
        return _joined(_plan(graph))
    return _joined(_fused(graph)) if isinstance(graph, FusedGraph) else f"{graph!r}\n"


def _joined(lines: Iterator[str]) -> str:
    return "\n".join(lines) + "\n"


def _joint(graph: JointGraph) -> Iterator[str]:
    yield from (f"input {each.value}: {each.kind.value} {each.name}" for each in graph.inputs)
    yield f"loss {graph.loss}"
    yield from (f"output {value}" for value in graph.outputs)
    yield from (f"mutation {value} of {target}" for value, target in graph.mutations)
    yield from (f"gradient {value} of {target}" for value, target in graph.gradients)
    yield from (f"layer {i}: {each.fqn}" for i, each in enumerate(graph.physical))
    yield from map(str, graph.exchanges)
    yield _code(graph.module)
    for node in graph.module.graph.nodes:
        tag = node.meta.get(META)
        if isinstance(tag, OpTag):
            yield f"{node.name}: {tag.phase.value}, layer {tag.layer}, module {tag.fqn!r}"


def _chunk(graph: ChunkGraph) -> Iterator[str]:
    first: dict[int, str] = {}
    for node in graph.nodes:
        module = graph.modules.get(node.name)
        shared = "" if module is None else f", module of {first.setdefault(id(module), node.name)}"
        yield f"{node.name}: {node.lane.value}, {graph.costs.get(node.name, 'no costs')}{shared}"
        yield from (f"  {what} {', '.join(getattr(node, what))}" for what in ("ops", "reads", "writes"))
    yield from (f"effects of {earlier} before those of {later}" for earlier, later in graph.effects)
    for name in first.values():
        yield f"{name}:\n{_code(graph.modules[name])}"


def _plan(plan: Plan) -> Iterator[str]:
    for instance in plan.order:
        yield f"{instance}" + (f"  frees {', '.join(instance.frees)}" if instance.frees else "")


def _fused(graph: FusedGraph) -> Iterator[str]:
    yield from _plan(graph.plan)
    yield _code(graph.module)


def _code(module: fx.GraphModule) -> str:
    return module.print_readable(print_output=False)
