"""Joint pass `exchanges`: find the all-to-alls of the expert-parallel group, pair them, say what each carries.

In:  JointGraph with tagged ops.
Out: the same graph with `exchanges` filled in.

An exchange is one launch, or several with the same split sizes of which none needs another's result. Its role comes
from its split sizes, not from its position: a combine has the sizes of its dispatch reversed, and a backward exchange
reverses the sizes of the forward exchange that it is the gradient of. Only where sizes are equal both ways
(fixed-capacity dispatch) does the order decide. Integers are counts, unless they travel with tokens (expert ids,
quantized rows): with the split sizes of a neighbour that is no counts exchange, and without deciding any split sizes.

Raises UnsupportedError: a launch has no wait or several; all-to-alls of several groups and no `process_group` in the
config; a forward exchange that cannot be paired.
"""

from __future__ import annotations

import bisect
from dataclasses import replace
from typing import Any

from torch import fx

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import UnsupportedError
from fxoverlap.ir import Exchange, JointGraph, Phase, Role
from fxoverlap.passes import op_facts

Splits = tuple[Any, Any]


def exchanges(joint: JointGraph, config: OverlapConfig) -> JointGraph:
    """Fill in `JointGraph.exchanges`."""
    graph = joint.module.graph
    launches = [node for node in op_facts.ops(graph) if op_facts.is_launch(node)]
    group = _expert_group(launches, config)
    launches = [node for node in launches if group_name(node) == group]
    forward = _forward([node for node in launches if op_facts.tag(node).phase is Phase.F])
    backward = _backward([node for node in launches if op_facts.tag(node).phase is Phase.B], forward)
    return replace(joint, exchanges=tuple(_exchange(each) for each in (*forward, *backward)))


exchanges.stage = "joint"  # type: ignore[attr-defined]


class _Found:
    """Launches that make one exchange, while they are being collected."""

    def __init__(self, role: Role, phase: Phase, index: int, launch: fx.Node) -> None:
        self.role, self.phase, self.index = role, phase, index
        self.launches = [launch]
        self.splits = splits(launch)

    def takes(self, launch: fx.Node) -> bool:
        """Whether another launch travels together with these: same sizes, not waiting for their result."""
        return splits(launch) == self.splits and not _depends(launch, self.launches)


def _exchange(found: _Found) -> Exchange:
    waits = []
    for launch in found.launches:
        readers = list(launch.users)
        if len(readers) != 1 or not op_facts.is_wait(readers[0]):
            raise UnsupportedError(
                f"The {found.role.value} launch {launch.name} must be read by exactly one wait_tensor, found "
                f"{[reader.name for reader in readers] or 'no reader'}. Wait for the result of a functional "
                f"collective once, before anything else reads it."
            )
        waits.append(readers[0].name)
    names = tuple(launch.name for launch in found.launches)
    layer = op_facts.tag(found.launches[0]).layer
    group = group_name(found.launches[0])
    return Exchange(found.role, found.phase, found.index, layer, names, tuple(waits), group)


def group_name(launch: fx.Node) -> str:
    """The process group that a launch uses."""
    found = launch.args[-1]
    assert isinstance(found, str), launch
    return found


