"""Error bars: they hold as many left-out runs as they say, grow with doubt, and come from the nearest errors."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest
from accuracy.runs import MeasuredRun
from accuracy.scores import stored_runs
from accuracy.serving import Placed, coverage, run_errors
from hypothesis import given
from hypothesis import strategies as st

from potluck.catalog import models, nodes
from potluck.perf.fits.error_bars import (
    METRICS,
    SHARES,
    ErrorBars,
    Metric,
    RunErrors,
    bar,
    bundled_bars,
    slower,
)

LLAMA, OSS = models.model("Llama-3.1-8B"), models.model("GPT-OSS-120B")


def test_bars_of_80_percent_hold_75_to_85_of_left_out_runs() -> None:
    held = stored_runs().coverage
    assert {*METRICS, *(f"{metric}, {kind}" for metric in METRICS for kind in ("dense", "experts"))} <= set(
        held
    )
    for name, share in held.items():
        assert 0.75 <= share <= 0.85, name


def test_left_out_runs_are_as_near_as_is_claimed() -> None:
    """Of H100: throughput within 10 % dense and 15 % experts, TPOT 15 %, TTFT 25 %, bias 8 % at every degree."""
    for score in stored_runs().scores:
        if score.engine:
            continue
        if score.kind:
            limits = {"rate": 0.10 if score.kind == "dense" else 0.15, "tpot": 0.15, "ttft": 0.25}
            assert score.median <= limits[score.metric], score
        elif score.metric == "rate":
            assert abs(score.bias) <= 0.08, score


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("model", [LLAMA, OSS])
def test_less_known_is_wider(metric: Metric, model: object) -> None:
    who = (metric, model, 2)
    here = bar(*who, "H100-SXM", "measured")  # type: ignore[arg-type]
    widths = [here, *(bar(*who, "L40S", each) for each in ("measured", "transferred", "assumed"))]  # type: ignore[arg-type]
    spans = [log(each.high / each.low) for each in widths]
    assert spans == sorted(spans)
    assert all(each.low < each.high for each in widths)
    assert "serving runs on H100-SXM" in here.basis


@given(st.floats(0.5, 0.98), st.floats(0.5, 0.98), st.sampled_from(["H100-SXM", "L40S", "T4"]))
def test_the_slow_end_is_slower_the_surer_one_wants_to_be(first: float, second: float, gpu: str) -> None:
    low, high = sorted((first, second))
    assert 1.0 <= slower(LLAMA, 1, gpu, "transferred", low) <= slower(LLAMA, 1, gpu, "transferred", high)


def test_the_slow_end_at_nine_in_ten_is_the_far_end_of_a_bar_of_eight() -> None:
    found = bar("rate", LLAMA, 2, "L40S", "measured")
    assert slower(LLAMA, 2, "L40S", "measured", 0.9) == pytest.approx(found.high)


def errors(kind: str, bits: int, tp: int, at: float) -> RunErrors:
    return RunErrors("rate", kind, bits, tp, 100, tuple(at * (share - 0.5) for share in SHARES))


def test_errors_are_those_of_the_nearest_group() -> None:
    known = ErrorBars(
        "H100-SXM", (errors("", 0, 0, 1.0), errors("dense", 16, 0, 0.5), errors("dense", 16, 4, 0.1)), {}
    )

    def span(model: object, tp: int) -> float:
        found = bar("rate", model, tp, "H100-SXM", "measured", bars=known)  # type: ignore[arg-type]
        return log(found.high / found.low)

    assert span(LLAMA, 4) == pytest.approx(0.08)
    assert span(LLAMA, 2) == pytest.approx(0.4)
    assert span(replace(LLAMA, weight_bits=8.0), 4) == span(OSS, 4) == pytest.approx(0.8)


def test_rates_and_prices_go_the_other_way() -> None:
    found = bar("rate", LLAMA, 1, "H100-SXM", "measured")
    slow, fast = found.around_rate(10.0)
    assert slow == pytest.approx(10.0 / found.high)
    assert fast == pytest.approx(10.0 / found.low)
    assert found.around(2.0) == pytest.approx((2.0 * found.low, 2.0 * found.high))


def runs(count: int) -> list[Placed]:
    node = nodes.node_type("8xH100-SXM")
    made = [
        MeasuredRun("m", "H100-SXM", 1, "", "none", "vllm", "1", 100 + i // 4, 100, 1 + i % 4, 0.1, 0.01, 1.0)
        for i in range(count)
    ]
    return [Placed(run, LLAMA, node) for run in made]


def test_coverage_is_of_runs_that_made_no_bar() -> None:
    placed = runs(800)
    ratios = np.random.default_rng(0).normal(0.0, 0.1, (len(METRICS), len(placed)))
    assert coverage(placed, ratios)["rate"] == pytest.approx(0.8, abs=0.04)


def test_a_group_with_too_few_runs_has_no_bar_of_its_own() -> None:
    few = run_errors(runs(20), np.zeros((len(METRICS), 20)))
    assert {(each.kind, each.bits, each.tp) for each in few} == {("", 0, 0)}
    assert bundled_bars().gpu == "H100-SXM"
