"""Pinned memory for KV that crosses between a GPU and its host, in pieces of one size that are used again.

To pin memory takes milliseconds, in which nothing can be launched on the GPU; under load that was seconds.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

PIECE_BYTES = 16 << 20
"""Layers go over together up to that size: few launches, and the wire has something early."""
PIECES = 32  # For each way: as much as may wait to be taken (`HOST_KV_MAX_BYTES`).


class PinnedPool:
    """A piece is free again once nobody holds a view of it."""

    def __init__(self, count: int) -> None:
        self._free = deque(_pinned(PIECE_BYTES) for _ in range(count))

    def take(self, size_bytes: int, *, waits: bool = False) -> Tensor:
        """So many bytes. `waits`: whoever copies may wait for it, so that memory that is not pinned will do where
        none is left."""
        if size_bytes > PIECE_BYTES:
            return _pinned(size_bytes)
        try:
            piece = self._free.popleft()
        except IndexError:
            if waits:
                return torch.empty(size_bytes, dtype=torch.uint8)
            piece = _pinned(PIECE_BYTES)
        lent = piece.numpy()[:size_bytes]
        weakref.finalize(lent, self._free.append, piece).atexit = False
        return torch.from_numpy(lent)


def _pinned(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
