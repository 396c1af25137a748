"""What ranks compare before they run a step together: a text of the config and the plans, by its hash.

In:  the plans of a step, and the config.
Out: a `Fingerprint`. It is equal on two ranks if they run the same plans; it holds no lengths, costs or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import fx

from fxoverlap import compat
from fxoverlap.config import OverlapConfig
from fxoverlap.ir import ChunkGraph, Plan
from fxoverlap.passes import op_facts
from fxoverlap.runtime import Fingerprint

# Ranks may differ in these: a group object, a factor that does not change the plan, and costs, which are reduced.
_MAY_DIFFER = ("process_group", "grad_scale", "costs")
_COMPARED = tuple(each.name for each in fields(OverlapConfig) if each.name not in _MAY_DIFFER)


def fingerprint(plans: Sequence[Plan], config: OverlapConfig) -> Fingerprint:
    """The fingerprint of a step that runs these plans, one a round."""
    lines = [f"{name} = {_stable(getattr(config, name))}" for name in _COMPARED]
    chunks = [chunk for plan in plans for chunk in plan.chunks.values()]
    texts = dict.fromkeys([*map(_effects_table, chunks), *map(str, plans)])
    lines += [line for text in texts for line in text.splitlines()]
    number = {text: i for i, text in enumerate(texts)}
    lines += [f"program {i} of the step: plan {number[str(plan)]}" for i, plan in enumerate(plans)]
    return Fingerprint.of(lines)


def _effects_table(chunk: ChunkGraph) -> str:
    """One line a schedule node, with the ops in it that ranks must run in the same order."""
    assert chunk.joint is not None
    by_name = {node.name: node for node in chunk.joint.module.graph.nodes}
    groups: dict[str, int] = {}
    lines = []
    for node in chunk.nodes:
        ops = [by_name[op] for op in node.ops if op_facts.keeps_order(by_name[op])]
        lines.append(" ".join([node.name, *(_effect(op, groups) for op in ops)]))
    return "\n".join(lines)


def _effect(op: fx.Node, groups: dict[str, int]) -> str:
    """The name of an op with an effect; of a collective also the group and what must have equal shapes on all ranks.

    Groups are numbered by first appearance, because their names may differ between ranks.
    """
    name = str(op.target)
    group = op.args[-1] if op.args else None
    if not (op_facts.is_collective(op) and isinstance(group, str)):
        return name
    number = groups.setdefault(group, len(groups))
    sent = []
    fx.node.map_arg(op.args[0], lambda source: sent.append(source.meta["val"]))
    # All-to-alls may send other lengths on other ranks, and so may a size that only the data decides.
    is_free = op_facts.is_launch(op)
    shapes = ["" if is_free else [n if isinstance(n, int) else "?" for n in each.shape] for each in sent]
    what = [f"{each.dtype}{shape}" for each, shape in zip(sent, shapes, strict=True)]
    what += [repr(each) for each in op.args[1:-1] if isinstance(each, (str, int)) and not is_free]
    return f"{name}({', '.join(what)}, group {number} of {compat.process_group(group).size()})"


def _stable(value: Any) -> str:
    """A text of a config field without addresses."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_stable(each) for each in value)})"
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return type(value).__qualname__ if " at 0x" in repr(value) else repr(value)
