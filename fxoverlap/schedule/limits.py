"""How far nodes of a plan may run ahead of what frees memory: what `"auto"` gives up, bit by bit, to stay in a budget.

A *limit* is a set of edges that a search has to keep besides those of the values. Limits stand in a ladder, from none
to one microbatch after the other, which takes the least memory that an order can; each takes about as much memory as
the one before it or less, and gives the search less to choose from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fxoverlap.ir import ChunkGraph, Phase, ScheduleNode, nodes_of, runs_forward
from fxoverlap.schedule.tasks import Edge


@dataclass(frozen=True, slots=True)
class Limits:
    """What an order keeps to.

    Attributes:
        pairs: whether two microbatches may run beside each other in the same phase.
        delay: so many layers later the weight gradients of a layer are computed at the latest; None: any time. With 0
            they are before the backward begins with the next layer.
        lead: a layer of the forward begins when the backward beside it is done with the layer across, or, with `lead`
            more, that many layers before; None: any time.
        beside: whether two microbatches run beside each other at all.
    """

    pairs: bool = True
    delay: int | None = None
    lead: int | None = None
    beside: bool = True


LADDER = (
    Limits(),
    Limits(pairs=False),
    Limits(pairs=False, delay=1),
    Limits(pairs=False, delay=0),
    Limits(pairs=False, delay=0, lead=1),
    Limits(pairs=False, delay=0, lead=0),
    Limits(pairs=False, delay=0, beside=False),
)
"""From the most freedom to the least memory."""


def limit_edges(limits: Limits, chunks: Mapping[str, ChunkGraph]) -> Iterator[Edge]:
    """The edges of a plan over these chunks that limits ask for."""
    for mb, chunk in chunks.items():
        if limits.delay is not None and not runs_forward(mb):
            yield from (((mb, one), (mb, other)) for one, other in _delay_edges(chunk, limits.delay))
    if limits.lead is not None and {"F", "B"} <= chunks.keys():
        lead_edges = _lead_edges(chunks["F"], chunks["B"], limits.lead)
        yield from ((("B", one), ("F", other)) for one, other in lead_edges)


def _delay_edges(chunk: ChunkGraph, delay: int) -> Iterator[tuple[str, str]]:
    """(W node, B node that follows it)."""
    places = _by_place(nodes_of("B", chunk), chunk.layers)
    for place, nodes in places.items():
        first = [node for node in places.get(place + 1 + delay, ()) if node.phase is Phase.B][:1]
        yield from ((node.name, each.name) for node in nodes if node.phase is Phase.W for each in first)


def _lead_edges(f: ChunkGraph, b: ChunkGraph, lead: int) -> Iterator[tuple[str, str]]:
    """(B or W node, F node that follows it)."""
    backward = _by_place(nodes_of("B", b), b.layers)
    for layer in range(f.layers):
        first = next(node for node in f.nodes if node.layer == layer)
        yield from ((node.name, first.name) for node in backward.get(layer + 1 - lead, ()))


def _by_place(nodes: list[ScheduleNode], layers: int) -> dict[int, list[ScheduleNode]]:
    """Nodes of the backward by the place of their layer in it: 0 for the head, 1 for the last layer, and so on."""
    found: dict[int, list[ScheduleNode]] = {}
    is_behind_the_layers = False
    for node in nodes:
        is_behind_the_layers |= node.layer is not None
        outside = layers + 1 if is_behind_the_layers else 0
        found.setdefault(outside if node.layer is None else layers - node.layer, []).append(node)
    return found
