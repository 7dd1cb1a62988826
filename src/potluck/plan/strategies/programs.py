"""Strategies that are the allocation program over some kinds of columns.

- *homo* (CORAL's first baseline): each model on its most cost-efficient node types, alone or in two phases.
- *melange*: aggregated replicas of any node types, counts chosen by the integer program.
- *prfaas*: single nodes that do one phase; long prompts may be prefilled in another region over a link.
- *cronus*: pairs that share prefills, beside aggregated single nodes.
- *coral*: single nodes and pipelines of unlike nodes, each doing one phase.
- *thunderserve*: groups of named machines, found by search on the pool there is.
- *auto*: every kind of column in one program. It contains all the others' columns, so it can only be cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from potluck.core.values.plan import Template
from potluck.plan.even import evened
from potluck.plan.problem import Ask, Problem
from potluck.plan.strategies.base import Outcome, Settings, Workshop, allocated
from potluck.plan.strategies.cauchy import cauchy_ce, cauchy_mc
from potluck.plan.strategies.kinds import distinct, templates_of
from potluck.plan.strategies.pools import require_pool, worth_searching
from potluck.plan.terms import require_rows, unsupported


def auto(workshop: Workshop, settings: Settings) -> Outcome:
    """Everything at once.

    The single strategies are tried too, which costs little beside the whole: when time runs out before the
    program over all columns has found something better, the best of them stands, with the whole's proof.
    Groups of machines are columns where the pool is written down. A small fleet without one is searched as well,
    but what that finds stands apart: it is taken only when it is better than the plan without it.
    """
    problem, start_s = workshop.problem, settings.clock()
    pooled = worth_searching(problem)
    inside = pooled and problem.pool is not None
    templates = {
        ask.name: [*distinct(workshop, ask), *(workshop.groups(ask, settings) if inside else ())]
        for ask in problem.asks
    }
    left_s = settings.time_limit_s
    if inside:
        left_s = max(settings.time_limit_s - (settings.clock() - start_s), settings.time_limit_s / 4)
    whole = allocated(workshop, replace(settings, time_limit_s=left_s), "auto", templates)
    if settings.pins or settings.running:
        return whole  # pins and what runs bind only here
    if unsupported(problem):
        return whole  # the others pick their copies by rules that do not know of it
    rivals: list[Callable[[Workshop, Settings], Outcome]] = [thunderserve] if pooled and not inside else []
    if (
        whole.allocation.gap > settings.gap_target
    ):  # else a proof leaves nothing to gain from the same columns
        rivals += [
            homo,
            melange,
            cronus,
            prfaas,
            coral,
            cauchy_mc,
            cauchy_ce,
            *([thunderserve] if inside else []),
        ]
    short = replace(settings, time_limit_s=settings.time_limit_s / 8)
    tried = [strategy(workshop, short) for strategy in rivals]
    best = max([whole, *tried], key=lambda each: (round(each.plan.fraction, 9), -each.plan.total_usd_per_h))
    if best is whole or not _better(best, whole):
        return whole
    cost, bound = best.plan.total_usd_per_h, whole.allocation.lower_bound_usd_per_h
    gap = max(0.0, cost - bound) / cost if cost > 0 else 0.0
    return replace(best, plan=replace(best.plan, strategy="auto", gap=gap))


def _better(one: Outcome, other: Outcome) -> bool:
    """By more than rounding."""
    more = one.plan.fraction - other.plan.fraction
    return more > 1e-9 or one.plan.total_usd_per_h < other.plan.total_usd_per_h * (1 - 1e-9)


def thunderserve(workshop: Workshop, settings: Settings) -> Outcome:
    """Groups of the machines there are, by search; which of them are needed is the program's choice."""
    require_rows(workshop.problem, "thunderserve")
    ask, start_s = require_pool(workshop.problem), settings.clock()
    templates = {ask.name: workshop.groups(ask, settings)}
    left_s = max(settings.time_limit_s - (settings.clock() - start_s), settings.time_limit_s / 4)
    return allocated(workshop, replace(settings, time_limit_s=left_s), "thunderserve", templates)


def coral(workshop: Workshop, settings: Settings) -> Outcome:
    """Pipelines and single nodes, prefill and decode apart."""
    return _over_kinds(workshop, settings, "coral")


