"""What a rehearsal showed of a plan: in words, and kept with the plan for whoever reads it later."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from potluck.cli.common.render import percent

if TYPE_CHECKING:
    from potluck.core.values.plan import Plan, Tried
    from potluck.plan.problem import PlanningProblem
    from potluck.rehearse.rehearsal import Rehearsal
    from potluck.spec.spec_values import Spec

KEPT = {"holds": "holds", "unsure": "is not sure to hold", "misses": "misses"}
"""How a promise fared, in words."""


def evidence_line(seen: Tried) -> str:
    """What simulation says of one model, with how much it saw."""
    kept = f"{KEPT[seen.verdict]} its {percent(seen.promised)}"
    if seen.verdict == "unsure":
        kept += f" ({percent(seen.at_least, seen.promised)} or more is sure; more runs may tell)"
    refused = "" if seen.answers else f"; answered {percent(seen.answered)} or more"
    runs = f"{seen.runs} {'fresh ' if seen.fresh else ''}runs" if seen.runs > 1 else "one run"
    if seen.gap_cv is not None:
        runs += f" with gaps of CV {seen.gap_cv:g}"
    attained = percent(seen.attained, seen.promised)
    return (
        f"rehearsed: {seen.model} in time for {attained} of {seen.requests:,} requests ({runs}), "
        f"{kept}{refused}"
    )


def noted(
    plan: Plan, found: Rehearsal | None, spec: Spec, problem: PlanningProblem, gap_cv: float | None
) -> Plan:
    """The plan with what it was seen to do, for whoever reads it later."""
    from potluck.core.values.plan import Rehearsed

    if found is None:
        return plan
    shown = tuple(each.told(found.best.fresh, gap_cv) for each in found.best.evidence)
    return replace(plan, rehearsed=Rehearsed(mark_of_trial(plan, spec, problem), shown))


def known_of(plan: Plan, spec: Spec, problem: PlanningProblem) -> tuple[Tried, ...]:
    """What a plan brings along of how it fared with this very spec; nothing where it was tried with another one."""
    told = plan.rehearsed
    return told.models if told is not None and told.of == mark_of_trial(plan, spec, problem) else ()


def mark_of_trial(plan: Plan, spec: Spec, problem: PlanningProblem) -> str:
    """Of all that decides how a rehearsal of a plan ends, seeds and lengths of runs apart."""
    from potluck.cli.simulating.simulation import SimulationInputs, scene_of
    from potluck.core.values.plan import mark_of, plan_from_json, plan_to_json

    # As it is read from a file: there 3 requests a second have become 3.0.
    bare = plan_from_json(plan_to_json(replace(plan, rehearsed=None)))
    world = scene_of(SimulationInputs(spec, problem, bare))
    return mark_of(repr((world, tuple(model.traffic for model in spec.models), spec.policy)))
