"""How values flow between schedule nodes: which node needs which other ones, and with which one a value dies.

In:  a chunk graph, or an order of instances of its nodes. What a node reads and writes was computed from its ops.
Out: names of nodes and values.

What orders, costs, counts or frees nodes takes these facts from here. Only the pass `verify` does not: it finds them
anew from the ops that will run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fxoverlap.ir import ChunkGraph, Instance, Lane, Phase, ScheduleNode, nodes_of, runs_forward


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


def deaths(order: Sequence[Instance], chunks: Mapping[str, ChunkGraph]) -> list[list[str]]:
    """For each instance of a plan, the values of its microbatch that die with it.

    A value dies with the last of its users (`users_of`), or with the instance that makes it if there is none. Graph
    inputs belong to the user and do not die; what a forward hands on does not either. Gradients are delivered by the
    instance that makes them.

    Args:
        order: the instances, in the order in which the host issues them.
        chunks: as in `Plan`.
    """
    position = {(each.mb, each.node.name): i for i, each in enumerate(order)}
    ends: list[list[str]] = [[] for _ in order]
    for mb, chunk in chunks.items():
        nodes = [each.node for each in order if each.mb == mb]
        users, kept = users_of(nodes), _kept(mb, chunk)
        made_by = {value: node for node in nodes for value in node.writes}
        for value in made_by | users:
            if value not in kept:
                needing = users.get(value) or [made_by[value]]
                ends[max(position[mb, node.name] for node in needing)].append(value)
    return ends


def read_late(chunk: ChunkGraph) -> set[str]:
    """The values that other nodes than F read."""
    return {value for node in chunk.nodes if node.phase is not Phase.F for value in node.reads}


def kept_after_forward(chunk: ChunkGraph) -> set[str]:
    """The values that are needed when F is done: what other nodes read, and the ends of the forward."""
    joint = chunk.joint
    ends = (joint.loss, *joint.outputs, *(value for value, _ in joint.mutations)) if joint is not None else ()
    return read_late(chunk) | set(ends)


def _kept(mb: str, chunk: ChunkGraph) -> set[str]:
    inputs = {each.value for each in chunk.joint.inputs} if chunk.joint is not None else set()
    return inputs | kept_after_forward(chunk) if runs_forward(mb) else inputs
