"""Collectives beside the exchanges, in forward and in backward, on two ranks with other numbers of tokens.

Proves: each runs exactly once a microbatch, is waited for once, and stands in the same order on both ranks; plans and
graphs are the same on both whatever the lengths; what would differ is an error on both, and nothing hangs.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from collective_models import (
    USES,
    Aux,
    ByLength,
    Gram,
    Late,
    MoE,
    Net,
    VocabularyParallel,
    counts,
    other_all_to_all,
    seeded,
    tensor_parallel,
    unread,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import RandomOrder, batches, differences, eager_step, same_bits, toy
from two_ranks import TwoRanks

import fxoverlap as fxo
from fxoverlap import compat
from fxoverlap.capture import capture
from fxoverlap.ir import Lane, Plan
from fxoverlap.microbatch import as_microbatch
from fxoverlap.passes import op_facts
from fxoverlap.passes.chain import backward_chain, forward_chain
from fxoverlap.passes.place import place_backward, place_forward
from fxoverlap.pipeline import JOINT_PASSES
from fxoverlap.schedule.policies import auto, megatron, sequential

pytestmark = pytest.mark.usefixtures("shared_captures")

NAMESPACES = ("_c10d_functional", "fxoverlap_tests")

# --- what runs on two ranks -------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Notes each collective that runs, with its group, and counts waits."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is op_facts.WAIT:
            self.waits += 1
        elif func.namespace == "higher_order":
            self.launched.append(f"{args[0]} ")  # an op that mutates its arguments
        elif func in op_facts.LAUNCHES or (func.namespace in NAMESPACES and "wrap" not in str(func)):
            is_own = isinstance(args[-1], str) and dist.get_world_size(compat.process_group(args[-1])) == 1
            group = "own" if is_own else args[-1] if isinstance(args[-1], str) else ""
            self.launched.append(f"{func} {group}")
        return func(*args, **(kwargs or {}))


class Chosen:
    """A policy that can be changed between steps, so that one capture serves several."""

    policy: Any = staticmethod(auto)

    def __call__(self, *args: Any) -> Any:
        return self.policy(*args)


def in_trace_order(plan: Plan) -> bool:
    """Whether what has an effect and is no exchange runs in trace order within each microbatch."""
    for mb, chunk in (("F", plan.forward), ("B", plan.backward)):
        graph = chunk.joint.module.graph
        launches = {name for exchange in chunk.joint.exchanges for name in exchange.launches}
        effects = [n.name for n in graph.nodes if op_facts.keeps_order(n) and n.name not in launches]
        ran = [op for i in plan.order if i.mb == mb for op in i.node.ops if op in effects]
        if not ran or ran != [name for name in effects if name in ran]:
            return False
    return True


def compare(model: nn.Module, given: list[tuple], policies: dict[str, Any] | None = None) -> dict[str, Any]:
    """A step beside eager, by policy if any are given: what differs, which collectives ran, the plan and the graph."""
    eager, chosen = copy.deepcopy(model), Chosen()
    overlapped = fxo.transform(model, fxo.OverlapConfig(schedule=chosen), example_inputs=given[0])
    with Recorder() as plain:
        losses = eager_step(eager, given)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    results = {}
    for name, chosen.policy in (policies or {"": auto}).items():
        overlapped._planner._chosen.clear()
        model.zero_grad()
        for each, buffer in model.named_buffers():
            buffer.copy_(buffers[each])
        with Recorder() as ours:
            found = overlapped.step(given).losses
        wrong = differences(eager, model)
        wrong += [f"loss {i}" for i, pair in enumerate(zip(losses, found, strict=True)) if not same_bits(*pair)]
        fused = overlapped.fused_graph("FB")
        order = [op for part in fused.children() for op in part.graph.nodes if op_facts.is_collective(op)]
        results[name] = {
            "wrong": wrong,
            "ours": ours.launched,
            "eager": plain.launched,
            "waits": ours.waits,
            "plan": (str(overlapped.plan("FB")), overlapped.golden()),
            "graph": ([node.name for node in fused.graph.nodes], [str(op.target) for op in order]),
            "in order": in_trace_order(overlapped.plan("FB")),
            "losses": [loss.item() for loss in found],
        }
    return results if policies else results[""]


def error_of(model: nn.Module, given: list[tuple]) -> str:
    try:
        fxo.transform(model).step(given)
    except fxo.FxOverlapError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def zoo(main: dist.ProcessGroup, other: dist.ProcessGroup, own: dist.ProcessGroup) -> Net:
    """Every use on the group of the exchanges, on another one or on one of this rank alone, around two MoE layers."""
    groups = [main, other, own, main] * 2
    first, second = ([Aux(use, group) for use, group in zip(USES, groups, strict=True)][i::2] for i in (0, 1))
    return Net(*first, MoE(main), *second, MoE(main))


POLICIES = {"auto": auto, "megatron": megatron, "sequential": sequential, "random": RandomOrder()}

Make = Callable[[dist.ProcessGroup, dist.ProcessGroup], nn.Module]
MODELS: dict[str, Make] = {
    "other_all_to_all": lambda main, other: Net(Aux(other_all_to_all, other), MoE(main)),
    "unread_on_rank_1": lambda main, other: Net(Aux(unread, other), MoE(main)),
    "late_wait": lambda main, other: Late(Aux(counts, main), MoE(main), MoE(main)),
    "own_function": lambda main, other: Net(MoE(main, own=True)),
    "ids": lambda main, other: Net(MoE(main, ids="before"), MoE(main, ids="behind")),
    "all_to_rank_0": lambda main, other: Net(MoE(main, first=True)),
    "no_tokens_on_rank_1": lambda main, other: Net(MoE(main), Aux(counts, main), Gram(16, 4, main)),
    "short_and_long": lambda main, other: Net(Gram(16, 4, main), Aux(counts, main)),
    "short_and_long_toy": lambda main, other: toy("[*E]", main, shared_dim=12),
    "vocabulary_parallel": lambda main, other: VocabularyParallel(main),
}
TOKENS = {
    "all_to_rank_0": (8, 8),
    "no_tokens_on_rank_1": (6, 0),
    "short_and_long": (4, 64),
    "short_and_long_toy": (4, 64),
    "vocabulary_parallel": (8, 8),
}
DISAGREE: dict[str, tuple[Callable[[dist.ProcessGroup], nn.Module], str]] = {
    "one rank calls": (
        lambda group: Net(ByLength(counts, group), MoE(group)),
        r"First difference: 'L0.*_c10d_functional\.all_reduce.*int64\[16\], 'sum', group 0 of 2\).* on rank 1",
    ),
    "other length": (
        lambda group: Net(
            Aux(lambda m, x: x * funcol.all_reduce(x.detach(), "sum", m.group).mean(), group), MoE(group)
        ),
        r"all_reduce.*float32\[1, 6, 16\].* on rank 0, .*float32\[1, 10, 16\].* on rank 1",
    ),
    "other operation": (
        lambda group: Net(
            Aux(lambda m, x: x * funcol.all_reduce(x.detach().mean(), ("sum", "max")[dist.get_rank()], m.group), group),
            MoE(group),
        ),
        r"all_reduce.*'sum', group 0 of 2\).* on rank 0, .*'max', group 0 of 2\).* on rank 1",
    ),
}


def run(rank: int) -> dict[str, Any]:
    main, other = dist.group.WORLD, dist.new_group([0, 1])
    own = [dist.new_group([each]) for each in (0, 1)][rank]
    given = batches(3, rank, tokens=6 + 4 * rank)
    found: dict[str, Any] = compare(seeded(lambda: zoo(main, other, own)), given, POLICIES)
    for name, make in MODELS.items():
        tokens = TOKENS.get(name, (6, 10))[rank]
        vocabulary = 8 if name == "vocabulary_parallel" else 32
        found[name] = compare(seeded(lambda make=make: make(main, other)), batches(3, rank, tokens, vocabulary))
    for name, (make_one, _) in DISAGREE.items():
        found[name] = error_of(seeded(lambda make_one=make_one: make_one(main)), given)
    return found


@pytest.fixture(scope="module")
def found(two_ranks: TwoRanks) -> list[dict[str, Any]]:
    return two_ranks.run(run, timeout_s=120)


ALL = [*POLICIES, *MODELS]


@pytest.mark.parametrize("name", ALL)
def test_results_are_those_of_eager(found: list[dict[str, Any]], name: str) -> None:
    assert [each[name]["wrong"] for each in found] == [[], []]
    assert all(math.isfinite(loss) for each in found for loss in each[name]["losses"])


@pytest.mark.parametrize("name", ALL)
def test_b60_b62_each_collective_runs_once_a_microbatch_in_one_order(found: list[dict[str, Any]], name: str) -> None:
    first, second = (each[name] for each in found)
    assert Counter(first["ours"]) == Counter(first["eager"]) == Counter(second["eager"])
    assert first["ours"] == second["ours"]
    launches = [each for each in first["ours"] if not each.startswith("fxoverlap_tests")]
    assert first["waits"] == second["waits"] == len(launches) > 0


@pytest.mark.parametrize("name", POLICIES)
def test_collectives_beside_the_exchanges_keep_trace_order(found: list[dict[str, Any]], name: str) -> None:
    assert [each[name]["in order"] for each in found] == [True, True]
    if name == "sequential":
        assert found[0][name]["ours"] == found[0][name]["eager"], "nothing overlaps, so it is the order of eager"


def test_b76_all_tokens_go_to_rank_0(found: list[dict[str, Any]]) -> None:
    """Both ranks do every exchange: counts, tokens and weights, results; and all but counts in backward."""
    for each in found:
        assert Counter(each["all_to_rank_0"]["ours"]).total() == 3 * (4 + 3)


@pytest.mark.parametrize("name", ["short_and_long", "short_and_long_toy"])
def test_b63_plans_and_graphs_do_not_depend_on_lengths(found: list[dict[str, Any]], name: str) -> None:
    assert found[0][name]["plan"] == found[1][name]["plan"]
    assert found[0][name]["graph"] == found[1][name]["graph"]


def test_b76_a_rank_without_tokens_has_the_same_plan(found: list[dict[str, Any]]) -> None:
    """Not the same graph: torch folds sizes that are zero."""
    assert found[0]["no_tokens_on_rank_1"]["plan"][0] == found[1]["no_tokens_on_rank_1"]["plan"][0]


@pytest.mark.parametrize("name", DISAGREE)
def test_b63_b75_other_collectives_are_an_error_on_both_ranks(found: list[dict[str, Any]], name: str) -> None:
    assert found[0][name] == found[1][name]
    assert found[0][name].startswith("PlanMismatchError")
    assert re.search(DISAGREE[name][1], found[0][name]), found[0][name]


def test_b109_vocabulary_parallel_loss_of_zero_logits(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["vocabulary_parallel"]["losses"] == pytest.approx([math.log(8)] * 3, rel=1e-6)


# --- one rank: roles, and what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize("ids", ["before", "behind"])
def test_integers_that_travel_with_tokens_are_no_counts(group: dist.ProcessGroup, ids: str) -> None:
    overlapped = fxo.transform(seeded(lambda: Net(MoE(group, ids=ids))), example_inputs=batches(1)[0])
    found = {i.node.name: len(i.node.ops) for i in overlapped.plan("FB").order if i.node.lane is Lane.COMM}
    expected = {"counts.F": 1, "dispatch.F": 3, "combine.F": 1, "combine.B": 1, "dispatch.B": 2}
    assert found == {f"L0.{name}": launches for name, launches in expected.items()}


def placed(model: nn.Module, tokens: int) -> tuple[dict[str, int], dict[str, int]]:
    """The stage of each op, forward and backward."""
    joint = capture(model, as_microbatch(batches(1, tokens=tokens)[0]), fxo.OverlapConfig()).joint
    for each in JOINT_PASSES:
        joint = each(joint, fxo.OverlapConfig())
    chain = forward_chain(joint)
    forward = place_forward(joint, chain)
    backward = place_backward(joint, backward_chain(chain), forward)
    return tuple({node.name: stage for node, stage in each.items()} for each in (forward, backward))


def test_b63_placement_does_not_depend_on_lengths(group: dist.ProcessGroup) -> None:
    model = seeded(lambda: Net(Gram(16, 4, group)))
    assert placed(model, 4) == placed(model, 64)


def test_collectives_beside_the_exchanges_are_ordered_by_edges(group: dist.ProcessGroup) -> None:
    net = seeded(lambda: Net(Aux(counts, group), MoE(group), Aux(tensor_parallel, group)))
    chunk = fxo.transform(net, example_inputs=batches(1)[0]).plan("FB").forward
    assert chunk.effects == (("L0.pre_dispatch.F", "L1.pre_dispatch.F"), ("L1.pre_dispatch.F", "L1.pre_dispatch.B"))


def all_to_all_in_place(m: Aux, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous())
    return out


def all_reduce_in_place(m: Aux, x: Tensor) -> Tensor:
    total = x.detach().sum(1)
    dist.all_reduce(total)
    return x * total


def all_reduce_later(m: Aux, x: Tensor) -> Tensor:
    total = x.detach().sum(1)
    work = dist.all_reduce(total, async_op=True)
    y = torch.tanh(x)
    work.wait()
    return y * total


def gather_in_place(m: Aux, x: Tensor) -> Tensor:
    parts = [torch.empty_like(x)]
    dist.all_gather(parts, x.detach())
    return x + parts[0]


def barrier(m: Aux, x: Tensor) -> Tensor:
    dist.barrier()
    return x


class InPlaceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def all_reduce_backward(m: Aux, x: Tensor) -> Tensor:
    return InPlaceBackward.apply(x)


@pytest.mark.parametrize(
    ("use", "op"),
    [
        (all_to_all_in_place, "alltoall_base_"),
        (all_reduce_in_place, "allreduce_"),
        (all_reduce_later, "allreduce_"),
        (gather_in_place, "allgather_"),
        (barrier, "barrier"),
        (all_reduce_backward, "allreduce_"),
    ],
)
def test_collectives_in_place_are_refused_by_name(group: dist.ProcessGroup, use: Any, op: str) -> None:
    phase = "backward" if use is all_reduce_backward else "forward"
    model = seeded(lambda: Net(Aux(use, group)))
    words = rf"The {phase} of module 'layers\.0' calls c10d\.{op}.*Use PyTorch's functional collectives"
    with pytest.raises(fxo.UnsupportedError, match=words):
        fxo.transform(model, example_inputs=batches(1)[0])
    assert model(*batches(1)[0]).isfinite()


@torch.library.custom_op("fxoverlap_tests::note", mutates_args=())
def note(x: Tensor) -> Tensor:
    return x.clone()


note.register_fake(torch.empty_like)


@pytest.mark.skipif(not hasattr(note, "register_effect"), reason="this torch has no effects to declare")
def test_declared_effects_are_refused_by_name(group: dist.ProcessGroup) -> None:
    note.register_effect(torch.library.EffectType.ORDERED)
    model = seeded(lambda: Net(Aux(lambda m, x: x * torch.ops.fxoverlap_tests.note(x.detach()), group)))
    with pytest.raises(fxo.UnsupportedError, match=r"'layers\.0' calls fxoverlap_tests\.note.*mutates_args"):
        fxo.transform(model, example_inputs=batches(1)[0])


def test_all_to_all_of_the_backward_alone_is_refused(group: dist.ProcessGroup) -> None:
    class OnlyBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return funcol.all_to_all_single(grad.flatten(0, 1), None, None, group).view_as(grad)

    model = seeded(lambda: Net(MoE(group), Aux(lambda m, x: OnlyBackward.apply(x), group)))
    with pytest.raises(fxo.UnsupportedError, match="is not the gradient of a forward exchange"):
        fxo.transform(model, example_inputs=batches(1)[0])
