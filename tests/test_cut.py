"""What `exchanges`, `layers`, `partition` and `cut` make of a graph: which op ends up in which schedule node, and why.

Proves: the chain of stages for all kinds of pattern; that launches stand alone and nothing delays them; that what has
room goes where it is read; that nothing dead, doubled or aliased crosses a cut; and that arity, views, casts and
slices at a cut give eager's bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, fx, nn
from toys import RawModel, RawMoE, batches, toy, train_both

import fxoverlap as fxo
from fxoverlap.capture import capture
from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import META, ChunkGraph, Exchange, JointGraph, OpTag, Phase, PhysicalLayer, Role, ScheduleNode, Slot
from fxoverlap.microbatch import as_microbatch
from fxoverlap.passes import op_facts
from fxoverlap.passes.chain import Chain, backward_chain, forward_chain
from fxoverlap.passes.cut import make_nodes
from fxoverlap.passes.exchanges import exchanges
from fxoverlap.passes.layers import layers, logical_groups
from fxoverlap.pattern import parse
from fxoverlap.pipeline import JOINT_PASSES, to_chunk

aten = torch.ops.aten
CONFIG = fxo.OverlapConfig()


def traced(model: nn.Module, config: fxo.OverlapConfig = CONFIG, microbatch: Any = None) -> JointGraph:
    return capture(model, as_microbatch(microbatch or batches(1)[0]), config).joint


def chunk_of(model: nn.Module, config: fxo.OverlapConfig = CONFIG, microbatch: Any = None) -> ChunkGraph:
    return to_chunk(traced(model, config, microbatch), config, [])


@functools.cache
def toy_chunk(group: dist.ProcessGroup, pattern: str = "[*E]", **changes: Any) -> ChunkGraph:
    return chunk_of(toy(pattern, group, **changes), fxo.OverlapConfig(pattern))


@functools.cache
def raw_chunk(group: dist.ProcessGroup, name: str = "layers") -> ChunkGraph:
    return chunk_of(RawModel(group, name=name))


class Net(nn.Module):
    """Embedding, layers, head, cross entropy; `edit` changes what goes from the layers to the head."""

    def __init__(self, *blocks: nn.Module, edit: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(16, 32)
        self.edit = edit or (lambda x: x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        x = self.edit(x)
        return F.cross_entropy(self.head(x).flatten(0, -2), targets.flatten()[: x.numel() // 16])


class Dense(nn.Module):
    """`x + act(linear(x))`."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(16, 16), act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


def ops(chunk: ChunkGraph) -> dict[str, fx.Node]:
    assert chunk.joint is not None
    return {node.name: node for node in chunk.joint.module.graph.nodes}


def node_of(chunk: ChunkGraph, *targets: Any, phase: Phase | None = None) -> list[str]:
    """The schedule nodes that hold ops with one of these targets, one entry an op."""
    found = ops(chunk)
    wanted = [n for n in chunk.nodes if phase in (None, n.phase)]
    return [node.name for node in wanted for op in node.ops if found[op].target in targets]


def by_name(chunk: ChunkGraph) -> dict[str, ScheduleNode]:
    return {node.name: node for node in chunk.nodes}


def names(chunk: ChunkGraph, phase: Phase) -> list[str]:
    return [node.name.removesuffix(f".{phase.value}") for node in chunk.nodes if node.phase is phase]


# --- the chain of stages ----------------------------------------------------------------------------------------

MOE = ("pre_dispatch", "permute", "experts", "post_combine")


def synthetic(pattern: str | None, symbols: str = "", labelled: bool = True) -> JointGraph:
    """A joint graph without ops: layers and exchanges, with a pattern or without."""
    parsed = parse(pattern) if pattern else None
    symbols = parsed.symbols if parsed else symbols
    groups = logical_groups(parsed) if parsed else [None] * len(symbols)
    physical = [PhysicalLayer(f"layers.{i}", s if parsed else None, g) for i, (s, g) in enumerate(zip(symbols, groups))]
    roles = [(i if labelled else None, role) for i, s in enumerate(symbols) if s == "E" for role in Role]
    found = [Exchange(role, Phase.F, i, layer, (), (), "g") for i, (layer, role) in enumerate(roles)]
    return JointGraph(None, (), "", (), (), (), tuple(physical) if labelled else (), tuple(found))  # type: ignore[arg-type]


