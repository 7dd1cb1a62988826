"""What scaling may start beside what a plan deploys: a short list of its strategy's templates, carried with it.

A decision to scale out is made within a tick, so templates are made, timed and ranked with the plan. Of all that the
strategy chooses from, those stay whose nodes are on offer and beside which no other does as much on the same nodes or
fewer; of these, for every set of node types the best, then the others, in the order in which the strategy's program
weighs a request a second (`core.scale.repertoire`). MOST of a model are kept, so that a plan stays small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf

from potluck.core.scaling.cauchy_scaling import weight
from potluck.core.scaling.copy_capacity import rates_of
from potluck.core.values.plan import Plan, Template
from potluck.plan.assemble.term_rows import runs_in
from potluck.plan.problem import ModelDemand
from potluck.plan.strategies.column_kinds import templates_of
from potluck.plan.strategies.template_factory import TemplateFactory

MOST = 24
"""Templates of a model: all pairs of six node types, and some more."""


def with_candidates(factory: TemplateFactory, plan: Plan) -> Plan:
    """The plan with what scaling may start; of a strategy that is not known here it has none."""
    factory = factory.settled(plan)
    used = {template.name for template in plan.templates}
    found: list[Template] = []
    for ask in factory.problem.asks:
        made = [each for each in templates_of(factory, plan.strategy, ask) if each.name not in used]
        found += shortlist(factory, plan.strategy, ask, made)
    return replace(plan, candidates=tuple(found))


def shortlist(
    factory: TemplateFactory, strategy: str, ask: ModelDemand, made: Sequence[Template]
) -> list[Template]:
    """At most MOST of them, the best first, with each set of node types before a second of any."""
    prices = factory.prices
    able = [each for each in made if not each.machines and _on_offer(factory, ask, each)]
    ranked = sorted(
        _undominated(able), key=lambda each: (_per_request(strategy, ask, each, prices), each.name)
    )
    seen: dict[tuple[tuple[str, ...], str], int] = {}
    order = []
    for place, each in enumerate(ranked):
        kind = (tuple(sorted(each.node_counts)), _phase(each))
        seen[kind] = seen.get(kind, 0) + 1
        order.append((seen[kind] > 1, place, each))
    chosen = [each for *_, each in sorted(order, key=lambda item: item[:2])[:MOST]]
    return sorted(chosen, key=ranked.index)


def _on_offer(factory: TemplateFactory, ask: ModelDemand, template: Template) -> bool:
    """Whether some region has nodes enough for a copy, and none has where the model may not run."""
    there = [
        region.name
        for region in factory.problem.regions
        if all(
            (offer := region.offer(each.node)) is not None and offer.available >= each.count
            for each in template.nodes
        )
    ]
    return bool(there) and all(runs_in(factory.problem, ask, template, region) for region in there)


def _undominated(templates: Sequence[Template]) -> list[Template]:
    """Of those on the same node types; a pair of types that prefills the one way seldom does as well the other."""
    ordered = sorted(templates, key=lambda each: sorted(each.node_counts))
    kept: list[Template] = []
    for _, group in groupby(ordered, key=lambda each: sorted(each.node_counts)):
        mine = list(group)
        kept += [
            each for each in mine if not any(_dominates(other, each) for other in mine if other is not each)
        ]
    return kept


def _dominates(one: Template, other: Template) -> bool:
    """Whether it does at least as much of everything on no more nodes, and one of these is really better."""
    counts, others = one.node_counts, other.node_counts
    pairs = [
        (a, b)
        for mine, theirs in zip(one.capacity, other.capacity, strict=True)
        for a, b in (
            (mine.closed_per_s, theirs.closed_per_s),
            (mine.prefill_per_s, theirs.prefill_per_s),
            (mine.decode_per_s, theirs.decode_per_s),
        )
    ]
    fewer = all(counts[node] <= others[node] for node in counts)
    if not fewer or any(a < b for a, b in pairs):
        return False
    return counts != others or any(a > b for a, b in pairs) or one.name < other.name


def _phase(template: Template) -> str:
    roles = {replica.role for replica in template.replicas}
    return roles.pop() if len(roles) == 1 else "mixed"


def _per_request(strategy: str, ask: ModelDemand, template: Template, prices: Mapping[str, float]) -> float:
    """What the strategy has a request a second cost."""
    rates = rates_of(template, {demand.bucket: demand.rate_per_s or 1.0 for demand in ask.demands})
    serves = max(rates)
    if serves <= 0:
        return inf
    price = 0.0
    for each in template.nodes:
        price += each.count * prices.get(each.node, inf)
    return weight(strategy, template, price, serves) / serves
