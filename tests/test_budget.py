"""`OverlapConfig.memory_budget`: which orders a step has below it, that they give eager's bits, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from toys import RandomOrder, batches, differences, eager_step, same_bits, toy, train_both

import fxoverlap as fxo
from fxoverlap import budget
from fxoverlap.benchmarks.live_bytes import LiveBytes
from fxoverlap.budget import Level

pytestmark = pytest.mark.usefixtures("shared_captures")

COUNT, TOKENS = 4, 48
PLENTY = 1 << 40
LEVELS = (Level(True), *(Level(False, room) for room in (None, 0.5, 0.25, 0.0)), Level(False, in_turn=True))


def overlap(group: dist.ProcessGroup, memory_budget: int | None, given: Any = None, **config: Any) -> Any:
    """The toy under a budget; exchanges take long, so that hiding them is worth memory."""
    config = {"ramp": "pair", "costs": "cpu", **config}
    model = toy(config.pop("model", "[*E][*E]"), group)
    return fxo.transform(model, fxo.OverlapConfig(memory_budget=memory_budget, **config), example_inputs=given)


def microbatches(seed: int = 0, count: int = COUNT, tokens: int = TOKENS) -> list[tuple]:
    return batches(count, tokens=tokens, seed=seed)


def peaks_of(overlapped: Any, given: list) -> list[int]:
    """The peak of a step at each level."""
    overlapped.step(given)
    planner = overlapped._planner
    return [planner.peak(planner._latest, level) for level in planner.budget.levels]


def measured_peak(overlapped: Any, given: list) -> int:
    """Of several steps the least: a process group's thread may let go of what it has sent a moment late."""
    found = []
    for _ in range(4):
        overlapped.module.zero_grad()
        with LiveBytes() as live:
            overlapped.step(given)
        found.append(live.peak)
    return min(found)


def level_of(overlapped: Any) -> Level:
    return overlapped._planner._level


def is_right(overlapped: Any, given: list) -> bool:
    """Whether a step equals eager in every bit."""
    overlapped.module.zero_grad()
    eager = copy.deepcopy(overlapped.module)
    losses = eager_step(eager, given)
    found = overlapped.step(given).losses
    return all(map(same_bits, losses, found)) and differences(eager, overlapped.module) == []


@pytest.fixture(scope="module")
def captured(group: dist.ProcessGroup) -> Any:
    """The toy, captured once; `limit` gives it a budget."""
    return overlap(group, PLENTY)


def limit(overlapped: Any, memory_budget: int | None) -> Any:
    """Begin anew with a budget, with what was captured."""
    config = replace(overlapped.config, memory_budget=memory_budget)
    overlapped._planner.budget = budget.Budget(config)
    overlapped.module.zero_grad()
    return overlapped


@pytest.fixture(scope="module")
def peaks(captured: Any) -> list[int]:
    """The peak of a step of the toy at each level."""
    found = peaks_of(limit(captured, PLENTY), microbatches())
    assert len(set(found)) == len(found)  # so that each level is reached
    assert found[0] == max(found) and min(found) < found[1]
    return found


# --- levels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "levels"),
    [
        ({}, LEVELS[1:]),
        ({"ramp": "pair"}, LEVELS),
        ({"schedule": "megatron"}, (Level(False),)),
        ({"schedule": "sequential", "ramp": "pair"}, (Level(True), Level(False))),
        ({"schedule": RandomOrder(), "ramp": "pair"}, (Level(True), Level(False))),
    ],
)
def test_levels_of_a_config(config: dict[str, Any], levels: tuple[Level, ...]) -> None:
    assert budget.levels_of(fxo.OverlapConfig(**config)) == levels


@pytest.mark.parametrize("number", range(len(LEVELS)))
def test_every_level_gives_the_bits_of_eager_below_the_budget(captured: Any, peaks: list[int], number: int) -> None:
    overlapped = limit(captured, peaks[number])
    assert train_both(overlapped, microbatches, steps=2) == []
    first = next(i for i, peak in enumerate(peaks) if peak <= peaks[number])
    assert level_of(overlapped) == LEVELS[first]
    report = overlapped.report()
    assert report.predicted_peak_bytes == peaks[first] <= peaks[number]
    assert measured_peak(overlapped, microbatches()) == peaks[first]  # one rank gets all rows


def test_without_a_budget_the_freest(captured: Any, peaks: list[int]) -> None:
    overlapped = limit(captured, None)
    overlapped.step(microbatches())
    assert level_of(overlapped) == LEVELS[0] and overlapped.report().predicted_peak_bytes == peaks[0]


