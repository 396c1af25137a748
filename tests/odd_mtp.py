"""Models with multi-token prediction put together in any way: a `Wired` says in one line in which.

`Wired` prints as the expression that makes it, so that a failing example can be pasted. `WiredModel` is the model,
`wired` the hypothesis strategy; what comes first in a choice is the plain case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st
from odd import Attention, Dense
from random_models import mostly, shuffled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import RawMoE

import fxoverlap as fxo
from fxoverlap.models import MoE


@dataclass(frozen=True)
class Wired:
    """How a model is put together. The values of a field that is a name are the choices in `wired`."""

    trunk: tuple[str, ...] = ("moe",)
    depths: tuple[str, ...] = ("moe", "moe")
    module: str = "own"
    parts: bool = False
    norm: str = "own"
    head: str = "shared"
    begins: str = "raw"
    reads: str = "before"
    embeds: str = "tokens"
    main: str = "first"
    loss: str = "sum"
    unread: bool = False
    frozen: str = "no"
    tied: bool = False
    dropout: float = 0.0
    outputs: bool = False
    checkpoint: str = "no"
    seed: int = 0
    # The microbatches and the config.
    lengths: tuple[int, ...] = (6, 6, 6)
    schedule: str = "auto"
    delay_wgrad: bool = True
    ramp: str = "none"
    recompute: fxo.Recompute | None = None

    def __repr__(self) -> str:
        changed = [each for each in fields(self) if getattr(self, each.name) != each.default]
        return f"Wired({', '.join(f'{each.name}={getattr(self, each.name)!r}' for each in changed)})"

    def config(self) -> fxo.OverlapConfig:
        return fxo.OverlapConfig(
            schedule=shuffled(self.seed) if self.schedule == "random" else self.schedule,
            delay_wgrad=self.delay_wgrad,
            ramp=self.ramp,
            recompute=self.recompute,
        )

    def data(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """The microbatches of a step: tokens and targets, of which some do not count."""
        generator = torch.Generator().manual_seed(100 * self.seed + step)
        found = [[torch.randint(0, 32, (1, n), generator=generator) for _ in range(2)] for n in self.lengths]
        return [(tokens, targets.masked_fill(targets < 4, -100)) for tokens, targets in found]


class Full(nn.Module):
    """A MoE that writes a buffer and has an auxiliary loss, which it adds to the first element of the hidden state."""

    def __init__(self, group: dist.ProcessGroup, dropout: float) -> None:
        super().__init__()
        options: dict[str, Any] = {"aux_loss": 0.1, "selection_bias": True, "shared_dim": 8, "dropout": dropout}
        self.moe = MoE(16, 4, 4, top_k=2, group=group, **options)

    def forward(self, x: Tensor) -> Tensor:
        x, aux = self.moe(x)
        return x + F.pad(aux.view(1, 1, 1), (0, 15))


def make_block(kind: str, spec: Wired, group: dist.ProcessGroup) -> nn.Module:
    """A block by its name."""
    made = {"dense": Dense, "attention": Attention, "none": nn.Identity}
    if kind in made:
        return made[kind]()
    block = Full(group, spec.dropout) if kind == "full" else RawMoE(16, 4, group)
    if kind == "starved":
        with torch.no_grad():
            block.router.weight.zero_()  # equal scores: every token chooses the same expert
    return block


class Depth(nn.Module):
    """hidden, embedded [batch, positions, 16] -> hidden: norms of both, a projection, and a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.hidden_norm, self.token_norm, self.norm = (nn.LayerNorm(16) for _ in range(3))
        self.proj, self.block, self.own = nn.Linear(32, 16), block, nn.Linear(16, 32)

    def forward(self, hidden: Tensor, embedded: Tensor, *head: Any) -> Any:
        x = self.block(self.proj(torch.cat((self.token_norm(embedded), self.hidden_norm(hidden)), -1)))
        return (x, head[0](self, x, *head[1:])) if head else x


