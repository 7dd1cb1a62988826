"""Late, repeated and lost events; correlated losses; limits of waiting."""

from __future__ import annotations

from dataclasses import replace

import brain_builders as build
import pytest

from potluck.core.brain.recovery import (
    COMMON_CAUSE_S,
    FAILURE_REPORT_S,
    MAX_QUERIES,
    QUARANTINE_S,
    QUERY_TIMEOUT_S,
    SILENCE_S,
    RecentLosses,
    smallest_common_domain,
)
from potluck.core.brain.requests import MAX_RECENTLY_ENDED
from potluck.core.scaling.rule import FlipRole
from potluck.core.state import actions as act
from potluck.core.state import events
from potluck.core.state.fleet import FleetState
from potluck.core.state.policy import Policy
from potluck.core.values.plan import ReplicaSpec
from potluck.core.values.types import Slo

ONE = build.template("one", closed=(1.0,))


def plan_of_copies(near: int, far: int = 0) -> build.Plan:
    counts = {("one", "near"): near} | ({("one", "far"): far} if far else {})
    shares = {(name, region, "closed"): (1.0,) for name, region in counts}
    return build.plan((ONE,), counts, shares, longest=(200_000,))  # type: ignore[arg-type]


def dispatched_run(actions: list[act.Action]) -> act.Run:
    (run,) = [action for action in actions if isinstance(action, act.Run)]
    return run


def test_events_of_a_finished_attempt_change_nothing() -> None:
    world = build.world(plan_of_copies(3))
    first = dispatched_run(world.arrive(build.request("a")))
    again = dispatched_run(world.fail("a", "timeout", first.route.decoder, 3))
    view = world.brain.fleet.views[again.route.decoder]
    counts = (view.open_requests, view.open_prefill_tokens, view.open_context_tokens)
    for late in (
        events.SegmentDone("a", 0, 0),
        events.FirstToken("a", 0),
        events.RequestFinished("a", 0, 100),
        events.AttemptFailed("a", 0, "timeout", first.route.decoder, 3),
        events.AttemptFailed("a", 0, "timeout", again.route.decoder, 3),
        events.AttemptFailed("a", 2, "timeout", again.route.decoder, 3),
    ):
        assert world.tell(late) == []
        assert (view.open_requests, view.open_prefill_tokens, view.open_context_tokens) == counts
    assert world.brain.requests["a"].failures == 1
    world.finish("a")
    build.assert_idle(world.brain)


@pytest.mark.parametrize("end", ["finished", "refused", "cancelled", "before"])
def test_ended_request_does_not_start_again_on_a_repeated_arrival(end: str) -> None:
    world = build.world(plan_of_copies(1))
    asked = build.request("a", deadline_s=0.0 if end == "refused" else None)
    if end == "before":
        assert world.tell(events.RequestCancelled("a")) == []
        assert world.tell(events.RequestArrived(asked)) == []
    else:
        assert world.arrive(asked)
    if end == "finished":
        world.finish("a")
    elif end == "cancelled":
        assert world.tell(events.RequestCancelled("a")) == [act.Abort("a", ("one@near#0/0",))]
    assert world.tell(events.RequestArrived(asked)) == []
    for number in range(2 * MAX_RECENTLY_ENDED):
        world.brain.on(0.0, events.RequestCancelled(f"other{number}"))
    assert world.brain.sizes()["ended"] <= 2 * MAX_RECENTLY_ENDED


def test_lost_replica_without_failure_events_is_queried_and_its_request_resumed() -> None:
    world = build.world(plan_of_copies(2))
    run = dispatched_run(world.arrive(build.request("a")))
    world.advance("a")
    lost = run.route.decoder
    world.tell(events.ReplicaLost(lost, "died"))
    world.now_s = FAILURE_REPORT_S - 0.1
    assert not [item for item in world.tell(events.Tick()) if isinstance(item, act.QueryAttempt)]
    world.now_s = FAILURE_REPORT_S
    assert act.QueryAttempt("a", 0) in world.tell(events.Tick())
    again = dispatched_run(world.fail("a", "replica", lost, streamed=57))
    assert (again.attempt, again.streamed_tokens, again.prompt_tokens) == (1, 57, 1057)
    assert world.tell(events.AttemptFailed("a", 0, "replica", lost, 57)) == []
    world.finish("a")
    build.assert_idle(world.brain)


