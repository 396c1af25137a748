"""Residual blocks of the random models: what people write between a norm and a residual, one table entry each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Plain(nn.Module):
    """A residual block around a linear layer and a function of the table `PLAIN`; `make` adds what the function uses.

    hidden [batch, positions, dim] -> the same shape.
    """

    def __init__(self, kind: str, dim: int, dropout: float) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, dim)
        MAKE.get(kind, lambda block, dim: None)(self, dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        result = PLAIN[self.kind](self, self.norm(x), mask)
        return x + result.to(x.dtype)


class Cube(torch.autograd.Function):
    """x ** 3, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


def masked(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    y = m.linear(x)
    return y if mask is None else y.masked_fill_(mask[..., None], 0.5)


def slice_write(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    y = m.linear(x) * 2
    y[..., :2] = 0
    y[:, 0].mul_(3)
    return y


def scan(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for step in m.linear(x).unbind(1):
        state = state * m.decay.sigmoid() + step
        states.append(state)
    return torch.stack(states, 1)


def running_mean(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    y = m.linear(x)
    if m.training:
        m.mean.mul_(0.9).add_(y.detach().float().mean((0, 1)), alpha=0.1)
    return y * m.mean


def mean_before(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    y = m.linear(x) * m.mean.clone()
    m.mean.add_(y.detach().float().mean((0, 1)))
    return y


def counter(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    y = m.linear(x)
    chosen = y.detach().argmax(-1).flatten()
    m.seen += len(chosen)
    m.histogram.add_(F.one_hot(chosen, y.shape[-1]).sum(0))
    return y


def by_data(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    y = m.linear(x).flatten(0, 1)
    first = (y[:, 0] > 0).sum().item()
    torch._check(first >= 0)
    torch._check(first <= len(y))
    return torch.cat((y[:first].tanh(), y[first:])).view_as(x)


def by_loop(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    """Experts in a loop over the rows that chose them, some of which may be none."""
    flat = x.flatten(0, 1)
    choice = m.linear(flat).argmax(-1) % len(m.experts)
    out = torch.zeros_like(flat)
    for i, weight in enumerate(m.experts):
        rows = (choice == i).nonzero().flatten()
        out = out.index_add(0, rows, (flat[rows] @ weight).to(out.dtype))
    return out.view_as(x)


def gate_without_gradient(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    with torch.no_grad():
        gate = m.linear(x).sigmoid()
    return m.second(x) * gate


def straight_through(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    y = m.linear(x)
    return y + (y.round() - y).detach()


def noisy(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    y = m.linear(x)
    return y + torch.randn_like(y) * 0.1 if m.training else y


def sampled(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    y = m.linear(x)
    keep = torch.bernoulli(torch.full_like(y[..., :1], 0.7))
    return torch.where(keep.bool(), y, -y) * torch.rand(())


def halves(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    a, b = m.linear(x).chunk(2, -1)
    return torch.cat((2 * a, 5 * b.sigmoid() * a), -1)


def sorted_rows(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    values, order = m.linear(x).sort(dim=-1, stable=True)
    return values * order.to(values.dtype) * 0.1


def top_two(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    y = m.linear(x)
    values, places = y.softmax(-1).topk(2, -1)
    return torch.zeros_like(y).scatter(-1, places, values.to(y.dtype)) * y


def masked_attention(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    return m.attention(x, x, x, need_weights=False)[0]


def attention_with_dropout(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    y = m.linear(x)
    keys = None if mask is None else ~mask[:, None, :] | torch.eye(x.shape[1], dtype=torch.bool)
    return F.scaled_dot_product_attention(y, x.to(y.dtype), y, keys, m.dropout if m.training else 0.0)


def index_put(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    y = m.linear(x)
    m.last[y.detach().argmax(-1)[:, 0]] = y.detach()[:, 0, :1].to(m.last.dtype)
    return y * m.last.mean()


def drawn_without_replacement(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    y = m.linear(x)
    places = torch.multinomial(y.detach().float().softmax(-1).flatten(0, 1), 2).view(*y.shape[:2], 2)
    return y.scatter(-1, places, 0.0)


def positions(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    return m.linear(x) + m.table(torch.arange(x.shape[1]) % 3)


def renormed(m: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    """A fused norm that also gives the residual on."""
    y = m.linear(x)
    residual = x + y
    return F.rms_norm(residual, residual.shape[-1:], m.second.weight[0]) + residual


PLAIN: dict[str, Callable[[Any, Tensor, Tensor | None], Tensor]] = {
    "linear": lambda m, x, mask: m.linear(x),
    "relu_": lambda m, x, mask: F.relu_(m.linear(x)),
    "masked": masked,
    "slice write": slice_write,
    "scan": scan,
    "cumsum": lambda m, x, mask: m.linear(x).cumsum(1) * 0.1,
    "cummax": lambda m, x, mask: m.linear(x).cummax(1).values,
    "conv": lambda m, x, mask: m.conv(m.linear(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2),
    "batch norm": lambda m, x, mask: m.batch_norm(m.linear(x).transpose(1, 2)).transpose(1, 2),
    "running mean": running_mean,
    "mean before": mean_before,
    "counter": counter,
    "functional": lambda m, x, mask: x @ m.linear.weight.t() @ m.linear.weight,
    "twice": lambda m, x, mask: m.linear(m.linear(x).tanh()),
    "function": lambda m, x, mask: Cube.apply(m.linear(x)),
    "by data": by_data,
    "by loop": by_loop,
    "dropout": lambda m, x, mask: F.dropout(m.linear(x), m.dropout, m.training),
    "dropout_": lambda m, x, mask: F.dropout(m.linear(x), m.dropout, m.training, inplace=True),
    "noise": noisy,
    "sampled": sampled,
    "no_grad": gate_without_gradient,
    "straight through": straight_through,
    "halves": halves,
    "sort": sorted_rows,
    "top two": top_two,
    "einsum": lambda m, x, mask: torch.einsum("bsd,ed,bse->bse", x, m.linear.weight, x),
    "encoder": lambda m, x, mask: m.encoder(x),
    "sdpa": attention_with_dropout,
    "index put": index_put,
    "multinomial": drawn_without_replacement,
    "positions": positions,
    "fft": lambda m, x, mask: torch.fft.fft2(m.linear(x).float()).real * 0.1,
    "pool": lambda m, x, mask: F.max_pool1d(m.linear(x).transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "group norm": lambda m, x, mask: m.groups(m.linear(x).transpose(1, 2)).transpose(1, 2),
    "variance": lambda m, x, mask: m.linear(x) / (m.linear(x).var(-1, keepdim=True) + 1).sqrt(),
    "spectral norm": lambda m, x, mask: m.normed(x),
    "weight norm": lambda m, x, mask: m.normed(x),
    "mha": masked_attention,
    "scalar": lambda m, x, mask: m.linear(x) * m.scalar + m.scalar,
    "nothing": lambda m, x, mask: torch.zeros_like(x),
    "residual norm": renormed,
    "expanded": lambda m, x, mask: m.linear(x).mean(1, keepdim=True).expand_as(x) + m.decay.expand_as(x),
}
"""What a block computes, of the block, the normed hidden state and the mask."""


def _buffers(**values: Callable[[int], Tensor]) -> Callable[[Any, int], None]:
    def make(block: nn.Module, dim: int) -> None:
        for name, value in values.items():
            block.register_buffer(name, value(dim))

    return make


def _modules(**kinds: Callable[[int], Any]) -> Callable[[Any, int], None]:
    def make(block: nn.Module, dim: int) -> None:
        for name, kind in kinds.items():
            setattr(block, name, kind(dim))

    return make


def _square(dim: int) -> nn.Linear:
    return nn.Linear(dim, dim)


MAKE: dict[str, Callable[[Any, int], None]] = {
    "scan": _modules(decay=lambda dim: nn.Parameter(torch.zeros(dim))),
    "expanded": _modules(decay=lambda dim: nn.Parameter(torch.zeros(dim))),
    "scalar": _modules(scalar=lambda dim: nn.Parameter(torch.tensor(0.5))),
    "conv": _modules(conv=lambda dim: nn.Conv1d(dim, dim, 3, padding=2, groups=dim)),
    "batch norm": _modules(batch_norm=nn.BatchNorm1d),
    "running mean": _buffers(mean=torch.ones),
    "mean before": _buffers(mean=torch.ones),
    "counter": _buffers(
        seen=lambda dim: torch.zeros((), dtype=torch.int64), histogram=lambda dim: torch.zeros(dim, dtype=torch.int64)
    ),
    "no_grad": _modules(second=_square),
    "residual norm": _modules(second=_square),
    "by loop": _modules(
        experts=lambda dim: nn.ParameterList(nn.Parameter(torch.randn(dim, dim) / dim**0.5) for _ in range(3))
    ),
    "encoder": _modules(encoder=lambda dim: nn.TransformerEncoderLayer(dim, 2, 8, 0.2, batch_first=True)),
    "index put": _buffers(last=lambda dim: torch.zeros(dim, 1)),
    "positions": _modules(table=lambda dim: nn.Embedding(3, dim, padding_idx=1, scale_grad_by_freq=True)),
    "group norm": _modules(groups=lambda dim: nn.GroupNorm(2, dim)),
    "spectral norm": _modules(normed=lambda dim: nn.utils.parametrizations.spectral_norm(_square(dim))),
    "weight norm": _modules(normed=lambda dim: nn.utils.parametrizations.weight_norm(_square(dim))),
    "mha": _modules(attention=lambda dim: nn.MultiheadAttention(dim, 2, batch_first=True)),
}
"""What a block has besides its norm and linear layer."""
