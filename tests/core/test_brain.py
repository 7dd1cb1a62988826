"""The Brain's actions per event: starts, queueing, retries, refusals and plan changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import brain_builders as build
import pytest
from brain_builders import World
from hypothesis import given
from hypothesis import strategies as st
from test_brain_stateful import PLANS, POLICIES

from potluck.core.brain.brain import Brain
from potluck.core.state import actions as act
from potluck.core.state import events
from potluck.core.state.policy import Policy
from potluck.core.values.layout import single
from potluck.core.values.plan import Plan, PlannedReplica
from potluck.core.values.route import aggregated, handed_over
from potluck.core.values.types import NodeOffer, Region, Slo

ONE = build.template("one", closed=(1.0, 1.0))
PLAIN = build.plan((ONE,), {("one", "near"): 1}, {("one", "near", "closed"): (0.5, 0.5)})
TWO = build.plan((ONE,), {("one", "near"): 2}, {("one", "near", "closed"): (1.0, 1.0)})


def only_run(actions: list[act.Action]) -> act.Run:
    (run,) = actions
    assert isinstance(run, act.Run)
    return run


def only_refusal(actions: list[act.Action]) -> act.Refuse:
    (refusal,) = actions
    assert isinstance(refusal, act.Refuse)
    return refusal


def test_first_plan_starts_every_replica() -> None:
    template = build.template("two", ("mixed", "mixed"), closed=(1.0,))
    plan = build.plan((template,), {("two", "near"): 2}, {}, longest=(1000,))
    actions = Brain(build.facts((template,)), Policy()).on(0.0, events.PlanReceived(plan))
    names = [action.member.id for action in actions if isinstance(action, act.StartReplica)]
    assert names == ["two@near#0/0", "two@near#0/1", "two@near#1/0", "two@near#1/1"]
    assert len(actions) == 4


def test_finished_aggregated_request_leaves_no_load() -> None:
    world = build.world(PLAIN)
    run = only_run(world.arrive(build.request("a")))
    assert run == act.Run("a", aggregated("one@near#0/0"), 0, 1000, 0)
    view = world.brain.fleet.views["one@near#0/0"]
    assert (view.open_requests, view.open_prefill_tokens, view.open_context_tokens) == (1, 1000, 1100)
    assert world.advance("a") == []
    assert (view.open_requests, view.open_prefill_tokens, view.open_context_tokens) == (1, 0, 1100)
    assert world.advance("a") == []
    build.assert_idle(world.brain)


def test_requests_wait_in_order_for_the_first_ready_replica() -> None:
    world = build.world(PLAIN, ready=False)
    assert world.arrive(build.request("a")) == []
    assert world.arrive(build.request("b")) == []
    runs = world.make_ready("one@near#0/0")
    assert [run.request for run in runs if isinstance(run, act.Run)] == ["a", "b"]


def test_request_waits_for_the_first_plan() -> None:
    world = build.World(Brain(build.facts((ONE,)), Policy()))
    assert world.arrive(build.request("a")) == []
    world.plan(PLAIN)
    assert "a" in world.jobs


def test_waiting_request_is_refused_at_its_deadline_or_the_maximum_wait() -> None:
    world = build.world(PLAIN, Policy(max_wait_s=10.0), ready=False)
    world.arrive(build.request("patient"))
    world.arrive(build.request("urgent", deadline_s=3.0))
    world.now_s = 2.9
    assert world.tell(events.Tick()) == []
    world.now_s = 3.0
    assert only_refusal(world.tell(events.Tick())).reason == "deadline"
    world.now_s = 9.9
    assert world.tell(events.Tick()) == []
    world.now_s = 10.0
    refusal = only_refusal(world.tell(events.Tick()))
    assert (refusal.request, refusal.reason) == ("patient", "no_capacity")
    assert "10 s" in refusal.detail
    assert world.make_ready("one@near#0/0") == []


def test_unservable_request_is_refused_with_its_reason() -> None:
    world = build.world(PLAIN, known=build.facts((ONE,), longest={"one": 4096}))
    assert only_refusal(world.arrive(build.request("a", model="other"))).reason == "unknown_model"
    refusal = only_refusal(world.arrive(build.request("b", prompt=4000, output=97)))
    assert refusal.reason == "too_long"
    assert "4097" in refusal.detail
    assert "4096" in refusal.detail
    only_run(world.arrive(build.request("c", prompt=4000, output=96)))
    world.now_s = 5.0
    assert only_refusal(world.arrive(build.request("d", deadline_s=4.0))).reason == "deadline"


def test_long_request_is_sent_only_to_a_replica_that_can_hold_it() -> None:
    small, large = build.template("small", closed=(9.0, 9.0)), build.template("large", closed=(1.0, 1.0))
    plan = build.plan(
        (small, large),
        {("small", "near"): 3, ("large", "near"): 1},
        {("small", "near", "closed"): (9.0, 9.0), ("large", "near", "closed"): (1.0, 1.0)},
    )
    world = build.world(plan, known=build.facts((small, large), longest={"small": 4096}))
    for number in range(20):
        run = only_run(world.arrive(build.request(f"long{number}", prompt=5000)))
        assert world.members[run.route.decoder].template == "large"
    world.lose("large@near#0/0")
    assert world.arrive(build.request("held", prompt=5000)) == []  # none that it fits is ready
    only_run(world.arrive(build.request("short", prompt=3000)))


def test_failed_request_resumes_on_another_replica_from_its_streamed_tokens() -> None:
    world = build.world(TWO)
    first = only_run(world.arrive(build.request("a")))
    world.advance("a")
    again = only_run(world.fail("a", "replica", first.route.decoder, streamed=7))
    assert again.route.decoder != first.route.decoder
    assert (again.attempt, again.prompt_tokens, again.streamed_tokens) == (1, 1007, 7)
    view = world.brain.fleet.views[again.route.decoder]
    assert (view.open_requests, view.open_prefill_tokens, view.open_context_tokens) == (1, 1007, 1100)
    world.finish("a")
    build.assert_idle(world.brain)


def test_request_is_refused_after_its_retries_or_its_deadline() -> None:
    world = build.world(TWO, Policy(retries=1))
    first = only_run(world.arrive(build.request("a")))
    again = only_run(world.fail("a", "timeout", first.route.decoder)[1:])
    abandoned, refusal = world.fail("a", "timeout", again.route.decoder)
    assert isinstance(abandoned, act.Abort)
    assert isinstance(refusal, act.Refuse)
    assert refusal.reason == "retries"
    run = only_run(world.arrive(build.request("b", deadline_s=5.0)))
    world.now_s = 5.0
    assert only_refusal(world.fail("b", "replica", run.route.decoder)).reason == "deadline"
    build.assert_idle(world.brain)


def test_only_replica_is_retried_unless_it_was_lost() -> None:
    world = build.world(PLAIN)
    run = only_run(world.arrive(build.request("a")))
    abandoned, again = world.fail("a", "timeout", run.route.decoder)
    assert abandoned == act.Abort("a", (run.route.decoder,))
    assert isinstance(again, act.Run)
    assert world.fail("a", "replica", run.route.decoder) == []  # held: it may be gone
    world.now_s = 1.0
    assert only_run(world.tell(events.Tick())).attempt == 2  # it was not


def test_late_and_repeated_failure_events_are_ignored() -> None:
    world = build.world(TWO)
    first = only_run(world.arrive(build.request("a")))
    world.fail("a", "replica", first.route.decoder)
    assert world.tell(events.AttemptFailed("a", 0, "replica", first.route.decoder, 0)) == []
    world.finish("a")
    assert world.tell(events.AttemptFailed("a", 1, "replica", first.route.decoder, 0)) == []
    assert world.tell(events.RequestFinished("a", 1, 100)) == []
    build.assert_idle(world.brain)


def test_failure_after_the_last_token_counts_as_finished() -> None:
    world = build.world(TWO)
    run = only_run(world.arrive(build.request("a", output=10)))
    assert world.fail("a", "replica", run.route.decoder, streamed=10) == []
    build.assert_idle(world.brain)


def test_cancelled_request_frees_its_replica() -> None:
    world = build.world(PLAIN)
    run = only_run(world.arrive(build.request("a")))
    assert world.tell(events.RequestCancelled("a")) == [act.Abort("a", (run.route.decoder,))]
    assert world.tell(events.RequestCancelled("a")) == []
    build.assert_idle(world.brain)


def test_repeated_arrival_event_is_ignored() -> None:
    world = build.world(PLAIN)
    asked = build.request("a")
    world.arrive(asked)
    assert world.tell(events.RequestArrived(asked)) == []


def test_old_copies_serve_until_the_copies_of_a_new_plan_are_ready() -> None:
    other = build.template("other", closed=(1.0, 1.0))
    other = replace(other, replicas=(PlannedReplica("mixed", single("another", 1, 8)),))
    new = build.plan((other,), {("other", "near"): 1}, {("other", "near", "closed"): (0.5, 0.5)})
    world = build.world(PLAIN, known=build.facts((ONE, other)))
    actions = world.plan(new, ready=False)
    assert [type(action) for action in actions] == [act.StartReplica]
    assert only_run(world.arrive(build.request("a"))).route.decoder == "one@near#0/0"
    world.make_ready("other@near#1/0")
    world.now_s = 1.0
    assert world.tell(events.Tick()) == [act.DrainReplica("one@near#0/0")]
    assert only_run(world.arrive(build.request("b"))).route.decoder == "other@near#1/0"
    world.drain_out("one@near#0/0")
    assert world.log[-1][2] == (act.StopReplica("one@near#0/0"),)
    world.finish("b")
    build.assert_idle(world.brain)


def test_lost_replica_is_started_again() -> None:
    world = build.world(TWO)
    world.tell(events.Tick())
    world.lose("one@near#0/0")
    assert {only_run(world.arrive(build.request(str(n)))).route.decoder for n in range(4)} == {"one@near#1/0"}
    world.now_s = 1.0
    (start,) = world.tell(events.Tick())
    assert isinstance(start, act.StartReplica)
    assert start.member.unit != "one@near#1"


def test_autoscaler_adds_copies_when_requests_exceed_capacity() -> None:
    policy = Policy(scaling="cauchy", window_s=24.0)
    world = build.world(PLAIN, policy)
    for number in range(600):
        world.now_s = number * 0.1  # ten times what was planned
        world.arrive(build.request(str(number), at_s=world.now_s))
        if number % 10 == 9:
            world.tell(events.Tick())
        world.finish(str(number))
    started = [a for _, _, actions in world.log for a in actions if isinstance(a, act.StartReplica)]
    assert len(started) > 1
    assert world.brain.autoscaler.why()


@pytest.mark.parametrize("balance", ["goodput", "round-robin", "token", "fixed"])
def test_every_balance_uses_all_replicas_of_a_copy_equally(balance: str) -> None:
    template = build.template("quad", ("mixed",) * 4, closed=(4.0, 4.0))
    plan = build.plan((template,), {("quad", "near"): 2}, {("quad", "near", "closed"): (4.0, 4.0)})
    world = build.world(plan, Policy(balance=balance))  # type: ignore[arg-type]
    counts = Counter(only_run(world.arrive(build.request(str(n)))).route.decoder for n in range(80))
    assert set(counts.values()) == {10}
    assert len(counts) == 8


def test_advise_mode_notes_scaling_without_starting_replicas() -> None:
    policy = Policy(scaling="cauchy", window_s=24.0, advise=True)
    world = build.world(PLAIN, policy)
    for number in range(600):
        world.now_s = number * 0.1
        world.arrive(build.request(str(number), at_s=world.now_s))
        if number % 10 == 9:
            world.tell(events.Tick())
        world.finish(str(number))
    actions = [a for _, _, made in world.log for a in made]
    assert len([a for a in actions if isinstance(a, act.StartReplica)]) == 1
    advice = [a.what for a in actions if isinstance(a, act.OperatorNote)]
    assert any("advice: " in item and "of one in near" in item for item in advice)
    assert len(advice) == len(set(advice)), "said once"


def test_slow_replica_is_noted_once_and_again_when_it_recovers() -> None:
    world = build.world(TWO)
    view = world.brain.fleet.views["one@near#0/0"]
    text = []
    for pace in (1.0, 1.6, 2.5, 1.4, 1.1, 1.1):
        view.pace = pace
        text += [item.what for item in world.tell(events.Tick()) if isinstance(item, act.OperatorNote)]
    said = ["takes 1.6 times as long as planned", "is about as fast as planned again"]
    assert [item.partition(" ")[2] for item in text] == said


@pytest.mark.parametrize("scaling", ["replan", "ahead", "cauchy"])
def test_changed_market_prices_trigger_a_replan_at_once(scaling: str) -> None:
    world = build.world(PLAIN, Policy(scaling=scaling))  # type: ignore[arg-type]
    world.tell(events.Tick())
    cheaper = (Region("near", (NodeOffer("node", 0.1, 5),)),)
    world.now_s = 1.0
    (asked,) = [item for item in world.tell(events.MarketReported(cheaper)) if isinstance(item, act.Replan)]
    assert "prices or nodes changed" in asked.reason
    world.now_s = 2.0
    assert not [item for item in world.tell(events.Tick()) if isinstance(item, act.Replan)]


def test_started_service_does_not_scale_down_before_a_window_has_passed() -> None:
    world = build.world(PLAIN, Policy(scaling="ahead", window_s=24.0))
    asked: list[float] = []
    for second in range(60):
        world.now_s = float(second)
        asked += [world.now_s for item in world.tell(events.Tick()) if isinstance(item, act.Replan)]
    assert asked
    assert asked[0] >= 24.0, "a window that nobody has looked through says nothing"


def test_newly_available_nodes_are_used_at_once() -> None:
    known = replace(build.facts((ONE,)), regions=(Region("near", (NodeOffer("node", 1.0, 1),)),))
    world = build.world(TWO, known=known)
    assert len(world.brain.fleet.views) == 1
    actions = world.tell(events.MarketReported((Region("near", (NodeOffer("node", 1.0, 2),)),)))
    assert [type(action) for action in actions] == [act.StartReplica]


def test_queued_requests_count_as_demand_for_scaling() -> None:
    """With an objective requests wait before the replicas, where no replica reports them."""
    known = build.facts((ONE,))
    known = replace(known, models={"m": replace(known.models["m"], slo=Slo(60.0, 0.05))})
    world = build.world(PLAIN, Policy(scaling="cauchy"), known=known)
    for number in range(200):
        world.arrive(build.request(str(number)))
    waiting = world.brain.admission.queues["m"].count
    assert waiting > 50
    seen: list[int] = []
    scaler = world.brain.autoscaler._scaler
    message = scaler.on_tick
    scaler.on_tick = lambda at_s, observed, fleet, plan: (  # type: ignore[method-assign]
        seen.append(observed.of("m").held),  # type: ignore[union-attr]
        message(at_s, observed, fleet, plan),
    )[1]
    world.tell(events.Tick())
    assert seen == [waiting]


# A Brain that takes another's place knows what is under way: it counts it, and lets go of it, as its own.


def adopted_world(world: World, plan: Plan, policy: Policy, ready: bool) -> World:
    """What a driver tells another Brain of all that is open, and that Brain's world."""
    after = World(Brain(build.facts(plan.templates), policy))
    after.plan(plan, ready)
    for name, request in world.requests.items():
        if name in world.ended:
            continue
        after.requests[name] = request
        job = world.jobs.get(name)
        if job is None:
            after.tell(events.RequestArrived(request))
            continue
        run = job.run
        after.attempts[name] = run.attempt + 1
        actions = after.tell(
            events.RequestAdopted(request, run.attempt, run.streamed_tokens, run.route, job.done, job.first)
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
def test_adopted_requests_restore_the_load_counts_of_replicas(
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
    after = adopted_world(world, plan, policy, ready)
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
        after.tell(events.Tick())
    after.now_s += 10.0
    after.tell(events.Tick())
    while after.jobs:
        after.finish(next(iter(after.jobs)))
    build.assert_idle(after.brain)


PLAIN_ADOPTION = build.template("plain", closed=(1.0, 1.0))
TWO_ADOPTION = build.plan(
    (PLAIN_ADOPTION,), {("plain", "near"): 2}, {("plain", "near", "closed"): (1.0, 1.0)}
)


@pytest.fixture
def world() -> World:
    made = build.world(TWO_ADOPTION)
    made.requests["r"] = build.request("r", 100, 50)
    return made


def test_adopted_request_continues_and_recovers_like_any_other(world: World) -> None:
    one, other = sorted(world.members)
    request = world.requests["r"]
    assert world.tell(events.RequestAdopted(request, 2, 10, aggregated(one), 0, True)) == []
    assert world.tell(events.RequestAdopted(request, 2, 10, aggregated(other), 0, True)) == [], "once"
    assert world.tell(events.RequestArrived(request)) == []
    assert world.tell(events.RequestFinished("r", 1, 50)) == [], "of an earlier attempt"
    world.attempts["r"] = 3
    message = world.tell(events.AttemptFailed("r", 2, "replica", one, 17))
    (run,) = [item for item in message if not isinstance(item, act.Abort)]
    assert run == act.Run("r", aggregated(other), 3, 117, 17)
    world.finish("r")
    build.assert_idle(world.brain)


def test_adopted_request_without_a_route_is_dispatched_from_its_streamed_tokens(world: World) -> None:
    request = world.requests["r"]
    world.attempts["r"] = 5
    (run,) = world.tell(events.RequestAdopted(request, 4, 20, None))
    assert isinstance(run, act.Run)
    assert (run.attempt, run.streamed_tokens, run.prompt_tokens) == (5, 20, 120)
    world.finish("r")
    build.assert_idle(world.brain)


def test_adopted_request_on_an_unknown_replica_is_dispatched_again(world: World) -> None:
    one = min(world.members)
    request = world.requests["r"]
    world.attempts["r"] = 1
    (run,) = world.tell(events.RequestAdopted(request, 0, 0, handed_over("gone", one, 60), 0, False))
    assert isinstance(run, act.Run)
    assert run.attempt == 1
    assert world.tell(events.RequestCancelled("r"))
    build.assert_idle(world.brain)


# Replicas whose caches cross in unlike versions: each answers whole requests, none hands over to the other.

FIRST = build.template("first", ("prefill",), prefill=(1.0,))
SECOND = build.template("second", ("decode",), decode=(1.0,))
COMBO = build.template("combo", ("prefill", "decode"), "combo", closed=(1.0,))
PAIR = build.template("pair", ("prefill", "mixed"), "pair", closed=(1.0,))


def flow_plan(source: str) -> Plan:
    counts = {("first", source): 1, ("second", "near"): 1}
    shares: dict[tuple[str, str, build.Phase], tuple[float, ...]] = {
        ("first", source, "prefill"): (1.0,),
        ("second", "near", "decode"): (1.0,),
    }
    return build.plan((FIRST, SECOND), counts, shares, {("m", source, "near"): (1.0,)}, (100_000,))


def aggregated_plan(name: str) -> Plan:
    template = COMBO if name == "combo" else PAIR
    return build.plan(
        (template,), {(name, "near"): 1}, {(name, "near", "closed"): (1.0,)}, longest=(100_000,)
    )


PLANS_VERSIONS = {
    "flow": flow_plan("near"),
    "crossing": flow_plan("far"),
    "combo": aggregated_plan("combo"),
    "pair": aggregated_plan("pair"),
}


def replicas_of(plan: Plan, versions: tuple[int, int]) -> list[tuple[str, ...]]:
    """Where 12 requests are sent, when the plan's two replicas have these versions."""
    world = build.world(plan, Policy(opportunistic=False), ready=False)
    names = list(world.brain.fleet.views)
    for name, version in zip(names, versions, strict=True):
        world.make_ready(name, version)
    replicas = []
    for place in range(12):
        (run,) = world.arrive(build.request(f"r{place}", prompt=3000))
        assert isinstance(run, act.Run)
        replicas.append(tuple(segment.replica for segment in run.route.segments))
        world.finish(f"r{place}")
    build.assert_idle(world.brain)
    return replicas


@pytest.mark.parametrize("kind", PLANS_VERSIONS)
def test_kv_is_transferred_only_between_equal_weight_versions(kind: str) -> None:
    alike = replicas_of(PLANS_VERSIONS[kind], (2, 2))
    assert any(len(item) == 2 for item in alike), "nothing is handed over even where all agree"
    answers = {item[-1] for item in alike if len(item) == 2}
    unlike = replicas_of(PLANS_VERSIONS[kind], (2, 3))
    assert all(len(item) == 1 for item in unlike)
    assert answers <= {item[0] for item in unlike}, "whoever was to answer does so still"
