"""`lab/reproduce.py`: run the papers' experiments, print their rows or write their pages."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from papers import (
    cauchy,
    cauchy_rows,
    coral,
    coral_settings,
    cronus,
    cronus_rows,
    pages,
    prfaas,
    thunderserve_rows,
    together,
    together_simulated,
)
from papers.rows import ProgressReporter, Reproduction, quiet
from potluck.cli.common.files import FOLDER
from potluck.cli.common.render import emit_json, progress, table
from potluck.core.errors import InputError

LONGEST_FIRST = ("coral", "cauchy", "thunderserve", "cronus", "prfaas")
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How much is run, and with which data."""

    folder: Path | None
    quick: bool
    seed: int


def _cauchy(run_settings: RunSettings, report_progress: ProgressReporter) -> Reproduction:
    effort = cauchy.QUICK if run_settings.quick else cauchy.PAGE
    effort = replace(effort, seeds=tuple(s + run_settings.seed for s in effort.seeds))
    return cauchy_rows.reproduce(effort, run_settings.folder, run_settings.quick, report_progress)


def _cronus(run_settings: RunSettings, report_progress: ProgressReporter) -> Reproduction:
    trace = None if run_settings.folder is None else run_settings.folder / cronus.TRACE
    if trace is not None and trace.is_file():
        requests = cronus.trace_requests(trace)
    else:
        requests = cronus.synthetic_requests(run_settings.seed)
    few = requests.first(cronus.REQUESTS // 4) if run_settings.quick else requests
    return cronus_rows.reproduce(few, report_progress, run_settings.quick)


RUNS: Mapping[str, tuple[int, Callable[[RunSettings, ProgressReporter], Reproduction]]] = {
    "cauchy": (15, _cauchy),
    "cronus": (11, _cronus),
    "coral": (
        11,
        lambda run_settings, report_progress: coral.reproduce(
            run_settings.folder, run_settings.quick, run_settings.seed, report_progress
        ),
    ),
    "thunderserve": (
        7,
        lambda run_settings, report_progress: thunderserve_rows.reproduce(
            run_settings.quick, report_progress
        ),
    ),
    "prfaas": (
        11,
        lambda run_settings, report_progress: prfaas.reproduce(
            run_settings.quick, run_settings.seed, report_progress
        ),
    ),
}
"""A paper's name to how many stages it tells of, and what runs it."""


NEEDED = {
    "cauchy": (cronus.TRACE, "Figures 6, 7 and 10 are left out"),
    "cronus": (cronus.TRACE, "lengths are made up"),
    "coral": (coral_settings.TRACE, "availability is made up"),
}
"""A paper's name to the file of `--data` that it reads, and what becomes of it without."""


def missing(paper: str, folder: Path | None) -> Iterator[str]:
    """What is not run as it should be, for want of data."""
    if folder is not None and not folder.is_dir():
        raise InputError("--data", f"there is no folder {folder}; leave it out to do without traces")
    for name, (file, without) in NEEDED.items():
        if paper in (name, "all") and (folder is None or not (folder / file).is_file()):
            yield f"{name}: {without}, since {'no --data was given' if folder is None else f'{folder} has no {file}'}"


@click.command()
@click.argument("paper", type=click.Choice((*RUNS, "together", "all")))
@click.option(
    "--data", "folder", type=FOLDER, envvar="POTLUCK_DATA", help="Folder of traces; default: synthetic."
)
@click.option("--quick", is_flag=True, help="Shorter runs: coarser figures.")
@click.option("--seed", default=0, help="Seed of synthetic requests.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def reproduce(paper: str, folder: Path | None, quick: bool, seed: int, as_json: bool) -> None:
    """Run a paper's experiments and print published figures beside ours.

    `together` compares the planner's `auto` with each paper's strategy; `all` runs everything. Both write
    lab/papers/results.

    \b
    Examples:
      python lab/reproduce.py cronus --data traces
      python lab/reproduce.py all --quick
    """
    for note in missing(paper, folder):
        click.echo(f"potluck: note: {note}", err=True)
    run_settings = RunSettings(folder, quick, seed)
    if paper in ("together", "all"):
        for path in write_all(RESULTS, run_settings, list(RUNS) if paper == "all" else []):
            click.echo(path)
        return
    found = run(paper, run_settings)
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


def run(paper: str, run_settings: RunSettings) -> Reproduction:
    stages, runs = RUNS[paper]
    with progress(stages) as progress_bar:
        return runs(run_settings, progress_bar)


def write_all(docs: Path, run_settings: RunSettings, papers: Sequence[str]) -> Iterator[Path]:
    """The pages of these papers, then the one of all together."""
    options = " --data FOLDER" * (run_settings.folder is not None) + " --quick" * run_settings.quick
    with TemporaryDirectory() as folder:
        settings = list(together.settings(Path(folder), run_settings.quick))
    command, in_order = f"python lab/reproduce.py all{options}", sorted(papers, key=LONGEST_FIRST.index)
    with _workers() as workers, progress(len(papers) + len(settings)) as progress_bar:
        # The longest first; then what tells often how far it is.
        made = [workers.submit(_written, docs, paper, run_settings, command) for paper in in_order[:1]]
        compared = [
            workers.submit(together_simulated.settled, setting, run_settings.quick) for setting in settings
        ]
        made += [workers.submit(_written, docs, paper, run_settings, command) for paper in in_order[1:]]
        names = in_order + [f"together: {paper}, {setting}" for paper, setting, _ in settings]
        tasks: list[Future[Any]] = [*made, *compared]
        name_of_task = dict(zip(tasks, names, strict=True))
        try:
            for done in as_completed(tasks):
                progress_bar(name_of_task[done])
                done.result()
        except BaseException:  # what is under way ends by itself, the rest is not begun
            workers.shutdown(wait=False, cancel_futures=True)
            raise
    yield from sorted(each.result() for each in made)
    found = [each.result() for each in compared]
    page = together.page(
        [one for one, _ in found],
        f"python lab/reproduce.py together{options}",
        together_simulated.section(found),
    )
    path = docs / "together.md"
    path.write_text(page, "utf-8")
    yield path


def _workers() -> ProcessPoolExecutor:
    """One for each core; an interrupt ends them without a word."""
    cores, quietly = len(os.sched_getaffinity(0)), (signal.SIGINT, signal.SIG_DFL)
    return ProcessPoolExecutor(cores, get_context("spawn"), signal.signal, quietly)


def _written(docs: Path, paper: str, run_settings: RunSettings, command: str) -> Path:
    """A paper's page, made in a process of its own."""
    return pages.write(docs, RUNS[paper][1](run_settings, quiet), command)
