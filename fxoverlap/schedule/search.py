"""Search for the order of a plan that takes the least time on a machine.

In:  the tasks of a plan, a `Hardware`, and maybe the blocks of bytes that the tasks make and how many may be alive.
Out: an order of them.

An order is a merge of *queues*, each of which keeps its own order. For each microbatch there is the chain of its F, or
its B, nodes, a queue of its W nodes, one of its R nodes, and one for the branches beside the chain (`shared`). In a
chain an exchange is launched right behind the compute node before it, if it needs nothing else; the two are one
*bundle*.

Merging two chains is a walk over a grid, and dynamic programming over its cells is exact as long as every cell keeps
each combination of lane clocks that no other one dominates. The movable queues add dimensions, so the cells that are
looked at are a beam: of the partial orders of equally many bundles those are kept whose lower bound on the whole is
smallest; of equal ones those with less left on the other lane. Where bytes are limited, what is above the limit counts
before time does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxoverlap.hardware import Hardware
from fxoverlap.ir import Phase, Slot
from fxoverlap.schedule.holding import Block
from fxoverlap.schedule.simulate import Machine
from fxoverlap.schedule.tasks import Task, tails

_EFFORT = 6_000
"""Partial orders that are kept over all numbers of bundles: wide beams for shallow models, narrow ones for deep."""

_WIDTH = (24, 64)
"""Least and most partial orders that are kept of each number of bundles."""

_LEAN = 2
"""One more partial order for so many is kept because it holds few bytes, where bytes are limited."""

_DIGITS = 9
"""Times are compared in whole nanoseconds."""

_NOTHING = 1e-12
"""Seconds of work left where the sums of times in another order leave none."""

_A_CELL = 3
"""Partial orders that are kept of those that have issued the same bundles."""


def search(
    tasks: Sequence[Task], hardware: Hardware, blocks: Sequence[Block] = (), room: int | None = None
) -> list[int]:
    """The best order found, as positions in `tasks`.

    Args:
        tasks: what to order.
        hardware: where it runs.
        blocks: what the tasks hold.
        room: bytes that may be held at one time; where no order is found that holds so few, one is searched that holds
            little more. None: any.
    """
    grid = _Grid(tasks, hardware, blocks, room)
    narrow, wide = _WIDTH
    width = min(max(_EFFORT // max(grid.bundles, 1), narrow), wide)
    beam = [grid.start()]
    for _ in range(grid.bundles):
        cells: dict[tuple[int, ...], list[_Partial]] = {}
        for partial in beam:
            for following in grid.followers(partial):
                _keep(cells.setdefault(following.taken, []), following)
        found = sorted((each for cell in cells.values() for each in cell), key=_rank)
        beam = found[:width]
        if room is not None:
            # Those that hold little now can stay below the limit later.
            beam += sorted(found[width:], key=lambda each: (each.excess, each.alive))[: width // _LEAN]
    return [task for bundle in beam[0].path() for task in bundle.tasks]


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Tasks that are issued together: a compute node and the launches behind it, or one launch.

    Attributes:
        queue: number of its queue.
        tasks: positions of the tasks.
        after: (queue, number of its bundles that must have been issued), of other queues.
        path: longest chain of tasks from its beginning on.
        lead: compute time from its beginning until the queue's next launch; None if none follows.
    """

    queue: int
    tasks: tuple[int, ...]
    after: tuple[tuple[int, int], ...]
    path: float
    lead: float | None


@dataclass(slots=True, eq=False)
class _Partial:
    """The beginning of an order, and the machine behind it.

    Attributes:
        taken: bundles issued, by queue.
        machine: its lanes.
        flying: (task, arrival) of exchanges that nothing has waited for.
        compute_left: seconds of work for the compute lane that is not issued yet.
        groups_left: the same by process group.
        alive: bytes that are held behind it.
        excess: how many bytes above the limit it has held at most.
        bound: no order that begins so takes less. Of equal ones the better has the smaller second number, what all
            lanes take; then the smaller third one, the W nodes left, which keep what the forward has saved.
        before, last: the order without its last bundle, and that.
    """

    taken: tuple[int, ...]
    machine: Machine
    flying: tuple[tuple[int, float], ...]
    compute_left: float
    groups_left: dict[str, float]
    alive: int
    excess: int = 0
    bound: tuple[float, float, int] = (0.0, 0.0, 0)
    before: _Partial | None = None
    last: _Bundle | None = None

    def path(self) -> list[_Bundle]:
        """The bundles in order."""
        found, each = [], self
        while each.before is not None:
            assert each.last is not None
            found.append(each.last)
            each = each.before
        return found[::-1]


