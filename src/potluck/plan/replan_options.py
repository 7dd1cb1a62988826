"""What to do when something happened: answers from cheap to dear, each with what it gains, costs and takes.

    reroute      the same copies, new fractions                          at once, nothing is touched
    flip         copies on the same nodes may change their role          at once, no weights are loaded
    reallocate   a new plan that pays for what it starts (CORAL's K)     as long as the slowest start

Nodes that are gone take copies with them: the deployment with the most copies on such a node loses one at a time;
a group of named machines loses the replicas on them and serves on with the others (`regroup`). The controller
chooses; `best_answer` is the rule it starts from.
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
from potluck.plan.search.search_templates import found_of, replicas_of, templates_of
from potluck.plan.search.tabu import SearchLimits, SearchSettings, groups_left, reschedule
from potluck.plan.search.workload import workload_of
from potluck.plan.strategies.pool_strategy import MAX_HEADROOM, phases_of
from potluck.plan.strategies.template_factory import Planner, SolveSettings, TemplateFactory
from potluck.plan.templates.group import group_template, machine_counts
from potluck.plan.templates.runnable import of_one_degree, runnable
from potluck.plan.timing.named_machines import named, region_pool
from potluck.plan.timing.replica_rates import layout_timer, replica_capacity
from potluck.plan.verify import retimed

Left = dict[tuple[str, str], list[PlannedReplica]]
"""(region, model) to the replicas of its groups that still have their machines."""


def settled(problem: PlanningProblem, running_plan: Plan) -> PlanningProblem:
    """The problem with weights as they are loaded, and with exactly the machines that its regions have, when a plan
    names some.

    Where only a number of a type is gone, machines that the plan does not use are taken to be those first.
    """
    problem = problem.in_formats(running_plan.formats)
    used = {machine for template in running_plan.templates for machine in template.machines}
    if not used:
        return problem
    whole = named(problem)
    pool = whole.pool
    assert pool is not None
    count: Counter[tuple[str, str]] = Counter()
    available = {(r.name, o.node): o.available for r in problem.regions for o in r.offers}
    kept = []
    for place in sorted(range(len(pool.nodes)), key=lambda i: (pool.nodes[i].name not in used, i)):
        node = pool.nodes[place]
        key = (node.region, node.type.name)
        if node.gpus and count[key] < available.get(key, 0):
            count[key] += 1
            kept.append(place)
    return replace(whole, pool=pool.only(sorted(kept)) if kept else None)


def left_of(problem: PlanningProblem, running_plan: Plan) -> Left:
    left: Left = {}
    for deployment in running_plan.deployments:
        template = running_plan.template(deployment.template)
        if template.kind == "group":
            there = _machines(problem, deployment.region)
            alive = [replica for replica in template.replicas if set(replica.layout.machines) <= there]
            left.setdefault((deployment.region, template.model), []).extend(alive)
    return left


def surviving(problem: PlanningProblem, running_plan: Plan) -> Plan:
    """The running plan with every group cut to the replicas that are left, in the roles they have."""
    templates: dict[str, Template] = {t.name: t for t in running_plan.templates if t.kind != "group"}
    deployments = []
    for deployment in running_plan.deployments:
        template = running_plan.template(deployment.template)
        if template.kind != "group":
            deployments.append(deployment)
            continue
        demand = problem.demand_of(template.model)
        there = _machines(problem, deployment.region)
        alive = [replica for replica in template.replicas if set(replica.layout.machines) <= there]
        kept = (
            None
            if demand is None or not alive
            else group_template(problem, demand, alive, problem.codecs[-1])
        )
        if kept is not None:
            templates[kept.name] = kept
            deployments.append(replace(deployment, template=kept.name))
    return replace(
        running_plan, templates=tuple(templates.values()), deployments=tuple(deployments), shares=()
    )


def flipped(
    problem: PlanningProblem, left: Left, seed: int, time_limit_s: float
) -> list[tuple[str, Template]]:
    """(region, template) of the replicas that are left, in the roles that serve the demand best."""
    made: list[tuple[str, Template]] = []
    for (region, model), replicas in left.items():
        demand, pool = problem.demand_of(model), region_pool(problem, region)
        if demand is None or pool is None or not replicas or not demand.rate_per_s > 0:
            continue
        previous_result = found_of(pool, replicas)
        work = workload_of(demand, problem.codecs[-1], min(problem.headroom, MAX_HEADROOM), problem.engine)
        limits = SearchLimits(time_limit_s=time_limit_s)
        settings = SearchSettings(phases_of(problem.engine), seed=seed, limits=limits)
        try:
            next_result = reschedule(groups_left(pool, previous_result, {}), previous_result, work, settings)
        except CapacityError:
            continue
        made += [
            (region, template) for template in templates_of(problem, demand, replicas_of(pool, next_result))
        ]
    return made


def changed_roles(left: Left, templates: Iterable[Template]) -> int:
    before = Counter(replica for replicas in left.values() for replica in replicas)
    after = Counter(replica for template in templates for replica in template.replicas)
    return sum((after - before).values())


def new_replicas(left: Left, template: Template) -> list[PlannedReplica]:
    loaded = Counter(replica.layout for replicas in left.values() for replica in replicas)
    planned_replicas = []
    for replica in template.replicas:
        if loaded[replica.layout] > 0:
            loaded[replica.layout] -= 1
        else:
            planned_replicas.append(replica)
    return planned_replicas


def moved(left: Left, templates: Iterable[Template]) -> tuple[int, int]:
    before = Counter(replica.layout for replicas in left.values() for replica in replicas)
    after = Counter(replica.layout for template in templates for replica in template.replicas)
    return sum((after - before).values()), sum((before - after).values())


def _machines(problem: PlanningProblem, region: str) -> set[str]:
    if region not in {item.name for item in problem.regions}:
        return set()
    pool = region_pool(problem, region)
    return set() if pool is None else {node.name for node in pool.nodes}


Step = Literal["reroute", "flip", "reallocate"]
ROUNDING = 1e-9
ROLES: tuple[Role, ...] = ("mixed", "prefill", "decode")
MARK = "#"


@dataclass(frozen=True, slots=True)
class ReplanOption:
    step: Step
    plan: Plan
    served_fraction: float
    cost_usd_per_h: float
    start_cost_usd: float  # Rent of what is started until it serves.
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
    """All three answers to whatever made the problem what it is now."""
    problem = settled(problem, running_plan)
    loaded = left_of(problem, running_plan)
    running_plan = surviving(problem, running_plan)
    left = survivors(problem, running_plan)
    return (
        *_at_once(problem, running_plan, left, loaded, settings, costs),
        _reallocate(problem, running_plan, left, loaded, planner, settings, costs),
    )


def at_once(
    problem: PlanningProblem, running_plan: Plan, settings: SolveSettings, costs: StartupCosts = DEFAULT_COSTS
) -> tuple[ReplanOption, ReplanOption]:
    """The answers that load no weights, with the copies that are left: new routing, and new roles."""
    problem = settled(problem, running_plan)
    loaded = left_of(problem, running_plan)
    running_plan = surviving(problem, running_plan)
    return _at_once(problem, running_plan, survivors(problem, running_plan), loaded, settings, costs)


def _at_once(
    problem: PlanningProblem,
    running_plan: Plan,
    left: tuple[Deployment, ...],
    loaded: Left,
    settings: SolveSettings,
    costs: StartupCosts,
) -> tuple[ReplanOption, ReplanOption]:
    rerouted = _reroute(problem, running_plan, left, settings)
    flip = _flip(problem, running_plan, left, loaded, settings, costs)
    if flip.flips and not _gains(flip, rerouted):  # a search that was cut short may change roles for nothing
        flip = replace(rerouted, step="flip")
    return rerouted, flip


def _gains(replan_option: ReplanOption, previous_option: ReplanOption) -> bool:
    more = replan_option.served_fraction - previous_option.served_fraction
    cheaper = replan_option.cost_usd_per_h < previous_option.cost_usd_per_h * (1.0 - ROUNDING)
    return more > ROUNDING or (more >= -ROUNDING and cheaper)


def best_answer(answers: Sequence[ReplanOption]) -> ReplanOption:
    """The first that serves as much as any: cheaper rungs come first."""
    most = max(replan_option.served_fraction for replan_option in answers)
    return next(replan_option for replan_option in answers if replan_option.served_fraction >= most - 1e-6)


def survivors(problem: PlanningProblem, running_plan: Plan) -> tuple[Deployment, ...]:
    """The deployments that the nodes there are now can still hold."""
    return held_by({(r.name, o.node): o.available for r in problem.regions for o in r.offers}, running_plan)


def held_by(available: Mapping[tuple[str, str], int], running_plan: Plan) -> tuple[Deployment, ...]:
    """The same of (region, node type) to how many there are."""
    counts = {(d.template, d.region): d.count for d in running_plan.deployments}
    while True:
        used: dict[tuple[str, str], int] = {}
        for (name, region), count in counts.items():
            for node_count in running_plan.template(name).nodes:
                key = (region, node_count.node)
                used[key] = used.get(key, 0) + node_count.count * count
        over = next((key for key, count in used.items() if count > available.get(key, 0)), None)
        if over is None:
            break
        region, node = over
        hit = [
            k
            for k in counts
            if k[1] == region and node in running_plan.template(k[0]).node_counts and counts[k]
        ]
        # Groups name their machines, so those are not the ones that are gone.
        counts[max(hit, key=lambda k: (running_plan.template(k[0]).kind != "group", counts[k], k))] -= 1
    return tuple(Deployment(name, region, count) for (name, region), count in counts.items() if count)


def _reroute(
    problem: PlanningProblem, running_plan: Plan, left: tuple[Deployment, ...], settings: SolveSettings
) -> ReplanOption:
    kept = {deployment.template for deployment in left}
    templates = [
        _timed(problem, t) for t in running_plan.templates if t.name in kept and problem.demand_of(t.model)
    ]
    plan = _within(problem, running_plan, templates, left, settings)
    return _answer("reroute", plan, running_plan, left, 0.0, 0.0, 0)


def _flip(
    problem: PlanningProblem,
    running_plan: Plan,
    left: tuple[Deployment, ...],
    loaded: Left,
    settings: SolveSettings,
    costs: StartupCosts,
) -> ReplanOption:
    """Every copy of one layout in one role may take another; copies of unlike layouts stay apart.

    Layouts are kept apart by giving each its own name for its nodes, so that no weights would have to move.
    Groups stay on their machines; which of their replicas changes its role is for `regroup` to find.
    """
    templates: list[Template] = []
    offers: dict[str, list[NodeOffer]] = {region.name: [] for region in problem.regions}
    types = list(problem.nodes)
    for place, deployment in enumerate(left):
        template = running_plan.template(deployment.template)
        demand = problem.demand_of(template.model)
        if demand is None or template.kind == "group":
            continue
        alias = {item.node: f"{item.node}{MARK}{place}" for item in template.nodes}
        for node_count in template.nodes:
            price = _price(problem, deployment.region, node_count.node)
            offers[deployment.region].append(
                NodeOffer(alias[node_count.node], price, node_count.count * deployment.count)
            )
            types.append(replace(problem.node(node_count.node), name=alias[node_count.node]))
        nodes = tuple(NodeCount(alias[item.node], item.count) for item in template.nodes)
        templates += [
            replace(variant, nodes=nodes, name=f"{variant.name}{MARK}{place}")
            for variant in _roles(problem, demand, template)
        ]
    groups, machines = _group_roles(problem, running_plan, left, loaded, settings)
    templates += groups
    for (region, node), count in machines.items():
        offers[region].append(NodeOffer(f"{node}{MARK}", _price(problem, region, node), count))
    types += [
        replace(problem.node(node), name=f"{node}{MARK}") for node in sorted({node for _, node in machines})
    ]
    regions = tuple(Region(name, tuple(offer)) for name, offer in offers.items())
    if not templates:
        return _answer("flip", _nothing(), running_plan, left, 0.0, costs.role_flip_s, 0)
    inside = replace(problem, regions=regions, nodes=tuple(types), budget_usd_per_h=None)
    plan = _unmarked(_solved(inside, templates, settings), problem)
    whole = {t.name for t in plan.templates if t.kind != "group"}
    flips = sum(d.count for d in plan.deployments if d.template in whole) - _kept(plan, left, whole)
    flips += changed_roles(loaded, (t for t in plan.templates if t.kind == "group"))
    return _answer("flip", plan, running_plan, left, 0.0, costs.role_flip_s, flips)


def _group_roles(
    problem: PlanningProblem,
    running_plan: Plan,
    left: tuple[Deployment, ...],
    loaded: Left,
    settings: SolveSettings,
) -> tuple[list[Template], dict[tuple[str, str], int]]:
    """Groups as they are and in new roles, on nodes of their own; and those nodes, (region, type) to how many."""
    result = [(d.region, running_plan.template(d.template)) for d in left]
    result = [
        (region, _timed(problem, t))
        for region, t in result
        if t.kind == "group" and problem.demand_of(t.model)
    ]
    result += flipped(problem, loaded, settings.seed, settings.time_limit_s / 4)
    templates: dict[str, Template] = {}
    for _, template in result:
        nodes = tuple(NodeCount(f"{each.node}{MARK}", each.count) for each in template.nodes)
        templates[template.name] = replace(template, nodes=nodes, name=f"{template.name}{MARK}")
    machines: dict[tuple[str, str], int] = {}
    for region in {region for region, _ in result}:
        mine = [replica for where, template in result if where == region for replica in template.replicas]
        for node, count in machine_counts(mine).items():
            machines[region, node] = count
    return list(templates.values()), machines


def _reallocate(
    problem: PlanningProblem,
    running_plan: Plan,
    left: tuple[Deployment, ...],
    loaded: Left,
    planner: Planner,
    settings: SolveSettings,
    costs: StartupCosts,
) -> ReplanOption:
    still = replace(running_plan, deployments=left)
    groups = tuple(running_plan.template(d.template) for d in left)
    kept = tuple(template for template in groups if template.kind == "group")
    plan = planner(TemplateFactory(problem, running=kept), replace(settings, running=still)).plan
    before = {(d.template, d.region): d.count for d in left}
    slowest_s, started_usd = 0.0, 0.0
    for deployment in plan.deployments:
        new = deployment.count - before.get((deployment.template, deployment.region), 0)
        if new <= 0:
            continue
        template = plan.template(deployment.template)
        demand = problem.demand_of(template.model)
        weights = weight_bytes(demand.model) if demand else 0.0
        if template.kind == "group":
            for replica in new_replicas(loaded, template):
                takes_s = startup_s(weights, len(replica.layout.machines), costs).total_s
                slowest_s = max(slowest_s, takes_s)
                started_usd += _rent(problem, deployment.region, replica) * takes_s / 3600
            continue
        takes_s = startup_s(weights, sum(node_count.count for node_count in template.nodes), costs).total_s
        rent = sum(_price(problem, deployment.region, n.node) * n.count for n in template.nodes)
        slowest_s = max(slowest_s, takes_s)
        started_usd += new * rent * takes_s / 3600
    return _answer("reallocate", plan, running_plan, left, started_usd, slowest_s, 0, loaded)


def _rent(problem: PlanningProblem, region: str, replica: PlannedReplica) -> float:
    """The share of its machines' rent that a replica's GPUs are."""
    stages = [node for stage in replica.layout.stages for node in stage.nodes]
    return sum(_price(problem, region, n.node) * n.tp / problem.node(n.node).gpus for n in stages)


def _answer(
    step: Step,
    plan: Plan,
    running_plan: Plan,
    left: tuple[Deployment, ...],
    start_cost_usd: float,
    time_s: float,
    flips: int,
    loaded: Left | None = None,
) -> ReplanOption:
    grouped = {t.name for t in (*running_plan.templates, *plan.templates) if t.kind == "group"}
    before = {(d.template, d.region): d.count for d in left if d.template not in grouped}
    after = {(d.template, d.region): d.count for d in plan.deployments if d.template not in grouped}
    starts = stops = 0
    if step == "reallocate":
        starts = sum(max(0, n - before.get(key, 0)) for key, n in after.items())
        stops = sum(max(0, n - after.get(key, 0)) for key, n in before.items())
        fresh, gone = moved(loaded or {}, (t for t in plan.templates if t.kind == "group"))
        starts, stops = starts + fresh, stops + gone
    return ReplanOption(
        step, plan, plan.fraction, plan.total_usd_per_h, start_cost_usd, time_s, starts, stops, flips
    )


def _roles(problem: PlanningProblem, demand: ModelDemand, template: Template) -> list[Template]:
    """A template in every role its replicas could take; groups of unlike replicas stay as they are."""
    layouts = {replica.layout for replica in template.replicas}
    if len(layouts) > 1 or len({replica.role for replica in template.replicas}) > 1:
        return [_timed(problem, template)]
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


def _timed(problem: PlanningProblem, template: Template) -> Template:
    """A template with its capacity for the demand there is now."""
    demand = problem.demand_of(template.model)
    assert demand is not None
    roles = {replica.role for replica in template.replicas}
    capacity = retimed(problem, demand, template)
    if len(roles) > 1:  # a closed group: what its parts could do apart is not offered
        capacity = tuple(
            BucketCapacity(c.bucket, 0.0, 0.0, c.closed_per_s, c.ttft_s, c.tpot_s) for c in capacity
        )
    return replace(template, capacity=capacity)


def _within(
    problem: PlanningProblem,
    running_plan: Plan,
    templates: list[Template],
    left: tuple[Deployment, ...],
    settings: SolveSettings,
) -> Plan:
    """Exactly these copies, and no node beside theirs."""
    if not templates:
        return _nothing()
    names = {template.name for template in templates}
    pins = tuple(deployment for deployment in left if deployment.template in names)
    held = replace(running_plan, deployments=left).nodes
    inside = problem.with_nodes(lambda region, offer: held.get((region, offer.node), 0))
    inside = replace(inside, budget_usd_per_h=None)
    return _solved(inside, templates, replace(settings, pins=pins, running=None), exactly=True)


def _solved(
    problem: PlanningProblem, templates: list[Template], settings: SolveSettings, *, exactly: bool = False
) -> Plan:
    by_model: dict[str, list[Template]] = {}
    for template in templates:
        by_model.setdefault(template.model, []).append(template)
    for demand in problem.demands:
        mine = runnable(problem, demand, by_model.get(demand.name, ()))
        by_model[demand.name] = of_one_degree(problem, demand, mine)
    # What is left is used as well as it can be; what was asked of a plan is for the next plan to keep.
    plain = replace(problem, demands=tuple(replace(demand, terms=NO_TERMS) for demand in problem.demands))
    program_columns, allocation = solve_with_codecs(
        plain,
        by_model,
        pins=settings.pins,
        exactly=exactly,
        time_limit_s=settings.time_limit_s,
        gap_target=1e-3,
        clock=settings.clock,
    )
    return plan_of(program_columns, allocation, "ladder")


def _nothing() -> Plan:
    return Plan("ladder", (), (), (), (), (), (), 0.0, 0.0, 0.0)


def _unmarked(plan: Plan, problem: PlanningProblem) -> Plan:
    """The plan with nodes and templates under their own names again; what became alike is added up."""
    templates: dict[str, Template] = {}
    for template in plan.templates:
        nodes = tuple(NodeCount(each.node.split(MARK)[0], each.count) for each in template.nodes)
        name = template.name.rsplit(MARK, 1)[0]
        templates[name] = replace(template, name=name, nodes=nodes)
    counts: dict[tuple[str, str], int] = {}
    for deployment in plan.deployments:
        key = (deployment.template.rsplit(MARK, 1)[0], deployment.region)
        counts[key] = counts.get(key, 0) + deployment.count
    shares = tuple(replace(share, template=share.template.rsplit(MARK, 1)[0]) for share in plan.shares)
    deployments = tuple(Deployment(name, region, n) for (name, region), n in sorted(counts.items()))
    plan = replace(plan, templates=tuple(templates.values()), deployments=deployments, shares=shares)
    # Marked nodes are not reserved, and their regions have no head nodes.
    charges = charges_of(problem, plan, egress_usd_per_h(problem, plan))
    return replace(plan, cost_usd_per_h=rent_usd_per_h(problem, plan.nodes), charges=charges)


def _kept(plan: Plan, left: tuple[Deployment, ...], whole: set[str]) -> int:
    before = {(d.template, d.region): d.count for d in left}
    mine = [d for d in plan.deployments if d.template in whole]
    return sum(min(d.count, before.get((d.template, d.region), 0)) for d in mine)


def _price(problem: PlanningProblem, region: str, node: str) -> float:
    offer = next((r.offer(node) for r in problem.regions if r.name == region), None)
    return offer.price_usd_per_h if offer else 0.0
