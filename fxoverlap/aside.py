"""What forward's Python does besides computing, while it is traced: kept apart, or refused.

Attributes that forward assigns and containers that it fills are put back, and random generators too. What a captured
graph would silently miss raises UnsupportedError: seeds, draws of Python or NumPy, new storages of tensors.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxoverlap.errors import UnsupportedError


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[Before]:
    """Put everything that the modules hold back when the block ends."""
    before = Before(model)
    try:
        yield before
    finally:
        before.restore()


class Watch(TorchFunctionMode):
    """Raises UnsupportedError where forward does what no graph shows.

    That is a write to a tensor's `.data` or to a loose tensor (parameters, buffers and what forward makes are tensors
    of the tracer; a plain one was there before), and a draw from a generator that forward made: it would be made once.

    Attributes:
        generators: those that forward drew from.
        known: those that it drew from when it ran before; None if it did not.
    """

    def __init__(self, known: list[torch.Generator] | None) -> None:
        super().__init__()
        self.generators: list[torch.Generator] = []
        self.known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA:
            raise UnsupportedError(
                "The forward assigns to the .data of a tensor, which tracing cannot see. Write in place, for example "
                "with .copy_(), or assign a buffer anew."
            )
        name = getattr(func, "__name__", "")
        is_write = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        if is_write and args and type(args[0]) is torch.Tensor:
            raise UnsupportedError(
                f"The forward writes in place ({name}) to a tensor of shape {tuple(args[0].shape)} that is neither a "
                f"buffer nor made in forward. Register it as a buffer."
            )
        generator = (kwargs or {}).get("generator")
        if generator is not None:
            self.generators.append(generator)
            if self.known is not None and all(generator is not each for each in self.known):
                _refuse_seed()
        return func(*args, **(kwargs or {}))


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_WRITES = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_WRITES.add("__setitem__")


class Before:
    """What the modules of a model hold: their attributes, and the contents of plain containers among these.

    Attributes:
        changed: FQNs of the attributes that were something else when they were put back.
        replaced: the tensors that had been there, by the same names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.changed: list[str] = []
        self.replaced: dict[str, torch.Tensor] = {}
        self._kept: list[tuple[str, Any, Any]] = []
        self._attributes: set[int] = set()
        seen: set[int] = set()
        for fqn, module in model.named_modules():
            for named in (module.__dict__, *(module.__dict__[name] for name in _REGISTRIES)):
                self._attributes.add(id(named))
                seen.add(id(named))
                self._kept.append((fqn, named, dict(named)))
            for name, value in module.__dict__.items():
                self._keep(f"{fqn}.{name}".lstrip("."), value, seen)

    def _keep(self, path: str, value: Any, seen: set[int]) -> None:
        if type(value) not in (*_CONTAINERS, tuple) or id(value) in seen:
            return
        seen.add(id(value))
        if type(value) is not tuple:
            self._kept.append((path, value, copy.copy(value)))
        for each in list(value.values() if isinstance(value, dict) else value):
            self._keep(path, each, seen)

    def restore(self) -> None:
        """Put everything back, into the same containers, and note what was something else."""
        for path, live, saved in self._kept:
            old, new = _entries(saved), _entries(live)
            for key in {**old, **new}:
                if old.get(key, _MISSING) is new.get(key, _MISSING):
                    continue
                name = f"{path}.{key}".lstrip(".") if id(live) in self._attributes else path
                if name not in self.changed:
                    self.changed.append(name)
                if isinstance(old.get(key), torch.Tensor):
                    self.replaced[name] = old[key]
            if old.keys() == new.keys() and list(old) == list(new) and all(old[key] is new[key] for key in old):
                continue
            live.clear()
            (live.update if isinstance(live, (dict, set)) else live.extend)(saved)


_MISSING = object()
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque)


def _entries(container: Any) -> dict[Any, Any]:
    if isinstance(container, set):
        return {id(each): each for each in container}
    return container if isinstance(container, dict) else dict(enumerate(container))


_MARK = 0x6F7665726C6170
"""A seed that nobody else sets."""


@dataclass(slots=True)
class Draws:
    """What forward drew.

    Attributes:
        elsewhere: whether numbers came from the generator of Python or of NumPy.
    """

    elsewhere: bool = False

    def refuse_elsewhere(self) -> None:
        """Raise UnsupportedError if numbers came from elsewhere than torch."""
        if self.elsewhere:
            raise UnsupportedError(
                "The forward draws from Python's random or numpy.random, which happens while tracing only: every "
                "microbatch would get the same numbers. Draw with torch's functions."
            )


@contextlib.contextmanager
def draws_kept(model: nn.Module, draws: Draws) -> Iterator[None]:
    """Put the random generators back when the block, a forward, ends, and note what it drew.

    Raises UnsupportedError if it seeded a generator of torch that is the default one or a module's: that would happen
    while tracing only.
    """
    held = [each for module in model.modules() for each in vars(module).values() if isinstance(each, torch.Generator)]
    generators = [(each, each.get_state()) for each in (torch.default_generator, *held)]
    foreign = _foreign_generators(model)
    before = [get() for get, _ in foreign]
    for generator, _ in generators:
        generator.manual_seed(_MARK)
    try:
        with mock.patch.object(torch.random, "fork_rng", _refuse_seed):
            yield
        if any(generator.initial_seed() != _MARK for generator, _ in generators):
            _refuse_seed()
        if any(repr(get()) != repr(state) for (get, _), state in zip(foreign, before, strict=True)):
            draws.elsewhere = True
    finally:
        for generator, state in generators:
            generator.set_state(state)
        for (_, put), state in zip(foreign, before, strict=True):
            put(state)


def _foreign_generators(model: nn.Module) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to get and to set the state of the generators of Python and NumPy, and of such that modules hold."""
    found: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [(random.getstate, random.setstate)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append((functools.partial(numpy.random.get_state, legacy=False), numpy.random.set_state))
    for each in (value for module in model.modules() for value in vars(module).values()):
        if isinstance(each, random.Random):
            found.append((each.getstate, each.setstate))
        elif numpy is not None and isinstance(each, numpy.random.Generator):
            bits = each.bit_generator
            found.append((functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")))
    return found


def _refuse_seed(*args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(
        "The forward makes or seeds a random generator or forks its state, which happens while tracing only: a step "
        "would draw other numbers than eager. Make it in __init__, and seed it before the step."
    )
