"""Queueing theory: a replica whose steps all take equally long is a textbook queue.

One slot and one step per request: M/D/1. With c slots and outputs of geometric length each slot serves one request
in a geometric number of steps, which with short steps is M/M/c. Two links each, so that chance plays no part in the
first: the replica against the exact queue for the very same arrivals, and that queue against theory. Long runs of
the replica itself against theory are in benchmarks/simulate.py.
"""

from __future__ import annotations

from heapq import heapreplace
from math import factorial, inf

import numpy as np
import pytest

from potluck.core.replica.sequences import FINISHED, BatchLimits
from potluck.core.values.plan import Confidence
from potluck.perf.step_timer import Floats, StepBatch
from potluck.sim.replicas.round_table import step_table
from potluck.sim.replicas.sim_engine import SimEngine


class Steady:
    """Every step takes as long."""

    confidence: Confidence = "assumed"

    def __init__(self, seconds: float) -> None:
        self._s = seconds

    def step_s(self, batch: StepBatch) -> Floats:
        return np.where(batch.tokens > 0, self._s, 0.0)


def ends_s(arrivals_s: list[float], outputs: list[int], slots: int, step_s: float) -> Floats:
    """When a replica is done with each request, all with a prompt of one token."""
    limits = BatchLimits(1 << 24, token_budget=1 << 20, max_running=slots)
    replica = SimEngine(step_table(Steady(step_s)), limits)
    found = [0.0] * len(arrivals_s)
    place, count = 0, len(arrivals_s)
    while True:
        due_s = replica.next_s()
        if place < count and arrivals_s[place] < due_s:
            replica.add(arrivals_s[place], place, 1, 0, outputs[place])
            place += 1
        elif due_s < inf:
            for at_s, kind, key in replica.advance(due_s):
                if kind == FINISHED:
                    found[key] = at_s
        else:
            return np.array(found)


def servers_ends_s(arrivals_s: list[float], services_s: list[float], servers: int) -> Floats:
    """The same for so many servers behind one queue, first come first served."""
    free_s = [0.0] * servers
    found = []
    for arrival_s, service_s in zip(arrivals_s, services_s, strict=True):
        found.append(max(arrival_s, free_s[0]) + service_s)
        heapreplace(free_s, found[-1])
    return np.array(found)


def waits_s(gaps_s: Floats, service_s: float) -> Floats:
    """Waits at one server (Lindley): the walk of service less gap, above its lowest point so far."""
    walk = np.concatenate([[0.0], np.cumsum(service_s - gaps_s[1:])])
    return np.asarray(walk - np.minimum.accumulate(walk))


@pytest.mark.parametrize("load", [0.3, 0.8, 0.95])
def test_one_slot_of_fixed_service_is_the_single_server_queue(load: float) -> None:
    gaps_s = np.random.default_rng(1).exponential(1.0 / load, 20_000)
    arrivals_s = np.cumsum(gaps_s)
    ours = ends_s(arrivals_s.tolist(), [1] * len(gaps_s), 1, 1.0) - arrivals_s - 1.0
    assert ours == pytest.approx(waits_s(gaps_s, 1.0), abs=1e-6)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_that_queue_waits_as_m_d_1(load: float) -> None:
    gaps_s = np.random.default_rng(2).exponential(1.0 / load, 6_000_000)
    assert waits_s(gaps_s, 1.0).mean() == pytest.approx(load / (2.0 * (1.0 - load)), rel=0.01)


@pytest.mark.parametrize(("slots", "load"), [(1, 0.7), (3, 0.5), (3, 0.9), (16, 0.9)])
def test_slots_are_servers_behind_one_queue(slots: int, load: float) -> None:
    """A request may find a step under way and wait for its end; whoever queues behind it waits no longer."""
    rng, mean_steps = np.random.default_rng(3), 50
    step_s = 1.0 / mean_steps
    arrivals_s = np.cumsum(rng.exponential(1.0 / (load * slots), 20_000))
    outputs = rng.geometric(1.0 / mean_steps, len(arrivals_s))
    ours = ends_s(arrivals_s.tolist(), outputs.tolist(), slots, step_s)
    exact = servers_ends_s(arrivals_s.tolist(), (outputs * step_s).tolist(), slots)
    late_s = ours - exact
    assert late_s.min() > -1e-6
    assert late_s.max() < step_s + 1e-6


@pytest.mark.parametrize(("servers", "load"), [(2, 0.5), (4, 0.7)])
def test_those_servers_wait_as_m_m_c(servers: int, load: float) -> None:
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
