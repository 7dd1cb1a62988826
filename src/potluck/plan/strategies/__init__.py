"""Ways to a plan, all over the same templates and the same program, so that they can stand in one table."""

from __future__ import annotations

from collections.abc import Callable

from potluck.plan.strategies.cauchy_strategy import cauchy_ce, cauchy_co, cauchy_mc, cauchy_mce
from potluck.plan.strategies.programs import auto, coral, cronus, homo, melange, prfaas, thunderserve
from potluck.plan.strategies.template_factory import MAKING_SHARE, PlanOutcome, SolveSettings, TemplateFactory
from potluck.plan.strategies.user_distance import near_users
from potluck.plan.strategies.weight_formats import choosing_formats

Strategy = Callable[[TemplateFactory, SolveSettings], PlanOutcome]


def _in_time(strategy: Strategy) -> Strategy:
    """The strategy with one time limit for its templates and its program together."""

    def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        begun = settings.begun
        return strategy(factory.within(begun, MAKING_SHARE * begun.left_s), begun)

    return planned


_ALL: dict[str, Strategy] = {
    "auto": auto,
    "homo": homo,
    "melange": melange,
    "cauchy": cauchy_co,
    "cauchy-ce": cauchy_ce,
    "cauchy-mc": cauchy_mc,
    "cauchy-mce": cauchy_mce,
    "cronus": cronus,
    "prfaas": prfaas,
    "coral": coral,
    "thunderserve": thunderserve,
}
STRATEGIES = {name: choosing_formats(near_users(_in_time(strategy))) for name, strategy in _ALL.items()}
"""Name to strategy; `auto` puts every kind of column into one program."""

__all__ = ["STRATEGIES", "PlanOutcome", "SolveSettings", "TemplateFactory"]
