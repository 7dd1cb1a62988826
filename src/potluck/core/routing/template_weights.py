"""Routing weights from a plan: how much of each bucket one copy of each template takes, by phase.

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
TemplateKey = tuple[str, str]  # (template, region)
REMOTE_COPY_WEIGHT = 0.05
"""Weight of a copy in another region: it gets requests once local copies have about twenty times its load."""


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
    copies: Mapping[TemplateKey, TemplateWeights]
    flows: tuple[RegionFlow, ...]
    spare: Mapping[str, TemplateWeights] = field(default_factory=dict)
    """Weights of copies that the plan has nowhere or not in that region; scaling may start them."""

    def copy(self, key: TemplateKey) -> TemplateWeights | None:
        template_weights = self.copies.get(key)
        return self.spare.get(key[0]) if template_weights is None else template_weights

    def bucket(self, prompt_tokens: float) -> int:
        return min(bisect_left(self.longest_tokens, prompt_tokens), len(self.longest_tokens) - 1)


def model_weights(plan: Plan, balance: str) -> dict[str, ModelWeights]:
    rule = balance_rule(balance)
    models = dict.fromkeys(template.model for template in plan.templates)
    return {model: _model_weights(plan, model, rule) for model in models}


def prefer_region(model: ModelWeights, home: str) -> ModelWeights:
    """A gateway's view from its own region: what the plan serves in the region stays there while it can. Copies
    elsewhere that serve whole requests get a small weight beside local ones, and none beside flows into the
    region."""
    zeros = (0.0,) * len(model.longest_tokens)
    local_closed_rates = zip(
        zeros, *(copy.closed for (_, region), copy in model.copies.items() if region == home), strict=True
    )
    local_flow_rates = zip(
        zeros, *(flow.rates_per_s for flow in model.flows if flow.target == home), strict=True
    )
    remote_factors = [
        (REMOTE_COPY_WEIGHT, 0.0) if max(closed_rates) else (float(not max(region_flows)),) * 2
        for closed_rates, region_flows in zip(local_closed_rates, local_flow_rates, strict=True)
    ]  # Per bucket: (factor for remote copies, factor for remote flows).

    def scale_remote(region: str, weights: tuple[float, ...], factor_index: int) -> tuple[float, ...]:
        return (
            weights
            if region == home
            else tuple(
                weight * factors[factor_index]
                for weight, factors in zip(weights, remote_factors, strict=True)
            )
        )

    copies = {
        key: replace(item, closed=scale_remote(key[1], item.closed, 0)) for key, item in model.copies.items()
    }
    region_flows = tuple(
        replace(item, rates_per_s=scale_remote(item.target, item.rates_per_s, 1)) for item in model.flows
    )
    return replace(model, copies=copies, flows=region_flows)


def merge_weights(
    new_weights: ModelWeights, old_weights: ModelWeights, live: Collection[TemplateKey]
) -> ModelWeights:
    """The new plan's weights, and the old plan's for live copies that the new one lacks, matched by longest
    prompt."""
    unplanned_weights = {
        key: template_weights
        for key in sorted(live)
        if key not in new_weights.copies and (template_weights := old_weights.copy(key)) is not None
    }
    if not unplanned_weights:
        return new_weights
    old_buckets = [old_weights.bucket(tokens) for tokens in new_weights.longest_tokens]
    copies = dict(new_weights.copies)
    for key, template_weights in unplanned_weights.items():
        copies[key] = TemplateWeights(
            *(tuple(template_weights.weights(phase)[bucket] for bucket in old_buckets) for phase in PHASES)
        )
    new_flows = {(flow.source, flow.target) for flow in new_weights.flows}
    regions = {region for _, region in unplanned_weights}
    flows = [
        RegionFlow(flow.source, flow.target, tuple(flow.rates_per_s[bucket] for bucket in old_buckets))
        for flow in old_weights.flows
        if (flow.source, flow.target) not in new_flows and {flow.source, flow.target} & regions
    ]
    return replace(new_weights, copies=copies, flows=new_weights.flows + tuple(flows))


def _model_weights(plan: Plan, model: str, rule: BalanceRule) -> ModelWeights:
    buckets = sorted(
        (bucket for bucket in plan.buckets if bucket.model == model), key=lambda bucket: bucket.bucket
    )
    longest = (*(float(bucket.longest_tokens) for bucket in buckets[:-1]), inf)
    templates = {template.name: template for template in plan.templates if template.model == model}
    rates: dict[tuple[TemplateKey, Phase], list[float]] = {}
    for share in plan.shares:
        if share.template in templates and share.bucket < len(longest):
            key: tuple[TemplateKey, Phase] = ((share.template, share.region), share.phase)
            rates.setdefault(key, [0.0] * len(longest))[share.bucket] += share.rate_per_s
    counts: Counter[TemplateKey] = Counter()
    for deployment in plan.deployments:
        if deployment.template in templates:
            counts[deployment.template, deployment.region] += deployment.count
    for placement, _ in rates:
        counts.setdefault(placement, 1)
    copies = {
        key: _copy_weights(
            templates[key[0]], {phase: rates.get((key, phase)) for phase in PHASES}, count, len(longest), rule
        )
        if rates
        else _capacity_weights(templates[key[0]], len(longest), rule)
        for key, count in counts.items()
    }
    spare = {}
    if plan.candidates:
        bucket_rates = [bucket.rate_per_s for bucket in buckets] or [1.0]
        templates_of_model = [item for item in plan.repertoire if item.model == model and not item.machines]
        spare = {
            item.name: _unplanned_copy_weights(
                item, bucket_rates if any(bucket_rates) else [1.0] * len(bucket_rates), rule
            )
            for item in templates_of_model
        }
    return ModelWeights(model, longest, copies, _flows(plan, model, len(longest)), spare)


def _unplanned_copy_weights(template: Template, mix: Sequence[float], rule: BalanceRule) -> TemplateWeights:
    """Weights of a copy that the plan does not have: every bucket b it can serve, m_b / (sum of m / C), with m the
    traffic mix."""
    capacities = {bucket_capacity.bucket: bucket_capacity for bucket_capacity in template.capacity}

    def weights(phase: Phase) -> tuple[float, ...]:
        capacities_per_s = [_capacity(capacities.get(bucket), phase) for bucket in range(len(mix))]
        busy_time = 0.0
        for rate, demand in zip(capacities_per_s, mix, strict=True):
            busy_time += demand / rate if rate > 0 else 0.0
        if rule.weights == "even":
            return tuple(float(rate > 0) for rate in capacities_per_s)
        # A bucket without planned demand gets the least weight, so that its requests have a target.
        least_demand = min(demand for demand in mix if demand > 0)
        rates_and_demands = zip(capacities_per_s, mix, strict=True)
        return tuple(
            max(demand, least_demand) / busy_time if rate > 0 and busy_time > 0 else 0.0
            for rate, demand in rates_and_demands
        )

    closed = weights("closed")
    zeros = (0.0,) * len(mix)
    if any(closed):
        return TemplateWeights(closed, zeros, zeros)
    return TemplateWeights(closed, weights("prefill"), weights("decode"))


def _copy_weights(
    template: Template, rates: Mapping[Phase, list[float] | None], count: int, buckets: int, rule: BalanceRule
) -> TemplateWeights:
    """The weights of one copy, from the planned rates of all copies."""
    result: dict[Phase, list[float]] = {phase: [0.0] * buckets for phase in PHASES}
    capacities = {bucket_capacity.bucket: bucket_capacity for bucket_capacity in template.capacity}
    time_shares: dict[tuple[Phase, int], float] = {}
    for phase, planned_rates in rates.items():
        for bucket, rate in enumerate(planned_rates or ()):
            if rate <= 0:
                continue
            capacity = _capacity(capacities.get(bucket), phase)
            result[phase][bucket] = rate / max(1, count)
            if capacity > 0:
                time_shares[phase, bucket] = rate / max(1, count) / capacity
    busy_time = sum(time_shares.values())
    for phase, weights in result.items():
        for bucket, weight in enumerate(weights):
            if weight > 0 and busy_time > 0 and rule.weights == "goodput" and (phase, bucket) in time_shares:
                weights[bucket] = weight / busy_time
            elif weight > 0 and rule.weights == "even":
                weights[bucket] = 1.0
    return TemplateWeights(tuple(result["closed"]), tuple(result["prefill"]), tuple(result["decode"]))


def _capacity_weights(template: Template, buckets: int, rule: BalanceRule) -> TemplateWeights:
    """Weights for a plan without shares (written by hand): every bucket that the template can serve."""
    capacities = {bucket_capacity.bucket: bucket_capacity for bucket_capacity in template.capacity}

    def weights(phase: Phase) -> tuple[float, ...]:
        capacities_per_s = [_capacity(capacities.get(bucket), phase) for bucket in range(buckets)]
        return tuple(
            [float(weight > 0) for weight in capacities_per_s] if rule.weights == "even" else capacities_per_s
        )

    return TemplateWeights(weights("closed"), weights("prefill"), weights("decode"))


def _capacity(capacity: BucketCapacity | None, phase: Phase) -> float:
    return 0.0 if capacity is None else float(getattr(capacity, f"{phase}_per_s"))


def _flows(plan: Plan, model: str, buckets: int) -> tuple[RegionFlow, ...]:
    rates: dict[TemplateKey, list[float]] = {}
    for flow in plan.flows:
        if flow.model == model and flow.bucket < buckets and flow.rate_per_s > 0:
            key = (flow.prefill_region, flow.decode_region)
            rates.setdefault(key, [0.0] * buckets)[flow.bucket] += flow.rate_per_s
    return tuple(RegionFlow(source, target, tuple(rates[source, target])) for source, target in rates)


@dataclass(frozen=True, slots=True)
class LengthThreshold:
    base_tokens: float  # Set by the plan or the long-term update.
    tokens: float
    scarce: bool = True
    carried_gbps: float = inf  # Highest rate that the link carried recently.
