"""A Brain that takes another's place knows what is under way: it counts it, and lets go of it, as its own."""

from __future__ import annotations

import brain_builders as build
import pytest
from brain_builders import World
from hypothesis import given
from hypothesis import strategies as st
from test_brain_stateful import PLANS, POLICIES

from potluck.core.brain.brain import Brain
from potluck.core.state.actions import Abort, Run
from potluck.core.state.events import (
    AttemptFailed,
    RequestAdopted,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
)
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.route import aggregated, handed_over


def adopt(world: World, plan: Plan, policy: Policy, ready: bool) -> World:
    """What a driver tells another Brain of all that is open, and that Brain's world."""
    after = World(Brain(build.facts(plan.templates), policy))
    after.plan(plan, ready)
    for name, request in world.requests.items():
        if name in world.ended:
            continue
        after.requests[name] = request
        job = world.jobs.get(name)
        if job is None:
            after.tell(RequestArrived(request))
            continue
        run = job.run
        after.attempts[name] = run.attempt + 1
        actions = after.tell(
            RequestAdopted(request, run.attempt, run.streamed_tokens, run.route, job.done, job.first)
        )
        if not actions:
            after.jobs[name] = job
    return after


@given(
    st.sampled_from(sorted(PLANS)),
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3)), min_size=1, max_size=12),
    st.booleans(),
)
def test_whatever_is_under_way_is_counted_and_let_go_of(
    name: str, policy: Policy, asked: list[tuple[int, int]], ready: bool
) -> None:
    plan = PLANS[name]
    model = plan.templates[-1].model
    world = World(Brain(build.facts(plan.templates), policy))
    world.plan(plan)
    for place, (prompt, steps) in enumerate(asked):
        world.arrive(build.request(f"r{place}", prompt, model=model))
        for _ in range(steps):
            if f"r{place}" in world.jobs:
                world.advance(f"r{place}")
    under_way = set(world.jobs)
    after = adopt(world, plan, policy, ready)
    assert set(after.brain.requests) == set(world.requests) - set(world.ended) - set(after.ended)
    assert under_way <= set(after.jobs) | set(after.ended)
    before, now = world.brain.fleet.views, after.brain.fleet.views
    if set(world.jobs) == set(after.jobs):
        for replica, view in before.items():
            assert now[replica].open_requests == view.open_requests
            assert now[replica].open_context_tokens == view.open_context_tokens
            assert now[replica].open_prefill_tokens == view.open_prefill_tokens
    after.all_ready()
    while after.jobs:
        after.finish(next(iter(after.jobs)))
        after.now_s += 1.0
        after.tell(Tick())
    after.now_s += 10.0
    after.tell(Tick())
    while after.jobs:
        after.finish(next(iter(after.jobs)))
    build.assert_at_rest(after.brain)


PLAIN = build.template("plain", closed=(1.0, 1.0))
TWO = build.plan((PLAIN,), {("plain", "near"): 2}, {("plain", "near", "closed"): (1.0, 1.0)})


@pytest.fixture
def world() -> World:
    made = build.world(TWO)
    made.requests["r"] = build.request("r", 100, 50)
    return made


def test_it_goes_on_and_recovers_as_any_other(world: World) -> None:
    one, other = sorted(world.members)
    request = world.requests["r"]
    assert world.tell(RequestAdopted(request, 2, 10, aggregated(one), 0, True)) == []
    assert world.tell(RequestAdopted(request, 2, 10, aggregated(other), 0, True)) == [], "once"
    assert world.tell(RequestArrived(request)) == []
    assert world.tell(RequestFinished("r", 1, 50)) == [], "of an earlier attempt"
    world.attempts["r"] = 3
    (run,) = [
        each for each in world.tell(AttemptFailed("r", 2, "replica", one, 17)) if not isinstance(each, Abort)
    ]
    assert run == Run("r", aggregated(other), 3, 117, 17)
    world.finish("r")
    build.assert_at_rest(world.brain)


def test_what_is_nowhere_is_sent_from_where_its_user_is(world: World) -> None:
    request = world.requests["r"]
    world.attempts["r"] = 5
    (run,) = world.tell(RequestAdopted(request, 4, 20, None))
    assert isinstance(run, Run)
    assert (run.attempt, run.streamed_tokens, run.prompt_tokens) == (5, 20, 120)
    world.finish("r")
    build.assert_at_rest(world.brain)


def test_where_a_replica_is_not_known_it_is_sent_again(world: World) -> None:
    one = min(world.members)
    request = world.requests["r"]
    world.attempts["r"] = 1
    (run,) = world.tell(RequestAdopted(request, 0, 0, handed_over("gone", one, 60), 0, False))
    assert isinstance(run, Run)
    assert run.attempt == 1
    assert world.tell(RequestCancelled("r"))
    build.assert_at_rest(world.brain)
