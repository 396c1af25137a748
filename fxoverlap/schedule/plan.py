"""Chunk graphs + a policy -> Plan.

In:  the chunk graph whose F nodes run, the one whose B and W nodes run (either may be None), the config, and what the
     nodes cost.
Out: a Plan that holds every F (B and W) node once, in a legal order.

An order is legal if every value is made before it is read within its microbatch, and if nodes with effects keep
their order. Raises UnsupportedError, naming the edge, for a policy whose order is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import ChunkGraph, CostTable, Instance, Phase, Plan, ScheduleNode
from fxoverlap.schedule.cost import default_costs, of_plan
from fxoverlap.schedule.policies import Order, auto, megatron, sequential, unplaced

Policy = Callable[[ChunkGraph | None, ChunkGraph | None, CostTable, OverlapConfig], Sequence[tuple[ScheduleNode, str]]]

BUILT_IN: dict[str, Policy] = {"sequential": sequential, "megatron": megatron, "auto": auto}


def build_plan(
    f: ChunkGraph | None, b: ChunkGraph | None, config: OverlapConfig, costs: CostTable | None = None
) -> Plan:
    """The plan of one fused step under `config.schedule`.

    Args:
        f, b: whose forward and whose backward run.
        config: the config.
        costs: of the nodes that run, as `cost.of_plan` gives them; None: the default costs of the chunks.
    """
    policy = config.schedule if callable(config.schedule) else BUILT_IN[config.schedule]
    if costs is None:
        chunks = {mb: chunk for mb, chunk in (("F", f), ("B", b)) if chunk is not None}
        costs = of_plan(chunks, {mb: default_costs(chunk, config) for mb, chunk in chunks.items()})
    order = _as_order(policy(f, b, costs, config))
    _check_entries(order, f, b)
    order += unplaced(order, b)
    return _checked(order, f, b)


def plan_in_order(names: Iterable[tuple[str, str]], chunks: Mapping[str, ChunkGraph]) -> Plan:
    """The plan of an order of (name of the node, microbatch) pairs, such as another plan of the same structures has."""
    nodes = {mb: {node.name: node for node in chunk.nodes} for mb, chunk in chunks.items()}
    return _checked([(nodes[mb][name], mb) for name, mb in names], chunks.get("F"), chunks.get("B"))


def _checked(order: Order, f: ChunkGraph | None, b: ChunkGraph | None) -> Plan:
    """The plan of a complete order. Raises UnsupportedError if the order is incomplete, or not legal."""
    chunks = {mb: chunk for mb, chunk in (("F", f), ("B", b)) if chunk is not None}
    kind = ("F" if f is not None else "") + ("B" if b is not None else "")
    _check_complete(order, f, b)
    for mb, chunk in (("F", f), ("B", b)):
        if chunk is not None:
            _check_legal([node for node, each in order if each == mb], chunk, mb)
    return Plan(kind, chunks, tuple(Instance(node, mb) for node, mb in order), costs)


def _as_order(returned: object) -> Order:
    if not isinstance(returned, Sequence):
        raise UnsupportedError(
            f'The policy returned {returned!r}; expected a list of pairs of a ScheduleNode and "F" or "B".'
        )
    return list(returned)


def _check_entries(order: Order, f: ChunkGraph | None, b: ChunkGraph | None) -> None:
    known = {"F": _names(f, (Phase.F,)), "B": _names(b, (Phase.B, Phase.W, Phase.R))}
    for entry in order:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], ScheduleNode)):
            raise UnsupportedError(f'The policy returned {entry!r}; expected pairs of a ScheduleNode and "F" or "B".')
        node, mb = entry
        if mb not in known or node.name not in known[mb]:
            raise UnsupportedError(
                f"The policy placed {node.name} for microbatch {mb!r}, which has no such node. F nodes belong to "
                f'microbatch "F", B and W nodes to "B".'
            )


def _names(chunk: ChunkGraph | None, phases: tuple[Phase, ...]) -> set[str]:
    return {node.name for node in chunk.nodes if node.phase in phases} if chunk is not None else set()


def _check_complete(order: Order, f: ChunkGraph | None, b: ChunkGraph | None) -> None:
    placed = Counter((node.name, mb) for node, mb in order)
    twice = [name for name, count in placed.items() if count > 1]
    if twice:
        raise UnsupportedError(f"The policy placed {twice[0][0]} more than once; place every node once.")
    needed = {(name, "F") for name in _names(f, (Phase.F,))} | {(name, "B") for name in _names(b, (Phase.B, Phase.R))}
    missing = sorted(needed - set(placed))
    if missing:
        raise UnsupportedError(
            f"The policy left out {', '.join(name for name, _ in missing)}; only W nodes may be left out."
        )


def _check_legal(order: list[ScheduleNode], chunk: ChunkGraph, mb: str) -> None:
    made_by = {value: node.name for node in chunk.nodes for value in node.writes}
    here = {node.name for node in order}
    done: set[str] = set()
    before: dict[str, list[str]] = {}
    for earlier, later in chunk.effects:
        before.setdefault(later, []).append(earlier)
    for node in order:
        for value in node.reads:
            source = made_by.get(value)
            if source in here and source not in done:
                raise UnsupportedError(
                    f"The policy's order is illegal for microbatch {mb!r}: {node.name} reads {value!r}, which {source} "
                    f"makes later. Place {source} before {node.name}."
                )
        for earlier in before.get(node.name, ()):
            if earlier in here and earlier not in done:
                raise UnsupportedError(
                    f"The policy's order is illegal for microbatch {mb!r}: {node.name} must follow {earlier}, because "
                    f"both draw random numbers or have other effects. Place {earlier} before {node.name}."
                )
        done.add(node.name)
