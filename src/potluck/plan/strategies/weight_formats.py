"""Weights in one of several formats, where the spec allows them: which one is chosen with the plan.

All replicas of a model share a format. Any two of them may come to hand KV to each other (flows, flips, prefixes
that are lent, requests that outlive a machine), and where a request was sent should not change its answer. So for
every combination of the models' formats the strategy is asked for a plan, and the best is taken: most served, then
cheapest, then the format that the spec names first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from potluck.core.errors import InputError
from potluck.core.values.model import Format
from potluck.core.values.plan import Plan
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.template_factory import FormatPrice, PlanOutcome, SolveSettings, TemplateFactory

Strategy = Callable[[TemplateFactory, SolveSettings], PlanOutcome]
Formats = tuple[tuple[str, Format], ...]
MOST = 32
"""Combinations that are tried; each takes a plan's time."""


def choosing_formats(strategy: Strategy) -> Strategy:
    """The strategy, made to choose formats where the spec leaves them open; what runs keeps its own."""

    def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        combinations = formats_of(factory.problem, settings.running)
        if combinations == [()]:
            return strategy(factory, settings)
        settings = settings.begun if len(combinations) > 1 else settings
        found = []
        for place, formats in enumerate(combinations):
            there = replace(factory, problem=factory.problem.in_formats(formats))
            left = len(combinations) - place
            mine = settings if left == 1 else settings.within(1 / left)
            starts = tuple(each for each in settings.starts if each.formats == formats)
            found.append(strategy(there, replace(mine, starts=starts)))
        return best_of(found)

    return planned


def formats_of(problem: PlanningProblem, running: Plan | None = None) -> list[Formats]:
    """Every combination of the formats that models may have, those of the spec's first formats first."""
    asks = [ask for ask in problem.asks if ask.formats]
    allowed = [_allowed(ask, running) for ask in asks]
    count = prod(len(each) for each in allowed)
    if count > MOST:
        raise InputError("precision", f"{count} combinations of formats are more than {MOST}; name fewer")
    names = [ask.name for ask in asks]
    return [tuple(zip(names, each, strict=True)) for each in product(*allowed)]


def _allowed(ask: ModelDemand, running: Plan | None) -> Sequence[Format]:
    loaded = None if running is None else running.format_of(ask.name)
    return ask.formats if loaded is None else (loaded,)


def best_of(outcomes: Iterable[PlanOutcome]) -> PlanOutcome:
    """The best of plans in different formats, with a proof over all of them."""
    found = list(outcomes)
    best = max(found, key=_rank)
    if len(found) == 1:
        return best
    prices = ((each.plan.formats, each.plan.fraction, each.plan.total_usd_per_h) for each in found)
    best = replace(best, tried=tuple(FormatPrice(*each) for each in prices))
    if not best.allocation.found:
        return best
    cost = best.plan.total_usd_per_h
    bound = min(each.allocation.lower_bound_usd_per_h for each in found if each.allocation.found)
    bound = min(bound, best.allocation.lower_bound_usd_per_h, cost)
    gap = max(best.plan.gap, (cost - bound) / cost if cost > 0 else 0.0)
    return replace(best, plan=replace(best.plan, gap=gap))


def _rank(outcome: PlanOutcome) -> tuple[float, float]:
    plan = outcome.plan
    return round(plan.fraction, 9), -round(plan.total_usd_per_h + plan.start_usd_per_h, 9)
