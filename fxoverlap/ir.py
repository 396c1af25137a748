"""The data that passes hand on: frozen dataclasses without behaviour, and the words for them.

A `JointGraph` is one microbatch's forward and backward as a flat ATen graph. A `ChunkGraph` is the same ops grouped
into `ScheduleNode`s. A `Plan` is an order of node instances of at most two microbatches. A `FusedGraph` is the plan
lowered to an FX graph with one call a node instance.

Terms: a *value* is the result of one op (or one graph input) of the joint graph, known by that FX node's name; a
*physical layer* is one module that the layer globs match; a *logical layer* is what is scheduled as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import fx

from fxoverlap.hardware import Hardware

META = "fxoverlap"
"""The key of `fx.Node.meta` under which passes keep what they know: an `OpTag` in a joint graph; in a fused graph
an `Instance` on a call, a `ValueRef` on a value."""


class Phase(Enum):
    """What a node computes: forward, input gradients, weight gradients, replay of a recomputed forward."""

    F = "F"
    B = "B"
    W = "W"
    R = "R"


class Lane(Enum):
    """Where a node runs. On CUDA a lane is a stream; on a CPU `comm` is the process group's own thread."""

    COMPUTE = "compute"
    COMM = "comm"
    HOST = "host"


class Slot(Enum):
    """The parts of a logical layer, and the parts of a chunk outside its layers, in forward order."""

    PRE_PROCESS = "pre_process"
    PRE_DISPATCH = "pre_dispatch"
    COUNTS = "counts"
    PERMUTE = "permute"
    DISPATCH = "dispatch"
    SHARED = "shared"
    EXPERTS = "experts"
    COMBINE = "combine"
    POST_COMBINE = "post_combine"
    MTP_POST = "mtp_post"
    POST_PROCESS = "post_process"


class Role(Enum):
    """What an exchange carries: token counts, tokens to their experts, or expert results back."""

    COUNTS = "counts"
    DISPATCH = "dispatch"
    COMBINE = "combine"


class InputKind(Enum):
    """What a graph input is bound to when the graph runs."""

    PARAM = "param"
    BUFFER = "buffer"
    LEAF = "leaf"
    TANGENT = "tangent"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input of a joint graph.

    Attributes:
        value: name of its placeholder (or get_attr) node.
        kind: what it is bound to.
        name: the first FQN of a parameter or buffer; the path of a microbatch leaf; the attribute of a constant.
        index: position among the inputs of its kind.
    """

    value: str
    kind: InputKind
    name: str
    index: int


@dataclass(frozen=True, slots=True)
class OpTag:
    """What is known of one op of a joint graph (`node.meta["fxoverlap"]`).

    Attributes:
        phase: F or B as the tracer saw it; R for what a pass has copied.
        fqn: FQN of the innermost module that ran the op; "" for the model itself; None where it cannot be known.
        layer: index of the physical layer; None outside the layers.
        calls: the calls of modules that were under way, outermost first, each as `fqn#number of the call`; empty where
            only `fqn` is known.
        region: F only: the `torch.utils.checkpoint` call of the user's that ran the op, as `fqn#number of the call`;
            None outside of them. `fqn` is that of the module that is checkpointed, or, where a function is, of the
            module that calls it; "(model)" for the model itself.
        keep: the policy of a selective checkpoint saves what the op makes; of a launch, what it brings.
    """

    phase: Phase
    fqn: str | None
    layer: int | None = None
    calls: tuple[str, ...] = ()
    region: str | None = None
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """One all-to-all between expert-parallel ranks; several launches where tensors travel together.

    Attributes:
        role: what it carries. A backward exchange has the role of the forward exchange that it is the gradient of.
        phase: F or B; R if it is sent again (after the pass `recompute`).
        index: position of the forward exchange among the forward exchanges of the graph; a backward exchange, or
            one that is sent again, has the index of its forward exchange.
        layer: index of the physical layer, None outside the layers.
        launches: names of the launching ops, in trace order.
        waits: names of the ops that wait for them, in trace order.
        group: name of the process group.
    """

    role: Role
    phase: Phase
    index: int
    layer: int | None
    launches: tuple[str, ...]
    waits: tuple[str, ...]
    group: str


@dataclass(frozen=True, slots=True)
class PhysicalLayer:
    """One module that the layer globs match.

    Attributes:
        fqn: its fully qualified name; a module that runs several times is as many layers.
        symbol: its symbol in the pattern, None without a pattern.
        logical: number of its logical layer; equal numbers are one layer. A layer with several dispatches is cut into
            more logical layers, so the `layer` of schedule nodes may count on.
        depth: the depth of multi-token prediction that it is in, from 0; None in the trunk.
    """

    fqn: str
    symbol: str | None
    logical: int
    depth: int | None = None


@dataclass(frozen=True, slots=True)
class JointGraph:
    """The joint forward/backward graph of one microbatch, and what its ends mean.

    Attributes:
        module: holds the graph; passes change the graph in place and own it.
        inputs: one a placeholder, and one a get_attr constant.
        loss: the value that is differentiated.
        outputs: values of the model's other tensor outputs, in order.
        mutations: (value, input value) for each buffer that the forward writes: the new value and the buffer's input.
        gradients: (value, input value) for each parameter or leaf that gets a gradient.
        physical: the physical layers in model order, those of the trunk first (after the pass `layers`).
        exchanges: all exchanges in trace order (after the pass `exchanges`).
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    loss: str
    outputs: tuple[str, ...]
    mutations: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]
    physical: tuple[PhysicalLayer, ...] = ()
    exchanges: tuple[Exchange, ...] = ()

    stage = "joint"


