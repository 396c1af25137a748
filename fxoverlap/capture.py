"""Model + one microbatch -> JointGraph.

The model's forward is traced once on fake tensors, together with its backward, into one functional ATen graph.

In:  an `nn.Module` whose forward returns a scalar loss, or a tuple or dict that holds one, and a microbatch.
Out: a `Capture`: the graph, each op tagged with its phase and module FQN, the meaning of its inputs and outputs, and
     how to rebuild the user's output structure.

Steps:
1. Register each Parameter and buffer object once, whatever the number of its names, on a wrapper module.
2. Annotate each submodule's forward with its FQN while tracing; restore every module's `__dict__` afterwards.
3. Export the joint graph; read its descriptors.

Raises CaptureError when the forward cannot be traced and UnsupportedError when what was traced cannot be used. The
model is left as it was.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from fxoverlap import compat
from fxoverlap.aside import Before, Draws, Watch, draws_kept, restored
from fxoverlap.config import OverlapConfig
from fxoverlap.errors import CaptureError, UnsupportedError
from fxoverlap.ir import META, GraphInput, InputKind, JointGraph, OpTag, Phase
from fxoverlap.microbatch import Leaves, Microbatch, flatten, unflatten


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """How the model's outputs other than the loss are put together.

    Attributes:
        spec: the structure of the rest; None if there is no rest.
        leaves: its leaves; a tensor leaf is given by its position among the graph's outputs, as `TensorLeaf`.
    """

    spec: Any
    leaves: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor among the outputs: the position in `JointGraph.outputs`."""

    index: int


@dataclass(frozen=True, slots=True)
class Capture:
    """A traced microbatch.

    Attributes:
        joint: the graph.
        params: the parameter objects, in the order of `GraphInput.index`.
        buffers: likewise.
        leaves: for each tensor leaf, in the order of `GraphInput.index`, its position among `flatten(...).values`.
        output: how to build the outputs of a step.
        assigned: FQNs of the module attributes that forward assigned; they keep the value from before the trace.
    """

    joint: JointGraph
    params: tuple[nn.Parameter, ...]
    buffers: tuple[torch.Tensor, ...]
    leaves: tuple[int, ...]
    output: OutputSpec
    assigned: tuple[str, ...]


def capture(model: nn.Module, microbatch: Microbatch, config: OverlapConfig) -> Capture:
    """Trace `model` on `microbatch`. Raises CaptureError, UnsupportedError."""
    refuse_what_cannot_be_traced(model, config)
    _check_signature(model, microbatch)
    parts = flatten(microbatch)
    leaves = tuple(i for i, value in enumerate(parts.values) if isinstance(value, torch.Tensor))
    mode = compat.new_fake_mode()
    fakes = tuple(compat.fake_like(mode, parts.values[i]) for i in leaves)
    place = _Place()
    with contextlib.ExitStack() as stack:
        # First, so that the annotations are among what is restored before forward is traced a second time.
        stack.enter_context(_annotated(model, place))
        before = stack.enter_context(restored(model))
        stack.enter_context(compat.checkpoint_replaced(_refuse_checkpoint))
        autocast = stack.enter_context(compat.autocast_seen())
        chunk = _Chunk(model, parts.values, parts.spec, leaves, before)
        try:
            with torch.enable_grad():
                module = compat.export_joint(chunk, fakes, mode)
        except UnsupportedError as error:
            raise UnsupportedError(f"{error} (Module {place.fqn!r}.)" if place.fqn else str(error)) from error
        except Exception as error:
            raise _capture_error(error, place) from error
    assert chunk.output is not None
    _refuse_effects(module.graph)
    # Not while tracing, because torch itself numbers collectives in place that way.
    chunk.draws.refuse_elsewhere()
    joint = _describe(module, chunk, [parts.paths[i] for i in leaves])
    _refuse_other_roundings(model, autocast)
    _refuse_weights_cast_twice(joint, autocast)
    _refuse_hidden_state(joint, chunk)
    _refuse_carried_state(joint, before)
    _refuse_sparse_gradients(joint)
    assigned = tuple(before.changed)
    return Capture(joint, tuple(chunk.params), tuple(chunk.state_buffers), leaves, chunk.output, assigned)


