"""What others read of a region's results is not kept for them: their backward reads what the replay makes.

Proves: eager's bits for regions that are parts of layers; that what the forward leaves falls by the bytes of their
results, predicted and measured; and which readers make a result kept.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from odd import Odd, in_turn
from replays import chunk_of, faults, ops_of, replay_nodes, saved
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import RawMoE, batches, train_both

import fxoverlap as fxo
from fxoverlap.benchmarks.live_bytes import LiveBytes
from fxoverlap.ir import ChunkGraph

pytestmark = pytest.mark.usefixtures("shared_captures")

DIM, HIDDEN, HEADS, TOKENS = 16, 24, 2, 8
FLOAT = 4  # bytes


class Core(nn.Module):
    """Causal attention of queries, keys and values [batch, heads, positions, width], without parameters."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.core = Core()

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).view(*x.shape[:2], 3 * HEADS, -1).transpose(1, 2)
        y = self.core(*qkv.chunk(3, 1)).transpose(1, 2).reshape(x.shape)
        return x + F.dropout(self.out(y), 0.1)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * HIDDEN), nn.Linear(HIDDEN, DIM)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + F.dropout(self.down(self.act(gate) * up), 0.1)


class Experts(RawMoE):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1)


PATTERN = "*-E-"
SETS: dict[str, tuple[str, ...]] = {
    "norms": ("layers.*.norm",),
    "activations": ("act",),
    "up-projections": ("up", "qkv"),
    "core attention": ("core",),
    "whole MoE": ("layers.2",),
    "several": ("layers.*.norm", "act", "core"),
}


def model(group: dist.ProcessGroup, vocab: int = 32) -> Odd:
    torch.manual_seed(0)
    made = Odd(in_turn, Attention(), Gated(), Experts(DIM, 4, group), Gated())
    made.head = nn.Linear(DIM, vocab)
    return made


def asked(modules: tuple[str, ...], **config: Any) -> dict[str, Any]:
    return {"pattern": PATTERN, "recompute": fxo.Recompute("selective", modules=modules), **config}


# --- bits ----------------------------------------------------------------------------------------------------------


# (tokens of each microbatch, autocast, schedule)
WAYS = [((8,), True, "auto"), ((8, 8), False, "megatron"), ((8, 4, 8), False, "auto")]
FEW = [(name, WAYS[i % 3]) for i, name in enumerate(SETS)]
ALL = [pytest.param(name, way, marks=pytest.mark.slow) for name in SETS for way in WAYS if (name, way) not in FEW]


@pytest.mark.parametrize(("name", "way"), [*FEW, *ALL])
def test_parts_of_layers_have_the_bits_of_eager(
    name: str, way: tuple[tuple[int, ...], bool, str], group: dist.ProcessGroup
) -> None:
    lengths, low, schedule = way

    def make(step: int) -> list[tuple]:
        return [batches(1, tokens=n, seed=10 * step + i)[0] for i, n in enumerate(lengths)]

    config = fxo.OverlapConfig(**asked(SETS[name], schedule=schedule))
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        overlapped = fxo.transform(model(group), config, example_inputs=make(0)[0])
        assert faults(overlapped.plan("FB").backward) == []
        assert train_both(overlapped, make, steps=1) == []  # autocast keeps the casts of the first step


# --- bytes ---------------------------------------------------------------------------------------------------------

# What the forward leaves less: floats of a token.
FREED = {
    "norms": 4 * (DIM + 2),  # normed rows, mean, 1 / deviation
    "activations": 2 * HIDDEN,
    "up-projections": 2 * 2 * HIDDEN + 3 * DIM,
    "core attention": DIM + HEADS,  # attended rows, logarithm of the sum of exponentials
}


def measured(overlapped: fxo.OverlappedModel, given: list[tuple]) -> tuple[int, int]:
    """(measured, predicted) peak of a step. Of several steps the least: a group's thread may let go a moment late."""
    found = []
    overlapped.step(given)  # captures
    for _ in range(3):
        overlapped.module.zero_grad()
        with overlapped.profile(), LiveBytes() as live:
            overlapped.step(given, outputs=False)
        predicted = overlapped.report().profiled_peak_bytes
        assert predicted is not None
        found.append((live.peak, predicted))
    return min(found)


def peak_at_the_logits(group: dist.ProcessGroup, **config: Any) -> int:
    """Of one microbatch, where all is alive that the forward leaves; the prediction is checked."""
    config = {"pattern": PATTERN, "schedule": "sequential", **config}
    found, predicted = measured(
        fxo.transform(model(group, 2048), fxo.OverlapConfig(**config)), batches(1, tokens=TOKENS)
    )
    assert found == predicted
    return found


@pytest.fixture(scope="module")
def plain_peak(group: dist.ProcessGroup) -> int:
    return peak_at_the_logits(group)


