"""Strategies that solve the integer program over some kinds of templates.

`auto` solves it over every kind, which includes the columns of all other strategies, so its plan is never dearer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError
from potluck.core.values.plan import Plan, Template
from potluck.core.values.types import Role
from potluck.plan.assemble.codecs import served_shares
from potluck.plan.assemble.even_shares import balance_load
from potluck.plan.assemble.term_rows import require_no_row_terms, row_term
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.cauchy_strategy import cauchy_ce, cauchy_co, cauchy_mc, cauchy_mce
from potluck.plan.strategies.pool_strategy import (
    ALL_PHASES,
    APART,
    MAX_GPUS,
    is_searchable,
    require_pool,
)
from potluck.plan.strategies.template_factory import (
    Planner,
    PlanOutcome,
    SolveSettings,
    TemplateFactory,
    TemplateMaker,
    grow,
    solve_over,
)
from potluck.plan.templates.group import GROUP_NAME
from potluck.plan.timing.named_machines import gpus_of


def auto(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """The cheapest plan over the templates of all kinds, never worse than the plan of any single strategy.

    The single strategies run first, each over its few columns. Their plans are warm starts for the program over all
    columns, and alternatives of the outcome, because the cheapest plan for mean traffic may miss its SLOs in
    simulation. The program is solved again when templates were skipped for lack of time. Groups of machines are
    columns where the spec writes a pool; a small fleet without one is searched too, and its plan is taken only when
    it is better.
    """
    problem = factory.problem
    searchable = is_searchable(problem)
    has_pool = searchable and problem.pool is not None
    make_templates_in_order(factory)
    groups = {
        demand.name: _searched_groups(factory, demand, settings, has_pool) for demand in problem.demands
    }
    _time_pinned(factory, settings)
    single_outcomes = _single_strategy_outcomes(factory, settings, searchable)
    start_plans = settings.start_plans + tuple(
        single.plan for single in single_outcomes if single.plan.deployments
    )
    for model, found_groups in groups.items():
        groups[model] = _with_groups_of(start_plans, model, found_groups)
    grow(factory, settings, _templates_without_pipelines(factory, groups))
    if single_outcomes and single_outcomes[0].allocation.found:
        # Time the pipelines that may undercut the single-node plan before solving over all columns.
        cost = single_outcomes[0].plan.total_usd_per_h
        grow(factory, settings, _templates_without_pipelines(factory, groups), cost, GAP_ROUNDS)
    templates = _with_pipelines(factory, _templates_without_pipelines(factory, groups))
    left_before_s = settings.left_s
    outcome = solve_over(
        factory,
        replace(settings.with_time_share(FIRST_SOLVE_SHARE), start_plans=start_plans),
        "auto",
        templates,
    )
    later_factory = factory.with_time_limit(
        settings, settings.left_s - RESOLVE_TIME_RATIO * (left_before_s - settings.left_s)
    )
    if factory.skipped_kinds and not later_factory.out_of_time():
        # The first solve left time for more templates.
        make_templates_in_order(later_factory)
        factory = later_factory
        templates = _with_pipelines(factory, _templates_without_pipelines(factory, groups))
        later_settings = replace(
            settings.with_time_share(FIRST_SOLVE_SHARE), start_plans=(*start_plans, outcome.plan)
        )
        outcome = solve_over(factory, later_settings, "auto", templates)
    cost = outcome.weighted_usd_per_h
    if (
        outcome.allocation.found
        and grow(factory, settings, _templates_without_pipelines(factory, groups), cost, GAP_ROUNDS).added
    ):
        templates = _with_pipelines(factory, _templates_without_pipelines(factory, groups))
        later_settings = replace(settings.with_time_share(FIRST_SOLVE_SHARE), start_plans=(outcome.plan,))
        outcome = solve_over(factory, later_settings, "auto", templates)
    is_unproven = not _is_optimal(outcome, settings.gap_target) or bool(factory.skipped_kinds)
    if is_unproven and not settings.what_if and not settings.is_late:
        known_plans = tuple(known.plan for known in (outcome, *single_outcomes) if known.plan.deployments)
        final_settings = replace(settings, start_plans=(*settings.start_plans, *known_plans))
        outcome = _with_best_bound(solve_over(factory, final_settings, "auto", templates), outcome)
    best_outcome = max([outcome, *single_outcomes], key=lambda candidate: plan_rank(problem, candidate))
    if best_outcome is not outcome and _is_better(problem, best_outcome, outcome):
        best_outcome = _with_best_bound(best_outcome, outcome)
    else:
        best_outcome = outcome
    return replace(
        best_outcome,
        alternatives=tuple(other.plan for other in (outcome, *single_outcomes) if other is not best_outcome),
    )


def _searched_groups(
    factory: TemplateFactory, demand: ModelDemand, settings: SolveSettings, has_pool: bool
) -> list[Template]:
    """The groups of a written pool, and those that the pins name."""
    groups = list(factory.groups(demand, settings)) if has_pool else []
    names = {template.name for template in groups}
    return groups + [t for t in _pinned_groups(factory, demand, settings) if t.name not in names]


def _with_groups_of(plans: Sequence[Plan], model: str, groups: Sequence[Template]) -> list[Template]:
    """A model's groups of these plans, and the given ones in place of those of the same name."""
    planned = {t.name: t for plan in plans for t in plan.templates if t.kind == "group" and t.model == model}
    return list((planned | {t.name: t for t in groups}).values())


