"""Agreement of the ranks before a step runs.

Every rank of the expert-parallel group says, in one small all-reduce before any node runs: whether it is ready, how
many microbatches it has, and whether it has a plan that the others may not have. Only if someone has something new,
fingerprints of the plans are compared. A rank that failed, unequal numbers, and different plans raise
PlanMismatchError on every rank, naming the rank and the first difference.

A fingerprint is a list of lines: the config's fields, then the nodes and plans. It holds no shapes, costs or tensors,
so ranks with other sequence lengths agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from fxoverlap.errors import PlanMismatchError

READY, FAILED = 0, 1


def agree(
    group: dist.ProcessGroup,
    microbatches: int,
    has_new_plan: bool,
    fingerprint: Callable[[], Sequence[str]],
    failure: Exception | None,
) -> None:
    """Raise PlanMismatchError on every rank unless all are ready for the same step.

    Args:
        group: the ranks that must agree.
        microbatches: how many this rank has.
        has_new_plan: whether this rank planned something that has not been compared yet.
        fingerprint: gives the lines to compare; only called if someone has something new.
        failure: what kept this rank from getting ready.
    """
    size = dist.get_world_size(group)
    if size == 1:
        if failure is not None:
            raise failure
        return
    status = READY if failure is None else FAILED
    rows = _gather_numbers(group, [status, microbatches, int(has_new_plan)])
    if any(row[0] == FAILED for row in rows):
        _raise_failure(group, failure)
    counts = [row[1] for row in rows]
    if len(set(counts)) > 1:
        odd = next(rank for rank, count in enumerate(counts) if count != counts[0])
        raise PlanMismatchError(
            f"step: rank {odd} has {counts[odd]} microbatches, rank 0 has {counts[0]}. "
            f"Give every rank of the expert-parallel group the same number."
        )
    if any(row[2] for row in rows):
        _compare(group, list(fingerprint()))


def _gather_numbers(group: dist.ProcessGroup, own: list[int]) -> list[list[int]]:
    """The numbers of every rank, by one all-reduce of a table in which each rank fills its own row."""
    table = torch.zeros(dist.get_world_size(group), len(own), dtype=torch.int64)
    table[dist.get_rank(group)] = torch.tensor(own)
    dist.all_reduce(table, group=group)
    return table.tolist()


def _raise_failure(group: dist.ProcessGroup, failure: Exception | None) -> None:
    texts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, None if failure is None else f"{type(failure).__name__}: {failure}", group=group)
    rank = next(rank for rank, text in enumerate(texts) if text is not None)
    raise PlanMismatchError(f"step: rank {rank} could not get ready, so no rank runs: {texts[rank]}") from failure


def _compare(group: dist.ProcessGroup, lines: list[str]) -> None:
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    halves = [int.from_bytes(digest[i : i + 7], "big") for i in (0, 7)]
    rows = _gather_numbers(group, halves)
    odd = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
    if odd is None:
        return
    everyones: list[list[str]] = [[] for _ in rows]
    dist.all_gather_object(everyones, lines, group=group)
    pairs = zip_longest(everyones[0], everyones[odd], fillvalue="(nothing)")
    first = next(((a, b) for a, b in pairs if a != b), ("", ""))
    raise PlanMismatchError(
        f"step: rank {odd} has another plan than rank 0. First difference: {first[0]!r} on rank 0, {first[1]!r} on "
        f"rank {odd}. Give every rank the same config, model structure and microbatch structure."
    )
