"""CRONUS's data-parallel baseline: a dispatcher in front of unlike engines, as its section 5.1 describes it.

Weighted round robin, 3 turns for the A100 and 1 for the other, and no engine may have more than 3 (or 1) requests
in its waiting queue; while all queues are full, requests stay at the front end. A request leaves the waiting
queue of vLLM when its first chunk is scheduled, which the front end sees only as the first token later on. With one
prompt being computed at a time, those without a first token are the waiting ones and one more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from potluck.core.brain.brain import Brain
from potluck.core.state.actions import Action, Refuse, Run
from potluck.core.state.events import (
    AttemptFailed,
    Event,
    FirstToken,
    ReplicaReady,
    RequestArrived,
    RequestFinished,
)
from potluck.core.state.facts import FleetFacts
from potluck.core.state.policy import Policy
from potluck.core.values.route import aggregated
from potluck.core.values.types import Request

COMPUTING = 1  # Prompts that are neither waiting nor answered yet.


class QueueLimited:
    """The dispatcher, over one replica of each template: (template, its turns, the limit of its waiting queue).

    The fleet itself is left to a Brain.
    """

    def __init__(self, facts: FleetFacts, policy: Policy, engines: Sequence[tuple[str, int, int]]) -> None:
        self._brain = Brain(facts, policy)
        self._order = [template for template, turns, _ in engines for _ in range(turns)]
        self._limits = {template: limit + COMPUTING for template, _, limit in engines}
        self._replicas: dict[str, str] = {}
        """Template to its replica, once that is ready."""
        self._open = dict.fromkeys(self._limits, 0)
        """Sent, and no first token yet."""
        self._at: dict[str, str] = {}
        self._held: deque[Request] = deque()
        self._turn = 0

    def on(self, at_s: float, event: Event) -> list[Action]:
        """Requests are ours, the rest is the Brain's."""
        if isinstance(event, RequestArrived):
            self._held.append(event.request)
        elif isinstance(event, FirstToken):
            self._open[self._at.pop(event.request)] -= 1
        elif isinstance(event, AttemptFailed):
            self._open[self._at.pop(event.request)] -= 1
            return [Refuse(event.request, "no_capacity", f"failed at {event.where}"), *self._send()]
        elif isinstance(event, RequestFinished):
            return []
        else:
            actions = self._brain.on(at_s, event)
            if isinstance(event, ReplicaReady):
                self._replicas[event.replica.partition("@")[0]] = event.replica
            return actions + self._send()
        return self._send()

    def _send(self) -> list[Action]:
        """All that have a place, first come first served."""
        actions: list[Action] = []
        while self._held and len(self._replicas) == len(self._limits):
            template = self._next()
            if template is None:
                break
            request = self._held.popleft()
            self._open[template] += 1
            self._at[request.id] = template
            route = aggregated(self._replicas[template])
            actions.append(Run(request.id, route, 0, request.prompt_tokens, 0))
        return actions

    def _next(self) -> str | None:
        """Whose turn it is; full queues are passed over."""
        for _ in self._order:
            template = self._order[self._turn % len(self._order)]
            self._turn += 1
            if self._open[template] < self._limits[template]:
                return template
        return None
