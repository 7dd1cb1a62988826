"""CAUCHY as printed: pairs ranked by equation 15, combos counted in GPUs, a choice beside the cheapest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck.catalog import models, nodes
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.perf.timers.cauchy_timer import CauchyModel, ComboSide, ce
from potluck.plan.problem import ModelDemand, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory, cauchy_strategy, programs
from potluck.plan.strategies.template_factory import with_running
from potluck.plan.templates.combo import _batch, gpu_combos, served_per_s
from potluck.plan.timing.rate_cache import memory_rate_cache
from potluck.plan.verify import retimed, verify

USD_PER_H = {"H800": 2.69, "A800-PCIe": 1.19, "H20": 1.50}  # Of one GPU: the paper's Table 1.


def a_demand(
    rate_per_s: float = 6.4, lengths: tuple[int, int] = (1155, 77), model: str = "Llama-3.1-8B"
) -> ModelDemand:
    traffic = Traffic("m", rate_per_s, (LengthBin(*lengths, 1.0),))
    return model_demand("m", models.model(model), Slo(10.0, 0.05), traffic)


def a_fleet(demand: ModelDemand, gpus: int = 1, available: int = 8) -> PlanningProblem:
    types = [nodes.node_type(f"{gpus}x{gpu}") for gpu in USD_PER_H]
    offers = [
        NodeOffer(t.name, usd * gpus, available) for t, usd in zip(types, USD_PER_H.values(), strict=True)
    ]
    return PlanningProblem((demand,), (Region("here", tuple(offers)),), tuple(types))


@pytest.mark.parametrize("lengths", [(1155, 77), (315, 322), (122, 2700)])
def test_cauchy_pairs_are_ranked_by_equation_15_in_their_better_direction(lengths: tuple[int, int]) -> None:
    item = a_demand(lengths=lengths)
    factory = TemplateFactory(a_fleet(item))
    result = factory.ranked(item)
    model = CauchyModel.from_model(item.model)
    batches = {
        t.nodes[0].node: _batch(item, t) for t in factory.phased(item) if t.replicas[0].role == "decode"
    }

    def printed(first: str, second: str) -> float:
        a, b = (
            ComboSide(factory.problem.node(n).gpu, 1, USD_PER_H[n.split("x", 1)[1]]) for n in (first, second)
        )
        return ce(model, batches[second], *lengths, a, b)

    assert [r.ce_tokens_per_usd for r in result] == sorted(
        (r.ce_tokens_per_usd for r in result), reverse=True
    )
    assert all(r.printed for r in result)
    assert len({frozenset((r.prefill, r.decode)) for r in result}) == len(result)
    for r in result:
        assert r.ce_tokens_per_usd == pytest.approx(printed(r.prefill, r.decode))
        if r.prefill in batches and r.decode != r.prefill:
            assert printed(r.decode, r.prefill) <= r.ce_tokens_per_usd * (1 + 1e-9)


def test_cauchy_ranks_a_model_beyond_the_closed_form_by_served_requests() -> None:
    item = a_demand(model="GPT-OSS-20B")
    result = TemplateFactory(a_fleet(item)).ranked(item)
    assert result
    assert not any(r.printed for r in result)


def test_cauchy_combos_form_one_instance_per_phase_and_fill_their_nodes() -> None:
    item = a_demand()
    factory = TemplateFactory(a_fleet(item, gpus=8))
    made = gpu_combos(factory.problem, item, factory.ranked(item)[:4], memory_rate_cache(item))
    assert made
    for template in made:
        gpus = sum(n.tp for r in template.replicas for s in r.layout.stages for n in s.nodes)
        assert gpus == 8 * sum(count.count for count in template.nodes)
        for claimed, real in zip(template.capacity, retimed(factory.problem, item, template), strict=True):
            assert claimed.closed_per_s <= real.closed_per_s * (1 + 1e-9)
    two_four = next(t for t in made if "<2 H800, 4 H20>" in t.name)
    tps = {r.role: r.layout.stages[0].nodes[0].tp for r in two_four.replicas}
    assert tps == {"prefill": 2, "decode": 4}


def test_combo_within_one_node_is_not_limited_by_its_network_card() -> None:
    item = a_demand()
    fleet = a_fleet(item, gpus=8)
    thin = replace(fleet, nodes=tuple(replace(node, network_gbps=0.01) for node in fleet.nodes))
    pairs = TemplateFactory(fleet).ranked(item)
    alike = [pair for pair in pairs if pair.prefill == pair.decode]
    inside = {
        t.name: t for t in gpu_combos(thin, item, alike, memory_rate_cache(item)) if t.nodes[0].count == 1
    }
    assert inside
    before = {t.name: t for t in gpu_combos(fleet, item, alike, memory_rate_cache(item))}
    for name, template in inside.items():
        assert template.capacity == before[name].capacity
    assert not [
        t for t in gpu_combos(thin, item, pairs, memory_rate_cache(item)) if sum(n.count for n in t.nodes) > 1
    ]


def test_cauchy_plan_gap_is_its_distance_from_the_cheapest_combos() -> None:
    """Equation 16 takes an H800 where an A800 would do for less than half; MC-LP is the cheapest."""
    factory, brief = TemplateFactory(a_fleet(a_demand())), SolveSettings(time_limit_s=10)
    cheapest = STRATEGIES["cauchy-mc"](factory, brief).plan
    assert cheapest.gap <= 1e-6
    for name in ("cauchy", "cauchy-mce"):
        plan = STRATEGIES[name](factory, brief).plan
        assert verify(factory.problem, plan) == ()
        assert plan.gap == pytest.approx(1 - cheapest.cost_usd_per_h / plan.cost_usd_per_h, abs=0.01)
    assert STRATEGIES["cauchy"](factory, brief).plan.gap > 0.1


def test_cauchy_serves_high_demand_with_the_best_ranked_pair() -> None:
    item = a_demand(rate_per_s=200.0)
    factory = TemplateFactory(a_fleet(item, available=64))
    first = factory.ranked(item)[0]
    assert (first.prefill, first.decode) == ("1xH800", "1xH20")
    plan = STRATEGIES["cauchy-ce"](factory, SolveSettings(time_limit_s=10)).plan
    assert verify(factory.problem, plan) == ()
    assert plan.fraction == 1.0
    shortlist = {frozenset((r.prefill, r.decode)) for r in factory.ranked(item)[:4]}
    for deployment in plan.deployments:
        assert frozenset(plan.template(deployment.template).node_counts) in shortlist


def test_running_template_stays_available_when_cauchy_plans_again() -> None:
    item = a_demand()
    factory = TemplateFactory(a_fleet(item))
    plan = STRATEGIES["cauchy-mc"](factory, SolveSettings(time_limit_s=10)).plan
    only = plan.deployments[0].template
    others = {"m": [t for t in factory.combos(item) if t.name != only]}
    merged = with_running(factory.problem, others, plan)
    assert next(t for t in merged["m"] if t.name == only).capacity == plan.template(only).capacity
    assert with_running(factory.problem, others, None) is others


def test_cauchy_keeps_the_best_combos_and_reports_the_cut_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    item = a_demand(rate_per_s=40.0)
    whole, few = TemplateFactory(a_fleet(item)), TemplateFactory(a_fleet(item))
    all_of_them = STRATEGIES["cauchy"](whole, SolveSettings(20.0))
    assert whole.shortened_strategies == {}
    monkeypatch.setattr(cauchy_strategy, "MAX_COLUMNS", 12)
    cut = STRATEGIES["cauchy"](few, SolveSettings(20.0))
    every = sum(served_per_s(item, template) > 0 for template in few.combos(item))
    assert few.shortened_strategies == {"cauchy": f"chose from the 12 best of {every:,} combos"}
    assert every > 12
    assert verify(few.problem, cut.plan) == ()
    assert cut.plan.fraction == 1.0
    assert cut.plan.cost_usd_per_h <= 1.2 * all_of_them.plan.cost_usd_per_h


def test_auto_reports_the_strategies_it_did_not_try(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = a_fleet(a_demand())
    factory = TemplateFactory(problem)
    STRATEGIES["auto"](factory, SolveSettings(20.0))
    assert factory.shortened_strategies == {}
    monkeypatch.setattr(programs, "MAX_COMBOS", 0)
    STRATEGIES["auto"](factory, SolveSettings(20.0))
    assert set(factory.shortened_strategies) == {"cauchy", "cauchy-ce", "cauchy-mc", "cauchy-mce"}
    monkeypatch.setattr(programs, "SINGLE_STRATEGIES_SHARE", 1e-9)
    STRATEGIES["auto"](factory, SolveSettings(20.0))
    assert {"homo", "melange", "coral"} <= set(factory.shortened_strategies)
    assert set(factory.shortened_strategies.values()) == {programs.NOT_TRIED}
