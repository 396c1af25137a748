"""When a captured graph may be used again: the variant key.

A capture bakes in what Python decided while tracing. The key holds all of it: structure and Python leaves of the
microbatch, shapes, strides, dtypes and requires_grad of its tensors, the model's parameters and their requires_grad,
train/eval modes and other plain attributes of its modules, and the ambient autocast, default dtype and determinism.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxoverlap.microbatch import Leaves

Key = tuple[Any, ...]


def leaf_key(value: Any) -> Any:
    """What of one microbatch leaf a capture depends on."""
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.stride(), value.dtype, value.device.type, value.requires_grad)
    # repr tells True from 1 and 1.0 from 1, which compare equal.
    return (type(value).__qualname__, repr(value))


def model_key(model: nn.Module) -> Key:
    """What of the model a capture depends on."""
    params = tuple((name, id(p), p.requires_grad, tuple(p.shape), p.dtype) for name, p in model.named_parameters())
    buffers = tuple((name, id(b), tuple(b.shape), b.dtype) for name, b in model.named_buffers())
    attributes = tuple((type(module), _baked_in(module)) for module in model.modules())
    return params, buffers, attributes


def _baked_in(module: nn.Module) -> Key:
    """The plain attributes of a module, its mode included, and the identities of tensors that are not registered."""
    found = []
    for name, value in vars(module).items():
        if isinstance(value, (bool, int, float, str, type(None))):
            found.append((name, repr(value)))
        elif isinstance(value, torch.Tensor):
            found.append((name, str(id(value))))
    return tuple(found)


def ambient_key() -> Key:
    """What of the surroundings a capture depends on."""
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    return autocast, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def microbatch_key(leaves: Leaves) -> Key:
    """What of a microbatch a capture depends on."""
    return leaves.spec, tuple(leaf_key(value) for value in leaves.values)
