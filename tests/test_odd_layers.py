"""Layers that do unusual things inside: each model trains bit for bit like eager.

The wiring around them is plain; `test_odd_models` has the other half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from odd import Attention, Dense, Odd, in_turn, moe
from torch import Tensor, nn
from toys import RawMoE, batches, train_both


class Layer(nn.Module):
    """A linear layer in a function of the layer and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **others: Any) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(16, 16)
        for name, value in others.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Noisy(RawMoE):
    """A MoE whose input is jittered while training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.empty_like(x).uniform_(0.9, 1.1) if self.training else x)


def in_place_residual(m: Any, x: Tensor) -> Tensor:
    x = x + 0.5
    x += torch.relu(m.linear(x * 2))
    x[:, 0] = x[:, 0] * 2
    x[:, 1:3].masked_fill_(x[:, 1:3] > 1.0, 0.5)
    return x


def straight_through(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    return x + y + (y.round() - y).detach()


def complex_rotation(m: Any, x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(m.linear(x).float().unflatten(-1, (8, 2)))
    angles = torch.polar(torch.ones(8), torch.arange(8.0))
    return x + torch.view_as_real(pairs * angles).flatten(-2)


def one_token_after_another(m: Any, x: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = torch.tanh(m.linear(token) + 0.5 * state)
        states.append(state)
    return x + torch.stack(states, 1)


def in_low_precision(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x + torch.relu(m.linear(x)).float()


def in_double_precision(m: Any, x: Tensor) -> Tensor:
    return x + F.linear(x.double(), m.linear.weight.double()).float()


def without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.linear(x)
    return x + y * x


def gradient_in_forward(m: Any, x: Tensor) -> Tensor:
    """One step of descent on an inner loss, through which the outer one flows (test-time training)."""
    weight = m.linear.weight * 1.0
    inner = (F.linear(x, weight) - x).square().sum()
    (step,) = torch.autograd.grad(inner, weight, create_graph=True)
    return x + F.linear(x, weight - 0.01 * step)


def sorted_tokens(m: Any, x: Tensor) -> Tensor:
    order = m.linear(x).sum(-1).argsort(-1)
    y = x.gather(1, order[..., None].expand_as(x))
    return x + torch.zeros_like(x).scatter_add(1, order[..., None].expand_as(x), m.linear(y))


def running_mean(m: Any, x: Tensor) -> Tensor:
    if m.training:
        m.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    return x + m.linear(x - m.mean)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: lambda each=each: Layer(each)  # type: ignore[misc]
    for each in (
        *(in_place_residual, straight_through, complex_rotation, one_token_after_another, in_low_precision),
        *(in_double_precision, without_gradient, gradient_in_forward, sorted_tokens),
    )
} | {
    "identity": nn.Identity,
    "reversed gradient": lambda: Layer(lambda m, x: x + Reverse.apply(m.linear(x))),
    "dropout": lambda: nn.Sequential(Dense(), nn.Dropout(0.2)),
    "convolution": lambda: Layer(
        lambda m, x: x + m.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2), conv=nn.Conv1d(16, 16, 3, groups=16)
    ),
    "complex parameter": lambda: Layer(
        lambda m, x: x + (m.turn * x).real, turn=nn.Parameter(torch.randn(16, dtype=torch.complex64))
    ),
    "batch norm": lambda: Layer(lambda m, x: x + m.norm(x.transpose(1, 2)).transpose(1, 2), norm=nn.BatchNorm1d(16)),
}


@pytest.mark.parametrize("moes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYERS)
def test_odd_layer(group: dist.ProcessGroup, name: str, moes: int) -> None:
    """In front of, between and behind MoE layers."""
    torch.manual_seed(0)
    make = LAYERS[name]
    model = Odd(in_turn, make(), *(each for _ in range(moes) for each in (moe(group), make())))
    assert train_both(model, lambda step: batches(3, seed=step), steps=2) == []


def buffers_between_layers(group: Any) -> Odd:
    """One running mean that three layers read and write."""
    model = Odd(in_turn, Layer(running_mean), moe(group), Layer(running_mean), moe(group), Layer(running_mean))
    model.register_buffer("mean", torch.zeros(16))
    for layer in model.layers[::2]:
        layer.register_buffer("mean", model.mean)
    return model


def noisy_routers(group: Any) -> Odd:
    return Odd(in_turn, Noisy(16, 4, group), Dense(), Noisy(16, 4, group))


def weight_penalty(group: Any) -> Odd:
    """Every parameter has a gradient of its own besides that of its layer."""

    def wire(m: Odd, x: Tensor) -> tuple[Tensor, Tensor]:
        return in_turn(m, x), 1e-2 * sum(p.square().sum() for p in m.parameters())

    return Odd(wire, moe(group), Dense(), moe(group))


def learned_temperature(group: Any) -> Odd:
    return Odd(lambda m, x: in_turn(m, x) * m.heat.exp(), moe(group), moe(group), heat=nn.Parameter(torch.zeros(())))


def keys_of_the_first_layer(group: Any) -> Odd:
    """Later layers attend to the keys and values that the first one made."""

    class Across(Attention):
        def forward(self, x: Tensor, kept: Any = None) -> tuple[Tensor, Any]:  # type: ignore[override]
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            k, v = kept or (k, v)
            return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)), (k, v)

    def wire(m: Odd, x: Tensor) -> Tensor:
        kept = None
        for i in range(0, 4, 2):
            x, kept = m.layers[i](x, kept)
            x = m.layers[i + 1](x)
        return x

    return Odd(wire, Across(), moe(group), Across(), moe(group))


def encoder_and_decoder(group: Any) -> Odd:
    """Two towers on the same tokens; the second one reads the result of the first in each layer."""

    def wire(m: Odd, x: Tensor) -> Tensor:
        memory = m.layers[1](m.layers[0](x.flip(1)))
        for layer in m.layers[2:]:
            x = layer(x + memory.mean(1, keepdim=True))
        return x

    return Odd(wire, Dense(), moe(group), moe(group), Dense(), moe(group))


def two_embeddings_of_one_table(group: Any) -> Odd:
    def wire(m: Odd, x: Tensor) -> Tensor:
        return in_turn(m, x + F.embedding(m.targets, m.embed.weight).mean(1, keepdim=True))

    return Odd(wire, moe(group), Dense(), moe(group))


MODELS = [
    *(buffers_between_layers, noisy_routers, weight_penalty, learned_temperature, keys_of_the_first_layer),
    *(encoder_and_decoder, two_embeddings_of_one_table),
]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_odd_model(group: dist.ProcessGroup, make: Callable[[Any], Odd]) -> None:
    torch.manual_seed(0)
    assert train_both(make(group), lambda step: batches(3, seed=step), steps=2) == []
