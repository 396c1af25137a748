"""Random small models under random configs give eager's bits, or are refused with an error that says how to mend it.

Compared after every step: losses, outputs, gradients of parameters and of microbatch tensors, buffers, the generator,
and what hooks of parameters saw. A refusal must leave everything as it was. `random_models.Spec` says what varies.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from random_checks import check_all
from random_models import RandomModel, Spec, build, config, data, specs
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from toys import differences, result_of, same_bits

import fxoverlap as fxo
from fxoverlap.microbatch import as_microbatch

STEPS = 2
Seen = dict[str, list[Tensor]]


@dataclass
class Side:
    """A model with its optimizer and what the hooks of its parameters saw."""

    model: RandomModel
    seen: Seen = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        for i, (name, param) in enumerate(self.model.named_parameters()):
            if i % 2 == 0 and param.requires_grad:
                HOOKS[self.model.spec.hooks](param, self.seen.setdefault(name, []))

    def prepare(self, step: int) -> None:
        """What the spec wants changed before a step."""
        spec = self.model.spec
        if step and spec.between == "mode":
            self.model.train(not self.model.training)
        elif step and spec.between == "freeze":
            self.model.freeze("half")
        elif step and spec.between == "replace":
            self.model.norm.weight = nn.Parameter(self.model.norm.weight.detach() * 2)
        if step and spec.zero != "keep":
            self.optimizer.zero_grad(set_to_none=spec.zero == "none")
        torch.manual_seed(step)


def watch(param: nn.Parameter, seen: list[Tensor]) -> None:
    param.register_hook(lambda grad: seen.append(grad.clone()))
    param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))


def change(param: nn.Parameter, seen: list[Tensor]) -> None:
    param.register_hook(lambda grad: grad * 2)
    param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))


def consume(param: nn.Parameter, seen: list[Tensor]) -> None:
    def take(param: nn.Parameter) -> None:
        seen.append(param.grad)
        param.grad = None

    param.register_post_accumulate_grad_hook(take)


HOOKS: dict[str, Callable[[nn.Parameter, list[Tensor]], None]] = {
    "no": lambda param, seen: None,
    "watch": watch,
    "change": change,
    "consume": consume,
}


def autocast(spec: Spec) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(
        "cpu", torch.bfloat16, enabled=spec.autocast != "no", cache_enabled=spec.autocast != "uncached"
    )


def eager_step(side: Side, given: list[Any], scale: Any) -> tuple[list[Tensor], list[Any], Tensor]:
    """Losses, other outputs, and the state of the generator."""
    losses, outputs = [], []
    with autocast(side.model.spec):
        for each in map(as_microbatch, given):
            loss, rest = result_of(side.model(*each.args, **each.kwargs))
            (loss * (scale if each.grad_scale is None else each.grad_scale)).backward()
            losses.append(loss.detach())
            outputs.append(pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), rest))
    return losses, outputs, torch.get_rng_state()


def unlike(what: str, eager: Any, ours: Any) -> list[str]:
    """Names of the leaves that differ in any bit, or that their structures differ."""
    (wants, spec), (gots, other) = pytree.tree_flatten_with_path(eager), pytree.tree_flatten(ours)
    if spec != other:
        return [f"{what}: structure"]
    return [
        f"{what}{pytree.keystr(path)}"
        for (path, want), got in zip(wants, gots, strict=True)
        if not (same_bits(want, got) if isinstance(want, Tensor) and isinstance(got, Tensor) else want == got)
    ]


def leaf_gradients(given: list[Any]) -> list[Tensor | None]:
    return [leaf.grad for leaf in pytree.tree_leaves([each.kwargs for each in map(as_microbatch, given)])
            if isinstance(leaf, Tensor)]  # fmt: skip


def outcome(spec: Spec, group: dist.ProcessGroup) -> tuple[list[str], str | None]:
    """What differs from eager, and why the spec was refused, if it was."""
    ours = Side(build(spec, group))
    eager = Side(copy.deepcopy(ours.model))
    overlapped = fxo.transform(ours.model, config(spec))
    for step in range(STEPS):
        mine, theirs = data(spec, step), data(spec, step)
        for side in (eager, ours):
            side.prepare(step)
        state = torch.get_rng_state()
        kept = {param: param.grad for param in ours.model.parameters() if param.grad is not None}
        try:
            with autocast(spec):
                result = overlapped.step(mine)
        except (fxo.CaptureError, fxo.UnsupportedError) as error:
            found = unlike("generator", state, torch.get_rng_state()) + differences(eager.model, ours.model)
            eager_step(eager, theirs, overlapped.config.grad_scale)  # what is refused must be a model that runs
            return [f"after a refusal: {each}" for each in found], str(error)
        ended = torch.get_rng_state()
        torch.set_rng_state(state)
        losses, outputs, wanted = eager_step(eager, theirs, overlapped.config.grad_scale)
        found = unlike("generator", wanted, ended) + unlike("loss", losses, result.losses)
        found += unlike("output", outputs, result.outputs)
        found += unlike("gradient of leaf", leaf_gradients(theirs), leaf_gradients(mine))
        found += differences(eager.model, ours.model) + unlike("hook of ", eager.seen, ours.seen)
        if spec.hooks != "consume" and any(param.grad is not grad for param, grad in kept.items()):
            found.append("a gradient that existed was replaced")
        if found:
            return [f"step {step}: {each}" for each in found], None
        for side in (eager, ours):
            side.optimizer.step()
    return [], None


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_random_models_equal_eager_or_are_refused(count: int, group: dist.ProcessGroup, record_property: Any) -> None:
    record_property("summary", check_all(specs(), lambda spec: outcome(spec, group), count, "random models"))
