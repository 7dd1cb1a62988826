"""Capacity of template copies together, and the nodes they hold.

A template's capacity is given per bucket, each as if it did nothing else. Time is shared among buckets, so for a
mix with shares w_b one copy serves

    C = 1 / sum_b (w_b / C_b)          over the buckets it can serve at all, with normalized shares

and copies together serve the sum of their closed rates plus the lesser of their summed prefill and decode rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import ceil, inf
from typing import NamedTuple

from potluck.core.state.fleet import FleetState, TemplateCopy
from potluck.core.values.plan import BucketCapacity, LengthBucket, Plan, Template

CopyKey = tuple[str, str]
Resource = tuple[str, str]
"""(region, node type), or (region, `machine NAME`) where a template names the machine."""
MACHINE_PREFIX = "machine "
Counts = Mapping[CopyKey, int]
Nodes = Mapping[Resource, int]


class TemplateCapacity(NamedTuple):
    """A template and the rates of one copy, under the mix of the plan it came with."""

    template: Template
    rates: CopyRates


TemplateCapacities = Mapping[str, TemplateCapacity]


def template_capacities(plan: Plan) -> dict[str, TemplateCapacity]:
    mixes = {model: planned_mix(plan, model) for model in {t.model for t in plan.repertoire}}
    return {t.name: TemplateCapacity(t, rates_of(t, mixes[t.model])) for t in plan.repertoire}


class CopyMeasure:
    """Rates that copies serve, to compare before and after a change; copies are counted where a template's rates
    are unknown."""

    def __init__(self, fleet: FleetState, wanted: Counts, known: TemplateCapacities) -> None:
        self._known = known
        self._counted_models = {
            template_copy.model
            for template_copy in fleet.units.values()
            if template_copy.template not in known
            or not known[template_copy.template].rates.known
            or any(replica.role != replica.member.role for replica in template_copy.views)
        }
        wanted_capacities = {name: known[name] for name, _ in wanted if name in known}
        self._counted_models |= {
            capacity.template.model for capacity in wanted_capacities.values() if not capacity.rates.known
        }
        rates_by_model: dict[str, list[CopyRates]] = {}
        for (name, _), count in wanted.items():
            if name in wanted_capacities:
                rates_by_model.setdefault(wanted_capacities[name].template.model, []).append(
                    self._template_rates(name).times(count)
                )
        for template_copy in fleet.units.values():
            if (template_copy.template, template_copy.region) not in wanted and template_copy.whole:
                rates_by_model.setdefault(template_copy.model, []).append(self.copy_rates(template_copy))
        self.targets = {model: sum_rates(rates) for model, rates in rates_by_model.items()}

    def target_per_s(self, model: str) -> float:
        return self.targets[model].served_per_s if model in self.targets else 0.0

    def copy_rates(self, template_copy: TemplateCopy) -> CopyRates:
        if template_copy.model in self._counted_models:
            return _by_roles(replica.role for replica in template_copy.views)
        return self._known[template_copy.template].rates

    def _template_rates(self, name: str) -> CopyRates:
        template, rates = self._known[name]
        return (
            _by_roles(r.role for r in template.replicas) if template.model in self._counted_models else rates
        )


def _by_roles(roles: Iterable[str]) -> CopyRates:
    role_set = set(roles)
    if role_set == {"prefill"}:
        return CopyRates(prefill_per_s=1.0)
    return CopyRates(decode_per_s=1.0) if role_set == {"decode"} else CopyRates(closed_per_s=1.0)


class NodeBudget:
    __slots__ = ("_free", "_known")

    def __init__(self, known: Mapping[str, TemplateCapacity], free: dict[Resource, int]) -> None:
        self._known, self._free = known, free

    def copy(self) -> NodeBudget:
        return NodeBudget(self._known, dict(self._free))

    def take_nodes(self, key: CopyKey) -> bool:
        needs = _node_needs(self._known[key[0]].template, key[1])
        if any(self._free.get(resource, count) < count for resource, count in needs.items()):
            return False
        self._add_nodes(needs, -1)
        return True

    def return_nodes(self, template_copy: TemplateCopy) -> None:
        if template_copy.template in self._known:
            self._add_nodes(
                _node_needs(self._known[template_copy.template].template, template_copy.region), 1
            )

    def would_help(self, key: CopyKey, template_copy: TemplateCopy) -> bool:
        if template_copy.template not in self._known:
            return False
        held_nodes = _node_needs(self._known[template_copy.template].template, template_copy.region)
        needs = _node_needs(self._known[key[0]].template, key[1])
        return any(
            self._free.get(resource, count) < count
            for resource, count in needs.items()
            if resource in held_nodes
        )

    def _add_nodes(self, needs: Mapping[Resource, int], sign: int) -> None:
        for item, count in needs.items():
            if item in self._free:
                self._free[item] += sign * count


def free_node_budget(
    fleet: FleetState,
    wanted: Counts,
    known: TemplateCapacities,
    available: Nodes | None,
    stopped: Collection[str],
) -> NodeBudget:
    """The nodes free beside all copies that are not stopped. A named machine's limit is what is held or wanted of
    it."""
    held_nodes: Counter[Resource] = Counter()
    for template_copy in fleet.units.values():
        if template_copy.template in known and not all(
            replica.member.id in stopped for replica in template_copy.views
        ):
            held_nodes.update(_node_needs(known[template_copy.template].template, template_copy.region))
    wanted_nodes: Counter[Resource] = Counter()
    for (name, region), copies in wanted.items():
        for resource, count in _node_needs(known[name].template, region).items() if name in known else ():
            wanted_nodes[resource] += count * copies
    free = {}
    for resource in {*held_nodes, *wanted_nodes}:
        if resource[1].startswith(MACHINE_PREFIX):
            free[resource] = max(held_nodes[resource], wanted_nodes[resource]) - held_nodes[resource]
        elif available is not None:
            free[resource] = available.get(resource, 0) - held_nodes[resource]
    return NodeBudget(known, free)


def _node_needs(template: Template, region: str) -> dict[Resource, int]:
    needs = {(region, node_count.node): node_count.count for node_count in template.nodes}
    needs.update({(region, MACHINE_PREFIX + name): gpus for name, gpus in template.machines.items()})
    return needs


class CopyRates(NamedTuple):
    """Requests/s served whole, prefilled for other replicas, and decoded for other replicas."""

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


ZERO_RATES = CopyRates()


def sum_rates(rates: Iterable[CopyRates]) -> CopyRates:
    return CopyRates(*(sum(column) for column in zip(ZERO_RATES, *rates, strict=True)))


def rates_of(template: Template, mix: Mapping[int, float]) -> CopyRates:
    """The rates of one copy for a mix (bucket -> weight); 0 when unknown. A copy that serves whole requests does
    nothing else."""
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
    """The bucket shares that the plan was made for; equal shares where it expects no traffic."""
    buckets = [bucket for bucket in plan.buckets if bucket.model == model]
    total_per_s = sum(bucket.rate_per_s for bucket in buckets)
    return {
        bucket.bucket: bucket.rate_per_s / total_per_s if total_per_s > 0 else 1.0 / len(buckets)
        for bucket in buckets
    }


def buckets_of(plan: Plan, model: str) -> list[LengthBucket]:
    return sorted((b for b in plan.buckets if b.model == model), key=lambda b: b.longest_tokens)


ROUNDING = 1e-9


def busy_copies_per_rate(plan: Plan, model: str, mix: Mapping[int, float]) -> dict[CopyKey, float] | None:
    """Copies kept busy per request/s, for every deployment of a model; None where all copies take all lengths alike
    and their rates add up."""
    planned = {b.bucket: b.rate_per_s for b in plan.buckets if b.model == model and b.rate_per_s > 0}
    capacities = {t.name: {c.bucket: c for c in t.capacity} for t in plan.templates if t.model == model}
    taken_buckets: dict[tuple[CopyKey, str], set[int]] = {}
    result: dict[CopyKey, float] = {}
    for share in plan.shares:
        bucket_capacity = capacities.get(share.template, {}).get(share.bucket)
        rate = 0.0 if bucket_capacity is None else getattr(bucket_capacity, f"{share.phase}_per_s")
        if share.bucket not in planned or rate <= 0 or share.rate_per_s <= 0:
            continue
        key = (share.template, share.region)
        taken_buckets.setdefault((key, share.phase), set()).add(share.bucket)
        bucket_share = share.rate_per_s / planned[share.bucket]
        result[key] = result.get(key, 0.0) + mix.get(share.bucket, 0.0) * bucket_share / rate
    takes_all_buckets = all(buckets == set(planned) for buckets in taken_buckets.values())
    takes_same_phase = len({phase == "closed" for _, phase in taken_buckets}) <= 1
    if not taken_buckets or (takes_all_buckets and takes_same_phase):
        return None
    return {key: used for key, used in result.items() if used > 0}


def rates_with_busy_copies(busy: Mapping[CopyKey, float], counts: Mapping[CopyKey, int]) -> CopyRates:
    least_rate = min((counts.get(key, 0) / busy_copies for key, busy_copies in busy.items()), default=inf)
    return CopyRates(closed_per_s=least_rate if least_rate < inf else 0.0)


def copies_to_add(
    busy: Mapping[CopyKey, float],
    counts: Counts,
    rate_per_s: float,
    needs: Mapping[CopyKey, Nodes],
    free: Nodes | None,
) -> tuple[dict[CopyKey, int], bool]:
    """(copies to add so that a rate is served, whether nodes suffice only in part); deployments furthest behind
    come first."""
    remaining_nodes = None if free is None else dict(free)
    added: dict[CopyKey, int] = {}
    is_partial = False
    for key in sorted(busy, key=lambda key: (counts.get(key, 0) / busy[key], key)):
        wanted = ceil(rate_per_s * busy[key] - ROUNDING) - counts.get(key, 0)
        if wanted <= 0:
            continue
        addable = wanted if key in needs else 0
        if remaining_nodes is not None and key in needs:
            addable = max(
                0,
                min(
                    [wanted, *(remaining_nodes.get(node, 0) // number for node, number in needs[key].items())]
                ),
            )
            for node, need in needs[key].items():
                remaining_nodes[node] = remaining_nodes.get(node, 0) - need * addable
        is_partial |= addable < wanted
        if addable:
            added[key] = addable
    return added, is_partial
