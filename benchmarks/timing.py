"""Time several variants of one piece of work fairly: interleaved, repeated, medians.

On a machine that other work shares, speed drifts by more than the differences that are looked for. So no variant is
timed by itself: each repetition runs all of them once, starting with another one each time.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """The repetitions of one variant, in the order they ran, all in milliseconds."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]  # processor time of all threads of this process

    @property
    def ms(self) -> float:
        """Median wall time."""
        return statistics.median(self.wall)

    @property
    def cpu_ms(self) -> float:
        """Median processor time."""
        return statistics.median(self.cpu)


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    repeats: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """Run each variant `repeats` times, a round at a time, and return its times by name.

    `before` runs ahead of every single run and is not timed: clear gradients there, and let ranks meet. Run each
    variant once before this to keep first-use costs out.

    Raises ValueError if `repeats` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, got {repeats}")
    names = list(variants)
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(repeats):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            before()
            began, cpu_began = time.perf_counter(), time.process_time()
            variants[name]()
            ended, cpu_ended = time.perf_counter(), time.process_time()
            wall[name].append((ended - began) * 1e3)
            cpu[name].append((cpu_ended - cpu_began) * 1e3)
    return {name: Times(tuple(wall[name]), tuple(cpu[name])) for name in names}
