"""Ways to a plan over the same templates and program. A new one is a file here and a row of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from potluck.core.values.plan import Template
from potluck.plan.problem import ModelDemand
from potluck.plan.strategies import cauchy_strategy as cauchy
from potluck.plan.strategies import programs
from potluck.plan.strategies.template_factory import (
    MAKING_SHARE,
    Planner,
    PlanOutcome,
    SolveSettings,
    TemplateFactory,
)
from potluck.plan.strategies.variants import choosing_formats, near_users


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to a plan; called, it plans within one time limit, for users where they are, in the best formats."""

    plan: Planner
    chooses_from: str  # Its proof is over these columns, and over no others.
    templates: Callable[[TemplateFactory, ModelDemand], list[Template]] | None = None
    """What scaling may start for it; None: nothing but copies of what is planned."""

    def __call__(self, factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        return choosing_formats(near_users(self._in_time))(factory, settings)

    def _in_time(self, factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        begun = settings.begun
        return self.plan(factory.within(begun, MAKING_SHARE * begun.left_s), begun)


WHOLE = "combos of whole nodes"
STRATEGIES = {
    "auto": Strategy(programs.auto, "all timed templates", programs.every_kind),
    "homo": Strategy(programs.homo, "the selected node types"),
    "melange": Strategy(programs.melange, "aggregated replicas", TemplateFactory.mixed),
    "cauchy": Strategy(cauchy.cauchy_co, WHOLE, TemplateFactory.combos),
    "cauchy-ce": Strategy(cauchy.cauchy_ce, "the combos shortlisted by equation 15", cauchy.efficient),
    "cauchy-mc": Strategy(cauchy.cauchy_mc, WHOLE, TemplateFactory.combos),
    "cauchy-mce": Strategy(cauchy.cauchy_mce, WHOLE, TemplateFactory.combos),
    "cronus": Strategy(programs.cronus, "pairs and single nodes", programs.cronus_templates),
    "prfaas": Strategy(programs.prfaas, "single-phase nodes", TemplateFactory.phased),
    "coral": Strategy(
        programs.coral,
        "the timed single-phase pipelines and nodes",
        programs.coral_templates,
    ),
    "thunderserve": Strategy(programs.thunderserve, "the groups that its search found"),
    "hexgen": Strategy(programs.hexgen, "the groups that its search found"),
    "distserve": Strategy(programs.distserve, "the selected GPU type"),
    "vllm-dp": Strategy(
        programs.vllm_dp, "aggregated replicas on the fewest GPUs", TemplateFactory.data_parallel
    ),
}

__all__ = ["STRATEGIES", "PlanOutcome", "SolveSettings", "Strategy", "TemplateFactory"]
