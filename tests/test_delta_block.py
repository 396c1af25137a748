"""The gated delta net layer against its recurrence, packed, at its limits, as a graph, and overlapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import batches, train_both

import fxoverlap as fxo
from fxoverlap import compat
from fxoverlap.ir import InputKind, Phase
from fxoverlap.models import GatedDeltaNet, MoE
from fxoverlap.models.delta import _before

# Sums in another order, and norms of small rows, which divide by them: of 1e-16 at most 1e-12 has been seen.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"heads": 2},
    "grouped": {"heads": 4, "key_heads": 2, "key_dim": 3, "value_dim": 5},
    "one key head": {"heads": 3, "key_heads": 1, "key_dim": 6, "value_dim": 4, "conv_width": 2},
}
# Positions and chunk: the chunk divides or does not, is longer, is one token; 1, 2, 3, 4, 7, 8 and 13 chunks.
LENGTHS = [(16, 4), (13, 4), (7, 64), (1, 64), (5, 5), (13, 2), (13, 1), (15, 8), (32, 4), (11, 4)]


def layer_of(kind: str = "plain", chunk: int = 4, dtype: torch.dtype = torch.float64, **changes: Any) -> GatedDeltaNet:
    generator = torch.Generator().manual_seed(0)
    layer = GatedDeltaNet(12, **LAYERS[kind] | changes, chunk=chunk, generator=generator)
    for name, param in layer.named_parameters():
        if "norm" in name:  # ones hide a missing factor
            nn.init.uniform_(param, 0.5, 1.5, generator=generator)
        elif name == "dt_bias":  # slow decays hide errors in them
            nn.init.uniform_(param, -4.0, 0.0, generator=generator)
    return layer.to(dtype)


def hidden_of(positions: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(positions)
    return torch.randn(batch, positions, 12, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def ids_of(rows: Sequence[Sequence[int]]) -> Tensor:
    """Sequence ids of rows of lengths."""
    return torch.stack([torch.arange(5, 5 + len(row)).repeat_interleave(torch.tensor(row)) for row in rows])


def recurrence(layer: GatedDeltaNet, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
    """The layer head by head and token by token."""
    weight, taps = layer.qkv_gate_b_a.weight, layer.conv.weight
    heads, key_dim, value_dim = layer.heads, layer.key_dim, len(layer.out_norm)
    keys, values, width = layer.key_heads * key_dim, heads * value_dim, taps.shape[1]
    rows = []
    for r, row in enumerate(hidden):
        scale = (row.square().mean(-1, keepdim=True) + torch.finfo(row.dtype).eps).rsqrt()
        qkv, gate, b, a = (row * scale * layer.norm.weight @ weight.t()).split(
            (2 * keys + values, values, heads, heads), 1
        )
        state = {h: torch.zeros(key_dim, value_dim, dtype=row.dtype) for h in range(heads)}
        out = []
        for t in range(len(row)):
            sequence = [s for s in range(t + 1) if ids is None or ids[r, s] == ids[r, t]]
            mixed = sum(taps[:, width - 1 - (t - s)] * qkv[s] for s in sequence if t - s < width)
            mixed = mixed * torch.sigmoid(mixed)
            o = []
            for h in range(heads):
                at = h // (heads // layer.key_heads) * key_dim
                q, k = (part[at : at + key_dim] for part in (mixed[:keys], mixed[keys : 2 * keys]))
                q, k = (x / (x @ x + 1e-6).sqrt() for x in (q, k))
                v = mixed[2 * keys :][h * value_dim : (h + 1) * value_dim]
                rate = layer.A_log[h].exp() * torch.log1p((a[t, h] + layer.dt_bias[h]).exp())
                old = torch.exp(-rate) * state[h] if len(sequence) > 1 else torch.zeros_like(state[h])
                state[h] = old + torch.sigmoid(b[t, h]) * torch.outer(k, v - k @ old)
                read = q @ state[h]
                read = read / (read.square().mean() + 1e-6).sqrt() * layer.out_norm
                z = gate[t, h * value_dim : (h + 1) * value_dim]
                o.append(read * z * torch.sigmoid(z))
            out.append(layer.out.weight @ torch.cat(o))
        rows.append(torch.stack(out))
    return hidden + torch.stack(rows)


def results(forward: Callable[[Tensor], Tensor], layer: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    """What forward gives, and the gradients of a weighted sum of it, by name."""
    out = forward(hidden)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).cos()
    names, params = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad((out * weights).sum(), (hidden, *params), allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(("hidden", *names), grads, strict=True))}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], **tolerance: float) -> None:
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, **tolerance or CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("positions, chunk", LENGTHS)
def test_is_the_recurrence(kind: str, positions: int, chunk: int) -> None:
    layer, hidden = layer_of(kind, chunk), hidden_of(positions)
    assert_close(results(layer, layer, hidden), results(lambda h: recurrence(layer, h), layer, hidden))


# Boundaries inside of chunks of 4, at their edges, several in one, and none for several chunks; of a batch, each row's.
PACKED = {
    "inside": [(6, 7), (3, 10)],
    "at the edges": [(4, 4, 5), (8, 5)],
    "many in a chunk": [(1, 1, 1, 10), (9, 1, 2, 1)],
    "none": [(13,), (12, 1)],
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED)
def test_packed_is_the_recurrence(kind: str, lengths: list[tuple[int, ...]]) -> None:
    layer, hidden, ids = layer_of(kind), hidden_of(13), ids_of(lengths)
    assert_close(
        results(lambda h: layer(h, ids), layer, hidden), results(lambda h: recurrence(layer, h, ids), layer, hidden)
    )


@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED)
def test_packed_is_its_pieces(lengths: list[tuple[int, ...]]) -> None:
    layer, hidden, ids = layer_of("grouped"), hidden_of(13), ids_of(lengths)

    def pieces(h: Tensor) -> Tensor:
        rows = (torch.cat([layer(x[None])[0] for x in row.split(each)]) for row, each in zip(h, lengths, strict=True))
        return torch.stack(list(rows))

    assert_close(results(lambda h: layer(h, ids), layer, hidden), results(pieces, layer, hidden))


def test_nothing_passes_between_sequences() -> None:
    layer, hidden, ids = layer_of(), hidden_of(13), ids_of([(6, 7), (6, 7)])
    (grad,) = torch.autograd.grad(layer(hidden, ids)[:, 6:].sum(), hidden)
    assert not grad[:, :6].any() and grad[:, 6:].all()
    (grad,) = torch.autograd.grad(layer(hidden)[:, :6].sum(), hidden)
    assert not grad[:, 6:].any()


class Finite(TorchDispatchMode):
    """No operator may give anything that is not finite; new memory may hold anything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if isinstance(out, Tensor) and out.is_floating_point() and "empty" not in str(func):
            assert out.isfinite().all(), func
        return out


