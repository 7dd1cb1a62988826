"""One request of a client, and the bytes of its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING

from potluck.gateway.http.request_reader import HttpRequest
from potluck.gateway.interfaces import Headers

if TYPE_CHECKING:
    from potluck.gateway.http.client_connection import ClientConnection

Fields = Iterable[tuple[bytes, bytes]]

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}
JOINED_BYTES = 65_536
"""Up to here a piece is copied to stand in one write with its framing; what is larger is written as it is."""

_NEW, _PIECES, _OVER = 0, 1, 2


def head_of(status: int, fields: Fields, date: bytes) -> bytes:
    """Without the empty line at its end."""
    parts = [STATUS_LINES.get(status) or b"HTTP/1.1 %d Other\r\n" % status, date]
    for name, value in fields:
        parts += (name, b": ", value, b"\r\n")
    made = b"".join(parts)
    lines = len(parts) + 6 >> 2
    if made.count(b"\n") != lines or made.count(b"\r") != lines:
        raise ValueError("a header of an answer holds a line end")
    return made


class ClientExchange:
    """The `Exchange` of parts.py on a connection that is there."""

    __slots__ = (
        "_chunked",
        "_state",
        "_stays",
        "_visit",
        "body",
        "came_s",
        "headers",
        "method",
        "on_gone",
        "on_room",
        "path",
        "peer",
        "query",
    )

    def __init__(self, connection: ClientConnection, request: HttpRequest, peer: str, came_s: float) -> None:
        self.method = request.method
        self.path = request.path
        self.query = request.query
        self.headers: Headers = request.headers
        self.body = request.body
        self.peer = peer
        self.came_s = came_s
        self.on_gone: Callable[[], None] | None = None
        self.on_room: Callable[[bool], None] | None = None
        self._visit: ClientConnection | None = connection
        """None once the answer is over or the client has left."""
        self._chunked = request.v11
        self._stays = request.stays
        self._state = _NEW

    def reply(self, status: int, body: bytes, headers: Fields = (), lines: bytes = b"") -> None:
        connection = self._visit
        if connection is None:
            return
        assert self._state == _NEW, "a second answer to one request"
        port = connection.port
        stays = self._stays and not port.closing
        head = head_of(status, headers, port.date)
        end = b"content-length: %d\r\n\r\n" if stays else b"content-length: %d\r\nconnection: close\r\n\r\n"
        if status == 204 or status == 304:
            end, body = (b"\r\n" if stays else b"connection: close\r\n\r\n"), b""
        else:
            end = end % len(body)
        if self.method == b"HEAD":
            body = b""
        self._state, self._visit = _OVER, None  # `_over`, written out
        self.on_gone = self.on_room = None
        if len(body) <= JOINED_BYTES:
            connection.write(b"".join((head, lines, end, body)))
        else:
            connection.write(head + lines + end)
            connection.write(body)
        connection.answered(stays)

    def begin(self, status: int, headers: Fields = (), lines: bytes = b"") -> None:
        connection = self._visit
        if connection is None:
            return
        assert self._state == _NEW, "a second answer to one request"
        port = connection.port
        self._stays = self._stays and not port.closing
        head = head_of(status, headers, port.date) + lines
        self._state = _PIECES
        if self._chunked:
            head += b"transfer-encoding: chunked\r\n"
        if not self._stays:
            head += b"connection: close\r\n"
        connection.write(head + b"\r\n")
        if self.method == b"HEAD":
            self._state = _OVER

    def write(self, data: bytes) -> None:
        connection = self._visit
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
        connection = self._visit
        if connection is None:
            return
        assert self._state != _NEW, "the end of an answer that has not begun"
        if self._chunked and self._state == _PIECES:
            connection.write(b"0\r\n\r\n")
        self._over()
        connection.answered(self._stays)

    def _over(self) -> None:
        self._state = _OVER
        self._visit = None
        self.on_gone = self.on_room = (
            None  # They hold who holds this one: nothing is left for a collector of garbage.
        )

    def drop(self) -> None:
        connection = self._visit
        self._over()
        if connection is not None:
            connection.abort()

    def begun(self) -> bool:
        """Whether some of the answer was written."""
        return self._state != _NEW

    def left(self) -> None:
        """The client has gone."""
        if self._visit is None:
            return
        tell = self.on_gone
        self._over()
        if tell is not None:
            tell()
