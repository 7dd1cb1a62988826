"""Requests in progress: accepted, held, sent, handed over, until each ends once. Only `Requests` and the router
change them."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final

from potluck.core.admission.admission import Admission, Refusal
from potluck.core.brain.prefix_caches import PrefixCaches
from potluck.core.routing.balance import balance_rule
from potluck.core.routing.capacity import ReplicaCapacity, crowded
from potluck.core.routing.learned_speeds import LearnedSpeeds
from potluck.core.routing.prefix_affinity import PrefixAffinity
from potluck.core.routing.router import SENT, Router, RoutingResult
from potluck.core.routing.routing_table import ModelRoutes, RoutingTable
from potluck.core.routing.split import MAX_LOW_END_REQUESTS
from potluck.core.scaling.autoscaler import Autoscaler
from potluck.core.state import events
from potluck.core.state.actions import Abort, Action, RefusalReason, Refuse
from potluck.core.state.facts import FleetFacts
from potluck.core.state.fleet import FleetState, ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import HELD, RUNNING, WAITING, RequestState
from potluck.core.state.targets import Target
from potluck.core.values.route import Route

MIN_EXPIRY_ENTRIES: Final = 4096
MAX_RECENTLY_ENDED: Final = 1 << 12  # Repeated events of a request come within seconds.


class BrainState:
    """The parts of the Brain, built once and shared by all that decide about requests."""

    def __init__(self, facts: FleetFacts, policy: Policy) -> None:
        rule = balance_rule(policy.balance)
        self.facts, self.policy = facts, policy
        self.fleet = FleetState(facts.replicas)
        self.speeds = LearnedSpeeds(facts, self.fleet, rule.learns)
        self.table = RoutingTable(facts, policy, rule, self.fleet)
        self.caches = PrefixCaches(policy, self.fleet)
        self.affinity = PrefixAffinity(policy, self.table, self.caches.index)
        capacity = ReplicaCapacity(policy, self.table)
        bound = capacity if policy.admission else None
        self.router = Router(policy, self.table, self.affinity, self.speeds, bound)
        self.admission = Admission(policy, self.table, capacity, self.router)
        self.autoscaler = Autoscaler(facts, policy, self.fleet)


class Requests:
    def __init__(self, state: BrainState) -> None:
        self._facts = state.facts
        self._policy = state.policy
        self._fleet = state.fleet
        self._table = state.table
        self._affinity = state.affinity
        self._router = state.router
        self._autoscaler = state.autoscaler
        self._speeds = state.speeds
        self._admission = admission = state.admission
        admission.run, admission.refuse, admission.hold = self.run, self._refused_by_admission, self._hold
        self._room = admission.room
        self._tenants = admission.room.tenants
        self._queues = admission.queues
        self._weights = admission.weights
        self._has_admission = state.policy.admission
        self._watches = state.autoscaler.watches
        self.open: dict[str, RequestState] = {}
        self.held = WaitingRequests(self.open)
        self._ended: set[str] = set()
        self._ended_before: set[str] = set()
        """Recently ended requests, so that none starts again: between MAX_RECENTLY_ENDED and twice as many."""
        self.doubtful: dict[str, None] = {}
        """Held although replicas were ready, because these failed the request or may be failing."""

    def arrived(self, at_s: float, event: events.RequestArrived) -> list[Action]:
        request = event.request
        name = request.id
        if self.is_known(name):
            return []
        request_state = RequestState(request)
        routes = self._table.models.get(request.model)
        if routes is None and request.model not in self._facts.models:
            what = f"no model {request.model!r} is served here"
            return [self._refusal(at_s, request_state, "unknown_model", what)]
        if request.request_class not in self._admission.classes:
            known = ", ".join(self._admission.classes)
            what = f"no class {request.request_class!r} is known here; classes are {known}"
            return [self._refusal(at_s, request_state, "unknown_class", what)]
        if self._autoscaler.scale_to_zero:
            self._autoscaler.asked(at_s, request.model)
        if self._watches:
            cached_tokens = self._affinity.most_cached(request_state) if request.blocks else 0
            self._autoscaler.window.arrived(at_s, request, cached_tokens)
        if routes is not None and request_state.total_tokens > routes.limit_tokens:
            return [self._refusal(at_s, request_state, "too_long", routes.too_long(request_state))]
        if request.deadline_s is not None and at_s >= request.deadline_s:
            late = f"came after its deadline at {request.deadline_s:g} s"
            return [self._refusal(at_s, request_state, "deadline", late)]
        self.open[name] = request_state
        self._record_tenant(at_s, request_state)
        return self._send(at_s, request_state, routes)

    def _record_tenant(self, at_s: float, request_state: RequestState) -> None:
        """Record an accepted request's tenant weight, and its deadline if it is to be stopped then."""
        request = request_state.request
        if request.deadline_s is not None:
            self._admission.watch(request_state)
        if self._weights:
            request_state.weight = self._weights.get(request.tenant, 1.0)
        if self._has_admission and (self._room.several or request.tenant is not self._room.tenant):
            self._tenants.asks(at_s, request_state)

    def adopted(self, at_s: float, event: events.RequestAdopted) -> list[Action]:
        """Adopt a request of an earlier Brain process: it continues on its replicas, or is sent again."""
        request = event.request
        if self.is_known(request.id):
            return []
        request_state = self.open[request.id] = RequestState(request)
        request_state.attempt, request_state.streamed_tokens = event.attempt, event.streamed_tokens
        request_state.prompt_tokens += event.streamed_tokens
        self._record_tenant(at_s, request_state)
        if event.route is not None and self._resumed(request_state, event.route, event.done, event.first):
            request_state.last_seen_s = at_s
            if self._room.several:
                self._tenants.sent(request_state)
            return []
        request_state.attempt += 1
        return self.dispatch(at_s, request_state)

    def _resumed(self, request: RequestState, route: Route, done: int, first: bool) -> bool:
        """Count an adopted request on its replicas; False if one of them is unknown."""
        views = [self._fleet.views.get(segment.replica) for segment in route.segments]
        replica_states = [replica for replica in views if replica is not None]
        if len(replica_states) < len(views):
            return False
        last_replica = replica_states.pop()
        request.route, request.state, request.last = route, RUNNING, last_replica
        request.earlier = tuple(
            (replica, segment.stop - segment.start)
            for replica, segment in zip(replica_states, route.segments[:-1], strict=True)
            if segment.stop is not None
        )
        request.done = len(request.earlier) if first else min(done, len(request.earlier))
        request.last_tokens = 0 if first else max(0, request.prompt_tokens - route.segments[-1].start)
        for replica, tokens in request.earlier[request.done :]:
            self._fleet.open(replica, tokens, 0)
        self._fleet.open(last_replica, request.last_tokens, request.total_tokens)
        return True

    def running(self, request: str, attempt: int) -> RequestState | None:
        request_state = self.open.get(request)
        return (
            request_state
            if request_state is not None
            and request_state.state == RUNNING
            and request_state.attempt == attempt
            else None
        )

    def is_known(self, request: str) -> bool:
        return request in self.open or request in self._ended or request in self._ended_before

    def dispatch(self, at_s: float, request: RequestState) -> list[Action]:
        """Send a request that was held or failed; refuse it if a new plan has no replica large enough."""
        routes = self._table.models.get(request.request.model)
        if routes is not None and request.total_tokens > routes.limit_tokens:
            return self.refuse(at_s, request, "too_long", routes.too_long(request))
        return self._send(at_s, request, routes)

    def _send(self, at_s: float, request: RequestState, routes: ModelRoutes | None) -> list[Action]:
        if routes is not None:
            if self._queues and self._admission.must_queue(request, routes):
                return self._admission.admit_or_queue(at_s, request, routes)
            if self._room.several:
                self._tenants.now_s = at_s
            answer = self._router.send(request, routes)
            if answer is SENT:
                return [self.run(at_s, request)]
            if answer is RoutingResult.FULL:
                return self._admission.admit_or_queue(at_s, request, routes)
            if answer is RoutingResult.WAITS_FOR_PAIR:
                self.held.wait(at_s, request, self._policy)
                return []
        self.held.add(at_s, request, self._policy)
        if request.avoid:
            self.doubtful[request.request.id] = None
        return []

    def run(self, at_s: float, request: RequestState) -> Action:
        request.held_s = -1.0
        request.last_seen_s = at_s
        if request.earlier:
            self._speeds.began(at_s, request, request.earlier[0][0])
        elif request.last is not None:
            request.sent = (at_s, request.last.done_s, request.last.done_prompts)
        if self._room.several:
            self._tenants.sent(request)
        return request.run()

    def _refused_by_admission(self, at_s: float, refusal: Refusal) -> list[Action]:
        self.open.pop(refusal.request.request.id, None)
        action = self._refusal(at_s, refusal.request, refusal.reason, refusal.detail)
        return [action._replace(retry_after_s=refusal.retry_after_s)]

    def _hold(self, at_s: float, request: RequestState) -> None:
        hold = self.held.wait if request.state == WAITING else self.held.add
        hold(at_s, request, self._policy)

    def segment_done(self, at_s: float, event: events.SegmentDone) -> list[Action]:
        request = self.running(event.request, event.attempt)
        actions: list[Action] = []
        while request is not None and request.done <= event.segment and request.done < len(request.earlier):
            actions += self._segment_handed_over(at_s, request)
        return actions

    def computed(self, at_s: float, event: events.SegmentComputed) -> list[Action]:
        """A replica computed its part of a prompt, and has room for the next while the KV is in transfer."""
        request = self.running(event.request, event.attempt)
        if request is None:
            return []
        if event.segment != request.done or event.segment >= len(request.earlier) or request.leaves_region():
            return []
        replica, tokens = request.computed()
        if tokens:
            self._fleet.prefilled(replica, tokens)
            if request.timed_since_s >= 0:
                self._speeds.handed(at_s, request, replica)
        leaves = request.pair is not None and request.done == len(request.earlier) - 1
        actions = self._leave_pair(at_s, request) if leaves else []
        return actions + self._admission.capacity_freed(at_s, replica) if self._queues else actions

    def _segment_handed_over(self, at_s: float, request: RequestState) -> list[Action]:
        replica, tokens = request.earlier[request.done]
        if tokens:
            self._fleet.handed_over(replica, tokens)
        else:
            self._fleet.close(replica, 0, 0)
        request.done += 1
        if request.long or request.light_tokens:
            self._tenants.computed(request)
        going_on = request.done < len(request.earlier)
        onto = request.earlier[request.done][0] if going_on else request.last
        if request.link or request.transfers:
            self._router.links.segment_handed_over(request, going_on)
        if request.timed_since_s >= 0 and onto is not None:
            self._speeds.handed(at_s, request, replica, replica.member.region == onto.member.region)
        actions: list[Action] = []
        if going_on:
            self._speeds.began(at_s, request, request.earlier[request.done][0])
        else:
            self._prompt_computed(request)
            actions = self._leave_pair(at_s, request) if request.pair is not None else []
        return actions + self._admission.capacity_freed(at_s, replica) if self._queues else actions

    def _prompt_computed(self, request: RequestState) -> None:
        if request.yielding is not None:
            self._router.deadlines.stop_yielding(request)
        if len(request.added_loads) == 2:
            (target, load), rest = request.added_loads
            target.remove_load(load)
            request.added_loads = (rest,)

    def first_token(self, at_s: float, event: events.FirstToken) -> list[Action]:
        request = self.running(event.request, event.attempt)
        if request is None:
            return []
        actions: list[Action] = []
        while request.done < len(request.earlier):
            actions += self._segment_handed_over(at_s, request)
        if request.first_s < 0:
            request.first_s = at_s
        if request.last is not None:
            if request.last_tokens:
                self._fleet.prefilled(request.last, request.last_tokens)
                request.last_tokens = 0
                self._prompt_computed(request)
                if request.sent[0] >= 0:
                    self._speeds.computed(at_s, request, request.last)
            self._speeds.began(at_s, request, request.last)
            if request.long or request.light_tokens:
                self._tenants.computed(request)
            if self._queues:
                actions += self._admission.capacity_freed(at_s, request.last)
        return actions

    def finished(self, at_s: float, event: events.RequestFinished) -> list[Action]:
        request = self.running(event.request, event.attempt)
        if request is None:
            return []
        del self.open[event.request]
        self._ended.add(event.request)  # `end`, written out
        if len(self._ended) >= MAX_RECENTLY_ENDED:
            self._ended_before, self._ended = self._ended, set()
        last_replica = request.last
        if last_replica is not None and last_replica.strikes:
            self._fleet.clear_strikes(last_replica)
        if request.mixed:
            self._tenants.isolation.answered(request, event.output_tokens)
        if last_replica is not None and request.first_s >= 0 and (crowded(last_replica) or request.heavy):
            self._room.ended(at_s, request, last_replica, event.output_tokens)
        if self._watches:
            self._autoscaler.finished(at_s, request, event.output_tokens)
        if request.timed_since_s >= 0:
            self._speeds.ended(at_s, request, event.output_tokens)
        elif request.first_s < 0:
            self._speeds.finished_untimed(request, event.output_tokens)
        return self.release(at_s, request)

    def cancelled(self, at_s: float, event: events.RequestCancelled) -> list[Action]:
        """The user cancelled, perhaps before the request arrived; then it is not started at all."""
        self.end(event.request)
        request = self.open.pop(event.request, None)
        if request is None:
            return []
        self.held.remove(request)
        self._admission.remove(request)
        return self.abandon(request) + self.release(at_s, request)

    def end(self, request: str) -> None:
        self._ended.add(request)
        if len(self._ended) >= MAX_RECENTLY_ENDED:
            self._ended_before, self._ended = self._ended, set()

    def abandon(self, request: RequestState, lost: str = "") -> list[Action]:
        """Abort a request on the replicas that still work on it, except a lost one."""
        there = tuple(name for name in request.workers() if name != lost and name in self._fleet.views)
        return [Abort(request.request.id, there)] if there else []

    def release(self, at_s: float, request: RequestState) -> list[Action]:
        """Remove a request from all load counts; requests that this makes room for may be sent."""
        last_replica: ReplicaState | None = None
        if request.state == RUNNING and request.last is not None:
            if request.earlier:
                for replica, tokens in request.earlier[request.done :]:
                    self._fleet.close(replica, tokens, 0)
                request.earlier, request.done = (), 0
            self._fleet.close(request.last, request.last_tokens, request.total_tokens)
            last_replica, request.last = request.last, None
            if request.mixed:
                self._tenants.left(request)
        request.timed_since_s = -1.0
        if request.yielding is not None:
            self._router.deadlines.stop_yielding(request)
        if request.link or request.transfers:
            self._router.links.request_ended(request)
        if request.added_loads:
            for target, load in request.added_loads:
                target.remove_load(load)
            request.added_loads = ()
        actions = self._leave_pair(at_s, request) if request.pair is not None else []
        if self._queues and last_replica is not None:
            actions += self._admission.capacity_freed(at_s, last_replica)
        return actions

    def _leave_pair(self, at_s: float, request: RequestState) -> list[Action]:
        pair_target, request.pair = request.pair, None
        if pair_target is None:
            return []
        if request.state == WAITING:
            pair_target.waiting.remove(request.request.id)
            return []
        pair_target.in_low -= 1
        return self.admit(at_s, pair_target)

    def admit(self, at_s: float, pair_target: Target) -> list[Action]:
        """Send requests that wait for a pair's low-end replica, or route them anew when the pair is gone."""
        actions: list[Action] = []
        while pair_target.waiting and (
            not pair_target.usable or pair_target.in_low < MAX_LOW_END_REQUESTS * len(pair_target.prefills)
        ):
            request = self.open.get(pair_target.waiting.popleft())
            if request is None or request.state != WAITING or request.pair is not pair_target:
                continue
            if pair_target.usable:
                self._router.send_to_pair(pair_target, request)
                actions.append(self.run(at_s, request))
            else:
                request.pair = None
                self.release(at_s, request)
                actions += self.dispatch(at_s, request)
        return actions

    def refuse(self, at_s: float, request: RequestState, reason: RefusalReason, detail: str) -> list[Action]:
        self.open.pop(request.request.id, None)
        return [self._refusal(at_s, request, reason, detail)]

    def _refusal(self, at_s: float, request: RequestState, reason: RefusalReason, detail: str) -> Refuse:
        self.end(request.request.id)
        if self._watches and reason != "unknown_model":
            self._autoscaler.window.refused(at_s, request.request.model)
        return Refuse(request.request.id, reason, detail)

    def sizes(self) -> dict[str, int]:
        open_, held, doubtful = len(self.open), len(self.held), len(self.doubtful)
        ended = len(self._ended) + len(self._ended_before)
        return {"open": open_, "held": held, "doubtful": doubtful, "ended": ended}

    # When the fleet changes.

    def changed(self, at_s: float, replica: ReplicaState) -> list[Action]:
        """Update routing after a replica came, went or changed, and move requests that wait for a pair that is
        gone."""
        unit = replica.member.unit
        group = self._table.groups.get(unit)
        self._table.update(unit, replica)
        if self._has_admission:
            self._fleet.set_easy_limits(replica, self._room.easiness(replica))
        actions = self.admit(at_s, group) if group is not None and group.waiting else []
        return actions + self._admission.capacity_freed(at_s, replica) if self._queues else actions

    def planned(self, at_s: float) -> list[Action]:
        actions: list[Action] = []
        for pair_target in list(self._table.groups.values()):
            actions += self.admit(at_s, pair_target)
        actions += self.retry_held(at_s, self.held.models())
        return actions + self._admission.retry_all(at_s)

    def tick(self, at_s: float) -> list[Action]:
        actions: list[Action] = []
        for request in self.held.expired(at_s):
            deadline_s, waited_s = request.request.deadline_s, at_s - request.held_s
            self._admission.remove(request)
            actions += self.release(at_s, request)
            if deadline_s is not None and at_s >= deadline_s:
                actions += self.refuse(at_s, request, "deadline", f"no replica was ready by {deadline_s:g} s")
            else:
                waited = f"no replica was ready for {waited_s:g} s"
                actions += self.refuse(at_s, request, "no_capacity", waited)
        for request in self._admission.overdue(at_s, self.open):
            actions += self.abandon(request) + self.release(at_s, request)
            late = f"still ran at its deadline at {request.request.deadline_s:g} s"
            actions += self.refuse(at_s, request, "deadline", late)
        return actions + self._admission.tick(at_s)

    def retry_held(self, at_s: float, models: Iterable[str], most: int | None = None) -> list[Action]:
        actions: list[Action] = []
        for model in models:
            for name in self.held.take(model, most):
                actions += self.dispatch(at_s, self.open[name])
        return actions


