"""Run a program: the loop that issues node instances in order.

On a CPU the lanes are the calling thread (compute) and the process group's own thread (comm): a launch returns at
once, and the wait at the head of its reader blocks until the data has come.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fxoverlap import compat
from fxoverlap.ir import runs_forward
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
        states: those that it works on, by `Instance.mb`.
        alive: the microbatches that have begun and are not done, by number.
        index: the operation that runs, or the number of operations if they are all done.
    """

    operations: tuple[Operation, ...] = ()
    states: Mapping[str, MicrobatchState] = field(default_factory=dict)
    alive: dict[int, MicrobatchState] = field(default_factory=dict)
    index: int = 0


def run(
    program: Program,
    states: Mapping[str, MicrobatchState],
    progress: Progress,
    recorder: Recorder | None = None,
) -> None:
    """Run every operation of a program on the states of its microbatches, and write the buffers.

    Args:
        program: what runs.
        states: by `Instance.mb`, the earlier microbatch first where there are two of one phase.
        progress: written.
        recorder: records when each operation runs, if there is one.

    Raises what a node raises; and StepError if a parameter was changed since the forward of a microbatch whose
    backward runs.
    """
    progress.operations, progress.index = program.operations, 0
    progress.states = states
    for mb, state in states.items():
        if not runs_forward(mb):
            state.check_parameters()
    issue = _issue
    if recorder is not None:
        recorder.next_program()
        issue = functools.partial(_issue_recorded, recorder)
    for progress.index, operation in enumerate(program.operations):
        issue(operation, states[operation.instance.mb])
        interrupts.check()
    progress.index = len(program.operations)
    # The others are done, and nothing may keep them.
    progress.states = {mb: state for mb, state in states.items() if runs_forward(mb)}
    for state in progress.states.values():
        state.commit()


def _issue_recorded(recorder: Recorder, operation: Operation, state: MicrobatchState) -> None:
    recorder.begin_node(operation.instance, state.number)
    _issue(operation, state)
    recorder.end_node()
    if operation.in_grad_mode:
        written = zip(operation.instance.node.writes, operation.writes, strict=True)
        recorder.note_numbers(state.number, {name: state.values[i] for name, i in written if i is not None})


def _issue(operation: Operation, state: MicrobatchState) -> None:
    values = state.values
    arguments = [values[i] for i in operation.reads]
    # Dropped before the call, so that arguments die inside it, with their last use.
    for i in operation.last_reads:
        values[i] = None
    # Some kernels keep what their backward needs only in grad mode, though no graph is made.
    with compat.below_autograd(), torch.set_grad_enabled(operation.in_grad_mode):
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
