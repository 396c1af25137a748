"""Multi-token prediction in `HybridModel`: losses and gradients against loops over positions in fp64, and fused steps.

Proves: each depth reads the tokens and predicts the targets that many positions ahead, of its own row and sequence, on
paths of valid tokens only; its loss is a mean over its own targets, and 0 without any; head, embedding and trunk get
gradients of the depths exactly where they should; weights and names do not depend on how many depths there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hybrid_patterns import SMALL
from torch import Tensor, nn
from toys import batches, eager_step, same_bits, toy, train_both

import fxoverlap as fxo
from fxoverlap import compat
from fxoverlap.models import MLP, HybridModel, MoE
from fxoverlap.models.hybrid import sequence_ids
from fxoverlap.models.loss import IGNORED, count
from fxoverlap.models.mtp import ahead

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)

# In fp64, what is summed in another order differs by a few units of 1e-16, relative to terms of order one; the layers
# between amplify it by up to some hundred.
CLOSE = {"rtol": 1e-11, "atol": 1e-12}
POSITIONS = 7
PATTERN = "E/E/E"


def made(pattern: str, **options: Any) -> HybridModel:
    """A small model in fp64, none of whose norm weights is one."""
    model = toy(pattern, **{**SMALL, **options}).double()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
    return model


def data(seed: int = 0, batch: int = 2, positions: int = POSITIONS) -> tuple[Tensor, Tensor]:
    both = torch.randint(0, 32, (2, batch, positions), generator=torch.Generator().manual_seed(seed))
    return both[0], both[1]


def without(targets: Tensor, *positions: int) -> Tensor:
    """Targets that do not count at some positions, counted row after row."""
    return targets.flatten().index_fill(0, torch.tensor(positions, dtype=torch.int64), -100).view_as(targets)


def invalid_at(*positions: int, batch: int = 2) -> Tensor:
    return torch.ones(batch * POSITIONS, dtype=torch.bool).index_fill(0, torch.tensor(positions), False).view(batch, -1)


# --- the plain formulation --------------------------------------------------------------------------------------------


def ends_of(tokens: Tensor, bounds: Sequence[int]) -> list[list[int]]:
    """For each token of each row the position at which its sequence, or else its row, ends."""
    batch, positions = tokens.shape
    flat = [min(end for end in bounds if end > i) for i in range(batch * positions)]
    return [[min(flat[r * positions + t] - r * positions, positions) for t in range(positions)] for r in range(batch)]


def normed(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return x / (x.square().mean() + torch.finfo(x.dtype).eps).sqrt() * norm.weight


def through(layers: nn.ModuleList, hidden: Tensor, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    extra = []
    for layer in layers:
        if isinstance(layer, MoE):
            hidden, aux = layer(hidden)
            extra += [aux] * (aux is not None)
        else:
            hidden = layer(hidden) if isinstance(layer, MLP) else layer(hidden, ids)
    return hidden, extra


def plain_losses(
    model: HybridModel,
    tokens: Tensor,
    targets: Tensor,
    bounds: Sequence[int] | None = None,
    mask: Tensor | None = None,
    *,
    detach_head: bool = False,
    detach_trunk: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Mean cross entropies of the model and of each depth, and all auxiliary losses, position by position."""
    batch, positions = tokens.shape
    ends = ends_of(tokens, bounds or range(0, batch * positions + 1, positions))
    ids = torch.tensor([[r * positions + end for end in row] for r, row in enumerate(ends)])
    places = [(r, t) for r in range(batch) for t in range(positions)]
    table = model.embed.weight

    def mean(state: dict[tuple[int, int], Tensor], depth: int, head: Tensor) -> Tensor:
        found = []
        for r, t in places:
            path = range(t + 1, t + depth + 1)
            if t + depth >= ends[r][t] or targets[r, t + depth] == -100:
                continue
            if mask is None or all(mask[r, i] for i in path):
                logits = head @ state[r, t]
                found.append(torch.log(logits.exp().sum()) - logits[targets[r, t + depth]])
        return sum(found) / len(found) if found else 0 * (head.sum() + state[places[0]].sum())

    hidden, extra = through(model.layers, torch.stack([table[row] for row in tokens]), ids)
    state = {(r, t): normed(hidden[r, t], model.norm) for r, t in places}
    losses = [mean(state, 0, model.head.weight)]
    if detach_trunk:
        state, table = {place: x.detach() for place, x in state.items()}, table.detach()
    for k, depth in enumerate(model.mtp, 1):
        mixed = []
        for r, t in places:
            token = tokens[r, t + k] if t + k < ends[r][t] else torch.tensor(0)
            row = table[token] if mask is None or t + k >= ends[r][t] or mask[r, t + k] else table[token].detach()
            h, e = normed(state[r, t], depth.hidden_norm), normed(row, depth.token_norm)
            if hasattr(depth, "proj"):
                mixed.append(depth.proj.weight @ torch.cat((h, e)))
            else:
                mixed.append(depth.hidden_proj.weight @ h + depth.token_proj.weight @ e)
        hidden, more = through(depth.layers, torch.stack(mixed).view_as(hidden), ids)
        extra += more
        state = {(r, t): normed(hidden[r, t], depth.norm) for r, t in places}
        losses.append(mean(state, k, model.head.weight.detach() if detach_head else model.head.weight))
    return losses, extra


