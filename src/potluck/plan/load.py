"""Load: of what a plan's copies could do if they were always busy, the share that is used.

One definition for plans and simulated runs. It is not the share of time in which a replica has a step running
(`sim.results.metrics.HardwareUse.busy_share`): a step may hold one request or a hundred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from potluck.core.values.plan import Plan, Prediction
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.verify import served_share

MAX_TIMES_DEMAND = 1e6


@dataclass(frozen=True, slots=True)
class ModelLoad:
    model: str
    answered_per_s: float
    capacity_per_s: float
    """Requests a second of these lengths that the copies could do if they were always busy."""

    @property
    def load(self) -> float:
        return self.answered_per_s / self.capacity_per_s if self.capacity_per_s > 0 else 0.0


def planned_load(plan: Plan, prediction: Prediction) -> ModelLoad:
    """At the planned demand, as far as it is met."""
    served_per_s = prediction.demand_per_s * plan.fraction_of(prediction.model)
    return ModelLoad(prediction.model, served_per_s, prediction.capacity_per_s)


def load_at(
    problem: PlanningProblem, plan: Plan, demand: ModelDemand, rates_per_s: Sequence[float]
) -> ModelLoad:
    """At these rates of the model's length buckets."""
    buckets = [
        replace(bucket, rate_per_s=rate) for bucket, rate in zip(demand.buckets, rates_per_s, strict=True)
    ]
    return ModelLoad(
        demand.name,
        sum(rates_per_s),
        capacity_per_s(problem, plan, replace(demand, buckets=tuple(buckets))),
    )


def capacity_per_s(problem: PlanningProblem, plan: Plan, demand: ModelDemand) -> float:
    """Requests a second in the mix of lengths of a demand; 0 where nothing is asked."""
    if not demand.rate_per_s > 0:
        return 0.0
    mine = (d for d in plan.deployments if plan.template(d.template).model == demand.name)
    copies = {(deployment.template, deployment.region): deployment.count for deployment in mine}
    return (
        served_share(problem, plan, demand, copies, MAX_TIMES_DEMAND) * demand.rate_per_s / problem.headroom
    )
