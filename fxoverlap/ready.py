"""How a step gets ready: capture and plan what is missing, and agree with the other ranks, before anything runs.

In:  microbatches as the user gives them.
Out: a `Ready`; or an error, on every rank.

Where no rank has news, one agreement is all. Where one has, they share what nodes cost, find the level of memory at
which the step fits into every rank's budget, plan, and agree once more; each of these talks has a session of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fxoverlap.budget import Level
from fxoverlap.errors import ConfigError
from fxoverlap.microbatch import Leaves, Microbatch, as_microbatch, flatten, in_order
from fxoverlap.planner import Built, Planner, Variant
from fxoverlap.runtime import Fingerprint, Standing, agree, interrupts, report_failure, share

# Ranks that make their models in the same order give them the same numbers.
_numbers = itertools.count()


@dataclass(slots=True)
class Ready:
    """What a step has before anything runs.

    Attributes:
        agreement: what the ranks call the agreement before this step.
        session: what they call the step.
        groups: those whose ranks run it together; none if there is one rank.
        given, parts, variants: one each a microbatch.
        held: parameters and microbatch tensors whose accumulation may have hooks.
        programs: in the order in which they run.
        rounds: for each of them, the number of the microbatch that each `Instance.mb` stands for.
        has_news: whether there are no programs yet, because this rank has costs to share.
    """

    agreement: str
    session: str = ""
    groups: list[dist.ProcessGroup] = field(default_factory=list)
    given: list[Microbatch] = field(default_factory=list)
    parts: list[Leaves] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
    programs: list[Built] = field(default_factory=list)
    rounds: list[dict[str, int]] = field(default_factory=list)
    held: frozenset[int] = frozenset()
    has_news: bool = False


class Preparation:
    """This rank's part in getting ready for the steps of one model.

    Attributes:
        last_failed: whether the last step failed after all ranks had begun it.
    """

    def __init__(self, planner: Planner, module: nn.Module) -> None:
        self._planner, self._module = planner, module
        self._number = next(_numbers)
        self._attempts = 0
        self.last_failed = False

    def by_itself(self, microbatch: Any) -> None:
        """Capture and plan for microbatches like this one, without the other ranks."""
        given, planner = in_order(as_microbatch(microbatch), self._module.forward), self._planner
        variants = planner.variants_for([flatten(given)], [given])
        planner.prepare(variants * 3, self._level(variants) if planner.budget.is_set else None)

    def _level(self, variants: list[Variant]) -> Level:
        """The level that a step over three such microbatches would have if there were no other ranks; else over one.

        Raises ConfigError if there is none.
        """
        planner, budget = self._planner, self._planner.budget
        excess: list[int] = []
        for many in (variants * 3, variants):
            excess.clear()
            for level in budget.levels:
                excess.append(budget.excess(planner.peak(many, level)))
                if excess[-1] <= 0:
                    return level
        raise budget.refusal(excess, 1)

    def get_ready(self, microbatches: Sequence[Any]) -> Ready:
        """Capture and plan what is missing, and agree with the other ranks, before anything runs."""
        self._attempts += 1
        ready = Ready(f"{self._number}.{self._attempts}")
        failure: BaseException | None = None
        try:
            ready.given = [in_order(each, self._module.forward) for each in _microbatches(microbatches)]
            ready.parts = [flatten(each) for each in ready.given]
            ready.variants = self._planner.variants_for(ready.parts, ready.given)
            ready.has_news = self._planner.has_news(ready.variants)
            if not ready.has_news:
                self._plan(ready)
            interrupts.check()
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        ready.groups = self._planner.groups()
        own = self._standing(ready, failure)
        self.last_failed = False
        if failure is not None and not ready.groups:
            report_failure(ready.agreement, failure)
        agreed = agree(ready.groups, own, ready.agreement)
        ready.session = agreed.session
        if agreed.has_news:
            self._plan_together(ready)
        return ready

    def _plan(self, ready: Ready) -> None:
        ready.programs = self._planner.prepare(ready.variants)
        ready.rounds = self._planner.rounds(len(ready.variants))

    def _plan_together(self, ready: Ready) -> None:
        """Share costs with the other ranks, plan with what all of them know, and agree on the plans."""
        planner, first, ready.has_news = self._planner, ready.agreement, False
        last = f"{first}/costs"
        told, terms = share(ready.groups, planner.own_news(ready.variants), planner.reduce_news, last, first)
        failure: BaseException | None = None
        try:
            if planner.costs.agree(told):
                planner.budget.forget()
            interrupts.check()
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        # Where the ranks' configs differ in what decides, their plans will not be agreed on.
        if planner.budget.is_set and len(terms) == 1:
            last, failure = self._stay_in_budget(ready, failure, f"{first}/memory", last)
        try:
            if failure is None:
                self._plan(ready)
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        ready.agreement = f"{first}/plans"
        ready.session = agree(ready.groups, self._standing(ready, failure), ready.agreement, last).session

    def _stay_in_budget(
        self, ready: Ready, failure: BaseException | None, session: str, before: str
    ) -> tuple[str, BaseException | None]:
        """Find, together, the first level at which a step fits into the budget of every rank.

        Args:
            ready: the step.
            failure: what has kept this rank from planning, if anything has.
            session, before: as for `share`; levels have sessions of their own.

        Returns: the last session, and what keeps this rank from planning now. A failure ends the search on all ranks.
        Raises ConfigError, on every rank, if there is no such level.
        """
        planner, budget = self._planner, self._planner.budget
        structures = [each.structure for each in ready.variants]
        start = share(ready.groups, budget.start(structures), max, session, before)
        last, most = session, []
        for number in budget.numbers(start):
            last, before, excess = f"{session}/{number}", last, 0
            try:
                if failure is None:
                    interrupts.check()
                    excess = budget.excess(planner.peak(ready.variants, budget.levels[number]))
            except (Exception, KeyboardInterrupt) as error:
                failure = error
            has_failed, excess = share(ready.groups, (failure is not None, excess), max, last, before)
            if has_failed:
                return last, failure
            if excess <= 0:
                budget.choose(structures, ready.variants, number)
                return last, failure
            most.append(excess)
        raise budget.refusal(most, len(ready.variants))

    def _standing(self, ready: Ready, failure: BaseException | None) -> Standing:
        """What this rank tells the others."""
        is_planned = failure is None and not ready.has_news and ready.groups
        plans = self._planner.fingerprint(ready.programs) if is_planned else Fingerprint()
        return Standing(len(ready.given), plans, failure, self.last_failed, ready.has_news)


def _microbatches(microbatches: Sequence[Any]) -> list[Microbatch]:
    is_one = isinstance(microbatches, (torch.Tensor, dict, Microbatch, str))
    if is_one or not isinstance(microbatches, Sequence):
        remedy = "step(list(...))" if isinstance(microbatches, Iterable) and not is_one else "step([microbatch])"
        raise ConfigError(
            f"step: microbatches is a {type(microbatches).__name__}, expected a list of microbatches, each a tuple "
            f"of positional arguments, a dict of keyword arguments, or a Microbatch. Write {remedy}."
        )
    if not microbatches:
        raise ConfigError("step: there is no microbatch; expected a list of at least one.")
    return [as_microbatch(each) for each in microbatches]