def total(losses: list[Tensor], extra: list[Tensor], weight: float = 0.1) -> Tensor:
    """The model's loss: its own, and `weight` times the mean of the depths'."""
    own, *depths = losses
    return own + (weight * sum(depths) / len(depths) if depths else 0) + sum(extra)


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Of every parameter, zero if the loss does not depend on it."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True, retain_graph=True)
    return dict(zip(names, grads, strict=True))


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "depth 1": ("*/*", {}, {}),
    "depth 2": ("*/*-/*-", {}, {}),
    "depth 3": ("-/*/*/*", {}, {}),
    "depth 4": ("-/-/-/-/-", {}, {}),
    "experts, with auxiliary losses": ("[*E]/[*E]/[*E]", {"aux_loss": 0.3, "z_loss": 0.1}, {}),
    "Mamba, delta net": ("[M*E]/[G-][M]/[G-][M]", {}, {}),
    "latent attention": ("+/[+E]", {}, {}),
    "no trunk": ("/*-/*-", {}, {}),
    "two projections": ("*/*E/*E", {"mtp_projections": 2}, {}),
    "tied": ("*/*/*", {"tied": True}, {}),
    "weight": ("*/*/*", {"mtp_weight": 0.7}, {}),
    "detached head": ("*E/*E/*E", {"mtp_detach_head": True}, {}),
    "detached trunk": ("*E/*E/*E", {"mtp_detach_trunk": True}, {}),
    "detached, tied": ("*/*E/*E", {"mtp_detach_head": True, "mtp_detach_trunk": True, "tied": True}, {}),
    "detached head, tied": ("*/*/*", {"mtp_detach_head": True, "tied": True}, {}),
    "a target that does not count": ("*/*/*", {}, {"ignored": (3, 8)}),
    "packed": ("*/*M/*M", {}, {"bounds": (0, 3, 4, 11, 14)}),
    "packed, experts": ("[*E]/[GE]/[GE]", {}, {"bounds": (0, 2, 7, 12, 14)}),
    "packed, sequences of no tokens": ("*/*/*", {}, {"bounds": (0, 0, 5, 5, 14, 14)}),
    "masked": ("*/*/*/*", {}, {"mask": invalid_at(2, 9)}),
    "masked at both ends": ("*/*M/*M", {}, {"mask": invalid_at(0, 6, 7, 13)}),
    "masked, detached, experts": ("*E/*E", {"mtp_detach_trunk": True}, {"mask": invalid_at(4)}),
    "all at once": (
        "*/*E/*E/*E",
        {"tied": True, "mtp_projections": 2, "mtp_weight": 2.0},
        {"bounds": (0, 5, 9, 14), "mask": invalid_at(2, 11), "ignored": (1, 7)},
    ),
    "one position": ("*/*/*", {}, {"positions": 1}),
    "deeper than long": ("*/-/-/-/-", {}, {"positions": 3}),
}
"""Pattern, options, input."""


