"""How much of the communication a step hides, between two ranks that are joined by a slow link.

The ranks run on this machine, each in a network namespace of its own; a shaped veth pair joins the two. That needs
root and iproute2. Without them the ranks talk over loopback, `shaped` is false, and the figures mean little: there
communication is processor time, which cannot be hidden.

One model, whole steps without optimizer, medians over interleaved repetitions on rank 0, in milliseconds:

- `eager_ms`: one microbatch after the other, forward and backward;
- `sequential_ms`, `fused_ms`: `OverlappedModel.step` with `schedule="sequential"` and with the default schedule;
- `compute_ms`: the eager step with every all-to-all replaced by a local copy of the same number of rows;
- `comm_ms`: the all-to-alls of one step alone, one after the other; `comm_cpu_ms` is the processor time they take.

Eager is honest if `eager_ms` is about `compute_ms + comm_ms`. Percentages, of the communication that is hidden:

- `overlap_step_pct`: 100 * (compute + comm - fused) / comm, for the whole step;
- `overlap_pct`: the same in the steady state, which is what a step of M microbatches takes longer than one of 2. Null
  with fewer than 3 microbatches.
"""

import contextlib
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

import fxoverlap as fxo
from fxoverlap.benchmarks.exchanges import exchange_again, recorded, without_exchanges
from fxoverlap.benchmarks.link import missing_for_two_hosts, two_hosts
from fxoverlap.benchmarks.timing import interleaved
from fxoverlap.benchmarks.workload import Settings, eager_step, everywhere, hidden_pct, outcome, same
from fxoverlap.launch import launch


def run(settings: Settings) -> dict[str, Any]:
    """Measure on two ranks and return the figures that this module's docstring and `Settings` name.

    Raises ConfigError if the pattern has no experts, LaunchError if a rank fails, and passes on KeyboardInterrupt; the
    namespaces are removed in any case.
    """
    if "E" not in settings.pattern:
        raise ValueError(
            f"pattern: expected an E, as experts are what ranks exchange tokens for, got {settings.pattern!r}"
        )
    with contextlib.ExitStack() as stack:
        reason = missing_for_two_hosts()
        prepare = None
        if reason is None:
            try:
                prepare = stack.enter_context(two_hosts(settings.rate))
            except subprocess.CalledProcessError as error:
                reason = f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}"
        figures = launch(_measure, 2, settings, prepare=prepare, timeout_s=3600)[0]
    shaped: dict[str, Any] = {"shaped": reason is None}
    if reason is not None:
        shaped["not_shaped_because"] = reason
    return shaped | asdict(settings) | figures


def _measure(rank: int, settings: Settings) -> dict[str, Any]:
    """Measure as one rank, and return the figures."""
    group = dist.group.WORLD
    assert group is not None
    model = settings.model(group)
    batches = settings.batches(rank)
    sequential = fxo.transform(
        model, fxo.OverlapConfig(settings.pattern, schedule="sequential"), example_inputs=batches[0]
    )
    fused = fxo.transform(model, fxo.OverlapConfig(settings.pattern), example_inputs=batches[0])
    exchanges = recorded(lambda: eager_step(model, batches), group)

    def compute() -> None:
        with without_exchanges(exchanges):
            eager_step(model, batches)

    equal = same(
        outcome(model, lambda: eager_step(model, batches)),
        outcome(model, lambda: sequential.step(batches, outputs=False).losses),
        outcome(model, lambda: fused.step(batches, outputs=False).losses),
    )
    variants: dict[str, Callable[[], object]] = {
        "eager": lambda: eager_step(model, batches),
        "sequential": lambda: sequential.step(batches, outputs=False),
        "fused": lambda: fused.step(batches, outputs=False),
        "compute": compute,
        "comm": lambda: exchange_again(exchanges, group),
    }
    steady = settings.microbatches > 2
    if steady:
        variants["fused_2"] = lambda: fused.step(batches[:2], outputs=False)

    def before() -> None:
        model.zero_grad(set_to_none=True)
        dist.barrier()

    for variant in variants.values():
        before()
        variant()
    times = interleaved(variants, settings.repeats, before)
    ms = {name: variant.ms for name, variant in times.items()}
    overlap_pct = None
    if steady:
        share = 1 - 2 / settings.microbatches
        overlap_pct = hidden_pct(ms["compute"] * share, ms["comm"] * share, ms["fused"] - ms["fused_2"])
    return {
        "bitwise_equal": everywhere(equal),
        **{f"{name}_ms": ms[name] for name in ("eager", "sequential", "fused", "compute", "comm")},
        "comm_cpu_ms": times["comm"].cpu_ms,
        "overlap_pct": overlap_pct,
        "overlap_step_pct": hidden_pct(ms["compute"], ms["comm"], ms["fused"]),
        "fused_over_eager": ms["fused"] / ms["eager"],
        "eager_over_parts": ms["eager"] / (ms["compute"] + ms["comm"]),
        "all_to_alls": len(exchanges),
    }


def text(figures: dict[str, Any]) -> str:
    """Format the figures of `run` for a person."""
    link = f"a link of {figures['rate']}" if figures["shaped"] else "loopback"
    lines = [
        f"{figures['pattern']}, {figures['microbatches']} microbatches of {figures['tokens']} tokens,",
        f"2 ranks over {link}, medians of {figures['repeats']} interleaved repetitions",
    ]
    if not figures["shaped"]:
        lines.append(f"shaped: false ({figures['not_shaped_because']})")
    eager = figures["eager_ms"]
    for name in ("eager", "sequential", "fused"):
        lines.append(f"{name:>12} {figures[f'{name}_ms']:9.1f} ms  {figures[f'{name}_ms'] / eager:5.2f} x eager")
    lines += [
        f"{'compute':>12} {figures['compute_ms']:9.1f} ms  alone",
        f"{'comm':>12} {figures['comm_ms']:9.1f} ms  alone, {figures['comm_cpu_ms']:.0f} ms of it processor time",
        f"eager / (compute + comm): {figures['eager_over_parts']:.2f}",
        f"communication hidden: {_pct(figures['overlap_step_pct'])} of the step's, "
        f"{_pct(figures['overlap_pct'])} in the steady state",
        f"bitwise equal: {'yes' if figures['bitwise_equal'] else 'NO'}",
    ]
    return "\n".join(lines)


def _pct(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"
