"""One request's route: the table says where it may go, the policies say where it goes.

    ways of its bucket ─▶ way (by turn, or by length threshold) ─▶ target (balance, prefix affinity) ─▶ segments

A plain target does all in place, a combo is opportunistic, a pair splits, a flow prefills and then decodes. `send`
writes the choice into the RequestState and counts it on the replicas."""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum

from potluck.core.routing import opportunistic, split
from potluck.core.routing.balance import Balancer, PlacedWork, prefill_seconds, unfailed
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
        room: ReplicaCapacity | None,
    ) -> None:
        self._facts, self._fleet, self._table = table.facts, table.fleet, table
        self._policy, self._affinity, self._speeds = policy, affinity, speeds
        self._rule = rule = table.rule
        self._room = room  # None: whoever is sent to has room.
        self.timely = DeadlineCheck(room, affinity, speeds, table.fleet)
        self._full = False  # Whether somebody was ready but had no room for the present request.
        self._share = split.printed_tokens if policy.split_rule == "printed" else split.partial_tokens
        self._by_load, self.learns = rule.by_load, rule.learns
        self.links = LinkStates(table.facts)
        self.detours = LinkAvoidance(table, self.links, room)
        self.thresholds = LengthThresholds(table, affinity)

    def adopt(self, plan: Plan) -> None:
        self.links.codecs = codecs_between(plan)
        self.thresholds.adopt()

    def linked(self, event: LinkReported) -> None:
        self.links.reported(event)
        self.thresholds.linked(event)

    def send_to(self, target: Target, req: RequestState, table: ModelRoutes) -> RoutingResult:
        """The same as `send` where only this target may have room that it had not before."""
        ways, room = self._table.ways(table, table.kind(req)[0], req.total_tokens), self._room
        if not ways.simple or req.avoid or req.request.blocks or room is None or room.several:
            return self.send(req, table)
        fits = target in ways.closed.prefills and room.fits(target, req)
        return self.to(target, req) if fits else RoutingResult.FULL

    def send(self, req: RequestState, table: ModelRoutes) -> RoutingResult:
        prompt, total = req.prompt_tokens, req.total_tokens
        bucket = bisect_left(table.longest_tokens, prompt)
        ways = table.ways.get((bucket, 0)) if total <= table.limits_tokens[0] else None
        if ways is None:
            ways = self._table.ways(table, bucket, total)
        room = self._room
        if ways.simple and not (req.avoid or req.request.blocks or (room is not None and room.several)):
            # By far the most requests: written out, as each call would cost as much as the decision.
            target = ways.closed.prefills.pick()
            if target is not None:
                view = target.view
                if view is None:
                    target = self._roomy(ways.closed.prefills, target, req, CLOSED_WAY)
                    return self.to(target, req) if target is not None else RoutingResult.FULL
                if not easy(view) or prompt > view.easy[1]:
                    target = self._roomy(ways.closed.prefills, target, req, CLOSED_WAY)
                    if target is None:
                        return RoutingResult.FULL
                    if target.view is not view or prompt > view.easy[1]:
                        return self.to(target, req)
                req.route, req.state, req.last = target.route, RUNNING, view
                req.last_tokens = prompt
                self._fleet.open(view, prompt, total)
                if self._by_load:
                    self._charge_plain(req, target, view)
                return SENT
        self._full = False
        answer = self._through(ways, req, table)
        if answer is RoutingResult.NOBODY:
            if self._full and ways.simple:
                return RoutingResult.FULL
            # Where flows are full or gone, whoever has room may do all of it; who prefills one by one comes last.
            spares = [self._table.ways(table, place, total) for place in (CLOSED, ANY)]
            if not any(spare.closed.prefills.members() for spare in spares):
                spares = [self._table.ways(table, LAST, total)]
            for spare in spares:
                target = self._target(spare.closed.prefills, req)
                if target is not None:
                    return self.to(target, req)
        return RoutingResult.FULL if self._full and answer is RoutingResult.NOBODY else answer

    def in_time(self, req: RequestState, ways: RouteOptions, left_s: float) -> bool:
        """Send a request where it is in time though there is no room; whether that is anywhere."""
        if ways.simple:
            target = self.timely.soonest(ways.closed.prefills, req, left_s)
            return target is not None and self.to(target, req) is SENT
        ends = self.timely.flow(ways, req, left_s)
        return ends is not None and self._over(*ends, req) is SENT

    def _through(self, ways: RouteOptions, req: RequestState, table: ModelRoutes) -> RoutingResult:
        if ways.simple:
            if self._room is not None and self._room.several and not req.attempt:
                via = self._room.tenants.via(ways.closed.prefills, req)
                if via is not None and 2 * self._affinity.most_cached(req) <= req.prompt_tokens:
                    return self._over(*via, req)
            target = self._target(ways.closed.prefills, req)
            return self.to(target, req) if target is not None else RoutingResult.NOBODY
        turns, tried, fetches, shut = [ways.turns], False, False, NOWHERE
        choices = self.thresholds.choices(req, ways)
        if choices:
            choices = self.detours.sooner(choices, req, ways, table) if self.learns else choices
            away = [choice for choice in choices.values() if choice.remote]
            fetches = any(choice.fetch for choice in choices.values() if not choice.remote)
            turns = [ways.remote, ways.local] if away else [ways.local, ways.remote]
            if 0 < len(away) < len(choices):
                shut = frozenset(link for link, choice in choices.items() if not choice.remote)
        for turn in turns:
            way = self._way(turn, req, ways, table, shut)
            ways_left = [] if way is None else [way]
            while ways_left:
                now = ways_left.pop()
                choice = choices.get(now.link) if now.crosses else None
                answer = self._along(now, req, fetches if choice is None else choice.fetch)
                if answer is not RoutingResult.NOBODY:
                    return answer
                if self._full and not tried:
                    others = [other for other in turn.members() if other is not way]
                    ways_left, tried = [other for other in others if self._open(other, req, shut)], True
        return RoutingResult.NOBODY

    def _open(self, way: RouteOption, req: RequestState, shut: frozenset[str]) -> bool:
        return not (way.link in self.links.dead or way.link in req.avoid or way.link in shut)

    def _way(
        self, turns: Turns, req: RequestState, ways: RouteOptions, table: ModelRoutes, shut: frozenset[str]
    ) -> RouteOption | None:
        """Whose turn it is, unless its link is not open or is late for it."""
        way = turns.pick()
        if way is None or not (way.crosses or self.links.dead or req.avoid):
            return way
        for _ in range(len(turns)):
            if self._open(way, req, shut) and not (
                self.learns and way.crosses and self.detours.late(way, req, ways, table)
            ):
                return way
            way = turns.pick() or way
        return None

    def _along(self, way: RouteOption, req: RequestState, fetch: bool) -> RoutingResult:
        first = self._target(way.prefills, req, CLOSED_WAY if way.decodes is None else PREFILL)
        if first is None:
            return RoutingResult.NOBODY
        if way.decodes is None:
            return self.to(first, req, fetch)
        second = self._target(way.decodes, req, DECODE)
        if second is None or first.view is None or second.view is None:
            return RoutingResult.NOBODY
        if first is second:
            return self.to(first, req, fetch)
        if not way.crosses and self.timely.at_home(req, first.view, second.view):
            return self.to(second, req, fetch)
        holder = self._affinity.lender(req, first.view, self.links, fetch, second.view)
        return self._over(first, second, req, holder)

    def _over(self, first: Target, second: Target, req: RequestState, holder: Lender = None) -> RoutingResult:
        here, there = first.view, second.view
        assert here is not None
        assert there is not None
        if here.kv_version != there.kv_version:
            return self.to(second, req)
        self._hand_over(req, here, there, req.prompt_tokens, holder)
        self.links.send(req, here.member.region, there.member.region, req.prompt_tokens)
        if self._by_load:
            self._charge_apart(req, first, second, req.earlier[-1][1])
        return SENT

    def _roomy(self, chooser: Balancer, picked: Target, req: RequestState, phase: int) -> Target | None:
        """Whose turn it is, or another when that one is full; None when all are. Retries go wherever they may."""
        room, view = self._room, picked.view
        if room is None or req.attempt:
            return picked
        calm = view is not None and not room.several and easy(view)
        if not calm and req.place is None:
            room.seen(req)
        if self.learns and phase == CLOSED_WAY and view is not None and req.prompt_tokens > view.easy[1]:
            aside = self.timely.aside(chooser, view, req)
            if aside is not None:
                return aside
        alien = view is not None and phase == CLOSED_WAY and view.role == "decode"  # it may bear no prompts
        if calm and not alien:
            return picked
        roomy = room.other(chooser, picked, req, phase)
        if roomy is None:
            self._full = True
        elif roomy is not picked:
            chooser.swap(picked, roomy)
        return roomy

    def _target(self, chooser: Balancer, req: RequestState, phase: int = CLOSED_WAY) -> Target | None:
        """Whose turn it is, unless it is full, failed the request before, or another holds much of its prefix."""
        target = chooser.pick()
        if target is None:
            return None
        if req.avoid and avoided(target, req.avoid):
            target = unfailed(chooser, req)
            if target is None:
                return None
        if phase != DECODE and req.request.blocks and self._policy.affinity > 0:
            better = self._affinity.better(target, chooser, req)
            if better is not None:
                chooser.swap(target, better)
                target = better
        return self._roomy(chooser, target, req, phase)

    def to(self, target: Target, req: RequestState, abroad: bool = False) -> RoutingResult:
        """Inside a target: who does what. `abroad`: prefixes may be fetched from other regions."""
        if target.kind == PLAIN:
            assert target.view is not None
            self._in_place(req, target.view, target.route, abroad)
            if self._by_load:
                self._charge(req, target, req.last_tokens, [target.view], [target.view])
            return SENT
        if target.kind == COMBO:
            if self._by_load:
                self._charge(req, target, req.prompt_tokens, target.prefills, target.decodes)
            self._combo(target, req)
            return SENT
        return self.pair(target, req)

    def _combo(self, target: Target, req: RequestState) -> None:
        prefills, decodes = unavoided(target.prefills, req.avoid), unavoided(target.decodes, req.avoid)
        target.turn += 1
        if prefills[0].role == "mixed":  # nobody only prefills any more
            self._alone(req, opportunistic.least_loaded(prefills, opportunistic.fullness))
            return
        room = self._room
        if not self._policy.opportunistic:
            first, second = prefills[target.turn % len(prefills)], decodes[target.turn % len(decodes)]
        else:
            target.busy = busier(target.busy, prefills)
            busy = target.usage.seen(req.request.arrival_s, req.prompt_tokens, prefills)
            alone = opportunistic.in_place(prefills, decodes, opportunistic.next_step_seconds, target.busy)
            if alone is not None and (room is None or room.keeps_pace(alone, req, busy)):
                self._alone(req, alone)
                return
            if req.request.blocks and self._policy.affinity > 0:
                first = self._affinity.prefiller(prefills, req)
            else:
                first = opportunistic.shortest_queue(prefills, seconds_per_token)
            second = opportunistic.least_loaded(decodes, opportunistic.fullness)
        if self.timely.at_home(req, first, second):
            self._alone(req, second)
            return
        lender = self._affinity.lender(req, first, self.links, False, second)
        self._hand_over(req, first, second, req.prompt_tokens, lender)

    def pair(self, target: Target, req: RequestState) -> RoutingResult:
        """Split a prompt between a pair's two sides, or let it wait for a place on the low-end one."""
        lows, highs = unavoided(target.prefills, req.avoid), unavoided(target.decodes, req.avoid)
        low = min(lows, key=lambda view: view.open_prefill_tokens)
        high = min(highs, key=opportunistic.fullness)
        if low.kv_version != high.kv_version:
            self._alone(req, high)
            return SENT
        splits = self._facts.splits.get(low.member.template) if self._policy.split else None
        if self._by_load and not req.charges:
            self._charge(req, target, req.prompt_tokens, [low], [high])
        target.busy = busier(target.busy, target.prefills)
        part = prompt = req.prompt_tokens
        if splits is not None:
            part = self._share(part, splits, split.high_end(high))
            if target.in_low >= split.MOST_IN_LOW * len(target.prefills):
                if self._policy.split_overflow and split.passes(splits, target, low, high, prompt, part):
                    self._alone(req, high)
                    return SENT
                req.state, req.pair = WAITING, target
                target.waiting.append(req.request.id)
                return RoutingResult.WAITS
        req.pair = None
        if self._policy.low_decodes and split.stays_low(target, low, high, req.total_tokens):
            self._alone(req, low)
            return SENT
        if splits is not None:
            req.pair = target
            target.in_low += 1
        self._hand_over(req, low, high, part)
        return SENT

    # What a request counts for on its targets, under balances by load; `charges` remembers it, to take it off again.

    def _charge(
        self, req: RequestState, target: Target, tokens: int, prefills: Views, decodes: Views
    ) -> None:
        """All of a request on one target; prompt and answer apart, as they end apart."""
        if self._rule.in_seconds and decodes[0].facts is None:
            first, rest = 0.0, self._table.request_s(target) or 1.0
        else:
            work = PlacedWork(req, tokens, prefills, decodes, self._answer_tokens(req), False)
            first, rest = self._rule.loads(work)
        req.charges = ((target, first), (target, rest))
        target.load += first
        target.load += rest

    def _charge_plain(self, req: RequestState, target: Target, view: ReplicaState) -> None:
        """The same on a single replica that computes all of the prompt: most requests, so written out."""
        facts = view.facts
        if facts is None or not self._rule.in_seconds:
            self._charge(req, target, req.prompt_tokens, [view], [view])
            return
        first_s = prefill_seconds(facts, req.prompt_tokens)
        answer_tokens = self._speeds.answer_tokens(req.request.model, req.output_tokens)
        rest_s = answer_tokens * facts.decode_step_s / max(1, facts.decode_batch)
        target.load += first_s
        target.load += rest_s
        req.charges = ((target, first_s), (target, rest_s))

    def _charge_apart(self, req: RequestState, first: Target, second: Target, tokens: int) -> None:
        assert first.view is not None
        assert second.view is not None
        work = PlacedWork(req, tokens, [first.view], [second.view], self._answer_tokens(req), True)
        loads = self._rule.loads(work)
        req.charges = ((first, loads[0]), (second, loads[1]))
        for target, load in req.charges:
            target.load += load

    def _answer_tokens(self, req: RequestState) -> float:
        return self._speeds.answer_tokens(req.request.model, req.output_tokens)

    def _alone(self, req: RequestState, view: ReplicaState) -> None:
        single = self._table.singles.get(view.member.id)
        self._in_place(req, view, single.route if single is not None else None, False)

    # Into the flight, and onto the replicas' counts.

    def _in_place(self, req: RequestState, view: ReplicaState, route: Route | None, abroad: bool) -> None:
        req.route = route if route is not None else Route((Segment(view.member.id, 0, None),))
        req.state = RUNNING
        req.earlier = ()
        req.done = 0
        req.last = view
        req.last_tokens = self._affinity.to_compute(req, view, 0, req.prompt_tokens)
        lender = self._affinity.lender(req, view, self.links, abroad, None) if req.request.blocks else None
        if lender is not None:
            holder, held = lender
            req.route = Route((Segment(holder.member.id, 0, held), Segment(view.member.id, held, None)))
            req.earlier, req.last_tokens = ((holder, 0),), req.prompt_tokens - held
            self._fleet.open(holder, 0, 0)
            self.links.load(req, req.route)
        self._fleet.open(view, req.last_tokens, req.total_tokens)
        self.timely.sent(req, view, req.last_tokens)
        if view.role == "decode" and self._room is not None:
            self._room.borne(view, req)

    def _hand_over(
        self, req: RequestState, first: ReplicaState, second: ReplicaState, part: int, lender: Lender = None
    ) -> None:
        """`first` computes the first `part` tokens, after `lender` sent it a prefix; `second` the rest."""
        prompt = req.prompt_tokens
        route = handed_over(first.member.id, second.member.id, part)
        own = self._affinity.to_compute(req, first, 0, part)
        earlier: tuple[tuple[ReplicaState, int], ...] = ((first, own),)
        if lender is not None:
            holder, held = lender
            head = Segment(holder.member.id, 0, held)
            route = Route((head, Segment(first.member.id, held, part), route.segments[-1]))
            earlier = ((holder, 0), (first, part - held))
        req.route, req.earlier, req.done = route, earlier, 0
        if req.request.blocks:
            self.links.load(req, route)
        req.state = RUNNING
        req.last, req.last_tokens = second, prompt - part
        for view, tokens in earlier:
            self._fleet.open(view, tokens, 0)
        self._fleet.open(second, req.last_tokens, req.total_tokens)
        self.timely.sent(req, first, earlier[-1][1])


class RoutingResult(Enum):
    SENT = "sent"
    WAITS = "waits"
    NOBODY = "nobody"  # No replica is ready that it could go to.
    FULL = "full"  # Some are, and none has room.


SENT = RoutingResult.SENT
