"""The clients' port: connections, their limits and deadlines, requests and responses.

    ClientListener ─▶ ClientConnection (bytes in, requests out) ─▶ handler(ClientExchange) ─▶ bytes of its answer

uvloop accepts the connections, up to a limit: a connection beyond it replaces the one that has waited longest for a
complete request (`ConnectionLimits`), or gets 503 where all are busy. A check of all connections each second ends
those that take too long, so that a request costs no timer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Protocol, cast

from potluck.api.http import ConnectionLimits, HttpRefusal, error_object, open_files
from potluck.core.errors import InputError
from potluck.gateway.http.limits import SHARE_OF_FILES, HttpLimits
from potluck.gateway.http.parser import Headers, HttpRequest, RequestReader

BACKLOG = 2048
CHECK_INTERVAL_S = 1.0
DROPPED_LOG_INTERVAL_S = 60.0  # The least time between two lines about dropped connections.
BYTES_PER_TURN_MAX = 65_536
REQUEST_COST_BYTES = 2_048
"""Requests that one connection may have answered in one turn of the loop, by the bytes of their bodies and
REQUEST_COST_BYTES for each: one read may hold thousands of requests."""
READ_AHEAD_BYTES_MAX = 65_536  # How much of the next requests is read while one is being answered.
JOINED_WRITE_BYTES_MAX = 65_536
"""Up to this size a part of a body is copied into one write with its framing; a larger one is written as it is."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}
STREAM_HEADERS = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
"""Proxies pass parts of such a response on at once."""
_UNANSWERED, _STREAMING, _COMPLETE = 0, 1, 2

log = logging.getLogger(__name__)
Fields = Iterable[tuple[bytes, bytes]]


class Exchange(Protocol):
    """A complete request of a client, and its response. Exactly one response is written."""

    method: bytes
    path: bytes
    query: bytes
    headers: Headers
    body: bytes
    peer: str
    came_s: float
    """When its first byte arrived, by the monotonic clock."""
    on_gone: Callable[[], None] | None
    """Set by the handler: called once when the client disconnects before the end of the response."""
    on_room: Callable[[bool], None] | None
    """Set by the handler: called with False when the write buffer is full, with True when there is room again."""

    def reply(self, status: int, body: bytes, headers: Fields = (), lines: bytes = b"") -> None:
        """Write the whole response. `lines` are headers as bytes, which hold no text of a client or an engine."""

    def begin(self, status: int, headers: Fields = (), lines: bytes = b"") -> None: ...

    def write(self, data: bytes) -> None:
        """Write a part of the body; nothing happens after the client has disconnected."""

    def end(self) -> None: ...

    def drop(self) -> None:
        """Abort the connection, so that the client sees an incomplete response."""


Handler = Callable[[Exchange], None]
"""Called for each complete request. It may answer at once or later."""


def head_of(status: int, fields: Fields, date: bytes) -> bytes:
    parts = [STATUS_LINES.get(status) or b"HTTP/1.1 %d Other\r\n" % status, date]
    for name, value in fields:
        parts += (name, b": ", value, b"\r\n")
    head = b"".join(parts)
    lines = len(parts) + 6 >> 2
    if head.count(b"\n") != lines or head.count(b"\r") != lines:
        raise ValueError("a header of an answer holds a line end")
    return head


