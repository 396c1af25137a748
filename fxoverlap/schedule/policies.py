"""The built-in policies: functions that choose the order of the node instances of one fused step.

A policy takes the chunk graph whose forward runs (or None), the chunk graph whose backward runs (or None), the costs by
node name with the machine that they are for, and the config. It returns (node, "F" or "B") pairs in the order in which
the host issues them. W nodes that it leaves out are flushed at the end. `plan.build_plan` checks the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest

from fxoverlap.config import OverlapConfig
from fxoverlap.flow import needs_of
from fxoverlap.ir import ChunkGraph, CostTable, Instance, Phase, Plan, ScheduleNode, Slot, nodes_of
from fxoverlap.schedule.holding import blocks_of, held_bytes
from fxoverlap.schedule.pairs import edges_between
from fxoverlap.schedule.rounds import kind_of
from fxoverlap.schedule.search import search
from fxoverlap.schedule.simulate import simulate_plan
from fxoverlap.schedule.tasks import Edge, tasks_of

_EQUAL = 1e-9
"""Makespans that differ by less are sums of the same times."""

Order = list[tuple[ScheduleNode, str]]


def sequential(f: ChunkGraph | None, b: ChunkGraph | None, costs: CostTable, config: OverlapConfig) -> Order:
    """No overlap: the backward of one microbatch, then the forward of the next, each in its own order."""
    del costs, config
    order: Order = []
    if b is not None:
        order += [(node, "B") for node in b.nodes if node.phase is not Phase.F]
    if f is not None:
        order += [(node, "F") for node in f.nodes if node.phase is Phase.F]
    return order


def megatron(f: ChunkGraph | None, b: ChunkGraph | None, costs: CostTable, config: OverlapConfig) -> Order:
    """Megatron-Core's published order: layer i of the forward beside layer N-1-i of the backward.

    The comm lane sees combine.B, dispatch.F, dispatch.B, combine.F; the compute lane sees pre_dispatch.F, experts.B,
    experts.W, experts.F, pre_dispatch.B. The counts exchange is launched before combine.B, because a group's
    exchanges queue up and the host reads the counts. The comm lane has nothing to do under pre_dispatch.F.

    Weight gradients are computed where exchanges are in flight; those of the first layer come last. Where no layer of
    a pair exchanges tokens, but one of a later pair does, they wait for that pair. With `early_release` the backward of
    a pair is done with its layer before the forward computes experts.
    """
    del costs
    issue = _Issue(f, b)
    issue.f(None, Slot.PRE_PROCESS)
    issue.b(None, Slot.POST_PROCESS)
    pairs = list(zip_longest(*issue.layers()))
    last_cover = max((k for k, (i, j) in enumerate(pairs) if issue.exchanges(i, j)), default=-1)
    for k, (i, j) in enumerate(pairs):
        _pair(issue, i, j, issue.exchanges(i, j) or k > last_cover, config.early_release)
    issue.f(None, Slot.POST_PROCESS)
    issue.b(None, Slot.PRE_PROCESS)
    issue.rest()
    return issue.order


def _pair(issue: _Issue, i: int | None, j: int | None, covers: bool, early_release: bool) -> None:
    """Layer i of the forward beside layer j of the backward.

    Args:
        issue: what takes the nodes.
        i, j: the layers, None where there is none.
        covers: whether weight gradients are computed here.
        early_release: whether the backward is done with its layer before the forward computes experts.
    """
    issue.f(i, Slot.PRE_DISPATCH)
    issue.f(i, Slot.COUNTS)
    issue.b(j, Slot.MTP_POST)
    issue.b(j, Slot.POST_COMBINE)
    issue.b(j, Slot.COMBINE)
    issue.f(i, Slot.PERMUTE)
    issue.f(i, Slot.DISPATCH)
    if covers:
        issue.w_before(j)
    issue.f(i, Slot.SHARED)
    issue.b(j, Slot.EXPERTS)
    issue.b(j, Slot.DISPATCH)
    issue.b(j, Slot.SHARED)
    if covers:
        issue.w(j, Slot.EXPERTS)
        issue.w(j, Slot.SHARED)
    if early_release:
        issue.b(j, Slot.PRE_DISPATCH)
    issue.f(i, Slot.EXPERTS)
    issue.f(i, Slot.COMBINE)
    issue.b(j, Slot.PRE_DISPATCH)
    issue.f(i, Slot.POST_COMBINE)
    issue.f(i, Slot.MTP_POST)


def auto(
    f: ChunkGraph | None,
    b: ChunkGraph | None,
    costs: CostTable,
    config: OverlapConfig,
    room: float | None = None,
) -> Order:
    """The order that takes the least time under the costs: the best that a search finds, or one of the other policies.

    So it is never worse than `megatron` and `sequential` on the machine that the costs are for.

    Args:
        f, b, costs, config: as for every policy.
        room: which part of the memory that this order takes beyond that of `sequential` it may take, from 0 to 1; None:
            any. What orders take is what `holding` says.
    """
    chunks = {mb: chunk for mb, chunk in (("F", f), ("B", b)) if chunk is not None}
    release = early_release_edges(f, b) if config.early_release and f is not None and b is not None else []
    edges = [(("B", first), ("F", then)) for first, then in release]
    fixed = [policy(f, b, costs, config) for policy in (megatron, sequential)]
    grid = _Search(chunks, costs, edges)
    if room is None:
        return grid.fastest([grid.order(), *fixed])
    least = grid.held(fixed[1])
    most = least if room == 0 else least + int(room * max(0, grid.held(grid.order()) - least))
    found = grid.order(most)
    most = max(most, grid.held(found))  # what it takes may be a little more
    return grid.fastest([each for each in (found, *fixed) if grid.held(each) <= most])


def pair(chunks: Mapping[str, ChunkGraph], costs: CostTable, config: OverlapConfig, kind: str) -> Order:
    """The order of two microbatches in the same phase: the best that a search finds, or one after the other.

    Args:
        chunks: of the earlier and of the later microbatch.
        costs: by node name.
        config: with `schedule="sequential"` one microbatch follows the other.
        kind: "FF" or "BB".
    """
    one_by_one = [(node, mb) for mb, chunk in chunks.items() for node in nodes_of(mb, chunk)]
    if config.schedule == "sequential":
        return one_by_one
    (one, first), (two, second) = chunks.items()
    edges = [((one, each.earlier), (two, each.later)) for each in edges_between(first, second, kind)]
    grid = _Search(chunks, costs, edges)
    return grid.fastest([grid.order(), one_by_one])


def unplaced(order: Order, chunks: Mapping[str, ChunkGraph]) -> Order:
    """The nodes that an order leaves out."""
    placed = {(node.name, mb) for node, mb in order}
    return [(n, mb) for mb, chunk in chunks.items() for n in nodes_of(mb, chunk) if (n.name, mb) not in placed]


def early_release_edges(f: ChunkGraph, b: ChunkGraph) -> list[tuple[str, str]]:
    """(B node, F node that follows it) of each pair of layers, layer i of the forward and N-1-i of the backward.

    `pre_dispatch.B` is the last reader of what its layer has saved, so much is free before `experts.F` saves more. It
    waits for dispatch.B, which then has nothing but weight gradients beside it.
    """
    ours, theirs = ({_key(node): node.name for node in chunk.nodes} for chunk in (f, b))
    pairs = [
        (theirs.get((b.layers - 1 - i, Slot.PRE_DISPATCH, Phase.B)), ours.get((i, Slot.EXPERTS, Phase.F)))
        for i in range(min(f.layers, b.layers))
    ]
    return [(first, then) for first, then in pairs if first is not None and then is not None]


class _Search:
    """The nodes of a plan as tasks: the best order of them, what orders hold, and which of several is fastest."""

    def __init__(self, chunks: Mapping[str, ChunkGraph], costs: CostTable, edges: Iterable[Edge]) -> None:
        one_at_a_time = [((mb, one), (mb, other)) for mb, chunk in chunks.items() for one, other in chunk.replays]
        self._chunks, self._costs = chunks, costs
        self._tasks = tasks_of(chunks, costs, [*edges, *one_at_a_time])
        self._blocks = blocks_of(chunks, self._tasks, costs)

    def order(self, room: int | None = None) -> Order:
        """The best order that holds so many bytes at most."""
        found = search(self._tasks, self._costs.hardware, self._blocks, room)
        return [(self._tasks[i].instance.node, self._tasks[i].instance.mb) for i in found]

    def held(self, order: Order) -> int:
        """Most bytes that an order holds at one time."""
        position = {(task.instance.node.name, task.instance.mb): i for i, task in enumerate(self._tasks)}
        complete = [*order, *unplaced(order, self._chunks)]
        return held_bytes([position[node.name, mb] for node, mb in complete], self._tasks, self._blocks)

    def fastest(self, orders: Iterable[Order]) -> Order:
        """The order with the least makespan, completed; of equal ones the one that holds the fewest bytes."""
        found = []
        for each in orders:
            order = [*each, *unplaced(each, self._chunks)]
            instances = tuple(Instance(node, mb) for node, mb in order)
            plan = Plan(kind_of(self._chunks), self._chunks, instances, self._costs)
            found.append((simulate_plan(plan).makespan, order))
        least = min(makespan for makespan, _ in found)
        equal = [order for makespan, order in found if makespan <= least * (1 + _EQUAL)]
        return min(equal, key=self.held)


class _Issue:
    """Appends nodes to an order, each behind what it needs; a node that a chunk does not have is skipped.

    A layer None is the part outside the layers, or a layer that the shorter chunk does not have: slots tell them apart.
    """

    def __init__(self, f: ChunkGraph | None, b: ChunkGraph | None) -> None:
        self._depth = tuple(0 if chunk is None else chunk.layers for chunk in (f, b))
        self._left = {"F": _nodes(f, (Phase.F,)), "B": _nodes(b, (Phase.B, Phase.W, Phase.R))}
        self._needs = {"F": _needs("F", f), "B": _needs("B", b)}
        self._rank = {key: i for i, key in enumerate(self._left["B"])}
        self._w = _by_layer(self._left["B"])
        self._parts = {mb: {key[:2] for key in self._left[mb]} for mb in "FB"}
        self.order: Order = []

    def f(self, layer: int | None, slot: Slot) -> None:
        """Issue a forward node."""
        self._issue("F", (layer, slot, Phase.F))

    def b(self, layer: int | None, slot: Slot) -> None:
        """Issue an input-gradient node."""
        self._issue("B", (layer, slot, Phase.B))

    def w(self, layer: int | None, slot: Slot) -> None:
        """Issue a weight-gradient node."""
        self._issue("B", (layer, slot, Phase.W))

    def layers(self) -> tuple[list[int], list[int]]:
        """The layers of the forward and of the backward, as they run."""
        return list(range(self._depth[0])), list(reversed(range(self._depth[1])))

    def exchanges(self, i: int | None, j: int | None) -> bool:
        """Whether layer i of the forward or layer j of the backward exchanges tokens."""
        return any((layer, Slot.DISPATCH) in self._parts[mb] for mb, layer in (("F", i), ("B", j)))

    def w_before(self, layer: int | None) -> None:
        """Issue the weight gradients that are left of what the backward ran before this layer's experts."""
        if layer is None:
            return
        own = ((None, Slot.POST_PROCESS), (layer, Slot.MTP_POST), (layer, Slot.POST_COMBINE))
        behind = [(*part, Phase.W) for part in own]
        while self._w and self._w[-1][0] > layer:
            behind += self._w.pop()[1]
        for key in sorted((key for key in behind if key in self._left["B"]), key=self._rank.__getitem__):
            self._issue("B", key)

    def rest(self) -> None:
        """Issue what no rule placed, other than W."""
        for mb in ("B", "F"):
            for key in list(self._left[mb]):
                if key[2] is not Phase.W:
                    self._issue(mb, key)

    def _issue(self, mb: str, key: tuple) -> None:
        node = self._left[mb].pop(key, None)
        if node is None:
            return
        for need in self._needs[mb].get(node.name, ()):
            self._issue(mb, need)
        self.order.append((node, mb))


def _nodes(chunk: ChunkGraph | None, phases: tuple[Phase, ...]) -> dict[tuple, ScheduleNode]:
    return {_key(n): n for n in chunk.nodes if n.phase in phases} if chunk is not None else {}


def _by_layer(nodes: dict[tuple, ScheduleNode]) -> list[tuple[int, list[tuple]]]:
    """(layer, keys of its W nodes), first layer first."""
    found: dict[int, list[tuple]] = {}
    for key in nodes:
        if key[2] is Phase.W and key[0] is not None:
            found.setdefault(key[0], []).append(key)
    return sorted(found.items())


def _key(node: ScheduleNode) -> tuple[int | None, Slot, Phase]:
    return node.layer, node.slot, node.phase


def _needs(mb: str, chunk: ChunkGraph | None) -> dict[str, list[tuple]]:
    """For each node that runs, those that it needs, and those that a replay follows."""
    if chunk is None:
        return {}
    keys = {node.name: _key(node) for node in chunk.nodes}
    needs = {name: [keys[need.node] for need in own] for name, own in needs_of(mb, chunk).items()}
    for earlier, later in chunk.replays if mb == "B" else ():
        needs[later].append(keys[earlier])
    return needs
