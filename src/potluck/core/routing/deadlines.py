"""TTFT deadlines: targets that can still meet them, and the routing of prompts that cannot.

Where prefill takes a large part of the TTFT objective (COARSE_PROMPT_SHARE), a request without room anywhere goes to
the target with the least

    (prompt tokens queued there + its own, less what is cached) x seconds per token x pace

if that is within its remaining TTFT. A prompt whose own prefill exceeds the objective misses it on any replica, so it
yields: it is computed below all other priorities, on the replica with the most queued prompts."""

from __future__ import annotations

from typing import Final

from potluck.core.routing.balance import Balancer
from potluck.core.routing.capacity import CLOSED, DECODE, PREFILL, ReplicaCapacity
from potluck.core.routing.learned_speeds import LearnedSpeeds
from potluck.core.routing.prefix_affinity import PrefixAffinity
from potluck.core.routing.routing_table import RouteOptions
from potluck.core.state.fleet import FleetState, ReplicaState
from potluck.core.state.request_state import RequestState
from potluck.core.state.targets import Target
from potluck.core.values.types import Slo

COARSE_PROMPT_SHARE: Final = 0.1
# Limit of the queue, in TTFT objectives, behind which a yielding prompt is placed.
MAX_YIELDING_QUEUE: Final = 2.0


class DeadlineCheck:
    """Stateless: answers from the capacity, the caches and the load counts of replicas."""

    def __init__(
        self,
        capacity: ReplicaCapacity | None,
        affinity: PrefixAffinity,
        speeds: LearnedSpeeds,
        fleet: FleetState,
    ) -> None:
        self._capacity = capacity  # None: admission is off, so no request is late or refused.
        self._affinity = affinity
        self._speeds = speeds
        self._fleet = fleet

    def note_sent(self, request: RequestState, replica: ReplicaState, tokens: int) -> None:
        """A prompt was sent to a replica: it yields to others there if its own prefill exceeds the TTFT objective."""
        capacity = self._capacity
        if capacity is None or capacity.several or tokens <= replica.easy[1]:
            return
        slo = capacity.slo(request.request.model)
        if slo is None or not self._exceeds_slo(replica, tokens, slo):
            return
        request.yielding = (replica, tokens)
        self._fleet.yielding(replica, tokens)

    def stop_yielding(self, request: RequestState) -> None:
        if request.yielding is not None:
            replica, tokens = request.yielding
            request.yielding = None
            self._fleet.yielding(replica, -tokens)

    def fastest_target(self, balancer: Balancer, request: RequestState, left_s: float) -> Target | None:
        """The target that finishes the prefill first, if within `left_s`; None with several tenants."""
        return self._fastest_target(balancer, request, left_s, CLOSED)[0]

    def fastest_flow(
        self, route_options: RouteOptions, request: RequestState, left_s: float
    ) -> tuple[Target, Target] | None:
        """The same for flows: (prefill target, decode target)."""
        capacity, best_pair, least_s = self._capacity, None, left_s
        if capacity is None:
            return None
        for route_option in route_options.local.members():
            if route_option.decodes is None:
                continue
            first_target, time_s = self._fastest_target(route_option.prefills, request, least_s, PREFILL)
            if first_target is None or (best_pair is not None and time_s >= least_s):
                continue
            for second_target in route_option.decodes.members():
                if second_target.view is not None and capacity.fits(second_target, request, DECODE):
                    best_pair, least_s = (first_target, second_target), time_s
                    break
        return best_pair

    def _fastest_target(
        self, balancer: Balancer, request: RequestState, left_s: float, phase: int
    ) -> tuple[Target | None, float]:
        capacity = self._capacity
        slo = capacity.slo(request.request.model) if capacity is not None else None
        best_target: Target | None = None
        least_s = left_s
        if capacity is None or slo is None or capacity.several or left_s <= 0:
            return best_target, least_s
        mean_tokens = self._speeds.prompt_tokens(request.request.model)
        for target in balancer.members():
            replica = target.view
            if replica is None or replica.facts is None:
                continue
            per_token_s = replica.facts.prefill_s_per_token * replica.pace
            # For a pipeline: the latency of its stages.
            fixed_s = replica.facts.prefill_fixed_s * replica.pace if phase == PREFILL else 0.0
            if mean_tokens * per_token_s + fixed_s < COARSE_PROMPT_SHARE * slo.ttft_s:
                continue
            queued_tokens = (
                replica.open_prefill_tokens
                - replica.yielding_tokens
                + self._uncached_tokens(replica, request)
            )
            time_s = queued_tokens * per_token_s + fixed_s
            if time_s <= least_s and (phase == PREFILL or capacity.answers(replica, request, slo, phase)):
                best_target, least_s = target, time_s
        return best_target, least_s

    def prefills_on_decoder(
        self, request: RequestState, first_replica: ReplicaState, second_replica: ReplicaState
    ) -> bool:
        """Whether the decode replica should also prefill the prompt: it is faster, and its running answers keep
        their pace."""
        if first_replica.kv_version != second_replica.kv_version:
            return True
        if not self._affinity.prefills_sooner_on_decoder(request, first_replica, second_replica):
            return False
        return self._capacity is None or self._capacity.bears(
            second_replica, request, self._uncached_tokens(second_replica, request)
        )

    def yielding_target(
        self, balancer: Balancer, picked_replica: ReplicaState, request: RequestState
    ) -> Target | None:
        """The target for a prompt that misses its TTFT on any replica; None if it does not, or all have enough of
        them."""
        capacity = self._capacity
        slo = capacity.slo(request.request.model) if capacity is not None else None
        if (
            capacity is None
            or slo is None
            or capacity.several
            or not self._misses_alone(picked_replica, request, slo)
        ):
            return None
        best_target, longest_queue_s, fewest_requests = None, -1.0, 0
        for target in balancer.members():
            replica = target.view
            if replica is None or replica.facts is None:
                continue
            queue_s = replica.open_prefill_tokens * replica.facts.prefill_s_per_token * replica.pace
            if queue_s > MAX_YIELDING_QUEUE * slo.ttft_s or queue_s < longest_queue_s:
                continue
            if queue_s == longest_queue_s and replica.open_requests >= fewest_requests:
                continue
            if self._misses_alone(replica, request, slo) and capacity.answers(replica, request, slo, CLOSED):
                best_target, longest_queue_s, fewest_requests = target, queue_s, replica.open_requests
        return best_target

    def _misses_alone(self, replica: ReplicaState, request: RequestState, slo: Slo) -> bool:
        """Whether the uncached prompt alone exceeds the TTFT objective on this replica."""
        if not self._exceeds_slo(replica, request.prompt_tokens, slo):
            return False
        return not request.request.blocks or self._exceeds_slo(
            replica, self._uncached_tokens(replica, request), slo
        )

    def _exceeds_slo(self, replica: ReplicaState, tokens: int, slo: Slo) -> bool:
        """Whether the prefill of this many tokens alone exceeds the TTFT objective on this replica."""
        facts = replica.facts
        if facts is None:
            return False
        # For a pipeline the latency of one prompt; a pace learned from prompts that came one by one includes
        # it already.
        token_s = max(facts.alone_s_per_token, facts.prefill_s_per_token * replica.pace)
        return tokens * token_s > slo.ttft_s

    def _uncached_tokens(self, replica: ReplicaState, request: RequestState) -> int:
        if not request.request.blocks:
            return request.prompt_tokens
        return max(1, request.prompt_tokens - self._affinity.cached(replica, request))
