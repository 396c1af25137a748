"""The process groups whose ranks run the same step.

In:  what the config asks for, the collectives of the captured graphs, and the model.
Out: groups of more than one rank, this one among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxoverlap import compat
from fxoverlap.errors import ConfigError
from fxoverlap.ir import JointGraph


def groups_of_step(
    asked: dist.ProcessGroup | str | None, found: Sequence[str], model: nn.Module
) -> list[dist.ProcessGroup]:
    """The groups whose ranks run the same step; none where `torch.distributed` is not in use.

    Args:
        asked: `OverlapConfig.process_group`. If it is given, it is the only one.
        found: names of the groups of the captured collectives.
        model: before the first capture, the one group that its modules hold, as an object or by its name, counts.

    Raises ConfigError if no group has the name that is asked for.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    if isinstance(asked, str) and asked not in compat.group_names():
        raise ConfigError(
            f"OverlapConfig.process_group is {asked!r}, but the process groups are "
            f"{', '.join(sorted(compat.group_names()))}. Give the group itself, or its group_name."
        )
    named = [asked] if asked is not None else found
    groups = [compat.process_group(each) if isinstance(each, str) else each for each in named or _held(model)]
    return [group for group in groups if dist.get_rank(group) >= 0 and dist.get_world_size(group) > 1]


def groups_in(joint: JointGraph) -> tuple[str, ...]:
    """Names of the process groups of a graph's collectives, in trace order."""
    names = compat.group_names() if dist.is_available() and dist.is_initialized() else set()
    given = (argument for node in joint.module.graph.nodes if node.op == "call_function" for argument in node.args)
    return tuple(dict.fromkeys(each for each in given if isinstance(each, str) and each in names))


def _held(model: nn.Module) -> list[dist.ProcessGroup]:
    """The group that the modules hold, if it is one; of several, only the graph can tell which are used."""
    names = compat.group_names()
    values = (each for module in model.modules() for value in vars(module).values() for each in _flat(value))
    held: dict[str, dist.ProcessGroup] = {}
    for each in values:
        if isinstance(each, dist.ProcessGroup):
            held[each.group_name] = each
        elif isinstance(each, str) and each in names:
            held[each] = compat.process_group(each)
    return list(held.values()) if len(held) == 1 else []


def _flat(value: Any) -> Iterable[Any]:
    """A value, or what a container or a device mesh holds directly."""
    if isinstance(value, DeviceMesh):
        return value.get_all_groups()
    if isinstance(value, (list, tuple)):
        return value
    return value.values() if type(value) is dict else (value,)
