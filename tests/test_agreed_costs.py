"""Ranks with other lengths and other costs make the same plans, or all of them hear why not."""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from toys import batches, differences, eager_step, same_bits, toy
from two_ranks import TwoRanks

import fxoverlap as fxo
from fxoverlap.costing import Measured, NodeTime
from fxoverlap.ir import CostTable, Lane
from fxoverlap.schedule.policies import megatron, sequential

pytestmark = pytest.mark.usefixtures("shared_captures")

KINDS = ("F", "FB", "B")


def model() -> Any:
    return toy("E", dist.group.WORLD)


def golden(overlapped: fxo.OverlappedModel) -> str:
    return overlapped.golden() + "".join(str(overlapped.plan(kind)) for kind in KINDS)


def is_right(overlapped: fxo.OverlappedModel, given: list) -> bool:
    """Whether a step equals eager in every bit."""
    overlapped.module.zero_grad()
    eager = copy.deepcopy(overlapped.module)
    losses = eager_step(eager, given)
    found = overlapped.step(given).losses
    return all(map(same_bits, losses, found)) and differences(eager, overlapped.module) == []


def error_of(overlapped: fxo.OverlappedModel, given: list) -> str:
    try:
        overlapped.step(given)
    except fxo.FxOverlapError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def measuring(compute: float, comm: float, node_s: float, comm_share: float) -> Any:
    """What profiled steps tell from here on: seconds of every compute node and of every exchange, ..."""

    def of(steps: list) -> Measured:
        nodes = {run.instance.node for step in steps for run in step.runs}
        times = {node.name: NodeTime(comm if node.lane is Lane.COMM else compute, 0.0) for node in nodes}
        return Measured({steps[0].structures[0]: times}, node_s, 0.0, comm_share)

    return mock.patch.object(Measured, "of", of)


class Collectives:
    """Counts the collectives of the agreement."""

    def __init__(self) -> None:
        self.reduced = self.gathered = 0

    def of(self, function: Callable[[], Any]) -> tuple[int, int]:
        """(all-reduces, gathers) that a call makes."""
        self.reduced = self.gathered = 0
        reduce, gather = dist.all_reduce, dist.all_gather_object

        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            self.reduced += 1
            return reduce(*args, **kwargs)

        def all_gather_object(*args: Any, **kwargs: Any) -> Any:
            self.gathered += 1
            return gather(*args, **kwargs)

        with (
            mock.patch.object(dist, "all_reduce", all_reduce),
            mock.patch.object(dist, "all_gather_object", all_gather_object),
        ):
            function()
        return self.reduced, self.gathered


def by_costs(f: Any, b: Any, costs: CostTable, config: Any) -> Any:
    """`megatron` where compute nodes take longer than 1 s, else `sequential`."""
    is_long = max(cost.seconds for name, cost in costs.items() if "experts" in name) > 1
    return (megatron if is_long else sequential)(f, b, costs, config)


def by_own_bytes(f: Any, b: Any, costs: CostTable, config: Any) -> Any:
    """What no policy may do: look at what the chunks of this rank weigh."""
    chunk = f or b
    is_large = chunk.costs["L0.dispatch.F"].bytes_sent > 2000
    return (megatron if is_large else sequential)(f, b, costs, config)


