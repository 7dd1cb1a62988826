"""Harm at every kind of byte: never wrong data, never a hang beyond the deadline, never anything left behind.

`ends` checks after each test that no descriptor, thread, buffer or shared file is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from kv_helpers import ABOUT, SMALL, SMALL_LINKS, Harm, chunk_value, sample_chunks, transfer_ends

from potluck.core.errors import PotluckError
from potluck.kv.chunks import TransferError
from potluck.kv.frames import PREFIX, Ack, ChunkPiece, Hello, TransferEnd, TransferOpening, frame

CHUNKS = sample_chunks(5, 8)
RIGHT = {chunk.layer: chunk_value(chunk) for chunk in CHUNKS}
PATIENT = replace(SMALL_LINKS, connect_s=5.0, stall_s=5.0, silence_s=10.0)
SLACK_S = 2.5  # For a busy machine; each deadline itself is well below.

_OPENING = len(frame(TransferOpening(bytes(16), ABOUT, SMALL.piece_bytes, False)))
_HEAD = len(frame(ChunkPiece(0, CHUNKS[0], 16896, 0, 4096, (0, 0))))
_FIRST = _OPENING + _HEAD
_SECOND = _FIRST + SMALL.piece_bytes
PLACES = {
    "first byte": 0,
    "opening: version": 4,
    "opening: head length": 6,
    "opening: crc": 12,
    "opening: manifest": PREFIX.size + 20,
    "piece: magic": _OPENING,
    "piece: kind": _OPENING + 5,
    "piece: data length": _OPENING + 10,
    "piece: chunk": _OPENING + PREFIX.size + 6,
    "piece: offset": _OPENING + PREFIX.size + 28,
    "piece: sums": _FIRST - 30,
    "piece: shape": _FIRST - 3,
    "data: first byte": _FIRST,
    "data: within": _FIRST + 1234,
    "data: last byte": _SECOND - 1,
    "next frame": _SECOND,
    "next data": _SECOND + _HEAD + 100,
}


def harm_at(place: int, act: Callable[[bytes, int], bytes | None], *, on_any: bool = False) -> Harm:
    """Harm once, at one byte of what is said on the first connection, or on whichever gets so far first."""
    done = False

    def harm(connection: int, went: int, data: bytes) -> bytes | None:
        nonlocal done
        if (connection and not on_any) or done or not went <= place < went + len(data):
            return data
        done = True
        return act(data, place - went)

    return harm


def corrupt(data: bytes, i: int) -> bytes:
    return data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1 :]


def drop_byte(data: bytes, i: int) -> bytes:
    return data[:i] + data[i + 1 :]


def repeat_bytes(data: bytes, i: int) -> bytes:
    return data[: i + 1] + data[max(0, i - 15) :]


def reorder(data: bytes, i: int) -> bytes:
    return data[:i] + data[i + 8 : i + 16] + data[i : i + 8] + data[i + 16 :]


def cut(data: bytes, i: int) -> bytes | None:
    return None


def stall(data: bytes, i: int) -> bytes:
    time.sleep(2 * SMALL_LINKS.stall_s)
    return data


def insert(data: bytes, i: int) -> bytes:
    return data[:i] + b"\0" * 64 + data[i:]


@pytest.mark.parametrize("act", [corrupt, drop_byte, repeat_bytes, reorder, cut, insert])
@pytest.mark.parametrize("place", PLACES)
def test_damage_to_one_connection_costs_at_most_that_connection(
    place: str, act: Callable[[bytes, int], bytes | None]
) -> None:
    with transfer_ends(link_limits=PATIENT, harm=harm_at(PLACES[place], act)) as pair:
        handle, transfer = pair.send(CHUNKS)
        fetched, got = pair.fetch(handle, degree=1)
        assert got == RIGHT
        assert act in (reorder, repeat_bytes, insert) or fetched.lost_connections == 1
        assert fetched.lost_connections <= 1
        assert transfer.wait(30) == "fetched"


@pytest.mark.parametrize("place", ["first byte", "piece: chunk", "data: within", "next frame"])
def test_stalled_connection_is_replaced(place: str) -> None:
    with transfer_ends(harm=harm_at(PLACES[place], stall)) as pair:
        handle, _ = pair.send(CHUNKS)
        begun_s = time.monotonic()
        fetched, got = pair.fetch(handle, degree=2)
        assert got == RIGHT
        assert time.monotonic() - begun_s < 2 * SMALL_LINKS.stall_s + SLACK_S
        assert fetched.lost_connections <= 2


@pytest.mark.parametrize("act", [corrupt, drop_byte, cut])
@pytest.mark.parametrize("place", [0, 6, 40, 60, 130, 150])
def test_damaged_receiver_messages_cost_at_most_a_connection(
    place: int, act: Callable[[bytes, int], bytes | None]
) -> None:
    """Greeting and acknowledgements. A damaged greeting is not answered, so it may take the time for silence."""
    with transfer_ends(answer_harm=harm_at(place, act)) as pair:
        handle, _ = pair.send(CHUNKS)
        _, got = pair.fetch(handle, degree=2)
        assert got == RIGHT


@pytest.mark.parametrize("every", [3000, 30_000])
def test_continuous_damage_fails_in_time_without_wrong_data(every: int) -> None:
    def harm(connection: int, went: int, data: bytes) -> bytes | None:
        spot = every - went % every
        return corrupt(data, spot) if spot < len(data) else data

    with transfer_ends(harm=harm) as pair:
        handle, _ = pair.send(CHUNKS)
        got: dict[int, tuple[object, ...]] = {}
        begun_s = time.monotonic()
        try:
            pair.fetch(handle, lambda chunk: got.__setitem__(chunk.layer, chunk_value(chunk)), deadline_s=2.0)
        except PotluckError:
            pass
        else:
            assert got == RIGHT
        assert time.monotonic() - begun_s < 2.0 + SLACK_S
        assert got.items() <= RIGHT.items()


def test_slow_trickle_of_data_ends_at_the_deadline() -> None:
    def harm(connection: int, went: int, data: bytes) -> bytes | None:
        time.sleep(0.3)  # Always something before anybody's patience is over, never enough.
        return data

    with transfer_ends(harm=harm) as pair:
        handle, _ = pair.send(CHUNKS * 4)
        begun_s = time.monotonic()
        with pytest.raises(TransferError, match="within its 0.7 s"):
            pair.fetch(handle, degree=1, deadline_s=0.7)
        assert time.monotonic() - begun_s < 0.7 + SLACK_S


def test_cut_connection_resends_only_its_unacknowledged_pieces() -> None:
    """Of three connections, one has to send a second piece; which one is not said."""
    with transfer_ends(harm=harm_at(_SECOND + _HEAD + 9, cut, on_any=True)) as pair:
        handle, _ = pair.send(CHUNKS)
        fetched, got = pair.fetch(handle, degree=3)
        assert got == RIGHT
        assert fetched.lost_connections <= 1, "none where others have brought all before it is noticed"
        again = sum(link.sent_again_bytes for link in pair.sender.links())
        assert 0 < again <= SMALL.most_unacked * SMALL.piece_bytes


def test_stream_layout_is_as_the_fault_tests_assume() -> None:
    """The places above are only worth something if the stream looks as assumed."""
    seen = bytearray()

    def watch(connection: int, went: int, data: bytes) -> bytes | None:
        seen.extend(data)
        return data

    with transfer_ends(harm=watch) as pair:
        handle, _ = pair.send(CHUNKS)
        pair.fetch(handle, degree=1)
    for place in ("piece: magic", "next frame"):
        assert seen[PLACES[place] : PLACES[place] + 4] == b"PLKV"
    assert seen[_FIRST : _FIRST + 64] == CHUNKS[0].data[:64]
    assert bytes(seen).endswith(
        frame(TransferEnd(len(CHUNKS), sum(len(p.data) + len(p.parameters) for p in CHUNKS)))
    )
    assert len(frame(Ack(0, 0))) == 32
    assert len(frame(Hello(bytes(16), bytes(32), "x" * 43, 0, 1, 1, 1))) == 142
