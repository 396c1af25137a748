"""Joint pass `split`: part an op that gives input and weight gradients at once into one op for each.

In:  JointGraph after `partition`.
Out: the same graph, in which every convolution's backward gives either the gradient of its input or those of its
     weights, so that `wgrad` can move the latter. What an op computes for one does not depend on what it computes
     for the other: the bits stay as they are.

Only ops with real work are parted: norms give all their gradients in one read of the data.
"""

from __future__ import annotations

import operator

from torch import fx

from fxoverlap.config import OverlapConfig
from fxoverlap.ir import JointGraph
from fxoverlap.passes.op_facts import aten


def split(joint: JointGraph, config: OverlapConfig) -> JointGraph:
    """Part the backward of convolutions."""
    if not config.delay_wgrad:
        return joint
    graph = joint.module.graph
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        results = {user.args[1]: user for user in node.users}
        weights = [results[i] for i in (1, 2) if i in results]
        if 0 in results and weights:
            _part(node, weights)
    return joint


split.stage = "joint"  # type: ignore[attr-defined]


def _part(node: fx.Node, weights: list[fx.Node]) -> None:
    """Let `node` give the input's gradient only, and a copy of it in front of the first of `weights` the others."""
    *arguments, mask = node.args
    asked = list(mask)  # type: ignore[arg-type]
    gradients = node.meta["val"]
    first = min(weights)
    with node.graph.inserting_before(first):
        copy = node.graph.call_function(node.target, (*arguments, [False, *asked[1:]]))  # type: ignore[arg-type]
    copy.meta = {**node.meta, "val": (None, *gradients[1:])}
    node.args = (*arguments, [asked[0], False, False])
    node.meta["val"] = (gradients[0], None, None)
    for user in weights:
        assert user.target is operator.getitem
        user.replace_input_with(node, copy)
