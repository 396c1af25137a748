"""What cannot be done is refused: the error that the interface names, a message that says what is wrong and how to mend
it, and a model, its gradients and the generator as they were before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from toys import batches, differences, toy, train_both

import fxoverlap as fxo
from fxoverlap.schedule.policies import Order, sequential


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Check that the block leaves values, gradients, attributes and the generator alone, and that the model runs on."""
    before = copy.deepcopy(model)
    for copied, param in zip(before.parameters(), model.parameters(), strict=True):
        copied.grad = None if param.grad is None else param.grad.clone()
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    gradients = [param.grad for param in model.parameters()]
    generator = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), generator)
    assert differences(before, model) == []
    assert all(param.grad is grad for param, grad in zip(model.parameters(), gradients, strict=True))
    after = {name: dict(module.__dict__) for name, module in model.named_modules()}
    assert {n: {k: id(v) for k, v in each.items()} for n, each in after.items()} == {
        n: {k: id(v) for k, v in each.items()} for n, each in attributes.items()
    }


def check(message: str, parts: Sequence[str]) -> None:
    """Every part stands in the message."""
    assert [part for part in parts if part not in message] == [], message


# --- models that cannot be traced or have no loss ------------------------------------------------------------------


class Tail(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, y: Tensor) -> Any:
        return self.function(y)


