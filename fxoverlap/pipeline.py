"""The three lists of passes and the driver that runs them.

In:  a JointGraph (joint passes, then chunk passes), or a Plan (plan passes).
Out: a ChunkGraph, or a FusedGraph that `verify` has accepted, and a `PassRecord` for each pass.

A pass is a function `(graph, config) -> graph` with an attribute `stage`: "joint", "chunk" or "plan". The lists are
data: `default_passes()` can be printed, cut and extended, and handed back as `OverlapConfig.passes`.

What passes tell one another is checked between them: each returns a graph of its stage; every op of a joint graph has
its tag; exchanges that a pass adds behind `exchanges` are analysed anew; nodes make all that is read; and a value's
life is ended once, by one pass. Where the list is the user's, whatever goes wrong in a pass is an UnsupportedError that
names it.

Where TORCH_TRACE is set, graphs before and after each pass become artifacts of torch's structured log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fxoverlap.config import OverlapConfig
from fxoverlap.dumps import dump
from fxoverlap.errors import FxOverlapError, UnsupportedError
from fxoverlap.ir import META, ChunkGraph, FusedGraph, JointGraph, OpTag, Plan, ValueRef
from fxoverlap.passes import op_facts
from fxoverlap.passes.bytes import bytes
from fxoverlap.passes.cut import cut
from fxoverlap.passes.exchanges import exchanges, group_name
from fxoverlap.passes.extract import extract
from fxoverlap.passes.fuse import fuse
from fxoverlap.passes.lanes import lanes
from fxoverlap.passes.layers import layers
from fxoverlap.passes.lifetime import lifetime
from fxoverlap.passes.memory import memory
from fxoverlap.passes.mtp import mtp
from fxoverlap.passes.partition import partition
from fxoverlap.passes.recompute import recompute
from fxoverlap.passes.simplify import simplify
from fxoverlap.passes.split import split
from fxoverlap.passes.verify import verify
from fxoverlap.passes.wgrad import wgrad

Pass = Callable[[Any, OverlapConfig], Any]

JOINT_PASSES: tuple[Pass, ...] = (simplify, exchanges, layers, partition, split)
CHUNK_PASSES: tuple[Pass, ...] = (cut, mtp, wgrad, recompute, bytes, memory, extract)
PLAN_PASSES: tuple[Pass, ...] = (fuse, lanes, lifetime)

# What a pass of each stage may return; `cut` and `fuse` are where one kind of graph becomes the other.
GRAPHS: dict[str, tuple[type, ...]] = {
    "joint": (JointGraph,),
    "chunk": (JointGraph, ChunkGraph),
    "plan": (Plan, FusedGraph),
}


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one pass did.

    Attributes:
        name: the pass.
        seconds: how long it took.
        ops_before, ops_after: number of ops (joint, chunk) or calls (plan) before and after.
    """

    name: str
    seconds: float
    ops_before: int
    ops_after: int


def default_passes() -> list[Pass]:
    """All passes in the order in which they run, without `verify`, which always runs last."""
    return [*JOINT_PASSES, *CHUNK_PASSES, *PLAN_PASSES]


def to_chunk(joint: JointGraph, config: OverlapConfig, records: list[PassRecord]) -> ChunkGraph:
    """Run the joint and chunk passes."""
    graph: Any = _run(joint, _of_stage(config, "joint"), config, records)
    if _has_stale_exchanges(graph, config):
        graph = _run(graph, [exchanges, layers], config, records)
    graph = _run(graph, _of_stage(config, "chunk"), config, records)
    if not isinstance(graph, ChunkGraph):
        raise UnsupportedError(
            f"The chunk passes ended with a {type(graph).__name__}, expected a ChunkGraph. "
            f"OverlapConfig.passes must hold `cut` or a pass that does its work."
        )
    _check_whole(graph)
    return graph


def to_fused(plan: Plan, config: OverlapConfig, records: list[PassRecord]) -> FusedGraph:
    """Run the plan passes, then `verify`."""
    graph: Any = _run(plan, _of_stage(config, "plan"), config, records)
    if not isinstance(graph, FusedGraph):
        raise UnsupportedError(
            f"The plan passes ended with a {type(graph).__name__}, expected a FusedGraph. "
            f"OverlapConfig.passes must hold `fuse` or a pass that does its work."
        )
    return _run(graph, [verify], config, records)


def _of_stage(config: OverlapConfig, stage: str) -> list[Pass]:
    passes: Sequence[Pass] = default_passes() if config.passes is None else config.passes
    return [each for each in passes if each.stage == stage]  # type: ignore[attr-defined]


def _run(graph: Any, passes: Sequence[Pass], config: OverlapConfig, records: list[PassRecord]) -> Any:
    ended_by: dict[ValueRef, str] = {}
    for each in passes:
        name = getattr(each, "__name__", repr(each))
        dump(f"{each.stage}_{name}_before", graph)  # type: ignore[attr-defined]
        before, start = _size(graph), time.perf_counter()
        graph = _call(each, name, graph, config)
        records.append(PassRecord(name, time.perf_counter() - start, before, _size(graph)))
        dump(f"{each.stage}_{name}_after", graph)  # type: ignore[attr-defined]
        if isinstance(graph, JointGraph):
            _check_tags(graph, name)
        elif isinstance(graph, FusedGraph):
            _check_lives(graph, name, ended_by)
    return graph


