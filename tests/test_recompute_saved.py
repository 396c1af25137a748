"""What a replayed region keeps from the forward: what cannot or need not be made again, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from expecttest import assert_expected_inline
from odd import Odd, moe
from replays import chunk_of, faults, launches, ops_of, replay_nodes, saved
from toys import RawModel, batches, toy, train_both

import fxoverlap as fxo
from fxoverlap import compat
from fxoverlap.ir import ChunkGraph, JointGraph, Phase, Role
from fxoverlap.passes import op_facts
from fxoverlap.passes.sizes import Sizes
from fxoverlap.pipeline import default_passes

pytestmark = pytest.mark.usefixtures("shared_captures")

Recompute = fxo.Recompute
aten = torch.ops.aten


def chunk(recompute: fxo.Recompute, group: dist.ProcessGroup, pattern: str, **changes: Any) -> ChunkGraph:
    return chunk_of(toy(pattern, group, **changes), batches(1)[0], recompute=recompute)


def meaning(chunk: ChunkGraph) -> list[str]:
    """What F saves, as `layer slot op`; results of the model's own ops by the op that makes them."""
    by_name = ops_of(chunk)
    found = []
    for value, node in saved(chunk).items():
        op = by_name[value]
        source = op.args[0] if op_facts.schema(op) is None and not op_facts.is_random(op) else op
        found.append(f"{node.name.removesuffix('.F')}: {getattr(source, 'target', source)}")
    return sorted(found)


def test_a_plain_segment_saves_its_input_and_the_sizes_of_its_exchanges(group: dist.ProcessGroup) -> None:
    """Of a layer: its output, which is the next one's input; the counts, the sizes that are made of them, and the
    number of rows. Of the head, which is in no segment, what its backward needs."""
    assert_expected_inline(
        "\n".join(meaning(chunk(Recompute("uniform"), group, "[*E][*E]"))),
        """\
L0.permute: _c10d_functional.wait_tensor.default
L0.permute: aten._local_scalar_dense.default
L0.permute: aten.sum.dim_IntList
L0.permute: aten.sum.dim_IntList
L0.post_combine: aten.add.Tensor
L1.permute: _c10d_functional.wait_tensor.default
L1.permute: aten._local_scalar_dense.default
L1.permute: aten.sum.dim_IntList
L1.permute: aten.sum.dim_IntList
L1.post_combine: aten.add.Tensor
post_process: aten._log_softmax.default
post_process: aten.clamp.default
post_process: aten.mul.Tensor
post_process: aten.mul.Tensor
post_process: aten.nll_loss_forward.default
post_process: aten.rsqrt.default
pre_process: aten.embedding.default""",
    )


def test_selective_norms_leave_nothing_of_theirs(group: dist.ProcessGroup) -> None:
    """What a norm multiplies and its result, which projections, router and experts read, in F and in W."""
    norms = meaning(chunk(Recompute("selective", modules=("layers.*.norm",)), group, "[*E]"))
    gone = meaning(chunk_of(toy("[*E]", group), batches(1)[0]))
    for each in norms:
        gone.remove(each)
    norm = ["L0.pre_dispatch: aten.mul.Tensor"] * 2 + ["L0.pre_dispatch: aten.rsqrt.default"]
    assert gone == sorted(norm * 2)


def test_dropout_adds_the_state_of_the_generator_and_nothing_else(group: dist.ProcessGroup) -> None:
    plain, with_draws = (chunk(Recompute("uniform"), group, "[*E]", dropout=dropout) for dropout in (0.0, 0.1))
    added = meaning(with_draws)
    for each in meaning(plain):
        added.remove(each)
    assert added == ["L0.post_combine: run_and_save_rng_state", "L0.pre_dispatch: run_and_save_rng_state"]
    values = [ops_of(with_draws)[value].meta["val"] for value in saved(with_draws)]
    states = [value for value in values if isinstance(value, torch.Tensor) and value.dtype is torch.uint8]
    assert [len(each) for each in states] == [compat.rng_state_bytes(torch.device("cpu"))] * 2


