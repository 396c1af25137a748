"""Sizes that only the data decides, across cuts and into the backward.

Proves: a node is given, or makes, every symbol that its ops use; sizes and tensors cross a cut in any order; the
backward reverses the forward's splits and makes no symbol of its own.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import RawModel, differences, eager_step, same_bits, toy, train_both
from toys import batches as toy_batches
from two_ranks import TwoRanks

import fxoverlap as fxo
from fxoverlap import compat
from fxoverlap.ir import ChunkGraph, Phase
from fxoverlap.passes import op_facts

pytestmark = pytest.mark.usefixtures("shared_captures")


def chunk_of(model: nn.Module, microbatch: tuple) -> ChunkGraph:
    found = fxo.transform(model, example_inputs=microbatch).plan("FB").forward
    assert found is not None and found.joint is not None
    return found


def symbols(value: Any) -> set[Any]:
    """The symbols in a size, in the shape and strides of a tensor, or in several of them."""
    if isinstance(value, torch.Tensor):
        return symbols((*value.shape, *value.stride()))
    if isinstance(value, (tuple, list)):
        return {symbol for each in value for symbol in symbols(each)}
    return compat.free_symbols(value)


# --- each node is given its symbols -----------------------------------------------------------------------------


def literal_sizes(node: fx.Node) -> list[torch.SymInt]:
    """Sizes that stand in the arguments of an op as they are, and not as values that a node reads or makes."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return [each for each in found if isinstance(each, torch.SymInt)]


@pytest.mark.parametrize("make", [lambda group: RawModel(group), lambda group: toy("[*E]", group, shared_dim=12)])
def test_b66_b67_each_node_is_given_or_makes_its_symbols(group: dist.ProcessGroup, make: Any) -> None:
    chunk = chunk_of(make(group), toy_batches(1)[0])
    by_name = {node.name: node for node in chunk.joint.module.graph.nodes}
    used = 0
    for node in chunk.nodes:
        known = {symbol for value in node.reads for symbol in symbols(by_name[value].meta["val"])}
        for op in node.ops:
            value = by_name[op].meta.get("val")
            assert literal_sizes(by_name[op]) == [], (node.name, op)
            if isinstance(value, torch.SymInt):
                assert node.phase is Phase.F, "the backward makes no symbol"
                known |= symbols(value)
            used += len(symbols(value))
            # The result of a launch has the sum of its split sizes as rows: those are arguments.
            assert symbols(value) <= known | symbols([by_name[s.name].meta["val"] for s in by_name[op].all_input_nodes])
    assert used > 0


class Splits(nn.Module):
    """A MoE layer whose split sizes are given with the microbatch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.group = nn.Linear(4, 4), group.group_name

    def forward(self, x: Tensor, sent: Tensor, got: Tensor) -> Tensor:
        into, out = sent.tolist(), got.tolist()
        for size in (*into, *out):
            torch._check(size >= 0)
        rows = funcol.all_to_all_single_autograd(torch.tanh(self.linear(x)), out, into, self.group)
        back = funcol.all_to_all_single_autograd(rows.square(), into, out, self.group)
        return (back * x).sum()


class Wire(TorchDispatchMode):
    """Notes the sizes of every all-to-all; with `cut`, sends nothing: the rows that come are ones."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.cut, self.sizes = cut, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in op_facts.LAUNCHES:
            self.sizes.append((list(args[2]), list(args[1])))
            if self.cut:
                return args[0].new_ones(sum(args[1]), *args[0].shape[1:])
        return func(*args, **(kwargs or {}))


def sizes_of_a_step(model: nn.Module, sent: list[int], got: list[int], cut: bool) -> tuple[list, list[str]]:
    """(in, out) split sizes of every all-to-all of a step of one microbatch, and what differs from eager."""
    torch.manual_seed(1)
    eager, given = Splits.__new__(Splits), [(torch.randn(sum(sent), 4), torch.tensor(sent), torch.tensor(got))]
    eager.__dict__ = {**model.__dict__, "_modules": {"linear": nn.Linear(4, 4)}}
    eager.load_state_dict(model.state_dict())
    overlapped = fxo.transform(model, example_inputs=given[0])
    with Wire(cut) as wire:
        losses = overlapped.step(given).losses
    with Wire(cut):
        expected = eager_step(eager, given)
    wrong = [] if same_bits(losses[0], expected[0]) else ["loss"]
    return wire.sizes, wrong + differences(eager, model)


def test_b66_backward_reverses_the_splits(group: dist.ProcessGroup) -> None:
    sizes, wrong = sizes_of_a_step(Splits(group), [1, 3], [2, 2], cut=True)
    assert wrong == []
    assert sizes == [([1, 3], [2, 2]), ([2, 2], [1, 3]), ([1, 3], [2, 2]), ([2, 2], [1, 3])]


SENT = [[1, 3], [2, 2]], [[0, 4], [0, 0]], [[3, 0], [5, 0]]
"""What each of two ranks sends to each."""


def splits_on(rank: int) -> list[tuple[list, list[str]]]:
    return [
        sizes_of_a_step(Splits(dist.group.WORLD), sent[rank], [each[rank] for each in sent], cut=False) for sent in SENT
    ]


