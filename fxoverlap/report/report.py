"""`Report`: what a transformation did to a model, printable and as a dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxoverlap.config import OverlapConfig
from fxoverlap.ir import ChunkGraph, Instance, Lane, Phase, Plan
from fxoverlap.pipeline import PassRecord
from fxoverlap.report.reasons import covered, in_step, reasons

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """What was captured and planned.

    Attributes:
        nodes: one row a schedule node: name, lane, ops, flops, bytes_sent (bytes), allocated, freed (bytes).
        exchanges_per_microbatch: all-to-alls of one microbatch, forward and backward, counts included.
        layers: number of logical layers.
        modules: number of distinct node modules.
        w_moved: W nodes that the FB plan runs later than right behind what they need.
        exchanges_covered: exchanges that have real work issued beside them, of `exchanges_planned`.
        exchanges_planned: exchanges of the last step on this rank; before a step, of one fused step.
        variants: number of captured variants.
        buffers_snapshot: FQNs of the buffers that are cloned for each microbatch.
        assigned_attributes: FQNs of module attributes that forward assigns; a step does not update them.
        passes: one row a pass: name, seconds, ops_before, ops_after.
        warnings: what was asked for and had no effect.
        little_hidden: why little of the communication is hidden, as far as the plans tell.
    """

    nodes: tuple[Row, ...]
    exchanges_per_microbatch: int
    layers: int
    modules: int
    w_moved: int
    exchanges_covered: int
    exchanges_planned: int
    variants: int
    buffers_snapshot: tuple[str, ...] = ()
    assigned_attributes: tuple[str, ...] = ()
    passes: tuple[Row, ...] = ()
    warnings: tuple[str, ...] = field(default_factory=tuple)
    little_hidden: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, units as the class docstring says."""
        return {name: _plain(getattr(self, name)) for name in self.__slots__}

    def __str__(self) -> str:
        lines = [
            f"{self.layers} logical layers, {len(self.nodes)} schedule nodes ({self.modules} distinct modules), "
            f"{self.exchanges_per_microbatch} exchanges a microbatch, {self.w_moved} W nodes moved, "
            f"{self.variants} variants captured",
            f"{self.exchanges_covered} of {self.exchanges_planned} exchanges have real work beside them",
            f"{'node':28} {'lane':8} {'ops':>4} {'MFLOP':>10} {'KB sent':>10} {'KB made':>10}",
        ]
        for row in self.nodes:
            lines.append(
                f"{row['name']:28} {row['lane']:8} {row['ops']:4} {row['flops'] / 1e6:10.2f} "
                f"{row['bytes_sent'] / 1e3:10.1f} {row['allocated'] / 1e3:10.1f}"
            )
        lines += [f"{row['name']}: {row['seconds']:.3f} s" for row in self.passes]
        lines += [f"buffer cloned for each microbatch: {fqn}" for fqn in self.buffers_snapshot]
        lines += [f"attribute assigned in forward, not updated by a step: {fqn}" for fqn in self.assigned_attributes]
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"why little is hidden: {text}" for text in self.little_hidden]
        return "\n".join(lines)


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def make_report(
    chunk: ChunkGraph,
    plans: Mapping[str, Plan],
    microbatches: int | None,
    records: Sequence[PassRecord],
    variants: int,
    snapshots: Sequence[str],
    assigned: Sequence[str],
    config: OverlapConfig,
) -> Report:
    """The report of a chunk, its plans by kind, and a step of so many microbatches (None: there was none yet)."""
    plan = plans["FB"]
    done, planned = covered(plan) if microbatches is None else in_step(plans, microbatches)
    moved = count_moved(plan.order)
    warnings = []
    has_weights = any(node.phase is Phase.W for node in chunk.nodes)
    physical = chunk.joint.physical if chunk.joint is not None else ()
    if config.layers != OverlapConfig().layers and not physical:
        warnings.append(f"OverlapConfig.layers={config.layers!r} matches no module, so no layer has edges of its own.")
    if config.delay_wgrad and has_weights and moved == 0:
        warnings.append("delay_wgrad=True, but the schedule moved no W node: all run right behind their B node.")
    exchanges = sum(node.lane is Lane.COMM for node in chunk.nodes)
    if exchanges == 0:
        warnings.append("No exchange was found in the model, so there is no communication to hide.")
    return Report(
        nodes=tuple(_row(node, chunk) for node in chunk.nodes),
        exchanges_per_microbatch=exchanges,
        layers=chunk.layers,
        modules=len({id(module) for module in chunk.modules.values()}),
        w_moved=moved,
        exchanges_covered=done,
        exchanges_planned=planned,
        variants=variants,
        buffers_snapshot=tuple(snapshots),
        assigned_attributes=tuple(assigned),
        passes=tuple(
            {"name": r.name, "seconds": r.seconds, "ops_before": r.ops_before, "ops_after": r.ops_after}
            for r in records
        ),
        warnings=tuple(warnings),
        little_hidden=reasons(plan, microbatches, config.delay_wgrad),
    )


def _row(node: Any, chunk: ChunkGraph) -> Row:
    cost = chunk.costs.get(node.name)
    row: Row = {"name": node.name, "lane": node.lane.value, "ops": len(node.ops)}
    for figure in ("flops", "bytes_sent", "allocated", "freed"):
        row[figure] = getattr(cost, figure) if cost is not None else 0
    return row


def count_moved(order: Sequence[Instance]) -> int:
    """The W nodes between which and the last node that they read from others than W run."""
    made_at = {(i.mb, value): k for k, i in enumerate(order) for value in i.node.writes}
    moved, last_other = 0, -1
    for position, instance in enumerate(order):
        if instance.node.phase is Phase.W:
            start = max((made_at.get((instance.mb, value), -1) for value in instance.node.reads), default=-1)
            moved += last_other > start
        else:
            last_other = position
    return moved
