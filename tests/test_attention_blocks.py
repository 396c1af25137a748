"""`Attention` and `LatentAttention` against dense loops in fp64, packed rows against their pieces, and fused training.

Proves: both forms of latent attention are one function, the written one, forward and gradients; nothing passes between
sequences of a packed row; attention stays one fused kernel a layer; a fused step equals eager, and every parameter's
gradient is W.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_wgrad import chunk_of, gradient_nodes
from torch import Tensor, nn
from toys import batches, train_both

from fxoverlap.ir import ChunkGraph, Phase
from fxoverlap.models import Attention, LatentAttention, MoE
from fxoverlap.passes import op_facts

pytestmark = pytest.mark.usefixtures("shared_captures")

LATENT: dict[str, dict[str, Any]] = {
    "full_rank": {},
    "q_rank": {"q_rank": 6},
    "narrow_value": {"q_rank": 6, "value_dim": 3},
    "wide_value": {"value_dim": 15},
    "equal_widths": {"value_dim": 12},
    "sizes": {"q_rank": 7, "kv_rank": 5, "head_dim": 3, "rope_dim": 6, "value_dim": 2},
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attention(16, 4, 2, generator=seeded(), **SHORT),
    "one_kv_head": lambda: Attention(16, 2, 1, generator=seeded(), **SHORT),
    "latent": lambda: LatentAttention(16, 2, q_rank=6, generator=seeded(), **SHORT),
    "absorbed": lambda: LatentAttention(16, 2, q_rank=6, absorbed=True, generator=seeded(), **SHORT),
}
SHORT: dict[str, Any] = {"rope_theta": 100.0, "max_positions": 16}
# Two rows of 9; ids need not begin at zero, nor be the next number, nor be of one sequence only in one row.
IDS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2], [-3, -3, 2, 2, 2, 2, 2, 9, 9]])
# In fp64, what is summed in another order differs by a few units of 1e-16, relative to terms of order one.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def fp64() -> Iterator[None]:
    """Layers are built in fp64, their rotary tables too, which a cast would leave as exact as fp32."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made_uneven(layer: nn.Module) -> nn.Module:
    """The layer with norm weights that are not one."""
    for name, param in layer.named_parameters():
        if "norm" in name:
            nn.init.uniform_(param, 0.5, 1.5, generator=seeded(1))
    return layer


def hidden_of(batch: int = 2, positions: int = 9) -> Tensor:
    return torch.randn(batch, positions, 16, generator=seeded(2)).requires_grad_()


def results(layer: nn.Module, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> dict[str, Tensor]:
    """The output of `forward`, and the gradients of a sum of it with random weights."""
    out = forward(hidden)
    weights = torch.randn(out.shape, generator=seeded(3))
    names, params = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad(out, (hidden, *params), weights.to(out.dtype))
    return {"output": out, **dict(zip(("hidden", *names), grads, strict=True))}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], **tolerance: Any) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        torch.testing.assert_close(
            value, want[name], **(tolerance or CLOSE), msg=lambda text, name=name: f"{name}: {text}"
        )


# --- the functions ----------------------------------------------------------------------------------------------------


def pieces(hidden: Tensor, ids: Tensor | None) -> list[list[Tensor]]:
    """The sequences of each row, each [positions, dim]."""
    if ids is None:
        return [[row] for row in hidden]
    return [
        list(row.split(row_ids.unique(return_counts=True)[1].tolist()))
        for row, row_ids in zip(hidden, ids, strict=True)
    ]


def turned(x: Tensor) -> Tensor:
    """`x` [positions, width] with its pairs turned, as complex numbers, by angles that begin at zero."""
    half = x.shape[1] // 2
    speed = SHORT["rope_theta"] ** (-torch.arange(half) / half)
    z = torch.complex(x[:, :half].contiguous(), x[:, half:].contiguous())
    z = z * torch.exp(1j * torch.arange(len(x))[:, None] * speed)
    return torch.cat((z.real, z.imag), 1)


