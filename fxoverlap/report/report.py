"""`Report`: what a transformation did to a model and what profiled steps took, printable and as a dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fxoverlap.config import OverlapConfig
from fxoverlap.ir import ChunkGraph, CostTable, Lane, Plan, Round
from fxoverlap.pipeline import PassRecord
from fxoverlap.report.measured import figures, node_times
from fxoverlap.report.predicted import of_plan, of_profiled, of_step
from fxoverlap.report.reasons import covered, in_step, reasons
from fxoverlap.report.warnings import count_moved, warnings_of
from fxoverlap.runtime import StepProfile

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """What was captured and planned, and what was measured.

    What is measured is None before a step was profiled; of several steps it is the median. The figures of a step, on
    this rank, are `ms`, how long it took; `comm_ms`, in how much of that token exchanges were in flight; `exposed_ms`,
    how long compute nodes waited for collectives; `overlap_pct`, in how much of `comm_ms` the rank computed: neither
    launched nor waited. The last is None without token exchanges.

    What the cost model says is under names that begin with `plan_` and `predicted_`, for the costs that the plans were
    made with.

    Attributes:
        nodes: one row a schedule node: name, lane, ops, flops, bytes_sent (bytes), allocated, freed (bytes), and in ms
            planned_ms, the time that plans count on, and ms and waited_ms. The last two are medians over the instances
            in the profiled steps: what the node takes by itself, and how long it waits, a compute node for collectives,
            an exchange for those before it on its group.
        exchanges_per_microbatch: all-to-alls of one microbatch, forward and backward, counts included.
        layers: number of logical layers, those of multi-token prediction included.
        depths: number of depths of multi-token prediction.
        modules: number of distinct node modules.
        w_moved: W nodes that the FB plan runs later than right behind what they need.
        exchanges_covered: exchanges that have real work issued beside them, of `exchanges_planned`.
        exchanges_planned: exchanges of the last step on this rank; before a step, of one fused step.
        costs_from: where `planned_ms` comes from: "roofline cpu" (or of another preset), "measured", or "table" and its
            path. Nodes that were not measured, or that the table leaves out, have the roofline's time.
        hardware: the machine that the plans count on, by field of `fxoverlap.hardware.Hardware`: FLOP/s, bytes/s,
            seconds, and shares from 0 to 1.
        variants: number of captured variants.
        buffers_snapshot: FQNs of the buffers that are cloned for each microbatch.
        assigned_attributes: FQNs of module attributes that forward assigns; a step does not update them.
        passes: one row a pass: name, seconds, ops_before, ops_after.
        warnings: what was asked for and had no effect.
        little_hidden: why little of the communication is hidden, as far as the plans tell.
        plan_ms: how long one FB plan takes on the simulated machine.
        plan_bound_ms: what no order of its nodes can undercut: the work of a lane, or a chain of nodes.
        plan_over_bound: the first by the second.
        plan_overlap_pct: in how much of the time in which token exchanges are in flight it computes, in %.
        predicted_step_ms, predicted_exposed_ms, predicted_overlap_pct: of the last step, simulated: how long it takes,
            how long token exchanges are in flight without computing beside them, and the rest of that time in %. Means
            over ranks that wait for each other, where nodes were measured to vary in time. None before a step.
        predicted_peak_bytes: most bytes that are alive at one time in it beside what was there before it, if every
            exchange to experts brings `OverlapConfig.imbalance` times the balanced number of rows (docs/memory.md).
        predicted_worst_bytes: the same if all tokens of all ranks came to this one.
        profiled_steps: how many steps the measured figures are of.
        profiled_peak_bytes: as predicted_peak_bytes, of the last of them with the rows that its exchanges brought.
        step_ms, comm_ms, exposed_ms, overlap_pct: the figures of the whole step.
        steady_ms, steady_comm_ms, steady_exposed_ms, steady_overlap_pct: of its programs but the first and the last,
            in which the forward of one microbatch runs beside the backward of another; None with one microbatch.
        replay_hidden_pct: in how much of the time that replayed exchanges take by themselves the rank computed, in the
            whole step; None without any.
    """

    nodes: tuple[Row, ...]
    exchanges_per_microbatch: int
    layers: int
    depths: int
    modules: int
    w_moved: int
    exchanges_covered: int
    exchanges_planned: int
    costs_from: str
    hardware: Row
    variants: int
    buffers_snapshot: tuple[str, ...] = ()
    assigned_attributes: tuple[str, ...] = ()
    passes: tuple[Row, ...] = ()
    warnings: tuple[str, ...] = field(default_factory=tuple)
    little_hidden: tuple[str, ...] = ()
    plan_ms: float | None = None
    plan_bound_ms: float | None = None
    plan_over_bound: float | None = None
    plan_overlap_pct: float | None = None
    predicted_step_ms: float | None = None
    predicted_exposed_ms: float | None = None
    predicted_overlap_pct: float | None = None
    predicted_peak_bytes: int | None = None
    predicted_worst_bytes: int | None = None
    profiled_steps: int = 0
    profiled_peak_bytes: int | None = None
    step_ms: float | None = None
    comm_ms: float | None = None
    exposed_ms: float | None = None
    overlap_pct: float | None = None
    steady_ms: float | None = None
    steady_comm_ms: float | None = None
    steady_exposed_ms: float | None = None
    steady_overlap_pct: float | None = None
    replay_hidden_pct: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, units as the class docstring says."""
        return {name: _plain(getattr(self, name)) for name in self.__slots__}

    def __str__(self) -> str:
        lines = [
            f"{self._layers_text()}, {len(self.nodes)} schedule nodes ({self.modules} distinct modules), "
            f"{self.exchanges_per_microbatch} exchanges a microbatch, {self.w_moved} W nodes moved, "
            f"{self.variants} variants captured",
            f"{self.exchanges_covered} of {self.exchanges_planned} exchanges have real work beside them",
            f"costs: {self.costs_from}; {_hardware_text(self.hardware)}",
            *self._predicted_lines(),
            *self._measured_lines(),
            f"{'node':28} {'lane':8} {'ops':>4} {'MFLOP':>10} {'KB sent':>10} {'KB made':>10} {'ms':>9} {'waited':>9}",
        ]
        for row in self.nodes:
            lines.append(
                f"{row['name']:28} {row['lane']:8} {row['ops']:4} {row['flops'] / 1e6:10.2f} "
                f"{row['bytes_sent'] / 1e3:10.1f} {row['allocated'] / 1e3:10.1f} "
                f"{_number(row['ms']):>9} {_number(row['waited_ms']):>9}"
            )
        lines += [f"{row['name']}: {row['seconds']:.3f} s" for row in self.passes]
        lines += [f"buffer cloned for each microbatch: {fqn}" for fqn in self.buffers_snapshot]
        lines += [f"attribute assigned in forward, not updated by a step: {fqn}" for fqn in self.assigned_attributes]
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"why little is hidden: {text}" for text in self.little_hidden]
        return "\n".join(lines)

    def _layers_text(self) -> str:
        depths = "a depth" if self.depths == 1 else f"{self.depths} depths"
        mtp = f" ({depths} of multi-token prediction among them)" if self.depths else ""
        return f"{self.layers} logical layers{mtp}"

    def _predicted_lines(self) -> list[str]:
        """One line for the FB plan and one for the last step."""
        plan, bound, ratio, overlap = map(
            _number, (self.plan_ms, self.plan_bound_ms, self.plan_over_bound, self.plan_overlap_pct)
        )
        lines = [f"FB plan: predicted {plan} ms, bound {bound} ms, ratio {ratio}, overlap {overlap} %"]
        if self.predicted_step_ms is not None:
            step, exposed, overlap = map(
                _number, (self.predicted_step_ms, self.predicted_exposed_ms, self.predicted_overlap_pct)
            )
            lines.append(f"last step: predicted {step} ms, exposed exchanges {exposed} ms, overlap {overlap} %")
            peak, worst = (_megabytes(each) for each in (self.predicted_peak_bytes, self.predicted_worst_bytes))
            lines.append(f"last step: predicted peak {peak} MB, {worst} MB if all tokens came to this rank")
        return lines

    def _measured_lines(self) -> list[str]:
        """One line for the whole step and one for its steady part."""
        lines = []
        for name, values in (
            ("profiled step", (self.step_ms, self.comm_ms, self.exposed_ms, self.overlap_pct)),
            ("steady part", (self.steady_ms, self.steady_comm_ms, self.steady_exposed_ms, self.steady_overlap_pct)),
        ):
            if values[0] is not None:
                ms, comm, exposed, overlap = map(_number, values)
                lines.append(
                    f"{name}: {ms} ms, exchanges in flight {comm} ms, waited {exposed} ms, overlap {overlap} %"
                )
        if self.replay_hidden_pct is not None:
            lines.append(f"replayed exchanges: {_number(self.replay_hidden_pct)} % hidden")
        return lines


