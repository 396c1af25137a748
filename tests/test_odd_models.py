"""Models whose layers are put together in unusual ways: each one trains bit for bit like eager, or is refused by name.

Every model has MoE layers with list splits, as other people's models have them; what is odd is the wiring around them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from odd import Attention, Dense, Odd, in_turn, moe
from torch import Tensor, nn
from toys import RawMoE, batches, train_both

import fxoverlap as fxo
from fxoverlap.ir import Slot
from fxoverlap.passes import op_facts


class Returns(nn.Module):
    """A layer whose forward returns something else than a tensor, made by a function of its input and output."""

    def __init__(self, inner: nn.Module, what: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.what = inner, what

    def forward(self, x: Tensor) -> Any:
        return self.what(x, self.inner(x))


class State(NamedTuple):
    hidden: Tensor
    residual: Tensor
    step: int


class LoggedMoE(RawMoE):
    """A MoE that also gives its router's z-loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        z = self.router(self.norm(x).flatten(0, 1)).logsumexp(-1).square().mean()
        return super().forward(x), z


def fixed_exchange(x: Tensor, name: str) -> Tensor:
    return funcol.all_to_all_single_autograd(x, None, None, name)


class Fixed(nn.Module):
    """A MoE of fixed capacity; `shared` reads the tokens that came, beside the experts."""

    def __init__(self, group: dist.ProcessGroup, shared: bool = False, payloads: int = 1) -> None:
        super().__init__()
        self.linear, self.gate, self.name, self.payloads = (
            nn.Linear(16, 16),
            nn.Linear(16, 1),
            group.group_name,
            payloads,
        )
        self.shared = nn.Linear(16, 16) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        sent = [fixed_exchange(rows * (i + 1), self.name) for i in range(self.payloads)]
        score = fixed_exchange(self.gate(rows), self.name)
        hidden = torch.relu(self.linear(sum(sent[1:], sent[0]))) * score
        if self.shared is not None:
            hidden = hidden + self.shared(sent[0])
        return x + fixed_exchange(hidden, self.name).view_as(x)


# --- the models -------------------------------------------------------------------------------------------------


def tuples(group: Any) -> Odd:
    def wire(m: Odd, x: Tensor) -> Tensor:
        for layer in m.layers:
            x, residual, nothing = layer(x)
            assert nothing is None
            x = x + 0.5 * residual
        return x

    return Odd(wire, *(Returns(each, lambda x, y: (y, x, None)) for each in (moe(group), Dense(), moe(group))))


def dicts(group: Any) -> Odd:
    def wire(m: Odd, x: Tensor) -> tuple[Tensor, Tensor]:
        aux = x.new_zeros(())
        for layer in m.layers:
            found = layer(x)
            x, aux = found["hidden"], aux + found["aux"]
        return x, aux

    kept = lambda x, y: {"hidden": y, "aux": (y - x).square().mean()}  # noqa: E731
    return Odd(wire, Returns(moe(group), kept), Returns(Dense(), kept), Returns(moe(group), kept))


def named_tuples(group: Any) -> Odd:
    class Step(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, state: State) -> State:
            return State(self.inner(state.hidden), state.residual + state.hidden, state.step + 1)

    def wire(m: Odd, x: Tensor) -> Tensor:
        state = State(x, torch.zeros_like(x), 0)
        for layer in m.layers:
            state = layer(state)
        return state.hidden + state.residual / state.step

    return Odd(wire, Step(moe(group)), Step(Attention()), Step(moe(group)))


def in_place_state(group: Any) -> Odd:
    """Layers return None and write their result into a dict."""

    class Writes(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, state: dict[str, Tensor]) -> None:
            state["x"] = self.inner(state["x"])

    def wire(m: Odd, x: Tensor) -> Tensor:
        state = {"x": x}
        for layer in m.layers:
            assert layer(state) is None
        return state["x"]

    return Odd(wire, Writes(moe(group)), Writes(Dense()), Writes(moe(group)))


