"""One capture for models that are alike.

A capture takes most of the time of a small test. Where it is not the subject, models of the same structure can do with
one: files ask for the fixture `shared_captures`, and `TwoRanks` has it always. What is traced, refused or restored
by a capture has to be tested without it.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from typing import Any
from unittest import mock

from torch import fx, nn

from fxoverlap import planner, variants
from fxoverlap.capture import Capture, capture
from fxoverlap.config import OverlapConfig
from fxoverlap.ir import JointGraph
from fxoverlap.microbatch import Microbatch, flatten

MOST = 64
"""Captures that are kept; the one that was used longest ago is the first to go."""

_known: list[tuple[dict[str, Any], Capture]] = []


@contextlib.contextmanager
def shared_captures() -> Iterator[None]:
    """Take the capture of a model that is alike, if there was one in this process, for as long as the block lasts."""
    with mock.patch.object(planner, "capture", shared_capture):
        yield


def shared_capture(model: nn.Module, microbatch: Microbatch, config: OverlapConfig) -> Capture:
    """As `capture`, from a capture of a model that is alike, if there was one in this process."""
    key = _key(model, microbatch, config)
    if key is None:
        return capture(model, microbatch, config)
    for i, (other, known) in enumerate(_known):
        if other == key:
            _known.append(_known.pop(i))
            tensors = {"params": tuple(model.parameters()), "buffers": tuple(model.buffers())}
            return replace(known, joint=_copy(known.joint), **tensors)
    found = capture(model, microbatch, config)
    del _known[:-MOST]
    # Passes change the graph that they are given.
    _known.append((key, replace(found, joint=_copy(found.joint), params=(), buffers=())))
    return found


def _key(model: nn.Module, microbatch: Microbatch, config: OverlapConfig) -> dict[str, Any] | None:
    """What the product compares before it takes a capture again, but for the identity of parameters and buffers.

    Functions and other objects that modules hold have to be the same ones. None if there are tensors among them.
    """
    around = variants.around_key(model)
    if around.tensors:
        return None
    entries = {name: _without_identity(value) for name, value in around.entries.items()}
    for tensors in (model.named_parameters, model.named_buffers):
        firsts = {id(tensor): name for name, tensor in tensors()}
        entries |= {f"first name of {n}": firsts[id(t)] for n, t in tensors(remove_duplicate=False)}
    return entries | {"hooks": config.hooks} | variants.microbatch_key(flatten(microbatch))


def _without_identity(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], variants._Same):
        return value[1:]
    if isinstance(value, variants._Same) and is_dataclass(value.value):
        return value.value
    return value


def _copy(joint: JointGraph) -> JointGraph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's, about how it copies its own graphs
        graph = copy.deepcopy(joint.module.graph)
    for node in graph.nodes:
        if "custom" in node.meta:
            node.meta["custom"] = dict(node.meta["custom"])
    module = fx.GraphModule(joint.module, graph)
    module.meta = dict(joint.module.meta)
    return replace(joint, module=module)
