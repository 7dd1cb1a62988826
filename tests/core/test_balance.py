"""The least-loaded index against a plain search, and what the balances do with unlike units."""

from __future__ import annotations

from collections import Counter

import brain_builders as build
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.routing.balance import LeastLoaded, decode_seconds, prefill_seconds, request_seconds
from potluck.core.routing.targets import PLAIN, Target
from potluck.core.state.actions import Run
from potluck.core.state.facts import ReplicaFacts
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.values.replica_spec import ReplicaSpec


def targets(count: int) -> list[Target]:
    members = [
        ReplicaSpec(f"r{i}", f"u{i}", "t", 0, "homogeneous", "m", "mixed", "here") for i in range(count)
    ]
    return [Target(PLAIN, member.unit, ReplicaState(member)) for member in members]


steps = st.lists(
    st.tuples(
        st.sampled_from(["pick", "heavier", "lighter", "set", "remove"]), st.integers(0, 5), st.floats(0.1, 9)
    ),
    max_size=60,
)


@given(steps)
@settings(max_examples=200)
def test_the_least_loaded_is_picked(steps: list[tuple[str, int, float]]) -> None:
    index = LeastLoaded(lambda target, weight: 1.0 / weight)
    all_targets, weights = targets(6), dict[int, float]()
    for what, place, number in steps:
        target = all_targets[place]
        if what == "set":
            index.set(target, number)
            weights[place] = number
        elif what == "remove":
            index.set(target, 0.0)
            weights.pop(place, None)
        elif what == "heavier":
            target.load += number
        elif what == "lighter":
            target.lighten(number)
        picked = index.pick()
        assert (picked is None) == (not weights)
        assert index.total == pytest.approx(sum(weights.values()))
        if picked is not None:
            best = min(all_targets[i].load + 1.0 / w for i, w in weights.items())
            chosen = all_targets.index(picked)
            assert picked.load + 1.0 / weights[chosen] == best


def test_a_request_takes_its_prefill_and_its_part_of_the_decode_steps() -> None:
    known = ReplicaFacts(1e-3, 0.5, 0.02, 10, 100, 1000)
    assert prefill_seconds(known, 1000) == pytest.approx(1.5)
    assert decode_seconds(known, 100) == pytest.approx(0.2)
    assert request_seconds(known, 1000, 100) == pytest.approx(1.7)


FAST = build.template("fast", closed=(3.0, 3.0))
SLOW = build.template("slow", closed=(1.0, 1.0))
TWO = build.plan(
    (FAST, SLOW),
    {("fast", "near"): 1, ("slow", "near"): 2},
    {("fast", "near", "closed"): (1.5, 1.5), ("slow", "near", "closed"): (1.0, 1.0)},
)


def replicas(world: build.World, count: int, finish: bool = False) -> Counter[str]:
    """Which template the next requests go to."""
    counts: Counter[str] = Counter()
    for number in range(count):
        (run,) = world.arrive(build.request(f"{len(world.requests)}-{number}"))
        assert isinstance(run, Run)
        counts[world.members[run.route.decoder].template] += 1
        if finish:
            world.finish(run.request)
    return counts


def test_goodput_sends_in_proportion_to_capacity() -> None:
    # By bucket half the time each: fast serves 1.5 + 1.5, two slow ones 1 + 1.
    assert replicas(build.world(TWO, Policy(balance="goodput")), 500) == {"fast": 300, "slow": 200}


def test_round_robin_is_blind_to_capacity() -> None:
    assert replicas(build.world(TWO, Policy(balance="round-robin")), 300) == {"fast": 100, "slow": 200}


def test_fixed_fractions_are_the_plans() -> None:
    plan = build.plan(
        (FAST, SLOW),
        {("fast", "near"): 1, ("slow", "near"): 2},
        {("fast", "near", "closed"): (0.2, 0.0), ("slow", "near", "closed"): (0.8, 0.0)},
    )
    assert replicas(build.world(plan, Policy(balance="fixed")), 100) == {"fast": 20, "slow": 80}


def test_by_tokens_the_unit_with_the_most_room_is_next() -> None:
    world = build.world(TWO, Policy(balance="token"))
    assert replicas(world, 30) == {"fast": 10, "slow": 20}  # all have as many blocks, so they fill up alike
    busy = {name for name, job in world.jobs.items() if "fast" in job.run.route.decoder}
    for name in busy:
        world.finish(name)
    assert replicas(world, 10) == {"fast": 10}


def test_least_work_fills_the_faster_first_and_follows_what_ends() -> None:
    world = build.world(TWO, Policy(balance="least-work"))
    (run,) = world.arrive(build.request("first"))
    assert isinstance(run, Run)
    assert "fast" in run.route.decoder  # with nothing open it would be done first
    for job in list(world.jobs):
        world.finish(job)
    assert replicas(world, 10, finish=True) == {"fast": 10}
    build.assert_at_rest(world.brain)


@pytest.mark.parametrize("balance", ["least-work", "token"])
def test_loads_come_back_to_nothing_along_flows(balance: str) -> None:
    plan = build.plan(
        (
            build.template("p", ("prefill",), prefill=(2.0, 2.0)),
            build.template("d", ("decode",), decode=(2.0, 2.0)),
        ),
        {("p", "near"): 2, ("d", "near"): 2},
        {("p", "near", "prefill"): (1.0, 1.0), ("d", "near", "decode"): (1.0, 1.0)},
        {("m", "near", "near"): (1.0, 1.0)},
    )
    world = build.world(plan, Policy(balance=balance))  # type: ignore[arg-type]
    runs = [world.arrive(build.request(str(number)))[0] for number in range(4)]
    firsts = Counter(run.route.segments[0].replica for run in runs if isinstance(run, Run))
    assert set(firsts.values()) == {2}
    for number in range(4):
        world.finish(str(number))
    build.assert_at_rest(world.brain)
