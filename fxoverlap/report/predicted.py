"""What the cost model says of plans: how long they take, how close to the least possible, and how much they hide."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fxoverlap.ir import Lane, Plan, Round
from fxoverlap.runtime import StepProfile
from fxoverlap.schedule.memory import peak_bytes, rows_that_occurred
from fxoverlap.schedule.simulate import simulate_plan, simulate_ranks
from fxoverlap.schedule.tasks import lower_bound, tasks_of


def of_plan(plan: Plan) -> dict[str, Any]:
    """The fields `plan_...` of `Report`, by name."""
    run = simulate_plan(plan)
    bound = lower_bound(tasks_of(plan.chunks, plan.costs), plan.costs.hardware)
    return {
        "plan_ms": run.makespan * 1e3,
        "plan_bound_ms": bound * 1e3,
        "plan_over_bound": run.makespan / bound if bound else None,
        "plan_overlap_pct": run.overlap_pct,
    }


def of_step(rounds: Sequence[Round]) -> dict[str, Any]:
    """The fields `predicted_...` of `Report`, by name."""
    runs = simulate_ranks(rounds)
    hidden = [run.overlap_pct for run in runs if run.overlap_pct is not None]
    return {
        "predicted_step_ms": statistics.mean(run.makespan for run in runs) * 1e3,
        "predicted_exposed_ms": statistics.mean(run.exposed for run in runs) * 1e3,
        "predicted_overlap_pct": statistics.mean(hidden) if hidden else None,
        "predicted_peak_bytes": runs[0].peak_bytes,
        "predicted_worst_bytes": peak_bytes(rounds, "worst"),
    }


def of_profiled(step: StepProfile) -> int:
    """Most bytes that are alive at one time in a step that has run, by the rows that its exchanges brought."""
    chunks = {i: each.plan.chunks[mb] for each in step.rounds for mb, i in each.microbatches.items()}
    rows = {i: rows_that_occurred(c.memory, step.numbers[i]) for i, c in chunks.items() if c.memory is not None}
    return peak_bytes(step.rounds, rows, step.outputs)


def shares(plan: Plan) -> tuple[float, float]:
    """Seconds that the nodes of a plan take on the compute lane and on the comm lane."""
    lanes = {lane: sum(plan.costs[i.node.name].seconds for i in plan.order if i.node.lane is lane) for lane in Lane}
    return lanes[Lane.COMPUTE], lanes[Lane.COMM]
