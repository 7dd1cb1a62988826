"""Models that nobody asks for sleep where they may, and wake with the next request, which is held meanwhile."""

from __future__ import annotations

from dataclasses import replace

import brain_builders as build

from potluck.core.state.actions import DrainReplica, OperatorNote, Refuse, Run, StartReplica, StopReplica
from potluck.core.state.events import Tick
from potluck.core.state.policy import Policy
from potluck.core.values.types import Slo

ONE = build.template("one", closed=(1.0, 1.0))
PLAN = build.plan((ONE,), {("one", "near"): 2}, {("one", "near", "closed"): (1.0, 1.0)})


def facts(idle_s: float | None, slo: Slo | None = None) -> build.Facts:
    made = build.facts((ONE,))
    return replace(
        made, models={name: replace(each, idle_s=idle_s, slo=slo) for name, each in made.models.items()}
    )


def pass_time(world: build.World, until_s: float) -> list[object]:
    found: list[object] = []
    while world.now_s < until_s:
        world.now_s += 1.0
        found += world.tell(Tick())
    return found


def test_it_sleeps_after_a_while_and_the_first_request_waits_for_a_replica() -> None:
    world = build.world(PLAN, Policy(max_wait_s=120.0), known=facts(30.0, Slo(1.0, 0.1)))
    said = pass_time(world, 29.0)
    assert not [each for each in said if isinstance(each, OperatorNote | DrainReplica)]
    said = pass_time(world, 32.0)
    assert [each.what for each in said if isinstance(each, OperatorNote)] == ["m sleeps"]
    for name in [each.replica for each in said if isinstance(each, DrainReplica)]:
        world.drain_out(name)
    assert not world.brain.fleet.views
    assert world.arrive(build.request("a")) == []
    said = pass_time(world, 34.0)
    assert [each.what for each in said if isinstance(each, OperatorNote)] == ["m wakes"]
    starts = [each for each in said if isinstance(each, StartReplica)]
    assert len(starts) == 2
    pass_time(world, 60.0)
    actions = world.make_ready(starts[0].member.id)
    assert [type(each) for each in actions] == [Run], "late, but nobody could have been in time"
    assert not [each for _, _, made in world.log for each in made if isinstance(each, Refuse)]


def test_one_that_has_something_to_do_stays_awake_and_others_never_sleep() -> None:
    world = build.world(PLAN, known=facts(10.0))
    world.arrive(build.request("a"))
    assert not [
        each for each in pass_time(world, 30.0) if isinstance(each, OperatorNote | DrainReplica | StopReplica)
    ]
    world.finish("a")
    assert [each for each in pass_time(world, 45.0) if isinstance(each, DrainReplica)]
    world = build.world(PLAN, known=facts(None))
    assert not pass_time(world, 200.0)
