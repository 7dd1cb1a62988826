"""Role flips of replicas: their rates in both roles, and the rule for combos (CAUCHY 3.6).

A flip keeps the weights loaded, so any replica that only prefills or only decodes can take the other role. Rates come
from `FleetFacts` for the observed lengths, and neither exceeds what the network card carries of such prompts' KV:

    prefill = 1 / (fixed + per token x mean prompt)          decode = batch / (step x mean output)

A combo serves the lesser of the two sums; the remaining replicas of one that lost some may also do both
(MIXED_TIME_SHARE). The paper has no rule for when combos change:

    short   demand (the rate plus queued work) exceeds headroom x what all copies serve
    change  while short: in the copy with the largest gain of at least MIN_GAIN; then no change there for HOLD_S

    back    to the planned roles where these serve no less, when lost replicas are back, or CALM_S without need"""

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
    """Prompts/s whose KV the network card carries; infinite where the card is unknown."""
    size = 0.0 if model is None else model.wire_bytes(prompt_tokens, codec)
    return facts.card_gbps * 1e9 / 8 / size if facts.card_gbps > 0 and size > 0 else inf


def codec_of(plan: Plan | None, model: str) -> Codec:
    """The codec of KV between replicas that prefill or decode alone."""
    codecs = () if plan is None else [flow.codec for flow in plan.flows if flow.model == model]
    return codecs[0] if codecs else "fp16"


def flippable(
    fleet: FleetState, facts: FleetFacts, model: str, lengths: MeanLengths, codec: Codec = "fp16"
) -> tuple[list[Flippable], list[str]]:
    """(ready replicas of a model that only prefill or only decode, templates without timings)."""
    flippables: list[Flippable] = []
    untimed: set[str] = set()
    for replica in fleet.views.values():
        replica_spec = replica.member
        if replica_spec.model != model or replica.state != "ready" or replica.role == "mixed":
            continue
        if replica_spec.kind not in FLIPPABLE:
            continue
        facts_of_replica = facts.replicas.get((replica_spec.template, replica_spec.index))
        if facts_of_replica is None:
            untimed.add(replica_spec.template)
            continue
        card_limit_per_s = card_per_s(facts_of_replica, facts.models.get(model), lengths.prompt_tokens, codec)
        prefill = min(card_limit_per_s, prefill_per_s(facts_of_replica, lengths.prompt_tokens))
        decode = min(card_limit_per_s, decode_per_s(facts_of_replica, lengths.output_tokens))
        if min(prefill, decode) <= 0:
            untimed.add(replica_spec.template)
            continue
        load = replica.open_requests
        flippables.append(
            Flippable(
                replica_spec.id, replica_spec.region, replica.role, load, prefill, decode, facts_of_replica
            )
        )
    return sorted(flippables, key=lambda each: each.replica), sorted(untimed)


def last_of_role(replicas: list[Flippable]) -> set[str]:
    """Replicas that are the only ones of their role in their region: without them KV would have to cross regions."""
    names_by_role: dict[tuple[str, Role], list[str]] = {}
    for item in replicas:
        names_by_role.setdefault((item.region, item.role), []).append(item.replica)
    return {names[0] for names in names_by_role.values() if len(names) == 1}


MIN_GAIN = 0.1
HOLD_S = 30.0
CALM_S = 60.0
TOLERATED_QUEUE_S = 5.0  # Queued work, in seconds, that does not count as demand.
QUEUE_DRAIN_S = 30.0  # Time in which a longer queue should be worked off.
MIXED_TIME_SHARE = 0.9  # Share of a replica's time that remains when it both prefills and decodes.
MAX_CARD_UTILIZATION = 0.8  # Limit of the network cards' utilization.
Roles = dict[str, Role]
Flips = list[FlipRole]


class RoleRates(NamedTuple):
    prefill_per_s: float
    decode_per_s: float
    card_per_s: float = inf  # Prompts/s whose KV its network cards carry, either way.


class ComboRates(NamedTuple):
    """A model's combos: per copy the rates of its replicas, and what the copy serves now."""

    units: Sequence[TemplateCopy]
    role_rates: Mapping[str, Mapping[str, RoleRates]]
    served_now: dict[str, float]


