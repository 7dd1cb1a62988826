"""CAUCHY's rows: Table 3 and Figure 9, and then all its other experiments, the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from papers import cauchy_migration, cauchy_trace
from papers.cauchy import (
    DECODES,
    LATENCY_SHARE,
    LOADS,
    PRICES_USD_PER_H,
    QUICK,
    Effort,
    Latencies,
    figure9_latencies,
    goodput_per_s,
    latencies,
    table3_policy,
    table3_problem,
)
from papers.cauchy_migration import TYPES
from papers.cauchy_programs import (
    MODELLED,
    PROFILED,
    PROFILING,
    Goodputs,
    figure_8,
    model_goodputs,
    own_figures,
    profile,
    profiles,
)
from papers.cronus import OLD_HOST
from papers.rows import ProgressReporter, Reproduction, Row, Rows, quiet

SHAREGPT = LOADS[1]


@dataclass(frozen=True, slots=True)
class Published:
    """A pair of rows of Table 3: round robin, opportunistic."""

    ce_ktokens_per_usd: tuple[float, float]
    goodput_per_s: tuple[float, float]
    e2e_s: tuple[float, float]
    ttft_s: tuple[float, float]
    tbt_s: tuple[float, float]


TABLE3: Mapping[int, Published] = {
    1: Published((1505.23, 1636.24), (2.14, 2.32), (22.03, 20.16), (0.23703, 0.21909), (0.01592, 0.01474)),
    2: Published((1525.31, 1630.15), (2.90, 3.14), (17.75, 16.38), (0.23035, 0.20083), (0.01284, 0.01200)),
    3: Published((1231.35, 1329.15), (2.96, 3.22), (14.56, 14.47), (0.22155, 0.22110), (0.01051, 0.01050)),
}
FIGURE9: Mapping[tuple[str, str], float] = {("longwriter", "round-robin"): -0.254}
"""(workload, against): printed changes of the mean latency with turns by goodput."""
FIGURE9_TEXT: Mapping[tuple[str, str], str] = {
    ("dailymail", "token"): "the paper says 3 to 6 % lower",
    ("sharegpt", "token"): "the paper says within 1 %",
    ("longwriter", "token"): "the paper says 3 to 6 % lower",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """One combo of Table 3 under both policies."""

    goodput_per_s: tuple[float, float]
    latencies: tuple[Latencies, Latencies]
    rate_per_s: float  # Of the latencies.


@dataclass(frozen=True, slots=True)
class CauchyMeasured:
    """All that was run."""

    table3: Mapping[int, Pair]
    figure9: Mapping[str, tuple[float, Mapping[str, Latencies]]]

    def goodput_change(self, decodes: int) -> float:
        return _change(self.table3[decodes].goodput_per_s)

    def latency_change(self, decodes: int, metric: str) -> float:
        basic, other = self.table3[decodes].latencies
        return _change((getattr(basic, metric), getattr(other, metric)))

    def figure9_change(self, load: str, against: str) -> float:
        """Of the mean latency, with turns by goodput."""
        result = self.figure9[load][1]
        return _change((result[against].e2e_s, result["goodput"].e2e_s))


def measure(effort: Effort, report_progress: ProgressReporter = quiet, quick: bool = False) -> CauchyMeasured:
    """Run everything, or the least that has all kinds of rows."""
    pairs, spread = {}, {}
    for decodes in DECODES[:2] if quick else DECODES:
        report_progress(f"CAUCHY, Table 3, 1P{decodes}D")
        problem = table3_problem(decodes)
        basic, other = (goodput_per_s(problem, SHAREGPT, table3_policy(way), effort) for way in (False, True))
        rate_per_s = LATENCY_SHARE * basic
        both = [latencies(problem, SHAREGPT, table3_policy(way), rate_per_s, effort) for way in (False, True)]
        pairs[decodes] = Pair((basic, other), (both[0], both[1]), rate_per_s)
    for load in LOADS[2:] if quick else LOADS:
        report_progress(f"CAUCHY, Figure 9, {load.name}")
        spread[load.name] = figure9_latencies(load, effort)
    return CauchyMeasured(pairs, spread)


def reproduce(
    effort: Effort, folder: Path | None, quick: bool, report_progress: ProgressReporter = quiet
) -> Reproduction:
    """Its traces are Azure's: without the data, Figures 6, 7 and 10 are left out."""
    made = list(rows(measure(effort, report_progress, quick)))
    report_progress("CAUCHY, Table 3 as LongWriter")
    made += as_longwriter(DECODES[:1] if quick else DECODES, QUICK if quick else PROFILING)
    report_progress("CAUCHY, Figure 2")
    made += cauchy_migration.figure_2(TYPES[:1] if quick else TYPES, QUICK if quick else PROFILING)
    goodputs: dict[str, dict[str, Goodputs]] = {MODELLED: {load.name: model_goodputs(load) for load in LOADS}}
    if not quick:
        goodputs[PROFILED] = {}
        for load in LOADS:
            report_progress(f"CAUCHY, goodputs of its candidates, {load.name}")
            goodputs[PROFILED][load.name] = profile(load)
    report_progress("CAUCHY, Figures 8 and 11")
    made += [
        *profiles(goodputs),
        *figure_8(goodputs, {MODELLED: (1.0,), PROFILED: (1.0, 3.0)}),
        *own_figures(),
    ]
    figure_11, plots = cauchy_migration.figure_11()
    rates = cauchy_trace.minute_rates(folder)
    if rates is not None:
        served = {}
        for load in LOADS[2:] if quick else LOADS:
            report_progress(f"CAUCHY, Azure's trace, {load.name}")
            known = goodputs[MODELLED if quick else PROFILED][load.name]
            served[load.name] = cauchy_trace.measure(
                load, known, rates[:10] if quick else rates, effort.seeds[0]
            )
        made += cauchy_trace.figures(served)
    return Reproduction("CAUCHY", (*made, *figure_11), plots)


