"""What each term costs: the plan beside the one that is made without it.

By planning again, not by a dual: counts are whole, and a term may change which templates there are at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from potluck.core.values.plan import Plan
from potluck.plan.assemble.term_rows import domains, offers_of
from potluck.plan.check.verify_terms import served_share, without
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.template_factory import PlanOutcome, SolveSettings, TemplateFactory

Planner = Callable[[TemplateFactory, SolveSettings], PlanOutcome]


@dataclass(frozen=True, slots=True)
class TermPrice:
    """A term of a model, in words, and what it adds to the plan."""

    model: str
    term: str
    words: str
    extra_usd_per_h: float | None
    """None where not all demand is met, so that costs do not compare."""
    extra_fraction: float
    """Of the demand, what more would be served without it."""
    exact: bool
    """Whether both plans were proven cheapest; else the difference may be of the search."""


@dataclass(frozen=True, slots=True)
class SpotRisk:
    """A model's spot nodes."""

    model: str
    spot_nodes: int
    nodes: int
    preemptions_per_h: float
    """Of all of them together."""
    served_without: float
    """Share of its demand that is served when all are gone."""


def term_prices(
    factory: TemplateFactory, outcome: PlanOutcome, planner: Planner, settings: SolveSettings
) -> tuple[TermPrice, ...]:
    """Every term of every model, priced by planning without it."""
    found = []
    for ask in factory.problem.asks:
        for term, words, changed in _changes(ask):
            fresh = changed.slo != ask.slo or changed.origins != ask.origins  # templates are timed anew
            there = _with(factory.problem, changed)
            shop = TemplateFactory(there) if fresh else replace(factory, problem=there)
            other = planner(shop, settings)
            whole = min(outcome.plan.fraction, other.plan.fraction) >= 1
            extra = outcome.plan.total_usd_per_h - other.plan.total_usd_per_h if whole else None
            exact = max(outcome.plan.gap, other.plan.gap) < settings.gap_target + 1e-9
            more = max(0.0, other.plan.fraction - outcome.plan.fraction)
            found.append(TermPrice(ask.name, term, words, extra, more, exact))
    return tuple(found)


def _changes(ask: ModelDemand) -> Iterator[tuple[str, str, ModelDemand]]:
    """Every term with its words, and what is asked without it."""
    for term, words in ask.terms.asked.items():
        yield term, words, replace(ask, terms=ask.terms.without(term))
    for each in ask.classes:
        if (left := ask.without_class(each.name)).slo != ask.slo:
            yield "class", f"what class {each.name} was promised", left
    if ask.origins:
        places = ", ".join(f"{origin.share:.0%} {origin.name}" for origin in ask.origins)
        yield "origins", f"users have places: {places}", replace(ask, origins=())


def _with(problem: PlanningProblem, ask: ModelDemand) -> PlanningProblem:
    return replace(problem, asks=tuple(ask if each.name == ask.name else each for each in problem.asks))


def spot_risks(problem: PlanningProblem, plan: Plan) -> tuple[SpotRisk, ...]:
    """Models with spot nodes, how often these go, and what is left without them."""
    offers, found = offers_of(problem), []
    cells = [cell for _, each in domains(problem)["spot"] for cell in each]
    for ask in problem.asks if cells else ():
        copies: dict[tuple[str, str], int] = {}
        nodes = spot = 0
        often = 0.0
        for deployment in plan.deployments:
            template = plan.template(deployment.template)
            if template.model != ask.name:
                continue
            copies[deployment.template, deployment.region] = deployment.count
            for each in template.nodes:
                held, offer = each.count * deployment.count, offers.get((deployment.region, each.node))
                nodes += held
                if offer is not None and offer.spot:
                    spot += held
                    often += held * offer.preemptions_per_h
        if spot:
            left = served_share(problem, plan, ask, without(plan, copies, cells))
            found.append(SpotRisk(ask.name, spot, nodes, often, left))
    return tuple(found)
