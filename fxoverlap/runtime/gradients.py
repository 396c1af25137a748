"""Gradients to where the user looks for them: `.grad`, through hooks if there are any.

A tensor with hooks gets its gradient through the autograd engine, so that tensor hooks, post-accumulate hooks and
queued callbacks run as they do in eager. Without hooks it is assigned or added directly, which gives the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from fxoverlap import compat


def held_accumulators(targets: Iterable[torch.Tensor]) -> frozenset[int]:
    """`id`s of the tensors to whose accumulation somebody may have added hooks that cannot be seen."""
    leaves = (target for target in targets if target.is_leaf and target.requires_grad)
    return frozenset(id(leaf) for leaf in leaves if compat.accumulator_is_held(leaf))


def deliver(targets: list[torch.Tensor], gradients: list[torch.Tensor], held: frozenset[int]) -> None:
    """Accumulate one microbatch's gradients of several leaf tensors, in order.

    Args:
        targets: the tensors.
        gradients: one each.
        held: what `held_accumulators` found.
    """
    if any(id(target) in held or compat.has_tensor_hooks(target) for target in targets):
        with torch.enable_grad():
            torch.autograd.backward(targets, gradients)
        return
    given_away: set[int] = set()
    for target, gradient in zip(targets, gradients, strict=True):
        if target.grad is not None:
            target.grad.add_(gradient)
        elif id(gradient) in given_away:
            target.grad = _copy(gradient, target)
        else:
            given_away.add(id(gradient))
            target.grad = _own(gradient, target)


@contextlib.contextmanager
def all_or_nothing(targets: Sequence[torch.Tensor]) -> Iterator[None]:
    """Take back the gradients that a failed step has made: a `.grad` that was None is None again."""
    without = [target for target in targets if target.is_leaf and target.grad is None]
    try:
        yield
    except BaseException:
        for target in without:
            target.grad = None
        raise


def _own(gradient: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The gradient in the layout of its target, in a storage that nothing else uses."""
    dense = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    if dense and gradient.stride() == target.stride() and not compat.shares_storage(gradient):
        return gradient
    return _copy(gradient, target)


def _copy(gradient: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(target, requires_grad=False).copy_(gradient)