def _check_signature(model: nn.Module, microbatch: Microbatch) -> None:
    """Raise CaptureError if forward does not take such arguments."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*microbatch.args, **microbatch.kwargs)
    except TypeError as error:
        given = [type(each).__name__ for each in microbatch.args] + [f"{name}=" for name in microbatch.kwargs]
        raise CaptureError(
            f"The microbatch ({', '.join(given)}) does not fit {type(model).__name__}.forward{signature}: {error}. "
            f"step takes a list of microbatches, each a tuple of positional arguments or a dict of keyword arguments."
        ) from error


def refuse_what_cannot_be_traced(model: nn.Module, config: OverlapConfig) -> None:
    """Raise UnsupportedError for lazy modules, hooks (unless traced), sparse tensors, subclasses, accelerators."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for fqn, tensor in tensors:
        if is_lazy(tensor):
            raise UnsupportedError(f"{fqn} is not initialized. Call the model once before it is transformed.")
    if config.hooks == "refuse" and compat.hooks_of_all_modules():
        raise UnsupportedError(
            "There are forward or backward hooks of all modules, whose Python would not run in a step. Remove them, or "
            'set OverlapConfig.hooks="trace" to capture what they do to tensors.'
        )
    for fqn, module in model.named_modules():
        if config.hooks == "refuse" and compat.hooks(module):
            raise UnsupportedError(
                f"Module {fqn or type(module).__name__!r} has forward or backward hooks, whose Python would not run in "
                f'a step. Remove them, or set OverlapConfig.hooks="trace" to capture what they do to tensors.'
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UnsupportedError(
                f"Module {fqn or type(module).__name__!r} makes sparse gradients, which cannot be scheduled. "
                f"Use sparse=False."
            )
    for fqn, buffer in model.named_buffers():
        if buffer.requires_grad:
            raise UnsupportedError(
                f"Buffer {fqn} requires a gradient, which a step could not deliver. Register it as a parameter."
            )
    for fqn, tensor in tensors:
        if tensor.is_inference():
            raise UnsupportedError(
                f"{fqn} was made in torch.inference_mode, so that autograd cannot use it. Make the model outside."
            )
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise UnsupportedError(
                f"{fqn} is a {type(tensor).__name__}; only plain tensors can be transformed so far. "
                f"Transform the model before it is wrapped."
            )
        if tensor.layout is not torch.strided:
            raise UnsupportedError(f"{fqn} has the layout {tensor.layout}, expected a dense tensor. Use .to_dense().")
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"{fqn} is on {tensor.device}; this version of fxoverlap runs on CPU process groups only. "
                f"Move the model to the CPU."
            )


