"""The modules of schedule nodes: what they take and hand on, and which nodes share one.

Proves: layers of one kind are one module, whatever their parameters, and others are not; a module takes all that it
needs as one list and empties it; and whatever stands at a cut, several results, views, casts or slices, the values
that cross give eager's bits.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, fx, nn
from toys import RawMoE, batches, toy, train_both

import fxoverlap as fxo
from fxoverlap import compat
from fxoverlap.ir import ChunkGraph, ScheduleNode
from fxoverlap.passes.extract import structure


def chunk_of(model: nn.Module, **config: Any) -> ChunkGraph:
    found = fxo.transform(model, fxo.OverlapConfig(**config), example_inputs=batches(1)[0]).plan("FB").forward
    assert found is not None and found.joint is not None
    return found


@pytest.fixture(scope="module")
def chunk(group: dist.ProcessGroup) -> ChunkGraph:
    return chunk_of(toy("[*E][*E]", group, shared_dim=12), pattern="[*E][*E]")


class Net(nn.Module):
    """Embedding, layers, head, cross entropy."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return F.cross_entropy(self.head(x.float()).flatten(0, 1), targets.flatten())


class Dense(nn.Module):
    """A layer of any width, dtype, constant and layout of a weight."""

    def __init__(
        self, width: int = 16, dtype: torch.dtype = torch.float32, factor: float = 1.0, rows_first: bool = True
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width, dtype=dtype), nn.Linear(width, 16, dtype=dtype)
        self.norm, self.factor = nn.LayerNorm(16), factor
        if not rows_first:
            self.up.weight = nn.Parameter(self.up.weight.detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x).to(self.up.weight.dtype))))
        return x + y.float() * self.factor


# --- sharing ----------------------------------------------------------------------------------------------------


def shared(chunk: ChunkGraph, name: str) -> bool:
    """Whether the nodes of this slot and phase are one module in layers 0 and 1."""
    return chunk.modules[f"L0.{name}"] is chunk.modules[f"L1.{name}"]


def test_layers_of_one_kind_share_modules(chunk: ChunkGraph) -> None:
    """The sizes that the data decides differ from layer to layer; the modules do not."""
    of_layer_1 = [node.name.removeprefix("L1.") for node in chunk.nodes if node.layer == 1]
    assert [name for name in of_layer_1 if not shared(chunk, name)] == []
    assert {"pre_dispatch.F", "permute.F", "experts.F", "experts.B", "experts.W", "shared.F"} <= set(of_layer_1)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({}, {}, "FBW"),
        ({}, {"width": 24}, ""),
        ({}, {"dtype": torch.bfloat16}, ""),
        ({}, {"factor": 2.0}, "W"),
        ({}, {"rows_first": False}, ""),
        ({"factor": 2.0}, {"factor": 2.0}, "FBW"),
    ],
    ids=["equal", "dim", "dtype", "literal", "strides", "equal literal"],
)
def test_what_makes_modules_differ(first: dict[str, Any], second: dict[str, Any], same: str) -> None:
    """`same` lists the phases in which two layers share a module; W does not use the literal."""
    found = chunk_of(Net(Dense(**first), Dense(**second), Dense()))
    assert [phase for phase in "FBW" if shared(found, f"pre_dispatch.{phase}")] == list(same)


def test_last_layer_is_like_the_others() -> None:
    assert shared(chunk_of(Net(Dense(), Dense())), "pre_dispatch.F")


def by_hand(size_a: str, size_b: str, wiring: tuple[int, int] = (0, 1), dtype: torch.dtype = torch.float32) -> str:
    """The structure of `sub(a, b)`, a and b having symbolic sizes."""
    mode = compat.new_fake_mode()
    made: dict[str, Any] = {}
    sizes = [made.setdefault(name, mode.shape_env.create_unbacked_symint()) for name in (size_a, size_b)]
    with mode:
        values = [torch.empty(size, 4, dtype=dtype) for size in sizes]
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "ab"]
    result = graph.call_function(torch.ops.aten.sub.Tensor, tuple(inputs[i] for i in wiring))
    for node, value in zip((*inputs, result), (*values, values[0]), strict=True):
        node.meta["val"] = value
    node = ScheduleNode(0, None, None, None, (result.name,), ("a", "b"), (result.name,))  # type: ignore[arg-type]
    return structure(node, {each.name: each for each in graph.nodes})


def test_structure_numbers_symbols_by_first_appearance() -> None:
    assert by_hand("n", "n") == by_hand("m", "m")
    assert by_hand("n", "m") == by_hand("k", "l")
    assert by_hand("n", "n") != by_hand("n", "m")
    assert by_hand("n", "n") != by_hand("n", "n", wiring=(1, 0))
    assert by_hand("n", "n") != by_hand("n", "n", dtype=torch.bfloat16)


