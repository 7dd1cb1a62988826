"""Plans for scaled demand, plans combined from parts, and queueing estimates of the share of late requests.

The estimates choose, before anything is simulated, which plans are worth a simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp, sqrt
from statistics import NormalDist
from typing import Literal

from potluck.core.values.plan import BucketCapacity, Deployment, Plan
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.timing.replica_rates import HANDOVER_SHARE, wait_factor

ROUNDING_TOLERANCE = 1e-9
Factors = Mapping[str, float]  # Model to the factor on its demand.


def scaled(problem: PlanningProblem, factors: Factors) -> PlanningProblem:
    """The problem with each model's demand multiplied by its factor."""
    demands = []
    for demand in problem.demands:
        factor = factors.get(demand.name, 1.0)
        buckets = tuple(replace(bucket, rate_per_s=bucket.rate_per_s * factor) for bucket in demand.buckets)
        demands.append(replace(demand, buckets=buckets))
    return replace(problem, demands=tuple(demands))


def reached(plan: Plan, factors: Factors) -> dict[str, float]:
    """The factors that a plan has capacity for: less than planned for where the fleet does not suffice."""
    return {model: factor * plan.fraction_of(model) for model, factor in factors.items()}


def restored(plan: Plan, problem: PlanningProblem, factors: Factors) -> Plan:
    """A plan for scaled demand, converted to the problem's own: the same copies, with shares and flows scaled down.

    It serves all of the real demand where the fleet suffices for more, else as much as before.
    """
    reached_factors = reached(plan, factors)
    rate_factors = {
        name: 1.0 / max(reached_factors[name], min(factor, 1.0)) for name, factor in factors.items()
    }
    model_of = {template.name: template.model for template in plan.templates}
    rates = {
        (bucket.model, bucket.bucket): bucket.rate_per_s
        for demand in problem.demands
        for bucket in demand.buckets
    }
    demand_rates = {demand.name: demand.rate_per_s for demand in problem.demands}
    fraction = min([1.0, *(reached_factors[name] * rate_factors[name] for name in factors)])
    return replace(
        plan,
        buckets=tuple(replace(b, rate_per_s=rates.get((b.model, b.bucket), 0.0)) for b in plan.buckets),
        shares=tuple(
            replace(s, rate_per_s=s.rate_per_s * rate_factors.get(model_of[s.template], 1.0))
            for s in plan.shares
        ),
        flows=tuple(replace(f, rate_per_s=f.rate_per_s * rate_factors.get(f.model, 1.0)) for f in plan.flows),
        predictions=tuple(
            replace(
                each,
                demand_per_s=demand_rates[each.model],
                prompt_tokens_per_s=each.prompt_tokens_per_s * rate_factors.get(each.model, 1.0),
                answer_tokens_per_s=each.answer_tokens_per_s * rate_factors.get(each.model, 1.0),
            )
            for each in plan.predictions
        ),
        fraction=1.0 if fraction > 1 - ROUNDING_TOLERANCE else fraction,
    )


def assembled(parts: Mapping[str, Plan], problem: PlanningProblem) -> Plan:
    """One plan that combines each model's part of its own plan, with the rates planned there.

    Models share nodes and links, but no replica. `plan.verify` checks whether nodes and links suffice.
    """
    plans_by_model = {
        demand.name: parts[demand.name].of_models((demand.name,))
        for demand in problem.demands
        if demand.name in parts
    }
    plans = list(plans_by_model.values())
    return Plan(
        plans[0].strategy,
        tuple(template for plan in plans for template in plan.templates),
        tuple(deployment for plan in plans for deployment in plan.deployments),
        tuple(bucket for plan in plans for bucket in plan.buckets),
        tuple(share for plan in plans for share in plan.shares),
        tuple(flow for plan in plans for flow in plan.flows),
        tuple(prediction for plan in plans for prediction in plan.predictions),
        sum(cost_by_model(plan, problem)[name] for name, plan in plans_by_model.items()),
        max(plan.gap for plan in plans),
        min(plan.fraction for plan in plans),
        formats=tuple(
            item for name, plan in plans_by_model.items() for item in plan.formats if item[0] == name
        ),
        engine=plans[0].engine,
        thresholds=tuple(threshold for plan in plans for threshold in plan.thresholds),
        wires=plans[0].wires,
    )


def cost_by_model(plan: Plan, problem: PlanningProblem) -> dict[str, float]:
    """List price per hour of the nodes that each model uses."""
    prices = {(r.name, o.node): o.price_usd_per_h for r in problem.regions for o in r.offers}
    cost = {demand.name: 0.0 for demand in problem.demands}
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        copy_usd_per_h = sum(prices[deployment.region, node.node] * node.count for node in template.nodes)
        cost[template.model] += copy_usd_per_h * deployment.count
    return cost


ALLOWED_LATE_SHARE = 0.9  # Part of the allowed misses that queueing may use, as the estimate is not exact.


