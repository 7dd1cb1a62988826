"""The operators' port. Without a key of its own it listens on loopback only; there the page needs none, orders do."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from aiohttp import web
from aiohttp.typedefs import Handler

from potluck import __version__
from potluck.api import aiohttp_requests, http
from potluck.core.errors import InputError
from potluck.gateway.admin import families
from potluck.gateway.admin.metrics import CONTENT_TYPE, GatewayMetrics, figures
from potluck.gateway.admin.operations import Json, Operations
from potluck.gateway.page.routes import PageRoutes, add_page, is_file, is_reading

log = logging.getLogger(__name__)

BODY_BYTES = 64_000_000
MOST_WHY = 400


@dataclass(frozen=True, slots=True)
class AdminContext:
    metrics: GatewayMetrics
    operations: Operations
    notes: Callable[[], Json] = dict
    """What else belongs into the snapshot: problems with files, how many keys, ..."""
    key: str | None = field(default=None, repr=False)
    served: http.ServedNames = http.ServedNames()
    page: PageRoutes | None = None
    near: bool = True


Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_admin(context: AdminContext) -> web.Application:
    operations, counters = context.operations, context.metrics.counters

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            aiohttp_requests.check_target(request)
            _check(request, context)
            response = await handler(request)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            response = _error(error)
        if not response.prepared:
            response.headers[http.HEADER] = http.request_id(request.headers.get(http.HEADER))
        return response

    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(body=context.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    def snapshot(request: web.Request) -> Json:
        counted = {"counters": figures(counters)}
        return {"version": __version__, **operations.snapshot(), **context.notes(), **counted}

    def decisions(request: web.Request) -> Json:
        ended: Counter[str] = Counter()
        for (model, *_), value in counters.counted(families.REQUESTS).items():
            ended[model] += round(value)
        return {**operations.decisions(_whole(request, "after")), "ended": ended}

    def set_plan(request: web.Request, body: Json) -> Json:
        return operations.set_plan(body, request.query.get("why", "")[:MOST_WHY], _whole(request, "version"))

    def order(change: Callable[[Json], Json]) -> Route:

        carried_out = _change(lambda request, body: change(body))

        async def handler(request: web.Request) -> web.StreamResponse:
            if context.key is None:
                line = (
                    "orders need an operators' key, and this gateway has none: start it with --admin-key-file"
                )
                raise http.HttpRefusal(403, line, "no_admin_key")
            return await carried_out(request)

        return handler

    app = web.Application(middlewares=[guard], client_max_size=BODY_BYTES)
    add = app.router
    add.add_get("/metrics", metrics)
    add.add_get("/health", _show(lambda request: {"status": "ok", "version": __version__}))
    add.add_get("/snapshot", _show(snapshot))
    add.add_get("/decisions", _show(decisions))
    add.add_get("/fleet", _show(lambda request: operations.fleet()))
    add.add_get("/wanted", _show(lambda request: operations.wanted()))
    add.add_put("/fleet", _change(lambda request, body: operations.set_fleet(body)))
    add.add_put("/plan", _change(set_plan))
    add.add_put("/market", _change(lambda request, body: operations.set_market(body)))
    for name in ("drain", "cordon", "uncordon", "flip", "kill", "note"):
        add.add_post(f"/{name}", order(getattr(operations, name)))
    if context.page is not None:
        add_page(app, context.page)
    return app


def _show(what: Callable[[web.Request], Json]) -> Route:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(what(request), dumps=_dumps)

    return handler


def _change(change: Callable[[web.Request, Json], Json]) -> Route:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = http.parse_object(await request.read())
        return web.json_response(change(request, body), dumps=_dumps)

    return handler


def _whole(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InputError(name, "must be a whole number")
    return int(text)


def _check(request: web.Request, context: AdminContext) -> None:
    served, given = context.served, request.headers.get("Authorization")
    free = (
        context.key is None
        or request.path == "/health"
        or (context.page is not None and is_file(request.path))
    )
    shown, wanted = (given or "").encode("utf-8", "surrogateescape"), f"Bearer {context.key}".encode()
    if not free and not hmac.compare_digest(shown, wanted):
        if given is not None or not context.near or not is_reading(request.method, request.path):
            line = "the operators' key is needed: send it as `Authorization: Bearer KEY`"
            raise http.HttpRefusal(401, line, "invalid_api_key", "authorization")
        served = replace(served, keyed=False)  # so its host name counts
    http.check_origin(request.method, request.headers, served)


def _error(error: Exception) -> web.Response:
    known = http.refusal(error)
    if known is None and isinstance(error, web.HTTPException):
        known = http.HttpRefusal(error.status, error.reason)
    if known is None:
        log.error("a handler failed", exc_info=error)
        known = http.HttpRefusal(500, "internal error; the gateway's log says more")
    body = http.error_object(known.status, str(known), param=known.param, code=known.code)
    return web.json_response(body, status=known.status)


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)
