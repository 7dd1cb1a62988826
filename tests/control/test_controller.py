"""The controller: whatever dies at whatever moment, it ends with just what is wanted."""

from __future__ import annotations

import concurrent.futures
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from potluck.control.control_values import EngineInstance, EngineSpec, PlanReply, PlanRequest
from potluck.control.controller import Controller
from potluck.control.gateway_client import GatewayAway
from potluck.control.launchers.launcher import EngineSighting, NodeNews, Place
from potluck.control.plan_requests import Planner
from potluck.control.state_store import Lease, StateStore
from potluck.core.errors import CapacityError
from potluck.core.values.layout import single
from potluck.core.values.plan import NodeCount, Plan, PlannedReplica, Template, plan_mark

LAYOUT = single("1xA10", 1, 2)
TEMPLATE = Template(
    "t", "homogeneous", "m", (NodeCount("1xA10", 1),), (PlannedReplica("mixed", LAYOUT),), (), "measured"
)
PLAN = Plan("auto", (TEMPLATE,), (), (), (), (), (), 1.5, 0.0)


class Killed(BaseException):
    """This process is no more."""


@dataclass
class Machine:
    """Processes that outlive controllers."""

    running: dict[str, str] = field(default_factory=dict)
    """Name to state."""
    started: int = 0
    step_tokens: list[int] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    told: list[NodeNews] = field(default_factory=list)
    broken: bool = False

    def start(self, name: str, make: EngineSpec) -> Place:
        if self.broken:
            raise CapacityError("no memory left")
        self.started += 1
        self.step_tokens.append(make.step_tokens)
        self.running[name] = "starting"
        return {"pid": name}

    def look(self, places: dict[str, Place]) -> tuple[EngineSighting, ...]:
        known = {place.get("pid") for place in places.values()}
        for name in [name for name in self.running if name not in known]:
            del self.running[name]
        found = []
        for name, place in places.items():
            state = self.running.get(str(place.get("pid", "")))
            if state is None:
                found.append(EngineSighting(name, "dead", problem="is not there"))
            elif state == "starting":
                self.running[name] = "up"
                found.append(EngineSighting(name, "starting"))
            else:
                found.append(EngineSighting(name, "up", f"http://{name}"))
        return tuple(found)

    def stop(self, name: str, place: Place) -> None:
        self.running.pop(name, None)

    def kill(self, name: str, place: Place) -> None:
        self.killed.append(name)
        self.running.pop(name, None)

    def news(self) -> tuple[NodeNews, ...]:
        found, self.told = tuple(self.told), []
        return found

    def log_of(self, name: str) -> Path:
        return Path(name)


@dataclass
class Gateway:
    replicas: list[str] = field(default_factory=list)
    replan: dict[str, Any] | None = None
    fleet: tuple[EngineInstance, ...] = ()
    plans: list[Plan] = field(default_factory=list)
    away: bool = False
    mark: str | None = None
    urls: bool = False
    """Whether it says where replicas are reached."""
    step_tokens: int = 0
    kill: list[str] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)

    def wanted(self) -> dict[str, Any]:
        if self.away:
            raise GatewayAway("refused")
        each = {
            "template": "t",
            "index": 0,
            "model": "m",
            "region": "east",
            "role": "mixed",
            "draining": False,
            "unit": "t@east#0",
            "step_tokens": self.step_tokens,
            "url": "http://somewhere" if self.urls else "",
        }
        return {
            "replicas": [{**each, "id": name} for name in self.replicas],
            "replan": self.replan,
            "kill": self.kill,
            "plan_mark": self.mark,
        }

    def set_fleet(self, instances: tuple[EngineInstance, ...]) -> None:
        if self.away:
            raise GatewayAway("refused")
        self.fleet = tuple(each for each in instances if each.state == "up" and each.replica)

    def set_plan(self, plan: Plan, why: str = "", version: int = 0) -> None:
        self.plans.append(plan)
        self.replan = None

    def drain(self, replica: str) -> None:
        self.drained.append(replica)

    def decisions(self, after: int) -> dict[str, Any]:
        return {"epoch": "e", "decisions": [], "thinks": "", "ended": {}}


@dataclass
class Fixed:
    """A planner that has one answer."""

    plan: Plan | None
    asked: list[PlanRequest] = field(default_factory=list)
    left: Plan | None = None
    """What to do at once."""

    def first(self, asked: PlanRequest) -> PlanReply:
        return PlanReply(self.left, "what is left")

    def full(self, asked: PlanRequest) -> PlanReply:
        self.asked.append(asked)
        return PlanReply(self.plan, "better")


