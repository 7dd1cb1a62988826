"""Which replicas could change their role, how fast each is in either, and when combos change theirs (CAUCHY 3.6).

A flip keeps the weights, so any replica that only prefills or only decodes can take the other role. Rates come from
`FleetFacts`, at the lengths now seen, and neither is more than its network card carries of such prompts' KV:

    prefill = 1 / (fixed + per token x mean prompt)          decode = batch / (step x mean output)

A combo serves the lesser of the sums of both; what is left of one that lost replicas may also do both (MIXED). The
paper gives no rule for when combos change:

    short   demand (the rate, and what waits) exceeds headroom x what all copies serve
    change  while short: in the copy that gains most, if that is LEAST_GAIN; it is left alone for HOLD_S after that
    back    to the planned roles where these serve no less, when lost replicas are back, or enough for CALM_S on end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import NamedTuple

from potluck.core.routing.group_sharing import MeanLengths
from potluck.core.scaling.copy_capacity import planned_mix, rates_of, sum_rates
from potluck.core.scaling.rule import Decisions, FlipRole, RuleNotes, Scaler, queued_requests
from potluck.core.scaling.traffic_window import ModelTraffic, ObservedTraffic
from potluck.core.state.facts import FleetFacts, ModelFacts, ReplicaFacts
from potluck.core.state.fleet import FleetState, ReplicaState, TemplateCopy
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import Codec, Region, Role

FLIPPABLE = frozenset({"homogeneous", "pipeline", "group", "remote_prefill"})


@dataclass(frozen=True, slots=True)
class Flippable:
    """A ready replica, its present role and its rate in both, in requests a second."""

    replica: str
    region: str
    role: Role
    load: int
    prefill_per_s: float
    decode_per_s: float
    facts: ReplicaFacts

    def __post_init__(self) -> None:
        assert self.role != "mixed"


def prefill_per_s(facts: ReplicaFacts, prompt_tokens: float) -> float:
    seconds = facts.prefill_fixed_s + facts.prefill_s_per_token * prompt_tokens
    return 1.0 / seconds if seconds > 0 else 0.0


def decode_per_s(facts: ReplicaFacts, output_tokens: float) -> float:
    seconds = facts.decode_step_s * output_tokens
    return facts.decode_batch / seconds if seconds > 0 else 0.0


def card_per_s(facts: ReplicaFacts, model: ModelFacts | None, prompt_tokens: float, codec: Codec) -> float:
    """Prompts whose KV its card carries; without bound where nothing is known of it."""
    size = 0.0 if model is None else model.wire_bytes(prompt_tokens, codec)
    return facts.card_gbps * 1e9 / 8 / size if facts.card_gbps > 0 and size > 0 else inf


def codec_of(plan: Plan | None, model: str) -> Codec:
    """In which KV goes between replicas that prefill or decode alone."""
    codecs = () if plan is None else [flow.codec for flow in plan.flows if flow.model == model]
    return codecs[0] if codecs else "fp16"


def flippable(
    fleet: FleetState, facts: FleetFacts, model: str, lengths: MeanLengths, codec: Codec = "fp16"
) -> tuple[list[Flippable], list[str]]:
    """A model's replicas that prefill or decode alone and are ready; and the templates nobody timed."""
    flippables: list[Flippable] = []
    untimed: set[str] = set()
    for replica in fleet.views.values():
        replica_spec = replica.member
        if replica_spec.model != model or replica.state != "ready" or replica.role == "mixed":
            continue
        if replica_spec.kind not in FLIPPABLE:
            continue
        timed = facts.replicas.get((replica_spec.template, replica_spec.index))
        if timed is None:
            untimed.add(replica_spec.template)
            continue
        most = card_per_s(timed, facts.models.get(model), lengths.prompt_tokens, codec)
        prefill = min(most, prefill_per_s(timed, lengths.prompt_tokens))
        decode = min(most, decode_per_s(timed, lengths.output_tokens))
        if min(prefill, decode) <= 0:
            untimed.add(replica_spec.template)
            continue
        load = replica.open_requests
        flippables.append(
            Flippable(replica_spec.id, replica_spec.region, replica.role, load, prefill, decode, timed)
        )
    return sorted(flippables, key=lambda each: each.replica), sorted(untimed)


