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

Between tenants a long prompt (LONG times the TPOT objective) is a nuisance: every answer beside it waits for each of
its chunks, or for a place elsewhere. It goes to a replica with nothing to do. While other tenants are there, one's
long prompts may else take no more of the replicas' time than makes those others' tokens `disturbance` slower on
average, where fewest of them are; and when other tenants wait too, they go wherever there is room, as shares are what
counts then. Others keep away from replicas with such a prompt while they find room elsewhere. With gap = first step /
(1 - load) a share u of the time makes tokens u / (1 - load) slower, so u = disturbance / (1 + disturbance) x first
step / gap.
"""

from __future__ import annotations

from collections.abc import Mapping

from potluck.core.brain.facts import BLOCK_TOKENS, Facts, ReplicaFacts
from potluck.core.brain.fleet import Fleet, View
from potluck.core.brain.flight import Flight
from potluck.core.brain.policy import Policy
from potluck.core.routing.balance import Chooser
from potluck.core.routing.opportunistic import step_seconds
from potluck.core.routing.split import MOST_IN_LOW
from potluck.core.routing.table import Table
from potluck.core.routing.targets import COMBO, PLAIN, Target
from potluck.core.values.service import RequestClass
from potluck.core.values.types import Slo

AHEAD, AHEAD_APART = 0.25, 0.45
MARGIN = 0.9
EASY = 0.25
"""Below this share of the objective's TPOT, and of what may lie ahead, nothing more is asked."""
LONG = 2.0
FADE = 1.0 / 1024
"""How much one request counts in rho, once many were seen."""
CLOSED, PREFILL, DECODE, SPLIT = 0, 1, 2, 3
"""What is asked of a replica: the whole request, its prompt alone, its answer alone, part of its prompt too."""
PROMPTS = {CLOSED: 1.0, DECODE: 0.0, SPLIT: 0.5}
"""How much of the prompts is computed where the answers are made."""
LEAST_TOKENS = 16
"""Shorter answers say little of how long a token takes."""
UNBOUNDED = 1 << 60


class Mix:
    """Whose requests a replica has, once there are several tenants."""

    __slots__ = ("count", "long", "requests", "rho")

    def __init__(self) -> None:
        self.count = 0
        self.rho = 0.0
        """The sum of theirs, each as it was when it was sent."""
        self.requests: dict[str, int] = {}
        self.long: dict[str, int] = {}
        """Long prompts that are not computed."""


class Habit:
    """What a tenant's requests to a model were like lately."""

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