def _rank(partial: _Partial) -> tuple[float, ...]:
    return partial.excess, *partial.bound


def _keep(cell: list[_Partial], new: _Partial) -> None:
    """Add a partial order to those with the same bundles, unless one of them is as good in every clock."""
    for old in cell:
        if _dominates(old, new):
            return
    cell[:] = [old for old in cell if not _dominates(new, old)]
    cell.append(new)
    if len(cell) > _A_CELL:
        cell.remove(max(cell, key=_rank))


def _dominates(one: _Partial, other: _Partial) -> bool:
    mine, its = one.machine, other.machine
    if one.excess > other.excess or mine.compute > its.compute or mine.host > its.host:
        return False
    if any(free > its.groups.get(group, 0.0) for group, free in mine.groups.items()):
        return False
    arrivals = dict(other.flying)
    return all(end <= max(arrivals.get(task, 0.0), its.compute) for task, end in one.flying)


class _Grid:
    """The queues of a plan, and the steps from one partial order to the next."""

    def __init__(self, tasks: Sequence[Task], hardware: Hardware, blocks: Sequence[Block], room: int | None) -> None:
        self._tasks, self._hardware = tasks, hardware
        self._queues = _queues(tasks)
        firsts = [tasks[queue[0].tasks[0]].instance.node for queue in self._queues]
        self._weights = [q for q, node in enumerate(firsts) if node.phase is Phase.W]
        self.bundles = sum(map(len, self._queues))
        self._room = math.inf if room is None else room
        self._held_before = sum(block.bytes for block in blocks if block.made is None)
        self._made = [0] * len(tasks)
        for block in blocks:
            if block.made is not None:
                self._made[block.made] += block.bytes
        self._ends = _ends(blocks, self._queues)
        self._waits = [[need for need in task.needs if tasks[need].group is not None] for task in tasks]

    def start(self) -> _Partial:
        """No task is issued."""
        left: dict[str, float] = {}
        for task in self._tasks:
            if task.group is not None:
                left[task.group] = left.get(task.group, 0.0) + task.seconds
        compute = sum(map(self._on_compute, self._tasks))
        return _Partial((0,) * len(self._queues), Machine(self._hardware), (), compute, left, self._held_before)

    def followers(self, partial: _Partial) -> Iterator[_Partial]:
        """The partial orders with one bundle more."""
        taken = partial.taken
        for number, queue in enumerate(self._queues):
            if taken[number] < len(queue):
                bundle = queue[taken[number]]
                if all(taken[other] >= count for other, count in bundle.after):
                    yield self._issue(partial, bundle)

    def _on_compute(self, task: Task) -> float:
        """Time that a task takes from the compute lane by itself."""
        hardware = self._hardware
        own = task.seconds if task.group is None else 0.0
        return own if hardware.host_runs_ahead else own + hardware.issue_s(task.group is not None)

    def _issue(self, partial: _Partial, bundle: _Bundle) -> _Partial:
        machine, flying = partial.machine.copy(), partial.flying
        compute_left, groups_left = partial.compute_left, partial.groups_left
        for number in bundle.tasks:
            task, waits = self._tasks[number], self._waits[number]
            compute_left -= self._on_compute(task)
            ready = max([end for each, end in flying if each in waits], default=0.0) if waits and flying else 0.0
            if task.group is None:
                machine.run(task.seconds, ready, ready if task.counts else None)
                flying = tuple(each for each in flying if each[0] not in waits) if waits else flying
            else:
                # What it sends was made by the compute node before it.
                _, _, end = machine.launch(task.seconds, max(ready, machine.compute), task.group)
                flying = (*flying, (number, end))
                groups_left = {**groups_left, task.group: groups_left[task.group] - task.seconds}
        taken = list(partial.taken)
        taken[bundle.queue] += 1
        alive, excess = self._hold(partial, bundle, taken)
        following = _Partial(
            tuple(taken), machine, flying, compute_left, groups_left, alive, excess, before=partial, last=bundle
        )
        following.bound = self._bound(following)
        return following

    def _hold(self, partial: _Partial, bundle: _Bundle, taken: Sequence[int]) -> tuple[int, int]:
        """(bytes held behind a bundle, most bytes above the limit so far); `taken` counts the bundle."""
        alive, most = partial.alive, 0
        for number in bundle.tasks:
            most = max(most, alive + max(self._tasks[number].inside, self._made[number]))
            alive += self._made[number]
            for size, others in self._ends.get(number, ()):
                if all(taken[queue] >= count for queue, count in others):
                    alive -= size
        return alive, max(partial.excess, int(max(0, most - self._room)))

    def _bound(self, partial: _Partial) -> tuple[float, float, int]:
        """`_Partial.bound`."""
        machine, flying = partial.machine, partial.flying
        lanes = [(machine.groups.get(group, 0.0), left) for group, left in partial.groups_left.items()]
        running = max([max(0.0, free - machine.compute) + left for free, left in lanes], default=0.0)
        compute = machine.compute + partial.compute_left + self._hardware.comm_share * running
        longest, lead = compute, math.inf
        for queue, taken in zip(self._queues, partial.taken, strict=True):
            if taken == len(queue):
                continue
            bundle, begin = queue[taken], machine.compute
            if flying:
                waits = self._waits[bundle.tasks[0]]
                begin = max([begin, *(end for each, end in flying if each in waits)])
            longest = max(longest, begin + bundle.path)
            if bundle.lead is not None:
                lead = min(lead, begin + bundle.lead)
        total = compute
        for free, left in lanes:
            if left > _NOTHING:
                done = max(free, lead) + left
                longest, total = max(longest, done), total + done
        weights_left = sum(len(self._queues[q]) - partial.taken[q] for q in self._weights)
        # Sums of the same times in another order are equal.
        return round(longest, _DIGITS), round(total, _DIGITS), weights_left


