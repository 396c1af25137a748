"""Run a program: the loop that issues node instances in order.

On a CPU the lanes are the calling thread (compute) and the process group's own thread (comm): a launch returns at
once, and the wait at the head of its reader blocks until the data has come.
"""

from __future__ import annotations

from fxoverlap import compat
from fxoverlap.errors import StepError
from fxoverlap.runtime.gradients import deliver
from fxoverlap.runtime.program import Operation, Program
from fxoverlap.runtime.state import MicrobatchState


def run(program: Program, forward: MicrobatchState | None, backward: MicrobatchState | None) -> None:
    """Run every operation of a program on the states of its microbatches.

    Raises StepError, naming node, phase and microbatch, with the original error as its cause; also if a parameter was
    changed since the forward of the microbatch whose backward runs.
    """
    if backward is not None:
        backward.check_parameters()
    for operation in program.operations:
        state = forward if operation.of_forward else backward
        assert state is not None
        try:
            _issue(operation, state)
        except Exception as error:
            node = operation.instance.node
            raise StepError(
                f"Node {node.name} (phase {node.phase.value}) of microbatch {state.number} failed: "
                f"{type(error).__name__}: {error}"
            ) from error
    if forward is not None:
        try:
            forward.commit()
        except Exception as error:
            raise StepError(f"The buffers of microbatch {forward.number} could not be written: {error}") from error


def _issue(operation: Operation, state: MicrobatchState) -> None:
    values = state.values
    arguments = [values[i] for i in operation.reads]
    # Dropped before the call, so that arguments die inside it, with their last use.
    for i in operation.last_reads:
        values[i] = None
    with compat.below_autograd():
        results = operation.call(arguments)
    for i in operation.last_waits:
        values[i] = None
    if operation.gradients:
        targets = [state.target(kind, index) for _, kind, index in operation.gradients]
        # What later nodes read as well must not become a `.grad`, which hooks and the user write to.
        gradients = [
            results[i] if operation.writes[i] is None else results[i].clone() for i, _, _ in operation.gradients
        ]
        deliver(targets, gradients)
    for position, result in zip(operation.writes, results, strict=True):
        if position is not None:
            values[position] = result
