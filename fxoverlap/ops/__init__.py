"""Custom ops: exchanges and grouped matrix products, each traceable and differentiable; random draws.

Importing this package registers `torch.ops.fxoverlap.exchange`, `.grouped_mm`, `.grouped_mm_wgrad` and
`.bernoulli_like`.
"""

from fxoverlap.ops import draws as _draws  # noqa: F401  (registers its op)
from fxoverlap.ops.exchange import exchange, exchange_counts
from fxoverlap.ops.grouped_mm import grouped_mm

__all__ = ["exchange", "exchange_counts", "grouped_mm"]
