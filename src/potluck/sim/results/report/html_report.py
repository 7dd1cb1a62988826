"""A simulated run as one HTML page that loads nothing: figures, tables, plots. Names are escaped everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from potluck.core.figures import digits, seconds, usd
from potluck.runtime import base_css
from potluck.sim.results.metrics import LatencySpread, ModelSummary, RunSummary
from potluck.sim.results.records import SimResult
from potluck.sim.results.report import charts
from potluck.sim.results.series import PlotLine, RunSeries, series

SPREAD_PARTS = ("mean", "p50", "p90", "p99")
MODEL_COLUMNS = (
    *("requests", "rate/s", "SLO target", "SLO attainment", "TTFT met", "TPOT met", "E2E met", "goodput/s"),
    *("output tokens/s", "refused", "retried", "preempted"),
)
MAX_LINK_ROWS = 40


def html(summary: RunSummary, result: SimResult, title: str = "Potluck simulation") -> str:
    run_series = series(result)
    body = f"{_figures(summary)}\n{_models(summary)}\n{_plots(run_series)}\n{_hardware(summary)}\n"
    return sheet(title, f"{_header(summary, title)}\n<main>\n{body}{_faults(run_series)}\n</main>\n")


def sheet(title: str, body: str) -> str:
    style = resources.files("potluck.sim.results.report").joinpath("data", "style.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{base_css()}{style}</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )


def table_section(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already; all columns but the first, and those named `what`, are aligned to the right."""
    kinds = [" class=n" if i > 0 and name != "what" else "" for i, name in enumerate(columns)]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, columns, strict=True)
    )
    lines = [[f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)] for row in rows]
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return _section(title, f'<div class="wide">{table}</div>')


def _section(title: str, body: str, note: str = "") -> str:
    shown_note = f"<p>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{shown_note}{body}</section>"


def _header(summary: RunSummary, title: str) -> str:
    facts = [
        f"{summary.total.requests:,} requests",
        f"{seconds(summary.end_s)} simulated",
        f"{summary.replicas:,} replica{'s' if summary.replicas != 1 else ''}",
        f"seed {summary.seed}",
    ]
    if summary.start_s > 0:
        facts.append(f"figures without the first {seconds(summary.start_s)}")
    return f"<header><h1>{escape(title)}</h1><p>{' · '.join(facts)}</p></header>"


def _figures(summary: RunSummary) -> str:
    total = summary.total
    missed = [model.model for model in summary.models if model.holds is False]
    if total.attainment is not None:
        note = f"✗ missed by {', '.join(missed)}" if missed else "✓ every model meets its SLO"
        figures = [("SLO attainment", _percent(total.attainment), note)]
    else:
        answered = total.outcomes.answered / total.requests if total.requests else None
        figures = [("Answered", _percent(answered), "no SLO was given")]
    name, rate = "Goodput", total.goodput_per_s
    if rate is None:
        name, rate = "Throughput", total.throughput_per_s
    figures.append((name, f"{digits(rate)} requests/s", f"of {digits(total.rate_per_s)} offered"))
    for label, spread in (("TTFT p99", total.ttft_s), ("TPOT p99", total.tpot_s)):
        if spread is not None:
            figures.append((label, seconds(spread.p99), f"p50 {seconds(spread.p50)}"))
    if summary.output_tokens_per_usd is not None:
        rate_note = f"{digits(total.output_tokens_per_s)} tokens/s"
        figures.append(("Output per dollar", f"{_large(summary.output_tokens_per_usd)}tokens", rate_note))
    figures.append(("Cost", f"{usd(summary.cost_usd_per_h)} /h", f"{usd(summary.cost_usd)} in all"))
    gpu_h = sum(hardware.gpu_h for hardware in summary.hardware)
    if gpu_h > 0:
        busy = sum(hardware.busy_share * hardware.gpu_h for hardware in summary.hardware) / gpu_h
        figures.append(
            ("GPU utilization", f"{digits(busy * 100)} %", f"time in a step, of {digits(gpu_h)} GPU-hours")
        )
    outcomes = total.outcomes
    reasons = ", ".join(f"{reason.replace('_', ' ')} {n:,}" for reason, n in outcomes.refusals.items())
    note = (
        f"{outcomes.refused:,} refused{f' ({reasons})' if reasons else ''}, {outcomes.cancelled:,} cancelled"
    )
    figures.append(("Not answered", f"{outcomes.refused + outcomes.cancelled + outcomes.open:,} ", note))
    bad = {"SLO attainment"} if missed else set()
    bad |= {"Not answered"} if outcomes.refused else set()
    return f'<section class="figures">{"".join(_figure(*figure, figure[0] in bad) for figure in figures)}</section>'


def _figure(label: str, value: str, note: str, bad: bool) -> str:
    number, _, unit = value.partition(" ")
    return (
        f'<div class="figure{" bad" * bad}"><h2>{escape(label)}</h2>'
        f"<p><b>{escape(number)}</b> <span>{escape(unit)}</span></p><small>{escape(note)}</small></div>"
    )


def _models(summary: RunSummary) -> str:
    models = [*summary.models, *([summary.total] if len(summary.models) > 1 else [])]
    groups = (
        ("Models", "model", models),
        ("Tenants", "tenant", summary.tenants),
        ("Classes", "class", summary.classes),
    )
    return "".join(
        table_section(title, (name, *MODEL_COLUMNS), [_model_row(row) for row in rows])
        + _latencies(name, rows)
        for title, name, rows in groups
        if rows
    )


