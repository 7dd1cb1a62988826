"""Puts the page together: head line, main figures, tables, plots. Names are escaped wherever they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from potluck.core.figures import digits, seconds, usd
from potluck.runtime import base_css
from potluck.sim.results.metrics import LatencySpread, ModelSummary, RunSummary
from potluck.sim.results.records import SimResult
from potluck.sim.results.report import charts
from potluck.sim.results.report.charts import moment
from potluck.sim.results.series import RunSeries, series

PARTS = ("mean", "p50", "p90", "p99")


THEME = '<button id="theme" type="button" aria-label="Switch between light and dark">◐</button>'
"""What the page's script listens to."""


def html(summary: RunSummary, result: SimResult, title: str = "Potluck simulation") -> str:
    return page(summary, series(result), title)


def page(summary: RunSummary, run_series: RunSeries, title: str = "Potluck simulation") -> str:
    return sheet(
        title,
        f"{_header(summary, title)}\n<main>\n{_tiles(summary)}\n{_models(summary)}\n"
        f"{_plots(run_series)}\n{_hardware(summary)}\n{_events(run_series)}\n</main>\n",
    )


def sheet(title: str, body: str) -> str:
    style, script = (_data(name) for name in ("style.css", "page.js"))
    style = base_css() + style
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}"
        f'<div id="tip" role="status" hidden></div>\n<script>\n{script}</script>\n</body>\n</html>\n'
    )


def _data(name: str) -> str:
    return resources.files("potluck.sim.results.report").joinpath("data", name).read_text(encoding="utf-8")


def _header(summary: RunSummary, title: str) -> str:
    total_summary = summary.total
    facts = [
        f"{total_summary.requests:,} requests",
        f"{seconds(summary.end_s)} simulated",
        f"{summary.replicas:,} replica{'s' if summary.replicas != 1 else ''}",
        f"seed {summary.seed}",
    ]
    if summary.start_s > 0:
        facts.append(f"the first {seconds(summary.start_s)} left out of figures")
    return f"<header><h1>{escape(title)}</h1><p>{' · '.join(facts)}</p>{THEME}</header>"


def _tiles(summary: RunSummary) -> str:
    total_summary = summary.total
    outcomes = total_summary.outcomes
    tiles = [_attainment_tile(summary)]
    offered = f"of {digits(total_summary.rate_per_s)} offered"
    name, rate = "Goodput", total_summary.goodput_per_s
    if rate is None:
        name, rate = "Throughput", total_summary.throughput_per_s
    tiles.append(_tile(name, digits(rate), "requests/s", offered))
    for label, spread in (("TTFT p99", total_summary.ttft_s), ("TPOT p99", total_summary.tpot_s)):
        if spread is not None:
            value, unit = seconds(spread.p99).split(" ")
            tiles.append(_tile(label, value, unit, f"median {seconds(spread.p50)}"))
    if summary.output_tokens_per_usd is not None:
        value, unit = _large(summary.output_tokens_per_usd)
        tokens_per_s = f"{digits(total_summary.output_tokens_per_s)} tokens/s"
        tiles.append(_tile("Output per dollar", value, f"{unit}tokens", tokens_per_s))
    tiles.append(_tile("Cost", usd(summary.cost_usd_per_h), "an hour", f"{usd(summary.cost_usd)} in all"))
    gpu_h = sum(one.gpu_h for one in summary.hardware)
    if gpu_h > 0:
        busy = sum(one.busy_share * one.gpu_h for one in summary.hardware) / gpu_h
        tiles.append(
            _tile("GPUs with a step", digits(busy * 100), "%", f"of {digits(gpu_h)} GPU-hours, full or not")
        )
    lost = outcomes.refused + outcomes.cancelled + outcomes.open
    why = ", ".join(f"{reason.replace('_', ' ')} {n:,}" for reason, n in outcomes.refusals.items())
    note = f"{outcomes.refused:,} refused{f' ({why})' if why else ''}, {outcomes.cancelled:,} cancelled"
    tiles.append(_tile("Not answered", f"{lost:,}", "", note, "bad" if outcomes.refused else ""))
    return f'<section class="figures">{"".join(tiles)}</section>'


