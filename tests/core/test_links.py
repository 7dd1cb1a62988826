"""Slow links between regions: routing around them, recalled transfers, length thresholds."""

from __future__ import annotations

from dataclasses import replace

import brain_builders as build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.routing.link_states import LinkStates
from potluck.core.routing.routing_table import PrefillChoice
from potluck.core.routing.template_weights import LengthThreshold
from potluck.core.routing.thresholds import (
    LEAST_TOKENS,
    MAX_RAISE_FACTOR,
    RAISE_PER_DELAY_S,
    RAISE_PER_QUEUE_S,
    after_report,
    decide,
    rebased,
)
from potluck.core.state import events
from potluck.core.state.actions import Abort, QueryAttempt, Refuse, Run
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


def slow_link_report(gbps: float) -> events.LinkReported:
    return events.LinkReported("far", "near", 1.0, 0.0, gbps)


def segment_count(run: Run) -> int:
    return len(run.route.segments)


def send_requests(world: build.World, count: int, prompt: int = 1000) -> list[Run]:
    runs = []
    for _ in range(count):
        (run,) = world.arrive(build.request(f"r{len(world.requests)}", prompt))
        assert isinstance(run, Run)
        runs.append(run)
    return runs


def test_slow_link_carries_only_the_requests_it_can_finish_in_time() -> None:
    world = build.world(ACROSS)
    assert {segment_count(run) for run in send_requests(world, 4)} == {2}
    for job in list(world.jobs):
        world.finish(job)
    world.tell(
        slow_link_report(0.1)
    )  # 8 s for 1,000 tokens, which take 0.1 s to compute where they are decoded
    assert {segment_count(run) for run in send_requests(world, 4)} == {1}
    world.tell(slow_link_report(10.0))
    for job in list(world.jobs):
        world.finish(job)
    assert segment_count(send_requests(world, 1)[0]) == 2


def test_slightly_slower_link_is_still_used() -> None:
    world = build.world(ACROSS)
    world.tell(slow_link_report(6.0))  # 0.05 s later than planned
    assert {segment_count(run) for run in send_requests(world, 2)} == {2}


def test_queued_transfers_make_a_link_late_without_a_report() -> None:
    world = build.world(ACROSS)
    kinds = [
        segment_count(run) for run in send_requests(world, 40, prompt=4000)
    ]  # 0.32 s of link each, 0.4 s of prefill
    assert kinds[0] == 2
    assert 1 in kinds


@pytest.mark.parametrize("balance", ["goodput", "round-robin", "token"])
def test_other_balances_keep_to_the_planned_flows(balance: str) -> None:
    world = build.world(ACROSS, Policy(balance=balance))  # type: ignore[arg-type]
    world.tell(slow_link_report(0.1))
    assert {segment_count(run) for run in send_requests(world, 4)} == {2}


def test_requests_stuck_on_a_slow_link_are_retried_elsewhere_once() -> None:
    world = build.world(ACROSS)
    runs = send_requests(world, 3)
    actions = world.tell(slow_link_report(0.1))
    asked = [action for action in actions if isinstance(action, QueryAttempt)]
    assert [action.request for action in asked] == [run.request for run in runs[::-1]]
    assert sum(isinstance(action, Abort) for action in actions) == 3
    assert len(actions) == 6  # nothing is sent while the first may still be streaming
    assert world.tell(slow_link_report(0.05)) == []
    message = [
        item for name in asked for item in world.tell(events.AttemptFailed(name.request, 0, "timeout", "", 0))
    ]
    again = [action for action in message if isinstance(action, Run)]
    assert {action.attempt for action in again} == {1}
    assert {segment_count(action) for action in again} == {1}
    assert world.brain.requests["r0"].failures == 0
    assert world.tell(slow_link_report(0.05)) == []
    for job in list(world.jobs):
        world.finish(job)
    build.assert_idle(world.brain)


def test_recalled_request_that_already_streams_resumes_from_its_tokens() -> None:
    """The news that it is over the link were lost or crossed the word that the link is slow."""
    world = build.world(ACROSS)
    send_requests(world, 3)
    world.tell(slow_link_report(0.1))
    message = world.tell(events.AttemptFailed("r0", 0, "timeout", "", 7))
    (run,) = (action for action in message if isinstance(action, Run))
    tokens = world.requests["r0"].prompt_tokens + 7
    assert (run.attempt, run.streamed_tokens, run.prompt_tokens) == (1, 7, tokens)
    assert (
        world.tell(events.RequestFinished("r1", 0, 50)) == []
    )  # it was complete before it was stopped: that counts
    assert "r1" not in world.brain.requests
    world.jobs.pop("r1", None)
    assert world.tell(events.FirstToken("r2", 0)) == []
    world.tell(events.AttemptRunning("r2", 0))  # it could not be stopped: then it goes on
    world.now_s = 60.0
    assert not any(isinstance(action, Run | Refuse) for action in world.tell(events.Tick()))
    world.tell(events.RequestFinished("r2", 0, 50))
    world.finish("r0")
    build.assert_idle(world.brain)


