"""A large JSON object read and written in short steps, so that a thread never holds the interpreter for long.

A parser in C holds the interpreter's lock until all is read: 50 to 1,000 ms for 8 MB, also in a thread. Here no call
handles more than WINDOW_BYTES, between calls other threads may run, and reading ends at the first value too many.
Texts and lists of tokens may be as long as the body. What is accepted, and what it means, is as in `parse_object`,
but for numbers of more than 5,000 characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from potluck.core.errors import FormatError, InputError

INLINE_BODY_BYTES = 32_768
"""Up to here servers read a body in their event loop, with `parse_object`."""
WINDOW_BYTES = 32_768
VALUES_MAX = 65_536
"""Members of objects and items of lists; lists of tokens count as one."""
DEPTH_MAX = 200
TOKEN_LISTS = frozenset({"prompt", "tokens"})
"""Members of the whole object that may have lists of numbers of any length."""

_BLANKS = re.compile(rb"[ \t\r\n]*+")
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]{1,5000}+")
_NUMBERS = re.compile(rb"[0-9, \t\r\n]*+")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_TEXT = re.compile(
    rb'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
_QUOTE, _COMMA, _COLON = b'"', b",", b":"


@dataclass(frozen=True, slots=True)
class LargeObject:
    values: dict[str, object]
    members: dict[str, tuple[int, int]]
    """Of the object itself: from the first byte of a name to behind the last one of its value."""


def read_large_object(raw: bytes) -> LargeObject:
    return _WindowReader(raw).whole()


class _WindowReader:
    def __init__(self, raw: bytes) -> None:
        from pydantic_core import from_json

        self._raw, self._from_json = raw, from_json
        self._at = 0
        self._left = VALUES_MAX
        self._members: dict[str, tuple[int, int]] = {}
        self._tokens = False

    def whole(self) -> LargeObject:
        first = self._next()
        if first == b"[" or first == _QUOTE:
            raise FormatError("body", "must be a JSON object")
        if first != b"{":
            self._fail("an object was expected")
        self._at += 1
        values = self._object(1)
        if self._next():
            self._fail("it goes on behind the object")
        return LargeObject(values, self._members)

    def _fail(self, problem: str) -> NoReturn:
        raise FormatError("body", f"is not JSON ({problem} at byte {self._at})")

    def _next(self) -> bytes:
        """The next byte that is no blank, which stays to be read; empty at the end."""
        raw, at = self._raw, self._at
        byte = raw[at : at + 1]
        while byte and byte in b" \t\r\n":
            match = _BLANKS.match(raw, at, at + WINDOW_BYTES)
            assert match is not None
            at = match.end()
            byte = raw[at : at + 1]
        self._at = at
        return byte

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise InputError("body", f"has more than {VALUES_MAX} values beside tokens; send fewer")

    def _object(self, depth: int) -> dict[str, object]:
        made: dict[str, object] = {}
        byte = self._next()
        if byte == b"}":
            self._at += 1
            return made
        while True:
            if byte != _QUOTE:
                self._fail("a name was expected")
            begin = self._at
            self._count()
            self._at += 1
            name = self._text()
            if self._next() != _COLON:
                self._fail("a colon was expected")
            self._at += 1
            if depth == 1:
                self._tokens = name in TOKEN_LISTS
            made[name] = self._value(depth)
            if depth == 1:
                self._members[name] = (begin, self._at)
            byte = self._next()
            self._at += 1
            if byte == b"}":
                return made
            if byte != _COMMA:
                self._at -= 1
                self._fail("a comma or } was expected")
            byte = self._next()

    def _list(self, depth: int) -> list[object]:
        made: list[object] = []
        if self._next() == b"]":
            self._at += 1
            return made
        if self._tokens and self._numbers(made):
            return made
        while True:
            self._count()
            made.append(self._value(depth))
            byte = self._next()
            self._at += 1
            if byte == b"]":
                return made
            if byte != _COMMA:
                self._at -= 1
                self._fail("a comma or ] was expected")

    def _value(self, depth: int) -> object:
        byte = self._next()
        if byte == _QUOTE:
            self._at += 1
            return self._text()
        if byte == b"{" or byte == b"[":
            if depth >= DEPTH_MAX:
                raise FormatError("body", f"is nested more than {DEPTH_MAX} deep")
            self._at += 1
            return self._object(depth + 1) if byte == b"{" else self._list(depth + 1)
        match = _SCALAR.match(self._raw, self._at)
        if match is None:
            self._fail("a value was expected")
        value = self._parsed(match[0])
        self._at = match.end()
        return value

    def _parsed(self, piece: bytes) -> object:
        try:
            return self._from_json(piece, allow_inf_nan=False)
        except ValueError as error:
            self._fail(str(error).partition(" at line")[0][:80])

    def _text(self) -> str:
        """A text, whose first quote was read."""
        raw, pieces = self._raw, []
        while True:
            at = self._at
            match = _TEXT.match(raw, at, at + WINDOW_BYTES)
            assert match is not None
            stop = match.end()
            over = raw[stop : stop + 1] == _QUOTE
            if not over:
                while stop > at and stop < len(raw) and raw[stop] & 0xC0 == 0x80:
                    stop -= 1  # Not in the middle of a character.
                if stop == at or stop == len(raw):
                    if _HALF.match(raw, stop):
                        raise FormatError("body", "has half a character, such as \\ud800 alone")
                    self._fail("a text that is not whole")
            pieces.append(str(self._parsed(b'"%b"' % raw[at:stop])))
            self._at = stop + over
            if over:
                return pieces[0] if len(pieces) == 1 else "".join(pieces)

    def _numbers(self, made: list[object]) -> bool:
        """Read the numbers of a list whose bracket was read; False where it goes on with anything else."""
        raw = self._raw
        while True:
            at = self._at
            match = _NUMBERS.match(raw, at, at + WINDOW_BYTES)
            assert match is not None
            stop = match.end()
            over = raw[stop : stop + 1] == b"]"
            if not over:
                stop = raw.rfind(_COMMA, at, stop) if stop - at == WINDOW_BYTES else -1
                if stop < 0:  # Something else than numbers, or blanks longer than a window.
                    self._at = at
                    return False
            numbers = self._parsed(b"[%b]" % raw[at:stop])
            if not isinstance(numbers, list) or not numbers:
                self._fail("a number was expected")
            made += numbers
            self._at = stop + 1
            if over:
                return True


WRITTEN_CHARS = 32_768
WRITTEN_NUMBERS = 8_192
"""Of a text, and of a list, that become JSON in one call."""


def large_json(value: object) -> bytes:
    """JSON without blanks, as `compact` writes it."""
    return "".join(_json_pieces(value)).encode()


def _json_pieces(value: object) -> Iterator[str]:
    if isinstance(value, str) and len(value) > WRITTEN_CHARS:
        yield '"'
        for start in range(0, len(value), WRITTEN_CHARS):
            yield json.dumps(value[start : start + WRITTEN_CHARS])[1:-1]
        yield '"'
    elif isinstance(value, dict):
        separator = "{"
        for name, item in value.items():
            yield separator
            yield from _json_pieces(name)
            yield ":"
            yield from _json_pieces(item)
            separator = ","
        yield "}" if value else "{}"
    elif isinstance(value, list):
        separator = "["
        for start in range(0, len(value), WRITTEN_NUMBERS):
            items = value[start : start + WRITTEN_NUMBERS]
            if all(type(item) is int for item in items):
                yield separator + json.dumps(items, separators=(",", ":"))[1:-1]
                separator = ","
                continue
            for item in items:
                yield separator
                yield from _json_pieces(item)
                separator = ","
        yield "]" if value else "[]"
    else:
        yield json.dumps(value)
