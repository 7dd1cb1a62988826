"""Attainment of replica pairs from simulation in the pool search."""

from __future__ import annotations

import pytest
from plan_problems import pool_problem
from search_pools import catalog_node

from potluck.catalog import models
from potluck.core.values.engine_abilities import UNLIMITED
from potluck.core.values.layout import Pool, uniform_pool
from potluck.core.values.plan import PlannedReplica
from potluck.core.values.types import LengthBin, Slo, Traffic
from potluck.plan.problem import ModelDemand, model_demand
from potluck.plan.search.deduce import deducer
from potluck.plan.search.evaluate import PoolEvaluator
from potluck.plan.search.kernels import PREFILL
from potluck.plan.search.search_templates import evaluate_with, to_templates
from potluck.plan.search.tabu import SearchLimits, SearchResult, SearchSettings, search_with
from potluck.plan.search.workload import workload_of
from potluck.plan.strategies.pool_strategy import phases_of, search_groups

QUICK = SearchSettings(limits=SearchLimits(walks=3, patience=10), phases=("prefill", "decode"))
POOL: Pool = uniform_pool(
    [catalog_node(f"n{i}", gpu, 2) for i, gpu in enumerate(("A40", "A40", "A5000", "A6000"))], 20.0
)
WANTED: ModelDemand = model_demand(
    "chat",
    models.model("Llama-2-13B"),
    Slo(2.5, 0.1),
    Traffic("chat", 30.0, (LengthBin(900, 200, 1.0),)),  # more than there is room for: every pair counts
)


@pytest.fixture(scope="module")
def searched_pool() -> tuple[PoolEvaluator, SearchResult]:
    evaluator = PoolEvaluator(deducer(POOL, workload_of(WANTED, "int4"), QUICK.timing))
    return evaluator, search_with(evaluator, QUICK)


def test_search_with_the_closed_form_as_external_attainment_scores_the_same(
    searched_pool: tuple[PoolEvaluator, SearchResult],
) -> None:
    evaluator, result = searched_pool
    groups = result.state.groups
    score, routed = evaluator.weighed(groups, evaluator.attained(groups))
    assert score == result.score
    assert routed == result.orchestration
    half = {pair: share / 2 for pair, share in evaluator.attained(groups).items()}
    assert evaluator.weighed(groups, half)[0].attainment == pytest.approx(result.score.attainment / 2)
    assert evaluator.orchestrated(groups) == result.orchestration  # what is weighed once is not remembered


def test_every_replica_pair_is_simulated_once_at_a_feasible_rate(
    searched_pool: tuple[PoolEvaluator, SearchResult],
) -> None:
    evaluator, result = searched_pool
    asked: list[tuple[PlannedReplica, PlannedReplica, float]] = []

    def estimate(prefill_replica: PlannedReplica, decode_replica: PlannedReplica, rate_per_s: float) -> float:
        asked.append((prefill_replica, decode_replica, rate_per_s))
        return 1.0

    evaluate_with(evaluator, result, estimate)
    assert (
        len({(prefill_replica, decode_replica) for prefill_replica, decode_replica, _ in asked})
        == len(asked)
        > 0
    )
    rates = [evaluator.deduced(group) for state in (result.state, *result.others) for group in state.groups]
    most = 0.8 * max(item.rate_per_s for item in rates if item is not None)
    assert all((p.role, d.role) == ("prefill", "decode") and 0 < rate <= most for p, d, rate in asked)


def test_search_result_whose_pairs_fail_simulation_is_not_chosen(
    searched_pool: tuple[PoolEvaluator, SearchResult],
) -> None:
    evaluator, result = searched_pool
    assert result.others
    phases = zip(result.state.groups, result.configurations, strict=True)
    first = [group.takes[0][0] for group, _ in phases if group.phase == PREFILL]
    chosen = {POOL.nodes[node].name for node in first}

    def estimate(prefill_replica: PlannedReplica, decode_replica: PlannedReplica, rate_per_s: float) -> float:
        return 0.0 if {n.machine for s in prefill_replica.layout.stages for n in s.nodes} & chosen else 0.9

    best, attained = evaluate_with(evaluator, result, estimate)
    assert best.state in result.others
    assert 0 < best.score.attainment < result.score.attainment
    problem = pool_problem(POOL, WANTED)
    templates = to_templates(problem, WANTED, POOL, best, attained=attained)
    assert templates
    for template in templates:
        for flow in template.flows:
            ends = template.replicas[flow.prefill].layout, template.replicas[flow.decode].layout
            assert attained[ends] == 0.9  # pairs that fail get no request
    assert to_templates(problem, WANTED, POOL, best, attained=dict.fromkeys(attained, 0.0)) == ()


def test_plan_groups_keep_the_attainment_of_their_simulated_pairs() -> None:
    asked: list[float] = []

    def estimate(prefill_replica: PlannedReplica, decode_replica: PlannedReplica, rate_per_s: float) -> float:
        asked.append(rate_per_s)
        return 0.5

    templates, result = search_groups(
        pool_problem(POOL, WANTED), WANTED, phases_of(UNLIMITED), 1.0, 0, estimate
    )
    assert asked
    (region,) = result
    assert {pairing.attained for pairing in result[region].orchestration.pairings} == {0.5}
    assert templates
