"""The clients' port: who may come in, how long they may take, and how it all ends.

    ClientListener ─▶ ClientConnection (bytes in, requests out) ─▶ handler(ClientExchange) ─▶ bytes of its answer

uvloop accepts the connections. No more are kept than there is room for: when one too many comes, the oldest of those
that wait for a whole request gives way (`ConnectionLimits`); where all are busy the new one is told so. One look a
second over all of them finds those that take too long, so that a request costs no timer.
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
WATCH_S = 1.0
LOG_S = 60.0  # Dropped connections are told of at most this often.
TURN_BYTES = 65_536
REQUEST_BYTES = 2_048
"""What one connection may have answered in one turn of the loop: so many bytes of bodies, where a request without one
counts as REQUEST_BYTES. One read may hold thousands of requests."""
AHEAD_BYTES = 65_536  # How much of the next requests is read while one is being answered.
JOINED_BYTES = 65_536
"""Up to here a piece is copied to stand in one write with its framing; what is larger is written as it is."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}
STREAM_HEADERS = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
"""Proxies on the way pass parts of a stream on at once."""
_NEW, _PIECES, _OVER = 0, 1, 2

log = logging.getLogger(__name__)
Fields = Iterable[tuple[bytes, bytes]]


class Exchange(Protocol):
    """One request of a client that has come whole, and its answer. Exactly one answer is given."""

    method: bytes
    path: bytes
    query: bytes
    headers: Headers
    body: bytes
    peer: str
    came_s: float
    """When its first byte came, by the monotonic clock."""
    on_gone: Callable[[], None] | None
    """Set by whoever answers: called once when the client leaves before the answer's end."""
    on_room: Callable[[bool], None] | None
    """Set as well: False when the client reads more slowly than is written, True when it has caught up."""

    def reply(self, status: int, body: bytes, headers: Fields = (), lines: bytes = b"") -> None:
        """The whole answer. `lines` are headers as they are sent, made of nothing that a client or a server said."""

    def begin(self, status: int, headers: Fields = (), lines: bytes = b"") -> None: ...

    def write(self, data: bytes) -> None:
        """A piece. After the client has left this does nothing."""

    def end(self) -> None: ...

    def drop(self) -> None:
        """Cut the connection: what was written must not be taken for whole."""


Handler = Callable[[Exchange], None]
"""Called for every request that has come whole. It may answer at once or later."""


def head_of(status: int, fields: Fields, date: bytes) -> bytes:
    parts = [STATUS_LINES.get(status) or b"HTTP/1.1 %d Other\r\n" % status, date]
    for name, value in fields:
        parts += (name, b": ", value, b"\r\n")
    made = b"".join(parts)
    lines = len(parts) + 6 >> 2
    if made.count(b"\n") != lines or made.count(b"\r") != lines:
        raise ValueError("a header of an answer holds a line end")
    return made


