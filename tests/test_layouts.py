"""Kernels whose result depends on how a tensor lies in memory: a step runs them on the layouts that eager has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import Made, train_both

import fxoverlap as fxo


class Net(nn.Module):
    """A linear layer, a module, and a function of both and of the input [4, positions, 16]."""

    def __init__(self, inner: nn.Module, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.inner, self.function = nn.Linear(16, 16), inner, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner, self.linear(x)).square().sum()


def inputs(step: int) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(4, 5, 16, generator=generator),) for _ in range(2)]


def transposed(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x.transpose(1, 2)).transpose(1, 2).tanh()


def images(inner: nn.Module, x: Tensor) -> Tensor:
    """Channels last."""
    return inner(x.view(4, 5, 4, 4).permute(0, 3, 1, 2)).tanh()


CASES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Net(nn.BatchNorm1d(16), transposed),
    "instance norm and linear": lambda: Net(nn.Linear(16, 16), lambda inner, x: inner(transposed(F.instance_norm, x))),
    "batch norm in eval mode": lambda: Net(nn.BatchNorm1d(16), transposed).eval(),
    "batch norm of images": lambda: Net(nn.BatchNorm2d(4), images),
    "dropout": lambda: Net(nn.Dropout(0.3), transposed),
    "dropout in place": lambda: Net(nn.Dropout(0.3, inplace=True), transposed),
    "dropout in bf16": lambda: Net(nn.Dropout(0.3), lambda inner, x: transposed(inner, x.bfloat16()).float()),
    "alpha dropout": lambda: Net(nn.AlphaDropout(0.3), transposed),
    "dropout of channels": lambda: Net(nn.Dropout1d(0.3), transposed),
    "mask drawn by hand": lambda: Net(nn.Identity(), lambda _, x: x.mT * torch.empty_like(x.mT).bernoulli_(0.3)),
    "functional draw": lambda: Net(nn.Identity(), lambda _, x: x.mT * torch.bernoulli(x.detach().mT, 0.3)),
    "other draws": lambda: Net(
        nn.Identity(), lambda _, x: x.mT * torch.rand_like(x.mT) * torch.empty_like(x.mT).normal_().exponential_()
    ),
    "encoder layer": lambda: Net(nn.TransformerEncoderLayer(16, 2, 8, 0.2, batch_first=True), nn.Module.__call__),
}


@pytest.mark.parametrize("name", CASES)
def test_layout(name: str) -> None:
    assert train_both(CASES[name](), inputs) == []


def viewed(activation: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A function whose gradient comes in permuted, and leaves through a view."""

    def function(inner: nn.Module, x: Tensor) -> Tensor:
        weights = torch.arange(float(x.numel())).view(4, 16, 5)
        return inner(activation(x.view(4, 5, 16)).transpose(1, 2).contiguous() * weights)

    return function


VIEWED: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "elu": F.elu,
    "hardtanh": F.hardtanh,
    "dropout": lambda x: F.dropout(x, 0.3),
    "log softmax": lambda x: F.log_softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "smooth l1 loss": lambda x: F.smooth_l1_loss(x, x.detach() + 1, reduction="none"),
    "binary cross entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid(), reduction="none"),
}


@pytest.mark.parametrize("name", VIEWED)
def test_view_of_a_gradient_that_lies_otherwise_than_traced(name: str) -> None:
    model = Net(nn.Identity(), viewed(VIEWED[name]))
    assert train_both(model, lambda step: [(x.flatten(0, 1),) for (x,) in inputs(step)]) == []


class Scale(torch.autograd.Function):
    """x [..., n] times w [n]. The gradient of w is a sum over what is first made contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w, (gradient.contiguous() * x).sum((0, 1))


@pytest.mark.parametrize("name", VIEWED)
def test_copy_of_a_gradient_that_lies_otherwise_than_its_input(name: str) -> None:
    """Where a trace had the gradient contiguous and it is not, eager would copy it and sum in another order."""
    generator = torch.Generator().manual_seed(0)
    shift = torch.randn(4, 64, 37, generator=generator)
    scale = nn.Parameter(torch.randn(64, generator=generator))

    def loss(model: Any, x: Tensor) -> Tensor:
        return (VIEWED[name](Scale.apply(x, model.scale)).transpose(1, 2).contiguous() * shift).square().sum()

    given = [(torch.randn(4, 37, 64, generator=generator),) for _ in range(2)]
    assert train_both(Made(loss, scale=scale), lambda step: given, steps=1) == []


@torch.library.custom_op("fxoverlap_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """A copy of x [..., n, m] that lies transposed, which its fake implementation does not know."""
    return x.mT.clone(memory_format=torch.contiguous_format).mT


turned.register_fake(torch.empty_like)
turned.register_autograd(lambda ctx, gradient: turned(gradient))


def test_view_of_what_a_custom_op_lays_out_otherwise_than_it_says() -> None:
    model = Net(nn.Identity(), lambda _, x: turned(turned(x.view(4, 5, 16)).flatten(1).tanh()))
    assert train_both(model, lambda step: [(x.flatten(0, 1),) for (x,) in inputs(step)]) == []


RECURRENT = {
    "lstm": (lambda: nn.LSTM(16, 16, batch_first=True), lambda inner, x: inner(x)[0]),
    "lstm cell": (lambda: nn.LSTMCell(16, 16), lambda inner, x: inner(x.flatten(0, -2))[0]),
    "rnn": (lambda: nn.RNN(16, 16, batch_first=True), lambda inner, x: inner(x)[0]),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name: str) -> None:
    make, call = RECURRENT[name]
    assert train_both(Net(make(), call), inputs) == []


def test_gru_is_refused() -> None:
    """Eager's cell works in place on parts of a tensor; traced, the parts are contiguous, and round otherwise."""
    model = Net(nn.GRU(16, 16, batch_first=True), lambda inner, x: inner(x)[0])
    with pytest.raises(fxo.UnsupportedError, match=r"'inner' \(GRU\).*last bits.*plain tensor ops"):
        fxo.transform(model, example_inputs=inputs(0)[0])


@pytest.mark.parametrize("product", [lambda x: x.sigmoid().prod(-1), lambda x: x.sigmoid()[0, 0].prod()])
def test_gradient_of_a_product_is_refused(product: Callable[[Tensor], Tensor]) -> None:
    """Eager divides the product by each factor where none is 0, which a tracer cannot know."""
    with pytest.raises(fxo.UnsupportedError, match=r"model itself.*torch\.prod.*last bits.*one by one"):
        fxo.transform(Net(nn.Identity(), lambda _, x: product(x)), example_inputs=inputs(0)[0])
    assert train_both(Net(nn.Identity(), lambda _, x: x * product(x.detach()).sum() + x.cumprod(-1)), inputs) == []
