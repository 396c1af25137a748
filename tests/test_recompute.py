"""The pass `recompute`: which nodes it adds, what the forward saves, and in which order replays run.

That replays give the bits of eager is in `test_recompute_bits.py`.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from replays import chunk_of, disorder, faults, head_is_first, launches, ops_of, replay_nodes
from toys import RawModel, batches, toy, train_both

import fxoverlap as fxo
from fxoverlap import ops
from fxoverlap.ir import ChunkGraph, Phase, Role
from fxoverlap.passes.regions import regions
from fxoverlap.report.golden import node_table
from fxoverlap.runtime import executor
from fxoverlap.runtime.state import MicrobatchState
from fxoverlap.schedule.plan import build_pair, build_plan

pytestmark = pytest.mark.usefixtures("shared_captures")

Recompute = fxo.Recompute


@functools.cache
def chunk(
    recompute: fxo.Recompute | None, group: dist.ProcessGroup, pattern: str = "[*E]", **changes: Any
) -> ChunkGraph:
    delay = changes.pop("delay_wgrad", True)
    return chunk_of(toy(pattern, group, **changes), batches(1)[0], recompute=recompute, delay_wgrad=delay)


def replayed(chunk: ChunkGraph) -> str:
    """The R rows of the node table, with the backward rows between them."""
    rows = node_table(chunk).splitlines()
    return "\n".join(row for row in rows if row.split()[1] in ("R", "B", "W"))


# --- nodes ---------------------------------------------------------------------------------------------------------


def test_uniform_1_replays_each_layer_in_front_of_its_backward(group: dist.ProcessGroup) -> None:
    assert_expected_inline(
        replayed(chunk(Recompute("uniform"), group, "[*E][*E]")),
        """\
  -    B  post_process
  -    W  post_process  pre_process
  L1   R  pre_dispatch  permute  (dispatch)=  experts  (combine)=  post_combine
  L1   B  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  L1   W  experts  pre_dispatch
  L0   R  pre_dispatch=  permute=  (dispatch)=  experts=  (combine)=  post_combine=
  L0   B  post_combine=  (combine)=  experts=  (dispatch)=  pre_dispatch=
  L0   W  experts=  pre_dispatch=""",
    )


def test_uniform_2_replays_two_layers_together(group: dist.ProcessGroup) -> None:
    made = chunk(Recompute("uniform", 2), group, "[*E][*E]")
    order = "\n".join(node.name for node in made.nodes if node.phase is not Phase.F)
    assert_expected_inline(
        order,
        """\
