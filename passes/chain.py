"""The chain of compute stages of a chunk, for forward and backward: what `cut` places ops on.

A *stage* is a piece of compute between two boundaries: an exchange, or the edge of a layer. The forward chain runs
`pre_process`, then for each logical layer `pre_dispatch | counts | permute | dispatch | experts | combine |
post_combine` (what it has of them), then `post_process`. The backward chain is the forward chain reversed; `permute`
has no boundary in backward, so its backward belongs to `pre_dispatch`.

A *gate* is the boundary that an exchange makes: its launch ends one stage, its wait begins the next or a later one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from fxoverlap.ir import Exchange, JointGraph, Phase, PhysicalLayer, Role, Slot

AFTER = {Role.COUNTS: Slot.PERMUTE, Role.DISPATCH: Slot.EXPERTS}


@dataclass(frozen=True, slots=True)
class Stage:
    """A piece of compute between two boundaries: `slot` of the logical layer `layer` (None outside the layers)."""

    layer: int | None
    slot: Slot


@dataclass(slots=True)
class Chain:
    """The stages of one phase in running order.

    Attributes:
        phase: F or B.
        stages: the stages.
        entry: physical layer -> position of the first stage that holds ops of it.
        gates: exchange index -> position of the stage that its launch ends.
    """

    phase: Phase
    stages: list[Stage] = field(default_factory=list)
    entry: dict[int, int] = field(default_factory=dict)
    gates: dict[int, int] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """Position of the last stage."""
        return len(self.stages) - 1

    def exits(self) -> dict[int, int]:
        """For each physical layer, the position of the last stage that holds ops of it and of none behind it."""
        entries = sorted(set(self.entry.values()))
        behind = dict(pairwise([*entries, self.last]))
        return {layer: behind[entry] - 1 for layer, entry in self.entry.items()}

    def begin(self, stage: Stage) -> int:
        """Position of `stage`, appended unless it is the current one."""
        if not self.stages or self.stages[-1] != stage:
            self.stages.append(stage)
        return self.last


def forward_chain(joint: JointGraph) -> Chain:
    """The forward chain of a joint graph whose layers are labelled."""
    chain = Chain(Phase.F)
    by_layer: dict[int | None, list[Exchange]] = {}
    for exchange in joint.exchanges:
        if exchange.phase is Phase.F:
            by_layer.setdefault(exchange.layer, []).append(exchange)
    # Without known layer edges the exchanges alone make the layers.
    physical: list[int | None] = list(range(len(joint.physical))) or ([None] if by_layer else [])
    opens = [True, *(one.logical != other.logical for one, other in pairwise(joint.physical))][: len(physical)]
    if joint.physical:
        chain.begin(Stage(None, Slot.PRE_PROCESS))
    logical = -1
    for index, is_first in zip(physical, opens, strict=True):
        logical += is_first
        crossed = by_layer.get(index, [])
        slot = Slot.PRE_DISPATCH if crossed or not _is_feed_forward(index, joint.physical, opens) else Slot.EXPERTS
        entry = chain.begin(Stage(logical, slot))
        for position, exchange in enumerate(crossed):
            chain.gates[exchange.index] = chain.last
            if exchange.role in AFTER:
                chain.begin(Stage(logical, AFTER[exchange.role]))
            elif position + 1 < len(crossed):
                logical += 1
                chain.begin(Stage(logical, Slot.PRE_DISPATCH))
            elif joint.physical:
                chain.begin(Stage(logical, Slot.POST_COMBINE))
        if index is not None:
            chain.entry[index] = entry
    chain.begin(Stage(None, Slot.POST_PROCESS))
    return chain


def backward_chain(forward: Chain) -> Chain:
    """The backward chain that belongs to a forward chain."""
    chain = Chain(Phase.B)
    position = {}
    for i in range(forward.last, -1, -1):
        stage = forward.stages[i]
        slot = Slot.PRE_DISPATCH if stage.slot is Slot.PERMUTE else stage.slot
        position[i] = chain.begin(Stage(stage.layer, slot))
    for exchange, gate in forward.gates.items():
        if forward.stages[gate + 1].slot is not Slot.PERMUTE:
            chain.gates[exchange] = position[gate + 1]
    layers = sorted(forward.entry, key=lambda layer: forward.entry[layer])
    ends = [*(forward.entry[layer] - 1 for layer in layers[1:]), forward.last - 1][: len(layers)]
    for layer, end in zip(layers, ends, strict=True):
        # Layers that share a stage share its position.
        chain.entry[layer] = position[max(end, forward.entry[layer])]
    return chain


def _is_feed_forward(index: int | None, physical: tuple[PhysicalLayer, ...], opens: list[bool]) -> bool:
    """Whether a layer without exchanges is the feed-forward part that ends its logical layer."""
    if index is None or physical[index].symbol not in ("-", "E"):
        return False
    return index + 1 == len(physical) or opens[index + 1]
