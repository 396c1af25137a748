"""What four kinds of model are cut into and in which order they run, as texts to read; and that the texts are stable.

Proves: `golden()` shows nodes, lanes, shared modules and what overlaps what, and moves with neither sizes nor captures;
the fused graph calls one module an instance, with an event on each edge from compute to comm.
Refresh the texts with `EXPECTTEST_ACCEPT=1`, and read the difference before committing it.
"""

from __future__ import annotations

import functools
import operator
import re
from typing import Any

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import fx
from toys import batches, toy

import fxoverlap as fxo
from fxoverlap.ir import META, Instance, Slot
from fxoverlap.ops.events import record_event


def capture(
    pattern: str, group: dist.ProcessGroup | None, tokens: int = 8, schedule: str = "auto", **changes: Any
) -> fxo.OverlappedModel:
    config = fxo.OverlapConfig(pattern=pattern, schedule=schedule)
    return fxo.transform(toy(pattern, group, **changes), config, example_inputs=batches(1, tokens=tokens)[0])


# For the tests that only look: a capture takes about a second.
captured = functools.cache(capture)


def render(fused: fx.GraphModule) -> str:
    """One line a call, event and output. A call shows its module, and whose results it reads."""
    lines = []
    for node in fused.graph.nodes:
        if node.op == "call_module":
            lines.append(f"{_label(node):20} = {node.target}({', '.join(_sources(node))})")
        elif node.op == "output":
            handed_on = _sources(node)
            lines += [f"return {mb}: {', '.join(each[2:] for each in handed_on if each[0] == mb)}" for mb in "FB"]
        elif node.op == "call_function" and node.target is not operator.getitem:
            event, lane = node.args
            lines.append(f"  {lane} {'records' if node.target is record_event else 'waits for'} {event}")
    return "\n".join(lines) + "\n"


def _label(call: fx.Node) -> str:
    instance = call.meta[META]
    assert isinstance(instance, Instance)
    return f"{instance.mb}:{instance.node.name}"


def _sources(node: fx.Node) -> list[str]:
    """The calls whose results a call or the output reads, in plan order."""
    made = {value.args[0] for value in node.all_input_nodes if value.op == "call_function"}
    return [_label(call) for call in sorted(made)]


def test_two_moe_layers(group: dist.ProcessGroup) -> None:
    assert_expected_inline(
        captured("[*E][*E]", group).golden(),
        """\
nodes
  -    F  pre_process  post_process
  L0   F  pre_dispatch  (counts)  permute  (dispatch)  experts  (combine)  post_combine
  L1   F  pre_dispatch=  (counts)=  permute=  (dispatch)=  experts=  (combine)=  post_combine=
  -    B  post_process
  -    W  post_process  pre_process
  L1   B  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  L1   W  experts  pre_dispatch
  L0   B  post_combine=  (combine)=  experts=  (dispatch)=  pre_dispatch=
  L0   W  experts=  pre_dispatch=

plan FB
  compute              comm
  F:pre_process.F
  F:L0.pre_dispatch.F
                       > F:L0.counts.F
  B:post_process.B     | F:L0.counts.F
  B:post_process.W     | F:L0.counts.F
  F:L0.permute.F
                       > F:L0.dispatch.F
  B:L1.post_combine.B  | F:L0.dispatch.F
                       > B:L1.combine.B
  F:L0.experts.F       | B:L1.combine.B
                       > F:L0.combine.F
  B:L1.experts.B       | F:L0.combine.F
                       > B:L1.dispatch.B
  B:L1.experts.W       | F:L0.combine.F, B:L1.dispatch.B
  F:L0.post_combine.F  | B:L1.dispatch.B
  F:L1.pre_dispatch.F  | B:L1.dispatch.B
                       > F:L1.counts.F
  B:L1.pre_dispatch.B  | F:L1.counts.F
  B:L1.pre_dispatch.W  | F:L1.counts.F
  B:L0.post_combine.B  | F:L1.counts.F
                       > B:L0.combine.B
  F:L1.permute.F       | B:L0.combine.B
                       > F:L1.dispatch.F
  B:L0.experts.B       | F:L1.dispatch.F
                       > B:L0.dispatch.B
  B:L0.experts.W       | F:L1.dispatch.F, B:L0.dispatch.B
  F:L1.experts.F       | B:L0.dispatch.B
                       > F:L1.combine.F
  B:L0.pre_dispatch.B  | F:L1.combine.F
  B:L0.pre_dispatch.W  | F:L1.combine.F
  B:pre_process.W      | F:L1.combine.F
  F:L1.post_combine.F
  F:post_process.F
""",
    )


