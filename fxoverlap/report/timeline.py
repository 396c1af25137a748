"""A profiled step as a trace that ui.perfetto.dev and chrome://tracing open (Trace Event Format, JSON).

One process a rank, one row a lane: `compute`, and `comm` for each process group. Events are complete ("X"); `ts` and
`dur` are microseconds, with three decimals, from the step's beginning. Slices of one row follow one another or nest.

- `compute` has the node instances (`cat` is `node`), and in them their waits (`wait`) and launches of collectives that
  are no exchanges (`launch`). Between nodes are the calls that launch exchanges (`launch`).
- `comm` has the exchanges (`exchange`), one after the other: each begins when launched or, if that is later, when
  the one before it on its group had arrived, and ends when its own data has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from fxoverlap.ir import Lane
from fxoverlap.report.measured import Transfer, transfers
from fxoverlap.runtime import NodeRun, StepProfile

Event = dict[str, Any]

_COMPUTE = 0  # tid; the rows of the groups follow


def write_timeline(path: str | PathLike[str], step: StepProfile, rank: int) -> None:
    """Write the trace of a step that this rank ran. Raises OSError as `open` does."""
    Path(path).write_text(json.dumps(trace(step, rank)))


def trace(step: StepProfile, rank: int) -> dict[str, Any]:
    """The trace of a step as what its JSON holds."""
    exchanges = transfers(step)
    rows = {group: i for i, group in enumerate(dict.fromkeys(_groups(step)), start=_COMPUTE + 1)}
    events = [*_compute_slices(step), *_exchange_slices(exchanges, rows)]
    for event in events:
        event["ts"], event["dur"] = _us(event["ts"] - step.begin), _us(event["dur"])
        event["pid"] = rank
    return {"displayTimeUnit": "ms", "traceEvents": [*_names(rows, rank), *events]}


def _groups(step: StepProfile) -> Iterator[str]:
    """The groups of the exchanges, in the order of their first launches."""
    for run in step.runs:
        if run.instance.node.lane is Lane.COMM:
            yield from (flight.group for flight in run.flights)


def _names(rows: dict[str, int], rank: int) -> Iterator[Event]:
    """Metadata: how the process and its rows are called and sorted."""
    names = {_COMPUTE: "compute"} | {tid: "comm" if len(rows) == 1 else f"comm {group}" for group, tid in rows.items()}
    yield _metadata("process_name", rank, _COMPUTE, name=f"rank {rank}")
    yield _metadata("process_sort_index", rank, _COMPUTE, sort_index=rank)
    for tid, name in names.items():
        yield _metadata("thread_name", rank, tid, name=name)
        yield _metadata("thread_sort_index", rank, tid, sort_index=tid)


def _metadata(kind: str, rank: int, tid: int, **args: Any) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": args}


def _compute_slices(step: StepProfile) -> Iterator[Event]:
    """Nodes, with what is nested in them, and launches, in the order in which they ran."""
    for run in step.runs:
        if run.instance.node.lane is Lane.COMM:
            yield _slice(f"launch {run.instance.node.name}", "launch", _COMPUTE, run.begin, run.end, _args(run))
            continue
        yield _slice(run.instance.node.name, "node", _COMPUTE, run.begin, run.end, _node_args(run))
        nested = [
            _slice(f"launch {each.op}", "launch", _COMPUTE, each.begin, each.launched, _args(run))
            for each in run.flights
        ]
        for wait in run.waits:
            flight = wait.flight
            name = "" if flight is None else f" {flight.node if flight.of_exchange else flight.op}"
            nested.append(_slice(f"wait{name}", "wait", _COMPUTE, wait.begin, wait.end, _args(run)))
        yield from sorted(nested, key=lambda event: event["ts"])


def _exchange_slices(exchanges: Sequence[Transfer], rows: dict[str, int]) -> Iterator[Event]:
    for each in exchanges:
        args = _args(each.run) | {
            "bytes_sent": each.bytes_sent,
            "queue_us": _us(each.begin - each.launched),
            "group": each.group,
        }
        yield _slice(each.run.instance.node.name, "exchange", rows[each.group], each.begin, each.end, args)


def _slice(name: str, kind: str, tid: int, begin: int, end: int, args: dict[str, Any]) -> Event:
    """A complete event, with its times in ns."""
    return {"name": name, "cat": kind, "ph": "X", "ts": begin, "dur": end - begin, "tid": tid, "args": args}


def _args(run: NodeRun) -> dict[str, Any]:
    node = run.instance.node
    return {
        "microbatch": run.microbatch,
        "phase": node.phase.value,
        "layer": node.layer,
        "slot": node.slot.value,
        "program": run.program,
    }


def _node_args(run: NodeRun) -> dict[str, Any]:
    waited = sum(wait.end - wait.begin for wait in run.waits)
    return _args(run) | {"mflop": run.flops / 1e6, "waited_us": _us(waited)}


def _us(ns: int) -> float:
    return round(ns / 1e3, 3)
