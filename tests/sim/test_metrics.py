"""Summary metrics against a plain loop and hand counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isnan

import numpy as np
import pytest
from generated_results import MODELS, SLOS, made_result
from hypothesis import given
from hypothesis import strategies as st

from potluck.core import codec
from potluck.core.values.types import Slo
from potluck.sim.results.metrics import (
    FORMAT,
    SCALES,
    VERSION,
    RunSummary,
    cost_between,
    gap_spread,
    judge,
    merge_gaps,
    scan,
    summarise,
)
from potluck.sim.results.records import ANSWERED, CANCELLED, OPEN, REASONS, REFUSED, RequestRecords, SimResult

NAN = float("nan")
Row = tuple[float, int, int, float, float, int]
"""(arrival_s, model, streamed tokens, TTFT, finish after the first token, outcome)"""


def records_of(rows: list[Row]) -> RequestRecords:
    rows = sorted(rows, key=lambda row: row[0])
    arrival = np.array([row[0] for row in rows], dtype=np.float64)
    outcome = np.array([row[5] for row in rows], dtype=np.int8)
    begun = np.isin(outcome, (ANSWERED, CANCELLED))
    first = np.where(begun, arrival + np.array([row[3] for row in rows], dtype=np.float64), NAN)
    finish = np.where(begun, first + np.array([row[4] for row in rows]), arrival + 1.0)
    zeros = np.zeros(len(rows), dtype=np.int32)
    tokens = np.where(begun, np.array([row[2] for row in rows], dtype=np.int32), 0)
    return RequestRecords(
        models=MODELS,
        arrival_s=arrival,
        model=np.array([row[1] for row in rows], dtype=np.int16),
        prompt_tokens=zeros + 10,
        output_tokens=np.maximum(tokens, 1),
        streamed_tokens=tokens,
        first_token_s=first,
        finish_s=np.where(outcome == OPEN, NAN, finish),
        outcome=outcome,
        reason=np.where(outcome == REFUSED, 1, 0).astype(np.int8),
        attempts=zeros + 1,
        preemptions=zeros,
        route=zeros,
        prefill_replica=zeros,
        decode_replica=zeros,
        cached_tokens=zeros,
        wire_bytes=zeros.astype(np.float64),
    )


def result_of(rows: list[Row], end_s: float = 100.0, slos: dict[str, Slo] | None = None) -> SimResult:
    rates = ((0.0, 36.0), (50.0, 72.0))
    return SimResult(records_of(rows), SLOS if slos is None else slos, (), (), end_s, rates)


request_rows = st.tuples(
    st.floats(0, 90),
    st.integers(0, 1),
    st.integers(1, 50),
    st.floats(0, 4),
    st.floats(0, 5),
    st.sampled_from([ANSWERED, ANSWERED, ANSWERED, REFUSED, CANCELLED, OPEN]),
)


@given(st.lists(request_rows, max_size=40), st.floats(0, 60))
def test_summary_metrics_equal_a_plain_loop_over_requests(rows: list[Row], warm_up_s: float) -> None:
    result = result_of(rows)
    summary = summarise(result, warm_up_s)
    records = result.records
    met = judged = 0
    ttfts, tpots, e2es, tokens = [], [], [], 0
    for i in range(len(records)):
        if records.arrival_s[i] < warm_up_s:
            continue
        slo = SLOS[MODELS[records.model[i]]]
        ttft_s = records.first_token_s[i] - records.arrival_s[i]
        steps = records.streamed_tokens[i] - 1
        tokens += int(records.streamed_tokens[i])
        if not isnan(ttft_s):
            ttfts.append(ttft_s)
        if records.outcome[i] == ANSWERED:
            judged += 1
            tpot_s = (records.finish_s[i] - records.first_token_s[i]) / steps if steps else 0.0
            met += ttft_s <= slo.ttft_s and tpot_s <= slo.tpot_s
            tpots += [tpot_s] if steps else []
            e2es.append(records.finish_s[i] - records.arrival_s[i])
        elif records.outcome[i] == REFUSED or (
            records.outcome[i] == OPEN and result.end_s - records.arrival_s[i] > slo.ttft_s
        ):
            judged += 1
    total_summary = summary.total
    assert total_summary.attainment == (met / judged if judged else None)
    assert total_summary.output_tokens == tokens
    for spread, values in (
        (total_summary.ttft_s, ttfts),
        (total_summary.tpot_s, tpots),
        (total_summary.e2e_s, e2es),
    ):
        if not values:
            assert spread is None
            continue
        assert spread is not None
        assert spread.count == len(values)
        assert spread.mean == pytest.approx(np.mean(values))
        assert spread.p90 == pytest.approx(np.quantile(values, 0.9))
    assert total_summary.requests == sum(model.requests for model in summary.models)
    for name in ("answered", "refused", "cancelled", "open"):
        assert getattr(total_summary.outcomes, name) == sum(
            getattr(model.outcomes, name) for model in summary.models
        )
    assert sum(total_summary.outcomes.refusals.values()) == total_summary.outcomes.refused
    assert codec.loads(RunSummary, summary.to_json(), format_name=FORMAT, version=VERSION) == summary


def test_attainment_includes_the_e2e_objective_where_there_is_one() -> None:
    slos = {MODELS[0]: Slo(2.0, 0.06, 0.9, e2e_s=1.55), MODELS[1]: Slo(0.8, 0.05)}
    rows: list[Row] = [
        (0.0, 0, 11, 1.0, 0.5, ANSWERED),
        (1.0, 0, 11, 1.0, 0.58, ANSWERED),  # TTFT and TPOT kept, 1.58 s in all
        (2.0, 1, 101, 0.5, 4.9, ANSWERED),  # its model promises nothing of the sort
        (3.0, 0, 1, 0.0, 0.0, REFUSED),
        (98.0, 0, 1, 0.0, 0.0, OPEN),  # 2 s old: its whole time is over, that to its first token is not
        (99.0, 0, 1, 0.0, 0.0, OPEN),
    ]
    chat, code = summarise(result_of(rows, slos=slos)).models
    assert chat.attainment == pytest.approx(1 / 4)
    assert chat.tpot_attainment == pytest.approx(2 / 4)
    assert chat.e2e_attainment == pytest.approx(1 / 4)
    assert code.attainment == 1.0
    assert code.e2e_attainment is None


@given(st.lists(request_rows, max_size=40), st.sampled_from(SCALES))
def test_attainment_scan_equals_separate_runs_at_every_scale(rows: list[Row], scale: float) -> None:
    rows = [row for row in rows if row[5] != OPEN]
    slos = {MODELS[0]: Slo(2.0, 0.06, 0.9, e2e_s=3.0), MODELS[1]: Slo(0.8, 0.05)}
    result = scan(result_of(rows, slos=slos))
    longer = {name: slo.scaled(scale) for name, slo in slos.items()}
    place, judged = SCALES.index(scale), summarise(result_of(rows, slos=longer)).total
    parts = {part.name: part for part in result.parts}
    shares = (judged.ttft_attainment, judged.tpot_attainment, judged.attainment)
    for name, share in zip(("TTFT", "TPOT", "all"), shares, strict=True):
        assert parts[name].attainment[place] == pytest.approx(share or 0.0)
    for level, least in zip(result.levels, parts["all"].least, strict=True):
        if least is not None and least > 0:
            for factor, enough in ((least * (1 + 1e-9), True), (least * (1 - 1e-9), False)):
                strict = {name: slo.scaled(factor) for name, slo in slos.items()}
                share = summarise(result_of(rows, slos=strict)).total.attainment
                assert share is not None
                assert (share >= level - 1e-9) == enough


def test_summary_metrics_equal_hand_counts() -> None:
    rows: list[Row] = [
        (0.0, 0, 11, 1.0, 0.5, ANSWERED),  # TTFT 1 <= 2, TPOT 0.05 <= 0.06
        (10.0, 0, 11, 1.0, 0.7, ANSWERED),  # TPOT 0.07
        (20.0, 0, 1, 2.5, 0.0, ANSWERED),  # TTFT 2.5; one token has no TPOT
        (40.0, 0, 1, 1.5, 0.0, ANSWERED),
        (50.0, 0, 5, 1.0, 0.0, CANCELLED),
        (80.0, 0, 1, 0.0, 0.0, REFUSED),
    ]
    summary = summarise(result_of(rows))
    (chat, _) = summary.models
    assert chat.attainment == pytest.approx(2 / 5)
    assert chat.ttft_attainment == pytest.approx(3 / 5)
    assert chat.tpot_attainment == pytest.approx(3 / 5)
    assert chat.holds is False
    assert chat.goodput_per_s == pytest.approx(2 / 80)
    assert chat.goodput_tokens_per_s == pytest.approx((11 + 1) / 80)
    assert chat.rate_per_s == pytest.approx(6 / 80)
    assert chat.throughput_per_s == pytest.approx(4 / 100)
    assert chat.outcomes.refusals == {REASONS[1]: 1}
    assert chat.tpot_s is not None
    assert chat.tpot_s.count == 2
    assert summary.cost_usd == pytest.approx(50 * 0.01 + 50 * 0.02)
    assert summary.output_tokens_per_usd == pytest.approx((11 + 11 + 1 + 1 + 5) / 1.5)
    assert summary.met_per_usd == pytest.approx(2 / 1.5)
    late = summarise(result_of(rows), warm_up_s=40.0)
    assert late.total.requests == 3
    assert late.cost_usd == pytest.approx(10 * 0.01 + 50 * 0.02)
    assert late.total.attainment == pytest.approx(1 / 2)


def test_requests_without_objectives_are_not_judged() -> None:
    summary = summarise(result_of([(0.0, 0, 3, 9.0, 9.0, ANSWERED)], slos={}))
    assert summary.total.attainment is None
    assert summary.total.goodput_per_s is None
    assert summary.met_per_usd is None
    assert [model.model for model in summary.models] == ["chat"]
    assert not judge(result_of([(0.0, 0, 3, 9.0, 9.0, ANSWERED)], slos={}).records, {}, 100.0).judged.any()


def test_requests_at_one_instant_have_finite_rates() -> None:
    summary = summarise(result_of([(0.0, 0, 3, 1.0, 0.1, ANSWERED)] * 4))
    assert summary.total.rate_per_s == pytest.approx(4 / 100)


def test_summary_of_no_requests_is_empty() -> None:
    summary = summarise(result_of([]))
    assert summary.total.requests == 0
    assert summary.total.ttft_s is None
    assert summary.total.attainment is None


def test_objective_holds_at_exactly_its_attainment_share() -> None:
    slo = {MODELS[0]: Slo(2.0, 1.0, 0.5)}
    rows: list[Row] = [(0.0, 0, 1, 1.0, 0.0, ANSWERED), (1.0, 0, 1, 3.0, 0.0, ANSWERED)]
    assert summarise(result_of(rows, slos=slo)).models[0].holds is True
    assert summarise(result_of([*rows, rows[1]], slos=slo)).models[0].holds is False


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=200), st.integers(1, 4))
def test_inter_token_latency_quantiles_are_within_one_histogram_bin(gaps: list[float], replicas: int) -> None:
    width = 2 ** (1 / 16)
    made = made_result(10, replicas)
    edges: list[dict[float, float]] = [{} for _ in range(replicas)]
    for i, gap in enumerate(gaps):
        edge = float(width ** np.ceil(np.log(gap) / np.log(width)))
        edges[i % replicas][edge] = edges[i % replicas].get(edge, 0.0) + 1
    held = [replace(one, gaps=tuple(h.items())) for one, h in zip(made.replicas, edges, strict=True)]
    spread = gap_spread(merge_gaps(held))
    assert spread is not None
    assert spread.count == len(gaps)
    for level, result in ((0.5, spread.p50), (0.9, spread.p90), (0.99, spread.p99)):
        exact = float(np.quantile(gaps, level, method="inverted_cdf"))
        assert exact <= result * (1 + 1e-9)
        assert result <= exact * width * (1 + 1e-9)
    assert spread.mean <= np.mean(gaps) * width * (1 + 1e-9)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=6), st.floats(0, 100), st.floats(0, 100)
)
def test_cost_is_the_integral_of_the_rates(changes: list[tuple[float, float]], a: float, b: float) -> None:
    rates = sorted(changes)
    start_s, end_s = min(a, b), max(a, b)
    marks = sorted({start_s, end_s, *(at for at, _ in rates if start_s < at < end_s)})
    total = 0.0
    for left, right in pairwise(marks):
        middle = (left + right) / 2
        held = [rate for at, rate in rates if at <= middle]
        total += (right - left) * (held[-1] if held else 0.0) / 3600
    assert cost_between(rates, start_s, end_s) == pytest.approx(total, abs=1e-9)


def test_hardware_utilization_is_summarised_by_node_type() -> None:
    result = made_result(500, 4)
    summary = summarise(result)
    by_node = {one.nodes: one for one in summary.hardware}
    assert set(by_node) == {"8xH100", "2xL40S"}
    assert by_node["8xH100"].gpus == 16
    assert sum(one.replicas for one in summary.hardware) == 4
    end_s = result.end_s
    there = [0.98 * end_s, 0.94 * end_s]  # replicas 0 and 2 are ready from 2 % and 6 % on
    assert by_node["2xL40S"].busy_share == pytest.approx(0.8 * end_s / sum(there))
    assert by_node["2xL40S"].lost == 0
    assert summary.links[0].mean_share == pytest.approx(
        result.links[0].sent_bytes * 8 / 25e9 / end_s, rel=1e-9
    )