class Act(torch.nn.Module):
    """`f(linear(x), x, ...)`."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        self.linear, self.f = torch.nn.Linear(16, 16), f

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        return self.f(self.linear(x), x, *more)


def gated(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return y + torch.cat((a * b, b), -1)


def parts(y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = y.tanh().chunk(2, -1)
    return torch.cat((a * b, a), -1), b


THERE: dict[str, tuple[Any, Any]] = {
    "output": (lambda y, x: y.tanh(), lambda y, x: x + 1),
    "parts of the input": (gated, lambda y, x: x + 1),
    "parts of what is read outside": (parts, lambda y, x, b: x + torch.cat((b, b), -1)),
}


@pytest.mark.parametrize("case", THERE)
def test_what_is_there_is_not_made_again(case: str) -> None:
    """The backward of the first layer needs this; nothing reads it that saves it."""
    first, second = map(Act, THERE[case])
    model = Odd(lambda m, x: m.layers[1](*y) if type(y := m.layers[0](x)) is tuple else m.layers[1](y), first, second)
    assert replay_nodes(chunk_of(model, batches(1)[0], recompute=Recompute("uniform"))) == []


@pytest.mark.parametrize(
    ("keep", "roles"), [("dispatch", {Role.DISPATCH}), ("combine", {Role.COMBINE}), ("experts", set())]
)
def test_keep_saves_what_an_exchange_brought(group: dist.ProcessGroup, keep: str, roles: set[Role]) -> None:
    made = chunk(Recompute("uniform", keep=(keep,)), group, "[*E]", dropout=0.0)
    assert made.joint is not None
    waits = {wait: each.role for each in made.joint.exchanges if each.phase is Phase.F for wait in each.waits}
    assert {waits[value] for value in saved(made) if value in waits} - {Role.COUNTS} <= roles
    if keep == "experts":
        # What the experts made is what the combine sends.
        combine = next(e for e in made.joint.exchanges if e.phase is Phase.F and e.role is Role.COMBINE)
        assert ops_of(made)[combine.launches[0]].args[0].name in saved(made) or launches(made)["R", "combine"] == 0


WARNED: list[tuple[str, fxo.Recompute, tuple[str, ...]]] = [
    ("toy", Recompute("uniform", keep=("dispatch", "combine")), ()),
    ("toy", Recompute("uniform", keep=("experts",)), ()),  # it is sent again
    ("toy", Recompute("uniform", keep=("experts", "combine")), ("experts",)),
    ("raw", Recompute("uniform", keep=("combine", "dispatch")), ("combine",)),  # rows that are only added up
    # What a dispatch brought is read by weight gradients, as it is without recompute.
    ("raw", Recompute("selective", modules=("layers.*.norm",), keep=("dispatch", "combine")), ("dispatch", "combine")),
]


@pytest.mark.parametrize(("model", "asked", "idle"), WARNED)
def test_slots_that_keep_nothing_are_reported(
    group: dist.ProcessGroup, model: str, asked: fxo.Recompute, idle: tuple[str, ...]
) -> None:
    made = RawModel(group) if model == "raw" else toy("*E", group)
    config = fxo.OverlapConfig(recompute=asked, schedule="sequential")
    found = [
        each for each in fxo.transform(made, config, example_inputs=batches(1)[0]).report().warnings if "keep" in each
    ]
    assert [each.split(", which")[0] for each in found] == [f"Recompute.keep names {', '.join(idle)}"] * bool(idle)


# --- waits and reads of the host -----------------------------------------------------------------------------------


def pretend_device(joint: JointGraph, config: fxo.OverlapConfig) -> JointGraph:
    """A pass: what is cast was on another device than the CPU."""
    for op in op_facts.ops(joint.module.graph):
        if op.target is torch.ops.aten._to_copy.default:
            [source] = op.all_input_nodes
            source.meta["val"] = source.meta["val"].new_empty(source.meta["val"].shape, device="meta")
    return joint


pretend_device.stage = "joint"  # type: ignore[attr-defined]


def test_what_the_host_has_read_is_kept() -> None:
    """Else each replay would make the host wait for the device."""
    model = Odd(lambda m, x: m.layers[0](x), Act(lambda y, x: y * y.detach().sum(-1, True).double().cos().float()))

    def copies(passes: list[Any]) -> list[Phase]:
        made = chunk_of(model, batches(1)[0], recompute=Recompute("uniform"), passes=passes)
        by_name, to_host = ops_of(made), torch.ops.aten._to_copy.default
        return [node.phase for node in made.nodes for op in node.ops if by_name[op].target is to_host]

    assert Phase.R in copies(default_passes())
    assert Phase.R not in copies([pretend_device, *default_passes()])


class Inner(torch.nn.Module):
    """Waits for what was launched outside."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.eye(16))

    def forward(self, launched: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.ops._c10d_functional.wait_tensor(launched) @ self.w)


