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
        self, room: ReplicaCapacity | None, affinity: PrefixAffinity, speeds: LearnedSpeeds, fleet: FleetState
    ) -> None:
        self._room = room  # None: there is always some, so nobody is late or refused.
        self._affinity = affinity
        self._speeds = speeds
        self._fleet = fleet

    def sent(self, req: RequestState, view: ReplicaState, tokens: int) -> None:
        """A prompt is computed there: others go before it where it is late anyway."""
        room = self._room
        if room is None or room.several or tokens <= view.easy[1]:
            return
        slo = room.slo(req.request.model)
        if slo is None or not self._hopeless(view, tokens, slo):
            return
        req.yielding = (view, tokens)
        self._fleet.yielding(view, tokens)

    def caught_up(self, req: RequestState) -> None:
        if req.yielding is not None:
            view, tokens = req.yielding
            req.yielding = None
            self._fleet.yielding(view, -tokens)

    def soonest(self, chooser: Balancer, req: RequestState, left_s: float) -> Target | None:
        """The replica that computes its prompt first, if that is in time; None as well between several tenants."""
        return self._soonest(chooser, req, left_s, CLOSED)[0]

    def flow(self, ways: RouteOptions, req: RequestState, left_s: float) -> tuple[Target, Target] | None:
        """The same over flows: who computes the prompt first, and who answers it."""
        room, best, least_s = self._room, None, left_s
        if room is None:
            return None
        for way in ways.local.members():
            if way.decodes is None:
                continue
            first, time_s = self._soonest(way.prefills, req, least_s, PREFILL)
            if first is None or (best is not None and time_s >= least_s):
                continue
            for second in way.decodes.members():
                if second.view is not None and room.fits(second, req, DECODE):
                    best, least_s = (first, second), time_s
                    break
        return best

    def _soonest(
        self, chooser: Balancer, req: RequestState, left_s: float, phase: int
    ) -> tuple[Target | None, float]:
        room = self._room
        slo = room.slo(req.request.model) if room is not None else None
        best: Target | None = None
        least_s = left_s
        if room is None or slo is None or room.several or left_s <= 0:
            return best, least_s
        usual_tokens = self._speeds.prompt_tokens(req.request.model)
        for target in chooser.members():
            view = target.view
            if view is None or view.facts is None:
                continue
            per_token_s = view.facts.prefill_s_per_token * view.pace
            # Of a pipeline, the way through it.
            fixed_s = view.facts.prefill_fixed_s * view.pace if phase == PREFILL else 0.0
            if usual_tokens * per_token_s + fixed_s < COARSE * slo.ttft_s:
                continue
            tokens = view.open_prefill_tokens - view.yielding_tokens + self._own_tokens(view, req)
            time_s = tokens * per_token_s + fixed_s
            if time_s <= least_s and (phase == PREFILL or room.answers(view, req, slo, phase)):
                best, least_s = target, time_s
        return best, least_s

    def at_home(self, req: RequestState, first: ReplicaState, second: ReplicaState) -> bool:
        """Whether the prompt is best computed where it is answered, and others bear that."""
        if first.kv_version != second.kv_version:
            return True
        if not self._affinity.at_home(req, first, second):
            return False
        return self._room is None or self._room.bears(second, req, self._own_tokens(second, req))

    def aside(self, chooser: Balancer, picked: ReplicaState, req: RequestState) -> Target | None:
        """Where a prompt goes that is late anyway; None: it is not, or everybody has enough of them."""
        room = self._room
        slo = room.slo(req.request.model) if room is not None else None
        if room is None or slo is None or room.several or not self._late(picked, req, slo):
            return None
        best, most_s, fewest = None, -1.0, 0
        for target in chooser.members():
            view = target.view
            if view is None or view.facts is None:
                continue
            behind_s = view.open_prefill_tokens * view.facts.prefill_s_per_token * view.pace
            if behind_s > MOST_BEHIND * slo.ttft_s or behind_s < most_s:
                continue
            if behind_s == most_s and view.open_requests >= fewest:
                continue
            if self._late(view, req, slo) and room.answers(view, req, slo, CLOSED):
                best, most_s, fewest = target, behind_s, view.open_requests
        return best

    def _late(self, view: ReplicaState, req: RequestState, slo: Slo) -> bool:
        """Whether its prompt alone takes longer there than the objective."""
        if not self._hopeless(view, req.prompt_tokens, slo):
            return False
        return not req.request.blocks or self._hopeless(view, self._own_tokens(view, req), slo)

    def _hopeless(self, view: ReplicaState, tokens: int, slo: Slo) -> bool:
        """Whether so much of a prompt, and nothing else, takes longer there than the objective."""
        facts = view.facts
        if facts is None:
            return False
        # Of a pipeline, its way through it; a pace learned of prompts that came one by one has that in it already.
        token_s = max(facts.alone_s_per_token, facts.prefill_s_per_token * view.pace)
        return tokens * token_s > slo.ttft_s

    def _own_tokens(self, view: ReplicaState, req: RequestState) -> int:
        if not req.request.blocks:
            return req.prompt_tokens
        return max(1, req.prompt_tokens - self._affinity.cached(view, req))
