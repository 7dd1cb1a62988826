"""Every strategy gives a sound plan that is never better than `auto`."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_demand, a_problem

from potluck.core.values.engine_abilities import ENGINES
from potluck.core.values.plan import Charge, Deployment, plan_from_json, plan_to_json
from potluck.core.values.service import ModelTerms
from potluck.core.values.types import Link, Slo
from potluck.plan.explain import (
    MAX_COMPARABLE_GAP,
    describe,
    expected,
    explain,
    single_copies,
    usd_per_million_tokens,
    without_nodes,
)
from potluck.plan.problem import CODECS, ModelDemand, PlanningProblem
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.strategies.pool_strategy import is_searchable
from potluck.plan.verify import verify

NODES = ("1xL40S", "1xA10G", "2xL4", "1xH100", "1xA100", "1xRTX4090")
QUICK = SolveSettings(time_limit_s=20.0, gap_target=0.0)


@st.composite
def fleets(draw: st.DrawFn) -> PlanningProblem:
    offers: dict[str, dict[str, tuple[float, int]]] = {}
    for region in ("east", "west")[: draw(st.integers(1, 2))]:
        names = draw(st.lists(st.sampled_from(NODES), min_size=1, max_size=3, unique=True))
        offers[region] = {name: (draw(st.floats(0.3, 9.0)), draw(st.integers(1, 6))) for name in names}
    asks = [a_demand(rate_per_s=draw(st.floats(0.5, 12.0)), slo=Slo(draw(st.floats(1.0, 4.0)), 0.08))]
    if draw(st.booleans()):
        asks.append(a_demand("small", "Qwen2-7B", draw(st.floats(0.5, 8.0)), lengths=((500, 100, 1.0),)))
    links = (Link("east", "west", 5.0, 0.02),) if len(offers) == 2 else ()
    return a_problem(*asks, offers=offers, links=links)


@pytest.mark.slow
@settings(max_examples=6)
@given(fleets())
def test_auto_is_never_costlier_than_a_strategy_and_every_plan_is_sound(problem: PlanningProblem) -> None:
    """Without a written pool `auto` looks for groups of machines only in small fleets, for one model."""
    factory = TemplateFactory(problem)
    names = [name for name in STRATEGIES if name not in ("thunderserve", "hexgen") or is_searchable(problem)]
    plans = {name: STRATEGIES[name](factory, QUICK).plan for name in names}
    best = plans["auto"]
    for name, plan in plans.items():
        assert verify(problem, plan) == (), name
        assert best.fraction >= plan.fraction - 1e-6, name
        if plan.fraction >= 1 - 1e-9 and best.fraction >= 1 - 1e-9:
            assert best.cost_usd_per_h <= plan.cost_usd_per_h * (1 + 1e-6), name


@pytest.mark.slow
@settings(max_examples=3)
@given(fleets(), st.sampled_from([0.02, 0.05, 0.2]))
def test_complexity_share_affects_the_choice_but_not_the_reported_cost(
    problem: PlanningProblem, share: float
) -> None:
    """The plan is the best at these weights, no other strategy's is better; what is shown is what is paid."""
    weighing = replace(problem, complexity_share=share)
    cheapest = STRATEGIES["auto"](TemplateFactory(problem), QUICK)
    chosen = STRATEGIES["auto"](TemplateFactory(weighing), QUICK)
    assert verify(weighing, chosen.plan) == ()
    assert chosen.plan.fraction == pytest.approx(cheapest.plan.fraction, abs=1e-6)
    if chosen.plan.fraction < 1 - 1e-9:
        return
    assert chosen.plan.total_usd_per_h >= cheapest.plan.total_usd_per_h * (1 - 1e-6)
    counted = chosen.weighted_usd_per_h - chosen.plan.total_usd_per_h
    assert chosen.allocation.cost_usd_per_h == pytest.approx(chosen.weighted_usd_per_h, rel=1e-6)
    again = {deployment.template for deployment in cheapest.plan.deployments}
    if chosen.columns.counts_of(cheapest.plan) is not None and again:
        crossing = any(flow.prefill_region != flow.decode_region for flow in cheapest.plan.flows)
        most = cheapest.plan.total_usd_per_h + chosen.columns.complexity_usd_per_h(cheapest.plan)
        assert crossing or chosen.plan.total_usd_per_h + counted <= most * (1 + 1e-4)
    for name in ("melange", "homo", "coral", "prfaas"):
        rival = STRATEGIES[name](TemplateFactory(weighing), QUICK)
        if rival.plan.fraction >= 1 - 1e-9 and len(problem.regions) == 1:
            assert chosen.weighted_usd_per_h <= rival.weighted_usd_per_h * (1 + 1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("h100_usd_per_h", "share", "machines"), [(1.5, 0.0, 4), (1.5, 0.05, 1), (1.8, 0.05, 4), (1.3, 0.0, 1)]
)
def test_four_machines_are_chosen_only_when_they_save_more_than_their_complexity_costs(
    h100_usd_per_h: float, share: float, machines: int
) -> None:
    """Four RTX 4090 for $1.36 where one H100 would do."""
    ask = a_demand("oss", "gpt-oss-120b", 0.1, Slo(2.0, 0.05), ((1000, 300, 1.0),))
    offers = {"home": {"1xRTX4090": (0.34, 8), "1xH100": (h100_usd_per_h, 2)}}
    problem = replace(a_problem(ask, offers=offers), complexity_share=share)
    plan = STRATEGIES["auto"](TemplateFactory(problem), QUICK).plan
    assert sum(plan.nodes.values()) == machines


