"""Figures of profiled steps: how long nodes take, and how much of the communication compute hides.

All intervals are (begin, end) in nanoseconds. An exchange is in flight from its launch until its data has arrived; if
one node launches several tensors, from the first launch until the last arrival. A rank computes whenever it neither
launches nor waits.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fxoverlap.ir import Lane, Phase, Slot
from fxoverlap.runtime import NodeRun, StepProfile
from fxoverlap.schedule.intervals import Interval, common, length


@dataclass(frozen=True, slots=True)
class Transfer:
    """One exchange on the row of its group, where one follows the other.

    Attributes:
        run: the node instance that launched it.
        group: name of the process group.
        launched: when it was launched.
        begin: then, or when the exchange that arrived before it on its group had arrived.
        end: when its data had arrived.
        bytes_sent: by all its launches, the rank's own part included.
    """

    run: NodeRun
    group: str
    launched: int
    begin: int
    end: int
    bytes_sent: int


def transfers(step: StepProfile) -> list[Transfer]:
    """The exchanges of a step, in the order of their arrival on each group.

    That is nearly always the order of their launches. Where a group has several threads, as gloo's have, a small
    exchange may pass a large one.
    """
    launched = [run for run in step.runs if run.instance.node.lane is Lane.COMM and run.flights]
    arrived: dict[str, int] = {}
    found = []
    for run in sorted(launched, key=_arrival):
        group, begin, end = run.flights[0].group, run.flights[0].begin, _arrival(run)
        sent = sum(flight.bytes_sent for flight in run.flights)
        found.append(Transfer(run, group, begin, max(begin, arrived.get(group, begin)), end, sent))
        arrived[group] = end
    return found


def _arrival(run: NodeRun) -> int:
    return max(flight.end for flight in run.flights)


def node_times(steps: Sequence[StepProfile]) -> dict[str, tuple[float, float]]:
    """By node name, in milliseconds: the medians of what its instances take by themselves, and of what they wait."""
    alone: dict[str, list[int]] = {}
    waited: dict[str, list[int]] = {}
    for step in steps:
        for name, took, wait in _node_times(step):
            alone.setdefault(name, []).append(took)
            waited.setdefault(name, []).append(wait)
    return {name: (statistics.median(alone[name]) / 1e6, statistics.median(waited[name]) / 1e6) for name in alone}


def _node_times(step: StepProfile) -> Iterator[tuple[str, int, int]]:
    """(node name, time by itself, time waited) of each instance, in ns."""
    for run in step.runs:
        if run.instance.node.lane is not Lane.COMM:
            wait = sum(each.end - each.begin for each in run.waits)
            yield run.instance.node.name, run.end - run.begin - wait, wait
    for each in transfers(step):
        yield each.run.instance.node.name, each.end - each.begin, each.begin - each.launched


def figures(steps: Sequence[StepProfile]) -> dict[str, float | None]:
    """The measured fields of `Report`, by name: medians over steps."""
    found: dict[str, float | None] = {}
    for prefix, values in (
        ("", [_figures(step.runs, step.begin, step.end, transfers(step)) for step in steps]),
        ("steady_", [each for each in map(_steady_figures, steps) if each is not None]),
    ):
        for i, name in enumerate(("ms", "comm_ms", "exposed_ms", "overlap_pct")):
            column = [each[i] for each in values]
            known = [value for value in column if value is not None]
            key = "step_ms" if prefix + name == "ms" else prefix + name
            found[key] = statistics.median(known) if known else None
    hidden = [pct for step in steps if (pct := _replay_hidden_pct(step)) is not None]
    found["replay_hidden_pct"] = statistics.median(hidden) if hidden else None
    return found


def _replay_hidden_pct(step: StepProfile) -> float | None:
    """In how much of the time that replayed exchanges take on their group a rank computes, in %; None without any."""
    again = (each for each in transfers(step) if each.run.instance.node.phase is Phase.R)
    return computing_pct([(each.begin, each.end) for each in again], _idle(step.runs))


_Figures = tuple[float, float, float, float | None]


def _figures(runs: Sequence[NodeRun], begin: int, end: int, exchanges: Sequence[Transfer]) -> _Figures:
    flights = [(e.launched, e.end) for e in exchanges if e.run.instance.node.slot is not Slot.COUNTS]
    exposed = sum(wait.end - wait.begin for run in runs for wait in run.waits)
    return (end - begin) / 1e6, length(flights) / 1e6, exposed / 1e6, computing_pct(flights, _idle(runs))


def _steady_figures(step: StepProfile) -> _Figures | None:
    last = step.runs[-1].program
    runs = [run for run in step.runs if 0 < run.program < last]
    if not runs:
        return None
    exchanges = [each for each in transfers(step) if 0 < each.run.program < last]
    return _figures(runs, runs[0].begin, runs[-1].end, exchanges)


def _idle(runs: Iterable[NodeRun]) -> Iterator[Interval]:
    """When a rank launches or waits."""
    for run in runs:
        yield from ((wait.begin, wait.end) for wait in run.waits)
        if run.instance.node.lane is Lane.COMM:
            yield run.begin, run.end
        else:
            yield from ((flight.begin, flight.launched) for flight in run.flights)


def computing_pct(flights: Iterable[Interval], idle: Iterable[Interval]) -> float | None:
    """In how much of the time in which something is in flight a rank computes, in %; None if nothing ever is.

    Args:
        flights: when exchanges are in flight; they may overlap.
        idle: when the rank launches or waits; no two of them overlap.
    """
    in_flight = list(flights)
    total = length(in_flight)
    return 100 * (1 - common(in_flight, idle) / total) if total else None
