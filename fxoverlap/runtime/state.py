"""All that one microbatch has between its first F and its last W: one object, which dies when they are done.

A `Layout` numbers the values of a chunk graph; a `MicrobatchState` holds one entry a value. Nothing else in the
runtime keeps a tensor of a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxoverlap import compat
from fxoverlap.errors import StepError
from fxoverlap.flow import kept_after_forward, read_late
from fxoverlap.ir import ChunkGraph, GraphInput, InputKind


@dataclass(frozen=True, slots=True)
class Layout:
    """Numbers for the values of a chunk graph.

    Attributes:
        index: value -> position in `MicrobatchState.values`.
        bound: (position, input) for each graph input that some node reads.
        snapshots: positions of the buffers that F writes and B or W reads: they are cloned when a microbatch begins.
        loss: position of the loss.
        outputs: positions of the other outputs.
        mutations: (position of the new value, index of the buffer), in trace order.
        needed_late: positions of new values that B or W reads.
        gradients: (value, parameter or leaf input).
    """

    index: dict[str, int]
    bound: tuple[tuple[int, GraphInput], ...]
    snapshots: frozenset[int]
    loss: int
    outputs: tuple[int, ...]
    mutations: tuple[tuple[int, int], ...]
    needed_late: frozenset[int]
    gradients: tuple[tuple[str, GraphInput], ...]

    @staticmethod
    def of(chunk: ChunkGraph) -> Layout:
        """The layout of a captured chunk graph."""
        joint = chunk.joint
        assert joint is not None
        inputs = {each.value: each for each in joint.inputs}
        values = dict.fromkeys([*inputs, *(value for node in chunk.nodes for value in node.writes)])
        index = {value: i for i, value in enumerate(values)}
        read = {value for node in chunk.nodes for value in node.reads}
        late, kept = read_late(chunk), kept_after_forward(chunk)
        return Layout(
            index=index,
            bound=tuple((index[value], each) for value, each in inputs.items() if value in read | kept),
            snapshots=frozenset(index[target] for _, target in joint.mutations if target in late),
            loss=index[joint.loss],
            outputs=tuple(index[value] for value in joint.outputs),
            mutations=tuple((index[value], inputs[target].index) for value, target in joint.mutations),
            needed_late=frozenset(index[value] for value, _ in joint.mutations if value in late),
            gradients=tuple((value, inputs[target]) for value, target in joint.gradients),
        )


@dataclass(slots=True)
class MicrobatchState:
    """One microbatch in flight.

    Attributes:
        number: its position in the step.
        layout: how `values` is numbered.
        values: one entry a value; None where it is not alive.
        params: the parameters, by `GraphInput.index`.
        buffers: the buffers, likewise.
        leaves: the tensors of the microbatch, likewise.
        versions: of each parameter, how often it had been written to when the forward began.
        held: what `held_accumulators` found of parameters and leaves.
    """

    number: int
    layout: Layout
    values: list[Any]
    params: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    leaves: Sequence[torch.Tensor]
    versions: tuple[int, ...]
    held: frozenset[int]

    @staticmethod
    def begin(
        number: int,
        layout: Layout,
        params: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        constants: dict[str, torch.Tensor],
        tangent: torch.Tensor,
        held: frozenset[int],
    ) -> MicrobatchState:
        """Bind the graph's inputs."""
        versions = tuple(map(compat.times_written, params))
        state = MicrobatchState(number, layout, [None] * len(layout.index), params, buffers, leaves, versions, held)
        for position, each in layout.bound:
            if each.kind is InputKind.PARAM:
                value = params[each.index]
            elif each.kind is InputKind.BUFFER:
                value = buffers[each.index]
            elif each.kind is InputKind.LEAF:
                value = leaves[each.index]
            elif each.kind is InputKind.CONSTANT:
                value = constants[each.name]
            else:
                value = tangent
            state.values[position] = value.clone() if position in layout.snapshots else value
        return state

    def check_parameters(self) -> None:
        """Raise StepError if a parameter was written to since the forward: the gradients would be of neither value."""
        for _, each in self.layout.bound:
            if each.kind is not InputKind.PARAM:
                continue
            if compat.times_written(self.params[each.index]) != self.versions[each.index]:
                raise StepError(
                    f"Parameter {each.name} was changed between the forward and the backward of microbatch "
                    f"{self.number}, expected no change within a step. Run the optimizer after step(), not in a hook."
                )

    def target(self, kind: InputKind, index: int) -> torch.Tensor:
        """The leaf tensor that a gradient belongs to."""
        return self.params[index] if kind is InputKind.PARAM else self.leaves[index]

    def commit(self) -> None:
        """Write the new values of mutated buffers: once, at the end of F."""
        for position, buffer in self.layout.mutations:
            self.buffers[buffer].copy_(self.values[position])
            if position not in self.layout.needed_late:
                self.values[position] = None
