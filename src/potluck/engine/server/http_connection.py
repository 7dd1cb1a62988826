"""One connection: aiohttp's protocol, with deadlines for heads and readers, and with errors in OpenAI's shape.

A connection counts as waiting (`api/http.py`) until a request has come whole. aiohttp's own count of
parsed requests tells when a head is there; `arrived` tells when its body is.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import ssl
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from potluck.api import http
from potluck.api.segments import UNSUPPORTED
from potluck.core.errors import FormatError
from potluck.engine.loop.jobs import JobEnded
from potluck.engine.loop.loop_thread import LoopStopped

HEAD_BYTES = 65_536  # Of one request's line and headers.
MOST_HEADERS = 100
LINGER_S = 5.0  # How long the rest of a refused body is read, so that the client sees the answer.

NEVER_S = 1e6  # aiohttp's own timer for idle connections, which says nothing to anybody, is not used.


def arrived(request: web.Request) -> None:
    if isinstance(request.protocol, HttpConnection):
        request.protocol.works()


class HttpConnection(RequestHandler):
    # fmt: off
    __slots__ = ("_answered", "_began_s", "_head_bytes", "_limits", "_listener", "_since_s", "_stalled_s",
                 "_unread_bytes", "_wire")
    # fmt: on

    def __init__(self, listener: EngineListener, server: web.Server, limits: RequestLimits) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # none is what AppRunner takes for none
            logger=listener.log,
            keepalive_timeout=NEVER_S,
            lingering_time=LINGER_S,
            max_headers=MOST_HEADERS,
        )
        self._listener, self._limits = listener, limits
        self._wire: asyncio.Transport | None = None  # As `transport`, but until it is closed in truth.
        self._since_s = self._loop.time()  # Since it was made, or since the latest answer.
        self._began_s: float | None = None  # When the first byte of the head came that is not whole yet.
        self._stalled_s: float | None = None
        """Since when the client has read nothing of what is there for it."""
        self._unread_bytes = 0
        self._head_bytes = 0
        self._answered = 0

    # What asyncio tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._wire = transport
        super().connection_made(transport)
        if self._force_close:  # It had to give way before it was in.
            transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._listener.crowd.left(self)
        super().connection_lost(exc)
        self._wire = None

    def data_received(self, data: bytes) -> None:
        before = self._request_count
        super().data_received(data)
        if self._request_count > before:
            self._began_s, self._head_bytes = None, 0
        elif data and self._request_count == self._answered:
            if self._began_s is None:
                self._began_s = self._loop.time()
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._listener.drop("large")
                self.send_away(431, f"the head is larger than {HEAD_BYTES} bytes")

    # What aiohttp tells.

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._answered += 1
            self._since_s = self._loop.time()
            self._listener.crowd.waits(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What was not HTTP, in the shape that all errors have here."""
        made = super().handle_error(request, status, exc, message)
        line = "internal error; the engine's log says more"
        if status < 500:
            line = f"the request cannot be read as HTTP ({(message or 'unknown').splitlines()[0][:120]})"
        answer = web.Response(
            status=made.status,
            text=json.dumps(http.error_object(status, line)),
            content_type="application/json",
            headers={http.HEADER: http.request_id(None)},
        )
        answer.force_close()
        return answer

    # What the listener asks.

    def works(self) -> None:
        self._listener.crowd.works(self)

    def overdue(self, now_s: float) -> str:
        limits = self._limits
        self._look(now_s)
        if self._stalled_s is not None and now_s - self._stalled_s > limits.stalled_s:
            return "stalled"
        if self._request_count > self._answered or self._wire is None or self._wire.is_closing():
            return ""  # What is being read or answered has deadlines of its own.
        if self._began_s is not None or not self._answered:
            began_s = self._since_s if self._began_s is None else self._began_s
            return "late" if now_s - began_s > limits.head_s else ""
        return "idle" if now_s - self._since_s > limits.idle_s else ""

    def _look(self, now_s: float) -> None:
        if self._wire is None:
            return
        unread_bytes = self._wire.get_write_buffer_size()
        if not unread_bytes:
            self._stalled_s = None
        elif self._stalled_s is None or unread_bytes < self._unread_bytes:
            self._stalled_s = now_s
        self._unread_bytes = unread_bytes

    def end(self, why: str) -> None:
        if why == "late":
            self.send_away(408, f"the request's head did not come within {self._limits.head_s:g} s")
        elif self._wire is not None and why == "stalled":
            self._wire.abort()
        else:
            self.force_close()

    def send_away(self, status: int, line: str, code: str | None = None) -> None:
        """End it; who has begun a request is told why, and whose answer has begun is cut off."""
        if self._wire is None:  # It is only just coming in.
            self._force_close = True
            return
        if self._request_count > self._answered:
            self._wire.abort()
            return
        if self._began_s is not None and not self._wire.is_closing():
            self._wire.write(self.canned(status, line, code))
        self.force_close()

    @staticmethod
    def canned(status: int, line: str, code: str | None = None) -> bytes:
        body = json.dumps(http.error_object(status, line, code=code)).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        head += (
            f"Content-Length: {len(body)}\r\nConnection: close\r\n{http.HEADER}: {http.request_id(None)}\r\n"
        )
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
    arrived(request)
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
    return http.HttpRefusal(503, why, "try_again") if job_ended.again else http.HttpRefusal(500, why)


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


