"""Disaggregated routing: flows, length thresholds, links, cached prefixes, flipped roles."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import brain_builders as build
import pytest

from potluck.core.routing.balance import balance_rule
from potluck.core.routing.routing_table import RoutingTable
from potluck.core.state.actions import Abort, FlipReplica, OperatorNote, Run
from potluck.core.state.events import (
    CacheReported,
    LinkReported,
    ReplicaReported,
    ReplicaStatus,
    SegmentComputed,
    SegmentDone,
    Tick,
)
from potluck.core.state.fleet import FleetState
from potluck.core.state.policy import Policy
from potluck.core.values.types import Slo

P = build.template("p", ("prefill",), prefill=(2.0, 2.0))
D = build.template("d", ("decode",), decode=(2.0, 2.0))
TEMPLATES = (P, D)
LENGTHS = build.plan(
    TEMPLATES,
    {("p", "near"): 1, ("p", "far"): 1, ("d", "near"): 2},
    {
        ("p", "near", "prefill"): (1.0, 0.0),
        ("p", "far", "prefill"): (0.0, 1.0),
        ("d", "near", "decode"): (1.0, 1.0),
    },
    {("m", "near", "near"): (1.0, 0.0), ("m", "far", "near"): (0.0, 1.0)},
)
"""Prompts of more than 2,000 tokens are prefilled far away."""
CONGESTED = LinkReported("far", "near", 1.0, 1e10, 10.0)
CLEAR = LinkReported("far", "near", 0.1, 0.0, 10.0)
DEAD = LinkReported("far", "near", 0.0, 0.0, 0.0)


def segment_regions(world: build.World, run: Run) -> list[str]:
    return [world.members[segment.replica].region for segment in run.route.segments]


def send_request(world: build.World, prompt: int, blocks: tuple[int, ...] = ()) -> Run:
    (run,) = world.arrive(build.request(f"r{len(world.requests)}", prompt, blocks=blocks))
    assert isinstance(run, Run)
    return run


def test_requests_are_divided_between_regions_by_planned_flows() -> None:
    plan = build.plan(
        TEMPLATES,
        {("p", "near"): 1, ("p", "far"): 1, ("d", "near"): 1, ("d", "far"): 1},
        {
            ("p", "near", "prefill"): (3.0, 0.0),
            ("p", "far", "prefill"): (2.0, 0.0),
            ("d", "near", "decode"): (4.0, 0.0),
            ("d", "far", "decode"): (1.0, 0.0),
        },
        {
            ("m", "near", "near"): (3.0, 0.0),
            ("m", "far", "near"): (1.0, 0.0),
            ("m", "far", "far"): (1.0, 0.0),
        },
    )
    world = build.world(plan, Policy(balance="fixed"))
    counts = Counter(tuple(segment_regions(world, send_request(world, 500))) for _ in range(100))
    assert counts == {("near", "near"): 60, ("far", "near"): 20, ("far", "far"): 20}


def aggregated_in_two_regions(policy: Policy) -> build.World:
    both = build.template("w", ("mixed",), closed=(2.0, 2.0))
    shares = {("w", region, "closed"): (1.0, 1.0) for region in ("near", "far")}
    return build.world(build.plan((both,), {("w", "near"): 1, ("w", "far"): 1}, shares), policy)  # type: ignore[arg-type]


def test_gateway_prefers_its_home_region_until_it_is_far_behind_or_lost() -> None:
    world = aggregated_in_two_regions(Policy(home="far", admission=False))
    places = [segment_regions(world, send_request(world, 500))[0] for _ in range(80)]
    assert places[:10] == ["far"] * 10
    assert set(places[-40:]) == {"far", "near"}
    world = aggregated_in_two_regions(Policy(home="far", admission=False))
    (home,) = (name for name, member in world.members.items() if member.region == "far")
    world.lose(home)
    assert [segment_regions(world, send_request(world, 500)) for _ in range(5)] == [["near"]] * 5


def test_load_from_other_gateways_is_counted_from_status_reports() -> None:
    world = aggregated_in_two_regions(Policy(home="far", admission=False))
    (home,) = (name for name, member in world.members.items() if member.region == "far")
    busy = ReplicaStatus(100, 8, 0, 0, 50, 100, 0.02)
    world.tell(ReplicaReported(home, busy))
    assert segment_regions(world, send_request(world, 500)) == ["near"]
    world.tell(ReplicaReported(home, busy._replace(queued=0, running=0)))
    assert segment_regions(world, send_request(world, 500)) == ["far"]
    world.tell(ReplicaReported(home, busy._replace(queued=0, running=1)))  # our own
    assert world.brain.table.singles[home].others_s == 0.0


def test_planned_threshold_sends_prompts_by_length() -> None:
    world = build.world(LENGTHS)
    assert segment_regions(world, send_request(world, 2000)) == ["near", "near"]
    assert segment_regions(world, send_request(world, 2001)) == ["far", "near"]
    run = send_request(world, 50_000)
    assert run.route.segments[0].stop == run.route.segments[1].start == 50_000


def test_congestion_keeps_more_prompts_local_until_it_clears() -> None:
    world = build.world(LENGTHS, Policy(balance="goodput"))
    for _ in range(12):
        world.tell(CONGESTED)
    assert segment_regions(world, send_request(world, 4000)) == ["near", "near"]
    assert segment_regions(world, send_request(world, 100_000)) == ["far", "near"]
    for _ in range(60):
        world.tell(CLEAR)
    assert segment_regions(world, send_request(world, 4000)) == ["far", "near"]


def first_regions(world: build.World, count: int) -> list[str]:
    return [segment_regions(world, send_request(world, 2000))[0] for _ in range(count)]


def test_short_prompt_goes_to_the_remote_region_when_it_is_much_faster() -> None:
    """A prompt of 2,000 tokens takes 0.2 s; home is 2 s behind once ten more wait there than far away."""
    world = build.world(LENGTHS, Policy(admission=False))
    went = first_regions(world, 60)
    assert went[:10] == ["near"] * 10
    assert 22 <= went[10:].count("far") <= 28  # Then each in turn.
    world = build.world(LENGTHS, Policy(admission=False))
    world.tell(LinkReported("far", "near", 0.1, 0.0, 0.05))  # 32 s for its KV
    assert set(first_regions(world, 60)) == {"near"}
    world.tell(DEAD)
    assert set(first_regions(world, 10)) == {"near"}
    world = build.world(LENGTHS, Policy(balance="goodput", admission=False))
    assert set(first_regions(world, 60)) == {"near"}


def world_with_aggregated_replica(flows: dict[tuple[str, str, str], tuple[float, float]]) -> build.World:
    """Beside LENGTHS, a replica at home that was planned to do short requests whole."""
    plan = build.plan(
        (*TEMPLATES, MIXED),
        {("p", "near"): 1, ("p", "far"): 1, ("d", "near"): 2, ("mix", "near"): 1},
        {
            ("p", "near", "prefill"): (1.0, 0.0),
            ("p", "far", "prefill"): (0.0, 1.0),
            ("d", "near", "decode"): (1.0, 1.0),
            ("mix", "near", "closed"): (1.0, 0.0),
        },
        {("m", "far", "near"): (0.0, 1.0)} | flows,
    )
    known = build.facts(plan.templates)
    models = {name: replace(model, slo=Slo(60.0, 0.06)) for name, model in known.models.items()}
    return build.world(plan, known=replace(known, models=models))


@pytest.mark.parametrize(("answers", "first"), [(0, "near"), (40, "far")])
def test_replica_without_decode_room_is_no_local_choice_for_a_prompt(answers: int, first: str) -> None:
    """10 s of prompts wait at home; the replica that does all of it has none, but perhaps too many answers."""
    world = world_with_aggregated_replica({("m", "near", "near"): (1.0, 0.0)})
    views = {(view.role, view.member.region): view for view in world.brain.fleet.views.values()}
    world.brain.fleet.open(views["prefill", "near"], 100_000, 0)
    for _ in range(answers):
        world.brain.fleet.open(views["mixed", "near"], 0, 0)
    assert segment_regions(world, send_request(world, 1500))[0] == first


@pytest.mark.parametrize("at_home", [True, False])
def test_whole_requests_keep_their_buckets_when_other_replicas_prefill_locally(at_home: bool) -> None:
    world = world_with_aggregated_replica({("m", "near", "near"): (1.0, 0.0)} if at_home else {})
    table = world.brain.table
    whole = [table.options(table.models["m"], bucket, 600).closed.prefills for bucket in (0, 1)]
    assert [len(balancer) for balancer in whole] == [1, 0 if at_home else 1]


def test_without_threshold_adaptation_prompts_follow_the_planned_buckets() -> None:
    world = build.world(LENGTHS, Policy(adapt_threshold=False))
    for _ in range(6):
        world.tell(CONGESTED)
    assert segment_regions(world, send_request(world, 5000)) == ["far", "near"]


def test_dead_link_is_not_used() -> None:
    world = build.world(LENGTHS)
    world.tell(DEAD)
    assert {tuple(segment_regions(world, send_request(world, 50_000))) for _ in range(5)} == {
        ("near", "near")
    }
    world.tell(CLEAR)
    assert segment_regions(world, send_request(world, 150_000)) == ["far", "near"]


def test_retry_avoids_the_link_that_failed() -> None:
    world = build.world(LENGTHS)
    run = send_request(world, 50_000)
    abandoned, again = world.fail(run.request, "link", "far->near")
    assert isinstance(abandoned, Abort)
    assert set(abandoned.replicas) == {segment.replica for segment in run.route.segments}
    assert isinstance(again, Run)
    assert segment_regions(world, again) == ["near", "near"]


def test_cached_tokens_do_not_count_towards_the_length_threshold() -> None:
    world = build.world(LENGTHS)
    blocks = tuple(range(1, 3000 // 16))
    assert segment_regions(world, send_request(world, 3000, blocks)) == ["far", "near"]
    world.tell(CacheReported("p@near#2/0", 1, blocks))
    world.tell(CacheReported("p@near#1/0", 1, blocks))  # one of the two is there, whatever its number
    assert segment_regions(world, send_request(world, 3000, blocks)) == ["near", "near"]


def test_remote_prefix_is_fetched_with_abundant_bandwidth() -> None:
    world = build.world(LENGTHS)
    far = next(name for name, member in world.members.items() if member.region == "far")
    near = next(name for name, m in world.members.items() if m.region == "near" and m.template == "p")
    blocks = tuple(range(1, 1 + 2880 // 16))
    world.tell(CacheReported(far, 1, blocks))
    assert segment_regions(world, send_request(world, 3000, blocks)) == [
        "far",
        "near",
    ]  # scarce: far has it, and it is long
    world.tell(CLEAR)
    run = send_request(world, 3000, blocks)
    assert [(s.replica, s.start, s.stop) for s in run.route.segments[:2]] == [
        (far, 0, 2880),
        (near, 2880, 3000),
    ]
    assert len(run.route.segments) == 3
    world.finish(run.request)
    for name in list(world.jobs):
        world.finish(name)
    build.assert_idle(world.brain)


MIXED = build.template("mix", closed=(2.0, 2.0))
AGGREGATED = build.plan((MIXED,), {("mix", "near"): 4}, {("mix", "near", "closed"): (4.0, 4.0)})


def test_requests_follow_their_cached_prefix_until_waiting_costs_more() -> None:
    world = build.world(AGGREGATED)
    blocks = tuple(range(1, 1 + 1600 // 16))
    warm = "mix@near#2/0"
    world.tell(CacheReported(warm, 1, blocks))
    # Each saves 0.16 s of prefill there and adds 0.01 s for the next; beyond its batch of 8 they would wait longer.
    assert {send_request(world, 1700, blocks).route.decoder for _ in range(8)} == {warm}
    world.tell(CacheReported(warm, 2, (), blocks))
    assert (
        send_request(world, 1700, tuple(-b for b in blocks)).route.decoder != warm
    )  # nothing of it is cached there
    cold = build.world(AGGREGATED, Policy(affinity=0.0))
    cold.tell(CacheReported(warm, 1, blocks))
    assert len({send_request(cold, 1700, blocks).route.decoder for _ in range(4)}) == 4


def test_hot_prefix_requests_spread_over_replicas() -> None:
    world = build.world(AGGREGATED)
    blocks = tuple(range(1, 1 + 1600 // 16))
    world.tell(CacheReported("mix@near#2/0", 1, blocks))
    counts = Counter(send_request(world, 1700, blocks).route.decoder for _ in range(40))
    assert len(counts) == 4
    assert max(counts.values()) <= 16


def test_request_without_blocks_does_not_use_the_prefix_index() -> None:
    world = build.world(AGGREGATED)
    world.tell(CacheReported("mix@near#2/0", 1, tuple(range(100))))
    assert len({send_request(world, 1700).route.decoder for _ in range(4)}) == 4


def test_flipped_replica_gets_its_share_in_the_new_role() -> None:
    plan = build.plan(
        TEMPLATES,
        {("p", "near"): 3, ("d", "near"): 1},
        {("p", "near", "prefill"): (2.0, 2.0), ("d", "near", "decode"): (2.0, 2.0)},
        {("m", "near", "near"): (2.0, 2.0)},
    )
    world = build.world(plan)
    flipped = next(name for name, member in world.members.items() if member.template == "p")
    world.brain._carry_out(0.0, [FlipReplica(flipped, "decode")])
    runs = [send_request(world, 500) for _ in range(40)]
    assert flipped not in {run.route.segments[0].replica for run in runs}
    # As fast by the facts as the other decode replica, so it gets half.
    assert Counter(run.route.decoder for run in runs)[flipped] == 20


def test_incremental_routing_table_equals_one_built_anew() -> None:
    """Incremental updates and a table compiled from scratch weigh every target alike."""
    world = build.world(LENGTHS, ready=False)
    sent_before = world.arrive(build.request("early", 500))
    assert sent_before == []
    for name in list(world.members)[:3]:
        world.make_ready(name)
    world.all_ready()
    world.lose(next(iter(world.members)))
    old = world.brain.table
    fresh = RoutingTable(build.facts(TEMPLATES), Policy(), balance_rule("learned"), world.brain.fleet)
    fresh.adopt(LENGTHS)
    for view in world.brain.fleet.views.values():
        fresh.update(view.member.unit, view)
    for (bucket, _), ways in old.models["m"].options.items():
        again = fresh.options(fresh.models["m"], bucket, 600)
        for mine, theirs in zip([ways.closed, *ways.flows], [again.closed, *again.flows], strict=True):
            entries = ways.turns._entries.get(mine), again.turns._entries.get(theirs)
            own, anew = [entry.weight if entry is not None else 0.0 for entry in entries]
            assert own == anew
            assert mine.prefills.total == theirs.prefills.total
    assert isinstance(world.brain.fleet, FleetState)


def world_with_two_flows() -> build.World:
    """Twice as much is deployed as planned, half of it near and half of it prefilling far away."""
    plan = build.plan(
        TEMPLATES,
        {("p", "near"): 2, ("p", "far"): 2, ("d", "near"): 4},
        {
            ("p", "near", "prefill"): (2.0, 0.0),
            ("p", "far", "prefill"): (2.0, 0.0),
            ("d", "near", "decode"): (4.0, 0.0),
        },
        {("m", "near", "near"): (2.0, 0.0), ("m", "far", "near"): (2.0, 0.0)},
    )
    return build.world(plan, Policy(balance="goodput", adapt_threshold=False))


def far_share(world: build.World, count: int = 120) -> float:
    return sum(segment_regions(world, send_request(world, 500))[0] == "far" for _ in range(count)) / count


def test_remote_flow_gets_its_planned_share_and_the_local_flow_the_rest() -> None:
    # At home up to 4 a second (two replicas of 2), over the link the 2 that were planned.
    assert far_share(world_with_two_flows()) == pytest.approx(2 / 6, abs=0.02)


def test_flow_weight_follows_the_ready_share_of_its_smaller_side() -> None:
    world = world_with_two_flows()
    for name in [name for name, m in world.members.items() if m.template == "p" and m.region == "near"][:1]:
        world.lose(name)
    assert far_share(world) == pytest.approx(2 / 4, abs=0.02)
    for name in [name for name, m in world.members.items() if m.template == "p" and m.region == "far"]:
        world.lose(name)
    assert far_share(world) == 0


def test_decode_replica_prefills_whole_requests_only_without_a_prefill_replica() -> None:
    shares = {("p", "far", "prefill"): (1.0, 1.0), ("d", "near", "decode"): (1.0, 1.0)}
    flows = {("m", "far", "near"): (1.0, 1.0)}
    plan = build.plan(TEMPLATES, {("p", "far"): 1, ("d", "near"): 1}, shares, flows)
    world = build.world(plan, ready=False)
    for name, member in world.members.items():
        world.make_ready(name, max_running=1 if member.template == "p" else 0)
    world.tell(DEAD)
    assert {tuple(segment_regions(world, send_request(world, 500))) for _ in range(4)} == {("near",)}
    world.lose(next(name for name, member in world.members.items() if member.template == "d"))
    assert segment_regions(world, send_request(world, 500)) == ["far"]


@pytest.mark.parametrize(("home_pace", "rises"), [(1.0, True), (20.0, False)])
def test_threshold_rises_with_remote_queueing_unless_local_prefill_is_slower(
    home_pace: float, rises: bool
) -> None:
    world = build.world(LENGTHS)
    views = {(view.role, view.member.region): view for view in world.brain.fleet.views.values()}
    for _ in range(4):
        world.brain.fleet.open(views["prefill", "far"], 7000, 0)
    views["prefill", "near"].pace = home_pace
    world.tell(CLEAR)
    assert (world.brain.router.thresholds.links["m"]["far->near"].tokens > 2000.0) is rises


def test_threshold_changes_are_noted_with_their_reason() -> None:
    world = build.world(LENGTHS)
    assert not [item for item in world.tell(Tick()) if isinstance(item, OperatorNote)], (
        "the plan's own is no news"
    )
    text = []
    for report in (*[CONGESTED] * 4, *[CLEAR] * 40):
        world.tell(report)
        text += [item for item in world.tell(Tick()) if isinstance(item, OperatorNote)]
    assert [item.what for item in text[:2]] == [
        "only prompts of m beyond 2420 tokens go over far->near now",
        "only prompts of m beyond 2928 tokens go over far->near now",
    ]
    assert "too much to do" in text[0].why
    assert "clear again" in text[-1].why
    assert len(text) < 6, "steps that are small are not spoken of"


def test_prefill_load_counts_until_its_kv_transfer_ends_without_changing_pace() -> None:
    """Else a full link would let ever more of it pile up where it is computed."""
    world = build.world(LENGTHS)
    run = send_request(world, 4000)
    far = world.brain.fleet.views[run.route.segments[0].replica]
    planned_s = far.facts.prefill_fixed_s + 4000 * far.facts.prefill_s_per_token  # type: ignore[union-attr]
    assert far.open_prefill_tokens == 4000
    world.now_s += planned_s
    assert world.tell(SegmentComputed(run.request, run.attempt, 0)) == []
    assert (far.open_prefill_tokens, far.open_requests) == (4000, 1), "its KV is still there"
    world.now_s += 100 * planned_s
    world.tell(SegmentDone(run.request, run.attempt, 0))
    assert (far.open_prefill_tokens, far.open_requests) == (0, 0)
    assert far.pace == pytest.approx(1.0), "what the link took says nothing of the replica"
