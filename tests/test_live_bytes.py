"""The meter of live bytes, on blocks that can be counted by hand. A tensor of 256 floats has 1024 bytes, a KB here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fxoverlap import compat
from fxoverlap.benchmarks.live_bytes import LiveBytes

pytestmark = pytest.mark.usefixtures("shared_captures")

KB = 1024


def kb(requires_grad: bool = False) -> Tensor:
    return torch.ones(256, requires_grad=requires_grad)


def temporaries() -> Any:
    x = torch.ones(256)
    x = x + 1  # the old one lives until the new one is there
    return x + 1


def views() -> Any:
    x = torch.ones(2, 256)
    return [x[0], x.t(), x.view(-1)]


def view_of_much() -> Any:
    return torch.ones(8, 256)[0]  # keeps all of its base


def in_place() -> Any:
    return torch.ones(256).add_(1).mul_(2)


def several_results() -> Any:
    return torch.ones(256).sort().indices  # the values die at once


def grown() -> Any:
    return torch.empty(128).resize_(256)


CASES: list[tuple[Callable[[], Any], int, int]] = [
    (temporaries, 2, 1),
    (views, 2, 2),
    (view_of_much, 8, 8),
    (in_place, 1, 1),
    (several_results, 1 + 1 + 2, 2),
    (grown, 1, 1),
]


@pytest.mark.parametrize(("block", "peak", "left"), CASES, ids=[block.__name__ for block, _, _ in CASES])
def test_counted_by_hand(block: Callable[[], Any], peak: int, left: int) -> None:
    with LiveBytes() as live:
        kept = block()
    assert (live.peak, live.alive) == (peak * KB, left * KB)
    del kept


def test_what_was_there_before_does_not_count() -> None:
    before = kb()
    with LiveBytes() as live:
        views = [before.view(16, 16), before[1:], before.add_(1)]
        before = None
        made = views[0] + 1
    assert live.peak == live.alive == KB
    del views, made


def test_backward_counts_what_is_saved_and_the_gradients() -> None:
    weight = kb(requires_grad=True)
    with LiveBytes(curve=True) as live:
        loss = weight.sin().exp().sum()
        forward = live.alive
        loss.backward()
    # exp saves its result, sin its input, which was there before.
    assert forward == KB + 4
    assert live.alive == 4 + KB and weight.grad is not None
    names = [name for name, _ in live.curve]
    assert "aten.sin.default" in names and "aten.cos.default" in names  # forward, and backward
    assert live.peak == max(alive for _, alive in live.curve)


def test_checkpoint_holds_less() -> None:
    def block(x: Tensor) -> Tensor:
        return x.sin().exp().tanh()

    peaks = {}
    for name in ("plain", "checkpointed"):
        x = kb(requires_grad=True)
        with LiveBytes() as live:
            hidden = x
            for _ in range(8):
                hidden = block(hidden) if name == "plain" else checkpoint(block, hidden, use_reentrant=False)
            hidden.sum().backward()
        peaks[name] = live.peak
    assert peaks["checkpointed"] < 0.7 * peaks["plain"]


def boxed(*ops: Any) -> fx.GraphModule:
    """A node's module: unary ops one after the other."""
    graph = fx.Graph()
    graph.set_codegen(compat.BoxedCodeGen())
    value = graph.placeholder("x")
    for op in ops:
        value = graph.call_function(op, (value,))
    graph.output((value,))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("is_held", [False, True])
def test_ops_below_autograd_are_seen_and_boxed_arguments_die_in_the_callee(is_held: bool) -> None:
    aten = torch.ops.aten
    module = boxed(aten.sin.default, aten.cos.default, aten.exp.default)
    with LiveBytes() as live, compat.below_autograd():
        arguments = [torch.ones(256)]
        held = arguments[0] if is_held else None
        (result,) = module(arguments)
    assert live.peak == (3 if is_held else 2) * KB
    assert live.alive == (2 if is_held else 1) * KB
    del held, result


def test_higher_order_ops_run_and_count() -> None:
    saves = torch._prims.rng_prims.run_and_save_rng_state
    with LiveBytes() as live, compat.below_autograd():
        state, mask = saves(torch.ops.aten.rand_like.default, kb())
    assert live.alive == KB + state.untyped_storage().nbytes()
    del mask


def test_collectives_are_seen(group: dist.ProcessGroup) -> None:
    collective = torch.ops._c10d_functional.all_to_all_single
    with LiveBytes(curve=True) as live:
        sent = torch.ones(256)
        received = torch.ops._c10d_functional.wait_tensor(collective(sent, [256], [256], group.group_name))
    assert live.alive == live.peak == 2 * KB
    assert [name.split(".")[0] for name, _ in live.curve] == ["aten", "_c10d_functional", "_c10d_functional"]
    del received


def test_storages_may_die_in_another_thread() -> None:
    with LiveBytes() as live:
        held = [torch.ones(256)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        torch.ones(256)
    assert live.peak == KB and live.alive == 0
