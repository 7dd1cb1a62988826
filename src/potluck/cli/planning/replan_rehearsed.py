"""Answers to trouble, judged as plans are: by a short rehearsal of what they would be put into force for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from potluck.cli.planning.rehearsal_options import (
    SHORT_RUNS,
    RehearsalOptions,
    Said,
    rehearsed,
    trial_of,
    tried,
)
from potluck.cli.planning.replan_live import Planner

if TYPE_CHECKING:
    from potluck.core.values.plan import Plan, Tried
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.replan.replan_options import ReplanOption
    from potluck.plan.strategies import PlanOutcome, SolveSettings, TemplateFactory
    from potluck.spec.spec_values import Spec

SERVES_AS_MUCH = 1e-6
VERDICTS = ("holds", "unsure", "misses")


def spec_now(spec: Spec, problem: PlanningProblem) -> Spec:
    """The spec with the nodes, links and rates that there are after what happened."""
    rates = {ask.name: ask.rate_per_s for ask in problem.asks}
    models = tuple(
        replace(each, traffic=replace(each.traffic, rate_per_s=rates.get(each.name, each.traffic.rate_per_s)))
        for each in spec.models
    )
    return replace(spec, models=models, regions=problem.regions, links=problem.links, pool=problem.pool)


def rehearsing(planner: Planner, spec: Spec) -> Planner:
    """The planner whose plans have as much headroom as it takes to hold in a short rehearsal."""

    def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        outcome = planner(factory, settings)
        if not outcome.plan.deployments:
            return outcome
        now = spec_now(spec, factory.problem)
        found = rehearsed(now, factory, outcome, planner, replace(settings, start_s=None), RehearsalOptions())
        return outcome if found is None else replace(found.best.outcome, plan=found.best.plan)

    return planned


def best_tried(
    answers: Sequence[ReplanOption], spec: Spec, problem: PlanningProblem, said: Said
) -> tuple[ReplanOption, tuple[Tried, ...]]:
    """Of the answers that serve most, the first that holds in a short rehearsal, else the one that comes closest;
    and what was seen of it."""
    now = spec_now(spec, problem)
    most = max(answer.served_fraction for answer in answers)
    seen: dict[object, tuple[Tried, ...]] = {}
    found: list[tuple[int, ReplanOption, tuple[Tried, ...]]] = []
    for answer in answers:
        if answer.served_fraction < most - SERVES_AS_MUCH:
            continue
        key = (answer.plan.deployments, answer.plan.shares, answer.plan.flows)
        if key not in seen:
            seen[key] = _tried(answer.plan, now, problem, said)
        found.append((max(map(_rank, seen[key]), default=0), answer, seen[key]))
        if found[-1][0] == 0:
            break
    _, best, shown = min(found, key=lambda each: each[0])
    return best, shown


def _tried(plan: Plan, spec: Spec, problem: PlanningProblem, said: Said) -> tuple[Tried, ...]:
    if not any(model.traffic.rate_per_s > 0 for model in spec.models):
        return ()
    trial, _ = trial_of(spec, problem, plan, RehearsalOptions())
    return tuple(each.told() for each in tried(trial, plan, SHORT_RUNS, said))


def _rank(each: Tried) -> int:
    return VERDICTS.index(each.verdict)
