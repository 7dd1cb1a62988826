"""Small problems and trials that tests of the rehearsal share."""

from __future__ import annotations

from potluck.catalog import models, nodes
from potluck.core.state.policy import Policy
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.problem import PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.rehearse.evidence import TrialSetup
from potluck.rehearse.request_sources import generated
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.sim_settings import SimSettings as Running

OFFERS = {"1xL40S": (1.9, 20), "1xA10G": (1.0, 20), "1xL4": (0.7, 20)}
LENGTHS = (LengthBin(300, 60, 0.6), LengthBin(1200, 80, 0.4))
SETTINGS = SolveSettings(time_limit_s=5.0)
melange = STRATEGIES["melange"]  # Aggregated replicas only: quick to plan, quick to simulate.


def a_traffic(name: str = "chat", rate_per_s: float = 8.0) -> Traffic:
    return Traffic(name, rate_per_s, LENGTHS)


def a_problem(*traffic: Traffic, offers: dict[str, tuple[float, int]] | None = None) -> PlanningProblem:
    asks = tuple(
        model_demand(item.model, models.model("Llama-3.1-8B"), Slo(1.0, 0.06), item)
        for item in traffic or (a_traffic(),)
    )
    chosen = offers or OFFERS
    types = tuple(nodes.node_type(name) for name in chosen)
    region = Region("here", tuple(NodeOffer(nodes.canonical(n), *terms) for n, terms in chosen.items()))
    return PlanningProblem(asks, (region,), types)


def a_trial(
    problem: PlanningProblem, traffic: tuple[Traffic, ...], cv: float = 3.0, requests: int = 3_000
) -> TrialSetup:
    plan = melange(TemplateFactory(problem), SETTINGS).plan
    resolved_plan = ResolvedPlan(
        plan,
        {demand.name: demand.model for demand in problem.demands},
        problem.by_name,
        problem.regions,
        (),
        {demand.name: demand.slo for demand in problem.demands},
        {item.model: (item.mean_input_tokens, item.mean_output_tokens) for item in traffic},
    )
    asked = {item.model: item for item in traffic}
    source = generated(traffic, cv)
    return TrialSetup(
        resolved_plan, source, Policy(admission=False), Running(), asked, most_requests=requests
    )
