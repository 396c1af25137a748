"""The rounds of a step: which plan follows which, and on which microbatches it works."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxoverlap.ir import Plan, Round


def rounds_of(microbatches: int, pair: bool) -> list[dict[str, int]]:
    """For each round of a step, the microbatch (from 0) that each `Instance.mb` of its plan stands for.

    Args:
        microbatches: how many there are, at least one.
        pair: whether the first two forwards run beside each other, and the last two backwards; one microbatch has no
            partner.
    """
    last = microbatches - 1
    if not pair or not last:
        return [{"F": 0}, *({"F": i + 1, "B": i} for i in range(last)), {"B": last}]
    return [{"F0": 0, "F1": 1}, *({"F": i + 2, "B": i} for i in range(last - 1)), {"B0": last - 1, "B1": last}]


def kind_of(labels: Iterable[str]) -> str:
    """The kind of the plan that holds microbatches with these labels: "FB" of "F" and "B", "BB" of "B0" and "B1"."""
    return "".join(label[0] for label in labels)


def rounds_with(plans: Mapping[str, Plan], microbatches: int, pair: bool) -> list[Round]:
    """The rounds of a step in which all plans of one kind are the same; `plans` is by kind."""
    return [Round(plans[kind_of(numbers)], numbers) for numbers in rounds_of(microbatches, pair)]
