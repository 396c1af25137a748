"""Chunk graphs + a policy -> Plan.

In:  the chunk graph whose F nodes run, the one whose B, W and R nodes run (either may be None), the config, and what
     the nodes cost; or the chunk graphs of two microbatches in the same phase.
Out: a Plan that holds every F (B, W and R) node once, in a legal order.

An order is legal if every value is made before it is read within its microbatch, if nodes with effects keep their
order, and if two microbatches in the same phase keep theirs where it counts (`pairs.edges_between`). Raises
UnsupportedError, naming the edge, for a policy whose order is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import FxOverlapError, UnsupportedError
from fxoverlap.flow import needs_of
from fxoverlap.ir import ChunkGraph, CostTable, Instance, Phase, Plan, ScheduleNode, nodes_of
from fxoverlap.schedule.cost import default_costs, of_plan
from fxoverlap.schedule.pairs import edges_between, labels_of
from fxoverlap.schedule.policies import Order, auto, megatron, pair, sequential, unplaced
from fxoverlap.schedule.rounds import kind_of

Policy = Callable[[ChunkGraph | None, ChunkGraph | None, CostTable, OverlapConfig], Sequence[tuple[ScheduleNode, str]]]

FIXED: dict[str, Policy] = {"sequential": sequential, "megatron": megatron}


def build_plan(
    f: ChunkGraph | None,
    b: ChunkGraph | None,
    config: OverlapConfig,
    costs: CostTable | None = None,
    room: float | None = None,
) -> Plan:
    """The plan of one fused step under `config.schedule`.

    Args:
        f, b: whose forward and whose backward run.
        config: the config.
        costs: of the nodes that run, as `cost.of_plan` gives them; None: the default costs of the chunks.
        room: how much memory "auto" may take, as it defines it.
    """
    chunks = {mb: chunk for mb, chunk in (("F", f), ("B", b)) if chunk is not None}
    if costs is None:
        costs = _default_costs(chunks, config)
    if config.schedule == "auto":
        return plan_of(auto(f, b, costs, config, room), chunks, costs)
    if not callable(config.schedule):
        return plan_of(list(FIXED[config.schedule](f, b, costs, config)), chunks, costs)
    return plan_of(_order_of(config.schedule, f, b, costs, config), chunks, costs)


def build_pair(
    kind: str, first: ChunkGraph, second: ChunkGraph, config: OverlapConfig, costs: CostTable | None = None
) -> Plan:
    """The plan in which two microbatches run their forwards (kind "FF") or their backwards ("BB").

    Policies know of one forward and one backward only, so the order is that of `policies.pair` whatever the schedule
    is.
    """
    chunks = dict(zip(labels_of(kind), (first, second), strict=True))
    if costs is None:
        costs = _default_costs(chunks, config)
    return plan_of(pair(chunks, costs, config, kind), chunks, costs)


def plan_in_order(names: Iterable[tuple[str, str]], chunks: Mapping[str, ChunkGraph], costs: CostTable) -> Plan:
    """The plan of an order of (name of the node, microbatch) pairs, such as another plan of the same structures has."""
    nodes = {mb: {node.name: node for node in chunk.nodes} for mb, chunk in chunks.items()}
    return plan_of([(nodes[mb][name], mb) for name, mb in names], chunks, costs)


def plan_of(order: Order, chunks: Mapping[str, ChunkGraph], costs: CostTable) -> Plan:
    """The plan with this order, behind which the W nodes come that it leaves out.

    Args:
        order: (node, `Instance.mb`) pairs.
        chunks: by `Instance.mb`, the earlier microbatch first where there are two of one phase.
        costs: what the order was chosen by.

    Raises:
        UnsupportedError: the order is not legal, or does not hold what it must.
    """
    nodes = {mb: nodes_of(mb, chunk) for mb, chunk in chunks.items()}
    _check_entries(order, nodes)
    left_out = unplaced(order, chunks)
    _check_complete(order, left_out)
    order = [*order, *left_out]
    for mb, chunk in chunks.items():
        _check_legal([node for node, each in order if each == mb], chunk, mb)
    kind = kind_of(chunks)
    if len(set(kind)) < len(kind):
        _check_between(order, kind, chunks)
    return Plan(kind, chunks, tuple(Instance(node, mb) for node, mb in order), costs)


def _default_costs(chunks: Mapping[str, ChunkGraph], config: OverlapConfig) -> CostTable:
    return of_plan(chunks, {mb: default_costs(chunk, config) for mb, chunk in chunks.items()})


def _order_of(
    policy: Callable[..., object], f: ChunkGraph | None, b: ChunkGraph | None, costs: CostTable, config: OverlapConfig
) -> Order:
    """What a policy of the user returns. Raises UnsupportedError for what is no list, and for whatever it raises."""
    try:
        returned = policy(f, b, costs, config)
    except FxOverlapError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"The policy {getattr(policy, '__name__', repr(policy))} raised {type(error).__name__}: {error}. It is "
            f"called as policy(f, b, costs, config), with None for f or b in a round that has no forward or backward; "
            f"here {'f' if f is None else 'b' if b is None else 'neither'} is None."
        ) from error
    if not isinstance(returned, Sequence):
        raise UnsupportedError(
            f'The policy returned {returned!r}; expected a list of pairs of a ScheduleNode and "F" or "B".'
        )
    return list(returned)


def _check_entries(order: Order, nodes: Mapping[str, list[ScheduleNode]]) -> None:
    known = {mb: {node.name for node in own} for mb, own in nodes.items()}
    for entry in order:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], ScheduleNode)):
            raise UnsupportedError(f'The policy returned {entry!r}; expected pairs of a ScheduleNode and "F" or "B".')
        node, mb = entry
        if mb not in known or node.name not in known[mb]:
            raise UnsupportedError(
                f"The policy placed {node.name} for microbatch {mb!r}, which has no such node. F nodes belong to "
                f'microbatch "F", B, W and R nodes to "B".'
            )


def _check_complete(order: Order, left_out: Order) -> None:
    placed = Counter((node.name, mb) for node, mb in order)
    twice = [name for name, count in placed.items() if count > 1]
    if twice:
        raise UnsupportedError(f"The policy placed {twice[0][0]} more than once; place every node once.")
    missing = sorted(node.name for node, _ in left_out if node.phase is not Phase.W)
    if missing:
        raise UnsupportedError(f"The policy left out {', '.join(missing)}; only W nodes may be left out.")


def _check_legal(order: list[ScheduleNode], chunk: ChunkGraph, mb: str) -> None:
    needs = needs_of(mb, chunk)
    done: set[str] = set()
    for node in order:
        for source, value in needs[node.name]:
            if source in done:
                continue
            if value is not None:
                why = f"reads {value!r}, which {source} makes later"
            else:
                why = f"must follow {source}, because both draw random numbers or have other effects"
            raise UnsupportedError(
                f"The policy's order is illegal for microbatch {mb!r}: {node.name} {why}. Place {source} before "
                f"{node.name}."
            )
        done.add(node.name)


def _check_between(order: Order, kind: str, chunks: Mapping[str, ChunkGraph]) -> None:
    """What two microbatches in the same phase must do in their order."""
    one, two = labels_of(kind)
    position = {(node.name, mb): i for i, (node, mb) in enumerate(order)}
    for earlier, later, why in edges_between(chunks[one], chunks[two], kind):
        if position[later, two] < position[earlier, one]:
            raise UnsupportedError(
                f"The policy's order is illegal: {later} of microbatch {two!r} must follow {earlier} of microbatch "
                f"{one!r}, because {why}. Place {earlier} of {one!r} before it."
            )
