"""Every private torch API that fxoverlap touches; no other module imports one.

Each section names the versions on which it was checked. `tests/test_compat.py` fails when one of them moves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._logging._internal
import torch._prims.rng_prims
import torch._prims_common
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines functional collectives under all their names
import torch.utils.checkpoint
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.fx.graph import CodeGen
from torch.fx.traceback import annotate, annotate_fn, preserve_node_meta
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# --- joint export (checked on 2.11.0, 2.13.0, 2.14.1) ---------------------------------------------------------


_BATCH_NORMS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training",
        "native_batch_norm_backward",
    )
)


_LAID_OUT_AS: dict[Any, tuple[int, ...]] = {
    torch.ops.aten.softplus_backward.default: (0, 1),
    torch.ops.aten.hardswish_backward.default: (0, 1),
    torch.ops.aten.hardsigmoid_backward.default: (0, 1),
    torch.ops.aten.hardtanh_backward.default: (0, 1),
    torch.ops.aten.logit_backward.default: (0, 1),
    torch.ops.aten.native_dropout_backward.default: (0, 1),
    torch.ops.aten.elu_backward.default: (0, 5),
    torch.ops.aten.binary_cross_entropy_backward.default: (1,),
    torch.ops.aten._log_softmax_backward_data.default: (),
    torch.ops.aten.native_layer_norm_backward.default: (),
    torch.ops.aten.mse_loss_backward.default: (),
    torch.ops.aten.smooth_l1_loss_backward.default: (),
    torch.ops.aten.huber_loss_backward.default: (),
}
"""Ops whose (first) result has the layout of an elementwise op of these arguments, of none: is contiguous."""


def new_fake_mode() -> FakeTensorMode:
    """A fake mode in which shapes are static and only data-dependent sizes become symbols.

    Some results of torch's fake ops do not have the layout of the real ones, where arguments are transposed. Ops that
    ask for the layout, such as reshape and contiguous, would then be traced otherwise than eager runs them, so the mode
    gives these results the real layout. Batch norm and its backward have the one that their input suggests, contiguous
    or channels last; for the others see `_LAID_OUT_AS`.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    dispatch: Any = mode.dispatch

    def in_eagers_layout(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = dispatch(func, types, args, kwargs)
        if func in _LAID_OUT_AS:
            return _laid_out(result, [args[i] for i in _LAID_OUT_AS[func]])
        if func not in _BATCH_NORMS or result[0] is None:
            return result
        source = args[1] if func is torch.ops.aten.native_batch_norm_backward.default else args[0]
        layout = torch._prims_common.suggest_memory_format(source)
        return (result[0].contiguous(memory_format=layout), *result[1:])

    # On the instance: higher-order ops look rules up by the exact type of a mode.
    mode.dispatch = in_eagers_layout  # type: ignore[method-assign]
    return mode


def _laid_out(result: Any, operands: list[torch.Tensor]) -> Any:
    """The first of an op's results laid out as an elementwise op of `operands`, or contiguous if there are none."""
    if isinstance(result, tuple):
        return (None if result[0] is None else _laid_out(result[0], operands), *result[1:])
    if any(isinstance(size, torch.SymInt) for x in (result, *operands) for size in (*x.shape, *x.stride())):
        return result
    if not operands:
        return result.contiguous()
    strides = torch._prims_common.compute_elementwise_output_strides(*operands)
    return result.new_empty_strided(result.shape, strides)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a fake tensor of `mode`: same static shape, strides, dtype, device and requires_grad."""
    return mode.from_tensor(tensor, static_shapes=True)


@contextlib.contextmanager
def non_strict_tracing() -> Iterator[None]:
    """Tell torch that it is traced without Dynamo. Where torch has no such context, `is_compiling()` is true inside."""
    compiler: Any = torch.compiler
    if hasattr(compiler, "_non_strict_tracing_context"):
        with compiler._non_strict_tracing_context():
            yield
        return
    previous = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = previous


_COMPOSITES = (
    *("dropout.default", "matmul.default", "lstm.input", "lstm.data", "gru.input", "gru.data"),
    *("upsample_linear1d.vec", "upsample_trilinear3d.vec"),
    *(f"upsample_{kind}2d.{overload}" for kind in ("bilinear", "bicubic") for overload in ("default", "vec")),
    *("multi_margin_loss.default", "multilabel_margin_loss_forward.default"),
)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Eager's dropout on a CPU, without its question whether there are rows, which a symbol could not answer."""
    if not train or p == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype)
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


