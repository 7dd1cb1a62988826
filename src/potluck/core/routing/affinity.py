"""Prefix affinity in routing: what the index of `prefix.py` means for the targets of a lane."""

from __future__ import annotations

from collections.abc import Callable

from potluck.core.facts import Facts
from potluck.core.fleet import Fleet, View
from potluck.core.flight import Flight
from potluck.core.policy import Policy
from potluck.core.routing.balance import Chooser, decode_seconds
from potluck.core.routing.lanes import Lane
from potluck.core.routing.prefix import PrefixIndex, best_holder
from potluck.core.routing.table import Table
from potluck.core.routing.targets import Target


class Affinity:
    """Answers from the index, the table and the counts on replicas; owns nothing."""

    def __init__(self, facts: Facts, policy: Policy, fleet: Fleet, table: Table, index: PrefixIndex) -> None:
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
        depth = index.deepest(blocks, lambda replica: self._holder(replica, chooser, flight) is not None)
        if depth == 0:
            return None
        first = _prefiller(default)
        name = first.member.id
        saved = {name: self._saved_s(first, flight)}
        waits = {name: self._wait_s(first, flight)}
        targets = {name: default}
        for replica in index.holders(blocks[depth - 1]):
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
        if not len(self._index):
            return min(views, key=lambda view: self._wait_s(view, flight))
        weight = self._policy.affinity
        return min(views, key=lambda v: self._wait_s(v, flight) - weight * self._saved_s(v, flight))

    def most_cached(self, flight: Flight) -> int:
        """Tokens of the prompt that some replica of the model holds."""
        if not flight.request.blocks or self._policy.affinity == 0 or not len(self._index):
            return 0
        return self._cached_where(flight, lambda view: True)

    def by_side(self, flight: Flight, lane: Lane) -> tuple[int, int]:
        """Tokens cached where the request would be decoded, and where it could be prefilled instead."""
        if not flight.request.blocks or self._policy.affinity == 0 or not len(self._index):
            return 0, 0
        there = {way.source for way in lane.flows if way.crosses}
        here = {way.target for way in lane.flows if way.crosses}
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

        depth = self._index.deepest(blocks, elsewhere)
        if depth == 0:
            return None
        holder = next(each for each in self._index.holders(blocks[depth - 1]) if elsewhere(each))
        view = self._fleet.views[holder]
        held = self.cached(view, flight)
        return (view, held) if held > own else None

    def _holder(self, replica: str, chooser: Chooser, flight: Flight) -> Target | None:
        """The target of this lane that would prefill on a replica, if any."""
        view = self._fleet.views.get(replica)
        if view is None or not view.serves or replica in flight.avoid:
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

        depth = self._index.deepest(blocks, accepts)
        if depth == 0:
            return 0
        holders = self._index.holders(blocks[depth - 1])
        return max(self.cached(self._fleet.views[each], flight) for each in holders if accepts(each))

    def cached(self, view: View, flight: Flight) -> int:
        """Tokens of the prompt that a replica is known to hold."""
        request = flight.request
        model = self._facts.models.get(request.model)
        if model is None:
            return 0
        return self._index.cached_tokens(
            request.blocks, view.member.id, model.block_tokens, request.prompt_tokens, model.exact_prefix
        )

    def _saved_s(self, view: View, flight: Flight) -> float:
        facts = self._table.replica_facts(view)
        return self.cached(view, flight) * facts.prefill_s_per_token if facts is not None else 0.0

    def _wait_s(self, view: View, flight: Flight) -> float:
        """Until the request's prefill is done but for what is cached: prompts before it, a full batch, its own."""
        facts = self._table.replica_facts(view)
        if facts is None:
            return 0.0
        wait = (view.open_prefill_tokens + flight.prompt_tokens) * facts.prefill_s_per_token
        over = view.open_requests - facts.decode_batch
        if over > 0:
            wait += over * decode_seconds(facts, flight.output_tokens)
        return wait


def _prefiller(target: Target) -> View:
    """The replica whose cache counts: of a group, the prefill one with the shortest queue."""
    if target.view is not None:
        return target.view
    return min(target.prefills, key=lambda view: view.open_prefill_tokens)
