"""`potluck schedule`: plans for the hours of a day, beside the best plan that stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from potluck.cli.common.files import OutputFiles
from potluck.cli.common.progress import progress
from potluck.cli.common.render import emit_json, listing, paragraph, percent, usd
from potluck.cli.planning.planning_options import json_option, posed_of, posing_options, strategy_option
from potluck.cli.planning.rehearsal_options import averages_option, planner_of, untried_basis
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.plan.series.day_schedule import DaySchedule, DayStep
    from potluck.spec.spec_values import ModelSpec, Spec

PARTS = 24


@click.command()
@strategy_option
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write the plans (JSON) here.")
@averages_option
@posing_options(10.0, "CPU-seconds, for each plan.")
@json_option
def schedule(strategy: str, out: Path | None, averages: bool, as_json: bool, **options: Any) -> None:
    """Which plan to run when, as demand changes over the day, with what changing costs.

    Hours come from `traffic: {rate_by_hour: [...]}`, or from a trace that spans hours. Plans have the margins
    of `potluck plan`, which also tries one in simulation.
    """
    from potluck.core.values.plan import plan_to_json
    from potluck.plan.series import day_schedule
    from potluck.plan.strategies import TemplateFactory

    posed, _ = posed_of(options)
    planner, settings, saves = planner_of(strategy, averages), posed.settings(), OutputFiles()
    spec = posed.spec()
    rates = hourly_rates(spec)
    problem = posed.problem(spec)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with progress(4 * len(problem.asks) + day_schedule.LEVELS) as said:
        factory = TemplateFactory(problem, said=said)
        found = day_schedule.schedule(factory, planner, settings, rates, said)
    if out is not None:
        plans = {f"plan-{_clock(step.from_h).replace(':', '')}.json": step.plan for step in found.steps}
        for name, plan in (plans | {"static.json": found.static}).items():
            saves.text("--out", out / name, lambda plan=plan: plan_to_json(plan))  # type: ignore[misc]
    if as_json:
        emit_json(_as_json(found) | {"basis": untried_basis(averages)})
    else:
        _show(found, untried_basis(averages))
    saves.complain()


def hourly_rates(spec: Spec) -> list[dict[str, float]]:
    """Requests a second of each model in each part of the day; parts are as many as the finest model has."""
    by_model = {model.name: _own_rates(model) for model in spec.models}
    by_model = {name: rates for name, rates in by_model.items() if rates}
    if not by_model:
        fix = "add traffic: {rate_by_hour: [...]} to one, or a trace of several hours"
        raise InputError("models", f"none says how its demand changes over the day; {fix}")
    parts = max(len(rates) for rates in by_model.values())
    found = []
    for part in range(parts):
        rates = {}
        for model in spec.models:
            own = by_model.get(model.name)
            if own is None:
                rates[model.name] = model.traffic.rate_per_s
            else:  # the part's share of the model's own, coarser or equal, parts
                low, high = part * len(own) / parts, (part + 1) * len(own) / parts
                rates[model.name] = max(own[i] for i in range(int(low), max(int(low) + 1, round(high))))
        found.append(rates)
    return found


def _own_rates(model: ModelSpec) -> tuple[float, ...]:
    """As written, or as a trace has them, about the rate that the spec asks for."""
    from potluck.spec.trace_stats import rates_by_hour
    from potluck.spec.traces import load_trace

    if model.rates_by_hour or model.trace is None:
        return model.rates_by_hour
    trace = load_trace(model.trace)
    rates, mean = rates_by_hour(trace), trace.rate_per_s or 0.0
    factor = model.traffic.rate_per_s / mean if mean > 0 else 0.0
    return tuple(rate * factor for rate in rates)


def _clock(hour: float) -> str:
    minutes = round(hour * 60) % (24 * 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def _cells(step: DayStep) -> tuple[str, str, str, str, str]:
    nodes: dict[str, int] = {}
    for (_, node), count in step.plan.nodes.items():
        nodes[node] = nodes.get(node, 0) + count
    what = ", ".join(f"{count} {node}" for node, count in sorted(nodes.items())) or "nothing"
    asked = " ".join(f"{rate:.3g}" for rate in step.rates_per_s.values())
    served = "" if step.plan.fraction >= 1 else f" ({percent(step.plan.fraction)} of demand)"
    hours = f"{_clock(step.from_h)}-{_clock(step.from_h + step.hours)}"
    return hours, asked, usd(step.plan.total_usd_per_h), usd(step.change_usd), what + served


def _show(found: DaySchedule, basis: str) -> None:
    steps = sorted(found.steps, key=lambda step: step.from_h)
    models = ", ".join(steps[0].rates_per_s)
    saved = found.static_usd_per_day - found.usd_per_day
    title = f"A day: {usd(found.usd_per_day)}, {basis}"
    paragraph(f"req/s are of {models}, in this order.")
    listing(title, ("hours", "req/s", "USD/h", "change", "nodes"), [_cells(step) for step in steps])
    share = saved / found.static_usd_per_day if found.static_usd_per_day > 0 else 0.0
    one = f"The best plan that stays the same costs {usd(found.static.total_usd_per_h)}/h"
    click.echo(f"{one}, {usd(found.static_usd_per_day)} a day:")
    click.echo(f"the schedule saves {usd(saved)} ({percent(share)}).\n")


def _as_json(found: DaySchedule) -> dict[str, object]:
    from potluck.core.codec import encode

    return {
        "usd_per_day": found.usd_per_day,
        "static": {"usd_per_day": found.static_usd_per_day, "plan": encode(found.static)},
        "steps": [
            {
                "from_h": step.from_h,
                "hours": step.hours,
                "rates_per_s": dict(step.rates_per_s),
                "change_usd": step.change_usd,
                "usd_per_h": step.plan.total_usd_per_h,
                "plan": encode(step.plan),
            }
            for step in found.steps
        ],
    }