def test_dense_layers_before_a_moe_layer(group: dist.ProcessGroup) -> None:
    assert_expected_inline(
        captured("*-[*E]", group).golden(),
        """\
nodes
  -    F  pre_process  post_process
  L0   F  pre_dispatch
  L1   F  experts
  L2   F  pre_dispatch  (counts)  permute  (dispatch)  experts  (combine)  post_combine
  -    B  post_process
  -    W  post_process  pre_process
  L2   B  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  L2   W  experts  pre_dispatch
  L1   B  experts
  L1   W  experts
  L0   B  pre_dispatch
  L0   W  pre_dispatch

plan FB
  compute              comm
  B:post_process.B
  B:L2.post_combine.B
                       > B:L2.combine.B
  F:pre_process.F      | B:L2.combine.B
  B:post_process.W     | B:L2.combine.B
  F:L0.pre_dispatch.F  | B:L2.combine.B
  F:L1.experts.F       | B:L2.combine.B
  F:L2.pre_dispatch.F  | B:L2.combine.B
                       > F:L2.counts.F
  F:L2.permute.F       | B:L2.combine.B
                       > F:L2.dispatch.F
  B:L2.experts.B       | F:L2.dispatch.F
                       > B:L2.dispatch.B
  B:L2.experts.W       | F:L2.dispatch.F, B:L2.dispatch.B
  F:L2.experts.F       | B:L2.dispatch.B
                       > F:L2.combine.F
  B:L2.pre_dispatch.B  | F:L2.combine.F
  B:L2.pre_dispatch.W  | F:L2.combine.F
  B:L1.experts.B       | F:L2.combine.F
  B:L1.experts.W       | F:L2.combine.F
  B:L0.pre_dispatch.B  | F:L2.combine.F
  B:L0.pre_dispatch.W  | F:L2.combine.F
  B:pre_process.W      | F:L2.combine.F
  F:L2.post_combine.F
  F:post_process.F
""",
    )


def test_shared_expert(group: dist.ProcessGroup) -> None:
    assert_expected_inline(
        captured("[*E]", group, shared_dim=12).golden(),
        """\
nodes
  -    F  pre_process  post_process
  L0   F  pre_dispatch  (counts)  shared  permute  (dispatch)  experts  (combine)  post_combine
  -    B  post_process
  -    W  post_process  pre_process
  L0   B  post_combine  (combine)=  shared  experts  (dispatch)=  pre_dispatch
  L0   W  post_combine  shared  experts  pre_dispatch

plan FB
  compute              comm
  F:pre_process.F
  F:L0.pre_dispatch.F
                       > F:L0.counts.F
  B:post_process.B     | F:L0.counts.F
  B:post_process.W     | F:L0.counts.F
  B:L0.post_combine.B  | F:L0.counts.F
                       > B:L0.combine.B
  B:L0.post_combine.W  | F:L0.counts.F, B:L0.combine.B
  B:L0.shared.B        | F:L0.counts.F, B:L0.combine.B
  B:L0.shared.W        | F:L0.counts.F, B:L0.combine.B
  F:L0.shared.F        | F:L0.counts.F, B:L0.combine.B
  F:L0.permute.F       | B:L0.combine.B
                       > F:L0.dispatch.F
  B:L0.experts.B       | F:L0.dispatch.F
                       > B:L0.dispatch.B
  B:L0.experts.W       | F:L0.dispatch.F, B:L0.dispatch.B
  F:L0.experts.F       | B:L0.dispatch.B
                       > F:L0.combine.F
  B:L0.pre_dispatch.B  | F:L0.combine.F
  B:L0.pre_dispatch.W  | F:L0.combine.F
  B:pre_process.W      | F:L0.combine.F
  F:L0.post_combine.F
  F:post_process.F
""",
    )


def test_dense_only() -> None:
    assert_expected_inline(
        captured("*-", None).golden(),
        """\
nodes
  -    F  pre_process  post_process
  L0   F  pre_dispatch
  L1   F  experts
  -    B  post_process
  -    W  post_process  pre_process
  L1   B  experts
  L1   W  experts
  L0   B  pre_dispatch
  L0   W  pre_dispatch

plan FB
  compute              comm
  B:post_process.B
  B:post_process.W
  B:L1.experts.B
  B:L1.experts.W
  B:L0.pre_dispatch.B
  B:L0.pre_dispatch.W
  B:pre_process.W
  F:pre_process.F
  F:L0.pre_dispatch.F
  F:L1.experts.F
  F:post_process.F
""",
    )


