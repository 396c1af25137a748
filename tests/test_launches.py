"""What a rank has to launch to catch up with its peers, told from what they say of their launches."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxoverlap.runtime import launches
from fxoverlap.runtime.launches import Launches, missing

c10d = torch.ops._c10d_functional
ALL_TO_ALL = c10d.all_to_all_single.default


@pytest.fixture(autouse=True)
def three_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group "ep" of the global ranks 1, 3 and 5."""
    monkeypatch.setattr(launches.compat, "process_group", lambda name: name)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [1, 3, 5])


def noted(*calls: tuple[Any, ...]) -> Launches:
    """The record of calls, as peers read it in the store."""
    found = Launches()
    for op, *args in calls:
        found.note(op, tuple(args))
    return Launches.from_json(json.loads(json.dumps(found.to_json())))


def rows(count: int) -> torch.Tensor:
    return torch.ones(count, 4, dtype=torch.bfloat16)


def test_rows_that_peers_expect_and_send() -> None:
    one = noted((ALL_TO_ALL, rows(6), [1, 2, 3], [2, 3, 1], "ep"))
    three = noted((ALL_TO_ALL, rows(5), [3, 0, 7], [0, 1, 4], "ep"))
    [(op, sent, received, sent_splits, group)] = missing("ep", 5, {1: one, 3: three, 5: Launches()}) or []
    assert (op, group) == (ALL_TO_ALL, "ep")
    # Rank 5 is the third of the group: what rank 1 sends to it is the third of its input splits, and so on.
    assert received == [1, 4, 0] and sent_splits == [3, 7, 0]
    assert sent.shape == (10, 4) and sent.dtype == torch.bfloat16


def test_ranks_that_are_both_behind_exchange_nothing() -> None:
    one = noted((ALL_TO_ALL, rows(6), [1, 2, 3], [2, 3, 1], "ep"))
    calls = missing("ep", 3, {1: one, 3: Launches(), 5: Launches()}) or []
    assert [(received, sent) for _, _, received, sent, _ in calls] == [([3, 0, 0], [2, 0, 0])]


def test_exchange_is_caught_up_with_by_its_plain_form() -> None:
    splits = torch.tensor([1, 1, 1])
    one = noted((torch.ops.fxoverlap.exchange.default, rows(3), splits, splits, 3, "ep"))
    [(op, sent, received, _, _)] = missing("ep", 3, {1: one, 3: Launches(), 5: one}) or []
    assert (op, received, sent.shape) == (ALL_TO_ALL, [1, 0, 1], (2, 4))


def test_other_collectives_are_the_same_on_every_rank() -> None:
    calls = (
        (c10d.all_reduce.default, torch.ones(2, 3), "sum", "ep"),
        (c10d.all_gather_into_tensor.default, torch.ones(2, dtype=torch.int64), 3, "ep"),
        (c10d.broadcast.default, torch.ones(()), 1, "ep"),
    )
    ahead = noted(*calls)
    found = missing("ep", 1, {1: noted(calls[0]), 3: ahead, 5: noted(*calls[:2])}) or []
    assert [(op, *args[1:]) for op, *args in found] == [(op, *args[1:]) for op, *args in calls[1:]]
    assert [args[0].shape for _, *args in found] == [(2,), ()]
    assert [args[0].dtype for _, *args in found] == [torch.int64, torch.float32]


def test_nothing_is_missing_on_the_rank_that_is_ahead() -> None:
    ahead = noted((c10d.all_reduce.default, torch.ones(2), "sum", "ep"))
    assert missing("ep", 1, {1: ahead, 3: Launches(), 5: Launches()}) == []


def test_what_cannot_be_told_is_not_guessed() -> None:
    coalesced = noted((c10d.all_reduce_coalesced.default, [torch.ones(2)], "sum", "ep"))
    assert missing("ep", 1, {1: Launches(), 3: coalesced, 5: coalesced}) is None
    many = noted(*[(c10d.all_reduce.default, torch.ones(2), "sum", "ep")] * 1000)
    assert len(many.last) < 1000 and many.count == 1000
    assert missing("ep", 1, {1: Launches(), 3: many, 5: many}) is None
