"""The last segment of a request that its engine answers in its own words: tokens to count, and events to pass on.

    {"token": 5}  {"said": {an event as OpenAI has it}}  ...  {"ended": "stop", "prompt_tokens": ..., ...}

An answer that is not streamed is one event; until then `{"steps": n}` says that it goes on. `{"refused": ...}` is
what the client is told where its request is at fault.

Where the engine makes another prompt of the client's messages than we did, KV that was computed for ours is of no use
to it: it says which tokens its own has, and the request is sent again with those.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from potluck.core.values.sampling import SampledToken
from potluck.gateway.dispatch.engine_replies import InvalidReply, LastLine, LineReader, Said, ended
from potluck.gateway.interfaces import Endpoint, TokenCounts

if TYPE_CHECKING:
    from potluck.gateway.dispatch.segment_attempt import Attempt
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from potluck.api.segments import SamplingBody
from potluck.core.replica.batch_values import LATE
from potluck.core.state.actions import Run
from potluck.core.state.events import FailureKind
from potluck.core.values.route import Segment
from potluck.core.values.sampling import Sampling
from potluck.gateway.dispatch.engine_replies import EngineFault
from potluck.gateway.dispatch.silence import SilenceMonitor
from potluck.gateway.interfaces import ChoiceRequest, EngineConnections, Meter, ReplicaDirectory

if TYPE_CHECKING:
    from potluck.gateway.dispatch.active_request import ActiveRequest, HedgeAttempt
from abc import abstractmethod
from typing import TYPE_CHECKING

from potluck.api.http import error_object
from potluck.api.segments import UNSUPPORTED
from potluck.gateway.dispatch.engine_replies import dead, refused
from potluck.gateway.dispatch.silence import HANDOVER_S, AwaitingReply
from potluck.gateway.interfaces import Call, Headers

if TYPE_CHECKING:
    from potluck.gateway.dispatch.segment_attempt import Attempt

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


GRACE_S = 0.25
BACKSTOP_S = 300.0
"""Silence after which a connection is given up whatever the watch thinks; longer than all its limits."""
GIVEN_UP = "given up"
JSON = (b"content-type", b"application/json")
SEGMENTS = b"/segments"


@dataclass(frozen=True, slots=True)
class DispatchContext:
    """What attempts are carried out with."""

    outgoing: EngineConnections
    directory: ReplicaDirectory
    watch: SilenceMonitor
    met: Callable[[Endpoint], None]
    """Hears where a request is sent to decode."""
    now_s: Callable[[], float]
    later: Callable[[float, Callable[[], None]], object]
    meter: Meter | None = None


class Attempt:
    """From its `Run` to its end, its failure, or until it is given up."""

    def __init__(self, active: ActiveRequest | HedgeAttempt, run: Run, means: DispatchContext) -> None:
        self._ride = active
        self._run = run
        self._means = means
        self.now_s = means.now_s
        asked = active.asked
        # An engine's own prompt may have another length than the Brain was told.
        self.prompt_tokens = len(asked.prompt) if asked.own else run.prompt_tokens
        self.most_tokens = asked.max_output_tokens - run.streamed_tokens
        """Output tokens that this attempt may still bring."""
        self.least_tokens = max(0, asked.min_tokens - run.streamed_tokens)
        self.ends = active.ends
        self.vocab: int = asked.vocab
        self._legs: list[Hop] = []
        """None once it is over: what holds each other would wait for the collector of garbage, prompt and all."""
        self._over = False
        self._suspicion: tuple[Hop, EngineFault] | None = None
        self._cached_tokens = 0
        self._streams = False
        self._began_s = 0.0
        self._paused = False

    def start(self, endpoints: Sequence[Endpoint]) -> None:
        """Send all segments; `endpoints` are those of the route's segments."""
        run, active, means = self._run, self._ride, self._means
        there = dict(zip((each.replica for each in run.route.segments), endpoints, strict=True))
        for each in stretches(run.route.segments, self.prompt_tokens):
            self._legs.append(self._leg(each, there[each.replica]))
        tokens_said = tokens_text(active.asked.prompt, active.output)
        source: HandoverTicket | None = None
        now_s = self._began_s = means.now_s()
        for place, hop in enumerate(self._legs):
            endpoint, target = hop.endpoint, None
            if place + 1 < len(self._legs):
                onto = self._legs[place + 1].endpoint
                codec = "raw" if active.asked.exact else means.directory.codec(endpoint, onto)
                if codec == "raw" and source is not None:
                    codec = source.codec  # what came in fewer bits cannot go on as if it were whole
                target = HandoverTicket(new_handle(), endpoint.kv, codec)
            model = active.asked.adapter or endpoint.served_model or endpoint.model
            priority = LATE if run.yields and hop.stretch.start < run.prompt_tokens else active.asked.priority
            body = segment_body(
                active.asked,
                model,
                hop.stretch,
                run.streamed_tokens,
                run.weight,
                priority,
                tokens_said,
                source,
                target,
            )
            means.watch.join(hop, hop.replica, now_s)
            if place == 0:
                hop.expect(now_s)
            self._send(hop, body)
            if self._over:
                return
            source = target

    def _leg(self, stretch: SegmentWork, endpoint: Endpoint) -> Hop:
        asked = self._ride.asked
        upto = self.prompt_tokens if stretch.stop is None else stretch.stop
        tokens = max(upto - stretch.start, 1)
        if stretch.stop is not None:
            return PrefillHop(self, stretch, endpoint, tokens)
        if asked.own:
            return PassthroughHop(self, stretch, endpoint, tokens, stream=asked.stream)
        return DecodeHop(self, stretch, endpoint, tokens)

    def _send(self, hop: Hop, body: bytes) -> None:
        endpoint = hop.endpoint
        headers = [JSON]
        if endpoint.key:
            headers.append((b"authorization", b"Bearer " + endpoint.key.encode()))
        call = self._means.outgoing.send(
            endpoint.address, b"POST", SEGMENTS, body, hop, headers=headers, silence_s=BACKSTOP_S
        )
        if self._over:
            call.cancel()
        else:
            hop.call = call

    def stop(self) -> None:
        """Nobody wants it any more: all engines are told, and nothing of it is heard again."""
        self._over = True
        for hop in self._legs:
            self._let_go(hop)
        self._legs = []

    def pause(self) -> None:
        """Its reader is slow: what comes is not read for now, and nobody is blamed for that."""
        hop, self._paused = self._legs[-1], True
        if hop.call is not None and not hop.over:
            hop.call.pause()
            hop.rest()

    def resume(self) -> None:
        hop, self._paused = self._legs[-1], False
        if hop.call is not None and not hop.over:
            hop.call.resume()
            if self._streams or all(each.over for each in self._legs[:-1]):
                hop.expect(self.now_s())

    # What the legs tell.

    def tokens(self, choices: list[SampledToken]) -> None:
        """The next tokens, in order. What the legs before had to do is done, whatever they still say."""
        self._begin()
        self._ride.tokens(choices)

    def _begin(self) -> None:
        if not self._streams:
            self._streams = True
            self._ride.leads()
            hop = self._legs[-1]
            if not hop.owes and not self._paused:
                hop.expect(hop.heard_s)

    def said(self, events: list[dict[str, Any]], *, stream: bool) -> None:
        """The next events of an engine that answers in its own words."""
        self._begin()
        self._ride.said(events, stream=stream)

    def own_finished(self, counts: TokenCounts) -> None:
        self._done(self._legs[-1])
        self._ride.own_finished(counts._replace(cached=max(self._cached_tokens, counts.cached)))

    def other_prompt(self, hop: Hop, prompt: tuple[int, ...]) -> None:
        """The engine makes other tokens of the client's messages than we did."""
        for each in self._legs:
            self._let_go(each)
        self._over, self._legs = True, []
        self._ride.other_prompt(prompt)

    def turned_down(self, hop: Hop, status: int, error: bytes) -> None:
        """The engine says that the request itself is at fault."""
        self._done(hop)
        self._ride.turned_down(status, JSON[1], error)

    def segment_computed(self, hop: Hop) -> None:
        """A segment's cache is ready to go."""
        if not self._streams:
            self._ride.segment_computed(hop.stretch.place)

    def handed_on(self, hop: Hop, cached_tokens: int) -> None:
        """A segment's cache is where it should be; the next one's engine can begin."""
        self._cached_tokens = max(self._cached_tokens, cached_tokens)
        self._count(hop)
        self._means.watch.leave(hop)
        onto = self._legs[self._legs.index(hop) + 1]
        if not self._streams:
            if onto is not self._legs[-1] or not self._paused:
                onto.expect(self.now_s())
            self._ride.segment_done(hop.stretch.place)

    def finished(self, reason: Literal["stop", "length"], cached_tokens: int) -> None:
        self._done(self._legs[-1])
        self._ride.finished(reason, max(self._cached_tokens, cached_tokens))

    def _done(self, last: Hop) -> None:
        """Its last leg has ended by itself: its connection can be used again."""
        self._over = True
        self._count(last)
        self._means.watch.leave(last)
        for hop in self._legs[:-1]:
            self._let_go(hop)
        self._legs = []

    def too_much(self, hop: Hop) -> None:
        """It goes on behind its end: its connection is not used again."""
        if hop.call is not None:
            hop.call.cancel()
            hop.call = None

    def failed(self, hop: Hop, verdict: EngineFault) -> None:
        """One leg failed, or says that another did."""
        if self._over or (self._streams and hop is not self._legs[-1]):
            self._let_go(hop)
            return
        if verdict.blame == "self":
            self._fail(hop, verdict)
        elif self._suspicion is None:
            self._suspicion = hop, verdict
            self._let_go(hop)
            self._means.later(GRACE_S, self._judge)

    def _judge(self) -> None:
        """Nobody else was found dead: it was the way between two."""
        if self._over or self._suspicion is None:
            return
        hop, verdict = self._suspicion
        place = self._legs.index(hop)
        source, target = (place - 1, place) if verdict.blame == "source" else (place, place + 1)
        one, other = self._legs[source].endpoint, self._legs[target].endpoint
        if one.region != other.region:
            self._stop_and_tell("link", f"{one.region}->{other.region}", verdict.why)
        else:
            blamed = one if verdict.blame == "source" else other
            self._stop_and_tell(verdict.kind, blamed.replica, verdict.why)

    def _fail(self, hop: Hop, verdict: EngineFault) -> None:
        self._stop_and_tell(verdict.kind, hop.replica, verdict.why)

    def _stop_and_tell(self, kind: FailureKind, where: str, why: str) -> None:
        self._over = True
        for hop in self._legs:
            self._let_go(hop, why if hop.replica == where else GIVEN_UP)
        self._legs = []
        self._ride.failed(kind, where, why)

    def _count(self, hop: Hop, problem: str = "") -> None:
        """A leg's part in the attempt is over."""
        meter = self._means.meter
        if meter is not None and hop.pulse is not None:
            tokens = hop.tokens + hop.told
            meter.segment(self._ride.asked, hop.replica, self._began_s, self.now_s(), tokens, problem)

    def _let_go(self, hop: Hop, problem: str = GIVEN_UP) -> None:
        """Nothing more is wanted of it; one that has said its end is left to end by itself."""
        if hop.over and hop.pulse is None:
            return
        self._count(hop, "" if self._streams and isinstance(hop, PrefillHop) else problem)
        hop.over = True
        self._means.watch.leave(hop)
        call, hop.call = hop.call, None
        if call is not None:
            call.cancel()


