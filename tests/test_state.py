"""State around a step: buffers, random numbers, attributes that forward assigns; what cannot be followed is refused."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_bad_input import X, untouched
from torch import Tensor, nn
from toys import Made, batches, differences, eager_step, rows, same_bits, toy, train_both

import fxoverlap as fxo
from fxoverlap.microbatch import as_microbatch, flatten

# --- buffers that forward writes -----------------------------------------------------------------------------------


def ema_read_by_backward(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    m.mean.mul_(0.9).add_(y.detach().mean(0))
    return (y * m.mean).sum()


def old_value_read_by_backward(m: Any, x: Tensor) -> Tensor:
    loss = (m.linear(x) * m.mean.clone()).sum()
    m.mean.add_(1.0)
    return loss


def replaced(m: Any, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + m.linear(x).mean(0)
    return (m.linear(x) * m.mean.detach()).sum()


def replaced_after_parts_were_read(m: Any, x: Tensor) -> Tensor:
    """The backward reads parts of the old value."""
    left, right = m.mean.chunk(2)
    loss = (m.linear(x)[:, :2] * left * right.sin()).square().sum()
    m.mean = m.mean + 1.0
    return loss


def replaced_twice(m: Any, x: Tensor) -> Tensor:
    m.mean = m.mean + x.mean(0)
    m.mean = m.mean * 0.5
    m.mean.add_(1.0)
    return (m.linear(x) * m.mean).sum()


def swapped(m: Any, x: Tensor) -> Tensor:
    m.mean, m.child.mean = m.child.mean, m.mean
    return (m.linear(x) * m.mean).sum() + m.child(x)


def swapped_and_not_read(m: Any, x: Tensor) -> Tensor:
    m.mean, m.other = m.other, m.mean
    return m.linear(x).sum()


def counted(m: Any, x: Tensor) -> Tensor:
    m.count += x.shape[0]
    m.count[1:].add_(m.count[:1])
    return m.linear(x).sum() * m.count[0]


def replaced_after_its_last_use(m: Any, x: Tensor) -> Tensor:
    loss = (m.linear(x) * m.mean).square().sum()
    m.mean = loss.detach().expand(4)
    return loss


def written_and_replaced(m: Any, x: Tensor) -> Tensor:
    m.mean.add_(1.0)
    m.mean = m.mean * 0.25
    return (m.linear(x) * m.mean).sum()


def nested(m: Any, x: Tensor) -> Tensor:
    return m.child(m.norm(m.linear(x)))


BUFFERS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], dict[str, Any]]]] = {
    "read by backward": (ema_read_by_backward, dict),
    "old value read by backward": (old_value_read_by_backward, dict),
    "replaced": (replaced, dict),
    "replaced after parts were read": (replaced_after_parts_were_read, dict),
    "replaced twice": (replaced_twice, dict),
    "swapped": (swapped, lambda: {"child": Made(ema_read_by_backward)}),
    "swapped and not read": (swapped_and_not_read, lambda: {"other": nn.Buffer(torch.zeros(4))}),
    "integer counters": (counted, lambda: {"count": nn.Buffer(torch.zeros(2, dtype=torch.int64))}),
    "replaced after its last use": (replaced_after_its_last_use, dict),
    "written and replaced": (written_and_replaced, dict),
    "of submodules": (nested, lambda: {"norm": nn.BatchNorm1d(4), "child": Made(replaced)}),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers(name: str) -> None:
    """Each microbatch reads what the one before it has written, and backward what its own forward has read."""
    loss, attributes = BUFFERS[name]
    model = Made(loss, **attributes())
    before = [buffer.clone() for buffer in model.buffers()]
    assert train_both(model, rows) == []
    assert not all(map(torch.equal, before, model.buffers()))


def test_b47_counter_of_a_low_precision_model_is_exact() -> None:
    model = Made(lambda m, x: (m.count.add_(x.shape[0]), m.linear(x).sum())[1], count=nn.Buffer(torch.tensor(0)))
    fxo.transform(model.bfloat16()).step([(x.bfloat16(),) for (x,) in rows(0, count=2, size=257)])
    assert model.count.dtype is torch.int64 and model.count.item() == 514


# --- random numbers ------------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout": lambda m, x: F.dropout(m.linear(x), 0.3).sum(),
    "two kinds": lambda m, x: (F.dropout(m.linear(x), 0.5) * torch.rand(4)).sum() + torch.randn_like(x).sum() * m.p,
    "in place": lambda m, x: (m.linear(x) * torch.empty(4).bernoulli_(0.5)).sum(),
    "permutation": lambda m, x: m.linear(x)[torch.randperm(3)][0].sum(),
    "multinomial": lambda m, x: m.linear(x)[:, torch.multinomial(torch.ones(4), 2)].sum(),
    "rrelu": lambda m, x: F.rrelu(m.linear(x), training=True).sum(),
    "into a buffer": lambda m, x: (m.mean.uniform_(), (m.linear(x) * m.mean).sum())[1],
    "not read": lambda m, x: (torch.rand(2), F.dropout(m.linear(x), 0.5).sum())[1],
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws(name: str) -> None:
    """`train_both` seeds before each step and compares the generator behind it."""
    assert train_both(Made(DRAWS[name]), rows) == []


def with_generator(seed: int) -> nn.Module:
    model = Made(lambda m, x: (m.linear(x) * torch.rand(4, generator=m.generator)).sum() + torch.rand(()) * m.p)
    model.generator = torch.Generator().manual_seed(seed)
    return model


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="torch 2.11 cannot trace generators: CaptureError")
def test_generator_of_the_user() -> None:
    eager, model = with_generator(7), with_generator(7)
    overlapped = fxo.transform(model, example_inputs=rows(0)[0])
    assert torch.equal(model.generator.get_state(), eager.generator.get_state())
    for step in range(2):
        for each, run in ((eager, eager_step), (model, lambda _, given: overlapped.step(given))):
            torch.manual_seed(step)
            run(each, rows(step))
        assert differences(eager, model) == []
        assert torch.equal(model.generator.get_state(), eager.generator.get_state())


# --- attributes that forward assigns -------------------------------------------------------------------------------


def fills_containers(m: Any, x: Tensor) -> Tensor:
    m.losses.append(x.sum())
    m.seen["x"] = x
    m.seen["inner"][0].append(len(m.losses))
    m.names.add("x")
    m.queue.append(x)
    m.child.losses.append(x)
    m.calls += 1
    m.last = x
    return m.linear(x).sum() * m.calls * len(m.losses)


def test_attributes_and_containers_are_as_before_the_trace() -> None:
    """Also while the tracer runs forward a second time, which sees what a first call in eager sees."""
    child = Made(fills_containers, losses=[])
    kept = {"losses": [], "seen": {"inner": ([1],)}, "names": {"a"}, "queue": deque([1], 2), "calls": 0, "child": child}
    model = Made(fills_containers, **kept)
    expected = copy.deepcopy(model)(*rows(0)[0]).detach()
    overlapped = fxo.transform(model, example_inputs=rows(0)[0])
    assert torch.equal(overlapped.step(rows(0)).losses[0], expected)
    assert all(getattr(model, name) is value for name, value in kept.items())
    assert (model.losses, model.seen, model.names, model.queue) == ([], {"inner": ([1],)}, {"a"}, deque([1]))
    assert child.losses == [] and not hasattr(model, "last")
    names = ("calls", "child.losses", "last", "losses", "names", "queue", "seen")
    assert tuple(sorted(overlapped.report().assigned_attributes)) == names
    assert all(f"not updated by a step: {name}" in str(overlapped.report()) for name in names)


def test_table_that_forward_makes_when_it_is_missing() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        if m.table is None:
            m.table = torch.arange(4.0)
        return (m.linear(x) * m.table).sum()

    model = Made(loss, table=None)
    overlapped = fxo.transform(model)
    assert train_both(overlapped, rows) == []
    assert model.table is None and overlapped.report().assigned_attributes == ("table",)


# --- gradients and refusals ----------------------------------------------------------------------------------------


def view_of_parameter(m: Made, x: Tensor) -> Tensor:
    return m.linear.bias[0]


def parameter(m: Made, x: Tensor) -> Tensor:
    return m.p


@pytest.mark.parametrize("loss", [view_of_parameter, parameter])
def test_loss_that_is_a_parameter_or_a_view_of_one(loss) -> None:
    assert train_both(Made(loss), rows) == []


def test_op_that_raises_by_its_result_is_refused() -> None:
    model = Made(lambda m, x: (m.linear(x) @ torch.linalg.inv(m.linear.weight)).sum())
    if torch.__version__.startswith("2.11"):
        # There it is an op like others, whose check is no part of the graph.
        assert train_both(model, rows) == []
        return
    with pytest.raises(fxo.UnsupportedError, match=r"torch\.linalg\.inv_ex"):
        fxo.transform(model, example_inputs=rows(0)[0])


def test_gradient_that_is_the_tangent_itself_is_delivered() -> None:
    assert train_both(Made(lambda m, x: m.linear(x).sum() + m.p), rows) == []


def hidden_parameter() -> nn.Module:
    model = Made(lambda m, x: (m.linear(x) * m.hidden[0]).sum())
    model.hidden = [nn.Parameter(torch.ones(4))]  # type: ignore[assignment]
    return model


def trained_buffer() -> nn.Module:
    model = Made(lambda m, x: (m.linear(x) * m.mean).sum())
    model.mean.requires_grad_()
    return model


def with_none(effect: Callable[[Made, Tensor], Any]) -> nn.Module:
    """A model with a buffer that is None."""
    model = made(effect)()
    model.register_buffer("state", None)
    return model


def scaled(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.linear.weight.mul_(0.9)
    return m.linear(x).sum()


def forked(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return F.dropout(m.linear(x)).sum()


def reseeded() -> nn.Module:
    model = with_generator(7)
    draw = model.loss
    model.loss = lambda m, x: (m.generator.manual_seed(7), draw(m, x))[1]
    return model


def made(
    first: Callable[[Any, Tensor], Any], read: Callable[[Any], Tensor] = lambda m: m.mean, **more: Any
) -> Callable[[], nn.Module]:
    """A model that first calls a function of the module and the input, and then reads a tensor of the module."""
    return lambda: Made(lambda m, x: (first(m, x), (m.linear(x) * read(m)).sum())[1], **more)


def counts_from_none(m: Made, x: Tensor) -> None:
    rows_of = torch.tensor(x.shape[0])
    m.state = rows_of if m.state is None else m.state + rows_of


@pytest.mark.parametrize("count", [1, 3])
def test_buffer_that_is_none_becomes_what_forward_makes_it(count: int) -> None:
    overlapped = fxo.transform(with_none(counts_from_none))
    assert train_both(overlapped, lambda step: rows(step, count)) == []
    assert overlapped.module.state == 3 * count * 3  # steps, microbatches, rows
    assert "state" in overlapped.state_dict() and overlapped.report().assigned_attributes == ()


def test_buffer_stays_none_where_a_later_microbatch_is_refused() -> None:
    model = with_none(counts_from_none)
    with pytest.raises(fxo.FxOverlapError):
        fxo.transform(model).step([(X,), ("text",)])
    assert model.state is None


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "buffer becomes None": (
        lambda: Made(lambda m, x: (m.linear(x).sum(), setattr(m, "mean", None))[0]),
        "Buffer mean is a tensor .* and None behind it",
    ),
    "None becomes a buffer of unknown length": (
        lambda: with_none(lambda m, x: setattr(m, "state", x[x > 0].detach())),
        "Buffer state gets its first value in forward.*in __init__",
    ),
    "buffer of another dtype": (
        made(lambda m, x: setattr(m, "mean", m.mean.double())),
        "Buffer mean is .*float32 before forward and .*float64.*in __init__",
    ),
    "buffer of another shape": (
        made(lambda m, x: setattr(m, "mean", m.mean[:1])),
        r"Buffer mean is .*\(4,\).*\(1,\).*in __init__",
    ),
    "attribute carried over": (
        made(lambda m, x: setattr(m, "state", m.state * x.sum(0)), lambda m: m.state, state=torch.ones(4)),
        "reads the attribute state and assigns it anew.*as a buffer",
    ),
    "item of a list carried over": (
        made(lambda m, x: m.state.__setitem__(0, m.state[0] + 1), lambda m: m.state[0], state=[torch.ones(4)]),
        "reads the attribute state and assigns it anew.*as a buffer",
    ),
    "data of a buffer": (made(lambda m, x: setattr(m.mean, "data", m.mean * 2)), r"assigns to the \.data.*in place"),
    "parameter written": (lambda: Made(scaled), "in place to linear.weight, a parameter.*after the optimizer's step"),
    "parameter replaced": (
        made(lambda m, x: setattr(m.linear, "weight", nn.Parameter(m.linear.weight * 2))),
        "replaces parameter linear.weight.*between steps",
    ),
    "gradient written to a buffer": (made(lambda m, x: m.mean.add_(m.p)), "in place to mean, a buffer.*Detach"),
    "max_norm": (
        lambda: Made(lambda m, x: m.embed(x.long().abs()).sum(), embed=nn.Embedding(9, 4, max_norm=1.0)),
        "in place to embed.weight, a parameter.*max_norm",
    ),
    "seed": (made(lambda m, x: torch.manual_seed(3)), "makes or seeds a random generator.*before the step"),
    "state of the generator": (
        made(lambda m, x: torch.set_rng_state(m.state), state=torch.get_rng_state()),
        "makes or seeds a random generator.*before the step",
    ),
    "seed of the user's generator": (reseeded, "makes or seeds a random generator.*before the step"),
    "generator made in forward": (
        lambda: Made(lambda m, x: (m.linear(x) * torch.rand(4, generator=torch.Generator())).sum()),
        "makes or seeds a random generator.*before the step",
    ),
    "fork": (lambda: Made(forked), "random generator or forks.*before the step"),
    "Python's random": (made(lambda m, x: random.random()), "draws from Python's random.*torch's functions"),
    "a module's own random": (
        lambda: Made(lambda m, x: m.linear(x).sum() * m.own.random(), own=random.Random(0)),
        "draws from Python's random.*torch's functions",
    ),
    "a module's own generator of NumPy": (
        lambda: Made(lambda m, x: m.linear(x).sum() * m.own.random(), own=np.random.default_rng(0)),
        r"numpy\.random.*torch's functions",
    ),
    "numpy.random": (made(lambda m, x: np.random.rand()), r"numpy\.random.*torch's functions"),
    "sparse gradient of a function": (
        lambda: Made(lambda m, x: F.embedding(x.long().abs(), m.linear.weight, sparse=True).sum()),
        "linear.weight gets a sparse gradient.*sparse=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_step_would_miss_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    model = make()
    generators = random.getstate(), np.random.get_state()[1].tolist()
    own = model.generator.get_state() if hasattr(model, "generator") else None
    with untouched(model), pytest.raises(fxo.UnsupportedError, match=words):
        fxo.transform(model, example_inputs=(X,))
    assert generators == (random.getstate(), np.random.get_state()[1].tolist())
    assert own is None or torch.equal(own, model.generator.get_state())


LOOSE = torch.ones(4)
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda t: t.add_(1.0),
    "operator": lambda t: t.__iadd__(1.0),
    "item": lambda t: t.__setitem__(0, 2.0),
    "function": lambda t: F.relu_(t.neg_()),
    "view": lambda t: t[:2].zero_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_write_to_a_tensor_that_is_no_buffer_is_refused(name: str) -> None:
    """One that a module holds, and one that nobody registered anywhere; both are as they were."""
    write = WRITES[name]
    held = Made(lambda m, x: (write(m.state), (m.linear(x) * m.state).sum())[1], state=torch.ones(4))
    loose = Made(lambda m, x: (write(LOOSE), (m.linear(x) * LOOSE).sum())[1])
    for model, tensor in ((held, held.state), (loose, LOOSE)):
        with untouched(model), pytest.raises(fxo.FxOverlapError, match=r"neither a buffer nor made .*as a buffer"):
            fxo.transform(model, example_inputs=(X,))
        assert torch.equal(tensor, torch.ones(4))


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
        (lambda: Made(lambda m, x: m.linear(x["x"]).sum()), (object(),), r"args\[0\] is of type object, expected"),
    ],
)
def test_state_that_cannot_be_followed_is_refused_by_name(make, microbatch, words) -> None:
    with pytest.raises(fxo.UnsupportedError, match=words):
        fxo.transform(make(), example_inputs=microbatch)


def test_failed_step_takes_gradients_back_and_the_next_one_is_right(group) -> None:
    """Of parameters and of microbatch tensors; a gradient that was there stays the same tensor."""
    model = toy("[*E]", group)
    scaled = Made(lambda m, tokens, targets, x: m.toy(tokens, targets) * x, toy=model)
    overlapped = fxo.transform(scaled, fxo.OverlapConfig(schedule="megatron"))
    given = [(*each, torch.tensor(2.0, requires_grad=True)) for each in batches(3)]
    programs = overlapped._planner.prepare(overlapped._planner.variants_for(*leaves_of(given)))
    last = programs[1].program.operations[-1]

    def fails(arguments: list[Any]) -> None:
        raise RuntimeError("out of memory")

    works = last.call
    object.__setattr__(last, "call", fails)
    kept = model.head.weight.grad = torch.ones_like(model.head.weight)
    values = [p.detach().clone() for p in scaled.parameters()]
    with pytest.raises(
        fxo.StepError, match=r"pre_process.W \(phase W\) of microbatch 0 failed.*out of memory"
    ) as caught:
        overlapped.step(given)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert [name for name, p in scaled.named_parameters() if p.grad is not None] == ["toy.head.weight"]
    assert model.head.weight.grad is kept and [x.grad for *_, x in given] == [None] * 3
    assert all(same_bits(p, value) for p, value in zip(scaled.parameters(), values, strict=True))
    object.__setattr__(last, "call", works)
    scaled.zero_grad()
    eager = copy.deepcopy(scaled)
    losses = overlapped.step(given).losses
    assert all(map(same_bits, losses, eager_step(eager, given)))
    assert differences(eager, scaled) == []


def leaves_of(given: list[Any]) -> tuple[list[Any], list[Any]]:
    """Microbatches as the planner takes them."""
    microbatches = [as_microbatch(each) for each in given]
    return [flatten(each) for each in microbatches], microbatches
