"""Random scenarios of one simulated replica."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf
from random import Random

from potluck.core.replica.batch import DONE, FINISHED, FIRST, PREEMPTED, BatchLimits
from potluck.core.state.events import ReplicaStatus
from potluck.sim.sim_engine import SimEngine
from potluck.sim.step_table import StepTimes

Touch = tuple[float, int, str, tuple[float, ...]]


@dataclass
class ReplicaLife:
    happenings: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Of each request: what, when."""
    statuses: list[ReplicaStatus] = field(default_factory=list)
    streamed: list[int] = field(default_factory=list)
    reserved: list[bool] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    looks: int = 0


def scenario_events(seed: int, requests: int, limits: BatchLimits, step_s: float) -> list[Touch]:
    """What is done to the replica, in time order."""
    rng = Random(seed)
    room = limits.total_blocks * limits.block_tokens
    most = max(20, min(room // 3, 400))
    rate = rng.choice([0.02, 0.05, 0.3, 1.0, 4.0]) / step_s
    now_s, result = 0.0, []

    def put(at_s: float, what: str, *figures: float) -> None:
        result.append((at_s, len(result), what, figures))

    for key in range(requests):
        now_s += rng.expovariate(rate)
        prompt, output = rng.randint(1, rng.choice([20, most])), rng.randint(1, rng.choice([8, most]))
        priority = rng.choice([0, 0, 0, 1, 2])
        kind = rng.random()
        if kind < 0.6:
            put(now_s, "add", key, prompt, 0, output, priority)
        elif kind < 0.7:
            hit = rng.randint(0, prompt)
            put(now_s, "add", key, prompt - hit, hit, output, priority)
        elif kind < 0.8:
            put(now_s, "add", key, prompt, 0, 0, priority)
        else:
            here = rng.choice([0, 0, rng.randint(0, prompt)])
            # As for a prompt of which the rest is computed here: that takes more than was set aside.
            put(now_s, "reserve", key, rng.choice([prompt, max(1, prompt - here)]))
            put(
                now_s + rng.uniform(0.1, 5.0) * step_s, "received", key, here, prompt - here, output, priority
            )
        if rng.random() < 0.15:
            put(now_s + rng.uniform(0.0, 200.0) * step_s, "cancel", key)
        if rng.random() < 0.2:
            put(now_s + rng.uniform(0.0, 50.0) * step_s, "status")
        if rng.random() < 0.05:
            put(now_s + rng.uniform(0.0, 50.0) * step_s, "speed", rng.choice([0.5, 1.0, 3.0]))
    return sorted(result)


def run_scenario(
    table: StepTimes, limits: BatchLimits, plan: list[Touch], *, fast_forward: bool, single: bool = True
) -> tuple[SimEngine, ReplicaLife]:
    """Carry a plan out until the replica is idle; handed-over KV is released a while after it was computed."""
    sim_engine, life = SimEngine(table, limits, fast_forward=fast_forward), ReplicaLife()
    events = list(plan)
    reserved: set[int] = set()
    while events or sim_engine.wake_s < inf:
        due_s = sim_engine.wake_s
        if events and events[0][0] < due_s:
            at_s, _, what, figures = heapq.heappop(events)
            _touch(sim_engine, life, at_s, what, figures, reserved, single)
            continue
        life.looks += 1
        for at_s, kind, key in sim_engine.advance(due_s):
            assert at_s == due_s, "something happened before the replica had said so"
            life.happenings.setdefault(key, []).append((kind, at_s))
            life.times.append(at_s)
            assert kind in (FIRST, DONE, FINISHED, PREEMPTED)
            if kind == DONE:
                heapq.heappush(events, (at_s * 1.0001 + 1e-3, -key, "release", (key,)))
    return sim_engine, life


def _touch(
    sim_engine: SimEngine,
    life: ReplicaLife,
    at_s: float,
    what: str,
    figures: tuple[float, ...],
    reserved: set[int],
    single: bool,
) -> None:
    key = int(figures[0]) if figures else -1
    if what == "add" or (what == "received" and key in reserved):
        reserved.discard(key)
        tenant, weight = ("", 1.0) if single else (str(key % 3), 1.0 + key % 3)
        compute, context, output, priority = map(int, figures[1:])
        sim_engine.add(at_s, key, compute, context, output, priority, tenant, weight)
    elif what == "reserve":
        life.reserved.append(sim_engine.reserve(at_s, key, int(figures[1])))
        if life.reserved[-1]:
            reserved.add(key)
    elif what == "cancel":
        if key in set(sim_engine.batch.keys()):
            life.streamed.append(sim_engine.streamed(at_s, key))
        reserved.discard(key)
        sim_engine.cancel(at_s, key)
    elif what == "release":
        sim_engine.release(at_s, key)
    elif what == "status":
        life.statuses.append(sim_engine.status(at_s))
    elif what == "speed":
        sim_engine.set_speed(at_s, figures[0])
