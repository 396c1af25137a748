"""`memory_budget` on two ranks: one decision on both, or one error, whatever one of them has alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_agreed_costs import Collectives, error_of, golden, is_right, measuring, model
from test_budget import LEVELS, PLENTY, level_of, limit, measured_peak
from toys import batches
from two_ranks import TwoRanks

import fxoverlap as fxo
from fxoverlap.schedule.policies import megatron

pytestmark = pytest.mark.usefixtures("shared_captures")

COUNT = 3
SHORT, LONG = 8, 64


def overlap(memory_budget: int | None, **config: Any) -> Any:
    config = {"costs": "cpu", "ramp": "pair", **config}
    return fxo.transform(model(), fxo.OverlapConfig(memory_budget=memory_budget, **config))


def given(rank: int, tokens: int, count: int = COUNT) -> list[tuple]:
    return batches(count, rank, tokens)


def peaks_of(overlapped: Any, microbatches: list) -> list[list[int]]:
    """The peaks of a step at each level, by rank."""
    limit(overlapped, PLENTY).step(microbatches)
    planner = overlapped._planner
    found: list[Any] = [None, None]
    dist.all_gather_object(found, [planner.peak(planner._latest, level) for level in planner.budget.levels])
    return found


def outcome(overlapped: Any, microbatches: list) -> dict[str, Any]:
    """What a step that must be right chose, and what it holds."""
    right = is_right(overlapped, microbatches)
    number = LEVELS.index(level_of(overlapped))
    below = overlapped.report().predicted_peak_bytes <= overlapped._planner.budget._config.memory_budget
    return {"right": right, "level": number, "plans": golden(overlapped), "below": below}


def exceeded_on_one_rank(rank: int, overlapped: Any) -> dict[str, Any]:
    """B105: rank 0 is far below at every level, rank 1 at the later ones only."""
    microbatches = given(rank, (SHORT, LONG)[rank])
    short, long = peaks_of(overlapped, microbatches)
    found: dict[str, Any] = {"one needs more": max(short) < min(long), "peaks": long}
    for number in range(len(LEVELS)):
        found[f"level {number}"] = outcome(limit(overlapped, long[number]), microbatches)
    return found


def other_lengths_in_one_step(rank: int, overlapped: Any) -> dict[str, Any]:
    """In each step other microbatches of each rank are long."""
    mixed = [[SHORT, LONG, SHORT], [LONG, SHORT, SHORT]][rank]
    microbatches = [batches(1, rank, tokens)[0] for tokens in mixed]
    peaks = peaks_of(overlapped, microbatches)
    between = max(peak[3] for peak in peaks)
    return outcome(limit(overlapped, between), microbatches)


def exceeded_at_every_level(rank: int, overlapped: Any) -> dict[str, Any]:
    peaks = peaks_of(overlapped, given(rank, (SHORT, LONG)[rank]))
    least = min(max(each) for each in zip(*peaks, strict=True))
    limit(overlapped, least - 1)
    found = {"least": least, "errors": [error_of(overlapped, given(rank, (SHORT, LONG)[rank])) for _ in range(2)]}
    found["after"] = is_right(overlapped, given(rank, SHORT))
    found["enough"] = outcome(limit(overlapped, least), given(rank, (SHORT, LONG)[rank]))
    return found


def steady_state(rank: int, overlapped: Any) -> dict[str, Any]:
    """(all-reduces, gathers) of steps, and the number of the level behind each."""
    longer = given(rank, (SHORT, LONG)[rank])
    peaks = peaks_of(overlapped, longer)
    limit(overlapped, peaks[1][2])
    count, found = Collectives(), []
    steps = [given(rank, SHORT), given(rank, SHORT), longer, given(rank, SHORT), longer, longer[:1], longer[:1]]
    # Lengths that rank 1 meets for the first time, and that fit.
    steps += [given(rank, (SHORT, 16)[rank]), given(rank, (16, SHORT)[rank])]
    for each in steps:
        collectives = count.of(lambda each=each: overlapped.step(each))
        found.append((*collectives, LEVELS.index(level_of(overlapped))))
    return {"steps": found}


def one_rank_forgets(rank: int, overlapped: Any) -> dict[str, Any]:
    """A level that is known on one rank only holds for both."""
    microbatches = given(rank, LONG)
    peaks = peaks_of(overlapped, microbatches)
    limit(overlapped, peaks[0][0])
    overlapped.step(microbatches)
    planner = overlapped._planner
    if rank == 0:
        planner.budget.choose([each.structure for each in planner._latest], planner._latest, 4)
    else:
        planner.budget.forget()
    return outcome(overlapped, microbatches)


def measured(rank: int, overlapped: Any) -> dict[str, Any]:
    """Bytes of a step whose routing is as even as the budget counts on."""
    microbatches = given(rank, LONG)
    peaks = peaks_of(overlapped, microbatches)
    found = {}
    for number in (0, 2, 5):
        limit(overlapped, peaks[0][number]).step(microbatches)
        found[number] = (measured_peak(overlapped, microbatches), peaks[0][number])
    return found


def one_rank_measures(rank: int, overlapped: Any) -> dict[str, Any]:
    overlapped, microbatches = overlap(PLENTY, costs=None), given(rank, SHORT)
    overlapped.step(microbatches)
    planner = overlapped._planner
    planner.budget.choose([each.structure for each in planner._latest], planner._latest, 5)
    levels = []
    for profiled in (False, True, False):
        profiling = profiled and rank == 1
        with measuring(3.0, 1.0, 1e-5, 0.5), overlapped.profile() if profiling else contextlib.nullcontext():
            overlapped.step(microbatches)
        levels.append(LEVELS.index(level_of(overlapped)))
    return {"levels": levels, **outcome(overlapped, microbatches), "from": overlapped.report().costs_from}


class Fails:
    """A policy that fails once when it is armed."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __call__(self, f: Any, b: Any, costs: Any, config: Any) -> Any:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return megatron(f, b, costs, config)