def test_fused_graph(group: dist.ProcessGroup) -> None:
    assert_expected_inline(
        render(captured("[*E]", group).fused_graph("FB")),
        """\
F:pre_process.F      = pre_process_F()
F:L0.pre_dispatch.F  = pre_dispatch_F(F:pre_process.F)
  compute records 0
  comm waits for 0
F:L0.counts.F        = counts_F(F:L0.pre_dispatch.F)
B:post_process.B     = post_process_B()
B:post_process.W     = post_process_W(B:post_process.B)
B:L0.post_combine.B  = post_combine_B(B:post_process.B)
  compute records 1
  comm waits for 1
B:L0.combine.B       = combine_B(B:L0.post_combine.B)
F:L0.permute.F       = permute_F(F:L0.pre_dispatch.F, F:L0.counts.F)
  compute records 2
  comm waits for 2
F:L0.dispatch.F      = combine_B(F:L0.permute.F)
B:L0.experts.B       = experts_B(B:L0.combine.B)
  compute records 3
  comm waits for 3
B:L0.dispatch.B      = dispatch_B(B:L0.experts.B)
B:L0.experts.W       = experts_W(B:L0.experts.B)
F:L0.experts.F       = experts_F(F:L0.permute.F, F:L0.dispatch.F)
  compute records 4
  comm waits for 4
F:L0.combine.F       = dispatch_B(F:L0.permute.F, F:L0.experts.F)
B:L0.pre_dispatch.B  = pre_dispatch_B(B:post_process.B, B:L0.dispatch.B)
B:L0.pre_dispatch.W  = pre_dispatch_W(B:L0.pre_dispatch.B)
B:pre_process.W      = pre_process_W(B:L0.pre_dispatch.B)
F:L0.post_combine.F  = post_combine_F(F:L0.pre_dispatch.F, F:L0.permute.F, F:L0.combine.F)
F:post_process.F     = post_process_F(F:L0.post_combine.F)
return F: pre_process.F, L0.pre_dispatch.F, L0.permute.F, L0.experts.F, L0.post_combine.F, post_process.F
return B: post_process.W, L0.experts.W, L0.pre_dispatch.W, pre_process.W
""",
    )


@pytest.fixture(scope="module")
def text(group: dist.ProcessGroup) -> str:
    return captured("[*E]", group, schedule="megatron", shared_dim=12).golden()


def test_text_names_no_value_address_symbol_or_count(text: str) -> None:
    words = set(re.findall(r"[\w.:]+", text))
    known = re.compile(r"nodes|plan|compute|comm|FB|([FB]:)?(L\d+\.)?[a-z_]+(\.[FBW])?|L\d+|[FBW]")
    assert {word for word in words if not known.fullmatch(word)} == set()
    # What is left could still be the name of an op; these are the only names of parts.
    slots = {slot.value for slot in Slot}
    parts = {re.sub(r"^([FB]:)?(L\d+\.)?|\.[FBW]$", "", word) for word in words}
    assert parts - slots == {"nodes", "plan", "compute", "comm", "FB", "F", "B", "W", "L0"}


def test_second_capture_gives_the_same_text(group: dist.ProcessGroup, text: str) -> None:
    assert capture("[*E]", group, schedule="megatron", shared_dim=12).golden() == text


def test_second_search_gives_the_same_text(group: dist.ProcessGroup) -> None:
    assert capture("[*E][*E]", group).golden() == captured("[*E][*E]", group).golden()


@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens": 24},
        {"dim": 32, "heads": 4, "kv_heads": 2, "shared_dim": 24},
        {"tokens": 5, "num_experts": 6, "expert_dim": 16, "top_k": 3, "vocab_size": 40, "shared_dim": 40},
    ],
    ids=["tokens", "dim", "all"],
)
def test_other_sizes_give_the_same_text(group: dist.ProcessGroup, text: str, sizes: dict[str, int]) -> None:
    """Of a fixed order; the search asks what nodes cost."""
    assert capture("[*E]", group, schedule="megatron", **{"shared_dim": 12, **sizes}).golden() == text


def test_two_layers_of_another_size_give_the_same_text(group: dist.ProcessGroup) -> None:
    other = capture("[*E][*E]", group, schedule="megatron", tokens=6, dim=32, heads=4, num_experts=8, vocab_size=48)
    assert other.golden() == captured("[*E][*E]", group, schedule="megatron").golden()


def test_text_after_steps_is_the_text_before(group: dist.ProcessGroup) -> None:
    prepared = captured("[*E]", group)
    before = prepared.golden()
    prepared.step(batches(3))
    assert prepared.golden() == before


def test_text_shows_another_structure(group: dist.ProcessGroup, text: str) -> None:
    """The text is no constant: schedule, delay_wgrad and the model each change it."""
    model = toy("[*E]", group, shared_dim=12)
    configs = [fxo.OverlapConfig("[*E]", schedule="sequential"), fxo.OverlapConfig("[*E]", delay_wgrad=False)]
    texts = [fxo.transform(model, config, example_inputs=batches(1)[0]).golden() for config in configs]
    texts.append(captured("[*E]", group).golden())
    texts.append(captured("[*E]", group, shared_dim=12).golden())
    assert len({text, *texts}) == 5
