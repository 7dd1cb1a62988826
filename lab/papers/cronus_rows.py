"""CRONUS's rows: Table 2 and what the text says of Figure 4, the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from papers import cronus_beyond, cronus_curves, cronus_parts
from papers.cronus import (
    APPROACHES,
    CRONUS,
    DP,
    FITTED_HOST_S,
    HIGH_LOW,
    LOW_HIGH,
    OLD_HOST,
    PP,
    SERIAL_PP,
    SETTINGS,
    Latency,
    RequestLengthList,
    Setting,
    latency,
    throughput_per_s,
)
from papers.rows import ProgressReporter, Reproduction, Row, Rows, inversions, quiet
from potluck.perf.timers.engine_host import DEFAULT_HOST

EASY, BUSY = "easy", "busy"
"""Two rates for latencies: one that all five approaches sustain, one that all but Disagg. H-L do."""
EASY_SHARE, BUSY_SHARE = 0.7, 0.8  # Of the throughput of the slowest of them.
Throughputs = Mapping[str, Mapping[str, float]]  # Setting to approach to requests a second.
Claim = tuple[str, str, str, float]
"""Metric (ttft, tbt), other approach, low-end GPU ("" for any), the published largest reduction."""
CLAIMS: tuple[Claim, ...] = (
    ("ttft", DP, "A10", 0.55),
    ("ttft", DP, "A30", 0.26),
    ("ttft", LOW_HIGH, "", 0.84),
    ("ttft", PP, "", 0.58),
    ("tbt", PP, "", 0.70),
    ("tbt", DP, "", 0.63),
    ("tbt", HIGH_LOW, "", 0.51),
)
BEST = (("ttft", HIGH_LOW), ("tbt", LOW_HIGH))
"""Metric and the one approach that the paper says is better than Cronus in it."""
WHY = {
    PP: "hardly depends on GPU or model in the paper, so something we do not model sets it",
    HIGH_LOW: "A10 was never measured: its times are carried over from A40's",
}


@dataclass(frozen=True, slots=True)
class CronusMeasured:
    """All that was run."""

    fitted: Throughputs
    plain: Throughputs  # With the host time of today's engines: nothing fitted.
    old: Throughputs  # With that of engines of its time.
    serial_per_s: Mapping[str, float]  # A pipeline that works on one batch at a time.
    latencies: Mapping[tuple[str, str, str], Latency]
    """(setting, rate, approach); approaches that do not sustain a rate are left out."""

    def reduction(self, setting: str, rate: str, metric: str, other: str) -> float | None:
        """By how much Cronus's figure is below another's, as a share of it; None where that was not run."""
        mine, theirs = (self.latencies.get((setting, rate, item)) for item in (CRONUS, other))
        if mine is None or theirs is None:
            return None
        return 1.0 - _p99(mine, metric) / _p99(theirs, metric)


def measure(
    requests: RequestLengthList,
    report_progress: ProgressReporter = quiet,
    settings: tuple[Setting, ...] = SETTINGS,
    *,
    fitted_only: bool = False,
) -> CronusMeasured:
    """Run everything, or only what the fitted host time is used for."""
    fitted, serial, result = {}, {}, {}
    plain: dict[str, dict[str, float]] = {}
    old: dict[str, dict[str, float]] = {}
    for setting in settings:
        report_progress(f"CRONUS, {setting.name}: throughput")
        name = setting.name
        fitted[name] = {item: throughput_per_s(setting, item, requests) for item in APPROACHES}
        if not fitted_only:
            for values, host in ((plain, DEFAULT_HOST), (old, OLD_HOST)):
                values[name] = {item: throughput_per_s(setting, item, requests, host) for item in APPROACHES}
            serial[name] = throughput_per_s(setting, SERIAL_PP, requests)
        report_progress(f"CRONUS, {setting.name}: latencies")
        for rate, rate_per_s in rates_per_s(fitted[name]).items():
            for approach in APPROACHES:
                if fitted[name][approach] > rate_per_s:
                    result[name, rate, approach] = latency(setting, approach, requests, rate_per_s)
    return CronusMeasured(fitted, plain, old, serial, result)


def rates_per_s(throughputs: Mapping[str, float]) -> dict[str, float]:
    """At which latencies are compared."""
    slowest = min(throughputs.values())
    others = min(rate for approach, rate in throughputs.items() if approach != HIGH_LOW)
    return {EASY: EASY_SHARE * slowest, BUSY: BUSY_SHARE * others}


def largest_reduction(measured: CronusMeasured, metric: str, other: str, low: str) -> float | None:
    """Over settings with that low-end GPU and both rates: the paper's "up to"; None where none was run."""
    names = [
        setting.name for setting in SETTINGS if setting.name in measured.fitted and low in ("", setting.low)
    ]
    result = [measured.reduction(name, rate, metric, other) for name in names for rate in (EASY, BUSY)]
    return max((item for item in result if item is not None), default=None)