def planned(world: World, controller: Controller) -> None:
    """Turns until no plan is being made."""
    while controller.planning.under_way is not None:
        controller.planning.under_way.result(10)
        world.turns(controller, 1)
    world.turns(controller, 2)


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.now_s = 1000.0
        self.path = tmp_path / "state.db"
        self.machine, self.gateway = Machine(), Gateway()
        StateStore(self.path).add_plan(PLAN, 0.0, "begin")

    def controller(self, planner: Planner | None = None, **settings: Any) -> Controller:
        store = StateStore(self.path)
        return Controller(
            store,
            Lease(store, lambda: self.now_s),
            self.machine,
            self.gateway,  # type: ignore[arg-type]
            planner,
            clock=lambda: self.now_s,
            linger_s=5.0,
            **settings,
        )

    def turns(self, controller: Controller, count: int) -> None:
        for _ in range(count):
            self.now_s += 1.0
            self.last = controller.turn()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_what_is_wanted_is_started_told_and_stopped_again(world: World) -> None:
    world.gateway.replicas = ["a", "b"]
    controller = world.controller()
    world.turns(controller, 4)
    assert sorted(each.replica for each in world.gateway.fleet) == ["a", "b"]
    assert world.last.settled
    world.gateway.replicas = ["b"]
    world.turns(controller, 10)
    assert [each.replica for each in world.gateway.fleet] == ["b"]
    assert len(world.machine.running) == 1
    kinds = [each.kind for each in StateStore(world.path).happenings()]
    assert kinds.count("start") == 2
    assert "stop" in kinds


def test_an_engine_that_somebody_wants_dead_is_killed_once_and_another_comes(world: World) -> None:
    world.gateway.replicas = ["a", "b"]
    controller = world.controller()
    world.turns(controller, 4)
    (victim,) = (each.name for each in world.gateway.fleet if each.replica == "a")
    world.gateway.kill = ["a"]
    world.turns(controller, 1)
    world.gateway.kill = []
    world.turns(controller, 5)
    assert world.machine.killed == [victim]
    assert sorted(each.replica for each in world.gateway.fleet) == ["a", "b"]
    assert victim not in {each.name for each in world.gateway.fleet}
    world.gateway.kill, world.gateway.away = ["a"], True
    world.turns(controller, 3)
    assert world.machine.killed == [victim], (
        "what was wanted before the gateway went away is not wanted for ever"
    )


def test_engines_are_started_with_the_steps_that_were_planned_and_stay_when_others_are(world: World) -> None:
    world.gateway.replicas, world.gateway.step_tokens = ["a"], 192
    controller = world.controller()
    world.turns(controller, 4)
    world.gateway.step_tokens = 512
    world.turns(controller, 10)
    assert world.machine.step_tokens == [192]
    world.gateway.replicas = ["a", "b"]
    world.turns(controller, 4)
    assert world.machine.step_tokens == [192, 512]


def test_engines_serve_on_while_the_gateway_is_away_and_dead_ones_come_back(world: World) -> None:
    world.gateway.replicas = ["a", "b"]
    controller = world.controller()
    world.turns(controller, 4)
    world.gateway.away = True
    world.machine.running.popitem()
    world.turns(controller, 8)
    assert len(world.machine.running) == 2
    assert world.machine.started == 3
    away = [each for each in StateStore(world.path).happenings() if each.kind == "away"]
    assert len(away) == 1, "said once, not every second"


def test_a_start_that_cannot_be_is_tried_again_later(world: World) -> None:
    world.gateway.replicas = ["a"]
    world.machine.broken = True
    controller = world.controller()
    world.turns(controller, 12)
    failed = [each for each in StateStore(world.path).happenings() if each.kind == "failed"]
    assert 2 <= len(failed) <= 5
    assert failed[0].why == "no memory left"
    waits = [each.why for each in StateStore(world.path).happenings() if each.kind == "waits"]
    assert waits
    assert all("'no memory left'" in why for why in waits), "why it failed is not forgotten"
    world.machine.broken = False
    world.turns(controller, 60)
    assert world.last.settled


def test_machines_that_go_or_will_go_are_noted_and_their_engines_used_no_more(world: World) -> None:
    world.gateway.replicas, world.gateway.urls = ["a"], True
    controller = world.controller()
    world.turns(controller, 3)
    (name,) = world.machine.running
    going = NodeNews("notice", "n2", "cordoned", 30, (name,))
    world.machine.told = [NodeNews("gone", "n1", "was not heard"), going]
    world.turns(controller, 1)
    told = [(each.kind, each.what) for each in StateStore(world.path).happenings()]
    assert {("gone", "n1"), ("notice", name)} <= {*told}
    assert world.gateway.drained == ["a"]


def test_two_never_act_at_once(world: World) -> None:
    world.gateway.replicas = ["a"]
    one, two = world.controller(), world.controller()
    for _ in range(6):
        world.turns(one, 1)
        world.turns(two, 1)
        assert not world.last.acted
    assert world.machine.started == 1
    one.close()
    world.turns(two, 1)
    assert world.last.acted


