"""Bytes and floating point operations of the ops of a joint graph, with balanced routing for unknown sizes.

A size that only the data decides is a symbol. Where a formula needs a number, the rows that an exchange brings are
taken to be as many as it sends: balanced routing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, register_flop_formula

import fxoverlap.ops  # noqa: F401  (defines the ops whose formulas stand here)
from fxoverlap import compat
from fxoverlap.ir import JointGraph, Role, Rows
from fxoverlap.passes.exchanges import group_name

# Formulas for ops that torch has none for. Multiply-adds count twice, as in torch's own.


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    # Two products; keys and values may have fewer heads than queries.
    batch, heads, length, dim = query
    return 2 * batch * heads * length * key[2] * (dim + value[3])


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    # Five products: the scores again, and the gradients of the scores, queries, keys and values.
    batch, heads, length, dim = query
    return 2 * batch * heads * length * key[2] * (3 * dim + 2 * value[3])


@register_flop_formula(torch.ops.fxoverlap.grouped_mm)
def _grouped_mm(x: Any, w: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * x[0] * w[1] * w[2]


@register_flop_formula(torch.ops.fxoverlap.grouped_mm_wgrad)
def _grouped_mm_wgrad(x: Any, g: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * x[0] * x[1] * g[1]


class Sizes:
    """Sizes of one joint graph."""

    def __init__(self, joint: JointGraph) -> None:
        self._hints = rows(joint)

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The shape, with balanced numbers for symbols."""
        return tuple(compat.size_hint(size, self._hints) for size in tensor.shape)

    def of(self, node: fx.Node) -> int:
        """Bytes of the tensor (or tensors) that a node makes; 0 for numbers."""
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else [value]
        return sum(self.bytes(each) for each in values if isinstance(each, torch.Tensor))

    def bytes(self, tensor: torch.Tensor) -> int:
        """Bytes of a tensor's elements."""
        return math.prod(self.shape(tensor)) * tensor.element_size()

    def flops(self, node: fx.Node) -> int:
        """Floating point operations by torch's flop formulas; 0 for ops without one (elementwise, views)."""
        target, given, value = _ran(node)
        formula = flop_registry.get(getattr(target, "overloadpacket", None))
        if formula is None:
            return 0
        args = fx.node.map_arg(given, self._on_meta)
        kwargs = fx.node.map_arg(node.kwargs, self._on_meta)
        try:
            return int(formula(*args, **kwargs, out_val=self._meta(value)))
        except AssertionError:
            # Symbols that are tied to one another by the data have numbers that do not fit together. For a matrix
            # product of sizes that do fit, this is the formula.
            return 2 * math.isqrt(math.prod(self._elements(each) for each in (*node.all_input_nodes[:2], node)))

    def _elements(self, node: fx.Node) -> int:
        value = node.meta.get("val")
        return math.prod(self.shape(value)) if isinstance(value, torch.Tensor) else 1

    def _on_meta(self, node: fx.Node) -> Any:
        return self._meta(node.meta.get("val"))

    def _meta(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty(self.shape(value), dtype=value.dtype, device="meta")
        if isinstance(value, (tuple, list)):
            return tuple(self._meta(each) for each in value)
        return compat.size_hint(value, self._hints) if isinstance(value, torch.SymInt) else value


def _ran(node: fx.Node) -> tuple[Any, tuple[Any, ...], Any]:
    """What a node runs, its arguments, its result; of a draw that is repeated, or that will be, the op inside."""
    value = node.meta.get("val")
    if node.target is compat.DRAW_AND_SNAPSHOT:
        return node.args[0], node.args[1:], value[1]  # type: ignore[index]
    if node.target is compat.DRAW_AGAIN:
        return node.args[1], node.args[2:], value
    return node.target, node.args, value


def rows(joint: JointGraph, factor: float = 1.0) -> Rows:
    """A number for each symbol: a dispatch brings as many rows as it sends, or `factor` times as many; a combine brings
    back as many as its dispatch has sent.

    On a group of n ranks the factor is n at most, with which all tokens of all ranks come to this one.
    """
    by_name = {node.name: node for node in joint.module.graph.nodes}
    hints: dict[Any, int] = {}
    for exchange in joint.exchanges:
        launch = by_name[exchange.launches[0]]
        rows_out, rows_in = launch.meta["val"].shape[0], launch.args[0].meta["val"].shape[0]
        sent, most = compat.size_hint(rows_in, hints), min(factor, ranks_of(launch))
        brought = round(sent * most if exchange.role is Role.DISPATCH else sent / most)
        symbols = compat.free_symbols(rows_out) - set(hints)
        for i, symbol in enumerate(sorted(symbols, key=str)):
            hints[symbol] = brought // len(symbols) + (i < brought % len(symbols))
    return hints


def ranks_of(launch: fx.Node) -> int:
    """Ranks of the group that an op launches on; 1 for a group that this process does not have."""
    name = group_name(launch)
    return compat.process_group(name).size() if name in compat.group_names() else 1
