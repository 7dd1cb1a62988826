"""The search over plans checked by simulation, against enumeration."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import product
from unittest.mock import Mock

import pytest
from rehearse_builders import OFFERS, SETTINGS, a_problem, a_traffic, a_trial, melange

from potluck.catalog import models, nodes
from potluck.cli.planning.rehearsal import evidence_line, judge_of
from potluck.core.values.plan import Deployment, Plan
from potluck.core.values.service import CLASSES, ModelTerms
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.allocate.allocation import Shortfall
from potluck.plan.assemble.even_shares import balance_load
from potluck.plan.problem import PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import solve_over
from potluck.plan.verify import verify
from potluck.rehearse.evidence import Evidence, evidence_of
from potluck.rehearse.queueing_margins import assembled, restored, scaled
from potluck.rehearse.rehearsal import Judge, Rehearsal, RehearsalRules, part_key, rehearse, spare_of, varied
from potluck.rehearse.request_sources import FRESH
from potluck.rehearse.search_end import SearchEnd, no_larger_plan
from potluck.runtime.replica_models import ReplicaModels
from potluck.runtime.resolved_plan import DEFAULT_ENGINE, ResolvedPlan
from potluck.sim.load.workload import of_traffic
from potluck.sim.results.metrics import summarise
from potluck.sim.results.plan_comparison import compared, disagreements
from potluck.sim.run import simulate

GENEROUS = RehearsalRules(most_plans=100, most_solves=20)


def evidence_for(name: str, holds: bool, answer_lengths: float = 20.0) -> Evidence:
    return Evidence(name, 0.9, (1.0 if holds else 0.5,) * 4, 10_000, answer_lengths=answer_lengths)


def judge_needing(
    problem: PlanningProblem, needed: dict[str, float], fresh: dict[str, float] | None = None
) -> Judge:
    """A world in which a model holds from so many times its demand in capacity on; fresh runs may need more."""

    def judge(plan: Plan, names: Collection[str], first_run: int) -> tuple[Evidence, ...]:
        limits = (fresh or needed) if first_run >= FRESH else needed
        return tuple(
            evidence_for(name, spare_of(plan, problem, name) >= limits[name] * (1 - 1e-9)) for name in names
        )

    return judge


def every_fleet(problem: PlanningProblem, most: int) -> list[Plan]:
    """All plans of up to so many single nodes, each with the best of its templates, that serve the demand."""
    (demand,) = problem.demands
    best = {}
    for template in TemplateFactory(problem).mixed(demand):
        node, rate = template.nodes[0].node, min(item.closed_per_s for item in template.capacity)
        if node not in best or rate > min(item.closed_per_s for item in best[node].capacity):
            best[node] = template
    empty = melange(TemplateFactory(problem), SETTINGS).plan
    plans = []
    for counts in product(range(most + 1), repeat=len(best)):
        used = [(template, count) for template, count in zip(best.values(), counts, strict=True) if count]
        raw = replace(
            empty,
            templates=tuple(template for template, _ in used),
            deployments=tuple(Deployment(template.name, "here", count) for template, count in used),
            cost_usd_per_h=sum(OFFERS[template.nodes[0].node][0] * count for template, count in used),
        )
        if used and (even := balance_load(problem, raw)) is not raw and not verify(problem, even):
            plans.append(even)
    return plans


@pytest.fixture(scope="module")
def fleets() -> list[Plan]:
    return every_fleet(a_problem(a_traffic()), 6)


@pytest.mark.parametrize("needed", [0.5, 1.3, 2.2, 3.1])
def test_plan_search_finds_the_cheapest_fleet_that_holds(needed: float, fleets: list[Plan]) -> None:
    problem = a_problem(a_traffic())
    judge = judge_needing(problem, {"chat": needed})
    result = rehearse(TemplateFactory(problem), melange, SETTINGS, judge, GENEROUS)
    assert result.chosen is not None
    held = [plan.cost_usd_per_h for plan in fleets if judge(plan, ["chat"], 0)[0].holds]
    assert result.chosen.cost_usd_per_h <= min(held) * 1.1
    assert verify(problem, result.outcome.plan) == ()
    assert_each_once(result)


def assert_each_once(result: Rehearsal) -> None:
    """No part is tried twice: every plan but fresh ones has something that none before it had."""
    seen: set[object] = set()
    for rehearsed in result.steps:
        keys = {(name, part_key(part.plan)) for name, part in rehearsed.parts.items()}
        assert rehearsed.fresh or keys - seen or rehearsed is result.steps[0]
        seen |= keys


def test_plan_search_tries_a_different_plan_after_a_miss() -> None:
    """One copy does for several times the demand and misses: more of the same headroom would give the same plan."""
    traffic = a_traffic(rate_per_s=0.2)
    problem = a_problem(traffic, offers={"1xL40S": (1.9, 3)})

    def judge(plan: Plan, names: Collection[str], first_run: int) -> tuple[Evidence, ...]:
        return tuple(evidence_for(name, sum(d.count for d in plan.deployments) >= 2) for name in names)

    result = rehearse(TemplateFactory(problem), melange, SETTINGS, judge)
    assert result.chosen is not None
    assert sum(d.count for d in result.chosen.plan.deployments) == 2
    assert_each_once(result)


def test_plan_variation_labels_count_copies() -> None:
    assert varied("auto", 1) == "auto, 1 more"
    assert varied("auto, 1 more", 2) == "auto, 3 more"
    assert varied("auto for x 1.3, 2 fewer", -1) == "auto for x 1.3, 3 fewer"
    assert varied("auto, 2 more", -1) == "auto, 2 more, 1 fewer"


def test_plan_that_fails_the_longer_final_trial_is_not_chosen() -> None:
    """At many requests a second a run is over before the first answers are: one copy seems to do."""
    problem = a_problem(a_traffic(rate_per_s=0.2), offers={"1xL40S": (1.9, 3)})

    def judge(plan: Plan, names: Collection[str], first_run: int) -> tuple[Evidence, ...]:
        late = first_run >= FRESH and sum(d.count for d in plan.deployments) < 2
        return tuple(evidence_for(name, not late, 20.0 if first_run >= FRESH else 3.0) for name in names)

    chosen_plan = rehearse(TemplateFactory(problem), melange, SETTINGS, judge).chosen
    assert chosen_plan is not None
    assert (chosen_plan.fresh, sum(d.count for d in chosen_plan.plan.deployments)) == (True, 2)


@pytest.mark.slow
def test_plan_search_tries_other_strategies_when_the_cheapest_misses() -> None:
    """Whatever hands KV over misses: the plan of single whole replicas is found, at no more than its own price."""
    problem = a_problem(a_traffic(rate_per_s=20.0))

    def judge(plan: Plan, names: Collection[str], first_run: int) -> tuple[Evidence, ...]:
        return tuple(
            evidence_for(name, not plan.flows and spare_of(plan, problem, name) >= 1) for name in names
        )

    shop = TemplateFactory(problem)
    alone = melange(shop, SETTINGS).plan
    result = rehearse(shop, STRATEGIES["auto"], SETTINGS, judge)
    assert result.chosen is not None
    assert result.chosen.cost_usd_per_h <= alone.cost_usd_per_h * (1 + 1e-9)
    assert result.outcome.plan.strategy == "auto"


def test_plan_search_treats_models_separately_and_combines_them() -> None:
    traffic = (a_traffic("chat", 8.0), a_traffic("code", 5.0))
    problem = a_problem(*traffic)
    needed = {"chat": 2.5, "code": 0.7}
    planner = Mock(side_effect=melange)
    result = rehearse(TemplateFactory(problem), planner, SETTINGS, judge_needing(problem, needed), GENEROUS)
    assert result.chosen is not None
    planned = [[ask.name for ask in call.args[0].problem.demands] for call in planner.call_args_list]
    assert planned[:2] == [["chat", "code"], ["chat"]]
    assert ["code"] not in planned, "it held at once"
    assert spare_of(result.chosen.plan, problem, "chat") >= 2.5 / 1.0001
    assert verify(problem, result.outcome.plan) == ()
    alone = 0.0
    for item in traffic:
        one = a_problem(item)
        single = rehearse(TemplateFactory(one), melange, SETTINGS, judge_needing(one, needed), GENEROUS)
        alone += single.best.cost_usd_per_h
    assert result.chosen.cost_usd_per_h == pytest.approx(alone, rel=0.06)


def test_plan_refuted_by_fresh_runs_is_not_chosen() -> None:
    problem = a_problem(a_traffic())
    judge = judge_needing(problem, {"chat": 1.3}, {"chat": 1.9})
    rules = replace(GENEROUS, fresh=True)
    result = rehearse(TemplateFactory(problem), melange, SETTINGS, judge, rules)
    assert result.chosen is not None
    assert result.chosen.fresh
    assert spare_of(result.chosen.plan, problem, "chat") >= 1.9 / 1.0001
    fresh = [rehearsed for rehearsed in result.steps if rehearsed.fresh]
    assert [rehearsed.holds for rehearsed in fresh] == [False] * (len(fresh) - 1) + [True]
    assert len({part_key(rehearsed.plan) for rehearsed in fresh}) == len(fresh), "refuted stays refuted"


def test_plan_search_of_a_small_fleet_ends_on_its_nodes_with_the_closest_plan() -> None:
    problem = a_problem(a_traffic(), offers={"1xA10G": (1.0, 5)})
    result = rehearse(
        TemplateFactory(problem), melange, SETTINGS, judge_needing(problem, {"chat": 40.0}), GENEROUS
    )
    assert result.chosen is None
    assert result.end.ending == "nodes"
    assert "limited by: here: 1xA10G" in result.end.words
    assert not result.end.longer_may_help
    assert result.best in result.steps
    assert_each_once(result)


def test_plan_search_reports_the_limit_that_ended_it() -> None:
    problem = a_problem(a_traffic(rate_per_s=0.5), offers={"1xA10G": (1.0, 500)})
    judge = judge_needing(problem, {"chat": 4000.0})
    rules = RehearsalRules(most_plans=5, most_solves=3)
    factory = TemplateFactory(problem)
    result = rehearse(factory, melange, SETTINGS, judge, rules)
    assert (result.chosen, len(result.steps)) == (None, 5)
    assert result.end == SearchEnd("plans", "the search reached its limit of 5 plans")
    hurried = rehearse(factory, melange, SETTINGS, judge, replace(rules, enough=lambda: True))
    assert (hurried.chosen, len(hurried.steps)) == (None, 1)
    assert hurried.end == SearchEnd("time", "the search reached its time limit after 1 plan")
    few = rehearse(factory, melange, SETTINGS, judge, replace(rules, most_requests=15_000))
    assert few.end.ending == "requests"
    assert "15,000 simulated requests after 2 plans" in few.end.words
    assert all(item.end.longer_may_help for item in (result, hurried, few))


def judge_never(plan: Plan, names: Collection[str], first_run: int) -> tuple[Evidence, ...]:
    return tuple(evidence_for(name, False) for name in names)


def test_plan_search_ends_on_the_budget_where_nodes_are_left() -> None:
    problem = replace(a_problem(a_traffic(), offers={"1xA10G": (1.0, 50)}), budget_usd_per_h=4.5)
    result = rehearse(TemplateFactory(problem), melange, SETTINGS, judge_never, GENEROUS)
    assert (result.chosen, result.end.ending) == (None, "budget")
    assert "nodes" not in result.end.words


def test_plan_search_ends_on_terms_that_allow_no_more_copies() -> None:
    problem = a_problem(a_traffic(), offers={"1xA10G": (1.0, 50)})
    (ask,) = problem.demands
    limited = replace(problem, demands=(replace(ask, terms=ModelTerms(max_copies=4)),))
    result = rehearse(TemplateFactory(limited), melange, SETTINGS, judge_never, GENEROUS)
    assert (result.chosen, result.end.ending) == (None, "terms")
    assert "at most 4 copies of chat" in result.end.words


@pytest.mark.parametrize("most_solves", [0, 3])
def test_plan_search_ends_on_planner_runs_without_another_plan(most_solves: int) -> None:
    problem = a_problem(a_traffic(rate_per_s=0.2), offers={"1xL40S": (1.9, 1)})
    same = melange(TemplateFactory(problem), SETTINGS)
    rules = RehearsalRules(most_plans=50, most_solves=most_solves)
    result = rehearse(TemplateFactory(problem), lambda factory, settings: same, SETTINGS, judge_never, rules)
    assert (result.chosen, len(result.steps), result.end.ending) == (None, 1, "solves")
    assert f"1 plan missed, and {most_solves} planner runs" in result.end.words


def test_plan_search_replaces_a_missed_large_node_by_larger_ones() -> None:
    """One cheap node serves several times the demand and misses; there is one of it, and larger ones are left."""
    problem = a_problem(a_traffic(rate_per_s=0.2), offers={"1xA10G": (1.0, 1), "1xL40S": (4.9, 4)})

    def judge(plan: Plan, names: Collection[str], first_run: int) -> tuple[Evidence, ...]:
        return tuple(evidence_for(name, any(node == "1xL40S" for _, node in plan.nodes)) for name in names)

    result = rehearse(TemplateFactory(problem), melange, SETTINGS, judge)
    assert result.chosen is not None, result.end
    assert result.chosen.plan.nodes == {("here", "1xL40S"): 1}


def test_plan_search_ends_on_combinations_that_do_not_fit_together() -> None:
    """Each of two models needs two of three nodes."""
    traffic = (a_traffic("one", 0.2), a_traffic("two", 0.2))
    problem = a_problem(*traffic, offers={"1xL40S": (1.9, 3)})

    def judge(plan: Plan, names: Collection[str], first_run: int) -> tuple[Evidence, ...]:
        counts = {name: sum(d.count for d in plan.of_models([name]).deployments) for name in names}
        return tuple(evidence_for(name, counts[name] >= 2) for name in names)

    result = rehearse(TemplateFactory(problem), melange, SETTINGS, judge, GENEROUS)
    assert result.chosen is None
    assert result.end.ending == "combinations"


@pytest.mark.parametrize(
    ("shortfall", "ending"),
    [
        (None, "planner_time"),
        (Shortfall(0.5, 0.5, ("here: 1xL4", "budget")), "nodes"),
        (Shortfall(0.5, 0.5, ()), "nodes"),
        (Shortfall(0.5, 0.5, ("budget", "here: 1xL4")), "budget"),
        (Shortfall(0.5, 0.5, ("link here->there",)), "links"),
        (Shortfall(0.5, 0.5, ("at most 4 copies of chat",)), "terms"),
        (Shortfall(0.0, 0.0, (), overpinned=("here: 1xL4",)), "terms"),
        (Shortfall(0.0, 0.0, (), unkept=("at least 9 copies of chat",)), "terms"),
    ],
)
def test_missing_larger_plan_names_the_binding_constraint(shortfall: Shortfall | None, ending: str) -> None:
    problem = a_problem()
    allocation = melange(TemplateFactory(problem), SETTINGS).allocation
    end = no_larger_plan(problem, replace(allocation, shortfall=shortfall), {"chat": 1.25}, ["chat"])
    assert end.ending == ending
    assert "1.25 times the demand of chat" in end.words


@pytest.mark.slow
def test_bursty_traffic_gets_a_larger_plan_reproducibly() -> None:
    traffic = (a_traffic(rate_per_s=10.0),)
    problem = a_problem(*traffic)
    judge = judge_of(a_trial(problem, traffic, cv=6.0))
    rules = RehearsalRules(most_plans=8, most_solves=3, cv=6.0)
    one, other = (rehearse(TemplateFactory(problem), melange, SETTINGS, judge, rules) for _ in range(2))
    assert one.chosen is not None
    assert one.chosen.cost_usd_per_h > one.averages.plan.cost_usd_per_h
    held = [rehearsed.cost_usd_per_h for rehearsed in one.steps if rehearsed.holds]
    assert one.chosen.cost_usd_per_h == min(held)
    assert [rehearsed.evidence for rehearsed in one.steps] == [
        rehearsed.evidence for rehearsed in other.steps
    ]


def test_combined_plan_attains_what_its_parts_attained() -> None:
    """Models share no replica: what each attains does not depend on the others' part."""
    traffic = (a_traffic("chat", 10.0), a_traffic("code", 6.0))
    problem = a_problem(*traffic)
    trial = a_trial(problem, traffic, cv=3.0, requests=600)
    shop = TemplateFactory(problem)
    plans = {}
    for name, factor in (("chat", 1.0), ("code", 2.0)):
        factors = {"chat": factor, "code": factor}
        raw = melange(replace(shop, problem=scaled(problem, factors)), SETTINGS).plan
        plans[name] = restored(raw, problem, factors)
    for name in plans:
        assert evidence_of(trial, assembled(plans, problem), [name]) == evidence_of(
            trial, plans[name], [name]
        )


