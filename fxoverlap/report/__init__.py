"""What `overlapped.report()` and `overlapped.golden()` print."""

from fxoverlap.report.golden import golden, node_table
from fxoverlap.report.report import Report, make_report

__all__ = ["Report", "golden", "make_report", "node_table"]
