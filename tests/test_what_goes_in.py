"""What models, microbatches and surroundings a transformation takes: each either works like eager or is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_bad_input import untouched
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from toys import Made, differences, eager_step, rows, same_bits, train_both

import fxoverlap as fxo


class Plain(nn.Module):
    """A model without functions among its attributes, which can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).square().sum()


# --- parameters ----------------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def of_mesh(tensor: Tensor) -> Tensor:
    return DTensor.from_local(tensor, init_device_mesh("cpu", (1,)), [Replicate()])


PARAMETERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DTensor": (
        lambda: Made(lambda m, x: m.linear(x).sum(), w=nn.Parameter(of_mesh(torch.ones(4)))),
        "w is a DTensor; only plain tensors.*before it is wrapped",
    ),
    "subclass": (
        lambda: Made(lambda m, x: m.linear(x).sum(), w=nn.Parameter(torch.ones(4).as_subclass(Subclass))),
        "w is a Subclass; only plain tensors.*before it is wrapped",
    ),
    "subclass of a buffer": (
        lambda: Made(lambda m, x: m.linear(x).sum(), w=nn.Buffer(torch.ones(4).as_subclass(Subclass))),
        "w is a Subclass; only plain tensors.*before it is wrapped",
    ),
    "sparse gradients": (
        lambda: Made(lambda m, x: m.embed(x.long()).sum(), embed=nn.Embedding(4, 4, sparse=True)),
        "'embed' makes sparse gradients.*sparse=False",
    ),
    "sparse gradients of a bag": (
        lambda: Made(lambda m, x: m.bag(x.long()).sum(), bag=nn.EmbeddingBag(4, 4, mode="sum", sparse=True)),
        "'bag' makes sparse gradients.*sparse=False",
    ),
    "lazy": (lambda: Made(lambda m, x: m.lazy(x).sum(), lazy=nn.LazyLinear(4)), "lazy.weight is not initialized.*once"),
    "sparse parameter": (
        lambda: Made(lambda m, x: (m.w @ m.linear(x)).sum(), w=nn.Parameter(torch.ones(4, 3).to_sparse())),
        r"w has the layout torch\.sparse_coo, expected a dense",
    ),
    "sparse buffer": (
        lambda: Made(lambda m, x: (m.w @ m.linear(x)).sum(), w=nn.Buffer(torch.ones(4, 3).to_sparse())),
        r"w has the layout torch\.sparse_coo, expected a dense",
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_that_are_refused(name: str, group: dist.ProcessGroup) -> None:
    make, words = PARAMETERS[name]
    model = make()
    for ask in (
        lambda: fxo.transform(model, example_inputs=(torch.ones(3, 4),)),
        lambda: fxo.transform(model).step(rows(0)),
    ):
        with pytest.raises(fxo.UnsupportedError, match=words):
            ask()
    assert all(p.grad is None for p in model.parameters())


# --- microbatches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_gradients_of_microbatch_tensors_are_accumulated(shared: bool) -> None:
    """Into `.grad`, in place where there is one; also if one tensor stands in all microbatches."""
    model = Made(lambda m, x, y: (m.linear(x) * y).square().sum())
    eager, overlapped = copy.deepcopy(model), fxo.transform(model)
    given, ours = ([tuple(t.clone().requires_grad_() for t in (*rows(i)[0],) * 2) for i in range(3)] for _ in range(2))
    if shared:
        given, ours = ([(each[0][0], y) for _, y in each] for each in (given, ours))
    for _ in range(2):
        eager_step(eager, given)
        overlapped.step(ours)
        for expected, found in zip(given, ours, strict=True):
            assert all(same_bits(a.grad, b.grad) for a, b in zip(expected, found, strict=True))
        kept = [x.grad for x, _ in ours]
    assert all(x.grad is grad for (x, _), grad in zip(ours, kept, strict=True))
    assert differences(eager, model) == []


def test_hooks_of_microbatch_tensors() -> None:
    overlapped = fxo.transform(Made(lambda m, x: m.linear(x).square().sum()))
    x = rows(0)[0][0].requires_grad_()
    seen: list[Tensor] = []
    x.register_hook(lambda gradient: seen.append(gradient.clone()))
    overlapped.step([(x,), (x,)])
    assert len(seen) == 2 and same_bits(x.grad, seen[0] + seen[1])


def test_microbatch_tensor_that_gets_no_gradient() -> None:
    overlapped = fxo.transform(Made(lambda m, x, y: m.linear(x).sum() + 0 * y.detach().sum()))
    x, y = (rows(i)[0][0].requires_grad_() for i in range(2))
    overlapped.step([(x, y)])
    assert x.grad is not None and y.grad is None


def test_a_second_differentiable_output_is_detached() -> None:
    model = Made(lambda m, x: {"loss": m.linear(x).sum(), "other": m.linear(x).sum() * m.p, "logits": m.linear(x)})
    eager, overlapped = copy.deepcopy(model), fxo.transform(model)
    result = overlapped.step(rows(0))
    assert not any(tensor.requires_grad for output in result.outputs for tensor in output.values())
    assert [same_bits(a["other"], eager(*x)["other"].detach()) for a, x in zip(result.outputs, rows(0), strict=True)]
    eager_step(eager, rows(0))
    assert differences(eager, model) == [] and model.p.grad is None


# --- Python in the model -------------------------------------------------------------------------------------------


@torch.compile(backend="eager")
def compiled_function(x: Tensor) -> Tensor:
    return x.sin() * 2


class CompiledMethod(Plain):
    @torch.compile(backend="eager")
    def body(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).sum()


def compiled_in_place(whole: bool) -> nn.Module:
    model = Plain()
    (model if whole else model.linear).compile(backend="eager")
    return model


@torch.compile(backend="eager")
def compiled_with_break(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.cos()


COMPILED: dict[str, Callable[[], nn.Module]] = {
    "function": lambda: Made(lambda m, x: compiled_function(m.linear(x)).sum()),
    "function with a graph break": lambda: Made(lambda m, x: compiled_with_break(m.linear(x)).sum()),
    "method": CompiledMethod,
    "module": lambda: Made(lambda m, x: m.part(x).sum(), part=torch.compile(nn.Linear(4, 4), backend="eager")),
    "module in place": lambda: compiled_in_place(False),
    "model in place": lambda: compiled_in_place(True),
    "inside forward": lambda: Made(lambda m, x: torch.compile(torch.sin, backend="eager")(m.linear(x)).sum()),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_parts_are_traced_through(name: str) -> None:
    model = COMPILED[name]()
    overlapped = fxo.transform(model)
    microbatches = rows(0)
    losses = overlapped.step(microbatches).losses
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert [same_bits(a, b) for a, b in zip(losses, eager_step(model, microbatches), strict=True)] == [True] * 3
    assert ours and all(same_bits(p.grad, ours[name]) for name, p in model.named_parameters() if p.grad is not None)


def test_compiled_parts_are_compiled_as_before_after_a_step() -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph

    part = torch.compile(nn.Linear(4, 4), backend=backend)
    model = Made(lambda m, x: m.part(x).sum(), part=part)
    fxo.transform(model).step(rows(0))
    assert calls == []
    model(*rows(0)[0])
    assert len(calls) == 1


def test_a_compiled_model_is_unwrapped() -> None:
    model = Plain()
    overlapped = fxo.transform(torch.compile(model, backend="eager"))
    assert overlapped.module is model and list(overlapped.state_dict()) == list(model.state_dict())
    assert train_both(overlapped, rows) == []


CALLS: list[str] = []


class Scaled(torch.autograd.Function):
    """x * factor, with a gradient that is none of x * factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        CALLS.append("forward")
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        CALLS.append("backward")
        return gradient * ctx.factor * ctx.saved_tensors[0].sign() * 3, None


def test_autograd_functions_are_traced_through() -> None:
    """Their Python runs while tracing only."""
    model = Made(lambda m, x: (Scaled.apply(m.linear(x), 2.0) + Scaled.apply(x * m.p, 0.5)).sum())
    overlapped = fxo.transform(model, example_inputs=rows(0)[0])
    CALLS.clear()
    overlapped.step(rows(0))
    assert CALLS == []
    model.zero_grad()
    assert train_both(overlapped, rows) == []


# --- scaling -------------------------------------------------------------------------------------------------------


def test_grad_scaler() -> None:
    """Scale, step, update as with eager: one step overflows, is skipped, and halves the scale."""
    model = Made(lambda m, x: m.linear(x).square().sum())
    eager, overlapped = copy.deepcopy(model), fxo.transform(model)
    scales: list[list[float]] = []
    for each in (eager, model):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        optimizer = torch.optim.SGD(each.parameters(), 1e-3)
        scales.append([])
        for step in range(4):
            given = [(x * 1e20 if step == 1 else x,) for (x,) in rows(step)]
            scale = scaler.scale(torch.ones(()))
            if each is eager:
                eager_step(eager, given, scale)
            else:
                overlapped.step([fxo.Microbatch(args, grad_scale=scale) for args in given])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales[-1].append(scaler.get_scale())
    assert scales[0] == scales[1] == [256.0, 128.0, 128.0, 128.0]
    assert differences(eager, model) == []
    assert overlapped.report().variants == 1


def test_a_tensor_as_scale_of_the_config_is_read_at_every_step() -> None:
    scale = torch.tensor(2.0)
    model = Made(lambda m, x: m.linear(x).square().sum())
    eager, overlapped = copy.deepcopy(model), fxo.transform(model, fxo.OverlapConfig(grad_scale=scale))
    for _ in range(2):
        losses = eager_step(eager, rows(0), scale)
        assert [same_bits(a, b) for a, b in zip(losses, overlapped.step(rows(0)).losses, strict=True)] == [True] * 3
        assert differences(eager, model) == []
        scale.mul_(0.25)


# --- lengths -------------------------------------------------------------------------------------------------------


def test_many_lengths() -> None:
    """Up to the bound they are captured, once each; beyond it the error names the leaf and says what to do."""
    overlapped = fxo.transform(Made(lambda m, x: m.linear(x).square().sum()))
    assert train_both(overlapped, lambda step: [rows(step, 1, 1 + (step + i) % 8)[0] for i in range(8)]) == []
    assert overlapped.report().variants == 8
    with pytest.raises(fxo.UnsupportedError, match=r"args\[0\] varies.*\(9, 4\).*bucketing"):
        overlapped.step(rows(0, 1, 9))


# --- the wrapper ---------------------------------------------------------------------------------------------------


def test_state_dict_has_the_models_keys_both_ways() -> None:
    model = Plain()
    overlapped = fxo.transform(model, example_inputs=rows(0)[0])
    state = {name: value + 1.0 for name, value in overlapped.state_dict().items()}
    assert list(state) == list(model.state_dict()) == ["calls", "linear.weight", "linear.bias"]
    overlapped.load_state_dict(state)
    assert all(same_bits(value, state[name]) for name, value in model.state_dict().items())
    Plain().load_state_dict(overlapped.state_dict())
    assert train_both(overlapped, rows) == [] and overlapped.report().variants == 1
    with pytest.raises(RuntimeError, match=r"linear\.weight"):
        overlapped.load_state_dict({"module.linear.weight": torch.ones(4, 4)})


def test_state_dict_of_a_module_that_holds_an_overlapped_model() -> None:
    outer, other = (nn.Sequential(nn.Linear(4, 4), fxo.transform(Plain())) for _ in range(2))
    with torch.no_grad():
        outer[1].module.linear.weight.fill_(7.0)
    assert "1.linear.weight" in outer.state_dict() and "1.module.linear.weight" not in outer.state_dict()
    other.load_state_dict(outer.state_dict())
    assert differences(outer, other) == []


def test_transform_changes_nothing_on_the_model() -> None:
    model = Plain().eval()
    seen: list[Tensor] = []
    model.linear.weight.register_hook(seen.append)
    model.linear.bias.grad = torch.ones(4)
    names = dict(model.named_parameters())
    with untouched(model):
        overlapped = fxo.transform(model, example_inputs=rows(0)[0])
    assert overlapped.module is model and not model.training and seen == []
    assert [p is names[name] for name, p in model.named_parameters()] == [True, True]
    model(*rows(0)[0]).backward()
    assert len(seen) == 1 and model.calls == 1


def test_calling_runs_the_model() -> None:
    model = Plain()
    overlapped = fxo.transform(model)
    x = rows(0)[0][0]
    loss = overlapped(x)
    loss.backward()
    assert model.calls == 1 and model.linear.weight.grad is not None
    with torch.no_grad():
        assert torch.equal(overlapped(x=x), loss) and not overlapped(x).requires_grad
    with pytest.raises(fxo.UnsupportedError, match="Nothing has been traced"):
        overlapped.report()


def test_modes_and_casts_go_through() -> None:
    overlapped = fxo.transform(Plain())
    assert overlapped.eval().module.linear.training is False and overlapped.train().module.linear.training is True
    assert overlapped.double().module.linear.weight.dtype is torch.float64
    assert train_both(overlapped, lambda step: [(x.double(),) for (x,) in rows(step)]) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
@pytest.mark.parametrize("traced", [False, True])
def test_copies_are_models_of_their_own(copied: Callable[[Any], Any], traced: bool) -> None:
    original = fxo.transform(Plain(), fxo.OverlapConfig(grad_scale=0.5, max_variants=3))
    if traced:
        original.step(rows(0))
    original.module.zero_grad()
    before = copy.deepcopy(original.module)
    other = copied(original)
    assert other.config == original.config and other.module is not original.module
    assert train_both(other, rows) == []
    assert differences(before, original.module) == []
    assert train_both(original, rows) == []


def test_a_copy_has_the_process_group_of_its_config(group: dist.ProcessGroup) -> None:
    original = fxo.transform(Plain(), fxo.OverlapConfig(process_group=group))
    assert copy.deepcopy(original).config.process_group is group


# --- grad modes ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["transform", "step"])
def asked(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the model is captured."""
    yield request.param


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad], ids=["no_grad", "enable_grad"])
def test_ambient_grad_mode_changes_nothing(mode: Callable[[], Any], asked: str) -> None:
    model = Made(lambda m, x: m.linear(x).square().sum() if torch.is_grad_enabled() else m.p)
    eager = copy.deepcopy(model)
    with mode():
        overlapped = fxo.transform(model, example_inputs=rows(0)[0] if asked == "transform" else None)
        overlapped.step(rows(0))
        assert torch.is_grad_enabled() is (mode is torch.enable_grad)
    overlapped.step(rows(1))
    for step in range(2):
        eager_step(eager, rows(step))
    assert differences(eager, model) == [] and overlapped.report().variants == 1


@pytest.mark.parametrize("captured", [False, True])
def test_inference_mode_is_refused(captured: bool, asked: str) -> None:
    model = Plain()
    overlapped = fxo.transform(model, example_inputs=rows(0)[0] if captured else None)
    with untouched(model), torch.inference_mode(), pytest.raises(fxo.UnsupportedError, match="inference_mode is on"):
        if asked == "transform":
            fxo.transform(model, example_inputs=rows(0)[0])
        else:
            overlapped.step(rows(0))
    assert train_both(overlapped, rows) == []


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = Plain()
    with pytest.raises(fxo.UnsupportedError, match=r"linear.weight was made in torch\.inference_mode.*outside"):
        fxo.transform(model, example_inputs=rows(0)[0])


def test_functions_of_the_model_may_use_autograd() -> None:
    """A gradient taken inside of forward, and a derivative of it."""

    def loss(m: Any, x: Tensor) -> Tensor:
        first = m.linear(x).square().sum()
        (gradient,) = torch.autograd.grad(first, m.linear.weight, create_graph=True)
        return first + F.mse_loss(gradient, torch.ones_like(gradient))

    assert train_both(Made(loss), rows) == []
