"""What schedule nodes cost in time, and the machines that they are costed for.

In:  a chunk graph whose `costs` hold floating point operations and bytes (pass `bytes`), and a `Hardware`.
Out: a `CostTable`: the same with `NodeCost.seconds` filled in.

What the user's table names takes the time that it says; every other node takes what the roofline says.

Time of a compute node is that of a roofline: the longer of computing and moving bytes. An exchange takes the latency of
the link and then as long as its bytes need: of b bytes that each of n ranks sends, its own part included, (n - 1) / n
leave the rank. Where the group is larger than a domain of fast links, what leaves the domain travels over the network,
beside what stays in it; the latter is taken to be as much as in a group of the domain's size, so that a larger group
never takes less time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fxoverlap import cost_file
from fxoverlap.config import OverlapConfig
from fxoverlap.hardware import DEFAULT, PRESETS, Hardware
from fxoverlap.ir import ChunkGraph, CostTable, Lane, NodeCost, ScheduleNode, nodes_of
from fxoverlap.schedule.memory import node_bytes

__all__ = [
    "PRESETS",
    "Hardware",
    "all_to_all_bytes",
    "default_costs",
    "hardware_of",
    "link_seconds",
    "of_plan",
    "roofline",
    "seconds",
]


def all_to_all_bytes(given: int, ranks: int) -> float:
    """Bytes that leave a rank in an all-to-all of `given` bytes a rank: its own part stays."""
    return given * (ranks - 1) / ranks


def seconds(node: ScheduleNode, cost: NodeCost, hardware: Hardware) -> float:
    """Time of one node on its lane."""
    if node.lane is Lane.COMM:
        return _exchange_seconds(cost, hardware)
    computing = cost.flops / hardware.flops_per_s
    moving = cost.bytes_moved / hardware.memory_bytes_per_s
    return max(computing, moving) / hardware.efficiency


def _exchange_seconds(cost: NodeCost, hardware: Hardware) -> float:
    near = min(cost.ranks, hardware.domain)
    inside = all_to_all_bytes(cost.bytes_sent, near)
    outside = cost.bytes_sent * (cost.ranks - near) / cost.ranks
    return link_seconds(inside, outside, hardware)


def link_seconds(inside: float, outside: float, hardware: Hardware) -> float:
    """Time of an exchange in which a rank sends so many bytes to other ranks of its domain, and of other domains."""
    slowest = max(inside / hardware.fast_bytes_per_s, outside / hardware.network_bytes_per_s)
    return hardware.latency_s + slowest / hardware.efficiency


def roofline(nodes: Iterable[ScheduleNode], costs: Mapping[str, NodeCost], hardware: Hardware) -> dict[str, NodeCost]:
    """The costs of these nodes with their time on a machine. A node that `costs` lacks does nothing."""
    found = {node.name: (node, costs.get(node.name, NodeCost())) for node in nodes}
    return {name: replace(cost, seconds=seconds(node, cost, hardware)) for name, (node, cost) in found.items()}


def hardware_of(config: OverlapConfig) -> Hardware:
    """The machine that `OverlapConfig.costs` names. Raises ConfigError if that is a file that cannot be read."""
    if config.costs is None:
        return PRESETS[DEFAULT]
    return cost_file.read(config.costs).hardware if cost_file.is_path(config.costs) else PRESETS[str(config.costs)]


def default_costs(chunk: ChunkGraph, config: OverlapConfig, others: Iterable[str] = ()) -> CostTable:
    """The costs of all nodes of a chunk where nothing was measured.

    Args:
        chunk: whose nodes.
        config: says where costs come from.
        others: names of nodes that other chunks of the model have.

    Raises ConfigError if the user's table cannot be read, or names a node that none of the chunks has.
    """
    hardware = hardware_of(config)
    held = node_bytes(chunk)
    nodes = {name: replace(cost, **held[name]) for name, cost in roofline(chunk.nodes, chunk.costs, hardware).items()}
    if not cost_file.is_path(config.costs):
        return CostTable(nodes, hardware, f"roofline {hardware.name}")
    table = cost_file.read(config.costs)
    table.check_names([*nodes, *others])
    given = {name: time for name in nodes if (time := table.of(name)) is not None}
    nodes |= {name: replace(nodes[name], seconds=time) for name, time in given.items()}
    return CostTable(nodes, table.hardware, f"table {table.path}", frozenset(given))


def of_plan(chunks: Mapping[str, ChunkGraph], costs: Mapping[str, CostTable]) -> CostTable:
    """The costs of the nodes that a plan runs.

    Args:
        chunks: by microbatch, as in `Plan.chunks`; at least one.
        costs: by microbatch likewise. Where two microbatches run a node of one name, the longer time counts.
    """
    nodes: dict[str, NodeCost] = {}
    for mb, chunk in chunks.items():
        for node in nodes_of(mb, chunk):
            cost = costs[mb].nodes[node.name]
            nodes[node.name] = max(cost, nodes.get(node.name, cost), key=lambda each: each.seconds)
    first = next(iter(costs.values()))
    return CostTable(nodes, first.hardware, first.source, frozenset().union(*(c.known for c in costs.values())))
