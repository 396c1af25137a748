"""What cannot be captured, or could not be run as eager runs it: refused by name, with a remedy.

Each function raises UnsupportedError (CaptureError for arguments that do not fit) and returns nothing else of interest.
In the order in which a capture asks: the microbatch and the model before anything is traced, what forward calls while
it is traced, and the traced graph.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Set
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from fxoverlap import compat
from fxoverlap.aside import Before
from fxoverlap.config import OverlapConfig
from fxoverlap.errors import CaptureError, UnsupportedError
from fxoverlap.ir import META, InputKind, JointGraph, Phase
from fxoverlap.microbatch import Leaves, Microbatch


def check_leaves(leaves: Leaves) -> None:
    """Raise UnsupportedError for a microbatch leaf that a step cannot take, naming its path."""
    for path, value in zip(leaves.paths, leaves.values, strict=True):
        reason = None
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
                reason = f"a {type(value).__name__} of layout {value.layout}, expected a plain dense tensor"
            elif value.device.type != "cpu":
                reason = f"on {value.device}, expected the CPU; move it there"
            elif value.requires_grad and not value.is_leaf:
                reason = "the result of a computation that requires a gradient, expected a leaf; pass it detached"
        elif not isinstance(value, (type(None), bool, int, float, complex, str, torch.dtype, torch.device)):
            reason = (
                f"of type {type(value).__name__}, expected a tensor, None, a number or a string, or a tuple, list, "
                f"dict, NamedTuple or registered dataclass of them; make a tensor of an array, and register a "
                f"dataclass of your own with torch.export.register_dataclass"
            )
        if reason is not None:
            raise UnsupportedError(f"The microbatch's {path} is {reason}.")


def check_signature(model: nn.Module, microbatch: Microbatch) -> None:
    """Raise CaptureError if forward does not take such arguments."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*microbatch.args, **microbatch.kwargs)
    except TypeError as error:
        given = [type(each).__name__ for each in microbatch.args] + [f"{name}=" for name in microbatch.kwargs]
        raise CaptureError(
            f"The microbatch ({', '.join(given)}) does not fit {type(model).__name__}.forward{signature}: {error}. "
            f"A microbatch is a tuple of positional arguments or a dict of keyword arguments; step takes a list of "
            f"them, and transform's example_inputs is one."
        ) from error


def check_trace_folders() -> None:
    """Raise CaptureError if torch's structured log, which a trace writes to, has a folder that cannot be made."""
    for folder in compat.trace_folders():
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise CaptureError(
                f"TORCH_TRACE is {folder!r}, expected a folder that can be written: {error}. Name another one, or none."
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
        _refuse_module(fqn, module, config)
    for fqn, buffer in model.named_buffers():
        if buffer.requires_grad:
            raise UnsupportedError(
                f"Buffer {fqn} requires a gradient, which a step could not deliver. Register it as a parameter."
            )
    for fqn, tensor in tensors:
        _refuse_tensor(fqn, tensor)


def _refuse_module(fqn: str, module: nn.Module, config: OverlapConfig) -> None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            f"Module {fqn or 'model'!r} is a DistributedDataParallel, which cannot be traced. Transform the module "
            f"inside it (.module), and reduce gradients over the data-parallel ranks after step()."
        )
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


def _refuse_tensor(fqn: str, tensor: torch.Tensor) -> None:
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


def refuse_checkpoint(*args: Any, **kwargs: Any) -> None:
    """Stand in for what `torch.utils.checkpoint` and the composable API share."""
    raise UnsupportedError(
        "The model has a composable checkpoint of torch.distributed, a hook whose region tracing cannot see. "
        "Call torch.utils.checkpoint in forward, or use checkpoint_wrapper."
    )


def refuse_gradients_in_parts(joint: JointGraph, reentrant: Set[str]) -> None:
    """Raise UnsupportedError for a parameter that a reentrant checkpoint and something else read.

    A reentrant checkpoint runs a backward of its own inside the backward, so that eager adds such a parameter's
    gradient to `.grad` in parts and not their sum, and its hooks run more than once.
    """
    nodes = {node.name: node for node in joint.module.graph.nodes}
    names = {each.value: each.name for each in joint.inputs}
    for _, target in joint.gradients:
        tags = [user.meta[META] for user in nodes[target].users if user.op == "call_function"]
        places = {tag.region for tag in tags if tag.phase is Phase.F}
        if len(places) > 1 and places & reentrant:
            said = " and ".join(sorted(each or "outside of all checkpoints" for each in places))
            raise UnsupportedError(
                f"{names[target]} is read in {said}, and a checkpoint with use_reentrant=True adds its gradient to "
                f".grad by itself, which rounds otherwise than one sum. Use use_reentrant=False."
            )


def refuse_effects(graph: fx.Graph) -> None:
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


def refuse_other_roundings(model: nn.Module, graph: fx.Graph, autocast: set[torch.dtype]) -> None:
    """Raise UnsupportedError for modules and ops of torch of which a functional graph rounds otherwise than eager."""
    _refuse_products(graph)
    called = {compat.annotation(node, "fqn") for node in graph.nodes}
    for fqn, module in model.named_modules():
        if fqn not in called:
            continue
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