@contextlib.contextmanager
def eager_composites() -> Iterator[None]:
    """Trace what eager computes where torch registers a Python decomposition that computes otherwise.

    On a CPU, eager's dropout multiplies by a mask that was divided by 1 - p; the decomposition multiplies by the mask,
    then by 1 / (1 - p), which rounds differently. Those of interpolations and of margin losses sum in another order,
    and that of multilabel_margin_loss gives another loss where a list of labels ends before its last place.
    """
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    own = {"dropout.default": _dropout}
    removed = []
    for name in _COMPOSITES:
        packet, overload = name.split(".")
        op: Any = getattr(getattr(torch.ops.aten, packet), overload)
        removed.append((op, {key: op.py_kernels.pop(key) for key in keys if key in op.py_kernels}))
        if name in own:
            op.py_kernels.update(dict.fromkeys(keys, own[name]))
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in removed:
            for key in keys:
                op.py_kernels.pop(key, None)
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


@contextlib.contextmanager
def unread_effects_kept() -> Iterator[None]:
    """Keep unread collectives, and custom ops without results, from dead-code elimination: other ranks take part."""
    node_class: Any = fx.Node
    is_impure = node_class.is_impure

    def keeps(node: fx.Node, *args: Any, **kwargs: Any) -> bool:
        target: Any = node.target
        acts = is_overload(target) and (not target._schema.returns or target.namespace == "_c10d_functional")
        return acts or is_impure(node, *args, **kwargs)

    node_class.is_impure = keeps
    try:
        yield
    finally:
        node_class.is_impure = is_impure


def in_place_effects(graph: fx.Graph) -> list[tuple[fx.Node, str]]:
    """The ops that torch orders by tokens and the collectives that are not functional: node, and name of the op."""
    found = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        found.append((node, str(node.args[1])))
    found += [(node, str(node.target)) for node in graph.nodes if str(node.target).startswith("c10d.")]
    return found


