"""Markers of events in fused graphs: what one lane records, another waits for.

They compute nothing. A runtime that has streams turns them into stream events; on a CPU, where the host issues
everything in order and a collective is waited for by its own wait op, there is nothing to do. FX dead-code elimination
keeps them.
"""

from __future__ import annotations

from torch import fx


def record_event(event: int, lane: str) -> None:
    """Mark that all that `lane` was given so far belongs to `event`."""


def wait_event(event: int, lane: str) -> None:
    """Mark that what `lane` is given from here on starts after `event`."""


for _marker in (record_event, wait_event):
    fx.node.has_side_effect(_marker)
