"""News that comes late, twice or not at all; what is lost together; and waiting that ends."""

from __future__ import annotations

import brain_builders as build
import pytest

from potluck.core.brain.attempt_queries import ANSWER_S, FAILED_S, QUESTIONS, SILENCE_S
from potluck.core.brain.failure_domains import TOGETHER_S, RecentLosses, smallest
from potluck.core.brain.requests import ENDED
from potluck.core.state.actions import Abort, Action, QueryAttempt, Refuse, Run
from potluck.core.state.events import (
    AttemptFailed,
    AttemptRunning,
    FirstToken,
    ReplicaLost,
    ReplicaReported,
    ReplicaSilent,
    ReplicaStatus,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    SegmentDone,
    Tick,
)
from potluck.core.state.policy import Policy
from potluck.core.values.replica_spec import ReplicaSpec

ONE = build.template("one", closed=(1.0,))


def many(near: int, far: int = 0) -> build.Plan:
    counts = {("one", "near"): near} | ({("one", "far"): far} if far else {})
    shares = {(name, region, "closed"): (1.0,) for name, region in counts}
    return build.plan((ONE,), counts, shares, longest=(200_000,))  # type: ignore[arg-type]


def sent(actions: list[Action]) -> Run:
    (run,) = [each for each in actions if isinstance(each, Run)]
    return run


def test_news_of_an_attempt_that_is_over_change_nothing() -> None:
    world = build.world(many(3))
    first = sent(world.arrive(build.request("a")))
    again = sent(world.fail("a", "timeout", first.route.decoder, 3))
    view = world.brain.fleet.views[again.route.decoder]
    counts = (view.open_requests, view.open_prefill_tokens, view.open_context_tokens)
    for late in (
        SegmentDone("a", 0, 0),
        FirstToken("a", 0),
        RequestFinished("a", 0, 100),
        AttemptFailed("a", 0, "timeout", first.route.decoder, 3),
        AttemptFailed("a", 0, "timeout", again.route.decoder, 3),
        AttemptFailed("a", 2, "timeout", again.route.decoder, 3),
    ):
        assert world.tell(late) == []
        assert (view.open_requests, view.open_prefill_tokens, view.open_context_tokens) == counts
    assert world.brain.requests["a"].failures == 1
    world.finish("a")
    build.assert_at_rest(world.brain)


@pytest.mark.parametrize("end", ["finished", "refused", "cancelled", "before"])
def test_what_ended_does_not_begin_again(end: str) -> None:
    world = build.world(many(1))
    asked = build.request("a", deadline_s=0.0 if end == "refused" else None)
    if end == "before":
        assert world.tell(RequestCancelled("a")) == []
        assert world.tell(RequestArrived(asked)) == []
    else:
        assert world.arrive(asked)
    if end == "finished":
        world.finish("a")
    elif end == "cancelled":
        assert world.tell(RequestCancelled("a")) == [Abort("a", ("one@near#0/0",))]
    assert world.tell(RequestArrived(asked)) == []
    for number in range(2 * ENDED):
        world.brain.on(0.0, RequestCancelled(f"other{number}"))
    assert world.brain.sizes()["ended"] <= 2 * ENDED


def test_a_loss_without_its_failures_is_asked_about_and_resumed_where_the_user_is() -> None:
    world = build.world(many(2))
    run = sent(world.arrive(build.request("a")))
    world.advance("a")
    lost = run.route.decoder
    world.tell(ReplicaLost(lost, "died"))
    world.now_s = FAILED_S - 0.1
    assert not [each for each in world.tell(Tick()) if isinstance(each, QueryAttempt)]
    world.now_s = FAILED_S
    assert QueryAttempt("a", 0) in world.tell(Tick())
    again = sent(world.fail("a", "replica", lost, streamed=57))
    assert (again.attempt, again.streamed_tokens, again.prompt_tokens) == (1, 57, 1057)
    assert world.tell(AttemptFailed("a", 0, "replica", lost, 57)) == []
    world.finish("a")
    build.assert_at_rest(world.brain)


def test_a_loss_that_was_not_one_and_notice_leave_requests_alone() -> None:
    world = build.world(many(2))
    run = sent(world.arrive(build.request("a")))
    world.tell(ReplicaLost(run.route.decoder, "spot", 30.0))
    for second in range(1, 34):
        world.now_s = float(second)
        assert not [each for each in world.tell(Tick()) if isinstance(each, QueryAttempt | Refuse)]
    asked = 0
    for second in range(34, 200):
        world.now_s = float(second)
        if QueryAttempt("a", 0) in world.tell(Tick()):
            asked += 1
            world.tell(AttemptRunning("a", 0))
    assert asked > 10
    assert "a" in world.brain.requests
    world.finish("a")
    build.assert_at_rest(world.brain)


def test_silence_ends_in_a_question_and_then_in_a_refusal() -> None:
    world = build.world(many(1))
    world.arrive(build.request("a"))
    world.now_s = SILENCE_S
    for _ in range(QUESTIONS):
        assert world.tell(Tick()) == [QueryAttempt("a", 0)]
        world.now_s += ANSWER_S
    abandoned, refused = world.tell(Tick())
    assert abandoned == Abort("a", ("one@near#0/0",))
    assert isinstance(refused, Refuse)
    assert refused.reason == "lost"
    build.assert_at_rest(world.brain)
    assert world.brain.sizes()["inquiries"] == 0


def member(name: str, region: str = "near", nodes: tuple[str, ...] = (), zone: str = "") -> ReplicaSpec:
    return ReplicaSpec(name, name, "t", 0, "homogeneous", "m", "mixed", region, nodes, zone)


