"""The order of a fused step: policies that choose it, and the check that it is legal."""

from fxoverlap.schedule.pairs import labels_of
from fxoverlap.schedule.plan import Policy, build_pair, build_plan, plan_in_order
from fxoverlap.schedule.rounds import kind_of, rounds_of, rounds_with

__all__ = ["Policy", "build_pair", "build_plan", "kind_of", "labels_of", "plan_in_order", "rounds_of", "rounds_with"]
