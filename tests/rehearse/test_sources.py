"""The requests of a rehearsal: repeatable, and fresh ones that no round has seen."""

from __future__ import annotations

import numpy as np
import pytest
from rehearse_builders import a_traffic

from potluck.core.errors import InputError
from potluck.rehearse.request_sources import FRESH, LEAST_REQUESTS, MOST_REQUESTS, enough, made_up, recorded
from potluck.sim.load.workload import Workload, workload


def a_trace(count: int = 4000, rate_per_s: float = 8.0) -> Workload:
    rng = np.random.default_rng(0)
    when = np.cumsum(rng.exponential(1 / rate_per_s, count))
    return workload("chat", when, np.arange(1, count + 1), np.full(count, 5))


def test_a_number_always_means_the_same_requests() -> None:
    source = made_up([a_traffic()], cv=3.0, requests=500)
    assert np.array_equal(source(4).arrival_s, source(4).arrival_s)
    assert not np.array_equal(source(4).arrival_s, source(FRESH).arrival_s)
    gaps = np.diff(made_up([a_traffic()], cv=3.0, requests=40_000)(1).arrival_s)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(3.0, rel=0.1)


def test_the_rarest_model_has_a_few_hundred_requests_within_reason() -> None:
    both = [a_traffic("chat", 10.0), a_traffic("code", 1.0)]
    load = made_up(both)(0)
    assert (load.model == load.models.index("code")).sum() >= LEAST_REQUESTS
    assert enough([a_traffic("chat", 1000.0), a_traffic("code", 0.01)]) == MOST_REQUESTS
    with pytest.raises(InputError):
        enough([a_traffic(rate_per_s=0.0)])


def test_a_trace_is_cut_into_pieces_that_never_meet() -> None:
    trace, runs = a_trace(), 4
    source = recorded({"chat": trace}, [a_traffic(rate_per_s=trace.rate_per_s or 0.0)], runs)
    searched = [set(source(run).prompt_tokens.tolist()) for run in range(runs)]
    fresh = [set(source(FRESH + run).prompt_tokens.tolist()) for run in range(runs)]
    everything = [*searched, *fresh]
    assert sum(map(len, everything)) == len(set().union(*everything))
    assert len(set().union(*everything)) >= len(trace) - 1
    assert max(searched[0]) < min(fresh[0]) < max(fresh[0]) < min(searched[1])
    assert source(FRESH + runs).prompt_tokens.tolist() == source(FRESH).prompt_tokens.tolist()
    assert all(source(run).arrival_s[0] >= 0 for run in range(runs))


def test_a_trace_comes_at_the_planned_rate_beside_made_up_models() -> None:
    load = recorded({"chat": a_trace()}, [a_traffic("chat", 16.0), a_traffic("code", 4.0)], 3)(1)
    rates = [(load.model == place).sum() / float(load.arrival_s[-1]) for place in range(2)]  # chat, then code
    assert rates == [pytest.approx(16.0, rel=0.1), pytest.approx(4.0, rel=0.2)]


def test_a_trace_too_short_to_be_cut_is_told() -> None:
    with pytest.raises(InputError, match="too short"):
        recorded({"chat": a_trace(count=50)}, [a_traffic()], 5)
