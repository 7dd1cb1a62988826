"""Chooses one request's route from the routing table's options.

    options of its bucket ─▶ option (by turn, or by length threshold) ─▶ target (balance, prefix affinity) ─▶ segments

A plain target serves the whole request, a combo schedules opportunistically, a pair splits the prompt, a flow
prefills in one region and decodes in another. `send` writes the choice into the RequestState and counts its load on
the replicas."""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum

from potluck.core.routing import opportunistic, split
from potluck.core.routing.balance import Balancer, PlacedWork, pick_unfailed, prefill_seconds
from potluck.core.routing.capacity import CLOSED as WHOLE
from potluck.core.routing.capacity import DECODE, PREFILL, ReplicaCapacity, easy
from potluck.core.routing.deadlines import DeadlineCheck
from potluck.core.routing.learned_speeds import LearnedSpeeds
from potluck.core.routing.link_states import LinkAvoidance, LinkStates
from potluck.core.routing.prefix_affinity import Lender, PrefixAffinity
from potluck.core.routing.round_robin import WeightedRoundRobin
from potluck.core.routing.routing_table import (
    ANY_REPLICA_BUCKET,
    CLOSED_BUCKET,
    ONE_BY_ONE_BUCKET,
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
from potluck.core.state.targets import (
    COMBO,
    PLAIN,
    Target,
    is_avoided,
    seconds_per_token,
    update_utilization,
    without_avoided,
)
from potluck.core.values.kv import codecs_between
from potluck.core.values.plan import Plan
from potluck.core.values.route import Route, Segment, handed_over

OptionTurns = WeightedRoundRobin[RouteOption]
Views = list[ReplicaState]


class Router:
    """Chooses routes. Its state is the table's, the thresholds' and the load counts of replicas."""

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
        self._capacity = capacity  # None: every replica has room.
        self.deadlines = DeadlineCheck(capacity, affinity, speeds, table.fleet)
        self._found_full = False  # Whether a target was ready but had no room for the present request.
        self._low_end_tokens = (
            split.printed_tokens if policy.split_rule == "printed" else split.partial_tokens
        )
        self._by_load, self.learns = rule.by_load, rule.learns
        self.links = LinkStates(table.facts)
        self.link_avoidance = LinkAvoidance(table, self.links, capacity)
        self.thresholds = LengthThresholds(table, affinity)

    def adopt(self, plan: Plan) -> None:
        self.links.codecs = codecs_between(plan)
        self.thresholds.adopt()

    def linked(self, event: LinkReported) -> None:
        self.links.update(event)
        self.thresholds.linked(event)

    def send_to(self, target: Target, request: RequestState, routes: ModelRoutes) -> RoutingResult:
        """Like `send`, but only this target may have got room since the request was queued."""
        route_options, capacity = (
            self._table.options(routes, routes.kind(request)[0], request.total_tokens),
            self._capacity,
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
        return self.send_to_target(target, request) if fits else RoutingResult.FULL

    def send(self, request: RequestState, routes: ModelRoutes) -> RoutingResult:
        prompt_tokens, total_tokens = request.prompt_tokens, request.total_tokens
        bucket = bisect_left(routes.longest_tokens, prompt_tokens)
        route_options = routes.options.get((bucket, 0)) if total_tokens <= routes.limits_tokens[0] else None
        if route_options is None:
            route_options = self._table.options(routes, bucket, total_tokens)
        capacity = self._capacity
        if route_options.simple and not (
            request.avoid or request.request.blocks or (capacity is not None and capacity.several)
        ):
            # The most common path, inlined: each call would cost as much as the decision.
            target = route_options.closed.prefills.pick()
            if target is not None:
                replica = target.view
                if replica is None:
                    target = self._with_room(route_options.closed.prefills, target, request, WHOLE)
                    return self.send_to_target(target, request) if target is not None else RoutingResult.FULL
                if not easy(replica) or prompt_tokens > replica.easy[1]:
                    target = self._with_room(route_options.closed.prefills, target, request, WHOLE)
                    if target is None:
                        return RoutingResult.FULL
                    if target.view is not replica or prompt_tokens > replica.easy[1]:
                        return self.send_to_target(target, request)
                request.route, request.state, request.last = target.route, RUNNING, replica
                request.last_tokens = prompt_tokens
                self._fleet.open(replica, prompt_tokens, total_tokens)
                if self._by_load:
                    self._add_load_plain(request, target, replica)
                return SENT
        self._found_full = False
        result = self._send_by_options(route_options, request, routes)
        if result is RoutingResult.NO_REPLICA:
            if self._found_full and route_options.simple:
                return RoutingResult.FULL
            # Where flows are full or gone, any target with room may serve the whole request; replicas that
            # prefill one prompt at a time come last.
            fallbacks = [
                self._table.options(routes, bucket, total_tokens)
                for bucket in (CLOSED_BUCKET, ANY_REPLICA_BUCKET)
            ]
            if not any(spare_options.closed.prefills.members() for spare_options in fallbacks):
                fallbacks = [self._table.options(routes, ONE_BY_ONE_BUCKET, total_tokens)]
            for spare_options in fallbacks:
                target = self._pick_target(spare_options.closed.prefills, request)
                if target is not None:
                    return self.send_to_target(target, request)
        return RoutingResult.FULL if self._found_full and result is RoutingResult.NO_REPLICA else result

    def send_in_time(self, request: RequestState, route_options: RouteOptions, left_s: float) -> bool:
        """Send a request to a target that meets its TTFT although it has no room by its limits; returns whether one
        does."""
        if route_options.simple:
            target = self.deadlines.fastest_target(route_options.closed.prefills, request, left_s)
            return target is not None and self.send_to_target(target, request) is SENT
        target_pair = self.deadlines.fastest_flow(route_options, request, left_s)
        return target_pair is not None and self._send_over(*target_pair, request) is SENT

    def _send_by_options(
        self, route_options: RouteOptions, request: RequestState, routes: ModelRoutes
    ) -> RoutingResult:
        if route_options.simple:
            if self._capacity is not None and self._capacity.several and not request.attempt:
                targets = self._capacity.tenants.via(route_options.closed.prefills, request)
                if targets is not None and 2 * self._affinity.most_cached(request) <= request.prompt_tokens:
                    return self._send_over(*targets, request)
            target = self._pick_target(route_options.closed.prefills, request)
            return self.send_to_target(target, request) if target is not None else RoutingResult.NO_REPLICA
        turn_order, tried_others, fetch_prefix, closed_links = [route_options.turns], False, False, NOWHERE
        choices = self.thresholds.choices(request, route_options)
        if choices:
            choices = (
                self.link_avoidance.allow_faster_crossings(choices, request, route_options, routes)
                if self.learns
                else choices
            )
            remote_choices = [choice for choice in choices.values() if choice.remote]
            fetch_prefix = any(choice.fetch for choice in choices.values() if not choice.remote)
            turn_order = (
                [route_options.remote, route_options.local]
                if remote_choices
                else [route_options.local, route_options.remote]
            )
            if 0 < len(remote_choices) < len(choices):
                closed_links = frozenset(link for link, choice in choices.items() if not choice.remote)
        for option_turns in turn_order:
            route_option = self._next_option(option_turns, request, route_options, routes, closed_links)
            remaining = [] if route_option is None else [route_option]
            while remaining:
                current_option = remaining.pop()
                choice = choices.get(current_option.link) if current_option.crosses else None
                result = self._send_along(
                    current_option, request, fetch_prefix if choice is None else choice.fetch
                )
                if result is not RoutingResult.NO_REPLICA:
                    return result
                if self._found_full and not tried_others:
                    other_options = [
                        other_option
                        for other_option in option_turns.members()
                        if other_option is not route_option
                    ]
                    remaining, tried_others = (
                        [
                            other_option
                            for other_option in other_options
                            if self._is_open(other_option, request, closed_links)
                        ],
                        True,
                    )
        return RoutingResult.NO_REPLICA

    def _is_open(
        self, route_option: RouteOption, request: RequestState, closed_links: frozenset[str]
    ) -> bool:
        return not (
            route_option.link in self.links.dead
            or route_option.link in request.avoid
            or route_option.link in closed_links
        )

    def _next_option(
        self,
        option_turns: OptionTurns,
        request: RequestState,
        route_options: RouteOptions,
        routes: ModelRoutes,
        closed_links: frozenset[str],
    ) -> RouteOption | None:
        """The next option by turn whose link is open and not delayed for this request; None if there is none."""
        route_option = option_turns.pick()
        if route_option is None or not (route_option.crosses or self.links.dead or request.avoid):
            return route_option
        for _ in range(len(option_turns)):
            if self._is_open(route_option, request, closed_links) and not (
                self.learns
                and route_option.crosses
                and self.link_avoidance.is_delayed(route_option, request, route_options, routes)
            ):
                return route_option
            route_option = option_turns.pick() or route_option
        return None

    def _send_along(self, route_option: RouteOption, request: RequestState, fetch: bool) -> RoutingResult:
        first_target = self._pick_target(
            route_option.prefills, request, WHOLE if route_option.decodes is None else PREFILL
        )
        if first_target is None:
            return RoutingResult.NO_REPLICA
        if route_option.decodes is None:
            return self.send_to_target(first_target, request, fetch)
        second_target = self._pick_target(route_option.decodes, request, DECODE)
        if second_target is None or first_target.view is None or second_target.view is None:
            return RoutingResult.NO_REPLICA
        if first_target is second_target:
            return self.send_to_target(first_target, request, fetch)
        if not route_option.crosses and self.deadlines.prefills_on_decoder(
            request, first_target.view, second_target.view
        ):
            return self.send_to_target(second_target, request, fetch)
        lender = self._affinity.find_lender(request, first_target.view, self.links, fetch, second_target.view)
        return self._send_over(first_target, second_target, request, lender)

    def _send_over(
        self, first_target: Target, second_target: Target, request: RequestState, lender: Lender = None
    ) -> RoutingResult:
        first_replica, second_replica = first_target.view, second_target.view
        assert first_replica is not None
        assert second_replica is not None
        if first_replica.kv_version != second_replica.kv_version:
            return self.send_to_target(second_target, request)
        self._start_hand_over(request, first_replica, second_replica, request.prompt_tokens, lender)
        self.links.register_crossing(
            request, first_replica.member.region, second_replica.member.region, request.prompt_tokens
        )
        if self._by_load:
            self._add_load_apart(request, first_target, second_target, request.earlier[-1][1])
        return SENT

    def _with_room(
        self, balancer: Balancer, picked_target: Target, request: RequestState, phase: int
    ) -> Target | None:
        """The picked target, or another one if it is full; None if all are full. Retries skip the capacity check."""
        capacity, replica = self._capacity, picked_target.view
        if capacity is None or request.attempt:
            return picked_target
        has_low_load = replica is not None and not capacity.several and easy(replica)
        if not has_low_load and request.position is None:
            capacity.seen(request)
        if self.learns and phase == WHOLE and replica is not None and request.prompt_tokens > replica.easy[1]:
            yielding_target = self.deadlines.yielding_target(balancer, replica, request)
            if yielding_target is not None:
                return yielding_target
        prefills_on_decode_replica = (
            replica is not None and phase == WHOLE and replica.role == "decode"
        )  # Its decodes may allow no prefill.
        if has_low_load and not prefills_on_decode_replica:
            return picked_target
        target_with_room = capacity.other(balancer, picked_target, request, phase)
        if target_with_room is None:
            self._found_full = True
        elif target_with_room is not picked_target:
            balancer.swap(picked_target, target_with_room)
        return target_with_room

    def _pick_target(self, balancer: Balancer, request: RequestState, phase: int = WHOLE) -> Target | None:
        """The next target by turn, unless it is full, failed the request before, or another holds much of its
        prefix."""
        target = balancer.pick()
        if target is None:
            return None
        if request.avoid and is_avoided(target, request.avoid):
            target = pick_unfailed(balancer, request)
            if target is None:
                return None
        if phase != DECODE and request.request.blocks and self._policy.affinity > 0:
            better_target = self._affinity.better_target(target, balancer, request)
            if better_target is not None:
                balancer.swap(target, better_target)
                target = better_target
        return self._with_room(balancer, target, request, phase)

    def send_to_target(self, target: Target, request: RequestState, abroad: bool = False) -> RoutingResult:
        """Send a request to a target and choose its replicas. `abroad`: prefixes may be fetched from other
        regions."""
        if target.kind == PLAIN:
            assert target.view is not None
            self._start_on_replica(request, target.view, target.route, abroad)
            if self._by_load:
                self._add_load(request, target, request.last_tokens, [target.view], [target.view])
            return SENT
        if target.kind == COMBO:
            if self._by_load:
                self._add_load(request, target, request.prompt_tokens, target.prefills, target.decodes)
            self._send_to_combo(target, request)
            return SENT
        return self.send_to_pair(target, request)

    def _send_to_combo(self, target: Target, request: RequestState) -> None:
        prefills, decodes = (
            without_avoided(target.prefills, request.avoid),
            without_avoided(target.decodes, request.avoid),
        )
        target.turn += 1
        if prefills[0].role == "mixed":  # No replica is left in the prefill role.
            self._send_to_replica(request, opportunistic.least_loaded(prefills, opportunistic.fullness))
            return
        capacity = self._capacity
        if not self._policy.opportunistic:
            first_replica, second_replica = (
                prefills[target.turn % len(prefills)],
                decodes[target.turn % len(decodes)],
            )
        else:
            target.busy = update_utilization(target.busy, prefills)
            utilization = target.usage.seen(request.request.arrival_s, request.prompt_tokens, prefills)
            whole_replica = opportunistic.whole_request_replica(
                prefills, decodes, opportunistic.next_step_seconds, target.busy
            )
            if whole_replica is not None and (
                capacity is None or capacity.keeps_pace(whole_replica, request, utilization)
            ):
                self._send_to_replica(request, whole_replica)
                return
            if request.request.blocks and self._policy.affinity > 0:
                first_replica = self._affinity.best_prefiller(prefills, request)
            else:
                first_replica = opportunistic.shortest_queue(prefills, seconds_per_token)
            second_replica = opportunistic.least_loaded(decodes, opportunistic.fullness)
        if self.deadlines.prefills_on_decoder(request, first_replica, second_replica):
            self._send_to_replica(request, second_replica)
            return
        find_lender = self._affinity.find_lender(request, first_replica, self.links, False, second_replica)
        self._start_hand_over(request, first_replica, second_replica, request.prompt_tokens, find_lender)

    def send_to_pair(self, target: Target, request: RequestState) -> RoutingResult:
        """Split a prompt between a pair's two sides, or queue it for a place on the low-end one."""
        low_replicas, high_replicas = (
            without_avoided(target.prefills, request.avoid),
            without_avoided(target.decodes, request.avoid),
        )
        low_replica = min(low_replicas, key=lambda replica: replica.open_prefill_tokens)
        high_replica = min(high_replicas, key=opportunistic.fullness)
        if low_replica.kv_version != high_replica.kv_version:
            self._send_to_replica(request, high_replica)
            return SENT
        splits = self._facts.splits.get(low_replica.member.template) if self._policy.split else None
        if self._by_load and not request.added_loads:
            self._add_load(request, target, request.prompt_tokens, [low_replica], [high_replica])
        target.busy = update_utilization(target.busy, target.prefills)
        low_tokens = prompt_tokens = request.prompt_tokens
        if splits is not None:
            low_tokens = self._low_end_tokens(low_tokens, splits, split.high_end_load(high_replica))
            if target.in_low >= split.MAX_LOW_END_REQUESTS * len(target.prefills):
                if self._policy.split_overflow and split.overflows_to_high_end(
                    splits, target, low_replica, high_replica, prompt_tokens, low_tokens
                ):
                    self._send_to_replica(request, high_replica)
                    return SENT
                request.state, request.pair = WAITING, target
                target.waiting.append(request.request.id)
                return RoutingResult.WAITS_FOR_PAIR
        request.pair = None
        if self._policy.low_decodes and split.keeps_on_low_end(
            target, low_replica, high_replica, request.total_tokens
        ):
            self._send_to_replica(request, low_replica)
            return SENT
        if splits is not None:
            request.pair = target
            target.in_low += 1
        self._start_hand_over(request, low_replica, high_replica, low_tokens)
        return SENT

    # The load of a request on its targets, under balances by load; `added_loads` records it for its removal.

    def _add_load(
        self, request: RequestState, target: Target, tokens: int, prefills: Views, decodes: Views
    ) -> None:
        """Add all of a request's load to one target; prompt and answer separately, as they end separately."""
        if self._rule.in_seconds and decodes[0].facts is None:
            prompt_load, answer_load = 0.0, self._table.request_s(target) or 1.0
        else:
            work = PlacedWork(request, tokens, prefills, decodes, self._answer_tokens(request), False)
            prompt_load, answer_load = self._rule.loads(work)
        request.added_loads = ((target, prompt_load), (target, answer_load))
        target.load += prompt_load
        target.load += answer_load

    def _add_load_plain(self, request: RequestState, target: Target, replica: ReplicaState) -> None:
        """The same for a single replica that computes the whole prompt; inlined for the most common case."""
        facts = replica.facts
        if facts is None or not self._rule.in_seconds:
            self._add_load(request, target, request.prompt_tokens, [replica], [replica])
            return
        prompt_s = prefill_seconds(facts, request.prompt_tokens)
        answer_tokens = self._speeds.answer_tokens(request.request.model, request.output_tokens)
        answer_s = answer_tokens * facts.decode_step_s / max(1, facts.decode_batch)
        target.load += prompt_s
        target.load += answer_s
        request.added_loads = ((target, prompt_s), (target, answer_s))

    def _add_load_apart(
        self, request: RequestState, first_target: Target, second_target: Target, tokens: int
    ) -> None:
        assert first_target.view is not None
        assert second_target.view is not None
        work = PlacedWork(
            request, tokens, [first_target.view], [second_target.view], self._answer_tokens(request), True
        )
        loads = self._rule.loads(work)
        request.added_loads = ((first_target, loads[0]), (second_target, loads[1]))
        for target, load in request.added_loads:
            target.load += load

    def _answer_tokens(self, request: RequestState) -> float:
        return self._speeds.answer_tokens(request.request.model, request.output_tokens)

    def _send_to_replica(self, request: RequestState, replica: ReplicaState) -> None:
        single = self._table.singles.get(replica.member.id)
        self._start_on_replica(request, replica, single.route if single is not None else None, False)

    # Write the route into the request, and count it on the replicas.

    def _start_on_replica(
        self, request: RequestState, replica: ReplicaState, route: Route | None, abroad: bool
    ) -> None:
        request.route = route if route is not None else Route((Segment(replica.member.id, 0, None),))
        request.state = RUNNING
        request.earlier = ()
        request.done = 0
        request.last = replica
        request.last_tokens = self._affinity.to_compute(request, replica, 0, request.prompt_tokens)
        find_lender = (
            self._affinity.find_lender(request, replica, self.links, abroad, None)
            if request.request.blocks
            else None
        )
        if find_lender is not None:
            holding_replica, held_tokens = find_lender
            request.route = Route(
                (
                    Segment(holding_replica.member.id, 0, held_tokens),
                    Segment(replica.member.id, held_tokens, None),
                )
            )
            request.earlier, request.last_tokens = (
                ((holding_replica, 0),),
                request.prompt_tokens - held_tokens,
            )
            self._fleet.open(holding_replica, 0, 0)
            self.links.register_transfers(request, request.route)
        self._fleet.open(replica, request.last_tokens, request.total_tokens)
        self.deadlines.note_sent(request, replica, request.last_tokens)
        if replica.role == "decode" and self._capacity is not None:
            self._capacity.borne(replica, request)

    def _start_hand_over(
        self,
        request: RequestState,
        first_replica: ReplicaState,
        second_replica: ReplicaState,
        part: int,
        find_lender: Lender = None,
    ) -> None:
        """`first_replica` computes the first `part` tokens, after `lender` sent it a prefix; `second_replica` the
        rest."""
        prompt_tokens = request.prompt_tokens
        route = handed_over(first_replica.member.id, second_replica.member.id, part)
        own_tokens = self._affinity.to_compute(request, first_replica, 0, part)
        earlier: tuple[tuple[ReplicaState, int], ...] = ((first_replica, own_tokens),)
        if find_lender is not None:
            holding_replica, held_tokens = find_lender
            prefix_segment = Segment(holding_replica.member.id, 0, held_tokens)
            route = Route(
                (prefix_segment, Segment(first_replica.member.id, held_tokens, part), route.segments[-1])
            )
            earlier = ((holding_replica, 0), (first_replica, part - held_tokens))
        request.route, request.earlier, request.done = route, earlier, 0
        if request.request.blocks:
            self.links.register_transfers(request, route)
        request.state = RUNNING
        request.last, request.last_tokens = second_replica, prompt_tokens - part
        for replica, tokens in earlier:
            self._fleet.open(replica, tokens, 0)
        self._fleet.open(second_replica, request.last_tokens, request.total_tokens)
        self.deadlines.note_sent(request, first_replica, earlier[-1][1])


class RoutingResult(Enum):
    """What became of a request that the router was given."""

    SENT = "sent"
    WAITS_FOR_PAIR = "waits"
    NO_REPLICA = "nobody"  # No replica that could serve the request is ready.
    FULL = "full"  # Ready replicas exist, but none has room.


SENT = RoutingResult.SENT
