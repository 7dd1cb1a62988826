"""Tool calls in generated text, in the format of Hermes and Qwen models; text in, content and calls out.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

A call counts once its closing tag is complete and its JSON is valid. Until then its text is held back, since a call
that is unfinished or invalid is shown as plain text. Each character is looked at once, so the result does not
depend on how the text was cut into pieces.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

OPENING_TAG, CLOSING_TAG = "<tool_call>", "</tool_call>"
CALL_JSON_MAX_DEPTH = 64
WHITESPACE = " \t\r\n"
SCALAR_CHARS = frozenset("-+.0123456789abcdefghijklmnopqrstuvwxyzE")
"""Of numbers, true, false and null; `json.loads` checks them."""

CallFormat = Literal["", "tagged", "bare"]
"""Whether text is read for calls: not at all, between tags, or as the JSON of one call and nothing else."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    index: int
    name: str
    arguments: str
    """A JSON object as text."""


def call_of(text: str, index: int) -> ToolCall | None:
    """The call that a JSON object describes; None where it is none."""
    try:
        value = json.loads(text, strict=False)  # line ends within strings are common in models' output
        name, arguments = value.get("name"), value.get("arguments")
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
            return None
        shown = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        (name + shown).encode()  # refuses half of a surrogate pair
    except (ValueError, RecursionError):
        return None
    return ToolCall(index, name, shown)


class JsonObjectScanner:
    """Finds where one JSON object ends: `complete` behind its last brace, `invalid` at a character out of place."""

    __slots__ = ("_closers", "_escaped", "_expected", "_key", "complete", "invalid")

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._expected: Literal["object", "value", "item", "key", "name", "colon", "next", "string", "scalar"]
        self._expected = "object"
        self._escaped = self._key = False
        self.complete = self.invalid = False

    def feed(self, text: str, start: int) -> int:
        """Scan from `start` on; returns where it stopped: the text's end, or before that once it is decided."""
        for at in range(start, len(text)):
            char = text[at]
            if self._expected == "string":
                self._in_string(char)
            elif self._expected == "scalar" and char in SCALAR_CHARS:
                continue
            else:
                if self._expected == "scalar":
                    self._expected = "next"
                if char in WHITESPACE:
                    continue
                if not self._takes(char):
                    self.invalid = True
                    return at
                if not self._closers:
                    self.complete = True
                    return at + 1
        return len(text)

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._expected = "colon" if self._key else "next"

    def _takes(self, char: str) -> bool:
        expected = self._expected
        if char == "{" and expected in ("object", "value", "item"):
            return self._opens("}", "key")
        if expected in ("value", "item"):
            if char == "[":
                return self._opens("]", "item")
            if char == '"':
                self._key, self._expected = False, "string"
                return True
            if char in SCALAR_CHARS:
                self._expected = "scalar"
                return True
        if char == '"' and expected in ("key", "name"):
            self._key, self._expected = True, "string"
            return True
        if char == ":" and expected == "colon":
            self._expected = "value"
            return True
        if char == "," and expected == "next":
            self._expected = "name" if self._closers[-1] == "}" else "value"
            return True
        empty = expected == ("key" if char == "}" else "item")
        if char in "}]" and (expected == "next" or empty) and self._closers[-1] == char:
            self._closers.pop()
            self._expected = "next"
            return True
        return False

    def _opens(self, closer: str, expected: Literal["key", "item"]) -> bool:
        self._closers.append(closer)
        self._expected = expected
        return len(self._closers) <= CALL_JSON_MAX_DEPTH


class ToolCallParser:
    """Text goes in as it comes; `feed` returns the content that can be shown, `calls` collects the calls.

    Content is all text outside of calls. White space alone, before, between or after calls, is left out. With
    `parallel` false only the first call counts.
    """

    def __init__(self, form: CallFormat = "tagged", *, parallel: bool = True) -> None:
        self.calls: list[ToolCall] = []
        self._bare, self._parallel = form == "bare", parallel
        self._scanner = JsonObjectScanner() if self._bare else None
        """Of the call whose text is being read; None outside of calls."""
        self._held: list[str] = []  # That call's text, its opening tag included.
        self._json = ""  # Its JSON, once that is complete.
        self._partial = ""  # The beginning of a tag at the end of what came.
        self._blank = ""  # White space before anything else outside of calls.
        self._shows = False  # Whether other text came since the last call.

    def feed(self, text: str) -> str:
        text, self._partial = self._partial + text, ""
        shown: list[str] = []
        at = 0
        while at < len(text):
            if self._scanner is None:
                at = self._outside(text, at, shown)
            elif not self._json:
                at = self._inside(self._scanner, text, at, shown)
            else:
                at = self._closing(text, at, shown)
        return "".join(shown)

    def end(self) -> str:
        """What is held back is plain text in the end."""
        shown = self._content("".join(self._held) + self._partial)
        if not self.calls:
            shown += self._blank
        self._held, self._partial, self._blank, self._scanner = [], "", "", None
        return shown

    def _outside(self, text: str, at: int, shown: list[str]) -> int:
        place = -1 if self._bare else text.find(OPENING_TAG, at)
        if place >= 0:
            shown.append(self._content(text[at:place]))
            self._scanner, self._held = JsonObjectScanner(), [OPENING_TAG]
            return place + len(OPENING_TAG)
        kept = 0 if self._bare else _beginning_of_tag(text, at)
        shown.append(self._content(text[at : len(text) - kept]))
        self._partial = text[len(text) - kept :]
        return len(text)

    def _inside(self, scanner: JsonObjectScanner, text: str, at: int, shown: list[str]) -> int:
        stop = scanner.feed(text, at)
        self._held.append(text[at:stop])
        if scanner.invalid:
            self._give_up(shown)
        elif scanner.complete:
            self._json = "".join(self._held).removeprefix(OPENING_TAG)
            if self._bare:
                self._found(shown)
        return stop

    def _closing(self, text: str, at: int, shown: list[str]) -> int:
        """White space and the closing tag are all that may follow a call's JSON."""
        stop = at
        while stop < len(text) and text[stop] in WHITESPACE:
            stop += 1
        self._held.append(text[at:stop])
        rest = text[stop : stop + len(CLOSING_TAG)]
        if rest == CLOSING_TAG:
            self._held.append(rest)
            self._found(shown)
            return stop + len(rest)
        if CLOSING_TAG.startswith(rest):
            self._partial = rest
            return len(text)
        self._give_up(shown)
        return stop

    def _found(self, shown: list[str]) -> None:
        call = call_of(self._json, len(self.calls))
        if call is None:
            self._give_up(shown)
            return
        if self._parallel or not self.calls:
            self.calls.append(call)
        self._scanner, self._held, self._json = None, [], ""
        self._blank, self._shows = "", False

    def _give_up(self, shown: list[str]) -> None:
        shown.append(self._content("".join(self._held)))
        self._scanner, self._held, self._json = None, [], ""

    def _content(self, text: str) -> str:
        if self._shows or not text:
            return text
        if text.isspace():
            self._blank += text
            return ""
        text, self._blank, self._shows = self._blank + text, "", True
        return text


def _beginning_of_tag(text: str, start: int) -> int:
    """How many characters at the end of a text, from `start` on, an opening tag may begin with."""
    for size in range(min(len(OPENING_TAG) - 1, len(text) - start), 0, -1):
        if text.endswith(OPENING_TAG[:size]):
            return size
    return 0
