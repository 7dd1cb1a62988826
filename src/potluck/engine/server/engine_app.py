"""The routes, the key, the limits: an aiohttp application around one engine."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

from aiohttp import web
from aiohttp.typedefs import Handler

from potluck.api import aiohttp_requests
from potluck.api.http import HEADER, ServedNames, check_key, check_origin, request_id
from potluck.core.errors import InputError
from potluck.engine.server import control, openai_routes, segment_routes
from potluck.engine.server.engine_service import SERVICE, EngineService
from potluck.engine.server.http_connection import (
    BACKLOG,
    CONNECTIONS,
    UPLOADS,
    EngineListener,
    connection_of,
    error_response,
    request_complete,
    set_up_app,
)
from potluck.engine.server.kv_connector import KvConnector

OPEN = frozenset({"/", "/health"})  # Without the key: the page and /health say nothing.
STALLED_S = 10.0  # A client that takes so long beyond its request's deadline to read the answer is left.
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
        connection = connection_of(request)
        if connection is not None:
            connection.head_complete()
        try:
            response = await respond(request, handler)
            with suppress(ConnectionError):  # aiohttp would do this next; here its end is seen
                await response.prepare(request)
                await response.write_eof()
            return response
        finally:
            if connection is not None:
                connection.answered()

    async def respond(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if not request.body_exists:
                request_complete(request)
            aiohttp_requests.check_target(request)
            check_origin(request.method, request.headers, names)
            if api_key is not None and request.path not in OPEN:
                check_key(request.headers, api_key)
            async with asyncio.timeout(longest_s):
                return await handler(request)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return _broken_off(request, error) or error_response(error)

    app = web.Application(middlewares=[guard], client_max_size=service.limits.body_bytes)
    app[SERVICE], app[UPLOADS], app[CONNECTIONS] = service, service.uploads, {}
    app.on_response_prepare.append(_note)
    app.cleanup_ctx.append(_running)
    app.add_routes(
        [
            web.post("/v1/completions", openai_routes.completions),
            web.post("/v1/chat/completions", openai_routes.chat_completions),
            web.get("/v1/models", openai_routes.models),
            web.get("/v1/models/{id:.+}", openai_routes.model),
            web.post("/segments", segment_routes.segments),
            web.get("/", control.page),
            web.get("/status", control.status),
            web.get("/cache", control.cache),
            web.get("/role", control.show_role),
            web.post("/role", control.change_role),
            web.post("/pace", control.change_pace),
            web.post("/network", control.change_network),
            web.get("/peers", control.show_peers),
            web.put("/peers", control.change_peers),
            web.post("/drain", control.drain),
            web.get("/health", control.health),
            web.get("/metrics", control.metrics),
        ]
    )
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
    service.kv_connector.links.allow(service.senders)
    service.hub.bind(service.driver)
    service.driver.start()
    watch = asyncio.create_task(_watch(service))
    yield
    await service.kv_connector.close()
    watch.cancel()
    await asyncio.to_thread(service.driver.stop)
    await asyncio.to_thread(service.grammars.close)


async def _watch(service: EngineService) -> None:
    """If the loop dies, whoever waits for it is told."""
    while not service.driver.problem:
        await asyncio.sleep(0.5)
    service.hub.fail_all(f"the engine has failed ({service.driver.problem})")


SHUTDOWN_S = 5.0


class EngineServer:
    def __init__(self, runner: web.AppRunner, listener: EngineListener, address: str) -> None:
        self._runner, self.listener, self.address = runner, listener, address
        self._open = True

    async def close(self) -> None:
        """What is under way may end, for a while."""
        self.listener.close()
        if self._open:
            self._open = False
            await self._runner.cleanup()


async def open_server(
    service: EngineService,
    host: str,
    port: int,
    *,
    api_key: str | None = None,
    names: frozenset[str] = frozenset(),
    tls: ssl.SSLContext | None = None,
) -> EngineServer:
    """Listen for a service's clients; `names` are those under which it is reached beside its address."""
    sockets = await _bound(host, port)
    first = sockets[0].getsockname()
    loopback = all(ServedNames().has(str(entry.getsockname()[0])) for entry in sockets)
    own = frozenset() if loopback else frozenset({socket.gethostname().lower()})
    served = ServedNames(loopback, frozenset(name.lower() for name in names) | own, api_key is not None)
    try:
        app = build(service, api_key, served)
        runner, server = await set_up_app(app, SHUTDOWN_S)
        listener = EngineListener(server, app[CONNECTIONS], service.limits, service.dropped)
        await listener.listen(sockets, tls)
    except BaseException:
        for item in sockets:
            item.close()
        raise
    shown = f"[{first[0]}]" if ":" in first[0] else first[0]
    return EngineServer(runner, listener, f"{'https' if tls else 'http'}://{shown}:{first[1]}")


async def _bound(host: str, port: int) -> list[socket.socket]:
    """Sockets for each address of a host, on one port."""
    made: list[socket.socket] = []
    try:
        loop = asyncio.get_running_loop()
        result = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(result):
            at = (address[0], made[0].getsockname()[1] if made else port, *address[2:])
            made.append(socket.create_server(at, family=family, backlog=BACKLOG))
    except OSError as error:
        for item in made:
            item.close()
        raise InputError("--port", f"{host}:{port} cannot be used ({error.strerror or error})") from error
    return made
