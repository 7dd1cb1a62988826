"""One request of this worker, from its arrival to its end: what its user has, and which attempt runs.

A ride is what the user sees: attempts come and go, its tokens are one stream. It ends once: answered, refused or
cancelled. Nothing of an attempt that is over reaches it, since that attempt was stopped first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from potluck.core.state.actions import Hedge, QueryAttempt, Refuse, Run
from potluck.core.state.events import (
    AttemptFailed,
    AttemptRunning,
    Event,
    FailureKind,
    FirstToken,
    RequestAdopted,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    SegmentComputed,
    SegmentDone,
)
from potluck.core.values.route import Route, Segment
from potluck.core.values.sampling import SampledToken
from potluck.core.values.types import Request
from potluck.gateway.dispatch.passthrough_events import DifferentAnswer, PassthroughEvents
from potluck.gateway.dispatch.relay_attempt import RelayAttempt, RelayedStream
from potluck.gateway.dispatch.segment_attempt import Attempt, DispatchContext
from potluck.gateway.interfaces import AnswerSink, ChoiceRequest, Endpoint, TokenCounts

if TYPE_CHECKING:
    from potluck.gateway.dispatch.active_request import ActiveRequest, HedgeAttempt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck.gateway.dispatch.active_request import ActiveRequest, RunningAttempt

OTHER_TOKENS = "makes other tokens of its messages than we did"


class HedgeAttempt:
    """What its trip or relay takes for the ride."""

    asked: ChoiceRequest
    answer: AnswerSink
    ends: frozenset[int]
    output: list[int]
    going: RunningAttempt
    endpoints: Sequence[Endpoint] = ()

    def __init__(self, active: ActiveRequest, run: Run, tell: Callable[[Event], None]) -> None:
        self._ride = active
        self._tell = tell
        self.run = run
        self.asked, self.answer, self.ends, self.output = (
            active.asked,
            active.answer,
            active.ends,
            active.output,
        )
        self.stream = RelayedStream()
        self.done = 0
        """How many of its segments were handed on."""
        self.leading = False

    def leads(self) -> None:
        """It has something to pass on."""
        if not self.leading:
            self._ride.overtaken(self)

    # What it tells until it leads is told of its own attempt; what only comes behind that is the ride's.

    def segment_done(self, place: int) -> None:
        if self.leading:
            self._ride.segment_done(place)
        else:
            self.done = place + 1
            self._tell(SegmentDone(self.asked.id, self.run.attempt, place))

    def segment_computed(self, place: int) -> None:
        self._tell(SegmentComputed(self.asked.id, self.run.attempt, place))

    def failed(self, kind: FailureKind, where: str, why: str) -> None:
        if self.leading:
            self._ride.failed(kind, where, why)
        else:
            self._ride.second_failed(self, kind, where, why)

    def tokens(self, choices: list[SampledToken]) -> None:
        self._ride.tokens(choices)

    def said(self, events: list[dict[str, Any]], *, stream: bool) -> None:
        self._ride.said(events, stream=stream)

    def own_finished(self, counts: TokenCounts) -> None:
        self._ride.own_finished(counts)

    def other_prompt(self, prompt: tuple[int, ...]) -> None:
        """The first one goes on; what is sent next has the right tokens."""
        self._ride.prompt_is(prompt)
        self.failed("timeout", "", OTHER_TOKENS)

    def finished(self, reason: Literal["stop", "length"], cached_tokens: int) -> None:
        self._ride.finished(reason, cached_tokens)

    def first_token(self) -> None:
        self._ride.first_token()

    def relayed(self, output_tokens: int) -> None:
        self._ride.relayed(output_tokens)

    def relayed_whole(self, kind: bytes, body: bytes, output_tokens: int) -> None:
        self.leads()
        self._ride.relayed_whole(kind, body, output_tokens)

    def turned_down(self, status: int, kind: bytes, body: bytes) -> None:
        self.leads()
        self._ride.turned_down(status, kind, body)

    def broken(self, kind: FailureKind, where: str, why: str) -> None:
        self._ride.broken(kind, where, why)


class RunningAttempt(Protocol):
    """An attempt under way."""

    def start(self, endpoints: Sequence[Endpoint]) -> None: ...

    def stop(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class CannotStart(NamedTuple):
    """Why an attempt cannot be begun."""

    where: str
    why: str


def attempt(
    rider: ActiveRequest | HedgeAttempt, run: Run, means: DispatchContext, stream: RelayedStream
) -> tuple[RunningAttempt, Sequence[Endpoint]] | CannotStart:
    """An attempt, and by whom it is carried out."""
    endpoints: list[Endpoint] = []
    faces = 0
    find, asked = means.directory.find, rider.asked
    for segment in run.route.segments:
        endpoint = find(segment.replica)
        if endpoint is None:
            return CannotStart(segment.replica, "cannot be reached")
        endpoints.append(endpoint)
        faces += endpoint.kind == "face"
    if faces:
        means.met(endpoints[-1])
    if faces == 0 and len(endpoints) == 1 and (stream.begun or not rider.output):
        return RelayAttempt(rider, run, means, stream), endpoints
    able = endpoints[-1].own or not asked.own
    if faces == len(endpoints) and asked.prompt and not stream.begun and able:
        return Attempt(rider, run, means), endpoints
    return CannotStart(run.route.decoder, "cannot do what the route asks of it")


log = logging.getLogger(__name__)
Reason = Literal["stop", "length"]


class ActiveRequest:
    """`tell` reaches the Brain; `over` is called once, with the last thing that was told."""

    _attempt = -1
    _going: RunningAttempt | None = None
    _second: HedgeAttempt | None = None
    """An attempt beside it, while neither has anything to pass on."""
    _sent: tuple[Run, Sequence[Endpoint]] | None = None
    """The attempt under way, and by whom it is carried out."""
    _done = 0
    """How many of its segments were handed on."""
    _first = False
    """Whether the first token of this attempt came."""
    _whole: Reason | None = None
    """Why no token can come any more, whatever becomes of the engine."""
    _cached_tokens = 0
    _failed: AttemptFailed | None = None
    _paused = False
    _ended = False

    def __init__(
        self,
        asked: ChoiceRequest,
        answer: AnswerSink,
        means: DispatchContext,
        tell: Callable[[Event], None],
        over: Callable[[ActiveRequest, Event | None], None],
    ) -> None:
        self.asked = asked
        self.output: list[int] = []
        """The tokens that the user has."""
        self.answer = answer
        self._means = means
        self._tell = tell
        self._over = over
        self.ends = frozenset(asked.ends)
        self._stream = RelayedStream()
        """What servers of plain OpenAI wrote of it."""
        self._words = PassthroughEvents(asked, answer) if asked.own else None
        """What engines said of it in their own words."""

    def resume(self, output: Sequence[int], request: Request) -> Event | None:
        """From tokens that another process passed on; what the Brain is told, unless they are all of it."""
        self._keep([SampledToken(token) for token in output])
        if self._whole is not None:
            self._ended = True
            self._over(self, None)
            self.answer.finished(self._whole, 0)
            return None
        self._attempt = 0
        return RequestAdopted(request, 0, len(self.output), None)

    # What the Brain wants.

    def run(self, run: Run) -> None:
        """Go along a route, from exactly where the user is."""
        if self._ended or run.attempt <= self._attempt:
            return
        if self._going is not None:
            self._stop()
        self._attempt, self._first = run.attempt, False
        if run.streamed_tokens != len(self.output):
            self.failed("link", "", "was sent from elsewhere than where its user is")
            return
        made = attempt(self, run, self._means, self._stream)
        if isinstance(made, CannotStart):
            self.failed("replica", made.where, made.why)
            return
        self._going, endpoints = going, _ = made
        self._sent, self._done = (run, endpoints), 0
        if self._words is not None:
            self._words.again()
        if self._means.meter is not None:
            self._means.meter.routed(self.asked, run)
        going.start(endpoints)
        if self._paused and self._going is going:
            going.pause()

    def hedge(self, hedge: Hedge) -> None:
        """Go along a second route as well, unless something was passed on; alone if the first one has failed."""
        run = Run(*hedge)
        if self._ended or run.attempt <= self._attempt:
            return
        if self._going is None:
            self.run(run)
            return
        if self._first or self.output or self._begun or self._second is not None:
            return
        second = HedgeAttempt(self, run, self._tell)
        made = attempt(second, run, self._means, second.stream)
        if isinstance(made, CannotStart):
            self._tell(AttemptFailed(self.asked.id, run.attempt, "replica", made.where, 0))
            return
        if (isinstance(made[0], RelayAttempt) or self.asked.own) and not self.asked.stream:
            # When its first token is there nobody knows, so it is not late.
            self._tell(AttemptFailed(self.asked.id, run.attempt, "timeout", "", 0))
            return
        second.going, second.endpoints = made
        self._second = second
        if self._means.meter is not None:
            self._means.meter.hedged(self.asked, run)
        second.going.start(second.endpoints)

    @property
    def _begun(self) -> bool:
        """Whether the client has something that was not told by tokens."""
        return self._stream.begun or (self._words is not None and self._words.begun)

    def refuse(self, refusal: Refuse) -> None:
        if not self._ended:
            self._end(None)
            self.answer.refused(refusal)

    def abandon(self) -> None:
        """Stop working on it; what comes next will be said."""
        self._stop()

    def inquire(self, inquire: QueryAttempt) -> None:
        """Say what became of an attempt."""
        if self._ended:
            return
        if inquire.attempt < self._attempt:
            if self._going is not None:  # Another took its place, which the Brain may not have heard.
                self._tell(AttemptFailed(self.asked.id, inquire.attempt, "timeout", "", 0))
            return
        if inquire.attempt == self._attempt and self._going is not None:
            self._tell(AttemptRunning(self.asked.id, self._attempt))
        elif self._failed is not None and self._failed.attempt == inquire.attempt:
            self._tell(self._failed)
        else:  # It was abandoned, or its order to run never came.
            self._attempt = inquire.attempt
            self.failed("timeout", "", "was stopped, or never begun")

    def whereabouts(self, named: Callable[[Endpoint], str | None], request: Request) -> Event | None:
        """For a Brain that knows nothing of it. None: it is under way where that Brain knows nobody yet."""
        self._stop_second()
        if self._attempt < 0:
            return RequestArrived(request)
        if self._going is None or self._sent is None:
            return RequestAdopted(request, self._attempt, len(self.output), None)
        run, endpoints = self._sent
        names = [named(each) for each in endpoints]
        found = [
            Segment(name, old.start, old.stop)
            for name, old in zip(names, run.route.segments, strict=True)
            if name is not None
        ]
        if len(found) < len(names):
            return None
        route = Route(tuple(found))
        return RequestAdopted(request, self._attempt, run.streamed_tokens, route, self._done, self._first)

    # What the client wants.

    def cancel(self) -> None:
        if not self._ended:
            self._end(RequestCancelled(self.asked.id))

    def room(self, there: bool) -> None:
        if there is not self._paused:
            return
        self._paused = not there
        if self._going is not None:
            if there:
                self._going.resume()
            else:
                self._going.pause()

    # What two attempts tell, until one has something to pass on.

    def leads(self) -> None:
        """The first one has."""
        self._stop_second()

    def overtaken(self, second: HedgeAttempt) -> None:
        """The second one has, or is the only one left: it is the ride's attempt from now on."""
        going, self._going, self._second = self._going, second.going, None
        self._attempt, self._first, self._stream = second.run.attempt, False, second.stream
        self._sent, self._done = (second.run, second.endpoints), second.done
        second.leading = True
        if going is not None:
            going.stop()
        if self._paused:
            second.going.pause()

    def second_failed(self, second: HedgeAttempt, kind: FailureKind, where: str, why: str) -> None:
        """The first one goes on."""
        self._second = None
        self._note(kind, where, why)
        self._tell(AttemptFailed(self.asked.id, second.run.attempt, kind, where, 0))

    def _stop_second(self) -> None:
        second, self._second = self._second, None
        if second is not None:
            second.going.stop()

    # What the attempt tells.

    def segment_done(self, place: int) -> None:
        self._done = place + 1
        self._tell(SegmentDone(self.asked.id, self._attempt, place))

    def segment_computed(self, place: int) -> None:
        self._tell(SegmentComputed(self.asked.id, self._attempt, place))

    def tokens(self, choices: list[SampledToken]) -> None:
        """More of the answer. What is beyond its end was not asked for, and ends it."""
        kept, lied = self._keep(choices)
        if kept and self.answer.tokens(kept):
            self.first_token()
            self._end(RequestFinished(self.asked.id, self._attempt, len(self.output)))
            return
        if self._ended or not kept:
            return
        self.first_token()
        if lied:
            self._finish(self._whole or "length")

    def _keep(self, choices: list[SampledToken]) -> tuple[list[SampledToken], bool]:
        """Those up to the answer's end, and whether there are more."""
        output, ends, most = self.output, self.ends, self.asked.max_output_tokens
        for place, choice in enumerate(choices):
            if self._whole is not None:
                return choices[:place], True
            output.append(choice.token)
            if choice.token in ends:
                self._whole = "stop"
            elif len(output) >= most:
                self._whole = "length"
        return choices, False

    # What an engine says in its own words. The Brain is told of no token that the user has: an attempt begins anew.

    def said(self, events: list[dict[str, Any]], *, stream: bool) -> None:
        assert self._words is not None
        if stream:  # else nobody knows when its first token was there
            self.first_token()
        try:
            self._words.say(events, stream=stream)
        except DifferentAnswer as error:
            self._stop()
            self._otherwise(str(error))

    def own_finished(self, counts: TokenCounts) -> None:
        assert self._words is not None
        self._going = None
        if not self._ended:
            most = self.asked.max_output_tokens
            self._end(RequestFinished(self.asked.id, self._attempt, min(counts.output or 1, most)))
            self._words.end(counts)

    def other_prompt(self, prompt: tuple[int, ...]) -> None:
        self.prompt_is(prompt)
        self.failed("timeout", "", OTHER_TOKENS)

    def prompt_is(self, prompt: tuple[int, ...]) -> None:
        self.asked = self.asked._replace(prompt=prompt, prompt_tokens=len(prompt))

    def _otherwise(self, why: str) -> None:
        """It cannot be gone on with, and that is nobody's fault."""
        self._note("timeout", "", why)
        if not self._ended:
            self._end(RequestCancelled(self.asked.id))
            self.answer.refused(Refuse(self.asked.id, "lost", f"the answer broke off: {why}"))

    # What a server of plain OpenAI writes.

    def relayed(self, output_tokens: int) -> None:
        """All of it was passed on."""
        self._going = None
        if not self._ended:
            self._end(RequestFinished(self.asked.id, self._attempt, output_tokens))
            self.answer.relay_end()

    def relayed_whole(self, kind: bytes, body: bytes, output_tokens: int) -> None:
        """All of it came at once. When its first token was there nobody knows, so nothing is said of that."""
        self._going = None
        if self._ended:
            return
        self._ended = True
        try:
            self.answer.relay_whole(200, kind, body)  # The client first: the Brain is in no hurry.
        finally:
            self._close(RequestFinished(self.asked.id, self._attempt, output_tokens))

    def turned_down(self, status: int, kind: bytes, body: bytes) -> None:
        """The server says that the request is at fault, which is passed on: there is nothing to learn from it."""
        self._going = None
        if self.output or (self._words is not None and self._words.begun):
            self._otherwise(f"asked to go on, the engine refused it ({status})")
        elif not self._ended:
            self._end(RequestCancelled(self.asked.id))
            self.answer.relay_whole(status, kind, body)

    def broken(self, kind: FailureKind, where: str, why: str) -> None:
        """The answer ends in the middle: nobody knows from which tokens another could go on."""
        self._note(kind, where, why)
        self._going = None
        if self._ended:
            return
        self._tell(AttemptFailed(self.asked.id, self._attempt, kind, where, len(self.output)))
        if not self._ended:
            self._end(RequestCancelled(self.asked.id))
            self.answer.refused(
                Refuse(self.asked.id, "lost", f"the server {why} in the middle of its answer")
            )

    def first_token(self) -> None:
        if not self._first:
            self._first = True
            self._tell(FirstToken(self.asked.id, self._attempt))

    def finished(self, reason: Reason, cached_tokens: int) -> None:
        """Its engine says that it is whole, and that adds up."""
        self._cached_tokens = min(cached_tokens, self.asked.prompt_tokens)
        self._going = None
        self._finish(reason)

    def _finish(self, reason: Reason) -> None:
        self._end(RequestFinished(self.asked.id, self._attempt, len(self.output)))
        self.answer.finished(reason, self._cached_tokens)

    def failed(self, kind: FailureKind, where: str, why: str) -> None:
        """The attempt is over. Nothing is missing where the last token was heard; else the Brain says what next."""
        self._going = None
        streamed = len(self.output)
        self._note(kind, where, why)
        if self._second is not None:
            attempt = self._attempt
            self.overtaken(self._second)
            self._tell(AttemptFailed(self.asked.id, attempt, kind, where, streamed))
            return
        if self._whole is not None:
            self._finish(self._whole)
            return
        self._failed = AttemptFailed(self.asked.id, self._attempt, kind, where, streamed)
        self._tell(self._failed)

    def _note(self, kind: FailureKind, where: str, why: str) -> None:
        log.info("request %s, attempt %d: %s %s (%s)", self.asked.id, self._attempt, where, why, kind)
        if self._means.meter is not None:
            self._means.meter.failed(self.asked, where, kind, why)

    def _stop(self) -> None:
        self._stop_second()
        going, self._going = self._going, None
        if going is not None:
            going.stop()

    def _end(self, event: Event | None) -> None:
        self._ended = True
        self._stop()
        self._close(event)

    def _close(self, event: Event | None) -> None:
        self._stop_second()
        self._over(self, event)
        if event is not None:
            self._tell(event)
