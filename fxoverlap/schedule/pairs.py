"""Two microbatches in the same phase beside each other, and what of them must keep its order.

With `ramp="pair"` a step begins with the forwards of its first two microbatches, and ends with the backwards of its
last two. A node is known by its name and the label of its microbatch, "F0" and "F1" or "B0" and "B1": the earlier
microbatch and the later one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fxoverlap.ir import ChunkGraph, InputKind, Phase


class Between(NamedTuple):
    """A node of the earlier microbatch that must run before one of the later microbatch.

    Attributes:
        earlier, later: their names.
        why: what both do.
    """

    earlier: str
    later: str
    why: str


def labels_of(kind: str) -> tuple[str, str]:
    """The labels of the earlier and the later microbatch in a plan of kind "FF" or "BB"."""
    return f"{kind[0]}0", f"{kind[1]}1"


def edges_between(first: ChunkGraph, second: ChunkGraph, kind: str) -> list[Between]:
    """What two microbatches in the same phase must do in their order.

    Random draws, and collectives that are no exchanges, keep theirs. Of each parameter the earlier microbatch gives its
    gradient first. Microbatch tensors may be the same in both: their gradients come in order too.
    """
    phases = (Phase.F,) if kind == "FF" else (Phase.B, Phase.W, Phase.R)
    acting = [_acting(chunk, phases) for chunk in (first, second)]
    found = []
    if all(acting):
        found.append(Between(acting[0][-1], acting[1][0], "both draw random numbers or have other effects"))
    if kind == "BB":
        found += _gradient_edges(first, second)
    return found


def _acting(chunk: ChunkGraph, phases: tuple[Phase, ...]) -> list[str]:
    phase = {node.name: node.phase for node in chunk.nodes}
    return [name for name in chunk.acting if phase[name] in phases]


def _gradient_edges(first: ChunkGraph, second: ChunkGraph) -> Iterator[Between]:
    earlier, later = _gradients(first), _gradients(second)
    follows = dict(later[InputKind.PARAM])
    for name, node in earlier[InputKind.PARAM]:
        if name in follows:
            yield Between(node, follows[name], f"both give a gradient of {name!r}")
    for name, node in earlier[InputKind.LEAF]:
        for other, follower in later[InputKind.LEAF]:
            yield Between(node, follower, f"both give a gradient of a microbatch tensor ({name}, {other})")


def _gradients(chunk: ChunkGraph) -> dict[InputKind, list[tuple[str, str]]]:
    """(name of the parameter or leaf, node that makes its gradient), by kind."""
    found: dict[InputKind, list[tuple[str, str]]] = {InputKind.PARAM: [], InputKind.LEAF: []}
    if chunk.joint is not None:
        inputs = {each.value: each for each in chunk.joint.inputs}
        made_by = {value: node.name for node in chunk.nodes for value in node.writes}
        for value, target in chunk.joint.gradients:
            if value in made_by:
                found[inputs[target].kind].append((inputs[target].name, made_by[value]))
    return found
