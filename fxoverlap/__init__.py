"""Overlap of expert-parallel communication with compute, derived from the graph of a model."""

from pathlib import Path

import torch

_here = Path(__file__).parent
if not (_here / "passes").exists() and (_here.parent / "passes" / "op_facts.py").exists():
    # In a checkout, subpackages stand beside this package; an install puts them where they are looked for.
    __path__.append(str(_here.parent))

from fxoverlap.versions import check_torch_version  # noqa: E402

# Before anything else of the package is imported: private APIs of another release may not be there.
check_torch_version(torch.__version__)

from fxoverlap.api import OverlappedModel, StepResult, transform  # noqa: E402
from fxoverlap.config import OverlapConfig, Recompute  # noqa: E402
from fxoverlap.errors import (  # noqa: E402
    CaptureError,
    ConfigError,
    FxOverlapError,
    PlanMismatchError,
    StepError,
    StepInterrupted,
    UnsupportedError,
    VerifyError,
)
from fxoverlap.ir import ChunkGraph, CostTable, Plan, ScheduleNode  # noqa: E402
from fxoverlap.microbatch import Microbatch  # noqa: E402
from fxoverlap.report import Report  # noqa: E402
from fxoverlap.schedule import Policy  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "ChunkGraph",
    "ConfigError",
    "CostTable",
    "FxOverlapError",
    "Microbatch",
    "OverlapConfig",
    "OverlappedModel",
    "Plan",
    "PlanMismatchError",
    "Policy",
    "Recompute",
    "Report",
    "ScheduleNode",
    "StepError",
    "StepInterrupted",
    "StepResult",
    "UnsupportedError",
    "VerifyError",
    "transform",
]