class CopyRoles:
    """State: per copy, when roles last changed and with how many replicas, and since when it could go back."""

    def __init__(self, policy: Policy, facts: FleetFacts) -> None:
        self._policy, self._facts = policy, facts
        self._changed: dict[str, tuple[float, int]] = {}
        self._calm_s: dict[str, float] = {}
        self.notes = RuleNotes()

    def on_tick(self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan) -> Flips:
        flip_roles: Flips = []
        self._changed = {unit: change for unit, change in self._changed.items() if unit in fleet.units}
        for traffic in observed.models:
            copies = [u for u in fleet.units.values() if u.model == traffic.model]
            combos = [template_copy for template_copy in copies if _has_split_roles(template_copy)]
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
        role_rates = {
            template_copy.id: self._role_rates(
                template_copy, traffic, codecs.get(template_copy.template, "fp16")
            )
            for template_copy in combos
        }
        timed_combos = [template_copy for template_copy in combos if role_rates[template_copy.id]]
        served_by_copy = {
            template_copy.id: served_per_s(role_rates[template_copy.id], _present_roles(template_copy))
            for template_copy in timed_combos
        }
        total_per_s = self._other_copies_per_s(model, fleet, plan) + sum(served_by_copy.values())
        queued = traffic.held + queued_requests(fleet, model)
        excess_queue = max(0.0, queued - TOLERATED_QUEUE_S * total_per_s - len(fleet.units))
        demand = traffic.rate_per_s + excess_queue / QUEUE_DRAIN_S
        headroom = self._policy.headroom
        state_text = f"{demand:.3g} requests/s are asked for, {headroom * total_per_s:.3g} counted on"
        rates = ComboRates(timed_combos, role_rates, served_by_copy)
        flips, total_per_s = self._restore_planned_roles(at_s, demand, rates, total_per_s)
        if demand > headroom * total_per_s:
            flips += self._change_roles(at_s, demand, rates, total_per_s)
        else:
            self.notes.say(model, f"{state_text}: roles in combos stay")
        if flips:
            self.notes.say(model, f"{state_text}: {', '.join(f'{f.replica} as {f.role}' for f in flips)}")
            return [FlipRole(f.replica, f.role, f"{f.reason} ({state_text})") for f in flips]
        return []

    def _restore_planned_roles(
        self, at_s: float, demand: float, combos: ComboRates, total_per_s: float
    ) -> tuple[Flips, float]:
        """(flips back to planned roles where these serve no less or suffice for long enough, what all copies serve
        then)."""
        flips: Flips = []
        units, role_rates, served_now = combos
        for template_copy in units:
            planned = {
                replica.member.id: replica.member.role for replica in template_copy.views if replica.serves
            }
            if planned == _present_roles(template_copy):
                self._calm_s.pop(template_copy.id, None)
                continue
            planned_per_s = served_per_s(role_rates[template_copy.id], planned)
            is_enough = (
                planned_per_s > 0
                and self._policy.headroom * (total_per_s - served_now[template_copy.id] + planned_per_s)
                >= demand
            )
            since_s = self._calm_s.setdefault(template_copy.id, at_s) if is_enough else at_s
            if not is_enough:
                self._calm_s.pop(template_copy.id, None)
            is_better = planned_per_s > 0 and planned_per_s >= served_now[template_copy.id] * (1 - 1e-9)
            is_better |= template_copy.whole and "mixed" in _present_roles(template_copy).values()
            if is_better or (is_enough and at_s - since_s >= CALM_S):
                flips += self._flips_to(at_s, template_copy, planned, "back to its planned role")
                total_per_s += planned_per_s - served_now[template_copy.id]
                served_now[template_copy.id] = planned_per_s
        return flips, total_per_s

    def _change_roles(self, at_s: float, demand: float, combos: ComboRates, total_per_s: float) -> Flips:
        """New roles in as many copies as the demand needs, the largest gain first."""
        ranked = []
        units, role_rates, served_now = combos
        for template_copy in units:
            ready_count = sum(replica.serves for replica in template_copy.views)
            changed_s, replica_count = self._changed.get(template_copy.id, (-HOLD_S, ready_count))
            if at_s - changed_s < HOLD_S and replica_count == ready_count:
                continue
            roles, served_then = best_copy_roles(role_rates[template_copy.id], template_copy)
            if served_then > served_now[template_copy.id] * (1 + MIN_GAIN):
                ranked.append(
                    (served_then - served_now[template_copy.id], template_copy.id, template_copy, roles)
                )
        flips: Flips = []
        for gain, _, template_copy, roles in sorted(ranked, key=lambda each: (-each[0], each[1])):
            if self._policy.headroom * total_per_s >= demand:
                break
            flips += self._flips_to(at_s, template_copy, roles, f"its combo serves {gain:.3g}/s more so")
            total_per_s += gain
        return flips

    def _flips_to(self, at_s: float, template_copy: TemplateCopy, roles: Roles, reason: str) -> Flips:
        self._changed[template_copy.id] = (at_s, sum(replica.serves for replica in template_copy.views))
        self._calm_s.pop(template_copy.id, None)
        present = _present_roles(template_copy)
        return [FlipRole(name, role, reason) for name, role in sorted(roles.items()) if role != present[name]]

    def _role_rates(
        self, template_copy: TemplateCopy, traffic: ModelTraffic, codec: Codec
    ) -> dict[str, RoleRates]:
        """Rates of a copy's ready replicas; empty where one of them has no timings."""
        prompt_tokens = traffic.recent_prompt_tokens or traffic.mean_prompt_tokens
        output_tokens = traffic.recent_output_tokens or traffic.mean_output_tokens
        nodes = {node for replica in template_copy.views for node in replica.member.nodes}
        model_facts = self._facts.models.get(template_copy.model)
        # KV bytes over network cards; 0 on a single node.
        kv_bytes = (
            0.0 if model_facts is None or len(nodes) == 1 else model_facts.wire_bytes(prompt_tokens, codec)
        )
        role_rates: dict[str, RoleRates] = {}
        for replica in template_copy.views:
            facts = replica.facts
            if not replica.serves:
                continue
            if facts is None:
                return {}
            uses_card = kv_bytes > 0 and facts.card_gbps > 0
            card_limit_per_s = (
                MAX_CARD_UTILIZATION * facts.card_gbps * 1e9 / 8 / kv_bytes if uses_card else inf
            )
            prefill = prefill_per_s(facts, prompt_tokens) / replica.pace
            decode = decode_per_s(facts, output_tokens) / replica.pace
            role_rates[replica.member.id] = RoleRates(
                min(prefill, card_limit_per_s), min(decode, card_limit_per_s)
            )
        return role_rates

    def _other_copies_per_s(self, model: str, fleet: FleetState, plan: Plan) -> float:
        """Requests/s of the copies that are no combos, for the planned mix."""
        templates = {item.name: item for item in plan.repertoire}
        mix = planned_mix(plan, model)
        copies = [u for u in fleet.units.values() if u.model == model and not _has_split_roles(u)]
        template_names = [
            template_copy.template
            for template_copy in copies
            if template_copy.whole and template_copy.template in templates
        ]
        return sum_rates(rates_of(templates[name], mix) for name in template_names).served_per_s