class WiredModel(nn.Module):
    """tokens, targets int64 [1, positions] -> loss, or with `outputs` a dict of it and of what else there is."""

    def __init__(self, spec: Wired, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(spec.seed)
        self.spec = spec
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(make_block(kind, spec, group) for kind in spec.trunk)
        blocks = [make_block(kind, spec, group) for kind in spec.depths]
        if spec.module == "trunk" and self.layers:
            blocks[-1] = self.layers[-1]
        self.mtp = nn.ModuleList(Depth(block) for block in (blocks[:1] if spec.module == "one" else blocks))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=spec.head == "bias")
        if spec.norm == "shared":
            for depth in self.mtp:
                depth.norm = self.norm
        if spec.tied:
            self.head.weight = self.embed.weight
        if spec.loss == "learned":
            self.weights = nn.Parameter(torch.zeros(1 + len(blocks)))
        frozen = {"head": [self.head], "trunk": [self.embed, *self.layers], "depths": self.mtp, "first": self.mtp[:1]}
        for module in frozen.get(spec.frozen, ()):
            module.requires_grad_(False)

    def trunk(self) -> list[nn.Module]:
        return list(self.layers)

    def depths(self) -> list[Any]:
        return list(self.mtp) * (len(self.spec.depths) if self.spec.module == "one" else 1)

    def logits(self, owner: Any, hidden: Tensor) -> Tensor:
        """fp32 [positions, 32] of the model itself or a depth."""
        x = F.dropout(owner.norm(hidden).flatten(0, 1), self.spec.dropout)
        if self.spec.head == "own" and owner is not self:
            return owner.own(x)
        if self.spec.head == "detached" and owner is not self:
            return F.linear(x, self.head.weight.detach())
        if self.spec.head == "cast":
            return F.linear(x.bfloat16(), self.head.weight.bfloat16()).float()
        return torch.cat([self.head(each) for each in x.split(4)]) if self.spec.head == "chunks" else self.head(x)

    def entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean over targets that count; 0 without any."""
        total = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        return total / (targets != -100).sum().clamp(min=1)

    def loss_of(self, owner: Any, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.entropy(self.logits(owner, hidden), targets)

    def begin(self, states: list[Tensor], trunk: list[Tensor]) -> Tensor:
        """What a depth begins from: `states` are those of the trunk and the depths before, `trunk` of each layer."""
        x = {"before": states[-1], "trunk": states[0], "all": sum(states[1:], states[0])}[self.spec.reads]
        made: dict[str, Callable[[], Tensor]] = {
            "raw": lambda: x,
            "normed": lambda: self.norm(x),
            "earlier": lambda: x + trunk[0],
            "detached": x.detach,
            "half": lambda: 0.5 * x + 0.5 * x.detach(),
            "dropped": lambda: F.dropout(x, 0.2),
        }
        return made[self.spec.begins]()

    def embedded(self, tokens: Tensor, trunk: Tensor, ahead: int, before: Tensor) -> Tensor:
        """What a depth embeds; `trunk` is what the trunk has embedded."""
        if self.spec.embeds == "shifted":
            return F.pad(trunk[:, ahead:], (0, 0, 0, min(ahead, tokens.shape[1])))
        if self.spec.embeds == "predicted":
            return self.logits(self, before).softmax(-1).view(*tokens.shape, 32) @ self.embed.weight
        x = self.embed(tokens)
        return x.detach() if self.spec.embeds == "detached" else x

    def run(self, depth: Any, hidden: Tensor, embedded: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """The hidden state that a depth makes, and its loss where the depth makes that too."""
        if self.spec.head == "inside":
            return depth(hidden, embedded, self.loss_of, targets)
        if self.spec.parts:
            return depth.block(depth.proj(torch.cat((embedded, depth.hidden_norm(hidden)), -1))), None
        if self.spec.checkpoint == "depth":
            return checkpoint(depth, hidden, embedded, use_reentrant=False), None
        return depth(hidden, embedded), None

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        spec = self.spec
        trunk = [self.embed(tokens)]
        for layer in self.trunk():
            trunk.append(layer(trunk[-1]))
        states, read, inside = [trunk[-1]], [targets], []
        early = self.loss_of(self, states[0], targets) if spec.main == "first" else None
        for i, depth in enumerate(self.depths(), 1):
            tokens, targets = F.pad(tokens[:, 1:], (0, 1)), F.pad(targets[:, 1:], (0, 1), value=-100)
            embedded = self.embedded(tokens, trunk[0], i, states[-1])
            state, loss = self.run(depth, self.begin(states, trunk), embedded, targets)
            if i == 1 and spec.main == "between":
                early = self.loss_of(self, states[0], read[0])
            states.append(state)
            read.append(targets)
            inside.append(loss)
        of_main = states[0] + states[-1] if spec.main == "both" else states[-1 if spec.main == "depth" else 0]
        heads = list(zip([self, *self.depths()], [of_main, *states[1:]], read, [early, *inside], strict=True))
        if spec.main == "none" and len(heads) > 1:
            heads = heads[1:]
        if spec.unread and len(heads) > 1:
            heads = heads[:-1]
        losses = self.losses(heads)
        total = COMBINED[spec.loss](self, losses)
        return {"loss": total, "each": losses, "hidden": states[-1]} if spec.outputs else total

    def losses(self, heads: list[tuple[Any, Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
        spec = self.spec
        if spec.head == "joined":
            rows = self.head(self.norm(torch.cat([hidden for _, hidden, _, _ in heads]))).flatten(1, 2)
            logits = rows.view(len(heads), -1, 32).unbind()
            return [self.entropy(each, targets) for each, (_, _, targets, _) in zip(logits, heads, strict=True)]
        if spec.loss in ("distilled", "taught"):
            made = [self.logits(owner, hidden) for owner, hidden, _, _ in heads]
            teacher = made[0].detach() if spec.loss == "taught" else made[0]
            each = [F.kl_div(one.log_softmax(-1), teacher.softmax(-1), reduction="batchmean") for one in made[1:]]
            return [self.entropy(made[0], heads[0][2]), *each]
        found = []
        for owner, hidden, targets, loss in reversed(heads) if spec.loss == "reversed" else heads:
            if loss is None and spec.checkpoint == "head":
                loss = checkpoint(self.loss_of, owner, hidden, targets, use_reentrant=False)
            found.append(self.loss_of(owner, hidden, targets) if loss is None else loss)
        return found


class Megatron(WiredModel):
    """Depths are named as Megatron-LM's, `mtp.layers.0`."""

    def __init__(self, spec: Wired, group: dist.ProcessGroup) -> None:
        super().__init__(spec, group)
        depths, self.mtp = self.mtp, nn.Module()  # type: ignore[assignment]
        self.mtp.layers = depths

    def depths(self) -> list[Any]:
        return list(self.mtp.layers)  # type: ignore[arg-type]


