"""The cost of an engine's limits, by planning again without them in the time left."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from potluck.core.errors import PotluckError
from potluck.core.values.engine_abilities import ENGINES, UNLIMITED, broken_limits, engines_for
from potluck.core.values.plan import Plan
from potluck.core.values.types import EngineName
from potluck.plan.problem import PlanningProblem
from potluck.plan.strategies.template_factory import Planner, PlanOutcome, SolveSettings, TemplateFactory

MIN_LIMIT_SHARE, MIN_SPENT_SHARE = 0.2, 0.5
"""Least time to plan again, as a share of the time limit and of the time that the plan took."""
MIN_SAVING_USD_PER_H = 0.005  # Smaller savings are rounding errors.
MIN_EXTRA_FRACTION = 1e-3  # Of the demand; smaller gains are rounding errors.


@dataclass(frozen=True, slots=True)
class EngineCost:
    """What a plan without the engine's limits saves, or serves in addition."""

    engine: EngineName
    title: str
    what: tuple[str, ...] = ()
    """Features of that plan that the engine lacks; empty: that plan is no better."""
    saves_usd_per_h: float = 0.0
    more_fraction: float = 0.0
    able: tuple[EngineName, ...] = ()  # Engines that run that plan.
    known: bool = True  # Whether planning again succeeded.
    exact: bool = (
        True  # Whether both plans are proven cheapest; else the difference may come from the search.
    )
    unknown: str = "no time was left to plan without them"  # Reason why planning again failed.

    @property
    def line(self) -> str:
        """A sentence; empty where the limits cost nothing."""
        if not self.known:
            return f"the cost of the limits of {self.title} is unknown: {self.unknown}"
        if not self.what:
            return ""
        about = "" if self.exact else "about "
        gain = f"save {about}${self.saves_usd_per_h:.2f}/h"
        if self.more_fraction > MIN_EXTRA_FRACTION:
            gain = f"serve {about}{self.more_fraction:.1%} more of the demand"
        who = " or ".join(f"`engine: {name}`" for name in self.able)
        runs = f"{who} runs them" if who else "no engine runs them"
        return f"{' and '.join(self.what)} would {gain}; {runs}"


def engine_cost(
    factory: TemplateFactory, outcome: PlanOutcome, planner: Planner, settings: SolveSettings, spent_s: float
) -> EngineCost | None:
    """The cost of the engine's limits for a plan that took `spent_s`; None where they exclude no template."""
    problem, engine = factory.problem, factory.problem.engine
    if settings.pins or not _may_exclude_templates(problem):  # pins name templates of this engine
        return None
    left_s = settings.time_limit_s - spent_s
    if left_s < max(MIN_LIMIT_SHARE * settings.time_limit_s, MIN_SPENT_SHARE * spent_s):
        return EngineCost(engine.engine, engine.title, known=False)
    unlimited = replace(problem, engine=UNLIMITED)
    unlimited_factory = TemplateFactory(
        unlimited,
        rate_caches=factory.rate_caches,
        report_progress=factory.report_progress,
        relaxation_columns=factory.relaxation_columns,
    )
    # The plan is a warm start, and planning again may take as long as the plan did.
    limit_s = min(left_s, max(spent_s, MIN_LIMIT_SHARE * settings.time_limit_s))
    what_if, start_plans = outcome.plan.fraction >= 1, (*settings.start_plans, outcome.plan)
    unlimited_settings = replace(
        settings, time_limit_s=limit_s, start_s=None, what_if=what_if, start_plans=start_plans
    )
    try:
        other_outcome = planner(unlimited_factory, unlimited_settings)
    except PotluckError as error:  # Must not fail the plan itself.
        return EngineCost(engine.engine, engine.title, known=False, unknown=str(error))
    if other_outcome.allocation.status == "unknown":
        return EngineCost(engine.engine, engine.title, known=False)
    return _compare(problem, outcome.plan, other_outcome.plan, settings.gap_target)


def _may_exclude_templates(problem: PlanningProblem) -> bool:
    """Whether the limits may exclude templates: a single node with one GPU has the same layout on any engine."""
    if problem.engine == UNLIMITED or not any(demand.rate_per_s > 0 for demand in problem.demands):
        return False
    nodes = sum(offer.available for region in problem.regions for offer in region.offers)
    return nodes > 1 or any(node.gpus > 1 for node in problem.offered)


def _compare(problem: PlanningProblem, plan: Plan, unlimited_plan: Plan, gap: float) -> EngineCost:
    engine = problem.engine
    problem_in_formats = problem.in_formats(unlimited_plan.formats)
    models = {demand.name: demand.model for demand in problem_in_formats.demands}
    missing_features = tuple(
        dict.fromkeys(
            broken_limit.limit.what for broken_limit in broken_limits(unlimited_plan, models, engine)
        )
    )
    saving_usd_per_h = plan.total_usd_per_h - unlimited_plan.total_usd_per_h
    extra_fraction = unlimited_plan.fraction - plan.fraction
    is_better = extra_fraction > MIN_EXTRA_FRACTION or (
        extra_fraction > -MIN_EXTRA_FRACTION and saving_usd_per_h > MIN_SAVING_USD_PER_H
    )
    if not is_better or not missing_features:
        return EngineCost(engine.engine, engine.title)
    able_engines = [
        set(engines_for([t for t in unlimited_plan.templates if t.model == name], models[name]))
        for name in models
    ]
    engines = tuple(name for name in ENGINES if all(name in item for item in able_engines))
    is_exact = max(plan.gap, unlimited_plan.gap) < gap + 1e-9
    return EngineCost(
        engine.engine,
        engine.title,
        missing_features,
        saving_usd_per_h,
        max(0.0, extra_fraction),
        engines,
        exact=is_exact,
    )


def engine_json(engine: EngineName, cost: EngineCost | None) -> dict[str, object]:
    """The planned engine and the cost of its limits, for JSON."""
    return {"engine": engine} if cost is None else {**asdict(cost), "line": cost.line}
