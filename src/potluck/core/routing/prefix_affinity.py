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

    def better(self, default_target: Target, balancer: Balancer, request: RequestState) -> Target | None:
        """A target whose cached prefix is worth more than what waiting there costs; None to stay."""
        blocks = request.request.blocks
        index = self._index
        if not len(index):
            return None
        exact = self._exact(request)
        _, holders = index.deepest(
            blocks, lambda replica: self._holder(replica, balancer, request) is not None, exact=exact
        )
        if not holders:
            return None
        first_replica = _prefiller(default_target)
        name = first_replica.member.id
        saved = {name: self._saved_s(first_replica, request)}
        waits = {name: self._wait_s(first_replica, request)}
        targets = {name: default_target}
        for replica in holders:
            target = self._holder(replica, balancer, request)
            if target is None or replica in targets:
                continue
            replica_state = self._fleet.views[replica]
            targets[replica] = target
            saved[replica] = self._saved_s(replica_state, request)
            waits[replica] = self._wait_s(replica_state, request)
        best = best_holder(saved, waits, name, self._policy.affinity)
        return targets[best] if targets[best] is not default_target else None

    def prefiller(self, views: list[ReplicaState], request: RequestState) -> ReplicaState:
        """Of a group's prefill replicas, the one that is done with the request's prefill first."""
        if len(views) == 1:
            return views[0]
        if not len(self._index):
            return min(views, key=lambda replica: self._wait_s(replica, request))
        weight = self._policy.affinity
        return min(views, key=lambda v: self._wait_s(v, request) - weight * self._saved_s(v, request))

    def most_cached(self, request: RequestState) -> int:
        if not request.request.blocks or self._policy.affinity == 0 or not len(self._index):
            return 0
        return self._cached_where(request)

    def by_region(self, request: RequestState, route_options: RouteOptions) -> dict[str, int]:
        """Tokens cached by some replica of each region that ways over links begin or end in."""
        if not request.request.blocks or self._policy.affinity == 0 or not len(self._index):
            return {}
        numbers: dict[str, int] = {}
        for route_option in route_options.flows:
            for region in (route_option.source, route_option.target) if route_option.crosses else ():
                if region not in numbers:
                    numbers[region] = self._cached_where(request, region)
        return numbers

    def to_compute(self, request: RequestState, replica: ReplicaState, start: int, stop: int) -> int:
        """Tokens of [start, stop) that a replica is not known to hold; the last one is always computed."""
        if not request.request.blocks or self._policy.affinity == 0:
            return stop - start
        return max(1, stop - max(start, self.cached(replica, request)))

    def lender(
        self,
        request: RequestState,
        first_replica: ReplicaState,
        links: LinkStates,
        abroad: bool,
        excluded_replica: ReplicaState | None,
    ) -> Lender:
        """Who sends more of the prefix than `first` holds sooner than it is computed, and how much."""
        blocks, facts = request.request.blocks, first_replica.facts
        if not blocks or facts is None or self._policy.affinity == 0 or not len(self._index):
            return None
        own, region = self.cached(first_replica, request), first_replica.member.region
        model = self._facts.models.get(request.request.model)
        if model is None or own >= min(len(blocks) * model.block_tokens, request.request.prompt_tokens - 1):
            return None

        def lends(replica: str) -> bool:
            replica_state = self._fleet.views.get(replica)
            if (
                replica_state is None
                or replica_state is first_replica
                or replica_state is excluded_replica
                or not may_lend(replica_state, request)
            ):
                return False
            if replica_state.kv_version != first_replica.kv_version:
                return False
            if replica_state.member.region == region:
                return self._policy.pool_caches
            return abroad and links.carries(replica_state.member.region, region, request)

        _, holders = self._index.deepest(blocks, lends, exact=model.exact_prefix)
        best: Lender = None
        least_s = 0.0
        for name in holders:
            replica_state = self._fleet.views[name]
            held = self.cached(replica_state, request)
            if held <= own or not _roomy(replica_state, held):
                continue
            saved_s = (facts.prompt_s(held, own) - facts.prompt_s(own, own)) * first_replica.pace
            more_s = links.fetch_s(request, replica_state, first_replica, own, held) - saved_s
            if more_s < least_s:
                best, least_s = (replica_state, held), more_s
        if best is not None and model.exact_prefix and best[1] + 1 < request.prompt_tokens:
            # Up to a checkpoint an engine would have to begin at the one before: it computes its last token anew.
            return best[0], best[1] + 1
        return best

    def at_home(
        self, request: RequestState, first_replica: ReplicaState, second_replica: ReplicaState
    ) -> bool:
        """Whether who is to decode holds so much of the prefix that it has the prompt done before `first` would."""
        if not self._policy.pool_caches or not request.request.blocks or self._policy.affinity == 0:
            return False
        if self.cached(second_replica, request) <= self.cached(first_replica, request):
            return False
        second_s = self._wait_s(second_replica, request) - self._saved_s(second_replica, request)
        return second_s < self._wait_s(first_replica, request) - self._saved_s(first_replica, request)

    def _holder(self, replica: str, balancer: Balancer, request: RequestState) -> Target | None:
        """The target of these ways that would prefill on a replica, if any."""
        replica_state = self._fleet.views.get(replica)
        if (
            replica_state is None
            or not replica_state.serves
            or (request.avoid and request.avoids(replica_state))
        ):
            return None
        single = self._table.singles.get(replica)
        if single is not None and single in balancer:
            return single
        group = self._table.groups.get(replica_state.member.unit)
        if group is not None and replica_state.role == "prefill" and group in balancer:
            return group
        return None

    def _cached_where(self, request: RequestState, region: str = "") -> int:
        """The most that one of the model's replicas holds; with a region, of those that serve there."""
        blocks, model = request.request.blocks, request.request.model

        def accepts(replica: str) -> bool:
            replica_state = self._fleet.views.get(replica)
            if replica_state is None or replica_state.member.model != model:
                return False
            return not region or (replica_state.serves and replica_state.member.region == region)

        _, holders = self._index.deepest(blocks, accepts, exact=self._exact(request))
        return max((self.cached(self._fleet.views[holder], request) for holder in holders), default=0)

    def cached(self, replica: ReplicaState, request_state: RequestState) -> int:
        """Tokens of the prompt that a replica is known to hold; the last one is always computed."""
        request = request_state.request
        model = self._facts.models.get(request.model)
        if model is None:
            return 0
        blocks = self._index.held_by(replica.member.id, request.blocks, exact=model.exact_prefix)
        return min(blocks * model.block_tokens, request.prompt_tokens - 1)

    def _exact(self, request: RequestState) -> bool:
        model = self._facts.models.get(request.request.model)
        return model is not None and model.exact_prefix

    def _saved_s(self, replica: ReplicaState, request: RequestState) -> float:
        facts = replica.facts
        if facts is None:
            return 0.0
        saved_s = self.cached(replica, request) * facts.prefill_s_per_token * replica.pace
        return saved_s * (1.0 + self._beside(replica))

    def _wait_s(self, replica: ReplicaState, request: RequestState) -> float:
        """Until the request's prefill is done but for what is cached: prompts before it, a full batch, its own."""
        facts = replica.facts
        if facts is None:
            return 0.0
        wait = (replica.open_prefill_tokens + request.prompt_tokens) * facts.prefill_s_per_token
        over = replica.open_requests - facts.decode_batch
        if over > 0:
            wait += over * decode_seconds(facts, request.output_tokens)
        wait += self._beside(replica) * request.prompt_tokens * facts.prefill_s_per_token
        return wait * replica.pace

    def _beside(self, replica: ReplicaState) -> float:
        """What a second of prompt costs those that are open there, in seconds."""
        model = self._facts.models.get(replica.member.model)
        return BESIDE * replica.open_requests if model is not None and model.slo is not None else 0.0


def best_holder(saved_s: dict[str, float], waits_s: dict[str, float], default: str, affinity: float) -> str:
    """The replica with the best score; the default one when no other is better. All in order of mention."""
    best, most = default, affinity * saved_s.get(default, 0.0) - waits_s[default]
    for replica, saved in saved_s.items():
        score = affinity * saved - waits_s[replica]
        if score > most + 1e-12:
            best, most = replica, score
    return best


def may_lend(replica: ReplicaState, request: RequestState) -> bool:
    return (
        replica.serves
        and replica.member.model == request.request.model
        and not (request.avoid and request.avoids(replica))
    )


def _roomy(replica: ReplicaState, tokens: int) -> bool:
    """Whether it can take up at once a prefix that it holds, by its own word: nobody waits, and it has blocks."""
    status = replica.status
    return status is None or (not status.queued and status.free_blocks * BLOCK_TOKENS >= tokens)


def _prefiller(target: Target) -> ReplicaState:
    if target.view is not None:
        return target.view
    if len(target.prefills) == 1:
        return target.prefills[0]
    return min(target.prefills, key=lambda replica: replica.open_prefill_tokens)
