"""What `op_facts` says of aliases agrees with the storages that a real run shows, op by op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from toys import RawModel, batches, toy, train_both

import fxoverlap as fxo
from fxoverlap.capture import capture
from fxoverlap.ir import InputKind
from fxoverlap.microbatch import Microbatch
from fxoverlap.passes import op_facts
from fxoverlap.pipeline import to_chunk


class Recorder(fx.Interpreter):
    """Runs a graph and keeps every tensor, so that no storage is used twice."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.tensors: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.tensors[n] = result
        return result


def run_recorded(model: nn.Module) -> dict[fx.Node, torch.Tensor]:
    microbatch = Microbatch(batches(1)[0])
    captured = capture(model, microbatch, fxo.OverlapConfig())
    joint = to_chunk(captured.joint, fxo.OverlapConfig(), []).joint
    assert joint is not None
    leaves = [microbatch.args[i] for i in captured.leaves]
    bound = {InputKind.PARAM: captured.params, InputKind.BUFFER: captured.buffers, InputKind.LEAF: leaves}
    inputs = [
        torch.ones(()) if each.kind is InputKind.TANGENT else bound[each.kind][each.index].detach()
        for each in joint.inputs
        if each.kind is not InputKind.CONSTANT
    ]
    recorder = Recorder(joint.module)
    with torch.no_grad():
        recorder.run(*inputs, enable_io_processing=False)
    return recorder.tensors


@pytest.mark.parametrize("kind", ["reference", "dropout, tied, shared", "raw"])
def test_aliases_are_the_storages_of_a_run(group, kind) -> None:
    changes = {"shared_dim": 8, "dropout": 0.1, "tied": True} if kind.startswith("dropout") else {}
    model = RawModel(group) if kind == "raw" else toy("[*E]-", group, **changes)
    tensors = run_recorded(model)
    # An expanded empty or one-element storage is still a storage of its own, so identity is decided by the object.
    by_storage: dict[int, set[fx.Node]] = {}
    by_root: dict[fx.Node, set[fx.Node]] = {}
    for node, tensor in tensors.items():
        by_storage.setdefault(tensor.untyped_storage()._cdata, set()).add(node)
        by_root.setdefault(op_facts.storage_root(node), set()).add(node)
    seen, said = [sorted(map(sorted, groups.values())) for groups in (by_storage, by_root)]
    assert [group for group in seen if group not in said] == []
    assert len(tensors) > 100


class Views(RawModel):
    """Hands a tensor and a flat view of it across two cuts, and returns a view of its input."""

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y = torch.tanh(x + self.embed(tokens))
        flat = y.view(-1)
        z = self.layers[0](y)
        z = self.layers[1](z * flat.view(z.shape))
        return (self.head(z).square().mean() + (y * flat.view(y.shape)).mean()), x.view(-1)


def inputs(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(32, (1, 8), generator=generator) for _ in range(count)]
    return [(each, torch.randn(1, 8, 16, generator=generator)) for each in tokens]


def test_b16_b19_two_names_of_one_storage_have_one_lifetime(group) -> None:
    overlapped = fxo.transform(Views(group), example_inputs=inputs(1)[0])
    plan = overlapped.plan("F")
    by_name = {node.name: node for node in plan.forward.joint.module.graph.nodes}
    (tanh,) = [name for name, node in by_name.items() if node.target is op_facts.aten.tanh.default]
    names = {name for name, node in by_name.items() if op_facts.storage_root(node).name == tanh}
    read = {value for node in plan.forward.nodes for value in node.reads} & names
    assert read == {tanh}, "the base crosses cuts, and its readers make the view again"
    readers = [i.node.name for i in plan.order if tanh in i.node.reads]
    assert len(readers) >= 2, readers
    backward = overlapped.plan("B")
    last = [i.node.name for i in backward.order if tanh in i.node.reads][-1]
    assert [i.node.name for p in (plan, backward) for i in p.order if names & set(i.frees)] == [last]
    result = overlapped.step(inputs(2))
    assert [torch.equal(out, x.view(-1)) for (out,), (_, x) in zip(result.outputs, inputs(2), strict=True)] == [
        True
    ] * 2
    overlapped.module.zero_grad()
    assert train_both(overlapped, lambda step: inputs(3, step), steps=2) == []
