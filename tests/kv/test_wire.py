"""The wire format: what is written is read, and nothing else is."""

from __future__ import annotations

import random
import socket
import struct
import threading
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_helpers import ABOUT, BOUND, FrameReader, transfer_ends

from potluck.core.errors import FormatError
from potluck.core.values.kv_layout import KvCut
from potluck.kv import checksum
from potluck.kv import frames as wire
from potluck.kv.chunks import CHECKSUM_ROW as ROW
from potluck.kv.chunks import KvChunk
from potluck.kv.codec_layout import CODEC_IDS, CODED, STATES, sizes
from potluck.kv.frames import (
    PREFIX,
    VERSION,
    Ack,
    ChunkPiece,
    HandleRefused,
    Heartbeat,
    Hello,
    Message,
    OtherVersion,
    SenderProblem,
    SharedMemoryOffer,
    TransferDone,
    TransferEnd,
    TransferOpening,
    frame,
    read_prefix,
)
from potluck.kv.handles import new_handle

COUNTS = st.integers(0, 2**32 - 1)
LARGE = st.integers(0, 2**64 - 1)
KEYS = st.binary(min_size=16, max_size=16)
LINES = st.text(st.characters(codec="utf-8", exclude_categories=("Z", "C")), max_size=200)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[ChunkPiece, bytes]:
    part = draw(st.sampled_from(wire.PARTS))
    least = {"kv": 3, "latent": 2}.get(part, 1)
    shape = draw(st.lists(st.integers(0, 9), min_size=least, max_size=wire.MOST_DIMENSIONS))
    if part == "kv":
        shape[1] = 2
    dtype = draw(st.sampled_from(wire.DTYPES))
    codec = draw(st.sampled_from(sorted(CODEC_IDS))) if dtype in CODED and part not in STATES else "raw"
    chunk = KvChunk(
        draw(st.integers(0, 2**16 - 1)),
        part,
        draw(COUNTS),
        draw(COUNTS),
        dtype,
        tuple(shape),
        b"",
        codec,
        head=draw(st.integers(0, 2**16 - 1)),
    )
    index = draw(st.integers(0, wire.MOST_CHUNKS - 1))
    whole = sizes(part, dtype, shape, codec).total_bytes
    offset = draw(st.integers(0, max(0, whole - 1)))
    count = draw(st.integers(1, whole - offset)) if whole else 0
    data = draw(st.binary(min_size=count, max_size=count))
    inline = draw(st.booleans()) or not count
    return ChunkPiece(
        index, chunk, whole, offset, count, checksum.sums(data), inline
    ), data if inline else b""


