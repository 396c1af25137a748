"""What the benchmarks are built from: turns, medians, and a step taken apart into compute and communication."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from two_ranks import TwoRanks

import fxoverlap as fxo
from fxoverlap.benchmarks import link, rates
from fxoverlap.benchmarks.exchanges import computing_pct, exchange_again, recorded, without_exchanges
from fxoverlap.benchmarks.timing import interleaved
from fxoverlap.benchmarks.workload import Settings, eager_step, same


def test_variants_take_turns() -> None:
    ran: list[str] = []
    times = interleaved(
        {"a": lambda: ran.append("a"), "b": lambda: time.sleep(0.01)}, 3, before=lambda: ran.append("-")
    )
    assert ran == ["-", "a", "-", "-", "-", "a", "-", "a", "-"]  # the second round begins with b
    assert len(times["b"].wall) == 3 and times["b"].ms >= 10 > times["b"].cpu_ms
    with pytest.raises(ValueError, match="at least 1, got 0"):
        interleaved({"a": lambda: None}, 0)


def test_same_means_the_same_bits() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), torch.nan)
    assert same([zero, nan, None], [zero.clone(), nan.clone(), None])
    assert not same([zero], [-zero])
    assert not same([zero], [zero], [zero, zero])
    assert not same([zero], [None])
    assert not same([zero], [torch.zeros(2, dtype=torch.float64)])


def _take_apart(rank: int) -> tuple[int, bool, float | None, float | None]:
    group = dist.group.WORLD
    assert group is not None
    settings = Settings(pattern="[*E][*E]", microbatches=2, tokens=32, dim=32, experts=4, expert_dim=16, top_k=2)
    model, batches = settings.model(group), settings.batches(rank)
    losses = eager_step(model, batches)
    exchanges = recorded(lambda: eager_step(model, batches), group)
    rows = [len(exchange.sent) for exchange in exchanges]
    with without_exchanges(exchanges):
        eager_step(model, batches)
    exchange_again(exchanges, group)
    with pytest.raises(RuntimeError, match="got fewer"), without_exchanges(exchanges):
        eager_step(model, batches[:1])
    assert same(losses, eager_step(model, batches))  # the kernels are the usual ones again
    eager = computing_pct(lambda: eager_step(model, batches), group)
    return len(rows), any(row != rows[0] for row in rows), eager, computing_pct(_launch_compute_wait, group)


def _launch_compute_wait() -> Tensor:
    """Exchange 16 MiB and compute for longer than that takes, before waiting for it."""
    x = torch.zeros(1 << 12, 1 << 10)
    half = [len(x) // 2, len(x) // 2]
    group = dist.group.WORLD
    assert group is not None
    received = torch.ops._c10d_functional.all_to_all_single(x, half, half, group.group_name)
    until = time.perf_counter() + 0.5
    while time.perf_counter() < until:
        x[:256] @ x[:1024].t()
    out: Tensor = torch.ops._c10d_functional.wait_tensor(received)
    return out


def test_a_step_taken_apart(two_ranks: TwoRanks) -> None:
    for number, unequal, eager_pct, overlapped_pct in two_ranks.run(_take_apart):
        assert number == 2 * 2 * 5  # microbatches, layers, and counts, two forward and two backward exchanges
        assert unequal
        # How much each is depends on what else the machine does.
        assert eager_pct is not None and overlapped_pct is not None and eager_pct < overlapped_pct


def test_what_two_hosts_lack_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert link.missing_for_two_hosts() == "network namespaces need root: run the command as root"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert link.missing_for_two_hosts() == "no ip and no tc on the path: install the package iproute2"


def _at(rate: str, scale: float) -> dict[str, Any]:
    names = ("eager", "sequential", "megatron", "auto", "auto_pair", "bound")
    return {"rate": rate, "bitwise_equal": True} | {f"{name}_ms": scale * (9 - i) for i, name in enumerate(names)}


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_plot_of_rates(tmp_path: Path, kind: str) -> None:
    figures = [_at("500mbit", 200), _at("1gbit", 100)]
    path = tmp_path / f"rates.{kind}"
    rates.plot(figures, str(path))
    assert path.read_bytes()[:8] in (b"<?xml ve", b"\x89PNG\r\n\x1a\n")
    lines = rates.text({"rates": figures, "bitwise_equal": True}).splitlines()
    assert "900.0 (2.250)" in lines[2] and lines[2].split()[0] == "1gbit" and lines[2].endswith(" 400.0")


@pytest.mark.parametrize("rate", ["1", "fast", "0mbit", "-1gbit", "1gbps", "infgbit"])
def test_rate_of_another_form(rate: str) -> None:
    with pytest.raises(fxo.ConfigError, match=r"expected a number above 0 with kbit, mbit or gbit"):
        rates.run(["1gbit", rate], Settings(), [])
    with pytest.raises(fxo.ConfigError, match=r"plot is 'a.xyz'; expected a name that ends in one of .*svg"):
        rates.run(["1gbit"], Settings(), ["a.xyz"])
    assert [rates.mbit(each) for each in ("250kbit", "500mbit", "1.5gbit")] == [0.25, 500, 1500]
