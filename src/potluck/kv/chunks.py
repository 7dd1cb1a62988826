"""What is handed over: a manifest, and chunks, each one part of one layer.

A chunk's data is C-contiguous and little-endian. Under a codec other than `raw` it is what the codec made of it, and
`parameters` are what the codec needs to undo that; dtype and shape are always those of the restored array.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from potluck.core.errors import FormatError, PotluckError
from potluck.core.values.kv_layout import KvCut, Span
from potluck.kv.codec_layout import ITEM_BYTES, STATES, Codec, CodecSizes, Part, sizes

Buffer = bytes | bytearray | memoryview
CHECKSUM_ROW = 512  # Numbers of 64 bits that a chunk's checksum takes as one row.


class TransferError(PotluckError):
    """A cache could not be handed over: the other side is gone, refuses, fails, or is late."""


class TransferDeclined(TransferError):
    """The sender says no: it refuses the handle, or cannot go on."""


@dataclass(frozen=True, slots=True)
class KvManifest:
    fingerprint: str  # Of the model with its weights.
    start: int
    stop: int
    token_hash: str


def token_hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).hexdigest()


@dataclass(frozen=True, slots=True)
class KvChunk:
    layer: int
    part: Part
    first: int  # Tokens [first, stop), or for a state its length twice.
    stop: int
    dtype: str
    shape: tuple[int, ...]
    data: Buffer
    codec: Codec = "raw"
    parameters: Buffer = b""
    head: int = 0  # The first of its KV heads, as the model counts them.


def lesser(chunk: KvChunk, dtype: str) -> bool:
    """Whether it was computed in fewer bits than a receiver has, which would compute it otherwise."""
    return bool(dtype) and chunk.part not in STATES and ITEM_BYTES[chunk.dtype] < ITEM_BYTES[dtype]


def data_bytes(chunk: KvChunk) -> int:
    return len(chunk.data)


def sizes_of(chunk: KvChunk) -> CodecSizes:
    return sizes(chunk.part, chunk.dtype, chunk.shape, chunk.codec)


def cut_chunk(chunk: KvChunk, cut: KvCut) -> KvChunk | None:
    """What a worker gets of a raw chunk: the chunk itself where that is all of it, None where it is nothing."""
    if not cut.layers[0] <= chunk.layer < cut.layers[1]:
        return None
    if cut.heads == (0, 0) or not (chunk.part == "kv" or (chunk.part == "memory" and chunk.dtype == "uint8")):
        return chunk
    *before, heads, width = chunk.shape
    first, stop = max(cut.heads[0], chunk.head), min(cut.heads[1], chunk.head + heads)
    if first >= stop:
        return None
    if (first, stop) == (chunk.head, chunk.head + heads):
        return chunk
    rows = np.frombuffer(chunk.data, np.uint8).reshape(*before, heads, -1)
    data = np.ascontiguousarray(rows[..., first - chunk.head : stop - chunk.head, :])
    return replace(
        chunk, shape=(*before, stop - first, width), data=data.reshape(-1).data.cast("B"), head=first
    )


class HeadJoin:
    """Raw chunks of some heads in, chunks of all heads out, as soon as all heads of some tokens are there."""

    def __init__(self, spans: Sequence[Span]) -> None:
        """The heads that come from each sender."""
        self._heads = sorted(set(spans))
        self._waiting: dict[tuple[int, str], dict[int, list[KvChunk]]] = {}

    def take(self, chunk: KvChunk) -> Iterator[KvChunk]:
        if len(self._heads) < 2 or chunk.part != "kv":
            yield chunk
            return
        if (chunk.head, chunk.head + chunk.shape[2]) not in self._heads:
            raise FormatError(
                f"hand-over: layer {chunk.layer}", f"has heads from {chunk.head} on, not asked for"
            )
        waiting = self._waiting.setdefault((chunk.layer, chunk.part), {first: [] for first, _ in self._heads})
        waiting[chunk.head].append(replace(chunk, data=bytes(chunk.data)))  # it is used again elsewhere
        waiting[chunk.head].sort(key=lambda piece: piece.first)
        while all(waiting.values()):
            first = max(pieces[0].first for pieces in waiting.values())
            if any(pieces[0].first != first for pieces in waiting.values()):
                return  # one that goes before is still under way
            stop = min(pieces[0].stop for pieces in waiting.values())
            yield _joined([_taken(pieces, stop) for pieces in waiting.values()])


def _taken(pieces: list[KvChunk], stop: int) -> KvChunk:
    """The tokens before `stop` of the first piece, which keeps the rest."""
    piece = pieces.pop(0)
    if piece.stop == stop:
        return piece
    tokens, row = stop - piece.first, int(np.prod(piece.shape[1:])) * ITEM_BYTES[piece.dtype]
    data = memoryview(piece.data)
    pieces.insert(
        0,
        replace(
            piece, first=stop, shape=(piece.shape[0] - tokens, *piece.shape[1:]), data=data[tokens * row :]
        ),
    )
    return replace(piece, stop=stop, shape=(tokens, *piece.shape[1:]), data=data[: tokens * row])


def _joined(pieces: Sequence[KvChunk]) -> KvChunk:
    first = pieces[0]
    rows = [np.frombuffer(piece.data, np.uint8).reshape(*piece.shape[:3], -1) for piece in pieces]
    if len({piece.dtype for piece in pieces}) > 1:
        raise FormatError(f"hand-over: layer {first.layer}", "comes in several formats")
    whole = np.concatenate(rows, axis=2)
    shape = (*whole.shape[:3], first.shape[3])
    return replace(first, shape=shape, data=whole.reshape(-1).data.cast("B"), head=0)
