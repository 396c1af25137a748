"""The user's own `torch.utils.checkpoint`: however it is called, its ops carry the region and what a policy keeps.

Proves besides: arguments arrive as they are; the bits are those of the user's model with its checkpoints, which for
`use_reentrant=True` are not always those without; what cannot be a region is refused by name; torch is left as it was.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from odd import Attention, Dense, Odd, in_turn, moe
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.fx.traceback import current_meta
from torch.utils.checkpoint import CheckpointPolicy, checkpoint_sequential, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as imported
from toys import batches, train_both

import fxoverlap as fxo
from fxoverlap.capture import capture
from fxoverlap.ir import META, OpTag, Phase
from fxoverlap.microbatch import as_microbatch

aten = torch.ops.aten
plainly = functools.partial(imported, use_reentrant=False)
reentrant = functools.partial(imported, use_reentrant=True)
ADDMM, NORM, GETITEM = "aten.addmm.default", "aten.native_layer_norm.default", "<built-in function getitem>"


def some(step: int) -> list[tuple]:
    """Two microbatches of a step."""
    return batches(2, seed=step)


both = pytest.mark.parametrize("checkpoint", [plainly, reentrant], ids=["plainly", "reentrant"])


def tags(model: nn.Module, **config: Any) -> list[tuple[str, OpTag]]:
    """(op, tag) of each op that a capture gives."""
    joint = capture(model, as_microbatch(batches(1)[0]), fxo.OverlapConfig(**config)).joint
    return [(str(node.target), node.meta[META]) for node in joint.module.graph.nodes if node.op == "call_function"]


def regions(model: nn.Module, **config: Any) -> Counter[str]:
    """Regions, each with the number of its matrix products."""
    found = [(op, tag.region) for op, tag in tags(model, **config) if tag.region is not None]
    return Counter({region: sum(each == (ADDMM, region) for each in found) for _, region in found})


# --- ways to call it --------------------------------------------------------------------------------------------


def by_function(m: Odd, x: Tensor) -> Tensor:
    return plainly(lambda y: m.layers[1](m.layers[0](y)), x)


def by_module(m: Odd, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(m.layers[1], imported(m.layers[0], x, use_reentrant=False))


def by_partial(m: Odd, x: Tensor) -> Tensor:
    return plainly(functools.partial(m.layers[0].__call__), plainly(m.layers[1].forward, x))


def by_apply(m: Odd, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.CheckpointFunction.apply(in_turn, True, m, x)


def in_sequence(m: Odd, x: Tensor) -> Tensor:
    return checkpoint_sequential(nn.Sequential(*m.layers), 2, x, use_reentrant=False)


def one_twice(m: Odd, x: Tensor) -> Tensor:
    return plainly(m.layers[0], plainly(m.layers[0], m.layers[1](x)))


@pytest.mark.parametrize(
    "wire, expected",
    [
        (by_function, {"(model)#0": 2}),
        (by_module, {"layers.0#0": 1, "layers.1#0": 1}),
        (by_partial, {"layers.0#0": 1, "layers.1#0": 1}),
        (by_apply, {"(model)#0": 2}),
        (in_sequence, {"(model)#0": 1}),
        (one_twice, {"layers.0#0": 1, "layers.0#1": 1}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_region_is_named_by_its_module_or_its_caller(wire: Callable[..., Tensor], expected: dict[str, int]) -> None:
    model = Odd(wire, Dense(), Dense())
    assert regions(model) == expected
    assert train_both(model, some, steps=2) == []


class Inner(nn.Module):
    """Checkpoints functions of its own."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.first, self.second = Dense(), Dense()

    def forward(self, x: Tensor) -> Tensor:
        x = self.checkpoint(lambda y: self.first(y), x)
        return self.checkpoint(lambda y: torch.tanh(self.second(y)), x)


@both
def test_functions_are_named_by_the_module_that_calls(checkpoint: Callable[..., Any]) -> None:
    model = Odd(in_turn, Inner(checkpoint), Inner(checkpoint))
    assert list(regions(model)) == ["layers.0#0", "layers.0#1", "layers.1#0", "layers.1#1"]


@pytest.mark.parametrize("impl", list(CheckpointImpl))
@pytest.mark.parametrize("whole", [False, True], ids=["layers", "whole"])
def test_checkpoint_wrapper_makes_regions(impl: CheckpointImpl, whole: bool) -> None:
    layers = [Dense(), Dense()] if whole else [checkpoint_wrapper(Dense(), impl) for _ in range(2)]
    model = Odd(in_turn, *layers)
    expected = [f"layers.{i}._checkpoint_wrapped_module#0" for i in range(2)]
    if whole:
        model.wire = lambda m, x: m.all(x)
        model.all = checkpoint_wrapper(nn.Sequential(*model.layers), impl)
        expected = ["all._checkpoint_wrapped_module#0"]
    assert list(regions(model)) == expected
    assert train_both(model, some, steps=2) == []


