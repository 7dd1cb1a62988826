"""Requests of an earlier Brain, whose process is gone: taken over from where they are.

What is under way goes on there, and is counted on its replicas as if it had been sent from here; what is not is sent
as after a failure. It is no arrival: that was counted in the other's time. What that one had learned is learned anew.
"""

from __future__ import annotations

from potluck.core.admission.admission import Admission
from potluck.core.brain import events as told
from potluck.core.brain.actions import Action
from potluck.core.brain.fleet import Fleet
from potluck.core.brain.flight import RUNNING, Flight
from potluck.core.brain.flights import Flights
from potluck.core.brain.policy import Policy
from potluck.core.values.route import Route


class Adoption:
    """Told of each request once, by whoever carries it out."""

    def __init__(self, policy: Policy, fleet: Fleet, flights: Flights, admission: Admission) -> None:
        self._policy = policy
        self._fleet = fleet
        self._flights = flights
        self._admission = admission
        self._room = admission.room
        self._between = admission.room.between

    def adopted(self, at_s: float, event: told.Adopted) -> list[Action]:
        request = event.request
        if self._flights.knows(request.id):
            return []
        flight = self._flights.open[request.id] = Flight(request)
        flight.attempt, flight.streamed_tokens = event.attempt, event.streamed_tokens
        flight.prompt_tokens += event.streamed_tokens
        if request.deadline_s is not None:
            self._admission.watch(flight)
        if self._admission.weights:
            flight.weight = self._admission.weights.get(request.tenant, 1.0)
        if self._policy.admission and (self._room.several or request.tenant is not self._room.tenant):
            self._between.asks(at_s, flight)
        if event.route is not None and self._resumed(flight, event.route, event.done, event.first):
            flight.heard_s = at_s
            if self._room.several:
                self._between.sent(flight)
            return []
        flight.attempt += 1
        return self._flights.dispatch(at_s, flight)

    def _resumed(self, flight: Flight, route: Route, done: int, first: bool) -> bool:
        """Count it where it is under way; False where one of its replicas is not known."""
        views = [self._fleet.views.get(segment.replica) for segment in route.segments]
        found = [view for view in views if view is not None]
        if len(found) < len(views):
            return False
        last = found.pop()
        flight.route, flight.state, flight.last = route, RUNNING, last
        flight.earlier = tuple(
            (view, segment.stop - segment.start)
            for view, segment in zip(found, route.segments[:-1], strict=True)
            if segment.stop is not None
        )
        flight.done = len(flight.earlier) if first else min(done, len(flight.earlier))
        flight.last_tokens = 0 if first else max(0, flight.prompt_tokens - route.segments[-1].start)
        for view, tokens in flight.earlier[flight.done :]:
            self._fleet.open(view, tokens, 0)
        self._fleet.open(last, flight.last_tokens, flight.total_tokens)
        return True
