"""Checking many random models: each gives eager's bits, or is refused with an error that says how to mend it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy


def kind_of(message: str) -> str:
    """A refusal without what is particular to one model."""
    return re.sub(r"'[^']*'|\S*(?:layers|blocks)\.\S*|\d+", "~", message)[:110]


def assert_helpful(message: str) -> None:
    """The message says what is refused and, in a sentence of its own, what to do."""
    assert re.match(r"[A-Z].*[.)] [A-Z][a-z]+ .*\.$", message, re.DOTALL), message


def check_all(
    strategy: SearchStrategy[Any], outcome: Callable[[Any], tuple[list[str], str | None]], count: int, what: str
) -> str:
    """Check `count` examples of a strategy; a line that says how many were refused, and why.

    `outcome` gives what differs from eager, and why the example was refused, if it was.
    """
    cases, refused = [0], Counter[str]()

    # A case captures several graphs, which takes hypothesis's measures of a strategy's own speed and size too far.
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

    @seed(1)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=quiet,
        phases=(Phase.generate, Phase.shrink),
    )
    @given(strategy)
    def check(spec: Any) -> None:
        found, reason = outcome(spec)
        cases[0] += 1
        if reason is not None:
            refused[kind_of(reason)] += 1
            assert_helpful(reason)
        assert found == []

    check()
    share = refused.total() / cases[0]
    reasons = "".join(f"\n  {number} x {reason}" for reason, number in refused.most_common())
    line = f"{cases[0]} {what}: {refused.total()} refused ({share:.1%}){reasons}"
    assert share < 0.1, line
    return line
