"""A step that fails in the middle: the error that every rank gets, what is left behind, and the step after it.

Ranks that fail alone leave their peers in an exchange that will not complete; ranks that fail together do not.
"""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from shared_captures import shared_captures
from torch import nn
from toys import batches, differences, eager_step, same_bits, toy, train_both

import fxoverlap as fxo
from fxoverlap.launch import launch

pytestmark = pytest.mark.usefixtures("shared_captures")

FAULTS: dict[str, Callable[[], Any]] = {}
"""What `fxoverlap_tests::trip` does in forward and in backward when it is armed, by name."""

_armed: dict[str, Any] = {"name": None, "phase": "F", "calls": 0}


def fault(function: Callable[[], Any]) -> Callable[[], Any]:
    FAULTS[function.__name__] = function
    return function


@fault
def value_error() -> None:
    raise ValueError("a bad value")


@fault
def out_of_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 7 GiB")


@fault
def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@fault
def end_the_process() -> None:
    os._exit(3)


def arm(name: str | None, phase: str = "F", calls: int = 1) -> None:
    """Let the `calls`-th trip in this phase end in a fault; None: no fault."""
    _armed.update(name=name, phase=phase, calls=calls)


def trip(x: torch.Tensor, phase: str) -> torch.Tensor:
    if _armed["name"] is not None and _armed["phase"] == phase:
        _armed["calls"] -= 1
        if _armed["calls"] == 0:
            FAULTS[_armed["name"]]()
    return x.clone()


library = torch.library.Library("fxoverlap_tests", "FRAGMENT")
library.define("trip(Tensor x, str phase) -> Tensor")
library.impl("trip", trip, "CPU")
library.impl("trip", lambda x, phase: x.clone(), "Meta")


