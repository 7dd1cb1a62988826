"""What a replica can take: prompts that it begins soon, and no more answers at once than it makes fast enough.

A request may be sent to a replica (or to a group of them) that has nothing to do, or where

    prompts   at most AHEAD of the TTFT objective lies in prompts not computed (AHEAD_APART where nobody decodes)
    pace      with one answer more, a token takes at most MARGIN of the TPOT objective
    memory    all that was sent fits its KV

A replica that makes n answers at once also computes n prompts in their time, so a token takes

    gap(n) = s(n) + n rho        s(n)  a decode step of n answers, rho  prompt seconds per output token

rho is observed, per model and tenant. Prompt times are multiplied by the replica's pace, gaps by what was seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from potluck.core.routing.balance import Balancer
from potluck.core.routing.isolation import TenantIsolation
from potluck.core.routing.opportunistic import step_seconds
from potluck.core.routing.routing_table import RoutingTable
from potluck.core.routing.split import MAX_LOW_END_REQUESTS
from potluck.core.state.facts import BLOCK_TOKENS, ReplicaFacts
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import RequestState
from potluck.core.state.targets import COMBO, PLAIN, Target
from potluck.core.values.service import RequestClass
from potluck.core.values.types import Slo

CLOSED: Final = 0
PREFILL: Final = 1
DECODE: Final = 2
SPLIT: Final = 3
"""What is asked of a replica: the whole request, its prompt alone, its answer alone, part of its prompt too."""
FADE: Final = 1.0 / 1024  # How much one request counts in rho, once many were seen.


AHEAD: Final = 0.25
AHEAD_APART: Final = 0.45
MARGIN: Final = 0.9
EASY: Final = 0.25
"""Below this share of the objective's TPOT, and of what may lie ahead, nothing more is asked."""
PROMPTS = {CLOSED: 1.0, DECODE: 0.0, SPLIT: 0.5}
"""How much of the prompts is computed where the answers are made."""
LEAST_TOKENS: Final = 16  # Shorter answers say little of how long a token takes.
UNBOUNDED: Final = 1 << 60


class TenantMix:
    """Whose requests a replica has, once there are several tenants."""

    __slots__ = ("answers", "count", "light_tokens", "long", "requests", "rho")

    def __init__(self) -> None:
        self.count = 0
        self.rho = 0.0  # The sum of theirs, each as it was when it was sent.
        self.requests: dict[str, int] = {}
        self.long: dict[str, int] = {}
        self.answers = 0  # Answers of tenants that are not heavy.
        self.light_tokens = 0  # Tokens of their prompts that are not computed.


