"""Joint pass `layers`: label every op with its physical layer, by module FQN, and fit the pattern to the layers.

In:  JointGraph with ops tagged with FQNs.
Out: the same graph; `OpTag.layer` and `Exchange.layer` are filled in, and `physical` lists the layers in the order in
     which the model runs them, with the logical layers that they make (`logical`).

A glob matches whole FQN parts and may start at any part: `layers.*` matches `layers.3` and `model.layers.3`. Of nested
matches, in names and in calls, the outermost counts. A module that runs several times is a layer each time.

Raises UnsupportedError: a pattern is given and no layer matches; the number of layers differs from the pattern's
symbols; an exchange runs in a layer whose symbol is not `E`, or outside the layers while others run inside.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Sequence
from dataclasses import replace

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import META, Exchange, JointGraph, Phase, PhysicalLayer
from fxoverlap.passes import op_facts
from fxoverlap.passes.logical import logical_layers
from fxoverlap.pattern import Pattern, parse

Run = tuple[str, int]
"""FQN of a layer, and how often it had run before."""


def layers(joint: JointGraph, config: OverlapConfig) -> JointGraph:
    """Fill in layer labels."""
    globs = [config.layers] if isinstance(config.layers, str) else list(config.layers)
    nodes = list(op_facts.ops(joint.module.graph))
    found: dict[Run, int] = {}
    run_of = functools.cache(functools.partial(_run, globs))
    for node in nodes:
        tag = op_facts.tag(node)
        run = run_of(tag.calls or (f"{tag.fqn or ''}#0",))
        if run is not None and (tag.phase is Phase.F or run in found):
            index = found.setdefault(run, len(found))
            node.meta[META] = replace(tag, layer=index)
    by_name = {node.name: op_facts.tag(node).layer for node in nodes}
    exchanges = tuple(replace(each, layer=by_name[each.launches[0]]) for each in joint.exchanges)
    joint = replace(joint, exchanges=_same_layer_as_forward(exchanges))
    pattern = None if config.pattern is None else parse(config.pattern)
    fqns = [fqn for fqn, _ in found]
    if pattern is not None:
        _check_fit(pattern, fqns, joint.exchanges, globs)
    joint = replace(joint, physical=_physical(fqns, pattern, joint.exchanges))
    _refuse_exchanges_outside(joint, globs)
    return joint


layers.stage = "joint"  # type: ignore[attr-defined]


def _run(globs: list[str], calls: tuple[str, ...]) -> Run | None:
    """The layer that the outermost of nested calls is of or belongs to, and which of its runs it is.

    Runs are told apart where the layer itself is called; a model that calls the parts of a layer has one run of it.
    """
    for call in calls:
        fqn, _, number = call.rpartition("#")
        layer = _layer_fqn(fqn, globs)
        if layer is not None:
            return layer, int(number) if layer == fqn else 0
    return None


def _layer_fqn(fqn: str, globs: list[str]) -> str | None:
    """The outermost prefix of an FQN that a glob matches."""
    parts = fqn.split(".")
    for end in range(1, len(parts) + 1):
        prefix = ".".join(parts[:end])
        if any(matches(prefix, glob) for glob in globs):
            return prefix
    return None


def matches(fqn: str, glob: str) -> bool:
    """Whether a glob matches an FQN to its end: part by part, from any part on."""
    parts, patterns = fqn.split("."), glob.split(".")
    if len(parts) < len(patterns):
        return False
    return all(map(fnmatch.fnmatchcase, parts[-len(patterns) :], patterns))


def _same_layer_as_forward(exchanges: tuple) -> tuple:
    """Give each backward exchange the layer of its forward exchange; the label on its own op may be missing."""
    layer = {each.index: each.layer for each in exchanges if each.phase is Phase.F}
    return tuple(replace(each, layer=layer[each.index]) for each in exchanges)


def _check_fit(pattern: Pattern, found: list[str], exchanges: Sequence[Exchange], globs: list[str]) -> None:
    """Raise UnsupportedError unless the pattern describes the layers with these FQNs."""
    if not found:
        raise UnsupportedError(
            f"The pattern '{pattern}' needs {len(pattern.symbols)} layers, but the layers glob {globs} matches no "
            f"module that the forward runs. Set OverlapConfig.layers to the FQN glob of the model's layers."
        )
    if len(found) != len(pattern.symbols):
        raise UnsupportedError(
            f"The pattern '{pattern}' has {len(pattern.symbols)} layers, but the forward runs {len(found)}: "
            f"{', '.join(found)}. Write one symbol for each layer."
        )
    with_exchange = {each.layer for each in exchanges}
    for i, (fqn, symbol) in enumerate(zip(found, pattern.symbols, strict=True)):
        if i in with_exchange and symbol != "E":
            raise UnsupportedError(
                f"The pattern '{pattern}' says {symbol!r} for layer {fqn}, but that layer exchanges tokens. "
                f"Write 'E' for it."
            )
    missing = [found[i] for i, symbol in enumerate(pattern.symbols) if symbol == "E" and i not in with_exchange]
    if with_exchange and missing:
        raise UnsupportedError(
            f"The pattern '{pattern}' says 'E' for {', '.join(missing)}, which exchanges no tokens while other layers "
            f"do. Write '-' for a dense layer."
        )


def _physical(fqns: list[str], pattern: Pattern | None, exchanges: Sequence[Exchange]) -> tuple[PhysicalLayer, ...]:
    """The layers with these FQNs, with their symbols and logical layers."""
    symbols: Sequence[str | None] = [None] * len(fqns) if pattern is None else pattern.symbols
    with_exchange = {each.layer for each in exchanges}
    is_moe = [symbol == "E" or i in with_exchange for i, symbol in enumerate(symbols)]
    groups = logical_layers(is_moe, () if pattern is None else pattern.groups)
    return tuple(map(PhysicalLayer, fqns, symbols, groups))


def _refuse_exchanges_outside(joint: JointGraph, globs: list[str]) -> None:
    outside = [each for each in joint.exchanges if each.layer is None]
    if joint.physical and outside:
        by_name = {node.name: node for node in joint.module.graph.nodes}
        fqn = op_facts.tag(by_name[outside[0].launches[0]]).fqn
        raise UnsupportedError(
            f"Module {fqn or '(the model itself)'!r} exchanges tokens outside the layers that {globs} matches "
            f"({len(joint.physical)} of them). Set OverlapConfig.layers so that it matches every MoE layer."
        )