class ClientExchange:
    """The `Exchange` of an open connection."""

    __slots__ = (
        "_chunked", "_connection", "_keep_alive", "_state", "body", "came_s", "headers", "method", "on_gone",
        "on_room", "path", "peer", "query",
    )  # fmt: skip

    def __init__(self, connection: ClientConnection, request: HttpRequest, peer: str, came_s: float) -> None:
        self.method, self.path, self.query = request.method, request.path, request.query
        self.headers: Headers = request.headers
        self.body, self.peer, self.came_s = request.body, peer, came_s
        self.on_gone: Callable[[], None] | None = None
        self.on_room: Callable[[bool], None] | None = None
        self._connection: ClientConnection | None = connection
        """None once the response is complete or the client has disconnected."""
        self._chunked, self._keep_alive, self._state = request.http_1_1, request.keep_alive, _UNANSWERED

    def reply(self, status: int, body: bytes, headers: Fields = (), lines: bytes = b"") -> None:
        connection = self._connection
        if connection is None:
            return
        assert self._state == _UNANSWERED, "a second answer to one request"
        listener = connection.listener
        keep_alive = self._keep_alive and not listener.closing
        head = head_of(status, headers, listener.date)
        end = (
            b"content-length: %d\r\n\r\n"
            if keep_alive
            else b"content-length: %d\r\nconnection: close\r\n\r\n"
        )
        if status == 204 or status == 304:
            end, body = (b"\r\n" if keep_alive else b"connection: close\r\n\r\n"), b""
        else:
            end = end % len(body)
        if self.method == b"HEAD":
            body = b""
        self._state, self._connection = _COMPLETE, None  # As `_finish`, without the call.
        self.on_gone = self.on_room = None
        if len(body) <= JOINED_WRITE_BYTES_MAX:
            connection.write(b"".join((head, lines, end, body)))
        else:
            connection.write(head + lines + end)
            connection.write(body)
        connection.answered(keep_alive)

    def begin(self, status: int, headers: Fields = (), lines: bytes = b"") -> None:
        connection = self._connection
        if connection is None:
            return
        assert self._state == _UNANSWERED, "a second answer to one request"
        listener = connection.listener
        self._keep_alive = self._keep_alive and not listener.closing
        head = head_of(status, headers, listener.date) + lines
        if self._chunked:
            head += b"transfer-encoding: chunked\r\n"
        if not self._keep_alive:
            head += b"connection: close\r\n"
        connection.write(head + b"\r\n")
        self._state = _COMPLETE if self.method == b"HEAD" else _STREAMING

    def write(self, data: bytes) -> None:
        connection = self._connection
        if connection is None or not data or self._state == _COMPLETE:
            return
        assert self._state == _STREAMING, "a piece of an answer that has not begun"
        if not self._chunked:
            connection.write(data)
        elif len(data) <= JOINED_WRITE_BYTES_MAX:
            connection.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            connection.write(b"%x\r\n" % len(data))
            connection.write(data)
            connection.write(b"\r\n")

    def end(self) -> None:
        connection = self._connection
        if connection is None:
            return
        assert self._state != _UNANSWERED, "the end of an answer that has not begun"
        if self._chunked and self._state == _STREAMING:
            connection.write(b"0\r\n\r\n")
        self._finish()
        connection.answered(self._keep_alive)

    def _finish(self) -> None:
        self._state, self._connection = _COMPLETE, None
        # The callbacks refer to objects that refer to this one: break the cycles.
        self.on_gone = self.on_room = None

    def drop(self) -> None:
        connection = self._connection
        self._finish()
        if connection is not None:
            connection.abort()

    def has_begun(self) -> bool:
        return self._state != _UNANSWERED

    def client_disconnected(self) -> None:
        if self._connection is None:
            return
        on_gone = self.on_gone
        self._finish()
        if on_gone is not None:
            on_gone()


