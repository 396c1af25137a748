"""The demonstration: train one small model twice, eager and overlapped, and compare every bit.

Ranks on this machine's loopback train a byte-level language model of attention and mixture-of-experts layers on the
source text of Python's standard library. Both copies start alike, see the same bytes, and take the same optimizer
steps. Losses of every step, and all parameters and buffers at the end, must be equal on every rank.

`overlap_pct` is the median of five more steps after the training, on rank 0: in how much of the time that token
exchanges are in flight the rank computes. For eager, which waits for every exchange at once, it is about 0. Loopback
moves data by processor time, so a high overlap does not make the demonstration fast: `fxoverlap bench two-hosts` has a
slow link.
"""

import functools
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxoverlap as fxo
from fxoverlap.benchmarks.exchanges import computing_pct, recorded
from fxoverlap.benchmarks.workload import Batch, eager_step, everywhere, same
from fxoverlap.launch import launch
from fxoverlap.models import HybridModel

TIMELINE = "timeline.json"

_BAR = 30  # characters
_PROFILED = 5  # steps of each side, after the training


@dataclass(frozen=True, slots=True)
class Settings:
    """What the demonstration trains."""

    pattern: str = "[*E][*E]"
    ranks: int = 2
    steps: int = 30
    microbatches: int = 4
    tokens: int = 256  # bytes in a microbatch
    out: str = "fxoverlap-demo"  # folder for the graph dump


def run(settings: Settings) -> dict[str, Any]:
    """Train on all ranks, print a line a step and a summary, and return the summary's figures.

    Raises LaunchError if a rank fails, and passes on KeyboardInterrupt.
    """
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = launch(_train, settings.ranks, settings, timeout_s=7200)[0]
    print(_summary(figures))
    return figures


def _train(rank: int, settings: Settings) -> dict[str, Any]:
    """Train as one rank, and return the figures; rank 0 prints."""
    group = dist.group.WORLD
    assert group is not None
    text = _standard_library()
    eager, twin = _model(settings, group), _model(settings, group)
    scale = 1 / (settings.microbatches * settings.ranks)
    examples = _batches(text, settings, rank, step=0)
    began = time.perf_counter()
    overlapped = fxo.transform(twin, fxo.OverlapConfig(settings.pattern, grad_scale=scale), example_inputs=examples[0])
    line = _Lines(rank, settings.steps)
    line.say(
        f"{settings.pattern} on {len(text):,} bytes of Python: {settings.ranks} ranks of "
        f"{sum(weight.numel() for weight in eager.parameters()):,} parameters, {settings.microbatches} microbatches "
        f"of {settings.tokens} bytes a step; transformed in {time.perf_counter() - began:.1f} s"
    )
    line.say(f"{'step':>6} {'loss':>9} {'eager ms':>9} {'fused ms':>9}")

    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (eager, twin)]
    losses_equal, losses, eager_ms, fused_ms = True, [], [], []
    for step in range(settings.steps):
        batches = _batches(text, settings, rank, step)
        sides = {
            "eager": functools.partial(eager_step, eager, batches, scale),
            "fused": functools.partial(_fused_step, overlapped, batches),
        }
        # Neither side always goes first.
        results = {name: _timed(sides[name]) for name in sorted(sides, reverse=step % 2 == 1)}
        for model, optimizer in zip((eager, twin), optimizers, strict=True):
            _sum_dense_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        losses_equal &= same(results["eager"][0], results["fused"][0])
        loss = torch.stack(results["fused"][0]).mean() / settings.ranks
        dist.all_reduce(loss)
        losses.append(loss.item())
        eager_ms.append(results["eager"][1])
        fused_ms.append(results["fused"][1])
        line.say(f"{step:>6} {losses[-1]:9.4f} {eager_ms[-1]:9.1f} {fused_ms[-1]:9.1f}", done=step + 1)

    state_equal = same(*([*model.parameters(), *model.buffers()] for model in (eager, twin)))
    exchange_figures = _exchange_figures(
        functools.partial(eager_step, eager, examples, scale), group, settings.microbatches
    )
    with overlapped.profile():
        for _ in range(_PROFILED):
            dist.barrier()
            _fused_step(overlapped, examples)
    if rank == 0:
        _dump(overlapped, Path(settings.out))
    return {
        "bitwise_equal": everywhere(losses_equal and state_equal),
        "ranks": settings.ranks,
        "steps": settings.steps,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "eager_ms": statistics.median(eager_ms),
        "fused_ms": statistics.median(fused_ms),
        "speed_ratio": statistics.median(e / f for e, f in zip(eager_ms, fused_ms, strict=True)),
        "overlap_pct": overlapped.report().overlap_pct,
        **exchange_figures,
        "pattern": settings.pattern,
        "dump": settings.out,
        "timeline": f"{settings.out}/{TIMELINE}",
    }


