"""Planning strategies over the same templates and integer program. A new one is a file and a row in STRATEGIES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from potluck.core.values.plan import Template
from potluck.plan.problem import ModelDemand
from potluck.plan.strategies import cauchy_strategy as cauchy
from potluck.plan.strategies import programs
from potluck.plan.strategies.template_factory import (
    TEMPLATE_TIME_SHARE,
    Planner,
    PlanOutcome,
    SolveSettings,
    TemplateFactory,
)
from potluck.plan.strategies.variants import choose_distance, choose_formats


@dataclass(frozen=True, slots=True)
class Strategy:
    """A planner; calling it also chooses weight formats and network distance, all within one time limit."""

    plan: Planner
    chooses_from: str  # The columns over which its bound is proven.
    templates: Callable[[TemplateFactory, ModelDemand], list[Template]] | None = None
    """Templates that scaling may start beside the plan's own; None: none."""

    def __call__(self, factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        return choose_formats(choose_distance(self._plan_in_time))(factory, settings)

    def _plan_in_time(self, factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        started = settings.started
        return self.plan(factory.with_time_limit(started, TEMPLATE_TIME_SHARE * started.left_s), started)


WHOLE_NODE_COMBOS = "combos of whole nodes"
STRATEGIES = {
    "auto": Strategy(programs.auto, "all timed templates", programs.every_kind),
    "homo": Strategy(programs.homo, "the selected node types"),
    "melange": Strategy(programs.melange, "aggregated replicas", TemplateFactory.mixed),
    "cauchy": Strategy(cauchy.cauchy_co, WHOLE_NODE_COMBOS, TemplateFactory.combos),
    "cauchy-ce": Strategy(
        cauchy.cauchy_ce, "the combos shortlisted by equation 15", cauchy.shortlisted_combos
    ),
    "cauchy-mc": Strategy(cauchy.cauchy_mc, WHOLE_NODE_COMBOS, TemplateFactory.combos),
    "cauchy-mce": Strategy(cauchy.cauchy_mce, WHOLE_NODE_COMBOS, TemplateFactory.combos),
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
