"""The plan of `potluck up`: read or made, and checked in a short simulation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from potluck.cli.common.inputs import read_plan, require_runnable
from potluck.cli.planning.rehearsal import ReportStage
from potluck.cli.simulating.simulation import SimulationInputs, offered, read_one_spec, read_plan_and_spec
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.control.plan_requests import DayPlans
    from potluck.core.state.policy import Policy
    from potluck.core.values.plan import Plan
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.strategies import PlanOutcome, SolveSettings, TemplateFactory
    from potluck.spec.spec_values import Spec


HEADROOM = 0.8
FIRST_PER_S, MOST_PER_S = 50.0, 50_000.0
"""Requests a second with which a search for the most that a fleet can do begins and ends."""


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    inputs: SimulationInputs
    lines: tuple[str, ...] = ()
    holds: bool = True  # Whether it did in the rehearsal, where there was one.


@dataclass(frozen=True, slots=True)
class PlanChoices:
    time_limit_s: float
    averages: bool = False
    """Do without a rehearsal."""
    profiles: tuple[Path, ...] = ()
    """Step times that were measured."""
    here: bool = False
    """Only what the engines of this machine can be: no groups of machines."""


def prepared(
    paths: tuple[Path, ...],
    spec: Spec,
    choices: PlanChoices,
    report_stage: ReportStage,
    plan: Plan | None = None,
) -> PreparedPlan:
    """The plan in force, that of a file, or a new one for the spec."""
    if plan is not None:
        return PreparedPlan(SimulationInputs(spec, _problem(spec, choices), plan))
    if len(paths) == 2:
        return with_known_attainment(
            read_plan_and_spec(paths[0], spec, choices.profiles), choices, report_stage
        )
    return _planned(spec, choices, report_stage)


def with_known_attainment(
    inputs: SimulationInputs, choices: PlanChoices, report_stage: ReportStage
) -> PreparedPlan:
    """A fixed plan with its simulated SLO attainment, from the plan file where that has it."""
    from potluck.cli.planning.rehearsal import evidence_line, known_evidence, simulated_briefly

    if choices.averages:
        return PreparedPlan(inputs)
    about = inputs.spec, inputs.problem, inputs.plan
    shown = known_evidence(inputs.plan, inputs.spec, inputs.problem) or simulated_briefly(
        *about, report_stage
    )
    holds = all(item.verdict == "holds" for item in shown)
    return PreparedPlan(inputs, tuple(map(evidence_line, shown)), holds)


def _planned(spec: Spec, choices: PlanChoices, report_stage: ReportStage) -> PreparedPlan:
    from potluck.cli.planning.plan import require_service
    from potluck.plan.explain import planned_rest
    from potluck.plan.strategies import STRATEGIES, SolveSettings

    report_stage("planning")
    problem = _problem(spec, choices)
    factory = factory_for(problem, choices, report_stage)
    settings = SolveSettings(time_limit_s=choices.time_limit_s)
    factory, outcome, notes = planned_rest(STRATEGIES["auto"], factory, settings)
    require_service(factory.problem, outcome, choices.time_limit_s, notes)
    lines = (*notes, *_short_of(factory.problem, outcome))
    plan = outcome.plan
    tried: tuple[str, ...] = ()
    if not choices.averages:
        plan, tried = _rehearsed(spec, factory, outcome, settings)
    return PreparedPlan(SimulationInputs(spec, problem, plan), (*lines, *tried))


def planned_for_all(
    spec: Spec, choices: PlanChoices, report_stage: ReportStage
) -> tuple[float, Callable[[Spec], SimulationInputs]]:
    """The capacity of a fleet for the spec's only model in req/s, and a planner for the spec with another rate."""
    from potluck.cli.planning.plan import require_service
    from potluck.plan.assemble.even_shares import balance_load
    from potluck.plan.strategies import STRATEGIES, SolveSettings
    from potluck.rehearse.queueing_margins import restored, scaled

    problem, settings = _problem(spec, choices), SolveSettings(time_limit_s=choices.time_limit_s)
    factory, demand = factory_for(problem, choices, report_stage), problem.demands[0]
    factor = FIRST_PER_S / demand.rate_per_s
    while True:
        more = scaled(problem, {demand.name: factor})
        outcome = STRATEGIES["auto"](replace(factory, problem=more), settings)
        require_service(more, outcome, choices.time_limit_s)
        if outcome.plan.fraction < 1 or factor * demand.rate_per_s > MOST_PER_S:
            break
        factor *= 4
    even = balance_load(more, outcome.plan, settings.time_limit_s, settings.clock)
    most_per_s = factor * demand.rate_per_s

    def plan(other_spec: Spec) -> SimulationInputs:
        real = _problem(other_spec, choices)
        asked = {demand.name: most_per_s / real.demands[0].rate_per_s}
        return SimulationInputs(other_spec, real, restored(even, real, asked))

    return most_per_s * outcome.plan.fraction, plan


