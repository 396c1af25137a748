"""What `exchanges`, `layers`, `partition` and `cut` make of a graph: which op ends up in which schedule node, and why.

Proves: the chain of stages for all kinds of pattern; that launches stand alone and nothing delays them; that what has
room goes where it is read; and that nothing dead, doubled or aliased crosses a cut.
"""

from __future__ import annotations

import functools
import itertools
import operator
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
from fxoverlap import compat
from fxoverlap.capture import capture
from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import META, ChunkGraph, Exchange, JointGraph, OpTag, Phase, PhysicalLayer, Role, Slot
from fxoverlap.microbatch import as_microbatch
from fxoverlap.passes import op_facts
from fxoverlap.passes.chain import Chain, backward_chain, forward_chain
from fxoverlap.passes.cut import make_nodes
from fxoverlap.passes.exchanges import exchanges
from fxoverlap.passes.layers import layers
from fxoverlap.passes.logical import logical_layers
from fxoverlap.passes.partition import partition
from fxoverlap.pattern import parse
from fxoverlap.pipeline import JOINT_PASSES, to_chunk

aten = torch.ops.aten
CONFIG = fxo.OverlapConfig()


def traced(model: nn.Module, config: fxo.OverlapConfig = CONFIG, microbatch: Any = None) -> JointGraph:
    return capture(model, as_microbatch(microbatch or batches(1)[0]), config).joint


def chunk_of(model: nn.Module, config: fxo.OverlapConfig = CONFIG, microbatch: Any = None) -> ChunkGraph:
    return to_chunk(traced(model, config, microbatch), config, [])


def after(last: Any, joint: JointGraph, config: fxo.OverlapConfig = CONFIG) -> JointGraph:
    """The graph after the joint passes up to `last`."""
    for each in JOINT_PASSES[: JOINT_PASSES.index(last) + 1]:
        joint = each(joint, config)
    return joint


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
        self.embed: nn.Module = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(16, 32)
        self.edit = edit or (lambda x: x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return F.cross_entropy(self.head(self.edit(x)).flatten(0, 1), targets.flatten())


class Dense(nn.Module):
    """`x + act(linear(norm(x)))`."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(16), nn.Linear(16, 16), act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(self.norm(x)))


class Fixed(nn.Module):
    """A MoE layer of fixed capacity: the same sizes both ways."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(16, 16), group.group_name

    def forward(self, x: Tensor) -> Tensor:
        sent = funcol.all_to_all_single_autograd(x.flatten(0, 1), None, None, self.name)
        back = funcol.all_to_all_single_autograd(self.linear(sent), None, None, self.name)
        return back.view(x.shape)


def ops(chunk: ChunkGraph) -> dict[str, fx.Node]:
    assert chunk.joint is not None
    return {node.name: node for node in chunk.joint.module.graph.nodes}


def where(chunk: ChunkGraph, target: Any) -> list[str]:
    """The schedule node of each op with this target."""
    found = ops(chunk)
    return [node.name for node in chunk.nodes for op in node.ops if found[op].target is target]


def names(chunk: ChunkGraph, phase: Phase) -> list[str]:
    return [node.name[:-2] for node in chunk.nodes if node.phase is phase]


# --- the chain of stages ----------------------------------------------------------------------------------------

MOE = ("pre_dispatch", "permute", "experts", "post_combine")


def synthetic(pattern: str | None, symbols: str = "", labelled: bool = True) -> JointGraph:
    """A joint graph without ops: layers and exchanges, with a pattern or without."""
    parsed = parse(pattern) if pattern else None
    symbols = parsed.symbols if parsed else symbols
    groups = logical_layers([symbol == "E" for symbol in symbols], parsed.groups if parsed else ())
    shown = enumerate(zip(symbols, groups, strict=True))
    physical = [PhysicalLayer(f"layers.{i}", symbol if parsed else None, group) for i, (symbol, group) in shown]
    roles = [(i if labelled else None, role) for i, symbol in enumerate(symbols) if symbol == "E" for role in Role]
    found = [Exchange(role, Phase.F, i, layer, (), (), "g") for i, (layer, role) in enumerate(roles)]
    module = fx.GraphModule(nn.Module(), fx.Graph())
    return JointGraph(module, (), "", (), (), (), tuple(physical) if labelled else (), tuple(found))


def stages(chain: Chain) -> list[str]:
    return [s.slot.value if s.layer is None else f"L{s.layer}.{s.slot.value}" for s in chain.stages]


MOE_0, MOE_1, MOE_2 = ([f"L{layer}.{slot}" for slot in MOE] for layer in range(3))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("[*E]", MOE_0),
        ("*E", MOE_0),
        ("*-*E", MOE_0),
        ("EE", MOE_0 + MOE_1),
        ("*EE*", [*MOE_0, *MOE_1, "L2.pre_dispatch"]),
        ("-[*E]", ["L0.experts", *MOE_1]),
        ("*-[*E]", ["L0.pre_dispatch", "L1.experts", *MOE_2]),
        ("[*-][*E]", ["L0.pre_dispatch", "L0.experts", *MOE_1]),
        ("[*E]*E-", [*MOE_0, *MOE_1, "L2.experts"]),
        ("*-", ["L0.pre_dispatch", "L1.experts"]),
        ("[M*-]", ["L0.pre_dispatch", "L0.experts"]),
        ("**", ["L0.pre_dispatch", "L1.pre_dispatch"]),
    ],
)
def test_chain_of_a_pattern(pattern: str, expected: list[str]) -> None:
    assert stages(forward_chain(synthetic(pattern))) == ["pre_process", *expected, "post_process"]


