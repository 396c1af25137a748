"""How many bytes are alive while a step runs, op by op, in the order of issue.

In:  the rounds of a step, whose chunks know what their nodes do to memory (`ChunkGraph.memory`), and how many rows the
     exchanges of each microbatch bring.
Out: a `Point` for each node instance.

What counts is what a step makes, where the runtime keeps it (`runtime.executor`, `runtime.gradients`):
- what ops allocate, from the op on, until the last variable or value on it is gone; views count once. Arguments die in
  a node with their last use there, if no later node reads them;
- what an exchange sends, until the node that waits for it is done;
- results of a node that nothing reads later, until the node is done;
- what a microbatch owns from its begin to its end: copies of buffers that it writes and its backward reads;
- gradients: the first microbatch's become `.grad` and stay, those of others die when they have been added. Parameters
  are taken to have no `.grad` before the step, nor hooks;
- losses and outputs, which the user gets.

What an op allocates and frees inside does not count, nor what was there before the step.

In a synthetic graph every node is one op, and what counts are the values with an entry in `ChunkGraph.buffers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxoverlap import compat
from fxoverlap.flow import deaths, kept_after_forward, read_late
from fxoverlap.ir import (
    ChunkGraph,
    Footprint,
    Gradient,
    InputKind,
    Instance,
    Made,
    Memory,
    Phase,
    Plan,
    Round,
    Rows,
    ScheduleNode,
    runs_forward,
)

USER = ""
"""What holds a storage that the user has been given."""

STATE = "the state"
"""What holds the storages that a microbatch owns until its end."""

Routing = str | Mapping[int, Rows]
"""A key of `Memory.rows` for every microbatch; or the numbers of each one, by its number in the step."""


@dataclass(frozen=True, slots=True)
class Point:
    """Memory while one node instance runs and its gradients are delivered, in bytes.

    Attributes:
        instance: what runs.
        microbatch: number of its microbatch.
        peak: most alive at one time.
        after: alive behind it.
    """

    instance: Instance
    microbatch: int
    peak: int
    after: int


def peak_bytes(rounds: Sequence[Round], routing: Routing = "imbalanced", outputs: bool = True) -> int:
    """Most bytes alive at one time in a step; arguments as in `curve`."""
    return max((point.peak for point in curve(rounds, routing, outputs)), default=0)


def curve(rounds: Sequence[Round], routing: Routing = "imbalanced", outputs: bool = True) -> Iterator[Point]:
    """The memory of a step, or of some of its rounds.

    Args:
        rounds: what runs. Of a microbatch whose forward is not among them, what it has saved is alive at the begin.
        routing: how many rows exchanges bring.
        outputs: whether the user is given what forward returns besides the loss.
    """
    step = _Step(routing)
    dead: dict[int, list[_Deaths]] = {}  # most rounds of a step have the same plan
    for each in rounds:
        plan = each.plan
        if id(plan) not in dead:
            dead[id(plan)] = _deaths(plan)
        states = {mb: step.state(number, plan.chunks[mb], mb) for mb, number in each.microbatches.items()}
        for instance, dying in zip(plan.order, dead[id(plan)], strict=True):
            peak = step.run(states[instance.mb], instance.node, dying)
            yield Point(instance, each.microbatches[instance.mb], peak, step.alive)
        for mb, state in states.items():
            if runs_forward(mb):
                step.collect(state, outputs)
        for mb, state in states.items():
            if not runs_forward(mb):
                step.end(state.number)


def node_bytes(chunk: ChunkGraph) -> dict[str, dict[str, int]]:
    """The fields `passed`, `kept` and `inside` of `NodeCost` by node name, with imbalanced rows."""
    step = _Step("imbalanced")
    state = step.state(0, chunk, "F")
    memory, sizes = state.memory, state.sizes
    sides: dict[str, set[int]] = {}  # of the readers of each storage
    for node in chunk.nodes:
        for value in node.reads:
            if value in memory.storages:
                sides.setdefault(memory.storages[value], set()).add(side_of(node))
    ends = {memory.storages[value] for value in kept_after_forward(chunk) & memory.storages.keys()}
    found = {}
    for node in chunk.nodes:
        own, footprint = side_of(node), memory.footprints[node.name]
        handed_on = {made.storage for made in footprint.made if made.last is None}
        kept = {each for each in handed_on if max(sides.get(each, {own})) > own or (own == 0 and each in ends)}
        passed = {each for each in handed_on - kept if own in sides.get(each, ())}
        inside, _ = step.walk(state, node.name, footprint, {})
        found[node.name] = {
            "passed": sum(sizes[each] for each in passed),
            "kept": sum(sizes[each] for each in kept),
            "inside": inside,
        }
    return found


def side_of(node: ScheduleNode) -> int:
    """0 for the forward, 1 for the backward with what it replays, 2 for weight gradients: who comes later."""
    return {Phase.F: 0, Phase.R: 1, Phase.B: 1, Phase.W: 2}[node.phase]


def rows_that_occurred(memory: Memory, numbers: Mapping[str, int]) -> Rows:
    """The numbers for symbols that values of one microbatch had; balanced ones where no value tells."""
    known = {symbol: numbers[value] for value, symbol in memory.numbers.items() if value in numbers}
    return {**memory.rows["balanced"], **known}


@dataclass(slots=True)
class _State:
    """One microbatch in flight.

    Attributes:
        number: its number in the step.
        chunk: its graph.
        memory: what the nodes of its chunk do to memory.
        sizes: bytes of each storage, with its numbers of rows.
        held: what holds each storage: names of values, `STATE`, `USER`.
        gradients: those that are still to come, by value.
    """

    number: int
    chunk: ChunkGraph
    memory: Memory
    sizes: dict[str, int]
    held: dict[str, set[str]] = field(default_factory=dict)
    gradients: dict[str, list[Gradient]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in self.memory.gradients:
            self.gradients.setdefault(each.value, []).append(each)


@dataclass(frozen=True, slots=True)
class _Deaths:
    """What dies with an instance, by name of the value.

    Attributes:
        reads: of what it reads: inside it, with the last use.
        sent: of what launches have sent that it waits for: behind it.
        writes: of what it writes: behind it.
    """

    reads: tuple[str, ...]
    sent: tuple[str, ...]
    writes: tuple[str, ...]


class _Step:
    """A step under way.

    Attributes:
        alive: bytes.
    """

    def __init__(self, routing: Routing) -> None:
        self.alive = 0
        self._routing = routing
        self._states: dict[int, _State] = {}
        self._have_grad: set[tuple[int | None, str]] = set()
        self._memories: dict[int, Memory] = {}
        self._sizes: dict[tuple[int, int], dict[str, int]] = {}
        # Layers of one microbatch differ, but microbatches with equal rows do the same again.
        self._walked: dict[tuple[int, str, frozenset[str]], tuple[int, int]] = {}

    def state(self, number: int, chunk: ChunkGraph, mb: str) -> _State:
        """The microbatch with a number, which begins unless it is in flight."""
        if number in self._states:
            return self._states[number]
        memory = self._memory_of(chunk)
        state = self._states[number] = _State(number, chunk, memory, self._sizes_of(memory, number))
        for storage in memory.begin:
            self._hold(state, storage, STATE)
        if not runs_forward(mb):
            made = {value for node in chunk.nodes if node.phase is Phase.F for value in node.writes}
            for value in read_late(chunk) & made & memory.storages.keys():
                self._hold(state, memory.storages[value], value)
        return state

    def run(self, state: _State, node: ScheduleNode, dying: _Deaths) -> int:
        """Run a node; the most that is alive meanwhile."""
        memory, held = state.memory, state.held
        footprint, storages = memory.footprints[node.name], memory.storages
        for value in dying.reads:
            held.get(storages.get(value, ""), set()).discard(value)
        reads = [(storages[v], last) for v, last in zip(node.reads, footprint.reads, strict=True) if v in storages]
        ends = {storage: last for storage, last in reads if last is not None and held.get(storage) == set()}
        most, stays = self.walk(state, node.name, footprint, ends)
        peak = self.alive + most
        self.alive += stays
        for storage in ends:
            del held[storage]
        for value in dying.sent:
            self._drop(state, value)
        # All results are held until the gradients among them have been delivered.
        for value in node.writes:
            if value in storages:
                held.setdefault(storages[value], set()).add(value)
        peak = max(peak, self._deliver(state, node, dying.writes))
        for value in dying.writes:
            self._drop(state, value)
        return peak

    def collect(self, state: _State, outputs: bool) -> None:
        """The forward of a microbatch is done: its buffers are written, and the user gets what it returns."""
        joint = state.chunk.joint
        if joint is None:
            return
        late = read_late(state.chunk)
        for value in {value for value, _ in joint.mutations} - late:
            self._drop(state, value)
        self.alive += state.sizes[state.memory.storages[joint.loss]]
        for value in joint.outputs:
            if outputs and value in state.memory.storages:
                state.held.setdefault(state.memory.storages[value], set()).add(USER)
            self._drop(state, value)

    def end(self, number: int) -> None:
        """The backward of a microbatch is done, and its state dies."""
        state = self._states.pop(number)
        self.alive -= sum(state.sizes[storage] for storage, holders in state.held.items() if USER not in holders)

    def _deliver(self, state: _State, node: ScheduleNode, dead: Iterable[str]) -> int:
        """Deliver the gradients among a node's results, of which `dead` are read by no later node; the most alive."""
        due = [each for value in node.writes for each in state.gradients.get(value, ())]
        copies = sum(each.bytes for each in due if each.value not in dead)
        self.alive += copies
        peak = self.alive
        for each in due:
            key = (state.number if each.target.kind is InputKind.LEAF else None, each.target.name)
            if key in self._have_grad:
                continue
            self._have_grad.add(key)
            holders = state.held[state.memory.storages[each.value]]
            if each.value not in dead and each.fits:
                copies -= each.bytes
            elif each.fits and len(holders) == 1:
                holders.add(USER)
            else:
                self.alive += each.bytes
            peak = max(peak, self.alive)
        self.alive -= copies
        return peak

    def walk(self, state: _State, name: str, footprint: Footprint, ends: Mapping[str, int]) -> tuple[int, int]:
        """(most bytes beside those alive before, bytes that it leaves more) of a node in which arguments die.

        Args:
            state: whose sizes count.
            name: of the node.
            footprint: of the node.
            ends: position of the last use, by storage that dies.
        """
        key = (id(state.sizes), name, frozenset(ends))
        if key not in self._walked:
            changes = [(last, 1, -state.sizes[storage]) for storage, last in ends.items()]
            for made in footprint.made:
                changes.append((made.first, 0, state.sizes[made.storage]))
                if made.last is not None:
                    changes.append((made.last, 1, -state.sizes[made.storage]))
            most = alive = 0
            for _, _, change in sorted(changes):
                alive += change
                most = max(most, alive)
            self._walked[key] = most, alive
        return self._walked[key]

    def _hold(self, state: _State, storage: str, holder: str) -> None:
        """Let a storage that is not there yet, or is, have one more holder."""
        if storage not in state.held:
            self.alive += state.sizes[storage]
        state.held.setdefault(storage, set()).add(holder)

    def _drop(self, state: _State, value: str) -> None:
        """Let a value go, and its storage if nothing else holds that."""
        storage = state.memory.storages.get(value)
        holders = state.held.get(storage) if storage is not None else None
        if storage is None or holders is None:
            return
        holders.discard(value)
        if not holders:
            self.alive -= state.sizes[storage]
            del state.held[storage]

    def _memory_of(self, chunk: ChunkGraph) -> Memory:
        if chunk.memory is not None:
            return chunk.memory
        if id(chunk) not in self._memories:
            self._memories[id(chunk)] = _of_buffers(chunk)
        return self._memories[id(chunk)]

    def _sizes_of(self, memory: Memory, number: int) -> dict[str, int]:
        """Bytes by storage, with the numbers of rows of a microbatch."""
        rows = memory.rows.get(self._routing, {}) if isinstance(self._routing, str) else self._routing[number]
        key = (id(memory), id(rows))
        if key not in self._sizes:
            known: dict[Any, int] = {}
            for size in memory.sizes.values():
                if size not in known:
                    known[size] = compat.evaluate(size, rows)
            self._sizes[key] = {storage: known[size] for storage, size in memory.sizes.items()}
        return self._sizes[key]


def _deaths(plan: Plan) -> list[_Deaths]:
    """For each instance of a plan, what dies with it."""
    found = []
    for instance, dying in zip(plan.order, deaths(plan.order, plan.chunks), strict=True):
        reads, writes = set(instance.node.reads), set(instance.node.writes)
        found.append(
            _Deaths(
                tuple(value for value in dying if value in reads),
                tuple(value for value in dying if value not in reads | writes),
                tuple(value for value in dying if value in writes),
            )
        )
    return found


def _of_buffers(chunk: ChunkGraph) -> Memory:
    """The memory of a synthetic graph, in which a node is one op."""
    footprints: dict[str, Footprint] = {}
    known: set[str] = set()
    for node in chunk.nodes:
        made = dict.fromkeys(chunk.buffers[value][0] for value in node.writes if value in chunk.buffers)
        new = tuple(Made(storage, 0, None) for storage in made if storage not in known)
        footprints[node.name] = Footprint(new, (0,) * len(node.reads))
        known |= made.keys()
    storages = {value: storage for value, (storage, _) in chunk.buffers.items()}
    return Memory(footprints, storages, dict(chunk.buffers.values()), (), (), {}, {})
