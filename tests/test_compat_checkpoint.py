"""The part of `fxoverlap.compat` that stands in for `torch.utils.checkpoint` while a model is traced.

When torch moves one of them, the test that fails names it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from test_compat import Loss, export
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fxoverlap import compat

module: Any = torch.utils.checkpoint
aten = torch.ops.aten


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("nothing begins a region below checkpoint")


def contexts() -> Any:
    return create_selective_checkpoint_contexts([aten.sin.default])


@pytest.mark.parametrize(
    "call, expected",
    [
        (lambda f, x: checkpoint(f, x, use_reentrant=True), ({}, True, None)),
        (lambda f, x: checkpoint(f, x, use_reentrant=False), ({}, False, None)),
        (lambda f, x: checkpoint(f, x, use_reentrant=False, k=1, debug=True), ({"k": 1}, False, None)),
        (lambda f, x: checkpoint(f, x, use_reentrant=True, preserve_rng_state=False), ({}, True, None)),
        (lambda f, x: checkpoint(f, x, use_reentrant=False, early_stop=False), ({}, False, None)),
        (
            lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=contexts, determinism_check="none"),
            ({}, False, contexts),
        ),
        (
            lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=module.noop_context_fn),
            ({}, False, None),
        ),
        (lambda f, x: module.CheckpointFunction.apply(f, True, x), ({}, True, None)),
    ],
)
def test_checkpoint_is_replaced_and_put_back(call: Callable[..., Any], expected: tuple[Any, ...]) -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[tuple[Any, ...]] = []

    def replacement(*given: Any) -> str:
        seen.append(given)
        return "replaced"

    with compat.checkpoint_replaced(replacement, refuse):
        assert call(torch.sin, x) == "replaced"
    assert seen == [(torch.sin, (x,), *expected)]
    assert torch.equal(checkpoint(torch.sin, x, use_reentrant=True), x.sin())
    assert torch.equal(checkpoint(torch.sin, x, use_reentrant=False), x.sin()) and len(seen) == 1


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant parameter")
def test_checkpoint_is_reentrant_unless_told_otherwise() -> None:
    with compat.checkpoint_replaced(lambda *given: given[3], refuse):
        assert checkpoint(torch.sin, torch.ones(2)) is True


@pytest.mark.skipif(torch.__version__ < "2.14", reason="checkpoint is a decorator from torch 2.14 on")
def test_decorated_functions_are_replaced() -> None:
    decorated: Any = checkpoint(use_reentrant=False)(torch.sin)  # type: ignore[call-arg, call-overload, unused-ignore]
    with compat.checkpoint_replaced(lambda *given: given[2:], refuse):
        assert decorated(torch.ones(2)) == ({}, False, None)


def test_what_begins_a_region_below_checkpoint_is_refused() -> None:
    with compat.checkpoint_replaced(lambda *given: None, refuse), pytest.raises(AssertionError, match="nothing begins"):
        module._checkpoint_without_reentrant_generator(torch.sin)


def test_policy_is_read_from_selective_contexts_only() -> None:
    found = compat.policy_of(contexts())
    assert found is not None and found(None, aten.sin.default) and found(None, aten.cos.default)
    assert found(None, aten.sin.default) != found(None, aten.cos.default)
    assert compat.policy_of((contextlib.nullcontext(), contextlib.nullcontext())) is None
    assert compat.policy_of(contexts()[::-1]) is None

    class Own(module._CachingTorchDispatchMode):
        """Might do anything."""

    assert compat.policy_of((Own(found, {}), contexts()[1])) is None


def test_results_that_a_policy_saves_are_noted() -> None:
    asked: list[tuple[Any, Any]] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        asked.append((op, context.op_output.shape))
        return op in (aten.sin.default, aten.add_.Tensor)

    def function(x: Tensor) -> Tensor:
        with compat.PolicyNoted(policy), compat.annotating("region", "r"):
            return x.sin().cos().detach().exp().add_(1)

    nodes = export(Loss(lambda x: (x * function(x)).tanh()), torch.ones(3, requires_grad=True)).graph.nodes
    forward = [node for node in nodes if node.op == "call_function" and not compat.is_backward(node)]
    kept = {node.target for node in forward if compat.is_kept(node)}
    assert kept == {aten.sin.default, aten.add.Tensor}
    ours = {node.target for node in forward if compat.annotation(node, "region") == "r"}
    assert ours >= {aten.sin.default, aten.cos.default, aten.add.Tensor} and aten.tanh.default not in ours
    once = [(op, (3,)) for op in (aten.sin.default, aten.cos.default, aten.exp.default, aten.add_.Tensor)]
    assert asked == once * 2, "forward is traced twice; detach is not asked about"


def test_torchs_own_answers_are_understood() -> None:
    for answer in module.CheckpointPolicy:
        policy = functools.partial(lambda answer, *args: answer, answer)

        def function(x: Tensor, policy: Any = policy) -> Tensor:
            with compat.PolicyNoted(policy):
                return x.sin()

        nodes = export(Loss(lambda x, f=function: f(x).exp()), torch.ones(3, requires_grad=True)).graph.nodes  # type: ignore[misc]
        assert any(map(compat.is_kept, nodes)) == answer.name.endswith("SAVE"), answer
