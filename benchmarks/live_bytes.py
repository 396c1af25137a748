"""How many bytes of tensors are alive while a block runs, found by weak references to their storages.

Every op that torch dispatches in the block is seen, those of autograd's backward and of node modules too, which run
below autograd. What an op makes counts until the last tensor on its storage dies, views and what a kernel has saved
included. What was alive before the block does not count, nor what a kernel allocates and frees inside, such as the copy
that an exchange makes of rows that are not contiguous.

Nothing here knows of plans, nodes or predictions. Torch's own tracker (`torch.distributed._tools.mem_tracker`) counts
in the same way, but registers hooks for all modules, which are part of what a capture depends on.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from torch import Tensor

from fxoverlap import compat


class LiveBytes(compat.DispatchMode):
    """While the mode is on, counts the bytes of the storages that ops have made and that are alive.

    Attributes:
        alive: bytes after the last op; behind the block, what the block has left.
        peak: the most there were after any op: its arguments, its results, and whatever else was alive.
        curve: (name of the op, bytes after it), in order; empty unless asked for.
    """

    # Else torch refuses to run higher-order ops under the mode.
    supports_higher_order_operators = True

    def __init__(self, curve: bool = False) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.curve: list[tuple[str, int]] = []
        self._keeps_curve = curve
        self._bytes: dict[int, int | None] = {}  # by storage; None for what was there before the block
        # A storage may die in any thread, such as one that communicates: it is only noted there.
        self._dead: deque[int] = deque()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), is_made=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, is_made=True)
        self.peak = max(self.peak, self.alive)
        if self._keeps_curve:
            self.curve.append((str(func), self.alive))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._note((), is_made=False)

    def _note(self, tree: Any, is_made: bool) -> None:
        """Take out the storages that have died, take in those of a tree's tensors, and note which have grown."""
        while self._dead:
            self.alive -= self._bytes.pop(self._dead.popleft()) or 0
        for tensor in compat.leaves_of(tree):
            if not isinstance(tensor, Tensor):
                continue
            storage, key = tensor.untyped_storage(), compat.storage_id(tensor)
            if key not in self._bytes:
                weakref.finalize(storage, self._dead.append, key).atexit = False
                self._bytes[key] = 0 if is_made else None
            known = self._bytes[key]
            if known is not None:
                self._bytes[key] = storage.nbytes()
                self.alive += storage.nbytes() - known
