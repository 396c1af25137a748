"""The split of backward nodes into B, what others wait for, and W, what nothing upstream needs.

Proves: every parameter's gradient is made in a W node, whatever its layer; W never holds B up; tied weights add up in
eager's order; what no policy places is flushed; and each gradient goes to the parameter that it belongs to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared_captures import shared_capture
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import RawModel, batches, differences, eager_step, toy, train_both

import fxoverlap as fxo
from fxoverlap.ir import ChunkGraph, InputKind, Phase, Plan, ScheduleNode
from fxoverlap.microbatch import as_microbatch
from fxoverlap.passes import op_facts
from fxoverlap.pipeline import to_chunk
from fxoverlap.schedule import build_plan

pytestmark = pytest.mark.usefixtures("shared_captures")

CONFIG = fxo.OverlapConfig()


def chunk_of(model: nn.Module, microbatch: Any = None, **config: Any) -> ChunkGraph:
    settings = fxo.OverlapConfig(**config)
    return to_chunk(shared_capture(model, as_microbatch(microbatch or batches(1)[0]), settings).joint, settings, [])


@functools.cache
def toy_chunk(group: dist.ProcessGroup, pattern: str = "[*E]", **changes: Any) -> ChunkGraph:
    return chunk_of(toy(pattern, group, **changes), pattern=pattern)


def gradient_nodes(chunk: ChunkGraph) -> dict[str, ScheduleNode]:
    """Parameter -> the node that makes its gradient."""
    assert chunk.joint is not None
    made_by = {value: node for node in chunk.nodes for value in node.writes}
    name = {each.value: each.name for each in chunk.joint.inputs if each.kind is InputKind.PARAM}
    return {name[target]: made_by[value] for value, target in chunk.joint.gradients if target in name}


def needs(chunk: ChunkGraph) -> dict[str, set[str]]:
    """Node -> the nodes whose values it reads."""
    made_by = {value: node.name for node in chunk.nodes for value in node.writes}
    return {node.name: {made_by[value] for value in node.reads if value in made_by} for node in chunk.nodes}


class Net(nn.Module):
    """Layers between an embedding and a head with biases; the layers may be any module from width 16 to 16."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = x + block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# --- what is W --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("[*E]", {"shared_dim": 12}),
        ("*-[*E]", {"router": "sigmoid", "z_loss": 0.1}),
        ("*E", {"tied": True, "dropout": 0.1, "selection_bias": True}),
    ],
    ids=["shared", "dense", "tied"],
)
def test_gradient_of_every_parameter_is_made_in_w(group: dist.ProcessGroup, pattern: str, changes: dict) -> None:
    chunk = toy_chunk(group, pattern, **changes)
    made = gradient_nodes(chunk)
    assert {name for name, node in made.items() if node.phase is not Phase.W} == set()
    assert set(made) == {name for name, _ in toy(pattern, group, **changes).named_parameters()}


def test_gradient_of_weight_bias_and_norm_is_made_in_w_of_its_layer(group: dist.ProcessGroup) -> None:
    chunk = chunk_of(RawModel(group, blocks=1))
    made = {name: node.name for name, node in gradient_nodes(chunk).items()}
    assert made == {
        "embed.weight": "pre_process.W",
        # One fused op gives all three gradients of a layer norm, so its weights' come with the input's.
        "layers.0.norm.weight": "L0.pre_dispatch.B",
        "layers.0.norm.bias": "L0.pre_dispatch.B",
        "layers.0.router.weight": "L0.pre_dispatch.W",
        "layers.0.w": "L0.experts.W",
        "head.weight": "post_process.W",
        "head.bias": "post_process.W",
    }


def test_every_operator_is_split(group: dist.ProcessGroup) -> None:
    """A convolution's backward gives the gradients of input and weights by one op, which is parted."""

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.conv = nn.Parameter(torch.ones(16)), nn.Conv1d(16, 16, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.conv((x * self.scale).transpose(1, 2)).transpose(1, 2))

    made = gradient_nodes(chunk_of(Net(Conv(), Conv())))
    phases = {name: node.phase.value for name, node in made.items() if name.startswith("layers.1")}
    assert phases == dict.fromkeys(("layers.1.scale", "layers.1.conv.weight", "layers.1.conv.bias"), "W")
    assert train_both(Net(Conv(), Conv()), lambda step: batches(2, seed=step), steps=2) == []


def test_w_feeds_no_b(group: dist.ProcessGroup) -> None:
    for chunk in (toy_chunk(group, shared_dim=12), toy_chunk(group, "*E", tied=True), chunk_of(RawModel(group))):
        read_by_b = {need for name, found in needs(chunk).items() if name.endswith(".B") for need in found}
        assert {name for name in read_by_b if name.endswith(".W")} == set()


