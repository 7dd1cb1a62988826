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

from potluck.core.brain.actions import Run
from potluck.core.brain.events import FailureKind
from potluck.core.replica.batch_values import LATE
from potluck.core.values.sampling import Choice
from potluck.gateway.drive.bodies import (
    Handing,
    Stretch,
    new_handle,
    segment_body,
    stretches,
    tokens_text,
)
from potluck.gateway.drive.leg import DecodingLeg, HandingLeg, Leg
from potluck.gateway.drive.own import OwnLeg
from potluck.gateway.drive.patience import Watch
from potluck.gateway.drive.verdicts import Verdict
from potluck.gateway.parts import Counts, Directory, Endpoint, Meter, Outgoing

if TYPE_CHECKING:
    from potluck.gateway.drive.ride import Ride
    from potluck.gateway.drive.second import Second

GRACE_S = 0.25
BACKSTOP_S = 300.0
"""Silence after which a connection is given up whatever the watch thinks; longer than all its limits."""
GIVEN_UP = "given up"
JSON = (b"content-type", b"application/json")
SEGMENTS = b"/segments"


@dataclass(frozen=True, slots=True)
class Means:
    """What attempts are carried out with."""

    outgoing: Outgoing
    directory: Directory
    watch: Watch
    met: Callable[[Endpoint], None]
    """Hears where a request is sent to decode."""
    now_s: Callable[[], float]
    later: Callable[[float, Callable[[], None]], object]
    meter: Meter | None = None