@pytest.mark.skipif(torch.__version__ < "2.14", reason="checkpoint is a decorator from torch 2.14 on")
def test_decorator_makes_regions() -> None:
    decorated: Any = imported(use_reentrant=False)  # type: ignore[call-arg, call-overload, unused-ignore]
    assert regions(Odd(lambda m, x: decorated(in_turn)(m, x), Dense(), Dense())) == {"(model)#0": 2}


@both
def test_region_is_what_the_forward_ran_in_it(checkpoint: Callable[..., Any]) -> None:
    found = tags(Odd(lambda m, x: checkpoint(m.layers[1], m.layers[0](x)), Dense(), Dense()))
    inside = [tag for op, tag in found if tag.region is not None]
    assert {tag.phase for tag in inside} == {Phase.F} and {tag.region for tag in inside} == {"layers.1#0"}
    ran = [tag for _, tag in found if tag.phase is Phase.F and any(call == "layers.1#0" for call in tag.calls)]
    assert len(ran) > 5 and ran == inside


def test_no_region_without_gradients() -> None:
    def wire(m: Odd, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = plainly(m.layers[0], x)
        return x * scale

    assert regions(Odd(wire, Dense())) == {}


def test_b54_loss_in_chunks_is_no_region() -> None:
    class Chunked(Odd):
        def loss(self, x: Tensor, targets: Tensor) -> Tensor:
            rows = zip(self.head(self.norm(x)).flatten(0, 1).chunk(8), targets.flatten().chunk(8), strict=True)
            return torch.stack([F.cross_entropy(*each, reduction="sum") for each in rows]).sum()

    model = Chunked(in_turn, Dense())
    assert regions(model) == {} and train_both(model, some, steps=2) == []
    model = Chunked(lambda m, x: plainly(m.layers[0], x), Dense())
    assert regions(model) == {"layers.0#0": 1} and train_both(model, some, steps=2) == []


# --- arguments --------------------------------------------------------------------------------------------------


class Meta(NamedTuple):
    """No tensor."""

    name: str
    size: int


class Takes(Dense):
    """Takes what it was given if it is the same; a wrapper that rebuilds its arguments would be seen."""

    seen: tuple[Any, ...] = ()

    def forward(self, x: Tensor, meta: Meta, mask: Tensor | None, count: int, *, flag: bool = False) -> Tensor:
        Takes.seen = (type(meta), meta, mask is None, type(count), count, flag)
        y = super().forward(x) * count
        return (y if mask is None else y * mask) + flag


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_keyword", [False, True])
@both
def test_b50_b51_arguments_arrive_as_they_are(checkpoint: Callable[..., Any], with_keyword: bool, masked: bool) -> None:
    meta = Meta("a", 3)

    def wire(m: Odd, x: Tensor) -> Tensor:
        mask = (m.targets > 9).unsqueeze(-1) if masked else None
        if with_keyword and checkpoint is reentrant:  # which takes none
            return checkpoint(functools.partial(m.layers[0], flag=True), x, meta, mask, 2)
        return checkpoint(m.layers[0], x, meta, mask, 2, **({"flag": True} if with_keyword else {}))

    model = Odd(wire, Takes())
    assert regions(model) == {"layers.0#0": 1}
    assert Takes.seen == (Meta, meta, not masked, int, 2, with_keyword)
    assert train_both(model, some, steps=2) == []


class Masked(nn.Module):
    """B09: an optional mask that only the auxiliary loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.router = Dense(), nn.Linear(16, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z = self.router(x).logsumexp(-1).square()
        return self.dense(x), (z if mask is None else z * mask).mean()


@pytest.mark.parametrize("masked", [False, True])
@both
def test_b09_optional_mask_reaches_the_auxiliary_loss(checkpoint: Callable[..., Any], masked: bool) -> None:
    def wire(m: Odd, x: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(m.layers[0], x, *([m.targets > 9] if masked else []))

    assert train_both(Odd(wire, Masked()), some, steps=2) == []


@pytest.mark.parametrize(
    "options", [{"preserve_rng_state": False}, {"determinism_check": "none"}, {"early_stop": False}]
)
def test_options_of_eagers_replay_are_taken(options: dict[str, Any]) -> None:
    model = Odd(lambda m, x: plainly(m.layers[0], x, **options), Dense())
    assert regions(model) == {"layers.0#0": 1} and train_both(model, some, steps=2) == []


# --- bits -------------------------------------------------------------------------------------------------------


class Twice(Dense):
    """Reads its input three times."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * super().forward(x) + x


def unread(m: Odd, x: Tensor) -> Tensor:
    """A second result that nothing reads: eager's reentrant checkpoint gives what made it a gradient of zeros."""
    return reentrant(lambda y: (m.layers[0](y), m.layers[1](y)), x)[0]


def in_containers(m: Odd, x: Tensor) -> Tensor:
    """Nothing flows back through a container in a reentrant checkpoint."""
    kept, others = reentrant(lambda y: (m.layers[0](y), {"b": m.layers[1](y)}), x)
    return kept + others["b"] + reentrant(lambda y: [m.layers[1](y)], x)[0]


def untrained_input(m: Odd, x: Tensor) -> Tensor:
    """Nor into a reentrant checkpoint none of whose arguments is trained."""
    return x + reentrant(lambda y: m.layers[0](y), x.detach()) + plainly(lambda y: m.layers[1](y), x.detach())


def residual(m: Odd, x: Tensor) -> Tensor:
    """The gradient of x is summed in the region first."""
    return x * 0.7 + reentrant(m.layers[0], x) + torch.sin(x)


def residual_plainly(m: Odd, x: Tensor) -> Tensor:
    return x * 0.7 + plainly(m.layers[0], x) + torch.sin(x)


def passed_on(m: Odd, x: Tensor) -> Tensor:
    """A region that gives back its argument, and a number."""
    y, same, number = reentrant(lambda z: (m.layers[0](z), z, 3), x)
    return y * number + same


def dropping(m: Odd, x: Tensor) -> Tensor:
    y = plainly(lambda z: F.dropout(m.layers[0](z), 0.3), x)
    return F.dropout(reentrant(lambda z: F.dropout(m.layers[1](z), 0.3), y), 0.2)


@pytest.mark.parametrize(
    "wire", [unread, in_containers, untrained_input, residual, residual_plainly, passed_on, dropping]
)
def test_bits_are_those_of_the_model_with_its_checkpoints(wire: Callable[..., Tensor]) -> None:
    assert train_both(Odd(wire, Twice(), Twice()), some, steps=2) == []


@both
def test_bits_of_checkpointed_layers_with_exchanges(group: dist.ProcessGroup, checkpoint: Callable[..., Any]) -> None:
    model = Odd(lambda m, x: functools.reduce(lambda y, each: checkpoint(each, y), m.layers, x), moe(group), moe(group))
    assert list(regions(model)) == ["layers.0#0", "layers.1#0"]
    assert train_both(model, some, steps=2) == []


# --- selective checkpoints --------------------------------------------------------------------------------------


def selective(policy: Any) -> Callable[..., Any]:
    return functools.partial(plainly, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))


