"""Forecasts: daily patterns, random walks, quantiles, and scaling ahead of a rise."""

from __future__ import annotations

import math
import random

import pytest
import scale_builders as build
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import InputError
from potluck.core.scaling.autoscaler import scaler_of
from potluck.core.scaling.forecast import BIN_S, DAY_BINS, Forecaster, _solved
from potluck.core.scaling.replan import BURST_S, INTERVAL_S
from potluck.core.scaling.rule import AskReplan
from potluck.core.state.facts import FleetFacts
from potluck.core.state.policy import Policy

PLAN = build.plan_of((build.template("t", closed=2.0),), {("t", "here"): 2})
FLEET = build.fleet_of(PLAN)


def daily_rates(count: int, noise: float = 0.03, seed: int = 1) -> list[float]:
    """A rate with a day's wave and some noise."""
    rng = random.Random(seed)
    swing = [5.0 * (1 + 0.6 * math.sin(2 * math.pi * i / DAY_BINS)) for i in range(count * DAY_BINS)]
    return [rate * math.exp(rng.gauss(0, noise)) for rate in swing]


def random_walk_rates(count: int, seed: int = 1, step: float = 0.1) -> list[float]:
    """A rate that nothing can be known of but that it stays about where it is."""
    rng, log = random.Random(seed), 0.0
    result = []
    for _ in range(count * DAY_BINS):
        log = 0.98 * log + rng.gauss(0, step)
        result.append(5.0 * math.exp(log))
    return result


def forecast_errors(rates: list[float], learn: int, ahead: int) -> tuple[float, float]:
    """Mean absolute error, in logs, of the forecast and of 'it stays', some bins ahead, over what follows."""
    forecaster = Forecaster(rates[:learn])
    mine = stays = 0.0
    for i in range(learn, len(rates) - ahead):
        now, then = rates[i - 1], rates[i - 1 + ahead]
        fit = forecaster._fits[ahead - 1]
        moves = forecaster._moves(math.log(now), ahead - 1)
        mine += abs(math.log(then / now) - fit.expected(moves))
        stays += abs(math.log(then / now))
        forecaster._add_bin(rates[i])
    return mine, stays


def test_forecast_learns_a_daily_pattern() -> None:
    mine, stays = forecast_errors(daily_rates(6, noise=0.01), 4 * DAY_BINS, 3)
    assert mine < 0.6 * stays


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_forecast_of_a_random_walk_is_hardly_worse_than_the_last_value(seed: int) -> None:
    mine, stays = forecast_errors(random_walk_rates(6, seed), 3 * DAY_BINS, 1)
    assert mine < 1.05 * stays


def test_forecast_ignores_a_single_outage() -> None:
    rates = daily_rates(6, noise=0.01)
    rates[3 * DAY_BINS : 3 * DAY_BINS + 4] = [0.0] * 4
    mine, stays = forecast_errors(rates, 4 * DAY_BINS, 3)
    assert mine < 0.8 * stays


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_forecast_quantile_holds_as_often_as_its_share(share: float) -> None:
    rates = random_walk_rates(8, seed=4)
    forecaster = Forecaster(rates[: 4 * DAY_BINS])
    kept = 0
    for i in range(4 * DAY_BINS, len(rates)):
        x = math.log(rates[i - 1])
        fit = forecaster._fits[0]
        kept += math.log(rates[i]) <= x + fit.expected(forecaster._moves(x, 0)) + fit.quantile(share)
        forecaster._add_bin(rates[i])
    assert kept / (4 * DAY_BINS) == pytest.approx(share, abs=0.06)


def test_forecast_sees_the_morning_rise_before_it_starts() -> None:
    rates = daily_rates(7)
    before = Forecaster(
        rates[: 6 * DAY_BINS + DAY_BINS - 12]
    )  # two hours before the wave's mean, rising steeply
    now = rates[6 * DAY_BINS + DAY_BINS - 13]
    outlook = before.outlook(now, 0.0, 3600.0, 0.5)
    assert outlook.mean_per_s > 1.1 * now
    assert "day" in outlook.reason or "week" in outlook.reason or "trend" in outlook.reason


def test_forecast_without_history_keeps_the_rate_with_a_default_error() -> None:
    outlook = Forecaster().outlook(4.0, 0.1, 600.0, 0.9)
    assert outlook.mean_per_s == pytest.approx(4.0)
    assert 4.5 < outlook.high_per_s < 6.0


