"""Each private torch API that `fxoverlap.compat` touches does what fxoverlap relies on.

When torch moves one of them, the test that fails names it. Nothing else in the project touches a private torch API.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn

import fxoverlap
from fxoverlap import compat
from fxoverlap.versions import check_torch_version

aten = torch.ops.aten


class Inner(nn.Module):
    """A weight, a bias and a buffer that forward writes."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return torch.tanh(self.linear(x)) * x


class Outer(nn.Module):
    """Returns a scalar loss and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.inner(x)
        return (out - y).square().sum(), out.detach()


def export(module: nn.Module, *args: Tensor) -> fx.GraphModule:
    mode = compat.new_fake_mode()
    return compat.export_joint(module, tuple(compat.fake_like(mode, arg) for arg in args), mode)


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


@pytest.fixture(scope="module")
def joint() -> fx.GraphModule:
    """`Outer`, with the FQN of the submodule on what its forward runs."""
    outer = Outer()
    outer.inner.linear.forward = compat.annotated(outer.inner.linear.forward, "fqn", lambda: "inner.linear")
    outer.inner.forward = compat.annotated(outer.inner.forward, "fqn", lambda: "inner")
    return export(outer, torch.randn(2, 4, requires_grad=True), torch.randn(2, 4))


# --- versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.12.1", "2.14.1", "2.14.0a0+git123"])
def test_supported_versions_pass(version: str) -> None:
    check_torch_version(version)


@pytest.mark.parametrize("version", ["2.5.0", "2.10.1+cu128", "2.15.0.dev", "1.13.1", "3.0", "main"])
def test_b78_other_versions_are_named_with_those_supported(version: str) -> None:
    with pytest.raises(ImportError) as caught:
        check_torch_version(version)
    assert f"found {version}." in str(caught.value) and "torch 2.11 to 2.14" in str(caught.value)
    assert "pip install" in str(caught.value)


def test_b78_import_of_the_package_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it needs anything that such a release does not have."""
    monkeypatch.setattr(torch, "__version__", "2.5")
    monkeypatch.delitem(sys.modules, "fxoverlap.compat")
    monkeypatch.setitem(sys.modules, "torch._functorch._aot_autograd.descriptors", None)
    with pytest.raises(ImportError, match=r"2\.11 to 2\.14, found 2\.5\."):
        importlib.reload(fxoverlap)


# --- fake tensors and tracing -----------------------------------------------------------------------------------


def test_fake_like_keeps_all_and_makes_no_symbol() -> None:
    mode = compat.new_fake_mode()
    real = torch.randn(3, 5, dtype=torch.float64).t().requires_grad_()
    fake = compat.fake_like(mode, real)
    assert isinstance(fake, torch.Tensor) and type(fake) is not torch.Tensor
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (real.shape, real.stride(), real.dtype, real.device)
    assert fake.requires_grad and not any(isinstance(size, torch.SymInt) for size in fake.shape)


def test_fake_mode_takes_real_tensors_and_makes_symbols_of_data() -> None:
    mode = compat.new_fake_mode()
    fake = compat.fake_like(mode, torch.ones(3))
    with mode:
        size = (fake + torch.ones(3)).sum().to(torch.int64).item()
    assert isinstance(size, torch.SymInt) and len(compat.free_symbols(size)) == 1


