"""The reference model against plain formulations, over groups of no, one and two ranks, and as a traced graph."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from two_ranks import TwoRanks

from fxoverlap import compat
from fxoverlap.models import MLP, Attention, HybridModel, MoE

torch.set_num_threads(1)

TINY: dict[str, Any] = {"dim": 16, "vocab_size": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "num_experts": 4}
TINY |= {"expert_dim": 8, "top_k": 2, "max_positions": 16, "seed": 0}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sigmoid": {"router": "sigmoid"},
    "z_loss": {"aux_loss": 0.0, "z_loss": 0.3},
    "no_auxiliary": {"aux_loss": 0.0},
    "bias": {"selection_bias": True},
    "shared": {"shared_dim": 12},
    "all": {"router": "sigmoid", "aux_loss": 0.2, "z_loss": 0.1, "selection_bias": True, "shared_dim": 12},
}
# In fp64, what is summed in another order differs by a few units of 1e-16, relative to terms of order one.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def tokens(seed: int = 0, batch: int = 2, positions: int = 8) -> tuple[Tensor, Tensor]:
    both = torch.randint(0, 32, (2, batch, positions), generator=torch.Generator().manual_seed(seed))
    return both[0], both[1]


def run(model: nn.Module, *args: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by name."""
    loss = model(*args)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def assert_same(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Equal, bit for bit."""
    assert torch.equal(got[0], want[0])
    assert got[1].keys() == want[1].keys()
    for name, grad in got[1].items():
        assert torch.equal(grad, want[1][name]), name


# --- layers -----------------------------------------------------------------------------------------------------------


def plain_moe(layer: MoE, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """`MoE` token by token and expert by expert."""
    x = layer.norm(hidden).flatten(0, -2)
    logits = x @ layer.router.weight.t()
    scores = logits.exp() / logits.exp().sum(-1, True) if layer.router_kind == "softmax" else 1 / (1 + (-logits).exp())
    shares = scores / scores.sum(-1, True)
    rows, balance, chosen = [], x.new_zeros(()), x.new_zeros(layer.num_experts)
    for t in range(len(x)):
        biased = scores[t] + layer.expert_bias if layer.selection_bias else scores[t]
        experts = sorted(range(layer.num_experts), key=biased.tolist().__getitem__)[-layer.top_k :]
        total = sum(scores[t, e] for e in experts) if layer.router_kind == "sigmoid" else 1.0
        row = layer.shared(x[t]) if layer.shared is not None else 0.0
        for e in experts:
            gate, up = (x[t] @ layer.w_gate_up[e]).chunk(2)
            row = row + scores[t, e] / total * ((gate * torch.sigmoid(gate) * up) @ layer.w_down[e])
            chosen[e] += 1
        rows.append(row)
    for e in range(layer.num_experts):
        balance = balance + chosen[e] / chosen.sum() * shares[:, e].mean()
    z = sum(torch.log(logits[t].exp().sum()) ** 2 for t in range(len(x))) / len(x)
    aux = layer.aux_loss * layer.num_experts * balance + layer.z_loss * z
    return hidden + torch.stack(rows).view_as(hidden), aux if layer.aux_loss or layer.z_loss else None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exchanging", [False, True])
def test_moe_is_the_plain_loop(group: dist.ProcessGroup, kind: str, exchanging: bool) -> None:
    options = {"aux_loss": 0.01} | KINDS[kind]
    layer = MoE(16, 6, 8, top_k=3, group=group if exchanging else None, **options).double()
    if layer.selection_bias:
        layer.expert_bias.copy_(torch.linspace(-0.3, 0.3, 6))
    hidden = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(2, 5, 16, dtype=torch.float64)
    results = []
    for forward in (layer, lambda h: plain_moe(layer, h)):
        out, aux = forward(hidden)
        loss = (out * seed).sum() if aux is None else (out * seed).sum() + aux
        results.append((out, aux, *torch.autograd.grad(loss, (hidden, *layer.parameters()))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_attention_is_the_plain_formula() -> None:
    layer = Attention(16, 4, 2, rope_theta=100.0, max_positions=8).double()
    speed = torch.tensor([1.0, 0.1], dtype=torch.float64)
    angle = torch.arange(8)[:, None] * torch.cat((-speed, speed))
    layer.cos.copy_(angle.cos())  # the layer's own table is fp32
    layer.sin.copy_(angle.sin())
    hidden = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    heads = (layer.norm(hidden) @ layer.qkv.weight.t()).view(2, 6, 8, 4)
    pairs = torch.complex(heads[:, :, :6, :2].contiguous(), heads[:, :, :6, 2:].contiguous())
    turn = torch.exp(1j * torch.arange(6)[:, None, None] * speed)
    turned = torch.cat(((pairs * turn).real, (pairs * turn).imag), -1)
    out = []
    for h in range(4):
        q, k, v = turned[:, :, h], turned[:, :, 4 + h // 2], heads[:, :, 6 + h // 2]
        scores = (q @ k.transpose(1, 2) / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        out.append(scores.softmax(-1) @ v)
    expected = hidden + torch.cat(out, -1) @ layer.out.weight.t()
    got = layer(hidden)
    torch.testing.assert_close(got, expected, **CLOSE)
    seed = torch.randn_like(got)
    for a, b in zip(
        *(torch.autograd.grad(o, (hidden, *layer.parameters()), seed) for o in (got, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, **CLOSE)


def test_rotary_table() -> None:
    layer = Attention(16, 2, 2, rope_theta=10000.0, max_positions=5)
    angle = 4 * 10000.0 ** (-2 / 8)  # position 4, second pair of a head of width 8
    torch.testing.assert_close(layer.cos[4, [1, 5]], torch.tensor([angle, angle]).cos())
    torch.testing.assert_close(layer.sin[4, [1, 5]], torch.tensor([-angle, angle]).sin())
    assert not [name for name in layer.state_dict() if name in ("cos", "sin")]


def test_mlp_is_the_plain_formula() -> None:
    layer = MLP(16, 24)
    hidden = torch.randn(2, 5, 16)
    x = layer.norm(hidden)
    gate, up = (x @ layer.swiglu.gate_up.weight.t()).split(24, -1)
    torch.testing.assert_close(layer(hidden), hidden + (F.silu(gate) * up) @ layer.swiglu.down.weight.t())


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_group_of_one_is_no_group(group: dist.ProcessGroup, kind: str) -> None:
    results = [run(HybridModel("[*E]-[*E]", group=g, **TINY, **KINDS[kind]), *tokens()) for g in (None, group)]
    assert_same(*results)


def test_layers_follow_the_pattern() -> None:
    model = HybridModel("[*E]-", **TINY)
    assert [type(layer) for layer in model.layers] == [Attention, MoE, MLP]
    assert_same(run(model, *tokens()), run(HybridModel("*E-", **TINY), *tokens()))
    assert model.layers[2].swiglu.down.weight.shape == (16, 24)
    assert HybridModel("-", dim=16).layers[0].swiglu.down.weight.shape == (16, 64)


def test_loss_is_cross_entropy_plus_auxiliary_losses() -> None:
    model = HybridModel("E-E", **TINY | {"aux_loss": 0.3})
    ids, targets = tokens()
    hidden, aux = model.embed(ids), 0.0
    for layer in model.layers:
        hidden, extra = layer(hidden) if isinstance(layer, MoE) else (layer(hidden), 0.0)
        aux = aux + extra
    logits = model.head(model.norm(hidden))
    expected = (logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]).mean() + aux
    torch.testing.assert_close(model(ids, targets), expected)


def test_seed() -> None:
    state = torch.random.get_rng_state()
    first, same, other = (HybridModel("*-E", **TINY | {"seed": seed}).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["layers.2.w_down"], other["layers.2.w_down"])
    torch.random.set_rng_state(state)
    unseeded = HybridModel("E", **TINY | {"seed": None}).state_dict()
    torch.random.set_rng_state(state)
    assert all(
        torch.equal(t, unseeded[name]) for name, t in HybridModel("E", **TINY | {"seed": None}).state_dict().items()
    )


def test_tied() -> None:
    model = HybridModel("-", tied=True, **TINY)
    assert model.head.weight is model.embed.weight
    loose = HybridModel("-", **TINY)
    loose.load_state_dict(model.state_dict())
    grads, expected = run(model, *tokens())[1], run(loose, *tokens())[1]
    # One gradient is the sum of two, which autograd adds in the order in which they come.
    torch.testing.assert_close(grads["embed.weight"], expected["embed.weight"] + expected["head.weight"])


def test_dropout() -> None:
    model, ids = HybridModel("*-E", dropout=0.5, **TINY), tokens()
    torch.manual_seed(0)
    first, second = model(*ids), model(*ids)
    torch.manual_seed(0)
    again = model(*ids)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert torch.equal(model.eval()(*ids), HybridModel("*-E", **TINY)(*ids))


@pytest.mark.parametrize("exchanging", [False, True])
def test_bfloat16(group: dist.ProcessGroup, exchanging: bool) -> None:
    model = HybridModel("[*E]-E", group=group if exchanging else None, **TINY | KINDS["all"]).to(torch.bfloat16)
    loss, grads = run(model, *tokens())
    assert loss.dtype == torch.float32 and loss.isfinite()
    assert all(grad.dtype == torch.bfloat16 and grad.isfinite().all() for grad in grads.values())
    expected, _ = run(HybridModel("[*E]-E", **TINY | KINDS["all"]), *tokens())
    torch.testing.assert_close(loss, expected, rtol=0.05, atol=0)  # 8 bits of mantissa, some 20 roundings in a row


def test_autocast_keeps_the_router_in_fp32() -> None:
    layer = MoE(16, 4, 8, top_k=2, aux_loss=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        out, aux = layer(torch.randn(3, 16, requires_grad=True))
        weights, *_ = layer._route(torch.randn(3, 16))
        model_loss = HybridModel("[*E]-E", **TINY)(*tokens())
    (out.sum() + aux + model_loss).backward()
    assert aux.dtype == weights.dtype == torch.float32


def test_b47_counter_is_exact_in_bfloat16() -> None:
    layer = MoE(16, 4, 8, top_k=1, router="sigmoid", selection_bias=True)
    layer.expert_bias[2] = 10.001
    layer.bfloat16()
    hidden = torch.randn(257, 16, dtype=torch.bfloat16)
    for _ in range(2):
        layer(hidden)
    assert layer.tokens_per_expert.tolist() == [0, 0, 514, 0]
    layer.eval()(hidden)
    assert layer.tokens_per_expert.dtype == torch.int64 and layer.tokens_per_expert.sum() == 514
    assert layer.expert_bias.dtype == torch.float32 and layer.expert_bias[2] == torch.tensor(10.001)


def test_update_expert_bias() -> None:
    layer = MoE(16, 4, 8, top_k=1, selection_bias=True)
    layer.tokens_per_expert.copy_(torch.tensor([3, 1, 2, 2]))
    layer.update_expert_bias(0.5)
    assert layer.expert_bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert not layer.tokens_per_expert.any()


def test_deepcopy_shares_the_group(group: dist.ProcessGroup) -> None:
    model = HybridModel("[*E]E", group=group, tied=True, **TINY)
    copied = copy.deepcopy(model)
    assert all(layer.group is group for layer in copied.layers if isinstance(layer, MoE))
    assert copied.head.weight is copied.embed.weight is not model.embed.weight
    assert copied.layers[1].w_down is not model.layers[1].w_down
    assert_same(run(copied, *tokens()), run(model, *tokens()))


@pytest.mark.parametrize("kind", KINDS)
def test_forward_assigns_no_attributes(group: dist.ProcessGroup, kind: str) -> None:
    model = HybridModel("[*E]-", group=group, dropout=0.1, **TINY, **KINDS[kind])

    def held() -> list[dict[str, int]]:
        parts = (part for module in model.modules() for part in (vars(module), module._parameters, module._buffers))
        return [{key: id(value) for key, value in part.items()} for part in parts]

    before = held()
    run(model, *tokens())
    assert held() == before


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: HybridModel("*X"), "unknown symbol 'X'; allowed are"),
        (lambda: HybridModel("*", dim=12), "dim=12, heads=4, kv_heads=2; change"),
        (lambda: HybridModel("*", heads=4, kv_heads=3), "kv_heads=3; change"),
        (lambda: HybridModel("E", top_k=17), "top_k must be 1 to num_experts=16, got 17; change"),
        (lambda: HybridModel("E", top_k=0), "got 0"),
        (lambda: HybridModel("E", router="top"), "one of softmax, sigmoid, got 'top'; choose"),
        (lambda: HybridModel("*", **TINY)(*tokens(positions=17)), "at most max_positions=16 tokens, got 17; build"),
        (lambda: MoE(4, 2, 4, top_k=1).update_expert_bias(0.1), "no bias; build it with selection_bias=True"),
    ],
)
def test_errors(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# --- the traced graph -------------------------------------------------------------------------------------------------


def traced(model: nn.Module, ids: tuple[Tensor, ...]) -> fx.GraphModule:
    mode = compat.new_fake_mode()
    return compat.export_joint(model, tuple(compat.fake_like(mode, t) for t in ids), mode)


def run_graph(joint: fx.GraphModule, model: nn.Module, ids: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """`run` of the traced graph."""
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    inputs = {"param": model.get_parameter, "buffer": model.get_buffer, "input": ids.__getitem__}
    inputs["tangent"] = lambda _: torch.ones((), dtype=dtype)
    placeholders = (node for node in joint.graph.nodes if node.op == "placeholder")
    values = [inputs[kind](key) for kind, key in map(compat.input_descriptor, placeholders)]
    with torch.no_grad():
        results = fx.Interpreter(joint).run(*values, enable_io_processing=False)
    named = dict(zip(compat.output_descriptors(joint.graph), results, strict=True))
    grads = {source[1]: grad for (kind, source), grad in named.items() if kind == "grad" and source[0] == "param"}
    return named["output", 0], grads


def calls(joint: fx.GraphModule, *prefixes: str) -> Counter[tuple[str, bool]]:
    """Number of calls of the ops with these prefixes, by name and whether they are in the backward."""
    nodes = (node for node in joint.graph.nodes if str(node.target).startswith(prefixes))
    return Counter((str(node.target).rsplit(".", 1)[0], compat.is_backward(node)) for node in nodes)


LAYER_CALLS = {
    ("_c10d_functional.all_to_all_single", False): 1,
    ("_c10d_functional.wait_tensor", False): 3,
    ("_c10d_functional.wait_tensor", True): 2,
    ("fxoverlap.exchange", False): 2,
    ("fxoverlap.exchange", True): 2,
    ("aten._local_scalar_dense", False): 1,
}


@pytest.mark.parametrize("kind", KINDS)
def test_traced_layer(group: dist.ProcessGroup, kind: str) -> None:
    model, ids = HybridModel("[*E]", group=group, **TINY, **KINDS[kind]), tokens()
    joint = traced(model, ids)
    assert calls(joint, "_c10d", "fxoverlap.exchange", "aten._local", "aten._assert", "aten.item") == LAYER_CALLS
    assert calls(joint, "fxoverlap.grouped_mm") == {
        ("fxoverlap.grouped_mm", False): 2,
        ("fxoverlap.grouped_mm", True): 2,
        ("fxoverlap.grouped_mm_wgrad", True): 2,
    }
    sizes = {
        str(size) for node in joint.graph.nodes if isinstance(v := node.meta.get("val"), Tensor) for size in v.shape
    }
    assert len([size for size in sizes if not size.isdigit()]) == 1
    if kind == "plain":
        assert len(joint.graph.nodes) <= 280
    assert_same(run_graph(joint, model, ids), run(model, *ids))


def test_traced_layers_add_the_same_nodes(group: dist.ProcessGroup) -> None:
    one, two, three = (traced(HybridModel("[*E]" * n, group=group, **TINY), tokens()) for n in (1, 2, 3))
    added = [
        Counter(str(node.target) for node in joint.graph.nodes if node.op == "call_function")
        for joint in (one, two, three)
    ]
    assert added[2] - added[1] == added[1] - added[0]
    assert (added[1] - added[0]).total() <= 215


def test_traced_without_group_has_no_symbols() -> None:
    joint = traced(HybridModel("[*E]", **TINY), tokens())
    assert not calls(joint, "_c10d", "fxoverlap.exchange", "aten._local", "aten._assert")
    assert all(
        isinstance(size, int) for node in joint.graph.nodes for size in getattr(node.meta.get("val"), "shape", ())
    )


def test_shared_expert_does_not_feed_the_dispatch(group: dist.ProcessGroup) -> None:
    joint = traced(HybridModel("E", group=group, shared_dim=12, **TINY), tokens())
    dispatch = next(node for node in joint.graph.nodes if node.target is torch.ops.fxoverlap.exchange.default)
    before, todo = {dispatch}, [dispatch]
    while todo:
        new = set(todo.pop().all_input_nodes) - before
        before |= new
        todo += new
    names = {compat.input_descriptor(node)[1] for node in before if node.op == "placeholder"}
    assert "layers.0.router.weight" in names and not [name for name in names if "shared" in str(name)]


# --- two ranks --------------------------------------------------------------------------------------------------------

TWO_RANK_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": KINDS["all"],
    "one expert a rank": {"num_experts": 2},
    "idle rank": {"selection_bias": True, "idle": True},
}


def two_rank_model(group: dist.ProcessGroup | None, idle: bool = False, **options: Any) -> HybridModel:
    model = HybridModel("[*E]-[*E]", group=group, **TINY | options).double()
    if idle:  # all tokens go to the experts of rank 0
        for layer in model.layers:
            if isinstance(layer, MoE):
                layer.expert_bias[:2] = 10.0
    return model


def _run_on(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, options in TWO_RANK_CASES.items():
        model, ids = two_rank_model(dist.group.WORLD, **options), tokens(rank)
        joint = traced(copy.deepcopy(model), ids)
        results[name] = {"state": copy.deepcopy(model.state_dict()), "eager": run(copy.deepcopy(model), *ids)}
        results[name]["graph"] = run_graph(joint, copy.deepcopy(model), ids)
        results[name]["calls"] = calls(joint, "_c10d", "fxoverlap.exchange", "aten._local", "aten._assert")
    layer = MoE(16, 4, 8, top_k=1, selection_bias=True, group=dist.group.WORLD)
    layer.tokens_per_expert.copy_(torch.tensor([[5, 1, 2, 0], [1, 1, 2, 4]][rank]))
    layer.update_expert_bias(0.5)
    results["bias"] = layer.expert_bias
    results["bf16"] = run(two_rank_model(dist.group.WORLD, **KINDS["all"]).bfloat16(), *tokens(rank))
    try:
        MoE(16, 3, 8, top_k=1, group=dist.group.WORLD)
    except ValueError as error:
        results["error"] = str(error)
    return results


@pytest.fixture(scope="module")
def found(two_ranks: TwoRanks) -> list[dict[str, Any]]:
    """What each of two ranks got."""
    return two_ranks.run(_run_on)


@pytest.mark.parametrize("case", TWO_RANK_CASES)
def test_two_ranks_are_one(found: list[dict[str, Any]], case: str) -> None:
    model = two_rank_model(None, **TWO_RANK_CASES[case])
    expected = [run(copy.deepcopy(model), *tokens(rank)) for rank in (0, 1)]
    for rank in (0, 1):
        loss, grads = found[rank][case]["eager"]
        torch.testing.assert_close(loss, expected[rank][0], **CLOSE)
        for name, grad in grads.items():
            # Experts get gradients of both ranks' losses, on the rank that has them; the rest of their own rank's.
            if name.endswith(("w_gate_up", "w_down")):
                want = sum(grads[name] for _, grads in expected).chunk(2)[rank]
            else:
                want = expected[rank][1][name]
            torch.testing.assert_close(grad, want, **CLOSE)


def test_two_ranks_have_the_weights_of_one(found: list[dict[str, Any]]) -> None:
    for name, weight in two_rank_model(None).state_dict().items():
        parts = weight.chunk(2) if name.endswith(("w_gate_up", "w_down")) else (weight, weight)
        for rank in (0, 1):
            assert torch.equal(found[rank]["plain"]["state"][name], parts[rank]), name


@pytest.mark.parametrize("case", TWO_RANK_CASES)
@pytest.mark.parametrize("rank", [0, 1])
def test_traced_on_two_ranks(found: list[dict[str, Any]], rank: int, case: str) -> None:
    result = found[rank][case]
    assert result["calls"] == {key: 2 * n for key, n in LAYER_CALLS.items()}
    assert_same(result["graph"], result["eager"])


def test_update_expert_bias_on_two_ranks(found: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert found[rank]["bias"].tolist() == [-0.5, 0.5, 0.0, 0.0]


def test_bfloat16_on_two_ranks(found: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        loss, grads = found[rank]["bf16"]
        assert loss.isfinite() and all(grad.isfinite().all() for grad in grads.values())


def test_experts_must_divide(found: list[dict[str, Any]]) -> None:
    assert found[0]["error"] == "MoE: num_experts must be a multiple of the group size 2, got 3; change one of them"
