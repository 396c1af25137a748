"""A step that failed -> the error that the user gets, with nothing left behind.

The ranks hear of one another's failures, launches whose peers take part are waited for, and the states of the
microbatches are emptied, so that what they held is free when the error is handled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxoverlap.errors import StepError, StepInterrupted
from fxoverlap.ir import Lane, runs_forward
from fxoverlap.runtime.executor import Progress
from fxoverlap.runtime.peers import Peers, Verdict, follows, mark_unusable, mark_usable, wait
from fxoverlap.runtime.program import Operation


def step_error(
    error: BaseException, progress: Progress, groups: Sequence[dist.ProcessGroup], peers: Peers | None
) -> StepError:
    """The error for a step that failed with `error`, after cleaning up.

    Args:
        error: what was raised.
        progress: where.
        groups: the groups of the ranks that run the same step.
        peers: their ranks, None if there is no group.
    """
    text = _text(error, progress)
    in_flight = _in_flight(progress)
    verdict = Verdict("", True)
    if peers is None:
        for result in in_flight:
            wait(result)
    elif follows(error) or not _is_past_the_last_launch(progress) or not peers.arrive(in_flight):
        mark_unusable(groups, text)  # for as long as nobody knows: a second Ctrl-C may end this
        verdict = peers.settle(text, error, in_flight)
    for state in progress.alive.values():
        state.values.clear()
    if verdict.cause and verdict.cause not in text:
        text = f"{text} Before that, {verdict.cause}"
    if verdict.in_step:
        mark_usable(groups)
    else:
        mark_unusable(groups, text)
        text += " The ranks are no longer in step: restart the processes, or make a new process group."
    kind = StepInterrupted if isinstance(error, KeyboardInterrupt) else StepError
    return kind(text)


def _text(error: BaseException, progress: Progress) -> str:
    if isinstance(error, StepError):
        return str(error)
    operation = _operation(progress)
    reason = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    if operation is None:
        numbers = [str(state.number) for state in progress.states.values()]
        return f"The step failed between the nodes of microbatch {' and '.join(numbers) or 0}: {reason}"
    node, number = operation.instance.node, progress.states[operation.instance.mb].number
    return f"Node {node.name} (phase {node.phase.value}) of microbatch {number} failed: {reason}"


def _operation(progress: Progress) -> Operation | None:
    operations = progress.operations
    return operations[progress.index] if progress.index < len(operations) else None


def _is_past_the_last_launch(progress: Progress) -> bool:
    """Whether this rank has launched all collectives of the step."""
    rest = progress.operations[progress.index :]
    is_last = len(progress.operations) > 0 and not any(map(runs_forward, progress.states))
    return is_last and not any(each.launches for each in rest)


def _in_flight(progress: Progress) -> list[torch.Tensor]:
    """Results of launches that no node has waited for."""
    found: list[torch.Tensor] = []
    if _operation(progress) is None:
        return found
    done = progress.operations[: progress.index + 1]
    for i, operation in enumerate(done[:-1]):
        if operation.instance.node.lane is not Lane.COMM:
            continue
        mb = operation.instance.mb
        state = progress.states[mb]
        later = [each for each in done[i + 1 :] if each.instance.mb == mb]
        read = {position for each in later for position in each.reads}
        unread = [position for position in operation.writes if position is not None and position not in read]
        found += [state.values[position] for position in unread if state.values[position] is not None]
    return found