@dataclass(frozen=True, slots=True)
class DepthLayer:
    """Which logical layer of a depth of multi-token prediction a schedule node is in.

    Attributes:
        depth: the depth, from 0.
        layer: index of the logical layer in the depth; None where the depth has one only, or for the depth's head.
    """

    depth: int
    layer: int | None = None

    def __str__(self) -> str:
        return f"MTP{self.depth}" if self.layer is None else f"MTP{self.depth}.L{self.layer}"


@dataclass(frozen=True, slots=True)
class ScheduleNode:
    """The smallest thing that the scheduler moves.

    Attributes:
        layer: index of the logical layer, None outside the layers. Those of multi-token prediction follow those of the
            trunk; a depth's head has the index of its last one.
        slot: which part of it.
        phase: what it computes.
        lane: where it runs.
        ops: names of its ops in trace order.
        reads: values that it reads, in the order of first use.
        writes: values that it makes and others read, in trace order.
        mtp: where in multi-token prediction it is; None in the trunk and outside the layers.
    """

    layer: int | None
    slot: Slot
    phase: Phase
    lane: Lane
    ops: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    mtp: DepthLayer | None = None

    @property
    def place(self) -> str:
        """The layer in words: `L1`, or `MTP0` in multi-token prediction; empty outside the layers."""
        return str(self.mtp) if self.mtp is not None else "" if self.layer is None else f"L{self.layer}"

    @property
    def name(self) -> str:
        """For example `L1.experts.B`, `MTP0.mtp_post.F`, or `post_process.F` outside the layers."""
        return ".".join(filter(None, (self.place, self.slot.value, self.phase.value)))


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What one schedule node costs, at balanced routing.

    Attributes:
        flops: floating point operations.
        bytes_moved: bytes that it reads and writes.
        bytes_sent: bytes that its exchanges send, the rank's own part included; 0 in compute nodes.
        allocated: bytes of the values that it makes and hands on.
        freed: bytes of the values that die with it.
        ranks: ranks of the group of its exchanges, 1 in compute nodes.
        seconds: time that it takes on its lane when nothing else runs; an exchange until its data has come.
        spread: by how much that varies from one microbatch and step to another, the standard deviation as a share.
        passed: bytes that it hands on to nodes of its own side only, the forward or the backward.
        kept: bytes that it hands on to later ones too: F to the backward, the backward to W.
        inside: most bytes that it holds of its own while it runs, those that it hands on included. These three are for
            exchanges that bring the imbalanced number of rows.
    """

    flops: int = 0
    bytes_moved: int = 0
    bytes_sent: int = 0
    allocated: int = 0
    freed: int = 0
    ranks: int = 1
    seconds: float = 0.0
    spread: float = 0.0
    passed: int = 0
    kept: int = 0
    inside: int = 0


@dataclass(frozen=True, slots=True)
class CostTable(Mapping[str, NodeCost]):
    """Costs by `ScheduleNode.name`, and the machine that they were made for.

    Attributes:
        nodes: the costs.
        hardware: what issues and runs the nodes.
        source: where the times come from: "roofline cpu", "measured", "table costs.json".
        known: names of the nodes whose time was measured or given; that of the others is the roofline's.
    """

    nodes: Mapping[str, NodeCost]
    hardware: Hardware
    source: str
    known: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> NodeCost:
        return self.nodes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)


Rows = Mapping[Any, int]
"""Numbers for the symbols of a joint graph: how many rows the exchanges of one microbatch bring."""


@dataclass(frozen=True, slots=True)
class Made:
    """A storage that one op of a node allocates.

    Attributes:
        storage: its name, as in `Memory`.
        first: position of the op in the node.
        last: position of the op behind which the node does not hold it any more; None if it is handed on.
    """

    storage: str
    first: int
    last: int | None


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the ops of one node, whose arguments are boxed, do to memory.

    Attributes:
        made: what they allocate, in order.
        reads: for each value of `ScheduleNode.reads`, the position of the op behind which the node does not hold it or
            a view of it any more; None if a view of it is handed on.
    """

    made: tuple[Made, ...]
    reads: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one parameter or leaf.

    Attributes:
        value: what is its gradient.
        target: the graph input that gets it.
        bytes: of the target.
        fits: whether it has the layout of its target and all of a storage, so that it may become the `.grad` itself.
    """

    value: str
    target: GraphInput
    bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """What the nodes of a chunk do to memory.

    Attributes:
        footprints: by node name.
        storages: value -> name of the storage that it stands in; views share one. Numbers have none.
        sizes: bytes by name of the storage, a number or an expression of symbols (`compat.evaluate`); 0 for inputs
            that were there before the step.
        begin: storages that a microbatch owns from its begin to its end: copies of buffers, and the loss's gradient.
        gradients: in the order of the joint graph.
        numbers: value -> the symbol that it is.
        rows: numbers for symbols: "balanced"; "imbalanced", which is that with `OverlapConfig.imbalance`; and "worst",
            with which all tokens come to this rank.
    """

    footprints: Mapping[str, Footprint]
    storages: Mapping[str, str]
    sizes: Mapping[str, Any]
    begin: tuple[str, ...]
    gradients: tuple[Gradient, ...]
    numbers: Mapping[str, Any]
    rows: Mapping[str, Rows]


@dataclass(frozen=True, slots=True)
class ChunkGraph:
    """The schedule nodes of one microbatch.

    Attributes:
        joint: the graph that the nodes' ops stand in; None for a synthetic graph.
        nodes: in an order that one microbatch alone may run in: F, then B, with each W after what it reads.
        effects: (earlier, later) names of nodes whose random draws or buffer accesses must keep their order.
        layers: number of logical layers, those of multi-token prediction included.
        costs: by node name (after the pass `bytes`), without times.
        buffers: in a synthetic graph, (name of the storage, its bytes) of each value that a node makes and another node
            reads; views share a storage.
        memory: what the ops of the nodes do to memory (after the pass `memory`).
        modules: by node name, the node's ops as a module with boxed arguments; structurally identical nodes share one
            (after the pass `extract`).
        acting: names of the nodes with random draws, writes, or collectives that are no exchanges, in the order that
            `effects` keeps.
        replays: (earlier, later) names of nodes, of which the later is an R node, in the order that keeps the values of
            one replay at a time alive (after the pass `recompute`). Built-in policies keep it; the values do not ask
            for it.
        depths: for each depth of multi-token prediction the half-open range of its logical layers.
    """

    joint: JointGraph | None
    nodes: tuple[ScheduleNode, ...]
    effects: tuple[tuple[str, str], ...] = ()
    layers: int = 0
    costs: Mapping[str, NodeCost] = field(default_factory=dict)
    buffers: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    memory: Memory | None = None
    modules: Mapping[str, fx.GraphModule] = field(default_factory=dict)
    acting: tuple[str, ...] = ()
    replays: tuple[tuple[str, str], ...] = ()
    depths: tuple[tuple[int, int], ...] = ()

    stage = "chunk"


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A value of one microbatch (`node.meta["fxoverlap"]` of a fused graph's placeholders and getitems).

    Attributes:
        mb: as in `Instance`.
        value: name of the value in the microbatch's joint graph.
    """

    mb: str
    value: str


