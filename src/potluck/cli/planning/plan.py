"""`potluck plan` and `compare`: from a spec to plans that are checked in simulation."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import option

from potluck.cli.common.files import EXISTING, FILE, OutputFiles, require_writable
from potluck.cli.common.inputs import read_plan, require_runnable
from potluck.cli.common.render import ProgressBar, emit_json, missed, paragraph, progress, usd
from potluck.cli.planning.estimate import measured, profile_option
from potluck.cli.planning.plan_page import plan_html
from potluck.cli.planning.plan_show import (
    ComparedStrategy,
    show_compared,
    show_engine,
    show_notes,
    show_plan,
    show_reasons,
    show_search,
)
from potluck.cli.planning.planning_options import (
    PlanningOptions,
    json_option,
    posing_options,
    split_planning_options,
    strategy_of,
    strategy_option,
)
from potluck.cli.planning.rehearsal import (
    RehearsalOptions,
    averages_option,
    cv_option,
    estimate_of,
    evidence_lines,
    rehearsal_json,
    rehearsal_options,
    rehearsal_options_of,
    rehearsed,
    requests_option,
    show_rehearsal,
    verdict_of,
    with_evidence,
)
from potluck.core.errors import CapacityError, InputError, PotluckError

if TYPE_CHECKING:
    from potluck.core.values.plan import Deployment, Plan
    from potluck.plan.engine_costs import EngineCost
    from potluck.plan.explain import Explanation
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.strategies import PlanOutcome, SolveSettings, TemplateFactory
    from potluck.rehearse.evidence import Evidence
    from potluck.rehearse.rehearsal import Rehearsal
    from potluck.spec.spec_values import Spec


_PIN = re.compile(r"(?P<template>.+)@(?P<region>[^@=]+)=(?P<count>\d+)\Z")


@click.command()
@strategy_option
@option("--out", type=FILE, help="Write the plan to this JSON file.")
@option("--html", "page", type=FILE, help="Write the plan as an HTML page.")
@option("--running", type=EXISTING, help="Plan file of the running fleet, to limit changes to it.")
@option("--pin", "pinned", multiple=True, help="TEMPLATE@REGION=COUNT: plan at least COUNT copies.")
@option(
    "--init-penalty",
    type=float,
    default=0.0,
    help="With --running: node start-up time over time between plans (CORAL's K).",
)
@option("--explain/--no-explain", "explained", default=True, help="Print why these GPUs were chosen.")
@profile_option
@rehearsal_options
@posing_options()
@json_option
def plan(
    strategy: str, out: Path | None, page: Path | None, explained: bool, as_json: bool, **options: Any
) -> None:
    """Find the cheapest nodes and layout that meet the SLOs of SPEC, with a bound on the cost.

    The plan is checked in a short simulation. Without SPEC the bundled example is planned. Exit code 3: an SLO is
    missed in simulation, or not all demand is met.

    \b
    Examples:
      potluck plan potluck.yaml --out plan.json
      potluck plan potluck.yaml --rehearse --cv 3 --confidence 0.9
      potluck plan potluck.yaml --strategy coral --what-if 'us-east-1:8xH100=0'
    """
    from potluck.core.values.kv import lossy_notices
    from potluck.core.values.plan import plan_to_json
    from potluck.plan.engine_costs import engine_cost
    from potluck.plan.explain import expected, explain, planned_rest

    pins = tuple(map(_pin, options.pop("pinned")))
    penalty, profiles, running = (options.pop(name) for name in ("init_penalty", "profile_paths", "running"))
    planning_options, rest = split_planning_options(options)
    planner, spec = strategy_of(strategy), planning_options.spec()
    asked, saves = rehearsal_options_of(rest), OutputFiles()
    require_writable("--out", out)
    require_writable("--html", page)
    problem = measured(planning_options.problem(spec, penalty), profiles)
    previous_plan = None if running is None else read_plan(running)
    if previous_plan is not None:
        require_runnable(previous_plan, spec, str(running))
    estimate = estimate_of(spec, problem, asked, planning_options.seed)
    settings = planning_options.settings(running=previous_plan, pins=pins, estimate=estimate)
    with progress(4 * len(problem.demands) + 1) as progress_bar:
        began_s = settings.clock()
        factory = _factory_of(problem, previous_plan, progress_bar)
        factory, outcome, notes = planned_rest(planner, factory, settings)
        problem = factory.problem
        notes = (*spec.notes, *notes, *_search_notes(planner, factory, outcome, settings))
        require_service(problem, outcome, planning_options.limit_s, notes)
        progress_bar(f"planning without the limits of {problem.engine.title}")
        cost = engine_cost(factory, outcome, planner, settings, settings.clock() - began_s)
        tried = rehearsed(spec, factory, outcome, planner, settings, asked, progress_bar.far)
        outcome = outcome if tried is None else tried.outcome
        require_sound(problem, outcome.plan, pins)
        outcome = _with_candidates(factory, outcome, spec)
        result = expected(problem, outcome.plan, {})
        if tried is not None:
            result = with_evidence(outcome.plan, tried, spec, problem, asked.cv)
        outcome = replace(outcome, plan=result)
        notes = (*lossy_notices(result), *notes)
        progress_bar("comparing alternatives")
        explanation = (
            replace(explain(factory, outcome, planner, settings), engine=cost) if explained else None
        )
        saves.text("--out", out, lambda: plan_to_json(result))
        saves.text("--html", page, lambda: plan_html(factory.problem, outcome.plan, explanation))
    made_plan = MadePlan(spec, factory, outcome, tried, cost, explanation, notes)
    if as_json:
        emit_json(made_plan.json())
    else:
        made_plan.show(asked)
    saves.complain()
    if _leaves_out(spec, problem) or outcome.plan.fraction < 1 or (tried is not None and not tried.holds):
        missed()


@dataclass(frozen=True, slots=True, eq=False)
class MadePlan:
    """Everything that `potluck plan` prints."""

    spec: Spec
    factory: TemplateFactory
    outcome: PlanOutcome
    rehearsal: Rehearsal | None
    engine_cost: EngineCost | None
    explanation: Explanation | None
    notes: tuple[str, ...]

    def json(self) -> dict[str, object]:
        from potluck.plan.engine_costs import engine_json

        body = _as_json(self.factory.problem, self.outcome, self.explanation)
        body["engine"] = engine_json(self.spec.engine, self.engine_cost)
        return body | rehearsal_json(self.rehearsal) | ({"notes": list(self.notes)} if self.notes else {})

    def show(self, asked: RehearsalOptions) -> None:
        plan = self.outcome.plan
        show_notes(self.notes)
        verdict = verdict_of(self.rehearsal, asked, plan)
        show_plan(self.factory.problem, self.outcome, verdict, evidence_lines(self.rehearsal, asked))
        show_rehearsal(self.rehearsal, asked)
        _show_formats(self.spec, plan)
        show_engine(self.engine_cost)
        show_search(self.factory.search_results)
        show_reasons(self.explanation if plan.deployments else None)


def _leaves_out(spec: Spec, problem: PlanningProblem) -> bool:
    """Whether the plan leaves out a model with demand."""
    served = {demand.name for demand in problem.demands if demand.rate_per_s > 0}
    return any(model.traffic.rate_per_s > 0 and model.name not in served for model in spec.models)


def _hurried(factory: TemplateFactory) -> tuple[str, ...]:
    """Templates and strategies that the time limit left out; the cost bound does not cover them."""
    notes = []
    if kinds := sorted({kind.split(" of ")[0] for kind, _ in factory.skipped_kinds}):
        notes.append(
            f"the time limit left out templates of these kinds: {', '.join(kinds)}; raise --time-limit"
        )
    if factory.shortened_strategies:
        named = ", ".join(f"{name} ({how})" for name, how in sorted(factory.shortened_strategies.items()))
        notes.append(f"strategies cut short by the time limit: {named}")
    return tuple(notes)


def _search_notes(
    planner: Callable[[TemplateFactory, SolveSettings], PlanOutcome],
    factory: TemplateFactory,
    outcome: PlanOutcome,
    settings: SolveSettings,
) -> tuple[str, ...]:
    """A budget that would suffice, and what the time limit left out."""
    return (*_enough_budget(planner, factory, outcome, settings), *_hurried(factory))


def _enough_budget(
    planner: Callable[[TemplateFactory, SolveSettings], PlanOutcome],
    factory: TemplateFactory,
    outcome: PlanOutcome,
    settings: SolveSettings,
) -> tuple[str, ...]:
    from potluck.plan.explain import budget_that_would_do

    limit = factory.problem.budget_usd_per_h
    if outcome.allocation.shortfall is None or limit is None:
        return ()
    try:
        enough = budget_that_would_do(planner, factory, settings)
    except PotluckError as error:  # the plan itself was made before
        return (f"the budget that would meet the whole demand is unknown: {error}",)
    if enough is None:
        return ()
    return (f"{usd(enough)}/h would meet the whole demand; the budget is {usd(limit)}/h",)


def _with_candidates(factory: TemplateFactory, outcome: PlanOutcome, spec: Spec) -> PlanOutcome:
    """The outcome with the templates that scaling may add, where the spec's policy adds any."""
    from potluck.plan.current_problem import with_candidates

    if spec.policy.scaling != "cauchy":
        return outcome
    return replace(outcome, plan=with_candidates(factory, outcome.plan))


