"""Plans scheduled by time of day."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_controller import PLAN, World

from potluck.cli.main import run
from potluck.control.plan_requests import DAY_S, DayPlans
from potluck.control.state_store import StateStore
from potluck.core.errors import InputError
from potluck.core.values.plan import Deployment, Plan, plan_to_json

NOON = datetime(2026, 1, 15, 12, 0)


def plan(copies: int) -> Plan:
    return replace(PLAN, deployments=(Deployment("t", "east", copies),), cost_usd_per_h=float(copies))


def seconds(clock: str) -> int:
    return int(clock[:2]) * 3600 + int(clock[3:]) * 60


DAY = DayPlans(((seconds("06:30"), plan(3)), (seconds("18:00"), plan(2)), (seconds("23:00"), plan(1))), 600.0)


def due_plan_time(clock: str, day: DayPlans = DAY) -> str:
    return day.due(NOON.replace(hour=int(clock[:2]), minute=int(clock[3:])).timestamp())[0]


def test_day_plan_with_higher_cost_starts_early_and_a_cheaper_one_on_time() -> None:
    assert due_plan_time("12:00") == "06:30"
    assert [due_plan_time("17:59"), due_plan_time("18:00")] == ["06:30", "18:00"]
    assert [
        due_plan_time("22:59"),
        due_plan_time("23:00"),
        due_plan_time("00:00"),
        due_plan_time("06:19"),
    ] == ["18:00", "23:00", "23:00", "23:00"]
    assert [due_plan_time("06:20"), due_plan_time("06:29"), due_plan_time("06:30")] == ["06:30"] * 3
    assert due_plan_time("03:00", DayPlans(DAY.plans[:1])) == "06:30", "one plan is for the whole day"


@given(st.sets(st.integers(0, 1439), min_size=1, max_size=6), st.integers(0, DAY_S - 1))
def test_day_plan_without_lead_time_is_the_latest_started(begins: set[int], second: int) -> None:
    day = DayPlans(tuple((minute * 60, plan(1 + minute % 3)) for minute in sorted(begins)))
    name, _ = day.due((NOON.replace(hour=0) + timedelta(seconds=second)).timestamp())
    ages = {minute: (second - minute * 60) % DAY_S for minute in begins}
    assert ages[seconds(name) // 60] == min(ages.values())


def test_scheduled_plan_is_applied_once_and_a_manual_plan_holds(world: World) -> None:
    store = StateStore(world.path)
    world.now_s = NOON.timestamp()
    world.turns(controller := world.controller(day=DAY), 3)
    assert [len(world.gateway.plans), store.versions(1)[0][1]] == [1, "schedule: from 06:30 on"]
    store.add_plan(replanned := plan(5), world.now_s, "prices changed")
    world.turns(controller, 3)
    assert len(world.gateway.plans) == 1, "what the planner finds meanwhile holds until the next is due"
    controller.close()
    world.now_s = NOON.replace(hour=18).timestamp()
    world.turns(controller := world.controller(day=DAY), 3)
    assert world.gateway.plans[-1] == plan(2)
    store.add_plan(replanned, world.now_s, "by hand: t@east=5")
    world.now_s = NOON.replace(hour=23).timestamp()
    world.turns(controller, 3)
    assert len(world.gateway.plans) == 2
    (advice,) = (item.why for item in store.happenings() if item.kind == "advice")
    assert advice == "the plan from 23:00 on is due; what was set by hand holds"


def test_scheduled_plan_refused_by_the_gateway_is_retried(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise InputError("plan", "is not for this fleet")

    world.now_s, taken = NOON.timestamp(), world.gateway.set_plan
    monkeypatch.setattr(world.gateway, "set_plan", refuse)
    world.turns(controller := world.controller(day=DAY), 5)
    assert [reason for _, reason in StateStore(world.path).versions()] == ["begin"]
    monkeypatch.setattr(world.gateway, "set_plan", taken)
    world.turns(controller, 2)
    assert StateStore(world.path).versions(1)[0][1] == "schedule: from 06:30 on"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


SPEC = """\
models:
  - {model: Llama-3.1-8B, name: m, slo: {ttft_ms: 2000, tpot_ms: 60}, traffic: {rate_per_s: 1, input: 99, output: 9}}
fleet: {regions: [{name: east, nodes: [{node: 1xA10, available: 4, price_usd_per_h: 1.0}]}]}
"""


def test_schedule_folder_is_validated_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (spec := tmp_path / "potluck.yaml").write_text(SPEC)
    (day := tmp_path / "day").mkdir()
    assert run(["up", str(spec), "--schedule", str(day)]) == 2
    assert (
        "has no plans (plan-HHMM.json); `potluck schedule potluck.yaml --out day`" in capsys.readouterr().err
    )
    (day / "plan-0600.json").write_text(plan_to_json(PLAN))
    assert run(["up", str(day / "plan-0600.json"), str(spec), "--schedule", str(day)]) == 2
    assert "--schedule: has the plans" in capsys.readouterr().err
    (day / "plan-2460.json").write_text(plan_to_json(PLAN))
    assert run(["up", str(spec), "--schedule", str(day)]) == 2
    assert "24:60 is no time of day" in capsys.readouterr().err
    (day / "plan-2460.json").unlink()
    (day / "plan-0700.json").write_text("{}")
    assert run(["up", str(spec), "--schedule", str(day)]) == 2
    assert "plan-0700.json" in capsys.readouterr().err