def inputs(
    positions: int = POSITIONS,
    ignored: tuple[int, ...] = (),
    bounds: tuple[int, ...] | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[int, ...] | None, Tensor | None]:
    tokens, targets = data(positions=positions)
    return tokens, without(targets, *ignored), bounds, mask


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_loop(case: str, per_token: bool) -> None:
    pattern, options, given = CASES[case]
    model = made(pattern, per_token=per_token, **options)
    tokens, targets, bounds, mask = inputs(**given)
    detached = {key: options.get(f"mtp_{key}", False) for key in ("detach_head", "detach_trunk")}
    losses, extra = plain_losses(model, tokens, targets, bounds, mask, **detached)
    want = total(losses, extra, options.get("mtp_weight", 0.1)) * (int((targets != -100).sum()) if per_token else 1)
    got = model(tokens, targets, None if bounds is None else torch.tensor(bounds), mask)
    torch.testing.assert_close(got, want, **CLOSE)
    assert_close(gradients(got, model), gradients(want, model))


# --- what a depth reads -----------------------------------------------------------------------------------------------


N = IGNORED
READS: dict[str, tuple[dict[str, Any], list[tuple[list[int], list[int]]]]] = {
    "to the end": (
        {},
        [([11, 12, 13, 14, 15, 0], [2, 3, 4, 5, 6, N]), ([12, 13, 14, 15, 0, 0], [3, 4, 5, 6, N, N])],
    ),
    "packed": (
        {"ids": [0, 0, 0, 1, 1, 1]},
        [([11, 12, 0, 14, 15, 0], [2, 3, N, 5, 6, N]), ([12, 0, 0, 15, 0, 0], [3, N, N, 6, N, N])],
    ),
    "sequences of one token": (
        {"ids": [0, 1, 2, 3, 4, 4]},
        [([0, 0, 0, 0, 15, 0], [N, N, N, N, 6, N]), ([0] * 6, [N] * 6)],
    ),
    "an invalid token": (
        {"mask": [1, 1, 1, 0, 1, 1]},
        [([11, 12, 13, 14, 15, 0], [2, 3, N, 5, 6, N]), ([12, 13, 14, 15, 0, 0], [3, N, N, 6, N, N])],
    ),
    "an invalid first token, on no path": (
        {"mask": [0, 1, 1, 1, 1, 1]},
        [([11, 12, 13, 14, 15, 0], [2, 3, 4, 5, 6, N]), ([12, 13, 14, 15, 0, 0], [3, 4, 5, 6, N, N])],
    ),
    "an invalid first token of another sequence": (
        {"ids": [0, 0, 0, 1, 1, 1], "mask": [1, 1, 1, 0, 1, 1]},
        [([11, 12, 0, 14, 15, 0], [2, 3, N, 5, 6, N]), ([12, 0, 0, 15, 0, 0], [3, N, N, 6, N, N])],
    ),
}
"""Options, and tokens and targets of two depths, for tokens 10 to 15 and targets 1 to 6."""


@pytest.mark.parametrize("case", READS)
def test_what_a_depth_reads(case: str) -> None:
    """In a row with others before and behind it, of which nothing comes in."""
    options, want = READS[case]
    tokens = torch.stack([torch.full((6,), 99), torch.arange(10, 16), torch.full((6,), 99)])
    targets = torch.stack([torch.full((6,), 88), torch.arange(1, 7), torch.full((6,), 88)])
    ids = torch.tensor(options["ids"]).expand(3, -1) if "ids" in options else None
    mask = torch.tensor(options["mask"]).bool().expand(3, -1) if "mask" in options else None
    got = [(each.tokens[1].tolist(), each.targets[1].tolist()) for each in islice(ahead(tokens, targets, ids, mask), 2)]
    assert got == want