class TenantHistory:
    __slots__ = ("_count", "answer_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self._count = 0
        self.prompt_tokens = 0.0
        self.answer_tokens = 0.0

    def add(self, prompt_tokens: int, answer_tokens: int) -> None:
        self._count += 1
        part = max(FADE, 1.0 / self._count)
        self.prompt_tokens += part * (prompt_tokens - self.prompt_tokens)
        self.answer_tokens += part * (answer_tokens - self.answer_tokens)


class ReplicaCapacity:
    """Answers whether there is room. What it keeps, the Brain changes through it."""

    def __init__(self, policy: Policy, table: RoutingTable) -> None:
        self._facts = table.facts
        self._fleet = table.fleet
        self._classes: Mapping[str, RequestClass] = {item.name: item for item in policy.classes}
        self._overflow = policy.split_overflow
        self._histories: dict[tuple[str, str], TenantHistory] = {}
        self._owed: dict[ReplicaState, tuple[float, float]] = {}
        """Decoding replicas that computed prompts: when last, and how many seconds of them count then."""
        self.mixes: dict[ReplicaState, TenantMix] = {}  # Whose requests replicas have; written by `between`.
        self._full: dict[tuple[Balancer, int, str], tuple[int, int, float]] = {}
        """Where nobody had room, in which phase, for which class: after which change of the fleet, for how many
        tokens, with which rho. Of one version of the fleet."""
        self._full_version = -1
        self.several = False
        self.tenant: str | None = None
        self.tenants = TenantPlacement(self, policy, table)

    def slo(self, model: str) -> Slo | None:
        known = self._facts.models.get(model)
        if known is None:
            return None
        return known.slo if known.limits is None else known.limits

    def easiness(self, replica: ReplicaState) -> tuple[int, int, int]:
        """Requests, tokens of prompts and tokens of KV that it may have before anything more need be asked."""
        slo, facts = self.slo(replica.member.model), replica.facts
        if slo is None or facts is None:
            return UNBOUNDED, UNBOUNDED, UNBOUNDED
        first_s = facts.decode_first_s if 0 < facts.decode_first_s <= facts.decode_step_s else 0.0
        slope_s = (facts.decode_step_s - first_s) / max(1, facts.decode_batch)
        requests = max(0, int((EASY * slo.tpot_s - first_s) / max(slope_s, 1e-9)))
        tokens = int(EASY * AHEAD * slo.ttft_s / max(facts.prefill_s_per_token, 1e-12))
        return requests, tokens, facts.total_blocks * BLOCK_TOKENS // 2

    # What requests are like, and where they are.

    def seen(self, request_state: RequestState) -> None:
        request = request_state.request
        key = request.model, request.tenant
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = TenantHistory()
        history.add(request.prompt_tokens, request.max_output_tokens)

    def ended(self, at_s: float, request: RequestState, replica: ReplicaState, output_tokens: int) -> None:
        """An answer is complete, where there was much to do: how long did its tokens take?"""
        tokens = output_tokens - request.streamed_tokens
        if tokens < LEAST_TOKENS or replica.facts is None:
            return
        phase = CLOSED
        if request.earlier and request.route is not None:
            phase = DECODE if request.route.segments[-1].start >= request.prompt_tokens else SPLIT
        reckoned_s = self.gap_s(replica, request, replica.facts, replica.open_requests, phase)
        if reckoned_s > 0:
            self._fleet.observe_gap(replica, (at_s - request.first_s) / (tokens - 1) / reckoned_s)

    # Whether it fits.

    def fits(self, target: Target, request: RequestState, phase: int = CLOSED) -> bool:
        slo = self.slo(request.request.model)
        if slo is None:
            return True
        known_class = self._classes.get(request.request.request_class)
        fill = known_class.fill if known_class is not None else 1.0
        if target.kind == PLAIN:
            assert target.view is not None
            return self._view(target.view, request, slo, fill, phase)
        if not target.usable:
            return True
        answers = any(
            self._view(replica, request, slo, fill, DECODE if target.kind == COMBO else SPLIT)
            for replica in target.decodes
            if replica not in target.prefills
        ) or any(  # what is left of a combo does both
            self._view(replica, request, slo, fill, CLOSED)
            for replica in target.prefills
            if replica.role == "mixed" and target.kind == COMBO
        )
        if not answers:
            return False
        if target.kind == COMBO or not self._facts.splits.get(target.prefills[0].member.template):
            return any(self._view(replica, request, slo, fill, PREFILL) for replica in target.prefills)
        places = MAX_LOW_END_REQUESTS * len(target.prefills)
        if target.in_low < places:
            return True
        high_replica = min(target.decodes, key=lambda replica: replica.open_prefill_tokens)
        return (
            self._overflow
            and len(target.waiting) < places
            and self._view(high_replica, request, slo, fill, PREFILL)
        )

    def other(
        self, balancer: Balancer, picked_target: Target, request: RequestState, phase: int
    ) -> Target | None:
        """Instead of the one whose turn it is, where that is full or another disturbs less; None: nobody has room."""
        if self.several and phase == CLOSED:
            return self.tenants.other(balancer, picked_target, request)
        if self.fits(picked_target, request, phase):
            return picked_target
        if self._full_version != self._fleet.version:
            self._full_version = self._fleet.version
            self._full.clear()
        key, rho = (
            (balancer, phase, request.request.request_class),
            self.rho(request.request.model, request.request.tenant),
        )
        since, tokens, before_rho = self._full.get(key, (-1, 0, 0.0))
        if request.heavy or request.total_tokens < tokens or rho < before_rho:
            since = -1
        for target in balancer.members():
            # Who had no room for less, and has not more since, has none now. Prompts owed fade with time alone.
            replica = target.view
            same = (
                replica is not None
                and replica.eased <= since
                and (phase != CLOSED or replica.role != "decode")
            )
            if not same and self.fits(target, request, phase):
                return target
        if not request.heavy:
            self._full[key] = (self._fleet.changes, request.total_tokens, rho)
        return None

    def _view(self, replica: ReplicaState, request: RequestState, slo: Slo, fill: float, phase: int) -> bool:
        facts = replica.facts
        if facts is None or not replica.open_requests:
            return True
        if phase in (CLOSED, PREFILL):
            tokens = replica.open_prefill_tokens - replica.yielding_tokens
            ahead_s = replica.pace * facts.prefill_s_per_token * tokens
            if request.heavy:
                ahead_s /= 1.0 - self.tenants.isolation.taken(request, replica)
            if ahead_s > (AHEAD_APART if replica.role == "prefill" else AHEAD) * slo.ttft_s * fill:
                return False
        if (
            phase == CLOSED
            and replica.role == "decode"
            and not self.bears(replica, request, request.prompt_tokens)
        ):
            return False
        return phase == PREFILL or self.answers(replica, request, slo, phase, fill)

    def bears(self, replica: ReplicaState, request: RequestState, tokens: int) -> bool:
        """Whether a decoding replica's answers keep their pace: s(n) + prompt seconds / tokens of an answer."""
        slo, facts = self.slo(request.request.model), replica.facts
        if slo is None or facts is None or not replica.open_requests:
            return True
        answer_tokens = self._answer_tokens(request)
        step_s = replica.gap_pace * step_seconds(facts, replica.open_requests + 1)
        owed_s = self._owed_s(replica, request, answer_tokens * slo.tpot_s) + _alone_s(replica, facts, tokens)
        return step_s + owed_s / answer_tokens <= MARGIN * slo.tpot_s

    def borne(self, replica: ReplicaState, request: RequestState) -> None:
        """A decoding replica is to compute the prompt of a request that it answers."""
        slo, facts = self.slo(request.request.model), replica.facts
        if slo is None or facts is None:
            return
        before_s = self._owed_s(replica, request, self._answer_tokens(request) * slo.tpot_s)
        self._owed[replica] = (
            request.request.arrival_s,
            before_s + _alone_s(replica, facts, request.last_tokens),
        )

    def _owed_s(self, replica: ReplicaState, request: RequestState, span_s: float) -> float:
        """What answers still wait for prompts there: fades from all of it to nothing within the time of an answer."""
        then_s, seconds = self._owed.get(replica, (0.0, 0.0))
        return seconds * max(0.0, 1.0 - (request.request.arrival_s - then_s) / span_s)

    def _answer_tokens(self, request: RequestState) -> float:
        history = self._histories.get((request.request.model, request.request.tenant))
        return max(1.0, history.answer_tokens if history is not None else float(request.output_tokens))

    def keeps_pace(self, replica: ReplicaState, request: RequestState, busy: float) -> bool:
        """Whether one answer more, be it the first, keeps its pace where prompts take `busy` of the time."""
        slo, facts = self.slo(request.request.model), replica.facts
        if slo is None or facts is None:
            return True
        step_s = replica.pace * step_seconds(facts, replica.open_requests + 1)
        return step_s <= MARGIN * slo.tpot_s * (1.0 - busy)

    def answers(
        self, replica: ReplicaState, request: RequestState, slo: Slo, phase: int, fill: float = 1.0
    ) -> bool:
        """Whether it could make one answer more, whatever prompts it has."""
        facts = replica.facts
        if facts is None or not replica.open_requests:
            return True
        room_tokens = facts.total_blocks * BLOCK_TOKENS * fill
        if replica.open_context_tokens + request.total_tokens > room_tokens:
            return False
        gap_s = replica.gap_pace * self.gap_s(replica, request, facts, replica.open_requests + 1, phase)
        return gap_s <= MARGIN * slo.tpot_s * fill

    def gap_s(
        self, replica: ReplicaState, request: RequestState, facts: ReplicaFacts, n: int, phase: int
    ) -> float:
        part = PROMPTS[phase]
        if request.heavy:  # a full KV takes as long to read as the planned batch does, however few share it
            filled = replica.open_context_tokens / max(1, facts.total_blocks * BLOCK_TOKENS)
            gap_s = step_seconds(facts, max(n, int(filled * facts.decode_batch)))
            free = 1.0 - self.tenants.isolation.taken(request, replica)
            return (gap_s + part * self._prompts_s(replica, request, facts, n)) / free
        gap_s = step_seconds(facts, n)
        return gap_s + part * self._prompts_s(replica, request, facts, n) if part else gap_s

    def _prompts_s(self, replica: ReplicaState, request: RequestState, facts: ReplicaFacts, n: int) -> float:
        """n rho, of the tenants whose requests are there."""
        model, tenant = request.request.model, request.request.tenant
        if not self.several:
            return n * self.rho(model, tenant) * facts.prefill_s_per_token
        mix, total, noted = self.mixes.get(replica), self.rho(model, tenant), 1
        if mix is not None:
            total += mix.rho
            noted += mix.count
        if noted < n and self.tenant is not None:  # those from when there was one tenant
            total += (n - noted) * self.rho(model, self.tenant)
        return total * facts.prefill_s_per_token

    def rho(self, model: str, tenant: str) -> float:
        history = self._histories.get((model, tenant))
        return history.prompt_tokens / history.answer_tokens if history is not None else 0.0


def _alone_s(replica: ReplicaState, facts: ReplicaFacts, tokens: int) -> float:
    return tokens * max(facts.prefill_s_per_token, facts.alone_s_per_token) * replica.pace


def crowded(replica: ReplicaState) -> bool:
    """Whether it makes so many answers, or such long ones, that how fast is worth learning."""
    return replica.open_requests > replica.easy[0] or replica.open_context_tokens > replica.easy[2]


def easy(replica: ReplicaState) -> bool:
    """Whether it has so little to do that there is room for sure."""
    requests, prompts, context = replica.easy
    if replica.open_requests > requests or replica.open_prefill_tokens > prompts:
        return False
    return replica.open_context_tokens <= context


LONG: Final = 2.0
SOON: Final = 0.45
"""Of the TTFT objective: prompts of other tenants that may lie before another on a replica that is set apart."""


class TenantPlacement:
    """Several tenants on one fleet. What it keeps, the Brain changes through it."""

    def __init__(self, capacity: ReplicaCapacity, policy: Policy, table: RoutingTable) -> None:
        self._room = capacity
        self._table = table
        self._share = policy.disturbance / (1.0 + policy.disturbance)
        """Of the replicas' time, for one tenant's long prompts beside others."""
        self.isolation = TenantIsolation(policy.disturbance if policy.set_apart else 0.0)
        self._token_s: dict[str, float] = {}
        self._next_s: dict[tuple[str, str], float] = {}
        """From when on a tenant may send a long prompt beside others, by model and tenant."""
        self.now_s = 0.0  # Written before a request is sent, once there are several tenants.
        self.crowded = False  # Whether another tenant waits for its turn beside the one that is asked for.

    def asks(self, at_s: float, request: RequestState) -> None:
        """Whose request it is; from the second tenant on, it is noted where each one's requests are."""
        model, tenant = request.request.model, request.request.tenant
        if self._room.tenant is None:
            self._room.tenant = tenant
        elif tenant != self._room.tenant:
            self._room.several = True
        slo = self._room.slo(model)
        if not self._room.several or slo is None:
            return
        token_s = self._token_s.get(model, 0.0)
        if not token_s:
            known = [replica.facts for replica in self._table.ready(model) if replica.facts is not None]
            token_s = self._token_s[model] = known[0].prefill_s_per_token if known else 0.0
        prompt_s = request.prompt_tokens * token_s
        self.isolation.asks(at_s, request, prompt_s if prompt_s > LONG * slo.tpot_s else 0.0)

    def sent(self, request: RequestState) -> None:
        if request.last is None:
            return
        earlier = [replica for replica, _ in request.earlier if replica is not request.last]
        request.mixed = (*dict.fromkeys(earlier), request.last)
        tenant = request.request.tenant
        first_replica = request.mixed[0]
        request.long = self._is_long(request, first_replica)
        if request.long and first_replica.open_requests > 1:
            self._charge(request, first_replica)
        request.rho = self._room.rho(request.request.model, tenant)
        for replica in request.mixed:
            mix = self._room.mixes.setdefault(replica, TenantMix())
            mix.requests[tenant] = mix.requests.get(tenant, 0) + 1
            mix.count += 1
            mix.rho += request.rho
        mix = self._room.mixes[first_replica]
        if request.long:
            mix.long[tenant] = mix.long.get(tenant, 0) + 1
        self.isolation.sent(request, request.last is not first_replica)
        if not request.heavy:
            self._room.mixes[request.last].answers += 1
            request.light_tokens = request.prompt_tokens
            mix.light_tokens += request.light_tokens

    def computed(self, request: RequestState) -> None:
        if request.light_tokens and request.mixed:
            self._room.mixes[request.mixed[0]].light_tokens -= request.light_tokens
            request.light_tokens = 0
        if request.long and request.mixed:
            request.long = False
            _less(self._room.mixes[request.mixed[0]].long, request.request.tenant)

    def left(self, request: RequestState) -> None:
        self.computed(request)
        if request.mixed and not request.heavy:
            self._room.mixes[request.mixed[-1]].answers -= 1
        for replica in request.mixed:
            mix = self._room.mixes[replica]
            _less(mix.requests, request.request.tenant)
            mix.count -= 1
            mix.rho -= request.rho
            if not mix.requests and not mix.long:
                del self._room.mixes[replica]
        request.mixed = ()

    # Where to.

    def other(self, balancer: Balancer, picked_target: Target, request: RequestState) -> Target | None:
        """Instead of the one whose turn it is: where there is room and others are disturbed least."""
        model, tenant = request.request.model, request.request.tenant
        roomy = [
            fleet_target for fleet_target in balancer.members() if self._room.fits(fleet_target, request)
        ]
        apart = self.isolation.views(model)
        if (
            self._is_long(request, picked_target.views()[0])
            and not self.crowded
            and (request.heavy or not apart)
        ):
            if request.heavy:
                views = [fleet_target.view for fleet_target in balancer.members()]
                self.isolation.may_go(
                    model, [replica for replica in views if replica is not None and replica.serves]
                )
            idle = [target for target in roomy if not _open(target)]
            if idle:
                return picked_target if picked_target in idle else idle[0]
            if apart:
                roomy = [target for target in roomy if target.view in apart]
                free = [target for target in roomy if not self._answers(target)]
                if free:
                    return min(free, key=_open)
            if not roomy or self.now_s < self._next_s.get((model, tenant), 0.0) or not self._share:
                return None
            return min(roomy, key=lambda t: sum(self._beside(replica, tenant) for replica in t.views()))
        if not roomy:
            return None
        calm = [t for t in roomy if t.view not in apart and not self._disturbed(t, tenant)] or roomy
        return picked_target if picked_target in calm else min(calm, key=_open)

    def via(self, balancer: Balancer, request: RequestState) -> tuple[Target, Target] | None:
        """Where it is prefilled and where answered, if on a replica set apart for heavy tenants and on another."""
        apart, slo = self.isolation.views(request.request.model), self._room.slo(request.request.model)
        if not apart or slo is None or request.heavy:
            return None
        if not self.isolation.goes_away(request, self._is_long(request, apart[0])):
            return None
        members = balancer.members()
        firsts = [target for target in members if target.view in apart and self._begins(target.view, slo)]
        if not firsts:
            return None
        first_target = min(firsts, key=lambda t: sum(replica.open_prefill_tokens for replica in t.views()))
        assert first_target.view is not None
        region = first_target.view.member.region
        near = [t for t in members if t.view is not None and t.view.member.region == region]
        seconds = [t for t in near if t.view not in apart and self._room.fits(t, request, DECODE)]
        if not seconds:
            return None
        if request.position is None:
            self._room.seen(request)
        return first_target, min(seconds, key=lambda t: (t.load * t.pace, _open(t)))

    def _begins(self, replica: ReplicaState | None, slo: Slo) -> bool:
        """Whether a replica that is set apart computes a prompt soon; its tenant has half of it at least."""
        if replica is None or replica.facts is None:
            return False
        mix = self._room.mixes.get(replica)
        ahead = 2 * (mix.light_tokens if mix is not None else 0)
        return replica.pace * replica.facts.prefill_s_per_token * ahead <= SOON * slo.ttft_s

    def _answers(self, target: Target) -> int:
        mixes = [self._room.mixes.get(replica) for replica in target.views()]
        return sum(mix.answers for mix in mixes if mix is not None)

    def _beside(self, replica: ReplicaState, tenant: str) -> int:
        mix = self._room.mixes.get(replica)
        return replica.open_requests - (mix.requests.get(tenant, 0) if mix is not None else 0)

    def _disturbed(self, target: Target, tenant: str) -> bool:
        mixes = [self._room.mixes.get(replica) for replica in target.views()]
        return any(name != tenant for mix in mixes if mix is not None for name in mix.long)

    def _charge(self, request: RequestState, replica: ReplicaState) -> None:
        """A long prompt goes beside others: when its tenant may send the next."""
        if replica.facts is None or not self._share:
            return
        key = request.request.model, request.request.tenant
        prompt_s = replica.facts.prefill_s_per_token * request.prompt_tokens
        idle = 0.0
        for other_replica in self._table.ready(key[0]):
            if self._beside(other_replica, key[1]) > (other_replica is replica):
                idle += self._idle(other_replica, request)
        if not idle:  # nobody else is there
            return
        time_s = prompt_s / (self._share * idle)
        self._next_s[key] = max(self.now_s, self._next_s.get(key, 0.0)) + time_s

    def _idle(self, replica: ReplicaState, request: RequestState) -> float:
        """First step / gap there."""
        if replica.facts is None or not replica.facts.decode_first_s > 0:
            return 0.5
        gap_s = replica.gap_pace * self._room.gap_s(
            replica, request, replica.facts, replica.open_requests, CLOSED
        )
        return min(1.0, replica.facts.decode_first_s / gap_s)

    def _is_long(self, request: RequestState, replica: ReplicaState) -> bool:
        slo, facts = self._room.slo(replica.member.model), replica.facts
        if slo is None or facts is None:
            return False
        return request.prompt_tokens * facts.prefill_s_per_token > LONG * slo.tpot_s


def _less(counts: dict[str, int], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def _open(target: Target) -> int:
    return sum(replica.open_requests for replica in target.views())