class ClientConnection(asyncio.Protocol):
    """Turns bytes into exchanges, one after the other; each is answered before the next."""

    __slots__ = (
        "_closing", "_deferred", "_exchange", "_first_byte_s", "_fresh", "_reader", "_reading_paused", "_since_s",
        "_stalled_s", "_taking", "_transport", "_unread_bytes", "_writing_paused", "listener", "peer", "write",
    )  # fmt: skip

    write: Callable[[bytes], None]
    """The transport's own; uvloop joins the writes of one turn of its loop into one system call."""

    def __init__(self, listener: ClientListener) -> None:
        self.listener = listener
        self._reader = RequestReader(listener.limits)
        self._exchange: ClientExchange | None = None
        self._taking = False
        self._deferred = False  # Further requests are taken in the next turn of the loop.
        self._closing = False  # The last response was written; further bytes are discarded.
        self._writing_paused = False
        self._reading_paused = False
        self._since_s = time.monotonic()  # Of the connection, the latest response, or the start of closing.
        self._first_byte_s = 0.0  # When the first byte of an incomplete request arrived; 0 without one.
        self._fresh = True
        self._stalled_s: float | None = None
        self._unread_bytes = 0
        self.peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self.write = self._transport.write
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if peer else ""
        self.listener.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.listener.remove(self)
        self._closing = True
        self._report_disconnect()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if not self._first_byte_s:
            self._first_byte_s = time.monotonic()
        reader = self._reader
        reader.feed(data)
        if self._exchange is None and not self._deferred:
            self._take_requests()
        elif reader.held_bytes > READ_AHEAD_BYTES_MAX and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """A client that ends its side has disconnected, even while it is answered: the two cannot be told apart."""
        if self._exchange is not None:
            self.abort()
            self._report_disconnect()

    def pause_writing(self) -> None:
        self._writing_paused = True
        if self._exchange is not None and self._exchange.on_room is not None:
            self._exchange.on_room(False)

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._exchange is None:
            self._take_requests()
        elif self._exchange.on_room is not None:
            self._exchange.on_room(True)

    def _take_requests(self) -> None:
        """Hand complete requests to the handler. A loop instead of recursion: one read may hold thousands."""
        if self._taking or self._deferred:
            return
        self._taking = True
        reader, turn_bytes = self._reader, 0
        try:
            while self._exchange is None and not self._writing_paused and not self._closing:
                if turn_bytes > BYTES_PER_TURN_MAX and reader.held_bytes:
                    self._deferred = True
                    asyncio.get_running_loop().call_soon(self._next_turn)
                    break
                request = reader.take()
                if request is None:
                    self._await_more()
                    break
                self._exchange = exchange = ClientExchange(self, request, self.peer, self._first_byte_s)
                self._fresh = False
                turn_bytes += len(request.body) + REQUEST_COST_BYTES
                listener = self.listener
                listener.mark_busy(self)
                if listener.incomplete_bytes:
                    listener.forget_incomplete(self)
                try:
                    listener.handler(exchange)
                except Exception:  # A bug: the client gets 500, the log the traceback.
                    log.exception("a request could not be handled")
                    self._fault(exchange)
        except HttpRefusal as refusal:
            self.refuse(refusal)
        finally:
            self._taking = False

    def _next_turn(self) -> None:
        self._deferred = False
        if self._exchange is None:
            self._take_requests()

    def _await_more(self) -> None:
        reader = self._reader
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        if reader.awaits_continue:
            reader.awaits_continue = False
            self.write(CONTINUE)
        held_bytes = reader.held_bytes
        if held_bytes:
            self.listener.note_incomplete(self, held_bytes)
        elif not reader.in_body:
            self._first_byte_s = 0.0

    def answered(self, keep_alive: bool) -> None:
        self._exchange = None
        self._since_s = time.monotonic()
        if not keep_alive or self.listener.closing:
            self._close()
            return
        self.listener.mark_waiting(self)
        self._first_byte_s = self._since_s if self._reader.held_bytes else 0.0
        if self._first_byte_s:
            self._take_requests()  # It resumes reading when it needs more.
        elif self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()

    def _fault(self, exchange: ClientExchange) -> None:
        if exchange.has_begun():
            exchange.drop()
            return
        body = error_object(500, "internal error; the gateway's log says more")
        exchange.reply(500, json.dumps(body).encode(), ((b"content-type", b"application/json"),))

    # The end of a connection.

    def refuse(self, refusal: HttpRefusal) -> None:
        """Answer what cannot become a request, then close the connection."""
        if self._exchange is not None:
            self.abort()
            return
        self.listener.drop(str(refusal.status))
        self.write(refusal_response(refusal, self.listener.date))
        self._close()

    def _close(self) -> None:
        """Write nothing more. Reading goes on for a while, or the client might not see the last response."""
        if self._closing:
            return
        self._closing = True
        self._since_s = time.monotonic()
        expects_bytes = self._reader.held_bytes or self._reader.in_body or self._reading_paused
        self._reader = RequestReader(self.listener.limits)
        self.listener.forget_incomplete(self)
        if not expects_bytes:
            self._transport.close()
            return
        if self._reading_paused:
            self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def _report_disconnect(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_disconnected()

    def close_idle(self) -> None:
        """Close unless a request is being answered; its response announces the close."""
        if self._exchange is None and not self._closing:
            self._close()

    def overdue(self, now_s: float) -> str:
        """The reason to end the connection now, or nothing."""
        limits = self.listener.limits
        unread_bytes = self._transport.get_write_buffer_size()
        if not unread_bytes:
            self._stalled_s = None
        elif self._stalled_s is None or unread_bytes < self._unread_bytes:
            self._stalled_s = now_s
        self._unread_bytes = unread_bytes
        if self._stalled_s is not None and now_s - self._stalled_s > limits.stalled_s:
            return "stalled"
        if self._closing:
            return "lingering" if now_s - self._since_s > limits.linger_s and not unread_bytes else ""
        if self._exchange is not None:
            return ""
        if self._reader.in_body:
            spare_s = self._reader.held_bytes / limits.body_bytes_per_s
            return "late" if now_s - self._first_byte_s > limits.body_s + spare_s else ""
        if self._first_byte_s:
            return "late" if now_s - self._first_byte_s > limits.head_s else ""
        return "idle" if now_s - self._since_s > (limits.head_s if self._fresh else limits.idle_s) else ""

    def end(self, why: str) -> None:
        if why == "late":
            part = "body" if self._reader.in_body else "head"
            self.refuse(HttpRefusal(408, f"the request's {part} did not come in time"))
            return
        self.listener.drop(why)
        if why == "idle":
            self._close()
        else:
            self.abort()
            self._report_disconnect()

    def make_room(self) -> None:
        """Make room for a new connection; a client that has begun a request gets 503."""
        self.listener.drop("crowded_out")
        if self._first_byte_s and not self._closing and not self._transport.get_write_buffer_size():
            refusal = HttpRefusal(503, "too many connections; try again", "overloaded")
            self.write(refusal_response(refusal, self.listener.date))
            self._closing = True
            self._transport.close()
        else:
            self.abort()


def refusal_response(refusal: HttpRefusal, date: bytes) -> bytes:
    body = json.dumps(error_object(refusal.status, str(refusal), code=refusal.code)).encode()
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        (b"x-request-id", f"req-{secrets.token_hex(12)}".encode()),
    ]
    if refusal.status == 503:
        fields.append((b"retry-after", b"1"))
    return head_of(refusal.status, fields, date) + b"\r\n" + body


