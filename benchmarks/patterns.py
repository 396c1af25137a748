"""Whether models of several patterns hide as much of their communication, between two ranks joined by a slow link.

The ranks and the link are those of `two_hosts`. The models are profiled in turn, a few steps each, so that what slows
the machine down slows all of them; figures are medians over the repetitions, on rank 0, under the default schedule with
measured costs. Under `patterns`, for each: `ms` of a step, `overlap_pct` of its steady state, `overlap_step_pct` of all
of it, `predicted_overlap_pct` by the simulator, of the whole step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

import fxoverlap as fxo
from fxoverlap.benchmarks.two_hosts import on_two_hosts, pct, profile_steps, refuse_without_experts, where
from fxoverlap.benchmarks.workload import Settings

FIGURES = {
    "ms": "step_ms",
    "overlap_pct": "steady_overlap_pct",
    "overlap_step_pct": "overlap_pct",
    "predicted_overlap_pct": "predicted_overlap_pct",
}
"""The figures of a pattern, and the attribute of `Report` that each is the median of."""


def run(patterns: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Measure each pattern, in turn, `settings.repeats` times.

    Raises ConfigError if a pattern has no experts, and as `two_hosts.on_two_hosts`.
    """
    for pattern in patterns:
        refuse_without_experts(pattern)
    shared = {key: value for key, value in asdict(settings).items() if key != "pattern"}
    return shared | on_two_hosts(settings.rate, _measure, list(patterns), settings)


def _measure(rank: int, patterns: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Measure as one rank, and return the figures."""
    batches = settings.batches(rank)
    models = {}
    for pattern in patterns:
        model = replace(settings, pattern=pattern).model(dist.group.WORLD)
        models[pattern] = fxo.transform(model, fxo.OverlapConfig(pattern), example_inputs=batches[0])
    reports: dict[str, list[fxo.Report]] = {pattern: [] for pattern in patterns}
    # The first time is with costs that were not measured, and the second makes plans of those that were.
    for repetition in range(settings.repeats + 1):
        for pattern, overlapped in models.items():

            def before(model: Any = overlapped.module) -> None:
                model.zero_grad(set_to_none=True)
                dist.barrier()

            profile_steps(overlapped, batches, before)
            if repetition:
                reports[pattern].append(overlapped.report())
    return {"patterns": {pattern: _medians(each) for pattern, each in reports.items()}}


def _medians(reports: Sequence[fxo.Report]) -> dict[str, float | None]:
    return {name: _median(getattr(each, attribute) for each in reports) for name, attribute in FIGURES.items()}


def _median(values: Any) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def text(figures: dict[str, Any]) -> str:
    """Format the figures of `run` for a person."""
    lines = [f"{figures['microbatches']} microbatches of {figures['tokens']} tokens,", *where(figures)]
    width = max(map(len, figures["patterns"]))
    lines.append(f"{'overlap of':>{width}} {'ms':>9} {'steady':>9} {'step':>9} {'predicted':>10}")
    for pattern, each in figures["patterns"].items():
        shares = (pct(each[name]) for name in ("overlap_pct", "overlap_step_pct", "predicted_overlap_pct"))
        lines.append(f"{pattern:>{width}} {each['ms']:9.1f} {next(shares):>9} {next(shares):>9} {next(shares):>10}")
    return "\n".join(lines)
