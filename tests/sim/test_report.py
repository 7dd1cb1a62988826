"""The HTML report of a simulation: complete, small, self-contained, escaped."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from generated_results import MODELS, made_replica, made_result
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.figures import digits, seconds
from potluck.sim.results.metrics import summarise
from potluck.sim.results.records import OPEN, SimResult
from potluck.sim.results.report.charts import log_ticks, moment, nice_ticks, short, time_ticks
from potluck.sim.results.report.html_report import html
from potluck.sim.results.series import BINS, ROWS, bands, curve, series

VOID = {"meta", "br", "path", "rect"}


class Page(HTMLParser):
    """Checks that tags close in order, and collects text, attributes and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID or (tag in ("path", "rect") and not self.get_starttag_text().endswith("/>")):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)


def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


def report(result: SimResult, title: str = "A run") -> str:
    return html(summarise(result), result, title)


def test_report_has_every_section_and_closes_every_tag() -> None:
    text = " ".join(parsed(report(made_result(3000, 9))).text)
    titles = "Models, Latency, Rate and goodput, Replicas, Utilization, Queue, Links, Cost, Faults, Hardware"
    for words in f"{titles}, TTFT, TPOT, TBT, end to end, SLO attainment, Goodput".split(", "):
        assert words in text
    assert "replica <4> lost" in text


def test_report_loads_no_external_resources() -> None:
    text = report(made_result(500, 3))
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
    for word in ("src=", "href=", "@import", "url(", "fetch(", "XMLHttpRequest", "import("):
        assert word not in text


def test_report_drawing_has_only_finite_numbers() -> None:
    for name, value in parsed(report(made_result(500, 12))).attributes:
        if name in ("d", "x", "y", "width", "height", "viewbox"):
            assert not re.search(r"nan|inf|none", value.lower()), (name, value)


@pytest.mark.parametrize(("requests", "replicas"), [(100_000, 1000), (2000, ROWS), (2000, ROWS + 1)])
def test_report_stays_below_one_megabyte_for_large_runs(requests: int, replicas: int) -> None:
    assert len(report(made_result(requests, replicas)).encode()) < 1_000_000
    run_series = series(made_result(1000, replicas))
    assert len(run_series.bands) <= ROWS
    assert run_series.utilisation is not None
    assert len(run_series.utilisation.cells) <= ROWS + 4


def test_report_escapes_names() -> None:
    bad = "</title><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
    made = made_result(300, 3)
    replicas = tuple(replace(one, id=bad + one.id, region=bad, model=bad) for one in made.replicas)
    links = tuple(replace(link, source=bad) for link in made.links)
    records = replace(made.records, models=(bad, MODELS[1]))
    slos = {bad: made.slos[MODELS[0]], MODELS[1]: made.slos[MODELS[1]]}
    page = parsed(report(replace(made, replicas=replicas, links=links, records=records, slos=slos), bad))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert any(bad in text for text in page.text)
    assert any(name == "title" and bad in value for name, value in page.attributes)


def test_report_is_drawn_for_runs_with_missing_parts() -> None:
    made = made_result(300, 3)
    nothing = replace(
        made.records, outcome=np.full(300, OPEN, dtype=np.int8), first_token_s=np.full(300, np.nan)
    )
    for result in (
        replace(made, samples=None, faults=(), links=()),
        replace(made, slos={}),
        replace(made, replicas=()),
        replace(made, records=nothing),
        replace(made, cost_rates=()),
        made_result(1, 1),
        made_result(2, 1),
    ):
        parsed(report(result))


def test_report_of_the_same_run_has_the_same_bytes() -> None:
    assert report(made_result(400, 5)) == report(made_result(400, 5))


def test_report_series_count_every_request_and_cost() -> None:
    result = made_result(5000, 6)
    run_series = series(result)
    width_s = run_series.edges_s[1]
    assert len(run_series.edges_s) == BINS + 1
    assert sum(run_series.arrivals_per_s.values) * width_s == pytest.approx(5000)
    assert sum(run_series.refused_per_s.values) * width_s == pytest.approx(
        int((result.records.outcome == 2).sum())
    )
    assert run_series.goodput_per_s is not None
    met = (summarise(result).total.attainment or 0) * 5000
    assert sum(run_series.goodput_per_s.values) * width_s == pytest.approx(met)
    assert run_series.cost_usd[-1] == pytest.approx(result.cost_usd)
    assert sum(run_series.cost_usd_per_h) / 3600 * width_s == pytest.approx(result.cost_usd)