ACCEPTED_AT_ONCE = 64
BACKLOG = 512
SHARE_OF_FILES = 0.75
"""Of the file descriptors that a process may have; the others are for caches on the move, workers and files."""
WATCH_S = 1.0
REST_S = 0.1  # Until the next try, when there was no file descriptor left to accept with.
LOG_S = 60.0  # Dropped connections are told of at most this often.


def _our_fault(record: logging.LogRecord) -> bool:
    """What a client does wrong is the client's to know, not a traceback in the engine's log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)


server_log = logging.getLogger("potluck.engine.http")
server_log.addFilter(_our_fault)


class EngineListener:
    """Accepts connections, no more than there is room for (`api/http.py` says who gives way), and watches each: for
    heads that do not come, for clients that stop reading, for idle ones. aiohttp alone would wait for ever, and take
    as many as there are file descriptors."""

    def __init__(
        self,
        sockets: list[socket.socket],
        server: web.Server,
        limits: RequestLimits,
        dropped: Counter[str],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.log = server_log
        self._sockets, self._server, self._limits, self._dropped = sockets, server, limits, dropped
        self._tls = tls
        self.crowd: http.ConnectionLimits[HttpConnection] = http.ConnectionLimits(
            min(limits.connections, http.open_files() * SHARE_OF_FILES)
        )
        self._coming: set[asyncio.Task[None]] = set()
        self._told: Counter[str] = Counter()
        self._told_s = -LOG_S
        self._watching = self._loop.call_later(WATCH_S, self._watch)
        self._accepting = {item: self._loop.create_task(self._accept(item)) for item in sockets}

    async def close(self) -> None:
        """Accept nobody any more; those who are here are the server's."""
        self._watching.cancel()
        self._tell()
        tasks = (*self._accepting.values(), *self._coming)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for item in self._sockets:
            item.close()

    def drop(self, why: str) -> None:
        self._dropped[why] += 1

    def _tell(self) -> None:
        now_s = self._loop.time()
        if self._dropped != self._told and now_s - self._told_s >= LOG_S:
            shown = ", ".join(f"{count} {why}" for why, count in sorted(self._dropped.items()))
            log.warning("connections dropped so far: %s; %d are open", shown, len(self.crowd))
            self._told, self._told_s = Counter(self._dropped), now_s

    async def _accept(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        for number in itertools.count():
            if number % ACCEPTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                connection, address = await self._loop.sock_accept(listening)
            except ConnectionAbortedError:
                continue
            except (
                OSError
            ):  # No file descriptor is left, or no memory; asking again at once would be in vain.
                self.drop("no_files")
                self._make_room()
                await asyncio.sleep(REST_S)
                continue
            if self.crowd.full and not self._make_room():
                self.drop("full")
                _turn_away(connection)
                continue
            visit = HttpConnection(self, self._server, self._limits)
            self.crowd.came(visit, str(address[0]))
            task = self._loop.create_task(self._welcome(visit, connection))
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)

    def _make_room(self) -> bool:
        connection = self.crowd.oldest()
        if connection is None:
            return False
        self.crowd.left(connection)
        self.drop("crowded_out")
        connection.send_away(503, "too many connections; try again", "overloaded")
        return True

    async def _welcome(self, visit: HttpConnection, connection: socket.socket) -> None:
        try:
            late_s = None if self._tls is None else self._limits.head_s
            await self._loop.connect_accepted_socket(
                lambda: visit, connection, ssl=self._tls, ssl_handshake_timeout=late_s
            )
        except (OSError, asyncio.CancelledError):  # It has left already, or we have.
            self.crowd.left(visit)
            connection.close()

    def _watch(self) -> None:
        self._watching = self._loop.call_later(WATCH_S, self._watch)
        now_s = self._loop.time()
        for connection in self.crowd:
            why = connection.overdue(now_s)
            if why:
                self.drop(why)
                connection.end(why)
        for item, task in self._accepting.items():
            if task.done():  # A fault of ours; an engine that nobody can reach would be worse.
                log.error("accepting failed", exc_info=task.exception())
                self._accepting[item] = self._loop.create_task(self._accept(item))
        self._tell()


def _turn_away(connection: socket.socket) -> None:
    connection.setblocking(False)
    try:
        connection.send(
            HttpConnection.canned(503, "too many requests are under way; try again", "overloaded")
        )
    except OSError:
        return  # It has left.
    finally:
        connection.close()
