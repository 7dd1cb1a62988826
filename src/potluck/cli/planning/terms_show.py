"""How what was asked beside demand is printed: what it costs, what is paid beside rent, what spot nodes risk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.cli.common.render import listing, paragraph, percent, usd
from potluck.core.figures import seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from potluck.core.values.plan import Plan
    from potluck.core.values.types import Slo
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.reasons.term_prices import TermPrice


def show_money(problem: PlanningProblem, plan: Plan) -> None:
    """Who gets how much where not all fits, charges beside rent, nodes that are paid for already."""
    if any(each.fraction is not None for each in plan.predictions):
        parts = ", ".join(
            f"{each.model} {percent(plan.fraction_of(each.model))}" for each in plan.predictions
        )
        _say(f"Of the demand is served, by priority: {parts}.")
    if plan.charges:
        parts = ", ".join(f"{each.what} {usd(each.usd_per_h)}" for each in plan.charges)
        _say(f"Beside rent, per hour: {parts}; {usd(plan.total_usd_per_h)} in all.")
    for region in problem.regions:
        for offer in region.offers:
            used = min(plan.nodes.get((region.name, offer.node), 0), offer.reserved)
            if used:
                saved = usd(used * offer.price_usd_per_h)
                _say(
                    f"{used} of {offer.reserved} reserved {offer.node} in {region.name} used: {saved}/h less."
                )


def show_classes(problem: PlanningProblem) -> None:
    """What requests of each class were promised, where there are several: all are planned for the strictest."""
    for ask in problem.asks:
        if len(ask.classes) > 1:
            parts = [f"{each.name} {percent(each.share)} ({_times(each.slo)})" for each in ask.classes]
            _say(f"{ask.name}: {', '.join(parts)}; planned for the strictest of all, {_times(ask.slo)}.")


def _times(slo: Slo) -> str:
    return f"TTFT {seconds(slo.ttft_s)}, TPOT {seconds(slo.tpot_s)}"


def show_risk(problem: PlanningProblem, plan: Plan) -> None:
    """How often spot nodes go, and what is left without them."""
    from potluck.plan.reasons.term_prices import spot_risks

    for each in spot_risks(problem, plan):
        often = f"one is taken away every {1 / each.preemptions_per_h:.3g} h"
        if each.preemptions_per_h <= 0:
            often = "none is expected to be taken away"
        line = f"{each.model}: {each.spot_nodes} of {each.nodes} nodes are spot; {often} on average"
        _say(f"{line}, and without all of them {percent(each.served_without)} of its demand is served.")


def show_terms(prices: Sequence[TermPrice]) -> None:
    """Each term with its price."""
    if not prices:
        return
    rows = []
    for each in prices:
        if each.extra_fraction > 1e-6:
            cost = f"{percent(each.extra_fraction)} of demand"
        elif each.extra_usd_per_h is None:
            cost = "nothing"
        else:
            cost = ("" if each.exact else "about ") + f"{usd(max(0.0, each.extra_usd_per_h))}/h"
        rows.append((each.model, cost, each.words))
    listing("What was asked costs (by planning again without it)", ("model", "costs", "asked"), rows)


def _say(text: str) -> None:
    paragraph(f"{text}\n")
