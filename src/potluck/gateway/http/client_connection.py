"""One connection of a client: its bytes become exchanges, one after the other, and each is answered before the next.

A connection counts as waiting (`api/http_errors.py`) until a request has come whole, and then as busy until it
is answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from potluck.api.http_errors import HttpRefusal, error_object
from potluck.gateway.http.client_exchange import ClientExchange, head_of
from potluck.gateway.http.request_reader import RequestReader

if TYPE_CHECKING:
    from potluck.gateway.http.client_listener import ClientListener

AHEAD_BYTES = 65_536
"""How much of the next requests is read while one is being answered."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log = logging.getLogger(__name__)


class ClientConnection(asyncio.Protocol):
    __slots__ = (
        "_came_s",
        "_exchange",
        "_fresh",
        "_full",
        "_leaving",
        "_pumping",
        "_reader",
        "_since_s",
        "_stalled_s",
        "_transport",
        "_unheard",
        "_unread_bytes",
        "peer",
        "port",
        "write",
    )

    write: Callable[[bytes], None]
    """Straight to the connection; uvloop puts what is written in one turn of its loop into one call of the system."""

    def __init__(self, port: ClientListener) -> None:
        self.port = port
        self._reader = RequestReader(port.limits)
        self._exchange: ClientExchange | None = None
        self._pumping = False
        self._leaving = False
        """The last answer was written; what still comes is thrown away."""
        self._full = False
        """The client reads more slowly than is written."""
        self._unheard = False
        """Reading rests, since too much came ahead."""
        self._since_s = time.monotonic()
        """Since it was made, since the latest answer, or since it leaves."""
        self._came_s = 0.0
        """When the first byte came of what is not whole; 0 where nothing is there."""
        self._fresh = True
        """No request has come whole yet."""
        self._stalled_s: float | None = None
        self._unread_bytes = 0
        self.peer = ""

    @property
    def busy(self) -> bool:
        return self._exchange is not None

    # What asyncio tells.

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
        if self._exchange is None:
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
        if self._exchange is not None:
            if self._exchange.on_room is not None:
                self._exchange.on_room(True)
        else:
            self._pump()

    # Requests, one after the other.

    def _pump(self) -> None:
        """A loop and no recursion: a thousand small requests may lie in one read."""
        if self._pumping:
            return
        self._pumping = True
        reader = self._reader
        try:
            while self._exchange is None and not self._full and not self._leaving:
                request = reader.take()
                if request is None:
                    self._unfinished()
                    break
                exchange = ClientExchange(self, request, self.peer, self._came_s)
                self._exchange = exchange
                self._fresh = False
                port = self.port
                port.works(self)
                if port.held:
                    port.released(self)
                try:
                    port.handler(exchange)
                except Exception:  # A fault of ours: the client hears of it, and so does the log.
                    log.exception("a request could not be handled")
                    self._fault(exchange)
        except HttpRefusal as refused:
            self.refuse(refused)
        finally:
            self._pumping = False

    def _unfinished(self) -> None:
        reader = self._reader
        if reader.wants:
            reader.wants = False
            self.write(CONTINUE)
        held_bytes = reader.held_bytes
        if held_bytes:
            self.port.holds(self, held_bytes)
        elif not reader.in_body:
            self._came_s = 0.0

    def answered(self, stays: bool) -> None:
        """By the exchange: its last byte was written."""
        self._exchange = None
        self._since_s = time.monotonic()
        if not stays or self.port.closing:
            self._leave()
            return
        self.port.waits(self)
        self._came_s = self._since_s if self._reader.held_bytes else 0.0
        if self._unheard:
            self._unheard = False
            self._transport.resume_reading()
        if self._came_s:
            self._pump()

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
        """Why it is to end now, if it is."""
        limits = self.port.limits
        self._look(now_s)
        if self._stalled_s is not None and now_s - self._stalled_s > limits.stalled_s:
            return "stalled"
        if self._leaving:
            return "lingering" if now_s - self._since_s > limits.linger_s and not self._unread_bytes else ""
        if self._exchange is not None:
            return ""
        if self._reader.in_body:
            spare_s = self._reader.held_bytes / limits.body_bytes_per_s
            return "late" if now_s - self._came_s > limits.body_s + spare_s else ""
        if self._came_s:
            return "late" if now_s - self._came_s > limits.head_s else ""
        return "idle" if now_s - self._since_s > (limits.head_s if self._fresh else limits.idle_s) else ""

    def _look(self, now_s: float) -> None:
        unread_bytes = self._transport.get_write_buffer_size()
        if not unread_bytes:
            self._stalled_s = None
        elif self._stalled_s is None or unread_bytes < self._unread_bytes:
            self._stalled_s = now_s
        self._unread_bytes = unread_bytes

    def end(self, why: str) -> None:
        """What `overdue` said is done."""
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
            self.write(
                canned(HttpRefusal(503, "too many connections; try again", "overloaded"), self.port.date)
            )
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
