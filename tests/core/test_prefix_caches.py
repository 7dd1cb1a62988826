"""Prefix caches of a region as one pool: prefix sources, dead links, thresholds per link."""

from __future__ import annotations

from dataclasses import replace

import brain_builders as build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.routing.prefix_affinity import best_holder
from potluck.core.routing.prefix_index import PrefixIndex
from potluck.core.routing.template_weights import LengthThreshold
from potluck.core.state.actions import ResyncCache, Run
from potluck.core.state.events import CacheReported, LinkReported, ReplicaReported, ReplicaStatus
from potluck.core.state.facts import FleetFacts
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan

P = build.template("p", ("prefill",), prefill=(2.0, 2.0))
D = build.template("d", ("decode",), decode=(2.0, 2.0))
M = build.template("mix", closed=(2.0, 2.0))
HOME = build.plan(
    (P, D),
    {("p", "near"): 1, ("d", "near"): 2},
    {("p", "near", "prefill"): (1.0, 1.0), ("d", "near", "decode"): (1.0, 1.0)},
    {("m", "near", "near"): (1.0, 1.0)},
)
ALONE = build.plan((M,), {("mix", "near"): 2}, {("mix", "near", "closed"): (4.0, 4.0)})
AWAY = build.plan(
    (M, P, D),
    {("mix", "near"): 1, ("p", "far"): 1, ("d", "near"): 1},
    {
        ("mix", "near", "closed"): (1.0, 0.0),
        ("p", "far", "prefill"): (0.0, 1.0),
        ("d", "near", "decode"): (0.0, 1.0),
    },
    {("m", "far", "near"): (0.0, 1.0)},
)
"""Short prompts on a replica that does all, long ones prefilled far away."""
CLEAR = LinkReported("far", "near", 0.1, 0.0, 10.0)
BLOCKS = tuple(range(1, 1 + 2880 // 16))


def facts_with_fast_cards(plan: Plan) -> FleetFacts:
    """Cards of 100 Gbit/s."""
    facts = build.facts(plan.templates)
    return replace(facts, replicas={k: replace(v, card_gbps=100.0) for k, v in facts.replicas.items()})


def send_request(world: build.World, prompt: int = 3000, blocks: tuple[int, ...] = BLOCKS) -> Run:
    (run,) = world.arrive(build.request(f"r{len(world.requests)}", prompt, blocks=blocks))
    assert isinstance(run, Run)
    return run


def segment_places(run: Run) -> list[tuple[str, int, int | None]]:
    return [(segment.replica, segment.start, segment.stop) for segment in run.route.segments]


def assert_world_idle(world: build.World) -> None:
    for name in list(world.jobs):
        world.finish(name)
    build.assert_idle(world.brain)


def replica_names(world: build.World, template: str, region: str = "near") -> list[str]:
    return sorted(n for n, m in world.members.items() if m.template == template and m.region == region)


def test_prompt_cached_on_a_decode_replica_starts_there_and_prefills_only_the_rest() -> None:
    for holder in (0, 1):
        world = build.world(HOME)
        world.tell(CacheReported(replica_names(world, "d")[holder], 1, BLOCKS))
        run = send_request(world)
        first = run.route.segments[0]
        # The decoder does all where it was to decode anyway; else it lends, and the rest is computed elsewhere.
        assert first.replica == replica_names(world, "d")[holder]
        assert first.stop in (None, 2880)
        assert sum(view.open_prefill_tokens for view in world.brain.fleet.views.values()) <= 120
        assert_world_idle(world)


def test_busy_prefix_holder_sends_its_prefix_to_a_less_loaded_replica() -> None:
    world = build.world(ALONE, known=facts_with_fast_cards(ALONE))
    one, two = replica_names(world, "mix")
    world.tell(CacheReported(one, 1, BLOCKS))
    result = [segment_places(send_request(world)) for _ in range(12)]
    assert [(one, 0, 2880), (two, 2880, None)] in result
    assert_world_idle(world)


@pytest.mark.parametrize(
    ("status", "lends"),
    [
        (ReplicaStatus(0, 4, 0, 0, 180, 20_000, 0.02), True),
        (ReplicaStatus(1, 4, 0, 0, 180, 20_000, 0.02), False),
        (ReplicaStatus(0, 4, 0, 0, 179, 20_000, 0.02), False),
    ],
    ids=["has room", "others wait", "no blocks"],
)
def test_replica_without_free_blocks_sends_no_prefix(status: ReplicaStatus, lends: bool) -> None:
    world = build.world(HOME)
    one = replica_names(world, "d")[0]
    world.tell(CacheReported(one, 1, BLOCKS))
    world.tell(ReplicaReported(one, status))
    result = [segment_places(send_request(world)) for _ in range(6)]
    assert any(len(item) == 3 for item in result) == lends


@pytest.mark.parametrize(
    "policy", [Policy(pool_caches=False), Policy(affinity=0.0)], ids=["not pooled", "no affinity"]
)
def test_policy_disables_the_regional_prefix_pool(policy: Policy) -> None:
    world = build.world(HOME, policy)
    for name in replica_names(world, "d"):
        world.tell(CacheReported(name, 1, BLOCKS))
    assert segment_places(send_request(world))[0] == (replica_names(world, "p")[0], 0, 3000)


def test_prefix_is_recomputed_where_that_is_faster_than_fetching_it() -> None:
    facts = build.facts((P, D))
    heavy = replace(facts, models={"m": replace(facts.models["m"], kv_bytes_per_token=1e7)})
    world = build.world(HOME, known=heavy)
    world.tell(CacheReported(replica_names(world, "d")[0], 1, BLOCKS))
    assert {segment_places(send_request(world))[0][0] for _ in range(4)} <= {
        replica_names(world, "p")[0],
        replica_names(world, "d")[0],
    }
    assert all(len(job.run.route.segments) < 3 for job in world.jobs.values())


def test_replica_that_failed_a_request_is_no_prefix_source_for_it() -> None:
    world = build.world(ALONE, known=facts_with_fast_cards(ALONE))
    one, _ = replica_names(world, "mix")
    world.tell(CacheReported(one, 1, BLOCKS))
    runs = [send_request(world) for _ in range(12)]
    lent = next(run for run in runs if len(run.route.segments) == 2)
    again = [item for item in world.fail(lent.request, "replica", one) if isinstance(item, Run)]
    assert all(one not in {segment.replica for segment in run.route.segments} for run in again)


def test_remote_prefix_is_fetched_unless_the_link_is_down() -> None:
    world = build.world(AWAY)
    far, mix = replica_names(world, "p", "far")[0], replica_names(world, "mix")[0]
    world.tell(CacheReported(far, 1, BLOCKS))
    world.tell(CLEAR)
    assert segment_places(send_request(world)) == [(far, 0, 2880), (mix, 2880, None)]
    world.tell(CLEAR._replace(gbps=0.0))
    for _ in range(6):
        assert far not in {replica for replica, _, _ in segment_places(send_request(world))}
    assert_world_idle(world)


def test_full_local_replicas_do_not_send_requests_over_a_dead_link() -> None:
    world = build.world(AWAY)
    far = replica_names(world, "p", "far")[0]
    world.tell(CLEAR._replace(gbps=0.0))
    for _ in range(40):
        assert far not in {replica for replica, _, _ in segment_places(send_request(world, 50_000, ()))}


CLUSTERS = build.plan(
    (P, D),
    {("p", "near"): 1, ("p", "far"): 1, ("p", "off"): 1, ("d", "near"): 2},
    {
        ("p", "near", "prefill"): (1.0, 0.0),
        ("p", "far", "prefill"): (0.0, 1.0),
        ("p", "off", "prefill"): (0.0, 1.0),
        ("d", "near", "decode"): (1.0, 2.0),
    },
    {("m", "near", "near"): (1.0, 0.0), ("m", "far", "near"): (0.0, 1.0), ("m", "off", "near"): (0.0, 1.0)},
)


def test_every_link_has_its_own_length_threshold() -> None:
    facts = build.facts((P, D))
    links = {**facts.links_gbps, ("off", "near"): 10.0}
    world = build.world(CLUSTERS, Policy(balance="goodput"), known=replace(facts, links_gbps=links))

    def regions(prompt: int) -> set[str]:
        return {
            world.members[send_request(world, prompt, ()).route.segments[0].replica].region for _ in range(8)
        }

    assert regions(5000) == {"far", "off"}
    for _ in range(12):
        world.tell(LinkReported("far", "near", 1.0, 1e10, 10.0))
    assert regions(4000) == {"off"}
    assert regions(90_000) == {"far", "off"}
    thresholds = world.brain.router.thresholds.links["m"]
    assert thresholds["far->near"].tokens > thresholds["off->near"].tokens == 2000.0


def test_queued_prefill_in_the_remote_cluster_raises_the_threshold() -> None:
    world = build.world(AWAY, Policy(balance="goodput"))
    world.tell(CLEAR)
    before = world.brain.router.thresholds.links["m"]["far->near"].tokens
    for _ in range(3):
        send_request(world, 60_000, ())
    world.tell(CLEAR)
    assert world.brain.router.thresholds.links["m"]["far->near"].tokens > before


ACROSS = build.plan(
    (P, D),
    {("p", "near"): 1, ("p", "far"): 1, ("d", "near"): 1},
    {
        ("p", "far", "prefill"): (1.0, 1.0),
        ("p", "near", "prefill"): (1.0, 1.0),
        ("d", "near", "decode"): (2.0, 2.0),
    },
    {("m", "far", "near"): (1.0, 1.0)},
)
"""All prompts cross, so the plan has no threshold."""


def test_threshold_can_be_set_where_the_plan_has_none() -> None:
    world = build.world(ACROSS, Policy(balance="goodput"))

    def region(prompt: int) -> str:
        return world.members[send_request(world, prompt, ()).route.segments[0].replica].region

    assert region(500) == region(9000) == "far"
    world.brain.router.thresholds.rebase("m", 4000)
    assert region(500) == "near"
    assert region(9000) == "far"
    assert world.brain.router.thresholds.links["m"] == {"far->near": LengthThreshold(4000, 4000)}
    assert_world_idle(world)


def test_threshold_is_not_set_without_remote_flows_or_adaptation() -> None:
    for plan, policy in ((HOME, Policy()), (ACROSS, Policy(adapt_threshold=False))):
        world = build.world(plan, policy)
        world.brain.router.thresholds.rebase("m", 4000)
        assert world.brain.router.thresholds.links == {}


@pytest.mark.parametrize("checkpoint", [180, 100])
def test_prefix_fetched_for_a_hybrid_model_ends_one_token_after_a_checkpoint(checkpoint: int) -> None:
    facts = facts_with_fast_cards(HOME)
    hybrid = replace(facts.models["m"], exact_prefix=True, state_bytes=1e6)
    world = build.world(HOME, known=replace(facts, models={"m": hybrid}))
    one = replica_names(world, "d")[0]
    world.tell(CacheReported(one, 1, BLOCKS, (), (BLOCKS[checkpoint - 1],)))
    stops = {segment_places(send_request(world))[0][2] for _ in range(4)}
    assert 16 * checkpoint + 1 in stops
    assert_world_idle(world)


# Who can resume how much of a prompt, as routing asks it; and the score.

CHAINS = [tuple(100 * chain + place if place > 1 else place for place in range(8)) for chain in range(1, 4)]
"""Three prompts of eight blocks that share their first two."""

chain_steps = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 8), st.integers(0, 8)), max_size=25
)


