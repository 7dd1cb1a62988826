"""One request's answer: what its choices say becomes what the client reads. What fails before the first part has its
own status."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Literal

from potluck.api.http import HttpRefusal, compact, error_object, parse_object, random_word
from potluck.api.openai_replies import (
    LAST_EVENT,
    ChoiceChunks,
    Json,
    ReplyHead,
    event,
    offset_behind,
    part_choices,
    usage,
    usage_text,
    whole_choice,
    whole_reply,
)
from potluck.api.openai_requests import ChatRequest
from potluck.api.text_stream import TextDelta, TextStream
from potluck.api.tool_calls import ToolCall
from potluck.api.tool_requests import forced_call_problem
from potluck.core.errors import FormatError
from potluck.core.state.actions import RefusalReason, Refuse
from potluck.core.values.sampling import SampledToken
from potluck.gateway.admin.counters import Counters
from potluck.gateway.dispatch.dispatcher import Dispatcher
from potluck.gateway.http.server import STREAM_HEADERS, Exchange
from potluck.gateway.openai.kept_answers import AnswerRecording
from potluck.gateway.openai.keys import ApiKey, KeyQuota, QuotaExceeded
from potluck.gateway.openai.requests import ValidatedRequest, text_stream_of, understand
from potluck.gateway.values import RequestOutcome, TokenCounts

TAIL_BYTES = 2048
PIECES = 16  # That are kept before they are put together and cut: not with each of them.
PART = b"data:"


NOTHING_SAID = TokenCounts(None, None, 0)
NUMBERS = re.compile(rb'"(prompt|completion|cached)_tokens"[ \t\r\n]*:[ \t\r\n]*(\d{1,15})[ \t\r\n]*[,}]')
"""Counts of a usage, where they are whole numbers; of several the first counts."""


class StreamTail:
    __slots__ = ("pieces",)

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def add(self, data: bytes) -> int:
        self.pieces.append(data)
        if len(self.pieces) > PIECES:
            self.cut()
        return data.count(PART)

    def cut(self) -> None:
        self.pieces = [b"".join(self.pieces)[-TAIL_BYTES:]]

    def counts(self) -> TokenCounts:
        self.cut()
        return counted(self.pieces[0])


def counted(data: bytes) -> TokenCounts:
    start = data.rfind(b'"usage"')
    if start < 0:
        return NOTHING_SAID
    result = dict(reversed(NUMBERS.findall(data, start)))
    prompt, output, cached = result.get(b"prompt"), result.get(b"completion"), result.get(b"cached")
    return TokenCounts(
        None if prompt is None else int(prompt),
        None if output is None else int(output),
        0 if cached is None else int(cached),
    )


class EventParser:
    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[dict[str, object]]:
        *lines, self._held = (self._held + data).split(b"\n")
        result = []
        for line in lines:
            value = line.strip()
            if value.startswith(PART) and (value := value[len(PART) :].strip()) != b"[DONE]":
                result.append(parse_object(value))
        return result


GONE = 499


class OpenRequests:
    open = 0

    def why_unready(self, model: str) -> str:
        """Why no replica of a model can be reached; empty where one can."""
        return ""


class ResponseWriter:
    """Told to the meter once. What most answers never change is the class's: making one is then cheap."""

    limits = b""
    validated: ValidatedRequest | None = None
    writers: Sequence[ChoiceWriter] = ()
    over = _begun = estimated = logprobs = False
    _choices = 1
    _left = output = _cached = prompt_tokens = 0
    reserved = 0
    first_s: float | None = None
    _head: ReplyHead | None = None
    _created_s = 0.0
    _word = ""
    recording: AnswerRecording | None = None
    gap: Callable[[float], None] | None = None  # Hears what is between two tokens, as soon as there was one.
    on_first_output: Callable[[], None] | None = None
    """Called once a choice has its first token, or its end."""

    def __init__(
        self,
        exchange: Exchange,
        request: str,
        key: ApiKey,
        dispatcher: Dispatcher,
        counters: Counters,
        clock: Callable[[], float],
        handler: OpenRequests,
    ) -> None:
        self._exchange, self._key, self._driver, self._meter = exchange, key, dispatcher, counters
        self.clock, self._handler = clock, handler
        self.request = request
        self._tag = (b"x-request-id", request.encode())

    def start(
        self,
        validated: ValidatedRequest,
        word: str,
        created_s: float,
        writers: Sequence[ChoiceWriter],
        prompt_tokens: int,
    ) -> None:
        """What is asked is known: from here on writers may speak. `word` names the answer."""
        self.validated, self.writers = validated, writers
        self._word, self._created_s = word, created_s
        self._left = self._choices = len(writers)
        self.prompt_tokens = prompt_tokens
        if validated.asked is not None:
            self.logprobs = validated.asked.reported is not None
        self._exchange.on_room = self._room

    @property
    def head(self) -> ReplyHead:
        if self._head is None:
            validated = self.validated
            assert validated is not None
            kind = "chatcmpl" if validated.chat else "cmpl"
            name, created_s = f"{kind}-{self._word}", int(self._created_s)
            self._head = ReplyHead(name, created_s, validated.card.name, validated.chat, validated.usage_said)
        return self._head

    def understand(self) -> ValidatedRequest:
        """Tokens come where a server's bytes were expected."""
        validated = self.validated
        assert validated is not None
        if validated.asked is None:
            validated.asked = understand(validated)
            self.logprobs = validated.asked.reported is not None
            self._head = self.head._replace(usage_said=validated.usage_said)
        return validated

    @property
    def verbatim(self) -> bool:
        return len(self.writers) == 1

    def came(self, tokens: int, before_s: float | None) -> float:
        """More tokens, or pieces where tokens are not seen, of a writer that spoke before; when that is."""
        now_s = self.clock()
        if self.first_s is None:
            self.first_s = now_s
            if self.on_first_output is not None:
                self._told_first()
        if self.gap is None:
            assert self.validated is not None
            self.gap = self._meter.gaps(self.validated.card.name)
        if before_s is not None:
            self.gap(now_s - before_s)
        self.output += tokens
        return now_s

    def _told_first(self) -> None:
        then, self.on_first_output = self.on_first_output, None
        if then is not None:
            then()

    def say(self, data: bytes) -> None:
        if not self._begun:
            self.begin(200, EVENTS)
        self._exchange.write(data)

    def begin(self, status: int, kind: tuple[bytes, bytes]) -> Callable[[bytes], None]:
        self._begun = True
        self._exchange.begin(status, (kind, self._tag), STREAM_HEADERS + self.limits)
        return self._exchange.write

    def usage_so_far(self) -> str:
        assert self.validated is not None
        asked = self.validated.asked
        if asked is not None and asked.stream_options.continuous:
            return usage_text(self.prompt_tokens, self.output, self._cached)
        return "null"

    def done(self, cached_tokens: int) -> None:
        # A prompt counts once, and so does what of it was cached, however many answers it gets.
        self._cached = min(self._cached + cached_tokens, self.prompt_tokens)
        self._left -= 1
        if self._left or self.over:
            self._told_first()
            return
        assert self.validated is not None
        self.over = True
        stream, finish = self.validated.stream, self.writers[0].finish or "stop"
        whole = b"" if stream else self._whole()
        # Its record first: nobody has the end of an answer that was not written down.
        self._tell("stop" if finish == "tool_calls" else finish, 200)
        if stream:
            self._end_stream()
        else:
            self._exchange.reply(200, whole, (JSON, self._tag), self.limits)

    def _end_stream(self) -> None:
        assert self.validated is not None
        end = LAST_EVENT
        asked = self.validated.asked
        if asked is not None and asked.stream_options.include_usage:
            whole = usage(self.prompt_tokens, self.output, self._cached)
            end = event(self.head.reply([], chunk=True, usage=whole)) + end
        self.say(end)
        self._exchange.end()

    def _whole(self) -> bytes:
        head, writers = self.head, self.writers
        if len(writers) == 1 and not self.logprobs and writers[0].choice is None and not writers[0].calls:
            counts = usage_text(self.prompt_tokens, self.output, self._cached)
            return whole_reply(head, "".join(writers[0].texts), writers[0].finish or "stop", counts)
        choices = [writer.whole() for writer in writers]
        return compact(
            head.reply(choices, chunk=False, usage=usage(self.prompt_tokens, self.output, self._cached))
        )

    def relayed(self, status: int, kind: bytes, body: bytes | None, counts: TokenCounts) -> None:
        if self.over:
            return
        if counts.output is not None and counts.prompt is not None:
            self.prompt_tokens, self.output, self.estimated = counts.prompt, counts.output, False
            if self.validated is not None and self.validated.length is not None:
                self.validated.length.learn(self.validated.chars, counts.prompt)
        self._cached = counts.cached
        self.over = True
        self._tell("stop" if status < 400 else "upstream", status)
        if body is not None:
            self._exchange.reply(status, body, ((b"content-type", kind), self._tag), self.limits)
        else:
            self._exchange.end()

    def fail(self, refusal: HttpRefusal, outcome: str, after_s: float | None = None) -> None:
        if self.over:
            return
        self.over = True
        self._cancel()
        if self.recording is not None:
            self.recording.spoil()
        self._tell(outcome, refusal.status)
        if not self._begun:
            reply_error(self._exchange, self._tag, refusal, after_s)
        elif self.validated is not None and self.validated.stream:
            self._exchange.write(b"data: " + error_bytes(refusal) + b"\n\n" + LAST_EVENT)
            self._exchange.end()
        else:
            self._exchange.drop()

    def with_reason(self, refusal: Refuse) -> Refuse:
        """The Brain's refusal for lack of replicas, with why there are none."""
        card = None if self.validated is None else self.validated.card
        reason = "" if card is None else self._handler.why_unready(card.base or card.name)
        return refusal._replace(detail=f"{refusal.detail}; {reason}") if reason else refusal

    def gone(self) -> None:
        if not self.over:
            self.over = True
            self._cancel()
            self._tell("cancelled", GONE)

    def _cancel(self) -> None:
        for writer in self.writers:
            if not writer.over:
                writer.over = True
                if writer.begun:
                    self._driver.cancel(writer.id)

    def _room(self, there: bool) -> None:
        for writer in self.writers:
            if writer.begun and not writer.over:
                self._driver.room(writer.id, there)

    def _tell(self, outcome: str, status: int) -> None:
        exchange, key, validated = self._exchange, self._key, self.validated
        exchange.on_gone = exchange.on_room = None
        self.writers = ()  # What holds each other is not left to the collector of garbage.
        self._handler.open -= 1
        served = self.prompt_tokens if self.output or status < 400 else 0
        key.allowance.leave(self.reserved, served + self.output)
        self._meter.answered(
            RequestOutcome(
                self.request,
                key.name,
                key.tenant,
                "" if validated is None else validated.card.name,
                "" if validated is None else validated.manner.request_class,
                outcome,
                status,
                self.prompt_tokens,
                self._cached,
                self.output,
                exchange.came_s,
                self.first_s,
                self.clock(),
                validated is not None and validated.stream,
                self.estimated,
                self._choices,
                self._word or random_word(),
            )
        )


