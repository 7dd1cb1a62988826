"""One connection: aiohttp's protocol, with deadlines for heads and readers, and with errors in OpenAI's shape.

A connection counts as waiting (`api/http.py`) until a request has come whole. aiohttp's own count of
parsed requests tells when a head is there; `arrived` tells when its body is.
"""

from __future__ import annotations

import asyncio
import json
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from potluck.api.http import HEADER, ConnectionLimits, error_object, request_id

if TYPE_CHECKING:
    from potluck.engine.server.engine_service import RequestLimits

HEAD_BYTES = 65_536
"""Of one request's line and headers."""
MOST_HEADERS = 100
LINGER_S = 5.0
"""How long the rest of a refused body is read, so that the client sees the answer."""

NEVER_S = 1e6
"""aiohttp's own timer for idle connections, which says nothing to anybody, is not used."""


class ConnectionHost(Protocol):
    """What a connection needs of whoever accepted it."""

    log: logging.Logger
    crowd: ConnectionLimits[HttpConnection]

    def drop(self, why: str) -> None: ...


def arrived(request: web.Request) -> None:
    """The request is whole: from now on its connection is busy."""
    if isinstance(request.protocol, HttpConnection):
        request.protocol.works()


class HttpConnection(RequestHandler):
    __slots__ = (
        "_answered",
        "_began_s",
        "_head_bytes",
        "_limits",
        "_listener",
        "_since_s",
        "_stalled_s",
        "_unread_bytes",
        "_wire",
    )

    def __init__(self, listener: ConnectionHost, server: web.Server, limits: RequestLimits) -> None:
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
        self._wire: asyncio.Transport | None = None
        """As `transport`, but until it is closed in truth."""
        self._since_s = self._loop.time()
        """Since it was made, or since the latest answer."""
        self._began_s: float | None = None
        """When the first byte of the head came that is not whole yet."""
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
            text=json.dumps(error_object(status, line)),
            content_type="application/json",
            headers={HEADER: request_id(None)},
        )
        answer.force_close()
        return answer

    # What the listener asks.

    def works(self) -> None:
        self._listener.crowd.works(self)

    def overdue(self, now_s: float) -> str:
        """Why it is to end now, if it is."""
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
        """An answer to what never became a request."""
        body = json.dumps(error_object(status, line, code=code)).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n{HEADER}: {request_id(None)}\r\n"
        return (head + ("Retry-After: 1\r\n" if status == 503 else "") + "\r\n").encode() + body