def splits(launch: fx.Node) -> Splits:
    """(sizes received, sizes sent) of a launch, comparable: the tensors that hold them, or the sizes as expressions.

    Expressions and not nodes, because the backward may make the same size again by another op.
    """

    def key(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return op_facts.storage_root(arg)
        return tuple(str(size.meta["val"] if isinstance(size, fx.Node) else size) for size in arg)

    return key(launch.args[1]), key(launch.args[2])


def _expert_group(launches: list[fx.Node], config: OverlapConfig) -> str | None:
    groups = sorted({group_name(node) for node in launches})
    if config.process_group is not None:
        asked = config.process_group
        name = asked if isinstance(asked, str) else str(asked.group_name)
        if groups and name not in groups:
            raise UnsupportedError(
                f"OverlapConfig.process_group is group {name!r}, but the model's all-to-alls use {groups}. Pass the "
                f"group that the MoE layers exchange tokens in."
            )
        return name
    if len(groups) < 2:
        return groups[0] if groups else None
    # Sequence-parallel attention sends equal static parts; expert parallelism sends what the router chose.
    routed = sorted({group_name(node) for node in launches if _is_data_dependent(node)})
    if len(routed) != 1:
        raise UnsupportedError(
            f"The model uses all-to-alls of several process groups, {groups}, and it is not clear which one is the "
            f"expert-parallel group. Pass it as OverlapConfig.process_group."
        )
    return routed[0]


def _is_data_dependent(launch: fx.Node) -> bool:
    sizes = launch.args[1]
    return isinstance(sizes, fx.Node) or any(isinstance(size, fx.Node) for size in sizes)  # type: ignore[union-attr]


def _depends(node: fx.Node, launches: list[fx.Node]) -> bool:
    """Whether `node` needs the result of one of `launches`."""
    floor = launches[0]
    seen, stack = set(), [node]
    while stack:
        current = stack.pop()
        for source in current.all_input_nodes:
            if source in launches:
                return True
            # The graph is in order, so nothing before the first launch can need it.
            if source not in seen and source > floor:
                seen.add(source)
                stack.append(source)
    return False


def _forward(launches: list[fx.Node]) -> list[_Found]:
    counts = _counts(launches)
    found: list[_Found] = []
    for launch in launches:
        if found and (launch in counts) == (found[-1].role is Role.COUNTS) and found[-1].takes(launch):
            found[-1].launches.append(launch)
            continue
        role = Role.COUNTS if launch in counts else _token_role(launch, found)
        found.append(_Found(role, Phase.F, len(found), launch))
    return found


def _counts(launches: list[fx.Node]) -> set[fx.Node]:
    """The launches that exchange counts."""
    integers = {launch for launch in launches if not _has_gradient(launch)}
    counts = {launch for launch in integers if _decides_sizes(launch)}
    # A byte is too short for a count: it is a quantized token.
    integers = {launch for launch in integers if launch.meta["val"].element_size() > 1}
    tokens = [launch for launch in launches if launch not in integers | counts]
    for launch in integers - counts:
        here = bisect.bisect_left(tokens, launch)  # in the order of the graph
        before, behind = tokens[max(here - 1, 0) : here], tokens[here : here + 1]
        together = [each for each in before if not _depends(launch, [each])]
        together += [each for each in behind if not _depends(each, [launch])]
        if all(splits(each) != splits(launch) for each in together):
            counts.add(launch)
    return counts


def _has_gradient(launch: fx.Node) -> bool:
    """Whether what a launch sends may have a gradient: integers have none."""
    dtype = launch.meta["val"].dtype
    return dtype.is_floating_point or dtype.is_complex


def _decides_sizes(launch: fx.Node) -> bool:
    """Whether the result of a launch becomes split sizes, without passing through another launch."""
    seen, stack = set(), [launch]
    while stack:
        node = stack.pop()
        for user in node.users:
            if op_facts.is_launch(user):
                sizes: list[fx.Node] = []
                fx.node.map_arg(user.args[1:], sizes.append)
                if node in sizes:
                    return True
            elif user not in seen:
                seen.add(user)
                stack.append(user)
    return False


def _token_role(launch: fx.Node, before: list[_Found]) -> Role:
    tokens = next((each for each in reversed(before) if each.role is not Role.COUNTS), None)
    if tokens is not None and tokens.role is Role.DISPATCH and tokens.splits == splits(launch)[::-1]:
        return Role.COMBINE
    if tokens is not None and tokens.role is Role.DISPATCH:
        raise UnsupportedError(
            f"The all-to-all {launch.name} (module {op_facts.tag(launch).fqn!r}) follows the dispatch "
            f"{tokens.launches[0].name}, but does not reverse its split sizes. Send the results of the experts "
            f"back with the received and sent sizes of the dispatch exchanged."
        )
    return Role.DISPATCH


def _backward(launches: list[fx.Node], forward: list[_Found]) -> list[_Found]:
    # Forward exchanges whose gradient has not been met yet, by the sizes that it will have.
    left: dict[Splits, list[_Found]] = {}
    for each in forward:
        if each.role is not Role.COUNTS:
            left.setdefault(each.splits[::-1], []).append(each)
    found: list[_Found] = []
    partner: _Found | None = None
    for launch in launches:
        if partner is not None and len(found[-1].launches) < _gradients(partner) and found[-1].takes(launch):
            found[-1].launches.append(launch)
            continue
        matches = left.get(splits(launch))
        if not matches:
            raise UnsupportedError(
                f"The backward all-to-all {launch.name} is not the gradient of a forward exchange that is left over. "
                f"All-to-alls that only the backward runs cannot be scheduled yet."
            )
        partner = matches.pop()
        found.append(_Found(partner.role, Phase.B, partner.index, launch))
    return found


def _gradients(found: _Found) -> int:
    """How many launches the gradient of a forward exchange may have."""
    return sum(map(_has_gradient, found.launches))