def test_false_loss_report_and_spot_notice_do_not_interrupt_requests() -> None:
    world = build.world(plan_of_copies(2))
    run = dispatched_run(world.arrive(build.request("a")))
    world.tell(events.ReplicaLost(run.route.decoder, "spot", 30.0))
    for second in range(1, 34):
        world.now_s = float(second)
        assert not [
            item for item in world.tell(events.Tick()) if isinstance(item, act.QueryAttempt | act.Refuse)
        ]
    asked = 0
    for second in range(34, 200):
        world.now_s = float(second)
        if act.QueryAttempt("a", 0) in world.tell(events.Tick()):
            asked += 1
            world.tell(events.AttemptRunning("a", 0))
    assert asked > 10
    assert "a" in world.brain.requests
    world.finish("a")
    build.assert_idle(world.brain)


def test_silent_attempt_is_queried_and_then_refused_as_lost() -> None:
    world = build.world(plan_of_copies(1))
    world.arrive(build.request("a"))
    world.now_s = SILENCE_S
    for _ in range(MAX_QUERIES):
        assert world.tell(events.Tick()) == [act.QueryAttempt("a", 0)]
        world.now_s += QUERY_TIMEOUT_S
    abandoned, refused = world.tell(events.Tick())
    assert abandoned == act.Abort("a", ("one@near#0/0",))
    assert isinstance(refused, act.Refuse)
    assert refused.reason == "lost"
    build.assert_idle(world.brain)
    assert world.brain.sizes()["inquiries"] == 0


def replica_spec_of(
    name: str, region: str = "near", nodes: tuple[str, ...] = (), zone: str = ""
) -> ReplicaSpec:
    return ReplicaSpec(name, name, "t", 0, "homogeneous", "m", "mixed", region, nodes, zone)


def test_loss_suspects_are_the_smallest_domain_of_all_losses() -> None:
    a, b = replica_spec_of("a", nodes=("n1",), zone="z1"), replica_spec_of("b", nodes=("n1", "n2"), zone="z1")
    c, d = replica_spec_of("c", nodes=("n3",), zone="z1"), replica_spec_of("d", nodes=("n4",), zone="z2")
    assert smallest_common_domain([a]) == smallest_common_domain([a, b]) == ("node near/n1",)
    assert smallest_common_domain([a, b, c]) == ("zone near/z1",)
    assert smallest_common_domain([a, d]) == ("region near",)
    assert smallest_common_domain([replica_spec_of("x"), replica_spec_of("y")]) == ("region near",)
    assert smallest_common_domain([replica_spec_of("x")]) == ("x",)


def test_recent_losses_expire_recover_and_are_separate_by_region() -> None:
    losses = RecentLosses()
    losses.note_loss(0.0, replica_spec_of("a", nodes=("n1",)))
    losses.note_loss(1.0, replica_spec_of("b", "far", nodes=("n1",)))
    assert losses.suspect_domains(1.0) == {"node near/n1", "node far/n1"}
    losses.note_loss(2.0, replica_spec_of("c", "far", nodes=("n2",)))
    assert losses.suspect_domains(2.0) == {"node near/n1", "region far"}
    losses.forget_loss("c")
    assert losses.suspect_domains(COMMON_CAUSE_S + 0.5) == {"node far/n1"}
    assert losses.suspect_domains(COMMON_CAUSE_S + 1.5) == frozenset()


def test_retries_avoid_a_region_with_many_losses() -> None:
    world = build.world(plan_of_copies(4, 2))
    for number in range(24):
        world.arrive(build.request(f"{number:02}"))
    for name in [name for name in world.members if "@near" in name]:
        world.lose(name)
    assert len(world.jobs) == 24, "nobody is refused"
    assert {job.run.route.decoder.split("#")[0] for job in world.jobs.values()} == {"one@far"}
    assert max(world.attempts.values()) <= 3


