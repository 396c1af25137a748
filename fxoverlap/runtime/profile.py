"""When the node instances of a step run, what they wait for, and when the data of their collectives is on its way.

A `Recorder` watches one step; what it has seen is a `StepProfile`. Launches and waits of node modules go through
`launch` and `wait` here, and are recorded inside `recorded`.

All times are nanoseconds of `time.perf_counter_ns`, but for processor times, which are nanoseconds that a thread has
run. A launch is *in flight* from its call until its data has arrived,
which a thread of the process group notes for all-to-alls. The thread may have to wait for the interpreter, so the end
of the wait counts if it comes first. Other collectives are in flight until the end of their wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter_ns, thread_time_ns
from typing import Any

import torch

from fxoverlap import compat
from fxoverlap.ir import Instance, Lane, Round
from fxoverlap.ops.collectives import ALL_TO_ALL, EXCHANGE
from fxoverlap.ops.exchange import checked_splits
from fxoverlap.runtime import peers


@dataclass(slots=True)
class Flight:
    """One launch of a collective.

    Attributes:
        op: name of the collective, such as `all_to_all_single`.
        node: name of the schedule node that launched it.
        of_exchange: whether that is a node of the comm lane; else a collective stands among compute.
        group: name of the process group.
        bytes_sent: size of its input, the rank's own part included.
        begin, launched: begin and end of the launching call.
        end: when the data had arrived.
        seen: when a thread of the group saw it arrive, None for other collectives than all-to-alls.
    """

    op: str
    node: str
    of_exchange: bool
    group: str
    bytes_sent: int
    begin: int
    launched: int = 0
    end: int = 0
    seen: int | None = None

    def arrive(self) -> None:
        """Note that the data is there."""
        self.seen = perf_counter_ns()


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait for a collective.

    Attributes:
        begin, end: of the wait.
        flight: what it waited for; None if it had been waited for before.
    """

    begin: int
    end: int
    flight: Flight | None


