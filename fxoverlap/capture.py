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
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from fxoverlap import compat
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
    chunk = _Chunk(model, parts.values, parts.spec, leaves)
    mode = compat.new_fake_mode()
    fakes = tuple(compat.fake_like(mode, parts.values[i]) for i in leaves)
    place = _Place()
    with contextlib.ExitStack() as stack:
        assigned = stack.enter_context(_restored(model))
        stack.enter_context(_annotated(model, place))
        stack.enter_context(compat.checkpoint_replaced(_refuse_checkpoint))
        autocast = stack.enter_context(compat.autocast_seen())
        try:
            module = compat.export_joint(chunk, fakes, mode)
        except UnsupportedError as error:
            raise UnsupportedError(f"{error} (Module {place.fqn!r}.)" if place.fqn else str(error)) from error
        except Exception as error:
            raise _capture_error(error, place) from error
    assert chunk.output is not None
    _refuse_effects(module.graph)
    joint = _describe(module, chunk, [parts.paths[i] for i in leaves])
    _refuse_weights_cast_twice(joint, autocast)
    _refuse_hidden_state(joint, chunk)
    return Capture(joint, tuple(chunk.params), tuple(chunk.state_buffers), leaves, chunk.output, tuple(assigned))


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
    """Raise UnsupportedError for hooks (unless traced), sparse gradients, tensor subclasses, accelerators."""
    for fqn, module in model.named_modules():
        if config.hooks == "refuse" and compat.has_hooks(module):
            raise UnsupportedError(
                f"Module {fqn or type(module).__name__!r} has forward or backward hooks, whose Python would not run in "
                f'a step. Remove them, or set OverlapConfig.hooks="trace" to capture what they do to tensors.'
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UnsupportedError(
                f"Module {fqn or type(module).__name__!r} makes sparse gradients, which cannot be scheduled. "
                f"Use sparse=False."
            )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for fqn, buffer in model.named_buffers():
        if buffer.requires_grad:
            raise UnsupportedError(
                f"Buffer {fqn} requires a gradient, which a step could not deliver. Register it as a parameter."
            )
    for fqn, tensor in tensors:
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise UnsupportedError(
                f"{fqn} is a {type(tensor).__name__}; only plain tensors can be transformed so far. "
                f"Transform the model before it is wrapped."
            )
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


class _Chunk(nn.Module):
    """The model as a function of its tensors, with each Parameter and buffer object registered once."""

    def __init__(self, model: nn.Module, values: tuple[Any, ...], spec: Any, leaves: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = (model,)  # in a tuple, so that its parameters are not registered a second time
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

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(self.values)
        for position, tensor in zip(self.leaves, tensors, strict=True):
            values[position] = tensor
        args, kwargs = unflatten(values, self.spec)
        state = {name: getattr(self, f"p{i}") for i, name in enumerate(self.param_names)}
        state |= {name: getattr(self, f"b{i}") for i, name in enumerate(self.buffer_names)}
        result = torch.func.functional_call(self.inner[0], state, args, kwargs)
        loss, rest = _split_loss(result)
        leaves, spec = compat.flatten_with_path(rest)
        tensors_out: list[torch.Tensor] = []
        kept: list[Any] = []
        for _, leaf in leaves:
            kept.append(TensorLeaf(len(tensors_out)) if isinstance(leaf, torch.Tensor) else leaf)
            if isinstance(leaf, torch.Tensor):
                # A copy: an output may share storage with an input, a buffer or a value that a later op overwrites.
                tensors_out.append(leaf.detach().clone())
        self.output = OutputSpec(spec if rest is not None else None, tuple(kept))
        return (loss, *tensors_out)


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


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[list[str]]:
    """Put every module's attributes back when the block ends; fill the yielded list with those that changed."""
    before = {fqn: (module, _attributes(module)) for fqn, module in model.named_modules()}
    assigned: list[str] = []
    try:
        yield assigned
    finally:
        for fqn, (module, attributes) in before.items():
            after = _attributes(module)
            for owner, saved in attributes.items():
                changed = [key for key, value in after[owner].items() if saved.get(key, _MISSING) is not value]
                assigned.extend(f"{fqn}.{key}".lstrip(".") for key in changed)
                live = module.__dict__ if owner == "" else module.__dict__[owner]
                live.clear()
                live.update(saved)


_MISSING = object()


def _attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Shallow copies of a module's attributes and of the dicts that hold its parameters, buffers and submodules."""
    registries = ("_parameters", "_buffers", "_modules")
    return {owner: dict(module.__dict__[owner]) for owner in registries} | {"": dict(module.__dict__)}


@contextlib.contextmanager
def _annotated(model: nn.Module, place: _Place) -> Iterator[None]:
    """Let every op that a submodule's forward runs carry the submodule's FQN."""
    wrapped = []
    try:
        for fqn, module in model.named_modules():
            had = module.__dict__.get("forward", _MISSING)
            wrapped.append((module, had))
            module.forward = _note_failure(compat.annotated(module.forward, "fqn", fqn), fqn, place)
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
    if compat.is_data_dependent(error):
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
        if name.startswith("c10d."):
            remedy = (
                "Use torch.distributed._functional_collectives, for example all_reduce(x, 'sum', group) or "
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
    results: Any = module.graph.output_node().args[0]
    for value, (kind, key) in zip(results, compat.output_descriptors(module.graph), strict=True):
        if value is None:
            continue
        if kind == "output" and key == 0:
            loss = value.name
        elif kind == "output":
            outputs.append(value.name)
        elif kind == "mutation":
            mutations.append((value.name, by_source[key]))
        elif kind == "grad":
            gradients.append((value.name, by_source[key]))
        else:
            raise UnsupportedError(f"The traced graph has an output that fxoverlap does not know: {key}.")
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            node.meta[META] = _tag(node)
    return JointGraph(module, tuple(inputs), loss, tuple(outputs), tuple(mutations), tuple(gradients))


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
            raise UnsupportedError(
                f"The forward writes in place to {inputs[target].name} ({inputs[target].kind.value}); only buffers may "
                f"be written to. Write to a copy."
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
    return OpTag(phase, fqn)
