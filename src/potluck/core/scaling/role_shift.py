"""THUNDERSERVE's light rescheduling (its 3.4): when the workload shifts, flip roles without loading weights.

A shift is a mean prompt, a mean answer or a rate that leaves the band around the reference and its own noise, or a
change in the number of replicas. Then, for the observed lengths, the replica is flipped whose flip raises

    served = min(sum of prefill rates, sum of decode rates)

most, at most MAX_FLIPS times a window and while each flip gains MIN_GAIN: the paper's tabu search with the flip as
its only move. The last replica of a role in a region stays; a flip back within FLIP_BACK_S must gain FLIP_BACK_GAIN.

Roles inside groups are found by the paper's search, each choice valued by its best routing
(`core/routing/group_sharing.py`); a choice is routed if its bound min(prefill, decode) + mixed beats the best."""

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
MIN_GAIN = 0.1  # Relative gain in served requests/s that a flip needs.
FOLLOW_UP_WINDOW_SHARE = 0.25
"""Share of a window after which flips in the same direction may follow: a shifting workload continues to shift."""
FLIP_BACK_GAIN = 0.3
FLIP_BACK_S = 3600.0
NOISE_DEVIATIONS = 3.0
MIN_FINISHED_REQUESTS = 20  # Finished requests that a mean answer length needs.


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
    """State: per model, the reference workload, and when and in which direction roles were last changed."""

    def __init__(self, policy: Policy, facts: FleetFacts) -> None:
        super().__init__()
        self._policy, self._facts = policy, facts
        self._plan: Plan | None = None
        self._since_s = 0.0
        self._references: dict[str, RoleReference] = {}
        self._last_s: dict[str, float] = {}
        self._last_direction: dict[str, Role] = {}

    def on_tick(self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan) -> Decisions:
        if plan is not self._plan:
            self._plan, self._since_s = plan, at_s
            self._references.clear()
            self._last_s.clear()
            self._last_direction.clear()
        decisions: list[ScaleDecision] = []
        for model in sorted({template.model for template in plan.templates}):
            traffic = observed.of(model)
            if (
                traffic is None
                or traffic.finished < MIN_FINISHED_REQUESTS
                or at_s - self._since_s < self._policy.window_s
            ):
                self._notes.say(model, "has not seen a window of requests yet")
                continue
            last_s = self._last_s.get(model)
            since_s = inf if last_s is None else at_s - last_s
            if since_s < FOLLOW_UP_WINDOW_SHARE * self._policy.window_s:
                self._notes.wait(model, "waits after the last flips")
                continue
            decisions += self._model(at_s, traffic, fleet, follows_up=since_s < self._policy.window_s)
        return tuple(decisions)

    def _model(
        self, at_s: float, traffic: ModelTraffic, fleet: FleetState, follows_up: bool
    ) -> list[ScaleDecision]:
        """With `follows_up` (less than a window after other flips) only flips in the same direction."""
        model = traffic.model
        copies = [u for u in fleet.units.values() if u.model == model]
        groups = [u for u in copies if u.template in self._facts.groups]
        if groups and follows_up:
            self._notes.wait(model, "waits a window after the last flips")
            return []
        if groups:
            return self._group_decisions(at_s, traffic, groups)
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
        # While the workload shifts, the window still holds much of the old one; its last part predicts best.
        new_reference = replace(
            new_reference,
            prompt_tokens=_recent_or_mean(
                new_reference.prompt_tokens, traffic.recent_prompt_tokens, new_reference.prompt_error_tokens
            ),
            output_tokens=_recent_or_mean(
                new_reference.output_tokens, traffic.recent_output_tokens, new_reference.output_error_tokens
            ),
        )
        shift = self._shift(self._references.get(model), new_reference, traffic)
        if not shift:
            self._references.setdefault(model, new_reference)
            return self._keep_roles(model)
        lengths = MeanLengths(new_reference.prompt_tokens, new_reference.output_tokens)
        replicas, _ = flippable(fleet, self._facts, model, lengths, codec)
        last_direction = self._last_direction.get(model)
        opposite_role: Role | None = None
        if last_direction is not None and at_s - self._last_s[model] < FLIP_BACK_S:
            opposite_role = "decode" if last_direction == "prefill" else "prefill"
        flips = best_flips(replicas, back=opposite_role)
        if follows_up and flips and flips[-1][1] != last_direction:
            self._notes.say(model, f"{shift}; waits a window before flips the other way")
            return []
        self._references[model] = new_reference
        if not flips:
            self._notes.say(model, f"{shift}, but no flip gains {MIN_GAIN:.0%}")
            return []
        self._last_s[model], self._last_direction[model] = at_s, flips[-1][1]
        self._notes.say(model, f"{shift}; flips {', '.join(name for name, _ in flips)}")
        return [FlipRole(name, role, shift) for name, role in flips]

    def _keep_roles(self, model: str) -> list[ScaleDecision]:
        self._notes.say(model, f"the workload stays within {self._policy.ratio:.0%} of what roles are for")
        return []

    def _group_decisions(
        self, at_s: float, traffic: ModelTraffic, groups: list[TemplateCopy]
    ) -> list[ScaleDecision]:
        model, lengths = traffic.model, MeanLengths(traffic.mean_prompt_tokens, traffic.mean_output_tokens)
        ready = {
            template_copy.id: [replica for replica in template_copy.views if replica.state == "ready"]
            for template_copy in groups
        }
        new_reference = _reference(traffic, sum(map(len, ready.values())))
        old_reference = self._references.get(model)
        shift = self._shift(old_reference, new_reference, traffic)
        if not shift:
            return self._keep_roles(model)
        self._references[model] = new_reference
        decisions: list[ScaleDecision] = []
        if old_reference is not None or self._lengths_differ(groups, lengths):
            decisions.append(SetLengths(model, *lengths))
        for template_copy in groups:
            roles = {replica.member.index: replica.role for replica in ready[template_copy.id]}
            if not roles:
                continue
            best_roles_by_index, best_per_s, present_per_s = best_roles(
                self._facts, template_copy.template, roles, lengths, MIN_GAIN
            )
            decisions += [
                FlipRole(
                    replica.member.id,
                    best_roles_by_index[replica.member.index],
                    f"{shift}: {present_per_s:.3g} to {best_per_s:.3g}/s",
                )
                for replica in ready[template_copy.id]
                if best_roles_by_index[replica.member.index] != replica.role
            ]
        flips = [decision for decision in decisions if isinstance(decision, FlipRole)]
        if flips:
            self._last_s[model] = at_s
        flips_text = f"flips {', '.join(flip.replica for flip in flips)}" if flips else "roles stay"
        self._notes.say(model, f"{shift}; {flips_text}")
        return decisions

    def _lengths_differ(self, groups: list[TemplateCopy], lengths: MeanLengths) -> bool:
        group = self._facts.groups[groups[0].template]
        pairs = zip(lengths, (group.prompt_tokens, group.output_tokens), strict=True)
        return any(abs(observed - planned) > self._policy.ratio * planned for observed, planned in pairs)

    def _shift(
        self, old_reference: RoleReference | None, new_reference: RoleReference, traffic: ModelTraffic
    ) -> str:
        """A description of what left the band; empty when nothing did."""
        if old_reference is None:
            return "first look"
        band = self._policy.ratio
        noise = NOISE_DEVIATIONS * hypot(old_reference.prompt_error_tokens, new_reference.prompt_error_tokens)
        if abs(new_reference.prompt_tokens - old_reference.prompt_tokens) > max(
            band * old_reference.prompt_tokens, noise
        ):
            return f"prompts {moved(old_reference.prompt_tokens, new_reference.prompt_tokens)} tokens"
        noise = NOISE_DEVIATIONS * hypot(old_reference.output_error_tokens, new_reference.output_error_tokens)
        if abs(new_reference.output_tokens - old_reference.output_tokens) > max(
            band * old_reference.output_tokens, noise
        ):
            return f"answers {moved(old_reference.output_tokens, new_reference.output_tokens)} tokens"
        if abs(new_reference.rate_per_s - old_reference.rate_per_s) > max(
            band * old_reference.rate_per_s, NOISE_DEVIATIONS * traffic.error_per_s
        ):
            return f"requests {moved(old_reference.rate_per_s, new_reference.rate_per_s, '.2g')} a second"
        if new_reference.replicas != old_reference.replicas:
            return f"{new_reference.replicas} replicas instead of {old_reference.replicas}"
        return ""


