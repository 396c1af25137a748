"""What schedule nodes cost in time, and the machines that they are costed for.

In:  a chunk graph whose `costs` hold floating point operations and bytes (pass `bytes`), and a `Hardware`.
Out: the same table with `NodeCost.seconds` filled in.

Time of a compute node is that of a roofline: the longer of computing and moving bytes. An exchange takes the latency
of the link and then as long as its bytes need: of b bytes that each of n ranks sends, its own part included, (n - 1) / n
leave the rank. Where the group is larger than a domain of fast links, what leaves the domain travels over the network,
beside what stays in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fxoverlap.ir import CostTable, Lane, NodeCost, ScheduleNode


@dataclass(frozen=True, slots=True)
class Hardware:
    """A rank's accelerator (or processor core) and what joins it to the other ranks.

    Attributes:
        name: of the preset, or of what was measured.
        flops_per_s: dense floating point operations in the dtype of training.
        memory_bytes_per_s: bandwidth of the memory.
        fast_bytes_per_s: what a rank sends, one way, to ranks of its own domain.
        domain: ranks that fast links join, itself included.
        network_bytes_per_s: what a rank sends, one way, to ranks of other domains.
        latency_s: from the launch of an exchange to the arrival of its first byte.
        efficiency: share of these figures that real kernels and links reach.
        node_s: what the host needs to issue one node.
        host_runs_ahead: whether nodes are queued, as on streams of a GPU; else the host is the compute lane.
        comm_share: share of an exchange's time for which it also takes the compute lane: the processor time of the
            thread that communicates, or the multiprocessors that its kernels occupy.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    fast_bytes_per_s: float
    domain: int
    network_bytes_per_s: float
    latency_s: float
    efficiency: float
    node_s: float
    host_runs_ahead: bool
    comm_share: float


_EFFICIENCY = 0.6

PRESETS: Mapping[str, Hardware] = {
    each.name: each
    for each in (
        Hardware("cpu", 6e10, 1e10, 1.25e8, 1, 1.25e8, 2e-4, 1.0, 5e-5, False, 0.1),
        Hardware("a100", 312e12, 2.039e12, 300e9, 8, 25e9, 1e-5, _EFFICIENCY, 1e-5, True, 0.1),
        Hardware("h100", 989e12, 3.35e12, 450e9, 8, 50e9, 1e-5, _EFFICIENCY, 1e-5, True, 0.1),
        Hardware("h200", 989e12, 4.8e12, 450e9, 8, 50e9, 1e-5, _EFFICIENCY, 1e-5, True, 0.1),
        Hardware("b200", 2250e12, 8e12, 900e9, 8, 50e9, 1e-5, _EFFICIENCY, 1e-5, True, 0.1),
        Hardware("gb200", 2500e12, 8e12, 900e9, 72, 50e9, 1e-5, _EFFICIENCY, 1e-5, True, 0.1),
    )
}
"""Machines by name."""


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
    inside = cost.bytes_sent * (near - 1) / cost.ranks / hardware.fast_bytes_per_s
    outside = cost.bytes_sent * (cost.ranks - near) / cost.ranks / hardware.network_bytes_per_s
    return hardware.latency_s + max(inside, outside) / hardware.efficiency


def roofline(nodes: Iterable[ScheduleNode], costs: CostTable, hardware: Hardware) -> dict[str, NodeCost]:
    """The costs of these nodes with their time on a machine."""
    return {node.name: replace(costs[node.name], seconds=seconds(node, costs[node.name], hardware)) for node in nodes}
