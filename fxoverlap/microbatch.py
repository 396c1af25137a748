"""One microbatch in one form, whatever the user handed over.

`as_microbatch` takes a tuple of positional arguments (a plain tuple), a dict of keyword arguments, a `Microbatch`, or
one bare argument, and gives a `Microbatch`. `in_order` brings keyword arguments into one order where a forward cannot
see it, so that one capture serves all. `flatten` gives the leaves with their paths.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxoverlap import compat
from fxoverlap.config import check_grad_scale
from fxoverlap.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The arguments of one call of the model.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        grad_scale: factor on this microbatch's loss before backward; None: the config's.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    grad_scale: float | torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.args, tuple):
            raise ConfigError(f"Microbatch.args is a {type(self.args).__name__}; allowed: a tuple.")
        if not isinstance(self.kwargs, Mapping) or not all(isinstance(key, str) for key in self.kwargs):
            raise ConfigError(f"Microbatch.kwargs is {self.kwargs!r}; allowed: a dict with names as keys.")
        if self.grad_scale is not None:
            check_grad_scale("Microbatch.grad_scale", self.grad_scale)


def as_microbatch(given: Any) -> Microbatch:
    """The `Microbatch` that `given` means."""
    if isinstance(given, Microbatch):
        return given
    if type(given) is tuple:
        return Microbatch(given)
    if type(given) is dict:
        return Microbatch((), given)
    return Microbatch((given,))


def in_order(microbatch: Microbatch, forward: Callable[..., Any]) -> Microbatch:
    """The same arguments: keywords that `forward` names sorted by name, then the others, whose order its `**` shows."""
    if len(microbatch.kwargs) < 2:
        return microbatch
    parameters = inspect.signature(forward).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        named = {each.name for each in parameters} & microbatch.kwargs.keys()
    else:
        named = set(microbatch.kwargs)
    order = [*sorted(named), *(key for key in microbatch.kwargs if key not in named)]
    return replace(microbatch, kwargs={key: microbatch.kwargs[key] for key in order})


@dataclass(frozen=True, slots=True)
class Leaves:
    """A microbatch taken apart.

    Attributes:
        values: the leaves, tensors and others, in a fixed order.
        paths: where each one sits, such as `args[0]` or `kwargs['mask']`.
        spec: the structure, comparable with `==`.
    """

    values: tuple[Any, ...]
    paths: tuple[str, ...]
    spec: Any

    def tensors(self) -> list[torch.Tensor]:
        """The leaves that are tensors."""
        return [value for value in self.values if isinstance(value, torch.Tensor)]


def flatten(microbatch: Microbatch) -> Leaves:
    """Take a microbatch apart; `unflatten` puts it together again."""
    with_paths, spec = compat.flatten_with_path((microbatch.args, dict(microbatch.kwargs)))
    paths = tuple(("args" if path.startswith("[0]") else "kwargs") + path[3:] for path, _ in with_paths)
    return Leaves(tuple(value for _, value in with_paths), paths, spec)


def unflatten(values: list[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the microbatch that `flatten` took apart, with other leaves."""
    args, kwargs = compat.unflatten(values, spec)
    return args, kwargs