def test_request_that_loses_every_replica_is_refused_after_its_retries() -> None:
    world = build.world(plan_of_copies(8), Policy(retries=2))
    run = dispatched_run(world.arrive(build.request("poison")))
    killed = 0
    while "poison" in world.jobs:
        world.lose(world.jobs["poison"].run.route.decoder)
        killed += 1
        world.now_s += 2 * COMMON_CAUSE_S
        world.tell(events.Tick())
    assert killed == 3
    assert world.ended == {"poison": "refused"}
    assert run.attempt == 0


def test_request_that_loses_replicas_after_some_tokens_is_refused() -> None:
    """It gets no further than where it killed the first: only that first loss is not held against it."""
    world = build.world(plan_of_copies(8), Policy(retries=2))
    world.arrive(build.request("poison", output=50))
    killed = 0
    while "poison" in world.jobs:
        world.tell(events.FirstToken("poison", world.jobs["poison"].run.attempt))
        decoder = world.jobs["poison"].run.route.decoder
        world.fail("poison", "replica", decoder, streamed=7)
        killed += 1
        world.now_s += 2 * COMMON_CAUSE_S
        world.tell(events.Tick())
    assert killed == 4


@pytest.mark.parametrize("sign", ["none", "another", "woke"])
def test_request_whose_replicas_fall_silent_is_refused_unless_others_are_silent_or_recover(
    sign: str,
) -> None:
    """It gets no further, each time: a prompt that takes long on a machine that stops its engines in turn."""
    world = build.world(plan_of_copies(12), Policy(retries=2))
    first = dispatched_run(world.arrive(build.request("a"))).route.decoder
    spared = [name for name in sorted(world.members) if name != first]
    if sign == "another":
        world.tell(events.ReplicaSilent(spared[0]))
    if sign == "woke":
        world.tell(events.ReplicaSilent(first))
        world.tell(events.ReplicaReported(first, events.ReplicaStatus(0, 0, 0, 0, 1, 1, 0.0)))
    silenced = 0
    while "a" in world.jobs and silenced < 8:
        world.now_s += 1.1 * COMMON_CAUSE_S
        world.tell(events.Tick())
        replica = world.jobs["a"].run.route.decoder
        world.tell(events.ReplicaSilent(replica))
        world.fail("a", "replica", replica)
        silenced += 1
    assert silenced == (3 if sign == "none" else 8)


def test_request_that_progresses_between_losses_is_retried() -> None:
    """Engines are frozen one after another, each while it is there: it goes on as long as somebody is."""
    world = build.world(plan_of_copies(8), Policy(retries=2))
    world.arrive(build.request("unlucky", output=50))
    for number in range(1, 8):
        world.fail("unlucky", "replica", world.jobs["unlucky"].run.route.decoder, streamed=5 * number)
        world.now_s += 2 * COMMON_CAUSE_S
        world.tell(events.Tick())
        assert world.jobs["unlucky"].run.streamed_tokens == 5 * number
    assert world.ended == {}


@pytest.mark.parametrize(("deadline_s", "reason"), [(None, "no_capacity"), (4.0, "deadline")])
def test_request_waiting_for_a_pair_is_refused_at_its_limit(deadline_s: float | None, reason: str) -> None:
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
    assert not [item for item in world.tell(events.Tick()) if isinstance(item, act.Refuse)]
    world.now_s += 0.1
    refused = [item for item in world.tell(events.Tick()) if isinstance(item, act.Refuse)]
    assert sorted(item.request for item in refused) == waiting
    assert {item.reason for item in refused} == {reason}
    for name in list(world.jobs):
        world.finish(name)
    build.assert_idle(world.brain)


# What a person orders: it is done, what follows is done, and rules do not undo it.

