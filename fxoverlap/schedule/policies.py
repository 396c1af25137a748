"""The built-in policies: functions that choose the order of the node instances of one fused step.

A policy takes the chunk graph whose forward runs (or None), the chunk graph whose backward runs (or None), the costs
by node name, and the config. It returns (node, "F" or "B") pairs in the order in which the host issues them. W nodes
that it leaves out are flushed at the end. `plan.build_plan` checks the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest

from fxoverlap.config import OverlapConfig
from fxoverlap.ir import ChunkGraph, CostTable, Phase, ScheduleNode, Slot

Order = list[tuple[ScheduleNode, str]]
Beside = tuple[tuple[int, ...], tuple[int, ...]]
"""Layers of the forward, and layers of the backward that run beside them: at most one of both, or two on one side."""
Opening = Callable[["_Issue", "int | None", "int | None", bool], None]
"""Issues the beginning of a pair of layers: (issue, forward layer, backward layer, whether W is computed here)."""


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
    """
    del costs, config
    issue = _Issue(f, b)
    forward, backward = ([(layer,) for layer in layers] for layers in issue.layers())
    pairs: list[Beside] = list(zip_longest(forward, backward, fillvalue=()))
    return _interleave(issue, pairs, _counts_then_combine)


def auto(f: ChunkGraph | None, b: ChunkGraph | None, costs: CostTable, config: OverlapConfig) -> Order:
    """The order of `megatron`, with combine.B launched before pre_dispatch.F instead of behind its counts.

    So pre_dispatch.F covers combine.B. The counts queue behind combine.B, but the host does not read them before it
    has computed what weight gradients there are; and until combine.B arrives, there is nothing else to compute. It
    costs the comm lane the latency of the counts, where `megatron` costs it all of pre_dispatch.F.

    Of layers without exchanges two may run beside one that has them, one under each of its two token exchanges, where
    one side has more of them than the other has layers to cover.
    """
    del costs, config
    issue = _Issue(f, b)
    return _interleave(issue, _pairs(issue), _combine_then_counts)


def _pairs(issue: _Issue) -> list[Beside]:
    """Layers of the forward in order, beside those of the backward, last layer first."""
    forward, backward = (_Side(issue, mb, layers) for mb, layers in zip("FB", issue.layers(), strict=True))
    pairs: list[Beside] = []
    while forward.is_left or backward.is_left:
        taken, beside = forward.has_one_to_spare(backward), backward.has_one_to_spare(forward)
        pairs.append((forward.take(1 + taken), backward.take(1 + beside)))
    return pairs


class _Side:
    """The layers of one microbatch that no pair has yet, in the order in which they run."""

    def __init__(self, issue: _Issue, mb: str, layers: list[int]) -> None:
        self._layers, self._first = layers, 0
        self._has_two_parts = [issue.has_two_parts(mb, layer) for layer in layers]
        is_moe = [issue.has(mb, layer, Slot.DISPATCH) for layer in layers]
        # How many layers, from each one on, exchange tokens, and how many do not.
        self._moe, self._dense = _run_lengths(is_moe), _run_lengths([not each for each in is_moe])

    @property
    def is_left(self) -> bool:
        """Whether there is a layer."""
        return self._first < len(self._layers)

    def has_one_to_spare(self, others: _Side) -> bool:
        """Whether these layers begin with more dense ones than the others begin with layers that exchange tokens.

        A dense layer that has a part for each token exchange of the layer beside it needs no second one.
        """
        if not (self.is_left and others.is_left):
            return False
        first, to_cover = self._first, others._moe[others._first]
        return self._dense[first] > to_cover > 0 and not any(self._has_two_parts[first : first + 2])

    def take(self, count: int) -> tuple[int, ...]:
        """So many layers, or as many as there are."""
        taken = self._layers[self._first : self._first + count]
        self._first += len(taken)
        return tuple(taken)


def _run_lengths(flags: Sequence[bool]) -> list[int]:
    """For each flag, how many from it on are set before one that is not."""
    lengths = list(accumulate(reversed(flags), lambda length, flag: (length + 1) * flag, initial=0))
    return lengths[:0:-1]


def _counts_then_combine(issue: _Issue, i: int | None, j: int | None, covers: bool) -> None:
    """The opening of a pair in `megatron`."""
    issue.f(i, Slot.PRE_DISPATCH)
    issue.f(i, Slot.COUNTS)
    issue.b(j, Slot.POST_COMBINE)
    issue.b(j, Slot.COMBINE)
    issue.f(i, Slot.PERMUTE)
    issue.f(i, Slot.DISPATCH)
    if covers:
        issue.w_before(j)


