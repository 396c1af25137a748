"""Which ops of a chunk are computed again in the backward: a fact of the config and the model that `recompute` uses.

In:  the keys of a chunk's ops (layer, slot, phase), their tags, and the config.
Out: the regions, none of which shares an op with another.

With "uniform" every `num_layers` logical layers of the trunk are a region, a *segment*; the last may be shorter. With
"block" each of the first `num_layers` is one. With both, the layers of each depth of multi-token prediction, without
its head, are a segment. With "selective" each run of a module that a glob of `modules` matches is one; a glob matches
as those of the layers do. Each call of `torch.utils.checkpoint` in the model is one too (`OpTag.region`), whatever the
config. A region takes in what others view and split off of its results where it makes them, but no view that nothing in
it reads: `cut` makes those where they are read.

Raises UnsupportedError: there are no logical layers; a glob matches nothing that runs; regions overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from fxoverlap.config import OverlapConfig, Recompute
from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import ChunkGraph, JointGraph, Phase, Slot
from fxoverlap.passes import op_facts
from fxoverlap.passes.cut import Assignment
from fxoverlap.passes.layers import matches


@dataclass(frozen=True, slots=True)
class Region:
    """Ops that are computed again together.

    Attributes:
        name: what its owner calls it, for messages.
        ops: its F ops in graph order.
    """

    name: str
    ops: tuple[fx.Node, ...]


def regions(chunk: ChunkGraph, keys: Assignment, config: OverlapConfig) -> list[Region]:
    """The regions of a chunk in forward order."""
    joint = chunk.joint
    assert joint is not None
    ops = [op for op in op_facts.ops(joint.module.graph) if keys[op][2] is Phase.F]
    asked = config.recompute
    found: list[Region] = []
    if asked is not None:
        found = _modules(ops, asked.modules) if asked.method == "selective" else _segments(chunk, ops, keys, asked)
    calls = _checkpoints(ops)
    _refuse_shared_ops(found, calls)
    rank = {op: i for i, op in enumerate(ops)}
    taken = {op for region in (*found, *calls) for op in region.ops}
    computing = []
    for region in (*found, *calls):
        parts = _views_of(region.ops, keys, taken)
        own = _without_views_of_results(sorted((*region.ops, *parts), key=rank.__getitem__))
        if own:
            computing.append(Region(region.name, own))
    return sorted(computing, key=lambda region: rank[region.ops[0]])


def _views_of(ops: Sequence[fx.Node], keys: Assignment, taken: set[fx.Node]) -> list[fx.Node]:
    """The views of a region's results, parts of them too, that the same schedule nodes make outside of all regions.

    What is split off a result outside of the region would keep all of it.
    """
    found: list[fx.Node] = []
    bases = list(ops)
    while bases:
        base = bases.pop()
        for user in base.users:
            is_view = op_facts.view_base(user) is not None and user.args[0] is base and not op_facts.is_wait(user)
            if is_view and keys[user] == keys[base] and user not in taken:
                found.append(user)
                bases.append(user)
    return found


def _without_views_of_results(ops: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """The ops of a region that are no views for its readers: `cut` makes those where they are read, in other layers."""
    own = set(ops)
    for op in reversed(ops):
        if op_facts.is_free_view(op) and own.isdisjoint(op.users):
            own.remove(op)
    return tuple(op for op in ops if op in own)


def _checkpoints(ops: Iterable[fx.Node]) -> list[Region]:
    members: dict[str, list[fx.Node]] = {}
    for op in ops:
        name = op_facts.tag(op).region
        if name is not None:
            members.setdefault(name, []).append(op)
    return [Region(f"the torch.utils.checkpoint {name}", tuple(region)) for name, region in members.items()]


def _refuse_shared_ops(found: Iterable[Region], calls: Iterable[Region]) -> None:
    owner = {op: region.name for region in found for op in region.ops}
    for call in calls:
        name = next((owner[op] for op in call.ops if op in owner), None)
        if name is not None:
            raise UnsupportedError(
                f"OverlapConfig.recompute: {name} and {call.name} in the model overlap, but what is computed again "
                f"must not. Switch activation checkpointing off in the model, or leave these layers out of recompute."
            )


def _segments(chunk: ChunkGraph, ops: Iterable[fx.Node], keys: Assignment, asked: Recompute) -> list[Region]:
    assert chunk.joint is not None
    members: dict[int, list[fx.Node]] = {}
    size, most = (1, asked.num_layers) if asked.method == "block" else (asked.num_layers, None)
    # By its first layer.
    segment = {layer: start for start, end in chunk.depths for layer in range(start, end)}
    trunk = range(min(segment, default=chunk.layers))
    segment |= {layer: layer // size * size for layer in (trunk if most is None else trunk[:most])}
    for op in ops:
        layer, slot, _ = keys[op]
        if layer in segment and slot is not Slot.MTP_POST:
            members.setdefault(segment[layer], []).append(op)
    if not members:
        raise UnsupportedError(
            f"OverlapConfig.recompute is {asked!r}, but the model has no logical layers to compute again. Set "
            f"OverlapConfig.layers to the FQN glob of its layers, or name modules with method 'selective'."
        )
    if chunk.depths:
        # A norm that the next depth reads stands in the last layer, but its backward must not wait for the replay.
        ends = [chunk.depths[0][0], *(end for _, end in chunk.depths)]
        for start in {segment[end - 1] for end in ends if end - 1 in segment}:
            members[start] = _without_tail(members[start])
    return [Region(_segment_name(chunk.joint, own), tuple(own)) for _, own in sorted(members.items())]


def _without_tail(ops: Sequence[fx.Node]) -> list[fx.Node]:
    """The ops of layers, and the others that these need: what follows the last layer is not among them."""
    of_layers = [op for op in ops if op_facts.tag(op).layer is not None]
    kept = op_facts.ancestors(of_layers, set(ops))
    return [op for op in ops if op in kept]


def _segment_name(joint: JointGraph, ops: Iterable[fx.Node]) -> str:
    physical = sorted({layer for op in ops if (layer := op_facts.tag(op).layer) is not None})
    fqns = [joint.physical[layer].fqn for layer in physical]
    return f"the segment {fqns[0]} to {fqns[-1]}" if len(fqns) > 1 else f"the segment {', '.join(fqns)}"


def _modules(ops: Iterable[fx.Node], globs: Sequence[str]) -> list[Region]:
    members: dict[str, list[fx.Node]] = {}
    unmatched = set(globs)
    ran: dict[str, None] = {}
    for op in ops:
        tag = op_facts.tag(op)
        found = {}
        for call in tag.calls or (f"{tag.fqn}#0",) if tag.fqn else ():
            fqn = call.rpartition("#")[0]
            ran[fqn] = None
            # The model itself has no FQN.
            matching = [glob for glob in globs if fqn and matches(fqn, glob)]
            if matching:
                unmatched.difference_update(matching)
                found[fqn] = call
        if len(found) > 1:
            outer, inner, *_ = found
            raise UnsupportedError(
                f"OverlapConfig.recompute: modules={list(globs)} matches {outer} and {inner} inside it, but what is "
                f"computed again must not overlap. Write globs that match one of the two."
            )
        for call in found.values():
            members.setdefault(call, []).append(op)
    if unmatched:
        raise UnsupportedError(
            f"OverlapConfig.recompute: modules={list(globs)}, but {', '.join(sorted(unmatched))} matches no module "
            f"that the forward calls and that computes something, such as {', '.join(list(filter(None, ran))[:5])}. "
            f"A glob matches whole parts of an FQN."
        )
    return [Region(f"module {call.rpartition('#')[0]}", tuple(region)) for call, region in members.items()]
