"""What a replica can take: prompts that it begins soon, and no more answers at once than it makes fast enough.

A request may be sent to a replica (or to a group of them) when there

    prompts   at most AHEAD of the TTFT objective lies in prompts that were sent and are not computed; where nobody
              decodes beside them, AHEAD_APART
    pace      with one answer more, a token takes at most MARGIN of the TPOT objective
    memory    all that was sent fits its KV

or when it has nothing to do. In the long run a replica that makes n answers at once, and begins a new one whenever
one ends, also computes n prompts in the time of n answers. So a token takes

    gap(n) = s(n) + n rho        s(n)  a decode step of n answers (facts.py), rho  prompt seconds per output token

rho is observed, per model and tenant: the sum of the prompts over that of the answers, both fading. Times of prompts
are multiplied by the replica's pace (routing/speeds.py), gaps by what they were seen to be against what was reckoned.

`between.py` has what is asked beyond that once there are several tenants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from potluck.core.admission.tenant_mix import CLOSED, DECODE, PREFILL, SPLIT, TenantHistory, TenantMix
from potluck.core.admission.tenant_placement import TenantPlacement
from potluck.core.routing.balance import Balancer
from potluck.core.routing.opportunistic import step_seconds
from potluck.core.routing.routing_table import RoutingTable
from potluck.core.routing.split import MOST_IN_LOW
from potluck.core.routing.targets import COMBO, PLAIN, Target
from potluck.core.state.facts import BLOCK_TOKENS, FleetFacts, ReplicaFacts
from potluck.core.state.fleet import FleetState, ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import RequestState
from potluck.core.values.service import RequestClass
from potluck.core.values.types import Slo

AHEAD: Final = 0.25
AHEAD_APART: Final = 0.45
MARGIN: Final = 0.9
EASY: Final = 0.25
"""Below this share of the objective's TPOT, and of what may lie ahead, nothing more is asked."""
PROMPTS = {CLOSED: 1.0, DECODE: 0.0, SPLIT: 0.5}
"""How much of the prompts is computed where the answers are made."""
LEAST_TOKENS: Final = 16
"""Shorter answers say little of how long a token takes."""
UNBOUNDED: Final = 1 << 60