def as_longwriter(decodes: Sequence[int], effort: Effort) -> list[Row]:
    """Table 3 with the lengths that its latencies tell of and the host of its time; all at 1P1D's printed goodput."""
    rate_per_s = TABLE3[1].goodput_per_s[0]
    host = f"host {OLD_HOST.fixed_s * 1e3:g} ms a step and {OLD_HOST.sequence_s * 1e3:g} a sequence"
    note = (
        f"latencies at {rate_per_s} requests/s, {host}, nothing fitted; more decode replicas raise the goodput here "
        "and hardly there, where the first token of a prompt of 337 tokens takes 0.2 s, so that its one prefill "
        "replica, one prompt at a time, could do no more than 4 or 5 requests/s; work in place also gains more here"
    )
    made = Rows("Table 3, as LongWriter", note)
    for count, (place, way) in product(decodes, enumerate(("round robin", "opportunistic"))):
        problem, policy, stated = (
            table3_problem(count, 2, OLD_HOST),
            table3_policy(bool(place)),
            TABLE3[count],
        )
        item = latencies(problem, LOADS[2], policy, rate_per_s, effort)
        rate = goodput_per_s(problem, LOADS[2], policy, effort)
        for figure, theirs, ours in (
            ("max goodput, requests/s", stated.goodput_per_s, rate),
            ("mean E2E latency, s", stated.e2e_s, item.e2e_s),
            ("mean TTFT, s", stated.ttft_s, item.ttft_s),
            ("mean TBT, s", stated.tbt_s, item.tbt_s),
        ):
            made.add(f"1P{count}D, {way}", figure, theirs[place], ours)
    return made


def rows(measured: CauchyMeasured) -> tuple[Row, ...]:
    result: list[Row] = []
    for decodes, pair in measured.table3.items():
        result += _table3_rows(decodes, pair)
    lengths = Rows(
        "Table 3, answers", "by its own E2E, TTFT and TBT; ours is the mean of ShareGPT, which it names"
    )
    for decodes, stated in TABLE3.items():
        for place, way in enumerate(("round robin", "opportunistic")):
            tokens = (stated.e2e_s[place] - stated.ttft_s[place]) / stated.tbt_s[place] + 1
            lengths.add(
                f"1P{decodes}D, {way}", "length of an answer, tokens", tokens, SHAREGPT.mean_tokens[1]
            )
    made = Rows("Figure 9", "drawn, not printed")
    for load, (rate_per_s, by_balance) in measured.figure9.items():
        where = f"{load}, {rate_per_s:.3g} requests/s"
        for balance, item in by_balance.items():
            made.add(f"{where}, {balance}", "mean E2E latency, s", None, item.e2e_s)
        for against in (name for name in by_balance if name != "goodput"):
            ours, published = measured.figure9_change(load, against), FIGURE9.get((load, against))
            figure = f"mean E2E latency, goodput against {against}, change"
            made.add(where, figure, published, ours, FIGURE9_TEXT.get((load, against), ""))
    return (*result, *lengths, *made)


def _table3_rows(decodes: int, pair: Pair) -> list[Row]:
    published = TABLE3[decodes]
    tokens = sum(SHAREGPT.mean_tokens)
    usd_per_h = PRICES_USD_PER_H["1xH800"] + decodes * PRICES_USD_PER_H["1xH20"]
    ce = tuple(rate * tokens * 3.6 / usd_per_h for rate in pair.goodput_per_s)
    basic, other = pair.latencies
    at = f"at {pair.rate_per_s:.3g} requests/s for both"
    figures = (
        ("max CE", "thousand tokens/USD", published.ce_ktokens_per_usd, (ce[0], ce[1]), "at that goodput"),
        ("max goodput", "requests/s", published.goodput_per_s, pair.goodput_per_s, "90 % within 5 s, 30 ms"),
        ("mean E2E latency", "s", published.e2e_s, (basic.e2e_s, other.e2e_s), at),
        ("mean TTFT", "s", published.ttft_s, (basic.ttft_s, other.ttft_s), at),
        ("mean TBT", "s", published.tbt_s, (basic.tbt_s, other.tbt_s), at),
    )
    made = Rows("Table 3")
    for metric, unit, theirs, ours, note in figures:
        for place, way in enumerate(("round robin", "opportunistic")):
            made.add(f"1P{decodes}D, {way}", f"{metric}, {unit}", theirs[place], ours[place], note)
        label = f"{metric}, opportunistic against round robin, change"
        made.add(f"1P{decodes}D", label, _change(theirs), _change(ours), note)
    return made


def _change(pair: tuple[float, float]) -> float:
    before, after = pair
    return after / before - 1.0
