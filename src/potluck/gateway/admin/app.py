"""The operators' port: metrics, a snapshot, events, the fleet, the plan, the page. An ordinary web application.

It has a key of its own, and without one it only listens on the loopback address. What the page reads needs none
there; orders always do.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from aiohttp import web
from aiohttp.typedefs import Handler

from potluck import __version__
from potluck.api.http import (
    HEADER,
    HttpRefusal,
    ServedNames,
    check_origin,
    error_object,
    refusal,
    request_id,
)
from potluck.api.json_bodies import parse_object
from potluck.core.errors import InputError
from potluck.gateway.admin import families
from potluck.gateway.admin.metrics import CONTENT_TYPE, GatewayMetrics, figures
from potluck.gateway.admin.operations import Json, OperationsApi
from potluck.gateway.page.routes import PageRoutes, add_page, is_file, is_reading

MOST_EVENTS = 1_000
MOST_READERS = 32


class FeedReader:
    def __init__(self, feed: EventFeed, kinds: frozenset[str] | None, most: int) -> None:
        self._feed, self._kinds = feed, kinds
        self._events: deque[bytes] = deque(maxlen=most)
        self._lost = 0
        self._news = asyncio.Event()

    def put(self, kind: str, line: bytes) -> bool:
        if self._kinds is not None and kind not in self._kinds:
            return False
        full = len(self._events) == self._events.maxlen
        self._lost += full
        self._events.append(line)
        self._news.set()
        return full

    async def next(self, wait_s: float) -> bytes:
        """All that has happened since, as server-sent events; a comment where nothing has for so long."""
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            return b": nothing\n\n"
        self._news.clear()
        lost, self._lost = self._lost, 0
        said = [*self._events]
        self._events.clear()
        if lost:
            said.insert(0, b'event: lost\ndata: {"events":%d}\n\n' % lost)
        return b"".join(said)

    def close(self) -> None:
        self._feed.leave(self)


class EventFeed:
    """Where events go. `changed` hears whether anybody reads, so that others make them only then."""

    def __init__(
        self,
        changed: Callable[[bool], None] = lambda read: None,
        clock: Callable[[], float] = time.time,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`lost` hears of each event that a reader did not get."""
        self._changed, self._clock, self._missed = changed, clock, lost
        self._readers: set[FeedReader] = set()
        self._number = 0
        self.lost = 0

    def publish(self, kind: str, what: dict[str, object]) -> None:
        if not self._readers:
            return
        self._number += 1
        body = {"n": self._number, "time_s": self._clock(), **what}
        data = json.dumps(body, separators=(",", ":"), default=str)
        line = f"id: {self._number}\nevent: {kind}\ndata: {data}\n\n".encode()
        for reader in self._readers:
            if reader.put(kind, line):
                self.lost += 1
                self._missed()

    def watch(self, kinds: frozenset[str] | None = None, most: int = MOST_EVENTS) -> FeedReader | None:
        if len(self._readers) >= MOST_READERS:
            return None
        reader = FeedReader(self, kinds, most)
        self._readers.add(reader)
        self._changed(True)
        return reader

    def leave(self, reader: FeedReader) -> None:
        self._readers.discard(reader)
        if not self._readers:
            self._changed(False)


log = logging.getLogger(__name__)

BODY_BYTES = 64_000_000
MOST_WHY = 400
QUIET_S = 15.0


@dataclass(frozen=True, slots=True)
class AdminContext:
    metrics: GatewayMetrics
    operations: OperationsApi
    feed: EventFeed
    notes: Callable[[], Json] = dict
    """What else belongs into the snapshot: problems with files, how many keys, ..."""
    key: str | None = field(default=None, repr=False)
    served: ServedNames = ServedNames()
    page: PageRoutes | None = None
    near: bool = True
    """It only listens on the loopback address."""


