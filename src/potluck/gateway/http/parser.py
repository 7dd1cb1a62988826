"""Requests and responses from bytes: httptools parses, and what it accepts is checked more strictly here: request
lines, repeated fields, doubtful lengths. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import httptools

from potluck.api.http import HttpRefusal, absolute_target
from potluck.gateway.http.limits import HttpLimits

Headers = Mapping[bytes, bytes]
"""Names in lower case; the values of a repeated name are joined by a comma, unless SINGLE_FIELDS has it."""
SINGLE_FIELDS = frozenset(
    b"host content-length transfer-encoding authorization content-type expect x-api-key".split()
)
"""A message that repeats one of these fields is refused: readers disagree about which value counts."""
FRAMING_FIELDS = frozenset({b"content-length", b"transfer-encoding"})
"""Fields that say where a body ends: written without tabs, and never in trailers."""
SECRET_FIELDS = frozenset({b"authorization", b"proxy-authorization", b"x-api-key", b"cookie"})
CHUNKED = -1
NO_LENGTH = -2
TRAILERS_MAX = 32
CACHED_LINES, CACHED_LINE_BYTES, CACHED_STATUS_LINES = 2048, 256, 64

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_REQUEST_LINE = re.compile(
    rb"(" + _TOKEN + rb"{1,24}) (/[!-\"$-~]*|\*|[A-Za-z]+://[!-\"$-~]*) HTTP/(1\.[01])"
)
_OTHER_VERSION = re.compile(_TOKEN + rb"{1,24} [!-~]+ HTTP/\d\.\d")


class RequestLine(NamedTuple):
    method: bytes
    path: bytes
    query: bytes
    http_1_1: bool
    authority: bytes = b""
    """Of a target in absolute form; it takes the place of the Host header."""


def _parse_request_line(line: bytes) -> RequestLine:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        if _OTHER_VERSION.fullmatch(line) and line[-8:] not in (b"HTTP/1.0", b"HTTP/1.1"):
            raise HttpRefusal(505, "only HTTP/1.1 and HTTP/1.0 are supported")
        raise HttpRefusal(400, "the request line is invalid: METHOD /PATH HTTP/1.1 is expected")
    method, target, version = match.groups()
    if target == b"*" and method != b"OPTIONS":
        raise HttpRefusal(400, "the request line is invalid: the path must begin with /")
    authority = b""
    if target[:1] not in b"/*":
        parts = absolute_target(method.decode(), target.decode())
        if parts is None:
            raise HttpRefusal(
                400, "the request line is invalid: METHOD http://HOST/PATH HTTP/1.1 is expected"
            )
        authority, path, query = (part.encode() for part in parts)
    else:
        path, _, query = target.partition(b"?")
    return RequestLine(method, path, query, version == b"1.1", authority)


_cached_request_line = lru_cache(CACHED_LINES)(_parse_request_line)


def request_line(line: bytes) -> RequestLine:
    return _cached_request_line(line) if len(line) <= CACHED_LINE_BYTES else _parse_request_line(line)


@lru_cache(CACHED_STATUS_LINES)
def status_line(line: bytes) -> tuple[int, bool]:
    """The status, and whether it is HTTP/1.1."""
    version = line[:9]
    if version not in (b"HTTP/1.1 ", b"HTTP/1.0 "):
        raise HttpRefusal(400, "the response is not HTTP/1.1")
    return int(line[9:12]), version == b"HTTP/1.1 "


class _FieldCache(dict[bytes, tuple[bytes, bytes]]):
    """Names and values of header lines that httptools has accepted; clients repeat most of theirs."""

    __slots__ = ()

    def __missing__(self, line: bytes) -> tuple[bytes, bytes]:
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if name in FRAMING_FIELDS and b"\t" in line:  # some readers take a tab for a part of the value
            raise HttpRefusal(400, f"{name.decode()} must not be written with a tab")
        if name not in SECRET_FIELDS and len(line) <= CACHED_LINE_BYTES:
            if len(self) >= CACHED_LINES:
                self.clear()
            self[line] = (name, value)
        return name, value


_cached_fields = _FieldCache()


def fields(lines: Sequence[bytes]) -> dict[bytes, bytes]:
    headers = dict(map(_cached_fields.__getitem__, lines))
    if len(headers) == len(lines):
        return headers
    headers = {}
    for line in lines:
        add_field(headers, *_cached_fields[line])
    return headers


def add_field(headers: dict[bytes, bytes], name: bytes, value: bytes) -> None:
    if name in headers:
        if name in SINGLE_FIELDS:
            raise HttpRefusal(400, f"the header {name.decode()} is repeated")
        value = headers[name] + b", " + value
    headers[name] = value


def check_trailer(name: bytes, trailer_count: int) -> None:
    if name.lower() in FRAMING_FIELDS:
        raise HttpRefusal(400, "trailers must not contain content-length or transfer-encoding")
    if trailer_count > TRAILERS_MAX:
        raise HttpRefusal(431, f"there are more than {TRAILERS_MAX} trailers")


def body_length(headers: Headers, http_1_1: bool) -> int:
    """Bytes of the body, CHUNKED or NO_LENGTH."""
    length, coding = headers.get(b"content-length"), headers.get(b"transfer-encoding")
    if coding is None:
        if length is None:
            return NO_LENGTH
        if len(length) > 15 or not length.isdigit():
            raise HttpRefusal(400, "content-length must be a number of bytes")
        return int(length)
    if length is not None:
        raise HttpRefusal(400, "content-length and transfer-encoding exclude each other")
    if coding.lower() != b"chunked" or not http_1_1:
        status = 400 if coding.lower() == b"chunked" else 501
        raise HttpRefusal(status, "transfer-encoding can only be chunked, in HTTP/1.1")
    return CHUNKED


def allows_keep_alive(headers: Headers, http_1_1: bool) -> bool:
    """Whether the connection carries further messages after this one; HTTP/1.0 connections never do."""
    options = headers.get(b"connection")
    if options is None or not http_1_1:
        return http_1_1
    return options in (b"keep-alive", b"Keep-Alive") or b"close" not in options.lower().replace(
        b" ", b""
    ).split(b",")


CHUNKS_PER_READ_MAX = 4096
"""Chunks of a client's body in one read of at most 256 KiB: each costs as much time as thousands of bytes."""
WIRE_BYTES_PER_BODY_BYTE_MAX = 8
"""Bytes of a chunked body on the wire for each of its own: chunk extensions have no other limit."""
RESPONSE_HEAD_BYTES_MAX = 65_536
_HEAD_END = b"\r\n\r\n"


