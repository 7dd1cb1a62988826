"""Prefix affinity: whether to go where a prefix is cached (longest cached prefix against load).

    score = affinity x seconds of prefill saved - seconds of waiting more

Where a model has an objective, every answer under way waits for the prompts that are computed beside it. So a second
of prompt counts BESIDE seconds more for each request that is open there: less of it saves more where there are many.

The index of `index.py` says who holds what; here is what that means for the targets of these ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from potluck.core.brain.facts import Facts
from potluck.core.brain.fleet import Fleet, View
from potluck.core.brain.flight import Flight
from potluck.core.brain.policy import Policy
from potluck.core.routing.balance import Chooser, decode_seconds
from potluck.core.routing.index import GlobalIndex
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

    def by_side(self, flight: Flight, ways: Ways) -> tuple[int, int]:
        """Tokens cached where the request would be decoded, and where it could be prefilled instead."""
        if not flight.request.blocks or self._policy.affinity == 0 or not len(self._index):
            return 0, 0
        there = {way.source for way in ways.flows if way.crosses}
        here = {way.target for way in ways.flows if way.crosses}
        return (
            self._cached_where(flight, lambda view: view.member.region in here),
            self._cached_where(flight, lambda view: view.member.region in there),
        )

    def lender(self, flight: Flight, first: View) -> tuple[View, int] | None:
        """Who in another region holds more of the prefix than `first` does, and how much."""
        own = self.cached(first, flight)
        blocks = flight.request.blocks

        def elsewhere(replica: str) -> bool:
            view = self._fleet.views.get(replica)
            if view is None or not view.serves or view.member.model != flight.request.model:
                return False
            source, target = view.member.region, first.member.region
            linked = (source, target) in self._facts.links_gbps
            return source != target and linked and f"{source}->{target}" not in flight.avoid

        _, holders = self._index.deepest(blocks, elsewhere, exact=self._exact(flight))
        if not holders:
            return None
        view = self._fleet.views[holders[0]]
        held = self.cached(view, flight)
        return (view, held) if held > own else None

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


def _prefiller(target: Target) -> View:
    """The replica whose cache counts: of a group, the prefill one with the shortest queue."""
    if target.view is not None:
        return target.view
    if len(target.prefills) == 1:
        return target.prefills[0]
    return min(target.prefills, key=lambda view: view.open_prefill_tokens)
