"""All requests of a worker that are under way. What carrying out orders makes known is told when all are done."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from potluck.core.replica.blocks import BlockNamer
from potluck.core.state.actions import Abort, Action, QueryAttempt, Refuse, Run
from potluck.core.state.events import Event, RequestArrived, RequestCancelled, RequestFinished
from potluck.core.values.types import Request
from potluck.gateway.admin.counters import Counters
from potluck.gateway.dispatch.active_request import (
    ActiveRequest,
    CannotStart,
    DispatchContext,
    RelayedStream,
    RunningAttempt,
    SilenceMonitor,
)
from potluck.gateway.dispatch.relay_attempt import RelayAttempt
from potluck.gateway.dispatch.segment_attempt import SegmentAttempt
from potluck.gateway.http.connection_pool import ConnectionPool
from potluck.gateway.registry.registry import ReplicaDirectory
from potluck.gateway.values import AnswerSink, ChoiceRequest, Endpoint

ENDED = 4096


class BrainClient(Protocol):
    """A worker's way to the Brain. What it wants comes back through `Dispatcher.act`, perhaps before this returns."""

    act: Callable[[Sequence[Action]], None]

    def tell(self, event: Event) -> None: ...

    def now_s(self) -> float:
        """The Brain's time: seconds since its log began."""


class Dispatcher:
    def __init__(
        self,
        brain: BrainClient,
        directory: ReplicaDirectory,
        pool: ConnectionPool,
        now_s: Callable[[], float],
        later: Callable[[float, Callable[[], None]], object],
        counters: Counters,
    ) -> None:
        self._brain, self._now_s = brain, now_s
        self._namer = BlockNamer()
        self._fingerprints: dict[str, str] = {}
        """Of models' weights, as the engines that requests were sent to tell: engines name blocks by them."""
        self._watch = SilenceMonitor(directory, now_s, later)
        self.streamed_s = self._watch.streamed_s
        self._context = DispatchContext(
            pool, directory, self._watch, now_s, later, counters, self._attempt_for
        )
        self._open: dict[str, ActiveRequest] = {}
        self._ended: OrderedDict[str, Event | None] = OrderedDict()
        self._acting = False
        self._news: list[Event] = []

    def __len__(self) -> int:
        return len(self._open)

    def sizes(self) -> dict[str, int]:
        return {"open": len(self._open), "watched": len(self._watch), "news": len(self._news)}

    # What clients want.

    def begin(self, choice_request: ChoiceRequest, answer: AnswerSink) -> None:
        request = self._request(choice_request, self._brain.now_s())
        self._open[choice_request.id] = ActiveRequest(
            choice_request, answer, self._context, self._tell, self._over
        )
        self._tell(RequestArrived(request))

    def resume(self, choice_request: ChoiceRequest, answer: AnswerSink, output: Sequence[int]) -> None:
        active = ActiveRequest(choice_request, answer, self._context, self._tell, self._over)
        self._open[choice_request.id] = active
        event = active.resume(output, self._request(choice_request, self._brain.now_s()))
        if event is not None:
            self._tell(event)

    def _request(self, choice_request: ChoiceRequest, arrival_s: float) -> Request:
        deadline_s = choice_request.deadline_s
        if deadline_s is not None:
            deadline_s += self._brain.now_s() - self._now_s()
        return Request(
            choice_request.id,
            choice_request.model,
            arrival_s,
            choice_request.prompt_tokens,
            choice_request.max_output_tokens,
            choice_request.priority,
            deadline_s,
            self._blocks(choice_request) if choice_request.prompt else (),
            choice_request.tenant,
            choice_request.request_class,
            choice_request.exact,
            choice_request.grammar,
        )

    def fingerprint(self, model: str) -> str:
        """Of a model's weights, as far as an engine of it was asked before; else empty."""
        return self._fingerprints.get(model, "")

    def _blocks(self, choice_request: ChoiceRequest) -> tuple[int, ...]:
        fingerprint, prepared = self._fingerprints.get(choice_request.model), choice_request.prepared
        if prepared is not None and prepared.fingerprint == fingerprint:
            return prepared.blocks
        return (
            ()
            if fingerprint is None
            else self._namer.names(choice_request.prompt, fingerprint, choice_request.salt)
        )

    def _attempt_for(
        self, request: ActiveRequest, run: Run, stream: RelayedStream
    ) -> RunningAttempt | CannotStart:
        endpoints: list[Endpoint] = []
        by_segments = 0
        find, asked = self._context.directory.find, request.asked
        for segment in run.route.segments:
            endpoint = find(segment.replica)
            if endpoint is None:
                return CannotStart(segment.replica, "cannot be reached")
            endpoints.append(endpoint)
            by_segments += endpoint.kind == "segments"
        last = endpoints[-1]
        if by_segments and last.fingerprint:
            self._fingerprints[last.model] = last.fingerprint
        if by_segments == 0 and len(endpoints) == 1 and (stream.begun or not request.output):
            return RelayAttempt(request, run, endpoints, self._context, stream)
        able = last.own or not asked.own
        if by_segments == len(endpoints) and asked.prompt and not stream.begun and able:
            return SegmentAttempt(request, run, endpoints, self._context)
        return CannotStart(run.route.decoder, "cannot do what the route asks of it")

    def cancel(self, request: str) -> None:
        active = self._open.get(request)
        if active is not None:
            active.cancel()

    def room(self, request: str, there: bool) -> None:
        active = self._open.get(request)
        if active is not None:
            active.room(there)

    def close(self) -> None:
        """The gateway ends. All that is open are kept answers of clients who left, which another can go on with."""
        for active in tuple(self._open.values()):
            active.cancel()

    # What the Brain wants: Run, Refuse, Abort, QueryAttempt.

    def act(self, actions: Sequence[Action]) -> None:
        outer, self._acting = self._acting, True
        try:
            for action in actions:
                if type(action) is Run:
                    active = self._open.get(action.request)
                    if active is None:  # it ended as another, and the Brain that took it over missed that
                        self._tell(RequestCancelled(action.request))
                    else:
                        active.run(action)
                else:
                    self._do(action)
        finally:
            self._acting = outer
        while self._news and not self._acting:
            self._brain.tell(self._news.pop(0))

    # Another Brain, in the place of one whose process is gone.

    def names(self) -> list[str]:
        return list(self._open)

    def whereabouts(self, request: str, named: Callable[[Endpoint], str | None]) -> Event | None:
        active = self._open[request]
        return active.whereabouts(named, self._request(active.asked, 0.0))

    def gone(self, replica: str) -> None:
        self._watch.gone(replica)

    def _do(self, action: Action) -> None:
        if isinstance(action, QueryAttempt):
            self._inquire(action)
        elif isinstance(action, Refuse | Abort) and (active := self._open.get(action.request)):
            if isinstance(action, Refuse):
                active.refuse(action)
            else:
                active.abandon()

    def _inquire(self, query_attempt: QueryAttempt) -> None:
        active = self._open.get(query_attempt.request)
        if active is not None:
            active.inquire(query_attempt)
            return
        event = self._ended.get(query_attempt.request)
        if isinstance(event, RequestFinished) and event.attempt == query_attempt.attempt:
            self._tell(event)
        else:
            self._tell(RequestCancelled(query_attempt.request))

    def _tell(self, event: Event) -> None:
        if self._acting:
            self._news.append(event)
        else:
            self._brain.tell(event)

    def _over(self, active: ActiveRequest, event: Event | None) -> None:
        name = active.asked.id
        del self._open[name]
        self._ended[name] = event
        if len(self._ended) > ENDED:
            self._ended.popitem(last=False)
