"""One request's route: the table says where it may go, the policies say where it goes.

    ways of its bucket ─▶ way (by turn, or by length threshold) ─▶ target (balance, prefix affinity) ─▶ segments

A plain target does all in place, a combo is opportunistic, a pair splits, a flow prefills and then decodes. `send`
writes the choice into the RequestState and counts it on the replicas."""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum

from potluck.core.routing import opportunistic, split
from potluck.core.routing.balance import Balancer, PlacedWork, pick_unfailed, prefill_seconds
from potluck.core.routing.capacity import CLOSED as CLOSED_WAY
from potluck.core.routing.capacity import DECODE, PREFILL, ReplicaCapacity, easy
from potluck.core.routing.deadlines import DeadlineCheck
from potluck.core.routing.learned_speeds import LearnedSpeeds
from potluck.core.routing.link_states import LinkAvoidance, LinkStates
from potluck.core.routing.prefix_affinity import Lender, PrefixAffinity
from potluck.core.routing.round_robin import WeightedRoundRobin
from potluck.core.routing.routing_table import (
    ANY,
    CLOSED,
    LAST,
    ModelRoutes,
    RouteOption,
    RouteOptions,
    RoutingTable,
)
from potluck.core.routing.thresholds import LengthThresholds
from potluck.core.state.events import LinkReported
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import NOWHERE, RUNNING, WAITING, RequestState
from potluck.core.state.targets import COMBO, PLAIN, Target, avoided, busier, seconds_per_token, unavoided
from potluck.core.values.kv import codecs_between
from potluck.core.values.plan import Plan
from potluck.core.values.route import Route, Segment, handed_over

Turns = WeightedRoundRobin[RouteOption]
Views = list[ReplicaState]


