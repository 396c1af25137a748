"""Agreement of the ranks before a step runs.

Every rank of the expert-parallel group says, in one small all-reduce before any node runs, whether it is ready, how
many microbatches it has, and the hash of the plans that it is about to run. A rank that failed, unequal numbers, and
different plans raise PlanMismatchError on every rank, naming the rank and the first difference.

A fingerprint is a list of lines: the config's fields, then the nodes and plans of the step. It holds no shapes, costs
or tensors, so ranks with other sequence lengths agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NoReturn

import torch
import torch.distributed as dist

from fxoverlap.errors import PlanMismatchError

READY, FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must be equal on all ranks.

    Attributes:
        lines: the text that is compared.
        digest: its hash, as two integers.
    """

    lines: tuple[str, ...] = ()
    digest: tuple[int, int] = (0, 0)

    @staticmethod
    def of(lines: Sequence[str]) -> Fingerprint:
        """The fingerprint of some lines."""
        found = hashlib.sha256("\n".join(lines).encode()).digest()
        return Fingerprint(tuple(lines), (int.from_bytes(found[:7], "big"), int.from_bytes(found[7:14], "big")))


def agree(group: dist.ProcessGroup, microbatches: int, plans: Fingerprint, failure: Exception | None) -> None:
    """Raise PlanMismatchError on every rank unless all are ready for the same step.

    Args:
        group: the ranks that must agree.
        microbatches: how many this rank has.
        plans: what this rank is about to run.
        failure: what kept this rank from getting ready.
    """
    if dist.get_world_size(group) == 1:
        if failure is not None:
            raise failure
        return
    status = READY if failure is None else FAILED
    rows = _gather_numbers(group, [status, microbatches, *plans.digest])
    if any(row[0] == FAILED for row in rows):
        _raise_failure(group, failure)
    counts = [row[1] for row in rows]
    if len(set(counts)) > 1:
        odd = next(rank for rank, count in enumerate(counts) if count != counts[0])
        raise PlanMismatchError(
            f"step: rank {odd} has {counts[odd]} microbatches, rank 0 has {counts[0]}. "
            f"Give every rank of the expert-parallel group the same number."
        )
    other = next((rank for rank, row in enumerate(rows) if row[2:] != rows[0][2:]), None)
    if other is not None:
        _raise_difference(group, plans, other)


def _gather_numbers(group: dist.ProcessGroup, own: list[int]) -> list[list[int]]:
    """The numbers of every rank, by one all-reduce of a table in which each rank fills its own row."""
    table = torch.zeros(dist.get_world_size(group), len(own), dtype=torch.int64)
    table[dist.get_rank(group)] = torch.tensor(own)
    dist.all_reduce(table, group=group)
    return table.tolist()


def _raise_failure(group: dist.ProcessGroup, failure: Exception | None) -> NoReturn:
    texts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, None if failure is None else f"{type(failure).__name__}: {failure}", group=group)
    rank = next(rank for rank, text in enumerate(texts) if text is not None)
    raise PlanMismatchError(f"step: rank {rank} could not get ready, so no rank runs: {texts[rank]}") from failure


def _raise_difference(group: dist.ProcessGroup, plans: Fingerprint, other: int) -> NoReturn:
    everyones: list[tuple[str, ...]] = [()] * dist.get_world_size(group)
    dist.all_gather_object(everyones, plans.lines, group=group)
    pairs = zip_longest(everyones[0], everyones[other], fillvalue="(nothing)")
    first = next(((a, b) for a, b in pairs if a != b), ("", ""))
    raise PlanMismatchError(
        f"step: rank {other} has another plan than rank 0. First difference: {first[0]!r} on rank 0, {first[1]!r} on "
        f"rank {other}. Give every rank the same config, model structure and microbatch structure."
    )
