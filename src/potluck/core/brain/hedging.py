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
                request = self._open.get(action.request)
                if request is not None and not request.streamed_tokens:
                    self._note(at_s + max(LEAST_S, self._hedge * self._first_s(request)), request)
            elif isinstance(action, Refuse):
                more += self._end(at_s, action.request)
        return more

    # What is told of one of two.

    def _told(self, at_s: float, event: Any, handler: Handler) -> list[Action]:
        if isinstance(event, told.RequestCancelled):
            hedged_request = self.hedges.get(event.request)
            stops = self._requests.abandon(hedged_request) if hedged_request is not None else []
            return stops + handler(at_s, event) + self._end(at_s, event.request)
        going_on = isinstance(event, told.SegmentDone | told.SegmentComputed | told.AttemptRunning)
        if not going_on and not isinstance(
            event, told.FirstToken | told.RequestFinished | told.AttemptFailed
        ):
            return handler(at_s, event)
        name = event.request
        hedged_request, first = self.hedges.get(name), self._open.get(name)
        if (
            hedged_request is None
            or first is None
            or event.attempt not in (first.attempt, hedged_request.attempt)
        ):
            return handler(at_s, event)
        its = event.attempt == hedged_request.attempt
        if going_on:
            self._open[name] = hedged_request if its else first
            actions = handler(at_s, event)
            self._open[name] = first
            return actions
        if isinstance(event, told.AttemptFailed) and not event.streamed_tokens:
            lost_request, left = (hedged_request, first) if its else (first, hedged_request)
            self._leave(name, left)
            return self._recovery.one_of_two(at_s, event, lost_request, left)
        # It has the first token, or had: one that fails behind it may have failed to say so.
        lost_request, left = (first, hedged_request) if its else (hedged_request, first)
        self._leave(name, left)
        if lost_request.last is not None:
            self._speeds.outrun(at_s, lost_request, lost_request.last)
        return self._requests.release(at_s, lost_request) + handler(at_s, event)

    def _leave(self, request: str, left: RequestState) -> None:
        del self.hedges[request]
        self._open[request] = left

    def _end(self, at_s: float, request: str) -> list[Action]:
        hedged_request = self.hedges.pop(request, None)
        return self._requests.release(at_s, hedged_request) if hedged_request is not None else []

    # Who is late.

    def _note(self, due_s: float, request: RequestState) -> None:
        if due_s == inf:
            return
        self._sequence += 1
        heappush(self._due, (due_s, self._sequence, request.request.id, request.attempt))
        if len(self._due) > self._most:
            self._due = [item for item in self._due if self._waits(item[2], item[3]) is not None]
            heapify(self._due)
            self._most = LEAST_NOTES + 2 * len(self._due)

    def _waits(self, request: str, attempt: int) -> RequestState | None:
        """Whom a note is about, while that attempt has no token and no hedge."""
        request_state = self._open.get(request)
        if (
            request_state is None
            or request_state.attempt != attempt
            or request_state.state != RUNNING
            or request_state.first_s >= 0
        ):
            return None
        # What yields is late already, and what is recalled from a link goes elsewhere anyway.
        # A grammar that is slow to compile would burden a second replica as well.
        if request_state.request.grammar:
            return None
        if (
            request_state.hedged
            or request_state.streamed_tokens
            or request_state.recalled
            or request_state.yielding is not None
        ):
            return None
        return request_state

    def _look(self, at_s: float) -> list[Action]:
        actions: list[Action] = []
        while self._due and self._due[0][0] <= at_s:
            _, _, request, attempt = heappop(self._due)
            request_state = self._waits(request, attempt)
            if request_state is None:
                continue
            second: list[Action] = []
            if len(self.hedges) < max(1.0, SHARE * len(self._open)):
                second = self._send_second(at_s, request_state)
            if not request_state.hedged:
                self._note(at_s + AGAIN_S, request_state)
            actions += second
        return actions

    def _send_second(self, at_s: float, request_state: RequestState) -> list[Action]:
        requests, request = self._requests, request_state.request
        routes = self._table.models.get(request.model)
        if routes is None:
            return []
        hedged_request = RequestState(request)
        hedged_request.weight, hedged_request.heavy = request_state.weight, request_state.heavy
        hedged_request.failed_by, hedged_request.failures, hedged_request.losses = (
            request_state.failed_by,
            request_state.failures,
            request_state.losses,
        )
        hedged_request.lost_on = request_state.lost_on
        hedged_request.avoid = request_state.failed_by | frozenset(request_state.workers())
        # As a newcomer, so that it is asked whether there is room: retries go wherever they may.
        if self._admission.queues and self._admission.behind(hedged_request, routes):
            return []
        capacity = self._admission.room
        if capacity.several:
            capacity.tenants.now_s = at_s
        if self._router.send(hedged_request, routes) is not SENT or not self._good(
            at_s, request_state, hedged_request
        ):
            return requests.release(at_s, hedged_request)
        hedged_request.attempt = request_state.attempt + 1
        request_state.hedged = 1
        self.hedges[request.id] = hedged_request
        return [Hedge(*requests.run(at_s, hedged_request))]

    def _good(self, at_s: float, request: RequestState, hedged_request: RequestState) -> bool:
        """Whether a hedge's route is another one, has room, and is sooner than what was waited already."""
        last_replica = hedged_request.last
        if last_replica is None or last_replica.facts is None or hedged_request.yielding is not None:
            return False
        if not set(hedged_request.workers()).isdisjoint(request.workers()):
            return False
        facts, full = last_replica.facts, last_replica.facts.total_blocks * BLOCK_TOKENS
        if last_replica.open_requests > facts.decode_batch or last_replica.open_context_tokens > full:
            return False
        return self._first_s(hedged_request) < at_s - request.heard_s

    # When a first token is to be expected.

    def _first_s(self, request: RequestState) -> float:
        """From now on, for a request that was just sent; infinite where nothing is known of its replicas."""
        last_replica = request.last
        if last_replica is None or last_replica.facts is None:
            return inf
        total_s = last_replica.pace * last_replica.facts.decode_step_s + self._compute_s(
            last_replica, request.last_tokens
        )
        source_replica: ReplicaState | None = None
        for replica, tokens in request.earlier:
            total_s += self._compute_s(replica, tokens)
            if source_replica is not None:
                total_s += self._cross_s(request, source_replica, replica)
            source_replica = replica
        return total_s + (
            self._cross_s(request, source_replica, last_replica) if source_replica is not None else 0.0
        )

    def _compute_s(self, replica: ReplicaState, tokens: int) -> float:
        """Until a replica has computed what it has, so many tokens of which are this request's."""
        facts = replica.facts
        if facts is None:
            return inf
        own_s = max(facts.prompt_s(tokens), tokens * facts.alone_s_per_token) if tokens else 0.0
        more_s = own_s - tokens * facts.prefill_s_per_token
        return self._speeds.wait_s(replica) + max(0.0, more_s) * replica.pace

    def _cross_s(
        self, request: RequestState, source_replica: ReplicaState, target_replica: ReplicaState
    ) -> float:
        model, facts = self._facts.models.get(request.request.model), source_replica.facts
        here, there = source_replica.member.region, target_replica.member.region
        gbps = facts.card_gbps if facts is not None else 0.0
        if here != there:
            gbps = self._facts.links_gbps.get((here, there), 0.0)
        if model is None or gbps <= 0:
            return 0.0
        return model.wire_bytes(request.prompt_tokens) * 8e-9 / gbps
