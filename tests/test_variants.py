"""What can change between steps is seen: it leads to a new capture, and what was there before to the old one.

What a step does not depend on leads to none. The number of captures is bounded, and the error names what varies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from test_bad_input import untouched
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import Made, differences, eager_step, rows, same_bits

import fxoverlap as fxo

Change = Callable[[Any], Any]


def same_step(eager: nn.Module, overlapped: fxo.OverlappedModel, microbatches: list[Any]) -> None:
    """One more step of both, from the same seed, gives the same."""
    for model in (eager, overlapped.module):
        model.zero_grad()
    torch.manual_seed(0)
    losses = eager_step(eager, microbatches)
    torch.manual_seed(0)
    ours = overlapped.step(microbatches).losses
    assert [same_bits(a, b) for a, b in zip(losses, ours, strict=True)] == [True] * len(losses)
    assert differences(eager, overlapped.module) == []


def replace_weight(m: Any) -> None:
    m.kept = (m.linear.weight,)
    m.linear.weight = nn.Parameter(torch.full((4, 4), 0.3))


def put_weight_back(m: Any) -> None:
    m.linear.weight = m.kept[0]
    del m.kept


def set_to(name: str, value: Any) -> Change:
    def change(m: Any) -> None:
        *owner, attribute = name.split(".")
        setattr(m.get_submodule(".".join(owner)), attribute, value)

    return change


def attention(m: Any, x: Tensor) -> Tensor:
    q = m.linear(x.repeat(8, 1)).view(1, 2, -1, 4)
    return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()


TABLES: dict[str, tuple[Callable[..., Any], dict[str, Callable[[], Any]], Change, Change]] = {
    "train and eval": (
        lambda m, x: m.norm(m.drop(m.linear(x))).square().sum(),
        {"norm": lambda: nn.BatchNorm1d(4), "drop": nn.Dropout},
        lambda m: m.eval(),
        lambda m: m.train(),
    ),
    "mode of one module": (
        lambda m, x: m.drop(m.linear(x)).sum(),
        {"drop": nn.Dropout},
        lambda m: m.drop.eval(),
        lambda m: m.drop.train(),
    ),
    "requires_grad": (
        lambda m, x: m.linear(x).square().sum(),
        {},
        lambda m: m.linear.weight.requires_grad_(False),
        lambda m: m.linear.weight.requires_grad_(True),
    ),
    "replaced parameter": (lambda m, x: m.linear(x).square().sum(), {}, replace_weight, put_weight_back),
    "strides of a parameter": (
        lambda m, x: (x @ m.linear.weight.reshape(-1)[:4] * m.linear.weight.sum()).sum(),
        {},
        lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.t().contiguous().t()),
        lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.contiguous()),
    ),
    "plain attribute": (
        lambda m, x: m.linear(x).sum() * m.factor,
        {"factor": lambda: 2.0},
        set_to("factor", 3.0),
        set_to("factor", 2.0),
    ),
    "attribute that becomes a tensor": (
        lambda m, x: m.linear(x).sum() if m.bias is None else (m.linear(x) + m.bias).square().sum(),
        {"bias": lambda: None},
        set_to("bias", torch.ones(4)),
        set_to("bias", None),
    ),
    "list": (
        lambda m, x: m.linear(x).sum() * sum(m.factors),
        {"factors": lambda: [1.0, 2.0]},
        lambda m: m.factors.append(0.5),
        lambda m: m.factors.pop(),
    ),
    "nested containers": (
        lambda m, x: m.linear(x).sum() * m.options["scale"][0],
        {"options": lambda: {"scale": [2.0], "names": {"a"}}},
        lambda m: m.options["scale"].insert(0, 3.0),
        lambda m: m.options["scale"].pop(0),
    ),
    "function": (
        lambda m, x: m.activation(m.linear(x)).sum(),
        {"activation": lambda: torch.tanh},
        set_to("activation", torch.sin),
        set_to("activation", torch.tanh),
    ),
    "forward of a module": (
        lambda m, x: (m.linear(x) * m.p).square().sum(),
        {},
        lambda m: setattr(m.linear, "forward", torch.tanh),
        lambda m: delattr(m.linear, "forward"),
    ),
    "module": (
        lambda m, x: m.act(m.linear(x)).sum(),
        {"act": nn.Tanh},
        set_to("act", nn.SiLU()),
        set_to("act", nn.Tanh()),
    ),
    "default dtype": (
        lambda m, x: (m.linear(x) * torch.full((4,), 0.1)).sum(),
        {},
        lambda m: torch.set_default_dtype(torch.float64),
        lambda m: torch.set_default_dtype(torch.float32),
    ),
    "deterministic algorithms": (
        lambda m, x: m.linear(x).sum() * (2 if torch.are_deterministic_algorithms_enabled() else 1),
        {},
        lambda m: torch.use_deterministic_algorithms(True),
        lambda m: torch.use_deterministic_algorithms(False),
    ),
}
"""The loss, attributes of the model, a change, and how to take it back."""


@pytest.mark.parametrize("name", TABLES)
def test_change_and_back(name: str) -> None:
    loss, attributes, change, back = TABLES[name]
    model = Made(loss, **{name: make() for name, make in attributes.items()})
    microbatches = rows(0)
    eager, overlapped = copy.deepcopy(model), fxo.transform(model)
    try:
        for variants, edit in ((1, lambda m: None), (2, change), (2, back), (2, lambda m: None)):
            for each in (eager, model):
                edit(each)
            same_step(eager, overlapped, microbatches)
            assert overlapped.report().variants == variants
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


AMBIENT: dict[str, tuple[Callable[..., Any], AbstractContextManager[Any]]] = {
    "autocast": (lambda m, x: m.linear(x).float().square().sum(), torch.autocast("cpu", torch.bfloat16)),
    "autocast to another dtype": (
        lambda m, x: m.linear(x).float().square().sum(),
        torch.autocast("cpu", torch.float16),
    ),
    "attention kernel": (attention, sdpa_kernel(SDPBackend.MATH)),
}


@pytest.mark.parametrize("name", AMBIENT)
def test_ambient_context(name: str) -> None:
    loss, context = AMBIENT[name]
    model = Made(loss)
    eager, overlapped = copy.deepcopy(model), fxo.transform(model)
    for variants, around in ((1, nullcontext()), (2, context), (2, nullcontext())):
        with around:
            same_step(eager, overlapped, rows(0))
        assert overlapped.report().variants == variants


def test_replaced_tensor_that_is_no_buffer() -> None:
    model = Made(lambda m, x: (m.linear(x) * m.factor * m.factors[0]).sum())
    model.factor, model.factors = torch.ones(4), [torch.ones(4)]
    overlapped = fxo.transform(model)
    for variants, value in enumerate((1.0, 2.0, 3.0), 1):
        if value == 2.0:
            model.factor = torch.full((4,), value)
        if value == 3.0:
            model.factors[0] = torch.full((4,), value)
        loss = overlapped.step(rows(0)).losses[0]
        assert torch.equal(loss, model(*rows(0)[0]).detach())
        assert overlapped.report().variants == variants
    model.factor.mul_(2.0)
    assert torch.equal(overlapped.step(rows(0)).losses[0], model(*rows(0)[0]).detach())
    assert overlapped.report().variants == 3


def test_changes_that_matter_to_no_capture() -> None:
    """Values of parameters and buffers, and tensors that forward leaves on the modules when it is called in eager."""

    def loss(m: Any, x: Tensor) -> Tensor:
        m.last = m.linear(x)
        return m.last.square().sum()

    model = Made(loss)
    overlapped = fxo.transform(model, fxo.OverlapConfig(dynamic=False))
    eager = Made(loss)
    for step in range(3):
        for each in (eager, model):
            each(*rows(step)[0])
        same_step(eager, overlapped, rows(step))
        for each in (eager, model):
            with torch.no_grad():
                each.linear.weight.mul_(1.1)
                each.mean.add_(1.0)
    assert overlapped.report().variants == 1


VARYING: dict[str, tuple[Change, tuple[str, ...]]] = {
    "attribute": (set_to("factor", 3.0), ("attribute factor varies", "seen 1.0", "now 3.0", "Keep it fixed")),
    "attribute of a submodule": (
        set_to("linear.in_features", 5),
        ("attribute linear.in_features varies", "seen 4", "now 5"),
    ),
    "mode": (lambda m: m.linear.eval(), ("attribute linear.training varies", "seen True", "now False")),
    "requires_grad": (lambda m: m.p.requires_grad_(False), ("parameter p varies", "True", "False")),
    "default dtype": (
        lambda m: torch.set_default_dtype(torch.float64),
        ("the default dtype varies", "torch.float32", "torch.float64"),
    ),
    "tensor": (set_to("table", torch.ones(4)), ("a tensor that a module holds",)),
}


@pytest.mark.parametrize("name", VARYING)
def test_beyond_the_bound_the_error_names_what_varies(name: str) -> None:
    change, parts = VARYING[name]
    model = Made(lambda m, x: (m.linear(x) * m.table).sum() * m.factor, factor=1.0)
    model.table = torch.ones(4)
    overlapped = fxo.transform(model, fxo.OverlapConfig(max_variants=1))
    microbatches = rows(0)
    overlapped.step(microbatches)
    change(model)
    try:
        with untouched(model), pytest.raises(fxo.UnsupportedError) as caught:
            overlapped.step(microbatches)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [part for part in (*parts, "1 variants", "max_variants") if part not in str(caught.value)] == []


@pytest.mark.parametrize("change", [replace_weight, lambda m: setattr(m, "mean", torch.ones(4))])
def test_captures_for_tensors_that_are_gone_make_room(change: Change) -> None:
    """They could not be used again, and would keep the old tensors alive."""
    overlapped = fxo.transform(Made(lambda m, x: (m.linear(x) * m.mean).sum()), fxo.OverlapConfig(max_variants=2))
    eager = copy.deepcopy(overlapped.module)
    for step in range(5):
        for each in (eager, overlapped.module):
            change(each)
        same_step(eager, overlapped, rows(step))
        assert overlapped.report().variants <= 2


def test_plans_of_a_capture_that_is_gone_are_not_kept() -> None:
    """They can still be asked for while it is the latest one, here because the next capture fails."""
    model = Made(lambda m, x: m.linear(x).sum() * m.factor, factor=1.0)
    overlapped = fxo.transform(model, fxo.OverlapConfig(max_variants=1))
    overlapped.step(rows(0))
    replace_weight(overlapped.module)
    overlapped.module.factor = torch.ones((), requires_grad=True)  # trained, but no parameter
    with pytest.raises(fxo.UnsupportedError, match="a trained tensor"):
        overlapped.step(rows(0))
    planner = overlapped._planner
    assert planner.variants == 0 and overlapped.plan("FB").kind == "FB"
    for _ in range(2):
        overlapped.module.factor = 2.0
        replace_weight(overlapped.module)
        overlapped.step(rows(0))
    assert {variant for _, met in planner._built for _, variant in met} == set(planner._variants.values())


def test_what_a_call_leaves_in_attributes_makes_no_variant() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        m.shapes = [x.shape[0]]
        return m.linear(x).sum()

    overlapped = fxo.transform(Made(loss, calls=0, shapes=[]), fxo.OverlapConfig(max_variants=1))
    for size in range(1, 4):
        overlapped(torch.ones(size, 4))
        overlapped.step(rows(0))
    assert overlapped.report().variants == 1 and overlapped.report().assigned_attributes == ("calls", "shapes")


def test_python_leaf_beyond_the_bound() -> None:
    overlapped = fxo.transform(Made(lambda m, x, k: m.linear(x).sum() * k), fxo.OverlapConfig(max_variants=2))
    overlapped.step([(torch.ones(3, 4), k) for k in (1, 2, 1, 2)])
    with pytest.raises(fxo.UnsupportedError, match=r"args\[1\] varies: seen .*'1'.*'2'.* now .*'3'.*bucketing"):
        overlapped.step([(torch.ones(3, 4), 3)])
    assert overlapped.report().variants == 2


def test_a_hook_that_is_registered_after_the_first_step_is_refused() -> None:
    model = Made(lambda m, x: m.linear(x).sum())
    overlapped = fxo.transform(model)
    overlapped.step(rows(0))
    handle = model.linear.register_forward_hook(lambda module, args, output: output * 2)
    with untouched(model), pytest.raises(fxo.UnsupportedError, match=r"'linear' has .*hooks"):
        overlapped.step(rows(0))
    handle.remove()
    overlapped.step(rows(0))
    assert overlapped.report().variants == 1
