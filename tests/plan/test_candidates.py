"""Templates that scaling may start beside the plan, and the cheapest cover of a deficit."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import ceil

import pytest

from potluck.catalog import models, nodes
from potluck.core.scaling.cauchy_scaling import cheapest_cover, copy_options, copy_weight, startable_rates
from potluck.core.values.plan import Plan, Template, plan_from_json, plan_to_json
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.current_problem import MAX_CANDIDATES, with_candidates
from potluck.plan.explain import copy_tokens_per_usd, tokens_json
from potluck.plan.problem import PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory

USD_PER_H = {"1xH800": 2.69, "1xA800-PCIe": 1.19, "1xH20": 1.50}
ASK = model_demand(
    "m", models.model("Llama-3.1-8B"), Slo(10.0, 0.05), Traffic("m", 6.4, (LengthBin(1155, 77, 1.0),))
)


def market(*available: int, region: str = "here") -> Region:
    pairs = zip(USD_PER_H.items(), available, strict=True)
    return Region(region, tuple(NodeOffer(node, usd, n) for (node, usd), n in pairs))


PROBLEM = PlanningProblem((ASK,), (market(8, 8, 8),), tuple(nodes.node_type(name) for name in USD_PER_H))
WORKSHOP = TemplateFactory(PROBLEM)


def templates_of(strategy: str) -> list[Template]:
    make = STRATEGIES[strategy].templates
    return [] if make is None else make(WORKSHOP, ASK)


@pytest.fixture(scope="module", params=["cauchy", "cauchy-mc", "cauchy-mce", "cauchy-ce"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return with_candidates(WORKSHOP, STRATEGIES[request.param](WORKSHOP, SolveSettings(time_limit_s=5)).plan)


def test_scaling_candidates_are_strategy_templates_and_cover_every_type_pair(plan: Plan) -> None:
    made = {template.name for template in templates_of(plan.strategy)}
    used = {template.name for template in plan.templates}
    names = {candidate.name for candidate in plan.candidates}
    assert names <= made
    assert not names & used
    assert 0 < len(names) <= MAX_CANDIDATES
    types = {frozenset(template.node_counts) for template in templates_of(plan.strategy)}
    assert {frozenset(item.node_counts) for item in plan.repertoire} == types
    assert plan_from_json(plan_to_json(plan)) == plan


def test_omitted_scaling_candidates_are_dominated_on_the_same_nodes(plan: Plan) -> None:
    """Brute force: no template that was left out does more than every one that was kept of its nodes."""
    for left in templates_of(plan.strategy):
        rivals = [item for item in plan.repertoire if set(item.node_counts) == set(left.node_counts)]
        if left.name in {rival.name for rival in rivals} or len(plan.candidates) == MAX_CANDIDATES:
            continue
        assert any(
            all(rival.node_counts[n] <= left.node_counts[n] for n in rival.node_counts)
            and all(
                a.closed_per_s >= b.closed_per_s for a, b in zip(rival.capacity, left.capacity, strict=True)
            )
            for rival in rivals
        )


@pytest.mark.parametrize("seed", range(8))
def test_scale_up_choice_is_the_cheapest_cover_of_all_candidates(plan: Plan, seed: int) -> None:
    """Brute force over counts on a small market, in the strategy's own weights, with two regions."""
    chance = random.Random(seed)
    regions = tuple(market(*(chance.randint(0, 2) for _ in USD_PER_H), region=name) for name in ("a", "b"))
    few = replace(plan, templates=plan.templates[:1], candidates=plan.candidates[:4])
    offers = copy_options(few, startable_rates(few, "m", {0: 1.0}, regions, ()), regions)
    free = {(r.name, o.node): o.available for r in regions for o in r.offers}
    deficit = chance.uniform(1.0, 30.0)
    best, least = None, float("inf")
    spans = [range(min(ceil(deficit / o.serves_per_s), 2) + 1) for o in offers]
    assert len(offers) <= 10
    for counts in product(*spans):
        pairs = list(zip(offers, counts, strict=True))
        used: dict[tuple[str, str], int] = {}
        for offer, count in pairs:
            for node, need in offer.needs.items():
                used[node] = used.get(node, 0) + need * count
        fits = all(n <= free.get(node, 0) for node, n in used.items())
        if fits and sum(o.serves_per_s * n for o, n in pairs) >= deficit:
            cost = sum(o.weight * n for o, n in pairs)
            best, least = (counts, cost) if cost < least else (best, least)
    answer = cheapest_cover(offers, deficit, free)
    if best is None:
        assert answer is None
    else:
        assert answer is not None
        weights = {offer.key: offer.weight for offer in offers}
        assert sum(weights[key] * n for key, n in answer.items()) == pytest.approx(least)


def test_candidate_weights_equal_the_objective_of_the_strategy_program(plan: Plan) -> None:
    template = plan.candidates[0]
    weights = {
        name: copy_weight(name, template, 2.0, 5.0) for name in ("auto", "cauchy-mc", "cauchy", "cauchy-mce")
    }
    served_per_usd = 5.0 * 3600 / 2.0
    assert weights["auto"] == weights["cauchy-mc"] == 2.0
    assert weights["cauchy"] == pytest.approx(2.0 / served_per_usd)
    assert weights["cauchy-mce"] == pytest.approx(1.0 / served_per_usd)
    if plan.strategy == "cauchy-ce":
        assert template.ce_tokens_per_usd > 0
        assert copy_weight("cauchy-ce", template, 2.0, 5.0) == pytest.approx(2.0 / template.ce_tokens_per_usd)


def test_strategies_without_templates_are_the_known_ones() -> None:
    assert [name for name, strategy in STRATEGIES.items() if strategy.templates is None] == [
        "homo",
        "thunderserve",
        "hexgen",
        "distserve",
    ]


def test_tokens_per_dollar_of_deployments_add_up_to_the_plan(plan: Plan) -> None:
    """Weighed by what each costs: prompts and answers are counted once, whoever does which phase."""
    result = tokens_json(PROBLEM, plan)
    prices = {offer.node: offer.price_usd_per_h for offer in PROBLEM.regions[0].offers}
    prompts = answers = 0.0
    for deployment in plan.deployments:
        usd = (
            sum(prices[n.node] * n.count for n in plan.template(deployment.template).nodes) * deployment.count
        )
        first, second = copy_tokens_per_usd(PROBLEM, plan, deployment)
        prompts, answers = prompts + first * usd, answers + second * usd
    assert prompts == pytest.approx(6.4 * 1155 * 3600, rel=1e-3)
    assert answers == pytest.approx(6.4 * 77 * 3600, rel=1e-3)
    whole = result["plan"]
    assert isinstance(whole, dict)
    assert whole["prompt"] == pytest.approx(prompts / plan.cost_usd_per_h, rel=1e-3)
    assert whole["answer"] == pytest.approx(answers / plan.cost_usd_per_h, rel=1e-3)