def last_of_role(replicas: list[Flippable]) -> set[str]:
    """Replicas that are the only ones of their role in their region: without them KV would have to cross."""
    seen: dict[tuple[str, Role], list[str]] = {}
    for item in replicas:
        seen.setdefault((item.region, item.role), []).append(item.replica)
    return {names[0] for names in seen.values() if len(names) == 1}


LEAST_GAIN = 0.1
HOLD_S = 30.0
CALM_S = 60.0
QUEUE_S = 5.0  # Work that may wait without counting as demand.
LATE_S = 30.0  # In which what waits beyond that is to be worked off.
MIXED = 0.9  # What is left of a replica's time when prompts come between its answers.
CARDS = 0.8  # How busy network cards may be.
Roles = dict[str, Role]
Flips = list[FlipRole]


class RoleRates(NamedTuple):
    prefill_per_s: float
    decode_per_s: float
    card_per_s: float = inf  # What its network cards carry of others' prompts, or of its own to others.


class ComboRates(NamedTuple):
    """A model's combos, by unit the rates of their replicas, and what each serves now."""

    units: Sequence[TemplateCopy]
    able: Mapping[str, Mapping[str, RoleRates]]
    now: dict[str, float]


class CopyRoles:
    """State: when a copy's roles last changed, with how many replicas, and since when it could go back."""

    def __init__(self, policy: Policy, facts: FleetFacts) -> None:
        self._policy, self._facts = policy, facts
        self._changed: dict[str, tuple[float, int]] = {}
        self._calm_s: dict[str, float] = {}
        self.notes = RuleNotes()

    def on_tick(self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan) -> Flips:
        flip_roles: Flips = []
        self._changed = {unit: when for unit, when in self._changed.items() if unit in fleet.units}
        for traffic in observed.models:
            mine = [u for u in fleet.units.values() if u.model == traffic.model]
            combos = [template_copy for template_copy in mine if _split(template_copy)]
            if combos and traffic.mean_output_tokens > 0:
                flip_roles += self._model(at_s, traffic, combos, fleet, plan)
        return flip_roles

    def _model(
        self,
        at_s: float,
        traffic: ModelTraffic,
        combos: Sequence[TemplateCopy],
        fleet: FleetState,
        plan: Plan,
    ) -> Flips:
        model = traffic.model
        codecs = {item.name: item.codec for item in plan.repertoire}
        able = {
            template_copy.id: self._able(template_copy, traffic, codecs.get(template_copy.template, "fp16"))
            for template_copy in combos
        }
        known = [template_copy for template_copy in combos if able[template_copy.id]]
        now = {
            template_copy.id: served(able[template_copy.id], _present(template_copy))
            for template_copy in known
        }
        whole = self._others(model, fleet, plan) + sum(now.values())
        queued = traffic.held + queued_requests(fleet, model)
        late = max(0.0, queued - QUEUE_S * whole - len(fleet.units))
        demand = traffic.rate_per_s + late / LATE_S
        headroom = self._policy.headroom
        state = f"{demand:.3g} requests/s are asked for, {headroom * whole:.3g} counted on"
        rates = ComboRates(known, able, now)
        flips, whole = self._back(at_s, demand, rates, whole)
        if demand > headroom * whole:
            flips += self._change(at_s, demand, rates, whole)
        else:
            self.notes.say(model, f"{state}: roles in combos stay")
        if flips:
            self.notes.say(model, f"{state}: {', '.join(f'{f.replica} as {f.role}' for f in flips)}")
            return [FlipRole(f.replica, f.role, f"{f.reason} ({state})") for f in flips]
        return []

    def _back(self, at_s: float, demand: float, combos: ComboRates, whole: float) -> tuple[Flips, float]:
        """Planned roles where they serve no less, or enough for long enough; and what all copies serve then."""
        flips: Flips = []
        units, able, now = combos
        for template_copy in units:
            planned = {
                replica.member.id: replica.member.role for replica in template_copy.views if replica.serves
            }
            if planned == _present(template_copy):
                self._calm_s.pop(template_copy.id, None)
                continue
            then = served(able[template_copy.id], planned)
            enough = then > 0 and self._policy.headroom * (whole - now[template_copy.id] + then) >= demand
            since_s = self._calm_s.setdefault(template_copy.id, at_s) if enough else at_s
            if not enough:
                self._calm_s.pop(template_copy.id, None)
            better = then > 0 and then >= now[template_copy.id] * (1 - 1e-9)
            better |= template_copy.whole and "mixed" in _present(template_copy).values()
            if better or (enough and at_s - since_s >= CALM_S):
                flips += self._flips(at_s, template_copy, planned, "back to its planned role")
                whole += then - now[template_copy.id]
                now[template_copy.id] = then
        return flips, whole

    def _change(self, at_s: float, demand: float, combos: ComboRates, whole: float) -> Flips:
        """New roles in as many copies as it takes, the one that gains most first."""
        ranked = []
        units, able, now = combos
        for template_copy in units:
            ready = sum(replica.serves for replica in template_copy.views)
            when_s, count = self._changed.get(template_copy.id, (-HOLD_S, ready))
            if at_s - when_s < HOLD_S and count == ready:
                continue
            roles, then = best_inside(able[template_copy.id], template_copy)
            if then > now[template_copy.id] * (1 + LEAST_GAIN):
                ranked.append((then - now[template_copy.id], template_copy.id, template_copy, roles))
        flips: Flips = []
        for gain, _, template_copy, roles in sorted(ranked, key=lambda each: (-each[0], each[1])):
            if self._policy.headroom * whole >= demand:
                break
            flips += self._flips(at_s, template_copy, roles, f"its combo serves {gain:.3g}/s more so")
            whole += gain
        return flips

    def _flips(self, at_s: float, template_copy: TemplateCopy, roles: Roles, reason: str) -> Flips:
        self._changed[template_copy.id] = (at_s, sum(replica.serves for replica in template_copy.views))
        self._calm_s.pop(template_copy.id, None)
        present = _present(template_copy)
        return [FlipRole(name, role, reason) for name, role in sorted(roles.items()) if role != present[name]]

    def _able(self, template_copy: TemplateCopy, traffic: ModelTraffic, codec: Codec) -> dict[str, RoleRates]:
        """Rates of a copy's ready replicas; none where one of them was not timed."""
        prompt = traffic.recent_prompt_tokens or traffic.mean_prompt_tokens
        output = traffic.recent_output_tokens or traffic.mean_output_tokens
        nodes = {node for replica in template_copy.views for node in replica.member.nodes}
        known = self._facts.models.get(template_copy.model)
        # KV that goes over network cards; none on one node.
        kv_bytes = 0.0 if known is None or len(nodes) == 1 else known.wire_bytes(prompt, codec)
        able: dict[str, RoleRates] = {}
        for replica in template_copy.views:
            facts = replica.facts
            if not replica.serves:
                continue
            if facts is None:
                return {}
            carried = kv_bytes > 0 and facts.card_gbps > 0
            most = CARDS * facts.card_gbps * 1e9 / 8 / kv_bytes if carried else inf
            prefill = prefill_per_s(facts, prompt) / replica.pace
            decode = decode_per_s(facts, output) / replica.pace
            able[replica.member.id] = RoleRates(min(prefill, most), min(decode, most))
        return able

    def _others(self, model: str, fleet: FleetState, plan: Plan) -> float:
        """What copies serve that are no combos, for the planned mix."""
        templates = {item.name: item for item in plan.repertoire}
        mix = planned_mix(plan, model)
        mine = [u for u in fleet.units.values() if u.model == model and not _split(u)]
        others = [
            template_copy.template
            for template_copy in mine
            if template_copy.whole and template_copy.template in templates
        ]
        return sum_rates(rates_of(templates[name], mix) for name in others).served_per_s


