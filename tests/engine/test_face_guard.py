"""The face under bad conditions: odd bodies, slow and stalled clients, a hung loop, failures in the middle of an
answer, start-up errors. Everybody is answered, nothing says more than it should."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import ClientPayloadError, ClientSession, ServerDisconnectedError, web
from engine_models import KINDS, prompt
from face_kit import NAME, face, make_service, played, spell, tokens_in

from potluck.cli.main import run
from potluck.engine.model.checkpoint import RandomSource, save
from potluck.engine.model.reference import ReferenceModel
from potluck.engine.serve import serve
from potluck.engine.server import channels, control_bodies, engine_app, openai_routes
from potluck.engine.server.engine_service import EngineService, RequestLimits

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
def test_odd_bodies_are_refused_in_one_line(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with face(make_service("full")) as one:
            status, reply = await one.post("/v1/completions", body)
            assert status in (400, 404), reply
            assert "\n" not in reply["error"]["message"]
            assert (await one.post("/v1/completions", b'{"model": "tiny", "prompt": "\\ud83d\\ude00a"}'))[
                0
            ] == 200

    played(scenario)
    assert "Traceback" not in caplog.text


async def served(service: EngineService, visit: Callable[[str], Awaitable[None]]) -> None:
    """A visit to the server as `potluck engine serve` starts it."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(service, "127.0.0.1", 0, api_key=None, ready=address.set_result))
    try:
        await visit(await asyncio.wait_for(address, 60))
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_ends_its_requests(stream: bool, n: int) -> None:
    service = make_service("full", max_running=4)
    body = {"model": NAME, "prompt": spell(TOKENS), "max_tokens": 400, "ignore_eos": True}

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

    played(lambda: served(service, visit))


BROKEN = [
    b"GARBAGE\r\n\r\n",
    b"GET /status HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    b"POST /segments HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /segments HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /segments HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
]


def test_clients_that_do_not_speak_http_are_told_and_leave_no_traceback(
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

    played(lambda: served(make_service("full"), visit))
    assert [reply.split(b" ")[1] for reply in replies] == [b"400"] * len(BROKEN)
    assert not any(b"Traceback" in reply for reply in replies)
    assert "Traceback" not in caplog.text


def test_a_key_is_compared_whatever_it_is_and_never_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = "the-secret-of-this-engine"

    async def scenario() -> None:
        async with face(make_service("full"), key=key) as one:
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

    played(scenario)
    assert key not in caplog.text


def test_the_page_needs_nothing_from_elsewhere_and_no_key() -> None:
    async def scenario() -> None:
        async with face(make_service("full"), key="a secret") as one, one.session.get(one.url + "/") as reply:
            text = await reply.text()
            assert reply.status == 200
            assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
            assert not re.search(r"https?://|@import|src=", text)
            assert NAME not in text

    played(scenario)


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_bodies, "BODY_S", 0.1)

    async def scenario() -> None:
        async with face(make_service("full")) as one:
            host, port = one.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /segments HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            line = await asyncio.wait_for(reader.readline(), 60)
            assert b" 408 " in line
            writer.close()

    played(scenario)


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
def test_an_answer_that_breaks_off_is_seen_to_be_broken(
    handler: Handling, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second answer in the middle of the first, or a clean end, would be taken for the whole."""
    monkeypatch.setattr(engine_app, "STALLED_S", 0.1)
    monkeypatch.setattr(openai_routes, "models", handler)

    async def scenario() -> None:
        async with face(make_service("full", RequestLimits(deadline_s=0.2))) as one:
            with pytest.raises((ClientPayloadError, ServerDisconnectedError, ConnectionError)):
                await one.get("/v1/models")
            assert (await one.get("/status"))[0] == 200

    played(scenario)
    assert ("a bug" in caplog.text) == (handler is _fails)


def test_a_handler_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_app, "STALLED_S", 0.1)
    monkeypatch.setattr(openai_routes, "models", _hangs)

    async def scenario() -> None:
        async with face(make_service("full", RequestLimits(deadline_s=0.2))) as one:
            status, body = await one.get("/v1/models")
            assert (status, body["error"]["code"]) == (504, "deadline")

    played(scenario)


def test_a_loop_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "LAST_WORD_S", 0.1)
    go_on = threading.Event()

    async def scenario() -> None:
        service = make_service("full", RequestLimits(deadline_s=0.3))
        async with face(service) as one:
            step = service._loop.executor.step

            def slow(*args: object) -> object:
                go_on.wait(20)
                return step(*args)  # type: ignore[arg-type]

            service._loop.executor.step = slow  # type: ignore[method-assign, assignment]
            began = time.monotonic()
            replies = await asyncio.gather(*(one.segment(TOKENS, max_tokens=2) for _ in range(2)))
            assert {status for status, _ in replies} == {504}
            assert time.monotonic() - began < 10
            go_on.set()
            await one.until_idle()
            assert tokens_in((await one.segment(TOKENS, max_tokens=2))[1])

    played(scenario)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_fails_says_so_and_ends(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when several answers are mixed, and while one of them is being written: the client must not mistake it
    for a lost connection."""
    write = web.StreamResponse.write

    async def slowly(self: web.StreamResponse, data: bytes) -> None:
        await write(self, data)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(web.StreamResponse, "write", slowly)

    async def scenario() -> None:
        service = make_service("full")
        async with face(service) as one:
            step, calls = service._loop.executor.step, []

            def broken(*args: object) -> object:
                calls.append(1)
                if len(calls) > 6:
                    raise RuntimeError("out of order")
                return step(*args)  # type: ignore[arg-type]

            service._loop.executor.step = broken  # type: ignore[method-assign, assignment]
            body = {"model": NAME, "prompt": spell(TOKENS), "max_tokens": 50, "n": n, "stream": True}
            status, parts = await one.post("/v1/completions", body)
            assert status == 200
            assert "out of order" in parts[-1]["error"]["message"]
            assert sum("choices" in part for part in parts) >= n
            service._loop.executor.step = step  # type: ignore[method-assign]
            await one.until_idle()
            assert (await one.post("/v1/completions", {**body, "stream": False}))[0] == 200

    played(scenario)


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
        (["--stages", "1,9"], "stages"),
        (["--stages", "1,1@127.0.0.1:9"], "--secret-file"),
        (["--emulate", "A10"], "emulate"),
        (["--emulate", "A10:llama-3.1-70b"], "does not fit"),
        (["--api-key-file", "nowhere"], "--api-key-file"),
        (["--host", "no such host"], "no such host"),
    ],
)
def test_what_cannot_be_served_is_a_start_up_error_in_one_line(
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


def test_a_port_in_use_is_a_start_up_error(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["engine", "serve", "--model", str(stored), "--port", str(port)]) == 2
    assert f"127.0.0.1:{port} cannot be used" in capsys.readouterr().err


def test_a_tokenizer_that_is_none_is_a_start_up_error(
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