G_MIXED, G_PREFILL = 2.0, 0.6  # g of prompts on mixed replicas, and on prefill replicas.
MIN_SLACK_SHARE = 0.02  # Of TTFT: least time for queueing assumed where service alone takes all of it.
MAX_UTILIZATION = 0.999
NORMAL = NormalDist()
Phase = Literal["closed", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("closed", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class DeploymentQueue:
    """The queue of one deployment in one phase, for requests of one model.

    A deployment has n copies of r replicas with utilization u. Gaps between arrivals have a coefficient of variation
    c, and the work per request has a squared coefficient of variation v. Requests are late when they find

        answers  all N places taken, of which a = u N are on average. With peakedness z = 1 + (c^2 - 1) / 2 these are
                  1 / (1 + b F(b) / f(b)),  b = (1 - u) sqrt(N / z)      (Halfin and Whitt; F, f: the normal law)
                  and a share exp(-(N - a) w / (z H)) of them waits longer than TTFT allows; H: duration of an answer
        prompts  too long a queue:  u^(sqrt(2 (k + 1)) - 1) exp(-g k (1 - u) w / (S V))  (Sakasegawa, Kingman)
                  k = n r servers, S: service time, V = (c^2 + v) / 2; on mixed replicas S is at most the
                  prefill time, with the utilization that this causes

    w is the part of TTFT left for queueing. g is fitted to simulations (table in docs/planning.md), separately for
    prefill replicas and mixed ones.
    """

    phase: Phase
    servers: int  # Copies times replicas of each.
    busy: float
    service_s: float  # Of one server, for a mean request.
    spread: float  # Squared coefficient of variation of that.
    answer_s: float
    answers: float
    own_s: float  # TTFT of a request that does not queue.
    share: float  # Of the model's requests.


def late(
    problem: PlanningProblem, plan: Plan, cv: float = 1.0, headroom: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The expected share of late requests of each model. `headroom` divides the utilization."""
    result = {}
    for demand in problem.demands:
        if demand.rate_per_s > 0:
            utilization_divisor = (headroom or {}).get(demand.name, 1.0)
            queues = tuple(queues_of(problem, plan, demand))
            result[demand.name] = min(
                1.0,
                sum(queue.share * _late_share(queue, demand, cv, utilization_divisor) for queue in queues),
            )
    return result


def queues_of(problem: PlanningProblem, plan: Plan, demand: ModelDemand) -> Iterator[DeploymentQueue]:
    """The queues of a model: one for each deployment and phase with requests."""
    buckets = {bucket.bucket: bucket for bucket in demand.buckets}
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        if template.model != demand.name:
            continue
        capacity = {bucket_capacity.bucket: bucket_capacity for bucket_capacity in template.capacity}
        for phase in PHASES:
            shares = _shares(plan, deployment, phase)
            rate = sum(shares.values())
            if not rate > 0 or any(_rate(capacity[bucket], phase) <= 0 for bucket in shares):
                continue
            service_s = {bucket: 1.0 / _rate(capacity[bucket], phase) for bucket in shares}
            mean_s = sum(r * service_s[b] for b, r in shares.items()) / rate
            mean_square_s2 = sum(r * service_s[b] ** 2 for b, r in shares.items()) / rate
            answer_s = sum(r * buckets[b].output_tokens * capacity[b].tpot_s for b, r in shares.items())
            own_s = sum(r * capacity[b].ttft_s for b, r in shares.items()) / rate
            replicas = len(template.replicas)
            yield DeploymentQueue(
                phase,
                deployment.count * replicas,
                rate * mean_s / deployment.count,
                mean_s * replicas,
                max(0.0, mean_square_s2 / mean_s**2 - 1.0),
                answer_s / rate,
                answer_s,
                # On prefill replicas the planned TTFT includes a mean queue.
                own_s - (wait_factor(problem.headroom) - 1.0) * mean_s if phase == "prefill" else own_s,
                rate / demand.rate_per_s,
            )


def _shares(plan: Plan, deployment: Deployment, phase: str) -> dict[int, float]:
    """Requests/s by bucket of a deployment in one phase."""
    key = (deployment.template, deployment.region, phase)
    return {
        share.bucket: share.rate_per_s
        for share in plan.shares
        if (share.template, share.region, share.phase) == key and share.rate_per_s > 0
    }


def _rate(capacity: BucketCapacity, phase: str) -> float:
    if phase == "closed":
        return capacity.closed_per_s
    return capacity.prefill_per_s if phase == "prefill" else capacity.decode_per_s


def _late_share(queue: DeploymentQueue, demand: ModelDemand, cv: float, headroom: float) -> float:
    """The share of a queue's requests that are late, by the formulas of `DeploymentQueue`."""
    utilization, ttft_s = min(queue.busy / headroom, MAX_UTILIZATION), demand.slo.ttft_s
    on_time_share = 1.0
    if queue.phase != "prefill" and queue.answers > 0:
        peakedness = 1.0 + max(0.0, cv * cv - 1.0) / 2.0
        places = max(queue.answers / utilization, 1.0)
        slack_s = max(ttft_s - queue.own_s, MIN_SLACK_SHARE * ttft_s)
        waiting_share = exp(-max(0.0, places - queue.answers) * slack_s / (peakedness * queue.answer_s))
        on_time_share *= 1.0 - _all_places_taken(places, utilization, peakedness) * waiting_share
    if queue.phase != "decode":
        is_prefill = queue.phase == "prefill"
        slack_s = max(ttft_s * (1.0 - HANDOVER_SHARE * is_prefill) - queue.own_s, MIN_SLACK_SHARE * ttft_s)
        variability = max((cv * cv + queue.spread) / 2.0, 1e-3)
        service_s = queue.service_s
        if not is_prefill and queue.own_s < service_s:
            service_s, utilization = queue.own_s, utilization * queue.own_s / service_s
        waiting_share = utilization ** (sqrt(2.0 * (queue.servers + 1)) - 1.0)
        decay_per_s = (
            (G_PREFILL if is_prefill else G_MIXED)
            * queue.servers
            * (1.0 - utilization)
            / (service_s * variability)
        )
        on_time_share *= 1.0 - waiting_share * exp(-decay_per_s * slack_s)
    return 1.0 - on_time_share


def _all_places_taken(places: float, utilization: float, peakedness: float) -> float:
    """Probability that all places are taken (Halfin and Whitt)."""
    b = (1.0 - utilization) * sqrt(places / peakedness)
    return 0.0 if b > 8 else 1.0 / (1.0 + b * NORMAL.cdf(b) / NORMAL.pdf(b))
