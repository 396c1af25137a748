"""Chunk pass `mtp`: give each depth of multi-token prediction its head, and gradients that meet their place.

In:  ChunkGraph after `cut`, where all that follows the layers of the trunk and of the depths is in `post_process`.
Out: the same graph; what is of the head of one depth (its norm, head and loss, and their backward) is in the depth's
     node `mtp_post`, and gradients are merged where they are read. A chunk without depths is not changed.

A forward runs the main head, which stays in `post_process`, behind the trunk, and each depth's head behind its layers;
a backward runs the main head first, then that of the last depth. An op is of the head that it needs values of: of
several heads, the last to run. So the sum of the losses is in the `mtp_post` of the last depth, and the sum of the
gradients of a weight that all heads share in that of the first. Nothing is added in another order than in the trace,
which is that of eager's autograd.

The gradient of what a depth begins from, the hidden state that the trunk or the depth before has made, is whole when
the backwards of the depth and of the head beside it are done. The ops that make it so go to the node that reads the
whole: so the backward of a depth does not wait for the head of what it begins from.

Draws and other effects behind all layers run last, in the order of the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from fxoverlap.config import OverlapConfig
from fxoverlap.ir import ChunkGraph, Phase, Slot
from fxoverlap.passes import op_facts
from fxoverlap.passes.cut import Assignment, Key, assignment, join_results, remake_views, with_nodes
from fxoverlap.passes.place import of_batch

MAIN = -1
"""The number of the main head among those of the depths."""


def mtp(chunk: ChunkGraph, config: OverlapConfig) -> ChunkGraph:
    """Part the heads of depths from `post_process`, and place the merges of gradients."""
    del config
    joint = chunk.joint
    if joint is None or not chunk.depths:
        return chunk
    keys = assignment(chunk)
    order = _order(chunk)
    _merge_where_read(chunk, keys, order)
    for phase, found in _Heads(chunk, keys).by_phase().items():
        keys.update({op: _head_key(chunk, head, phase) for op, head in found.items()})
    join_results(op_facts.ops(joint.module.graph), keys)
    remake_views(joint, keys)
    return with_nodes(chunk, keys, order)


mtp.stage = "chunk"  # type: ignore[attr-defined]


class _Heads:
    """The number of the head of each op of `post_process`."""

    def __init__(self, chunk: ChunkGraph, keys: Assignment) -> None:
        assert chunk.joint is not None
        ops = list(op_facts.ops(chunk.joint.module.graph))
        self._keys = keys
        self._depth: dict[int | None, int] = {
            layer: depth for depth, ends in enumerate(chunk.depths) for layer in range(*ends)
        }
        # Of any head's: casts of weights, targets, masks.
        self._common = of_batch([op for op in ops if keys[op][2] is Phase.F])
        self._forward, self._backward = (
            [op for op in ops if keys[op] == (None, Slot.POST_PROCESS, phase)] for phase in (Phase.F, Phase.B)
        )
        self._saved: Mapping[fx.Node, int] = {}  # of F ops
        self._count = len(chunk.depths)

    def by_phase(self) -> dict[Phase, dict[fx.Node, int]]:
        """The heads of F ops and of B ops."""
        there, back = _ranks([MAIN, *range(self._count)]), _ranks([MAIN, *reversed(range(self._count))])
        self._saved = self._by_inputs(self._forward, there, of_effects=self._count - 1)
        needed = self._by_inputs(self._backward, back, of_effects=MAIN)
        return {
            Phase.F: self._by_readers(self._forward, there, self._saved),
            Phase.B: self._by_readers(self._backward, back, needed),
        }

    def _by_inputs(self, ops: Sequence[fx.Node], order: Mapping[int, int], of_effects: int) -> dict[fx.Node, int]:
        """The last head, in the order in which they run, of those that an op needs; none for what any head may have."""
        head: dict[fx.Node, int] = {}
        for op in ops:
            needed = self._heads_of_inputs(op, head)
            if op_facts.keeps_order(op):
                head[op] = of_effects
            elif needed:
                head[op] = max(needed, key=order.__getitem__)
        return head

    def _by_readers(
        self, ops: Sequence[fx.Node], order: Mapping[int, int], by_inputs: Mapping[fx.Node, int]
    ) -> dict[fx.Node, int]:
        """The heads by inputs, but none behind its readers; what any may have is of the first that reads it."""
        head: dict[fx.Node, int] = {}
        for op in reversed(ops):
            users = [user for user in op.users if user in self._keys and self._keys[user][2] is self._keys[op][2]]
            if not users and op not in by_inputs:
                users = list(op.users)  # of the backward, which runs behind all heads of the forward
            readers = [each for user in users if (each := self._head_of_reader(user, head)) is not None]
            own = [by_inputs[op]] if op in by_inputs else []
            head[op] = min([*own, *readers], key=order.__getitem__, default=MAIN)
        return head

    def _heads_of_inputs(self, op: fx.Node, head: dict[fx.Node, int]) -> set[int]:
        """The heads whose values an op reads."""
        found: set[int] = set()
        for source in op.all_input_nodes:
            known = head.get(source, self._saved.get(source))
            if known is not None:
                found.add(known)
            elif source in self._keys and source not in self._common and self._keys[source][0] is not None:
                found.add(self._depth.get(self._keys[source][0], MAIN))
        return found

    def _head_of_reader(self, user: fx.Node, head: Mapping[fx.Node, int]) -> int | None:
        """The head that the reader is of, or in the backward the one that its layers follow; None if that is all."""
        if user in head:
            return head[user]
        return self._depth.get(self._keys[user][0]) if user in self._keys else None


def _ranks(heads: Iterable[int]) -> dict[int, int]:
    return {head: i for i, head in enumerate(heads)}


def _head_key(chunk: ChunkGraph, head: int, phase: Phase) -> Key:
    return (None, Slot.POST_PROCESS, phase) if head == MAIN else (chunk.depths[head][1] - 1, Slot.MTP_POST, phase)


def _order(chunk: ChunkGraph) -> list[Key]:
    """The nodes with those of the heads: in F behind the layers, in B in front of them."""
    main = _head_key(chunk, MAIN, Phase.F)
    order = [key for node in chunk.nodes if (key := (node.layer, node.slot, node.phase)) != main]
    last = {layer: i for i, (layer, _, phase) in enumerate(order) if phase is Phase.F}
    first = {layer: i for i, (layer, _, phase) in reversed(list(enumerate(order))) if phase is Phase.B}
    in_front: dict[int, list[Key]] = {}
    for head in (MAIN, *range(len(chunk.depths))):
        layer = chunk.depths[head][1] - 1 if head != MAIN else chunk.depths[0][0] - 1
        in_front.setdefault(last.get(layer, -1) + 1, []).append(_head_key(chunk, head, Phase.F))
        if head != MAIN:
            in_front.setdefault(first.get(layer, len(order)), []).append(_head_key(chunk, head, Phase.B))
    found: list[Key] = []
    for i, key in enumerate(order):
        found += [*in_front.get(i, ()), key]
    return found + in_front.get(len(order), [])


def _merge_where_read(chunk: ChunkGraph, keys: Assignment, order: Sequence[Key]) -> None:
    """Move what a depth's backward makes only for what is in front of the depth to the first node that reads it."""
    assert chunk.joint is not None
    start_of: dict[int | None, int] = {layer: start for start, end in chunk.depths for layer in range(start, end)}
    rank = {key: i for i, key in enumerate(order)}
    ops = [op for op in op_facts.ops(chunk.joint.module.graph) if _is_movable(op, keys[op], start_of)]
    ends: set[fx.Node] = set()  # what is for gradients of parameters only
    for op in reversed(ops):
        group = op_facts.with_results(op)
        readers = {user for each in group for user in each.users if user in keys} - ends - {*group}
        start = start_of[keys[op][0]]
        if not readers:
            ends.update(group)
        elif all(layer is None or layer < start for layer in (keys[user][0] for user in readers)):
            keys.update(dict.fromkeys(group, min((keys[user] for user in readers), key=rank.__getitem__)))
    for op in ops:
        if op in ends:
            made = [keys[op], *(keys[source] for source in op.all_input_nodes if source in keys)]
            last = max((key for key in made if key[2] is Phase.B), key=rank.__getitem__)
            keys.update(dict.fromkeys(op_facts.with_results(op), last))


def _is_movable(op: fx.Node, key: Key, start_of: Mapping[int | None, int]) -> bool:
    """Whether an op of a depth's backward is of none of its layers."""
    layer, slot, phase = key
    has_a_place = op_facts.tag(op).layer is not None or op_facts.has_effect(op) or op.target is operator.getitem
    return layer in start_of and phase is Phase.B and slot is not Slot.MTP_POST and not has_a_place
