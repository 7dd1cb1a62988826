"""The controller converges to the wanted replicas whatever fails."""

from __future__ import annotations

import concurrent.futures
import random
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from potluck.control.control_values import (
    EngineInstance,
    EngineSighting,
    EngineSpec,
    NodeNews,
    Place,
    PlanReply,
    PlanRequest,
)
from potluck.control.controller import Controller
from potluck.control.gateway_client import GatewayAway
from potluck.control.plan_requests import Planner, PlanRequests
from potluck.control.state_store import Lease, StateStore
from potluck.core.errors import CapacityError
from potluck.core.values.layout import single
from potluck.core.values.plan import (
    Deployment,
    NodeCount,
    Plan,
    PlannedReplica,
    Template,
    plan_mark,
)
from potluck.core.values.types import NodeOffer, Region

LAYOUT = single("1xA10", 1, 2)
TEMPLATE = Template(
    "t", "homogeneous", "m", (NodeCount("1xA10", 1),), (PlannedReplica("mixed", LAYOUT),), (), "measured"
)
PLAN = Plan("auto", (TEMPLATE,), (), (), (), (), (), 1.5, 0.0)


class ProcessKilled(BaseException):
    """This process is no more."""


@dataclass
class FakeMachine:
    running: dict[str, str] = field(default_factory=dict)  # Name to state.
    started: int = 0
    step_tokens: list[int] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    told: list[NodeNews] = field(default_factory=list)
    broken: bool = False

    def start(self, name: str, engine_spec: EngineSpec) -> Place:
        if self.broken:
            raise CapacityError("no memory left")
        self.started += 1
        self.step_tokens.append(engine_spec.step_tokens)
        self.running[name] = "starting"
        return {"pid": name}

    def look(self, places: dict[str, Place]) -> tuple[EngineSighting, ...]:
        known = {place.get("pid") for place in places.values()}
        for name in [name for name in self.running if name not in known]:
            del self.running[name]
        result = []
        for name, place in places.items():
            state = self.running.get(str(place.get("pid", "")))
            if state is None:
                result.append(EngineSighting(name, "dead", problem="is not there"))
            elif state == "starting":
                self.running[name] = "up"
                result.append(EngineSighting(name, "starting"))
            else:
                result.append(EngineSighting(name, "up", f"http://{name}"))
        return tuple(result)

    def stop(self, name: str, place: Place) -> None:
        self.running.pop(name, None)

    def kill(self, name: str, place: Place) -> None:
        self.killed.append(name)
        self.running.pop(name, None)

    def news(self) -> tuple[NodeNews, ...]:
        node_news, self.told = tuple(self.told), []
        return node_news

    def log_of(self, name: str) -> Path:
        return Path(name)


@dataclass
class FakeGateway:
    replicas: list[str] = field(default_factory=list)
    replan: dict[str, Any] | None = None
    fleet: tuple[EngineInstance, ...] = ()
    plans: list[Plan] = field(default_factory=list)
    away: bool = False
    mark: str | None = None
    urls: bool = False  # Whether it says where replicas are reached.
    step_tokens: int = 0
    kill: list[str] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)

    def wanted(self) -> dict[str, Any]:
        if self.away:
            raise GatewayAway("refused")
        item = {
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
            "replicas": [{**item, "id": name} for name in self.replicas],
            "replan": self.replan,
            "kill": self.kill,
            "plan_mark": self.mark,
        }

    def set_fleet(self, instances: tuple[EngineInstance, ...]) -> None:
        if self.away:
            raise GatewayAway("refused")
        self.fleet = tuple(instance for instance in instances if instance.state == "up" and instance.replica)

    def set_plan(self, plan: Plan, why: str = "", version: int = 0) -> None:
        self.plans.append(plan)
        self.replan = None

    def drain(self, replica: str) -> None:
        self.drained.append(replica)

    def decisions(self, after: int) -> dict[str, Any]:
        return {"epoch": "e", "decisions": [], "thinks": "", "ended": {}}


@dataclass
class FixedPlanner:
    plan: Plan | None
    asked: list[PlanRequest] = field(default_factory=list)
    left: Plan | None = None  # What to do at once.

    def first(self, plan_request: PlanRequest) -> PlanReply:
        return PlanReply(self.left, "what is left")

    def full(self, plan_request: PlanRequest) -> PlanReply:
        self.asked.append(plan_request)
        return PlanReply(self.plan, "better")


