"""How many bytes an order of nodes holds, roughly, by what ranks share: a search compares orders with it.

In:  the tasks of a plan, and the costs of their nodes.
Out: blocks of bytes, each with the task that makes it and those that need it.

What a node hands on is two blocks: what it *passes* to nodes of its own side, the forward or the backward, which is
alive until the last of them has run, and what it *keeps* for later: F for B, R and W; B and R for W. What an exchange
sends is alive until what it brings has been waited for. What a node holds inside comes on top while it runs.

`schedule.memory` is exact, but speaks of the sizes of one rank; ranks have to choose the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fxoverlap.flow import users_of
from fxoverlap.ir import ChunkGraph, CostTable, NodeCost
from fxoverlap.schedule.memory import side_of
from fxoverlap.schedule.tasks import Task


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that a plan holds.

    Attributes:
        bytes: how many.
        made: position of the task that makes them; None: they are alive before.
        until: positions of the tasks that need them; none: they are alive behind the plan.
    """

    bytes: int
    made: int | None
    until: tuple[int, ...]


def blocks_of(chunks: Mapping[str, ChunkGraph], tasks: Sequence[Task], costs: CostTable) -> list[Block]:
    """The blocks of a plan over these chunks; what its microbatches hold before it counts where `costs` tells of it."""
    position = {(task.instance.mb, task.instance.node.name): i for i, task in enumerate(tasks)}
    blocks = []
    for mb, chunk in chunks.items():
        users = users_of(chunk.nodes)
        for node in chunk.nodes:
            cost, made = costs.get(node.name, NodeCost()), position.get((mb, node.name))
            using = dict.fromkeys(user for value in node.writes for user in users.get(value, ()))
            here = [user for user in using if (mb, user.name) in position]
            for size, is_kept in ((cost.passed, False), (cost.kept, True)):
                until = [position[mb, user.name] for user in here if (side_of(user) > side_of(node)) == is_kept]
                if size and (made is not None or until):
                    blocks.append(Block(size, made, tuple(until)))
    return blocks


def held_bytes(order: Sequence[int], tasks: Sequence[Task], blocks: Iterable[Block]) -> int:
    """Most bytes that an order, of positions in `tasks`, holds at one time."""
    at = {task: i for i, task in enumerate(order)}
    made, ends = [0] * len(order), [0] * len(order)
    alive = 0
    for block in blocks:
        if block.made is None:
            alive += block.bytes
        else:
            made[at[block.made]] += block.bytes
        if block.until:
            ends[max(at[task] for task in block.until)] += block.bytes
    most = alive
    for task, more, less in zip(order, made, ends, strict=True):
        most = max(most, alive + max(tasks[task].inside, more))
        alive += more - less
    return most
