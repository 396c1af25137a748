"""What models with multi-token prediction are cut into: each op once, gradients merged where they are read.

`tests/test_golden.py` says how to refresh the texts.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from mtp_models import needs
from shared_captures import shared_capture
from torch import fx
from toys import batches, toy, train_both

import fxoverlap as fxo
from fxoverlap.ir import ChunkGraph, InputKind, Phase, Slot
from fxoverlap.microbatch import as_microbatch
from fxoverlap.passes import op_facts
from fxoverlap.pipeline import to_chunk
from fxoverlap.report.golden import node_table

pytestmark = pytest.mark.usefixtures("shared_captures")

UNIFORM = fxo.Recompute("uniform")


class Cut(NamedTuple):
    """A chunk, and how often each kind of op was in the trace."""

    traced: Counter[tuple[str | None, str, str]]
    chunk: ChunkGraph


@functools.cache
def cut(group: dist.ProcessGroup, pattern: str, recompute: fxo.Recompute | None = None, **changes: Any) -> Cut:
    config = fxo.OverlapConfig(pattern, recompute=recompute)
    joint = shared_capture(toy(pattern, group, **changes), as_microbatch(batches(1)[0]), config).joint
    traced = counts(list(op_facts.ops(joint.module.graph)))
    return Cut(traced, to_chunk(joint, config, []))


def counts(ops: list[fx.Node]) -> Counter[tuple[str | None, str, str]]:
    """(module, "F", "B" or "R", op) -> how often. Views are left out: a cut makes them where they are read."""
    tensors = [op for op in ops if isinstance(op.meta["val"], torch.Tensor) and op.target is not operator.getitem]
    computing = [op for op in tensors if op_facts.view_base(op) is None]
    phases = {Phase.W: Phase.B}
    tags = [(op_facts.tag(op).fqn, op_facts.tag(op).phase) for op in computing]
    return Counter(
        (fqn, phases.get(phase, phase).value, str(op.target)) for op, (fqn, phase) in zip(computing, tags, strict=True)
    )


def by_name(chunk: ChunkGraph) -> dict[str, fx.Node]:
    assert chunk.joint is not None
    return {op.name: op for op in chunk.joint.module.graph.nodes}


def scheduled(chunk: ChunkGraph) -> list[fx.Node]:
    ops = by_name(chunk)
    return [ops[op] for node in chunk.nodes for op in node.ops]


def before(chunk: ChunkGraph, name: str) -> set[str]:
    """The nodes of the backward that a node waits for."""
    direct, found, stack = needs(chunk), set[str](), [name]
    while stack:
        new = direct[stack.pop()] - found
        found |= new
        stack += new
    return {each for each in found if not each.endswith(".F")}


# --- texts ---------------------------------------------------------------------------------------------------------


def test_one_depth(group: dist.ProcessGroup) -> None:
    assert_expected_inline(
        node_table(cut(group, "E/[*E]").chunk),
        """\
  -    F  pre_process  post_process
  L0   F  pre_dispatch  (counts)  permute  (dispatch)  experts  (combine)  post_combine
  MTP0 F  pre_dispatch  (counts)=  permute=  (dispatch)=  experts=  (combine)=  post_combine  mtp_post
  -    B  post_process
  -    W  post_process  pre_process
  MTP0 B  mtp_post  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  MTP0 W  mtp_post  experts  pre_dispatch
  L0   B  post_combine  (combine)=  experts=  (dispatch)=  pre_dispatch
  L0   W  post_combine  experts=  pre_dispatch""",
    )


def test_two_depths(group: dist.ProcessGroup) -> None:
    assert_expected_inline(
        node_table(cut(group, "[*E]/[*E]/[*E]").chunk),
        """\
  -    F  pre_process  post_process
  L0   F  pre_dispatch  (counts)  permute  (dispatch)  experts  (combine)  post_combine
  MTP0 F  pre_dispatch  (counts)=  permute=  (dispatch)=  experts=  (combine)=  post_combine=  mtp_post
  MTP1 F  pre_dispatch=  (counts)=  permute=  (dispatch)=  experts=  (combine)=  post_combine  mtp_post
  -    B  post_process
  -    W  post_process  pre_process
  MTP1 B  mtp_post  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  MTP1 W  mtp_post  experts  pre_dispatch
  MTP0 B  mtp_post  post_combine  (combine)=  experts=  (dispatch)=  pre_dispatch=
  MTP0 W  mtp_post  post_combine  experts=  pre_dispatch=
  L0   B  post_combine=  (combine)=  experts=  (dispatch)=  pre_dispatch
  L0   W  post_combine=  experts=  pre_dispatch""",
    )


def test_two_depths_with_recompute(group: dist.ProcessGroup) -> None:
    assert_expected_inline(
        node_table(cut(group, "[*E]/[*E]/[*E]", UNIFORM).chunk),
        """\
  -    F  pre_process  post_process
  L0   F  pre_dispatch  (counts)  permute  (dispatch)  experts  (combine)  post_combine
  MTP0 F  pre_dispatch  (counts)=  permute=  (dispatch)=  experts=  (combine)=  post_combine=  mtp_post
  MTP1 F  pre_dispatch=  (counts)=  permute=  (dispatch)=  experts=  (combine)=  post_combine  mtp_post
  -    B  post_process
  -    W  post_process  pre_process
  MTP1 B  mtp_post  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  MTP1 W  mtp_post  experts  pre_dispatch
  MTP1 R  pre_dispatch  permute  (dispatch)=  experts  (combine)=  post_combine
  MTP0 B  mtp_post  post_combine  (combine)=  experts=  (dispatch)=  pre_dispatch=
  MTP0 W  mtp_post  post_combine  experts=  pre_dispatch=
  MTP0 R  pre_dispatch=  permute=  (dispatch)=  experts=  (combine)=  post_combine=
  L0   R  pre_dispatch  permute=  (dispatch)=  experts=  (combine)=  post_combine=
  L0   B  post_combine=  (combine)=  experts=  (dispatch)=  pre_dispatch
  L0   W  post_combine=  experts=  pre_dispatch""",
    )


def test_several_layers_in_a_depth_behind_a_dense_layer(group: dist.ProcessGroup) -> None:
    assert_expected_inline(
        node_table(cut(group, "E-/[*E][*-]").chunk),
        """\
  -       F  pre_process  post_process
  L0      F  pre_dispatch  (counts)  permute  (dispatch)  experts  (combine)  post_combine
  L1      F  experts
  MTP0.L0 F  pre_dispatch  (counts)=  permute=  (dispatch)=  experts=  (combine)=  post_combine=
  MTP0.L1 F  pre_dispatch  experts
  MTP0    F  mtp_post
  -       B  post_process
  -       W  post_process  pre_process
  MTP0    B  mtp_post
  MTP0    W  mtp_post
  MTP0.L1 B  experts  pre_dispatch
  MTP0.L1 W  experts  pre_dispatch
  MTP0.L0 B  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  MTP0.L0 W  experts  pre_dispatch
  L1      B  experts
  L1      W  experts
  L0      B  post_combine=  (combine)=  experts=  (dispatch)=  pre_dispatch
  L0      W  experts=  pre_dispatch""",
    )


# --- everything once -----------------------------------------------------------------------------------------------

CUTS: list[tuple[str, fxo.Recompute | None]] = [
    ("E/[*E]", None),
    ("[*E]/[*E]/[*E]", None),
    ("[*E]/[*E]/[*E]", UNIFORM),
    ("E-/[*E][*-]", None),
]


@pytest.mark.parametrize(("pattern", "recompute"), CUTS)
def test_every_op_is_scheduled_once(pattern: str, recompute: fxo.Recompute | None, group: dist.ProcessGroup) -> None:
    traced, chunk = cut(group, pattern, recompute)
    found = counts(scheduled(chunk))
    assert Counter({key: n for key, n in found.items() if key[1] != "R"}) == traced
    replayed = {fqn for fqn, phase, _ in found if phase == "R"}
    assert replayed.isdisjoint({"", "norm", "head", *(f"mtp.{k}.norm" for k in range(4))})
    assert bool(replayed) == (recompute is not None)


@pytest.mark.parametrize(("pattern", "recompute"), CUTS)
def test_shared_modules_run_once_for_each_depth(
    pattern: str, recompute: fxo.Recompute | None, group: dist.ProcessGroup
) -> None:
    found, times = counts(scheduled(cut(group, pattern, recompute).chunk)), 1 + pattern.count("/")
    assert found["head", "F", "aten.mm.default"] == times
    assert found["head", "B", "aten.mm.default"] == 2 * times
    assert found["embed", "F", "aten.embedding.default"] == times
    assert found["embed", "B", "aten.embedding_dense_backward.default"] == times
    for norm in ("norm", *(f"mtp.{depth}.norm" for depth in range(times - 1))):
        assert found[norm, "F", "aten.rsqrt.default"] == 1
        assert found[norm, "B", "aten.div.Scalar"] == 1  # of the mean


def test_auxiliary_losses_of_several_layers_of_a_depth_are_counted_once(group: dist.ProcessGroup) -> None:
    changes = {"aux_loss": 0.01, "z_loss": 0.1, "router": "sigmoid", "selection_bias": True}
    traced, chunk = cut(group, "E/EE/EE", **changes)
    found = counts(scheduled(chunk))
    assert found == traced
    layers = ["layers.0", *(f"mtp.{depth}.layers.{i}" for depth in range(2) for i in range(2))]
    for layer in layers:
        assert found[layer, "F", "aten.logsumexp.default"] == 1, found
    assert chunk.joint is not None
    own = [node.place for node in chunk.nodes for op in node.ops if "logsumexp" in op and node.phase is Phase.F]
    assert own == ["L0", "MTP0.L0", "MTP0.L1", "MTP1.L0", "MTP1.L1"]
    counters = {each.value: each.name for each in chunk.joint.inputs if each.kind is InputKind.BUFFER}
    written = [counters[value] for _, value in chunk.joint.mutations]
    assert written == [f"{layer}.tokens_per_expert" for layer in layers]


# --- merges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_merged_in_the_node_that_reads_them(tied: bool, group: dist.ProcessGroup) -> None:
    direct = needs(cut(group, "[*E]/[*E]/[*E]", tied=tied).chunk)
    merged = {
        name: {each for each in direct[f"{name}.post_combine.B"] if not each.endswith(".F")}
        for name in ("L0", "MTP0", "MTP1")
    }
    assert merged == {
        "L0": {"post_process.B", "MTP0.pre_dispatch.B"},
        "MTP0": {"MTP0.mtp_post.B", "MTP1.pre_dispatch.B"},
        "MTP1": {"MTP1.mtp_post.B"},
    }


def test_the_end_of_a_layer_does_not_wait_for_its_replay(group: dist.ProcessGroup) -> None:
    """The norm in front of the next depth keeps what it read: else combine.B would wait for combine.R."""
    chunk = cut(group, "[*E]/[*E]/[*E]", UNIFORM).chunk
    for name in ("L0", "MTP0", "MTP1"):
        own = before(chunk, f"{name}.post_combine.B")
        assert f"{name}.pre_dispatch.R" in own and f"{name}.combine.R" not in own


def test_a_depth_does_not_wait_for_the_heads_in_front_of_it(group: dist.ProcessGroup) -> None:
    chunk = cut(group, "[*E]/[*E]/[*E]").chunk
    for name in ("MTP1.mtp_post.B", "MTP1.pre_dispatch.B"):
        assert before(chunk, name).isdisjoint({"MTP0.mtp_post.B", "post_process.B"})
    assert "post_process.B" not in before(chunk, "MTP0.pre_dispatch.B")
    heads = {"post_process.B", "MTP0.mtp_post.B", "MTP1.mtp_post.B"}
    assert heads <= before(chunk, "L0.post_combine.B")
    assert not any(each.endswith(".W") for each in before(chunk, "L0.pre_dispatch.B"))


@pytest.mark.parametrize("tied", [False, True])
def test_weight_gradients_of_the_shared_head_are_w_nodes(tied: bool, group: dist.ProcessGroup) -> None:
    chunk = cut(group, "[*E]/[*E]/[*E]", tied=tied).chunk
    ops, joint = by_name(chunk), chunk.joint
    assert joint is not None
    of_weight = {
        node.name
        for node in chunk.nodes
        for op in node.ops
        if op_facts.tag(ops[op]).fqn == "head" and "mm" in op and ops[op].meta["val"].shape == (32, 16)
    }
    assert of_weight == {"post_process.W", "MTP0.mtp_post.W", "MTP1.mtp_post.W"}
    names = {each.value: each.name for each in joint.inputs if each.kind is InputKind.PARAM}
    made_by = {op: node.name for node in chunk.nodes for op in node.ops}
    gradients = {names[target]: made_by[value] for value, target in joint.gradients}
    assert gradients["embed.weight"] == "pre_process.W"
    assert gradients.get("head.weight", "tied") == ("tied" if tied else "MTP0.mtp_post.W")


def test_heads_are_told_apart(group: dist.ProcessGroup) -> None:
    """No op of one depth's loss is in another's node; the losses are summed behind all of them."""
    chunk = cut(group, "[*E]/[*E]/[*E]").chunk
    ops = by_name(chunk)
    for node in chunk.nodes:
        if node.slot in (Slot.MTP_POST, Slot.POST_PROCESS) and node.phase is Phase.F:
            kinds = Counter(str(ops[op].target) for op in node.ops)
            assert kinds["aten.nll_loss_forward.default"] == kinds["aten.mm.default"] == 1, node.name
    assert chunk.joint is not None
    last = next(node.name for node in chunk.nodes if chunk.joint.loss in node.ops)
    assert last == "MTP1.mtp_post.F"


# --- policies ------------------------------------------------------------------------------------------------------


def all_w_last(f: ChunkGraph | None, b: ChunkGraph | None, costs: Any, config: Any) -> list[Any]:
    """A policy: forward and backward one after the other, without W, which is flushed at the end."""
    order = [(node, "B") for node in b.nodes if node.phase not in (Phase.F, Phase.W)] if b else []
    return order + ([(node, "F") for node in f.nodes if node.phase is Phase.F] if f else [])


def w_of_heads_first(f: ChunkGraph | None, b: ChunkGraph | None, costs: Any, config: Any) -> list[Any]:
    """A policy: each node of the backward as it comes, W too, before the forward."""
    order = [(node, "B") for node in b.nodes if node.phase is not Phase.F] if b else []
    return order + ([(node, "F") for node in f.nodes if node.phase is Phase.F] if f else [])


POLICIES: dict[str, dict[str, Any]] = {
    "auto": {},
    "megatron": {"schedule": "megatron"},
    "sequential": {"schedule": "sequential"},
    "early release": {"schedule": "megatron", "early_release": True},
    "auto, early release": {"early_release": True},
    "pair": {"ramp": "pair"},
    "no delay": {"delay_wgrad": False},
    "W last": {"schedule": all_w_last},
    "W first": {"schedule": w_of_heads_first},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_give_the_bits_of_eager(policy: str, group: dist.ProcessGroup) -> None:
    config = fxo.OverlapConfig("E/E/E", **POLICIES[policy])
    overlapped = fxo.transform(toy("E/E/E", group, tied=True), config, example_inputs=batches(1)[0])
    order = [(i.node.name, i.node.phase) for i in overlapped.plan("FB").order]
    first_w = min((i for i, (_, phase) in enumerate(order) if phase is Phase.W), default=None)
    if policy == "W last":
        assert first_w is not None and all(phase is Phase.W for _, phase in order[first_w:])
        assert {"post_process.W", "MTP0.mtp_post.W", "MTP1.mtp_post.W"} <= {name for name, _ in order[first_w:]}
    assert (first_w is None) == (policy == "no delay")
    assert train_both(overlapped, lambda step: batches((4, 1)[step], seed=step), steps=2) == []


def test_heads_run_beside_exchanges_of_the_other_microbatch(group: dist.ProcessGroup) -> None:
    """In Megatron's order the last depth's backward begins when the first layer's counts are on their way."""
    overlapped = fxo.transform(
        toy("E/E/E", group), fxo.OverlapConfig("E/E/E", schedule="megatron"), example_inputs=batches(1)[0]
    )
    names = [f"{i.mb}:{i.node.name}" for i in overlapped.plan("FB").order]
    assert names.index("F:L0.counts.F") < names.index("B:MTP1.mtp_post.B") < names.index("B:MTP1.post_combine.B")
    assert names.index("B:L0.dispatch.B") < names.index("F:MTP1.mtp_post.F")
