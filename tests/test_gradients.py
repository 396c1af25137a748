"""Gradients go where eager puts them: through hooks, in microbatch order, into the `.grad` that is there.

Each case builds its model twice and runs the same microbatches, one model in eager and one overlapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import Made, batches, differences, eager_step, rows, same_bits, toy

import fxoverlap as fxo

pytestmark = pytest.mark.usefixtures("shared_captures")

Log = dict[str, list[Tensor]]
"""What the hooks of each parameter have seen, in order."""


def both(
    make: Callable[[], nn.Module],
    microbatches: Callable[[int], Sequence[Any]] = rows,
    prepare: Callable[[nn.Module, Log], Any] = lambda model, log: None,
    steps: int = 2,
) -> tuple[nn.Module, nn.Module, Log]:
    """Two models after the same steps without zero_grad, eager and overlapped, and the log; asserts that all is equal.

    `prepare` gets each model and its log, and registers hooks.
    """
    eager, model = make(), make()
    logs: tuple[Log, Log] = {}, {}
    for each, log in zip((eager, model), logs, strict=True):
        prepare(each, log)
    overlapped = fxo.transform(model)
    for step in range(steps):
        losses = eager_step(eager, microbatches(step))
        result = overlapped.step(microbatches(step))
        assert [same_bits(a, b) for a, b in zip(losses, result.losses, strict=True)] == [True] * len(losses)
        assert differences(eager, model) == []
    assert logs[0].keys() == logs[1].keys()
    for name, seen in logs[0].items():
        assert [same_bits(a, b) for a, b in zip(seen, logs[1][name], strict=True)] == [True] * len(seen), name
    return eager, model, logs[1]


# --- hooks ---------------------------------------------------------------------------------------------------------

Hook = Callable[[nn.Parameter, list[Tensor]], Any]


def sees_the_gradient(p: nn.Parameter, seen: list[Tensor]) -> None:
    p.register_hook(lambda gradient: seen.append(gradient.clone()))


def doubles_the_gradient(p: nn.Parameter, seen: list[Tensor]) -> None:
    p.register_hook(lambda gradient: gradient * 2)
    p.register_hook(lambda gradient: seen.append(gradient.clone()))


def sees_the_sum(p: nn.Parameter, seen: list[Tensor]) -> None:
    p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))


def sees_both(p: nn.Parameter, seen: list[Tensor]) -> None:
    sees_the_gradient(p, seen)
    sees_the_sum(p, seen)


def changes_the_sum(p: nn.Parameter, seen: list[Tensor]) -> None:
    def hook(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    p.register_post_accumulate_grad_hook(hook)
    sees_the_sum(p, seen)


def moves_it_aside(p: nn.Parameter, seen: list[Tensor]) -> None:
    def hook(p: Tensor) -> None:
        assert p.grad is not None
        seen.append(p.grad)
        p.grad = None

    p.register_post_accumulate_grad_hook(hook)


def queues_a_callback(p: nn.Parameter, seen: list[Tensor]) -> None:
    def callback() -> None:
        assert p.grad is not None
        seen.append(p.grad.clone())

    def hook(gradient: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]

    p.register_hook(hook)


HELD: list[Any] = []
"""Accumulation nodes that outlive the function that asked for them, as data-parallel wrappers keep them."""


def sees_the_accumulation(p: nn.Parameter, seen: list[Any]) -> None:
    with torch.enable_grad():
        node = p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *_: seen.append(p.grad.clone()))
    HELD.append(node)


HOOKS: dict[str, Hook] = {
    "sees the gradient": sees_the_gradient,
    "doubles the gradient": doubles_the_gradient,
    "sees the sum": sees_the_sum,
    "sees both": sees_both,
    "changes the sum": changes_the_sum,
    "b33 moves it aside": moves_it_aside,
    "b24 queues a callback": queues_a_callback,
    "sees the accumulation": sees_the_accumulation,
}


def on_parameters(hook: Hook, only: Callable[[str], bool] = lambda name: True) -> Callable[[nn.Module, Log], None]:
    def prepare(model: nn.Module, log: Log) -> None:
        for name, p in model.named_parameters():
            if only(name):
                hook(p, log.setdefault(name, []))

    return prepare


class Net(nn.Module):
    """Three layers, of which the first is the last; the embedding is the head; a weight has an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 8)
        tied = nn.Linear(8, 8)
        self.layers = nn.ModuleList([tied, nn.Linear(8, 8), tied])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        logits = F.linear(x, self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + self.layers[1].weight.square().mean()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(hook: str, count: int) -> None:
    """Once a microbatch and parameter, tied ones too, with what eager hands it."""
    _, model, log = both(Net, lambda step: batches(count, seed=step), on_parameters(HOOKS[hook]))
    times = 2 * count * (2 if hook == "sees both" else 1)
    assert {name: len(seen) for name, seen in log.items()} == dict.fromkeys(dict(model.named_parameters()), times)


def test_hooks_of_a_moe_model(group: Any) -> None:
    both(lambda: toy("[*E]", group, tied=True), lambda step: batches(3, seed=step), on_parameters(sees_both))


@pytest.mark.parametrize("name", ["layers.0.bias", "embed.weight"])
def test_hooks_of_one_parameter_leave_the_others_alone(name: str) -> None:
    """Parameters with and without hooks get their gradients from one node, in two ways."""
    _, _, log = both(Net, lambda step: batches(3, seed=step), on_parameters(sees_both, name.__eq__))
    assert {name: len(seen) for name, seen in log.items()} == {name: 12}


def test_b33_bias_gradient_taken_away_while_the_weight_waits() -> None:
    def prepare(model: nn.Module, log: Log) -> None:
        on_parameters(moves_it_aside, lambda name: name.endswith("bias"))(model, log)

    _, model, _ = both(Net, lambda step: batches(3, seed=step), prepare)
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["layers.0.bias", "layers.1.bias"]


def test_b24_a_callback_runs_once_and_after_the_gradient_of_its_parameter() -> None:
    model = Net()
    seen: list[Tensor] = []
    queues_a_callback(model.layers[1].weight, seen)
    fxo.transform(model).step(batches(1))
    assert len(seen) == 1 and same_bits(seen[0], model.layers[1].weight.grad)


def test_a_removed_hook_is_not_called() -> None:
    model, seen = Net(), []
    handle = model.embed.weight.register_hook(seen.append)
    overlapped = fxo.transform(model)
    overlapped.step(batches(2))
    handle.remove()
    overlapped.step(batches(2))
    assert len(seen) == 2


def test_a_hook_that_raises_is_a_step_error() -> None:
    model = Net()

    def hook(gradient: Tensor) -> None:
        raise KeyError("from the hook")

    handle = model.layers[0].bias.register_hook(hook)
    overlapped = fxo.transform(model)
    with pytest.raises(fxo.StepError, match=r"W \(phase W\) of microbatch 0 failed: KeyError") as caught:
        overlapped.step(batches(2))
    assert isinstance(caught.value.__cause__, KeyError)
    assert [p.grad for p in model.parameters()] == [None] * len(list(model.parameters()))
    handle.remove()
    overlapped.step(batches(2))
    eager = Net()
    eager_step(eager, batches(2))
    assert differences(eager, model) == []


# --- where gradients come from -------------------------------------------------------------------------------------


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))))


