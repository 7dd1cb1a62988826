"""The page's paths at the operators' port, and who may ask for them.

What they show is open to this machine, and needs the operators' key elsewhere. A host name that is not this machine's
is refused, so that no page of somebody else reads it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from math import isfinite
from typing import NamedTuple

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from potluck.api.http import HEADER, HttpRefusal, request_id
from potluck.core.errors import InputError
from potluck.gateway.page.stream import PageStream
from potluck.runtime import base_css

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FIRST, BASE = "index.html", "base.css"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Nothing inline, nothing from elsewhere, in nobody's frame."""
QUIET_S = 10.0
FILES = "/page/"
READING = frozenset({"/live", "/history", "/moment", "/request"})
CHAT = "/chat"
KEY_HEADER = "X-Potluck-Client-Key"
MOST_BODY_BYTES = 1_000_000
ANSWER_S = 120.0
PASSED_ON = ("Content-Type", "Retry-After", HEADER)


class StaticFile(NamedTuple):
    body: bytes
    kind: str
    tag: str


@cache
def files() -> dict[str, StaticFile]:
    static_files = {BASE: _read_file(BASE, base_css().encode())}
    for path in sorted(
        resources.files("potluck.gateway.page").joinpath("data").iterdir(), key=lambda one: one.name
    ):
        if path.name[path.name.rfind(".") :] in KINDS:
            static_files[path.name] = _read_file(path.name, path.read_bytes())
    return static_files


def _read_file(name: str, body: bytes) -> StaticFile:
    return StaticFile(body, KINDS[name[name.rfind(".") :]], f'"{hashlib.sha256(body).hexdigest()[:16]}"')


@dataclass(slots=True)
class PlaygroundProxy:
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not self.url:
            raise HttpRefusal(503, "the gateway does not listen for clients yet")
        body = await request.read()
        if len(body) > MOST_BODY_BYTES:
            raise HttpRefusal(413, f"a question has at most {MOST_BODY_BYTES} bytes here")
        headers = {"Content-Type": "application/json"}
        if key := request.headers.get(KEY_HEADER):
            headers["Authorization"] = f"Bearer {key}"
        timeout = ClientTimeout(total=None, sock_read=ANSWER_S)
        path = f"{self.url}/v1/chat/completions"
        response: web.StreamResponse | None = None
        try:
            # The gateway's own port: whose name its certificate bears does not matter on the way to itself.
            async with (
                ClientSession(timeout=timeout) as session,
                session.post(path, data=body, headers=headers, ssl=False) as answer,
            ):
                kept = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
        except (ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
            if response is None:
                raise HttpRefusal(502, f"the clients' port did not answer ({error})") from error
        return response


@dataclass(frozen=True, slots=True)
class PageRoutes:
    show: PageStream
    chat: PlaygroundProxy = field(default_factory=PlaygroundProxy)


def is_file(path: str) -> bool:
    return path == "/" or path.startswith(FILES)


def is_reading(method: str, path: str) -> bool:
    """Whether nothing of the fleet changes by it, and it is what the page is made of."""
    return (method in ("GET", "HEAD") and path in READING) or (method == "POST" and path == CHAT)


def add_page(app: web.Application, page: PageRoutes) -> None:
    page_stream = page.show

    async def live(request: web.Request) -> web.StreamResponse:
        return await _live(request, page_stream)

    async def history(request: web.Request) -> web.StreamResponse:
        return _json(page_stream.history())

    async def moment(request: web.Request) -> web.StreamResponse:
        try:
            at_s = float(request.query.get("at", ""))
        except ValueError:
            at_s = float("nan")
        if not isfinite(at_s):
            raise InputError("at", "must be a time, in seconds since 1970")
        result = page_stream.moment(at_s)
        if result is None:
            raise HttpRefusal(404, "nothing is known of that time", "not_found")
        return _json(result)

    async def one(request: web.Request) -> web.StreamResponse:
        row = page_stream.requests.row(request.query.get("id", ""))
        if row is None:
            raise HttpRefusal(
                404, "no such request is known; requests are kept only while a page is open", "not_found"
            )
        return _json(row)

    app.router.add_get("/", _file)
    app.router.add_get(FILES + "{name}", _file)
    app.router.add_get("/live", live)
    app.router.add_get("/history", history)
    app.router.add_get("/moment", moment)
    app.router.add_get("/request", one)
    app.router.add_post(CHAT, page.chat.answer)


async def _file(request: web.Request) -> web.StreamResponse:
    file = files().get(request.match_info.get("name", FIRST))
    if file is None:
        raise HttpRefusal(404, "there is no such file", "not_found")
    headers = {**HEADERS, "Content-Type": file.kind, "ETag": file.tag}
    if request.headers.get("If-None-Match") == file.tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, headers=headers)


async def _live(request: web.Request, page_stream: PageStream) -> web.StreamResponse:
    page_reader = page_stream.watch()
    if page_reader is None:
        raise HttpRefusal(429, "too many watch already; close one", "too_many_readers")
    try:
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                HEADER: request_id(request.headers.get(HEADER)),
            }
        )
        await response.prepare(request)
        over = False
        while not over:
            text = await page_reader.next(QUIET_S)
            over = page_reader.over
            await response.write(text)
        return response
    except ConnectionError:
        return response
    finally:
        page_stream.leave(page_reader)


def _json(what: dict[str, object]) -> web.Response:
    return web.json_response(
        what,
        dumps=lambda value: json.dumps(value, separators=(",", ":")),
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
    )
