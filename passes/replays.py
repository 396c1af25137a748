"""Where replays stand in the backward: what `recompute` orders its R nodes by.

In:  the nodes of a chunk or the keys of its ops (layer, slot, phase), and the regions that are computed again.
Out: an order of keys, and `ChunkGraph.replays`.

R nodes stand in front of their first reader. `ChunkGraph.replays` says what else the built-in policies keep: a replay
begins when the backward is done with the layers behind its own, and with the heads between; and behind its first
exchange it goes on when their weight gradients are computed. So the replayed values of one region at a time are alive,
none beside logits, and weight gradients cover a replayed exchange. With `Recompute.prefetch` a replay begins when the
layers behind have launched their last exchange: what they compute after it covers the first exchange of the replay,
which waits behind that one for them and their weight gradients.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence

from fxoverlap.ir import ChunkGraph, Lane, Phase, ScheduleNode, Slot
from fxoverlap.passes.cut import Assignment, Key
from fxoverlap.passes.regions import Region


def depth_of(key: Key) -> float:
    """How far back in the chunk the backward of a node is: the number of its layer, more behind the layers.

    The backward of what precedes the layers goes with the first of them. That of the head of a depth of multi-token
    prediction runs before those of the depth's layers.
    """
    layer, slot, _ = key
    if layer is not None:
        return layer + 0.5 if slot is Slot.MTP_POST else layer
    return 0 if slot is Slot.PRE_PROCESS else math.inf


def key_order(chunk: ChunkGraph, keys: Assignment) -> list[Key]:
    """The nodes of the chunk with each R node in front of its first reader."""
    order = [(node.layer, node.slot, node.phase) for node in chunk.nodes]
    rank = {key: i for i, key in enumerate(order)}
    first: dict[Key, int] = {}
    for op in sorted((op for op in keys if keys[op][2] is Phase.R), reverse=True):
        readers = [
            first.get(keys[user], len(order)) if keys[user][2] is Phase.R else rank[keys[user]] for user in op.users
        ]
        first[keys[op]] = min([*readers, first.get(keys[op], len(order))])
    before: dict[int, list[Key]] = {}
    for key in first:
        before.setdefault(first[key], []).append(key)
    found: list[Key] = []
    for i, key in enumerate(order):
        found += sorted(before.get(i, ()), key=lambda again: rank.get((again[0], again[1], Phase.F), -1))
        found.append(key)
    return found


def replayed_together(found: Sequence[Region], keys: Assignment) -> dict[float, float]:
    """For each depth the last of those that are replayed together with it.

    Regions that share a depth are replayed together, with all between the first and the last depth of a region: else
    the replay of one would wait for a backward that needs it.
    """
    first = {depth: depth for depth in map(depth_of, keys.values())}  # where the longest begins that ends at a depth
    for region in found:
        own = {depth_of(keys[op]) for op in region.ops if op in keys}
        if own:
            first[max(own)] = min(first[max(own)], *own)
    ends: dict[float, float] = {}
    start = last = math.inf
    for depth in sorted(first, reverse=True):
        if depth < start:
            last = depth
        start = min(start, first[depth])
        ends[depth] = last
    return ends


def one_at_a_time(
    nodes: Sequence[ScheduleNode], end: Mapping[float, float], prefetch: bool = False
) -> Iterator[tuple[str, str]]:
    """`ChunkGraph.replays` of nodes.

    Args:
        nodes: of a chunk.
        end: for a depth (`depth_of`), the last of those that are replayed together with it; without one, itself.
        prefetch: see `Recompute.prefetch`.
    """

    def group(node: ScheduleNode) -> float:
        depth = depth_of((node.layer, node.slot, node.phase))
        return end.get(depth, depth)

    backward: dict[float, list[ScheduleNode]] = {}
    for node in nodes:
        if node.phase in (Phase.B, Phase.W):
            backward.setdefault(group(node), []).append(node)
    groups = sorted(backward)
    again = [node for node in nodes if node.phase is Phase.R]
    made_by = {value: node for node in again for value in node.writes}
    replayed = {group(node) for node in again}
    exchanging = {group(node) for node in again if node.lane is Lane.COMM}
    for node in again:
        own = group(node)
        sources = [made_by[value] for value in node.reads if value in made_by]
        is_late = any(each.lane is Lane.COMM for each in sources) if own in exchanging else not sources
        for each in _behind(own, groups, replayed):
            inputs = [one for one in backward[each] if one.phase is Phase.B]
            before = [] if sources else inputs
            if prefetch and own in exchanging:
                before = inputs if is_late else before[: _to_last_launch(before)]
            if is_late and (each in replayed or _is_head(each)):
                before = [*before, *(one for one in backward[each] if one.phase is Phase.W)]
            yield from ((one.name, node.name) for one in before)


def _to_last_launch(nodes: Sequence[ScheduleNode]) -> int:
    """The number of nodes up to the last that launches an exchange; all if none does."""
    launches = [i for i, node in enumerate(nodes) if node.lane is Lane.COMM]
    return launches[-1] + 1 if launches else len(nodes)


def _behind(own: float, groups: Sequence[float], replayed: set[float]) -> Sequence[float]:
    """The groups of the backward from behind `own` to the next layers, heads that are not replayed in between."""
    rest = groups[bisect.bisect_right(groups, own) :]
    heads = next((i for i, each in enumerate(rest) if each in replayed or not _is_head(each)), len(rest))
    return rest[: heads + 1]


def _is_head(depth: float) -> bool:
    """Whether what runs at this depth (`depth_of`) is a head, the main one or one of multi-token prediction."""
    return depth == math.inf or depth % 1 != 0