@pytest.mark.parametrize("rate", [-30.0, 3.0, 8.0, 40.0])
def test_any_decay(rate: float) -> None:
    """exp(g) from one to nothing, also within a chunk, where its sums are large; fp32."""
    layer, hidden = layer_of("grouped", 8, torch.float32), hidden_of(13, dtype=torch.float32)
    with torch.no_grad():
        layer.dt_bias.copy_(torch.tensor([rate, 0.0, rate, -2.0]))
        layer.A_log[2:] = 5.0
    with Finite():
        got = results(layer, layer, hidden)
    # Twelve bits of an exponent of some thousand are lost in fp32, so up to 1e-4 of what has not faded.
    wide = layer_of("grouped", 8)
    wide.load_state_dict(layer.state_dict())
    inputs = hidden.detach().double().requires_grad_()
    want = results(lambda h: recurrence(wide, h), wide, inputs)
    assert_close(got, {name: value.float() for name, value in want.items()}, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_keys_of_zeros(dtype: torch.dtype) -> None:
    layer, hidden = layer_of(dtype=dtype), hidden_of(13, dtype=dtype)
    with torch.no_grad():
        layer.conv.weight[: 2 * layer.keys] = 0  # q and k
        layer.conv.weight[:3] = 1  # some of q
    got = results(layer, layer, hidden)
    assert all(value.isfinite().all() for value in got.values())
    assert torch.equal(got["out"], hidden)  # nothing was ever added to the state
    if dtype == torch.float64:
        assert_close(got, results(lambda h: recurrence(layer, h), layer, hidden))


def test_keys_that_are_alike() -> None:
    """Powers of what is solved with would be as large as 1e18 here, and cancel."""
    layer, hidden = layer_of(chunk=64, dtype=torch.float32), torch.randn(1, 1, 12).expand(1, 64, 12).clone()
    with torch.no_grad():
        layer.dt_bias.fill_(-20.0)
        hidden += 1e-3 * torch.randn(1, 64, 12)
        layer.qkv_gate_b_a.weight[-4:-2] *= 30  # beta of almost zero or one
    got, want = layer(hidden), recurrence(layer.double(), hidden.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)  # 64 steps of rounding to 6e-8, and their sums


@pytest.mark.parametrize("kind", LAYERS)
def test_bfloat16(kind: str) -> None:
    layer, hidden, ids = (
        layer_of(kind, dtype=torch.bfloat16),
        hidden_of(13, dtype=torch.bfloat16),
        ids_of(PACKED["inside"]),
    )
    got = results(lambda h: layer(h, ids), layer, hidden)
    assert {value.dtype for value in got.values()} == {torch.bfloat16}
    wide = layer.float()
    want = results(lambda h: wide(h, ids), wide, hidden.detach().float().requires_grad_())
    for name, value in want.items():
        # Eight bits are 0.004. Norms of small q, k and o divide by them, the more so in gradients, and what was rounded
        # before is larger by as much: with all in fp32 but what the first matrix gives, there is 0.03 already.
        assert (got[name].float() - value).norm() < (0.02 if name == "out" else 0.15) * value.norm(), name


def test_under_autocast_the_state_is_fp32() -> None:
    layer, hidden = layer_of("grouped", dtype=torch.float32), hidden_of(13, dtype=torch.float32)

    def forward(h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(h)

    got = results(forward, layer, hidden)
    assert {value.dtype for value in got.values()} == {torch.float32}
    for name, value in results(layer, layer, hidden).items():
        assert (got[name] - value).norm() < 0.05 * value.norm(), name  # two matrices and a convolution are in bf16
    with torch.autocast("cpu", torch.bfloat16):
        of_all = results(layer, layer, hidden)
    assert not [name for name, value in got.items() if not torch.equal(value, of_all[name])]


def test_dropout_and_seeds() -> None:
    layer, hidden = layer_of(dropout=0.5), hidden_of(5)
    torch.manual_seed(0)
    first, second = layer(hidden), layer(hidden)
    torch.manual_seed(0)
    assert torch.equal(layer(hidden), first) and not torch.equal(first, second)
    assert torch.equal(layer.eval()(hidden), layer_of()(hidden))
    made = [GatedDeltaNet(12, 2, generator=torch.Generator().manual_seed(seed)).state_dict() for seed in (0, 0, 1)]
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert not torch.equal(made[0]["A_log"], made[2]["A_log"])


def test_beginning_rates() -> None:
    layer = GatedDeltaNet(1, 4096, 1, key_dim=1, value_dim=1, generator=torch.Generator().manual_seed(0))
    rate, step = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert 1 <= rate.min() < 1.1 and 15.9 < rate.max() <= 16.001
    assert 0.000999 <= step.min() < 0.0011 and 0.098 < step.max() <= 0.10001


@pytest.mark.parametrize(
    "sizes", [{"heads": 0}, {"heads": 4, "key_heads": 3}, {"heads": 2, "key_heads": 0}, {"heads": 2, "chunk": 0}]
)
def test_errors(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"heads={sizes['heads']}, key_heads=.*; change one of them"):
        GatedDeltaNet(12, **sizes)


def test_gradients_cannot_be_differentiated_again() -> None:
    layer, hidden = layer_of(), hidden_of(5)
    (grad,) = torch.autograd.grad(layer(hidden).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# --- the states before the chunks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("count", range(1, 10))
def test_states_before(count: int, reverse: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    step = torch.randn(2, count, 3, 3, dtype=torch.float64, generator=generator)
    add = torch.randn(2, count, 3, 4, dtype=torch.float64, generator=generator)
    got = _before(step.flatten(0, 1), add.flatten(0, 1), count, reverse).view_as(add)
    state = torch.zeros(2, 3, 4, dtype=torch.float64)
    for i in reversed(range(count)) if reverse else range(count):
        torch.testing.assert_close(got[:, i], state, **CLOSE)
        state = step[:, i] @ state + add[:, i]


# --- as a graph -------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Embedding, layers, head, cross entropy; sequence ids, if any, for the layers that take them."""

    def __init__(self, *layers: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(32, 12)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(12, 32, bias=False)
        for module in (self.embed, self.head):
            nn.init.normal_(module.weight, generator=generator)
        self.to(dtype)

    def forward(self, tokens: Tensor, targets: Tensor, ids: Tensor | None = None) -> Tensor:
        hidden, loss = self.embed(tokens), 0.0
        for layer in self.layers:
            if isinstance(layer, MoE):
                hidden, extra = layer(hidden)
                loss = loss + extra
            else:
                hidden = layer(hidden, ids)
        return loss + F.cross_entropy(self.head(hidden).flatten(0, 1).float(), targets.flatten())


def traced_ops(positions: int, chunk: int = 4) -> Counter[bool]:
    """Operators of one layer by whether they are in the backward, beyond those of the model without it."""
    counts = []
    for layers in ((layer_of("grouped", chunk, torch.float32),), ()):
        mode, (ids, targets) = compat.new_fake_mode(), batches(1, tokens=positions)[0]
        joint = compat.export_joint(
            Blocks(*layers), (compat.fake_like(mode, ids), compat.fake_like(mode, targets)), mode
        )
        counts.append(Counter(compat.is_backward(node) for node in joint.graph.nodes if node.op == "call_function"))
    return counts[0] - counts[1]


def test_operators() -> None:
    ops = traced_ops(32)
    assert ops[False] <= 140 and ops[True] <= 195
    double, quadruple = traced_ops(64), traced_ops(128)
    assert quadruple - double == double - ops  # a level of the scan each
    assert (double - ops).total() <= 20


@pytest.mark.parametrize(
    ("dtype", "packed"),
    [
        (torch.float32, False),
        (torch.bfloat16, True),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.slow),
    ],
)
def test_b26_every_parameter_gets_its_gradient(group: dist.ProcessGroup, dtype: torch.dtype, packed: bool) -> None:
    layers = [
        layer
        for kind in ("plain", "grouped")
        for layer in (
            layer_of(kind, dropout=0.1),
            MoE(12, 4, 8, top_k=2, aux_loss=0.01, group=group, generator=torch.Generator().manual_seed(1)),
        )
    ]
    model = Blocks(*layers, dtype=dtype)

    def make(step: int) -> list[tuple[Tensor, ...]]:
        more = [(ids_of([lengths]),) if packed else () for lengths in ((6, 7), (1, 12), (4, 4, 5))]
        return [(*batch, *ids) for batch, ids in zip(batches(3, tokens=13, seed=step), more, strict=True)]

    overlapped = fxo.transform(model)
    assert train_both(overlapped, make) == []
    overlapped.step(make(0))
    assert not [name for name, param in model.named_parameters() if param.grad is None or not param.grad.any()]
    chunk = overlapped.plan("B").backward
    made_by = {value: node for node in chunk.nodes for value in node.writes}
    names = {each.value: each.name for each in chunk.joint.inputs if each.kind is InputKind.PARAM}
    phases = {names[target]: made_by[value].phase for value, target in chunk.joint.gradients if target in names}
    of_deltas = {name: phase for name, phase in phases.items() if name.startswith(("layers.0.", "layers.2."))}
    assert of_deltas == {f"layers.{i}.{name}": Phase.W for i in (0, 2) for name, _ in layers[i].named_parameters()}
