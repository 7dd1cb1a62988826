"""Filter templates by the engine's abilities, and by tensor-parallel degree where KV transfer needs equal degrees.

Single-phase templates may transfer KV to any others of their model. Where that needs equal degrees, only one degree
is kept: the one in which a request of the busiest bucket costs least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from potluck.core.values.engine_abilities import EngineKind, is_one_phase, limits_of_template
from potluck.core.values.model import LinearAttention, Model
from potluck.core.values.plan import Template
from potluck.plan.problem import ModelDemand, PlanningProblem


def runnable(problem: PlanningProblem, demand: ModelDemand, templates: Iterable[Template]) -> list[Template]:
    """The templates that the problem's engine can run."""
    return [item for item in templates if not limits_of_template(item, demand.model, problem.engine)]


def equal_degrees(model: Model, engine: EngineKind) -> bool:
    """Whether KV transfer needs equal tensor-parallel degrees, as for models with linear attention."""
    hybrid = any(isinstance(layer.attention, LinearAttention) for layer in model.layers)
    return hybrid and not engine.states_over_degrees


def degree_of(template: Template) -> int:
    """Tensor-parallel degree of a template's first replica."""
    return template.replicas[0].layout.stages[0].nodes[0].tp


def of_one_degree(
    problem: PlanningProblem, demand: ModelDemand, templates: Sequence[Template]
) -> list[Template]:
    """The templates with single-phase ones of the cheapest degree only, where KV transfer needs equal degrees."""
    if not equal_degrees(demand.model, problem.engine):
        return list(templates)
    single_phase = [template for template in templates if is_one_phase(template)]
    degrees = {degree_of(template) for template in single_phase}
    cheapest_degree = min(
        degrees,
        key=lambda degree: (_usd_per_request(problem, demand, single_phase, degree), -degree),
        default=0,
    )
    return [item for item in templates if not is_one_phase(item) or degree_of(item) == cheapest_degree]


def _usd_per_request(
    problem: PlanningProblem, model_demand: ModelDemand, apart: Sequence[Template], degree: int
) -> float:
    """Cost of both phases of a request on the cheapest templates of a degree; infinite if a phase is missing."""
    prices = {o.node: o.price_usd_per_h for region in problem.regions for o in region.offers if o.available}
    bucket = max(model_demand.buckets, key=lambda demand: demand.rate_per_s).bucket
    of_degree = [template for template in apart if degree_of(template) == degree]
    total = 0.0
    for phase in ("prefill_per_s", "decode_per_s"):
        rates = [(template, getattr(template.capacity[bucket], phase)) for template in of_degree]
        costs = [
            sum(prices.get(item.node, 0.0) * item.count for item in template.nodes) / rate
            for template, rate in rates
            if rate > 0
        ]
        total += min(costs, default=float("inf"))
    return total


def phase_degree(problem: PlanningProblem, demand: ModelDemand, single: Sequence[Template]) -> int | None:
    """The degree that single-phase pipelines need for KV transfer with these single nodes; None: any.

    The degree of the largest node, where the model fits on no single node.
    """
    if not equal_degrees(demand.model, problem.engine):
        return None
    degrees = {degree_of(template) for template in single if is_one_phase(template)}
    return max(degrees, default=max((node.gpus for node in problem.offered), default=1))
