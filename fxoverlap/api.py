"""`transform`, `OverlappedModel`, `StepResult`: the way of the data, top to bottom.

    model, microbatch --capture--> JointGraph --pipeline--> ChunkGraph --schedule--> Plan --pipeline--> FusedGraph
    --runtime--> losses and gradients

A *variant* is one capture with its chunk graph; programs are built for the pairs of variants that meet in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxoverlap import compat
from fxoverlap.capture import Capture, TensorLeaf, capture
from fxoverlap.config import OverlapConfig
from fxoverlap.errors import ConfigError, UnsupportedError
from fxoverlap.ir import ChunkGraph, FusedGraph, InputKind, Plan
from fxoverlap.microbatch import Leaves, Microbatch, as_microbatch, flatten
from fxoverlap.pipeline import PassRecord, to_chunk, to_fused
from fxoverlap.report import Report, golden, make_report
from fxoverlap.runtime import Layout, MicrobatchState, Program, lower, run
from fxoverlap.schedule import build_plan
from fxoverlap.variants import Key, ambient_key, microbatch_key, model_key

KINDS = ("F", "FB", "B")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives back.

    Attributes:
        losses: one detached scalar a microbatch, not multiplied by `grad_scale`.
        outputs: one a microbatch: what forward returned besides the loss, tensors detached; None if nothing.
    """

    losses: list[torch.Tensor]
    outputs: list[Any]


