"""Heads of HTTP/1 messages, read by a grammar that has no doubtful cases. Pure.

Request smuggling lives on what two readers take differently: a space before a colon, a folded line, a bare line feed,
two lengths. Here a line either matches the grammar or the message is refused, and nothing is repaired.

Most lines of a client's request are those of its last one. So lines that were read are kept, up to a number, and
reading one again is a look into a table. Lines that hold a secret are not kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from potluck.api.http_errors import HttpRefusal

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_FIELD = re.compile(rb"(" + TOKEN + rb"{1,256}):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_REQUEST = re.compile(rb"(" + TOKEN + rb"{1,24}) (/[!-\"$-~]*|\*) HTTP/(1\.[01])")
_OTHER_VERSION = re.compile(TOKEN + rb"{1,24} [!-~]+ HTTP/\d\.\d")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [\t\x20-\x7e\x80-\xff]*)?")

ONCE = frozenset(
    {
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"authorization",
        b"content-type",
        b"expect",
        b"x-api-key",
    }
)
"""Fields that may come once only: of two, nobody can say which one counts."""
FRAMING = frozenset({b"content-length", b"transfer-encoding"})
"""Fields that say where a body ends: written without tabs, and never after the body."""
SECRET = frozenset({b"authorization", b"proxy-authorization", b"x-api-key", b"cookie"})

KEPT_LINES = 2048
KEPT_BYTES = 256


class _Fields(dict[bytes, tuple[bytes, bytes]]):
    """Field lines that were read."""

    __slots__ = ()

    def __missing__(self, line: bytes) -> tuple[bytes, bytes]:
        return field(line)


_fields_read = _Fields()
_requests_read: dict[bytes, tuple[bytes, bytes, bytes, bool]] = {}
_statuses_read: dict[bytes, tuple[int, bool]] = {}


def request_line(line: bytes) -> tuple[bytes, bytes, bytes, bool]:
    """Method, path, query, and whether it is HTTP/1.1."""
    return _requests_read.get(line) or _request_line(line)


def _request_line(line: bytes) -> tuple[bytes, bytes, bytes, bool]:
    match = _REQUEST.fullmatch(line)
    if match is None:
        if _OTHER_VERSION.fullmatch(line) and line[-8:] not in (b"HTTP/1.0", b"HTTP/1.1"):
            raise HttpRefusal(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
        raise HttpRefusal(400, "the request's first line cannot be read: METHOD /PATH HTTP/1.1 is wanted")
    method, target, version = match.groups()
    if target == b"*" and method != b"OPTIONS":
        raise HttpRefusal(400, "the request's first line cannot be read: the path must begin with /")
    path, _, query = target.partition(b"?")
    found = (method, path, query, version == b"1.1")
    if len(line) <= KEPT_BYTES:
        if len(_requests_read) >= KEPT_LINES:
            _requests_read.clear()
        _requests_read[line] = found
    return found


def status_line(line: bytes) -> tuple[int, bool]:
    """The status, and whether it is HTTP/1.1."""
    found = _statuses_read.get(line)
    if found is not None:
        return found
    match = _STATUS.fullmatch(line)
    if match is None:
        raise HttpRefusal(400, "the answer's first line cannot be read")
    found = (int(match[2]), match[1] == b"1")
    if len(line) <= KEPT_BYTES:
        if len(_statuses_read) >= KEPT_LINES:
            _statuses_read.clear()
        _statuses_read[line] = found
    return found


def fields(lines: Sequence[bytes]) -> dict[bytes, bytes]:
    """Header lines, without the first one; names in small letters."""
    found = dict(map(_fields_read.__getitem__, lines))
    return found if len(found) == len(lines) else _joined(lines)


def _joined(lines: Sequence[bytes]) -> dict[bytes, bytes]:
    """Where a name comes more than once."""
    found: dict[bytes, bytes] = {}
    for line in lines:
        name, value = _fields_read[line]
        if name in found:
            if name in ONCE:
                raise HttpRefusal(400, f"{name.decode()} comes twice")
            value = found[name] + b", " + value
        found[name] = value
    return found


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


CHUNKED = -1
NO_LENGTH = -2


def length_of(headers: dict[bytes, bytes], v11: bool) -> int:
    """Of a body: bytes, CHUNKED or NO_LENGTH."""
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
    """Whether the connection goes on after this message."""
    said = headers.get(b"connection")
    if said is None or not v11:
        return v11
    return said in (b"keep-alive", b"Keep-Alive") or b"close" not in said.lower().replace(b" ", b"").split(
        b","
    )