class ReplicaCapacity:
    """Answers whether there is room. What it keeps, the Brain changes through it."""

    def __init__(self, facts: FleetFacts, policy: Policy, fleet: FleetState, table: RoutingTable) -> None:
        self._facts = facts
        self._fleet = fleet
        self._table = table
        self._classes: Mapping[str, RequestClass] = {each.name: each for each in policy.classes}
        self._overflow = policy.split_overflow
        self._habits: dict[tuple[str, str], TenantHistory] = {}
        self._owed: dict[ReplicaState, tuple[float, float]] = {}
        """Decoding replicas that computed prompts: when last, and how many seconds of them count then."""
        self.mixes: dict[ReplicaState, TenantMix] = {}
        """Whose requests replicas have; written by `between`."""
        self.several = False
        """Whether there was ever more than one tenant."""
        self.tenant: str | None = None
        """The first one that was seen."""
        self.between = TenantPlacement(self, policy, table)

    def slo(self, model: str) -> Slo | None:
        """What requests are admitted by."""
        known = self._facts.models.get(model)
        if known is None:
            return None
        return known.slo if known.limits is None else known.limits

    def easiness(self, view: ReplicaState) -> tuple[int, int, int]:
        """Requests, tokens of prompts and tokens of KV that it may have before anything more need be asked."""
        slo, facts = self.slo(view.member.model), view.facts
        if slo is None or facts is None:
            return UNBOUNDED, UNBOUNDED, UNBOUNDED
        first_s = facts.decode_first_s if 0 < facts.decode_first_s <= facts.decode_step_s else 0.0
        slope_s = (facts.decode_step_s - first_s) / max(1, facts.decode_batch)
        requests = max(0, int((EASY * slo.tpot_s - first_s) / max(slope_s, 1e-9)))
        tokens = int(EASY * AHEAD * slo.ttft_s / max(facts.prefill_s_per_token, 1e-12))
        return requests, tokens, facts.total_blocks * BLOCK_TOKENS // 2

    # What requests are like, and where they are.

    def seen(self, req: RequestState) -> None:
        """A request came when things were not easy."""
        request = req.request
        key = request.model, request.tenant
        habit = self._habits.get(key)
        if habit is None:
            habit = self._habits[key] = TenantHistory()
        habit.add(request.prompt_tokens, request.max_output_tokens)

    def ended(self, at_s: float, req: RequestState, view: ReplicaState, output_tokens: int) -> None:
        """An answer is complete, where there was much to do: how long did its tokens take?"""
        tokens = output_tokens - req.streamed_tokens
        if tokens < LEAST_TOKENS or view.facts is None:
            return
        phase = CLOSED
        if req.earlier and req.route is not None:
            phase = DECODE if req.route.segments[-1].start >= req.prompt_tokens else SPLIT
        reckoned_s = self.gap_s(view, req, view.facts, view.open_requests, phase)
        if reckoned_s > 0:
            self._fleet.gap(view, (at_s - req.first_s) / (tokens - 1) / reckoned_s)

    # Whether it fits.

    def fill(self, req: RequestState) -> float:
        known = self._classes.get(req.request.request_class)
        return known.fill if known is not None else 1.0

    def fits(self, target: Target, req: RequestState, phase: int = CLOSED) -> bool:
        """Whether a target has room for a request."""
        slo = self.slo(req.request.model)
        if slo is None:
            return True
        fill = self.fill(req)
        if target.kind == PLAIN:
            assert target.view is not None
            return self._view(target.view, req, slo, fill, phase)
        if not target.usable:
            return True
        answers = any(
            self._view(view, req, slo, fill, DECODE if target.kind == COMBO else SPLIT)
            for view in target.decodes
            if view not in target.prefills
        ) or any(  # what is left of a combo does both
            self._view(view, req, slo, fill, CLOSED)
            for view in target.prefills
            if view.role == "mixed" and target.kind == COMBO
        )
        if not answers:
            return False
        if target.kind == COMBO or not self._facts.splits.get(target.prefills[0].member.template):
            return any(self._view(view, req, slo, fill, PREFILL) for view in target.prefills)
        places = MOST_IN_LOW * len(target.prefills)
        if target.in_low < places:
            return True
        high = min(target.decodes, key=lambda view: view.open_prefill_tokens)
        return self._overflow and len(target.waiting) < places and self._view(high, req, slo, fill, PREFILL)

    def other(self, chooser: Balancer, picked: Target, req: RequestState, phase: int) -> Target | None:
        """Instead of the one whose turn it is, where that is full or another disturbs less; None: nobody has room."""
        if self.several and phase == CLOSED:
            return self.between.other(chooser, picked, req)
        if self.fits(picked, req, phase):
            return picked
        return next((each for each in chooser.members() if self.fits(each, req, phase)), None)

    def _view(self, view: ReplicaState, req: RequestState, slo: Slo, fill: float, phase: int) -> bool:
        facts = view.facts
        if facts is None or not view.open_requests:
            return True
        if phase in (CLOSED, PREFILL):
            tokens = view.open_prefill_tokens - view.yielding_tokens
            ahead_s = view.pace * facts.prefill_s_per_token * tokens
            if req.heavy:
                ahead_s /= 1.0 - self.between.apart.taken(req, view)
            if ahead_s > (AHEAD_APART if view.role == "prefill" else AHEAD) * slo.ttft_s * fill:
                return False
        if phase == CLOSED and view.role == "decode" and not self.bears(view, req, req.prompt_tokens):
            return False
        return phase == PREFILL or self.answers(view, req, slo, phase, fill)

    def bears(self, view: ReplicaState, req: RequestState, tokens: int) -> bool:
        """Whether answers that a decoding replica makes keep their pace while it computes so much of a prompt.

        The planner gave it answers alone, so each of them waits once for the whole of it: with answers of A tokens
        a token takes s(n) + prompt seconds / A, of all prompts in the time of an answer.
        """
        slo, facts = self.slo(req.request.model), view.facts
        if slo is None or facts is None or not view.open_requests:
            return True
        answer_tokens = self._answer_tokens(req)
        step_s = view.gap_pace * step_seconds(facts, view.open_requests + 1)
        owed_s = self._owed_s(view, req, answer_tokens * slo.tpot_s) + _alone_s(view, facts, tokens)
        return step_s + owed_s / answer_tokens <= MARGIN * slo.tpot_s

    def borne(self, view: ReplicaState, req: RequestState) -> None:
        """A decoding replica is to compute the prompt of a request that it answers."""
        slo, facts = self.slo(req.request.model), view.facts
        if slo is None or facts is None:
            return
        before_s = self._owed_s(view, req, self._answer_tokens(req) * slo.tpot_s)
        self._owed[view] = (
            req.request.arrival_s,
            before_s + _alone_s(view, facts, req.last_tokens),
        )

    def _owed_s(self, view: ReplicaState, req: RequestState, span_s: float) -> float:
        """What answers still wait for prompts there: all of what was sent, less as time passes; nothing after the
        time of an answer."""
        then_s, seconds = self._owed.get(view, (0.0, 0.0))
        return seconds * max(0.0, 1.0 - (req.request.arrival_s - then_s) / span_s)

    def _answer_tokens(self, req: RequestState) -> float:
        habit = self._habits.get((req.request.model, req.request.tenant))
        return max(1.0, habit.answer_tokens if habit is not None else float(req.output_tokens))

    def keeps_pace(self, view: ReplicaState, req: RequestState, busy: float) -> bool:
        """Whether one answer more, be it the first, keeps its pace where prompts take `busy` of the time."""
        slo, facts = self.slo(req.request.model), view.facts
        if slo is None or facts is None:
            return True
        step_s = view.pace * step_seconds(facts, view.open_requests + 1)
        return step_s <= MARGIN * slo.tpot_s * (1.0 - busy)

    def answers(self, view: ReplicaState, req: RequestState, slo: Slo, phase: int, fill: float = 1.0) -> bool:
        """Whether it could make one answer more, whatever prompts it has."""
        facts = view.facts
        if facts is None or not view.open_requests:
            return True
        room_tokens = facts.total_blocks * BLOCK_TOKENS * fill
        if view.open_context_tokens + req.total_tokens > room_tokens:
            return False
        gap_s = view.gap_pace * self.gap_s(view, req, facts, view.open_requests + 1, phase)
        return gap_s <= MARGIN * slo.tpot_s * fill

    def gap_s(self, view: ReplicaState, req: RequestState, facts: ReplicaFacts, n: int, phase: int) -> float:
        """gap(n), as reckoned."""
        part = PROMPTS[phase]
        if req.heavy:  # a full KV takes as long to read as the planned batch does, however few share it
            filled = view.open_context_tokens / max(1, facts.total_blocks * BLOCK_TOKENS)
            gap_s = step_seconds(facts, max(n, int(filled * facts.decode_batch)))
            return (gap_s + part * self._prompts_s(view, req, facts, n)) / (
                1.0 - self.between.apart.taken(req, view)
            )
        gap_s = step_seconds(facts, n)
        return gap_s + part * self._prompts_s(view, req, facts, n) if part else gap_s

    def _prompts_s(self, view: ReplicaState, req: RequestState, facts: ReplicaFacts, n: int) -> float:
        """n rho, of the tenants whose requests are there."""
        model, tenant = req.request.model, req.request.tenant
        if not self.several:
            return n * self.rho(model, tenant) * facts.prefill_s_per_token
        mix, total, noted = self.mixes.get(view), self.rho(model, tenant), 1
        if mix is not None:
            total += mix.rho
            noted += mix.count
        if noted < n and self.tenant is not None:  # those from when there was one tenant
            total += (n - noted) * self.rho(model, self.tenant)
        return total * facts.prefill_s_per_token

    def rho(self, model: str, tenant: str) -> float:
        """Prompt tokens for each output token."""
        habit = self._habits.get((model, tenant))
        return habit.prompt_tokens / habit.answer_tokens if habit is not None else 0.0


def _alone_s(view: ReplicaState, facts: ReplicaFacts, tokens: int) -> float:
    return tokens * max(facts.prefill_s_per_token, facts.alone_s_per_token) * view.pace


def crowded(view: ReplicaState) -> bool:
    """Whether it makes so many answers, or such long ones, that how fast is worth learning."""
    return view.open_requests > view.easy[0] or view.open_context_tokens > view.easy[2]


def easy(view: ReplicaState) -> bool:
    """Whether it has so little to do that there is room for sure."""
    bounds = view.easy
    return (
        view.open_requests <= bounds[0]
        and view.open_prefill_tokens <= bounds[1]
        and view.open_context_tokens <= bounds[2]
    )
