"""Faults that others had with multi-token prediction, on the overlapped step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from mtp_models import Depth, Predicting
from odd import Dense
from torch import Tensor, nn
from toys import RawMoE, batches, eager_step, same_bits, toy, train_both

import fxoverlap as fxo
from fxoverlap.capture import capture
from fxoverlap.ir import ChunkGraph, Slot
from fxoverlap.microbatch import as_microbatch
from fxoverlap.passes import op_facts

pytestmark = pytest.mark.usefixtures("shared_captures")


def chunk_of(overlapped: fxo.OverlappedModel) -> ChunkGraph:
    chunk = overlapped.plan("FB").forward
    assert chunk is not None
    return chunk


def transformed(model: nn.Module, example: Any = None, **config: Any) -> fxo.OverlappedModel:
    settings = {"schedule": "megatron", **config}
    return fxo.transform(model, fxo.OverlapConfig(**settings), example_inputs=example or batches(1)[0])


def steps_are_right(overlapped: fxo.OverlappedModel) -> bool:
    return train_both(overlapped, lambda step: batches((1, 3)[step], seed=step), steps=2) == []


# --- an op with a backward of its own --------------------------------------------------------------------------------

RUNS: list[str] = []


@torch.library.custom_op("fxoverlap_test::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    RUNS.append("F")
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxoverlap_test::doubled_backward", mutates_args=())
def doubled_backward(grad: Tensor) -> Tensor:
    RUNS.append("B")
    return grad * 2


@doubled_backward.register_fake
def _(grad: Tensor) -> Tensor:
    return torch.empty_like(grad)


doubled.register_autograd(lambda ctx, grad: doubled_backward(grad))


class Doubled(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(doubled(x))


@pytest.mark.parametrize("last_norm", [True, False])
def test_b01_a_backward_that_two_depths_reach_runs_once(last_norm: bool) -> None:
    torch.manual_seed(0)
    model = Predicting([Dense()], [Depth([Doubled()]), Depth([Dense()])], last_norm=last_norm)
    overlapped = transformed(model)
    chunk = chunk_of(overlapped)
    ops = [op for node in chunk.nodes for op in node.ops if op.startswith("doubled")]
    assert len(ops) == 2
    RUNS.clear()
    overlapped.step(batches(3))
    assert sorted(RUNS) == ["B"] * 3 + ["F"] * 3
    model.zero_grad()
    assert steps_are_right(overlapped)


# --- the end of a chunk ----------------------------------------------------------------------------------------------


class End(nn.Module):
    """A last stage without layers: final norm, head, loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 32)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())


def hidden_states(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(1, 8, 16, generator=generator).requires_grad_(), targets)
        for _, targets in batches(count, seed=seed)
    ]


def test_b03_a_chunk_without_layers_has_its_norm() -> None:
    model, eager = End(), End()
    overlapped = transformed(model, hidden_states(1, 0)[0])
    modules = {op_facts.tag(op).fqn for op in op_facts.ops(chunk_of(overlapped).joint.module.graph)}  # type: ignore[union-attr]
    assert "norm" in modules
    ours, theirs = hidden_states(3, 1), hidden_states(3, 1)
    result = overlapped.step(ours)
    assert all(map(same_bits, eager_step(eager, theirs), result.losses))
    for a, b in zip(
        (*model.parameters(), *(x for x, _ in ours)), (*eager.parameters(), *(x for x, _ in theirs)), strict=True
    ):
        assert a.grad is not None and b.grad is not None and same_bits(a.grad, b.grad)


def test_b03_a_trunk_without_layers_has_its_norm_in_front_of_the_depths(group: dist.ProcessGroup) -> None:
    overlapped = transformed(toy("/[*E]", group), pattern="/[*E]")
    chunk = chunk_of(overlapped)
    ops = {op.name: op_facts.tag(op).fqn for op in op_facts.ops(chunk.joint.module.graph)}  # type: ignore[union-attr]
    of_norm = {(node.place, node.phase.value) for node in chunk.nodes for op in node.ops if ops[op] == "norm"}
    assert {phase for _, phase in of_norm} >= {"F", "B"} or {phase for _, phase in of_norm} >= {"F", "W"}
    assert steps_are_right(overlapped)


