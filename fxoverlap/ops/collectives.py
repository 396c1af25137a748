"""The functional collectives by their operators: which ops launch one, which one waits, in which namespaces they are.

A launch returns before the data has arrived; its result must go through `WAIT` before anything reads it. The last
argument of a launch is the name of its process group.
"""

from __future__ import annotations

from typing import Any

import torch

import fxoverlap.compat  # defines the functional collectives
import fxoverlap.ops.exchange  # noqa: F401  (defines the exchange)

ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
EXCHANGE = torch.ops.fxoverlap.exchange.default
LAUNCHES = (ALL_TO_ALL, EXCHANGE)
"""The all-to-alls, of tokens or of anything else."""

WAIT = torch.ops._c10d_functional.wait_tensor.default

OTHER_NAMES: dict[Any, Any] = {
    torch.ops._c10d_functional_autograd.all_to_all_single.default: ALL_TO_ALL,
    torch.ops.c10d_functional.wait_tensor.default: WAIT,
}
"""The same ops under other names, as models that call them by name have them."""

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")


def is_collective(target: Any) -> bool:
    """Whether the target of an FX node launches a collective of any kind, or waits for one."""
    return target in LAUNCHES or getattr(target, "namespace", None) in _NAMESPACES