def second_product() -> Any:
    """Contexts whose policy counts, as policies do that save every second product: a new count for each call."""
    count: Counter[Any] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        count[op] += 1
        saved = op is aten.addmm.default and count[op] == 2
        return CheckpointPolicy.PREFER_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def products(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is aten.addmm.default


@pytest.mark.parametrize(
    "context_fn, kept",
    [
        (functools.partial(create_selective_checkpoint_contexts, [aten.addmm.default]), [ADDMM, ADDMM]),
        (functools.partial(create_selective_checkpoint_contexts, products), [ADDMM, ADDMM]),
        (
            functools.partial(create_selective_checkpoint_contexts, [aten.native_layer_norm.default]),
            [NORM, GETITEM, GETITEM, GETITEM] * 2,
        ),
        (functools.partial(create_selective_checkpoint_contexts, [aten.mul.Tensor]), []),
        (second_product, [ADDMM]),
    ],
    ids=["list", "policy", "several results", "nothing", "counting"],
)
def test_policy_says_what_is_kept(context_fn: Callable[[], Any], kept: list[str]) -> None:
    model = Odd(lambda m, x: plainly(in_turn, m, x, context_fn=context_fn), Dense(), Dense())
    found = tags(model)
    assert [op for op, tag in found if tag.keep] == kept
    assert {tag.region for op, tag in found if tag.keep} <= {"(model)#0"}
    assert train_both(model, some, steps=2) == []


def test_policy_sees_the_ops_that_it_sees_in_eager() -> None:
    seen: list[tuple[str, Any]] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append((str(op), getattr(args[0], "shape", None)))
        return CheckpointPolicy.MUST_RECOMPUTE

    model = Odd(lambda m, x: selective(policy)(in_turn, m, F.dropout(x, 0.5)), Attention(), Dense())
    model(*batches(1)[0])
    eager, seen[:] = list(seen), []
    tags(model)
    assert len(eager) > 20 and seen == eager * 2, "forward is traced twice"


def test_policy_may_keep_an_exchange(group: dist.ProcessGroup) -> None:
    checkpoint = selective([torch.ops._c10d_functional.all_to_all_single.default])
    found = tags(Odd(lambda m, x: checkpoint(m.layers[0], x), moe(group)))
    exchanges = [tag for op, tag in found if "all_to_all" in op and tag.phase is Phase.F]
    assert len(exchanges) == 4 and all(tag.keep for tag in exchanges)


# --- refused ----------------------------------------------------------------------------------------------------


def nested(m: Odd, x: Tensor) -> Tensor:
    return plainly(lambda y: plainly(m.layers[0], y), x)


def with_contexts(m: Odd, x: Tensor) -> Tensor:
    return plainly(m.layers[0], x, context_fn=lambda: (torch.autocast("cpu"), torch.autocast("cpu")))


def read_in_two(m: Odd, x: Tensor) -> Tensor:
    return reentrant(m.layers[0], reentrant(m.layers[0], x))


def read_outside_too(m: Odd, x: Tensor) -> Tensor:
    return m.layers[0](reentrant(m.layers[0], x))


@pytest.mark.parametrize(
    "wire, text",
    [
        (
            nested,
            r"A torch\.utils\.checkpoint \(layers\.0#0\) is called inside another one \(\(model\)#0\), expected "
            r"regions that do not nest\. Keep the outer or the inner one\.",
        ),
        (
            with_contexts,
            r"The context_fn of a torch\.utils\.checkpoint \(layers\.0#0\) gives autocast and autocast, which .*; "
            r"expected what create_selective_checkpoint_contexts gives\. Say by such a policy what is saved, or ",
        ),
        (read_in_two, r"layers\.0\.norm\.weight is read in layers\.0#0 and layers\.0#1, .* Use use_reentrant=False\."),
        (read_outside_too, r"norm\.weight is read in layers\.0#0 and outside of all checkpoints, .* adds its gradient"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_refused(wire: Callable[..., Tensor], text: str) -> None:
    with pytest.raises(fxo.UnsupportedError, match=text):
        tags(Odd(wire, Dense()))


def test_composable_checkpoints_are_refused() -> None:
    """Their hooks begin a region below `checkpoint`."""
    composable = importlib.import_module("torch.distributed._composable.checkpoint_activation")
    model = Odd(in_turn, Dense())
    composable.checkpoint(model.layers[0])
    said = r"has a composable checkpoint of torch\.distributed, .* Call torch\.utils"
    with pytest.raises(fxo.UnsupportedError, match=said):
        tags(model, hooks="trace")


# --- torch is left as it was ------------------------------------------------------------------------------------


@pytest.fixture
def as_before() -> Iterator[None]:
    """Fails if what torch makes checkpoints of is not what it was, or annotations are left."""
    module: Any = torch.utils.checkpoint
    imported(torch.sin, torch.ones(2), use_reentrant=False)

    def now() -> tuple[Any, ...]:
        return (dict(vars(module)), dict(vars(module.CheckpointFunction)), dict(vars(imported.__wrapped__)))  # type: ignore[attr-defined]

    before = now()
    yield
    assert now() == before and "custom" not in current_meta


@pytest.mark.parametrize("fails", [False, True])
@both
def test_torch_is_put_back(checkpoint: Callable[..., Any], fails: bool, as_before: None) -> None:
    def wire(m: Odd, x: Tensor) -> Tensor:
        return checkpoint(lambda y: y * int(y.sum()) if fails else m.layers[0](y), x)

    model = Odd(wire, Dense())
    if fails:
        with pytest.raises(fxo.CaptureError, match="depends on the contents"):
            tags(model)
    else:
        tags(model)
    calls = Counter[str]()
    x = torch.ones(2, requires_grad=True)
    checkpoint(lambda y: (calls.update(["f"]), y.sin().sum())[1], x).backward()
    assert calls["f"] == 2, "eager replays"


def test_forward_may_catch_what_a_region_raises(as_before: None) -> None:
    def wire(m: Odd, x: Tensor) -> Tensor:
        try:
            return plainly(lambda y: y @ y, x.expand(2, -1, -1))
        except RuntimeError:
            return plainly(m.layers[0], x)

    assert list(regions(Odd(wire, Dense()))) == ["layers.0#0"]
