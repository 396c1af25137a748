"""Models that use collectives beside their exchanges, for `test_collectives`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from toys import RawMoE

c10d = torch.ops._c10d_functional


@torch.library.custom_op("fxoverlap_tests::meet", mutates_args=())
def meet(x: Tensor) -> Tensor:
    """Return x when every rank is here."""
    dist.barrier()
    return x.clone()


@torch.library.custom_op("fxoverlap_tests::announce", mutates_args=())
def announce(x: Tensor) -> None:
    """Meet the other ranks and return nothing."""
    dist.barrier()


@torch.library.custom_op("fxoverlap_tests::tick", mutates_args=("clock",))
def tick(clock: Tensor) -> None:
    """Count the times at which every rank was here."""
    dist.barrier()
    clock.add_(1)


meet.register_fake(torch.empty_like)
meet.register_autograd(lambda ctx, grad: torch.ops.fxoverlap_tests.meet(grad))
announce.register_fake(lambda x: None)
tick.register_fake(lambda clock: None)


class Net(nn.Module):
    """Embedding, layers, head, summed cross entropy, which is zero without tokens."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")


class Aux(nn.Module):
    """`x + tanh(use(module, linear(x)))`: a layer that does something with other ranks."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear, self.use, self.group = nn.Linear(16, 16), use, group.group_name
        self.register_buffer("clock", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.use(self, self.linear(x)))


class SumGradients(torch.autograd.Function):
    """The entrance to a tensor-parallel region: nothing forward, an all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = funcol.all_reduce(grad.flatten(0, 1).sum(0), "sum", ctx.group)
        return grad + total, None


