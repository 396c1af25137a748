"""Steps with `ramp="pair"`: eager's bits, hooks, what forbids a pair, what is alive, and what a failure leaves."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from test_failures import arm, tripping
from test_lifetimes import Made as Storages
from test_lifetimes import owned, tensors, uncollected
from test_ramp import in_random_order
from torch import Tensor
from toys import Made, RawModel, batches, eager_step, rows, same_bits, toy, train_both

import fxoverlap as fxo
from fxoverlap import api
from fxoverlap.runtime.state import MicrobatchState
from fxoverlap.schedule import kind_of
from fxoverlap.schedule.memory import peak_bytes

pytestmark = pytest.mark.usefixtures("shared_captures")

PAIR = fxo.OverlapConfig(ramp="pair")


def kinds(overlapped: fxo.OverlappedModel, count: int) -> set[str]:
    """The kinds of the rounds of a step."""
    return {kind_of(each) for each in overlapped._planner.rounds(count)}


# --- what a graph allows --------------------------------------------------------------------------------------


class Acting(RawModel):
    """A model in which `act` is called with the name of each place, and what goes on from there."""

    def __init__(self, group: dist.ProcessGroup, act: Callable[[Acting, str, Tensor], Tensor]) -> None:
        super().__init__(group)
        self.act, self.group = act, group.group_name
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.act(self, "embed", self.embed(tokens))
        for i, block in enumerate(self.layers):
            x = self.act(self, f"layer {i}", block(x))
        return self.act(self, "loss", F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()))


# Cached, because models share a capture only if they hold the same function.
@functools.cache
def dropping(*places: str) -> Callable[[Acting, str, Tensor], Tensor]:
    return lambda model, place, x: F.dropout(x, 0.2) if place in places else x


@functools.cache
def reducing(*places: str) -> Callable[[Acting, str, Tensor], Tensor]:
    def act(model: Acting, place: str, x: Tensor) -> Tensor:
        return x + 0 * funcol.all_reduce(x.detach(), "sum", model.group) if place in places else x

    return act


class Reduce(torch.autograd.Function):
    """Nothing in forward, an all-reduce in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return funcol.all_reduce(grad, "sum", ctx.group), None


def reducing_gradients(model: Acting, place: str, x: Tensor) -> Tensor:
    return Reduce.apply(x, model.group) if place.startswith("layer") else x


def counting(model: Acting, place: str, x: Tensor) -> Tensor:
    if place == "loss":
        model.seen.add_(1)
    return x


ALLOWED = {
    "attention without dropout": lambda group: toy("[*E][*E]", group),
    "draws of one place": lambda group: Acting(group, dropping("embed")),
    "draws of two places behind the exchanges": lambda group: Acting(group, dropping("layer 1", "loss")),
    "a mean over the ranks": lambda group: Acting(group, reducing("loss")),
    "no exchange": lambda group: toy("*-", dropout=0.1),
}
FORBIDDEN = {
    "dropout": (
        lambda group: toy("[*E][*E]", group, dropout=0.1),
        r"L0\.pre_dispatch\.F of a microbatch must follow L1\.post_combine\.F of the one before.*bernoulli",
    ),
    "draws of two places": (
        lambda group: Acting(group, dropping("embed", "loss")),
        r"pre_process\.F of a microbatch must follow post_process\.F of the one before.*bernoulli",
    ),
    "collectives": (lambda group: Acting(group, reducing("layer 0", "layer 1")), r"L0\.post_combine\.F .*all_reduce"),
    "collectives of the backward": (
        lambda group: Acting(group, reducing_gradients),
        r"post_process\.B of a microbatch must follow L1\.pre_dispatch\.B of the one before.*all_reduce",
    ),
    "a counter": (lambda group: Acting(group, counting), r"pre_process\.F writes to the buffer 'seen', with which"),
    "the router's counts": (
        lambda group: toy("[*E]", group, selection_bias=True),
        r"L0\.post_combine\.F writes to the buffer 'layers\.1\.tokens_per_expert'",
    ),
}