class Outer(torch.nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner, self.group = Inner(), group.group_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            launched = torch.ops._c10d_functional.all_to_all_single(x.flatten(0, 1), [8], [8], self.group)
        back = funcol.all_to_all_single_autograd(self.inner(launched), [8], [8], self.group)
        return x + back.view_as(x)


def test_a_wait_for_what_was_launched_outside_a_region_is_kept(group: dist.ProcessGroup) -> None:
    config = {"recompute": Recompute("selective", modules=("inner",)), "schedule": "megatron"}
    model = Odd(lambda m, x: m.layers[1](m.layers[0](x)), Outer(group), moe(group))
    assert faults(chunk_of(model, batches(1)[0], **config)) == []
    assert train_both(model, lambda step: batches(2, seed=step), fxo.OverlapConfig(**config), steps=1) == []


# --- draws ---------------------------------------------------------------------------------------------------------


DRAWS = {
    "dropout": lambda y: F.dropout(y, 0.3),
    "transposed": lambda y: F.dropout(y.transpose(1, 2), 0.3).transpose(1, 2),
    "native": lambda y: torch.native_dropout(y, 0.3, True)[0],
    "feature": lambda y: F.dropout1d(y, 0.3),
    "in place": lambda y: y * torch.empty_like(y).bernoulli_(0.4),
    "rand_like": lambda y: y * torch.rand_like(y),
    "randint_like": lambda y: y * torch.randint_like(y, 5),
    "new": lambda y: y * torch.bernoulli(y.new_full(y.shape, 0.3)),
    "normal": lambda y: y * torch.zeros_like(y).normal_(),
}


class Drawn(torch.nn.Module):
    def __init__(self, group: dist.ProcessGroup, draw: Any) -> None:
        super().__init__()
        self.moe, self.draw = RawModel(group, 1).layers[0], draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.draw(self.moe(x))


@pytest.mark.parametrize("draw", DRAWS)
def test_no_exchange_is_repeated_for_the_shape_of_a_mask(group: dist.ProcessGroup, draw: str) -> None:
    model = RawModel(group, 1)
    model.layers[0] = Drawn(group, DRAWS[draw])
    made = chunk_of(model, batches(1)[0], recompute=Recompute("uniform"))
    assert launches(made)["R", "combine"] == 0 and launches(made)["R", "dispatch"] == 1


def test_a_draw_counts_the_operations_of_the_op_inside() -> None:
    """Attention that drops something is one op, with a formula, on a device that has a kernel for it."""
    graph, op = torch.fx.Graph(), torch.ops.aten._scaled_dot_product_flash_attention.default
    state, *inputs = map(graph.placeholder, ("state", "q", "k", "v"))
    calls = [(op, (*inputs, 0.3)), (compat.DRAW_AND_SNAPSHOT, (op, *inputs, 0.3))]
    calls += [
        (compat.DRAW_AGAIN, (state, op, *inputs, 0.3)),
        (compat.DRAW_AGAIN, (state, aten.bernoulli.p, inputs[0], 0.3)),
    ]
    made = [graph.call_function(*call) for call in calls]
    for each in (*inputs, *made):
        each.meta["val"] = torch.empty(1, 2, 8, 4, device="meta")
    made[1].meta["val"] = (torch.empty(16, dtype=torch.uint8), made[1].meta["val"])
    sizes = Sizes(JointGraph(torch.fx.GraphModule(torch.nn.Module(), graph), (), "", (), (), ()))
    assert [sizes.flops(each) for each in made] == [2 * 2 * 2 * 8 * 8 * 4] * 3 + [0]
