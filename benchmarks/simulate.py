"""What a step of a described model would take on machines that are not here, under each policy.

One rank's step of M microbatches is simulated (`fxoverlap.schedule.simulate`): the forward of the first one, then each
forward beside the backward of the microbatch before, then the last backward. A pipeline stage runs more forwards ahead:
with `warmup` w, forward i runs beside backward i - w. `auto_pair` is `auto` with `ramp="pair"`: the first two forwards
run beside each other, and so do the last two backwards; it needs two microbatches and no other warm-up. The optimizer,
the reduction of gradients, and a pipeline's bubbles and transfers are not in the step.

Figures of each policy:

- `step_ms`: from the first issue until every lane is done; `speedup`: that of `sequential` over it;
- `exposed_pct`: share of the step in which token exchanges are in flight and no node computes;
- `overlap_pct`: share of the time in which token exchanges are in flight, in which nodes compute;
- `peak_bytes`: most bytes of activations and their gradients alive at one time.

`bound_ms` is what no order of the same nodes can beat: the larger of the compute lane's busy time, with the share that
communication takes of it, and of the busiest process group's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fxoverlap.benchmarks.described import Setup, described
from fxoverlap.benchmarks.models import Model
from fxoverlap.config import OverlapConfig
from fxoverlap.errors import ConfigError
from fxoverlap.hardware import Hardware
from fxoverlap.ir import ChunkGraph, CostTable, Lane, Round
from fxoverlap.schedule import build_pair, build_plan, rounds_with
from fxoverlap.schedule.simulate import Simulation, simulate

POLICIES = ("sequential", "megatron", "auto")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is simulated."""

    model: Model
    hardware: Hardware
    setup: Setup
    microbatches: int = 8
    warmup: int = 1


def run(settings: Settings) -> dict[str, Any]:
    """Simulate a step under each policy; the figures that this module's docstring names. Raises ConfigError."""
    if not 1 <= settings.warmup <= settings.microbatches:
        raise ConfigError(
            f"warmup is {settings.warmup}; expected 1 to {settings.microbatches}, the microbatches of a step."
        )
    chunk = described(settings.model, settings.hardware, settings.setup)
    policies = POLICIES if settings.warmup > 1 or settings.microbatches < 2 else (*POLICIES, "auto_pair")
    steps = {policy: simulate(rounds(chunk, settings, policy)) for policy in policies}
    slowest = steps["sequential"].makespan
    bound = settings.microbatches * _busiest(chunk, settings.hardware)
    link, setup = settings.hardware, settings.setup
    return {
        "model": settings.model.name,
        "hardware": link.name,
        **asdict(setup),
        "recompute": setup.recompute and f"{setup.recompute.method}:{setup.recompute.num_layers}",
        "layers": chunk.layers,
        "is_stage": setup.layers is not None,
        "microbatches": settings.microbatches,
        "warmup": settings.warmup,
        "policies": {policy: _figures(step, slowest) for policy, step in steps.items()},
        "bound_ms": 1e3 * bound,
        "compute_ms": 1e3 * settings.microbatches * _seconds(chunk, Lane.COMPUTE),
        "comm_ms": 1e3 * settings.microbatches * _seconds(chunk, Lane.COMM),
        "link": {
            "domain": link.domain,
            "fast_gb_per_s": link.fast_bytes_per_s / 1e9,
            "network_gb_per_s": link.network_bytes_per_s / 1e9,
            "latency_us": 1e6 * link.latency_s,
            "efficiency": link.efficiency,
        },
    }


def rounds(chunk: ChunkGraph, settings: Settings, policy: str) -> list[Round]:
    """The rounds of a step of microbatches that are all this chunk."""
    config = OverlapConfig(schedule=policy.removesuffix("_pair"))
    costs = CostTable(chunk.costs, settings.hardware, f"described {settings.hardware.name}")
    if policy.endswith("_pair"):
        ends = {kind: build_pair(kind, chunk, chunk, config, costs) for kind in ("FF", "BB")}
        return rounds_with(ends | {"FB": build_plan(chunk, chunk, config, costs)}, settings.microbatches, pair=True)
    pairs = ((chunk, None), (chunk, chunk), (None, chunk))
    first, both, last = (build_plan(f, b, config, costs) for f, b in pairs)
    ahead, count = settings.warmup, settings.microbatches
    return [
        *(Round(first, {"F": i}) for i in range(ahead)),
        *(Round(both, {"F": i, "B": i - ahead}) for i in range(ahead, count)),
        *(Round(last, {"B": i}) for i in range(count - ahead, count)),
    ]


def text(figures: dict[str, Any]) -> str:
    """Format the figures of `run` for a person."""
    link = figures["link"]
    part = f"a stage of {figures['layers']} MoE layers" if figures["is_stage"] else f"all {figures['layers']} layers"
    ahead = f", {figures['warmup']} forwards ahead" if figures["warmup"] > 1 else ""
    lines = [
        f"{figures['model']} on {figures['hardware']}: {part}, {figures['ep']} ranks share the experts,",
        f"{figures['microbatches']} microbatches of {figures['seq']} tokens a rank{ahead}, "
        f"{'recompute ' + figures['recompute'] if figures['recompute'] else 'no recompute'}, "
        f"dispatcher {figures['dispatcher']}",
        f"links: {link['fast_gb_per_s']:g} GB/s among {link['domain']} ranks, {link['network_gb_per_s']:g} GB/s "
        f"beyond, {link['latency_us']:g} us; efficiency of links, memory and arithmetic {link['efficiency']:g}",
        "",
        f"{'policy':<12}{'step ms':>10}{'speed-up':>10}{'exposed':>10}{'overlap':>10}{'peak GB':>10}{'x bound':>10}",
    ]
    for policy, each in figures["policies"].items():
        above = each["step_ms"] / figures["bound_ms"]
        lines.append(
            f"{policy:<12}{each['step_ms']:>10.1f}{each['speedup']:>10.3f}{each['exposed_pct']:>8.1f} %"
            f"{each['overlap_pct']:>8.1f} %{each['peak_bytes'] / 1e9:>10.2f}{above:>10.3f}"
        )
    lines.append(
        f"{'bound':<12}{figures['bound_ms']:>10.1f}   compute alone {figures['compute_ms']:.1f} ms, exchanges alone "
        f"{figures['comm_ms']:.1f} ms"
    )
    return "\n".join(lines)


def _figures(step: Simulation, slowest: float) -> dict[str, float | None]:
    return {
        "step_ms": 1e3 * step.makespan,
        "exposed_pct": 100 * step.exposed / step.makespan,
        "overlap_pct": step.overlap_pct,
        "peak_bytes": step.peak_bytes,
        "speedup": slowest / step.makespan,
    }


def _busiest(chunk: ChunkGraph, hardware: Hardware) -> float:
    """Time for which one microbatch keeps the busier lane, in seconds."""
    comm = _seconds(chunk, Lane.COMM)
    return max(_seconds(chunk, Lane.COMPUTE) + comm * hardware.comm_share, comm)


def _seconds(chunk: ChunkGraph, lane: Lane) -> float:
    return sum(chunk.costs[node.name].seconds for node in chunk.nodes if node.lane is lane)