def _attainment_tile(summary: RunSummary) -> str:
    total_summary = summary.total
    if total_summary.attainment is None:
        share = (
            _exact_percent(total_summary.outcomes.answered / total_summary.requests)
            if total_summary.requests
            else "–"
        )
        return _tile("Answered", share, "%", "no objective was given")
    missed = [model.model for model in summary.models if model.holds is False]
    note = f"✗ missed by {', '.join(missed)}" if missed else "✓ every model keeps its promise"
    return _tile(
        "SLO attainment", _exact_percent(total_summary.attainment), "%", note, "bad" if missed else ""
    )


def _tile(label: str, value: str, unit: str, note: str, name: str = "") -> str:
    return (
        f'<div class="figure {name}"><h2>{escape(label)}</h2>'
        f"<p><b>{escape(value)}</b> <span>{escape(unit)}</span></p><small>{escape(note)}</small></div>"
    )


def _models(summary: RunSummary) -> str:
    shown = [*summary.models, *([summary.total] if len(summary.models) > 1 else [])]
    columns = ("model", "requests", "rate/s", "promised", "within objective", "TTFT kept", "TPOT kept")
    more = ("E2E kept", "goodput/s", "output tokens/s", "refused", "sent again", "preempted")
    rows = [_model_row(model) for model in shown]
    text = table_section("Models", (*columns, *more), rows) + _latencies(shown)
    for name, groups in (("tenant", summary.tenants), ("class", summary.classes)):
        if groups:
            rows = [_model_row(group) for group in groups]
            title = {"tenant": "Tenants", "class": "Classes"}[name]
            text += table_section(title, (name, *columns[1:], *more), rows) + _latencies(groups, name)
    return text


def _model_row(model: ModelSummary) -> tuple[str, ...]:
    slo = model.slo
    promised = f"{digits(slo.attainment * 100)} %" if slo else "–"
    mark = {True: " <i>✓</i>", False: ' <i class="bad">✗</i>', None: ""}[model.holds]
    return (
        escape(model.model),
        f"{model.requests:,}",
        digits(model.rate_per_s),
        promised,
        f"{_percent(model.attainment)}{mark}",
        _percent(model.ttft_attainment),
        _percent(model.tpot_attainment),
        _percent(model.e2e_attainment),
        "–" if model.goodput_per_s is None else digits(model.goodput_per_s),
        digits(model.output_tokens_per_s),
        f"{model.outcomes.refused:,}",
        f"{model.outcomes.retried:,}",
        f"{model.outcomes.preempted:,}",
    )