@pytest.mark.parametrize("seed", [None, 0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ALLOWED)
def test_effects_between_two_exchanges_allow_a_pair(
    name: str, seed: int | None, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order that is chosen, and in random ones that keep the effects in theirs."""
    if seed is not None:
        in_random_order(monkeypatch, seed)
    overlapped = fxo.transform(ALLOWED[name](group), PAIR)
    assert train_both(overlapped, lambda step: batches(3, seed=step), steps=2) == []
    assert kinds(overlapped, 3) == {"FF", "FB", "BB"}
    assert not any("ramp" in text for text in overlapped.report().warnings)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_effects_that_forbid_a_pair_are_named(name: str, group: dist.ProcessGroup) -> None:
    """The step is planned as without a ramp, and is right."""
    model, words = FORBIDDEN[name]
    overlapped = fxo.transform(model(group), PAIR)
    assert train_both(overlapped, lambda step: batches(3, seed=step), steps=2) == []
    assert kinds(overlapped, 3) == {"F", "FB", "B"}
    warnings = [text for text in overlapped.report().warnings if text.startswith('ramp="pair" has no effect')]
    assert len(warnings) == 1 and re.search(words, warnings[0]), overlapped.report().warnings
    kind = "BB" if name.endswith("backward") else "FF"
    with pytest.raises(fxo.UnsupportedError, match=rf"There is no plan '{kind}': .*{words}"):
        overlapped.plan(kind)


def test_buffer_that_the_first_microbatch_makes_forbids_a_pair() -> None:
    """Only in the step in which it is made: afterwards it is read."""

    def scaled(model: Any, x: Tensor) -> Tensor:
        if model.state is None:
            model.state = x.detach().abs().sum()
        return model.linear(x).sum() * model.state

    model = Made(scaled)
    model.register_buffer("state", None)
    overlapped = fxo.transform(model, PAIR)
    assert train_both(overlapped, lambda step: rows(step), steps=1) == []
    assert "post_process.F writes to the buffer 'state'" in " ".join(overlapped.report().warnings)
    assert train_both(overlapped, lambda step: rows(step), steps=1) == []
    assert kinds(overlapped, 3) == {"FF", "FB", "BB"}
    assert not any("ramp" in text for text in overlapped.report().warnings)


# --- microbatches that differ ---------------------------------------------------------------------------------


class Deep(RawModel):
    """A model that runs as many of its blocks as it is told."""

    def forward(self, tokens: Tensor, targets: Tensor, depth: int = 2) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers[:depth]:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.fixture(scope="module")
def of_any_length(group: dist.ProcessGroup) -> fxo.OverlappedModel:
    return fxo.transform(toy("[*E]", group, shared_dim=12, tied=True), PAIR)


@pytest.mark.parametrize("lengths", [(8, 6), (6, 8, 8, 6), (4, 8, 6)], ids=str)
def test_microbatches_of_other_lengths(of_any_length: fxo.OverlappedModel, lengths: tuple[int, ...]) -> None:
    overlapped = of_any_length

    def give(step: int) -> list[tuple]:
        return [batches(1, tokens=tokens, seed=10 * step + i)[0] for i, tokens in enumerate(lengths)]

    assert train_both(overlapped, give, steps=2) == []
    assert kinds(overlapped, len(lengths)) >= {"FF", "BB"}


@pytest.fixture(scope="module")
def of_any_depth(group: dist.ProcessGroup) -> fxo.OverlappedModel:
    return fxo.transform(Deep(group), PAIR)


@pytest.mark.parametrize("depths", [(2, 1), (1, 2), (0, 2), (2, 1, 1, 2), (1, 2, 0)], ids=str)
def test_microbatches_of_other_structure(of_any_depth: fxo.OverlappedModel, depths: tuple[int, ...]) -> None:
    """Each has other layers, exchanges and parameters with gradients."""
    overlapped = of_any_depth

    def give(step: int) -> list[tuple]:
        return [(*batches(1, seed=10 * step + i)[0], depth) for i, depth in enumerate(depths)]

    assert train_both(overlapped, give, steps=2) == []
    assert kinds(overlapped, len(depths)) >= {"FF", "BB"}


class Drops(RawModel):
    """A model that drops something at the place that the microbatch names."""

    def forward(self, tokens: Tensor, targets: Tensor, place: str) -> Tensor:
        x = F.dropout(self.embed(tokens), 0.2 * (place == "embed"), place == "embed")
        for block in self.layers:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return F.dropout(loss, 0.2, place == "loss")


def test_what_keeps_its_order_belongs_to_the_structure(group: dist.ProcessGroup) -> None:
    """An order that is chosen for draws at one place is not taken for draws at another one."""
    overlapped = fxo.transform(Drops(group), PAIR)

    def give(step: int) -> list[tuple]:
        return [(*each, ("embed", "loss")[step]) for each in batches(2, seed=step)]

    assert train_both(overlapped, give, steps=2) == []
    structures = {each.structure for each in overlapped._planner._variants.values()}
    assert len(structures) == overlapped.report().variants == 2
    assert kinds(overlapped, 2) == {"FF", "BB"}


# --- hooks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_see_the_gradients_of_the_microbatches_in_order(group: dist.ProcessGroup, kind: str) -> None:
    model = toy("EE", group, shared_dim=12, tied=True)
    eager, given = copy.deepcopy(model), batches(4)
    seen: dict[bool, dict[str, list[Tensor]]] = {True: {}, False: {}}
    for is_eager, each in ((True, eager), (False, model)):
        for name, param in each.named_parameters():
            found = seen[is_eager].setdefault(name, [])

            def hook(value: Tensor, found: list[Tensor] = found) -> None:
                found.append((value if kind == "register_hook" else value.grad).clone())

            getattr(param, kind)(hook)
    eager_step(eager, given)
    fxo.transform(model, PAIR).step(given)
    for name, wanted in seen[True].items():
        found = seen[False][name]
        assert len(found) == len(wanted) == 4 and all(map(same_bits, found, wanted)), name


def test_optimizer_in_a_hook_is_refused_in_the_last_round(group: dist.ProcessGroup) -> None:
    model = toy("[*E]", group)
    param = model.embed.weight
    fired = []

    def hook(param: Tensor) -> None:
        fired.append(1)
        if len(fired) == 2:  # the last gradient of the last microbatch
            with torch.no_grad():
                param.add_(1)

    param.register_post_accumulate_grad_hook(hook)
    with pytest.raises(fxo.StepError, match=r"Parameter embed\.weight was changed .* of microbatch [01]"):
        fxo.transform(model, PAIR).step(batches(2))


# --- what is alive --------------------------------------------------------------------------------------------


def test_everything_is_dead_after_the_step(group: dist.ProcessGroup) -> None:
    overlapped = fxo.transform(toy("[*E]E", group, shared_dim=8, tied=True), PAIR, example_inputs=batches(1)[0])
    for count in (1, 2, 5):
        given = batches(count)
        with uncollected(), Storages() as made:
            result = overlapped.step(given, outputs=False)
        assert len(made.made) > 100
        assert made.alive([*owned(overlapped.module), *tensors(given), *result.losses]) == [], count


@pytest.mark.parametrize(("ramp", "most"), [("none", 2), ("pair", 3)])
def test_one_more_microbatch_is_alive_in_a_round(group: dist.ProcessGroup, ramp: str, most: int) -> None:
    overlapped = fxo.transform(toy("[*E]", group), fxo.OverlapConfig(ramp=ramp), example_inputs=batches(1)[0])
    run, alive = api.run, []

    def watched_run(program: Any, states: dict[str, MicrobatchState], progress: Any, *how: Any) -> None:
        alive.append(set(progress.alive))
        run(program, states, progress, *how)

    with patch.object(api, "run", watched_run):
        overlapped.step(batches(5), outputs=False)
    assert max(map(len, alive)) == most
    assert sorted(set().union(*alive)) == list(range(5))


def test_peak_is_that_of_one_more_microbatch(group: dist.ProcessGroup) -> None:
    """Of what crosses from node to node: two forwards keep no more than twice what one keeps."""
    peaks = {}
    for ramp in ("none", "pair"):
        config = fxo.OverlapConfig(ramp=ramp)
        overlapped = fxo.transform(toy("EE", group), config, example_inputs=batches(1, tokens=64)[0])
        peaks[ramp] = [peak_bytes(overlapped._planner.latest_rounds(count)) for count in (1, 2, 5, 8)]
    one = peaks["none"][0]
    assert peaks["pair"][0] == one
    for without, paired in zip(peaks["none"][1:], peaks["pair"][1:], strict=True):
        assert without < paired <= without + one


# --- failures -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tripped(group: dist.ProcessGroup) -> fxo.OverlappedModel:
    return tripping(group, ramp="pair")


@pytest.mark.parametrize(
    ("phase", "calls", "node", "microbatch"),
    [
        ("F", 1, "L0.post_combine.F", 0),
        ("F", 2, "L0.post_combine.F", 1),
        ("F", 3, "L0.post_combine.F", 2),
        ("B", 1, "L1.pre_dispatch.B", 0),
        ("B", 3, "L1.pre_dispatch.B", 2),
        ("B", 4, "L1.pre_dispatch.B", 3),
    ],
)
def test_error_names_node_and_microbatch(
    tripped: fxo.OverlappedModel, phase: str, calls: int, node: str, microbatch: int
) -> None:
    """In every kind of round; what all microbatches held is freed, and the next step works."""
    overlapped = tripped
    given = batches(4)
    overlapped.step(given)
    overlapped.zero_grad()
    begun = []
    begin = MicrobatchState.begin
    arm("value_error", phase, calls)
    with (
        pytest.raises(fxo.StepError, match=rf"Node {node} \(phase {phase}\) of microbatch {microbatch} failed"),
        patch.object(MicrobatchState, "begin", lambda *how: begun.append(begin(*how)) or begun[-1]),
    ):
        overlapped.step(given)
    arm(None)
    assert len(begun) >= 2 and all(not any(map(torch.is_tensor, state.values)) for state in begun[microbatch:])
    assert all(param.grad is None for param in overlapped.parameters())
    assert train_both(overlapped, lambda step: batches(4, seed=step), steps=1) == []
