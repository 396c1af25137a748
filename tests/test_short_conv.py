"""The short convolution against the sum over taps, and what it gives a trace."""

import pytest
import torch
from torch import Tensor

from fxoverlap.models import ShortConv

torch.set_num_threads(1)

# In fp64, what is summed in another order differs by a few units of 1e-16, relative to terms of order one.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def plain(layer: ShortConv, x: Tensor, ids: Tensor | None) -> Tensor:
    """`ShortConv` position by position and tap by tap."""
    width, rows = layer.weight.shape[1], []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            row = torch.zeros_like(x[b, t]) if layer.bias is None else layer.bias
            for i in range(min(width, t + 1)):
                if ids is None or ids[b, t - i] == ids[b, t]:
                    row = row + layer.weight[:, width - 1 - i] * x[b, t - i]
            rows.append(row * torch.sigmoid(row) if layer.activation else row)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias, activation", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize(
    "batch, positions, channels, width",
    [(1, 7, 6, 4), (3, 13, 5, 4), (2, 2, 3, 4), (1, 1, 1, 4), (2, 5, 1, 1), (1, 4, 2, 7)],
)
def test_it_is_the_sum_over_taps(
    batch: int, positions: int, channels: int, width: int, bias: bool, activation: bool, packed: bool
) -> None:
    torch.manual_seed(0)
    layer = ShortConv(channels, width, bias=bias, activation=activation).double()
    x = torch.randn(batch, positions, channels, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 2, (batch, positions)).cumsum(1) if packed else None
    seed = torch.randn_like(x)
    results = []
    for out in (layer(x, ids), plain(layer, x, ids)):
        results.append((out, *torch.autograd.grad(out, (x, *layer.parameters()), seed)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_bfloat16_and_autocast() -> None:
    layer, x = ShortConv(6, bias=True), torch.randn(2, 9, 6, requires_grad=True)
    seed = torch.randn_like(x)
    want = (layer(x), *torch.autograd.grad(layer(x), (x, *layer.parameters()), seed))
    with torch.autocast("cpu", torch.bfloat16):
        same = (layer(x), *torch.autograd.grad(layer(x), (x, *layer.parameters()), seed))
        assert layer(x.bfloat16()).dtype == torch.bfloat16
        torch.autograd.grad(layer(x.bfloat16()).sum(), tuple(layer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(want, same, strict=True))
    low, x = layer.bfloat16(), x.detach().bfloat16().requires_grad_()
    got = (low(x), *torch.autograd.grad(low(x), (x, *low.parameters()), seed.bfloat16()))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16
        # 8 bits of mantissa, sums of up to 18 terms of order one.
        torch.testing.assert_close(a.float(), b, rtol=0.03, atol=0.05)


def test_seed() -> None:
    first, second = (ShortConv(6, bias=True, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first.weight, second.weight) and torch.equal(first.bias, second.bias)
    assert first.weight.abs().max() <= 0.5


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_errors(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"positive, got channels={sizes[0]}, width={sizes[1]}; raise"):
        ShortConv(*sizes)
