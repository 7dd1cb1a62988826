"""An engine's bytes become an answer: its head, its body without framing, its end. Does no I/O."""

from __future__ import annotations

from potluck.api.http_errors import HttpRefusal
from potluck.gateway.http.chunked import SIZE_LINE, SIZES, ChunkedReader
from potluck.gateway.http.heads import CHUNKED, NO_LENGTH, fields, length_of, status_line, stays

HEAD_BYTES = 65_536


class ResponseReader:
    """Fed with what comes for one request; gives back what of it is body."""

    __slots__ = ("_bodiless", "_buffer", "_chunks", "_left", "headers", "over", "rest", "status", "stays")

    def __init__(self, bodiless: bool) -> None:
        self._bodiless = bodiless
        """It answers HEAD: its length is that of what is not sent."""
        self._buffer = b""
        self._chunks: ChunkedReader | None = None
        self._left = 0
        self.status = 0
        """0 until the head is whole."""
        self.headers: dict[bytes, bytes] = {}
        self.stays = False
        """The connection can be used again."""
        self.over = False
        self.rest = False
        """Something came after the end, which nobody asked for."""

    def feed(self, data: bytes) -> bytes:
        chunks = self._chunks
        if chunks is not None:
            if chunks.left == SIZE_LINE and not chunks.held:
                stop = data.find(b"\r\n", 0, 10)
                size = SIZES.get(data[:stop])
                if size is not None and len(data) == size + stop + 4 and data.endswith(b"\r\n"):
                    return data[
                        stop + 2 : -2
                    ]  # Just one chunk, as most tokens come: `ChunkedReader.feed`, written out.
            piece = chunks.feed(data)
            if chunks.over:
                self._ends(bool(chunks.rest))
            return piece
        if self.status:
            return self._take(data)
        return self._head(data)

    def closed(self) -> bool:
        """The connection ended: whether that is this answer's end."""
        if self.status and self._left == NO_LENGTH and not self.over:
            self._ends(True)
        return self.over

    def _head(self, data: bytes) -> bytes:
        data = self._buffer + data if self._buffer else data
        while True:
            end = data.find(b"\r\n\r\n", 0, HEAD_BYTES)
            if end < 0:
                if len(data) >= HEAD_BYTES:
                    raise HttpRefusal(431, f"the answer's head is larger than {HEAD_BYTES} bytes")
                if data[:5] != b"HTTP/"[: len(data)]:
                    raise HttpRefusal(400, "the answer's first line cannot be read")
                self._buffer = data
                return b""
            lines = data[:end].split(b"\r\n")
            data = data[end + 4 :]
            status, v11 = status_line(lines[0])
            if status >= 200:
                break
            if status == 101:
                raise HttpRefusal(400, "the answer changes the protocol")
        del lines[0]
        self._buffer = b""
        self.headers = headers = fields(lines)
        self.stays = stays(headers, v11)
        length = length_of(headers, v11)
        self.status = status
        if self._bodiless or status in (204, 304) or length == 0:
            self._ends(bool(data))
            return b""
        if length == CHUNKED:
            self._chunks = ChunkedReader()
            return self.feed(data) if data else b""
        if len(data) == length:  # All of it came at once.
            self.over = True
            return data
        self._left = length
        return self._take(data)

    def _take(self, data: bytes) -> bytes:
        left = self._left
        if left == NO_LENGTH:
            return data
        if len(data) < left:
            self._left = left - len(data)
            return data
        piece = data if len(data) == left else data[:left]
        self._ends(len(data) > left)
        return piece

    def _ends(self, rest: bool) -> None:
        self.over = True
        self.rest = rest
