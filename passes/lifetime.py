"""Plan pass `lifetime`: decide with which instance each value dies.

In:  FusedGraph.
Out: the same graph; each call's `Instance.frees` names the values of its microbatch that die with it, added to what
     an earlier pass put there.

`flow.deaths` has the rule.
"""

from __future__ import annotations

from dataclasses import replace

from fxoverlap.config import OverlapConfig
from fxoverlap.flow import deaths
from fxoverlap.ir import META, FusedGraph


def lifetime(fused: FusedGraph, config: OverlapConfig) -> FusedGraph:
    """Fill in `Instance.frees`."""
    del config
    calls = fused.module.graph.find_nodes(op="call_module")
    order = [call.meta[META] for call in calls]
    for call, dying in zip(calls, deaths(order, fused.plan.chunks), strict=True):
        call.meta[META] = replace(call.meta[META], frees=(*call.meta[META].frees, *dying))
    return replace(fused, plan=replace(fused.plan, order=tuple(call.meta[META] for call in calls)))


lifetime.stage = "plan"  # type: ignore[attr-defined]
