"""How values flow between schedule nodes: which node needs which other ones, and which nodes use a value.

In:  a chunk graph. What a node reads and writes was computed from its ops.
Out: names of nodes and values.

What orders, costs or counts nodes takes these facts from here. Only the pass `verify` does not: it finds them
anew from the ops that will run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fxoverlap.ir import ChunkGraph, Lane, ScheduleNode, nodes_of


class Need(NamedTuple):
    """What a node must follow in its microbatch.

    Attributes:
        node: name of the node that comes first.
        value: what the later one reads of it; None where both draw random numbers or have other effects.
    """

    node: str
    value: str | None


def needs_of(mb: str, chunk: ChunkGraph) -> dict[str, list[Need]]:
    """What each node that runs for a microbatch of this label needs of the others that do: values, then effects."""
    nodes = nodes_of(mb, chunk)
    made_by = {value: node.name for node in nodes for value in node.writes}
    needs = {node.name: [Need(made_by[value], value) for value in node.reads if value in made_by] for node in nodes}
    for earlier, later in chunk.effects:
        if earlier in needs and later in needs:
            needs[later].append(Need(earlier, None))
    return needs


def users_of(nodes: Iterable[ScheduleNode]) -> dict[str, list[ScheduleNode]]:
    """The nodes that each value must be alive for, by value: those that read it, and those that wait for a launch that
    reads it."""
    readers: dict[str, list[ScheduleNode]] = {}
    for node in nodes:
        for value in node.reads:
            readers.setdefault(value, []).append(node)

    def waiters(node: ScheduleNode) -> list[ScheduleNode]:
        results = node.writes if node.lane is Lane.COMM else ()
        return [reader for result in results for reader in readers.get(result, ())]

    return {
        value: [*reading, *(waiter for reader in reading for waiter in waiters(reader))]
        for value, reading in readers.items()
    }
