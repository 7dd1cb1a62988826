"""Copies on standby: what is kept, when one serves and goes back, and that no request is sent to one."""

from __future__ import annotations

import random

import brain_builders as brains
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scale_builders import World, observed, plan_of, target_per_s, template, traffic

from potluck.core.errors import InputError
from potluck.core.scaling.cauchy_scaling import CauchyScaling
from potluck.core.scaling.copy_capacity import Key, blueprints
from potluck.core.scaling.rule import Resize, missing_copies
from potluck.core.scaling.standby import spoken, standby_counts, standby_usd_per_h
from potluck.core.state.actions import DrainReplica, Reassign, Run, StartReplica, StopReplica
from potluck.core.state.events import Tick
from potluck.core.state.policy import Policy
from potluck.core.values.plan import LengthBucket, Plan, PlannedShare
from potluck.core.values.types import NodeOffer, Region

SMALL, LARGE = template("small", 10.0), template("large", 25.0, nodes={"big": 1})
COMBO = template("combo", 5.0, roles=("prefill", "decode"))
KNOWN = blueprints(plan_of((SMALL, LARGE, COMBO), {}))
REGIONS = (Region("east", (NodeOffer("n", 1.0, 10), NodeOffer("big", 2.0, 4))),)
S, L, C = ("small", "east"), ("large", "east"), ("combo", "east")
counts = st.dictionaries(st.sampled_from([S, L, C]), st.integers(0, 3))


def settled(wanted: dict[Key, int], standby: dict[Key, int], nodes: int | None = None) -> World:
    limits = None if nodes is None else {("east", "n"): nodes, ("east", "big"): nodes}
    world = World(KNOWN, wanted, random.Random(1), limits)
    world.standby = standby
    settle(world)
    return world


def settle(world: World) -> None:
    for _ in range(200):
        if world.call().settled:
            return
        world.pass_time()
    raise AssertionError(f"not settled: {world.fleet.units}")


