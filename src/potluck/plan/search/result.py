"""What the search found, in the planner's words: templates of the kind `group`, and a plan.

A group takes some GPUs of a machine, a template rents whole nodes; so each stage becomes a *slice*, a node type
of its own with just the stage's GPUs (`2/4xA5000`), and `cut_problem` is the pool cut that way. Templates
are timed by `plan.rates`, so they promise what `plan.verify` finds; the plan's flows come from the allocation
program with every template pinned. That timing knows one network card per node instead of the matrix, and the
program takes hand-overs within a region as free: what the search itself expects is in `Found`.
"""

from __future__ import annotations

from dataclasses import replace

from potluck.core.layout import Layout, Stage, StageNode
from potluck.core.plan import Deployment, NodeCount, Plan, Replica, Template
from potluck.core.types import Interconnect, NodeType, Offer, Region
from potluck.plan.allocate.solve import solve
from potluck.plan.columns import columns, plan_of
from potluck.plan.problem import HEADROOM, Ask, Problem
from potluck.plan.rates import layout_timer, replica_capacity
from potluck.plan.search.deduce import NAMES, Deduced, StageTake
from potluck.plan.search.pool import Pool
from potluck.plan.search.tabu import Found

REGION = "pool"


def slice_name(pool: Pool, stage: StageTake) -> str:
    return f"{stage.tp}/{pool.nodes[stage.node].type.name}"


def slices(pool: Pool, found: Found) -> dict[str, NodeType]:
    """The node types that the found stages are cut to."""
    made: dict[str, NodeType] = {}
    for configuration in found.configurations:
        for stage in configuration.stages:
            name = slice_name(pool, stage)
            if name not in made:
                made[name] = _slice(pool, stage, name)
    return made


def cut_problem(pool: Pool, ask: Ask, found: Found, headroom: float = HEADROOM) -> Problem:
    """The pool as a fleet of exactly these slices, at their share of the machines' prices."""
    count: dict[str, int] = {}
    price: dict[str, float] = {}
    for configuration in found.configurations:
        for stage in configuration.stages:
            name, node = slice_name(pool, stage), pool.nodes[stage.node]
            count[name] = count.get(name, 0) + 1
            price[name] = price.get(name, 0.0) + node.price_usd_per_h * stage.tp / node.type.gpus
    offers = tuple(Offer(name, price[name] / count[name], count[name]) for name in sorted(count))
    made = slices(pool, found)
    nodes = tuple(made[name] for name in sorted(made))
    return Problem((ask,), (Region(REGION, offers),), nodes, headroom=headroom)


def to_templates(pool: Pool, ask: Ask, found: Found, headroom: float = HEADROOM) -> tuple[Template, ...]:
    """One template per group, in their order."""
    nodes = slices(pool, found)
    made = []
    for place, (group, mine) in enumerate(zip(found.state.groups, found.configurations, strict=True)):
        layout = layout_of(pool, mine)
        role = NAMES[group.phase]
        timer = layout_timer(ask, layout, nodes)
        takes = "+".join(f"{n}x{pool.nodes[node].name}" for node, n in group.takes)
        counts = sorted(layout.node_counts.items())
        made.append(
            Template(
                name=f"{ask.name}: group {place + 1} {role} {takes}",
                kind="group",
                model=ask.name,
                nodes=tuple(NodeCount(name, count) for name, count in counts),
                replicas=(Replica(role, layout),),
                capacity=replica_capacity(ask, layout, nodes, role, headroom, timer=timer),
                confidence=timer.confidence,
            )
        )
    return tuple(made)


def to_plan(
    pool: Pool, ask: Ask, found: Found, headroom: float = HEADROOM, *, time_limit_s: float = 10.0
) -> Plan:
    """Every group deployed once, and requests routed by the allocation program."""
    problem = cut_problem(pool, ask, found, headroom)
    templates = to_templates(pool, ask, found, headroom)
    pins = tuple(Deployment(template.name, REGION, 1) for template in templates)
    program = columns(problem, {ask.name: templates}, pins=pins)
    return plan_of(program, solve(program.program, time_limit_s=time_limit_s), "thunderserve")


def layout_of(pool: Pool, found: Deduced) -> Layout:
    """A configuration on slices."""
    return Layout(
        tuple(Stage(stage.layers, (StageNode(slice_name(pool, stage), stage.tp),)) for stage in found.stages)
    )


def _slice(pool: Pool, stage: StageTake, name: str) -> NodeType:
    whole = pool.nodes[stage.node].type
    like = [i for i, node in enumerate(pool.nodes) if node.type.name == whole.name]
    links = [pool.gbps[a][b] for a in like for b in range(len(pool.nodes)) if a != b]
    inside = whole.interconnect if stage.tp > 1 else Interconnect("none", 0.0, 0.0)
    network = min(links, default=whole.network_gbps)
    return replace(whole, name=name, gpus=stage.tp, interconnect=inside, network_gbps=network)