def test_non_strict_tracing_falls_back_to_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch 2.11 the context does not exist, and a flag does its work."""
    monkeypatch.delattr(torch.compiler, "_non_strict_tracing_context", raising=False)
    assert not torch.compiler.is_compiling()
    with compat.non_strict_tracing():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


class Loss(nn.Module):
    """`function` of the input, summed."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x).sum()


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_is_traced_as_what_eager_computes(p: float) -> None:
    """In bf16 too, where it rounds twice or once."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 8, dtype=dtype, requires_grad=True)
        loss = Loss(lambda x: F.dropout(x, p) * 0.7)
        module = export(loss, x)
        tangent = torch.ones((), dtype=dtype)
        torch.manual_seed(0)
        expected = loss(x)
        (expected_gradient,) = torch.autograd.grad(expected, x)
        torch.manual_seed(0)
        (value,), (gradient,) = module([x.detach()], [tangent])
        assert torch.equal(value, expected) and torch.equal(gradient, expected_gradient)


def test_matmul_is_traced_as_what_eager_computes() -> None:
    """Eager folds a batch of matrices times one matrix into one product; so must the graph."""
    module = export(Loss(lambda x: x @ torch.ones(4, 5)), torch.randn(2, 3, 4, requires_grad=True))
    assert targets(module).count(aten.mm.default) == 2 and aten.bmm.default not in targets(module)


LABELS = torch.tensor([[0, 2, -1, 1]] * 4)
OTHERWISE_DECOMPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.interpolate(x[None], scale_factor=2.3, mode="linear"),
    "trilinear": lambda x: F.interpolate(x[None, None, None], size=(1, 5, 7), mode="trilinear", align_corners=True),
    "multi margin loss": lambda x: F.multi_margin_loss(torch.cat((x, 2 * x)), torch.tensor([0, 2, 3, 1] * 2)),
    "multilabel margin loss": lambda x: F.multilabel_margin_loss(x, LABELS),
    **{
        f"{mode} by {size}": lambda x, mode=mode, more=more: F.interpolate(x[None, None], mode=mode, **more)
        for mode in ("bilinear", "bicubic")
        for size, more in (("factor", {"scale_factor": 1.7}), ("size", {"size": (5, 7), "align_corners": True}))
    },
    "bilinear by overload": lambda x: aten.upsample_bilinear2d.default(x[None, None], [5, 7], False),
    "bicubic by overload": lambda x: aten.upsample_bicubic2d.default(x[None, None], [5, 7], False),
}


@pytest.mark.parametrize("name", OTHERWISE_DECOMPOSED)
def test_ops_with_decompositions_that_round_otherwise_are_traced_whole(name: str) -> None:
    function = OTHERWISE_DECOMPOSED[name]
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = Loss(lambda x: function(x).square())
    module = export(loss, x)
    expected = loss(x)
    (value,), (gradient,) = module([x.detach()], [torch.ones(())])
    assert torch.equal(value, expected) and torch.equal(gradient, torch.autograd.grad(expected, x)[0])


def test_compile_is_ignored_while_tracing_and_not_before_or_after() -> None:
    compiled: list[Any] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    function = torch.compile(lambda x: x.sin().sum(), backend=backend)
    graph = export(Loss(function), torch.randn(3, requires_grad=True))
    assert aten.sin.default in targets(graph) and compiled == []
    function(torch.ones(3))
    assert len(compiled) == 1


def test_composites_are_put_back() -> None:
    before = {op: dict(op.py_kernels) for op in (aten.dropout.default, aten.matmul.default, aten.lstm.input)}
    assert any(before.values()), "torch registers Python decompositions for them"
    with compat.eager_composites():
        assert {op: dict(op.py_kernels) for op in before} != before
    assert {op: dict(op.py_kernels) for op in before} == before


def test_unread_collectives_and_ops_without_results_stay(group: dist.ProcessGroup) -> None:
    before = fx.Node.is_impure

    def loss(x: Tensor) -> Tensor:
        torch.ops._c10d_functional.all_reduce(x.detach(), "sum", group.group_name)
        torch.ops.fxoverlap_tests.say(x.detach())
        return x * 2

    with torch.library._scoped_library("fxoverlap_tests", "FRAGMENT") as library:
        library.define("say(Tensor x) -> ()")
        library.impl("say", lambda x: None, "CompositeExplicitAutograd")
        found = [str(target) for target in targets(export(Loss(loss), torch.randn(3, requires_grad=True)))]
    assert "_c10d_functional.all_reduce.default" in found and "fxoverlap_tests.say.default" in found
    assert fx.Node.is_impure is before


def test_what_a_custom_op_writes_to_is_known() -> None:
    class Counts(Loss):
        def __init__(self) -> None:
            super().__init__(lambda x: x * 2)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            torch.ops.fxoverlap_tests.bump(self.count)
            return super().forward(x)

    with torch.library._scoped_library("fxoverlap_tests", "FRAGMENT") as library:
        library.define("bump(Tensor(a!) x) -> ()")
        library.impl("bump", lambda x: None, "CompositeExplicitAutograd")
        graph = export(Counts(), torch.randn(3, requires_grad=True)).graph
    written = [base for node in graph.nodes for base in compat.written_bases(node)]
    assert [compat.input_descriptor(base) for base in written] == [("buffer", "count")]


def test_collectives_in_place_are_found(group: dist.ProcessGroup) -> None:
    def loss(x: Tensor) -> Tensor:
        dist.all_reduce(x.detach().clone(), group=group)
        return x * 2

    module = export(Loss(loss), torch.randn(3, requires_grad=True))
    assert [name for _, name in compat.in_place_effects(module.graph)] == ["c10d.allreduce_.default"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 4, 3),
        torch.randn(2, 3, 4).mT,
        torch.randn(2, 4, 3, 5),
        torch.randn(2, 3, 5, 4).permute(0, 3, 1, 2),
        torch.randn(2, 4, 5, 3).mT,
        torch.randn(3, 4),
    ],
    ids=lambda x: str(x.stride()),
)
def test_fake_batch_norm_has_the_layout_of_the_real_one(x: Tensor, training: bool) -> None:
    def both(x: Tensor, weight: Tensor, mean: Tensor, var: Tensor) -> list[tuple[int, ...]]:
        out, *saved = aten.native_batch_norm(x, weight, weight, mean, var, training, 0.1, 1e-5)
        back = aten.native_batch_norm_backward(
            torch.ones_like(out), x, weight, mean, var, *saved, training, 1e-5, [True] * 3
        )
        return [out.stride(), *(each.stride() for each in back)]

    ones = [torch.ones(4) for _ in range(3)]
    mode = compat.new_fake_mode()
    fakes = [compat.fake_like(mode, each) for each in (x, *ones)]
    assert both(*fakes) == both(x, *ones)


BACKWARDS: dict[Any, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    aten.softplus_backward.default: lambda g, x: (g, x, 1, 20),
    aten.hardswish_backward.default: lambda g, x: (g, x),
    aten.hardsigmoid_backward.default: lambda g, x: (g, x),
    aten.hardtanh_backward.default: lambda g, x: (g, x, -1, 1),
    aten.logit_backward.default: lambda g, x: (g, x),
    aten.native_dropout_backward.default: lambda g, x: (g, x > 0.5, 2.0),
    aten.elu_backward.default: lambda g, x: (g, 1, 1, 1, False, x),
    aten.binary_cross_entropy_backward.default: lambda g, x: (g, x, x, None, 0),
    aten._log_softmax_backward_data.default: lambda g, x: (g, x, -1, torch.float32),
    aten.native_layer_norm_backward.default: lambda g, x: (g, x, [4], *[x[..., :1]] * 2, *[x[0, 0]] * 2, [True] * 3),
    aten.mse_loss_backward.default: lambda g, x: (g, x, x, 0),
    aten.smooth_l1_loss_backward.default: lambda g, x: (g, x, x, 0, 1.0),
    aten.huber_loss_backward.default: lambda g, x: (g, x, x, 0, 1.0),
}
LAYOUTS = {
    "contiguous": lambda: torch.rand(2, 3, 4),
    "transposed": lambda: torch.rand(2, 4, 3).mT,
    "permuted": lambda: torch.rand(3, 4, 2).permute(2, 0, 1),
    "expanded": lambda: torch.rand(3, 1).expand(2, 3, 4),
    "strided": lambda: torch.rand(2, 3, 8)[..., ::2],
}


def test_every_op_whose_fake_layout_is_corrected_is_tested() -> None:
    assert set(BACKWARDS) == set(compat._LAID_OUT_AS)


@pytest.mark.parametrize("op", BACKWARDS, ids=str)
@pytest.mark.parametrize("of_input", LAYOUTS)
@pytest.mark.parametrize("of_gradient", LAYOUTS)
def test_fake_gradient_has_the_layout_of_the_real_one(op: Any, of_gradient: str, of_input: str) -> None:
    given = LAYOUTS[of_gradient](), LAYOUTS[of_input]()
    mode = compat.new_fake_mode()
    fakes = [compat.fake_like(mode, each) for each in given]
    real, fake = op(*BACKWARDS[op](*given)), op(*BACKWARDS[op](*fakes))
    real, fake = (each[0] if isinstance(each, tuple) else each for each in (real, fake))
    assert fake.stride() == real.stride()


def test_draws_are_put_back() -> None:
    op = aten.bernoulli_.float
    before = dict(op.py_kernels)
    with compat.eager_draws():
        assert op.py_kernels != before
    assert op.py_kernels == before


def test_export_is_functional_and_leaves_the_fake_mode(joint: fx.GraphModule) -> None:
    assert [str(t) for t in targets(joint) if getattr(t, "_schema", None) and t._schema.is_mutable] == []
    assert type(torch.zeros(2)) is torch.Tensor, "a tensor made now is real"
    assert not torch._C._len_torch_dispatch_stack()


def test_partitioner_tag_tells_backward(joint: fx.GraphModule) -> None:
    phases = {node.target: compat.is_backward(node) for node in joint.graph.nodes if node.op == "call_function"}
    assert phases[aten.tanh.default] is False and phases[aten.addmm.default] is False
    assert phases[aten.tanh_backward.default] is True and phases[aten.mm.default] is True


def test_annotation_reaches_backward_and_the_innermost_wins(joint: fx.GraphModule) -> None:
    fqns: dict[Any, set] = {}
    for node in joint.graph.nodes:
        if node.op == "call_function" and not compat.is_gradient_accumulation(node):
            fqns.setdefault((node.target, compat.is_backward(node)), set()).add(compat.annotation(node, "fqn"))
    assert fqns[aten.addmm.default, False] == {"inner.linear"} == fqns[aten.mm.default, True]
    assert fqns[aten.tanh.default, False] == {"inner"} == fqns[aten.tanh_backward.default, True]
    assert fqns[aten.sub.Tensor, False] == {None}


def test_sum_of_gradients_is_told_from_other_additions(joint: fx.GraphModule) -> None:
    """x is read twice, so its gradient is a sum; the addition to the counter is none."""
    added = [node for node in joint.graph.nodes if node.target is aten.add.Tensor]
    assert [compat.is_gradient_accumulation(node) for node in added] == [compat.is_backward(node) for node in added]
    assert sum(map(compat.is_gradient_accumulation, added)) == 1


def test_descriptors_name_inputs_and_outputs(joint: fx.GraphModule) -> None:
    inputs = {compat.input_descriptor(node) for node in joint.graph.find_nodes(op="placeholder")}
    weight, bias, count = ("param", "inner.linear.weight"), ("param", "inner.linear.bias"), ("buffer", "inner.count")
    assert inputs == {weight, bias, count, ("input", 0), ("input", 1), ("tangent", 0)}
    results = joint.graph.output_node().args[0]
    # Inputs that need no gradient have a place among the outputs too.
    outputs = [found for found, node in zip(compat.output_descriptors(joint.graph), results, strict=True) if node]
    gradients = [("grad", weight), ("grad", bias), ("grad", ("input", 0))]
    assert sorted(outputs) == sorted([("mutation", count), ("output", 0), ("output", 1), *gradients])


class Writes(nn.Module):
    """Writes to its buffer what needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        self.last.add_(self.linear(x).sum(0))
        return (self.last.square().sum(),)


def test_descriptors_name_what_a_gradient_was_written_to() -> None:
    graph = export(Writes(), torch.randn(2, 4)).graph
    found = [compat.input_descriptor(node) for node in graph.find_nodes(op="placeholder")]
    assert ("tangent of", ("buffer", "last")) in found


def test_rename_makes_unique_identifiers() -> None:
    graph = fx.Graph()
    first, second = graph.placeholder("a"), graph.placeholder("b")
    compat.rename(first, "param_layers.0.w[1]")
    compat.rename(second, "param_layers.0.w[1]")
    assert first.name == "param_layers_0_w_1" != second.name
    assert second.name.isidentifier()
    graph.output((first, second))
    fx.GraphModule(nn.Module(), graph)