class WithCopyRoles(Scaler):
    """A rule for whole copies, and this one for the roles inside them."""

    def __init__(self, rule: Scaler, copy_roles: CopyRoles) -> None:
        super().__init__()
        self.rule, self._inside = rule, copy_roles

    def on_tick(self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan) -> Decisions:
        flips = self._inside.on_tick(at_s, observed, fleet, plan)
        return (*flips, *self.rule.on_tick(at_s, observed, fleet, plan))

    def market_changed(self, regions: tuple[Region, ...]) -> None:
        self.rule.market_changed(regions)

    def why(self) -> str:
        inside = self._inside.notes.any
        return f"{self.rule.why()}; {inside}" if inside else self.rule.why()


def served(able: Mapping[str, RoleRates], roles: Mapping[str, Role]) -> float:
    prefill = decode = alone = 0.0
    for name, role in roles.items():
        role_rates = able[name]
        if role == "prefill":
            prefill += min(role_rates.prefill_per_s, role_rates.card_per_s)
        elif role == "decode":
            decode += min(role_rates.decode_per_s, role_rates.card_per_s)
        elif role_rates.prefill_per_s > 0 and role_rates.decode_per_s > 0:
            alone += MIXED / (1.0 / role_rates.prefill_per_s + 1.0 / role_rates.decode_per_s)
    return min(prefill, decode) + alone


