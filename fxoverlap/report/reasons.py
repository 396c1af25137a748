"""Why a step hides little of its communication, as far as plans and their costs tell.

An exchange counts as covered if the plan issues real work (floating point operations) between its launch and the node
that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from fxoverlap.ir import ChunkGraph, Instance, Lane, Phase, Plan, Round, Slot
from fxoverlap.report.golden import arrivals
from fxoverlap.report.predicted import shares

SMALL_BYTES = 64 * 1024
"""An exchange that sends less waits for the latency of a link, not for its width, at 10 Gbit/s and 50 us."""

NEGLIGIBLE = 0.03
"""Exchanges that take less than this share of the time of compute are not worth hiding."""

UNEVEN = 2.0
"""Microbatches are uneven if one has this many times the work of the other."""


def covered(plan: Plan) -> tuple[int, int]:
    """(exchanges with real work beside them, all exchanges) of a plan."""
    done = [0, *accumulate(_flops(instance, plan) for instance in plan.order)]
    spans = arrivals(plan.order)
    return sum(done[end] > done[start + 1] for start, end in spans.items()), len(spans)


def in_step(rounds: Sequence[Round]) -> tuple[int, int]:
    """(exchanges with real work beside them, all exchanges) of a step."""
    by_plan = {id(each.plan): covered(each.plan) for each in rounds}
    figures = [by_plan[id(each.plan)] for each in rounds]
    return sum(done for done, _ in figures), sum(every for _, every in figures)


def reasons(plan: Plan, microbatches: int | None, delay_wgrad: bool) -> tuple[str, ...]:
    """Each reason that an FB plan and the number of microbatches give, with its remedy."""
    count = covered(plan)
    if not count[1]:
        return ("no exchange: the model sends no tokens between ranks, so there is nothing to hide",)
    found = []
    if microbatches == 1:
        found.append("one microbatch: there is no other one to overlap with; give step two or more")
    if not delay_wgrad:
        found.append("delay_wgrad=False: weight gradients cannot be moved to where an exchange is in flight")
    if not count[0]:
        found.append('no cover: the schedule issues no work while an exchange is in flight; use schedule="auto"')
    largest = max((_sent(i, plan) for i in plan.order if i.node.slot is not Slot.COUNTS), default=0)
    if largest < SMALL_BYTES:
        found.append(
            f"few tokens: the largest exchange sends {largest / 1e3:.1f} KB, so latency counts, and there is little "
            f"work to hide it behind; give microbatches more tokens"
        )
    compute, comm = shares(plan)
    if comm < NEGLIGIBLE * compute:
        found.append(
            f"exchanges negligible: they take {comm * 1e3:.3f} ms beside {compute * 1e3:.3f} ms of compute, so that "
            f"hiding all of it gains {100 * comm / (compute + comm):.1f} % at most"
        )
    works = [_work(chunk) for chunk in plan.chunks.values()]
    if max(works) > UNEVEN * min(works):
        found.append(
            f"uneven microbatches: the forward of one is {max(works) / 1e6:.2f} MFLOP, of the one beside it "
            f"{min(works) / 1e6:.2f}; make them equal, or neighbours alike"
        )
    return tuple(found)


def _flops(instance: Instance, plan: Plan) -> int:
    cost = plan.chunks[instance.mb].costs.get(instance.node.name)
    return cost.flops if cost is not None else 0


def _sent(instance: Instance, plan: Plan) -> int:
    cost = plan.chunks[instance.mb].costs.get(instance.node.name)
    return cost.bytes_sent if cost is not None and instance.node.lane is Lane.COMM else 0


def _work(chunk: ChunkGraph) -> int:
    """Floating point operations of a microbatch's forward."""
    return sum(chunk.costs[n.name].flops for n in chunk.nodes if n.phase is Phase.F and n.name in chunk.costs)