def test_pairs_are_given_up_first_and_the_report_says_so(captured: Any, peaks: list[int]) -> None:
    told = []
    for bytes_a_rank in (peaks[0], peaks[0] - 1):
        overlapped = limit(captured, bytes_a_rank)
        overlapped.step(microbatches())
        told.append([text for text in overlapped.report().warnings if "ramp" in text])
    assert level_of(overlapped) == LEVELS[1]
    assert told == [[], ['ramp="pair" has no effect: with it a step takes more than memory_budget.']]


def test_recomputing_comes_below_what_no_order_does(group: dist.ProcessGroup, peaks: list[int]) -> None:
    overlapped = overlap(group, min(peaks) - 1, recompute=fxo.Recompute("uniform"))
    assert is_right(overlapped, microbatches())
    assert overlapped.report().predicted_peak_bytes < min(peaks)


# --- refusals ---------------------------------------------------------------------------------------------------


def test_the_error_names_the_least_peak_and_that_budget_works(captured: Any, peaks: list[int]) -> None:
    least = min(peaks)
    overlapped = limit(captured, least - 1)
    words = (
        f"memory_budget is {least - 1} bytes, but the least peak of a step over 4 microbatches is {least} bytes .* "
        f"1.25 times the balanced number of rows. That is beside parameters, .* Set a budget of at least that, rec"
    )
    for _ in range(2):
        with pytest.raises(fxo.ConfigError, match=words):
            overlapped.step(microbatches())
    assert all(param.grad is None for param in overlapped.module.parameters())
    assert is_right(overlapped, microbatches(count=1, tokens=8))  # which take less
    assert is_right(limit(captured, least), microbatches())


@pytest.mark.parametrize("schedule", ["megatron", "sequential", RandomOrder()])
def test_schedules_without_a_search_are_refused(group: dist.ProcessGroup, schedule: Any) -> None:
    more = {"schedule": schedule, "ramp": "none", "model": "E"}
    free = overlap(group, PLENTY, **more)
    free.step(microbatches())
    peak = free.report().predicted_peak_bytes
    if not callable(schedule):
        assert is_right(overlap(group, peak, **more), microbatches())
    with pytest.raises(fxo.ConfigError, match="but the least peak of a step over 4 microbatches is") as caught:
        overlap(group, 1 << 12, **more).step(microbatches())
    assert ('set schedule="auto"' in str(caught.value)) == (schedule != "sequential")


def test_the_least_peak_is_that_of_any_level() -> None:
    error = budget.Budget(fxo.OverlapConfig(memory_budget=1000)).refusal([30, 10, 20], 2)
    assert "the least peak of a step over 2 microbatches is 1010 bytes" in str(error)


def test_transform_refuses_what_one_microbatch_exceeds(group: dist.ProcessGroup) -> None:
    [example] = microbatches(count=1)
    with pytest.raises(fxo.ConfigError, match=r"over one microbatch is \d+ bytes") as caught:
        overlap(group, 1 << 12, example, model="E")
    least = int(str(caught.value).split("over one microbatch is ")[1].split()[0])
    with pytest.raises(fxo.ConfigError, match="over one microbatch"):
        overlap(group, least - 1, example, model="E")
    overlapped = overlap(group, least, example, model="E")
    assert is_right(overlapped, [example])
    with pytest.raises(fxo.ConfigError, match=f"memory_budget is {least} bytes.*over 4 microbatches"):
        overlapped.step(microbatches())


# --- what is shown, and what changes ----------------------------------------------------------------------------


def test_plans_before_a_step_are_those_of_the_step(group: dist.ProcessGroup, peaks: list[int]) -> None:
    overlapped = overlap(group, peaks[3], microbatches()[0])
    before = str(overlapped.plan("FB"))
    overlapped.step(microbatches())
    assert str(overlapped.plan("FB")) == before
    assert str(limit(overlapped, PLENTY)._planner.prepare(overlapped._planner._latest)[1].fused.plan) != before


def test_a_refused_step_leaves_what_is_shown(captured: Any, peaks: list[int]) -> None:
    overlapped = limit(captured, peaks[1])
    overlapped.step(microbatches())
    shown = str(overlapped.plan("FB")), overlapped.report().predicted_peak_bytes, overlapped.report().warnings
    with pytest.raises(fxo.ConfigError, match="memory_budget"):
        overlapped.step(microbatches(tokens=8 * TOKENS))
    report = overlapped.report()
    assert (str(overlapped.plan("FB")), report.predicted_peak_bytes, report.warnings) == shown


