"""What becomes of groups of machines when some are lost: who is left, and which roles they take without loading.

A group's template goes with its machines one replica at a time: those that stand on a lost machine are gone, the
others serve on (`surviving`). `flipped` asks THUNDERSERVE's lightweight rescheduling (3.4) for new roles of the
replicas that are left; their weights stay where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from potluck.core.errors import CapacityError
from potluck.core.values.plan import Plan, PlannedReplica, Template
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.search.pool_workload import workload_of
from potluck.plan.search.reschedule import reschedule, survivors
from potluck.plan.search.search_templates import found_of, replicas_of, templates_of
from potluck.plan.search.tabu import SearchLimits, SearchSettings
from potluck.plan.strategies.pool_strategy import MAX_HEADROOM
from potluck.plan.templates.group import group_template
from potluck.plan.timing.named_machines import named, region_pool

Left = dict[tuple[str, str], list[PlannedReplica]]
"""(region, model) to the replicas of its groups that still have their machines."""


def settled(problem: PlanningProblem, running: Plan) -> PlanningProblem:
    """The problem with weights as they are loaded, and with exactly the machines that its regions have, when a plan
    names some.

    Where only a number of a type is gone, machines that the plan does not use are taken to be those first.
    """
    problem = problem.in_formats(running.formats)
    used = {machine for template in running.templates for machine in template.machines}
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


def left_of(problem: PlanningProblem, running: Plan) -> Left:
    """The replicas of the plan's groups whose machines are all there."""
    found: Left = {}
    for deployment in running.deployments:
        template = running.template(deployment.template)
        if template.kind == "group":
            there = _machines(problem, deployment.region)
            alive = [each for each in template.replicas if set(each.layout.machines) <= there]
            found.setdefault((deployment.region, template.model), []).extend(alive)
    return found


def surviving(problem: PlanningProblem, running: Plan) -> Plan:
    """The running plan with every group cut to the replicas that are left, in the roles they have."""
    templates: dict[str, Template] = {t.name: t for t in running.templates if t.kind != "group"}
    deployments = []
    for deployment in running.deployments:
        template = running.template(deployment.template)
        if template.kind != "group":
            deployments.append(deployment)
            continue
        ask = _asked(problem, template.model)
        there = _machines(problem, deployment.region)
        alive = [each for each in template.replicas if set(each.layout.machines) <= there]
        kept = None if ask is None or not alive else group_template(problem, ask, alive, problem.codecs[-1])
        if kept is not None:
            templates[kept.name] = kept
            deployments.append(replace(deployment, template=kept.name))
    return replace(running, templates=tuple(templates.values()), deployments=tuple(deployments), shares=())


def flipped(
    problem: PlanningProblem, left: Left, seed: int, time_limit_s: float
) -> list[tuple[str, Template]]:
    """(region, template) of the replicas that are left, in the roles that serve the demand best."""
    made: list[tuple[str, Template]] = []
    for (region, model), replicas in left.items():
        ask, pool = _asked(problem, model), region_pool(problem, region)
        if ask is None or pool is None or not replicas or not ask.rate_per_s > 0:
            continue
        before = found_of(pool, replicas)
        work = workload_of(ask, problem.codecs[-1], min(problem.headroom, MAX_HEADROOM))
        settings = SearchSettings(seed=seed, limits=SearchLimits(time_limit_s=time_limit_s))
        try:
            after = reschedule(survivors(pool, before, {}), before, work, settings)
        except CapacityError:
            continue
        made += [(region, each) for each in templates_of(problem, ask, replicas_of(pool, after))]
    return made


def changed_roles(left: Left, templates: Iterable[Template]) -> int:
    """How many replicas of some templates have another role than the replicas there were."""
    before = Counter(replica for replicas in left.values() for replica in replicas)
    after = Counter(replica for template in templates for replica in template.replicas)
    return sum((after - before).values())


def new_replicas(left: Left, template: Template) -> list[PlannedReplica]:
    """The replicas of a group whose weights are not loaded already."""
    loaded = Counter(replica.layout for replicas in left.values() for replica in replicas)
    found = []
    for replica in template.replicas:
        if loaded[replica.layout] > 0:
            loaded[replica.layout] -= 1
        else:
            found.append(replica)
    return found


def moved(left: Left, templates: Iterable[Template]) -> tuple[int, int]:
    """(replicas of groups to start, replicas to stop), by where their weights lie."""
    before = Counter(replica.layout for replicas in left.values() for replica in replicas)
    after = Counter(replica.layout for template in templates for replica in template.replicas)
    return sum((after - before).values()), sum((before - after).values())


def _machines(problem: PlanningProblem, region: str) -> set[str]:
    if region not in {each.name for each in problem.regions}:
        return set()
    pool = region_pool(problem, region)
    return set() if pool is None else {node.name for node in pool.nodes}


def _asked(problem: PlanningProblem, model: str) -> ModelDemand | None:
    return next((ask for ask in problem.asks if ask.name == model), None)
