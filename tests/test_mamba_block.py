"""The Mamba-2 layer against its recurrence, token by token, and in a fused step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from toys import train_both

import fxoverlap as fxo
from fxoverlap.ir import Phase
from fxoverlap.models import Mamba2, MoE

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)

# In fp64, what is summed in another order differs by a few units of 1e-16, relative to terms of order ten.
CLOSE = {"rtol": 1e-11, "atol": 1e-11}
SMALL: dict[str, Any] = {"head_dim": 4, "state_dim": 3, "chunk": 4}


def layer(dim: int = 8, seed: int = 0, **options: Any) -> Mamba2:
    """A small layer, none of whose weights is one."""
    made = Mamba2(dim, generator=torch.Generator().manual_seed(seed), **{**SMALL, **options})
    torch.manual_seed(seed)
    for weight in (made.norm.weight, made.gated_norm, made.D):
        nn.init.normal_(weight)
    return made


def norm(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def recurrence(m: Mamba2, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
    """`Mamba2` token by token."""
    batch, positions, _ = hidden.shape
    share, n, p = m.heads // m.groups, m.state_dim, m.head_dim
    projected = (norm(hidden, torch.finfo(hidden.dtype).eps) * m.norm.weight) @ m.zxbcdt.weight.t()
    rows = []
    for r in range(batch):
        first, state = 0, hidden.new_zeros(m.heads, n, p)
        for t in range(positions):
            if t and ids is not None and ids[r, t] != ids[r, t - 1]:
                first, state = t, torch.zeros_like(state)
            z, _, dt = projected[r, t].split(m.sizes)
            taps = range(min(m.conv.weight.shape[1], t - first + 1))
            xbc = sum(m.conv.weight[:, -1 - i] * projected[r, t - i].split(m.sizes)[1] for i in taps) + m.conv.bias
            x, b, c = (xbc * torch.sigmoid(xbc)).split((m.heads * p, m.groups * n, m.groups * n))
            x, b, c = (
                x.view(m.heads, p),
                b.view(m.groups, n).repeat_interleave(share, 0),
                c.view(m.groups, n).repeat_interleave(share, 0),
            )
            dt = (dt + m.dt_bias).exp().log1p()
            state = state * (-m.A_log.exp() * dt).exp()[:, None, None] + dt[:, None, None] * b[:, :, None] * x[:, None]
            y = (c[:, :, None] * state).sum(1) + m.D[:, None] * x
            y = y.flatten() * z * torch.sigmoid(z)
            rows.append(m.out.weight @ (norm(y.view(m.groups, -1), 1e-5).flatten() * m.gated_norm))
    return hidden + torch.stack(rows).view_as(hidden)


def with_gradients(m: Mamba2, hidden: Tensor, forward: Callable[..., Tensor], *more: Any) -> Iterator[tuple]:
    """Name and value of the output, and of the gradients of the input and of every parameter."""
    out = forward(hidden, *more)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    names, parameters = zip(*m.named_parameters(), strict=True)
    return zip(("out", "hidden", *names), (out, *torch.autograd.grad(out, (hidden, *parameters), seed)), strict=True)


def assert_is_recurrence(m: Mamba2, hidden: Tensor, ids: Tensor | None = None, tolerance: float = 1e-11) -> None:
    got = with_gradients(m, hidden, m, ids)
    want = with_gradients(m, hidden, lambda h: recurrence(m, h, ids))
    for (name, ours), (_, theirs) in zip(got, want, strict=True):
        bounds = {"rtol": tolerance, "atol": tolerance * theirs.abs().max().clamp_min(1).item()}
        torch.testing.assert_close(ours, theirs, **bounds, msg=lambda text, name=name: f"{name}: {text}")


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=dtype).requires_grad_()


def packed_ids(*lengths: int, batch: int = 1) -> Tensor:
    return torch.repeat_interleave(torch.tensor(lengths)).expand(batch, -1)


CASES: dict[str, tuple[int, dict[str, Any], Tensor | None]] = {
    "chunks that divide": (8, {}, None),
    "chunks that do not": (13, {}, None),
    "chunk longer than the sequence": (7, {"chunk": 64}, None),
    "one position": (1, {}, None),
    "chunks of one": (5, {"chunk": 1}, None),
    "groups": (11, {"groups": 2}, None),
    "as many groups as heads": (6, {"groups": 4}, None),
    "one head": (9, {"head_dim": 16}, None),
    "wide state": (9, {"state_dim": 17, "conv_width": 2}, None),
    "no expansion": (5, {"expand": 1}, None),
    "packed at the edges of chunks": (12, {}, packed_ids(4, 8, batch=2)),
    "packed anywhere": (13, {"groups": 2}, torch.stack((packed_ids(3, 7, 3)[0], packed_ids(6, 1, 1, 5)[0]))),
    "packed, several in a chunk": (13, {"chunk": 7}, packed_ids(1, 2, 1, 1, 3, 5, batch=2)),
    "packed, ids from 5 on": (9, {}, 5 + 3 * packed_ids(5, 4, batch=2)),
}
"""Positions, options, sequence ids."""


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_recurrence(case: str) -> None:
    positions, options, ids = CASES[case]
    assert_is_recurrence(layer(**options).double(), inputs(2, positions, 8), ids)


@pytest.mark.parametrize("lengths", [(5, 1, 9), (4, 4), (2, 3, 3)])
def test_packed_is_the_pieces(lengths: tuple[int, ...]) -> None:
    m, hidden = layer(groups=2).double(), inputs(2, sum(lengths), 8)
    whole = with_gradients(m, hidden, m, packed_ids(*lengths, batch=2))
    pieces = with_gradients(m, hidden, lambda h: torch.cat([m(piece) for piece in h.split(lengths, 1)], 1))
    for (name, got), (_, want) in zip(whole, pieces, strict=True):
        torch.testing.assert_close(got, want, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


EXTREMES: dict[str, dict[str, float]] = {
    "everything decays at once": {"dt_bias": 100.0, "A_log": 5.0},
    "nothing decays": {"A_log": -100.0},
    "no step at all": {"dt_bias": -2000.0},
    "heads of every speed": {"dt_bias": 3.0, "A_log": 4.0},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", EXTREMES)
def test_extreme_decays(case: str, packed: bool) -> None:
    m = layer(chunk=16)
    for name, value in EXTREMES[case].items():
        spread = torch.linspace(0.0, 1.0, m.heads) if case == "heads of every speed" else 1.0
        nn.init.zeros_(m.get_parameter(name)).data.add_(value * spread)
    ids = packed_ids(9, 20, 11) if packed else None
    for name, value in with_gradients(m, inputs(1, 40, 8, dtype=torch.float32), m, ids):
        assert value.isfinite().all(), name
    # Logarithms of decays add up to 2e5 in a chunk, where a unit of the last digit is 3e-11.
    assert_is_recurrence(m.double(), inputs(1, 40, 8), ids, 1e-9)


def test_long_sequence_in_fp32() -> None:
    # Logarithms of decays add up to 300 in a chunk, where a unit of the last digit is 3e-5.
    m, hidden = layer(chunk=64), inputs(1, 1500, 8, dtype=torch.float32)
    m.dt_bias.data.fill_(-1.0)
    low = dict(with_gradients(m, hidden, m))
    high = dict(with_gradients(m.double(), hidden.detach().double().requires_grad_(), m))
    for name, got in low.items():
        error = (got - high[name]).norm() / high[name].norm()
        assert error < 1e-4, f"{name}: {error}"


def test_bfloat16() -> None:
    # Long chunks, in which the sums of logarithms of decays would not do with 8 bits.
    m, hidden = layer(16, head_dim=8, state_dim=8, groups=2, chunk=64), inputs(2, 150, 16, dtype=torch.float32)
    m.bfloat16().float()  # the same weights
    high = dict(with_gradients(m, hidden, m))
    low = dict(with_gradients(m.bfloat16(), hidden.detach().bfloat16().requires_grad_(), m))
    for name, got in low.items():
        assert got.dtype == torch.bfloat16, name
        # 8 bits of mantissa, some ten roundings in a row.
        error = (got.float() - high[name]).norm() / high[name].norm()
        assert error < 0.03, f"{name}: {error}"


def test_autocast() -> None:
    m, hidden = layer(16, seed=1), inputs(2, 13, 16, dtype=torch.float32)
    high = dict(with_gradients(m, hidden, m))

    def forward(h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m(h)

    for name, got in with_gradients(m, hidden, forward):
        assert got.dtype == torch.float32, name
        # As in bf16; A_log's gradient is a small difference of large ones, which other seeds find with errors of 0.06.
        error = (got - high[name]).norm() / high[name].norm()
        assert error < 0.03, f"{name}: {error}"


@pytest.mark.parametrize("ids", [None, packed_ids(2, 3)], ids=["one sequence", "packed"])
def test_second_derivatives(ids: Tensor | None) -> None:
    m = layer(2, head_dim=2, state_dim=2, chunk=3, groups=2).double()
    names, parameters = zip(*m.named_parameters(), strict=True)

    def forward(hidden: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(m, dict(zip(names, weights, strict=True)), (hidden, ids))

    assert torch.autograd.gradgradcheck(forward, (inputs(1, 5, 2), *parameters))


def test_weights() -> None:
    first, second = (Mamba2(64, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert first.heads == 4 and first.state_dim == 16 and first.head_dim == 32
    many = Mamba2(64, head_dim=1)
    rate, dt = many.A_log.exp(), F.softplus(many.dt_bias)
    assert 1 <= rate.min() < 2 and 15 < rate.max() <= 16 and (many.D == 1).all()
    assert 0.00099 < dt.min() < 0.002 and 0.05 < dt.max() < 0.101 and 0.005 < dt.median() < 0.02


def test_dropout_is_on_what_is_added() -> None:
    m, hidden = layer(dropout=0.5), inputs(1, 9, 8, dtype=torch.float32)
    torch.manual_seed(0)
    got = m(hidden) - hidden
    want = m.eval()(hidden) - hidden
    kept = got.abs() > 1e-6
    assert 0.2 < kept.float().mean() < 0.8
    torch.testing.assert_close(got[kept], 2 * want[kept], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"head_dim": 3}, {"groups": 3}, {"chunk": 0}, {"state_dim": 0}, {"groups": 0}, {"expand": 0}]
)
def test_errors(options: dict[str, int]) -> None:
    (name, value) = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"Mamba2: sizes must be positive.* {name}={value}[,;].*change one"):
        layer(**options)


# --- in a fused step --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers, M for Mamba and E for experts, between an embedding and a head."""

    def __init__(self, symbols: str, group: dist.ProcessGroup, **options: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(
            Mamba2(16, chunk=4, generator=generator, **options)
            if symbol == "M"
            else MoE(16, 4, 8, top_k=2, group=group, generator=generator)
            for symbol in symbols
        )

    def forward(self, tokens: Tensor, targets: Tensor, ids: Tensor | None = None) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)[0] if isinstance(layer, MoE) else layer(hidden, ids)
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), targets.flatten())


