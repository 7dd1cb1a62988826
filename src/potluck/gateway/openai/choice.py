"""One choice of an answer, as the driver tells it.

From an engine come tokens, which become text. A server of plain OpenAI writes text itself: with one choice its bytes
go on as they come; of several choices the parts are taken apart and said again under one head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from potluck.api.http_errors import HttpRefusal
from potluck.api.openai_replies import (
    ChoiceChunks,
    Json,
    event,
    offset_behind,
    part_choice,
    usage,
    whole_choice,
)
from potluck.api.stops import TextDelta, TextStream
from potluck.core.errors import FormatError
from potluck.core.state.actions import Refuse
from potluck.core.values.sampling import SampledToken
from potluck.gateway.interfaces import TokenCounts
from potluck.gateway.openai.relayed import PART, PIECES, EventParser, StreamTail, counted, parsed
from potluck.gateway.openai.replies import refused_by_brain
from potluck.gateway.openai.response import ResponseWriter
from potluck.gateway.openai.submit import growth_of


class ChoiceWriter:
    """One choice of an answer, as the driver tells it: parts.Answer."""

    over = begun = False
    choice: Json | None = None
    """As a server said it, of several."""
    finish: str | None = None
    _chunks: ChoiceChunks | None = None
    _offset = _status = _parts = 0
    _kind = b""
    _spoke_s: float | None = None
    _pieces: list[bytes] | None = None
    _tail: StreamTail | None = None
    _events: EventParser | None = None
    _pass_on: Callable[[bytes], None]
    """Straight to the client, once an answer in pieces has begun."""

    def __init__(self, answering: ResponseWriter, id: str, index: int, growth: TextStream | None) -> None:
        self.id = id
        self._answering, self._index, self._growth = answering, index, growth
        self.texts: list[str] = []
        self.choices: list[SampledToken] = []

    def tokens(self, choices: Sequence[SampledToken]) -> bool:
        if self.over:
            return True
        growth, answering = self._growth, self._answering
        if growth is None:
            growth = self._growth = growth_of(answering.understand())
            assert growth is not None
        text, seen = "", 0
        for choice in choices:
            text += growth.grow(choice)
            seen += 1
            if growth.met:
                break
        self._spoke_s = answering.came(seen, self._spoke_s)
        assert answering.validated is not None
        if answering.logprobs:
            self._with_logs(tuple(choices[:seen]), text)
            text = ""
        elif not growth.met:
            if answering.validated.stream:
                self._part(text)
            else:
                self.texts.append(text)
        if growth.met:
            self._end(text, "stop", 0)
        return growth.met

    def finished(self, reason: Literal["stop", "length"], cached_tokens: int) -> None:
        if not self.over:
            growth = self._growth or growth_of(self._answering.understand())
            assert growth is not None
            delta = growth.end(reason)
            self._end(delta.text, delta.finish or reason, cached_tokens)

    def refused(self, refusal: Refuse) -> None:
        if not self.over:
            self.over = True
            error, after_s = refused_by_brain(refusal)
            self._answering.fail(error, refusal.reason, after_s)

    def whole(self) -> Json:
        """The choice of a reply that is not streamed."""
        if self.choice is not None:
            return self.choice
        answering = self._answering
        assert answering.validated is not None
        delta = TextDelta("".join(self.texts), tuple(self.choices), self.finish)
        return whole_choice(
            answering.head, self._index, delta, answering.validated.card.text, logprobs=answering.logprobs
        )

    def _part(self, text: str) -> None:
        answering = self._answering
        if self._chunks is None:
            self._chunks = ChoiceChunks(answering.head, self._index)
            answering.say(self._chunks.first(text, answering.usage_so_far()))
        elif text:
            answering.say(self._chunks.part(text, answering.usage_so_far()))

    def _with_logs(self, choices: tuple[SampledToken, ...], text: str, finish: str | None = None) -> None:
        answering = self._answering
        assert answering.validated is not None
        if not answering.validated.stream:
            self.texts.append(text)
            self.choices += choices
            return
        made = part_choice(
            answering.head,
            self._index,
            TextDelta(text, choices, finish),
            answering.validated.card.text,
            logprobs=True,
            offset=self._offset,
            first=self._chunks is None,
        )
        self._chunks = self._chunks or ChoiceChunks(answering.head, self._index)
        self._offset = offset_behind(made, self._offset)
        counts = (
            answering.validated.asked is not None
            and answering.validated.asked.stream_options.continuous_usage_stats
        )
        told = usage(answering.prompt_tokens, answering.output, 0) if counts else None
        answering.say(event(answering.head.reply([made], chunk=True, usage=told)))

    def _end(self, text: str, finish: str, cached_tokens: int) -> None:
        """No more comes; `text` is what was not said yet."""
        answering = self._answering
        self.over, self.finish = True, finish
        assert answering.validated is not None
        if not answering.validated.stream:
            self.texts.append(text)
        elif answering.logprobs:
            self._with_logs((), text, finish)
        else:
            if self._chunks is None:
                self._part("")
            assert self._chunks is not None
            answering.say(self._chunks.last(text, finish, answering.usage_so_far()))
        answering.done(cached_tokens)

    # A server of plain OpenAI.

    def relay_begin(self, status: int, content_type: bytes) -> None:
        if self.over:
            return
        answering = self._answering
        assert answering.validated is not None
        self._status, self._kind = status, content_type
        streams = answering.validated.stream and status < 400 and b"event-stream" in content_type
        self._pieces = None if streams else []
        self._tail = StreamTail() if streams else None
        self._events = EventParser() if streams and not answering.verbatim else None
        if streams and answering.verbatim:
            self._pass_on = answering.begin(status, (b"content-type", content_type))

    def relay(self, data: bytes) -> None:
        if self.over:
            return
        answering = self._answering
        if self._pieces is not None:
            self._pieces.append(data)
            return
        tail, gap, before_s = self._tail, answering.gap, self._spoke_s
        assert tail is not None
        if gap is None or before_s is None:
            parts = tail.add(data)
            self._spoke_s = answering.came(parts, before_s)
            self._parts += parts
        else:  # `came` and `add`, written out: so many calls for each token would cost more than they do.
            self._spoke_s = now_s = answering.clock()
            gap(now_s - before_s)
            parts = data.count(PART)
            answering.output += parts
            self._parts += parts
            tail.pieces.append(data)
            if len(tail.pieces) > PIECES:
                tail.cut()
        if self._events is None:
            self._pass_on(data)
        else:
            self._merge(self._events, data)

    def relay_end(self, counts: TokenCounts | None = None) -> None:
        if self.over:
            return
        answering = self._answering
        if not answering.verbatim:
            self._merged_end(counts)
            return
        self.over = True
        answering.estimated = True  # unless the server tells its usage
        if self._tail is not None:
            answering.relayed(self._status, self._kind, None, counts or self._tail.counts())
        else:
            body = b"".join(self._pieces or [])
            answering.relayed(self._status, self._kind, body, counts or counted(body))

    def relay_whole(
        self, status: int, content_type: bytes, body: bytes, counts: TokenCounts | None = None
    ) -> None:
        if self.over:
            return
        answering = self._answering
        if len(answering.voices) == 1 and not (
            answering.validated is not None and answering.validated.stream
        ):
            self.over = answering.estimated = True
            answering.relayed(status, content_type, body, counts or counted(body))
        else:
            self.relay_begin(status, content_type)
            self.relay(body)
            self.relay_end(counts)

    def _merge(self, events: EventParser, data: bytes) -> None:
        """Parts of one of several choices: said again under the one head."""
        answering = self._answering
        try:
            for part in events.feed(data):
                choices = part.get("choices")
                if isinstance(choices, list) and choices and isinstance(choices[0], dict):
                    self.finish = str(choices[0].get("finish_reason") or self.finish or "stop")
                    made: Json = {**choices[0], "index": self._index}
                    answering.say(event(answering.head.reply([made], chunk=True)))
        except FormatError as error:
            answering.fail(HttpRefusal(502, str(error), "upstream_failed"), "upstream")

    def _merged_end(self, counts: TokenCounts | None) -> None:
        answering = self._answering
        if counts is not None and self._pieces is None:  # Parts were counted as they came.
            answering.output += (counts.output or 0) - self._parts
        if self._pieces is not None:
            body = b"".join(self._pieces)
            try:
                found = parsed(body)
            except FormatError as error:
                answering.fail(HttpRefusal(502, str(error), "upstream_failed"), "upstream")
                return
            choices = found.get("choices")
            if 400 <= self._status < 500:
                answering.fail(_refusal(self._status, found), "upstream")
                return
            if self._status >= 400 or not isinstance(choices, list) or not choices:
                line = f"the server answered with status {self._status} and no choice"
                answering.fail(HttpRefusal(502, line, "upstream_failed"), "upstream")
                return
            self.choice = {**choices[0], "index": self._index} if isinstance(choices[0], dict) else {}
            self.finish = str(self.choice.get("finish_reason") or "stop")
            answering.output += (counts or counted(body)).output or 0
        self.over = True
        answering.done(0 if counts is None else counts.cached)


def _refusal(status: int, said: Json) -> HttpRefusal:
    """What an engine or a server finds wrong with a request, for all of its choices."""
    error = said.get("error")
    error = error if isinstance(error, dict) else {}
    code, param = (str(error[name]) if error.get(name) is not None else None for name in ("code", "param"))
    return HttpRefusal(status, str(error.get("message") or "the request was refused"), code, param)
