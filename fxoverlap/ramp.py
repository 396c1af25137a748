"""Why two microbatches of a model cannot run beside each other in the same phase, as `ramp="pair"` asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from fxoverlap.ir import ChunkGraph, Lane, Slot, nodes_of
from fxoverlap.passes import op_facts


def why_alone(chunk: ChunkGraph, kind: str, born: Sequence[str]) -> str | None:
    """What in a chunk's graph forbids plans of kind "FF" or "BB", None if nothing does.

    Nothing forbids them that would differ between ranks whose microbatches have other lengths.

    Args:
        chunk: a captured chunk.
        kind: which plans.
        born: FQNs of the buffers that are None until the forward makes them, the last outputs of the graph.
    """
    assert chunk.joint is not None
    phase = "forward" if kind == "FF" else "backward"
    nodes = nodes_of(kind[0], chunk)
    by_name = {node.name: node for node in chunk.joint.module.graph.nodes}
    made_in = {op: node.name for node in nodes for op in node.ops}
    for value, buffer in _buffers_written(chunk, born) if kind == "FF" else ():
        where = made_in.get(value, "the forward")
        return f"{where} writes to the buffer {buffer!r}, with which the {phase} of the next microbatch begins"
    for op, where in made_in.items():
        if _writes(by_name[op]):
            return f"{where} writes to a tensor in place ({by_name[op].target}), which must be done in order"
    acting = [i for i, node in enumerate(nodes) if node.name in chunk.acting]
    between = nodes[acting[0] : acting[-1]] if acting else []
    if any(node.lane is Lane.COMM and node.slot is not Slot.COUNTS for node in between):
        one, two = nodes[acting[0]], nodes[acting[-1]]
        ops = dict.fromkeys(str(by_name[op].target) for each in (one, two) for op in each.ops if _acts(by_name[op]))
        return (
            f"{one.name} of a microbatch must follow {two.name} of the one before, because random draws and "
            f"collectives keep their order ({', '.join(ops)}), and tokens are exchanged between the two"
        )
    return None


def _buffers_written(chunk: ChunkGraph, born: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(new value, FQN) of each buffer that the forward writes or makes."""
    joint = chunk.joint
    assert joint is not None
    names = {each.value: each.name for each in joint.inputs}
    yield from ((value, names[target]) for value, target in joint.mutations)
    yield from zip(joint.outputs[len(joint.outputs) - len(born) :], born, strict=True)


def _writes(op: fx.Node) -> bool:
    schema = op_facts.schema(op)
    return op_facts.writes_input(op) or (schema is not None and schema.is_mutable)


def _acts(op: fx.Node) -> bool:
    return op_facts.keeps_order(op) and not op_facts.is_launch(op)
