"""Two minutes of bad streams into the parser and the assembly: nothing but a format error may come of them.

Sound streams are changed: bits, bytes, numbers at their limits, cut, doubled, reordered; half of them are sealed
again, so that a wrong head passes its checksum. A crash is any other exception, memory beyond the window, a piece
with bytes that were never sent, and a stream that takes more than a CPU-second.
"""

from __future__ import annotations

import random
import struct
import sys
import time
import traceback
import zlib
from collections import Counter

from parts import common
from potluck.core.errors import FormatError
from potluck.kv import frames as wire
from potluck.kv.assembly import ChunkAssembly
from potluck.kv.checksum import sums
from potluck.kv.chunks import KvChunk, KvManifest
from potluck.kv.codec_layout import CODEC_IDS, CODED, STATES, Codec, sizes
from potluck.kv.send_queue import SendQueue, pack

sys.path.append(str(common.ROOT / "tests" / "kv"))
from kv_helpers import FrameReader

SEED = 20
WINDOW_BYTES, PIECE_BYTES = 1 << 15, 1 << 10
LIMITS = (0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1)
KEYS = ("crashes", "streams", "messages_read", "chunks_whole", "streams_refused")
Stream = list[tuple[wire.Message, bytes]]
TARGETS = {"crashes": ("==", 0.0)}


def sound(draw: random.Random) -> Stream:
    load = SendQueue(PIECE_BYTES)
    load.open(1 << 30)
    load.join(0, 1 << 20)
    for layer in range(draw.randint(1, 3)):
        part = draw.choice(wire.PARTS)
        shape = (draw.randint(0, 6), 2, draw.randint(1, 4), draw.choice((1, 8, 33)))
        dtype = draw.choice(wire.DTYPES)
        coded = dtype in CODED and part not in STATES
        codec: Codec = draw.choice(sorted(CODEC_IDS)) if coded else "raw"
        size = sizes(part, dtype, shape, codec)
        data, parameters = draw.randbytes(size.payload_bytes), draw.randbytes(size.parameter_bytes)
        load.put(pack(KvChunk(layer, part, 0, shape[0], dtype, shape, data, codec, parameters), PIECE_BYTES))
    load.finish()
    manifest = KvManifest("f" * 32, 0, 9, "ab" * 32)
    stream: Stream = [(wire.TransferOpening(bytes(16), manifest, PIECE_BYTES, False), b"")]
    while (todo := load.next(0)) is not None:
        stream.append((todo[0], bytes(todo[1])) if isinstance(todo, tuple) else (todo, b""))
        if draw.random() < 0.1:
            stream.append((wire.Heartbeat(), b""))
    ends = (wire.Ack(1, 2), wire.TransferDone(), wire.SenderProblem("x"), wire.HandleRefused())
    offer = wire.SharedMemoryOffer(bytes(16), bytes(16), 2)
    hello = wire.Hello(bytes(16), bytes(32), "h" * 43, 0, 9, 9, 9, offer)
    return [*stream, (draw.choice(ends), b""), (hello, b"")]


def spoiled(draw: random.Random, stream: Stream) -> bytes:
    frames = [bytearray(wire.frame(message) + data) for message, data in stream]
    for _ in range(draw.randint(0, 4)):
        frame = draw.choice(frames)
        at = draw.randrange(len(frame))
        kind = draw.randrange(7)
        if kind == 0:
            frame[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            frame[at] = draw.randrange(256)
        elif kind == 2:
            width = draw.choice((1, 2, 4, 8))
            frame[at : at + width] = (draw.choice(LIMITS) & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif kind == 3:
            del frame[at : at + draw.randint(1, 40)]
        elif kind == 4:
            frame[at:at] = draw.randbytes(draw.randint(1, 40))
        elif kind == 5:
            frames.append(bytearray(frame))
        else:
            draw.shuffle(frames)
        frames = [one for one in frames if one] or [bytearray(b"P")]
    if draw.random() < 0.5:
        for frame in frames:
            seal(frame)
    return b"".join(frames)


def seal(frame: bytearray) -> None:
    if len(frame) >= wire.PREFIX.size:
        head = frame[16 : 16 + int.from_bytes(frame[6:8], "little")]
        frame[12:16] = struct.pack("<I", zlib.crc32(head, zlib.crc32(frame[:12])))


class Receiver:
    def __init__(self, sent: set[bytes]) -> None:
        self._sent = sent
        self.held_bytes = 0
        self.chunks = 0
        self._assembly = ChunkAssembly(WINDOW_BYTES, PIECE_BYTES, self._take, self._give)

    def _take(self, size: int) -> memoryview:
        self.held_bytes += size
        if self.held_bytes > WINDOW_BYTES:
            raise MemoryError("beyond the window")
        return memoryview(bytearray(size))

    def _give(self, buffer: memoryview) -> None:
        self.held_bytes -= len(buffer)

    def take(self, message: wire.Message, data: bytes) -> None:
        if isinstance(message, wire.TransferEnd):
            self._assembly.ended(message)
        if not isinstance(message, wire.ChunkPiece) or not message.inline:
            return
        place = self._assembly.place(message, 1)
        if place is None:
            return
        place[:] = data
        if sums(place) != message.sums:
            self._assembly.spoiled(message)
            raise FormatError("hand-over", "has a piece whose checksum is wrong")
        if data not in self._sent:
            raise AssertionError("bytes that were never sent have passed")
        if self._assembly.landed(message) is not None:
            self.chunks += 1
            self._assembly.release(message.index)


def one(draw: random.Random) -> Counter[str]:
    """One stream: how many messages and chunks were read of it, and whether it was refused."""
    stream = sound(draw)
    raw = spoiled(draw, stream)
    reader, receiver = FrameReader(), Receiver({data for _, data in stream})
    counts: Counter[str] = Counter(streams=1)
    at = 0
    try:
        while at < len(raw):
            step = draw.choice((1, 16, 100, 5000))
            for message, data in reader.feed(raw[at : at + step]):
                counts["messages_read"] += 1
                receiver.take(message, data)
            at += step
        reader.close()
    except FormatError:
        counts["streams_refused"] += 1
    counts["chunks_whole"] += receiver.chunks
    return counts


def measure(quick: bool) -> dict[str, float]:
    asked_s = 20.0 if quick else 125.0
    begun_s = time.monotonic()
    counts: Counter[str] = Counter()
    draw = random.Random(SEED)
    while time.monotonic() - begun_s < asked_s:
        cpu_s = time.process_time()
        try:
            counts += one(draw)
        except Exception:
            traceback.print_exc()
            counts["crashes"] += 1
            continue
        counts["crashes"] += time.process_time() - cpu_s > 1.0
    return {**dict.fromkeys(KEYS, 0), **counts, "seconds": time.monotonic() - begun_s}


if __name__ == "__main__":
    common.run("kv_fuzz", measure, TARGETS, seeds=(SEED,), quick_without="all but the first 20 s")
