"""Groups to start from: hierarchical clustering of the GPUs by the bandwidth between them.

Every GPU starts as a cluster of its own. While some cluster cannot hold the model, the two with the best mean
bandwidth between their GPUs, at least one of them such a cluster, become one (average linkage); of equals the
smaller pair, so that a node falls into even parts. Clusters that never can hold it stay idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

from potluck.perf.sizes.capacity import USABLE_SHARE
from potluck.perf.sizes.memory import weight_bytes
from potluck.plan.search.deduce import Takes
from potluck.plan.search.evaluate import GpuGroup, PoolEvaluator, PoolUse
from potluck.plan.search.pool_workload import Pool

MOST_DEALT = 12
MARGIN = 1.15
"""How much more memory than the weights a first group gets, for KV."""


def starting_state(
    evaluator: PoolEvaluator,
    phases: tuple[int, ...],
    rng: Random,
    scale: float = 1.0,
    most_gpus: int | None = None,
) -> PoolUse:
    """Clusters that hold the model `scale` times over, each with a random phase that it can do."""
    pool = evaluator.deducer.pool
    model_bytes = weight_bytes(evaluator.deducer.work.model)

    def holds(cluster: Takes) -> bool:
        full = most_gpus is not None and size_of(cluster) >= most_gpus
        return full or usable_bytes(pool, cluster) >= model_bytes * MARGIN * scale

    groups, idle = [], []
    for cluster in clusters(pool, holds):
        small = most_gpus is None or size_of(cluster) <= most_gpus
        able = [p for p in phases if small and evaluator.number(GpuGroup(cluster, p)) >= 0]
        if able:
            groups.append(GpuGroup(cluster, rng.choice(able)))
        else:
            idle.append(cluster)
    return make_state(groups, joined(idle))


def dealt_state(
    evaluator: PoolEvaluator,
    phases: tuple[int, ...],
    rng: Random,
    kinds: Sequence[Sequence[int]],
    most_gpus: int,
) -> PoolUse:
    """A random number of groups that are dealt even shares of every kind of node, and random phases.

    Clusters keep like nodes together; groups of unlike ones that mirror each other are as often good.
    """
    pool = evaluator.deducer.pool
    count = rng.randint(2, max(2, min(MOST_DEALT, pool.gpus // 3)))
    hands: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    turn = 0
    for nodes in rng.sample(kinds, len(kinds)):
        pieces = -(-count // len(nodes))
        for node in nodes:
            gpus = pool.nodes[node].gpus
            for piece in range(pieces):
                size = gpus * (piece + 1) // pieces - gpus * piece // pieces
                if size:
                    hands[turn % count].append((node, size))
                    turn += 1
    groups, idle = [], []
    for hand in hands:
        takes = joined([tuple(hand)])
        if not takes:
            continue
        able = [
            p for p in phases if size_of(takes) <= most_gpus and evaluator.number(GpuGroup(takes, p)) >= 0
        ]
        if able:
            groups.append(GpuGroup(takes, rng.choice(able)))
        else:
            idle.append(takes)
    return make_state(groups, joined(idle))


def clusters(pool: Pool, holds: Callable[[Takes], bool]) -> list[Takes]:
    """Agglomerate until every cluster holds the model or is the only one left."""
    members: list[Takes] = [((i, 1),) for i, node in enumerate(pool.nodes) for _ in range(node.gpus)]
    done: list[Takes] = []
    while members:
        done += [cluster for cluster in members if holds(cluster)]
        members = [cluster for cluster in members if not holds(cluster)]
        # A cluster that is done takes no more in unless somebody is left alone.
        partners = members if len(members) > 1 else [*members, *done]
        if not members or len(partners) < 2:
            break
        first, second = _closest(pool, members, partners)
        for each in (first, second):
            (members if each in members else done).remove(each)
        members.append(joined((first, second)))
    return sorted(done + members)


def _closest(pool: Pool, members: list[Takes], partners: list[Takes]) -> tuple[Takes, Takes]:
    best: tuple[float, int, Takes, Takes] | None = None
    known: set[tuple[Takes, Takes]] = set()
    for i, first in enumerate(members):
        for j, second in enumerate(partners):
            if j == i and partners[j] is members[i]:
                continue
            if (first, second) in known:
                continue
            known.add((first, second))
            key = (-_mean_gbps(pool, first, second), size_of(first) + size_of(second), first, second)
            if best is None or key < best:
                best = key
    assert best is not None
    return best[2], best[3]


def _mean_gbps(pool: Pool, first: Takes, second: Takes) -> float:
    total = weight = 0.0
    for a, i in first:
        for b, j in second:
            inside = pool.nodes[a].type.interconnect.gb_per_s * 8.0
            total += i * j * (inside if a == b else pool.gbps[a][b])
            weight += i * j
    return total / weight


def size_of(takes: Takes) -> int:
    return sum(count for _, count in takes)


def usable_bytes(pool: Pool, takes: Takes) -> float:
    """Memory of a group that weights and KV may fill."""
    return sum(count * pool.nodes[node].type.gpu.memory_bytes for node, count in takes) * USABLE_SHARE


def joined(parts: Iterable[Takes]) -> Takes:
    """All GPUs of some groups together."""
    counts: dict[int, int] = {}
    for part in parts:
        for node, count in part:
            counts[node] = counts.get(node, 0) + count
    return tuple(sorted((node, count) for node, count in counts.items() if count))


def make_state(groups: Iterable[GpuGroup], idle: Takes) -> PoolUse:
    """A state in its canonical form."""
    return PoolUse(tuple(sorted(groups)), idle)
