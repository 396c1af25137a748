"""With recompute a step gives the bits of eager without it: losses, gradients, buffers, generator, trained parameters.

In-place writes to buffers happen once; draws are those of the forward, with other microbatches' draws in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from hybrid_patterns import SMALL
from odd import Dense, Odd, in_turn, moe
from replays import faults
from torch import Tensor, nn
from toys import Made, batches, rows, toy, train_both
from two_ranks import TwoRanks

import fxoverlap as fxo

pytestmark = pytest.mark.usefixtures("shared_captures")

Recompute = fxo.Recompute

ASKED = (
    *(Recompute("uniform", layers) for layers in (1, 2, 3, 7)),
    *(Recompute("block", layers) for layers in (1, 2, 5)),
    Recompute("selective", modules=("layers.*.norm",)),
    Recompute("selective", modules=("layers.1", "layers.3")),
    Recompute("uniform", keep=("dispatch",)),
    Recompute("uniform", 2, keep=("dispatch", "combine")),
    Recompute("uniform", keep=("experts",)),
    Recompute("uniform", prefetch=True),
)

CHOICES: dict[str, tuple[Any, ...]] = {
    "asked": ASKED,
    "schedule": ("auto", "megatron", "sequential"),
    "dropout": (0.0, 0.1),
    "low": ("no", "autocast", "bf16"),
    "losses": (False, True),
    "shared_dim": (0, 12),
    "tied": (False, True),
    "packed": (False, True),
    "lengths": ((8, 8, 8), (8,), (8, 8), (8, 4, 8, 4, 8)),
    "ramp": ("none", "pair"),
    "early_release": (False, True),
    "delay_wgrad": (True, False),
}


def packed(microbatch: tuple[Tensor, Tensor]) -> fxo.Microbatch:
    """Two sequences in one row, said by keyword."""
    tokens, targets = microbatch
    return fxo.Microbatch((tokens, targets), {"cu_seqlens": torch.tensor([0, 3, tokens.numel()])})


def outcome(
    row: dict[str, Any], group: dist.ProcessGroup, rank: int = 0, steps: int = 2, pattern: str = "*E-*-"
) -> list[str]:
    """What differs from eager in some steps of 5 layers, or those of another pattern."""
    more = {"router": "sigmoid", "aux_loss": 0.01, "z_loss": 0.1, "selection_bias": True} if row["losses"] else {}
    model = toy(pattern, group, dropout=row["dropout"], shared_dim=row["shared_dim"], tied=row["tied"], **more)
    model = model.bfloat16() if row["low"] == "bf16" else model

    def make(step: int) -> list[Any]:
        torch.clear_autocast_cache()  # else eager uses casts of the weights before the optimizer's step
        found = [batches(1, rank, tokens=n, seed=10 * step + i)[0] for i, n in enumerate(row["lengths"])]
        return list(map(packed, found)) if row["packed"] else found

    flags = {name: row[name] for name in ("schedule", "ramp", "early_release", "delay_wgrad")}
    # Under autocast a weight that is used twice is refused.
    is_cast = row["low"] == "autocast" and not row["tied"]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        return train_both(model, make, fxo.OverlapConfig(recompute=row["asked"], **flags), steps)


def sampled(count: int) -> list[dict[str, Any]]:
    """Rows in which each way to ask occurs with values of the other flags that change from row to row."""
    names = [name for name in CHOICES if name != "asked"]
    found = []
    for i in range(count):
        row = {
            name: CHOICES[name][(i * (k + 1) + i // len(ASKED)) % len(CHOICES[name])] for k, name in enumerate(names)
        }
        found.append({"asked": ASKED[i % len(ASKED)], **row})
    return found


@pytest.mark.parametrize("row", sampled(len(ASKED)), ids=lambda row: repr(row["asked"]))
def test_every_way_to_ask_gives_the_bits_of_eager(row: dict[str, Any], group: dist.ProcessGroup) -> None:
    assert outcome(row, group) == [], row


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED, ids=repr)
def test_every_pair_of_flags_with_every_way_to_ask(asked: fxo.Recompute, group: dist.ProcessGroup) -> None:
    names = [name for name in CHOICES if name != "asked"]
    for first, second in itertools.combinations(names, 2):
        for a, b in itertools.product(CHOICES[first][1:], CHOICES[second][1:]):
            row = {name: CHOICES[name][0] for name in names} | {"asked": asked, first: a, second: b}
            assert outcome(row, group) == [], row


@pytest.mark.parametrize("pattern", ["MG", "+E"])
def test_layers_of_other_kinds(group: dist.ProcessGroup, pattern: str) -> None:
    config = fxo.OverlapConfig(recompute=Recompute("uniform"), schedule="megatron")
    model = toy(pattern, group, dropout=0.1, **SMALL)
    assert train_both(model, lambda step: batches(2, seed=step), config, steps=1) == []


# --- two ranks -----------------------------------------------------------------------------------------------------


def on_ranks(rank: int) -> list[list[str]]:
    """On one of two ranks: what differs from eager. In the last cases one rank gets no tokens."""
    group = dist.group.WORLD
    plain = {name: values[0] for name, values in CHOICES.items()} | {"schedule": "megatron"}
    rows = [
        plain | {"dropout": 0.1},
        plain | {"asked": Recompute("uniform", 2), "losses": True, "schedule": "auto", "shared_dim": 12},
        plain | {"asked": Recompute("uniform", keep=("dispatch", "combine")), "low": "bf16", "lengths": (8, 4)},
        plain | {"asked": Recompute("selective", modules=("layers.0", "layers.2")), "ramp": "pair"},
    ]
    found = [outcome(row, group, rank, steps=1, pattern="E-E") for row in rows]
    for keep in ((), ("dispatch",)):
        starved = toy("EE", group, top_k=1)
        for layer in starved.layers:
            with torch.no_grad():
                layer.router.weight.zero_()  # equal scores: every token chooses the same expert
        config = fxo.OverlapConfig(recompute=Recompute("uniform", keep=keep))
        found.append(train_both(starved, lambda step: batches(3, rank, seed=step), config, steps=1))
    return found


def test_two_ranks_and_one_without_tokens(two_ranks: TwoRanks) -> None:
    assert two_ranks.run(on_ranks, timeout_s=300) == [[[]] * 6] * 2


# --- draws ---------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """`f(layer, x)` behind a norm and a linear layer, with buffers; residual."""

    def __init__(self, f: Callable[[Any, Tensor], Tensor], **buffers: Tensor | None) -> None:
        super().__init__()
        self.norm, self.linear, self.f = nn.LayerNorm(16), nn.Linear(16, 16), f
        for name, value in buffers.items():
            self.register_buffer(name, None if value is None else value.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self, self.linear(self.norm(x)))


DRAWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout": lambda m, y: F.dropout(y, 0.3),
    "transposed": lambda m, y: F.dropout(y.transpose(1, 2), 0.3).transpose(1, 2),
    "native": lambda m, y: torch.native_dropout(y, 0.3, True)[0],
    "native mask": lambda m, y: y * torch.native_dropout(y, 0.3, True)[1],
    "feature": lambda m, y: F.dropout1d(y, 0.3),
    "bernoulli": lambda m, y: y * torch.bernoulli(y.detach().sigmoid()),
    "rand_like": lambda m, y: y * torch.rand_like(y) * torch.rand(()),
    "randn": lambda m, y: y * torch.randn(y.shape[1], 1) * torch.randint_like(y, 5),
    "randperm": lambda m, y: y[:, torch.randperm(y.shape[1])] * y,
    "multinomial": lambda m, y: y.scatter(-1, torch.multinomial(y.detach().softmax(-1)[0], 2)[None], 0.0),
    "attention": lambda m, y: F.scaled_dot_product_attention(y, y, y, dropout_p=0.3),
    "rrelu": lambda m, y: F.rrelu(y, training=True),
    "gumbel": lambda m, y: F.gumbel_softmax(y, hard=True) * y,
}


@pytest.mark.parametrize("draw", DRAWS)
def test_b44_masks_are_those_of_the_forward(draw: str) -> None:
    """Microbatch 1 draws in its forward before microbatch 0 draws again."""
    config = fxo.OverlapConfig(recompute=Recompute("uniform"), schedule="megatron")
    model = Odd(in_turn, Layer(DRAWS[draw]), Layer(DRAWS[draw]))
    assert train_both(model, lambda step: batches(3, seed=step), config, steps=1) == []


@pytest.mark.parametrize("asked", [Recompute("uniform"), Recompute("block"), Recompute("selective", modules=("drop",))])
def test_b44_no_element_has_another_mask(asked: fxo.Recompute) -> None:
    class Cos(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x.sin()).cos()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.layers = nn.Parameter(torch.linspace(0.2, 1.2, 4096)), nn.ModuleList([Cos()])

        def forward(self, scale: Tensor) -> tuple[Tensor, Tensor]:
            out = self.layers[0](self.x * scale)
            return out.sum(), out

    model = Model()
    overlapped = fxo.transform(model, fxo.OverlapConfig(recompute=asked))
    result = overlapped.step([(torch.ones(()),)])
    assert int(((result.outputs[0][0] != 1) != (model.x.grad != 0)).sum()) == 0


# --- state ---------------------------------------------------------------------------------------------------------


def in_place(m: Any, y: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
    return y.relu() * m.mean


def read_before(m: Any, y: Tensor) -> Tensor:
    """The backward, and so the replay, reads what the buffer was."""
    y = y * m.mean.clone().sigmoid()
    m.mean.add_(y.detach().mean((0, 1)))
    return y.relu()


def assigned(m: Any, y: Tensor) -> Tensor:
    y = y * m.mean.sigmoid()
    m.mean = m.mean * 0.5 + y.detach().mean((0, 1))
    return y.relu() * m.mean


def amax(m: Any, y: Tensor) -> Tensor:
    m.mean = torch.roll(m.mean, 1).index_put((torch.tensor(0),), y.detach().abs().max())
    scale = m.mean.max()
    return (y / scale).clamp(-1, 1) * scale


@torch.library.custom_op("fxoverlap_test::seen", mutates_args={"seen"})
def seen(x: Tensor, seen: Tensor) -> Tensor:
    seen.add_(x.shape[0])
    return x.sum(0)


@seen.register_fake
def _(x: Tensor, seen: Tensor) -> Tensor:
    return x.new_empty(x.shape[1:])


def custom(m: Any, y: Tensor) -> Tensor:
    return y.relu() * seen(y.detach()[0], m.mean).sigmoid()


WRITES = (in_place, read_before, assigned, amax, custom)


@pytest.mark.parametrize("asked", [Recompute("uniform"), Recompute("uniform", 3)], ids=repr)
@pytest.mark.parametrize("write", WRITES)
def test_buffers_change_once(write: Any, asked: fxo.Recompute, group: dist.ProcessGroup) -> None:
    model = Odd(in_turn, Layer(write, mean=torch.ones(16)), moe(group), Layer(write, mean=torch.ones(16)))
    config = fxo.OverlapConfig(recompute=asked, schedule="megatron")
    overlapped = fxo.transform(model, config, example_inputs=batches(1)[0])
    assert faults(overlapped.plan("FB").backward) == []
    assert train_both(overlapped, lambda step: batches(3, seed=step), steps=2) == []


class Combined(nn.Module):
    """The backward of `add` does not read the shift, but its replay does."""

    def __init__(self, combine: Callable[..., Tensor]) -> None:
        super().__init__()
        self.combine = combine

    def forward(self, x: Tensor, part: Tensor) -> Tensor:
        return torch.sigmoid(self.combine(x, part)).square()


@pytest.mark.parametrize("combine", [torch.add, torch.mul])
@pytest.mark.parametrize(
    "part", [lambda mean: mean.chunk(2)[1], lambda mean: mean[2:], lambda mean: mean.view(2, 2)[1]]
)
def test_a_part_of_a_buffer_taken_outside_the_region_is_that_of_its_microbatch(part: Any, combine: Any) -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        y = m.combined(m.linear(x)[:, :2], part(m.mean))
        m.mean = m.mean + 1.0
        return y.sum()

    config = fxo.OverlapConfig(recompute=Recompute("selective", modules=("combined",)))
    assert train_both(Made(loss, combined=Combined(combine)), rows, config) == []


class Counted(nn.Module):
    """A counter of tokens, which begins as None."""

    count: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("count", None)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tensor(x.shape[0] * x.shape[1])
        self.count = seen if self.count is None else self.count + seen
        return x + self.linear(x).relu()


def test_b45_b46_a_counter_that_begins_as_none_counts_each_token_once() -> None:
    model = Odd(in_turn, Counted(), Dense())
    overlapped = fxo.transform(model, fxo.OverlapConfig(recompute=Recompute("uniform")))
    overlapped.step(batches(3))
    assert model.layers[0].count.item() == 24


def test_b47_tokens_are_counted_in_integers(group: dist.ProcessGroup) -> None:
    model = toy("[*E]", group, router="sigmoid", selection_bias=True, top_k=1).bfloat16()
    with torch.no_grad():
        model.layers[1].router.weight.zero_()
    overlapped = fxo.transform(model, fxo.OverlapConfig(recompute=Recompute("uniform")))
    overlapped.step(batches(1, tokens=257))
    assert sorted(model.layers[1].tokens_per_expert.tolist()) == [0, 0, 0, 257]


# --- cases of others -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer_steps", "pattern"), [(10, "EEEE"), (20, "[*E]E")])
def test_b04_b25_many_steps(group: dist.ProcessGroup, optimizer_steps: int, pattern: str) -> None:
    config = fxo.OverlapConfig(recompute=Recompute("uniform"))
    assert train_both(toy(pattern, group), lambda step: batches(3, seed=step), config, optimizer_steps) == []


class Masked(nn.Module):
    """A router with an auxiliary loss over what a mask leaves; metadata that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.linear = nn.Linear(16, 4), nn.Linear(16, 16)

    def forward(self, x: Tensor, meta: tuple[int, None], *, mask: Tensor | None = None, scaled: bool = False) -> Any:
        scores = self.router(x).softmax(-1)
        kept = scores if mask is None else scores * mask[..., None]
        x = x + self.linear(x).relu() * scores.amax(-1, keepdim=True)
        return x * meta[0] if scaled else x, kept.mean((0, 1)).square().sum()


class WithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(32, 16), nn.ModuleList(Masked() for _ in range(3))

    def forward(self, tokens: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        x, losses = self.embed(tokens), 0.0
        for layer in self.layers:
            x, loss = layer(x, (2, None), mask=mask, scaled=True)
            losses = losses + loss
        return F.cross_entropy(x.flatten(0, 1), targets.flatten() % 16) + losses


@pytest.mark.parametrize("asked", [Recompute("uniform"), Recompute("selective", modules=("layers.*",))], ids=repr)
def test_b09_b50_b51_masks_and_metadata_reach_the_replay(asked: fxo.Recompute) -> None:
    def make(step: int) -> list[Any]:
        first, *others = batches(3, seed=step)
        return [fxo.Microbatch(first, {"mask": torch.arange(8)[None] < 5}), *others]

    assert train_both(WithMask(), make, fxo.OverlapConfig(recompute=asked), steps=2) == []


class Cast(nn.Module):
    """Ends with a view and a cast of what an exchange brought."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.moe, self.group = moe(group), group.group_name

    def forward(self, x: Tensor) -> Tensor:
        rows = funcol.all_to_all_single_autograd(self.moe(x).flatten(0, 1), [8], [8], self.group)
        return rows.view(1, 8, 16).bfloat16()


@pytest.mark.parametrize("asked", [Recompute("uniform"), Recompute("selective", modules=("layers.*",))], ids=repr)
def test_b71_a_view_and_a_cast_of_a_waited_result_end_a_segment(asked: fxo.Recompute, group: dist.ProcessGroup) -> None:
    model = Odd(lambda m, x: m.layers[1](m.layers[0](x).float()).float(), Cast(group), Dense())
    assert train_both(model, lambda step: batches(3, seed=step), fxo.OverlapConfig(recompute=asked), steps=1) == []


# --- wirings -------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def halves(m: Any, x: Tensor) -> Tensor:
    """Each layer works on half of the positions, and gates the other half."""
    for layer in m.layers:
        a, b = x.chunk(2, 1)
        x = torch.cat((layer(a), b * a.sigmoid()), 1)
    return x


def residuals(m: Any, x: Tensor) -> Tensor:
    found, mask = [], torch.rand(x.shape) < 0.8
    for layer in m.layers:
        found.append(x)
        x = layer(x) * mask + found[0].sigmoid() * found[len(found) // 2]
    return x


def weights(m: Any, x: Tensor) -> Tensor:
    """One weight, and what is made of it, in several segments."""
    weight = m.layers[0].linear.weight.tanh()
    return m.layers[2](m.layers[1](m.layers[0](x) @ weight) @ weight.t()) @ (weight * weight.sigmoid())


class Reduced(Layer):
    """Collectives that are no exchanges, of one result and of two."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        name = group.group_name
        wait = torch.ops._c10d_functional.wait_tensor

        def reduce(m: Any, y: Tensor) -> Tensor:
            with torch.no_grad():
                one = funcol.all_reduce(y, "sum", name)
                parts = torch.ops._c10d_functional.all_reduce_coalesced([y * 1, y * 2], "sum", name)
                two, three = (wait(part) for part in parts)
            return y * one.sigmoid() * two.tanh() + y.relu() * three

        super().__init__(reduce)


def twice(m: Any, x: Tensor) -> Tensor:
    return m.layers[0](m.layers[1](m.layers[0](x)))


def first_result(m: Any, x: Tensor) -> Tensor:
    return m.layers[1](m.layers[0](x)[0])


def wirings(group: dist.ProcessGroup) -> dict[str, Callable[[], nn.Module]]:
    return {
        "halves": lambda: Odd(halves, moe(group), Dense(), moe(group)),
        "residuals": lambda: Odd(residuals, Dense(), moe(group), Dense()),
        "weights": lambda: Odd(weights, Dense(), moe(group), Dense()),
        "twice": lambda: Odd(twice, Dense(), moe(group)),
        "reduced": lambda: Odd(in_turn, Reduced(group), moe(group)),
        "stages": lambda: Odd(in_turn, Stage(moe(group), Dense()), Stage(moe(group), Dense())),
        "lstm": lambda: Odd(first_result, nn.LSTM(16, 16, batch_first=True), Dense()),
    }


@pytest.mark.parametrize("wiring", ["halves", "residuals", "weights", "twice", "reduced", "stages", "lstm"])
def test_odd_wirings(wiring: str, group: dist.ProcessGroup) -> None:
    """Regions that share layers, values that cross them, and parts of kept tensors."""
    make = wirings(group)[wiring]
    layers = "parts.*" if wiring == "stages" else "layers.*"
    cases = (Recompute("uniform"), Recompute("uniform", 2), Recompute("selective", modules=("layers.*",)))
    for asked, schedule in zip(cases, ("auto", "megatron", "auto"), strict=True):
        config = fxo.OverlapConfig(recompute=asked, schedule=schedule, layers=layers)
        overlapped = fxo.transform(make(), config, example_inputs=batches(1)[0])
        assert faults(overlapped.plan("FB").backward) == [], asked
        assert train_both(overlapped, lambda step: batches(2, seed=step), steps=1) == [], asked


def test_a_region_may_hold_the_whole_trunk_and_what_is_beside_it() -> None:
    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = Inner(), nn.Linear(16, 32)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.trunk(tokens)).flatten(0, 1), targets.flatten())

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(32, 16), nn.ModuleList(Dense() for _ in range(3))
            self.norm = nn.LayerNorm(16)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    for schedule in ("auto", "megatron"):
        config = fxo.OverlapConfig(recompute=Recompute("selective", modules=("trunk",)), schedule=schedule)
        assert train_both(Trunk(), lambda step: batches(2, seed=step), config, steps=1) == []
