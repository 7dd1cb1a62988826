"""Wanted beside started: any order of happenings ends with just what is wanted."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from potluck.control.control_values import (
    AssignEngine,
    EngineInstance,
    EngineSpec,
    ForgetEngine,
    LaunchEngine,
    StopEngine,
    WantedReplica,
)
from potluck.control.reconciler import ReconcilerMemory, step
from potluck.core.values.layout import single

A = EngineSpec("m", single("1xA10", 1, 2), "east")
B = EngineSpec("m", single("1xL4", 1, 2), "east")


def _want(name: str, make: EngineSpec = A, *, draining: bool = False) -> WantedReplica:
    return WantedReplica(name, make, "mixed", draining)


def _up(name: str, replica: str = "", make: EngineSpec = A, since_s: float = 0.0) -> EngineInstance:
    return EngineInstance(name, make, "up", since_s, f"http://h/{name}", replica)


def test_what_is_there_is_used_before_anything_is_started() -> None:
    found = step(
        [_want("r1"), _want("r2"), _want("r3", B)], [_up("i1", "r1"), _up("i2")], ReconcilerMemory(), 0.0
    )
    assert AssignEngine("i2", "r2", "it was there and free") in found.orders
    launches = [order.want.replica for order in found.orders if isinstance(order, LaunchEngine)]
    assert launches == ["r3"]


def test_the_same_engine_serves_on_under_another_name() -> None:
    found = step([_want("new")], [_up("i", "old")], ReconcilerMemory(), 0.0)
    assert found.orders == (AssignEngine("i", "new", "it was there and free"),)


def test_what_nobody_wants_is_stopped_after_a_while_unless_started_by_hand() -> None:
    hand = replace(_up("hand"), pinned=True)
    first = step([], [_up("i", "r"), hand], ReconcilerMemory(), 10.0, linger_s=5.0)
    assert [type(order) for order in first.orders] == [AssignEngine]
    later = step([], [_up("i"), hand], first.memory, 15.0, linger_s=5.0)
    assert [order.instance for order in later.orders if isinstance(order, StopEngine)] == ["i"]


def test_a_want_that_comes_back_in_time_saves_its_engine() -> None:
    first = step([], [_up("i")], ReconcilerMemory(), 0.0, linger_s=5.0)
    again = step([_want("r")], [_up("i")], first.memory, 4.0, linger_s=5.0)
    assert [type(order) for order in again.orders] == [AssignEngine]
    gone = step([], [_up("i")], again.memory, 6.0, linger_s=5.0)
    assert gone.orders == ()


def test_starts_that_fail_are_tried_ever_more_rarely() -> None:
    memory, now_s, tries = ReconcilerMemory(), 0.0, []
    while now_s < 200:
        found = step([_want("r")], [], memory, now_s)
        memory = found.memory
        if found.orders:
            tries.append(now_s)
            why = ("no memory", "no port")[len(tries) % 2]
            dead = EngineInstance(f"i{now_s}", A, "dead", now_s, problem=why)
            found = step([_want("r")], [dead], memory, now_s)
            assert ForgetEngine(f"i{now_s}", why) in found.orders
            memory = found.memory
        else:
            assert "failed, the last as 'no " in found.waiting[0]
        now_s += 0.5
    assert tries[:5] == [0.0, 1.0, 3.0, 7.0, 15.0]
    assert tries[-1] - tries[-2] == 60.0


def test_one_that_is_up_makes_failures_forgotten() -> None:
    memory = ReconcilerMemory().failed(A, 0.0, "why").failed(A, 0.0, "why")
    found = step([_want("r")], [_up("i", "r")], memory, 1.0)
    assert found.memory.failures == {}


def test_a_start_that_takes_too_long_has_failed() -> None:
    slow = EngineInstance("i", A, "starting", 0.0, replica="r")
    found = step([_want("r")], [slow], ReconcilerMemory(), 11.0, start_s=10.0)
    assert [type(order) for order in found.orders] == [StopEngine]
    assert found.memory.failures[A].count == 1
    again = step([], [replace(slow, problem="was not ready after 10 s")], found.memory, 12.0, start_s=10.0)
    gone = replace(slow, state="dead", problem="was not ready after 10 s")
    ended = step([], [gone], again.memory, 13.0, start_s=10.0)
    assert ended.memory.failures[A].count == 1, "one start failed, however long its end takes"


def test_one_that_is_silent_for_long_is_ended_without_asking_and_another_is_started() -> None:
    hand = replace(_up("hand", "h"), pinned=True)
    wants, fleet = [_want("r"), _want("h")], [_up("i", "r"), hand]
    both = ("i", "hand")
    first = step(wants, fleet, ReconcilerMemory(), 0.0, silent=both, silent_s=20.0)
    assert first.orders == (), "it may be busy"
    heard = step(wants, fleet, first.memory, 19.0, silent_s=20.0)
    since = step(wants, fleet, heard.memory, 20.0, silent=both, silent_s=20.0)
    assert since.orders == (), "it was heard of between"
    late = step(wants, fleet, since.memory, 40.0, silent=both, silent_s=20.0)
    assert [type(order) for order in late.orders] == [StopEngine, LaunchEngine]
    assert late.orders[0] == StopEngine("i", "was silent for 20 s", True)


def test_what_drains_is_not_replaced() -> None:
    assert step([_want("r", draining=True)], [], ReconcilerMemory(), 0.0).orders == ()


@given(st.data())
def test_any_fleet_settles_on_what_is_wanted(data: st.DataObject) -> None:
    """Whatever there is, and whatever dies or is not carried out on the way: in the end each want has one engine of
    its make, no engine has two, and none is left over."""
    makes = st.sampled_from([A, B])
    wants = [_want(f"r{i}", make) for i, make in enumerate(data.draw(st.lists(makes, max_size=5)))]
    living = {
        f"i{i}": _up(f"i{i}", data.draw(st.sampled_from(["", "r0", "r1", "gone"])), make)
        for i, make in enumerate(data.draw(st.lists(makes, max_size=5)))
    }
    memory, now_s, started = ReconcilerMemory(), 0.0, 0
    for turn in range(60):
        now_s += 10.0
        found = step(wants, living.values(), memory, now_s, linger_s=20.0)
        memory = found.memory
        for order in found.orders:
            if turn < 10 and data.draw(st.booleans()):
                continue  # it was not carried out: the controller died
            match order:
                case LaunchEngine(want):
                    started += 1
                    living[f"n{started}"] = EngineInstance(
                        f"n{started}", want.make, "starting", now_s, replica=want.replica
                    )
                case AssignEngine(name, replica) if name in living:
                    living[name] = replace(living[name], replica=replica)
                case StopEngine(name) | ForgetEngine(name):
                    living.pop(name, None)
        for name, each in list(living.items()):
            if each.state == "starting":
                dies = turn < 10 and data.draw(st.booleans())
                living[name] = (
                    replace(each, state="dead", since_s=now_s, problem="died")
                    if dies
                    else replace(each, state="up", since_s=now_s, url="http://h")
                )
    assert sorted(each.replica for each in living.values()) == sorted(want.replica for want in wants)
    assert all(
        each.make == next(w.make for w in wants if w.replica == each.replica) for each in living.values()
    )
    assert step(wants, living.values(), memory, now_s).orders == ()
