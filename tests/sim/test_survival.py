"""Plans with spare copies keep their SLO attainment in simulation after the loss of a node or of all spot nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck.catalog import models, nodes
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.service import NO_TERMS, ModelTerms
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.problem import PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import of_traffic
from potluck.sim.results.metrics import summarise
from potluck.sim.run import simulate
from potluck.sim.world.faults import Fault, Faults

RATE_PER_S = 11.0


TRAFFIC = Traffic("chat", RATE_PER_S, (LengthBin(300, 60, 0.6), LengthBin(1200, 80, 0.4)))


PROMISED = 0.9


AT_S = 20.0


TYPES = tuple(nodes.node_type(name) for name in ("1xL40S", "1xA10G"))


SPOT = replace(TYPES[1], name="1xA10G spot")


REGION = Region(
    "here",
    (
        NodeOffer("1xL40S", 1.9, 20),
        NodeOffer("1xA10G", 1.0, 20),
        NodeOffer("1xA10G spot", 0.35, 20, spot=True, preemptions_per_h=0.2),
    ),
)


def planned(terms: ModelTerms) -> tuple[PlanningProblem, Plan]:
    made = model_demand("chat", models.model("Llama-3.1-8B"), Slo(1.5, 0.08, PROMISED), TRAFFIC, terms)
    problem = PlanningProblem((made,), (REGION,), (*TYPES, SPOT))
    outcome = STRATEGIES["melange"](TemplateFactory(problem), SolveSettings(time_limit_s=20.0))
    assert outcome.plan.fraction == 1
    return problem, outcome.plan


def attained(
    problem: PlanningProblem, plan: Plan, faults: Faults | None, rate_per_s: float = RATE_PER_S
) -> float:
    """The share of requests after the fault that kept the objective."""
    resolved = ResolvedPlan(
        plan,
        {"chat": problem.demands[0].model},
        problem.by_name,
        problem.regions,
        (),
        {"chat": problem.demands[0].slo},
        {"chat": (TRAFFIC.mean_input_tokens, TRAFFIC.mean_output_tokens)},
    )
    workload = of_traffic([replace(TRAFFIC, rate_per_s=rate_per_s)], 1200, 1, 1.0)
    result = simulate(resolved, workload, Policy(admission=False), seed=1, faults=faults)
    return summarise(result, warm_up_s=AT_S).total.attainment


def test_plan_with_a_spare_node_attains_its_objective_after_any_node_loss() -> None:
    problem, plan = planned(ModelTerms(survive="node"))
    units = sum(deployment.count for deployment in plan.deployments)
    assert units >= 2
    kept = [attained(problem, plan, None)]
    losses = [Faults((Fault(AT_S, "node", pick=(unit + 0.5) / units),)) for unit in range(units)]
    kept += [attained(problem, plan, loss) for loss in losses]
    assert min(kept) >= PROMISED


def test_plan_without_a_spare_node_misses_its_objective_after_a_node_loss() -> None:
    problem, plan = planned(NO_TERMS)
    assert attained(problem, plan, Faults((Fault(AT_S, "node", node="*"),))) < PROMISED


def test_plan_with_limited_spot_share_serves_the_rest_when_all_spot_nodes_are_lost() -> None:
    problem, plan = planned(ModelTerms(max_spot_share=0.4))
    spot = plan.nodes.get(("here", "1xA10G spot"), 0)
    assert spot > 0
    wave = Faults((Fault(AT_S, "spot", region="here", node="1xA10G spot", count=spot, notice_s=0.0),))
    assert attained(problem, plan, wave, RATE_PER_S * 0.6) >= PROMISED
    bare = planned(NO_TERMS)[1]  # all of it would be spot, and nothing is left of it
    assert {node for _, node in bare.nodes} == {"1xA10G spot"}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_spot_share_term_decides_the_use_of_spot_nodes(share: float) -> None:
    _, plan = planned(ModelTerms(max_spot_share=share))
    assert {"spot" in node for _, node in plan.nodes} == {share == 1.0}
