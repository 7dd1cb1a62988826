"""Requests to engines: reused and stale connections, and reported failures."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import sys
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from potluck.api.http import HttpRefusal
from potluck.gateway.http.connection_pool import ConnectionPool, EngineCall, NoResponse, fetch
from potluck.gateway.http.parser import Headers, ResponseReader
from potluck.gateway.values import Address

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class RecordingListener:
    def __init__(self) -> None:
        self.status = 0
        self.heard = b""
        self.why = ""
        self.ended = asyncio.Event()
        self.came = asyncio.Event()

    def head(self, status: int, headers: Headers) -> None:
        assert not self.ended.is_set()
        self.status = status

    def data(self, data: bytes) -> None:
        assert not self.ended.is_set()
        self.heard += data
        self.came.set()

    def done(self) -> None:
        assert not self.ended.is_set()
        self.ended.set()

    def lost(self, why: str) -> None:
        assert not self.ended.is_set()
        self.why = why
        self.ended.set()


def run_against_server(
    talk: Talk, work: Callable[[ConnectionPool, Address], Awaitable[None]], **options: float
) -> None:
    async def run() -> None:
        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await talk(reader, writer)
            writer.close()

        server = await asyncio.start_server(hold, "127.0.0.1", 0)
        connection_pool = ConnectionPool(**options)
        try:
            async with asyncio.timeout(120):
                await work(connection_pool, Address("127.0.0.1", server.sockets[0].getsockname()[1]))
        finally:
            await connection_pool.close()
            server.close()

    uvloop.run(run())


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.startswith(b"content-length: "):
            length = int(line[16:])
    return head + await reader.readexactly(length)


def test_connection_is_reused_and_the_request_is_complete() -> None:
    seen: list[bytes] = []
    visits: list[int] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(1)
        while True:
            seen.append(await request(reader))
            writer.write(OK)

    async def work(connection_pool: ConnectionPool, address: Address) -> None:
        for _ in range(3):
            got = await fetch(connection_pool, address, b"POST", b"/x?y", b"body", headers=[(b"a", b"b")])
            assert got == (200, b"hi")
        assert len(connection_pool) == 1
        assert connection_pool.rtt_s(Address("127.0.0.1", 1)) == 0.0, "nobody is connected there"
        assert 0 < connection_pool.rtt_s(address) < 60 or sys.platform != "linux"

    run_against_server(talk, work)
    assert len(visits) == 1
    assert seen[0].startswith(b"POST /x?y HTTP/1.1\r\nhost: 127.0.0.1:")
    assert seen[0].endswith(b"a: b\r\ncontent-length: 4\r\n\r\nbody")


def test_stale_connection_is_replaced_once_without_an_error() -> None:
    visits: list[int] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(1)
        await request(reader)
        writer.write(OK)
        if len(visits) == 1:
            await request(reader)  # And then it is closed without a word.

    async def work(connection_pool: ConnectionPool, address: Address) -> None:
        for _ in range(2):
            assert (await fetch(connection_pool, address, b"GET", b"/"))[1] == b"hi"

    run_against_server(talk, work)
    assert len(visits) == 2


def test_request_on_a_new_connection_that_fails_is_not_retried() -> None:
    visits: list[int] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(1)
        await request(reader)

    async def work(connection_pool: ConnectionPool, address: Address) -> None:
        with pytest.raises(NoResponse, match="closed the connection before its answer"):
            await fetch(connection_pool, address, b"GET", b"/")

    run_against_server(talk, work)
    assert len(visits) == 1


def test_idle_connections_are_closed() -> None:
    ended: list[int] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK)
        assert await reader.read(-1) == b""
        ended.append(1)

    async def work(connection_pool: ConnectionPool, address: Address) -> None:
        await fetch(connection_pool, address, b"GET", b"/")
        while len(connection_pool):
            await asyncio.sleep(0.01)

    run_against_server(talk, work, idle_s=0.0)
    assert ended == [1]


@pytest.mark.parametrize(
    ("said", "heard", "why"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhi", b"hi", "closed the connection in its answer"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
            b"hi",
            "closed the connection in its answer",
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"", "does not speak HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", b"", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n", b"", "does not speak HTTP"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", b"", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000, b"", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\nhi", b"hi", ""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"hi", ""),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"hi", ""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", ""),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", b"", ""),
    ],
)
def test_response_body_and_end_are_reported_for_each_framing(said: bytes, heard: bytes, why: str) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(said)
        await writer.drain()

    async def work(connection_pool: ConnectionPool, address: Address) -> None:
        ear = RecordingListener()
        connection_pool.send(address, b"GET", b"/", b"", ear)
        await ear.ended.wait()
        assert ear.heard == heard
        assert why in ear.why
        assert bool(why) == bool(ear.why)
        if why:
            assert f":{address.port} " in ear.why

    run_against_server(talk, work)


def test_cancelled_request_closes_its_connection_without_callbacks() -> None:
    ended = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nx")
        try:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.001)
        finally:
            ended.set()

    async def work(connection_pool: ConnectionPool, address: Address) -> None:
        ear = RecordingListener()
        call = connection_pool.send(address, b"GET", b"/", b"", ear)
        await ear.came.wait()
        call.cancel()
        heard = ear.heard
        await ended.wait()
        call.cancel()
        assert ear.heard == heard
        assert not ear.ended.is_set()
        connection_pool.send(address, b"GET", b"/", b"", RecordingListener()).cancel()
        while len(connection_pool):
            await asyncio.sleep(0.001)

    run_against_server(talk, work)


def test_paused_response_applies_backpressure_to_the_engine() -> None:
    sent = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 30000000\r\n\r\n")
        for _ in range(300):
            writer.write(b"x" * 100_000)
            await writer.drain()
            sent += 1

    async def work(connection_pool: ConnectionPool, address: Address) -> None:
        ear = RecordingListener()
        call = connection_pool.send(address, b"GET", b"/", b"", ear)
        await ear.came.wait()
        call.pause()
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.05)
        assert sent < 300
        call.resume()
        await ear.ended.wait()
        assert (len(ear.heard), ear.why) == (30_000_000, "")

    run_against_server(talk, work)


def test_unreachable_address_is_reported_after_send_returned() -> None:
    async def work() -> None:
        connection_pool = ConnectionPool(connections_max=0)
        ear = RecordingListener()
        connection_pool.send(Address("127.0.0.1", 9), b"GET", b"/", b"", ear)
        assert not ear.ended.is_set()
        await ear.ended.wait()
        assert "too many connections" in ear.why
        connection_pool = ConnectionPool()
        for host in ("127.0.0.1", "::1", "no such name"):
            with pytest.raises((NoResponse, ValueError)):
                await fetch(connection_pool, Address(host, 9), b"GET", b"/")
        with pytest.raises(ValueError, match="line end"):
            connection_pool.send(
                Address("127.0.0.1", 9), b"GET", b"/", b"", ear, headers=[(b"a", b"b\r\nc: d")]
            )
        with pytest.raises(ValueError, match="space"):
            connection_pool.send(Address("127.0.0.1", 9), b"GET", b"/ HTTP/1.1\r\n", b"", ear)
        await connection_pool.close()

    uvloop.run(work())


def test_fetch_enforces_a_size_and_a_time_limit() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/large" in await request(reader):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 100)
        await reader.read(-1)

    async def work(connection_pool: ConnectionPool, address: Address) -> None:
        with pytest.raises(NoResponse, match="larger than 50 bytes"):
            await fetch(connection_pool, address, b"GET", b"/large", most_bytes=50)
        with pytest.raises(NoResponse, match="0.05 s"):
            await fetch(connection_pool, address, b"GET", b"/never", within_s=0.05)

    run_against_server(talk, work)


ANSWER = (
    b"HTTP/1.1 200 OK\r\nA: b\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1;x\r\nd\r\n0\r\nT: u\r\n\r\n"
)


@given(
    st.sampled_from([ANSWER, OK, b"HTTP/1.1 103 Early\r\n\r\n" + OK]),
    st.lists(st.integers(0, 99), max_size=9),
)
def test_response_parsing_does_not_depend_on_chunk_boundaries(data: bytes, places: list[int]) -> None:
    marks = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    reader, got = ResponseReader(), b""
    for a, b in itertools.pairwise(marks):
        got += reader.feed(data[a:b])
    assert (reader.status, got, reader.complete, reader.has_extra_bytes) == (
        200,
        b"abcd" if data is ANSWER else b"hi",
        True,
        False,
    )


@given(st.binary(max_size=80))
def test_invalid_response_bytes_are_refused_or_awaited(data: bytes) -> None:
    reader = ResponseReader()
    try:
        reader.feed(data)
    except HttpRefusal:
        return
    assert not reader.complete or data.startswith(b"HTTP/1.")


def test_finished_request_leaves_no_references() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request(reader)
            writer.write(OK)

    async def work(connection_pool: ConnectionPool, address: Address) -> None:
        gc.collect()  # What other tests left is not this one's.
        for _ in range(20):
            ear = RecordingListener()
            connection_pool.send(address, b"POST", b"/", b"x" * 1000, ear)
            await ear.ended.wait()
        assert not [item for item in gc.get_objects() if type(item) is EngineCall]

    run_against_server(talk, work)