def require_service(
    problem: PlanningProblem, outcome: PlanOutcome, limit_s: float, notes: tuple[str, ...] = ()
) -> None:
    """Raise with the reason where the plan serves nothing."""
    from potluck.plan.explain import why_not

    if outcome.allocation.status == "unknown":
        raise CapacityError(f"no plan was found within {limit_s:g} s; raise --time-limit")
    asked = [demand.name for demand in problem.demands if demand.rate_per_s > 0]
    if not asked or any(outcome.plan.fraction_of(name) > 0 for name in asked):
        return
    shortfall = outcome.allocation.shortfall
    unserved = () if shortfall is None else shortfall.unserved
    models = [
        demand.name
        for demand in problem.demands
        if any(name.startswith(f"{demand.name}/") for name in unserved)
    ]
    if models:
        raise CapacityError("; ".join(why_not(problem, model) for model in models))
    raise CapacityError("; ".join([f"no plan serves any of the demand: {shortfall}", *notes]))


def require_sound(problem: PlanningProblem, plan: Plan, pins: Sequence[Deployment] = ()) -> None:
    """Refuse a plan that fails verification or has fewer copies than --pin asks for.

    Some strategies choose copies by their own rules and ignore pins.
    """
    from potluck.plan.verify import verify

    if violations := verify(problem, plan):
        raise CapacityError(f"the plan failed verification: {violations[0]}")
    counts = {(deployment.template, deployment.region): deployment.count for deployment in plan.deployments}
    for pin in pins:
        if (count := counts.get((pin.template, pin.region), 0)) < pin.count:
            what = f"{plan.strategy} plans {count} copies of {pin.template} in {pin.region}, not {pin.count}"
            raise InputError("--pin", f"{what}; use --strategy auto")