@given(old=counts, new=counts, before=counts, after=counts, seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_both_numbers_are_reached_without_serving_less_on_the_way(
    old: dict[Key, int], new: dict[Key, int], before: dict[Key, int], after: dict[Key, int], seed: int
) -> None:
    world = settled(old, before)
    world.chance = random.Random(seed)
    assert world.counts() == old
    assert world.counts(standby=True) == before
    floor = min(world.serving_per_s("m"), target_per_s(KNOWN, new, "m"))
    world.wanted, world.standby = {**dict.fromkeys(old, 0), **new}, after
    for _ in range(200):
        done = world.call().settled
        assert world.serving_per_s("m") >= floor - 1e-9
        assert not any(view.serves for view in world.fleet.views.values() if view.member.standby)
        if done:
            break
        world.pass_time()
    assert world.counts() == {**dict.fromkeys(old, 0), **new}
    there = world.counts(standby=True)
    assert {key: n for key, n in there.items() if n} == {key: n for key, n in after.items() if n}


@given(wanted=counts, standby=counts, seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_losses_are_made_good(wanted: dict[Key, int], standby: dict[Key, int], seed: int) -> None:
    world = settled(wanted, standby)
    world.chance = random.Random(seed)
    for _ in range(15):
        world.pass_time(lose=0.1)
        world.call()
    settle(world)
    assert world.counts() == wanted
    assert world.counts(standby=True) == standby


def test_more_is_there_at_once_and_the_place_is_filled_again() -> None:
    world = settled({S: 1}, {S: 1})
    world.wanted = {S: 2}
    actions = world.call().actions
    assert [type(action) for action in actions] == [Reassign, StartReplica]
    assert world.serving_per_s("m") == 20.0
    assert isinstance(actions[1], StartReplica)
    assert actions[1].member.standby


def test_what_is_too_much_takes_the_place_of_one_that_is_still_starting() -> None:
    world = settled({S: 1}, {S: 1})
    world.wanted = {S: 2}
    world.call()
    world.wanted = {S: 1}
    actions = world.call().actions
    assert [type(action) for action in actions] == [Reassign, StopReplica], "nothing is drained"
    assert world.counts() == world.counts(standby=True) == {S: 1}
    world.wanted = {S: 0}
    assert [type(action) for action in world.call().actions] == [DrainReplica], "its place is taken"


def test_a_copy_with_other_roles_than_planned_does_not_go_on_standby() -> None:
    world = settled({C: 2}, {})
    for view in world.fleet.views.values():
        world.fleet.flip(view.member.id, "mixed")
    world.wanted, world.standby = {C: 1}, {C: 1}
    kinds = {type(action) for action in world.call().actions}
    assert Reassign not in kinds
    assert DrainReplica in kinds


def test_a_lost_replica_of_a_copy_on_standby_comes_back_on_standby() -> None:
    world = settled({C: 1}, {C: 1})
    idle = next(view.member for view in world.fleet.views.values() if view.member.standby)
    world.fleet.remove(idle.id)
    (action,) = world.call().actions
    assert isinstance(action, StartReplica)
    assert (action.member.unit, action.member.index, action.member.standby) == (idle.unit, idle.index, True)


def test_nodes_go_to_what_is_to_serve() -> None:
    world = settled({C: 1}, {S: 1}, nodes=2)
    world.wanted = {C: 2}
    step = world.call()
    assert [type(action) for action in step.actions] == [DrainReplica], "the one on standby goes"
    for _ in range(30):
        world.pass_time()
        step = world.call()
    assert world.counts() == {C: 2}
    assert step.notes == ("small@east: 1 wanted on standby, but there are no nodes",)


def test_scale_out_takes_ready_copies_first_whatever_others_cost() -> None:
    plan = plan_of((SMALL, LARGE), {S: 2, L: 0})
    world = settled({S: 2}, {S: 1})
    rule = CauchyScaling(Policy(scaling="cauchy"), REGIONS)
    tick = rule.on_tick(1000.0, observed(1000.0, traffic(24.0)), world.fleet, plan)
    assert [item[:3] for item in tick if isinstance(item, Resize)] == [("small", "east", 3)]
    rule = CauchyScaling(Policy(scaling="cauchy"), REGIONS)
    tick = rule.on_tick(1000.0, observed(1000.0, traffic(40.0)), world.fleet, plan)
    more = {item.template: item.copies for item in tick if isinstance(item, Resize)}
    assert more == {"small": 3, "large": 1}, "only what they leave is started: 2 of 3 and a large one"


def test_scaling_counts_no_copy_on_standby() -> None:
    plan = plan_of((SMALL, LARGE), {S: 2})
    world = settled({S: 2}, {S: 2})
    rule = CauchyScaling(Policy(scaling="cauchy"), REGIONS)
    assert not rule.on_tick(1000.0, observed(1000.0, traffic(16.0)), world.fleet, plan)
    assert "served are 16" in rule.why()
    lacks = settled({S: 1}, {S: 2})
    assert missing_copies(lacks.fleet, plan) == 1


def test_of_copies_that_take_all_requests_the_best_for_its_rent_is_kept() -> None:
    plan = plan_of((SMALL, LARGE), {S: 2, L: 1})
    result = standby_counts(plan, 2, REGIONS)
    assert result == {L: 2}, "25 requests for 2 USD, not 10 for 1"
    assert standby_usd_per_h(plan, result, REGIONS) == 4.0
    assert spoken(plan, 2, REGIONS) == "on standby: 2 x large in east; $4.00/h more, $4.00/h in all"
    assert standby_counts(plan, 0, REGIONS) == {}
    assert spoken(plan, 0, REGIONS) == ""


def test_where_phases_or_lengths_are_apart_each_part_has_its_own() -> None:
    pre, dec = (
        template("pre", prefill=4.0, roles=("prefill",)),
        template("dec", decode=6.0, roles=("decode",)),
    )
    keys = {("pre", "east"): 1, ("dec", "east"): 2}
    assert standby_counts(plan_of((pre, dec), keys), 1, REGIONS) == dict.fromkeys(keys, 1)
    buckets = (LengthBucket("m", 0, 1000, 1.0), LengthBucket("m", 1, 9000, 1.0))
    both = plan_of((SMALL, LARGE), {S: 1, L: 1}, buckets)
    shares = (
        PlannedShare("small", "east", 0, "closed", 1.0),
        PlannedShare("large", "east", 1, "closed", 1.0),
    )
    parted = Plan("t", both.templates, both.deployments, buckets, shares, (), (), 0.0, 0.0)
    assert set(standby_counts(parted, 1, REGIONS)) >= {S}


def test_no_request_is_sent_to_a_copy_on_standby_until_it_takes_over() -> None:
    one = brains.template("t", closed=(5.0, 5.0))
    plan = brains.plan([one], {("t", "near"): 1}, {("t", "near", "closed"): (1.0, 1.0)})
    world = brains.world(plan, Policy(standby=1))
    idle = [name for name, view in world.brain.fleet.views.items() if view.member.standby]
    (serving,) = set(world.brain.fleet.views) - set(idle)
    assert len(idle) == 1
    world.tell(Tick())
    for number in range(20):
        world.arrive(brains.request(f"r{number}"))
    runs = [action for _, _, actions in world.log for action in actions if isinstance(action, Run)]
    assert {segment.replica for run in runs for segment in run.route.segments} == {serving}
    for number in range(20):
        world.finish(f"r{number}")
    world.lose(serving)
    world.arrive(brains.request("held"))
    assert "held" not in world.jobs
    world.now_s += 1.0
    actions = world.tell(Tick())
    assert [type(item) for item in actions[:2]] == [Reassign, Run], "there at once, with what was held"
    assert world.jobs["held"].run.route.segments[0].replica == idle[0]
    (refill,) = [item.member for item in actions if isinstance(item, StartReplica)]
    assert refill.standby


def test_what_runs_on_a_copy_that_goes_on_standby_ends_there() -> None:
    one = brains.template("t", closed=(5.0, 5.0))
    two = brains.plan([one], {("t", "near"): 2}, {("t", "near", "closed"): (1.0, 1.0)})
    world = brains.world(two, Policy(standby=1))
    (idle,) = [name for name, view in world.brain.fleet.views.items() if view.member.standby]
    world.tell(Tick())
    for name in "ab":
        world.arrive(brains.request(name))
    places = {name: world.jobs[name].run.route.segments[0].replica for name in "ab"}
    assert len(set(places.values())) == 2
    world.lose(idle)
    actions = world.plan(brains.plan([one], {("t", "near"): 1}, {("t", "near", "closed"): (1.0, 1.0)}))
    (moved,) = [action.member.id for action in actions if isinstance(action, Reassign)]
    assert moved in places.values()
    world.arrive(brains.request("c"))
    world.arrive(brains.request("d"))
    assert moved not in {world.jobs[name].run.route.segments[0].replica for name in "cd"}
    for name in "abcd":
        world.finish(name)
    assert set(world.ended.values()) == {"answered"}
    brains.assert_at_rest(world.brain)


def test_less_than_none_is_no_number_of_copies() -> None:
    with pytest.raises(InputError, match="policy: standby: must not be negative, is -1"):
        Policy(standby=-1)