def test_counted_arrivals_close_forecast_bins() -> None:
    forecaster = Forecaster()
    for tick in range(0, int(3 * BIN_S) + 1, 5):
        forecaster.count(float(tick), tick * 2)
    assert [math.exp(log) for log in forecaster._logs] == pytest.approx([2.0, 2.0, 2.0])
    forecaster.count(6 * BIN_S, int(6 * BIN_S * 2))
    assert len(forecaster._logs) == 6


@given(st.lists(st.floats(0.0, 1e6), max_size=200), st.floats(0.0, 1e6), st.floats(0.01, 0.99))
def test_forecast_is_a_positive_finite_rate_for_any_history(
    history: list[float], now: float, share: float
) -> None:
    outlook = Forecaster(history).outlook(now, 0.1, 3600.0, share)
    assert 0 < outlook.mean_per_s < math.inf
    assert 0 < outlook.high_per_s < math.inf


@given(st.integers(0, 10_000))
def test_forecast_regression_solves_its_equations(seed: int) -> None:
    rng = random.Random(seed)
    root = [[rng.uniform(-1, 1) for _ in range(4)] for _ in range(4)]
    rows = [
        [sum(root[i][k] * root[j][k] for k in range(4)) + (i == j) * 0.1 for j in range(4)] for i in range(4)
    ]
    right = [rng.uniform(-1, 1) for _ in range(4)]
    solved = _solved(rows, right)
    for row, wanted in zip(rows, right, strict=True):
        assert sum(a * x for a, x in zip(row, solved, strict=True)) == pytest.approx(wanted, abs=1e-6)


class RecordedScaling:
    """A rule that is shown a rate over time; what it asked for."""

    def __init__(self, policy: Policy, history: list[float]) -> None:
        self._scaler = scaler_of(policy, FleetFacts({}, {}, history={"m": tuple(history)}))
        self._ever = 0.0
        self.asked: list[tuple[float, float]] = []

    def show(self, from_s: float, to_s: float, rate_per_s: float) -> None:
        at_s = from_s
        while at_s < to_s:
            self._ever += rate_per_s * INTERVAL_S
            seen = build.traffic(rate_per_s, arrivals_ever=int(self._ever))
            for decision in self._scaler.on_tick(at_s, build.observed(at_s, seen), FLEET, PLAN):
                assert isinstance(decision, AskReplan)
                self.asked.append((at_s, dict(decision.rates_per_s)["m"]))
            assert self._scaler.why()
            at_s += INTERVAL_S


POLICY = Policy(scaling="ahead")


def test_ahead_scaling_asks_for_a_rise_at_once_and_for_a_drop_after_a_delay() -> None:
    asked = RecordedScaling(POLICY, [4.0] * DAY_BINS)
    asked.show(0.0, 1200.0, 4.0)
    first = asked.asked[-1][1]
    asked.show(1200.0, 1800.0, 8.0)
    rise = next(item for item in asked.asked if item[1] > 1.5 * first)
    assert rise[0] == 1200.0
    before = len(asked.asked)
    asked.show(1800.0, 1800.0 + POLICY.keep_s - INTERVAL_S, 4.0)
    assert all(rate > 1.5 * first for _, rate in asked.asked[before:])
    asked.show(1800.0 + POLICY.keep_s, 1800.0 + 2 * POLICY.keep_s, 4.0)
    assert asked.asked[-1][1] < 1.3 * first


@pytest.mark.parametrize("rate_per_s", [1.0, 4.0, 25.0])
def test_ahead_scaling_applies_headroom_once(rate_per_s: float) -> None:
    """What never moves is asked for as it is, and what chance adds to it, times headroom over what may be used."""
    asked = RecordedScaling(POLICY, [rate_per_s] * (2 * DAY_BINS))
    asked.show(0.0, 600.0, rate_per_s)
    chance = math.sqrt(rate_per_s / BURST_S)
    assert asked.asked[-1][1] == pytest.approx(
        (rate_per_s + chance) * POLICY.headroom / POLICY.busiest, rel=0.02
    )


def test_invalid_forecast_settings_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="forecast_share"):
        Policy(forecast_share=1.0)
    with pytest.raises(InputError, match="busiest"):
        Policy(busiest=0.0)
    with pytest.raises(InputError, match="keep_s"):
        Policy(keep_s=0.0)