def _problem(spec: Spec, choices: PlanChoices) -> PlanningProblem:
    from potluck.cli.common.inputs import load_problem
    from potluck.cli.planning.estimate import measured

    return measured(load_problem(spec, HEADROOM, None, (), 0.0), choices.profiles)


def factory_for(
    problem: PlanningProblem, choices: PlanChoices, report_stage: ReportStage = lambda line: None
) -> TemplateFactory:
    from potluck.plan.strategies import TemplateFactory

    made = TemplateFactory(problem, report_progress=report_stage)
    limit(made, choices)
    return made


def limit(factory: TemplateFactory, choices: PlanChoices) -> None:
    """Exclude the kinds of templates that the engines of this command cannot run."""
    from potluck.plan.strategies.pool_strategy import machines_key

    problem = factory.problem
    for demand in (variant for model_demand in problem.demands for variant in model_demand.variants):
        if choices.here:
            factory.templates_by_kind[f"group of {machines_key(problem)}", demand.key] = []


def _short_of(problem: PlanningProblem, outcome: PlanOutcome) -> tuple[str, ...]:
    fraction = outcome.plan.fraction
    if fraction >= 1:
        return ()
    able = ", ".join(f"{demand.name} {demand.rate_per_s * fraction:.3g}/s" for demand in problem.demands)
    what = f"of {sum(demand.rate_per_s for demand in problem.demands):.3g} req/s demanded"
    return (f"this fleet can serve {able} {what}; the rest is queued or refused (see `potluck plan`)",)


def _rehearsed(
    spec: Spec, factory: TemplateFactory, outcome: PlanOutcome, settings: SolveSettings
) -> tuple[Plan, tuple[str, ...]]:
    """The cheapest plan that meets its SLOs in simulation, else the one that came closest."""
    from potluck.cli.planning.rehearsal import RehearsalOptions, evidence_line, rehearsed
    from potluck.plan.strategies import STRATEGIES

    result = rehearsed(spec, factory, outcome, STRATEGIES["auto"], settings, RehearsalOptions())
    if result is None:
        return outcome.plan, ()
    best_plan = result.best
    lines = tuple(evidence_line(item.summary()) for item in best_plan.evidence)
    more = best_plan.cost_usd_per_h - outcome.plan.total_usd_per_h
    if not result.holds:
        lines = (*lines, f"no plan met its SLOs in simulation ({result.end}); this one came closest")
    elif more > 0.005:
        lines = (
            *lines,
            f"${more:.2f}/h more than the cheapest plan for mean traffic, which missed its SLOs in simulation",
        )
    return result.outcome.plan, lines


def with_offers(
    prepared_plan: PreparedPlan, policy: Policy, make_factory: Callable[[PlanningProblem], TemplateFactory]
) -> PreparedPlan:
    inputs = prepared_plan.inputs
    return replace(prepared_plan, inputs=offered(inputs, policy, make_factory(inputs.problem)))


def scheduled(folder: Path, paths: tuple[Path, ...]) -> tuple[DayPlans, tuple[Path, ...]]:
    """All plans of a day, checked before anything starts, and the paths of the first plan and its spec."""
    from potluck.cli.planning.schedule import plan_file
    from potluck.control.plan_requests import DayPlans

    if len(paths) != 1:
        raise InputError("--schedule", "has the plans; name the SPEC that they were made for, and no PLAN")
    plans, spec = [], read_one_spec(paths)
    for path in sorted(folder.glob(plan_file("[0-9][0-9]:[0-9][0-9]"))):
        hour, minute = int(path.stem[-4:-2]), int(path.stem[-2:])
        if hour > 23 or minute > 59:
            raise InputError(
                "--schedule", f"{path}: {hour:02d}:{minute:02d} is no time of day; rename the file"
            )
        plan = read_plan(path)
        require_runnable(plan, spec, str(path))
        plans.append((hour * 3600 + minute * 60, plan))
    if not plans:
        fix = f"`potluck schedule {paths[0].name} --out {folder.name}` writes them"
        raise InputError("--schedule", f"{folder} has no plans ({plan_file('HH:MM')}); {fix}")
    day = DayPlans(tuple(plans))
    return day, (folder / plan_file(day.due(time.time())[0]), *paths)
