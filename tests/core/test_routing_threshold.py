"""The length threshold between regions: both regimes, and how it moves with the link."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from potluck.core.routing.template_weights import ModelWeights, RegionFlow, TemplateWeights
from potluck.core.routing.threshold import (
    LEAST_TOKENS,
    MOST_RAISED,
    LengthThreshold,
    PrefillChoice,
    after_report,
    decide,
    planned,
    rebased,
)
from potluck.core.state.events import LinkReported

tokens = st.integers(1, 200_000)


def report(utilisation: float, queued_bytes: float = 0.0, gbps: float = 10.0) -> LinkReported:
    return LinkReported("there", "here", utilisation, queued_bytes, gbps)


@given(tokens, tokens, tokens, tokens)
def test_scarce_bandwidth_looks_at_the_local_cache_only(t: int, total: int, here: int, there: int) -> None:
    here, there = min(here, total), min(there, total)
    choice = decide(LengthThreshold(t, t, scarce=True), total, here, there)
    assert choice == PrefillChoice(total - here > t, False)
    assert choice == decide(LengthThreshold(t, t, scarce=True), total, here, 0)


@given(tokens, tokens, tokens, tokens)
def test_abundant_bandwidth_uses_the_best_cache_anywhere(t: int, total: int, here: int, there: int) -> None:
    here, there = min(here, total), min(there, total)
    choice = decide(LengthThreshold(t, t, scarce=False), total, here, there)
    assert choice.remote == (total - max(here, there) > t)
    # The KV crosses exactly when the region that does not compute has the longer prefix.
    computing, other = (there, here) if choice.remote else (here, there)
    assert choice.fetch == (other > computing)


def test_a_congested_link_raises_the_threshold_until_it_clears() -> None:
    threshold = LengthThreshold(10_000.0, 10_000.0)
    seen = [threshold.tokens]
    for _ in range(5):
        threshold = after_report(threshold, report(0.95))
        seen.append(threshold.tokens)
    assert seen == sorted(seen)
    assert seen[-1] > 2 * seen[0]
    assert after_report(threshold, report(0.8)).tokens == threshold.tokens  # neither congested nor clear
    for _ in range(100):
        threshold = after_report(threshold, report(0.3))
    assert abs(threshold.tokens - 10_000.0) < 1.0


def test_a_queue_is_congestion_even_when_utilisation_is_low() -> None:
    threshold = LengthThreshold(10_000.0, 10_000.0)
    half_a_second = 0.5 * 10e9 / 8
    assert after_report(threshold, report(0.1, half_a_second * 0.9)).tokens == 10_000.0
    assert after_report(threshold, report(0.1, half_a_second * 1.1)).tokens > 10_000.0
    assert after_report(threshold, report(0.0, 0.0, gbps=0.0)).tokens > 10_000.0


@given(
    st.floats(0, 1e6),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e12), st.floats(0, 400)), max_size=60),
)
def test_the_threshold_stays_between_its_base_and_a_limit(
    base: float, reports: list[tuple[float, float, float]]
) -> None:
    threshold = LengthThreshold(base, base)
    for utilisation, queued, gbps in reports:
        threshold = after_report(threshold, report(utilisation, queued, gbps))
        assert base - 1e-6 <= threshold.tokens <= max(base, LEAST_TOKENS) * MOST_RAISED + 1e-6
        assert threshold.base_tokens == base


def test_loss_and_a_long_queue_of_prompts_are_congestion_too() -> None:
    threshold = LengthThreshold(10_000.0, 10_000.0, scarce=False)
    calm = report(0.1)
    assert after_report(threshold, calm._replace(lost_share=0.005)).tokens == 10_000.0
    lossy = after_report(threshold, calm._replace(lost_share=0.05))
    assert lossy.tokens > 10_000.0
    assert lossy.scarce
    assert after_report(threshold, calm, 0.9).tokens == 10_000.0
    waiting = after_report(threshold, calm, 1.1)
    assert waiting.tokens > 10_000.0
    assert not waiting.scarce  # the link itself has room


def test_a_threshold_of_nothing_rises_and_returns() -> None:
    threshold = LengthThreshold(0.0, 0.0)
    for _ in range(12):
        threshold = after_report(threshold, report(0.95))
    assert threshold.tokens > 5000
    assert rebased(threshold, 1000.0).tokens > 1000.0
    for _ in range(150):
        threshold = after_report(threshold, report(0.1))
    assert threshold.tokens < 1.0
    assert rebased(LengthThreshold(0.0, 0.0), 700.0) == LengthThreshold(700.0, 700.0)
    assert rebased(LengthThreshold(1000.0, 1500.0), 0.0).tokens > 512.0


def test_the_regime_has_a_gap_between_its_two_edges() -> None:
    threshold = LengthThreshold(1.0, 1.0, scarce=True)
    assert after_report(threshold, report(0.6)).scarce
    abundant = after_report(threshold, report(0.4))
    assert not abundant.scarce
    assert not after_report(abundant, report(0.6)).scarce
    assert after_report(abundant, report(0.75)).scarce


def test_a_new_base_keeps_the_reaction_to_congestion() -> None:
    raised = replace(LengthThreshold(1000.0, 1000.0), tokens=1500.0)
    assert rebased(raised, 2000.0) == LengthThreshold(2000.0, 3000.0)


def offers(local: tuple[float, ...], crossing: tuple[float, ...]) -> ModelWeights:
    longest = (1000.0, 4000.0, inf)
    none = (0.0, 0.0, 0.0)
    flows = (RegionFlow("there", "here", crossing),) if any(crossing) else ()
    return ModelWeights("m", longest, {("t", "here"): TemplateWeights(local, none, none)}, flows)


def test_the_plan_says_where_the_threshold_starts() -> None:
    assert planned(offers((1.0, 1.0, 0.0), (0.0, 0.0, 1.0))) == LengthThreshold(4000.0, 4000.0)
    assert planned(offers((1.0, 0.0, 0.0), (0.0, 1.0, 1.0))) == LengthThreshold(1000.0, 1000.0)
    # A third of the middle bucket crosses: its longest third.
    assert planned(offers((1.0, 2.0, 0.0), (0.0, 1.0, 1.0))) == LengthThreshold(3000.0, 3000.0)


def test_there_is_no_threshold_where_length_does_not_decide() -> None:
    assert planned(offers((1.0, 1.0, 1.0), (0.0, 0.0, 0.0))) is None
    assert planned(offers((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))) is None
    assert planned(offers((0.0, 1.0, 1.0), (1.0, 0.0, 0.0))) is None  # the short ones cross
