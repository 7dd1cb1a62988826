"""`potluck plan --rehearse`: wiring from a spec to a rehearsal, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from potluck.cli.common.render import percent, table, usd
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.core.values.plan import Plan
    from potluck.plan.problem import Problem
    from potluck.plan.search.attain import Estimate
    from potluck.plan.strategies import Outcome, Settings, Workshop
    from potluck.rehearse.evidence import Trial
    from potluck.rehearse.loop import Rehearsal, Step
    from potluck.rehearse.sources import Source
    from potluck.spec.values import Spec

Command = TypeVar("Command", bound=Callable[..., object])
MOST_LINES = 6
SEED_STRIDE = 10_000_000
"""Between the runs of one `--seed` and the next: more than a rehearsal ever numbers."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a rehearsal."""

    rehearse: bool
    cv: float | None
    requests: int | None
    runs: int
    attainment: str = "closed"


def rehearsal_options(command: Command) -> Command:
    """What `plan` takes beside `--rehearse`."""
    for option in (
        click.option(
            "--runs",
            type=click.IntRange(2, 1000),
            default=5,
            show_default=True,
            help="Of a rehearsal, per round; twice as many fresh ones in the end (of a trace as many).",
        ),
        click.option(
            "--requests", type=click.IntRange(min=100), help="Of each run; else as many as it takes."
        ),
        click.option(
            "--cv", type=float, help="Variation of a rehearsal's gaps: 1 is Poisson, above it bursts."
        ),
        click.option(
            "--attainment",
            type=click.Choice(["closed", "simulated"]),
            default="closed",
            show_default=True,
            help="How pairs of a pool's replicas are judged: by a formula, or each in a short simulation.",
        ),
        click.option(
            "--rehearse", is_flag=True, help="Try plans in simulation; the cheapest that holds there."
        ),
    ):
        command = option(command)
    return command


def rehearsed(
    spec: Spec,
    workshop: Workshop,
    outcome: Outcome,
    planner: Callable[[Workshop, Settings], Outcome],
    settings: Settings,
    options: Mapping[str, Any],
) -> Rehearsal | None:
    """The rehearsal that the options ask for; None without `--rehearse`, or where nothing is asked of the fleet."""
    asked = Asked(**options)
    if asked.cv is not None and not asked.cv >= 0:
        raise InputError("--cv", f"must not be negative, is {asked.cv:g}")
    if not asked.rehearse:
        for name, value in (("--cv", asked.cv), ("--requests", asked.requests)):
            if value is not None:
                raise InputError(name, "is for a rehearsal; add --rehearse")
        return None
    if not any(model.traffic.rate_per_s > 0 for model in spec.models):
        return None
    from potluck.rehearse.loop import Rules, rehearse

    trial, recorded = trial_of(spec, workshop.problem, outcome.plan, asked, settings.seed)
    # A trace has just so many pieces; seeds there are without end.
    rules = Rules(runs=asked.runs, verdict_runs=asked.runs if recorded else 2 * asked.runs)
    return rehearse(workshop, planner, settings, trial, rules, workshop.said)


def estimate_of(spec: Spec, problem: Problem, options: Mapping[str, Any], seed: int = 0) -> Estimate | None:
    """What tries pairs of a pool's replicas under `--attainment simulated`; None: the closed form does."""
    if Asked(**options).attainment == "closed":
        return None
    from potluck.cli.trying.simulation import Inputs, scene_of
    from potluck.core.values.plan import Plan
    from potluck.plan.strategies.pools import require_pool
    from potluck.rehearse.pairs import PairTrial

    try:
        ask = require_pool(problem)
    except InputError as error:
        raise InputError("--attainment", f"simulated is for groups of a pool: {error.problem}") from error
    nothing = Plan("none", (), (), (), (), (), (), 0.0, 0.0)
    world = scene_of(Inputs(spec, problem, nothing))
    return PairTrial(problem, world, spec.model(ask.name).traffic, spec.policy, seed=seed)


