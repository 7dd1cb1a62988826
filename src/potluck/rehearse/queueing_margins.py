"""Plans for more demand than there is, parts of plans put together, and how many requests queueing makes late.

The formulas say, before anything is simulated, which plans are worth a trial.
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

ROUNDING = 1e-9
Factors = Mapping[str, float]  # Model to what its demand is multiplied by.


def scaled(problem: PlanningProblem, factors: Factors) -> PlanningProblem:
    demands = []
    for demand in problem.demands:
        factor = factors.get(demand.name, 1.0)
        buckets = tuple(replace(bucket, rate_per_s=bucket.rate_per_s * factor) for bucket in demand.buckets)
        demands.append(replace(demand, buckets=buckets))
    return replace(problem, demands=tuple(demands))


def reached(plan: Plan, factors: Factors) -> dict[str, float]:
    """The factors that a plan really has capacity for: less than asked for where the fleet does not suffice."""
    return {model: factor * plan.fraction_of(model) for model, factor in factors.items()}


def restored(plan: Plan, problem: PlanningProblem, factors: Factors) -> Plan:
    """A plan for scaled demand as one for the problem's own: the same nodes and copies, shares and flows divided.

    Where the fleet suffices for more than the real demand, all of it is served; where not, as much as before.
    """
    got = reached(plan, factors)
    shrink = {name: 1.0 / max(got[name], min(factor, 1.0)) for name, factor in factors.items()}
    model_of = {template.name: template.model for template in plan.templates}
    rates = {
        (bucket.model, bucket.bucket): bucket.rate_per_s
        for demand in problem.demands
        for bucket in demand.buckets
    }
    asked = {demand.name: demand.rate_per_s for demand in problem.demands}
    fraction = min([1.0, *(got[name] * shrink[name] for name in factors)])
    return replace(
        plan,
        buckets=tuple(replace(b, rate_per_s=rates.get((b.model, b.bucket), 0.0)) for b in plan.buckets),
        shares=tuple(
            replace(s, rate_per_s=s.rate_per_s * shrink.get(model_of[s.template], 1.0)) for s in plan.shares
        ),
        flows=tuple(replace(f, rate_per_s=f.rate_per_s * shrink.get(f.model, 1.0)) for f in plan.flows),
        predictions=tuple(
            replace(
                each,
                demand_per_s=asked[each.model],
                prompt_tokens_per_s=each.prompt_tokens_per_s * shrink.get(each.model, 1.0),
                answer_tokens_per_s=each.answer_tokens_per_s * shrink.get(each.model, 1.0),
            )
            for each in plan.predictions
        ),
        fraction=1.0 if fraction > 1 - ROUNDING else fraction,
    )


def assembled(parts: Mapping[str, Plan], problem: PlanningProblem) -> Plan:
    """One plan of several: of each plan just what it has for one model. Rates stay as planned there.

    Models share nodes and links, but no replica. Whether both suffice is for `plan.verify` to say.
    """
    own = {
        demand.name: parts[demand.name].of_models((demand.name,))
        for demand in problem.demands
        if demand.name in parts
    }
    plans = list(own.values())
    return Plan(
        plans[0].strategy,
        tuple(template for plan in plans for template in plan.templates),
        tuple(deployment for plan in plans for deployment in plan.deployments),
        tuple(bucket for plan in plans for bucket in plan.buckets),
        tuple(share for plan in plans for share in plan.shares),
        tuple(flow for plan in plans for flow in plan.flows),
        tuple(prediction for plan in plans for prediction in plan.predictions),
        sum(cost_by_model(plan, problem)[name] for name, plan in own.items()),
        max(plan.gap for plan in plans),
        min(plan.fraction for plan in plans),
        formats=tuple(item for name, plan in own.items() for item in plan.formats if item[0] == name),
        engine=plans[0].engine,
        thresholds=tuple(threshold for plan in plans for threshold in plan.thresholds),
        wires=plans[0].wires,
    )


def cost_by_model(plan: Plan, problem: PlanningProblem) -> dict[str, float]:
    prices = {(r.name, o.node): o.price_usd_per_h for r in problem.regions for o in r.offers}
    cost = {demand.name: 0.0 for demand in problem.demands}
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        total = sum(prices[deployment.region, node.node] * node.count for node in template.nodes)
        cost[template.model] += total * deployment.count
    return cost


SURE = 0.9  # Of what a promise leaves open, the part that chance may take: the model is not exact.


BESIDE, APART = 2.0, 0.6  # g of prompts that are computed beside answers, and of those apart from them.
LEAST_LEFT = 0.02  # Of TTFT, what is reckoned to be left where a request's own time takes all.
MOST_BUSY = 0.999
NORMAL = NormalDist()
Phase = Literal["closed", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("closed", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class DeploymentQueue:
    """What requests of one model wait for: one deployment, in one phase.

    A queue is before what one deployment does in one phase: n copies of r replicas, busy a share u of the time. Gaps
    between arrivals have a coefficient of variation c, and work per request varies with its length, by v (squared
    coefficient of variation). Requests are late that find

        answers  no room: N places, a = u N taken on average. With peakedness z = 1 + (c^2 - 1) / 2 these are
                  1 / (1 + b F(b) / f(b)),  b = (1 - u) sqrt(N / z)      (Halfin and Whitt; F, f: the normal law)
                  and a share exp(-(N - a) w / (z H)) of them waits for longer than TTFT allows; H: an answer's time
        prompts  too many before them: u^(sqrt(2 (k + 1)) - 1) exp(-g k (1 - u) w / (S V))  (Sakasegawa, Kingman)
                  k = n r servers, S: seconds of one for a request, V = (c^2 + v) / 2; beside answers S is at most
                  the time of a prompt, and u what that takes

    w is what TTFT leaves beside a request's own time. g is fitted to simulations (docs/planning.md has the table),
    once for prompts that are computed apart and once for those beside answers.
    """

    phase: Phase
    servers: int  # Copies times replicas of each.
    busy: float
    service_s: float  # Of one server, for a mean request.
    spread: float  # Squared coefficient of variation of that.
    answer_s: float
    answers: float
    own_s: float  # TTFT of a request that finds nobody before it.
    share: float  # Of the model's requests.


def late(
    problem: PlanningProblem, plan: Plan, cv: float = 1.0, headroom: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Model to the share of its requests that is expected to be late. `headroom` divides how busy they are."""
    result = {}
    for demand in problem.demands:
        if demand.rate_per_s > 0:
            less = (headroom or {}).get(demand.name, 1.0)
            queues = tuple(queues_of(problem, plan, demand))
            result[demand.name] = min(
                1.0, sum(queue.share * _late(queue, demand, cv, less) for queue in queues)
            )
    return result