class ClientListener:
    """Listening sockets and the connections that they accepted."""

    def __init__(self, handler: Handler, limits: HttpLimits) -> None:
        self.handler, self.limits = handler, limits
        self.closing = self._gentle = False
        self._handshake_s = 0.0
        self.date = b""
        self.address = ""
        self.dropped: Counter[str] = Counter()
        """Counts of connections that were ended because of what the client did, by reason."""
        self._connections: ConnectionLimits[ClientConnection] = ConnectionLimits(
            min(limits.connections, open_files() * SHARE_OF_FILES)
        )
        self.mark_busy, self.mark_waiting = self._connections.mark_busy, self._connections.mark_waiting
        """A connection has a complete request; its request was answered."""
        self.incomplete_bytes: dict[ClientConnection, int] = {}  # Bytes of incomplete requests.
        self._incomplete_bytes = 0
        self._servers: list[asyncio.Server] = []
        self.sockets: list[socket.socket] = []
        self._logged_dropped: Counter[str] = Counter()
        self._logged_s = -DROPPED_LOG_INTERVAL_S
        self._empty: asyncio.Event = asyncio.Event()
        shortest_s = min(limits.head_s, limits.body_s, limits.idle_s, limits.stalled_s, limits.linger_s)
        self._check_interval_s = min(CHECK_INTERVAL_S, shortest_s / 4)
        self._checking: asyncio.TimerHandle | None = None
        self._set_date()

    def __len__(self) -> int:
        return len(self._connections)

    async def listen(self, sockets: list[socket.socket], tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.sockets = sockets
        limit_s = None if tls is None else self.limits.head_s
        self._handshake_s = limit_s or 0.0
        make = partial(ClientConnection, self)
        for item in sockets:
            server = await loop.create_server(
                make, sock=item, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=limit_s
            )
            self._servers.append(server)
        self._checking = loop.call_later(self._check_interval_s, self._check)

    async def close(self, within_s: float = 5.0, *, gently: bool = False, for_good: bool = False) -> None:
        """Accept no more connections; wait `within_s` for requests that are being answered, then abort the rest.

        `for_good`: close the port although other processes hold its sockets too. `gently`: connections that were
        accepted may still send one request.
        """
        self.closing, self._gentle = True, gently
        own_sockets = [entry.dup() for entry in self.sockets] if for_good else []
        for server in self._servers:
            server.close()
        for item in own_sockets:
            with suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
            item.close()
        if gently:
            # Connections in their TLS handshake are not counted yet.
            await asyncio.sleep(min(within_s, self._handshake_s))
        else:
            for connection in self._connections:
                connection.close_idle()
        if len(self._connections):
            self._empty.clear()
            try:
                await asyncio.wait_for(self._empty.wait(), within_s)
            except TimeoutError:
                for connection in self._connections:
                    connection.end("cut off")
        if self._checking is not None:
            self._checking.cancel()
            self._checking = None

    # Called by connections.

    def add(self, connection: ClientConnection) -> None:
        full = self._connections.is_full and not self._make_room()
        self._connections.add(connection, connection.peer)
        if full:
            connection.refuse(HttpRefusal(503, "too many requests are under way; try again", "overloaded"))
        elif self.closing and not self._gentle:
            connection.close_idle()

    def remove(self, connection: ClientConnection) -> None:
        self._connections.remove(connection)
        self.forget_incomplete(connection)
        if not len(self._connections):
            self._empty.set()

    def note_incomplete(self, connection: ClientConnection, size: int) -> None:
        """Note the bytes of an incomplete request. Beyond the limit of all, the largest is refused."""
        self._incomplete_bytes += size - self.incomplete_bytes.get(connection, 0)
        self.incomplete_bytes[connection] = size
        while self._incomplete_bytes > self.limits.bodies_bytes:
            largest = max(self.incomplete_bytes, key=self.incomplete_bytes.__getitem__)
            self.forget_incomplete(largest)
            largest.refuse(
                HttpRefusal(503, "too much is being sent to this gateway; try again", "overloaded")
            )

    def forget_incomplete(self, connection: ClientConnection) -> None:
        self._incomplete_bytes -= self.incomplete_bytes.pop(connection, 0)

    def drop(self, why: str) -> None:
        self.dropped[why] += 1

    def _make_room(self) -> bool:
        connection = self._connections.longest_waiting()
        if connection is None:
            return False
        self._connections.remove(connection)
        connection.make_room()
        return True

    # Called by a timer.

    def _set_date(self) -> None:
        self.date = b"date: " + formatdate(usegmt=True).encode() + b"\r\n"

    def _check(self) -> None:
        self._checking = asyncio.get_running_loop().call_later(self._check_interval_s, self._check)
        self._set_date()
        now_s = time.monotonic()
        for connection in self._connections:
            why = connection.overdue(now_s)
            if why:
                connection.end(why)
        if self.dropped != self._logged_dropped and now_s - self._logged_s >= DROPPED_LOG_INTERVAL_S:
            counts = ", ".join(f"{count} {why}" for why, count in sorted(self.dropped.items()))
            log.warning("connections dropped so far: %s; %d are open", counts, len(self._connections))
            self._logged_dropped, self._logged_s = Counter(self.dropped), now_s


async def open_port(
    handler: Handler,
    host: str,
    port: int,
    *,
    limits: HttpLimits | None = None,
    tls: ssl.SSLContext | None = None,
    taken: Sequence[socket.socket] = (),
) -> ClientListener:
    """Listen for clients. `taken` are sockets that listen already."""
    sockets = list(taken) or await bound(host, port)
    listener = ClientListener(handler, limits or HttpLimits())
    listener.address = url_of(sockets[0], tls)
    try:
        await listener.listen(sockets, tls)
    except BaseException:
        for item in sockets:
            item.close()
        raise
    return listener


def url_of(listening: socket.socket, tls: ssl.SSLContext | None) -> str:
    host, port = listening.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


async def bound(host: str, port: int, shared: bool = False) -> list[socket.socket]:
    """Sockets for each address of a host, on one port. `shared`: several processes listen on it."""
    sockets: list[socket.socket] = []
    try:
        loop = asyncio.get_running_loop()
        result = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(result):
            at = (address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:])
            sockets.append(socket.create_server(at, family=family, backlog=BACKLOG, reuse_port=shared))
    except OSError as error:
        for item in sockets:
            item.close()
        raise InputError("--port", f"{host}:{port} cannot be used ({error.strerror or error})") from error
    return sockets
