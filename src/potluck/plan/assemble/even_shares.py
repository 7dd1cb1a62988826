"""Spread requests over a plan's copies so that none is busier than it must be.

Counts are fixed and, model by model, the largest t is found such that t times every bucket's demand fits, a linear
program. Its shares, divided by t, serve the planned demand with every bottleneck equally far from full.

Where long prompts are prefilled in another region, the length from which on they are is free too: it ends up where
both sides are equally full (PrfaaS's equation 7).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from potluck.core.values.plan import Plan, PlannedFlow, PlannedShare, Prediction
from potluck.core.values.service import NO_TERMS
from potluck.plan.allocate.highs import Deadline
from potluck.plan.allocate.solve import all_served
from potluck.plan.assemble.columns import codecs_of, columns, plan_of, thresholds_of
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.verify import verify

MORE = 64.0  # Times the demand that is asked for: more than any plan's copies serve.


def evened(
    problem: PlanningProblem,
    plan: Plan,
    time_limit_s: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
) -> Plan:
    """The same copies at the same cost; the plan itself where nothing is gained, or its links would not carry it."""
    if plan.fraction < 1 or not plan.deployments:
        return plan
    shares: list[PlannedShare] = []
    flows: list[PlannedFlow] = []
    predictions: list[Prediction] = []
    for demand in problem.asks:
        most = _most(problem, plan, demand, time_limit_s, clock) if demand.rate_per_s > 0 else None
        times = 0.0 if most is None else most.fraction * MORE
        if most is None or times < 1:
            names = {template.name for template in plan.templates if template.model == demand.name}
            shares += [share for share in plan.shares if share.template in names]
            flows += [flow for flow in plan.flows if flow.model == demand.name]
            predictions += [prediction for prediction in plan.predictions if prediction.model == demand.name]
            continue
        shares += [replace(item, rate_per_s=item.rate_per_s / times) for item in most.shares]
        flows += [replace(item, rate_per_s=item.rate_per_s / times) for item in most.flows]
        predictions += [
            replace(prediction, demand_per_s=demand.rate_per_s) for prediction in most.predictions
        ]
    better = replace(plan, shares=tuple(shares), flows=tuple(flows), predictions=tuple(predictions))
    better = replace(better, thresholds=thresholds_of(better))
    return plan if verify(problem, better, rerouted=True) else better


def _most(
    problem: PlanningProblem,
    plan: Plan,
    model_demand: ModelDemand,
    time_limit_s: float,
    clock: Callable[[], float],
) -> Plan | None:
    """One model's copies, all busy; None where it has none."""
    templates = [template for template in plan.templates if template.model == model_demand.name]
    names = {template.name for template in templates}
    pins = tuple(deployment for deployment in plan.deployments if deployment.template in names)
    if not pins:
        return None
    held = replace(plan, deployments=pins).nodes
    demands = tuple(replace(demand, rate_per_s=demand.rate_per_s * MORE) for demand in model_demand.demands)
    alone = replace(
        problem.with_nodes(lambda region, offer: held.get((region, offer.node), 0)),
        asks=(replace(model_demand, demands=demands, terms=NO_TERMS),),
        budget_usd_per_h=None,
        init_penalty=0.0,
    )
    program_columns = columns(
        alone, {model_demand.name: templates}, pins=pins, exactly=True, codecs=codecs_of(plan)
    )

    return plan_of(
        program_columns, all_served(program_columns.program, Deadline(time_limit_s, clock)), plan.strategy
    )
