"""Random layer patterns, and what two ranks find out about them."""

from __future__ import annotations

import random
import traceback
from typing import Any

import torch
import torch.distributed as dist
from toys import batches, toy, train_both

import fxoverlap as fxo
from fxoverlap.ir import InputKind, Phase
from fxoverlap.models import HybridModel
from fxoverlap.models.hybrid import SYMBOLS
from fxoverlap.pattern import NAMESPACES, Pattern

SMALL: dict[str, Any] = {
    "mla": {"kv_rank": 8, "q_rank": 8, "rope_dim": 4, "head_dim": 8},
    "mamba": {"head_dim": 8, "state_dim": 8, "chunk": 4},
    "delta": {"key_heads": 1, "chunk": 4},
}


def group_start(symbols: str, start: int, end: int) -> int:
    """Where the longest group begins that ends at `end` and not before `start`: one layer of each namespace."""
    return next(i for i in range(start, end) if len({NAMESPACES[symbol] for symbol in symbols[i:end]}) == end - i)


def random_pattern(seed: int) -> str:
    """4 to 8 layers, at least one of them a mixture of experts; some of the layers before one are in brackets.

    A model has plain or latent attention, and a group one layer of each checkpoint namespace.
    """
    draw = random.Random(seed)
    other = "*+"[seed % 2]
    symbols = "".join(draw.choices(sorted(set(SYMBOLS) - {other}), k=draw.randint(4, 8)))
    if "E" not in symbols:
        at = draw.randrange(len(symbols))
        symbols = f"{symbols[:at]}E{symbols[at + 1 :]}"
    groups, start = [], 0
    for end in range(1, len(symbols) + 1):
        if symbols[end - 1] == "E" or draw.random() < 0.2:
            if draw.random() < 0.5:
                groups.append((group_start(symbols, start, end), end))
            start = end
    return str(Pattern(symbols, tuple(groups)))


def hybrid(pattern: str, group: dist.ProcessGroup | None, dtype: torch.dtype = torch.float32) -> HybridModel:
    """The toy with every kind of layer in its smallest size."""
    return toy(pattern, group, **SMALL).to(dtype)


def outcome(pattern: str, dtype: torch.dtype, rank: int) -> list[str]:
    """Train a pattern's model beside eager, with 3 microbatches a step; every difference, or the error.

    Every other pattern is left for the passes to find.
    """
    given = pattern if len(pattern) % 2 else None
    model = hybrid(pattern, dist.group.WORLD, dtype)
    try:
        return train_both(model, lambda step: batches(3, rank, seed=step), fxo.OverlapConfig(given), steps=2)
    except Exception:
        return [traceback.format_exc()]


def outcomes(rank: int, cases: list[tuple[str, torch.dtype]]) -> list[list[str]]:
    """On one of two ranks: the outcome of each case."""
    return [outcome(pattern, dtype, rank) for pattern, dtype in cases]


def gradient_phases(overlapped: fxo.OverlappedModel) -> dict[str, Phase]:
    """The phase of the node that makes each parameter's gradient."""
    chunk = overlapped.plan("FB").backward
    assert chunk is not None and chunk.joint is not None
    made_by = {op: node.phase for node in chunk.nodes for op in node.ops}
    names = {each.value: each.name for each in chunk.joint.inputs if each.kind is InputKind.PARAM}
    return {names[target]: made_by[value] for value, target in chunk.joint.gradients if target in names}