def best_inside(able: Mapping[str, RoleRates], template_copy: TemplateCopy) -> tuple[Roles, float]:
    """The roles that serve most with the fewest changes, all one way; replicas of equal rates are interchangeable."""
    views = [replica for replica in template_copy.views if replica.member.id in able]
    if not views:
        return {}, 0.0
    result: list[tuple[float, int, Roles]] = []
    if len(views) < len(template_copy.places):
        both: Roles = {replica.member.id: "mixed" for replica in views}
        result.append((served(able, both), len(views), both))
    groups: dict[RoleRates, list[ReplicaState]] = {}
    for replica in views:
        groups.setdefault(able[replica.member.id], []).append(replica)
    for counts in product(*(range(len(group) + 1) for group in groups.values())):
        if not 0 < sum(counts) < len(views):
            continue
        roles: Roles = {}
        for group, count in zip(groups.values(), counts, strict=True):
            # Those that prefill already stay; of the others those with the least to do go over.
            ordered = sorted(
                group,
                key=lambda replica: (replica.role != "prefill", replica.open_requests, replica.member.id),
            )
            roles |= {v.member.id: "prefill" if i < count else "decode" for i, v in enumerate(ordered)}
        changed = [replica for replica in views if roles[replica.member.id] != replica.role]
        if len({roles[replica.member.id] for replica in changed}) < 2:
            result.append((served(able, roles), len(changed), roles))
    most = max((value for value, *_ in result), default=0.0)
    if not result:
        return _present(template_copy), 0.0
    enough = [item for item in result if item[0] >= most * (1 - 1e-9)]
    value, _, chosen = min(enough, key=lambda each: (each[1], -each[0]))
    return chosen, value


def _present(template_copy: TemplateCopy) -> Roles:
    return {replica.member.id: replica.role for replica in template_copy.views if replica.serves}


def _split(template_copy: TemplateCopy) -> bool:
    """Whether a copy is a combo that was planned with prefill apart from decode."""
    return template_copy.kind == "combo" and any(
        replica.member.role != "mixed" for replica in template_copy.views
    )