class Router:
    """Chooses routes. All its state is the table's, the thresholds' and the counts on replicas."""

    def __init__(
        self,
        policy: Policy,
        table: RoutingTable,
        affinity: PrefixAffinity,
        speeds: LearnedSpeeds,
        capacity: ReplicaCapacity | None,
    ) -> None:
        self._facts, self._fleet, self._table = table.facts, table.fleet, table
        self._policy, self._affinity, self._speeds = policy, affinity, speeds
        self._rule = rule = table.rule
        self._room = capacity  # None: whoever is sent to has room.
        self.timely = DeadlineCheck(capacity, affinity, speeds, table.fleet)
        self._full = False  # Whether somebody was ready but had no room for the present request.
        self._share = split.printed_tokens if policy.split_rule == "printed" else split.partial_tokens
        self._by_load, self.learns = rule.by_load, rule.learns
        self.links = LinkStates(table.facts)
        self.detours = LinkAvoidance(table, self.links, capacity)
        self.thresholds = LengthThresholds(table, affinity)

    def adopt(self, plan: Plan) -> None:
        self.links.codecs = codecs_between(plan)
        self.thresholds.adopt()

    def linked(self, event: LinkReported) -> None:
        self.links.reported(event)
        self.thresholds.linked(event)

    def send_to(self, target: Target, request: RequestState, routes: ModelRoutes) -> RoutingResult:
        """The same as `send` where only this target may have room that it had not before."""
        route_options, capacity = (
            self._table.ways(routes, routes.kind(request)[0], request.total_tokens),
            self._room,
        )
        if (
            not route_options.simple
            or request.avoid
            or request.request.blocks
            or capacity is None
            or capacity.several
        ):
            return self.send(request, routes)
        fits = target in route_options.closed.prefills and capacity.fits(target, request)
        return self.to(target, request) if fits else RoutingResult.FULL

    def send(self, request: RequestState, routes: ModelRoutes) -> RoutingResult:
        prompt, total = request.prompt_tokens, request.total_tokens
        bucket = bisect_left(routes.longest_tokens, prompt)
        route_options = routes.ways.get((bucket, 0)) if total <= routes.limits_tokens[0] else None
        if route_options is None:
            route_options = self._table.ways(routes, bucket, total)
        capacity = self._room
        if route_options.simple and not (
            request.avoid or request.request.blocks or (capacity is not None and capacity.several)
        ):
            # By far the most requests: written out, as each call would cost as much as the decision.
            target = route_options.closed.prefills.pick()
            if target is not None:
                replica = target.view
                if replica is None:
                    target = self._roomy(route_options.closed.prefills, target, request, CLOSED_WAY)
                    return self.to(target, request) if target is not None else RoutingResult.FULL
                if not easy(replica) or prompt > replica.easy[1]:
                    target = self._roomy(route_options.closed.prefills, target, request, CLOSED_WAY)
                    if target is None:
                        return RoutingResult.FULL
                    if target.view is not replica or prompt > replica.easy[1]:
                        return self.to(target, request)
                request.route, request.state, request.last = target.route, RUNNING, replica
                request.last_tokens = prompt
                self._fleet.open(replica, prompt, total)
                if self._by_load:
                    self._charge_plain(request, target, replica)
                return SENT
        self._full = False
        answer = self._through(route_options, request, routes)
        if answer is RoutingResult.NOBODY:
            if self._full and route_options.simple:
                return RoutingResult.FULL
            # Where flows are full or gone, whoever has room may do all of it; who prefills one by one comes last.
            spares = [self._table.ways(routes, place, total) for place in (CLOSED, ANY)]
            if not any(spare.closed.prefills.members() for spare in spares):
                spares = [self._table.ways(routes, LAST, total)]
            for spare in spares:
                target = self._target(spare.closed.prefills, request)
                if target is not None:
                    return self.to(target, request)
        return RoutingResult.FULL if self._full and answer is RoutingResult.NOBODY else answer

    def in_time(self, request: RequestState, route_options: RouteOptions, left_s: float) -> bool:
        """Send a request where it is in time though there is no room; whether that is anywhere."""
        if route_options.simple:
            target = self.timely.soonest(route_options.closed.prefills, request, left_s)
            return target is not None and self.to(target, request) is SENT
        ends = self.timely.flow(route_options, request, left_s)
        return ends is not None and self._over(*ends, request) is SENT

    def _through(
        self, route_options: RouteOptions, request: RequestState, routes: ModelRoutes
    ) -> RoutingResult:
        if route_options.simple:
            if self._room is not None and self._room.several and not request.attempt:
                via = self._room.tenants.via(route_options.closed.prefills, request)
                if via is not None and 2 * self._affinity.most_cached(request) <= request.prompt_tokens:
                    return self._over(*via, request)
            target = self._target(route_options.closed.prefills, request)
            return self.to(target, request) if target is not None else RoutingResult.NOBODY
        turns, tried, fetches, shut = [route_options.turns], False, False, NOWHERE
        choices = self.thresholds.choices(request, route_options)
        if choices:
            choices = self.detours.sooner(choices, request, route_options, routes) if self.learns else choices
            away = [choice for choice in choices.values() if choice.remote]
            fetches = any(choice.fetch for choice in choices.values() if not choice.remote)
            turns = (
                [route_options.remote, route_options.local]
                if away
                else [route_options.local, route_options.remote]
            )
            if 0 < len(away) < len(choices):
                shut = frozenset(link for link, choice in choices.items() if not choice.remote)
        for turn in turns:
            route_option = self._way(turn, request, route_options, routes, shut)
            ways_left = [] if route_option is None else [route_option]
            while ways_left:
                now = ways_left.pop()
                choice = choices.get(now.link) if now.crosses else None
                answer = self._along(now, request, fetches if choice is None else choice.fetch)
                if answer is not RoutingResult.NOBODY:
                    return answer
                if self._full and not tried:
                    others = [other for other in turn.members() if other is not route_option]
                    ways_left, tried = [other for other in others if self._open(other, request, shut)], True
        return RoutingResult.NOBODY

    def _open(self, route_option: RouteOption, request: RequestState, shut: frozenset[str]) -> bool:
        return not (
            route_option.link in self.links.dead
            or route_option.link in request.avoid
            or route_option.link in shut
        )

    def _way(
        self,
        turns: Turns,
        request: RequestState,
        route_options: RouteOptions,
        routes: ModelRoutes,
        shut: frozenset[str],
    ) -> RouteOption | None:
        """Whose turn it is, unless its link is not open or is late for it."""
        route_option = turns.pick()
        if route_option is None or not (route_option.crosses or self.links.dead or request.avoid):
            return route_option
        for _ in range(len(turns)):
            if self._open(route_option, request, shut) and not (
                self.learns
                and route_option.crosses
                and self.detours.late(route_option, request, route_options, routes)
            ):
                return route_option
            route_option = turns.pick() or route_option
        return None

    def _along(self, route_option: RouteOption, request: RequestState, fetch: bool) -> RoutingResult:
        first_target = self._target(
            route_option.prefills, request, CLOSED_WAY if route_option.decodes is None else PREFILL
        )
        if first_target is None:
            return RoutingResult.NOBODY
        if route_option.decodes is None:
            return self.to(first_target, request, fetch)
        second_target = self._target(route_option.decodes, request, DECODE)
        if second_target is None or first_target.view is None or second_target.view is None:
            return RoutingResult.NOBODY
        if first_target is second_target:
            return self.to(first_target, request, fetch)
        if not route_option.crosses and self.timely.at_home(request, first_target.view, second_target.view):
            return self.to(second_target, request, fetch)
        holder = self._affinity.lender(request, first_target.view, self.links, fetch, second_target.view)
        return self._over(first_target, second_target, request, holder)

    def _over(
        self, first_target: Target, second_target: Target, request: RequestState, holder: Lender = None
    ) -> RoutingResult:
        here, there = first_target.view, second_target.view
        assert here is not None
        assert there is not None
        if here.kv_version != there.kv_version:
            return self.to(second_target, request)
        self._hand_over(request, here, there, request.prompt_tokens, holder)
        self.links.send(request, here.member.region, there.member.region, request.prompt_tokens)
        if self._by_load:
            self._charge_apart(request, first_target, second_target, request.earlier[-1][1])
        return SENT

    def _roomy(
        self, balancer: Balancer, picked_target: Target, request: RequestState, phase: int
    ) -> Target | None:
        """Whose turn it is, or another when that one is full; None when all are. Retries go wherever they may."""
        capacity, replica = self._room, picked_target.view
        if capacity is None or request.attempt:
            return picked_target
        calm = replica is not None and not capacity.several and easy(replica)
        if not calm and request.place is None:
            capacity.seen(request)
        if (
            self.learns
            and phase == CLOSED_WAY
            and replica is not None
            and request.prompt_tokens > replica.easy[1]
        ):
            aside = self.timely.aside(balancer, replica, request)
            if aside is not None:
                return aside
        alien = (
            replica is not None and phase == CLOSED_WAY and replica.role == "decode"
        )  # it may bear no prompts
        if calm and not alien:
            return picked_target
        roomy = capacity.other(balancer, picked_target, request, phase)
        if roomy is None:
            self._full = True
        elif roomy is not picked_target:
            balancer.swap(picked_target, roomy)
        return roomy

    def _target(self, balancer: Balancer, request: RequestState, phase: int = CLOSED_WAY) -> Target | None:
        """Whose turn it is, unless it is full, failed the request before, or another holds much of its prefix."""
        target = balancer.pick()
        if target is None:
            return None
        if request.avoid and avoided(target, request.avoid):
            target = pick_unfailed(balancer, request)
            if target is None:
                return None
        if phase != DECODE and request.request.blocks and self._policy.affinity > 0:
            better = self._affinity.better(target, balancer, request)
            if better is not None:
                balancer.swap(target, better)
                target = better
        return self._roomy(balancer, target, request, phase)

    def to(self, target: Target, request: RequestState, abroad: bool = False) -> RoutingResult:
        """Inside a target: who does what. `abroad`: prefixes may be fetched from other regions."""
        if target.kind == PLAIN:
            assert target.view is not None
            self._in_place(request, target.view, target.route, abroad)
            if self._by_load:
                self._charge(request, target, request.last_tokens, [target.view], [target.view])
            return SENT
        if target.kind == COMBO:
            if self._by_load:
                self._charge(request, target, request.prompt_tokens, target.prefills, target.decodes)
            self._combo(target, request)
            return SENT
        return self.pair(target, request)

    def _combo(self, target: Target, request: RequestState) -> None:
        prefills, decodes = (
            unavoided(target.prefills, request.avoid),
            unavoided(target.decodes, request.avoid),
        )
        target.turn += 1
        if prefills[0].role == "mixed":  # nobody only prefills any more
            self._alone(request, opportunistic.least_loaded(prefills, opportunistic.fullness))
            return
        capacity = self._room
        if not self._policy.opportunistic:
            first_replica, second_replica = (
                prefills[target.turn % len(prefills)],
                decodes[target.turn % len(decodes)],
            )
        else:
            target.busy = busier(target.busy, prefills)
            busy = target.usage.seen(request.request.arrival_s, request.prompt_tokens, prefills)
            alone = opportunistic.whole_request_replica(
                prefills, decodes, opportunistic.next_step_seconds, target.busy
            )
            if alone is not None and (capacity is None or capacity.keeps_pace(alone, request, busy)):
                self._alone(request, alone)
                return
            if request.request.blocks and self._policy.affinity > 0:
                first_replica = self._affinity.prefiller(prefills, request)
            else:
                first_replica = opportunistic.shortest_queue(prefills, seconds_per_token)
            second_replica = opportunistic.least_loaded(decodes, opportunistic.fullness)
        if self.timely.at_home(request, first_replica, second_replica):
            self._alone(request, second_replica)
            return
        lender = self._affinity.lender(request, first_replica, self.links, False, second_replica)
        self._hand_over(request, first_replica, second_replica, request.prompt_tokens, lender)

    def pair(self, target: Target, request: RequestState) -> RoutingResult:
        """Split a prompt between a pair's two sides, or let it wait for a place on the low-end one."""
        lows, highs = unavoided(target.prefills, request.avoid), unavoided(target.decodes, request.avoid)
        low_replica = min(lows, key=lambda replica: replica.open_prefill_tokens)
        high_replica = min(highs, key=opportunistic.fullness)
        if low_replica.kv_version != high_replica.kv_version:
            self._alone(request, high_replica)
            return SENT
        splits = self._facts.splits.get(low_replica.member.template) if self._policy.split else None
        if self._by_load and not request.charges:
            self._charge(request, target, request.prompt_tokens, [low_replica], [high_replica])
        target.busy = busier(target.busy, target.prefills)
        part = prompt = request.prompt_tokens
        if splits is not None:
            part = self._share(part, splits, split.high_end_load(high_replica))
            if target.in_low >= split.MAX_LOW_END_REQUESTS * len(target.prefills):
                if self._policy.split_overflow and split.overflows_to_high_end(
                    splits, target, low_replica, high_replica, prompt, part
                ):
                    self._alone(request, high_replica)
                    return SENT
                request.state, request.pair = WAITING, target
                target.waiting.append(request.request.id)
                return RoutingResult.WAITS
        request.pair = None
        if self._policy.low_decodes and split.keeps_on_low_end(
            target, low_replica, high_replica, request.total_tokens
        ):
            self._alone(request, low_replica)
            return SENT
        if splits is not None:
            request.pair = target
            target.in_low += 1
        self._hand_over(request, low_replica, high_replica, part)
        return SENT

    # What a request counts for on its targets, under balances by load; `charges` remembers it, to take it off again.

    def _charge(
        self, request: RequestState, target: Target, tokens: int, prefills: Views, decodes: Views
    ) -> None:
        """All of a request on one target; prompt and answer apart, as they end apart."""
        if self._rule.in_seconds and decodes[0].facts is None:
            first, rest = 0.0, self._table.request_s(target) or 1.0
        else:
            work = PlacedWork(request, tokens, prefills, decodes, self._answer_tokens(request), False)
            first, rest = self._rule.loads(work)
        request.charges = ((target, first), (target, rest))
        target.load += first
        target.load += rest

    def _charge_plain(self, request: RequestState, target: Target, replica: ReplicaState) -> None:
        """The same on a single replica that computes all of the prompt: most requests, so written out."""
        facts = replica.facts
        if facts is None or not self._rule.in_seconds:
            self._charge(request, target, request.prompt_tokens, [replica], [replica])
            return
        first_s = prefill_seconds(facts, request.prompt_tokens)
        answer_tokens = self._speeds.answer_tokens(request.request.model, request.output_tokens)
        rest_s = answer_tokens * facts.decode_step_s / max(1, facts.decode_batch)
        target.load += first_s
        target.load += rest_s
        request.charges = ((target, first_s), (target, rest_s))

    def _charge_apart(
        self, request: RequestState, first_target: Target, second_target: Target, tokens: int
    ) -> None:
        assert first_target.view is not None
        assert second_target.view is not None
        work = PlacedWork(
            request, tokens, [first_target.view], [second_target.view], self._answer_tokens(request), True
        )
        loads = self._rule.loads(work)
        request.charges = ((first_target, loads[0]), (second_target, loads[1]))
        for target, load in request.charges:
            target.load += load

    def _answer_tokens(self, request: RequestState) -> float:
        return self._speeds.answer_tokens(request.request.model, request.output_tokens)

    def _alone(self, request: RequestState, replica: ReplicaState) -> None:
        single = self._table.singles.get(replica.member.id)
        self._in_place(request, replica, single.route if single is not None else None, False)

    # Into the flight, and onto the replicas' counts.

    def _in_place(
        self, request: RequestState, replica: ReplicaState, route: Route | None, abroad: bool
    ) -> None:
        request.route = route if route is not None else Route((Segment(replica.member.id, 0, None),))
        request.state = RUNNING
        request.earlier = ()
        request.done = 0
        request.last = replica
        request.last_tokens = self._affinity.to_compute(request, replica, 0, request.prompt_tokens)
        lender = (
            self._affinity.lender(request, replica, self.links, abroad, None)
            if request.request.blocks
            else None
        )
        if lender is not None:
            holding_replica, held = lender
            request.route = Route(
                (Segment(holding_replica.member.id, 0, held), Segment(replica.member.id, held, None))
            )
            request.earlier, request.last_tokens = ((holding_replica, 0),), request.prompt_tokens - held
            self._fleet.open(holding_replica, 0, 0)
            self.links.load(request, request.route)
        self._fleet.open(replica, request.last_tokens, request.total_tokens)
        self.timely.sent(request, replica, request.last_tokens)
        if replica.role == "decode" and self._room is not None:
            self._room.borne(replica, request)

    def _hand_over(
        self,
        request: RequestState,
        first_replica: ReplicaState,
        second_replica: ReplicaState,
        part: int,
        lender: Lender = None,
    ) -> None:
        """`first` computes the first `part` tokens, after `lender` sent it a prefix; `second` the rest."""
        prompt = request.prompt_tokens
        route = handed_over(first_replica.member.id, second_replica.member.id, part)
        own = self._affinity.to_compute(request, first_replica, 0, part)
        earlier: tuple[tuple[ReplicaState, int], ...] = ((first_replica, own),)
        if lender is not None:
            holding_replica, held = lender
            head = Segment(holding_replica.member.id, 0, held)
            route = Route((head, Segment(first_replica.member.id, held, part), route.segments[-1]))
            earlier = ((holding_replica, 0), (first_replica, part - held))
        request.route, request.earlier, request.done = route, earlier, 0
        if request.request.blocks:
            self.links.load(request, route)
        request.state = RUNNING
        request.last, request.last_tokens = second_replica, prompt - part
        for replica, tokens in earlier:
            self._fleet.open(replica, tokens, 0)
        self._fleet.open(second_replica, request.last_tokens, request.total_tokens)
        self.timely.sent(request, first_replica, earlier[-1][1])


class RoutingResult(Enum):
    SENT = "sent"
    WAITS = "waits"
    NOBODY = "nobody"  # No replica is ready that it could go to.
    FULL = "full"  # Some are, and none has room.


SENT = RoutingResult.SENT