ONE_ORDERS = build.template("one", closed=(1.0,))
PAIR = build.template("two", ("prefill", "decode"), "combo", closed=(1.0,))
P, D = build.template("p", ("prefill",), prefill=(2.0,)), build.template("d", ("decode",), decode=(2.0,))
FLOW = build.plan(
    (P, D),
    {("p", "near"): 2, ("d", "near"): 1},
    {("p", "near", "prefill"): (1.0,), ("d", "near", "decode"): (1.0,)},
    {("m", "near", "near"): (1.0,)},
    longest=(100_000,),
)


def _aggregated_plan(template: build.Template, count: int) -> build.Plan:
    name = template.name
    return build.plan(
        (template,), {(name, "near"): count}, {(name, "near", "closed"): (1.0,)}, longest=(9_000,)
    )


def test_drained_replica_finishes_its_requests_and_is_replaced() -> None:
    world = build.world(_aggregated_plan(ONE_ORDERS, 2))
    (run,) = world.arrive(build.request("a"))
    replica = run.route.decoder
    actions = world.tell(events.OperatorOrdered(replica, "drain"))
    assert act.DrainReplica(replica) in actions
    (start,) = [action for action in actions if isinstance(action, act.StartReplica)]
    assert start.member.id != replica
    assert "a" in world.jobs, "what is open goes on"
    for number in range(4):
        (other,) = world.arrive(build.request(f"b{number}"))
        assert other.route.decoder != replica
    world.drain_out(replica)
    assert replica not in world.members
    assert world.ended["a"] == "answered"
    assert world.tell(events.OperatorOrdered(replica, "drain")) == [], "it is gone"


def test_cordoned_replica_keeps_its_requests_and_gets_no_new_ones() -> None:
    world = build.world(_aggregated_plan(ONE_ORDERS, 2))
    (run,) = world.arrive(build.request("a"))
    replica = run.route.decoder
    assert world.tell(events.OperatorOrdered(replica, "cordon")) == [], "nobody is started in its place"
    assert "a" in world.jobs
    for number in range(4):
        (other,) = world.arrive(build.request(f"b{number}"))
        assert other.route.decoder != replica
    assert world.tell(events.Tick()) == []
    world.finish("a")
    assert world.ended["a"] == "answered"
    assert world.tell(events.OperatorOrdered(replica, "uncordon")) == []
    (last,) = world.arrive(build.request("c"))
    assert last.route.decoder == replica, "the other one has four"


def test_request_waits_while_all_replicas_are_cordoned() -> None:
    world = build.world(_aggregated_plan(ONE_ORDERS, 1))
    (replica,) = world.members
    world.tell(events.OperatorOrdered(replica, "cordon"))
    assert world.arrive(build.request("a")) == []
    (run,) = world.tell(events.OperatorOrdered(replica, "uncordon"))
    assert isinstance(run, act.Run)
    assert run.route.decoder == replica


def test_copy_with_a_cordoned_replica_gets_no_new_requests() -> None:
    world = build.world(_aggregated_plan(PAIR, 2))
    away = sorted(world.members)[0]
    world.tell(events.OperatorOrdered(away, "cordon"))
    for number in range(4):
        (run,) = world.arrive(build.request(f"b{number}"))
        assert away not in [segment.replica for segment in run.route.segments]


def test_draining_one_replica_drains_its_whole_copy() -> None:
    world = build.world(_aggregated_plan(PAIR, 1))
    first, second = sorted(world.members)
    message = world.tell(events.OperatorOrdered(first, "drain"))
    assert {item.replica for item in message if isinstance(item, act.DrainReplica)} == {first, second}
    for replica in (first, second):
        world.drain_out(replica)
    assert len(world.members) == 2
    assert not {first, second} & world.members.keys()


def test_order_for_a_replica_that_is_not_ready_is_ignored() -> None:
    world = build.world(_aggregated_plan(ONE_ORDERS, 1), ready=False)
    (replica,) = world.members
    assert world.tell(events.OperatorOrdered(replica, "drain")) == []
    assert world.tell(events.OperatorOrdered("nobody", "decode")) == []


