"""Hedging: a request that is late with its first token is tried elsewhere as well, and whoever is sooner answers it.

When a request is sent it is predicted when its first token comes. After `hedge` times that (LEAST_S at least) without
one, it is sent along a second route that shares no replica with the first, if

    budget    second attempts are at most SHARE of the requests under way, one at a time in any case
    room      nobody waits in line, admission has room there, the batch and the KV there are not full
    sense     its first token is predicted sooner there than it has waited already

else it is looked at again AGAIN_S later. A second attempt is a RequestState of its own; while it is told something it
takes the first one's place among the open requests, for good once it has won."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Final

from potluck.core.brain.recovery import Recovery
from potluck.core.brain.requests import BrainState, Requests
from potluck.core.routing.router import SENT
from potluck.core.state import events as told
from potluck.core.state.actions import Action, Hedge, Refuse, Run
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.request_state import RUNNING, RequestState

SHARE: Final = 0.05  # Of the requests under way, how many may have a hedge.
LEAST_S: Final = 0.1  # Sooner than this nobody is late.
AGAIN_S: Final = 0.1
LEAST_NOTES: Final = 4096

Handler = Callable[[float, Any], list[Action]]


class Hedging:
    """Stands before the handlers of all events. Made only where hedging is wanted."""

    def __init__(self, state: BrainState, requests: Requests, recovery: Recovery) -> None:
        self._facts = state.facts
        self._hedge = state.policy.hedge
        self._admission = state.admission
        self._table = state.table
        self._router = state.router
        self._speeds = state.speeds
        self._requests = requests
        self._open = requests.open
        self._recovery = recovery
        self.hedges: dict[str, RequestState] = {}
        """The second attempts under way, by the request's id; the first is among the open ones."""
        self._due: list[tuple[float, int, str, int]] = []
        """A heap: when to look at which attempt (request, number). The second settles ties."""
        self._sequence = 0
        self._most = LEAST_NOTES  # With more notes than this, those of attempts that are over are dropped.

    def on(self, at_s: float, event: told.Event, handler: Handler) -> list[Action]:
        actions = self._told(at_s, event, handler) if self.hedges else handler(at_s, event)
        actions = actions + self._after(at_s, actions)
        if self._due and self._due[0][0] <= at_s:
            late = self._look(at_s)
            actions += late + self._after(at_s, late)
        return actions

    def _after(self, at_s: float, actions: list[Action]) -> list[Action]:
        """Attempts that were sent are noted; a request that was refused has no hedge any more."""
        more: list[Action] = []
        for action in actions:
            if isinstance(action, Run):
                req = self._open.get(action.request)
                if req is not None and not req.streamed_tokens:
                    self._note(at_s + max(LEAST_S, self._hedge * self._first_s(req)), req)
            elif isinstance(action, Refuse):
                more += self._end(at_s, action.request)
        return more

    # What is told of one of two.

    def _told(self, at_s: float, event: Any, handler: Handler) -> list[Action]:
        if isinstance(event, told.RequestCancelled):
            hedge = self.hedges.get(event.request)
            stops = self._requests.abandon(hedge) if hedge is not None else []
            return stops + handler(at_s, event) + self._end(at_s, event.request)
        going_on = isinstance(event, told.SegmentDone | told.SegmentComputed | told.AttemptRunning)
        if not going_on and not isinstance(
            event, told.FirstToken | told.RequestFinished | told.AttemptFailed
        ):
            return handler(at_s, event)
        name = event.request
        hedge, first = self.hedges.get(name), self._open.get(name)
        if hedge is None or first is None or event.attempt not in (first.attempt, hedge.attempt):
            return handler(at_s, event)
        its = event.attempt == hedge.attempt
        if going_on:
            self._open[name] = hedge if its else first
            actions = handler(at_s, event)
            self._open[name] = first
            return actions
        if isinstance(event, told.AttemptFailed) and not event.streamed_tokens:
            lost, left = (hedge, first) if its else (first, hedge)
            self._leave(name, left)
            return self._recovery.one_of_two(at_s, event, lost, left)
        # It has the first token, or had: one that fails behind it may have failed to say so.
        lost, left = (first, hedge) if its else (hedge, first)
        self._leave(name, left)
        if lost.last is not None:
            self._speeds.outrun(at_s, lost, lost.last)
        return self._requests.release(at_s, lost) + handler(at_s, event)

    def _leave(self, request: str, left: RequestState) -> None:
        del self.hedges[request]
        self._open[request] = left

    def _end(self, at_s: float, request: str) -> list[Action]:
        hedge = self.hedges.pop(request, None)
        return self._requests.release(at_s, hedge) if hedge is not None else []

    # Who is late.

    def _note(self, due_s: float, req: RequestState) -> None:
        if due_s == inf:
            return
        self._sequence += 1
        heappush(self._due, (due_s, self._sequence, req.request.id, req.attempt))
        if len(self._due) > self._most:
            self._due = [item for item in self._due if self._waits(item[2], item[3]) is not None]
            heapify(self._due)
            self._most = LEAST_NOTES + 2 * len(self._due)

    def _waits(self, request: str, attempt: int) -> RequestState | None:
        """Whom a note is about, while that attempt has no token and no hedge."""
        req = self._open.get(request)
        if req is None or req.attempt != attempt or req.state != RUNNING or req.first_s >= 0:
            return None
        # What yields is late already, and what is recalled from a link goes elsewhere anyway.
        # A grammar that is slow to compile would burden a second replica as well.
        if req.request.grammar:
            return None
        if req.hedged or req.streamed_tokens or req.recalled or req.yielding is not None:
            return None
        return req

    def _look(self, at_s: float) -> list[Action]:
        actions: list[Action] = []
        while self._due and self._due[0][0] <= at_s:
            _, _, request, attempt = heappop(self._due)
            req = self._waits(request, attempt)
            if req is None:
                continue
            second: list[Action] = []
            if len(self.hedges) < max(1.0, SHARE * len(self._open)):
                second = self._send_second(at_s, req)
            if not req.hedged:
                self._note(at_s + AGAIN_S, req)
            actions += second
        return actions

    def _send_second(self, at_s: float, req: RequestState) -> list[Action]:
        requests, request = self._requests, req.request
        table = self._table.models.get(request.model)
        if table is None:
            return []
        hedge = RequestState(request)
        hedge.weight, hedge.heavy = req.weight, req.heavy
        hedge.failed_by, hedge.failures, hedge.losses = req.failed_by, req.failures, req.losses
        hedge.lost_on = req.lost_on
        hedge.avoid = req.failed_by | frozenset(req.workers())
        # As a newcomer, so that it is asked whether there is room: retries go wherever they may.
        if self._admission.queues and self._admission.behind(hedge, table):
            return []
        room = self._admission.room
        if room.several:
            room.tenants.now_s = at_s
        if self._router.send(hedge, table) is not SENT or not self._good(at_s, req, hedge):
            return requests.release(at_s, hedge)
        hedge.attempt = req.attempt + 1
        req.hedged = 1
        self.hedges[request.id] = hedge
        return [Hedge(*requests.run(at_s, hedge))]

    def _good(self, at_s: float, req: RequestState, hedge: RequestState) -> bool:
        """Whether a hedge's route is another one, has room, and is sooner than what was waited already."""
        last = hedge.last
        if last is None or last.facts is None or hedge.yielding is not None:
            return False
        if not set(hedge.workers()).isdisjoint(req.workers()):
            return False
        facts, full = last.facts, last.facts.total_blocks * BLOCK_TOKENS
        if last.open_requests > facts.decode_batch or last.open_context_tokens > full:
            return False
        return self._first_s(hedge) < at_s - req.heard_s

    # When a first token is to be expected.

    def _first_s(self, req: RequestState) -> float:
        """From now on, for a request that was just sent; infinite where nothing is known of its replicas."""
        last = req.last
        if last is None or last.facts is None:
            return inf
        total_s = last.pace * last.facts.decode_step_s + self._compute_s(last, req.last_tokens)
        source: ReplicaState | None = None
        for view, tokens in req.earlier:
            total_s += self._compute_s(view, tokens)
            if source is not None:
                total_s += self._cross_s(req, source, view)
            source = view
        return total_s + (self._cross_s(req, source, last) if source is not None else 0.0)

    def _compute_s(self, view: ReplicaState, tokens: int) -> float:
        """Until a replica has computed what it has, so many tokens of which are this request's."""
        facts = view.facts
        if facts is None:
            return inf
        own_s = max(facts.prompt_s(tokens), tokens * facts.alone_s_per_token) if tokens else 0.0
        more_s = own_s - tokens * facts.prefill_s_per_token
        return self._speeds.wait_s(view) + max(0.0, more_s) * view.pace

    def _cross_s(self, req: RequestState, source: ReplicaState, target: ReplicaState) -> float:
        model, facts = self._facts.models.get(req.request.model), source.facts
        here, there = source.member.region, target.member.region
        gbps = facts.card_gbps if facts is not None else 0.0
        if here != there:
            gbps = self._facts.links_gbps.get((here, there), 0.0)
        if model is None or gbps <= 0:
            return 0.0
        return model.wire_bytes(req.prompt_tokens) * 8e-9 / gbps
