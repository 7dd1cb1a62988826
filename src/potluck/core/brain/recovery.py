"""After a failure: again from the tokens already streamed, or a refusal with its reason. Nothing is dropped
silently.

A request that lost its replica, link or transfer is sent again over prompt + streamed tokens, away from what
failed it, while it has retries left and somebody still waits for it. Requests that nobody can take are held,
and refused once they waited `max_wait_s` or their deadline passed. Events are not numbered by attempt: one that
names a replica or link which the present attempt does not use is late, and is ignored.

A request that fails as if its replica were gone is news for the others as well: nobody is sent there until it
reports again, or for QUARANTINE_S. When a replica comes up, it gets no more of those held than it can take at once,
as others may come up beside it; at the next tick all that are left go to whoever is there.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import islice, pairwise

from potluck.core.brain.actions import RefusalReason
from potluck.core.brain.events import Failed
from potluck.core.brain.flight import HELD, RUNNING, Flight
from potluck.core.brain.policy import Policy

QUARANTINE_S = 1.0


def concerns(event: Failed, flight: Flight) -> bool:
    """Whether a failure is one of the request's present attempt."""
    if flight.state != RUNNING or flight.route is None or flight.last is None:
        return False
    views = [view for view, _ in flight.earlier] + [flight.last]
    if any(event.where == view.member.id for view in views):
        return True
    for first, second in pairwise(views):
        links = (
            f"{first.member.region}->{second.member.region}",
            f"{first.member.id}->{second.member.id}",
        )
        if event.where in links:
            return True
    return False


def verdict(flight: Flight, at_s: float, policy: Policy) -> tuple[RefusalReason, str] | None:
    """Why a request that failed is not sent again; None when it is."""
    deadline_s = flight.request.deadline_s
    if deadline_s is not None and at_s >= deadline_s:
        return "deadline", f"failed at {at_s:g} s, after the deadline at {deadline_s:g} s"
    if flight.attempt >= policy.retries:
        return "retries", f"failed {flight.attempt + 1} times; {policy.retries} retries are allowed"
    return None


class Held:
    """Requests that wait for any replica, by model in the order they came, and by when they give up."""

    __slots__ = ("_expiries", "_models", "_sequence")

    def __init__(self) -> None:
        self._models: dict[str, dict[str, None]] = {}
        self._expiries: list[tuple[float, int, str, str]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return sum(len(each) for each in self._models.values())

    def counts(self) -> dict[str, int]:
        return {model: len(each) for model, each in self._models.items() if each}

    def add(self, at_s: float, flight: Flight, policy: Policy) -> None:
        """Hold a request; one that was held already keeps its time."""
        request = flight.request
        self._models.setdefault(request.model, {})[request.id] = None
        if flight.state == HELD and flight.held_s >= 0:
            return
        flight.state, flight.held_s = HELD, at_s
        expiry_s = at_s + policy.max_wait_s
        if request.deadline_s is not None:
            expiry_s = min(expiry_s, request.deadline_s)
        self._sequence += 1
        heappush(self._expiries, (expiry_s, self._sequence, request.model, request.id))

    def remove(self, flight: Flight) -> None:
        self._models.get(flight.request.model, {}).pop(flight.request.id, None)

    def take(self, model: str, most: int | None = None) -> list[str]:
        """Those of a model that wait longest, or all, to be tried again."""
        waiting = self._models.get(model, {})
        taken = list(islice(waiting, most))
        for name in taken:
            del waiting[name]
        return taken

    def models(self) -> list[str]:
        return [model for model, each in self._models.items() if each]

    def expired(self, at_s: float) -> list[str]:
        """Those whose time is over; they are no longer held."""
        found = []
        while self._expiries and self._expiries[0][0] <= at_s:
            _, _, model, request = heappop(self._expiries)
            if request in self._models.get(model, ()):
                del self._models[model][request]
                found.append(request)
        return found