def _model(settings: Settings, group: dist.ProcessGroup) -> HybridModel:
    return HybridModel(
        settings.pattern, dim=128, vocab_size=256, num_experts=8, expert_dim=128, top_k=2, group=group, seed=0
    )


def _standard_library(limit: int = 1 << 20) -> Tensor:
    """Return the first `limit` bytes of the standard library's top-level modules, by name: uint8 [bytes]."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def _batches(text: Tensor, settings: Settings, rank: int, step: int) -> list[Batch]:
    """Draw one rank's microbatches of one step: bytes and the bytes that follow, int64 [1, tokens] each."""
    generator = torch.Generator().manual_seed(step * settings.ranks + rank)
    starts = torch.randint(len(text) - settings.tokens, (settings.microbatches,), generator=generator)
    pieces = [text[start : start + settings.tokens + 1].long().unsqueeze(0) for start in starts.tolist()]
    return [(piece[:, :-1].contiguous(), piece[:, 1:].contiguous()) for piece in pieces]


def _fused_step(overlapped: fxo.OverlappedModel, batches: Sequence[Batch]) -> list[Tensor]:
    return overlapped.step(batches, outputs=False).losses


def _timed(step: Callable[[], list[Tensor]]) -> tuple[list[Tensor], float]:
    """Run a step that all ranks begin together; return its losses and its milliseconds."""
    dist.barrier()
    began = time.perf_counter()
    losses = step()
    return losses, (time.perf_counter() - began) * 1e3


def _exchange_figures(eager: Callable[[], object], group: dist.ProcessGroup, microbatches: int) -> dict[str, Any]:
    """Count the exchanges of an eager step, and measure in how much of their time eager steps compute."""
    exchanges = recorded(eager, group)
    tokens = sum(exchange.counts is None for exchange in exchanges)
    shares = [computing_pct(eager, group) for _ in range(_PROFILED)]
    return {
        "eager_overlap_pct": statistics.median(share for share in shares if share is not None) if tokens else None,
        "exchanges_a_microbatch": tokens // microbatches,
        "counts_a_microbatch": (len(exchanges) - tokens) // microbatches,
    }


def _sum_dense_gradients(model: nn.Module) -> None:
    """Add up over ranks the gradients of what every rank holds; an expert's gradient has all ranks' tokens in it."""
    for name, parameter in model.named_parameters():
        if not name.endswith(("w_gate_up", "w_down")) and parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def _dump(overlapped: fxo.OverlappedModel, folder: Path) -> None:
    """Write the node table and plan, the report, the fused graph as code, and the timeline of the profiled step."""
    (folder / "golden.txt").write_text(overlapped.golden())
    (folder / "report.txt").write_text(f"{overlapped.report()}\n")
    (folder / "fused_graph.txt").write_text(overlapped.fused_graph("FB").print_readable(print_output=False))
    overlapped.timeline(folder / TIMELINE)


class _Lines:
    """Prints lines on rank 0 and, on a terminal, a progress bar below them."""

    def __init__(self, rank: int, total: int) -> None:
        self.on, self.total = rank == 0, total
        self.bar = self.on and sys.stdout.isatty()

    def say(self, line: str, done: int = 0) -> None:
        """Print a line; `done` of the total are then done."""
        if not self.on:
            return
        print(f"\r\x1b[K{line}" if self.bar else line, flush=True)
        if self.bar and 0 < done < self.total:
            filled = _BAR * done // self.total
            print(f"[{'#' * filled}{'.' * (_BAR - filled)}] {done}/{self.total}", end="", flush=True)


def _summary(figures: dict[str, Any]) -> str:
    """Format the figures for a person."""
    overlap = figures["overlap_pct"]
    rows = {
        "bitwise equal": "yes: all losses, parameters and buffers, on every rank"
        if figures["bitwise_equal"]
        else "NO: losses, parameters or buffers differ",
        "loss": f"{figures['loss_first']:.4f} -> {figures['loss_last']:.4f} in {figures['steps']} steps",
        "exchanges a microbatch": f"{figures['exchanges_a_microbatch']} of tokens, "
        f"{figures['counts_a_microbatch']} of counts",
        "medians": f"eager step {figures['eager_ms']:.1f} ms, fused step {figures['fused_ms']:.1f} ms, "
        f"speed ratio of a step {figures['speed_ratio']:.2f}",
        "overlap": "nothing to overlap: no exchange"
        if overlap is None
        else f"rank 0 computes in {overlap:.0f} % of the time that exchanges are in flight "
        f"(eager: {figures['eager_overlap_pct']:.0f} %)",
        "graph dump": f"{figures['dump']}/",
        "timeline": f"{figures['timeline']}, of the last of {_PROFILED} such steps, to be opened in ui.perfetto.dev",
    }
    width = max(map(len, rows))
    return "\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
