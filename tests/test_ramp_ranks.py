"""`ramp="pair"` on two ranks: unequal lengths, no tokens on a rank, hooks that communicate, and failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_bitwise import received_rows, reported, send_to_first_experts
from test_failures import arm, attempt, is_right, tripping
from torch import Tensor
from toys import batches, differences, eager_step, toy, train_both
from two_ranks import TwoRanks

import fxoverlap as fxo

PAIR = fxo.OverlapConfig(ramp="pair")
COUNTS = (2, 3, 5, 1)
"""Microbatches of the steps."""


def unequal_lengths(rank: int) -> list[str]:
    """The ranks have different numbers of tokens, and one of them in every other microbatch another number."""
    lengths = ((8, 8), (5, 8))[rank]
    model = toy("EE", dist.group.WORLD, shared_dim=12, tied=True)

    def make(step: int) -> list[tuple]:
        lengths_of_step = [lengths[(step + i) % 2] for i in range(COUNTS[step])]
        return [batches(1, rank, n, seed=10 * step + i)[0] for i, n in enumerate(lengths_of_step)]

    return train_both(fxo.transform(model, PAIR), make, steps=len(COUNTS))


def nothing_for_rank_1(rank: int) -> list[str]:
    """All tokens go to the experts of rank 0, which keep all of them during training."""
    model = send_to_first_experts(toy("E", dist.group.WORLD))
    overlapped = fxo.transform(model, PAIR)
    found = train_both(overlapped, lambda step: batches(COUNTS[step], rank, seed=step), steps=len(COUNTS))
    return found + [f"received {rows} rows" for rows in received_rows(model, batches(3, rank)) if rank and rows]


def reduced_in_hooks(rank: int) -> list[str]:
    """Each hook sums its parameter's gradient over the ranks, which therefore must fire in one order on both."""
    models = [toy("EE", dist.group.WORLD, shared_dim=12, tied=True) for _ in range(2)]
    sums: list[dict[str, list[Tensor]]] = [{}, {}]
    for model, seen in zip(models, sums, strict=True):
        for name, param in model.named_parameters():
            seen[name] = []

            def hook(gradient: Tensor, found: list[Tensor] = seen[name]) -> None:
                total = gradient.clone()
                dist.all_reduce(total)
                found.append(total)

            param.register_hook(hook)
    eager, ours = models
    eager_step(eager, batches(3, rank))
    fxo.transform(ours, PAIR).step(batches(3, rank))
    wanted, found = sums
    other = [name for name in wanted if not all(map(torch.equal, wanted[name], found[name]))]
    return differences(eager, ours) + [f"sum of {name}" for name in other]


def failing(rank: int) -> dict[str, Any]:
    """What steps of three microbatches raise where one rank fails, or all do, and whether the next step is right."""
    overlapped, found = tripping(dist.group.WORLD, ramp="pair"), {}
    is_right(overlapped, rank)
    for phase, calls, odd in FAILURES:
        overlapped.zero_grad()
        arm("value_error" if odd in (None, rank) else None, phase, calls)
        found[str((phase, calls, odd))] = attempt(overlapped, rank)
        arm(None)
        found[str((phase, calls, odd))]["after"] = is_right(overlapped, rank)
    return found


def failing_hook(rank: int) -> dict[str, Any]:
    """A hook fails on rank 1 at the first gradient of the embedding, behind the launches of a round but the last."""
    overlapped = fxo.transform(toy("E", dist.group.WORLD), PAIR)
    is_right(overlapped, rank)
    overlapped.zero_grad()

    def hook(gradient: Tensor) -> None:
        if rank:
            raise ValueError("from a hook")

    handle = overlapped.module.embed.weight.register_hook(hook)
    found = attempt(overlapped, rank)
    handle.remove()
    return found | {"after": is_right(overlapped, rank)}


EQUAL: tuple[Callable[[int], list[str]], ...] = (unequal_lengths, nothing_for_rank_1, reduced_in_hooks)
FAILURES = [("F", 1, None), ("F", 2, 1), ("B", 2, 1), ("B", 3, None), ("B", 3, 0)]
"""Phase, the number of the microbatch from 1 on, and the rank that fails, None for both."""


def other_ramp(rank: int) -> str:
    """What ranks that were told otherwise get."""
    overlapped = fxo.transform(toy("E", dist.group.WORLD), fxo.OverlapConfig(ramp=("none", "pair")[rank]))
    return str(attempt(overlapped, rank)["text"])


def everything(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {each.__name__: reported(each, rank) for each in EQUAL}
    return found | failing(rank) | {"hook": failing_hook(rank), "other ramp": other_ramp(rank)}


@pytest.fixture(scope="module")
def ranks(two_ranks: TwoRanks) -> list[dict[str, Any]]:
    return two_ranks.run(everything, timeout_s=300)


@pytest.mark.parametrize("name", [each.__name__ for each in EQUAL])
def test_the_same_bits(ranks: list[dict[str, Any]], name: str) -> None:
    assert [each[name] for each in ranks] == [[], []]


@pytest.mark.parametrize("case", FAILURES, ids=str)
def test_failure_is_named_and_the_next_step_is_right(ranks: list[dict[str, Any]], case: tuple) -> None:
    phase, calls, odd = case
    for rank, each in enumerate(ranks):
        found = each[str(case)]
        assert found["text"].startswith("StepError: Node ") and "ValueError: a bad value" in found["text"]
        assert found["clean"] and found["seconds"] < 10
        assert "restart" not in found["text"] and found["after"] == []
        if odd in (None, rank):
            assert f"(phase {phase}) of microbatch {calls - 1} failed" in found["text"]
        else:
            assert f"rank {odd} failed" in found["text"]


def test_failure_behind_the_launches_of_a_round_is_named(ranks: list[dict[str, Any]]) -> None:
    first, second = (each["hook"] for each in ranks)
    assert "pre_process.W (phase W) of microbatch 0 failed: ValueError: from a hook" in second["text"]
    assert first["text"].startswith("StepError: Node ") and "rank 1 failed" in first["text"]
    for each in (first, second):
        assert each["seconds"] < 10 and each["clean"] and each["after"] == []


def test_ranks_with_other_ramps_are_told(ranks: list[dict[str, Any]]) -> None:
    texts = {each["other ramp"] for each in ranks}
    assert len(texts) == 1 and "ramp = 'none'" in texts.pop()