def _hardware_text(of: Row) -> str:
    """The figures of a `Hardware` with their units."""
    host = "runs ahead" if of["host_runs_ahead"] else "computes"
    return (
        f"{of['flops_per_s'] / 1e9:g} GFLOP/s, memory {of['memory_bytes_per_s'] / 1e9:g} GB/s, "
        f"{of['domain']} ranks in a domain at {of['fast_bytes_per_s'] / 1e9:g} GB/s, network "
        f"{of['network_bytes_per_s'] / 1e9:g} GB/s, latency {of['latency_s'] * 1e6:g} us, efficiency "
        f"{of['efficiency']:g}, {of['node_s'] * 1e6:.3g} us a node, {of['launch_s'] * 1e6:.3g} us a launch, "
        f"the host {host}, exchanges take {100 * of['comm_share']:.3g} % of the compute beside them"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _megabytes(value: int | None) -> str:
    return _number(None if value is None else value / 1e6)


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def make_report(
    chunk: ChunkGraph,
    plan: Plan,
    rounds: Sequence[Round] | None,
    records: Sequence[PassRecord],
    variants: int,
    snapshots: Sequence[str],
    assigned: Sequence[str],
    config: OverlapConfig,
    profiled: Sequence[StepProfile],
    alone: str | None,
    costs: CostTable,
) -> Report:
    """The report of a chunk, its FB plan, a step in rounds (None: none yet), and profiled steps.

    `alone` is what forbids pairs of microbatches in the same phase, if anything does; `costs` is what plans count on
    for all nodes of the chunk.
    """
    done, planned = covered(plan) if rounds is None else in_step(rounds)
    microbatches = None if rounds is None else 1 + max(i for each in rounds for i in each.microbatches.values())
    moved = count_moved(plan.order)
    exchanges = sum(node.lane is Lane.COMM for node in chunk.nodes)
    times = node_times(profiled)
    measured: dict[str, Any] = figures(profiled)
    return Report(
        nodes=tuple(_row(node, chunk, times, costs) for node in chunk.nodes),
        exchanges_per_microbatch=exchanges,
        layers=chunk.layers,
        depths=len(chunk.depths),
        modules=len({id(module) for module in chunk.modules.values()}),
        w_moved=moved,
        exchanges_covered=done,
        exchanges_planned=planned,
        costs_from=costs.source,
        hardware=asdict(costs.hardware),
        variants=variants,
        buffers_snapshot=tuple(snapshots),
        assigned_attributes=tuple(assigned),
        passes=tuple(
            {"name": r.name, "seconds": r.seconds, "ops_before": r.ops_before, "ops_after": r.ops_after}
            for r in records
        ),
        warnings=warnings_of(chunk, plan, config, microbatches, alone),
        little_hidden=reasons(plan, microbatches, config.delay_wgrad),
        **of_plan(plan),
        **(of_step(rounds) if rounds else {}),
        profiled_steps=len(profiled),
        profiled_peak_bytes=of_profiled(profiled[-1]) if profiled else None,
        **measured,
    )


def _row(node: Any, chunk: ChunkGraph, times: Mapping[str, tuple[float, float]], costs: CostTable) -> Row:
    cost = chunk.costs.get(node.name)
    row: Row = {"name": node.name, "lane": node.lane.value, "ops": len(node.ops)}
    for figure in ("flops", "bytes_sent", "allocated", "freed"):
        row[figure] = getattr(cost, figure) if cost is not None else 0
    row["planned_ms"] = costs[node.name].seconds * 1e3
    row["ms"], row["waited_ms"] = times.get(node.name, (None, None))
    return row
