"""Plan pass `verify`: prove that a fused graph may run as it stands. Always the last pass.

In:  FusedGraph.
Out: the same graph, or VerifyError.

The graph is walked once in issue order, op by op, on symbolic storages. A launch puts its input and its result in
flight until the wait; everything else is checked against that. Who reads what and until when, which other passes take
from `flow`, is found anew here, so that a mistake there is seen. Rules, each with the words of its error:

- `wrong microbatch`: a node reads values of its own microbatch only; F nodes run for "F", B, W and R nodes for "B".
- `doubled`, `missing node`: every node of the plan's phases runs exactly once.
- `missing wait`, `dead collective`: every launch is waited for; every launch has a reader.
- `read before wait`: nothing reads the result of a launch before its wait; it is waited for once.
- `no event`: what one lane made and another reads is ordered by an event, or arrived through a wait.
- `freed in flight`: the last reference to a storage, under whatever alias, is not dropped while a launch uses it.
- `read after free`: what was freed is not read, nor handed on behind the forward.
- `written in flight`: no op writes to a storage that a launch uses.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxoverlap.config import OverlapConfig
from fxoverlap.errors import VerifyError
from fxoverlap.ir import META, FusedGraph, Instance, Lane, ValueRef, nodes_of, runs_forward
from fxoverlap.ops.events import record_event, wait_event
from fxoverlap.passes import op_facts


def verify(fused: FusedGraph, config: OverlapConfig) -> FusedGraph:
    """Check every rule. Raises VerifyError."""
    del config
    _check_node_set(fused)
    walk = _Walk()
    for node in fused.module.graph.nodes:
        if node.op == "placeholder":
            walk.enter(node.meta[META])
        elif node.op == "call_module":
            module = fused.module.get_submodule(str(node.target))
            assert isinstance(module, fx.GraphModule), node
            walk.call(node, module)
        elif node.target is record_event:
            walk.record(*node.args)
        elif node.target is wait_event:
            walk.wait_event(*node.args)
        elif node.op == "output":
            walk.hand_on([value.meta[META] for value in node.all_input_nodes])
    walk.finish()
    return fused


verify.stage = "plan"  # type: ignore[attr-defined]


def _check_node_set(fused: FusedGraph) -> None:
    calls = [node.meta[META] for node in fused.module.graph.nodes if node.op == "call_module"]
    found = Counter((instance.node.name, instance.mb) for instance in calls)
    expected: set[tuple[str, str]] = set()
    for mb, chunk in fused.plan.chunks.items():
        expected |= {(node.name, mb) for node in nodes_of(mb, chunk)}
    for (name, mb), count in found.items():
        if (name, mb) not in expected:
            raise VerifyError(f"wrong microbatch: {name} runs for microbatch {mb}, to which it does not belong.")
        if count > 1:
            raise VerifyError(f"doubled: {name} runs {count} times for microbatch {mb}, expected once.")
    missing = sorted(expected - set(found))
    if missing:
        raise VerifyError(f"missing node: {missing[0][0]} does not run for microbatch {missing[0][1]}.")


@dataclass(slots=True)
class _Storage:
    """A symbolic buffer.

    Attributes:
        made_by: index of the instance that allocated it, -1 before the step.
        lane: the lane of that instance.
        launches: names of the launches in flight that use it.
        references: the values through which it is held.
        permanent: it outlives the step whatever is freed.
    """

    made_by: int
    lane: Lane | None
    launches: set[str] = field(default_factory=set)
    references: set[ValueRef] = field(default_factory=set)
    permanent: bool = False


@dataclass(slots=True)
class _Launch:
    name: str
    result: _Storage
    uses: list[_Storage]
    has_reader: bool


class _Walk:
    """The state of the walk through a fused graph."""

    def __init__(self) -> None:
        self.values: dict[ValueRef, _Storage] = {}
        self.freed: set[ValueRef] = set()
        self.in_flight: dict[int, _Launch] = {}
        self.position = -1
        # For each lane, the instances of other lanes that it is known to run after.
        self.seen: dict[Lane, set[int]] = {lane: set() for lane in Lane}
        self.ran: dict[Lane, set[int]] = {lane: set() for lane in Lane}
        self.events: dict[int, set[int]] = {}

    def enter(self, ref: ValueRef) -> None:
        self.values[ref] = _Storage(-1, None, references={ref})

    def record(self, event: int, lane: str) -> None:
        self.events[event] = self.ran[Lane(lane)] | self.seen[Lane(lane)]

    def wait_event(self, event: int, lane: str) -> None:
        if event not in self.events:
            raise VerifyError(f"no event: lane {lane} waits for event {event}, which is not recorded before.")
        self.seen[Lane(lane)] |= self.events[event]

    def call(self, call: fx.Node, module: fx.GraphModule) -> None:
        self.position += 1
        instance: Instance = call.meta[META]
        given: Any = call.args[0]
        refs = [self._argument(argument, instance) for argument in given]
        results = self._run(module.graph, [self.values[ref] for ref in refs], refs, instance, call)
        for result in call.users:
            position = result.args[1] if result.target is operator.getitem else None
            if isinstance(position, int):
                ref = result.meta[META]
                self.values[ref] = results[position]
                results[position].references.add(ref)
        self.ran[instance.node.lane].add(self.position)
        for value in instance.frees:
            self._free(ValueRef(instance.mb, value), instance)

    def hand_on(self, refs: list[ValueRef]) -> None:
        """What is read when the step is over must be alive; gradients have been delivered by then."""
        for ref in refs:
            if runs_forward(ref.mb) and ref in self.freed:
                raise VerifyError(
                    f"read after free: {ref.value!r} is handed on behind the forward, but an earlier node freed it."
                )

    def finish(self) -> None:
        for launch in self.in_flight.values():
            if launch.has_reader:
                raise VerifyError(f"missing wait: {launch.name} is launched, but its result is never waited for.")
            raise VerifyError(f"dead collective: {launch.name} is launched, but nothing reads its result.")

    def _argument(self, argument: object, instance: Instance) -> ValueRef:
        assert isinstance(argument, fx.Node)
        ref: ValueRef = argument.meta[META]
        name = instance.node.name
        if ref.mb != instance.mb:
            raise VerifyError(
                f"wrong microbatch: {name} runs for microbatch {instance.mb}, but reads {ref.value!r} of "
                f"microbatch {ref.mb}."
            )
        if ref in self.freed:
            raise VerifyError(f"read after free: {name} reads {ref.value!r}, which an earlier node freed.")
        return ref

    def _run(
        self,
        graph: fx.Graph,
        arguments: list[_Storage],
        refs: list[ValueRef],
        instance: Instance,
        call: fx.Node,
    ) -> list[_Storage]:
        """Walk the ops of one instance; return the storages of its results."""
        env: dict[fx.Node, _Storage] = {}
        name, lane = instance.node.name, instance.node.lane
        given = iter(zip(arguments, refs, strict=True))
        results: list[_Storage] = []
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node], ref = next(given)
                self._check_order(env[node], ref, instance)
            elif node.op == "output":
                results = [env[value] for value in node.args[0]]
            elif op_facts.is_wait(node):
                env[node] = self._wait(env[node.args[0]], name)
            else:
                inputs = [env[source] for source in node.all_input_nodes]
                self._check_arrived(inputs, name)
                self._check_writes(node, env, name)
                base = op_facts.view_base(node)
                env[node] = env[base] if base is not None else _Storage(self.position, lane)
                if op_facts.is_launch(node):
                    self._launch(env[node], inputs, instance, call)
        return results

    def _check_order(self, storage: _Storage, ref: ValueRef, instance: Instance) -> None:
        """A value of another lane must be ordered by an event, unless it is a launch's result, which a wait orders."""
        lane = instance.node.lane
        if storage.made_by < 0 or storage.lane in (lane, None) or storage.lane is Lane.COMM:
            return
        if storage.made_by not in self.seen[lane]:
            raise VerifyError(
                f"no event: {instance.node.name} on lane {lane.value} reads {ref.value!r}, made on lane "
                f"{storage.lane.value if storage.lane else None}, and no event orders the two."
            )

    def _launch(self, result: _Storage, inputs: list[_Storage], instance: Instance, call: fx.Node) -> None:
        name = f"{instance.node.name} (microbatch {instance.mb})"
        has_reader = any(value.users for value in call.users)
        uses = [result, *inputs]
        for storage in uses:
            storage.launches.add(name)
        self.in_flight[id(result)] = _Launch(name, result, uses, has_reader)

    def _wait(self, storage: _Storage, name: str) -> _Storage:
        launch = self.in_flight.pop(id(storage), None)
        if launch is not None:
            for each in launch.uses:
                each.launches.discard(launch.name)
        elif storage.lane is Lane.COMM:
            raise VerifyError(f"read before wait: {name} waits for a result that was waited for before.")
        return storage

    def _check_arrived(self, inputs: list[_Storage], name: str) -> None:
        for storage in inputs:
            if id(storage) in self.in_flight:
                launch = self.in_flight[id(storage)].name
                raise VerifyError(f"read before wait: {name} reads the result of {launch} before it is waited for.")

    def _check_writes(self, node: fx.Node, env: dict[fx.Node, _Storage], name: str) -> None:
        schema = op_facts.schema(node)
        if schema is None or not schema.is_mutable:
            return
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            for target in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(target, fx.Node) and env[target].launches:
                    user = sorted(env[target].launches)[0]
                    raise VerifyError(f"written in flight: {name} writes to a buffer that {user} still uses.")

    def _free(self, ref: ValueRef, instance: Instance) -> None:
        storage = self.values.get(ref)
        if storage is None:
            raise VerifyError(f"read after free: {instance.node.name} frees {ref.value!r}, which nothing made.")
        if ref in self.freed:
            raise VerifyError(f"read after free: {instance.node.name} frees {ref.value!r} a second time.")
        self.freed.add(ref)
        storage.references.discard(ref)
        if not storage.references and id(storage) in self.in_flight:
            launch = self.in_flight[id(storage)].name
            raise VerifyError(
                f"missing wait: {launch} is launched, but {ref.value!r} is freed before it is waited for."
            )
        if not storage.references and storage.launches:
            launch = sorted(storage.launches)[0]
            raise VerifyError(
                f"freed in flight: {instance.node.name} frees {ref.value!r}, the last reference to a buffer that "
                f"{launch} on lane comm still uses."
            )
