"""The best operating point against a scan over every batch, and what each limit is called."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.catalog import models, nodes
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import Confidence
from potluck.core.values.types import Role, Slo
from potluck.perf.kv_capacity import STEP_TOKENS
from potluck.perf.phases import CHUNK_TOKENS, chunked_iteration_s
from potluck.perf.step_timer import Floats, StepBatch, StepTimer, steps
from potluck.perf.throughput import (
    MAX_BATCH,
    MAX_STEP_TPOTS,
    MAX_TPOT_SHARE,
    MIN_BUDGET_TOKENS,
    OperatingPoint,
    RequestLengths,
    best_mixed_pipeline,
    best_operating,
    mixed_steps,
    paced_budget,
)
from potluck.perf.timers.pipeline_timer import PipelineTimer, pipeline
from potluck.perf.timers.roofline import roofline


@dataclass(frozen=True)
class LinearTimer:
    """A timer whose steps cost base + token * tokens + context * (decode context and cached)."""

    base_s: float = 5e-3
    token_s: float = 2e-5
    context_s: float = 2e-8
    crowd_s: float = 0.0  # Per squared decode: makes large batches serve less.

    @property
    def confidence(self) -> Confidence:
        return "assumed"

    def step_s(self, batch: StepBatch) -> Floats:
        seen = batch.decode_context + (batch.chunk_new * batch.chunk_cached).sum(axis=1)
        crowd = self.crowd_s * batch.decodes**2
        time = self.base_s + self.token_s * batch.tokens + self.context_s * seen + crowd
        return np.where(batch.tokens > 0, time, 0.0)


def by_hand(timer: LinearTimer, tokens_in: int, tokens_out: int, batch: int) -> tuple[float, float, float]:
    """(rate, TPOT, TTFT) of a mixed replica with so many decodes, from the definition."""
    context = tokens_in + tokens_out / 2
    wanted, room = batch * tokens_in / tokens_out, max(CHUNK_TOKENS - batch, 1)

    def step(chunk: float, cached: float) -> float:
        seen = batch * context + chunk * cached
        crowd = timer.crowd_s * batch**2
        return timer.base_s + timer.token_s * (chunk + batch) + timer.context_s * seen + crowd

    chunk = min(max(wanted, tokens_in), room)
    with_s, without_s = step(chunk, max(tokens_in - chunk, 0.0) / 2), step(0.0, 0.0)
    share = wanted / chunk
    if share >= 1.0:
        tpot, wait = share * with_s, with_s / 2
    else:
        tpot = share * with_s + (1 - share) * without_s
        wait = (share * with_s**2 + (1 - share) * without_s**2) / (2 * tpot)
    turns = ceil(tokens_in / room)
    own = tokens_in / turns
    return batch / (tokens_out * tpot), tpot, wait + sum(step(own, turn * own) for turn in range(turns))


def best_of_scan(timer: LinearTimer, tokens_in: int, tokens_out: int, memory: int, slo: Slo | None) -> float:
    best = 0.0
    for batch in range(1, min(memory, MAX_BATCH) + 1):
        rate, tpot, ttft = by_hand(timer, tokens_in, tokens_out, batch)
        if slo is None or (tpot <= slo.tpot_s and ttft <= slo.ttft_s):
            best = max(best, rate)
    return best


timers = st.builds(
    LinearTimer,
    st.floats(1e-3, 3e-2),
    st.floats(1e-6, 1e-4),
    st.floats(1e-9, 1e-7),
    st.sampled_from([0.0, 1e-7, 1e-5]),
)


slos = st.none() | st.builds(Slo, st.floats(0.02, 3.0), st.floats(0.005, 0.2))


@settings(max_examples=40)
@given(timers, st.integers(1, 6000), st.integers(1, 2000), st.integers(0, 2000), slos)
def test_best_operating_point_equals_a_full_scan(
    timer: LinearTimer, tokens_in: int, tokens_out: int, memory: int, slo: Slo | None
) -> None:
    """The grid grows by an eighth at most, so no more than an eighth is lost between its points."""
    result = best_operating(timer, tokens_in, tokens_out, memory, slo)
    truth = best_of_scan(timer, tokens_in, tokens_out, memory, slo)
    if result is None:
        assert truth == 0.0
        return
    assert truth / 1.13 <= result.requests_per_s <= truth * (1 + 1e-9)
    rate, tpot, ttft = by_hand(timer, tokens_in, tokens_out, result.batch)
    assert (result.requests_per_s, result.tpot_s, result.ttft_s) == pytest.approx((rate, tpot, ttft))
    assert 1 <= result.batch <= min(memory, MAX_BATCH)
    if slo is not None:
        assert result.tpot_s <= slo.tpot_s
        assert result.ttft_s <= slo.ttft_s


@pytest.mark.parametrize("largest", range(20, MAX_BATCH, 67))
def test_best_batch_is_within_an_eighth_of_the_objective_limit(largest: int) -> None:
    """The rate is proportional to the batch, and TPOT allows exactly this one."""
    timer = LinearTimer(token_s=0.0, context_s=0.0, crowd_s=1e-12)
    result = best_operating(timer, 10, 10, 10 * MAX_BATCH, Slo(10.0, 5e-3 + 1e-12 * (largest + 0.5) ** 2))
    assert result is not None
    assert largest / 1.125 <= result.batch <= largest


@given(timers, st.integers(1, 4000), st.integers(1, 1000), st.integers(1, 1500), slos, st.floats(1.0, 5.0))
def test_looser_objective_never_lowers_the_best_rate(
    timer: LinearTimer, tokens_in: int, tokens_out: int, memory: int, slo: Slo | None, factor: float
) -> None:
    loose = None if slo is None else Slo(slo.ttft_s * factor, slo.tpot_s * factor)
    tight_rate = rate_of(best_operating(timer, tokens_in, tokens_out, memory, slo))
    assert rate_of(best_operating(timer, tokens_in, tokens_out, memory, loose)) >= tight_rate
    assert rate_of(best_operating(timer, tokens_in, tokens_out, memory, None)) >= tight_rate


def rate_of(operating_point: OperatingPoint | None) -> float:
    return 0.0 if operating_point is None else operating_point.requests_per_s


LIMITS = [
    # timer, memory, slo, limit: what stops the replica
    (LinearTimer(), 100, None, "memory"),
    (LinearTimer(), 100, Slo(100.0, 100.0), "memory"),
    (LinearTimer(), 10 * MAX_BATCH, None, "batch"),
    (LinearTimer(), 10 * MAX_BATCH, Slo(100.0, 0.02), "tpot"),
    (LinearTimer(), 10 * MAX_BATCH, Slo(0.02, 100.0), "ttft"),
    (LinearTimer(crowd_s=1e-4), 10 * MAX_BATCH, None, "compute"),
    (LinearTimer(crowd_s=1e-4), 10 * MAX_BATCH, Slo(100.0, 100.0), "compute"),
]


@pytest.mark.parametrize(("timer", "memory", "slo", "limit"), LIMITS)
def test_limit_of_the_best_operating_point_is_named(
    timer: LinearTimer, memory: int, slo: Slo | None, limit: str
) -> None:
    result = best_operating(timer, 200, 200, memory, slo)
    assert result is not None
    assert result.limit == limit
    if limit == "memory":
        assert result.batch == memory
    if limit == "batch":
        assert result.batch == MAX_BATCH


@dataclass(frozen=True)
class WaveTimer(LinearTimer):
    def step_s(self, batch: StepBatch) -> Floats:
        return np.where(batch.tokens > 0, 5e-3 * np.ceil(batch.decodes / 64) ** 0.9, 0.0)


def test_local_dip_in_the_rate_does_not_hide_the_tpot_limit() -> None:
    """At 64 a wave is full and 65 serves less, but 128 would serve more: TPOT is what stops it there."""
    result = best_operating(WaveTimer(), 200, 200, 1000, Slo(100.0, 6e-3), "decode")
    assert result is not None
    assert result.batch <= 64
    assert result.limit == "tpot"


@pytest.mark.parametrize("role", ["mixed", "prefill", "decode"])
def test_no_operating_point_exists_without_memory_for_a_request(role: Role) -> None:
    assert best_operating(LinearTimer(), 100, 100, 0, None, role) is None


@pytest.mark.parametrize(
    ("role", "slo"),
    [
        ("mixed", Slo(10.0, 1e-3)),
        ("mixed", Slo(1e-3, 10.0)),
        ("decode", Slo(10.0, 1e-3)),
        ("prefill", Slo(1e-3, 10.0)),
    ],
)
def test_no_operating_point_exists_for_an_impossible_objective(role: Role, slo: Slo) -> None:
    """A step takes 5 ms at least."""
    assert best_operating(LinearTimer(), 100, 100, 50, slo, role) is None


@pytest.mark.parametrize(("ttft_s", "prompts"), [(1.0, 8), (0.1, 4), (0.03, 1)])
def test_prefill_replica_batches_prompts_within_budget_and_ttft(ttft_s: float, prompts: int) -> None:
    """As many as its budget has room for, and as leave the first token in time."""
    result = best_operating(LinearTimer(), 1000, 300, 50, Slo(ttft_s, 1e-9), "prefill")
    assert result is not None
    assert result.batch == prompts
    assert result.ttft_s == pytest.approx(5e-3 + 2e-5 * 1000 * prompts)
    assert result.requests_per_s == pytest.approx(prompts / result.ttft_s)


def test_prompt_beyond_the_token_budget_is_prefilled_in_chunks() -> None:
    result = best_operating(LinearTimer(), STEP_TOKENS + 100, 300, 50, None, "prefill")
    assert result is not None
    chunks_s = 2 * 5e-3 + 2e-5 * (STEP_TOKENS + 100) + 2e-8 * 100 * STEP_TOKENS
    assert 1 / result.requests_per_s == result.ttft_s == pytest.approx(chunks_s)


@given(timers, st.integers(2, 4000), st.integers(2, 1000), st.integers(1, 500))
def test_whole_chunks_cost_no_less_than_evenly_spread_tokens(
    timer: LinearTimer, tokens_in: int, tokens_out: int, batch: int
) -> None:
    """Steps here are linear in tokens, so when a chunk takes is all the same but for its context."""
    here = mixed_steps(replace(timer, context_s=0.0), np.array([float(batch)]), tokens_in, tokens_out)
    wanted = batch * tokens_in / tokens_out
    even = timer.base_s + timer.token_s * (batch + wanted) + timer.crowd_s * batch**2
    if here.share[0] <= 1.0:
        assert here.step_s[0] == pytest.approx(even)
    else:
        assert here.step_s[0] > even * (1 - 1e-9)


def test_decode_replica_does_no_prefill() -> None:
    result, mixed = (best_operating(LinearTimer(), 1000, 300, 64, None, role) for role in ("decode", "mixed"))
    assert result is not None
    assert mixed is not None
    step = 5e-3 + 64 * (2e-5 + 2e-8 * 1150)
    assert (result.batch, result.chunk_tokens) == (64, 0.0)
    assert result.tpot_s == pytest.approx(step)
    assert result.requests_per_s == pytest.approx(64 / (300 * step))
    assert result.requests_per_s > mixed.requests_per_s


def test_prompts_beyond_the_token_budget_limit_the_rate_of_a_mixed_replica() -> None:
    """4,000 tokens in, 1 out: however many decode, no more prompts finish than the chunks let through."""
    result = best_operating(LinearTimer(context_s=0.0), 4000, 1, 500, None)
    assert result is not None
    fastest = CHUNK_TOKENS / (5e-3 + 2e-5 * CHUNK_TOKENS) / 4000
    assert result.chunk_tokens == CHUNK_TOKENS - result.batch
    assert result.requests_per_s == pytest.approx(fastest, rel=0.02)


SLO = Slo(2.5, 0.1, 0.9)


def timer(node: str, tp: int) -> StepTimer:
    return roofline(models.model("Qwen3-32B"), nodes.node_type(node), tp)


def step_s(each: StepTimer, budget: int, slo: Slo) -> float:
    result = best_operating(each, 1155, 211, 60, slo)
    assert result is not None
    return float(chunked_iteration_s(each, budget - result.batch, 0.0, result.batch, 1155 + 211 / 2)[0])


@pytest.mark.parametrize("tpot_s", [0.06, 0.08, 0.1, 0.15])
def test_paced_token_budget_is_the_largest_within_the_tpot_objective(tpot_s: float) -> None:
    slow, slo = timer("2xL40S", 2), Slo(2.5, tpot_s, 0.9)
    budget = paced_budget(slow, 1155, 211, 60, slo)
    assert MIN_BUDGET_TOKENS < budget < CHUNK_TOKENS
    assert step_s(slow, budget, slo) <= MAX_STEP_TPOTS * tpot_s < step_s(slow, 2 * budget, slo)


def test_paced_token_budget_is_larger_on_a_faster_gpu() -> None:
    assert paced_budget(timer("1xH100", 1), 1155, 211, 60, SLO) > paced_budget(
        timer("2xL40S", 2), 1155, 211, 60, SLO
    )


def test_paced_token_budget_is_unchanged_for_an_impossible_objective() -> None:
    assert paced_budget(timer("2xL40S", 2), 1155, 211, 60, Slo(2.5, 0.001, 0.9)) == CHUNK_TOKENS


def test_paced_token_budget_never_falls_below_its_minimum() -> None:
    slow = timer("2xL40S", 2)
    slos = [Slo(2.5, tpot_ms / 1000, 0.9) for tpot_ms in range(30, 80)]
    tight = next(slo for slo in slos if best_operating(slow, 1155, 211, 60, slo))
    assert (
        MIN_BUDGET_TOKENS
        <= paced_budget(slow, 1155, 211, 60, tight)
        <= paced_budget(slow, 1155, 211, 60, SLO)
    )


MODEL = models.model("LLaMA-30B")


NODES = {nodes.canonical(name): nodes.node_type(name) for name in ("2xRTX4090", "4xA10")}


def timer_of(*layers: int) -> PipelineTimer:
    kinds = sorted(NODES)
    stages = [
        Stage(layer, (StageNode(kinds[i % 2], NODES[kinds[i % 2]].gpus),)) for i, layer in enumerate(layers)
    ]
    return pipeline(MODEL, Layout(tuple(stages)), NODES)


TIMERS = (timer_of(30, 30), timer_of(25, 20, 15))


@settings(max_examples=12)
@given(
    timer=st.sampled_from(TIMERS),
    new=st.integers(64, 1500),
    output=st.integers(16, 300),
    room=st.integers(2, 200),
    ttft_s=st.floats(0.5, 6.0),
    tpot_s=st.floats(0.05, 0.3),
)
def test_mixed_pipeline_operating_point_keeps_its_objective(
    timer: PipelineTimer, new: int, output: int, room: int, ttft_s: float, tpot_s: float
) -> None:
    result = best_mixed_pipeline(timer, RequestLengths(new, 0, output, new), room, Slo(ttft_s, tpot_s))
    if result is None:
        return
    lanes, batch, chunk = len(timer.stages), result.batch, result.chunk_tokens
    assert lanes * batch <= room

    def turn_s(tokens: int) -> float:
        context = batch * (new + output / 2)
        work = steps(tokens, max(new - tokens, 0) / 2, batch, context)
        if not tokens:
            work = steps(decodes=batch, decode_context=context)
        return float(max(lanes * timer.interval_s(work)[0], timer.step_s(work)[0]))

    used = batch * new / output / chunk
    assert used < 1
    assert result.tpot_s == pytest.approx(used * turn_s(chunk) + (1 - used) * turn_s(0))
    assert result.tpot_s <= MAX_TPOT_SHARE * tpot_s
    assert ceil(new / chunk) * turn_s(chunk) <= result.ttft_s <= ttft_s
    assert result.requests_per_s == pytest.approx(lanes * batch / output / result.tpot_s)


def test_mixed_pipeline_has_no_operating_point_for_an_objective_it_would_miss() -> None:
    timer = TIMERS[0]
    assert best_mixed_pipeline(timer, RequestLengths(1000, 0, 100, 1000), 40, Slo(0.05, 0.1)) is None
    assert best_mixed_pipeline(timer, RequestLengths(1000, 0, 100, 1000), 1, Slo(3.0, 0.2)) is None
    short, long = (
        best_mixed_pipeline(timer, RequestLengths(1000, 0, 100, n), 40, Slo(1.5, 0.2)) for n in (1000, 1900)
    )
    assert short is not None
    assert long is None or long.requests_per_s <= short.requests_per_s