class ClientExchange:
    """The `Exchange` of a connection that is there."""

    __slots__ = (
        "_chunked", "_connection", "_state", "_stays", "body", "came_s", "headers", "method", "on_gone", "on_room",
        "path", "peer", "query",
    )  # fmt: skip

    def __init__(self, connection: ClientConnection, request: HttpRequest, peer: str, came_s: float) -> None:
        self.method, self.path, self.query = request.method, request.path, request.query
        self.headers: Headers = request.headers
        self.body, self.peer, self.came_s = request.body, peer, came_s
        self.on_gone: Callable[[], None] | None = None
        self.on_room: Callable[[bool], None] | None = None
        self._connection: ClientConnection | None = connection
        """None once the answer is over or the client has left."""
        self._chunked, self._stays, self._state = request.v11, request.stays, _NEW

    def reply(self, status: int, body: bytes, headers: Fields = (), lines: bytes = b"") -> None:
        connection = self._connection
        if connection is None:
            return
        assert self._state == _NEW, "a second answer to one request"
        listener = connection.port
        stays = self._stays and not listener.closing
        head = head_of(status, headers, listener.date)
        end = b"content-length: %d\r\n\r\n" if stays else b"content-length: %d\r\nconnection: close\r\n\r\n"
        if status == 204 or status == 304:
            end, body = (b"\r\n" if stays else b"connection: close\r\n\r\n"), b""
        else:
            end = end % len(body)
        if self.method == b"HEAD":
            body = b""
        self._state, self._connection = _OVER, None  # `_over`, written out
        self.on_gone = self.on_room = None
        if len(body) <= JOINED_BYTES:
            connection.write(b"".join((head, lines, end, body)))
        else:
            connection.write(head + lines + end)
            connection.write(body)
        connection.answered(stays)

    def begin(self, status: int, headers: Fields = (), lines: bytes = b"") -> None:
        connection = self._connection
        if connection is None:
            return
        assert self._state == _NEW, "a second answer to one request"
        listener = connection.port
        self._stays = self._stays and not listener.closing
        head = head_of(status, headers, listener.date) + lines
        if self._chunked:
            head += b"transfer-encoding: chunked\r\n"
        if not self._stays:
            head += b"connection: close\r\n"
        connection.write(head + b"\r\n")
        self._state = _OVER if self.method == b"HEAD" else _PIECES

    def write(self, data: bytes) -> None:
        connection = self._connection
        if connection is None or not data or self._state == _OVER:
            return
        assert self._state == _PIECES, "a piece of an answer that has not begun"
        if not self._chunked:
            connection.write(data)
        elif len(data) <= JOINED_BYTES:
            connection.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            connection.write(b"%x\r\n" % len(data))
            connection.write(data)
            connection.write(b"\r\n")

    def end(self) -> None:
        connection = self._connection
        if connection is None:
            return
        assert self._state != _NEW, "the end of an answer that has not begun"
        if self._chunked and self._state == _PIECES:
            connection.write(b"0\r\n\r\n")
        self._over()
        connection.answered(self._stays)

    def _over(self) -> None:
        self._state, self._connection = _OVER, None
        # They hold who holds this one: nothing is left for a collector of garbage.
        self.on_gone = self.on_room = None

    def drop(self) -> None:
        connection = self._connection
        self._over()
        if connection is not None:
            connection.abort()

    def begun(self) -> bool:
        return self._state != _NEW

    def left(self) -> None:
        if self._connection is None:
            return
        tell = self.on_gone
        self._over()
        if tell is not None:
            tell()


