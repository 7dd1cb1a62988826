"""What copies of templates serve together, and which nodes they hold.

A template's capacity is given bucket by bucket, each as if it did nothing else. Time is shared among buckets, so for
a mix with shares w_b one copy serves

    C = 1 / sum_b (w_b / C_b)          over the buckets it can serve at all, their shares made to add up to 1

and copies serve what they serve by themselves plus the lesser of what they prefill and decode for each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import ceil, inf
from typing import NamedTuple

from potluck.core.state.fleet import FleetState, TemplateCopy
from potluck.core.values.plan import BucketCapacity, LengthBucket, Plan, Template

Key = tuple[str, str]
Resource = tuple[str, str]
"""(region, node type), or (region, `machine NAME`) where a template names the machine."""
MACHINE = "machine "
Counts = Mapping[Key, int]
Nodes = Mapping[Resource, int]


class TemplateCapacity(NamedTuple):
    """A template and what one copy of it serves, under the mix of the plan it came with."""

    template: Template
    rates: CopyRates


Known = Mapping[str, TemplateCapacity]


def blueprints(plan: Plan) -> dict[str, TemplateCapacity]:
    mixes = {model: planned_mix(plan, model) for model in {t.model for t in plan.repertoire}}
    return {t.name: TemplateCapacity(t, rates_of(t, mixes[t.model])) for t in plan.repertoire}


class CopyMeasure:
    """What copies serve, to compare before and after; where a template's rates are not known, copies are counted."""

    def __init__(self, fleet: FleetState, wanted: Counts, known: Known) -> None:
        self._known = known
        self._counted = {
            template_copy.model
            for template_copy in fleet.units.values()
            if template_copy.template not in known
            or not known[template_copy.template].rates.known
            or any(replica.role != replica.member.role for replica in template_copy.views)
        }
        ours = {name: known[name] for name, _ in wanted if name in known}
        self._counted |= {mine.template.model for mine in ours.values() if not mine.rates.known}
        parts: dict[str, list[CopyRates]] = {}
        for (name, _), count in wanted.items():
            if name in ours:
                parts.setdefault(ours[name].template.model, []).append(self._template(name).times(count))
        for template_copy in fleet.units.values():
            if (template_copy.template, template_copy.region) not in wanted and template_copy.whole:
                parts.setdefault(template_copy.model, []).append(self.unit(template_copy))
        self.targets = {model: total(rates) for model, rates in parts.items()}

    def target_per_s(self, model: str) -> float:
        return self.targets[model].served_per_s if model in self.targets else 0.0

    def unit(self, template_copy: TemplateCopy) -> CopyRates:
        if template_copy.model in self._counted:
            return _by_roles(replica.role for replica in template_copy.views)
        return self._known[template_copy.template].rates

    def _template(self, name: str) -> CopyRates:
        template, rates = self._known[name]
        return _by_roles(r.role for r in template.replicas) if template.model in self._counted else rates


def _by_roles(roles: Iterable[str]) -> CopyRates:
    texts = set(roles)
    if texts == {"prefill"}:
        return CopyRates(prefill_per_s=1.0)
    return CopyRates(decode_per_s=1.0) if texts == {"decode"} else CopyRates(closed_per_s=1.0)


class FreeNodes:
    __slots__ = ("_free", "_known")

    def __init__(self, known: Mapping[str, TemplateCapacity], free: dict[Resource, int]) -> None:
        self._known, self._free = known, free

    def copy(self) -> FreeNodes:
        return FreeNodes(self._known, dict(self._free))

    def take(self, key: Key) -> bool:
        needs = _needs(self._known[key[0]].template, key[1])
        if any(self._free.get(item, count) < count for item, count in needs.items()):
            return False
        self._add(needs, -1)
        return True

    def give(self, template_copy: TemplateCopy) -> None:
        if template_copy.template in self._known:
            self._add(_needs(self._known[template_copy.template].template, template_copy.region), 1)

    def helps(self, key: Key, template_copy: TemplateCopy) -> bool:
        if template_copy.template not in self._known:
            return False
        holds = _needs(self._known[template_copy.template].template, template_copy.region)
        needs = _needs(self._known[key[0]].template, key[1])
        return any(self._free.get(item, count) < count for item, count in needs.items() if item in holds)

    def _add(self, needs: Mapping[Resource, int], sign: int) -> None:
        for item, count in needs.items():
            if item in self._free:
                self._free[item] += sign * count


def room_in(
    fleet: FleetState, wanted: Counts, known: Known, available: Nodes | None, stopped: Collection[str]
) -> FreeNodes:
    """What is free beside all copies not stopped. Of a named machine the limit is what is there or wanted."""
    held: Counter[Resource] = Counter()
    for template_copy in fleet.units.values():
        if template_copy.template in known and not all(
            replica.member.id in stopped for replica in template_copy.views
        ):
            held.update(_needs(known[template_copy.template].template, template_copy.region))
    asked: Counter[Resource] = Counter()
    for (name, region), copies in wanted.items():
        for element, count in _needs(known[name].template, region).items() if name in known else ():
            asked[element] += count * copies
    free = {}
    for entry in {*held, *asked}:
        if entry[1].startswith(MACHINE):
            free[entry] = max(held[entry], asked[entry]) - held[entry]
        elif available is not None:
            free[entry] = available.get(entry, 0) - held[entry]
    return FreeNodes(known, free)


