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
from potluck.core.routing.split import MOST_IN_LOW
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
        request = req.request
        key = request.model, request.tenant
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = TenantHistory()
        history.add(request.prompt_tokens, request.max_output_tokens)

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

    def fits(self, target: Target, req: RequestState, phase: int = CLOSED) -> bool:
        slo = self.slo(req.request.model)
        if slo is None:
            return True
        known = self._classes.get(req.request.request_class)
        fill = known.fill if known is not None else 1.0
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
            return self.tenants.other(chooser, picked, req)
        if self.fits(picked, req, phase):
            return picked
        if self._full_version != self._fleet.version:
            self._full_version = self._fleet.version
            self._full.clear()
        key, rho = (
            (chooser, phase, req.request.request_class),
            self.rho(req.request.model, req.request.tenant),
        )
        since, tokens, before_rho = self._full.get(key, (-1, 0, 0.0))
        if req.heavy or req.total_tokens < tokens or rho < before_rho:
            since = -1
        for member in chooser.members():
            # Who had no room for less, and has not more since, has none now. Prompts owed fade with time alone.
            view = member.view
            same = view is not None and view.eased <= since and (phase != CLOSED or view.role != "decode")
            if not same and self.fits(member, req, phase):
                return member
        if not req.heavy:
            self._full[key] = (self._fleet.changes, req.total_tokens, rho)
        return None

    def _view(self, view: ReplicaState, req: RequestState, slo: Slo, fill: float, phase: int) -> bool:
        facts = view.facts
        if facts is None or not view.open_requests:
            return True
        if phase in (CLOSED, PREFILL):
            tokens = view.open_prefill_tokens - view.yielding_tokens
            ahead_s = view.pace * facts.prefill_s_per_token * tokens
            if req.heavy:
                ahead_s /= 1.0 - self.tenants.isolation.taken(req, view)
            if ahead_s > (AHEAD_APART if view.role == "prefill" else AHEAD) * slo.ttft_s * fill:
                return False
        if phase == CLOSED and view.role == "decode" and not self.bears(view, req, req.prompt_tokens):
            return False
        return phase == PREFILL or self.answers(view, req, slo, phase, fill)

    def bears(self, view: ReplicaState, req: RequestState, tokens: int) -> bool:
        """Whether a decoding replica's answers keep their pace: s(n) + prompt seconds / tokens of an answer."""
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
        self._owed[view] = (req.request.arrival_s, before_s + _alone_s(view, facts, req.last_tokens))

    def _owed_s(self, view: ReplicaState, req: RequestState, span_s: float) -> float:
        """What answers still wait for prompts there: fades from all of it to nothing within the time of an answer."""
        then_s, seconds = self._owed.get(view, (0.0, 0.0))
        return seconds * max(0.0, 1.0 - (req.request.arrival_s - then_s) / span_s)

    def _answer_tokens(self, req: RequestState) -> float:
        history = self._histories.get((req.request.model, req.request.tenant))
        return max(1.0, history.answer_tokens if history is not None else float(req.output_tokens))

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
        part = PROMPTS[phase]
        if req.heavy:  # a full KV takes as long to read as the planned batch does, however few share it
            filled = view.open_context_tokens / max(1, facts.total_blocks * BLOCK_TOKENS)
            gap_s = step_seconds(facts, max(n, int(filled * facts.decode_batch)))
            free = 1.0 - self.tenants.isolation.taken(req, view)
            return (gap_s + part * self._prompts_s(view, req, facts, n)) / free
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
        history = self._histories.get((model, tenant))
        return history.prompt_tokens / history.answer_tokens if history is not None else 0.0


def _alone_s(view: ReplicaState, facts: ReplicaFacts, tokens: int) -> float:
    return tokens * max(facts.prefill_s_per_token, facts.alone_s_per_token) * view.pace


def crowded(view: ReplicaState) -> bool:
    """Whether it makes so many answers, or such long ones, that how fast is worth learning."""
    return view.open_requests > view.easy[0] or view.open_context_tokens > view.easy[2]


def easy(view: ReplicaState) -> bool:
    """Whether it has so little to do that there is room for sure."""
    requests, prompts, context = view.easy
    if view.open_requests > requests or view.open_prefill_tokens > prompts:
        return False
    return view.open_context_tokens <= context


