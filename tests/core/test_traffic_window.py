"""The sliding traffic window equals a recount from a list."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import pairwise
from math import sqrt
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.scaling.traffic_window import SHORT_WINDOW_SLOTS, ModelTraffic, TrafficWindow
from potluck.core.state.events import LinkReported
from potluck.core.values.types import Request, Slo

LENGTHS = st.integers(1, 200_000)


def request(tokens: int, model: str = "m", at_s: float = 0.0) -> Request:
    return Request("r", model, at_s, tokens, 1)


def observed_model(window: TrafficWindow, at_s: float, model: str = "m") -> ModelTraffic:
    model_traffic = window.observed(at_s).of(model)
    assert model_traffic is not None
    return model_traffic


@given(st.lists(st.tuples(st.floats(0, 30), LENGTHS), min_size=1, max_size=80), st.floats(1, 300))
def test_traffic_window_counts_and_means_equal_a_recount_of_its_slots(
    gaps: list[tuple[float, int]], window_s: float
) -> None:
    window, at_s, all_ = TrafficWindow(window_s, 5 * window_s), 0.0, []
    for gap, tokens in gaps:
        at_s += gap
        window.arrived(at_s, request(tokens))
        all_.append((at_s, tokens))
    slot_s = window_s / SHORT_WINDOW_SLOTS
    number = int(at_s / slot_s)
    inside = [tokens for t, tokens in all_ if int(t / slot_s) >= number - SHORT_WINDOW_SLOTS]
    got = observed_model(window, at_s)
    assert got.arrivals == len(inside)
    assert got.mean_prompt_tokens == pytest.approx(fmean(inside))
    assert sum(length.count for length in got.lengths) == len(inside)
    assert sum(length.tokens for length in got.lengths) == sum(inside)
    start_s = max((number - SHORT_WINDOW_SLOTS) * slot_s, all_[0][0])
    assert got.span_s == pytest.approx(max(at_s - start_s, slot_s))
    assert got.rate_per_s == pytest.approx(len(inside) / got.span_s)
    long_inside = [1 for t, _ in all_ if int(t / slot_s) >= number - 5 * SHORT_WINDOW_SLOTS]
    assert got.long_rate_per_s * got.long_span_s == pytest.approx(len(long_inside))


@given(st.lists(LENGTHS, min_size=1, max_size=60))
def test_length_bins_are_narrow_and_hold_their_prompts(lengths: list[int]) -> None:
    window = TrafficWindow()
    for tokens in lengths:
        window.arrived(0.0, request(tokens))
    bins = observed_model(window, 0.0).lengths
    assert all(a.high_tokens <= b.low_tokens for a, b in pairwise(bins))
    for item in bins:
        assert item.low_tokens <= item.mean_tokens < item.high_tokens
        assert item.high_tokens - item.low_tokens <= max(1, item.low_tokens / 8)
        assert item.count == sum(item.low_tokens <= tokens < item.high_tokens for tokens in lengths)


@given(st.lists(LENGTHS, min_size=1, max_size=200), st.lists(LENGTHS, min_size=1, max_size=6, unique=True))
def test_bucket_shares_sum_to_one_within_one_bin_of_error(lengths: list[int], edges: list[int]) -> None:
    window = TrafficWindow()
    for tokens in lengths:
        window.arrived(0.0, request(tokens))
    got, edges = observed_model(window, 0.0), sorted(edges)
    shares = got.bucket_shares(edges)
    assert sum(shares) == pytest.approx(1.0)
    exact = [0] * len(edges)
    for tokens in lengths:
        exact[min(bisect_left(edges, tokens), len(edges) - 1)] += 1
    cut = {e: next((b.count for b in got.lengths if b.low_tokens <= e < b.high_tokens - 1), 0) for e in edges}
    for place, share in enumerate(shares):
        slack = cut[edges[place]] + (cut[edges[place - 1]] if place else 0)
        assert abs(share * len(lengths) - exact[place]) <= slack + 1e-6
    for edge in edges:
        above = sum(tokens > edge for tokens in lengths)
        assert abs(got.bucket_shares([edge, 1 << 40])[1] * len(lengths) - above) <= cut[edge] + 1e-6


def test_rate_error_equals_the_poisson_deviation_and_grows_with_bursts() -> None:
    chance = random.Random(1)
    errors, rates = [], []
    for _ in range(60):
        window, at_s = TrafficWindow(120.0), 0.0
        while at_s < 1200.0:
            at_s += chance.expovariate(5.0)
            window.arrived(at_s, request(10))
        got = observed_model(window, at_s)
        errors.append(got.error_per_s)
        rates.append(got.rate_per_s)
    assert fmean(errors) == pytest.approx(sqrt(5.0 / 122.5), rel=0.25)
    assert fmean(errors) == pytest.approx(pstdev(rates), rel=0.3)
    window = TrafficWindow(120.0)
    for slot in range(48):
        for _ in range(50 if slot // 6 % 2 else 0):
            window.arrived(slot * 5.0 + 1.0, request(10))
    bursty = observed_model(window, 240.0)
    assert bursty.error_per_s > 3 * sqrt(bursty.arrivals) / bursty.span_s


def test_attainment_counts_ends_within_the_objective_and_refusals_as_missed() -> None:
    window = TrafficWindow(120.0, slos={"m": Slo(1.0, 0.1)})
    for ttft_s, tpot_s in ((0.5, 0.05), (2.0, 0.05), (0.5, 0.2), (1.0, 0.1)):
        window.finished(1.0, "m", 100, ttft_s, tpot_s)
    window.refused(1.0, "m")
    got = observed_model(window, 2.0)
    assert (got.finished, got.attained, got.refused, got.mean_output_tokens) == (4, 2, 1, 100.0)
    assert got.attainment == pytest.approx(2 / 5)
    window.finished(1.0, "other", 7)
    assert observed_model(window, 2.0, "other").attained == 1


def test_answer_beyond_its_e2e_objective_is_not_attained() -> None:
    window = TrafficWindow(120.0, slos={"m": Slo(1.0, 0.1, e2e_s=5.5)})
    for output_tokens in (51, 52):  # the first token after 0.5 s, then 0.1 s each
        window.finished(1.0, "m", output_tokens, 0.5, 0.1)
    assert observed_model(window, 2.0).attained == 1


def test_mean_output_length_is_kept_beyond_the_short_window() -> None:
    window = TrafficWindow(120.0, 1800.0)
    window.finished(1.0, "m", 100)
    assert observed_model(window, 600.0).mean_output_tokens == 100.0
    assert observed_model(window, 600.0).finished == 0
    assert observed_model(window, 4000.0).mean_output_tokens == 0.0


def test_watched_model_without_requests_has_a_rate_of_zero() -> None:
    window = TrafficWindow(120.0)
    window.watch(0.0, "m")
    got = observed_model(window, 60.0)
    assert (got.arrivals, got.rate_per_s, got.span_s) == (0, 0.0, 60.0)
    assert got.attainment == 1.0
    assert got.bucket_shares([10, 20]) == [0.0, 0.0]
    assert got.bucket_shares([5, 1 << 40])[1] == 0.0


def test_errors_of_mean_lengths_equal_the_sample_errors() -> None:
    window, chance = TrafficWindow(), random.Random(2)
    prompts = [chance.randint(50, 5000) for _ in range(400)]
    for tokens in prompts:
        window.arrived(1.0, request(tokens))
        window.finished(1.0, "m", tokens)
    got = observed_model(window, 2.0)
    assert got.output_error_tokens == pytest.approx(pstdev(prompts) / 20)
    assert got.prompt_error_tokens == pytest.approx(pstdev(prompts) / 20, rel=0.02)


def test_cached_tokens_shorten_observed_prompts_and_latest_link_reports_are_kept() -> None:
    window = TrafficWindow()
    window.arrived(1.0, request(1000), cached_tokens=900)
    window.arrived(1.0, request(10), cached_tokens=10)
    old, new = LinkReported("a", "b", 0.1, 0.0, 10.0), LinkReported("a", "b", 0.9, 5.0, 8.0)
    window.linked(old)
    window.linked(new)
    got = window.observed(2.0, {"m": 3})
    assert got.links == (new,)
    assert got.models[0].held == 3
    assert got.models[0].mean_prompt_tokens == (100 + 1) / 2


def test_late_arrival_event_counts_at_the_current_time() -> None:
    window = TrafficWindow(24.0)
    window.arrived(100.0, request(5))
    window.arrived(90.0, request(5))
    assert observed_model(window, 100.0).arrivals == 2


@given(st.lists(st.floats(0, 5), min_size=1, max_size=50))
def test_observing_the_window_does_not_change_it(gaps: list[float]) -> None:
    plain, looked, at_s = TrafficWindow(10.0), TrafficWindow(10.0), 0.0
    for gap in gaps:
        at_s += gap
        plain.arrived(at_s, request(9))
        looked.arrived(at_s, request(9))
        looked.observed(at_s)
    assert plain.observed(at_s) == looked.observed(at_s)


def test_rate_jump_exceeds_the_estimated_rate_error() -> None:
    """A quarter of an hour at 2 a second, then 6: within half a window the rise is beyond three deviations."""
    chance = random.Random(3)
    window, at_s = TrafficWindow(120.0), 0.0
    while at_s < 960.0:
        at_s += chance.expovariate(2.0 if at_s < 900.0 else 6.0)
        window.arrived(at_s, request(10))
    got = observed_model(window, at_s)
    assert got.rate_per_s - 2.0 > 3 * got.error_per_s
    while at_s < 1800.0:
        at_s += chance.expovariate(6.0)
        window.arrived(at_s, request(10))
    assert observed_model(window, at_s).error_per_s < 1.5 * sqrt(6.0 / 122.5)
