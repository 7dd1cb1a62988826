"""Options for replanning a running fleet, cheapest first, each with its served fraction, cost and duration.

    reroute      the same copies with new routing                        immediate
    flip         copies may also change their role on the same nodes     immediate, no weights are loaded
    reallocate   a new plan, with a penalty on starts (CORAL's K)        takes as long as the slowest start

Lost nodes remove copies: the deployment with the most copies on the node type loses one at a time; a group of named
machines loses the replicas on the lost ones. The controller chooses an option; `best_answer` is the default rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from potluck.core.errors import CapacityError
from potluck.core.values.plan import BucketCapacity, Deployment, NodeCount, Plan, PlannedReplica, Template
from potluck.core.values.service import NO_TERMS
from potluck.core.values.types import NodeOffer, Region, Role
from potluck.perf.memory import weight_bytes
from potluck.perf.startup import DEFAULT_COSTS, StartupCosts, startup_s
from potluck.plan.assemble.codecs import solve_with_codecs
from potluck.plan.assemble.columns import egress_usd_per_h, plan_of
from potluck.plan.assemble.term_rows import charges_of, rent_usd_per_h
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.search.search_templates import replicas_of, result_of_replicas, templates_of
from potluck.plan.search.tabu import SearchLimits, SearchSettings, groups_left, reschedule
from potluck.plan.search.workload import workload_of
from potluck.plan.strategies.pool_strategy import MAX_HEADROOM, phases_of
from potluck.plan.strategies.template_factory import Planner, SolveSettings, TemplateFactory
from potluck.plan.templates.group import group_template, machine_counts
from potluck.plan.templates.runnable import of_one_degree, runnable
from potluck.plan.timing.named_machines import named, region_pool
from potluck.plan.timing.replica_rates import layout_timer, replica_capacity
from potluck.plan.verify import retimed

SurvivingReplicas = dict[tuple[str, str], list[PlannedReplica]]
"""(region, model) to the replicas of its groups whose machines are all available."""


def with_running_formats(problem: PlanningProblem, running_plan: Plan) -> PlanningProblem:
    """The problem in the running weight formats; if the plan names machines, its pool has the available ones.

    Where only a node count has dropped, machines that the plan does not use are assumed lost first.
    """
    problem = problem.in_formats(running_plan.formats)
    used = {machine for template in running_plan.templates for machine in template.machines}
    if not used:
        return problem
    problem_with_pool = named(problem)
    pool = problem_with_pool.pool
    assert pool is not None
    kept_counts: Counter[tuple[str, str]] = Counter()
    available = {(r.name, o.node): o.available for r in problem.regions for o in r.offers}
    kept_indices = []
    for index in sorted(range(len(pool.nodes)), key=lambda i: (pool.nodes[i].name not in used, i)):
        node = pool.nodes[index]
        key = (node.region, node.type.name)
        if node.gpus and kept_counts[key] < available.get(key, 0):
            kept_counts[key] += 1
            kept_indices.append(index)
    return replace(problem_with_pool, pool=pool.only(sorted(kept_indices)) if kept_indices else None)


def surviving_replicas(problem: PlanningProblem, running_plan: Plan) -> SurvivingReplicas:
    """The replicas of groups whose machines are all available."""
    surviving: SurvivingReplicas = {}
    for deployment in running_plan.deployments:
        template = running_plan.template(deployment.template)
        if template.kind == "group":
            machines = _machines(problem, deployment.region)
            alive = [replica for replica in template.replicas if set(replica.layout.machines) <= machines]
            surviving.setdefault((deployment.region, template.model), []).extend(alive)
    return surviving


def with_surviving_groups(problem: PlanningProblem, running_plan: Plan) -> Plan:
    """The running plan with every group reduced to its surviving replicas, in their present roles."""
    templates: dict[str, Template] = {t.name: t for t in running_plan.templates if t.kind != "group"}
    deployments = []
    for deployment in running_plan.deployments:
        template = running_plan.template(deployment.template)
        if template.kind != "group":
            deployments.append(deployment)
            continue
        demand = problem.demand_of(template.model)
        machines = _machines(problem, deployment.region)
        alive = [replica for replica in template.replicas if set(replica.layout.machines) <= machines]
        reduced_group = (
            None
            if demand is None or not alive
            else group_template(problem, demand, alive, problem.codecs[-1])
        )
        if reduced_group is not None:
            templates[reduced_group.name] = reduced_group
            deployments.append(replace(deployment, template=reduced_group.name))
    return replace(
        running_plan, templates=tuple(templates.values()), deployments=tuple(deployments), shares=()
    )


def groups_with_new_roles(
    problem: PlanningProblem, surviving: SurvivingReplicas, seed: int, time_limit_s: float
) -> list[tuple[str, Template]]:
    """(region, template) of groups of the surviving replicas, in the roles that serve the demand best."""
    groups: list[tuple[str, Template]] = []
    for (region, model), replicas in surviving.items():
        demand, pool = problem.demand_of(model), region_pool(problem, region)
        if demand is None or pool is None or not replicas or not demand.rate_per_s > 0:
            continue
        previous_result = result_of_replicas(pool, replicas)
        pool_workload = workload_of(
            demand, problem.codecs[-1], min(problem.headroom, MAX_HEADROOM), problem.engine
        )
        limits = SearchLimits(time_limit_s=time_limit_s)
        settings = SearchSettings(phases_of(problem.engine), seed=seed, limits=limits)
        try:
            next_result = reschedule(
                groups_left(pool, previous_result, {}), previous_result, pool_workload, settings
            )
        except CapacityError:
            continue
        groups += [
            (region, template) for template in templates_of(problem, demand, replicas_of(pool, next_result))
        ]
    return groups


def changed_roles(surviving: SurvivingReplicas, templates: Iterable[Template]) -> int:
    """Number of replicas in these groups whose role differs from that of the surviving ones."""
    before = Counter(replica for replicas in surviving.values() for replica in replicas)
    after = Counter(replica for template in templates for replica in template.replicas)
    return sum((after - before).values())


def new_replicas(surviving: SurvivingReplicas, template: Template) -> list[PlannedReplica]:
    """The replicas of a group whose layout no surviving replica has."""
    loaded = Counter(replica.layout for replicas in surviving.values() for replica in replicas)
    planned_replicas = []
    for replica in template.replicas:
        if loaded[replica.layout] > 0:
            loaded[replica.layout] -= 1
        else:
            planned_replicas.append(replica)
    return planned_replicas


def replica_changes(surviving: SurvivingReplicas, templates: Iterable[Template]) -> tuple[int, int]:
    """(started, stopped) replicas between the surviving ones and these groups."""
    before = Counter(replica.layout for replicas in surviving.values() for replica in replicas)
    after = Counter(replica.layout for template in templates for replica in template.replicas)
    return sum((after - before).values()), sum((before - after).values())


def _machines(problem: PlanningProblem, region: str) -> set[str]:
    """Names of the available machines of a region."""
    if region not in {item.name for item in problem.regions}:
        return set()
    pool = region_pool(problem, region)
    return set() if pool is None else {node.name for node in pool.nodes}


Step = Literal["reroute", "flip", "reallocate"]
RELATIVE_TOLERANCE = 1e-9
ROLES: tuple[Role, ...] = ("mixed", "prefill", "decode")
ALIAS_SEPARATOR = "#"


@dataclass(frozen=True, slots=True)
class ReplanOption:
    """One way to change the running plan, with its gains and costs."""

    step: Step
    plan: Plan
    served_fraction: float
    cost_usd_per_h: float
    start_cost_usd: float  # Rent of starting copies until they serve.
    time_s: float
    starts: int
    stops: int
    flips: int


def ladder(
    problem: PlanningProblem,
    running_plan: Plan,
    planner: Planner,
    settings: SolveSettings,
    costs: StartupCosts = DEFAULT_COSTS,
) -> tuple[ReplanOption, ...]:
    """All three options for the current problem."""
    problem = with_running_formats(problem, running_plan)
    surviving = surviving_replicas(problem, running_plan)
    running_plan = with_surviving_groups(problem, running_plan)
    deployments = surviving_deployments(problem, running_plan)
    return (
        *_immediate_options(problem, running_plan, deployments, surviving, settings, costs),
        _reallocate(problem, running_plan, deployments, surviving, planner, settings, costs),
    )


def at_once(
    problem: PlanningProblem, running_plan: Plan, settings: SolveSettings, costs: StartupCosts = DEFAULT_COSTS
) -> tuple[ReplanOption, ReplanOption]:
    """The options that load no weights: new routing, and new roles, of the surviving copies."""
    problem = with_running_formats(problem, running_plan)
    surviving = surviving_replicas(problem, running_plan)
    running_plan = with_surviving_groups(problem, running_plan)
    return _immediate_options(
        problem, running_plan, surviving_deployments(problem, running_plan), surviving, settings, costs
    )


def _immediate_options(
    problem: PlanningProblem,
    running_plan: Plan,
    deployments: tuple[Deployment, ...],
    surviving: SurvivingReplicas,
    settings: SolveSettings,
    costs: StartupCosts,
) -> tuple[ReplanOption, ReplanOption]:
    rerouted = _reroute(problem, running_plan, deployments, settings)
    flip_option = _flip(problem, running_plan, deployments, surviving, settings, costs)
    if flip_option.flips and not _is_better(
        flip_option, rerouted
    ):  # An interrupted search may change roles without a gain.
        flip_option = replace(rerouted, step="flip")
    return rerouted, flip_option


def _is_better(replan_option: ReplanOption, previous_option: ReplanOption) -> bool:
    """Whether the option serves more than the other, or as much at less cost."""
    extra_fraction = replan_option.served_fraction - previous_option.served_fraction
    is_cheaper = replan_option.cost_usd_per_h < previous_option.cost_usd_per_h * (1.0 - RELATIVE_TOLERANCE)
    return extra_fraction > RELATIVE_TOLERANCE or (extra_fraction >= -RELATIVE_TOLERANCE and is_cheaper)


def best_answer(answers: Sequence[ReplanOption]) -> ReplanOption:
    """The first option that serves as much as any; options are in order of their disruption."""
    best_fraction = max(replan_option.served_fraction for replan_option in answers)
    return next(
        replan_option for replan_option in answers if replan_option.served_fraction >= best_fraction - 1e-6
    )


def surviving_deployments(problem: PlanningProblem, running_plan: Plan) -> tuple[Deployment, ...]:
    """The running deployments that the available nodes can hold."""
    return deployments_held_by(
        {(r.name, o.node): o.available for r in problem.regions for o in r.offers}, running_plan
    )


def deployments_held_by(
    available: Mapping[tuple[str, str], int], running_plan: Plan
) -> tuple[Deployment, ...]:
    """The deployments that these nodes can hold, by (region, node type)."""
    counts = {(d.template, d.region): d.count for d in running_plan.deployments}
    while True:
        used: dict[tuple[str, str], int] = {}
        for (name, region), count in counts.items():
            for node_count in running_plan.template(name).nodes:
                key = (region, node_count.node)
                used[key] = used.get(key, 0) + node_count.count * count
        exceeded = next((key for key, count in used.items() if count > available.get(key, 0)), None)
        if exceeded is None:
            break
        region, node = exceeded
        affected = [
            key
            for key in counts
            if key[1] == region and node in running_plan.template(key[0]).node_counts and counts[key]
        ]
        # Groups name their machines, whose loss is handled before, so other copies are removed first.
        counts[
            max(affected, key=lambda key: (running_plan.template(key[0]).kind != "group", counts[key], key))
        ] -= 1
    return tuple(Deployment(name, region, count) for (name, region), count in counts.items() if count)


def _reroute(
    problem: PlanningProblem, running_plan: Plan, deployments: tuple[Deployment, ...], settings: SolveSettings
) -> ReplanOption:
    """New routing over the surviving copies."""
    template_names = {deployment.template for deployment in deployments}
    templates = [
        _retimed(problem, t)
        for t in running_plan.templates
        if t.name in template_names and problem.demand_of(t.model)
    ]
    plan = _plan_of_copies(problem, running_plan, templates, deployments, settings)
    return _make_option("reroute", plan, running_plan, deployments, 0.0, 0.0, 0)


def _flip(
    problem: PlanningProblem,
    running_plan: Plan,
    deployments: tuple[Deployment, ...],
    surviving: SurvivingReplicas,
    settings: SolveSettings,
    costs: StartupCosts,
) -> ReplanOption:
    """New roles for the surviving copies, on the same nodes and in the same layout.

    Each deployment's nodes get an alias, so that the program cannot move weights between layouts. Groups stay on
    their machines, and a search chooses the roles of their replicas.
    """
    templates: list[Template] = []
    offers: dict[str, list[NodeOffer]] = {region.name: [] for region in problem.regions}
    types = list(problem.nodes)
    for index, deployment in enumerate(deployments):
        template = running_plan.template(deployment.template)
        demand = problem.demand_of(template.model)
        if demand is None or template.kind == "group":
            continue
        alias_of_node = {item.node: f"{item.node}{ALIAS_SEPARATOR}{index}" for item in template.nodes}
        for node_count in template.nodes:
            price = _price(problem, deployment.region, node_count.node)
            offers[deployment.region].append(
                NodeOffer(alias_of_node[node_count.node], price, node_count.count * deployment.count)
            )
            types.append(replace(problem.node(node_count.node), name=alias_of_node[node_count.node]))
        nodes = tuple(NodeCount(alias_of_node[item.node], item.count) for item in template.nodes)
        templates += [
            replace(variant, nodes=nodes, name=f"{variant.name}{ALIAS_SEPARATOR}{index}")
            for variant in _role_variants(problem, demand, template)
        ]
    groups, machines = _group_roles(problem, running_plan, deployments, surviving, settings)
    templates += groups
    for (region, node), count in machines.items():
        offers[region].append(NodeOffer(f"{node}{ALIAS_SEPARATOR}", _price(problem, region, node), count))
    types += [
        replace(problem.node(node), name=f"{node}{ALIAS_SEPARATOR}")
        for node in sorted({node for _, node in machines})
    ]
    regions = tuple(Region(name, tuple(offer)) for name, offer in offers.items())
    if not templates:
        return _make_option("flip", _empty_plan(), running_plan, deployments, 0.0, costs.role_flip_s, 0)
    aliased_problem = replace(problem, regions=regions, nodes=tuple(types), budget_usd_per_h=None)
    plan = _without_aliases(_solve(aliased_problem, templates, settings), problem)
    plain_names = {t.name for t in plan.templates if t.kind != "group"}
    flips = sum(d.count for d in plan.deployments if d.template in plain_names) - _unchanged_copies(
        plan, deployments, plain_names
    )
    flips += changed_roles(surviving, (t for t in plan.templates if t.kind == "group"))
    return _make_option("flip", plan, running_plan, deployments, 0.0, costs.role_flip_s, flips)


def _group_roles(
    problem: PlanningProblem,
    running_plan: Plan,
    deployments: tuple[Deployment, ...],
    surviving: SurvivingReplicas,
    settings: SolveSettings,
) -> tuple[list[Template], dict[tuple[str, str], int]]:
    """(groups in present and new roles on aliased nodes, (region, node type) to the number of these nodes)."""
    groups = [(d.region, running_plan.template(d.template)) for d in deployments]
    groups = [
        (region, _retimed(problem, t))
        for region, t in groups
        if t.kind == "group" and problem.demand_of(t.model)
    ]
    groups += groups_with_new_roles(problem, surviving, settings.seed, settings.time_limit_s / 4)
    templates: dict[str, Template] = {}
    for _, template in groups:
        nodes = tuple(
            NodeCount(f"{node_count.node}{ALIAS_SEPARATOR}", node_count.count)
            for node_count in template.nodes
        )
        templates[template.name] = replace(template, nodes=nodes, name=f"{template.name}{ALIAS_SEPARATOR}")
    machine_nodes: dict[tuple[str, str], int] = {}
    for region in {region for region, _ in groups}:
        replicas = [
            replica
            for group_region, template in groups
            if group_region == region
            for replica in template.replicas
        ]
        for node, count in machine_counts(replicas).items():
            machine_nodes[region, node] = count
    return list(templates.values()), machine_nodes


def _reallocate(
    problem: PlanningProblem,
    running_plan: Plan,
    deployments: tuple[Deployment, ...],
    surviving: SurvivingReplicas,
    planner: Planner,
    settings: SolveSettings,
    costs: StartupCosts,
) -> ReplanOption:
    """A new plan by the planner, with the surviving copies as running ones."""
    surviving_plan = replace(running_plan, deployments=deployments)
    groups = tuple(running_plan.template(d.template) for d in deployments)
    running_groups = tuple(template for template in groups if template.kind == "group")
    plan = planner(
        TemplateFactory(problem, running=running_groups), replace(settings, running=surviving_plan)
    ).plan
    running_counts = {(d.template, d.region): d.count for d in deployments}
    slowest_s, started_usd = 0.0, 0.0
    for deployment in plan.deployments:
        new_copies = deployment.count - running_counts.get((deployment.template, deployment.region), 0)
        if new_copies <= 0:
            continue
        template = plan.template(deployment.template)
        demand = problem.demand_of(template.model)
        weights = weight_bytes(demand.model) if demand else 0.0
        if template.kind == "group":
            for replica in new_replicas(surviving, template):
                start_s = startup_s(weights, len(replica.layout.machines), costs).total_s
                slowest_s = max(slowest_s, start_s)
                started_usd += _rent(problem, deployment.region, replica) * start_s / 3600
            continue
        start_s = startup_s(weights, sum(node_count.count for node_count in template.nodes), costs).total_s
        rent_usd_per_h = sum(_price(problem, deployment.region, n.node) * n.count for n in template.nodes)
        slowest_s = max(slowest_s, start_s)
        started_usd += new_copies * rent_usd_per_h * start_s / 3600
    return _make_option("reallocate", plan, running_plan, deployments, started_usd, slowest_s, 0, surviving)


def _rent(problem: PlanningProblem, region: str, replica: PlannedReplica) -> float:
    """Rent of a replica's GPUs, as a share of its machines' rent."""
    nodes = [node for stage in replica.layout.stages for node in stage.nodes]
    return sum(_price(problem, region, n.node) * n.tp / problem.node(n.node).gpus for n in nodes)


def _make_option(
    step: Step,
    plan: Plan,
    running_plan: Plan,
    deployments: tuple[Deployment, ...],
    start_cost_usd: float,
    time_s: float,
    flips: int,
    surviving: SurvivingReplicas | None = None,
) -> ReplanOption:
    """The option with its counts of starts and stops."""
    group_names = {t.name for t in (*running_plan.templates, *plan.templates) if t.kind == "group"}
    before = {(d.template, d.region): d.count for d in deployments if d.template not in group_names}
    after = {(d.template, d.region): d.count for d in plan.deployments if d.template not in group_names}
    starts = stops = 0
    if step == "reallocate":
        starts = sum(max(0, n - before.get(key, 0)) for key, n in after.items())
        stops = sum(max(0, n - after.get(key, 0)) for key, n in before.items())
        started, stopped = replica_changes(surviving or {}, (t for t in plan.templates if t.kind == "group"))
        starts, stops = starts + started, stops + stopped
    return ReplanOption(
        step, plan, plan.fraction, plan.total_usd_per_h, start_cost_usd, time_s, starts, stops, flips
    )


def _role_variants(problem: PlanningProblem, demand: ModelDemand, template: Template) -> list[Template]:
    """The template in every role that its replicas can take; with several layouts or roles it stays unchanged."""
    layouts = {replica.layout for replica in template.replicas}
    if len(layouts) > 1 or len({replica.role for replica in template.replicas}) > 1:
        return [_retimed(problem, template)]
    layout, copies = template.replicas[0].layout, len(template.replicas)
    timer = layout_timer(demand, layout, problem.by_name)
    roles = ROLES if len(layout.stages) == 1 else ("prefill", "decode")
    templates = []
    for role in roles:
        capacity = replica_capacity(
            demand, layout, problem.by_name, role, problem.headroom, copies, timer=timer
        )
        name = template.name if role == template.replicas[0].role else f"{template.name} as {role}"
        templates.append(
            replace(template, name=name, replicas=(PlannedReplica(role, layout),) * copies, capacity=capacity)
        )
    return templates


def _retimed(problem: PlanningProblem, template: Template) -> Template:
    """The template with its capacity for the current demand."""
    demand = problem.demand_of(template.model)
    assert demand is not None
    roles = {replica.role for replica in template.replicas}
    capacity = retimed(problem, demand, template)
    if len(roles) > 1:  # A closed group offers no single phases.
        capacity = tuple(
            BucketCapacity(c.bucket, 0.0, 0.0, c.closed_per_s, c.ttft_s, c.tpot_s) for c in capacity
        )
    return replace(template, capacity=capacity)


def _plan_of_copies(
    problem: PlanningProblem,
    running_plan: Plan,
    templates: list[Template],
    deployments: tuple[Deployment, ...],
    settings: SolveSettings,
) -> Plan:
    """The best routing over exactly these copies."""
    if not templates:
        return _empty_plan()
    names = {template.name for template in templates}
    pins = tuple(deployment for deployment in deployments if deployment.template in names)
    nodes = replace(running_plan, deployments=deployments).nodes
    problem_of_nodes = problem.with_nodes(lambda region, offer: nodes.get((region, offer.node), 0))
    problem_of_nodes = replace(problem_of_nodes, budget_usd_per_h=None)
    return _solve(problem_of_nodes, templates, replace(settings, pins=pins, running=None), exactly=True)


def _solve(
    problem: PlanningProblem, templates: list[Template], settings: SolveSettings, *, exactly: bool = False
) -> Plan:
    """The plan over these templates, without the models' terms."""
    by_model: dict[str, list[Template]] = {}
    for template in templates:
        by_model.setdefault(template.model, []).append(template)
    for demand in problem.demands:
        usable = runnable(problem, demand, by_model.get(demand.name, ()))
        by_model[demand.name] = of_one_degree(problem, demand, usable)
    # The surviving copies serve as much as they can; terms are for the next full plan to keep.
    problem_without_terms = replace(
        problem, demands=tuple(replace(demand, terms=NO_TERMS) for demand in problem.demands)
    )
    program_columns, allocation = solve_with_codecs(
        problem_without_terms,
        by_model,
        pins=settings.pins,
        exactly=exactly,
        time_limit_s=settings.time_limit_s,
        gap_target=1e-3,
        clock=settings.clock,
    )
    return plan_of(program_columns, allocation, "ladder")


