"""`transform`, `OverlappedModel`, `StepResult`: the way of the data, top to bottom.

    model, microbatch --capture--> JointGraph --pipeline--> ChunkGraph --schedule--> Plan --pipeline--> FusedGraph
    --runtime--> losses and gradients

`planner` keeps what was captured and planned; this module is what users call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxoverlap import compat
from fxoverlap.capture import TensorLeaf
from fxoverlap.config import OverlapConfig
from fxoverlap.errors import ConfigError
from fxoverlap.ir import Plan
from fxoverlap.microbatch import Leaves, Microbatch, as_microbatch, flatten
from fxoverlap.planner import Built, Planner, Variant
from fxoverlap.report import Report, golden, make_report
from fxoverlap.runtime import Fingerprint, MicrobatchState, agree, all_or_nothing, run


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
        config: the config it was transformed with.
    """

    def __init__(self, model: nn.Module, config: OverlapConfig) -> None:
        super().__init__()
        self.module = model
        self.config = config
        self._planner = Planner(model, config)

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
        given = as_microbatch(microbatch)
        self._planner.prepare(self._planner.variants_for([flatten(given)], [given]) * 2)

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
            StepError: a node failed. Parameters are untouched; a `.grad` that was None is None again.
        """
        given, parts, variants, programs = self._get_ready(microbatches)
        result = StepResult([], [])
        targets = [*self.module.parameters(), *(leaf for part in parts for leaf in part.tensors())]
        with torch.no_grad(), torch.autocast("cpu", enabled=False), all_or_nothing(targets):
            previous: MicrobatchState | None = None
            for i, built in enumerate(programs):
                current = self._begin(i, variants[i], parts[i], given[i]) if i < len(given) else None
                run(built.program, current, previous)
                if current is not None:
                    self._collect(result, current, variants[i], outputs)
                previous = current
        return result

    def plan(self, kind: str) -> Plan:
        """The plan of one kind ("F", "FB", "B") for the latest variants. `str` of it has one line an instance."""
        return self._planner.latest_built(kind).fused.plan

    def fused_graph(self, kind: str) -> fx.GraphModule:
        """The fused graph of one kind for the latest variants."""
        return self._planner.latest_built(kind).fused.module

    def golden(self) -> str:
        """A stable text of the schedule nodes and the FB plan, for snapshot tests."""
        return golden(self._planner.latest()[0].chunk, self.plan("FB"))

    def report(self) -> Report:
        """What was captured, planned and moved."""
        variant = self._planner.latest()[0]
        position = {i: value for value, i in variant.layout.index.items()}
        names = {each.value: each.name for each in variant.capture.joint.inputs}
        return make_report(
            variant.chunk,
            self.plan("FB"),
            self._planner.records,
            self._planner.variants,
            [names[position[i]] for i in sorted(variant.layout.snapshots)],
            variant.capture.assigned,
            self.config.delay_wgrad,
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

    def _get_ready(
        self, microbatches: Sequence[Any]
    ) -> tuple[list[Microbatch], list[Leaves], list[Variant], list[Built]]:
        """Capture and plan what is missing, and agree with the other ranks, before anything runs."""
        given: list[Microbatch] = []
        parts: list[Leaves] = []
        variants: list[Variant] = []
        programs: list[Built] = []
        failure: Exception | None = None
        try:
            given = self._given(microbatches)
            parts = [flatten(each) for each in given]
            variants = self._planner.variants_for(parts, given)
            programs = self._planner.prepare(variants)
        except Exception as error:
            failure = error
        group = self._planner.group()
        if group is not None:
            plans = Fingerprint() if failure is not None else self._planner.fingerprint(programs)
            agree(group, len(given), plans, failure)
        elif failure is not None:
            raise failure
        return given, parts, variants, programs

    def _begin(self, number: int, variant: Variant, leaves: Leaves, microbatch: Microbatch) -> MicrobatchState:
        scale = self.config.grad_scale if microbatch.grad_scale is None else microbatch.grad_scale
        return MicrobatchState.begin(
            number,
            variant.layout,
            variant.capture.params,
            variant.capture.buffers,
            [leaves.values[i] for i in variant.capture.leaves],
            variant.constants,
            scale_as_gradient(scale, variant.loss_dtype),
        )

    def _collect(self, result: StepResult, state: MicrobatchState, variant: Variant, outputs: bool) -> None:
        """Take the loss and the outputs out of a microbatch's state."""
        layout, spec = variant.layout, variant.capture.output
        result.losses.append(state.values[layout.loss].clone())
        tensors = [state.values[i] for i in layout.outputs]
        for i in layout.outputs:
            state.values[i] = None
        kept = None
        if outputs and spec.spec is not None:
            leaves = [tensors[leaf.index] if isinstance(leaf, TensorLeaf) else leaf for leaf in spec.leaves]
            kept = compat.unflatten(leaves, spec.spec)
        result.outputs.append(kept)


def scale_as_gradient(scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient that `(loss * scale).backward()` gives to a loss of this dtype: 0-dim."""
    scale = scale.detach() if isinstance(scale, torch.Tensor) else scale
    with torch.enable_grad():
        loss = torch.ones((), dtype=dtype, requires_grad=True)
        (loss * scale).backward()
    assert loss.grad is not None
    return loss.grad
