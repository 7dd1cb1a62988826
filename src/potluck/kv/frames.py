"""The bytes between two engines: frames, and what stands in them. No I/O here, and nothing that runs what it reads.

    frame    "PLKV" | version u8 | kind u8 | head bytes u16 | data bytes u32 | crc32 u32 | head | data

The CRC covers the frame up to itself and the head; data has a checksum of its own (`check.py`), named in the head.
All numbers are little-endian. docs/kv.md has every head. A reader knows how much it is willing to take before it
takes it: sizes are checked against each other and against caps before memory is given to them.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import get_args

from potluck.core.errors import FormatError
from potluck.core.values.kv_layout import KvCut
from potluck.kv.chunks import KvChunk, KvManifest, sizes_of
from potluck.kv.codec_layout import CODEC_IDS, CODECS, ITEM_BYTES, Part

MAGIC, VERSION = b"PLKV", 3
HELLO, OPENING, REFUSED, PIECE, END, PROBLEM, BEAT, ACK, DONE = range(1, 10)
PREFIX = struct.Struct("<4sBBHII")
_UNCHECKED = PREFIX.size - 4
_HELLO = struct.Struct("<16s32sIQIIB")
_CUT = struct.Struct("<HHHHHHBB")
_SHARED = struct.Struct("<16s16sI")
_OPENING = struct.Struct("<16sII32sIBB")
_PIECE = struct.Struct("<IHBBBBHIIQQIQQ")
_END = struct.Struct("<IQ")
_ACK = struct.Struct("<QQ")
MOST_HEAD_BYTES = 1024
LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 1 << 12, 1 << 26
MOST_CHUNK_BYTES = 1 << 36
MOST_DIMENSIONS = 6
MOST_CHUNKS = 1 << 20
MOST_SLOTS = 64
PARTS: tuple[Part, ...] = get_args(Part)
DTYPES = tuple(sorted(ITEM_BYTES))


class OtherVersion(FormatError):
    """The other side speaks another version: it is no use to try again."""


@dataclass(frozen=True, slots=True)
class SharedMemoryOffer:
    """Memory that the receiver offers for data in place of the connection: slots of a piece's size each."""

    name: bytes
    proof: bytes
    """What stands at its beginning: only who can see the memory can tell that both mean the same."""
    slots: int


@dataclass(frozen=True, slots=True)
class Hello:
    session: bytes
    bound: bytes
    handle: str
    have: int
    """Tokens that the receiver has already: only those behind them cross."""
    window_bytes: int
    """Chunks under way and not yet used up may hold so much of the receiver's memory."""
    piece_bytes: int
    """The largest piece that it takes, and the size of a shared slot; at least `LEAST_PIECE_BYTES`."""
    wait_ms: int
    """How long it is willing to wait for a sender that has not heard of the handle."""
    shared: SharedMemoryOffer | None = None
    cut: KvCut = KvCut()


@dataclass(frozen=True, slots=True)
class TransferOpening:
    session: bytes
    manifest: KvManifest
    piece_bytes: int  # All chunks are cut at multiples of it.
    shared: bool  # Whether data of this connection goes through the memory that was offered.


@dataclass(frozen=True, slots=True)
class HandleRefused:
    """The handle is unknown, expired, used up, or for something else: always in the same words."""


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """A piece of a chunk: `count` bytes from `offset` on of its parameters and data, one behind the other."""

    index: int  # Of the chunk, among those of its transfer.
    chunk: KvChunk  # Without its bytes; the same in each of its pieces.
    chunk_bytes: int
    offset: int
    count: int
    sums: tuple[int, int] | None  # None: made by whoever sends it, just before.
    inline: bool = True  # Whether its data follows; else it lies in the shared memory.


