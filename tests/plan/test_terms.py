"""Terms of a plan: kept, verified, priced, and refused where unsupported."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_problems import a_demand, a_problem

from potluck.core.errors import InputError
from potluck.core.values.plan import Deployment, Plan
from potluck.core.values.service import ModelTerms
from potluck.core.values.types import Link, NodeOffer, Slo
from potluck.plan.explain import spot_risks, term_prices
from potluck.plan.problem import PlanningProblem, without_nodes
from potluck.plan.strategies import STRATEGIES, PlanOutcome, SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import solve_over
from potluck.plan.timing.network_cards import wire_bits
from potluck.plan.verify import verify

SETTINGS = SolveSettings(time_limit_s=20.0)
OFFERS = {"east": {"1xL40S": (1.86, 8), "1xA10G": (1.0, 8)}, "west": {"1xL40S": (2.2, 8)}}


def problem_with_terms(terms: ModelTerms, **more: object) -> PlanningProblem:
    problem = a_problem(replace(a_demand(rate_per_s=5.0), terms=terms), offers=OFFERS)
    return replace(problem, **more)  # type: ignore[arg-type]


def outcome_of(problem: PlanningProblem, strategy: str = "melange") -> PlanOutcome:
    return STRATEGIES[strategy](TemplateFactory(problem), SETTINGS)


def verified_plan(problem: PlanningProblem) -> Plan:
    plan = outcome_of(problem).plan
    assert plan.fraction == 1
    assert verify(problem, plan) == ()
    return plan


def copies(plan: Plan) -> int:
    return sum(deployment.count for deployment in plan.deployments)


PLAIN = problem_with_terms(ModelTerms())


def problem_with_offers(problem: PlanningProblem, **changes: NodeOffer) -> PlanningProblem:
    east = problem.regions[0]
    offers = tuple(changes.get(offer.node.removeprefix("1x"), offer) for offer in east.offers)
    return replace(problem, regions=(replace(east, offers=offers), *problem.regions[1:]))


def test_survive_node_term_adds_a_node_and_verify_requires_it() -> None:
    plain, plan = verified_plan(PLAIN), verified_plan(problem_with_terms(ModelTerms(survive="node")))
    assert copies(plan) > copies(plain)
    assert all(share.rate_per_s > 0 for share in plan.shares)
    assert len(plan.shares) >= len(plan.deployments)  # none of them idle until it is needed
    fewer = replace(plan, deployments=plain.deployments, templates=plain.templates, shares=plain.shares)
    assert any(
        "without a node of" in line for line in verify(problem_with_terms(ModelTerms(survive="node")), fewer)
    )


def test_homo_counts_spot_nodes_as_the_same_type() -> None:
    """Its one type may be rented both ways, so that a share on spot can be kept."""
    hedge = replace(PLAIN.node("1xL40S"), name="1xL40S spot")
    problem = problem_with_terms(ModelTerms(max_spot_share=0.0))
    east = problem.regions[0]
    offers = (*east.offers, NodeOffer("1xL40S spot", 0.4, 8, spot=True, preemptions_per_h=0.1))
    problem = replace(problem, regions=(replace(east, offers=offers),), nodes=(*problem.nodes, hedge))
    plan = outcome_of(problem, "homo").plan
    assert plan.fraction == 1
    assert {node for _, node in plan.nodes} == {"1xL40S"}
    assert verify(problem, plan) == ()


def test_survive_region_term_deploys_in_two_regions() -> None:
    plan = verified_plan(problem_with_terms(ModelTerms(survive="region", survive_share=0.5)))
    assert {deployment.region for deployment in plan.deployments} == {"east", "west"}


def test_max_spot_share_term_limits_the_demand_on_spot_nodes() -> None:
    cheap = NodeOffer("1xA10G", 0.3, 8, spot=True, preemptions_per_h=0.1)
    free = problem_with_offers(problem_with_terms(ModelTerms()), A10G=cheap)
    all_spot = verified_plan(free)
    assert {node for _, node in all_spot.nodes} == {"1xA10G"}
    (risk,) = spot_risks(free, all_spot)
    assert risk.served_without == 0
    assert risk.preemptions_per_h == pytest.approx(0.1 * risk.spot_nodes)
    half = problem_with_offers(problem_with_terms(ModelTerms(max_spot_share=0.5)), A10G=cheap)
    plan = verified_plan(half)
    assert spot_risks(half, plan)[0].served_without >= 0.5
    assert any(charge.what == "preemptions" for charge in plan.charges)
    assert any("without spot nodes" in line for line in verify(half, all_spot))


@pytest.mark.parametrize(
    "terms",
    [
        ModelTerms(regions=("west",)),
        ModelTerms(residency=("west",)),
        ModelTerms(nodes=("1xL40S",)),
        ModelTerms(min_copies=5),
        ModelTerms(max_copies=3),
        ModelTerms(max_gpu_kinds=1),
        ModelTerms(max_nodes=1, max_stages=1),
    ],
)
def test_limit_terms_are_kept_and_verified(terms: ModelTerms) -> None:
    problem = problem_with_terms(terms)
    plan = verified_plan(problem)
    other = replace(
        PLAIN, demands=(replace(PLAIN.demands[0], terms=ModelTerms(nodes=("1xA10G",), regions=("east",))),)
    )
    if terms.regions or terms.residency or terms.nodes:
        assert verify(problem, verified_plan(other))
    if terms.min_copies:
        assert copies(plan) >= 5
        assert any(
            "copies for decode, min_copies is 5" in line for line in verify(problem, verified_plan(PLAIN))
        )
    if terms.max_copies:
        assert copies(plan) <= 3


def test_min_copies_counts_only_copies_that_serve_requests() -> None:
    """One of each node: the cheapest second copy would be one that only decodes, which nobody needs."""
    one_each = {
        "east": {"1xL40S": (1.86, 1), "1xA10G": (0.9, 1), "1xL4": (0.5, 1)},
        "west": {"1xL40S": (2.2, 1)},
    }
    ask = replace(a_demand(rate_per_s=0.4), terms=ModelTerms(min_copies=2))
    problem = a_problem(ask, offers=one_each)
    plan = outcome_of(problem, "auto").plan
    assert verify(problem, plan) == ()
    rates = {d.template: 0.0 for d in plan.deployments}
    for share in plan.shares:
        rates[share.template] += share.rate_per_s
    assert min(rates.values()) > 0
    for other in ("prefill", "decode"):
        able = [d for d in plan.deployments if plan.template(d.template).replicas[0].role != other]
        assert sum(d.count for d in able) >= 2
    assert (
        outcome_of(replace(problem, demands=(replace(ask, terms=ModelTerms(min_copies=3)),))).plan.fraction
        == 1
    )


def test_max_copies_serves_part_of_the_demand_and_names_the_limit() -> None:
    outcome = outcome_of(problem_with_terms(ModelTerms(max_copies=1)))
    assert 0 < outcome.plan.fraction < 1
    assert "at most 1 copies of chat" in str(outcome.allocation.shortfall)


def test_reserved_nodes_add_no_rent() -> None:
    plain = verified_plan(PLAIN)
    paid = problem_with_offers(PLAIN, L40S=NodeOffer("1xL40S", 1.86, 8, reserved=8))
    plan = verified_plan(paid)
    assert plan.cost_usd_per_h == pytest.approx(0.0)
    assert plain.cost_usd_per_h > 1
    one = problem_with_offers(PLAIN, L40S=NodeOffer("1xL40S", 1.86, 8, reserved=1))
    assert verified_plan(one).cost_usd_per_h == pytest.approx(plain.cost_usd_per_h - 1.86)
    few = without_nodes(paid, "east", "1xL40S", 2)  # fewer than are reserved
    assert verify(few, outcome_of(few).plan) == ()
    wrong = replace(plan, cost_usd_per_h=5.0)
    assert any("costs" in line for line in verify(paid, wrong))


def test_charges_beside_rent_decide_the_region() -> None:
    """West is dearer to rent, but has no head node to pay for."""
    east, west = PLAIN.regions
    regions = (replace(east, head_usd_per_h=50.0, storage_usd_per_gb_month=1.0), west)
    plan = verified_plan(replace(PLAIN, regions=regions))
    assert {deployment.region for deployment in plan.deployments} == {"west"}
    there = verified_plan(replace(PLAIN, regions=(regions[0],)))
    text = {charge.what: charge.usd_per_h for charge in there.charges}
    assert text["head nodes"] == 50.0
    assert text["weights in storage"] == pytest.approx(16.06 / 730, rel=0.01)
    assert there.total_usd_per_h == pytest.approx(there.cost_usd_per_h + sum(text.values()))


def test_egress_is_charged_and_verified() -> None:
    """One region only prefills, the other only decodes: KV must cross, and is paid for by the gigabyte."""
    links = (Link("east", "west", 50.0, 0.01, 0.05),)
    problem = a_problem(
        a_demand(rate_per_s=2.0, slo=Slo(6.0, 0.06)),
        offers={"east": {"1xA10G": (0.4, 8)}, "west": {"1xL40S": (0.5, 1)}},
        links=links,
    )
    factory = TemplateFactory(problem)
    made = factory.phased(problem.demands[0])
    few = [t for t in made if t.replicas[0].role == ("prefill" if "A10G" in t.name else "decode")]
    plan = solve_over(factory, SETTINGS, "prfaas", {"chat": few}).plan
    assert plan.fraction == 1
    assert verify(problem, plan) == ()
    gb_per_s = sum(
        flow.rate_per_s * float(wire_bits(problem.demands[0], flow.codec)[flow.bucket]) / 8e9
        for flow in plan.flows
    )
    (charge,) = plan.charges
    assert charge.what == "egress"
    assert charge.usd_per_h == pytest.approx(gb_per_s * 3600 * 0.05)
    unpaid = replace(plan, charges=())
    assert any("for egress" in line for line in verify(problem, unpaid))


def test_every_term_has_the_price_of_planning_without_it() -> None:
    factory = TemplateFactory(problem_with_terms(ModelTerms(survive="node", regions=("west",))))
    outcome = STRATEGIES["melange"](factory, SETTINGS)
    prices = {each.term: each for each in term_prices(factory, outcome, STRATEGIES["melange"], SETTINGS)}
    assert set(prices) == {"redundancy", "regions"}
    for price in prices.values():
        assert price.extra_usd_per_h is not None
        assert price.extra_usd_per_h > 0
    saved = (
        outcome.plan.total_usd_per_h
        - verified_plan(problem_with_terms(ModelTerms(regions=("west",)))).total_usd_per_h
    )
    assert prices["redundancy"].extra_usd_per_h == pytest.approx(saved)


@pytest.mark.parametrize("strategy", ["cauchy", "cauchy-ce", "thunderserve", "hexgen"])
def test_strategies_that_cannot_keep_a_term_refuse_it(strategy: str) -> None:
    with pytest.raises(InputError, match="cannot keep redundancy of chat"):
        outcome_of(problem_with_terms(ModelTerms(survive="node")), strategy)


def test_cauchy_plan_keeps_the_region_term() -> None:
    problem = problem_with_terms(ModelTerms(regions=("west",)))
    plan = outcome_of(problem, "cauchy").plan
    assert {deployment.region for deployment in plan.deployments} == {"west"}
    assert verify(problem, plan) == ()
    moved = replace(plan, deployments=(Deployment(plan.deployments[0].template, "east", 1),), shares=())
    assert any("do not allow this placement" in line for line in verify(problem, moved))


def two_model_problem(low: ModelTerms, high: ModelTerms, nodes: int) -> PlanningProblem:
    asks = (
        replace(a_demand("low", rate_per_s=6.0), terms=low),
        replace(a_demand("high", rate_per_s=6.0), terms=high),
    )
    return a_problem(*asks, offers={"east": {"1xL40S": (1.86, nodes)}})


@pytest.mark.parametrize("spare", [False, True])
def test_model_with_higher_priority_is_served_first(spare: bool) -> None:
    """Nodes for about one of two models: alike half of each, by priority all of one and the rest of the other."""
    high = ModelTerms(priority=1, survive="node" if spare else None)
    problem = two_model_problem(ModelTerms(), high, 5 if spare else 4)
    alike = outcome_of(two_model_problem(ModelTerms(), replace(high, priority=0), 5 if spare else 4)).plan
    plan = outcome_of(problem).plan
    assert alike.fraction_of("high") == alike.fraction_of("low") == alike.fraction < 1
    assert plan.fraction_of("high") == 1
    assert plan.fraction == plan.fraction_of("low") < alike.fraction
    assert verify(problem, plan) == ()
    wrong = replace(plan, predictions=tuple(replace(each, fraction=1.0) for each in plan.predictions))
    assert any(line.startswith("low bucket") for line in verify(problem, wrong))


def test_priorities_do_not_change_a_plan_that_serves_all_demand() -> None:
    plan = outcome_of(two_model_problem(ModelTerms(priority=-3), ModelTerms(priority=5), 16)).plan
    assert plan.fraction == 1
    assert all(prediction.fraction is None for prediction in plan.predictions)
