"""Plans that were asked to survive a loss, in simulation: any node of N+1, a wave that takes every spot node."""

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
        {"chat": problem.asks[0].model},
        problem.by_name,
        problem.regions,
        (),
        {"chat": problem.asks[0].slo},
        {"chat": (TRAFFIC.mean_input_tokens, TRAFFIC.mean_output_tokens)},
    )
    load = of_traffic([replace(TRAFFIC, rate_per_s=rate_per_s)], 1200, 1, 1.0)
    result = simulate(resolved, load, Policy(admission=False), seed=1, faults=faults)
    return summarise(result, warm_up_s=AT_S).total.attainment


def test_any_node_of_a_plan_with_one_to_spare_may_die() -> None:
    problem, plan = planned(ModelTerms(survive="node"))
    units = sum(each.count for each in plan.deployments)
    assert units >= 2
    kept = [attained(problem, plan, None)]
    for unit in range(units):
        lost = Faults((Fault(AT_S, "node", pick=(unit + 0.5) / units),))
        kept.append(attained(problem, plan, lost))
    assert min(kept) >= PROMISED


def test_without_one_to_spare_it_would_be_missed() -> None:
    problem, plan = planned(NO_TERMS)
    lost = Faults((Fault(AT_S, "node", node="*"),))
    assert attained(problem, plan, lost) < PROMISED


def test_a_wave_that_takes_all_spot_nodes_leaves_what_was_promised() -> None:
    problem, plan = planned(ModelTerms(max_spot_share=0.4))
    spot = plan.nodes.get(("here", "1xA10G spot"), 0)
    assert spot > 0
    wave = Faults((Fault(AT_S, "spot", region="here", node="1xA10G spot", count=spot, notice_s=0.0),))
    assert attained(problem, plan, wave, RATE_PER_S * 0.6) >= PROMISED
    bare = planned(NO_TERMS)[1]  # all of it would be spot, and nothing is left of it
    assert {node for _, node in bare.nodes} == {"1xA10G spot"}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_decides_how_much_is_spot(share: float) -> None:
    _, plan = planned(ModelTerms(max_spot_share=share))
    kinds = {"spot" in node for _, node in plan.nodes}
    assert kinds == {share == 1.0}