TRAFFIC = Traffic("big", 1.5, (LengthBin(800, 100, 1.0),))


def test_mixed_pipeline_plan_runs_as_planned() -> None:
    wanted = model_demand("big", models.model("LLaMA-30B"), Slo(3.0, 0.2), TRAFFIC)
    kind = nodes.node_type("2xRTX4090")
    problem = PlanningProblem((wanted,), (Region("here", (NodeOffer(kind.name, 1.0, 6),)),), (kind,))
    shop = TemplateFactory(problem)
    plan = solve_over(
        shop, SolveSettings(time_limit_s=5.0), "aggregated", {"big": shop.aggregated(wanted)}
    ).plan
    assert plan.fraction == 1
    assert verify(problem, plan) == ()
    (template,) = {plan.template(deployment.template) for deployment in plan.deployments}
    assert template.replicas[0].role == "mixed"
    assert len(template.replicas[0].layout.stages) > 1
    resolved_plan = ResolvedPlan(
        plan,
        {"big": wanted.model},
        problem.by_name,
        problem.regions,
        (),
        {"big": wanted.slo},
        {"big": (800.0, 100.0)},
    )
    replica_models = ReplicaModels(resolved_plan)
    replica_models.learn(plan)
    engine = replica_models.replica_models[template.name, 0].engine
    assert engine.token_budget < DEFAULT_ENGINE.token_budget, "turns of the planned length"
    result = simulate(resolved_plan, of_traffic([TRAFFIC], 300, 0, 0.1))
    (seen,) = summarise(result).models
    assert seen.attainment is not None
    assert seen.attainment >= wanted.slo.attainment
    assert not [
        deviation
        for deviation in disagreements(compared(resolved_plan, result, "learned"))
        if deviation.what != "rate"
    ]