SPANS = st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1)).map(lambda span: tuple(sorted(span)))
CUTS = st.builds(
    lambda reader, more, *rest: KvCut(reader, reader + 1 + more, *rest),
    st.integers(0, 500),
    st.integers(0, 500),
    SPANS,
    SPANS,
    st.sampled_from(["", *wire.DTYPES]),
    st.booleans(),
)
SHARED = st.builds(SharedMemoryOffer, KEYS, KEYS, st.integers(1, wire.MOST_SLOTS))
HELLOS = st.builds(
    Hello,
    KEYS,
    st.binary(min_size=32, max_size=32),
    st.just(new_handle()),
    COUNTS,
    LARGE,
    st.integers(wire.LEAST_PIECE_BYTES, wire.MOST_PIECE_BYTES),
    COUNTS,
    st.none() | SHARED,
    CUTS,
)
MESSAGES = st.one_of(
    HELLOS,
    st.builds(TransferOpening, KEYS, st.just(ABOUT), st.integers(1, wire.MOST_PIECE_BYTES), st.booleans()),
    st.builds(TransferEnd, st.integers(0, wire.MOST_CHUNKS), LARGE),
    st.builds(SenderProblem, LINES),
    st.builds(Ack, LARGE, LARGE),
    st.sampled_from([Heartbeat(), TransferDone(), HandleRefused()]),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(pieces() | MESSAGES.map(lambda one: (one, b"")), max_size=6), st.randoms(use_true_random=False)
)
def test_frames_are_read_as_written_for_any_chunking(
    sent: list[tuple[Message, bytes]], draw: random.Random
) -> None:
    raw = b"".join(frame(message) + data for message, data in sent)
    reader, result, at = FrameReader(), [], 0
    while at < len(raw):
        step = draw.randint(1, max(1, len(raw) // 3))
        result += reader.feed(raw[at : at + step])
        at += step
    reader.close()
    assert result == sent


@settings(max_examples=40, deadline=None)
@given(pieces() | MESSAGES.map(lambda one: (one, b"")), st.data())
def test_changed_bit_in_a_frame_header_is_detected(sent: tuple[Message, bytes], data: st.DataObject) -> None:
    raw = bytearray(frame(sent[0]))
    place = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[place // 8] ^= 1 << place % 8
    reader = FrameReader()
    try:
        result = reader.feed(bytes(raw) + sent[1])
    except FormatError:
        return
    assert result == []  # It now claims to be longer, and waits for the rest.


@settings(max_examples=40, deadline=None)
@given(pieces(), st.data())
def test_changed_bit_in_the_data_changes_its_checksum(
    sent: tuple[ChunkPiece, bytes], data: st.DataObject
) -> None:
    raw = bytearray(sent[1])
    if raw:
        place = data.draw(st.integers(0, 8 * len(raw) - 1))
        raw[place // 8] ^= 1 << place % 8
        assert checksum.sums(raw) != sent[0].sums


@settings(max_examples=40, deadline=None)
@given(MESSAGES | pieces().map(lambda one: one[0]), st.data())
def test_truncated_stream_is_detected(message: Message, data: st.DataObject) -> None:
    raw = frame(message)
    reader = FrameReader()
    assert reader.feed(raw[: data.draw(st.integers(1, len(raw) - 1))]) == []
    with pytest.raises(FormatError, match="cut short"):
        reader.close()


def valid_frame(kind: int, head: bytes, data_bytes: int = 0, version: int = wire.VERSION) -> bytes:
    """A frame whose checksum is right, whatever it says."""
    start = struct.pack("<4sBBHI", wire.MAGIC, version, kind, len(head), data_bytes)
    return start + struct.pack("<I", zlib.crc32(head, zlib.crc32(start))) + head


def piece_head(**changes: int) -> bytes:
    label = {"index": 0, "layer": 0, "part": 0, "dtype": 2, "codec": 0, "dimensions": 4, "head": 0}
    place = {"first": 0, "stop": 4, "whole": 4 * 2 * 2 * 8 * 4, "offset": 0, "count": 64, "a": 0, "b": 0}
    values = (label | place | changes).values()
    return struct.pack("<IHBBBBHIIQQIQQ", *values) + struct.pack("<4I", 4, 2, 2, 8)


def test_piece_header_of_the_refusal_tests_is_valid() -> None:
    ((message, _),) = FrameReader().feed(valid_frame(wire.PIECE, piece_head(), 64) + bytes(64))
    assert isinstance(message, ChunkPiece)
    assert (message.count, message.chunk.dtype) == (64, "float32")


@pytest.mark.parametrize(
    "change",
    [
        {"index": wire.MOST_CHUNKS},
        {"part": 4},
        {"dtype": 3},
        {"dtype": 5},
        {"codec": 3},
        {"dimensions": 7},
        {"dimensions": 3},
        {"whole": 2047},
        {"whole": 2**63},
        {"offset": 2**63},
        {"offset": 2048},
        {"offset": 1985},
        {"count": 0},
        {"count": 2**32 - 1},
        {"codec": 1},
    ],
)
def test_contradictory_piece_header_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(FormatError):
        FrameReader().feed(valid_frame(wire.PIECE, piece_head(**change), 64) + bytes(64))


@pytest.mark.parametrize(
    "raw",
    [
        valid_frame(wire.PIECE, piece_head(), 63),
        valid_frame(wire.PIECE, piece_head(), wire.MOST_PIECE_BYTES + 1),
        valid_frame(wire.ACK, bytes(16), 1),
        valid_frame(wire.ACK, bytes(15)),
        valid_frame(wire.BEAT, b"x"),
        valid_frame(wire.END, struct.pack("<IQ", wire.MOST_CHUNKS + 1, 0)),
        valid_frame(0, b""),
        valid_frame(10, b""),
        valid_frame(wire.BEAT, b"", version=1),
        b"GET / HTTP/1.1\r\n\r\n",
        valid_frame(wire.OPENING, b""),
        valid_frame(wire.HELLO, bytes(20)),
    ],
)
def test_invalid_frame_is_refused(raw: bytes) -> None:
    with pytest.raises(FormatError):
        FrameReader().feed(raw)


@pytest.mark.parametrize(
    "change",
    [
        (2, 2, 0, 4, 0, 2, 0, 0),  # the third of two
        (0, 0, 0, 4, 0, 2, 0, 0),
        (0, 2000, 0, 4, 0, 2, 0, 0),
        (0, 1, 4, 3, 0, 2, 0, 0),
        (0, 1, 0, 4, 2, 1, 0, 0),
        (0, 1, 0, 4, 0, 2, 7, 0),
    ],
)
def test_invalid_hello_partition_is_refused(change: tuple[int, ...]) -> None:
    hello = frame(Hello(bytes(16), BOUND, new_handle(), 0, 1, 4096, 1))
    head = hello[PREFIX.size : -14] + struct.pack("<HHHHHHBB", *change)
    with pytest.raises(FormatError):
        FrameReader().feed(valid_frame(wire.HELLO, head))


def test_frame_length_beyond_the_limit_is_refused_before_its_data() -> None:
    raw = struct.pack("<4sBBHII", wire.MAGIC, wire.VERSION, wire.PIECE, 84, 2**32 - 1, 0)
    with pytest.raises(FormatError, match="too large"):
        FrameReader().feed(raw)


def test_random_bytes_raise_only_format_errors() -> None:
    """The short sister of benchmarks/kv_fuzz.py: sound streams with bytes changed, cut, doubled and made up."""
    draw = random.Random(7)
    sound = [
        frame(Ack(1, 2)),
        frame(TransferEnd(3, 4)),
        frame(Hello(bytes(16), BOUND, new_handle(), 0, 1, 4096, 1)),
    ]
    sound.append(valid_frame(wire.PIECE, piece_head(), 64) + bytes(64))
    for _ in range(4000):
        raw = bytearray(b"".join(draw.choices(sound, k=3)))
        for _ in range(draw.randint(0, 3)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        at = draw.randrange(len(raw))
        raw[at : at + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
        try:
            FrameReader().feed(bytes(raw))
        except FormatError:
            continue


def by_hand(data: bytes) -> tuple[int, int]:
    data += bytes(-len(data) % 8)
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    a, b = sum(words), sum(p * x for p, x in enumerate(words, 1))
    return a % 2**64, b % 2**64


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 3 * 8 * ROW), st.integers(0, 9))
def test_checksum_equals_its_documented_definition(start: bytes, middle: int, rest: int) -> None:
    data = start + random.Random(middle).randbytes(middle) + bytes(range(rest))
    assert checksum.sums(data) == by_hand(data)


@given(
    start=st.binary(max_size=40),
    middle=st.sampled_from((0, 1, 8 * ROW, 64 * ROW + 8)),
    rest=st.binary(max_size=40),
)
def test_checksum_while_copying_equals_the_definition(start: bytes, middle: int, rest: int) -> None:
    data = start + random.Random(middle).randbytes(middle) + rest
    into = bytearray(b"\xff" * len(data))
    assert checksum.copied(data, memoryview(into)) == by_hand(data)
    assert into == data


@pytest.mark.parametrize(
    "size", [0, 5, 8, 4096, 4099, checksum.READ_BYTES + 4104, 3 * checksum.READ_BYTES + 1]
)
def test_checksum_while_receiving_equals_the_definition(size: int) -> None:
    data = random.Random(size).randbytes(size)
    one, two = socket.socketpair()
    with one, two:
        sender = threading.Thread(target=one.sendall, args=(data,))
        sender.start()
        into = memoryview(bytearray(size))
        assert checksum.receive(two, into) == (size, by_hand(data))
        sender.join()
        assert into == data


def test_receive_from_a_closed_connection_returns_the_received_size() -> None:
    one, two = socket.socketpair()
    with one, two:
        one.sendall(bytes(5000))
        one.shutdown(socket.SHUT_WR)
        assert checksum.receive(two, memoryview(bytearray(9000)))[0] == 5000


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=20, unique=True), st.data())
def test_swapped_words_change_the_checksum(words: list[int], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(words) - 2))
    j = data.draw(st.integers(i + 1, len(words) - 1))
    swapped = list(words)
    swapped[i], swapped[j] = words[j], words[i]
    same = checksum.sums(struct.pack(f"<{len(words)}Q", *words)) == checksum.sums(
        struct.pack(f"<{len(words)}Q", *swapped)
    )
    assert same == ((words[i] - words[j]) * (i - j) % 2**64 == 0)


PLACE = 4  # Of the version in a frame.


def in_another_version(raw: bytes) -> bytes:
    return raw[:PLACE] + bytes([VERSION + 7]) + raw[PLACE + 1 :]


def test_sender_answers_another_version_in_its_own() -> None:
    hello = frame(Hello(bytes(16), BOUND, new_handle(), 0, 1 << 17, 4096, 100))
    with transfer_ends() as pair, socket.create_connection(pair.address, timeout=5.0) as connection:
        connection.sendall(in_another_version(hello))
        received = connection.recv(1 << 16)
    prefix = read_prefix(received[: PREFIX.size])
    assert received == frame(Heartbeat()), "no refusal: if a byte was harmed, the receiver tries again"
    assert prefix.kind


def test_fetch_from_a_sender_of_another_version_fails_after_one_retry_and_names_both() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    received: list[bytes] = []

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                received.append(connection.recv(1 << 16))
                connection.sendall(in_another_version(frame(HandleRefused())))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with transfer_ends() as pair:
        pair.address = listener.getsockname()
        pair.links.allow({pair.address})
        with pytest.raises(FormatError, match=f"version {VERSION + 7}, this side reads {VERSION}"):
            pair.fetch(new_handle(), degree=1)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    assert len(received) == 2, "a version refused twice is final: no further retry"


def test_only_another_version_is_not_retried() -> None:
    assert issubclass(OtherVersion, FormatError)
    with pytest.raises(FormatError) as message:
        read_prefix(b"HTTP" + bytes(PREFIX.size - 4))
    assert not isinstance(message.value, OtherVersion)
