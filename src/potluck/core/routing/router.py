"""One request's route: the table says where it may go, the policies say where it goes.

    ways of its bucket ─▶ way (by turn, or by length threshold) ─▶ target (balance, prefix affinity) ─▶ segments
                                                          plain: in place      combo: opportunistic
                                                          pair: split          flow: prefill, then decode

`send` writes the choice into the Flight and counts it on the replicas; `Answer` says whether it could.
"""

from __future__ import annotations

from bisect import bisect_left

from potluck.core.admission.mixes import CLOSED as CLOSED_WAY
from potluck.core.admission.mixes import DECODE, PREFILL
from potluck.core.admission.room import Room, easy
from potluck.core.admission.timely import Timely
from potluck.core.brain.events import LinkReported
from potluck.core.brain.facts import BLOCK_TOKENS, Facts
from potluck.core.brain.fleet import Fleet, View
from potluck.core.brain.flight import NOWHERE, RUNNING, WAITING, Flight
from potluck.core.brain.policy import Policy
from potluck.core.routing.affinity import Affinity
from potluck.core.routing.answers import SENT, Answer
from potluck.core.routing.balance import BY_LOAD, Chooser, unfailed
from potluck.core.routing.charges import Charges
from potluck.core.routing.detours import Detours
from potluck.core.routing.links import Links
from potluck.core.routing.opportunistic import (
    busier,
    fullness,
    in_place,
    least_loaded,
    next_step_seconds,
    seconds_per_token,
    shortest_queue,
)
from potluck.core.routing.pairs import high_end, passes, stays_low
from potluck.core.routing.speeds import Speeds
from potluck.core.routing.split import MOST_IN_LOW, partial_tokens, printed_tokens
from potluck.core.routing.table import ANY, CLOSED, ModelTable, Table
from potluck.core.routing.targets import COMBO, PLAIN, Target, avoided, unavoided
from potluck.core.routing.thresholds import Thresholds
from potluck.core.routing.ways import Way, Ways
from potluck.core.routing.weighted import Turns
from potluck.core.values.crossings import codecs_between
from potluck.core.values.plan import Plan
from potluck.core.values.route import Route, Segment, handed_over


