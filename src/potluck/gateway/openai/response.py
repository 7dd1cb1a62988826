"""One request's answer, from its first word to its last: what voices say becomes what the client reads.

The status is only said with the first part, so that what fails before has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from potluck.api.http_errors import HttpRefusal, random_word
from potluck.api.openai_replies import LAST_EVENT, Json, ReplyHead, event, usage, usage_text, whole_reply
from potluck.gateway.interfaces import Exchange, Meter, RequestDispatcher, RequestOutcome, TokenCounts
from potluck.gateway.openai.answer_recording import AnswerRecording
from potluck.gateway.openai.keys import ApiKey
from potluck.gateway.openai.replies import (
    AS_IT_COMES,
    EVENTS,
    JSON,
    compact,
    error_bytes,
    reply_error,
)
from potluck.gateway.openai.validate import ValidatedRequest, understand

GONE = 499
"""The status that is counted where a client left before there was one."""


class ChoiceSource(Protocol):
    """A voice, as its answer sees it."""

    id: str
    over: bool
    begun: bool
    choice: Json | None
    finish: str | None
    texts: list[str]

    def whole(self) -> Json: ...


class ResponseContext(Protocol):
    """Where it came in."""

    open: int
    """Requests under way."""


class ResponseWriter:
    """From the first word of an answer to the last, whoever says it; told to the meter once.

    What most answers never change is the class's: making one is then cheap.
    """

    limits = b""
    """Lines that say what is left to the key."""
    validated: ValidatedRequest | None = None
    voices: Sequence[ChoiceSource] = ()
    over = _begun = estimated = logprobs = False
    _choices = 1
    _left = output = _cached = prompt_tokens = 0
    charged = 0
    """Tokens that were taken off the key's at first."""
    first_s: float | None = None
    _head: ReplyHead | None = None
    _created_s = 0.0
    _word = ""
    recording: AnswerRecording | None = None
    """Where it is kept for whoever asks again."""
    gap: Callable[[float], None] | None = None
    """Hears what is between two tokens, as soon as there was one."""

    def __init__(
        self,
        exchange: Exchange,
        request: str,
        key: ApiKey,
        driver: RequestDispatcher,
        meter: Meter,
        clock: Callable[[], float],
        door: ResponseContext,
    ) -> None:
        self._exchange, self._key, self._driver, self._meter = exchange, key, driver, meter
        self.clock, self._door = clock, door
        self.request = request
        self._tag = (b"x-request-id", request.encode())

    def start(
        self,
        validated: ValidatedRequest,
        word: str,
        created_s: float,
        voices: Sequence[ChoiceSource],
        prompt_tokens: int,
    ) -> None:
        """What is asked is known: from here on voices may speak. `word` names the answer."""
        self.validated, self.voices = validated, voices
        self._word, self._created_s = word, created_s
        self._left = self._choices = len(voices)
        self.prompt_tokens = prompt_tokens
        if validated.asked is not None:
            self.logprobs = validated.asked.reported is not None
        self._exchange.on_room = self._room

    @property
    def head(self) -> ReplyHead:
        """Made when it is needed: a server of plain OpenAI writes its own."""
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
        """Whether a server's bytes may go on as they come."""
        return len(self.voices) == 1

    # What a voice says.

    def came(self, tokens: int, before_s: float | None) -> float:
        """More tokens, or pieces where tokens are not seen, of a voice that spoke before; when that is."""
        now_s = self.clock()
        if self.first_s is None:
            self.first_s = now_s
        if self.gap is None:
            assert self.validated is not None
            self.gap = self._meter.gaps(self.validated.card.name)
        if before_s is not None:
            self.gap(now_s - before_s)
        self.output += tokens
        return now_s

    def say(self, data: bytes) -> None:
        """A part of a stream."""
        if not self._begun:
            self.begin(200, EVENTS)
        self._exchange.write(data)

    def begin(self, status: int, kind: tuple[bytes, bytes]) -> Callable[[bytes], None]:
        """What parts are said with from now on."""
        self._begun = True
        self._exchange.begin(status, (kind, self._tag), AS_IT_COMES + self.limits)
        return self._exchange.write

    def usage_so_far(self) -> str:
        """What a part says of the usage, if it says anything of it."""
        assert self.validated is not None
        asked = self.validated.asked
        if asked is not None and asked.stream_options.continuous_usage_stats:
            return usage_text(self.prompt_tokens, self.output, self._cached)
        return "null"

    def done(self, cached_tokens: int) -> None:
        """A voice has said all it had to."""
        # A prompt counts once, and so does what of it was cached, however many answers it gets.
        self._cached = min(self._cached + cached_tokens, self.prompt_tokens)
        self._left -= 1
        if self._left or self.over:
            return
        assert self.validated is not None
        self.over = True
        stream, finish = self.validated.stream, self.voices[0].finish or "stop"
        whole = b"" if stream else self._whole()
        # Its record first: nobody has the end of an answer that was not written down.
        self._tell(finish, 200)
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
        head, voices = self.head, self.voices
        if len(voices) == 1 and not self.logprobs and voices[0].choice is None:
            counts = usage_text(self.prompt_tokens, self.output, self._cached)
            return whole_reply(head, "".join(voices[0].texts), voices[0].finish or "stop", counts)
        choices = [voice.whole() for voice in voices]
        return compact(
            head.reply(choices, chunk=False, usage=usage(self.prompt_tokens, self.output, self._cached))
        )

    def relayed(self, status: int, kind: bytes, body: bytes | None, counts: TokenCounts) -> None:
        """A server has said all of it: `body` where nothing was passed on yet."""
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

    # What goes wrong.

    def fail(self, error: HttpRefusal, outcome: str, after_s: float | None = None) -> None:
        """It will not be answered, or not to its end."""
        if self.over:
            return
        self.over = True
        self._cancel()
        if self.recording is not None:
            self.recording.spoil()
        self._tell(outcome, error.status)
        if not self._begun:
            reply_error(self._exchange, self._tag, error, after_s)
        elif self.validated is not None and self.validated.stream:
            self._exchange.write(b"data: " + error_bytes(error) + b"\n\n" + LAST_EVENT)
            self._exchange.end()
        else:
            self._exchange.drop()

    def gone(self) -> None:
        """The client left."""
        if not self.over:
            self.over = True
            self._cancel()
            self._tell("cancelled", GONE)

    def _cancel(self) -> None:
        for voice in self.voices:
            if not voice.over:
                voice.over = True
                if voice.begun:
                    self._driver.cancel(voice.id)

    def _room(self, there: bool) -> None:
        for voice in self.voices:
            if not voice.over:
                self._driver.room(voice.id, there)

    def _tell(self, outcome: str, status: int) -> None:
        exchange, key, validated = self._exchange, self._key, self.validated
        exchange.on_gone = exchange.on_room = None
        self.voices = ()  # What holds each other is not left to the collector of garbage.
        self._door.open -= 1
        served = self.prompt_tokens if self.output or status < 400 else 0
        key.allowance.leave(self.charged, served + self.output)
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