DEFAULTS = Sampling()
DRAWS = tuple(each.name for each in fields(SamplingBody))


def new_handle() -> str:
    """A word that nobody can guess: whoever has it may fetch one cache, once."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """What one engine is to do: neighbouring segments of the same replica are one."""

    place: int
    """In the route, of its last segment: when it is handed on, this one and all before it are done."""
    replica: str
    start: int
    stop: int | None


def stretches(segments: Sequence[Segment], prompt_tokens: int) -> list[SegmentWork]:
    """Who does what. Whoever decodes computes the last token itself, so a segment of that one alone is left out."""
    found: list[SegmentWork] = []
    for place, segment in enumerate(segments):
        start = found[-1].stop if found and found[-1].stop is not None else 0
        if segment.stop is not None and min(segment.stop, prompt_tokens - 1) <= start:
            continue
        if found and found[-1].replica == segment.replica:
            found[-1] = SegmentWork(place, segment.replica, found[-1].start, segment.stop)
        else:
            found.append(SegmentWork(place, segment.replica, start, segment.stop))
    return found


@dataclass(frozen=True, slots=True)
class HandoverTicket:
    """One hand-over: its word, where to fetch, and in how many bits."""

    handle: str
    kv: str
    codec: str


def tokens_text(prompt: Sequence[int], output: Sequence[int]) -> str:
    """The tokens of a prompt and what was streamed behind it: written once for all segments."""
    return json.dumps([*prompt, *output], separators=(",", ":"))


def segment_body(
    asked: ChoiceRequest,
    model: str,
    stretch: SegmentWork,
    streamed: int,
    weight: float,
    priority: int,
    tokens: str,
    source: HandoverTicket | None,
    target: HandoverTicket | None,
) -> bytes:
    said: dict[str, object] = {"request": asked.id, "model": model, "priority": priority}
    if asked.tenant:
        said["tenant"] = asked.tenant
        said["weight"] = weight
    if asked.salt:
        said["salt"] = asked.salt
    if source is not None:
        said["start"] = stretch.start
        said["source"] = {"kv": source.kv, "handle": source.handle}
    if target is not None:
        said["stop"] = stretch.stop
        said["handle"] = target.handle
        if target.codec != "raw":
            said["codec"] = target.codec
    else:
        if asked.own:
            own = f'{{"path":"{asked.path.decode()}","body":{asked.body.decode()}}}'
            return _spliced(said, tokens, own)
        said["max_tokens"] = asked.max_output_tokens - streamed
        said["min_tokens"] = max(0, asked.min_tokens - streamed)
        said["ignore_eos"] = asked.ignore_eos
        if asked.ends:
            said["end_tokens"] = asked.ends
        drawn = {name: getattr(asked.sampling, name) for name in DRAWS}
        drawn = {name: value for name, value in drawn.items() if value != getattr(DEFAULTS, name)}
        if drawn:
            said["sampling"] = drawn
        if streamed and asked.sampling.edits:
            said["generated"] = streamed
    return _spliced(said, tokens)


def _spliced(said: dict[str, object], tokens: str, own: str = "") -> bytes:
    """With what is JSON already."""
    text = json.dumps(said, separators=(",", ":"))
    more = f',"own":{own}' if own else ""
    return f'{text[:-1]},"tokens":{tokens}{more}}}'.encode()


LONGEST_LINE = 64 << 20
"""An answer that is not streamed is one line."""
OTHER_PROMPT = "other_prompt"
MOST_PROMPT = 1 << 24


class PassthroughHop(Hop):
    __slots__ = ("_prompt", "_refusal", "_said_any", "_streamed")

    def __init__(
        self, attempt: Attempt, stretch: SegmentWork, endpoint: Endpoint, tokens: int, *, stream: bool
    ) -> None:
        super().__init__(attempt, stretch, endpoint, tokens)
        self._lines = LineReader(attempt.vocab, LONGEST_LINE)
        self._streamed = stream
        self._said_any = False
        self._prompt: tuple[int, ...] = ()
        self._refusal: dict[str, Any] | None = None

    def done(self) -> None:
        if not self.over and self._status == CLIENTS_FAULT:
            self.call, self.over = None, True
            self.attempt.turned_down(self, self._status, self._error)
        else:
            super().done()

    def _said(self, found: list[Said | InvalidReply]) -> None:
        tokens = 0
        events: list[dict[str, Any]] = []
        end: Said | InvalidReply | None = None
        for said in found:
            if end is not None:
                self._lied("more behind its end")
                return
            if isinstance(said, SampledToken):
                tokens += 1
            elif isinstance(said, dict) and isinstance(event := said.get("said"), dict):
                events.append(event)
            elif isinstance(said, dict) and isinstance(prompt := said.get("prompt"), list):
                self._prompt = _prompt(prompt, self.attempt.vocab)
            elif isinstance(said, dict) and isinstance(refusal := said.get("refused"), dict):
                self._refusal = refusal
            elif isinstance(said, dict) and "steps" in said:
                continue  # It goes on.
            else:
                end = said
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

    def _ended(self, end: Any) -> None:
        if isinstance(end, InvalidReply):
            self._lied(str(end))
        elif not isinstance(end, LastLine):
            self._lied("a line that says nothing")
        elif end.code == OTHER_PROMPT and self._prompt and end.reason not in ("stop", "length"):
            self.over = True
            self.attempt.other_prompt(self, self._prompt)
        elif self._refusal is not None and end.reason not in ("stop", "length"):
            self.over = True
            self.attempt.turned_down(self, CLIENTS_FAULT, json.dumps(self._refusal).encode())
        elif end.reason not in ("stop", "length"):
            self._fail(ended(end.code, self.has_source, hands_on=False))
        elif end.output_tokens != self.told or not self._said_any:
            self._lied("an end that does not add up")
        else:
            self.over = True
            self.attempt.own_finished(TokenCounts(end.prompt_tokens, self.told, end.cached_tokens))


def _prompt(tokens: list[object], vocab: int) -> tuple[int, ...]:
    """An engine's own prompt; nothing where it is none."""
    most = vocab or 1 << 31
    if len(tokens) > MOST_PROMPT:
        return ()
    found = [token for token in tokens if type(token) is int and 0 <= token < most]
    return tuple(found) if len(found) == len(tokens) else ()
