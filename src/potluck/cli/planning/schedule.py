"""`potluck schedule`: plans for the parts of a day."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import option

from potluck.cli.common.files import FOLDER, OutputFiles
from potluck.cli.common.render import emit_json, paragraph, percent, progress, table, usd
from potluck.cli.planning.planning_options import (
    json_option,
    posing_options,
    split_planning_options,
    strategy_option,
)
from potluck.cli.planning.rehearsal import averages_option, planner_of, simulation_basis
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.core.values.plan import Plan
    from potluck.plan.day_schedule import DaySchedule, DayStep
    from potluck.spec.spec_values import ModelSpec, Spec


def rented(plan: Plan) -> str:
    """Node counts of a plan: `2 1xL4, 1 1xL40S`."""
    nodes: dict[str, int] = {}
    for (_, node), count in plan.nodes.items():
        nodes[node] = nodes.get(node, 0) + count
    return ", ".join(f"{count} {node}" for node, count in sorted(nodes.items())) or "nothing"


@click.command()
@strategy_option
@option("--out", type=FOLDER, help="Write the plans as JSON files to this directory.")
@averages_option
@posing_options(10.0, "CPU-seconds for each plan.")
@json_option
def schedule(strategy: str, out: Path | None, averages: bool, as_json: bool, **options: Any) -> None:
    """Plan a fleet that follows demand over the day, including the cost of changes between plans.

    Hourly rates come from `traffic: {rate_by_hour: [...]}`, or from a trace of several hours. Each plan is the
    cheapest that meets its SLOs in simulation at its rates.
    """
    from potluck.core.values.plan import plan_to_json
    from potluck.plan.day_schedule import MAX_RATE_LEVELS
    from potluck.plan.day_schedule import schedule as schedule_day
    from potluck.plan.strategies import TemplateFactory

    planning_options, _ = split_planning_options(options)
    spec, settings, saves = planning_options.spec(), planning_options.settings(), OutputFiles()
    planner = planner_of(strategy, spec, averages)
    rates = hourly_rates(spec)
    problem = planning_options.problem(spec)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with progress(4 * len(problem.demands) + MAX_RATE_LEVELS) as progress_bar:
        factory = TemplateFactory(problem, report_progress=progress_bar)
        day_schedule = schedule_day(factory, planner, settings, rates, progress_bar)
    if out is not None:
        steps = day_schedule.steps
        plans = {plan_file(_clock(step.from_h)): step.plan for step in steps}
        for name, plan in (plans | {"static.json": day_schedule.static}).items():
            saves.text("--out", out / name, lambda plan=plan: plan_to_json(plan))  # type: ignore[misc]
    if as_json:
        emit_json(_schedule_json(day_schedule) | {"basis": simulation_basis(averages)})
    else:
        _show_schedule(day_schedule, simulation_basis(averages))
    saves.complain()


def plan_file(clock: str) -> str:
    """The file of the plan from a time of day on."""
    return f"plan-{clock.replace(':', '')}.json"


def hourly_rates(spec: Spec) -> list[dict[str, float]]:
    """Requests a second of each model in each part of the day; parts are as many as the finest model has."""
    by_model = {model.name: _own_rates(model) for model in spec.models}
    by_model = {name: rates for name, rates in by_model.items() if rates}
    if not by_model:
        fix = "add traffic: {rate_by_hour: [...]} to a model, or a trace of several hours"
        raise InputError("models", f"no model has rates by hour; {fix}")
    parts = max(len(rates) for rates in by_model.values())
    result = []
    for part in range(parts):
        rates = {}
        for model in spec.models:
            own = by_model.get(model.name)
            if own is None:
                rates[model.name] = model.traffic.rate_per_s
            else:  # the part's share of the model's own, coarser or equal, parts
                low, high = part * len(own) / parts, (part + 1) * len(own) / parts
                rates[model.name] = max(own[i] for i in range(int(low), max(int(low) + 1, round(high))))
        result.append(rates)
    return result


def _own_rates(model: ModelSpec) -> tuple[float, ...]:
    from potluck.spec.traces import load_trace, rates_by_hour

    if model.rates_by_hour or model.trace is None:
        return model.rates_by_hour
    trace = load_trace(model.trace)
    rates, mean = rates_by_hour(trace), trace.rate_per_s or 0.0
    factor = model.traffic.rate_per_s / mean if mean > 0 else 0.0
    return tuple(rate * factor for rate in rates)


def _clock(hour: float) -> str:
    minutes = round(hour * 60) % (24 * 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def _schedule_row(step: DayStep) -> tuple[str, ...]:
    asked = " ".join(f"{rate:.3g}" for rate in step.rates_per_s.values())
    served = "" if step.plan.fraction >= 1 else f" ({percent(step.plan.fraction)} of demand served)"
    hours = f"{_clock(step.from_h)}-{_clock(step.from_h + step.hours)}"
    return hours, asked, usd(step.plan.total_usd_per_h), usd(step.change_usd), rented(step.plan) + served


def _show_schedule(day_schedule: DaySchedule, basis: str) -> None:
    steps = sorted(day_schedule.steps, key=lambda step: step.from_h)
    paragraph(f"req/s columns: {', '.join(steps[0].rates_per_s)}.")
    title = f"Schedule: {usd(day_schedule.usd_per_day)} per day; plans {basis}"
    table(title, ("hours", "req/s", "USD/h", "cost of change", "nodes"), list(map(_schedule_row, steps)))
    static_usd = day_schedule.static_usd_per_day
    saved = static_usd - day_schedule.usd_per_day
    paragraph(
        f"The best single plan costs {usd(day_schedule.static.total_usd_per_h)}/h, {usd(static_usd)} per day: "
        f"the schedule saves {usd(saved)} ({percent(saved / static_usd if static_usd > 0 else 0.0)}).\n"
    )


def _schedule_json(day_schedule: DaySchedule) -> dict[str, object]:
    from potluck.core.codec import encode

    return {
        "usd_per_day": day_schedule.usd_per_day,
        "static": {"usd_per_day": day_schedule.static_usd_per_day, "plan": encode(day_schedule.static)},
        "steps": [
            {
                "from_h": step.from_h,
                "hours": step.hours,
                "rates_per_s": dict(step.rates_per_s),
                "change_usd": step.change_usd,
                "usd_per_h": step.plan.total_usd_per_h,
                "plan": encode(step.plan),
            }
            for step in day_schedule.steps
        ],
    }
