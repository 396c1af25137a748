"""`transform`, `OverlappedModel`, `StepResult`: the way of the data, top to bottom.

    model, microbatch --capture--> JointGraph --pipeline--> ChunkGraph --schedule--> Plan --pipeline--> FusedGraph
    --runtime--> losses and gradients

`planner` keeps what was captured and planned, `ready` agrees with the other ranks; this module is what users call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from fxoverlap import compat
from fxoverlap.capture import TensorLeaf
from fxoverlap.config import OverlapConfig
from fxoverlap.errors import ConfigError, UnsupportedError
from fxoverlap.ir import Plan, Round, runs_forward
from fxoverlap.planner import Planner, Variant, set_buffers
from fxoverlap.ready import Preparation, Ready
from fxoverlap.report import Report, golden, make_report, write_timeline
from fxoverlap.runtime import (
    MicrobatchState,
    Peers,
    Progress,
    Recorder,
    StepProfile,
    all_or_nothing,
    held_accumulators,
    interrupts,
    recorded,
    run,
    step_error,
    watched,
)


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
        left_out = ("_planner", "_preparation", "_profiling", "_profiled")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Nothing has been captured, and no step has run."""
        self._planner = Planner(self.module, self.config)
        self._preparation = Preparation(self._planner, self.module)
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
        self._preparation.by_itself(microbatch)

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
        ready = self._preparation.get_ready(microbatches)
        self._microbatches = len(ready.given)
        result, progress = StepResult([], []), Progress()
        peers = Peers(ready.groups, ready.session, ready.agreement) if ready.groups else None
        recorder = None if self._profiling is None else Recorder()
        with watched(peers), recorded(recorder):
            try:
                self._run(ready, result, outputs, progress, recorder)
            except (Exception, KeyboardInterrupt) as error:
                self._preparation.last_failed = True
                raise step_error(error, progress, ready.groups, peers) from error
        if recorder is not None and self._profiling is not None:
            rounds = [Round(b.fused.plan, numbers) for b, numbers in zip(ready.programs, ready.rounds, strict=True)]
            self._profiling.append(recorder.finish(rounds, [each.structure for each in ready.variants], outputs))
        return result

    def _run(
        self, ready: Ready, result: StepResult, outputs: bool, progress: Progress, recorder: Recorder | None
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

    def _begin(self, number: int, ready: Ready) -> MicrobatchState:
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
