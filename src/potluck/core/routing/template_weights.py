"""What a plan offers to routing: how much of each bucket one copy of each template takes, phase by phase.

A copy divides its time among buckets and phases; x = rate / (count capacity) of it goes to one of them. Weights are

    goodput       capacity x / (sum of its x): its goodput for the bucket in the time that the plan gives the bucket
    rates         rate / count: what the plan sends there
    even          1 where the plan sends anything

With one bucket the first is the profiled goodput itself (CAUCHY 3.4.1, CORAL 5.1)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from potluck.core.routing.balance import BalanceRule, balance_rule
from potluck.core.values.plan import BucketCapacity, Plan, Template

Phase = Literal["closed", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("closed", "prefill", "decode")
Key = tuple[str, str]  # (template, region)
AWAY = 0.05
"""What a copy in another region weighs: it is sent requests once those at home are about twenty behind it."""


@dataclass(frozen=True, slots=True)
class TemplateWeights:
    closed: tuple[float, ...]
    prefill: tuple[float, ...]
    decode: tuple[float, ...]

    def weights(self, phase: Phase) -> tuple[float, ...]:
        return self.closed if phase == "closed" else self.prefill if phase == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class RegionFlow:
    source: str
    target: str
    rates_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    model: str
    longest_tokens: tuple[float, ...]
    """The longest prompt of each bucket, rising; the last is infinite, so that every prompt has a bucket."""
    copies: Mapping[Key, TemplateWeights]
    flows: tuple[RegionFlow, ...]
    spare: Mapping[str, TemplateWeights] = field(default_factory=dict)
    """What a copy of any template takes that the plan counts on nowhere, or not in that region: scaling began it."""

    def copy(self, key: Key) -> TemplateWeights | None:
        template_weights = self.copies.get(key)
        return self.spare.get(key[0]) if template_weights is None else template_weights

    def bucket(self, prompt_tokens: float) -> int:
        return min(bisect_left(self.longest_tokens, prompt_tokens), len(self.longest_tokens) - 1)


def offers(plan: Plan, balance: str) -> dict[str, ModelWeights]:
    rule = balance_rule(balance)
    models = dict.fromkeys(template.model for template in plan.templates)
    return {model: _model(plan, model, rule) for model in models}


def nearer(model: ModelWeights, home: str) -> ModelWeights:
    """As a gateway of one region has it: what the plan has answered there stays there while it can. Copies elsewhere
    that answer whole requests weigh little beside such copies at home, and nothing beside flows to home."""
    none = (0.0,) * len(model.longest_tokens)
    whole = zip(
        none, *(copy.closed for (_, region), copy in model.copies.items() if region == home), strict=True
    )
    handed = zip(none, *(flow.rates_per_s for flow in model.flows if flow.target == home), strict=True)
    elsewhere = [
        (AWAY, 0.0) if max(alike) else (float(not max(flows)),) * 2
        for alike, flows in zip(whole, handed, strict=True)
    ]  # By bucket, what copies and flows weigh there.

    def weighed(region: str, weights: tuple[float, ...], kind: int) -> tuple[float, ...]:
        return (
            weights if region == home else tuple(w * e[kind] for w, e in zip(weights, elsewhere, strict=True))
        )

    copies = {
        key: replace(each, closed=weighed(key[1], each.closed, 0)) for key, each in model.copies.items()
    }
    flows = tuple(
        replace(each, rates_per_s=weighed(each.target, each.rates_per_s, 1)) for each in model.flows
    )
    return replace(model, copies=copies, flows=flows)


def merged(new_weights: ModelWeights, old_weights: ModelWeights, live: Collection[Key]) -> ModelWeights:
    """The new plan's offers, and the old one's for live copies no longer planned, bucket by longest prompt."""
    left = {
        key: template_weights
        for key in sorted(live)
        if key not in new_weights.copies and (template_weights := old_weights.copy(key)) is not None
    }
    if not left:
        return new_weights
    places = [old_weights.bucket(tokens) for tokens in new_weights.longest_tokens]
    copies = dict(new_weights.copies)
    for key, template_weights in left.items():
        copies[key] = TemplateWeights(
            *(tuple(template_weights.weights(p)[i] for i in places) for p in PHASES)
        )
    known = {(flow.source, flow.target) for flow in new_weights.flows}
    regions = {region for _, region in left}
    flows = [
        RegionFlow(flow.source, flow.target, tuple(flow.rates_per_s[i] for i in places))
        for flow in old_weights.flows
        if (flow.source, flow.target) not in known and {flow.source, flow.target} & regions
    ]
    return replace(new_weights, copies=copies, flows=new_weights.flows + tuple(flows))


def _model(plan: Plan, model: str, rule: BalanceRule) -> ModelWeights:
    buckets = sorted((b for b in plan.buckets if b.model == model), key=lambda b: b.bucket)
    longest = (*(float(bucket.longest_tokens) for bucket in buckets[:-1]), inf)
    templates = {template.name: template for template in plan.templates if template.model == model}
    rates: dict[tuple[Key, Phase], list[float]] = {}
    for share in plan.shares:
        if share.template in templates and share.bucket < len(longest):
            key: tuple[Key, Phase] = ((share.template, share.region), share.phase)
            rates.setdefault(key, [0.0] * len(longest))[share.bucket] += share.rate_per_s
    counts: Counter[Key] = Counter()
    for deployment in plan.deployments:
        if deployment.template in templates:
            counts[deployment.template, deployment.region] += deployment.count
    for place, _ in rates:
        counts.setdefault(place, 1)
    copies = {
        key: _copy(templates[key[0]], {p: rates.get((key, p)) for p in PHASES}, count, len(longest), rule)
        if rates
        else _unplanned(templates[key[0]], len(longest), rule)
        for key, count in counts.items()
    }
    spare = {}
    if plan.candidates:
        mix = [bucket.rate_per_s for bucket in buckets] or [1.0]
        own = [item for item in plan.repertoire if item.model == model and not item.machines]
        spare = {item.name: _spare(item, mix if any(mix) else [1.0] * len(mix), rule) for item in own}
    return ModelWeights(model, longest, copies, _flows(plan, model, len(longest)), spare)


def _spare(template: Template, mix: Sequence[float], rule: BalanceRule) -> TemplateWeights:
    """A copy that the plan does not count on takes every bucket b it can: m_b / (sum of m / C), m the mix."""
    capacities = {bucket_capacity.bucket: bucket_capacity for bucket_capacity in template.capacity}

    def weights(phase: Phase) -> tuple[float, ...]:
        able = [_capacity(capacities.get(bucket), phase) for bucket in range(len(mix))]
        busy = 0.0
        for rate, asked in zip(able, mix, strict=True):
            busy += asked / rate if rate > 0 else 0.0
        if rule.weights == "even":
            return tuple(float(rate > 0) for rate in able)
        # A bucket that nobody was planned to ask for gets a little, so that it has somewhere to go.
        least = min(asked for asked in mix if asked > 0)
        both = zip(able, mix, strict=True)
        return tuple(max(asked, least) / busy if rate > 0 and busy > 0 else 0.0 for rate, asked in both)

    whole = weights("closed")
    none = (0.0,) * len(mix)
    if any(whole):
        return TemplateWeights(whole, none, none)
    return TemplateWeights(whole, weights("prefill"), weights("decode"))


def _copy(
    template: Template, rates: Mapping[Phase, list[float] | None], count: int, buckets: int, rule: BalanceRule
) -> TemplateWeights:
    """The weights of one copy, from what all copies are sent."""
    result: dict[Phase, list[float]] = {phase: [0.0] * buckets for phase in PHASES}
    capacities = {bucket_capacity.bucket: bucket_capacity for bucket_capacity in template.capacity}
    uses: dict[tuple[Phase, int], float] = {}
    for phase, planned in rates.items():
        for bucket, rate in enumerate(planned or ()):
            if rate <= 0:
                continue
            capacity = _capacity(capacities.get(bucket), phase)
            result[phase][bucket] = rate / max(1, count)
            if capacity > 0:
                uses[phase, bucket] = rate / max(1, count) / capacity
    busy = sum(uses.values())
    for phase, weights in result.items():
        for bucket, weight in enumerate(weights):
            if weight > 0 and busy > 0 and rule.weights == "goodput" and (phase, bucket) in uses:
                weights[bucket] = weight / busy
            elif weight > 0 and rule.weights == "even":
                weights[bucket] = 1.0
    return TemplateWeights(tuple(result["closed"]), tuple(result["prefill"]), tuple(result["decode"]))


def _unplanned(template: Template, buckets: int, rule: BalanceRule) -> TemplateWeights:
    """A plan without shares, written by hand: whatever a template can do, it may be sent."""
    capacities = {bucket_capacity.bucket: bucket_capacity for bucket_capacity in template.capacity}

    def weights(phase: Phase) -> tuple[float, ...]:
        known = [_capacity(capacities.get(bucket), phase) for bucket in range(buckets)]
        return tuple([float(weight > 0) for weight in known] if rule.weights == "even" else known)

    return TemplateWeights(weights("closed"), weights("prefill"), weights("decode"))


def _capacity(capacity: BucketCapacity | None, phase: Phase) -> float:
    return 0.0 if capacity is None else float(getattr(capacity, f"{phase}_per_s"))


def _flows(plan: Plan, model: str, buckets: int) -> tuple[RegionFlow, ...]:
    rates: dict[Key, list[float]] = {}
    for flow in plan.flows:
        if flow.model == model and flow.bucket < buckets and flow.rate_per_s > 0:
            key = (flow.prefill_region, flow.decode_region)
            rates.setdefault(key, [0.0] * buckets)[flow.bucket] += flow.rate_per_s
    return tuple(RegionFlow(source, target, tuple(rates[source, target])) for source, target in rates)


@dataclass(frozen=True, slots=True)
class LengthThreshold:
    base_tokens: float  # Where the plan, or the long-term update, has it.
    tokens: float
    scarce: bool = True
    carried_gbps: float = inf  # By the link of late, at most.
