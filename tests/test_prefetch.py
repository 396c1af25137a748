"""`Recompute.prefetch`: a replay begins beside the end of the backward of the layers behind it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from replays import chunk_of, disorder, faults, head_is_first
from toys import batches, toy, train_both

import fxoverlap as fxo
from fxoverlap import cli
from fxoverlap.ir import ChunkGraph, ScheduleNode
from fxoverlap.schedule.simulate import simulate_plan

pytestmark = pytest.mark.usefixtures("shared_captures")

Recompute = fxo.Recompute


def made(asked: fxo.Recompute, group: dist.ProcessGroup, pattern: str = "[*E][*E]") -> ChunkGraph:
    return chunk_of(toy(pattern, group), batches(1)[0], recompute=asked)


def behind(chunk: ChunkGraph, name: str) -> set[str]:
    """What a replay node waits for, of what it does not read."""
    return {earlier for earlier, later in chunk.replays if later == name}


def test_a_replay_waits_as_far_as_its_first_exchange_for_launches_alone(group: dist.ProcessGroup) -> None:
    chunk = made(Recompute("uniform", prefetch=True), group)
    launched = {"L1.post_combine.B", "L1.combine.B", "L1.experts.B", "L1.dispatch.B"}
    assert behind(chunk, "L0.pre_dispatch.R") == launched
    assert behind(chunk, "L0.dispatch.R") == set()
    rest = launched | {"L1.pre_dispatch.B", "L1.experts.W", "L1.pre_dispatch.W"}
    assert behind(chunk, "L0.experts.R") == rest
    assert behind(chunk, "L1.pre_dispatch.R") == {"post_process.B"}
    assert faults(chunk) == []


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        (Recompute("uniform", 2), "EEE"),
        (Recompute("block", 2), "EE-E"),
        (Recompute("uniform"), "E-/E/E"),
        (Recompute("selective", modules=("layers.*",)), "-E-E"),
        (Recompute("uniform"), "--"),
    ],
)
def test_only_edges_to_what_follows_the_last_launch_are_dropped(
    asked: fxo.Recompute, pattern: str, group: dist.ProcessGroup
) -> None:
    strict, early = (made(replace(asked, prefetch=flag), group, pattern) for flag in (False, True))
    assert [node.name for node in strict.nodes] == [node.name for node in early.nodes]
    lost = set(strict.replays) - set(early.replays)
    # What begins a replay waits no longer for what the backward computes behind its last exchange.
    assert all(earlier.endswith(".B") and later.endswith(".R") for earlier, later in lost)
    late = {later for _, later in set(early.replays) - set(strict.replays)}
    reads = {node.name: node.reads for node in early.nodes}
    launched = {value for node in early.nodes if node.lane.value == "comm" for value in node.writes}
    assert all(launched & set(reads[name]) for name in late)
    assert bool(lost) == ("E" in pattern)


@pytest.mark.parametrize("schedule", ["auto", "megatron", "sequential"])
def test_steps_have_the_bits_of_eager_and_plans_the_order_of_replays(schedule: str, group: dist.ProcessGroup) -> None:
    model = toy("E-E/E", group, dropout=0.1)
    config = fxo.OverlapConfig(schedule=schedule, recompute=Recompute("uniform", prefetch=True))
    overlapped = fxo.transform(model, config, example_inputs=batches(1)[0])
    assert train_both(overlapped, lambda step: batches(3, seed=step), steps=2) == []
    for kind in ("FB", "B"):
        assert disorder(overlapped.plan(kind)) == [] and head_is_first(overlapped.plan(kind))


MS = {"dispatch": 20, "combine": 20, "experts": 14, "pre_dispatch": 10, "pre_dispatch.B": 20, "post_process": 5}
"""Milliseconds of a node, by slot, or slot and phase, about those of two machines joined by 1 Gbit/s."""


def table(chunk: ChunkGraph, path: Path) -> Path:
    def ms(node: ScheduleNode) -> float:
        slot = node.slot.value
        return MS.get(f"{slot}.{node.phase.value}", MS.get(slot, 1))

    path.write_text(json.dumps({"nodes": [{"name": node.name, "ms": ms(node)} for node in chunk.nodes]}))
    return path


def test_more_is_hidden_and_a_budget_holds(group: dist.ProcessGroup, tmp_path: Path) -> None:
    model, batch, asked = toy("E-E", group), batches(1)[0], Recompute("uniform")
    costs = table(made(asked, group, "E-E"), tmp_path / "costs.json")

    def of(**config: Any) -> fxo.OverlappedModel:
        overlapped = fxo.transform(model, fxo.OverlapConfig(costs=costs, **config), example_inputs=batch)
        overlapped.step(batches(4))
        return overlapped

    strict, early = of(recompute=asked), of(recompute=replace(asked, prefetch=True))
    took = [simulate_plan(each.plan("B")).makespan for each in (strict, early)]
    assert took[1] < 0.95 * took[0]
    peak = strict.report().predicted_peak_bytes
    assert peak is not None
    bounded = of(recompute=replace(asked, prefetch=True), memory_budget=peak)
    assert bounded.report().predicted_peak_bytes <= peak


def test_without_exchanges_it_is_a_warning(group: dist.ProcessGroup) -> None:
    for pattern, keep in (("--", ()), ("E", ("dispatch", "combine"))):
        config = fxo.OverlapConfig(recompute=Recompute("uniform", keep=keep, prefetch=True))
        overlapped = fxo.transform(toy(pattern, group), config, example_inputs=batches(1)[0])
        assert "prefetch has no effect" in " ".join(overlapped.report().warnings)


def test_what_it_may_be() -> None:
    with pytest.raises(fxo.ConfigError, match=r"Recompute\.prefetch is 1; allowed: True or False"):
        Recompute("uniform", prefetch=1)  # type: ignore[arg-type]
    asked = cli._recompute("block:2:keep=dispatch,combine:prefetch")
    assert asked == Recompute("block", 2, keep=("dispatch", "combine"), prefetch=True)
