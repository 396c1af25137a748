"""Captures and plans of one model, made once and used again.

A *variant* is one capture with its chunk graph. A program is built for the variants that meet in a round of a step: the
one whose forward runs and the one whose backward runs, or two of the same phase. Its order is chosen once for their
structures, and anew when what these cost changes (see `costing`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from fxoverlap import compat
from fxoverlap.budget import Budget, Level
from fxoverlap.capture import Capture, capture
from fxoverlap.config import OverlapConfig
from fxoverlap.costing import Costs, Tables, reduced, structure_of
from fxoverlap.errors import ConfigError, UnsupportedError
from fxoverlap.fingerprints import fingerprint
from fxoverlap.groups import groups_in, groups_of_step
from fxoverlap.ir import ChunkGraph, CostTable, FusedGraph, InputKind, Plan, Round
from fxoverlap.microbatch import Leaves, Microbatch
from fxoverlap.pipeline import PassRecord, to_chunk, to_fused
from fxoverlap.ramp import why_alone
from fxoverlap.refusals import check_leaves
from fxoverlap.report.golden import golden
from fxoverlap.runtime import Fingerprint, Layout, Program, lower
from fxoverlap.schedule import (
    build_pair,
    build_plan,
    kind_of,
    labels_of,
    plan_in_order,
    rounds_of,
)
from fxoverlap.schedule.cost import of_plan
from fxoverlap.schedule.memory import peak_bytes
from fxoverlap.variants import STRUCTURE, Key, around_key, microbatch_key

News = tuple[Tables, frozenset[str]]
"""What ranks tell one another before they plan: their cost tables, and the terms of their memory budgets."""

KINDS = ("F", "FB", "B", "FF", "BB")
PAIRS = ("FF", "BB")

# There may be as many as sequences of variants.
_KEPT_FINGERPRINTS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A captured microbatch and what was derived from it; equal to itself only.

    Attributes:
        capture: the traced graph and how its ends are bound.
        chunk: its schedule nodes.
        structure: what captures of other lengths have in common with it, as a hash.
        layout: the numbering of its values.
        constants: tensors that the graph holds, by name.
        born: the tensors that become buffers which are None so far, by FQN.
        loss_dtype: dtype of the loss.
        groups: names of the process groups of its collectives, in trace order.
        alone: by kind, "FF" or "BB", why there are no such plans with it; nothing where there are.
    """

    capture: Capture
    chunk: ChunkGraph
    structure: str
    layout: Layout
    constants: dict[str, torch.Tensor]
    born: dict[str, torch.Tensor]
    loss_dtype: torch.dtype
    groups: tuple[str, ...]
    alone: dict[str, str]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The order that was chosen for some structures.

    Attributes:
        tables: what it was chosen by, by `Instance.mb`.
        costs: these as one table.
        order: (name of the node, microbatch) of each instance.
    """

    tables: Mapping[str, CostTable]
    costs: CostTable
    order: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Built:
    """A plan as a fused graph, and the program that runs it.

    Attributes:
        chosen: the order of the plan.
        fused, program: as said.
    """

    chosen: Chosen
    fused: FusedGraph
    program: Program


class Planner:
    """What has been captured and planned for one model under one config.

    Attributes:
        records: what every pass did, in order.
        costs: what the nodes of the captured variants cost.
        budget: how much freedom orders have.
        alone: what forbids `ramp="pair"` in the latest step, None if nothing does.
    """

    def __init__(self, model: nn.Module, config: OverlapConfig) -> None:
        self._model, self._config = model, config
        self._variants: dict[Key, Variant] = {}
        self._chosen: dict[tuple[Level, tuple[tuple[str, str], ...]], Chosen] = {}
        self._built: dict[tuple[Level, tuple[tuple[str, Variant], ...]], Built] = {}
        self._latest: tuple[Variant, ...] = ()
        self._fingerprints: dict[tuple[int, ...], Fingerprint] = {}
        self.records: list[PassRecord] = []
        self.costs = Costs(config)
        self.budget = Budget(config)
        self._level = self.budget.levels[0]
        self.alone: str | None = None

    @property
    def variants(self) -> int:
        """Number of captured variants."""
        return len(self._variants)

    def variants_for(self, parts: list[Leaves], given: list[Microbatch]) -> list[Variant]:
        """The variants that fit microbatches; captured where there is none yet.

        Raises CaptureError, UnsupportedError.
        """
        if torch.is_inference_mode_enabled():
            raise UnsupportedError(
                "transform and step need gradients, and torch.inference_mode is on. Leave it, or call the model itself "
                "for inference."
            )
        around = around_key(self._model)
        variants = []
        with contextlib.ExitStack() as stack:
            for leaves, each in zip(parts, given, strict=True):
                variants.append(self._variant(leaves, each, around))
                if variants[-1].born:
                    # What follows finds the buffers that this microbatch will have made.
                    stack.enter_context(_with_buffers(self._model, variants[-1].born))
                    around = around_key(self._model)
        return variants

    def _variant(self, leaves: Leaves, microbatch: Microbatch, around: Key) -> Variant:
        check_leaves(leaves)
        now = Key({**microbatch_key(leaves), **around.entries}, around.tensors)
        for key, variant in self._variants.items():
            constants = [each for each in variant.constants.values() if isinstance(each, torch.Tensor)]
            if key.fits(now, constants, variant.capture.assigned):
                return variant
        limit = 1 if self._config.dynamic is False else self._config.max_variants
        limit += sum(bool(variant.born) for variant in self._variants.values())
        if len(self._variants) >= limit:
            self._forget([key for key in self._variants if key.is_of_other_tensors(now)])
        if len(self._variants) >= limit:
            raise UnsupportedError(_too_many(self._config, list(self._variants), now, leaves))
        self._variants[now] = self._capture(microbatch)
        return self._variants[now]

    def _forget(self, keys: list[Key]) -> None:
        """Drop variants, and the programs that they are part of."""
        for key in keys:
            del self._variants[key]
        known = set(self._variants.values())
        self._built = {key: built for key, built in self._built.items() if known.issuperset(dict(key[1]).values())}
        self.budget.forget_captures()
        self._fingerprints.clear()  # their keys are addresses of programs

    def built(self, met: Mapping[str, Variant]) -> Built:
        """The program in which these variants meet, by `Instance.mb`."""
        key = (self._level, tuple(met.items()))
        chosen, known = self._choose(met), self._built.get(key)
        if known is not None and known.chosen is chosen:
            return known
        if known is not None and known.chosen.order == chosen.order:
            plan = replace(known.fused.plan, costs=chosen.costs)
            self._built[key] = Built(chosen, replace(known.fused, plan=plan), known.program)
        else:
            plan = _plan(chosen, met)
            fused = to_fused(plan, self._config, self.records)
            _dump(fused.plan)
            program = lower(fused, {mb: variant.layout for mb, variant in met.items()})
            self._built[key] = Built(chosen, fused, program)
        self._fingerprints.clear()  # their keys are addresses of what is built
        return self._built[key]

    def _choose(self, met: Mapping[str, Variant]) -> Chosen:
        """The order of the plan in which variants of these structures meet."""
        level = self._level
        key = (level, tuple((mb, variant.structure) for mb, variant in met.items()))
        tables = {mb: self.costs.of(variant.structure) for mb, variant in met.items()}
        known = self._chosen.get(key)
        if known is None or any(table is not known.tables[mb] for mb, table in tables.items()):
            chunks = {mb: variant.chunk for mb, variant in met.items()}
            costs, kind = of_plan(chunks, tables), kind_of(chunks)
            if kind in PAIRS:
                first, second = chunks.values()
                plan = build_pair(kind, first, second, self._config, costs)
            else:
                config = replace(self._config, schedule="sequential") if level.in_turn else self._config
                plan = build_plan(chunks.get("F"), chunks.get("B"), config, costs, level.room)
            order = tuple((each.node.name, each.mb) for each in plan.order)
            self._chosen[key] = Chosen(tables, costs, order)
        return self._chosen[key]

    def rounds(self, microbatches: int) -> list[dict[str, int]]:
        """For each round of a step, the number of the microbatch that each `Instance.mb` of its plan stands for."""
        return rounds_of(microbatches, self._pairs())

    def latest_rounds(self, microbatches: int) -> list[Round]:
        """The rounds of a step over so many microbatches: the latest ones, and more like the first of them before."""
        self.latest()
        variants = [*[self._latest[0]] * (microbatches - len(self._latest)), *self._latest][-microbatches:]
        return [
            Round(self.built({mb: variants[i] for mb, i in numbers.items()}).fused.plan, numbers)
            for numbers in self.rounds(microbatches)
        ]

    def _pairs(self) -> bool:
        return self._config.ramp == "pair" and self.alone is None

    def has_news(self, variants: Sequence[Variant]) -> bool:
        """Whether the ranks have to share what they know before they plan a step over these variants."""
        return self.costs.has_news(each.structure for each in variants) or not self._fits(variants)

    def _fits(self, variants: Sequence[Variant]) -> bool:
        """Whether a step over these variants stays in the budget on this rank, at a level that the ranks have found."""
        budget, structures = self.budget, [each.structure for each in variants]
        if not budget.is_set or budget.fits(structures, variants):
            return True
        if not budget.is_chosen(structures) or budget.excess(self.peak(variants, budget.level(structures))) > 0:
            return False
        budget.note(structures, variants)
        return True

    def peak(self, variants: Sequence[Variant], level: Level) -> int:
        """Most bytes that a step over these variants holds at one time on this rank, at a level."""
        before = self._level, self.alone
        self._begin(variants, level)
        try:
            plans: dict[tuple[tuple[str, Variant], ...], Plan] = {}
            rounds = []
            for numbers in self.rounds(len(variants)):
                met = {mb: variants[i] for mb, i in numbers.items()}
                key = tuple(met.items())
                if key not in plans:
                    plans[key] = _plan(self._choose(met), met)
                rounds.append(Round(plans[key], numbers))
        finally:
            self._level, self.alone = before
        return peak_bytes(rounds)

    def own_news(self, variants: Sequence[Variant]) -> News:
        """What this rank has to tell of a step over these variants."""
        tables = {each.structure: self.costs.own(each.structure) for each in variants}
        return tables, frozenset({self.budget.terms})

    def reduce_news(self, everyones: Sequence[News]) -> News:
        """One table for each structure that this rank has captured, of what several ranks have told; all terms."""
        chunks = {each.structure: each.chunk for each in self._variants.values()}
        told = {key: [tables[key] for tables, _ in everyones if key in tables] for key in chunks}
        tables = {key: reduced(tables, chunks[key]) for key, tables in told.items() if tables}
        return tables, frozenset().union(*(terms for _, terms in everyones))

    def prepare(self, variants: Sequence[Variant], level: Level | None = None) -> list[Built]:
        """The programs of a step over microbatches of these variants, one a round; they become the latest.

        Args:
            variants: one a microbatch.
            level: None: that which the ranks have found.
        """
        self._latest = tuple(variants)
        self._begin(variants, level or self.budget.level([each.structure for each in variants]))
        return [self.built({mb: variants[i] for mb, i in each.items()}) for each in self.rounds(len(variants))]

    def _begin(self, variants: Sequence[Variant], level: Level) -> None:
        """Plans from here on are for steps over these variants, at a level."""
        self._level = level
        alone = [each.alone[kind] for kind in PAIRS for each in variants if kind in each.alone]
        if self._config.ramp == "pair" and not level.pairs:
            alone.append("with it a step takes more than memory_budget")
        self.alone = alone[0] if alone else None

    def latest(self) -> tuple[Variant, Variant]:
        """The variants whose forward and backward the latest FB plan holds. Raises UnsupportedError before a trace."""
        if not self._latest:
            raise UnsupportedError(
                "Nothing has been traced yet. Pass example_inputs to transform, or run a step, before you ask for "
                "plans, graphs or the report."
            )
        return self._latest[-1], self._latest[max(len(self._latest) - 2, 0)]

    def latest_built(self, kind: str) -> Built:
        """The program of one kind for the latest variants.

        Raises ConfigError for an unknown kind, UnsupportedError for one that these variants cannot have.
        """
        if kind not in KINDS:
            raise ConfigError(f"plan kind is {kind!r}; allowed: {', '.join(KINDS)}.")
        later, earlier = self.latest()
        if kind not in PAIRS:
            return self.built({mb: later if mb == "F" else earlier for mb in kind})
        for each in (earlier, later):
            if kind in each.alone:
                raise UnsupportedError(f"There is no plan {kind!r}: {each.alone[kind]}. Ask for F, FB or B.")
        return self.built(dict(zip(labels_of(kind), (earlier, later), strict=True)))

    def fingerprint(self, programs: list[Built]) -> Fingerprint:
        """What is equal on two ranks if they run the same programs in a step."""
        key = tuple(id(built) for built in programs)
        if key not in self._fingerprints:
            if len(self._fingerprints) >= _KEPT_FINGERPRINTS:
                self._fingerprints.pop(next(iter(self._fingerprints)))
            self._fingerprints[key] = fingerprint([built.fused.plan for built in programs], self._config)
        return self._fingerprints[key]

    def groups(self) -> list[dist.ProcessGroup]:
        """The groups whose ranks run the same step."""
        names = dict.fromkeys(name for each in self._variants.values() for name in each.groups)
        return groups_of_step(self._config.process_group, list(names), self._model)

    def _capture(self, microbatch: Microbatch) -> Variant:
        captured = capture(self._model, microbatch, self._config)
        chunk = to_chunk(captured.joint, self._config, self.records)
        joint = captured.joint
        constants = {
            each.name: getattr(joint.module, each.name) for each in joint.inputs if each.kind is InputKind.CONSTANT
        }
        assert chunk.joint is not None
        loss = next(node for node in joint.module.graph.nodes if node.name == chunk.joint.loss)
        values = {node.name: node.meta.get("val") for node in joint.module.graph.nodes}
        last = chunk.joint.outputs[len(joint.outputs) - len(captured.born) :]
        born = {
            fqn: torch.zeros(values[value].shape, dtype=values[value].dtype)
            for fqn, value in zip(captured.born, last, strict=True)
        }
        structure = structure_of(chunk)
        self.costs.add(structure, chunk)
        dtype, groups = loss.meta["val"].dtype, groups_in(joint)
        alone = {kind: why for kind in PAIRS if (why := why_alone(chunk, kind, captured.born)) is not None}
        return Variant(captured, chunk, structure, Layout.of(chunk), constants, born, dtype, groups, alone)


def _plan(chosen: Chosen, met: Mapping[str, Variant]) -> Plan:
    """The plan of these variants in the order that was chosen for their structures."""
    return plan_in_order(chosen.order, {mb: variant.chunk for mb, variant in met.items()}, chosen.costs)


def _dump(plan: Plan) -> None:
    """Add a plan to torch's structured log, as it is printed and with the nodes that it orders."""
    chunk = next(iter(plan.chunks.values()))
    compat.trace_artifact(f"fxoverlap_plan_{plan.kind}", lambda: str(plan))
    compat.trace_artifact(f"fxoverlap_golden_{plan.kind}", lambda: golden(chunk, plan))