class Joined(Predicting):
    """The rows of trunk and depth go through the head as one; those of the trunk, 8 of 16, leave the chunk."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:  # type: ignore[override]
        embedded = self.embed(tokens)
        x = self.layers[0](embedded)
        depth = self.mtp[0]
        ahead = depth(x, embedded.roll(-1, 1))
        rows = torch.cat((self.norm(x), depth.norm(ahead)), 1)
        losses = F.cross_entropy(self.head(rows)[0], targets[0].repeat(2), reduction="none")
        return losses[:8].mean() + 0.1 * losses[8:].mean(), rows[:, :8]


def test_b12_rows_leave_the_chunk_behind_what_makes_them(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    model = Joined([RawMoE(16, 4, group)], [Depth([RawMoE(16, 4, group)])])
    overlapped = transformed(model)
    eager = copy.deepcopy(model)
    result = overlapped.step(batches(3))
    for (rows,), microbatch in zip(result.outputs, batches(3), strict=True):
        assert rows.shape == (1, 8, 16)
        assert same_bits(rows, eager(*microbatch)[1])
    chunk = chunk_of(overlapped)
    assert chunk.joint is not None
    made = [node.name for node in chunk.nodes if chunk.joint.outputs[0] in node.ops]
    assert made == ["MTP0.mtp_post.F"]
    model.zero_grad()
    assert steps_are_right(overlapped)


# --- what is under a context -----------------------------------------------------------------------------------------


class Tagged(RawMoE):
    """Brings the results back under a context that tags what is traced in it."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        rows = funcol.all_to_all_single_autograd(flat, None, None, self.group)
        rows = torch.relu(rows @ self.w)
        with torch.fx.traceback.annotate({"precision": "low"}):
            back = funcol.all_to_all_single_autograd(rows, None, None, self.group)
            return x + back.view_as(x)


def tagged(graph: torch.fx.Graph) -> set[str]:
    return {node.name for node in graph.nodes if "precision" in (node.meta.get("custom") or {})}


