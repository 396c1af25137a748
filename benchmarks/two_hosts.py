"""How much of the communication a step hides, between two ranks that are joined by a slow link.

The ranks run on this machine, each in a network namespace of its own; a shaped veth pair joins the two. That needs
root and iproute2. Without them the ranks talk over loopback, `shaped` is false, and the figures mean little: there
communication is processor time, which cannot be hidden.

One model, whole steps without optimizer, medians over interleaved repetitions on rank 0, in milliseconds:

- `eager_ms`: one microbatch after the other, forward and backward;
- `sequential_ms`, `megatron_ms`, `auto_ms`: `OverlappedModel.step` under each schedule; `fused_ms`: the default one;
- `auto_pair_ms`: `"auto"` with `ramp="pair"`;
- `compute_ms`: the eager step with every all-to-all replaced by a local copy of the same number of rows;
- `comm_ms`: the all-to-alls of one step alone, one after the other; `comm_cpu_ms` is the processor time they take;
- `bound_ms`: the larger of `compute_ms + comm_cpu_ms` and `comm_ms`, since the processor that computes also sends;
- `predicted_ms`, `predicted_pair_ms`: what the simulator says of `"auto"`, with the costs that its plans were made by.

Eager is honest if `eager_ms` is about `compute_ms + comm_ms`. The searched plans are made from measured costs: a few
steps are profiled before anything is timed. Percentages, as `Report` defines them, of profiled steps of `"auto"`:
`overlap_step_pct` of the whole step, `overlap_pct` of its steady state (null with fewer than 2 microbatches),
`predicted_overlap_pct` what the simulator says of the whole step, `replay_hidden_pct` of the exchanges that a backward
repeats (null without `--recompute`). Recompute is of the schedules; `eager_ms` keeps all activations. With it
`auto_budget_ms` is `"auto"` with no more than 1 % more memory than `"megatron"`, whose replays are exposed, and
`auto_prefetch_ms` with `Recompute.prefetch`, of which `prefetch_hidden_pct` is what `replay_hidden_pct` is of `"auto"`;
`<schedule>_peak_bytes` are the predicted peaks.
"""

import contextlib
import functools
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

import fxoverlap as fxo
from fxoverlap.benchmarks.exchanges import exchange_again, recorded, without_exchanges
from fxoverlap.benchmarks.link import missing_for_two_hosts, two_hosts
from fxoverlap.benchmarks.timing import interleaved
from fxoverlap.benchmarks.workload import Batch, Settings, eager_step, everywhere, outcome, same
from fxoverlap.errors import ConfigError
from fxoverlap.launch import launch

POLICIES: dict[str, dict[str, Any]] = {
    "sequential": {"schedule": "sequential"},
    "megatron": {"schedule": "megatron"},
    "auto": {},
    "auto_pair": {"ramp": "pair"},
}
"""What is timed beside eager: fields of `OverlapConfig` by the name of the figure."""

OF_RECOMPUTE = ("auto_budget", "auto_prefetch")
"""What is timed besides under recompute."""

FIXED = ("sequential", "megatron")

_PROFILED = 3


def run(settings: Settings) -> dict[str, Any]:
    """Measure on two ranks and return the figures that this module's docstring and `Settings` name.

    Raises ConfigError if the pattern has no experts, LaunchError if a rank fails, and passes on KeyboardInterrupt; the
    namespaces are removed in any case.
    """
    refuse_without_experts(settings.pattern)
    return asdict(settings) | on_two_hosts(settings.rate, _measure, settings)


def refuse_without_experts(pattern: str) -> None:
    """Raise ConfigError if the pattern has no layer that exchanges tokens."""
    if "E" not in pattern:
        raise ConfigError(f"pattern: expected an E, as experts are what ranks exchange tokens for, got {pattern!r}")


