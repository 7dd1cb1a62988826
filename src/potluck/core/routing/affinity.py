"""Prefix affinity: whether to go where a prefix is cached (longest cached prefix against load).

    score = affinity x seconds of prefill saved - seconds of waiting more

Where a model has an objective, every answer under way waits for the prompts that are computed beside it. So a second
of prompt counts BESIDE seconds more for each request that is open there: less of it saves more where there are many.

The index of `index.py` says who holds what; here is what that means for the targets of these ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from potluck.core.brain.facts import BLOCK_TOKENS, Facts
from potluck.core.brain.fleet import Fleet, View
from potluck.core.brain.flight import Flight
from potluck.core.brain.policy import Policy
from potluck.core.routing.balance import Chooser, decode_seconds
from potluck.core.routing.index import GlobalIndex
from potluck.core.routing.links import Links
from potluck.core.routing.table import Table
from potluck.core.routing.targets import Target
from potluck.core.routing.ways import Ways

BESIDE: Final = 0.05


class Affinity:
    """Answers from the index, the table and the counts on replicas; owns nothing."""

    def __init__(self, facts: Facts, policy: Policy, fleet: Fleet, table: Table, index: GlobalIndex) -> None:
        self._facts = facts
        self._policy = policy
        self._fleet = fleet
        self._table = table
        self._index = index

    def better(self, default: Target, chooser: Chooser, flight: Flight) -> Target | None:
        """A target whose cached prefix is worth more than what waiting there costs; None to stay."""
        blocks = flight.request.blocks
        index = self._index
        if not len(index):
            return None
        exact = self._exact(flight)
        _, holders = index.deepest(
            blocks, lambda replica: self._holder(replica, chooser, flight) is not None, exact=exact
        )
        if not holders:
            return None
        first = _prefiller(default)
        name = first.member.id
        saved = {name: self._saved_s(first, flight)}
        waits = {name: self._wait_s(first, flight)}
        targets = {name: default}
        for replica in holders:
            target = self._holder(replica, chooser, flight)
            if target is None or replica in targets:
                continue
            view = self._fleet.views[replica]
            targets[replica] = target
            saved[replica] = self._saved_s(view, flight)
            waits[replica] = self._wait_s(view, flight)
        best = best_holder(saved, waits, name, self._policy.affinity)
        return targets[best] if targets[best] is not default else None

    def prefiller(self, views: list[View], flight: Flight) -> View:
        """Of a group's prefill replicas, the one that is done with the request's prefill first."""
        if len(views) == 1:
            return views[0]
        if not len(self._index):
            return min(views, key=lambda view: self._wait_s(view, flight))
        weight = self._policy.affinity
        return min(views, key=lambda v: self._wait_s(v, flight) - weight * self._saved_s(v, flight))

    def most_cached(self, flight: Flight) -> int:
        """Tokens of the prompt that some replica of the model holds."""
        if not flight.request.blocks or self._policy.affinity == 0 or not len(self._index):
            return 0
        return self._cached_where(flight, lambda view: True)

    def by_region(self, flight: Flight, ways: Ways) -> dict[str, int]:
        """Tokens cached by some replica of each region that ways over links begin or end in."""
        if not flight.request.blocks or self._policy.affinity == 0 or not len(self._index):
            return {}
        found: dict[str, int] = {}
        for way in ways.flows:
            for region in (way.source, way.target) if way.crosses else ():
                if region not in found:
                    found[region] = self._cached_in(flight, region)
        return found

    def to_compute(self, flight: Flight, view: View, start: int, stop: int) -> int:
        """Tokens of [start, stop) that a replica is not known to hold; the last one is always computed."""
        if not flight.request.blocks or self._policy.affinity == 0:
            return stop - start
        return max(1, stop - max(start, self.cached(view, flight)))

    def lender(
        self, flight: Flight, first: View, links: Links, abroad: bool, but: View | None = None
    ) -> tuple[View, int] | None:
        """Who holds more of the prefix than `first` and can send it sooner than it is computed, and how much.

        Replicas of its region; with `abroad` those of others too, over links that carry something.
        """
        blocks, facts = flight.request.blocks, first.facts
        if not blocks or facts is None or self._policy.affinity == 0 or not len(self._index):
            return None
        own, region = self.cached(first, flight), first.member.region
        model = self._facts.models.get(flight.request.model)
        if model is None or own >= min(len(blocks) * model.block_tokens, flight.request.prompt_tokens - 1):
            return None

        def lends(replica: str) -> bool:
            view = self._fleet.views.get(replica)
            if view is None or view is first or view is but or not may_lend(view, flight):
                return False
            if view.kv_version != first.kv_version:
                return False
            if view.member.region == region:
                return self._policy.pool_caches
            return abroad and links.carries(view.member.region, region, flight)

        _, holders = self._index.deepest(blocks, lends, exact=model.exact_prefix)
        best: tuple[View, int] | None = None
        least_s = 0.0
        for name in holders:
            view = self._fleet.views[name]
            held = self.cached(view, flight)
            if held <= own or not _roomy(view, held):
                continue
            saved_s = (facts.prompt_s(held, own) - facts.prompt_s(own, own)) * first.pace
            more_s = links.fetch_s(flight, view, first, own, held) - saved_s
            if more_s < least_s:
                best, least_s = (view, held), more_s
        if best is not None and model.exact_prefix and best[1] + 1 < flight.prompt_tokens:
            # Up to a checkpoint an engine would have to begin at the one before: it computes its last token anew.
            return best[0], best[1] + 1
        return best

    def at_home(self, flight: Flight, first: View, second: View) -> bool:
        """Whether who is to decode holds so much of the prefix that it has the prompt done before `first` would."""
        if not self._policy.pool_caches or not flight.request.blocks or self._policy.affinity == 0:
            return False
        if self.cached(second, flight) <= self.cached(first, flight):
            return False
        return self._done_s(second, flight) < self._done_s(first, flight)

    def _holder(self, replica: str, chooser: Chooser, flight: Flight) -> Target | None:
        """The target of these ways that would prefill on a replica, if any."""
        view = self._fleet.views.get(replica)
        if view is None or not view.serves or (flight.avoid and flight.avoids(view)):
            return None
        single = self._table.singles.get(replica)
        if single is not None and single in chooser:
            return single
        group = self._table.groups.get(view.member.unit)
        if group is not None and view.role == "prefill" and group in chooser:
            return group
        return None

    def _cached_where(self, flight: Flight, wanted: Callable[[View], bool]) -> int:
        """The most that one of the wanted replicas of the request's model holds."""
        blocks, model = flight.request.blocks, flight.request.model

        def accepts(replica: str) -> bool:
            view = self._fleet.views.get(replica)
            return view is not None and view.member.model == model and wanted(view)

        _, holders = self._index.deepest(blocks, accepts, exact=self._exact(flight))
        return max((self.cached(self._fleet.views[each], flight) for each in holders), default=0)

    def _cached_in(self, flight: Flight, region: str) -> int:
        return self._cached_where(flight, lambda view: view.serves and view.member.region == region)

    def cached(self, view: View, flight: Flight) -> int:
        """Tokens of the prompt that a replica is known to hold; the last one is always computed."""
        request = flight.request
        model = self._facts.models.get(request.model)
        if model is None:
            return 0
        blocks = self._index.held_by(view.member.id, request.blocks, exact=model.exact_prefix)
        return min(blocks * model.block_tokens, request.prompt_tokens - 1)

    def _exact(self, flight: Flight) -> bool:
        model = self._facts.models.get(flight.request.model)
        return model is not None and model.exact_prefix

    def _saved_s(self, view: View, flight: Flight) -> float:
        facts = view.facts
        if facts is None:
            return 0.0
        saved_s = self.cached(view, flight) * facts.prefill_s_per_token * view.pace
        return saved_s * (1.0 + self._beside(view))

    def _done_s(self, view: View, flight: Flight) -> float:
        """Until a prompt is computed but for what is cached."""
        return self._wait_s(view, flight) - self._saved_s(view, flight)

    def _wait_s(self, view: View, flight: Flight) -> float:
        """Until the request's prefill is done but for what is cached: prompts before it, a full batch, its own."""
        facts = view.facts
        if facts is None:
            return 0.0
        wait = (view.open_prefill_tokens + flight.prompt_tokens) * facts.prefill_s_per_token
        over = view.open_requests - facts.decode_batch
        if over > 0:
            wait += over * decode_seconds(facts, flight.output_tokens)
        wait += self._beside(view) * flight.prompt_tokens * facts.prefill_s_per_token
        return wait * view.pace

    def _beside(self, view: View) -> float:
        """What a second of prompt costs those that are open there, in seconds."""
        model = self._facts.models.get(view.member.model)
        return BESIDE * view.open_requests if model is not None and model.slo is not None else 0.0


def best_holder(saved_s: dict[str, float], waits_s: dict[str, float], default: str, affinity: float) -> str:
    """The replica with the best score; the default one when no other is better. All in order of mention."""
    best, most = default, affinity * saved_s.get(default, 0.0) - waits_s[default]
    for replica, saved in saved_s.items():
        score = affinity * saved - waits_s[replica]
        if score > most + 1e-12:
            best, most = replica, score
    return best


def may_lend(view: View, flight: Flight) -> bool:
    """Whether a replica of the request's model is there and did not fail it before."""
    return (
        view.serves
        and view.member.model == flight.request.model
        and not (flight.avoid and flight.avoids(view))
    )


def _roomy(view: View, tokens: int) -> bool:
    """Whether it can take up at once a prefix that it holds, by its own word: nobody waits, and it has blocks."""
    status = view.status
    return status is None or (not status.queued and status.free_blocks * BLOCK_TOKENS >= tokens)


def _prefiller(target: Target) -> View:
    """The replica whose cache counts: of a group, the prefill one with the shortest queue."""
    if target.view is not None:
        return target.view
    if len(target.prefills) == 1:
        return target.prefills[0]
    return min(target.prefills, key=lambda view: view.open_prefill_tokens)
