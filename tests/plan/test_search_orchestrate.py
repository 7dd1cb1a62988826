"""The transportation program against brute force and against HiGHS."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from papers.peak_costs import PeakCosts
from search_pools import paper_pool, workload

from potluck.core.errors import InputError
from potluck.plan.allocate.highs import INFINITY, Milp, solve_milp
from potluck.plan.search.deduce import deducer
from potluck.plan.search.evaluate import GpuGroup, PoolEvaluator, transport
from potluck.plan.search.kernels import DECODE, MIXED, PREFILL


def brute_force(
    prefill: np.ndarray, decode: np.ndarray, attained: np.ndarray, offered: float | None
) -> float:
    """Whole capacities have a best flow of whole numbers, so all of these are listed."""
    m, n = attained.shape
    best = 0.0
    most = [min(int(p), int(d)) for p in prefill for d in decode]
    for flat in product(*(range(k + 1) for k in most)):
        flow = np.array(flat).reshape(m, n)
        within = (flow.sum(axis=1) <= prefill).all() and (flow.sum(axis=0) <= decode).all()
        if within and (offered is None or flow.sum() <= offered):
            best = max(best, float((flow * attained).sum()))
    return best


def by_highs(
    prefill: np.ndarray, decode: np.ndarray, attained: np.ndarray, offered: float, links: np.ndarray
) -> float:
    m, n = attained.shape
    rows = [*np.kron(np.eye(m), np.ones((1, n))), *np.kron(np.ones((1, m)), np.eye(n)), np.ones(m * n)]
    matrix = np.array([*rows, *links.reshape(len(links), m * n)])
    limit = np.concatenate([prefill, decode, [offered], np.ones(len(links))])
    row, column = np.nonzero(matrix)
    free = np.full(m * n, INFINITY)
    milp = Milp(
        -attained.ravel(),
        np.zeros(m * n),
        free,
        np.zeros(m * n, bool),
        np.full(len(limit), -INFINITY),
        limit,
        row,
        column,
        matrix[row, column],
    )
    return -solve_milp(milp, time_limit_s=10.0, relax=True).objective


def test_transport_equals_brute_force_on_small_cases() -> None:
    rng = np.random.default_rng(1)
    for _ in range(120):
        m, n = int(rng.integers(1, 3)), int(rng.integers(1, 4))
        prefill, decode = rng.integers(0, 4, m).astype(float), rng.integers(0, 4, n).astype(float)
        attained = rng.uniform(0, 1, (m, n)) * (rng.random((m, n)) < 0.8)
        offered = float(rng.integers(0, 7)) if rng.random() < 0.5 else None
        value, flow = transport(prefill, decode, attained, offered)
        assert value == pytest.approx(brute_force(prefill, decode, attained, offered), abs=1e-9)
        assert value == pytest.approx(float((flow * attained).sum()), abs=1e-9)
        assert (flow >= 0).all()
        assert (flow.sum(axis=1) <= prefill + 1e-9).all()
        assert (flow.sum(axis=0) <= decode + 1e-9).all()


def test_transport_with_links_equals_highs() -> None:
    rng = np.random.default_rng(2)
    for _ in range(60):
        m, n, k = (int(rng.integers(1, top)) for top in (7, 7, 5))
        prefill, decode = rng.uniform(0, 3, m), rng.uniform(0, 3, n)
        attained, links = rng.uniform(0, 1, (m, n)), rng.uniform(0, 1, (k, m, n))
        links *= rng.random(links.shape) < 0.5
        offered = float(rng.uniform(0, 10))
        value, flow = transport(prefill, decode, attained, offered, links)
        assert value == pytest.approx(by_highs(prefill, decode, attained, offered, links), rel=1e-7, abs=1e-9)
        assert ((links * flow).sum(axis=(1, 2)) <= 1 + 1e-9).all()


def test_transport_refuses_arrays_of_wrong_shape_or_sign() -> None:
    with pytest.raises(InputError, match="needs 2 prefill and 3 decode rates"):
        transport(np.ones(3), np.ones(3), np.ones((2, 3)))
    with pytest.raises(InputError, match="not negative"):
        transport(np.ones(2), -np.ones(3), np.ones((2, 3)))


GROUPS = tuple(
    sorted(
        [
            GpuGroup(((4, 4),), PREFILL),
            GpuGroup(((4, 2), (5, 2)), PREFILL),
            GpuGroup(((0, 4),), DECODE),
            GpuGroup(((1, 4),), DECODE),
            GpuGroup(((6, 4),), MIXED),
        ]
    )
)


@pytest.mark.parametrize("gbps", [0.2, 0.5, 5.0, 40.0])
def test_routing_shares_add_up_and_stay_within_links(gbps: float) -> None:
    work = workload(rate_per_s=50.0)
    evaluator = PoolEvaluator(deducer(paper_pool(gbps=gbps), work, PeakCosts()))
    score = evaluator.score(GROUPS)
    routed = evaluator.orchestrated(GROUPS)
    assert evaluator.complete
    assert routed.goodput_per_s == pytest.approx(score.attainment * work.rate_per_s)
    x, y = routed.x(), routed.y()
    assert sum(x.values()) == pytest.approx(1.0)
    for source in x:
        assert sum(share for (i, _), share in y.items() if i == source) == pytest.approx(1.0)
    load: dict[tuple[int, int], float] = {}
    for pairing in routed.pairings:
        if pairing.source != pairing.target:
            ends = [evaluator.deduced(GROUPS[place]) for place in (pairing.source, pairing.target)]
            nodes = [[s.node for s in end.stages for _ in range(s.layers)] for end in ends if end]
            for link in zip(*nodes, strict=True):
                load[link] = load.get(link, 0.0) + pairing.rate_per_s * work.kv_bytes_per_layer
    for (a, b), bytes_per_s in load.items():
        assert a == b or bytes_per_s * 8 <= gbps * 1e9


def test_fast_score_equals_the_transport_program() -> None:
    work = workload(rate_per_s=2.0)
    evaluator = PoolEvaluator(deducer(paper_pool(), work, PeakCosts()))
    groups = tuple(group for group in GROUPS if group.phase != MIXED)
    score = evaluator.score(groups)
    rates = [[], []]
    for group in groups:
        result = evaluator.deduced(group)
        assert result is not None
        rates[group.phase].append(result.rate_per_s * work.headroom)
    routed = {(p.source, p.target): p.attained for p in evaluator.orchestrated(groups).pairings}
    flat = np.full((2, 2), float(np.mean(list(routed.values()))))
    value, _ = transport(np.array(rates[PREFILL]), np.array(rates[DECODE]), flat, work.rate_per_s)
    assert score.attainment * work.rate_per_s == pytest.approx(value, rel=0.05)


def test_int4_codec_never_attains_less_than_fp16() -> None:
    for gbps in (1.0, 5.0, 40.0):
        scores = []
        for codec in ("fp16", "int4"):
            evaluator = PoolEvaluator(deducer(paper_pool(gbps=gbps), workload(codec=codec), PeakCosts()))
            scores.append(evaluator.score(GROUPS).value)
        assert scores[1] >= scores[0]
