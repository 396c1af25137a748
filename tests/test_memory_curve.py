"""The predicted live bytes of a step are those that a meter of storages finds when the step runs, to the byte.

The meter (`benchmarks.live_bytes`) knows nothing of the prediction. Of several steps the least peak counts: the thread
of a process group may let go of what it has sent a moment after the wait. Models are small, so that a tensor that is
counted a node too long or too short tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_lifetimes import Sums, WithOutputs, leaf, shifted
from toys import Made as Model
from toys import RandomOrder, RawModel, batches, rows, toy

import fxoverlap as fxo
from fxoverlap.benchmarks.live_bytes import LiveBytes
from fxoverlap.ir import Lane, Phase, Round
from fxoverlap.passes.memory import footprint
from fxoverlap.schedule.memory import _deaths, curve
from fxoverlap.schedule.policies import Order, sequential

pytestmark = pytest.mark.usefixtures("shared_captures")

REPEATS = 3
COUNTS = (1, 2, 3)
Case = tuple[Callable[[dist.ProcessGroup], Any], Callable[[int], list]]


def peaks(overlapped: fxo.OverlappedModel, given: list, outputs: bool = True) -> tuple[int | None, int]:
    """(predicted, measured) peak of a step, from no gradients."""
    overlapped.step(given, outputs)  # captures
    measured = []
    for _ in range(REPEATS):
        for tensor in (*overlapped.module.parameters(), *(each for mb in given for each in mb)):
            tensor.grad = None
        with overlapped.profile():
            with LiveBytes() as live:
                result = overlapped.step(given, outputs)
            predicted = overlapped.report().profiled_peak_bytes
        measured.append(live.peak)
        del result
    return predicted, min(measured)


def both(overlapped: fxo.OverlappedModel, make: Callable[[int], list], **more: Any) -> dict[int, tuple]:
    """`peaks` for steps of 1, 2 and 3 microbatches."""
    return {count: peaks(overlapped, make(count), **more) for count in COUNTS}


def differing(found: dict[int, tuple]) -> dict[int, tuple]:
    return {count: pair for count, pair in found.items() if pair[0] != pair[1]}


def buffer_that_the_backward_reads(group: dist.ProcessGroup) -> Model:
    def loss(m: Model, x: torch.Tensor) -> torch.Tensor:
        result = (m.p * m.mean * x).sum()
        m.mean = 0.9 * m.mean
        return result

    return Model(loss)


def gradient_that_is_part_of_a_storage(group: dist.ProcessGroup) -> Model:
    return Model(lambda m, x: torch.cat([m.part, x]).sin().sum(), part=torch.nn.Parameter(torch.ones(2, 4)))


MODELS: dict[str, Case] = {
    "all kinds of branches": (
        lambda group: toy("*-[*E]", group, shared_dim=8, dropout=0.1, tied=True, selection_bias=True),
        batches,
    ),
    "scans": (lambda group: toy("M[GE]", group), batches),
    "latent attention": (lambda group: toy("-[+E]", group), batches),
    "list splits": (RawModel, batches),
    "gradients that go on": (shifted, batches),
    "gradients of other layouts": (lambda group: Sums(), lambda count: [(leaf(i).detach(),) for i in range(count)]),
    "gradients of leaves": (lambda group: Sums(), lambda count: [(leaf(i),) for i in range(count)]),
    "buffer that the backward reads": (buffer_that_the_backward_reads, lambda count: rows(0, count)),
    "gradient that is part of a storage": (gradient_that_is_part_of_a_storage, lambda count: rows(0, count)),
    "no exchange": (lambda group: toy("*-"), batches),
    "other lengths": (
        lambda group: toy("[*E]", group),
        lambda count: [batches(1, tokens=8 + 24 * (i % 2), seed=i)[0] for i in range(count)],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(group: dist.ProcessGroup, name: str) -> None:
    make_model, make_batches = MODELS[name]
    overlapped = fxo.transform(make_model(group), fxo.OverlapConfig(costs="cpu"))
    assert differing(both(overlapped, make_batches)) == {}


CONFIGS: dict[str, dict[str, Any]] = {
    "no delay": {"delay_wgrad": False},
    "early release": {"early_release": True},
    "pair": {"ramp": "pair"},
    "sequential": {"schedule": "sequential"},
    "megatron": {"schedule": "megatron"},
    "any order": {"schedule": RandomOrder()},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(group: dist.ProcessGroup, name: str) -> None:
    config = fxo.OverlapConfig(costs="cpu", **CONFIGS[name])
    overlapped = fxo.transform(toy("[*E]", group, shared_dim=8, selection_bias=True), config)
    assert differing(both(overlapped, batches)) == {}


def weights_last(f: Any, b: Any, costs: Any, config: Any) -> Order:
    """In turn, with all weight gradients at the end."""
    return [(node, mb) for node, mb in sequential(f, b, costs, config) if node.phase is not Phase.W]


def test_b38_what_a_replay_makes_for_a_delayed_weight_gradient_counts_until_then(group: dist.ProcessGroup) -> None:
    found = {}
    for schedule in ("sequential", weights_last):
        config = fxo.OverlapConfig(costs="cpu", schedule=schedule, recompute=fxo.Recompute("uniform"))
        overlapped = fxo.transform(toy("[*E][*E]", group, shared_dim=8), config)
        found[schedule], measured = peaks(overlapped, batches(1, tokens=64))
        assert found[schedule] == measured
    assert found[weights_last] > 1.1 * found["sequential"]


@pytest.mark.parametrize("outputs", [True, False])
def test_outputs_are_held_where_the_user_wants_them(outputs: bool) -> None:
    overlapped = fxo.transform(WithOutputs(), fxo.OverlapConfig(costs="cpu"))
    found = both(overlapped, lambda count: [(torch.randn(3, 4),) for _ in range(count)], outputs=outputs)
    assert differing(found) == {}


def test_bf16(group: dist.ProcessGroup) -> None:
    overlapped = fxo.transform(toy("[*E]-", group), fxo.OverlapConfig(costs="cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        assert differing(both(overlapped, batches)) == {}


# --- the parts ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def overlapped(group: dist.ProcessGroup) -> fxo.OverlappedModel:
    model = toy("*-[*E][*E]", group, shared_dim=8, dropout=0.1, selection_bias=True)
    return fxo.transform(model, fxo.OverlapConfig(ramp="pair"), example_inputs=batches(1)[0])


@pytest.mark.parametrize("kind", ["F", "FB", "B"])
def test_deaths_are_those_that_the_pass_lifetime_has_found(overlapped: fxo.OverlappedModel, kind: str) -> None:
    plan = overlapped.plan(kind)
    for instance, dying in zip(plan.order, _deaths(plan), strict=True):
        assert sorted(instance.frees) == sorted((*dying.reads, *dying.sent, *dying.writes)), instance


def test_curve_of_one_plan_begins_with_what_the_forward_has_saved(overlapped: fxo.OverlappedModel) -> None:
    forward = list(curve([Round(overlapped.plan("F"), {"F": 0})]))
    backward = list(curve([Round(overlapped.plan("B"), {"B": 0})]))
    step = list(curve([Round(overlapped.plan("F"), {"F": 0}), Round(overlapped.plan("B"), {"B": 0})]))
    assert [point.instance for point in step] == [*overlapped.plan("F").order, *overlapped.plan("B").order]
    assert step[: len(forward)] == forward
    # Only the loss, and the copy of it that the user has been given, are missing.
    assert {a.after - b.after for a, b in zip(step[len(forward) :], backward, strict=True)} == {4 + 4}
    assert all(point.peak >= point.after for point in step)


def test_footprint_of_a_node(overlapped: fxo.OverlappedModel) -> None:
    """Held is what a variable of the generated code holds, from op to op."""
    chunk = overlapped.plan("F").forward
    assert chunk is not None and chunk.joint is not None and chunk.memory is not None
    by_name = {node.name: node for node in chunk.joint.module.graph.nodes}
    for node in chunk.nodes:
        code = chunk.modules[node.name].code
        found = chunk.memory.footprints[node.name]
        assert found == footprint(node, by_name)
        ends = [each for each in (*(made.last for made in found.made), *found.reads) if each is not None]
        assert all(0 <= end < len(node.ops) for end in ends)
        handed_on = {chunk.memory.storages[value] for value in node.writes if value in chunk.memory.storages}
        assert {made.storage for made in found.made if made.last is None} <= handed_on
        if node.lane is Lane.COMM:
            assert (len(found.made) == len(node.ops) and "all_to_all" in code) or "exchange" in code


def test_report_tells_the_peaks(overlapped: fxo.OverlappedModel) -> None:
    overlapped.step(batches(2))
    report = overlapped.report()
    assert report.profiled_peak_bytes is None
    assert report.predicted_peak_bytes == report.predicted_worst_bytes  # of one rank, which gets all tokens anyway
    assert f"predicted peak {report.predicted_peak_bytes / 1e6:.3f} MB" in str(report)
    with overlapped.profile():
        overlapped.step(batches(2))
    figures = overlapped.report().to_dict()
    assert figures["profiled_peak_bytes"] > 0 and figures["predicted_peak_bytes"] > 0
