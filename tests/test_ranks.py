"""Ranks agree before a step, or every one of them gets the same error and the next step works."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from shared_captures import shared_captures
from torch import nn
from toys import RawModel, batches, differences, eager_step, toy

import fxoverlap as fxo
from fxoverlap.launch import launch


class FailsOn(nn.Module):
    """The toy, whose forward cannot be traced on one rank."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        self.model, self.fails = model, rank == dist.get_rank()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.fails:
            tokens.numpy()
        return self.model(tokens, targets)


class Reduced(nn.Module):
    """The toy, whose loss is a mean over another group."""

    def __init__(self, group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
        super().__init__()
        self.model, self.other = toy("E", group), other.group_name

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.model(tokens, targets)
        return loss + funcol.all_reduce(loss.detach(), "sum", self.other)


class NoGroup(nn.Module):
    """A loss over all ranks; the group is found in the code only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 4)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        own = self.embed(tokens).square().mean()
        return own + funcol.all_reduce(own.detach(), "sum", dist.group.WORLD.group_name)


def error_of(overlapped: fxo.OverlappedModel, microbatches: list) -> str:
    """Type and text of what a step raises."""
    before = [None if p.grad is None else p.grad.clone() for p in overlapped.parameters()]
    try:
        overlapped.step(microbatches)
    except fxo.FxOverlapError as error:
        after = [p.grad for p in overlapped.parameters()]
        same = all(a is b or torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return f"{type(error).__name__}: {error}" + ("" if same else " [gradients changed]")
    return "no error"


def is_right(overlapped: fxo.OverlappedModel, rank: int) -> bool:
    """Whether a step equals eager in every bit."""
    model = overlapped.module
    model.zero_grad()
    eager = copy.deepcopy(model)
    microbatches = batches(2, rank, seed=7)
    losses = eager_step(eager, microbatches)
    found = overlapped.step(microbatches).losses
    return all(map(torch.equal, losses, found)) and differences(eager, model) == []


@shared_captures()
def disagreements(rank: int) -> dict[str, object]:
    """What each kind of disagreement raises on this rank, and whether the step after it is right."""
    group = dist.group.WORLD
    last = dist.get_world_size() - 1
    found: dict[str, object] = {}

    overlapped = fxo.transform(toy("E", group))
    found["unequal"] = error_of(overlapped, batches(3 if rank == last else 2, rank))
    found["after unequal"] = is_right(overlapped, rank)

    found["untraceable"] = error_of(fxo.transform(FailsOn(toy("E", group), last)), batches(2, rank))
    found["after untraceable"] = is_right(fxo.transform(toy("E", group)), rank)

    schedule = "sequential" if rank == last else "megatron"
    found["config"] = error_of(fxo.transform(toy("E", group), fxo.OverlapConfig(schedule=schedule)), batches(2, rank))
    pattern = "EE" if rank == last else "E"
    found["model"] = error_of(fxo.transform(toy(pattern, group)), batches(2, rank))
    found["delay"] = error_of(
        fxo.transform(toy("E", group), fxo.OverlapConfig(delay_wgrad=rank != last)), batches(2, rank)
    )

    # Where all are told the same there is nothing to disagree about.
    found["nothing"] = error_of(overlapped, [])
    found["nothing on one"] = error_of(overlapped, [] if rank == last else batches(2, rank))
    found["untraceable everywhere"] = error_of(fxo.transform(FailsOn(toy("E", group), rank)), batches(2, rank))

    # Other lengths are no disagreement: shapes are not compared.
    lengths = fxo.transform(toy("E", group))
    found["lengths"] = error_of(lengths, batches(2, rank, tokens=8 + 4 * rank))
    found["after all"] = is_right(overlapped, rank)

    # The modules hold only the name of the group.
    found["by name"] = error_of(fxo.transform(FailsOn(RawModel(group, 1), last)), batches(2, rank))
    found["after by name"] = is_right(fxo.transform(RawModel(group, 1)), rank)

    # The modules hold two groups; both are in the graph, and the second one tells the ranks that the first does not.
    pairs = [dist.new_group([first, first + 1]) for first in range(0, last + 1, 2)]
    found["two groups"] = is_right(fxo.transform(Reduced(group, pairs[rank // 2])), rank)

    # No module holds a group. Last, because the others are in a collective that rank `last` never calls.
    begun = time.monotonic()
    found["no group"] = error_of(fxo.transform(FailsOn(NoGroup(), last)), batches(2, rank))
    found["no group, seconds"] = time.monotonic() - begun
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request) -> list[dict[str, object]]:
    return launch(disagreements, request.param, timeout_s=300)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unequal", ["rank {last}", "3 microbatches", "rank 0", "2"]),
        ("untraceable", ["rank {last}", "CaptureError", "numpy"]),
        ("nothing on one", ["rank {last}", "ConfigError", "there is no microbatch"]),
        ("config", ["rank {last}", "schedule = 'sequential'", "schedule = 'megatron'"]),
        ("delay", ["rank {last}", "delay_wgrad = True", "delay_wgrad = False"]),
        ("model", ["rank {last}", "First difference"]),
        ("by name", ["rank {last}", "CaptureError", "numpy"]),
    ],
)
def test_b63_disagreement_is_the_same_error_on_every_rank(found, case, words) -> None:
    last = len(found) - 1
    assert len({each[case] for each in found}) == 1
    text = str(found[0][case])
    assert text.startswith("PlanMismatchError") and "gradients changed" not in text
    for word in words:
        assert word.format(last=last) in text, text


def test_what_every_rank_refuses_is_each_ranks_own_error(found) -> None:
    assert all(each["nothing"].startswith("ConfigError: step: there is no microbatch") for each in found)
    assert all(each["untraceable everywhere"].startswith("CaptureError") for each in found)


@pytest.mark.parametrize("case", ["after unequal", "after untraceable", "after all", "after by name", "two groups"])
def test_the_step_after_a_disagreement_is_right(found, case) -> None:
    assert [each[case] for each in found] == [True] * len(found)


def test_rank_that_cannot_capture_is_named_where_no_module_holds_the_group(found) -> None:
    last = len(found) - 1
    assert all(each["no group"].startswith("PlanMismatchError") for each in found[:-1])
    assert all(f"rank {last} failed: CaptureError" in each["no group"] for each in found[:-1])
    assert found[-1]["no group"].startswith("CaptureError")
    assert all(each["no group, seconds"] < 20 for each in found)


def test_other_lengths_on_other_ranks_are_no_disagreement(found) -> None:
    assert {each["lengths"] for each in found} == {"no error"}
