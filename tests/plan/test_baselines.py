"""Baseline systems as strategies: each plans only what its system supports."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil

import pytest
from plan_problems import a_demand, a_problem, pool_problem
from search_pools import catalog_node

from potluck.core.errors import InputError
from potluck.core.values.engine_abilities import ENGINES
from potluck.core.values.layout import single, uniform_pool
from potluck.core.values.plan import Plan
from potluck.core.values.types import Role, Slo
from potluck.plan.problem import PlanningProblem
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.timing.replica_rates import fits, replica_capacity
from potluck.plan.verify import verify

ONE_LENGTH = ((1200, 200, 1.0),)
OFFERS = {"home": {"2xL4": (1.6, 9), "4xA10G": (4.1, 9), "1xL40S": (1.9, 9)}}


def verified_plan(problem: PlanningProblem, strategy: str) -> Plan:
    plan = STRATEGIES[strategy](
        TemplateFactory(problem), SolveSettings(time_limit_s=8.0, gap_target=0.0)
    ).plan
    assert verify(problem, plan) == ()
    assert plan.strategy == strategy
    return plan


def per_s(problem: PlanningProblem, node: str, role: Role, tp: int) -> float:
    """Requests a second of a whole node cut into replicas of so many GPUs, with the planner's headroom."""
    demand = problem.demands[0]
    layout = single(node, tp, demand.model.layer_count)
    if not fits(demand, layout, problem.by_name):
        return 0.0
    rates = replica_capacity(demand, layout, problem.by_name, role, problem.headroom)[0]
    each = rates.closed_per_s if role == "mixed" else rates.prefill_per_s + rates.decode_per_s
    return each * (problem.node(node).gpus // tp) * problem.headroom


def degrees(problem: PlanningProblem, node: str) -> list[int]:
    return [tp for tp in (1, 2, 4) if problem.node(node).gpus % tp == 0]


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Llama-2-13B"])
def test_vllm_dp_uses_the_smallest_fitting_tp_degree_at_the_cheapest_counts(model: str) -> None:
    ask = a_demand("m", model, 9.0, Slo(3.0, 0.1), ONE_LENGTH)
    problem = a_problem(ask, offers=OFFERS)
    rates = {}
    for node in OFFERS["home"]:
        able = [
            (tp, rate) for tp in degrees(problem, node) if (rate := per_s(problem, node, "mixed", tp)) > 0
        ]
        rates.update({node: able[0]} if able else {})
    plan = verified_plan(problem, "vllm-dp")
    for template in plan.templates:
        (node,) = template.node_counts
        assert {(r.role, r.layout.stages[0].nodes[0].tp) for r in template.replicas} == {
            ("mixed", rates[node][0])
        }
    counts = product(range(10), repeat=len(rates))
    enough = [
        c for c in counts if sum(n * rate for n, (_, rate) in zip(c, rates.values(), strict=True)) >= 9.0
    ]
    usd = [sum(n * OFFERS["home"][node][0] for n, node in zip(c, rates, strict=True)) for c in enough]
    assert plan.fraction == 1.0
    assert plan.cost_usd_per_h == pytest.approx(min(usd))
    assert verified_plan(problem, "auto").cost_usd_per_h <= plan.cost_usd_per_h + 1e-6


def test_distserve_uses_one_node_type_with_the_best_degree_per_phase() -> None:
    """Nodes of one kind by hand; any two kinds together, which `prfaas` may have, are cheaper here."""
    ask = a_demand("m", "Llama-3.1-8B", 20.0, Slo(3.0, 0.1), ONE_LENGTH)
    offers = {"home": {"1xL40S": (1.9, 40), "1xH100-SXM": (6.0, 40), "1xA10G": (1.0, 40)}}
    problem = a_problem(ask, offers=offers)
    usd = []
    for node, (price, _) in offers["home"].items():
        rates = [
            max(per_s(problem, node, role, tp) for tp in degrees(problem, node))
            for role in ("prefill", "decode")
        ]
        if min(rates) > 0:
            usd.append(price * sum(ceil(20.0 / rate) for rate in rates))
    plan = verified_plan(problem, "distserve")
    assert len(plan.nodes) == 1
    assert {replica.role for t in plan.templates for replica in t.replicas} == {"prefill", "decode"}
    assert plan.cost_usd_per_h == pytest.approx(min(usd))
    assert verified_plan(problem, "auto").cost_usd_per_h <= verified_plan(problem, "prfaas").cost_usd_per_h
    assert verified_plan(problem, "prfaas").cost_usd_per_h < plan.cost_usd_per_h


def test_distserve_divides_one_server_between_prefill_and_decode() -> None:
    problem = pool_problem(uniform_pool([catalog_node("a", "A100", 8)], 40.0), a_demand(rate_per_s=4.0))
    plan = verified_plan(problem, "distserve")
    assert plan.fraction == 1.0
    assert {replica.role for t in plan.templates for replica in t.replicas} == {"prefill", "decode"}


def test_hexgen_serves_a_model_over_two_gpu_types_when_neither_holds_it_alone() -> None:
    """13B in 16 bits on two cards of 24 GB: one pipeline, which serves requests whole."""
    machines = [catalog_node("a", "A5000", 1), catalog_node("b", "RTX3090Ti", 1)]
    problem = pool_problem(
        uniform_pool(machines, 40.0), a_demand("m", "Llama-2-13B", 0.5, Slo(3.0, 0.1), ONE_LENGTH)
    )
    assert verified_plan(problem, "vllm-dp").fraction == verified_plan(problem, "distserve").fraction == 0.0
    plan = verified_plan(problem, "hexgen")
    assert plan.fraction == 1.0
    (replica,) = plan.templates[0].replicas
    assert replica.role == "mixed"
    assert set(replica.layout.machines) == {"a", "b"}


def test_distserve_is_refused_for_an_engine_without_kv_transfer() -> None:
    plain = replace(a_problem(), engine=ENGINES["openai"])
    with pytest.raises(InputError, match="distserve hands KV over between replicas"):
        STRATEGIES["distserve"](TemplateFactory(plain), SolveSettings())