def test_manual_role_survives_scaling_and_plans_until_it_is_reset() -> None:
    world = build.world(FLOW)
    replica = next(name for name in world.members if name.startswith("p@"))
    assert world.tell(events.OperatorOrdered(replica, "decode")) == [act.FlipReplica(replica, "decode")]
    autoscaler = world.brain.autoscaler
    autoscaler.watches = True

    class Flips:
        def on_tick(self, *_: object) -> tuple[FlipRole, ...]:
            return (FlipRole(replica, "prefill", "a shift"),)

    autoscaler._scaler = Flips()  # type: ignore[assignment]
    assert not [item for item in world.tell(events.Tick()) if isinstance(item, act.FlipReplica)]
    assert not [item for item in world.plan(FLOW) if isinstance(item, act.FlipReplica | act.StopReplica)]
    assert world.brain.fleet.views[replica].role == "decode"
    assert world.tell(events.OperatorOrdered(replica, "prefill")) == [act.FlipReplica(replica, "prefill")]
    assert autoscaler.by_hand == {}
    world.brain.fleet.flip(replica, "decode")
    assert act.FlipReplica(replica, "prefill") in world.tell(events.Tick()), "the rules decide again"


def test_replica_lost_before_an_operator_order_is_replaced() -> None:
    world = build.world(FLOW)
    lost = next(name for name in world.members if name.startswith("d@"))
    flipped = next(name for name in world.members if name.startswith("p@"))
    world.tell(events.Tick())
    actions = world.tell(events.ReplicaLost(lost, "died"))
    actions += world.tell(events.OperatorOrdered(flipped, "decode"))
    for _ in range(3):
        actions += world.tell(events.Tick())
    assert [action.member.template for action in actions if isinstance(action, act.StartReplica)] == ["d"]


# What the Brain makes of doubtful replicas, of crowds that waited, of promises kept, and of copies in part.

ONE_TROUBLE = build.template("one", closed=(1.0,))
THREE = build.plan(
    (ONE_TROUBLE,), {("one", "near"): 3}, {("one", "near", "closed"): (1.5,)}, longest=(200_000,)
)
COMBO = build.template("combo", ("prefill", "decode", "decode"), kind="combo", closed=(1.0,))
COMBOS = build.plan(
    (COMBO,), {("combo", "near"): 2}, {("combo", "near", "closed"): (1.0,)}, longest=(200_000,)
)
IDLE = events.ReplicaStatus(0, 0, 0, 0, 100, 100, 0.0)


def replicas_of_next_requests(world: build.World, prefix: str, count: int = 12) -> set[str]:
    """Who works on the next requests."""
    result: set[str] = set()
    for number in range(count):
        for action in world.arrive(build.request(f"{prefix}{number}")):
            assert isinstance(action, act.Run)
            result |= {segment.replica for segment in action.route.segments}
    return result


@pytest.mark.parametrize("heals", ["report", "time"])
@pytest.mark.parametrize("plan", [THREE, COMBOS], ids=["plain", "combos"])
def test_suspected_replica_gets_no_requests_until_it_reports_or_time_passes(
    plan: build.Plan, heals: str
) -> None:
    world = build.world(plan, Policy(opportunistic=False))
    (run,) = world.arrive(build.request("a"))
    assert isinstance(run, act.Run)
    doubted = run.route.decoder
    again = world.fail("a", "replica", doubted)[-1]
    assert isinstance(again, act.Run)
    assert doubted not in replicas_of_next_requests(world, "b")
    world.now_s = 0.5 * QUARANTINE_S
    world.tell(events.Tick())
    world.tell(events.ReplicaReported(again.route.decoder, IDLE))
    assert doubted not in replicas_of_next_requests(world, "c")
    if heals == "report":
        world.tell(events.ReplicaReported(doubted, IDLE))
    else:
        world.now_s = QUARANTINE_S
        world.tell(events.Tick())
    assert doubted in replicas_of_next_requests(world, "d")