def _latencies(models: Sequence[ModelSummary], what: str = "model") -> str:
    groups = ("TTFT", "TPOT", "TBT", "end to end")
    head = "".join(f'<th colspan="{len(PARTS)}" scope="colgroup">{group}</th>' for group in groups)
    first = "".join(
        f'<th class="n{" first" * (not i)}" scope="col">{part}</th>' for i, part in enumerate(PARTS)
    )
    parts = first * len(groups)
    rows = ""
    for model in models:
        spreads = (model.ttft_s, model.tpot_s, model.tbt_s, model.e2e_s)
        rows += f"<tr><td>{escape(model.model)}</td>{''.join(map(_spread_cells, spreads))}</tr>"
    return (
        f'<div class="wide"><table class="dense"><thead><tr><th rowspan="2" scope="col">{what}</th>{head}</tr>'
        f"<tr>{parts}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _spread_cells(spread: LatencySpread | None) -> str:
    cells = ["–" if spread is None else seconds(getattr(spread, part)) for part in PARTS]
    return "".join(f'<td class="n{" first" * (i == 0)}">{cell}</td>' for i, cell in enumerate(cells))


def _plots(run_series: RunSeries) -> str:
    edges_s = run_series.edges_s
    end_s = edges_s[-1]
    sections = []
    pairs = (("TTFT", run_series.ttft), ("TPOT", run_series.tpot), ("End to end", run_series.e2e))
    curves = [charts.distribution(curve, f"{name}: share of requests") for name, curve in pairs if curve]
    if curves:
        models = [(f"c{i % 6}", curve.model) for i, curve in enumerate(run_series.ttft or run_series.e2e)]
        body = charts.legend(models) + f'<div class="trio">{"".join(curves)}</div>'
        sections.append(_section("Latency", body, "Dashed lines are objectives."))
    rates = [run_series.arrivals_per_s]
    rates += [run_series.goodput_per_s] if run_series.goodput_per_s else [run_series.answered_per_s]
    if max(run_series.refused_per_s.values, default=0.0) > 0:
        rates.append(run_series.refused_per_s)
    words = "Requests are counted at the time they arrived."
    sections.append(_section("Rate and goodput", charts.over_time(edges_s, rates, "requests/s"), words))
    if run_series.bands:
        shown, count = len(run_series.bands), run_series.replicas
        words = "" if shown == count else f"{shown} of {count:,}: those with most changes."
        drawn = charts.timeline(run_series.bands, end_s, run_series.faults)
        sections.append(_section("Replicas", drawn, words))
    for heat_map, title, percent, words in (
        (run_series.utilisation, "Busy time", True, "Share of time with a step running, full or not."),
        (run_series.queue, "Queue", False, "Requests waiting at a replica, on a scale of powers of two."),
        (run_series.memory, "KV memory", True, "Share of blocks in use."),
    ):
        if heat_map is not None and heat_map.cells:
            sections.append(_section(title, charts.heat(heat_map, end_s, title, percent=percent), words))
    if run_series.links:
        drawn = charts.over_time(edges_s, run_series.links, "share of bandwidth", percent=True, fill=False)
        sections.append(_section("Links", drawn, ""))
    drawn = charts.cost(edges_s, run_series.cost_usd, run_series.cost_usd_per_h)
    sections.append(_section("Cost", drawn, ""))
    return "\n".join(sections)


def _hardware(summary: RunSummary) -> str:
    rows = []
    for one in summary.hardware:
        counts = f"{one.replicas:,}", f"{one.gpus:,}"
        busy = f"{digits(one.busy_share * 100)} %"
        rows.append((escape(one.nodes), *counts, digits(one.gpu_h), busy, f"{one.lost:,}"))
    text = table_section(
        "Hardware", ("nodes", "replicas", "GPUs", "GPU-hours", "time with a step running", "lost"), rows
    )
    links = [
        (
            escape(f"{one.source} → {one.target}" if one.kind == "link" else f"card of {one.source}"),
            f"{digits(one.gbps)} Gbps",
            f"{digits(one.sent_bytes / 1e9)} GB",
            f"{digits(one.mean_share * 100)} %",
            f"{digits(one.busy_share * 100)} %",
        )
        for one in summary.links
    ]
    if links:
        links.sort(key=lambda row: row[0])
        text += table_section("Network", ("link", "bandwidth", "sent", "mean use", "time in use"), links[:40])
    return f'<div class="pair">{text}</div>'


def _events(run_series: RunSeries) -> str:
    text = ""
    if run_series.faults:
        rows = [(moment(round(at_s, 1)), escape(what)) for at_s, what in run_series.faults]
        text += table_section("Faults", ("time", "what"), rows)
        if run_series.more_faults:
            text += f"<p>and {run_series.more_faults:,} more</p>"
    return text


def _section(title: str, body: str, words: str) -> str:
    note = f"<p>{escape(words)}</p>" if words else ""
    return f"<section><h2>{escape(title)}</h2>{note}{body}</section>"


def table_section(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already; every column but the first (and words) stands to the right."""
    kinds = [" class=n" if i > 0 and name != "what" else "" for i, name in enumerate(columns)]
    pairs = zip(kinds, columns, strict=True)
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in pairs)
    lines = [[f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)] for row in rows]
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<section><h2>{escape(title)}</h2><div class="wide">{table}</div></section>'


def _large(value: float) -> tuple[str, str]:
    for limit, unit in ((1e9, "B "), (1e6, "M "), (1e3, "k ")):
        if value >= limit * 0.9995:
            return digits(value / limit), unit
    return digits(value), ""


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{_exact_percent(share)} %"


def _exact_percent(share: float) -> str:
    """Never rounded up to 100: 99.997 % is not all."""
    percent = share * 100
    if percent >= 100 or percent == 0:
        return f"{percent:.0f}"
    shown = f"{percent:.1f}" if percent < 99.9 else f"{percent:.2f}"
    return shown if float(shown) < 100 else "99.99"