def test_b13_the_depths_head_is_not_under_the_context_of_the_combine(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    model = Predicting([Dense()], [Depth([Dense(), Tagged(16, 4, group)])])
    joint = capture(model, as_microbatch(batches(1)[0]), fxo.OverlapConfig()).joint
    traced, names = tagged(joint.module.graph), {node.name for node in joint.module.graph.nodes}
    assert traced
    overlapped = transformed(model)
    chunk = chunk_of(overlapped)
    assert chunk.joint is not None
    found = tagged(chunk.joint.module.graph)
    assert found & names <= traced
    in_head = {op for node in chunk.nodes if node.slot is Slot.MTP_POST for op in node.ops}
    assert in_head and in_head.isdisjoint(found)
    order = [i.node.name for i in overlapped.plan("F").order]
    assert order.index("MTP0.combine.F") < order.index("MTP0.post_combine.F") < order.index("MTP0.mtp_post.F")
    order = [i.node.name for i in overlapped.plan("B").order]
    assert order.index("MTP0.mtp_post.B") < order.index("MTP0.combine.B") < order.index("MTP0.pre_dispatch.B")
    assert steps_are_right(overlapped)


# --- losses and their gradients --------------------------------------------------------------------------------------

PLAIN = {"aux_loss": 0.0, "top_k": 1}


def masked(microbatch: tuple[Tensor, Tensor], valid: bool) -> fxo.Microbatch:
    tokens, targets = microbatch
    return fxo.Microbatch((tokens, targets), {"mtp_input_mask": torch.full(tokens.shape, valid)})


def test_b84_b86_a_depths_loss_is_the_mean_over_its_own_targets(group: dist.ProcessGroup) -> None:
    """7 of 8 in the depth; none where no token is valid, and then nothing is NaN and nothing is learnt."""
    model = toy("E/E", group, mtp_weight=1.0, **PLAIN)
    own = masked(batches(1)[0], True)
    overlapped = transformed(model, own)
    seen: list[Tensor] = []
    model.mtp[0].norm.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    without = toy("E", group, **PLAIN)
    with torch.no_grad():
        model(*own.args, **own.kwargs)
        main = without(*own.args)
    expected = F.cross_entropy((seen.pop() @ model.head.weight.T)[0, :7], own.args[1][0, 1:])
    model.mtp[0].norm._forward_hooks.clear()
    for valid in (True, False):
        microbatch = masked(batches(1)[0], valid)
        loss = overlapped.step([microbatch]).losses[0]
        # The same numbers in another order of additions: a few bits of fp32.
        torch.testing.assert_close(loss - main, expected if valid else torch.zeros(()), rtol=1e-5, atol=1e-6)
        gradients = [p.grad for p in model.mtp.parameters() if p.grad is not None]
        assert all(bool(g.isfinite().all()) for g in gradients)
        assert any(bool(g.any()) for g in gradients) == valid
        model.zero_grad()

    def make(step: int) -> list[fxo.Microbatch]:
        return [masked(each, i != 1) for i, each in enumerate(batches(3, seed=step))]

    assert train_both(overlapped, make, steps=2) == []
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("tokens", [8, 64])
def test_b85_b87_scales_are_exact_and_merged_gradients_are_sums(tokens: int, group: dist.ProcessGroup) -> None:
    found: dict[float, dict[str, Tensor]] = {}
    batch = batches(2, tokens=tokens)
    model = toy("E/E", group, mtp_weight=0.5, **PLAIN).double()
    for scale in (1.0, 2.0, 0.5):
        model.zero_grad()
        transformed(model, batch[0], grad_scale=scale).step(batch)
        found[scale] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in found[1.0].items():
        assert same_bits(found[2.0][name], gradient * 2) and same_bits(found[0.5][name], gradient * 0.5), name
    # The main loss by itself, then that of the depth.
    main, both = copy.deepcopy(model), copy.deepcopy(model)
    main.mtp_weight, both.mtp_weight = 0.0, 1.0
    for other in (main, both):
        other.zero_grad()
        eager_step(other, batch)
    of_both = dict(both.named_parameters())
    for name, p in main.named_parameters():
        assert p.grad is not None
        of_depth = of_both[name].grad - p.grad
        # The same sums in another order, in fp64.
        torch.testing.assert_close(found[1.0][name], p.grad + 0.5 * of_depth, rtol=1e-12, atol=1e-14)


def test_b89_a_detached_head_learns_from_the_main_loss_alone(group: dist.ProcessGroup) -> None:
    model, without = toy("E/E/E", group, mtp_detach_head=True), toy("E", group)
    overlapped = transformed(model)
    overlapped.step(batches(3))
    eager_step(without, batches(3))
    assert model.head.weight.grad is not None and without.head.weight.grad is not None
    assert same_bits(model.head.weight.grad, without.head.weight.grad)
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.mtp[0].proj.parameters())
    assert not any("head" in str(op_facts.tag(op).fqn) for op in w_ops(chunk_of(overlapped)))


def w_ops(chunk: ChunkGraph) -> list[torch.fx.Node]:
    """The ops of the W nodes of the depths' heads."""
    assert chunk.joint is not None
    ops = {op.name: op for op in chunk.joint.module.graph.nodes}
    return [ops[op] for node in chunk.nodes if node.name.endswith("mtp_post.W") for op in node.ops]


def test_b90_no_depths_in_any_form_are_the_same_plan(group: dist.ProcessGroup) -> None:
    none, zero, absent, one = (toy(pattern, group) for pattern in ("E", "E/", "E", "E/E"))
    del absent.mtp
    absent.mtp = None  # type: ignore[assignment]
    absent._mtp_losses = lambda *_: []  # type: ignore[method-assign]
    found = []
    for model, pattern in ((none, None), (zero, "E/"), (absent, "E")):
        overlapped = transformed(model, pattern=pattern)
        found.append((overlapped.golden(), [loss.item() for loss in overlapped.step(batches(2)).losses]))
    assert found[0] == found[1] == found[2]
    with_one = transformed(one, pattern="E/E")
    assert "MTP0 F" in with_one.golden() and steps_are_right(with_one)