@dataclass(frozen=True, slots=True)
class _Variant:
    """A captured microbatch and what was derived from it."""

    capture: Capture
    chunk: ChunkGraph
    layout: Layout
    constants: dict[str, torch.Tensor]
    loss_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Built:
    """A plan, its fused graph, and the program that runs it."""

    fused: FusedGraph
    program: Program


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
        self._variants: dict[Key, _Variant] = {}
        self._built: dict[tuple[int | None, int | None], _Built] = {}
        self._latest: tuple[_Variant, _Variant] | None = None
        self._records: list[PassRecord] = []

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
        variant = self._variant(flatten(as_microbatch(microbatch)), as_microbatch(microbatch))
        self._latest = (variant, variant)
        for kind in KINDS:
            self._program(variant if "F" in kind else None, variant if "B" in kind else None)

    def step(self, microbatches: Sequence[Any], outputs: bool = True) -> StepResult:
        """Forward and backward of all microbatches; gradients accumulate in `.grad` as in eager.

        Args:
            microbatches: a list of microbatches, each a tuple of positional arguments, a dict of keyword arguments, a
                `Microbatch`, or one bare argument.
            outputs: whether to keep what forward returns besides the loss.

        Raises:
            ConfigError: there is no microbatch.
            CaptureError, UnsupportedError: a microbatch needs a new capture that cannot be made.
            StepError: a node failed.
        """
        given = self._given(microbatches)
        parts = [flatten(each) for each in given]
        variants = [self._variant(leaves, each) for leaves, each in zip(parts, given, strict=True)]
        states: list[MicrobatchState | None] = [None] * len(given)
        result = StepResult([], [])
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for i in range(len(given) + 1):
                f, b = (i if i < len(given) else None), (i - 1 if i else None)
                built = self._program(variants[f] if f is not None else None, variants[b] if b is not None else None)
                if f is not None:
                    states[f] = self._begin(f, variants[f], parts[f], given[f])
                run(built.program, states[f] if f is not None else None, states[b] if b is not None else None)
                if f is not None:
                    self._collect(result, states[f], variants[f], outputs)
                if b is not None:
                    states[b] = None
        self._latest = (variants[-1], variants[max(len(given) - 2, 0)])
        return result

    def plan(self, kind: str) -> Plan:
        """The plan of one kind ("F", "FB", "B") for the latest variants. `str` of it has one line an instance."""
        return self._latest_built(kind).fused.plan

    def fused_graph(self, kind: str) -> fx.GraphModule:
        """The fused graph of one kind for the latest variants."""
        return self._latest_built(kind).fused.module

    def golden(self) -> str:
        """A stable text of the schedule nodes and the FB plan, for snapshot tests."""
        plan = self.plan("FB")
        assert plan.forward is not None
        return golden(plan.forward, plan)

    def report(self) -> Report:
        """What was captured, planned and moved."""
        variant = self._require_latest()[0]
        inputs = {each.value: each.name for each in variant.chunk.joint.inputs} if variant.chunk.joint else {}
        position = {i: value for value, i in variant.layout.index.items()}
        return make_report(
            variant.chunk,
            self.plan("FB"),
            self._records,
            len(self._variants),
            [inputs[position[i]] for i in sorted(variant.layout.snapshots)],
            variant.capture.assigned,
            self.config.delay_wgrad,
        )

    # --- steps of `step` ---------------------------------------------------------------------------------------

    def _given(self, microbatches: Sequence[Any]) -> list[Microbatch]:
        if isinstance(microbatches, (torch.Tensor, dict, Microbatch, str)) or not isinstance(microbatches, Sequence):
            raise ConfigError(
                f"step: microbatches is a {type(microbatches).__name__}, expected a list of microbatches, each a tuple "
                f"of positional arguments, a dict of keyword arguments, or a Microbatch. Write step([microbatch])."
            )
        if not microbatches:
            raise ConfigError("step: there is no microbatch; expected a list of at least one.")
        return [as_microbatch(each) for each in microbatches]

    def _variant(self, leaves: Leaves, microbatch: Microbatch) -> _Variant:
        key = (microbatch_key(leaves), model_key(self.module), ambient_key())
        if key not in self._variants:
            self._variants[key] = self._capture(leaves, microbatch)
        return self._variants[key]

    def _capture(self, leaves: Leaves, microbatch: Microbatch) -> _Variant:
        limit = 1 if self.config.dynamic is False else self.config.max_variants
        if len(self._variants) >= limit:
            raise UnsupportedError(_too_many(limit, self._variants, leaves))
        captured = capture(self.module, microbatch, self.config)
        chunk = to_chunk(captured.joint, self.config, self._records)
        joint = captured.joint
        constants = {
            each.name: getattr(joint.module, each.name) for each in joint.inputs if each.kind is InputKind.CONSTANT
        }
        loss_dtype = next(node.meta["val"].dtype for node in joint.module.graph.nodes if node.name == joint.loss)
        return _Variant(captured, chunk, Layout.of(chunk), constants, loss_dtype)

    def _program(self, f: _Variant | None, b: _Variant | None) -> _Built:
        key = (id(f) if f else None, id(b) if b else None)
        if key not in self._built:
            plan = build_plan(f.chunk if f else None, b.chunk if b else None, self.config)
            fused = to_fused(plan, self.config, self._records)
            program = lower(fused, f.layout if f else None, b.layout if b else None)
            self._built[key] = _Built(fused, program)
        return self._built[key]

    def _begin(self, number: int, variant: _Variant, leaves: Leaves, microbatch: Microbatch) -> MicrobatchState:
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

    def _collect(self, result: StepResult, state: MicrobatchState | None, variant: _Variant, outputs: bool) -> None:
        assert state is not None
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

    # --- what the inspection methods need ----------------------------------------------------------------------

    def _require_latest(self) -> tuple[_Variant, _Variant]:
        if self._latest is None:
            raise UnsupportedError(
                "Nothing has been traced yet. Pass example_inputs to transform, or run a step, before you ask for "
                "plans, graphs or the report."
            )
        return self._latest

    def _latest_built(self, kind: str) -> _Built:
        if kind not in KINDS:
            raise ConfigError(f"plan kind is {kind!r}; allowed in this version: {', '.join(KINDS)}.")
        f, b = self._require_latest()
        return self._program(f if "F" in kind else None, b if "B" in kind else None)


def scale_as_gradient(scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient that `(loss * scale).backward()` gives to a loss of this dtype: 0-dim."""
    with torch.enable_grad():
        loss = torch.ones((), dtype=dtype, requires_grad=True)
        (loss * scale).backward()
    assert loss.grad is not None
    return loss.grad


def _too_many(limit: int, variants: dict[Key, _Variant], leaves: Leaves) -> str:
    """Name the leaf that varies."""
    new = microbatch_key(leaves)
    for key in variants:
        spec, seen = key[0]
        if spec != new[0]:
            continue
        for path, old, now in zip(leaves.paths, seen, new[1], strict=True):
            if old != now:
                return (
                    f"step: {limit} variants are captured already and {path} varies: {old} before, {now} now. Pad "
                    f"microbatches to few sizes (bucketing), or raise OverlapConfig.max_variants."
                )
    return (
        f"step: {limit} variants are captured already, and the structure of the microbatch, the model's parameters, "
        f"modes or the ambient autocast differ from all of them. Keep them fixed, or raise OverlapConfig.max_variants."
    )
