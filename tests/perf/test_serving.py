"""Whole serving runs: the closed form beside a step-by-step account of the same engine and client."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from accuracy.closed_loop import BenchClient, RunWork, run_work, served, together
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.catalog import models, nodes
from potluck.core.values.plan import Confidence
from potluck.perf.step_timer import Floats, StepBatch, steps
from potluck.perf.timers.engine_host import DEFAULT_HOST, NO_HOST, EngineHost, hosts
from potluck.perf.timers.roofline import roofline

QUIET = BenchClient(burst=0.0, ahead=0.0, request_s=0.0)


@dataclass(frozen=True)
class Line:
    """Steps that cost base + token x tokens."""

    base_s: float = 8e-3
    token_s: float = 2e-5

    @property
    def confidence(self) -> Confidence:
        return "assumed"

    def step_s(self, batch: StepBatch) -> Floats:
        return np.where(batch.tokens > 0, self.base_s + self.token_s * batch.tokens, 0.0)


def stepped(timer: Line, open_requests: int, new: int, out: int, budget: int, waves: int) -> float:
    """Requests a second of an engine that is stepped through, once its start is over."""
    waiting, decoding, now, ended = deque([new] * open_requests), [], 0.0, []
    while len(ended) < waves * open_requests:
        room, chunk = budget - len(decoding), 0
        fresh = []
        while waiting and room > 0:
            taken = min(waiting[0], room)
            waiting[0] -= taken
            room, chunk = room - taken, chunk + taken
            if waiting[0] == 0:
                waiting.popleft()
                fresh.append(out - 1)
        now += timer.base_s + timer.token_s * (chunk + len(decoding))
        decoding = [left - 1 for left in decoding]
        done = decoding.count(0)
        decoding = [left for left in decoding if left > 0] + fresh
        waiting.extend([new] * done)
        ended += [now] * done
    half = len(ended) // 2
    return (len(ended) - half) / (ended[-1] - ended[half - 1])


@pytest.mark.parametrize(
    ("open_requests", "new", "out"), [(4, 900, 200), (32, 900, 200), (64, 300, 100), (16, 3000, 60)]
)
def test_throughput_is_that_of_an_engine_stepped_through(open_requests: int, new: int, out: int) -> None:
    timer, budget = Line(), 2048
    truth = stepped(timer, open_requests, new, out, budget, 12)
    found = served(run_work(timer, 1, open_requests, new, out, 10_000, budget), NO_HOST, QUIET)
    assert found.requests_per_s[0] == pytest.approx(truth, rel=0.08)


works = st.builds(
    run_work,
    st.just(Line()),
    st.integers(1, 80),
    st.integers(1, 200),
    st.integers(1, 6000),
    st.integers(2, 600),
    st.integers(1, 300),
)
clients = st.builds(BenchClient, st.floats(0, 1), st.floats(0, 3), st.floats(0, 0.2))
hosting = st.builds(EngineHost, st.floats(0, 5e-3), st.floats(0, 1e-4), st.floats(0, 1e-3))


@given(works, hosting, clients)
def test_what_is_under_way_is_waiting_or_answered(
    work: RunWork, host: EngineHost, client: BenchClient
) -> None:
    """Little's law: concurrency = rate x (TTFT + the rest of the answer)."""
    found = served(work, host, client)
    whole_s = found.ttft_s + work.answers * found.tpot_s
    assert found.requests_per_s * whole_s == pytest.approx(work.concurrency)
    assert (found.ttft_s > 0).all()
    assert (found.tpot_s > 0).all()


@given(works, hosting, clients, st.floats(1.0, 4.0))
def test_a_slower_host_never_serves_more(
    work: RunWork, host: EngineHost, client: BenchClient, factor: float
) -> None:
    slow = EngineHost(host.fixed_s * factor, host.sequence_s * factor, host.launch_s * factor)
    faster, slower = served(work, host, client), served(work, slow, client)
    assert (slower.requests_per_s <= faster.requests_per_s * (1 + 1e-9)).all()


@settings(max_examples=20)
@given(st.integers(1, 64), st.integers(16, 4000), hosting)
def test_a_host_that_is_added_later_is_the_one_that_is_timed_with(
    decodes: int, new: int, host: EngineHost
) -> None:
    model, node = models.model("Llama-3.1-8B"), nodes.node_type("1xH100-SXM")
    bare = run_work(roofline(model, node, 1, host=NO_HOST), model.layer_count, decodes, new, 100, 500)
    later = bare.steps.hosted(host, bare.layers)
    at_once = run_work(roofline(model, node, 1, host=host), model.layer_count, decodes, new, 100, 500).steps
    for name in ("with_s", "without_s", "turn_s"):
        assert getattr(later, name) == pytest.approx(getattr(at_once, name))


def test_runs_side_by_side_are_the_same_runs() -> None:
    first, second = run_work(Line(), 8, 4, 500, 100, 50), run_work(Line(), 8, 40, 900, 20, 10)
    both = served(together([first, second]), DEFAULT_HOST, QUIET)
    alone = [served(each, DEFAULT_HOST, QUIET).ttft_s[0] for each in (first, second)]
    assert both.ttft_s == pytest.approx(alone)
    assert together([first, second]).where(np.array([False, True])).concurrency == [40.0]


def test_launches_are_the_least_of_a_step_with_a_chunk_and_no_other() -> None:
    model, node = models.model("Llama-3.1-8B"), nodes.node_type("1xH100-SXM")
    bare, launched = (roofline(model, node, 1, host=EngineHost(0.0, 0.0, each)) for each in (0.0, 1e-3))
    batch = steps([16.0, 4000.0, 0.0], 0.0, [3.0, 3.0, 3.0], 900.0)
    short, long, decode = launched.step_s(batch)
    assert short == pytest.approx(32e-3)
    assert (long, decode) == pytest.approx(tuple(bare.step_s(batch)[1:]))
    assert launched.least_s == pytest.approx(32e-3)
    assert launched.unlaunched.step_s(batch) == pytest.approx(bare.step_s(batch))


def test_hosts_of_three_engines_are_known() -> None:
    assert set(hosts()) == {"vllm", "sglang", "trtllm"}
    assert hosts()["vllm"] == DEFAULT_HOST
    for host in hosts().values():
        assert 0 < host.fixed_s < 5e-3
        assert 0 <= host.sequence_s < 1e-4
