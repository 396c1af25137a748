"""What passes and `verify` need to know of one op of an ATen graph, read from its schema.

Nothing here knows of schedule nodes or plans.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxoverlap import compat
from fxoverlap.ir import META, OpTag
from fxoverlap.ops import collectives
from fxoverlap.ops.collectives import LAUNCHES, WAIT

aten = torch.ops.aten
# Views whose schema does not say so.
HIDDEN_VIEWS = (aten._unsafe_view.default, aten._reshape_alias.default, WAIT)
# Views of every element of what they are made of.
WHOLE_VIEWS = (
    *HIDDEN_VIEWS,
    aten.view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)


def tag(node: fx.Node) -> OpTag:
    """The tag that capture and the pass `layers` left on an op of a joint graph."""
    found = node.meta[META]
    assert isinstance(found, OpTag), node
    return found


def is_op(node: fx.Node) -> bool:
    """Whether the node computes something (it is no placeholder, constant or output)."""
    return node.op == "call_function"


def is_launch(node: fx.Node) -> bool:
    """Whether the node launches an all-to-all, of whatever group."""
    return node.target in LAUNCHES


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective."""
    return node.target is WAIT


def is_collective(node: fx.Node) -> bool:
    """Whether the node launches or waits for a collective of any kind."""
    return collectives.is_collective(node.target)


def schema(node: fx.Node) -> torch.FunctionSchema | None:
    """The operator schema, None for Python functions such as `operator.getitem`."""
    return getattr(node.target, "_schema", None) if is_op(node) else None


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from a random number generator. Attention does only where it drops something."""
    target: Any = node.target
    if target is compat.DRAW_AND_SNAPSHOT:
        return True
    if not (compat.is_overload(target) and torch.Tag.nondeterministic_seeded in target.tags):
        return False
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            return bool(given != 0)
    return True


def has_effect(node: fx.Node) -> bool:
    """Whether the op must stay although nothing reads it: collectives, draws, writes, assertions."""
    found = schema(node)
    if found is None:
        return is_random(node) or writes_input(node)
    return is_collective(node) or is_random(node) or found.is_mutable or not found.returns


def writes_input(node: fx.Node) -> bool:
    """Whether a custom op writes to an input of the graph, such as a buffer, or to what another such op has written."""

    def is_input(base: fx.Node) -> bool:
        root = storage_root(base)
        if root.target is operator.getitem:
            return writes_input(root.args[0])  # type: ignore[arg-type]
        return not is_op(root)

    return any(map(is_input, compat.written_bases(node)))


def keeps_order(node: fx.Node) -> bool:
    """Whether the op must run in trace order with others of its kind: draws, writes, collectives, unknown effects.

    Waits and torch's own assertions need no order.
    """
    found = schema(node)
    if found is None or is_wait(node):
        return is_random(node) or writes_input(node)
    target: Any = node.target
    unknown = not found.returns and target.namespace != "aten"
    return is_collective(node) or is_random(node) or found.is_mutable or unknown


def is_size(node: fx.Node) -> bool:
    """Whether the op computes a number from sizes or numbers only; no tensor data is read."""
    if not is_op(node) or isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if node.target in (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default):
        return True
    inputs = node.all_input_nodes
    return bool(inputs) and all(not isinstance(i.meta.get("val"), (torch.Tensor, tuple, list)) for i in inputs)


def view_base(node: fx.Node) -> fx.Node | None:
    """The node whose storage this op's result shares, None if the op allocates its result."""
    if not is_op(node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target in HIDDEN_VIEWS:
        return node.args[0]
    if node.target is operator.getitem:
        producer = node.args[0]
        return view_base(producer) if is_op(producer) else None
    found = schema(node)
    if found is None or not found.arguments:
        return None
    alias = found.arguments[0].alias_info
    return node.args[0] if alias is not None and not alias.is_write else None


def is_free_view(node: fx.Node) -> bool:
    """Whether the op is a view that costs nothing to make again (waits are not: they synchronise)."""
    return (
        not is_wait(node)
        and node.target is not operator.getitem
        and view_base(node) is not None
        and (isinstance(node.meta.get("val"), torch.Tensor))
    )


def storage_root(node: fx.Node) -> fx.Node:
    """The op or input that allocated the storage of this node's result, waits and views looked through."""
    base = view_base(node)
    return node if base is None else storage_root(base)


def is_whole(node: fx.Node) -> bool:
    """Whether this node's result has all elements of its storage, each once: it is no slice and no expanded tensor."""
    base = view_base(node)
    return base is None or (node.target in WHOLE_VIEWS and is_whole(base))


def ancestors(starts: list[fx.Node], within: set[fx.Node]) -> set[fx.Node]:
    """The nodes of `within` from which a start can be reached, starts included if they are in `within`."""
    found, stack = set(), list(starts)
    while stack:
        node = stack.pop()
        if node in within and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def descendants(starts: set[fx.Node], within: set[fx.Node]) -> set[fx.Node]:
    """The nodes of `within` that can be reached from a start, starts included if they are in `within`."""
    found, stack = set(), list(starts)
    while stack:
        node = stack.pop()
        if node in within and node not in found:
            found.add(node)
            stack.extend(node.users)
    return found


def with_results(op: fx.Node) -> list[fx.Node]:
    """The op and, where it has several results, what takes them apart."""
    return [op, *(user for user in op.users if user.target is operator.getitem)]


def ops(graph: fx.Graph) -> Iterator[fx.Node]:
    """The ops of a graph, in its order."""
    return (node for node in graph.nodes if is_op(node))


def is_heavy(node: fx.Node) -> bool:
    """Whether torch has a flop formula for the op: matrix products, convolutions, attention."""
    return getattr(node.target, "overloadpacket", None) in flop_registry
