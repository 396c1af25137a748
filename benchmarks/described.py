"""A chunk graph made from the figures of a model, without the model: what `fxoverlap simulate` runs.

In:  a `Model`, a `Hardware`, and a `Setup`.
Out: a `ChunkGraph` of one microbatch on one rank, without a joint graph: the nodes that a captured chunk of such a
     model has, the values that go from one to the other with their sizes, and what each node costs on the hardware.

A node's time is the sum of its operators' rooflines, so that norms and permutations, which only move bytes, count
beside matrix products. Tokens are taken to spread evenly over the experts: as many come to a rank as leave it.

What is kept for the backward: the input of every matrix product, queries, keys, values and result of attention, what
comes back from the experts (it is multiplied by the router's weights), and the logits. Of a layer that is replayed it
is its input and its routing, and R nodes make the rest again before its B; token counts are not exchanged again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, comb

from fxoverlap.benchmarks.models import Model
from fxoverlap.benchmarks.operators import Part, Parts
from fxoverlap.config import Recompute
from fxoverlap.errors import ConfigError
from fxoverlap.hardware import Hardware
from fxoverlap.ir import ChunkGraph, DepthLayer, Lane, NodeCost, Phase, ScheduleNode, Slot
from fxoverlap.passes.replays import one_at_a_time
from fxoverlap.schedule.cost import link_seconds, seconds

DISPATCHERS = ("alltoall", "once-a-node")
"""How tokens travel: a copy for each expert, as an all-to-all sends them; or a copy for each domain of fast links that
holds one of a token's experts, and from there one for each of its ranks, as DeepEP and HybridEP do it."""

