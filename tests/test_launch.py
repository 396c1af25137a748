"""`launch`: results by rank, and one clear error with nothing left running when a rank or the caller ends early."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fxoverlap.launch import LaunchError, launch, one_rank_group


def _sum_over_ranks(rank: int, addend: int) -> tuple[int, torch.Tensor, int]:
    total = torch.tensor([rank + addend])
    dist.all_reduce(total)
    return rank, total, torch.get_num_threads()


def _write_pid_then(rank: int, folder: str, action: str) -> None:
    Path(folder, str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1 and action == "raise":
        raise ValueError("no such token")
    if rank == 1 and action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and action == "exit":
        os._exit(3)
    if action == "wait":
        time.sleep(60)
    dist.barrier()


def _assert_none_left(folder: Path) -> None:
    for path in folder.glob("[01]"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_results_come_by_rank() -> None:
    results = launch(_sum_over_ranks, 2, 10)
    assert [rank for rank, _, _ in results] == [0, 1]
    assert all(torch.equal(total, torch.tensor([21])) for _, total, _ in results)
    assert [threads for _, _, threads in results] == [1, 1]


@pytest.mark.parametrize(
    ("action", "cause", "traceback"),
    [
        ("raise", "ValueError: no such token", True),
        ("kill", "SIGKILL", False),
        ("exit", "exit status 3", False),
    ],
)
def test_a_rank_that_fails_is_named_and_all_end(tmp_path: Path, action: str, cause: str, traceback: bool) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(_write_pid_then, 2, str(tmp_path), action)
    first_line = str(caught.value).splitlines()[0]
    assert first_line.startswith("rank 1 of 2 failed: ") and cause in first_line
    assert caught.value.rank == 1
    assert ("Traceback" in str(caught.value)) == traceback
    _assert_none_left(tmp_path)


def test_time_runs_out(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"rank 0, 1 of 2 did not end within 8 s"):
        launch(_write_pid_then, 2, str(tmp_path), "wait", timeout_s=8)
    _assert_none_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_caller(tmp_path: Path, number: signal.Signals) -> None:
    program = (
        "from test_launch import _write_pid_then, launch\n"
        "if __name__ == '__main__':\n"
        f"    launch(_write_pid_then, 2, {str(tmp_path)!r}, 'wait')\n"
    )
    (tmp_path / "main.py").write_text(program)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py")],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    ) as caller:
        for name in ("0", "1"):
            while not (tmp_path / name).exists() or not (tmp_path / name).read_text():
                assert caller.poll() is None
                time.sleep(0.05)
        if number == signal.SIGINT:
            os.killpg(caller.pid, number)  # as a terminal does: the ranks get it too
        else:
            caller.kill()
        _, errors = caller.communicate(timeout=30)
    if number == signal.SIGINT:
        assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")
    for _ in range(100):  # the kernel needs a moment to kill the ranks of a killed caller
        if not any(Path("/proc", (tmp_path / name).read_text()).exists() for name in ("0", "1")):
            return
        time.sleep(0.05)
    _assert_none_left(tmp_path)


def test_one_rank_group_comes_and_goes() -> None:
    with one_rank_group() as group:
        assert group.size() == 1
        with one_rank_group() as same:
            assert same is group
        assert dist.is_initialized()
    assert not dist.is_initialized()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
