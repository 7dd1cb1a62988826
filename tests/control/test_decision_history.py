"""What the gateway decided and what was asked of it, kept in the state, whoever reads and whoever died."""

from __future__ import annotations

from math import sin, tau
from pathlib import Path
from typing import Any

from potluck.control.decision_history import DAY_BINS, DecisionHistory, history_of, without_gaps
from potluck.control.state_store import StateStore
from potluck.core.scaling.forecast import BIN_S, Forecaster


class Gateway:
    """Says what it decided."""

    def __init__(self) -> None:
        self.epoch, self.said, self.ended, self.thinks = "one", 0, 0, "m: 4 requests/s is steady"

    def decisions(self, after: int) -> dict[str, Any]:
        listed = [
            {"number": n, "at_s": 5.0, "what": f"what {n}", "why": "why"} for n in range(1, self.said + 1)
        ]
        return {
            "epoch": self.epoch,
            "decisions": [each for each in listed if each["number"] > after],
            "thinks": self.thinks,
            "ended": {"m": self.ended},
        }


class Scene:
    def __init__(self, path: Path) -> None:
        self.path, self.now_s, self.gateway = path / "state.db", 100 * BIN_S, Gateway()
        self.said: list[str] = []

    def chronicle(self) -> DecisionHistory:
        """A controller that was just started."""
        return DecisionHistory(
            StateStore(self.path),
            self.gateway,  # type: ignore[arg-type]
            lambda key, kind, why: self.said.append(why),
            lambda: self.now_s,
        )

    def noted(self) -> list[str]:
        return [each.what for each in StateStore(self.path).happenings() if each.kind == "brain"]


def test_each_decision_is_noted_once_by_whichever_controller(tmp_path: Path) -> None:
    resolved = Scene(tmp_path)
    resolved.gateway.said = 2
    resolved.chronicle().turn()
    resolved.chronicle().turn()
    resolved.gateway.said = 3
    resolved.chronicle().turn()
    assert resolved.noted() == ["what 1", "what 2", "what 3"]
    resolved.gateway.epoch, resolved.gateway.said = "two", 1  # another gateway begins at 1 again
    resolved.chronicle().turn()
    assert resolved.noted() == ["what 1", "what 2", "what 3", "what 1"]
    assert resolved.said[0] == "m: 4 requests/s is steady"


def test_requests_become_rates_of_bins_across_restarts_of_both(tmp_path: Path) -> None:
    resolved = Scene(tmp_path)
    for _ in range(60):  # a bin and a bit, 2 requests a second; both are restarted in between
        resolved.chronicle().turn()
        resolved.now_s += 20.0
        resolved.gateway.ended += 40
        if resolved.now_s == 100 * BIN_S + 300.0:
            resolved.gateway.epoch, resolved.gateway.ended = "two", 40
    (first,) = StateStore(resolved.path).rates("m", 100, 1)
    assert first is not None
    assert abs(first - 2.0) < 0.15
    assert StateStore(resolved.path).rates("m", 101, 2)[0] == first


def test_a_bin_that_was_hardly_watched_is_no_rate(tmp_path: Path) -> None:
    resolved = Scene(tmp_path)
    resolved.now_s += 500.0
    for _ in range(20):
        resolved.chronicle().turn()
        resolved.now_s += 10.0
        resolved.gateway.ended += 10
    assert StateStore(resolved.path).rates("m", 100, 1) == (None,)


def test_gaps_are_as_the_day_before_or_as_last_seen() -> None:
    assert without_gaps((None, None, 1.0, None, 3.0)) == (1.0, 1.0, 3.0)
    day = tuple(float(n) for n in range(DAY_BINS))
    assert without_gaps((*day, None, None, 7.0)) == (*day, 0.0, 1.0, 7.0)


def test_a_forecast_from_the_state_sees_the_morning_coming(tmp_path: Path) -> None:
    """Five days of a daily swing are in the state; at night's end the forecast is above the rate at hand."""
    store = StateStore(tmp_path / "state.db")
    night = 5 * DAY_BINS + DAY_BINS // 4 + 9  # the sine was lowest, and has begun to rise
    for place in range(night):
        store.add_rates(place, [("m", 10.0 - 8.0 * sin(tau * place / DAY_BINS))])
    history = history_of(store, night * BIN_S)["m"]
    assert len(history) == night
    rate = history[-1]
    outlook = Forecaster(history).outlook(rate, 0.0, 6 * BIN_S, 0.5)
    assert outlook.mean_per_s > 1.15 * rate
    flat = Forecaster((rate,) * DAY_BINS).outlook(rate, 0.0, 6 * BIN_S, 0.5)
    assert flat.mean_per_s < 1.05 * rate