class ClientConnection(asyncio.Protocol):
    """Its bytes become exchanges, one after the other, and each is answered before the next."""

    __slots__ = (
        "_came_s", "_deferred", "_exchange", "_fresh", "_full", "_leaving", "_pumping", "_reader", "_since_s",
        "_stalled_s", "_transport", "_unheard", "_unread_bytes", "peer", "port", "write",
    )  # fmt: skip

    write: Callable[[bytes], None]
    """Straight to the connection; uvloop puts what is written in one turn of its loop into one call of the system."""

    def __init__(self, listener: ClientListener) -> None:
        self.port = listener
        self._reader = RequestReader(listener.limits)
        self._exchange: ClientExchange | None = None
        self._pumping = False
        self._deferred = False  # The rest of what was read is answered in the next turn of the loop.
        self._leaving = False  # The last answer was written; what still comes is thrown away.
        self._full = False
        self._unheard = False
        self._since_s = time.monotonic()  # Since it was made, since the latest answer, or since it leaves.
        self._came_s = 0.0  # When the first byte came of what is not whole; 0 where nothing is there.
        self._fresh = True
        self._stalled_s: float | None = None
        self._unread_bytes = 0
        self.peer = ""

    @property
    def busy(self) -> bool:
        return self._exchange is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = wire = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self.write = wire.write
        peer = wire.get_extra_info("peername")
        self.peer = str(peer[0]) if peer else ""
        self.port.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.port.left(self)
        self._leaving = True
        self._forsake()

    def data_received(self, data: bytes) -> None:
        if self._leaving:
            return
        if not self._came_s:
            self._came_s = time.monotonic()
        reader = self._reader
        reader.feed(data)
        if self._exchange is None and not self._deferred:
            self._pump()
        elif reader.held_bytes > AHEAD_BYTES and not self._unheard:
            self._unheard = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """Whoever sends no more has left, even if an answer is under way: nothing tells the two apart."""
        if self._exchange is not None:
            self.abort()
            self._forsake()

    def pause_writing(self) -> None:
        self._full = True
        if self._exchange is not None and self._exchange.on_room is not None:
            self._exchange.on_room(False)

    def resume_writing(self) -> None:
        self._full = False
        if self._exchange is None:
            self._pump()
        elif self._exchange.on_room is not None:
            self._exchange.on_room(True)

    def _pump(self) -> None:
        """A loop and no recursion: a thousand small requests may lie in one read."""
        if self._pumping or self._deferred:
            return
        self._pumping = True
        reader, turn_bytes = self._reader, 0
        try:
            while self._exchange is None and not self._full and not self._leaving:
                if turn_bytes > TURN_BYTES and reader.held_bytes:
                    self._deferred = True
                    asyncio.get_running_loop().call_soon(self._next_turn)
                    break
                request = reader.take()
                if request is None:
                    self._unfinished()
                    break
                self._exchange = exchange = ClientExchange(self, request, self.peer, self._came_s)
                self._fresh = False
                turn_bytes += len(request.body) + REQUEST_BYTES
                listener = self.port
                listener.works(self)
                if listener.held:
                    listener.released(self)
                try:
                    listener.handler(exchange)
                except Exception:  # A fault of ours: the client hears of it, and so does the log.
                    log.exception("a request could not be handled")
                    self._fault(exchange)
        except HttpRefusal as refused:
            self.refuse(refused)
        finally:
            self._pumping = False

    def _next_turn(self) -> None:
        self._deferred = False
        if self._exchange is None:
            self._pump()

    def _unfinished(self) -> None:
        reader = self._reader
        if self._unheard:
            self._unheard = False
            self._transport.resume_reading()
        if reader.wants:
            reader.wants = False
            self.write(CONTINUE)
        held_bytes = reader.held_bytes
        if held_bytes:
            self.port.holds(self, held_bytes)
        elif not reader.in_body:
            self._came_s = 0.0

    def answered(self, stays: bool) -> None:
        self._exchange = None
        self._since_s = time.monotonic()
        if not stays or self.port.closing:
            self._leave()
            return
        self.port.waits(self)
        self._came_s = self._since_s if self._reader.held_bytes else 0.0
        if self._came_s:
            self._pump()  # Which goes on reading once more is needed.
        elif self._unheard:
            self._unheard = False
            self._transport.resume_reading()

    def _fault(self, exchange: ClientExchange) -> None:
        if exchange.begun():
            exchange.drop()
            return
        body = error_object(500, "internal error; the gateway's log says more")
        exchange.reply(500, json.dumps(body).encode(), ((b"content-type", b"application/json"),))

    # How it ends.

    def refuse(self, refused: HttpRefusal) -> None:
        """An answer to what never became a request; then the connection ends."""
        if self._exchange is not None:
            self.abort()
            return
        self.port.drop(str(refused.status))
        self.write(canned(refused, self.port.date))
        self._leave()

    def _leave(self) -> None:
        """Nothing more will be written. What still comes is read for a while, or the client would see no answer."""
        if self._leaving:
            return
        self._leaving = True
        self._since_s = time.monotonic()
        unread = self._reader.held_bytes or self._reader.in_body or self._unheard
        self._reader = RequestReader(self.port.limits)
        self.port.released(self)
        if not unread:
            self._transport.close()
            return
        if self._unheard:
            self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def abort(self) -> None:
        self._leaving = True
        self._transport.abort()

    def _forsake(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.left()

    def close_idle(self) -> None:
        """Unless a request is being answered; that one says that it is the last."""
        if self._exchange is None and not self._leaving:
            self._leave()

    def overdue(self, now_s: float) -> str:
        limits = self.port.limits
        unread_bytes = self._transport.get_write_buffer_size()
        if not unread_bytes:
            self._stalled_s = None
        elif self._stalled_s is None or unread_bytes < self._unread_bytes:
            self._stalled_s = now_s
        self._unread_bytes = unread_bytes
        if self._stalled_s is not None and now_s - self._stalled_s > limits.stalled_s:
            return "stalled"
        if self._leaving:
            return "lingering" if now_s - self._since_s > limits.linger_s and not unread_bytes else ""
        if self._exchange is not None:
            return ""
        if self._reader.in_body:
            spare_s = self._reader.held_bytes / limits.body_bytes_per_s
            return "late" if now_s - self._came_s > limits.body_s + spare_s else ""
        if self._came_s:
            return "late" if now_s - self._came_s > limits.head_s else ""
        return "idle" if now_s - self._since_s > (limits.head_s if self._fresh else limits.idle_s) else ""

    def end(self, why: str) -> None:
        if why == "late":
            part = "body" if self._reader.in_body else "head"
            self.refuse(HttpRefusal(408, f"the request's {part} did not come in time"))
            return
        self.port.drop(why)
        if why == "idle":
            self._leave()
        else:
            self.abort()
            self._forsake()

    def crowded_out(self) -> None:
        """Somebody else needs the room at once. Who has begun a request is told why."""
        self.port.drop("crowded_out")
        if self._came_s and not self._leaving and not self._transport.get_write_buffer_size():
            refused = HttpRefusal(503, "too many connections; try again", "overloaded")
            self.write(canned(refused, self.port.date))
            self._leaving = True
            self._transport.close()
        else:
            self.abort()


def canned(refused: HttpRefusal, date: bytes) -> bytes:
    body = json.dumps(error_object(refused.status, str(refused), code=refused.code)).encode()
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        (b"x-request-id", f"req-{secrets.token_hex(12)}".encode()),
    ]
    if refused.status == 503:
        fields.append((b"retry-after", b"1"))
    return head_of(refused.status, fields, date) + b"\r\n" + body


