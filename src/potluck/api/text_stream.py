"""Stop strings in a stream of text: found across any boundaries, and nothing shown that may turn out to be one.

Text ends where the first stop string is complete, character by character; of several that are complete there, the
longest counts. So the answer does not depend on how the text was cut into tokens, and nothing is generated in the
hope that a longer one, which began earlier, will be complete later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from potluck.api.tokenizer import ModelTokenizer
from potluck.api.tool_calls import CLOSING_TAG, OPENING_TAG, CallFormat, ToolCall, ToolCallParser
from potluck.core.errors import InputError
from potluck.core.values.sampling import SampledToken

MOST_STOPS = 16
LONGEST_STOP = 1024


def checked_stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MOST_STOPS:
        raise InputError("stop", f"at most {MOST_STOPS} strings, got {len(stops)}")
    for stop in stops:
        if not stop or len(stop) > LONGEST_STOP:
            raise InputError("stop", f"strings must have 1 to {LONGEST_STOP} characters")
    return tuple(stops)


class StopScanner:
    """Text in, text out that is safe to show: nothing behind a stop string, and it itself only with `include`."""

    def __init__(self, stops: Sequence[str] = (), *, include: bool = False) -> None:
        self._stops = checked_stops(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            place, self.found = min(ends, key=lambda end: (end[0] + len(end[1]), end[0]))
            self._held = ""
            return text[: place + len(self.found) * self._include]
        hold = self._suspicious(text)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def rest(self) -> str:
        text, self._held = self._held, ""
        return text

    def _suspicious(self, text: str) -> int:
        """Characters at the end with which a stop string may begin."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[len(text) - size :]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


@dataclass(frozen=True, slots=True)
class TextRules:
    stops: tuple[str, ...] = ()
    min_tokens: int = 0  # Stop strings are looked for behind the first so many tokens.
    include_stop: bool = False
    special: bool = False
    tool_calls: CallFormat = ""
    parallel_tool_calls: bool = True


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    choices: tuple[SampledToken, ...] = ()
    finish: str | None = None
    cached_tokens: int = 0
    calls: tuple[ToolCall, ...] = ()


class TextStream:
    """Tokens in, text out that is safe to show, and the tool calls in it. Without a tokenizer there is none."""

    def __init__(self, tokenizer: ModelTokenizer | None, text_rules: TextRules, ends: frozenset[int]) -> None:
        special = text_rules.special
        if tokenizer is not None and text_rules.tool_calls == "tagged":
            special = special or not tokenizer.special_texts.isdisjoint((OPENING_TAG, CLOSING_TAG))
        self._decoding = None if tokenizer is None else tokenizer.stream(special=special)
        self._parser = (
            ToolCallParser(text_rules.tool_calls, parallel=text_rules.parallel_tool_calls)
            if text_rules.tool_calls
            else None
        )
        self.reads_calls = self._parser is not None
        self._taken_calls = 0
        self._scanner = StopScanner(text_rules.stops, include=text_rules.include_stop)
        self._shown, self._ends = text_rules, ends
        self.tokens = 0

    def grow(self, sampled_token: SampledToken) -> str:
        """One more token; the text that can be shown now. `met` says whether a stop string was."""
        self.tokens += 1
        hidden = sampled_token.token in self._ends and not self._shown.include_stop
        piece = "" if hidden or self._decoding is None else self._decoding.feed(sampled_token.token)
        piece = piece if self.tokens <= self._shown.min_tokens else self._scanner.feed(piece)
        if self._parser is None:
            return piece
        piece = self._parser.feed(piece)
        return piece + self._parser.end() if self.met else piece

    def take_calls(self) -> tuple[ToolCall, ...]:
        """The calls that were completed since the last time."""
        if self._parser is None:
            return ()
        calls = tuple(self._parser.calls[self._taken_calls :])
        self._taken_calls += len(calls)
        return calls

    def finish(self, reason: str) -> str:
        """The reason to end as clients get it."""
        return (
            "tool_calls" if reason == "stop" and self._parser is not None and self._parser.calls else reason
        )

    @property
    def met(self) -> bool:
        """A stop string was found: the rest is of no use."""
        return self._scanner.found is not None

    def feed(self, sampled_token: SampledToken) -> TextDelta:
        """One more token. `finish` is `stop` where a stop string was met."""
        text = self.grow(sampled_token)
        finish = self.finish("stop") if self.met else None
        return TextDelta(text, (sampled_token,), finish, calls=self.take_calls())

    def end(self, reason: str, cached_tokens: int = 0) -> TextDelta:
        text = self._scanner.feed("" if self._decoding is None else self._decoding.rest())
        if self._scanner.found is not None:
            reason = "stop"
        text += self._scanner.rest()
        if self._parser is not None:
            text = self._parser.feed(text) + self._parser.end()
        return TextDelta(text, (), self.finish(reason), cached_tokens, self.take_calls())