def _needs(template: Template, region: str) -> dict[Resource, int]:
    needs = {(region, node_count.node): node_count.count for node_count in template.nodes}
    needs.update({(region, MACHINE + name): gpus for name, gpus in template.machines.items()})
    return needs


class CopyRates(NamedTuple):
    """Requests a second: from prompt to last token, prompts for others, answers to others' prompts."""

    closed_per_s: float = 0.0
    prefill_per_s: float = 0.0
    decode_per_s: float = 0.0

    @property
    def known(self) -> bool:
        return self.closed_per_s > 0 or self.prefill_per_s > 0 or self.decode_per_s > 0

    def times(self, count: float) -> CopyRates:
        return CopyRates(self.closed_per_s * count, self.prefill_per_s * count, self.decode_per_s * count)

    def plus(self, other_rates: CopyRates) -> CopyRates:
        return CopyRates(*(a + b for a, b in zip(self, other_rates, strict=True)))

    @property
    def served_per_s(self) -> float:
        return self.closed_per_s + min(self.prefill_per_s, self.decode_per_s)


NOTHING = CopyRates()


def total(rates: Iterable[CopyRates]) -> CopyRates:
    return CopyRates(*(sum(column) for column in zip(NOTHING, *rates, strict=True)))


def rates_of(template: Template, mix: Mapping[int, float]) -> CopyRates:
    """What one copy does for a mix (bucket to weight); 0 when not known. One that serves alone does nothing else."""
    closed = _harmonic(((c, c.closed_per_s) for c in template.capacity), mix)
    if closed > 0:
        return CopyRates(closed_per_s=closed)
    prefill = _harmonic(((c, c.prefill_per_s) for c in template.capacity), mix)
    decode = _harmonic(((c, c.decode_per_s) for c in template.capacity), mix)
    return CopyRates(0.0, prefill, decode)


def _harmonic(capacity: Iterable[tuple[BucketCapacity, float]], mix: Mapping[int, float]) -> float:
    weight = seconds = 0.0
    for bucket, rate in capacity:
        share = mix.get(bucket.bucket, 0.0)
        if rate > 0 and share > 0:
            weight += share
            seconds += share / rate
    return weight / seconds if seconds > 0 else 0.0


def planned_mix(plan: Plan, model: str) -> dict[int, float]:
    """The shares of a model's buckets that the plan was made for; even where it expects nothing."""
    mine = [bucket for bucket in plan.buckets if bucket.model == model]
    whole = sum(bucket.rate_per_s for bucket in mine)
    return {b.bucket: b.rate_per_s / whole if whole > 0 else 1.0 / len(mine) for b in mine}


def buckets_of(plan: Plan, model: str) -> list[LengthBucket]:
    return sorted((b for b in plan.buckets if b.model == model), key=lambda b: b.longest_tokens)


ROUNDING = 1e-9


def busy_copies(plan: Plan, model: str, mix: Mapping[int, float]) -> dict[Key, float] | None:
    """u of every deployment of a model; None where each takes all lengths alike and whole copies add up."""
    planned = {b.bucket: b.rate_per_s for b in plan.buckets if b.model == model and b.rate_per_s > 0}
    capacity = {t.name: {c.bucket: c for c in t.capacity} for t in plan.templates if t.model == model}
    taken: dict[tuple[Key, str], set[int]] = {}
    result: dict[Key, float] = {}
    for share in plan.shares:
        able = capacity.get(share.template, {}).get(share.bucket)
        rate = 0.0 if able is None else getattr(able, f"{share.phase}_per_s")
        if share.bucket not in planned or rate <= 0 or share.rate_per_s <= 0:
            continue
        key = (share.template, share.region)
        taken.setdefault((key, share.phase), set()).add(share.bucket)
        part = share.rate_per_s / planned[share.bucket]
        result[key] = result.get(key, 0.0) + mix.get(share.bucket, 0.0) * part / rate
    whole = all(buckets == set(planned) for buckets in taken.values())
    alike = len({phase == "closed" for _, phase in taken}) <= 1
    if not taken or (whole and alike):
        return None
    return {key: used for key, used in result.items() if used > 0}


def served_by(busy: Mapping[Key, float], counts: Mapping[Key, int]) -> CopyRates:
    least = min((counts.get(key, 0) / used for key, used in busy.items()), default=inf)
    return CopyRates(closed_per_s=least if least < inf else 0.0)


def missing_copies(
    busy: Mapping[Key, float],
    counts: Counts,
    rate_per_s: float,
    needs: Mapping[Key, Nodes],
    free: Nodes | None,
) -> tuple[dict[Key, int], bool]:
    """Copies to add so that a rate is served, those most behind first; and whether nodes allow only some."""
    left = None if free is None else dict(free)
    more: dict[Key, int] = {}
    partly = False
    for key in sorted(busy, key=lambda key: (counts.get(key, 0) / busy[key], key)):
        wanted = ceil(rate_per_s * busy[key] - ROUNDING) - counts.get(key, 0)
        if wanted <= 0:
            continue
        had = wanted if key in needs else 0
        if left is not None and key in needs:
            had = max(0, min([wanted, *(left.get(node, 0) // number for node, number in needs[key].items())]))
            for node, need in needs[key].items():
                left[node] = left.get(node, 0) - need * had
        partly |= had < wanted
        if had:
            more[key] = had
    return more, partly