@contextlib.contextmanager
def compile_ignored() -> Iterator[None]:
    """Let functions and modules that `torch.compile` wrapped run as they are, so that tracing sees through them."""
    import torch._dynamo

    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def eager_draws() -> Iterator[None]:
    """Trace `x.bernoulli_(p)` as `ops.draws` has it where x is not contiguous: torch's functional op draws otherwise.

    Draws from a generator of the user's own stay as they are.
    """
    op = torch.ops.aten.bernoulli_.float
    key = torch._C.DispatchKey.Autograd

    def bernoulli_(x: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
        if generator is None and not x.is_contiguous():
            return x.copy_(torch.ops.fxoverlap.bernoulli_like(x, p))
        return op._op_dk(torch._C.DispatchKey.AutogradCPU, x, p, generator=generator)

    op.py_kernels[key] = bernoulli_
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        del op.py_kernels[key]
        op._dispatch_cache.clear()


def export_joint(module: nn.Module, args: tuple[Any, ...], mode: FakeTensorMode) -> fx.GraphModule:
    """The joint forward/backward ATen graph of `module(*args)`, functional, with descriptors on its ends.

    `args` are fake tensors of `mode`. The fake mode is left again before this returns, so that the graph can be run
    on real tensors.
    """
    # These bring Dynamo, which takes as long to import as the rest of torch, and only captures need it.
    import torch._inductor.config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(preserve_node_meta())
        stack.enter_context(non_strict_tracing())
        stack.enter_context(eager_composites())
        stack.enter_context(unread_effects_kept())
        stack.enter_context(compile_ignored())
        stack.enter_context(eager_draws())
        # Else dead-code elimination takes draws for pure, and drops those that nothing reads.
        stack.enter_context(torch._inductor.config.patch(fallback_random=True))
        return aot_export_joint_with_descriptors(stack, module, args).graph_module


class AutocastCasts:
    """Casts that autocast makes of leaves while tracing, each once a block as in eager.

    Eager keeps the first cast of a leaf to the end of the outermost block, so that gradients of several uses are summed
    in the low precision. A tracer switches that cache off, and has leaves that do not look like leaves.

    Attributes:
        dtypes: those of blocks with a cache.
        outlive: whether what is cast outlives the trace, as a block around it is entered already.
    """

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()
        self.outlive = torch.autocast_increment_nesting() > 1
        torch.autocast_decrement_nesting()
        # Of each open block whether its autocast is on, and whether it has a cache.
        self._blocks = [(torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled())]
        self._leaves: set[int] = set()
        self._casts: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self._note()

    def begin(self, leaves: Iterable[torch.Tensor]) -> None:
        """A forward begins, in which these are the leaves."""
        self._leaves = {id(leaf) for leaf in leaves}
        self._casts.clear()

    def enter(self, is_on: bool, has_cache: bool) -> None:
        """A block is entered."""
        self._blocks.append((is_on, has_cache))
        self._note()

    def leave(self) -> None:
        """The last block that was entered is left."""
        self._blocks.pop()
        if len(self._blocks) == 1 and not self.outlive:
            self._casts.clear()

    def default(self) -> bool:
        """Whether a block has a cache if nothing is said."""
        return self._blocks[-1][1]

    def to(self, x: torch.Tensor, dtype: torch.dtype, *options: Any, **more: Any) -> torch.Tensor:
        """`aten.to.dtype`."""
        op = torch.ops.aten.to.dtype
        # Autocast takes itself out while it casts; a cast that the model writes has it in.
        by_autocast = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutocastCPU)
        is_leaf = id(x) in self._leaves and x.requires_grad and x.dtype is torch.float32 and torch.is_grad_enabled()
        if not (by_autocast and is_leaf and all(self._blocks[-1]) and dtype is torch.get_autocast_dtype("cpu")):
            return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, x, dtype, *options, **more)
        if (id(x), dtype) not in self._casts:
            self._casts[id(x), dtype] = x, torch.ops.aten._to_copy.default(x, dtype=dtype)
        return self._casts[id(x), dtype][1]

    def _note(self) -> None:
        if all(self._blocks[-1]):
            self.dtypes.add(torch.get_autocast_dtype("cpu"))


