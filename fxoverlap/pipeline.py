"""The three lists of passes and the driver that runs them.

In:  a JointGraph (joint passes, then chunk passes), or a Plan (plan passes).
Out: a ChunkGraph, or a FusedGraph that `verify` has accepted, and a `PassRecord` for each pass.

A pass is a function `(graph, config) -> graph` with an attribute `stage`: "joint", "chunk" or "plan". The lists are
data: `default_passes()` can be printed, cut and extended, and handed back as `OverlapConfig.passes`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import ChunkGraph, FusedGraph, JointGraph, Plan
from fxoverlap.passes.bytes import bytes
from fxoverlap.passes.cut import cut
from fxoverlap.passes.exchanges import exchanges
from fxoverlap.passes.extract import extract
from fxoverlap.passes.fuse import fuse
from fxoverlap.passes.lanes import lanes
from fxoverlap.passes.layers import layers
from fxoverlap.passes.lifetime import lifetime
from fxoverlap.passes.partition import partition
from fxoverlap.passes.simplify import simplify
from fxoverlap.passes.verify import verify
from fxoverlap.passes.wgrad import wgrad

Pass = Callable[[Any, OverlapConfig], Any]

JOINT_PASSES: tuple[Pass, ...] = (simplify, exchanges, layers, partition)
CHUNK_PASSES: tuple[Pass, ...] = (cut, wgrad, bytes, extract)
PLAN_PASSES: tuple[Pass, ...] = (fuse, lanes, lifetime)


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
    graph: Any = joint
    for stage in ("joint", "chunk"):
        graph = _run(graph, _of_stage(config, stage), config, records)
    if not isinstance(graph, ChunkGraph):
        raise UnsupportedError(
            f"The chunk passes ended with a {type(graph).__name__}, expected a ChunkGraph. "
            f"OverlapConfig.passes must hold `cut` or a pass that does its work."
        )
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
    for each in passes:
        before, start = _size(graph), time.perf_counter()
        graph = each(graph, config)
        name = getattr(each, "__name__", repr(each))
        records.append(PassRecord(name, time.perf_counter() - start, before, _size(graph)))
    return graph


def _size(graph: Any) -> int:
    if isinstance(graph, JointGraph):
        return sum(node.op == "call_function" for node in graph.module.graph.nodes)
    if isinstance(graph, ChunkGraph):
        return sum(len(node.ops) for node in graph.nodes)
    plan = graph.plan if isinstance(graph, FusedGraph) else graph
    return len(plan.order)