def test_recalled_request_without_an_answer_is_refused_as_lost() -> None:
    world = build.world(ACROSS)
    send_requests(world, 1, prompt=20_000)
    assert any(isinstance(action, QueryAttempt) for action in world.tell(slow_link_report(0.1)))
    message = []
    for _ in range(6):
        world.now_s += 5.0
        message += world.tell(events.Tick())
    assert [action.reason for action in message if isinstance(action, Refuse)] == ["lost"]
    build.assert_idle(world.brain)


def test_nearly_finished_transfer_is_not_recalled() -> None:
    world = build.world(ACROSS)
    send_requests(world, 1)
    assert world.tell(slow_link_report(1.0)) == []  # 0.8 s: not worth the prefill
    world.now_s = 1.0
    world.advance("r0")
    assert world.tell(slow_link_report(0.01)) == []  # it is over already


def test_transfer_is_not_recalled_without_retries() -> None:
    world = build.world(ACROSS, Policy(retries=0))
    send_requests(world, 2)
    assert world.tell(slow_link_report(0.1)) == []


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50_000)), max_size=60), st.floats(0.01, 20.0))
def test_link_lateness_is_the_time_of_queued_and_own_bytes(steps: list[tuple[int, int]], gbps: float) -> None:
    links = LinkStates(build.facts((P, D)))
    links.update(slow_link_report(gbps))
    requests: dict[int, RequestState] = {}
    for name, tokens in steps:
        if name in requests:
            links.complete_crossing(requests.pop(name))
        else:
            requests[name] = RequestState(build.request(str(name), tokens))
            links.register_crossing(requests[name], "far", "near", tokens)
    before = sum(request.prompt_tokens for request in requests.values()) * 1e5
    own = RequestState(build.request("own", 1000))
    want = before * 8e-9 / gbps + 1e8 * 8e-9 * (1 / gbps - 1 / 10.0)
    assert links.delay_s("far", "near", own) == pytest.approx(max(0.0, want), rel=1e-6, abs=1e-9)
    assert links.delay_s("near", "near", own) == 0.0
    if gbps < 5.0:
        assert [name for name, _ in links.recall_candidates(slow_link_report(gbps))] == [
            str(name) for name in requests
        ][::-1]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50_000)), max_size=20),
    st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.floats(0.1, 10.0)),
)
def test_link_lateness_of_a_tenant_is_its_own_bytes_plus_the_fair_share_of_others(
    sent: list[tuple[str, int]], weights: tuple[float, ...]
) -> None:
    """Before one's KV is all of one's own, and of the others no more than their due meanwhile, nor than they have."""
    links, weight = LinkStates(build.facts((P, D))), dict(zip("abc", weights, strict=True))
    has = dict.fromkeys("abc", 0.0)
    requests = []
    for number, (tenant, tokens) in enumerate(sent):
        request = RequestState(build.request(str(number), tokens)._replace(tenant=tenant))
        request.weight = weight[tenant]
        links.register_crossing(request, "far", "near", tokens)
        requests.append(request)
        has[tenant] += tokens * 1e5
    own = RequestState(build.request("own", 1000)._replace(tenant="a"))
    own.weight = weight["a"]
    passing = has["a"] + 1e8
    others = sum(min(has[name], passing * weight[name] / weight["a"]) for name in "bc")
    assert links.delay_s("far", "near", own) == pytest.approx((has["a"] + others) * 8e-10, rel=1e-6)
    # When all is over: the last of all tenants' last ones.
    over_s = dict(links.recall_candidates(slow_link_report(1.0)))
    if sent:
        assert max(over_s.values()) == pytest.approx(sum(has.values()) * 8e-9, rel=1e-6)
    for request in requests:
        links.complete_crossing(request)
    assert links.open_bytes == 0.0


# The length threshold between regions: both regimes, and how it moves with the link.

tokens = st.integers(1, 200_000)


def link_report(utilisation: float, queued_bytes: float = 0.0, gbps: float = 10.0) -> events.LinkReported:
    return events.LinkReported("there", "here", utilisation, queued_bytes, gbps)