def microbatches(step: int, packed: bool = False, positions: int = 11, batch: int = 2) -> list[tuple]:
    generator = torch.Generator().manual_seed(step)
    made = []
    for _ in range(3):
        tokens, targets = torch.randint(0, 32, (2, batch, positions), generator=generator)
        ids = torch.randint(0, 2, (batch, positions), generator=generator).cumsum(1)
        made.append((tokens, targets, ids) if packed else (tokens, targets))
    return made


FUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("ME", {}, {}),
    "groups, dropout": ("ME", {"groups": 2, "dropout": 0.3}, {}),
    "packed": ("ME", {}, {"packed": True}),
    "one row, chunks that divide": ("ME", {}, {"positions": 8, "batch": 1}),
    "two logical layers": ("MEMME", {}, {}),
}


IN_BF16 = ("packed", "two logical layers")
"""By default these in bf16 and the others in fp32."""


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case}-{dtype}", marks=[pytest.mark.slow] * is_slow)
        for case in FUSED
        for dtype, is_slow in ((torch.float32, case in IN_BF16), (torch.bfloat16, case not in IN_BF16))
    ],
)
def test_fused_is_eager(group: dist.ProcessGroup, case: str, dtype: torch.dtype) -> None:
    symbols, options, form = FUSED[case]
    net = Net(symbols, group, **options).to(dtype)
    assert train_both(net, lambda step: microbatches(step, **form), steps=2) == []


def test_every_parameter_has_its_gradient_in_w(group: dist.ProcessGroup) -> None:
    net = Net("ME", group)
    overlapped = fxo.transform(net)
    overlapped.step(microbatches(0))
    chunk = overlapped.plan("FB").forward
    made_by = {value: node for node in chunk.nodes for value in node.writes}
    name = {each.value: each.name for each in chunk.joint.inputs}
    phases = {name[target]: made_by[value].phase for value, target in chunk.joint.gradients}
    assert phases.keys() == dict(net.named_parameters()).keys()
    assert {each for each, phase in phases.items() if phase is not Phase.W} == set()
    assert all(parameter.grad is not None for parameter in net.parameters())
