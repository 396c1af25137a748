"""What a user may choose: `OverlapConfig` and `Recompute`, validated when built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from fxoverlap import cost_file
from fxoverlap.errors import ConfigError, UnsupportedError
from fxoverlap.hardware import PRESETS
from fxoverlap.pattern import parse

SCHEDULES = ("auto", "megatron", "sequential")
METHODS = ("uniform", "block", "selective")
KEEP = ("dispatch", "experts", "combine")


def _reject(field: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"OverlapConfig.{field} is {value!r}; allowed: {allowed}.")


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _positive(owner: str, field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{owner}.{field} is {value!r}; allowed: a positive integer.")


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which forward results are computed again in the backward instead of being kept.

    Attributes:
        method: "uniform" (segments of `num_layers` logical layers), "block" (the first `num_layers`, one a segment) or
            "selective" (the modules that `modules` matches). With the first two each depth of multi-token prediction is
            one more segment.
        num_layers: length of a segment, or number of segments; not for "selective".
        modules: FQN globs, for "selective" only.
        keep: slots whose results are saved, not replayed: any of "dispatch", "experts", "combine".
        prefetch: a replay may begin, as far as its first exchange, beside what the layer behind computes at the end of
            its backward. Its exchange is hidden better, and what two layers replayed is alive for that long.
    """

    method: str
    num_layers: int = 1
    modules: Sequence[str] = ()
    keep: Sequence[str] = ()
    prefetch: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"Recompute.method is {self.method!r}; allowed: {', '.join(METHODS)}.")
        _positive("Recompute", "num_layers", self.num_layers)
        is_given = _is_sequence(self.modules) and all(isinstance(m, str) and all(m.split(".")) for m in self.modules)
        if not is_given:
            raise ConfigError(
                f"Recompute.modules is {self.modules!r}; allowed: a sequence of FQN globs such as 'layers.*.norm'."
            )
        if self.method == "selective" and not self.modules:
            raise ConfigError("Recompute.modules is empty; method 'selective' needs at least one FQN glob.")
        if self.method != "selective" and self.modules:
            raise ConfigError(
                f"Recompute.modules is {self.modules!r}; method {self.method!r} takes layers, so leave it out, or set "
                f"method 'selective'."
            )
        if self.method == "selective" and self.num_layers != 1:
            raise ConfigError(
                f"Recompute.num_layers is {self.num_layers!r}; method 'selective' takes modules, so leave it out, or "
                f"set method 'uniform' or 'block'."
            )
        if not _is_sequence(self.keep) or not all(each in KEEP for each in self.keep):
            raise ConfigError(f"Recompute.keep is {self.keep!r}; allowed: any of {', '.join(KEEP)}.")
        if not isinstance(self.prefetch, bool):
            raise ConfigError(f"Recompute.prefetch is {self.prefetch!r}; allowed: True or False.")