def _time_pinned(factory: TemplateFactory, settings: SolveSettings) -> None:
    """Time the pipelines that the pins name, so that the program has their columns."""
    for deployment in settings.pins:
        factory.time_pipeline(deployment.template)


def _pinned_groups(factory: TemplateFactory, demand: ModelDemand, settings: SolveSettings) -> list[Template]:
    """The groups of machines that the pins name, found by the same searches as those that printed them."""
    missing = {
        deployment.template
        for deployment in settings.pins
        if deployment.template.startswith(f"{demand.name}: {GROUP_NAME}")
    }
    searchable = len(factory.problem.demands) == 1 and gpus_of(factory.problem) <= MAX_GPUS
    searches: tuple[tuple[Role, ...], ...] = (ALL_PHASES, APART, ("mixed",))
    pinned: list[Template] = []
    for may_do in searches if searchable else ():
        if missing:
            pinned += [t for t in factory.groups(demand, settings, may_do) if t.name in missing]
            missing -= {template.name for template in pinned}
    return pinned


def _single_strategy_outcomes(
    factory: TemplateFactory, settings: SolveSettings, searchable: bool
) -> list[PlanOutcome]:
    """Outcomes of the strategies over fewer columns, single nodes first: warm starts for `auto` to improve on.

    Skipped with pins, because no single strategy has all columns that a pin may name. The CAUCHY strategies ignore
    the running plan and the rows of terms, so they run only without either.
    """
    if settings.what_if or settings.pins:
        return []
    single_nodes = {demand.name: factory.homogeneous(demand) for demand in factory.problem.demands}
    outcomes = [solve_over(factory, settings.with_time_share(SINGLE_NODE_SHARE), "single", single_nodes)]
    if not outcomes[0].plan.deployments:  # Many models and little time: retry with a larger share.
        outcomes = [
            solve_over(factory, settings.with_time_share(SINGLE_NODE_RETRY_SHARE), "single", single_nodes)
        ]
    planners = dict(SINGLE_STRATEGIES)
    if not factory.problem.engine.hands_over:
        del planners["prfaas"], planners["coral"]
    if outcomes[0].plan.deployments and outcomes[0].plan.fraction <= 0:  # Some model fits on no single node.
        planners = {name: planner for name, planner in planners.items() if planner is coral}
    elif not (settings.running or row_term(factory.problem)):
        combos = sum(len(factory.combos(demand)) for demand in factory.problem.demands)
        if combos * len(factory.problem.regions) > MAX_COMBOS:
            factory.shortened_strategies |= dict.fromkeys(CAUCHY_STRATEGIES, NOT_TRIED)
        else:
            planners |= CAUCHY_STRATEGIES
        # With a written pool, groups of mixed replicas are columns of `auto` already.
        search_groups = partial(thunderserve, may_do=ALL_PHASES if factory.problem.pool is None else APART)
        planners |= {"thunderserve": search_groups, "hexgen": hexgen} if searchable else {}
        uses_distserve = searchable and factory.problem.pool is not None and factory.problem.engine.hands_over
        planners |= {"distserve": distserve} if uses_distserve else {}
    singles_settings = settings.with_time_share(SINGLE_STRATEGIES_SHARE)
    for index, (name, planner) in enumerate(planners.items()):
        if singles_settings.is_late:
            factory.shortened_strategies[name] = NOT_TRIED
            continue
        planner_settings = singles_settings.with_time_share(1 / (len(planners) - index))
        outcomes.append(planner(factory, planner_settings))
        if planner_settings.is_late and not _is_optimal(outcomes[-1], settings.gap_target):
            factory.shortened_strategies[name] = "stopped early"
    return outcomes


