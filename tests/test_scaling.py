"""What passes, plans and reports cost grows with the number of nodes, not with its square.

Work is counted in lines of Python that run, which is the same on every machine; only a slow test looks at a clock.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxoverlap as fxo
from fxoverlap.ir import META, ChunkGraph, FusedGraph, GraphInput, InputKind, JointGraph, OpTag, Phase, Plan
from fxoverlap.passes import op_facts
from fxoverlap.passes.verify import verify
from fxoverlap.pipeline import CHUNK_PASSES, JOINT_PASSES, PLAN_PASSES
from fxoverlap.report import golden, make_report
from fxoverlap.schedule import build_plan
from fxoverlap.schedule.cost import default_costs

CONFIG = fxo.OverlapConfig()
aten = torch.ops.aten
ROWS = [8]


class Deep:
    """The joint graph of a deep MoE model, written down.

    A residual stream; in each layer products before, between and behind two exchanges of fixed sizes, which the first
    `dense` layers do not have. The last `depths` layers are depths of multi-token prediction. A product saves its input
    and its result for the gradients. The stream begins shifted by a number that is made of a weight in `steps` steps,
    each of which reads the one before in two ways.
    """

    def __init__(self, layers: int, products: int, steps: int = 1, dense: int = 0, depths: int = 0) -> None:
        self.graph = fx.Graph()
        names = [f"layers.{i}" if i < layers - depths else f"mtp.{i}" for i in range(layers)]
        self.inputs: list[GraphInput] = []
        self.gradients: list[tuple[fx.Node, fx.Node]] = []
        x, tangent = self.input(InputKind.LEAF, "x", 0, (8, 16)), self.input(InputKind.TANGENT, "loss", 0, ())
        count = 3 * layers * products
        weights = [self.input(InputKind.PARAM, f"w{i}", i, (16, 16)) for i in range(count)]
        saved: list[tuple[fx.Node, fx.Node]] = []
        self.tag = OpTag(Phase.F, "")
        shift = self.op(aten.argmax.default, weights[0], shape=(), dtype=torch.int64)
        for _ in range(steps):
            back = self.op(aten.neg.default, shift, shape=(), dtype=torch.int64)
            shift = self.op(aten.add.Tensor, shift, back, shape=(), dtype=torch.int64)
        x = self.op(aten.add.Tensor, x, self.op(aten.cos.default, shift, shape=()))
        for i in range(layers):
            self.tag, y = OpTag(Phase.F, names[i]), x
            for k in range(3 * products):
                y = self.exchange(y) if i >= dense and k in (products, 2 * products) else y
                saved.append((y, self.op(aten.mm.default, y, weights[len(saved)])))
                y = self.op(aten.relu.default, saved[-1][1])
            x = self.op(aten.add.Tensor, x, y)
        self.tag = OpTag(Phase.F, "")
        self.loss = self.op(aten.sum.default, x, shape=())
        self.tag = OpTag(Phase.B, "")
        gradient = self.op(aten.expand.default, tangent, [8, 16])
        for i in reversed(range(layers)):
            self.tag, g = OpTag(Phase.B, names[i]), gradient
            for k in reversed(range(3 * products)):
                g = self.back(g, weights.pop(), *saved.pop())
                g = self.exchange(g) if i >= dense and k in (products, 2 * products) else g
            gradient = self.op(aten.add.Tensor, gradient, g)
        self.graph.output([self.loss, *(made for made, _ in self.gradients)])

    def input(self, kind: InputKind, name: str, index: int, shape: tuple[int, ...]) -> fx.Node:
        node = self.graph.placeholder(f"{kind.value}_{index}")
        node.meta["val"] = torch.empty(shape, device="meta")
        self.inputs.append(GraphInput(node.name, kind, name, index))
        return node

    def op(
        self, target: Any, *args: Any, shape: tuple[int, ...] = (8, 16), dtype: torch.dtype = torch.float32
    ) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {"val": torch.empty(shape, dtype=dtype, device="meta"), META: self.tag}
        return node

    def exchange(self, x: fx.Node) -> fx.Node:
        return self.op(op_facts.WAIT, self.op(op_facts.LAUNCHES[0], x, ROWS, ROWS, "experts"))

    def back(self, g: fx.Node, weight: fx.Node, before: fx.Node, product: fx.Node) -> fx.Node:
        """The gradients of a product: notes the weight's, returns the input's."""
        g = self.op(aten.threshold_backward.default, g, product, 0)
        made = self.op(aten.mm.default, self.op(aten.t.default, before, shape=(16, 8)), g, shape=(16, 16))
        self.gradients.append((made, weight))
        return self.op(aten.mm.default, g, self.op(aten.t.default, weight, shape=(16, 16)))

    def joint(self) -> JointGraph:
        gradients = tuple((made.name, weight.name) for made, weight in self.gradients)
        module = fx.GraphModule(nn.Module(), self.graph)
        return JointGraph(module, tuple(self.inputs), self.loss.name, (), (), gradients)


def plan(chunk: ChunkGraph, config: fxo.OverlapConfig) -> Plan:
    return build_plan(chunk, chunk, config)


def report(fused: FusedGraph, config: fxo.OverlapConfig) -> str:
    chunk = fused.plan.forward
    assert chunk is not None
    made = make_report(chunk, fused.plan, None, [], 1, (), (), config, (), None, default_costs(chunk, config))
    return golden(chunk, fused.plan) + str(made)


STEPS: list[Callable[..., Any]] = [*JOINT_PASSES, *CHUNK_PASSES, plan, *PLAN_PASSES, verify, report]


def lines_run(work: Callable[[], Any]) -> tuple[Any, int]:
    """What `work` returns, and how many lines of Python ran in it; a round of a comprehension counts as one."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return work(), count
    finally:
        sys.settrace(before)