def test_chain_without_a_pattern() -> None:
    """A layer that exchanges ends a logical layer; behind the last such layer each layer is one.

    Without labels the exchanges alone make the layers, and no edge tells post_combine from what follows.
    """
    chain = forward_chain(synthetic(None, "*-EE**"))
    assert stages(chain) == ["pre_process", *MOE_0, *MOE_1, "L2.pre_dispatch", "L3.pre_dispatch", "post_process"]
    assert stages(forward_chain(synthetic(None, "EE", labelled=False))) == [*MOE_0[:3], *MOE_1[:3], "post_process"]
    assert stages(forward_chain(synthetic(None, ""))) == ["post_process"]


@pytest.mark.parametrize("pattern", ["[*E]", "*-[*E]-", "[*-][*E]"])
def test_backward_chain_is_the_forward_chain_reversed(pattern: str) -> None:
    forward = forward_chain(synthetic(pattern))
    backward = backward_chain(forward)
    assert stages(backward) == [stage for stage in reversed(stages(forward)) if "permute" not in stage]
    assert len(backward.gates) == 2 * pattern.count("E")
    for exchange, gate in backward.gates.items():
        # The backward launch ends the stage that the forward wait began.
        assert backward.stages[gate] == forward.stages[forward.gates[exchange] + 1]


SLOTS = ["pre_dispatch", "counts", "permute", "dispatch", "experts", "combine", "post_combine"]


def test_chunk_of_two_moe_layers_in_a_row_and_a_dense_one(group: dist.ProcessGroup) -> None:
    chunk = toy_chunk(group, "EE-")
    expected = [*(f"L{i}.{slot}" for i in (0, 1) for slot in SLOTS), "L2.experts"]
    assert names(chunk, Phase.F) == ["pre_process", *expected, "post_process"]
    assert names(chunk, Phase.B)[:3] == ["post_process", "L2.experts", "L1.post_combine"]


def test_chunk_without_layer_labels(group: dist.ProcessGroup) -> None:
    """`layers.*` matches nothing here."""
    expected = [*(f"L{i}.{slot}" for i in (0, 1) for slot in SLOTS[:-1]), "post_process"]
    assert names(raw_chunk(group, "blocks"), Phase.F) == expected


# --- exchanges and layers ---------------------------------------------------------------------------------------


