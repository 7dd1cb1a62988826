"""Learned replica speeds: convergence, bounds and decay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import brain_builders as build
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.routing.learned_speeds import STALE_AFTER_S
from potluck.core.state.actions import Run
from potluck.core.state.events import FirstToken, RequestFinished, Tick
from potluck.core.state.fleet import MAX_PACE, MIN_PACE, FleetState
from potluck.core.state.policy import Policy
from potluck.core.state.targets import FULL_PENALTY_LATE_SHARE, LATE_ANSWER_PENALTY
from potluck.core.values.plan import ReplicaSpec
from potluck.core.values.types import Slo

SAME = build.template("same", closed=(2.0, 1.0))
TWO = build.plan((SAME,), {("same", "near"): 2}, {("same", "near", "closed"): (1.0, 0.5)})


def fleet_of_one() -> FleetState:
    fleet = FleetState(build.facts((SAME,)).replicas)
    fleet.add(ReplicaSpec("r", "u", "same", 0, "homogeneous", "m", "mixed", "near"))
    return fleet


@given(st.floats(0.2, 6.0), st.lists(st.floats(4.0, 20.0), min_size=100, max_size=100))
@settings(max_examples=15)
def test_learned_pace_converges_to_the_true_pace(truth: float, planned_s: list[float]) -> None:
    fleet = fleet_of_one()
    replica = fleet.views["r"]
    for at_s, seconds in enumerate(planned_s):
        fleet.learn(float(at_s), replica, truth * seconds, seconds)
    assert replica.pace == pytest.approx(truth, rel=0.25)
    assert (replica.pace - 1.0) * (truth - 1.0) >= 0.0


@given(
    st.lists(st.tuples(st.floats(0.0, 1e9), st.floats(0.0, 1e6), st.booleans(), st.booleans()), max_size=100)
)
def test_learned_pace_and_late_share_stay_bounded_and_decay(
    said: list[tuple[float, float, bool, bool]],
) -> None:
    fleet = fleet_of_one()
    replica = fleet.views["r"]
    for observed_s, planned_s, late, fades in said:
        fleet.learn(0.0, replica, observed_s, planned_s)
        fleet.observe_answer(replica, late)
        if fades:
            fleet.decay(0.0, replica)
        assert MIN_PACE <= replica.pace <= MAX_PACE
        assert 0.0 <= replica.late_share <= 1.0
    for _ in range(64):
        fleet.decay(0.0, replica)
    assert replica.pace == pytest.approx(1.0, rel=1e-6)
    assert replica.late_share < 1e-6


def serve_requests(
    world: build.World, slow: str, factor: float, count: int, step_s: float = 0.02
) -> Counter[str]:
    """One request after another; on `slow` an answer takes so many times as long."""
    counts: Counter[str] = Counter()
    for number in range(count):
        name = f"{slow}-{factor}-{len(world.requests)}-{number}"
        (run,) = world.arrive(build.request(name))
        assert isinstance(run, Run)
        where = run.route.decoder
        counts[where] += 1
        pace = factor if where == slow else 1.0
        world.now_s += 0.1 * pace
        world.tell(FirstToken(name, 0))
        world.now_s += 99 * step_s * pace
        del world.jobs[name]
        world._end(name, "answered")
        world.tell(RequestFinished(name, 0, 100))
    return counts


def test_slow_replica_gets_fewer_requests_and_is_tried_again_later() -> None:
    world = build.world(TWO)
    first, second = sorted(world.members)
    counts = serve_requests(world, first, 6.0, 60)
    assert 1 <= counts[first] <= 6  # then the other is done sooner even with all of its work
    assert world.brain.fleet.views[first].pace > 1.5
    assert world.brain.fleet.views[second].pace == pytest.approx(1.0, abs=0.1)
    for _ in range(20):
        world.now_s += STALE_AFTER_S
        world.tell(Tick())
    assert world.brain.fleet.views[first].pace == pytest.approx(1.0, rel=0.01)
    again = serve_requests(world, first, 1.0, 40)
    assert min(again.values()) >= 10
    build.assert_idle(world.brain)


def test_other_balances_learn_no_pace() -> None:
    world = build.world(TWO, Policy(balance="token"))
    first = min(world.members)
    serve_requests(world, first, 6.0, 20)
    assert {view.pace for view in world.brain.fleet.views.values()} == {1.0}


def test_late_answers_raise_the_load_weight_of_a_replica() -> None:
    known = build.facts((SAME,))
    known = replace(known, models={"m": replace(known.models["m"], slo=Slo(2.0, 0.05))})
    world = build.world(TWO, None, known)
    first = min(world.members)
    serve_requests(world, first, 4.0, 4)
    view, target = world.brain.fleet.views[first], world.brain.table.singles[first]
    assert view.late_share > 0
    counted = view.late_share * min(1.0, view.late_share / FULL_PENALTY_LATE_SHARE)
    assert target.pace == pytest.approx(view.pace * (1.0 + LATE_ANSWER_PENALTY * counted))
    assert target.pace > view.pace


def test_predicted_wait_is_the_queued_prefill_at_the_learned_pace() -> None:
    world = build.world(TWO)
    speeds, views = world.brain.speeds, world.brain.fleet.views
    assert {speeds.wait_s(view) for view in views.values()} == {0.0}
    world.arrive(build.request("a", prompt=1500))
    busy = next(view for view in views.values() if view.open_requests)
    assert speeds.wait_s(busy) == pytest.approx(1500 * 1e-4)
    world.brain.fleet.learn(0.0, busy, 400.0, 200.0)
    assert speeds.wait_s(busy) == pytest.approx(1500 * 1e-4 * busy.pace)
    world.finish("a")
    assert speeds.wait_s(busy) == 0.0


def test_predicted_wait_of_an_engine_with_one_slot_includes_the_running_request() -> None:
    world = build.world(TWO, ready=False)
    fleet, first = world.brain.fleet, min(world.members)
    world.make_ready(first, max_running=1)
    for name in "ab":
        world.arrive(build.request(name))
    view = fleet.views[first]
    for _ in range(2):
        assert world.brain.speeds.wait_s(view) > view.open_prefill_tokens * 1e-4, "an answer comes before it"
        fleet.reassign(view.member)  # it is the same engine


def test_load_of_an_answer_uses_the_learned_output_length() -> None:
    world = build.world(TWO)
    (run,) = world.arrive(build.request("a", output=4000))
    assert isinstance(run, Run)
    before = world.brain.table.singles[run.route.decoder].load
    world.tell(FirstToken("a", 0))
    world.tell(RequestFinished("a", 0, 50))
    (run,) = world.arrive(build.request("b", output=4000))
    assert isinstance(run, Run)
    after = world.brain.table.singles[run.route.decoder].load
    assert before - after == pytest.approx(3950 * 0.02 / 8)
    assert world.brain.speeds.answer_tokens("m", 20) == 20


def test_unstreamed_answer_teaches_output_length_but_no_pace() -> None:
    world = build.world(TWO)
    speeds = world.brain.speeds
    (run,) = world.arrive(build.request("whole", prompt=50, output=400))
    assert isinstance(run, Run)
    view = world.brain.fleet.views[run.route.decoder]
    assert view.open_prefill_tokens == 50
    world.now_s += 1e-6  # far too soon for a hundred tokens, had anybody timed them
    del world.jobs["whole"]
    world._end("whole", "answered")
    world.tell(RequestFinished("whole", 0, 100))
    assert (view.pace, view.late_share) == (1.0, 0.0)
    assert (view.open_requests, view.open_prefill_tokens, view.open_context_tokens) == (0, 0, 0)
    assert view.done_prompts == 1
    assert speeds.answer_tokens("m", 400) == 100
    assert speeds.prompt_tokens("m") == 50


def test_pace_follows_a_lasting_change_and_ignores_a_single_outlier() -> None:
    def learned(ratios: list[float]) -> float:
        fleet = fleet_of_one()
        replica = fleet.views["r"]
        for at_s, ratio in enumerate(ratios):
            fleet.learn(float(at_s), replica, 1.2 * ratio, 1.2)
        return replica.pace

    steady = [1.0] * 30
    assert learned([*steady, 3.0, 3.0]) < 1.4, "two may be chance"
    assert learned([*steady, 3.0, 3.0, 3.0]) > 1.8
    assert learned([*steady, *[3.0] * 8]) > 2.3
    assert learned([*steady, *[3.0, 1.0] * 4]) < 1.6, "now and then is no change"
    assert learned([*[3.0] * 30, 1.0, 1.0, 1.0, 1.0]) < 1.1, "and back"