def stages(chain: Chain) -> list[str]:
    return [s.slot.value if s.layer is None else f"L{s.layer}.{s.slot.value}" for s in chain.stages]


def moe(layer: int) -> list[str]:
    return [f"L{layer}.{slot}" for slot in MOE]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("[*E]", moe(0)),
        ("*E", moe(0)),
        ("*-*E", moe(0)),
        ("[*E][*E]", moe(0) + moe(1)),
        ("EE", moe(0) + moe(1)),
        ("*EE*", [*moe(0), *moe(1), "L2.pre_dispatch"]),
        ("-[*E]", ["L0.experts", *moe(1)]),
        ("*-[*E]", ["L0.pre_dispatch", "L1.experts", *moe(2)]),
        ("[*-][*E]", ["L0.pre_dispatch", "L0.experts", *moe(1)]),
        ("[*E]-", [*moe(0), "L1.experts"]),
        ("[*E]*E-", [*moe(0), *moe(1), "L2.experts"]),
        ("*-", ["L0.pre_dispatch", "L1.experts"]),
        ("[*-*-]", ["L0.pre_dispatch", "L0.experts"]),
        ("**", ["L0.pre_dispatch", "L1.pre_dispatch"]),
    ],
)
def test_chain_of_a_pattern(pattern: str, expected: list[str]) -> None:
    assert stages(forward_chain(synthetic(pattern))) == ["pre_process", *expected, "post_process"]


def test_chain_without_a_pattern() -> None:
    """A layer that exchanges ends a logical layer; behind the last such layer each layer is one."""
    chain = forward_chain(synthetic(None, "*-EE**"))
    assert stages(chain) == ["pre_process", *moe(0), *moe(1), "L2.pre_dispatch", "L3.pre_dispatch", "post_process"]


def test_chain_without_layer_labels() -> None:
    """The exchanges alone make the layers; there is no edge to tell post_combine from what follows."""
    expected = [f"L{i}.{slot}" for i in (0, 1) for slot in MOE[:3]]
    assert stages(forward_chain(synthetic(None, "EE", labelled=False))) == [*expected, "post_process"]


def test_chain_without_layers_or_exchanges() -> None:
    assert stages(forward_chain(synthetic(None, ""))) == ["post_process"]


@pytest.mark.parametrize("pattern", ["[*E]", "*-[*E]-", "[*-][*E]"])
def test_backward_chain_is_the_forward_chain_reversed(pattern: str) -> None:
    forward = forward_chain(synthetic(pattern))
    backward = backward_chain(forward)
    assert stages(backward) == [stage for stage in reversed(stages(forward)) if "permute" not in stage]
    for exchange, gate in backward.gates.items():
        # The backward launch ends the stage that the forward wait began.
        assert backward.stages[gate] == forward.stages[forward.gates[exchange] + 1]


@pytest.mark.parametrize(
    ("pattern", "groups"),
    [("*E*E", [0, 0, 1, 1]), ("*-[*E]", [0, 1, 2, 2]), ("[*E]**E", [0, 0, 1, 1, 1]), ("E-", [0, 1]), ("--", [0, 1])],
)
def test_logical_groups(pattern: str, groups: list[int]) -> None:
    assert logical_groups(parse(pattern)) == groups


def test_chunk_of_two_moe_layers_in_a_row(group: dist.ProcessGroup) -> None:
    slots = ["pre_dispatch", "counts", "permute", "dispatch", "experts", "combine", "post_combine"]
    expected = ["pre_process", *(f"L{i}.{slot}" for i in (0, 1) for slot in slots), "post_process"]
    assert names(toy_chunk(group, "EE"), Phase.F) == expected


def test_chunk_with_a_dense_layer_last(group: dist.ProcessGroup) -> None:
    chunk = toy_chunk(group, "[*E]-")
    assert names(chunk, Phase.F)[-3:] == ["L0.post_combine", "L1.experts", "post_process"]
    assert names(chunk, Phase.B)[:3] == ["post_process", "L1.experts", "L0.post_combine"]