def run_until_planned(world: World, controller: Controller) -> None:
    """Turns until no plan is being made."""
    while controller.planning.under_way is not None:
        controller.planning.under_way.result(10)
        world.turns(controller, 1)
    world.turns(controller, 2)


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.now_s = 1000.0
        self.path = tmp_path / "state.db"
        self.machine, self.gateway = FakeMachine(), FakeGateway()
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


def test_controller_starts_reports_and_stops_wanted_replicas(world: World) -> None:
    world.gateway.replicas = ["a", "b"]
    controller = world.controller()
    world.turns(controller, 4)
    assert sorted(item.replica for item in world.gateway.fleet) == ["a", "b"]
    assert world.last.settled
    world.gateway.replicas = ["b"]
    world.turns(controller, 10)
    assert [item.replica for item in world.gateway.fleet] == ["b"]
    assert len(world.machine.running) == 1
    kinds = [happening.kind for happening in StateStore(world.path).happenings()]
    assert kinds.count("start") == 2
    assert "stop" in kinds


def test_engine_marked_for_killing_is_killed_once_and_replaced(world: World) -> None:
    world.gateway.replicas = ["a", "b"]
    controller = world.controller()
    world.turns(controller, 4)
    (victim,) = (item.name for item in world.gateway.fleet if item.replica == "a")
    world.gateway.kill = ["a"]
    world.turns(controller, 1)
    world.gateway.kill = []
    world.turns(controller, 5)
    assert world.machine.killed == [victim]
    assert sorted(item.replica for item in world.gateway.fleet) == ["a", "b"]
    assert victim not in {item.name for item in world.gateway.fleet}
    world.gateway.kill, world.gateway.away = ["a"], True
    world.turns(controller, 3)
    assert world.machine.killed == [victim], (
        "what was wanted before the gateway went away is not wanted for ever"
    )


def test_engines_keep_the_step_tokens_of_their_start(world: World) -> None:
    world.gateway.replicas, world.gateway.step_tokens = ["a"], 192
    controller = world.controller()
    world.turns(controller, 4)
    world.gateway.step_tokens = 512
    world.turns(controller, 10)
    assert world.machine.step_tokens == [192]
    world.gateway.replicas = ["a", "b"]
    world.turns(controller, 4)
    assert world.machine.step_tokens == [192, 512]


def test_engines_keep_running_without_a_gateway_and_dead_ones_are_replaced(world: World) -> None:
    world.gateway.replicas = ["a", "b"]
    controller = world.controller()
    world.turns(controller, 4)
    world.gateway.away = True
    world.machine.running.popitem()
    world.turns(controller, 8)
    assert len(world.machine.running) == 2
    assert world.machine.started == 3
    away = [happening for happening in StateStore(world.path).happenings() if happening.kind == "away"]
    assert len(away) == 1, "said once, not every second"


def test_failed_start_is_retried_later_with_its_reason(world: World) -> None:
    world.gateway.replicas = ["a"]
    world.machine.broken = True
    controller = world.controller()
    world.turns(controller, 12)
    failed = [happening for happening in StateStore(world.path).happenings() if happening.kind == "failed"]
    assert 2 <= len(failed) <= 5
    assert failed[0].why == "no memory left"
    waits = [happening.why for happening in StateStore(world.path).happenings() if happening.kind == "waits"]
    assert waits
    assert all("'no memory left'" in why for why in waits), "why it failed is not forgotten"
    world.machine.broken = False
    world.turns(controller, 60)
    assert world.last.settled


def test_lost_and_noticed_machines_are_recorded_and_their_engines_drained(world: World) -> None:
    world.gateway.replicas, world.gateway.urls = ["a"], True
    controller = world.controller()
    world.turns(controller, 3)
    (name,) = world.machine.running
    going = NodeNews("notice", "n2", "cordoned", 30, (name,))
    world.machine.told = [NodeNews("gone", "n1", "was not heard"), going]
    world.turns(controller, 1)
    message = [(happening.kind, happening.what) for happening in StateStore(world.path).happenings()]
    assert {("gone", "n1"), ("notice", name)} <= {*message}
    assert world.gateway.drained == ["a"]


def test_two_controllers_never_act_at_once(world: World) -> None:
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


def test_requested_plan_is_made_once_and_sent_to_the_gateway(world: World) -> None:
    asked: list[PlanRequest] = []

    controller = world.controller(FixedPlanner(PLAN, asked))
    world.gateway.replan = {"rates_per_s": {"m": 3.0}, "reason": "more is asked for"}
    world.turns(controller, 1)
    run_until_planned(world, controller)
    assert [item.rates_per_s for item in asked] == [{"m": 3.0}]
    assert world.gateway.plans == [PLAN]
    newest = StateStore(world.path).plan()
    assert newest is not None
    assert (newest.version, newest.reason) == (2, "more is asked for; better")