def all_hidden_states(group: Any) -> Odd:
    """The residual stream is the list of all hidden states, and the head reads their mean."""

    def wire(m: Odd, x: Tensor) -> Tensor:
        states = [x]
        for layer in m.layers:
            states.append(layer(torch.stack(states).mean(0)))
        return torch.stack(states).sum(0)

    return Odd(wire, moe(group), Dense(), moe(group), Dense())


def dense_net(group: Any) -> Odd:
    """Every layer reads the results of all layers before it."""

    def wire(m: Odd, x: Tensor) -> Tensor:
        states = [x]
        for i, layer in enumerate(m.layers):
            states.append(layer(m.mix[i](torch.cat(states, -1))))
        return states[-1]

    mix = nn.ModuleList(nn.Linear(16 * (i + 1), 16) for i in range(4))
    return Odd(wire, moe(group), Dense(), moe(group), moe(group), mix=mix)


def u_net(group: Any) -> Odd:
    """The second half adds the states of the first half in reverse order."""

    def wire(m: Odd, x: Tensor) -> Tensor:
        down = []
        for layer in m.layers[:2]:
            x = layer(x)
            down.append(x)
        for layer in m.layers[2:]:
            x = layer(x + down.pop())
        return x

    return Odd(wire, moe(group), Dense(), Dense(), moe(group))


def two_moe_in_a_layer(group: Any) -> Odd:
    return Odd(in_turn, nn.Sequential(moe(group), Dense(), moe(group)), nn.Sequential(moe(group), moe(group)))


def parallel_moe_in_a_layer(group: Any) -> Odd:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = moe(group), moe(group)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    return Odd(in_turn, Both(), Both())


def moe_first_and_last(group: Any) -> Odd:
    return Odd(in_turn, moe(group), Dense(), Attention(), moe(group))


def unread_moe(group: Any) -> Odd:
    def wire(m: Odd, x: Tensor) -> Tensor:
        for layer in m.layers[:2]:
            x = layer(x)
        m.layers[2](x)
        return m.layers[3](x)

    return Odd(wire, moe(group), Dense(), moe(group), moe(group))


def shared_reads_dispatched(group: Any) -> Odd:
    return Odd(in_turn, Fixed(group, shared=True), Dense(), Fixed(group, shared=True))


def payloads(group: Any) -> Odd:
    return Odd(in_turn, Fixed(group, payloads=3), Dense(), Fixed(group, payloads=2))