def test_first_layer_has_a_b(group: dist.ProcessGroup) -> None:
    """The embedding in front of it makes it one; its W hold what the embedding does not need."""
    chunk = toy_chunk(group, "*-")
    names = [node.name for node in chunk.nodes]
    assert "L0.pre_dispatch.B" in names and "L0.pre_dispatch.W" in names
    assert needs(chunk)["pre_process.W"] == {"L0.pre_dispatch.B"}


def test_first_layer_has_a_b_whatever_its_backward_saves() -> None:
    """The embedding's result is not saved for the backward of a linear layer on a view of it."""
    assert "L0.pre_dispatch.B" in [node.name for node in chunk_of(Net(nn.Linear(16, 16))).nodes]


def test_first_layer_without_anything_in_front_has_no_b() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](torch.tanh(self.layers[0](x))).sum()

    def backward(x: Tensor) -> list[str]:
        return [
            node.name for node in chunk_of(First(), (x,)).nodes if node.name.startswith("L0") and node.name[-1] != "F"
        ]

    assert backward(torch.randn(2, 4)) == ["L0.pre_dispatch.W"]
    # The gradient of a microbatch's tensor is something that others wait for.
    assert backward(torch.randn(2, 4, requires_grad=True)) == ["L0.pre_dispatch.B", "L0.pre_dispatch.W"]


def test_delay_wgrad_false_gives_no_w(group: dist.ProcessGroup) -> None:
    model = toy("[*E]", group, shared_dim=12)
    chunk = chunk_of(model, pattern="[*E]", delay_wgrad=False)
    assert {node.phase for node in chunk.nodes} == {Phase.F, Phase.B}
    assert set(gradient_nodes(chunk)) == {name for name, _ in model.named_parameters()}
    assert train_both(model, lambda step: batches(3, seed=step), fxo.OverlapConfig(delay_wgrad=False), steps=2) == []


# --- where W may go ---------------------------------------------------------------------------------------------


def earliest(plan: Plan, name: str) -> int:
    """The first position in a plan at which all that a backward node reads is there."""
    chunk = plan.backward
    assert chunk is not None
    position = {(i.node.name, i.mb): k for k, i in enumerate(plan.order)}
    return 1 + max(position[need, "B"] for need in needs(chunk)[name] if not need.endswith(".F"))


def test_b43_wgrad_of_the_experts_waits_for_its_own_inputs_only(group: dist.ProcessGroup) -> None:
    """Not for the sum of the shared and the routed gradients, which the backward of the attention needs."""
    chunk = toy_chunk(group, shared_dim=12)
    assert {need for need in needs(chunk)["L0.experts.W"] if not need.endswith(".F")} == {"L0.experts.B"}
    plan = build_plan(chunk, chunk, fxo.OverlapConfig(schedule="megatron"))
    names = [instance.node.name for instance in plan.order]
    index = earliest(plan, "L0.experts.W")
    assert index == names.index("L0.experts.B") + 1

    def policy(f: ChunkGraph | None, b: ChunkGraph | None, costs: Any, config: Any) -> list[tuple[ScheduleNode, str]]:
        order = [(i.node, i.mb) for i in plan.order if i.node.name != "L0.experts.W"]
        return [*order[:index], (next(n for n in chunk.nodes if n.name == "L0.experts.W"), "B"), *order[index:]]

    early = build_plan(chunk, chunk, fxo.OverlapConfig(schedule=policy))
    assert early.order[index].node.name == "L0.experts.W"
    assert names.index("L0.shared.B") > index, "the shared expert's gradient comes later"


@pytest.mark.parametrize("tokens", [64, 8])
def test_weight_gradient_of_a_tied_head_is_movable(group: dist.ProcessGroup, tokens: int) -> None:
    """Rule 5: the embedding adds to it, but nothing waits for the sum. It can run before any layer's backward."""
    chunk = chunk_of(toy("*E", group, tied=True), batches(1, tokens=tokens)[0])
    found = {node.name: node for node in chunk.joint.module.graph.nodes}
    products = [
        node.name
        for node in chunk.nodes
        for op in node.ops
        if op_facts.is_heavy(found[op]) and op_facts.tag(found[op]).fqn == "head"
    ]
    assert products == ["post_process.F", "post_process.B", "post_process.W"]
    assert gradient_nodes(chunk)["embed.weight"].name == "pre_process.W"
    assert "post_process.W" in needs(chunk)["pre_process.W"]
    plan = build_plan(chunk, chunk, CONFIG)
    assert earliest(plan, "post_process.W") == [i.node.name for i in plan.order].index("post_process.B") + 1


