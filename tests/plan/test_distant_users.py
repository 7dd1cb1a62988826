"""Distant users and request classes with their own objectives in plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import pytest
from plan_problems import CHAT, a_problem

from potluck.catalog import models
from potluck.core.errors import CapacityError
from potluck.core.values.service import ModelTerms
from potluck.core.values.types import LengthBin, Slo, Traffic
from potluck.plan.explain import term_prices
from potluck.plan.problem import ModelDemand, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, PlanOutcome, SolveSettings, TemplateFactory
from potluck.plan.verify import verify

SETTINGS = SolveSettings(time_limit_s=20.0)
melange = STRATEGIES["melange"]
OFFERS = {
    "near": {"1xL40S": (2.5, 8)},
    "middle": {"1xL40S": (1.9, 8)},
    "far": {"1xL40S": (0.9, 8), "1xA10G": (0.5, 8)},
}
SLO = Slo(1.6, 0.06)


def distant_demand(
    rtt_s: dict[str, dict[str, float]], classes: dict[str, Slo] | None = None, slo: Slo = SLO
) -> ModelDemand:
    shares = tuple((name, 1.0 / len(rtt_s)) for name in rtt_s)
    lengths = tuple(LengthBin(*item) for item in CHAT)
    kinds = tuple((name, 0.25) for name in classes or {})
    traffic = Traffic("chat", 6.0, lengths, classes=kinds, origins=shares)
    far = {name: tuple(item.items()) for name, item in rtt_s.items()}
    return model_demand("chat", models.model("Llama-3.1-8B"), slo, traffic, promises=classes, rtt_s=far)


def planned_in_regions(problem: PlanningProblem, regions: tuple[str, ...]) -> PlanOutcome | None:
    """Planned for some regions alone, with what their farthest users leave of TTFT."""
    (one,) = problem.demands
    left_s = one.slo.ttft_s - max(one.max_rtt_s(region) for region in regions)
    if left_s <= 0:
        return None
    asked = replace(one, slo=replace(one.slo, ttft_s=left_s), origins=(), terms=ModelTerms(regions=regions))
    return melange(TemplateFactory(replace(problem, demands=(asked,))), SETTINGS)


@pytest.mark.parametrize("far_s", [0.2, 1.2, 1.5])
def test_regions_chosen_for_distant_users_equal_the_best_of_all_choices(far_s: float) -> None:
    rtt_s = {
        "here": {"near": 0.01, "middle": 0.4, "far": far_s},
        "there": {"near": 0.05, "middle": 0.3, "far": far_s / 2},
    }
    problem = a_problem(distant_demand(rtt_s), offers=OFFERS)
    plan = melange(TemplateFactory(problem), SETTINGS).plan
    names = [region.name for region in problem.regions]
    sets = chain.from_iterable(combinations(names, size) for size in (1, 2, 3))
    tried = [outcome.plan for item in sets if (outcome := planned_in_regions(problem, item)) is not None]
    best = min(item.cost_usd_per_h for item in tried if item.fraction == 1)
    assert plan.fraction == 1
    assert plan.cost_usd_per_h == pytest.approx(best)
    assert verify(problem, plan) == ()
    (text,) = plan.predictions
    served = {share.region for share in plan.shares}
    assert text.ttft_s > min(problem.demands[0].mean_rtt_s(region) for region in served)


def test_plan_that_misses_ttft_for_distant_users_is_reported() -> None:
    rtt_s = {"here": {"near": 0.0, "middle": 0.0, "far": 0.0}}
    plan = melange(TemplateFactory(a_problem(distant_demand(rtt_s), offers=OFFERS)), SETTINGS).plan
    away = distant_demand({"here": {"near": 0.0, "middle": 0.0, "far": 1.59}})
    result = verify(a_problem(away, offers=OFFERS), plan)
    assert any("for the farthest users" in line for line in result)
    nowhere = distant_demand({"here": {"near": 2.0, "middle": 2.0, "far": 2.0}})
    with pytest.raises(CapacityError, match="no region is near enough"):
        melange(TemplateFactory(a_problem(nowhere, offers=OFFERS)), SETTINGS)


def test_strictest_request_class_sets_the_objective_and_has_a_price() -> None:
    strict, loose = Slo(1.6, 0.04, 0.95), Slo(60.0, 2.0, 0.5)
    one = distant_demand({"here": dict.fromkeys(OFFERS, 0.0)}, {"interactive": strict, "batch": loose})
    assert one.slo == Slo(1.6, 0.04, 0.95)
    assert [(item.name, item.share) for item in one.classes] == [
        ("interactive", 0.25),
        ("batch", 0.25),
        ("standard", 0.5),
    ]
    assert one.without_class("interactive").slo == Slo(1.6, 0.06, 0.9)
    factory = TemplateFactory(a_problem(replace(one, origins=()), offers=OFFERS))
    outcome = melange(factory, SETTINGS)
    prices = term_prices(factory, outcome, melange, SETTINGS)
    assert [price.words for price in prices] == ["SLO of class interactive"]
    plain = melange(
        TemplateFactory(a_problem(distant_demand({"x": dict.fromkeys(OFFERS, 0.0)}), offers=OFFERS)), SETTINGS
    )
    extra = outcome.plan.total_usd_per_h - plain.plan.total_usd_per_h
    assert prices[0].extra_usd_per_h == pytest.approx(extra)
    assert extra > 0
