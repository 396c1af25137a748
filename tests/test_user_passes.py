"""Pass lists of the user: what a pass changes behind another's back is seen, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import fx
from toys import RawModel, batches, train_both

import fxoverlap as fxo
from fxoverlap.errors import VerifyError
from fxoverlap.ir import META, ChunkGraph, FusedGraph, Instance, JointGraph, Lane, OpTag, Phase
from fxoverlap.passes import op_facts
from fxoverlap.passes.exchanges import exchanges
from fxoverlap.passes.extract import extract
from fxoverlap.passes.lifetime import lifetime
from fxoverlap.pipeline import Pass, default_passes

pytestmark = pytest.mark.usefixtures("shared_captures")


def behind(other: Pass | None, *added: Pass) -> list[Pass]:
    """The default passes with more of them behind one (None: in front of all)."""
    passes = default_passes()
    at = 0 if other is None else passes.index(other) + 1
    return [*passes[:at], *added, *passes[at:]]


def staged(stage: str) -> Callable[[Any], Any]:
    def mark(each: Any) -> Any:
        each.stage = stage
        return each

    return mark


def transformed(group: dist.ProcessGroup, passes: list[Pass]) -> fxo.OverlappedModel:
    return fxo.transform(RawModel(group, blocks=1), fxo.OverlapConfig(passes=passes), example_inputs=batches(1)[0])


def add_exchange(joint: JointGraph, config: fxo.OverlapConfig) -> JointGraph:
    """Send what the first layer normalises to its rank and back, in equal parts."""
    graph, group = joint.module.graph, joint.exchanges[0].group
    first = next(n for n in op_facts.ops(graph) if op_facts.tag(n).fqn == "layers.0.norm")
    value = first.all_input_nodes[0]
    for _ in range(2):
        with graph.inserting_before(first):
            sent = graph.call_function(op_facts.LAUNCHES[0], (value, [1], [1], group))
            value = graph.call_function(op_facts.WAIT, (sent,))
        for node in (sent, value):
            node.meta = {"val": first.all_input_nodes[0].meta["val"], META: OpTag(Phase.F, "layers.0")}
    first.replace_input_with(first.all_input_nodes[0], value)
    graph.lint()
    return joint


add_exchange.stage = "joint"  # type: ignore[attr-defined]


def test_b102_exchange_that_a_pass_adds_behind_exchanges_is_analysed_and_counted(group: dist.ProcessGroup) -> None:
    overlapped = transformed(group, behind(exchanges, add_exchange))
    assert transformed(group, default_passes()).report().exchanges_per_microbatch == 5
    assert overlapped.report().exchanges_per_microbatch == 7
    comm = [i.node.name for i in overlapped.plan("F").order if i.node.lane.value == "comm"]
    assert comm == ["L0.dispatch.F", "L0.combine.F", "L1.counts.F", "L1.dispatch.F", "L1.combine.F"]
    # On one rank what is sent comes back as it was.
    assert train_both(overlapped, lambda step: batches(3, seed=step), steps=2) == []


@staged("chunk")
def takes_the_last_node(chunk: ChunkGraph, config: fxo.OverlapConfig) -> ChunkGraph:
    return replace(chunk, nodes=chunk.nodes[:-1])


@staged("chunk")
def takes_the_first_node(chunk: ChunkGraph, config: fxo.OverlapConfig) -> ChunkGraph:
    return replace(chunk, nodes=chunk.nodes[1:])


UNFIT: dict[str, tuple[list[Pass], str]] = {
    "a gradient": (behind(extract, takes_the_last_node), "needed for the gradient of embed.weight"),
    "a value": (behind(extract, takes_the_first_node), r"no node that makes 'embedding', which is needed for L0\."),
    "twice": ([*default_passes(), *default_passes()], "pass cut .* given a ChunkGraph, raised"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_lists_that_do_not_fit_together_are_refused_by_pass(group: dist.ProcessGroup, name: str) -> None:
    passes, message = UNFIT[name]
    with pytest.raises(fxo.UnsupportedError, match=message):
        transformed(group, passes)


def test_op_without_a_tag_is_named_with_its_pass(group: dist.ProcessGroup) -> None:
    def forgets(joint: JointGraph, config: fxo.OverlapConfig) -> JointGraph:
        node = next(op_facts.ops(joint.module.graph))
        with joint.module.graph.inserting_after(node):
            joint.module.graph.call_function(op_facts.aten.neg.default, (node,))
        return joint

    forgets.stage = "joint"  # type: ignore[attr-defined]
    with pytest.raises(fxo.UnsupportedError, match=r"pass forgets left the op neg\w* .*without an OpTag"):
        transformed(group, behind(None, forgets))


def first_end(fused: FusedGraph) -> tuple[fx.Node, str]:
    """The first call on the compute lane that reads a value for the last time, and the value."""
    calls = fused.module.graph.find_nodes(op="call_module")
    handed_on = fused.module.graph.output_node().all_input_nodes
    for i, call in enumerate(calls):
        later = {value for each in calls[i + 1 :] for value in each.all_input_nodes}
        dying = [v for v in call.all_input_nodes if v.op != "placeholder" and v not in later and v not in handed_on]
        if dying and call.meta[META].node.lane is Lane.COMPUTE:
            return call, dying[0].meta[META].value
    raise AssertionError("nothing dies")


def end(call: fx.Node, value: str) -> None:
    instance: Instance = call.meta[META]
    call.meta[META] = replace(instance, frees=(*instance.frees, value))


def frees_early(fused: FusedGraph, config: fxo.OverlapConfig) -> FusedGraph:
    end(*first_end(fused))
    return fused


def frees_late(fused: FusedGraph, config: fxo.OverlapConfig) -> FusedGraph:
    end(fused.module.graph.find_nodes(op="call_module")[-1], first_end(fused)[1])
    return fused


frees_early.stage = frees_late.stage = "plan"  # type: ignore[attr-defined]


@pytest.mark.parametrize("other", [frees_early, frees_late])
@pytest.mark.parametrize("is_first", [True, False])
def test_b22_two_passes_that_end_one_life_are_named_with_the_tensor(
    group: dist.ProcessGroup, other: Any, is_first: bool
) -> None:
    passes = default_passes()
    passes.insert(passes.index(lifetime) + (not is_first), other)
    names = [other.__name__, "lifetime"] if is_first else ["lifetime", other.__name__]
    said = rf"passes {names[0]} and {names[1]} both end the life of '\w+' \(microbatch F\)"
    with pytest.raises(fxo.UnsupportedError, match=said):
        transformed(group, passes)


def test_b22_one_pass_that_ends_lives_in_place_of_another(group: dist.ProcessGroup) -> None:
    passes: list[Any] = [frees_early if each is lifetime else each for each in default_passes()]
    assert train_both(transformed(group, passes), lambda step: batches(2, seed=step), steps=1) == []


def test_b22_what_the_backward_reads_is_not_freed_in_forward(group: dist.ProcessGroup) -> None:
    """One feature saves an activation, another one frees it."""

    def frees_saved(fused: FusedGraph, config: fxo.OverlapConfig) -> FusedGraph:
        handed_on = [value for value in fused.module.graph.output_node().all_input_nodes if value.meta[META].mb == "F"]
        if handed_on:
            end(fused.module.graph.find_nodes(op="call_module")[-1], handed_on[0].meta[META].value)
        return fused

    frees_saved.stage = "plan"  # type: ignore[attr-defined]
    with pytest.raises(VerifyError, match="handed on behind the forward, but an earlier node freed it"):
        transformed(group, behind(lifetime, frees_saved))


def test_the_example_of_the_docs_runs(group: dist.ProcessGroup, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent / "docs" / "passes.md").read_text()
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    transformed(group, names["config"].passes)
    assert "Counter({'" in capsys.readouterr().out


def fails(graph: Any, config: fxo.OverlapConfig) -> Any:
    return {}["no such key"]


def returns_nothing(graph: Any, config: fxo.OverlapConfig) -> None:
    pass


WRONG = [
    (fails, ("The pass fails", "raised KeyError: 'no such key'", "default_passes()")),
    (returns_nothing, ("The pass returns_nothing", "returned a NoneType, expected a", "A pass returns the graph")),
]


@pytest.mark.parametrize("stage", ["joint", "chunk", "plan"])
@pytest.mark.parametrize(("wrong", "parts"), WRONG)
def test_pass_that_fails_or_returns_no_graph_is_named(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, wrong: Any, parts: tuple[str, ...], stage: str
) -> None:
    monkeypatch.setattr(wrong, "stage", stage, raising=False)
    with pytest.raises(fxo.UnsupportedError) as caught:
        transformed(group, behind(None, wrong))
    text = str(caught.value)
    assert [part for part in (*parts, f"stage {stage!r} of OverlapConfig.passes") if part not in text] == [], text
    assert isinstance(caught.value.__cause__, KeyError) == (wrong is fails)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("cut", "The pass mtp .*, given a JointGraph, raised AttributeError.*what it needs comes before it"),
        ("memory", "must hold `memory`"),
        ("extract", "must hold `extract`"),
        ("fuse", "The pass lanes .*, given a Plan, raised AttributeError"),
    ],
)
def test_pass_that_others_need_is_missing(group: dist.ProcessGroup, missing: str, said: str) -> None:
    with pytest.raises(fxo.UnsupportedError, match=said):
        transformed(group, [each for each in default_passes() if each.__name__ != missing])
