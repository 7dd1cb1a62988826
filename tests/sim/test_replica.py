"""The simulated replica: the same life stepped through and jumped through, and what each part of it must be."""

from __future__ import annotations

from functools import cache
from math import inf
from random import Random

import numpy as np
import pytest
from replica_scenarios import live, touches

from potluck.catalog import models, nodes
from potluck.core.errors import InputError
from potluck.core.replica.sequences import FINISHED, FIRST, PREEMPTED, BatchLimits
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import Confidence
from potluck.perf.serving.phases import decode_step_s, prefill_s
from potluck.perf.step_timer import Floats, StepBatch
from potluck.perf.timers.pipeline_timer import pipeline
from potluck.perf.timers.roofline import roofline
from potluck.sim.replicas.gaps import EDGES_S
from potluck.sim.replicas.round_table import StepTimes, step_table
from potluck.sim.replicas.sim_engine import SimEngine, replica_limits

SCENARIOS = 1000


class Plain:
    """A step takes what its parts take, with a bend where the context is long."""

    confidence: Confidence = "assumed"

    def step_s(self, batch: StepBatch) -> Floats:
        pairs = (batch.chunk_new * (batch.chunk_cached + batch.chunk_new / 2)).sum(axis=1)
        reads = batch.decode_context + np.maximum(batch.decode_context - 3000.0, 0.0)
        return 0.004 + 2e-5 * batch.tokens + 1e-9 * pairs + 1e-6 * reads


@cache
def tables() -> dict[str, StepTimes]:
    small, names = models.model("Llama-3.1-8B"), ("1xH100-SXM", "1xL4")
    two = Layout(tuple(Stage(16, (StageNode(name, 1),)) for name in names))
    known = {name: nodes.node_type(name) for name in names}
    return {
        "plain": step_table(Plain()),
        "roofline": step_table(roofline(small, known["1xH100-SXM"], 1)),
        "pipeline": step_table(pipeline(small, two, known)),
    }


def bounds(rng: Random) -> BatchLimits:
    """From ample to so tight that preemption is the rule."""
    running = rng.choice([1, 2, 8, 64])
    return BatchLimits(
        total_blocks=rng.choice([20, 40, 100, 1000]),
        token_budget=running + rng.choice([8, 64, 512, 512]),
        max_running=running,
        chunk_tokens=rng.choice([None, None, 64]),
        spare_blocks=rng.choice([-1, 0, 3]),
    )


