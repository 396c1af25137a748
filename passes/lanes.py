"""Plan pass `lanes`: put an event where one lane reads what another lane made.

In:  FusedGraph.
Out: the same graph with `record_event` after a producer and `wait_event` before its reader, for each cross-lane edge
     that program order and earlier events do not already cover.

The result of a launch needs no event: its reader begins with the launch's own wait op.
"""

from __future__ import annotations

from torch import fx

from fxoverlap.config import OverlapConfig
from fxoverlap.ir import META, FusedGraph, Instance, Lane
from fxoverlap.ops.events import record_event, wait_event


def lanes(fused: FusedGraph, config: OverlapConfig) -> FusedGraph:
    """Insert event nodes."""
    del config
    graph = fused.module.graph
    calls = [node for node in graph.nodes if node.op == "call_module"]
    position = {call: i for i, call in enumerate(calls)}
    # For each lane, how far it has waited for each other lane, as a position in plan order.
    waited: dict[tuple[Lane, Lane], int] = {}
    events: dict[fx.Node, int] = {}
    for call in calls:
        lane = _instance(call).node.lane
        for source in _sources_on_other_lanes(call, lane):
            other = _instance(source).node.lane
            if waited.get((lane, other), -1) >= position[source]:
                continue
            waited[(lane, other)] = position[source]
            if source not in events:
                events[source] = len(events)
                with graph.inserting_after(_last_value_of(source)):
                    graph.call_function(record_event, (events[source], other.value))
            with graph.inserting_before(call):
                graph.call_function(wait_event, (events[source], lane.value))
    fused.module.recompile()
    return fused


lanes.stage = "plan"  # type: ignore[attr-defined]


def _instance(call: fx.Node) -> Instance:
    found = call.meta[META]
    assert isinstance(found, Instance), call
    return found


def _sources_on_other_lanes(call: fx.Node, lane: Lane) -> list[fx.Node]:
    """The calls whose values this one reads from another lane, other than launches."""
    sources = {value.args[0] for value in call.all_input_nodes if value.op != "placeholder"}
    found = [s for s in sources if isinstance(s, fx.Node) and _instance(s).node.lane not in (lane, Lane.COMM)]
    return sorted(found)


def _last_value_of(call: fx.Node) -> fx.Node:
    """The last getitem of a call, or the call."""
    return max([call, *call.users])