@given(tokens, tokens, tokens, tokens)
def test_scarce_bandwidth_compares_the_threshold_with_local_cache_only(
    t: int, total: int, here: int, there: int
) -> None:
    here, there = min(here, total), min(there, total)
    choice = decide(LengthThreshold(t, t, scarce=True), total, here, there)
    assert choice == PrefillChoice(total - here > t, False, total - here, total - there)
    assert choice.remote == decide(LengthThreshold(t, t, scarce=True), total, here, 0).remote


@given(tokens, tokens, tokens, tokens)
def test_abundant_bandwidth_uses_the_longest_cached_prefix_of_either_side(
    t: int, total: int, here: int, there: int
) -> None:
    here, there = min(here, total), min(there, total)
    choice = decide(LengthThreshold(t, t, scarce=False), total, here, there)
    assert choice.remote == (total - max(here, there) > t)
    # The KV crosses exactly when the region that does not compute has the longer prefix.
    computing, other = (there, here) if choice.remote else (here, there)
    assert choice.fetch == (other > computing)


def test_congested_link_raises_the_threshold_until_it_clears() -> None:
    threshold = LengthThreshold(10_000.0, 10_000.0)
    seen = [threshold.tokens]
    for _ in range(8):
        threshold = after_report(threshold, link_report(0.95))
        seen.append(threshold.tokens)
    assert seen == sorted(seen)
    assert seen[-1] > 2 * seen[0]
    assert after_report(threshold, link_report(0.8)).tokens == threshold.tokens  # neither congested nor clear
    for _ in range(100):
        threshold = after_report(threshold, link_report(0.3))
    assert abs(threshold.tokens - 10_000.0) < 1.0


def test_queued_bytes_raise_the_threshold_at_low_utilization() -> None:
    threshold = LengthThreshold(10_000.0, 10_000.0)
    half_a_second = 0.5 * 10e9 / 8
    assert after_report(threshold, link_report(0.1, half_a_second * 0.9)).tokens == 10_000.0
    assert after_report(threshold, link_report(0.1, half_a_second * 1.1)).tokens > 10_000.0
    assert after_report(threshold, link_report(0.0, 0.0, gbps=0.0)).tokens > 10_000.0


@given(
    st.floats(0, 1e6),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e12), st.floats(0, 400)), max_size=60),
)
def test_threshold_stays_between_its_base_and_a_limit(
    base: float, reports: list[tuple[float, float, float]]
) -> None:
    threshold = LengthThreshold(base, base)
    for utilisation, queued, gbps in reports:
        threshold = after_report(threshold, link_report(utilisation, queued, gbps))
        assert base - 1e-6 <= threshold.tokens <= max(base, LEAST_TOKENS) * MAX_RAISE_FACTOR + 1e-6
        assert threshold.base_tokens == base


def test_packet_loss_and_queued_prefill_raise_the_threshold() -> None:
    threshold = LengthThreshold(10_000.0, 10_000.0, scarce=False)
    calm = link_report(0.1)
    assert after_report(threshold, link_report(0.6)._replace(lost_share=0.005)).tokens == 10_000.0
    assert after_report(threshold, calm._replace(lost_share=0.05)).tokens == 10_000.0  # a burst
    lossy = after_report(threshold, link_report(0.6)._replace(lost_share=0.05))
    assert lossy.tokens > 10_000.0
    assert lossy.scarce
    assert after_report(threshold, calm, 0.9).tokens == 10_000.0
    waiting = after_report(threshold, calm, 1.1)
    assert waiting.tokens > 10_000.0
    assert not waiting.scarce  # the link itself has room


def test_threshold_rise_from_queued_prefill_depends_on_its_amount_not_its_duration() -> None:
    threshold = LengthThreshold(10_000.0, 10_000.0)
    for _ in range(60):
        threshold = after_report(threshold, link_report(0.2), 3.0)
    assert threshold.tokens == pytest.approx(10_000.0 * (1 + 2 * RAISE_PER_DELAY_S))
    for _ in range(30):
        threshold = after_report(threshold, link_report(0.2), 1.5)
    assert 10_000.0 < threshold.tokens < 14_000.0  # less waits by now


def test_threshold_rise_from_queued_bytes_depends_on_their_amount_not_their_duration() -> None:
    threshold = LengthThreshold(10_000.0, 10_000.0)
    for ahead_s in (0.0, -9.0):  # whether prompts wait at home as well
        for _ in range(60):
            threshold = after_report(threshold, link_report(1.0, 2.5 * 10e9 / 8), ahead_s)
        assert threshold.tokens == pytest.approx(10_000.0 * (1 + 2 * RAISE_PER_QUEUE_S))


