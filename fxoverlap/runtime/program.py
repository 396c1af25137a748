"""FusedGraph -> Program: the fused graph as a list of operations on microbatch states.

Each operation calls one boxed module on values of one microbatch, stores its results, delivers the gradients that
became final, and drops what dies with it. Event markers become nothing on a CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxoverlap import compat
from fxoverlap.ir import META, FusedGraph, GraphInput, InputKind, Instance, Phase, ValueRef, runs_forward
from fxoverlap.ops.collectives import WAIT, is_collective
from fxoverlap.runtime.profile import launch, wait
from fxoverlap.runtime.state import Layout


@dataclass(frozen=True, slots=True)
class Operation:
    """One node instance, ready to run.

    Attributes:
        instance: what it is.
        call: takes the list of arguments and empties it; returns a tuple.
        in_grad_mode: whether eager runs its ops in grad mode: F, and R, which repeats F.
        reads: positions in the state's values.
        writes: likewise, one a result; None for a result that nothing reads later.
        last_reads: positions whose value dies inside the call, with its last use.
        last_waits: positions whose value dies behind the call: inputs of launches that it waits for.
        launches: whether it launches a collective of any kind.
        gradients: (position among the results, kind, index) of the parameters and leaves whose gradient is final now.
    """

    instance: Instance
    call: Callable[[list[Any]], tuple[Any, ...]]
    in_grad_mode: bool
    reads: tuple[int, ...]
    writes: tuple[int | None, ...]
    last_reads: tuple[int, ...]
    last_waits: tuple[int, ...]
    launches: bool
    gradients: tuple[tuple[int, InputKind, int], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """The operations of a fused graph in issue order."""

    operations: tuple[Operation, ...]


def lower(fused: FusedGraph, layouts: Mapping[str, Layout]) -> Program:
    """Lower a fused graph for states with these layouts, by `Instance.mb`."""
    operations = []
    # Nodes of one structure share a module, which is looked at once.
    callables: dict[nn.Module, tuple[Callable[..., Any], bool]] = {}
    targets = {mb: {} if runs_forward(mb) else _targets(layout) for mb, layout in layouts.items()}
    for node in fused.module.graph.nodes:
        if node.op == "call_module":
            instance = node.meta[META]
            module = fused.module.get_submodule(node.target)
            if module not in callables:
                callables[module] = _watched(module), _launches(module)
            call, launches = callables[module]
            mb = instance.mb
            operations.append(_operation(node, call, launches, instance, layouts[mb], targets[mb]))
    return Program(tuple(operations))


def _targets(layout: Layout) -> dict[str, list[GraphInput]]:
    """What each value is the gradient of."""
    targets: dict[str, list[GraphInput]] = {}
    for value, target in layout.gradients:
        targets.setdefault(value, []).append(target)
    return targets


def _watched(module: nn.Module) -> Callable[..., Any]:
    """The forward of a node's module; launches are noted, waits end when a peer fails, and both can be timed."""
    graph = module.graph
    assert isinstance(graph, fx.Graph)
    if not any(is_collective(node.target) for node in graph.nodes):
        return compat.forward_of(module)
    copy = fx.Graph()
    copy.set_codegen(compat.BoxedCodeGen())
    copy.output(copy.graph_copy(graph, {}))
    for node in [node for node in copy.nodes if is_collective(node.target)]:
        if node.target is WAIT:
            node.target = wait
        else:
            node.args, node.target = (node.target, *node.args), launch
    return fx.GraphModule(module, copy).forward


def _launches(module: nn.Module) -> bool:
    """Whether a node's module launches a collective, on whatever group."""
    graph = module.graph
    assert isinstance(graph, fx.Graph)
    return any(is_collective(node.target) and node.target is not WAIT for node in graph.nodes)


def _operation(
    node: fx.Node,
    call: Callable[..., Any],
    launches: bool,
    instance: Instance,
    layout: Layout,
    targets: Mapping[str, Sequence[GraphInput]],
) -> Operation:
    written: dict[int, str] = {}
    for user in node.users:
        if user.target is operator.getitem:
            ref: ValueRef = user.meta[META]
            written[user.args[1]] = ref.value  # type: ignore[index]
    arguments: Any = node.args[0]
    read = [argument.meta[META].value for argument in arguments]
    dying = [value for value in instance.frees if value not in written.values()]
    return Operation(
        instance,
        call,
        instance.node.phase in (Phase.F, Phase.R),
        reads=tuple(layout.index[value] for value in read),
        writes=tuple(
            layout.index[written[i]] if i in written and written[i] not in instance.frees else None
            for i in range(len(instance.node.writes))
        ),
        last_reads=tuple(layout.index[value] for value in dying if value in read),
        last_waits=tuple(layout.index[value] for value in dying if value not in read),
        launches=launches,
        gradients=tuple(
            (i, target.kind, target.index) for i, value in sorted(written.items()) for target in targets.get(value, ())
        ),
    )