def test_the_report_is_of_the_lengths_that_ran(captured: Any) -> None:
    """One rank gets all rows, so what is predicted is what occurs."""
    overlapped = limit(captured, PLENTY)
    lengths = (8, TOKENS, 8, 8)
    given = [microbatches(count=1, tokens=each)[0] for each in lengths]
    with overlapped.profile():
        overlapped.step(given)
    report = overlapped.report()
    assert report.predicted_peak_bytes == report.profiled_peak_bytes


def test_levels_are_found_anew_when_costs_change(group: dist.ProcessGroup) -> None:
    overlapped, given = overlap(group, PLENTY, costs=None, model="E"), microbatches(tokens=8)
    overlapped.step(given)
    planner, levels = overlapped._planner, []
    planner.budget.choose([each.structure for each in planner._latest], planner._latest, 5)
    for profiled in (False, True, False):
        with overlapped.profile() if profiled else contextlib.nullcontext():
            overlapped.step(given)
        levels.append(level_of(overlapped))
    assert levels == [LEVELS[5], LEVELS[5], LEVELS[0]]


def test_lengths_share_a_level_which_goes_on_with_the_longest(captured: Any, peaks: list[int]) -> None:
    overlapped = limit(captured, peaks[2])
    seen, levels = [], []
    tried = overlapped._planner.peak
    with mock.patch.object(overlapped._planner, "peak", lambda *given: seen.append(given) or tried(*given)):
        for tokens in (8, TOKENS, 8, TOKENS, 8):
            assert is_right(overlapped, microbatches(tokens=tokens))
            levels.append((level_of(overlapped), len(seen)))
    # The first at the first level; the longer one there, by itself and with the others, and on to the third; the first
    # one there, by itself.
    assert levels == [(LEVELS[0], 1), (LEVELS[2], 5), (LEVELS[2], 6), (LEVELS[2], 6), (LEVELS[2], 6)]


def test_levels_before_the_one_it_has_are_tried_last(captured: Any, peaks: list[int]) -> None:
    """A later level need not take less of every step."""
    overlapped = limit(captured, peaks[0])
    budget_of = overlapped._planner.budget
    assert [budget_of.numbers(start) for start in (0, 4)] == [[0, 1, 2, 3, 4, 5], [4, 5, 0, 1, 2, 3]]
    given = microbatches()
    overlapped.step(given)
    variants = overlapped._planner._latest
    budget_of._chosen[tuple(each.structure for each in variants)] = 3
    budget_of.forget_captures()
    more = {LEVELS[i]: peaks[0] + 1 for i in (3, 4, 5)}
    with mock.patch.object(overlapped._planner, "peak", lambda _, level: more.get(level, 0)):
        assert is_right(overlapped, given)
    assert level_of(overlapped) == LEVELS[0]


def test_steps_that_fit_are_not_kept_without_end(
    captured: Any, peaks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_KEPT", 2)
    overlapped = limit(captured, peaks[0])
    for count in (1, 2, 3, 4, 1):
        assert is_right(overlapped, microbatches(count=count, tokens=8))
        assert len(overlapped._planner.budget._fitting) <= 2


def test_captures_of_replaced_parameters_are_let_go(group: dist.ProcessGroup) -> None:
    overlapped = overlap(group, PLENTY, max_variants=1, model="E")
    gone = []
    for _ in range(2):
        overlapped.step(microbatches(count=2, tokens=8))
        gone.append(weakref.ref(overlapped.module.head.weight))
        overlapped.module.head.weight = torch.nn.Parameter(overlapped.module.head.weight.detach())
    overlapped.step(microbatches(count=2, tokens=8))
    gc.collect()
    assert [each() for each in gone] == [None] * 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_the_budget_and_find_their_own_level(copied: Any, peaks: list[int]) -> None:
    """A process group can be copied by no means, so the group is the default one."""
    overlapped = fxo.transform(toy("E"), fxo.OverlapConfig(memory_budget=PLENTY, ramp="pair", costs="cpu"))
    overlapped.step(microbatches())
    other = copied(overlapped)
    assert other.config.memory_budget == PLENTY and not other._planner.budget._chosen
    assert is_right(other, microbatches())
    assert other._planner.budget is not overlapped._planner.budget and other._planner.budget._chosen