def _refuse_products(graph: fx.Graph) -> None:
    """Raise UnsupportedError for a gradient of `torch.prod`.

    Eager looks for zeros among the factors, and divides the product by each factor if there are none. A tracer cannot
    look: for each factor it multiplies those in front of it and those behind it, in cumulative products from 1 on.
    """
    aten = torch.ops.aten
    products = [node for node in graph.nodes if node.target in (aten.prod.default, aten.prod.dim_int)]
    joined = (node.args[0] for node in graph.find_nodes(op="call_function", target=aten.cumprod.default))
    begins = (node.args[0][0] for node in joined if node.target is aten.cat.default and compat.is_backward(node))
    if products and any(node.target is aten.ones.default for node in begins):
        raise UnsupportedError(
            f"Module {compat.annotation(products[0], 'fqn') or '(the model itself)'!r} takes the gradient of "
            f"torch.prod, which a captured graph computes in another way than eager, so that the results would differ "
            f"in their last bits. Multiply the factors one by one."
        )


def refuse_weights_summed_in_turn(joint: JointGraph, autocast: set[torch.dtype]) -> None:
    """Raise UnsupportedError for a weight that autocast casts, with two more gradients of uses that it does not cast.

    In an autocast block around a step eager casts a weight in the first microbatch only. The gradient that comes
    through the cast is added between others in the first microbatch, and behind them in later ones: other bits.
    """
    nodes = {node.name: node for node in joint.module.graph.nodes}
    params = {each.value: each.name for each in joint.inputs if each.kind is InputKind.PARAM}
    for value, target in joint.gradients:
        casts = [user for user in nodes[target].users if user.target is torch.ops.aten._to_copy.default]
        if target in params and any(cast.meta["val"].dtype in autocast for cast in casts):
            terms = _terms(nodes[value])
            if terms > 2:
                raise UnsupportedError(
                    f"Parameter {params[target]} has {terms} gradients in a microbatch, one of them through a cast "
                    f"that autocast makes once for all microbatches: eager sums them in another order in the first "
                    f"one than in later ones. Use torch.autocast(..., cache_enabled=False), or enter it in forward, "
                    f"with no torch.autocast block, not even one that is off, around the step."
                )


def _terms(gradient: fx.Node) -> int:
    """How many gradients are summed."""
    if not compat.is_gradient_accumulation(gradient):
        return 1
    return sum(map(_terms, gradient.all_input_nodes))


def refuse_hidden_state(joint: JointGraph, registered: Mapping[str, torch.Tensor]) -> None:
    """Raise UnsupportedError for state that the graph holds as a constant, or writes to though it is no buffer."""
    storages = {compat.storage_id(tensor): name for name, tensor in registered.items()}
    for each in joint.inputs:
        constant = getattr(joint.module, each.name) if each.kind is InputKind.CONSTANT else None
        if not isinstance(constant, torch.Tensor):
            continue
        name = storages.get(compat.storage_id(constant))
        if constant.requires_grad or name is not None:
            what = f"the tensor of {name}" if name else f"a trained tensor of shape {tuple(constant.shape)}"
            raise UnsupportedError(
                f"The forward reads {what} through something that is no registered parameter or buffer, such as a "
                f"plain list; its gradient would be lost. Register it, for example in an nn.ParameterList."
            )
    inputs = {each.value: each for each in joint.inputs}
    for _, target in joint.mutations:
        if inputs[target].kind is not InputKind.BUFFER:
            refuse_write(inputs[target].name, inputs[target].kind)


def refuse_carried_state(joint: JointGraph, before: Before) -> None:
    """Raise UnsupportedError for an attribute whose old tensor the graph reads and that forward assigns anew."""
    constants = [getattr(joint.module, each.name) for each in joint.inputs if each.kind is InputKind.CONSTANT]
    read = {compat.storage_id(each) for each in constants if isinstance(each, torch.Tensor)}
    for name, tensor in before.replaced.items():
        if compat.storage_id(tensor) in read:
            raise UnsupportedError(
                f"The forward reads the attribute {name} and assigns it anew, and a step would not carry it from one "
                f"microbatch to the next. Register it as a buffer."
            )


def refuse_sparse_gradients(joint: JointGraph) -> None:
    """Raise UnsupportedError for a gradient that is no dense tensor."""
    nodes = {node.name: node for node in joint.module.graph.nodes}
    names = {each.value: each.name for each in joint.inputs}
    for value, target in joint.gradients:
        if nodes[value].meta["val"].layout is not torch.strided:
            raise UnsupportedError(
                f"{names[target]} gets a sparse gradient, which cannot be scheduled. Use sparse=False."
            )


def refuse_write(name: str, kind: InputKind) -> NoReturn:
    """Raise UnsupportedError for an input that forward writes to."""
    if kind is InputKind.PARAM:
        what, remedy = "a parameter", "Do it after the optimizer's step (max_norm of an embedding is one cause)."
    elif kind is InputKind.BUFFER:
        what, remedy = "a buffer, with a value that requires a gradient", "Detach what is written."
    else:
        what, remedy = "a tensor of the microbatch", "Write to a copy."
    raise UnsupportedError(f"The forward writes in place to {name}, {what}; a step can only update buffers. {remedy}")


def check_replacement(fqn: str, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
    """Raise UnsupportedError for a buffer that forward replaces by what cannot be written into it."""
    if new is None or (old is not None and (old.shape, old.dtype) != (new.shape, new.dtype)):
        was, now = (
            "None" if each is None else f"a tensor of shape {tuple(each.shape)} and dtype {each.dtype}"
            for each in (old, new)
        )
        raise UnsupportedError(
            f"Buffer {fqn} is {was} before forward and {now} behind it; a step can only write a new value of the same "
            f"shape and dtype. Give it its final shape and dtype in __init__."
        )
    if old is None and compat.has_symbols(new.shape):
        raise UnsupportedError(
            f"Buffer {fqn} gets its first value in forward, of shape {tuple(new.shape)}, which the contents of tensors "
            f"decide. Give it its final shape and dtype in __init__."
        )
