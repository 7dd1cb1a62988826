"""The bounds against scipy's, and that they are as careful as they claim."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rehearse_builders import a_problem, a_traffic, a_trial
from scipy import stats

from potluck.core.state.policy import Policy
from potluck.rehearse.evidence import Evidence, evidence_of, student_t, wilson


@pytest.mark.parametrize("degrees", [1, 2, 4, 9, 15, 16, 20, 40, 200])
def test_students_t_is_the_books(degrees: int) -> None:
    assert student_t(degrees) == pytest.approx(stats.t.ppf(0.95, degrees), rel=1e-3)


@given(count=st.integers(1, 5000), share=st.floats(0, 1))
def test_wilsons_bound_is_the_books(count: int, share: float) -> None:
    kept = round(count * share)
    book = stats.binomtest(kept, count).proportion_ci(0.9, method="wilson").low
    assert wilson(kept / count, count) == pytest.approx(book, abs=1e-4)


def test_nothing_seen_proves_nothing() -> None:
    assert wilson(1.0, 0) == 0.0
    assert Evidence("m", 0.9, (), 0).lower == 0.0
    assert not Evidence("m", 0.99, (1.0, 1.0, 1.0), 30).holds
    assert Evidence("m", 0.99, (1.0, 1.0, 1.0), 3000).holds


def test_a_spread_between_runs_lowers_the_bound() -> None:
    calm = Evidence("m", 0.9, (0.93, 0.94, 0.93, 0.94, 0.93), 10_000)
    wild = Evidence("m", 0.9, (0.99, 0.85, 0.99, 0.85, 0.99), 10_000)
    assert calm.holds
    assert wild.mean == pytest.approx(calm.mean)
    assert not wild.holds
    assert wild.runs_kept == 3
    assert wild.margin < 0 < calm.margin


def test_the_bound_is_wrong_about_one_time_in_twenty() -> None:
    """Runs whose requests share their fate: a bound from single requests would be wrong far more often."""
    rng = np.random.default_rng(7)
    wrong = naive = 0
    for _ in range(600):
        runs = rng.binomial(40, 0.9, size=6) / 40  # 40 independent bursts of 25 requests
        seen = Evidence("m", 0.9, tuple(runs), 6 * 1000)
        wrong += seen.lower > 0.9
        naive += wilson(seen.mean, 6 * 1000) > 0.9
    assert wrong / 600 < 0.08
    assert naive / 600 > 0.2


def test_a_run_is_the_same_twice_and_its_warm_up_is_not_judged() -> None:
    traffic = (a_traffic(),)
    trial = a_trial(a_problem(*traffic), traffic, requests=300)
    once = evidence_of(trial, trial.world.plan, [3, 4])
    assert once == evidence_of(trial, trial.world.plan, [3, 4])
    assert once != evidence_of(trial, trial.world.plan, [5, 6])
    load = trial.source(3)
    cut_s = float(load.arrival_s[0]) + 0.2 * load.span_s
    other = trial.source(4)
    other_cut_s = float(other.arrival_s[0]) + 0.2 * other.span_s
    judged = int((load.arrival_s >= cut_s).sum() + (other.arrival_s >= other_cut_s).sum())
    assert once[0].requests == judged < 600


def test_a_plan_that_turns_people_away_does_not_hold() -> None:
    """Nine in ten in time were promised, and are; but a plan that serves all must not refuse the tenth."""
    runs = (0.94, 0.95, 0.94, 0.95, 0.94)
    assert Evidence("m", 0.9, runs, 10_000, answered=(0.999,) * 5).holds
    short = Evidence("m", 0.9, runs, 10_000, answered=runs)
    assert not short.holds
    assert short.margin < 0
    trial = a_trial(a_problem(a_traffic()), (a_traffic(rate_per_s=30.0),), requests=300)
    (crowded,) = evidence_of(replace(trial, policy=Policy()), trial.world.plan, [3, 4])
    assert max(crowded.answered) < 0.9
    (waiting,) = evidence_of(trial, trial.world.plan, [3, 4])
    assert waiting.answered == (1.0, 1.0)