def test_exchanges_are_paired(group: dist.ProcessGroup) -> None:
    joint = raw_chunk(group).joint
    assert joint is not None
    found = [(e.phase.value, e.role.value, e.index, e.layer, len(e.launches)) for e in joint.exchanges]
    forward = [("counts", 1), ("dispatch", 2), ("combine", 1)] * 2
    assert found[:6] == [("F", role, i, i // 3, launches) for i, (role, launches) in enumerate(forward)]
    # Tokens and their weights travel together, back too. Counts have no gradient.
    assert found[6:] == [("B", forward[i][0], i, i // 3, forward[i][1]) for i in (5, 4, 2, 1)]
    assert {e.group for e in joint.exchanges} == {group.group_name}


def test_equal_sizes_are_paired_by_order(group: dist.ProcessGroup) -> None:
    joint = after(exchanges, traced(Net(Fixed(group), Fixed(group))))
    assert [e.role.value for e in joint.exchanges] == ["dispatch", "combine"] * 2 + ["combine", "dispatch"] * 2
    assert [e.index for e in joint.exchanges] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_exchanges_of_another_group_are_none(group: dist.ProcessGroup) -> None:
    """Sequence-parallel attention sends equal static parts, experts what the router chose; or the user says which."""
    other = dist.new_group([0])
    net = Net(Fixed(other), RawMoE(16, 4, group))
    assert {e.group for e in after(exchanges, traced(net)).exchanges} == {group.group_name}
    asked = fxo.OverlapConfig(process_group=other)
    assert [e.group for e in after(exchanges, traced(net, asked), asked).exchanges] == [other.group_name] * 4
    both = Net(RawMoE(16, 4, other), RawMoE(16, 4, group))
    with pytest.raises(UnsupportedError, match=r"several process groups.*OverlapConfig\.process_group"):
        after(exchanges, traced(both))


def test_launch_must_be_waited_for_once(group: dist.ProcessGroup) -> None:
    joint = traced(Net(Fixed(group)))
    wait = joint.module.graph.find_nodes(op="call_function", target=op_facts.WAIT)[0]
    reader = next(iter(wait.users))
    with joint.module.graph.inserting_before(reader):
        reader.replace_input_with(wait, joint.module.graph.call_function(op_facts.WAIT, wait.args))
    with pytest.raises(UnsupportedError, match=r"dispatch launch all_to_all_single must be read by exactly one wait"):
        after(exchanges, joint)


def test_of_nested_layers_the_outermost_counts() -> None:
    joint = after(layers, traced(Net(Dense(), Dense())), fxo.OverlapConfig(layers=("layers.*", "linear")))
    assert [layer.fqn for layer in joint.physical] == ["layers.0", "layers.1"]
    labels = {op_facts.tag(n).fqn: op_facts.tag(n).layer for n in op_facts.ops(joint.module.graph)}
    assert [labels[fqn] for fqn in ("embed", "layers.0.linear", "layers.1", "head")] == [None, 0, 1, None]


# --- partition --------------------------------------------------------------------------------------------------


def insert(joint: JointGraph, target: Any, *args: Any) -> fx.Node:
    """Add an op that nothing reads."""
    with joint.module.graph.inserting_before(joint.module.graph.output_node()):
        node = joint.module.graph.call_function(target, args)
    node.meta = {"val": torch.zeros(4, dtype=torch.int64), META: OpTag(Phase.F, "")}
    return node


def test_b101_dead_uninitialised_nodes_are_in_no_schedule_node() -> None:
    """Run, the index that nothing initialised would raise."""
    joint = traced(Net(Dense()))
    table = joint.module.graph.find_nodes(op="placeholder")[0]
    insert(joint, aten.index_select.default, table, 0, insert(joint, aten.empty.memory_format, [4]))
    chunk = to_chunk(joint, CONFIG, [])
    assert where(chunk, aten.empty.memory_format) == where(chunk, aten.index_select.default) == []
    assert {op for node in chunk.nodes for op in node.ops} == {n.name for n in op_facts.ops(joint.module.graph)}


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
    chunk = chunk_of(Net(Unread(16, 4, group)))
    for module in chunk.modules.values():
        module.graph.eliminate_dead_code()
    run = [target for node in chunk.nodes for target in collectives(chunk.modules[node.name].graph)]
    assert sorted(run) == sorted(expected)


class Effects(nn.Module):
    """An assertion and a draw that nothing reads."""

    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async(x.detach().abs().sum() > 0, "no input")
        torch.rand(3)
        return F.dropout(x, 0.5)


def test_unread_assertions_and_draws_stay_in_forward() -> None:
    joint = traced(Net(Dense(), Effects()))
    insert(joint, aten._assert_scalar.default, True, "")
    insert(joint, aten.rand.default, [3])
    chunk = to_chunk(joint, CONFIG, [])
    assert where(chunk, aten._assert_async.msg) == ["L1.pre_dispatch.F"]
    for target in (aten._assert_scalar.default, aten.rand.default):
        assert {name[-1] for name in where(chunk, target)} == {"F"}


def test_unread_draws_are_made() -> None:
    assert train_both(Net(Dense(), Effects()), lambda step: batches(2, seed=step), steps=1) == []


def test_sizes_cross_where_only_they_are_needed(group: dist.ProcessGroup) -> None:
    """The backward asks no tensor of the forward for its size; the number crosses."""
    chunk = raw_chunk(group)
    found, numbers = ops(chunk), set()
    for node in (n for n in chunk.nodes if n.phase is not Phase.F):
        numbers |= {value for value in node.reads if isinstance(found[value].meta["val"], torch.SymInt)}
        asked = [found[op] for op in node.ops if found[op].target is aten.sym_size.int]
        assert [size for size in asked if size.args[0].name in node.reads] == [], node.name
    assert numbers, "the graph has sizes that only the data decides"
    computed = [str(node.meta["val"]) for node in found.values() if compat.free_symbols(node.meta.get("val"))]
    assert len(computed) == len(set(computed)), "each size is computed once"


# --- placement --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_dim", [0, 12])
def test_counts_are_launched_alone_and_before_the_permutation(group: dist.ProcessGroup, shared_dim: int) -> None:
    chunk = toy_chunk(group, shared_dim=shared_dim)
    found, nodes = ops(chunk), {node.name: node for node in chunk.nodes}
    assert list(nodes).index("L0.counts.F") < list(nodes).index("L0.permute.F")
    assert nodes["L0.counts.F"].writes[0] in nodes["L0.permute.F"].reads
    # What the counts do not need is computed while they travel, and what the tokens do not need while those do.
    assert where(chunk, aten.sort.stable) == ["L0.permute.F", "L0.experts.F"]
    assert where(chunk, aten.index_select.default)[0] == "L0.permute.F"
    for node in chunk.nodes:
        launches = [op for op in node.ops if op_facts.is_launch(found[op])]
        assert launches == (list(node.ops) if node.lane.value == "comm" else []), node.name


class Precomputes(Net):
    """Computes at the start, from parameters and batch alone, what only the second layer and the loss read."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        shift, mask = self.head.weight.detach().exp().sum(), tokens.ne(0)
        scale = self.head.bias[:16].sinh()
        x = self.layers[0](self.embed(tokens))
        x = self.layers[1](x * scale + shift)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="none")
        return (loss + mask.flatten()).mean()


@pytest.mark.parametrize("saved", [False, True])
def test_what_needs_parameters_or_batch_only_goes_to_its_first_reader(saved: bool) -> None:
    """Rule 9: else the work of later layers piles up in the first node. What stands between layers is the earlier's."""
    chunk = chunk_of(Precomputes(Dense(), Dense()))
    early = [aten.sinh.default] if saved else [aten.exp.default, aten.sum.default]
    assert {where(chunk, target)[0] for target in early} == {"L0.pre_dispatch.F"}
    assert where(chunk, aten.ne.Scalar) == ["post_process.F"]


def test_backward_that_needs_no_tangent_goes_to_its_first_reader() -> None:
    """Rule 7: the sine for the gradient of a layer's cosine depends on saved values only."""
    chunk = chunk_of(Net(Dense(torch.cos), Dense(torch.cos), Dense(torch.cos)))
    assert where(chunk, aten.sin.default) == ["L2.pre_dispatch.B", "L1.pre_dispatch.B", "L0.pre_dispatch.B"]


def test_casts_of_parameters_stay_with_their_layer() -> None:
    """Under autocast every layer begins with casts that nothing holds back, forward and backward."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chunk = chunk_of(Net(Dense(), Dense()))
    found, seen = ops(chunk), set()
    layer_of = {each.value: int(each.name.split(".")[1]) for each in chunk.joint.inputs if "layers" in each.name}
    for node in chunk.nodes:
        for value in {source.name for op in node.ops for source in found[op].all_input_nodes} & set(layer_of):
            assert node.layer == layer_of[value], (node.name, value)
            seen.add(value)
    assert seen == set(layer_of) and len(seen) == 8


def test_backward_of_the_auxiliary_loss_stays_in_its_layer(group: dist.ProcessGroup) -> None:
    """Rule 15: it depends on the tangent only, so all of it could run first."""
    chunk = toy_chunk(group, "EE-")
    for node in chunk.nodes:
        labels = {op_facts.tag(ops(chunk)[op]).layer for op in node.ops} - {None}
        assert node.phase is Phase.F or labels <= {node.layer}, node.name
    assert {name[:2] for name in where(chunk, aten._softmax_backward_data.default)} == {"L0", "L1"}


def test_no_node_is_handed_a_view_or_two_aliases(group: dist.ProcessGroup) -> None:
    """Rule 14: the base crosses, and its reader makes the view again.

    Pieces of a split share a storage but no element. A comm node holds launches only, so its input may be a view.
    """
    unsplit = chunk_of(toy("[*E]", group, shared_dim=12), fxo.OverlapConfig("[*E]", delay_wgrad=False))
    for chunk in (toy_chunk(group, shared_dim=12), unsplit, toy_chunk(group, "EE-"), raw_chunk(group)):
        found = ops(chunk)
        for node in (n for n in chunk.nodes if n.lane.value == "compute"):
            read = [found[value] for value in node.reads]
            assert [value.name for value in read if op_facts.is_free_view(value)] == [], node.name
            roots = [op_facts.storage_root(value) for value in read if value.target is not operator.getitem]
            assert len(roots) == len(set(roots)), node.name


def test_draws_keep_their_order() -> None:
    """The last draw depends on nothing: only the rule keeps it behind the others."""
    net = Net(*(Dense(functools.partial(F.dropout, p=p)) for p in (0.1, 0.2)), edit=lambda x: x * torch.rand(16))
    joint = traced(net)
    draws = [node.name for node in op_facts.ops(joint.module.graph) if op_facts.is_random(node)]
    chunk = to_chunk(joint, CONFIG, [])
    assert len(draws) == 3
    assert [op for node in chunk.nodes for op in node.ops if op in draws] == draws
    holding = [node.name for node in chunk.nodes if set(draws) & set(node.ops)]
    assert chunk.effects == tuple(itertools.pairwise(holding)) != ()
    assert train_both(net, lambda step: batches(2, seed=step), steps=2) == []


def test_shared_expert_is_movable_and_delays_no_launch(group: dist.ProcessGroup) -> None:
    """Rule 13."""
    chunk = toy_chunk(group, shared_dim=12)
    made_by = {value: node.name for node in chunk.nodes for value in node.writes}
    needs = {node.name: {made_by[v] for v in node.reads if v in made_by} for node in chunk.nodes}

    def all_needs(name: str) -> set[str]:
        return needs[name] | {each for need in needs[name] for each in all_needs(need)}

    assert {n.phase.value for n in chunk.nodes if n.slot is Slot.SHARED} == {"F", "B", "W"}
    assert needs["L0.shared.F"] == {"L0.pre_dispatch.F"}
    for launch in ("L0.counts.F", "L0.dispatch.F", "L0.combine.F", "L0.combine.B", "L0.dispatch.B"):
        assert f"L0.shared.{launch[-1]}" not in all_needs(launch)


@pytest.mark.parametrize("phase", [Phase.F, Phase.B, Phase.W])
def test_all_products_of_the_shared_expert_are_in_its_node(group: dist.ProcessGroup, phase: Phase) -> None:
    chunk = toy_chunk(group, shared_dim=12)
    found = ops(chunk)
    held = [(node, found[op]) for node in chunk.nodes for op in node.ops if node.phase is phase]
    products = [node for node, op in held if op_facts.is_heavy(op) and "shared" in (op_facts.tag(op).fqn or "")]
    assert [node.name for node in products] == [f"L0.shared.{phase.value}"] * 2


@pytest.mark.parametrize("sizes", [{"router": "sigmoid", "z_loss": 0.1}, {"num_experts": 16, "expert_dim": 64}])
def test_router_is_no_shared_expert(group: dist.ProcessGroup, sizes: dict[str, Any]) -> None:
    """Its product is needed by the launches, and its backward is too little work to move."""
    assert [node.name for node in toy_chunk(group, **sizes).nodes if node.slot is Slot.SHARED] == []


class Last(nn.Sequential):
    """Norm, head and loss of a chunk whose microbatch another stage made."""

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(hidden), targets)


def test_b03_chunk_without_layers() -> None:
    torch.manual_seed(0)
    model, made = (
        Last(nn.LayerNorm(16), nn.Linear(16, 32)),
        [(torch.randn(8, 16), torch.randint(32, (8,))) for _ in range(3)],
    )
    assert where(chunk_of(model, microbatch=made[0]), aten.native_layer_norm.default) == ["post_process.F"]
    assert train_both(model, lambda step: made, steps=2) == []


def test_b72_cycle_of_nodes_is_refused_and_named() -> None:
    """a -> b -> c with a and c in one node. The graph is left as it was."""
    joint = after(partition, traced(Net(Dense())))
    nodes = list(op_facts.ops(joint.module.graph))
    a, b, c = next((a, b, c) for a in nodes for b in a.users for c in b.users if c in nodes)
    one, other, rest = ((0, slot, Phase.F) for slot in (Slot.PRE_DISPATCH, Slot.EXPERTS, Slot.POST_COMBINE))
    keys = dict.fromkeys(nodes, rest) | {a: one, b: other, c: one}
    before = str(joint.module.graph)
    with pytest.raises(UnsupportedError, match=r"L0.pre_dispatch.F, L0.experts.F.* in a circle"):
        make_nodes(joint, keys, [one, other, rest], ())
    assert str(joint.module.graph) == before