def test_plan_ties_go_to_the_simpler_plan_that_survives_more_losses() -> None:
    """Two machines with one L4 each, one with two, or a pipeline of two: all cost the same."""
    ask = a_demand(rate_per_s=1.5, slo=Slo(2.0, 0.12), lengths=((800, 200, 1.0),))
    problem = a_problem(ask, offers={"home": {"2xL4": (1.6, 4), "1xL4": (0.8, 8)}})
    outcome = STRATEGIES["auto"](TemplateFactory(replace(problem, complexity_share=0.05)), QUICK)
    assert describe(outcome.plan, "chat") == ("2 x mixed 1xL4 tp1 in home",)
    assert single_copies(problem, outcome.plan) == ()
    little = a_problem(a_demand(rate_per_s=0.1))
    one = STRATEGIES["auto"](TemplateFactory(little), QUICK).plan
    assert [model for model, _ in single_copies(little, one)] == ["chat"]


def test_plan_survives_its_json_file() -> None:
    plan = STRATEGIES["auto"](TemplateFactory(a_problem()), QUICK).plan
    assert plan_from_json(plan_to_json(plan)) == plan


def test_fleet_too_small_gives_the_largest_fraction_and_names_the_binding_node() -> None:
    problem = a_problem(a_demand(rate_per_s=500.0), offers={"home": {"1xA10G": (1.0, 2)}})
    outcome = STRATEGIES["auto"](TemplateFactory(problem), QUICK)
    assert 0 < outcome.plan.fraction < 1
    assert "1xA10G" in str(outcome.allocation.shortfall)
    assert verify(problem, outcome.plan) == ()


def test_auto_is_not_costlier_than_a_strategy_when_time_runs_out() -> None:
    """The clock jumps past the limit after a few looks, so the large program cannot be finished."""

    def impatient() -> SolveSettings:
        ticks = iter(range(10_000_000))
        return SolveSettings(time_limit_s=8.0, gap_target=0.0, clock=lambda: float(next(ticks)))

    factory = TemplateFactory(a_problem(a_demand(rate_per_s=25.0)))
    best = STRATEGIES["auto"](factory, impatient()).plan
    for name in ("homo", "melange", "prfaas", "cauchy-mc"):
        plan = STRATEGIES[name](factory, replace(impatient(), time_limit_s=1.0)).plan
        assert (best.fraction, -best.cost_usd_per_h) >= (plan.fraction, -plan.cost_usd_per_h - 1e-9), name
    assert verify(factory.problem, best) == ()


def test_plan_stopped_by_the_time_limit_is_sound() -> None:
    """A clock that jumps past the limit at once: whatever comes back, it serves what it says."""
    ticks = iter(range(0, 10_000_000, 1000))
    late = SolveSettings(time_limit_s=0.5, clock=lambda: float(next(ticks)))
    problem = a_problem(a_demand(rate_per_s=30.0))
    outcome = STRATEGIES["coral"](TemplateFactory(problem), late)
    assert verify(problem, outcome.plan) == ()
    assert outcome.plan.deployments or outcome.plan.fraction == 0


def test_objective_below_the_physical_minimum_is_named_in_the_shortfall() -> None:
    problem = a_problem(a_demand(slo=Slo(0.001, 0.0001, 1.0)))
    outcome = STRATEGIES["auto"](TemplateFactory(problem), QUICK)
    assert outcome.plan.fraction == 0
    assert "chat" in str(outcome.allocation.shortfall)


