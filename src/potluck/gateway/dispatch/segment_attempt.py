"""One attempt over engines that run segments: all segments are sent at once, a handle for each hand-over.

    ActiveRequest ─▶ SegmentAttempt ─▶ hops ─▶ engines
          ▲               │
          └───────────────┘  tokens, hand-overs, the end, or one failure: then all other hops are given up first

Whose fault a failure is decides where the request goes next. A hop that dies, lies or stalls is to blame itself. One
that blames another (its cache did not come, or was not fetched) is heard out: within GRACE_S the other may be found
dead. If it is not, it was the way between them: the link where that leads from region to region.
"""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from potluck.api.http import error_object
from potluck.api.segments import UNSUPPORTED, SamplingBody
from potluck.core.replica.batch import LATE
from potluck.core.state.actions import Run
from potluck.core.state.events import FailureKind
from potluck.core.values.route import Segment
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.gateway.dispatch.active_request import (
    HANDOVER_S,
    ActiveRequest,
    AwaitingReply,
    DispatchContext,
    RunningAttempt,
)
from potluck.gateway.dispatch.engine_replies import (
    EngineFault,
    InvalidReply,
    LastLine,
    LineReader,
    Said,
    dead,
    ended,
    refused,
)
from potluck.gateway.http.connection_pool import EngineCall
from potluck.gateway.http.parser import Headers
from potluck.gateway.values import ChoiceRequest, Endpoint, TokenCounts

GRACE_S = 0.25
GIVEN_UP = "given up"
JSON = (b"content-type", b"application/json")
SEGMENTS = b"/segments"
LONGEST_ERROR = 1 << 13
FINGERPRINT = b"x-potluck-fingerprint"
CLIENTS_FAULT = 400
LONGEST_LINE = 64 << 20  # An answer in an engine's own words that is not streamed is one line.
OTHER_PROMPT = "other_prompt"
MOST_PROMPT = 1 << 24
DEFAULTS = Sampling()
DRAWS = tuple(field.name for field in fields(SamplingBody))


# What a segment's engine is asked: the body of POST /segments (docs/engine.md).


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """What one engine is to do: neighbouring segments of the same replica are one."""

    place: int
    """In the route, of its last segment: when it is handed on, this one and all before it are done."""
    replica: str
    start: int
    stop: int | None


@dataclass(frozen=True, slots=True)
class HandoverTicket:
    """One hand-over: an unguessable handle that fetches one cache once, where to fetch, in how many bits, and over
    how many connections."""

    handle: str
    kv: str
    codec: str
    connections: int


def stretches(segments: Sequence[Segment], prompt_tokens: int) -> list[SegmentWork]:
    """Who does what. Whoever decodes computes the last token itself, so a segment of that one alone is left out."""
    segment_works: list[SegmentWork] = []
    for place, segment in enumerate(segments):
        start = segment_works[-1].stop if segment_works and segment_works[-1].stop is not None else 0
        if segment.stop is not None and min(segment.stop, prompt_tokens - 1) <= start:
            continue
        if segment_works and segment_works[-1].replica == segment.replica:
            segment_works[-1] = SegmentWork(place, segment.replica, segment_works[-1].start, segment.stop)
        else:
            segment_works.append(SegmentWork(place, segment.replica, start, segment.stop))
    return segment_works


def segment_body(
    choice_request: ChoiceRequest,
    model: str,
    work: SegmentWork,
    run: Run,
    tokens: str,
    source_ticket: HandoverTicket | None,
    target_ticket: HandoverTicket | None,
) -> bytes:
    """`tokens` are the prompt's and those streamed since, as JSON: written once for all segments."""
    streamed = run.streamed_tokens
    priority = LATE if run.yields and work.start < run.prompt_tokens else choice_request.priority
    body: dict[str, object] = {"request": choice_request.id, "model": model, "priority": priority}
    own = ""
    if choice_request.tenant:
        body |= {"tenant": choice_request.tenant, "weight": run.weight}
    if choice_request.salt:
        body["salt"] = choice_request.salt
    if source_ticket is not None:
        at = {
            "kv": source_ticket.kv,
            "handle": source_ticket.handle,
            "connections": source_ticket.connections,
        }
        body |= {"start": work.start, "source": at}
    if target_ticket is not None:
        body |= {"stop": work.stop, "handle": target_ticket.handle}
        if target_ticket.codec != "raw":
            body["codec"] = target_ticket.codec
    elif choice_request.own:
        own = f',"own":{{"path":"{choice_request.path.decode()}","body":{choice_request.body.decode()}}}'
    else:
        body["max_tokens"] = choice_request.max_output_tokens - streamed
        body["min_tokens"] = max(0, choice_request.min_tokens - streamed)
        body["ignore_eos"] = choice_request.ignore_eos
        if choice_request.ends:
            body["end_tokens"] = choice_request.ends
        drawn = {name: getattr(choice_request.sampling, name) for name in DRAWS}
        drawn = {name: value for name, value in drawn.items() if value != getattr(DEFAULTS, name)}
        if drawn:
            body["sampling"] = drawn
        if streamed and choice_request.sampling.edits:
            body["generated"] = streamed
    text = json.dumps(body, separators=(",", ":"))
    return f'{text[:-1]},"tokens":{tokens}{own}}}'.encode()


