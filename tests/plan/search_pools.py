"""Pools and workloads that tests of the search share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from papers import thunderserve
from potluck.catalog import models, nodes
from potluck.catalog.figure_sources import load_toml
from potluck.core.values.types import Slo
from potluck.plan.search.workload import Pool, PoolNode, PoolWorkload, uniform_pool

CONVERSATION, CODING = (1155, 211), (2000, 28)
"""Mean lengths of the Azure traces; coding's 2,048 would leave LLaMA-30B no room to answer."""
CLOUD = thunderserve.CLOUD


def paper_node(name: str, gpu: str, count: int) -> PoolNode:
    """A machine with the GPU figures of THUNDERSERVE's Table 1."""
    row = load_toml("gpus.toml")["paper"]["thunderserve"][gpu]
    return PoolNode(name, thunderserve.node(gpu, count), count, row["price_usd_per_h"] * count)


def catalog_node(name: str, gpu: str, count: int) -> PoolNode:
    return PoolNode(name, nodes.node_type(f"{count}x{gpu}"), count)


def paper_pool(machines: Sequence[tuple[str, int]] = CLOUD, gbps: float = 40.0) -> Pool:
    members = [paper_node(f"{gpu}-{i}", gpu, count) for i, (gpu, count) in enumerate(machines)]
    return uniform_pool(members, gbps)


def random_pool(rng: np.random.Generator, most: int, kinds: Sequence[str], largest: int = 4) -> Pool:
    """Up to `most` GPUs on random machines with random links."""
    members: list[PoolNode] = []
    left = most
    while left > 0 and len(members) < 6:
        count = int(rng.integers(1, min(largest, left) + 1))
        members.append(catalog_node(f"n{len(members)}", str(rng.choice(kinds)), count))
        left -= count
    size = len(members)
    gbps = rng.choice([1.0, 5.0, 10.0, 40.0, 100.0], (size, size))
    gbps = np.minimum(gbps, gbps.T)
    rtt = np.full((size, size), 1e-4)
    return Pool(tuple(members), tuple(map(tuple, gbps.tolist())), tuple(map(tuple, rtt.tolist())))


def workload(
    model: str = "LLaMA-30B",
    lengths: tuple[int, int] = CONVERSATION,
    rate_per_s: float = 12.0,
    slo: Slo | None = None,
    **more: object,
) -> PoolWorkload:
    return PoolWorkload(
        models.model(model), slo or Slo(3.0, 0.2), *lengths, rate_per_s, **{"codec": "int4", **more}
    )  # type: ignore[arg-type]