@contextlib.contextmanager
def _with_buffers(model: nn.Module, born: dict[str, torch.Tensor]) -> Iterator[None]:
    """Give buffers that are None a value for as long as the block lasts."""
    set_buffers(model, born)
    try:
        yield
    finally:
        set_buffers(model, dict.fromkeys(born))


def set_buffers(model: nn.Module, values: Mapping[str, torch.Tensor | None]) -> None:
    """Make tensors the buffers of these FQNs."""
    for fqn, value in values.items():
        owner, _, name = fqn.rpartition(".")
        setattr(model.get_submodule(owner), name, value)


def _too_many(config: OverlapConfig, variants: list[Key], now: Key, leaves: Leaves) -> str:
    """Name what varies, and what was seen of it."""
    allowed = 'dynamic="auto"' if config.dynamic is False else "a larger max_variants"
    known = f"step: {len(variants)} variants are captured already"
    alike = [key.entries for key in variants if key.entries[STRUCTURE] == leaves.spec] or [variants[-1].entries]
    names = list(dict.fromkeys(name for entries in (now.entries, *alike) for name in entries))
    values = {name: [entries.get(name) for entries in alike] for name in names}
    # What was never seen before; else each value was seen, but not all of them together, or a tensor was replaced.
    changed = [name for name in names if now.entries.get(name) not in values[name]]
    changed = changed or [name for name in names if now.entries.get(name) != values[name][-1]]
    name = changed[0] if changed else "a tensor that a module holds and has not registered"
    seen = dict.fromkeys(map(str, values.get(name, ())))
    found = f"{name} varies" + (f": seen {', '.join(seen)}; now {now.entries.get(name)}" if seen else "")
    remedy = "Pad microbatches to few sizes (bucketing)" if name in leaves.paths else "Keep it fixed"
    return f"{known}, and {found}. {remedy}, or set {allowed} in OverlapConfig."
