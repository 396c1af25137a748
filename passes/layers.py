"""Joint pass `layers`: label every op with its physical layer, by module FQN, and fit the pattern to the layers.

In:  JointGraph with ops tagged with FQNs.
Out: the same graph; `OpTag.layer` and `Exchange.layer` are filled in, and `physical` lists the layers in the order in
     which the model runs them, with the logical layers that they make (`logical`).

A glob matches whole FQN parts and may start at any part: `layers.*` matches `layers.3` and `model.layers.3`. Of nested
matches, in names and in calls, the outermost counts. A module that runs several times is a layer each time.

What `mtp_layers` matches is a depth of multi-token prediction. What `layers` matches in it are its physical layers, and
what it computes before them belongs to the first; what it computes behind them, such as a norm, is outside the layers.
A depth without such layers is one physical layer. With a pattern that has MTP parts, matches of `mtp_layers` may also
be the layers themselves: the pattern tells how many of them a depth has. Depths stand behind the trunk in `physical`.

A model may call parts of a layer beside it, such as the norm of a depth. They are outside the layers; but what
exchanges tokens, and is called as often as the layer, is of the layer's runs in turn. Where a layer is not called but
its parts are, it has as many runs as the part that is called least, of those that exchange tokens if any does; a part
that is called more often serves others too, and is outside the layers.

Raises UnsupportedError: an exchange runs outside the layers while others run inside; as `fit` does.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import META, JointGraph, Phase
from fxoverlap.passes import op_facts
from fxoverlap.passes.fit import Call, Run, physical_layers
from fxoverlap.pattern import parse


def layers(joint: JointGraph, config: OverlapConfig) -> JointGraph:
    """Fill in layer labels."""
    globs, mtp_globs = (globs_of(each) for each in (config.layers, config.mtp_layers))
    nodes = list(op_facts.ops(joint.module.graph))
    runs = _runs(joint, globs, mtp_globs)
    found = _in_order(run for op, run in runs.items() if op_facts.tag(op).phase is Phase.F)
    for op, run in runs.items():
        if run in found:
            op.meta[META] = replace(op_facts.tag(op), layer=found[run])
    by_name = {node.name: op_facts.tag(node).layer for node in nodes}
    exchanges = tuple(replace(each, layer=by_name[each.launches[0]]) for each in joint.exchanges)
    joint = replace(joint, exchanges=_same_layer_as_forward(exchanges))
    pattern = None if config.pattern is None else parse(config.pattern)
    joint = replace(joint, physical=physical_layers(list(found), pattern, joint.exchanges, config))
    _refuse_exchanges_outside(joint, globs, mtp_globs)
    return joint


layers.stage = "joint"  # type: ignore[attr-defined]


def globs_of(given: str | Sequence[str]) -> list[str]:
    """The globs of a field of the config, which may be one or several."""
    return [given] if isinstance(given, str) else list(given)


def _runs(joint: JointGraph, globs: list[str], mtp_globs: list[str]) -> dict[fx.Node, Run]:
    """The run that each op is of; ops outside the layers have none."""
    nodes = list(op_facts.ops(joint.module.graph))
    calls = {node: op_facts.tag(node).calls or (f"{op_facts.tag(node).fqn or ''}#0",) for node in nodes}
    launches = {name for each in joint.exchanges for name in each.launches}
    exchanging = {_fqn_and_number(call)[0] for node in nodes if node.name in launches for call in calls[node]}
    counts = _Counts((call for each in dict.fromkeys(calls.values()) for call in each), exchanging)
    run_of = functools.cache(functools.partial(_run, globs, mtp_globs, counts))
    runs = {node: run for node in nodes if (run := run_of(calls[node])) is not None}
    first: dict[Call, Run] = {}
    for run in runs.values():
        if run.depth is not None and run.layer != run.depth:
            first.setdefault(run.depth, run)
    for depth, first_layer in first.items():
        _label_beside_layers(depth, first_layer, runs, calls)
    return runs


def _label_beside_layers(
    depth: Call, first: Run, runs: dict[fx.Node, Run], calls: Mapping[fx.Node, tuple[str, ...]]
) -> None:
    """Give what a depth computes before its layers to the first of them, and take the depth off what it does behind."""
    beside = [op for op, run in runs.items() if run.layer == depth]
    forward = {op for op in calls if op_facts.tag(op).phase is Phase.F}
    inside = {op for op, run in runs.items() if run.depth == depth and run.layer != depth and op in forward}
    behind = op_facts.descendants(inside, forward)
    before = {calls[op] for op in beside if op in forward and op not in behind}
    # The backward of calls of both kinds is placed by what it reads.
    before_only = before - {calls[op] for op in beside if op in behind}
    for op in beside:
        if (op not in behind) if op in forward else calls[op] in before_only:
            runs[op] = first
        else:
            del runs[op]


def _in_order(runs: Iterable[Run]) -> dict[Run, int]:
    """The runs as they occur, those of the trunk first and of each depth together, with their number."""
    seen = dict.fromkeys(runs)
    depths = dict.fromkeys(run.depth for run in seen)
    rank = {depth: i for i, depth in enumerate(sorted(depths, key=lambda depth: depth is not None))}
    return {run: i for i, run in enumerate(sorted(seen, key=lambda run: rank[run.depth]))}


class _Counts:
    """How often modules are called.

    Args:
        calls: all calls, as in `OpTag.calls`; more than once is no matter.
        exchanging: FQNs of the modules that exchange tokens.
    """

    def __init__(self, calls: Iterable[str], exchanging: Collection[str]) -> None:
        self._exchanging = exchanging
        self._of: dict[str, int] = {}
        for call in calls:
            fqn, number = _fqn_and_number(call)
            self._of[fqn] = max(self._of.get(fqn, 0), number + 1)
        self._of_parts: dict[str, tuple[bool, int]] = {}
        for fqn, count in self._of.items():
            for outer in itertools.accumulate(fqn.split(".")[:-1], "{}.{}".format):
                rank = (fqn not in exchanging, count)
                self._of_parts[outer] = min(self._of_parts.get(outer, rank), rank)

    def run(self, fqn: str, part: str, number: int) -> Call | None:
        """The run of a layer that the call of a part of it, or of the layer itself, is of; None if it is of none."""
        if part == fqn:
            return Call(fqn, number)
        if fqn in self._of:
            is_of_run = part in self._exchanging and self._of[part] == self._of[fqn]
        else:
            is_of_run = self._of[part] == self._of_parts[fqn][1]
        return Call(fqn, number) if is_of_run else None


def _fqn_and_number(call: str) -> tuple[str, int]:
    fqn, _, number = call.rpartition("#")
    return fqn, int(number)


def _run(globs: list[str], mtp_globs: list[str], counts: _Counts, calls: tuple[str, ...]) -> Run | None:
    """The layer that the outermost of nested calls is of or belongs to, and which of its runs it is."""
    depth: Call | None = None
    for fqn, number in map(_fqn_and_number, calls):
        is_beside = False
        if depth is None:
            outer, layer = _outermost(fqn, mtp_globs), _outermost(fqn, globs)
            if outer is not None and (layer is None or len(outer) <= len(layer)):
                depth = counts.run(outer, fqn, number)
                is_beside = depth is None
        inside = depth.fqn if depth is not None and fqn.startswith(f"{depth.fqn}.") else ""
        found = None if depth is not None and fqn == depth.fqn else _outermost(fqn, globs, inside)
        if found is not None:
            run = counts.run(found, fqn, number)
            return Run(run, depth) if run is not None else None if depth is None else Run(depth, depth)
        if is_beside:
            return None
    return None if depth is None else Run(depth, depth)


def _outermost(fqn: str, globs: list[str], inside: str = "") -> str | None:
    """The outermost prefix of an FQN that a glob matches, and that is longer than `inside`."""
    parts = fqn.split(".")
    for end in range(1, len(parts) + 1):
        prefix = ".".join(parts[:end])
        if len(prefix) > len(inside) and any(matches(prefix, glob) for glob in globs):
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


def _refuse_exchanges_outside(joint: JointGraph, globs: list[str], mtp_globs: list[str]) -> None:
    outside = [each for each in joint.exchanges if each.layer is None]
    if joint.physical and outside:
        by_name = {node.name: node for node in joint.module.graph.nodes}
        fqn = op_facts.tag(by_name[outside[0].launches[0]]).fqn
        raise UnsupportedError(
            f"Module {fqn or '(the model itself)'!r} exchanges tokens outside the layers that {globs} and, for "
            f"multi-token prediction, {mtp_globs} match ({len(joint.physical)} of them). Set OverlapConfig.layers and "
            f"mtp_layers so that they match every MoE layer."
        )