def test_running_plan_is_kept_when_a_change_saves_less_than_its_penalty() -> None:
    offers = {"home": {"1xL40S": (1.86, 8), "1xA10G": (1.0, 8)}}
    ask = a_demand(rate_per_s=3.0)
    dear = a_problem(ask, offers={"home": {"1xL40S": (1.86, 8), "1xA10G": (1.9, 8)}})
    previous_plan = STRATEGIES["melange"](TemplateFactory(dear), QUICK).plan
    cheap = a_problem(ask, offers=offers)
    free = STRATEGIES["melange"](TemplateFactory(cheap), SolveSettings(running=previous_plan)).plan
    sticky = PlanningProblem(cheap.demands, cheap.regions, cheap.nodes, init_penalty=1.0)
    kept = STRATEGIES["melange"](TemplateFactory(sticky), SolveSettings(running=previous_plan)).plan
    assert free.cost_usd_per_h < previous_plan.cost_usd_per_h
    assert kept.deployments == previous_plan.deployments


@pytest.mark.parametrize("name", ["chat: mixed 1xL40S tp1", "chat: decode pipeline 3 1xL40S"])
def test_pinned_deployment_is_in_the_plan(name: str) -> None:
    factory = TemplateFactory(a_problem())
    plan = STRATEGIES["auto"](factory, SolveSettings(pins=(Deployment(name, "east", 2),))).plan
    assert next(deployment.count for deployment in plan.deployments if deployment.template == name) >= 2


def test_term_that_excludes_nothing_does_not_change_the_plan() -> None:
    east = {"1xA100": (2.71, 48), "2xRTX4090": (1.35, 48), "1xH100": (4.43, 24), "2xA100": (4.35, 24)}
    ask = a_demand("big", "Llama-3.1-70B", 1.2, Slo(3.43, 0.103), ((2500, 200, 1.0),))
    asks = [ask, replace(ask, terms=ModelTerms(max_copies=40))]
    factories = [TemplateFactory(a_problem(each, offers={"east": east})) for each in asks]
    plans = [STRATEGIES["auto"](factory, QUICK).plan for factory in factories]
    assert plans[0].deployments == plans[1].deployments


def test_remote_prefill_uses_a_link_only_when_there_is_one() -> None:
    """A site with compute but no memory to decode, one with memory but little compute: KV crosses, or cannot."""
    ask = a_demand(rate_per_s=12.0, lengths=((6000, 200, 1.0),), slo=Slo(1.5, 0.06))
    offers = {"site": {"1xH100": (3.0, 4)}, "home": {"1xA10G": (0.5, 40)}}
    joined = a_problem(ask, offers=offers, links=(Link("site", "home", 100.0, 0.02),), codecs=CODECS)
    plan = STRATEGIES["coral"](TemplateFactory(joined), QUICK).plan
    assert {(f.prefill_region, f.decode_region) for f in plan.flows} & {("site", "home")}
    apart = STRATEGIES["coral"](TemplateFactory(a_problem(ask, offers=offers)), QUICK).plan
    assert all(f.prefill_region == f.decode_region for f in apart.flows)
    assert apart.fraction < 1 or apart.cost_usd_per_h >= plan.cost_usd_per_h


def check_reasons(problem: PlanningProblem, name: str, asking: SolveSettings) -> list[str]:
    """Each reason that is given, worked out anew with all the time it takes; how often each answer was given."""
    planner, factory = STRATEGIES[name], TemplateFactory(problem)
    outcome = planner(factory, QUICK)
    if outcome.plan.fraction < 1:
        return []
    explanation, given = explain(factory, outcome, planner, asking), []

    def check(answer: str, usd_per_h: float | None, changed: PlanningProblem) -> None:
        given.append(answer)
        if answer == "not asked" or answer == "not known":
            assert usd_per_h is None
            return
        other = planner(TemplateFactory(changed), QUICK).plan
        assert (other.fraction < 1) == (answer == "not enough")
        if usd_per_h is not None:
            extra, cost = other.total_usd_per_h - outcome.plan.total_usd_per_h, other.total_usd_per_h
            assert usd_per_h == pytest.approx(
                extra, abs=2 * MAX_COMPARABLE_GAP * cost if asking != QUICK else 2e-4 * cost
            )

    for reason in explanation.models:
        assert reason.served_by == describe(outcome.plan, reason.model)
        left = tuple(node.name for node in problem.nodes if node.name not in reason.without)
        asks = tuple(
            replace(a, terms=replace(a.terms, nodes=left)) if a.name == reason.model else a
            for a in problem.demands
        )
        check(reason.answer, reason.next_best_usd_per_h, replace(problem, demands=asks))
    for node in explanation.nodes:
        assert node.rented == outcome.plan.nodes.get((node.region, node.node), 0)
        saved = None if node.one_more_usd_per_h is None else -node.one_more_usd_per_h
        check(node.one_more, saved, without_nodes(problem, node.region, node.node, node.available + 1))
        if node.rented and not (node.rented == 1 and len(problem.nodes) == 1):
            less = without_nodes(problem, node.region, node.node, node.rented - 1)
            check(node.one_fewer, node.one_fewer_usd_per_h, less)
    return given


