"""A body that comes in chunks, with HTTP's framing taken off. Pure."""

from __future__ import annotations

import re

from potluck.api.http_errors import HttpRefusal
from potluck.gateway.http.heads import FRAMING, field

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
LINE_BYTES = 1024
"""Of a chunk's size with its extensions, and of a trailer."""
TRAILERS = 32

SIZES: dict[bytes, int] = {}
"""Lines of sizes that were read, short ones other than 0; there are not many."""

SIZE_LINE, _CLOSING, _TRAILER = 0, -1, -2
"""What is awaited where no bytes of a chunk are left: its size, its line end, a line after the last one."""


class ChunkedReader:
    """Fed with what comes, gives back what it holds. `over` with the last chunk; `rest` came after it."""

    __slots__ = ("_trailers", "held", "left", "over", "rest")

    def __init__(self) -> None:
        self.left = SIZE_LINE
        """Bytes of a chunk that have not come, or what is awaited."""
        self.held = b""
        """A line that is not whole."""
        self._trailers = 0
        self.over = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        if self.held:
            data, self.held = self.held + data, b""
        pieces: list[bytes] = []
        at, end = 0, len(data)
        while at < end:
            left = self.left
            if left == SIZE_LINE:
                stop = data.find(b"\r\n", at, at + LINE_BYTES)
                if stop < 0:
                    self._hold(data, at)
                    break
                line = data[at:stop]
                known = SIZES.get(line)
                left = self._size(line) if known is None else known
                at = stop + 2
                if left == 0:
                    self.left = _TRAILER
                    continue
                stop = at + left
                if stop + 2 <= end:  # All of it is there, as it mostly is.
                    if data[stop : stop + 2] != b"\r\n":
                        raise HttpRefusal(400, "a chunk is longer than it says")
                    pieces.append(data[at:stop])
                    at = stop + 2
                else:
                    self.left = left
            elif left > 0:
                piece = data[at : at + left]
                pieces.append(piece)
                at += len(piece)
                self.left = left - len(piece) or _CLOSING
            elif left == _CLOSING:
                closing = data[at : at + 2]
                if closing == b"\r\n":
                    at += 2
                    self.left = SIZE_LINE
                elif closing == b"\r":
                    self.held = closing
                    break
                else:
                    raise HttpRefusal(400, "a chunk is longer than it says")
            else:
                at = self._trailer(data, at)
                if self.over or self.held:
                    break
        if len(pieces) == 1:
            return pieces[0]
        return b"".join(pieces)

    def _trailer(self, data: bytes, at: int) -> int:
        """A line after the last chunk: a field that nobody reads, or the empty line that ends it all."""
        stop = data.find(b"\r\n", at, at + LINE_BYTES)
        if stop < 0:
            self._hold(data, at)
        elif stop == at:
            self.over = True
            self.rest = data[at + 2 :]
        else:
            if field(data[at:stop])[0] in FRAMING:
                raise HttpRefusal(400, "a length after the body: it says nothing that may be believed")
            self._trailers += 1
            if self._trailers > TRAILERS:
                raise HttpRefusal(431, f"there are more than {TRAILERS} trailers")
        return stop + 2

    def _size(self, line: bytes) -> int:
        match = _SIZE.fullmatch(line)
        if match is None:
            raise HttpRefusal(400, "a chunk's size cannot be read")
        size = int(match[1], 16)
        if len(line) <= 3 and size:
            SIZES[line] = size
        return size

    def _hold(self, data: bytes, at: int) -> None:
        """A line that is not whole. What can never become one is refused at once."""
        self.held = data[at:]
        if len(self.held) >= LINE_BYTES or b"\n" in self.held or b"\r" in self.held[:-1]:
            raise HttpRefusal(400, "a chunk's size cannot be read")