class FailsOnce:
    """A policy that raises the first time that a rank plans with others, on that rank."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __call__(self, f: Any, b: Any, costs: CostTable, config: Any) -> Any:
        if self.fails:
            self.fails = False
            raise fxo.UnsupportedError("this policy has no order")
        return megatron(f, b, costs, config)


def other_measurements(rank: int) -> dict[str, Any]:
    """Ranks of other lengths measure other times, in both lanes."""
    given = batches(3, rank, tokens=8 + 4 * rank)
    overlapped = fxo.transform(model(), example_inputs=given[0])
    right = [is_right(overlapped, given)]
    plans = [golden(overlapped)]
    own_times = (0.5, 4.0, 1e-5, 0.25) if rank == 0 else (3.0, 0.125, 1e-6, 0.5)
    with measuring(*own_times), overlapped.profile():
        right.append(is_right(overlapped, given))
    right.append(is_right(overlapped, given))
    plans.append(golden(overlapped))
    report = overlapped.report()
    times = {row["lane"]: row["planned_ms"] for row in report.nodes}
    costs = overlapped._planner.costs
    with mock.patch.object(costs, "_agreed", {}):
        alone = golden(overlapped)
    # A second time, on rank 0 alone.
    if rank == 0:
        with measuring(0.25, 8.0, 1e-7, 0.125), overlapped.profile():
            overlapped.step(given)
    else:
        overlapped.step(given)
    right.append(is_right(overlapped, given))
    plans.append(golden(overlapped))
    return {
        "right": right,
        "plans": plans,
        "alone": alone,
        "costs": (times, report.costs_from, report.hardware["node_s"], report.hardware["comm_share"]),
    }


def one_rank_measures(rank: int) -> dict[str, Any]:
    overlapped = fxo.transform(model(), fxo.OverlapConfig(schedule=by_costs))
    given = batches(2, rank)
    count, overlapped_step = Collectives(), lambda: overlapped.step(given)
    seen = [count.of(overlapped_step), count.of(overlapped_step)]
    plans = [golden(overlapped)]
    if rank == 1:
        with measuring(3.0, 1.0, 1e-5, 0.5), overlapped.profile():
            overlapped.step(given)
    else:
        overlapped.step(given)
    seen += [count.of(overlapped_step), count.of(overlapped_step)]
    right = is_right(overlapped, given)
    plans.append(golden(overlapped))
    return {"collectives": seen, "plans": plans, "right": right, "from": overlapped.report().costs_from}


def lengths_in_different_steps(rank: int) -> dict[str, Any]:
    """Rank 0 meets new lengths in step 2, rank 1 in step 3."""
    overlapped = fxo.transform(model())
    tokens = [(8, 8), (12, 8), (12, 12), (8, 12)]
    count, plans, seen, right = Collectives(), [], [], []
    for each in tokens:
        given = batches(3, rank, tokens=each[rank])
        seen.append(count.of(lambda given=given: right.append(is_right(overlapped, given))))
        plans.append(golden(overlapped))
    return {"collectives": seen, "plans": plans, "right": right, "variants": overlapped.report().variants}


def hashes(rank: int) -> dict[str, Any]:
    """Other costs by file, and other tokens, are the same plan; another config is not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"of-rank-{rank}.json"
        path.write_text(json.dumps({"nodes": [{"name": "experts.F", "ms": 1 + rank}, {"name": "dispatch.F", "ms": 5}]}))
        overlapped = fxo.transform(model(), fxo.OverlapConfig(costs=path))
        given = batches(3, rank, tokens=8 + 8 * rank)
        right = is_right(overlapped, given)
        programs = [overlapped._planner.latest_built(kind) for kind in KINDS]
        digest = overlapped._planner.fingerprint(programs).digest
        planned = {row["name"]: row["planned_ms"] for row in overlapped.report().nodes}
        schedule = "auto" if rank == 0 else "sequential"  # which has no news to tell
        other = fxo.transform(model(), fxo.OverlapConfig(costs=path, schedule=schedule))
        return {
            "right": right,
            "digest": digest,
            "planned": (planned["L0.experts.F"], planned["L0.dispatch.F"]),
            "config": error_of(other, given),
            "after": is_right(overlapped, given),
        }


def failures(rank: int) -> dict[str, Any]:
    given = batches(2, rank, tokens=8 + 24 * rank)
    fails = fxo.transform(model(), fxo.OverlapConfig(schedule=FailsOnce(rank == 1)))
    found = {"planning": error_of(fails, given), "after planning": is_right(fails, given)}
    # The rank that fails has news too, and the other one is planning already.
    with fails.profile():
        fails.step(given)
    fails.config.schedule.fails = rank == 0
    found["replanning"] = error_of(fails, given)
    found["after replanning"] = is_right(fails, given)
    found["own lengths"] = error_of(fxo.transform(model(), fxo.OverlapConfig(schedule=by_own_bytes)), given)
    return found


