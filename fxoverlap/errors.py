"""Every error that fxoverlap raises on purpose.

All derive from `FxOverlapError`. A message names the subject, what was expected, what was found, and the remedy.
"""


class FxOverlapError(Exception):
    """Base of all errors that fxoverlap raises on purpose."""


class ConfigError(FxOverlapError, ValueError):
    """A field of a config, or an argument, has a value that is not allowed."""


class CaptureError(FxOverlapError):
    """The model could not be traced. Names the module FQN or operator, and the remedy."""


class UnsupportedError(FxOverlapError):
    """The model was traced, but cannot be scheduled. Names the FQN, the reason and the remedy."""


class PlanMismatchError(FxOverlapError):
    """Ranks disagree on the plan or on the number of microbatches. Names the rank and the first difference."""


class StepError(FxOverlapError):
    """A schedule node failed while a step ran. Names node, phase and microbatch; `__cause__` is the original error."""


class StepInterrupted(StepError, KeyboardInterrupt):
    """Ctrl-C came while a step ran: a StepError, and a KeyboardInterrupt to whoever waits for one."""


class VerifyError(FxOverlapError):
    """A fused graph breaks a rule that every fused graph must keep. Names the rule, the node and the value."""