@dataclass(frozen=True, slots=True)
class Instance:
    """One schedule node of one microbatch in a plan.

    Attributes:
        node: what runs.
        mb: which microbatch of the plan, as in `Plan.chunks`.
        frees: values of that microbatch that die with this instance (after the pass `lifetime`).
    """

    node: ScheduleNode
    mb: str
    frees: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.node.name}  mb={self.mb}  lane={self.node.lane.value}"


def runs_forward(mb: str) -> bool:
    """Whether a microbatch of a plan (`Instance.mb`) runs its forward; else its backward."""
    return mb.startswith("F")


def nodes_of(mb: str, chunk: ChunkGraph) -> list[ScheduleNode]:
    """The nodes that run for a microbatch of this label, in the order in which it may run alone."""
    return [node for node in chunk.nodes if (node.phase is Phase.F) == runs_forward(mb)]


@dataclass(frozen=True, slots=True)
class Plan:
    """The order of the node instances of one fused step.

    Attributes:
        kind: "F", "FB", "B", or of two microbatches in the same phase "FF", "BB".
        chunks: the chunk graph of each of its microbatches. "F" is the one whose forward runs, "B" the one whose
            backward runs; "F0" and "F1", or "B0" and "B1", are the earlier and the later of two.
        order: the instances, in the order in which the host issues them.
        costs: what the order was chosen by.
    """

    kind: str
    chunks: Mapping[str, ChunkGraph]
    order: tuple[Instance, ...]
    costs: CostTable

    stage = "plan"

    @property
    def forward(self) -> ChunkGraph | None:
        """The chunk graph of microbatch "F"."""
        return self.chunks.get("F")

    @property
    def backward(self) -> ChunkGraph | None:
        """The chunk graph of microbatch "B"."""
        return self.chunks.get("B")

    def __str__(self) -> str:
        return "\n".join(str(instance) for instance in self.order)


@dataclass(frozen=True, slots=True)
class Round:
    """One plan of a step, and the microbatches that it works on. A step is a sequence of rounds.

    Attributes:
        plan: what runs.
        microbatches: position in the step of the microbatch that each `Instance.mb` of the plan stands for.
    """

    plan: Plan
    microbatches: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class FusedGraph:
    """A plan as an FX graph: one `call_module` a node instance, in plan order, and events for its cross-lane edges.

    Attributes:
        plan: what it was made from.
        module: calls one submodule an instance; equal nodes share a submodule. The placeholders are the values that
            are alive before the plan, the outputs those that are alive after it, named `f_<value>` and `b_<value>`.
    """

    plan: Plan
    module: fx.GraphModule

    stage = "plan"