def sums(model: HybridModel, tokens: Tensor, targets: Tensor, bounds: Tensor | None, mask: Tensor) -> Tensor:
    """Sums of the cross entropies of the model and of its one depth, [2]; experts must have no auxiliary loss."""
    own, both = ((model, setattr(model, "mtp_weight", weight))[0](tokens, targets, bounds, mask) for weight in (0, 1))
    ids = None if bounds is None else sequence_ids(bounds, tokens)
    return torch.stack((own * count(targets), (both - own) * count(next(ahead(tokens, targets, ids, mask)).targets)))


def test_packed_is_the_pieces() -> None:
    lengths = (5, 1, 6, 2)
    model = made("M/[GE]", aux_loss=0.0)  # rotary tables are fp32: attention differs between places by some 1e-8
    tokens, targets = data(batch=1, positions=sum(lengths))
    mask = torch.arange(sum(lengths))[None] % 5 != 3
    whole = sums(model, tokens, targets, torch.tensor([0, *accumulate(lengths)]), mask)
    pieces = zip(*(each.split(lengths, 1) for each in (tokens, targets, mask)), strict=True)
    parts = sum(sums(model, own_tokens, own_targets, None, own_mask) for own_tokens, own_targets, own_mask in pieces)
    torch.testing.assert_close(whole, parts, **CLOSE)
    for got, want in zip(*([gradients(each, model) for each in both] for both in (whole, parts)), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize(
    "mask, message",
    [
        (torch.ones(2, 7), r"mtp_input_mask must be bool \[2, 7\], as the tokens, got torch.float32 \[2, 7\]"),
        (torch.ones(2, 6, dtype=torch.bool), r"bool \[2, 7\], .* got torch.bool \[2, 6\]; give one truth value"),
    ],
)
def test_errors(mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made("*/*")(*data(), None, mask)


def test_another_number_of_projections() -> None:
    with pytest.raises(ValueError, match="projections must be 1 or 2, got 3; give one of these"):
        made("*/*", mtp_projections=3)


# --- losses and what they train ---------------------------------------------------------------------------------------


def test_b84_b86_a_depths_loss_is_the_mean_of_its_own_targets() -> None:
    """8 tokens, of which depth 1 predicts 7; then a microbatch in which it predicts none, then one without targets."""
    model = made("[*E]/[*E]", aux_loss=0.0, mtp_weight=1.0)
    tokens, targets = data(batch=1, positions=8)
    (own, depth), _ = plain_losses(model, tokens, targets)
    torch.testing.assert_close(model(tokens, targets), own + depth, **CLOSE)
    (_, of_seven), _ = plain_losses(model, tokens, without(targets, 0))  # the model's first, which no depth predicts
    torch.testing.assert_close(depth, of_seven, **CLOSE)
    alone = made("[*E]", aux_loss=0.0)
    alone.load_state_dict(model.state_dict(), strict=False)

    invalid = model(tokens, targets, None, torch.zeros(1, 8, dtype=torch.bool))
    assert torch.equal(invalid, alone(tokens, targets))
    grads, want = gradients(invalid, model), gradients(alone(tokens, targets), alone)
    for name, grad in grads.items():
        assert torch.equal(grad, torch.zeros_like(grad) if name.startswith("mtp.") else want[name]), name

    nothing = model(tokens, torch.full_like(targets, -100))
    assert nothing == 0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in gradients(nothing, model).values())


def test_per_token_loss_of_microbatches_is_that_of_all() -> None:
    """One microbatch of two rows, or two of a row with unequal numbers of targets: divided by all targets, the same."""
    model = made("*", per_token=True)
    tokens, targets = data()
    targets = without(targets, 8, 9, 10)
    whole = model(tokens, targets) / 11
    parts = sum(model(tokens[i : i + 1], targets[i : i + 1]) for i in (0, 1)) / 11
    torch.testing.assert_close(whole, parts, **CLOSE)
    assert_close(gradients(whole, model), gradients(parts, model))
    torch.testing.assert_close(whole, made("*")(tokens, targets), **CLOSE)


@pytest.mark.parametrize("tied", [False, True])
def test_b89_a_detached_head_is_left_alone(tied: bool) -> None:
    """Its gradient is that of the main loss, bit for bit; tied, the depths still train it as embedding, or nothing."""
    alone, given = toy("E", tied=tied), batches(1)[0]
    eager_step(alone, [given])
    with_both = toy(PATTERN, tied=tied, mtp_detach_head=True, mtp_detach_trunk=True)
    with_head = toy(PATTERN, tied=tied, mtp_detach_head=True)
    attached = toy(PATTERN, tied=tied)
    for model in (with_both, with_head, attached):
        eager_step(model, [given])
        assert all(parameter.grad is not None for parameter in model.mtp.parameters())
    for name, parameter in alone.named_parameters():
        assert same_bits(with_both.get_parameter(name).grad, parameter.grad), name
        assert not same_bits(attached.get_parameter(name).grad, parameter.grad), name
    if not tied:
        assert same_bits(with_head.head.weight.grad, alone.head.weight.grad)
    assert not same_bits(with_head.embed.weight.grad, alone.embed.weight.grad)


@pytest.mark.parametrize("tokens", [8, 64])
def test_b85_b87_gradients_of_the_depths_are_summed_and_scaled_once(tokens: int, group: dist.ProcessGroup) -> None:
    """In a fused step: that of each loss, added; and exactly as many times of it as the loss is multiplied by."""
    model = toy(PATTERN, group, tied=True).double()
    (given,) = batches(1, tokens=tokens)
    scale = torch.ones(())
    overlapped = fxo.transform(model, fxo.OverlapConfig(PATTERN, grad_scale=scale))
    fused: dict[float, dict[str, Tensor]] = {}
    for value in (1.0, 2.0, 0.5):
        scale.fill_(value)
        overlapped.step([given])
        fused[value] = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
    losses, extra = plain_losses(model, *given)
    separate = [gradients(each, model) for each in (losses[0], *(0.05 * each for each in losses[1:]), sum(extra))]
    assert_close(fused[1.0], {name: sum(grads[name] for grads in separate) for name in fused[1.0]})
    for value in (2.0, 0.5):
        assert all(torch.equal(grad, value * fused[1.0][name]) for name, grad in fused[value].items())


# --- weights and names ------------------------------------------------------------------------------------------------


def test_b90_no_depths_in_any_form_are_the_same_model(group: dist.ProcessGroup) -> None:
    """No part and parts of no layers: names, weights, loss and plan; one part builds one depth."""
    models = {pattern: toy(pattern, group) for pattern in ("[*E]", "[*E]/", "[*E]//")}
    given = batches(1)
    plans, losses = [], []
    for model in models.values():
        overlapped = fxo.transform(model, example_inputs=given[0])
        losses.append(overlapped.step(given).losses[0])
        plans.append(str(overlapped.plan("FB")))
        assert len(model.mtp) == 0 and not [name for name in model.state_dict() if "mtp" in name]
    assert plans[0] == plans[1] == plans[2] and losses[0] == losses[1] == losses[2]
    assert len(toy("[*E]/[*E]", group).mtp) == 1


def test_names_of_parameters() -> None:
    def names(**options: Any) -> list[str]:
        model = toy("E/-/-", **options)
        return [name for name in model.state_dict() if name.startswith("mtp.1.")]

    own = ["mtp.1.layers.0.norm.weight", "mtp.1.layers.0.swiglu.gate_up.weight", "mtp.1.layers.0.swiglu.down.weight"]
    before, behind = ["mtp.1.hidden_norm.weight", "mtp.1.token_norm.weight"], ["mtp.1.norm.weight"]
    assert names() == [*before, "mtp.1.proj.weight", *own, *behind]
    two = ["mtp.1.hidden_proj.weight", "mtp.1.token_proj.weight"]
    assert names(mtp_projections=2) == [*before, *two, *own, *behind]
    assert toy("-/-").mtp[0].proj.weight.shape == (16, 32)


@pytest.mark.parametrize("tied", [False, True])
def test_one_seed_is_one_trunk_whatever_the_depths(tied: bool) -> None:
    alone, one, three = (toy(pattern, tied=tied).state_dict() for pattern in ("*E", "*E/*E", "*E/*E/*E/*E"))
    assert all(torch.equal(value, one[name]) for name, value in alone.items())
    assert all(torch.equal(value, three[name]) for name, value in one.items())
    assert not torch.equal(three["mtp.0.layers.1.w_down"], three["mtp.1.layers.1.w_down"])
    assert not torch.equal(three["mtp.0.proj.weight"], three["mtp.1.proj.weight"])


def test_one_seed_is_one_model_for_all_group_sizes(group: dist.ProcessGroup) -> None:
    alone, shared = (toy("*E/*E/*E", each) for each in (None, group))
    assert all(torch.equal(value, shared.state_dict()[name]) for name, value in alone.state_dict().items())


def test_half_precision() -> None:
    model = toy("*-/*-/*-").bfloat16()  # no auxiliary loss, which is fp32 always
    loss = model(*batches(1)[0])
    assert loss.dtype == torch.float32
    assert all(each.dtype == torch.bfloat16 and each.isfinite().all() for each in gradients(loss, model).values())


# --- the traced graph, and fused steps --------------------------------------------------------------------------------

TRACED: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "detached": {"mtp_detach_head": True, "mtp_detach_trunk": True},
    "other": {"mtp_projections": 2, "per_token": True, "mtp_detach_head": True, "tied": True},
}


