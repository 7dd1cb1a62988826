"""One attempt over the face: every segment is sent at once, a handle for each hand-over.

    ride ─▶ trip ─▶ legs ─▶ engines
      ▲       │
      └───────┘  tokens, hand-overs, the end, or one failure: then all other legs are given up first

Whose fault a failure is decides where the request goes next. A leg that dies, lies or stalls is to blame itself. One
that blames another (its cache did not come, or was not fetched) is heard out: within GRACE_S the other may be found
dead. If it is not, it was the way between them: the link where that leads from region to region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from potluck.core.replica.batch_values import LATE
from potluck.core.state.actions import Run
from potluck.core.state.events import FailureKind
from potluck.core.values.sampling import SampledToken
from potluck.gateway.dispatch.engine_faults import EngineFault
from potluck.gateway.dispatch.hop import DecodeHop, Hop, PrefillHop
from potluck.gateway.dispatch.passthrough_hop import PassthroughHop
from potluck.gateway.dispatch.segment_bodies import (
    HandoverTicket,
    SegmentWork,
    new_handle,
    segment_body,
    stretches,
    tokens_text,
)
from potluck.gateway.dispatch.silence import SilenceMonitor
from potluck.gateway.interfaces import Endpoint, EngineConnections, Meter, ReplicaDirectory, TokenCounts

if TYPE_CHECKING:
    from potluck.gateway.dispatch.active_request import ActiveRequest
    from potluck.gateway.dispatch.hedge import HedgeAttempt

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