def _call(each: Pass, name: str, graph: Any, config: OverlapConfig) -> Any:
    """What a pass returns.

    Raises UnsupportedError, naming the pass, for what is no graph of its stage, and for what a pass of the user raises.
    """
    subject, stage = f"The pass {name}", each.stage  # type: ignore[attr-defined]
    try:
        returned = each(graph, config)
    except FxOverlapError:
        raise
    except Exception as error:
        if config.passes is None:
            raise
        raise UnsupportedError(
            f"{subject} (stage {stage!r} of OverlapConfig.passes), given a {type(graph).__name__}, raised "
            f"{type(error).__name__}: {error}. Repair it, or see that what it needs comes before it, as in "
            f"fxoverlap.pipeline.default_passes()."
        ) from error
    if not isinstance(returned, GRAPHS[stage]):
        allowed = " or a ".join(kind.__name__ for kind in GRAPHS[stage])
        raise UnsupportedError(
            f"{subject} (stage {stage!r} of OverlapConfig.passes) returned a {type(returned).__name__}, expected a "
            f"{allowed}. A pass returns the graph that it was given, or a changed one."
        )
    return returned


def _check_whole(chunk: ChunkGraph) -> None:
    """Raise UnsupportedError if the passes have left out what plans need, or a value that is read."""
    has_modules = all(node.name in chunk.modules for node in chunk.nodes)
    for name, is_done in (("memory", chunk.memory is not None), ("extract", has_modules)):
        if not is_done:
            raise UnsupportedError(
                f"The chunk passes ended with a graph without what the pass {name} finds. OverlapConfig.passes must "
                f"hold `{name}` or a pass that does its work, behind all passes that change nodes."
            )
    joint = chunk.joint
    assert joint is not None
    known = {each.value for each in joint.inputs}.union(*(node.writes for node in chunk.nodes))
    names = {each.value: each.name for each in joint.inputs}
    read = [(value, node.name) for node in chunk.nodes for value in node.reads]
    read += [(joint.loss, "the loss"), *((value, "an output") for value in joint.outputs)]
    read += [(value, f"the gradient of {names[target]}") for value, target in joint.gradients]
    read += [(value, f"the new value of {names[target]}") for value, target in joint.mutations]
    for value, reader in read:
        if value not in known:
            raise UnsupportedError(
                f"The chunk passes ended with no node that makes {value!r}, which is needed for {reader}. A pass that "
                f"takes a node away has to put its ops into another one."
            )


def _check_tags(joint: JointGraph, name: str) -> None:
    """Raise UnsupportedError if a pass left an op without a tag."""
    for node in op_facts.ops(joint.module.graph):
        if not isinstance(node.meta.get(META), OpTag):
            raise UnsupportedError(
                f"The pass {name} left the op {node.name} ({node.target}) without an OpTag, so it belongs to no phase. "
                f"Set node.meta[{META!r}] on every op that a pass adds."
            )


def _has_stale_exchanges(graph: Any, config: OverlapConfig) -> bool:
    """Whether the exchanges of a joint graph are no longer those that `exchanges` found."""
    if not isinstance(graph, JointGraph) or exchanges not in _of_stage(config, "joint"):
        return False
    found = {name for each in graph.exchanges for name in each.launches}
    groups = {each.group for each in graph.exchanges}
    launches = [node for node in op_facts.ops(graph.module.graph) if op_facts.is_launch(node)]
    return {n.name for n in launches if not groups or group_name(n) in groups} != found


def _check_lives(fused: FusedGraph, name: str, ended_by: dict[ValueRef, str]) -> None:
    """Raise UnsupportedError if a pass ends a life that it or an earlier pass has ended; note what it has ended."""
    ends: dict[ValueRef, str] = {}
    for call in fused.module.graph.find_nodes(op="call_module"):
        instance = call.meta[META]
        for value in instance.frees:
            ref = ValueRef(instance.mb, value)
            if ref in ends:
                first = ended_by.get(ref, name)
                raise UnsupportedError(
                    f"The passes {first} and {name} both end the life of {value!r} (microbatch {ref.mb}), at "
                    f"{ends[ref]} and at {instance.node.name}. Let one of them do it: a pass that frees values itself "
                    f"takes the place of `lifetime`, or leaves those values out."
                )
            ends[ref] = instance.node.name
    for ref in ends:
        ended_by.setdefault(ref, name)


def _size(graph: Any) -> int:
    if isinstance(graph, JointGraph):
        return sum(node.op == "call_function" for node in graph.module.graph.nodes)
    if isinstance(graph, ChunkGraph):
        return sum(len(node.ops) for node in graph.nodes)
    plan = graph.plan if isinstance(graph, FusedGraph) else graph
    return len(plan.order)
