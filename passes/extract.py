"""Chunk pass `extract`: make a module of every schedule node; structurally identical nodes share one.

In:  ChunkGraph.
Out: the same graph with `modules` filled in.

A node's module takes what `ScheduleNode.reads` names, in that order, as one list that it empties (boxed), and returns
what `ScheduleNode.writes` names as a tuple. Parameters, constants and symbols are arguments, so that layers of one
kind are one module. Two nodes are structurally identical if their ops, the wiring, the literal arguments, and the
dtypes, strides and sizes of all values are equal, symbols being numbered by first appearance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fxoverlap import compat
from fxoverlap.config import OverlapConfig
from fxoverlap.ir import ChunkGraph, ScheduleNode
from fxoverlap.passes.op_facts import aten

# Results of custom ops may have another layout than their fake implementation says. Eager then copies where the trace
# has a view; a reshape does as eager does.
RUNS_AS: dict[Any, Any] = {aten.view.default: aten.reshape.default}


def extract(chunk: ChunkGraph, config: OverlapConfig) -> ChunkGraph:
    """Fill in `ChunkGraph.modules`."""
    del config
    if chunk.joint is None:
        return chunk
    by_name = {node.name: node for node in chunk.joint.module.graph.nodes}
    pool: dict[str, fx.GraphModule] = {}
    modules = {}
    for node in chunk.nodes:
        key = structure(node, by_name)
        if key not in pool:
            pool[key] = _module(node, by_name)
        modules[node.name] = pool[key]
    return replace(chunk, modules=modules)


extract.stage = "chunk"  # type: ignore[attr-defined]


def structure(node: ScheduleNode, by_name: dict[str, fx.Node]) -> str:
    """A text that is equal for two nodes if and only if they can share a module."""
    number = {value: f"%{i}" for i, value in enumerate(node.reads)}
    symbols: dict[str, str] = {}
    lines = [f"{number[value]}: {_describe(by_name[value].meta.get('val'), symbols)}" for value in node.reads]
    for op in node.ops:
        fx_node = by_name[op]
        number[op] = f"%{len(number)}"
        args = fx.node.map_arg((fx_node.args, fx_node.kwargs), lambda n: _Name(number[n.name]))
        value = _describe(fx_node.meta.get("val"), symbols)
        lines.append(f"{number[op]} = {fx_node.target}{args}: {value}")
    lines.append(" ".join(number[value] for value in node.writes))
    return "\n".join(lines)


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _describe(value: Any, symbols: dict[str, str]) -> str:
    """Kind, dtype, sizes and strides of a value."""
    if isinstance(value, torch.Tensor):
        sizes = [_size(each, symbols) for each in (*value.shape, *value.stride())]
        return f"{value.dtype}{sizes}{value.device.type}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_describe(each, symbols) for each in value)})"
    return _size(value, symbols)


def _size(size: Any, symbols: dict[str, str]) -> str:
    text = str(size)
    # Longest first, so that u1 is not found in u10; then by name, because the order of a set differs between ranks.
    for symbol in sorted(map(str, compat.free_symbols(size)), key=lambda name: (-len(name), name)):
        text = text.replace(symbol, symbols.setdefault(symbol, f"s{len(symbols)}"))
    return text


def _module(node: ScheduleNode, by_name: dict[str, fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    graph.set_codegen(compat.BoxedCodeGen())
    env: dict[str, fx.Node] = {}
    for value in node.reads:
        env[value] = graph.placeholder(value)
        env[value].meta = {"val": by_name[value].meta.get("val")}
    for op in node.ops:
        env[op] = graph.node_copy(by_name[op], lambda source: env[source.name])
        env[op].target = RUNS_AS.get(env[op].target, env[op].target)
    graph.output(tuple(env[value] for value in node.writes))
    return compat.lazy_module(nn.Module(), graph)
