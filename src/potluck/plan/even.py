"""Spread requests over a plan's copies so that none is busier than it must be.

The program only asks that demand is met within the headroom, so where copies have time to spare, one may be full and
another idle; at equal cost it does not care. A burst does. Here counts are fixed and, model by model, the most that
its copies could serve is asked for: the largest t such that t times every bucket's demand fits, a linear program. Its
shares, divided by t, serve the planned demand with every bottleneck equally far from full.
"""

from __future__ import annotations

from dataclasses import replace

from potluck.core.values.plan import Flow, Plan, Prediction, Share
from potluck.plan.allocate.solve import solve
from potluck.plan.columns import codecs_of, columns, plan_of
from potluck.plan.problem import Ask, Problem
from potluck.plan.strategies.base import Settings
from potluck.plan.verify import verify

MORE = 64.0
"""Times the demand that is asked for: more than any plan's copies serve."""


def evened(problem: Problem, plan: Plan, settings: Settings) -> Plan:
    """The same copies at the same cost; the plan itself where nothing is gained, or its links would not carry it."""
    if plan.fraction < 1 or not plan.deployments:
        return plan
    shares: list[Share] = []
    flows: list[Flow] = []
    predictions: list[Prediction] = []
    for ask in problem.asks:
        most = _most(problem, plan, ask, settings) if ask.rate_per_s > 0 else None
        times = 0.0 if most is None else most.fraction * MORE
        if most is None or times < 1:
            names = {template.name for template in plan.templates if template.model == ask.name}
            shares += [share for share in plan.shares if share.template in names]
            flows += [flow for flow in plan.flows if flow.model == ask.name]
            predictions += [each for each in plan.predictions if each.model == ask.name]
            continue
        shares += [replace(each, rate_per_s=each.rate_per_s / times) for each in most.shares]
        flows += [replace(each, rate_per_s=each.rate_per_s / times) for each in most.flows]
        predictions += [replace(each, demand_per_s=ask.rate_per_s) for each in most.predictions]
    better = replace(plan, shares=tuple(shares), flows=tuple(flows), predictions=tuple(predictions))
    return plan if verify(problem, better) else better


def _most(problem: Problem, plan: Plan, ask: Ask, settings: Settings) -> Plan | None:
    """One model's copies, all busy; None where it has none."""
    templates = [template for template in plan.templates if template.model == ask.name]
    names = {template.name for template in templates}
    pins = tuple(deployment for deployment in plan.deployments if deployment.template in names)
    if not pins:
        return None
    held = replace(plan, deployments=pins).nodes
    regions = tuple(
        replace(r, offers=tuple(replace(o, available=held.get((r.name, o.node), 0)) for o in r.offers))
        for r in problem.regions
    )
    demands = tuple(replace(each, rate_per_s=each.rate_per_s * MORE) for each in ask.demands)
    alone = replace(
        problem,
        asks=(replace(ask, demands=demands),),
        regions=regions,
        budget_usd_per_h=None,
        init_penalty=0.0,
    )
    found = columns(alone, {ask.name: templates}, pins=pins, exactly=True, codecs=codecs_of(plan))
    answer = solve(found.program, time_limit_s=settings.time_limit_s, clock=settings.clock)
    return plan_of(found, answer, plan.strategy)
