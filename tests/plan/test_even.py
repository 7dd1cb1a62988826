"""Plans whose copies are equally busy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_problem, an_ask

from potluck.core.values.plan import Deployment, Plan, Share
from potluck.plan.even import evened
from potluck.plan.problem import Problem
from potluck.plan.strategies import STRATEGIES, Settings, Workshop
from potluck.plan.verify import verify

SETTINGS = Settings(time_limit_s=5.0)
ONE_BUCKET = ((800, 150, 1.0),)
SHOP = Workshop(a_problem(an_ask(rate_per_s=5.0)))
"""Its templates serve every rate."""


def busy(problem: Problem, plan: Plan) -> dict[tuple[str, str], float]:
    """Share of their time that each deployment's copies work."""
    found: dict[tuple[str, str], float] = {}
    counts = {(d.template, d.region): d.count for d in plan.deployments}
    for share in plan.shares:
        capacity = plan.template(share.template).capacity[share.bucket]
        rate = getattr(capacity, f"{share.phase}_per_s")
        key = (share.template, share.region)
        found[key] = found.get(key, 0.0) + share.rate_per_s / rate / counts[key]
    return found


def test_unlike_copies_are_equally_busy() -> None:
    problem = a_problem(an_ask(rate_per_s=4.0, lengths=ONE_BUCKET))
    shop = Workshop(problem)
    found = [t for t in shop.mixed(problem.asks[0]) if t.nodes[0].node in ("1xL40S", "1xA10G")]
    big, small = sorted(found, key=lambda t: -t.capacity[0].closed_per_s)
    # Everything on the big one, nothing on the small one: allowed, as the big one is within its headroom.
    base = STRATEGIES["melange"](shop, SETTINGS).plan
    prices = {"1xL40S": 1.86, "1xA10G": 1.0}
    lopsided = Plan(
        "melange",
        (big, small),
        (Deployment(big.name, "east", 1), Deployment(small.name, "east", 1)),
        base.buckets,
        (Share(big.name, "east", 0, "closed", 4.0),),
        (),
        base.predictions,
        sum(prices[t.nodes[0].node] for t in (big, small)),
        0.0,
    )
    assert verify(problem, lopsided) == ()
    plan = evened(problem, lopsided, SETTINGS)
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
    shop = Workshop(problem, SHOP.made)
    plan = STRATEGIES[strategy](shop, SETTINGS).plan
    even = evened(problem, plan, SETTINGS)
    assert verify(problem, even) == ()
    assert even.deployments == plan.deployments
    assert even.cost_usd_per_h == plan.cost_usd_per_h
    assert max(busy(problem, even).values()) <= max(busy(problem, plan).values()) * (1 + 1e-6)
    finished = [share.rate_per_s for share in even.shares if share.phase in ("decode", "closed")]
    assert sum(finished) == pytest.approx(rate)


def test_a_plan_that_falls_short_is_left_as_it_is() -> None:
    problem = a_problem(an_ask(rate_per_s=5000.0))
    plan = STRATEGIES["melange"](Workshop(problem), SETTINGS).plan
    assert plan.fraction < 1
    assert evened(problem, plan, SETTINGS) is plan