@dataclass(frozen=True, slots=True)
class OverlapConfig:
    """The choices of `fxoverlap.transform`. Every field is checked when the config is built.

    Attributes:
        pattern: hybrid layer pattern such as `"*-[*E]"`; None: logical layers are found in the graph.
        layers, mtp_layers: FQN glob, or a sequence of them, of the physical layers.
        schedule: "auto", "megatron", "sequential", or a policy
            `(f, b, costs, config) -> list[(ScheduleNode, "F" | "B")]`.
        delay_wgrad: weight-gradient nodes are separate and movable.
        recompute: what is computed again in the backward.
        early_release: a layer's pre_dispatch.B comes before experts.F of the layer beside it: less memory, less cover.
        ramp: how the first forward and the last backward are covered, "none" or "pair": the first two forwards run
            beside each other, and the last two backwards, with one more microbatch of activations.
        memory_budget: bytes a rank, or None.
        imbalance: factor on balanced rows for which memory is planned, at least 1.
        compile: None, "inductor", or a backend `(gm, example_inputs) -> callable`.
        grad_scale: factor on every microbatch's loss before backward; a number or a 0-dim tensor.
        opaque: module types or FQN globs that are not traced into.
        hooks: "refuse" or "trace".
        dynamic: "auto" captures up to `max_variants` shapes, False one.
        process_group: the expert-parallel group; None: found in the graph.
        passes: replaces the default pass lists.
        costs: where the times of nodes come from, which "auto" and policies decide by. None: measured by profiled
            steps, a roofline for the preset "cpu" before; the name of another preset: a roofline for it; a path (a
            text that ends in .json, or a PathLike): a table, see docs/costs.md.

    Raises:
        ConfigError: a field has a value that is not allowed.
        UnsupportedError: a field asks for what fxoverlap cannot do yet.
    """

    pattern: str | None = None
    layers: str | Sequence[str] = "layers.*"
    mtp_layers: str | Sequence[str] = "mtp.*"
    schedule: str | Callable[..., Any] = "auto"
    delay_wgrad: bool = True
    recompute: Recompute | None = None
    early_release: bool = False
    ramp: str = "none"
    memory_budget: int | None = None
    imbalance: float = 1.25
    compile: str | Callable[..., Any] | None = None
    grad_scale: float | torch.Tensor = 1.0
    opaque: Sequence[Any] = ()
    hooks: str = "refuse"
    dynamic: str | bool = "auto"
    max_variants: int = 8
    process_group: Any = None
    passes: Sequence[Callable[..., Any]] | None = None
    costs: str | PathLike[str] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> OverlapConfig:
        """The same config: it cannot change, and a process group cannot be copied."""
        return self

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_globs()
        self._check_costs()
        self._refuse_what_is_missing()

    def _check_choices(self) -> None:
        if self.pattern is not None:
            try:
                parse(self.pattern)
            except ValueError as error:
                raise ConfigError(f"OverlapConfig.pattern is {self.pattern!r}: {error}") from error
        if not callable(self.schedule) and self.schedule not in SCHEDULES:
            raise _reject("schedule", self.schedule, f"{', '.join(SCHEDULES)}, or a policy function")
        for name in ("delay_wgrad", "early_release"):
            if not isinstance(getattr(self, name), bool):
                raise _reject(name, getattr(self, name), "True or False")
        if self.ramp not in ("none", "pair"):
            raise _reject("ramp", self.ramp, "none, pair")
        if self.hooks not in ("refuse", "trace"):
            raise _reject("hooks", self.hooks, "refuse, trace")
        if self.dynamic != "auto" and self.dynamic is not False:
            raise _reject("dynamic", self.dynamic, '"auto", False')
        if self.compile is not None and self.compile != "inductor" and not callable(self.compile):
            raise _reject("compile", self.compile, 'None, "inductor", or a torch.compile backend')
        if self.recompute is not None and not isinstance(self.recompute, Recompute):
            raise _reject("recompute", self.recompute, "None or fxoverlap.Recompute(...)")

    def _check_numbers(self) -> None:
        _positive("OverlapConfig", "max_variants", self.max_variants)
        if self.memory_budget is not None:
            _positive("OverlapConfig", "memory_budget", self.memory_budget)
        number = isinstance(self.imbalance, (int, float)) and not isinstance(self.imbalance, bool)
        if not number or not 1 <= self.imbalance < float("inf"):
            raise _reject("imbalance", self.imbalance, "a finite number of at least 1")
        check_grad_scale("OverlapConfig.grad_scale", self.grad_scale)

    def _check_globs(self) -> None:
        for name in ("layers", "mtp_layers"):
            value = getattr(self, name)
            globs = [value] if isinstance(value, str) else value
            if not isinstance(globs, Sequence) or not all(
                isinstance(glob, str) and all(glob.split(".")) for glob in globs
            ):
                raise _reject(name, value, "an FQN glob such as 'layers.*', or a sequence of them")
        if not _is_sequence(self.opaque) or not all(isinstance(each, (str, type)) for each in self.opaque):
            raise _reject("opaque", self.opaque, "a sequence of module types or FQN globs")
        group = self.process_group
        if group is not None and not isinstance(group, str) and not hasattr(group, "group_name"):
            raise _reject("process_group", group, "None, a ProcessGroup, or the name of one")
        if self.passes is not None:
            if not _is_sequence(self.passes) or not self.passes:
                raise _reject(
                    "passes",
                    self.passes,
                    'None, or at least one function with an attribute stage of "joint", "chunk" or "plan"',
                )
            for each in self.passes:
                if not callable(each) or getattr(each, "stage", None) not in ("joint", "chunk", "plan"):
                    raise _reject("passes", each, 'functions with an attribute stage of "joint", "chunk" or "plan"')

    def _check_costs(self) -> None:
        if cost_file.is_path(self.costs):
            cost_file.read(self.costs)
        elif self.costs is not None and (not isinstance(self.costs, str) or self.costs not in PRESETS):
            raise _reject("costs", self.costs, f"None, {', '.join(PRESETS)}, or the path of a .json file")

    def _refuse_what_is_missing(self) -> None:
        missing = {
            "compile": self.compile is not None,
            "opaque": len(self.opaque) > 0,
        }
        for name, asked in missing.items():
            if asked:
                raise UnsupportedError(
                    f"OverlapConfig.{name} is {getattr(self, name)!r}: this version of fxoverlap cannot do it yet. "
                    f"Leave {name} at its default."
                )


def check_grad_scale(subject: str, value: object) -> None:
    """Raise ConfigError unless `value` is a finite number or a 0-dim floating point tensor."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 and value.is_floating_point():
            return
    elif (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and value == value
        and abs(value) != float("inf")
    ):
        return
    raise ConfigError(f"{subject} is {value!r}; allowed: a finite number or a 0-dim floating point tensor.")
