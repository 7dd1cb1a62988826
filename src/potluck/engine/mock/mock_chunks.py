"""What stands for a layer's KV on the wire: a few bytes that say whose it is, and when it would have been there.

    the executor writes     when the layers that it stands for were computed, from and to: by its own clock
    the sender's card       how long ago their first byte left, the last layer's first byte, and all of it

That a parcel is late on its real way changes nothing, as long as it is there when the large one would be.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import NamedTuple

from potluck.engine.mock.history import mixed
from potluck.kv.chunks import KvChunk

WORD = struct.Struct("<QIII")
"""The history at the end, mixed with the layer; first, stop; where the hand-over began that ends here, or MORE."""
CONTENT = struct.Struct("<QIIIddd")
"""The same, and the times."""
TIMES = struct.Struct("<ddd")
MORE = (1 << 32) - 1
"""More of the same layer follows."""
DTYPE = "float32"
SHAPE = (1, 16)
"""Of each parcel, as the wire has it: room for the content, under any codec."""
RAW_BYTES = 64


class ChunkTimes(NamedTuple):
    first_s: float = 0.0
    last_s: float = 0.0
    end_s: float = 0.0


UNTOLD = ChunkTimes()


def parcel_of(
    history: int, layer: int, start: int, stop: int, since: int | None = None, times: ChunkTimes = UNTOLD
) -> KvChunk:
    """What stands for a layer's KV of the tokens [start, stop), which have this history at their end.

    They end a hand-over that began at `since`, by default at `start`; or it is MORE.
    """
    content = CONTENT.pack(mixed(history ^ layer), start, stop, start if since is None else since, *times)
    return KvChunk(layer, "latent", start, stop, DTYPE, SHAPE, content.ljust(RAW_BYTES, b"\0"))


def same_word(parcel: KvChunk, other: KvChunk) -> bool:
    """Whether both stand for the same KV, whenever it was computed; of parcels under no codec."""
    first, second = bytes(parcel.data), bytes(other.data)
    return len(first) == len(second) and first[: WORD.size] == second[: WORD.size]


def since_of(parcel: KvChunk) -> int:
    """Where the hand-over began that a parcel ends, or MORE. What is lent goes whole."""
    word = _content(parcel)
    if word is None:
        return parcel.first
    since: int = WORD.unpack_from(word)[3]
    return since


def times_of(parcel: KvChunk) -> ChunkTimes | None:
    """None where it says nothing: it is lent."""
    word = _content(parcel)
    return None if word is None else ChunkTimes(*TIMES.unpack_from(word, WORD.size))


def with_times(parcel: KvChunk, times: ChunkTimes) -> KvChunk:
    word = _content(parcel)
    if word is None:
        return parcel
    whole = word[: WORD.size] + TIMES.pack(*times) + word[CONTENT.size :]
    cut = len(parcel.parameters)
    return replace(parcel, parameters=whole[:cut], data=whole[cut:])


def _content(parcel: KvChunk) -> bytes | None:
    word = bytes(parcel.parameters) + bytes(parcel.data)
    return None if tuple(parcel.shape) != SHAPE or len(word) < CONTENT.size else word