def _factory_of(
    problem: PlanningProblem, running_plan: Plan | None, progress_bar: ProgressBar
) -> TemplateFactory:
    """A template factory that may reuse the machine groups of the running plan."""
    from potluck.plan.strategies import TemplateFactory

    groups = tuple(t for t in running_plan.templates if t.kind == "group") if running_plan is not None else ()
    return TemplateFactory(problem, report_progress=progress_bar, running=groups)


def _pin(text: str) -> Deployment:
    from potluck.core.values.plan import Deployment

    match = _PIN.match(text)
    if match is None:
        raise InputError("pin", f"{text!r} is not TEMPLATE@REGION=COUNT; `plan --json` names the templates")
    return Deployment(match["template"], match["region"], int(match["count"]))


def _show_formats(spec: Spec, plan: Plan) -> None:
    for asked in spec.models:
        if (chosen := plan.format_of(asked.name)) is not None:
            why = "as in the spec"
            if len(asked.formats) > 1:
                why = f"the cheapest of the allowed {', '.join(asked.formats)}"
            paragraph(f"{asked.name}: weights in {chosen}, {why}; output quality is not checked.")


def _as_json(
    problem: PlanningProblem, outcome: PlanOutcome, explanation: Explanation | None
) -> dict[str, object]:
    from potluck.core.codec import encode
    from potluck.plan.explain import risk_lines, tokens_json

    body: dict[str, object] = {"plan": encode(outcome.plan)}
    risks = risk_lines(problem, outcome.plan)
    body["risks"] = [{"model": model, "line": line} for model, line in risks]
    body["tokens_per_usd"] = tokens_json(problem, outcome.plan)
    if outcome.allocation.shortfall is not None:
        body["shortfall"] = str(outcome.allocation.shortfall)
    if explanation is not None:
        body["explanation"] = encode(explanation)
    return body


@dataclass(frozen=True, slots=True, eq=False)
class SolvedStrategy:
    outcome: PlanOutcome
    cpu_s: float
    shown: tuple[Evidence, ...] = ()