@pytest.mark.parametrize("name", FREED)
def test_what_a_layer_leaves_falls_by_the_results_of_its_regions(
    name: str, group: dist.ProcessGroup, plain_peak: int
) -> None:
    assert plain_peak - peak_at_the_logits(group, **asked(SETS[name])) == TOKENS * FREED[name] * FLOAT


def test_predicted_bytes_are_those_measured(group: dist.ProcessGroup) -> None:
    given = [batches(1, tokens=n)[0] for n in (8, 4, 8)]
    overlapped = fxo.transform(model(group), fxo.OverlapConfig(**asked(SETS["several"], costs="cpu")))
    found, predicted = measured(overlapped, given)
    assert found == predicted


# --- what makes a result kept --------------------------------------------------------------------------------------


class Part(nn.Module):
    """`tanh`, whose backward reads its result."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class Parts(nn.Module):
    """The layer `f(layer)`."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        self.one, self.two, self.first, self.then, self.f = Part(), Part(), nn.Linear(16, 16), nn.Linear(16, 16), f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x)


def remade(chunk: ChunkGraph) -> Counter[str]:
    """The ops of R nodes."""
    by_name = ops_of(chunk)
    return Counter(str(by_name[op].target) for node in replay_nodes(chunk) for op in node.ops)


def parted(m: Any, x: Tensor) -> Tensor:
    a, b = m.one(m.first(x)).chunk(2, -1)
    return x + torch.cat((a * b, b), -1)


def turned(m: Any, x: Tensor) -> Tensor:
    a, b = m.one(m.first(x)).transpose(1, 2).view(-1, 16, 2, 4).transpose(1, 3).unbind(2)
    return x + (a.sigmoid() * b.sin()).sum()


# (layer, globs): which is made again of `tanh`, and how often.
KEPT: dict[str, tuple[Any, tuple[str, ...], int]] = {
    "read by what is no region": (lambda m, x: m.then(m.one(m.first(x))), ("one",), 1),
    "parted by what is no region": (parted, ("one",), 1),
    "a part of a view of it": (turned, ("one",), 1),
    "read by a region": (lambda m, x: m.then(m.two(m.one(m.first(x)))), ("one", "two"), 1),
    "a view of it read by a region": (
        lambda m, x: m.then(m.two(m.one(m.first(x)).transpose(1, 2)).transpose(1, 2)),
        ("one", "two"),
        1,
    ),
    "a part of it read by a region": (
        lambda m, x: x + m.two(m.one(m.first(x)).chunk(2, -1)[0]).repeat(1, 1, 2).sin(),
        ("one", "two"),
        1,
    ),
    "by nothing": (lambda m, x: m.then(m.first(x)) + m.one(x).detach(), ("one",), 0),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_a_region_makes_for_others_is_made_again_unless_a_region_starts_from_it(case: str) -> None:
    f, modules, count = KEPT[case]
    made = Odd(in_turn, Parts(f))
    config = {"recompute": fxo.Recompute("selective", modules=modules)}
    chunk = chunk_of(made, batches(1)[0], **config)
    again = remade(chunk)["aten.tanh.default"]
    kept = sum(str(ops_of(chunk)[value].target) == "aten.tanh.default" for value in saved(chunk))
    assert (again, kept) == (count, len(modules) - 1), case
    assert faults(chunk) == []
    assert train_both(made, lambda step: batches(2, seed=step), fxo.OverlapConfig(**config), steps=1) == []


@pytest.mark.parametrize("f", [lambda y: y, lambda y: y.chunk(2, 1)[0]], ids=["all of it", "a part of it"])
def test_what_the_backward_of_another_layer_reads_is_kept(f: Any) -> None:
    def wire(m: Any, x: Tensor) -> Tensor:
        first, second = m.layers
        y = f(first.one(first.first(x)))
        z = second(x)
        return torch.cat((z[:, : y.shape[1]] * y, z), 1)[:, : x.shape[1]]

    made = Odd(wire, Parts(lambda m, x: x), Parts(lambda m, x: m.then(x)))
    config = {"recompute": fxo.Recompute("selective", modules=("one",))}
    assert remade(chunk_of(made, batches(1)[0], **config))["aten.tanh.default"] == 0
    assert train_both(made, lambda step: batches(2, seed=step), fxo.OverlapConfig(**config), steps=1) == []


def test_what_a_checkpoint_of_the_user_gives_is_made_again() -> None:
    made = Odd(in_turn, Parts(lambda m, x: m.then(checkpoint(m.one, m.first(x), use_reentrant=False))))
    chunk = chunk_of(made, batches(1)[0])
    assert remade(chunk)["aten.tanh.default"] == 1
    assert train_both(made, lambda step: batches(2, seed=step), steps=1) == []