def test_chunk_without_layer_labels(group: dist.ProcessGroup) -> None:
    """`layers.*` matches nothing here."""
    chunk = raw_chunk(group, "blocks")
    slots = ["pre_dispatch", "counts", "permute", "dispatch", "experts", "combine"]
    assert names(chunk, Phase.F) == [*(f"L{i}.{slot}" for i in (0, 1) for slot in slots), "post_process"]
    assert chunk.layers == 2


# --- exchanges and layers ---------------------------------------------------------------------------------------


def test_exchanges_are_paired(group: dist.ProcessGroup) -> None:
    joint = raw_chunk(group).joint
    assert joint is not None
    found = [(e.phase.value, e.role.value, e.index, e.layer, len(e.launches)) for e in joint.exchanges]
    forward = [("counts", 1), ("dispatch", 2), ("combine", 1)] * 2
    assert found[:6] == [("F", role, i, i // 3, launches) for i, (role, launches) in enumerate(forward)]
    # Tokens and their weights travel together, back too. Counts have no gradient.
    assert found[6:] == [("B", *forward[i][:1], i, i // 3, forward[i][1]) for i in (5, 4, 2, 1)]
    assert {e.group for e in joint.exchanges} == {group.group_name}


class Fixed(nn.Module):
    """A MoE layer of fixed capacity: the same sizes both ways."""

    def __init__(self, name: str, first: bool = True) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(16, 16), name

    def forward(self, x: Tensor) -> Tensor:
        sent = funcol.all_to_all_single_autograd(x.flatten(0, 1), None, None, self.name)
        back = funcol.all_to_all_single_autograd(self.linear(sent), None, None, self.name)
        return x + back.view_as(x)


def test_equal_sizes_are_paired_by_order(group: dist.ProcessGroup) -> None:
    joint = exchanges(traced(Net(Fixed(group.group_name), Fixed(group.group_name))), CONFIG)
    assert [e.role.value for e in joint.exchanges] == ["dispatch", "combine"] * 2 + ["combine", "dispatch"] * 2
    assert [e.index for e in joint.exchanges] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_exchanges_of_another_group_are_none(group: dist.ProcessGroup) -> None:
    """Sequence-parallel attention sends equal static parts, experts what the router chose; or the user says which."""
    other = dist.new_group([0])
    net = Net(Fixed(other.group_name), RawMoE(16, 4, group))
    assert {e.group for e in exchanges(traced(net), CONFIG).exchanges} == {group.group_name}
    asked = fxo.OverlapConfig(process_group=other)
    assert [e.group for e in exchanges(traced(net, asked), asked).exchanges] == [other.group_name] * 4
    both = Net(RawMoE(16, 4, other), RawMoE(16, 4, group))
    with pytest.raises(UnsupportedError, match="several process groups.*OverlapConfig.process_group"):
        exchanges(traced(both), CONFIG)


def test_launch_must_be_waited_for_once(group: dist.ProcessGroup) -> None:
    joint = traced(Net(Fixed(group.group_name)))
    wait = joint.module.graph.find_nodes(op="call_function", target=op_facts.WAIT)[0]
    reader = next(iter(wait.users))
    with joint.module.graph.inserting_before(reader):
        reader.replace_input_with(wait, joint.module.graph.call_function(op_facts.WAIT, wait.args))
    with pytest.raises(UnsupportedError, match=r"dispatch launch all_to_all_single must be read by exactly one wait"):
        exchanges(joint, CONFIG)


class Deep(nn.Module):
    """A model whose layers stand below other names, one inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Net(nn.Sequential(Dense()), Dense())
        self.model.layers[0].layers = nn.ModuleList()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets)


def test_layers_are_found_below_other_names() -> None:
    model = Deep()
    joint = layers(exchanges(traced(model), CONFIG), CONFIG)
    assert [layer.fqn for layer in joint.physical] == ["model.layers.0", "model.layers.1"]
    labels = {op_facts.tag(n).fqn: op_facts.tag(n).layer for n in op_facts.ops(joint.module.graph)}
    assert labels["model.layers.0.0.linear"] == 0 and labels["model.layers.1.linear"] == 1
    assert labels["model.head"] is None and labels["model.embed"] is None


def test_exchange_outside_the_layers_is_refused(group: dist.ProcessGroup) -> None:
    """An embedding that exchanges; the layers are dense."""
    net = Net(Dense())
    net.embed = nn.Sequential(net.embed, Fixed(group.group_name))
    with pytest.raises(UnsupportedError, match=r"'embed.1' exchanges tokens outside the layers.*OverlapConfig.layers"):
        chunk_of(net)


# --- partition --------------------------------------------------------------------------------------------------


def partitioned(joint: JointGraph) -> JointGraph:
    for each in JOINT_PASSES:
        joint = each(joint, CONFIG)
    return joint


def insert(joint: JointGraph, target: Any, *args: Any) -> fx.Node:
    """Add an op that nothing reads."""
    with joint.module.graph.inserting_before(joint.module.graph.output_node()):
        node = joint.module.graph.call_function(target, args)
    node.meta = {"val": torch.zeros(4, dtype=torch.int64), META: OpTag(Phase.F, "")}
    return node


def test_b101_dead_uninitialised_nodes_are_in_no_schedule_node() -> None:
    """Run, the index that nothing initialised would raise."""
    joint = traced(Net(Dense()))
    empty = insert(joint, aten.empty.memory_format, [4])
    table = joint.module.graph.find_nodes(op="placeholder")[0]
    insert(joint, aten.index_select.default, table, 0, empty)
    chunk = to_chunk(joint, CONFIG, [])
    held = {op for node in chunk.nodes for op in node.ops}
    assert not node_of(chunk, aten.empty.memory_format, aten.index_select.default)
    assert held == {node.name for node in op_facts.ops(joint.module.graph)}


class Unread(RawMoE):
    """A MoE layer whose results are ignored, as on a rank that has no use for them."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x * 2


def collectives(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if op_facts.is_collective(node)]


def test_b60_b62_ignored_exchanges_survive_each_pass_and_dead_code_elimination(group: dist.ProcessGroup) -> None:
    joint = traced(Net(Unread(16, 4, group)))
    expected = collectives(joint.module.graph)
    assert len(expected) == 8, "counts, tokens, weights, results: a launch and a wait each"
    for each in JOINT_PASSES:
        joint = each(joint, CONFIG)
        joint.module.graph.eliminate_dead_code()
        assert collectives(joint.module.graph) == expected, each.__name__
    chunk = to_chunk(traced(Net(Unread(16, 4, group))), CONFIG, [])
    for node in chunk.nodes:
        chunk.modules[node.name].graph.eliminate_dead_code()
    run = [target for node in chunk.nodes for target in collectives(chunk.modules[node.name].graph)]
    assert sorted(run) == sorted(expected)


def test_unread_draws_and_assertions_survive() -> None:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            size = (x.detach().abs() > 0).sum().item()
            torch._check(size <= 1000)
            return x

    joint = traced(Net(Dense(), Draws()))
    names = [str(node.target) for node in op_facts.ops(joint.module.graph)]
    chunk = to_chunk(joint, CONFIG, [])
    for target in ("aten.rand.default", "aten._assert_scalar.default"):
        assert names.count(target) == 1
        assert [ops(chunk)[op].target for n in chunk.nodes for op in n.ops].count(ops(chunk) and _op(target)) == 1
        assert node_of(chunk, _op(target), phase=Phase.F), "in F"


def _op(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def test_partition_puts_all_of_f_first_and_erases_detach(group: dist.ProcessGroup) -> None:
    joint = traced(toy("[*E]", group))
    joint = partitioned(joint)
    nodes = list(op_facts.ops(joint.module.graph))
    phases = [op_facts.tag(node).phase for node in nodes]
    assert phases == sorted(phases, key=lambda phase: phase is Phase.B)
    assert not any(node.target is aten.detach.default for node in nodes)


class SizeOnly(RawMoE):
    """What the experts get is summed: the gradient of a sum needs the number of its terms only."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        counts = (flat[:, :4].detach().argmax(-1)[:, None] == torch.arange(4)).sum(0)
        sent = funcol.all_to_all_single(counts, None, None, self.group).view(1, -1).sum(1).tolist()
        for size in sent:
            torch._check(size >= 0)
        tokens = funcol.all_to_all_single_autograd(flat, sent, [len(flat)], self.group)
        tokens = tokens * 0 + (tokens @ self.w).sum(0)
        return x + funcol.all_to_all_single_autograd(tokens, [len(flat)], sent, self.group).view_as(x)


def test_sizes_cross_where_only_they_are_needed(group: dist.ProcessGroup) -> None:
    """A tensor that the backward would ask for its size alone stays behind; the number crosses."""
    for chunk in (chunk_of(Net(SizeOnly(16, 4, group))), raw_chunk(group)):
        found = ops(chunk)
        numbers = set()
        for node in chunk.nodes:
            if node.phase is Phase.F:
                continue
            for value in node.reads:
                numbers |= {value} if isinstance(found[value].meta["val"], torch.SymInt) else set()
            asked = [op for op in node.ops if op_facts.is_size(found[op])]
            assert [op for op in asked if any(s.name in node.reads for s in found[op].all_input_nodes)] == []
        assert numbers, "the graph has sizes that only the data decides"


def test_draw_in_backward_is_refused() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad + torch.rand_like(grad)

    with pytest.raises(UnsupportedError, match=r"draws random numbers.*Draw in forward"):
        chunk_of(Net(Dense(Noisy.apply)))


# --- placement --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_dim", [0, 12])
def test_counts_are_launched_alone_and_before_the_permutation(group: dist.ProcessGroup, shared_dim: int) -> None:
    chunk = toy_chunk(group, shared_dim=shared_dim)
    found = by_name(chunk)
    assert [ops(chunk)[op].target for op in found["L0.counts.F"].ops] == [op_facts.LAUNCHES[0]]
    order = [node.name for node in chunk.nodes]
    assert order.index("L0.counts.F") < order.index("L0.permute.F")
    # What the launch does not need is computed while the counts travel: sorting, gathering, the auxiliary loss.
    assert set(node_of(chunk, aten.sort.stable, phase=Phase.F)) == {"L0.permute.F"}
    assert "L0.permute.F" in node_of(chunk, aten.index_select.default, phase=Phase.F)
    assert found["L0.counts.F"].writes[0] in found["L0.permute.F"].reads


def test_every_launch_is_alone_on_the_comm_lane(group: dist.ProcessGroup) -> None:
    for chunk in (toy_chunk(group), raw_chunk(group)):
        found = ops(chunk)
        for node in chunk.nodes:
            launches = [op for op in node.ops if op_facts.is_launch(found[op])]
            assert launches == (list(node.ops) if node.lane.value == "comm" else []), node.name


class Precomputes(Net):
    """Computes at the start, from parameters and tokens alone, what only the last layer and the loss read."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scale, mask = self.scale.exp(), tokens.ne(0)
        x = self.embed(tokens)
        for block in self.layers[:-1]:
            x = block(x)
        x = self.layers[-1](x * scale)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="none")
        return (loss * mask.flatten()).mean()


def test_what_needs_parameters_or_batch_only_goes_to_its_first_reader() -> None:
    """Rule 9: else the work of later layers piles up in the first node."""
    chunk = chunk_of(Precomputes(Dense(), Dense(), Dense()))
    # `x * scale` stands between layers 1 and 2.
    assert node_of(chunk, aten.exp.default, phase=Phase.F) == ["L1.pre_dispatch.F"]
    assert node_of(chunk, aten.ne.Scalar) == ["post_process.F"]


def test_backward_that_needs_no_tangent_goes_to_its_first_reader() -> None:
    """Rule 7: the sine for the gradient of a layer's cosine depends on saved values only."""
    chunk = chunk_of(Net(Dense(torch.cos), Dense(torch.cos), Dense(torch.cos)))
    assert node_of(chunk, aten.sin.default) == ["L2.pre_dispatch.B", "L1.pre_dispatch.B", "L0.pre_dispatch.B"]


def test_casts_of_parameters_stay_with_their_layer(group: dist.ProcessGroup) -> None:
    """Under autocast every layer begins with casts that nothing holds back, forward and backward."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chunk = chunk_of(Net(Dense(), Dense()))
    found = ops(chunk)
    params = {each.value: each.name for each in chunk.joint.inputs if each.kind.value == "param"}
    seen = 0
    for node in chunk.nodes:
        for value in {source.name for op in node.ops for source in found[op].all_input_nodes} & set(params):
            layer = params[value].split(".")[1] if params[value].startswith("layers") else None
            assert node.layer == (None if layer is None else int(layer)), (node.name, params[value])
            seen += 1
    assert seen >= 2 * len(params) - 3


def test_backward_of_the_auxiliary_loss_stays_in_its_layer(group: dist.ProcessGroup) -> None:
    """Rule 15: it depends on the tangent only, so it could all run first."""
    chunk = toy_chunk(group, "[*E][*E]")
    found = ops(chunk)
    for node in chunk.nodes:
        for op in node.ops:
            label = op_facts.tag(found[op]).layer
            assert node.phase is Phase.F or label is None or node.layer == label // 2, (node.name, op)
    softmax = node_of(chunk, aten._softmax_backward_data.default)
    assert {name.split(".")[0] for name in softmax} == {"L0", "L1"}


def test_no_node_is_handed_a_view_or_two_aliases(group: dist.ProcessGroup) -> None:
    """Rule 14: the base crosses, and its reader makes the view again.

    Pieces of a split share a storage but no element. A comm node holds launches only, so its input may be a view.
    """
    for chunk in (toy_chunk(group, shared_dim=12), raw_chunk(group), toy_chunk(group, "[*E][*E]")):
        found = ops(chunk)
        for node in chunk.nodes:
            read = [found[value] for value in node.reads if node.lane.value == "compute"]
            assert [value.name for value in read if op_facts.is_free_view(value)] == [], node.name
            whole = [value for value in read if value.target is not fx.node._side_effectful_functions]
            roots = [op_facts.storage_root(value) for value in whole if "getitem" not in value.name]
            assert len(roots) == len(set(roots)), node.name


# --- the shared expert ------------------------------------------------------------------------------------------


def test_shared_expert_is_movable_and_delays_no_launch(group: dist.ProcessGroup) -> None:
    """Rule 13."""
    chunk = toy_chunk(group, shared_dim=12)
    found = by_name(chunk)
    made_by = {value: node.name for node in chunk.nodes for value in node.writes}
    needs = {name: {made_by[v] for v in node.reads if v in made_by} for name, node in found.items()}

    def all_needs(name: str) -> set[str]:
        return needs[name] | {each for need in needs[name] for each in all_needs(need)}

    assert {n.phase.value for n in chunk.nodes if n.slot is Slot.SHARED} == {"F", "B", "W"}
    assert needs["L0.shared.F"] == {"L0.pre_dispatch.F"}
    for launch in ("L0.counts.F", "L0.dispatch.F", "L0.combine.F"):
        assert "L0.shared.F" not in all_needs(launch)
    for launch in ("L0.combine.B", "L0.dispatch.B"):
        assert "L0.shared.B" not in all_needs(launch)


def test_all_products_of_the_shared_expert_are_in_its_node(group: dist.ProcessGroup) -> None:
    chunk = toy_chunk(group, shared_dim=12)
    found = ops(chunk)
    for node in chunk.nodes:
        for op in node.ops:
            if op_facts.is_heavy(found[op]) and "shared" in (op_facts.tag(found[op]).fqn or ""):
                assert node.slot is Slot.SHARED, (node.name, op)


@pytest.mark.parametrize(
    "sizes", [{}, {"num_experts": 16, "expert_dim": 2, "top_k": 1}, {"num_experts": 32, "router": "sigmoid"}]
)
def test_router_is_no_shared_expert(group: dist.ProcessGroup, sizes: dict[str, Any]) -> None:
    """Its product is needed by the launches, and its backward is too little work to move."""
    chunk = toy_chunk(group, z_loss=0.1, **sizes)
    assert [node.name for node in chunk.nodes if node.slot is Slot.SHARED] == []


# --- the order of draws -----------------------------------------------------------------------------------------


def test_draws_keep_their_order(group: dist.ProcessGroup) -> None:
    """The last draw depends on nothing: only the rule keeps it behind the others."""
    net = Net(Dense(), Dense(), edit=lambda x: x * torch.rand(16))
    for i, layer in enumerate(net.layers):
        layer.act = functools.partial(F.dropout, p=0.1 * (i + 1))
    joint = traced(net)
    draws = [node.name for node in op_facts.ops(joint.module.graph) if op_facts.is_random(node)]
    chunk = to_chunk(joint, CONFIG, [])
    assert len(draws) == 3
    assert [op for node in chunk.nodes for op in node.ops if op in draws] == draws
    holding = [node.name for node in chunk.nodes if set(draws) & set(node.ops)]
    assert chunk.effects == tuple(zip(holding, holding[1:], strict=False))
    assert len(holding) == 3
    assert train_both(net, lambda step: batches(2, seed=step), steps=2) == []


# --- what crosses a cut, by bits --------------------------------------------------------------------------------


def test_b03_chunk_without_layers() -> None:
    """Norm, head and loss; the microbatch is what another stage made."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32)

        def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.norm(hidden)), targets)

    torch.manual_seed(0)
    made = [[(torch.randn(8, 16), torch.randint(32, (8,))) for _ in range(3)] for _ in range(2)]
    model = Last()
    chunk = chunk_of(model, microbatch=made[0][0])
    assert names(chunk, Phase.F) == ["post_process"]
    assert node_of(chunk, aten.native_layer_norm.default) == ["post_process.F"]
    assert train_both(model, lambda step: made[step], steps=2) == []


class Five(nn.Module):
    """An embedding that returns five values, two of which later layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Embedding(32, 16)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, int, None, Tensor]:
        x = self.weight(tokens)
        return x, tokens.ne(1), 2, None, x.mean(-1, keepdim=True)


class ResidualMoE(RawMoE):
    """A norm that returns (out, residual) stands right before the dispatch."""

    def fused_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + y
        return F.layer_norm(residual, (16,)), residual

    def forward(self, x: Tensor) -> Tensor:
        out, residual = self.fused_norm(x, torch.tanh(x))
        return residual + super().forward(out)


class Arity(Net):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.embed = Five()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, mask, factor, nothing, mean = self.embed(tokens)
        assert nothing is None
        for block in self.layers:
            x = block(x) + mean
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="none")
        return (loss * mask.flatten()).sum() / factor


def test_b10_b11_no_arity_is_assumed(group: dist.ProcessGroup) -> None:
    net = Arity(ResidualMoE(16, 4, group), Dense())
    assert train_both(net, lambda step: batches(3, seed=step), steps=2) == []


class Casts(RawMoE):
    """Waits for the combine and hands its result on as a view, in another dtype: the layer's last ops."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.float().flatten(0, 1)
        sent = funcol.all_to_all_single_autograd(flat, None, None, self.group)
        back = funcol.all_to_all_single_autograd(sent @ self.w, None, None, self.group)
        return back.view(x.shape).to(torch.bfloat16)


def test_b71_view_and_cast_of_a_waited_result_end_a_layer(group: dist.ProcessGroup) -> None:
    net = Net(Casts(16, 4, group), Casts(16, 4, group), edit=Tensor.float)
    assert train_both(net, lambda step: batches(3, seed=step), steps=2) == []


def test_b100_slice_bounds_that_are_graph_values(group: dist.ProcessGroup) -> None:
    class Cuts(nn.Module):
        """Keeps as many rows as the data says; they cross to the next layer."""

        def forward(self, x: Tensor) -> Tensor:
            size = x[0, :, 0].detach().gt(-10).sum().item() - 1
            torch._check(size > 0)
            torch._check(size < x.shape[1])
            return x[:, :size].clone() if False else x[:, :size]

    class Pads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum(1, keepdim=True).expand(-1, 8, -1)

    net = Net(Dense(), Cuts(), Pads())
    assert train_both(net, lambda step: batches(3, seed=step), steps=2) == []


def test_b72_cycle_of_nodes_is_refused_and_named(group: dist.ProcessGroup) -> None:
    """a -> b -> c with a and c in one node. The graph is left as it was."""
    joint = partitioned(traced(Net(Dense())))
    a, b, c = list(op_facts.ops(joint.module.graph))[:3]
    rest = (None, Slot.POST_PROCESS, Phase.F)
    keys = dict.fromkeys(op_facts.ops(joint.module.graph), rest)
    outer, inner = (0, Slot.PRE_DISPATCH, Phase.F), (0, Slot.EXPERTS, Phase.F)
    chain = [node for node in (a, b, c)]
    assert all(later in earlier.users for earlier, later in zip(chain, chain[1:], strict=False)), chain
    keys |= {a: outer, b: inner, c: outer}
    before = str(joint.module.graph)
    with pytest.raises(UnsupportedError, match=r"L0.pre_dispatch.F, L0.experts.F.* in a circle"):
        make_nodes(joint, keys, [outer, inner, rest])
    assert str(joint.module.graph) == before