def tokens_json(choice_request: ChoiceRequest, output: Sequence[int]) -> str:
    """The prompt's tokens and those that the client has, as a list in JSON."""
    if choice_request.prepared is None:
        return json.dumps([*choice_request.prompt, *output], separators=(",", ":"))
    return choice_request.prepared.text + "".join(f",{token}" for token in output) + "]"


# One segment at its engine: the lines of its answer, believed only as far as they add up.


class Hop(AwaitingReply):
    """The status, errors, the end. What comes behind the end, or of a hop that was given up, reaches nobody."""

    __slots__ = ("_error", "_lines", "_status", "attempt", "call", "endpoint", "over", "told", "work")

    def __init__(self, attempt: SegmentAttempt, work: SegmentWork, endpoint: Endpoint, tokens: int) -> None:
        super().__init__(tokens)
        self.attempt, self.work, self.endpoint = attempt, work, endpoint
        self.call: EngineCall | None = None
        self.over = False  # Nothing more is heard of it: it has ended, or was given up.
        self._status, self._error = 0, b""
        self._lines = LineReader(attempt.vocab)
        self.told = 0

    @property
    def replica(self) -> str:
        return self.work.replica

    @property
    def has_source(self) -> bool:
        return self.work.start > 0

    def head(self, status: int, headers: Headers) -> None:
        if self.over:
            return
        self._status = status
        known, fingerprint = self.endpoint.fingerprint, headers.get(FINGERPRINT, b"")
        if known and fingerprint and fingerprint.decode("latin-1") != known:
            self._fail(dead("has another model or other weights than it had"))

    def data(self, data: bytes) -> None:
        if self.over:
            self.attempt.too_much(self)
        elif self._status == 200:
            self.hear(self.attempt.now_s())
            self._said(self._lines.feed(data))
        elif len(self._error) < LONGEST_ERROR:
            self._error += data

    def done(self) -> None:
        self.call = None
        if self.over:
            return
        if self._status != 200:
            self._fail(refused(self._status, _code(self._error), self.has_source))
        else:
            self._fail(dead("ended its answer before its end"))

    def lost(self, why: str) -> None:
        sent = self.call is None or self.call.sent
        self.call = None
        if not self.over:
            self._fail(dead(why, rejected=not sent))

    def stalled(self, kind: FailureKind) -> None:
        self._fail(EngineFault(kind, "self", "says nothing any more"))

    def undelivered(self) -> None:
        self._fail(EngineFault("transfer", "target", f"its cache was not fetched within {HANDOVER_S:g} s"))

    @abstractmethod
    def _said(self, lines: list[Said | InvalidReply]) -> None: ...

    def _fail(self, fault: EngineFault) -> None:
        self.over = True
        self.attempt.failed(self, fault)

    def _lied(self, why: str) -> None:
        self._fail(dead(f"lied: {why}"))

    def _turn_down(self, error: bytes) -> None:
        self.over = True
        self.attempt.turned_down(self, error)


