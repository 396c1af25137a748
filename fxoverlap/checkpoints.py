"""The user's own `torch.utils.checkpoint` calls while a model is traced.

Each runs its function once, as it is, and every op in it carries the name of the region, which the pass `recompute`
replays. What matters to eager's replay only (`preserve_rng_state`, `determinism_check`, `debug`, `early_stop`) is
ignored: a replay of ours draws the masks of the forward and does the same ops.

Raises UnsupportedError: a checkpoint inside a checkpoint; a `context_fn` that is no selective checkpoint's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxoverlap import compat
from fxoverlap.callers import Trail
from fxoverlap.errors import UnsupportedError


class Checkpoints:
    """Stands in for `torch.utils.checkpoint` (`compat.Checkpoint`).

    Attributes:
        reentrant: names of the regions that `use_reentrant=True` made.
    """

    def __init__(self, model: nn.Module, trail: Trail) -> None:
        self.reentrant: set[str] = set()
        self._fqns = {module: fqn for fqn, module in model.named_modules()}
        self._trail = trail
        self._under_way: str | None = None

    def __call__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reentrant: bool,
        context_fn: Callable[[], Any] | None,
    ) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if reentrant and not any(isinstance(each, Tensor) and each.requires_grad for each in args):
            # As in eager: nothing in it gets a gradient.
            with torch.no_grad():
                return function(*args, **kwargs)
        name = self._name(function)
        noted = _noted_policy(name, context_fn)
        if reentrant:
            self.reentrant.add(name)
            args = tuple(_Inside.apply(each) if _is_trained(each) else each for each in args)
        with self._begun(name), noted, compat.annotating("region", name):
            result = function(*args, **kwargs)
        return _as_reentrant(result) if reentrant else result

    def _name(self, function: Callable[..., Any]) -> str:
        module = _module_of(function)
        fqn = self._fqns.get(module) if module is not None else None
        fqn = (self._trail.innermost if fqn is None else fqn) or "(model)"
        return f"{fqn}#{self._trail.count_checkpoint(fqn)}"

    @contextlib.contextmanager
    def _begun(self, name: str) -> Iterator[None]:
        if self._under_way is not None:
            raise UnsupportedError(
                f"A torch.utils.checkpoint ({name}) is called inside another one ({self._under_way}), expected regions "
                f"that do not nest. Keep the outer or the inner one."
            )
        self._under_way = name
        try:
            yield
        finally:
            self._under_way = None


def _module_of(function: Any) -> nn.Module | None:
    """The module that a checkpointed function is, or is a method of, under whatever wrappers."""
    while function is not None and not isinstance(function, nn.Module):
        owner = getattr(function, "__self__", None)
        if isinstance(owner, nn.Module):
            return owner
        function = getattr(function, "func" if isinstance(function, functools.partial) else "__wrapped__", None)
    return function


def _noted_policy(
    name: str, context_fn: Callable[[], Any] | None
) -> contextlib.AbstractContextManager[Any, bool | None]:
    if context_fn is None:
        return contextlib.nullcontext()
    contexts = context_fn()
    if all(type(each) is contextlib.nullcontext for each in contexts):
        return contextlib.nullcontext()
    policy = compat.policy_of(contexts)
    if policy is None:
        kinds = " and ".join(type(each).__name__ for each in contexts)
        raise UnsupportedError(
            f"The context_fn of a torch.utils.checkpoint ({name}) gives {kinds}, which could do anything in a replay; "
            f"expected what create_selective_checkpoint_contexts gives. Say by such a policy what is saved, or leave "
            f"context_fn out."
        )
    return compat.PolicyNoted(policy)


# --- use_reentrant=True ---------------------------------------------------------------------------------------------
#
# Eager runs the region without a graph, and in the backward again with one that begins at the arguments and ends at the
# results. So the gradient of an argument is summed inside the region before it joins what comes from elsewhere; a
# result that nothing reads has a gradient of zeros; and nothing flows through containers.


class _Inside(torch.autograd.Function):
    """An argument as the region sees it: what comes back from the region is one gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same tensor."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The same gradient."""
        return gradient


class _Outside(torch.autograd.Function):
    """The results as what is behind the region sees them: their gradients come together, missing ones as zeros."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> tuple[Tensor, ...]:
        """The same tensors."""
        return tuple(each.view_as(each) for each in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """The same gradients."""
        return gradients


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _as_reentrant(result: Any) -> Any:
    """What a region returned, with the gradients that flow into it from behind."""
    given = list(result) if isinstance(result, tuple) else [result]
    parts = [each if isinstance(each, Tensor) else _detached(each) for each in given]
    trained = [i for i, part in enumerate(parts) if _is_trained(part)]
    if trained:
        for i, part in zip(trained, _Outside.apply(*(parts[i] for i in trained)), strict=True):
            parts[i] = part
    return tuple(parts) if isinstance(result, tuple) else parts[0]


def _detached(tree: Any) -> Any:
    leaves, spec = compat.flatten_with_path(tree)
    return compat.unflatten([each.detach() if isinstance(each, Tensor) else each for _, each in leaves], spec)
