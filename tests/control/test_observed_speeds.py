"""What replicas really take: learned look by look, kept in the state, and handed to plans and files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from live_plans import WHOLE, write_plans

from potluck.cli.main import run
from potluck.control.decision_history import ENOUGH, FORGET_S, LOOK_S, ObservedSpeeds
from potluck.control.state_store import StateStore
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import PlannedReplica, Template, plan_from_json
from potluck.perf.timers.profile import profile_from_json


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
            self.now_s += LOOK_S
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
        return [(each.node, each.tp, round(each.pace, 2), each.replicas) for each in self.paces.now()]


@pytest.fixture
def scenario(tmp_path: Path) -> SpeedScenario:
    return SpeedScenario(tmp_path)


def test_a_kind_is_as_fast_as_the_middle_of_its_replicas_once_enough_was_seen(
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


def test_a_replica_that_does_nothing_new_tells_nothing_new(scenario: SpeedScenario) -> None:
    scenario.look(1, a=2.0)
    scenario.look(3 * ENOUGH, idle=True, a=2.0)
    assert scenario.found == []
    for _ in range(2 * ENOUGH):
        scenario.work += 1
        scenario.now_s += LOOK_S
        scenario.paces.hear([scenario.said("b", 2.0, planned_s=0.2), scenario.said("c", 2.0, "two")])
        scenario.paces.hear([scenario.said("d", 2.0)])  # too soon after the last look
    assert scenario.found == [], "too little work, several nodes, or nobody's template"


def test_a_mean_moves_with_what_is_seen(scenario: SpeedScenario) -> None:
    scenario.look(ENOUGH, a=2.0)
    scenario.look(30, a=1.0)
    assert scenario.found == [("1xL4", 1, 1.0, 1)]


def test_another_spec_has_other_facts(scenario: SpeedScenario) -> None:
    scenario.look(ENOUGH, a=2.0)
    scenario.store.set("spec", "another")
    assert scenario.found == []
    scenario.look(ENOUGH, a=1.5)
    assert scenario.found == [("1xL4", 1, 1.5, 1)]


def test_profiles_of_a_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_path, spec = write_plans(tmp_path, WHOLE)
    plan = plan_from_json(plan_path.read_text())
    scenario = SpeedScenario(tmp_path / "state")
    scenario.store.set("spec files", {"path": str(spec), "profiles": []})
    out = tmp_path / "observed.json"
    arguments = ["profile", "--live", "--state", str(tmp_path / "state"), "--out", str(out)]
    assert run(arguments) == 1
    assert "too little was seen" in capsys.readouterr().err
    scenario.templates["one"], scenario.now_s = plan.templates[0], time.time()
    scenario.look(ENOUGH, a=1.5)
    assert run([*arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    node = plan.templates[0].replicas[0].layout.stages[0].nodes[0].node
    assert (row["node"], row["pace"], row["file"]) == (node, pytest.approx(1.5), str(out))
    found = profile_from_json(out.read_text())
    assert (found.gpu, found.engine) == (node.removeprefix("1x"), "observed")
    assert (
        run(["simulate", str(plan_path), str(spec), "--profile", str(out), "--requests", "20", "--json"]) == 0
    )
    assert run([*arguments, "--local"]) == 2
