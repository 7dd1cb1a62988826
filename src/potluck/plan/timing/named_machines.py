"""Named machines: their node types, the links between them, and step timers of layouts on them.

A problem with a pool names its machines. Otherwise machines are called `region/type/number`, and two of them are
linked at the rate of the slower network card. Groups of machines never span regions.
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
    """A machine with its region, node type and number of GPUs."""

    region: str
    type: NodeType
    gpus: int


def machine_of(problem: PlanningProblem, name: str) -> NamedMachine | None:
    """The machine of this name; None where it does not exist."""
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
    """The machines of a region as a pool; None without machines.

    Where the pool has more machines of a type than the region's offer, the last ones are left out.
    """
    region = next(item for item in problem.regions if item.name == region_name)
    if problem.pool is not None:
        available = {offer.node: offer.available for offer in region.offers}
        indices = []
        for index, node in enumerate(problem.pool.nodes):
            if node.region == region_name and node.gpus and available.get(node.type.name, 0) > 0:
                available[node.type.name] -= 1
                indices.append(index)
        return problem.pool.only(indices) if indices else None
    nodes = tuple(
        PoolNode(
            f"{region_name}/{offer.node}/{i}", node_type, node_type.gpus, offer.price_usd_per_h, region_name
        )
        for offer in region.offers
        for node_type in (problem.node(offer.node),)
        for i in range(offer.available)
    )
    if not nodes:
        return None
    cards = [node.type.network_gbps for node in nodes]
    gbps = tuple(tuple(min(a, b) for b in cards) for a in cards)
    return Pool(nodes, gbps, ((RTT_S,) * len(nodes),) * len(nodes))


def gpus_of(problem: PlanningProblem) -> int:
    """Number of available GPUs over all regions."""
    return sum(o.available * problem.node(o.node).gpus for region in problem.regions for o in region.offers)


def named(problem: PlanningProblem) -> PlanningProblem:
    """The problem with a pool of all its machines, so that single ones can be removed."""
    if problem.pool is not None:
        return problem
    pools = [pool for region in problem.regions if (pool := region_pool(problem, region.name)) is not None]
    nodes = tuple(node for pool in pools for node in pool.nodes)
    regions_and_cards = [(node.region, node.type.network_gbps) for node in nodes]
    links_by_regions = {(link.source, link.target): (link.gbps, link.rtt_s) for link in problem.links}
    # Groups never span regions, so the values between regions without a link are never used.
    gbps = tuple(
        tuple(
            min(card_gbps, other_gbps)
            if region == other_region
            else links_by_regions.get((region, other_region), (1e-3, 0.0))[0]
            for other_region, other_gbps in regions_and_cards
        )
        for region, card_gbps in regions_and_cards
    )
    rtt_s = tuple(
        tuple(
            RTT_S if region == other_region else links_by_regions.get((region, other_region), (0.0, 1.0))[1]
            for other_region, _ in regions_and_cards
        )
        for region, _ in regions_and_cards
    )
    return replace(problem, pool=Pool(nodes, gbps, rtt_s))


def _link(problem: PlanningProblem, first: str, second: str) -> tuple[float, float]:
    """(Gbps, round-trip seconds) between two machines."""
    if problem.pool is not None:
        a, b = problem.pool.index(first), problem.pool.index(second)
        return problem.pool.gbps[a][b], problem.pool.rtt_s[a][b]
    first_machine, second_machine = machine_of(problem, first), machine_of(problem, second)
    assert first_machine is not None, first
    assert second_machine is not None, second
    return min(first_machine.type.network_gbps, second_machine.type.network_gbps), RTT_S


def kv_path(problem: PlanningProblem, first: str, second: str) -> AlphaBeta | None:
    """Transfer model for KV between two machines; None within a machine without a GPU interconnect."""
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
    """The step timer of a layout, using the links between its machines where it names them all."""
    names = [stage.nodes[0].machine for stage in layout.stages if len(stage.nodes) == 1]
    if len(layout.stages) == 1 or len(names) < len(layout.stages) or not all(names):
        return layout_timer(demand, layout, problem.by_name)
    ring = [*pairwise(names), (names[-1], names[0])]
    hops = tuple(hop(problem, first, second) for first, second in ring)
    return pipeline(demand.model, layout, problem.by_name, hops=hops, sure=demand.sure)
