"""What every test file gets: one computing thread, the fixtures `group` and `two_ranks`, a place for words of tests."""

import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from shared_captures import shared_captures as captures_are_shared
from two_ranks import TwoRanks

from fxoverlap.launch import one_rank_group

# Bits depend on the number of threads, and so does the time when other processes share the cores.
torch.set_num_threads(1)


# A shell starts what runs in its background with SIGINT ignored, and the processes that tests interrupt inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A gloo group of this process alone.

    It ends with the file that asked for it, because other files test that a process without a group is left without.
    """
    with one_rank_group() as group:
        yield group


@pytest.fixture(scope="module")
def shared_captures() -> Iterator[None]:
    """Models that are alike share one capture in the files that use this."""
    with captures_are_shared():
        yield


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[TwoRanks]:
    """Two ranks of a gloo group, which answer the calls of all files: `two_ranks.run(function, *args)`."""
    ranks = TwoRanks()
    yield ranks
    ranks.end()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as "summary", from whichever process they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "summary" and report.when == "call":
                terminalreporter.write_line(str(value))
