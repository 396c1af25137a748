"""An overlapped step gives eager's bits: losses, gradients, buffers, generator state, and parameters after AdamW.

Patterns, dtypes, expert-parallel groups, schedules and features of the reference model are combined so that every
pair of choices meets in some case; `-m slow` runs the full product of patterns, dtypes, groups and schedules. Each
case trains one transformed model beside an eager copy, with 1, 2 and 5 microbatches a step in turn.
"""

from __future__ import annotations

import copy
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from toys import batches, differences, eager_step, same_bits, toy, train_both
from two_ranks import TwoRanks

import fxoverlap as fxo
from fxoverlap import ops
from fxoverlap.models import HybridModel

pytestmark = pytest.mark.usefixtures("shared_captures")

PATTERNS = ("[*E]", "*-[*E]", "[*E]-", "EE", "*-")
PLACES = ("no group", "one rank", "two ranks")
SCHEDULES = ("auto", "megatron", "sequential")
COUNTS = (1, 2, 5, 2, 1)
"""Microbatches of the five steps: every number follows another one on the same capture."""


class Case(NamedTuple):
    """A model, where its experts are, and how it is scheduled."""

    pattern: str
    dtype: torch.dtype
    place: str
    schedule: str
    delay_wgrad: bool = True
    grad_scale: float = 1.0
    shared: bool = False
    dropout: bool = False
    tied: bool = False
    bias: bool = False
    sigmoid: bool = False
    z_loss: bool = False

    def __str__(self) -> str:
        return "-".join(
            name if value is True else str(value).removeprefix("torch.")
            for name, value in self._asdict().items()
            if value is not False
        ).replace(" ", "_")

    def model(self, group: dist.ProcessGroup | None) -> HybridModel:
        return toy(
            self.pattern,
            None if self.place == "no group" else group,
            shared_dim=8 * self.shared,
            dropout=0.1 * self.dropout,
            tied=self.tied,
            selection_bias=self.bias,
            router="sigmoid" if self.sigmoid else "softmax",
            z_loss=0.1 * self.z_loss,
        ).to(self.dtype)

    def config(self) -> fxo.OverlapConfig:
        return fxo.OverlapConfig(
            self.pattern, schedule=self.schedule, delay_wgrad=self.delay_wgrad, grad_scale=self.grad_scale
        )


FEATURES = ("shared", "dropout", "tied", "bias", "sigmoid", "z_loss")
FACTORS: dict[str, tuple[Any, ...]] = {
    "pattern": PATTERNS,
    "place": PLACES,
    "schedule": SCHEDULES,
    "dtype": (torch.float32, torch.bfloat16),
    "delay_wgrad": (True, False),
    "grad_scale": (1.0, 0.7),
} | dict.fromkeys(FEATURES, (False, True))


def pairs(row: dict[str, Any]) -> set[tuple[Any, ...]]:
    """The choices of a row, two at a time."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(FACTORS, 2) if a in row and b in row}


def pairwise() -> list[Case]:
    """Few cases in which all pairs of choices occur.

    Each starts with a pair that is missing, and adds the choice that brings most missing pairs, else the rarest one.
    """
    names = itertools.combinations(FACTORS, 2)
    missing = {(a, x, b, y) for a, b in names for x in FACTORS[a] for y in FACTORS[b]}
    uses: Counter[tuple[str, Any]] = Counter()
    cases = []
    while missing:
        a, x, b, y = min(missing, key=str)
        row = {a: x, b: y}
        for name in FACTORS:
            if name not in row:
                gains = {v: (len(missing & pairs({**row, name: v})), -uses[name, v]) for v in FACTORS[name]}
                row[name] = max(gains, key=gains.__getitem__)
        missing -= pairs({name: row[name] for name in FACTORS})
        uses.update(row.items())
        cases.append(Case(**row))
    return cases


def product() -> list[Case]:
    """Every pattern, dtype, place and schedule, plain and with the features in two halves and all together."""
    halves = (("shared", "dropout", "tied"), ("bias", "sigmoid", "z_loss"))
    sets = [dict.fromkeys(names, True) for names in ((), *halves, sum(halves, ()))]
    choices = itertools.product(
        (*PATTERNS, "[*E][*E]"), (torch.float32, torch.bfloat16), PLACES, ("auto", "sequential"), sets
    )
    return [Case(p, dtype, place, schedule, **features) for p, dtype, place, schedule, features in choices]


def outcome(case: Case, group: dist.ProcessGroup | None, rank: int = 0, counts: Sequence[int] = COUNTS) -> list[str]:
    """Train the case's model; every difference from eager."""
    return train_both(
        case.model(group), lambda step: batches(counts[step], rank, seed=step), case.config(), steps=len(counts)
    )


CASES = pairwise()
PRODUCT = product()
LONG = tuple(count for count in (1, 2, 5) for _ in range(5))