@dataclass(frozen=True, slots=True)
class TransferEnd:
    chunks: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class SenderProblem:
    """The sender cannot go on."""

    line: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The sender lives, and has nothing to send yet."""


@dataclass(frozen=True, slots=True)
class Ack:
    pieces: int  # Those that came whole over this connection, so far.
    released_bytes: int  # Of the chunks that the receiver has used up, so far, over all connections.


@dataclass(frozen=True, slots=True)
class TransferDone:
    """The receiver has everything: the sender may forget it."""


Message = (
    Hello
    | TransferOpening
    | HandleRefused
    | ChunkPiece
    | TransferEnd
    | SenderProblem
    | Heartbeat
    | Ack
    | TransferDone
)


@dataclass(frozen=True, slots=True)
class FramePrefix:
    kind: int
    head_bytes: int
    data_bytes: int
    check: int


# Writing.


def frame(message: Message) -> bytes:
    if isinstance(message, ChunkPiece):
        return _frame(PIECE, _piece_head(message), message.count if message.inline else 0)
    if isinstance(message, Ack):
        return _frame(ACK, _ACK.pack(message.pieces, message.released_bytes))
    if isinstance(message, Hello):
        return _frame(HELLO, _hello_head(message))
    if isinstance(message, TransferOpening):
        manifest = message.manifest
        name = manifest.fingerprint.encode("ascii")
        digest = bytes.fromhex(manifest.token_hash)
        head = _OPENING.pack(
            message.session,
            manifest.start,
            manifest.stop,
            digest,
            message.piece_bytes,
            message.shared,
            len(name),
        )
        return _frame(OPENING, head + name)
    if isinstance(message, TransferEnd):
        return _frame(END, _END.pack(message.chunks, message.total_bytes))
    if isinstance(message, SenderProblem):
        return _frame(PROBLEM, message.line.encode()[:MOST_HEAD_BYTES])
    return _frame({HandleRefused: REFUSED, Heartbeat: BEAT, TransferDone: DONE}[type(message)], b"")


def _frame(kind: int, head: bytes, data_bytes: int = 0) -> bytes:
    start = PREFIX.pack(MAGIC, VERSION, kind, len(head), data_bytes, 0)[:_UNCHECKED]
    return start + struct.pack("<I", zlib.crc32(head, zlib.crc32(start))) + head


def _hello_head(hello: Hello) -> bytes:
    handle = hello.handle.encode("ascii")
    head = _HELLO.pack(
        hello.session,
        hello.bound,
        hello.have,
        hello.window_bytes,
        hello.piece_bytes,
        hello.wait_ms,
        len(handle),
    )
    cut, shared = hello.cut, hello.shared
    dtype = DTYPES.index(cut.dtype) + 1 if cut.dtype else 0
    about = _CUT.pack(cut.reader, cut.readers, *cut.layers, *cut.heads, dtype, cut.whole_windows)
    slots = b"" if shared is None else _SHARED.pack(shared.name, shared.proof, shared.slots)
    return head + handle + about + slots


def _piece_head(piece: ChunkPiece) -> bytes:
    chunk = piece.chunk
    assert piece.sums is not None
    return _PIECE.pack(
        piece.index,
        chunk.layer,
        PARTS.index(chunk.part),
        DTYPES.index(chunk.dtype),
        CODEC_IDS[chunk.codec],
        len(chunk.shape),
        chunk.head,
        chunk.first,
        chunk.stop,
        piece.chunk_bytes,
        piece.offset,
        piece.count,
        *piece.sums,
    ) + struct.pack(f"<{len(chunk.shape)}I", *chunk.shape)


# Reading.


def read_prefix(raw: bytes) -> FramePrefix:
    """The first bytes of a frame; afterwards it is known how much more belongs to it."""
    magic, version, kind, head_bytes, data_bytes, check = PREFIX.unpack(raw)
    if magic != MAGIC:
        raise FormatError("hand-over", "is not a stream of cache frames")
    if version != VERSION:
        raise OtherVersion(
            "hand-over",
            f"is of version {version}, this side reads {VERSION}; let both engines be of one release",
        )
    if not HELLO <= kind <= DONE:
        raise FormatError("hand-over", f"has a frame of the unknown kind {kind}")
    if head_bytes > MOST_HEAD_BYTES or data_bytes > (MOST_PIECE_BYTES if kind == PIECE else 0):
        raise FormatError(
            "hand-over", f"has a frame of {head_bytes} and {data_bytes} bytes, which is too large"
        )
    return FramePrefix(kind, head_bytes, data_bytes, check)


def read_head(raw: bytes, prefix: FramePrefix, head: bytes) -> Message:
    """The message of a frame, from its first bytes and its head."""
    if zlib.crc32(head, zlib.crc32(raw[:_UNCHECKED])) != prefix.check:
        raise FormatError("hand-over", "has a frame whose checksum is wrong")
    try:
        return _message(prefix, head)
    except (struct.error, KeyError, IndexError, ValueError) as error:
        raise FormatError("hand-over", "has a frame that is malformed") from error


def _message(prefix: FramePrefix, head: bytes) -> Message:
    kind = prefix.kind
    if kind == PIECE:
        return _piece(prefix, head)
    if kind == ACK:
        return Ack(*_ACK.unpack(head))
    if kind == HELLO:
        return _hello(head)
    if kind == OPENING:
        return _opening(head)
    if kind == END:
        end = TransferEnd(*_END.unpack(head))
        if end.chunks > MOST_CHUNKS:
            raise FormatError("hand-over", f"says that it has {end.chunks} chunks")
        return end
    if kind == PROBLEM:
        return SenderProblem(" ".join(head.decode("utf-8", "replace").split()))
    if head:
        raise FormatError("hand-over", "has a frame with more in it than there should be")
    if kind == BEAT:
        return Heartbeat()
    return TransferDone() if kind == DONE else HandleRefused()


def _opening(head: bytes) -> TransferOpening:
    session, start, stop, digest, piece, shared, length = _OPENING.unpack_from(head)
    name = head[_OPENING.size :]
    if shared > 1 or length != len(name) or not start < stop or not 0 < piece <= MOST_PIECE_BYTES:
        raise FormatError("hand-over", "has a malformed opening")
    return TransferOpening(
        session, KvManifest(name.decode("ascii"), start, stop, digest.hex()), piece, bool(shared)
    )


def _hello(head: bytes) -> Hello:
    session, bound, have, window, piece, wait, length = _HELLO.unpack_from(head)
    handle, rest = head[_HELLO.size : _HELLO.size + length], head[_HELLO.size + length :]
    if len(handle) != length or not LEAST_PIECE_BYTES <= piece <= MOST_PIECE_BYTES:
        raise FormatError("hand-over", "has a malformed greeting")
    reader, readers, first_layer, stop_layer, first_head, stop_head, dtype, whole = _CUT.unpack_from(rest)
    cut = KvCut(
        reader,
        readers,
        (first_layer, stop_layer),
        (first_head, stop_head),
        DTYPES[dtype - 1] if dtype else "",
        bool(whole),
    )
    rest = rest[_CUT.size :]
    shared = SharedMemoryOffer(*_SHARED.unpack(rest)) if rest else None
    if shared is not None and not 0 < shared.slots <= MOST_SLOTS:
        raise FormatError("hand-over", f"offers {shared.slots} slots of shared memory")
    return Hello(session, bound, handle.decode("ascii"), have, window, piece, wait, shared, cut)


def _piece(prefix: FramePrefix, head: bytes) -> ChunkPiece:
    index, layer, part, dtype, codec, dimensions, kv_head, *numbers = _PIECE.unpack_from(head)
    first, stop, whole, offset, count, a, b = numbers
    if dimensions > MOST_DIMENSIONS or index >= MOST_CHUNKS:
        raise FormatError("hand-over", f"has a chunk {index} of {dimensions} dimensions")
    shape = struct.unpack(f"<{dimensions}I", head[_PIECE.size :])
    name = CODECS[codec]
    chunk = KvChunk(layer, PARTS[part], first, stop, DTYPES[dtype], shape, b"", name, head=kv_head)
    if whole > MOST_CHUNK_BYTES or sizes_of(chunk).total_bytes != whole:
        raise FormatError(
            "hand-over", f"has a chunk of {whole} bytes, which its shape {list(shape)} contradicts"
        )
    if count > MOST_PIECE_BYTES or offset + count > whole or (not count and whole):
        raise FormatError("hand-over", f"has a piece of {count} bytes at {offset} in a chunk of {whole}")
    if prefix.data_bytes not in (0, count):
        raise FormatError("hand-over", f"has a piece of {count} bytes with {prefix.data_bytes} behind it")
    return ChunkPiece(index, chunk, whole, offset, count, (a, b), prefix.data_bytes == count)
