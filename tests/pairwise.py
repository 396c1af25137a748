"""Rows of choices in which every pair of values of two of them occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise_rows(choices: Mapping[str, Sequence[Any]], cost: Callable[[Row], float] = lambda row: 1.0) -> list[Row]:
    """Few rows of the product, chosen one by one for the most pairs that are new at the least cost."""
    places = list(itertools.combinations(range(len(choices)), 2))
    pairs, costs = {}, {}
    for chosen in itertools.product(*(range(len(values)) for values in choices.values())):
        pairs[chosen] = {(i, chosen[i], j, chosen[j]) for i, j in places}
        costs[chosen] = cost(_row(choices, chosen))
    missing = set().union(*pairs.values())
    rows = []
    while missing:
        best = max(pairs, key=lambda chosen: len(pairs[chosen] & missing) / costs[chosen])
        missing -= pairs[best]
        rows.append(_row(choices, best))
    return rows


def _row(choices: Mapping[str, Sequence[Any]], chosen: Sequence[int]) -> Row:
    return {name: values[i] for (name, values), i in zip(choices.items(), chosen, strict=True)}