class PrefillHop(Hop):
    __slots__ = ()

    def _said(self, lines: list[Said | InvalidReply]) -> None:
        for place, line in enumerate(lines):
            if isinstance(line, InvalidReply):
                self._lied(str(line))
            elif isinstance(line, SampledToken):
                self._lied("a token from a segment that does not decode")
            elif isinstance(line, LastLine):
                self._last(line, place + 1 < len(lines))
            elif "computed" in line:
                self.computed(self.heard_s)
                self.rest()
                self.until_s = self.heard_s + HANDOVER_S
                self.attempt.segment_computed(self)
            elif "handle" not in line:
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
            self.call = None
            self._turn_down(self._error)
        else:
            super().done()

    def _said(self, lines: list[Said | InvalidReply]) -> None:
        choices: list[SampledToken] = []
        end: Said | InvalidReply | None = None
        more = False
        for line in lines:
            if end is not None:
                more = True
            elif isinstance(line, SampledToken):
                choices.append(line)
            else:
                end = line
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
        if end is not None and not self.over:
            self._ended(end, more)

    def _ended(self, end: Said | InvalidReply, more: bool) -> None:
        if isinstance(end, InvalidReply):
            self._lied(str(end))
        elif not isinstance(end, LastLine):
            self._lied("a line that says nothing")
        elif end.code == UNSUPPORTED and end.reason == "error":
            line = "response_format: the grammar became too complex, or the model has no token that fits it"
            error = error_object(CLIENTS_FAULT, line, param="response_format", code=UNSUPPORTED)
            self._turn_down(json.dumps(error).encode())
        elif end.reason not in ("stop", "length"):
            self._fail(ended(end.code, self.has_source, hands_on=False))
        elif more or not self._adds_up(end):
            self._lied("an end that does not add up")
        else:
            self.over = True
            self.attempt.finished("stop" if end.reason == "stop" else "length", end.cached_tokens)

    def _before_an_end(self, choices: list[SampledToken]) -> list[SampledToken]:
        """Those before one that must not be drawn yet."""
        for place, sampled_token in enumerate(choices[: self.attempt.least_tokens - self.told]):
            if sampled_token.token in self.attempt.ends:
                return choices[:place]
        return choices

    def _adds_up(self, last_line: LastLine) -> bool:
        attempt = self.attempt
        if (
            last_line.prompt_tokens != attempt.prompt_tokens
            or last_line.output_tokens != self.told
            or not self.told
        ):
            return False
        if last_line.reason == "length":
            return self.told == attempt.most_tokens
        return self.told > attempt.least_tokens or self.told == attempt.most_tokens


class PassthroughHop(Hop):
    """The last segment of a request that its engine answers in its own words: tokens to count, events to pass on.

        {"token": 5}  {"said": {an event as OpenAI has it}}  ...  {"ended": "stop", "prompt_tokens": ..., ...}

    An answer that is not streamed is one event; until then `{"steps": n}` says that it goes on. `{"refused": ...}` is
    what the client is told where its request is at fault. An engine whose own prompt differs from ours says its
    tokens, and the request is sent again with those.
    """

    __slots__ = ("_prompt", "_refusal", "_said_any", "_streamed")

    def __init__(self, attempt: SegmentAttempt, work: SegmentWork, endpoint: Endpoint, tokens: int) -> None:
        super().__init__(attempt, work, endpoint, tokens)
        self._lines = LineReader(attempt.vocab, LONGEST_LINE)
        self._streamed = attempt.asked.stream
        self._said_any = False
        self._prompt: tuple[int, ...] = ()
        self._refusal: dict[str, Any] | None = None

    def done(self) -> None:
        if not self.over and self._status == CLIENTS_FAULT:
            self.call = None
            self._turn_down(self._error)
        else:
            super().done()

    def _said(self, lines: list[Said | InvalidReply]) -> None:
        tokens = 0
        events: list[dict[str, Any]] = []
        end: Said | InvalidReply | None = None
        for line in lines:
            if end is not None:
                self._lied("more behind its end")
                return
            if isinstance(line, SampledToken):
                tokens += 1
            elif not isinstance(line, dict):
                end = line
            elif isinstance(event := line.get("said"), dict):
                events.append(event)
            elif isinstance(prompt := line.get("prompt"), list):
                self._prompt = _prompt(prompt, self.attempt.vocab)
            elif isinstance(refusal := line.get("refused"), dict):
                self._refusal = refusal
            elif "steps" not in line:
                end = line
        if tokens:
            self.told += tokens
            if self._streamed and not self.flows:
                self.computed(self.heard_s)
                self.flows = True
        if events:
            self._said_any = True
            self.attempt.said(events, stream=self._streamed)
        if end is not None and not self.over:
            self._ended(end)

    def _ended(self, end: Said | InvalidReply) -> None:
        if isinstance(end, InvalidReply):
            self._lied(str(end))
        elif not isinstance(end, LastLine):
            self._lied("a line that says nothing")
        elif end.reason in ("stop", "length"):
            if end.output_tokens != self.told or not self._said_any:
                self._lied("an end that does not add up")
            else:
                self.over = True
                self.attempt.own_finished(TokenCounts(end.prompt_tokens, self.told, end.cached_tokens))
        elif end.code == OTHER_PROMPT and self._prompt:
            self.over = True
            self.attempt.other_prompt(self._prompt)
        elif self._refusal is not None:
            self._turn_down(json.dumps(self._refusal).encode())
        else:
            self._fail(ended(end.code, self.has_source, hands_on=False))