def trial_of(spec: Spec, problem: Problem, plan: Plan, asked: Asked, seed: int = 0) -> tuple[Trial, bool]:
    """How plans of a spec are tried, and whether with recorded requests."""
    from potluck.cli.trying.simulation import Inputs, scene_of
    from potluck.rehearse.evidence import Trial
    from potluck.sim.settings import Settings as Running

    world = scene_of(Inputs(spec, problem, plan))
    source, recorded = _source(spec, asked, seed)
    return Trial(world, source, spec.policy, Running()), recorded


def _source(spec: Spec, asked: Asked, seed: int) -> tuple[Source, bool]:
    """The spec's own traces where it has some with times; everything else is made up. And whether it has."""
    from potluck.cli.common.workloads import Asked as Wanted
    from potluck.cli.common.workloads import of_trace
    from potluck.rehearse.sources import made_up, recorded
    from potluck.spec.traces import load_trace

    traffic = [model.traffic for model in spec.models if model.traffic.rate_per_s > 0]
    traces = {}
    for model in spec.models:
        trace = None if model.trace is None else load_trace(model.trace, blocks=True)
        if trace is not None and trace.span_s > 0 and asked.cv is None and model.traffic.rate_per_s > 0:
            traces[model.name] = of_trace(trace, model.name, Wanted())
    if traces:
        return recorded(traces, traffic, asked.runs), True
    made = made_up(traffic, 1.0 if asked.cv is None else asked.cv, asked.requests)
    return (lambda run: made(run + SEED_STRIDE * seed)), False


def show_rehearsal(found: Rehearsal | None) -> None:
    """Every round, and what came of it."""
    if found is None:
        return
    models = [each.model for each in found.first.evidence]
    rows = [(step.number, *_cells(step, models), "holds" if step.holds else "misses") for step in found.steps]
    heads = [head for model in models for head in (f"{model}: headroom", "attained", "at least")]
    table("Rehearsal", ("round", "runs", "USD/h", *heads, "objective"), rows)
    best, first = found.best, found.first
    wrong = dict.fromkeys(line for each in best.evidence for line in each.disagreed)
    for line in list(wrong)[:MOST_LINES]:
        click.echo(f"Not as planned: {line}.")
    if found.chosen is None:
        click.echo(f"No plan held in simulation: {found.reason}. This is the one that came closest.\n")
        return
    change = best.cost_usd_per_h - first.cost_usd_per_h
    before = f"{usd(abs(change))}/h {'more' if change > 0 else 'less'} than"
    if abs(change) < 0.005:
        before = "as much as"
    kept = "held" if first.holds else "missed"
    click.echo(
        f"The plan {found.reason}: {before} the plan on averages, which {kept} with the same requests.\n"
    )


def _cells(step: Step, models: list[str]) -> list[str]:
    by_model = {each.model: each for each in step.evidence}
    runs = max((len(each.attained) for each in step.evidence), default=0)
    cells = [f"{runs} fresh" if step.fresh else f"{runs}", usd(step.cost_usd_per_h)]
    for model in models:
        seen = by_model.get(model)
        if seen is None:
            cells += ["-", "-", "-"]
            continue
        verdict = "holds" if seen.lower >= seen.promised else "misses"
        bound = f"{percent(seen.lower)} ({verdict} {percent(seen.promised)})"
        answered = f", answered {percent(min(seen.answered))} or more" if not seen.answers else ""
        cells += [f"x {step.factors[model]:.3g}", percent(seen.mean) + answered, bound]
    return cells


def rehearsal_json(found: Rehearsal | None) -> dict[str, object]:
    """For `--json`; nothing without a rehearsal."""
    if found is None:
        return {}
    steps = [
        {
            "round": step.number,
            "fresh": step.fresh,
            "cost_usd_per_h": step.cost_usd_per_h,
            "factors": step.factors,
            "holds": step.holds,
            "models": [
                {
                    "model": each.model,
                    "promised": each.promised,
                    "attained": each.mean,
                    "at_least": each.lower,
                    "answered": sum(each.answered) / max(1, len(each.answered)),
                    "runs": len(each.attained),
                    "runs_kept": each.runs_kept,
                    "requests": each.requests,
                    "holds": each.holds,
                    "disagreed": list(each.disagreed),
                }
                for each in step.evidence
            ],
        }
        for step in found.steps
    ]
    return {"rehearsal": {"holds": found.chosen is not None, "reason": found.reason, "steps": steps}}