@pytest.mark.parametrize("needed", [1.04, 1.13, 1.3])
def test_large_plan_is_found_in_few_planner_runs(needed: float) -> None:
    """With a hundred copies a trial is dear: a share more of all columns, then halfway back, and no solve between."""
    problem = a_problem(a_traffic(rate_per_s=800.0), offers={"1xL40S": (1.9, 400), "1xL4": (0.7, 400)})
    judge, solve = judge_needing(problem, {"chat": needed}), Mock(side_effect=melange)
    result = rehearse(TemplateFactory(problem), solve, SETTINGS, judge, RehearsalRules(most_plans=12))
    assert result.chosen is not None
    averages_usd = result.averages.plan.cost_usd_per_h
    assert sum(deployment.count for deployment in result.chosen.plan.deployments) > 40
    assert result.chosen.cost_usd_per_h <= averages_usd * needed * 1.04
    assert solve.call_count == 1
    assert_each_once(result)


def with_classes(share: float, strict: Slo) -> tuple[PlanningProblem, Traffic]:
    traffic = replace(a_traffic(), classes=(("interactive", share),))
    demand = model_demand(
        "chat", models.model("Llama-3.1-8B"), Slo(1.0, 0.06), traffic, promises={"interactive": strict}
    )
    return replace(a_problem(), demands=(demand,)), traffic


def test_small_request_class_is_judged_by_its_own_objective() -> None:
    """All others are in time: of all requests 95 % are, and the strict class keeps none of its promise."""
    problem, traffic = with_classes(0.05, Slo(1.0, 0.06))
    plan = melange(TemplateFactory(problem), SETTINGS).plan
    plan = replace(plan, deployments=tuple(replace(d, count=3 * d.count) for d in plan.deployments))
    trial = a_trial(problem, (traffic,), cv=1.0)
    (fine,) = evidence_of(trial, plan)
    assert fine.holds
    strict = replace(CLASSES[0], slo=Slo(0.001, 0.06))
    (missed,) = evidence_of(
        replace(trial, policy=replace(trial.policy, classes=(strict, *CLASSES[1:]))), plan
    )
    assert (missed.request_class, missed.misses, missed.mean) == ("interactive", True, 0.0)
    assert "chat, class interactive: SLO attainment 0 %" in evidence_line(missed.summary())
