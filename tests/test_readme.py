"""The README's usage example, and the examples, run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def usage() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return str(block)


def test_the_usage_example_is_short(usage: str) -> None:
    assert len(usage.splitlines()) <= 15


def test_the_usage_example_runs(usage: str) -> None:
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    printed = _run("-c", usage, **one_rank)
    assert "experts.B" in printed


def test_the_training_example_runs() -> None:
    printed = _run(str(ROOT / "examples" / "train.py"), "--steps", "2")
    assert "step 1: loss" in printed