class HttpRequest:
    __slots__ = ("body", "headers", "http_1_1", "keep_alive", "method", "path", "query")

    def __init__(self, line: RequestLine, headers: dict[bytes, bytes]) -> None:
        self.method, self.path, self.query, self.http_1_1, authority = line
        self.headers = headers
        if authority:
            headers[b"host"] = authority
        self.keep_alive = (
            self.http_1_1 if b"connection" not in headers else allows_keep_alive(headers, self.http_1_1)
        )
        self.body = b""


class RequestReader:
    """The requests of one connection. httptools checks heads; fields are read from lines that it has accepted."""

    __slots__ = (
        "_body", "_buffer", "_chunks", "_fed_bytes", "_limits", "_line", "_missing_bytes", "_parse", "_request",
        "_upgrade", "awaits_continue",
    )  # fmt: skip

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._parse = httptools.HttpRequestParser(None).feed_data
        self._buffer = b""
        self._fed_bytes = 0  # Of the head at the start of the buffer, given to httptools already.
        self._line: RequestLine | None = None
        self._request: HttpRequest | None = None
        """The request whose body is being read."""
        self._body = bytearray()
        self._missing_bytes = 0
        self._chunks: _ChunkedBody | None = None
        self._upgrade = False
        """The head asks for an upgrade: httptools expects no HTTP after it, and is not given the body. A server may
        ignore the wish (RFC 9110, section 7.8)."""
        self.awaits_continue = False
        """The client waits for 100 Continue before it sends the body; the caller resets it when that is sent."""

    @property
    def in_body(self) -> bool:
        return self._request is not None

    @property
    def held_bytes(self) -> int:
        return len(self._buffer) + len(self._body)

    def feed(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data

    def take(self) -> HttpRequest | None:
        """The next request that is complete."""
        if self._request is not None:
            return self._take_body(self._request) if self._buffer else None
        request = self._take_head() if self._buffer else None
        if request is None:
            return None
        headers = request.headers
        length = body_length(headers, request.http_1_1)
        if length == NO_LENGTH or length == 0:
            return request
        if b"expect" in headers and headers[b"expect"].lower() != b"100-continue":
            raise HttpRefusal(417, "expect can only be 100-continue")
        if length == CHUNKED:
            self._chunks = _ChunkedBody(self._body, self._limits)
            self._parse = httptools.HttpRequestParser(None).feed_data
        else:
            if length > self._limits.body_bytes:
                raise self._limits.body_refusal()
            data = self._buffer
            if len(data) >= length:  # As it mostly is: all came at once.
                request.body = body = data[:length]
                self._buffer = data[length:]
                if not self._upgrade:
                    self._parse(body)
                return request
            self._missing_bytes = length
        self._request = request
        if self._buffer:
            return self._take_body(request)
        self.awaits_continue = request.http_1_1 and b"expect" in headers
        return None

    def _take_head(self) -> HttpRequest | None:
        limits, buffer, fed_bytes = self._limits, self._buffer, self._fed_bytes
        while buffer.startswith(b"\r\n"):  # Some clients send an empty line after a body.
            self._buffer = buffer = buffer[2:]
            self._fed_bytes = fed_bytes = 0
        end = buffer.find(_HEAD_END, max(0, fed_bytes - 3), limits.head_bytes + 4)
        if end < 0:
            self._check_partial_head(buffer, fed_bytes)
            return None
        head, self._buffer = buffer[: end + 4], buffer[end + 4 :]
        lines = head[:end].split(b"\r\n")
        if len(lines[0]) > limits.line_bytes:
            raise HttpRefusal(414, f"the request line is longer than {limits.line_bytes} bytes")
        if len(lines) > limits.fields + 1:
            raise HttpRefusal(431, f"there are more than {limits.fields} headers")
        line = request_line(lines[0])
        self._feed_parser(head[fed_bytes:] if fed_bytes else head)
        self._fed_bytes = 0
        del lines[0]
        headers = fields(lines)
        if line.http_1_1 and b"host" not in headers:
            raise HttpRefusal(400, "the header host is missing")
        return HttpRequest(line, headers)

    def _check_partial_head(self, buffer: bytes, fed_bytes: int) -> None:
        """Refuse at once what can never become a request."""
        limits = self._limits
        line_end = buffer.find(b"\r\n", 0, limits.line_bytes + 2)
        if line_end < 0 and len(buffer) >= limits.line_bytes + 2:
            raise HttpRefusal(414, f"the request line is longer than {limits.line_bytes} bytes")
        if len(buffer) >= limits.head_bytes + 4:
            raise HttpRefusal(431, f"the head is larger than {limits.head_bytes} bytes")
        if line_end >= max(0, fed_bytes - 1):
            request_line(buffer[:line_end])
        self._feed_parser(buffer[fed_bytes:])
        self._fed_bytes = len(buffer)

    def _take_body(self, request: HttpRequest) -> HttpRequest | None:
        data, chunks, body = self._buffer, self._chunks, self._body
        self.awaits_continue = False
        if chunks is None:
            piece, self._buffer = data[: self._missing_bytes], data[self._missing_bytes :]
            if not self._upgrade:
                self._parse(piece)
            body += piece
            self._missing_bytes -= len(piece)
            complete = not self._missing_bytes
        else:
            self._buffer = chunks.feed(data)
            complete = chunks.complete
        if not complete:
            return None
        request.body = bytes(body)
        self._request, self._chunks, self._body = None, None, bytearray()
        return request

    def _feed_parser(self, data: bytes) -> None:
        self._upgrade = False
        try:
            self._parse(data)
        except httptools.HttpParserUpgrade:
            self._upgrade = True
        except httptools.HttpParserError as error:
            raise _refusal(error, "the request") from error


class _ChunkedBody:
    __slots__ = (
        "_body", "_chunk_count", "_limits", "_parse", "_reading", "_tail", "_trailer_count", "_wire_bytes",
        "complete",
    )  # fmt: skip

    def __init__(self, body: bytearray, limits: HttpLimits) -> None:
        """`body` receives the bytes of the chunks."""
        self._body, self._limits = body, limits
        self._tail = b""  # The last three bytes fed.
        self._wire_bytes = self._chunk_count = self._trailer_count = 0
        self.complete = self._reading = False
        self._parse = httptools.HttpRequestParser(self).feed_data
        self._parse(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        self._reading = True

    def feed(self, data: bytes) -> bytes:
        """Returns the bytes after the body, which ends with an empty line: as does each piece for httptools."""
        at = len(self._tail)
        data = self._tail + data
        self._chunk_count = 0
        while at < len(data) and not self.complete:
            end = data.find(_HEAD_END, max(0, at - 3))
            stop = end + 4 if end >= 0 else len(data)
            try:
                self._parse(data[at:stop])
            except httptools.HttpParserError as error:
                raise _refusal(error, "the body") from error
            self._wire_bytes += stop - at
            at = stop
            if self._wire_bytes > self._limits.head_bytes + WIRE_BYTES_PER_BODY_BYTE_MAX * len(self._body):
                raise HttpRefusal(400, "chunk sizes, extensions and trailers are much larger than the body")
        self._tail = data[max(0, at - 3) : at]
        if self.complete:
            del self._parse  # It refers back to this object; no garbage collection is needed.
        return data[at:]

    # Called by httptools.

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading:
            self._trailer_count += 1
            check_trailer(name, self._trailer_count)

    def on_chunk_header(self) -> None:
        self._chunk_count += 1
        if self._chunk_count > CHUNKS_PER_READ_MAX:
            raise HttpRefusal(400, f"more than {CHUNKS_PER_READ_MAX} chunks at once; send larger ones")

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._limits.body_bytes:
            raise self._limits.body_refusal()

    def on_message_complete(self) -> None:
        self.complete = True


class ResponseReader:
    """The responses of one connection, one after the other: `begin` before each request."""

    __slots__ = (
        "_bodiless", "_head", "_parse", "_parser", "_pieces", "_until_close", "complete", "has_extra_bytes",
        "headers", "keep_alive", "on_body", "status",
    )  # fmt: skip

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # Called by httptools.
        self._start_parser()
        self._head = b""
        self.headers: dict[bytes, bytes] = {}
        self.keep_alive = self._until_close = False
        self.has_extra_bytes = False
        """Bytes followed the response, which no request explains."""
        self.begin(False)

    def _start_parser(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._parse: Callable[[bytes], None] = self._parser.feed_data

    def begin(self, bodiless: bool) -> None:
        """Expect the response to a request. `bodiless`: to HEAD, of which httptools cannot be informed."""
        self._bodiless = bodiless
        self.status = 0
        self.complete = self.has_extra_bytes = False

    def close(self) -> None:
        """Break the cycle of reader and parser, so that no garbage collection is needed."""
        self._parser, self._parse = None, _ignore

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in these bytes of the response."""
        try:
            self._parse(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                raise _refusal(error, "the response") from error
            self.has_extra_bytes = True
        if not self.status:
            self._take_head(self._head + data if self._head else data)
        pieces = self._pieces
        if len(pieces) == 1:
            return pieces.pop()
        body = b"".join(pieces)
        pieces.clear()
        return body

    def _take_head(self, head: bytes) -> None:
        """Read status and fields from what httptools has accepted, once the head is complete."""
        end = head.find(_HEAD_END)
        while end >= 0 and head[9:10] == b"1":  # The head of an interim response.
            head = head[end + 4 :]
            end = head.find(_HEAD_END)
        if end < 0:
            if len(head) >= RESPONSE_HEAD_BYTES_MAX:
                raise HttpRefusal(431, f"the head is larger than {RESPONSE_HEAD_BYTES_MAX} bytes")
            self._head = head
            return
        lines = head[:end].split(b"\r\n")
        self.status, http_1_1 = status_line(lines[0])
        del lines[0]
        self._head = b""
        self.headers = headers = fields(lines)
        self.keep_alive = http_1_1 if b"connection" not in headers else allows_keep_alive(headers, http_1_1)
        self._until_close = b"content-length" not in headers and body_length(headers, http_1_1) == NO_LENGTH
        if self._bodiless and not (self.complete and not self._pieces):
            self.complete, self.has_extra_bytes = True, bool(self._pieces)
            self._pieces.clear()
            self._start_parser()  # The last one expects a body.

    def complete_at_close(self) -> bool:
        """Whether the response is complete, now that the connection has ended."""
        if self.status and self._until_close and not self.complete:
            self.complete = self.has_extra_bytes = True
        return self.complete

    # Called by httptools.

    def on_message_begin(self) -> None:
        if self.complete:
            raise HttpRefusal(400, "a response without a request")

    def on_message_complete(self) -> None:
        self.complete = self._parser.get_status_code() >= 200  # Interim responses are none.


def _ignore(data: bytes) -> None: ...


def _refusal(error: Exception, what: str) -> HttpRefusal:
    """The refusal that a callback raised, which httptools wraps, or one for its own error."""
    cause = error.__context__
    return (
        cause if isinstance(cause, HttpRefusal) else HttpRefusal(400, f"{what} is not valid HTTP ({error})")
    )
