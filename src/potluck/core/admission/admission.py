"""Who waits for room before the replicas, in which order they go, and who is told no at once.

Whoever finds no room (`routing/capacity.py`) waits in a queue per model. How long is predicted from what left lately:

    W      work ahead of it, in prompt tokens, those of answers at their cost in prompt tokens
    r, l   work that left the queue lately: a second, and at a time (the mean, weighted by itself)
    wait   (W + SURE sqrt(W l)) / r          the mean and SURE standard deviations of work that leaves at random

With more than WAIT of the TTFT objective to wait, a request is refused at once, unless its class wants late answers.
Where a tenant has as many waiting as it may, the one that matters least makes place for one that matters more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import exp, sqrt
from typing import Final, NamedTuple

from potluck.core.admission.queue import RequestQueue
from potluck.core.routing.capacity import AHEAD, ReplicaCapacity
from potluck.core.routing.router import SENT, Router, RoutingResult
from potluck.core.routing.routing_table import ModelRoutes, RoutingTable
from potluck.core.state.actions import Action, RefusalReason
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import RUNNING, Kind, QueuePosition, RequestState
from potluck.core.state.targets import Target
from potluck.core.values.service import RequestClass

WAIT: Final = 0.45  # Share of the TTFT objective that a request may wait.
SURE: Final = 3.0  # Standard deviations by which a wait is taken to be longer than on average.
MEMORY_S: Final = 2.0
LEAST_RETRY_S: Final = 0.1
MOST_RETRY_S: Final = 60.0
MOST_MISSES: Final = 8  # Tries in vain after which nobody else is tried for now.


class Refusal(NamedTuple):
    req: RequestState
    reason: RefusalReason
    detail: str
    retry_after_s: float | None = None


class ServiceRate:
    """Work a second that leaves a queue, and how much at a time; what the plan says until something was seen."""

    __slots__ = ("_at_once", "_since_s", "_spent_s", "_squares", "_work")

    def __init__(self, prior: float) -> None:
        self._work = prior * MEMORY_S
        self._squares = 0.0
        self._spent_s = MEMORY_S
        self._since_s = -1.0
        self._at_once = 0.0

    def began(self, at_s: float) -> None:
        self._since_s = at_s
        self._at_once = 0.0

    def took(self, at_s: float, work: float) -> None:
        passed_s = max(0.0, at_s - self._since_s)
        if passed_s > 0:
            keep = exp(-passed_s / MEMORY_S)
            self._work *= keep
            self._squares *= keep
            self._spent_s = self._spent_s * keep + passed_s
            self._since_s = at_s
            self._at_once = 0.0
        self._work += work
        self._squares += work * (2.0 * self._at_once + work)
        self._at_once += work

    def wait_s(self, at_s: float, ahead: float) -> float:
        """How long until so much has left, to be sure. Nothing taken for a while shows at once."""
        passed_s = max(0.0, at_s - self._since_s)
        rate = max(self._work / max(self._spent_s + passed_s, 1e-9), 1e-9)
        at_a_time = self._squares / max(self._work, 1e-9)
        return (ahead + SURE * sqrt(ahead * at_a_time)) / rate


class Admission:
    """The queues of all models; changed by the Brain as requests come, go on and end."""

    run: Callable[[float, RequestState], Action]
    refuse: Callable[[float, Refusal], list[Action]]
    hold: Callable[[float, RequestState], None]
    """What is done about a request that goes, is refused, or finds no replica: set by who owns requests."""

    def __init__(self, policy: Policy, table: RoutingTable, room: ReplicaCapacity, router: Router) -> None:
        self._policy = policy
        self._table = table
        self._router = router
        self.weights = {tenant.name: tenant.weight for tenant in policy.tenants}
        self.classes: dict[str, RequestClass] = {item.name: item for item in policy.classes}
        self.room = room
        self.queues: dict[str, RequestQueue] = {}  # By model; only those that somebody waits in.
        self._rates: dict[str, ServiceRate] = {}
        self._costs: dict[str, float] = {}  # Prompt tokens that an output token counts for, by model.
        self._ends: list[tuple[float, int, QueuePosition]] = []
        self._notes = 0
        self._deadlines: list[tuple[float, str]] = []  # Of requests that are stopped then though they run.

    def behind(self, req: RequestState, table: ModelRoutes) -> bool:
        request = req.request
        queue = self.queues.get(request.model) if not req.attempt else None
        if queue is None:
            return False
        return queue.waits(request.tenant, self.classes[request.request_class].matters, table.kind(req))

    def _wait(self, at_s: float, req: RequestState, kind: Kind) -> list[Refusal]:
        """Let a request wait that finds no room, or say why it, or another in its place, is refused."""
        request = req.request
        model, tenant = request.model, request.tenant
        known = self.classes[request.request_class]
        queue = self.queues.get(model)
        if queue is None:
            queue = self.queues[model] = RequestQueue(self.weights)
            self._rate(model).began(at_s)
        work = self._work(req)
        wait_s = self._rate(model).wait_s(at_s, queue.ahead(tenant, known.matters))
        refused: list[Refusal] = []
        slo = known.objective(self.room.slo(model))
        if slo is not None and not known.late:
            left_s = request.arrival_s + slo.ttft_s - at_s
            most_s = min(WAIT * slo.ttft_s, left_s - AHEAD * slo.ttft_s)
            if wait_s > most_s:
                self._forget(model)
                why = (
                    f"it would wait up to {wait_s:.2f} s for its turn; of the {slo.ttft_s:g} s to its first token "
                    f"at most {max(0.0, most_s):.2f} s may pass in waiting"
                )
                return [Refusal(req, "overloaded", why, _retry(wait_s - max(0.0, most_s)))]
        if queue.tenant_count(tenant) >= self._policy.queue_requests:
            least = queue.least(tenant)
            assert least is not None
            full = f"{self._policy.queue_requests} requests of its tenant wait already"
            if least.level >= known.matters:
                return [Refusal(req, "overloaded", full, _retry(wait_s))]
            why = f"one that matters more came, and {full}"
            refused.append(self._give_up(at_s, least, "overloaded", why))
            queue = self.queues.setdefault(model, queue)
        place = queue.add(at_s, req, known.matters, kind, work)
        self._notes += 1  # a place's stamp is unlike only those of its own queue
        heappush(self._ends, (self._end_s(at_s, req, known), self._notes, place))
        return refused

    def _next(self, at_s: float, model: str) -> RequestState | Refusal | None:
        """Whose turn it is; a refusal when it is too late for that one."""
        queue = self.queues.get(model)
        place = queue.head() if queue is not None else None
        if queue is None or place is None:
            return None
        late_s = self._end_s(place.since_s, place.req, self.classes[place.req.request.request_class])
        if at_s >= late_s:
            return self._too_late(at_s, place)
        self.room.tenants.crowded = self.room.several and queue.others(place.tenant, place.level)
        return place.req

    def _left_s(self, at_s: float, req: RequestState) -> float:
        """Until its first token is due; 0 where late answers are wanted too, or nothing was promised."""
        known = self.classes[req.request.request_class]
        slo = known.objective(self.room.slo(req.request.model))
        return req.request.arrival_s + slo.ttft_s - at_s if slo is not None and not known.late else 0.0

    def _outranked(self, req: RequestState) -> bool:
        queue = self.queues.get(req.request.model)
        return queue is not None and queue.matters > self.classes[req.request.request_class].matters

    def remove(self, req: RequestState) -> None:
        place, model = req.place, req.request.model
        if place is not None:
            self.queues[model].remove(place)
            self._forget(model)

    def _expired(self, at_s: float) -> list[Refusal]:
        expired = []
        while self._ends and self._ends[0][0] <= at_s:
            place = heappop(self._ends)[2]
            if place.req.place is place:
                expired.append(self._too_late(at_s, place))
        if len(self._ends) > 64 and len(self._ends) > 4 * sum(queue.count for queue in self.queues.values()):
            self._ends = sorted(end for end in self._ends if end[2].req.place is end[2])
        return expired

    def watch(self, req: RequestState) -> None:
        """It is to be stopped at its deadline if its class says so."""
        deadline_s = req.request.deadline_s
        if deadline_s is not None and self.classes[req.request.request_class].stops:
            heappush(self._deadlines, (deadline_s, req.request.id))

    def overdue(self, at_s: float, flights: dict[str, RequestState]) -> list[RequestState]:
        request_states = []
        while self._deadlines and self._deadlines[0][0] <= at_s:
            req = flights.get(heappop(self._deadlines)[1])
            if req is not None and req.state == RUNNING:
                request_states.append(req)
        return request_states

    def line_up(self, at_s: float, req: RequestState, table: ModelRoutes) -> list[Action]:
        if not self._outranked(req) and self._in_time(at_s, req, flows=True):
            return [self.run(at_s, req)]
        refusals = self._wait(at_s, req, table.kind(req))
        if refusals and refusals[0].req is req:
            goes = not self._outranked(req) and self._in_time(at_s, req)
            return [self.run(at_s, req)] if goes else self.refuse(at_s, refusals[0])
        return self._turn_away(at_s, refusals)

    def _turn_away(self, at_s: float, refusals: Iterable[Refusal]) -> list[Action]:
        """Refuse those that waited, but for whoever is in time somewhere still."""
        actions: list[Action] = []
        for refusal in refusals:
            if refusal.reason == "overloaded" and self._in_time(at_s, refusal.req):
                self._rate(refusal.req.request.model).took(at_s, self._work(refusal.req))
                actions.append(self.run(at_s, refusal.req))
            else:
                actions += self.refuse(at_s, refusal)
        return actions

    def _in_time(self, at_s: float, req: RequestState, flows: bool = False) -> bool:
        """Send it where it is in time though there is no room, over `flows` alone if so; whether that is anywhere."""
        table = self._table.models.get(req.request.model)
        if table is None or req.avoid:
            return False
        ways = self._table.ways(table, table.kind(req)[0], req.total_tokens)
        if flows and (ways.simple or len(ways.turns) > 1):  # with several ways, turns are as planned
            return False
        return self._router.in_time(req, ways, self._left_s(at_s, req))

    def freed(self, at_s: float, view: ReplicaState) -> list[Action]:
        member = view.member
        queue = self.queues.get(member.model)
        if queue is None:
            return []
        queue.again()
        target = self._table.groups.get(member.unit) or self._table.singles.get(member.id)
        return self._go(at_s, member.model, target) if target is not None else []

    def tick(self, at_s: float) -> list[Action]:
        return self._turn_away(at_s, self._expired(at_s)) + self.retry(at_s)

    def retry(self, at_s: float) -> list[Action]:
        """Whatever was missed: those that wait are tried everywhere."""
        actions: list[Action] = []
        for model, queue in list(self.queues.items()):
            queue.again()
            actions += self._go(at_s, model, None)
        return actions

    def _go(self, at_s: float, model: str, target: Target | None) -> list[Action]:
        """Send those whose turn it is while they find room; after many that find none, the rest wait."""
        actions: list[Action] = []
        misses = 0
        self.room.tenants.now_s = at_s
        router, table = self._router, self._table.models.get(model)
        while table is not None and (req := self._next(at_s, model)) is not None:
            if isinstance(req, Refusal):
                actions += self._turn_away(at_s, [req])
                continue
            answer = router.send(req, table) if target is None else router.send_to(target, req, table)
            place = req.place
            assert place is not None
            if answer is RoutingResult.FULL:
                self.queues[model].stuck.add((place.tenant, place.kind))
                misses += 1
                if misses >= MOST_MISSES:
                    self.queues[model].cut = True
                    break
                continue
            self._rate(model).took(at_s, place.work)
            self.queues[model].take(place)
            self._forget(model)
            if answer is SENT:
                actions.append(self.run(at_s, req))
            else:
                self.hold(at_s, req)
        return actions

    def _too_late(self, at_s: float, place: QueuePosition) -> Refusal:
        request = place.req.request
        deadline_s = request.deadline_s
        if deadline_s is not None and at_s >= deadline_s:
            return self._give_up(at_s, place, "deadline", f"waited for its turn until {deadline_s:g} s")
        return self._give_up(at_s, place, "overloaded", f"waited {at_s - place.since_s:.2f} s for its turn")

    def _give_up(self, at_s: float, place: QueuePosition, reason: RefusalReason, why: str) -> Refusal:
        model = place.req.request.model
        queue = self.queues[model]
        wait_s = self._rate(model).wait_s(at_s, queue.ahead(place.tenant, place.level))
        queue.remove(place)
        self._forget(model)
        return Refusal(place.req, reason, why, _retry(wait_s) if reason == "overloaded" else None)

    def _forget(self, model: str) -> None:
        queue = self.queues.get(model)
        if queue is not None and not queue.count:
            del self.queues[model]

    def _end_s(self, since_s: float, req: RequestState, known: RequestClass) -> float:
        request = req.request
        end_s = since_s + (known.max_wait_s if known.max_wait_s is not None else self._policy.max_wait_s)
        if request.deadline_s is not None:
            end_s = min(end_s, request.deadline_s)
        slo = known.objective(self.room.slo(request.model))
        if slo is not None and not known.late:
            end_s = min(end_s, request.arrival_s + WAIT * slo.ttft_s)
        return end_s

    def _work(self, req: RequestState) -> float:
        """In tokens of prompts: an output token counts for as many as are computed in its part of a step."""
        return req.prompt_tokens + self._costs.get(req.request.model, 1.0) * req.output_tokens

    def _rate(self, model: str) -> ServiceRate:
        rate = self._rates.get(model)
        if rate is None:
            known = [view.facts for view in self._table.ready(model) if view.facts is not None]
            prior = prompts_s = steps_s = 0.0
            for facts in known:
                prompt_s = max(facts.prefill_s_per_token, 1e-12)
                prior += 1.0 / prompt_s
                prompts_s += prompt_s
                steps_s += facts.decode_step_s / max(1, facts.decode_batch)
            rate = self._rates[model] = ServiceRate(prior if prior > 0 else 1.0)
            if known:
                self._costs[model] = steps_s / prompts_s
        return rate


def _retry(wait_s: float) -> float:
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, wait_s))
