"""The bounds against scipy's, and that they are as careful as they claim."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rehearse_builders import a_problem, a_traffic, a_trial
from scipy import stats

from potluck.cli.common.inputs import load_problem
from potluck.cli.planning.rehearsal import RehearsalOptions, estimate_of
from potluck.core.errors import InputError
from potluck.core.state.policy import Policy
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import PlannedReplica
from potluck.core.values.types import Role, Slo
from potluck.rehearse.evidence import Evidence, PairTrial, evidence_of, student_t, wilson
from potluck.rehearse.request_sources import FRESH, LEAST_REQUESTS, MOST_REQUESTS, enough, made_up, recorded
from potluck.sim.load.workload import Workload, workload
from potluck.spec.load_spec import parse_spec


@pytest.mark.parametrize("degrees", [1, 2, 4, 9, 15, 16, 20, 40, 200])
def test_students_t_is_the_books(degrees: int) -> None:
    assert student_t(degrees) == pytest.approx(stats.t.ppf(0.95, degrees), rel=1e-3)


@given(count=st.integers(1, 5000), share=st.floats(0, 1))
def test_wilsons_bound_is_the_books(count: int, share: float) -> None:
    kept = round(count * share)
    book = stats.binomtest(kept, count).proportion_ci(0.9, method="wilson").low
    assert wilson(kept / count, count) == pytest.approx(book, abs=1e-4)


def test_nothing_seen_proves_nothing() -> None:
    assert wilson(1.0, 0) == 0.0
    assert Evidence("m", 0.9, (), 0).lower == 0.0
    assert not Evidence("m", 0.99, (1.0, 1.0, 1.0), 30).holds
    assert Evidence("m", 0.99, (1.0, 1.0, 1.0), 3000).holds


def test_a_spread_between_runs_lowers_the_bound() -> None:
    calm = Evidence("m", 0.9, (0.93, 0.94, 0.93, 0.94, 0.93), 10_000)
    wild = Evidence("m", 0.9, (0.99, 0.85, 0.99, 0.85, 0.99), 10_000)
    assert calm.holds
    assert wild.mean == pytest.approx(calm.mean)
    assert not wild.holds
    assert wild.runs_kept == 3
    assert wild.margin < 0 < calm.margin


def test_the_bound_is_wrong_about_one_time_in_twenty() -> None:
    """Runs whose requests share their fate: a bound from single requests would be wrong far more often."""
    rng = np.random.default_rng(7)
    wrong = naive = 0
    for _ in range(600):
        runs = rng.binomial(40, 0.9, size=6) / 40  # 40 independent bursts of 25 requests
        seen = Evidence("m", 0.9, tuple(runs), 6 * 1000)
        wrong += seen.lower > 0.9
        naive += wilson(seen.mean, 6 * 1000) > 0.9
    assert wrong / 600 < 0.08
    assert naive / 600 > 0.2


def test_a_run_is_the_same_twice_and_its_warm_up_is_not_judged() -> None:
    traffic = (a_traffic(),)
    trial = a_trial(a_problem(*traffic), traffic, requests=300)
    once = evidence_of(trial, trial.world.plan, [3, 4])
    assert once == evidence_of(trial, trial.world.plan, [3, 4])
    assert once != evidence_of(trial, trial.world.plan, [5, 6])
    load = trial.source(3)
    cut_s = float(load.arrival_s[0]) + 0.2 * load.span_s
    other = trial.source(4)
    other_cut_s = float(other.arrival_s[0]) + 0.2 * other.span_s
    judged = int((load.arrival_s >= cut_s).sum() + (other.arrival_s >= other_cut_s).sum())
    assert once[0].requests == judged < 600


def test_a_plan_that_turns_people_away_does_not_hold() -> None:
    """Nine in ten in time were promised, and are; but a plan that serves all must not refuse the tenth."""
    runs = (0.94, 0.95, 0.94, 0.95, 0.94)
    assert Evidence("m", 0.9, runs, 10_000, answered=(0.999,) * 5).holds
    short = Evidence("m", 0.9, runs, 10_000, answered=runs)
    assert not short.holds
    assert short.margin < 0
    trial = a_trial(a_problem(a_traffic()), (a_traffic(rate_per_s=30.0),), requests=300)
    (crowded,) = evidence_of(replace(trial, policy=Policy()), trial.world.plan, [3, 4])
    assert max(crowded.answered) < 0.9
    (waiting,) = evidence_of(trial, trial.world.plan, [3, 4])
    assert waiting.answered == (1.0, 1.0)


SPEC = """\
models:
- model: Llama-2-13B
  name: chat
  slo: {ttft_ms: 2500, tpot_ms: 100}
  traffic: {rate_per_s: 2, input: 900, output: 50}
pool:
  machines:
  - {name: node0, node: 2xA40, price_usd_per_h: 0.8}
  - {name: node1, node: 2xA40, price_usd_per_h: 0.8}
  gbps: 20
"""


def replica(role: Role, machine: str) -> PlannedReplica:
    return PlannedReplica(role, Layout((Stage(40, (StageNode("2xA40", 2, machine),)),)))


@pytest.fixture(scope="module")
def trial() -> PairTrial:
    spec = parse_spec(SPEC)
    made = estimate_of(spec, load_problem(spec, 0.8, None, (), 0.0), RehearsalOptions(attainment="simulated"))
    assert isinstance(made, PairTrial)
    return replace(made, requests=150)


def test_a_pair_keeps_its_objective_until_it_is_asked_for_too_much(trial: PairTrial) -> None:
    prefill, decode = replica("prefill", "node0"), replica("decode", "node1")
    assert trial(prefill, decode, 1.0) == 1.0
    assert trial(prefill, decode, 1.0) == trial(prefill, decode, 1.0)
    assert trial(prefill, decode, 40.0) < 0.5
    both = replica("mixed", "node0")
    assert trial(both, both, 0.5) == 1.0


def test_all_objectives_count(trial: PairTrial) -> None:
    """An answer takes about a second; promised in a tenth of it none is in time, whatever TTFT and TPOT are."""
    strict = replace(trial, world=replace(trial.world, slos={"chat": Slo(2.5, 0.1, e2e_s=0.1)}))
    assert strict(replica("prefill", "node0"), replica("decode", "node1"), 1.0) == 0.0


def a_trace(count: int = 4000, rate_per_s: float = 8.0) -> Workload:
    when = np.cumsum(np.random.default_rng(0).exponential(1 / rate_per_s, count))
    return workload("chat", when, np.arange(1, count + 1), np.full(count, 5))


def test_a_number_always_means_the_same_requests() -> None:
    source = made_up([a_traffic()], cv=3.0, requests=500)
    assert np.array_equal(source(4).arrival_s, source(4).arrival_s)
    assert not np.array_equal(source(4).arrival_s, source(FRESH).arrival_s)
    gaps = np.diff(made_up([a_traffic()], cv=3.0, requests=40_000)(1).arrival_s)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(3.0, rel=0.1)


def test_the_rarest_model_has_a_few_hundred_requests_within_reason() -> None:
    load = made_up([a_traffic("chat", 10.0), a_traffic("code", 1.0)])(0)
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
