"""Requests that wait: for any replica, or for their turn on a pair; and when each of them gives up."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final

from potluck.core.brain.flight import HELD, RUNNING, WAITING, Flight
from potluck.core.brain.policy import Policy

LEAST_NOTES: Final = 4096


class Held:
    """Requests that wait for any replica, by model in the order they came, and by when they give up."""

    __slots__ = ("_expiries", "_flights", "_models", "_most", "_sequence")

    def __init__(self, flights: dict[str, Flight]) -> None:
        self._flights = flights
        self._models: dict[str, dict[str, None]] = {}
        self._expiries: list[tuple[float, int, str]] = []
        self._sequence = 0
        self._most = LEAST_NOTES
        """With more notes than this, those of requests that wait no longer are dropped."""

    def __len__(self) -> int:
        return sum(len(each) for each in self._models.values())

    def counts(self) -> dict[str, int]:
        return {model: len(each) for model, each in self._models.items() if each}

    def add(self, at_s: float, flight: Flight, policy: Policy) -> None:
        """Hold a request until somebody can take it."""
        request = flight.request
        self._models.setdefault(request.model, {})[request.id] = None
        flight.state = HELD
        self._begin(at_s, flight, policy)

    def wait(self, at_s: float, flight: Flight, policy: Policy) -> None:
        """It waits for its turn on a pair, no longer than it would be held."""
        assert flight.state == WAITING
        self._begin(at_s, flight, policy)

    def _begin(self, at_s: float, flight: Flight, policy: Policy) -> None:
        """From now on time runs; one that was held or waited already keeps its time."""
        if flight.held_s >= 0:
            return
        flight.held_s = at_s
        expiry_s = at_s + policy.max_wait_s
        deadline_s = flight.request.deadline_s
        if deadline_s is not None:
            expiry_s = min(expiry_s, deadline_s)
        self._sequence += 1
        flight.patience = self._sequence
        heappush(self._expiries, (expiry_s, self._sequence, flight.request.id))
        if len(self._expiries) > self._most:
            self._expiries = [each for each in self._expiries if self._waits(*each[1:]) is not None]
            heapify(self._expiries)
            self._most = LEAST_NOTES + 2 * len(self._expiries)

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

    def expired(self, at_s: float) -> list[Flight]:
        """Those that wait and whose time is over; they are no longer held."""
        found = []
        while self._expiries and self._expiries[0][0] <= at_s:
            _, sequence, name = heappop(self._expiries)
            flight = self._waits(sequence, name)
            if flight is not None:
                self.remove(flight)
                found.append(flight)
        return found

    def _waits(self, sequence: int, name: str) -> Flight | None:
        """Whom a note is about, while it is about the present wait."""
        flight = self._flights.get(name)
        if flight is None or flight.state == RUNNING or flight.patience != sequence or flight.held_s < 0:
            return None
        return flight
