"""Balancing of a plan's copies to equal utilization."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_demand, a_problem

from potluck.core.values.plan import Deployment, Plan, PlannedShare
from potluck.core.values.service import NO_TERMS, ModelTerms
from potluck.core.values.types import Link, Slo
from potluck.plan.assemble.columns import thresholds_of
from potluck.plan.assemble.even_shares import balance_load
from potluck.plan.explain import explain
from potluck.plan.problem import CODECS, PlanningProblem
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.verify import verify

SETTINGS = SolveSettings(time_limit_s=5.0)
ONE_BUCKET = ((800, 150, 1.0),)
SHOP = TemplateFactory(a_problem(a_demand(rate_per_s=5.0)))  # Its templates serve every rate.


def utilizations(problem: PlanningProblem, plan: Plan) -> dict[tuple[str, str], float]:
    """Share of their time that each deployment's copies work."""
    result: dict[tuple[str, str], float] = {}
    counts = {(d.template, d.region): d.count for d in plan.deployments}
    for share in plan.shares:
        rate = getattr(plan.template(share.template).capacity[share.bucket], f"{share.phase}_per_s")
        key = (share.template, share.region)
        result[key] = result.get(key, 0.0) + share.rate_per_s / rate / counts[key]
    return result


def test_different_replicas_are_equally_utilized_after_balancing() -> None:
    problem = a_problem(a_demand(rate_per_s=4.0, lengths=ONE_BUCKET))
    shop = TemplateFactory(problem)
    result = [t for t in shop.mixed(problem.demands[0]) if t.nodes[0].node in ("1xL40S", "1xA10G")]
    big, small = sorted(result, key=lambda t: -t.capacity[0].closed_per_s)
    # Everything on the big one, nothing on the small one: allowed, as the big one is within its headroom.
    base = STRATEGIES["melange"](shop, SETTINGS).plan
    prices = {"1xL40S": 1.86, "1xA10G": 1.0}
    one_each = (Deployment(big.name, "east", 1), Deployment(small.name, "east", 1))
    shares = (PlannedShare(big.name, "east", 0, "closed", 4.0),)
    cost = sum(prices[t.nodes[0].node] for t in (big, small))
    lopsided = replace(base, templates=(big, small), deployments=one_each, shares=shares, cost_usd_per_h=cost)
    assert verify(problem, lopsided) == ()
    plan = balance_load(problem, lopsided, SETTINGS.time_limit_s)
    least, most = sorted(utilizations(problem, plan).values())
    assert least == pytest.approx(most)
    whole = sum(t.capacity[0].closed_per_s for t in (big, small))
    assert most == pytest.approx(4.0 / whole)
    assert plan.predictions[0].capacity_per_s == pytest.approx(whole)


@settings(max_examples=8)
@given(rate=st.floats(1.0, 30.0), strategy=st.sampled_from(["auto", "melange", "prfaas"]))
def test_balancing_changes_only_routing_and_never_raises_the_peak_utilization(
    rate: float, strategy: str
) -> None:
    problem = a_problem(a_demand(rate_per_s=rate))
    shop = TemplateFactory(problem, SHOP.templates_by_kind)
    plan = STRATEGIES[strategy](shop, SETTINGS).plan
    even = balance_load(problem, plan, SETTINGS.time_limit_s)
    assert verify(problem, even) == ()
    assert even.deployments == plan.deployments
    assert even.cost_usd_per_h == plan.cost_usd_per_h
    assert max(utilizations(problem, even).values()) <= max(utilizations(problem, plan).values()) * (1 + 1e-6)
    finished = [share.rate_per_s for share in even.shares if share.phase in ("decode", "closed")]
    assert sum(finished) == pytest.approx(rate)


def test_balancing_leaves_a_plan_that_falls_short_unchanged() -> None:
    problem = a_problem(a_demand(rate_per_s=5000.0))
    plan = STRATEGIES["melange"](TemplateFactory(problem), SETTINGS).plan
    assert plan.fraction < 1
    assert balance_load(problem, plan, SETTINGS.time_limit_s) is plan


def remote_prefill_problem(
    rate: float, terms: ModelTerms = NO_TERMS, away: str = "far", price: float = 1.2
) -> PlanningProblem:
    """GPUs that prefill well in other regions, on spot, joined to home by links of 40 Gbps."""
    lengths = tuple((float(tokens), 60.0, 0.2) for tokens in (300, 700, 1500, 3000, 6000))
    offers = {"near": {"1xA10": (1.2, 8)}, **{name: {"1xL40S": (price, 1)} for name in away.split()}}
    links = tuple(Link(name, "near", 40.0, 0.01) for name in away.split())
    ask = replace(a_demand(rate_per_s=rate, slo=Slo(4.0, 0.06), lengths=lengths), terms=terms)
    problem = a_problem(ask, offers=offers, links=links, codecs=CODECS)
    near, *others = problem.regions
    often = {"spot": True, "preemptions_per_h": 0.1}
    spot = [replace(r, offers=tuple(replace(o, **often) for o in r.offers)) for r in others]
    return replace(problem, regions=(near, *spot))


REMOTE = {
    "all of the demand": remote_prefill_problem(7.0),
    "a part of it": remote_prefill_problem(40.0),
    "two prefill clusters": remote_prefill_problem(9.0, away="far off"),
    "without any node": remote_prefill_problem(
        12.0, ModelTerms(survive="node", survive_share=0.5), "far off"
    ),
    "without spot": remote_prefill_problem(7.0, ModelTerms(max_spot_share=0.8)),
}


@pytest.mark.parametrize("strategy", ["prfaas", "coral"])
@pytest.mark.parametrize("case", REMOTE)
def test_remote_prefill_serves_prompts_above_a_threshold_that_the_plan_reports(
    case: str, strategy: str
) -> None:
    problem = REMOTE[case]
    plan = STRATEGIES[strategy](TemplateFactory(problem), SETTINGS).plan
    assert verify(problem, plan) == ()
    assert (plan.fraction < 1) == (case == "a part of it")
    (demand,), far = problem.demands, [0.0] * 5
    for flow in plan.flows:
        far[flow.bucket] += flow.rate_per_s * (flow.prefill_region != "near")
    shares = [round(rate / bucket.rate_per_s, 9) for rate, bucket in zip(far, demand.buckets, strict=True)]
    assert shares == sorted(shares)
    assert shares[0] == 0 < shares[-1]
    assert plan.thresholds == thresholds_of(plan)
    assert all(300 <= t.tokens < 6000 and t.link in ("far->near", "off->near") for t in plan.thresholds)
    assert verify(problem, balance_load(problem, plan, SETTINGS.time_limit_s)) == ()  # as a rehearsal does
    wrong = replace(plan, flows=tuple(replace(flow, bucket=4 - flow.bucket) for flow in plan.flows))
    assert any("longer ones stay" in text for text in verify(problem, wrong, rerouted=True))


def test_explanation_prices_the_length_order_and_says_why_no_kv_crosses() -> None:
    for problem, words in (
        (REMOTE["a part of it"], ""),
        (remote_prefill_problem(3.0, price=30.0), "cost $"),
    ):
        factory, planner = TemplateFactory(problem), STRATEGIES["prfaas"]
        outcome = planner(factory, SETTINGS)
        explanation = explain(factory, outcome, planner, SETTINGS)
        assert [price.extra_fraction > 1e-3 for price in explanation.terms] == ([] if words else [True])
        assert (explanation.crossings == ()) == (not words)
        assert all(words in line and "from far to near" in line for line in explanation.crossings)
