"""Ambient autocast: the same bits as eager under the same autocast, or a refusal that says why."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from toys import Made, batches, differences, eager_step, rows, toy, train_both

import fxoverlap as fxo
from fxoverlap.ir import Phase


class UsedTwice(nn.Module):
    """One weight at two uses, whose gradients autocast sums in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x)).square().mean()


def both_under_autocast(model: nn.Module, microbatches: list, **options) -> list[str]:
    """Differences after one step, eager and overlapped, each under its own autocast."""
    eager = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, **options):
        losses = eager_step(eager, microbatches)
    with torch.autocast("cpu", torch.bfloat16, **options):
        found = fxo.transform(model).step(microbatches).losses
    wrong = [f"loss {i}" for i, (a, b) in enumerate(zip(losses, found, strict=True)) if not torch.equal(a, b)]
    return wrong + differences(eager, model)


def test_moe_under_autocast_equals_eager(group) -> None:
    assert both_under_autocast(toy("[*E]-", group), batches(3)) == []


SEEN: list[bool] = []


@torch.library.custom_op("fxoverlap_tests::watched", mutates_args=())
def watched(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(torch.is_autocast_enabled("cpu"))
    return x * 2


watched.register_fake(torch.empty_like)
watched.register_autograd(lambda ctx, gradient: watched(gradient))


def test_custom_ops_run_with_autocast_off() -> None:
    overlapped = fxo.transform(Made(lambda m, x: watched(m.linear(x)).float().sum()))
    with torch.autocast("cpu", torch.bfloat16):
        overlapped.step(rows(0))
        assert torch.is_autocast_enabled("cpu")
    assert SEEN == [False] * 6  # forward and backward of three microbatches


def test_weight_used_twice_under_autocast_equals_eager() -> None:
    assert both_under_autocast(UsedTwice(), [(torch.randn(4, 8),) for _ in range(3)]) == []


def test_head_of_several_depths_under_autocast_equals_eager(group) -> None:
    assert both_under_autocast(toy("[*E]/[*E]/[*E]", group), batches(3)) == []


class Tied(nn.Module):
    """A weight that autocast casts for one use or two, and that an embedding reads once or twice as it is."""

    def __init__(self, embeds: int, products: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 8)
        self.mixes = nn.ModuleList(nn.Linear(8, 8) for _ in range(embeds))
        self.products = products

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for i, mix in enumerate(self.mixes):
            x = mix(x) + (self.embed(ids + i) if i else 0)
        for _ in range(self.products):
            x = nn.functional.linear(x, self.embed.weight)
        return x.float().square().mean()


def test_tied_weight_under_autocast_equals_eager_or_is_refused() -> None:
    microbatches = [(torch.randint(0, 6, (5,)),) for _ in range(3)]
    assert both_under_autocast(Tied(1), microbatches) == []
    with pytest.raises(fxo.UnsupportedError, match=r"embed\.weight has 3 gradients.*enter it in forward"):
        both_under_autocast(Tied(2), microbatches)


def test_tied_weight_under_autocast_inside_the_model_equals_eager() -> None:
    class Inside(Tied):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(ids)

    assert train_both(Inside(3), lambda step: [(torch.randint(0, 6, (5,)),) for _ in range(3)]) == []


@pytest.mark.parametrize("cache", [True, None, False])
def test_autocast_inside_the_model_equals_eager(cache) -> None:
    class Inside(UsedTwice):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                y = self.linear(self.linear(x))
            return y.float().square().mean()

    def make(step: int) -> list[tuple]:
        return [(torch.randn(4, 8),) for _ in range(2)]

    assert train_both(Inside(), make) == []


def test_explicit_casts_are_summed_as_eager_sums_them() -> None:
    class Explicit(UsedTwice):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = (x.bfloat16() @ self.linear.weight.bfloat16()).float()
            return x.square().mean()

    assert train_both(Explicit(), lambda step: [(torch.randn(4, 8),) for _ in range(2)]) == []


def test_weight_used_twice_without_the_cast_cache_equals_eager() -> None:
    assert both_under_autocast(UsedTwice(), [(torch.randn(4, 8),) for _ in range(3)], cache_enabled=False) == []


def test_autocast_belongs_to_the_variant(group) -> None:
    overlapped = fxo.transform(toy("*-"))
    overlapped.step(batches(1))
    with torch.autocast("cpu", torch.bfloat16):
        overlapped.step(batches(1))
    overlapped.step(batches(1))
    assert overlapped.report().variants == 2


def test_bilinear_is_refused_under_autocast_only() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.pair = nn.Bilinear(4, 4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pair(x, x).square().sum()

    assert train_both(Pair(), lambda step: rows(step)) == []
    with pytest.raises(fxo.UnsupportedError, match=r"'pair' \(Bilinear\)"):
        both_under_autocast(Pair(), [(torch.randn(3, 4),)])


def test_gradients_of_a_weight_that_layers_share_are_w_under_autocast() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            first = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
            self.layers = nn.ModuleList([first, nn.Sequential(nn.LayerNorm(8), first[1])])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                for layer in self.layers:
                    x = layer(x)
            return x.float().square().mean()

    model = Shared()
    overlapped = fxo.transform(model)
    assert train_both(overlapped, lambda step: [(torch.randn(4, 8),) for _ in range(2)]) == []
    chunk = overlapped.plan("B").chunks["B"]
    ops = {node.name: node for node in chunk.joint.module.graph.nodes}
    products = {
        node.phase: sum(ops[op].target is torch.ops.aten.mm.default for op in node.ops)
        for node in chunk.nodes
        if node.layer == 1 and node.phase is not Phase.F
    }
    assert products == {Phase.B: 1, Phase.W: 1}
