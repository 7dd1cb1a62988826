"""The routes, the key, the limits: an aiohttp application around one engine."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

from aiohttp import web
from aiohttp.typedefs import Handler

from potluck.api.http import HEADER, HttpRefusal, ServedNames, check_origin, request_id
from potluck.engine.server import (
    control,
    engine_page,
    kv_peers,
    openai_routes,
    prefix_routes,
    segment_routes,
    sender_grants,
)
from potluck.engine.server.engine_service import SERVICE, EngineService
from potluck.engine.server.error_replies import error_response
from potluck.engine.server.http_connection import arrived
from potluck.engine.server.kv_connector import KvConnector

OPEN = frozenset({"/", "/health"})
"""Without the key: the page and /health say nothing."""
STALLED_S = 10.0
"""A client that takes so long beyond its request's deadline to read the answer is left."""
BEGUN: web.RequestKey[web.StreamResponse] = web.RequestKey("begun", web.StreamResponse)
"""The answer to a request, once its first bytes are out."""

log = logging.getLogger(__name__)


def build(
    service: EngineService, api_key: str | None = None, served: ServedNames | None = None
) -> web.Application:
    """An application for a service whose driver has not been started yet."""
    names = served or ServedNames(keyed=api_key is not None)

    longest_s = service.limits.deadline_s + STALLED_S

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if not request.body_exists:
                arrived(request)
            check_origin(request.method, request.headers, names)
            if api_key is not None and request.path not in OPEN:
                _check_key(request, api_key)
            async with asyncio.timeout(longest_s):
                return await handler(request)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return _broken_off(request, error) or error_response(error)

    app = web.Application(middlewares=[guard], client_max_size=service.limits.body_bytes)
    app[SERVICE] = service
    app.on_response_prepare.append(_note)
    app.cleanup_ctx.append(_running)
    app.router.add_post("/v1/completions", openai_routes.completions)
    app.router.add_post("/v1/chat/completions", openai_routes.chat_completions)
    app.router.add_get("/v1/models", openai_routes.models)
    app.router.add_get("/v1/models/{id:.+}", openai_routes.model)
    app.router.add_post("/segments", segment_routes.segments)
    app.router.add_post("/prefixes/lend", prefix_routes.lend)
    app.router.add_post("/prefixes/fetch", prefix_routes.fetch)
    app.router.add_get("/", engine_page.page)
    app.router.add_get("/status", control.status)
    app.router.add_get("/cache", control.cache)
    app.router.add_get("/role", control.show_role)
    app.router.add_post("/role", control.change_role)
    app.router.add_post("/pace", control.change_pace)
    app.router.add_post("/network", control.change_network)
    app.router.add_get("/peers", kv_peers.show_peers)
    app.router.add_put("/peers", kv_peers.change_peers)
    app.router.add_get("/grants", sender_grants.show_grants)
    app.router.add_put("/grants", sender_grants.change_grants)
    app.router.add_post("/drain", control.drain)
    app.router.add_get("/health", control.health)
    app.router.add_get("/metrics", control.metrics)
    return app


async def _note(request: web.BaseRequest, response: web.StreamResponse) -> None:
    request[BEGUN] = response
    response.headers[HEADER] = request_id(request.headers.get(HEADER))


def _broken_off(request: web.Request, error: Exception) -> web.StreamResponse | None:
    """An answer that had begun cannot become an error: the connection ends in the middle, and the client knows."""
    begun: web.StreamResponse | None = request.get(BEGUN)
    if begun is None:
        return None
    if not isinstance(error, ConnectionError | TimeoutError):
        log.error("an answer broke off", exc_info=error)
    if request.transport is not None:
        request.transport.abort()
    return begun


async def _running(app: web.Application) -> AsyncIterator[None]:
    """The loop's thread and the door for caches are there as long as the application is."""
    service = app[SERVICE]
    limits = service.limits
    kv = replace(service.kv, sender=replace(service.kv.sender, attach_s=limits.attach_s))
    service.kv_connector = KvConnector(kv, service.driver, service.kv_transfer, limits.handover_s)
    service.kv_connector.allow(service.peers | service.always)
    service.hub.bind(service.driver)
    service.driver.start()
    watch = asyncio.create_task(_watch(service))
    yield
    await service.kv_connector.close()
    watch.cancel()
    await asyncio.to_thread(service.driver.stop)


async def _watch(service: EngineService) -> None:
    """If the loop dies, whoever waits for it is told."""
    while not service.driver.problem:
        await asyncio.sleep(0.5)
    service.hub.fail_all(f"the engine has failed ({service.driver.problem})")


def _check_key(request: web.Request, api_key: str) -> None:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), api_key.encode())
    if scheme.lower() != "bearer" or not right:
        raise HttpRefusal(401, "a valid key is needed: Authorization: Bearer ...", "invalid_api_key")