def failures(rank: int, overlapped: Any) -> dict[str, Any]:
    """One rank cannot say what a level takes."""
    policy, found = Fails(), {}
    overlapped = overlap(PLENTY, schedule=policy, ramp="none")
    for count, (name, error) in enumerate(FAILURES.items(), 1):
        policy.error = error if rank == 1 else None
        overlapped._planner._chosen.clear()
        try:
            found[name] = error_of(overlapped, given(rank, SHORT, count))
        except KeyboardInterrupt as interrupt:
            found[name] = f"KeyboardInterrupt: {interrupt}"
        policy.error = None
        found[f"after {name}"] = is_right(overlapped, given(rank, SHORT, count))
    return found


FAILURES = {"error": fxo.UnsupportedError("this policy has no order"), "interrupt": KeyboardInterrupt("by hand")}


def other_configs(rank: int, overlapped: Any) -> dict[str, Any]:
    """B63, B75: what ranks do not have in common ends in the same error on both; then both go on."""
    found = {}
    for name, (one, other) in CONFIGS.items():
        config = {"memory_budget": PLENTY, **(one, other)[rank]}
        found[name] = error_of(overlap(**config), given(rank, SHORT, 2))
    found["right"] = is_right(limit(overlapped, PLENTY), given(rank, SHORT))
    return found


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "memory_budget": ({}, {"memory_budget": 1 << 20}),
    "memory_budget of one rank": ({}, {"memory_budget": None}),
    "too little on one rank": ({}, {"memory_budget": 1}),
    "schedule": ({}, {"schedule": "sequential"}),
    "ramp": ({}, {"ramp": "none"}),
    "imbalance": ({}, {"imbalance": 2.0}),
}


def two_groups(rank: int, overlapped: Any) -> dict[str, Any]:
    """As in a grid, ranks go through several groups in turn."""
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    microbatches = given(rank, (SHORT, LONG)[rank])
    _, long = peaks_of(overlapped, microbatches)
    with mock.patch.object(overlapped._planner, "groups", lambda: groups):
        found = outcome(limit(overlapped, long[3]), microbatches)
        limit(overlapped, min(long) - 1)
        return {**found, "error": error_of(overlapped, microbatches)}


