"""Small problems that tests of the planner share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from potluck.catalog import models, nodes
from potluck.core.values.layout import Pool
from potluck.core.values.plan import Template
from potluck.core.values.types import Codec, LengthBin, Link, NodeOffer, Region, Slo, Traffic
from potluck.plan.problem import CODECS, ModelDemand, PlanningProblem, model_demand
from potluck.plan.templates.placement_table import placement_table_of

CHAT = ((300, 250, 0.5), (1500, 200, 0.4), (6000, 300, 0.1))


def a_demand(
    name: str = "chat",
    model: str = "Llama-3.1-8B",
    rate_per_s: float = 5.0,
    slo: Slo | None = None,
    lengths: tuple[tuple[float, float, float], ...] = CHAT,
) -> ModelDemand:
    traffic = Traffic(name, rate_per_s, tuple(LengthBin(*length) for length in lengths))
    return model_demand(name, models.model(model), slo or Slo(2.0, 0.06), traffic)


def a_problem(
    *asks: ModelDemand,
    offers: dict[str, dict[str, tuple[float, int]]] | None = None,
    links: tuple[Link, ...] = (),
    headroom: float = 0.8,
    budget_usd_per_h: float | None = None,
    codecs: tuple[Codec, ...] = CODECS[:1],
) -> PlanningProblem:
    """`offers` maps region to node to (price, available)."""
    chosen = offers or {
        "east": {"1xL40S": (1.86, 8), "1xA10G": (1.0, 16), "2xL4": (1.6, 8), "1xH100": (6.9, 4)}
    }
    types = {nodes.canonical(node): nodes.node_type(node) for item in chosen.values() for node in item}
    regions = tuple(
        Region(name, tuple(NodeOffer(nodes.canonical(node), price, n) for node, (price, n) in item.items()))
        for name, item in chosen.items()
    )
    return PlanningProblem(
        asks or (a_demand(),),
        regions,
        tuple(types.values()),
        links,
        headroom,
        budget_usd_per_h=budget_usd_per_h,
        codecs=codecs,
    )


def pool_problem(pool: Pool, *asks: ModelDemand, headroom: float = 0.8) -> PlanningProblem:
    """A pool with the regions that follow from it; KV may cross in four bits, as in THUNDERSERVE."""
    offers: dict[str, dict[str, NodeOffer]] = {}
    for node in pool.nodes:
        here = offers.setdefault(node.region, {})
        before = here[node.type.name].available if node.type.name in here else 0
        here[node.type.name] = NodeOffer(node.type.name, node.price_usd_per_h, before + 1)
    regions = tuple(Region(name, tuple(here.values())) for name, here in offers.items())
    types = {node.type.name: node.type for node in pool.nodes}
    return PlanningProblem(
        asks or (a_demand(),), regions, tuple(types.values()), headroom=headroom, pool=pool, codecs=CODECS
    )


def pipelines(
    problem: PlanningProblem,
    demand: ModelDemand,
    prices: Mapping[str, float],
    few: int,
    folder: Path | None = None,
) -> list[Template]:
    """Per bucket, phase and library the `few` pipelines that do most for their price."""
    table = placement_table_of(problem, demand, folder=folder)
    table.take(table.cheapest(np.array([prices.get(node.name, 0.0) for node in problem.nodes]), few))
    return table.templates
