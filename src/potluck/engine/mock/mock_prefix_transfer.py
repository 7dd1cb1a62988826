"""Prefixes of engines that pretend, on their way from one to another by the names of their blocks.

Whoever has no tokens to go by needs the history at the end of each block: a parcel holds these, and all layers say
the same.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from potluck.core.errors import FormatError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.engine.mock.mock_chunks import DTYPE
from potluck.kv.chunks import KvChunk


def lent(histories: Sequence[int], layer: int, start: int, stop: int) -> KvChunk:
    """What stands for a layer's KV of whole blocks, of tokens [start, stop)."""
    data = struct.pack(f"<{len(histories)}Q", *histories)
    return KvChunk(layer, "latent", start, stop, DTYPE, (len(histories), 2), data)


class MockReceivedPrefix:
    """The parcels of tokens [start, stop) as they come, in any order."""

    def __init__(self, layers: int, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.histories: tuple[int, ...] | None = None
        self._missing = set(range(layers))

    def accept(self, parcel: KvChunk) -> None:
        where = f"prefix: layer {parcel.layer} {parcel.part}"
        if parcel.layer not in self._missing:
            raise FormatError(where, "is not expected, or came before")
        count = (self.stop - self.start) // BLOCK_TOKENS
        expected = ("raw", DTYPE, (count, 2), self.start, self.stop, 8 * count)
        said = (parcel.codec, parcel.dtype, tuple(parcel.shape), parcel.first, parcel.stop, len(parcel.data))
        if said != expected:
            raise FormatError(where, f"is {said}, expected {expected}")
        histories = struct.unpack(f"<{count}Q", bytes(parcel.data))
        if self.histories not in (None, histories):
            raise FormatError(where, "is not the KV of the same tokens as another layer's")
        self.histories = histories
        self._missing.remove(parcel.layer)

    def finish(self) -> tuple[int, ...]:
        """The history at the end of each block."""
        if self._missing or self.histories is None:
            raise FormatError("prefix", f"{len(self._missing)} parcels are missing")
        return self.histories