class Router:
    """Chooses routes. All its state is the table's, the thresholds' and the counts on replicas."""

    def __init__(
        self,
        facts: Facts,
        policy: Policy,
        fleet: Fleet,
        table: Table,
        affinity: Affinity,
        speeds: Speeds,
        room: Room | None,
    ) -> None:
        self._facts = facts
        self._policy = policy
        self._fleet = fleet
        self._table = table
        self._affinity = affinity
        self._charges = Charges(policy, table, speeds)
        self._room = room
        """None: whoever is sent to has room."""
        self.timely = Timely(room, affinity, speeds, fleet)
        self._full = False
        """Whether somebody was ready but had no room for the present request."""
        self._share = printed_tokens if policy.split_rule == "printed" else partial_tokens
        self._by_load = policy.balance in BY_LOAD
        self._learns = policy.balance == "learned"
        self.links = Links(facts)
        self.detours = Detours(table, self.links)
        self.thresholds = Thresholds(table, fleet, affinity)

    def adopt(self, plan: Plan) -> None:
        """The table has a new plan."""
        self.links.codecs = codecs_between(plan)
        self.thresholds.adopt()

    def linked(self, event: LinkReported) -> None:
        """A link said how full it is."""
        self.links.reported(event)
        self.thresholds.linked(event)

    def send_to(self, target: Target, flight: Flight, table: ModelTable) -> Answer:
        """The same as `send` where only this target may have room that it had not before."""
        ways, room = self._table.ways(table, table.kind(flight)[0], flight.total_tokens), self._room
        if not ways.simple or flight.avoid or flight.request.blocks or room is None or room.several:
            return self.send(flight, table)
        fits = target in ways.closed.prefills and room.fits(target, flight)
        return self.to(target, flight) if fits else Answer.FULL

    def send(self, flight: Flight, table: ModelTable) -> Answer:
        """Choose a route for a request that is not on its way."""
        prompt, total = flight.prompt_tokens, flight.total_tokens
        bucket = bisect_left(table.longest_tokens, prompt)
        ways = table.ways.get((bucket, 0)) if total <= table.limits_tokens[0] else None
        if ways is None:
            ways = self._table.ways(table, bucket, total)
        room = self._room
        if ways.simple and not (flight.avoid or flight.request.blocks or (room is not None and room.several)):
            # By far the most requests: written out, as each call would cost as much as the decision.
            target = ways.closed.prefills.pick()
            if target is not None:
                view = target.view
                if view is None:
                    target = self._roomy(ways.closed.prefills, target, flight, CLOSED_WAY)
                    return self.to(target, flight) if target is not None else Answer.FULL
                if not easy(view) or prompt > view.easy[1]:
                    target = self._roomy(ways.closed.prefills, target, flight, CLOSED_WAY)
                    if target is None:
                        return Answer.FULL
                    if target.view is not view or prompt > view.easy[1]:
                        return self.to(target, flight)
                flight.route, flight.state, flight.last = target.route, RUNNING, view
                flight.last_tokens = prompt
                self._fleet.open(view, prompt, total)
                if self._by_load:
                    self._charges.plain(flight, target, view)
                return SENT
        self._full = False
        answer = self._through(ways, flight, table)
        if answer is Answer.NOBODY:
            if self._full and ways.simple:
                return Answer.FULL
            # Where flows are full or gone, whoever has room may do all of it.
            for bucket in (CLOSED, ANY):
                spare = self._table.ways(table, bucket, total)
                target = self._target(spare.closed.prefills, flight)
                if target is not None:
                    return self.to(target, flight)
        return Answer.FULL if self._full and answer is Answer.NOBODY else answer

    def in_time(self, flight: Flight, ways: Ways, left_s: float) -> bool:
        """Send a request where it is in time though there is no room; whether that is anywhere."""
        if ways.simple:
            target = self.timely.soonest(ways.closed.prefills, flight, left_s)
            return target is not None and self.to(target, flight) is SENT
        ends = self.timely.flow(ways, flight, left_s)
        return ends is not None and self._over(*ends, flight) is SENT

    def _through(self, ways: Ways, flight: Flight, table: ModelTable) -> Answer:
        if ways.simple:
            if self._room is not None and self._room.several and not flight.attempt:
                via = self._room.between.via(ways.closed.prefills, flight)
                if via is not None and 2 * self._affinity.most_cached(flight) <= flight.prompt_tokens:
                    return self._over(*via, flight)
            target = self._target(ways.closed.prefills, flight)
            return self.to(target, flight) if target is not None else Answer.NOBODY
        turns, tried = [ways.turns], False
        choices = self.thresholds.choices(flight, ways)
        fetches, shut = False, NOWHERE
        if choices:
            away = [choice for choice in choices.values() if choice.remote]
            fetches = any(choice.fetch for choice in choices.values() if not choice.remote)
            turns = [ways.remote, ways.local] if away else [ways.local, ways.remote]
            if 0 < len(away) < len(choices):
                shut = frozenset(link for link, choice in choices.items() if not choice.remote)
        for each in turns:
            way = self._way(each, flight, ways, table, shut)
            ways_left = [] if way is None else [way]
            while ways_left:
                now = ways_left.pop()
                choice = choices.get(now.link) if now.crosses else None
                answer = self._along(now, flight, fetches if choice is None else choice.fetch)
                if answer is not Answer.NOBODY:
                    return answer
                if self._full and not tried:
                    others = [other for other in each.members() if other is not way]
                    ways_left, tried = [other for other in others if self._open(other, flight, shut)], True
        return Answer.NOBODY

    def _open(self, way: Way, flight: Flight, shut: frozenset[str]) -> bool:
        """Whether a way's link carries something, did not fail the request before, and is for such lengths."""
        return not (way.link in self.links.dead or way.link in flight.avoid or way.link in shut)

    def _way(
        self, turns: Turns[Way], flight: Flight, ways: Ways, table: ModelTable, shut: frozenset[str]
    ) -> Way | None:
        """Whose turn it is, unless its link is not open or is late for it."""
        way = turns.pick()
        if way is None or not (way.crosses or self.links.dead or flight.avoid):
            return way
        for _ in range(len(turns)):
            if self._open(way, flight, shut) and not (
                self._learns and way.crosses and self.detours.late(way, flight, ways, table)
            ):
                return way
            way = turns.pick() or way
        return None

    def _along(self, way: Way, flight: Flight, fetch: bool) -> Answer:
        first = self._target(way.prefills, flight, CLOSED_WAY if way.decodes is None else PREFILL)
        if first is None:
            return Answer.NOBODY
        if way.decodes is None:
            return self.to(first, flight, fetch)
        second = self._target(way.decodes, flight, DECODE)
        if second is None or first.view is None or second.view is None:
            return Answer.NOBODY
        if first is second:
            return self.to(first, flight, fetch)
        if not way.crosses and self.timely.at_home(flight, first.view, second.view):
            return self.to(second, flight, fetch)
        holder = self._lender(flight, first.view, fetch, second.view)
        return self._over(first, second, flight, holder)

    def _over(
        self, first: Target, second: Target, flight: Flight, holder: tuple[View, int] | None = None
    ) -> Answer:
        """The prompt on one replica, the answer on another."""
        here, there = first.view, second.view
        assert here is not None
        assert there is not None
        if here.kv_version != there.kv_version:
            return self.to(second, flight)
        self._hand_over(flight, here, there, flight.prompt_tokens, holder)
        self.links.send(flight, here.member.region, there.member.region, flight.prompt_tokens)
        if self._by_load:
            self._charges.flow(flight, first, second, flight.earlier[-1][1])
        return SENT

    def _roomy(self, chooser: Chooser, picked: Target, flight: Flight, phase: int) -> Target | None:
        """Whose turn it is, or another when that one is full; None when all are. Retries go wherever they may."""
        room, view = self._room, picked.view
        if room is None or flight.attempt:
            return picked
        calm = view is not None and not room.several and easy(view)
        if not calm and flight.place is None:
            room.seen(flight)
        if self._learns and phase == CLOSED_WAY and view is not None and flight.prompt_tokens > view.easy[1]:
            aside = self.timely.aside(chooser, view, flight)
            if aside is not None:
                return aside
        alien = view is not None and phase == CLOSED_WAY and view.role == "decode"  # it may bear no prompts
        if calm and not alien:
            return picked
        found = room.other(chooser, picked, flight, phase)
        if found is None:
            self._full = True
        elif found is not picked:
            chooser.swap(picked, found)
        return found

    def _target(self, chooser: Chooser, flight: Flight, phase: int = CLOSED_WAY) -> Target | None:
        """Whose turn it is, unless it is full, failed the request before, or another holds much of its prefix."""
        target = chooser.pick()
        if target is None:
            return None
        if flight.avoid and avoided(target, flight.avoid):
            target = unfailed(chooser, flight)
            if target is None:
                return None
        if phase != DECODE and flight.request.blocks and self._policy.affinity > 0:
            better = self._affinity.better(target, chooser, flight)
            if better is not None:
                chooser.swap(target, better)
                target = better
        return self._roomy(chooser, target, flight, phase)

    def _lender(
        self, flight: Flight, first: View, abroad: bool, but: View | None = None
    ) -> tuple[View, int] | None:
        """Whose prefix is fetched before `first` computes."""
        if not flight.request.blocks:
            return None
        return self._affinity.lender(flight, first, self.links, abroad, but)

    def to(self, target: Target, flight: Flight, abroad: bool = False) -> Answer:
        """Inside a target: who does what. `abroad`: prefixes may be fetched from other regions."""
        if target.kind == PLAIN:
            assert target.view is not None
            self._in_place(flight, target.view, target.route, abroad)
            if self._by_load:
                self._charges.whole(flight, target, flight.last_tokens, [target.view], [target.view])
            return SENT
        if target.kind == COMBO:
            if self._by_load:
                self._charges.whole(flight, target, flight.prompt_tokens, target.prefills, target.decodes)
            self._combo(target, flight)
            return SENT
        return self.pair(target, flight)

    def _combo(self, target: Target, flight: Flight) -> None:
        prefills, decodes = unavoided(target.prefills, flight.avoid), unavoided(target.decodes, flight.avoid)
        target.turn += 1
        if prefills[0].role == "mixed":  # nobody only prefills any more
            self._alone(flight, least_loaded(prefills, fullness))
            return
        room = self._room
        if not self._policy.opportunistic:
            first, second = prefills[target.turn % len(prefills)], decodes[target.turn % len(decodes)]
        else:
            target.busy = busier(target.busy, prefills)
            busy = target.usage.seen(flight.request.arrival_s, flight.prompt_tokens, prefills)
            alone = in_place(prefills, decodes, next_step_seconds, target.busy)
            if alone is not None and (room is None or room.keeps_pace(alone, flight, busy)):
                self._alone(flight, alone)
                return
            if flight.request.blocks and self._policy.affinity > 0:
                first = self._affinity.prefiller(prefills, flight)
            else:
                first = shortest_queue(prefills, seconds_per_token)
            second = least_loaded(decodes, fullness)
        if self.timely.at_home(flight, first, second):
            self._alone(flight, second)
            return
        lender = self._lender(flight, first, False, second)
        self._hand_over(flight, first, second, flight.prompt_tokens, lender)

    def pair(self, target: Target, flight: Flight) -> Answer:
        """Split a prompt between a pair's two sides, or let it wait for a place on the low-end one."""
        lows, highs = unavoided(target.prefills, flight.avoid), unavoided(target.decodes, flight.avoid)
        low = min(lows, key=lambda view: view.open_prefill_tokens)
        high = min(highs, key=fullness)
        if low.kv_version != high.kv_version:
            self._alone(flight, high)
            return SENT
        splits = self._facts.splits.get(low.member.template) if self._policy.split else None
        if self._by_load and not flight.charges:
            self._charges.whole(flight, target, flight.prompt_tokens, [low], [high])
        target.busy = busier(target.busy, target.prefills)
        part = flight.prompt_tokens
        if splits is not None:
            decodes, context, free = high_end(high)
            part = self._share(part, splits, decodes, context, free, BLOCK_TOKENS)
            if target.in_low >= MOST_IN_LOW * len(target.prefills):
                if self._policy.split_overflow and passes(
                    splits, target, low, high, flight.prompt_tokens, part
                ):
                    self._alone(flight, high)
                    return SENT
                flight.state, flight.pair = WAITING, target
                target.waiting.append(flight.request.id)
                return Answer.WAITS
        flight.pair = None
        if self._policy.low_decodes and stays_low(target, low, high, flight.total_tokens):
            self._alone(flight, low)
            return SENT
        if splits is not None:
            flight.pair = target
            target.in_low += 1
        self._hand_over(flight, low, high, part)
        return SENT

    def _alone(self, flight: Flight, view: View) -> None:
        """On one of a group's replicas."""
        single = self._table.singles.get(view.member.id)
        self._in_place(flight, view, single.route if single is not None else None)

    # Into the flight, and onto the replicas' counts.

    def _in_place(self, flight: Flight, view: View, route: Route | None, abroad: bool = False) -> None:
        flight.route = route if route is not None else Route((Segment(view.member.id, 0, None),))
        flight.state = RUNNING
        flight.earlier = ()
        flight.done = 0
        flight.last = view
        flight.last_tokens = self._affinity.to_compute(flight, view, 0, flight.prompt_tokens)
        lender = self._lender(flight, view, abroad) if flight.request.blocks else None
        if lender is not None:
            holder, held = lender
            flight.route = Route((Segment(holder.member.id, 0, held), Segment(view.member.id, held, None)))
            flight.earlier, flight.last_tokens = ((holder, 0),), flight.prompt_tokens - held
            self._fleet.open(holder, 0, 0)
            self.links.load(flight, flight.route)
        self._fleet.open(view, flight.last_tokens, flight.total_tokens)
        self.timely.sent(flight, view, flight.last_tokens)
        if view.role == "decode" and self._room is not None:
            self._room.borne(view, flight)

    def _hand_over(
        self, flight: Flight, first: View, second: View, part: int, lender: tuple[View, int] | None = None
    ) -> None:
        """`first` computes the first `part` tokens, after `lender` sent it a prefix; `second` the rest."""
        prompt = flight.prompt_tokens
        route = handed_over(first.member.id, second.member.id, part)
        earlier: tuple[tuple[View, int], ...] = ((first, self._affinity.to_compute(flight, first, 0, part)),)
        if lender is not None:
            holder, held = lender
            head = Segment(holder.member.id, 0, held)
            route = Route((head, Segment(first.member.id, held, part), route.segments[-1]))
            earlier = ((holder, 0), (first, part - held))
        flight.route, flight.earlier, flight.done = route, earlier, 0
        if flight.request.blocks:
            self.links.load(flight, route)
        flight.state = RUNNING
        flight.last, flight.last_tokens = second, prompt - part
        for view, tokens in earlier:
            self._fleet.open(view, tokens, 0)
        self._fleet.open(second, flight.last_tokens, flight.total_tokens)
        self.timely.sent(flight, first, earlier[-1][1])
