"""Live bytes of steps on two ranks, to which unequal numbers of rows come: predicted by the rows that occurred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_memory_curve import differing, peaks
from toys import RawModel, batches, toy
from two_ranks import TwoRanks

import fxoverlap as fxo
from fxoverlap.schedule.memory import peak_bytes

MOST = 3


def all_to_rank_0(model: fxo.models.HybridModel) -> fxo.models.HybridModel:
    for layer in model.layers:
        if hasattr(layer, "expert_bias"):
            layer.expert_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    return model


def raw_to_rank_0(model: RawModel) -> RawModel:
    with torch.no_grad():
        for layer in model.layers:
            layer.router.weight[1] = -layer.router.weight[0]  # one of the two is positive, the others are 0
            layer.router.weight[2:] = 0
    return model


RANKED: dict[str, Callable[[dist.ProcessGroup], Any]] = {
    "unequal rows": lambda group: toy("E", group),
    "no rows on a rank": lambda group: all_to_rank_0(toy("E", group, selection_bias=True)),
    "unequal list splits": lambda group: RawModel(group, 1),
    "empty list splits": lambda group: raw_to_rank_0(RawModel(group, 1)),
}


def on_ranks(rank: int) -> dict[str, Any]:
    """What each model's steps hold on this rank, and what is predicted without having run."""
    group = dist.group.WORLD
    found: dict[str, Any] = {}
    for name, make in RANKED.items():
        overlapped = fxo.transform(make(group), fxo.OverlapConfig(costs="cpu"))
        found[name] = {count: peaks(overlapped, batches(count, rank, tokens=32)) for count in (1, MOST)}
        report = overlapped.report()
        rounds = overlapped._planner.latest_rounds(MOST)
        balanced = peak_bytes(rounds, "balanced")
        found[f"{name}, predicted"] = (balanced, report.predicted_peak_bytes, report.predicted_worst_bytes)
    return found


@pytest.fixture(scope="module")
def ranks(two_ranks: TwoRanks) -> list[dict[str, Any]]:
    return two_ranks.run(on_ranks, timeout_s=300)


@pytest.mark.parametrize("name", RANKED)
@pytest.mark.parametrize("rank", [0, 1])
def test_rows_that_occurred(ranks: list[dict[str, Any]], name: str, rank: int) -> None:
    assert differing(ranks[rank][name]) == {}


def test_the_worst_case_is_that_all_tokens_come_to_this_rank(ranks: list[dict[str, Any]]) -> None:
    for name in RANKED:
        balanced, imbalanced, worst = ranks[0][f"{name}, predicted"]
        assert balanced < imbalanced < worst
        assert ranks[1][f"{name}, predicted"] == ranks[0][f"{name}, predicted"]  # by no rows that occurred
    for name in ("no rows on a rank", "empty list splits"):
        _, measured = ranks[0][name][MOST]
        assert measured == ranks[0][f"{name}, predicted"][2]
        assert ranks[1][name][MOST][1] < ranks[1][f"{name}, predicted"][0]
