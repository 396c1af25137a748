"""Short causal depthwise convolutions, which precede the state of Mamba and delta-net layers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShortConv(nn.Module):
    """Each channel's weighted sum of its last `width` positions: [batch, positions, channels] -> the same shape.

    `y[t] = silu(bias + sum_i weight[:, width - 1 - i] * x[t - i])`, where `x[t - i]` is zero before the row's beginning
    and, with `sequence_ids` (int64 [batch, positions], non-decreasing along positions), in another sequence than t's.
    The last column of `weight` [channels, width] is the weight of the position itself, as in `nn.Conv1d`. The result
    has the dtype of `x`.

    Args:
        bias: there is one, [channels].
        activation: SiLU follows.

    Raises:
        ValueError: `channels` or `width` is not positive.
    """

    def __init__(
        self,
        channels: int,
        width: int = 4,
        *,
        bias: bool = False,
        activation: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if channels < 1 or width < 1:
            raise ValueError(
                f"ShortConv: channels and width must be positive, got channels={channels}, width={width}; raise them"
            )
        self.activation = activation
        bound = width**-0.5  # that of nn.Conv1d
        self.weight = nn.Parameter(nn.init.uniform_(torch.empty(channels, width), -bound, bound, generator=generator))
        self.bias = (
            nn.Parameter(nn.init.uniform_(torch.empty(channels), -bound, bound, generator=generator)) if bias else None
        )

    def forward(self, x: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
        # Casts that autocast would make; elsewhere they are none.
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = _CausalConv.apply(x, self.weight.to(x.dtype), bias, sequence_ids)
        return F.silu(out) if self.activation else out


class _CausalConv(torch.autograd.Function):
    """x [B, T, C], weight [C, W], bias [C] or None, ids [B, T] or None -> [B, T, C].

    On CPU the backward of a depthwise `F.conv1d` is slow, and that of shifted sums has ten nodes a tap. Here the
    gradient of the input is the same convolution backwards in time, and those of weight and bias are sums of products.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, ids)
        ctx.biased = bias is not None
        return _convolve(x, weight, bias, ids, weight.shape[1] - 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight, ids = ctx.saved_tensors
        positions, reach = x.shape[1], weight.shape[1] - 1
        grad_x = _convolve(grad, weight.flip(1), None, ids, 0)
        grad_weight = []
        for distance in range(reach, -1, -1):
            before, after = slice(max(positions - distance, 0)), slice(distance, None)
            product = x[:, before] * grad[:, after]
            if ids is not None and distance:
                product = product * (ids[:, before] == ids[:, after]).unsqueeze(-1)
            grad_weight.append(product.sum((0, 1)))
        return grad_x, torch.stack(grad_weight, 1), grad.sum((0, 1)) if ctx.biased else None, None


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor | None, own: int) -> Tensor:
    """Sums of the x [B, T, C] around each position, of which weight[:, own] is the position's own weight: [B, T, C]."""
    positions, reach = x.shape[1], weight.shape[1] - 1
    if ids is None:
        # Images of height one with their channels last are what x is in memory: nothing is transposed.
        channels = weight.shape[0]
        image = x.view(-1, 1, positions, channels).permute(0, 3, 1, 2)
        with torch.autocast(x.device.type, enabled=False):
            out = F.conv2d(image, weight.view(channels, 1, 1, -1), bias, padding=(0, reach), groups=channels)
        return out.narrow(3, reach - own, positions).squeeze(2).transpose(1, 2)
    out = x * weight[:, own] if bias is None else torch.addcmul(bias, x, weight[:, own])
    padded = F.pad(x, (0, 0, own, reach - own))
    near = F.pad(ids, (own, reach - own), value=-1).unfold(1, positions, 1) == ids.unsqueeze(1)
    for i in range(reach + 1):
        if i != own:
            tap = padded[:, i : i + positions] * near[:, i].unsqueeze(-1)
            out = torch.addcmul(out, tap, weight[:, i])
    return out