def pairs(rank: int) -> dict[str, Any]:
    """Pairs are searched under `megatron` too. Ranks of other lengths have other rooflines; then rank 0 measures."""
    overlapped = fxo.transform(model(), fxo.OverlapConfig(schedule="megatron", ramp="pair"))
    given = batches(4, rank, tokens=8 + 56 * rank)
    errors = [error_of(overlapped, given)]
    with measuring(5e-5, 4e-3, 1e-5, 0.25), overlapped.profile() if rank == 0 else contextlib.nullcontext():
        errors += [error_of(overlapped, given)]
    errors += [error_of(overlapped, given)]
    if set(errors) != {"no error"}:
        return {"errors": errors}
    plans = "".join(str(overlapped.plan(kind)) for kind in ("FF", "FB", "BB"))
    return {"right": is_right(overlapped, given), "plans": plans, "from": overlapped.report().costs_from}


def everything(rank: int) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    return {each.__name__: each(rank) for each in SCENES}


SCENES = (other_measurements, one_rank_measures, lengths_in_different_steps, hashes, failures, pairs)


@pytest.fixture(scope="module")
def found(two_ranks: TwoRanks) -> list[dict[str, dict[str, Any]]]:
    return two_ranks.run(everything, timeout_s=300)


def test_ranks_that_measure_other_times_make_the_same_plans(found: list) -> None:
    one, two = (each["other_measurements"] for each in found)
    assert one["plans"] == two["plans"]
    assert one["right"] == two["right"] == [True] * 4
    # The longest of each, from whichever rank.
    assert one["costs"] == two["costs"] == ({"compute": 3000.0, "comm": 4000.0}, "measured", 1e-5, 0.5)
    # Each by itself would have planned otherwise, so that it could not have gone well by chance.
    assert one["alone"] != two["alone"]


def test_pairs_follow_agreed_costs_under_megatron_too(found: list) -> None:
    one, two = (each["pairs"] for each in found)
    assert one == two and one.get("right") is True and one["from"] == "measured"


def test_profiling_on_one_rank_is_enough(found: list) -> None:
    one, two = (each["one_rank_measures"] for each in found)
    assert one["plans"] == two["plans"] and one["plans"][0] != one["plans"][1]
    assert one["right"] and two["right"]
    assert one["from"] == two["from"] == "measured"


def test_one_all_reduce_in_the_steady_state(found: list) -> None:
    for each in found:
        first, steady, news, again = each["one_rank_measures"]["collectives"]
        assert steady == again == (1, 0)
        assert first == news == (2, 1)


def test_lengths_that_ranks_meet_in_different_steps_change_nothing(found: list) -> None:
    one, two = (each["lengths_in_different_steps"] for each in found)
    assert one["plans"] == two["plans"] and len(set(one["plans"])) == 1
    assert one["right"] == two["right"] == [True] * 4
    assert one["variants"] == two["variants"] == 2
    for each in (one, two):
        assert each["collectives"] == [(2, 1), (1, 0), (1, 0), (1, 0)]


def test_b63_hash_holds_no_costs_or_tokens_but_the_config(found: list) -> None:
    one, two = (each["hashes"] for each in found)
    assert one["right"] and two["right"] and one["after"] and two["after"]
    assert one["digest"] == two["digest"]
    assert one["planned"] == two["planned"] == (2.0, 5.0)
    assert one["config"] == two["config"]
    assert one["config"].startswith("PlanMismatchError: step: rank 1 has another plan than rank 0")
    assert "schedule = 'auto'" in one["config"] and "schedule = 'sequential'" in one["config"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("planning", ["rank 1 could not get ready", "this policy has no order"]),
        ("replanning", ["rank 0 could not get ready", "this policy has no order"]),
        ("own lengths", ["rank 1 has another plan than rank 0", "First difference"]),
    ],
)
def test_what_goes_wrong_while_planning_is_heard_on_every_rank(found: list, case: str, words: list[str]) -> None:
    texts = {each["failures"][case] for each in found}
    assert len(texts) == 1
    [text] = texts
    assert text.startswith("PlanMismatchError") and all(word in text for word in words), text
    assert all(each["failures"].get(f"after {case}", True) is True for each in found)