class SumResults(torch.autograd.Function):
    """The exit of a tensor-parallel region: an all-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return funcol.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def counts(m: Aux, x: Tensor) -> Tensor:
    """Load statistics: integers, without a gradient."""
    load = funcol.all_reduce((x.detach() > 0).flatten(0, 1).sum(0), "sum", m.group)
    return x * load.float().log1p()


def loss_term(m: Aux, x: Tensor) -> Tensor:
    return x * funcol.all_reduce(x.square().mean(), "sum", m.group)


def sequence_parallel(m: Aux, x: Tensor) -> Tensor:
    """Four positions of each rank are gathered, and the halves scattered."""
    part = x.flatten(0, 1)[:4]
    whole = funcol.all_gather_tensor_autograd(part, 0, m.group)
    back = funcol.reduce_scatter_tensor_autograd(torch.tanh(whole), "sum", 0, m.group)
    return x * back.mean(0)


def broadcast(m: Aux, x: Tensor) -> Tensor:
    return x * funcol.broadcast(x.detach().flatten(0, 1).sum(0), 1, m.group)


def tensor_parallel(m: Aux, x: Tensor) -> Tensor:
    hidden = torch.relu(SumGradients.apply(x, m.group))
    return hidden * SumResults.apply(hidden.flatten(0, 1).sum(0), m.group)


def meets(m: Aux, x: Tensor) -> Tensor:
    return torch.ops.fxoverlap_tests.meet(x)


def announces(m: Aux, x: Tensor) -> Tensor:
    torch.ops.fxoverlap_tests.announce(x.detach())
    return x


def ticks(m: Aux, x: Tensor) -> Tensor:
    torch.ops.fxoverlap_tests.tick(m.clock)
    return x


def unread(m: Aux, x: Tensor) -> Tensor:
    """What one rank uses and the other ignores, with a wait and without one."""
    first = funcol.all_reduce(x.detach().flatten(0, 1).sum(0), "sum", m.group)
    second = c10d.all_reduce(x.detach().flatten(0, 1).amax(0), "max", m.group)
    third = funcol.all_to_all_single(torch.arange(2.0), None, None, m.group)
    return x if dist.get_rank() == 1 else x * (first + c10d.wait_tensor(second) + third.sum())


def other_all_to_all(m: Aux, x: Tensor) -> Tensor:
    part = funcol.all_to_all_single_autograd(x.flatten(0, 1)[:4], None, None, m.group)
    return x * torch.tanh(part).mean(0)


USES = (
    counts,
    loss_term,
    sequence_parallel,
    broadcast,
    tensor_parallel,
    meets,
    announces,
    ticks,
)
"""What may run on the group of the exchanges or on another one."""


class Late(Net):
    """Launches in the first layer what is waited for behind the last."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, flying = self.embed(tokens), None
        for block in self.layers:
            x = block(x)
            if flying is None:
                flying = c10d.all_reduce(x.detach().flatten(0, 1).sum(0), "sum", self.layers[0].group)
        x = x * c10d.wait_tensor(flying).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Exchange(torch.autograd.Function):
    """A plain all-to-all with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, got: list[int], sent: list[int], group: str) -> Tensor:
        ctx.sizes = got, sent, group
        return funcol.all_to_all_single(x, got, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        got, sent, group = ctx.sizes
        return funcol.all_to_all_single(grad.contiguous(), sent, got, group), None, None, None


class MoE(RawMoE):
    """A raw MoE block; `first` chooses the experts, `ids` says which integers travel with the tokens, and when."""

    def __init__(self, group: dist.ProcessGroup, ids: str = "", own: bool = False, first: bool = False) -> None:
        super().__init__(16, 4, group)
        self.ids, self.own, self.first = ids, own, first

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weight, choice = self.router(flat).softmax(-1).max(-1)
        choice = choice * 0 if self.first else choice
        order = choice.argsort(stable=True)
        sent_counts = (choice[:, None] == torch.arange(self.experts)).sum(0)
        got_counts = funcol.all_to_all_single(sent_counts, None, None, self.group)
        sent, got = (each.view(self.ranks, -1).sum(1).tolist() for each in (sent_counts, got_counts))
        for size in (*sent, *got):
            torch._check(size >= 0)

        def send(rows: Tensor, back: bool = False) -> Tensor:
            sizes = (sent, got) if back else (got, sent)
            if self.own:
                return Exchange.apply(rows, *sizes, self.group)
            exchange = funcol.all_to_all_single_autograd if rows.is_floating_point() else funcol.all_to_all_single
            return exchange(rows, *sizes, self.group)

        parts = {"tokens": flat[order], "weights": weight[order]}
        ids = choice[order]
        parts = {"ids": ids, **parts} if self.ids == "before" else parts | ({"ids": ids} if self.ids else {})
        came = {name: send(part) for name, part in parts.items()}
        expert = came.get("ids", torch.zeros((), dtype=torch.int64)) % 2
        hidden = torch.relu(came["tokens"] @ self.w) * (came["weights"] * (1 + expert))[:, None]
        return x + torch.zeros_like(flat).index_copy(0, order, send(hidden, back=True)).view_as(x)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


class Gram(RawMoE):
    """Beside the exchanges a product that grows with the square of the length, and rows picked from it."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        gram = flat[:, :2] @ flat[:, :2].t()
        picked = gram.detach().gather(1, (torch.arange(16) % max(len(flat), 1)).expand(len(flat), -1))
        return super().forward(x) + (gram.sum(1, keepdim=True) + picked).view_as(x)


class VocabularyParallel(Net):
    """Each rank has 4 of 8 columns of the logits, all of them zero."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(MoE(group))
        self.head = nn.Linear(16, 4, bias=False)
        nn.init.zeros_(self.head.weight)
        self.group, self.first = group.group_name, 4 * group.rank()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.layers[0](self.embed(tokens)).flatten(0, 1)
        logits = self.head(SumGradients.apply(hidden[None], self.group)[0])
        largest = funcol.all_reduce(logits.detach().amax(1), "max", self.group)
        logits = logits - largest[:, None]
        total = SumResults.apply(logits.exp().sum(1), self.group)
        own = (targets.flatten() - self.first)[:, None] == torch.arange(4)
        chosen = SumResults.apply((logits * own).sum(1), self.group)
        return (total.log() - chosen).mean()


class ByLength(Aux):
    """Does on long microbatches what it does not on short ones."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] > 8 else self.linear(x)
