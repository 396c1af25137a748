"""The most bytes that a step holds at one time: measured by weak references to storages, and predicted from plans.

Two ranks on this machine; figures are those of rank 0. One model, whole steps without optimizer, gradients None before.
Parameters, and what else was alive before the step, do not count; the gradients that it makes do.

Cases, each with `measured_bytes` and `predicted_bytes` (null where there is no plan to predict from):

- `eager`: one microbatch after the other, forward and backward;
- `checkpoint`: the same with `torch.utils.checkpoint` around each logical layer;
- `fused`, `fused_no_delay`, `early_release`: `OverlappedModel.step` with the default config, with `delay_wgrad=False`
  and with `early_release=True`;
- `uniform_1`, `uniform_2`, `block_2`, `selective` (attention), `uniform_1_keep_dispatch`: with `recompute`;
- `uniform_1_megatron`, `uniform_1_sequential`: the first of these in `"megatron"`'s order, in which replays are
  exposed, and one microbatch after the other.

What is measured is the least of several steps: the thread that communicates may let go of what it sent a moment late.
What is predicted is for the rows that exchanges brought in that step.

A fused step holds the beginning of one more microbatch beside what eager holds: its *head start*. It is
`head_start_layers`, the most logical layers that the forward of the FB plan of `fused` has begun and the backward
beside it has not finished (weight gradients included), less the layers of the model; times a layer's share of what the
forward of one microbatch leaves behind in eager. `fused` is to hold at most 1.03 times `eager` plus
`head_start_bytes`: `fused_over_bound` is at most 1.03.

Under recompute the forward of one microbatch leaves `checkpoint_left_bytes`, and a fused step holds those of two.
`uniform_1` is to hold at most 1.03 times `checkpoint` plus these (`uniform_1_over_bound`), and `uniform_1_sequential`,
which has one microbatch in flight as `checkpoint` has, at most 1.03 times `checkpoint` (`sequential_over_checkpoint`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxoverlap as fxo
from fxoverlap.benchmarks.live_bytes import LiveBytes
from fxoverlap.benchmarks.workload import Batch, Settings, eager_step, everywhere, outcome, same
from fxoverlap.errors import ConfigError
from fxoverlap.ir import Phase, Plan
from fxoverlap.launch import launch
from fxoverlap.models import HybridModel, layers
from fxoverlap.models.loss import mean_loss
from fxoverlap.pattern import parse

DEFAULT = Settings(
    pattern="[*E]" * 8, microbatches=4, repeats=3, dim=32, vocab=64, experts=8, expert_dim=32, top_k=2, tokens=512
)
"""Activations are many times the parameters here."""

FUSED: dict[str, dict[str, Any]] = {
    "fused": {},
    "fused_no_delay": {"delay_wgrad": False},
    "early_release": {"early_release": True},
}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "uniform_1": {"recompute": fxo.Recompute("uniform")},
    "uniform_2": {"recompute": fxo.Recompute("uniform", 2)},
    "block_2": {"recompute": fxo.Recompute("block", 2)},
    "selective": {"recompute": fxo.Recompute("selective", modules=("attention",))},
    "uniform_1_keep_dispatch": {"recompute": fxo.Recompute("uniform", keep=("dispatch",))},
    "uniform_1_megatron": {"recompute": fxo.Recompute("uniform"), "schedule": "megatron"},
    "uniform_1_sequential": {"recompute": fxo.Recompute("uniform"), "schedule": "sequential"},
}
"""`attention` stands for the FQNs of the layers that the pattern calls so."""


def run(settings: Settings) -> dict[str, Any]:
    """Measure on two ranks, and return the figures that this module's docstring names, and those of `Settings`.

    Raises ConfigError if the pattern has layers outside brackets or MTP parts, LaunchError if a rank fails, and passes
    on KeyboardInterrupt.
    """
    pattern = parse(settings.pattern)
    if sum(end - begin for begin, end in pattern.groups) < len(pattern.symbols):
        raise ConfigError(f"pattern: expected all layers in brackets, as each is checkpointed, got {pattern}")
    if pattern.mtp is not None:
        raise ConfigError(
            f"pattern: expected no multi-token prediction, which the checkpointed model here does not run, "
            f"got {pattern}; leave out what follows the trunk"
        )
    ranks = launch(_measure, 2, settings, timeout_s=3600)
    figures: dict[str, Any] = ranks[0]
    for case, *others in zip(*(each["cases"] for each in ranks), strict=True):
        case["other_ranks"] = [{key: each[key] for key in ("predicted_bytes", "measured_bytes")} for each in others]
    shown = ("pattern", "microbatches", "repeats", "dim", "tokens", "vocab", "experts", "expert_dim", "top_k")
    return {"ranks": len(ranks), **{key: asdict(settings)[key] for key in shown}, **figures}


def _measure(rank: int, settings: Settings) -> dict[str, Any]:
    """Measure as one rank, and return the figures."""
    group = dist.group.WORLD
    assert group is not None
    model, batches = settings.model(group), settings.batches(rank)
    steps: dict[str, Callable[[], list[Tensor]]] = {
        "eager": lambda: eager_step(model, batches),
        "checkpoint": lambda: eager_step(Checkpointed(model), batches),
    }
    overlapped = {name: fxo.transform(model, config) for name, config in _configs(settings).items()}
    steps |= {name: functools.partial(_step, each, batches) for name, each in overlapped.items()}
    # Captures come before anything is measured.
    results = [outcome(model, step) for step in steps.values()]
    cases: list[dict[str, Any]] = []
    for name, step in steps.items():
        predicted, measured = min(
            (_peaks(model, step, overlapped.get(name)) for _ in range(settings.repeats)), key=lambda each: each[1]
        )
        cases.append({"name": name, "predicted_bytes": predicted, "measured_bytes": measured})
    layers = len(parse(settings.pattern).groups)
    ahead = layers_ahead(overlapped["fused"].plan("FB"), layers)
    head_start = ahead * left_by_forward(model, batches[0]) // layers
    left = left_by_forward(Checkpointed(model), batches[0])
    peaks = {case["name"]: case["measured_bytes"] for case in cases}
    return {
        "bitwise_equal": everywhere(same(*results)),
        "layers": layers,
        "cases": cases,
        "head_start_layers": ahead,
        "head_start_bytes": head_start,
        "fused_over_bound": peaks["fused"] / (peaks["eager"] + head_start),
        "checkpoint_left_bytes": left,
        "uniform_1_over_bound": peaks["uniform_1"] / (peaks["checkpoint"] + left),
        "sequential_over_checkpoint": peaks["uniform_1_sequential"] / peaks["checkpoint"],
    }


def _configs(settings: Settings) -> dict[str, fxo.OverlapConfig]:
    """The configs of the fused cases."""
    attention = tuple(f"layers.{i}" for i, symbol in enumerate(parse(settings.pattern).symbols) if symbol in "*+")
    configs = {}
    for name, choices in (FUSED | RECOMPUTED).items():
        recompute = choices.get("recompute")
        if recompute is not None and recompute.modules:
            choices = {"recompute": replace(recompute, modules=attention)}
        # With costs that are named, no step is planned anew with what it measured.
        configs[name] = fxo.OverlapConfig(settings.pattern, costs="cpu", **choices)
    return configs


def _step(overlapped: fxo.OverlappedModel, batches: Sequence[Batch]) -> list[Tensor]:
    return overlapped.step(batches, outputs=False).losses


def _peaks(
    model: nn.Module, step: Callable[[], list[Tensor]], overlapped: fxo.OverlappedModel | None
) -> tuple[int | None, int]:
    """(predicted, measured) peak bytes of one step from no gradients, which are None again."""
    predicted = None
    dist.barrier()
    if overlapped is None:
        with LiveBytes() as live:
            step()
    else:
        with overlapped.profile():
            with LiveBytes() as live:
                step()
            predicted = overlapped.report().profiled_peak_bytes
    model.zero_grad(set_to_none=True)
    return predicted, live.peak


def left_by_forward(model: nn.Module, batch: Batch) -> int:
    """Bytes that are alive behind the forward of one microbatch in eager."""
    with LiveBytes() as live:
        loss = model(*batch)
    loss.backward()  # on all ranks, as the forward was
    model.zero_grad(set_to_none=True)
    return live.alive


def layers_ahead(plan: Plan, layers: int) -> int:
    """The most layers that the forward of an FB plan has begun and the backward has not finished, less all layers."""
    left = dict.fromkeys(range(layers), 0)
    for each in plan.order:
        if each.mb == "B" and each.node.layer is not None:
            left[each.node.layer] += 1
    begun: set[int] = set()
    ahead = 0
    for each in plan.order:
        if each.node.layer is None:
            continue
        if each.node.phase is Phase.F:
            begun.add(each.node.layer)
        ahead = max(ahead, len(begun) + sum(count > 0 for count in left.values()) - layers)
        if each.mb == "B":
            left[each.node.layer] -= 1
    return ahead


class Checkpointed(nn.Module):
    """A `HybridModel` with `torch.utils.checkpoint` around every `size` bracket groups of its pattern."""

    def __init__(self, model: HybridModel, size: int = 1) -> None:
        super().__init__()
        self.model = model
        groups = model.pattern.groups
        self.segments = [(groups[i][0], groups[i : i + size][-1][1]) for i in range(0, len(groups), size)]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        model = self.model
        hidden, auxiliary = model.embed(tokens), []
        for begin, end in self.segments:
            hidden, more = checkpoint(layers.run, model.layers[begin:end], hidden, None, use_reentrant=False)
            auxiliary += more
        return sum(auxiliary, mean_loss(model.head(model.norm(hidden).flatten(0, -2)), targets))


def text(figures: dict[str, Any]) -> str:
    """Format the figures of `run` for a person."""
    eager = figures["cases"][0]["measured_bytes"]
    lines = [
        f"{figures['layers']} logical layers, {figures['microbatches']} microbatches of {figures['tokens']} tokens, "
        f"{figures['ranks']} ranks, width {figures['dim']}; peak live bytes of a step on rank 0",
        f"{'case':<26}{'measured KB':>12}{'predicted KB':>14}{'pred / meas':>13}{'x eager':>9}",
    ]
    for case in figures["cases"]:
        measured, predicted = case["measured_bytes"], case["predicted_bytes"]
        told = f"{'-':>14}{'-':>13}"
        if predicted is not None:
            told = f"{predicted / 1e3:>14.1f}{predicted / measured:>13.4f}"
        lines.append(f"{case['name']:<26}{measured / 1e3:>12.1f}{told}{measured / eager:>9.3f}")
    lines.append(
        f"head start of one more microbatch: {figures['head_start_layers']} layers, "
        f"{figures['head_start_bytes'] / 1e3:.1f} KB; fused over eager and that: {figures['fused_over_bound']:.3f} "
        f"(at most 1.03)"
    )
    lines.append(
        f"left by the forward of a checkpointed microbatch: {figures['checkpoint_left_bytes'] / 1e3:.1f} KB; uniform_1 "
        f"over checkpoint and that: {figures['uniform_1_over_bound']:.3f}; uniform_1_sequential over checkpoint: "
        f"{figures['sequential_over_checkpoint']:.3f} (at most 1.03)"
    )
    lines.append(f"bitwise equal: {'yes' if figures['bitwise_equal'] else 'NO'}")
    return "\n".join(lines)
