"""A second attempt beside a ride's first, which is late with its token: whoever has something to pass on first leads.

Until then nothing of either has reached the client. The one that leads is the ride's attempt from then on, and the
other is stopped before a byte is passed on: so nothing comes twice, and an answer ends once. Should the first one
fail, the second takes its place; should the second fail, the first goes on as if there had been none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from potluck.core.state.actions import Run
from potluck.core.state.events import Event, FailureKind, SegmentComputed, SegmentDone
from potluck.core.values.sampling import SampledToken
from potluck.gateway.dispatch.relay_attempt import RelayedStream
from potluck.gateway.interfaces import AnswerSink, ChoiceRequest, Endpoint, TokenCounts

if TYPE_CHECKING:
    from potluck.gateway.dispatch.active_request import ActiveRequest
    from potluck.gateway.dispatch.attempt_kinds import RunningAttempt


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
