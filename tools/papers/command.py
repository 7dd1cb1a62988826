"""What `potluck reproduce` runs, prints and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from papers import cauchy, cauchy_rows, coral, cronus, cronus_rows, pages, prfaas, thunderserve, together
from papers.rows import Reproduction, Said
from potluck.cli.common.render import emit_json, progress, table

DOCS = Path(__file__).parents[2] / "docs" / "papers"


@dataclass(frozen=True, slots=True)
class Wanted:
    """How much is run, and with which data."""

    folder: Path | None
    quick: bool
    seed: int


def _cauchy(wanted: Wanted, said: Said) -> Reproduction:
    effort = cauchy.QUICK if wanted.quick else cauchy.Effort()
    return cauchy_rows.reproduce(replace(effort, seeds=tuple(s + wanted.seed for s in effort.seeds)), said)


def _cronus(wanted: Wanted, said: Said) -> Reproduction:
    trace = None if wanted.folder is None else wanted.folder / cronus.TRACE
    if trace is not None and trace.is_file():
        requests = cronus.trace_requests(trace)
    else:
        requests = cronus.synthetic_requests(wanted.seed)
    return cronus_rows.reproduce(requests.first(cronus.REQUESTS // 4) if wanted.quick else requests, said)


RUNS: Mapping[str, tuple[int, Callable[[Wanted, Said], Reproduction]]] = {
    "cauchy": (6, _cauchy),
    "cronus": (8, _cronus),
    "coral": (10, lambda wanted, said: coral.reproduce(wanted.folder, wanted.quick, wanted.seed, said)),
    "thunderserve": (6, lambda wanted, said: thunderserve.reproduce(wanted.quick, said)),
    "prfaas": (11, lambda wanted, said: prfaas.reproduce(wanted.quick, wanted.seed, said)),
}
"""A paper's name to how many stages it tells of, and what runs it."""


def reproduce(paper: str, folder: Path | None, quick: bool, seed: int, as_json: bool) -> None:
    """Run a paper's experiments and print its figures beside ours; of all papers, write their pages."""
    wanted = Wanted(folder, quick, seed)
    if paper in ("together", "all"):
        for path in write_all(DOCS, wanted, list(RUNS) if paper == "all" else []):
            click.echo(path)
        return
    found = run(paper, wanted)
    if as_json:
        emit_json({"paper": found.paper, "rows": [asdict(row) for row in found.rows]})
        return
    for experiment in dict.fromkeys(row.experiment for row in found.rows):
        rows = [row for row in found.rows if row.experiment == experiment]
        columns = ("setting", "metric", "unit", "published", "ours", "ratio")
        shown = [(row.setting, row.metric, row.unit, *pages.numbers(row)) for row in rows]
        table(f"{found.paper}, {experiment}", columns, shown)
        for note in dict.fromkeys(row.note for row in rows if row.note):
            click.echo(f"  {note}")
        click.echo()


def run(paper: str, wanted: Wanted) -> Reproduction:
    stages, runs = RUNS[paper]
    with progress(stages) as said:
        return runs(wanted, said)


def write_all(docs: Path, wanted: Wanted, papers: Sequence[str]) -> Iterator[Path]:
    """The pages of these papers, then the one of all together."""
    options = " --data FOLDER" * (wanted.folder is not None) + " --quick" * wanted.quick
    for paper in papers:
        yield pages.write(docs, run(paper, wanted), f"potluck reproduce all{options}")
    with progress(together.COUNT) as said, TemporaryDirectory() as folder:
        found = together.compare(Path(folder), wanted.quick, said)
    path = docs / "together.md"
    path.write_text(together.page(found, f"potluck reproduce together{options}"), "utf-8")
    yield path
