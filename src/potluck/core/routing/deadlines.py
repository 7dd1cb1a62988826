"""Who would still be in time where, and the way of those who are late anyway.

Where prompts take a good part of the objective (COARSE), a request that finds no room is sent to the target whose

    (prompts sent there and not computed + its own, less what is cached) x seconds per token x pace

is least and within what is left of its TTFT objective. A prompt that takes longer than that alone is late anywhere,
so it yields: computed below all other priorities, it goes where the most prompts lie already."""

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

COARSE: Final = 0.1
MOST_BEHIND: Final = 2.0  # Objectives' worth of prompts behind which nobody is put for being late.


class DeadlineCheck:
    """Answers from the room, the caches and the counts on replicas; owns nothing."""

    def __init__(
        self,
        capacity: ReplicaCapacity | None,
        affinity: PrefixAffinity,
        speeds: LearnedSpeeds,
        fleet: FleetState,
    ) -> None:
        self._room = capacity  # None: there is always some, so nobody is late or refused.
        self._affinity = affinity
        self._speeds = speeds
        self._fleet = fleet

    def sent(self, request: RequestState, replica: ReplicaState, tokens: int) -> None:
        """A prompt is computed there: others go before it where it is late anyway."""
        capacity = self._room
        if capacity is None or capacity.several or tokens <= replica.easy[1]:
            return
        slo = capacity.slo(request.request.model)
        if slo is None or not self._hopeless(replica, tokens, slo):
            return
        request.yielding = (replica, tokens)
        self._fleet.yielding(replica, tokens)

    def caught_up(self, request: RequestState) -> None:
        if request.yielding is not None:
            replica, tokens = request.yielding
            request.yielding = None
            self._fleet.yielding(replica, -tokens)

    def soonest(self, balancer: Balancer, request: RequestState, left_s: float) -> Target | None:
        """The replica that computes its prompt first, if that is in time; None as well between several tenants."""
        return self._soonest(balancer, request, left_s, CLOSED)[0]

    def flow(
        self, route_options: RouteOptions, request: RequestState, left_s: float
    ) -> tuple[Target, Target] | None:
        """The same over flows: who computes the prompt first, and who answers it."""
        capacity, best, least_s = self._room, None, left_s
        if capacity is None:
            return None
        for route_option in route_options.local.members():
            if route_option.decodes is None:
                continue
            first_target, time_s = self._soonest(route_option.prefills, request, least_s, PREFILL)
            if first_target is None or (best is not None and time_s >= least_s):
                continue
            for second_target in route_option.decodes.members():
                if second_target.view is not None and capacity.fits(second_target, request, DECODE):
                    best, least_s = (first_target, second_target), time_s
                    break
        return best

    def _soonest(
        self, balancer: Balancer, request: RequestState, left_s: float, phase: int
    ) -> tuple[Target | None, float]:
        capacity = self._room
        slo = capacity.slo(request.request.model) if capacity is not None else None
        best_target: Target | None = None
        least_s = left_s
        if capacity is None or slo is None or capacity.several or left_s <= 0:
            return best_target, least_s
        usual_tokens = self._speeds.prompt_tokens(request.request.model)
        for target in balancer.members():
            replica = target.view
            if replica is None or replica.facts is None:
                continue
            per_token_s = replica.facts.prefill_s_per_token * replica.pace
            # Of a pipeline, the way through it.
            fixed_s = replica.facts.prefill_fixed_s * replica.pace if phase == PREFILL else 0.0
            if usual_tokens * per_token_s + fixed_s < COARSE * slo.ttft_s:
                continue
            tokens = (
                replica.open_prefill_tokens - replica.yielding_tokens + self._own_tokens(replica, request)
            )
            time_s = tokens * per_token_s + fixed_s
            if time_s <= least_s and (phase == PREFILL or capacity.answers(replica, request, slo, phase)):
                best_target, least_s = target, time_s
        return best_target, least_s

    def at_home(
        self, request: RequestState, first_replica: ReplicaState, second_replica: ReplicaState
    ) -> bool:
        """Whether the prompt is best computed where it is answered, and others bear that."""
        if first_replica.kv_version != second_replica.kv_version:
            return True
        if not self._affinity.at_home(request, first_replica, second_replica):
            return False
        return self._room is None or self._room.bears(
            second_replica, request, self._own_tokens(second_replica, request)
        )

    def aside(self, balancer: Balancer, picked_replica: ReplicaState, request: RequestState) -> Target | None:
        """Where a prompt goes that is late anyway; None: it is not, or everybody has enough of them."""
        capacity = self._room
        slo = capacity.slo(request.request.model) if capacity is not None else None
        if (
            capacity is None
            or slo is None
            or capacity.several
            or not self._late(picked_replica, request, slo)
        ):
            return None
        best_target, most_s, fewest = None, -1.0, 0
        for target in balancer.members():
            replica = target.view
            if replica is None or replica.facts is None:
                continue
            behind_s = replica.open_prefill_tokens * replica.facts.prefill_s_per_token * replica.pace
            if behind_s > MOST_BEHIND * slo.ttft_s or behind_s < most_s:
                continue
            if behind_s == most_s and replica.open_requests >= fewest:
                continue
            if self._late(replica, request, slo) and capacity.answers(replica, request, slo, CLOSED):
                best_target, most_s, fewest = target, behind_s, replica.open_requests
        return best_target

    def _late(self, replica: ReplicaState, request: RequestState, slo: Slo) -> bool:
        """Whether its prompt alone takes longer there than the objective."""
        if not self._hopeless(replica, request.prompt_tokens, slo):
            return False
        return not request.request.blocks or self._hopeless(replica, self._own_tokens(replica, request), slo)

    def _hopeless(self, replica: ReplicaState, tokens: int, slo: Slo) -> bool:
        """Whether so much of a prompt, and nothing else, takes longer there than the objective."""
        facts = replica.facts
        if facts is None:
            return False
        # Of a pipeline, its way through it; a pace learned of prompts that came one by one has that in it already.
        token_s = max(facts.alone_s_per_token, facts.prefill_s_per_token * replica.pace)
        return tokens * token_s > slo.ttft_s

    def _own_tokens(self, replica: ReplicaState, request: RequestState) -> int:
        if not request.request.blocks:
            return request.prompt_tokens
        return max(1, request.prompt_tokens - self._affinity.cached(replica, request))
