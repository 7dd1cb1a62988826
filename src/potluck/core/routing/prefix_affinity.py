"""Prefix affinity: whether to go where a prefix is cached (longest cached prefix against load).

    score = affinity x seconds of prefill saved - seconds of waiting more

With an objective, a second of prompt counts BESIDE seconds more for each request open there: their tokens wait."""

from __future__ import annotations

from typing import Final

from potluck.core.routing.balance import Balancer, decode_seconds
from potluck.core.routing.link_states import LinkStates
from potluck.core.routing.prefix_index import PrefixIndex
from potluck.core.routing.routing_table import RouteOptions, RoutingTable
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import RequestState
from potluck.core.state.targets import Target

BESIDE: Final = 0.05


Lender = tuple[ReplicaState, int] | None  # Who sends a prefix, and how many tokens of it.


class PrefixAffinity:
    """Answers from the index, the table and the counts on replicas; owns nothing."""

    def __init__(self, policy: Policy, table: RoutingTable, index: PrefixIndex) -> None:
        self._facts = table.facts
        self._policy = policy
        self._fleet = table.fleet
        self._table = table
        self._index = index

    def better(self, default: Target, chooser: Balancer, req: RequestState) -> Target | None:
        """A target whose cached prefix is worth more than what waiting there costs; None to stay."""
        blocks = req.request.blocks
        index = self._index
        if not len(index):
            return None
        exact = self._exact(req)
        _, holders = index.deepest(
            blocks, lambda replica: self._holder(replica, chooser, req) is not None, exact=exact
        )
        if not holders:
            return None
        first = _prefiller(default)
        name = first.member.id
        saved = {name: self._saved_s(first, req)}
        waits = {name: self._wait_s(first, req)}
        targets = {name: default}
        for replica in holders:
            target = self._holder(replica, chooser, req)
            if target is None or replica in targets:
                continue
            view = self._fleet.views[replica]
            targets[replica] = target
            saved[replica] = self._saved_s(view, req)
            waits[replica] = self._wait_s(view, req)
        best = best_holder(saved, waits, name, self._policy.affinity)
        return targets[best] if targets[best] is not default else None

    def prefiller(self, views: list[ReplicaState], req: RequestState) -> ReplicaState:
        """Of a group's prefill replicas, the one that is done with the request's prefill first."""
        if len(views) == 1:
            return views[0]
        if not len(self._index):
            return min(views, key=lambda view: self._wait_s(view, req))
        weight = self._policy.affinity
        return min(views, key=lambda v: self._wait_s(v, req) - weight * self._saved_s(v, req))

    def most_cached(self, req: RequestState) -> int:
        if not req.request.blocks or self._policy.affinity == 0 or not len(self._index):
            return 0
        return self._cached_where(req)

    def by_region(self, req: RequestState, ways: RouteOptions) -> dict[str, int]:
        """Tokens cached by some replica of each region that ways over links begin or end in."""
        if not req.request.blocks or self._policy.affinity == 0 or not len(self._index):
            return {}
        numbers: dict[str, int] = {}
        for way in ways.flows:
            for region in (way.source, way.target) if way.crosses else ():
                if region not in numbers:
                    numbers[region] = self._cached_where(req, region)
        return numbers

    def to_compute(self, req: RequestState, view: ReplicaState, start: int, stop: int) -> int:
        """Tokens of [start, stop) that a replica is not known to hold; the last one is always computed."""
        if not req.request.blocks or self._policy.affinity == 0:
            return stop - start
        return max(1, stop - max(start, self.cached(view, req)))

    def lender(
        self,
        req: RequestState,
        first: ReplicaState,
        links: LinkStates,
        abroad: bool,
        but: ReplicaState | None,
    ) -> Lender:
        """Who sends more of the prefix than `first` holds sooner than it is computed, and how much."""
        blocks, facts = req.request.blocks, first.facts
        if not blocks or facts is None or self._policy.affinity == 0 or not len(self._index):
            return None
        own, region = self.cached(first, req), first.member.region
        model = self._facts.models.get(req.request.model)
        if model is None or own >= min(len(blocks) * model.block_tokens, req.request.prompt_tokens - 1):
            return None

        def lends(replica: str) -> bool:
            view = self._fleet.views.get(replica)
            if view is None or view is first or view is but or not may_lend(view, req):
                return False
            if view.kv_version != first.kv_version:
                return False
            if view.member.region == region:
                return self._policy.pool_caches
            return abroad and links.carries(view.member.region, region, req)

        _, holders = self._index.deepest(blocks, lends, exact=model.exact_prefix)
        best: Lender = None
        least_s = 0.0
        for name in holders:
            view = self._fleet.views[name]
            held = self.cached(view, req)
            if held <= own or not _roomy(view, held):
                continue
            saved_s = (facts.prompt_s(held, own) - facts.prompt_s(own, own)) * first.pace
            more_s = links.fetch_s(req, view, first, own, held) - saved_s
            if more_s < least_s:
                best, least_s = (view, held), more_s
        if best is not None and model.exact_prefix and best[1] + 1 < req.prompt_tokens:
            # Up to a checkpoint an engine would have to begin at the one before: it computes its last token anew.
            return best[0], best[1] + 1
        return best

    def at_home(self, req: RequestState, first: ReplicaState, second: ReplicaState) -> bool:
        """Whether who is to decode holds so much of the prefix that it has the prompt done before `first` would."""
        if not self._policy.pool_caches or not req.request.blocks or self._policy.affinity == 0:
            return False
        if self.cached(second, req) <= self.cached(first, req):
            return False
        second_s = self._wait_s(second, req) - self._saved_s(second, req)
        return second_s < self._wait_s(first, req) - self._saved_s(first, req)

    def _holder(self, replica: str, chooser: Balancer, req: RequestState) -> Target | None:
        """The target of these ways that would prefill on a replica, if any."""
        view = self._fleet.views.get(replica)
        if view is None or not view.serves or (req.avoid and req.avoids(view)):
            return None
        single = self._table.singles.get(replica)
        if single is not None and single in chooser:
            return single
        group = self._table.groups.get(view.member.unit)
        if group is not None and view.role == "prefill" and group in chooser:
            return group
        return None

    def _cached_where(self, req: RequestState, region: str = "") -> int:
        """The most that one of the model's replicas holds; with a region, of those that serve there."""
        blocks, model = req.request.blocks, req.request.model

        def accepts(replica: str) -> bool:
            view = self._fleet.views.get(replica)
            if view is None or view.member.model != model:
                return False
            return not region or (view.serves and view.member.region == region)

        _, holders = self._index.deepest(blocks, accepts, exact=self._exact(req))
        return max((self.cached(self._fleet.views[holder], req) for holder in holders), default=0)

    def cached(self, view: ReplicaState, req: RequestState) -> int:
        """Tokens of the prompt that a replica is known to hold; the last one is always computed."""
        request = req.request
        model = self._facts.models.get(request.model)
        if model is None:
            return 0
        blocks = self._index.held_by(view.member.id, request.blocks, exact=model.exact_prefix)
        return min(blocks * model.block_tokens, request.prompt_tokens - 1)

    def _exact(self, req: RequestState) -> bool:
        model = self._facts.models.get(req.request.model)
        return model is not None and model.exact_prefix

    def _saved_s(self, view: ReplicaState, req: RequestState) -> float:
        facts = view.facts
        if facts is None:
            return 0.0
        saved_s = self.cached(view, req) * facts.prefill_s_per_token * view.pace
        return saved_s * (1.0 + self._beside(view))

    def _wait_s(self, view: ReplicaState, req: RequestState) -> float:
        """Until the request's prefill is done but for what is cached: prompts before it, a full batch, its own."""
        facts = view.facts
        if facts is None:
            return 0.0
        wait = (view.open_prefill_tokens + req.prompt_tokens) * facts.prefill_s_per_token
        over = view.open_requests - facts.decode_batch
        if over > 0:
            wait += over * decode_seconds(facts, req.output_tokens)
        wait += self._beside(view) * req.prompt_tokens * facts.prefill_s_per_token
        return wait * view.pace

    def _beside(self, view: ReplicaState) -> float:
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


def may_lend(view: ReplicaState, req: RequestState) -> bool:
    return view.serves and view.member.model == req.request.model and not (req.avoid and req.avoids(view))


def _roomy(view: ReplicaState, tokens: int) -> bool:
    """Whether it can take up at once a prefix that it holds, by its own word: nobody waits, and it has blocks."""
    status = view.status
    return status is None or (not status.queued and status.free_blocks * BLOCK_TOKENS >= tokens)


def _prefiller(target: Target) -> ReplicaState:
    if target.view is not None:
        return target.view
    if len(target.prefills) == 1:
        return target.prefills[0]
    return min(target.prefills, key=lambda view: view.open_prefill_tokens)