@settings(max_examples=10, deadline=None)
@given(fleets(), st.sampled_from([0.0, 0.05]))
def test_explanation_reasons_hold_when_planned_again(problem: PlanningProblem, share: float) -> None:
    check_reasons(replace(problem, complexity_share=share), "melange", QUICK)


def test_explanation_question_without_time_is_reported_as_not_known() -> None:
    """Running out of time is neither a cost nor proof that something cannot be."""
    given = []
    for place, offers in enumerate(
        ({"1xL40S": (1.86, 2), "2xL4": (1.6, 4)}, {"1xA10G": (1.0, 9), "1xH100": (6.9, 1)})
    ):
        ticks = count()
        hurried = SolveSettings(time_limit_s=4.0, clock=lambda ticks=ticks: 0.2 * next(ticks))
        problem = a_problem(a_demand(rate_per_s=4.0 + place), offers={"east": offers})
        given += check_reasons(problem, "melange", hurried)
    assert "not known" in given


def test_simulated_plan_is_not_compared_with_plans_on_averages() -> None:
    """It has more than averages ask for: what a change costs is between plans of one kind."""
    factory, planner = TemplateFactory(a_problem(a_demand(rate_per_s=4.0))), STRATEGIES["melange"]
    base_outcome = planner(factory, QUICK)
    asks = tuple(with_rate(demand, 12.0) for demand in factory.problem.demands)
    more = planner(replace(factory, problem=replace(factory.problem, demands=asks)), QUICK)
    rehearsed = replace(base_outcome, plan=more.plan)
    assert more.plan.cost_usd_per_h > base_outcome.plan.cost_usd_per_h
    explanation = explain(factory, rehearsed, planner, QUICK)
    assert explanation.on_averages
    values = [node.one_fewer_usd_per_h for node in explanation.nodes] + [
        reason.next_best_usd_per_h for reason in explanation.models
    ]
    assert all(value is None or value >= -1e-6 for value in values)


def test_choices_within_prediction_error_name_the_measurement_that_would_decide() -> None:
    """Of two GPUs that cost alike, the one that is known less is to be measured; one three times as dear is told."""
    planner, ask = STRATEGIES["melange"], a_demand(rate_per_s=600.0)
    alone = {
        node: planner(TemplateFactory(a_problem(ask, offers={"east": {node: (1.0, 999)}})), QUICK).plan
        for node in ("1xL40S", "1xH100-SXM")
    }
    said = []
    for times in (1.03, 3.0):
        prices = {node: 1.0 / plan.cost_usd_per_h for node, plan in alone.items()}
        offers = {"1xL40S": (prices["1xL40S"] * times, 999), "1xH100-SXM": (prices["1xH100-SXM"], 999)}
        factory = TemplateFactory(a_problem(ask, offers={"east": offers}))
        (reason,) = explain(factory, planner(factory, QUICK), planner, QUICK).models
        assert reason.next_best_usd_per_h is not None
        said.append(reason.unsure)
    assert "cost the same within the uncertainty" in said[0]
    assert "`potluck profile URL --gpu L40S --tp 1`" in said[0]
    assert said[1] == ""


def with_rate(demand: ModelDemand, rate_per_s: float) -> ModelDemand:
    share = rate_per_s / demand.rate_per_s
    return replace(
        demand,
        buckets=tuple(replace(bucket, rate_per_s=bucket.rate_per_s * share) for bucket in demand.buckets),
    )


