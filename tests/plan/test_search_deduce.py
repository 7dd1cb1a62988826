"""The parallel configuration of a group against plain enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest
from papers.peak_costs import PeakCosts
from search_pools import paper_pool, random_pool, workload

from potluck.catalog import models
from potluck.core.routing.capacity import MARGIN
from potluck.core.values.types import Slo
from potluck.plan.search.deduce import ConfigurationSearch, GroupConfiguration, deducer, even_cuts
from potluck.plan.search.kernels import DECODE, MIXED, PREFILL, best_path
from potluck.plan.search.workload import CalibratedCosts, PoolWorkload

LAYERS = 9
KINDS = ("A5000", "RTX3090Ti", "A40", "A6000", "L4")


def small_work(rng: np.random.Generator) -> PoolWorkload:
    """A model of few but wide layers, so that memory binds and all splits can be listed."""
    model = models.model("Llama-3.1-70B")
    count = int(rng.integers(5, LAYERS + 1))
    wide = replace(model, layers=model.layers[:count], weight_bits=float(rng.choice([16.0, 64.0])))
    lengths = int(rng.integers(100, 6000)), int(rng.integers(5, 500))
    slo = Slo(float(rng.uniform(0.05, 2.0)), float(rng.uniform(0.005, 0.1)))
    return PoolWorkload(wide, slo, *lengths, 1.0, "int4")


def compositions(total: int, parts: int) -> np.ndarray:
    cuts = [(0, *cut, total) for cut in combinations(range(1, total), parts - 1)]
    return np.diff(np.array(cuts), axis=1)


def best_goodput(source: ConfigurationSearch, takes: tuple[tuple[int, int], ...], phase: int) -> float:
    """By listing every cut, order, split and batch; shares only the tables with what it checks."""
    best = 0.0
    for chosen in product(*(even_cuts(n, source.costs.degrees[node]) for node, n in takes)):
        stages = [(node, tp) for (node, _), cut in zip(takes, chosen, strict=True) for tp in cut]
        if len(stages) <= min(8, source.work.model.layer_count):
            best = max(best, _of_stages(source, stages, phase))
    return best


def _of_stages(source: ConfigurationSearch, stages: list[tuple[int, int]], phase: int) -> float:
    work, costs, t = source.work, source.costs, source.tables
    alpha, beta = source.wires.hop_alpha_s, source.wires.hop_s_per_byte
    nominal = t.token_bytes * work.input_tokens

    def way_s(order: tuple[int, ...]) -> float:
        hops = list(pairwise(order))
        return sum(alpha[h] + nominal * beta[h] for h in hops) + (alpha[order[-1], order[0]] if hops else 0.0)

    order = min(set(permutations(node for node, _ in stages)), key=way_s)
    hops = list(pairwise(order))
    alphas = sum(alpha[h] for h in hops) + (alpha[order[-1], order[0]] if hops else 0.0)
    betas = [beta[h] for h in hops] or [0.0]
    kinds = [costs.kinds[stage] for stage in stages]
    splits, count = compositions(work.model.layer_count, len(stages)), len(stages)
    best = 0.0
    for b, batch in enumerate([1.0] if phase == PREFILL else costs.batches):
        table = {PREFILL: costs.prefill, DECODE: costs.decode[:, b], MIXED: costs.mixed[:, b]}[phase][kinds]
        kv = costs.kv_bytes[kinds, 0] * (count + 1) if phase == PREFILL else costs.kv_bytes[kinds, 1]
        if phase != PREFILL:
            kv = kv * (count * batch + (1 if phase == MIXED else 0))
        need = splits * (costs.layer_bytes[kinds] + kv)
        fits = (need <= costs.room[kinds, 1 if count == 1 else 0]).all(axis=1)
        time_s = splits * table[:, 0] + table[:, 1]
        tokens = {PREFILL: work.input_tokens, DECODE: batch, MIXED: batch + costs.chunk_tokens[b]}[phase]
        sent = tokens * t.token_bytes
        interval = np.maximum(time_s.max(axis=1), sent * max(betas))
        latency = time_s.sum(axis=1) + alphas + sent * sum(betas)
        if phase == PREFILL:
            slack = t.ttft_s - latency
            h = work.headroom
            share = np.where(slack >= 0, 1 - h * np.exp(-2 * (1 - h) * np.maximum(slack, 0) / interval), 0)
            goodput = share / interval
        else:
            cycle = np.maximum(count * interval, latency)
            goodput = np.where(cycle <= work.slo.tpot_s, count * batch / (cycle * work.output_tokens), 0.0)
        best = max(best, float(np.where(fits, goodput, 0.0).max()))
    return best


def random_takes(rng: np.random.Generator, source: ConfigurationSearch) -> tuple[tuple[int, int], ...]:
    counts = [int(rng.integers(0, node.gpus + 1)) for node in source.pool.nodes]
    takes = [(node, count) for node, count in enumerate(counts) if count][:3]
    while sum(count for _, count in takes) > 6:
        takes.pop()
    return tuple(takes)


def goodput(group_configuration: GroupConfiguration | None) -> float:
    return group_configuration.goodput_per_s if group_configuration else 0.0


def test_group_configuration_equals_enumeration_on_random_groups() -> None:
    rng = np.random.default_rng(7)
    compared = useful = 0
    for _ in range(60):
        source = deducer(random_pool(rng, 12, KINDS), small_work(rng), PeakCosts())
        for _ in range(5):
            takes = random_takes(rng, source)
            if not takes:
                continue
            for phase in (PREFILL, DECODE):
                result = source.best(takes, phase)
                wanted = best_goodput(source, takes, phase)
                assert goodput(result) == pytest.approx(wanted, rel=1e-9, abs=1e-15)
                useful += wanted > 0
            compared += 1
    assert compared >= 200
    assert useful >= 150


def test_mixed_configuration_keeps_ttft_and_tpot_within_the_best_cycle() -> None:
    rng = np.random.default_rng(8)
    for _ in range(20):
        source = deducer(random_pool(rng, 8, KINDS), small_work(rng), PeakCosts())
        takes = random_takes(rng, source)
        result = source.best(takes, MIXED) if takes else None
        if result is not None:
            assert result.service_s <= MARGIN * source.work.slo.tpot_s  # as admission does
            assert result.latency_s <= source.work.slo.ttft_s
            assert result.rate_per_s <= best_goodput(source, takes, MIXED) * (1 + 1e-9)


def best_order(per_node: Sequence[tuple[int, int]], hop_s: np.ndarray, back_s: np.ndarray) -> list[int]:
    """Nodes in the order of stages whose hops, and the way back of the token, take least."""
    counts = np.array([count for _, count in per_node], np.int64)
    size, nodes = int(np.prod(counts + 1)), len(per_node)
    path = np.zeros(int(counts.sum()), np.int64)
    best_path(counts, hop_s, back_s, np.zeros((size, nodes)), np.zeros((size, nodes), np.int64), path)
    return path.tolist()


def test_stage_order_equals_the_best_of_all_orders() -> None:
    rng = np.random.default_rng(9)
    for _ in range(150):
        size = int(rng.integers(2, 5))
        hop, back = rng.uniform(0.1, 1.0, (size, size)), rng.uniform(0.0, 0.3, (size, size))
        per_node = tuple((i, int(rng.integers(1, 3))) for i in range(size))
        stages = [i for i, count in per_node for _ in range(count)]

        def way_s(order: Sequence[int], hop: np.ndarray = hop, back: np.ndarray = back) -> float:
            return sum(hop[a, b] for a, b in pairwise(order)) + back[order[-1], order[0]]

        result = best_order(per_node, hop, back)
        assert sorted(result) == stages
        assert way_s(result) == pytest.approx(min(way_s(order) for order in set(permutations(stages))))


def test_stage_order_visits_a_hub_between_its_spokes() -> None:
    far, near = 10.0, 1.0
    hop = np.full((3, 3), far)
    hop[0, :] = hop[:, 0] = near
    assert best_order(((0, 1), (1, 1), (2, 1)), hop, np.zeros((3, 3)))[1] == 0


def test_even_cuts_divides_gpus_into_equal_tp_degrees() -> None:
    assert even_cuts(4, (1, 2, 4)) == [(1, 1, 1, 1), (2, 2), (4,)]
    assert even_cuts(7, (1, 2, 4)) == [(1,) * 7, (2, 2, 2, 1), (4, 2, 1)]


def test_stages_hold_all_layers_and_use_every_gpu_of_a_group() -> None:
    source = deducer(paper_pool(), workload(), CalibratedCosts())
    for takes in (((4, 8),), ((2, 2), (5, 2)), ((0, 4), (1, 3))):
        for phase in (PREFILL, DECODE, MIXED):
            result = source.best(takes, phase)
            assert result is not None
            assert sum(stage.layers for stage in result.stages) == 60
            for node, count in takes:
                assert sum(stage.tp for stage in result.stages if stage.node == node) == count


def test_group_too_small_for_the_model_has_no_configuration() -> None:
    source = deducer(paper_pool(), workload(), PeakCosts())
    assert all(source.best(((2, 2),), phase) is None for phase in (PREFILL, DECODE, MIXED))


def test_fixed_configuration_is_timed_the_same_as_when_found() -> None:
    source = deducer(paper_pool(), workload(), PeakCosts())
    for takes in (((4, 4),), ((2, 2), (5, 2)), ((4, 2), (6, 2))):
        for phase in (PREFILL, DECODE):
            result = source.best(takes, phase)
            assert result is not None
            assert source.fixed(result.stages, phase) == result
            other = source.fixed(result.stages, DECODE if phase == PREFILL else PREFILL)
            assert goodput(other) <= goodput(source.best(takes, 1 - phase)) * (1 + 1e-12)
