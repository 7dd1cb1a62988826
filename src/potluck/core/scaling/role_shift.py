"""THUNDERSERVE's light rescheduling (its 3.4): when the workload shifts, change roles and load no weights.

A shift is a mean prompt, a mean answer or a rate that leaves the band around the reference and its own noise, or a
change in how many replicas there are. Then, for the lengths now seen, the replica whose flip raises

    served = min(sum of prefill rates, sum of decode rates)

most is flipped, at most MAX_FLIPS a window and while each gains LEAST_GAIN: the paper's tabu search with the flip as
its only move. The last replica of a role in a region stays; flips back within BACK_S must gain BACK_GAIN.

Roles inside groups are found by the paper's search, each choice worth what its best routing serves
(`core/routing/group_sharing.py`); only choices whose bound min(prefill, decode) + mixed beats the best are routed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import hypot, inf

from potluck.core.figures import moved
from potluck.core.routing.group_sharing import GroupRates, MeanLengths, best_routing
from potluck.core.scaling.roles import Flippable, codec_of, flippable, last_of_role
from potluck.core.scaling.rule import Decisions, FlipRole, ScaleDecision, Scaler, SetLengths
from potluck.core.scaling.traffic_window import ModelTraffic, ObservedTraffic
from potluck.core.state.facts import FleetFacts
from potluck.core.state.fleet import FleetState, TemplateCopy
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import Role

MAX_FLIPS = 4
LEAST_GAIN = 0.1  # Relative rise of what is served that is worth a flip.
ON = 0.25
"""Share of a window after which further flips the same way may follow others: a workload that shifts goes on."""
BACK_GAIN = 0.3
BACK_S = 3600.0
NOISE = 3.0
LEAST_SEEN = 20  # Requests that must have ended before a mean answer means something.


@dataclass(frozen=True, slots=True)
class RoleReference:
    """The workload that the present roles were chosen for."""

    rate_per_s: float
    prompt_tokens: float
    output_tokens: float
    prompt_error_tokens: float
    output_error_tokens: float
    replicas: int


class ShiftFlips(Scaler):
    """State: per model, the reference workload and when roles were last looked at."""

    def __init__(self, policy: Policy, facts: FleetFacts) -> None:
        super().__init__()
        self._policy, self._facts = policy, facts
        self._plan: Plan | None = None
        self._since_s = 0.0
        self._references: dict[str, RoleReference] = {}
        self._last_s: dict[str, float] = {}
        self._towards: dict[str, Role] = {}

    def on_tick(self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan) -> Decisions:
        if plan is not self._plan:
            self._plan, self._since_s = plan, at_s
            self._references.clear()
            self._last_s.clear()
            self._towards.clear()
        decisions: list[ScaleDecision] = []
        for model in sorted({template.model for template in plan.templates}):
            traffic = observed.of(model)
            if (
                traffic is None
                or traffic.finished < LEAST_SEEN
                or at_s - self._since_s < self._policy.window_s
            ):
                self._notes.say(model, "has not seen a window of requests yet")
                continue
            last_s = self._last_s.get(model)
            since_s = inf if last_s is None else at_s - last_s
            if since_s < ON * self._policy.window_s:
                self._notes.wait(model, "waits after the last flips")
                continue
            decisions += self._model(at_s, traffic, fleet, on=since_s < self._policy.window_s)
        return tuple(decisions)

    def _model(self, at_s: float, traffic: ModelTraffic, fleet: FleetState, on: bool) -> list[ScaleDecision]:
        """With `on`, less than a window after other flips: only more of those."""
        model = traffic.model
        mine = [u for u in fleet.units.values() if u.model == model]
        groups = [u for u in mine if u.template in self._facts.groups]
        if groups and on:
            self._notes.wait(model, "waits a window after the last flips")
            return []
        if groups:
            return self._groups(at_s, traffic, groups)
        lengths = MeanLengths(traffic.mean_prompt_tokens, traffic.mean_output_tokens)
        replicas, untimed = flippable(fleet, self._facts, model, lengths)
        codec = codec_of(self._plan, model)
        if untimed:
            self._notes.say(model, f"no flips: no times are known of {', '.join(untimed)} in both roles")
            return []
        if not replicas:
            self._notes.say(model, "no flips: no replica prefills or decodes alone")
            return []
        new_reference = _reference(traffic, len(replicas))
        # While a workload shifts, the window still has much of the old one; what came last is what there will be.
        new_reference = replace(
            new_reference,
            prompt_tokens=_latest(
                new_reference.prompt_tokens, traffic.recent_prompt_tokens, new_reference.prompt_error_tokens
            ),
            output_tokens=_latest(
                new_reference.output_tokens, traffic.recent_output_tokens, new_reference.output_error_tokens
            ),
        )
        shift = self._shift(self._references.get(model), new_reference, traffic)
        if not shift:
            self._references.setdefault(model, new_reference)
            return self._stays(model)
        lengths = MeanLengths(new_reference.prompt_tokens, new_reference.output_tokens)
        replicas, _ = flippable(fleet, self._facts, model, lengths, codec)
        towards = self._towards.get(model)
        back: Role | None = None
        if towards is not None and at_s - self._last_s[model] < BACK_S:
            back = "decode" if towards == "prefill" else "prefill"
        flips = best_flips(replicas, back=back)
        if on and flips and flips[-1][1] != towards:
            self._notes.say(model, f"{shift}; waits a window before flips the other way")
            return []
        self._references[model] = new_reference
        if not flips:
            self._notes.say(model, f"{shift}, but no flip gains {LEAST_GAIN:.0%}")
            return []
        self._last_s[model], self._towards[model] = at_s, flips[-1][1]
        self._notes.say(model, f"{shift}; flips {', '.join(name for name, _ in flips)}")
        return [FlipRole(name, role, shift) for name, role in flips]

    def _stays(self, model: str) -> list[ScaleDecision]:
        self._notes.say(model, f"the workload stays within {self._policy.ratio:.0%} of what roles are for")
        return []

    def _groups(self, at_s: float, traffic: ModelTraffic, groups: list[TemplateCopy]) -> list[ScaleDecision]:
        model, lengths = traffic.model, MeanLengths(traffic.mean_prompt_tokens, traffic.mean_output_tokens)
        ready = {
            template_copy.id: [replica for replica in template_copy.views if replica.state == "ready"]
            for template_copy in groups
        }
        new_reference = _reference(traffic, sum(map(len, ready.values())))
        old_reference = self._references.get(model)
        shift = self._shift(old_reference, new_reference, traffic)
        if not shift:
            return self._stays(model)
        self._references[model] = new_reference
        decisions: list[ScaleDecision] = []
        if old_reference is not None or self._moved(groups, lengths):
            decisions.append(SetLengths(model, *lengths))
        for template_copy in groups:
            roles = {replica.member.index: replica.role for replica in ready[template_copy.id]}
            if not roles:
                continue
            best, serves, served = best_roles(self._facts, template_copy.template, roles, lengths, LEAST_GAIN)
            decisions += [
                FlipRole(
                    replica.member.id, best[replica.member.index], f"{shift}: {served:.3g} to {serves:.3g}/s"
                )
                for replica in ready[template_copy.id]
                if best[replica.member.index] != replica.role
            ]
        flips = [decision for decision in decisions if isinstance(decision, FlipRole)]
        if flips:
            self._last_s[model] = at_s
        text = f"flips {', '.join(flip.replica for flip in flips)}" if flips else "roles stay"
        self._notes.say(model, f"{shift}; {text}")
        return decisions

    def _moved(self, groups: list[TemplateCopy], lengths: MeanLengths) -> bool:
        group = self._facts.groups[groups[0].template]
        pairs = zip(lengths, (group.prompt_tokens, group.output_tokens), strict=True)
        return any(abs(now - planned) > self._policy.ratio * planned for now, planned in pairs)

    def _shift(
        self, old_reference: RoleReference | None, new_reference: RoleReference, traffic: ModelTraffic
    ) -> str:
        """What left the band, in words; empty when nothing did."""
        if old_reference is None:
            return "first look"
        band = self._policy.ratio
        noise = NOISE * hypot(old_reference.prompt_error_tokens, new_reference.prompt_error_tokens)
        if abs(new_reference.prompt_tokens - old_reference.prompt_tokens) > max(
            band * old_reference.prompt_tokens, noise
        ):
            return f"prompts {moved(old_reference.prompt_tokens, new_reference.prompt_tokens)} tokens"
        noise = NOISE * hypot(old_reference.output_error_tokens, new_reference.output_error_tokens)
        if abs(new_reference.output_tokens - old_reference.output_tokens) > max(
            band * old_reference.output_tokens, noise
        ):
            return f"answers {moved(old_reference.output_tokens, new_reference.output_tokens)} tokens"
        if abs(new_reference.rate_per_s - old_reference.rate_per_s) > max(
            band * old_reference.rate_per_s, NOISE * traffic.error_per_s
        ):
            return f"requests {moved(old_reference.rate_per_s, new_reference.rate_per_s, '.2g')} a second"
        if new_reference.replicas != old_reference.replicas:
            return f"{new_reference.replicas} replicas instead of {old_reference.replicas}"
        return ""


def _reference(traffic: ModelTraffic, replicas: int) -> RoleReference:
    means = traffic.mean_prompt_tokens, traffic.mean_output_tokens
    errors = traffic.prompt_error_tokens, traffic.output_error_tokens
    return RoleReference(traffic.rate_per_s, *means, *errors, replicas)


def _latest(mean: float, recent: float, error: float) -> float:
    """The mean of the last quarter, where it is off by more than its noise, twice that of the whole."""
    return recent if recent and abs(recent - mean) > NOISE * 2.0 * error else mean


def best_flips(
    replicas: list[Flippable], most: int = MAX_FLIPS, gain: float = LEAST_GAIN, back: Role | None = None
) -> list[tuple[str, Role]]:
    """Flips that raise min(P, D), the best first; ties go to the least loaded. To begin with `back` takes more."""
    left = list(replicas)
    flips: list[tuple[str, Role]] = []
    while len(flips) < most:
        prefill = sum(entry.prefill_per_s for entry in left if entry.role == "prefill")
        decode = sum(entry.decode_per_s for entry in left if entry.role == "decode")
        stay = last_of_role(left) | {name for name, _ in flips}
        now = min(prefill, decode)
        best, best_rank = None, (0.0, -(10**9))
        for place, item in enumerate(left):
            if item.replica in stay:
                continue
            sign = -1 if item.role == "prefill" else 1
            served = min(prefill + sign * item.prefill_per_s, decode - sign * item.decode_per_s)
            needed = max(gain, BACK_GAIN) if back is not None and back != item.role and not flips else gain
            if served >= (1 + needed) * now and (served, -item.load) > best_rank:
                best, best_rank = place, (served, -item.load)
        if best is None:
            break
        role: Role = "decode" if left[best].role == "prefill" else "prefill"
        flips.append((left[best].replica, role))
        left[best] = replace(left[best], role=role)
    return flips


ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")
MOST_CHOICES = 6561  # Three roles for eight replicas.
STEPS, IDLE_STEPS, TABU = 60, 12, 6
ALIKE = 0.03
"""Choices that serve so much less than the best count as good: rates are no better known, and flips disturb."""

Roles = dict[int, Role]


class _Choices:
    """What choices of roles are worth, each routed once at most."""

    def __init__(self, facts: FleetFacts, template: str, places: Sequence[int], lengths: MeanLengths) -> None:
        self._facts = facts
        self._template = template
        self._lengths = lengths
        self._pace = GroupRates(facts, template, lengths)
        self._rates: dict[int, dict[Role, float]] = {
            place: {role: getattr(self._pace, role)(place) for role in ROLES} for place in places
        }
        self.known: dict[tuple[Role, ...], float] = {}

    def bound(self, roles: Mapping[int, Role]) -> float:
        sums = dict.fromkeys(ROLES, 0.0)
        for place, role in roles.items():
            sums[role] += self._rates[place][role]
        return min(sums["prefill"], sums["decode"]) + sums["mixed"]

    def served(self, roles: Mapping[int, Role]) -> float:
        key = tuple(roles.values())
        total = self.known.get(key)
        if total is None:
            routed = best_routing(self._facts, self._template, roles, self._lengths, self._pace)
            total = self.known[key] = sum(rate for *_, rate in routed)
        return total


def best_roles(
    facts: FleetFacts, template: str, now: Mapping[int, Role], lengths: MeanLengths, gain: float
) -> tuple[Roles, float, float]:
    """(roles, what they serve, what the present ones do): of those ALIKE the fewest flips; a `gain` is needed."""
    choices = _Choices(facts, template, list(now), lengths)
    before = choices.served(now)
    few = len(ROLES) ** len(now) <= MOST_CHOICES
    best, most = _all(choices, now, before) if few else _tabu(choices, now, before)
    if most < before * (1.0 + gain) or most <= before:
        return dict(now), before, before
    near = _fewest(choices, now, best, max(before * (1.0 + gain), (1.0 - ALIKE) * most))
    return near, choices.served(near), before


def _all(choices: _Choices, now: Mapping[int, Role], before: float) -> tuple[Roles, float]:
    every = [dict(zip(now, roles, strict=True)) for roles in product(ROLES, repeat=len(now))]
    best, most = dict(now), before
    for roles in sorted(every, key=choices.bound, reverse=True):
        if choices.bound(roles) <= most * (1.0 - ALIKE):
            break
        served = choices.served(roles)
        if served > most:
            best, most = roles, served
    return best, most


def _tabu(choices: _Choices, now: Mapping[int, Role], before: float) -> tuple[Roles, float]:
    """The best neighbour at each step, also downhill; a replica that has just changed stays for a while."""
    best, most = dict(now), before
    here: Roles = dict(now)
    barred: dict[int, int] = {}
    idle = 0
    for step in range(STEPS):
        moves = [(place, role) for place in here for role in ROLES if role != here[place]]
        ranked = sorted(
            ((choices.bound({**here, place: role}), place, role) for place, role in moves), reverse=True
        )
        chosen, value = None, -1.0
        for bound, place, role in ranked:
            if bound <= value:
                break
            served = choices.served({**here, place: role})
            allowed = barred.get(place, -1) < step or served > most
            if allowed and served > value:
                chosen, value = (place, role), served
        if chosen is None:
            break
        here[chosen[0]] = chosen[1]
        barred[chosen[0]] = step + TABU
        idle += 1
        if value > most * (1 + 1e-9):
            best, most, idle = dict(here), value, 0
        if idle >= IDLE_STEPS:
            break
    return best, most


def _fewest(choices: _Choices, now: Mapping[int, Role], best: Roles, enough: float) -> Roles:
    """Of all choices that were looked at and serve enough, the one nearest to the present roles."""
    places, here = list(now), tuple(now.values())
    flips = [
        (sum(new != old for new, old in zip(item, here, strict=True)), -served, item)
        for item, served in choices.known.items()
        if served >= enough
    ]
    return dict(zip(places, min(flips)[2], strict=True)) if flips else best
