"""Pruned pipeline libraries lose no cheaper plan, against all placements."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, pairwise
from pathlib import Path

import pytest
from plan_problems import a_demand, a_problem, pipelines

from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import NodeCount, PlannedReplica, Template
from potluck.core.values.types import Slo
from potluck.plan.assemble.codecs import solve_with_codecs
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.templates.homogeneous import homogeneous
from potluck.plan.timing.rate_cache import memory_rate_cache
from potluck.plan.timing.replica_rates import fits, replica_capacity, useful

FLEET = {"east": {"1xL4": (0.8, 8), "1xL40S": (1.86, 4)}}
NODES = ("1xL4", "1xL40S")
MOST_NODES = 3
STEP_LAYERS = 4
"""The reference tries every fourth split of the layers: fewer than there are, so it can only be worse."""
SAFE = 1.01  # The library charges the head to every stage, which its choice of layers may cost.


def partitions(nodes: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    if not nodes:
        yield ()
        return
    indices = range(len(nodes))
    for size in range(1, len(nodes) + 1):
        for first in combinations(indices, size):
            for others in partitions(tuple(nodes[i] for i in indices if i not in first)):
                yield (tuple(nodes[i] for i in first), *others)


def splits(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(STEP_LAYERS, layers, STEP_LAYERS), stages - 1):
        ends = (0, *cuts, layers)
        yield tuple(b - a for a, b in pairwise(ends))


def all_pipelines(problem: PlanningProblem, demand: ModelDemand) -> list[Template]:
    """Every prefill pipeline of the few nodes there are, timed by the plan's rule."""
    templates = []
    layouts = {
        Layout(
            tuple(
                Stage(j, tuple(StageNode(node, 1) for node in stage))
                for j, stage in zip(held, cut, strict=True)
            )
        )
        for size in range(2, MOST_NODES + 1)
        for nodes in combinations_with_replacement(NODES, size)
        for cut in set(partitions(nodes))
        for held in splits(demand.model.layer_count, len(cut))
    }
    for place, layout in enumerate(sorted(layouts, key=repr)):
        if not fits(demand, layout, problem.by_name):
            continue
        capacity = replica_capacity(demand, layout, problem.by_name, "prefill", problem.headroom)
        if useful(capacity):
            counts = tuple(NodeCount(name, n) for name, n in sorted(layout.node_counts.items()))
            templates.append(
                Template(
                    f"{demand.name}: prefill {place}",
                    "pipeline",
                    demand.name,
                    counts,
                    (PlannedReplica("prefill", layout),),
                    capacity,
                    "assumed",
                )
            )
    return templates


@pytest.mark.parametrize(("ttft_s", "prompt", "rate_per_s"), [(0.4, 1000, 25.0), (0.9, 2200, 8.0)])
def test_pipeline_library_omits_no_placement_that_would_give_a_cheaper_plan(
    ttft_s: float, prompt: int, rate_per_s: float, tmp_path: Path
) -> None:
    ask = a_demand(rate_per_s=rate_per_s, slo=Slo(ttft_s, 0.06), lengths=((prompt, 100, 1.0),))
    problem = a_problem(ask, offers=FLEET)
    prices = {offer.node: offer.price_usd_per_h for offer in problem.regions[0].offers}
    single = [
        each for each in homogeneous(problem, ask, memory_rate_cache(ask)) if each.replicas[0].role != "mixed"
    ]
    made = [
        t for t in pipelines(problem, ask, prices, few=20, folder=tmp_path) if t.replicas[0].role == "prefill"
    ]
    few = [t for t in made if sum(n.count for n in t.nodes) <= MOST_NODES]
    _, ours = solve_with_codecs(problem, {ask.name: [*single, *few]}, time_limit_s=20)
    _, best = solve_with_codecs(problem, {ask.name: [*single, *all_pipelines(problem, ask)]}, time_limit_s=20)
    assert ours.found or ours.shortfall is not None
    if best.found:
        assert ours.found
        assert ours.cost_usd_per_h <= best.cost_usd_per_h * SAFE
    else:
        assert ours.shortfall is not None
        assert best.shortfall is not None
        assert ours.shortfall.fraction >= best.shortfall.fraction / SAFE


def test_nodes_too_slow_alone_serve_prefill_as_pipelines() -> None:
    """Eight L4 that are each in time without a queue, and not with one."""
    ask = a_demand(rate_per_s=25.0, slo=Slo(0.5, 0.06), lengths=((1000, 100, 1.0),))
    problem = a_problem(ask, offers=FLEET)
    prices = {offer.node: offer.price_usd_per_h for offer in problem.regions[0].offers}
    single = [
        each for each in homogeneous(problem, ask, memory_rate_cache(ask)) if each.replicas[0].role != "mixed"
    ]
    assert not any(t.nodes[0].node == "1xL4" and t.replicas[0].role == "prefill" for t in single)
    _, allocation = solve_with_codecs(
        problem, {ask.name: [*single, *pipelines(problem, ask, prices, few=20)]}, time_limit_s=20
    )
    assert allocation.found
