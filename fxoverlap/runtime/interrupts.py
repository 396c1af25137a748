"""Ctrl-C during a step: held back until a point at which the step can stop.

Between the launch of a collective and its entry in the record of launches a rank must not stop, or its peers could not
get back in step with it. So the signal is noted, and raised as KeyboardInterrupt behind a node or in a wait. A second
one goes through at once. A handler of the user's own is left alone.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_noted = threading.Event()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold Ctrl-C back for as long as the block lasts; what `check` has not raised by then comes behind it."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        late = _noted.is_set()
        _noted.clear()
    if late:
        signal.raise_signal(signal.SIGINT)


def check() -> None:
    """Raise KeyboardInterrupt if Ctrl-C has come."""
    if _noted.is_set():
        _noted.clear()
        raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    if _noted.is_set():
        signal.default_int_handler(number, frame)
    _noted.set()
