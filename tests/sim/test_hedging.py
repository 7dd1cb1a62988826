"""Hedging in a simulated world: what a replica that is slow for a while costs, with it and without."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import sim_fleets as fleets

from potluck.catalog import models, nodes
from potluck.core.brain.brain import Brain
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.service import NO_TERMS, ModelTerms
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.problem import PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.runtime.replay import replay
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import of_traffic
from potluck.sim.results.metrics import summarise
from potluck.sim.results.records import ANSWERED, SimResult
from potluck.sim.run import build, check, simulate
from potluck.sim.world.faults import Fault, Faults

FOUR = fleets.problem(fleets.closed_plan((fleets.mixed(), "east", 4)))


MIXED = fleets.problem(fleets.closed_plan((fleets.combo(2, 2), "east", 2), (fleets.mixed(), "west", 2)))


POLICY = Policy(balance="goodput", hedge=1.5)


SLOW = Faults(
    tuple(
        Fault(at_s, "slow", replica=f"*#{n}/0", factor=10.0, duration_s=8.0)
        for n, at_s in ((0, 5.0), (1, 35.0))
    )
)


def ttft_s(result: SimResult, share: float) -> float:
    records = result.records
    assert (records.outcome == ANSWERED).all()
    return float(np.quantile(records.first_token_s - records.arrival_s, share))


@pytest.mark.parametrize("balance", ["learned", "goodput"])
def test_a_replica_that_is_ten_times_as_slow_for_a_while_is_felt_less(balance: str) -> None:
    requests = fleets.load(600, 10.0, seed=3)
    without = simulate(FOUR, requests, Policy(balance=balance), faults=SLOW)
    hedged = simulate(FOUR, requests, Policy(balance=balance, hedge=3.0), faults=SLOW)
    assert without.counts["second attempts"] == 0
    assert 0 < hedged.counts["second attempts"] < 60
    # Who learns how fast replicas are sends the slow one little: hardly one in a hundred is late; the last is.
    late = (1.0,) if balance == "learned" else (0.99, 1.0)
    assert all(ttft_s(hedged, share) < 0.7 * ttft_s(without, share) for share in late)
    assert ttft_s(hedged, 0.99) < ttft_s(without, 0.99)
    assert ttft_s(hedged, 0.5) < 1.1 * ttft_s(without, 0.5)


def test_while_nobody_is_late_it_changes_nothing() -> None:
    requests = fleets.load(300, 10.0, seed=4)
    plain, hedged = (simulate(FOUR, requests, Policy(hedge=hedge)) for hedge in (0.0, 100.0))
    assert hedged.counts["second attempts"] == 0
    assert (plain.records.finish_s == hedged.records.finish_s).all()


def test_books_balance_over_routes_of_several_segments_and_the_log_replays() -> None:
    faults = Faults(
        (
            Fault(2.0, "slow", replica="*combo*#0/0", factor=30.0, duration_s=6.0),
            Fault(4.0, "slow", replica="*mixed*#0/0", factor=30.0, duration_s=6.0),
            Fault(6.0, "replica", replica="*combo*#0/0"),
            Fault(7.0, "replica", replica="*mixed*#0/0"),
            *(Fault(5.0 + n / 50, "cancel", request=40 + n) for n in range(40)),
        )
    )
    log = io.StringIO()
    world = build(MIXED, fleets.load(200, 15.0, seed=6, blocks=3), POLICY, log=log)
    world.external.plan(faults, 1, 100.0)
    world.run()
    assert world.attempts.hedged > 2
    assert world.attempts.hedges == {}
    assert check(world) == []
    log.seek(0)
    assert replay(log, Brain).difference == ""


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
