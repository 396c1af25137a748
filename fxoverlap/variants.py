"""When a captured graph may be used again: the variant key.

A capture bakes in what Python decided while tracing. The key holds all of it by name: structure and Python leaves of
the microbatch, shapes, strides, dtypes and requires_grad of its tensors, the model's parameters, buffers and their
requires_grad, train/eval modes, hooks and other plain attributes of its modules, and the ambient settings of torch.
Tensors that are plain attributes count only where the graph holds them: forward may leave a new one at every call.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxoverlap import compat
from fxoverlap.microbatch import Leaves

STRUCTURE = "the structure of the microbatch"

_PLAIN_OBJECTS = (types.SimpleNamespace,)
_VALUES = (bool, int, float, complex, str, bytes, type(None), slice, range, enum.Enum, torch.dtype, torch.device)

_DEEPEST = 8
"""Containers in containers are looked into that far: they may hold themselves."""

_LONGEST = 256
"""Containers with more entries are compared by their length: they hold data, and reading them takes time."""


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """What a capture depends on.

    Attributes:
        entries: name, such as `args[0]` or `attribute layers.0.training`, -> what is compared.
        tensors: name -> tensor, for the tensors that modules hold without having registered them.
    """

    entries: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    def fits(self, now: Key, constants: Iterable[torch.Tensor], assigned: Sequence[str]) -> bool:
        """Whether a capture with this key is right for what there is now.

        Args:
            now: what there is.
            constants: the tensors that the graph holds.
            assigned: FQNs of attributes that forward assigns: what a call has left in them does not count.
        """
        for name in self._differing(now):
            path = name.removeprefix("length of ").removeprefix("attribute ")
            if not any(path == each or path.startswith((f"{each}[", f"{each}.")) for each in assigned):
                return False
        held = {compat.storage_id(constant) for constant in constants}
        read = {name: value for name, value in self.tensors.items() if compat.storage_id(value) in held}
        return all(now.tensors.get(name) is value for name, value in read.items())

    def is_of_other_tensors(self, now: Key) -> bool:
        """Whether a parameter or buffer was another object, so that a capture with this key only keeps it alive."""
        names = [name for name in self._differing(now) if name.startswith(("parameter ", "buffer "))]
        return any(self.entries.get(name, (None,))[0] != now.entries.get(name, (None,))[0] for name in names)

    def _differing(self, now: Key) -> list[str]:
        if self.entries == now.entries:
            return []
        missing = object()
        names = {**self.entries, **now.entries}
        return [name for name in names if self.entries.get(name, missing) != now.entries.get(name, missing)]


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """An object that equals itself only. It is held, so that no other one gets its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        name = getattr(self.value, "__qualname__", type(self.value).__qualname__)
        return f"{name} at {id(self.value):#x}"


def around_key(model: nn.Module) -> Key:
    """What of the model and the surroundings a capture depends on."""
    entries: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        entries[f"parameter {name}"] = (_Same(param), param.requires_grad, *_layout(param))
    for name, buffer in model.named_buffers():
        entries[f"buffer {name}"] = (_Same(buffer), buffer.requires_grad, *_layout(buffer))
    for fqn, module in model.named_modules():
        entries[f"type of module {fqn!r}"] = type(module)
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            for path, leaf in _leaves(f"attribute {fqn}.{attribute}" if fqn else f"attribute {attribute}", value):
                if isinstance(leaf, torch.Tensor):
                    tensors[path] = leaf
                else:
                    entries[path] = repr(leaf) if isinstance(leaf, _VALUES) else _Same(leaf)
    return Key(entries | _ambient(), tensors)


def microbatch_key(leaves: Leaves) -> dict[str, Any]:
    """What of a microbatch a capture depends on, by the paths of its leaves."""
    paths = zip(leaves.paths, leaves.values, strict=True)
    return {STRUCTURE: leaves.spec} | {path: _leaf_key(value) for path, value in paths}


def _leaf_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", *_layout(value), value.device.type, value.requires_grad)
    # repr tells True from 1 and 1.0 from 1, which compare equal.
    return (type(value).__qualname__, repr(value))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return ()  # capture refuses it
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _leaves(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """A value, or the contents of plain containers, with paths; containers that are long give their length."""
    is_record = isinstance(value, _PLAIN_OBJECTS) or is_dataclass(value)
    if is_record and not isinstance(value, type) and depth < _DEEPEST:
        yield path, value
        value = vars(value) if hasattr(value, "__dict__") else {}
    if not isinstance(value, (list, tuple, dict, set, frozenset, deque)) or depth >= _DEEPEST:
        yield path, value
    elif len(value) > _LONGEST:
        yield f"length of {path}", len(value)
    elif isinstance(value, (set, frozenset)):
        yield path, str(sorted(map(repr, value)))
    else:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(f"{path}[{key!r}]", each, depth + 1)


def _ambient() -> dict[str, Any]:
    """The settings of torch that a trace depends on."""
    kernels = torch.backends.cuda
    return {
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "the default dtype": torch.get_default_dtype(),
        "the use of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "hooks of all modules": compat.hooks_of_all_modules(),
        "the kernels for attention": (kernels.flash_sdp_enabled(), kernels.math_sdp_enabled()),
    }
