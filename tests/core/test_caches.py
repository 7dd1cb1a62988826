"""Lost reports are made good, and prefixes that many ask for spread to those with less to do."""

from __future__ import annotations

import brain_builders as build
import pytest

from potluck.core.state.actions import Action, CopyPrefix, ResyncCache, Run
from potluck.core.state.events import CacheReported, ReplicaReported, ReplicaStatus, Tick
from potluck.core.state.policy import Policy

MIXED = build.template("mix", closed=(2.0, 2.0))
PLAN = build.plan((MIXED,), {("mix", "near"): 3}, {("mix", "near", "closed"): (3.0, 3.0)})
WARM = "mix@near#0/0"
BLOCKS = tuple(range(1, 1 + 1600 // 16))


def ask(world: build.World, count: int) -> list[str]:
    """Requests for the prefix; where they go."""
    where = []
    for _ in range(count):
        (run,) = world.arrive(build.request(f"r{len(world.requests)}", 1700, blocks=BLOCKS))
        assert isinstance(run, Run)
        where.append(run.route.decoder)
    return where


def tick(world: build.World, at_s: float) -> list[Action]:
    world.now_s = at_s
    return world.tell(Tick())


def reported(world: build.World, free_blocks: int) -> None:
    for name in world.members:
        world.tell(ReplicaReported(name, ReplicaStatus(0, 0, 0, 0, free_blocks, 1000, 0.01)))


def test_a_lost_report_leaves_a_replica_out_until_it_was_counted_anew() -> None:
    world = build.world(PLAN)
    assert world.tell(CacheReported(WARM, 1, BLOCKS)) == []
    assert world.brain.caches.index.held_by(WARM, BLOCKS) == 100
    assert world.tell(CacheReported(WARM, 3, (999,))) == [ResyncCache(WARM)]
    assert world.brain.caches.index.held_by(WARM, BLOCKS) == 0
    assert world.tell(CacheReported(WARM, 4, (998,))) == []  # it was asked a moment ago
    world.now_s = 6.0
    assert world.tell(CacheReported(WARM, 5, (997,))) == [ResyncCache(WARM)]  # the answer was lost, too
    assert world.tell(CacheReported(WARM, 5, BLOCKS, whole=True)) == []
    assert world.brain.caches.index.held_by(WARM, BLOCKS) == 100
    assert world.tell(CacheReported(WARM, 7, ())) == [ResyncCache(WARM)]


@pytest.mark.parametrize("on", [True, False])
def test_a_hot_prefix_is_copied_from_a_busy_replica_to_an_idle_one(on: bool) -> None:
    world = build.world(PLAN, Policy(rebalance=on))
    world.tell(CacheReported(WARM, 1, BLOCKS))
    reported(world, 500)
    assert set(ask(world, 8)) == {WARM}
    found = tick(world, 1.0)
    if not on:
        assert found == []
        return
    (move,) = found
    assert isinstance(move, CopyPrefix)
    assert (move.blocks, move.source) == (BLOCKS, WARM)
    assert move.target != WARM
    assert tick(world, 2.0) == []  # it may still be on its way
    world.tell(CacheReported(move.target, 1, BLOCKS))
    again = tick(world, 40.0)
    assert all(isinstance(each, CopyPrefix) and each.target not in (WARM, move.target) for each in again)


def test_nothing_is_copied_to_where_there_is_no_room_or_without_need() -> None:
    full = build.world(PLAN, Policy(rebalance=True))
    full.tell(CacheReported(WARM, 1, BLOCKS))
    reported(full, 50)
    ask(full, 8)
    assert tick(full, 1.0) == []
    idle = build.world(PLAN, Policy(rebalance=True))
    idle.tell(CacheReported(WARM, 1, BLOCKS))
    reported(idle, 500)
    for name in ask(idle, 1):
        assert name == WARM
    for job in list(idle.jobs):
        idle.finish(job)
    assert tick(idle, 1.0) == []