class Trip:
    """From its `Run` to its end, its failure, or until it is given up."""

    def __init__(self, ride: Ride | Second, run: Run, means: Means) -> None:
        self._ride = ride
        self._run = run
        self._means = means
        self.now_s = means.now_s
        asked = ride.asked
        # An engine's own prompt may have another length than the Brain was told.
        self.prompt_tokens = len(asked.prompt) if asked.own else run.prompt_tokens
        self.most_tokens = asked.max_output_tokens - run.streamed_tokens
        """Output tokens that this attempt may still bring."""
        self.least_tokens = max(0, asked.min_tokens - run.streamed_tokens)
        self.ends = ride.ends
        self.vocab: int = asked.vocab
        self._legs: list[Leg] = []
        """None once it is over: what holds each other would wait for the collector of garbage, prompt and all."""
        self._over = False
        self._suspicion: tuple[Leg, Verdict] | None = None
        self._cached_tokens = 0
        self._streams = False
        self._began_s = 0.0
        self._paused = False

    def start(self, endpoints: Sequence[Endpoint]) -> None:
        """Send all segments; `endpoints` are those of the route's segments."""
        run, ride, means = self._run, self._ride, self._means
        there = dict(zip((each.replica for each in run.route.segments), endpoints, strict=True))
        for each in stretches(run.route.segments, self.prompt_tokens):
            self._legs.append(self._leg(each, there[each.replica]))
        tokens_said = tokens_text(ride.asked.prompt, ride.output)
        source: Handing | None = None
        now_s = self._began_s = means.now_s()
        for place, leg in enumerate(self._legs):
            endpoint, target = leg.endpoint, None
            if place + 1 < len(self._legs):
                onto = self._legs[place + 1].endpoint
                codec = "raw" if ride.asked.exact else means.directory.codec(endpoint, onto)
                if codec == "raw" and source is not None:
                    codec = source.codec  # what came in fewer bits cannot go on as if it were whole
                target = Handing(new_handle(), endpoint.kv, codec)
            model = ride.asked.adapter or endpoint.served_model or endpoint.model
            priority = LATE if run.yields and leg.stretch.start < run.prompt_tokens else ride.asked.priority
            body = segment_body(
                ride.asked,
                model,
                leg.stretch,
                run.streamed_tokens,
                run.weight,
                priority,
                tokens_said,
                source,
                target,
            )
            means.watch.join(leg, leg.replica, now_s)
            if place == 0:
                leg.expect(now_s)
            self._send(leg, body)
            if self._over:
                return
            source = target

    def _leg(self, stretch: Stretch, endpoint: Endpoint) -> Leg:
        asked = self._ride.asked
        upto = self.prompt_tokens if stretch.stop is None else stretch.stop
        tokens = max(upto - stretch.start, 1)
        if stretch.stop is not None:
            return HandingLeg(self, stretch, endpoint, tokens)
        if asked.own:
            return OwnLeg(self, stretch, endpoint, tokens, stream=asked.stream)
        return DecodingLeg(self, stretch, endpoint, tokens)

    def _send(self, leg: Leg, body: bytes) -> None:
        endpoint = leg.endpoint
        headers = [JSON]
        if endpoint.key:
            headers.append((b"authorization", b"Bearer " + endpoint.key.encode()))
        call = self._means.outgoing.send(
            endpoint.address, b"POST", SEGMENTS, body, leg, headers=headers, silence_s=BACKSTOP_S
        )
        if self._over:
            call.cancel()
        else:
            leg.call = call

    def stop(self) -> None:
        """Nobody wants it any more: all engines are told, and nothing of it is heard again."""
        self._over = True
        for leg in self._legs:
            self._let_go(leg)
        self._legs = []

    def pause(self) -> None:
        """Its reader is slow: what comes is not read for now, and nobody is blamed for that."""
        leg, self._paused = self._legs[-1], True
        if leg.call is not None and not leg.over:
            leg.call.pause()
            leg.rest()

    def resume(self) -> None:
        leg, self._paused = self._legs[-1], False
        if leg.call is not None and not leg.over:
            leg.call.resume()
            if self._streams or all(each.over for each in self._legs[:-1]):
                leg.expect(self.now_s())

    # What the legs tell.

    def tokens(self, choices: list[Choice]) -> None:
        """The next tokens, in order. What the legs before had to do is done, whatever they still say."""
        self._begin()
        self._ride.tokens(choices)

    def _begin(self) -> None:
        if not self._streams:
            self._streams = True
            self._ride.leads()
            leg = self._legs[-1]
            if not leg.owes and not self._paused:
                leg.expect(leg.heard_s)

    def said(self, events: list[dict[str, Any]], *, stream: bool) -> None:
        """The next events of an engine that answers in its own words."""
        self._begin()
        self._ride.said(events, stream=stream)

    def own_finished(self, counts: Counts) -> None:
        self._done(self._legs[-1])
        self._ride.own_finished(counts._replace(cached=max(self._cached_tokens, counts.cached)))

    def other_prompt(self, leg: Leg, prompt: tuple[int, ...]) -> None:
        """The engine makes other tokens of the client's messages than we did."""
        for each in self._legs:
            self._let_go(each)
        self._over, self._legs = True, []
        self._ride.other_prompt(prompt)

    def turned_down(self, leg: Leg, status: int, error: bytes) -> None:
        """The engine says that the request itself is at fault."""
        self._done(leg)
        self._ride.turned_down(status, JSON[1], error)

    def segment_computed(self, leg: Leg) -> None:
        """A segment's cache is ready to go."""
        if not self._streams:
            self._ride.segment_computed(leg.stretch.place)

    def handed_on(self, leg: Leg, cached_tokens: int) -> None:
        """A segment's cache is where it should be; the next one's engine can begin."""
        self._cached_tokens = max(self._cached_tokens, cached_tokens)
        self._count(leg)
        self._means.watch.leave(leg)
        onto = self._legs[self._legs.index(leg) + 1]
        if not self._streams:
            if onto is not self._legs[-1] or not self._paused:
                onto.expect(self.now_s())
            self._ride.segment_done(leg.stretch.place)

    def finished(self, reason: Literal["stop", "length"], cached_tokens: int) -> None:
        self._done(self._legs[-1])
        self._ride.finished(reason, max(self._cached_tokens, cached_tokens))

    def _done(self, last: Leg) -> None:
        """Its last leg has ended by itself: its connection can be used again."""
        self._over = True
        self._count(last)
        self._means.watch.leave(last)
        for leg in self._legs[:-1]:
            self._let_go(leg)
        self._legs = []

    def too_much(self, leg: Leg) -> None:
        """It goes on behind its end: its connection is not used again."""
        if leg.call is not None:
            leg.call.cancel()
            leg.call = None

    def failed(self, leg: Leg, verdict: Verdict) -> None:
        """One leg failed, or says that another did."""
        if self._over or (self._streams and leg is not self._legs[-1]):
            self._let_go(leg)
            return
        if verdict.blame == "self":
            self._fail(leg, verdict)
        elif self._suspicion is None:
            self._suspicion = leg, verdict
            self._let_go(leg)
            self._means.later(GRACE_S, self._judge)

    def _judge(self) -> None:
        """Nobody else was found dead: it was the way between two."""
        if self._over or self._suspicion is None:
            return
        leg, verdict = self._suspicion
        place = self._legs.index(leg)
        source, target = (place - 1, place) if verdict.blame == "source" else (place, place + 1)
        one, other = self._legs[source].endpoint, self._legs[target].endpoint
        if one.region != other.region:
            self._stop_and_tell("link", f"{one.region}->{other.region}", verdict.why)
        else:
            blamed = one if verdict.blame == "source" else other
            self._stop_and_tell(verdict.kind, blamed.replica, verdict.why)

    def _fail(self, leg: Leg, verdict: Verdict) -> None:
        self._stop_and_tell(verdict.kind, leg.replica, verdict.why)

    def _stop_and_tell(self, kind: FailureKind, where: str, why: str) -> None:
        self._over = True
        for leg in self._legs:
            self._let_go(leg, why if leg.replica == where else GIVEN_UP)
        self._legs = []
        self._ride.failed(kind, where, why)

    def _count(self, leg: Leg, problem: str = "") -> None:
        """A leg's part in the attempt is over."""
        meter = self._means.meter
        if meter is not None and leg.pulse is not None:
            tokens = leg.tokens + leg.told
            meter.segment(self._ride.asked, leg.replica, self._began_s, self.now_s(), tokens, problem)

    def _let_go(self, leg: Leg, problem: str = GIVEN_UP) -> None:
        """Nothing more is wanted of it; one that has said its end is left to end by itself."""
        if leg.over and leg.pulse is None:
            return
        self._count(leg, "" if self._streams and isinstance(leg, HandingLeg) else problem)
        leg.over = True
        self._means.watch.leave(leg)
        call, leg.call = leg.call, None
        if call is not None:
            call.cancel()
