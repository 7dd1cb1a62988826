"""Machines by name: which there are, the links between them, and how long a layout on them takes.

A problem with a pool names its machines. Otherwise `region/type/number` stands for each that a region has, with the
smaller of two network cards between them. Groups of machines never span regions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from potluck.core.values.layout import RTT_S, Layout, Pool, PoolNode
from potluck.core.values.types import NodeType
from potluck.perf.operators.network import HANDOVER_SHARE, Hop, hop_between, hop_inside
from potluck.perf.step_timer import StepTimer
from potluck.perf.timers.pipeline_timer import pipeline
from potluck.perf.transfer import AlphaBeta, alpha_beta
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.timing.replica_rates import layout_timer


@dataclass(frozen=True, slots=True)
class NamedMachine:
    region: str
    type: NodeType
    gpus: int


def machine_of(problem: PlanningProblem, name: str) -> NamedMachine | None:
    if problem.pool is not None:
        node = problem.pool.node(name)
        return None if node is None else NamedMachine(node.region, node.type, node.gpus)
    for region in problem.regions:
        for offer in region.offers:
            start = f"{region.name}/{offer.node}/"
            number = name.removeprefix(start)
            if name.startswith(start) and number.isdecimal() and int(number) < offer.available:
                node_type = problem.node(offer.node)
                return NamedMachine(region.name, node_type, node_type.gpus)
    return None


def region_pool(problem: PlanningProblem, region_name: str) -> Pool | None:
    """The machines of a region; None when it has none.

    A pool may know more machines than the region still has of a type; then the last are left out.
    """
    region = next(item for item in problem.regions if item.name == region_name)
    if problem.pool is not None:
        left = {offer.node: offer.available for offer in region.offers}
        places = []
        for place, node in enumerate(problem.pool.nodes):
            if node.region == region_name and node.gpus and left.get(node.type.name, 0) > 0:
                left[node.type.name] -= 1
                places.append(place)
        return problem.pool.only(places) if places else None
    nodes = tuple(
        PoolNode(f"{region_name}/{offer.node}/{i}", kind, kind.gpus, offer.price_usd_per_h, region_name)
        for offer in region.offers
        for kind in (problem.node(offer.node),)
        for i in range(offer.available)
    )
    if not nodes:
        return None
    cards = [node.type.network_gbps for node in nodes]
    gbps = tuple(tuple(min(a, b) for b in cards) for a in cards)
    return Pool(nodes, gbps, ((RTT_S,) * len(nodes),) * len(nodes))


def gpus_of(problem: PlanningProblem) -> int:
    return sum(o.available * problem.node(o.node).gpus for region in problem.regions for o in region.offers)


def named(problem: PlanningProblem) -> PlanningProblem:
    """The same problem with every machine in its pool, so that single ones can be lost."""
    if problem.pool is not None:
        return problem
    pools = [pool for region in problem.regions if (pool := region_pool(problem, region.name)) is not None]
    nodes = tuple(node for pool in pools for node in pool.nodes)
    ends = [(node.region, node.type.network_gbps) for node in nodes]
    across = {(link.source, link.target): (link.gbps, link.rtt_s) for link in problem.links}
    # Nothing groups machines of two regions, so what stands between those without a link is never used.
    gbps = tuple(
        tuple(
            min(card, other) if region == place else across.get((region, place), (1e-3, 0.0))[0]
            for place, other in ends
        )
        for region, card in ends
    )
    rtt_s = tuple(
        tuple(RTT_S if region == place else across.get((region, place), (0.0, 1.0))[1] for place, _ in ends)
        for region, _ in ends
    )
    return replace(problem, pool=Pool(nodes, gbps, rtt_s))


def _link(problem: PlanningProblem, first: str, second: str) -> tuple[float, float]:
    if problem.pool is not None:
        a, b = problem.pool.index(first), problem.pool.index(second)
        return problem.pool.gbps[a][b], problem.pool.rtt_s[a][b]
    one, two = machine_of(problem, first), machine_of(problem, second)
    assert one is not None, first
    assert two is not None, second
    return min(one.type.network_gbps, two.type.network_gbps), RTT_S


def kv_path(problem: PlanningProblem, first: str, second: str) -> AlphaBeta | None:
    """The way of KV from one machine to another; None within one whose GPUs have no link, so nothing to cross."""
    if first != second:
        return alpha_beta(*_link(problem, first, second))
    machine = machine_of(problem, first)
    assert machine is not None, first
    inside = machine.type.interconnect
    if inside.kind == "none":
        return None
    return AlphaBeta(inside.latency_s, inside.gb_per_s * 1e9 * HANDOVER_SHARE)


def hop(problem: PlanningProblem, first: str, second: str) -> Hop:
    """(seconds, seconds per byte) of activations from one machine to another, or inside one."""
    if first != second:
        return hop_between(*_link(problem, first, second))
    machine = machine_of(problem, first)
    assert machine is not None, first
    return hop_inside(machine.type)


def timer_of(problem: PlanningProblem, demand: ModelDemand, layout: Layout) -> StepTimer:
    """A layout's timer: over the links between its machines where it names them all."""
    names = [stage.nodes[0].machine for stage in layout.stages if len(stage.nodes) == 1]
    if len(layout.stages) == 1 or len(names) < len(layout.stages) or not all(names):
        return layout_timer(demand, layout, problem.by_name)
    ring = [*pairwise(names), (names[-1], names[0])]
    hops = tuple(hop(problem, first, second) for first, second in ring)
    return pipeline(demand.model, layout, problem.by_name, hops=hops, sure=demand.sure)