def order_inversions(measured: CronusMeasured, without: str = "", tie: float = 0.0) -> int:
    """Pairs of approaches that come out the other way round than in Table 2, over all settings.

    Those that the paper has within `tie` of each other do not count.
    """
    total = 0
    for setting in SETTINGS:
        ours = {a: v for a, v in measured.fitted.get(setting.name, {}).items() if a != without}
        published = {a: v for a, v in setting.published_per_s.items() if a in ours}
        total += len(inversions(published, ours, tie))
    return total


def reproduce(
    requests: RequestLengthList, report_progress: ProgressReporter = quiet, quick: bool = False
) -> Reproduction:
    measured, some = measure(requests, report_progress), SETTINGS[:1] if quick else SETTINGS
    report_progress("CRONUS, Table 3 and the predictors")
    fits, plots = cronus_parts.predictors()
    made = [*cronus_parts.guesses(some, requests), *cronus_parts.table_3(some, requests), *fits]
    report_progress("CRONUS, its limitation")
    made += cronus_beyond.limitation(quick)
    report_progress("CRONUS, curves of Figure 4")
    shares = cronus_curves.SHARES[1::2] if quick else cronus_curves.SHARES
    drawn = cronus_curves.curves(some, measured.fitted, requests, shares)
    return Reproduction("CRONUS", (*rows(measured, requests), *made), (*drawn, *plots))


def rows(measured: CronusMeasured, requests: RequestLengthList) -> tuple[Row, ...]:
    """Table 2 twice, then latencies."""
    return (*_throughput_rows(measured, requests), *_latency_rows(measured))


def _throughput_rows(measured: CronusMeasured, requests: RequestLengthList) -> list[Row]:
    figure = "max throughput, requests/s"
    throughput_rows: list[Row] = []
    fitted = f"host {FITTED_HOST_S * 1e3:g} ms a step, fitted on DP, {SETTINGS[0].name}"
    titles = [("Table 2", measured.fitted, fitted)]
    for title, values, host in (
        ("nothing fitted", measured.plain, DEFAULT_HOST),
        ("an old host", measured.old, OLD_HOST),
    ):
        basis = f"host {host.fixed_s * 1e3:g} ms a step, {host.sequence_s * 1e3:g} a sequence"
        titles.append((f"Table 2, {title}", values, basis))
    for title, values, basis in titles:
        made = Rows(title, f"{basis}; {requests.source}")
        for setting in (item for item in SETTINGS if item.name in values):
            for approach in APPROACHES:
                ours, published = values[setting.name][approach], setting.published_per_s[approach]
                why = WHY.get(approach) if abs(ours / published - 1.0) > 0.25 else None
                made.add(f"{setting.name}, {approach}", figure, published, ours, why)
        throughput_rows += made
    made = Rows("Table 2, a guess at PP", "chosen after seeing the rows above; counts in no target")
    for setting in (item for item in SETTINGS if item.name in measured.serial_per_s):
        ours = measured.serial_per_s[setting.name]
        made.add(f"{setting.name}, {SERIAL_PP}", figure, setting.published_per_s[PP], ours)
    return [*throughput_rows, *made]


def _latency_rows(measured: CronusMeasured) -> list[Row]:
    made = Rows("Figure 4", "largest over settings and the two rates; the paper prints no rates")
    for metric, other, low, published in CLAIMS:
        ours = largest_reduction(measured, metric, other, low)
        if ours is not None:
            where = f"A100+{low}" if low else "all settings"
            made.add(where, f"{metric.upper()} p99, Cronus below {other}, up to, share", published, ours)
    for (setting, rate, approach), item in measured.latencies.items():
        where = f"{setting}, {approach}, {rate}: {item.rate_per_s:.2f} requests/s"
        for metric in ("ttft", "tbt"):
            made.add(where, f"{metric.upper()} p99, s", None, _p99(item, metric), "drawn, not printed")
    return made


def wrong_directions(measured: CronusMeasured) -> list[str]:
    """Comparisons at the rates above that point the other way than the paper's text, setting by setting."""
    result = []
    for name in measured.fitted:
        for metric, other in dict.fromkeys((metric, other) for metric, other, _, _ in CLAIMS):
            result += _wrong(measured, name, metric, other, better=True)
        for metric, other in BEST:
            result += _wrong(measured, name, metric, other, better=False)
    return result


def _wrong(measured: CronusMeasured, name: str, metric: str, other: str, *, better: bool) -> list[str]:
    shown = []
    for rate in (EASY, BUSY):
        reduction = measured.reduction(name, rate, metric, other)
        if reduction is not None and (reduction > 0) != better:
            shown.append(f"{name}, {rate}: {metric} p99 against {other}: {reduction:+.0%}")
    return shown


def _p99(each: Latency, metric: str) -> float:
    return each.ttft_p99_s if metric == "ttft" else each.tbt_p99_s