def build_admin(office: AdminContext) -> web.Application:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _check(request, office)
            response = await handler(request)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            response = _error(error)
        if not response.prepared:
            response.headers[HEADER] = request_id(request.headers.get(HEADER))
        return response

    async def health(request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "version": __version__})

    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(body=office.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def snapshot(request: web.Request) -> web.StreamResponse:
        shown = {
            "version": __version__,
            **office.operations.snapshot(),
            **office.notes(),
            "counters": figures(office.metrics.counters),
        }
        return web.json_response(shown, dumps=_dumps)

    async def events(request: web.Request) -> web.StreamResponse:
        return await _events(request, office.feed)

    async def fleet(request: web.Request) -> web.StreamResponse:
        return web.json_response(office.operations.fleet(), dumps=_dumps)

    async def wanted(request: web.Request) -> web.StreamResponse:
        return web.json_response(office.operations.wanted(), dumps=_dumps)

    async def decisions(request: web.Request) -> web.StreamResponse:
        after = _whole(request, "after")
        ended: Counter[str] = Counter()
        for (model, *_), value in office.metrics.counters.counted(families.REQUESTS).items():
            ended[model] += round(value)
        shown = {**office.operations.decisions(after), "ended": ended}
        return web.json_response(shown, dumps=_dumps)

    app = web.Application(middlewares=[guard], client_max_size=BODY_BYTES)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/snapshot", snapshot)
    app.router.add_get("/events", events)
    app.router.add_get("/fleet", fleet)
    app.router.add_put("/fleet", _put(office.operations.set_fleet))
    app.router.add_put("/plan", _plan(office.operations))
    app.router.add_put("/market", _put(office.operations.set_market))
    app.router.add_get("/decisions", decisions)
    for path, order in _orders(office.operations).items():
        app.router.add_post(path, _order(office, order))
    app.router.add_get("/wanted", wanted)
    if office.page is not None:
        add_page(app, office.page)
    return app


def _orders(operations: OperationsApi) -> dict[str, Callable[[Json], Json]]:
    return {
        "/drain": operations.drain,
        "/cordon": operations.cordon,
        "/uncordon": operations.uncordon,
        "/flip": operations.flip,
        "/kill": operations.kill,
        "/note": operations.note,
    }


def _order(
    office: AdminContext, change: Callable[[Json], Json]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """What a person wants: with a key, or not at all."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if office.key is None:
            line = "orders need an operators' key, and this gateway has none: start it with --admin-key-file"
            raise HttpRefusal(403, line, "no_admin_key")
        return web.json_response(change(parse_object(await request.read())), dumps=_dumps)

    return handler


def _plan(operations: OperationsApi) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> web.StreamResponse:
        body, why = parse_object(await request.read()), request.query.get("why", "")
        version = _whole(request, "version")
        return web.json_response(operations.set_plan(body, why[:MOST_WHY], version), dumps=_dumps)

    return handler


def _whole(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InputError(name, "must be a whole number")
    return int(text)


def _put(change: Callable[[Json], Json]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(change(parse_object(await request.read())), dumps=_dumps)

    return handler


async def _events(request: web.Request, feed: EventFeed) -> web.StreamResponse:
    """Server-sent events, all or those of ?kinds=route,failure."""
    given = request.query.get("kinds")
    reader = feed.watch(None if not given else frozenset(given.split(",")[:32]))
    if reader is None:
        raise HttpRefusal(429, "too many read the events already; close one", "too_many_readers")
    try:
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                HEADER: request_id(request.headers.get(HEADER)),
            }
        )
        await response.prepare(request)
        await response.write(b": listening\n\n")
        while True:
            await response.write(await reader.next(QUIET_S))
    except ConnectionError:
        return response
    finally:
        reader.close()


def _check(request: web.Request, office: AdminContext) -> None:
    served = office.served
    free = (
        office.key is None or request.path == "/health" or (office.page is not None and is_file(request.path))
    )
    if not free and not _has_key(request, office.key or ""):
        if not (
            office.near
            and "Authorization" not in request.headers
            and is_reading(request.method, request.path)
        ):
            raise _no_key()
        served = replace(served, keyed=False)  # so its host name counts
    check_origin(request.method, request.headers, served)


def _has_key(request: web.Request, key: str) -> bool:
    given = request.headers.get("Authorization", "")
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {key}".encode())


def _no_key() -> HttpRefusal:
    line = "the operators' key is needed: send it as `Authorization: Bearer KEY`"
    return HttpRefusal(401, line, "invalid_api_key", "authorization")


def _error(error: Exception) -> web.Response:
    known = refusal(error)
    if known is None and isinstance(error, web.HTTPException):
        known = HttpRefusal(error.status, error.reason)
    if known is None:
        log.error("a handler failed", exc_info=error)
        known = HttpRefusal(500, "internal error; the gateway's log says more")
    body = error_object(known.status, str(known), param=known.param, code=known.code)
    return web.json_response(body, status=known.status)


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)