def _model_row(model: ModelSummary) -> tuple[str, ...]:
    mark = {True: " ✓", False: ' <b class="bad">✗</b>', None: ""}[model.holds]
    return (
        escape(model.model),
        f"{model.requests:,}",
        digits(model.rate_per_s),
        f"{digits(model.slo.attainment * 100)} %" if model.slo else "–",
        f"{_percent(model.attainment)}{mark}",
        *map(_percent, (model.ttft_attainment, model.tpot_attainment, model.e2e_attainment)),
        "–" if model.goodput_per_s is None else digits(model.goodput_per_s),
        digits(model.output_tokens_per_s),
        *(
            f"{count:,}"
            for count in (model.outcomes.refused, model.outcomes.retried, model.outcomes.preempted)
        ),
    )


def _latencies(name: str, models: Sequence[ModelSummary]) -> str:
    """A row for each latency of each model."""
    rows = []
    for model in models:
        spreads = (
            ("TTFT", model.ttft_s),
            ("TPOT", model.tpot_s),
            ("TBT", model.tbt_s),
            ("end to end", model.e2e_s),
        )
        rows += [(escape(model.model), label, *_spread_cells(spread)) for label, spread in spreads if spread]
    return table_section(f"Latencies by {name}", (name, "what", *SPREAD_PARTS), rows)


def _spread_cells(spread: LatencySpread) -> list[str]:
    return [seconds(getattr(spread, part)) for part in SPREAD_PARTS]


def _plots(run: RunSeries) -> str:
    edges_s, end_s = run.edges_s, run.edges_s[-1]
    sections = []
    pairs = (("TTFT", run.ttft), ("TPOT", run.tpot), ("End to end", run.e2e))
    if plots := [
        charts.distribution(curves, f"{name}: share of requests") for name, curves in pairs if curves
    ]:
        keys = charts.legend([(f"c{i % 6}", curve.model) for i, curve in enumerate(run.ttft or run.e2e)])
        sections.append(
            _section("Latency", f'{keys}<div class="trio">{"".join(plots)}</div>', "Dashed lines are SLOs.")
        )
    rates = [run.arrivals_per_s, run.goodput_per_s or run.answered_per_s]
    rates += [run.refused_per_s] if max(run.refused_per_s.values, default=0.0) > 0 else []
    note = "Requests are counted at the time they arrived."
    sections.append(_section("Rate and goodput", charts.time_plot("requests/s", edges_s, rates), note))
    if run.bands:
        shown = len(run.bands)
        note = "" if shown == run.replicas else f"{shown} of {run.replicas:,}: those with most changes."
        sections.append(_section("Replicas", charts.timeline(run.bands, end_s, run.faults), note))
    for heat_map, title, unit, note in (
        (run.utilisation, "Utilization", "%", "Share of time in a step, whatever its batch size."),
        (run.queue, "Queue", "", "Requests waiting at a replica, on a scale of powers of two."),
        (run.memory, "KV memory", "%", "Share of blocks in use."),
    ):
        if heat_map is not None and heat_map.cells:
            sections.append(_section(title, charts.heat(heat_map, end_s, unit), note))
    if run.links:
        sections.append(_section("Links", charts.time_plot("share of bandwidth", edges_s, run.links, " %")))
    costs = (PlotLine("USD/h", run.cost_usd_per_h), PlotLine("USD in all", run.cost_usd))
    plots = [charts.time_plot(cost.label, edges_s, [cost], width=charts.HALF_WIDTH) for cost in costs]
    return "\n".join([*sections, _section("Cost", f'<div class="pair">{"".join(plots)}</div>')])


def _hardware(summary: RunSummary) -> str:
    rows = [
        (
            escape(hardware.nodes),
            *(f"{hardware.replicas:,}", f"{hardware.gpus:,}", digits(hardware.gpu_h)),
            *(f"{digits(hardware.busy_share * 100)} %", f"{hardware.lost:,}"),
        )
        for hardware in summary.hardware
    ]
    text = table_section("Hardware", ("nodes", "replicas", "GPUs", "GPU-hours", "utilization", "lost"), rows)
    links = sorted(
        (
            escape(f"{link.source} → {link.target}" if link.kind == "link" else f"card of {link.source}"),
            *(f"{digits(link.gbps)} Gbps", f"{digits(link.sent_bytes / 1e9)} GB"),
            *(f"{digits(share * 100)} %" for share in (link.mean_share, link.busy_share)),
        )
        for link in summary.links
    )
    if links:
        columns = ("link", "bandwidth", "sent", "mean utilization", "time in use")
        text += table_section("Network", columns, links[:MAX_LINK_ROWS])
    return f'<div class="pair">{text}</div>'


def _faults(run: RunSeries) -> str:
    if not run.faults:
        return ""
    rows = [(charts.moment(round(at_s, 1)), escape(what)) for at_s, what in run.faults]
    more = f"<p>and {run.more_faults:,} more</p>" if run.more_faults else ""
    return table_section("Faults", ("time", "what"), rows) + more


def _large(value: float) -> str:
    for limit, unit in ((1e9, "B "), (1e6, "M "), (1e3, "k ")):
        if value >= limit * 0.9995:
            return f"{digits(value / limit)} {unit}"
    return f"{digits(value)} "


def _percent(share: float | None) -> str:
    """Never rounded up to 100: 99.997 % is not all."""
    if share is None:
        return "–"
    percent = share * 100
    if percent >= 100 or percent == 0:
        return f"{percent:.0f} %"
    shown = f"{percent:.1f}" if percent < 99.9 else f"{percent:.2f}"
    return f"{shown if float(shown) < 100 else '99.99'} %"
