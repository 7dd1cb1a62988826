"""Requests of an earlier Brain, whose process is gone: taken over from where they are.

What is under way goes on there, and is counted on its replicas as if it had been sent from here; what is not is sent
as after a failure. It is no arrival: that was counted in the other's time. What that one had learned is learned anew.
"""

from __future__ import annotations

from potluck.core.admission.admission import Admission
from potluck.core.brain.requests import Requests
from potluck.core.state import events as told
from potluck.core.state.actions import Action
from potluck.core.state.fleet import FleetState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import RUNNING, RequestState
from potluck.core.values.route import Route


class Adoption:
    """Told of each request once, by whoever carries it out."""

    def __init__(self, policy: Policy, fleet: FleetState, requests: Requests, admission: Admission) -> None:
        self._policy = policy
        self._fleet = fleet
        self._flights = requests
        self._admission = admission
        self._room = admission.room
        self._between = admission.room.between

    def adopted(self, at_s: float, event: told.RequestAdopted) -> list[Action]:
        request = event.request
        if self._flights.knows(request.id):
            return []
        req = self._flights.open[request.id] = RequestState(request)
        req.attempt, req.streamed_tokens = event.attempt, event.streamed_tokens
        req.prompt_tokens += event.streamed_tokens
        if request.deadline_s is not None:
            self._admission.watch(req)
        if self._admission.weights:
            req.weight = self._admission.weights.get(request.tenant, 1.0)
        if self._policy.admission and (self._room.several or request.tenant is not self._room.tenant):
            self._between.asks(at_s, req)
        if event.route is not None and self._resumed(req, event.route, event.done, event.first):
            req.heard_s = at_s
            if self._room.several:
                self._between.sent(req)
            return []
        req.attempt += 1
        return self._flights.dispatch(at_s, req)

    def _resumed(self, req: RequestState, route: Route, done: int, first: bool) -> bool:
        """Count it where it is under way; False where one of its replicas is not known."""
        views = [self._fleet.views.get(segment.replica) for segment in route.segments]
        found = [view for view in views if view is not None]
        if len(found) < len(views):
            return False
        last = found.pop()
        req.route, req.state, req.last = route, RUNNING, last
        req.earlier = tuple(
            (view, segment.stop - segment.start)
            for view, segment in zip(found, route.segments[:-1], strict=True)
            if segment.stop is not None
        )
        req.done = len(req.earlier) if first else min(done, len(req.earlier))
        req.last_tokens = 0 if first else max(0, req.prompt_tokens - route.segments[-1].start)
        for view, tokens in req.earlier[req.done :]:
            self._fleet.open(view, tokens, 0)
        self._fleet.open(last, req.last_tokens, req.total_tokens)
        return True
