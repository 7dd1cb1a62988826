"""Client connections over real sockets: order, timeouts and limits."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import uvloop

from potluck.gateway.http.limits import HttpLimits
from potluck.gateway.http.server import ClientListener, Exchange, open_port

LIMITS = HttpLimits(body_bytes=200_000, linger_s=0.4)
GET = b"GET %b HTTP/1.1\r\nHost: here\r\n\r\n"


class ScriptedHandler:
    """Answers by path, and keeps what it cannot answer at once."""

    def __init__(self) -> None:
        self.kept: list[Exchange] = []
        self.gone: list[bytes] = []
        self.room: list[bool] = []

    def __call__(self, exchange: Exchange) -> None:
        exchange.on_gone = lambda: self.gone.append(exchange.path)
        exchange.on_room = self.room.append
        if exchange.path == b"/echo":
            exchange.reply(200, exchange.body, [(b"content-type", b"text/plain")])
        elif exchange.path == b"/stream":
            exchange.begin(200)
            for piece in (b"one", b"", b"two"):
                exchange.write(piece)
            exchange.end()
        elif exchange.path == b"/fault":
            raise RuntimeError("a fault of ours")
        elif exchange.path == b"/inject":
            exchange.reply(200, b"", [(b"x", b"a\r\nset-cookie: b")])
        else:
            self.kept.append(exchange)

    async def one(self) -> Exchange:
        while not self.kept:
            await asyncio.sleep(0.001)
        return self.kept.pop(0)


Work = Callable[[ClientListener, ScriptedHandler], Awaitable[None]]


def run_with_server(work: Work, limits: HttpLimits = LIMITS) -> None:
    async def run() -> None:
        brain_loop = ScriptedHandler()
        listener = await open_port(brain_loop, "127.0.0.1", 0, limits=limits)
        try:
            async with asyncio.timeout(120):
                await work(listener, brain_loop)
        finally:
            await listener.close(0.1)
        assert len(listener) == 0

    uvloop.run(run())


async def connect(listener: ClientListener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(listener.address.rsplit(":", 1)[1]))


async def ask(listener: ClientListener, data: bytes) -> bytes:
    """Send it, and read until the other side ends."""
    reader, writer = await connect(listener)
    writer.write(data)
    got = await reader.read(-1)
    writer.close()
    return got


def without_dates(answers: bytes) -> bytes:
    return re.sub(rb"date: [^\r]*\r\n", b"", answers)


CLOSING = b"GET /echo HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"


def test_responses_have_the_order_of_pipelined_requests() -> None:
    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        reader, writer = await connect(listener)
        body = b"POST /echo HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\n"
        writer.write(GET % b"/later" + body + b"hi" + GET % b"/stream" + CLOSING)
        first = await brain_loop.one()
        assert (first.method, first.path, first.query, first.peer) == (b"GET", b"/later", b"", "127.0.0.1")
        assert brain_loop.kept == []
        first.reply(200, b"now")
        assert without_dates(await reader.read(-1)) == (
            b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nnow"
            b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nhi"
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
            b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        )
        writer.close()

    run_with_server(work)


def test_thousands_of_small_requests_in_one_read_are_answered() -> None:
    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        assert (await ask(listener, GET % b"/echo" * 3000 + CLOSING)).count(b"200 OK") == 3001

    run_with_server(work)


def test_head_response_has_a_length_without_a_body_and_http_1_0_closes() -> None:
    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        head = b"HEAD /echo HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"
        assert without_dates(await ask(listener, head)).endswith(
            b"content-length: 2\r\nconnection: close\r\n\r\n"
        )
        streamed = b"HEAD /stream HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
        assert without_dates(await ask(listener, streamed)).endswith(b"connection: close\r\n\r\n")
        old = without_dates(await ask(listener, b"GET /stream HTTP/1.0\r\n\r\n"))
        assert old == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nonetwo"

    run_with_server(work)


def test_body_is_awaited_after_a_100_continue() -> None:
    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        reader, writer = await connect(listener)
        writer.write(
            b"POST /echo HTTP/1.1\r\nHost: here\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await reader.readuntil(b"abc")).startswith(b"HTTP/1.1 200")
        writer.close()

    run_with_server(work)


@pytest.mark.parametrize("half", [False, True])
def test_client_disconnect_is_reported_once(half: bool) -> None:
    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        for path, begins in ((b"/a", False), (b"/b", True)):
            _, writer = await connect(listener)
            writer.write(GET % path)
            exchange = await brain_loop.one()
            if begins:
                exchange.begin(200)
                exchange.write(b"x")
            if half:
                writer.write_eof()
            else:
                writer.close()
            while path not in brain_loop.gone:
                await asyncio.sleep(0.001)
            exchange.write(b"x")
            exchange.end() if begins else exchange.reply(200, b"")
            writer.close()
        await asyncio.sleep(0.01)
        assert brain_loop.gone == [b"/a", b"/b"]

    run_with_server(work)


def test_dropped_exchange_closes_its_connection_without_callbacks() -> None:
    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        reader, writer = await connect(listener)
        writer.write(GET % b"/a")
        exchange = await brain_loop.one()
        exchange.begin(200)
        exchange.write(b"x")
        await asyncio.sleep(0.01)
        exchange.drop()
        assert (await reader.read(-1)).endswith(b"1\r\nx\r\n")
        assert brain_loop.gone == []
        writer.close()

    run_with_server(work)


def test_slow_reader_pauses_the_writer_and_is_disconnected_after_the_stall_limit() -> None:
    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        reader, writer = await connect(listener)
        writer.write(GET % b"/a")
        exchange = await brain_loop.one()
        exchange.begin(200)
        while False not in brain_loop.room:
            exchange.write(b"x" * 50_000)
            await asyncio.sleep(0)
        while True not in brain_loop.room:
            await reader.read(1_000_000)
        brain_loop.room.clear()
        while False not in brain_loop.room:
            exchange.write(b"x" * 50_000)
            await asyncio.sleep(0)
        while not brain_loop.gone:
            await asyncio.sleep(0.01)
        assert listener.dropped["stalled"] == 1
        writer.close()

    run_with_server(work, replace(LIMITS, stalled_s=0.2))


async def status_of(listener: ClientListener, data: bytes) -> int:
    return int((await ask(listener, data)).split(b" ")[1])


def test_refused_request_gets_a_response_before_the_connection_closes() -> None:
    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        long = b"POST /echo HTTP/1.1\r\nHost: here\r\nContent-Length: 300000\r\n\r\n" + b"x" * 300_000
        assert await status_of(listener, long) == 413
        assert await status_of(listener, b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n" + CLOSING) == 400
        assert await status_of(listener, b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 1_000_000) == 431
        assert await status_of(listener, b"GET /" + b"y" * 20_000) == 414
        got = await ask(listener, b"\x16\x03\x01\x02\r\n\r\n")
        assert b'"type": "invalid_request_error"' in got
        assert b"x-request-id: req-" in got
        assert b"connection: close" in got

    run_with_server(work)


def test_slow_heads_and_bodies_get_408_and_idle_connections_are_closed() -> None:
    limits = replace(LIMITS, head_s=0.1, body_s=0.1, idle_s=0.1, body_bytes_per_s=10_000_000)

    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        assert await status_of(listener, b"GET / HT") == 408
        assert await status_of(listener, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc") == 408
        assert await ask(listener, b"") == b""
        assert (await ask(listener, GET % b"/echo")).startswith(b"HTTP/1.1 200")

    run_with_server(work, limits)


def test_large_body_has_time_in_proportion_to_its_size() -> None:
    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        reader, writer = await connect(listener)
        writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n")
        for _ in range(6):
            writer.write(b"x" * 10_000)
            await asyncio.sleep(0.1)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()

    run_with_server(work, replace(LIMITS, body_s=0.2, body_bytes_per_s=50_000))


def test_idle_connection_is_closed_at_the_connection_limit_and_a_busy_one_is_not() -> None:
    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        first, writer = await connect(listener)
        writer.write(GET % b"/a")
        busy = await brain_loop.one()
        waiting, other = await connect(listener)
        other.write(b"GET / HT")
        await asyncio.sleep(0.02)
        reader, third = await connect(listener)
        third.write(GET % b"/b")
        assert b"503" in await waiting.read(-1)
        also = await brain_loop.one()
        assert b" 503 " in await ask(listener, b"")
        busy.reply(200, b"a")
        also.reply(200, b"b")
        assert (await first.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        for item in (writer, other, third):
            item.close()

    run_with_server(work, replace(LIMITS, connections=2))


def test_largest_body_is_refused_when_all_bodies_exceed_the_memory_limit() -> None:
    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        small, one = await connect(listener)
        large, two = await connect(listener)
        head = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\n\r\n"
        one.write(head + b"x" * 3000)
        two.write(head + b"x" * 6000)
        await asyncio.sleep(0.02)
        one.write(b"x" * 2000)
        assert b" 503 " in await large.readuntil(b"\r\n")
        one.write(b"x" * 4000)
        assert b" 200 " in await small.readuntil(b"\r\n")
        one.close()
        two.close()

    run_with_server(work, replace(LIMITS, bodies_bytes=10_000))


def test_closing_port_finishes_responses_with_connection_close() -> None:
    async def run() -> None:
        brain_loop = ScriptedHandler()
        listener = await open_port(brain_loop, "127.0.0.1", 0, limits=LIMITS)
        idle, one = await connect(listener)
        reader, two = await connect(listener)
        begun, three = await connect(listener)
        two.write(GET % b"/a")
        first = await brain_loop.one()
        three.write(GET % b"/b")
        second = await brain_loop.one()
        second.begin(200)
        closing = asyncio.create_task(listener.close(10))
        assert await idle.read(-1) == b""
        first.reply(200, b"a")
        assert b"connection: close" in await reader.read(-1)
        second.write(b"b")
        second.end()
        assert (await begun.read(-1)).endswith(b"1\r\nb\r\n0\r\n\r\n")
        await closing
        with pytest.raises(OSError):
            await connect(listener)
        for item in (one, two, three):
            item.close()

    uvloop.run(run())


def test_closing_port_disconnects_requests_beyond_the_grace_time() -> None:
    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        reader, writer = await connect(listener)
        writer.write(GET % b"/a")
        await brain_loop.one()
        await listener.close(0.05)
        assert await reader.read(-1) == b""
        assert brain_loop.gone == [b"/a"]
        writer.close()

    run_with_server(work)


def test_handler_exception_gives_one_500_and_header_injection_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        got = await ask(listener, GET % b"/fault" + GET % b"/inject" + CLOSING)
        assert [int(line[9:12]) for line in re.findall(rb"HTTP/1.1 \d+", got)] == [500, 500, 200]
        assert b"set-cookie" not in got
        assert b"RuntimeError" not in got

    with caplog.at_level(logging.CRITICAL):
        run_with_server(work)


def test_random_request_bytes_cause_no_handler_exception(caplog: pytest.LogCaptureFixture) -> None:
    whole = (
        b"POST /echo HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        + GET % b"/stream"
    )

    async def work(listener: ClientListener, brain_loop: ScriptedHandler) -> None:
        draw = random.Random(7)

        async def one() -> None:
            data = bytearray(whole * draw.randint(1, 3))
            for _ in range(draw.randint(0, 6)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            if draw.random() < 0.3:
                data = bytearray(draw.randbytes(draw.randint(1, 400)))
            reader, writer = await connect(listener)
            half = draw.randrange(len(data))
            writer.write(bytes(data[:half]))
            await asyncio.sleep(0)
            writer.write(bytes(data[half:]))
            if draw.random() < 0.8:
                writer.write_eof()
                assert b" 500 " not in await reader.read(-1)
            writer.close()

        for _ in range(20):
            await asyncio.gather(*(one() for _ in range(15)))

    run_with_server(work)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