def test_w_of_tied_weights_run_in_order() -> None:
    """Rule 6: one layer's module used three times gives W -> W edges; last use first, as autograd adds them."""
    layer = nn.Linear(16, 16)
    net = Net(layer, nn.Linear(16, 16), nn.Linear(16, 16))
    net.layers[1].weight = net.layers[2].weight = layer.weight
    chunk = chunk_of(net)
    order = [node.name for node in chunk.nodes if node.phase is Phase.W]
    for name, found in needs(chunk).items():
        assert all(order.index(need) < order.index(name) for need in found if need in order and name in order)
    assert any(need in order for name in order for need in needs(chunk)[name]), "there are W -> W edges"
    assert train_both(net, lambda step: batches(3, seed=step), steps=3) == []


# --- values that can be told by hand ----------------------------------------------------------------------------


class Function(nn.Module):
    """A loss of a microbatch's one tensor and some parameters."""

    def __init__(self, compute: Callable[..., Tensor], **parameters: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(value)))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, **dict(self.named_parameters()))


def gradients(model: nn.Module, x: Tensor, config: fxo.OverlapConfig = CONFIG, count: int = 1) -> dict[str, list]:
    fxo.transform(model, config).step([x] * count)
    return {name: parameter.grad.tolist() for name, parameter in model.named_parameters()}


def twice(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.linear(x, w, b), w, b).sum()


@pytest.mark.parametrize("delay_wgrad", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_b32_b36_contributions_to_a_shared_weight_add_up(delay_wgrad: bool, count: int) -> None:
    config = fxo.OverlapConfig(delay_wgrad=delay_wgrad)
    x = torch.tensor([[3.0]])
    model = Function(twice, w=[[2.0]], b=[1.0])
    assert gradients(model, x, config, count) == {"w": [[13.0 * count]], "b": [3.0 * count]}
    model = Function(lambda x, w: (x @ w @ w).sum(), w=[[2.0]])
    assert gradients(model, x, config, count) == {"w": [[12.0 * count]]}


def test_b32_tied_embedding_and_head(group: dist.ProcessGroup) -> None:
    for pattern in ("*-", "*E"):
        assert train_both(toy(pattern, group, tied=True), lambda step: batches(3, seed=step), steps=3) == []


def test_b37_gradients_of_chunks_are_not_mixed() -> None:
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        a, b = F.linear(x, weight).chunk(2, -1)
        return (2 * a + 5 * b).sum()

    for delay_wgrad in (True, False):
        model = Function(compute, weight=[[0.5, -1.0], [2.0, 3.0]])
        config = fxo.OverlapConfig(delay_wgrad=delay_wgrad)
        assert gradients(model, torch.tensor([[1.0, 1.0]]), config) == {"weight": [[2.0, 2.0], [5.0, 5.0]]}


def test_b41_gradients_are_bound_by_descriptor() -> None:
    """Outputs in another order, or parameters in another order, change nothing."""
    model = Function(lambda x, w, u, b: (F.linear(x, w, b) @ u).sum(), w=[[2.0]], u=[[5.0]], b=[1.0])
    joint = shared_capture(model, as_microbatch(torch.tensor([[3.0]])), CONFIG).joint
    name = {each.value: each.name for each in joint.inputs}
    value = {name[target]: value for value, target in joint.gradients}
    assert len(set(value.values())) == 3
    output = joint.module.graph.output_node()
    desc = dict(zip(output.args[0], output.meta["desc"], strict=True))
    target = {node.name: each.grad_of.target for node, each in desc.items() if node and node.name in value.values()}
    assert {each: target[made] for each, made in value.items()} == {"w": "p0", "u": "p1", "b": "p2"}
    # No pass reads the order of the outputs: gradients go by the names in `JointGraph.gradients`.
    expected = {each: node.ops for each, node in gradient_nodes(to_chunk(joint, CONFIG, [])).items()}
    permuted = shared_capture(model, as_microbatch(torch.tensor([[3.0]])), CONFIG).joint
    output = permuted.module.graph.output_node()
    output.args = (list(reversed(output.args[0])),)
    permuted = replace(permuted, gradients=permuted.gradients[::-1])
    assert {each: node.ops for each, node in gradient_nodes(to_chunk(permuted, CONFIG, [])).items()} == expected
    assert gradients(model, torch.tensor([[3.0]])) == {"w": [[15.0]], "u": [[7.0]], "b": [5.0]}


class Part(nn.Module):
    """A layer that runs as one: as a function that `how` makes of it."""

    def __init__(self, layer: nn.Module, how: Callable[[Any], Callable[..., Tensor]]) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, *args: Any) -> Tensor:
        return self.how(self.layer)(*args)


