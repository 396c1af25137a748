"""Model + one microbatch -> JointGraph.

The model's forward is traced once on fake tensors, together with its backward, into one functional ATen graph.

In:  an `nn.Module` whose forward returns a scalar loss, or a tuple or dict that holds one, and a microbatch.
Out: a `Capture`: the graph, each op tagged with its phase and module FQN, the meaning of its inputs and outputs, and
     how to rebuild the user's output structure.

Steps:
1. Register each Parameter and buffer object once, whatever the number of its names, on a wrapper module.
2. Annotate each submodule's forward with its FQN while tracing, and each `torch.utils.checkpoint` call with its
   region; restore every module's `__dict__` afterwards.
3. Export the joint graph; read its descriptors.

Raises CaptureError when the forward cannot be traced and UnsupportedError when what was traced cannot be used. The
model is left as it was.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from fxoverlap import compat
from fxoverlap.aside import Before, Draws, Watch, draws_kept, restored
from fxoverlap.callers import Place, annotated
from fxoverlap.checkpoints import Checkpoints
from fxoverlap.config import OverlapConfig
from fxoverlap.errors import CaptureError, UnsupportedError
from fxoverlap.ir import META, GraphInput, InputKind, JointGraph, OpTag, Phase
from fxoverlap.microbatch import Microbatch, flatten, unflatten
from fxoverlap.refusals import (
    check_replacement,
    check_signature,
    check_trace_folders,
    refuse_carried_state,
    refuse_checkpoint,
    refuse_effects,
    refuse_gradients_in_parts,
    refuse_hidden_state,
    refuse_other_roundings,
    refuse_sparse_gradients,
    refuse_weights_summed_in_turn,
    refuse_what_cannot_be_traced,
    refuse_write,
)


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
        born: FQNs of the buffers that were None and that forward gave a value: the last ones of the graph's outputs.
        assigned: FQNs of the module attributes that forward assigned; they keep the value from before the trace.
    """

    joint: JointGraph
    params: tuple[nn.Parameter, ...]
    buffers: tuple[torch.Tensor, ...]
    leaves: tuple[int, ...]
    output: OutputSpec
    born: tuple[str, ...]
    assigned: tuple[str, ...]


def capture(model: nn.Module, microbatch: Microbatch, config: OverlapConfig) -> Capture:
    """Trace `model` on `microbatch`. Raises CaptureError, UnsupportedError."""
    refuse_what_cannot_be_traced(model, config)
    check_signature(model, microbatch)
    check_trace_folders()
    parts = flatten(microbatch)
    leaves = tuple(i for i, value in enumerate(parts.values) if isinstance(value, torch.Tensor))
    mode = compat.new_fake_mode()
    fakes = tuple(compat.fake_like(mode, parts.values[i]) for i in leaves)
    place = Place()
    with contextlib.ExitStack() as stack:
        # First, so that the annotations are among what is restored before forward is traced a second time.
        trail = stack.enter_context(annotated(model, place))
        before = stack.enter_context(restored(model))
        checkpoints = Checkpoints(model, trail)
        stack.enter_context(compat.checkpoint_replaced(checkpoints, refuse_checkpoint))
        casts = stack.enter_context(compat.autocast_casts())
        chunk = _Chunk(model, parts.values, parts.spec, leaves, before, casts)
        try:
            with torch.enable_grad():
                module = compat.export_joint(chunk, fakes, mode)
        except UnsupportedError as error:
            raise UnsupportedError(f"{error} (Module {place.fqn!r}.)" if place.fqn else str(error)) from error
        except Exception as error:
            raise _capture_error(error, place) from error
    assert chunk.output is not None
    refuse_effects(module.graph)
    # Not while tracing, because torch itself numbers collectives in place that way.
    chunk.draws.refuse_elsewhere()
    joint = _describe(module, chunk, [parts.paths[i] for i in leaves])
    refuse_other_roundings(model, module.graph, casts.dtypes)
    if casts.outlive:
        refuse_weights_summed_in_turn(joint, casts.dtypes)
    refuse_hidden_state(joint, chunk.registered())
    refuse_carried_state(joint, before)
    refuse_sparse_gradients(joint)
    refuse_gradients_in_parts(joint, checkpoints.reentrant)
    born = tuple(fqn for fqn in chunk.replaced.values() if fqn not in chunk.buffer_names)
    assigned = tuple(name for name in before.changed if name not in born)
    return Capture(joint, tuple(chunk.params), tuple(chunk.state_buffers), leaves, chunk.output, born, assigned)


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
                    check_replacement(path, buffers.get(name), buffer)
                    replaced[path] = buffer
        return result, replaced


class _Chunk(nn.Module):
    """The model as a function of its tensors, with each Parameter and buffer object registered once."""

    def __init__(
        self,
        model: nn.Module,
        values: tuple[Any, ...],
        spec: Any,
        leaves: tuple[int, ...],
        before: Before,
        casts: compat.AutocastCasts,
    ) -> None:
        super().__init__()
        self.casts = casts
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
        self.replaced: dict[int, str] = {}  # position among the results -> FQN of the buffer

    def registered(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by FQN."""
        names, tensors = [*self.param_names, *self.buffer_names], [*self.params, *self.state_buffers]
        return dict(zip(names, tensors, strict=True))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(self.values)
        for position, tensor in zip(self.leaves, tensors, strict=True):
            values[position] = tensor
        state = {f"model.{name}": getattr(self, f"p{i}") for i, name in enumerate(self.param_names)}
        state |= {f"model.{name}": getattr(self, f"b{i}") for i, name in enumerate(self.buffer_names)}
        self.casts.begin([*(getattr(self, f"p{i}") for i in range(len(self.params))), *tensors])
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
        self.replaced = {1 + len(tensors_out) + i: fqn for i, fqn in enumerate(replaced)}
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


_WORDS_OF_THE_TRACER = ("numpy", "fake", "Fake", "Functional", "symbolic", "data is not allocated")


def _capture_error(error: Exception, place: Place) -> CaptureError:
    where = "outside the modules" if place.fqn is None else f"in module {place.fqn or '(the model itself)'!r}"
    reason = str(error).strip().splitlines()[0].rstrip(".") + "." if str(error).strip() else "no message."
    remedy = "Replace what needs real values while tracing (`.numpy()`, Python on tensor contents) by tensor ops."
    if compat.is_hidden_write(error):
        reason = "forward writes to a tensor that is neither a buffer nor made in forward."
        remedy = "Register it as a buffer."
    elif compat.is_data_dependent(error):
        reason = f"a Python branch or size depends on the contents of a tensor: {reason}"
        remedy = "Use torch.where or torch.cond for the branch; state what holds of a size with torch._check."
    elif not any(word in reason for word in _WORDS_OF_THE_TRACER):
        remedy = (
            "Call the model itself on this microbatch: where that works, something in forward does not bear tracing."
        )
    frame = compat.innermost_user_frame(error)
    return CaptureError(f"Cannot trace the model {where}{frame}: {type(error).__name__}: {reason} {remedy}")


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
        elif kind == "output" and chunk.replaced.get(key) in chunk.buffer_names:
            number = chunk.buffer_names.index(chunk.replaced[key])
            replaced[by_source["buffer", f"b{number}"]] = value.name
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
        refuse_write(written.name, written.kind)
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
    # The backward's ops carry what those of the forward do.
    region = compat.annotation(node, "region") if phase is Phase.F else None
    keep = region is not None and compat.is_kept(node)
    return OpTag(phase, fqn, calls=tuple(calls.split("\n")) if calls else (), region=region, keep=keep)
