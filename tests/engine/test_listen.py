"""The engine's port under attack: half-sent heads and bodies, clients that do not read, too many connections, no file
descriptors left. Whole requests are answered meanwhile, and the log stays short."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from face_kit import Client, face, make_service, played
from hypothesis import given
from hypothesis import strategies as st

from potluck.api.http import ConnectionLimits
from potluck.engine.server import control, listener
from potluck.engine.server.engine_service import RequestLimits

HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n{"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def _watched_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "WATCH_S", 0.05)


async def connect(one: Client, raw: bytes = b"", at: str = "127.0.0.1") -> Pair:
    port = int(one.url.rsplit(":", 1)[1])
    pair = await asyncio.open_connection("127.0.0.1", port, local_addr=(at, 0))
    pair[1].write(raw)
    await pair[1].drain()
    return pair


@asynccontextmanager
async def many(one: Client, count: int, raw: bytes) -> AsyncIterator[list[Pair]]:
    pairs = [await connect(one, raw) for _ in range(count)]
    try:
        yield pairs
    finally:
        for _, writer in pairs:
            writer.close()


async def told(pair: Pair) -> tuple[int, Any]:
    """What a server says that then hangs up; nothing counts as 0."""
    try:
        raw = await asyncio.wait_for(pair[0].read(), 60)
    except ConnectionError:
        raw = b""
    finally:
        pair[1].close()
    head, _, body = raw.partition(b"\r\n\r\n")
    return (int(head.split()[1]), json.loads(body)) if head else (0, None)


def dropped(one: Client) -> dict[str, int]:
    return dict(one.service.dropped)


def test_half_sent_requests_do_not_keep_others_out(caplog: pytest.LogCaptureFixture) -> None:
    """More than there is room for, of heads and of bodies, all held open."""

    async def scenario() -> None:
        async with face(make_service("full", RequestLimits(connections=20))) as one:
            async with many(one, 50, HALF_HEAD) as heads, many(one, 30, HALF_BODY):
                for _ in range(5):
                    async with asyncio.timeout(60):
                        assert (await one.get("/health"))[0] == 200
                        assert (await one.segment([1, 2, 3], max_tokens=2))[0] == 200
                status, body = await told(heads[0])
                assert (status, body["error"]["code"]) == (503, "overloaded")
            assert dropped(one).keys() == {"crowded_out"}
            assert dropped(one)["crowded_out"] >= 60

    played(scenario)
    assert len(caplog.records) == 1
    assert "Traceback" not in caplog.text


def test_heads_that_do_not_come_and_idle_connections_end() -> None:
    async def scenario() -> None:
        async with face(make_service("full", RequestLimits(head_s=0.3, idle_s=0.3))) as one:
            status, body = await told(await connect(one, HALF_HEAD))
            assert (status, body["error"]["type"]) == (408, "invalid_request_error")
            assert await told(await connect(one)) == (0, None)  # nothing was asked, nothing is said
            status, body = await told(await connect(one, HEALTH))
            assert (status, body) == (200, {"status": "ok"})
            # Half a head behind a whole request is late as well.
            pair = await connect(one, HEALTH)
            await pair[0].readuntil(b"}")
            pair[1].write(HALF_HEAD)
            assert (await told(pair))[0] == 408
            assert dropped(one) == {"late": 3, "idle": 1}

    played(scenario)


def test_a_head_that_does_not_end_is_not_kept() -> None:
    async def scenario() -> None:
        async with face(make_service("full")) as one:
            reader, writer = await connect(one, b"GET /health HTTP/1.1\r\n")
            line = b"X-%d: " + b"a" * 4000 + b"\r\n"
            for number in range(30):
                writer.write(line % number)
            status, _ = await told((reader, writer))
            assert status in (431, 0)  # a reset may overtake the answer
            assert dropped(one) == {"large": 1}
            # A body is no head, however much of it comes at once.
            body = b" " * 400_000 + b"{}"
            raw = (
                b"POST /drain HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            )
            assert (await told(await connect(one, raw % len(body) + body)))[0] == 200

    played(scenario)


def test_thousands_of_requests_in_one_connection_are_answered_in_turn() -> None:
    async def scenario() -> None:
        async with face(make_service("full")) as one:
            reader, writer = await connect(one)
            sending = asyncio.create_task(_send(writer, HEALTH * 2000))
            found = 0
            async with asyncio.timeout(120):
                assert (await one.get("/health"))[0] == 200
                while found < 2000:
                    found += (await reader.read(1 << 16)).count(b'{"status": "ok"}')
            await sending
            writer.close()
            assert dropped(one) == {}

    played(scenario)


async def _send(writer: asyncio.StreamWriter, raw: bytes) -> None:
    writer.write(raw)
    await writer.drain()


def test_a_client_that_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def large(_: web.Request) -> web.Response:
        return web.Response(body=b"x" * 30_000_000)

    monkeypatch.setattr(control, "status", large)

    async def scenario() -> None:
        limits = RequestLimits(stalled_s=0.2)
        async with face(make_service("full", limits)) as one:
            pair = await connect(one, b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(60):
                while dropped(one) != {"stalled": 1}:
                    await asyncio.sleep(0.02)
            pair[1].close()
            # One that reads, however slowly, gets all.
            reader, writer = await connect(one, b"GET /status HTTP/1.0\r\nHost: localhost\r\n\r\n")
            size = 0
            while part := await reader.read(1 << 20):
                size += len(part)
                await asyncio.sleep(0.01)
            assert size > 30_000_000
            writer.close()

    played(scenario)


def test_too_many_bytes_of_bodies_send_the_largest_away() -> None:
    async def scenario() -> None:
        limits = RequestLimits(bodies_bytes=1_000_000, body_bytes=900_000)
        async with face(make_service("full", limits)) as one:
            head = b"POST /drain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n"
            first = await connect(one, head + b" " * 600_000)
            while one.service.uploads.held_bytes < 500_000:
                await asyncio.sleep(0.01)
            second = await connect(one, head + b" " * 550_000)
            status = int((await first[0].readuntil(b"\r\n")).split()[1])
            assert status == 503
            assert (await one.segment([1, 2, 3], max_tokens=2))[0] == 200
            second[1].close()
            first[1].close()
            async with asyncio.timeout(60):
                while one.service.uploads.held_bytes:
                    await asyncio.sleep(0.01)
            status, body = await one.post("/v1/completions", b"x" * 900_001)
            assert (status, "larger" in body["error"]["message"]) == (413, True)

    played(scenario)


@pytest.mark.parametrize(("files", "most"), [(resource.RLIM_INFINITY, 1280), (1024, 768), (65536, 1280)])
def test_there_is_room_for_as_many_as_there_are_files_for(
    files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))

    async def scenario() -> None:
        started = listener.EngineListener([], web.Server(control.health), RequestLimits(), Counter())  # type: ignore[arg-type]
        assert started.crowd.most == most
        await started.close()

    played(scenario)


class Starved(socket.socket):
    """A listener in a process that has no file descriptor left, for a while."""

    tries = 0

    def accept(self) -> tuple[socket.socket, Any]:
        Starved.tries += 1
        if Starved.tries <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_file_descriptors_it_neither_spins_nor_floods_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bound = listener._bound

    async def starved(host: str, port: int) -> list[socket.socket]:
        return [Starved(fileno=each.detach()) for each in await bound(host, port)]

    monkeypatch.setattr(listener, "_bound", starved)

    async def scenario() -> None:
        async with face(make_service("full")) as one:
            assert (await one.get("/health"))[0] == 200
            assert dropped(one) == {"no_files": 3}
            assert Starved.tries <= 3 + 2  # the connection, and that there is no other

    caplog.set_level(logging.INFO)
    played(scenario)
    assert len(caplog.records) == 1
    assert "Traceback" not in caplog.text


def test_when_all_are_busy_the_next_is_told_and_a_stop_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        await go_on.wait()
        return web.Response(text="done")

    monkeypatch.setattr(control, "status", slow)
    monkeypatch.setattr(listener, "SHUTDOWN_S", 600.0)

    async def scenario() -> None:
        async with face(make_service("full", RequestLimits(connections=4))) as one:
            raw = b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            async with many(one, 4, raw) as pairs:
                while one.opened.listener.crowd.oldest() is not None:
                    await asyncio.sleep(0.01)
                status, _ = await told(await connect(one, raw))
                assert status in (503, 0)
                assert dropped(one) == {"full": 1}
                go_on.set()
                for reader, _ in pairs:
                    assert (await reader.read()).endswith(b"done")
            async with many(one, 3, HALF_HEAD), asyncio.timeout(30):  # nobody waits for what was half sent
                await one.opened.close()

    played(scenario)


@given(st.lists(st.tuples(st.sampled_from("cwpl"), st.integers(0, 9)), max_size=60))
def test_who_gives_way_waits_longest_at_the_address_with_the_most_that_wait(
    moves: list[tuple[str, int]],
) -> None:
    crowd: ConnectionLimits[int] = ConnectionLimits(5)
    waiting: dict[int, None] = {}  # in the order of their coming
    present: set[int] = set()
    for move, key in moves:
        if move == "c" and key not in present:
            crowd.came(key, str(key % 3))
            waiting[key] = None
            present.add(key)
        elif move == "w":
            crowd.works(key)
            waiting.pop(key, None)
        elif move == "p" and key in present and key not in waiting:
            crowd.waits(key)
            waiting[key] = None
        elif move == "l":
            crowd.left(key)
            waiting.pop(key, None)
            present.discard(key)
        counts = [sum(each % 3 == peer for each in waiting) for peer in range(3)]
        gives_way = crowd.oldest()
        if gives_way is None:
            assert not waiting
        else:
            assert counts[gives_way % 3] == max(counts)
            assert gives_way == next(each for each in waiting if each % 3 == gives_way % 3)
        assert (len(crowd), set(crowd)) == (len(present), present)
        assert crowd.full == (len(present) >= 5)