Pairs = list[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")

REFUSALS: Mapping[RefusalReason, tuple[int, str]] = {
    "overloaded": (429, "overloaded"),
    "no_capacity": (503, "no_capacity"),
    "too_long": (400, "context_length_exceeded"),
    "deadline": (504, "deadline_exceeded"),
    "unknown_model": (404, "model_not_found"),
    "unknown_class": (400, "unknown_class"),
    "retries": (502, "upstream_failed"),
    "lost": (502, "upstream_failed"),
    "grammar": (422, "grammar_lost_engine"),  # Clients send a 5xx again by themselves.
}
AGAIN = frozenset({429, 503})


class RateLimited(HttpRefusal):
    def __init__(self, message: str, code: str, retry_after_s: float, lines: bytes = b"") -> None:
        super().__init__(429, message, code)
        self.retry_after_s = retry_after_s
        self.lines = lines


def limited(allowance: KeyQuota, quota_exceeded: QuotaExceeded, now_s: float) -> RateLimited:
    quota = allowance.quota
    what = {
        "requests": f"{quota.requests_per_min:g} requests a minute" if quota.requests_per_min else "",
        "tokens": f"{quota.tokens_per_min:g} tokens a minute" if quota.tokens_per_min else "",
        "concurrent": f"{quota.concurrent} requests at once",
    }[quota_exceeded.kind]
    line = f"this key may use {what}; try again in {quota_exceeded.retry_after_s:.1f} s"
    if quota_exceeded.kind == "tokens":
        line += f", or with a smaller max_tokens: this request may use {quota_exceeded.tokens}"
    return RateLimited(line, "rate_limit_exceeded", quota_exceeded.retry_after_s, allowance.headers(now_s))


def refused_by_brain(refusal: Refuse) -> tuple[HttpRefusal, float | None]:
    status, code = REFUSALS[refusal.reason]
    return HttpRefusal(status, refusal.detail or refusal.reason, code), refusal.retry_after_s


def error_bytes(refusal: HttpRefusal) -> bytes:
    return compact(error_object(refusal.status, str(refusal), param=refusal.param, code=refusal.code))


def reply_error(
    exchange: Exchange, tag: tuple[bytes, bytes], refusal: HttpRefusal, after_s: float | None
) -> None:
    headers: Pairs = [JSON, tag]
    lines = b""
    if isinstance(refusal, RateLimited):
        after_s, lines = refusal.retry_after_s, refusal.lines
    if refusal.status in AGAIN:
        headers.append((b"retry-after", b"%d" % max(1, ceil(1.0 if after_s is None else after_s))))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    exchange.reply(refusal.status, error_bytes(refusal), headers, lines)


def reply_json(exchange: Exchange, tag: tuple[bytes, bytes], body: object, status: int = 200) -> None:
    exchange.reply(status, compact(body), [JSON, tag])


class ChoiceWriter:
    """One choice of an answer: the `AnswerSink` of its request.

    From an engine come tokens, which become text. A server of plain OpenAI writes text itself: with one choice its
    bytes go on as they come; of several choices the parts are taken apart and said again under one head.
    """

    over = begun = False
    choice: Json | None = None
    finish: str | None = None
    _chunks: ChoiceChunks | None = None
    _offset = _status = _parts = 0
    _kind = b""
    _spoke_s: float | None = None
    _pieces: list[bytes] | None = None
    _tail: StreamTail | None = None
    _events: EventParser | None = None
    _pass_on: Callable[[bytes], None]  # Straight to the client, once an answer in pieces has begun.

    def __init__(self, writer: ResponseWriter, validated: ValidatedRequest, id: str, index: int) -> None:
        self.id, self._index, self._answering, self._validated = id, index, writer, validated
        self._text = None if validated.asked is None else text_stream_of(validated)
        self.texts: list[str] = []
        self.choices: list[SampledToken] = []
        self.calls: list[ToolCall] = []

    def tokens(self, choices: Sequence[SampledToken]) -> bool:
        if self.over:
            return True
        stream, writer = self._stream(), self._answering
        text, seen = "", 0
        for sampled_token in choices:
            text += stream.grow(sampled_token)
            seen += 1
            if stream.met:
                break
        self._spoke_s = writer.came(seen, self._spoke_s)
        if writer.logprobs or stream.reads_calls:
            delta = TextDelta(text, tuple(choices[:seen]), calls=stream.take_calls())
            self._with_details(delta)
            text = ""
        elif not stream.met:
            if self._validated.stream:
                self._part(text)
            else:
                self.texts.append(text)
        if stream.met:
            self._end(text, stream.finish("stop"), 0)
        return stream.met

    def _stream(self) -> TextStream:
        if self._text is None:
            self._text = text_stream_of(self._answering.understand())
            assert self._text is not None
        return self._text

    def finished(self, reason: Literal["stop", "length"], cached_tokens: int) -> None:
        if not self.over:
            delta = self._stream().end(reason)
            if delta.calls:
                self._with_details(TextDelta("", calls=delta.calls))
            self._end(delta.text, delta.finish or reason, cached_tokens)

    def refused(self, refusal: Refuse) -> None:
        if not self.over:
            self.over = True
            if refusal.reason == "no_capacity":
                refusal = self._answering.with_reason(refusal)
            error, after_s = refused_by_brain(refusal)
            self._answering.fail(error, refusal.reason, after_s)

    def whole(self) -> Json:
        if self.choice is not None:
            return self.choice
        writer = self._answering
        delta = TextDelta("".join(self.texts), tuple(self.choices), self.finish, calls=tuple(self.calls))
        return whole_choice(
            writer.head, self._index, delta, self._validated.card.text, logprobs=writer.logprobs
        )

    def _part(self, text: str) -> None:
        writer = self._answering
        if self._chunks is None:
            self._chunks = ChoiceChunks(writer.head, self._index)
            writer.say(self._chunks.first(text, writer.usage_so_far()))
        elif text:
            writer.say(self._chunks.part(text, writer.usage_so_far()))

    def _with_details(self, delta: TextDelta) -> None:
        """Write or keep text with what chunks of text alone have no place for: log probabilities and tool calls."""
        writer, first = self._answering, self._chunks is None
        if not self._validated.stream:
            self.texts.append(delta.text)
            self.calls += delta.calls
            if writer.logprobs:
                self.choices += delta.choices
            return
        if not (writer.logprobs or first or delta.text or delta.calls or delta.finish):
            return
        choices = part_choices(
            writer.head,
            self._index,
            delta,
            self._validated.card.text,
            logprobs=writer.logprobs,
            offset=self._offset,
            first=first,
        )
        self._chunks = self._chunks or ChoiceChunks(writer.head, self._index)
        asked = self._validated.asked
        counts = asked is not None and asked.stream_options.continuous
        message = usage(writer.prompt_tokens, writer.output, 0) if counts else None
        for choice in choices:
            self._offset = offset_behind(choice, self._offset)
            writer.say(event(writer.head.reply([choice], chunk=True, usage=message)))

    def _end(self, text: str, finish: str, cached_tokens: int) -> None:
        writer = self._answering
        self.over, self.finish = True, finish
        if not self._validated.stream:
            self.texts.append(text)
        elif writer.logprobs:
            self._with_details(TextDelta(text, (), finish))
        else:
            if self._chunks is None:
                self._part("")
            assert self._chunks is not None
            writer.say(self._chunks.last(text, finish, writer.usage_so_far()))
        writer.done(cached_tokens)

    # A server of plain OpenAI.

    def relay_begin(self, status: int, content_type: bytes) -> None:
        if self.over:
            return
        writer = self._answering
        self._status, self._kind = status, content_type
        streams = self._validated.stream and status < 400 and b"event-stream" in content_type
        self._pieces = None if streams else []
        self._tail = StreamTail() if streams else None
        self._events = EventParser() if streams and not writer.verbatim else None
        if streams and writer.verbatim:
            self._pass_on = writer.begin(status, (b"content-type", content_type))

    def relay(self, data: bytes) -> None:
        if self.over:
            return
        writer = self._answering
        if self._pieces is not None:
            self._pieces.append(data)
            return
        tail, gap, before_s = self._tail, writer.gap, self._spoke_s
        assert tail is not None
        if gap is None or before_s is None:
            parts = tail.add(data)
            self._spoke_s = writer.came(parts, before_s)
            self._parts += parts
        else:  # `came` and `add`, written out: so many calls for each token would cost more than they do.
            self._spoke_s = now_s = writer.clock()
            gap(now_s - before_s)
            parts = data.count(PART)
            writer.output += parts
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
        writer = self._answering
        if not writer.verbatim:
            self._merged_end(counts)
            return
        self.over = True
        writer.estimated = True  # unless the server tells its usage
        if self._tail is not None:
            writer.relayed(self._status, self._kind, None, counts or self._tail.counts())
        else:
            body = b"".join(self._pieces or [])
            writer.relayed(self._status, self._kind, body, counts or counted(body))

    def relay_whole(
        self, status: int, content_type: bytes, body: bytes, counts: TokenCounts | None = None
    ) -> None:
        if self.over:
            return
        writer, asked = self._answering, self._validated.asked
        if status == 400 and isinstance(asked, ChatRequest) and asked.tool_choice == "required":
            body = _about_tool_choice(body)
        if len(writer.writers) == 1 and not self._validated.stream:
            self.over = writer.estimated = True
            writer.relayed(status, content_type, body, counts or counted(body))
        else:
            self.relay_begin(status, content_type)
            self.relay(body)
            self.relay_end(counts)

    def _merge(self, events: EventParser, data: bytes) -> None:
        writer = self._answering
        try:
            for part in events.feed(data):
                choices = part.get("choices")
                if isinstance(choices, list) and choices and isinstance(choices[0], dict):
                    self.finish = str(choices[0].get("finish_reason") or self.finish or "stop")
                    made: Json = {**choices[0], "index": self._index}
                    writer.say(event(writer.head.reply([made], chunk=True)))
        except FormatError as error:
            writer.fail(HttpRefusal(502, str(error), "upstream_failed"), "upstream")

    def _merged_end(self, counts: TokenCounts | None) -> None:
        writer = self._answering
        if counts is not None and self._pieces is None:  # Parts were counted as they came.
            writer.output += (counts.output or 0) - self._parts
        if self._pieces is not None:
            body = b"".join(self._pieces)
            try:
                result = parse_object(body)
            except FormatError as error:
                writer.fail(HttpRefusal(502, str(error), "upstream_failed"), "upstream")
                return
            choices = result.get("choices")
            if 400 <= self._status < 500:
                writer.fail(_refusal(self._status, result), "upstream")
                return
            if self._status >= 400 or not isinstance(choices, list) or not choices:
                line = f"the server answered with status {self._status} and no choice"
                writer.fail(HttpRefusal(502, line, "upstream_failed"), "upstream")
                return
            self.choice = {**choices[0], "index": self._index} if isinstance(choices[0], dict) else {}
            self.finish = str(self.choice.get("finish_reason") or "stop")
            writer.output += (counts or counted(body)).output or 0
        self.over = True
        writer.done(0 if counts is None else counts.cached)


def _about_tool_choice(body: bytes) -> bytes:
    """An engine's refusal of the JSON that a forced call asks for, as one of the field that the client set."""
    try:
        error = parse_object(body).get("error")
    except FormatError:
        return body
    if not isinstance(error, dict) or error.get("param") != "response_format":
        return body
    line = forced_call_problem(str(error.get("message")))
    return compact({"error": {**error, "message": line, "param": "tool_choice"}})


def _refusal(status: int, said: Json) -> HttpRefusal:
    error = said.get("error")
    error = error if isinstance(error, dict) else {}
    code, param = (str(error[name]) if error.get(name) is not None else None for name in ("code", "param"))
    return HttpRefusal(status, str(error.get("message") or "the request was refused"), code, param)