@pytest.mark.parametrize("case", TRACED)
def test_everything_is_in_the_graph_once(case: str, group: dist.ProcessGroup) -> None:
    """Norms, lookups and losses, forward and backward."""
    model, given = toy(PATTERN, group, **TRACED[case]), batches(1)[0]
    mode = compat.new_fake_mode()
    joint = compat.export_joint(model, tuple(compat.fake_like(mode, each) for each in given), mode)
    ops = ("rsqrt", "embedding.", "nll_loss_forward", "embedding_dense_backward", "nll_loss_backward")
    targets = [str(node.target) for node in joint.graph.nodes if node.op == "call_function"]
    # Norms: one in each of the three layers, a final norm for the model and each depth, and two before each projection.
    lookups_trained = 1 if "mtp_detach_trunk" in TRACED[case] else 3
    want = dict(zip(ops, (3 + 3 + 4, 3, 3, lookups_trained, 3), strict=True))
    assert {op: sum(f"aten.{op}" in target for target in targets) for op in ops} == want


def packed(step: int) -> list[tuple]:
    """Boundaries and invalid tokens at other places in each microbatch; in one of them no depth has a target."""
    found = []
    for i, (tokens, targets) in enumerate(batches(3, seed=step)):
        mask = torch.arange(8)[None] != 2 + i + step
        found.append((tokens, targets, torch.tensor([0, 3 + i, 5 + step, 8]), mask & (i != 1)))
    return found


@pytest.mark.parametrize("case", TRACED)
def test_a_fused_step_is_eager(case: str, group: dist.ProcessGroup) -> None:
    model = toy(PATTERN, group, dropout=0.1, **TRACED[case])
    overlapped = fxo.transform(model, fxo.OverlapConfig(PATTERN))
    assert train_both(overlapped, packed, steps=2) == []
    assert overlapped.report().variants == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_fused_step_without_any_target_is_eager(group: dist.ProcessGroup) -> None:
    def make(step: int) -> list[tuple]:
        return [(t, torch.full_like(y, -100) if i == 1 else y) for i, (t, y) in enumerate(batches(3, seed=step))]

    model = toy("[*E]/[*E]", group, aux_loss=0.0)
    assert train_both(model, make, steps=2) == []
    assert all(parameter.isfinite().all() for parameter in model.parameters())
