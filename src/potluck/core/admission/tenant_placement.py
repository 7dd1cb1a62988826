"""Between tenants: where each one's requests are, and where the next goes so that it disturbs the others little.

A long prompt (LONG times the TPOT objective) is a nuisance: every answer beside it waits for each of its chunks, or
for a place elsewhere. It goes to a replica with nothing to do. Tenants that send little else get replicas set apart
(`apart.py`) where what they ask for is more than fits beside the others. Otherwise, while other tenants are there,
one's long prompts may take no more of the replicas' time than makes those others' tokens `disturbance` slower on
average, where fewest of them are; and when other tenants wait too, they go wherever there is room, as shares are what
counts then. Others keep away from replicas with such a prompt while they find room elsewhere. With gap = first step /
(1 - load) a share u of the time makes tokens u / (1 - load) slower, so u = disturbance / (1 + disturbance) x first
step / gap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from potluck.core.admission.isolation import TenantIsolation
from potluck.core.admission.tenant_mix import CLOSED, DECODE, TenantMix
from potluck.core.routing.balance import Balancer
from potluck.core.routing.routing_table import RoutingTable
from potluck.core.routing.targets import Target
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import RequestState
from potluck.core.values.types import Slo

if TYPE_CHECKING:
    from potluck.core.admission.capacity import ReplicaCapacity

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
        self.apart = TenantIsolation(policy.disturbance if policy.set_apart else 0.0)
        self._token_s: dict[str, float] = {}
        """Seconds that a token of a prompt takes, by model."""
        self._next_s: dict[tuple[str, str], float] = {}
        """From when on a tenant may send a long prompt beside others, by model and tenant."""
        self.now_s = 0.0
        """Written before a request is sent, once there are several tenants."""
        self.crowded = False
        """Whether another tenant waits for its turn beside the one that is asked for."""

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
            found = next((view.facts for view in self._table.ready(model) if view.facts is not None), None)
            token_s = self._token_s[model] = found.prefill_s_per_token if found is not None else 0.0
        prompt_s = req.prompt_tokens * token_s
        self.apart.asks(at_s, req, prompt_s if prompt_s > LONG * slo.tpot_s else 0.0)

    def sent(self, req: RequestState) -> None:
        """Note where it is."""
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
        self.apart.sent(req, req.last is not first)
        if not req.heavy:
            self._room.mixes[req.last].answers += 1
            req.light_tokens = req.prompt_tokens
            mix.light_tokens += req.light_tokens

    def computed(self, req: RequestState) -> None:
        """Its prompt is computed."""
        if req.light_tokens and req.mixed:
            self._room.mixes[req.mixed[0]].light_tokens -= req.light_tokens
            req.light_tokens = 0
        if req.long and req.mixed:
            req.long = False
            _less(self._room.mixes[req.mixed[0]].long, req.request.tenant)

    def left(self, req: RequestState) -> None:
        """It is nowhere any more."""
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
        roomy = [each for each in chooser.members() if self._room.fits(each, req)]
        apart = self.apart.views(model)
        if self._is_long(req, _views(picked)[0]) and not self.crowded and (req.heavy or not apart):
            if req.heavy:
                self.apart.may_go(
                    model,
                    [each.view for each in chooser.members() if each.view is not None and each.view.serves],
                )
            idle = [each for each in roomy if not _open(each)]
            if idle:
                return picked if picked in idle else idle[0]
            if apart:
                roomy = [each for each in roomy if each.view in apart]
                free = [each for each in roomy if not self._answers(each)]
                if free:
                    return min(free, key=_open)
            if not roomy or self.now_s < self._next_s.get((model, tenant), 0.0) or not self._share:
                return None
            return min(roomy, key=lambda each: self._foreign(each, tenant))
        if not roomy:
            return None
        calm = [
            each for each in roomy if each.view not in apart and not self._disturbed(each, tenant)
        ] or roomy
        return picked if picked in calm else min(calm, key=_open)

    def via(self, chooser: Balancer, req: RequestState) -> tuple[Target, Target] | None:
        """Where its prompt is computed and where it is answered, if that is not to be in one place: on a replica that
        is set apart for heavy tenants, and on one that is not."""
        apart, slo = self.apart.views(req.request.model), self._room.slo(req.request.model)
        if not apart or slo is None or req.heavy:
            return None
        if not self.apart.goes_away(req, self._is_long(req, apart[0])):
            return None
        members = chooser.members()
        firsts = [each for each in members if each.view in apart and self._begins(each.view, slo)]
        if not firsts:
            return None
        first = min(firsts, key=_open_prefill)
        assert first.view is not None
        region = first.view.member.region
        seconds = [
            each
            for each in members
            if each.view is not None
            and each.view not in apart
            and each.view.member.region == region
            and self._room.fits(each, req, DECODE)
        ]
        if not seconds:
            return None
        if req.place is None:
            self._room.seen(req)
        return first, min(seconds, key=_load)

    def _begins(self, view: ReplicaState | None, slo: Slo) -> bool:
        """Whether a replica that is set apart computes a prompt soon; its tenant has half of it at least."""
        if view is None or view.facts is None:
            return False
        mix = self._room.mixes.get(view)
        ahead = 2 * (mix.light_tokens if mix is not None else 0)
        return view.pace * view.facts.prefill_s_per_token * ahead <= SOON * slo.ttft_s

    def _answers(self, target: Target) -> int:
        """Answers there of tenants that are not heavy."""
        mixes = [self._room.mixes.get(view) for view in _views(target)]
        return sum(mix.answers for mix in mixes if mix is not None)

    def _foreign(self, target: Target, tenant: str) -> int:
        """Requests of others there."""
        return sum(self._beside(view, tenant) for view in _views(target))

    def _beside(self, view: ReplicaState, tenant: str) -> int:
        mix = self._room.mixes.get(view)
        return view.open_requests - (mix.requests.get(tenant, 0) if mix is not None else 0)

    def _disturbed(self, target: Target, tenant: str) -> bool:
        """Whether another tenant has a long prompt there."""
        for view in _views(target):
            mix = self._room.mixes.get(view)
            if mix is not None and any(name != tenant for name in mix.long):
                return True
        return False

    def _charge(self, req: RequestState, view: ReplicaState) -> None:
        """A long prompt goes beside others: when its tenant may send the next."""
        if view.facts is None or not self._share:
            return
        key = req.request.model, req.request.tenant
        prompt_s = view.facts.prefill_s_per_token * req.prompt_tokens
        ready = self._table.ready(key[0])
        idle = 0.0
        for each in ready:
            if self._beside(each, key[1]) > (each is view):
                idle += self._idle(each, req)
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


def _views(target: Target) -> list[ReplicaState]:
    return [target.view] if target.view is not None else [*target.prefills, *target.decodes]


def _open(target: Target) -> int:
    return sum(view.open_requests for view in _views(target))


def _open_prefill(target: Target) -> int:
    return sum(view.open_prefill_tokens for view in _views(target))


def _load(target: Target) -> tuple[float, int]:
    return target.load * target.pace, _open(target)