class Model(nn.Module):
    """Draws random numbers, counts its calls in a buffer, and ends with a function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tail = Tail(function)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        self.calls.add_(1)
        self.last = x
        return self.tail(F.dropout(self.linear(x), 0.5) * scale)


X = torch.ones(3, 4)
NO_LOSS = ("The model's forward must return a scalar", "'loss'", "Reduce it")
TAIL = ("'tail'", "test_bad_input.py:")
BRANCH = (*TAIL, "contents of a tensor", "torch.where or torch.cond")
FORWARDS: dict[str, tuple[Callable[[Tensor], Any], type[Exception], tuple[str, ...]]] = {
    "vector": (lambda y: y.sum(0), fxo.UnsupportedError, (*NO_LOSS, "shape (4,)")),
    "one element": (lambda y: y.sum().view(1), fxo.UnsupportedError, (*NO_LOSS, "shape (1,)")),
    "None": (lambda y: None, fxo.UnsupportedError, (*NO_LOSS, "NoneType")),
    "number": (lambda y: 1.0, fxo.UnsupportedError, (*NO_LOSS, "a float")),
    "list": (lambda y: [y.sum()], fxo.UnsupportedError, (*NO_LOSS, "a list")),
    "empty tuple": (lambda y: (), fxo.UnsupportedError, (*NO_LOSS, "a tuple")),
    "tuple": (lambda y: (y, y.sum()), fxo.UnsupportedError, (*NO_LOSS, "shape (3, 4)")),
    "dict": (lambda y: {"logits": y}, fxo.UnsupportedError, ("keys ['logits']", "under the key 'loss'")),
    "dict of vector": (lambda y: {"loss": y}, fxo.UnsupportedError, (*NO_LOSS, "shape (3, 4)")),
    "detached": (lambda y: y.sum().detach(), fxo.UnsupportedError, ("does not require a gradient", "requires_grad")),
    "branch": (lambda y: y.sum() if y.sum() > 0 else -y.sum(), fxo.CaptureError, BRANCH),
    "item": (lambda y: y.sum() * (2 if y.sum().item() > 0 else 3), fxo.CaptureError, BRANCH),
    "range": (lambda y: sum(y.sum() for _ in range(int((y > 0).sum()))), fxo.CaptureError, BRANCH),
    "numpy": (lambda y: y.sum() * float(y.detach().numpy().sum()), fxo.CaptureError, (*TAIL, "numpy", "tensor ops")),
    "error": (lambda y: y.no_such_attribute, fxo.CaptureError, (*TAIL, "no_such_attribute")),
}


@pytest.mark.parametrize("first_step", [False, True], ids=["transform", "step"])
@pytest.mark.parametrize("name", FORWARDS)
def test_forward(name: str, first_step: bool) -> None:
    function, error, parts = FORWARDS[name]
    model = Model(function)
    model.linear.weight.grad = torch.ones(4, 4)
    with untouched(model), pytest.raises(error) as caught:
        if first_step:
            fxo.transform(model).step([(X,)])
        else:
            fxo.transform(model, example_inputs=(X,))
    assert type(caught.value) is error
    check(str(caught.value), parts)
    if name != "error":
        model(X)


def test_b91_layer_that_needs_real_values_is_refused_by_transform() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.detach().numpy().std())

    model = toy("*-")
    model.layers[1] = Looks(16, 16)
    with untouched(model), pytest.raises(fxo.CaptureError) as caught:
        fxo.transform(model, example_inputs=batches(1)[0])
    check(str(caught.value), ["'layers.1'", "test_bad_input.py:", "numpy", "Replace what needs real values"])
    model(*batches(1)[0]).backward()


def test_a_refusal_does_not_spoil_the_next_step() -> None:
    sign = [False]
    model = Model(lambda y: (y.sum() if y.sum() > 0 else -y.sum()) if sign[0] else y.sum())
    overlapped = fxo.transform(model)
    sign[0] = True
    with untouched(model), pytest.raises(fxo.CaptureError):
        overlapped.step([(X,)])
    sign[0] = False
    assert train_both(overlapped, lambda step: [(X,), (2 * X,)]) == []


@pytest.mark.parametrize("traced", [False, True])
def test_a_refusal_of_one_microbatch_runs_none(traced: bool) -> None:
    """What was there before the step is there behind it, though other microbatches could have run."""
    model = Model(lambda y: y.sum())
    overlapped = fxo.transform(model, example_inputs=(X,) if traced else None)
    model.linear.weight.grad = torch.ones(4, 4)
    leaf = X.clone().requires_grad_()
    with (
        untouched(model),
        pytest.raises(fxo.UnsupportedError, match=r"args\[0\] is of type object, .*make a tensor of an array"),
    ):
        overlapped.step([(leaf,), (object(),), (X,)])
    assert leaf.grad is None
    model.zero_grad()
    assert train_both(overlapped, lambda step: [(X,), (2 * X,)]) == []


ARGUMENTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "missing": ((), ("'x'", "microbatch", "example_inputs is one")),
    "missing by keyword": ({"scale": 2.0}, ("'x'", "microbatch")),
    "one too many": ((X, 1.0, 2.0), ("positional argument", "microbatch")),
    "extra keyword": (fxo.Microbatch((X,), {"mask": X}), ("'mask'", "microbatch")),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_do_not_fit_the_forward(name: str) -> None:
    given, parts = ARGUMENTS[name]
    overlapped = fxo.transform(Model(lambda y: y.sum()), example_inputs=(X,))
    with untouched(overlapped.module), pytest.raises(fxo.CaptureError) as caught:
        overlapped.step([(X,), given])
    check(str(caught.value), parts)
    assert "real values" not in str(caught.value)  # the remedy of another fault
    assert train_both(overlapped, lambda step: [(X,)]) == []


# --- arguments of the interface ------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[], ()], ids=["list", "tuple"])
def test_no_microbatch(given: Sequence[Any]) -> None:
    overlapped = fxo.transform(Model(lambda y: y.sum()))
    with untouched(overlapped.module), pytest.raises(ValueError, match="no microbatch; expected a list") as caught:
        overlapped.step(given)
    assert type(caught.value) is fxo.ConfigError


@pytest.mark.parametrize(
    "given", [X, {"x": X}, fxo.Microbatch((X,)), "x", None, 3, iter([X])], ids=lambda v: str(type(v))
)
def test_something_else_than_a_list_of_microbatches(given: Any) -> None:
    overlapped = fxo.transform(Model(lambda y: y.sum()))
    with untouched(overlapped.module), pytest.raises(fxo.ConfigError) as caught:
        overlapped.step(given)
    remedy = "step(list(...))" if isinstance(given, Iterator) else "step([microbatch])"
    check(str(caught.value), [f"a {type(given).__name__}", "list of microbatches", remedy])


@pytest.mark.parametrize("given", [lambda x: x, None, Model, torch.ones(1)], ids=lambda v: type(v).__name__)
def test_model_that_is_no_module(given: Any) -> None:
    with pytest.raises(fxo.ConfigError, match=f"model is a {type(given).__name__}, expected an nn.Module"):
        fxo.transform(given)


@pytest.mark.parametrize("given", [{}, "auto", 1, fxo.OverlapConfig], ids=repr)
def test_config_that_is_none(given: Any) -> None:
    with pytest.raises(fxo.ConfigError, match=f"config is a {type(given).__name__}, expected an OverlapConfig"):
        fxo.transform(Model(lambda y: y.sum()), given)


FIELDS: list[tuple[str, Any, str]] = [
    *(("pattern", value, "*") for value in ("", "X", "[*", "*]", "[]", "[E*]", "[[*]]", 5)),
    *(("layers", value, "FQN glob") for value in ("", 5, None, [5], [""], nn.Linear, "layers.", ".*")),
    *(("mtp_layers", value, "FQN glob") for value in ("", 5, None, [5], [""], ["mtp..0"])),
    *(("schedule", value, "auto, megatron, sequential") for value in ("fast", None, 1, ["auto"])),
    *(("delay_wgrad", value, "True or False") for value in (None, 1, "yes")),
    *(("recompute", value, "Recompute") for value in ("uniform", True, 1)),
    *(("early_release", value, "True or False") for value in (None, 1, "yes")),
    *(("ramp", value, "none, pair") for value in ("both", None, True)),
    *(("memory_budget", value, "positive integer") for value in (0, -1, 1.5, "1GB", True)),
    *(("imbalance", value, "at least 1") for value in (0.5, None, "2", True, float("nan"))),
    *(("compile", value, "inductor") for value in ("eager", True, 1)),
    *(("grad_scale", value, "finite number") for value in (None, "1", True, float("nan"), float("inf"))),
    *(("grad_scale", value, "0-dim") for value in (torch.ones(2), torch.tensor(1))),
    *(("opaque", value, "module types or FQN globs") for value in ("attn", None, 5, (5,), (nn.Linear(1, 1),))),
    *(("hooks", value, "refuse, trace") for value in ("keep", None, True)),
    *(("dynamic", value, "False") for value in (True, None, "yes", 0)),
    *(("max_variants", value, "positive integer") for value in (0, -1, 2.0, True, None)),
    *(("process_group", value, "group") for value in (5, nn.Linear(1, 1))),
    *(("passes", value, "stage") for value in (5, [5], [len])),
]


@pytest.mark.parametrize(("field", "value", "allowed"), FIELDS, ids=lambda value: repr(value)[:20])
def test_config_field(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as caught:
        fxo.OverlapConfig(**{field: value})
    assert type(caught.value) is fxo.ConfigError
    check(str(caught.value), [f"OverlapConfig.{field}", allowed])
    assert repr(value) in str(caught.value) or isinstance(value, list)


RECOMPUTE: list[tuple[dict[str, Any], str, str]] = [
    *(({"method": value}, "method", "uniform, block, selective") for value in ("full", None, ["uniform"])),
    *(({"method": "block", "num_layers": value}, "num_layers", "positive integer") for value in (0, 1.0, True, None)),
    *(({"method": "selective", "modules": value}, "modules", "FQN glob") for value in ((), "attn", (5,), 5)),
    *(
        ({"method": "uniform", "keep": value}, "keep", "dispatch, experts, combine")
        for value in ("dispatch", ("x",), 5)
    ),
]


@pytest.mark.parametrize(("fields", "field", "allowed"), RECOMPUTE, ids=repr)
def test_recompute_field(fields: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(fxo.ConfigError) as caught:
        fxo.Recompute(**fields)
    check(str(caught.value), [f"Recompute.{field}", allowed])


@pytest.mark.parametrize(
    ("fields", "field", "allowed"),
    [
        ({"args": [X]}, "args", "a tuple"),
        ({"args": X}, "args", "a tuple"),
        ({"kwargs": [X]}, "kwargs", "names as keys"),
        ({"kwargs": {1: X}}, "kwargs", "names as keys"),
        ({"grad_scale": "2"}, "grad_scale", "finite number"),
        ({"grad_scale": torch.ones(1)}, "grad_scale", "0-dim"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_microbatch_field(fields: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(fxo.ConfigError) as caught:
        fxo.Microbatch(**fields)
    check(str(caught.value), [f"Microbatch.{field}", allowed])


def test_plans_that_there_are_not() -> None:
    overlapped = fxo.transform(Model(lambda y: y.sum()))
    for ask in (
        lambda: overlapped.plan("FB"),
        lambda: overlapped.fused_graph("F"),
        overlapped.golden,
        overlapped.report,
    ):
        with pytest.raises(fxo.UnsupportedError, match=r"Nothing has been traced yet\. Pass example_inputs"):
            ask()
    overlapped.step([(X,)])
    for kind in ("X", "", "fb", None):
        with pytest.raises(fxo.ConfigError, match=rf"kind is {kind!r}; allowed.*F, FB, B"):
            overlapped.plan(kind)


# --- layers and patterns -------------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "glob matches nothing": (
        "[*E]",
        {"pattern": "[*E]", "layers": "blocks.*"},
        ("'[*E]'", "'blocks.*'", "Set OverlapConfig.layers"),
    ),
    "pattern too short": ("[*E]", {"pattern": "E"}, ("'E' has 1", "runs 2: layers.0, layers.1", "one symbol for each")),
    "pattern too long": ("[*E]", {"pattern": "[*E]-"}, ("'[*E]-' has 3", "runs 2", "one symbol for each layer")),
    "dense symbol for MoE": ("[*E]", {"pattern": "*-"}, ("'*-'", "'-' for layer layers.1", "Write 'E'")),
    "MoE symbol for dense": ("[*E]-", {"pattern": "[*E]E"}, ("'[*E]E'", "'E' for layers.2", "Write '-'")),
    "glob matches half": ("[*E]", {"layers": "layers.0"}, ("'layers.1'", "['layers.0']", "Set OverlapConfig.layers")),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_pattern(name: str, group: dist.ProcessGroup) -> None:
    pattern, fields, parts = LAYERS[name]
    model = toy(pattern, group)
    with untouched(model), pytest.raises(fxo.UnsupportedError) as caught:
        fxo.transform(model, fxo.OverlapConfig(**fields), example_inputs=batches(1)[0])
    check(str(caught.value), parts)
    assert model(*batches(1)[0]).isfinite()


# --- hooks ---------------------------------------------------------------------------------------------------------

HOOKS: dict[str, Callable[..., Any]] = {
    "register_forward_pre_hook": lambda module, args: (args[0] * 2,),
    "register_forward_hook": lambda module, args, output: output * 2,
    "register_full_backward_pre_hook": lambda module, grad_output: (grad_output[0] * 2,),
    "register_full_backward_hook": lambda module, grad_input, grad_output: (grad_input[0] * 2,),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_module_hooks(kind: str) -> None:
    model = toy("*-")
    getattr(model.layers[1], kind)(HOOKS[kind])
    with untouched(model), pytest.raises(fxo.UnsupportedError, match=r"'layers\.1' has .* hooks.*hooks=\"trace\""):
        fxo.transform(model, example_inputs=batches(1)[0])
    assert train_both(model, lambda step: batches(2, seed=step), fxo.OverlapConfig(hooks="trace")) == []


# --- too many variants ---------------------------------------------------------------------------------------------


def test_too_many_variants_name_what_varies_and_what_was_seen() -> None:
    overlapped = fxo.transform(toy("*-"), fxo.OverlapConfig(max_variants=2))
    overlapped.step([*batches(1, tokens=4), *batches(1, tokens=6)])
    with untouched(overlapped.module), pytest.raises(fxo.UnsupportedError) as caught:
        overlapped.step(batches(1, tokens=8))
    check(str(caught.value), ["args[0]", "(1, 4)", "(1, 6)", "(1, 8)", "bucketing", "max_variants in OverlapConfig"])
    overlapped.step([*batches(1, tokens=4), *batches(1, tokens=6)])


def test_dynamic_false_takes_one_shape() -> None:
    overlapped = fxo.transform(toy("*-"), fxo.OverlapConfig(dynamic=False))
    overlapped.step(batches(2, tokens=4))
    with untouched(overlapped.module), pytest.raises(fxo.UnsupportedError) as caught:
        overlapped.step(batches(1, tokens=8))
    check(str(caught.value), ["args[0]", "(1, 4)", "(1, 8)", 'dynamic="auto" in OverlapConfig'])
    overlapped.step(batches(2, tokens=4))


# --- policies ------------------------------------------------------------------------------------------------------

Edit = Callable[[Order], Any]


def without(order: Order, name: str) -> Order:
    return [entry for entry in order if entry[0].name != name]


def moved_to_front(order: Order, name: str) -> Order:
    return [entry for entry in order if entry[0].name == name] + without(order, name)


POLICIES: dict[str, tuple[str, Edit, tuple[str, ...]]] = {
    "unknown node": ("F", lambda o: [(replace(o[0][0], layer=7), "F"), *o[1:]], ("L7.pre_process.F", "no such node")),
    "node twice": ("F", lambda o: [*o, o[0]], ("pre_process.F more than once", "place every node once")),
    "F left out": ("F", lambda o: o[:-1], ("left out post_process.F", "only W nodes")),
    "B left out": ("B", lambda o: without(o, "post_process.B"), ("left out post_process.B", "only W nodes")),
    "other microbatch": ("F", lambda o: [(n, "B") for n, _ in o], ("pre_process.F for microbatch 'B'", "no such node")),
    "no microbatch": ("F", lambda o: [(n, "G") for n, _ in o], ("pre_process.F for microbatch 'G'", "no such node")),
    "names": ("F", lambda o: [(n.name, mb) for n, mb in o], ("'pre_process.F'", "pairs of a ScheduleNode")),
    "no pairs": ("F", lambda o: [n for n, _ in o], ("expected pairs of a ScheduleNode",)),
    "nothing": ("F", lambda o: None, ("policy", "pairs of a ScheduleNode")),
    "error": ("F", lambda o: o[99], ("policy policy raised IndexError", "policy(f, b, costs, config)", "b is None")),
    "F too early": (
        "F",
        lambda o: moved_to_front(o, "post_process.F"),
        ("'F'", "post_process.F reads", "L1.pre_dispatch.F makes later", "L1.pre_dispatch.F before post_process.F"),
    ),
    "B too early": (
        "B",
        lambda o: moved_to_front(o, "L0.pre_dispatch.B"),
        (
            "'B'",
            "L0.pre_dispatch.B reads",
            "L1.pre_dispatch.B makes later",
            "L1.pre_dispatch.B before L0.pre_dispatch.B",
        ),
    ),
    "W too early": (
        "B",
        lambda o: moved_to_front(o, "post_process.W"),
        ("'B'", "post_process.W reads", "post_process.B makes later", "post_process.B before post_process.W"),
    ),
}
"""The kind of plan whose order is changed, how, and what the message says."""


@pytest.mark.parametrize("name", POLICIES)
def test_policies(name: str) -> None:
    kind, edit, parts = POLICIES[name]

    def policy(f: fxo.ChunkGraph | None, b: fxo.ChunkGraph | None, costs: fxo.CostTable, config: Any) -> Any:
        order = sequential(f, b, costs, config)
        return edit(order) if kind == ("F" if b is None else "B" if f is None else "FB") else order

    model = toy("*-")
    with untouched(model), pytest.raises(fxo.UnsupportedError) as caught:
        fxo.transform(model, fxo.OverlapConfig(schedule=policy), example_inputs=batches(1)[0])
    check(str(caught.value), parts)
