"""D_ij by simulation: a pair of a pool's replicas, alone, with requests of the model's own lengths.

The pair is a plan of one group; requests come by chance at the given rate, nobody is refused, all objectives count.
The same requests, in their order, are asked of every pair: what differs between two is the pairs. The search may
think more of a pair than `timing.rates` does, by which it is sent its requests in the end; then it is tried at what
it will be sent, and the rest counts as missed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from potluck.core.state.policy import Policy
from potluck.core.values.plan import Deployment, LengthBucket, Plan, PlannedReplica, PlannedShare, Template
from potluck.core.values.types import Traffic
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.templates.group import group_template
from potluck.plan.timing.named_machines import machine_of
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import of_traffic
from potluck.sim.results.metrics import summarise
from potluck.sim.run import simulate
from potluck.sim.sim_settings import SimSettings

REQUESTS = 400
WARM_UP_SHARE = 0.2
"""Of the arrivals, by time, that are not judged: the first meet empty replicas."""


@dataclass(frozen=True, slots=True)
class PairTrial:
    """Tries pairs of replicas of one model; calling it is an `Estimate` of `plan.search.attain`."""

    problem: PlanningProblem
    world: ResolvedPlan
    """Its plan is replaced by each pair's."""
    traffic: Traffic
    policy: Policy
    requests: int = REQUESTS
    seed: int = 0

    def __call__(self, prefill: PlannedReplica, decode: PlannedReplica, rate_per_s: float) -> float:
        ask = next(each for each in self.problem.asks if each.name == self.traffic.model)
        members = (prefill,) if prefill == decode else (prefill, decode)
        template = group_template(self.problem, ask, members, self.problem.codecs[-1])
        if template is None:
            return 0.0
        sent_per_s = min(rate_per_s, self.problem.headroom * _rate(ask, template))
        if not sent_per_s > 0:
            return 0.0
        load = of_traffic([replace(self.traffic, rate_per_s=sent_per_s)], self.requests, self.seed, 1.0)
        world = replace(self.world, plan=pair_plan(self.problem, ask, template, sent_per_s))
        rules = replace(self.policy, admission=False, scaling="none")
        result = simulate(world, load, rules, seed=self.seed, settings=SimSettings())
        warm_up_s = float(load.arrival_s[0]) + WARM_UP_SHARE * load.span_s
        attained = summarise(result, warm_up_s).total.attainment or 0.0
        return attained * sent_per_s / rate_per_s


def _rate(ask: ModelDemand, template: Template) -> float:
    """Requests a second of the model's mix that one copy serves; 0 where a bucket is beyond it."""
    busy = 0.0
    for demand in ask.demands:
        capacity = template.capacity[demand.bucket].closed_per_s
        if not capacity > 0:
            return 0.0
        busy += demand.rate_per_s / ask.rate_per_s / capacity
    return 1.0 / busy


def pair_plan(problem: PlanningProblem, ask: ModelDemand, template: Template, rate_per_s: float) -> Plan:
    """One copy of a template that takes so many of a model's requests."""
    found = machine_of(problem, next(iter(template.machines)))
    assert found is not None, "a group names machines of its pool"
    rates = [rate_per_s * demand.rate_per_s / ask.rate_per_s for demand in ask.demands]
    return Plan(
        strategy="pair",
        templates=(template,),
        deployments=(Deployment(template.name, found.region, 1),),
        buckets=tuple(
            LengthBucket(ask.name, demand.bucket, demand.longest_tokens, rate)
            for demand, rate in zip(ask.demands, rates, strict=True)
        ),
        shares=tuple(
            PlannedShare(template.name, found.region, demand.bucket, "closed", rate)
            for demand, rate in zip(ask.demands, rates, strict=True)
        ),
        flows=(),
        predictions=(),
        cost_usd_per_h=0.0,
        gap=0.0,
    )
