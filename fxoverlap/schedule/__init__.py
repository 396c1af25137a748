"""The order of a fused step: policies that choose it, and the check that it is legal."""

from fxoverlap.schedule.plan import Policy, build_plan

__all__ = ["Policy", "build_plan"]