class WaitingRequests:
    """Requests held until a replica is ready, by model in order of arrival, with their expiry times."""

    __slots__ = ("_expiries", "_models", "_most", "_open", "_sequence")

    def __init__(self, requests: dict[str, RequestState]) -> None:
        self._open = requests
        self._models: dict[str, dict[str, None]] = {}
        self._expiries: list[tuple[float, int, str]] = []
        self._sequence = 0
        self._most = MIN_EXPIRY_ENTRIES
        """Limit of expiry entries; above it, entries of requests that no longer wait are dropped."""

    def __len__(self) -> int:
        return sum(len(model) for model in self._models.values())

    def counts(self) -> dict[str, int]:
        return {model: len(item) for model, item in self._models.items() if item}

    def add(self, at_s: float, request_state: RequestState, policy: Policy) -> None:
        request = request_state.request
        self._models.setdefault(request.model, {})[request.id] = None
        request_state.state = HELD
        self._begin(at_s, request_state, policy)

    def wait(self, at_s: float, request: RequestState, policy: Policy) -> None:
        assert request.state == WAITING
        self._begin(at_s, request, policy)

    def _begin(self, at_s: float, request: RequestState, policy: Policy) -> None:
        """Start the wait time; a request that was held or waiting already keeps its start."""
        if request.held_s >= 0:
            return
        request.held_s = at_s
        expiry_s = at_s + policy.max_wait_s
        deadline_s = request.request.deadline_s
        if deadline_s is not None:
            expiry_s = min(expiry_s, deadline_s)
        self._sequence += 1
        request.wait_number = self._sequence
        heappush(self._expiries, (expiry_s, self._sequence, request.request.id))
        if len(self._expiries) > self._most:
            self._expiries = [expiry for expiry in self._expiries if self._waits(*expiry[1:]) is not None]
            heapify(self._expiries)
            self._most = MIN_EXPIRY_ENTRIES + 2 * len(self._expiries)

    def remove(self, request: RequestState) -> None:
        self._models.get(request.request.model, {}).pop(request.request.id, None)

    def take(self, model: str, most: int | None = None) -> list[str]:
        waiting = self._models.get(model, {})
        taken = list(islice(waiting, most))
        for name in taken:
            del waiting[name]
        return taken

    def models(self) -> list[str]:
        return [model for model, item in self._models.items() if item]

    def expired(self, at_s: float) -> list[RequestState]:
        request_states = []
        while self._expiries and self._expiries[0][0] <= at_s:
            _, sequence, name = heappop(self._expiries)
            request = self._waits(sequence, name)
            if request is not None:
                self.remove(request)
                request_states.append(request)
        return request_states

    def _waits(self, sequence: int, name: str) -> RequestState | None:
        """The request of an expiry entry, if the entry is of its present wait."""
        request = self._open.get(name)
        if (
            request is None
            or request.state == RUNNING
            or request.wait_number != sequence
            or request.held_s < 0
        ):
            return None
        return request
