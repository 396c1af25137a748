"""The part of `fxoverlap.compat` that runs graphs and looks at tensors, modules, errors and groups.

When torch moves one of them, the test that fails names it.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._logging._internal as logs
import torch.distributed as dist
import torch.utils.checkpoint
from test_compat import Loss, export
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import disable_autocast_cache, make_fx

import fxoverlap
from fxoverlap import compat, passes

aten = torch.ops.aten


# --- execution --------------------------------------------------------------------------------------------------


def test_below_autograd_makes_no_graph_and_no_base() -> None:
    """A view would keep its base's storage object alive, and a graph all that it saved."""
    weight = torch.randn(4, 4, requires_grad=True)
    with compat.below_autograd():
        product = weight @ weight
        view = product.t()
        pieces = product.split(2)
    assert not product.requires_grad and product.grad_fn is None
    assert view._base is None and all(piece._base is None for piece in pieces)
    assert (weight @ weight).requires_grad and weight.t()._base is weight


def test_shares_storage_counts_other_holders() -> None:
    tensor = torch.randn(4)
    assert not compat.shares_storage(tensor)
    view = tensor.view(2, 2)
    assert compat.shares_storage(tensor) and compat.shares_storage(view)
    del view
    assert not compat.shares_storage(tensor)
    alias = tensor.detach()
    assert compat.shares_storage(tensor)
    del alias
    another_name = tensor
    assert not compat.shares_storage(another_name), "two names of one tensor are one holder"


def test_shares_storage_sees_what_autograd_saved() -> None:
    result = torch.randn(4, requires_grad=True).exp()
    assert compat.shares_storage(result), "the gradient of exp needs its result"
    assert not compat.shares_storage(torch.randn(4).exp())


def test_boxed_module_empties_its_list_and_lets_arguments_die() -> None:
    graph = fx.Graph()
    graph.set_codegen(compat.BoxedCodeGen())
    first, second = graph.placeholder("first"), graph.placeholder("second")
    total = graph.call_function(torch.add, (first, second))
    graph.output((graph.call_function(torch.neg, (total,)), first))
    module = fx.GraphModule(nn.Module(), graph)
    given = [torch.ones(2), torch.ones(2)]
    negative, handed_on = module.forward(given)
    assert given == [] and negative.tolist() == [-2.0, -2.0] and handed_on.tolist() == [1.0, 1.0]
    assert "args_list.clear()" in module.code
    # Copies and recompiled graphs stay boxed.
    copied = copy.deepcopy(module)
    copied.recompile()
    given = [torch.ones(2), torch.ones(2)]
    copied.forward(given)
    assert given == []


def test_check_of_data_is_in_a_trace() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        compat.check_data((x > 0).all(), "not positive")
        return x

    checked(torch.ones(2))
    with pytest.raises(RuntimeError, match="not positive"):
        checked(torch.zeros(2))
    traced = make_fx(checked)(torch.ones(2))
    with pytest.raises(RuntimeError, match="not positive"):
        traced(torch.zeros(2))


def test_code_of_a_lazy_module_is_made_when_it_is_needed() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.neg, (x,)))
    inner = compat.lazy_module(nn.Module(), graph, "Inner")
    outer_graph, root = fx.Graph(), nn.Module()
    root.add_module("inner", inner)
    outer_graph.output(outer_graph.call_module("inner", (outer_graph.placeholder("x"),)))
    outer = compat.lazy_module(root, outer_graph)
    assert type(inner).__name__ == "Inner" and "_code" not in vars(inner) and "_code" not in vars(outer)
    assert "torch.neg" in inner.code
    next(node for node in graph.nodes if node.op == "call_function").target = torch.exp
    outer.recompile()
    assert "_code" not in vars(outer)
    inner.recompile()
    assert compat.forward_of(inner)(torch.zeros(1)).item() == 1.0
    assert outer(torch.zeros(1)).item() == 1.0 and copy.deepcopy(outer)(torch.zeros(1)).item() == 1.0


def test_boxed_module_without_arguments() -> None:
    graph = fx.Graph()
    graph.set_codegen(compat.BoxedCodeGen())
    graph.output((graph.call_function(torch.ones, (2,)),))
    assert fx.GraphModule(nn.Module(), graph).forward([])[0].tolist() == [1.0, 1.0]


