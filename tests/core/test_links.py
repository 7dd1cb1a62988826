"""Links between regions that are slow: routed around while that is sooner, and what is stuck on them done again."""

from __future__ import annotations

import brain_builders as build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.routing.link_states import LinkStates
from potluck.core.state.actions import Abort, QueryAttempt, Refuse, Run
from potluck.core.state.events import (
    AttemptFailed,
    AttemptRunning,
    FirstToken,
    LinkReported,
    RequestFinished,
    Tick,
)
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import RequestState

P = build.template("p", ("prefill",), prefill=(9.0,))
D = build.template("d", ("decode",), decode=(9.0,))
ACROSS = build.plan(
    (P, D),
    {("p", "far"): 1, ("d", "near"): 1},
    {("p", "far", "prefill"): (9.0,), ("d", "near", "decode"): (9.0,)},
    {("m", "far", "near"): (9.0,)},
    longest=(100_000,),
)
"""One way: prompts are computed far away. Facts: 10 Gb/s, 100 kB a token, so 1,000 tokens take 0.08 s."""


def slow(gbps: float) -> LinkReported:
    return LinkReported("far", "near", 1.0, 0.0, gbps)


def hops(run: Run) -> int:
    return len(run.route.segments)


def send(world: build.World, count: int, prompt: int = 1000) -> list[Run]:
    runs = []
    for _ in range(count):
        (run,) = world.arrive(build.request(f"r{len(world.requests)}", prompt))
        assert isinstance(run, Run)
        runs.append(run)
    return runs


def test_a_link_as_planned_is_used_and_a_slow_one_only_as_far_as_it_goes() -> None:
    world = build.world(ACROSS)
    assert {hops(run) for run in send(world, 4)} == {2}
    for job in list(world.jobs):
        world.finish(job)
    world.tell(slow(0.1))  # 8 s for 1,000 tokens, which take 0.1 s to compute where they are decoded
    assert {hops(run) for run in send(world, 4)} == {1}
    world.tell(slow(10.0))
    for job in list(world.jobs):
        world.finish(job)
    assert hops(send(world, 1)[0]) == 2


def test_a_link_that_is_a_little_slower_is_used_on() -> None:
    world = build.world(ACROSS)
    world.tell(slow(6.0))  # 0.05 s later than planned
    assert {hops(run) for run in send(world, 2)} == {2}


def test_a_full_link_is_late_even_if_it_says_nothing() -> None:
    world = build.world(ACROSS)
    kinds = [hops(run) for run in send(world, 40, prompt=4000)]  # 0.32 s of link each, 0.4 s of prefill
    assert kinds[0] == 2
    assert 1 in kinds


@pytest.mark.parametrize("balance", ["goodput", "round-robin", "least-work"])
def test_other_balances_keep_to_the_plan(balance: str) -> None:
    world = build.world(ACROSS, Policy(balance=balance))  # type: ignore[arg-type]
    world.tell(slow(0.1))
    assert {hops(run) for run in send(world, 4)} == {2}


def test_what_is_stuck_is_done_again_elsewhere_once() -> None:
    world = build.world(ACROSS)
    runs = send(world, 3)
    actions = world.tell(slow(0.1))
    asked = [action for action in actions if isinstance(action, QueryAttempt)]
    assert [action.request for action in asked] == [run.request for run in runs[::-1]]
    assert sum(isinstance(action, Abort) for action in actions) == 3
    assert len(actions) == 6  # nothing is sent while the first may still be streaming
    assert world.tell(slow(0.05)) == []
    told = [each for name in asked for each in world.tell(AttemptFailed(name.request, 0, "timeout", "", 0))]
    again = [action for action in told if isinstance(action, Run)]
    assert {action.attempt for action in again} == {1}
    assert {hops(action) for action in again} == {1}
    assert world.brain.requests["r0"].failures == 0
    assert world.tell(slow(0.05)) == []
    for job in list(world.jobs):
        world.finish(job)
    build.assert_at_rest(world.brain)