def parallel_block(group: Any) -> Odd:
    """Attention and experts read the same input, and their results are added."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.moe = Attention(), moe(group)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x) + self.moe(x)

    return Odd(in_turn, Parallel(), Parallel())


def no_layers(group: Any) -> Odd:
    return Odd(lambda m, x: x)


def empty_layers_and_a_moe_outside(group: Any) -> Odd:
    return Odd(lambda m, x: m.block(x), block=moe(group))


def tied_and_scaled(group: Any) -> Odd:
    model = Odd(lambda m, x: in_turn(m, x * 4.0), moe(group), Dense(), moe(group))
    model.head = nn.Linear(16, 32, bias=False)
    model.head.weight = model.embed.weight
    return model


def z_loss(group: Any) -> Odd:
    def wire(m: Odd, x: Tensor) -> tuple[Tensor, Tensor]:
        losses = []
        for layer in m.layers:
            x, z = layer(x)
            losses.append(z)
        return x, 0.1 * torch.stack(losses).sum()

    return Odd(wire, LoggedMoE(16, 4, group), LoggedMoE(16, 4, group), LoggedMoE(16, 4, group))


def states_as_outputs(group: Any) -> Odd:
    def wire(m: Odd, x: Tensor) -> tuple[Any, ...]:
        states = {"embed": x}
        for i, layer in enumerate(m.layers):
            x = states[f"layer {i}"] = layer(x)
        return x, 0.0, states

    return Odd(wire, moe(group), Dense(), moe(group))


def early_exits(group: Any) -> Odd:
    """A loss after every layer, with the one head."""

    def wire(m: Odd, x: Tensor) -> tuple[Tensor, Tensor]:
        added = x.new_zeros(())
        for layer in m.layers:
            x = layer(x)
            added = added + 0.1 * m.loss(x, m.targets)
        return x, added

    return Odd(wire, moe(group), Dense(), moe(group))


def early_exits_own_heads(group: Any) -> Odd:
    def wire(m: Odd, x: Tensor) -> tuple[Tensor, Tensor]:
        added = x.new_zeros(())
        for layer, head in zip(m.layers, m.heads, strict=True):
            x = layer(x)
            added = added + F.cross_entropy(head(x.detach()).flatten(0, 1), m.targets.flatten())
        return x, added

    heads = nn.ModuleList(nn.Linear(16, 32) for _ in range(3))
    return Odd(wire, moe(group), Dense(), moe(group), heads=heads)


def module_dict(group: Any) -> Odd:
    def wire(m: Odd, x: Tensor) -> Tensor:
        for name in ("in", "deep", "out"):
            x = m.layers[name](x)
        return x

    model = Odd(wire)
    model.layers = nn.ModuleDict({"out": moe(group), "in": moe(group), "deep": Dense()})
    return model


def shared_experts(group: Any) -> Odd:
    """Two MoE layers have one expert matrix and one router."""
    model = Odd(in_turn, moe(group), Dense(), moe(group))
    model.layers[2].w = model.layers[0].w
    model.layers[2].router = model.layers[0].router
    return model


def one_layer_twice(group: Any) -> Odd:
    """A layer that is run twice (a universal transformer)."""
    return Odd(lambda m, x: in_turn(m, in_turn(m, x)), moe(group), Dense())


def one_module_three_times(group: Any) -> Odd:
    block = moe(group)
    return Odd(in_turn, block, block, Dense(), block)


def two_sides_of_one_stack(group: Any) -> Odd:
    """The layers run on the tokens, and again on the tokens in reverse (a siamese model)."""
    return Odd(lambda m, x: in_turn(m, x) * in_turn(m, x.flip(1)).flip(1), moe(group), Dense())


def nested(group: Any) -> Odd:
    def wire(m: Odd, x: Tensor) -> Tensor:
        for stage in m.stages:
            for layer in stage.layers:
                x = layer(x)
        return x

    def stage(*layers: nn.Module) -> nn.Module:
        made = nn.Module()
        made.layers = nn.ModuleList(layers)
        return made

    return Odd(wire, stages=nn.ModuleList([stage(moe(group), Dense()), stage(Attention(), moe(group))]))


def other_order(group: Any) -> Odd:
    """The layers run last to first."""

    def wire(m: Odd, x: Tensor) -> Tensor:
        for layer in reversed(m.layers):
            x = layer(x)
        return x

    return Odd(wire, moe(group), Dense(), moe(group))


def skipped_layer(group: Any) -> Odd:
    """One layer is not run at all: its gradients stay None."""

    def wire(m: Odd, x: Tensor) -> Tensor:
        return m.layers[2](m.layers[0](x))

    return Odd(wire, moe(group), Dense(), moe(group))


def frozen(group: Any) -> Odd:
    model = Odd(in_turn, moe(group), Dense(), moe(group))
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


def stop_gradient(group: Any) -> Odd:
    """Nothing flows back past the second layer."""
    return Odd(lambda m, x: m.layers[2](m.layers[1](m.layers[0](x)).detach()), moe(group), Dense(), moe(group))


def gated_layers(group: Any) -> Odd:
    """Each layer's result is weighted by a scalar that the embedding gives (mixture of depths, soft)."""

    def wire(m: Odd, x: Tensor) -> Tensor:
        gates = m.depth(x.mean(1)).sigmoid()
        for i, layer in enumerate(m.layers):
            x = x + gates[:, i, None, None] * (layer(x) - x)
        return x

    return Odd(wire, moe(group), Dense(), moe(group), depth=nn.Linear(16, 3))


