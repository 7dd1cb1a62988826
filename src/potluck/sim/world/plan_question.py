"""What the planner is told when the Brain asks for a plan: the rates seen, the market of the moment, what runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from potluck.core.state.actions import SeenLengths
from potluck.core.values.plan import Plan
from potluck.core.values.types import Region
from potluck.sim.world.sim_state import SimReplica


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """One question to the planner."""

    at_s: float
    rates_per_s: tuple[tuple[str, float], ...]
    """Model to requests a second that a plan is wanted for."""
    regions: tuple[Region, ...]
    """Prices and nodes as they are now."""
    running: Plan
    """The newest plan with the copies of it that are there and stay."""
    lengths: tuple[SeenLengths, ...] = ()


Planner = Callable[[PlanQuestion], Plan | None]
"""None when there is no plan, or none better."""


def running_of(plan: Plan, sites: Iterable[SimReplica]) -> Plan:
    """A plan with the copies that are up or coming up whole; those on their way out or on standby are none."""
    replicas = {template.name: len(template.replicas) for template in plan.repertoire}
    found: dict[str, tuple[str, str, int]] = {}
    """Copy to its template, region and how many of its replicas are there."""
    for site in sites:
        member = site.member
        if site.state in ("starting", "ready") and member.template in replicas and not member.standby:
            count = found[member.unit][2] if member.unit in found else 0
            found[member.unit] = (member.template, member.region, count + 1)
    copies: dict[tuple[str, str], int] = {}
    for template, region, count in found.values():
        if count >= replicas[template]:
            copies[template, region] = copies.get((template, region), 0) + 1
    return plan.holding(copies)
