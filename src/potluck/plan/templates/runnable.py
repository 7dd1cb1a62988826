"""Which templates the problem's engine runs, and where only replicas of one tensor-parallel degree hand over.

Templates of one phase hand over to any others of their model. Where that works only between equal degrees, they are
made in one of them alone: that in which a request of the busiest bucket costs least on the best nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from potluck.core.values.engine_abilities import EngineKind, is_one_phase, limits_of_template
from potluck.core.values.model import LinearAttention, Model
from potluck.core.values.plan import Template
from potluck.plan.problem import ModelDemand, PlanningProblem


def runnable(problem: PlanningProblem, demand: ModelDemand, templates: Iterable[Template]) -> list[Template]:
    return [item for item in templates if not limits_of_template(item, demand.model, problem.engine)]


def equal_degrees(model: Model, engine: EngineKind) -> bool:
    """Whether only replicas of equal tensor-parallel degree hand KV over to each other."""
    hybrid = any(isinstance(layer.attention, LinearAttention) for layer in model.layers)
    return hybrid and not engine.states_over_degrees


def degree_of(template: Template) -> int:
    return template.replicas[0].layout.stages[0].nodes[0].tp


def of_one_degree(
    problem: PlanningProblem, demand: ModelDemand, templates: Sequence[Template]
) -> list[Template]:
    """Templates without those of one phase that the others of one phase could not hand over to."""
    if not equal_degrees(demand.model, problem.engine):
        return list(templates)
    apart = [template for template in templates if is_one_phase(template)]
    degrees = {degree_of(template) for template in apart}
    best = min(degrees, key=lambda degree: (_usd(problem, demand, apart, degree), -degree), default=0)
    return [item for item in templates if not is_one_phase(item) or degree_of(item) == best]


def _usd(
    problem: PlanningProblem, model_demand: ModelDemand, apart: Sequence[Template], degree: int
) -> float:
    """What both phases of a request cost by templates of a degree; infinite where one of them is missing."""
    prices = {o.node: o.price_usd_per_h for region in problem.regions for o in region.offers if o.available}
    bucket = max(model_demand.buckets, key=lambda demand: demand.rate_per_s).bucket
    mine = [template for template in apart if degree_of(template) == degree]
    total = 0.0
    for phase in ("prefill_per_s", "decode_per_s"):
        rated = [(template, getattr(template.capacity[bucket], phase)) for template in mine]
        costs = [
            sum(prices.get(item.node, 0.0) * item.count for item in template.nodes) / rate
            for template, rate in rated
            if rate > 0
        ]
        total += min(costs, default=float("inf"))
    return total


def phase_degree(problem: PlanningProblem, demand: ModelDemand, single: Sequence[Template]) -> int | None:
    """The degree that pipelines of one phase must have to go with these single nodes; None: any.

    Where the model fits on no single node, that of the largest.
    """
    if not equal_degrees(demand.model, problem.engine):
        return None
    degrees = {degree_of(template) for template in single if is_one_phase(template)}
    return max(degrees, default=max((node.gpus for node in problem.offered), default=1))