def _combine_then_counts(issue: _Issue, i: int | None, j: int | None, covers: bool) -> None:
    """The opening of a pair in `auto`: weight gradients cover combine.B, or dispatch.F where there is none."""
    issue.b(j, Slot.POST_COMBINE)
    issue.b(j, Slot.COMBINE)
    issue.f(i, Slot.PRE_DISPATCH)
    issue.f(i, Slot.COUNTS)
    if covers and issue.exchanges(None, j):
        issue.w_before(j)
    issue.f(i, Slot.PERMUTE)
    issue.f(i, Slot.DISPATCH)
    if covers:
        issue.w_before(j)


def _interleave(issue: _Issue, pairs: list[Beside], opening: Opening) -> Order:
    """Layers of the forward beside layers of the backward, pair after pair.

    Weight gradients are computed where exchanges are in flight; those of the first layer come last. Where no layer of
    a pair exchanges tokens, but one of a later pair does, they wait for that pair.
    """
    issue.f(None, Slot.PRE_PROCESS)
    issue.b(None, Slot.POST_PROCESS)
    # (first, last) of each side: the same layer, unless there are two.
    ends = [[(side[0], side[-1]) if side else (None, None) for side in pair] for pair in pairs]
    last_cover = max((k for k, ((i, _), (j, _)) in enumerate(ends) if issue.exchanges(i, j)), default=-1)
    for k, ((i, last_i), (j, last_j)) in enumerate(ends):
        covers = issue.exchanges(i, j) or k > last_cover
        opening(issue, i, j, covers)
        issue.f(i, Slot.SHARED)
        if i != last_i:
            issue.f(i, Slot.EXPERTS)
        issue.b(j, Slot.EXPERTS)
        issue.b(j, Slot.DISPATCH)
        issue.b(j, Slot.SHARED)
        if j != last_j:
            issue.b(j, Slot.PRE_DISPATCH)
        if covers:
            issue.w(j, Slot.EXPERTS)
            issue.w(j, Slot.SHARED)
        issue.f(last_i, Slot.PRE_DISPATCH)
        issue.f(last_i, Slot.EXPERTS)
        issue.f(i, Slot.COMBINE)
        issue.b(last_j, Slot.EXPERTS)
        issue.b(last_j, Slot.PRE_DISPATCH)
        issue.f(i, Slot.POST_COMBINE)
    issue.f(None, Slot.POST_PROCESS)
    issue.b(None, Slot.PRE_PROCESS)
    issue.rest()
    return issue.order


class _Issue:
    """Appends nodes to an order, each behind what it needs; a node that a chunk does not have is skipped.

    A layer None is the part outside the layers, or a layer that the shorter chunk does not have: slots tell them apart.
    """

    def __init__(self, f: ChunkGraph | None, b: ChunkGraph | None) -> None:
        self._depth = tuple(0 if chunk is None else chunk.layers for chunk in (f, b))
        self._left = {"F": _nodes(f, (Phase.F,)), "B": _nodes(b, (Phase.B, Phase.W))}
        self._needs = {"F": _needs(f), "B": _needs(b)}
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

    def has(self, mb: str, layer: int, slot: Slot) -> bool:
        """Whether a layer of the forward ("F") or the backward ("B") has this part, issued or not."""
        return (layer, slot) in self._parts[mb]

    def has_two_parts(self, mb: str, layer: int) -> bool:
        """Whether a layer without exchanges has a part for each token exchange of the layer beside it."""
        return self.has(mb, layer, Slot.PRE_DISPATCH) and self.has(mb, layer, Slot.EXPERTS)

    def exchanges(self, i: int | None, j: int | None) -> bool:
        """Whether layer i of the forward or layer j of the backward exchanges tokens."""
        return any(layer is not None and self.has(mb, layer, Slot.DISPATCH) for mb, layer in (("F", i), ("B", j)))

    def w_before(self, layer: int | None) -> None:
        """Issue the weight gradients that are left of what the backward ran before this layer's experts."""
        if layer is None:
            return
        behind = [(None, Slot.POST_PROCESS, Phase.W), (layer, Slot.POST_COMBINE, Phase.W)]
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


def _needs(chunk: ChunkGraph | None) -> dict[str, list[tuple]]:
    """For each node, the nodes whose values it reads or whose effects it must follow."""
    if chunk is None:
        return {}
    by_name = {node.name: node for node in chunk.nodes}
    made_by = {value: node for node in chunk.nodes for value in node.writes}
    needs = {node.name: [_key(made_by[v]) for v in node.reads if v in made_by] for node in chunk.nodes}
    for earlier, later in chunk.effects:
        needs[later].append(_key(by_name[earlier]))
    return needs
