"""Requests under way: accepted, held, sent, handed on, until each ends once. Only this and the router change them."""

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
from potluck.core.routing.split import MOST_IN_LOW
from potluck.core.scaling.autoscaler import Autoscaler
from potluck.core.state import events as told
from potluck.core.state.actions import Abort, Action, RefusalReason, Refuse
from potluck.core.state.facts import FleetFacts
from potluck.core.state.fleet import FleetState, ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import HELD, RUNNING, WAITING, RequestState
from potluck.core.state.targets import Target
from potluck.core.values.route import Route

LEAST_NOTES: Final = 4096
ENDED: Final = 1 << 12  # Whoever tells of a request again does so within seconds.


class BrainState:
    """What the Brain is made of: built once, and shared by all who decide about requests."""

    def __init__(self, facts: FleetFacts, policy: Policy) -> None:
        rule = balance_rule(policy.balance)
        self.facts, self.policy = facts, policy
        self.fleet = FleetState(facts.replicas)
        self.speeds = LearnedSpeeds(facts, self.fleet, rule.learns)
        self.table = RoutingTable(facts, policy, rule, self.fleet)
        self.caches = PrefixCaches(facts, policy, self.fleet)
        self.affinity = PrefixAffinity(policy, self.table, self.caches.index)
        room = ReplicaCapacity(policy, self.table)
        bound = room if policy.admission else None
        self.router = Router(policy, self.table, self.affinity, self.speeds, bound)
        self.admission = Admission(policy, self.table, room, self.router)
        self.autoscaler = Autoscaler(facts, policy, self.fleet)


