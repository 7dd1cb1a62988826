"""Admission: requests that find no room wait in a fair queue per model, or are refused at once.

How long a request without room (`routing/capacity.py`) would wait is predicted from what left the queue recently:

    W      work ahead of it, in prompt tokens, those of answers at their cost in prompt tokens
    r, l   work that left the queue recently: per second, and at a time (the mean, weighted by itself)
    wait   (W + WAIT_DEVIATIONS sqrt(W l)) / r          the mean plus some standard deviations of a Poisson process

If that exceeds MAX_WAIT_SHARE of the TTFT objective, the request is refused at once, unless its class accepts late
answers. When a tenant's queue is full, its least important request makes room for a more important one."""

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
from potluck.core.state.request_state import RUNNING, QueuePosition, RequestKind, RequestState
from potluck.core.state.targets import Target
from potluck.core.values.service import RequestClass

MAX_WAIT_SHARE: Final = 0.45  # Share of the TTFT objective that a request may wait in the queue.
WAIT_DEVIATIONS: Final = 3.0  # Standard deviations added to a predicted wait.
RATE_MEMORY_S: Final = 2.0
MIN_RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 60.0
MAX_FAILED_TRIES: Final = 8  # Requests that find no room before the rest of the queue is left untried.


class Refusal(NamedTuple):
    request: RequestState
    reason: RefusalReason
    detail: str
    retry_after_s: float | None = None


class ServiceRate:
    """The work per second that leaves a queue, and the work at a time; the plan's rate until something was
    observed."""

    __slots__ = ("_since_s", "_spent_s", "_squares", "_work", "_work_at_once")

    def __init__(self, prior: float) -> None:
        self._work = prior * RATE_MEMORY_S
        self._squares = 0.0
        self._spent_s = RATE_MEMORY_S
        self._since_s = -1.0
        self._work_at_once = 0.0

    def start(self, at_s: float) -> None:
        self._since_s = at_s
        self._work_at_once = 0.0

    def count_departure(self, at_s: float, work: float) -> None:
        passed_s = max(0.0, at_s - self._since_s)
        if passed_s > 0:
            keep = exp(-passed_s / RATE_MEMORY_S)
            self._work *= keep
            self._squares *= keep
            self._spent_s = self._spent_s * keep + passed_s
            self._since_s = at_s
            self._work_at_once = 0.0
        self._work += work
        self._squares += work * (2.0 * self._work_at_once + work)
        self._work_at_once += work

    def wait_s(self, at_s: float, ahead: float) -> float:
        """Predicted seconds until this much work has left, with its safety margin. A stalled queue shows at once."""
        passed_s = max(0.0, at_s - self._since_s)
        rate = max(self._work / max(self._spent_s + passed_s, 1e-9), 1e-9)
        work_at_a_time = self._squares / max(self._work, 1e-9)
        return (ahead + WAIT_DEVIATIONS * sqrt(ahead * work_at_a_time)) / rate


