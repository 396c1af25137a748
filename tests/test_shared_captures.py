"""A capture is shared by models that are alike, and by no others; it gives what a capture of their own gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import shared_captures
import torch
from torch import nn
from toys import Made, batches, rows, same_bits, toy, train_both

import fxoverlap as fxo


def squares(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (m.linear(x) * m.factor).square().sum()


def cubes(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (m.linear(x) * m.factor).pow(3).sum()


def small(loss: Callable[..., Any] = squares, factor: Any = 2.0, **more: Any) -> Made:
    return Made(loss, factor=factor, **more)


def frozen() -> Made:
    model = small()
    model.linear.bias.requires_grad_(False)
    return model


def tied(name: str) -> Made:
    """Two parameters, one of which has another name."""
    a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 2.0))
    return Made(of_three, a=a, b=b, c={"a": a, "b": b}[name])


def of_three(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.a + m.b * m.c).sum()


def hooked() -> Made:
    model = small()
    model.linear.register_forward_hook(lambda module, args, out: out * 2)
    return model


OTHERS: dict[str, Callable[[], Made]] = {
    "another function": lambda: small(cubes),
    "another function each time": lambda: small(lambda m, x: squares(m, x)),
    "another value": lambda: small(factor=3.0),
    "another type of value": lambda: small(factor=2),
    "another dtype": lambda: small().double(),
    "another mode": lambda: small().eval(),
    "a frozen parameter": frozen,
    "one more parameter": lambda: small(q=nn.Parameter(torch.ones(4))),
    "a module of another class": lambda: small(inner=nn.Identity()),
    "a hook": hooked,
    "a tensor that is not registered": lambda: small(held=[torch.ones(4)]),
}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were captured in the test; none was before."""
    made: list[nn.Module] = []
    capture = shared_captures.capture
    monkeypatch.setattr(shared_captures, "_known", [])
    monkeypatch.setattr(shared_captures, "capture", lambda model, *how: made.append(model) or capture(model, *how))
    return made


def given(model: nn.Module, size: int = 3) -> list[tuple]:
    dtype = next(model.parameters()).dtype
    return [(x.to(dtype),) for (x,) in rows(0, count=2, size=size)]


def losses(model: nn.Module, size: int = 3) -> list[torch.Tensor]:
    config = fxo.OverlapConfig(hooks="trace")
    return fxo.transform(model, config).step(given(model, size)).losses


def test_models_that_are_alike_share_one(captures: list[nn.Module]) -> None:
    with shared_captures.shared_captures():
        first = losses(small())
        other = small()
        nn.init.ones_(other.linear.weight)
        assert not same_bits(first[0], losses(other)[0])
        assert train_both(small(), lambda step: rows(step), fxo.OverlapConfig(hooks="trace"), steps=2) == []
    assert len(captures) == 1
    losses(small())
    assert len(captures) == 1, "outside of the block it is the product's own"


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_differ_do_not(name: str, captures: list[nn.Module]) -> None:
    with shared_captures.shared_captures():
        found = [losses(make()) for make in (small, OTHERS[name], small)]
        assert len(captures) == 2
        assert same_bits(found[0][0], found[2][0])
    assert same_bits(losses(OTHERS[name]())[0], found[1][0])


def test_models_that_tie_other_parameters_do_not(captures: list[nn.Module]) -> None:
    with shared_captures.shared_captures():
        for name in "ab":
            assert train_both(tied(name), rows, steps=1) == []
    assert len(captures) == 2


def test_other_inputs_and_settings_are_captured(captures: list[nn.Module]) -> None:
    with shared_captures.shared_captures():
        losses(small())
        losses(small(), size=5)
        with torch.autocast("cpu", torch.bfloat16):
            losses(small())
    assert len(captures) == 3


def test_passes_do_not_change_what_is_kept(captures: list[nn.Module]) -> None:
    """A replay, and a plan without W nodes, come in between."""
    texts: list[str] = []
    configs: list[dict[str, Any]] = [
        {},
        {"recompute": fxo.Recompute("uniform")},
        {"schedule": "megatron", "delay_wgrad": False},
        {},
    ]
    with shared_captures.shared_captures():
        for config in configs:
            overlapped = fxo.transform(toy("[*E]"), fxo.OverlapConfig(**config), example_inputs=batches(1)[0])
            texts.append(overlapped.golden())
            assert train_both(overlapped, lambda step: batches(2, seed=step), steps=1) == []
    assert len(captures) == 1
    alone = fxo.transform(toy("[*E]"), example_inputs=batches(1)[0]).golden()
    assert texts[0] == texts[-1] == alone and len(set(texts)) == 3