def test_advise_mode_sends_no_plan(world: World) -> None:
    controller = world.controller(FixedPlanner(PLAN), advise=True)
    world.gateway.replan = {"rates_per_s": {"m": 3.0}, "reason": "more"}
    world.turns(controller, 1)
    run_until_planned(world, controller)
    assert world.gateway.plans == []
    assert [
        happening.kind for happening in StateStore(world.path).happenings() if happening.kind == "advice"
    ] == ["advice"]


@pytest.mark.parametrize("seed", range(8))
def test_controller_killed_at_any_instant_converges_without_orphans(world: World, seed: int) -> None:
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
                    raise ProcessKilled
                result = call(*args, **kwargs)
                if fuse == 0:
                    raise ProcessKilled
                return result

            return wrapped

        for name in ("put", "remove", "set", "note"):
            setattr(store, name, burning(getattr(store, name)))
        controller._launcher = FakeMachine(machine.running, machine.started)
        controller._launcher.start = burning(controller._launcher.start)  # type: ignore[method-assign]
        try:
            world.turns(controller, 8)
        except ProcessKilled:
            kills += 1
        store.close()
        world.now_s += 10.0
    world.gateway.replicas = ["x", "y", "z"]
    world.turns(world.controller(), 80)
    assert world.last.settled
    assert sorted(item.replica for item in world.gateway.fleet) == ["x", "y", "z"]
    assert sorted(world.machine.running) == sorted(item.name for item in world.gateway.fleet)


def test_plan_for_remaining_nodes_is_sent_before_the_full_plan(world: World) -> None:
    left = replace(PLAN, cost_usd_per_h=1.0)
    planner = FixedPlanner(replace(PLAN, cost_usd_per_h=2.0), left=left)
    controller = world.controller(planner)
    world.gateway.replan = {"rates_per_s": {"m": 3.0}, "reason": "a node died"}
    world.turns(controller, 1)
    run_until_planned(world, controller)
    assert [item.cost_usd_per_h for item in world.gateway.plans] == [1.0, 2.0]
    assert planner.asked[0].running == left, "the full plan starts from what is left"


def test_stored_plan_that_was_not_sent_is_sent_by_the_next_controller(world: World) -> None:
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
    whies = [happening.why for happening in store.happenings() if happening.kind == "plan"]
    assert sum("serves another plan" in item for item in whies) == 1


def test_planner_exception_is_reported_and_the_controller_continues(world: World) -> None:
    class Broken(FixedPlanner):
        def full(self, plan_request: PlanRequest) -> PlanReply:
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
    whies = [happening.why for happening in StateStore(world.path).happenings() if happening.what == "stays"]
    assert ["the planner failed" in item for item in whies] == [True]


