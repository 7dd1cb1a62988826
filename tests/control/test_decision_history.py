"""Decisions, request rates and speeds of the gateway in the state, across restarts."""

from __future__ import annotations

import json
import time
from math import sin, tau
from pathlib import Path
from typing import Any

import pytest
from live_plans import WHOLE, write_plans

from potluck.cli.main import run
from potluck.control.decision_history import (
    DAY_BINS,
    ENOUGH,
    FORGET_S,
    SPEED_POLL_INTERVAL_S,
    DecisionHistory,
    ObservedSpeeds,
    history_of,
    without_gaps,
)
from potluck.control.gateway_client import RecentMetrics, read
from potluck.control.state_store import StateStore
from potluck.core.scaling.forecast import BIN_S, Forecaster
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import PlannedReplica, Template, plan_from_json
from potluck.perf.timers.profile import profile_from_json


class FakeGateway:
    def __init__(self) -> None:
        self.epoch, self.said, self.ended, self.thinks = "one", 0, 0, "m: 4 requests/s is steady"

    def decisions(self, after: int) -> dict[str, Any]:
        listed = [
            {"number": n, "at_s": 5.0, "what": f"what {n}", "why": "why"} for n in range(1, self.said + 1)
        ]
        return {
            "epoch": self.epoch,
            "decisions": [item for item in listed if item["number"] > after],
            "thinks": self.thinks,
            "ended": {"m": self.ended},
        }


class HistoryScenario:
    def __init__(self, path: Path) -> None:
        self.path, self.now_s, self.gateway = path / "state.db", 100 * BIN_S, FakeGateway()
        self.said: list[str] = []

    def chronicle(self) -> DecisionHistory:
        return DecisionHistory(
            StateStore(self.path),
            self.gateway,  # type: ignore[arg-type]
            lambda key, kind, why: self.said.append(why),
            lambda: self.now_s,
        )

    def noted(self) -> list[str]:
        return [event.what for event in StateStore(self.path).happenings() if event.kind == "brain"]


def test_each_decision_is_recorded_once_across_controllers(tmp_path: Path) -> None:
    resolved = HistoryScenario(tmp_path)
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


def test_request_rates_are_binned_across_restarts_of_gateway_and_controller(tmp_path: Path) -> None:
    resolved = HistoryScenario(tmp_path)
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


def test_rate_bin_observed_for_too_short_is_omitted(tmp_path: Path) -> None:
    resolved = HistoryScenario(tmp_path)
    resolved.now_s += 500.0
    for _ in range(20):
        resolved.chronicle().turn()
        resolved.now_s += 10.0
        resolved.gateway.ended += 10
    assert StateStore(resolved.path).rates("m", 100, 1) == (None,)


def test_missing_rate_bins_are_filled_from_the_day_before_or_the_last_value() -> None:
    assert without_gaps((None, None, 1.0, None, 3.0)) == (1.0, 1.0, 3.0)
    day = tuple(float(n) for n in range(DAY_BINS))
    assert without_gaps((*day, None, None, 7.0)) == (*day, 0.0, 1.0, 7.0)


def test_forecast_from_stored_rates_predicts_the_morning_rise(tmp_path: Path) -> None:
    """Five days of a daily swing are in the state; at night's end the forecast is above the rate at hand."""
    store = StateStore(tmp_path / "state.db")
    night = 5 * DAY_BINS + DAY_BINS // 4 + 9  # the sine was lowest, and has begun to rise
    for place in range(night):
        store.add_rates(place, [("m", 10.0 - 8.0 * sin(tau * place / DAY_BINS))])
    history = history_of(store, night * BIN_S)["m"]
    assert len(history) == night
    rate = history[-1]
    assert Forecaster(history).outlook(rate, 0.0, 6 * BIN_S, 0.5).mean_per_s > 1.15 * rate
    assert Forecaster((rate,) * DAY_BINS).outlook(rate, 0.0, 6 * BIN_S, 0.5).mean_per_s < 1.05 * rate


def template(name: str, layout: Layout) -> Template:
    return Template(name, "homogeneous", "live", (), (PlannedReplica("mixed", layout),), (), "measured")


L4 = single("1xL4", 1, 32)
TWO = Layout((Stage(16, (StageNode("1xL4", 1),)), Stage(16, (StageNode("1xA10", 1),))))


class SpeedScenario:
    def __init__(self, path: Path) -> None:
        self.now_s, self.work = 1000.0, 0
        self.store = StateStore(path / "state.db")
        self.store.set("spec", "mark")
        self.templates = {"one": template("one", L4), "two": template("two", TWO)}
        self.paces = ObservedSpeeds(self.store, self.templates, lambda: self.now_s)

    def look(self, looks: int = 1, *, idle: bool = False, **ratios: float) -> None:
        """The Brain tells of replicas that took so many times as long as they should have."""
        for _ in range(looks):
            self.now_s += SPEED_POLL_INTERVAL_S
            self.work += not idle
            self.paces.hear([self.said(name, ratio) for name, ratio in ratios.items()])

    def said(self, name: str, ratio: float, template: str = "one", planned_s: float = 5.0) -> dict[str, Any]:
        return {
            "replica": name,
            "template": template,
            "index": 0,
            "observed_s": ratio * planned_s,
            "planned_s": planned_s,
            "learned_s": float(self.work),
        }

    @property
    def found(self) -> list[tuple[str, int, float, int]]:
        return [(item.node, item.tp, round(item.pace, 2), item.replicas) for item in self.paces.now()]


