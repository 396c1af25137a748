"""Layer types that nothing in the project knows by name, written down plainly: every parameter gets its gradient."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from odd import Odd, in_turn, moe
from torch import Tensor, nn
from toys import batches, eager_step, train_both

import fxoverlap as fxo
from fxoverlap.capture import capture
from fxoverlap.ir import InputKind, Phase
from fxoverlap.microbatch import as_microbatch
from fxoverlap.passes import op_facts
from fxoverlap.pipeline import to_chunk

pytestmark = pytest.mark.usefixtures("shared_captures")


class GatedDelta(nn.Module):
    """Pre-norm gated delta rule with residual: two heads of width 8.

    A causal depthwise convolution mixes queries, keys and values over time; a state of each head forgets by a gate
    and is corrected towards the values by another; the result is normalised, gated and projected.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.in_proj, self.gates = nn.Linear(16, 48, bias=False), nn.Linear(16, 4, bias=False)
        self.conv = nn.Conv1d(48, 48, 3, groups=48, bias=False)
        self.decay, self.dt_bias = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
        self.z_proj, self.out_norm = nn.Linear(16, 16, bias=False), nn.RMSNorm(8)
        self.out_proj = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        mixed = F.silu(self.conv(F.pad(self.in_proj(y).transpose(1, 2), (2, 0)))).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (2, 8)) for part in mixed.chunk(3, -1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        a, b = self.gates(y).chunk(2, -1)
        forget, correct = (-self.decay.exp() * F.softplus(a + self.dt_bias)).exp(), b.sigmoid()
        state, out = x.new_zeros(x.shape[0], 2, 8, 8), []
        for t in range(x.shape[1]):
            state = state * forget[:, t, :, None, None]
            error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], error * correct[:, t, :, None])
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        gated = self.out_norm(torch.stack(out, 1)) * F.silu(self.z_proj(y)).unflatten(-1, (2, 8))
        return x + self.out_proj(gated.flatten(-2))


@pytest.mark.parametrize("delay_wgrad", [True, False])
def test_b26_every_parameter_of_a_gated_delta_layer_gets_its_gradient(
    group: dist.ProcessGroup, delay_wgrad: bool
) -> None:
    torch.manual_seed(0)
    model = Odd(in_turn, GatedDelta(), moe(group))
    overlapped = fxo.transform(model, fxo.OverlapConfig(delay_wgrad=delay_wgrad), example_inputs=batches(1)[0])
    assert train_both(overlapped, lambda step: batches(3, seed=step), steps=2) == []
    eager = copy.deepcopy(model)
    eager_step(eager, batches(2))
    overlapped.step(batches(2))
    with_gradient = {name for name, p in eager.named_parameters() if p.grad is not None}
    assert {name for name, p in model.named_parameters() if p.grad is not None} == with_gradient
    assert len([name for name in with_gradient if name.startswith("layers.0.")]) == 9
    if delay_wgrad:
        chunk = overlapped.plan("B").backward
        made_by = {value: node for node in chunk.nodes for value in node.writes}
        name = {each.value: each.name for each in chunk.joint.inputs if each.kind is InputKind.PARAM}
        phase = {name[target]: made_by[value].phase for value, target in chunk.joint.gradients}
        projections = ("in_proj", "gates", "z_proj", "out_proj")
        assert {phase[f"layers.0.{each}.weight"] for each in projections} == {Phase.W}


class LowPrecision(nn.Module):
    """A MoE layer whose exchanges run under autocast."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.moe = moe(group)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.moe(x).float()


class Post(nn.Module):
    """What follows the combine, in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def test_b13_what_follows_a_combine_keeps_its_own_tags_and_precision(group: dist.ProcessGroup) -> None:
    """No node of the layer behind runs in the context of the combine, nor before it."""
    torch.manual_seed(0)
    model = Odd(in_turn, LowPrecision(group), Post())
    joint = capture(model, as_microbatch(batches(1)[0]), fxo.OverlapConfig()).joint
    before = {node.name: op_facts.tag(node).fqn for node in op_facts.ops(joint.module.graph)}
    chunk = to_chunk(joint, fxo.OverlapConfig(), [])
    assert chunk.joint is not None
    tagged = {node.name: op_facts.tag(node).fqn for node in op_facts.ops(chunk.joint.module.graph)}
    assert {name for name in set(before) & set(tagged) if before[name] != tagged[name]} == set()
    by_name = {node.name: node for node in chunk.joint.module.graph.nodes}
    order = [node.name for node in chunk.nodes]
    products = [
        (node.name, by_name[op].meta["val"].dtype)
        for node in chunk.nodes
        for op in node.ops
        if node.phase is Phase.F and op_facts.is_heavy(by_name[op]) and tagged[op] == "layers.1.linear"
    ]
    assert [dtype for _, dtype in products] == [torch.float32]
    assert order.index(products[0][0]) > order.index("L0.combine.F")
    assert train_both(model, lambda step: batches(3, seed=step), steps=2) == []
