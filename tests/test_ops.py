"""The custom ops against plain formulations, alone, on one rank, on two ranks, and in a traced graph."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from two_ranks import TwoRanks

from fxoverlap import compat, ops

torch.set_num_threads(1)

ROWS = [[2, 0, 3], [0, 0, 0], [1, 4, 2], [0, 7, 0]]


def dense_grouped_mm(x: Tensor, w: Tensor, group_rows: Tensor) -> Tensor:
    """Every row times every matrix, and the right product picked; padding rows are zero."""
    padding = torch.tensor([len(x) - int(group_rows.sum())])
    groups = torch.cat((group_rows, padding))
    expert = torch.repeat_interleave(torch.arange(len(groups)), groups)
    every = torch.cat((w, torch.zeros_like(w[:1])))
    return torch.einsum("nk,ekm,ne->nm", x, every, nn.functional.one_hot(expert, len(groups)).to(x.dtype))


def operands(rows: list[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 4, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x, w, torch.tensor(rows)


class OpCounter(TorchDispatchMode):
    """Counts the fxoverlap ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fxoverlap":
            self.count[func._opname] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("rows", ROWS)
def test_grouped_mm_is_the_dense_product(rows: list[int]) -> None:
    x, w, group_rows = operands(rows)
    out = ops.grouped_mm(x, w, group_rows)
    expected = dense_grouped_mm(x, w, group_rows)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)  # another order of summation, in fp64
    seed = torch.randn(out.shape, dtype=out.dtype)
    for got, want in zip(
        torch.autograd.grad(out, (x, w), seed), torch.autograd.grad(expected, (x, w), seed), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rows", ROWS)
def test_grouped_mm_gradients(rows: list[int]) -> None:
    x, w, group_rows = operands(rows)
    transposed = w.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    for weight in (w, transposed):
        assert gradcheck(ops.grouped_mm, (x, weight, group_rows))
        assert gradgradcheck(ops.grouped_mm, (x, weight, group_rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_grouped_mm_is_one_product_a_group(dtype: torch.dtype) -> None:
    x, w, group_rows = operands([2, 0, 3], dtype)
    out = ops.grouped_mm(x, w, group_rows)
    ones = torch.ones_like(out)
    out.backward(ones)
    assert out.dtype == w.grad.dtype == x.grad.dtype == dtype
    assert torch.equal(out[:2], x[:2] @ w[0]) and torch.equal(out[2:5], x[2:5] @ w[2])
    assert torch.equal(w.grad[2], x[2:5].t() @ ones[2:5]) and not w.grad[1].any()
    assert torch.equal(x.grad[2:5], ones[2:5] @ w[2].t())


def test_grouped_mm_padding_is_never_read() -> None:
    x, w, group_rows = operands([2, 0, 3])
    with torch.no_grad():
        x[5:] = torch.nan
    out = ops.grouped_mm(x, w, group_rows)
    grads = torch.autograd.grad(out, (x, w), torch.full_like(out, torch.nan).index_fill(0, torch.arange(5), 1.0))
    assert not out[5:].any() and not grads[0][5:].any()
    assert all(t.isfinite().all() for t in (out, *grads))


@pytest.mark.parametrize("act", [torch.relu, nn.functional.silu, torch.exp, torch.sigmoid])
def test_b77_padding_rows_of_nan_change_nothing(act: Callable[[Tensor], Tensor]) -> None:
    """5 rows used of 8, the rest NaN: results and gradients are finite, and those of the 5 rows alone."""
    found = []
    for rows in (5, 8):
        generator = torch.Generator().manual_seed(0)
        x = torch.full((rows, 16), torch.nan)  # full vectors, whose bits do not depend on the rows
        x[:5] = torch.randn(5, 16, generator=generator)
        w = [torch.randn(3, 16, 16, generator=generator).requires_grad_() for _ in range(2)]
        x.requires_grad_()
        group_rows = torch.tensor([2, 0, 3])
        out = ops.grouped_mm(act(ops.grouped_mm(x, w[0], group_rows)), w[1], group_rows)
        out[:5].square().sum().backward()
        assert all(t.isfinite().all() for t in (out, x.grad, w[0].grad, w[1].grad))
        found.append((out[:5], x.grad[:5], w[0].grad, w[1].grad))
    assert all(map(torch.equal, *found))


def test_grouped_mm_without_rows_or_groups() -> None:
    _, w, _ = operands([0, 0, 0])
    x = torch.empty(0, 4, dtype=torch.float64, requires_grad=True)
    out = ops.grouped_mm(x, w, torch.zeros(3, dtype=torch.int64))
    out.sum().backward()
    assert out.shape == (0, 5) and x.grad.shape == (0, 4)
    assert w.grad.shape == w.shape and not w.grad.any()
    none = ops.grouped_mm(torch.ones(2, 4), torch.empty(0, 4, 5), torch.empty(0, dtype=torch.int64))
    assert torch.equal(none, torch.zeros(2, 5))


@pytest.mark.parametrize("x_needs, w_needs", [(True, True), (True, False), (False, True), (False, False)])
def test_grouped_mm_computes_only_the_gradients_that_are_needed(x_needs: bool, w_needs: bool) -> None:
    x, w, group_rows = operands([2, 0, 3])
    x, w = x.detach().requires_grad_(x_needs), w.detach().requires_grad_(w_needs)
    with OpCounter() as counter:
        out = ops.grouped_mm(x, w, group_rows)
        if out.requires_grad:
            out.sum().backward()
    assert counter.count == +Counter(grouped_mm=1 + x_needs, grouped_mm_wgrad=int(w_needs))


def test_grouped_mm_under_autocast() -> None:
    x, w, group_rows = operands([2, 0, 3], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.grouped_mm(x, w, group_rows)
        mixed = ops.grouped_mm(x.bfloat16(), w, group_rows)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and x.grad.dtype == w.grad.dtype == torch.float32
    assert torch.equal(out, mixed)
    assert torch.equal(out, ops.grouped_mm(x.bfloat16(), w.bfloat16(), group_rows))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, w, n: (x, w, n + 2), r"at most the 7 rows of x, got \[4, 2, 5\], sum 11"),
        (lambda x, w, n: (x, w.transpose(1, 2), n), r"got \[7, 4\], \[3, 5, 4\] and \[3\]; transpose w"),
        (lambda x, w, n: (x, w, n[:2]), r"and \[2\]; transpose w, count all groups"),
        (lambda x, w, n: (x[0], w, n), r"got \[4\]"),
        (lambda x, w, n: (x.float(), w, n), r"one dtype, got torch.float32 and torch.float64; cast"),
    ],
)
def test_grouped_mm_errors(change: Callable[..., tuple[Tensor, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.grouped_mm(*change(*operands([2, 0, 3])))


def test_opcheck() -> None:
    x, w, group_rows = operands([2, 0, 3])
    g = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.fxoverlap.grouped_mm, (x, w, group_rows))
    torch.library.opcheck(torch.ops.fxoverlap.grouped_mm_wgrad, (x, g, group_rows))


# --- exchanges on one rank --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("rows", [5, 0])
def test_exchange_on_one_rank(group: dist.ProcessGroup, rows: int, by_name: bool) -> None:
    x = torch.randn(rows, 2, 3, dtype=torch.float64, requires_grad=True)
    splits = torch.tensor([rows])
    to = group.group_name if by_name else group
    out = ops.exchange(x, splits, splits, rows, to)
    assert torch.equal(out, x)
    assert gradcheck(lambda t: ops.exchange(t, splits, splits, rows, to), (x,))
    assert gradgradcheck(lambda t: ops.exchange(t, splits, splits, rows, to), (x,))


def test_exchange_of_strided_rows_and_other_dtypes(group: dist.ProcessGroup) -> None:
    splits = torch.tensor([4])
    for x in (torch.randn(3, 4).t(), torch.randn(4, 1).expand(4, 3), torch.randn(4, 3).bfloat16(), torch.arange(4)):
        assert torch.equal(ops.exchange(x, splits, splits, 4, group), x)


def test_launch_is_to_be_waited_for(group: dist.ProcessGroup) -> None:
    x, splits = torch.randn(4, 3), torch.tensor([4])
    launched = torch.ops.fxoverlap.exchange(x, splits, splits, 4, group.group_name)
    assert torch.equal(torch.ops._c10d_functional.wait_tensor(launched), x)


@pytest.mark.parametrize(
    "out_splits, in_splits, out_rows, message",
    [
        ([4], [5], 5, r"out_splits must sum to out_rows=5, got \[4\], sum 4; pass the out_rows"),
        ([5], [4], 5, r"in_splits must sum to the 5 rows of x, got \[4\], sum 4; pass all rows"),
    ],
)
def test_exchange_errors(
    group: dist.ProcessGroup, out_splits: list[int], in_splits: list[int], out_rows: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ops.exchange(torch.randn(5, 2), torch.tensor(out_splits), torch.tensor(in_splits), out_rows, group)


def test_exchange_counts_on_one_rank(group: dist.ProcessGroup) -> None:
    out_splits, in_splits, out_rows, recv_counts = ops.exchange_counts(torch.tensor([3, 0, 2]), group)
    assert (out_splits.tolist(), in_splits.tolist(), out_rows, recv_counts.tolist()) == ([5], [5], 5, [[3, 0, 2]])


@pytest.mark.parametrize("counts", [torch.ones(4), torch.ones(2, 2, dtype=torch.int64)])
def test_exchange_counts_errors(group: dist.ProcessGroup, counts: Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"must be int64 \[1 \* local experts\], got .* count the tokens of every expert"
    ):
        ops.exchange_counts(counts, group)


class Routed(nn.Module):
    """Counts, dispatch, one grouped product, combine: the smallest layer that exchanges."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.w = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        out_splits, in_splits, out_rows, recv_counts = ops.exchange_counts(counts, self.group)
        rows = ops.exchange(x, out_splits, in_splits, out_rows, self.group)
        rows = ops.grouped_mm(rows, self.w, recv_counts.sum(0))
        return ops.exchange(rows, in_splits, out_splits, x.shape[0], self.group).square().sum()


def test_traced(group: dist.ProcessGroup) -> None:
    module, mode = Routed(group), compat.new_fake_mode()
    x = compat.fake_like(mode, torch.randn(6, 4, requires_grad=True))
    graph = compat.export_joint(module, (x, compat.fake_like(mode, torch.tensor([2, 4]))), mode).graph
    phases = Counter((str(node.target), compat.is_backward(node)) for node in graph.nodes)
    assert {key: n for key, n in phases.items() if key[0].startswith(("fxoverlap", "_c10d", "aten._"))} == {
        ("_c10d_functional.all_to_all_single.default", False): 1,
        ("_c10d_functional.wait_tensor.default", False): 3,
        ("_c10d_functional.wait_tensor.default", True): 2,
        ("aten._local_scalar_dense.default", False): 1,
        ("fxoverlap.exchange.default", False): 2,
        ("fxoverlap.exchange.default", True): 2,
        ("fxoverlap.grouped_mm.default", False): 1,
        ("fxoverlap.grouped_mm.default", True): 1,
        ("fxoverlap.grouped_mm_wgrad.default", True): 1,
    }
    launches = [node for node in graph.nodes if node.target is torch.ops.fxoverlap.exchange.default]
    dispatch, combine, combine_backward, dispatch_backward = (node.args[1:3] for node in launches)
    assert dispatch == combine[::-1] == combine_backward == dispatch_backward[::-1]
    rows = {str(size) for node in graph.nodes if isinstance(v := node.meta.get("val"), Tensor) for size in v.shape}
    assert len([size for size in rows if not size.isdigit()]) == 1


# --- exchanges on two ranks -------------------------------------------------------------------------------------------

COUNTS = [[[1, 2, 0, 3], [4, 0, 0, 1]], [[0, 0, 2, 1], [0, 0, 5, 0]], [[0, 0, 0, 0], [2, 1, 0, 0]]]


def _exchange_on(rank: int) -> list[Any]:
    """Exchange rows that carry their source, expert and number, and send back gradients that carry where they were."""
    results = []
    for counts in COUNTS:
        tokens = [(rank, e, i) for e, n in enumerate(counts[rank]) for i in range(n)]
        x = torch.tensor(tokens, dtype=torch.float64).view(-1, 3).requires_grad_()
        out_splits, in_splits, out_rows, recv = ops.exchange_counts(torch.tensor(counts[rank]), dist.group.WORLD)
        y = ops.exchange(x, out_splits, in_splits, out_rows, dist.group.WORLD)
        y.backward(y.detach() + 100 * (rank + 1))
        results.append((x.detach(), y.detach(), x.grad, out_splits, in_splits, out_rows, recv))
    return results


@pytest.fixture(scope="module")
def found(two_ranks: TwoRanks) -> list[Any]:
    """What each of two ranks got, for each of COUNTS."""
    return two_ranks.run(_exchange_on)


@pytest.mark.parametrize("case", range(len(COUNTS)))
@pytest.mark.parametrize("rank", [0, 1])
def test_exchange_on_two_ranks(found: list[Any], rank: int, case: int) -> None:
    counts = COUNTS[case]
    local = range(2 * rank, 2 * rank + 2)
    x, y, grad, out_splits, in_splits, out_rows, recv = found[rank][case]
    expected = [[source, e, i] for source in (0, 1) for e in local for i in range(counts[source][e])]
    assert y.tolist() == expected and out_rows == len(expected)
    assert recv.tolist() == [[counts[source][e] for e in local] for source in (0, 1)]
    assert out_splits.tolist() == recv.sum(1).tolist()
    assert in_splits.tolist() == [sum(counts[rank][:2]), sum(counts[rank][2:])]
    # Each row's gradient is the row, plus a hundred for each unit of the number of the rank that it went to.
    assert torch.equal(grad, x + 100 * (x[:, 1:2] // 2 + 1))