def _reference(traffic: ModelTraffic, replicas: int) -> RoleReference:
    means = traffic.mean_prompt_tokens, traffic.mean_output_tokens
    errors = traffic.prompt_error_tokens, traffic.output_error_tokens
    return RoleReference(traffic.rate_per_s, *means, *errors, replicas)


def _recent_or_mean(mean: float, recent: float, error: float) -> float:
    """The mean of the window's last quarter where it differs by more than its noise (twice that of the whole
    window), else the mean."""
    return recent if recent and abs(recent - mean) > NOISE_DEVIATIONS * 2.0 * error else mean


def best_flips(
    replicas: list[Flippable], max_flips: int = MAX_FLIPS, gain: float = MIN_GAIN, back: Role | None = None
) -> list[tuple[str, Role]]:
    """(replica, new role) of flips that raise min(P, D), best first; ties go to the least loaded. A first flip to
    the role `back` needs a larger gain."""
    remaining = list(replicas)
    flips: list[tuple[str, Role]] = []
    while len(flips) < max_flips:
        prefill_per_s = sum(entry.prefill_per_s for entry in remaining if entry.role == "prefill")
        decode_per_s = sum(entry.decode_per_s for entry in remaining if entry.role == "decode")
        fixed = last_of_role(remaining) | {name for name, _ in flips}
        present_per_s = min(prefill_per_s, decode_per_s)
        best_index, best_rank = None, (0.0, -(10**9))
        for index, candidate in enumerate(remaining):
            if candidate.replica in fixed:
                continue
            sign = -1 if candidate.role == "prefill" else 1
            served_per_s = min(
                prefill_per_s + sign * candidate.prefill_per_s, decode_per_s - sign * candidate.decode_per_s
            )
            needed_gain = (
                max(gain, FLIP_BACK_GAIN)
                if back is not None and back != candidate.role and not flips
                else gain
            )
            if (
                served_per_s >= (1 + needed_gain) * present_per_s
                and (served_per_s, -candidate.load) > best_rank
            ):
                best_index, best_rank = index, (served_per_s, -candidate.load)
        if best_index is None:
            break
        role: Role = "decode" if remaining[best_index].role == "prefill" else "prefill"
        flips.append((remaining[best_index].replica, role))
        remaining[best_index] = replace(remaining[best_index], role=role)
    return flips


ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")
MAX_EXHAUSTIVE_CHOICES = 6561  # Three roles for eight replicas.
TABU_STEPS, MAX_IDLE_STEPS, TABU_TENURE = 60, 12, 6
EQUAL_RATE_TOLERANCE = 0.03
"""Choices within this share of the best count as equal: rates are no more exact, and flips disturb service."""

