"""`potluck replan --live`: the same answers for a service that runs, and handing one of them over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.cli.serving.operate.which_service import nothing
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.control.service_view import ServiceView
    from potluck.core.values.observed_speed import ObservedSpeed
    from potluck.core.values.plan import Plan
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.replan.replan_options import ReplanOption
    from potluck.plan.strategies import PlanOutcome, SolveSettings, TemplateFactory

Planner = Callable[["TemplateFactory", "SolveSettings"], "PlanOutcome"]
LEAST_PER_S = 1e-3
"""A model that was asked for less keeps the rate that its spec has: a pause is no reason to plan for nothing."""


@dataclass(frozen=True, slots=True)
class LiveService:
    """A service that runs, as far as plans go."""

    version: int
    plan: Plan
    spec: Path
    profiles: tuple[Path, ...]
    rates: tuple[str, ...]
    """What was asked of it in the last ten minutes that are over, as `--rate` has it."""
    paces: tuple[ObservedSpeed, ...] = ()
    """What its replicas really take."""
    style: str = ""
    """Of its engines; empty: of a service that an earlier release started."""


def live_of(service: ServiceView) -> LiveService:
    from potluck.control.decision_history import history_of, paces_of

    newest, known = service.store.plan(), service.store.get("spec files") or {}
    if newest is None or "path" not in known:
        raise nothing(f"there is no plan in {service.folder} yet")
    now_s = time.time()
    seen = history_of(service.store, now_s)
    models = {template.model for template in newest.plan.templates}
    rates = tuple(
        f"{model}={rates[-1]:.6g}"
        for model, rates in sorted(seen.items())
        if model in models and rates[-1] >= LEAST_PER_S
    )
    profiles = tuple(Path(each) for each in known.get("profiles", ()))
    paces = paces_of(service.store, now_s)
    style = str(known.get("style", ""))
    return LiveService(newest.version, newest.plan, Path(known["path"]), profiles, rates, paces, style)


def for_engines(planner: Planner, style: str) -> Planner:
    """The planner without what the engines of a service cannot be."""
    from potluck.cli.serving.up.up_plan import PlanChoices, limit

    if style != "emulated":
        return planner

    def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        limit(factory, PlanChoices(settings.time_limit_s, here=True, single=True))
        return planner(factory, settings)

    return planned


def with_paces(problem: PlanningProblem, running: LiveService) -> PlanningProblem:
    """As fast as its replicas really are."""
    from potluck.plan.replan.observed_profiles import observed

    return observed(problem, running.paces, datetime.now(UTC).date().isoformat())


def apply(service: ServiceView, running: LiveService, best: ReplanOption) -> str:
    """Hand the best answer to the gateway, and so to the controller; what was done, in a line."""
    from potluck.control.manual_changes import BY_HAND, put_plan

    if not service.gateway_lives:
        raise nothing(f"no gateway runs in {service.folder}; `potluck status` says what does")
    if is_no_better(best.plan, running.plan):
        return f"plan {running.version} is the best answer already; nothing changed"
    newest = service.store.plan()
    if newest is not None and newest.version != running.version:
        raise InputError(
            "--apply", f"plan {newest.version} came while this was reckoned; ask again, it may be enough"
        )
    why = f"replan --live, {best.step}"
    version = put_plan(service.store, service.client.set_plan, best.plan, f"{BY_HAND}: {why}", time.time())
    service.store.note(
        time.time(), "plan", f"version {version}, ${best.cost_usd_per_h:.2f}/h, {why}", BY_HAND
    )
    return (
        f"plan {version} is in force: {best.step}, ${best.cost_usd_per_h:.2f}/h "
        f"(was ${running.plan.cost_usd_per_h:.2f}/h); `potluck scale --auto` hands the fleet back"
    )


def is_no_better(plan: Plan, running: Plan) -> bool:
    """The same copies for the same demand, and no more of it served: other shares alone make no version."""
    asked, before = (
        {(each.model, each.bucket): each.rate_per_s for each in one.buckets} for one in (plan, running)
    )
    same = asked.keys() == before.keys() and all(
        isclose(asked[key], before[key], rel_tol=0.01) for key in asked
    )
    return (
        same
        and set(plan.deployments) == set(running.deployments)
        and plan.fraction <= running.fraction + 1e-6
    )


def said_of(running: LiveService) -> None:
    """What the answers are for."""
    from potluck.core.values.observed_speed import spoken

    rates = ", ".join(running.rates) or "as the spec has them (nothing was seen for ten minutes yet)"
    click.echo(f"plan {running.version} runs, ${running.plan.cost_usd_per_h:.2f}/h; requests/s: {rates}")
    if paces := spoken(running.paces):
        click.echo(paces)
