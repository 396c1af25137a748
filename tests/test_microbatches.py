"""The forms in which microbatches come and outputs go: every one gives what calling the model with it gives.

Each case trains a transformed model beside an eager copy, then compares the outputs of a step, structure included.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from toys import Made, batches, call, differences, eager_step, rows, same_bits, toy, train_both

import fxoverlap as fxo

pytestmark = pytest.mark.usefixtures("shared_captures")


def numbers(seed: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclass
class Record:
    x: Tensor
    factor: float


pytree.register_dataclass(Record)


class Model(nn.Module):
    """One linear layer; `function` makes of it and the arguments what forward returns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear, *args, **kwargs)


class Named(nn.Module):
    """Takes arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, mode: str = "sum") -> Tensor:
        y = self.linear(x) if mask is None else self.linear(x) * mask
        return (y.square().sum() if mode == "sum" else y.square().mean()) * scale


def on(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Model(function)


def of_pair(linear: nn.Linear, pair: Pair) -> Tensor:
    assert isinstance(pair, Pair)
    return linear(pair.x).square().sum() * (1 if pair.y is None else pair.y)


def of_tree(linear: nn.Linear, tree: dict[str, Any], flag: Any = None) -> Tensor:
    first, (second, factor), last = tree["list"][0], tree["list"][1], tree["inner"]["last"]
    assert type(tree["list"]) is list and type(tree["list"][1]) is tuple and tree["none"] is None
    loss = linear(first).square().sum() + factor * linear(second).sum() + linear(last).tanh().sum()
    return loss if flag is None else 2 * loss


def tree(seed: int, factor: float = 2.0) -> dict[str, Any]:
    return {"list": [numbers(seed), (numbers(seed + 10), factor)], "none": None, "inner": {"last": numbers(seed + 20)}}


Case = tuple[Callable[[], nn.Module], Callable[[int], Any]]
FORMS: dict[str, Case] = {
    "tuple": (Named, lambda i: (numbers(i), numbers(9))),
    "tuple of one": (Named, lambda i: (numbers(i),)),
    "bare tensor": (Named, numbers),
    "dict": (Named, lambda i: {"x": numbers(i), "mask": numbers(9)}),
    "ordered dict is one argument": (
        on(lambda linear, given: linear(given["x"]).sum().square()),
        lambda i: OrderedDict(x=numbers(i)),
    ),
    "Microbatch": (Named, lambda i: fxo.Microbatch((numbers(i),), {"mask": numbers(9), "scale": 0.5})),
    "Microbatch without arguments": (on(lambda linear: linear.weight.square().sum()), lambda i: fxo.Microbatch()),
    "empty tuple": (on(lambda linear: linear.weight.square().sum()), lambda i: ()),
    "keywords in another order": (
        Named,
        lambda i: dict(sorted({"x": numbers(i), "mask": numbers(9), "scale": 0.5}.items(), reverse=i % 2 == 1)),
    ),
    "None": (Named, lambda i: (numbers(i), None)),
    "number": (Named, lambda i: {"x": numbers(i), "scale": 3}),
    "string": (Named, lambda i: {"x": numbers(i), "mode": "mean"}),
    "other numbers in one step": (Named, lambda i: {"x": numbers(i), "scale": (1, 1.0, 0.5)[i % 3]}),
    "other strings in one step": (Named, lambda i: {"x": numbers(i), "mode": ("sum", "mean")[i % 2]}),
    "other structures in one step": (Named, lambda i: ((numbers(i),), {"x": numbers(i)})[i % 2]),
    "NamedTuple is one argument": (on(of_pair), lambda i: Pair(numbers(i), None)),
    "NamedTuple in a tuple": (on(of_pair), lambda i: (Pair(numbers(i), 2.0),)),
    "list is one argument": (on(lambda linear, given: linear(given[0]).sum().square()), lambda i: [numbers(i)]),
    "nested": (on(of_tree), lambda i: (tree(i),)),
    "nested, with keyword": (on(of_tree), lambda i: fxo.Microbatch((tree(i, 3.0),), {"flag": "x"})),
    "dataclass": (
        on(lambda linear, record: linear(record.x).square().sum() * record.factor),
        lambda i: (Record(numbers(i), 0.5),),
    ),
    "one tensor twice": (on(lambda linear, a, b: (linear(a) * b).sum()), lambda i: (numbers(i),) * 2),
    "views of one tensor": (
        on(lambda linear, a, b: (linear(a).sum(0) * linear(b)).sum()),
        lambda i: tuple(numbers(i).split((1, 2))),
    ),
    "bool tensor": (
        on(lambda linear, x, m: linear(x)[:, 0].where(m, 0.0).sum()),
        lambda i: (numbers(i), numbers(i)[:, 1] > 0),
    ),
    "not contiguous": (on(lambda linear, x: linear(x).square().sum()), lambda i: (numbers(i, 4).t(),)),
    "other strides in one step": (
        on(lambda linear, x: linear(x).square().sum() * x.reshape(-1)[0]),
        lambda i: (numbers(i, 4).t() if i % 2 else numbers(i, 4),),
    ),
    "no rows": (on(lambda linear, x: linear(x).sum() + linear.bias.square().sum()), lambda i: (numbers(i, 0),)),
}


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    make, given = FORMS[name]
    assert train_both(make(), lambda step: [given(3 * step + i) for i in range(3)]) == []


def test_b97_all_forms_of_one_microbatch_give_one_result() -> None:
    x, mask = numbers(0), numbers(1)
    forms = [(x, mask), {"x": x, "mask": mask}, {"mask": mask, "x": x}, fxo.Microbatch((x,), {"mask": mask})]
    model = Named()
    losses = fxo.transform(model).step([*forms, fxo.Microbatch((), {"mask": mask, "x": x})]).losses
    assert all(same_bits(loss, losses[0]) for loss in losses)
    assert same_bits(losses[0], call(model, forms[0]).detach())


class KeywordsOnly(nn.Module):
    """Takes two tensors of one shape and type by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, pos: Tensor, mask: Tensor) -> Tensor:
        return (self.linear(x + pos) * mask).square().sum()


