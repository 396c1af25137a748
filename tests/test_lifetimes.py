"""What a step makes is dead when the step is over, and dies no later and no earlier than it must while it runs.

Storages are watched, not tensors: a view that outlives its base keeps the memory. The garbage collector is off while
a step runs, so that nothing counts as dead that only a collection would free.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import RawModel, RawMoE, batches, differences, eager_step, toy

import fxoverlap as fxo
from fxoverlap import api
from fxoverlap.ir import Lane
from fxoverlap.passes import op_facts
from fxoverlap.runtime import executor
from fxoverlap.runtime.program import Operation
from fxoverlap.runtime.state import MicrobatchState

pytestmark = pytest.mark.usefixtures("shared_captures")

Issue = Callable[[Operation, MicrobatchState], None]


def tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def storage(tensor: Tensor) -> int:
    """What identifies the storage of a tensor; comparable with `StorageWeakRef.cdata` while either is alive."""
    return tensor.untyped_storage()._cdata


class Made(TorchDispatchMode):
    """Weak references to the storages that ops made or returned while the mode was on, by microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.microbatch: int | None = None
        self.made: list[tuple[int | None, str, StorageWeakRef]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.made += [(self.microbatch, str(func), StorageWeakRef(t.untyped_storage())) for t in tensors(result)]
        return result

    def alive(self, besides: Iterable[Tensor], until: int | None = None) -> list[str]:
        """What is alive of microbatches up to `until` (None: of all, and of what belongs to none)."""
        known = {storage(tensor) for tensor in besides}
        return [
            f"{name} of microbatch {microbatch}"
            for microbatch, name, ref in self.made
            if not ref.expired()
            and ref.cdata not in known
            and (until is None or (microbatch is not None and microbatch <= until))
        ]


@contextmanager
def uncollected() -> Iterator[None]:
    """A block in which the garbage collector does not run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def around_each_node(watch: Callable[[Issue, Operation, MicrobatchState], None]) -> Iterator[None]:
    """Have `watch` called for every node instance that runs in the block; it must call the first argument."""
    issue = executor._issue
    with patch.object(executor, "_issue", lambda operation, state: watch(issue, operation, state)):
        yield


def owned(model: nn.Module) -> list[Tensor]:
    """What belongs to the user: parameters, their gradients, buffers."""
    params = list(model.parameters())
    return [*params, *(p.grad for p in params if p.grad is not None), *model.buffers()]


@pytest.fixture(scope="module")
def overlapped(group: dist.ProcessGroup) -> fxo.OverlappedModel:
    model = toy("*-[*E][*E]", group, shared_dim=8, dropout=0.1, tied=True, selection_bias=True)
    return fxo.transform(model, example_inputs=batches(1)[0])


@pytest.fixture(scope="module")
def raw(group: dist.ProcessGroup) -> fxo.OverlappedModel:
    return fxo.transform(RawModel(group), example_inputs=batches(1)[0])


@pytest.mark.parametrize("name", ["overlapped", "raw"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_everything_is_dead_after_the_step(name: str, count: int, request: pytest.FixtureRequest) -> None:
    overlapped = request.getfixturevalue(name)
    given = batches(count)
    with uncollected(), Made() as made:
        result = overlapped.step(given, outputs=False)
    assert len(made.made) > 100
    assert result.outputs == [None] * count
    assert made.alive([*owned(overlapped.module), *tensors(given), *result.losses]) == []


def test_everything_the_runtime_stored_is_dead_after_the_step(overlapped: fxo.OverlappedModel) -> None:
    stored: list[tuple[str, StorageWeakRef]] = []

    def watch(issue: Issue, operation: Operation, state: MicrobatchState) -> None:
        issue(operation, state)
        refs = [StorageWeakRef(t.untyped_storage()) for t in tensors(state.values)]
        stored.extend((operation.instance.node.name, ref) for ref in refs)

    given = batches(3)
    with uncollected(), around_each_node(watch):
        overlapped.step(given, outputs=False)
    known = {storage(tensor) for tensor in (*owned(overlapped.module), *tensors(given))}
    assert len({ref.cdata for _, ref in stored}) > 50
    assert [name for name, ref in stored if not ref.expired() and ref.cdata not in known] == []


@pytest.mark.parametrize("name", ["overlapped", "raw"])
def test_a_microbatch_is_dead_before_the_next_but_one_begins(name: str, request: pytest.FixtureRequest) -> None:
    overlapped = request.getfixturevalue(name)
    given = batches(4)
    run, late = api.run, []

    def watched_run(program: Any, states: dict[str, MicrobatchState], *how: Any) -> None:
        number = states["F"].number if "F" in states else len(given)
        late.extend(made.alive([*owned(overlapped.module), *tensors(given)], until=number - 2))
        run(program, states, *how)

    def watch(issue: Issue, operation: Operation, state: MicrobatchState) -> None:
        made.microbatch = state.number
        issue(operation, state)
        made.microbatch = None

    with uncollected(), Made() as made, around_each_node(watch), patch.object(api, "run", watched_run):
        overlapped.step(given, outputs=False)
    assert {microbatch for microbatch, _, _ in made.made} == {None, 0, 1, 2, 3}
    assert late == []


class WithOutputs(nn.Module):
    """A model that hands out its input, views of it, a parameter, a buffer, and something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple:
        self.seen.add_(x.detach().sum(0))
        y = self.linear(x)
        return y.square().mean(), {"x": x, "view": x.t(), "weight": self.linear.weight, "seen": self.seen, "y": y[0]}


def test_outputs_are_all_that_is_left() -> None:
    overlapped = fxo.transform(WithOutputs())
    given = [(torch.randn(3, 4),) for _ in range(3)]
    overlapped.step(given)
    with uncollected(), Made() as made:
        result = overlapped.step(given)
    outputs = tensors(result.outputs)
    assert len(outputs) == 15 and not any(output.requires_grad for output in outputs)
    assert made.alive([*owned(overlapped.module), *tensors(given), *result.losses, *outputs]) == []
    user = {storage(tensor) for tensor in (*owned(overlapped.module), *tensors(given))}
    assert len(user & {storage(output) for output in outputs}) == 0
    # No output keeps more memory than it shows.
    assert [output.untyped_storage().nbytes() for output in outputs[4::5]] == [16] * 3


def live() -> tuple[int, int]:
    """Number of live tensors, and bytes of their storages."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    storages = {storage(each): each.untyped_storage().nbytes() for each in found if each.layout is torch.strided}
    return len(found), sum(storages.values())


def test_b18_as_many_live_tensors_after_step_5_as_after_step_2(overlapped: fxo.OverlappedModel) -> None:
    found = {}
    for step in range(1, 6):
        overlapped.step(batches(3, seed=step), outputs=False)
        if step in (2, 5):
            found[step] = live()
    assert found[5] == found[2]


# --- while the step runs -------------------------------------------------------------------------------------------


class Inside(TorchDispatchMode):
    """For each op that runs, which of the watched storages are alive right before it."""

    def __init__(self, refs: Iterable[StorageWeakRef]) -> None:
        super().__init__()
        self.refs = list(refs)
        self.before: list[set[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.before.append({ref.cdata for ref in self.refs if not ref.expired()})
        return func(*args, **kwargs or {})


def last_uses(operation: Operation, state: MicrobatchState, graph: fx.Graph) -> dict[int, int]:
    """The storages that die with a node -> the number of the op in the node that uses it last, not the last op.

    Storages that a result may alias are left out, and those that something else than the dying values holds.
    """
    arguments = dict(zip(graph.find_nodes(op="placeholder"), operation.reads, strict=True))
    found: dict[int, int] = {}
    dying = {state.layout.index[value] for value in operation.instance.frees} & set(operation.reads)
    kept = {storage(t) for i, t in enumerate(state.values) if isinstance(t, Tensor) and i not in dying}
    number = 0
    for node in graph.nodes:
        for root in {op_facts.storage_root(source) for source in node.all_input_nodes} & set(arguments):
            value = state.values[arguments[root]]
            if isinstance(value, Tensor):
                found[storage(value)] = number
        number += node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    return {key: use for key, use in found.items() if key not in kept and use + 1 < number}


def test_arguments_die_in_the_node_with_their_last_use(overlapped: fxo.OverlappedModel) -> None:
    late: list[str] = []
    watched = 0
    modules = overlapped._planner.latest()[0].chunk.modules

    def watch(issue: Issue, operation: Operation, state: MicrobatchState) -> None:
        nonlocal watched
        uses = last_uses(operation, state, modules[operation.instance.node.name].graph)
        refs = {storage(t): StorageWeakRef(t.untyped_storage()) for t in tensors(state.values) if storage(t) in uses}
        with Inside(refs.values()) as inside:
            issue(operation, state)
        late.extend(str(operation.instance) for key, use in uses.items() if key in inside.before[use + 1])
        watched += len(uses)

    given = batches(3)
    with uncollected(), around_each_node(watch):
        overlapped.step(given, outputs=False)
    assert late == []
    assert watched > 100


class AtWaits(TorchDispatchMode):
    """Calls a function right before each wait for a collective."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self.function = function

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is op_facts.WAIT:
            self.function()
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["overlapped", "raw"])
def test_the_input_of_a_launch_lives_until_its_wait(name: str, request: pytest.FixtureRequest) -> None:
    """What the state holds counts: on a CPU the process group holds the input too, elsewhere it need not."""
    overlapped = request.getfixturevalue(name)
    in_flight: dict[tuple[int, int], tuple[str, list[int]]] = {}
    waited = 0
    dropped: list[str] = []

    def watch(issue: Issue, operation: Operation, state: MicrobatchState) -> None:
        nonlocal waited
        arrivals = [in_flight.pop((state.number, i)) for i in operation.reads if (state.number, i) in in_flight]
        waited += len(arrivals)

        def look() -> None:
            # What the node reads itself is held by the node.
            dropped.extend(
                launch
                for launch, inputs in arrivals
                for i in inputs
                if state.values[i] is None and i not in operation.reads
            )

        inputs = [i for i in operation.reads if isinstance(state.values[i], Tensor)]
        look()
        with AtWaits(look):
            issue(operation, state)
        if operation.instance.node.lane is Lane.COMM:
            results = [i for i in operation.writes if i is not None]
            in_flight.update({(state.number, i): (str(operation.instance), inputs) for i in results})

    with around_each_node(watch):
        overlapped.step(batches(3), outputs=False)
    launches = sum(len(i.node.ops) for i in overlapped.plan("FB").order if i.node.lane is Lane.COMM)
    assert waited == 3 * launches
    assert in_flight == {} and dropped == []