def every_kind(factory: TemplateFactory, demand: ModelDemand) -> list[Template]:
    """Templates of all kinds but groups."""
    return [*_whole_nodes(factory, demand), *factory.pipelines(demand)]


def _whole_nodes(factory: TemplateFactory, demand: ModelDemand) -> list[Template]:
    """Templates of all kinds but groups and pipelines, one per name: an aggregated combo is a mixed replica."""
    templates = [
        *factory.homogeneous(demand),
        *factory.combos(demand),
        *factory.gpu_combos(demand),
        *factory.pairs(demand),
        *factory.aggregated(demand),
    ]
    return list({template.name: template for template in templates}.values())


def _templates_without_pipelines(
    factory: TemplateFactory, groups: Mapping[str, list[Template]]
) -> dict[str, list[Template]]:
    return {
        demand.name: [*_whole_nodes(factory, demand), *factory.also_decoding(demand), *groups[demand.name]]
        for demand in factory.problem.demands
    }


def _with_pipelines(
    factory: TemplateFactory, others: Mapping[str, Sequence[Template]]
) -> dict[str, list[Template]]:
    return {
        demand.name: [*others[demand.name], *factory.pipelines(demand)] for demand in factory.problem.demands
    }


NOT_TRIED = "not tried beside auto"
MAX_COMBOS = 20_000
"""Combos over all regions above which the CAUCHY strategies are skipped: they would outlast `auto` itself."""
GAP_ROUNDS = 3  # Rounds of column generation within the gap between a plan and the relaxation.
RESOLVE_TIME_RATIO = 1.3
"""Time of the second solve, with the templates skipped at first, relative to the first solve."""
SINGLE_NODE_SHARE = 0.1
SINGLE_NODE_RETRY_SHARE = 0.6
FIRST_SOLVE_SHARE = 0.75
SINGLE_STRATEGIES_SHARE = 0.4
"""Shares of the time left: single nodes alone, their retry, each solve over all columns but the last, and all single
strategies together.
"""


def make_templates_in_order(factory: TemplateFactory) -> None:
    """Make the templates kind by kind for all models, the most useful kinds first, as time may not suffice for all.

    Pipelines come first for models that fit on no single node.
    """
    for demand in factory.problem.demands:
        if not factory.homogeneous(demand):
            factory.pipelines(demand)
    makers = (factory.homogeneous, factory.combos, factory.pipelines, factory.pairs, factory.gpu_combos)
    for make in makers:
        for demand in factory.problem.demands:
            make(demand)


def _is_optimal(outcome: PlanOutcome, gap_target: float) -> bool:
    """Whether the plan serves all demand and its gap is within the target."""
    allocation = outcome.allocation
    if allocation.shortfall is not None:
        return False  # The largest fraction may be proven, but not the least cost of serving it.
    return allocation.found and allocation.gap <= max(OPTIMAL_GAP, gap_target)


OPTIMAL_GAP = 1e-6


def plan_rank(problem: PlanningProblem, outcome: PlanOutcome) -> tuple[tuple[float, ...], float]:
    """Sort key of outcomes, best last: served shares by priority, then the least weighted cost."""
    return served_shares(problem, outcome.plan), -outcome.weighted_usd_per_h


def _is_better(problem: PlanningProblem, outcome: PlanOutcome, other_outcome: PlanOutcome) -> bool:
    """Whether `outcome` serves more than the other, or as much at a cost lower by more than rounding."""
    own, other = served_shares(problem, outcome.plan), served_shares(problem, other_outcome.plan)
    if own != other:
        return own > other
    return outcome.weighted_usd_per_h < other_outcome.weighted_usd_per_h * (1 - 1e-9)


def _with_best_bound(best_outcome: PlanOutcome, other_outcome: PlanOutcome) -> PlanOutcome:
    """The best outcome as an `auto` plan, with the gap against the higher lower bound of the two outcomes.

    The bound of `other_outcome` holds for both, as its columns include those of the best outcome.
    """
    cost = best_outcome.weighted_usd_per_h
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
    """The cheapest plan over the groups of machines that the tabu search finds.

    In the paper a group does one phase.
    """
    require_no_row_terms(factory.problem, strategy)
    demand = require_pool(factory.problem, strategy)
    return solve_over(factory, settings, strategy, {demand.name: factory.groups(demand, settings, may_do)})


