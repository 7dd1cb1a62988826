"""CAUCHY's experiments on shortened runs: published changes, directions, and what the fleets are."""

from __future__ import annotations

import pytest
from papers.cauchy import LOADS, Effort, goodput_per_s, latencies, table3_policy, table3_problem
from papers.cauchy_rows import TABLE3, CauchyMeasured, Pair, rows

from papers import cauchy
from potluck.core.state.policy import Policy

SHAREGPT = LOADS[1]
SHORT = Effort(0.5, (1,), 0.1)


def test_the_published_changes_follow_from_the_published_figures() -> None:
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


def test_workloads_have_the_printed_means() -> None:
    assert [tuple(map(round, load.mean_tokens)) for load in LOADS] == [(702, 42), (290, 207), (337, 1330)]


def test_more_decode_replicas_serve_more() -> None:
    one, two = (goodput_per_s(table3_problem(n), SHAREGPT, table3_policy(False), SHORT) for n in (1, 2))
    assert two > 1.3 * one


def test_in_place_work_takes_load_off_the_one_decode_replica() -> None:
    """Above what the H20 alone decodes in time, so that what the H800 takes over shows."""
    problem = table3_problem(1)
    basic, other = (
        latencies(problem, SHAREGPT, table3_policy(way), 26.0, Effort(2.0, (1,))) for way in (False, True)
    )
    assert other.e2e_s < basic.e2e_s
    assert other.tbt_s < basic.tbt_s


def test_turns_by_goodput_beat_plain_turns_on_unlike_combos() -> None:
    """With DailyMail's prompts <H800, A800> does about twice what the others do."""
    load, weights = LOADS[0], [38.0, 21.0, 19.0]
    problem = cauchy.figure9_problem(load, weights)
    effort = Effort(1.0, (1,))
    plain, weighted = (
        latencies(problem, load, Policy(balance=way, opportunistic=False), 105.0, effort).e2e_s
        for way in ("round-robin", "goodput")
    )
    assert weighted < plain
