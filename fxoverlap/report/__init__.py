"""What `overlapped.report()`, `.golden()` and `.timeline()` give."""

from fxoverlap.report.golden import golden, node_table
from fxoverlap.report.report import Report, make_report
from fxoverlap.report.timeline import write_timeline

__all__ = ["Report", "golden", "make_report", "node_table", "write_timeline"]
