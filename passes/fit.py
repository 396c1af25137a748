"""The physical layers of a model as its pattern says, or as they are: a fact that `layers` writes down.

In:  the runs of layers in model order, those of the trunk first; the pattern, if there is one; the exchanges.
Out: the physical layers, with their symbols, logical layers (`logical`) and depths.

The trunk and each depth of multi-token prediction have logical layers of their own.

Raises UnsupportedError: a pattern is given and no layer matches; the number of layers differs from the pattern's
symbols, in the trunk or in a depth; an exchange runs in a layer whose symbol is not `E`, or none does in one that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import Exchange, PhysicalLayer
from fxoverlap.passes.logical import logical_layers
from fxoverlap.pattern import Pattern


class Call(NamedTuple):
    """A module that runs, and how often it had run before."""

    fqn: str
    number: int


class Run(NamedTuple):
    """What an op is of.

    Attributes:
        layer: the physical layer, or the depth of multi-token prediction for what is in none of its layers.
        depth: the depth that it is in; None in the trunk.
    """

    layer: Call
    depth: Call | None


def physical_layers(
    runs: Sequence[Run],
    pattern: Pattern | None,
    exchanges: Sequence[Exchange],
    config: OverlapConfig,
) -> tuple[PhysicalLayer, ...]:
    """The layers of these runs, with their symbols, logical layers and depths."""
    fqns = [run.layer.fqn for run in runs]
    parts = [list(part) for _, part in groupby(range(len(runs)), key=lambda i: runs[i].depth)]
    trunk = parts.pop(0) if runs and runs[0].depth is None else []
    patterns: list[Pattern | None] = [None] * (1 + len(parts))
    if pattern is not None:
        # First, as layers of depths that mtp_layers does not match look like layers of the trunk.
        parts = _fit_depths(pattern, parts, runs, config)
        _check_number(pattern, len(pattern.symbols), [fqns[i] for i in trunk], "layers", config)
        patterns = [pattern, *[pattern.mtp] * len(parts)]
    with_exchange = {each.layer for each in exchanges}
    found: list[PhysicalLayer] = []
    for number, part in enumerate([trunk, *parts]):
        own = patterns[number]
        if own is not None:
            _check_symbols(str(pattern), own.symbols, part, fqns, with_exchange)
        symbols: Sequence[str | None] = [None] * len(part) if own is None else own.symbols
        is_moe = [symbol == "E" or i in with_exchange for i, symbol in zip(part, symbols, strict=True)]
        groups = logical_layers(is_moe, () if own is None else own.groups)
        start, depth = found[-1].logical + 1 if found else 0, number - 1 if number else None
        for i, symbol, group in zip(part, symbols, groups, strict=True):
            found.append(PhysicalLayer(fqns[i], symbol, start + group, depth))
    return tuple(found)


def _fit_depths(
    pattern: Pattern, parts: Sequence[list[int]], runs: Sequence[Run], config: OverlapConfig
) -> list[list[int]]:
    """The layers of each depth of a pattern; the parts are what the globs make the depths."""
    fqns = [run.layer.fqn for run in runs]
    flat = [i for part in parts for i in part]
    size = 0 if pattern.mtp is None else len(pattern.mtp.symbols)
    _check_number(pattern, size * pattern.depths, [fqns[i] for i in flat], "mtp_layers", config)
    depths = [flat[start : start + size] for start in range(0, len(flat), size or 1)]
    for part in parts:
        # What a glob matches may be a layer, but a depth that holds layers is a depth.
        if part not in depths and any(runs[i].layer != runs[i].depth for i in part):
            raise UnsupportedError(
                f"The pattern '{pattern}' has {size} layers in each MTP part, but a depth of the model has "
                f"{len(part)}: {', '.join(fqns[i] for i in part)}. Write one symbol for each layer of a depth, and as "
                f"many parts, each after a '/', as there are depths."
            )
    return depths


def _check_number(pattern: Pattern, symbols: int, found: Sequence[str], field: str, config: OverlapConfig) -> None:
    """Raise UnsupportedError unless a field's globs match a layer for each symbol."""
    globs, where = getattr(config, field), "" if field == "layers" else " in its MTP parts"
    if symbols and not found:
        raise UnsupportedError(
            f"The pattern '{pattern}' needs {symbols} layers{where}, but {field}={globs!r} matches no module that the "
            f"forward runs. Set OverlapConfig.{field} to the FQN glob of the model's."
        )
    if len(found) != symbols:
        raise UnsupportedError(
            f"The pattern '{pattern}' has {symbols} layers{where}, but the forward runs {len(found)}: "
            f"{', '.join(found)}, which {field}={globs!r} matches. Write one symbol for each layer, each depth of "
            f"multi-token prediction behind a '/', or set OverlapConfig.{field} to match no more than the layers."
        )


def _check_symbols(
    pattern: str, symbols: str, part: Sequence[int], fqns: Sequence[str], with_exchange: set[int | None]
) -> None:
    """Raise UnsupportedError unless the symbols say which of these layers exchange tokens."""
    for i, symbol in zip(part, symbols, strict=True):
        if i in with_exchange and symbol != "E":
            raise UnsupportedError(
                f"The pattern '{pattern}' says {symbol!r} for layer {fqns[i]}, but that layer exchanges tokens. "
                f"Write 'E' for it."
            )
    missing = [fqns[i] for i, symbol in zip(part, symbols, strict=True) if symbol == "E" and i not in with_exchange]
    if with_exchange and missing:
        raise UnsupportedError(
            f"The pattern '{pattern}' says 'E' for {', '.join(missing)}, which exchanges no tokens while other layers "
            f"do. Write '-' for a dense layer."
        )
