"""One request of this worker, from its arrival to its end: what its user has, and which attempt runs.

Attempts come and go; the tokens that the user sees are one stream. A request ends once: answered, refused or
cancelled. Nothing of an attempt that is over reaches it, since that attempt was stopped first.

`SilenceMonitor` looks several times a second at every engine that owes something, and bears its silence so long:

    it is not in the directory any more, and says nothing       GONE_S
    whoever keeps the fleet says that it is gone or silent      HEARD_S, or a few of its usual gaps
    answers flow, and then none of them does                    FACTOR times its usual gap, LEAST_S to MOST_S
    only prompts are under way, and nothing is heard            FACTOR times what such prompts take, LEAST_FIRST_S to
                                                                MOST_FIRST_S
    one answer stands still while others go on                  ALONE times as long
    a prompt is computed, and its cache does not arrive         HANDOVER_S

An engine that owes nothing is never late: its answer is paused, or it waits for a cache that another one computes.
When this process itself was held up, the time is not counted: what engines said meanwhile has not been read yet.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple

from potluck.core.brain.recovery import GRAMMAR_SUSPECTED, grammar_suspected
from potluck.core.state import events
from potluck.core.state.actions import QueryAttempt, Refuse, Run
from potluck.core.state.events import Event, FailureKind
from potluck.core.values.route import Route, Segment
from potluck.core.values.sampling import SampledToken
from potluck.core.values.types import Request
from potluck.gateway.admin.counters import Counters
from potluck.gateway.dispatch.passthrough_events import DifferentAnswer, PassthroughEvents
from potluck.gateway.http.connection_pool import ConnectionPool
from potluck.gateway.registry.registry import ReplicaDirectory
from potluck.gateway.values import AnswerSink, ChoiceRequest, Endpoint, TokenCounts

SWEEP_S = 0.25
FACTOR = 25.0
LEAST_S, MOST_S = 2.0, 30.0
LEAST_FIRST_S, MOST_FIRST_S = 10.0, 120.0
ALONE = 5.0  # One that has no blocks left may set an answer aside for a while.
GONE_S = 1.0
HEARD_S, GAPS = 0.5, 3.0
HANDOVER_S = 60.0
BACKSTOP_S = 600.0  # After which silence counts even where nothing is owed: a whole answer, a wait for KV.
START_GAP_S, START_TOKEN_S = 0.2, 2e-3
RECENT = 16  # What was observed lately counts as much as so many observations.


class AwaitingReply(ABC):
    pulse: EnginePulse | None = None
    owes = False
    flows = False
    paused = False
    since_s = 0.0  # Since when it owes, or last was read again.
    heard_s = 0.0
    until_s = inf  # When something that it need not do by itself must have happened: a cache was fetched.

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    @abstractmethod
    def stalled(self, kind: FailureKind) -> None:
        """Nothing was heard for too long: its engine is dead (`replica`), or only this one is (`timeout`)."""

    @abstractmethod
    def undelivered(self) -> None: ...

    def expect(self, now_s: float) -> None:
        self.owes = True
        self.since_s = self.heard_s = now_s

    def rest(self, paused: bool = False) -> None:
        self.owes, self.paused = False, paused

    def hear(self, now_s: float) -> None:
        pulse = self.pulse
        if pulse is not None:
            pulse.heard_s = now_s
            if self.flows and self.owes:
                pulse.gap_s += (now_s - self.heard_s - pulse.gap_s) / RECENT
        self.heard_s = now_s

    def computed(self, now_s: float) -> None:
        pulse = self.pulse
        if pulse is not None and self.owes:
            took_s = (now_s - self.since_s) / max(self.tokens, 1)
            pulse.token_s += (took_s - pulse.token_s) / RECENT


class EnginePulse:
    __slots__ = ("debtors", "gap_s", "heard_s", "replica", "token_s")

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.debtors: dict[AwaitingReply, None] = {}
        self.heard_s = -inf
        self.gap_s = START_GAP_S
        self.token_s = START_TOKEN_S

    @property
    def gap_limit_s(self) -> float:
        return min(MOST_S, max(LEAST_S, FACTOR * self.gap_s))

    def first_limit_s(self, tokens: int) -> float:
        return min(MOST_FIRST_S, max(LEAST_FIRST_S, FACTOR * self.token_s * tokens))


class SilenceMonitor:
    def __init__(
        self,
        directory: ReplicaDirectory,
        now_s: Callable[[], float],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._directory = directory
        self._now_s = now_s
        self._later = later
        self._pulses: dict[str, EnginePulse] = {}
        self._open = 0
        self._armed = False
        self._swept_s = 0.0

    def __len__(self) -> int:
        return self._open

    def join(self, awaiting_reply: AwaitingReply, replica: str, now_s: float) -> None:
        pulse = self._pulses.get(replica)
        if pulse is None:
            pulse = self._pulses[replica] = EnginePulse(replica)
        awaiting_reply.pulse = pulse
        awaiting_reply.since_s = awaiting_reply.heard_s = now_s
        pulse.debtors[awaiting_reply] = None
        self._open += 1
        if not self._armed:
            self._armed = True
            self._swept_s = now_s
            self._later(SWEEP_S, self.sweep)

    def leave(self, awaiting_reply: AwaitingReply) -> None:
        pulse, awaiting_reply.pulse = awaiting_reply.pulse, None
        if pulse is not None:
            del pulse.debtors[awaiting_reply]
            self._open -= 1

    def streamed_s(self, replica: str) -> float:
        pulse = self._pulses.get(replica)
        return -inf if pulse is None else pulse.heard_s

    def gone(self, replica: str) -> None:
        """Whoever keeps the fleet says that it is gone, or silent. Where its answers flow, that is not believed."""
        pulse = self._pulses.get(replica)
        if pulse is not None and self._now_s() - pulse.heard_s > max(HEARD_S, GAPS * pulse.gap_s):
            _stall(list(pulse.debtors), "replica")

    def sweep(self) -> None:
        now_s = self._now_s()
        late_s = now_s - self._swept_s - SWEEP_S
        self._swept_s = now_s
        if late_s > SWEEP_S:
            self._excuse(late_s)
        for replica, pulse in list(self._pulses.items()):
            if pulse.debtors:
                self._look(now_s, pulse)
            elif self._directory.find(replica) is None:
                del self._pulses[replica]
        self._armed = self._open > 0
        if self._armed:
            self._later(SWEEP_S, self.sweep)

    def _excuse(self, late_s: float) -> None:
        for pulse in self._pulses.values():
            pulse.heard_s += late_s
            for awaiting_reply in pulse.debtors:
                awaiting_reply.since_s += late_s
                awaiting_reply.heard_s += late_s
                awaiting_reply.until_s += late_s

    def _look(self, now_s: float, pulse: EnginePulse) -> None:
        debtors = list(pulse.debtors)
        silent_s = now_s - max(pulse.heard_s, min(reply.since_s for reply in debtors))
        if silent_s > GONE_S and self._directory.find(pulse.replica) is None:
            _stall(debtors, "replica")
            return
        owing = [reply for reply in debtors if reply.owes]
        flowing = [reply for reply in owing if reply.flows]
        gap_s = pulse.gap_limit_s
        first_s = pulse.first_limit_s(sum(reply.tokens for reply in owing if not reply.flows))
        limit_s, asked = (gap_s, flowing) if flowing else (first_s, owing)
        if asked and now_s - max(pulse.heard_s, min(reply.since_s for reply in asked)) > limit_s:
            _stall(debtors, "replica")
            return
        for awaiting_reply in owing:
            alone_s = ALONE * gap_s if awaiting_reply.flows else max(first_s, MOST_FIRST_S)
            if now_s - awaiting_reply.heard_s > alone_s:
                _stall([awaiting_reply], "timeout")
        for debtor in debtors:
            if debtor.pulse is pulse and now_s > debtor.until_s:
                debtor.undelivered()
            elif not debtor.paused and now_s - debtor.heard_s > BACKSTOP_S:
                _stall([debtor], "replica")


def _stall(debtors: list[AwaitingReply], kind: FailureKind) -> None:
    for awaiting_reply in debtors:
        if awaiting_reply.pulse is not None:  # One that fails may take others of its request with it.
            awaiting_reply.stalled(kind)


log = logging.getLogger(__name__)
Reason = Literal["stop", "length"]
OTHER_TOKENS = "makes other tokens of its messages than we did"


class RelayedStream:
    """What the client has of an answer that OpenAI servers write: the same over all attempts."""

    begun = False
    first = b""  # Its first event, whose id all others bear.
    prompt_ids: Sequence[int] = ()
    knows_ids = False  # Whether the tokens of all that was passed on are known.
    events = 0


class RunningAttempt(ABC):
    run: Run
    endpoints: Sequence[Endpoint]
    done_segments = 0

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None:
        """Nobody wants it any more: engines are told, and nothing of it is heard again."""

    @abstractmethod
    def pause(self) -> None:
        """Its reader is slow: what comes is not read for now, and nobody is blamed for that."""

    @abstractmethod
    def resume(self) -> None: ...


class CannotStart(NamedTuple):
    where: str
    why: str


@dataclass(frozen=True, slots=True)
class DispatchContext:
    pool: ConnectionPool
    directory: ReplicaDirectory
    watch: SilenceMonitor
    now_s: Callable[[], float]
    later: Callable[[float, Callable[[], None]], object]
    meter: Counters
    attempt_for: Callable[[ActiveRequest, Run, RelayedStream], RunningAttempt | CannotStart]


class ActiveRequest:
    """`tell` reaches the Brain; `over` is called once, with the last thing that was told."""

    _attempt = -1
    _going: RunningAttempt | None = None
    _first = False
    _whole: Reason | None = None  # Why no token can come any more, whatever becomes of the engine.
    _failed: events.AttemptFailed | None = None
    _decoder = ""  # Of the latest attempt.
    _paused = False
    _ended = False

    def __init__(
        self,
        choice_request: ChoiceRequest,
        answer: AnswerSink,
        context: DispatchContext,
        tell: Callable[[Event], None],
        over: Callable[[ActiveRequest, Event | None], None],
    ) -> None:
        self.asked, self.answer = choice_request, answer
        self.output: list[int] = []  # The tokens that the user has.
        self._context, self._tell, self._over = context, tell, over
        self.ends = frozenset(choice_request.ends)
        self._stream = RelayedStream()
        self._events = PassthroughEvents(choice_request, answer) if choice_request.own else None

    def resume(self, output: Sequence[int], request: Request) -> Event | None:
        """From tokens that another process passed on; what the Brain is told, unless they are all of it."""
        self._keep([SampledToken(token) for token in output])
        if self._whole is not None:
            self._ended = True
            self._over(self, None)
            self.answer.finished(self._whole, 0)
            return None
        self._attempt = 0
        return events.RequestAdopted(request, 0, len(self.output), None)

    # What the Brain wants.

    def run(self, run: Run) -> None:
        if self._ended or run.attempt <= self._attempt:
            return
        if self._going is not None:
            self._stop()
        self._attempt, self._first, self._decoder = run.attempt, False, run.route.decoder
        if run.streamed_tokens != len(self.output):
            self.failed("link", "", "was sent from elsewhere than where its user is")
            return
        attempt = self._context.attempt_for(self, run, self._stream)
        if isinstance(attempt, CannotStart):
            self.failed("replica", attempt.where, attempt.why, rejected=True)
            return
        self._going = attempt
        if self._events is not None:
            self._events.again()
        self._context.meter.routed(self.asked.model, run)
        attempt.start()
        if self._paused and self._going is attempt:
            attempt.pause()

    def refuse(self, refusal: Refuse) -> None:
        if not self._ended:
            self._end(None)
            self.answer.refused(refusal)

    def abandon(self) -> None:
        self._stop()

    def inquire(self, query_attempt: QueryAttempt) -> None:
        if self._ended:
            return
        if query_attempt.attempt < self._attempt:
            if self._going is not None:  # Another took its place, which the Brain may not have heard.
                self._tell(events.AttemptFailed(self.asked.id, query_attempt.attempt, "timeout", "", 0))
            return
        if query_attempt.attempt == self._attempt and self._going is not None:
            self._tell(events.AttemptRunning(self.asked.id, self._attempt))
        elif self._failed is not None and self._failed.attempt == query_attempt.attempt:
            self._tell(self._failed)
        else:  # It was abandoned, or its order to run never came.
            self._attempt = query_attempt.attempt
            self.failed("timeout", "", "was stopped, or never begun")

    def whereabouts(self, named: Callable[[Endpoint], str | None], request: Request) -> Event | None:
        """For a Brain that knows nothing of it. None: it is under way where that Brain knows nobody yet."""
        if self._attempt < 0:
            return events.RequestArrived(request)
        attempt = self._going
        if attempt is None and self._lost_to_its_grammar():  # The Brain before this one did not decide.
            self._end(None)
            self.answer.refused(Refuse(self.asked.id, "grammar", GRAMMAR_SUSPECTED))
            return events.RequestCancelled(self.asked.id)
        if attempt is None:
            return events.RequestAdopted(request, self._attempt, len(self.output), None)
        run = attempt.run
        segments = [
            Segment(name, old.start, old.stop)
            for endpoint, old in zip(attempt.endpoints, run.route.segments, strict=True)
            if (name := named(endpoint)) is not None
        ]
        if len(segments) < len(attempt.endpoints):
            return None
        route = Route(tuple(segments))
        return events.RequestAdopted(
            request, self._attempt, run.streamed_tokens, route, attempt.done_segments, self._first
        )

    def _lost_to_its_grammar(self) -> bool:
        failed = self._failed
        if not self.asked.grammar or failed is None or failed.attempt != self._attempt:
            return False
        return not self._first and grammar_suspected(failed, self._decoder)

    # What the client wants.

    def cancel(self) -> None:
        if not self._ended:
            self._end(events.RequestCancelled(self.asked.id))

    def room(self, there: bool) -> None:
        if there is not self._paused:
            return
        self._paused = not there
        if self._going is not None:
            if there:
                self._going.resume()
            else:
                self._going.pause()

    # What attempts tell.

    def segment_done(self, attempt: RunningAttempt, place: int) -> None:
        attempt.done_segments = place + 1
        self._tell(events.SegmentDone(self.asked.id, attempt.run.attempt, place))

    def segment_computed(self, attempt: RunningAttempt, place: int) -> None:
        self._tell(events.SegmentComputed(self.asked.id, attempt.run.attempt, place))

    def tokens(self, choices: list[SampledToken]) -> None:
        """More of the answer. What is beyond its end was not asked for, and ends it."""
        kept, lied = self._keep(choices)
        if kept and self.answer.tokens(kept):
            self.first_token()
            self._end(events.RequestFinished(self.asked.id, self._attempt, len(self.output)))
            return
        if self._ended or not kept:
            return
        self.first_token()
        if lied:
            self._finish(self._whole or "length", 0)

    def _keep(self, choices: list[SampledToken]) -> tuple[list[SampledToken], bool]:
        """Those up to the answer's end, and whether there are more."""
        output, ends, most = self.output, self.ends, self.asked.max_output_tokens
        for place, sampled_token in enumerate(choices):
            if self._whole is not None:
                return choices[:place], True
            output.append(sampled_token.token)
            if sampled_token.token in ends:
                self._whole = "stop"
            elif len(output) >= most:
                self._whole = "length"
        return choices, False

    def first_token(self) -> None:
        if not self._first:
            self._first = True
            self._tell(events.FirstToken(self.asked.id, self._attempt))

    def finished(self, reason: Reason, cached_tokens: int) -> None:
        self._going = None
        self._finish(reason, min(cached_tokens, self.asked.prompt_tokens))

    def _finish(self, reason: Reason, cached_tokens: int) -> None:
        self._end(events.RequestFinished(self.asked.id, self._attempt, len(self.output)))
        self.answer.finished(reason, cached_tokens)

    def failed(
        self,
        kind: FailureKind,
        where: str,
        why: str,
        *,
        rejected: bool = False,
    ) -> None:
        """An attempt is over. Nothing is missing where the last token was heard; else the Brain says what next."""
        self._note(kind, where, why)
        self._going = None
        rejected = rejected and self.asked.grammar
        output = len(self.output)
        failed = events.AttemptFailed(self.asked.id, self._attempt, kind, where, output, rejected)
        if self._whole is not None:
            self._finish(self._whole, 0)
            return
        self._failed = failed
        self._tell(failed)

    # An engine that answers in its own words. The Brain hears of no token that the user has: attempts begin anew.

    def said(self, events: list[dict[str, Any]], *, stream: bool) -> None:
        assert self._events is not None
        if stream:  # else nobody knows when its first token was there
            self.first_token()
        try:
            self._events.say(events, stream=stream)
        except DifferentAnswer as error:
            self._stop()
            self._otherwise(str(error))

    def own_finished(self, counts: TokenCounts) -> None:
        assert self._events is not None
        self._going = None
        if not self._ended:
            most = self.asked.max_output_tokens
            self._end(events.RequestFinished(self.asked.id, self._attempt, min(counts.output or 1, most)))
            self._events.end(counts)

    def other_prompt(self, prompt: tuple[int, ...]) -> None:
        """The engine makes other tokens of the client's messages than we did; what is sent next has those."""
        self.asked = self.asked._replace(prompt=prompt, prompt_tokens=len(prompt))
        self.failed("timeout", "", OTHER_TOKENS)

    def _otherwise(self, why: str) -> None:
        """It cannot be gone on with, and that is nobody's fault."""
        self._note("timeout", "", why)
        if not self._ended:
            self._end(events.RequestCancelled(self.asked.id))
            self.answer.refused(Refuse(self.asked.id, "lost", f"the answer broke off: {why}"))

    # A server of plain OpenAI.

    def relayed(self, output_tokens: int) -> None:
        self._going = None
        if not self._ended:
            self._end(events.RequestFinished(self.asked.id, self._attempt, output_tokens))
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
            self._close(events.RequestFinished(self.asked.id, self._attempt, output_tokens))

    def turned_down(self, status: int, kind: bytes, body: bytes) -> None:
        """The server says that the request is at fault, which is passed on: there is nothing to learn from it."""
        self._going = None
        if self.output or (self._events is not None and self._events.begun):
            self._otherwise(f"asked to go on, the engine refused it ({status})")
        elif not self._ended:
            self._end(events.RequestCancelled(self.asked.id))
            self.answer.relay_whole(status, kind, body)

    def broken(self, kind: FailureKind, where: str, why: str) -> None:
        """The answer ends in the middle: nobody knows from which tokens another could go on."""
        self._note(kind, where, why)
        self._going = None
        if self._ended:
            return
        self._tell(events.AttemptFailed(self.asked.id, self._attempt, kind, where, len(self.output)))
        if not self._ended:
            self._end(events.RequestCancelled(self.asked.id))
            detail = f"the server {why} in the middle of its answer"
            self.answer.refused(Refuse(self.asked.id, "lost", detail))

    # How it ends.

    def _note(self, kind: FailureKind, where: str, why: str) -> None:
        log.info("request %s, attempt %d: %s %s (%s)", self.asked.id, self._attempt, where, why, kind)
        self._context.meter.failed(where, kind)

    def _stop(self) -> None:
        attempt, self._going = self._going, None
        if attempt is not None:
            attempt.stop()

    def _end(self, event: Event | None) -> None:
        self._ended = True
        self._stop()
        self._close(event)

    def _close(self, event: Event | None) -> None:
        self._over(self, event)
        if event is not None:
            self._tell(event)
