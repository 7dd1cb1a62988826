"""Plans for a service that runs: for rates, lengths and speeds as seen, at the prices of now, from what is there.

first   after machines were lost: what is left, routed anew or in other roles; no weights are loaded
full    a new plan, by the strategy that made the one in force, that pays for what it starts; judged by the same
        evidence as what runs, where there is a simulator
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from potluck.control.control_values import PlanReply, PlanRequest
from potluck.core.values.plan import Plan
from potluck.plan.current_problem import INTERVAL_S, Startups, observed, problem_now, with_candidates
from potluck.plan.problem import PlanningProblem
from potluck.plan.replan_options import ReplanOption, at_once, best_answer, surviving_deployments
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import Planner

FIRST_S = 1.0  # For each solve of the first answer.
SAME = 1e-9


@dataclass(frozen=True, slots=True)
class PlanEvidence:
    """Simulation of plans, from the CLI: a planner whose plans meet their SLOs, and a check of one plan."""

    planner: Callable[[Planner], Planner]
    holds: Callable[[PlanningProblem, Plan], bool]


@dataclass(slots=True)
class Replanner:
    """Over one spec's problem; called from a thread, one call at a time."""

    problem: PlanningProblem
    time_limit_s: float = 30.0
    interval_s: float = INTERVAL_S
    """Over which a start is spread (CORAL's K)."""
    candidates: bool = False
    """Whether plans say what scaling may start beside their copies."""
    startups: Startups | None = None
    """What a start costs, by model, where the spec says where weights lie."""
    factory_of: Callable[[PlanningProblem], TemplateFactory] = TemplateFactory
    """With the kinds of templates that can be started here."""
    evidence: PlanEvidence | None = None
    """None: plans are judged on averages alone."""

    def first(self, plan_request: PlanRequest) -> PlanReply:
        """What to do at once; nothing where all machines of the running plan are there."""
        problem = self._problem(plan_request)
        whole = plan_request.planned or plan_request.running
        if (
            plan_request.running is None
            or whole is None
            or set(surviving_deployments(problem, whole)) == set(whole.deployments)
        ):
            return PlanReply(None, "no machine is missing")
        replan_option = self._at_once(problem, plan_request.running)
        if not replan_option.plan.deployments:
            return PlanReply(None, "nothing that is left can serve")
        why = f"{replan_option.step}: what is left serves {replan_option.served_fraction:.0%}"
        return PlanReply(_inherited(replan_option.plan, whole), why)

    def full(self, plan_request: PlanRequest) -> PlanReply:
        """A whole plan by the strategy in force, if it serves more than what runs, or the same for less."""
        problem = self._problem(plan_request)
        running_plan = plan_request.running
        settings = SolveSettings(time_limit_s=self.time_limit_s)
        now = None
        if running_plan is not None:
            now = self._at_once(problem, running_plan)
            left = replace(running_plan, deployments=surviving_deployments(problem, running_plan))
            settings = replace(settings, running=left)
        factory, force = self.factory_of(problem), plan_request.planned or running_plan
        strategy = STRATEGIES.get("auto" if force is None else force.strategy, STRATEGIES["auto"])
        planner = strategy if self.evidence is None else self.evidence.planner(strategy)
        outcome = planner(factory, settings)
        plan = with_candidates(factory, outcome.plan) if self.candidates else outcome.plan
        if outcome.allocation.status == "unknown" or not plan.deployments:
            return PlanReply(None, "no plan was found in time")
        if now is None:
            return PlanReply(plan, f"serves {plan.fraction:.0%} on averages")
        more = plan.fraction - now.served_fraction
        if self.evidence is not None and abs(more) <= 1e-6:
            held = self.evidence.holds(problem, now.plan)
            if held != plan.holds:
                why = "this plan holds in simulation, what runs would not"
                return PlanReply(None, "no other plan holds in simulation") if held else PlanReply(plan, why)
        saves = now.cost_usd_per_h - plan.total_usd_per_h
        if more > 1e-6:
            why = f"this plan serves {plan.fraction:.0%} instead of {now.served_fraction:.0%}"
            return PlanReply(plan, why)
        if more > -1e-6 and saves > SAME:
            return PlanReply(plan, f"this plan saves ${saves:.2f}/h")
        if running_plan is not None and now.step == "flip" and now.flips:
            why = f"{now.flips} replicas in other roles serve {now.served_fraction:.0%}"
            return PlanReply(_inherited(now.plan, running_plan), why)
        return PlanReply(
            None, f"there is none better (${plan.total_usd_per_h:.2f}/h for {plan.fraction:.0%})"
        )

    def _at_once(self, problem: PlanningProblem, running_plan: Plan) -> ReplanOption:
        return best_answer(at_once(problem, running_plan, SolveSettings(time_limit_s=FIRST_S)))

    def _problem(self, plan_request: PlanRequest) -> PlanningProblem:
        loaded = plan_request.running or plan_request.planned
        problem = self.problem if loaded is None else self.problem.in_formats(loaded.formats)
        facts = observed(problem, plan_request.paces, datetime.now(UTC).date().isoformat())
        return problem_now(
            facts,
            plan_request.rates_per_s,
            plan_request.lengths,
            plan_request.regions,
            self.interval_s,
            self.startups,
        )


def _inherited(plan: Plan, previous_plan: Plan) -> Plan:
    """What is left of a plan is still its strategy's, and so is what may be started, if lengths are cut as before."""
    cuts = [[(b.model, b.longest_tokens) for b in item.buckets] for item in (plan, previous_plan)]
    there = {template.name for template in plan.templates}
    candidates = previous_plan.candidates if cuts[0] == cuts[1] else ()
    kept = tuple(candidate for candidate in candidates if candidate.name not in there)
    return replace(plan, strategy=previous_plan.strategy, candidates=kept)