class DeepSeek(WiredModel):
    """Depths are the last of the trunk's list, as in the checkpoint of DeepSeek-V3."""

    def __init__(self, spec: Wired, group: dist.ProcessGroup) -> None:
        super().__init__(spec, group)
        self.layers.extend(self.mtp)
        del self.mtp

    def trunk(self) -> list[nn.Module]:
        return list(self.layers[: len(self.spec.trunk)])

    def depths(self) -> list[Any]:
        return list(self.layers[len(self.spec.trunk) :])


COMBINED: dict[str, Callable[[Any, list[Tensor]], Tensor]] = {
    "sum": lambda _, each: sum(each[1:], each[0]),
    "weighted": lambda _, each: each[0] + 0.3 * sum(each[1:], torch.zeros(())) / max(1, len(each) - 1),
    "product": lambda _, each: functools.reduce(torch.mul, each),
    "logsumexp": lambda _, each: torch.stack(each).logsumexp(0),
    "softmax": lambda _, each: (torch.stack(each).softmax(0) * torch.stack(each)).sum(),
    "max": lambda _, each: torch.stack(each).max(),
    "learned": lambda m, each: (m.weights[: len(each)].softmax(0) * torch.stack(each)).sum(),
    "detached": lambda _, each: sum((one * each[0].detach() for one in each[1:]), each[0]),
    "distilled": lambda _, each: sum(each[1:], each[0]),
    "taught": lambda _, each: sum(each[1:], each[0]),
    "reversed": lambda _, each: sum(each[1:], each[0]),
}

BLOCKS = ("moe", "dense", "full", "attention", "starved", "none")


@st.composite
def wired(draw: st.DrawFn) -> Wired:
    """Random ones."""
    blocks = st.sampled_from(BLOCKS)
    method = draw(mostly(None, "uniform", "block", "selective"))
    user = draw(mostly("no", "depth", "head", weight=6)) if method is None else "no"
    recompute = None
    if method == "selective":
        recompute = fxo.Recompute(method, modules=(draw(st.sampled_from(("embed", "mtp.*.proj"))),))
    elif method is not None:
        recompute = fxo.Recompute(method, draw(st.integers(1, 3)))
    # A replay of eager's own counts tokens a second time; a step counts them once (docs/recompute.md).
    of_depths = blocks.filter(lambda kind: kind != "full") if user == "depth" else blocks
    return Wired(
        trunk=tuple(draw(st.lists(of_depths, max_size=2))),
        depths=tuple(draw(st.lists(of_depths, min_size=1, max_size=3))),
        module=draw(mostly("own", "one", "trunk")),
        parts=draw(mostly(False, True)),
        norm=draw(mostly("own", "shared")),
        head=draw(mostly("shared", "own", "bias", "inside", "joined", "chunks", "detached", "cast")),
        begins=draw(mostly("raw", "normed", "earlier", "detached", "half", "dropped")),
        reads=draw(mostly("before", "trunk", "all")),
        embeds=draw(mostly("tokens", "detached", "shifted", "predicted")),
        main=draw(mostly("first", "last", "between", "both", "depth", "none")),
        loss=draw(mostly(*COMBINED)),
        unread=draw(mostly(False, True)),
        frozen=draw(mostly("no", "head", "trunk", "depths", "first")),
        tied=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.2))),
        outputs=draw(st.booleans()),
        checkpoint=user,
        seed=draw(st.integers(0, 99)),
        lengths=draw(st.sampled_from(((6, 6, 6), (6,), (5, 8), (1, 1)))),
        schedule=draw(st.sampled_from(("auto", "megatron", "sequential", "random"))),
        delay_wgrad=draw(mostly(True, False)),
        ramp=draw(mostly("none", "pair")),
        recompute=recompute,
    )