class Admission:
    """The queues of all models; changed by the Brain as requests arrive, progress and end."""

    run: Callable[[float, RequestState], Action]
    refuse: Callable[[float, Refusal], list[Action]]
    hold: Callable[[float, RequestState], None]
    """Callbacks for a request that is sent, refused, or finds no replica; set by the owner of requests."""

    def __init__(
        self, policy: Policy, table: RoutingTable, capacity: ReplicaCapacity, router: Router
    ) -> None:
        self._policy = policy
        self._table = table
        self._router = router
        self.weights = {tenant.name: tenant.weight for tenant in policy.tenants}
        self.classes: dict[str, RequestClass] = {item.name: item for item in policy.classes}
        self.room = capacity
        self.queues: dict[str, RequestQueue] = {}  # By model; only queues that are not empty.
        self._rates: dict[str, ServiceRate] = {}
        self._costs: dict[str, float] = {}  # Cost of an output token in prompt tokens, by model.
        self._wait_limits: list[tuple[float, int, QueuePosition]] = []
        self._next_note = 0
        # (deadline, request) of requests that are stopped at their deadline.
        self._deadlines: list[tuple[float, str]] = []

    def must_queue(self, request_state: RequestState, routes: ModelRoutes) -> bool:
        request = request_state.request
        queue = self.queues.get(request.model) if not request_state.attempt else None
        if queue is None:
            return False
        return queue.has_earlier(
            request.tenant, self.classes[request.request_class].matters, routes.kind(request_state)
        )

    def _enqueue(self, at_s: float, request_state: RequestState, kind: RequestKind) -> list[Refusal]:
        """Queue a request without room; returns the refusal of it or of one that it replaces."""
        request = request_state.request
        model, tenant = request.model, request.tenant
        known_class = self.classes[request.request_class]
        queue = self.queues.get(model)
        if queue is None:
            queue = self.queues[model] = RequestQueue(self.weights)
            self._service_rate(model).start(at_s)
        work = self._work(request_state)
        wait_s = self._service_rate(model).wait_s(at_s, queue.work_ahead(tenant, known_class.matters))
        refusals: list[Refusal] = []
        slo = known_class.objective(self.room.slo(model))
        if slo is not None and not known_class.late:
            remaining_s = request.arrival_s + slo.ttft_s - at_s
            most_s = min(MAX_WAIT_SHARE * slo.ttft_s, remaining_s - AHEAD * slo.ttft_s)
            if wait_s > most_s:
                self._drop_empty_queue(model)
                why = (
                    f"it would wait up to {wait_s:.2f} s for its turn; of the {slo.ttft_s:g} s to its first token "
                    f"at most {max(0.0, most_s):.2f} s may pass in waiting"
                )
                return [Refusal(request_state, "overloaded", why, _retry_after_s(wait_s - max(0.0, most_s)))]
        if queue.tenant_count(tenant) >= self._policy.queue_requests:
            least_important = queue.least_important(tenant)
            assert least_important is not None
            queue_full = f"{self._policy.queue_requests} requests of its tenant wait already"
            if least_important.level >= known_class.matters:
                return [Refusal(request_state, "overloaded", queue_full, _retry_after_s(wait_s))]
            why = f"one that matters more came, and {queue_full}"
            refusals.append(self._refuse_waiting(at_s, least_important, "overloaded", why))
            queue = self.queues.setdefault(model, queue)
        position = queue.add(at_s, request_state, known_class.matters, kind, work)
        self._next_note += 1  # Stamps of positions are unique only within their queue.
        heappush(
            self._wait_limits,
            (self._wait_limit_s(at_s, request_state, known_class), self._next_note, position),
        )
        return refusals

    def _next_request(self, at_s: float, model: str) -> RequestState | Refusal | None:
        """The next request in the queue; a refusal if its time is over."""
        queue = self.queues.get(model)
        position = queue.head() if queue is not None else None
        if queue is None or position is None:
            return None
        limit_s = self._wait_limit_s(
            position.since_s, position.request, self.classes[position.request.request.request_class]
        )
        if at_s >= limit_s:
            return self._expire(at_s, position)
        self.room.tenants.crowded = self.room.several and queue.has_other_tenants(
            position.tenant, position.level
        )
        return position.request

    def _remaining_ttft_s(self, at_s: float, request: RequestState) -> float:
        """Seconds until its first token is due; 0 where late answers are accepted or the model has no SLO."""
        known_class = self.classes[request.request.request_class]
        slo = known_class.objective(self.room.slo(request.request.model))
        return (
            request.request.arrival_s + slo.ttft_s - at_s if slo is not None and not known_class.late else 0.0
        )

    def _is_outranked(self, request: RequestState) -> bool:
        queue = self.queues.get(request.request.model)
        return queue is not None and queue.highest_level > self.classes[request.request.request_class].matters

    def remove(self, request: RequestState) -> None:
        position, model = request.position, request.request.model
        if position is not None:
            self.queues[model].remove(position)
            self._drop_empty_queue(model)

    def _pop_expired(self, at_s: float) -> list[Refusal]:
        expired = []
        while self._wait_limits and self._wait_limits[0][0] <= at_s:
            position = heappop(self._wait_limits)[2]
            if position.request.position is position:
                expired.append(self._expire(at_s, position))
        if len(self._wait_limits) > 64 and len(self._wait_limits) > 4 * sum(
            queue.count for queue in self.queues.values()
        ):
            self._wait_limits = sorted(end for end in self._wait_limits if end[2].request.position is end[2])
        return expired

    def watch(self, request: RequestState) -> None:
        """Register a request that is to be stopped at its deadline, if its class says so."""
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

    def admit_or_queue(self, at_s: float, request: RequestState, routes: ModelRoutes) -> list[Action]:
        if not self._is_outranked(request) and self._send_in_time(at_s, request, flows=True):
            return [self.run(at_s, request)]
        refusals = self._enqueue(at_s, request, routes.kind(request))
        if refusals and refusals[0].request is request:
            sent = not self._is_outranked(request) and self._send_in_time(at_s, request)
            return [self.run(at_s, request)] if sent else self.refuse(at_s, refusals[0])
        return self._refuse_or_send(at_s, refusals)

    def _refuse_or_send(self, at_s: float, refusals: Iterable[Refusal]) -> list[Action]:
        """Refuse requests that waited, except those that another target can still serve in time."""
        actions: list[Action] = []
        for refusal in refusals:
            if refusal.reason == "overloaded" and self._send_in_time(at_s, refusal.request):
                self._service_rate(refusal.request.request.model).count_departure(
                    at_s, self._work(refusal.request)
                )
                actions.append(self.run(at_s, refusal.request))
            else:
                actions += self.refuse(at_s, refusal)
        return actions

    def _send_in_time(self, at_s: float, request: RequestState, flows: bool = False) -> bool:
        """Send a request to a target that meets its TTFT although it has no room by its limits, over `flows` alone
        if so; returns whether one does."""
        routes = self._table.models.get(request.request.model)
        if routes is None or request.avoid:
            return False
        route_options = self._table.options(routes, routes.kind(request)[0], request.total_tokens)
        if flows and (
            route_options.simple or len(route_options.turns) > 1
        ):  # With several options, the plan's proportions hold.
            return False
        return self._router.send_in_time(request, route_options, self._remaining_ttft_s(at_s, request))

    def capacity_freed(self, at_s: float, replica: ReplicaState) -> list[Action]:
        replica_spec = replica.member
        queue = self.queues.get(replica_spec.model)
        if queue is None:
            return []
        queue.unblock()
        target = self._table.groups.get(replica_spec.unit) or self._table.singles.get(replica_spec.id)
        return self._send_waiting(at_s, replica_spec.model, target) if target is not None else []

    def tick(self, at_s: float) -> list[Action]:
        return self._refuse_or_send(at_s, self._pop_expired(at_s)) + self.retry_all(at_s)

    def retry_all(self, at_s: float) -> list[Action]:
        """Try all waiting requests on all targets again."""
        actions: list[Action] = []
        for model, queue in list(self.queues.items()):
            queue.unblock()
            actions += self._send_waiting(at_s, model, None)
        return actions

    def _send_waiting(self, at_s: float, model: str, target: Target | None) -> list[Action]:
        """Send waiting requests in order while they find room; after MAX_FAILED_TRIES failures the rest waits."""
        actions: list[Action] = []
        failed_tries = 0
        self.room.tenants.now_s = at_s
        router, routes = self._router, self._table.models.get(model)
        while routes is not None and (request := self._next_request(at_s, model)) is not None:
            if isinstance(request, Refusal):
                actions += self._refuse_or_send(at_s, [request])
                continue
            result = (
                router.send(request, routes) if target is None else router.send_to(target, request, routes)
            )
            position = request.position
            assert position is not None
            if result is RoutingResult.FULL:
                self.queues[model].blocked.add((position.tenant, position.kind))
                failed_tries += 1
                if failed_tries >= MAX_FAILED_TRIES:
                    self.queues[model].has_untried = True
                    break
                continue
            self._service_rate(model).count_departure(at_s, position.work)
            self.queues[model].take(position)
            self._drop_empty_queue(model)
            if result is SENT:
                actions.append(self.run(at_s, request))
            else:
                self.hold(at_s, request)
        return actions

    def _expire(self, at_s: float, position: QueuePosition) -> Refusal:
        request = position.request.request
        deadline_s = request.deadline_s
        if deadline_s is not None and at_s >= deadline_s:
            return self._refuse_waiting(
                at_s, position, "deadline", f"waited for its turn until {deadline_s:g} s"
            )
        return self._refuse_waiting(
            at_s, position, "overloaded", f"waited {at_s - position.since_s:.2f} s for its turn"
        )

    def _refuse_waiting(
        self, at_s: float, position: QueuePosition, reason: RefusalReason, why: str
    ) -> Refusal:
        model = position.request.request.model
        queue = self.queues[model]
        wait_s = self._service_rate(model).wait_s(at_s, queue.work_ahead(position.tenant, position.level))
        queue.remove(position)
        self._drop_empty_queue(model)
        return Refusal(
            position.request, reason, why, _retry_after_s(wait_s) if reason == "overloaded" else None
        )

    def _drop_empty_queue(self, model: str) -> None:
        queue = self.queues.get(model)
        if queue is not None and not queue.count:
            del self.queues[model]

    def _wait_limit_s(self, since_s: float, request_state: RequestState, known_class: RequestClass) -> float:
        request = request_state.request
        end_s = since_s + (
            known_class.max_wait_s if known_class.max_wait_s is not None else self._policy.max_wait_s
        )
        if request.deadline_s is not None:
            end_s = min(end_s, request.deadline_s)
        slo = known_class.objective(self.room.slo(request.model))
        if slo is not None and not known_class.late:
            end_s = min(end_s, request.arrival_s + MAX_WAIT_SHARE * slo.ttft_s)
        return end_s

    def _work(self, request: RequestState) -> float:
        """Work of a request in prompt tokens: an output token counts as many as are computed in its share of a
        decode step."""
        return request.prompt_tokens + self._costs.get(request.request.model, 1.0) * request.output_tokens

    def _service_rate(self, model: str) -> ServiceRate:
        rate = self._rates.get(model)
        if rate is None:
            replica_facts = [
                replica.facts for replica in self._table.ready(model) if replica.facts is not None
            ]
            prior_rate = prompts_s = steps_s = 0.0
            for facts in replica_facts:
                prompt_s = max(facts.prefill_s_per_token, 1e-12)
                prior_rate += 1.0 / prompt_s
                prompts_s += prompt_s
                steps_s += facts.decode_step_s / max(1, facts.decode_batch)
            rate = self._rates[model] = ServiceRate(prior_rate if prior_rate > 0 else 1.0)
            if replica_facts:
                self._costs[model] = steps_s / prompts_s
        return rate


def _retry_after_s(wait_s: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, wait_s))
