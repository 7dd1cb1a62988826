"""Distributions become bins: means are kept, tails are resolved, nothing is drawn at random."""

from __future__ import annotations

from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_texts import changed_spec, parsed_spec

from potluck.core.errors import InputError
from potluck.core.values.length_laws import Z99
from potluck.spec import traffic
from potluck.spec.schema import LengthsIn
from potluck.spec.traffic import Group, cut, describe


def mean(groups: list[Group]) -> float:
    return sum(share * tokens for share, tokens in groups)


def length_groups(groups: int = 16, **written: object) -> list[Group]:
    return cut(LengthsIn.model_validate(written), groups)


def assert_sound_bins(groups: list[Group], most: int) -> None:
    assert 1 <= len(groups) <= most
    assert sum(share for share, _ in groups) == pytest.approx(1, abs=1e-12)
    assert all(share > 0 and tokens > 0 for share, tokens in groups)
    assert [tokens for _, tokens in groups] == sorted(tokens for _, tokens in groups)


def test_prfaas_truncated_lognormal_has_a_mean_of_27k_tokens() -> None:
    groups = length_groups(lognormal={"mu": 9.90, "sigma": 1.00, "min": 128, "max": 131072})
    assert_sound_bins(groups, 16)
    law = traffic.lognormal(9.90, 1.00, 128, 131072)
    x = np.exp(np.linspace(log(128), log(131072), 400_001))
    density = np.exp(-((np.log(x) - 9.9) ** 2) / 2)
    integral = float(np.trapezoid(x * density, np.log(x)) / np.trapezoid(density, np.log(x)))
    assert law.mean == pytest.approx(integral, rel=1e-6)
    assert mean(groups) == pytest.approx(integral, rel=1e-6)
    assert 26_500 < mean(groups) < 28_500


tokens = st.floats(1, 1e6)


@given(tokens, st.floats(0, 50), st.sampled_from([1, 4, 16]))
def test_length_bins_of_mean_and_cv_keep_the_mean(average: float, cv: float, number: int) -> None:
    groups = length_groups(number, mean=average, cv=cv)
    assert_sound_bins(groups, number)
    assert mean(groups) == pytest.approx(average, rel=1e-6)


@given(tokens, st.floats(1, 10_000))
def test_length_bins_of_median_and_p99_keep_the_mean(p50: float, ratio: float) -> None:
    groups = length_groups(p50=p50, p99=p50 * ratio if p50 * ratio < 1e7 else p50)
    assert_sound_bins(groups, 16)
    p99 = p50 * ratio if p50 * ratio < 1e7 else p50
    sigma = log(p99 / p50) / Z99
    assert mean(groups) == pytest.approx(p50 * exp(sigma**2 / 2), rel=1e-6)


@given(tokens, st.floats(0, 1e6))
def test_length_bins_of_a_uniform_distribution_keep_the_mean(low: float, width: float) -> None:
    groups = length_groups(uniform=[low, low + width])
    assert_sound_bins(groups, 16)
    assert mean(groups) == pytest.approx(low + width / 2, rel=1e-6)


@given(
    st.floats(0, 15), st.floats(0.05, 4), st.floats(0, 12), st.floats(0.01, 6), st.sampled_from([1, 4, 16])
)
def test_length_bins_of_a_truncated_lognormal_keep_the_mean(
    mu: float, sigma: float, low: float, width: float, number: int
) -> None:
    a, b = exp(low), min(exp(low + width), 1e7)
    try:
        law = traffic.lognormal(mu, sigma, a, b)
    except InputError:
        # Almost no mass between the two; the message has its own test.
        return
    assert a <= law.mean <= b
    groups = traffic.cut_law(law, number)
    assert_sound_bins(groups, number)
    assert mean(groups) == pytest.approx(law.mean, rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 9)), min_size=1, max_size=80))
