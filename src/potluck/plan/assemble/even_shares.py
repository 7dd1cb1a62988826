"""Balance a plan's requests over its copies so that all bottlenecks have the same utilization.

With the counts fixed, a linear program finds for each model the largest t such that t times every bucket's demand
fits. Its shares, divided by t, serve the planned demand with every bottleneck equally far from full.

Where long prompts are prefilled in another region, the length threshold is free too: it settles where both regions
are equally utilized (PrfaaS's equation 7).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from potluck.core.values.plan import Plan, PlannedFlow, PlannedShare, Prediction
from potluck.core.values.service import NO_TERMS
from potluck.plan.allocate.highs import Deadline
from potluck.plan.allocate.solve import largest_service
from potluck.plan.assemble.columns import codecs_of, columns, plan_of, thresholds_of
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.verify import verify

DEMAND_FACTOR = 64.0  # Factor on the demand in the linear program; no plan's copies serve as much.


def balance_load(
    problem: PlanningProblem,
    plan: Plan,
    time_limit_s: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
) -> Plan:
    """The same copies with balanced shares; the plan itself where it is short, or the result fails `verify`."""
    if plan.fraction < 1 or not plan.deployments:
        return plan
    shares: list[PlannedShare] = []
    flows: list[PlannedFlow] = []
    predictions: list[Prediction] = []
    for demand in problem.demands:
        saturated = (
            _saturated_plan(problem, plan, demand, time_limit_s, clock) if demand.rate_per_s > 0 else None
        )
        factor = 0.0 if saturated is None else saturated.fraction * DEMAND_FACTOR
        if saturated is None or factor < 1:
            names = {template.name for template in plan.templates if template.model == demand.name}
            shares += [share for share in plan.shares if share.template in names]
            flows += [flow for flow in plan.flows if flow.model == demand.name]
            predictions += [prediction for prediction in plan.predictions if prediction.model == demand.name]
            continue
        shares += [replace(item, rate_per_s=item.rate_per_s / factor) for item in saturated.shares]
        flows += [replace(item, rate_per_s=item.rate_per_s / factor) for item in saturated.flows]
        predictions += [
            replace(prediction, demand_per_s=demand.rate_per_s) for prediction in saturated.predictions
        ]
    balanced = replace(plan, shares=tuple(shares), flows=tuple(flows), predictions=tuple(predictions))
    balanced = replace(balanced, thresholds=thresholds_of(balanced))
    return plan if verify(problem, balanced, rerouted=True) else balanced


def _saturated_plan(
    problem: PlanningProblem,
    plan: Plan,
    demand: ModelDemand,
    time_limit_s: float,
    clock: Callable[[], float],
) -> Plan | None:
    """The plan of one model at the largest demand that its copies can serve; None where it has no copies."""
    templates = [template for template in plan.templates if template.model == demand.name]
    names = {template.name for template in templates}
    pins = tuple(deployment for deployment in plan.deployments if deployment.template in names)
    if not pins:
        return None
    nodes = replace(plan, deployments=pins).nodes
    buckets = tuple(
        replace(bucket, rate_per_s=bucket.rate_per_s * DEMAND_FACTOR) for bucket in demand.buckets
    )
    model_problem = replace(
        problem.with_nodes(lambda region, offer: nodes.get((region, offer.node), 0)),
        demands=(replace(demand, buckets=buckets, terms=NO_TERMS),),
        budget_usd_per_h=None,
        init_penalty=0.0,
    )
    program_columns = columns(
        model_problem, {demand.name: templates}, pins=pins, exactly=True, codecs=codecs_of(plan)
    )

    return plan_of(
        program_columns,
        largest_service(program_columns.program, Deadline(time_limit_s, clock)),
        plan.strategy,
    )
