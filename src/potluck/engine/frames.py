"""A hand-over as a stream of bytes: a manifest, parcels, an end. No I/O here, and nothing that runs what it reads.

    frame     magic "PLKV" | version u8 | kind u8 | zero u16 | head bytes u32 | data bytes u64 | crc32 u32
    manifest  start u32 | stop u32 | fingerprint 32 ascii | token hash 32 bytes | parcels to come u32
    parcel    layer u16 | part u8 | dtype u8 | first u32 | stop u32 | dimensions u8 | each u32;  data: the tensor
    end       parcels sent u32
    problem   data: one line of text

All numbers are little-endian. The checksum covers all else of its frame. A reader knows how much it is willing to
take before it takes it: the sizes in a frame are checked against each other and a cap before memory is given to them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import get_args

from potluck.core.errors import FormatError
from potluck.engine.handover import Manifest, Parcel, Part

MAGIC, VERSION = b"PLKV", 1
MANIFEST, PARCEL, END, PROBLEM = 1, 2, 3, 4
FRAME = struct.Struct("<4sBBHIQI")
SIZES = struct.Struct("<4sBBHIQ")
"""A frame's beginning but for the checksum."""
ABOUT = struct.Struct("<II32s32sI")
HEAD = struct.Struct("<HBBIIB")
COUNT = struct.Struct("<I")
PARTS: tuple[Part, ...] = get_args(Part)
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
NAMES = tuple(DTYPES)
MOST_HEAD_BYTES = 256
MOST_PROBLEM_BYTES = 1000
MOST_DIMENSIONS = 6


@dataclass(frozen=True, slots=True)
class Opening:
    manifest: Manifest
    parcels: int


@dataclass(frozen=True, slots=True)
class Closing:
    parcels: int


@dataclass(frozen=True, slots=True)
class Problem:
    """The sender could not go on."""

    line: str


Frame = Opening | Parcel | Closing | Problem


def opening(about: Manifest, parcels: int) -> bytes:
    head = ABOUT.pack(
        about.start, about.stop, about.fingerprint.encode(), bytes.fromhex(about.token_hash), parcels
    )
    return _frame(MANIFEST, head)


def parcel_frames(parcel: Parcel) -> Iterator[bytes | memoryview]:
    """Header and data apart, so that the data need not be copied."""
    head = HEAD.pack(
        parcel.layer,
        PARTS.index(parcel.part),
        NAMES.index(parcel.dtype),
        parcel.first,
        parcel.stop,
        len(parcel.shape),
    ) + struct.pack(f"<{len(parcel.shape)}I", *parcel.shape)
    yield _begin(PARCEL, head, parcel.data)
    yield parcel.data


def closing(parcels: int) -> bytes:
    return _frame(END, COUNT.pack(parcels))


def problem(line: str) -> bytes:
    return _frame(PROBLEM, b"", line.encode()[:MOST_PROBLEM_BYTES])


def _frame(kind: int, head: bytes, data: bytes = b"") -> bytes:
    return _begin(kind, head, data) + data


def _begin(kind: int, head: bytes, data: bytes | memoryview) -> bytes:
    sizes = SIZES.pack(MAGIC, VERSION, kind, 0, len(head), len(data))
    return sizes + COUNT.pack(_check(sizes, head, data)) + head


def _check(sizes: bytes, head: bytes, data: bytes | memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(head, zlib.crc32(sizes)))


class FrameReader:
    """Bytes in, frames out."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._buffer = bytearray()
        self._wanted: tuple[int, int, int, int, bytes] | None = None

    def feed(self, data: bytes) -> list[Frame]:
        self._buffer += data
        found = []
        while (frame := self._next()) is not None:
            found.append(frame)
        return found

    def close(self) -> None:
        """The stream has ended: it must not do so within a frame."""
        if self._buffer or self._wanted:
            raise FormatError("hand-over", "was cut short")

    def _next(self) -> Frame | None:
        if self._wanted is None:
            if len(self._buffer) < FRAME.size:
                return None
            self._wanted = self._sizes(bytes(self._buffer[: FRAME.size]))
            del self._buffer[: FRAME.size]
        kind, head_bytes, data_bytes, check, sizes = self._wanted
        if len(self._buffer) < head_bytes + data_bytes:
            return None
        head = bytes(self._buffer[:head_bytes])
        data = bytes(self._buffer[head_bytes : head_bytes + data_bytes])
        del self._buffer[: head_bytes + data_bytes]
        self._wanted = None
        if _check(sizes, head, data) != check:
            raise FormatError("hand-over", "a frame's checksum is wrong")
        return _read(kind, head, data)

    def _sizes(self, raw: bytes) -> tuple[int, int, int, int, bytes]:
        magic, version, kind, zero, head_bytes, data_bytes, check = FRAME.unpack(raw)
        if magic != MAGIC or zero:
            raise FormatError("hand-over", "is not a stream of cache frames")
        if version != VERSION:
            raise FormatError("hand-over", f"is of version {version}, this engine reads {VERSION}")
        most = {PARCEL: self._most, PROBLEM: MOST_PROBLEM_BYTES}.get(kind, 0)
        if head_bytes > MOST_HEAD_BYTES or data_bytes > most:
            raise FormatError("hand-over", f"a frame of {data_bytes} bytes is larger than can be right")
        return kind, head_bytes, data_bytes, check, raw[: SIZES.size]


def _read(kind: int, head: bytes, data: bytes) -> Frame:
    try:
        if kind == MANIFEST:
            start, stop, fingerprint, digest, parcels = ABOUT.unpack(head)
            return Opening(Manifest(fingerprint.decode("ascii"), start, stop, digest.hex()), parcels)
        if kind == PARCEL:
            return _parcel(head, data)
        if kind == END:
            return Closing(COUNT.unpack(head)[0])
        if kind == PROBLEM:
            return Problem(data.decode("utf-8", "replace"))
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise FormatError("hand-over", "a frame's head is malformed") from error
    raise FormatError("hand-over", f"a frame of unknown kind {kind}")


def _parcel(head: bytes, data: bytes) -> Parcel:
    layer, part, dtype, first, stop, dimensions = HEAD.unpack(head[: HEAD.size])
    if dimensions > MOST_DIMENSIONS:
        raise FormatError("hand-over", f"a parcel with {dimensions} dimensions")
    shape = struct.unpack(f"<{dimensions}I", head[HEAD.size :])
    name = NAMES[dtype]
    if prod(shape) * DTYPES[name] != len(data):
        raise FormatError("hand-over", f"a parcel of {len(data)} bytes has the shape {list(shape)} of {name}")
    return Parcel(layer, PARTS[part], first, stop, name, shape, data)
