"""Run a program: the loop that issues node instances in order.

On a CPU the lanes are the calling thread (compute) and the process group's own thread (comm): a launch returns at
once, and the wait at the head of its reader blocks until the data has come.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fxoverlap import compat
from fxoverlap.runtime import interrupts
from fxoverlap.runtime.gradients import deliver
from fxoverlap.runtime.profile import Recorder
from fxoverlap.runtime.program import Operation, Program
from fxoverlap.runtime.state import MicrobatchState


@dataclass(slots=True)
class Progress:
    """How far a step has come; written while it runs, read when it fails.

    Attributes:
        operations: what runs.
        forward, backward: the states that it works on.
        index: the operation that runs, or the number of operations if they are all done.
    """

    operations: tuple[Operation, ...] = ()
    forward: MicrobatchState | None = None
    backward: MicrobatchState | None = None
    index: int = 0


def run(
    program: Program,
    forward: MicrobatchState | None,
    backward: MicrobatchState | None,
    progress: Progress,
    recorder: Recorder | None = None,
) -> None:
    """Run every operation of a program on the states of its microbatches, and write the buffers.

    With a recorder, when each operation runs is recorded.

    Raises what a node raises; and StepError if a parameter was changed since the forward of the microbatch whose
    backward runs.
    """
    progress.operations, progress.index = program.operations, 0
    progress.forward, progress.backward = forward, backward
    if backward is not None:
        backward.check_parameters()
    issue = _issue
    if recorder is not None:
        recorder.next_program()
        issue = functools.partial(_issue_recorded, recorder)
    for progress.index, operation in enumerate(program.operations):
        state = forward if operation.of_forward else backward
        assert state is not None
        issue(operation, state)
        interrupts.check()
    progress.index = len(program.operations)
    if forward is not None:
        forward.commit()
    progress.backward = None  # it is done, and nothing may keep it


def _issue_recorded(recorder: Recorder, operation: Operation, state: MicrobatchState) -> None:
    recorder.begin_node(operation.instance, state.number)
    _issue(operation, state)
    recorder.end_node()


def _issue(operation: Operation, state: MicrobatchState) -> None:
    values = state.values
    arguments = [values[i] for i in operation.reads]
    # Dropped before the call, so that arguments die inside it, with their last use.
    for i in operation.last_reads:
        values[i] = None
    # Some kernels keep what their backward needs only in grad mode, though no graph is made.
    with compat.below_autograd(), torch.set_grad_enabled(operation.of_forward):
        results = operation.call(arguments)
    for i in operation.last_waits:
        values[i] = None
    if operation.gradients:
        targets = [state.target(kind, index) for _, kind, index in operation.gradients]
        # What later nodes read as well must not become a `.grad`, which hooks and the user write to.
        gradients = [
            results[i] if operation.writes[i] is None else results[i].clone() for i, _, _ in operation.gradients
        ]
        deliver(targets, gradients, state.held)
    for position, result in zip(operation.writes, results, strict=True):
        if position is not None:
            values[position] = result