@pytest.fixture
def scenario(tmp_path: Path) -> SpeedScenario:
    return SpeedScenario(tmp_path)


def test_observed_speed_of_a_node_type_is_the_median_after_enough_observations(
    scenario: SpeedScenario,
) -> None:
    scenario.look(ENOUGH - 1, a=1.4, b=1.3, c=3.0)
    assert scenario.found == []
    scenario.look(a=1.4, b=1.3, c=3.0)
    assert scenario.found == [("1xL4", 1, 1.4, 3)], "one that is ill says nothing about its kind"
    again = ObservedSpeeds(StateStore(scenario.store.path), scenario.templates, lambda: scenario.now_s)
    assert again.now() == scenario.paces.now(), "another controller knows it, too"
    scenario.now_s += FORGET_S
    assert scenario.found == []


def test_replica_without_new_work_adds_no_speed_observation(scenario: SpeedScenario) -> None:
    scenario.look(1, a=2.0)
    scenario.look(3 * ENOUGH, idle=True, a=2.0)
    assert scenario.found == []
    for _ in range(2 * ENOUGH):
        scenario.work += 1
        scenario.now_s += SPEED_POLL_INTERVAL_S
        scenario.paces.hear([scenario.said("b", 2.0, planned_s=0.2), scenario.said("c", 2.0, "two")])
        scenario.paces.hear([scenario.said("d", 2.0)])  # too soon after the last look
    assert scenario.found == [], "too little work, several nodes, or nobody's template"


def test_observed_speed_follows_newer_observations(scenario: SpeedScenario) -> None:
    scenario.look(ENOUGH, a=2.0)
    scenario.look(30, a=1.0)
    assert scenario.found == [("1xL4", 1, 1.0, 1)]


def test_changed_spec_discards_observed_speeds(scenario: SpeedScenario) -> None:
    scenario.look(ENOUGH, a=2.0)
    scenario.store.set("spec", "another")
    assert scenario.found == []
    scenario.look(ENOUGH, a=1.5)
    assert scenario.found == [("1xL4", 1, 1.5, 1)]


def test_profile_command_exports_observed_speeds_of_a_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_path, spec = write_plans(tmp_path, WHOLE)
    plan = plan_from_json(plan_path.read_text())
    scenario = SpeedScenario(tmp_path / "state")
    scenario.store.set("spec files", {"path": str(spec), "profiles": []})
    out = tmp_path / "observed.json"
    arguments = ["profile", "--live", "--state", str(tmp_path / "state"), "--out", str(out)]
    assert run(arguments) == 1
    assert "too few step times" in capsys.readouterr().err
    scenario.templates["one"], scenario.now_s = plan.templates[0], time.time()
    scenario.look(ENOUGH, a=1.5)
    assert run([*arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    node = plan.templates[0].replicas[0].layout.stages[0].nodes[0].node
    assert (row["node"], row["pace"], row["file"]) == (node, pytest.approx(1.5), str(out))
    profile = profile_from_json(out.read_text())
    assert (profile.gpu, profile.engine) == (node.removeprefix("1x"), "observed")
    assert (
        run(["simulate", str(plan_path), str(spec), "--profile", str(out), "--requests", "20", "--json"]) == 0
    )
    assert run([*arguments, "--local"]) == 2


TEXT = """# TYPE answered_total counter
answered_total{{model="a"}} {a}
answered_total{{model="b"}} {b}
# TYPE wait_seconds histogram
wait_seconds_bucket{{le="1.0",model="a"}} {one}
wait_seconds_bucket{{le="2.0",model="a"}} {two}
wait_seconds_bucket{{le="+Inf",model="a"}} {all}
wait_seconds_sum{{model="a"}} 0
wait_seconds_count{{model="a"}} {all}
"""


def _recent(*steps: tuple[float, dict[str, int]]) -> RecentMetrics:
    recent = RecentMetrics(window_s=10.0)
    for at_s, values in steps:
        recent.add(read(TEXT.format(**values), at_s))
    return recent


def test_recent_metrics_count_only_the_observed_interval() -> None:
    recent = _recent(
        (0.0, {"a": 100, "b": 7, "one": 50, "two": 50, "all": 50}),
        (2.0, {"a": 110, "b": 7, "one": 50, "two": 60, "all": 60}),
    )
    assert recent.per_s("answered_total", model="a") == pytest.approx(5.0)
    assert recent.per_s("answered_total") == pytest.approx(5.0)
    assert recent.per_s("answered_total", model="b") == 0.0
    assert recent.quantile("wait_seconds", 0.5, model="a") == pytest.approx(1.5)
    assert recent.quantile("wait_seconds", 0.5, model="b") is None


def test_recent_metrics_forget_old_samples_and_handle_counter_resets() -> None:
    none = {"b": 0, "one": 0, "two": 0, "all": 0}
    recent = _recent(*((float(at), {"a": 10 * at, **none}) for at in range(30)))
    assert recent.span_s == pytest.approx(10.0)
    assert recent.per_s("answered_total", model="a") == pytest.approx(10.0)
    recent.add(read(TEXT.format(a=3, **none), 30.0))
    assert recent.grown("answered_total", model="a") == 3
    assert recent.quantile("wait_seconds", 0.9, model="a") is None


def test_quantile_beyond_the_last_bucket_is_its_bound() -> None:
    recent = _recent(
        (0.0, {"a": 0, "b": 0, "one": 0, "two": 0, "all": 0}),
        (1.0, {"a": 0, "b": 0, "one": 0, "two": 1, "all": 10}),
    )
    assert recent.quantile("wait_seconds", 0.99, model="a") == 2.0
