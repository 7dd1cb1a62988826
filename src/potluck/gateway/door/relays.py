"""What servers of plain OpenAI write goes to the client as it comes. Looked at only for what is to be counted."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from potluck.core.errors import FormatError

TAIL_BYTES = 2048
"""Of the end of an answer, where its usage stands."""
COUNTS = {
    name: re.compile(rb'"' + name.encode() + rb'"\s*:\s*(\d{1,12})')
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
}
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
    found = {}
    if start >= 0:
        for name, pattern in COUNTS.items():
            match = pattern.search(data, start)
            found[name] = int(match[1]) if match else None
    return Counts(found.get("prompt_tokens"), found.get("completion_tokens"), found.get("cached_tokens") or 0)


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
