"""An engine's bytes become an answer: its head, its body without framing, its end. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from potluck.api.http import HttpRefusal, absolute_target
from potluck.gateway.http.limits import HttpLimits

Headers = Mapping[bytes, bytes]
"""Names in small letters; of a name that comes twice the values are joined by a comma, or the message is refused."""
TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_FIELD = re.compile(rb"(" + TOKEN + rb"{1,256}):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_REQUEST = re.compile(rb"(" + TOKEN + rb"{1,24}) (/[!-\"$-~]*|\*|[A-Za-z]+://[!-\"$-~]*) HTTP/(1\.[01])")
_OTHER_VERSION = re.compile(TOKEN + rb"{1,24} [!-~]+ HTTP/\d\.\d")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [\t\x20-\x7e\x80-\xff]*)?")
ONCE = frozenset(b"host content-length transfer-encoding authorization content-type expect x-api-key".split())
"""Fields that may come once only: of two, nobody can say which one counts."""
FRAMING = frozenset({b"content-length", b"transfer-encoding"})
"""Fields that say where a body ends: written without tabs, and never after the body."""
SECRET = frozenset({b"authorization", b"proxy-authorization", b"x-api-key", b"cookie"})
KEPT_LINES, KEPT_STATUSES = 2048, 64
KEPT_BYTES = 256
CHUNKED = -1
NO_LENGTH = -2


class _Fields(dict[bytes, tuple[bytes, bytes]]):
    __slots__ = ()

    def __missing__(self, line: bytes) -> tuple[bytes, bytes]:
        return field(line)


_fields_read = _Fields()


class RequestLine(NamedTuple):
    method: bytes
    path: bytes
    query: bytes
    v11: bool
    authority: bytes = b""
    """Of a target in absolute form; it takes the place of the Host header."""


def _request_line(line: bytes) -> RequestLine:
    match = _REQUEST.fullmatch(line)
    if match is None:
        if _OTHER_VERSION.fullmatch(line) and line[-8:] not in (b"HTTP/1.0", b"HTTP/1.1"):
            raise HttpRefusal(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
        raise HttpRefusal(400, "the request's first line cannot be read: METHOD /PATH HTTP/1.1 is wanted")
    method, target, version = match.groups()
    if target == b"*" and method != b"OPTIONS":
        raise HttpRefusal(400, "the request's first line cannot be read: the path must begin with /")
    if target[:1] not in b"/*":
        return _absolute_request_line(method, target, version)
    path, _, query = target.partition(b"?")
    return RequestLine(method, path, query, version == b"1.1")


def _absolute_request_line(method: bytes, target: bytes, version: bytes) -> RequestLine:
    parts = absolute_target(method.decode(), target.decode())
    if parts is None:
        raise HttpRefusal(
            400, "the request's first line cannot be read: METHOD http://HOST/PATH HTTP/1.1 is wanted"
        )
    authority, path, query = (part.encode() for part in parts)
    return RequestLine(method, path, query, version == b"1.1", authority)


_kept_request_line = lru_cache(KEPT_LINES)(_request_line)


def request_line(line: bytes) -> RequestLine:
    return _kept_request_line(line) if len(line) <= KEPT_BYTES else _request_line(line)


@lru_cache(KEPT_STATUSES)
def status_line(line: bytes) -> tuple[int, bool]:
    match = _STATUS.fullmatch(line)
    if match is None:
        raise HttpRefusal(400, "the answer's first line cannot be read")
    return int(match[2]), match[1] == b"1"


def fields(lines: Sequence[bytes]) -> dict[bytes, bytes]:
    datas = dict(map(_fields_read.__getitem__, lines))
    return datas if len(datas) == len(lines) else _joined(lines)


def _joined(lines: Sequence[bytes]) -> dict[bytes, bytes]:
    joined: dict[bytes, bytes] = {}
    for line in lines:
        name, value = _fields_read[line]
        if name in joined:
            if name in ONCE:
                raise HttpRefusal(400, f"{name.decode()} comes twice")
            value = joined[name] + b", " + value
        joined[name] = value
    return joined


def field(line: bytes) -> tuple[bytes, bytes]:
    match = _FIELD.fullmatch(line)
    if match is None:
        raise HttpRefusal(
            400, "a header cannot be read: NAME: VALUE is wanted, on one line that ends in CR LF"
        )
    name, value = match[1].lower(), match[2].rstrip(b" \t")
    if name in FRAMING and b"\t" in line:  # some readers take a tab for a part of the value
        raise HttpRefusal(400, f"{name.decode()}: a tab beside its value; a space is wanted")
    if name not in SECRET and len(line) <= KEPT_BYTES:
        if len(_fields_read) >= KEPT_LINES:
            _fields_read.clear()
        _fields_read[line] = (name, value)
    return name, value


def length_of(headers: dict[bytes, bytes], v11: bool) -> int:
    length, coding = headers.get(b"content-length"), headers.get(b"transfer-encoding")
    if coding is None:
        if length is None:
            return NO_LENGTH
        if len(length) > 15 or not length.isdigit():
            raise HttpRefusal(400, "content-length must be a number of bytes")
        return int(length)
    if length is not None:
        raise HttpRefusal(400, "content-length and transfer-encoding exclude each other")
    if coding.lower() != b"chunked" or not v11:
        raise HttpRefusal(
            400 if coding.lower() == b"chunked" else 501, "transfer-encoding can only be chunked"
        )
    return CHUNKED


def stays(headers: dict[bytes, bytes], v11: bool) -> bool:
    header = headers.get(b"connection")
    if header is None or not v11:
        return v11
    return header in (b"keep-alive", b"Keep-Alive") or b"close" not in header.lower().replace(
        b" ", b""
    ).split(b",")


_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
LINE_BYTES = 1024
CHUNKS_AT_ONCE_MAX = 4096
"""Of a client's body, in one read of at most 256 KiB."""
TRAILERS = 32
SIZES: dict[bytes, int] = {}  # Lines of sizes that were read, short ones other than 0; there are not many.
SIZE_LINE, _CLOSING, _TRAILER = 0, -1, -2
"""What is awaited where no bytes of a chunk are left: its size, its line end, a line after the last one."""


