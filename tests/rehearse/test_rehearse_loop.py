"""The whole loop: against every factor tried one by one, and in real simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from rehearse_builders import SETTINGS, a_problem, a_traffic, a_trial, melange

from potluck.catalog import models, nodes
from potluck.core.values.plan import Deployment, Plan
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.assemble.even_shares import evened
from potluck.plan.problem import PlanningProblem, model_demand
from potluck.plan.strategies import PlanOutcome, SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import allocated
from potluck.plan.verify import verify
from potluck.rehearse import rehearsal
from potluck.rehearse.evidence import Evidence, TrialSetup, evidence_of
from potluck.rehearse.queueing_margins import assembled, restored, scaled
from potluck.rehearse.rehearsal import RehearsalRules, rehearse
from potluck.rehearse.request_sources import FRESH
from potluck.runtime.replica_models import ReplicaModels
from potluck.runtime.resolved_plan import DEFAULT_ENGINE, ResolvedPlan
from potluck.sim.load.workload import of_traffic
from potluck.sim.results.metrics import summarise
from potluck.sim.results.plan_comparison import compared, disagreements
from potluck.sim.run import simulate

RULES = RehearsalRules(runs=3, verdict_runs=4)


Judge = Callable[[TrialSetup, Plan, Sequence[int], object], tuple[Evidence, ...]]


def spare(plan: Plan, model: str) -> float:
    """What a plan serves within the planner's headroom, over the demand."""
    prediction = next(item for item in plan.predictions if item.model == model)
    return prediction.capacity_per_s * 0.8 / prediction.demand_per_s


def judging(needed: dict[str, float], fresh_needed: dict[str, float] | None = None) -> Judge:
    """A world in which a model holds from so many times its demand in capacity on; fresh runs may need more."""

    def judge(trial: TrialSetup, plan: Plan, runs: Sequence[int], *said: object) -> tuple[Evidence, ...]:
        limits = (fresh_needed or needed) if runs[0] >= FRESH else needed
        result = []
        for prediction in sorted(plan.predictions, key=lambda p: p.model):
            share = 1.0 if spare(plan, prediction.model) >= limits[prediction.model] * (1 - 1e-9) else 0.5
            result.append(Evidence(prediction.model, 0.9, (share,) * len(runs), 10_000))
        return tuple(result)

    return judge


@pytest.fixture(scope="module")
def every_factor() -> list[tuple[float, Plan]]:
    """(USD an hour, plan) for every factor on a grid."""
    shop = TemplateFactory(a_problem(a_traffic()))
    result = []
    for place in range(20):
        factors = {"chat": 0.8 * 1.15**place}
        problem = scaled(shop.problem, factors)
        raw = evened(problem, melange(replace(shop, problem=problem), SETTINGS).plan, SETTINGS.time_limit_s)
        result.append((raw.cost_usd_per_h, restored(raw, shop.problem, factors)))
    return result


