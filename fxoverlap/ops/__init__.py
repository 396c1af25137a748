"""Custom ops of expert parallelism: exchanges and grouped matrix products, each traceable and differentiable.

Importing this package registers `torch.ops.fxoverlap.exchange`, `.grouped_mm` and `.grouped_mm_wgrad`.
"""

from fxoverlap.ops.exchange import exchange, exchange_counts
from fxoverlap.ops.grouped_mm import grouped_mm

__all__ = ["exchange", "exchange_counts", "grouped_mm"]