class Room:
    """Answers whether there is room. What it keeps, the Brain changes through it."""

    def __init__(self, facts: Facts, policy: Policy, fleet: Fleet, table: Table) -> None:
        self._facts = facts
        self._fleet = fleet
        self._table = table
        self._classes: Mapping[str, RequestClass] = {each.name: each for each in policy.classes}
        self._overflow = policy.split_overflow
        self._habits: dict[tuple[str, str], Habit] = {}
        self._mixes: dict[View, Mix] = {}
        self._share = policy.disturbance / (1.0 + policy.disturbance)
        """Of the replicas' time, for one tenant's long prompts beside others."""
        self._next_s: dict[tuple[str, str], float] = {}
        """From when on a tenant may send a long prompt beside others, by model and tenant."""
        self.now_s = 0.0
        """Written before a request is sent, once there are several tenants."""
        self.several = False
        """Whether there was ever more than one tenant."""
        self.crowded = False
        """Whether another tenant waits for its turn beside the one that is asked for."""
        self.tenant: str | None = None
        """The first one that was seen."""

    def slo(self, model: str) -> Slo | None:
        known = self._facts.models.get(model)
        return known.slo if known is not None else None

    def easiness(self, view: View) -> tuple[int, int, int]:
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

    def seen(self, flight: Flight) -> None:
        """A request came when things were not easy."""
        request = flight.request
        key = request.model, request.tenant
        habit = self._habits.get(key)
        if habit is None:
            habit = self._habits[key] = Habit()
        habit.add(request.prompt_tokens, request.max_output_tokens)

    def asks(self, flight: Flight) -> None:
        """Whose request it is; from the second tenant on, it is noted where each one's requests are."""
        tenant = flight.request.tenant
        if self.tenant is None:
            self.tenant = tenant
        elif tenant != self.tenant:
            self.several = True

    def sent(self, flight: Flight) -> None:
        """Note where it is."""
        if flight.last is None:
            return
        flight.mixed = tuple(dict.fromkeys([*(view for view, _ in flight.earlier), flight.last]))
        tenant = flight.request.tenant
        first = flight.mixed[0]
        flight.long = self._is_long(flight, first)
        if flight.long and first.open_requests > 1:
            self._charge(flight, first)
        flight.rho = self._rho(flight.request.model, tenant)
        for view in flight.mixed:
            mix = self._mixes.setdefault(view, Mix())
            mix.requests[tenant] = mix.requests.get(tenant, 0) + 1
            mix.count += 1
            mix.rho += flight.rho
        if flight.long:
            long = self._mixes[first].long
            long[tenant] = long.get(tenant, 0) + 1

    def computed(self, flight: Flight) -> None:
        """Its prompt is computed."""
        if flight.long and flight.mixed:
            flight.long = False
            _less(self._mixes[flight.mixed[0]].long, flight.request.tenant)

    def left(self, flight: Flight) -> None:
        """It is nowhere any more."""
        self.computed(flight)
        for view in flight.mixed:
            mix = self._mixes[view]
            _less(mix.requests, flight.request.tenant)
            mix.count -= 1
            mix.rho -= flight.rho
            if not mix.requests and not mix.long:
                del self._mixes[view]
        flight.mixed = ()

    def _charge(self, flight: Flight, view: View) -> None:
        """A long prompt goes beside others: when its tenant may send the next."""
        if view.facts is None or not self._share:
            return
        key = flight.request.model, flight.request.tenant
        prompt_s = view.facts.prefill_s_per_token * flight.prompt_tokens
        ready = self._table.ready(key[0])
        idle = 0.0
        for each in ready:
            if self._beside(each, key[1]) > (each is view):
                idle += self._idle(each, flight)
        if not idle:  # nobody else is there
            return
        time_s = prompt_s / (self._share * idle)
        self._next_s[key] = max(self.now_s, self._next_s.get(key, 0.0)) + time_s

    def _idle(self, view: View, flight: Flight) -> float:
        """First step / gap there."""
        if view.facts is None or not view.facts.decode_first_s > 0:
            return 0.5
        gap_s = view.gap_pace * self._gap_s(view, flight, view.facts, view.open_requests, CLOSED)
        return min(1.0, view.facts.decode_first_s / gap_s)

    def _is_long(self, flight: Flight, view: View) -> bool:
        slo, facts = self.slo(view.member.model), view.facts
        if slo is None or facts is None:
            return False
        return flight.prompt_tokens * facts.prefill_s_per_token > LONG * slo.tpot_s

    def ended(self, at_s: float, flight: Flight, view: View, output_tokens: int) -> None:
        """An answer is complete, where there was much to do: how long did its tokens take?"""
        tokens = output_tokens - flight.streamed_tokens
        if tokens < LEAST_TOKENS or view.facts is None:
            return
        phase = CLOSED
        if flight.earlier and flight.route is not None:
            phase = DECODE if flight.route.segments[-1].start >= flight.prompt_tokens else SPLIT
        reckoned_s = self._gap_s(view, flight, view.facts, view.open_requests, phase)
        if reckoned_s > 0:
            self._fleet.gap(view, (at_s - flight.first_s) / (tokens - 1) / reckoned_s)

    # Whether it fits.

    def fill(self, flight: Flight) -> float:
        known = self._classes.get(flight.request.request_class)
        return known.fill if known is not None else 1.0

    def fits(self, target: Target, flight: Flight, phase: int = CLOSED) -> bool:
        """Whether a target has room for a request."""
        slo = self.slo(flight.request.model)
        if slo is None:
            return True
        fill = self.fill(flight)
        if target.kind == PLAIN:
            assert target.view is not None
            return self._view(target.view, flight, slo, fill, phase)
        if not target.usable:
            return True
        answers = any(
            self._view(view, flight, slo, fill, DECODE if target.kind == COMBO else SPLIT)
            for view in target.decodes
        )
        if not answers:
            return False
        if target.kind == COMBO or not self._facts.splits.get(target.prefills[0].member.template):
            return any(self._view(view, flight, slo, fill, PREFILL) for view in target.prefills)
        places = MOST_IN_LOW * len(target.prefills)
        if target.in_low < places:
            return True
        high = min(target.decodes, key=lambda view: view.open_prefill_tokens)
        return (
            self._overflow and len(target.waiting) < places and self._view(high, flight, slo, fill, PREFILL)
        )

    def other(self, chooser: Chooser, picked: Target, flight: Flight, phase: int) -> Target | None:
        """Instead of the one whose turn it is, where that is full or another disturbs less; None: nobody has room."""
        if self.several and phase == CLOSED:
            return self._apart(chooser, picked, flight)
        if self.fits(picked, flight, phase):
            return picked
        return next((each for each in chooser.members() if self.fits(each, flight, phase)), None)

    def _apart(self, chooser: Chooser, picked: Target, flight: Flight) -> Target | None:
        """The same between tenants."""
        model, tenant = flight.request.model, flight.request.tenant
        roomy = [each for each in chooser.members() if self.fits(each, flight)]
        if not roomy:
            return None
        if self._is_long(flight, _views(picked)[0]) and not self.crowded:
            idle = [each for each in roomy if not _open(each)]
            if idle:
                return picked if picked in idle else idle[0]
            if self.now_s < self._next_s.get((model, tenant), 0.0) or not self._share:
                return None
            return min(roomy, key=lambda each: self._foreign(each, tenant))
        calm = [each for each in roomy if not self._disturbed(each, tenant)] or roomy
        return picked if picked in calm else min(calm, key=_open)

    def _foreign(self, target: Target, tenant: str) -> int:
        """Requests of others there."""
        return sum(self._beside(view, tenant) for view in _views(target))

    def _beside(self, view: View, tenant: str) -> int:
        mix = self._mixes.get(view)
        return view.open_requests - (mix.requests.get(tenant, 0) if mix is not None else 0)

    def _disturbed(self, target: Target, tenant: str) -> bool:
        """Whether another tenant has a long prompt there."""
        for view in _views(target):
            mix = self._mixes.get(view)
            if mix is not None and any(name != tenant for name in mix.long):
                return True
        return False

    def _view(self, view: View, flight: Flight, slo: Slo, fill: float, phase: int) -> bool:
        facts = view.facts
        if facts is None or not view.open_requests:
            return True
        if phase in (CLOSED, PREFILL):
            ahead_s = view.pace * facts.prefill_s_per_token * view.open_prefill_tokens
            if ahead_s > (AHEAD_APART if view.role == "prefill" else AHEAD) * slo.ttft_s * fill:
                return False
        if phase == PREFILL:
            return True
        room_tokens = facts.total_blocks * BLOCK_TOKENS * fill
        if view.open_context_tokens + flight.total_tokens > room_tokens:
            return False
        gap_s = view.gap_pace * self._gap_s(view, flight, facts, view.open_requests + 1, phase)
        return gap_s <= MARGIN * slo.tpot_s * fill

    def _gap_s(self, view: View, flight: Flight, facts: ReplicaFacts, n: int, phase: int) -> float:
        """gap(n), as reckoned."""
        gap_s, part = step_seconds(facts, n), PROMPTS[phase]
        return gap_s + part * self._prompts_s(view, flight, facts, n) if part else gap_s

    def _prompts_s(self, view: View, flight: Flight, facts: ReplicaFacts, n: int) -> float:
        """n rho, of the tenants whose requests are there."""
        model, tenant = flight.request.model, flight.request.tenant
        if not self.several:
            return n * self._rho(model, tenant) * facts.prefill_s_per_token
        mix, total, noted = self._mixes.get(view), self._rho(model, tenant), 1
        if mix is not None:
            total += mix.rho
            noted += mix.count
        if noted < n and self.tenant is not None:  # those from when there was one tenant
            total += (n - noted) * self._rho(model, self.tenant)
        return total * facts.prefill_s_per_token

    def _rho(self, model: str, tenant: str) -> float:
        """Prompt tokens for each output token."""
        habit = self._habits.get((model, tenant))
        return habit.prompt_tokens / habit.answer_tokens if habit is not None else 0.0


def easy(view: View) -> bool:
    """Whether it has so little to do that there is room for sure."""
    bounds = view.easy
    return (
        view.open_requests <= bounds[0]
        and view.open_prefill_tokens <= bounds[1]
        and view.open_context_tokens <= bounds[2]
    )


def _less(counts: dict[str, int], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def _views(target: Target) -> list[View]:
    return [target.view] if target.view is not None else [*target.prefills, *target.decodes]


def _open(target: Target) -> int:
    return sum(view.open_requests for view in _views(target))
