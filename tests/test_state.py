"""State around a step: buffers, gradients that need no op, hidden parameters, attributes that Python reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import Made, batches, eager_step, rows, toy, train_both

import fxoverlap as fxo


def ema_read_by_backward(m: Made, x: Tensor) -> Tensor:
    y = m.linear(x)
    m.mean.mul_(0.9).add_(y.detach().mean(0))
    return (y * m.mean).sum()


def old_value_read_by_backward(m: Made, x: Tensor) -> Tensor:
    loss = (m.linear(x) * m.mean.clone()).sum()
    m.mean.add_(1.0)
    return loss


@pytest.mark.parametrize("loss", [ema_read_by_backward, old_value_read_by_backward])
def test_buffers_that_forward_writes_and_backward_reads(loss) -> None:
    assert train_both(Made(loss), rows) == []


def test_gradient_that_is_the_tangent_itself_is_delivered() -> None:
    assert train_both(Made(lambda m, x: m.linear(x).sum() + m.p), rows) == []


def test_plain_attribute_belongs_to_the_variant() -> None:
    model = Made(lambda m, x: m.linear(x).sum() * m.factor)
    overlapped = fxo.transform(model)
    for factor in (2.0, 3.0):
        model.factor = factor
        assert torch.equal(overlapped.step(rows(0)).losses[0], model(*rows(0)[0]).detach())
    assert overlapped.report().variants == 2


def hidden_parameter() -> nn.Module:
    model = Made(lambda m, x: (m.linear(x) * m.hidden[0]).sum())
    model.hidden = [nn.Parameter(torch.ones(4))]  # type: ignore[assignment]
    return model


def trained_buffer() -> nn.Module:
    model = Made(lambda m, x: (m.linear(x) * m.mean).sum())
    model.mean.requires_grad_()
    return model


@pytest.mark.parametrize(
    ("make", "microbatch", "words"),
    [
        (hidden_parameter, rows(0)[0], "no registered parameter.*nn.ParameterList"),
        (trained_buffer, rows(0)[0], "Buffer mean requires a gradient"),
        (lambda: Made(lambda m, x: m.linear(x.add_(1.0)).sum()), rows(0)[0], r"writes in place to args\[0\]"),
        (lambda: Made(lambda m, x: m.linear(x).sum()), (torch.ones(3, 4).to_sparse(),), r"args\[0\] is .*dense"),
        (
            lambda: Made(lambda m, x: m.linear(x).sum()),
            (torch.ones(3, 4, requires_grad=True) * 2,),
            r"args\[0\] is .*expected a leaf",
        ),
        (lambda: Made(lambda m, x: m.linear(x["x"]).sum()), (object(),), r"args\[0\] is a object, expected a tensor"),
    ],
)
def test_state_that_cannot_be_followed_is_refused_by_name(make, microbatch, words) -> None:
    with pytest.raises(fxo.UnsupportedError, match=words):
        fxo.transform(make(), example_inputs=microbatch)


def test_failed_step_takes_gradients_back_and_the_next_one_is_right(group, monkeypatch) -> None:
    model = toy("[*E]", group)
    overlapped = fxo.transform(model, example_inputs=batches(1)[0])
    programs = overlapped._planner.prepare(list(overlapped._planner.latest()) * 2)
    last = programs[1].program.operations[-1]

    def fails(arguments: list[Any]) -> None:
        raise RuntimeError("out of memory")

    object.__setattr__(last, "call", fails)
    with pytest.raises(
        fxo.StepError, match=r"pre_process.W \(phase W\) of microbatch 0 failed.*out of memory"
    ) as caught:
        overlapped.step(batches(3))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert [p.grad for p in model.parameters()] == [None] * len(list(model.parameters()))
    again = fxo.transform(model)
    losses = [loss.clone() for loss in again.step(batches(2)).losses]
    model.zero_grad()
    assert all(map(torch.equal, losses, eager_step(model, batches(2))))