# --- trees, modules, errors, sizes, groups ----------------------------------------------------------------------


def test_trees_have_printable_paths() -> None:
    tree = ((1, {"mask": 2}), [3, None])
    leaves, spec = compat.flatten_with_path(tree)
    assert leaves == [("[0][0]", 1), ("[0][1]['mask']", 2), ("[1][0]", 3), ("[1][1]", None)]
    assert compat.unflatten([leaf for _, leaf in leaves], spec) == tree
    assert spec == compat.flatten_with_path(tree)[1] != compat.flatten_with_path(((1, {"m": 2}), [3, None]))[1]


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_module_hooks_are_seen(kind: str) -> None:
    module = nn.Linear(2, 2)
    assert compat.hooks(module) == compat.hooks_of_all_modules() == ()
    handle = getattr(module, f"register_{kind}")(lambda *args: None)
    assert compat.hooks(module) == (handle.id,) and compat.hooks_of_all_modules() == ()
    handle.remove()
    handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *args: None)
    assert compat.hooks(module) == () and compat.hooks_of_all_modules() == (handle.id,)
    handle.remove()
    assert compat.hooks(module) == compat.hooks_of_all_modules() == ()


def test_tensor_hooks_are_seen() -> None:
    for register in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
        leaf = torch.ones(2, requires_grad=True)
        assert not compat.has_tensor_hooks(leaf)
        handle = register(leaf, lambda each: None)
        assert compat.has_tensor_hooks(leaf)
        handle.remove()
        assert not compat.has_tensor_hooks(leaf)


def test_held_accumulators_are_seen() -> None:
    leaf = nn.Parameter(torch.ones(2))
    assert not compat.accumulator_is_held(leaf)
    node = leaf.expand_as(leaf).grad_fn.next_functions[0][0]
    assert compat.accumulator_is_held(leaf)
    del node
    assert not compat.accumulator_is_held(leaf)


def test_autocast_is_seen_where_it_caches() -> None:
    with compat.autocast_casts() as casts:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            pass
        with torch.autocast("cpu", enabled=False):
            pass
        assert casts.dtypes == set() and not casts.outlive
        with torch.autocast("cpu", torch.bfloat16):
            pass
        assert casts.dtypes == {torch.bfloat16}
    with torch.autocast("cpu", torch.float16), compat.autocast_casts() as casts:
        assert casts.dtypes == {torch.float16} and casts.outlive
    # A tracer has switched the cache off: nothing says so to the user's autocast.
    with compat.autocast_casts() as casts, disable_autocast_cache():
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.autocast("cpu", torch.float16):
            pass
        assert casts.dtypes == set()
        with torch.autocast("cpu", torch.bfloat16):
            pass
        assert casts.dtypes == {torch.bfloat16}


def test_autocast_casts_a_leaf_once_a_block_in_a_trace() -> None:
    def casts_of(leaf: torch.Tensor, body: Callable[[torch.Tensor, torch.Tensor], Any]) -> int:
        """How many casts of the leaf a trace of two products with it has."""
        with compat.autocast_casts() as casts, enable_python_dispatcher():

            def forward(x: torch.Tensor, w: torch.Tensor) -> Any:
                casts.begin([w])
                return body(x, w)

            graph = make_fx(forward, tracing_mode="fake")(torch.ones(2, 2), leaf).graph
        weight = list(graph.find_nodes(op="placeholder"))[1]
        return sum(user.target is torch.ops.aten._to_copy.default for user in weight.users)

    def twice(x: torch.Tensor, w: torch.Tensor, **options: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, **options):
            return (x @ w) @ w

    leaf = torch.ones(2, 2, requires_grad=True)
    assert casts_of(leaf, twice) == 1
    assert casts_of(leaf, functools.partial(twice, cache_enabled=False)) == 2
    assert casts_of(leaf, functools.partial(twice, enabled=False)) == 0
    assert casts_of(leaf, lambda x, w: (twice(x, w), twice(x, w))) == 2  # two blocks
    assert casts_of(leaf, lambda x, w: (x.bfloat16() @ w.bfloat16()) @ w.bfloat16()) == 2
    assert casts_of(leaf.detach(), twice) == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert casts_of(leaf, lambda x, w: (twice(x, w), twice(x, w))) == 1
        assert casts_of(leaf, lambda x, w: (x @ w.bfloat16()) @ w) == 2


