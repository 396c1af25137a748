"""FusedGraph -> Program: the fused graph as a list of operations on microbatch states.

Each operation calls one boxed module on values of one microbatch, stores its results, delivers the gradients that
became final, and drops what dies with it. Event markers become nothing on a CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxoverlap.ir import META, FusedGraph, GraphInput, InputKind, Instance, ValueRef
from fxoverlap.runtime.state import Layout


@dataclass(frozen=True, slots=True)
class Operation:
    """One node instance, ready to run.

    Attributes:
        instance: what it is.
        call: takes the list of arguments and empties it; returns a tuple.
        of_forward: whether it works on the state of the microbatch "F" (else "B").
        reads: positions in the state's values.
        writes: likewise, one a result; None for a result that nothing reads later.
        last_reads: positions whose value dies inside the call, with its last use.
        last_waits: positions whose value dies behind the call: inputs of launches that it waits for.
        gradients: (position among the results, kind, index) of the parameters and leaves whose gradient is final now.
    """

    instance: Instance
    call: Callable[[list[Any]], tuple[Any, ...]]
    of_forward: bool
    reads: tuple[int, ...]
    writes: tuple[int | None, ...]
    last_reads: tuple[int, ...]
    last_waits: tuple[int, ...]
    gradients: tuple[tuple[int, InputKind, int], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """The operations of a fused graph in issue order."""

    operations: tuple[Operation, ...]


def lower(fused: FusedGraph, forward: Layout | None, backward: Layout | None) -> Program:
    """Lower a fused graph for states with these layouts."""
    layouts = {"F": forward, "B": backward}
    operations = []
    for node in fused.module.graph.nodes:
        if node.op == "call_module":
            instance = node.meta[META]
            layout = layouts[instance.mb]
            assert layout is not None
            operations.append(_operation(node, fused.module.get_submodule(node.target), instance, layout))
    return Program(tuple(operations))


def _operation(node: fx.Node, module: nn.Module, instance: Instance, layout: Layout) -> Operation:
    written: dict[int, str] = {}
    for user in node.users:
        if user.target is operator.getitem:
            ref: ValueRef = user.meta[META]
            written[user.args[1]] = ref.value  # type: ignore[index]
    targets: dict[str, list[GraphInput]] = {}
    for value, target in layout.gradients if instance.mb == "B" else ():
        targets.setdefault(value, []).append(target)
    arguments: Any = node.args[0]
    read = [argument.meta[META].value for argument in arguments]
    dying = [value for value in instance.frees if value not in written.values()]
    return Operation(
        instance,
        module.forward,
        instance.mb == "F",
        reads=tuple(layout.index[value] for value in read),
        writes=tuple(
            layout.index[written[i]] if i in written and written[i] not in instance.frees else None
            for i in range(len(instance.node.writes))
        ),
        last_reads=tuple(layout.index[value] for value in dying if value in read),
        last_waits=tuple(layout.index[value] for value in dying if value not in read),
        gradients=tuple(
            (i, target.kind, target.index) for i, value in sorted(written.items()) for target in targets.get(value, ())
        ),
    )