Measure = Callable[[Callable[[], Any]], tuple[Any, float]]


def measured(graph: Any, measure: Measure, config: fxo.OverlapConfig = CONFIG) -> dict[str, float]:
    """What each step costs on a joint graph, and its number of nodes."""
    found = {"nodes": float(len(graph.module.graph.nodes))}
    for step in STEPS:
        graph, found[step.__name__] = measure(functools.partial(step, graph, config))
    return found


@pytest.fixture(scope="module")
def work() -> list[dict[str, float]]:
    """Lines run by each step for 24 and for 48 layers, two thirds of them dense."""
    return [measured(Deep(layers, 1, dense=layers * 2 // 3).joint(), lines_run) for layers in (24, 48)]


@pytest.mark.parametrize("step", [step.__name__ for step in STEPS])
def test_b99_twice_the_layers_are_twice_the_work(work: list[dict[str, float]], step: str) -> None:
    assert work[1]["nodes"] > 1.9 * work[0]["nodes"]
    assert work[1][step] < 2.1 * work[0][step]


def test_b99_twice_the_depths_are_twice_the_work() -> None:
    half, full = (measured(Deep(layers, 1, depths=layers // 2).joint(), lines_run) for layers in (12, 24))
    for step in ("layers", "cut", "mtp", "wgrad", "report"):
        assert full[step] < 2.1 * half[step], step


@pytest.mark.parametrize("segment", [3, 1000])
def test_b99_twice_the_layers_are_twice_the_work_with_recompute(segment: int) -> None:
    """In segments of a few layers, and in one that holds them all."""
    config = fxo.OverlapConfig(schedule="sequential", recompute=fxo.Recompute("uniform", segment))
    half, full = (measured(Deep(layers, 1, dense=layers * 2 // 3).joint(), lines_run, config) for layers in (24, 48))
    for step in ("recompute", "bytes", "memory", "extract", "fuse", "lifetime", "verify"):
        assert full[step] < 2.1 * half[step], step


def test_b99_what_is_read_in_two_ways_is_walked_once() -> None:
    few, many = (measured(Deep(1, 1, steps).joint(), lines_run)["cut"] for steps in (8, 16))
    assert many < 2 * few


def seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


@pytest.mark.slow
def test_b99_twenty_thousand_nodes_take_seconds() -> None:
    """Generous bounds, for a machine that others use too."""
    half, full = (measured(Deep(layers, 8).joint(), seconds) for layers in (50, 100))
    assert full["nodes"] > 20000
    half_s, full_s = (sum(each[step.__name__] for step in STEPS) for each in (half, full))
    assert full_s < 60 and full_s < 4 * half_s


@pytest.mark.slow
@pytest.mark.parametrize("segment", [1, 1000])
def test_b99_recompute_and_lifetimes_of_twenty_thousand_nodes_take_seconds(segment: int) -> None:
    config = fxo.OverlapConfig(schedule="sequential", recompute=fxo.Recompute("uniform", segment))
    found = measured(Deep(100, 8).joint(), seconds, config)
    assert found["nodes"] > 20000
    assert found["recompute"] + found["lifetime"] < 10
