"""The simulated replica: fast-forward equals stepping, and queueing theory holds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from heapq import heapreplace
from math import factorial, inf
from random import Random

import numpy as np
import pytest
from replica_scenarios import run_scenario, scenario_events
from sim_fleets import LONGEST, MODEL, closed_plan, decode_only, mixed, prefill_only, problem, workload

from potluck.catalog import models, nodes
from potluck.core.replica.batch import FINISHED, FIRST, PREEMPTED, BatchLimits
from potluck.core.state.policy import Policy
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import (
    BucketCapacity,
    Confidence,
    Deployment,
    LengthBucket,
    Plan,
    PlannedFlow,
    PlannedShare,
)
from potluck.perf.phases import decode_step_s, prefill_s
from potluck.perf.step_timer import Floats, StepBatch
from potluck.perf.timers.pipeline_timer import pipeline
from potluck.perf.timers.roofline import roofline
from potluck.plan.assemble.columns import thresholds_of
from potluck.sim.run import simulate
from potluck.sim.sim_engine import EDGES_S, SimEngine, replica_limits
from potluck.sim.step_table import StepTimes, step_table

SCENARIOS = 1000


class BentTimer:
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
        "plain": step_table(BentTimer()),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "roofline", "pipeline"])
def test_fast_forwarded_replica_equals_one_stepped_singly(name: str) -> None:
    table, preempted, jumped, stepped = tables()[name], 0, 0, 0
    step_s = table.step_s((), 4, 400)
    for seed in range(SCENARIOS * {"plain": 8, "roofline": 1, "pipeline": 1}[name] // 10):
        limits = bounds(Random(seed))
        plan = scenario_events(seed, 12, limits, step_s)
        single = seed % 2 == 0  # else requests of three tenants
        (fast, ours), (slow, theirs) = (
            run_scenario(table, limits, plan, fast_forward=on, single=single) for on in (True, False)
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
        assert token_counts(fast).sum() == token_counts(slow).sum()
        assert fast.busy_s(0.0) == pytest.approx(slow.busy_s(0.0), rel=1e-9)
        assert fast.used_blocks == slow.used_blocks == 0
        preempted += sum(kind == PREEMPTED for seen in ours.happenings.values() for kind, _ in seen)
        jumped, stepped = jumped + ours.looks, stepped + theirs.looks
    assert preempted > 10
    assert jumped < stepped / 3


def test_lone_request_takes_its_prefill_and_decode_steps() -> None:
    timer = roofline(models.model("Llama-3.1-8B"), nodes.node_type("1xH100-SXM"), 1)
    sim_engine = SimEngine(step_table(timer), BatchLimits(10_000))
    sim_engine.add(1.0, 0, 1155, 0, 211)
    result = {kind: at_s for at_s, kind, _ in sim_engine.advance(100.0)}
    first_s = float(prefill_s(timer, 1155)[0])
    assert result[FIRST] == pytest.approx(1.0 + first_s, rel=1e-9)
    contexts = np.arange(1155, 1155 + 210)
    decode_s = float(decode_step_s(timer, np.ones(210), contexts).sum())
    assert result[FINISHED] == pytest.approx(1.0 + first_s + decode_s, rel=2e-3)
    assert sim_engine.wake_s == inf
    assert (sim_engine.computed_tokens, sim_engine.decoded_tokens, sim_engine.used_blocks) == (1155, 210, 0)


def test_arriving_request_waits_for_the_running_step() -> None:
    sim_engine = SimEngine(step_table(BentTimer()), BatchLimits(1000))
    sim_engine.add(0.0, 0, 100, 0, 50)
    [(first_s, kind, _)] = sim_engine.advance(sim_engine.wake_s)
    assert kind == FIRST
    step_s = sim_engine.table.row(1).step_s(100)
    sim_engine.add(first_s + 0.3 * step_s, 1, 10, 0, 1)
    assert sim_engine.advance(first_s + step_s) == []
    beside_s = sim_engine.table.step_s([(1, 10, 0)], 1, 101)
    result = sim_engine.advance(sim_engine.wake_s)
    assert [(kind, key) for _, kind, key in result] == [(FIRST, 1), (FINISHED, 1)]
    assert result[0][0] == pytest.approx(first_s + step_s + beside_s)


def test_replica_status_query_does_not_change_the_simulation() -> None:
    asked, left_alone = (SimEngine(step_table(BentTimer()), BatchLimits(1000)) for _ in range(2))
    for sim_engine in (asked, left_alone):
        sim_engine.add(0.0, 0, 100, 0, 200)
    while asked.wake_s < inf:
        now_s = asked.wake_s
        for share in (0.2, 0.5, 0.9):
            asked.status(asked._start_s + share * (now_s - asked._start_s))
        result = asked.advance(now_s)
    assert result[-1][0] == pytest.approx(left_alone.advance(1e9)[-1][0], rel=1e-12)


def test_replica_slowdown_applies_from_the_next_step() -> None:
    sim_engine = SimEngine(step_table(BentTimer()), BatchLimits(1000))
    sim_engine.add(0.0, 0, 100, 0, 11)
    first_s = sim_engine.advance(sim_engine.wake_s)[0][0]
    row, context = sim_engine.table.row(1), 100
    sim_engine.set_speed(first_s + 0.5 * row.step_s(context), 3.0)
    last_s = sim_engine.advance(100.0)[-1][0]
    assert last_s == pytest.approx(first_s + row.step_s(context) + 3 * row.run_s(context + 1, 9))


def token_counts(sim_engine: SimEngine) -> Floats:
    counts = np.zeros(len(EDGES_S) - 1)
    for place, count in sim_engine.gaps.filled():
        counts[place] = count
    return counts


def test_token_gaps_are_counted_for_every_token_but_the_first() -> None:
    sim_engine = SimEngine(step_table(BentTimer()), replica_limits(step_table(BentTimer()), 1000))
    for key in range(5):
        sim_engine.add(0.01 * key, key, 50, 0, 20)
    assert sim_engine.reserve(0.06, 5, 64)
    sim_engine.add(0.07, 5, 0, 64, 20)
    last_s = sim_engine.advance(100.0)[-1][0]
    counts = token_counts(sim_engine)
    assert counts.sum() == 6 * 19
    mean_s = (counts * np.sqrt(EDGES_S[1:] * EDGES_S[:-1])).sum() / counts.sum()
    assert 0.004 < mean_s < last_s / 10


def test_preempted_request_has_one_long_token_gap() -> None:
    limits = BatchLimits(20, token_budget=512, max_running=8, spare_blocks=0)
    sim_engine = SimEngine(step_table(BentTimer()), limits)
    for key in range(2):
        sim_engine.add(0.0, key, 100, 0, 100)
    result = sim_engine.advance(100.0)
    assert [kind for _, kind, key in result if key == 1] == [FIRST, PREEMPTED, FINISHED]
    counts = token_counts(sim_engine)
    assert counts.sum() == 2 * 99
    waited_s = result[-1][0] - next(at_s for at_s, kind, _ in result if kind == PREEMPTED)
    assert 0.05 < EDGES_S[np.flatnonzero(counts)[-1]] < waited_s


class SteadyTimer:
    confidence: Confidence = "assumed"

    def __init__(self, seconds: float) -> None:
        self._s = seconds

    def step_s(self, batch: StepBatch) -> Floats:
        return np.where(batch.tokens > 0, self._s, 0.0)


def ends_s(arrivals_s: list[float], outputs: list[int], slots: int, step_s: float) -> Floats:
    """When a replica is done with each request, all with a prompt of one token."""
    limits = BatchLimits(1 << 24, token_budget=1 << 20, max_running=slots)
    sim_engine = SimEngine(step_table(SteadyTimer(step_s)), limits)
    result = [0.0] * len(arrivals_s)
    place, count = 0, len(arrivals_s)
    while True:
        due_s = sim_engine.wake_s
        if place < count and arrivals_s[place] < due_s:
            sim_engine.add(arrivals_s[place], place, 1, 0, outputs[place])
            place += 1
        elif due_s < inf:
            for at_s, kind, key in sim_engine.advance(due_s):
                if kind == FINISHED:
                    result[key] = at_s
        else:
            return np.array(result)


def servers_ends_s(arrivals_s: list[float], services_s: list[float], servers: int) -> Floats:
    """The same for so many servers behind one queue, first come first served."""
    free_s = [0.0] * servers
    result = []
    for arrival_s, service_s in zip(arrivals_s, services_s, strict=True):
        result.append(max(arrival_s, free_s[0]) + service_s)
        heapreplace(free_s, result[-1])
    return np.array(result)


def waits_s(gaps_s: Floats, service_s: float) -> Floats:
    """Waits at one server (Lindley): the walk of service less gap, above its lowest point so far."""
    walk = np.concatenate([[0.0], np.cumsum(service_s - gaps_s[1:])])
    return np.asarray(walk - np.minimum.accumulate(walk))


@pytest.mark.parametrize("load", [0.3, 0.8, 0.95])
def test_replica_with_one_slot_equals_a_single_server_queue(load: float) -> None:
    gaps_s = np.random.default_rng(1).exponential(1.0 / load, 20_000)
    arrivals_s = np.cumsum(gaps_s)
    ours = ends_s(arrivals_s.tolist(), [1] * len(gaps_s), 1, 1.0) - arrivals_s - 1.0
    assert ours == pytest.approx(waits_s(gaps_s, 1.0), abs=1e-6)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_single_server_queue_waits_equal_m_d_1(load: float) -> None:
    gaps_s = np.random.default_rng(2).exponential(1.0 / load, 6_000_000)
    assert waits_s(gaps_s, 1.0).mean() == pytest.approx(load / (2.0 * (1.0 - load)), rel=0.01)


@pytest.mark.parametrize(("slots", "load"), [(1, 0.7), (3, 0.5), (3, 0.9), (16, 0.9)])
def test_replica_slots_equal_servers_behind_one_queue(slots: int, load: float) -> None:
    """A request may find a step under way and wait for its end; whoever queues behind it waits no longer."""
    rng, mean_steps = np.random.default_rng(3), 50
    step_s = 1.0 / mean_steps
    arrivals_s = np.cumsum(rng.exponential(1.0 / (load * slots), 20_000))
    outputs = rng.geometric(1.0 / mean_steps, len(arrivals_s))
    ours = ends_s(arrivals_s.tolist(), outputs.tolist(), slots, step_s)
    late_s = ours - servers_ends_s(arrivals_s.tolist(), (outputs * step_s).tolist(), slots)
    assert late_s.min() > -1e-6
    assert late_s.max() < step_s + 1e-6


@pytest.mark.parametrize(("servers", "load"), [(2, 0.5), (4, 0.7)])
def test_multi_server_queue_waits_equal_m_m_c(servers: int, load: float) -> None:
    rng, count, mean_steps = np.random.default_rng(4), 400_000, 400
    arrivals_s = np.cumsum(rng.exponential(1.0 / (load * servers), count))
    services_s = rng.geometric(1.0 / mean_steps, count) / mean_steps
    sojourn_s = servers_ends_s(arrivals_s.tolist(), services_s.tolist(), servers) - arrivals_s
    assert sojourn_s.mean() == pytest.approx(1.0 + erlang_wait_s(servers, load), rel=0.01)


def erlang_wait_s(servers: int, load: float) -> float:
    """Erlang C with a mean service of 1."""
    offered = servers * load
    full = offered**servers / factorial(servers) / (1.0 - load)
    all_busy = full / (sum(offered**k / factorial(k) for k in range(servers)) + full)
    return all_busy / (servers * (1.0 - load))


SHORT = 4000


def threshold_plan() -> Plan:
    """Prompts above 4,000 tokens are prefilled in the west; two replicas in the east prefill the others."""
    prefill = replace(
        prefill_only(),
        capacity=(BucketCapacity(0, 20.0, 0.0, 0.0, 0.2, 0.03), BucketCapacity(1, 5.0, 0.0, 0.0, 0.2, 0.03)),
    )
    decode = replace(
        decode_only(), capacity=tuple(BucketCapacity(bucket, 0.0, 20.0, 0.0, 0.2, 0.03) for bucket in (0, 1))
    )
    plan = replace(
        closed_plan((mixed(), "east", 1)),
        templates=(prefill, decode),
        deployments=(
            Deployment(prefill.name, "west", 1),
            Deployment(prefill.name, "east", 2),
            Deployment(decode.name, "east", 3),
        ),
        buckets=(LengthBucket(MODEL, 0, SHORT, 10.0), LengthBucket(MODEL, 1, LONGEST, 2.0)),
        shares=(
            PlannedShare(prefill.name, "east", 0, "prefill", 10.0),
            PlannedShare(prefill.name, "west", 1, "prefill", 2.0),
            PlannedShare(decode.name, "east", 0, "decode", 10.0),
            PlannedShare(decode.name, "east", 1, "decode", 2.0),
        ),
        flows=(
            PlannedFlow(MODEL, 0, "east", "east", 10.0),
            PlannedFlow(MODEL, 1, "west", "east", 2.0, "int4"),
        ),
    )
    return replace(plan, thresholds=thresholds_of(plan))


def mean_ttft_s(policy: Policy, long_share: float) -> float:
    rng, count = np.random.default_rng(1), 250
    arrival_s = np.cumsum(rng.exponential(1 / 6.0, count))
    long = rng.random(count) < long_share
    prompts = np.where(long, rng.integers(5000, 20_000, count), rng.integers(200, 3000, count))
    work = workload(MODEL, arrival_s, prompts, rng.integers(20, 100, count))
    records = simulate(problem(threshold_plan(), gbps=400.0), work, policy).records
    waits = np.array(records.first_token_s) - np.array(records.arrival_s)
    assert np.isfinite(waits).all()
    return float(waits.mean())


def test_threshold_adaptation_relieves_a_queue_in_the_prefill_cluster() -> None:
    moved = mean_ttft_s(Policy(balance="goodput", admission=False), 0.6)
    fixed = mean_ttft_s(Policy(balance="goodput", admission=False, adapt_threshold=False), 0.6)
    assert moved < fixed / 2


def test_threshold_adaptation_changes_nothing_without_a_queue() -> None:
    moved = mean_ttft_s(Policy(balance="goodput", admission=False), 0.1)
    fixed = mean_ttft_s(Policy(balance="goodput", admission=False, adapt_threshold=False), 0.1)
    assert abs(moved - fixed) < 0.1 * fixed