Roles = dict[int, Role]


class _RoleChoices:
    """The value of choices of roles; each choice is routed at most once."""

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
        served_per_s = self.known.get(key)
        if served_per_s is None:
            routing = best_routing(self._facts, self._template, roles, self._lengths, self._pace)
            served_per_s = self.known[key] = sum(rate for *_, rate in routing)
        return served_per_s


def best_roles(
    facts: FleetFacts, template: str, present: Mapping[int, Role], lengths: MeanLengths, gain: float
) -> tuple[Roles, float, float]:
    """(roles, what they serve, what the present roles serve): the fewest flips among choices within
    EQUAL_RATE_TOLERANCE of the best; the present roles unless the gain is at least `gain`."""
    choices = _RoleChoices(facts, template, list(present), lengths)
    present_per_s = choices.served(present)
    is_small = len(ROLES) ** len(present) <= MAX_EXHAUSTIVE_CHOICES
    best, best_per_s = (
        _search_all(choices, present, present_per_s)
        if is_small
        else _search_tabu(choices, present, present_per_s)
    )
    if best_per_s < present_per_s * (1.0 + gain) or best_per_s <= present_per_s:
        return dict(present), present_per_s, present_per_s
    nearest = _fewest_flips(
        choices, present, best, max(present_per_s * (1.0 + gain), (1.0 - EQUAL_RATE_TOLERANCE) * best_per_s)
    )
    return nearest, choices.served(nearest), present_per_s


def _search_all(
    choices: _RoleChoices, present: Mapping[int, Role], present_per_s: float
) -> tuple[Roles, float]:
    choices_of_roles = [
        dict(zip(present, roles, strict=True)) for roles in product(ROLES, repeat=len(present))
    ]
    best, best_per_s = dict(present), present_per_s
    for roles in sorted(choices_of_roles, key=choices.bound, reverse=True):
        if choices.bound(roles) <= best_per_s * (1.0 - EQUAL_RATE_TOLERANCE):
            break
        served_per_s = choices.served(roles)
        if served_per_s > best_per_s:
            best, best_per_s = roles, served_per_s
    return best, best_per_s


def _search_tabu(
    choices: _RoleChoices, present: Mapping[int, Role], present_per_s: float
) -> tuple[Roles, float]:
    """Tabu search: the best neighbour at each step, also downhill; a replica that has just changed is fixed for a
    while."""
    best, best_per_s = dict(present), present_per_s
    current: Roles = dict(present)
    tabu_until: dict[int, int] = {}
    idle_steps = 0
    for step in range(TABU_STEPS):
        moves = [(index, role) for index in current for role in ROLES if role != current[index]]
        ranked = sorted(
            ((choices.bound({**current, index: role}), index, role) for index, role in moves), reverse=True
        )
        chosen, chosen_per_s = None, -1.0
        for bound, index, role in ranked:
            if bound <= chosen_per_s:
                break
            served_per_s = choices.served({**current, index: role})
            allowed = tabu_until.get(index, -1) < step or served_per_s > best_per_s
            if allowed and served_per_s > chosen_per_s:
                chosen, chosen_per_s = (index, role), served_per_s
        if chosen is None:
            break
        current[chosen[0]] = chosen[1]
        tabu_until[chosen[0]] = step + TABU_TENURE
        idle_steps += 1
        if chosen_per_s > best_per_s * (1 + 1e-9):
            best, best_per_s, idle_steps = dict(current), chosen_per_s, 0
        if idle_steps >= MAX_IDLE_STEPS:
            break
    return best, best_per_s


def _fewest_flips(
    choices: _RoleChoices, present: Mapping[int, Role], best: Roles, enough_per_s: float
) -> Roles:
    """Of all evaluated choices that serve enough, the one with the fewest flips."""
    indices, present_roles = list(present), tuple(present.values())
    ranked = [
        (
            sum(new_role != old_role for new_role, old_role in zip(roles, present_roles, strict=True)),
            -served,
            roles,
        )
        for roles, served in choices.known.items()
        if served >= enough_per_s
    ]
    return dict(zip(indices, min(ranked)[2], strict=True)) if ranked else best