@given(chain_steps, st.integers(0, 2), st.sets(st.sampled_from("abc")), st.booleans())
def test_prefix_index_returns_the_deepest_prefix_of_the_wanted_replicas(
    steps: list[tuple[str, int, int, int]], asked: int, wanted: set[str], exact: bool
) -> None:
    """Caches hold prefixes (a block never goes before those that build on it), so bisection finds the longest."""
    index = PrefixIndex()
    held: dict[str, set[int]] = {name: set() for name in "abc"}
    marks: dict[str, set[int]] = {name: set() for name in "abc"}
    for number, (replica, chain, longest, kept) in enumerate(steps):
        blocks = CHAINS[chain]
        added = [block for block in blocks[:longest] if block not in held[replica]]
        held[replica] |= set(added)
        ends = (blocks[longest - 1],) if longest else ()
        marks[replica] |= set(ends)
        # Only what nothing else builds on may go.
        others = {block for other in CHAINS if other != blocks for block in other}
        gone = [block for block in blocks[kept:] if block in held[replica] and block not in others]
        before = sum(step[0] == replica for step in steps[:number])
        index.apply(CacheReported(replica, 2 * before + 1, tuple(added), marked=ends), "here")
        index.apply(CacheReported(replica, 2 * before + 2, (), tuple(gone)), "here")
        held[replica] -= set(gone)
        marks[replica] -= set(gone)
    blocks = CHAINS[asked]

    def depth(replica: str) -> int:
        depth = next((n for n, block in enumerate(blocks) if block not in held[replica]), len(blocks))
        while exact and depth and blocks[depth - 1] not in marks[replica]:
            depth -= 1
        return depth

    deepest, holders = index.deepest(blocks, wanted.__contains__, exact=exact)
    assert deepest == max((depth(name) for name in wanted), default=0)
    if not exact:
        assert sorted(holders) == sorted(name for name in wanted if deepest and depth(name) == deepest)
    for name in "abc":
        assert index.held_by(name, blocks, exact=exact) == depth(name)
    assert all(depth(name) >= deepest for name in holders)


