"""Spread requests over a plan's copies so that none is busier than it must be.

Counts are fixed and, model by model, the largest t is found such that t times every bucket's demand fits, a linear
program. Its shares, divided by t, serve the planned demand with every bottleneck equally far from full.

PrfaaS sends long prompts to another region and keeps short ones (its 3.3). So of a plan of that strategy every length
is tried as the threshold, and the one with the largest t is taken (equation 7); where none serves the demand, or
length cannot tell, the plan stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from potluck.core.routing.template_weights import offers, planned
from potluck.core.values.plan import Plan, PlannedFlow, PlannedShare, Prediction
from potluck.core.values.service import NO_TERMS
from potluck.plan.allocate.highs import Deadline
from potluck.plan.allocate.program import DemandBucket
from potluck.plan.allocate.solve import all_served
from potluck.plan.assemble.columns import ProgramColumns, codecs_of, columns, plan_of
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.verify import verify

BY_LENGTH = "prfaas"

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
    for ask in problem.asks:
        most = _most(problem, plan, ask, time_limit_s, clock) if ask.rate_per_s > 0 else None
        times = 0.0 if most is None else most.fraction * MORE
        if most is None or times < 1:
            names = {template.name for template in plan.templates if template.model == ask.name}
            shares += [share for share in plan.shares if share.template in names]
            flows += [flow for flow in plan.flows if flow.model == ask.name]
            predictions += [prediction for prediction in plan.predictions if prediction.model == ask.name]
            continue
        shares += [replace(item, rate_per_s=item.rate_per_s / times) for item in most.shares]
        flows += [replace(item, rate_per_s=item.rate_per_s / times) for item in most.flows]
        predictions += [replace(prediction, demand_per_s=ask.rate_per_s) for prediction in most.predictions]
    better = replace(plan, shares=tuple(shares), flows=tuple(flows), predictions=tuple(predictions))
    return plan if verify(problem, better, rerouted=True) else better


def _most(
    problem: PlanningProblem, plan: Plan, ask: ModelDemand, time_limit_s: float, clock: Callable[[], float]
) -> Plan | None:
    """One model's copies, all busy; None where it has none."""
    templates = [template for template in plan.templates if template.model == ask.name]
    names = {template.name for template in templates}
    pins = tuple(deployment for deployment in plan.deployments if deployment.template in names)
    if not pins:
        return None
    held = replace(plan, deployments=pins).nodes
    demands = tuple(replace(demand, rate_per_s=demand.rate_per_s * MORE) for demand in ask.demands)
    alone = replace(
        problem.with_nodes(lambda region, offer: held.get((region, offer.node), 0)),
        asks=(replace(ask, demands=demands, terms=NO_TERMS),),
        budget_usd_per_h=None,
        init_penalty=0.0,
    )
    program_columns = columns(alone, {ask.name: templates}, pins=pins, exactly=True, codecs=codecs_of(plan))

    def best(one: ProgramColumns) -> Plan:
        return plan_of(one, all_served(one.program, Deadline(time_limit_s, clock)), plan.strategy)

    if plan.strategy == BY_LENGTH and _crosses(plan, ask.name):
        tried = [best(_divided(program_columns, plan, cut)) for cut in range(len(ask.demands))]
        able = [item for item in tried if item.fraction * MORE >= 1 and _told_by_length(item, ask.name)]
        if able:
            return max(able, key=lambda each: each.fraction)
    return best(program_columns)


def _crosses(plan: Plan, model: str) -> bool:
    return any(flow.model == model and flow.prefill_region != flow.decode_region for flow in plan.flows)


def _told_by_length(plan: Plan, model: str) -> bool:
    return planned(offers(plan, "fixed")[model]) is not None


def _divided(program_columns: ProgramColumns, plan: Plan, cut: int) -> ProgramColumns:
    """The program where buckets below the cut stay at home, and those above it go elsewhere if they can."""
    (model,) = program_columns.program.models
    regions = range(len(program_columns.program.fleet.regions))
    names = program_columns.program.fleet.regions
    away = frozenset((a, b) for a in regions for b in regions if a != b)
    targets = {flow.decode_region for flow in plan.flows if flow.prefill_region != flow.decode_region}
    home = frozenset((a, a) for a in regions if names[a] in targets)
    bars: Sequence[frozenset[tuple[int, int]]] = [
        away if place < cut else home if place > cut else frozenset() for place in range(len(model.buckets))
    ]
    buckets: tuple[DemandBucket, ...] = tuple(
        replace(bucket, barred=bucket.barred | more) for bucket, more in zip(model.buckets, bars, strict=True)
    )
    program = replace(program_columns.program, models=(replace(model, buckets=buckets),))
    return replace(program_columns, program=program)
