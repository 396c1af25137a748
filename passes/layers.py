"""Joint pass `layers`: label every op with its physical layer, by module FQN, and fit the pattern to the layers.

In:  JointGraph with ops tagged with FQNs.
Out: the same graph; `OpTag.layer` and `Exchange.layer` are filled in, and `physical` lists the layers in the order in
     which the model runs them.

A glob matches whole FQN parts and may start at any part: `layers.*` matches `layers.3` and `model.layers.3`. Of nested
matches, in names and in calls, the outermost counts. A module that runs several times is a layer each time.

Raises UnsupportedError: a pattern is given and no layer matches; the number of layers differs from the pattern's
symbols; an exchange runs in a layer whose symbol is not `E`, or outside the layers while others run inside.
"""

from __future__ import annotations

import fnmatch
import functools
from dataclasses import replace

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import META, JointGraph, Phase, PhysicalLayer
from fxoverlap.passes import op_facts
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
    physical = tuple(PhysicalLayer(fqn) for fqn, _ in found)
    by_name = {node.name: op_facts.tag(node).layer for node in nodes}
    exchanges = tuple(replace(each, layer=by_name[each.launches[0]]) for each in joint.exchanges)
    joint = replace(joint, physical=physical, exchanges=_same_layer_as_forward(exchanges))
    if config.pattern is not None:
        joint = replace(joint, physical=_fit(parse(config.pattern), config.pattern, joint, globs))
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
        for glob in globs:
            pattern = glob.split(".")
            tail = parts[end - len(pattern) : end] if end >= len(pattern) else []
            if tail and all(fnmatch.fnmatchcase(part, each) for part, each in zip(tail, pattern, strict=True)):
                return ".".join(parts[:end])
    return None


def _same_layer_as_forward(exchanges: tuple) -> tuple:
    """Give each backward exchange the layer of its forward exchange; the label on its own op may be missing."""
    layer = {each.index: each.layer for each in exchanges if each.phase is Phase.F}
    return tuple(replace(each, layer=layer[each.index]) for each in exchanges)


def _fit(pattern: Pattern, text: str, joint: JointGraph, globs: list[str]) -> tuple[PhysicalLayer, ...]:
    found = joint.physical
    if not found:
        raise UnsupportedError(
            f"The pattern {text!r} needs {len(pattern.symbols)} layers, but the layers glob {globs} matches no module "
            f"that the forward runs. Set OverlapConfig.layers to the FQN glob of the model's layers."
        )
    if len(found) != len(pattern.symbols):
        raise UnsupportedError(
            f"The pattern {text!r} has {len(pattern.symbols)} layers, but the forward runs {len(found)}: "
            f"{', '.join(layer.fqn for layer in found)}. Write one symbol for each layer."
        )
    with_exchange = {each.layer for each in joint.exchanges}
    for i, (layer, symbol) in enumerate(zip(found, pattern.symbols, strict=True)):
        if i in with_exchange and symbol != "E":
            raise UnsupportedError(
                f"The pattern {text!r} says {symbol!r} for layer {layer.fqn}, but that layer exchanges tokens. "
                f"Write 'E' for it."
            )
    if with_exchange and any(s == "E" and i not in with_exchange for i, s in enumerate(pattern.symbols)):
        missing = [found[i].fqn for i, s in enumerate(pattern.symbols) if s == "E" and i not in with_exchange]
        raise UnsupportedError(
            f"The pattern {text!r} says 'E' for {', '.join(missing)}, which exchanges no tokens while other layers do. "
            f"Write '-' for a dense layer."
        )
    groups = logical_groups(pattern)
    return tuple(
        PhysicalLayer(layer.fqn, symbol, group)
        for layer, symbol, group in zip(found, pattern.symbols, groups, strict=True)
    )


def logical_groups(pattern: Pattern) -> list[int]:
    """The logical layer of each physical layer: brackets as written; outside them a run up to an `E` is one layer."""
    in_bracket = {i: number for number, (start, stop) in enumerate(pattern.groups) for i in range(start, stop)}
    ends: set[int] = set()
    for start, stop in pattern.groups:
        ends |= {start - 1, stop - 1}
    for i, symbol in enumerate(pattern.symbols):
        if i not in in_bracket and (symbol == "E" or not _run_reaches_moe(pattern.symbols, i, in_bracket)):
            ends.add(i)
    groups, current = [], 0
    for i in range(len(pattern.symbols)):
        groups.append(current)
        current += i in ends
    return groups


def _run_reaches_moe(symbols: str, start: int, in_bracket: dict[int, int]) -> bool:
    for i in range(start, len(symbols)):
        if i in in_bracket:
            return False
        if symbols[i] == "E":
            return True
    return False


def _refuse_exchanges_outside(joint: JointGraph, globs: list[str]) -> None:
    outside = [each for each in joint.exchanges if each.layer is None]
    if joint.physical and outside:
        by_name = {node.name: node for node in joint.module.graph.nodes}
        fqn = op_facts.tag(by_name[outside[0].launches[0]]).fqn
        raise UnsupportedError(
            f"Module {fqn or '(the model itself)'!r} exchanges tokens outside the layers that {globs} matches "
            f"({len(joint.physical)} of them). Set OverlapConfig.layers so that it matches every MoE layer."
        )
