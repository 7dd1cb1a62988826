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

    def __init__(
        self, policy: Policy, table: RoutingTable, capacity: ReplicaCapacity, router: Router
    ) -> None:
        self._policy = policy
        self._table = table
        self._router = router
        self.weights = {tenant.name: tenant.weight for tenant in policy.tenants}
        self.classes: dict[str, RequestClass] = {item.name: item for item in policy.classes}
        self.room = capacity
        self.queues: dict[str, RequestQueue] = {}  # By model; only those that somebody waits in.
        self._rates: dict[str, ServiceRate] = {}
        self._costs: dict[str, float] = {}  # Prompt tokens that an output token counts for, by model.
        self._ends: list[tuple[float, int, QueuePosition]] = []
        self._notes = 0
        self._deadlines: list[tuple[float, str]] = []  # Of requests that are stopped then though they run.

    def behind(self, request_state: RequestState, routes: ModelRoutes) -> bool:
        request = request_state.request
        queue = self.queues.get(request.model) if not request_state.attempt else None
        if queue is None:
            return False
        return queue.waits(
            request.tenant, self.classes[request.request_class].matters, routes.kind(request_state)
        )

    def _wait(self, at_s: float, request_state: RequestState, kind: Kind) -> list[Refusal]:
        """Let a request wait that finds no room, or say why it, or another in its place, is refused."""
        request = request_state.request
        model, tenant = request.model, request.tenant
        known_class = self.classes[request.request_class]
        queue = self.queues.get(model)
        if queue is None:
            queue = self.queues[model] = RequestQueue(self.weights)
            self._rate(model).began(at_s)
        work = self._work(request_state)
        wait_s = self._rate(model).wait_s(at_s, queue.ahead(tenant, known_class.matters))
        refused: list[Refusal] = []
        slo = known_class.objective(self.room.slo(model))
        if slo is not None and not known_class.late:
            left_s = request.arrival_s + slo.ttft_s - at_s
            most_s = min(WAIT * slo.ttft_s, left_s - AHEAD * slo.ttft_s)
            if wait_s > most_s:
                self._forget(model)
                why = (
                    f"it would wait up to {wait_s:.2f} s for its turn; of the {slo.ttft_s:g} s to its first token "
                    f"at most {max(0.0, most_s):.2f} s may pass in waiting"
                )
                return [Refusal(request_state, "overloaded", why, _retry(wait_s - max(0.0, most_s)))]
        if queue.tenant_count(tenant) >= self._policy.queue_requests:
            least = queue.least(tenant)
            assert least is not None
            full = f"{self._policy.queue_requests} requests of its tenant wait already"
            if least.level >= known_class.matters:
                return [Refusal(request_state, "overloaded", full, _retry(wait_s))]
            why = f"one that matters more came, and {full}"
            refused.append(self._give_up(at_s, least, "overloaded", why))
            queue = self.queues.setdefault(model, queue)
        position = queue.add(at_s, request_state, known_class.matters, kind, work)
        self._notes += 1  # a place's stamp is unlike only those of its own queue
        heappush(self._ends, (self._end_s(at_s, request_state, known_class), self._notes, position))
        return refused

    def _next(self, at_s: float, model: str) -> RequestState | Refusal | None:
        """Whose turn it is; a refusal when it is too late for that one."""
        queue = self.queues.get(model)
        position = queue.head() if queue is not None else None
        if queue is None or position is None:
            return None
        late_s = self._end_s(position.since_s, position.req, self.classes[position.req.request.request_class])
        if at_s >= late_s:
            return self._too_late(at_s, position)
        self.room.tenants.crowded = self.room.several and queue.others(position.tenant, position.level)
        return position.req

    def _left_s(self, at_s: float, request: RequestState) -> float:
        """Until its first token is due; 0 where late answers are wanted too, or nothing was promised."""
        known_class = self.classes[request.request.request_class]
        slo = known_class.objective(self.room.slo(request.request.model))
        return (
            request.request.arrival_s + slo.ttft_s - at_s if slo is not None and not known_class.late else 0.0
        )

    def _outranked(self, request: RequestState) -> bool:
        queue = self.queues.get(request.request.model)
        return queue is not None and queue.matters > self.classes[request.request.request_class].matters

    def remove(self, request: RequestState) -> None:
        position, model = request.place, request.request.model
        if position is not None:
            self.queues[model].remove(position)
            self._forget(model)

    def _expired(self, at_s: float) -> list[Refusal]:
        expired = []
        while self._ends and self._ends[0][0] <= at_s:
            position = heappop(self._ends)[2]
            if position.req.place is position:
                expired.append(self._too_late(at_s, position))
        if len(self._ends) > 64 and len(self._ends) > 4 * sum(queue.count for queue in self.queues.values()):
            self._ends = sorted(end for end in self._ends if end[2].req.place is end[2])
        return expired

    def watch(self, request: RequestState) -> None:
        """It is to be stopped at its deadline if its class says so."""
        deadline_s = request.request.deadline_s
        if deadline_s is not None and self.classes[request.request.request_class].stops:
            heappush(self._deadlines, (deadline_s, request.request.id))

    def overdue(self, at_s: float, flights: dict[str, RequestState]) -> list[RequestState]:
        request_states = []
        while self._deadlines and self._deadlines[0][0] <= at_s:
            request = flights.get(heappop(self._deadlines)[1])
            if request is not None and request.state == RUNNING:
                request_states.append(request)
        return request_states

    def line_up(self, at_s: float, request: RequestState, routes: ModelRoutes) -> list[Action]:
        if not self._outranked(request) and self._in_time(at_s, request, flows=True):
            return [self.run(at_s, request)]
        refusals = self._wait(at_s, request, routes.kind(request))
        if refusals and refusals[0].req is request:
            goes = not self._outranked(request) and self._in_time(at_s, request)
            return [self.run(at_s, request)] if goes else self.refuse(at_s, refusals[0])
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

    def _in_time(self, at_s: float, request: RequestState, flows: bool = False) -> bool:
        """Send it where it is in time though there is no room, over `flows` alone if so; whether that is anywhere."""
        routes = self._table.models.get(request.request.model)
        if routes is None or request.avoid:
            return False
        route_options = self._table.options(routes, routes.kind(request)[0], request.total_tokens)
        if flows and (
            route_options.simple or len(route_options.turns) > 1
        ):  # with several ways, turns are as planned
            return False
        return self._router.send_in_time(request, route_options, self._left_s(at_s, request))

    def freed(self, at_s: float, replica: ReplicaState) -> list[Action]:
        replica_spec = replica.member
        queue = self.queues.get(replica_spec.model)
        if queue is None:
            return []
        queue.again()
        target = self._table.groups.get(replica_spec.unit) or self._table.singles.get(replica_spec.id)
        return self._go(at_s, replica_spec.model, target) if target is not None else []

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
        router, routes = self._router, self._table.models.get(model)
        while routes is not None and (request := self._next(at_s, model)) is not None:
            if isinstance(request, Refusal):
                actions += self._turn_away(at_s, [request])
                continue
            answer = (
                router.send(request, routes) if target is None else router.send_to(target, request, routes)
            )
            position = request.place
            assert position is not None
            if answer is RoutingResult.FULL:
                self.queues[model].stuck.add((position.tenant, position.kind))
                misses += 1
                if misses >= MOST_MISSES:
                    self.queues[model].cut = True
                    break
                continue
            self._rate(model).took(at_s, position.work)
            self.queues[model].take(position)
            self._forget(model)
            if answer is SENT:
                actions.append(self.run(at_s, request))
            else:
                self.hold(at_s, request)
        return actions

    def _too_late(self, at_s: float, position: QueuePosition) -> Refusal:
        request = position.req.request
        deadline_s = request.deadline_s
        if deadline_s is not None and at_s >= deadline_s:
            return self._give_up(at_s, position, "deadline", f"waited for its turn until {deadline_s:g} s")
        return self._give_up(
            at_s, position, "overloaded", f"waited {at_s - position.since_s:.2f} s for its turn"
        )

    def _give_up(self, at_s: float, position: QueuePosition, reason: RefusalReason, why: str) -> Refusal:
        model = position.req.request.model
        queue = self.queues[model]
        wait_s = self._rate(model).wait_s(at_s, queue.ahead(position.tenant, position.level))
        queue.remove(position)
        self._forget(model)
        return Refusal(position.req, reason, why, _retry(wait_s) if reason == "overloaded" else None)

    def _forget(self, model: str) -> None:
        queue = self.queues.get(model)
        if queue is not None and not queue.count:
            del self.queues[model]

    def _end_s(self, since_s: float, request_state: RequestState, known_class: RequestClass) -> float:
        request = request_state.request
        end_s = since_s + (
            known_class.max_wait_s if known_class.max_wait_s is not None else self._policy.max_wait_s
        )
        if request.deadline_s is not None:
            end_s = min(end_s, request.deadline_s)
        slo = known_class.objective(self.room.slo(request.model))
        if slo is not None and not known_class.late:
            end_s = min(end_s, request.arrival_s + WAIT * slo.ttft_s)
        return end_s

    def _work(self, request: RequestState) -> float:
        """In tokens of prompts: an output token counts for as many as are computed in its part of a step."""
        return request.prompt_tokens + self._costs.get(request.request.model, 1.0) * request.output_tokens

    def _rate(self, model: str) -> ServiceRate:
        rate = self._rates.get(model)
        if rate is None:
            known = [replica.facts for replica in self._table.ready(model) if replica.facts is not None]
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