# --- the way in and out -----------------------------------------------------------------------------------------


def test_module_takes_a_list_and_empties_it() -> None:
    """So an argument can die inside, with its last use."""
    found = chunk_of(Net(Dense()))
    node = next(node for node in found.nodes if node.name == "post_process.F")
    values = {each.name: each.meta["val"] for each in found.joint.module.graph.nodes if "val" in each.meta}
    given = [torch.zeros(values[v].shape, dtype=values[v].dtype) for v in node.reads]
    results = found.modules[node.name](given)
    assert given == []
    assert isinstance(results, tuple)
    assert [result.shape for result in results] == [values[v].shape for v in node.writes]


def test_parameters_constants_and_symbols_are_arguments(chunk: ChunkGraph) -> None:
    """A module holds no tensor and no layer's sizes: its placeholders are what the node reads, in order."""
    assert chunk.joint is not None
    kinds = {each.value: each.kind.value for each in chunk.joint.inputs}
    read_kinds, read_sizes = set(), 0
    for node in chunk.nodes:
        module = chunk.modules[node.name]
        assert not list(module.parameters()) and not list(module.buffers()), node.name
        assert module.graph.find_nodes(op="get_attr") == []
        placeholders = module.graph.find_nodes(op="placeholder")
        assert len(placeholders) == len(node.reads)
        read_kinds |= {kinds[value] for value in node.reads if value in kinds}
        read_sizes += sum(isinstance(each.meta["val"], torch.SymInt) for each in placeholders)
    assert {"param", "buffer", "leaf", "tangent"} <= read_kinds
    assert read_sizes > 0


class Scaled(Dense):
    """Multiplies by a tensor that is no parameter and no buffer: a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.table = (torch.arange(16.0),)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table[0]


def test_constants_are_arguments() -> None:
    net = Net(Scaled(), Scaled(), Dense())
    found = chunk_of(net)
    constants = {each.value for each in found.joint.inputs if each.kind.value == "constant"}
    assert constants and constants <= {value for node in found.nodes for value in node.reads}
    assert shared(found, "pre_dispatch.F")
    assert train_both(net, lambda step: batches(2, seed=step), steps=2) == []


# --- whatever stands at a cut -----------------------------------------------------------------------------------

train = functools.partial(train_both, make_batches=lambda step: batches(3, seed=step), steps=2)


class Five(nn.Embedding):
    """An embedding that returns five values."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, int, None, Tensor]:  # type: ignore[override]
        x = super().forward(tokens)
        return x, tokens.ne(1), 2, None, x.mean(-1, keepdim=True)


class ResidualMoE(RawMoE):
    """A norm that returns (out, residual) stands right before the dispatch."""

    def add_and_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + y
        return F.layer_norm(residual, (16,)), residual

    def forward(self, x: Tensor) -> Tensor:
        out, residual = self.add_and_norm(x, torch.tanh(x))
        return residual + super().forward(out)


class Arity(Net):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, mask, factor, nothing, mean = self.embed(tokens)
        assert nothing is None
        for block in self.layers:
            x = block(x) + mean
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="none")
        return (loss * mask.flatten()).sum() / factor


def test_b10_b11_no_arity_is_assumed(group: dist.ProcessGroup) -> None:
    net = Arity(ResidualMoE(16, 4, group), Dense())
    net.embed = Five(32, 16)
    assert train(net) == []


class Casts(nn.Module):
    """Ends with a view and a cast of what it waits for."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(16, 16), group.group_name

    def forward(self, x: Tensor) -> Tensor:
        sent = funcol.all_to_all_single_autograd(x.float().flatten(0, 1), None, None, self.name)
        back = funcol.all_to_all_single_autograd(self.linear(sent), None, None, self.name)
        return back.view(x.shape).to(torch.bfloat16)


def test_b71_view_and_cast_of_a_waited_result_end_a_layer(group: dist.ProcessGroup) -> None:
    net = Net(Casts(group), Casts(group))
    node = next(node for node in chunk_of(net).nodes if node.name == "L0.post_combine.F")
    assert [op.rstrip("_0123456789") for op in node.ops] == ["wait_tensor", "view", "_to_copy"]
    assert train(net) == []


class Cuts(nn.Module):
    """Keeps as many positions as the data says: the slice is its last op."""

    def forward(self, x: Tensor) -> Tensor:
        size = x[0, :, 0].detach().gt(0).sum().item() + 1
        torch._check(size > 0)
        torch._check(size <= x.shape[1])
        return x[:, :size]


class Pads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True).expand(-1, 8, -1)


def test_b100_slice_bounds_that_are_graph_values() -> None:
    assert train(Net(Dense(), Cuts(), Dense(), Pads())) == []