@settings(max_examples=8, deadline=None)
@given(fleets())
def test_expected_plan_figures_use_full_capacity_and_all_charges(problem: PlanningProblem) -> None:
    """However little of it is asked for; and parts of the cost add up to the plan's, charges and all."""
    plan = STRATEGIES["melange"](TemplateFactory(problem), QUICK).plan
    plan = replace(plan, charges=(Charge("egress", 0.75),))
    told = expected(problem, plan, {"chat": (0.25, 0.01)})
    for demand, prediction in zip(problem.demands, told.predictions, strict=True):
        assert (prediction.ttft_s, prediction.tpot_s) == (0.25, 0.01) or demand.name != "chat"
        assert prediction.simulated == (demand.name == "chat")
        tokens_per_s = prediction.prompt_tokens_per_s + prediction.answer_tokens_per_s
        assert tokens_per_s == pytest.approx(demand.tokens_per_s * plan.fraction_of(demand.name))
        mine = [d for d in plan.deployments if plan.template(d.template).model == demand.name]
        if len(mine) == 1:  # then it has a closed form
            rates = [capacity.closed_per_s for capacity in plan.template(mine[0].template).capacity]
            busy_s = (
                sum(bucket.rate_per_s / rate for bucket, rate in zip(demand.buckets, rates, strict=True))
                / demand.rate_per_s
            )
            assert prediction.capacity_per_s == pytest.approx(mine[0].count / busy_s, rel=1e-5)
        before = next(item for item in plan.predictions if item.model == demand.name)
        assert prediction.capacity_per_s >= before.capacity_per_s * (1 - 1e-5)
    if plan.deployments:
        tokens = [
            demand.tokens_per_s * plan.fraction_of(demand.name) * 3600 / 1e6 for demand in problem.demands
        ]
        paid = [usd_per_million_tokens(problem, plan, demand.name) for demand in problem.demands]
        whole = sum(cost * count for cost, count in zip(paid, tokens, strict=True))
        assert whole == pytest.approx(plan.total_usd_per_h)


def test_mixed_replica_decodes_for_others_where_that_saves_a_node() -> None:
    """CRONUS's GPUs, four of each: with every replica in one role it takes four A100; so three and an A10 do."""
    ask = a_demand(rate_per_s=23.6, slo=Slo(3.0, 0.1), lengths=((1014, 247, 1.0),))
    problem = a_problem(ask, offers={"lab": {"1xA100-80": (1.59, 4), "1xA10": (1.29, 4)}})
    factory = TemplateFactory(problem)
    plan = STRATEGIES["auto"](factory, QUICK).plan
    assert verify(problem, plan) == ()
    assert plan.cost_usd_per_h < min(
        STRATEGIES[name](factory, QUICK).plan.cost_usd_per_h for name in ("cauchy", "cronus", "coral")
    )
    (both,) = (d for d in plan.deployments if " mixed and decode " in d.template)
    phases = {share.phase for share in plan.shares if share.template == both.template}
    assert (both.count, phases) == (1, {"closed", "decode"})  # the others decode alone, which is simpler
    template = plan.template(both.template)
    busy = sum(
        share.rate_per_s / getattr(template.capacity[0], f"{share.phase}_per_s")
        for share in plan.shares
        if share.template == both.template
    )
    assert busy <= problem.headroom * (1 + 1e-6)
    more = tuple(replace(c, decode_per_s=1.01 * c.decode_per_s) for c in template.capacity)
    told = [replace(t, capacity=more) if t is template else t for t in plan.templates]
    assert any(
        "decode_per_s of bucket 0" in item for item in verify(problem, replace(plan, templates=tuple(told)))
    )


def test_replica_with_two_roles_is_planned_only_where_both_are_used() -> None:
    """One node is enough: it is a plain mixed one; and without hand-overs nothing decodes for others."""
    problem = a_problem(a_demand(rate_per_s=2.0))
    factory = TemplateFactory(problem)
    (deployment,) = STRATEGIES["auto"](factory, QUICK).plan.deployments
    assert " mixed 1x" in deployment.template
    apart = replace(problem, engine=ENGINES["openai"])
    assert TemplateFactory(problem).also_decoding(problem.demands[0])
    assert not TemplateFactory(apart).also_decoding(apart.demands[0])


def test_cronus_uses_a_paired_node_only_in_its_pair() -> None:
    """One that has none does: an L40S elsewhere, with which nothing pairs."""
    offers = {"lab": {"1xA100-80": (1.59, 4), "1xA10": (0.6, 4)}, "home": {"1xL40S": (1.9, 4)}}
    problem = a_problem(offers=offers)
    chosen = STRATEGIES["cronus"].templates
    assert chosen is not None
    made = chosen(TemplateFactory(problem), problem.demands[0])
    assert {(t.kind, *sorted(t.node_counts)) for t in made} == {
        ("pair", "1xA10", "1xA100-80"),
        ("homogeneous", "1xL40S"),
    }
