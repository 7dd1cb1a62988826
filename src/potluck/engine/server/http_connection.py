"""Connections to an engine: how many, and how long each may take, around aiohttp's own protocol.

aiohttp reads and answers requests. `HttpConnection` passes everything on to it and notes when a request begins and
when it has been answered, which the application's middleware tells. A connection counts as waiting (`api/http.py`)
until a request is complete.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

import aiohttp
from aiohttp import web
from aiohttp.http import HttpProcessingError

from potluck.api import http
from potluck.api.aiohttp_requests import set_up
from potluck.api.segments import UNSUPPORTED
from potluck.core.errors import FormatError
from potluck.engine.loop.jobs import JobEnded
from potluck.engine.loop.loop_thread import LoopStopped

Connections = dict[asyncio.BaseProtocol, "HttpConnection"]
CONNECTIONS: web.AppKey[Connections] = web.AppKey("connections")
"""Connections by aiohttp's protocol, which is what a request refers to."""


def connection_of(request: web.Request) -> HttpConnection | None:
    """None where the application is served without a listener."""
    return request.app[CONNECTIONS].get(request.protocol)


def request_complete(request: web.Request) -> None:
    connection = connection_of(request)
    if connection is not None:
        connection.request_complete()


class HttpConnection(asyncio.Protocol):
    __slots__ = (
        "_began_s", "_busy", "_fresh", "_http", "_listener", "_loop", "_since_s", "_stalled_s", "_transport",
        "_unread_bytes",
    )  # fmt: skip

    def __init__(self, listener: EngineListener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._http: web.RequestHandler | None = None
        """aiohttp's protocol of this connection; None while there is no room for it."""
        self._busy, self._fresh = False, True
        self._since_s = self._loop.time()  # Since it was made, or since the latest answer.
        self._began_s: float | None = None  # When the first byte of an incomplete head arrived.
        self._stalled_s: float | None = None
        """Since when the client has read nothing of what is written for it."""
        self._unread_bytes = 0

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        listener, peer = self._listener, transport.get_extra_info("peername")
        if not listener.admit(self, str(peer[0]) if peer else ""):
            self._transport.write(_canned(503, "too many requests are under way; try again", "overloaded"))
            self._transport.close()
            return
        self._http = listener.server()
        listener.connections[self._http] = self
        self._http.connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._listener.open_connections.remove(self)
        if self._http is not None:
            self._listener.connections.pop(self._http, None)
            self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._http is not None:
            if self._began_s is None and not self._busy:
                self._began_s = self._loop.time()
            self._http.data_received(data)

    def eof_received(self) -> None:
        if self._http is not None:
            self._http.eof_received()

    def pause_writing(self) -> None:
        if self._http is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._http is not None:
            self._http.resume_writing()

    # Called by the middleware.

    def head_complete(self) -> None:
        self._busy, self._fresh, self._began_s = True, False, None

    def request_complete(self) -> None:
        self._listener.open_connections.mark_busy(self)

    def answered(self) -> None:
        self._busy = False
        self._since_s = self._loop.time()
        self._listener.open_connections.mark_waiting(self)

    # Called by the listener.

    def overdue(self, now_s: float) -> str:
        """The reason to end the connection now, or nothing."""
        limits = self._listener.limits
        unread_bytes = self._transport.get_write_buffer_size()
        if not unread_bytes:
            self._stalled_s = None
        elif self._stalled_s is None or unread_bytes < self._unread_bytes:
            self._stalled_s = now_s
        self._unread_bytes = unread_bytes
        if self._stalled_s is not None and now_s - self._stalled_s > limits.stalled_s:
            return "stalled"
        if self._busy or self._transport.is_closing():
            return ""  # A request that is read or answered has deadlines of its own.
        if self._began_s is not None or self._fresh:
            began_s = self._since_s if self._began_s is None else self._began_s
            return "late" if now_s - began_s > limits.head_s else ""
        return "idle" if now_s - self._since_s > limits.idle_s else ""

    def end(self, why: str) -> None:
        if why == "stalled":
            self._transport.abort()
        elif why == "late":
            self.refuse(408, f"the request's head did not come within {self._listener.limits.head_s:g} s")
        else:
            self._transport.close()

    def refuse(self, status: int, line: str, code: str | None = None) -> None:
        """End the connection: with an answer if a head has begun, at once if a request is read or answered."""
        if self._busy:
            self._transport.abort()
            return
        if self._began_s is not None and not self._transport.is_closing():
            self._transport.write(_canned(status, line, code))
        self._transport.close()


def _canned(status: int, line: str, code: str | None = None) -> bytes:
    body = json.dumps(http.error_object(status, line, code=code)).encode()
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n{http.HEADER}: {http.request_id(None)}\r\n"
    return (head + ("Retry-After: 1\r\n" if status == 503 else "") + "\r\n").encode() + body


class Uploads:
    """Bodies that have not come whole. Where there are too many bytes at once, the largest body goes."""

    def __init__(self, body_bytes: int, most_bytes: int) -> None:
        self.body_bytes, self._most_bytes = body_bytes, most_bytes
        self._held: dict[aiohttp.StreamReader, int] = {}
        self.held_bytes = 0

    def grow(self, reader: aiohttp.StreamReader, size: int) -> None:
        self._held[reader] = self._held.get(reader, 0) + size
        self.held_bytes += size
        while self.held_bytes > self._most_bytes:
            largest = max(self._held, key=self._held.__getitem__)
            self.done(largest)
            refused = http.HttpRefusal(503, "too much is being sent to this engine; try again", "overloaded")
            if largest is reader:
                raise refused
            largest.set_exception(refused)

    def done(self, reader: aiohttp.StreamReader) -> None:
        self.held_bytes -= self._held.pop(reader, 0)


UPLOADS = web.AppKey("uploads", Uploads)
BODY_S = 30.0  # In which a body must have come.


async def read_object(request: web.Request, *, optional: bool = False) -> dict[str, object]:
    raw = await read_body(request)
    return {} if optional and not raw else http.parse_object(raw)


async def read_body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            raw = await _read(request)
    except TimeoutError:
        raise http.HttpRefusal(408, f"the body did not come within {BODY_S:g} s") from None
    except web.RequestPayloadError as error:
        raise FormatError("body", "cannot be decoded as its headers say") from error
    request_complete(request)
    return raw


async def _read(request: web.Request) -> bytes:
    uploads, reader = request.app[UPLOADS], request.content
    most_bytes = uploads.body_bytes
    if (request.content_length or 0) > most_bytes:
        raise web.HTTPRequestEntityTooLarge(most_bytes, request.content_length or 0)
    parts, size = [], 0
    try:
        while part := await reader.readany():
            size += len(part)
            if size > most_bytes:
                raise web.HTTPRequestEntityTooLarge(most_bytes, size)
            uploads.grow(reader, len(part))
            parts.append(part)
    finally:
        uploads.done(reader)
    return b"".join(parts)


log = logging.getLogger(__name__)


def ended(job_ended: JobEnded) -> http.HttpRefusal:
    if job_ended.code == UNSUPPORTED:
        return http.HttpRefusal(400, job_ended.problem, job_ended.code, "response_format")
    why = f"the request could not be completed ({job_ended.problem or job_ended.reason})"
    return http.HttpRefusal(503, why, "try_again") if job_ended.may_retry else http.HttpRefusal(500, why)


def error_body(error: Exception) -> tuple[int, dict[str, object]]:
    """The status and the body for an exception; what nobody expected says nothing of its inside."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    known = http.refusal(error)
    code = param = None
    if known is not None:
        status, message, code, param = known.status, str(known), known.code, known.param
    elif isinstance(error, LoopStopped):
        status, message, code = 503, str(error), "failed"
    elif isinstance(error, web.HTTPException):
        status = error.status
        why = "the body is larger than this engine reads" if status == 413 else error.reason
        message = f"{HTTPStatus(status).phrase}: {why}"
    elif isinstance(error, ConnectionError):  # nobody is left to read it
        status, message = 400, "the connection was closed"
    elif isinstance(error, TimeoutError):
        status, message, code = 504, "the request took longer than it may", "deadline"
    else:
        log.error("a handler failed", exc_info=error)
        status, message = 500, "internal error; the engine's log says more"
    return status, http.error_object(status, message, param=param, code=code)


def error_response(error: Exception) -> web.Response:
    status, body = error_body(error)
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return web.Response(
        status=status, text=json.dumps(body), content_type="application/json", headers=headers
    )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    body_bytes: int = 8_000_000
    bodies_bytes: int = 256_000_000
    """Of all bodies that have not come whole."""
    connections: int = 1280
    """At once, and at most three quarters of the files that the process may have open."""
    head_s: float = 10.0
    """In which a request's line and headers must have come."""
    idle_s: float = 75.0
    """How long a connection is kept between requests."""
    stalled_s: float = 30.0
    """How long an answer waits for a client that reads nothing."""
    open_requests: int = 1024
    """At once; more are refused with 429."""
    deadline_s: float = 600.0
    """Of one request, from its arrival to its last token."""
    handover_s: float = 120.0
    """Of one hand-over, the sender's work included."""
    attach_s: float = 10.0
    """How long a fetch waits for a sender that has not heard of the request yet."""
    lease_s: float = 60.0
    """How long a cache waits for whoever fetches it."""


BACKLOG = 512
SHARE_OF_FILES = 0.75
"""Of the file descriptors that a process may have; the others are for KV transfers, workers and files."""
CHECK_INTERVAL_S = 1.0
DROPPED_LOG_INTERVAL_S = 60.0  # The least time between two lines about dropped connections.

HEADERS_MAX = 100
LINGER_S = 5.0  # How long the rest of a refused body is read, so that the client sees the answer.
NO_KEEPALIVE_TIMER_S = 1e6  # `HttpConnection` watches idle connections and counts those that it ends.


def _is_own_fault(record: logging.LogRecord) -> bool:
    """Invalid requests get an answer, not a traceback in the engine's log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)


server_log = logging.getLogger("potluck.engine.http")
server_log.addFilter(_is_own_fault)


async def set_up_app(app: web.Application, shutdown_s: float) -> tuple[web.AppRunner, web.Server]:
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=server_log,
        shutdown_timeout=shutdown_s,
        keepalive_timeout=NO_KEEPALIVE_TIMER_S,
        lingering_time=LINGER_S,
        max_headers=HEADERS_MAX,
    )
    return runner, await set_up(runner)


class EngineListener:
    """Accepts connections up to a limit (`api/http.py` says which one is closed for a new one).

    Ends those that take too long: with incomplete heads, with clients that stop reading, and idle ones. aiohttp has
    no such limits.
    """

    def __init__(
        self, server: web.Server, connections: Connections, limits: RequestLimits, dropped: Counter[str]
    ) -> None:
        self.server, self.connections, self.limits = server, connections, limits
        self._dropped = dropped
        self.open_connections: http.ConnectionLimits[HttpConnection] = http.ConnectionLimits(
            min(limits.connections, http.open_files() * SHARE_OF_FILES)
        )
        self._logged: Counter[str] = Counter()
        self._logged_s = -DROPPED_LOG_INTERVAL_S
        self._servers: list[asyncio.Server] = []
        self._watching: asyncio.TimerHandle | None = None

    async def listen(self, sockets: list[socket.socket], tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        handshake_s = None if tls is None else self.limits.head_s
        for item in sockets:
            server = await loop.create_server(
                lambda: HttpConnection(self),
                sock=item,
                ssl=tls,
                backlog=BACKLOG,
                ssl_handshake_timeout=handshake_s,
            )
            self._servers.append(server)
        self._watching = loop.call_later(CHECK_INTERVAL_S, self._watch)

    def close(self) -> None:
        """Accept no more connections; aiohttp ends those that are open."""
        if self._watching is not None:
            self._watching.cancel()
        self._log_dropped()
        for server in self._servers:
            server.close()

    def admit(self, connection: HttpConnection, peer: str) -> bool:
        if self.open_connections.is_full and not self._make_room():
            self._dropped["full"] += 1
            return False
        self.open_connections.add(connection, peer)
        return True

    def _make_room(self) -> bool:
        connection = self.open_connections.longest_waiting()
        if connection is None:
            return False
        self.open_connections.remove(connection)
        self._dropped["crowded_out"] += 1
        connection.refuse(503, "too many connections; try again", "overloaded")
        return True

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._watching = loop.call_later(CHECK_INTERVAL_S, self._watch)
        now_s = loop.time()
        for connection in self.open_connections:
            why = connection.overdue(now_s)
            if why:
                self._dropped[why] += 1
                connection.end(why)
        self._log_dropped()

    def _log_dropped(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._dropped != self._logged and now_s - self._logged_s >= DROPPED_LOG_INTERVAL_S:
            shown = ", ".join(f"{count} {why}" for why, count in sorted(self._dropped.items()))
            log.warning("connections dropped so far: %s; %d are open", shown, len(self.open_connections))
            self._logged, self._logged_s = Counter(self._dropped), now_s