def _empty_plan() -> Plan:
    return Plan("ladder", (), (), (), (), (), (), 0.0, 0.0, 0.0)


def _without_aliases(plan: Plan, problem: PlanningProblem) -> Plan:
    """The plan with the real names of nodes and templates; deployments that become equal are added up."""
    templates: dict[str, Template] = {}
    for template in plan.templates:
        nodes = tuple(
            NodeCount(node_count.node.split(ALIAS_SEPARATOR)[0], node_count.count)
            for node_count in template.nodes
        )
        name = template.name.rsplit(ALIAS_SEPARATOR, 1)[0]
        templates[name] = replace(template, name=name, nodes=nodes)
    counts: dict[tuple[str, str], int] = {}
    for deployment in plan.deployments:
        key = (deployment.template.rsplit(ALIAS_SEPARATOR, 1)[0], deployment.region)
        counts[key] = counts.get(key, 0) + deployment.count
    shares = tuple(
        replace(share, template=share.template.rsplit(ALIAS_SEPARATOR, 1)[0]) for share in plan.shares
    )
    deployments = tuple(Deployment(name, region, n) for (name, region), n in sorted(counts.items()))
    plan = replace(plan, templates=tuple(templates.values()), deployments=deployments, shares=shares)
    # Aliased nodes were not counted as reserved, and their regions had no head nodes.
    charges = charges_of(problem, plan, egress_usd_per_h(problem, plan))
    return replace(plan, cost_usd_per_h=rent_usd_per_h(problem, plan.nodes), charges=charges)


def _unchanged_copies(plan: Plan, running: tuple[Deployment, ...], names: set[str]) -> int:
    """Copies of these templates that run already, in their region."""
    before = {(d.template, d.region): d.count for d in running}
    deployments = [d for d in plan.deployments if d.template in names]
    return sum(min(d.count, before.get((d.template, d.region), 0)) for d in deployments)


def _price(problem: PlanningProblem, region: str, node: str) -> float:
    offer = next((r.offer(node) for r in problem.regions if r.name == region), None)
    return offer.price_usd_per_h if offer else 0.0