def on_one_rank(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, id=str(case)) for case in cases if case.place != "two ranks"]


def on_two_ranks(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, id=str(case)) for case in cases if case.place == "two ranks"]


def test_every_pair_of_choices_has_a_case() -> None:
    met = set().union(*(pairs(case._asdict()) for case in CASES))
    for a, b in itertools.combinations(FACTORS, 2):
        assert {(a, x, b, y) for x in FACTORS[a] for y in FACTORS[b]} <= met
    assert len(CASES) < 30


@pytest.mark.parametrize("case", on_one_rank(CASES))
def test_one_rank(case: Case, group: dist.ProcessGroup) -> None:
    assert outcome(case, group) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", on_one_rank(PRODUCT))
def test_one_rank_product(case: Case, group: dist.ProcessGroup) -> None:
    assert outcome(case, group, counts=LONG) == []


# --- two ranks: all cases of a fixture in one spawn ----------------------------------------------------------------


def run_cases(rank: int, cases: list[Case], counts: Sequence[int]) -> dict[str, list[str]]:
    """On one of two ranks: the differences of each case."""
    return {str(case): reported(outcome, case, dist.group.WORLD, rank, counts) for case in cases}


def reported(function: Callable[..., list[str]], *args: Any) -> list[str]:
    """What a function found, or the error that it raised: one case must not hide the others."""
    try:
        return function(*args)
    except Exception:
        return [traceback.format_exc()]


def run_default(rank: int) -> dict[str, Any]:
    """On one of two ranks: everything that the default suite asks of two ranks."""
    found: dict[str, Any] = run_cases(rank, [param.values[0] for param in on_two_ranks(CASES)], COUNTS)
    for name, function in SPECIAL.items():
        found[name] = reported(function, rank)
    return found


def unequal_lengths(rank: int) -> list[str]:
    """The ranks have different numbers of tokens, and one of them in every other microbatch another number."""
    lengths = ((8, 8), (5, 8))[rank]
    model = toy("[*E]", dist.group.WORLD)

    def make(step: int) -> list[tuple]:
        return [batches(1, rank, lengths[(step + i) % 2], seed=10 * step + i)[0] for i in range(3)]

    return train_both(model, make)


def nothing_for_rank_1(rank: int) -> list[str]:
    """All tokens go to the experts of rank 0, which keep all of them during training."""
    model = send_to_first_experts(toy("[*E]", dist.group.WORLD))
    found = train_both(model, lambda step: batches(3, rank, seed=step))
    rows = received_rows(model, batches(3, rank))
    expected = 0 if rank else 2 * 2 * 8  # top-2 of the 8 tokens of two ranks
    return found + [f"received {count} rows, expected {expected}" for count in rows if count != expected]


def one_expert_a_rank(rank: int) -> list[str]:
    """Two experts on two ranks, each token goes to one of them."""
    model = toy("[*E]", dist.group.WORLD, num_experts=2, top_k=1)
    return train_both(model, lambda step: batches(3, rank, seed=step))


def rows_received(rank: int) -> list[str]:
    """Not a comparison: the rows that the cases' routing sends to this rank, one number a microbatch and layer."""
    model = toy("[*E][*E]", dist.group.WORLD)
    return [str(count) for count in received_rows(model, batches(5, rank))]


SPECIAL: dict[str, Callable[[int], list[str]]] = {
    each.__name__: each for each in (unequal_lengths, nothing_for_rank_1, one_expert_a_rank, rows_received)
}


def send_to_first_experts(model: HybridModel) -> HybridModel:
    """Give the hidden state a component that is always positive, and the router's first two experts a weight on it."""
    with torch.no_grad():
        model.embed.weight[:, 0] = 20.0
        for layer in model.layers:
            if hasattr(layer, "router"):
                layer.router.weight[:, 0] = torch.tensor([4.0, 4.0, -4.0, -4.0])
    return model


def received_rows(model: nn.Module, microbatches: Sequence[tuple]) -> list[int]:
    """The rows that this rank's experts get, for each microbatch and MoE layer in turn."""
    rows = []

    def recorded(*args: Any) -> Any:
        result = exchange_counts(*args)
        rows.append(result[2])
        return result

    exchange_counts = ops.exchange_counts
    with patch.object(ops, "exchange_counts", recorded), torch.no_grad():
        for microbatch in microbatches:
            model(*microbatch)
    return rows


@pytest.fixture(scope="module")
def found_on_two(two_ranks: TwoRanks) -> list[dict[str, Any]]:
    return two_ranks.run(run_default, timeout_s=300)


@pytest.fixture(scope="module")
def two_ranks_product(two_ranks: TwoRanks) -> list[dict[str, Any]]:
    return two_ranks.run(run_cases, [param.values[0] for param in on_two_ranks(PRODUCT)], LONG, timeout_s=1400)


