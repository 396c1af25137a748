"""What a step costs where there is nothing to hide: one rank, all experts local, no exchange.

Eager and overlapped whole steps without optimizer, medians over interleaved repetitions, in milliseconds, for each
width. Narrow models show the cost of running a step by nodes; wide ones show what is left of it in practice.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

import fxoverlap as fxo
from fxoverlap.benchmarks.timing import interleaved
from fxoverlap.benchmarks.workload import Settings, eager_step, outcome, same


def run(widths: Sequence[int], settings: Settings) -> dict[str, Any]:
    """Measure each width; return the first one's figures, and under `widths` every one's.

    Each has `hidden`, `eager_ms`, `fused_ms`, `fused_over_eager` and `bitwise_equal`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = [_measure(dataclasses.replace(settings, dim=width)) for width in widths]
    finally:
        torch.set_num_threads(threads)
    shared = {"pattern": settings.pattern, "microbatches": settings.microbatches, "repeats": settings.repeats}
    return shared | figures[0] | {"widths": figures}


def _measure(settings: Settings) -> dict[str, Any]:
    model = settings.model(None)
    batches = settings.batches(0)
    overlapped = fxo.transform(model, fxo.OverlapConfig(settings.pattern), example_inputs=batches[0])
    equal = same(
        outcome(model, lambda: eager_step(model, batches)),
        outcome(model, lambda: overlapped.step(batches, outputs=False).losses),
    )
    times = interleaved(
        {
            "eager": lambda: eager_step(model, batches),
            "fused": lambda: overlapped.step(batches, outputs=False),
        },
        settings.repeats,
        before=lambda: model.zero_grad(set_to_none=True),
    )
    return {
        "hidden": settings.dim,
        "eager_ms": times["eager"].ms,
        "fused_ms": times["fused"].ms,
        "fused_over_eager": times["fused"].ms / times["eager"].ms,
        "bitwise_equal": equal,
    }


def text(figures: dict[str, Any]) -> str:
    """Format the figures of `run` for a person."""
    lines = [
        f"{figures['pattern']}, {figures['microbatches']} microbatches, 1 rank, nothing to hide, "
        f"medians of {figures['repeats']} interleaved repetitions"
    ]
    for width in figures["widths"]:
        lines.append(
            f"width {width['hidden']:>5}: eager {width['eager_ms']:9.1f} ms, fused {width['fused_ms']:9.1f} ms, "
            f"{width['fused_over_eager']:.3f} x eager, bitwise equal: {'yes' if width['bitwise_equal'] else 'NO'}"
        )
    return "\n".join(lines)
