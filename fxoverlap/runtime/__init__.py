"""The runtime: runs fused graphs on the state of at most two microbatches, and delivers gradients."""

from fxoverlap.runtime import interrupts
from fxoverlap.runtime.agreement import Fingerprint, Standing, agree, share
from fxoverlap.runtime.executor import Progress, run
from fxoverlap.runtime.failure import step_error
from fxoverlap.runtime.gradients import all_or_nothing, held_accumulators
from fxoverlap.runtime.peers import Peers, report_failure, watched
from fxoverlap.runtime.profile import Flight, NodeRun, Recorder, StepProfile, recorded
from fxoverlap.runtime.program import Program, lower
from fxoverlap.runtime.state import Layout, MicrobatchState

__all__ = [
    "Fingerprint",
    "Flight",
    "Layout",
    "MicrobatchState",
    "NodeRun",
    "Peers",
    "Program",
    "Progress",
    "Recorder",
    "Standing",
    "StepProfile",
    "agree",
    "all_or_nothing",
    "held_accumulators",
    "interrupts",
    "lower",
    "recorded",
    "report_failure",
    "run",
    "share",
    "step_error",
    "watched",
]