def test_b98_keywords_are_bound_by_name() -> None:
    """Whatever their order; all orders are one variant."""
    overlapped = fxo.transform(KeywordsOnly())

    def given(step: int) -> list[dict[str, Tensor]]:
        x, pos, mask = (numbers(10 * step + i) for i in range(3))
        return [
            {"x": x, "pos": pos, "mask": mask},
            {"mask": mask, "pos": pos, "x": x},
            {"pos": pos, "x": x, "mask": mask},
        ]

    assert train_both(overlapped, given) == []
    assert overlapped.report().variants == 1
    result = overlapped.step(given(0))
    assert all(same_bits(loss, result.losses[0]) for loss in result.losses)


class AnyKeywords(nn.Module):
    """Weighs what it gets by any name by where it stands among them, and names one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return sum((i * self.linear(each)).square().sum() for i, each in enumerate((x, *others.values()), 1))


def test_b98_keywords_that_forward_does_not_name_keep_their_order() -> None:
    overlapped = fxo.transform(AnyKeywords())

    def given(step: int) -> list[dict[str, Tensor]]:
        x, a, b = (numbers(10 * step + i) for i in range(3))
        return [{"x": x, "a": a, "b": b}, {"b": b, "a": a, "x": x}, {"b": b, "x": x, "a": a}]

    assert train_both(overlapped, given) == []
    assert overlapped.report().variants == 2  # where x stands does not matter


def test_a_list_and_a_tuple_of_microbatches_are_the_same() -> None:
    overlapped = fxo.transform(Named())
    given = [(numbers(i),) for i in range(3)]
    assert overlapped.step(given).losses == overlapped.step(tuple(given)).losses


# --- outputs -------------------------------------------------------------------------------------------------------


def loss_of(y: Tensor) -> Tensor:
    return y.square().mean()


OUTPUTS: dict[str, Callable[[nn.Linear, Tensor], Any]] = {
    "loss only": lambda linear, x: loss_of(linear(x)),
    "tuple of the loss": lambda linear, x: (loss_of(linear(x)),),
    "tuple": lambda linear, x: (loss_of(linear(x)), linear(x), x.sum()),
    "dict of the loss": lambda linear, x: {"loss": loss_of(linear(x))},
    "dict": lambda linear, x: {"logits": linear(x), "loss": loss_of(linear(x)), "rows": len(x), "note": None},
    "nested": lambda linear, x: (loss_of(linear(x)), {"a": [linear(x), (x + 1, "text")]}, None, 3),
    "NamedTuple inside": lambda linear, x: {"loss": loss_of(linear(x)), "pair": Pair(linear(x), 2)},
    "views": lambda linear, x: (loss_of(linear(x)), x, x.t(), x[0], linear.weight, linear.weight[0]),
    "one tensor twice": lambda linear, x: (lambda y: (loss_of(y), y, y))(linear(x)),
    "integers": lambda linear, x: (loss_of(linear(x)), linear(x).argmax(-1), linear(x) > 0),
    "the loss again": lambda linear, x: (lambda loss: (loss, loss, loss * 2))(loss_of(linear(x))),
}


def rest(result: Any) -> Any:
    """What forward returned besides the loss."""
    if isinstance(result, dict):
        return {key: value for key, value in result.items() if key != "loss"}
    return tuple(result[1:]) if isinstance(result, tuple) else None


def assert_same_tree(got: Any, want: Any) -> None:
    (gots, got_spec), (wants, want_spec) = pytree.tree_flatten(got), pytree.tree_flatten(want)
    assert got_spec == want_spec
    for a, b in zip(gots, wants, strict=True):
        if isinstance(b, Tensor):
            assert not a.requires_grad and same_bits(a, b)
        else:
            assert type(a) is type(b) and a == b


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name: str) -> None:
    model = Model(OUTPUTS[name])
    eager, overlapped = copy.deepcopy(model), fxo.transform(model)
    given = [(numbers(i),) for i in range(3)]
    wanted = [rest(call(model, each)) for each in given]
    result = overlapped.step(given)
    assert [same_bits(a, b) for a, b in zip(result.losses, eager_step(eager, given), strict=True)] == [True] * 3
    assert differences(eager, model) == []
    for got, want in zip(result.outputs, wanted, strict=True):
        assert_same_tree(got, want)
    without = overlapped.step(given, outputs=False)
    assert without.outputs == [None] * 3
    assert all(same_bits(a, b) for a, b in zip(without.losses, result.losses, strict=True))
    assert not any(loss.requires_grad for loss in result.losses)


def test_equal_numbers_of_other_types_are_other_numbers() -> None:
    flags = (1, 1.0, True, 1)
    overlapped = fxo.transform(Model(lambda linear, x, flag: (loss_of(linear(x)), flag, x * flag)))
    result = overlapped.step([(torch.ones(3, 4, dtype=torch.float32), flag) for flag in flags])
    assert [type(output[0]) for output in result.outputs] == [type(flag) for flag in flags]


def test_outputs_and_losses_are_the_users_to_change() -> None:
    overlapped = fxo.transform(Model(OUTPUTS["views"]))
    given = [(numbers(i),) for i in range(2)]
    before = [x.clone() for (x,) in given], overlapped.module.linear.weight.detach().clone()
    result = overlapped.step(given)
    for tensor in pytree.tree_leaves((result.outputs, result.losses)):
        tensor.zero_()
    assert all(torch.equal(x, kept) for (x,), kept in zip(given, before[0], strict=True))
    assert torch.equal(overlapped.module.linear.weight, before[1])
    assert all(loss != 0 for loss in overlapped.step(given).losses)


def counts_and_shows(m: Any, x: Tensor) -> Any:
    m.mean.add_(x.mean(0))
    return loss_of(m.linear(x) * m.mean), m.mean, m.mean[:2], x, m.linear.weight


def test_outputs_are_copies_of_what_they_share_storage_with() -> None:
    """A buffer as its own microbatch left it, though later ones write to it; inputs and parameters as they were."""
    model = Made(counts_and_shows)
    eager, overlapped = copy.deepcopy(model), fxo.transform(model)
    wanted = [pytree.tree_map(torch.clone, rest(eager(*each))) for each in rows(0)]
    given = rows(0)
    result = overlapped.step(given)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *given[0])}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers(), *(x for (x,) in given)):
            tensor.zero_()
    for got, want in zip(result.outputs, wanted, strict=True):
        assert all(same_bits(a, b.detach()) for a, b in zip(got, want, strict=True))
        assert own.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in got)


@pytest.mark.parametrize("scale", [0.5, torch.tensor(4.0)], ids=repr)
def test_grad_scale_does_not_change_losses_and_outputs(scale: Any) -> None:
    function = OUTPUTS["the loss again"]
    model = Model(function)
    plain, scaled = (fxo.transform(model, fxo.OverlapConfig(grad_scale=each)).step(rows(0)) for each in (1.0, scale))
    own = fxo.transform(model).step([fxo.Microbatch(each, grad_scale=scale) for each in rows(0)])
    for result in (scaled, own):
        assert all(same_bits(a, b) for a, b in zip(result.losses, plain.losses, strict=True))
        assert_same_tree(result.outputs, plain.outputs)
        assert not any(loss.requires_grad for loss in result.losses)


# --- shapes --------------------------------------------------------------------------------------------------------


def test_other_lengths_in_one_step(group: dist.ProcessGroup) -> None:
    """F and B of two variants stand in one FB plan; a third step has no new capture."""
    overlapped = fxo.transform(toy("*-[*E]", group, dropout=0.1, selection_bias=True))
    lengths = ((8, 5, 8), (5, 5, 8, 8), (8,), (5, 8))

    def make(step: int) -> list[tuple]:
        return [batches(1, tokens=tokens, seed=10 * step + i)[0] for i, tokens in enumerate(lengths[step])]

    assert train_both(overlapped, make, steps=4) == []
    assert overlapped.report().variants == 2


def test_the_plan_of_two_variants_holds_both(group: dist.ProcessGroup) -> None:
    overlapped = fxo.transform(toy("[*E]", group))
    overlapped.step([*batches(1, tokens=4), *batches(1, tokens=6)])
    plan = overlapped.plan("FB")
    assert tokens_shape(plan.forward) == (1, 6)
    assert tokens_shape(plan.backward) == (1, 4)


def tokens_shape(chunk: fxo.ChunkGraph) -> tuple[int, ...]:
    value = next(each.value for each in chunk.joint.inputs if each.name == "args[0]")
    node = next(node for node in chunk.joint.module.graph.nodes if node.name == value)
    return tuple(node.meta["val"].shape)
