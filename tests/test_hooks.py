"""Hooks of modules, parameters and activations: they fire as in eager, or the module is refused by name."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from toys import batches, differences, eager_step, same_bits, toy, train_both
from two_ranks import TwoRanks

import fxoverlap as fxo

pytestmark = pytest.mark.usefixtures("shared_captures")

KINDS = ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fqn", ["", "layers.1", "layers.1.router", "head"])
def test_b23_counting_hook_of_a_module_is_refused_by_name(group: dist.ProcessGroup, kind: str, fqn: str) -> None:
    model, count = toy("[*E]", group), Counter()  # type: ignore[var-annotated]
    handle = getattr(model.get_submodule(fqn), kind)(lambda *_: count.update([kind]))
    with pytest.raises(fxo.UnsupportedError, match=rf"'{fqn or 'HybridModel'}' has forward or backward hooks"):
        fxo.transform(model, example_inputs=batches(1)[0])
    assert count == {}
    handle.remove()


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_hook"])
def test_b23_hook_of_all_modules_is_refused(kind: str) -> None:
    handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    try:
        with pytest.raises(fxo.UnsupportedError, match="hooks of all modules"):
            fxo.transform(toy("*-"), example_inputs=batches(1)[0])
    finally:
        handle.remove()


def test_b23_hook_that_is_added_between_steps_is_refused(group: dist.ProcessGroup) -> None:
    model = toy("[*E]", group)
    overlapped = fxo.transform(model)
    overlapped.step(batches(2))
    model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(fxo.UnsupportedError, match=r"'layers\.1' has forward or backward hooks"):
        overlapped.step(batches(2))


class Hooked(nn.Module):
    """A hook on an activation changes its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(self.embed(tokens))
        x.register_hook(lambda gradient: gradient * 0.5)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def test_hook_on_an_activation_is_captured() -> None:
    assert train_both(Hooked(), lambda step: batches(3, seed=step), steps=2) == []


def reduced(model: nn.Module, run: Any) -> tuple[dict[str, int], dict[str, Tensor], list[str]]:
    """Run a step with a hook on every parameter that sums its gradient over the ranks.

    Returns how often each hook fired, the gradients as the hooks found them, and which found none.
    """
    fired: dict[str, int] = {}
    found: dict[str, Tensor] = {}
    works: list[Any] = []
    empty: list[str] = []

    def hook_of(name: str) -> Any:
        def hook(param: Tensor) -> None:
            fired[name] = fired.get(name, 0) + 1
            if param.grad is None:
                empty.append(name)
                return
            found[name] = param.grad.clone()
            works.append(dist.all_reduce(param.grad, async_op=True))

        return hook

    handles = [param.register_post_accumulate_grad_hook(hook_of(name)) for name, param in model.named_parameters()]
    run()
    for work in works:
        work.wait()
    for handle in handles:
        handle.remove()
    return fired, found, empty


def reduce_in_hooks(rank: int, schedule: str, delay_wgrad: bool) -> dict[str, Any]:
    """One microbatch, eager and overlapped, with an asynchronous all-reduce in each hook."""
    model = toy("EE", dist.group.WORLD, shared_dim=12, tied=True)
    eager, given = copy.deepcopy(model), batches(1, rank)
    overlapped = fxo.transform(model, fxo.OverlapConfig(schedule=schedule, delay_wgrad=delay_wgrad))
    fired, wanted, _ = reduced(eager, lambda: eager_step(eager, given))
    ours, found, empty = reduced(model, lambda: overlapped.step(given))
    return {
        "fired": (fired, ours),
        "empty": empty,
        "other": [name for name in wanted if not same_bits(wanted[name], found[name])],
        "differences": differences(eager, model),
        "is summed": not same_bits(found["embed.weight"], model.embed.weight.grad),
    }


def reduce_in_all_ways(rank: int) -> list[dict[str, Any]]:
    return [reduce_in_hooks(rank, *each) for each in (("auto", True), ("auto", False), ("sequential", True))]


@pytest.fixture(scope="module")
def found_on_two(two_ranks: TwoRanks) -> list[list[dict[str, Any]]]:
    return two_ranks.run(reduce_in_all_ways, timeout_s=300)


def test_b34_b39_hooks_fire_once_after_the_real_gradient_and_its_reduction_is_kept(found_on_two: Any) -> None:
    for ways in found_on_two:
        for way in ways:
            eager, ours = way["fired"]
            assert set(eager.values()) == {1} and ours == eager
            assert way["empty"] == way["other"] == way["differences"] == []
            assert way["is summed"]