def test_silent_replica_gets_no_requests_while_it_is_reported_silent() -> None:
    """Many times a day perhaps: what it says once it answers is believed, however often it was silent."""
    world = build.world(THREE)
    silent = "one@near#1/0"
    for turn in range(5):
        start_s = world.now_s
        while world.now_s < start_s + 3 * QUARANTINE_S:
            world.tell(events.ReplicaSilent(silent))
            world.now_s += QUARANTINE_S / 2
            world.tell(events.Tick())
            assert silent not in replicas_of_next_requests(world, f"{turn} {world.now_s} ", 3)
        world.tell(events.ReplicaReported(silent, IDLE))
        assert silent in replicas_of_next_requests(world, f"{turn} again ")
    world.tell(events.ReplicaSilent(silent))
    world.now_s += QUARANTINE_S
    world.tell(events.Tick())
    assert silent in replicas_of_next_requests(world, "time ", 12), (
        "some do not report; nobody says that it is silent any more"
    )
    assert world.tell(events.ReplicaSilent("nobody")) == []


def test_replica_behind_a_slow_link_gets_no_requests_for_the_reported_time() -> None:
    world = build.world(THREE)
    slow, start_s = "one@near#1/0", world.now_s
    world.tell(events.ReplicaSilent(slow, 5 * QUARANTINE_S))
    while world.now_s < start_s + 5 * QUARANTINE_S:
        assert slow not in replicas_of_next_requests(world, f"{world.now_s} ", 3)
        world.now_s += QUARANTINE_S / 2
        world.tell(events.Tick())
    assert slow in replicas_of_next_requests(world, "again ")


def test_timeout_does_not_quarantine_a_replica() -> None:
    world = build.world(THREE)
    (run,) = world.arrive(build.request("a"))
    assert isinstance(run, act.Run)
    world.fail("a", "timeout", run.route.decoder)
    assert run.route.decoder in replicas_of_next_requests(world, "b")


def test_queued_requests_are_spread_over_replicas_as_they_become_ready() -> None:
    batch = 8
    world = build.world(THREE, known=build.facts((ONE_TROUBLE,), batch=batch), ready=False)
    for number in range(40):
        assert world.arrive(build.request(f"{number:02}")) == []
    first = [run for run in world.make_ready("one@near#0/0") if isinstance(run, act.Run)]
    assert [run.request for run in first] == [f"{number:02}" for number in range(batch)]
    assert len(world.make_ready("one@near#1/0")) == batch
    world.now_s = 1.0
    rest = [run for run in world.tell(events.Tick()) if isinstance(run, act.Run)]
    assert [run.request for run in rest] == [f"{number:02}" for number in range(2 * batch, 40)]
    loads = [world.brain.fleet.views[f"one@near#{copy}/0"].open_requests for copy in (0, 1)]
    assert sum(loads) == 40
    assert max(loads) <= 40 - 2 * batch
    world.now_s = 2.0
    assert world.tell(events.Tick()) == []


@pytest.mark.parametrize(("slo", "attained"), [(Slo(1.0, 0.05), 1), (Slo(0.5, 0.05), 0), (None, 2)])
def test_late_answers_do_not_count_as_attained(slo: Slo | None, attained: int) -> None:
    known = build.facts((ONE_TROUBLE,))
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


def test_copy_is_complete_only_when_every_replica_is_ready() -> None:
    fleet = FleetState()
    members = [ReplicaSpec(f"u/{i}", "u", "t", i, "combo", "m", "mixed", "near") for i in range(2)]
    for replica_spec in members:
        fleet.add(replica_spec)
        fleet.ready(replica_spec.id)
    template_copy = fleet.units["u"]
    assert template_copy.whole
    fleet.remove("u/1")
    assert not template_copy.whole
    fleet.add(members[1])
    assert not template_copy.whole
    fleet.ready("u/1")
    assert template_copy.whole


@pytest.mark.parametrize("heals", [False, True])
def test_repeatedly_failing_replica_is_retried_with_growing_delay(
    heals: bool,
) -> None:
    world = build.world(THREE, Policy(retries=99, balance="round-robin"))
    bad = next(iter(world.members))
    tried: list[float] = []
    for number in range(900):
        world.now_s = number / 10
        world.tell(events.Tick())
        world.tell(events.ReplicaReported(bad, IDLE))
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