def test_b66_b76_backward_reverses_the_splits_on_two_ranks(two_ranks: TwoRanks) -> None:
    found = two_ranks.run(splits_on, timeout_s=120)
    for case, sent in enumerate(SENT):
        for rank in range(2):
            sizes, wrong = found[rank][case]
            way = sent[rank], [each[rank] for each in sent]
            assert wrong == []
            assert sizes == [way, way[::-1], way, way[::-1]]


# --- across a cut -----------------------------------------------------------------------------------------------


class Makes(nn.Module):
    """Two sizes that the data decides and two tensors, one of them of such a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = torch.tanh(self.linear(x))
        sizes = [(y.detach() > bound).sum().item() for bound in (-0.2, 0.2)]
        for size in sizes:
            torch._check(size >= 0)
        return {"n": sizes[0], "t": y, "m": sizes[1], "u": y.exp().sum(0) + torch.arange(sizes[1]).sum()}


class Takes(nn.Module):
    """Uses the four in one order, each in its own way."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__()
        self.order, self.linear = order, nn.Linear(4, 4)

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        use = {
            "n": lambda x: x * (torch.arange(given["n"]).sum() + 1),
            "t": lambda x: x + given["t"],
            "m": lambda x: x - torch.arange(given["m"]).sum(),
            "u": lambda x: x * given["u"],
        }
        x = self.linear(x)
        for name in self.order:
            x = torch.tanh(use[name](x))
        return x


class Permuted(nn.Module):
    """A layer that makes four values and one for each order in which they are used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.orders = list(itertools.permutations("ntmu"))
        self.layers = nn.ModuleList([Makes(), *(Takes(order) for order in self.orders)])

    def forward(self, x: Tensor) -> Tensor:
        given = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x, given)
        return x.square().sum()


def random_rows(step: int) -> list[tuple]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(5, 4, generator=generator),) for _ in range(3)]


def test_b68_sizes_and_tensors_cross_a_cut_in_every_order() -> None:
    overlapped = fxo.transform(Permuted(), example_inputs=random_rows(0)[0])
    assert train_both(overlapped, random_rows, steps=2) == []
    chunk = overlapped.plan("FB").forward
    assert chunk is not None and chunk.joint is not None
    values = {node.name: node.meta.get("val") for node in chunk.joint.module.graph.nodes}
    made = next(node for node in chunk.nodes if node.phase is Phase.F)
    kinds = set()
    for node in chunk.nodes[1:]:
        crossing = [value for value in node.reads if value in made.writes]
        if node.phase is Phase.F and len(crossing) == 4:
            kinds.add(tuple(isinstance(values[value], torch.SymInt) for value in crossing))
    assert kinds == set(itertools.permutations((True, False, True, False)))


# --- split and put together -------------------------------------------------------------------------------------


class Rejoined(nn.Module):
    """Rows split into as many as the microbatch says, and put together again."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.use = nn.Linear(4, 4), use

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        given = sizes.tolist()
        for size in given:
            torch._check(size >= 0)
        torch._check(sum(given) == x.shape[0])
        return self.use(torch.tanh(self.linear(x)), given).square().sum()


USES = {
    "cat of split": lambda x, sizes: torch.cat(x.split(sizes)),
    "other order": lambda x, sizes: torch.cat(x.split(sizes)[::-1]),
    "one part": lambda x, sizes: x.split(sizes)[1] * 2,
    "each its own way": lambda x, sizes: torch.cat([p * (i + 1) for i, p in enumerate(x.split(sizes))]),
    "split of split": lambda x, sizes: torch.cat([torch.cat(p.split([0, p.shape[0]])) for p in x.split(sizes)]),
    "padded": lambda x, sizes: torch.stack([F.pad(p, (0, 0, 0, x.shape[0] - p.shape[0])) for p in x.split(sizes)]),
    "sums of parts": lambda x, sizes: torch.stack([p.sum(0) for p in x.split(sizes)]),
    "repeated": lambda x, sizes: x.repeat_interleave(torch.arange(x.shape[0]) % 3, dim=0)[: sizes[0]],
}


def rows_and_sizes(step: int) -> list[tuple]:
    rows = (x.clone().requires_grad_() for (x,) in random_rows(step))
    return [(x, torch.tensor(sizes)) for x, sizes in zip(rows, PARTS, strict=True)]


PARTS = [[2, 3], [0, 5], [4, 1]]


@pytest.mark.parametrize("name", USES)
def test_b69_gradient_of_a_split_makes_no_size(name: str) -> None:
    overlapped = fxo.transform(Rejoined(USES[name]), example_inputs=rows_and_sizes(0)[0])
    chunk = overlapped.plan("FB").forward
    assert chunk is not None and chunk.joint is not None
    by_name = {node.name: node for node in chunk.joint.module.graph.nodes}
    forward = {s for node in by_name.values() for s in symbols(node.meta.get("val")) if is_forward(node)}
    backward = {s for node in by_name.values() for s in symbols(node.meta.get("val")) if not is_forward(node)}
    assert backward <= forward
    for value, target in chunk.joint.gradients:
        assert by_name[value].meta["val"].shape == by_name[target].meta["val"].shape
    assert train_both(overlapped, rows_and_sizes, steps=2) == []


def is_forward(node: fx.Node) -> bool:
    return not op_facts.is_op(node) or op_facts.tag(node).phase is Phase.F
