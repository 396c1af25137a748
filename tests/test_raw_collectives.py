"""Models on torch's functional collectives, as other people have them, are cut and run like the reference model.

Splits are lists of sizes, read from data or static; blocks may have any name; other all-to-alls may stand beside the
exchanges. What cannot be an exchange is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from toys import RawModel, RawMoE, batches, train_both
from two_ranks import TwoRanks

import fxoverlap as fxo
from fxoverlap.ir import Lane, Slot

pytestmark = pytest.mark.usefixtures("shared_captures")


class Capacity(nn.Module):
    """A residual MoE block in which every expert takes its best 3 tokens: splits are static, so they are left out."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group.group_name, group.size()
        self.norm = nn.LayerNorm(16)
        self.router = nn.Linear(16, 4, bias=False)
        self.w = nn.Parameter(torch.randn(4 // self.ranks, 16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weight, token = self.router(flat).softmax(-1).t().topk(3)
        rows = self._exchange(flat[token.flatten()])
        weights = self._exchange(weight.flatten())
        by_expert = rows.view(self.ranks, len(self.w), 3, 16).transpose(0, 1).reshape(len(self.w), -1, 16)
        out = torch.relu(torch.bmm(by_expert, self.w)).view(len(self.w), self.ranks, 3, 16)
        back = self._exchange(out.transpose(0, 1).reshape(-1, 16) * weights[:, None])
        return x + torch.zeros_like(flat).index_add(0, token.flatten(), back).view_as(x)

    def _exchange(self, rows: Tensor) -> Tensor:
        return funcol.all_to_all_single_autograd(rows, None, None, self.group)


class Turned(nn.Module):
    """A residual block that splits positions over a group while it works, as sequence-parallel attention does."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group.group_name
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = funcol.all_to_all_single_autograd(self.linear(x).transpose(0, 1).contiguous(), None, None, self.group)
        y = funcol.all_to_all_single_autograd(torch.tanh(y), None, None, self.group)
        return x + y.transpose(0, 1)


class WaitsAgain(RawMoE):
    """A MoE block that waits for what functional collectives may have waited for, and drops rows of its experts."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        choice = self.router(flat).argmax(-1)
        order = choice.argsort(stable=True)
        counts = (choice[:, None] == torch.arange(self.experts)).sum(0)
        received = funcol.wait_tensor(funcol.all_to_all_single(counts, None, None, self.group))
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        got = received.view(self.ranks, -1).sum(1).tolist()
        for size in (*sent, *got):
            torch._check(size >= 0)
        rows = funcol.wait_tensor(funcol.all_to_all_single_autograd(flat[order], got, sent, self.group))
        rows = nn.functional.dropout(torch.relu(rows @ self.w), 0.3)
        back = funcol.all_to_all_single_autograd(rows, sent, got, self.group)
        return x + torch.zeros_like(flat).index_copy(0, order, back).view_as(x)


class OneWay(RawMoE):
    """A MoE block that sends the experts' results on instead of back."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        order = self.router(flat).argmax(-1).argsort()
        counts = torch.full((self.ranks,), len(flat) // self.ranks)
        sent = counts.tolist()
        got = funcol.all_to_all_single(counts, None, None, self.group).tolist()
        for size in (*sent, *got):
            torch._check(size >= 0)
        rows = funcol.all_to_all_single_autograd(flat[order], got, sent, self.group)
        on = funcol.all_to_all_single_autograd(torch.relu(rows @ self.w), got, sent, self.group)
        return x + on.sum(0)


class Net(nn.Module):
    """Embedding, blocks under any attribute name, head, cross entropy."""

    def __init__(self, *blocks: nn.Module, name: str = "layers") -> None:
        super().__init__()
        self.name = name
        self.embed = nn.Embedding(32, 16)
        setattr(self, name, nn.ModuleList(blocks))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in getattr(self, self.name):
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` gives, with the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def send_to_expert_0(model: RawModel) -> RawModel:
    """Make the first expert the best one for every token."""
    with torch.no_grad():
        for block in model.layers:
            block.norm.bias[0] = 20.0
            block.router.weight[:, 0] = torch.tensor([4.0, 0.0, 0.0, -4.0])
    return model


MODELS: dict[str, Callable[[dist.ProcessGroup, dist.ProcessGroup], nn.Module]] = {
    "layers": lambda group, other: RawModel(group),
    "blocks": lambda group, other: RawModel(group, name="blocks"),
    "all_to_one": lambda group, other: send_to_expert_0(RawModel(group)),
    "capacity": lambda group, other: Net(Capacity(group), Capacity(group)),
    "capacity_blocks": lambda group, other: Net(Capacity(group), Capacity(group), name="blocks"),
    "turned_before": lambda group, other: Net(Turned(other), RawMoE(16, 4, group)),
    "turned_between": lambda group, other: Net(RawMoE(16, 4, group), Turned(other), RawMoE(16, 4, group), name="body"),
}
COMM = {
    "layers": {"counts": 2, "dispatch": 4, "combine": 4},
    "blocks": {"counts": 2, "dispatch": 4, "combine": 4},
    "all_to_one": {"counts": 2, "dispatch": 4, "combine": 4},
    "capacity": {"dispatch": 4, "combine": 4},
    "capacity_blocks": {"dispatch": 4, "combine": 4},
    "turned_before": {"counts": 1, "dispatch": 2, "combine": 2},
    "turned_between": {"counts": 2, "dispatch": 4, "combine": 4},
}
"""Comm nodes of one microbatch, forward and backward, by slot."""


def build(name: str, group: dist.ProcessGroup, other: dist.ProcessGroup) -> fxo.OverlappedModel:
    return fxo.transform(seeded(lambda: MODELS[name](group, other)))


def train(overlapped: fxo.OverlappedModel, rank: int = 0) -> list[str]:
    """Every difference from eager in three steps of 1, 3 and 2 microbatches."""
    return train_both(overlapped, lambda step: batches((1, 3, 2)[step], rank, seed=step))


def comm_nodes(overlapped: fxo.OverlappedModel) -> list[fxo.ScheduleNode]:
    """The comm nodes of one microbatch, forward and backward."""
    return [i.node for i in overlapped.plan("FB").order if i.node.lane is Lane.COMM]


@pytest.fixture(scope="module")
def other(group: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group([0])


@pytest.mark.parametrize("name", MODELS)
def test_one_rank(name: str, group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    overlapped = build(name, group, other)
    assert train(overlapped) == []
    nodes = comm_nodes(overlapped)
    assert Counter(node.slot.value for node in nodes) == COMM[name]
    # Tokens and their probabilities are dispatched by two calls, which make one exchange.
    assert {len(node.ops) for node in nodes if node.slot is Slot.DISPATCH} == {2}
    assert {len(node.ops) for node in nodes if node.slot is not Slot.DISPATCH} == {1}


def test_all_to_one_is_what_its_name_says(group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    model = seeded(lambda: MODELS["all_to_one"](group, other))
    choices = []
    for block in model.layers:
        block.router.register_forward_hook(lambda module, args, scores: choices.append(scores.argmax(-1)))
    model(*batches(1)[0])
    assert [choice.unique().tolist() for choice in choices] == [[0], [0]]


def test_waits_of_the_model_and_dropout_on_rows_of_experts(group: dist.ProcessGroup) -> None:
    overlapped = fxo.transform(seeded(lambda: Net(WaitsAgain(16, 4, group))))
    assert train(overlapped) == []
    assert Counter(node.slot.value for node in comm_nodes(overlapped)) == {"counts": 1, "dispatch": 2, "combine": 2}


# --- two ranks: one spawn ------------------------------------------------------------------------------------------

ON_TWO_RANKS = ("blocks", "all_to_one", "capacity", "turned_between")


def run_two_ranks(rank: int) -> dict[str, list[str]]:
    other = dist.new_group([0, 1])
    return {name: train(build(name, dist.group.WORLD, other), rank) for name in ON_TWO_RANKS}


@pytest.fixture(scope="module")
def found_on_two(two_ranks: TwoRanks) -> list[dict[str, list[str]]]:
    return two_ranks.run(run_two_ranks, timeout_s=300)


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks(name: str, found_on_two: list[dict[str, list[str]]]) -> None:
    assert [each[name] for each in found_on_two] == [[], []]


# --- which group, and what is refused ------------------------------------------------------------------------------


def test_a_combine_that_does_not_reverse_the_dispatch_is_refused(group: dist.ProcessGroup) -> None:
    model = seeded(lambda: Net(OneWay(16, 4, group)))
    with pytest.raises(fxo.UnsupportedError, match=r"'layers\.0'.*does not reverse its split sizes.*Send the results"):
        fxo.transform(model, example_inputs=batches(1)[0])
    assert model(*batches(1)[0]).isfinite()


def test_two_groups_with_static_splits_need_a_choice(group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    model = seeded(lambda: Net(Turned(other), Capacity(group)))
    with pytest.raises(fxo.UnsupportedError, match=r"several process groups.*OverlapConfig\.process_group"):
        fxo.transform(model, example_inputs=batches(1)[0])


@pytest.mark.parametrize("by_name", [False, True])
def test_process_group_chooses(by_name: bool, group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    for chosen in (other, group):
        config = fxo.OverlapConfig(process_group=chosen.group_name if by_name else chosen)
        overlapped = fxo.transform(seeded(lambda: Net(Turned(other), Capacity(group))), config)
        assert train(overlapped) == []
        found = {node.name: len(node.ops) for node in comm_nodes(overlapped)}
        two = 2 if chosen is group else 1
        assert found == {"L0.dispatch.F": two, "L0.combine.F": 1, "L0.dispatch.B": two, "L0.combine.B": 1}
