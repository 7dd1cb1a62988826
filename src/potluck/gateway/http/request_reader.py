"""A client's bytes become requests: whole ones, or a refusal. Does no I/O.

However the bytes are cut on their way, the same requests come out. A refusal is final: nobody can say where the next
request of that connection would begin.
"""

from __future__ import annotations

import re

from potluck.api.http_errors import HttpRefusal
from potluck.gateway.http.chunked import ChunkedReader
from potluck.gateway.http.heads import CHUNKED, NO_LENGTH, TOKEN, fields, length_of, request_line, stays
from potluck.gateway.http.limits import HttpLimits

_NEVER = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r(?!\n|\Z)")
"""What no head contains: to be told at once, and not when its end did not come in time."""
_NEVER_NAME = re.compile(
    rb"\r\n(?:" + TOKEN + rb"+(?:\r|(?!" + TOKEN + rb")[^:])|(?!" + TOKEN + rb"|\r).)", re.S
)
"""Nor this: a line that begins with no name, or whose name has white space in it or before its colon."""


class HttpRequest:
    """One that has come whole."""

    __slots__ = ("body", "headers", "method", "path", "query", "stays", "v11")

    def __init__(
        self, method: bytes, path: bytes, query: bytes, headers: dict[bytes, bytes], v11: bool
    ) -> None:
        self.method, self.path, self.query, self.headers, self.v11 = method, path, query, headers, v11
        self.stays = v11 if b"connection" not in headers else stays(headers, v11)
        self.body = b""


class RequestReader:
    """Fed with what comes, asked for whole requests."""

    __slots__ = (
        "_buffer",
        "_chunks",
        "_coming",
        "_left",
        "_limits",
        "_parts",
        "_parts_bytes",
        "_scanned",
        "wants",
    )

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._buffer = b""
        """What was not looked at, or is a part of a head."""
        self._scanned = 0
        self._coming: HttpRequest | None = None
        """Its head is there, its body is not."""
        self._left = 0
        """Bytes of its body that have not come."""
        self._chunks: ChunkedReader | None = None
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self.wants = False
        """The client waits for a word (100 Continue) before it sends the body; whoever says it sets this back."""

    @property
    def in_body(self) -> bool:
        return self._coming is not None

    @property
    def held_bytes(self) -> int:
        """All that is kept of requests that are not whole."""
        return len(self._buffer) + self._parts_bytes

    def feed(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data

    def take(self) -> HttpRequest | None:
        """The next one, if it is whole."""
        if self._coming is not None:
            return self._more() if self._buffer else None
        request = self._head()
        if request is None:
            return None
        headers, at = request.headers, self._scanned
        length = length_of(headers, request.v11)
        if length == NO_LENGTH or length == 0:
            self._go_on(at)
            return request
        if b"expect" in headers and headers[b"expect"].lower() != b"100-continue":
            raise HttpRefusal(417, "expect can only be 100-continue")
        if length == CHUNKED:
            self._chunks = ChunkedReader()
        else:
            if length > self._limits.body_bytes:
                self._room(length)
            buffer, end = self._buffer, at + length
            if len(buffer) >= end:  # As it mostly is: all came at once.
                request.body = buffer[at:end]
                self._buffer, self._scanned = buffer[end:], 0
                return request
            self._left = length
        self._coming = request
        self._go_on(at)
        if self._buffer:
            return self._more()
        self.wants = request.v11 and b"expect" in headers
        return None

    def _go_on(self, at: int) -> None:
        self._buffer = self._buffer[at:] if at < len(self._buffer) else b""
        self._scanned = 0

    def _more(self) -> HttpRequest | None:
        """Of the body of which a part is there."""
        request, data = self._coming, self._buffer
        assert request is not None
        self.wants = False
        if self._chunks is None:
            piece, self._buffer = data[: self._left], data[self._left :]
            self._left -= len(piece)
            over = not self._left
        else:
            piece = self._chunks.feed(data)
            over, self._buffer = self._chunks.over, self._chunks.rest
        self._parts.append(piece)
        self._parts_bytes += len(piece)
        self._room(self._parts_bytes)
        if not over:
            return None
        request.body = b"".join(self._parts)
        self._parts, self._parts_bytes, self._coming, self._chunks = [], 0, None, None
        return request

    def _head(self) -> HttpRequest | None:
        """What comes before a body; `_scanned` then says where that begins."""
        limits = self._limits
        if self._buffer.startswith(b"\r\n"):  # Some send one too many after a body; it means nothing.
            self._buffer, self._scanned = self._buffer.lstrip(b"\r\n"), 0
        buffer = self._buffer
        if not buffer:
            return None
        end = buffer.find(b"\r\n\r\n", max(0, self._scanned - 3), limits.head_bytes + 4)
        if end < 0:
            self._unfinished()
            return None
        lines = buffer[:end].split(b"\r\n")
        line = lines[0]
        if len(line) > limits.line_bytes:
            raise HttpRefusal(414, f"the request's first line is longer than {limits.line_bytes} bytes")
        if len(lines) > limits.fields + 1:
            raise HttpRefusal(431, f"there are more than {limits.fields} headers")
        method, path, query, v11 = request_line(line)
        del lines[0]
        headers = fields(lines)
        if v11 and b"host" not in headers:
            raise HttpRefusal(400, "host is missing")
        self._scanned = end + 4
        return HttpRequest(method, path, query, headers, v11)

    def _unfinished(self) -> None:
        """A head that is not whole. What can never become one is refused at once."""
        buffer, limits = self._buffer, self._limits
        if _NEVER.search(buffer, max(0, self._scanned - 1)):
            raise HttpRefusal(
                400, "the request cannot be read as HTTP: lines of plain text that end in CR LF are wanted"
            )
        line_at = buffer.rfind(b"\r\n", 0, self._scanned)  # what stands before it was looked at
        if _NEVER_NAME.search(buffer, max(0, line_at)):
            raise HttpRefusal(
                400, "a header cannot be read: NAME: VALUE is wanted, without white space in NAME"
            )
        if len(buffer) >= limits.line_bytes + 2 and b"\r\n" not in buffer[: limits.line_bytes + 2]:
            raise HttpRefusal(414, f"the request's first line is longer than {limits.line_bytes} bytes")
        if len(buffer) >= limits.head_bytes + 4:
            raise HttpRefusal(431, f"the head is larger than {limits.head_bytes} bytes")
        self._scanned = len(buffer)

    def _room(self, size: int) -> None:
        if size > self._limits.body_bytes:
            raise HttpRefusal(413, f"the body is larger than {self._limits.body_bytes} bytes")
