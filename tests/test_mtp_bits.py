"""Models with multi-token prediction give the bits of eager: losses, gradients, buffers, generator, trained parameters.

Depths, layers of a depth, tied or detached heads, recompute, one rank and two: every pair of a few of these by default,
and a larger product with `-m slow`. Each row is one capture and two steps, of 1 and of 3 microbatches.
"""

from __future__ import annotations

import itertools
import traceback
from typing import Any

import pytest
import torch.distributed as dist
from hybrid_patterns import SMALL
from pairwise import Row, pairwise_rows
from toys import batches, toy, train_both
from two_ranks import TwoRanks

import fxoverlap as fxo

pytestmark = pytest.mark.usefixtures("shared_captures")

Recompute = fxo.Recompute

WORK = {"*E": 1.0, "[*E]": 1.0, "[*E][*-]": 1.3, "[ME][G-]": 2.4, "[M*E][G-]": 2.6}
"""The layers of a depth, with the time that a capture takes beside that of the first."""

ISSUE: dict[str, tuple[Any, ...]] = {
    "part": ("*E", "[*E]", "[*E][*-]", "[M*E][G-]"),
    "depth": (1, 2, 4),
    "tied": (False, True),
    "detached": ((), ("head",)),
    "recompute": (None, Recompute("uniform", 1), Recompute("uniform", 2)),
    "ranks": (1, 2),
}

LIGHT = ISSUE | {
    "part": ("*E", "[*E][*-]", "[ME][G-]"),
    "depth": (1, 3),
    "detached": ((), ("head",), ("head", "trunk")),
}
"""Every pair of these is run by default."""

PLAIN = {
    "trunk": "-[E]",
    "given": True,
    "schedule": "auto",
    "mtp_projections": 1,
    "options": {"router": "sigmoid", "selection_bias": True, "z_loss": 0.1},
}
OTHER = {"trunk": "E-", "given": False, "schedule": "megatron", "mtp_projections": 2, "options": {"dropout": 0.1}}


def cost(row: Row) -> float:
    """What decides between rows of about as many new pairs: how long they take; two ranks share a processor."""
    return float((row["ranks"] * (1 + row["depth"] * WORK[row["part"]])) ** 0.25)


ROWS = [row | {"rest": (PLAIN, OTHER)[i % 2]} for i, row in enumerate(pairwise_rows(LIGHT, cost))]
PRODUCT = [dict(zip(ISSUE, values, strict=True)) | {"rest": PLAIN} for values in itertools.product(*ISSUE.values())]


def of_ranks(rows: list[Row], ranks: int) -> list[Row]:
    return [row for row in rows if row["ranks"] == ranks]


def name(row: Row) -> str:
    flags = ["tied"] * row["tied"] + [f"no_{each}" for each in row["detached"]] + ["found"] * (not row["rest"]["given"])
    asked = row["recompute"] and f"uniform{row['recompute'].num_layers}"
    return "-".join([f"{row['depth']}x{row['part']}", asked or "none", *flags])


def outcome(row: Row, group: dist.ProcessGroup, rank: int = 0) -> list[str]:
    """What differs from eager in a step of 1 and one of 3 microbatches."""
    rest = row["rest"]
    pattern = rest["trunk"] + f"/{row['part']}" * row["depth"]
    flags = {f"mtp_detach_{each}": True for each in row["detached"]} | {"mtp_projections": rest["mtp_projections"]}
    model = toy(pattern, group, tied=row["tied"], **SMALL, **flags, **rest["options"])
    config = fxo.OverlapConfig(
        pattern if rest["given"] else None, schedule=rest["schedule"], recompute=row["recompute"]
    )
    overlapped = fxo.transform(model, config, example_inputs=batches(1, rank)[0])
    return train_both(overlapped, lambda step: batches((1, 3)[step], rank, seed=step), steps=2)


def outcomes(rank: int, rows: list[Row]) -> list[list[str]]:
    """On one of two ranks: the outcome of each row, or its error."""
    found = []
    for row in rows:
        try:
            found.append(outcome(row, dist.group.WORLD, rank))
        except Exception:
            found.append([traceback.format_exc()])
    return found


def test_the_rows_hold_every_pair() -> None:
    for a, b in itertools.combinations(LIGHT, 2):
        assert {*itertools.product(LIGHT[a], LIGHT[b])} <= {(row[a], row[b]) for row in ROWS}, (a, b)


@pytest.mark.parametrize("row", of_ranks(ROWS, 1), ids=name)
def test_every_pair(row: Row, group: dist.ProcessGroup) -> None:
    assert outcome(row, group) == []


@pytest.fixture(scope="module")
def found(two_ranks: TwoRanks) -> list[list[list[str]]]:
    return two_ranks.run(outcomes, of_ranks(ROWS, 2), timeout_s=600)


@pytest.mark.parametrize("number", range(len(of_ranks(ROWS, 2))), ids=map(name, of_ranks(ROWS, 2)))
def test_every_pair_on_two_ranks(number: int, found: list[list[list[str]]]) -> None:
    assert [each[number] for each in found] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("row", of_ranks(PRODUCT, 1), ids=name)
def test_whole_product(row: Row, group: dist.ProcessGroup) -> None:
    assert outcome(row, group) == []


@pytest.fixture(scope="module")
def found_in_product(two_ranks: TwoRanks) -> list[list[list[str]]]:
    return two_ranks.run(outcomes, of_ranks(PRODUCT, 2), timeout_s=7200)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(of_ranks(PRODUCT, 2))), ids=map(name, of_ranks(PRODUCT, 2)))
def test_whole_product_on_two_ranks(number: int, found_in_product: list[list[list[str]]]) -> None:
    assert [each[number] for each in found_in_product] == [[], []]
