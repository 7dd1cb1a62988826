"""`potluck frontier`: cost against the objective, against availability or against the share on spot, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import option

from potluck.cli.common.files import FOLDER, OutputFiles, require_writable
from potluck.cli.common.inputs import scaled
from potluck.cli.common.render import emit_json, listing, paragraph, percent, progress, usd
from potluck.cli.planning.planning_options import (
    html_option,
    json_option,
    posed_of,
    posing_options,
    strategy_option,
)
from potluck.cli.planning.rehearsal import averages_option, planner_of, untried_basis
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.plan.day_and_frontier import DaySchedule, DayStep, FrontierPoint
    from potluck.plan.problem import PlanningProblem
    from potluck.spec.spec_values import ModelSpec, Spec


WIDTH, HEIGHT = 80, 14
LEFT = 10
WORDS = {
    "objective": "objectives, times what is promised (lower is stricter)",
    "availability": "share of the demand served without any one {domain}",
    "spot": "share of the demand that may be lost with spot nodes",
}


@click.command()
@option(
    "--against",
    type=click.Choice(["objective", "availability", "spot"]),
    default="objective",
    help="What cost is set against.",
)
@option("--values", help="Such as 0.5,1,2: what to ask for; else some that are usual.")
@option(
    "--survive",
    "domain",
    type=click.Choice(["node", "zone", "region"]),
    default="node",
    help="With --against availability: what is lost.",
)
@strategy_option
@averages_option
@posing_options(10.0, "CPU-seconds, for each plan.")
@html_option("Write a page with it here.")
@json_option
def frontier(
    against: str,
    values: str | None,
    domain: str,
    strategy: str,
    averages: bool,
    html_path: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """What being stricter costs: each point is a plan, with the margins of `plan`. Without SPEC, the bundled example.

    \b
    Examples:
      potluck frontier potluck.yaml
      potluck frontier potluck.yaml --against availability --survive region --html frontier.html
      potluck frontier potluck.yaml --against spot --values 0,0.25,0.5,1
    """
    from potluck.plan.day_and_frontier import VALUES, frontier, with_value

    posed, _ = posed_of(options)
    planner, settings, saves = planner_of(strategy, averages), posed.settings(), OutputFiles()
    asked = VALUES[against] if values is None else _values(values, against)
    require_writable("--html", html_path)
    spec = posed.spec()
    plain = posed.problem(spec)
    _possible(plain, against, domain)

    def problem_at(value: float) -> PlanningProblem:
        if against == "objective":
            return posed.problem(scaled(spec, value))
        return with_value(plain, against, value, domain)  # type: ignore[arg-type]

    with progress(len(asked)) as progress_bar:
        points = frontier(
            problem_at, asked, planner, settings, share_templates=against != "objective", said=progress_bar
        )
    words = WORDS[against].format(domain=domain)
    basis = untried_basis(averages)
    saves.text("--html", html_path, lambda: _page(points, words, strategy, basis))
    if as_json:
        emit_json(_as_json(points, against) | {"basis": basis})
    else:
        click.echo("\n".join(drawn(points, words)))
        click.echo()
        _table(points, against, basis)
    saves.complain()


def _values(text: str, against: str) -> tuple[float, ...]:
    try:
        values = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        raise InputError(
            "--values", f"{text!r} is not numbers with commas between, such as 0.5,1,2"
        ) from None
    low, high = (1e-3, 1e3) if against == "objective" else (0.0, 1.0)
    wrong = next((value for value in values if not low <= value <= high), None)
    if wrong is not None:
        raise InputError("--values", f"must be between {low:g} and {high:g}, one is {wrong:g}")
    return values


def _possible(problem: PlanningProblem, against: str, domain: str) -> None:
    """Complain of what the fleet has none of, before anything is planned."""
    offers = [offer for region in problem.regions for offer in region.offers]
    if against == "spot" and not any(offer.spot for offer in offers):
        raise InputError("--against", "spot needs spot nodes; add some with spot: true")
    if against == "availability" and domain == "zone" and not any(offer.zone for offer in offers):
        raise InputError("--survive", "zone is not known of any node; add zone: to the fleet's nodes")


def drawn(points: Sequence[FrontierPoint], words: str) -> list[str]:
    """The frontier in 80 columns: USD/h upwards, what is asked for to the right."""
    most = max((point.usd_per_h for point in points), default=0.0) or 1.0
    low, high = points[0].value, points[-1].value
    room = WIDTH - LEFT - 2
    grid = [[" "] * room for _ in range(HEIGHT)]
    before: tuple[int, int] | None = None
    for point in points:
        x = round((point.value - low) / (high - low) * (room - 1)) if high > low else room // 2
        y = HEIGHT - 1 - round(point.usd_per_h / most * (HEIGHT - 1))
        if before is not None:
            for between in range(before[0] + 1, x):
                share = (between - before[0]) / (x - before[0])
                height = round(before[1] + share * (y - before[1]))
                grid[height][between] = "·" if grid[height][between] == " " else grid[height][between]
        grid[y][x] = "o" if point.plan.fraction >= 1 else "x"
        before = (x, y)
    lines = ["USD/h"]
    for place, row in enumerate(grid):
        value = most * (HEIGHT - 1 - place) / (HEIGHT - 1)
        label = f"{value:,.2f}" if place % 4 == 0 or place == HEIGHT - 1 else ""
        lines.append(f"{label:>{LEFT - 1}} |{''.join(row)}".rstrip())
    ends = f"{low:g}", f"{high:g}"
    lines.append(" " * LEFT + "+" + "-" * (room - 1))
    lines.append(" " * LEFT + ends[0] + ends[1].rjust(room - len(ends[0])))
    lines.append((" " * LEFT + words)[:WIDTH])
    if any(point.plan.fraction < 1 for point in points):
        lines.append(" " * LEFT + "x: less than the demand is served")
    return lines


def _cells(point: FrontierPoint) -> tuple[str, str, str, str, str]:
    nodes: dict[str, int] = {}
    for (_, node), count in point.plan.nodes.items():
        nodes[node] = nodes.get(node, 0) + count
    what = ", ".join(f"{count} {node}" for node, count in sorted(nodes.items())) or "nothing"
    gap = percent(point.plan.gap) if point.plan.gap >= 1e-6 else "proven"
    return f"{point.value:g}", usd(point.usd_per_h), percent(point.plan.fraction), gap, what


def _table(points: Sequence[FrontierPoint], against: str, basis: str) -> None:
    from potluck.plan.day_and_frontier import dominated

    worse = dominated(points, less_is_more=against != "availability")
    rows = [
        (*cells[:4], cells[4] + (" (not needed: a stricter one costs less)" if place in worse else ""))
        for place, cells in enumerate(map(_cells, points))
    ]
    listing(f"Every point is a plan, {basis}", ("asked", "USD/h", "served", "gap", "nodes"), rows)


def _page(points: Sequence[FrontierPoint], words: str, strategy: str, basis: str) -> str:
    """One page with the drawing and the plans; it loads nothing."""
    from potluck.sim.results.report.charts import FULL_WIDTH, PlotFrame, axes, line, nice_ticks, svg
    from potluck.sim.results.report.html_report import sheet

    most = max((point.usd_per_h for point in points), default=0.0) * 1.05 or 1.0
    low, high = points[0].value, points[-1].value
    high = high if high > low else low + 1.0
    frame = PlotFrame(FULL_WIDTH, 360.0, (low, high), (0.0, most), top=26.0)
    body = axes(
        frame,
        [(at, f"{at:g}") for at in nice_ticks(low, high, 8)],
        [(at, f"{at:g}") for at in nice_ticks(0.0, most)],
        "USD/h",
    )
    body += line(frame, [(point.value, point.usd_per_h) for point in points], "s1")
    for point in points:
        cells = _cells(point)
        colour = "#1f5fa8" if point.plan.fraction >= 1 else "#b3541e"
        title = escape(f"{cells[0]}: {cells[1]}/h, {cells[2]} served, {cells[4]}")
        place = f'cx="{frame.x(point.value):.1f}" cy="{frame.y(point.usd_per_h):.1f}"'
        body += f'<circle {place} r="5" fill="{colour}"><title>{title}</title></circle>'
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(point)) + "</tr>" for point in points
    )
    heads = "".join(f"<th>{name}</th>" for name in ("asked", "USD/h", "served", "gap", "nodes"))
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    title = "Cost frontier"
    words = f"USD/h against {words}. Each point is a plan of {strategy}, {basis}."
    head = f"<header><h1>{title}</h1><p>{escape(words)}</p></header>"
    drawing = f"<section>{svg(frame, body, title)}</section>"
    return sheet(
        title, f'{head}\n<main>\n{drawing}\n<section><div class="wide">{table}</div></section>\n</main>\n'
    )


def _as_json(points: Sequence[FrontierPoint], against: str) -> dict[str, object]:
    from potluck.core.codec import encode

    return {
        "against": against,
        "points": [
            {
                "asked": point.value,
                "usd_per_h": point.usd_per_h,
                "served": point.plan.fraction,
                "gap": point.plan.gap,
                "plan": encode(replace(point.plan, candidates=())),
            }
            for point in points
        ],
    }


PARTS = 24


@click.command()
@strategy_option
@option("--out", type=FOLDER, help="Write the plans (JSON) here.")
@averages_option
@posing_options(10.0, "CPU-seconds, for each plan.")
@json_option
def schedule(strategy: str, out: Path | None, averages: bool, as_json: bool, **options: Any) -> None:
    """Which plan to run when, as demand changes over the day, with what changing costs.

    Hours come from `traffic: {rate_by_hour: [...]}`, or from a trace that spans hours. Plans have the margins
    of `potluck plan`, which also tries one in simulation.
    """
    from potluck.core.values.plan import plan_to_json
    from potluck.plan import day_and_frontier
    from potluck.plan.strategies import TemplateFactory

    posed, _ = posed_of(options)
    planner, settings, saves = planner_of(strategy, averages), posed.settings(), OutputFiles()
    spec = posed.spec()
    rates = hourly_rates(spec)
    problem = posed.problem(spec)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with progress(4 * len(problem.asks) + day_and_frontier.LEVELS) as progress_bar:
        factory = TemplateFactory(problem, said=progress_bar)
        day_schedule = day_and_frontier.schedule(factory, planner, settings, rates, progress_bar)
    if out is not None:
        plans = {
            f"plan-{_clock(step.from_h).replace(':', '')}.json": step.plan for step in day_schedule.steps
        }
        for name, plan in (plans | {"static.json": day_schedule.static}).items():
            saves.text("--out", out / name, lambda plan=plan: plan_to_json(plan))  # type: ignore[misc]
    if as_json:
        emit_json(_as_json_schedule(day_schedule) | {"basis": untried_basis(averages)})
    else:
        _show(day_schedule, untried_basis(averages))
    saves.complain()


def hourly_rates(spec: Spec) -> list[dict[str, float]]:
    """Requests a second of each model in each part of the day; parts are as many as the finest model has."""
    by_model = {model.name: _own_rates(model) for model in spec.models}
    by_model = {name: rates for name, rates in by_model.items() if rates}
    if not by_model:
        fix = "add traffic: {rate_by_hour: [...]} to one, or a trace of several hours"
        raise InputError("models", f"none says how its demand changes over the day; {fix}")
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
    """As written, or as a trace has them, about the rate that the spec asks for."""
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


def _cells_schedule(step: DayStep) -> tuple[str, str, str, str, str]:
    nodes: dict[str, int] = {}
    for (_, node), count in step.plan.nodes.items():
        nodes[node] = nodes.get(node, 0) + count
    what = ", ".join(f"{count} {node}" for node, count in sorted(nodes.items())) or "nothing"
    asked = " ".join(f"{rate:.3g}" for rate in step.rates_per_s.values())
    served = "" if step.plan.fraction >= 1 else f" ({percent(step.plan.fraction)} of demand)"
    hours = f"{_clock(step.from_h)}-{_clock(step.from_h + step.hours)}"
    return hours, asked, usd(step.plan.total_usd_per_h), usd(step.change_usd), what + served


def _show(day_schedule: DaySchedule, basis: str) -> None:
    steps = sorted(day_schedule.steps, key=lambda step: step.from_h)
    models = ", ".join(steps[0].rates_per_s)
    saved = day_schedule.static_usd_per_day - day_schedule.usd_per_day
    title = f"A day: {usd(day_schedule.usd_per_day)}, {basis}"
    paragraph(f"req/s are of {models}, in this order.")
    listing(title, ("hours", "req/s", "USD/h", "change", "nodes"), [_cells_schedule(step) for step in steps])
    share = saved / day_schedule.static_usd_per_day if day_schedule.static_usd_per_day > 0 else 0.0
    one = f"The best plan that stays the same costs {usd(day_schedule.static.total_usd_per_h)}/h"
    click.echo(f"{one}, {usd(day_schedule.static_usd_per_day)} a day:")
    click.echo(f"the schedule saves {usd(saved)} ({percent(share)}).\n")


def _as_json_schedule(day_schedule: DaySchedule) -> dict[str, object]:
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
