"""Where requests are that wait for room: they line up, and go when something was done at a replica.

`Flights` owns requests; it asks here before it sends a new one, and says when a replica has done something. What is
to be done about a request that goes or is refused is its business again, through the three calls it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from potluck.core.admission.admission import Admission, Refusal
from potluck.core.routing.router import Router
from potluck.core.routing.routing_result import SENT, RoutingResult
from potluck.core.routing.routing_table import ModelRoutes, RoutingTable
from potluck.core.routing.targets import Target
from potluck.core.state.actions import Action
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.request_state import RequestState

MOST_MISSES: Final = 8
"""Tries in vain after which nobody else is tried for now."""


class QueueManager:
    """The Brain's waiting requests."""

    def __init__(
        self,
        admission: Admission,
        router: Router,
        table: RoutingTable,
        run: Callable[[float, RequestState], Action],
        refuse: Callable[[float, Refusal], list[Action]],
        hold: Callable[[float, RequestState], None],
    ) -> None:
        self._admission = admission
        self._router = router
        self._table = table
        self._run = run
        self._refuse = refuse
        self._hold = hold

    def behind(self, req: RequestState, table: ModelRoutes) -> bool:
        """Whether a newcomer has to stand in line."""
        return not req.attempt and self._admission.behind(req, table.kind(req))

    def line_up(self, at_s: float, req: RequestState, table: ModelRoutes) -> list[Action]:
        """Let a request wait for room, or refuse it, or another in its place."""
        if not self._admission.outranked(req) and self._in_time(at_s, req, flows=True):
            return [self._run(at_s, req)]
        refusals = self._admission.wait(at_s, req, table.kind(req))
        if refusals and refusals[0].req is req:
            goes = not self._admission.outranked(req) and self._in_time(at_s, req)
            return [self._run(at_s, req)] if goes else self._refuse(at_s, refusals[0])
        return self.turn_away(at_s, refusals)

    def turn_away(self, at_s: float, refusals: Iterable[Refusal]) -> list[Action]:
        """Refuse those that waited, but for whoever is in time somewhere still."""
        actions: list[Action] = []
        for each in refusals:
            if each.reason == "overloaded" and self._in_time(at_s, each.req):
                self._admission.went(at_s, each.req)
                actions.append(self._run(at_s, each.req))
            else:
                actions += self._refuse(at_s, each)
        return actions

    def _in_time(self, at_s: float, req: RequestState, flows: bool = False) -> bool:
        """Send it where it is in time though there is no room; whether that is anywhere. `flows`: over these alone,
        where there is but one: it is as well off in a replica's line as here."""
        table = self._table.models.get(req.request.model)
        if table is None or req.avoid:
            return False
        ways = self._table.ways(table, table.kind(req)[0], req.total_tokens)
        if flows and (ways.simple or len(ways.turns) > 1):  # with several ways, turns are as planned
            return False
        return self._router.in_time(req, ways, self._admission.left_s(at_s, req))

    def freed(self, at_s: float, view: ReplicaState) -> list[Action]:
        """Something was done at a replica: whoever waits may find room there."""
        member = view.member
        queue = self._admission.backlogs.get(member.model)
        if queue is None:
            return []
        queue.again()
        target = self._table.groups.get(member.unit) or self._table.singles.get(member.id)
        return self._go(at_s, member.model, target) if target is not None else []

    def tick(self, at_s: float) -> list[Action]:
        """Refuse those who waited too long; the others are tried again."""
        return self.turn_away(at_s, self._admission.tick(at_s)) + self.retry(at_s)

    def retry(self, at_s: float) -> list[Action]:
        """Whatever was missed: those that wait are tried everywhere."""
        actions: list[Action] = []
        for model, queue in list(self._admission.backlogs.items()):
            queue.again()
            actions += self._go(at_s, model, None)
        return actions

    def _go(self, at_s: float, model: str, target: Target | None) -> list[Action]:
        """Send those whose turn it is, as long as they find room: at one target, or anywhere.

        Where many find none the rest are left for the next time, so that this costs no more with a thousand tenants.
        """
        actions: list[Action] = []
        misses = 0
        self._admission.room.between.now_s = at_s
        admission, router, table = self._admission, self._router, self._table.models.get(model)
        while table is not None and (found := admission.next(at_s, model)) is not None:
            if isinstance(found, Refusal):
                actions += self.turn_away(at_s, [found])
                continue
            answer = router.send(found, table) if target is None else router.send_to(target, found, table)
            if answer is RoutingResult.FULL:
                admission.stuck(found)
                misses += 1
                if misses >= MOST_MISSES:
                    admission.backlogs[model].cut = True
                    break
                continue
            admission.take(at_s, found)
            if answer is SENT:
                actions.append(self._run(at_s, found))
            else:
                self._hold(at_s, found)
        return actions
