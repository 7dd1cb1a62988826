"""Rates and latencies of the last seconds, from two readings of what only grows."""

from __future__ import annotations

import pytest

from potluck.control.gateway_client import RecentMetrics, read

TEXT = """# TYPE answered_total counter
answered_total{{model="a"}} {a}
answered_total{{model="b"}} {b}
# TYPE wait_seconds histogram
wait_seconds_bucket{{le="1.0",model="a"}} {one}
wait_seconds_bucket{{le="2.0",model="a"}} {two}
wait_seconds_bucket{{le="+Inf",model="a"}} {all}
wait_seconds_sum{{model="a"}} 0
wait_seconds_count{{model="a"}} {all}
"""


def _recent(*steps: tuple[float, dict[str, int]]) -> RecentMetrics:
    recent = RecentMetrics(window_s=10.0)
    for at_s, values in steps:
        recent.add(read(TEXT.format(**values), at_s))
    return recent


def test_only_what_happened_between_counts() -> None:
    recent = _recent(
        (0.0, {"a": 100, "b": 7, "one": 50, "two": 50, "all": 50}),
        (2.0, {"a": 110, "b": 7, "one": 50, "two": 60, "all": 60}),
    )
    assert recent.per_s("answered_total", model="a") == pytest.approx(5.0)
    assert recent.per_s("answered_total") == pytest.approx(5.0)
    assert recent.per_s("answered_total", model="b") == 0.0
    assert recent.quantile("wait_seconds", 0.5, model="a") == pytest.approx(1.5)
    assert recent.quantile("wait_seconds", 0.5, model="b") is None


def test_what_is_older_than_the_window_is_forgotten_and_a_restart_counts_from_nothing() -> None:
    none = {"b": 0, "one": 0, "two": 0, "all": 0}
    recent = _recent(*((float(at), {"a": 10 * at, **none}) for at in range(30)))
    assert recent.span_s == pytest.approx(10.0)
    assert recent.per_s("answered_total", model="a") == pytest.approx(10.0)
    recent.add(read(TEXT.format(a=3, **none), 30.0))
    assert recent.grown("answered_total", model="a") == 3
    assert recent.quantile("wait_seconds", 0.9, model="a") is None


def test_what_lies_beyond_the_last_bound_is_told_as_that_bound() -> None:
    recent = _recent(
        (0.0, {"a": 0, "b": 0, "one": 0, "two": 0, "all": 0}),
        (1.0, {"a": 0, "b": 0, "one": 0, "two": 1, "all": 10}),
    )
    assert recent.quantile("wait_seconds", 0.99, model="a") == 2.0
