"""What could be started: every template of the plan's strategy, in every region that has its nodes on offer.

CAUCHY's scale-out asks its program again (its 3.5, line 12: `best_combo`), over all combos and not only those that
run. They come with the plan (`Plan.candidates`), so that a decision takes no longer than the cover of a deficit:

    minimise  sum_n w_n x_n    such that    sum_n T_n x_n >= deficit,   nodes of each type <= what is free

with the objective of the strategy in force (`weight`): P_n the rent of a copy at the prices of now, T_n what it
serves of the mix of lengths that is asked for, C_n its tokens per dollar: equation 15 where the template has it, else
3600 T_n tokens / P_n. The tokens of a mean request are the same for all, so they are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from potluck.core.scaling.cheapest_cover import CopyOption
from potluck.core.scaling.copy_capacity import Key, Resource
from potluck.core.scaling.copy_rates import CopyRates, rates_of
from potluck.core.scaling.rule import available_nodes, unit_price_usd_per_h
from potluck.core.values.plan import Plan, Template
from potluck.core.values.types import Region


def weight(strategy: str, template: Template, price_usd_per_h: float, serves_per_s: float) -> float:
    """What the strategy's program would have one copy cost; USD an hour but for those that weigh by efficiency."""
    if strategy not in ("cauchy", "cauchy-ce", "cauchy-mce"):
        return price_usd_per_h
    efficiency = template.ce_tokens_per_usd if strategy == "cauchy-ce" else 0.0
    if efficiency <= 0 and price_usd_per_h > 0:
        efficiency = 3600.0 * serves_per_s / price_usd_per_h
    if efficiency <= 0:
        return price_usd_per_h if price_usd_per_h > 0 or serves_per_s > 0 else inf
    return 1.0 / efficiency if strategy == "cauchy-mce" else price_usd_per_h / efficiency


def startable(
    plan: Plan,
    model: str,
    mix: Mapping[int, float],
    regions: tuple[Region, ...],
    wanted: Iterable[Key],
) -> dict[Key, CopyRates]:
    """What one copy would serve of everything that could be started now.

    Without candidates only what the plan has, where it has it. Copies that prefill or decode for others are begun
    where the plan has others that they work with.
    """
    templates = {each.name: each for each in plan.repertoire if each.model == model and not each.machines}
    if not plan.candidates or not regions:
        keys = [key for key in wanted if key[0] in templates]
        return {key: rates_of(templates[key[0]], mix) for key in sorted(keys)}
    sources = {flow.prefill_region for flow in plan.flows if flow.model == model}
    targets = {flow.decode_region for flow in plan.flows if flow.model == model}
    found = {}
    used = {each.name for each in plan.templates}
    for name, template in sorted(templates.items()):
        if name not in used and not _serves_all(template, mix):
            continue
        rates = rates_of(template, mix)
        for region in regions:
            alone = rates.closed_per_s > 0
            joins = (rates.prefill_per_s > 0 and region.name in sources) or (
                rates.decode_per_s > 0 and region.name in targets
            )
            if (alone or joins) and unit_price_usd_per_h(template, region.name, regions) is not None:
                found[name, region.name] = rates
    return found


def _serves_all(template: Template, mix: Mapping[int, float]) -> bool:
    """Whether there is no length of the mix that it lacks the room or the speed for."""
    able = {c.bucket for c in template.capacity if c.closed_per_s > 0}
    able = able or {c.bucket for c in template.capacity if c.prefill_per_s > 0 or c.decode_per_s > 0}
    return all(bucket in able for bucket, share in mix.items() if share > 0)


def options(
    plan: Plan, known: Mapping[Key, CopyRates], regions: tuple[Region, ...], phase: str = "closed_per_s"
) -> list[CopyOption]:
    """One more copy of each, weighed by the strategy; without prices by its nodes."""
    templates = {each.name: each for each in plan.repertoire}
    strategy = plan.strategy
    if strategy == "cauchy-ce" and any(templates[name].ce_tokens_per_usd <= 0 for name, _ in known):
        strategy = "cauchy-mc"  # as the planner's fallback: the least cost, where not all are ranked
    found = []
    for key, rates in sorted(known.items()):
        template = templates[key[0]]
        serves = getattr(rates, phase)
        price = (
            unit_price_usd_per_h(template, key[1], regions)
            if available_nodes(regions) is not None
            else float(sum(each.count for each in template.nodes))
        )
        if price is None or template.machines:
            continue  # it cannot be had there; or stands on machines with names, which cannot be had twice
        worth = weight(strategy, template, price, serves)
        if worth < inf:
            found.append(CopyOption(key, serves, worth, needs_of(template, key[1])))
    return found


def needs_of(template: Template, region: str) -> dict[Resource, int]:
    return {(region, each.node): each.count for each in template.nodes}
