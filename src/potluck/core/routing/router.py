"""One request's route: the table says where it may go, the policies say where it goes.

    ways of its bucket ─▶ way (by turn, or by length threshold) ─▶ target (balance, prefix affinity) ─▶ segments
                                                          plain: in place      combo: opportunistic
                                                          pair: split          flow: prefill, then decode

`send` writes the choice into the Flight and counts it on the replicas; `Answer` says whether it could.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum

from potluck.core.brain.events import LinkReported
from potluck.core.brain.facts import BLOCK_TOKENS, Facts, SplitFacts
from potluck.core.brain.fleet import Fleet, View
from potluck.core.brain.flight import RUNNING, WAITING, Flight
from potluck.core.brain.policy import Policy
from potluck.core.routing.affinity import Affinity
from potluck.core.routing.balance import BY_LOAD, Chooser
from potluck.core.routing.charges import Charges
from potluck.core.routing.opportunistic import busier, in_place, least_loaded, shortest_queue, step_seconds
from potluck.core.routing.speeds import Speeds
from potluck.core.routing.split import (
    MOST_IN_LOW,
    keeps_decode,
    partial_prefill_s,
    partial_tokens,
    sooner_whole,
)
from potluck.core.routing.table import ANY, CLOSED, ModelTable, Table
from potluck.core.routing.targets import COMBO, PLAIN, Target
from potluck.core.routing.threshold import Threshold, after_report, decide, rebased
from potluck.core.routing.ways import Way, Ways
from potluck.core.routing.weighted import Turns
from potluck.core.values.route import Route, Segment, handed_over

TRIES = 4
"""Turns that are looked at for one that a failed request need not avoid, before all are."""


class Answer(Enum):
    SENT = "sent"
    WAITS = "waits"
    """For a place on a pair's low-end replica."""
    NOBODY = "nobody"
    """No replica is ready that it could go to."""