@pytest.mark.parametrize("case", on_two_ranks(CASES))
def test_two_ranks(case: Case, found_on_two: list[dict[str, Any]]) -> None:
    assert [each[str(case)] for each in found_on_two] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("case", on_two_ranks(PRODUCT))
def test_two_ranks_product(case: Case, two_ranks_product: list[dict[str, Any]]) -> None:
    assert [each[str(case)] for each in two_ranks_product] == [[], []]


@pytest.mark.parametrize("name", ["unequal_lengths", "nothing_for_rank_1", "one_expert_a_rank"])
def test_uneven_ranks(name: str, found_on_two: list[dict[str, Any]]) -> None:
    assert [each[name] for each in found_on_two] == [[], []]


def test_the_cases_route_unequal_numbers_of_tokens(found_on_two: list[dict[str, Any]]) -> None:
    first, second = (each["rows_received"] for each in found_on_two)
    assert len(first) == 10 and len(set(first)) > 2
    assert sum(a != b for a, b in zip(first, second, strict=True)) > 5


# --- what a step does with gradients and parameters ----------------------------------------------------------------


def beside_eager(model: nn.Module, config: fxo.OverlapConfig | None = None) -> tuple[nn.Module, fxo.OverlappedModel]:
    """An eager copy, and the transformed model."""
    return copy.deepcopy(model), fxo.transform(model, config)


def assert_same_step(eager: nn.Module, overlapped: fxo.OverlappedModel, microbatches: Sequence[Any]) -> None:
    """One more step of both, without zero_grad, gives the same."""
    losses = eager_step(eager, microbatches, overlapped.config.grad_scale)
    result = overlapped.step(microbatches)
    assert [a for a, b in zip(losses, result.losses, strict=True) if not same_bits(a, b)] == []
    assert differences(eager, overlapped.module) == []


def test_gradients_accumulate_in_place(group: dist.ProcessGroup) -> None:
    eager, overlapped = beside_eager(toy("[*E]", group, tied=True))
    assert_same_step(eager, overlapped, batches(2))
    before = {name: (id(p.grad), p.grad.data_ptr()) for name, p in overlapped.module.named_parameters()}
    assert_same_step(eager, overlapped, batches(3, seed=1))
    assert before == {name: (id(p.grad), p.grad.data_ptr()) for name, p in overlapped.module.named_parameters()}


@pytest.mark.parametrize("scale", [0.3, 2, torch.tensor(0.3), torch.tensor(0.3, dtype=torch.float64)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grad_scale(scale: Any, dtype: torch.dtype) -> None:
    config = fxo.OverlapConfig(grad_scale=scale)
    eager, overlapped = beside_eager(toy("*-").to(dtype), config)
    assert_same_step(eager, overlapped, batches(2))


def test_grad_scale_of_a_microbatch_overrides_the_config() -> None:
    eager, overlapped = beside_eager(toy("[*E]"), fxo.OverlapConfig(grad_scale=0.3))
    scales = (None, 0.7, torch.tensor(3.0), 0.0)
    given = [fxo.Microbatch(each, grad_scale=scale) for each, scale in zip(batches(4), scales, strict=True)]
    assert_same_step(eager, overlapped, given)
    assert len({float(loss) for loss in overlapped.step(given).losses}) == 4  # not multiplied: none of them is 0


def test_without_delay_no_weight_gradient_is_a_node_of_its_own(group: dist.ProcessGroup) -> None:
    eager, overlapped = beside_eager(toy("[*E]", group), fxo.OverlapConfig(delay_wgrad=False))
    assert_same_step(eager, overlapped, batches(3))
    assert ".W" not in str(overlapped.plan("FB"))


def test_frozen_and_unused_parameters_get_no_gradient(group: dist.ProcessGroup) -> None:
    model = toy("*-[*E]", group, shared_dim=8)
    model.unused = nn.Parameter(torch.ones(2))
    frozen = [model.embed.weight, model.layers[1].swiglu.down.weight, model.layers[3].w_down, model.norm.weight]
    for param in frozen:
        param.requires_grad_(False)
    eager, overlapped = beside_eager(model)
    assert_same_step(eager, overlapped, batches(3))
    assert all(param.grad is None for param in (*frozen, model.unused))
    assert sum(param.grad is not None for param in model.parameters()) == len(list(model.parameters())) - 5


def test_parameters_frozen_between_steps(group: dist.ProcessGroup) -> None:
    eager, overlapped = beside_eager(toy("[*E]", group))
    assert_same_step(eager, overlapped, batches(2))
    for model in (eager, overlapped.module):
        model.layers[1].w_gate_up.requires_grad_(False)
    assert_same_step(eager, overlapped, batches(2, seed=1))


def test_one_expert_on_one_rank(group: dist.ProcessGroup) -> None:
    model = toy("[*E]", group, num_experts=1, top_k=1)
    assert train_both(model, lambda step: batches(3, seed=step)) == []