post_process.B
post_process.W
L0.pre_dispatch.R
L0.permute.R
L0.dispatch.R
L0.experts.R
L0.combine.R
L0.post_combine.R
L1.pre_dispatch.R
L1.permute.R
L1.post_combine.B
L1.combine.B
L1.dispatch.R
L1.experts.R
L1.experts.B
L1.experts.W
L1.dispatch.B
L1.combine.R
L1.post_combine.R
L1.pre_dispatch.B
L1.pre_dispatch.W
L0.post_combine.B
L0.combine.B
L0.experts.B
L0.experts.W
L0.dispatch.B
L0.pre_dispatch.B
L0.pre_dispatch.W
pre_process.W""",
    )


def test_block_leaves_the_other_layers_as_they_are(group: dist.ProcessGroup) -> None:
    assert_expected_inline(
        replayed(chunk(Recompute("block"), group, "[*E][*E]")),
        """\
  -    B  post_process
  -    W  post_process  pre_process
  L1   B  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  L1   W  experts  pre_dispatch
  L0   R  pre_dispatch  permute  (dispatch)=  experts=  (combine)=  post_combine
  L0   B  post_combine=  (combine)=  experts=  (dispatch)=  pre_dispatch=
  L0   W  experts=  pre_dispatch=""",
    )


def test_selective_norms_need_no_exchange(group: dist.ProcessGroup) -> None:
    norms = chunk(Recompute("selective", modules=("layers.*.norm",)), group, "[*E]")
    assert_expected_inline(
        replayed(norms),
        """\
  -    B  post_process
  -    W  post_process  pre_process
  L0   B  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  L0   W  experts  pre_dispatch
  L0   R  pre_dispatch""",
    )


def test_selective_whole_moe(group: dist.ProcessGroup) -> None:
    moe = chunk(Recompute("selective", modules=("layers.1",)), group, "[*E]")
    assert_expected_inline(
        replayed(moe),
        """\
  -    B  post_process
  -    W  post_process  pre_process
  L0   R  pre_dispatch  permute  (dispatch)=  experts  (combine)=  post_combine
  L0   B  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  L0   W  experts  pre_dispatch""",
    )


def test_keep_dispatch_sends_nothing_to_the_experts_again(group: dist.ProcessGroup) -> None:
    kept = chunk(Recompute("uniform", keep=("dispatch",)), group, "[*E]")
    assert_expected_inline(
        replayed(kept),
        """\
  -    B  post_process
  -    W  post_process  pre_process
  L0   R  pre_dispatch  permute  experts  (combine)=  post_combine
  L0   B  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  L0   W  experts  pre_dispatch""",
    )


REGIONS = {
    (5, 3): [3, 2],
    (24, 7): [7, 7, 7, 3],
    (5, 9): [5],
    (5, 1): [1] * 5,
}


@pytest.mark.parametrize(("layers", "size"), REGIONS)
def test_b52_segments_of_layers_that_they_do_not_divide(layers: int, size: int) -> None:
    made = chunk_of(toy("-" * layers), batches(1)[0], recompute=Recompute("uniform", size))
    assert made.joint is not None
    keys = {ops_of(made)[op]: (node.layer, node.slot, node.phase) for node in made.nodes for op in node.ops}
    found = regions(made, keys, fxo.OverlapConfig(recompute=Recompute("uniform", size)))
    assert [len({keys[op][0] for op in region.ops}) for region in found] == REGIONS[layers, size]
    assert {node.layer for node in replay_nodes(made)} == set(range(layers))


@pytest.mark.parametrize("count", [1, 3, 5, 9])
def test_block_segments_are_single_layers(count: int) -> None:
    made = chunk_of(toy("-----"), batches(1)[0], recompute=Recompute("block", count))
    assert {node.layer for node in replay_nodes(made)} == set(range(min(count, 5)))
    assert made.replays and faults(made) == []


# --- exchanges -----------------------------------------------------------------------------------------------------


EXCHANGES = [
    ((), {"dispatch": 2, "combine": 2}),
    (("dispatch",), {"combine": 2}),
    (("combine",), {"dispatch": 2}),
    (("dispatch", "combine"), {}),
]


@pytest.mark.parametrize(("keep", "again"), EXCHANGES)
def test_uniform_adds_exactly_the_replayed_exchanges(
    group: dist.ProcessGroup, keep: tuple[str, ...], again: dict[str, int]
) -> None:
    plain, made = (
        launches(chunk(None, group, "[*E][*E]")),
        launches(chunk(Recompute("uniform", keep=keep), group, "[*E][*E]")),
    )
    assert made - plain == {("R", role): count for role, count in again.items()}
    assert plain - made == {}


class Products(torch.nn.Module):
    """dispatch, relu(x @ w), combine; and what a later op does with the result."""

    def __init__(self, group: dist.ProcessGroup, squared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Product(group, squared)])
        self.first = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.first(x)).sum()


class Product(torch.nn.Module):
    def __init__(self, group: dist.ProcessGroup, squared: bool) -> None:
        super().__init__()
        self.group, self.squared = group.group_name, squared
        self.w = torch.nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        received, sent = torch.tensor([8]), torch.tensor([8])
        rows = ops.exchange(x, received, sent, 8, self.group)
        back = ops.exchange(torch.relu(rows @ self.w), sent, received, 8, self.group)
        return back.square() if self.squared else back * 2


@pytest.mark.parametrize(
    ("keep", "squared", "count"),
    [(None, False, 2), ((), False, 3), ((), True, 4), (("dispatch",), False, 2), (("dispatch",), True, 3)],
)
def test_b57_exchanges_in_the_backward(
    group: dist.ProcessGroup, keep: tuple[str, ...] | None, squared: bool, count: int
) -> None:
    asked = None if keep is None else Recompute("uniform", keep=keep)
    made = launches(chunk_of(Products(group, squared), (torch.randn(8, 16),), recompute=asked))
    assert sum(number for (phase, _), number in made.items() if phase != "F") == count


@pytest.mark.parametrize("pattern", ["[*E]", "E*-"])
@pytest.mark.parametrize("keep", [(), ("dispatch", "combine")])
def test_no_replay_counts_reads_on_the_host_or_acts(
    group: dist.ProcessGroup, pattern: str, keep: tuple[str, ...]
) -> None:
    made = chunk(Recompute("uniform", keep=keep), group, pattern, dropout=0.1, selection_bias=True, router="sigmoid")
    assert faults(made) == []
    assert launches(made)["R", "counts"] == 0
    before = chunk(None, group, pattern, dropout=0.1, selection_bias=True, router="sigmoid")
    bound = [sum("unbacked_bindings" in op.meta for op in ops_of(each).values()) for each in (before, made)]
    assert bound[0] == bound[1]


def test_raw_collectives_are_replayed_alike(group: dist.ProcessGroup) -> None:
    made = chunk_of(RawModel(group), batches(1)[0], recompute=Recompute("uniform"))
    assert faults(made) == []
    again = [each for each in made.joint.exchanges if each.phase is Phase.R]
    assert [(each.role, len(each.launches)) for each in again] == [(Role.DISPATCH, 2)] * 2


def test_one_replay_serves_b_and_w(group: dist.ProcessGroup) -> None:
    made = chunk(Recompute("uniform"), group, "[*E]")
    names = [node.name for node in replay_nodes(made)]
    assert len(names) == len(set(names))
    values = {value for node in replay_nodes(made) for value in node.writes}
    readers = {node.phase: values.intersection(node.reads) for node in made.nodes if values.intersection(node.reads)}
    assert {Phase.B, Phase.W} <= set(readers)


# --- errors --------------------------------------------------------------------------------------------------------


ERRORS = [
    (("layers.*", "layers.0.norm"), "layers.0 and layers.0.norm inside it"),
    (("layers.*", "norm"), "layers.0 and layers.0.norm inside it"),
    (("layers.*.nom",), "layers.*.nom matches no module"),
    (("layers.0", "absent", "missing.*"), "absent, missing.* matches no module"),
]


@pytest.mark.parametrize(("modules", "words"), ERRORS)
def test_b58_what_cannot_be_replayed_is_refused_by_name(modules: tuple[str, ...], words: str) -> None:
    config = fxo.OverlapConfig(recompute=Recompute("selective", modules=modules))
    with pytest.raises(fxo.UnsupportedError) as error:
        fxo.transform(toy("*-"), config, example_inputs=batches(1)[0])
    assert words in str(error.value)


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_segments_need_layers(method: str) -> None:
    config = fxo.OverlapConfig(layers="absent.*", recompute=Recompute(method))
    with pytest.raises(fxo.UnsupportedError, match=r"no logical layers .* OverlapConfig\.layers"):
        fxo.transform(toy("*-"), config, example_inputs=batches(1)[0])


# --- orders --------------------------------------------------------------------------------------------------------

CASES = [
    Recompute("uniform"),
    Recompute("uniform", 2),
    Recompute("block", 1),
    Recompute("selective", modules=("layers.*",)),
    Recompute("uniform", keep=("dispatch", "combine")),
]


@pytest.mark.parametrize("asked", CASES, ids=repr)
def test_b53_built_in_policies_replay_one_segment_at_a_time_behind_the_head(
    group: dist.ProcessGroup, asked: fxo.Recompute
) -> None:
    made = chunk(asked, group, "[*E]-E", shared_dim=12)
    assert made.replays and faults(made) == []
    for schedule in ("auto", "megatron", "sequential"):
        config = fxo.OverlapConfig(schedule=schedule, recompute=asked)
        plans = [build_plan(f, made, config) for f in (made, None)] + [build_pair("BB", made, made, config)]
        for plan in plans:
            assert disorder(plan) == [], (schedule, plan.kind)
            assert head_is_first(plan), (schedule, plan.kind)


@pytest.mark.parametrize("delay", [True, False])
def test_b35_a_policy_need_not_keep_the_order_of_replays_or_place_w(group: dist.ProcessGroup, delay: bool) -> None:
    def eager_replays(f: Any, b: Any, costs: Any, config: Any) -> list[Any]:
        """R nodes as early as their values allow; no W."""
        order = [(node, "B") for node in (b.nodes if b else ()) if node.phase is Phase.R]
        order += [(node, "B") for node in (b.nodes if b else ()) if node.phase is Phase.B]
        return [(node, "F") for node in (f.nodes if f else ()) if node.phase is Phase.F] + order

    config = fxo.OverlapConfig(schedule=eager_replays, recompute=Recompute("uniform"), delay_wgrad=delay)
    overlapped = fxo.transform(toy("[*E][*E]", group), config, example_inputs=batches(1)[0])
    assert disorder(overlapped.plan("B")) != []
    assert train_both(overlapped, lambda step: batches(3, seed=step), steps=2) == []


def test_the_backward_of_an_auxiliary_loss_waits_for_its_own_layer(group: dist.ProcessGroup) -> None:
    """The replay of a layer serves the backward of that layer only, though the loss holds a term of each."""
    made = chunk(Recompute("uniform"), group, "EEE", aux_loss=0.1, z_loss=0.1)
    layer_of = {value: node.layer for node in replay_nodes(made) for value in node.writes}
    for node in made.nodes:
        assert {layer_of[value] for value in node.reads if value in layer_of} <= {node.layer}, node.name


@pytest.mark.parametrize("schedule", ["auto", "megatron", "sequential"])
def test_b17_logits_are_gone_when_the_first_replay_begins(
    group: dist.ProcessGroup, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, tokens = 512, 8
    config = fxo.OverlapConfig(schedule=schedule, recompute=Recompute("uniform"))
    overlapped = fxo.transform(toy("[*E]", group, vocab_size=vocab), config)
    large: list[Any] = []
    alive: list[int] = []
    issue = executor._issue

    def watched(operation: Any, state: MicrobatchState) -> None:
        if operation.instance.node.phase is Phase.R:
            alive.append(sum(each() is not None for mb, each in large if mb == state.number))
        issue(operation, state)
        for value in state.values if operation.instance.node.phase is Phase.F else ():
            if isinstance(value, torch.Tensor) and value.shape == (tokens, vocab):
                large.append((state.number, weakref.ref(value)))

    monkeypatch.setattr(executor, "_issue", watched)
    overlapped.step(batches(2, vocab=vocab))
    assert len(large) > 0 and len(alive) > 0 and set(alive) == {0}
