"""What the limits of an engine cost: the plan again without them, in the time that is left."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from potluck.core.errors import PotluckError
from potluck.core.values.engine_abilities import ENGINES, UNLIMITED, broken_limits, engines_for
from potluck.core.values.plan import Plan
from potluck.core.values.types import EngineName
from potluck.plan.problem import PlanningProblem
from potluck.plan.strategies.template_factory import Planner, PlanOutcome, SolveSettings, TemplateFactory

LEAST_SHARE, AS_LONG = 0.2, 0.5
"""Of the time limit, and of what the plan itself took: with less left it is not tried."""
LEAST_USD_PER_H = 0.005  # Less is rounding.
MORE = 1e-3  # Of the demand.


@dataclass(frozen=True, slots=True)
class EngineCost:
    """What a plan without an engine's limits would save, or serve more."""

    engine: EngineName
    title: str
    what: tuple[str, ...] = ()
    """What that plan has that the engine does not do; empty: nothing that would be better."""
    saves_usd_per_h: float = 0.0
    more_fraction: float = 0.0
    able: tuple[EngineName, ...] = ()  # Engines that run that plan.
    known: bool = True  # Whether planning again gave an answer.
    exact: bool = True  # Whether both plans were proven cheapest; else the difference may be of the search.
    unknown: str = "no time was left to plan without them"  # Why there is no answer, without one.

    @property
    def line(self) -> str:
        """A sentence; empty where the limits cost nothing."""
        if not self.known:
            return f"what the limits of {self.title} cost is not known: {self.unknown}"
        if not self.what:
            return ""
        about = "" if self.exact else "about "
        gain = f"save {about}${self.saves_usd_per_h:.2f}/h"
        if self.more_fraction > MORE:
            gain = f"serve {about}{self.more_fraction:.1%} more of the demand"
        who = " or ".join(f"`engine: {name}`" for name in self.able)
        runs = f"{who} runs them" if who else "no engine runs them"
        return f"{' and '.join(self.what)} would {gain}; {runs}"


def engine_cost(
    factory: TemplateFactory, outcome: PlanOutcome, planner: Planner, settings: SolveSettings, spent_s: float
) -> EngineCost | None:
    """What the engine's limits cost a plan that took so long; None where they leave nothing out."""
    problem, engine = factory.problem, factory.problem.engine
    if settings.pins or not _matters(problem):  # pins name templates of this engine
        return None
    left_s = settings.time_limit_s - spent_s
    if left_s < max(LEAST_SHARE * settings.time_limit_s, AS_LONG * spent_s):
        return EngineCost(engine.engine, engine.title, known=False)
    unlimited = replace(problem, engine=UNLIMITED)
    free = TemplateFactory(
        unlimited,
        rate_caches=factory.rate_caches,
        report_progress=factory.report_progress,
        relaxation_columns=factory.relaxation_columns,
    )
    # What is known is where it begins, and it may take as long as the plan itself did.
    limit_s = min(left_s, max(spent_s, LEAST_SHARE * settings.time_limit_s))
    what_if, start_plans = outcome.plan.fraction >= 1, (*settings.start_plans, outcome.plan)
    again = replace(settings, time_limit_s=limit_s, start_s=None, what_if=what_if, start_plans=start_plans)
    try:
        other_outcome = planner(free, again)
    except PotluckError as error:  # the plan itself was made before
        return EngineCost(engine.engine, engine.title, known=False, unknown=str(error))
    if other_outcome.allocation.status == "unknown":
        return EngineCost(engine.engine, engine.title, known=False)
    return _compared(problem, outcome.plan, other_outcome.plan, settings.gap_target)


def _matters(problem: PlanningProblem) -> bool:
    """Whether the limits may leave anything out: a single node without experts has one layout on any engine."""
    if problem.engine == UNLIMITED or not any(demand.rate_per_s > 0 for demand in problem.demands):
        return False
    nodes = sum(offer.available for region in problem.regions for offer in region.offers)
    return nodes > 1 or any(node.gpus > 1 for node in problem.offered)


def _compared(problem: PlanningProblem, plan: Plan, free: Plan, gap: float) -> EngineCost:
    engine = problem.engine
    settled = problem.in_formats(free.formats)
    models = {demand.name: demand.model for demand in settled.demands}
    what = tuple(dict.fromkeys(broken.limit.what for broken in broken_limits(free, models, engine)))
    saves = plan.total_usd_per_h - free.total_usd_per_h
    more = free.fraction - plan.fraction
    better = more > MORE or (more > -MORE and saves > LEAST_USD_PER_H)
    if not better or not what:
        return EngineCost(engine.engine, engine.title)
    able = [set(engines_for([t for t in free.templates if t.model == name], models[name])) for name in models]
    both = tuple(name for name in ENGINES if all(name in item for item in able))
    exact = max(plan.gap, free.gap) < gap + 1e-9
    return EngineCost(engine.engine, engine.title, what, saves, max(0.0, more), both, exact=exact)


def engine_json(engine: EngineName, cost: EngineCost | None) -> dict[str, object]:
    """The engine that was planned for; and what its limits cost, where they may cost something."""
    return {"engine": engine} if cost is None else {**asdict(cost), "line": cost.line}
