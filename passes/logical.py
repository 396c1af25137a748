"""Which physical layers make one logical layer: a fact of the model's structure that `layers` writes down.

In:  for each physical layer whether it is a mixture of experts, and the ranges that the pattern brackets.
Out: for each physical layer the index of its logical layer.

Rules:
1. What brackets hold is one logical layer.
2. Outside them a *run*, the layers between one mixture of experts and the next, is one logical layer together with the
   mixture of experts that it leads to.
3. A run that is at least two layers longer than usual, such as the dense layers that a model begins with, is cut at
   its layer edges: only as many layers as are usual stay with its mixture of experts. As layers of their own, the
   others cover exchanges of the other microbatch; in one piece they would cover one exchange only.
4. A layer that leads to no mixture of experts is a logical layer of its own.

Usual is the lower median of the lengths of all runs, and at least one; with one run there is nothing to compare with,
and it is two.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Range = tuple[int, int]
"""Half-open range of physical layers."""


def logical_layers(is_moe: Sequence[bool], brackets: Sequence[Range] = ()) -> list[int]:
    """The logical layer of each physical layer."""
    groups: list[int] = []
    for start, end in _ranges(is_moe, brackets):
        groups += [groups[-1] + 1 if groups else 0] * (end - start)
    return groups


def _ranges(is_moe: Sequence[bool], brackets: Sequence[Range]) -> list[Range]:
    """The physical layers of each logical layer, in order."""
    opened = dict(brackets)  # start -> end
    runs = _runs(is_moe, opened)
    lengths = [end - start - 1 for start, end in runs if is_moe[end - 1]]
    usual = max(1, statistics.median_low(lengths)) if len(lengths) > 1 else 2
    found: list[Range] = []
    for start, end in runs:
        spare = end - start - 1 - usual
        if start in opened:
            alone = 0
        elif is_moe[end - 1]:
            alone = spare if spare >= 2 else 0
        else:
            alone = end - start - 1
        found += [(i, i + 1) for i in range(start, start + alone)]
        found.append((start + alone, end))
    return found


def _runs(is_moe: Sequence[bool], opened: dict[int, int]) -> list[Range]:
    """Brackets, and what is between them cut behind each mixture of experts."""
    found: list[Range] = []
    start = 0
    for i in range(len(is_moe)):
        end = opened.get(start, i + 1)
        if i + 1 == end and (start in opened or is_moe[i] or end in opened or end == len(is_moe)):
            found.append((start, end))
            start = end
    return found
