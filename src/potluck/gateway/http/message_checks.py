"""What httptools accepts and this gateway refuses: request lines, repeated fields, doubtful lengths. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from potluck.api.http import HttpRefusal, absolute_target

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