LONG: Final = 2.0
SOON: Final = 0.45
"""Of the TTFT objective: prompts of other tenants that may lie before another on a replica that is set apart."""


class TenantPlacement:
    """Several tenants on one fleet. What it keeps, the Brain changes through it."""

    def __init__(self, room: ReplicaCapacity, policy: Policy, table: RoutingTable) -> None:
        self._room = room
        self._table = table
        self._share = policy.disturbance / (1.0 + policy.disturbance)
        """Of the replicas' time, for one tenant's long prompts beside others."""
        self.isolation = TenantIsolation(policy.disturbance if policy.set_apart else 0.0)
        self._token_s: dict[str, float] = {}
        self._next_s: dict[tuple[str, str], float] = {}
        """From when on a tenant may send a long prompt beside others, by model and tenant."""
        self.now_s = 0.0  # Written before a request is sent, once there are several tenants.
        self.crowded = False  # Whether another tenant waits for its turn beside the one that is asked for.

    def asks(self, at_s: float, req: RequestState) -> None:
        """Whose request it is; from the second tenant on, it is noted where each one's requests are."""
        model, tenant = req.request.model, req.request.tenant
        if self._room.tenant is None:
            self._room.tenant = tenant
        elif tenant != self._room.tenant:
            self._room.several = True
        slo = self._room.slo(model)
        if not self._room.several or slo is None:
            return
        token_s = self._token_s.get(model, 0.0)
        if not token_s:
            known = [view.facts for view in self._table.ready(model) if view.facts is not None]
            token_s = self._token_s[model] = known[0].prefill_s_per_token if known else 0.0
        prompt_s = req.prompt_tokens * token_s
        self.isolation.asks(at_s, req, prompt_s if prompt_s > LONG * slo.tpot_s else 0.0)

    def sent(self, req: RequestState) -> None:
        if req.last is None:
            return
        earlier = [view for view, _ in req.earlier if view is not req.last]
        req.mixed = (*dict.fromkeys(earlier), req.last)
        tenant = req.request.tenant
        first = req.mixed[0]
        req.long = self._is_long(req, first)
        if req.long and first.open_requests > 1:
            self._charge(req, first)
        req.rho = self._room.rho(req.request.model, tenant)
        for view in req.mixed:
            mix = self._room.mixes.setdefault(view, TenantMix())
            mix.requests[tenant] = mix.requests.get(tenant, 0) + 1
            mix.count += 1
            mix.rho += req.rho
        mix = self._room.mixes[first]
        if req.long:
            mix.long[tenant] = mix.long.get(tenant, 0) + 1
        self.isolation.sent(req, req.last is not first)
        if not req.heavy:
            self._room.mixes[req.last].answers += 1
            req.light_tokens = req.prompt_tokens
            mix.light_tokens += req.light_tokens

    def computed(self, req: RequestState) -> None:
        if req.light_tokens and req.mixed:
            self._room.mixes[req.mixed[0]].light_tokens -= req.light_tokens
            req.light_tokens = 0
        if req.long and req.mixed:
            req.long = False
            _less(self._room.mixes[req.mixed[0]].long, req.request.tenant)

    def left(self, req: RequestState) -> None:
        self.computed(req)
        if req.mixed and not req.heavy:
            self._room.mixes[req.mixed[-1]].answers -= 1
        for view in req.mixed:
            mix = self._room.mixes[view]
            _less(mix.requests, req.request.tenant)
            mix.count -= 1
            mix.rho -= req.rho
            if not mix.requests and not mix.long:
                del self._room.mixes[view]
        req.mixed = ()

    # Where to.

    def other(self, chooser: Balancer, picked: Target, req: RequestState) -> Target | None:
        """Instead of the one whose turn it is: where there is room and others are disturbed least."""
        model, tenant = req.request.model, req.request.tenant
        roomy = [member for member in chooser.members() if self._room.fits(member, req)]
        apart = self.isolation.views(model)
        if self._is_long(req, picked.views()[0]) and not self.crowded and (req.heavy or not apart):
            if req.heavy:
                views = [member.view for member in chooser.members()]
                self.isolation.may_go(model, [view for view in views if view is not None and view.serves])
            idle = [target for target in roomy if not _open(target)]
            if idle:
                return picked if picked in idle else idle[0]
            if apart:
                roomy = [target for target in roomy if target.view in apart]
                free = [target for target in roomy if not self._answers(target)]
                if free:
                    return min(free, key=_open)
            if not roomy or self.now_s < self._next_s.get((model, tenant), 0.0) or not self._share:
                return None
            return min(roomy, key=lambda t: sum(self._beside(view, tenant) for view in t.views()))
        if not roomy:
            return None
        calm = [t for t in roomy if t.view not in apart and not self._disturbed(t, tenant)] or roomy
        return picked if picked in calm else min(calm, key=_open)

    def via(self, chooser: Balancer, req: RequestState) -> tuple[Target, Target] | None:
        """Where it is prefilled and where answered, if on a replica set apart for heavy tenants and on another."""
        apart, slo = self.isolation.views(req.request.model), self._room.slo(req.request.model)
        if not apart or slo is None or req.heavy:
            return None
        if not self.isolation.goes_away(req, self._is_long(req, apart[0])):
            return None
        members = chooser.members()
        firsts = [target for target in members if target.view in apart and self._begins(target.view, slo)]
        if not firsts:
            return None
        first = min(firsts, key=lambda t: sum(view.open_prefill_tokens for view in t.views()))
        assert first.view is not None
        region = first.view.member.region
        near = [t for t in members if t.view is not None and t.view.member.region == region]
        seconds = [t for t in near if t.view not in apart and self._room.fits(t, req, DECODE)]
        if not seconds:
            return None
        if req.place is None:
            self._room.seen(req)
        return first, min(seconds, key=lambda t: (t.load * t.pace, _open(t)))

    def _begins(self, view: ReplicaState | None, slo: Slo) -> bool:
        """Whether a replica that is set apart computes a prompt soon; its tenant has half of it at least."""
        if view is None or view.facts is None:
            return False
        mix = self._room.mixes.get(view)
        ahead = 2 * (mix.light_tokens if mix is not None else 0)
        return view.pace * view.facts.prefill_s_per_token * ahead <= SOON * slo.ttft_s

    def _answers(self, target: Target) -> int:
        mixes = [self._room.mixes.get(view) for view in target.views()]
        return sum(mix.answers for mix in mixes if mix is not None)

    def _beside(self, view: ReplicaState, tenant: str) -> int:
        mix = self._room.mixes.get(view)
        return view.open_requests - (mix.requests.get(tenant, 0) if mix is not None else 0)

    def _disturbed(self, target: Target, tenant: str) -> bool:
        mixes = [self._room.mixes.get(view) for view in target.views()]
        return any(name != tenant for mix in mixes if mix is not None for name in mix.long)

    def _charge(self, req: RequestState, view: ReplicaState) -> None:
        """A long prompt goes beside others: when its tenant may send the next."""
        if view.facts is None or not self._share:
            return
        key = req.request.model, req.request.tenant
        prompt_s = view.facts.prefill_s_per_token * req.prompt_tokens
        idle = 0.0
        for other in self._table.ready(key[0]):
            if self._beside(other, key[1]) > (other is view):
                idle += self._idle(other, req)
        if not idle:  # nobody else is there
            return
        time_s = prompt_s / (self._share * idle)
        self._next_s[key] = max(self.now_s, self._next_s.get(key, 0.0)) + time_s

    def _idle(self, view: ReplicaState, req: RequestState) -> float:
        """First step / gap there."""
        if view.facts is None or not view.facts.decode_first_s > 0:
            return 0.5
        gap_s = view.gap_pace * self._room.gap_s(view, req, view.facts, view.open_requests, CLOSED)
        return min(1.0, view.facts.decode_first_s / gap_s)

    def _is_long(self, req: RequestState, view: ReplicaState) -> bool:
        slo, facts = self._room.slo(view.member.model), view.facts
        if slo is None or facts is None:
            return False
        return req.prompt_tokens * facts.prefill_s_per_token > LONG * slo.tpot_s


def _less(counts: dict[str, int], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def _open(target: Target) -> int:
    return sum(view.open_requests for view in target.views())
