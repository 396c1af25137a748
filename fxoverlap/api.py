"""`transform`, `OverlappedModel`, `StepResult`: the way of the data, top to bottom.

    model, microbatch --capture--> JointGraph --pipeline--> ChunkGraph --schedule--> Plan --pipeline--> FusedGraph
    --runtime--> losses and gradients

`planner` keeps what was captured and planned; this module is what users call.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from fxoverlap import compat
from fxoverlap.budget import Level
from fxoverlap.capture import TensorLeaf
from fxoverlap.config import OverlapConfig
from fxoverlap.errors import ConfigError, UnsupportedError
from fxoverlap.ir import Plan, Round, runs_forward
from fxoverlap.microbatch import Leaves, Microbatch, as_microbatch, flatten
from fxoverlap.planner import Built, Planner, Variant, set_buffers
from fxoverlap.report import Report, golden, make_report, write_timeline
from fxoverlap.runtime import (
    Fingerprint,
    MicrobatchState,
    Peers,
    Progress,
    Recorder,
    Standing,
    StepProfile,
    agree,
    all_or_nothing,
    held_accumulators,
    interrupts,
    recorded,
    report_failure,
    run,
    share,
    step_error,
    watched,
)

# Ranks that make their models in the same order give them the same numbers.
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives back.

    Attributes:
        losses: one detached scalar a microbatch, not multiplied by `grad_scale`.
        outputs: one a microbatch: what forward returned besides the loss, tensors detached; None if nothing.
    """

    losses: list[torch.Tensor]
    outputs: list[Any]


