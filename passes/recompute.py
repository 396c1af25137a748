"""Chunk pass `recompute`: in the backward, compute again what regions of the forward would have to keep.

In:  ChunkGraph after `wgrad`.
Out: the same graph with R nodes. What B and W read of a region is a copy that R nodes make; F keeps what the copies
     start from. An R node has the layer and slot of the F node that it repeats, exchanges included, and serves B and W.

Why behind `cut` and `wgrad`: a replay repeats nodes that are cut already, and only then it is known what they read.

What a region keeps: results that another region or the backward of another layer reads, and the ends of the graph;
numbers (split sizes are), token counts and the tensors that hold split sizes, what was copied to the host, results of
ops with effects other than draws and exchanges (other collectives, writes), and what `Recompute.keep` and the policies
of selective checkpoints (`OpTag.keep`) name. What it reads from outside is kept too. Everything else between those and
what B and W read is computed again: nothing else is. So a result that the rest of the layer reads too is not kept for
its backward, which reads the copy: output-discarding checkpointing, as Megatron-Core does it for norms, activation
functions and up-projections (arXiv 2603.07685).

Draws: F takes a snapshot of the generator in front of the draw, R draws with it and leaves the generator as it was.
Where only the shape of an input matters, as for a dropout's mask, R makes an empty tensor instead of that input.

Order: as `replays` says.

Raises UnsupportedError as `regions` does.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxoverlap import compat
from fxoverlap.config import OverlapConfig
from fxoverlap.ir import META, ChunkGraph, Exchange, JointGraph, Phase, Role, Slot
from fxoverlap.passes import op_facts
from fxoverlap.passes.cut import Assignment, assignment, make_nodes, remake_views
from fxoverlap.passes.op_facts import aten
from fxoverlap.passes.regions import Region, regions
from fxoverlap.passes.replays import depth_of, key_order, one_at_a_time, replayed_together

# Of their first argument these read sizes, strides, dtype and device only.
SHAPE_READERS = (
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like),
    *(aten.rand_like, aten.randn_like, aten.randint_like, torch.ops.fxoverlap.bernoulli_like),
    *(aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full),
    *(aten.uniform, aten.normal_functional, aten.exponential, aten.geometric, aten.log_normal, aten.cauchy),
)


def recompute(chunk: ChunkGraph, config: OverlapConfig) -> ChunkGraph:
    """Insert R nodes."""
    if chunk.joint is None:
        return chunk
    keys = assignment(chunk)
    found = regions(chunk, keys, config)
    if not found:
        return chunk
    keep = config.recompute.keep if config.recompute is not None else ()
    replay = _Replay(chunk.joint, keys, keep, found)
    for region in found:
        replay.add(region)
    joint = replace(chunk.joint, exchanges=(*chunk.joint.exchanges, *replay.exchanges()))
    ends = replayed_together(found, keys)
    # A region may read a view of a buffer that is made outside of it.
    remake_views(joint, keys)
    _drop_unread(joint, keys)
    nodes = make_nodes(joint, keys, key_order(chunk, keys), chunk.depths)
    prefetch = config.recompute is not None and config.recompute.prefetch
    return replace(chunk, joint=joint, nodes=nodes, replays=tuple(one_at_a_time(nodes, ends, prefetch)))


recompute.stage = "chunk"  # type: ignore[attr-defined]


class _Replay:
    """Copies ops of regions to the front of the backward, and lets the backward read the copies."""

    def __init__(self, joint: JointGraph, keys: Assignment, keep: Sequence[str], found: Sequence[Region]) -> None:
        self._joint, self._keys, self._graph = joint, keys, joint.module.graph
        self._kept = _kept(joint, keep)
        self._in_a_region = {op for region in found for op in region.ops}
        self._ends = {joint.loss, *joint.outputs, *(value for value, _ in (*joint.mutations, *joint.gradients))}
        # Not in front of the first op of the backward: views that it reads stand among those of the forward.
        self._front = max(op for op in op_facts.ops(self._graph) if keys[op][2] is Phase.F).next
        self._numbers = _numbers(self._graph)
        self._has_depths = any(layer.depth is not None for layer in joint.physical)
        self._copies: dict[fx.Node, fx.Node] = {}

    def add(self, region: Region) -> None:
        """Replay one region."""
        depths = {depth_of(self._keys[op]) for op in region.ops}
        saved = self._saved(region, depths)
        wanted: set[fx.Node] = set()
        readers: dict[fx.Node, list[fx.Node]] = {}
        replayable = set(region.ops) - saved
        for op in reversed(region.ops):
            if op in saved:
                continue
            readers[op] = [user for user in op.users if self._is_backward(user, depths)]
            if readers[op] or op in wanted:
                wanted.add(op)
                wanted.update(replayable.intersection(self._needed_inputs(op, replayable, wanted)))
        copies: dict[fx.Node, fx.Node] = {}
        for op in region.ops:
            if op in wanted:
                # What is not wanted is read for its shape.
                empty = {s: self._empty(s, op) for s in op.all_input_nodes if s in replayable and s not in wanted}
                copies[op] = self._copy(op, copies, empty)
                for user in readers[op]:
                    user.replace_input_with(op, copies[op])
        self._copies.update(copies)

    def exchanges(self) -> list[Exchange]:
        """The exchanges that are sent again."""
        by_name = {op.name: copy.name for op, copy in self._copies.items()}
        found = []
        for each in self._joint.exchanges:
            again = [i for i, launch in enumerate(each.launches) if launch in by_name]
            if again and each.phase is Phase.F:
                launches = tuple(by_name[each.launches[i]] for i in again)
                waits = tuple(by_name[each.waits[i]] for i in again)
                found.append(replace(each, phase=Phase.R, launches=launches, waits=waits))
        return found

    def _is_backward(self, user: fx.Node, depths: set[float]) -> bool:
        """Whether an op belongs to the backward of a region at these depths."""
        key = self._keys.get(user)
        return key is not None and key[2] in (Phase.B, Phase.W) and depth_of(key) in depths

    def _saved(self, region: Region, depths: set[float]) -> set[fx.Node]:
        """The ops whose results the region keeps; of several with one storage, the one that allocated it.

        What is kept of a launch is its wait: the result of the launch itself may still be on its way. Parts of a
        tensor that is there, kept or from outside, are not split off again.
        """
        members = set(region.ops)
        roots = {op_facts.storage_root(op) for op in region.ops if self._is_kept(op, members, depths)}

        def holds(op: fx.Node) -> bool:
            root = op_facts.storage_root(op)
            is_part = op is not root and op.target is operator.getitem
            if root not in roots:
                return is_part and root not in members
            return op_facts.is_wait(op) if _is_in_flight(root) else op is root or is_part

        return {op for op in region.ops if holds(op)}

    def _is_kept(self, op: fx.Node, members: set[fx.Node], depths: set[float]) -> bool:
        if op in self._kept or op.name in self._ends:
            return True
        if op_facts.is_wait(op) and op_facts.storage_root(op) not in members:
            return True  # what was launched outside cannot be launched again
        return any(self._keeps(user, members, depths) for user in op.users if user in self._keys)

    def _keeps(self, user: fx.Node, members: set[fx.Node], depths: set[float]) -> bool:
        """Whether a reader of a result of a region makes the region keep it."""
        if self._keys[user][2] is not Phase.F:
            return not self._is_backward(user, depths)
        if user in self._in_a_region:
            return user not in members  # that region's replay starts from it
        if self._has_depths and op_facts.tag(user).layer is None:
            return True  # the norm behind the trunk or a depth, whose backward must not wait for the replay
        # A view outside of regions is no reader itself.
        is_view = op_facts.view_base(user) is not None
        return is_view and any(self._keeps(each, members, depths) for each in user.users if each in self._keys)

    def _needed_inputs(self, op: fx.Node, replayable: set[fx.Node], wanted: set[fx.Node]) -> list[fx.Node]:
        """What a copy of an op needs; not what it reads the shape of only, if that can be made from numbers."""
        source = op.args[0] if op.args else None
        if source in replayable and self._reads_shape_only(op, wanted) and self._shape(source) is not None:
            return [each for each in op.all_input_nodes if each is not source]
        return op.all_input_nodes

    def _reads_shape_only(self, op: fx.Node, wanted: set[fx.Node]) -> bool:
        if op.target is aten.native_dropout.default:
            # Its second result, the mask.
            return all(user.args[1] == 1 for user in op.users if user in wanted)
        return op.target is aten.bernoulli.p or getattr(op.target, "overloadpacket", None) in SHAPE_READERS

    def _shape(self, source: object) -> tuple[list[Any], list[Any]] | None:
        """Sizes and strides of a value as arguments of an op; None if a number is not at hand."""
        assert isinstance(source, fx.Node)
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        sizes, strides = (
            [each if isinstance(each, int) else self._numbers.get(str(each)) for each in numbers]
            for numbers in (value.shape, value.stride())
        )
        return None if None in sizes or None in strides else (sizes, strides)

    def _copy(self, op: fx.Node, copies: Mapping[fx.Node, fx.Node], empty: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """The copy of an op, which reads copies, or empty tensors, where there are any."""
        target: Any = op.target
        arguments, kwargs = fx.node.map_arg(
            (op.args, op.kwargs), lambda source: empty.get(source) or copies.get(source, source)
        )
        if op_facts.is_random(op):
            arguments = (self._snapshot(op), target, *arguments)
            target = compat.DRAW_AGAIN
        return self._new(op, target, arguments, kwargs)

    def _empty(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """A tensor that is like the result of `source`, without its contents."""
        shape, value = self._shape(source), source.meta["val"]
        assert shape is not None, source
        options = {"dtype": value.dtype, "device": value.device}
        made = self._new(reader, aten.empty_strided.default, shape, options)
        made.meta["val"] = value
        return made

    def _new(self, op: fx.Node, target: Any, arguments: Any, kwargs: Any) -> fx.Node:
        """An op in front of the backward, in the R node of the layer and slot of `op`."""
        layer, slot, _ = self._keys[op]
        with self._graph.inserting_before(self._front):
            new = self._graph.call_function(target, arguments, kwargs)
        new.meta = {**op.meta, META: replace(op_facts.tag(op), phase=Phase.R)}
        self._keys[new] = (layer, slot, Phase.R)
        return new

    def _snapshot(self, op: fx.Node) -> fx.Node:
        """The state of the generator in front of a draw, which is taken from now on."""
        arguments: Any = (op.target, *op.args)
        device = _first_tensor(op.meta["val"]).device
        with self._graph.inserting_before(op):
            draw = self._graph.call_function(compat.DRAW_AND_SNAPSHOT, arguments, op.kwargs)
            state = self._graph.call_function(operator.getitem, (draw, 0))
        state.meta = {**op.meta, "val": torch.empty(compat.rng_state_bytes(device), dtype=torch.uint8)}
        draw.meta = {**op.meta, "val": (state.meta["val"], op.meta["val"])}
        op.target, op.args, op.kwargs = operator.getitem, (draw, 1), {}
        self._keys[draw] = self._keys[state] = self._keys[op]
        return state


def _is_in_flight(op: fx.Node) -> bool:
    """Whether the op is a launch, or one result of a launch that has several."""
    return op_facts.is_collective(op.args[0] if op.target is operator.getitem else op)  # type: ignore[arg-type]


def _first_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def _numbers(graph: fx.Graph) -> dict[str, fx.Node]:
    """The F ops that give numbers, by expression."""
    found: dict[str, fx.Node] = {}
    for op in op_facts.ops(graph):
        if isinstance(op.meta.get("val"), torch.SymInt) and op_facts.tag(op).phase is Phase.F:
            found.setdefault(str(op.meta["val"]), op)
    return found


def _kept(joint: JointGraph, keep: Sequence[str]) -> set[fx.Node]:
    """The F ops whose results are kept in any region."""
    by_name = {node.name: node for node in joint.module.graph.nodes}
    kept = {op for slot in keep for op in _results(joint, slot)}
    again: set[fx.Node] = set()
    for exchange in joint.exchanges:
        if exchange.phase is not Phase.F:
            continue
        launches, waits = ([by_name[name] for name in names] for names in (exchange.launches, exchange.waits))
        again.update(launches, waits)
        for launch in launches:
            fx.node.map_arg(launch.args[1:], kept.add)
        if exchange.role is Role.COUNTS:
            kept.update(waits)
    for op in op_facts.ops(joint.module.graph):
        has_effect = op_facts.has_effect(op) and not op_facts.is_random(op) and op not in again
        is_number = not isinstance(op.meta.get("val"), (torch.Tensor, tuple, list))
        if has_effect or is_number or _is_host_read(op) or "unbacked_bindings" in op.meta or op_facts.tag(op).keep:
            kept.add(op)
            kept.update(part for part in op.users if part.target is operator.getitem)
    return kept


def _results(joint: JointGraph, slot: str) -> set[fx.Node]:
    """The F ops whose results `Recompute.keep` names by a slot: what an exchange brought, or what a combine sends."""
    role = Role.COMBINE if slot == Slot.EXPERTS.value else Role(slot)
    exchanges = [each for each in joint.exchanges if each.phase is Phase.F and each.role is role]
    by_name = {node.name: node for node in joint.module.graph.nodes}
    if slot == Slot.EXPERTS.value:
        launches = [by_name[name] for each in exchanges for name in each.launches]
        return {source for launch in launches for source in launch.all_input_nodes[:1]}
    return {by_name[name] for each in exchanges for name in each.waits}


def idle_keeps(chunk: ChunkGraph, config: OverlapConfig) -> list[str]:
    """The slots of `Recompute.keep` by which no region keeps anything for the backward. `chunk` is that of the pass."""
    if chunk.joint is None or config.recompute is None:
        return []
    by_name = {node.name: node for node in chunk.joint.module.graph.nodes}
    saved = {op_facts.storage_root(by_name[v]) for node in chunk.nodes if node.phase is not Phase.F for v in node.reads}
    kept = {op for region in regions(chunk, assignment(chunk), config) for op in region.ops}
    return [
        slot
        for slot in config.recompute.keep
        if saved.isdisjoint(op_facts.storage_root(op) for op in _results(chunk.joint, slot) & kept)
    ]


def _is_host_read(op: fx.Node) -> bool:
    """Whether the host waits for a device in this op: it copies to the CPU."""
    values = [each.meta.get("val") for each in (op, *op.all_input_nodes)]
    kinds = [each.device.type if isinstance(each, torch.Tensor) else "cpu" for each in values]
    return kinds[0] == "cpu" and set(kinds) != {"cpu"}


def _drop_unread(joint: JointGraph, keys: Assignment) -> None:
    """Drop F ops that only the backward had read."""
    graph = joint.module.graph
    for op in reversed(list(op_facts.ops(graph))):
        if keys[op][2] is Phase.F and not op.users and not op_facts.has_effect(op):
            graph.erase_node(op)
            del keys[op]