def test_the_smallest_domain_that_explains_all_losses() -> None:
    a, b = member("a", nodes=("n1",), zone="z1"), member("b", nodes=("n1", "n2"), zone="z1")
    c, d = member("c", nodes=("n3",), zone="z1"), member("d", nodes=("n4",), zone="z2")
    assert smallest([a]) == smallest([a, b]) == ("node near/n1",)
    assert smallest([a, b, c]) == ("zone near/z1",)
    assert smallest([a, d]) == ("region near",)
    assert smallest([member("x"), member("y")]) == ("region near",)
    assert smallest([member("x")]) == ("x",)


def test_losses_are_forgotten_mended_and_kept_apart_by_region() -> None:
    losses = RecentLosses()
    losses.note(0.0, member("a", nodes=("n1",)))
    losses.note(1.0, member("b", "far", nodes=("n1",)))
    assert losses.suspects(1.0) == {"node near/n1", "node far/n1"}
    losses.note(2.0, member("c", "far", nodes=("n2",)))
    assert losses.suspects(2.0) == {"node near/n1", "region far"}
    losses.mend("c")
    assert losses.suspects(TOGETHER_S + 0.5) == {"node far/n1"}
    assert losses.suspects(TOGETHER_S + 1.5) == frozenset()


def test_retries_leave_a_dying_region() -> None:
    world = build.world(many(4, 2))
    for number in range(24):
        world.arrive(build.request(f"{number:02}"))
    for name in [name for name in world.members if "@near" in name]:
        world.lose(name)
    assert len(world.jobs) == 24, "nobody is refused"
    assert {job.run.route.decoder.split("#")[0] for job in world.jobs.values()} == {"one@far"}
    assert max(world.attempts.values()) <= 3


def test_a_request_that_kills_replicas_is_stopped() -> None:
    world = build.world(many(8), Policy(retries=2))
    run = sent(world.arrive(build.request("poison")))
    killed = 0
    while "poison" in world.jobs:
        world.lose(world.jobs["poison"].run.route.decoder)
        killed += 1
        world.now_s += 2 * TOGETHER_S
        world.tell(Tick())
    assert killed == 3
    assert world.ended == {"poison": "refused"}
    assert run.attempt == 0


def test_a_request_that_kills_replicas_after_some_tokens_is_stopped_too() -> None:
    """It gets no further than where it killed the first: only that first loss is not held against it."""
    world = build.world(many(8), Policy(retries=2))
    world.arrive(build.request("poison", output=50))
    killed = 0
    while "poison" in world.jobs:
        world.tell(FirstToken("poison", world.jobs["poison"].run.attempt))
        decoder = world.jobs["poison"].run.route.decoder
        world.fail("poison", "replica", decoder, streamed=7)
        killed += 1
        world.now_s += 2 * TOGETHER_S
        world.tell(Tick())
    assert killed == 4


@pytest.mark.parametrize("sign", ["none", "another", "woke"])
def test_a_request_on_replicas_that_fall_silent_is_what_silences_them_unless_others_do_or_wake(
    sign: str,
) -> None:
    """It gets no further, each time: a prompt that takes long on a machine that stops its engines in turn."""
    world = build.world(many(12), Policy(retries=2))
    first = sent(world.arrive(build.request("a"))).route.decoder
    spared = [name for name in sorted(world.members) if name != first]
    if sign == "another":
        world.tell(ReplicaSilent(spared[0]))
    if sign == "woke":
        world.tell(ReplicaSilent(first))
        world.tell(ReplicaReported(first, ReplicaStatus(0, 0, 0, 0, 1, 1, 0.0)))
    silenced = 0
    while "a" in world.jobs and silenced < 8:
        world.now_s += 1.1 * TOGETHER_S
        world.tell(Tick())
        replica = world.jobs["a"].run.route.decoder
        world.tell(ReplicaSilent(replica))
        world.fail("a", "replica", replica)
        silenced += 1
    assert silenced == (3 if sign == "none" else 8)


def test_a_request_that_gets_further_each_time_is_not_what_kills() -> None:
    """Engines are frozen one after another, each while it is there: it goes on as long as somebody is."""
    world = build.world(many(8), Policy(retries=2))
    world.arrive(build.request("unlucky", output=50))
    for number in range(1, 8):
        world.fail("unlucky", "replica", world.jobs["unlucky"].run.route.decoder, streamed=5 * number)
        world.now_s += 2 * TOGETHER_S
        world.tell(Tick())
        assert world.jobs["unlucky"].run.streamed_tokens == 5 * number
    assert world.ended == {}


@pytest.mark.parametrize(("deadline_s", "reason"), [(None, "no_capacity"), (4.0, "deadline")])
def test_waiting_for_a_pair_ends_as_well(deadline_s: float | None, reason: str) -> None:
    pair = build.template("pair", ("prefill", "mixed"), "pair", closed=(1.0,))
    plan = build.plan(
        (pair,), {("pair", "near"): 1}, {("pair", "near", "closed"): (1.0,)}, longest=(200_000,)
    )
    world = build.world(plan, Policy(split_overflow=False, low_decodes=False, max_wait_s=10.0))
    for name in "abcdef":
        world.arrive(build.request(name, prompt=8000, deadline_s=deadline_s))
    waiting = sorted(set("abcdef") - world.jobs.keys())
    assert waiting
    world.now_s = (deadline_s or 10.0) - 0.1
    assert not [each for each in world.tell(Tick()) if isinstance(each, Refuse)]
    world.now_s += 0.1
    refused = [each for each in world.tell(Tick()) if isinstance(each, Refuse)]
    assert sorted(each.request for each in refused) == waiting
    assert {each.reason for each in refused} == {reason}
    for name in list(world.jobs):
        world.finish(name)
    build.assert_at_rest(world.brain)