@pytest.mark.parametrize("name", ["plain", "roofline", "pipeline"])
def test_jumping_and_stepping_give_the_same_life(name: str) -> None:
    table, preempted, jumped, stepped = tables()[name], 0, 0, 0
    step_s = table.step_s((), 4, 400)
    share = {"plain": 8, "roofline": 1, "pipeline": 1}[name]
    for seed in range(SCENARIOS * share // 10):
        limits = bounds(Random(seed))
        plan = touches(seed, 12, limits, step_s)
        single = seed % 2 == 0  # else requests of three tenants
        (fast, ours), (slow, theirs) = (
            live(table, limits, plan, fast_forward=on, single=single) for on in (True, False)
        )
        assert ours.happenings.keys() == theirs.happenings.keys()
        for key, happened in ours.happenings.items():
            expected = theirs.happenings[key]
            assert [kind for kind, _ in happened] == [kind for kind, _ in expected]
            assert [at_s for _, at_s in happened] == pytest.approx([at_s for _, at_s in expected], rel=1e-9)
        assert ours.times == sorted(ours.times)
        assert [status[:-1] for status in ours.statuses] == [status[:-1] for status in theirs.statuses]
        assert [s.step_s for s in ours.statuses] == pytest.approx([s.step_s for s in theirs.statuses])
        assert (ours.streamed, ours.reserved) == (theirs.streamed, theirs.reserved)
        assert (fast.computed_tokens, fast.decoded_tokens) == (slow.computed_tokens, slow.decoded_tokens)
        assert sum(fast.gaps.counts) == sum(slow.gaps.counts)
        assert fast.busy_s(0.0) == pytest.approx(slow.busy_s(0.0), rel=1e-9)
        assert fast.used_blocks == slow.used_blocks == 0
        preempted += sum(kind == PREEMPTED for seen in ours.happenings.values() for kind, _ in seen)
        jumped, stepped = jumped + ours.looks, stepped + theirs.looks
    assert preempted > 10
    assert jumped < stepped / 3


def test_a_lone_request_takes_its_prefill_and_its_decode_steps() -> None:
    timer = roofline(models.model("Llama-3.1-8B"), nodes.node_type("1xH100-SXM"), 1)
    replica = SimEngine(step_table(timer), BatchLimits(10_000))
    replica.add(1.0, 0, 1155, 0, 211)
    found = {kind: at_s for at_s, kind, _ in replica.advance(100.0)}
    first_s = float(prefill_s(timer, 1155)[0])
    assert found[FIRST] == pytest.approx(1.0 + first_s, rel=1e-9)
    contexts = np.arange(1155, 1155 + 210)
    decode_s = float(decode_step_s(timer, np.ones(210), contexts).sum())
    assert found[FINISHED] == pytest.approx(1.0 + first_s + decode_s, rel=2e-3)
    assert replica.next_s() == inf
    assert (replica.computed_tokens, replica.decoded_tokens, replica.used_blocks) == (1155, 210, 0)


def test_an_arrival_waits_for_the_step_under_way() -> None:
    replica = SimEngine(step_table(Plain()), BatchLimits(1000))
    replica.add(0.0, 0, 100, 0, 50)
    [(first_s, kind, _)] = replica.advance(replica.next_s())
    assert kind == FIRST
    step_s = replica.table.row(1).step_s(100)
    replica.add(first_s + 0.3 * step_s, 1, 10, 0, 1)
    assert replica.advance(first_s + step_s) == []
    beside_s = replica.table.step_s([(1, 10, 0)], 1, 101)
    found = replica.advance(replica.next_s())
    assert [(kind, key) for _, kind, key in found] == [(FIRST, 1), (FINISHED, 1)]
    assert found[0][0] == pytest.approx(first_s + step_s + beside_s)


def test_a_question_changes_nothing() -> None:
    asked, left_alone = (SimEngine(step_table(Plain()), BatchLimits(1000)) for _ in range(2))
    for replica in (asked, left_alone):
        replica.add(0.0, 0, 100, 0, 200)
    while asked.next_s() < inf:
        now_s = asked.next_s()
        for share in (0.2, 0.5, 0.9):
            asked.status(asked._start_s + share * (now_s - asked._start_s))
        found = asked.advance(now_s)
    assert found[-1][0] == pytest.approx(left_alone.advance(1e9)[-1][0], rel=1e-12)


def test_a_slow_replica_is_slow_from_the_next_step_on() -> None:
    replica = SimEngine(step_table(Plain()), BatchLimits(1000))
    replica.add(0.0, 0, 100, 0, 11)
    first_s = replica.advance(replica.next_s())[0][0]
    row, context = replica.table.row(1), 100
    replica.set_speed(first_s + 0.5 * row.step_s(context), 3.0)
    last_s = replica.advance(100.0)[-1][0]
    assert last_s == pytest.approx(first_s + row.step_s(context) + 3 * row.run_s(context + 1, 9))
    with pytest.raises(InputError, match="positive"):
        replica.set_speed(last_s, 0.0)


def test_gaps_count_every_token_but_the_first() -> None:
    replica = SimEngine(step_table(Plain()), replica_limits(step_table(Plain()), 1000))
    for key in range(5):
        replica.add(0.01 * key, key, 50, 0, 20)
    assert replica.reserve(0.06, 5, 64)
    replica.add(0.07, 5, 0, 64, 20)
    last_s = replica.advance(100.0)[-1][0]
    counts = np.array(replica.gaps.counts)
    assert counts.sum() == 6 * 19
    mean_s = (counts * np.sqrt(EDGES_S[1:] * EDGES_S[:-1])).sum() / counts.sum()
    assert 0.004 < mean_s < last_s / 10


def test_a_preempted_request_has_one_long_gap() -> None:
    limits = BatchLimits(20, token_budget=512, max_running=8, spare_blocks=0)
    replica = SimEngine(step_table(Plain()), limits)
    for key in range(2):
        replica.add(0.0, key, 100, 0, 100)
    found = replica.advance(100.0)
    assert [kind for _, kind, key in found if key == 1] == [FIRST, PREEMPTED, FINISHED]
    counts = np.array(replica.gaps.counts)
    assert counts.sum() == 2 * 99
    waited_s = found[-1][0] - next(at_s for at_s, kind, _ in found if kind == PREEMPTED)
    longest_s = EDGES_S[np.flatnonzero(counts)[-1]]
    assert 0.05 < longest_s < waited_s
