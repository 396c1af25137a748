"""Small models and comparisons that several test files use."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import fxoverlap as fxo
from fxoverlap.flow import needs_of
from fxoverlap.ir import ChunkGraph, Phase, ScheduleNode, nodes_of
from fxoverlap.microbatch import as_microbatch
from fxoverlap.models import HybridModel

TOY = {"dim": 16, "vocab_size": 32, "heads": 2, "kv_heads": 1, "num_experts": 4, "expert_dim": 8, "top_k": 2}


def toy(pattern: str = "[*E][*E]", group: dist.ProcessGroup | None = None, **changes: Any) -> HybridModel:
    """The reference model in a size in which a step takes milliseconds."""
    return HybridModel(pattern, group=group, seed=0, **{**TOY, **changes})


def batches(count: int, rank: int = 0, tokens: int = 8, vocab: int = 32, seed: int = 0) -> list[tuple]:
    """`count` microbatches of one sequence: (tokens, targets), different on each rank."""
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return [tuple(torch.randint(0, vocab, (1, tokens), generator=generator) for _ in range(2)) for _ in range(count)]


def call(model: nn.Module, microbatch: Any) -> Any:
    """Call a model on a microbatch in any of its forms."""
    given = as_microbatch(microbatch)
    return model(*given.args, **given.kwargs)


def result_of(returned: Any) -> tuple[torch.Tensor, Any]:
    """The loss and the rest of what a model's forward returned, as `StepResult` has them."""
    if isinstance(returned, dict):
        return returned["loss"], {key: value for key, value in returned.items() if key != "loss"}
    return (returned[0], tuple(returned[1:])) if isinstance(returned, tuple) else (returned, None)


def eager_step(model: nn.Module, microbatches: Sequence[Any], grad_scale: Any = 1.0) -> list[torch.Tensor]:
    """The oracle: forward and backward of each microbatch in turn; the losses."""
    losses = []
    for microbatch in microbatches:
        loss, _ = result_of(call(model, microbatch))
        own = as_microbatch(microbatch).grad_scale
        (loss * (grad_scale if own is None else own)).backward()
        losses.append(loss.detach())
    return losses


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are equal; unlike `torch.equal`, which takes -0.0 for 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(each.detach().contiguous().view(-1).view(torch.uint8) for each in (a, b)))


def differences(eager: nn.Module, overlapped: nn.Module) -> list[str]:
    """Names of the parameters whose gradient, and of the parameters and buffers whose value, differ in any bit."""
    found = []
    other = dict(overlapped.named_parameters())
    for name, param in eager.named_parameters():
        ours = other[name]
        if not same_bits(param, ours):
            found.append(f"value of {name}")
        if (param.grad is None) != (ours.grad is None):
            found.append(f"grad of {name}: {'none' if ours.grad is None else 'some'}, eager has the other")
        elif param.grad is not None and ours.grad is not None and not same_bits(param.grad, ours.grad):
            found.append(f"grad of {name} by {(param.grad - ours.grad).abs().max().item()}")
    buffers = dict(overlapped.named_buffers())
    found += [f"buffer {name}" for name, buffer in eager.named_buffers() if not same_bits(buffer, buffers[name])]
    return found


