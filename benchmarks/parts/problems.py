"""Planning problems and what is simulated of them, for benchmarks that plan by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from potluck.catalog import nodes, prices
from potluck.core.values.length_laws import Lengths
from potluck.core.values.plan import Plan
from potluck.core.values.types import LengthBin, NodeOffer, NodeType, Region
from potluck.plan.problem import PlanningProblem
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.arrivals import draw
from potluck.sim.load.workload import Workload


def length_bins(lengths: Lengths, count: int) -> tuple[LengthBin, ...]:
    """Equal bins of lengths that were drawn, so that the planner knows their spread."""
    prompt, output = draw(np.random.default_rng(0), lengths, 4000)
    return tuple(
        LengthBin(float(prompt[part].mean()), float(output[part].mean()), len(part) / len(prompt))
        for part in np.array_split(np.argsort(prompt), count)
    )


def one_region(names: Sequence[str], available: int) -> tuple[tuple[Region, ...], tuple[NodeType, ...]]:
    """Nodes at the catalog's prices, so many of each, in one region."""
    types = tuple(nodes.node_type(name) for name in names)
    usd = [prices.price_usd_per_h(node.name).price_usd_per_h for node in types]
    offers = tuple(NodeOffer(node.name, price, available) for node, price in zip(types, usd, strict=True))
    return (Region("here", offers),), types


def resolved(
    problem: PlanningProblem, plan: Plan, mean_tokens: Mapping[str, tuple[float, float]], **more: Any
) -> ResolvedPlan:
    models, slos = (
        {demand.name: demand.model for demand in problem.demands},
        {demand.name: demand.slo for demand in problem.demands},
    )
    regions = more.pop("regions", problem.regions)
    return ResolvedPlan(plan, models, problem.by_name, regions, (), slos, mean_tokens, **more)


def mean_tokens(workload: Workload) -> dict[str, tuple[float, float]]:
    """Prompt and answer, by model."""
    rows = {name: workload.model == place for place, name in enumerate(workload.models)}
    return {
        name: (float(workload.prompt_tokens[row].mean()), float(workload.output_tokens[row].mean()))
        for name, row in rows.items()
    }