def prfaas(workshop: Workshop, settings: Settings) -> Outcome:
    """Prefill and decode on single nodes, in one region or over a link; from some length on prompts cross."""
    outcome = _over_kinds(workshop, settings, "prfaas")
    if all(flow.prefill_region == flow.decode_region for flow in outcome.plan.flows):
        return outcome
    plan = evened(workshop.problem, outcome.plan, settings.time_limit_s, settings.clock)
    return replace(outcome, plan=plan)


def cronus(workshop: Workshop, settings: Settings) -> Outcome:
    """A low-end and a high-end node that share each prompt's prefill, and aggregated replicas."""
    return _over_kinds(workshop, settings, "cronus")


def melange(workshop: Workshop, settings: Settings) -> Outcome:
    """Aggregated replicas on mixed GPUs."""
    return _over_kinds(workshop, settings, "melange")


def _over_kinds(workshop: Workshop, settings: Settings, strategy: str) -> Outcome:
    templates = {ask.name: templates_of(workshop, strategy, ask) for ask in workshop.problem.asks}
    return allocated(workshop, settings, strategy, templates)


def homo(workshop: Workshop, settings: Settings) -> Outcome:
    """Each replica on one node type: of each model the type that costs least for its demand, chosen in isolation.

    Replicas of one model may be on different types: where there are too few nodes of the best, the next is added.
    """
    templates = {ask.name: _cheapest_types(workshop, ask) for ask in workshop.problem.asks}
    return allocated(workshop, settings, "homo", templates)


def _cheapest_types(workshop: Workshop, ask: Ask) -> list[Template]:
    """The most cost-efficient ways to serve a model on one type, until there are nodes enough for its demand."""
    single, problem = workshop.homogeneous(ask), workshop.problem
    ways: list[tuple[float, str, float, list[Template]]] = []
    alike = _alike(problem, single)
    for kind, nodes in sorted(alike.items()):
        mine = [template for template in single if template.nodes[0].node in nodes]
        for group in ([t for t in mine if t.replicas[0].role == "mixed"], _phases(mine)):
            needed = _nodes_needed(ask, group) / problem.headroom
            if needed < float("inf"):
                price = min(workshop.prices[node] for node in nodes)
                ways.append((price * needed, kind, needed, group))
    chosen: list[Template] = []
    covered = 0.0
    types: set[str] = set()
    for _, kind, needed, group in sorted(ways, key=lambda way: way[:2]):
        if kind in types:
            continue  # another way to use nodes that are taken already
        types.add(kind)
        chosen += group
        offers = [region.offer(node) for region in problem.regions for node in alike[kind]]
        covered += sum(offer.available for offer in offers if offer is not None) / max(ceil(needed), 1)
        if covered >= 1:
            return chosen
    return chosen or list(single)


def _alike(problem: Problem, single: Sequence[Template]) -> dict[str, list[str]]:
    """Node types by what they are: spot and on-demand nodes, and those of several zones, are one type."""
    found: dict[str, list[str]] = {}
    for name in sorted({template.nodes[0].node for template in single}):
        node = problem.node(name)
        twin = next((other for other in found if replace(problem.node(other), name=name) == node), name)
        found.setdefault(twin, []).append(name)
    return found


def _phases(templates: Sequence[Template]) -> list[Template]:
    return [template for template in templates if template.replicas[0].role != "mixed"]


def _nodes_needed(ask: Ask, group: Sequence[Template]) -> float:
    """Nodes, not rounded, that the best of a group need for a model's demand; infinite if they cannot."""
    total = 0.0
    for demand in ask.demands:
        closed = max((t.capacity[demand.bucket].closed_per_s for t in group), default=0.0)
        prefill = max((t.capacity[demand.bucket].prefill_per_s for t in group), default=0.0)
        decode = max((t.capacity[demand.bucket].decode_per_s for t in group), default=0.0)
        if closed > 0:
            total += demand.rate_per_s / closed
        elif prefill > 0 and decode > 0:
            total += demand.rate_per_s / prefill + demand.rate_per_s / decode
        elif demand.rate_per_s > 0:
            return float("inf")
    return total