def train_both(
    model: nn.Module | fxo.OverlappedModel,
    make_batches: Callable[[int], Sequence[Any]],
    config: fxo.OverlapConfig | None = None,
    steps: int = 3,
) -> list[str]:
    """Train a model and a copy side by side, overlapped and eager; every difference in any bit, by step."""
    overlapped = model if isinstance(model, fxo.OverlappedModel) else fxo.transform(model, config)
    model = overlapped.module
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (eager, model)]
    scale = overlapped.config.grad_scale
    found: list[str] = []
    for step in range(steps):
        microbatches = make_batches(step)
        torch.manual_seed(step)
        losses = eager_step(eager, microbatches, scale)
        state = torch.get_rng_state()
        torch.manual_seed(step)
        result = overlapped.step(microbatches)
        if not torch.equal(state, torch.get_rng_state()):
            found.append(f"step {step}: generator state")
        for i, (a, b) in enumerate(zip(losses, result.losses, strict=True)):
            if not same_bits(a, b):
                found.append(f"step {step}: loss {i}: {a.item()} eager, {b.item()} overlapped")
        found += [f"step {step}: {each}" for each in differences(eager, model)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # The last update is compared here; at every other step the values are compared with the gradients.
    return found + [f"after the last step: {each}" for each in differences(eager, model)]


class Made(nn.Module):
    """A linear layer, a scalar parameter, a buffer, and a loss made of them by a function of the module and the input.

    `more` are attributes to set: parameters, modules, or plain values.
    """

    def __init__(self, loss: Callable[..., Any], **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.p = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.ones(4))
        for name, value in more.items():
            setattr(self, name, value)
        self.loss = loss

    def forward(self, *args: Any) -> Any:
        return self.loss(self, *args)


def rows(step: int, count: int = 3, size: int = 3) -> list[tuple[torch.Tensor]]:
    """`count` microbatches of `size` rows for `Made`."""
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(size, 4, generator=generator),) for _ in range(count)]


class RawMoE(nn.Module):
    """A residual MoE block on functional collectives with list splits, as other people's models have it."""

    def __init__(self, dim: int, experts: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        # A name and not a ProcessGroup, which cannot be deep-copied.
        self.group, self.ranks, self.experts = group.group_name, group.size(), experts
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, experts, bias=False)
        self.w = nn.Parameter(torch.randn(dim, dim) / dim**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, 1)
        weight, choice = self.router(flat).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        counts = (choice[:, None] == torch.arange(self.experts)).sum(0)
        received = funcol.all_to_all_single(counts, None, None, self.group)
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        got = received.view(self.ranks, -1).sum(1).tolist()
        for size in (*sent, *got):
            torch._check(size >= 0)
        tokens = funcol.all_to_all_single_autograd(flat[order], got, sent, self.group)
        weights = funcol.all_to_all_single_autograd(weight[order], got, sent, self.group)
        hidden = torch.relu(tokens @ self.w) * weights[:, None]
        back = funcol.all_to_all_single_autograd(hidden, sent, got, self.group)
        return x + torch.zeros_like(flat).index_copy(0, order, back).view_as(x)


class RawModel(nn.Module):
    """Embedding, raw MoE blocks under any attribute name, head, cross entropy."""

    def __init__(self, group: dist.ProcessGroup, blocks: int = 2, name: str = "layers", experts: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.embed = nn.Embedding(32, 16)
        setattr(self, name, nn.ModuleList(RawMoE(16, experts, group) for _ in range(blocks)))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in getattr(self, self.name):
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def random_order(
    chunks: Mapping[str, ChunkGraph],
    choose: random.Random,
    before: Iterable[tuple[tuple[str, str], tuple[str, str]]] = (),
    without: Sequence[Phase] = (),
) -> list[tuple[ScheduleNode, str]]:
    """Any order of the nodes of a plan in which every value is made before it is read and effects keep theirs.

    Args:
        chunks: by `Instance.mb`.
        choose: takes one of the nodes that are ready.
        before: what else must come before what, as pairs of (name of the node, microbatch).
        without: phases whose nodes are left out.
    """
    left = [(node, mb) for mb, chunk in chunks.items() for node in nodes_of(mb, chunk) if node.phase not in without]
    needs = {
        (name, mb): {(need.node, mb) for need in own}
        for mb, chunk in chunks.items()
        for name, own in needs_of(mb, chunk).items()
    }
    for earlier, later in before:
        needs[later].add(earlier)
    order = []
    while left:
        waiting = {(node.name, mb) for node, mb in left}
        order.append(choose.choice([(node, mb) for node, mb in left if not needs[node.name, mb] & waiting]))
        left.remove(order[-1])
    return order


class RandomOrder:
    """A policy: `random_order`."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def __call__(self, f: Any, b: Any, costs: Any, config: Any) -> list[tuple[ScheduleNode, str]]:
        return random_order({mb: each for mb, each in (("F", f), ("B", b)) if each is not None}, self.random)
