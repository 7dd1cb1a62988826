"""What servers of plain OpenAI write goes to the client as it comes. Looked at only for what is to be counted."""

from __future__ import annotations

import json
import re

from potluck.core.errors import FormatError
from potluck.gateway.interfaces import TokenCounts

TAIL_BYTES = 2048
"""Of the end of an answer, where its usage stands."""
PIECES = 16
"""That are kept before they are put together and cut: not with each of them."""
PART = b"data:"


NOTHING_SAID = TokenCounts(None, None, 0)
NUMBERS = re.compile(rb'"(prompt|completion|cached)_tokens"[ \t\r\n]*:[ \t\r\n]*(\d{1,15})[ \t\r\n]*[,}]')
"""Counts of a usage, where they are whole numbers; of several the first counts."""


class StreamTail:
    """The end of what went by."""

    __slots__ = ("pieces",)

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def add(self, data: bytes) -> int:
        """How many parts of a stream begin in it."""
        self.pieces.append(data)
        if len(self.pieces) > PIECES:
            self.cut()
        return data.count(PART)

    def cut(self) -> None:
        """So many pieces become one, which is not too long."""
        self.pieces = [b"".join(self.pieces)[-TAIL_BYTES:]]

    def counts(self) -> TokenCounts:
        self.cut()
        return counted(self.pieces[0])


def counted(data: bytes) -> TokenCounts:
    """The usage that a server told last in these bytes; None where it told none."""
    start = data.rfind(b'"usage"')
    if start < 0:
        return NOTHING_SAID
    found = dict(reversed(NUMBERS.findall(data, start)))
    prompt, output, cached = found.get(b"prompt"), found.get(b"completion"), found.get(b"cached")
    return TokenCounts(
        None if prompt is None else int(prompt),
        None if output is None else int(output),
        0 if cached is None else int(cached),
    )


class EventParser:
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