def test_full_link_without_a_queue_raises_the_threshold_unless_prompts_wait_locally() -> None:
    raised = LengthThreshold(10_000.0, 20_000.0)
    assert after_report(raised, link_report(1.0), -0.5).tokens == pytest.approx(22_000.0)
    for use in (1.0, 0.8):
        assert after_report(raised, link_report(use), -3.0).tokens == pytest.approx(20_000.0 / 1.1)
    assert after_report(raised, link_report(0.8), -0.5).tokens == 20_000.0


def test_link_with_reduced_bandwidth_counts_as_full_when_no_bytes_wait() -> None:
    """Bytes waited, and 3 of 10 Gbps crossed: 2.9 Gbps without a queue leave no room, until it carried more."""
    threshold = after_report(LengthThreshold(10_000.0, 10_000.0), link_report(0.3, 5e9, gbps=3.0))
    assert after_report(threshold, link_report(0.29)).tokens > threshold.tokens > 10_000.0
    assert after_report(threshold, link_report(0.29)).scarce
    assert after_report(threshold, link_report(0.1)).tokens < threshold.tokens
    for _ in range(60):
        threshold = after_report(threshold, link_report(0.29))
    assert threshold.carried_gbps == 10.0
    assert threshold.tokens < 10_500.0


def test_threshold_of_zero_rises_under_congestion_and_returns() -> None:
    threshold = LengthThreshold(0.0, 0.0)
    for _ in range(30):
        threshold = after_report(threshold, link_report(0.95))
    assert threshold.tokens > 5000
    assert rebased(threshold, 1000.0).tokens > 1000.0
    for _ in range(150):
        threshold = after_report(threshold, link_report(0.1))
    assert threshold.tokens < 1.0
    assert rebased(LengthThreshold(0.0, 0.0), 700.0) == LengthThreshold(700.0, 700.0)
    assert rebased(LengthThreshold(1000.0, 1500.0), 0.0).tokens > 512.0


def test_threshold_regime_has_hysteresis() -> None:
    threshold = LengthThreshold(1.0, 1.0, scarce=True)
    assert after_report(threshold, link_report(0.6)).scarce
    abundant = after_report(threshold, link_report(0.4))
    assert not abundant.scarce
    assert not after_report(abundant, link_report(0.6)).scarce
    assert after_report(abundant, link_report(0.75)).scarce


def test_new_threshold_base_keeps_the_relative_rise() -> None:
    raised = replace(LengthThreshold(1000.0, 1000.0), tokens=1500.0)
    assert rebased(raised, 2000.0) == LengthThreshold(2000.0, 3000.0)


def planned_thresholds(
    local: tuple[float, ...], crossing: tuple[float, ...], more: tuple[float, ...] = ()
) -> list[float]:
    template = build.template("t", ("mixed",), closed=(9.0,) * 3)
    shares = {("t", "here", "closed"): local}
    flows = {("m", "there", "here"): crossing, ("m", "off", "here"): more}
    plan = build.plan((template,), {("t", "here"): 1}, shares, flows, longest=(1000, 4000, 9000))  # type: ignore[arg-type]
    return [threshold.tokens for threshold in plan.thresholds]


def test_planned_threshold_lies_in_the_first_bucket_that_crosses() -> None:
    assert planned_thresholds((1.0, 1.0, 0.0), (0.0, 0.0, 1.0)) == [4000.0]
    assert planned_thresholds((1.0, 0.0, 0.0), (0.0, 1.0, 1.0)) == [1000.0]
    # A third of the middle bucket crosses: the upper third of its lengths.
    assert planned_thresholds((1.0, 2.0, 0.0), (0.0, 1.0, 1.0)) == [3000.0]
    assert planned_thresholds((1.0, 2.0, 0.0), (0.0, 0.5, 1.0), (0.0, 0.5, 1.0)) == [3000.0, 3000.0]
    assert planned_thresholds((1.0, 2.0, 0.0), (0.0, 1.0, 1.0), (0.0, 0.0, 1.0)) == [3000.0, 4000.0]


def test_plan_without_length_ordered_flows_has_no_threshold() -> None:
    assert planned_thresholds((1.0, 1.0, 1.0), (0.0, 0.0, 0.0)) == []
    assert planned_thresholds((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)) == []
    assert planned_thresholds((0.0, 1.0, 1.0), (1.0, 0.0, 0.0)) == []  # the short ones cross