PARTS: dict[str, Callable[[Any], Callable[..., Tensor]]] = {
    "compiled": lambda layer: torch.compile(layer, backend="eager"),
    "checkpointed": lambda layer: functools.partial(checkpoint, layer, use_reentrant=False),
}


@pytest.mark.parametrize("part", PARTS)
def test_b31_weights_inside_and_outside_of_a_part_get_their_gradient_once(group: dist.ProcessGroup, part: str) -> None:
    """Opaque calls, which the case is about, are refused so far; these are the parts that there are."""
    model = toy("*E", group, shared_dim=12)
    model.layers[0] = Part(model.layers[0], PARTS[part])
    chunk = chunk_of(model)
    made = gradient_nodes(chunk)
    assert {name for name, node in made.items() if node.phase is not Phase.W} == set()
    assert set(made) == {name for name, _ in model.named_parameters()}
    assert chunk.joint is not None and len(chunk.joint.gradients) == len(made)
    assert train_both(model, lambda step: batches(2, seed=step), steps=1) == []


# --- policies ---------------------------------------------------------------------------------------------------


def in_place(f: ChunkGraph | None, b: ChunkGraph | None, costs: Any, config: Any) -> list[tuple[ScheduleNode, str]]:
    """Backward, then forward; each W right behind the B node of its layer and slot, or behind what it needs."""
    order: list[tuple[ScheduleNode, str]] = []
    if b is not None:
        rest = [node for node in b.nodes if node.phase is Phase.W]
        for node in (n for n in b.nodes if n.phase is Phase.B):
            order.append((node, "B"))
            done = {each.name for each, _ in order} | {n.name for n in b.nodes if n.phase is Phase.F}
            ready = [w for w in rest if needs(b)[w.name] <= done]
            order += [(w, "B") for w in ready]
            rest = [w for w in rest if w not in ready]
    return order + ([(node, "F") for node in f.nodes if node.phase is Phase.F] if f is not None else [])


def no_w(f: ChunkGraph | None, b: ChunkGraph | None, costs: Any, config: Any) -> list[tuple[ScheduleNode, str]]:
    """Places no W at all."""
    order = [(node, "B") for node in b.nodes if node.phase is Phase.B] if b is not None else []
    return order + ([(node, "F") for node in f.nodes if node.phase is Phase.F] if f is not None else [])


@pytest.mark.parametrize("schedule", ["sequential", no_w])
def test_b35_deferred_work_is_flushed_before_step_returns(group: dist.ProcessGroup, schedule: Any) -> None:
    model, eager = toy("*E", group, shared_dim=12), toy("*E", group, shared_dim=12)
    overlapped = fxo.transform(model, fxo.OverlapConfig(schedule=schedule))
    for count in (1, 3):
        overlapped.step(batches(count))
        eager_step(eager, batches(count))
        assert differences(eager, model) == []
        assert all(parameter.grad is not None for parameter in model.parameters())
    if schedule is no_w:
        phases = [instance.node.phase for instance in overlapped.plan("FB").order]
        assert phases.count(Phase.W) == phases[-6:].count(Phase.W) == 6


def moved(schedule: Any, **config: Any) -> tuple[int, bool]:
    """What the report says: how many W were moved, and whether it warns that none was."""
    settings = fxo.OverlapConfig(pattern="*-", schedule=schedule, **config)
    report = fxo.transform(toy("*-"), settings, example_inputs=batches(1)[0]).report()
    warns = any("delay_wgrad=True, but the schedule moved no W node" in text for text in report.warnings)
    assert warns == ("warning: delay_wgrad=True" in str(report))
    return report.w_moved, warns


def test_b30_report_tells_when_no_w_was_moved() -> None:
    assert moved(in_place) == (0, True)


def test_b30_report_counts_the_w_that_were_moved() -> None:
    """Moved: run later than right behind what it needs of the backward. In each, the last W stands where it would."""

    def one_late(f: ChunkGraph | None, b: ChunkGraph | None, costs: Any, config: Any) -> list[tuple[ScheduleNode, str]]:
        order = in_place(f, b, costs, config)
        late = [entry for entry in order if entry[0].name == "L1.experts.W"]
        return [entry for entry in order if entry not in late] + late

    assert moved(one_late)[0] - moved(in_place)[0] == 1
    assert moved(no_w) == (4, False)
    assert moved("auto", delay_wgrad=False) == (0, False)
