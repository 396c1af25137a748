"""Chunk pass `memory`: what each op of each schedule node allocates, and behind which op a node lets go of it.

In:  ChunkGraph.
Out: the same graph with `memory` filled in.

A node runs as generated code that drops every variable behind the last op that reads it, arguments included. So a
storage is held from the op that allocates it to the last op that reads a variable on it: its result, a view of that, or
the tuple that it came in. What an op allocates and frees inside does not count.

The walk over ops stands here, beside what passes know of ops. Schedules read its result, which is plain data.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxoverlap import compat
from fxoverlap.config import OverlapConfig
from fxoverlap.flow import read_late
from fxoverlap.ir import ChunkGraph, Footprint, Gradient, InputKind, JointGraph, Made, Memory, ScheduleNode
from fxoverlap.passes import op_facts
from fxoverlap.passes.sizes import rows

_ALL = float("inf")


def memory(chunk: ChunkGraph, config: OverlapConfig) -> ChunkGraph:
    """Fill in `ChunkGraph.memory`."""
    joint = chunk.joint
    if joint is None:
        return chunk
    nodes = list(joint.module.graph.nodes)
    by_name = {node.name: node for node in nodes}
    begin = tuple(_of_the_state(chunk, joint))
    sizes = {name: size for node in nodes for name, size in _allocated(node)}
    sizes |= {each.value: 0 for each in joint.inputs}
    sizes |= {value: _bytes(by_name[value].meta["val"]) for value in begin}
    found = Memory(
        footprints={node.name: footprint(node, by_name) for node in chunk.nodes},
        storages={node.name: storage(node) for node in nodes if _is_tensor(node)},
        sizes=sizes,
        begin=begin,
        gradients=tuple(_gradients(joint, by_name)),
        numbers={node.name: symbol for node in nodes if (symbol := compat.symbol(_val(node))) is not None},
        rows={"balanced": rows(joint), "imbalanced": rows(joint, config.imbalance), "worst": rows(joint, _ALL)},
    )
    return replace(chunk, memory=found)


memory.stage = "chunk"  # type: ignore[attr-defined]


def footprint(node: ScheduleNode, by_name: Mapping[str, fx.Node]) -> Footprint:
    """Walk the ops of one node."""
    ops = [by_name[op] for op in node.ops]
    last_use = {source: i for i, op in enumerate(ops) for source in op.all_input_nodes}
    end: dict[str, int | None] = {}  # by storage
    variables = [by_name[value] for value in node.reads]
    positions = {op: i for i, op in enumerate(ops)}
    handed_on = {by_name[value] for value in node.writes}
    for variable in (*ops, *variables):
        until = None if variable in handed_on else last_use.get(variable, positions.get(variable, 0))
        for name in _held(variable):
            end[name] = _later(end.get(name, -1), until)
    made = tuple(Made(name, i, end[name]) for i, op in enumerate(ops) for name, _ in _allocated(op))
    return Footprint(made, tuple(end[storage(each)] if _is_tensor(each) else 0 for each in variables))


def storage(node: fx.Node) -> str:
    """Name of the storage in which a tensor stands: that of the op or input that allocated it.

    Of an op that gives several tensors, each is `op[i]`.
    """
    return _path(op_facts.storage_root(node))


def _path(node: fx.Node) -> str:
    """The op, with where in its result this one is."""
    return f"{_path(node.args[0])}[{node.args[1]}]" if node.target is operator.getitem else node.name  # type: ignore[arg-type]


def _held(variable: fx.Node) -> Iterable[str]:
    """The storages that a variable of generated code holds."""
    base = op_facts.view_base(variable)
    if base is not None:
        return [storage(base)]
    return [name for name, _ in _parts(_path(variable), _val(variable))]


def _allocated(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """(name, bytes) of the storages that an op allocates."""
    if op_facts.is_op(node) and node.target is not operator.getitem and op_facts.view_base(node) is None:
        yield from _parts(node.name, _val(node))


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(name, bytes) of each tensor in a result."""
    if isinstance(value, torch.Tensor):
        yield name, _bytes(value)
    elif isinstance(value, (tuple, list)):
        for i, each in enumerate(value):
            yield from _parts(f"{name}[{i}]", each)


def _bytes(value: torch.Tensor) -> Any:
    return compat.expression(value.numel() * value.element_size())


def _val(node: fx.Node) -> Any:
    return node.meta.get("val")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(_val(node), torch.Tensor)


def _later(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)


def _of_the_state(chunk: ChunkGraph, joint: JointGraph) -> list[str]:
    """The inputs of which each microbatch has its own: buffers that it writes and reads later, and the tangent."""
    late = read_late(chunk)
    copied = [target for _, target in joint.mutations if target in late]
    return [*copied, *(each.value for each in joint.inputs if each.kind is InputKind.TANGENT)]


def _gradients(joint: JointGraph, by_name: Mapping[str, fx.Node]) -> Iterator[Gradient]:
    inputs = {each.value: each for each in joint.inputs}
    for value, target in joint.gradients:
        gradient, leaf = _val(by_name[value]), _val(by_name[target])
        root = op_facts.storage_root(by_name[value])
        is_all = op_facts.is_op(root) and _bytes(_val(root)) == _bytes(gradient)
        yield Gradient(value, inputs[target], _bytes(leaf), is_all and gradient.stride() == leaf.stride())
