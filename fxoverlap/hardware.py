"""Machines that costs are predicted for: what a rank computes and moves in a second, and what joins ranks.

Figures of the GPU presets are those of NVIDIA's data sheets, for the dense bf16 tensor cores (data sheets print twice
that, for structured sparsity) and for one direction of the links (data sheets print the sum of both):

| preset | FLOP/s | memory | links within a domain | ranks in it | network | source |
|---|---|---|---|---|---|---|
| a100 | 312 T | 2.039 TB/s | 300 GB/s | 8 | 200 Gbit/s | "NVIDIA A100 Tensor Core GPU", SXM 80 GB; DGX A100 |
| h100 | 989 T | 3.35 TB/s | 450 GB/s | 8 | 400 Gbit/s | "NVIDIA H100 Tensor Core GPU", SXM; DGX H100 |
| h200 | 989 T | 4.8 TB/s | 450 GB/s | 8 | 400 Gbit/s | "NVIDIA H200 Tensor Core GPU", SXM; DGX H200 |
| b200 | 2250 T | 8 TB/s | 900 GB/s | 8 | 400 Gbit/s | "NVIDIA DGX B200": an eighth of the system |
| gb200 | 2500 T | 8 TB/s | 900 GB/s | 72 | 400 Gbit/s | "NVIDIA GB200 NVL72": a 72nd of the rack |

Real kernels and links do not reach them: one factor, `efficiency`, serves all GPU presets, fitted to the step times of
three published runs without overlap (docs/simulate.md). Their latency, their time to issue a node and their
`comm_share` are round figures and come from no data sheet.

`cpu` is one core and a link of 1 Gbit/s. Its figures were measured with this project's standard configuration (width
256, 512 tokens, fp32, gloo), so they hold what kernels reach, and its efficiency is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
        launch_s: what it needs beyond that to launch an exchange, which is under way meanwhile.
        host_runs_ahead: whether nodes are queued, as on streams of a GPU; else the host is the compute lane.
        comm_share: share of the compute lane that exchanges take for as long as any is in flight: the processor time of
            the thread that communicates, or the multiprocessors that its kernels occupy.
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
    launch_s: float
    host_runs_ahead: bool
    comm_share: float

    def issue_s(self, is_exchange: bool) -> float:
        """What the host needs in all to issue one node."""
        return self.node_s + (self.launch_s if is_exchange else 0.0)


_EFFICIENCY = 0.55

PRESETS: Mapping[str, Hardware] = {
    each.name: each
    for each in (
        Hardware("cpu", 6e10, 1e10, 1.25e8, 1, 1.25e8, 5e-4, 1.0, 5e-5, 1e-4, False, 0.1),
        Hardware("a100", 312e12, 2.039e12, 300e9, 8, 25e9, 1e-5, _EFFICIENCY, 1e-5, 1e-5, True, 0.1),
        Hardware("h100", 989e12, 3.35e12, 450e9, 8, 50e9, 1e-5, _EFFICIENCY, 1e-5, 1e-5, True, 0.1),
        Hardware("h200", 989e12, 4.8e12, 450e9, 8, 50e9, 1e-5, _EFFICIENCY, 1e-5, 1e-5, True, 0.1),
        Hardware("b200", 2250e12, 8e12, 900e9, 8, 50e9, 1e-5, _EFFICIENCY, 1e-5, 1e-5, True, 0.1),
        Hardware("gb200", 2500e12, 8e12, 900e9, 72, 50e9, 1e-5, _EFFICIENCY, 1e-5, 1e-5, True, 0.1),
    )
}
"""Machines by name."""

DEFAULT = "cpu"
"""The preset where the user names none."""