def test_length_bins_of_weighted_values_keep_the_mean(pairs: list[tuple[int, int]]) -> None:
    values, weights = [float(v) for v, _ in pairs], [float(w) for _, w in pairs]
    if not sum(weights):
        weights = [1.0] * len(values)
    groups = length_groups(values=values, weights=weights)
    assert_sound_bins(groups, 16)
    assert mean(groups) == pytest.approx(np.average(values, weights=weights), rel=1e-9)


def test_few_length_values_are_kept_exactly() -> None:
    assert length_groups(values=[300, 100, 100], weights=[1, 1, 2]) == [(0.75, 100.0), (0.25, 300.0)]
    assert length_groups(mean=1024) == length_groups(mean=1024, cv=0) == [(1.0, 1024.0)]
    assert length_groups(p50=7, p99=7)[0][1] == pytest.approx(7)
    assert length_groups(uniform=[5, 5]) == [(1.0, 5.0)]


def test_no_length_bin_exceeds_its_share_of_requests_or_tokens() -> None:
    groups = length_groups(mean=2000, cv=3)
    assert max(share for share, _ in groups) <= 2 / 16 + 1e-9
    assert max(share * tokens for share, tokens in groups) / 2000 <= 2 / 16 + 1e-9
    # The law is still visible: shares below the median add up to about a half.
    median = 2000 / sqrt(10)
    assert abs(sum(share for share, tokens in groups if tokens < median) - 0.5) < 0.13


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 900)), min_size=1, max_size=200))
def test_joint_length_bins_keep_both_means(rows: list[tuple[int, int]]) -> None:
    x, y = [a for a, _ in rows], [b for _, b in rows]
    bins = traffic.joint_bins(x, y)
    assert len(bins) <= traffic.INPUT_GROUPS * traffic.OUTPUT_GROUPS
    assert sum(b.share for b in bins) == pytest.approx(1)
    assert sum(b.share * b.input_tokens for b in bins) == pytest.approx(np.mean(x), rel=1e-9)
    assert sum(b.share * b.output_tokens for b in bins) == pytest.approx(np.mean(y), rel=1e-9)
    assert bins == traffic.joint_bins(x, y)


def test_joint_length_bins_keep_the_correlation() -> None:
    x = np.arange(1, 2001)
    bins = traffic.joint_bins(x, 3 * x)
    assert all(b.output_tokens == pytest.approx(3 * b.input_tokens) for b in bins)
    seen = sum(b.share * b.input_tokens * b.output_tokens for b in bins)
    assert seen == pytest.approx(float(np.mean(3.0 * x * x)), rel=0.01)


def test_joint_length_bins_of_no_requests_are_refused() -> None:
    with pytest.raises(InputError, match="has no requests"):
        traffic.joint_bins([], [])


FORMS = [
    ("{mean: 1024}", 1024, "fixed 1024"),
    ("{mean: 1024, cv: 2}", 1024, "lognormal mean 1024 cv 2"),
    ("{p50: 100, p99: 1000}", 100 * exp((log(10) / Z99) ** 2 / 2), "lognormal p50 100 p99 1000"),
    ("{uniform: [10, 30]}", 20, "uniform 10-30"),
    ("{values: [1, 9]}", 5, "2 values"),
    ("{values: [1, 9], weights: [3, 1]}", 3, "2 values"),
    ("{lognormal: {mu: 5, sigma: 0.5}}", exp(5 + 0.125), "lognormal(5, 0.5) on [1, 1e+07]"),
    ("77", 77, "fixed 77"),
]


@pytest.mark.parametrize(("text", "average", "words"), FORMS)
def test_every_written_form_of_lengths_is_accepted(text: str, average: float, words: str) -> None:
    model = parsed_spec(changed_spec("input: 1024", f"input: {text}")).models[0]
    assert model.traffic.mean_input_tokens == pytest.approx(average, rel=1e-6)
    assert model.traffic.mean_output_tokens == pytest.approx(200, rel=1e-6)
    assert model.lengths_from.startswith(words)
    assert len(model.traffic.lengths) <= 64


def test_fixed_length_is_described_in_words() -> None:
    assert describe(LengthsIn(mean=5)) == "fixed 5"