@click.command()
@averages_option
@cv_option
@requests_option
@posing_options()
@json_option
def compare(as_json: bool, **options: Any) -> None:
    """Compare all planning strategies on one SPEC. Without SPEC, the bundled example.

    Each row is the cheapest plan of a strategy that meets its SLOs in simulation, as `plan --strategy` finds it; all
    are simulated with the same requests.
    """
    planning_options, rest = split_planning_options(options)
    rehearsal_options, spec = rehearsal_options_of(rest), planning_options.spec()
    problem = planning_options.problem(spec)
    with progress(4 * len(problem.demands) + 12) as progress_bar:
        problem, solved, left_out, notes = _solved(
            spec, problem, planning_options, rehearsal_options, progress_bar
        )
    rows = [_row(problem, name, strategy) for name, strategy in solved.items()]
    if as_json:
        from potluck.core.codec import encode

        emit_json([encode(compared) for compared in rows])
        for text in left_out:
            click.echo(f"not compared: {text}", err=True)
        return
    show_notes((*spec.notes, *notes))
    if any(demand.rate_per_s > 0 for demand in problem.demands):
        show_compared(rows)
    else:
        paragraph("Nothing to plan: all request rates are 0.")
    for text in left_out:
        paragraph(f"not compared: {text}")


def _solved(
    spec: Spec,
    problem: PlanningProblem,
    planning_options: PlanningOptions,
    rehearsal_options: RehearsalOptions,
    progress_bar: ProgressBar,
) -> tuple[PlanningProblem, dict[str, SolvedStrategy], list[str], tuple[str, ...]]:
    """(the problem, each strategy's plan, strategies left out with the reason, notes on demand left out)."""
    from potluck.plan.explain import planned_rest
    from potluck.plan.strategies import STRATEGIES, TemplateFactory

    solved: dict[str, SolvedStrategy] = {}
    left_out: list[str] = []
    notes: tuple[str, ...] = ()
    factory = TemplateFactory(problem, report_progress=progress_bar)
    seen: dict[object, Evidence] = {}
    for name, planner in STRATEGIES.items():
        start_s = time.process_time()
        progress_bar(name)
        factory.shortened_strategies.pop(name, None)  # `auto` may have had no time for it
        try:
            if name == "auto":  # what nothing can serve is left out for all
                factory, outcome, notes = planned_rest(planner, factory, planning_options.settings())
            else:
                outcome = planner(factory, planning_options.settings())
        except InputError as error:
            # A strategy that this spec is not for is told, not fatal; what is wrong for all is.
            if error.field != "strategy":
                raise
            left_out.append(error.problem)
            continue
        cpu_s = time.process_time() - start_s
        shown: tuple[Evidence, ...] = ()
        if outcome.plan.fraction >= 1 and outcome.plan.deployments:
            tried = rehearsed(
                spec,
                factory,
                outcome,
                planner,
                planning_options.settings(),
                rehearsal_options,
                progress_bar.far,
                seen,
            )
            if tried is not None:
                outcome, shown = tried.outcome, tried.best.evidence
        solved[name] = SolvedStrategy(outcome, cpu_s, shown)
    return factory.problem, solved, left_out, (*notes, *_hurried(factory))


def _row(problem: PlanningProblem, name: str, solved: SolvedStrategy) -> ComparedStrategy:
    from potluck.plan.explain import usd_range
    from potluck.plan.verify import verify

    result, shown = solved.outcome.plan, solved.shown
    tokens_per_h = (
        sum(demand.tokens_per_s * result.fraction_of(demand.name) for demand in problem.demands) * 3600
    )
    low, high = usd_range(problem, result)
    worst = min(shown, key=lambda each: each.mean - each.promised, default=None)
    return ComparedStrategy(
        strategy=name,
        cost_usd_per_h=result.total_usd_per_h,
        usd_per_million_tokens=result.total_usd_per_h / tokens_per_h * 1e6 if tokens_per_h else None,
        served_fraction=result.fraction,
        goodput_per_s=max(
            0.0, sum(demand.rate_per_s * result.fraction_of(demand.name) for demand in problem.demands)
        ),
        nodes=sum(result.nodes.values()),
        gap=result.gap,
        cpu_s=solved.cpu_s,
        violations=verify(problem, result),
        attained=None if worst is None else worst.mean,
        promised=None if worst is None else worst.promised,
        model="" if worst is None else worst.model,
        requests=sum(evidence.requests for evidence in shown),
        range_usd_per_million_tokens=(low / tokens_per_h * 1e6, high / tokens_per_h * 1e6)
        if tokens_per_h
        else None,
        formats=result.formats,
    )
