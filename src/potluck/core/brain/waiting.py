"""Requests that wait: for any replica, or for their turn on a pair; and when each of them gives up."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final

from potluck.core.state.policy import Policy
from potluck.core.state.request_state import HELD, RUNNING, WAITING, RequestState

LEAST_NOTES: Final = 4096


class WaitingRequests:
    """Requests that wait for any replica, by model in the order they came, and by when they give up."""

    __slots__ = ("_expiries", "_flights", "_models", "_most", "_sequence")

    def __init__(self, requests: dict[str, RequestState]) -> None:
        self._flights = requests
        self._models: dict[str, dict[str, None]] = {}
        self._expiries: list[tuple[float, int, str]] = []
        self._sequence = 0
        self._most = LEAST_NOTES
        """With more notes than this, those of requests that wait no longer are dropped."""

    def __len__(self) -> int:
        return sum(len(each) for each in self._models.values())

    def counts(self) -> dict[str, int]:
        return {model: len(each) for model, each in self._models.items() if each}

    def add(self, at_s: float, req: RequestState, policy: Policy) -> None:
        """Hold a request until somebody can take it."""
        request = req.request
        self._models.setdefault(request.model, {})[request.id] = None
        req.state = HELD
        self._begin(at_s, req, policy)

    def wait(self, at_s: float, req: RequestState, policy: Policy) -> None:
        """It waits for its turn on a pair, no longer than it would be held."""
        assert req.state == WAITING
        self._begin(at_s, req, policy)

    def _begin(self, at_s: float, req: RequestState, policy: Policy) -> None:
        """From now on time runs; one that was held or waited already keeps its time."""
        if req.held_s >= 0:
            return
        req.held_s = at_s
        expiry_s = at_s + policy.max_wait_s
        deadline_s = req.request.deadline_s
        if deadline_s is not None:
            expiry_s = min(expiry_s, deadline_s)
        self._sequence += 1
        req.patience = self._sequence
        heappush(self._expiries, (expiry_s, self._sequence, req.request.id))
        if len(self._expiries) > self._most:
            self._expiries = [each for each in self._expiries if self._waits(*each[1:]) is not None]
            heapify(self._expiries)
            self._most = LEAST_NOTES + 2 * len(self._expiries)

    def remove(self, req: RequestState) -> None:
        self._models.get(req.request.model, {}).pop(req.request.id, None)

    def take(self, model: str, most: int | None = None) -> list[str]:
        """Those of a model that wait longest, or all, to be tried again."""
        waiting = self._models.get(model, {})
        taken = list(islice(waiting, most))
        for name in taken:
            del waiting[name]
        return taken

    def models(self) -> list[str]:
        return [model for model, each in self._models.items() if each]

    def expired(self, at_s: float) -> list[RequestState]:
        """Those that wait and whose time is over; they are no longer held."""
        found = []
        while self._expiries and self._expiries[0][0] <= at_s:
            _, sequence, name = heappop(self._expiries)
            req = self._waits(sequence, name)
            if req is not None:
                self.remove(req)
                found.append(req)
        return found

    def _waits(self, sequence: int, name: str) -> RequestState | None:
        """Whom a note is about, while it is about the present wait."""
        req = self._flights.get(name)
        if req is None or req.state == RUNNING or req.patience != sequence or req.held_s < 0:
            return None
        return req