def used_transposed(m: Any, x: Tensor) -> Tensor:
    w = m.linear.weight
    return F.linear(F.linear(x, w) @ w, w, m.linear.bias).square().sum()


SOURCES: dict[str, Callable[[], nn.Module]] = {
    "tied three ways": lambda: Made(lambda m, x: m.linear(m.linear(m.linear(x).tanh()).tanh()).square().sum()),
    "tied and transposed": lambda: Made(used_transposed),
    "bias and weight apart": lambda: Made(
        lambda m, x: F.linear(x, m.linear.weight).square().sum() + (m.linear.bias.square() * 3).sum()
    ),
    "bias alone": lambda: Made(lambda m, x: (x * m.linear.bias).sum()),
    "auxiliary loss alone": lambda: Made(lambda m, x: m.linear(x).sum() + 0.1 * m.w.square().sum(), w=weight(3)),
    "absorbed": lambda: Made(
        lambda m, x: (x @ m.a @ (m.b @ m.c)).square().sum(), a=weight(4, 3), b=weight(3, 4), c=weight(4, 2)
    ),
    "einsum": lambda: Made(lambda m, x: torch.einsum("bi,hij->bhj", x, m.a).square().sum(), a=weight(2, 4, 3)),
    "indexed": lambda: Made(lambda m, x: (x @ m.a[1] * m.a[0].sum()).square().sum(), a=weight(3, 4, 4)),
    "frozen": lambda: Made(lambda m, x: (m.linear(x) * m.w).square().sum(), w=weight(4).requires_grad_(False)),
    "below a frozen one": lambda: Made(
        lambda m, x: ((x * m.v) @ m.w).square().sum(), v=weight(4), w=weight(4, 4).requires_grad_(False)
    ),
    "detached": lambda: Made(lambda m, x: (m.linear(x).detach() * m.p).sum()),
    "used under no_grad only": lambda: Made(lambda m, x: m.linear(x).sum() * m.w.detach().norm(), w=weight(3)),
    "zero": lambda: Made(lambda m, x: (m.linear(x) * 0).sum() + 0 * m.p),
}