def test_engine_of_a_drained_replica_is_stopped_and_replaced(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.gateway.replicas = ["a"]
    controller = world.controller()
    world.turns(controller, 4)
    (drained,) = world.gateway.fleet
    text = world.gateway.wanted
    world.gateway.wanted = lambda: {**text(), "leave": [drained.url]}  # type: ignore[method-assign]
    world.gateway.replicas = []
    world.turns(controller, 1)
    world.gateway.replicas = ["a2"]
    world.turns(controller, 5)
    (fresh,) = world.gateway.fleet
    assert (fresh.replica, fresh.name != drained.name) == ("a2", True), "not the same one under another name"
    assert drained.name not in world.machine.running


@dataclass
class FreezingMachine(FakeMachine):
    """Some of its processes stand still."""

    frozen: set[str] = field(default_factory=set)

    def look(self, places: dict[str, Place]) -> tuple[EngineSighting, ...]:
        states = dict(self.running)
        result = super().look(places)
        self.running |= {name: states[name] for name in self.frozen & self.running.keys()}
        return tuple(
            EngineSighting(item.name, "starting", is_hung=states[item.name] == "starting")
            if item.name in self.frozen & self.running.keys()
            else item
            for item in result
        )


@dataclass
class GatewayWithEngineUrls(FakeGateway):
    """Says which engine its replicas have."""

    at: str = ""

    def wanted(self) -> dict[str, Any]:
        result = super().wanted()
        return result | {"replicas": [{**item, "url": self.at} for item in result["replicas"]]}


class FreezingWorld(World):
    machine: FreezingMachine
    gateway: GatewayWithEngineUrls


@pytest.fixture
def frozen_world(tmp_path: Path) -> FreezingWorld:
    made = FreezingWorld(tmp_path)
    made.machine, made.gateway = FreezingMachine(), GatewayWithEngineUrls()
    return made


@pytest.mark.parametrize("starting", [False, True])
def test_permanently_frozen_engine_is_killed_and_replaced(
    frozen_world: FreezingWorld, starting: bool
) -> None:
    """It lives and will never answer: what takes its replica's place must not be it."""
    frozen_world.gateway.replicas = ["a"]
    controller = frozen_world.controller()
    frozen_world.turns(controller, 1 if starting else 4)
    (victim,) = frozen_world.machine.running
    frozen_world.machine.frozen = {victim}
    frozen_world.gateway.replicas = ["again"]
    frozen_world.turns(controller, 15)
    assert frozen_world.machine.killed == [], "for a while it may go on"
    frozen_world.turns(controller, 15)
    assert frozen_world.machine.killed == [victim]
    (serving,) = frozen_world.gateway.fleet
    assert (serving.replica, serving.name == victim) == ("again", False)
    (cleared,) = [
        happening for happening in StateStore(frozen_world.path).happenings() if happening.kind == "clear"
    ]
    assert (cleared.what, cleared.why) == (victim, "was silent for 20 s")


@pytest.mark.parametrize("unsure", ["the gateway reaches it", "nobody knows what the gateway has"])
def test_engine_silent_to_the_controller_is_kept_while_the_gateway_may_reach_it(
    frozen_world: FreezingWorld, unsure: str
) -> None:
    frozen_world.gateway.replicas = ["a"]
    controller = frozen_world.controller()
    frozen_world.turns(controller, 4)
    (name,) = frozen_world.machine.running
    frozen_world.gateway.at = f"http://{name}"
    frozen_world.machine.frozen = {name}
    frozen_world.gateway.away = unsure == "nobody knows what the gateway has"
    frozen_world.turns(controller, 60)
    assert frozen_world.machine.killed == []
    assert list(frozen_world.machine.running) == [name]


WANTED: dict[str, Any] = {"replan": {"reason": "prices"}, "replicas": []}


def plan(count: int) -> Plan:
    layout = single("1xL4", 1, 2)
    template = Template(
        "t", "homogeneous", "m", (NodeCount("1xL4", 1),), (PlannedReplica("mixed", layout),), (), "measured"
    )
    return Plan("auto", (template,), (Deployment("t", "east", count),), (), (), (), (), 1.5, 0.0)


def regions_with_nodes(count: int) -> tuple[Region, ...]:
    return (Region("east", (NodeOffer("1xL4", 1.0, count),)),)


@dataclass
class SlowPlanner:
    """Takes all nodes that it is told of, when it is let go."""

    go: threading.Event = field(default_factory=threading.Event)
    asked: list[int] = field(default_factory=list)

    def first(self, plan_request: PlanRequest) -> PlanReply:
        return PlanReply(None, "")

    def full(self, plan_request: PlanRequest) -> PlanReply:
        assert plan_request.regions is not None
        self.asked.append(plan_request.regions[0].offers[0].available)
        assert self.go.wait(60)
        return PlanReply(plan(self.asked[-1]), "more")


def test_plan_for_nodes_lost_meanwhile_is_made_again(tmp_path: Path) -> None:
    slow, adopted, notes = SlowPlanner(), [], []
    planning = PlanRequests(
        StateStore(tmp_path / "state.db"),
        slow,
        lambda made, reason: adopted.append(made.deployments[0].count) or len(adopted),
        lambda kind, what, why: notes.append(f"{what}: {why}"),
    )

    def turned(count: int) -> None:
        planning.turn(WANTED, regions_with_nodes(count))
        while planning.under_way is not None:
            planning.under_way.result(60)
            planning.turn(WANTED, regions_with_nodes(count))

    planning.turn(WANTED, regions_with_nodes(3))
    slow.go.set()
    turned(2)  # one has gone while it was made
    turned(2)
    assert (slow.asked, adopted) == ([3, 2], [2])
    assert "begins anew: it wants 3 x 1xL4 in east, and there are 2 since it was begun" in notes
    planning.close()


def test_plan_is_adopted_when_more_nodes_became_available(tmp_path: Path) -> None:
    slow, adopted = SlowPlanner(), []
    slow.go.set()
    planning = PlanRequests(
        StateStore(tmp_path / "state.db"),
        slow,
        lambda made, reason: adopted.append(made.deployments[0].count) or len(adopted),
        lambda kind, what, why: None,
    )
    planning.turn(WANTED, regions_with_nodes(3))
    while planning.under_way is not None:
        planning.under_way.result(60)
        planning.turn(WANTED, regions_with_nodes(4))
    assert adopted == [3]
    planning.close()
