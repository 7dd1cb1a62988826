"""The aiohttp servers' shared rules for request targets and headers, over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from page_stage import stage

from potluck.api import http
from potluck.api.aiohttp_requests import check_target, set_up

SOURCE = Path(http.__file__).parent.parent


async def send(port: int, data: bytes) -> tuple[int, list[bytes], bytes]:
    """Send bytes on a connection of their own; returns the answer's status, header names and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    return int(first.split()[1]), [line.partition(b":")[0].lower() for line in lines], body


def request(line: str, host: str = "here") -> bytes:
    return f"{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()


async def echo_handler(served: web.Request) -> web.Response:
    return web.Response(text=f"{served.host} {served.path} {served.query_string}")


async def failing_handler(served: web.Request) -> web.Response:
    raise RuntimeError("a bug")


async def streaming_handler(served: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(served)
    await response.write(b"one")
    return response


@web.middleware
async def guard(served: web.Request, handler: http.Any) -> web.StreamResponse:
    try:
        check_target(served)
    except http.HttpRefusal as refused:
        return web.Response(status=refused.status)
    response: web.StreamResponse = await handler(served)
    return response


@pytest.mark.parametrize(
    ("data", "status", "body"),
    [
        (request("GET /x?a=b"), 200, b"here /x a=b"),
        (request("GET http://there:80/x?a=b"), 200, b"there:80 /x a=b"),
        (request("GET HTTPS://there/x?a=b?c/d"), 200, b"there /x a=b?c/d"),
        (request("GET http://there"), 200, b"there / "),
        (request("GET http://there?a=b"), 200, b"there / a=b"),
        (request("GET http://there/a%20b%2fc"), 200, b"there /a b/c "),
        (request("GET /failing"), 500, None),
        (request("GET /streaming"), 200, None),
        (request("POST /x"), 405, None),
        (request("GET ftp://there/x"), 400, None),
        (request("GET http://me@there/x"), 400, None),
        (request("CONNECT there:80"), 400, None),
        (request("GET there:80"), 400, None),
        (b"garbage\r\n\r\n", 400, None),
        (b"GET /x HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400, None),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, None),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_aiohttp_server_takes_absolute_targets_and_sends_no_server_header(
    data: bytes, status: int, body: bytes | None
) -> None:
    async def scenario() -> None:
        app = web.Application(middlewares=[guard])
        app.router.add_get("/failing", failing_handler)
        app.router.add_get("/streaming", streaming_handler)
        app.router.add_get("/{rest:.*}", echo_handler)
        runner = web.AppRunner(app, access_log=None)
        await set_up(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            answer = await send(runner.addresses[0][1], data)
        finally:
            await runner.cleanup()
        assert answer[0] == status
        assert b"server" not in answer[1]
        assert body is None or answer[2] == body

    asyncio.run(scenario())


def test_admin_port_sends_no_server_header_and_takes_absolute_targets() -> None:
    async def scenario() -> None:
        async with stage(key=None) as (_, url):
            port = int(url.rpartition(":")[2])
            for data, status in (
                (request("GET /health", "127.0.0.1"), 200),
                (request("GET /metrics", "127.0.0.1"), 200),
                (request("GET /", "127.0.0.1"), 200),
                (request("GET /nothing", "127.0.0.1"), 404),
                (request("POST /drain", "127.0.0.1"), 403),
                (request("GET http://127.0.0.1:8001/health", "evil.example"), 200),
                (request("GET http://evil.example/health", "127.0.0.1"), 403),
                (request("CONNECT 127.0.0.1:80", "127.0.0.1"), 400),
                (b"garbage\r\n\r\n", 400),
            ):
                answer = await send(port, data)
                assert answer[0] == status, data
                assert b"server" not in answer[1], data

    asyncio.run(scenario())


def test_every_aiohttp_server_uses_the_shared_request_rules() -> None:
    users = [path for path in SOURCE.rglob("*.py") if "web.AppRunner(" in path.read_text()]
    assert len(users) >= 3
    for path in users:
        text = path.read_text()
        assert "set_up(" in text, path
        assert "runner.setup()" not in text, path
        assert "web.run_app" not in text, path
