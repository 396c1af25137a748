"""Profiling: what is recorded of which steps, that the steps stay what they are, and that nothing is left behind."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import statistics
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import RawModel, batches, eager_step, same_bits, toy, train_both

import fxoverlap as fxo
from fxoverlap.ir import Lane
from fxoverlap.runtime import StepProfile, profile

pytestmark = pytest.mark.usefixtures("shared_captures")

MEASURED = tuple(f"{part}{name}" for part in ("", "steady_") for name in ("comm_ms", "exposed_ms", "overlap_pct"))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[StepProfile]:
    """Every step that is recorded in the test."""
    found: list[StepProfile] = []
    finish = profile.Recorder.finish

    def noted(self: profile.Recorder, *args: Any) -> StepProfile:
        found.append(finish(self, *args))
        return found[-1]

    monkeypatch.setattr(profile.Recorder, "finish", noted)
    return found


class Profiled(fxo.OverlappedModel):
    """Profiles every step of its own."""

    def step(self, microbatches: Any, outputs: bool = True) -> fxo.StepResult:
        with self.profile():
            return super().step(microbatches, outputs)


class Transposed(nn.Module):
    """All-to-alls of fixed sizes, of tensors that do not lie as they are sent."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.name = nn.Embedding(32, 16), group.group_name
        self.linear, self.head = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens).flatten(0, 1)
        sent = funcol.all_to_all_single_autograd(x.t(), None, None, self.name)
        back = funcol.all_to_all_single_autograd(self.linear(sent.t()).t(), None, None, self.name)
        return nn.functional.cross_entropy(self.head(back.t()), targets.flatten())


@pytest.mark.parametrize(
    "make",
    [
        lambda group: toy("[*E]", group),
        lambda group: toy("[*E]", group).bfloat16(),
        lambda group: toy("[*E]", group, dropout=0.25),
        lambda group: toy("*-"),
        lambda group: RawModel(group, 1),
        Transposed,
    ],
    ids=["moe", "bf16", "dropout", "no group", "raw", "transposed"],
)
def test_profiled_steps_equal_eager(group: dist.ProcessGroup, make: Callable[[Any], nn.Module]) -> None:
    overlapped = Profiled(make(group), fxo.OverlapConfig())
    assert train_both(overlapped, lambda step: batches(3, seed=step, tokens=8 + step), steps=2) == []
    assert overlapped.report().profiled_steps == 1


# --- what is recorded -----------------------------------------------------------------------------------------------


def test_each_instance_is_recorded_in_its_program(group: dist.ProcessGroup, steps: list[StepProfile]) -> None:
    overlapped = fxo.transform(toy("[*E]", group))
    with overlapped.profile():
        overlapped.step(batches(4))
    [step] = steps
    kinds = ["F", "FB", "FB", "FB", "B"]
    assert [(run.program, run.instance) for run in step.runs] == [
        (program, instance) for program, kind in enumerate(kinds) for instance in overlapped.plan(kind).order
    ]
    end = step.begin
    for run in step.runs:
        assert run.microbatch == run.program - (run.instance.mb == "B")
        assert end <= run.begin <= run.end <= step.end
        end = run.end
        cost = overlapped.plan("FB").forward.costs[run.instance.node.name]
        assert run.flops == cost.flops
        if run.instance.node.lane is Lane.COMM:
            # As planned, because the only rank keeps all tokens.
            assert sum(flight.bytes_sent for flight in run.flights) == cost.bytes_sent
            assert not run.waits
            for flight in run.flights:
                assert run.begin <= flight.begin <= flight.launched <= run.end
                assert flight.begin <= flight.end <= step.end
    waited = [wait.flight for run in step.runs for wait in run.waits]
    launched = [flight for run in step.runs for flight in run.flights]
    assert all(flight is not None and wait_end >= flight.end for flight, wait_end in _ends(step))
    assert {id(flight) for flight in waited} == {id(flight) for flight in launched} and len(waited) == len(launched)