class WithCopyRoles(Scaler):
    """Combines a rule for whole copies with `CopyRoles` for the roles inside them."""

    def __init__(self, rule: Scaler, copy_roles: CopyRoles) -> None:
        super().__init__()
        self.rule, self._copy_roles = rule, copy_roles

    def on_tick(self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan) -> Decisions:
        flips = self._copy_roles.on_tick(at_s, observed, fleet, plan)
        return (*flips, *self.rule.on_tick(at_s, observed, fleet, plan))

    def market_changed(self, regions: tuple[Region, ...]) -> None:
        self.rule.market_changed(regions)

    def why(self) -> str:
        inside = self._copy_roles.notes.any
        return f"{self.rule.why()}; {inside}" if inside else self.rule.why()


def served_per_s(rates_by_replica: Mapping[str, RoleRates], roles: Mapping[str, Role]) -> float:
    prefill_per_s = decode_per_s = mixed_per_s = 0.0
    for name, role in roles.items():
        rates = rates_by_replica[name]
        if role == "prefill":
            prefill_per_s += min(rates.prefill_per_s, rates.card_per_s)
        elif role == "decode":
            decode_per_s += min(rates.decode_per_s, rates.card_per_s)
        elif rates.prefill_per_s > 0 and rates.decode_per_s > 0:
            mixed_per_s += MIXED_TIME_SHARE / (1.0 / rates.prefill_per_s + 1.0 / rates.decode_per_s)
    return min(prefill_per_s, decode_per_s) + mixed_per_s


def best_copy_roles(role_rates: Mapping[str, RoleRates], template_copy: TemplateCopy) -> tuple[Roles, float]:
    """(the roles that serve most with the fewest changes in one direction, requests/s); replicas with equal rates
    are interchangeable."""
    views = [replica for replica in template_copy.views if replica.member.id in role_rates]
    if not views:
        return {}, 0.0
    choices: list[tuple[float, int, Roles]] = []
    if len(views) < len(template_copy.places):
        mixed_roles: Roles = {replica.member.id: "mixed" for replica in views}
        choices.append((served_per_s(role_rates, mixed_roles), len(views), mixed_roles))
    replicas_by_rates: dict[RoleRates, list[ReplicaState]] = {}
    for replica in views:
        replicas_by_rates.setdefault(role_rates[replica.member.id], []).append(replica)
    for counts in product(*(range(len(group) + 1) for group in replicas_by_rates.values())):
        if not 0 < sum(counts) < len(views):
            continue
        roles: Roles = {}
        for group, count in zip(replicas_by_rates.values(), counts, strict=True):
            # Prefill replicas stay; of the others the least loaded change.
            ordered = sorted(
                group,
                key=lambda replica: (replica.role != "prefill", replica.open_requests, replica.member.id),
            )
            roles |= {
                replica.member.id: "prefill" if i < count else "decode" for i, replica in enumerate(ordered)
            }
        changed_replicas = [replica for replica in views if roles[replica.member.id] != replica.role]
        if len({roles[replica.member.id] for replica in changed_replicas}) < 2:
            choices.append((served_per_s(role_rates, roles), len(changed_replicas), roles))
    best_per_s = max((rate_per_s for rate_per_s, *_ in choices), default=0.0)
    if not choices:
        return _present_roles(template_copy), 0.0
    best_choices = [item for item in choices if item[0] >= best_per_s * (1 - 1e-9)]
    rate_per_s, _, chosen = min(best_choices, key=lambda each: (each[1], -each[0]))
    return chosen, rate_per_s


def _present_roles(template_copy: TemplateCopy) -> Roles:
    return {replica.member.id: replica.role for replica in template_copy.views if replica.serves}


def _has_split_roles(template_copy: TemplateCopy) -> bool:
    """Whether a copy is a combo that was planned with prefill apart from decode."""
    return template_copy.kind == "combo" and any(
        replica.member.role != "mixed" for replica in template_copy.views
    )
