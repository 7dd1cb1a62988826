"""`potluck frontier`: cost against the SLO, availability, or the share of demand on spot nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click import option

from potluck.cli.common.inputs import scaled
from potluck.cli.common.render import emit_json, percent, progress, table, usd
from potluck.cli.planning.planning_options import (
    json_option,
    posing_options,
    split_planning_options,
    strategy_option,
)
from potluck.cli.planning.rehearsal import averages_option, planner_of, simulation_basis
from potluck.cli.planning.schedule import rented
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.core.values.plan import Plan
    from potluck.plan.frontier import FrontierPoint
    from potluck.plan.problem import PlanningProblem

BAR_WIDTH = 16  # Characters.


@click.command()
@option(
    "--against",
    type=click.Choice(["objective", "availability", "spot"]),
    default="objective",
    help="What to vary: SLO latencies, availability or the spot share.",
)
@option("--values", help="Values to plan for, such as 0.5,1,2.")
@option(
    "--survive",
    "domain",
    type=click.Choice(["node", "zone", "region"]),
    default="node",
    help="With --against availability: the failure domain.",
)
@strategy_option
@averages_option
@posing_options(10.0, "CPU-seconds for each plan.")
@json_option
def frontier(strategy: str, averages: bool, as_json: bool, **options: Any) -> None:
    """Plan for several SLOs, availability levels or spot shares, and show the cost of each.

    Without SPEC the bundled example is planned.

    \b
    Examples:
      potluck frontier potluck.yaml
      potluck frontier potluck.yaml --against availability --survive region
      potluck frontier potluck.yaml --against spot --values 0,0.25,0.5,1
    """
    from potluck.core.codec import encode
    from potluck.plan.frontier import VALUES, dominated, with_value
    from potluck.plan.frontier import frontier as frontier_of

    against, values, domain = (options.pop(name) for name in ("against", "values", "domain"))
    planning_options, _ = split_planning_options(options)
    asked = VALUES[against] if values is None else _values(values, against)
    spec = planning_options.spec()
    plain = planning_options.problem(spec)
    _possible(plain, against, domain)
    problems = []
    for value in asked:
        there = spec
        if against == "objective":
            there = scaled(spec, value)
            problem = planning_options.problem(there)
        else:
            problem = with_value(plain, against, value, domain)
        problems.append((value, problem, planner_of(strategy, there, averages)))
    with progress(len(asked)) as progress_bar:
        share = against != "objective"
        points = frontier_of(
            problems, planning_options.settings(), share_templates=share, report_progress=progress_bar
        )
    basis = simulation_basis(averages)
    if as_json:
        rows = [
            {
                "asked": value,
                "usd_per_h": plan.total_usd_per_h,
                "served": plan.fraction,
                "gap": plan.gap,
                "plan": encode(replace(plan, candidates=())),
            }
            for value, plan in points
        ]
        emit_json({"against": against, "points": rows, "basis": basis})
        return
    quantity = {
        "objective": "SLO latencies, as a multiple of the spec's",
        "availability": f"share of demand served after the loss of any one {domain}",
        "spot": "maximum share of demand on spot nodes",
    }[against]
    title = f"Cost against {quantity}; plans {basis}"
    _show(title, points, dominated(points, less_is_more=against != "availability"))


def _show(title: str, points: Sequence[FrontierPoint], worse: frozenset[float]) -> None:
    most_usd = max(plan.total_usd_per_h for _, plan in points) or 1.0
    table(
        title,
        ("value", "USD/h", "", "demand served", "cost gap", "nodes"),
        [
            (
                f"{value:g}",
                usd(plan.total_usd_per_h),
                "█" * round(plan.total_usd_per_h / most_usd * BAR_WIDTH),
                percent(plan.fraction),
                _proof(plan),
                rented(plan) + (" (dominated: a stricter plan costs less)" if value in worse else ""),
            )
            for value, plan in points
        ],
    )


def _proof(plan: Plan) -> str:
    """Upper bound on the savings of a cheaper plan for mean traffic, or that SLOs are missed in simulation."""
    if not plan.holds:
        return "SLO missed"
    return percent(plan.gap) if plan.gap >= 1e-6 else "proven cheapest"


def _values(text: str, against: str) -> tuple[float, ...]:
    try:
        values = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        problem = f"{text!r} is not a comma-separated list of numbers, such as 0.5,1,2"
        raise InputError("--values", problem) from None
    low, high = (1e-3, 1e3) if against == "objective" else (0.0, 1.0)
    wrong = next((value for value in values if not low <= value <= high), None)
    if wrong is not None:
        raise InputError("--values", f"must be between {low:g} and {high:g}, one is {wrong:g}")
    return values


def _possible(problem: PlanningProblem, against: str, domain: str) -> None:
    """Raise where the fleet has no spot nodes or zones to vary."""
    offers = [offer for region in problem.regions for offer in region.offers]
    if against == "spot" and not any(offer.spot for offer in offers):
        raise InputError("--against", "spot needs spot nodes; add some with spot: true")
    if against == "availability" and domain == "zone" and not any(offer.zone for offer in offers):
        raise InputError("--survive", "zone needs nodes with a zone; add zone: to the fleet's nodes")
