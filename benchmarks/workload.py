"""What the benchmarks run: the standard model and data, the eager step, and the comparison of two steps' results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxoverlap.config import Recompute
from fxoverlap.models import HybridModel

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. The defaults are the standard configuration of this project's figures."""

    rate: str = "1gbit"  # of the link, in tc's notation
    microbatches: int = 8
    repeats: int = 5
    pattern: str = "[*E][*E][*E][*E]"
    dim: int = 256
    tokens: int = 512  # in a microbatch, as one sequence
    vocab: int = 1024
    experts: int = 16
    expert_dim: int = 128
    top_k: int = 6
    recompute: Recompute | None = None

    def model(self, group: dist.ProcessGroup | None) -> HybridModel:
        """Build the model; `group` is the expert-parallel one, None for all experts here and no exchange."""
        return HybridModel(
            self.pattern,
            dim=self.dim,
            vocab_size=self.vocab,
            num_experts=self.experts,
            expert_dim=self.expert_dim,
            top_k=self.top_k,
            group=group,
            seed=0,
        )

    def batches(self, rank: int) -> list[Batch]:
        """One step's microbatches of a rank: tokens and targets, int64 [1, tokens] each."""
        generator = torch.Generator().manual_seed(1 + rank)
        shape = (self.microbatches, 1, self.tokens + 1)
        ids = torch.randint(self.vocab, shape, generator=generator)
        return [(microbatch[:, :-1].contiguous(), microbatch[:, 1:].contiguous()) for microbatch in ids]


def eager_step(model: nn.Module, batches: Sequence[Batch], scale: float = 1.0) -> list[Tensor]:
    """Run forward and backward for one microbatch after the other; return the losses, detached and not scaled."""
    losses = []
    for batch in batches:
        loss = model(*batch)
        (loss * scale).backward()
        losses.append(loss.detach())
    return losses


def outcome(model: nn.Module, step: Callable[[], list[Tensor]]) -> list[Tensor | None]:
    """Run one step from no gradients; return its losses and every parameter's gradient, which is left None again."""
    model.zero_grad(set_to_none=True)
    losses = step()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return [*losses, *gradients]


def same(*results: Sequence[Tensor | None]) -> bool:
    """Whether all lists hold the same tensors, bit for bit, and None at the same places."""
    first = results[0]
    return all(len(other) == len(first) and all(map(_identical, first, other)) for other in results[1:])


def _identical(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    # As bytes: 0.0 == -0.0 and nan != nan are answers to another question.
    return torch.equal(*(each.detach().contiguous().flatten().view(torch.uint8) for each in (left, right)))


def everywhere(flag: bool) -> bool:
    """Whether the flag holds on every rank. Collective over the default group."""
    flags = torch.tensor([int(flag)])
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return bool(flags.item())
