"""What is handed over: a manifest, and chunks, each one part of one layer.

A chunk's data is C-contiguous and little-endian. Under a codec other than `raw` it is what the codec made of it, and
`parameters` are what the codec needs to undo that; dtype and shape are always those of the restored array.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.core.errors import PotluckError
from potluck.kv.codec_layout import ITEM_BYTES, STATES, Codec, CodecSizes, Part, sizes

Buffer = bytes | bytearray | memoryview
CHECKSUM_ROW = 512
"""Numbers of 64 bits that a chunk's checksum takes as one row."""


class TransferError(PotluckError):
    """A cache could not be handed over: the other side is gone, refuses, fails, or is late."""


class TransferDeclined(TransferError):
    """The sender says no: it refuses the handle, or cannot go on."""


@dataclass(frozen=True, slots=True)
class KvManifest:
    fingerprint: str
    """Of the model with its weights."""
    start: int
    stop: int
    token_hash: str


def token_hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).hexdigest()


@dataclass(frozen=True, slots=True)
class KvChunk:
    layer: int
    part: Part
    first: int
    """Tokens [first, stop), or for a state its length twice."""
    stop: int
    dtype: str
    shape: tuple[int, ...]
    data: Buffer
    codec: Codec = "raw"
    parameters: Buffer = b""
    head: int = 0
    """The first of its KV heads, as the model counts them."""


def lesser(chunk: KvChunk, dtype: str) -> bool:
    """Whether it was computed in fewer bits than a receiver has, which would compute it otherwise."""
    return bool(dtype) and chunk.part not in STATES and ITEM_BYTES[chunk.dtype] < ITEM_BYTES[dtype]


def data_bytes(chunk: KvChunk) -> int:
    return len(chunk.data)


def sizes_of(chunk: KvChunk) -> CodecSizes:
    """Of its parameters and its data, under its codec."""
    return sizes(chunk.part, chunk.dtype, chunk.shape, chunk.codec)