@dataclass(slots=True)
class NodeRun:
    """One node instance of a step.

    Attributes:
        program: index of the program in the step: 0 for F(0), i for F(i) with B(i - 1). With `ramp="pair"`, 0 for F(0)
            with F(1), i for F(i + 1) with B(i - 1).
        instance: what ran.
        microbatch: number of its microbatch.
        begin, end: when it ran on the thread of the step, the delivery of its gradients included. A node of the comm
            lane only launches in that time.
        processor: processor time of the step's thread from its begin to its end.
        flights: the collectives that it launched, in order.
        waits: its waits, in order.
        flops: its floating point operations at balanced routing.
    """

    program: int
    instance: Instance
    microbatch: int
    begin: int
    end: int = 0
    processor: int = 0
    flights: list[Flight] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    flops: int = 0


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A step that has been recorded.

    Attributes:
        begin, end: of the step; captures and the agreement of the ranks come before.
        runs: every node instance, in the order in which they ran.
        structures: what is the same for chunk graphs of any lengths, one a microbatch.
        rounds: what ran, in rounds.
        outputs: whether the user was given what forward returns besides the loss.
        numbers: the integers among the values of each microbatch's forward, by name of the value: rows and split sizes.
    """

    begin: int
    end: int
    runs: tuple[NodeRun, ...]
    structures: tuple[str, ...] = ()
    rounds: tuple[Round, ...] = ()
    outputs: bool = True
    numbers: tuple[Mapping[str, int], ...] = ()


class Recorder:
    """Records one step. It holds no tensors."""

    def __init__(self) -> None:
        self._begin = perf_counter_ns()
        self._program = -1
        self._runs: list[NodeRun] = []
        self._numbers: dict[int, dict[str, int]] = {}
        self._flying: dict[int, Flight] = {}  # by storage of the result, which is alive until the wait

    def next_program(self) -> None:
        """What begins from here on belongs to the next program."""
        self._program += 1

    def begin_node(self, instance: Instance, microbatch: int) -> None:
        """A node instance begins."""
        run = NodeRun(self._program, instance, microbatch, perf_counter_ns())
        run.processor = -thread_time_ns()
        self._runs.append(run)

    def end_node(self) -> None:
        """The node instance that began last ends."""
        run = self._runs[-1]
        run.processor += thread_time_ns()
        run.end = perf_counter_ns()

    def note_numbers(self, microbatch: int, values: Mapping[str, Any]) -> None:
        """Keep the integers among the results of a node."""
        numbers = self._numbers.setdefault(microbatch, {})
        numbers.update({name: value for name, value in values.items() if type(value) is int})

    def launch(self, op: Any, args: tuple[Any, ...]) -> Any:
        """Launch a functional collective for the node that runs."""
        run = self._runs[-1]
        node, sent = run.instance.node, _tensors(args[0])
        flight = Flight(
            op=str(op).split(".")[1],
            node=node.name,
            of_exchange=node.lane is Lane.COMM,
            group=args[-1],
            bytes_sent=sum(each.numel() * each.element_size() for each in sent),
            begin=perf_counter_ns(),
        )
        result = _launch(op, args, flight)
        flight.launched = perf_counter_ns()
        run.flights.append(flight)
        for each in _tensors(result):
            self._flying[compat.storage_id(each)] = flight
        peers.note(op, args)
        return result

    def wait(self, tensor: torch.Tensor) -> torch.Tensor:
        """Wait for a collective in the node that runs."""
        flight = self._flying.pop(compat.storage_id(tensor), None)
        begin = perf_counter_ns()
        result = peers.wait(tensor)
        end = perf_counter_ns()
        if flight is not None:
            flight.end = end if flight.seen is None else min(end, flight.seen)
        self._runs[-1].waits.append(Wait(begin, end, flight))
        return result

    def finish(self, rounds: Sequence[Round], structures: Sequence[str], outputs: bool) -> StepProfile:
        """The step is done; arguments as in `StepProfile`."""
        end = perf_counter_ns()
        for flight in self._flying.values():
            flight.end = end if flight.seen is None else flight.seen  # nothing waits for it
        for run in self._runs:
            chunk = rounds[run.program].plan.chunks[run.instance.mb]
            cost = chunk.costs.get(run.instance.node.name)
            run.flops = cost.flops if cost is not None else 0
        numbers = tuple(self._numbers.get(i, {}) for i in range(len(structures)))
        return StepProfile(self._begin, end, tuple(self._runs), tuple(structures), tuple(rounds), outputs, numbers)


_recorder: ContextVar[Recorder | None] = ContextVar("fxoverlap_recorder", default=None)


@contextlib.contextmanager
def recorded(recorder: Recorder | None) -> Iterator[None]:
    """Let a recorder see the launches and waits of this thread, for as long as the block lasts; None sees nothing."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def launch(op: Any, *args: Any) -> Any:
    """`peers.launch`, recorded."""
    recorder = _recorder.get()
    return peers.launch(op, *args) if recorder is None else recorder.launch(op, args)


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """`peers.wait`, recorded."""
    recorder = _recorder.get()
    return peers.wait(tensor) if recorder is None else recorder.wait(tensor)


def _launch(op: Any, args: tuple[Any, ...], flight: Flight) -> Any:
    """Launch a collective; an all-to-all tells when its data arrives."""
    if op is EXCHANGE:
        x, out_splits, in_splits, out_rows, group = args
        received, sent = checked_splits(x, out_splits, in_splits, out_rows)
        return compat.all_to_all_with_arrival(x.contiguous(), received, sent, group, flight.arrive)
    if op is ALL_TO_ALL:
        x, received, sent, group = args
        return compat.all_to_all_with_arrival(x.contiguous(), list(received), list(sent), group, flight.arrive)
    return op(*args)


def _tensors(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
