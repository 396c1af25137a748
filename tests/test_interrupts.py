"""Ctrl-C is held back until a step can stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from fxoverlap.runtime import interrupts

pytestmark = pytest.mark.usefixtures("shared_captures")


@pytest.fixture(autouse=True)
def handler_is_put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_it_comes_at_the_next_check() -> None:
    with interrupts.held():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()


def late(reached: list[str]) -> None:
    with interrupts.held():
        signal.raise_signal(signal.SIGINT)
        reached.append("the end of the block")


def test_it_comes_behind_the_block_at_the_latest() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        late(reached)
    assert reached
    interrupts.check()


def twice() -> None:
    with interrupts.held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("not interrupted")


def test_a_second_one_goes_through_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        twice()


def test_a_handler_of_the_user_is_left_alone() -> None:
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with interrupts.held():
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT]
        interrupts.check()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_do_not_touch_handlers() -> None:
    def run() -> None:
        with interrupts.held():
            found.append(signal.getsignal(signal.SIGINT))

    found: list[object] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