class Trip(torch.autograd.Function):
    """The identity, with an op in forward and one in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.fxoverlap_tests.trip(x, "F")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.ops.fxoverlap_tests.trip(grad, "B")


class Tripping(nn.Module):
    """The toy with a trip behind one layer, and a collective beside the exchanges that all ranks take part in."""

    def __init__(self, group: dist.ProcessGroup | None, pattern: str = "EE", layer: int = 0) -> None:
        super().__init__()
        self.model = toy(pattern, group)
        self.model.layers[layer].register_forward_hook(
            lambda module, args, output: (
                (Trip.apply(output[0]), *output[1:]) if isinstance(output, tuple) else Trip.apply(output)
            )
        )

        self.group = None if group is None else group.group_name

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.model(tokens, targets)
        return loss if self.group is None else loss + funcol.all_reduce(loss.detach(), "sum", self.group)


def tripping(
    group: dist.ProcessGroup | None, pattern: str = "EE", layer: int = 0, ramp: str = "none"
) -> fxo.OverlappedModel:
    config = fxo.OverlapConfig(hooks="trace", layers="model.layers.*", ramp=ramp)
    return fxo.transform(Tripping(group, pattern, layer), config)


# --- one rank ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_ramp(group: dist.ProcessGroup) -> dict[str, fxo.OverlappedModel]:
    """A model that can be tripped, by ramp; a failed step leaves nothing behind, which is what the tests are about."""
    return {ramp: tripping(group, ramp=ramp) for ramp in ("none", "pair")}


@pytest.mark.parametrize("phase", ["F", "B"])
@pytest.mark.parametrize("name", ["value_error", "out_of_memory", "interrupt"])
def test_error_names_node_phase_and_microbatch(name: str, phase: str, by_ramp: dict[str, fxo.OverlappedModel]) -> None:
    overlapped = by_ramp["none"]
    overlapped.step(batches(1))
    overlapped.zero_grad()
    kept = overlapped.module.model.head.weight
    kept.grad = torch.ones_like(kept)
    values = {key: value.clone() for key, value in overlapped.module.named_parameters()}
    arm(name, phase, calls=2)
    with pytest.raises(fxo.StepError) as caught:
        overlapped.step(batches(3))
    arm(None)
    error = caught.value
    node = "L0.post_combine.F" if phase == "F" else "L1.pre_dispatch.B"
    assert f"Node {node} (phase {phase}) of microbatch 1 failed" in str(error)
    cause = {"value_error": ValueError, "out_of_memory": torch.OutOfMemoryError, "interrupt": KeyboardInterrupt}[name]
    assert type(error.__cause__) is cause
    assert isinstance(error, KeyboardInterrupt) == (name == "interrupt")
    for key, param in overlapped.module.named_parameters():
        assert same_bits(param, values[key])
        assert (param.grad is not None) == (param is kept)
    overlapped.zero_grad()
    assert train_both(overlapped, lambda step: batches(3, seed=step)) == []


@pytest.mark.parametrize("ramp", ["none", "pair"])
def test_no_collective_is_left_in_flight(by_ramp: dict[str, fxo.OverlappedModel], ramp: str) -> None:
    overlapped = by_ramp[ramp]
    overlapped.step(batches(3))
    before = torch._C._distributed_c10d._get_work_registry_size()
    for calls in (1, 2, 3):
        for phase in ("F", "B"):
            arm("value_error", phase, calls)
            with pytest.raises(fxo.StepError):
                overlapped.step(batches(3))
    arm(None)
    assert torch._C._distributed_c10d._get_work_registry_size() == before


def test_tensors_of_a_failed_step_die_with_its_error(by_ramp: dict[str, fxo.OverlappedModel]) -> None:
    overlapped = by_ramp["none"]
    overlapped.step(batches(2))
    overlapped.zero_grad()
    gc.collect()
    before = {id(each) for each in gc.get_objects() if type(each) is torch.Tensor}
    arm("out_of_memory", "B")
    with pytest.raises(fxo.StepError) as caught:
        overlapped.step(batches(2))
    arm(None)
    # What the error's own traceback holds is the inputs of one node, and not the states of two microbatches.
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor and id(each) not in before]
    assert len(alive) < 20
    del caught
    gc.collect()
    left = [weakref.ref(each) for each in alive]
    del alive
    gc.collect()
    assert [each() for each in left if each() is not None and each().dim() > 1] == []


def test_hook_that_raises(group: dist.ProcessGroup) -> None:
    overlapped = fxo.transform(toy("E", group))

    def hook(param: torch.Tensor) -> None:
        raise ValueError("from a hook")

    handle = overlapped.module.embed.weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(fxo.StepError, match=r"pre_process\.[BW] \(phase [BW]\) of microbatch 0 .* from a hook"):
        overlapped.step(batches(2))
    handle.remove()
    assert all(param.grad is None for param in overlapped.parameters())
    assert train_both(overlapped, lambda step: batches(2, seed=step)) == []


# --- several ranks -------------------------------------------------------------------------------------------------


def attempt(overlapped: fxo.OverlappedModel, rank: int, count: int = 3) -> dict[str, Any]:
    """What a step raises on this rank, and how long it took."""
    begun = time.monotonic()
    try:
        overlapped.step(batches(count, rank))
    except fxo.FxOverlapError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "no error"
    clean = all(param.grad is None for param in overlapped.parameters())
    return {"text": text, "seconds": time.monotonic() - begun, "clean": clean}


def is_right(overlapped: fxo.OverlappedModel, rank: int) -> list[str]:
    model = overlapped.module
    model.zero_grad()
    eager = copy.deepcopy(model)
    losses = eager_step(eager, batches(2, rank, seed=9))
    found = overlapped.step(batches(2, rank, seed=9)).losses
    return differences(eager, model) + [f"loss {i}" for i in range(2) if not same_bits(losses[i], found[i])]


def fail_together(rank: int, overlapped: fxo.OverlappedModel) -> dict[str, Any]:
    """Every rank fails in the same node; the step after it must be right."""
    found = {}
    is_right(overlapped, rank)
    for phase in ("F", "B"):
        overlapped.zero_grad()
        arm("value_error", phase, calls=2)
        found[phase] = attempt(overlapped, rank)
        arm(None)
        found[f"after {phase}"] = is_right(overlapped, rank)
    return found


def fail_alone(rank: int, overlapped: fxo.OverlappedModel, phase: str, odd: int) -> dict[str, Any]:
    """One rank fails in the middle of a step."""
    is_right(overlapped, rank)
    overlapped.zero_grad()
    arm("value_error" if rank == odd else None, phase, calls=2)
    found = {"step": attempt(overlapped, rank)}
    arm(None)
    found["after"] = is_right(overlapped, rank)
    return found


def fail_in_the_end(rank: int) -> dict[str, Any]:
    """One rank fails when all collectives of the step are behind it: the others cannot know before the next step."""
    overlapped = tripping(dist.group.WORLD, "-E-", layer=0)
    is_right(overlapped, rank)
    overlapped.zero_grad()
    arm("value_error" if rank == 1 else None, "B", calls=2)
    found = {"step": attempt(overlapped, rank, count=2)}
    arm(None)
    overlapped.zero_grad()
    found["next"] = attempt(overlapped, rank)
    found["after"] = is_right(overlapped, rank)
    return found


@shared_captures()
def several(rank: int) -> dict[str, Any]:
    odd = dist.get_world_size() - 1
    by_layer = {layer: tripping(dist.group.WORLD, layer=layer) for layer in (0, 1)}
    alone = {
        f"alone {phase} {layer}": fail_alone(rank, overlapped, phase, odd)
        for phase in ("F", "B")
        for layer, overlapped in by_layer.items()
    }
    return {"together": fail_together(rank, by_layer[0]), "end": fail_in_the_end(rank), **alone}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch(several, request.param, timeout_s=300)


@pytest.mark.parametrize("phase", ["F", "B"])
def test_ranks_that_fail_together_go_on_together(ranks: list[dict[str, Any]], phase: str) -> None:
    for each in ranks:
        assert f"(phase {phase}) of microbatch 1 failed: ValueError: a bad value" in each["together"][phase]["text"]
        assert "restart" not in each["together"][phase]["text"]
        assert each["together"][phase]["clean"]
        assert each["together"][f"after {phase}"] == []


def test_rank_that_fails_alone_is_named_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    odd = len(ranks) - 1
    for case in ("F 0", "B 0", "F 1", "B 1"):
        for rank, each in enumerate(ranks):
            found = each[f"alone {case}"]
            text = found["step"]["text"]
            assert text.startswith("StepError: Node ") and "ValueError: a bad value" in text
            assert (f"rank {odd} failed" in text) == (rank != odd)
            assert found["step"]["seconds"] < 10
            assert found["step"]["clean"]
            # The ranks are in step again: what one had not launched, it has made up for.
            assert "restart" not in text and found["after"] == []


def test_rank_that_fails_at_the_end_is_named_before_the_next_step(ranks: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(ranks):
        text = each["end"]["step"]["text"]
        assert ("ValueError" in text) if rank == 1 else (text == "no error")
        assert "the last step failed on rank 1 and not on the others" in each["end"]["next"]["text"]
        assert each["end"]["after"] == []


def die(rank: int, ranks: int, folder: str, phase: str) -> None:
    """Be one of several ranks, of which rank 1 dies in the middle; write down what this one saw."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    overlapped = tripping(dist.group.WORLD)
    is_right(overlapped, rank)
    overlapped.zero_grad()
    arm("end_the_process" if rank == 1 else None, phase, calls=2)
    found = attempt(overlapped, rank)
    found["next"] = attempt(overlapped, rank)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(("ranks", "phase"), [(2, "F"), pytest.param(4, "B", marks=pytest.mark.slow)])
def test_rank_that_dies_is_named_on_every_other(
    ranks: int, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    arguments = [(rank, ranks, str(tmp_path), phase) for rank in range(ranks)]
    processes = [context.Process(target=die, args=each, daemon=True) for each in arguments]
    for each in processes:
        each.start()
    for each in processes:
        each.join(120)
    assert processes[1].exitcode == 3
    for rank in {*range(ranks)} - {1}:
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "rank 1 said nothing: the process has ended" in found["text"]
        assert found["seconds"] < 12 and found["clean"]
        assert "cannot be used" in found["next"]["text"] and found["next"]["seconds"] < 1
