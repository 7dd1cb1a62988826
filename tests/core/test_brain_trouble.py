"""What the Brain makes of doubtful replicas, of crowds that waited, of promises kept, and of copies in part."""

from __future__ import annotations

from dataclasses import replace

import brain_builders as build
import pytest

from potluck.core.brain.recovery import QUARANTINE_S
from potluck.core.state.actions import Run
from potluck.core.state.events import ReplicaReported, ReplicaSilent, ReplicaStatus, Tick
from potluck.core.state.fleet import FleetState
from potluck.core.state.policy import Policy
from potluck.core.values.replica_spec import ReplicaSpec
from potluck.core.values.types import Slo

ONE = build.template("one", closed=(1.0,))
THREE = build.plan((ONE,), {("one", "near"): 3}, {("one", "near", "closed"): (1.5,)}, longest=(200_000,))
COMBO = build.template("combo", ("prefill", "decode", "decode"), kind="combo", closed=(1.0,))
COMBOS = build.plan(
    (COMBO,), {("combo", "near"): 2}, {("combo", "near", "closed"): (1.0,)}, longest=(200_000,)
)
IDLE = ReplicaStatus(0, 0, 0, 0, 100, 100, 0.0)


def sent(world: build.World, prefix: str, count: int = 12) -> set[str]:
    """Who works on the next requests."""
    found: set[str] = set()
    for number in range(count):
        for action in world.arrive(build.request(f"{prefix}{number}")):
            assert isinstance(action, Run)
            found |= {segment.replica for segment in action.route.segments}
    return found


@pytest.mark.parametrize("heals", ["report", "time"])
@pytest.mark.parametrize("plan", [THREE, COMBOS], ids=["plain", "combos"])
def test_a_replica_that_may_be_gone_gets_nobody_until_it_is_heard_of(plan: build.Plan, heals: str) -> None:
    world = build.world(plan, Policy(opportunistic=False))
    (run,) = world.arrive(build.request("a"))
    assert isinstance(run, Run)
    doubted = run.route.decoder
    again = world.fail("a", "replica", doubted)[-1]
    assert isinstance(again, Run)
    assert doubted not in sent(world, "b")
    world.now_s = 0.5 * QUARANTINE_S
    world.tell(Tick())
    world.tell(ReplicaReported(again.route.decoder, IDLE))
    assert doubted not in sent(world, "c")
    if heals == "report":
        world.tell(ReplicaReported(doubted, IDLE))
    else:
        world.now_s = QUARANTINE_S
        world.tell(Tick())
    assert doubted in sent(world, "d")


def test_a_silent_replica_gets_nobody_for_as_long_as_that_is_said() -> None:
    """Many times a day perhaps: what it says once it answers is believed, however often it was silent."""
    world = build.world(THREE)
    silent = "one@near#1/0"
    for turn in range(5):
        start_s = world.now_s
        while world.now_s < start_s + 3 * QUARANTINE_S:
            world.tell(ReplicaSilent(silent))
            world.now_s += QUARANTINE_S / 2
            world.tell(Tick())
            assert silent not in sent(world, f"{turn} {world.now_s} ", 3)
        world.tell(ReplicaReported(silent, IDLE))
        assert silent in sent(world, f"{turn} again ")
    world.tell(ReplicaSilent(silent))
    world.now_s += QUARANTINE_S
    world.tell(Tick())
    assert silent in sent(world, "time ", 12), "some do not report; nobody says that it is silent any more"
    assert world.tell(ReplicaSilent("nobody")) == []


def test_other_failures_are_no_reason_to_doubt_a_replica() -> None:
    world = build.world(THREE)
    (run,) = world.arrive(build.request("a"))
    assert isinstance(run, Run)
    world.fail("a", "timeout", run.route.decoder)
    assert run.route.decoder in sent(world, "b")


def test_a_crowd_that_waited_is_spread_over_those_that_come_up() -> None:
    batch = 8
    world = build.world(THREE, known=build.facts((ONE,), batch=batch), ready=False)
    for number in range(40):
        assert world.arrive(build.request(f"{number:02}")) == []
    first = [run for run in world.make_ready("one@near#0/0") if isinstance(run, Run)]
    assert [run.request for run in first] == [f"{number:02}" for number in range(batch)]
    assert len(world.make_ready("one@near#1/0")) == batch
    world.now_s = 1.0
    rest = [run for run in world.tell(Tick()) if isinstance(run, Run)]
    assert [run.request for run in rest] == [f"{number:02}" for number in range(2 * batch, 40)]
    loads = [world.brain.fleet.views[f"one@near#{copy}/0"].open_requests for copy in (0, 1)]
    assert sum(loads) == 40
    assert max(loads) <= 40 - 2 * batch
    world.now_s = 2.0
    assert world.tell(Tick()) == []


@pytest.mark.parametrize(("slo", "attained"), [(Slo(1.0, 0.05), 1), (Slo(0.5, 0.05), 0), (None, 2)])
def test_answers_that_came_too_late_do_not_count_as_attained(slo: Slo | None, attained: int) -> None:
    known = build.facts((ONE,))
    known = replace(known, models={"m": replace(known.models["m"], slo=slo)})
    world = build.world(THREE, Policy(scaling="cauchy"), known)
    for name in ("fast", "slow"):
        world.arrive(build.request(name, output=11))
    world.now_s = 0.8
    world.advance("fast")
    world.advance("slow")
    world.now_s = 1.2  # ten tokens later: 40 ms each
    world.advance("fast")
    world.now_s = 2.8
    world.advance("slow")
    (seen,) = world.brain.autoscaler.window.observed(3.0).models
    assert (seen.finished, seen.attained) == (2, attained)


def test_a_copy_that_lost_a_replica_is_not_whole_until_it_has_it_again() -> None:
    fleet = FleetState()
    members = [ReplicaSpec(f"u/{i}", "u", "t", i, "combo", "m", "mixed", "near") for i in range(2)]
    for member in members:
        fleet.add(member)
        fleet.ready(member.id)
    unit = fleet.units["u"]
    assert unit.whole
    fleet.remove("u/1")
    assert not unit.whole
    fleet.add(members[1])
    assert not unit.whole
    fleet.ready("u/1")
    assert unit.whole


@pytest.mark.parametrize("heals", [False, True])
def test_one_that_fails_again_and_again_is_tried_ever_more_seldom_however_well_it_says_it_is(
    heals: bool,
) -> None:
    world = build.world(THREE, Policy(retries=99, balance="round-robin"))
    bad = next(iter(world.members))
    tried: list[float] = []
    for number in range(900):
        world.now_s = number / 10
        world.tell(Tick())
        world.tell(ReplicaReported(bad, IDLE))
        name = f"r{number}"
        world.arrive(build.request(name))
        while world.jobs[name].run.route.decoder == bad and not (heals and number >= 300):
            tried.append(world.now_s)
            world.fail(name, "replica", bad)
        if heals and number >= 300 and world.jobs[name].run.route.decoder == bad:
            tried.append(world.now_s)
        world.finish(name)
    early, late = (sum(from_s <= at < from_s + 30 for at in tried) for from_s in (0, 60))
    assert 3 <= early <= 8, "it is tried, and then left alone"
    assert (late > 50) if heals else (late <= 3)
