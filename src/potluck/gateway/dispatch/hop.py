"""One segment at its engine: the lines of its answer, believed only as far as they add up.

Whatever comes behind the end, from a leg that was given up or of a kind that does not belong here, reaches nobody.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import TYPE_CHECKING

from potluck.api.http_errors import error_object
from potluck.api.segments import UNSUPPORTED
from potluck.core.state.events import FailureKind
from potluck.core.values.sampling import SampledToken
from potluck.gateway.dispatch.engine_faults import EngineFault, dead, ended, refused
from potluck.gateway.dispatch.engine_lines import InvalidReply, LastLine, LineReader, Said
from potluck.gateway.dispatch.segment_bodies import SegmentWork
from potluck.gateway.dispatch.silence import HANDOVER_S, AwaitingReply
from potluck.gateway.interfaces import Call, Endpoint, Headers

if TYPE_CHECKING:
    from potluck.gateway.dispatch.attempt import Attempt

LONGEST_ERROR = 1 << 13
"""Bytes of an error's body that are looked at."""
FINGERPRINT = b"x-potluck-fingerprint"
CLIENTS_FAULT = 400


class Hop(AwaitingReply):
    """What both kinds have in common: the status, errors, the end."""

    __slots__ = ("_error", "_lines", "_status", "attempt", "call", "endpoint", "over", "stretch", "told")

    def __init__(self, attempt: Attempt, stretch: SegmentWork, endpoint: Endpoint, tokens: int) -> None:
        super().__init__(tokens)
        self.attempt = attempt
        self.stretch = stretch
        self.endpoint = endpoint
        self.call: Call | None = None
        self.over = False
        """Nothing more is heard of it: it has ended, or was given up."""
        self._status = 0
        self._error = b""
        self._lines = LineReader(attempt.vocab)
        self.told = 0
        """Tokens that it streamed."""

    @property
    def replica(self) -> str:
        return self.stretch.replica

    @property
    def has_source(self) -> bool:
        return self.stretch.start > 0

    # What its engine says.

    def head(self, status: int, headers: Headers) -> None:
        if self.over:
            return
        self._status = status
        known, said = self.endpoint.fingerprint, headers.get(FINGERPRINT, b"")
        if known and said and said.decode("latin-1") != known:
            self._fail(dead("has another model or other weights than it had"))

    def data(self, data: bytes) -> None:
        if self.over:
            self.attempt.too_much(self)
            return
        if self._status != 200:
            if len(self._error) < LONGEST_ERROR:
                self._error += data
            return
        self.hear(self.attempt.now_s())
        self._said(self._lines.feed(data))

    def done(self) -> None:
        self.call = None
        if self.over:
            return
        if self._status != 200:
            self._fail(refused(self._status, _code(self._error), self.has_source))
        else:
            self._fail(dead("ended its answer before its end"))

    def lost(self, why: str) -> None:
        self.call = None
        if not self.over:
            self._fail(dead(why))

    def stalled(self, kind: FailureKind) -> None:
        self._fail(EngineFault(kind, "self", "says nothing any more"))

    def undelivered(self) -> None:
        self._fail(EngineFault("transfer", "target", f"its cache was not fetched within {HANDOVER_S:g} s"))

    @abstractmethod
    def _said(self, found: list[Said | InvalidReply]) -> None:
        """What the lines that came say."""

    def _fail(self, verdict: EngineFault) -> None:
        self.over = True
        self.attempt.failed(self, verdict)

    def _lied(self, why: str) -> None:
        self._fail(dead(f"lied: {why}"))


class PrefillHop(Hop):
    """A segment that hands its cache on."""

    __slots__ = ()

    def _said(self, found: list[Said | InvalidReply]) -> None:
        for place, said in enumerate(found):
            if isinstance(said, InvalidReply):
                self._lied(str(said))
            elif isinstance(said, SampledToken):
                self._lied("a token from a segment that does not decode")
            elif isinstance(said, LastLine):
                self._last(said, place + 1 < len(found))
            elif "computed" in said:
                self.computed(self.heard_s)
                self.rest()
                self.until_s = self.heard_s + HANDOVER_S
                self.attempt.segment_computed(self)
            elif "handle" not in said:
                self._lied("a line that says nothing")
            if self.over:
                return

    def _last(self, last: LastLine, more: bool) -> None:
        if last.reason != "handed_on":
            self._fail(ended(last.code, self.has_source, hands_on=True))
        elif more or last.output_tokens or last.prompt_tokens != self.attempt.prompt_tokens:
            self._lied("an end that does not add up")
        else:
            self.over = True
            self.attempt.handed_on(self, last.cached_tokens)


class DecodeHop(Hop):
    """The last segment: its tokens are the answer."""

    __slots__ = ()

    def done(self) -> None:
        if not self.over and self._status == CLIENTS_FAULT and _code(self._error) == UNSUPPORTED:
            self.call, self.over = None, True
            self.attempt.turned_down(self, self._status, self._error)
        else:
            super().done()

    def _said(self, found: list[Said | InvalidReply]) -> None:
        choices: list[SampledToken] = []
        end: Said | InvalidReply | None = None
        more = False
        for said in found:
            if end is not None:
                more = True
            elif isinstance(said, SampledToken):
                choices.append(said)
            else:
                end = said
        if self.told < self.attempt.least_tokens:
            kept = self._before_an_end(choices)
            if len(kept) < len(choices):
                choices, end = kept, InvalidReply("an end before min_tokens")
        if choices:
            self.told += len(choices)
            if not self.flows:
                self.computed(self.heard_s)
                self.flows = True
            self.attempt.tokens(choices)
        if end is None or self.over:
            return
        if isinstance(end, InvalidReply):
            self._lied(str(end))
        elif not isinstance(end, LastLine):
            self._lied("a line that says nothing")
        elif end.code == UNSUPPORTED and end.reason == "error":
            self.over = True
            line = "response_format: the grammar became too complex, or the model has no token that fits it"
            error = error_object(CLIENTS_FAULT, line, param="response_format", code=UNSUPPORTED)
            self.attempt.turned_down(self, CLIENTS_FAULT, json.dumps(error).encode())
        elif end.reason not in ("stop", "length"):
            self._fail(ended(end.code, self.has_source, hands_on=False))
        elif more or not self._adds_up(end):
            self._lied("an end that does not add up")
        else:
            self.over = True
            self.attempt.finished("stop" if end.reason == "stop" else "length", end.cached_tokens)

    def _before_an_end(self, choices: list[SampledToken]) -> list[SampledToken]:
        """Those before one that must not be drawn yet."""
        ends = self.attempt.ends
        for place, choice in enumerate(choices[: self.attempt.least_tokens - self.told]):
            if choice.token in ends:
                return choices[:place]
        return choices

    def _adds_up(self, end: LastLine) -> bool:
        attempt = self.attempt
        if end.prompt_tokens != attempt.prompt_tokens or end.output_tokens != self.told or not self.told:
            return False
        if end.reason == "length":
            return self.told == attempt.most_tokens
        return self.told > attempt.least_tokens or self.told == attempt.most_tokens


def _code(error: bytes) -> object:
    """The word for what went wrong, in OpenAI's shape; None where there is none."""
    try:
        said = json.loads(error)
    except (ValueError, RecursionError):
        return None
    inner = said.get("error") if isinstance(said, dict) else None
    return inner.get("code") if isinstance(inner, dict) else None
