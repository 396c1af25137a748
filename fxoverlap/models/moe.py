"""Mixture-of-experts layers: dropless, with the experts spread over a process group, or all local without one."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fxoverlap import ops
from fxoverlap.models.mlp import SwiGLU
from fxoverlap.models.tracker import LossTracker

ROUTERS = ("softmax", "sigmoid")


class MoE(nn.Module):
    """Pre-norm mixture of E SwiGLU experts with residual: hidden [..., dim] -> (hidden [..., dim], auxiliary loss).

    Rank r of a group of n holds experts r * E / n up to (r + 1) * E / n. Tokens travel to them and back in two
    exchanges, their numbers in one before. With `group=None` all experts are here and no shape depends on data.

    Router scores are fp32, also in a bf16 model and under autocast (fp64 in fp64). So is the auxiliary loss [], over
    this rank's tokens: `aux_loss * E * sum_e(share of the assignments * mean share of the scores)` plus
    `z_loss * mean(logsumexp(logits) ** 2)`; None if both coefficients are 0.

    Args:
        expert_dim: width of an expert.
        top_k: experts a token.
        router: "softmax", weights are softmax scores; "sigmoid", weights are the chosen scores divided by their sum.
        selection_bias: experts are chosen by score + `expert_bias` (buffer, fp32 [E], kept in fp32 by dtype casts).
            While training, forward adds its assignments to `tokens_per_expert` (buffer, int64 [E]); see
            `update_expert_bias`.
        shared_dim: width of one more expert that sees every token; 0 for none.
        tracker, layer: where forward adds its auxiliary losses while training, and as what layer; None: nowhere.
        generator: of the weights. Every rank draws those of all experts and keeps its slice, so that models of all
            group sizes are the same.

    Raises:
        ValueError: an argument is not what it must be; the message says what.
    """

    expert_bias: Tensor
    tokens_per_expert: Tensor

    def __init__(
        self,
        dim: int,
        num_experts: int,
        expert_dim: int,
        *,
        top_k: int,
        router: str = "softmax",
        aux_loss: float = 0.0,
        z_loss: float = 0.0,
        selection_bias: bool = False,
        shared_dim: int = 0,
        dropout: float = 0.0,
        tracker: LossTracker | None = None,
        layer: int = 0,
        group: dist.ProcessGroup | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        if router not in ROUTERS:
            raise ValueError(f"MoE: router must be one of {', '.join(ROUTERS)}, got {router!r}; choose one of these")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"MoE: top_k must be 1 to num_experts={num_experts}, got {top_k}; change one of them")
        if num_experts % size:
            raise ValueError(
                f"MoE: num_experts must be a multiple of the group size {size}, got {num_experts}; change one of them"
            )
        self.num_experts, self.local_experts, self.top_k = num_experts, num_experts // size, top_k
        self.router_kind, self.aux_loss, self.z_loss, self.dropout = router, aux_loss, z_loss, dropout
        self.group, self.tracker, self.layer = group, tracker, layer

        def experts(*shape: int) -> nn.Parameter:
            every = nn.init.normal_(torch.empty(num_experts, *shape), std=shape[0] ** -0.5, generator=generator)
            return nn.Parameter(every.chunk(size)[rank].clone())

        self.norm = nn.RMSNorm(dim)
        self.router = nn.Linear(dim, num_experts, bias=False)
        nn.init.normal_(self.router.weight, std=dim**-0.5, generator=generator)
        self.w_gate_up = experts(dim, 2 * expert_dim)
        self.w_down = experts(expert_dim, dim)
        self.shared = SwiGLU(dim, shared_dim, generator=generator) if shared_dim else None
        self.selection_bias = selection_bias
        if selection_bias:
            self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))
            self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.int64))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.norm(hidden).flatten(0, -2)
        weights, experts, counts, aux = self._route(x)
        order = experts.argsort(stable=True)
        inverse = _inverse(order)
        rows = _Gather.apply(x, order // self.top_k, inverse, self.top_k)
        if self.group is None:
            rows = self._local(rows, counts.cpu())
        else:
            rows = self._remote(rows, counts, self.group)
        rows = _Gather.apply(rows, inverse, order, 1).view(len(x), self.top_k, -1)
        out = (rows * weights.to(rows.dtype).unsqueeze(-1)).sum(1)
        if self.shared is not None:
            out = out + self.shared(x)
        if self.dropout:
            out = F.dropout(out, self.dropout, self.training)
        return hidden + out.view_as(hidden), aux

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Choose experts for the tokens [T, dim].

        Returns weights fp32 [T, k], experts int64 [T * k], assignments of each expert int64 [E], the auxiliary loss.
        """
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            logits = F.linear(x.to(dtype), self.router.weight.to(dtype))
        scores = logits.softmax(-1) if self.router_kind == "softmax" else logits.sigmoid()
        if self.selection_bias:
            experts = (scores + self.expert_bias).topk(self.top_k).indices
            weights = scores.gather(1, experts)
        else:
            weights, experts = scores.topk(self.top_k)
        if self.router_kind == "sigmoid":
            weights = _normalize(weights)
        experts = experts.flatten()
        counts = experts.new_zeros(self.num_experts).scatter_add(0, experts, torch.ones_like(experts))
        if self.selection_bias and self.training:
            self.tokens_per_expert.add_(counts)
        return weights, experts, counts, self._auxiliary_loss(logits, scores, counts)

    def _auxiliary_loss(self, logits: Tensor, scores: Tensor, counts: Tensor) -> Tensor | None:
        tokens = len(logits)
        losses = {}
        if self.aux_loss:
            shares = scores if self.router_kind == "softmax" else _normalize(scores)
            scale = self.aux_loss * self.num_experts / (tokens * self.top_k) / tokens
            losses["aux"] = (shares.sum(0) * counts).sum() * scale
        if self.z_loss:
            losses["z"] = logits.logsumexp(-1).square().sum() * (self.z_loss / tokens)
        if self.tracker is not None and self.training:
            for kind, loss in losses.items():
                self.tracker.add(kind, self.layer, loss)
        each = list(losses.values())
        return sum(each[1:], each[0]) if each else None

    def _remote(self, rows: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Send rows [T * k, dim], sorted by expert, to their experts' ranks; the results, in the same order."""
        out_splits, in_splits, out_rows, recv_counts = ops.exchange_counts(counts, group)
        received = ops.exchange(rows, out_splits, in_splits, out_rows, group)
        # These are in order of (source, local expert), and there is one block of rows for each such pair.
        block = torch.repeat_interleave(recv_counts.flatten().to(rows.device), output_size=out_rows)
        order = (block % self.local_experts).argsort(stable=True)
        inverse = _inverse(order)
        results = self._local(_Gather.apply(received, order, inverse, 1), recv_counts.sum(0))
        return ops.exchange(_Gather.apply(results, inverse, order, 1), in_splits, out_splits, rows.shape[0], group)

    def _local(self, rows: Tensor, group_rows: Tensor) -> Tensor:
        """This rank's experts on rows [N, dim] sorted by expert; `group_rows` is int64 CPU [local experts]."""
        gate, up = ops.grouped_mm(rows, self.w_gate_up, group_rows).chunk(2, -1)
        return ops.grouped_mm(F.silu(gate) * up, self.w_down, group_rows)

    @torch.no_grad()
    def update_expert_bias(self, rate: float) -> None:
        """Move the bias of every expert by `rate`: up if it had less than the mean number of assignments, down if more.

        Sums `tokens_per_expert` over the group (all ranks must call this), and sets it to zero. Not to be called
        while a step runs.

        Raises:
            ValueError: the layer was built without `selection_bias`.
        """
        if not self.selection_bias:
            raise ValueError("MoE.update_expert_bias: this layer has no bias; build it with selection_bias=True")
        counts = self.tokens_per_expert
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        # In integers, where counts that are equal to their mean are seen to be.
        self.expert_bias += rate * (counts.sum() - counts * self.num_experts).sign()
        counts.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MoE":
        # A cast of the module to bf16 would round the bias to steps coarser than its updates.
        bias = self.expert_bias if self.selection_bias else None
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "MoE":
        # A process group cannot be copied: the copy of the layer uses the same one.
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied


class _Gather(torch.autograd.Function):
    """`x[index]`; the index holds each row of x `copies` times, and `inverse` says where they went, in order of x.

    So the gradient is a gather too, and a sum in a fixed order: no atomic additions, the same bits every time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = grad.index_select(0, inverse)
        if ctx.copies > 1:
            grad = grad.view(-1, ctx.copies, grad.shape[1]).sum(1)
        return grad, None, None, None


def _inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation, int64 [n]."""
    # A quarter of the time of a second argsort. What is scattered into does not matter, every element is overwritten.
    return order.scatter(0, order, torch.arange(order.shape[0], device=order.device))


def _normalize(scores: Tensor) -> Tensor:
    """Scores [T, n] divided by their sums over n."""
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)  # all of them may underflow to zero
