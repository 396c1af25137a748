"""Chunk pass `bytes`: what each schedule node costs at balanced routing.

In:  ChunkGraph.
Out: the same graph with `costs` filled in: floating point operations, bytes read and written, bytes sent to other
     ranks, and bytes that come to life and die with the node when one microbatch runs alone.

Aliases count once: a value is accounted to the op or input that allocated its storage.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fxoverlap.config import OverlapConfig
from fxoverlap.ir import ChunkGraph, Lane, NodeCost, ScheduleNode
from fxoverlap.passes import op_facts
from fxoverlap.passes.sizes import Sizes, ranks_of


def bytes(chunk: ChunkGraph, config: OverlapConfig) -> ChunkGraph:
    """Fill in `ChunkGraph.costs`."""
    del config
    if chunk.joint is None:
        return chunk
    sizes = Sizes(chunk.joint)
    by_name = {node.name: node for node in chunk.joint.module.graph.nodes}
    last_use: dict[fx.Node, str] = {}
    for node in chunk.nodes:
        for value in (*node.reads, *node.writes):
            last_use[op_facts.storage_root(by_name[value])] = node.name
    dying: dict[str, list[fx.Node]] = {}
    for root, name in last_use.items():
        if op_facts.is_op(root):
            dying.setdefault(name, []).append(root)
    costs = {}
    seen: set[fx.Node] = set()
    for node in chunk.nodes:
        made = {op_facts.storage_root(by_name[value]) for value in node.writes} - seen
        seen |= made
        costs[node.name] = NodeCost(
            flops=sum(sizes.flops(by_name[op]) for op in node.ops),
            bytes_moved=sum(_moved(by_name[op], sizes) for op in node.ops),
            bytes_sent=_sent(node, by_name, sizes),
            allocated=sum(sizes.of(root) for root in made),
            freed=sum(sizes.of(root) for root in dying.get(node.name, ())),
            ranks=ranks_of(by_name[node.ops[0]]) if node.lane is Lane.COMM else 1,
        )
    return replace(chunk, costs=costs)


bytes.stage = "chunk"  # type: ignore[attr-defined]


def _moved(node: fx.Node, sizes: Sizes) -> int:
    """Bytes that an op reads and writes; 0 for views."""
    if op_facts.view_base(node) is not None or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
        return 0
    return sizes.of(node) + sum(sizes.of(source) for source in node.all_input_nodes)


def _sent(node: ScheduleNode, by_name: dict[str, fx.Node], sizes: Sizes) -> int:
    """Bytes that the launches of a comm node hand to the group, the rank's own part included."""
    if node.lane is not Lane.COMM:
        return 0
    launched = [by_name[op].args[0] for op in node.ops]
    return sum(sizes.of(source) for source in launched if isinstance(source, fx.Node))