@contextlib.contextmanager
def autocast_casts() -> Iterator[AutocastCasts]:
    """Have autocast, ambient or inside the model, cast as `AutocastCasts` says. For a block that traces.

    Checked on torch 2.11.0, 2.13.0 and 2.14.1.
    """
    casts = AutocastCasts()
    make, enter, leave = torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__

    def made(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        make(self, device_type, dtype, enabled, cache_enabled)
        self._has_cache = casts.default() if cache_enabled is None else cache_enabled  # type: ignore[attr-defined]

    def entered(self: torch.autocast) -> Any:
        result = enter(self)
        casts.enter(torch.is_autocast_enabled("cpu"), getattr(self, "_has_cache", self._cache_enabled))
        return result

    def left(self: torch.autocast, *error: Any) -> Any:
        casts.leave()
        return leave(self, *error)

    op, key = torch.ops.aten.to.dtype, torch._C.DispatchKey.CompositeImplicitAutograd
    op.py_kernels[key] = casts.to
    op._dispatch_cache.clear()
    try:
        with mock.patch.multiple(torch.autocast, __init__=made, __enter__=entered, __exit__=left):
            yield casts
    finally:
        del op.py_kernels[key]
        op._dispatch_cache.clear()


def annotated(forward: Callable[..., Any], key: str, value: Callable[[], str]) -> Callable[..., Any]:
    """`forward` such that every node traced in a call carries `{key: value()}` (the innermost value wins)."""

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return annotate_fn({key: value()})(forward)(*args, **kwargs)

    return wrapper


def annotation(node: fx.Node, key: str) -> str | None:
    """What `annotated` left on a traced node, forward or backward."""
    return (node.meta.get("custom") or {}).get(key)


def is_backward(node: fx.Node) -> bool:
    """Whether the tracer made this node while it ran the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def is_gradient_accumulation(node: fx.Node) -> bool:
    """Whether autograd made this add to sum several gradients of one tensor."""
    return bool(node.meta.get("is_gradient_acc"))


def input_descriptor(node: fx.Node) -> tuple[str, Any]:
    """What a joint graph's placeholder is.

    ("param" | "buffer", name), ("input", index), ("tangent", index), ("tangent of", input descriptor) for the gradient
    of what forward wrote to an input, or "other".
    """
    return _input(node.meta["desc"])


def output_descriptors(graph: fx.Graph) -> list[tuple[str, Any]]:
    """What each output of a joint graph is: ("output", index), ("grad" | "mutation", input descriptor) or "other"."""
    return [_output(desc) for desc in graph.output_node().meta["desc"]]


def _input(desc: Any) -> tuple[str, Any]:
    if isinstance(desc, ParamAOTInput):
        return "param", desc.target
    if isinstance(desc, BufferAOTInput):
        return "buffer", desc.target
    if isinstance(desc, PlainAOTInput):
        return "input", desc.idx
    if isinstance(desc, TangentAOTInput) and isinstance(desc.output, PlainAOTOutput):
        return "tangent", desc.output.idx
    if isinstance(desc, TangentAOTInput) and isinstance(desc.output, InputMutationAOTOutput):
        return "tangent of", _input(desc.output.mutated_input)
    return "other", str(desc)


def _output(desc: Any) -> tuple[str, Any]:
    if isinstance(desc, PlainAOTOutput):
        return "output", desc.idx
    if isinstance(desc, GradAOTOutput):
        return "grad", _input(desc.grad_of)
    if isinstance(desc, InputMutationAOTOutput):
        return "mutation", _input(desc.mutated_input)
    return "other", str(desc)


def rename(node: fx.Node, name: str) -> None:
    """Give a node another name, made into an identifier that is unique in its graph."""
    node._rename(re.sub(r"\W+", "_", name).strip("_"))


# --- activation checkpointing (checked on 2.11.0, 2.13.0, 2.14.1) ---------------------------------------------------


Checkpoint = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], bool, "Callable[[], Any] | None"], Any]
"""(function, args, kwargs, whether reentrant, the context_fn that was given) -> what the function returns."""

_checkpoint: Any = inspect.unwrap(torch.utils.checkpoint.checkpoint)


@contextlib.contextmanager
def checkpoint_replaced(replacement: Checkpoint, refuse: Callable[..., Any]) -> Iterator[None]:
    """Call `replacement` where `torch.utils.checkpoint.checkpoint` is called, however it was imported.

    What begins a region below that function, as torch's composable API does, calls `refuse` instead.
    """
    module: Any = torch.utils.checkpoint
    composable = sys.modules.get("torch.distributed._composable.checkpoint_activation")
    parameters = inspect.signature(_checkpoint).parameters.values()
    options = {"preserve_rng_state"} | {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}

    def begin(
        function: Any, args: Any, kwargs: Any, *, use_reentrant: Any = None, context_fn: Any = None, **_: Any
    ) -> Any:
        given = None if context_fn is module.noop_context_fn else context_fn
        return replacement(function, args, kwargs, use_reentrant is None or use_reentrant, given)

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = {name: kwargs.pop(name) for name in options & kwargs.keys()}
        return begin(function, args, kwargs, **chosen)

    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return replacement(function, args, {}, True, None)

    with contextlib.ExitStack() as stack:

        def put(target: Any, name: str, value: Any) -> None:
            if target is _checkpoint or hasattr(target, name):
                stack.enter_context(mock.patch.object(target, name, value, create=True))

        if hasattr(module, "_checkpoint_impl"):
            put(module, "_checkpoint_impl", begin)
        else:
            # Where the decorator that keeps Dynamo out of `checkpoint` has what it calls.
            put(_checkpoint, "__dynamo_disable", call)
        put(module.CheckpointFunction, "apply", apply)
        for owner in (module, composable):
            # The second name is that of torch 2.14.
            put(owner, "_checkpoint_without_reentrant_generator", refuse)
            put(owner, "_checkpoint_without_reentrant_generator_impl", refuse)
        yield


def policy_of(contexts: Any) -> Callable[..., Any] | None:
    """The policy of what `create_selective_checkpoint_contexts` made, None for anything else."""
    module: Any = torch.utils.checkpoint
    kinds = [module._CachingTorchDispatchMode, module._CachedTorchDispatchMode]
    return contexts[0].policy_fn if [type(each) for each in contexts] == kinds else None


class PolicyNoted(TorchDispatchMode):
    """Ask a selective checkpoint's policy about each op, as torch does, and note which results it saves (`is_kept`)."""

    supports_higher_order_operators = True

    def __init__(self, policy: Callable[..., Any]) -> None:
        super().__init__()
        self.policy = policy

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's own mode has it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in torch.utils.checkpoint.SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        tracer: Any = get_proxy_mode()
        nodes = tracer.tracer.graph.nodes if tracer is not None else ()
        before = len(nodes)
        result = func(*args, **kwargs)
        context: Any = torch.utils.checkpoint.SelectiveCheckpointContext(is_recompute=False)
        context.op_output = result  # which torch 2.11 has not
        answer = self.policy(context, func, *args, **kwargs)
        saves = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE, torch.utils.checkpoint.CheckpointPolicy.PREFER_SAVE
        if answer is True or answer in saves:
            for node in itertools.islice(reversed(nodes), len(nodes) - before):
                node.meta["custom"] = {**node.meta.get("custom", {}), "keep": "policy"}
        return result


def is_kept(node: fx.Node) -> bool:
    """Whether a policy saves what this node of a forward makes."""
    return annotation(node, "keep") is not None


def annotating(key: str, value: str) -> contextlib.AbstractContextManager[Any]:
    """Every node that is traced in the block carries `{key: value}`."""
    return annotate({key: value})


# --- execution (checked on 2.11.0, 2.13.0, 2.14.1) ---------------------------------------------------------


_K = torch._C.DispatchKey
_ABOVE_KERNELS = (
    torch._C.DispatchKeySet(_K.ADInplaceOrView)
    | torch._C.DispatchKeySet(_K.AutogradOther)
    | torch._C.DispatchKeySet(_K.AutogradCPU)
    | torch._C.DispatchKeySet(_K.AutogradCUDA)
)


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Dispatch below autograd: no graph, and no view keeps its base alive.

    `torch._C._AutoDispatchBelowAutograd` still lets views record their base, which holds a storage longer than needed.
    """
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS)


DispatchMode = TorchDispatchMode
"""A mode that is told of every op of its thread, those below autograd too; torch documents it in a private module."""


# --- trees (checked on 2.11.0, 2.13.0, 2.14.1) ---------------------------------------------------------


def flatten_with_path(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """The leaves of a nested structure with printable paths such as `[0]['mask']`, and its structure."""
    with_paths, spec = pytree.tree_flatten_with_path(tree)
    return [(pytree.keystr(path), leaf) for path, leaf in with_paths], spec


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """The nested structure that `flatten_with_path` took apart, with other leaves."""
    return pytree.tree_unflatten(leaves, spec)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a nested structure."""
    return pytree.tree_leaves(tree)


# --- modules and errors (checked on 2.11.0, 2.13.0, 2.14.1) ---------------------------------------------------------


HOOK_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks(module: nn.Module) -> tuple[int, ...]:
    """The numbers of the forward and backward hooks that are registered on this module; none is used twice."""
    return tuple(number for kind in HOOK_KINDS for number in module.__dict__.get(kind) or ())


def hooks_of_all_modules() -> tuple[int, ...]:
    """The numbers of the forward and backward hooks that are registered for every module."""
    return tuple(number for kind in HOOK_KINDS for number in getattr(nn.modules.module, f"_global{kind}"))


def is_data_dependent(error: BaseException) -> bool:
    """Whether tracing failed because Python asked for the contents of a tensor."""
    kinds = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
    return isinstance(error, kinds)


def is_hidden_write(error: BaseException) -> bool:
    """Whether tracing failed because forward wrote to a tensor that is no input, parameter or buffer."""
    return any(
        words in str(error)
        for words in ("mutating a non-functional tensor", "expected to have an entirely functional graph")
    )


def innermost_user_frame(error: BaseException) -> str:
    """` (file.py:line)` of the last frame outside torch and fxoverlap that led to `error`, or nothing."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


# --- symbolic sizes (checked on 2.11.0, 2.13.0, 2.14.1) ---------------------------------------------------------


def free_symbols(size: int | torch.SymInt) -> set[Any]:
    """The symbols in a size."""
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def symbol(value: Any) -> Any:
    """The symbol that a traced number is; None if it is an expression of symbols, or no symbolic number."""
    expr = value.node.expr if isinstance(value, torch.SymInt) else None
    return expr if expr is not None and expr.is_Symbol else None


def has_symbols(shape: torch.Size) -> bool:
    """Whether a shape is known only when the graph runs."""
    return any(isinstance(size, torch.SymInt) for size in shape)


def size_hint(size: int | torch.SymInt, hints: Mapping[Any, int]) -> int:
    """A size with `hints` for its symbols, 1 for symbols without a hint."""
    return evaluate(expression(size), hints)


def expression(size: int | torch.SymInt) -> Any:
    """A size as what `evaluate` takes: a number, or an expression that can be compared and hashed."""
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def evaluate(size: Any, numbers: Mapping[Any, int]) -> int:
    """An expression with `numbers` for its symbols, 1 for symbols without one."""
    if isinstance(size, int):
        return size
    return int(size.subs({symbol: numbers.get(symbol, 1) for symbol in size.free_symbols}))


def check_data(condition: torch.Tensor, message: str) -> None:
    """Raise RuntimeError where the op runs, unless a bool tensor [] is true; a trace keeps the op."""
    torch._assert_async(condition, message)


class BoxedCodeGen(CodeGen):
    """Generate `forward(self, args_list)`, which empties the list: arguments die with their last use in the callee."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **kwargs: Any) -> str:
        names = [each.split(":")[0].split("=")[0].strip() for each in free_vars if each != "self"]
        lines = [f"def {self._func_name}(self, args_list){maybe_return_annotation}:"]
        if names:
            lines += [f"    {', '.join(names)}, = args_list", "    args_list.clear()"]
        return "\n".join(lines)


def lazy_module(root: nn.Module, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """A graph module whose code is generated when it is first read or run, which for most never happens."""
    return LazyGraphModule(root, graph, name)


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward of a graph module, its code generated."""
    if isinstance(module, LazyGraphModule):
        module.real_recompile()
    return module.forward


# --- hooks of tensors (checked on 2.11.0, 2.13.0, 2.14.1) ---------------------------------------------------------


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Whether something the user registered wants to see this leaf's gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def accumulator_is_held(leaf: torch.Tensor) -> bool:
    """Whether Python holds the autograd node that accumulates into this leaf, to which it can add hooks.

    The node lives only as long as somebody holds it; a hook on it cannot be seen.
    """
    with torch.enable_grad():
        node = leaf.expand_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    # The variable here and the argument of getrefcount are two references.
    return sys.getrefcount(node) > 2


def storage_id(tensor: torch.Tensor) -> int:
    """A number that two tensors share if and only if they share a storage, while both are alive."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd sees a tensor as a view of another one."""
    return tensor._is_view()


def times_written(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place."""
    return tensor._version


def shares_storage(tensor: torch.Tensor) -> bool:
    """Whether another tensor, in Python or in a saved state, holds the storage of this one."""
    storage = tensor.untyped_storage()
    # The tensor and the storage object here are two uses.
    return torch._C._storage_Use_Count(storage._cdata) > 2


def without_compile(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, or the module itself."""
    return getattr(model, "_orig_mod", model)


# --- process groups (checked on 2.11.0, 2.13.0, 2.14.1) ---------------------------------------------------------


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of a name, as functional collectives have it in the graph."""
    resolve: Any = distributed_c10d._resolve_process_group
    return resolve(name)


def group_names() -> set[str]:
    """The names of all process groups that this process knows."""
    return set(distributed_c10d._world.pg_names.values())


def all_to_all_with_arrival(
    x: torch.Tensor, out_splits: list[int], in_splits: list[int], group_name: str, arrived: Callable[[], object]
) -> torch.Tensor:
    """`_c10d_functional.all_to_all_single`, which also calls `arrived` when the data has come or the exchange failed.

    The call is made by a thread of the process group. The result is waited for like that of the functional collective,
    whose work object torch keeps to itself; so this makes the same collective by `torch.distributed` and registers its
    work under the result.
    """
    received = x.new_empty(sum(out_splits), *x.shape[1:])
    group = process_group(group_name)
    work = dist.all_to_all_single(received, x, out_splits, in_splits, group=group, async_op=True)
    assert work is not None
    work.get_future().add_done_callback(lambda _: arrived())
    register: Any = torch._C._distributed_c10d._register_work
    register(received, work)
    return received


def default_store() -> dist.Store:
    """The key-value store that the default process group was made with."""
    return distributed_c10d._get_default_store()


def is_connection_error(error: BaseException) -> bool:
    """Whether a collective failed because of another rank: a connection that broke or a time that ran out.

    Gloo raises plain RuntimeErrors, which only their texts tell apart.
    """
    if isinstance(error, dist.DistError):
        return True
    signs = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out")
    return type(error) is RuntimeError and any(sign in str(error) for sign in signs)


# --- operators (checked on 2.11.0, 2.13.0, 2.14.1) ---------------------------------------------------------


DRAW_AND_SNAPSHOT: Any = torch._prims.rng_prims.run_and_save_rng_state
"""(op, *args) -> (state of the generator before, result): a draw that can be repeated."""

DRAW_AGAIN: Any = torch._prims.rng_prims.run_with_rng_state
"""(state, op, *args) -> result: the same draw, which leaves the generator as it was."""


def rng_state_bytes(device: torch.device) -> int:
    """Size of the state that `DRAW_AND_SNAPSHOT` returns for an op on a device: a uint8 tensor on the CPU."""
    return int(torch.get_rng_state().numel()) if device.type == "cpu" else 16


def is_overload(target: Any) -> bool:
    """Whether the target of an FX node is an ATen or custom operator, and not a Python function."""
    return isinstance(target, torch._ops.OpOverload)


def written_bases(node: fx.Node) -> list[fx.Node]:
    """What a custom op that writes to its arguments writes to, as it stands in a functional graph; else nothing."""
    if node.target is not torch.ops.higher_order.auto_functionalized_v2:
        return []
    bases: Any = node.kwargs["_all_bases"]
    return [base for base in bases if isinstance(base, fx.Node)]


# --- structured logging (checked on 2.11.0, 2.13.0, 2.14.1) ---------------------------------------------------------


def trace_folders() -> list[str]:
    """The folders that torch writes structured logs to, such as the one that TORCH_TRACE names.

    Without one torch has a handler with no folder, which it drops at the first record, too late to save its payload.
    Handlers of others do not count: pytest adds its own to every logger.
    """
    folders = (getattr(handler, "root_dir", None) for handler in torch._logging._internal.trace_log.handlers)
    return [folder for folder in folders if folder is not None]


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add an artifact to torch's structured log. `text` is called only if there is one."""
    if trace_folders():
        torch._logging.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": "string"},
            payload_fn=text,
            expect_trace_id=False,  # no frame of Dynamo led here
        )
