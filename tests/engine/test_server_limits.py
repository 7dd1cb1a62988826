"""The face under bad conditions: odd bodies, slow and stalled clients, a hung loop, failures in the middle of an
answer, start-up errors. Everybody is answered, nothing says more than it should."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientPayloadError, ClientSession, ServerDisconnectedError, web
from engine_models import KINDS, prompt
from hypothesis import given
from hypothesis import strategies as st
from reference_model import ReferenceModel
from server_helpers import NAME, Client, engine_client, letters_of, make_service, tokens_in

from potluck.api.http import ConnectionLimits, HttpRefusal, ServedNames, check_origin
from potluck.cli.main import run
from potluck.engine.model.checkpoint import RandomSource, save
from potluck.engine.serve import serve_all
from potluck.engine.server import control, engine_app, http_connection, openai_routes, request_channels
from potluck.engine.server.engine_service import EngineService
from potluck.engine.server.http_connection import RequestLimits

TOKENS = prompt(40)
Handling = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": ["a", "b\\uDFFFc"]}',
        b'{"model": "\\udead", "prompt": "a"}',
        b'{"model": "tiny", "prompt": "a", "stop": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"model": "tiny", "prompt": "a", "user": ' + b'{"a":' * 3000 + b'"\\ud801"' + b"}" * 3000 + b"}",
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "max_tokens": 1e3}',
        b'{"model": "tiny", "prompt": [[1], "x", 3]}',
        b"\xff\xfe",
        b"",
    ],
)
async def test_odd_bodies_are_refused_in_one_line(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with engine_client(make_service("full")) as one:
        status, reply = await one.post("/v1/completions", body)
        assert status in (400, 404), reply
        assert "\n" not in reply["error"]["message"]
        assert (await one.post("/v1/completions", b'{"model": "tiny", "prompt": "\\ud83d\\ude00a"}'))[
            0
        ] == 200
    assert "Traceback" not in caplog.text


async def test_large_body_is_read_and_checked_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    loops_thread = threading.current_thread().name
    for name in ("read_large_object", "completion_of", "chat_of"):
        read = getattr(openai_routes, name)

        def spied(*given: Any, read: Any = read) -> Any:
            threads.add(threading.current_thread().name)
            return read(*given)

        monkeypatch.setattr(openai_routes, name, spied)
    monkeypatch.setattr(openai_routes, "parse_object", lambda raw: pytest.fail("parsed at once"))
    filler = {"user": "u" * 40_000}
    async with engine_client(make_service("full")) as one:
        body = {"model": NAME, "prompt": TOKENS, "max_tokens": 1, **filler}
        status, _ = await one.post("/v1/completions", json.dumps(body).encode())
        assert status == 200
        body = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **filler}
        status, _ = await one.post("/v1/chat/completions", json.dumps(body).encode())
        assert status == 200
        for abusive in (b'{"logit_bias":{%b}}' % (b'"1":1,' * 100_000), b'{"model":"%b"}' % (b"m" * 200_000)):
            status, reply = await one.post("/v1/completions", abusive)
            assert status in (400, 404)
            assert len(reply["error"]["message"]) < 500
    assert threads
    assert loops_thread not in threads


async def served(service: EngineService, visit: Callable[[str], Awaitable[None]]) -> None:
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve_all([service], "127.0.0.1", 0, api_key=None, ready=address.set_result)
    )
    try:
        await visit(await asyncio.wait_for(address, 60))
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_disconnected_client_ends_all_its_requests(stream: bool, n: int) -> None:
    service = make_service("full", max_running=4)
    body = {"model": NAME, "prompt": letters_of(TOKENS), "max_tokens": 400, "ignore_eos": True}

    async def visit(address: str) -> None:
        async with ClientSession() as session:
            post = asyncio.create_task(
                session.post(address + "/v1/completions", json={**body, "stream": stream, "n": n})
            )
            while service.counters.output_tokens < 4 * n:
                await asyncio.sleep(0.005)
            post.cancel()
            for reply in await asyncio.gather(post, return_exceptions=True):
                if not isinstance(reply, BaseException):
                    reply.close()
            while not await service.hub.ask(lambda loop, _: loop.idle):
                await asyncio.sleep(0.005)
        assert service.counters.ended == {"cancelled": n}
        assert service.counters.output_tokens < 400 * n
        assert service.open_requests == 0

    await served(service, visit)


BROKEN = [
    b"GARBAGE\r\n\r\n",
    b"GET /status HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    b"POST /segments HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /segments HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /segments HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
]


async def test_clients_that_send_invalid_http_get_400_without_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replies: list[bytes] = []

    async def visit(address: str) -> None:
        host, port = address.removeprefix("http://").split(":")
        for raw in BROKEN:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(raw)
            replies.append(await asyncio.wait_for(reader.read(), 60))
            writer.close()

    await served(make_service("full"), visit)
    assert [reply.split(b" ")[1] for reply in replies] == [b"400"] * len(BROKEN)
    assert not any(b"Traceback" in reply for reply in replies)
    assert "Traceback" not in caplog.text


async def test_api_key_of_any_bytes_is_compared_and_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = "the-secret-of-this-engine"

    async with engine_client(make_service("full"), key=key) as one:
        assert (await one.segment(TOKENS, max_tokens=2))[0] == 200
        assert (await one.segment(TOKENS, max_tokens=0))[0] == 400
        for wrong in (
            b"Bearer \xff\xfe",
            b"Basic " + key.encode(),
            b"Bearer " + key.encode() + b"x",
            b"Bearer",
        ):
            raw = (
                b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: "
                + wrong
                + b"\r\n\r\n"
            )
            host, port = one.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(raw)
            reply = await reader.read()
            writer.close()
            assert b" 401 " in reply.splitlines()[0]
            assert key.encode() not in reply
    assert key not in caplog.text


async def test_engine_page_loads_nothing_external_and_needs_no_key() -> None:
    async with (
        engine_client(make_service("full"), key="a secret") as one,
        one.session.get(one.url + "/") as reply,
    ):
        text = await reply.text()
        assert reply.status == 200
        assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
        assert not re.search(r"https?://|@import|src=", text)
        assert NAME not in text


async def test_incomplete_body_gets_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "BODY_S", 0.1)

    async with engine_client(make_service("full")) as one:
        host, port = one.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /segments HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 60)
        writer.close()


async def _begun(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"the beginning")
    return response


async def _stalls(request: web.Request) -> web.StreamResponse:
    await _begun(request)
    await asyncio.sleep(60)
    raise AssertionError("nobody waits so long")


async def _fails(request: web.Request) -> web.StreamResponse:
    await _begun(request)
    raise KeyError("a bug")


async def _hangs(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits so long")


@pytest.mark.parametrize("handler", [_stalls, _fails])
async def test_response_interrupted_midway_breaks_its_connection_and_the_server_serves_on(
    handler: Handling, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client would take an error body in the middle, or a clean end, for part of a complete response."""
    monkeypatch.setattr(engine_app, "STALLED_S", 0.1)
    monkeypatch.setattr(openai_routes, "models", handler)

    async with engine_client(make_service("full", RequestLimits(deadline_s=0.2))) as one:
        with pytest.raises((ClientPayloadError, ServerDisconnectedError, ConnectionError)):
            await one.get("/v1/models")
        assert (await one.get("/status"))[0] == 200
    assert ("a bug" in caplog.text) == (handler is _fails)