def test_default_store_and_names_of_groups(group: dist.ProcessGroup) -> None:
    store = compat.default_store()
    assert not store.check(["fxoverlap/test"])
    store.set("fxoverlap/test", "1")
    assert store.check(["fxoverlap/test"]) and store.get("fxoverlap/test") == b"1"
    assert group.group_name in compat.group_names()


def test_connection_errors_are_told() -> None:
    assert compat.is_connection_error(dist.DistNetworkError("lost"))
    assert compat.is_connection_error(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not compat.is_connection_error(RuntimeError("shapes do not fit"))
    assert not compat.is_connection_error(ValueError("Timed out"))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * len(range(int(x.sum().item()))),
        lambda x: x if x.allclose(x * 2) else -x,
    ],
    ids=["branch", "range", "allclose"],
)
def test_data_dependent_errors_are_told(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(Exception) as caught:
        export(Loss(function), torch.randn(3, requires_grad=True))
    assert compat.is_data_dependent(caught.value), caught.value
    assert re.fullmatch(r" \(test_compat_run\.py:\d+\)", compat.innermost_user_frame(caught.value))


def test_other_errors_are_not_data_dependent() -> None:
    assert not compat.is_data_dependent(ValueError("no"))
    assert compat.innermost_user_frame(ValueError("never raised")) == ""


def test_writes_to_loose_tensors_are_told() -> None:
    loose = torch.zeros(3)
    for write in (lambda x: loose.add_(1.0), lambda x: loose.add_(x.detach())):

        def loss(x: Tensor, write: Callable[[Tensor], Any] = write) -> Tensor:
            write(x)
            return x.sum()

        with pytest.raises(Exception) as caught:
            export(Loss(loss), torch.randn(3, requires_grad=True))
        assert compat.is_hidden_write(caught.value), caught.value
    assert not compat.is_hidden_write(ValueError("no"))


def test_storages_are_told_apart() -> None:
    tensor = torch.ones(4)
    assert compat.storage_id(tensor) == compat.storage_id(tensor[1:]) != compat.storage_id(torch.ones(4))
    sparse = tensor.to_sparse()
    assert compat.storage_id(sparse) == compat.storage_id(sparse) != compat.storage_id(tensor.to_sparse())


def test_symbols_of_sizes() -> None:
    env = compat.new_fake_mode().shape_env
    assert env is not None
    first, second = env.create_unbacked_symint(), env.create_unbacked_symint()
    symbols = compat.free_symbols(2 * first + second)
    assert symbols == compat.free_symbols(first) | compat.free_symbols(second) and len(symbols) == 2
    hints = dict.fromkeys(compat.free_symbols(first), 5)
    assert compat.size_hint(2 * first + second, hints) == 11
    assert (compat.size_hint(7, hints), compat.free_symbols(7)) == (7, set())
    twice = compat.expression(2 * first)
    assert {twice, compat.expression(first + first)} == {twice}
    assert (compat.evaluate(twice, hints), compat.evaluate(compat.expression(7), hints)) == (10, 7)
    assert {compat.symbol(first)} == compat.free_symbols(first)
    assert [compat.symbol(each) for each in (2 * first, 7, torch.ones(()))] == [None] * 3


def test_compiled_module_is_unwrapped() -> None:
    model = nn.Linear(2, 2)
    assert compat.without_compile(torch.compile(model)) is model
    assert compat.without_compile(model) is model


def test_all_to_all_tells_when_its_data_has_come(group: dist.ProcessGroup) -> None:
    arrived = threading.Event()
    sent = torch.arange(6.0).view(3, 2)
    works = torch._C._distributed_c10d._get_work_registry_size
    before = works()
    received = compat.all_to_all_with_arrival(sent, [3], [3], group.group_name, arrived.set)
    assert works() == before + 1
    torch.ops._c10d_functional.wait_tensor(received)
    assert works() == before
    assert arrived.wait(10) and torch.equal(received, sent)


def test_process_group_is_found_by_its_name(group: dist.ProcessGroup) -> None:
    assert compat.process_group(group.group_name) is group


def test_nothing_else_touches_private_torch() -> None:
    """Ops are no private API, and `torch._check` is documented."""
    private = re.compile(r"\btorch(?:\.\w+)*\._[a-z]\w*|from torch(?:\.\w+)*\._\w+")
    allowed = re.compile(r"torch\.ops\.|torch\._check$|torch\._assert_async$")
    found = []
    folders = [Path(fxoverlap.__file__).parent, Path(next(iter(passes.__path__)))]
    for file in sorted({file for folder in folders for file in folder.rglob("*.py")}):
        if file.name != "compat.py":
            hits = [hit for hit in private.findall(file.read_text()) if not allowed.match(hit)]
            found += [f"{file.name}: {hit}" for hit in hits]
    assert found == []


# --- random numbers ------------------------------------------------------------------------------------------------

DRAWS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "mask": (aten.native_dropout.default, (torch.ones(4, 8), 0.5, True), {}),
    "values": (aten.bernoulli.default, (torch.full((32,), 0.5),), {}),
    "like": (aten.randn_like.default, (torch.empty(33),), {}),  # an odd number: half of a pair stays in the generator
    "no tensor": (aten.randperm.default, (32,), {"device": torch.device("cpu"), "pin_memory": False}),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_is_repeated_with_its_state_and_disturbs_no_other(draw: str) -> None:
    op, arguments, options = DRAWS[draw]
    torch.manual_seed(0)
    torch.randn(3)
    before = torch.get_rng_state()
    state, first = compat.DRAW_AND_SNAPSHOT(op, *arguments, **options)
    behind = torch.get_rng_state()
    assert torch.equal(state, before) and not torch.equal(behind, before)
    torch.set_rng_state(before)
    plain = op(*arguments, **options)
    assert torch.equal(torch.get_rng_state(), behind), "a snapshot draws nothing"
    torch.rand(7)
    ahead = torch.get_rng_state()
    again = compat.DRAW_AGAIN(state, op, *arguments, **options)
    assert torch.equal(torch.get_rng_state(), ahead), "the generator is as it was"
    for one, other, third in zip(*([x] if isinstance(x, Tensor) else x for x in (plain, first, again)), strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)


def test_size_of_a_snapshot() -> None:
    state, _ = compat.DRAW_AND_SNAPSHOT(aten.rand_like.default, torch.empty(4))
    assert state.dtype is torch.uint8 and state.shape == (compat.rng_state_bytes(torch.device("cpu")),)


# --- structured logging --------------------------------------------------------------------------------------------


def test_artifacts_are_made_only_where_torch_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def artifact(*handlers: logging.Handler) -> bool:
        monkeypatch.setattr(logs.trace_log, "handlers", list(handlers))
        compat.trace_artifact("fxoverlap_a", lambda: made.append("a") or "some text")
        assert bool(made) == bool(compat.trace_folders())
        return bool(made)

    # As torch begins without TORCH_TRACE, and as it is after its first record.
    assert not artifact(logs.LazyTraceHandler(None))
    assert not artifact()
    assert not artifact(logging.StreamHandler())  # such as pytest's, which it adds to every logger
    written = logs.LazyTraceHandler(str(tmp_path))
    written.setFormatter(logs.TorchLogsFormatter(trace=True))
    assert artifact(written)
    written.close()
    [path] = tmp_path.iterdir()
    text = path.read_text()
    assert '{"artifact": {"name": "fxoverlap_a", "encoding": "string"}' in text and "\n\tsome text\n" in text
    assert '"stack"' not in text.split("fxoverlap_a")[1].split("\n")[0]


# --- imports -------------------------------------------------------------------------------------------------------


def test_dynamo_is_imported_by_captures_alone() -> None:
    """It takes as long as the rest of torch, and commands that capture nothing do without it."""
    program = "import sys, fxoverlap; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
