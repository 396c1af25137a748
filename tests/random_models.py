"""Random small models: a `Spec` says in one line what a model, its microbatches and its config are made of.

`Spec` prints as the expression that makes it, so that a failing example can be pasted. `build` gives the model, `data`
the microbatches of a step, `config` the config. `specs` is the hypothesis strategy that draws them; what is written
first in a choice is the plain case, to which failing examples shrink.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hybrid_patterns import group_start
from hypothesis import strategies as st
from random_blocks import PLAIN, Plain
from torch import Tensor, nn
from toys import RawMoE, random_order

import fxoverlap as fxo
from fxoverlap.ir import Phase
from fxoverlap.models import MLP, Attention, MoE
from fxoverlap.schedule.policies import Order

VOCAB = 16


@dataclass(frozen=True)
class Spec:
    """A random case. The values of a field that is a name are the choices in `specs`."""

    # The model.
    seed: int = 0
    dim: int = 8
    blocks: tuple[str, ...] = ("linear",)
    again: int | None = None
    tied: str = "no"
    frozen: str = "no"
    unused: bool = False
    aux: tuple[int, ...] = ()
    loss: str = "mean"
    outputs: str = "loss"
    dropout: float = 0.0
    bf16: bool = False
    name: str = "layers"
    # The microbatches of a step.
    lengths: tuple[int, ...] = (4, 4)
    form: str = "tuple"
    scales: tuple[float, ...] = (1.0,)
    mask: str = "no"
    soft: str = "no"
    own_scale: bool = False
    # What is around a step, and what happens between two.
    autocast: str = "no"
    train: bool = True
    zero: str = "none"
    between: str = "nothing"
    hooks: str = "no"
    module_hooks: str = "no"
    # The config.
    schedule: str = "auto"
    delay_wgrad: bool = True
    pattern: bool = False
    glob: str = "right"
    grad_scale: str = "1"
    dynamic: bool = True
    recompute: fxo.Recompute | None = None
    ramp: str = "none"
    early_release: bool = False

    def __repr__(self) -> str:
        changed = [each for each in fields(self) if getattr(self, each.name) != each.default]
        return f"Spec({', '.join(f'{each.name}={getattr(self, each.name)!r}' for each in changed)})"


# --- the model -----------------------------------------------------------------------------------------------------

EXCHANGES = ("moe", "moe+", "moe starved", "raw moe")
"""Blocks that exchange tokens."""

READ_LATE = ("running mean", "index put")
"""Blocks whose backward reads a buffer that their forward writes."""


def make_block(kind: str, spec: Spec, group: dist.ProcessGroup) -> nn.Module:
    """A block by its name."""
    if kind == "attention":
        return Attention(spec.dim, 2, 1, dropout=spec.dropout, max_positions=16)
    if kind == "mlp":
        return MLP(spec.dim, 8, dropout=spec.dropout)
    if kind == "raw moe":
        return RawMoE(spec.dim, 4, group)
    if kind in PLAIN:
        return Plain(kind, spec.dim, spec.dropout)
    full = kind == "moe+"
    block = MoE(
        spec.dim,
        4,
        4,
        top_k=1 if kind == "moe starved" else 2,
        router="sigmoid" if full else "softmax",
        aux_loss=0.0 if kind == "local moe" else 0.01,
        z_loss=0.1 * full,
        selection_bias=full,
        shared_dim=8 * full,
        dropout=spec.dropout,
        group=None if kind == "local moe" else group,
    )
    if kind == "moe starved":
        with torch.no_grad():
            block.router.weight.zero_()  # equal scores: every token chooses the same expert, the others get none
    return block


class RandomModel(nn.Module):
    """Embedding, blocks, norm, head and loss, as the spec says."""

    def __init__(self, spec: Spec, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(spec.seed)
        self.spec, dim = spec, spec.dim
        self.embed = nn.Embedding(VOCAB, dim)
        setattr(self, spec.name, nn.ModuleList(make_block(kind, spec, group) for kind in spec.blocks))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=spec.tied == "no")
        if spec.tied != "no":
            self.head.weight = self.embed.weight
        plain = [block for block in self.layers_in_order() if isinstance(block, Plain)]
        if spec.tied == "blocks":
            for block in plain:
                block.linear.weight = plain[0].linear.weight
        self.probes = nn.ModuleList(nn.Linear(dim, 1) for _ in spec.aux)
        if spec.unused:
            self.unused = nn.Parameter(torch.ones(2))
        self.freeze(spec.frozen)

    def layers_in_order(self) -> list[nn.Module]:
        """The blocks in running order; `again` runs one of them a second time."""
        layers = list(getattr(self, self.spec.name))
        return layers if self.spec.again is None else [*layers, layers[self.spec.again]]

    def freeze(self, what: str) -> None:
        """Take the gradient from the parameters of the first block, of the embedding, or from every other one."""
        chosen: list[nn.Parameter] = []
        if what == "block":
            chosen = list(self.layers_in_order()[0].parameters())
        elif what == "embedding":
            chosen = [self.embed.weight]
        elif what == "half":
            chosen = list(self.parameters())[::2]
        for param in chosen:
            param.requires_grad_(False)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        scale: float = 1.0,
        mask: Tensor | None = None,
        soft: Tensor | None = None,
    ) -> Any:
        x = self.embed(tokens)
        if soft is not None:
            x = x + soft
        extra: list[Tensor] = []
        for i, block in enumerate(self.layers_in_order()):
            x = block(x, mask) if isinstance(block, Plain) else block(x)
            if isinstance(x, tuple):
                x, aux = x
                extra += [] if aux is None else [aux]
            extra += [self.probes[k](x).float().square().mean() * 0.1 for k, at in enumerate(self.spec.aux) if at == i]
        x = self.norm(x)
        if self.spec.tied == "thrice":
            x = x @ self.embed.weight.t() @ self.embed.weight
        logits = self.head(x).flatten(0, 1)
        logits = logits if self.spec.loss == "low" else logits.float()
        loss = LOSSES[self.spec.loss](logits, targets.flatten())
        loss = sum(extra, loss * scale if scale != 1.0 else loss)
        return OUTPUTS[self.spec.outputs](self, loss, x, logits, tokens)


def in_chunks(logits: Tensor, targets: Tensor) -> Tensor:
    chunks = zip(logits.split(3), targets.split(3), strict=True)
    return sum((F.cross_entropy(a, b, reduction="sum") for a, b in chunks), logits.new_zeros(())) / len(targets)


def valid_only(logits: Tensor, targets: Tensor) -> Tensor:
    """Without the targets 0 and 1: the mean over those that are left, which may be none."""
    ignored = targets.masked_fill(targets < 2, -100)
    return F.cross_entropy(logits, ignored, reduction="sum") / (ignored >= 0).sum().clamp(min=1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "low": F.cross_entropy,
    "chunks": in_chunks,
    "valid": valid_only,
    "smooth": lambda logits, targets: F.cross_entropy(logits, targets, label_smoothing=0.1),
    "z": lambda logits, targets: F.cross_entropy(logits, targets) + 0.1 * logits.logsumexp(-1).square().mean(),
}

OUTPUTS: dict[str, Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Any]] = {
    "loss": lambda m, loss, x, logits, tokens: loss,
    "tuple": lambda m, loss, x, logits, tokens: (loss, logits, {"hidden": x, "rows": len(x)}),
    "dict": lambda m, loss, x, logits, tokens: {"logits": logits, "loss": loss, "note": None},
    "aliases": lambda m, loss, x, logits, tokens: (loss, tokens, tokens[0], x, x.flatten(), *m.buffers(), loss),
}


def hook_modules(model: nn.Module, kind: str) -> None:
    """Register a module hook on every block that changes what passes."""
    for module in list(model.modules()):
        if not isinstance(module, Plain):
            continue
        if kind == "forward":
            module.register_forward_hook(lambda module, args, output: output * 0.5)
        elif kind == "backward":
            module.register_full_backward_hook(
                lambda module, grads, _: tuple(None if grad is None else (grad * 0.5).to(grad.dtype) for grad in grads)
            )


def build(spec: Spec, group: dist.ProcessGroup) -> RandomModel:
    """The model of a spec."""
    model = RandomModel(spec, group)
    model = model.bfloat16() if spec.bf16 else model
    hook_modules(model, spec.module_hooks)
    return model.train(spec.train)


# --- microbatches --------------------------------------------------------------------------------------------------


def data(spec: Spec, step: int) -> list[Any]:
    """The microbatches of a step."""
    generator = torch.Generator().manual_seed(100 * spec.seed + step)
    dtype = torch.bfloat16 if spec.bf16 else torch.float32

    def soft_of(length: int) -> Tensor:
        return torch.randn(2, length, spec.dim, generator=generator).to(dtype).requires_grad_()

    common = {length: soft_of(length) for length in dict.fromkeys(spec.lengths)}
    found = [_microbatch(spec, i, length, generator, common, soft_of) for i, length in enumerate(spec.lengths)]
    return [found[0]] * len(found) if spec.form == "same object" else found


def _microbatch(
    spec: Spec,
    number: int,
    length: int,
    generator: torch.Generator,
    common: dict[int, Tensor],
    soft_of: Callable[[int], Tensor],
) -> Any:
    tokens, targets = (torch.randint(0, VOCAB, (2, length), generator=generator) for _ in range(2))
    kwargs: dict[str, Any] = {}
    if spec.scales != (1.0,):
        kwargs["scale"] = spec.scales[number % len(spec.scales)]
    if spec.mask == "all" or (spec.mask == "some" and number % 2 == 0):
        kwargs["mask"] = torch.rand(2, length, generator=generator) < 0.3
    if spec.soft != "no":
        kwargs["soft"] = common[length] if spec.soft == "common" else soft_of(length)
    own = (None, 0.5, torch.tensor(2.0))[number % 3] if spec.own_scale else None
    if spec.form == "dict":
        return {"targets": targets, "tokens": tokens, **kwargs}
    if spec.form == "tuple" and not kwargs and own is None:
        return tokens, targets
    return fxo.Microbatch((tokens, targets), kwargs, own)


# --- the config ----------------------------------------------------------------------------------------------------


def shuffled(seed: int) -> Callable[..., Order]:
    """A policy that takes nodes at random as they become ready; it leaves the W nodes out every other time."""

    def policy(f: Any, b: Any, costs: Any, config: Any) -> Order:
        rng = random.Random(seed)
        without = () if rng.random() < 0.5 else (Phase.W,)
        return random_order({mb: each for mb, each in (("F", f), ("B", b)) if each is not None}, rng, without=without)

    return policy


SCALES: dict[str, Any] = {"1": 1.0, "2": 2, "0.5": 0.5, "tensor": torch.tensor(0.7)}


def pattern_of(blocks: Sequence[str], seed: int) -> str:
    """A pattern that fits the blocks, with brackets at each exchange, as long as may be, for every other seed."""
    symbols = "".join("E" if kind in EXCHANGES else "*" if kind == "attention" else "-" for kind in blocks)
    if seed % 2:
        return symbols
    parts = symbols.replace("E", "E|").strip("|").split("|")
    starts = [group_start(part, 0, len(part)) for part in parts]
    return "".join(f"{part[:start]}[{part[start:]}]" for part, start in zip(parts, starts, strict=True))


def config(spec: Spec) -> fxo.OverlapConfig:
    """The config of a spec."""
    right = f"{spec.name}.*"
    # A symbol for each run of a layer.
    runs = spec.blocks if spec.again is None else (*spec.blocks, spec.blocks[spec.again])
    return fxo.OverlapConfig(
        pattern=pattern_of(runs, spec.seed) if spec.pattern and spec.glob != "nothing" else None,
        layers={"right": right, "nothing": "absent.*", "two": ("absent.*", right)}[spec.glob],
        schedule=shuffled(spec.seed) if spec.schedule == "random" else spec.schedule,
        delay_wgrad=spec.delay_wgrad,
        grad_scale=SCALES[spec.grad_scale],
        hooks="refuse" if spec.module_hooks == "no" else "trace",
        dynamic="auto" if spec.dynamic else False,
        recompute=spec.recompute,
        ramp=spec.ramp,
        early_release=spec.early_release,
    )


# --- the strategy --------------------------------------------------------------------------------------------------


def mostly(common: Any, *rare: Any, weight: int = 3) -> st.SearchStrategy[Any]:
    """`common` as often as `weight` of the others."""
    return st.sampled_from((common,) * (weight if rare else 1) + rare)


BLOCKS = ("linear", "attention", "mlp", *EXCHANGES, "moe", "raw moe", "local moe", *list(PLAIN)[1:])


@st.composite
def recomputes(draw: st.DrawFn, name: str, has_layers: bool) -> fxo.Recompute | None:
    """Every method with every length and what it may keep; modules of any size, none of which is inside another."""
    method = draw(st.sampled_from((None, "uniform", "uniform", "block", "selective")))
    if method is None or not (has_layers or method == "selective"):
        return None
    keep = tuple(draw(st.lists(st.sampled_from(("dispatch", "experts", "combine")), max_size=2, unique=True)))
    if method != "selective":
        return fxo.Recompute(method, draw(st.integers(1, 4)), keep=keep)
    # "norm" is the last norm and that of every block; of those inside a module that is chosen, it would be refused.
    inner = draw(st.sampled_from(((f"{name}.*",), (f"{name}.0",), (f"{name}.*.norm",), ("norm",), ())))
    others = draw(st.lists(st.sampled_from(("embed", "head")), min_size=not inner, unique=True))
    return fxo.Recompute(method, modules=(*inner, *others), keep=keep)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Random specs."""
    blocks = tuple(draw(st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4)))
    places = st.integers(0, len(blocks) - 1)
    dynamic = draw(mostly(True, False, weight=9))
    one_kind = st.integers(1, 8).flatmap(lambda n: st.integers(1, 4).map(lambda count: (n,) * count))
    two_kinds = st.lists(st.sampled_from((2, 5)), min_size=2, max_size=4).map(tuple)
    name, glob = draw(mostly("layers", "blocks")), draw(mostly("right", "two", "nothing", weight=4))
    return Spec(
        seed=draw(st.integers(0, 999)),
        dim=draw(st.sampled_from((8, 16))),
        blocks=blocks,
        # Eager refuses a second write to the buffer that the first backward reads.
        again=draw(
            st.one_of(st.none(), st.none(), st.none(), places.map(lambda i: None if blocks[i] in READ_LATE else i))
        ),
        tied=draw(mostly("no", "head", "thrice", "blocks")),
        frozen=draw(mostly("no", "block", "embedding", "half")),
        unused=draw(st.booleans()),
        aux=tuple(sorted(draw(st.one_of(st.just([]), st.lists(places, max_size=2))))),
        loss=draw(mostly(*LOSSES)),
        outputs=draw(mostly(*OUTPUTS)),
        dropout=draw(st.sampled_from((0.0, 0.3))),
        bf16=draw(mostly(False, True)),
        name=name,
        lengths=draw(st.one_of(one_kind, two_kinds) if dynamic else one_kind),
        form=draw(st.sampled_from(("tuple", "dict", "Microbatch", "same object"))),
        scales=draw(mostly((1.0,), (0.5,), (1.0, 2.0)) if dynamic else st.just((1.0,))),
        mask=draw(mostly("no", "all", "some") if dynamic else mostly("no", "all")),
        soft=draw(mostly("no", "own", "common")),
        own_scale=draw(mostly(False, True)),
        autocast=draw(mostly("no", "cached", "uncached", weight=8)),
        train=draw(mostly(True, False, weight=4)),
        zero=draw(mostly("none", "zeros", "keep")),
        between=draw(mostly("nothing", "mode", "freeze", "replace", weight=6) if dynamic else st.just("nothing")),
        hooks=draw(mostly("no", "watch", "change", "consume")),
        module_hooks=draw(mostly("no", "forward", "backward", weight=6)),
        schedule=draw(st.sampled_from(("auto", "megatron", "sequential", "random"))),
        delay_wgrad=draw(mostly(True, False)),
        pattern=draw(st.booleans()),
        glob=glob,
        grad_scale=draw(st.sampled_from(tuple(SCALES))),
        dynamic=dynamic,
        recompute=draw(recomputes(name, glob != "nothing")),
        ramp=draw(mostly("none", "pair")),
        early_release=draw(mostly(False, True)),
    )
