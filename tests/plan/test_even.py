"""Plans whose copies are equally busy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_problem, an_ask

from potluck.core.values.plan import Deployment, Plan, PlannedShare
from potluck.core.values.types import Link, Slo
from potluck.plan.assemble.even_shares import evened
from potluck.plan.problem import CODECS, PlanningProblem
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.verify import verify

SETTINGS = SolveSettings(time_limit_s=5.0)
ONE_BUCKET = ((800, 150, 1.0),)
SHOP = TemplateFactory(a_problem(an_ask(rate_per_s=5.0)))  # Its templates serve every rate.


def busy(problem: PlanningProblem, plan: Plan) -> dict[tuple[str, str], float]:
    """Share of their time that each deployment's copies work."""
    result: dict[tuple[str, str], float] = {}
    counts = {(d.template, d.region): d.count for d in plan.deployments}
    for share in plan.shares:
        rate = getattr(plan.template(share.template).capacity[share.bucket], f"{share.phase}_per_s")
        key = (share.template, share.region)
        result[key] = result.get(key, 0.0) + share.rate_per_s / rate / counts[key]
    return result


def test_unlike_copies_are_equally_busy() -> None:
    problem = a_problem(an_ask(rate_per_s=4.0, lengths=ONE_BUCKET))
    shop = TemplateFactory(problem)
    result = [t for t in shop.mixed(problem.asks[0]) if t.nodes[0].node in ("1xL40S", "1xA10G")]
    big, small = sorted(result, key=lambda t: -t.capacity[0].closed_per_s)
    # Everything on the big one, nothing on the small one: allowed, as the big one is within its headroom.
    base = STRATEGIES["melange"](shop, SETTINGS).plan
    prices = {"1xL40S": 1.86, "1xA10G": 1.0}
    lopsided = Plan(
        "melange",
        (big, small),
        (Deployment(big.name, "east", 1), Deployment(small.name, "east", 1)),
        base.buckets,
        (PlannedShare(big.name, "east", 0, "closed", 4.0),),
        (),
        base.predictions,
        sum(prices[t.nodes[0].node] for t in (big, small)),
        0.0,
    )
    assert verify(problem, lopsided) == ()
    plan = evened(problem, lopsided, SETTINGS.time_limit_s)
    shares = busy(problem, plan)
    assert len(shares) == 2
    assert min(shares.values()) == pytest.approx(max(shares.values()))
    whole = sum(t.capacity[0].closed_per_s for t in (big, small))
    assert max(shares.values()) == pytest.approx(4.0 / whole)
    assert plan.predictions[0].capacity_per_s == pytest.approx(whole)


@settings(max_examples=8)
@given(rate=st.floats(1.0, 30.0), strategy=st.sampled_from(["auto", "melange", "prfaas"]))
def test_nothing_but_the_routing_changes_and_nobody_gets_busier_than_the_busiest(
    rate: float, strategy: str
) -> None:
    problem = a_problem(an_ask(rate_per_s=rate))
    shop = TemplateFactory(problem, SHOP.made)
    plan = STRATEGIES[strategy](shop, SETTINGS).plan
    even = evened(problem, plan, SETTINGS.time_limit_s)
    assert verify(problem, even) == ()
    assert even.deployments == plan.deployments
    assert even.cost_usd_per_h == plan.cost_usd_per_h
    assert max(busy(problem, even).values()) <= max(busy(problem, plan).values()) * (1 + 1e-6)
    finished = [share.rate_per_s for share in even.shares if share.phase in ("decode", "closed")]
    assert sum(finished) == pytest.approx(rate)


def test_a_plan_that_falls_short_is_left_as_it_is() -> None:
    problem = a_problem(an_ask(rate_per_s=5000.0))
    plan = STRATEGIES["melange"](TemplateFactory(problem), SETTINGS).plan
    assert plan.fraction < 1
    assert evened(problem, plan, SETTINGS.time_limit_s) is plan


def test_prompts_from_some_length_on_cross_and_routing_has_that_threshold() -> None:
    """PrfaaS 3.3: long ones are prefilled elsewhere, short ones at home, by the same copies at the same cost."""
    lengths = tuple((float(tokens), 60.0, 0.2) for tokens in (300, 700, 1500, 3000, 6000))
    offers = {"near": {"1xA10": (1.2, 8)}, "far": {"1xL40S": (1.2, 1)}}
    links = (Link("far", "near", 40.0, 0.01),)
    problem = a_problem(
        an_ask(rate_per_s=7.0, slo=Slo(4.0, 0.06), lengths=lengths), offers=offers, links=links, codecs=CODECS
    )
    plan = STRATEGIES["prfaas"](TemplateFactory(problem), SETTINGS).plan
    assert plan.fraction == 1
    assert verify(problem, plan) == ()
    far = [0.0] * len(lengths)
    for flow in plan.flows:
        far[flow.bucket] += flow.rate_per_s * (flow.prefill_region == "far")
    shares = [rate / demand.rate_per_s for rate, demand in zip(far, problem.asks[0].demands, strict=True)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.0)
    assert shares[-1] == pytest.approx(1.0)
    (threshold,) = plan.thresholds
    assert 300 <= threshold.tokens < 6000
    even = evened(problem, plan, SETTINGS.time_limit_s)  # as a rehearsal does
    assert even.flows == plan.flows
