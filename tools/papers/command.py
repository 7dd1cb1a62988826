"""What `potluck reproduce` runs and prints."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click

from papers import cauchy, cauchy_rows, cronus, cronus_rows
from papers.rows import Reproduction, Row, Said
from potluck.cli.common.render import emit_json, progress, table

STAGES = {"cauchy": 6, "cronus": 8}


def reproduce(paper: str, folder: Path | None, quick: bool, seed: int, as_json: bool) -> None:
    """Run a paper's experiments and print its figures beside ours."""
    with progress(STAGES[paper]) as text:
        result = _cauchy(quick, seed, text) if paper == "cauchy" else _cronus(folder, quick, seed, text)
    if as_json:
        emit_json({"paper": result.paper, "rows": [asdict(row) for row in result.rows]})
        return
    for experiment in dict.fromkeys(row.experiment for row in result.rows):
        rows = [row for row in result.rows if row.experiment == experiment]
        columns = ("setting", "metric", "unit", "published", "ours", "off")
        table(f"{result.paper}, {experiment}", columns, [_shown(row) for row in rows])
        for note in dict.fromkeys(row.note for row in rows if row.note):
            click.echo(f"  {note}")
        click.echo()


def _cauchy(quick: bool, seed: int, said: Said) -> Reproduction:
    effort = cauchy.QUICK if quick else cauchy.Effort()
    return cauchy_rows.reproduce(replace(effort, seeds=tuple(s + seed for s in effort.seeds)), said)


def _cronus(folder: Path | None, quick: bool, seed: int, said: Said) -> Reproduction:
    trace = None if folder is None else folder / cronus.TRACE
    if trace is not None and trace.is_file():
        requests = cronus.trace_requests(trace)
    else:
        requests = cronus.synthetic_requests(seed)
    return cronus_rows.reproduce(requests.first(cronus.REQUESTS // 4) if quick else requests, said)


def _shown(row: Row) -> tuple[str, ...]:
    relative = row.unit in ("change", "share")

    def number(value: float) -> str:
        return f"{value:+.1%}" if relative else f"{value:.3g}"

    off = "" if row.off is None or relative else f"{row.off:+.0%}"
    published = "-" if row.published is None else number(row.published)
    return row.setting, row.metric, row.unit, published, number(row.ours), off
