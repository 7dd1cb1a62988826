"""Manual changes hold until they are reset, or their loss is reported."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from test_controller import PLAN, TEMPLATE, FixedPlanner, World, run_until_planned

from potluck.control.control_values import EngineInstance, EngineSpec, LaunchEngine, StopEngine, WantedReplica
from potluck.control.launchers.process import started_at
from potluck.control.local_stack import LocalStack, LocalStackSettings
from potluck.control.manual_changes import (
    KeptCordons,
    is_by_hand,
    leave,
    leaving,
    planned_last,
    put_plan,
    scaled,
    stay,
)
from potluck.control.reconciler import ReconcilerMemory, step
from potluck.control.state_store import PlanVersion, StateStore
from potluck.core.errors import CapacityError, InputError, PotluckError
from potluck.core.values.layout import single
from potluck.core.values.plan import BucketCapacity, Deployment, Plan, PlannedShare, plan_from_json, plan_mark
from potluck.core.values.types import NodeOffer, Region

MAKE = EngineSpec("m", single("1xA10", 1, 2), "east")


def test_manual_scaling_changes_copies_and_cost() -> None:
    more = scaled(PLAN, "t", "east", 2, {"east": 0.75})
    assert more.deployments == (Deployment("t", "east", 2),)
    assert more.cost_usd_per_h == pytest.approx(1.5 + 2 * 0.75)
    less = scaled(more, "t", "east", 0, {"east": 0.75})
    assert less.deployments == ()
    assert less.cost_usd_per_h == pytest.approx(1.5)
    for wrong in (("x", "east", 1), ("t", "west", 1), ("t", "east", -1)):
        with pytest.raises(InputError):
            scaled(PLAN, *wrong, {"east": 0.75})


def test_manually_added_copies_get_planned_request_shares() -> None:
    able = replace(TEMPLATE, capacity=(BucketCapacity(0, 0.0, 0.0, 3.0, 0.1, 0.02),))
    never = replace(able, name="u")
    plan = replace(
        PLAN,
        templates=(able, never),
        deployments=(Deployment("t", "east", 2),),
        shares=(PlannedShare("t", "east", 0, "closed", 4.0),),
    )
    usd = {"east": 1.0, "west": 1.0}
    assert scaled(plan, "t", "east", 3, usd).shares == (PlannedShare("t", "east", 0, "closed", 6.0),)
    both = scaled(plan, "t", "west", 2, usd)
    assert both.shares == (*plan.shares, PlannedShare("t", "west", 0, "closed", 4.0))
    assert scaled(both, "t", "west", 0, usd).shares == plan.shares
    assert scaled(plan, "u", "west", 2, usd).shares == (
        *plan.shares,
        PlannedShare("u", "west", 0, "closed", 6.0),
    )
    assert scaled(PLAN, "t", "east", 2, usd).shares == ()


def test_leaving_engine_is_not_reused_and_stops_at_once() -> None:
    engine = EngineInstance("i", MAKE, "up", 0.0, "http://i", "old")
    kept = step([WantedReplica("old", MAKE, "mixed", True)], [engine], ReconcilerMemory(), 0.0, leaving={"i"})
    assert kept.orders == (), "it is still being emptied"
    result = step([WantedReplica("new", MAKE, "mixed")], [engine], ReconcilerMemory(), 0.0, leaving={"i"})
    assert [order.want.replica for order in result.orders if isinstance(order, LaunchEngine)] == ["new"]
    assert StopEngine("i", "its replica was drained by hand, or its machine goes") in result.orders


def test_leaving_engines_are_remembered_until_they_are_gone(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state.db")
    for name in ("a", "b", "c"):
        store.put(EngineInstance(name, MAKE, "up", 0.0))
    leave(store, ["a"])
    leave(store, ["b", "c"])
    stay(store, ["c"])
    assert leaving(store) == {"a", "b"}
    store.remove("a")
    leave(store, [])
    assert leaving(store) == {"b"}


def test_manually_drained_replica_gets_a_new_engine(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gateway.replicas = ["a"]
    controller = world.controller()
    world.turns(controller, 4)
    (old,) = world.machine.running
    leave(StateStore(world.path), [old])
    world.gateway.replicas = ["b"]
    world.turns(controller, 5)
    assert old not in world.machine.running
    assert [item.replica for item in world.gateway.fleet] == ["b"]
    assert world.machine.started == 2


def test_planner_only_advises_while_a_manual_plan_holds(tmp_path: Path) -> None:
    world = World(tmp_path)
    store = StateStore(world.path)
    store.add_plan(PLAN, 0.0, "by hand: t@east=2")
    assert is_by_hand(store.plan())
    assert not is_by_hand(PlanVersion(1, 0.0, "potluck up", PLAN))
    controller = world.controller(FixedPlanner(scaled(PLAN, TEMPLATE.name, "east", 5, {"east": 1.0})))
    world.gateway.replan = {"rates_per_s": {"m": 3.0}, "reason": "more is asked for"}
    world.turns(controller, 1)
    run_until_planned(world, controller)
    assert world.gateway.plans == []
    (advice,) = [happening for happening in store.happenings() if happening.kind == "advice"]
    assert "by hand and holds" in advice.why
    store.add_plan(PLAN, 1.0, "handed back (was by hand)")
    world.gateway.replan = {"rates_per_s": {"m": 4.0}, "reason": "even more"}
    world.turns(controller, 1)
    run_until_planned(world, controller)
    assert len(world.gateway.plans) == 1


def test_restarted_controller_keeps_a_manual_plan_while_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LocalStackSettings(tmp_path, tmp_path / "potluck.yaml")
    other = scaled(PLAN, "t", "east", 2, {"east": 0.75})
    LocalStack(settings, PLAN).close()
    store = StateStore(tmp_path / "state.db")
    me = {"pid": os.getpid(), "started": started_at(os.getpid())}
    assert store.get("controller") == me, "so that it can be asked to end"
    store.add_plan(other, 1.0, "by hand: t@east=2")
    store.set("gateway", me)
    again = LocalStack(settings, PLAN)
    assert again.plan == other
    assert store.happenings()[-1].what == "version 2 stays"

    def no_more(*_: object, **__: object) -> None:
        raise CapacityError("no processes left")

    monkeypatch.setattr("potluck.control.held_sockets.spawn", no_more)
    store.set("gateway", None)
    with pytest.raises(CapacityError, match="no processes left"):
        again.open()
    assert plan_from_json((tmp_path / "plan.json").read_text()) == other, "a gateway begins with the newest"
    again.close()
    anew = LocalStack(settings, PLAN)
    assert anew.plan == PLAN
    assert "version 2, made by hand, goes" in [happening.what for happening in store.happenings()]
    anew.close()


def test_restarted_controller_keeps_the_plan_its_gateway_serves(tmp_path: Path) -> None:
    """Unless the spec is another one: then what was planned for it counts."""
    spec = tmp_path / "potluck.yaml"
    spec.write_text("one")
    settings = LocalStackSettings(tmp_path, spec)
    LocalStack(settings, PLAN).close()
    store = StateStore(tmp_path / "state.db")
    other = scaled(PLAN, "t", "east", 2, {"east": 0.75})
    store.add_plan(other, 1.0, "more is asked for")
    store.set("gateway", {"pid": os.getpid(), "started": started_at(os.getpid())})
    again = LocalStack(settings, PLAN)
    assert again.plan == other
    again.close()
    spec.write_text("another")
    anew = LocalStack(settings, PLAN)
    assert anew.plan == PLAN
    newest = store.plan()
    assert newest is not None
    assert newest.plan == PLAN
    anew.close()


def test_restarted_gateway_gets_its_cordons_again(tmp_path: Path) -> None:
    store, message = StateStore(tmp_path / "state.db"), list[list[str]]()

    def tell(marks: Iterable[str]) -> None:
        if not message:
            message.append([])
            raise PotluckError("it does not answer")
        message.append(sorted(marks))

    kept = KeptCordons(store, tell)
    assert kept.heed({"cordoned": [], "up_s": 5.0}) == ""
    assert kept.heed({"cordoned": ["h", "h:1"], "up_s": 6.0}) == ""
    assert kept.heed({"cordoned": ["h"], "up_s": 7.0}) == ""
    assert message == [], "who knows is not told"
    assert kept.heed({"cordoned": [], "up_s": 0.1}) == "it does not answer"
    assert kept.heed({"cordoned": [], "up_s": 0.6}) == "", "it is asked again"
    assert message == [[], ["h"]]
    assert kept.heed({"cordoned": [], "up_s": 1.1}) == ""
    assert KeptCordons(store, tell).heed({"cordoned": [], "up_s": 1.6}) == "", "it was uncordoned meanwhile"
    assert message == [[], ["h"]]


def test_gateway_with_another_plan_version_gets_the_plan_once(tmp_path: Path) -> None:
    """One of an older release keeps its own; it is not told the plan again and again."""
    world = World(tmp_path)
    StateStore(world.path).add_plan(PLAN, 1.0, "handed back: as version 1")
    message: list[int] = []
    wanted = world.gateway.wanted
    world.gateway.wanted = lambda: {**wanted(), "plan_version": 1}  # type: ignore[method-assign]
    world.gateway.set_plan = lambda plan, why="", version=0: message.append(version)  # type: ignore[method-assign]
    world.gateway.mark = plan_mark(PLAN)
    world.turns(world.controller(), 5)
    assert message == [2]


def test_plan_refused_by_the_gateway_is_not_stored(tmp_path: Path) -> None:
    store = StateStore(World(tmp_path).path)

    def refuse(plan: Plan, why: str, version: int) -> None:
        assert version == 2
        raise InputError("plan", "no such model")

    with pytest.raises(InputError, match="no such model"):
        put_plan(store, refuse, PLAN, "by hand: t@east=9", 1.0)
    assert [version for version, _ in store.versions()] == [1]
    assert put_plan(store, lambda *_: None, PLAN, "by hand: t@east=2", 2.0) == 3, "no number is used twice"
    last = planned_last(store)
    assert last is not None
    assert last.version == 1


def test_manual_scaling_beyond_available_nodes_is_refused() -> None:
    cost, nodes = {"east": 0.5}, {("east", "1xA10"): 5, ("west", "1xL4"): 1}
    assert scaled(PLAN, "t", "east", 5, cost, nodes).deployments[-1].count == 5
    with pytest.raises(
        InputError, match="6 cannot be had: east has 5 x 1xA10, enough for 5; ask for 5 at most"
    ):
        scaled(PLAN, "t", "east", 6, cost, nodes)
    other = replace(TEMPLATE, name="u")
    both = replace(
        PLAN, templates=(*PLAN.templates, other), deployments=(*PLAN.deployments, Deployment("u", "east", 2))
    )
    with pytest.raises(InputError, match="has 5 x 1xA10, 2 of them for other copies, enough for 3"):
        scaled(both, "t", "east", 4, cost, nodes)
    with pytest.raises(InputError, match="west has not all that a copy needs"):
        scaled(PLAN, "t", "west", 1, cost, nodes)


def test_manual_scaling_charges_nodes_beyond_reserved_ones_and_used_head_nodes() -> None:
    node = PLAN.template("t").nodes[0].node
    east = Region("east", (NodeOffer(node, 0.75, 9, reserved=3),), head_usd_per_h=0.3)
    west = Region("west", (NodeOffer(node, 1.0, 9),), head_usd_per_h=0.5)
    cost, regions = {"east": 0.75, "west": 1.0}, (east, west)
    assert scaled(PLAN, "t", "east", 3, cost, regions=regions).cost_usd_per_h == 0.0
    both = scaled(scaled(PLAN, "t", "east", 5, cost, regions=regions), "t", "west", 1, cost, regions=regions)
    assert both.cost_usd_per_h == pytest.approx(2 * 0.75 + 1.0)
    assert both.total_usd_per_h == pytest.approx(2 * 0.75 + 1.0 + 0.3 + 0.5)
    left = scaled(both, "t", "west", 0, cost, regions=regions)
    assert left.total_usd_per_h == pytest.approx(2 * 0.75 + 0.3)
    assert scaled(left, "t", "east", 0, cost, regions=regions).total_usd_per_h == 0.0
