"""Copies on standby: loaded, idle and paid for, so that more is there at once (CAUCHY 3.5.1's pre-warmed instances).

`policy.standby` copies of each model are kept beside the plan's: of the deployment that serves requests for the least
rent, of the best for each phase, or of each where none can stand in for another; of none on machines with names.
Their replicas are marked (`ReplicaSpec.standby`) and get no requests; a `Reassign` changes that, engines stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from potluck.core.scaling.copy_capacity import ROUNDING, CopyRates, Key, busy_copies, planned_mix, rates_of
from potluck.core.scaling.rule import unit_price_usd_per_h
from potluck.core.state.actions import Action, Reassign
from potluck.core.state.fleet import FleetState, TemplateCopy
from potluck.core.values.fleet_cost import offers_in, rent_usd_per_h
from potluck.core.values.plan import Plan
from potluck.core.values.types import Region


def standby_counts(plan: Plan, copies: int, regions: tuple[Region, ...]) -> dict[Key, int]:
    """What is to be on standby beside a plan's copies, so many for each model."""
    if copies <= 0:
        return {}
    templates = {item.name: item for item in plan.templates if not item.machines}
    deployed = sorted(
        {(d.template, d.region) for d in plan.deployments if d.count and d.template in templates}
    )
    numbers: dict[Key, int] = {}
    for model in sorted({templates[key[0]].model for key in deployed}):
        mix = planned_mix(plan, model)
        mine = {key: rates_of(templates[key[0]], mix) for key in deployed if templates[key[0]].model == model}
        prices = {key: _price(plan, key, regions) for key in mine}
        if busy_copies(plan, model, mix) is not None:
            chosen = list(mine)
        else:
            closed = _best({key: rates.closed_per_s for key, rates in mine.items()}, prices)
            prefill = _best({key: rates.prefill_per_s for key, rates in mine.items()}, prices)
            decode = _best({key: rates.decode_per_s for key, rates in mine.items()}, prices)
            chosen = closed or prefill + decode
        # Where nobody knows what they serve, any may be short.
        numbers.update(dict.fromkeys(chosen or mine, copies))
    return numbers


def standby_usd_per_h(plan: Plan, counts: Mapping[Key, int], regions: tuple[Region, ...]) -> float:
    """What the copies on standby add to the rent of the plan's."""
    templates = {template.name: template for template in plan.repertoire}
    offers, nodes = offers_in(regions), Counter(plan.nodes)
    for (name, region), count in counts.items():
        for node_count in templates[name].nodes:
            nodes[region, node_count.node] += node_count.count * count
    return max(0.0, rent_usd_per_h(offers, nodes) - rent_usd_per_h(offers, plan.nodes))


def spoken(plan: Plan, copies: int, regions: tuple[Region, ...]) -> str:
    """What is on standby beside a plan and what that costs, in a line; empty where nothing is."""
    counts = standby_counts(plan, copies, regions)
    if not counts:
        return "on standby: none, as all copies stand on machines with names" if copies > 0 else ""
    listed = ", ".join(f"{count} x {name} in {region}" for (name, region), count in counts.items())
    more = standby_usd_per_h(plan, counts, regions)
    return f"on standby: {listed}; ${more:.2f}/h more, ${plan.total_usd_per_h + more:.2f}/h in all"


def reassign(template_copy: TemplateCopy, standby: bool) -> list[Action]:
    return [Reassign(replace(replica.member, standby=standby)) for replica in template_copy.views]


def ready_copies(fleet: FleetState, model: str) -> dict[Key, int]:
    ready = [u for u in fleet.units.values() if u.model == model and u.standby and u.whole]
    return Counter((template_copy.template, template_copy.region) for template_copy in ready)


def taken_first(
    ready: dict[Key, int], rates: Mapping[Key, CopyRates], phase: str, missing_per_s: float
) -> dict[Key, int]:
    """Of those that are ready, as many as cover what is missing of a phase, largest first; `ready` keeps the rest."""
    able = {key: float(getattr(rates[key], phase)) for key in ready if key in rates}
    numbers: dict[Key, int] = {}
    for key in sorted((key for key in able if able[key] > 0), key=lambda key: (-able[key], key)):
        while ready[key] and missing_per_s > ROUNDING:
            ready[key] -= 1
            numbers[key] = numbers.get(key, 0) + 1
            missing_per_s -= able[key]
    return numbers


def taken_by_parts(
    ready: Mapping[Key, int], busy: Mapping[Key, float], counts: Mapping[Key, int], rate_per_s: float
) -> dict[Key, int]:
    """The same where copies take different requests: of each what it lacks for the rate."""
    taken: dict[Key, int] = {}
    for key, used in busy.items():
        lacks = ceil(rate_per_s * used - ROUNDING) - counts.get(key, 0)
        if lacks > 0 and ready.get(key, 0):
            taken[key] = min(lacks, ready[key])
    return taken


def _price(plan: Plan, key: Key, regions: tuple[Region, ...]) -> float:
    template = plan.template(key[0])
    price = unit_price_usd_per_h(template, key[1], regions)
    return float(sum(node.count for node in template.nodes)) if price is None else price


def _best(able_per_s: Mapping[Key, float], prices: Mapping[Key, float]) -> list[Key]:
    ratios = {key: prices[key] / able for key, able in able_per_s.items() if able > 0}
    return [min(ratios, key=ratios.__getitem__)] if ratios else []