def _prompt(tokens: list[object], vocab: int) -> tuple[int, ...]:
    most = vocab or 1 << 31
    if len(tokens) > MOST_PROMPT:
        return ()
    numbers = [token for token in tokens if type(token) is int and 0 <= token < most]
    return tuple(numbers) if len(numbers) == len(tokens) else ()


def _code(error: bytes) -> object:
    """The word for what went wrong, in OpenAI's shape; None where there is none."""
    try:
        body = json.loads(error)
    except (ValueError, RecursionError):
        return None
    inner = body.get("error") if isinstance(body, dict) else None
    return inner.get("code") if isinstance(inner, dict) else None


class SegmentAttempt(RunningAttempt):
    def __init__(
        self, request: ActiveRequest, run: Run, endpoints: Sequence[Endpoint], context: DispatchContext
    ) -> None:
        self._request, self.run, self.endpoints, self._context = request, run, endpoints, context
        self.now_s = context.now_s
        self.asked = asked = request.asked
        # An engine's own prompt may have another length than the Brain was told.
        self.prompt_tokens = len(asked.prompt) if asked.own else run.prompt_tokens
        self.most_tokens = asked.max_output_tokens - run.streamed_tokens
        """Output tokens that this attempt may still bring."""
        self.least_tokens = max(0, asked.min_tokens - run.streamed_tokens)
        self.ends = request.ends
        self.vocab: int = asked.vocab
        self._hops: list[Hop] = []
        """None once it is over: what holds each other would wait for the collector of garbage, prompt and all."""
        self._over = self._paused = self._streams = False
        self._suspicion: tuple[Hop, EngineFault] | None = None
        self._cached_tokens = 0
        self._began_s = 0.0

    def start(self) -> None:
        run, asked, context = self.run, self.asked, self._context
        there = dict(zip((segment.replica for segment in run.route.segments), self.endpoints, strict=True))
        self._hops = [
            self._hop(work, there[work.replica]) for work in stretches(run.route.segments, self.prompt_tokens)
        ]
        tokens = tokens_json(asked, self._request.output)
        source_ticket: HandoverTicket | None = None
        now_s = self._began_s = context.now_s()
        for place, hop in enumerate(self._hops):
            endpoint, target_ticket = hop.endpoint, None
            if place + 1 < len(self._hops):
                onto = self._hops[place + 1].endpoint
                codec = "raw" if asked.exact else context.directory.codec(endpoint, onto)
                if codec == "raw" and source_ticket is not None:
                    codec = source_ticket.codec  # what came in fewer bits cannot go on as if it were whole
                connections = context.directory.connections(endpoint, onto)
                target_ticket = HandoverTicket(secrets.token_urlsafe(32), endpoint.kv, codec, connections)
            model = asked.adapter or endpoint.served_model or endpoint.model
            body = segment_body(asked, model, hop.work, run, tokens, source_ticket, target_ticket)
            context.watch.join(hop, hop.replica, now_s)
            if place == 0:
                hop.expect(now_s)
            self._send(hop, body)
            if self._over:
                return
            source_ticket = target_ticket

    def _hop(self, work: SegmentWork, endpoint: Endpoint) -> Hop:
        upto = self.prompt_tokens if work.stop is None else work.stop
        kind = PrefillHop if work.stop is not None else PassthroughHop if self.asked.own else DecodeHop
        return kind(self, work, endpoint, max(upto - work.start, 1))

    def _send(self, hop: Hop, body: bytes) -> None:
        endpoint = hop.endpoint
        headers = [JSON]
        if endpoint.key:
            headers.append((b"authorization", b"Bearer " + endpoint.key.encode()))
        call = self._context.pool.send(endpoint.address, b"POST", SEGMENTS, body, hop, headers=headers)
        if self._over:
            call.cancel()
        else:
            hop.call = call

    def stop(self) -> None:
        self._over = True
        for hop in self._hops:
            self._let_go(hop)
        self._hops = []

    def pause(self) -> None:
        hop, self._paused = self._hops[-1], True
        if hop.call is not None and not hop.over:
            hop.call.pause()
            hop.rest(paused=True)

    def resume(self) -> None:
        hop, self._paused = self._hops[-1], False
        if hop.call is not None and not hop.over:
            hop.call.resume()
            hop.paused = False
            hop.heard_s = self.now_s()
            if self._streams or all(item.over for item in self._hops[:-1]):
                hop.expect(self.now_s())

    # What the hops tell.

    def tokens(self, choices: list[SampledToken]) -> None:
        """The next tokens, in order. What the hops before had to do is done, whatever they still say."""
        self._begin()
        self._request.tokens(choices)

    def said(self, events: list[dict[str, Any]], *, stream: bool) -> None:
        self._begin()
        self._request.said(events, stream=stream)

    def _begin(self) -> None:
        if not self._streams:
            self._streams = True
            hop = self._hops[-1]
            if not hop.owes and not self._paused:
                hop.expect(hop.heard_s)

    def own_finished(self, counts: TokenCounts) -> None:
        self._done(self._hops[-1])
        self._request.own_finished(counts._replace(cached=max(self._cached_tokens, counts.cached)))

    def other_prompt(self, prompt: tuple[int, ...]) -> None:
        self.stop()
        self._request.other_prompt(prompt)

    def turned_down(self, hop: Hop, error: bytes) -> None:
        self._done(hop)
        self._request.turned_down(CLIENTS_FAULT, JSON[1], error)

    def segment_computed(self, hop: Hop) -> None:
        if not self._streams:
            self._request.segment_computed(self, hop.work.place)

    def handed_on(self, hop: Hop, cached_tokens: int) -> None:
        """A segment's cache is where it should be; the next one's engine can begin."""
        self._cached_tokens = max(self._cached_tokens, cached_tokens)
        self._count(hop)
        self._context.watch.leave(hop)
        onto = self._hops[self._hops.index(hop) + 1]
        if not self._streams:
            if onto is not self._hops[-1] or not self._paused:
                onto.expect(self.now_s())
            self._request.segment_done(self, hop.work.place)

    def finished(self, reason: Literal["stop", "length"], cached_tokens: int) -> None:
        self._done(self._hops[-1])
        self._request.finished(reason, max(self._cached_tokens, cached_tokens))

    def _done(self, last_hop: Hop) -> None:
        """Its last hop has ended by itself: its connection can be used again."""
        self._over = True
        self._count(last_hop)
        self._context.watch.leave(last_hop)
        for hop in self._hops[:-1]:
            self._let_go(hop)
        self._hops = []

    def too_much(self, hop: Hop) -> None:
        """It goes on behind its end: its connection is not used again."""
        if hop.call is not None:
            hop.call.cancel()
            hop.call = None

    def failed(self, hop: Hop, fault: EngineFault) -> None:
        if self._over or (self._streams and hop is not self._hops[-1]):
            self._let_go(hop)
        elif fault.blame == "self":
            self._stop_and_tell(fault.kind, hop.replica, fault.why, fault.rejected)
        elif self._suspicion is None:
            self._suspicion = hop, fault
            self._let_go(hop)
            self._context.later(GRACE_S, self._judge)

    def _judge(self) -> None:
        """Nobody else was found dead: it was the way between two."""
        if self._over or self._suspicion is None:
            return
        hop, fault = self._suspicion
        place = self._hops.index(hop)
        source, target = (place - 1, place) if fault.blame == "source" else (place, place + 1)
        one, other = self._hops[source].endpoint, self._hops[target].endpoint
        if one.region != other.region:
            self._stop_and_tell("link", f"{one.region}->{other.region}", fault.why)
        else:
            blamed = one if fault.blame == "source" else other
            self._stop_and_tell(fault.kind, blamed.replica, fault.why)

    def _stop_and_tell(self, kind: FailureKind, where: str, why: str, rejected: bool = False) -> None:
        self._over = True
        for hop in self._hops:
            self._let_go(hop, why if hop.replica == where else GIVEN_UP)
        self._hops = []
        self._request.failed(kind, where, why, rejected=rejected)

    def _count(self, hop: Hop, problem: str = "") -> None:
        if hop.pulse is not None:
            took_s = self.now_s() - self._began_s
            # An engine that failed before its first token may have computed nothing.
            prompt_tokens = hop.tokens if hop.flows or not problem else 0
            self._context.meter.segment(hop.replica, took_s, prompt_tokens, hop.told, problem)

    def _let_go(self, hop: Hop, problem: str = GIVEN_UP) -> None:
        """Nothing more is wanted of it; one that has said its end is left to end by itself."""
        if hop.over and hop.pulse is None:
            return
        self._count(hop, "" if self._streams and isinstance(hop, PrefillHop) else problem)
        hop.over = True
        self._context.watch.leave(hop)
        call, hop.call = hop.call, None
        if call is not None:
            call.cancel()
