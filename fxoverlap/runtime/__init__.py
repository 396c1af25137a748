"""The runtime: runs fused graphs on the state of at most two microbatches, and delivers gradients."""

from fxoverlap.runtime.agreement import Fingerprint, agree
from fxoverlap.runtime.executor import run
from fxoverlap.runtime.gradients import all_or_nothing
from fxoverlap.runtime.program import Program, lower
from fxoverlap.runtime.state import Layout, MicrobatchState

__all__ = ["Fingerprint", "Layout", "MicrobatchState", "Program", "agree", "all_or_nothing", "lower", "run"]