def test_what_streams_already_goes_on_from_where_its_user_is() -> None:
    """The news that it is over the link were lost or crossed the word that the link is slow."""
    world = build.world(ACROSS)
    send(world, 3)
    world.tell(slow(0.1))
    told = world.tell(AttemptFailed("r0", 0, "timeout", "", 7))
    (run,) = (action for action in told if isinstance(action, Run))
    assert (run.attempt, run.streamed_tokens, run.prompt_tokens) == (
        1,
        7,
        world.requests["r0"].prompt_tokens + 7,
    )
    assert (
        world.tell(RequestFinished("r1", 0, 50)) == []
    )  # it was complete before it was stopped: that counts
    assert "r1" not in world.brain.requests
    world.jobs.pop("r1", None)
    assert world.tell(FirstToken("r2", 0)) == []
    world.tell(AttemptRunning("r2", 0))  # it could not be stopped: then it goes on
    world.now_s = 60.0
    assert not any(isinstance(action, Run | Refuse) for action in world.tell(Tick()))
    world.tell(RequestFinished("r2", 0, 50))
    world.finish("r0")
    build.assert_at_rest(world.brain)


def test_nobody_answers_for_what_was_recalled() -> None:
    world = build.world(ACROSS)
    send(world, 1, prompt=20_000)
    assert any(isinstance(action, QueryAttempt) for action in world.tell(slow(0.1)))
    told = []
    for _ in range(6):
        world.now_s += 5.0
        told += world.tell(Tick())
    assert [action.reason for action in told if isinstance(action, Refuse)] == ["lost"]
    build.assert_at_rest(world.brain)


def test_what_is_nearly_over_stays() -> None:
    world = build.world(ACROSS)
    send(world, 1)
    assert world.tell(slow(1.0)) == []  # 0.8 s: not worth the prefill
    world.now_s = 1.0
    world.advance("r0")
    assert world.tell(slow(0.01)) == []  # it is over already


def test_nothing_is_done_again_where_no_retry_is_allowed() -> None:
    world = build.world(ACROSS, Policy(retries=0))
    send(world, 2)
    assert world.tell(slow(0.1)) == []


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50_000)), max_size=60), st.floats(0.01, 20.0))
def test_lateness_is_the_bytes_before_and_ones_own(steps: list[tuple[int, int]], gbps: float) -> None:
    links = LinkStates(build.facts((P, D)))
    links.reported(slow(gbps))
    requests: dict[int, RequestState] = {}
    for name, tokens in steps:
        if name in requests:
            links.arrived(requests.pop(name))
        else:
            requests[name] = RequestState(build.request(str(name), tokens))
            links.send(requests[name], "far", "near", tokens)
    before = sum(req.prompt_tokens for req in requests.values()) * 1e5
    own = RequestState(build.request("own", 1000))
    want = before * 8e-9 / gbps + 1e8 * 8e-9 * (1 / gbps - 1 / 10.0)
    assert links.late_s("far", "near", own) == pytest.approx(max(0.0, want), rel=1e-6, abs=1e-9)
    assert links.late_s("near", "near", own) == 0.0
    if gbps < 5.0:
        assert [name for name, _ in links.waits_s(slow(gbps))] == [str(name) for name in requests][::-1]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50_000)), max_size=20),
    st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.floats(0.1, 10.0)),
)
def test_a_link_is_late_for_who_floods_it(sent: list[tuple[str, int]], weights: tuple[float, ...]) -> None:
    """Before one's KV is all of one's own, and of the others no more than their due meanwhile, nor than they have."""
    links, weight = LinkStates(build.facts((P, D))), dict(zip("abc", weights, strict=True))
    has = dict.fromkeys("abc", 0.0)
    requests = []
    for number, (tenant, tokens) in enumerate(sent):
        req = RequestState(build.request(str(number), tokens)._replace(tenant=tenant))
        req.weight = weight[tenant]
        links.send(req, "far", "near", tokens)
        requests.append(req)
        has[tenant] += tokens * 1e5
    own = RequestState(build.request("own", 1000)._replace(tenant="a"))
    own.weight = weight["a"]
    passing = has["a"] + 1e8
    others = sum(min(has[name], passing * weight[name] / weight["a"]) for name in "bc")
    assert links.late_s("far", "near", own) == pytest.approx((has["a"] + others) * 8e-10, rel=1e-6)
    # When all is over: the last of all tenants' last ones.
    over_s = dict(links.waits_s(slow(1.0)))
    if sent:
        assert max(over_s.values()) == pytest.approx(sum(has.values()) * 8e-9, rel=1e-6)
    for req in requests:
        links.arrived(req)
    assert links.open_bytes == 0.0
