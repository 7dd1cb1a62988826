"""`potluck compare`: every strategy on one spec, what it costs beside what it attains in simulation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from potluck.cli.common.files import OutputFiles, require_writable
from potluck.cli.common.progress import ProgressBar, progress
from potluck.cli.common.render import emit_json, paragraph
from potluck.cli.planning.plan_draw import compared_html, require_html
from potluck.cli.planning.plan_show import ComparedStrategy, show_compared, show_notes
from potluck.cli.planning.planning_options import (
    PlanningOptions,
    html_option,
    json_option,
    posed_of,
    posing_options,
)
from potluck.cli.planning.rehearsal_options import (
    RehearsalOptions,
    asked_of,
    averages_option,
    cv_option,
    requests_option,
    trial_of,
    tried,
)
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.core.values.plan import Plan
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.strategies import PlanOutcome, TemplateFactory
    from potluck.rehearse.evidence import Evidence
    from potluck.spec.spec_values import Spec

RUNS = 2
"""Of every plan: attainment as it is seen, not a proof."""


@dataclass(frozen=True, slots=True, eq=False)
class SolvedStrategy:
    """One strategy's plan, and what it took."""

    outcome: PlanOutcome
    cpu_s: float


@click.command()
@averages_option
@cv_option
@requests_option
@posing_options()
@html_option()
@json_option
def compare(html_path: Path | None, as_json: bool, **options: Any) -> None:
    """All strategies on one spec, in one table. Without SPEC, the bundled example.

    Every plan serves the same requests in a short simulation; --averages leaves that out.
    """
    posed, rest = posed_of(options)
    asked, saves, spec = asked_of(rest), OutputFiles(), posed.spec()
    require_html(html_path)
    require_writable("--html", html_path)
    problem = posed.problem(spec)
    with progress(4 * len(problem.asks) + 12) as said:
        factory, solved, left_out, notes = _solved(problem, posed, said)
        problem = factory.problem
        shown = {} if asked.averages else _rehearsed(spec, problem, solved, asked, posed.seed, said)
    rows = [_row(problem, name, each, shown.get(name, ())) for name, each in solved.items()]
    plans = {name: each.outcome.plan for name, each in solved.items()}
    saves.text("--html", html_path, lambda: compared_html(rows, problem, plans))
    if as_json:
        from potluck.core.codec import encode

        emit_json([encode(row) for row in rows])
    else:
        show_notes((*spec.notes, *notes))
        if any(ask.rate_per_s > 0 for ask in problem.asks):
            show_compared(rows)
        else:
            paragraph("Nothing is rented, as nothing is asked of it: all rates are 0.")
    for text in left_out:
        if as_json:
            click.echo(f"left out: {text}", err=True)
        else:
            paragraph(f"left out: {text}")
    saves.complain()


def _solved(
    problem: PlanningProblem, posed: PlanningOptions, said: ProgressBar
) -> tuple[TemplateFactory, dict[str, SolvedStrategy], list[str], tuple[str, ...]]:
    """(the workshop with what is planned for, each strategy's plan, who cannot and why, what nobody can serve)."""
    from potluck.plan.reasons.unservable import planned_rest
    from potluck.plan.strategies import STRATEGIES, TemplateFactory

    factory = TemplateFactory(problem, said=said)
    found, left_out = _others(factory, posed, said)
    # `auto` begins from what the others found, so that it is never the worse.
    known = tuple(each.outcome.plan for each in found.values())
    start_s = time.process_time()
    said("auto")
    rest, outcome, notes = planned_rest(STRATEGIES["auto"], factory, posed.settings(starts=known))
    best = SolvedStrategy(outcome, time.process_time() - start_s)
    if rest.problem != problem:  # what nothing can serve is left out for all
        found, left_out = _others(rest, posed, said)
    return rest, {"auto": best} | found, left_out, notes


def _others(
    factory: TemplateFactory, posed: PlanningOptions, said: ProgressBar
) -> tuple[dict[str, SolvedStrategy], list[str]]:
    """Every strategy's plan but that of `auto`, and what is said of those that this spec is not for."""
    from potluck.plan.strategies import STRATEGIES

    found: dict[str, SolvedStrategy] = {}
    left_out: list[str] = []
    for name in (each for each in STRATEGIES if each != "auto"):
        start_s = time.process_time()
        said(name)
        try:
            outcome = STRATEGIES[name](factory, posed.settings())
        except InputError as error:
            # A strategy that this spec is not for is told, not fatal; what is wrong for all is.
            if error.field != "strategy":
                raise
            left_out.append(error.problem)
            continue
        found[name] = SolvedStrategy(outcome, time.process_time() - start_s)
    return found, left_out


def _rehearsed(
    spec: Spec,
    problem: PlanningProblem,
    solved: dict[str, SolvedStrategy],
    asked: RehearsalOptions,
    seed: int,
    said: ProgressBar,
) -> dict[str, tuple[Evidence, ...]]:
    """What simulation says of every plan that serves all; plans that are alike are tried once."""
    if not any(ask.rate_per_s > 0 for ask in problem.asks):
        return {}
    known: dict[object, tuple[Evidence, ...]] = {}
    found = {}
    trial, _ = trial_of(spec, problem, solved["auto"].outcome.plan, asked, seed)
    for name, each in solved.items():
        plan = each.outcome.plan
        if plan.fraction < 1 or not plan.deployments:
            continue
        key = _same(plan)
        if key not in known:
            known[key] = tried(trial, plan, RUNS, partial(_told, said, name), said.far)
        found[name] = known[key]
    return found


def _told(said: ProgressBar, name: str, what: str) -> None:
    said(f"{name}: {what}")


def _same(plan: Plan) -> object:
    return plan.deployments, plan.shares, plan.flows, plan.formats


def _row(
    problem: PlanningProblem, name: str, solved: SolvedStrategy, shown: tuple[Evidence, ...]
) -> ComparedStrategy:
    from potluck.plan.check.verify import verify
    from potluck.plan.reasons.explain import usd_range

    found = solved.outcome.plan
    tokens_per_h = sum(ask.tokens_per_s * found.fraction_of(ask.name) for ask in problem.asks) * 3600
    low, high = usd_range(problem, found)
    worst = min(shown, key=lambda each: each.mean - each.promised, default=None)
    return ComparedStrategy(
        strategy=name,
        cost_usd_per_h=found.cost_usd_per_h,
        usd_per_million_tokens=found.cost_usd_per_h / tokens_per_h * 1e6 if tokens_per_h else None,
        served_fraction=found.fraction,
        goodput_per_s=max(0.0, sum(ask.rate_per_s * found.fraction_of(ask.name) for ask in problem.asks)),
        nodes=sum(found.nodes.values()),
        gap=found.gap,
        cpu_s=solved.cpu_s,
        violations=verify(problem, found),
        attained=None if worst is None else worst.mean,
        promised=None if worst is None else worst.promised,
        model="" if worst is None else worst.model,
        requests=sum(each.requests for each in shown),
        range_usd_per_million_tokens=(low / tokens_per_h * 1e6, high / tokens_per_h * 1e6)
        if tokens_per_h
        else None,
        formats=found.formats,
    )