SENT = Answer.SENT


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
    ) -> None:
        self._facts = facts
        self._policy = policy
        self._fleet = fleet
        self._table = table
        self._affinity = affinity
        self._charges = Charges(policy, table, speeds)
        self._by_load = policy.balance in BY_LOAD
        self.thresholds: dict[str, Threshold] = {}
        """By model, where length decides between regions."""
        self.dead_links: set[str] = set()
        """`source->target` of links that carry nothing at present."""

    def adopt(self) -> None:
        """The table has a new plan: its length thresholds, each moved as far as the one before it was."""
        before, self.thresholds = self.thresholds, {}
        for model, table in self._table.models.items():
            if table.threshold is not None:
                old, base_tokens = before.get(model), table.threshold.base_tokens
                self.thresholds[model] = rebased(old, base_tokens) if old is not None else table.threshold

    def rebase(self, model: str, tokens: float) -> None:
        """A new long-term threshold."""
        if model in self.thresholds:
            self.thresholds[model] = rebased(self.thresholds[model], tokens)

    def linked(self, event: LinkReported) -> None:
        """A link said how full it is."""
        link = f"{event.source}->{event.target}"
        (self.dead_links.discard if event.gbps > 0 else self.dead_links.add)(link)
        for model, threshold in self.thresholds.items():
            flows = self._table.models[model].offers.flows
            if any(flow.source == event.source and flow.target == event.target for flow in flows):
                self.thresholds[model] = after_report(threshold, event)

    def send(self, flight: Flight, table: ModelTable) -> Answer:
        """Choose a route for a request that is not on its way."""
        prompt, total = flight.prompt_tokens, flight.total_tokens
        bucket = bisect_left(table.longest_tokens, prompt)
        ways = table.ways.get((bucket, 0)) if total <= table.limits_tokens[0] else None
        if ways is None:
            ways = self._table.ways(table, bucket, total)
        if ways.simple and not (self._by_load or flight.avoid or flight.request.blocks):
            # By far the most requests: written out, as each call would cost as much as the decision.
            target = ways.closed.prefills.pick()
            if target is not None:
                view = target.view
                if view is None:
                    return self._to(target, flight)
                flight.route, flight.state, flight.last = target.route, RUNNING, view
                flight.last_tokens = prompt
                self._fleet.open(view, prompt, total)
                return SENT
        answer = self._through(ways, flight, table)
        if answer is Answer.NOBODY:
            for bucket in (CLOSED, ANY):
                spare = self._table.ways(table, bucket, total)
                target = self._target(spare.closed.prefills, flight)
                if target is not None:
                    return self._to(target, flight)
        return answer

    def _through(self, ways: Ways, flight: Flight, table: ModelTable) -> Answer:
        if ways.simple:
            target = self._target(ways.closed.prefills, flight)
            return self._to(target, flight) if target is not None else Answer.NOBODY
        fetch = False
        turns = [ways.turns]
        threshold = self.thresholds.get(flight.request.model)
        if threshold is not None:
            choice = decide(threshold, flight.prompt_tokens, *self._affinity.by_side(flight, ways))
            fetch = choice.fetch
            turns = [ways.remote, ways.local] if choice.remote else [ways.local, ways.remote]
        for each in turns:
            way = self._way(each, flight)
            if way is not None:
                answer = self._along(way, flight, fetch)
                if answer is not Answer.NOBODY:
                    return answer
        return Answer.NOBODY

    def _way(self, turns: Turns[Way], flight: Flight) -> Way | None:
        """Whose turn it is, unless its link carries nothing or failed the request before."""
        way = turns.pick()
        if way is None or (not self.dead_links and not flight.avoid):
            return way
        for _ in range(len(turns)):
            link = f"{way.source}->{way.target}"
            if link not in self.dead_links and link not in flight.avoid:
                return way
            way = turns.pick() or way
        return None

    def _along(self, way: Way, flight: Flight, fetch: bool) -> Answer:
        first = self._target(way.prefills, flight)
        if first is None:
            return Answer.NOBODY
        if way.decodes is None:
            return self._to(first, flight)
        second = self._target(way.decodes, flight, prefers=False)
        if second is None or first.view is None or second.view is None:
            return Answer.NOBODY
        if first is second:
            return self._to(first, flight)
        holder = self._affinity.lender(flight, first.view) if fetch else None
        self._hand_over(flight, first.view, second.view, flight.prompt_tokens, holder)
        if self._by_load:
            self._charges.flow(flight, first, second, flight.earlier[-1][1])
        return SENT

    def _target(self, chooser: Chooser, flight: Flight, prefers: bool = True) -> Target | None:
        """Whose turn it is, unless it failed the request before or another holds much of its prefix."""
        target = chooser.pick()
        if target is None:
            return None
        if flight.avoid and _avoided(target, flight):
            target = self._other(chooser, flight)
            if target is None:
                return None
        if prefers and flight.request.blocks and self._policy.affinity > 0:
            better = self._affinity.better(target, chooser, flight)
            if better is not None:
                chooser.swap(target, better)
                return better
        return target

    def _other(self, chooser: Chooser, flight: Flight) -> Target | None:
        """A target that did not fail the request; None when all did."""
        for _ in range(TRIES):
            target = chooser.pick()
            if target is not None and not _avoided(target, flight):
                return target
        return next((each for each in chooser.members() if not _avoided(each, flight)), None)

    def _to(self, target: Target, flight: Flight) -> Answer:
        """Inside a target: who does what."""
        if target.kind == PLAIN:
            assert target.view is not None
            self._in_place(flight, target.view, target.route)
            if self._by_load:
                self._charges.whole(flight, target, flight.last_tokens, [target.view], [target.view])
            return SENT
        if target.kind == COMBO:
            if self._by_load:
                self._charges.whole(flight, target, flight.prompt_tokens, target.prefills, target.decodes)
            self._combo(target, flight)
            return SENT
        return self.pair(target, flight)

    # Combos.

    def _combo(self, target: Target, flight: Flight) -> None:
        prefills, decodes = _unavoided(target.prefills, flight), _unavoided(target.decodes, flight)
        target.turn += 1
        if not self._policy.opportunistic:
            first, second = prefills[target.turn % len(prefills)], decodes[target.turn % len(decodes)]
        else:
            target.busy = busier(target.busy, target.prefills)
            alone = in_place(prefills, decodes, self._step_s, target.busy)
            if alone is not None:
                self._alone(flight, alone)
                return
            if flight.request.blocks and self._policy.affinity > 0:
                first = self._affinity.prefiller(prefills, flight)
            else:
                first = shortest_queue(prefills, self._seconds_per_token)
            second = least_loaded(decodes, self._fill)
        self._hand_over(flight, first, second, flight.prompt_tokens)

    # Pairs.

    def pair(self, target: Target, flight: Flight) -> Answer:
        """Split a prompt between a pair's two sides, or let it wait for a place on the low-end one."""
        lows, highs = _unavoided(target.prefills, flight), _unavoided(target.decodes, flight)
        low = min(lows, key=lambda view: view.open_prefill_tokens)
        high = min(highs, key=self._fill)
        splits = self._facts.splits.get(low.member.template) if self._policy.split else None
        if self._by_load and not flight.charges:
            self._charges.whole(flight, target, flight.prompt_tokens, [low], [high])
        target.busy = busier(target.busy, target.prefills)
        part = flight.prompt_tokens
        if splits is not None:
            decodes, context, free = self._high_end(high)
            part = partial_tokens(part, splits, decodes, context, free, BLOCK_TOKENS)
            if target.in_low >= MOST_IN_LOW * len(target.prefills):
                if self._policy.split_overflow and free * BLOCK_TOKENS >= flight.prompt_tokens:
                    waits = self._waits_s(splits, target, low, high, part)
                    if sooner_whole(splits, flight.prompt_tokens, part, decodes, context, *waits):
                        self._alone(flight, high)
                        return SENT
                flight.state, flight.pair = WAITING, target
                target.waiting.append(flight.request.id)
                return Answer.WAITS
        flight.pair = None
        if self._policy.low_decodes and self._stays_low(target, low, high, flight):
            self._alone(flight, low)
            return SENT
        if splits is not None:
            flight.pair = target
            target.in_low += 1
        self._hand_over(flight, low, high, part)
        return SENT

    def _waits_s(
        self, splits: SplitFacts, target: Target, low: View, high: View, part: int
    ) -> tuple[float, float]:
        """Seconds of prompts before a new one, on either side; those that wait count as if they were like it."""
        waiting = low.open_prefill_tokens + len(target.waiting) * part
        facts = high.facts
        high_s = high.open_prefill_tokens * facts.prefill_s_per_token if facts is not None else 0.0
        return max(0.0, partial_prefill_s(splits, waiting)), high_s

    def _alone(self, flight: Flight, view: View) -> None:
        """On one of a group's replicas."""
        single = self._table.singles.get(view.member.id)
        self._in_place(flight, view, single.route if single is not None else None)

    def _high_end(self, view: View) -> tuple[int, float, int]:
        """Decodes, their context and free blocks: as reported, or as sent when nothing was reported yet."""
        status = view.status
        if status is not None:
            return status.running, float(status.context_tokens), status.free_blocks
        facts = view.facts
        used = -(-view.open_context_tokens // BLOCK_TOKENS)
        free = max(0, facts.total_blocks - used) if facts is not None else 1 << 40
        return view.open_requests, float(view.open_context_tokens), free

    def _stays_low(self, target: Target, low: View, high: View, flight: Flight) -> bool:
        weak, strong = low.facts, high.facts
        if weak is None or strong is None:
            return False
        if low.open_context_tokens + flight.total_tokens > weak.total_blocks * BLOCK_TOKENS:
            return False
        decoding = max(0, low.open_requests - target.in_low)
        return keeps_decode(strong, high.open_requests, weak, decoding, target.busy)

    # Into the flight, and onto the replicas' counts.

    def _in_place(self, flight: Flight, view: View, route: Route | None) -> None:
        flight.route = route if route is not None else Route((Segment(view.member.id, 0, None),))
        flight.state = RUNNING
        flight.earlier = ()
        flight.done = 0
        flight.last = view
        flight.last_tokens = self._to_compute(flight, view, 0, flight.prompt_tokens)
        self._fleet.open(view, flight.last_tokens, flight.total_tokens)

    def _hand_over(
        self, flight: Flight, first: View, second: View, part: int, lender: tuple[View, int] | None = None
    ) -> None:
        """`first` computes the first `part` tokens, after `lender` sent it a prefix; `second` the rest."""
        prompt = flight.prompt_tokens
        route = handed_over(first.member.id, second.member.id, part)
        earlier: tuple[tuple[View, int], ...] = ((first, self._to_compute(flight, first, 0, part)),)
        if lender is not None:
            holder, held = lender
            head = Segment(holder.member.id, 0, held)
            route = Route((head, Segment(first.member.id, held, part), route.segments[-1]))
            earlier = ((holder, 0), (first, part - held))
        flight.route, flight.earlier, flight.done = route, earlier, 0
        flight.state = RUNNING
        flight.last, flight.last_tokens = second, prompt - part
        for view, tokens in earlier:
            self._fleet.open(view, tokens, 0)
        self._fleet.open(second, flight.last_tokens, flight.total_tokens)

    def _to_compute(self, flight: Flight, view: View, start: int, stop: int) -> int:
        """Tokens of [start, stop) that a replica is not known to hold; the last one is always computed."""
        if not flight.request.blocks or self._policy.affinity == 0:
            return stop - start
        return max(1, stop - max(start, self._affinity.cached(view, flight)))

    # How replicas compare.

    def _fill(self, view: View) -> float:
        """How full it would be with one request more; without facts one request fills it."""
        facts = view.facts
        return (view.open_requests + 1) * view.pace / max(1, facts.decode_batch if facts is not None else 1)

    def _step_s(self, view: View) -> float:
        return step_seconds(view.facts, view.open_requests + 1) * view.pace

    def _seconds_per_token(self, view: View) -> float:
        facts = view.facts
        return (facts.prefill_s_per_token if facts is not None else 1.0) * view.pace


def _avoided(target: Target, flight: Flight) -> bool:
    """Whether nothing is left of a target without the replicas that the request avoids."""
    if target.view is not None:
        return flight.avoids(target.view)
    return any(all(flight.avoids(view) for view in side) for side in (target.prefills, target.decodes))


def _unavoided(views: list[View], flight: Flight) -> list[View]:
    if not flight.avoid:
        return views
    return [view for view in views if not flight.avoids(view)] or views