_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is run.

    Attributes:
        ep: ranks that share the experts.
        seq: tokens of a microbatch on a rank, one sequence.
        layers: MoE layers of a pipeline stage in the middle, which has no embedding, head, and MTP depths; None for the
            whole model.
        recompute: which layers' forward is replayed before their backward, one layer at a time: "uniform" with
            `num_layers` 1 all of them, "block" the first ones.
        dispatcher: one of `DISPATCHERS`.
    """

    ep: int
    seq: int
    layers: int | None = None
    recompute: Recompute | None = None
    dispatcher: str = "alltoall"


def described(model: Model, hardware: Hardware, setup: Setup) -> ChunkGraph:
    """The chunk of one microbatch on one rank. Raises ConfigError for a setup that the model does not have."""
    if setup.ep < 2 or model.experts % setup.ep:
        raise ConfigError(
            f"ep is {setup.ep}; expected a divisor of the {model.experts} experts of {model.name}, and at least 2, as "
            f"one rank has nobody to exchange tokens with."
        )
    moe = model.layers - model.dense_layers
    if setup.layers is not None and not 1 <= setup.layers <= moe:
        raise ConfigError(
            f"layers is {setup.layers}; expected 1 to {moe}, the MoE layers of {model.name}, as a stage in the middle "
            f"of the pipeline has no others. Leave it out for the whole model."
        )
    asked = setup.recompute
    if asked is not None and (asked.keep or (asked.method != "block" and asked != Recompute("uniform"))):
        raise ConfigError(
            f"recompute is {asked!r}; expected uniform:1 or block:N without slots to keep, as a described model "
            f"replays whole layers one at a time. Measure others with bench two-hosts."
        )
    is_stage = setup.layers is not None
    is_moe = [True] * (setup.layers or 0) if is_stage else [False] * model.dense_layers + [True] * moe
    chunk = _Chunk(model, hardware, setup)
    trunk = len(is_moe)
    if not is_stage:
        chunk.node(None, Slot.PRE_PROCESS, Phase.F, [chunk.parts.embedding()], [], {"x0": chunk.parts.hidden})
        is_moe += [True] * model.mtp_depths
    for layer, each in enumerate(is_moe):
        if layer == trunk:
            chunk.head_forward(None, Slot.POST_PROCESS, trunk)
        chunk.layer_forward(layer, each, Phase.F, is_depth=layer >= trunk)
        if layer >= trunk:
            chunk.head_forward(layer, Slot.MTP_POST, layer + 1)
    if not is_stage:
        if trunk == len(is_moe):
            chunk.head_forward(None, Slot.POST_PROCESS, trunk)
        chunk.head_backward(None, Slot.POST_PROCESS, trunk)
    for layer, each in reversed(list(enumerate(is_moe))):
        if layer >= trunk:
            chunk.head_backward(layer, Slot.MTP_POST, layer + 1)
        if chunk.is_replayed(layer):
            chunk.layer_forward(layer, each, Phase.R, is_depth=layer >= trunk)
        chunk.layer_backward(layer, each, is_depth=layer >= trunk)
    if not is_stage:
        chunk.node(None, Slot.PRE_PROCESS, Phase.W, [chunk.parts.embedding()], ["dx0"], {})
    return chunk.graph(len(is_moe))


def sent_bytes(model: Model, hardware: Hardware, setup: Setup, element_bytes: int) -> tuple[float, float, float]:
    """Bytes that a rank gives to an exchange of its tokens: all of them, to other ranks of its domain, to others."""
    token = setup.seq * model.hidden * element_bytes
    near = min(setup.ep, hardware.domain)
    if setup.dispatcher == "alltoall":
        given = token * model.top_k
        return given, given * (near - 1) / setup.ep, given * (setup.ep - near) / setup.ep
    domains = ceil(setup.ep / near)
    # A copy that stays in its domain, or has come there, goes to each rank of it that has an expert for the token.
    copies = token * distinct(setup.ep, model, model.node_limit * near)
    entering = token * distinct(domains, model, model.node_limit)
    return copies, copies * (near - 1) / near, entering * (domains - 1) / domains


def distinct(groups: int, model: Model, limit: int = 0) -> float:
    """How many of so many equal groups of experts have one of a token's experts, expected over random tokens.

    A group has none if all top_k experts are among the others: C(E - E/n, k) / C(E, k). A limit above 0 leaves a token
    the experts of so many groups.
    """
    allowed = min(groups, limit) if limit else groups
    experts = model.experts * allowed // groups
    missed = comb(experts - experts // allowed, model.top_k) / comb(experts, model.top_k)
    return allowed * (1 - missed)


class _Chunk:
    """Collects the nodes of a chunk.

    Values of a layer are named by the layer and what they are; `x<i>` is the input of layer i, and `dx<i>` its
    gradient. What a replay makes has a name that ends in `~`.
    """

    def __init__(self, model: Model, hardware: Hardware, setup: Setup) -> None:
        self.parts = Parts(model, setup.seq, setup.ep)
        self._model, self._hardware, self._setup = model, hardware, setup
        self._counts = model.experts * _INDEX_BYTES
        self._nodes: list[ScheduleNode] = []
        self._costs: dict[str, NodeCost] = {}
        self._sizes: dict[str, int] = {}
        self._gradients: dict[int, list[str]] = {}  # of the input of each layer, as far as they are made
        self._exchanges = {
            size: sent_bytes(model, hardware, setup, size) for size in (model.activation_bytes, model.dispatch_bytes)
        }

    def is_replayed(self, layer: int | None) -> bool:
        """Whether a layer is computed again; None is outside the layers."""
        asked = self._setup.recompute
        return asked is not None and layer is not None and (asked.method == "uniform" or layer < asked.num_layers)

    def node(
        self,
        layer: int | None,
        slot: Slot,
        phase: Phase,
        parts: Iterable[Part],
        reads: Iterable[str],
        writes: Mapping[str, float],
    ) -> None:
        """Add a node of the compute lane that runs these parts in its phase."""
        work = [each.cost(phase) for part in parts for each in part.operators]
        node = ScheduleNode(layer, slot, phase, Lane.COMPUTE, (), tuple(reads), tuple(writes), self._in_mtp(layer))
        took = sum(seconds(node, NodeCost(int(flops), int(moved)), self._hardware) for flops, moved in work)
        cost = NodeCost(int(sum(flops for flops, _ in work)), int(sum(moved for _, moved in work)), seconds=took)
        self._add(node, cost, writes)

    def exchange(self, layer: int, slot: Slot, phase: Phase, sent: str, got: str) -> None:
        """Add an exchange of tokens, or of token counts."""
        ep = self._setup.ep
        if slot is Slot.COUNTS:
            node = ScheduleNode(layer, slot, phase, Lane.COMM, (), (sent,), (got,), self._in_mtp(layer))
            cost = NodeCost(bytes_sent=self._counts, ranks=ep)
            cost = replace(cost, seconds=seconds(node, cost, self._hardware))
            return self._add(node, cost, {got: self._counts})
        to_experts = (slot is Slot.DISPATCH) is (phase is not Phase.B)
        size = self._model.dispatch_bytes if to_experts else self._model.activation_bytes
        given, inside, outside = self._exchanges[size]
        reads = (sent, f"L{layer}.splits")
        node = ScheduleNode(layer, slot, phase, Lane.COMM, (), reads, (got,), self._in_mtp(layer))
        took = link_seconds(inside, outside, self._hardware)
        self._add(node, NodeCost(bytes_sent=int(given), ranks=ep, seconds=took), {got: self.parts.rows})
        return None

    def layer_forward(self, layer: int, is_moe: bool, phase: Phase, is_depth: bool) -> None:
        """Add the F nodes of a layer, or its R nodes: without what F has left, and without the layer's result."""
        parts, is_first = self.parts, phase is Phase.F
        here = (lambda name: f"L{layer}.{name}") if is_first else (lambda name: f"L{layer}.{name}~")
        once = f"L{layer}."
        keeps = not (is_first and self.is_replayed(layer))

        def kept(slot: Slot, *of: Part) -> dict[str, float]:
            return {here(f"{slot.value}.kept"): sum(part.kept for part in of)} if keeps else {}

        before = self._before(is_moe, is_depth)
        residual = {here("residual"): parts.hidden} if is_first else {}
        routing = {once + "routing": parts.routing, once + "count": self._counts} if is_moe and is_first else {}
        writes = {here("h"): parts.hidden, **residual, **routing, **kept(Slot.PRE_DISPATCH, *before)}
        self.node(layer, Slot.PRE_DISPATCH, phase, before, [f"x{layer}"], writes)
        result = {f"x{layer + 1}": parts.hidden} if is_first else {}
        if not is_moe:
            reads = [here("h"), *residual]
            self.node(layer, Slot.EXPERTS, phase, [parts.dense()], reads, result | kept(Slot.EXPERTS, parts.dense()))
            return
        if is_first:
            self.exchange(layer, Slot.COUNTS, phase, once + "count", once + "counts")
        counted = {once + "splits": self._counts} if is_first else {}
        reads = [here("h"), once + "routing", once + ("counts" if is_first else "splits")]
        self.node(layer, Slot.PERMUTE, phase, [parts.permute()], reads, {here("sent"): parts.rows, **counted})
        self.exchange(layer, Slot.DISPATCH, phase, here("sent"), here("got"))
        shared = {}
        if self._model.shared_experts:
            shared = {here("shared"): parts.hidden} if is_first else {}
            writes = shared | kept(Slot.SHARED, parts.shared())
            self.node(layer, Slot.SHARED, phase, [parts.shared()], [here("h")], writes)
        writes = {here("out"): parts.rows, **kept(Slot.EXPERTS, parts.experts())}
        self.node(layer, Slot.EXPERTS, phase, [parts.experts()], [here("got"), once + "splits"], writes)
        self.exchange(layer, Slot.COMBINE, phase, here("out"), here("back"))
        if is_first:
            reads = [here("back"), once + "routing", *residual, *shared]
            self.node(layer, Slot.POST_COMBINE, phase, [parts.post_combine()], reads, result)

    def layer_backward(self, layer: int, is_moe: bool, is_depth: bool) -> None:
        """Add the B and W nodes of a layer."""
        parts, once = self.parts, f"L{layer}."
        again = "~" if self.is_replayed(layer) else ""
        h = once + "h" + again
        arriving = self._gradients.get(layer + 1, [f"dx{layer + 1}"])
        before = self._before(is_moe, is_depth)
        inward = []  # gradients of h
        if is_moe:
            reads = [*arriving, once + "back" + again, once + "routing"]
            writes = {once + "dback": parts.rows, once + "drouting": parts.routing}
            self.node(layer, Slot.POST_COMBINE, Phase.B, [parts.post_combine()], reads, writes)
            self.exchange(layer, Slot.COMBINE, Phase.B, once + "dback", once + "dout")
            inward = [once + "dsent", once + "drouting"]
            if self._model.shared_experts:
                inward.append(once + "dshared")
                self._split(layer, Slot.SHARED, parts.shared(), arriving, {once + "dshared": parts.hidden}, [h])
            self._split(layer, Slot.EXPERTS, parts.experts(), [once + "dout"], {once + "dgot": parts.rows})
            self.exchange(layer, Slot.DISPATCH, Phase.B, once + "dgot", once + "dsent")
            before = [*before, parts.permute()]
        else:
            inward = [once + "dh"]
            self._split(layer, Slot.EXPERTS, parts.dense(), arriving, {once + "dh": parts.hidden}, [h])
        reads = [*arriving, *inward, f"x{layer}"]
        self._split(layer, Slot.PRE_DISPATCH, before, reads, {f"dx{layer}": parts.hidden}, [h])
        self._gradients.setdefault(layer, []).append(f"dx{layer}")

    def head_forward(self, layer: int | None, slot: Slot, end: int) -> None:
        """Add a head with its loss behind `x<end>`."""
        part = self.parts.head()
        self.node(layer, slot, Phase.F, [part], [f"x{end}"], {_name(layer, slot, "kept"): part.kept})

    def head_backward(self, layer: int | None, slot: Slot, end: int) -> None:
        """Add the B and W nodes of a head."""
        gradient = _name(layer, slot, f"dx{end}")
        self._split(layer, slot, self.parts.head(), [f"x{end}"], {gradient: self.parts.hidden})
        self._gradients.setdefault(end, []).append(gradient)

    def graph(self, layers: int) -> ChunkGraph:
        """The chunk, with what each node allocates and frees when one microbatch runs alone."""
        last = {value: node.name for node in self._nodes for value in (*node.writes, *node.reads)}
        freed: dict[str, int] = {}
        for value, size in self._sizes.items():
            freed[last[value]] = freed.get(last[value], 0) + size
        costs = {name: replace(cost, freed=freed.get(name, 0)) for name, cost in self._costs.items()}
        buffers = {value: (value, size) for value, size in self._sizes.items()}
        replays = tuple(one_at_a_time(self._nodes, {}))
        depths = () if self._setup.layers is not None else tuple((i, i + 1) for i in range(self._model.layers, layers))
        return ChunkGraph(
            None,
            tuple(self._nodes),
            layers=layers,
            costs=costs,
            buffers=buffers,
            replays=replays,
            depths=depths,
        )

    def _in_mtp(self, layer: int | None) -> DepthLayer | None:
        """Where in multi-token prediction a layer of the whole model is; a depth has one logical layer."""
        behind = -1 if layer is None or self._setup.layers is not None else layer - self._model.layers
        return DepthLayer(behind) if behind >= 0 else None

    def _before(self, is_moe: bool, is_depth: bool) -> list[Part]:
        """The parts of pre_dispatch."""
        ends = self.parts.router() if is_moe else self.parts.norm()
        return [*([self.parts.next_token()] if is_depth else []), self.parts.attention(), ends]

    def _split(
        self,
        layer: int | None,
        slot: Slot,
        parts: Part | list[Part],
        reads: list[str],
        writes: dict[str, float],
        inputs: Iterable[str] = (),
    ) -> None:
        """Add the B node of a slot and its W node, which reads what F kept, what B made for it, and the inputs."""
        parts = [parts] if isinstance(parts, Part) else parts
        is_replayed = self.is_replayed(layer) and slot not in (Slot.POST_PROCESS, Slot.MTP_POST)
        kept = _name(layer, slot, "kept") + ("~" if is_replayed else "")
        grads = {_name(layer, slot, "grads"): sum(part.grads for part in parts)}
        self.node(layer, slot, Phase.B, parts, [*reads, kept], writes | grads)
        self.node(layer, slot, Phase.W, parts, [*grads, kept, *inputs], {})

    def _add(self, node: ScheduleNode, cost: NodeCost, writes: Mapping[str, float]) -> None:
        sizes = {value: int(size) for value, size in writes.items()}
        self._nodes.append(node)
        self._sizes |= sizes
        self._costs[node.name] = replace(cost, allocated=sum(sizes.values()))


def _name(layer: int | None, slot: Slot, what: str) -> str:
    return f"{slot.value}.{what}" if layer is None else f"L{layer}.{slot.value}.{what}"