async def test_hanging_handler_is_answered_with_504(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_app, "STALLED_S", 0.1)
    monkeypatch.setattr(openai_routes, "models", _hangs)

    async with engine_client(make_service("full", RequestLimits(deadline_s=0.2))) as one:
        status, body = await one.get("/v1/models")
        assert (status, body["error"]["code"]) == (504, "deadline")


async def test_hanging_engine_loop_is_answered_with_504(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_channels, "LAST_WORD_S", 0.1)
    go_on = threading.Event()

    service = make_service("full", RequestLimits(deadline_s=0.3))
    async with engine_client(service) as one:
        begin = service._loop.executor.begin

        def slow(*args: object) -> object:
            go_on.wait(20)
            return begin(*args)  # type: ignore[arg-type]

        service._loop.executor.begin = slow  # type: ignore[method-assign, assignment]
        began = time.monotonic()
        replies = await asyncio.gather(*(one.segment(TOKENS, max_tokens=2) for _ in range(2)))
        assert {status for status, _ in replies} == {504}
        assert time.monotonic() - began < 10
        go_on.set()
        await one.until_idle()
        assert tokens_in((await one.segment(TOKENS, max_tokens=2))[1])


@pytest.mark.parametrize("n", [1, 3])
async def test_failed_stream_ends_with_an_error_event(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when several answers are mixed, and while one of them is being written: the client must not mistake it
    for a lost connection."""
    write = web.StreamResponse.write

    async def slowly(self: web.StreamResponse, data: bytes) -> None:
        await write(self, data)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(web.StreamResponse, "write", slowly)

    service = make_service("full")
    async with engine_client(service) as one:
        begin, calls = service._loop.executor.begin, []

        def broken(*args: object) -> object:
            calls.append(1)
            if len(calls) > 6:
                raise RuntimeError("out of order")
            return begin(*args)  # type: ignore[arg-type]

        service._loop.executor.begin = broken  # type: ignore[method-assign, assignment]
        body = {"model": NAME, "prompt": letters_of(TOKENS), "max_tokens": 50, "n": n, "stream": True}
        status, parts = await one.post("/v1/completions", body)
        assert status == 200
        assert "out of order" in parts[-1]["error"]["message"]
        assert sum("choices" in part for part in parts) >= n
        service._loop.executor.begin = begin  # type: ignore[method-assign]
        await one.until_idle()
        assert (await one.post("/v1/completions", {**body, "stream": False}))[0] == 200


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    save(folder, KINDS["full"], ReferenceModel(KINDS["full"], RandomSource(1)).tensors())
    return folder


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "banana"], "--device"),
        (["--kv-blocks", "1000000000000"], "lower --kv-blocks"),
        (["--token-budget", "3"], "--token-budget"),
        (["--emulate", "A10"], "emulate"),
        (["--emulate", "A10:llama-3.1-70b"], "does not fit"),
        (["--api-key-file", "nowhere"], "--api-key-file"),
        (["--host", "no such host"], "no such host"),
    ],
)
def test_start_up_error_is_one_line(
    options: list[str],
    says: str,
    stored: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POTLUCK_API_KEY", "set, so that nothing is said about it")
    assert run(["engine", "serve", "--model", str(stored), "--port", "0", *options]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("potluck: error: ")
    assert says in shown
    assert len(shown.splitlines()) == 1


def test_used_port_is_a_start_up_error(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["engine", "serve", "--model", str(stored), "--port", str(port)]) == 2
    assert f"127.0.0.1:{port} cannot be used" in capsys.readouterr().err


def test_invalid_tokenizer_file_is_a_start_up_error(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for file in stored.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "tokenizer.json").write_text("{}")
    assert run(["engine", "serve", "--model", str(folder), "--port", "0"]) == 2
    shown = capsys.readouterr().err
    assert "is not a tokenizer" in shown
    assert len(shown.splitlines()) == 1


HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n{"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def _watched_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "CHECK_INTERVAL_S", 0.05)


async def connect(one: Client, raw: bytes = b"", at: str = "127.0.0.1") -> Pair:
    pair = await asyncio.open_connection("127.0.0.1", int(one.url.rsplit(":", 1)[1]), local_addr=(at, 0))
    pair[1].write(raw)
    await pair[1].drain()
    return pair


@asynccontextmanager
async def many_connections(one: Client, count: int, raw: bytes) -> AsyncIterator[list[Pair]]:
    pairs = [await connect(one, raw) for _ in range(count)]
    try:
        yield pairs
    finally:
        for _, writer in pairs:
            writer.close()


async def last_response(pair: Pair) -> tuple[int, Any]:
    """What a server says that then hangs up; nothing counts as 0."""
    try:
        raw = await asyncio.wait_for(pair[0].read(), 60)
    except ConnectionError:
        raw = b""
    finally:
        pair[1].close()
    head, _, body = raw.partition(b"\r\n\r\n")
    return (int(head.split()[1]), json.loads(body)) if head else (0, None)


def dropped_counts(one: Client) -> dict[str, int]:
    return dict(one.service.dropped)


async def test_half_sent_requests_do_not_block_others(caplog: pytest.LogCaptureFixture) -> None:
    """More than there is room for, of heads and of bodies, all held open."""

    async with engine_client(make_service("full", RequestLimits(connections=20))) as one:
        async with many_connections(one, 50, HALF_HEAD) as heads, many_connections(one, 30, HALF_BODY):
            for _ in range(5):
                async with asyncio.timeout(60):
                    assert (await one.get("/health"))[0] == 200
                    assert (await one.segment([1, 2, 3], max_tokens=2))[0] == 200
            status, body = await last_response(heads[0])
            assert (status, body["error"]["code"]) == (503, "overloaded")
        assert dropped_counts(one).keys() == {"crowded_out"}
        assert dropped_counts(one)["crowded_out"] >= 60
    assert len(caplog.records) == 1
    assert "Traceback" not in caplog.text


async def test_incomplete_heads_and_idle_connections_time_out() -> None:
    async with engine_client(make_service("full", RequestLimits(head_s=0.3, idle_s=0.3))) as one:
        status, body = await last_response(await connect(one, HALF_HEAD))
        assert (status, body["error"]["type"]) == (408, "invalid_request_error")
        assert await last_response(await connect(one)) == (0, None)  # nothing was asked, nothing is said
        status, body = await last_response(await connect(one, HEALTH))
        assert (status, body) == (200, {"status": "ok"})
        # Half a head behind a whole request is late as well.
        pair = await connect(one, HEALTH)
        await pair[0].readuntil(b"}")
        pair[1].write(HALF_HEAD)
        assert (await last_response(pair))[0] == 408
        assert dropped_counts(one) == {"late": 3, "idle": 1}


async def test_endless_head_is_refused() -> None:
    async with engine_client(make_service("full")) as one:
        reader, writer = await connect(one, b"GET /health HTTP/1.1\r\n")
        for number in range(200):
            writer.write(b"X-%d: " % number + b"a" * 4000 + b"\r\n")
        status = (await asyncio.wait_for(reader.read(), 60)).split(b" ")[1:2]
        writer.close()
        assert status in ([b"400"], [])  # a reset may overtake the answer
        # A body is no head, however much of it comes at once.
        body = b" " * 400_000 + b"{}"
        raw = b"POST /drain HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        assert (await last_response(await connect(one, raw % len(body) + body)))[0] == 200


async def test_thousands_of_pipelined_requests_are_answered_in_order() -> None:
    async with engine_client(make_service("full")) as one:
        reader, writer = await connect(one)
        sending = asyncio.create_task(_send(writer, HEALTH * 2000))
        result = 0
        async with asyncio.timeout(120):
            assert (await one.get("/health"))[0] == 200
            while result < 2000:
                result += (await reader.read(1 << 16)).count(b'{"status": "ok"}')
        await sending
        writer.close()
        assert dropped_counts(one) == {}


async def _send(writer: asyncio.StreamWriter, raw: bytes) -> None:
    writer.write(raw)
    await writer.drain()


async def test_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def large(_: web.Request) -> web.Response:
        return web.Response(body=b"x" * 30_000_000)

    monkeypatch.setattr(control, "status", large)

    limits = RequestLimits(stalled_s=0.2)
    async with engine_client(make_service("full", limits)) as one:
        pair = await connect(one, b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(60):
            while dropped_counts(one) != {"stalled": 1}:
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


async def test_largest_body_is_refused_beyond_the_memory_of_all_bodies() -> None:
    limits = RequestLimits(bodies_bytes=1_000_000, body_bytes=900_000)
    async with engine_client(make_service("full", limits)) as one:
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


@pytest.mark.parametrize(("files", "most"), [(resource.RLIM_INFINITY, 1280), (1024, 768), (65536, 1280)])
async def test_connection_limit_follows_the_open_file_limit(
    files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))

    listener = http_connection.EngineListener(web.Server(control.health), {}, RequestLimits(), Counter())  # type: ignore[arg-type]
    assert listener.open_connections.most == most


async def test_connection_beyond_the_limit_gets_503_and_shutdown_is_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        await go_on.wait()
        return web.Response(text="done")

    monkeypatch.setattr(control, "status", slow)
    monkeypatch.setattr(engine_app, "SHUTDOWN_S", 600.0)

    async with engine_client(make_service("full", RequestLimits(connections=4))) as one:
        raw = b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        async with many_connections(one, 4, raw) as pairs:
            while one.opened.listener.open_connections.longest_waiting() is not None:
                await asyncio.sleep(0.01)
            status, _ = await last_response(await connect(one, raw))
            assert status in (503, 0)
            assert dropped_counts(one) == {"full": 1}
            go_on.set()
            for reader, _ in pairs:
                assert (await reader.read()).endswith(b"done")
        async with (
            many_connections(one, 3, HALF_HEAD),
            asyncio.timeout(30),
        ):  # nobody waits for what was half sent
            await one.opened.close()


@given(st.lists(st.tuples(st.sampled_from("cwpl"), st.integers(0, 9)), max_size=60))
def test_longest_idle_connection_of_the_busiest_address_is_closed_first(
    moves: list[tuple[str, int]],
) -> None:
    crowd: ConnectionLimits[int] = ConnectionLimits(5)
    waiting: dict[int, None] = {}  # in the order of their coming
    present: set[int] = set()
    for move, key in moves:
        if move == "c" and key not in present:
            crowd.add(key, str(key % 3))
            waiting[key] = None
            present.add(key)
        elif move == "w":
            crowd.mark_busy(key)
            waiting.pop(key, None)
        elif move == "p" and key in present and key not in waiting:
            crowd.mark_waiting(key)
            waiting[key] = None
        elif move == "l":
            crowd.remove(key)
            waiting.pop(key, None)
            present.discard(key)
        counts = [sum(item % 3 == peer for item in waiting) for peer in range(3)]
        gives_way = crowd.longest_waiting()
        if gives_way is None:
            assert not waiting
        else:
            assert counts[gives_way % 3] == max(counts)
            assert gives_way == next(item for item in waiting if item % 3 == gives_way % 3)
        assert (len(crowd), set(crowd)) == (len(present), present)
        assert crowd.is_full == (len(present) >= 5)


HERE = ServedNames(loopback=True)
OPEN = ServedNames(loopback=False, names=frozenset({"gpu7"}))
KEYED = ServedNames(loopback=False, keyed=True)
NAMED = ServedNames(loopback=True, names=frozenset({"llm.example"}))

# fmt: off
FINE = [
    (HERE, "POST", {"Host": "127.0.0.1:8000"}),
    (HERE, "POST", {"Host": "LocalHost:9"}),
    (HERE, "POST", {"Host": "localhost."}),
    (HERE, "POST", {"Host": "[::1]:8000", "Origin": "http://[::1]:8000"}),
    (HERE, "POST", {"Host": "127.9.9.9"}),
    (HERE, "POST", {}),
    (HERE, "POST", {"Host": "localhost:8000", "Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"}),
    (HERE, "POST", {"Host": "localhost:8000", "Sec-Fetch-Site": "none"}),
    (HERE, "GET", {"Host": "localhost:8000", "Origin": "https://example.org", "Sec-Fetch-Site": "cross-site"}),
    (NAMED, "POST", {"Host": "llm.example", "Origin": "https://llm.example"}),
    (NAMED, "POST", {"Host": "127.0.0.1:8000", "Origin": "https://llm.example"}),
    (OPEN, "POST", {"Host": "engine-3.cluster.local:8000"}),
    (OPEN, "POST", {"Host": "10.0.0.5:8000", "Origin": "http://10.0.0.5:8000"}),
    (OPEN, "POST", {"Host": "gpu7:8000", "Origin": "http://gpu7:8000"}),
    (KEYED, "POST", {"Host": "llm.example", "Origin": "https://llm.example"}),
]
# fmt: on
NOT = [
    # A form or a script of another page, also one on another port of this machine.
    (HERE, "POST", {"Host": "localhost:8000", "Origin": "https://example.org"}, "cross_origin"),
    (HERE, "POST", {"Host": "localhost:8000", "Origin": "http://localhost:3000"}, "cross_origin"),
    (HERE, "POST", {"Host": "localhost:8000", "Origin": "null"}, "cross_origin"),
    (HERE, "POST", {"Host": "localhost:8000", "Origin": ""}, "cross_origin"),
    (HERE, "PUT", {"Host": "localhost:8000", "Sec-Fetch-Site": "cross-site"}, "cross_origin"),
    (HERE, "POST", {"Host": "localhost:8000", "Sec-Fetch-Site": "same-site"}, "cross_origin"),
    (KEYED, "POST", {"Host": "llm.example", "Origin": "https://example.org"}, "cross_origin"),
    # A name of theirs that was made to point here; the browser takes the answer for theirs.
    (HERE, "GET", {"Host": "rebound.example:8000"}, "wrong_host"),
    (HERE, "POST", {"Host": "rebound.example:8000", "Origin": "http://rebound.example:8000"}, "wrong_host"),
    (HERE, "GET", {"Host": "localhost.rebound.example"}, "wrong_host"),
    (HERE, "GET", {"Host": "10.0.0.5:8000"}, "wrong_host"),
    (OPEN, "POST", {"Host": "rebound.example", "Origin": "http://rebound.example"}, "wrong_host"),
    (HERE, "GET", {"Host": ""}, "wrong_host"),
    (HERE, "GET", {"Host": "localhost:x"}, "wrong_host"),
    (HERE, "GET", {"Host": "[localhost"}, "wrong_host"),
    (HERE, "GET", {"Host": "a@localhost"}, "wrong_host"),
    (HERE, "GET", {"Host": "localhost/x"}, "wrong_host"),
]


@pytest.mark.parametrize(("served", "method", "headers"), FINE)
def test_clients_and_the_engine_page_pass_the_origin_check(
    served: ServedNames, method: str, headers: dict[str, str]
) -> None:
    check_origin(method, headers, served)


@pytest.mark.parametrize(("served", "method", "headers", "code"), NOT)
def test_pages_of_other_origins_are_refused(
    served: ServedNames, method: str, headers: dict[str, str], code: str
) -> None:
    with pytest.raises(HttpRefusal) as caught:
        check_origin(method, headers, served)
    assert (caught.value.status, caught.value.code) == (403, code)


async def test_cross_origin_requests_cannot_drain_an_engine() -> None:
    async with engine_client(make_service("full")) as one:
        form = {"Origin": "https://example.org", "Content-Type": "text/plain"}
        for method, path in (("POST", "/drain"), ("POST", "/role"), ("PUT", "/peers"), ("POST", "/segments")):
            async with one.session.request(method, one.url + path, data=b"{}", headers=form) as reply:
                assert reply.status == 403
                assert (await reply.json())["error"]["code"] == "cross_origin"
        rebound = {"Host": "rebound.example"}
        async with one.session.get(one.url + "/status", headers=rebound) as reply:
            assert reply.status == 403
        assert not one.service.draining
        page = {"Origin": one.url, "Content-Type": "text/plain"}
        body = f'{{"model": "{NAME}", "prompt": "abc"}}'.encode()
        async with one.session.post(one.url + "/v1/completions", data=body, headers=page) as reply:
            assert reply.status == 200
        # Names of requests: the client's if it is one, else ours; on errors as well.
        seen = set()
        for path, given, kept in (
            ("/health", "abc-1:2", True),
            ("/nowhere", "abc", True),
            ("/health", "a b", False),
            ("/health", "x" * 129, False),
            ("/status", "", False),
        ):
            async with one.session.get(one.url + path, headers={"X-Request-Id": given}) as reply:
                header = reply.headers["x-request-id"]
                assert (header == given) == kept
                seen.add(header)
        assert len(seen) == 5
        async with one.session.get(one.url + "/v1/models/" + NAME) as reply:
            assert (await reply.json())["id"] == NAME
        status, wrong = await one.get("/v1/models/meta/llama")
        assert (status, wrong["error"]["code"]) == (404, "model_not_found")
        host, port = one.url.removeprefix("http://").split(":")
        begun = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"
        for wrong_bytes in (
            b"GARBAGE\r\n\r\n",
            begun + b"TE\t: chunked\r\n",  # refused before the head is whole
            begun + b"TE : chunked\r\n",
            begun + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
            begun + b"Content-Length : 4\r\n\r\nabcd",
            begun + b"X: a\r\n folded\r\n",
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(wrong_bytes)
            head = (await reader.read()).partition(b"\r\n\r\n")[0]
            assert b" 400 " in head.split(b"\r\n")[0]
            assert b"server:" not in head.lower()
            writer.close()