def test_report_utilization_cells_add_up_to_the_busy_time() -> None:
    result = made_result(2000, 6, samples=37)
    heat_map = series(result).utilisation
    assert heat_map is not None
    assert result.samples is not None
    for row, replica in enumerate(result.replicas):
        cells = heat_map.cells[row]
        late = [
            cell
            for cell, there in zip(cells, range(len(cells)), strict=True)
            if there > 20 and cell is not None
        ]
        assert all(0 <= cell <= 1 for cell in late)
        ready_s = replica.ready_s or 0.0
        absent = int(ready_s / result.end_s * BINS)
        assert all(cell is None for cell in cells[:absent])
    whole = [cell or 0.0 for cell in heat_map.cells[1]]
    ready = int((result.replicas[1].ready_s or 0) / result.end_s * BINS)
    busy_s = result.samples.busy_s[:, 1]
    skipped_s = float(
        np.interp(
            ready * result.end_s / BINS,
            np.concatenate(([0.0], result.samples.at_s)),
            np.concatenate(([0.0], busy_s)),
        )
    )
    assert sum(whole) * result.end_s / BINS == pytest.approx(float(busy_s[-1]) - skipped_s, rel=0.01)


def test_report_bands_follow_the_states_of_a_replica() -> None:
    life = bands([made_replica(4, 100.0)], 100.0)[0]
    assert life.spans == ((0.0, 2.0, "starting", "decode"), (2.0, 60.0, "ready", "decode"))
    assert life.lost_s == 60.0
    flipped = bands([made_replica(6, 100.0)], 100.0)[0]
    assert [span[2:] for span in flipped.spans] == [
        ("starting", "prefill"),
        ("ready", "prefill"),
        ("ready", "decode"),
        ("draining", "prefill"),
    ]
    assert flipped.spans[-1][1] == 75.0
    many = [made_replica(index, 100.0) for index in range(200)]
    shown = {band.label for band in bands(many, 100.0, 40)}
    assert len(shown) == 40
    most = sorted(many, key=lambda one: -len(one.changes))[:10]
    assert {one.id for one in most} <= shown


def test_report_curve_equals_the_value_distribution() -> None:
    values = np.random.default_rng(0).lognormal(0, 1, 10_000)
    for x, share in curve(values):
        assert (values <= x).mean() == pytest.approx(share, abs=2e-4)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 12))
def test_axis_ticks_are_few_and_inside_the_range(low: float, span: float, about: int) -> None:
    span = max(span, abs(low) * 1e-8)  # a finer axis would be finer than numbers of that size are
    high = low + span
    ticks = nice_ticks(low, high, about)
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in ticks)
    assert len(ticks) <= about * 1.01 + 2


@given(st.floats(1e-5, 1e3), st.floats(1.5, 1e5))
def test_logarithmic_axis_ticks_are_inside_the_range(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert ticks
    assert ticks == sorted(ticks)
    assert all(low * 0.99 <= tick <= low * factor * 1.01 for tick in ticks)


@given(st.floats(1e-3, 1e7))
def test_time_axis_ticks_are_few_distinct_and_inside_the_run(end_s: float) -> None:
    ticks = time_ticks(end_s)
    assert 1 <= len(ticks) <= 13
    assert len({label for _, label in ticks}) == len(ticks)
    assert all(0 <= tick[0] <= end_s * (1 + 1e-9) for tick in ticks)


def test_report_numbers_are_formatted_with_units() -> None:
    assert [moment(at) for at in (0, 45, 60, 150, 5400, 86400, 90000)] == [
        "0", "45 s", "1 min", "2:30 min", "1:30 h", "1 d", "1:01 d",
    ]  # fmt: skip
    assert [seconds(at) for at in (2e-5, 0.0123, 0.9997, 61.0, 600.0, 9000.0)] == [
        "20.0 µs", "12.3 ms", "1.00 s", "61.0 s", "10.0 min", "2.50 h",
    ]  # fmt: skip
    assert [short(text) for text in ("50.0 ms", "2.00 s", "0.5", "1,000", "2.50 h")] == [
        "50 ms", "2 s", "0.5", "1,000", "2.5 h",
    ]  # fmt: skip
    assert digits(0) == "0"