def _ends(step: StepProfile) -> list[tuple[profile.Flight | None, int]]:
    return [(wait.flight, wait.end) for run in step.runs for wait in run.waits]


def test_report_has_medians_over_instances_and_steps(group: dist.ProcessGroup, steps: list[StepProfile]) -> None:
    overlapped = fxo.transform(toy("[*E]", group), example_inputs=batches(1)[0])
    before = overlapped.report()
    assert before.profiled_steps == 0 and before.step_ms is None
    assert all(getattr(before, name) is None for name in MEASURED)
    assert all(row["ms"] is None and row["waited_ms"] is None for row in before.nodes)
    with overlapped.profile():
        for _ in range(3):
            overlapped.step(batches(3))
    report = overlapped.report()
    assert report.profiled_steps == len(steps) == 3
    assert report.step_ms == statistics.median((step.end - step.begin) / 1e6 for step in steps)
    waits = [sum(w.end - w.begin for run in step.runs for w in run.waits) / 1e6 for step in steps]
    assert report.exposed_ms == statistics.median(waits)
    assert all(isinstance(getattr(report, name), float) for name in MEASURED)
    for row in report.nodes:
        runs = [run for step in steps for run in step.runs if run.instance.node.name == row["name"]]
        assert len(runs) == 9
        if row["lane"] == "compute":
            alone = [run.end - run.begin - sum(w.end - w.begin for w in run.waits) for run in runs]
            assert row["ms"] == statistics.median(alone) / 1e6
    assert json.loads(json.dumps(report.to_dict()))["steady_overlap_pct"] == report.steady_overlap_pct
    lines = str(report).splitlines()
    assert f"profiled step: {report.step_ms:.3f} ms" in str(report) and "steady part: " in str(report)
    for row in report.nodes:
        [line] = [line for line in lines if line.startswith(f"{row['name']} ")]
        assert line.split()[-2:] == [f"{row['ms']:.3f}", f"{row['waited_ms']:.3f}"]


@pytest.mark.parametrize("count", [1, 2])
def test_steps_of_few_microbatches(group: dist.ProcessGroup, count: int) -> None:
    overlapped = fxo.transform(toy("[*E]", group))
    with overlapped.profile():
        overlapped.step(batches(count))
    report = overlapped.report()
    assert report.overlap_pct is not None
    assert (report.steady_ms is None) == (report.steady_overlap_pct is None) == (count == 1)


def test_model_without_exchanges_has_no_overlap(tmp_path: Path) -> None:
    overlapped = fxo.transform(toy("*-"))
    with overlapped.profile():
        overlapped.step(batches(3))
    report = overlapped.report()
    assert (report.comm_ms, report.exposed_ms, report.overlap_pct) == (0, 0, None)
    assert all(row["ms"] > 0 for row in report.nodes)
    assert "overlap - %" in str(report)
    overlapped.timeline(tmp_path / "t.json")
    assert {e["pid"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]} == {0}


# --- which steps ----------------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Counts the all-to-alls that the step makes by its own operators; profiling makes them otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.fxoverlap.exchange.default
        return func(*args, **(kwargs or {}))


def own_launches(overlapped: fxo.OverlappedModel) -> int:
    with Seen() as seen:
        overlapped.step(batches(2))
    return seen.count


def test_only_steps_inside_the_block_are_recorded(group: dist.ProcessGroup, steps: list[StepProfile]) -> None:
    overlapped, other = (fxo.transform(toy("[*E]", group), example_inputs=batches(1)[0]) for _ in range(2))
    assert own_launches(overlapped) == 8
    with overlapped.profile():
        assert own_launches(overlapped) == 0
        assert own_launches(other) == 8
    assert own_launches(overlapped) == 8
    assert len(steps) == 1 and other.report().profiled_steps == 0
    assert profile._recorder.get() is None


