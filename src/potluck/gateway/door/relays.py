"""What servers of plain OpenAI write goes to the client as it comes. Looked at only for what is to be counted."""

from __future__ import annotations

import json
from typing import NamedTuple

from potluck.core.errors import FormatError

TAIL_BYTES = 2048
"""Of the end of an answer, where its usage stands."""
PART = b"data:"


class Counts(NamedTuple):
    prompt: int | None
    output: int | None
    cached: int


class Tail:
    """The end of what went by, and how many parts of a stream there were."""

    __slots__ = ("_end", "parts")

    def __init__(self) -> None:
        self._end = b""
        self.parts = 0

    def add(self, data: bytes) -> None:
        self.parts += data.count(PART)
        self._end = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (self._end + data)[-TAIL_BYTES:]

    def counts(self) -> Counts:
        return counted(self._end)


def counted(data: bytes) -> Counts:
    """The usage that a server told last in these bytes; None where it told none."""
    start = data.rfind(b'"usage"')
    if start < 0:
        return Counts(None, None, 0)
    return Counts(
        _number(data, b'"prompt_tokens"', start),
        _number(data, b'"completion_tokens"', start),
        _number(data, b'"cached_tokens"', start) or 0,
    )


def _number(data: bytes, name: bytes, start: int) -> int | None:
    """What stands behind a name and a colon, where that is a whole number."""
    place = data.find(name, start)
    if place < 0:
        return None
    place += len(name)
    said = data[place : place + 24].replace(b"}", b",").partition(b",")[0].strip()
    digits = said[1:].lstrip()
    return int(digits) if said[:1] == b":" and digits.isdigit() else None


class Parts:
    """Server-sent events out of bytes as they come, cut anywhere."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[dict[str, object]]:
        """The JSON objects that are whole now."""
        *lines, self._held = (self._held + data).split(b"\n")
        found = []
        for line in lines:
            value = line.strip()
            if value.startswith(PART) and (value := value[len(PART) :].strip()) != b"[DONE]":
                found.append(parsed(value))
        return found


def parsed(data: bytes) -> dict[str, object]:
    """A server's JSON object; raises FormatError for anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError("answer", "the server's answer is not JSON") from error
    if not isinstance(found, dict):
        raise FormatError("answer", "the server's answer is not an object")
    return found
