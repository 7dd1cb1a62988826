"""The page's paths at the operators' port, and who may ask for them.

Its files have no secrets. What they show is open to this machine where the port is, and needs the operators' key
elsewhere; a host name that is not this machine's is refused, so that no page of somebody else reads it either.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import isfinite

from aiohttp import web

from potluck.api.http_errors import HEADER, HttpRefusal, request_id
from potluck.core.errors import InputError
from potluck.gateway.page.chat import PlaygroundProxy
from potluck.gateway.page.files import FIRST, HEADERS, files
from potluck.gateway.page.stream import PageStream

QUIET_S = 10.0
FILES = "/page/"
READING = frozenset({"/live", "/history", "/moment", "/request"})
"""What the page reads."""
CHAT = "/chat"


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
    show = page.show

    async def live(request: web.Request) -> web.StreamResponse:
        return await _live(request, show)

    async def history(request: web.Request) -> web.StreamResponse:
        return _json(show.history())

    async def moment(request: web.Request) -> web.StreamResponse:
        try:
            at_s = float(request.query.get("at", ""))
        except ValueError:
            at_s = float("nan")
        if not isfinite(at_s):
            raise InputError("at", "must be a time, in seconds since 1970")
        found = show.moment(at_s)
        if found is None:
            raise HttpRefusal(404, "nothing is known of that time", "not_found")
        return _json(found)

    async def one(request: web.Request) -> web.StreamResponse:
        row = show.requests.row(request.query.get("id", ""))
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
    found = files().get(request.match_info.get("name", FIRST))
    if found is None:
        raise HttpRefusal(404, "there is no such file", "not_found")
    headers = {**HEADERS, "Content-Type": found.kind, "ETag": found.tag}
    if request.headers.get("If-None-Match") == found.tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=found.body, headers=headers)


async def _live(request: web.Request, show: PageStream) -> web.StreamResponse:
    watcher = show.watch()
    if watcher is None:
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
            said = await watcher.next(QUIET_S)
            over = watcher.over
            await response.write(said)
        return response
    except ConnectionError:
        return response
    finally:
        show.leave(watcher)


def _json(what: dict[str, object]) -> web.Response:
    return web.json_response(
        what,
        dumps=lambda value: json.dumps(value, separators=(",", ":")),
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
    )