def on_two_hosts(rate: str, measure: Callable[..., dict[str, Any]], *args: object) -> dict[str, Any]:
    """Run `measure(rank, *args)` on two ranks; the figures of the first, and whether the link between them is shaped.

    Raises LaunchError if a rank fails, and passes on KeyboardInterrupt; the namespaces are removed in any case.
    """
    with contextlib.ExitStack() as stack:
        reason = missing_for_two_hosts()
        prepare = None
        if reason is None:
            try:
                prepare = stack.enter_context(two_hosts(rate))
            except subprocess.CalledProcessError as error:
                reason = f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}"
        figures = launch(measure, 2, *args, prepare=prepare, timeout_s=3600)[0]
    shaped: dict[str, Any] = {"shaped": reason is None}
    if reason is not None:
        shaped["not_shaped_because"] = reason
    return shaped | figures


def _measure(rank: int, settings: Settings) -> dict[str, Any]:
    """Measure as one rank, and return the figures."""
    group = dist.group.WORLD
    assert group is not None
    model, batches = settings.model(group), settings.batches(rank)
    overlapped = {
        name: fxo.transform(
            model,
            fxo.OverlapConfig(settings.pattern, recompute=settings.recompute, **choices),
            example_inputs=batches[0],
        )
        for name, choices in POLICIES.items()
    }
    if settings.recompute is not None:
        overlapped["auto_budget"] = _within_memory_of(overlapped["megatron"], settings, batches)
        prefetch = fxo.OverlapConfig(settings.pattern, recompute=replace(settings.recompute, prefetch=True))
        overlapped["auto_prefetch"] = fxo.transform(model, prefetch, example_inputs=batches[0])
    exchanges = recorded(lambda: eager_step(model, batches), group)

    def before() -> None:
        model.zero_grad(set_to_none=True)
        dist.barrier()

    def compute() -> None:
        with without_exchanges(exchanges):
            eager_step(model, batches)

    searched = [name for name in overlapped if name not in FIXED]
    for name in searched:
        profile_steps(overlapped[name], batches, before)
    steps: dict[str, Callable[[], list[Tensor]]] = {"eager": lambda: eager_step(model, batches)}
    for name, each in overlapped.items():
        steps[name] = functools.partial(_step, each, batches)
    equal = same(*(outcome(model, step) for step in steps.values()))
    predicted = {name: each.report() for name, each in overlapped.items()}
    variants = {**steps, "compute": compute, "comm": lambda: exchange_again(exchanges, group)}
    for variant in ("compute", "comm"):
        before()
        variants[variant]()
    times = interleaved(variants, settings.repeats, before)
    ms = {name: variant.ms for name, variant in times.items()}
    measured = _profiled("auto", overlapped, batches, before)
    prefetching = _profiled("auto_prefetch", overlapped, batches, before)
    assert measured is not None
    comm_cpu = times["comm"].cpu_ms
    return {
        "bitwise_equal": everywhere(equal),
        **{f"{name}_ms": value for name, value in ms.items()},
        "fused_ms": ms["auto"],
        "comm_cpu_ms": comm_cpu,
        "bound_ms": max(ms["compute"] + comm_cpu, ms["comm"]),
        "predicted_ms": predicted["auto"].predicted_step_ms,
        "predicted_pair_ms": predicted["auto_pair"].predicted_step_ms,
        "predicted_overlap_pct": predicted["auto"].predicted_overlap_pct,
        **{f"{name}_peak_bytes": each.predicted_peak_bytes for name, each in predicted.items()},
        "overlap_pct": measured.steady_overlap_pct,
        "overlap_step_pct": measured.overlap_pct,
        "replay_hidden_pct": measured.replay_hidden_pct,
        "prefetch_hidden_pct": None if prefetching is None else prefetching.replay_hidden_pct,
        "fused_over_eager": ms["auto"] / ms["eager"],
        "eager_over_parts": ms["eager"] / (ms["compute"] + ms["comm"]),
        "all_to_alls": len(exchanges),
    }


def _profiled(
    name: str, overlapped: Mapping[str, fxo.OverlappedModel], batches: Sequence[Batch], before: Callable[[], None]
) -> fxo.Report | None:
    """What profiled steps of one of the models say, if it is there."""
    if name not in overlapped:
        return None
    profile_steps(overlapped[name], batches, before)
    return overlapped[name].report()


