"""Load: the share of a plan's full capacity that is used, with one definition for plans and simulated runs.

It differs from the share of time in which a replica runs steps (`sim.results.metrics.HardwareUse.busy_share`), as a
step may hold one request or a hundred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from potluck.core.values.plan import Plan, Prediction
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.verify import served_share

MAX_DEMAND_FACTOR = 1e6  # Upper bound of capacity relative to the demand.


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Served rate and full capacity of one model."""

    model: str
    answered_per_s: float
    capacity_per_s: float
    """Requests/s of this length mix that fully utilized copies serve."""

    @property
    def load(self) -> float:
        return self.answered_per_s / self.capacity_per_s if self.capacity_per_s > 0 else 0.0


def planned_load(plan: Plan, prediction: Prediction) -> ModelLoad:
    """The load of a model at its planned demand, as far as the plan meets it."""
    served_per_s = prediction.demand_per_s * plan.fraction_of(prediction.model)
    return ModelLoad(prediction.model, served_per_s, prediction.capacity_per_s)


def load_at(
    problem: PlanningProblem, plan: Plan, demand: ModelDemand, rates_per_s: Sequence[float]
) -> ModelLoad:
    """The load of a model at these rates of its buckets."""
    buckets = [
        replace(bucket, rate_per_s=rate) for bucket, rate in zip(demand.buckets, rates_per_s, strict=True)
    ]
    return ModelLoad(
        demand.name,
        sum(rates_per_s),
        capacity_per_s(problem, plan, replace(demand, buckets=tuple(buckets))),
    )


def capacity_per_s(problem: PlanningProblem, plan: Plan, demand: ModelDemand) -> float:
    """Requests/s of the demand's length mix that the plan's fully utilized copies serve; 0 without demand."""
    if not demand.rate_per_s > 0:
        return 0.0
    deployments = (d for d in plan.deployments if plan.template(d.template).model == demand.name)
    copies = {(deployment.template, deployment.region): deployment.count for deployment in deployments}
    return (
        served_share(problem, plan, demand, copies, MAX_DEMAND_FACTOR) * demand.rate_per_s / problem.headroom
    )
