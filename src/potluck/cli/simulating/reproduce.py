"""`potluck reproduce`: a paper's experiments, run in simulation, with its figures beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.cli.common.progress import progress
from potluck.cli.common.render import emit_json, table

if TYPE_CHECKING:
    from potluck.papers.rows import Reproduction, Row, Said

STAGES = {"cauchy": 6, "cronus": 8}


@click.command()
@click.argument("paper", type=click.Choice(tuple(STAGES)))
@click.option(
    "--data",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="POTLUCK_DATA",
    help="Folder with the Azure conversation trace; without it requests are made up.",
)
@click.option("--quick", is_flag=True, help="Shorter runs: coarser figures.")
@click.option("--seed", default=0, show_default=True, help="Of requests that are made up.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def reproduce(paper: str, folder: Path | None, quick: bool, seed: int, as_json: bool) -> None:
    """Run a paper's experiments and put its figures beside ours.

    \b
    Examples:
      potluck reproduce cronus --data traces
      potluck reproduce cauchy --json
    """
    with progress(STAGES[paper]) as said:
        found = _cauchy(quick, seed, said) if paper == "cauchy" else _cronus(folder, quick, seed, said)
    if as_json:
        from dataclasses import asdict

        emit_json({"paper": found.paper, "rows": [asdict(row) for row in found.rows]})
        return
    for experiment in dict.fromkeys(row.experiment for row in found.rows):
        rows = [row for row in found.rows if row.experiment == experiment]
        columns = ("setting", "metric", "unit", "published", "ours", "off")
        table(f"{found.paper}, {experiment}", columns, [_shown(row) for row in rows])
        for note in dict.fromkeys(row.note for row in rows if row.note):
            click.echo(f"  {note}")
        click.echo()


def _cauchy(quick: bool, seed: int, said: Said) -> Reproduction:
    from dataclasses import replace

    from potluck.papers import cauchy, cauchy_rows

    effort = cauchy.QUICK if quick else cauchy.Effort()
    seeds = tuple(each + seed for each in effort.seeds)
    return cauchy_rows.reproduce(replace(effort, seeds=seeds), said)


def _cronus(folder: Path | None, quick: bool, seed: int, said: Said) -> Reproduction:
    from potluck.papers import cronus, cronus_rows

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