class Requests:
    def __init__(self, state: BrainState) -> None:
        self._facts = state.facts
        self._policy = state.policy
        self._fleet = state.fleet
        self._table = state.table
        self._caches = state.caches
        self._affinity = state.affinity
        self._router = state.router
        self._autoscaler = state.autoscaler
        self._speeds = state.speeds
        self._admission = admission = state.admission
        admission.run, admission.refuse, admission.hold = self.run, self._turned_away, self._hold
        self._room = admission.room
        self._tenants = admission.room.tenants
        self._queues = admission.queues
        self._weights = admission.weights
        self._bounded = state.policy.admission
        self._watches = state.autoscaler.watches
        self.open: dict[str, RequestState] = {}
        self.held = WaitingRequests(self.open)
        self._ended: set[str] = set()
        self._ended_before: set[str] = set()
        """Of those that ended lately, so that none begins again: at least the last ENDED, at most twice as many."""
        self.doubtful: dict[str, None] = {}
        """Held although replicas were ready, because these failed them or may be dying."""

    def arrived(self, at_s: float, event: told.RequestArrived) -> list[Action]:
        request = event.request
        name = request.id
        if self.knows(name):
            return []
        req = RequestState(request)
        table = self._table.models.get(request.model)
        if table is None and request.model not in self._facts.models:
            what = f"no model {request.model!r} is served here"
            return [self._refusal(at_s, req, "unknown_model", what)]
        if request.request_class not in self._admission.classes:
            known = ", ".join(self._admission.classes)
            what = f"no class {request.request_class!r} is known here; classes are {known}"
            return [self._refusal(at_s, req, "unknown_class", what)]
        if request.blocks:
            self._caches.asked_for(at_s, request)
        if self._autoscaler.scale_to_zero:
            self._autoscaler.asked(at_s, request.model)
        if self._watches:
            cached_tokens = self._affinity.most_cached(req) if request.blocks else 0
            self._autoscaler.window.arrived(at_s, request, cached_tokens)
        if table is not None and req.total_tokens > table.limit_tokens:
            return [self._refusal(at_s, req, "too_long", table.too_long(req))]
        if request.deadline_s is not None and at_s >= request.deadline_s:
            late = f"came after its deadline at {request.deadline_s:g} s"
            return [self._refusal(at_s, req, "deadline", late)]
        self.open[name] = req
        self._note_tenant(at_s, req)
        return self._send(at_s, req, table)

    def _note_tenant(self, at_s: float, req: RequestState) -> None:
        """Whose request was accepted: its weight, and its deadline if it is to be stopped then."""
        request = req.request
        if request.deadline_s is not None:
            self._admission.watch(req)
        if self._weights:
            req.weight = self._weights.get(request.tenant, 1.0)
        if self._bounded and (self._room.several or request.tenant is not self._room.tenant):
            self._tenants.asks(at_s, req)

    def adopted(self, at_s: float, event: told.RequestAdopted) -> list[Action]:
        """A request of an earlier Brain, whose process is gone: it goes on where it is, or is sent again."""
        request = event.request
        if self.knows(request.id):
            return []
        req = self.open[request.id] = RequestState(request)
        req.attempt, req.streamed_tokens = event.attempt, event.streamed_tokens
        req.prompt_tokens += event.streamed_tokens
        self._note_tenant(at_s, req)
        if event.route is not None and self._resumed(req, event.route, event.done, event.first):
            req.heard_s = at_s
            if self._room.several:
                self._tenants.sent(req)
            return []
        req.attempt += 1
        return self.dispatch(at_s, req)

    def _resumed(self, req: RequestState, route: Route, done: int, first: bool) -> bool:
        """Count it where it is under way; False where one of its replicas is not known."""
        views = [self._fleet.views.get(segment.replica) for segment in route.segments]
        replica_states = [view for view in views if view is not None]
        if len(replica_states) < len(views):
            return False
        last = replica_states.pop()
        req.route, req.state, req.last = route, RUNNING, last
        req.earlier = tuple(
            (view, segment.stop - segment.start)
            for view, segment in zip(replica_states, route.segments[:-1], strict=True)
            if segment.stop is not None
        )
        req.done = len(req.earlier) if first else min(done, len(req.earlier))
        req.last_tokens = 0 if first else max(0, req.prompt_tokens - route.segments[-1].start)
        for view, tokens in req.earlier[req.done :]:
            self._fleet.open(view, tokens, 0)
        self._fleet.open(last, req.last_tokens, req.total_tokens)
        return True

    def running(self, request: str, attempt: int) -> RequestState | None:
        req = self.open.get(request)
        return req if req is not None and req.state == RUNNING and req.attempt == attempt else None

    def knows(self, request: str) -> bool:
        return request in self.open or request in self._ended or request in self._ended_before

    def dispatch(self, at_s: float, req: RequestState) -> list[Action]:
        """Send a request that was held or failed; a new plan may have taken those away that could hold it."""
        table = self._table.models.get(req.request.model)
        if table is not None and req.total_tokens > table.limit_tokens:
            return self.refuse(at_s, req, "too_long", table.too_long(req))
        return self._send(at_s, req, table)

    def _send(self, at_s: float, req: RequestState, table: ModelRoutes | None) -> list[Action]:
        if table is not None:
            if self._queues and self._admission.behind(req, table):
                return self._admission.line_up(at_s, req, table)
            if self._room.several:
                self._tenants.now_s = at_s
            answer = self._router.send(req, table)
            if answer is SENT:
                return [self.run(at_s, req)]
            if answer is RoutingResult.FULL:
                return self._admission.line_up(at_s, req, table)
            if answer is RoutingResult.WAITS:
                self.held.wait(at_s, req, self._policy)
                return []
        self.held.add(at_s, req, self._policy)
        if req.avoid:
            self.doubtful[req.request.id] = None
        return []

    def run(self, at_s: float, req: RequestState) -> Action:
        req.held_s = -1.0
        req.heard_s = at_s
        if req.earlier:
            self._speeds.began(at_s, req, req.earlier[0][0])
        elif req.last is not None:
            req.sent = (at_s, req.last.done_s, req.last.done_prompts)
        if self._room.several:
            self._tenants.sent(req)
        return req.run()

    def _turned_away(self, at_s: float, refusal: Refusal) -> list[Action]:
        self.open.pop(refusal.req.request.id, None)
        action = self._refusal(at_s, refusal.req, refusal.reason, refusal.detail)
        return [action._replace(retry_after_s=refusal.retry_after_s)]

    def _hold(self, at_s: float, req: RequestState) -> None:
        hold = self.held.wait if req.state == WAITING else self.held.add
        hold(at_s, req, self._policy)

    def segment_done(self, at_s: float, event: told.SegmentDone) -> list[Action]:
        req = self.running(event.request, event.attempt)
        actions: list[Action] = []
        while req is not None and req.done <= event.segment and req.done < len(req.earlier):
            actions += self._hand_on(at_s, req)
        return actions

    def computed(self, at_s: float, event: told.SegmentComputed) -> list[Action]:
        """A replica is done with its part of a prompt, and has room for the next while KV is on its way."""
        req = self.running(event.request, event.attempt)
        if req is None:
            return []
        if event.segment != req.done or event.segment >= len(req.earlier) or req.leaves_region():
            return []
        view, tokens = req.computed()
        if tokens:
            self._fleet.prefilled(view, tokens)
            if req.watched_s >= 0:
                self._speeds.handed(at_s, req, view)
        leaves = req.pair is not None and req.done == len(req.earlier) - 1
        actions = self._leave_pair(at_s, req) if leaves else []
        return actions + self._admission.freed(at_s, view) if self._queues else actions

    def _hand_on(self, at_s: float, req: RequestState) -> list[Action]:
        view, tokens = req.earlier[req.done]
        if tokens:
            self._fleet.handed(view, tokens)
        else:
            self._fleet.close(view, 0, 0)
        req.done += 1
        if req.long or req.light_tokens:
            self._tenants.computed(req)
        going_on = req.done < len(req.earlier)
        onto = req.earlier[req.done][0] if going_on else req.last
        if req.link or req.cargo:
            self._router.links.handed(req, going_on)
        if req.watched_s >= 0 and onto is not None:
            self._speeds.handed(at_s, req, view, view.member.region == onto.member.region)
        actions: list[Action] = []
        if going_on:
            self._speeds.began(at_s, req, req.earlier[req.done][0])
        else:
            self._prompt_done(req)
            actions = self._leave_pair(at_s, req) if req.pair is not None else []
        return actions + self._admission.freed(at_s, view) if self._queues else actions

    def _prompt_done(self, req: RequestState) -> None:
        if req.yielding is not None:
            self._router.timely.caught_up(req)
        if len(req.charges) == 2:
            (target, load), rest = req.charges
            target.lighten(load)
            req.charges = (rest,)

    def first_token(self, at_s: float, event: told.FirstToken) -> list[Action]:
        req = self.running(event.request, event.attempt)
        if req is None:
            return []
        actions: list[Action] = []
        while req.done < len(req.earlier):
            actions += self._hand_on(at_s, req)
        if req.first_s < 0:
            req.first_s = at_s
        if req.last is not None:
            if req.last_tokens:
                self._fleet.prefilled(req.last, req.last_tokens)
                req.last_tokens = 0
                self._prompt_done(req)
                if req.sent[0] >= 0:
                    self._speeds.computed(at_s, req, req.last)
            self._speeds.began(at_s, req, req.last)
            if req.long or req.light_tokens:
                self._tenants.computed(req)
            if self._queues:
                actions += self._admission.freed(at_s, req.last)
        return actions

    def finished(self, at_s: float, event: told.RequestFinished) -> list[Action]:
        req = self.running(event.request, event.attempt)
        if req is None:
            return []
        del self.open[event.request]
        self._ended.add(event.request)  # `end`, written out
        if len(self._ended) >= ENDED:
            self._ended_before, self._ended = self._ended, set()
        last = req.last
        if last is not None and last.strikes:
            self._fleet.answered_again(last)
        if req.mixed:
            self._tenants.isolation.answered(req, event.output_tokens)
        if last is not None and req.first_s >= 0 and (crowded(last) or req.heavy):
            self._room.ended(at_s, req, last, event.output_tokens)
        if self._watches:
            self._autoscaler.finished(at_s, req, event.output_tokens)
        if req.watched_s >= 0:
            self._speeds.ended(at_s, req, event.output_tokens)
        elif req.first_s < 0:
            self._speeds.came_whole(req, event.output_tokens)
        return self.release(at_s, req)

    def cancelled(self, at_s: float, event: told.RequestCancelled) -> list[Action]:
        """The user went away, perhaps before word of the request came; then it is not begun at all."""
        self.end(event.request)
        req = self.open.pop(event.request, None)
        if req is None:
            return []
        self.held.remove(req)
        self._admission.remove(req)
        return self.abandon(req) + self.release(at_s, req)

    def end(self, request: str) -> None:
        self._ended.add(request)
        if len(self._ended) >= ENDED:
            self._ended_before, self._ended = self._ended, set()

    def abandon(self, req: RequestState, lost: str = "") -> list[Action]:
        """Tell the replicas that still work on it, but for one that is gone."""
        there = tuple(name for name in req.workers() if name != lost and name in self._fleet.views)
        return [Abort(req.request.id, there)] if there else []

    def release(self, at_s: float, req: RequestState) -> list[Action]:
        """Take a request off all counts; what it made room for may be sent."""
        last: ReplicaState | None = None
        if req.state == RUNNING and req.last is not None:
            if req.earlier:
                for view, tokens in req.earlier[req.done :]:
                    self._fleet.close(view, tokens, 0)
                req.earlier, req.done = (), 0
            self._fleet.close(req.last, req.last_tokens, req.total_tokens)
            last, req.last = req.last, None
            if req.mixed:
                self._tenants.left(req)
        req.watched_s = -1.0
        if req.yielding is not None:
            self._router.timely.caught_up(req)
        if req.link or req.cargo:
            self._router.links.over(req)
        if req.charges:
            for target, load in req.charges:
                target.lighten(load)
            req.charges = ()
        actions = self._leave_pair(at_s, req) if req.pair is not None else []
        if self._queues and last is not None:
            actions += self._admission.freed(at_s, last)
        return actions

    def _leave_pair(self, at_s: float, req: RequestState) -> list[Action]:
        pair, req.pair = req.pair, None
        if pair is None:
            return []
        if req.state == WAITING:
            pair.waiting.remove(req.request.id)
            return []
        pair.in_low -= 1
        return self.admit(at_s, pair)

    def admit(self, at_s: float, pair: Target) -> list[Action]:
        """Let those in that wait for a pair's low-end replica, or send them elsewhere when it is gone."""
        actions: list[Action] = []
        while pair.waiting and (not pair.usable or pair.in_low < MOST_IN_LOW * len(pair.prefills)):
            req = self.open.get(pair.waiting.popleft())
            if req is None or req.state != WAITING or req.pair is not pair:
                continue
            if pair.usable:
                self._router.pair(pair, req)
                actions.append(self.run(at_s, req))
            else:
                req.pair = None
                self.release(at_s, req)
                actions += self.dispatch(at_s, req)
        return actions

    def refuse(self, at_s: float, req: RequestState, reason: RefusalReason, detail: str) -> list[Action]:
        self.open.pop(req.request.id, None)
        return [self._refusal(at_s, req, reason, detail)]

    def _refusal(self, at_s: float, req: RequestState, reason: RefusalReason, detail: str) -> Refuse:
        self.end(req.request.id)
        if self._watches and reason != "unknown_model":
            self._autoscaler.window.refused(at_s, req.request.model)
        return Refuse(req.request.id, reason, detail)

    def sizes(self) -> dict[str, int]:
        open_, held, doubtful = len(self.open), len(self.held), len(self.doubtful)
        ended = len(self._ended) + len(self._ended_before)
        return {"open": open_, "held": held, "doubtful": doubtful, "ended": ended}

    # When the fleet changes.

    def changed(self, at_s: float, view: ReplicaState) -> list[Action]:
        """A replica came, went or changed: routing follows, and what waited for a pair that is gone moves on."""
        unit = view.member.unit
        group = self._table.groups.get(unit)
        self._table.update(unit, view)
        if self._bounded:
            self._fleet.bound(view, self._room.easiness(view))
        actions = self.admit(at_s, group) if group is not None and group.waiting else []
        return actions + self._admission.freed(at_s, view) if self._queues else actions

    def planned(self, at_s: float) -> list[Action]:
        actions: list[Action] = []
        for pair in list(self._table.groups.values()):
            actions += self.admit(at_s, pair)
        actions += self.retry_held(at_s, self.held.models())
        return actions + self._admission.retry(at_s)

    def tick(self, at_s: float) -> list[Action]:
        actions: list[Action] = []
        for req in self.held.expired(at_s):
            deadline_s, waited_s = req.request.deadline_s, at_s - req.held_s
            self._admission.remove(req)
            actions += self.release(at_s, req)
            if deadline_s is not None and at_s >= deadline_s:
                actions += self.refuse(at_s, req, "deadline", f"no replica was ready by {deadline_s:g} s")
            else:
                waited = f"no replica was ready for {waited_s:g} s"
                actions += self.refuse(at_s, req, "no_capacity", waited)
        for req in self._admission.overdue(at_s, self.open):
            actions += self.abandon(req) + self.release(at_s, req)
            late = f"still ran at its deadline at {req.request.deadline_s:g} s"
            actions += self.refuse(at_s, req, "deadline", late)
        return actions + self._admission.tick(at_s)

    def retry_held(self, at_s: float, models: Iterable[str], most: int | None = None) -> list[Action]:
        actions: list[Action] = []
        for model in models:
            for name in self.held.take(model, most):
                actions += self.dispatch(at_s, self.open[name])
        return actions