def queues_of(problem: PlanningProblem, plan: Plan, demand: ModelDemand) -> Iterator[DeploymentQueue]:
    demands = {bucket.bucket: bucket for bucket in demand.buckets}
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        if template.model != demand.name:
            continue
        capacity = {each.bucket: each for each in template.capacity}
        for phase in PHASES:
            shares = _shares(plan, deployment, phase)
            rate = sum(shares.values())
            if not rate > 0 or any(_rate(capacity[bucket], phase) <= 0 for bucket in shares):
                continue
            times = {bucket: 1.0 / _rate(capacity[bucket], phase) for bucket in shares}
            mean_s = sum(r * times[b] for b, r in shares.items()) / rate
            square = sum(r * times[b] ** 2 for b, r in shares.items()) / rate
            answer_s = sum(r * demands[b].output_tokens * capacity[b].tpot_s for b, r in shares.items())
            own_s = sum(r * capacity[b].ttft_s for b, r in shares.items()) / rate
            replicas = len(template.replicas)
            yield DeploymentQueue(
                phase,
                deployment.count * replicas,
                rate * mean_s / deployment.count,
                mean_s * replicas,
                max(0.0, square / mean_s**2 - 1.0),
                answer_s / rate,
                answer_s,
                # Plans reckon with a mean queue where prompts are computed apart.
                own_s - (wait_factor(problem.headroom) - 1.0) * mean_s if phase == "prefill" else own_s,
                rate / demand.rate_per_s,
            )


def _shares(plan: Plan, deployment: Deployment, phase: str) -> dict[int, float]:
    where = (deployment.template, deployment.region, phase)
    return {
        share.bucket: share.rate_per_s
        for share in plan.shares
        if (share.template, share.region, share.phase) == where and share.rate_per_s > 0
    }


def _rate(capacity: BucketCapacity, phase: str) -> float:
    if phase == "closed":
        return capacity.closed_per_s
    return capacity.prefill_per_s if phase == "prefill" else capacity.decode_per_s


def _late(queue: DeploymentQueue, demand: ModelDemand, cv: float, headroom: float) -> float:
    busy, ttft_s = min(queue.busy / headroom, MOST_BUSY), demand.slo.ttft_s
    kept = 1.0
    if queue.phase != "prefill" and queue.answers > 0:
        peaked = 1.0 + max(0.0, cv * cv - 1.0) / 2.0
        room = max(queue.answers / busy, 1.0)
        left_s = max(ttft_s - queue.own_s, LEAST_LEFT * ttft_s)
        waits = exp(-max(0.0, room - queue.answers) * left_s / (peaked * queue.answer_s))
        kept *= 1.0 - _no_room(room, busy, peaked) * waits
    if queue.phase != "decode":
        apart = queue.phase == "prefill"
        left_s = max(ttft_s * (1.0 - HANDOVER_SHARE * apart) - queue.own_s, LEAST_LEFT * ttft_s)
        vary = max((cv * cv + queue.spread) / 2.0, 1e-3)
        service_s = queue.service_s
        if not apart and queue.own_s < service_s:
            service_s, busy = queue.own_s, busy * queue.own_s / service_s
        waits = busy ** (sqrt(2.0 * (queue.servers + 1)) - 1.0)
        rate = (APART if apart else BESIDE) * queue.servers * (1.0 - busy) / (service_s * vary)
        kept *= 1.0 - waits * exp(-rate * left_s)
    return 1.0 - kept


def _no_room(room: float, busy: float, peaked: float) -> float:
    b = (1.0 - busy) * sqrt(room / peaked)
    return 0.0 if b > 8 else 1.0 / (1.0 + b * NORMAL.cdf(b) / NORMAL.pdf(b))