def test_best_holder_weighs_saved_prefill_against_waiting_time() -> None:
    saved = {"here": 0.0, "warm": 2.0}
    assert best_holder(saved, {"here": 0.0, "warm": 1.9}, "here", 1.0) == "warm"
    assert best_holder(saved, {"here": 0.0, "warm": 2.1}, "here", 1.0) == "here"
    assert best_holder(saved, {"here": 0.0, "warm": 2.1}, "here", 2.0) == "warm"
    assert best_holder(saved, {"here": 0.0, "warm": 0.1}, "here", 0.0) == "here"
    assert best_holder(saved, {"here": 1.0, "warm": 0.5}, "here", 0.0) == "warm"


# After a lost report the Brain asks for the whole cache.

MIXED = build.template("mix", closed=(2.0, 2.0))
PLAN = build.plan((MIXED,), {("mix", "near"): 3}, {("mix", "near", "closed"): (3.0, 3.0)})
WARM = "mix@near#0/0"
BLOCKS_CACHES = tuple(range(1, 1 + 1600 // 16))


def test_replica_with_a_lost_cache_report_is_ignored_until_resynced() -> None:
    world = build.world(PLAN)
    assert world.tell(CacheReported(WARM, 1, BLOCKS_CACHES)) == []
    assert world.brain.caches.index.held_by(WARM, BLOCKS_CACHES) == 100
    assert world.tell(CacheReported(WARM, 3, (999,))) == [ResyncCache(WARM)]
    assert world.brain.caches.index.held_by(WARM, BLOCKS_CACHES) == 0
    assert world.tell(CacheReported(WARM, 4, (998,))) == []  # it was asked a moment ago
    world.now_s = 6.0
    assert world.tell(CacheReported(WARM, 5, (997,))) == [ResyncCache(WARM)]  # the answer was lost, too
    assert world.tell(CacheReported(WARM, 5, BLOCKS_CACHES, whole=True)) == []
    assert world.brain.caches.index.held_by(WARM, BLOCKS_CACHES) == 100
    assert world.tell(CacheReported(WARM, 7, ())) == [ResyncCache(WARM)]
