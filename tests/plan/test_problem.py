"""Demand buckets keep the tokens and span at most a factor of two."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.catalog import models, nodes
from potluck.core.errors import InputError
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.problem import PlanningProblem, buckets_of, model_demand, prefill_work

LLAMA = models.model("Llama-3.1-8B")
GPT_OSS = models.model("GPT-OSS-20B")


@st.composite
def traffics(draw: st.DrawFn) -> Traffic:
    lengths = draw(
        st.lists(st.tuples(st.integers(1, 60_000), st.integers(1, 4_000)), min_size=1, max_size=30)
    )
    weights = draw(st.lists(st.integers(1, 100), min_size=len(lengths), max_size=len(lengths)))
    total = sum(weights)
    bins = tuple(LengthBin(i, o, w / total) for (i, o), w in zip(lengths, weights, strict=True))
    share = draw(st.floats(0, 0.95))
    return Traffic("m", draw(st.just(0.0) | st.floats(1e-9, 1000)), bins, share)


def test_e2e_objective_tightens_the_planned_ttft_and_tpot() -> None:
    bins = (LengthBin(1000, 50, 0.5), LengthBin(900, 101, 0.4), LengthBin(800, 4000, 0.1))
    traffic, slo = Traffic("m", 1.0, bins), Slo(2.0, 0.1, 0.9, e2e_s=6.0)
    # 90 % of the answers have at most 101 tokens: 2 s + 100 x 0.1 s, twice what may be
    assert model_demand("m", LLAMA, slo, traffic).slo == Slo(1.0, 0.05, 0.9, 6.0)
    longer = model_demand("m", LLAMA, replace(slo, attainment=0.95), traffic).slo
    assert longer.ttft_s + 3999 * longer.tpot_s == pytest.approx(6.0)
    assert model_demand("m", LLAMA, replace(slo, e2e_s=12.0), traffic).slo.tpot_s == 0.1


@given(traffics(), st.sampled_from([LLAMA, GPT_OSS]))
def test_demand_buckets_keep_the_rate_and_span_at_most_a_factor_of_two(
    traffic: Traffic, model: object
) -> None:
    demands = buckets_of("m", model, traffic)  # type: ignore[arg-type]
    assert sum(d.rate_per_s for d in demands) == pytest.approx(traffic.rate_per_s)
    assert [d.bucket for d in demands] == list(range(len(demands)))
    for before, after in pairwise(demands):
        assert before.longest_tokens < after.input_tokens
    for demand in demands:
        shortest = min(
            b.input_tokens
            for b in traffic.lengths
            if b.input_tokens <= demand.longest_tokens
            and (demand.bucket == 0 or b.input_tokens > demands[demand.bucket - 1].longest_tokens)
        )
        work = prefill_work(model, [shortest, demand.longest_tokens])  # type: ignore[arg-type]
        assert work[1] <= 2.0 * work[0] * (1 + 1e-9)
        assert shortest <= demand.input_tokens <= demand.longest_tokens
        assert 0 <= demand.cached_tokens < demand.input_tokens
        assert demand.new_tokens >= 1
        assert demand.kv_bytes > 0


@given(traffics())
def test_demand_buckets_keep_the_tokens_up_to_rounding(traffic: Traffic) -> None:
    demands = buckets_of("m", LLAMA, traffic)
    wanted = traffic.rate_per_s * traffic.mean_input_tokens
    got = sum(d.rate_per_s * d.input_tokens for d in demands)
    assert wanted * (1 - 1e-9) <= got <= wanted + traffic.rate_per_s * (1 + 1e-9)


def test_longest_requests_beyond_the_slo_share_have_no_ttft_promise() -> None:
    bins = tuple(LengthBin(length, 100, 0.25) for length in (100, 1000, 10_000, 30_000))
    traffic = Traffic("m", 4.0, bins)
    promised = [d.promised for d in model_demand("m", LLAMA, Slo(1.0, 0.1, 0.7), traffic).buckets]
    assert promised == [True, True, True, False]
    assert all(d.promised for d in model_demand("m", LLAMA, Slo(1.0, 0.1, 1.0), traffic).buckets)
    assert model_demand("m", LLAMA, Slo(1.0, 0.1, 0.01), traffic).buckets[0].promised


def test_problem_without_gpus_or_models_is_refused() -> None:
    one = model_demand("m", LLAMA, Slo(1.0, 0.1), Traffic("m", 1.0, (LengthBin(100, 10, 1.0),)))
    empty = Region("home", (NodeOffer("1xL4", 1.0, 0),))
    with pytest.raises(InputError, match="no GPUs"):
        PlanningProblem((one,), (empty,), (nodes.node_type("L4"),))
    with pytest.raises(InputError, match="models"):
        PlanningProblem((), (empty,), ())