def softmax_average(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one head of one sequence, token by token."""
    out = []
    for t in range(len(q)):
        weights = (k[: t + 1] @ q[t] / len(q[t]) ** 0.5).exp()
        out.append(weights / weights.sum() @ v[: t + 1])
    return torch.stack(out)


def normed(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * norm.weight


def plain_attention(layer: Attention, x: Tensor) -> Tensor:
    q, k, v = (normed(x, layer.norm) @ layer.qkv.weight.t()).split(
        [n * layer.head_dim for n in (layer.heads, layer.kv_heads, layer.kv_heads)], 1
    )
    q, k, v = (each.split(layer.head_dim, 1) for each in (q, k, v))
    shared = layer.heads // layer.kv_heads
    heads = [softmax_average(turned(q[h]), turned(k[h // shared]), v[h // shared]) for h in range(layer.heads)]
    return x + torch.cat(heads, 1) @ layer.out.weight.t()


def plain_latent_attention(layer: LatentAttention, x: Tensor) -> Tensor:
    head_dim = layer.head_dim
    made = normed(x, layer.norm)
    q = normed(made @ layer.q_down.weight.t(), layer.q_norm) if layer.q_rank else made
    made, q = made @ layer.kv_down.weight.t(), q @ layer.q_up.weight.t()
    latent, k_rope = normed(made[:, : layer.kv_rank], layer.kv_norm), turned(made[:, layer.kv_rank :])
    heads = []
    for own_q, own_kv in zip(q.chunk(layer.heads, 1), layer.kv_up.weight.chunk(layer.heads), strict=True):
        k, v = latent @ own_kv[:head_dim].t(), latent @ own_kv[head_dim:].t()
        own_q = torch.cat((own_q[:, :head_dim], turned(own_q[:, head_dim:])), 1)
        heads.append(softmax_average(own_q, torch.cat((k, k_rope), 1), v))
    return x + torch.cat(heads, 1) @ layer.out.weight.t()


def plain(layer: nn.Module, hidden: Tensor, ids: Tensor | None) -> Tensor:
    """The layer, sequence by sequence, head by head and token by token, positions from zero in each sequence."""
    one = plain_attention if isinstance(layer, Attention) else plain_latent_attention
    return torch.stack([torch.cat([one(layer, piece) for piece in row]) for row in pieces(hidden, ids)])


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("ids", [None, IDS], ids=["rows", "packed"])
@pytest.mark.parametrize("absorbed", [False, True], ids=["explicit", "absorbed"])
@pytest.mark.parametrize("kind", LATENT)
def test_latent_attention_is_the_plain_formula(kind: str, absorbed: bool, ids: Tensor | None) -> None:
    layer = made_uneven(LatentAttention(16, 2, absorbed=absorbed, generator=seeded(), **SHORT, **LATENT[kind]))
    got = results(layer, lambda h: layer(h, ids), hidden_of())
    assert_close(got, results(layer, lambda h: plain(layer, h, ids), hidden_of()))


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("ids", [None, IDS], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", ["attention", "one_kv_head"])
def test_attention_is_the_plain_formula(kind: str, ids: Tensor | None) -> None:
    layer = made_uneven(LAYERS[kind]())
    got = results(layer, lambda h: layer(h, ids), hidden_of())
    assert_close(got, results(layer, lambda h: plain(layer, h, ids), hidden_of()))


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("kind", LAYERS)
def test_packed_row_is_its_pieces(kind: str) -> None:
    """The layer itself, on each sequence as a row of its own."""
    layer = made_uneven(LAYERS[kind]())

    def apart(hidden: Tensor) -> Tensor:
        return torch.stack([torch.cat([layer(piece[None])[0] for piece in row]) for row in pieces(hidden, IDS)])

    assert_close(results(layer, lambda h: layer(h, IDS), hidden_of()), results(layer, apart, hidden_of()))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("positions", [1, 5, 16])
def test_one_sequence_a_row_is_no_ids(kind: str, positions: int) -> None:
    layer, hidden = LAYERS[kind](), hidden_of(3, positions)
    ids = torch.tensor([7, 7, -1])[:, None].expand(3, positions)
    # fp32, some 20 sums of up to 16 terms in a row in another order.
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    assert_close(results(layer, lambda h: layer(h, ids), hidden), results(layer, layer, hidden), **tolerance)


@pytest.mark.parametrize("kind", LATENT)
def test_absorbed_has_the_parameters_of_explicit(kind: str) -> None:
    explicit, absorbed = (
        LatentAttention(16, 2, absorbed=each, generator=seeded(), **SHORT, **LATENT[kind]) for each in (False, True)
    )
    expected = explicit.state_dict()
    assert absorbed.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in absorbed.state_dict().items())
    assert not {"cos", "sin"} & expected.keys()


def test_sizes_come_from_dim_and_heads() -> None:
    layer = LatentAttention(64, 4)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "norm.weight": (64,),
        "q_up.weight": (4 * (16 + 8), 64),
        "kv_down.weight": (16 + 8, 64),
        "kv_norm.weight": (16,),
        "kv_up.weight": (4 * (16 + 16), 16),
        "out.weight": (64, 4 * 16),
    }
    low = LatentAttention(64, 4, q_rank=32)
    assert low.q_down.weight.shape == (32, 64) and low.q_up.weight.shape == (4 * (16 + 8), 32)
    assert LatentAttention(6, 3).rope_dim == 2 and LatentAttention(30, 3).rope_dim == 4
    # A product of normalised inputs has the variance of the inputs.
    wide = LatentAttention(512, 4, q_rank=256, kv_rank=64, generator=seeded())
    for linear in (wide.q_down, wide.q_up, wide.kv_down, wide.kv_up, wide.out):
        torch.testing.assert_close(linear.weight.std().item(), linear.in_features**-0.5, rtol=0.03, atol=0)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("ids", [None, IDS], ids=["rows", "packed"])
def test_bfloat16(kind: str, ids: Tensor | None) -> None:
    layer = LAYERS[kind]()
    expected = results(layer, lambda h: layer(h, ids), hidden_of())
    layer = layer.bfloat16()
    got = results(layer, lambda h: layer(h, ids), hidden_of().detach().bfloat16().requires_grad_())
    for name, value in got.items():
        assert value.dtype == torch.bfloat16
        # Some 40 results in a row, weights and both directions counted, are each rounded to 8 bits on their own.
        error = (value.float() - expected[name]).norm() / expected[name].norm()
        assert error < 40**0.5 * 2**-8, name


@pytest.mark.parametrize("kind", LAYERS)
def test_dropout(kind: str) -> None:
    layer, hidden = LAYERS[kind](), hidden_of()
    plain_out = layer(hidden) - hidden
    layer.dropout = 0.5
    out = layer(hidden) - hidden
    dropped = out.abs() < 1e-6
    assert 0.3 < dropped.float().mean() < 0.7
    torch.testing.assert_close(out[~dropped], 2 * plain_out[~dropped], rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.eval()(hidden) - hidden, plain_out)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: LatentAttention(16, 3), "multiple of heads, got dim=16, heads=3; change one of them or give head_dim"),
        (lambda: LatentAttention(16, 0), "got dim=16, heads=0"),
        (lambda: LatentAttention(16, 0, head_dim=4), "heads=0, .*; change"),
        (lambda: LatentAttention(16, 2, kv_rank=0), "kv_rank=0"),
        (lambda: LatentAttention(16, 2, q_rank=-1), "q_rank=-1; change"),
        (lambda: LatentAttention(16, 2, rope_dim=3), "rope_dim must be even, got .*rope_dim=3"),
        (lambda: LatentAttention(16, 2, rope_dim=0), "rope_dim=0"),
        (lambda: LatentAttention(16, 2, value_dim=0), "value_dim=0"),
        *(
            (lambda kind=kind: LAYERS[kind]()(hidden_of(1, 17)), "at most max_positions=16 tokens, got 17; build")
            for kind in LAYERS
        ),
    ],
)
def test_errors(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_head_dim_need_not_divide_dim() -> None:
    layer = LatentAttention(16, 3, head_dim=5)
    assert layer(hidden_of()).shape == (2, 9, 16)


# --- in a model -------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A language model of one attention layer and one mixture of experts, on packed rows if ids are given."""

    def __init__(self, make: Callable[[torch.Generator], nn.Module], group: dist.ProcessGroup) -> None:
        super().__init__()
        generator = seeded()
        self.embed = nn.Embedding(32, 16)
        nn.init.normal_(self.embed.weight, std=0.25, generator=generator)
        moe = MoE(16, 4, 8, top_k=2, aux_loss=0.01, group=group, generator=generator)
        self.layers = nn.ModuleList((make(generator), moe))
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 32, bias=False)
        nn.init.normal_(self.head.weight, std=0.25, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
        attention, moe = self.layers
        hidden, aux = moe(attention(self.embed(tokens), sequence_ids))
        logits = self.head(self.norm(hidden).flatten(0, 1)).float()
        return F.cross_entropy(logits, targets.flatten()) + aux


MODELS: dict[str, Callable[[torch.Generator], nn.Module]] = {
    "attention": lambda g: Attention(16, 2, 1, generator=g),
    "latent": lambda g: LatentAttention(16, 2, q_rank=6, generator=g),
    "absorbed": lambda g: LatentAttention(16, 2, q_rank=6, absorbed=True, generator=g),
    "full_rank_dropout": lambda g: LatentAttention(16, 2, dropout=0.2, generator=g),
    "absorbed_full_rank": lambda g: LatentAttention(16, 2, absorbed=True, value_dim=5, generator=g),
}


def packed_batches(step: int) -> list[tuple[Tensor, ...]]:
    """Three microbatches of 9 tokens, cut into sequences at random places."""
    cuts = torch.rand(3, 1, 9, generator=seeded(step)) < 0.3
    return [(*both, cut.cumsum(1)) for both, cut in zip(batches(3, tokens=9, seed=step), cuts, strict=True)]


@pytest.mark.parametrize(
    ("packed", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=["rows-fp32", "packed-bf16"]
)
@pytest.mark.parametrize("kind", MODELS)
def test_fused_is_eager(group: dist.ProcessGroup, kind: str, packed: bool, dtype: torch.dtype) -> None:
    make = packed_batches if packed else lambda step: batches(3, tokens=9, seed=step)
    model = Model(MODELS[kind], group).to(dtype)
    assert train_both(model, make, steps=2) == []
    assert all(param.grad is None for param in model.parameters())


@functools.cache
def captured(group: dist.ProcessGroup, kind: str, packed: bool) -> ChunkGraph:
    return chunk_of(Model(MODELS[kind], group), packed_batches(0)[0] if packed else batches(1, tokens=9)[0])


@pytest.mark.parametrize("kind", MODELS)
def test_gradient_of_every_parameter_is_made_in_w(group: dist.ProcessGroup, kind: str) -> None:
    made = gradient_nodes(captured(group, kind, packed=True))
    assert set(made) == {name for name, _ in Model(MODELS[kind], group).named_parameters()}
    assert {name: node.name for name, node in made.items() if node.phase is not Phase.W} == {}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", MODELS)
def test_attention_is_one_kernel(group: dist.ProcessGroup, kind: str, packed: bool) -> None:
    """No scores are in the graph, no head is repeated, and a mask is made for packed rows only."""
    joint = captured(group, kind, packed).joint
    assert joint is not None
    tags = {node: op_facts.tag(node) for node in op_facts.ops(joint.module.graph)}
    ops = [str(node.target) for node, tag in tags.items() if tag.phase is Phase.F and tag.layer == 0]
    assert sum("scaled_dot_product" in op for op in ops) == 1
    assert not [op for op in ops if "softmax" in op or "repeat" in op]
    assert ("aten.tril.default" in ops) == packed
    assert len(ops) < 80


@pytest.mark.parametrize("kind", MODELS)
def test_of_a_packed_row_one_mask_crosses_and_the_ids_do_not(group: dist.ProcessGroup, kind: str) -> None:
    """The backward reads the kernel's mask, which all heads share; nothing that it is made of is kept."""
    plain, packed = (captured(group, kind, each) for each in (False, True))
    assert saved(packed) - saved(plain) == Counter({"[1, 1, 9, 9] float32": 1})
    assert saved(plain) - saved(packed) == Counter()


def saved(chunk: ChunkGraph) -> Counter[str]:
    """Shapes and dtypes of what the forward makes and a backward node reads."""
    assert chunk.joint is not None
    ops = {node.name: node for node in op_facts.ops(chunk.joint.module.graph)}
    read = {value for node in chunk.nodes if node.phase is not Phase.F for value in node.reads}
    values = [ops[v].meta["val"] for node in chunk.nodes if node.phase is Phase.F for v in node.writes if v in read]
    return Counter(
        f"{list(value.shape)} {value.dtype}".replace("torch.", "") for value in values if isinstance(value, Tensor)
    )