# --- gradients -----------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """Parameters whose gradients are one tensor, a transposed one, an expanded one, and a sum of several uses."""

    def __init__(self) -> None:
        super().__init__()
        names = ("x", "y", "turned", "expanded", "twice")
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.randn(4, 4)) for name in names})

    def forward(self, c: Tensor) -> tuple:
        w = self.weights
        hidden = w["x"] + w["y"] + w["turned"].t() + c
        loss = (hidden.sin() * w["twice"]).sum() + w["expanded"].sum() + w["twice"].view(-1).sum()
        return loss, hidden, w["x"], c


class Shift(nn.Module):
    """A MoE block that adds a parameter of the hidden state's shape: its gradient goes on to the layers before."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.moe = RawMoE(16, 4, group)
        self.shift = nn.Parameter(torch.randn(1, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x) + self.shift


def shifted(group: dist.ProcessGroup) -> nn.Module:
    model = RawModel(group)
    model.layers = nn.ModuleList(Shift(group) for _ in range(2))
    return model


def leaf(seed: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_a_gradient_shares_its_storage_with_nothing() -> None:
    overlapped, given = fxo.transform(Sums()), [(leaf(0),)]
    result = overlapped.step(given)
    params = dict(overlapped.module.named_parameters()) | {"leaf": given[0][0]}
    others = [*params.values(), *tensors(result.outputs), *result.losses]
    seen = {storage(tensor): "something else" for tensor in others}
    shared = []
    for name, param in params.items():
        if storage(param.grad) in seen:
            shared.append(f"{name} with {seen[storage(param.grad)]}")
        seen[storage(param.grad)] = name
        assert param.grad.untyped_storage().nbytes() == 64
    assert shared == []


def test_a_change_of_one_gradient_changes_no_other() -> None:
    overlapped = fxo.transform(Sums())
    overlapped.step([(leaf(0),)])
    x, y = (overlapped.module.weights[name].grad for name in ("x", "y"))
    before = y.clone()
    x.mul_(2)
    assert torch.equal(y, before) and torch.equal(x, 2 * before)


@pytest.mark.parametrize("count", [1, 3])
def test_parameters_with_equal_gradients_accumulate_like_eager(count: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        eager, overlapped = Sums(), fxo.transform(Sums())
    eager.load_state_dict(overlapped.module.state_dict())
    ours, theirs = ([(leaf(i),) for i in range(count)] for _ in range(2))
    for _ in range(2):
        eager_step(eager, theirs)
        overlapped.step(ours)
    assert differences(eager, overlapped.module) == []
    assert all(torch.equal(a.grad, b.grad) for (a,), (b,) in zip(ours, theirs, strict=True))


def test_no_gradient_is_a_value_that_is_still_needed(group: dist.ProcessGroup) -> None:
    overlapped = fxo.transform(shifted(group), example_inputs=batches(1)[0])
    aliased = []

    def watch(issue: Issue, operation: Operation, state: MicrobatchState) -> None:
        issue(operation, state)
        gradients = {storage(p.grad) for p in overlapped.module.parameters() if p.grad is not None}
        if gradients & {storage(tensor) for tensor in tensors(state.values)}:
            aliased.append(str(operation.instance))

    with around_each_node(watch):
        overlapped.step(batches(2))
    assert aliased == []