SCENES: tuple[Callable[[int, Any], dict[str, Any]], ...] = (
    exceeded_on_one_rank,
    other_lengths_in_one_step,
    exceeded_at_every_level,
    steady_state,
    one_rank_forgets,
    measured,
    one_rank_measures,
    failures,
    other_configs,
    two_groups,
)


def everything(rank: int) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    overlapped = overlap(PLENTY)
    return {each.__name__: each(rank, overlapped) for each in SCENES}


@pytest.fixture(scope="module")
def found(two_ranks: TwoRanks) -> list[dict[str, dict[str, Any]]]:
    return two_ranks.run(everything, timeout_s=300)


def same(found: list, scene: str) -> dict[str, Any]:
    """What both ranks say."""
    one, two = (each[scene] for each in found)
    assert one == two
    return one


def test_b105_a_budget_that_one_rank_exceeds_decides_for_both(found: list) -> None:
    seen = same(found, "exceeded_on_one_rank")
    assert seen["one needs more"]
    for number, peak in enumerate(seen["peaks"]):
        first = next(i for i, each in enumerate(seen["peaks"]) if each <= peak)
        each = seen[f"level {number}"]
        assert (each["right"], each["level"], each["below"]) == (True, first, True)
    assert len({seen[f"level {number}"]["plans"] for number in range(len(LEVELS))}) > 2


@pytest.mark.parametrize("scene", ["other_lengths_in_one_step", "two_groups"])
def test_lengths_may_differ_by_rank_and_microbatch(found: list, scene: str) -> None:
    seen = same(found, scene)
    assert seen["right"] and seen["below"] and seen["level"] > 0


def test_b105_all_hear_of_what_one_rank_cannot_do(found: list) -> None:
    seen = same(found, "exceeded_at_every_level")
    [text] = set(seen["errors"])
    assert text.startswith("ConfigError") and f"is {seen['least']} bytes on the rank that needs most" in text
    assert seen["after"] and seen["enough"]["right"] and seen["enough"]["below"]
    assert same(found, "two_groups")["error"].startswith("ConfigError")


def test_one_all_reduce_in_the_steady_state(found: list) -> None:
    steps = same(found, "steady_state")["steps"]
    assert steps == [
        (2, 3, 0),  # the first: costs, where to begin, one level
        (1, 0, 0),
        (2, 5, 2),  # longer, on one rank: three levels
        (1, 0, 2),
        (1, 0, 2),
        (2, 3, 0),  # of one microbatch
        (1, 0, 0),
        (1, 0, 2),  # of lengths that fit
        (1, 0, 2),
    ]


def test_a_level_that_one_rank_knows_holds_for_both(found: list) -> None:
    seen = same(found, "one_rank_forgets")
    assert seen["right"] and seen["level"] == 4


def test_steps_hold_no_more_than_the_budget(found: list) -> None:
    for each in found:
        for number, (peak, allowed) in each["measured"].items():
            assert 0.8 * allowed < peak <= allowed, number


def test_costs_that_one_rank_measures_change_levels_on_both(found: list) -> None:
    seen = same(found, "one_rank_measures")
    assert seen["levels"] == [5, 5, 0] and seen["right"] and seen["from"] == "measured"


def test_a_rank_that_cannot_tell_fails_all_and_the_next_step_works(found: list) -> None:
    one, two = (each["failures"] for each in found)
    assert one["error"] == two["error"]
    assert one["error"].startswith("PlanMismatchError: step: rank 1 could not get ready")
    assert "this policy has no order" in one["error"]
    assert one["interrupt"].startswith("PlanMismatchError: step: rank 1 could not get ready")
    assert two["interrupt"] == "KeyboardInterrupt: by hand"
    for each in (one, two):
        assert each["after error"] and each["after interrupt"]


@pytest.mark.parametrize("name", CONFIGS)
def test_b63_b75_other_configs_are_named_on_both(found: list, name: str) -> None:
    text = same(found, "other_configs")[name]
    field = name if name in ("schedule", "ramp", "imbalance") else "memory_budget"
    assert text.startswith("PlanMismatchError: step: rank 1 has another plan than rank 0"), text
    assert f"'{field} = " in text or f'"{field} = ' in text, text


def test_ranks_go_on_after_other_configs(found: list) -> None:
    assert same(found, "other_configs")["right"] is True