def test_last_block_with_a_step_counts(group: dist.ProcessGroup, steps: list[StepProfile], tmp_path: Path) -> None:
    overlapped = fxo.transform(toy("[*E]", group))
    with overlapped.profile():
        overlapped.step(batches(2))
        overlapped.step(batches(3))
        assert overlapped.report().profiled_steps == 2
        with overlapped.profile():
            overlapped.step(batches(1))
            assert overlapped.report().profiled_steps == 1
        overlapped.step(batches(4))
    with overlapped.profile():
        pass
    assert overlapped.report().profiled_steps == 3
    overlapped.timeline(str(tmp_path / "t.json"))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["args"]["microbatch"] for e in events if e["ph"] == "X"} == {0, 1, 2, 3}


def test_no_timeline_before_a_profiled_step(group: dist.ProcessGroup, tmp_path: Path) -> None:
    overlapped = fxo.transform(toy("[*E]", group))
    overlapped.step(batches(1))
    with pytest.raises(fxo.UnsupportedError, match=r"no step has been profiled.*with overlapped.profile\(\)"):
        overlapped.timeline(tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


def test_copies_and_pickles_begin_without_a_profile() -> None:
    overlapped = fxo.transform(toy("*-"))
    with overlapped.profile():
        overlapped.step(batches(1))
        inside = copy.deepcopy(overlapped)
    for twin in (inside, copy.deepcopy(overlapped), pickle.loads(pickle.dumps(overlapped))):
        twin.step(batches(1))
        assert twin.report().profiled_steps == 0
    assert b"StepProfile" not in pickle.dumps(overlapped)


# --- failures and lifetimes -----------------------------------------------------------------------------------------


def test_failing_step_leaves_no_profile(group: dist.ProcessGroup, steps: list[StepProfile], tmp_path: Path) -> None:
    model = toy("[*E]", group)
    overlapped = fxo.transform(model)
    with overlapped.profile():
        overlapped.step(batches(2))

    def fail(gradient: Tensor) -> None:
        raise ValueError("a bad value")

    handle = model.head.weight.register_hook(fail)
    with overlapped.profile():
        with pytest.raises(fxo.StepError, match="a bad value"):
            overlapped.step(batches(3))
        assert profile._recorder.get() is None
        # What was there before is still there.
        assert overlapped.report().profiled_steps == 1
        handle.remove()
        model.zero_grad()
        overlapped.step(batches(4))
    assert len(steps) == 2 and overlapped.report().profiled_steps == 1
    overlapped.timeline(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["args"]["microbatch"] for e in events if e["ph"] == "X"} == {0, 1, 2, 3}
    twin = copy.deepcopy(model)
    twin.zero_grad()
    eager_step(twin, batches(4))
    assert all(same_bits(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_error_inside_the_block_ends_it(group: dist.ProcessGroup) -> None:
    overlapped = fxo.transform(toy("[*E]", group))
    with pytest.raises(KeyError), overlapped.profile():
        overlapped.step(batches(2))
        raise KeyError
    overlapped.step(batches(3))
    assert overlapped.report().profiled_steps == 1


def test_no_tensor_of_a_step_is_kept(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[Any]] = []
    launch = profile.Recorder.launch

    def noted(self: profile.Recorder, op: Any, args: tuple[Any, ...]) -> Any:
        result = launch(self, op, args)
        kept.extend(weakref.ref(each.untyped_storage()) for each in (args[0], result))
        kept.extend(weakref.ref(each) for each in (args[0], result))
        return result

    monkeypatch.setattr(profile.Recorder, "launch", noted)
    overlapped = fxo.transform(toy("[*E]", group))
    with overlapped.profile():
        overlapped.step(batches(2))
        gc.collect()
        assert kept and not [each for each in kept if each() is not None]


def test_wrong_splits_are_refused_before_anything_is_sent() -> None:
    """As by the operator, which a profiled step does not call."""
    flight = profile.Flight("all_to_all_single", "L0.dispatch.F", True, "no group", 0, 0)
    splits = torch.tensor([2])
    with pytest.raises(ValueError, match="out_splits must sum to out_rows=3"):
        profile._launch(torch.ops.fxoverlap.exchange.default, (torch.ones(2), splits, splits, 3, "no group"), flight)