@pytest.mark.parametrize("name", SOURCES)
def test_source(name: str) -> None:
    both(SOURCES[name])


# --- what is there after the step ----------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(3, 4).t(),
    "inner transposed": lambda: torch.randn(2, 3, 4).transpose(1, 2),
    "expanded": lambda: torch.randn(1, 4, 3).expand(2, 4, 3),
    "sliced": lambda: torch.randn(2, 8, 3)[:, ::2],
    "float64": lambda: torch.randn(4, 3, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(4, 3).bfloat16(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_and_dtype_of_a_new_gradient(name: str) -> None:
    torch.manual_seed(0)
    value = LAYOUTS[name]()
    made = both(lambda: Made(lambda m, x: (x.to(m.w.dtype) @ m.w).square().sum(), w=nn.Parameter(value)), steps=1)
    eager, ours = (model.w.grad for model in made[:2])
    assert (eager.stride(), eager.dtype) == (ours.stride(), ours.dtype)


def test_gradients_that_are_slices_of_one_buffer_are_added_to_in_place() -> None:
    """As data-parallel wrappers keep them."""

    def prepare(model: nn.Module, log: Log) -> None:
        params = list(model.parameters())
        model.flat = torch.ones(sum(p.numel() for p in params))
        for p, part in zip(params, model.flat.split([p.numel() for p in params]), strict=True):
            p.grad = part.view_as(p)

    eager, model, _ = both(Net, lambda step: batches(2, seed=step), prepare)
    assert same_bits(eager.flat, model.flat) and not torch.equal(model.flat, torch.ones_like(model.flat))


# --- an optimizer in the backward ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("read_late", [False, True])
def test_parameter_changed_by_a_hook_is_a_step_error(count: int, read_late: bool, group: Any) -> None:
    """Also with one microbatch, and where a later node of its backward would read the new value."""
    model = toy("[*E]", group, shared_dim=8) if read_late else Net()
    param = model.layers[1].router.weight if read_late else model.embed.weight
    optimizer = torch.optim.SGD([param], 0.1)
    param.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    name = next(name for name, each in model.named_parameters() if each is param)
    with pytest.raises(fxo.StepError, match=f"Parameter {name} was changed .* of microbatch .* after step"):
        fxo.transform(model).step(batches(count))
    assert [p.grad for p in model.parameters()] == [None] * len(list(model.parameters()))
