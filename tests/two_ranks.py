"""Two ranks that live as long as the tests: they import torch and warm up once, and not once a file."""

from __future__ import annotations

import faulthandler
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from shared_captures import shared_captures

from fxoverlap.launch import launch

LIFE_S = 7200.0
"""Of the ranks, and of a collective that one of them waits in; a call has a limit of its own."""


class TwoRanks:
    """Ranks of `launch` that are given one call after another; they are started by the first.

    What a call leaves behind in its process is there in the next: patches and groups have to end with the call. Models
    that are alike share a capture. After an error the ranks are ended, because their collectives may be out of step,
    and the next call starts new ones.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._pipes: list[Connection] = []
        self._error: BaseException | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """What `function(rank, *args)` returns, by rank; LaunchError if it raises, or lasts longer, in seconds."""
        if self._thread is None or not self._thread.is_alive():
            self._start()
        assert self._thread is not None
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args, timeout_s)))
        results = []
        for pipe in self._pipes:
            while not pipe.poll(0.1):
                if not self._thread.is_alive():
                    assert self._error is not None
                    raise self._error
            results.append(pickle.loads(pipe.recv_bytes()))
        return results

    def end(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            for pipe in self._pipes:
                pipe.send_bytes(pickle.dumps(None))
            self._thread.join()

    def _start(self) -> None:
        pairs = [multiprocessing.get_context("spawn").Pipe() for _ in range(2)]
        self._pipes, theirs = map(list, zip(*pairs, strict=True))
        self._error = None

        def live() -> None:
            try:
                launch(_serve, 2, theirs, timeout_s=LIFE_S)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=live, daemon=True)
        self._thread.start()


def _serve(rank: int, pipes: list[Connection]) -> None:
    """Be one of the ranks: answer calls until there is none."""
    pipe = pipes[rank]
    while (call := pickle.loads(pipe.recv_bytes())) is not None:
        function, args, timeout_s = call
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        with shared_captures():
            result = function(rank, *args)
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(pickle.dumps(result))
