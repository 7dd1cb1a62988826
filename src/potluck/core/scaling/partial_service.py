"""Plans in which not every copy takes every request: some lengths go here, others there, or through two phases.

Requests are routed by the plan's shares, so a further copy of one deployment helps only the part that goes its way.
With w the part of a bucket's requests that a deployment takes in a phase, and C what one copy does of them a second,
one request a second of the mix of buckets m keeps

    u = sum over buckets and phases of m_b w_b / C_b        copies of that deployment busy,

so n copies of each serve min n / u together, and a rate Q needs Q u of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf

from potluck.core.scaling.copy_capacity import Key, Resource
from potluck.core.scaling.copy_rates import CopyRates
from potluck.core.values.plan import Plan

ROUNDING = 1e-9


def busy_copies(plan: Plan, model: str, mix: Mapping[int, float]) -> dict[Key, float] | None:
    """u of every deployment of a model; None where each takes all lengths alike and whole copies add up."""
    planned = {b.bucket: b.rate_per_s for b in plan.buckets if b.model == model and b.rate_per_s > 0}
    capacity = {
        t.name: {each.bucket: each for each in t.capacity} for t in plan.templates if t.model == model
    }
    taken: dict[tuple[Key, str], set[int]] = {}
    found: dict[Key, float] = {}
    for share in plan.shares:
        able = capacity.get(share.template, {}).get(share.bucket)
        rate = 0.0 if able is None else getattr(able, f"{share.phase}_per_s")
        if share.bucket not in planned or rate <= 0 or share.rate_per_s <= 0:
            continue
        key = (share.template, share.region)
        taken.setdefault((key, share.phase), set()).add(share.bucket)
        part = share.rate_per_s / planned[share.bucket]
        found[key] = found.get(key, 0.0) + mix.get(share.bucket, 0.0) * part / rate
    whole = all(buckets == set(planned) for buckets in taken.values())
    alike = len({phase == "closed" for _, phase in taken}) <= 1
    if not taken or (whole and alike):
        return None
    return {key: used for key, used in found.items() if used > 0}


def served_by(busy: Mapping[Key, float], counts: Mapping[Key, int]) -> CopyRates:
    """What so many copies of each serve together."""
    least = min((counts.get(key, 0) / used for key, used in busy.items()), default=inf)
    return CopyRates(closed_per_s=least if least < inf else 0.0)


def missing_copies(
    busy: Mapping[Key, float],
    counts: Mapping[Key, int],
    rate_per_s: float,
    needs: Mapping[Key, Mapping[Resource, int]],
    free: Mapping[Resource, int] | None,
) -> tuple[dict[Key, int], bool]:
    """Copies to add so that a rate is served, those most behind first; and whether nodes allow only some."""
    left = None if free is None else dict(free)
    more: dict[Key, int] = {}
    partly = False
    for key in sorted(busy, key=lambda each: (counts.get(each, 0) / busy[each], each)):
        wanted = ceil(rate_per_s * busy[key] - ROUNDING) - counts.get(key, 0)
        if wanted <= 0:
            continue
        had = wanted if key in needs else 0
        if left is not None and key in needs:
            had = max(0, min([wanted, *(left.get(node, 0) // each for node, each in needs[key].items())]))
            for node, each in needs[key].items():
                left[node] = left.get(node, 0) - each * had
        partly |= had < wanted
        if had:
            more[key] = had
    return more, partly