hexgen = partial(thunderserve, may_do=("mixed",), strategy="hexgen")


def distserve(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """The best plan that prefills and decodes on separate replicas of one GPU type, over all GPU types.

    Its templates are single nodes for one phase, nodes divided between both phases, and groups of a written pool.
    """
    _require_kv_transfer(factory, "distserve")
    problem, outcomes = factory.problem, list[PlanOutcome]()
    gpus = sorted({node.gpu.name for node in problem.offered})
    for index, gpu in enumerate(gpus):
        node_names = {node.name for node in problem.nodes if node.gpu.name == gpu}
        regions = tuple(
            replace(r, offers=tuple(o for o in r.offers if o.node in node_names)) for r in problem.regions
        )
        factory_of_gpu = replace(factory, problem=replace(problem, regions=regions, links=()))
        gpu_settings = settings.with_time_share(1 / (len(gpus) - index))
        templates = {}
        for demand in problem.demands:
            candidates = [*factory.phased(demand), *factory.gpu_combos(demand)]
            if problem.pool is not None and is_searchable(problem):
                candidates += factory_of_gpu.groups(demand, gpu_settings, APART)
            templates[demand.name] = [
                t for t in candidates if node_names.issuperset(t.node_counts) and _has_no_mixed_replica(t)
            ]
        names = {template.name for group in templates.values() for template in group}
        if all(deployment.template in names for deployment in settings.pins):
            outcomes.append(solve_over(factory_of_gpu, gpu_settings, "distserve", templates))
    if not outcomes:
        pinned = ", ".join(deployment.template for deployment in settings.pins)
        raise InputError("pin", f"distserve has no GPU kind with {pinned}; use auto")
    return max(outcomes, key=lambda outcome: plan_rank(problem, outcome))


def _has_no_mixed_replica(template: Template) -> bool:
    return all(replica.role != "mixed" for replica in template.replicas)


def _require_kv_transfer(factory: TemplateFactory, strategy: str) -> None:
    engine = factory.problem.engine
    if not engine.hands_over:
        reason = f"{strategy} hands KV over between replicas, which {engine.title} does not do"
        raise InputError("strategy", f"{reason}; use auto, or `engine: vllm`")


def coral_templates(factory: TemplateFactory, demand: ModelDemand) -> list[Template]:
    return [*factory.phased(demand), *factory.pipelines(demand)]


def coral(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """The cheapest plan over pipelines and single nodes for one phase, with the one without pipelines beside it."""
    _require_kv_transfer(factory, "coral")
    for demand in factory.problem.demands:
        factory.pipelines(demand)
    _time_pinned(factory, settings)
    grow(factory, settings, {demand.name: factory.phased(demand) for demand in factory.problem.demands})
    outcome = _plan_templates(factory, settings, "coral", coral_templates)
    if settings.what_if or settings.is_late or settings.pins:  # pins may name pipelines
        return outcome
    single_outcome = _plan_templates(
        factory, settings.with_time_share(SINGLE_NODE_SHARE), "coral", TemplateFactory.phased
    )
    return replace(outcome, alternatives=(single_outcome.plan,) if single_outcome.plan.deployments else ())


def prfaas(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """Prefill and decode on single nodes; prompts above a length threshold may cross a link between regions."""
    _require_kv_transfer(factory, "prfaas")
    outcome = _plan_templates(factory, settings, "prfaas", TemplateFactory.phased)
    if all(flow.prefill_region == flow.decode_region for flow in outcome.plan.flows):
        return outcome
    plan = balance_load(factory.problem, outcome.plan, settings.time_limit_s, settings.clock)
    return replace(outcome, plan=plan)


def cronus_templates(factory: TemplateFactory, demand: ModelDemand) -> list[Template]:
    """Pairs of nodes, and mixed replicas on the node types without a pair in their region."""
    offered = [{o.node for o in region.offers if o.available} for region in factory.problem.regions]
    pairs = [t for t in factory.pairs(demand) if any(set(t.node_counts) <= nodes for nodes in offered)]
    paired = {node for template in pairs for node in template.node_counts}
    return [*pairs, *(t for t in factory.mixed(demand) if t.nodes[0].node not in paired)]


def _plan_templates(
    factory: TemplateFactory, settings: SolveSettings, strategy: str, make: TemplateMaker
) -> PlanOutcome:
    """The cheapest plan over the templates that `make` returns for each model."""
    templates = {demand.name: make(factory, demand) for demand in factory.problem.demands}
    return solve_over(factory, settings, strategy, templates)


def _cheapest_types(factory: TemplateFactory, demand: ModelDemand) -> list[Template]:
    """Single-node templates of the node types that serve the model most cheaply, until their nodes suffice."""
    single, problem = factory.homogeneous(demand), factory.problem
    options: list[tuple[float, str, float, list[Template]]] = []
    node_names = _equal_node_types(problem, single)
    for node_type, nodes in sorted(node_names.items()):
        templates_of_type = [template for template in single if template.nodes[0].node in nodes]
        mixed_templates = [t for t in templates_of_type if t.replicas[0].role == "mixed"]
        phases = _phase_templates(templates_of_type)
        for group, weight in ((mixed_templates, 1.0), (phases, 1.0 + problem.complexity_share)):
            needed = _nodes_needed(demand, group, problem.headroom)
            if needed < inf:
                price = min(factory.prices[node] for node in nodes)
                options.append((price * needed * weight, node_type, needed, templates_of_type))
    chosen: list[Template] = []
    covered, types = 0.0, set[str]()
    for _, node_type, needed, group in sorted(options, key=lambda option: option[:2]):
        if node_type in types:
            continue  # The nodes of this type are counted already.
        types.add(node_type)
        chosen += group
        offers = [region.offer(node) for region in problem.regions for node in node_names[node_type]]
        covered += sum(offer.available for offer in offers if offer is not None) / max(needed, 1.0)
        if covered >= 1:
            return chosen
    return chosen or list(single)


def _equal_node_types(problem: PlanningProblem, single: Sequence[Template]) -> dict[str, list[str]]:
    """Node names by hardware: spot and on-demand offers, and those of several zones, are one node type."""
    names_by_type: dict[str, list[str]] = {}
    for name in sorted({template.nodes[0].node for template in single}):
        node = problem.node(name)
        first_name = next(
            (other for other in names_by_type if replace(problem.node(other), name=name) == node), name
        )
        names_by_type.setdefault(first_name, []).append(name)
    return names_by_type


def _phase_templates(templates: Sequence[Template]) -> list[Template]:
    return [template for template in templates if template.replicas[0].role != "mixed"]


def _nodes_needed(demand: ModelDemand, group: Sequence[Template], headroom: float) -> float:
    """Nodes that a group of templates needs for a model's demand, with phases together or apart; inf if it cannot.

    The lesser of one template for all buckets and the best template for each bucket.
    """
    rates = np.array([bucket.rate_per_s for bucket in demand.buckets])
    tables = np.array(
        [[(c.closed_per_s, c.prefill_per_s, c.decode_per_s) for c in t.capacity] for t in group]
    )

    def fewest_nodes(per_s: NDArray[np.float64]) -> float:
        with np.errstate(divide="ignore", invalid="ignore"):
            nodes = np.where(rates > 0, rates / per_s, 0.0) / headroom - ROUNDING_TOLERANCE
            best_nodes = np.where(rates > 0, rates / per_s.max(axis=0), 0.0) / headroom - ROUNDING_TOLERANCE
        return float(min(np.ceil(nodes.sum(axis=1)).min(), np.ceil(best_nodes).sum()))

    if not len(group):
        return inf
    closed, prefill, decode = (fewest_nodes(tables[:, :, phase]) for phase in range(3))
    return min(closed, prefill + decode)


ROUNDING_TOLERANCE = 1e-9
homo = partial(_plan_templates, strategy="homo", make=_cheapest_types)
melange = partial(_plan_templates, strategy="melange", make=TemplateFactory.mixed)
cronus = partial(_plan_templates, strategy="cronus", make=cronus_templates)
vllm_dp = partial(_plan_templates, strategy="vllm-dp", make=TemplateFactory.data_parallel)
SINGLE_STRATEGIES: Mapping[str, Planner] = {
    "homo": homo,
    "melange": melange,
    "cronus": cronus,
    "prfaas": prfaas,
    "coral": coral,
}
CAUCHY_STRATEGIES: Mapping[str, Planner] = {
    "cauchy-mc": cauchy_mc,
    "cauchy-ce": cauchy_ce,
    "cauchy": cauchy_co,
    "cauchy-mce": cauchy_mce,
}