@pytest.mark.parametrize("needed", [0.5, 1.3, 7.0])
def test_as_cheap_as_trying_every_factor(
    needed: float, every_factor: list[tuple[float, Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = (a_traffic(),)
    problem = a_problem(*traffic)
    judge = judging({"chat": needed})
    monkeypatch.setattr(rehearsal, "evidence_of", judge)
    trial = a_trial(problem, traffic)
    shop = TemplateFactory(problem)
    result = rehearse(shop, melange, SETTINGS, trial, RULES)
    assert result.chosen is not None
    assert result.chosen.fresh
    cost = result.chosen.cost_usd_per_h
    held = [usd_per_h for usd_per_h, plan in every_factor if judge(trial, plan, [0], None)[0].holds]
    assert cost >= min(held) - 1e-9
    # Factors closer than the tolerance are not told apart, so the cost may be that of so much more.
    more = {"chat": max(needed, 0.8) * (1 + RULES.tolerance)}
    assert cost <= melange(replace(shop, problem=scaled(problem, more)), SETTINGS).plan.cost_usd_per_h + 1e-9
    assert verify(result.problem, result.best.outcome.plan) == ()


def test_models_are_searched_apart_and_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = (a_traffic("chat", 8.0), a_traffic("code", 5.0))
    problem = a_problem(*traffic)
    monkeypatch.setattr(rehearsal, "evidence_of", judging({"chat": 2.5, "code": 0.7}))
    result = rehearse(TemplateFactory(problem), melange, SETTINGS, a_trial(problem, traffic), RULES)
    assert result.chosen is not None
    assert spare(result.chosen.plan, "chat") >= 2.5 / 1.0001
    assert result.chosen.factors["code"] <= 1.0 < result.chosen.factors["chat"]
    assert verify(result.problem, result.chosen.outcome.plan) == ()
    alone = []
    for item, needed in zip(traffic, (2.5, 0.7), strict=True):
        one = a_problem(item)
        monkeypatch.setattr(rehearsal, "evidence_of", judging({item.model: needed}))
        single = rehearse(TemplateFactory(one), melange, SETTINGS, a_trial(one, (item,)), RULES)
        alone.append(single.best.cost_usd_per_h)
    assert result.chosen.cost_usd_per_h == pytest.approx(sum(alone), rel=0.06)


def test_what_fresh_runs_refute_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = (a_traffic(),)
    problem = a_problem(*traffic)
    monkeypatch.setattr(rehearsal, "evidence_of", judging({"chat": 1.3}, {"chat": 1.9}))
    result = rehearse(TemplateFactory(problem), melange, SETTINGS, a_trial(problem, traffic), RULES)
    assert result.chosen is not None
    assert spare(result.chosen.plan, "chat") >= 1.9 / 1.0001
    fresh = [step for step in result.steps if step.fresh]
    assert len(fresh) > 1
    assert [step.holds for step in fresh] == [False] * (len(fresh) - 1) + [True]


def test_a_fleet_too_small_is_told_with_the_best_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = (a_traffic(),)
    problem = a_problem(*traffic, offers={"1xA10G": (1.0, 5)})
    monkeypatch.setattr(rehearsal, "evidence_of", judging({"chat": 40.0}))
    result = rehearse(TemplateFactory(problem), melange, SETTINGS, a_trial(problem, traffic), RULES)
    assert result.chosen is None
    assert "no more nodes" in result.reason
    assert result.best in result.steps


def test_more_than_any_factor_gives_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = (a_traffic(rate_per_s=0.5),)
    problem = a_problem(*traffic, offers={"1xA10G": (1.0, 500)})
    monkeypatch.setattr(rehearsal, "evidence_of", judging({"chat": 400.0}))
    result = rehearse(TemplateFactory(problem), melange, SETTINGS, a_trial(problem, traffic), RULES)
    assert result.chosen is None
    assert "16 times" in result.reason


def test_a_bursty_model_gets_more_in_real_runs() -> None:
    traffic = (a_traffic(rate_per_s=10.0),)
    problem = a_problem(*traffic)
    trial = a_trial(problem, traffic, cv=6.0, requests=500)
    result = rehearse(TemplateFactory(problem), melange, SETTINGS, trial, RULES)
    assert not result.first.holds
    assert result.chosen is not None
    assert result.chosen.cost_usd_per_h > result.first.cost_usd_per_h
    held = [step for step in result.steps if step.holds and not step.fresh]
    refuted = {step.cost_usd_per_h for step in result.steps if step.fresh and not step.holds}
    unrefuted = [step.cost_usd_per_h for step in held if step.cost_usd_per_h not in refuted]
    assert result.chosen.cost_usd_per_h == min(unrefuted)


def test_the_same_twice() -> None:
    traffic = (a_traffic(rate_per_s=10.0),)
    problem = a_problem(*traffic)
    trial = a_trial(problem, traffic, cv=6.0, requests=60)
    rules = RehearsalRules(runs=2, verdict_runs=2)
    one, other = (rehearse(TemplateFactory(problem), melange, SETTINGS, trial, rules) for _ in range(2))
    assert len(one.steps) > 1
    assert [step.evidence for step in one.steps] == [step.evidence for step in other.steps]


def test_parts_put_together_do_what_they_did_apart() -> None:
    """Models share no replica: what each attains does not depend on the others' part."""
    traffic = (a_traffic("chat", 10.0), a_traffic("code", 6.0))
    problem = a_problem(*traffic)
    trial = a_trial(problem, traffic, cv=3.0, requests=300)
    shop = TemplateFactory(problem)
    plans = {}
    for name, factor in (("chat", 0.8), ("code", 2.0)):
        factors = {"chat": factor, "code": factor}
        raw = melange(replace(shop, problem=scaled(problem, factors)), SETTINGS).plan
        plans[name] = restored(raw, problem, factors)
    apart = {name: evidence_of(trial, plan, [0, 1]) for name, plan in plans.items()}
    together = evidence_of(trial, assembled(plans, problem), [0, 1])
    assert together[0] == apart["chat"][0] != apart["code"][0]
    assert together[1] == apart["code"][1] != apart["chat"][1]


def test_a_plan_that_fresh_runs_refuted_is_never_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh runs that are luckier each time: the same plan must not get a second chance."""
    traffic = (a_traffic(),)
    problem = a_problem(*traffic)
    verdicts: list[Plan] = []

    def lucky(trial: TrialSetup, plan: Plan, runs: Sequence[int], *said: object) -> tuple[Evidence, ...]:
        share = 1.0
        if runs[0] >= FRESH:
            verdicts.append(plan)
            share = 1.0 if len(verdicts) > 2 else 0.0
        return (Evidence("chat", 0.9, (share,) * len(runs), 10_000),)

    monkeypatch.setattr(rehearsal, "evidence_of", lucky)
    result = rehearse(TemplateFactory(problem), melange, SETTINGS, a_trial(problem, traffic), RULES)
    assert result.chosen is not None
    assert len(verdicts) == 3
    assert len({plan.deployments for plan in verdicts}) == 3
    assert result.chosen.cost_usd_per_h > result.first.cost_usd_per_h


def test_of_plans_as_cheap_the_one_with_more_to_spare_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy does for every factor: there is nothing to save by planning for less."""
    traffic = (a_traffic(rate_per_s=0.2),)
    problem = a_problem(*traffic, offers={"1xL40S": (1.9, 3)})

    def slower(trial: TrialSetup, plan: Plan, runs: Sequence[int], *said: object) -> tuple[Evidence, ...]:
        seen.append(plan)
        return (Evidence("chat", 0.9, (0.99 - 0.01 * min(len(seen), 3),) * len(runs), 10_000),)

    seen: list[Plan] = []
    monkeypatch.setattr(rehearsal, "evidence_of", slower)
    monkeypatch.setattr(rehearsal, "_parts", lambda plan, models: dict.fromkeys(models, object()))
    result = rehearse(TemplateFactory(problem), melange, SETTINGS, a_trial(problem, traffic), RULES)
    assert result.chosen is not None
    assert result.chosen.factors == result.first.factors


def test_a_short_one_takes_the_first_plan_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = (a_traffic(),)
    problem = a_problem(*traffic)
    monkeypatch.setattr(rehearsal, "evidence_of", judging({"chat": 1.3}))
    trial = a_trial(problem, traffic)
    short = rehearse(TemplateFactory(problem), melange, SETTINGS, trial, replace(RULES, first=True))
    assert short.chosen is not None
    assert not short.chosen.fresh
    assert [step.holds for step in short.steps] == [*[False] * (len(short.steps) - 1), True]
    whole = rehearse(TemplateFactory(problem), melange, SETTINGS, trial, RULES)
    assert whole.chosen is not None
    assert short.chosen.cost_usd_per_h >= whole.chosen.cost_usd_per_h - 1e-9
    assert len(short.steps) < len(whole.steps)


def test_a_plainer_plan_is_tried_where_the_first_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds: what costs as much is not tried any more, and it is taken in the end."""
    traffic = (a_traffic(),)
    problem = a_problem(*traffic)

    def judge(trial: TrialSetup, plan: Plan, runs: Sequence[int], *said: object) -> tuple[Evidence, ...]:
        share = 1.0 if plan.strategy == "plain" else 0.0
        return (Evidence("chat", 0.9, (share,) * len(runs), 10_000),)

    def plain(shop: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        more = melange(replace(shop, problem=scaled(shop.problem, {"chat": 2.0})), settings)
        return replace(more, plan=replace(restored(more.plan, shop.problem, {"chat": 2.0}), strategy="plain"))

    monkeypatch.setattr(rehearsal, "evidence_of", judge)
    rules, shop = replace(RULES, first=True), TemplateFactory(problem)
    result = rehearse(shop, melange, SETTINGS, a_trial(problem, traffic), rules, plainer=plain)
    assert result.chosen is not None
    assert result.chosen.plan.strategy == "plain"
    others = [step for step in result.steps if step.plan.strategy != "plain"]
    assert all(step.cost_usd_per_h < result.chosen.cost_usd_per_h for step in others)


def test_a_model_that_holds_keeps_its_part_and_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = (a_traffic("chat", 10.0), a_traffic("code", 6.0))
    problem = a_problem(*traffic)
    asked: list[set[str]] = []
    parts: list[set[Deployment]] = []

    def judge(trial: TrialSetup, plan: Plan, runs: Sequence[int], *said: object) -> tuple[Evidence, ...]:
        load = trial.source(0)
        asked.append({load.models[place] for place in set(load.model.tolist())})
        of = {template.name: template.model for template in plan.templates}
        parts.append({deployment for deployment in plan.deployments if of[deployment.template] == "chat"})
        shares = {"chat": 1.0, "code": 1.0 if len(asked) > 2 else 0.0}
        return tuple(Evidence(name, 0.9, (shares[name],) * len(runs), 10_000) for name in sorted(asked[-1]))

    monkeypatch.setattr(rehearsal, "evidence_of", judge)
    rules = replace(RULES, first=True)
    result = rehearse(TemplateFactory(problem), melange, SETTINGS, a_trial(problem, traffic), rules)
    assert result.chosen is not None
    assert asked == [{"chat", "code"}, {"code"}, {"code"}]
    assert parts[0] == parts[1] == parts[2]


def test_it_ends_when_told_that_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = (a_traffic(),)
    problem = a_problem(*traffic)
    monkeypatch.setattr(rehearsal, "evidence_of", judging({"chat": 7.0}))
    trial = a_trial(problem, traffic)
    result = rehearse(TemplateFactory(problem), melange, SETTINGS, trial, RULES, enough=lambda: True)
    assert len(result.steps) == 1
    assert result.chosen is None
    assert "no time" in result.reason


TRAFFIC = Traffic("big", 1.5, (LengthBin(800, 100, 1.0),))


def test_a_plan_of_such_pipelines_runs_as_planned() -> None:
    wanted = model_demand("big", models.model("LLaMA-30B"), Slo(3.0, 0.2), TRAFFIC)
    kind = nodes.node_type("2xRTX4090")
    problem = PlanningProblem((wanted,), (Region("here", (NodeOffer(kind.name, 1.0, 6),)),), (kind,))
    shop = TemplateFactory(problem)
    plan = allocated(
        shop, SolveSettings(time_limit_s=5.0), "aggregated", {"big": shop.aggregated(wanted)}
    ).plan
    assert plan.fraction == 1
    assert verify(problem, plan) == ()
    (template,) = {plan.template(deployment.template) for deployment in plan.deployments}
    assert template.replicas[0].role == "mixed"
    assert len(template.replicas[0].layout.stages) > 1
    world = ResolvedPlan(
        plan,
        {"big": wanted.model},
        problem.by_name,
        problem.regions,
        (),
        {"big": wanted.slo},
        {"big": (800.0, 100.0)},
    )
    replica_models = ReplicaModels(world)
    replica_models.learn(plan)
    engine = replica_models.replica_models[template.name, 0].engine
    assert engine.token_budget < DEFAULT_ENGINE.token_budget, "turns of the planned length"
    result = simulate(world, of_traffic([TRAFFIC], 300, 0, 0.1))
    (seen,) = summarise(result).models
    assert seen.attainment is not None
    assert seen.attainment >= wanted.slo.attainment
    assert not [each for each in disagreements(compared(world, result, "learned")) if each.what != "rate"]
