"""Who called each op while a model is traced: the FQN of the module, and the calls that led to it."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fxoverlap import compat

_MISSING = object()


class Place:
    """The FQN of the innermost module whose forward raised."""

    fqn: str | None = None


class Trail:
    """The calls of submodules that are under way while tracing, each as `fqn#number of the call`."""

    def __init__(self) -> None:
        self._under_way: list[str] = []
        self._count: Counter[str] = Counter()
        self._checkpoints: Counter[str] = Counter()

    @property
    def innermost(self) -> str:
        """FQN of the module whose forward runs."""
        return self._under_way[-1].rpartition("#")[0]

    def count_checkpoint(self, what: str) -> int:
        """How many checkpoints this forward of the model has begun under a name before."""
        self._checkpoints[what] += 1
        return self._checkpoints[what] - 1

    def __str__(self) -> str:
        return "\n".join(self._under_way)

    def followed(self, forward: Callable[..., Any], fqn: str) -> Callable[..., Any]:
        """`forward` such that its calls are noted."""

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._under_way:  # the tracer runs the model several times
                self._count.clear()
                self._checkpoints.clear()
            self._under_way.append(f"{fqn}#{self._count[fqn]}")
            self._count[fqn] += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._under_way.pop()

        return call


@contextlib.contextmanager
def annotated(model: nn.Module, place: Place) -> Iterator[Trail]:
    """Let every op that a submodule's forward runs carry the submodule's FQN and the calls that led to it."""
    wrapped, trail = [], Trail()
    try:
        for fqn, module in model.named_modules():
            had = module.__dict__.get("forward", _MISSING)
            wrapped.append((module, had))
            forward = compat.annotated(module.forward, "fqn", functools.partial(str, fqn))
            forward = compat.annotated(forward, "calls", functools.partial(str, trail))
            module.forward = _note_failure(trail.followed(forward, fqn), fqn, place)
        yield trail
    finally:
        for module, had in wrapped:
            if had is _MISSING:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = had


def _note_failure(forward: Callable[..., Any], fqn: str, place: Place) -> Callable[..., Any]:
    @functools.wraps(forward)
    def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception:
            if place.fqn is None:
                place.fqn = fqn
            raise

    return noted
