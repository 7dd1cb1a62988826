"""Planning for another demand than the real one: a factor per model is its headroom, in one number.

A plan for f times a model's rate has f times the capacity, at the least cost. `restored` makes of it a plan for
the real rates again: the same nodes and copies, every share and flow divided by what was planned for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from potluck.core.values.plan import Plan, Prediction
from potluck.plan.problem import PlanningProblem

ROUNDING = 1e-9
Factors = Mapping[str, float]
"""Model to what its demand is multiplied by."""


def scaled(problem: PlanningProblem, factors: Factors) -> PlanningProblem:
    """The problem with each model's demand multiplied."""
    asks = []
    for ask in problem.asks:
        factor = factors.get(ask.name, 1.0)
        demands = tuple(replace(each, rate_per_s=each.rate_per_s * factor) for each in ask.demands)
        asks.append(replace(ask, demands=demands))
    return replace(problem, asks=tuple(asks))


def reached(plan: Plan, factors: Factors) -> dict[str, float]:
    """The factors that a plan really has capacity for: less than asked for where the fleet does not suffice."""
    return {model: factor * plan.fraction_of(model) for model, factor in factors.items()}


def restored(plan: Plan, problem: PlanningProblem, factors: Factors) -> Plan:
    """A plan for scaled demand as one for the problem's own: nothing is deployed differently.

    Where the fleet suffices for more than the real demand, all of it is served; where not, as much as before.
    """
    got = reached(plan, factors)
    shrink = {name: 1.0 / max(got[name], min(factor, 1.0)) for name, factor in factors.items()}
    model_of = {template.name: template.model for template in plan.templates}
    rates = {(d.model, d.bucket): d.rate_per_s for ask in problem.asks for d in ask.demands}
    asked = {ask.name: ask.rate_per_s for ask in problem.asks}
    fraction = min([1.0, *(got[name] * shrink[name] for name in factors)])
    return replace(
        plan,
        buckets=tuple(replace(b, rate_per_s=rates.get((b.model, b.bucket), 0.0)) for b in plan.buckets),
        shares=tuple(
            replace(s, rate_per_s=s.rate_per_s * shrink.get(model_of[s.template], 1.0)) for s in plan.shares
        ),
        flows=tuple(replace(f, rate_per_s=f.rate_per_s * shrink.get(f.model, 1.0)) for f in plan.flows),
        predictions=tuple(_expected(p, asked[p.model], shrink.get(p.model, 1.0)) for p in plan.predictions),
        fraction=1.0 if fraction > 1 - ROUNDING else fraction,
    )


def _expected(prediction: Prediction, demand_per_s: float, factor: float) -> Prediction:
    return replace(
        prediction,
        demand_per_s=demand_per_s,
        prompt_tokens_per_s=prediction.prompt_tokens_per_s * factor,
        answer_tokens_per_s=prediction.answer_tokens_per_s * factor,
    )


def assembled(parts: Mapping[str, Plan], problem: PlanningProblem) -> Plan:
    """One plan of several: of each plan just what it has for one model. Rates stay as planned there.

    Models share nodes and links, but no replica. Whether both suffice is for `plan.verify` to say.
    """
    names = [ask.name for ask in problem.asks if ask.name in parts]
    of = {name: {t.name: t for t in parts[name].templates if t.model == name} for name in names}
    return Plan(
        parts[names[0]].strategy,
        tuple(template for name in names for template in of[name].values()),
        tuple(d for name in names for d in parts[name].deployments if d.template in of[name]),
        tuple(bucket for name in names for bucket in parts[name].buckets if bucket.model == name),
        tuple(share for name in names for share in parts[name].shares if share.template in of[name]),
        tuple(flow for name in names for flow in parts[name].flows if flow.model == name),
        tuple(each for name in names for each in parts[name].predictions if each.model == name),
        sum(cost_by_model(parts[name], problem)[name] for name in names),
        max(parts[name].gap for name in names),
    )


def cost_by_model(plan: Plan, problem: PlanningProblem) -> dict[str, float]:
    """USD an hour of what is deployed for each model."""
    prices = {(r.name, o.node): o.price_usd_per_h for r in problem.regions for o in r.offers}
    found = {ask.name: 0.0 for ask in problem.asks}
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        each = sum(prices[deployment.region, node.node] * node.count for node in template.nodes)
        found[template.model] += each * deployment.count
    return found