def transform(model: nn.Module, config: OverlapConfig | None = None, *, example_inputs: Any = None) -> OverlappedModel:
    """Transform a model so that a step overlaps one microbatch's exchanges with another one's compute.

    Args:
        model: a module whose forward returns a scalar loss, or a tuple or dict that holds one. It is not changed.
        config: choices; None: the defaults.
        example_inputs: one microbatch, to capture and refuse now; None: the first step captures its microbatches.

    Raises:
        ConfigError: an argument is not what is allowed.
        CaptureError: the model cannot be traced.
        UnsupportedError: the model was traced, but cannot be scheduled.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"transform: model is a {type(model).__name__}, expected an nn.Module.")
    if config is not None and not isinstance(config, OverlapConfig):
        raise ConfigError(f"transform: config is a {type(config).__name__}, expected an OverlapConfig or None.")
    overlapped = OverlappedModel(compat.without_compile(model), config or OverlapConfig())
    if example_inputs is not None:
        overlapped.prepare(example_inputs)
    return overlapped


class OverlappedModel(nn.Module):
    """A model with an overlapped training step.

    Calling it runs the model unchanged. Its `state_dict` is the model's own.

    Attributes:
        module: the model.
    """

    def __init__(self, model: nn.Module, config: OverlapConfig) -> None:
        super().__init__()
        self.module = model
        self._config = config
        self._begin_anew()
        self.register_load_state_dict_pre_hook(_add_prefix)

    @property
    def config(self) -> OverlapConfig:
        """The config that the model was transformed with; for another one, transform again."""
        return self._config

    def __getstate__(self) -> dict[str, Any]:
        """For `pickle` and `copy.deepcopy`: all but profiles, and what was captured, which holds its tensors."""
        left_out = ("_planner", "_profiling", "_profiled")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Nothing has been captured, and no step has run."""
        self._planner = Planner(self.module, self.config)
        self._number = next(_numbers)
        self._attempts = 0
        self._last_failed = False
        self._microbatches: int | None = None
        self._profiling: list[StepProfile] | None = None
        self._profiled: list[StepProfile] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, without overlap."""
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `state_dict`, with the model's own keys."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a `state_dict` of the model."""
        return self.module.load_state_dict(*args, **kwargs)

    def prepare(self, microbatch: Any) -> None:
        """Capture and plan for microbatches like this one, without running anything."""
        given, planner = as_microbatch(microbatch), self._planner
        variants = planner.variants_for([flatten(given)], [given])
        planner.prepare(variants * 3, self._level_by_itself(variants) if planner.budget.is_set else None)

    def _level_by_itself(self, variants: list[Variant]) -> Level:
        """The level that a step over three such microbatches would have if there were no other ranks; else over one.

        Raises ConfigError if there is none.
        """
        planner, budget = self._planner, self._planner.budget
        excess: list[int] = []
        for many in (variants * 3, variants):
            excess.clear()
            for level in budget.levels:
                excess.append(budget.excess(planner.peak(many, level)))
                if excess[-1] <= 0:
                    return level
        raise budget.refusal(excess, 1)

    def step(self, microbatches: Sequence[Any], outputs: bool = True) -> StepResult:
        """Forward and backward of all microbatches; gradients accumulate in `.grad` as in eager.

        Args:
            microbatches: a list of microbatches, each a tuple of positional arguments, a dict of keyword arguments, a
                `Microbatch`, or one bare argument.
            outputs: whether to keep what forward returns besides the loss.

        Raises:
            ConfigError: there is no microbatch.
            CaptureError, UnsupportedError: a microbatch needs a new capture that cannot be made.
            PlanMismatchError: the ranks of the expert-parallel group are not ready for the same step.
            StepError: a node failed, or a hook changed a parameter. A `.grad` that was None is None again; parameters
                are untouched but by such hooks.
        """
        with interrupts.held():
            return self._step(microbatches, outputs)

    def _step(self, microbatches: Sequence[Any], outputs: bool) -> StepResult:
        ready = self._get_ready(microbatches)
        self._microbatches = len(ready.given)
        result, progress = StepResult([], []), Progress()
        peers = Peers(ready.groups, ready.session, ready.agreement) if ready.groups else None
        recorder = None if self._profiling is None else Recorder()
        with watched(peers), recorded(recorder):
            try:
                self._run(ready, result, outputs, progress, recorder)
            except (Exception, KeyboardInterrupt) as error:
                self._last_failed = True
                raise step_error(error, progress, ready.groups, peers) from error
        self._last_failed = False
        if recorder is not None and self._profiling is not None:
            rounds = [Round(b.fused.plan, numbers) for b, numbers in zip(ready.programs, ready.rounds, strict=True)]
            self._profiling.append(recorder.finish(rounds, [each.structure for each in ready.variants], outputs))
        return result

    def _run(
        self, ready: _Ready, result: StepResult, outputs: bool, progress: Progress, recorder: Recorder | None
    ) -> None:
        """The rounds of a step, one after the other."""
        targets = [*self.module.parameters(), *(leaf for part in ready.parts for leaf in part.tensors())]
        ready.held = held_accumulators(targets)
        alive = progress.alive
        with torch.no_grad(), torch.autocast("cpu", enabled=False), all_or_nothing(targets):
            for numbers, built in zip(ready.rounds, ready.programs, strict=True):
                forward = [i for mb, i in numbers.items() if runs_forward(mb)]
                backward = [i for i in numbers.values() if i not in forward]
                alive.update({i: self._begin(i, ready) for i in forward})
                run(built.program, {mb: alive[i] for mb, i in numbers.items()}, progress, recorder)
                for i in forward:
                    self._collect(result, alive[i], ready.variants[i], outputs)
                for i in backward:
                    if not forward:
                        # An optimizer in a hook may have changed what a later node of the last backwards read.
                        alive[i].check_parameters()
                    del alive[i]

    @contextlib.contextmanager
    def profile(self) -> Iterator[None]:
        """Measure when each node instance runs, in every step of the block that succeeds.

        `report` and `timeline` then tell of the steps of the last block in which there was one, and where the config
        names no costs, the next step is planned anew with what they took. Ranks need not agree on it: a profiled step
        runs the same collectives, and gives the same bits.
        """
        outer, self._profiling = self._profiling, []
        try:
            yield
        finally:
            if self._profiling:
                self._profiled = self._profiling
                self._planner.costs.measure(self._profiled)
            self._profiling = outer

    def timeline(self, path: str | PathLike[str]) -> None:
        """Write the last profiled step of this rank as a trace for ui.perfetto.dev or chrome://tracing, as JSON.

        Raises UnsupportedError if no step was profiled.
        """
        steps = self._profiling or self._profiled
        if not steps:
            raise UnsupportedError(
                "timeline: no step has been profiled, expected one that succeeded inside profile(). Write "
                "`with overlapped.profile(): overlapped.step(microbatches)` before."
            )
        write_timeline(path, steps[-1], dist.get_rank() if dist.is_available() and dist.is_initialized() else 0)

    def plan(self, kind: str) -> Plan:
        """The plan of one kind for the latest variants. `str` of it has one line an instance.

        Args:
            kind: "F", "FB", "B", or of two microbatches in the same phase "FF", "BB".

        Raises:
            ConfigError: there is no such kind.
            UnsupportedError: nothing has been traced yet, or the model forbids such a plan.
        """
        return self._planner.latest_built(kind).fused.plan

    def fused_graph(self, kind: str) -> fx.GraphModule:
        """The fused graph of one kind for the latest variants."""
        return self._planner.latest_built(kind).fused.module

    def golden(self) -> str:
        """A stable text of the schedule nodes and the FB plan, for snapshot tests."""
        return golden(self._planner.latest()[0].chunk, self.plan("FB"))

    def report(self) -> Report:
        """What was captured, planned and moved, and what the profiled steps took."""
        variant, microbatches = self._planner.latest()[0], self._microbatches
        position = {i: value for value, i in variant.layout.index.items()}
        names = {each.value: each.name for each in variant.capture.joint.inputs}
        return make_report(
            variant.chunk,
            self.plan("FB"),
            self._planner.latest_rounds(microbatches) if microbatches is not None else None,
            self._planner.records,
            self._planner.variants,
            [names[position[i]] for i in sorted(variant.layout.snapshots)],
            variant.capture.assigned,
            self.config,
            self._profiling or self._profiled,
            self._planner.alone,
            self._planner.costs.of(variant.structure),
        )

    def _given(self, microbatches: Sequence[Any]) -> list[Microbatch]:
        if isinstance(microbatches, (torch.Tensor, dict, Microbatch, str)) or not isinstance(microbatches, Sequence):
            raise ConfigError(
                f"step: microbatches is a {type(microbatches).__name__}, expected a list of microbatches, each a tuple "
                f"of positional arguments, a dict of keyword arguments, or a Microbatch. Write step([microbatch])."
            )
        if not microbatches:
            raise ConfigError("step: there is no microbatch; expected a list of at least one.")
        return [as_microbatch(each) for each in microbatches]

    def _get_ready(self, microbatches: Sequence[Any]) -> _Ready:
        """Capture and plan what is missing, and agree with the other ranks, before anything runs."""
        self._attempts += 1
        ready = _Ready(f"{self._number}.{self._attempts}")
        failure: BaseException | None = None
        try:
            ready.given = self._given(microbatches)
            ready.parts = [flatten(each) for each in ready.given]
            ready.variants = self._planner.variants_for(ready.parts, ready.given)
            ready.has_news = self._planner.has_news(ready.variants)
            if not ready.has_news:
                self._plan(ready)
            interrupts.check()
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        ready.groups = self._planner.groups()
        own = self._standing(ready, failure)
        self._last_failed = False
        if failure is not None and not ready.groups:
            report_failure(ready.agreement, failure)
        agreed = agree(ready.groups, own, ready.agreement)
        ready.session = agreed.session
        if agreed.has_news:
            self._plan_together(ready)
        return ready

    def _plan(self, ready: _Ready) -> None:
        ready.programs = self._planner.prepare(ready.variants)
        ready.rounds = self._planner.rounds(len(ready.variants))

    def _plan_together(self, ready: _Ready) -> None:
        """Share costs with the other ranks, plan with what all of them know, and agree on the plans."""
        planner, first, ready.has_news = self._planner, ready.agreement, False
        last = f"{first}/costs"
        told, terms = share(ready.groups, planner.own_news(ready.variants), planner.reduce_news, last, first)
        failure: BaseException | None = None
        try:
            if planner.costs.agree(told):
                planner.budget.forget()
            interrupts.check()
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        # Where the ranks' configs differ in what decides, their plans will not be agreed on.
        if planner.budget.is_set and len(terms) == 1:
            last, failure = self._stay_in_budget(ready, failure, f"{first}/memory", last)
        try:
            if failure is None:
                self._plan(ready)
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        ready.agreement = f"{first}/plans"
        ready.session = agree(ready.groups, self._standing(ready, failure), ready.agreement, last).session

    def _stay_in_budget(
        self, ready: _Ready, failure: BaseException | None, session: str, before: str
    ) -> tuple[str, BaseException | None]:
        """Find, together, the first level at which a step fits into the budget of every rank.

        Args:
            ready: the step.
            failure: what has kept this rank from planning, if anything has.
            session, before: as for `share`; levels have sessions of their own.

        Returns: the last session, and what keeps this rank from planning now. A failure ends the search on all ranks.
        Raises ConfigError, on every rank, if there is no such level.
        """
        planner, budget = self._planner, self._planner.budget
        structures = [each.structure for each in ready.variants]
        start = share(ready.groups, budget.start(structures), max, session, before)
        last, most = session, []
        for number in budget.numbers(start):
            last, before, excess = f"{session}/{number}", last, 0
            try:
                if failure is None:
                    interrupts.check()
                    excess = budget.excess(planner.peak(ready.variants, budget.levels[number]))
            except (Exception, KeyboardInterrupt) as error:
                failure = error
            has_failed, excess = share(ready.groups, (failure is not None, excess), max, last, before)
            if has_failed:
                return last, failure
            if excess <= 0:
                budget.choose(structures, ready.variants, number)
                return last, failure
            most.append(excess)
        raise budget.refusal(most, len(ready.variants))

    def _standing(self, ready: _Ready, failure: BaseException | None) -> Standing:
        """What this rank tells the others."""
        is_planned = failure is None and not ready.has_news and ready.groups
        plans = self._planner.fingerprint(ready.programs) if is_planned else Fingerprint()
        return Standing(len(ready.given), plans, failure, self._last_failed, ready.has_news)

    def _begin(self, number: int, ready: _Ready) -> MicrobatchState:
        variant, leaves, own = ready.variants[number], ready.parts[number], ready.given[number].grad_scale
        scale = self.config.grad_scale if own is None else own
        return MicrobatchState.begin(
            number,
            variant.layout,
            variant.capture.params,
            variant.capture.buffers,
            [leaves.values[i] for i in variant.capture.leaves],
            variant.constants,
            scale_as_gradient(scale, variant.loss_dtype),
            ready.held,
        )

    def _collect(self, result: StepResult, state: MicrobatchState, variant: Variant, outputs: bool) -> None:
        """Take the loss and the outputs out of a microbatch's state."""
        layout, spec = variant.layout, variant.capture.output
        result.losses.append(state.values[layout.loss].clone())
        tensors = [state.values[i] for i in layout.outputs]
        for i in layout.outputs:
            state.values[i] = None
        for born, value in zip(variant.born.values(), tensors[len(tensors) - len(variant.born) :], strict=True):
            born.copy_(value)
        set_buffers(self.module, variant.born)
        kept = None
        if outputs and spec.spec is not None:
            leaves = [tensors[leaf.index] if isinstance(leaf, TensorLeaf) else leaf for leaf in spec.leaves]
            kept = compat.unflatten(leaves, spec.spec)
        result.outputs.append(kept)