class ChunkedReader:
    """Fed with what comes, gives back what it holds. `over` with the last chunk; `rest` came after it."""

    __slots__ = ("_chunks_max", "_trailers", "held", "left", "over", "rest")

    def __init__(self, chunks_max: int | None = None) -> None:
        """`chunks_max`: that may come at once; each costs as much time as thousands of bytes do."""
        self._chunks_max = chunks_max
        self.left = SIZE_LINE
        self.held = b""
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
                if self._chunks_max is not None and len(pieces) >= self._chunks_max:
                    raise HttpRefusal(400, f"more than {self._chunks_max} chunks at once; send larger ones")
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


_NEVER = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r(?!\n|\Z)")
"""What no head contains: to be told at once, and not when its end did not come in time."""
_NEVER_NAME = re.compile(
    rb"\r\n(?:" + TOKEN + rb"+(?:\r|(?!" + TOKEN + rb")[^:])|(?!" + TOKEN + rb"|\r).)", re.S
)
"""Nor this: a line that begins with no name, or whose name has white space in it or before its colon."""


class HttpRequest:
    __slots__ = ("body", "headers", "method", "path", "query", "stays", "v11")

    def __init__(
        self, method: bytes, path: bytes, query: bytes, headers: dict[bytes, bytes], v11: bool
    ) -> None:
        self.method, self.path, self.query, self.headers, self.v11 = method, path, query, headers, v11
        self.stays = v11 if b"connection" not in headers else stays(headers, v11)
        self.body = b""


class RequestReader:
    __slots__ = (
        "_body", "_buffer", "_chunks", "_coming", "_left", "_limits", "_scanned", "wants",
    )  # fmt: skip

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._buffer = b""
        self._scanned = 0
        self._coming: HttpRequest | None = None
        self._left = 0
        self._chunks: ChunkedReader | None = None
        self._body = bytearray()  # No list of parts: joining millions of them, a byte each, takes a second.
        self.wants = False
        """The client waits for a word (100 Continue) before it sends the body; whoever says it sets this back."""

    @property
    def in_body(self) -> bool:
        return self._coming is not None

    @property
    def held_bytes(self) -> int:
        return len(self._buffer) + len(self._body)

    def feed(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data

    def take(self) -> HttpRequest | None:
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
            self._chunks = ChunkedReader(CHUNKS_AT_ONCE_MAX)
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
        self._room(len(self._body) + len(piece))
        self._body += piece
        if not over:
            return None
        request.body = bytes(self._body)
        self._body, self._coming, self._chunks = bytearray(), None, None
        return request

    def _head(self) -> HttpRequest | None:
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
        method, path, query, v11, authority = request_line(line)
        del lines[0]
        headers = fields(lines)
        if v11 and b"host" not in headers:
            raise HttpRefusal(400, "host is missing")
        if authority:
            headers[b"host"] = authority
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


HEAD_BYTES = 65_536


class ResponseReader:
    __slots__ = ("_bodiless", "_buffer", "_chunks", "_left", "headers", "over", "rest", "status", "stays")

    def __init__(self, bodiless: bool) -> None:
        self._bodiless = bodiless
        self._buffer = b""
        self._chunks: ChunkedReader | None = None
        self._left = 0
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.stays = False
        self.over = False
        self.rest = False  # Something came after the end, which nobody asked for.

    def feed(self, data: bytes) -> bytes:
        chunks = self._chunks
        if chunks is not None:
            if chunks.left == SIZE_LINE and not chunks.held:
                stop = data.find(b"\r\n", 0, 10)
                size = SIZES.get(data[:stop])
                if size is not None and len(data) == size + stop + 4 and data.endswith(b"\r\n"):
                    # Just one chunk, as most tokens come: `ChunkedReader.feed`, written out.
                    return data[stop + 2 : -2]
            piece = chunks.feed(data)
            if chunks.over:
                self._ends(bool(chunks.rest))
            return piece
        if self.status:
            return self._take(data)
        return self._head(data)

    def closed(self) -> bool:
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