def _queues(tasks: Sequence[Task]) -> list[list[_Bundle]]:
    """The bundles of each queue, in order."""
    queues = _members(tasks)
    place = {
        number: (q, position)
        for q, queue in enumerate(queues)
        for position, members in enumerate(queue)
        for number in members
    }
    tail = tails(tasks)
    found = []
    for q, queue in enumerate(queues):
        bundles = []
        for members, lead in zip(queue, _leads(queue, tasks), strict=True):
            path = tasks[members[0]].seconds + tail[members[0]]
            bundles.append(_Bundle(q, tuple(members), _after(q, members, tasks, place), path, lead))
        found.append(bundles)
    return found


def _members(tasks: Sequence[Task]) -> list[list[list[int]]]:
    """The positions of the tasks of each bundle of each queue."""
    queues: dict[tuple[str, str], list[list[int]]] = {}
    for number, task in enumerate(tasks):
        queue = queues.setdefault(_queue_of(task), [])
        # What stands between the two in another queue may need the first.
        if task.group is not None and queue and all(i <= queue[-1][0] or i in queue[-1] for i in task.needs):
            queue[-1].append(number)
        else:
            queue.append([number])
    return list(queues.values())


def _after(
    q: int, members: Sequence[int], tasks: Sequence[Task], place: Mapping[int, tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """`_Bundle.after` of a bundle; `place` is the (queue, bundle) of each task."""
    after: dict[int, int] = {}
    for other, position in (place[need] for number in members for need in tasks[number].needs):
        if other != q:
            after[other] = max(after.get(other, 0), position + 1)
    return tuple(after.items())


def _leads(queue: Sequence[Sequence[int]], tasks: Sequence[Task]) -> list[float | None]:
    """`_Bundle.lead` of each bundle of a queue."""
    found: list[float | None] = []
    lead: float | None = None
    for members in reversed(queue):
        first = tasks[members[0]]
        computing = first.seconds if first.group is None else 0.0
        if any(tasks[number].group is not None for number in members):
            lead = computing
        elif lead is not None:
            lead += computing
        found.append(lead)
    return found[::-1]


def _ends(
    blocks: Sequence[Block], queues: Sequence[Sequence[_Bundle]]
) -> dict[int, list[tuple[int, tuple[tuple[int, int], ...]]]]:
    """What a task may end: for each block that no later task of its queue needs, (its bytes, (queue, number of its
    bundles) of the other queues that must have been issued)."""
    place = {
        task: (bundle.queue, position + 1, i)
        for queue in queues
        for position, bundle in enumerate(queue)
        for i, task in enumerate(bundle.tasks)
    }
    found: dict[int, list[tuple[int, tuple[tuple[int, int], ...]]]] = {}
    for block in blocks:
        last: dict[int, int] = {}  # by queue
        for task in sorted(block.until, key=place.__getitem__):
            last[place[task][0]] = task
        for queue, task in last.items():
            others = tuple((other, place[each][1]) for other, each in last.items() if other != queue)
            found.setdefault(task, []).append((block.bytes, others))
    return found


def _queue_of(task: Task) -> tuple[str, str]:
    """(microbatch, which of its queues)."""
    node = task.instance.node
    if node.phase is Phase.W:
        return task.instance.mb, "weights"
    if node.phase is Phase.R:
        return task.instance.mb, "replay"
    return task.instance.mb, "beside" if node.slot is Slot.SHARED else "chain"