@dataclass(slots=True)
class _Ready:
    """What a step has before anything runs.

    Attributes:
        agreement: what the ranks call the agreement before this step.
        session: what they call the step.
        groups: those whose ranks run it together; none if there is one rank.
        given, parts, variants: one each a microbatch.
        held: parameters and microbatch tensors whose accumulation may have hooks.
        programs: in the order in which they run.
        rounds: for each of them, the number of the microbatch that each `Instance.mb` stands for.
        has_news: whether there are no programs yet, because this rank has costs to share.
    """

    agreement: str
    session: str = ""
    groups: list[dist.ProcessGroup] = field(default_factory=list)
    given: list[Microbatch] = field(default_factory=list)
    parts: list[Leaves] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
    programs: list[Built] = field(default_factory=list)
    rounds: list[dict[str, int]] = field(default_factory=list)
    held: frozenset[int] = frozenset()
    has_news: bool = False


def _add_prefix(overlapped: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Let a module that holds an OverlappedModel load what its `state_dict` gave: the model's keys, unprefixed."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key.removeprefix(prefix)}"] = state.pop(key)


def scale_as_gradient(scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient that `(loss * scale).backward()` gives to a loss of this dtype: 0-dim."""
    scale = scale.detach() if isinstance(scale, torch.Tensor) else scale
    with torch.enable_grad():
        loss = torch.ones((), dtype=dtype, requires_grad=True)
        (loss * scale).backward()
    assert loss.grad is not None
    return loss.grad