def router_reads_the_layer_before(group: Any) -> Odd:
    """The second MoE routes by the state in front of the first."""

    class Routed(RawMoE):
        def forward(self, x: Tensor, by: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * self.router(by).mean(-1, keepdim=True)

    def wire(m: Odd, x: Tensor) -> Tensor:
        y = m.layers[0](x)
        return m.layers[1](y, x)

    return Odd(wire, moe(group), Routed(16, 4, group))


def hyper_connections(group: Any) -> Odd:
    """Four residual streams, mixed before and after every layer."""

    def wire(m: Odd, x: Tensor) -> Tensor:
        streams = torch.stack([x, x * 2, x * 3, x * 4])
        for i, layer in enumerate(m.layers):
            mixed = torch.einsum("n,nbtd->btd", m.weights[i], streams)
            streams = streams + m.weights[i].flip(0)[:, None, None, None] * layer(mixed)
        return streams.sum(0)

    weights = nn.Parameter(torch.linspace(0.1, 1.2, 12).view(3, 4))
    return Odd(wire, moe(group), Dense(), moe(group), weights=weights)


MODELS: list[Callable[[Any], Odd]] = [
    tuples,
    dicts,
    named_tuples,
    in_place_state,
    all_hidden_states,
    dense_net,
    u_net,
    two_moe_in_a_layer,
    parallel_moe_in_a_layer,
    moe_first_and_last,
    unread_moe,
    shared_reads_dispatched,
    payloads,
    parallel_block,
    no_layers,
    empty_layers_and_a_moe_outside,
    tied_and_scaled,
    z_loss,
    states_as_outputs,
    early_exits,
    early_exits_own_heads,
    module_dict,
    shared_experts,
    one_layer_twice,
    one_module_three_times,
    two_sides_of_one_stack,
    nested,
    other_order,
    skipped_layer,
    frozen,
    stop_gradient,
    gated_layers,
    router_reads_the_layer_before,
    hyper_connections,
]


SLOW = (
    *(tuples, all_hidden_states, early_exits_own_heads, gated_layers, moe_first_and_last, tied_and_scaled),
    *(other_order, parallel_block),
)
"""Each has another one that is much like it."""


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=make.__name__, marks=[pytest.mark.slow] * (make in SLOW)) for make in MODELS],
)
def test_odd_model(group: dist.ProcessGroup, make: Callable[[Any], Odd]) -> None:
    torch.manual_seed(0)
    assert train_both(make(group), lambda step: batches(3, seed=step), steps=2) == []


@pytest.mark.parametrize(
    ("make", "layers"), [(one_layer_twice, "0101"), (one_module_three_times, "0020"), (shared_experts, "012")]
)
def test_each_run_of_a_layer_is_a_layer(group: dist.ProcessGroup, make: Callable[[Any], Odd], layers: str) -> None:
    """A module that two layers share belongs to the one that runs it."""
    overlapped = fxo.transform(make(group), example_inputs=batches(1)[0])
    chunk = overlapped.plan("F").forward
    assert [layer.fqn for layer in chunk.joint.physical] == [f"layers.{i}" for i in layers]
    moes = sum(i.node.slot is Slot.DISPATCH for i in overlapped.plan("F").order)
    assert moes == (3 if layers == "0020" else 2)
    tags = [op_facts.tag(node) for node in op_facts.ops(chunk.joint.module.graph)]
    routers = {tag.layer for tag in tags if tag.fqn == "layers.0.router"}
    assert routers == ({0, 2} if make is shared_experts else {i for i, run in enumerate(layers) if run == "0"})