def _within_memory_of(other: fxo.OverlappedModel, settings: Settings, batches: Sequence[Batch]) -> fxo.OverlappedModel:
    """The model under `"auto"`, with 1 % more memory at most than another one takes for a step."""
    _step(other, batches)
    other.module.zero_grad(set_to_none=True)
    peak = other.report().predicted_peak_bytes
    assert peak is not None
    config = fxo.OverlapConfig(settings.pattern, recompute=settings.recompute, memory_budget=int(1.01 * peak))
    return fxo.transform(other.module, config, example_inputs=batches[0])


def _step(overlapped: fxo.OverlappedModel, batches: Sequence[Batch]) -> list[Tensor]:
    return overlapped.step(batches, outputs=False).losses


def profile_steps(overlapped: fxo.OverlappedModel, batches: Sequence[Batch], before: Callable[[], None]) -> None:
    """Profile a few steps; the next one plans with what they took."""
    before()
    _step(overlapped, batches)
    with overlapped.profile():
        for _ in range(_PROFILED):
            before()
            _step(overlapped, batches)


def text(figures: dict[str, Any]) -> str:
    """Format the figures of `run` for a person."""
    lines = [
        f"{figures['pattern']}, {figures['microbatches']} microbatches of {figures['tokens']} tokens,",
        *where(figures),
    ]
    eager, bound = figures["eager_ms"], figures["bound_ms"]
    lines.append(f"{'':>13} {'ms':>9}  {'x eager':>8} {'x bound':>8}")
    for name in ("eager", *(each for each in (*POLICIES, *OF_RECOMPUTE) if f"{each}_ms" in figures)):
        took = figures[f"{name}_ms"]
        lines.append(f"{name:>13} {took:9.1f}  {took / eager:8.3f} {took / bound:8.3f}")
    lines += [
        f"{'bound':>13} {bound:9.1f}  compute alone {figures['compute_ms']:.1f}, exchanges alone "
        f"{figures['comm_ms']:.1f}, {figures['comm_cpu_ms']:.1f} of it processor time",
        _predicted("auto", figures["auto_ms"], figures["predicted_ms"]),
        _predicted("auto_pair", figures["auto_pair_ms"], figures["predicted_pair_ms"]),
        f"overlap of auto: {pct(figures['overlap_step_pct'])} of the step "
        f"(predicted {pct(figures['predicted_overlap_pct'])}), {pct(figures['overlap_pct'])} in the steady state",
        *_replayed(figures),
        f"eager / (compute + comm): {figures['eager_over_parts']:.2f}",
        f"bitwise equal: {'yes' if figures['bitwise_equal'] else 'NO'}",
    ]
    return "\n".join(lines)


def where(figures: dict[str, Any]) -> list[str]:
    """What joined the ranks, and how often they ran."""
    link = f"a link of {figures['rate']}" if figures["shaped"] else "loopback"
    lines = [f"2 ranks over {link}, medians of {figures['repeats']} interleaved repetitions"]
    return lines if figures["shaped"] else [*lines, f"shaped: false ({figures['not_shaped_because']})"]


def _predicted(name: str, took: float, predicted: float) -> str:
    return f"{name} was predicted to take {predicted:.1f} ms, and took {took / predicted:.3f} x that"


def _replayed(figures: dict[str, Any]) -> list[str]:
    hidden = figures["replay_hidden_pct"]
    if hidden is None:
        return []
    peaks = ", ".join(f"{name} {figures[f'{name}_peak_bytes'] / 1e6:.1f}" for name in (*POLICIES, *OF_RECOMPUTE))
    early = pct(figures["prefetch_hidden_pct"])
    return [
        f"replayed exchanges of auto: {pct(hidden)} hidden, with prefetch {early}",
        f"predicted peaks in MB: {peaks}",
    ]


def pct(value: float | None) -> str:
    """A percentage for a person."""
    return "-" if value is None else f"{value:.1f} %"