def test_a_plan_that_is_asked_for_is_made_once_and_handed_over(world: World) -> None:
    asked: list[PlanRequest] = []

    controller = world.controller(Fixed(PLAN, asked))
    world.gateway.replan = {"rates_per_s": {"m": 3.0}, "reason": "more is asked for"}
    world.turns(controller, 1)
    planned(world, controller)
    assert [each.rates_per_s for each in asked] == [{"m": 3.0}]
    assert world.gateway.plans == [PLAN]
    newest = StateStore(world.path).plan()
    assert newest is not None
    assert (newest.version, newest.reason) == (2, "more is asked for; better")


def test_advice_changes_nothing(world: World) -> None:
    controller = world.controller(Fixed(PLAN), advise=True)
    world.gateway.replan = {"rates_per_s": {"m": 3.0}, "reason": "more"}
    world.turns(controller, 1)
    planned(world, controller)
    assert world.gateway.plans == []
    assert [each.kind for each in StateStore(world.path).happenings() if each.kind == "advice"] == ["advice"]


@pytest.mark.parametrize("seed", range(8))
def test_killed_at_any_instant_it_converges_and_nothing_is_orphaned(world: World, seed: int) -> None:
    """Each kill strikes before or after one write or one start, drawn at random."""
    chance = random.Random(seed)
    kills = 0
    while kills < 20:
        world.gateway.replicas = [f"r{n}" for n in range(chance.randint(0, 5))]
        controller = world.controller()
        store, machine = controller._store, world.machine
        fuse = chance.randint(1, 12)

        def burning(call: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                nonlocal fuse
                fuse -= 1
                if fuse == 0 and chance.random() < 0.5:
                    raise Killed
                result = call(*args, **kwargs)
                if fuse == 0:
                    raise Killed
                return result

            return wrapped

        for name in ("put", "remove", "set", "note"):
            setattr(store, name, burning(getattr(store, name)))
        controller._launcher = Machine(machine.running, machine.started)
        controller._launcher.start = burning(controller._launcher.start)  # type: ignore[method-assign]
        try:
            world.turns(controller, 8)
        except Killed:
            kills += 1
        store.close()
        world.now_s += 10.0
    world.gateway.replicas = ["x", "y", "z"]
    world.turns(world.controller(), 80)
    assert world.last.settled
    assert sorted(each.replica for each in world.gateway.fleet) == ["x", "y", "z"]
    assert sorted(world.machine.running) == sorted(each.name for each in world.gateway.fleet)


def test_what_is_left_counts_before_the_full_plan_is_there(world: World) -> None:
    left = replace(PLAN, cost_usd_per_h=1.0)
    planner = Fixed(replace(PLAN, cost_usd_per_h=2.0), left=left)
    controller = world.controller(planner)
    world.gateway.replan = {"rates_per_s": {"m": 3.0}, "reason": "a node died"}
    world.turns(controller, 1)
    planned(world, controller)
    assert [each.cost_usd_per_h for each in world.gateway.plans] == [1.0, 2.0]
    assert planner.asked[0].running == left, "the full plan starts from what is left"


def test_a_plan_that_was_written_down_and_not_told_is_told_by_the_next(world: World) -> None:
    store = StateStore(world.path)
    newer = replace(PLAN, cost_usd_per_h=9.0)
    store.add_plan(newer, 1.0, "more")  # and then it was killed
    world.gateway.mark = plan_mark(PLAN)
    world.turns(world.controller(), 1)
    assert world.gateway.plans == [newer]
    world.gateway.mark, world.gateway.plans = "a plan that nobody here knows", []
    controller = world.controller()
    world.now_s += 10.0
    world.turns(controller, 30)
    assert world.gateway.plans == [], "a plan by others is not fought"
    said = [each.why for each in store.happenings() if each.kind == "plan"]
    assert sum("serves another plan" in each for each in said) == 1


def test_a_planner_that_breaks_leaves_the_controller_and_says_so(world: World) -> None:
    class Broken(Fixed):
        def full(self, asked: PlanRequest) -> PlanReply:
            raise ZeroDivisionError

    controller = world.controller(Broken(PLAN))
    world.gateway.replicas = ["a"]
    world.gateway.replan = {"rates_per_s": {"m": 3.0}, "reason": "more"}
    world.turns(controller, 1)
    while controller.planning.under_way is not None:
        concurrent.futures.wait([controller.planning.under_way], 10)
        world.turns(controller, 1)
    world.turns(controller, 3)
    assert world.last.settled
    said = [each.why for each in StateStore(world.path).happenings() if each.what == "stays"]
    assert ["the planner failed" in each for each in said] == [True]
