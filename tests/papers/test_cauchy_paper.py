"""CAUCHY's experiments on shortened runs: published changes, directions, and what the fleets are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.cauchy import LOADS, Effort, goodput_per_s, latencies, table3_policy, table3_problem
from papers.cauchy_rows import TABLE3, CauchyMeasured, Pair, rows

from papers import cauchy, cauchy_migration, cauchy_trace
from papers import cauchy_programs as programs
from potluck.core.state.policy import Policy

SHAREGPT = LOADS[1]
SHORT = Effort(0.5, (1,), 0.1)


def test_published_cauchy_changes_follow_from_its_figures() -> None:
    """Table 3 prints both, for instance +8.4 % goodput and -8.5 % latency for 1P1D."""
    pair = cauchy.Latencies(1.0, 1.0, 1.0)
    result = rows(CauchyMeasured({d: Pair((1.0, 1.0), (pair, pair), 1.0) for d in TABLE3}, {}))
    changes = {
        (row.setting, row.metric.split(",")[0]): row.published for row in result if row.unit == "change"
    }
    printed = {
        ("1P1D", "max CE"): 0.087,
        ("1P1D", "max goodput"): 0.084,
        ("1P1D", "mean E2E latency"): -0.085,
        ("1P1D", "mean TTFT"): -0.076,
        ("1P1D", "mean TBT"): -0.074,
        ("1P2D", "max CE"): 0.069,
        ("1P2D", "max goodput"): 0.083,
        ("1P2D", "mean E2E latency"): -0.077,
        ("1P2D", "mean TTFT"): -0.128,
        ("1P2D", "mean TBT"): -0.065,
        ("1P3D", "max CE"): 0.079,
        ("1P3D", "max goodput"): 0.088,
    }
    for key, value in printed.items():
        assert changes[key] == pytest.approx(value, abs=0.0011), key


def test_cauchy_workloads_have_the_printed_means() -> None:
    assert [tuple(map(round, load.mean_tokens)) for load in LOADS] == [(702, 42), (290, 207), (337, 1330)]


def test_more_decode_replicas_raise_cauchy_goodput() -> None:
    one, two = (goodput_per_s(table3_problem(n), SHAREGPT, table3_policy(False), SHORT) for n in (1, 2))
    assert two > 1.3 * one


def test_in_place_runs_relieve_the_only_decode_replica() -> None:
    """Above what the H20 alone decodes in time, so that what the H800 takes over shows."""
    problem = table3_problem(1)
    basic, other = (
        latencies(problem, SHAREGPT, table3_policy(way), 26.0, Effort(2.0, (1,))) for way in (False, True)
    )
    assert other.e2e_s < basic.e2e_s
    assert other.tbt_s < basic.tbt_s


def test_goodput_balance_beats_round_robin_on_different_combos() -> None:
    """With DailyMail's prompts <H800, A800> does about twice what the others do."""
    load, weights = LOADS[0], [38.0, 21.0, 19.0]
    problem = cauchy.figure9_problem(load, weights)
    effort = Effort(1.0, (1,))
    plain, weighted = (
        latencies(problem, load, Policy(balance=way, opportunistic=False), 105.0, effort).e2e_s
        for way in ("round-robin", "goodput")
    )
    assert weighted < plain


def chosen_deployments(
    rate_per_s: float, goodputs: programs.Goodputs, prices: dict[str, float]
) -> dict[str, programs.Deployed]:
    factory = programs.factory_of(LOADS[2], rate_per_s, goodputs, prices)
    return {name: programs.deploy(factory, name) for name in programs.PROGRAMS}


def test_printed_cauchy_example_selects_the_a800() -> None:
    """3.3.2: for a residual of 0.80 CO-LP takes the A800, not the more efficient H20."""
    result = {
        row.setting.split(",")[1].strip(): row.setting
        for row in programs.own_figures()
        if "0.8 req" in row.setting
    }
    assert result["CO-LP: 1 <A800-PCIe>"]
    assert result["MC-LP: 1 <A800-PCIe>"]
    assert result["MCE-LP: 1 <H20>"]
    whole = [row.setting for row in programs.own_figures() if "6.4 req" in row.setting]
    assert sum("H800" in setting for setting in whole) == 1  # MCE-LP alone


@given(st.lists(st.floats(0.5, 9.0), min_size=12, max_size=12), st.floats(1.0, 20.0))
@settings(max_examples=10)
def test_no_cauchy_program_costs_less_than_the_minimum_cost_one(rates: list[float], demand: float) -> None:
    goodputs = dict(
        zip(programs.candidates(), zip(programs.candidates().values(), rates, strict=True), strict=True)
    )
    found = chosen_deployments(demand, goodputs, cauchy.PRICES_USD_PER_H)
    assert all(found["MC-LP"].usd_per_h <= item.usd_per_h + 1e-6 for item in found.values())
    assert all(item.goodput_per_s >= demand - 1e-6 for item in found.values())


def test_equation_15_ranks_h800_and_h20_first_where_the_paper_has_them_last() -> None:
    assert programs.ranking()[0] == ("H800", "H20") == programs.RANKED[-1]


def test_eight_connections_fill_the_network_card() -> None:
    """Figure 11: 625 ms in one transfer, 85 ms by eight pipelines; more gain nothing."""
    assert cauchy_migration.bulk_s(2048) == pytest.approx(0.625, rel=0.01)
    wire_s = [cauchy_migration.migration_s(2048, degree)[0] for degree in cauchy_migration.DEGREES]
    assert wire_s == sorted(wire_s, reverse=True)
    assert wire_s[3] == wire_s[4] == pytest.approx(0.085, rel=0.1)
    assert all(after < wire for wire, after in (cauchy_migration.migration_s(t, 1) for t in (256, 2048)))


@pytest.mark.slow
def test_scaling_lowers_latency_during_a_rate_increase() -> None:
    """Figure 10, on a rate that doubles."""
    load = LOADS[2]
    requests = cauchy_trace.requests_of(load, np.array([0.9] * 3 + [1.8] * 12), 1)
    known = programs.model_goodputs(load)
    still, scaled = (
        cauchy_trace.serve(load, known, requests, way) for way in (cauchy_trace.STILL, cauchy_trace.WHOLE)
    )
    assert scaled.e2e_p90_s < still.e2e_p90_s
    assert scaled.attainment > still.attainment
