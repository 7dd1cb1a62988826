"""Prefix affinity: routing to replicas that cache a prompt's prefix (longest cached prefix against load).

    score = affinity x seconds of prefill saved - seconds of extra waiting

With an SLO, each second of prefill also counts PREFILL_STALL_WEIGHT seconds per open request there."""

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

PREFILL_STALL_WEIGHT: Final = 0.05


Lender = tuple[ReplicaState, int] | None  # The replica that sends a prefix, and its tokens.


class PrefixAffinity:
    """Stateless: answers from the prefix index, the routing table and the load counts of replicas."""

    def __init__(self, policy: Policy, table: RoutingTable, index: PrefixIndex) -> None:
        self._facts = table.facts
        self._policy = policy
        self._fleet = table.fleet
        self._table = table
        self._index = index

    def better_target(
        self, default_target: Target, balancer: Balancer, request: RequestState
    ) -> Target | None:
        """A target whose cached prefix saves more than waiting there costs; None to stay with the default."""
        blocks = request.request.blocks
        index = self._index
        if not len(index):
            return None
        exact = self._needs_checkpoints(request)
        _, holders = index.deepest(
            blocks, lambda name: self._target_holding(name, balancer, request) is not None, exact=exact
        )
        if not holders:
            return None
        default_replica = _prefill_replica(default_target)
        default_name = default_replica.member.id
        saved_s = {default_name: self._saved_s(default_replica, request)}
        waits_s = {default_name: self._wait_s(default_replica, request)}
        targets = {default_name: default_target}
        for name in holders:
            target = self._target_holding(name, balancer, request)
            if target is None or name in targets:
                continue
            replica = self._fleet.views[name]
            targets[name] = target
            saved_s[name] = self._saved_s(replica, request)
            waits_s[name] = self._wait_s(replica, request)
        best_name = best_holder(saved_s, waits_s, default_name, self._policy.affinity)
        return targets[best_name] if targets[best_name] is not default_target else None

    def best_prefiller(self, views: list[ReplicaState], request: RequestState) -> ReplicaState:
        """The prefill replica of a group that finishes the request's prefill first."""
        if len(views) == 1:
            return views[0]
        if not len(self._index):
            return min(views, key=lambda replica: self._wait_s(replica, request))
        affinity = self._policy.affinity
        return min(
            views,
            key=lambda replica: self._wait_s(replica, request) - affinity * self._saved_s(replica, request),
        )

    def most_cached(self, request: RequestState) -> int:
        if not request.request.blocks or self._policy.affinity == 0 or not len(self._index):
            return 0
        return self._max_cached(request)

    def cached_by_region(self, request: RequestState, route_options: RouteOptions) -> dict[str, int]:
        """For each region at either end of a crossing flow, the most tokens that one replica there has cached."""
        if not request.request.blocks or self._policy.affinity == 0 or not len(self._index):
            return {}
        cached_tokens: dict[str, int] = {}
        for route_option in route_options.flows:
            for region in (route_option.source, route_option.target) if route_option.crosses else ():
                if region not in cached_tokens:
                    cached_tokens[region] = self._max_cached(request, region)
        return cached_tokens

    def to_compute(self, request: RequestState, replica: ReplicaState, start: int, stop: int) -> int:
        """Tokens of [start, stop) that a replica has to compute; the last token is always computed."""
        if not request.request.blocks or self._policy.affinity == 0:
            return stop - start
        return max(1, stop - max(start, self.cached(replica, request)))

    def find_lender(
        self,
        request: RequestState,
        first_replica: ReplicaState,
        links: LinkStates,
        abroad: bool,
        excluded_replica: ReplicaState | None,
    ) -> Lender:
        """The replica from which fetching more of the prefix than `first_replica` holds saves most time, with the
        tokens to fetch; None if computing is faster."""
        blocks, facts = request.request.blocks, first_replica.facts
        if not blocks or facts is None or self._policy.affinity == 0 or not len(self._index):
            return None
        own_tokens, region = self.cached(first_replica, request), first_replica.member.region
        model = self._facts.models.get(request.request.model)
        if model is None or own_tokens >= min(
            len(blocks) * model.block_tokens, request.request.prompt_tokens - 1
        ):
            return None

        def may_send(replica: str) -> bool:
            candidate = self._fleet.views.get(replica)
            if (
                candidate is None
                or candidate is first_replica
                or candidate is excluded_replica
                or not may_lend(candidate, request)
            ):
                return False
            if candidate.kv_version != first_replica.kv_version:
                return False
            if candidate.member.region == region:
                return self._policy.pool_caches
            return abroad and links.carries(candidate.member.region, region, request)

        _, holders = self._index.deepest(blocks, may_send, exact=model.exact_prefix)
        best_lender: Lender = None
        least_net_s = 0.0
        for name in holders:
            candidate = self._fleet.views[name]
            held_tokens = self.cached(candidate, request)
            if held_tokens <= own_tokens or not _has_room_for(candidate, held_tokens):
                continue
            saved_s = (
                facts.prompt_s(held_tokens, own_tokens) - facts.prompt_s(own_tokens, own_tokens)
            ) * first_replica.pace
            net_s = links.fetch_s(request, candidate, first_replica, own_tokens, held_tokens) - saved_s
            if net_s < least_net_s:
                best_lender, least_net_s = (candidate, held_tokens), net_s
        if best_lender is not None and model.exact_prefix and best_lender[1] + 1 < request.prompt_tokens:
            # To resume at a checkpoint the last token has to be computed again, so one more is asked for.
            return best_lender[0], best_lender[1] + 1
        return best_lender

    def prefills_sooner_on_decoder(
        self, request: RequestState, first_replica: ReplicaState, second_replica: ReplicaState
    ) -> bool:
        """Whether the decode replica holds so much of the prefix that it finishes the prefill before the prefill
        replica."""
        if not self._policy.pool_caches or not request.request.blocks or self._policy.affinity == 0:
            return False
        if self.cached(second_replica, request) <= self.cached(first_replica, request):
            return False
        second_s = self._wait_s(second_replica, request) - self._saved_s(second_replica, request)
        return second_s < self._wait_s(first_replica, request) - self._saved_s(first_replica, request)

    def _target_holding(self, replica: str, balancer: Balancer, request: RequestState) -> Target | None:
        """The target in the balancer that would prefill on a replica, if any."""
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

    def _max_cached(self, request: RequestState, region: str = "") -> int:
        """The most tokens that one of the model's replicas has cached; with a region, of those that serve there."""
        blocks, model = request.request.blocks, request.request.model

        def accepts(replica: str) -> bool:
            replica_state = self._fleet.views.get(replica)
            if replica_state is None or replica_state.member.model != model:
                return False
            return not region or (replica_state.serves and replica_state.member.region == region)

        _, holders = self._index.deepest(blocks, accepts, exact=self._needs_checkpoints(request))
        return max((self.cached(self._fleet.views[holder], request) for holder in holders), default=0)

    def cached(self, replica: ReplicaState, request_state: RequestState) -> int:
        """Tokens of the prompt that a replica has cached; the last token always counts as uncached."""
        request = request_state.request
        model = self._facts.models.get(request.model)
        if model is None:
            return 0
        blocks = self._index.held_by(replica.member.id, request.blocks, exact=model.exact_prefix)
        return min(blocks * model.block_tokens, request.prompt_tokens - 1)

    def _needs_checkpoints(self, request: RequestState) -> bool:
        model = self._facts.models.get(request.request.model)
        return model is not None and model.exact_prefix

    def _saved_s(self, replica: ReplicaState, request: RequestState) -> float:
        facts = replica.facts
        if facts is None:
            return 0.0
        saved_s = self.cached(replica, request) * facts.prefill_s_per_token * replica.pace
        return saved_s * (1.0 + self._stall_factor(replica))

    def _wait_s(self, replica: ReplicaState, request: RequestState) -> float:
        """Seconds until the request's prefill is done, without its cache savings: queued prompts, a full batch, its
        own prompt."""
        facts = replica.facts
        if facts is None:
            return 0.0
        wait_s = (replica.open_prefill_tokens + request.prompt_tokens) * facts.prefill_s_per_token
        excess_requests = replica.open_requests - facts.decode_batch
        if excess_requests > 0:
            wait_s += excess_requests * decode_seconds(facts, request.output_tokens)
        wait_s += self._stall_factor(replica) * request.prompt_tokens * facts.prefill_s_per_token
        return wait_s * replica.pace

    def _stall_factor(self, replica: ReplicaState) -> float:
        """Seconds that the open requests there are delayed by, per second of prefill."""
        model = self._facts.models.get(replica.member.model)
        return (
            PREFILL_STALL_WEIGHT * replica.open_requests
            if model is not None and model.slo is not None
            else 0.0
        )


def best_holder(saved_s: dict[str, float], waits_s: dict[str, float], default: str, affinity: float) -> str:
    """The replica with the best score; the default one on ties. Iterates in order of insertion."""
    best_replica, best_score = default, affinity * saved_s.get(default, 0.0) - waits_s[default]
    for replica, saved in saved_s.items():
        score = affinity * saved - waits_s[replica]
        if score > best_score + 1e-12:
            best_replica, best_score = replica, score
    return best_replica


def may_lend(replica: ReplicaState, request: RequestState) -> bool:
    return (
        replica.serves
        and replica.member.model == request.request.model
        and not (request.avoid and request.avoids(replica))
    )


def _has_room_for(replica: ReplicaState, tokens: int) -> bool:
    """Whether a replica can load a prefix at once, by its last report: no queue and enough free blocks."""
    status = replica.status
    return status is None or (not status.queued and status.free_blocks * BLOCK_TOKENS >= tokens)


def _prefill_replica(target: Target) -> ReplicaState:
    if target.view is not None:
        return target.view
    if len(target.prefills) == 1:
        return target.prefills[0]
    return min(target.prefills, key=lambda replica: replica.open_prefill_tokens)