class WaitingRequests:
    """Requests that wait for any replica, by model in the order they came, and by when they give up."""

    __slots__ = ("_expiries", "_models", "_most", "_open", "_sequence")

    def __init__(self, requests: dict[str, RequestState]) -> None:
        self._open = requests
        self._models: dict[str, dict[str, None]] = {}
        self._expiries: list[tuple[float, int, str]] = []
        self._sequence = 0
        self._most = LEAST_NOTES
        """With more notes than this, those of requests that wait no longer are dropped."""

    def __len__(self) -> int:
        return sum(len(model) for model in self._models.values())

    def counts(self) -> dict[str, int]:
        return {model: len(item) for model, item in self._models.items() if item}

    def add(self, at_s: float, req: RequestState, policy: Policy) -> None:
        request = req.request
        self._models.setdefault(request.model, {})[request.id] = None
        req.state = HELD
        self._begin(at_s, req, policy)

    def wait(self, at_s: float, req: RequestState, policy: Policy) -> None:
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
            self._expiries = [expiry for expiry in self._expiries if self._waits(*expiry[1:]) is not None]
            heapify(self._expiries)
            self._most = LEAST_NOTES + 2 * len(self._expiries)

    def remove(self, req: RequestState) -> None:
        self._models.get(req.request.model, {}).pop(req.request.id, None)

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
            req = self._waits(sequence, name)
            if req is not None:
                self.remove(req)
                request_states.append(req)
        return request_states

    def _waits(self, sequence: int, name: str) -> RequestState | None:
        """Whom a note is about, while it is about the present wait."""
        req = self._open.get(name)
        if req is None or req.state == RUNNING or req.patience != sequence or req.held_s < 0:
            return None
        return req