def _refuse_checkpoint(*args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(
        "The model calls torch.utils.checkpoint, which tracing would drop without a trace; this version of fxoverlap "
        "cannot recompute yet. Switch activation checkpointing off for the overlapped model."
    )


class _Place:
    """The FQN of the innermost module whose forward raised."""

    fqn: str | None = None


class _Run(nn.Module):
    """The model's forward, which also returns the buffers that it replaced by new tensors: (result, {FQN: tensor})."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: Any, kwargs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        modules = list(self.model.named_modules())
        before = [(dict(module._parameters), dict(module._buffers)) for _, module in modules]
        result = self.model(*args, **kwargs)
        replaced = {}
        for (fqn, module), (params, buffers) in zip(modules, before, strict=True):
            for name, param in module._parameters.items():
                if param is not params.get(name):
                    path = f"{fqn}.{name}".lstrip(".")
                    raise UnsupportedError(
                        f"The forward replaces parameter {path}; a step can only update buffers. Do it between steps."
                    )
            for name, buffer in module._buffers.items():
                if buffer is not buffers.get(name):
                    path = f"{fqn}.{name}".lstrip(".")
                    replaced[path] = _checked_replacement(path, buffers.get(name), buffer)
        return result, replaced


def _checked_replacement(fqn: str, old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor:
    """A buffer's replacement; UnsupportedError if it cannot be written into the buffer."""
    if old is None or new is None or (old.shape, old.dtype) != (new.shape, new.dtype):
        was, now = (
            "None" if each is None else f"a tensor of shape {tuple(each.shape)} and dtype {each.dtype}"
            for each in (old, new)
        )
        raise UnsupportedError(
            f"Buffer {fqn} is {was} before forward and {now} behind it; a step can only write a new value of the same "
            f"shape and dtype. Give it its final shape and dtype in __init__."
        )
    return new


class _Chunk(nn.Module):
    """The model as a function of its tensors, with each Parameter and buffer object registered once."""

    def __init__(
        self, model: nn.Module, values: tuple[Any, ...], spec: Any, leaves: tuple[int, ...], before: Before
    ) -> None:
        super().__init__()
        self.inner = (_Run(model),)  # in a tuple, so that its parameters are not registered a second time
        self.before = before
        self.values, self.spec, self.leaves = list(values), spec, leaves
        self.param_names = [name for name, _ in model.named_parameters()]
        self.buffer_names = [name for name, _ in model.named_buffers()]
        self.params = [param for _, param in model.named_parameters()]
        self.state_buffers = [buffer for _, buffer in model.named_buffers()]
        for i, param in enumerate(self.params):
            self.register_parameter(f"p{i}", param)
        for i, buffer in enumerate(self.state_buffers):
            self.register_buffer(f"b{i}", buffer)
        self.output: OutputSpec | None = None
        self.draws = Draws()
        self.drawn_from: list[torch.Generator] | None = None
        self.replaced: dict[int, int] = {}  # position among the results -> buffer

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(self.values)
        for position, tensor in zip(self.leaves, tensors, strict=True):
            values[position] = tensor
        state = {f"model.{name}": getattr(self, f"p{i}") for i, name in enumerate(self.param_names)}
        state |= {f"model.{name}": getattr(self, f"b{i}") for i, name in enumerate(self.buffer_names)}
        # Forward runs twice. The second time it must not see what the first has left on the modules.
        self.before.restore()
        with draws_kept(self.inner[0], self.draws), Watch(self.drawn_from) as watch:
            result, replaced = torch.func.functional_call(self.inner[0], state, unflatten(values, self.spec))
        self.drawn_from = watch.generators
        loss, rest = _split_loss(result)
        if compat.is_view(loss) or any(loss is each for each in (*state.values(), *tensors)):
            loss = loss.clone()  # the exporter gives no tangent to an output that is an input or a view of one
        leaves, spec = compat.flatten_with_path(rest)
        tensors_out: list[torch.Tensor] = []
        kept: list[Any] = []
        for _, leaf in leaves:
            kept.append(TensorLeaf(len(tensors_out)) if isinstance(leaf, torch.Tensor) else leaf)
            if isinstance(leaf, torch.Tensor):
                # A copy: an output may share storage with an input, a buffer or a value that a later op overwrites.
                tensors_out.append(leaf.detach().clone())
        self.output = OutputSpec(spec if rest is not None else None, tuple(kept))
        self.replaced = {1 + len(tensors_out) + i: self.buffer_names.index(fqn) for i, fqn in enumerate(replaced)}
        return (loss, *tensors_out, *(value.detach().clone() for value in replaced.values()))


def _split_loss(result: Any) -> tuple[torch.Tensor, Any]:
    """The loss and the rest (None, a tuple, or a dict) of what forward returned."""
    loss: Any = result
    rest: Any = None
    if isinstance(result, dict):
        if "loss" not in result:
            raise UnsupportedError(
                f"The model returned a dict with the keys {sorted(map(str, result))}, and no 'loss' among them. "
                f"Return the scalar loss under the key 'loss'."
            )
        loss, rest = result["loss"], {key: value for key, value in result.items() if key != "loss"}
    elif isinstance(result, tuple) and result:
        loss, rest = result[0], tuple(result[1:])
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise UnsupportedError(
            f"The model's forward must return a scalar (0-dim) loss tensor, or a tuple or dict that holds one first or "
            f"under 'loss'; it returned {found}. Reduce it, for example with .mean()."
        )
    if not loss.requires_grad:
        raise UnsupportedError(
            "The model's loss does not require a gradient, so there is nothing to overlap. "
            "Check that parameters have requires_grad=True and that forward does not run under no_grad."
        )
    return loss, rest


_MISSING = object()


class _Trail:
    """The calls of submodules that are under way while tracing, each as `fqn#number of the call`."""

    def __init__(self) -> None:
        self._under_way: list[str] = []
        self._count: Counter[str] = Counter()

    def __str__(self) -> str:
        return "\n".join(self._under_way)

    def followed(self, forward: Callable[..., Any], fqn: str) -> Callable[..., Any]:
        """`forward` such that its calls are noted."""

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._under_way:  # the tracer runs the model several times
                self._count.clear()
            self._under_way.append(f"{fqn}#{self._count[fqn]}")
            self._count[fqn] += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._under_way.pop()

        return call


@contextlib.contextmanager
def _annotated(model: nn.Module, place: _Place) -> Iterator[None]:
    """Let every op that a submodule's forward runs carry the submodule's FQN and the calls that led to it."""
    wrapped, trail = [], _Trail()
    try:
        for fqn, module in model.named_modules():
            had = module.__dict__.get("forward", _MISSING)
            wrapped.append((module, had))
            forward = compat.annotated(module.forward, "fqn", functools.partial(str, fqn))
            forward = compat.annotated(forward, "calls", functools.partial(str, trail))
            module.forward = _note_failure(trail.followed(forward, fqn), fqn, place)
        yield
    finally:
        for module, had in wrapped:
            if had is _MISSING:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = had


def _note_failure(forward: Callable[..., Any], fqn: str, place: _Place) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception:
            if place.fqn is None:
                place.fqn = fqn
            raise

    return noted


def _capture_error(error: Exception, place: _Place) -> CaptureError:
    where = "outside the modules" if place.fqn is None else f"in module {place.fqn or '(the model itself)'!r}"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
    remedy = "Replace what needs real values while tracing (`.numpy()`, Python on tensor contents) by tensor ops."
    if compat.is_hidden_write(error):
        reason = "forward writes to a tensor that is neither a buffer nor made in forward."
        remedy = "Register it as a buffer."
    elif compat.is_data_dependent(error):
        reason = f"a Python branch or size depends on the contents of a tensor: {reason}"
        remedy = "Use torch.where or torch.cond for the branch; state what holds of a size with torch._check."
    frame = compat.innermost_user_frame(error)
    return CaptureError(f"Cannot trace the model {where}{frame}: {type(error).__name__}: {reason} {remedy}")


def _refuse_effects(graph: fx.Graph) -> None:
    """Raise UnsupportedError for collectives that are not functional, and for custom ops with declared effects."""
    for node, name in compat.in_place_effects(graph):
        phase = "backward" if compat.is_backward(node) else "forward"
        where = compat.annotation(node, "fqn") or "(the model itself)"
        remedy = "Declare what the op changes with mutates_args instead of an effect."
        if name.startswith("aten."):
            remedy = "Use the variant that gives its outcome back instead of raising, such as torch.linalg.inv_ex."
        if name.startswith("c10d."):
            remedy = (
                "Use PyTorch's functional collectives, for example all_reduce(x, 'sum', group) or "
                "all_to_all_single_autograd(x, received, sent, group), instead of torch.distributed's own functions."
            )
        raise UnsupportedError(
            f"The {phase} of module {where!r} calls {name}, which acts in place on something that the graph does not "
            f"show, so its order cannot be kept. {remedy}"
        )


def _describe(module: fx.GraphModule, chunk: _Chunk, paths: list[str]) -> JointGraph:
    """Name the ends of an exported graph and tag its ops."""
    inputs, by_source = [], {}
    for node in module.graph.find_nodes(op="placeholder"):
        kind, key = compat.input_descriptor(node)
        entry = _graph_input(node, kind, key, chunk, paths)
        # Names that a reader of the graph knows, instead of numbers.
        compat.rename(node, f"{entry.kind.value}_{entry.name}")
        entry = replace(entry, value=node.name)
        inputs.append(entry)
        by_source[(kind, key)] = entry.value
    inputs.extend(
        GraphInput(node.name, InputKind.CONSTANT, str(node.target), i)
        for i, node in enumerate(module.graph.find_nodes(op="get_attr"))
    )
    loss, outputs, mutations, gradients = "", [], [], []
    replaced: dict[str, str] = {}
    results: Any = module.graph.output_node().args[0]
    for value, (kind, key) in zip(results, compat.output_descriptors(module.graph), strict=True):
        if value is None:
            continue
        if kind == "output" and key == 0:
            loss = value.name
        elif kind == "output" and key in chunk.replaced:
            replaced[by_source["buffer", f"b{chunk.replaced[key]}"]] = value.name
        elif kind == "output":
            outputs.append(value.name)
        elif kind == "mutation":
            mutations.append((value.name, by_source[key]))
        elif kind == "grad":
            gradients.append((value.name, by_source[key]))
        else:
            raise UnsupportedError(f"The traced graph has an output that fxoverlap does not know: {key}.")
    # What replaces a buffer is its value after the forward, whatever was written to the old tensor.
    mutations = [(value, target) for value, target in mutations if target not in replaced]
    mutations += [(value, target) for target, value in replaced.items()]
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            node.meta[META] = _tag(node)
    return JointGraph(module, tuple(inputs), loss, tuple(outputs), tuple(mutations), tuple(gradients))


def _refuse_other_roundings(model: nn.Module, autocast: set[torch.dtype]) -> None:
    """Raise UnsupportedError for modules of torch of which a functional graph rounds otherwise than eager."""
    for fqn, module in model.named_modules():
        if isinstance(module, (nn.GRU, nn.GRUCell)):
            reason = "works in place on strided parts of a tensor, where a functional graph has contiguous ones"
        elif isinstance(module, nn.Bilinear) and autocast:
            reason = "runs in float32 under autocast, which would cast the ops that a graph has in its place"
        else:
            continue
        raise UnsupportedError(
            f"Module {fqn!r} ({type(module).__name__}) {reason}, so that the results would differ in their last bits. "
            f"Write the module with plain tensor ops."
        )


def _refuse_weights_cast_twice(joint: JointGraph, autocast: set[torch.dtype]) -> None:
    """Raise UnsupportedError if autocast, ambient or inside the model, casts a weight at several uses.

    Eager keeps the first cast, so that the gradients of the uses are summed in the low precision; the tracer casts
    anew at each use, and they would be summed in the high one: other bits.
    """
    nodes = {node.name: node for node in joint.module.graph.nodes}
    params = {each.value: each.name for each in joint.inputs if each.kind is InputKind.PARAM}
    for target in (target for _, target in joint.gradients if target in params):
        casts = [user for user in nodes[target].users if user.target is torch.ops.aten._to_copy.default]
        for dtype in autocast:
            count = sum(cast.meta["val"].dtype is dtype for cast in casts)
            if count > 1:
                raise UnsupportedError(
                    f"Parameter {params[target]} is used {count} times under autocast, which casts it once in eager "
                    f"and sums its gradients in {dtype}; a captured graph would sum them in float32. "
                    f"Use torch.autocast(..., cache_enabled=False), or cast the parameter once in forward."
                )


def _refuse_hidden_state(joint: JointGraph, chunk: _Chunk) -> None:
    """Raise UnsupportedError for state that the graph holds as a constant, or writes to though it is no buffer."""
    names, tensors = [*chunk.param_names, *chunk.buffer_names], [*chunk.params, *chunk.state_buffers]
    storages = dict(zip(map(compat.storage_id, tensors), names, strict=True))
    for each in joint.inputs:
        constant = getattr(joint.module, each.name) if each.kind is InputKind.CONSTANT else None
        if not isinstance(constant, torch.Tensor):
            continue
        registered = storages.get(compat.storage_id(constant))
        if constant.requires_grad or registered is not None:
            what = f"the tensor of {registered}" if registered else f"a trained tensor of shape {tuple(constant.shape)}"
            raise UnsupportedError(
                f"The forward reads {what} through something that is no registered parameter or buffer, such as a "
                f"plain list; its gradient would be lost. Register it, for example in an nn.ParameterList."
            )
    inputs = {each.value: each for each in joint.inputs}
    for _, target in joint.mutations:
        if inputs[target].kind is not InputKind.BUFFER:
            raise _no_such_write(inputs[target].name, inputs[target].kind)


def _no_such_write(name: str, kind: InputKind) -> UnsupportedError:
    if kind is InputKind.PARAM:
        what, remedy = "a parameter", "Do it after the optimizer's step (max_norm of an embedding is one cause)."
    elif kind is InputKind.BUFFER:
        what, remedy = "a buffer, with a value that requires a gradient", "Detach what is written."
    else:
        what, remedy = "a tensor of the microbatch", "Write to a copy."
    return UnsupportedError(f"The forward writes in place to {name}, {what}; a step can only update buffers. {remedy}")


def _refuse_carried_state(joint: JointGraph, before: Before) -> None:
    """Raise UnsupportedError for an attribute whose old tensor the graph reads and that forward assigns anew."""
    constants = [getattr(joint.module, each.name) for each in joint.inputs if each.kind is InputKind.CONSTANT]
    read = {compat.storage_id(each) for each in constants if isinstance(each, torch.Tensor)}
    for name, tensor in before.replaced.items():
        if compat.storage_id(tensor) in read:
            raise UnsupportedError(
                f"The forward reads the attribute {name} and assigns it anew, and a step would not carry it from one "
                f"microbatch to the next. Register it as a buffer."
            )


def _refuse_sparse_gradients(joint: JointGraph) -> None:
    """Raise UnsupportedError for a gradient that is no dense tensor."""
    nodes = {node.name: node for node in joint.module.graph.nodes}
    names = {each.value: each.name for each in joint.inputs}
    for value, target in joint.gradients:
        if nodes[value].meta["val"].layout is not torch.strided:
            raise UnsupportedError(
                f"{names[target]} gets a sparse gradient, which cannot be scheduled. Use sparse=False."
            )


def check_leaves(leaves: Leaves) -> None:
    """Raise UnsupportedError for a microbatch leaf that a step cannot take, naming its path."""
    for path, value in zip(leaves.paths, leaves.values, strict=True):
        reason = None
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
                reason = f"a {type(value).__name__} of layout {value.layout}, expected a plain dense tensor"
            elif value.device.type != "cpu":
                reason = f"on {value.device}, expected the CPU"
            elif value.requires_grad and not value.is_leaf:
                reason = "the result of a computation that requires a gradient, expected a leaf; pass it detached"
        elif not isinstance(value, (type(None), bool, int, float, complex, str, torch.dtype, torch.device)):
            reason = f"a {type(value).__name__}, expected a tensor, None, a number or a string"
        if reason is not None:
            raise UnsupportedError(f"The microbatch's {path} is {reason}.")


def _graph_input(node: fx.Node, kind: str, key: Any, chunk: _Chunk, paths: list[str]) -> GraphInput:
    if kind == "param":
        index = int(key[1:])
        return GraphInput(node.name, InputKind.PARAM, chunk.param_names[index], index)
    if kind == "buffer":
        index = int(key[1:])
        return GraphInput(node.name, InputKind.BUFFER, chunk.buffer_names[index], index)
    if kind == "input":
        return GraphInput(node.name, InputKind.LEAF, paths[key], key)
    if kind == "tangent of" and key[0] in ("param", "buffer", "input"):
        written = _graph_input(node, key[0], key[1], chunk, paths)
        raise _no_such_write(written.name, written.kind)
    if kind == "tangent" and key == 0:
        return GraphInput(node.name, InputKind.TANGENT, "loss", 0)
    raise UnsupportedError(
        f"The traced graph has an input that fxoverlap does not know: {key}. Arguments or buffers that are views of "
        f"one another and are written in forward are one cause; pass separate tensors."
    )


def _tag(node: fx.Node) -> OpTag:
    phase = Phase.B if compat.is_backward(node) else Phase.F
    # Autograd attributes the sums of several gradients to whichever module came last; they have no module.
    fqn = None if compat.is_gradient_accumulation(node) else compat.annotation(node, "fqn")
    calls = compat.annotation(node, "calls") if fqn is not None else None
    return OpTag(phase, fqn, calls=tuple(calls.split("\n")) if calls else ())
