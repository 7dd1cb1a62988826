"""Strategies that are the allocation program over some kinds of columns.

`auto` has every kind in one program, all the others' columns among them, so it can only be cheaper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError
from potluck.core.values.plan import Template
from potluck.core.values.types import Role
from potluck.plan.assemble.codecs import served
from potluck.plan.assemble.even_shares import evened
from potluck.plan.assemble.term_rows import require_rows, unsupported
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.cauchy_strategy import cauchy_ce, cauchy_co, cauchy_mc, cauchy_mce
from potluck.plan.strategies.pool_strategy import (
    ALL_PHASES,
    APART,
    MAX_GPUS,
    require_pool,
    worth_searching,
)
from potluck.plan.strategies.template_factory import (
    Kind,
    Planner,
    PlanOutcome,
    SolveSettings,
    TemplateFactory,
    allocated,
    grow,
)
from potluck.plan.templates.group import GROUP_NAME
from potluck.plan.timing.named_machines import gpus_of


def auto(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """Everything at once, and never worse than any one strategy.

    Every other strategy is tried first, each over its few columns: their plans are where the program over all columns
    begins, and they are handed on, for what is cheapest on averages may miss in simulation. The program is solved
    again with columns for which there was no time. Groups of machines are columns where the pool is written down; a
    small fleet without one is searched as well, and what that finds is taken only when it is better.
    """
    problem = factory.problem
    pooled = worth_searching(problem)
    inside = pooled and problem.pool is not None
    made_in_turn(factory)
    groups = {demand.name: factory.groups(demand, settings) if inside else [] for demand in problem.asks}
    for demand in problem.asks:
        names = {template.name for template in groups[demand.name]}
        groups[demand.name] += [t for t in _pinned_groups(factory, demand, settings) if t.name not in names]
    _time_pinned(factory, settings)
    tried = _rivals(factory, settings, pooled)
    first = settings.starts + tuple(each.plan for each in tried if each.plan.deployments)
    for demand in problem.asks:
        found = {
            t.name: t
            for plan in first
            for t in plan.templates
            if t.kind == "group" and t.model == demand.name
        }
        groups[demand.name] = list((found | {t.name: t for t in groups[demand.name]}).values())
    grow(factory, settings, _others(factory, groups))
    if tried and tried[0].allocation.found:
        # Pipelines that might undercut single nodes are timed before all are weighed, rather than after.
        cost = tried[0].plan.total_usd_per_h
        grow(factory, settings, _others(factory, groups), cost, LATER_ROUNDS)
    templates = _with_pipelines(factory, _others(factory, groups))
    before_s = settings.left_s
    whole = allocated(factory, replace(settings.within(FIRST_SHARE), starts=first), "auto", templates)
    longer = factory.within(settings, settings.left_s - SOLVES_AGAIN * (before_s - settings.left_s))
    if factory.left_out and not longer.enough():  # it was solved sooner than it might have been
        made_in_turn(longer)
        factory = longer
        templates = _with_pipelines(factory, _others(factory, groups))
        begun = replace(settings.within(FIRST_SHARE), starts=(*first, whole.plan))
        whole = allocated(factory, begun, "auto", templates)
    cost = whole.weighed_usd_per_h
    if whole.allocation.found and grow(factory, settings, _others(factory, groups), cost, LATER_ROUNDS).added:
        templates = _with_pipelines(factory, _others(factory, groups))
        begun = replace(settings.within(FIRST_SHARE), starts=(whole.plan,))
        whole = allocated(factory, begun, "auto", templates)
    unsure = not _settled(whole, settings.gap_target) or bool(factory.left_out)
    if unsure and not settings.asking and not settings.late:
        known = tuple(each.plan for each in (whole, *tried) if each.plan.deployments)
        more = replace(settings, starts=(*settings.starts, *known))
        whole = _proven(allocated(factory, more, "auto", templates), whole)
    best_outcome = max([whole, *tried], key=lambda each: rank_of(problem, each))
    best_outcome = (
        whole
        if best_outcome is whole or not _better(problem, best_outcome, whole)
        else _proven(best_outcome, whole)
    )
    return replace(
        best_outcome, alternatives=tuple(each.plan for each in (whole, *tried) if each is not best_outcome)
    )


def _time_pinned(factory: TemplateFactory, settings: SolveSettings) -> None:
    """Time the pipelines that pins name, so that they are columns."""
    for deployment in settings.pins:
        factory.time_pipeline(deployment.template)


def _pinned_groups(factory: TemplateFactory, demand: ModelDemand, settings: SolveSettings) -> list[Template]:
    """The groups of machines that pins name, searched for as the strategies do that may have printed them."""
    missing = {
        deployment.template
        for deployment in settings.pins
        if deployment.template.startswith(f"{demand.name}: {GROUP_NAME}")
    }
    searchable = len(factory.problem.asks) == 1 and gpus_of(factory.problem) <= MAX_GPUS
    searches: tuple[tuple[Role, ...], ...] = (ALL_PHASES, APART, ("mixed",))
    pinned: list[Template] = []
    for may_do in searches if searchable else ():
        if missing:
            pinned += [t for t in factory.groups(demand, settings, may_do) if t.name in missing]
            missing -= {template.name for template in pinned}
    return pinned


def _rivals(factory: TemplateFactory, settings: SolveSettings, pooled: bool) -> list[PlanOutcome]:
    """Plans over fewer columns, soon solved: where the program over all of them begins, and what it must not be worse
    than. None has all columns that may be pinned, and those that pick copies by rules of their own know neither what
    runs nor rows for terms.
    """
    if settings.asking or settings.pins:
        return []
    single = {demand.name: factory.homogeneous(demand) for demand in factory.problem.asks}
    tried = [allocated(factory, settings.within(SINGLE_SHARE), "single", single)]
    if not tried[0].plan.deployments:  # many models and little time: a plan comes before a better one
        tried = [allocated(factory, settings.within(FALLBACK_SHARE), "single", single)]
    rivals = dict(RIVALS)
    if not factory.problem.engine.hands_over:
        del rivals["prfaas"], rivals["coral"]
    if tried[0].plan.deployments and tried[0].plan.fraction <= 0:  # some model needs several nodes
        rivals = {name: rival for name, rival in rivals.items() if rival is coral}
    elif not (settings.running or unsupported(factory.problem)):
        combos = sum(len(factory.combos(demand)) for demand in factory.problem.asks)
        if combos * len(factory.problem.regions) > MOST_COMBOS:
            factory.cut_short |= dict.fromkeys(BY_RULES, NOT_TRIED)
        else:
            rivals |= BY_RULES
        # Where groups are columns, those that do both phases are searched for already.
        apart = partial(thunderserve, may_do=ALL_PHASES if factory.problem.pool is None else APART)
        rivals |= {"thunderserve": apart, "hexgen": hexgen} if pooled else {}
        alike = pooled and factory.problem.pool is not None and factory.problem.engine.hands_over
        rivals |= {"distserve": distserve} if alike else {}
    each = settings.within(RIVALS_SHARE)
    for place, (name, rival) in enumerate(rivals.items()):
        if each.late:
            factory.cut_short[name] = NOT_TRIED
            continue
        share = each.within(1 / (len(rivals) - place))
        tried.append(rival(factory, share))
        if share.late and not _settled(tried[-1], settings.gap_target):
            factory.cut_short[name] = "stopped early"
    return tried


def every_kind(factory: TemplateFactory, demand: ModelDemand) -> list[Template]:
    """All kinds but groups."""
    return [*_whole_nodes(factory, demand), *factory.pipelines(demand)]


def _whole_nodes(factory: TemplateFactory, demand: ModelDemand) -> list[Template]:
    """The same without pipelines, one template per name: an aggregated combo is a mixed replica."""
    made = [
        *factory.homogeneous(demand),
        *factory.combos(demand),
        *factory.gpu_combos(demand),
        *factory.pairs(demand),
        *factory.aggregated(demand),
    ]
    return list({template.name: template for template in made}.values())


def _others(factory: TemplateFactory, groups: Mapping[str, list[Template]]) -> dict[str, list[Template]]:
    return {
        demand.name: [*_whole_nodes(factory, demand), *factory.also_decoding(demand), *groups[demand.name]]
        for demand in factory.problem.asks
    }


def _with_pipelines(
    factory: TemplateFactory, others: Mapping[str, Sequence[Template]]
) -> dict[str, list[Template]]:
    return {
        demand.name: [*others[demand.name], *factory.pipelines(demand)] for demand in factory.problem.asks
    }


NOT_TRIED = "not tried beside auto"
MOST_COMBOS = 20_000
"""Combos in all regions: with more, what CAUCHY would choose takes longer to write down than all columns to weigh."""
LATER_ROUNDS = 3  # Of pipelines that might undercut the first plan, for copies are whole.
SOLVES_AGAIN = 1.3
"""How much longer the program takes with the templates for which there was no time at first."""
SINGLE_SHARE = 0.1
FALLBACK_SHARE = 0.6
FIRST_SHARE = 0.75
RIVALS_SHARE = 0.4
"""Of the time that is left: for single nodes alone, again where that was too little, for the first try, and for all
single strategies together.
"""


def made_in_turn(factory: TemplateFactory) -> None:
    """Make every kind for all models before the next, the most useful first: time may not suffice for all. Models
    that fit on no single node have their pipelines before that.
    """
    for demand in factory.problem.asks:
        if not factory.homogeneous(demand):
            factory.pipelines(demand)
    makers = (factory.homogeneous, factory.combos, factory.pipelines, factory.pairs, factory.gpu_combos)
    for make in makers:
        for demand in factory.problem.asks:
            make(demand)


def _settled(outcome: PlanOutcome, gap_target: float) -> bool:
    """Whether no plan of the same columns can be better by more than is asked for."""
    result, short = outcome.allocation, outcome.allocation.shortfall
    if short is not None:
        return False  # the most may be proven, but not that it costs the least
    return result.found and result.gap <= max(PROVEN, gap_target)


PROVEN = 1e-6


def rank_of(problem: PlanningProblem, outcome: PlanOutcome) -> tuple[tuple[float, ...], float]:
    return served(problem, outcome.plan), -outcome.weighed_usd_per_h


def _better(problem: PlanningProblem, outcome: PlanOutcome, other_outcome: PlanOutcome) -> bool:
    """By more than rounding."""
    more, less = served(problem, outcome.plan), served(problem, other_outcome.plan)
    if more != less:
        return more > less
    return outcome.weighed_usd_per_h < other_outcome.weighed_usd_per_h * (1 - 1e-9)


def _proven(best_outcome: PlanOutcome, other_outcome: PlanOutcome) -> PlanOutcome:
    """A plan with the better of two proofs over the same columns, or of its own and one over more columns."""
    cost = best_outcome.weighed_usd_per_h
    bound = other_outcome.allocation.lower_bound_usd_per_h
    if best_outcome.plan.strategy == "auto":
        bound = max(bound, best_outcome.allocation.lower_bound_usd_per_h)
    gap = max(0.0, cost - bound) / cost if cost > 0 else 0.0
    allocation = best_outcome.allocation
    if allocation.found:
        allocation = replace(allocation, gap=gap, lower_bound_usd_per_h=min(bound, cost))
    return replace(
        best_outcome, plan=replace(best_outcome.plan, strategy="auto", gap=gap), allocation=allocation
    )


def thunderserve(
    factory: TemplateFactory,
    settings: SolveSettings,
    may_do: tuple[Role, ...] = APART,
    strategy: str = "thunderserve",
) -> PlanOutcome:
    """Groups of the machines there are, by search; which of them are needed is the program's choice.

    In the paper a group does one phase.
    """
    require_rows(factory.problem, strategy)
    demand = require_pool(factory.problem, strategy)
    return allocated(factory, settings, strategy, {demand.name: factory.groups(demand, settings, may_do)})


hexgen = partial(thunderserve, may_do=("mixed",), strategy="hexgen")


def distserve(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """Prefill and decode apart on GPUs of one kind in one region, each with its own degrees: the best of all kinds.

    Single nodes that do one phase, nodes divided between both, and in a written pool groups of its machines.
    """
    _require_hand_overs(factory, "distserve")
    problem, outcomes = factory.problem, list[PlanOutcome]()
    kinds = sorted({node.gpu.name for node in problem.offered})
    for place, kind in enumerate(kinds):
        mine = {node.name for node in problem.nodes if node.gpu.name == kind}
        regions = tuple(
            replace(r, offers=tuple(o for o in r.offers if o.node in mine)) for r in problem.regions
        )
        there = replace(factory, problem=replace(problem, regions=regions, links=()))
        share = settings.within(1 / (len(kinds) - place))
        templates = {}
        for demand in problem.asks:
            made = [*factory.phased(demand), *factory.gpu_combos(demand)]
            if problem.pool is not None and worth_searching(problem):
                made += there.groups(demand, share, APART)
            templates[demand.name] = [t for t in made if mine.issuperset(t.node_counts) and _apart(t)]
        names = {template.name for group in templates.values() for template in group}
        if all(deployment.template in names for deployment in settings.pins):
            outcomes.append(allocated(there, share, "distserve", templates))
    if not outcomes:
        pinned = ", ".join(deployment.template for deployment in settings.pins)
        raise InputError("pin", f"distserve has no GPU kind with {pinned}; use auto")
    return max(outcomes, key=lambda each: rank_of(problem, each))


def _apart(template: Template) -> bool:
    return all(replica.role != "mixed" for replica in template.replicas)


def _require_hand_overs(factory: TemplateFactory, strategy: str) -> None:
    engine = factory.problem.engine
    if not engine.hands_over:
        what = f"{strategy} hands KV over between replicas, which {engine.title} does not do"
        raise InputError("strategy", f"{what}; use auto, or `engine: vllm`")


def coral_templates(factory: TemplateFactory, demand: ModelDemand) -> list[Template]:
    return [*factory.phased(demand), *factory.pipelines(demand)]


def coral(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """Pipelines and single nodes, prefill and decode apart; those without pipelines beside it, should it not hold."""
    _require_hand_overs(factory, "coral")
    for demand in factory.problem.asks:
        factory.pipelines(demand)
    _time_pinned(factory, settings)
    grow(factory, settings, {demand.name: factory.phased(demand) for demand in factory.problem.asks})
    whole = _over(factory, settings, "coral", coral_templates)
    if settings.asking or settings.late or settings.pins:  # pins may name pipelines
        return whole
    single = _over(factory, settings.within(SINGLE_SHARE), "coral", TemplateFactory.phased)
    return replace(whole, alternatives=(single.plan,) if single.plan.deployments else ())


def prfaas(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """Prefill and decode on single nodes, in one region or over a link; from some length on prompts cross."""
    _require_hand_overs(factory, "prfaas")
    outcome = _over(factory, settings, "prfaas", TemplateFactory.phased)
    if all(flow.prefill_region == flow.decode_region for flow in outcome.plan.flows):
        return outcome
    plan = evened(factory.problem, outcome.plan, settings.time_limit_s, settings.clock)
    return replace(outcome, plan=plan)


def cronus_templates(factory: TemplateFactory, demand: ModelDemand) -> list[Template]:
    """Pairs; nodes that no other in their region pairs with serve requests whole."""
    offered = [{o.node for o in region.offers if o.available} for region in factory.problem.regions]
    pairs = [t for t in factory.pairs(demand) if any(set(t.node_counts) <= there for there in offered)]
    paired = {node for template in pairs for node in template.node_counts}
    return [*pairs, *(t for t in factory.mixed(demand) if t.nodes[0].node not in paired)]


def _over(factory: TemplateFactory, settings: SolveSettings, strategy: str, make: Kind) -> PlanOutcome:
    templates = {demand.name: make(factory, demand) for demand in factory.problem.asks}
    return allocated(factory, settings, strategy, templates)


def _cheapest_types(factory: TemplateFactory, demand: ModelDemand) -> list[Template]:
    """The cheapest ways to serve a model on whole nodes of one type, each model by itself, until there are enough."""
    single, problem = factory.homogeneous(demand), factory.problem
    ways: list[tuple[float, str, float, list[Template]]] = []
    alike = _alike(problem, single)
    for kind, nodes in sorted(alike.items()):
        mine = [template for template in single if template.nodes[0].node in nodes]
        mixed, phases = [t for t in mine if t.replicas[0].role == "mixed"], _phases(mine)
        for group, weight in ((mixed, 1.0), (phases, 1.0 + problem.complexity_share)):
            needed = _nodes_needed(demand, group, problem.headroom)
            if needed < inf:
                price = min(factory.prices[node] for node in nodes)
                ways.append((price * needed * weight, kind, needed, mine))
    chosen: list[Template] = []
    covered, types = 0.0, set[str]()
    for _, kind, needed, group in sorted(ways, key=lambda way: way[:2]):
        if kind in types:
            continue  # another way to use nodes that are taken already
        types.add(kind)
        chosen += group
        offers = [region.offer(node) for region in problem.regions for node in alike[kind]]
        covered += sum(offer.available for offer in offers if offer is not None) / max(needed, 1.0)
        if covered >= 1:
            return chosen
    return chosen or list(single)


def _alike(problem: PlanningProblem, single: Sequence[Template]) -> dict[str, list[str]]:
    """Node types by what they are: spot and on-demand nodes, and those of several zones, are one type."""
    alike: dict[str, list[str]] = {}
    for name in sorted({template.nodes[0].node for template in single}):
        node = problem.node(name)
        twin = next((other for other in alike if replace(problem.node(other), name=name) == node), name)
        alike.setdefault(twin, []).append(name)
    return alike


def _phases(templates: Sequence[Template]) -> list[Template]:
    return [template for template in templates if template.replicas[0].role != "mixed"]


def _nodes_needed(model_demand: ModelDemand, group: Sequence[Template], headroom: float) -> float:
    """Whole nodes that a group needs for a model's demand, each phase apart or both together; infinite if it cannot.

    One template for all buckets, or the best one for each.
    """
    rates = np.array([demand.rate_per_s for demand in model_demand.demands])
    tables = np.array(
        [[(c.closed_per_s, c.prefill_per_s, c.decode_per_s) for c in t.capacity] for t in group]
    )

    def least(per_s: NDArray[np.float64]) -> float:
        with np.errstate(divide="ignore", invalid="ignore"):
            nodes = np.where(rates > 0, rates / per_s, 0.0) / headroom - NOUGHT
            best = np.where(rates > 0, rates / per_s.max(axis=0), 0.0) / headroom - NOUGHT
        return float(min(np.ceil(nodes.sum(axis=1)).min(), np.ceil(best).sum()))

    if not len(group):
        return inf
    closed, prefill, decode = (least(tables[:, :, place]) for place in range(3))
    return min(closed, prefill + decode)


NOUGHT = 1e-9
homo = partial(_over, strategy="homo", make=_cheapest_types)
melange = partial(_over, strategy="melange", make=TemplateFactory.mixed)
cronus = partial(_over, strategy="cronus", make=cronus_templates)
vllm_dp = partial(_over, strategy="vllm-dp", make=TemplateFactory.data_parallel)
RIVALS: Mapping[str, Planner] = {
    "homo": homo,
    "melange": melange,
    "cronus": cronus,
    "prfaas": prfaas,
    "coral": coral,
}
BY_RULES: Mapping[str, Planner] = {
    "cauchy-mc": cauchy_mc,
    "cauchy-ce": cauchy_ce,
    "cauchy": cauchy_co,
    "cauchy-mce": cauchy_mce,
}