class ClientListener:
    """Some listening sockets, and all who came in by them."""

    def __init__(self, handler: Handler, limits: HttpLimits) -> None:
        self.handler, self.limits = handler, limits
        self.closing = self._gentle = False
        self._handshake_s = 0.0
        self.date = b""
        self.address = ""
        self.dropped: Counter[str] = Counter()
        """Connections that ended because of what the client did, by the reason."""
        self._crowd: ConnectionLimits[ClientConnection] = ConnectionLimits(
            min(limits.connections, open_files() * SHARE_OF_FILES)
        )
        self.works, self.waits = self._crowd.works, self._crowd.waits
        """A connection's request has come whole; it was answered."""
        self.held: dict[ClientConnection, int] = {}  # Bytes of requests that are not whole.
        self._held_bytes = 0
        self._servers: list[asyncio.Server] = []
        self.sockets: list[socket.socket] = []
        self._told: Counter[str] = Counter()
        self._told_s = -LOG_S
        self._empty: asyncio.Event = asyncio.Event()
        shortest_s = min(limits.head_s, limits.body_s, limits.idle_s, limits.stalled_s, limits.linger_s)
        self._watch_s = min(WATCH_S, shortest_s / 4)
        self._watching: asyncio.TimerHandle | None = None
        self._timed()

    def __len__(self) -> int:
        return len(self._crowd)

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
        self._watching = loop.call_later(self._watch_s, self._watch)

    async def close(self, within_s: float = 5.0, *, gently: bool = False, for_good: bool = False) -> None:
        """Nobody comes in any more; what is being answered may end, for a while. Then the rest is cut off.

        `for_good`: the port closes, although other processes hold its sockets too. `gently`: whoever has come in may
        still ask, once.
        """
        self.closing, self._gentle = True, gently
        held = [entry.dup() for entry in self.sockets] if for_good else []
        for server in self._servers:
            server.close()
        for item in held:
            with suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
            item.close()
        if gently:
            # Those that still shake hands are not among them yet, and do it in this time or not at all.
            await asyncio.sleep(min(within_s, self._handshake_s))
        else:
            for connection in self._crowd:
                connection.close_idle()
        if len(self._crowd):
            self._empty.clear()
            try:
                await asyncio.wait_for(self._empty.wait(), within_s)
            except TimeoutError:
                for connection in self._crowd:
                    connection.end("cut off")
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    # What the connections tell.

    def came(self, connection: ClientConnection) -> None:
        full = self._crowd.full and not self._make_room()
        self._crowd.came(connection, connection.peer)
        if full:
            connection.refuse(HttpRefusal(503, "too many requests are under way; try again", "overloaded"))
        elif self.closing and not self._gentle:
            connection.close_idle()

    def left(self, connection: ClientConnection) -> None:
        self._crowd.left(connection)
        self.released(connection)
        if not len(self._crowd):
            self._empty.set()

    def holds(self, connection: ClientConnection, size: int) -> None:
        """So many bytes of a request that is not whole. Where there are too many, the largest one goes."""
        self._held_bytes += size - self.held.get(connection, 0)
        self.held[connection] = size
        while self._held_bytes > self.limits.bodies_bytes:
            largest = max(self.held, key=self.held.__getitem__)
            self.released(largest)
            largest.refuse(
                HttpRefusal(503, "too much is being sent to this gateway; try again", "overloaded")
            )

    def released(self, connection: ClientConnection) -> None:
        self._held_bytes -= self.held.pop(connection, 0)

    def drop(self, why: str) -> None:
        self.dropped[why] += 1

    def _make_room(self) -> bool:
        connection = self._crowd.oldest()
        if connection is None:
            return False
        self._crowd.left(connection)
        connection.crowded_out()
        return True

    # Once in a while.

    def _timed(self) -> None:
        self.date = b"date: " + formatdate(usegmt=True).encode() + b"\r\n"

    def _watch(self) -> None:
        self._watching = asyncio.get_running_loop().call_later(self._watch_s, self._watch)
        self._timed()
        now_s = time.monotonic()
        for connection in self._crowd:
            why = connection.overdue(now_s)
            if why:
                connection.end(why)
        if self.dropped != self._told and now_s - self._told_s >= LOG_S:
            shown = ", ".join(f"{count} {why}" for why, count in sorted(self.dropped.items()))
            log.warning("connections dropped so far: %s; %d are open", shown, len(self._crowd))
            self._told, self._told_s = Counter(self.dropped), now_s


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
    made = ClientListener(handler, limits or HttpLimits())
    made.address = url_of(sockets[0], tls)
    try:
        await made.listen(sockets, tls)
    except BaseException:
        for item in sockets:
            item.close()
        raise
    return made


def url_of(listening: socket.socket, tls: ssl.SSLContext | None) -> str:
    host, port = listening.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


async def bound(host: str, port: int, shared: bool = False) -> list[socket.socket]:
    """Sockets for each address of a host, on one port. `shared`: several processes each have their own of these."""
    made: list[socket.socket] = []
    try:
        loop = asyncio.get_running_loop()
        result = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(result):
            at = (address[0], made[0].getsockname()[1] if made else port, *address[2:])
            made.append(socket.create_server(at, family=family, backlog=BACKLOG, reuse_port=shared))
    except OSError as error:
        for item in made:
            item.close()
        raise InputError("--port", f"{host}:{port} cannot be used ({error.strerror or error})") from error
    return made
