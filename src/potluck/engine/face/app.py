"""The routes, the key, the limits: an aiohttp application around one engine."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator

from aiohttp import ClientSession, web
from aiohttp.typedefs import Handler

from potluck.engine.face import control, openai, segments
from potluck.engine.face.errors import Refused, error_response
from potluck.engine.face.service import SERVICE, Service

OPEN = frozenset({"/health", "/kv"})
"""Without the key: /health says nothing, and whoever fetches a cache shows its handle."""


def build(service: Service, api_key: str | None = None) -> web.Application:
    """An application for a service whose driver has not been started yet."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if api_key is not None and request.path not in OPEN:
                _check_key(request, api_key)
            return await handler(request)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return error_response(error)
        except Exception as error:
            return error_response(error)

    app = web.Application(middlewares=[guard], client_max_size=service.limits.body_bytes)
    app[SERVICE] = service
    app.cleanup_ctx.append(_running)
    app.router.add_post("/v1/completions", openai.completions)
    app.router.add_post("/v1/chat/completions", openai.chat_completions)
    app.router.add_get("/v1/models", openai.models)
    app.router.add_post("/segments", segments.segments)
    app.router.add_post("/kv", segments.kv)
    app.router.add_get("/status", control.status)
    app.router.add_get("/role", control.show_role)
    app.router.add_post("/role", control.change_role)
    app.router.add_post("/drain", control.drain)
    app.router.add_get("/health", control.health)
    app.router.add_get("/metrics", control.metrics)
    return app


async def _running(app: web.Application) -> AsyncIterator[None]:
    """The loop's thread and the client run as long as the application does."""
    service = app[SERVICE]
    service.hub.bind(service.driver)
    service.driver.start()
    watch = asyncio.create_task(_watch(service))
    async with ClientSession(trust_env=False, auto_decompress=False) as client:
        service.client = client
        yield
    watch.cancel()
    await asyncio.to_thread(service.driver.stop)


async def _watch(service: Service) -> None:
    """If the loop dies, whoever waits for it is told."""
    while not service.driver.problem:
        await asyncio.sleep(0.5)
    service.hub.fail_all(f"the engine has failed ({service.driver.problem})")


def _check_key(request: web.Request, api_key: str) -> None:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(), api_key.encode())
    if scheme.lower() != "bearer" or not right:
        raise Refused(401, "a valid key is needed: Authorization: Bearer ...", "invalid_api_key")
