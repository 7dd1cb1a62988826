"""`lab/accuracy.py`: show the stored errors of the performance model, or compute them anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accuracy_study.report import report
from potluck.cli.common.render import emit_json, percent, progress, table
from potluck.cli.engine.own_runs import METRIC_WORDS

if TYPE_CHECKING:
    from accuracy_study.study import Score

RUNS = "aic_h100_sxm_serving_runs.parquet"
STEPS = 18
"""Roughly how many stages a study has, for the progress bar."""


@click.command()
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of measurements: study them afresh instead of showing the stored figures.",
)
@click.option("--calibrate", is_flag=True, help="With --data: fit anew and store calibration and figures.")
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the report (Markdown).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def study_figures(data: Path | None, calibrate: bool, write: Path | None, as_json: bool) -> None:
    """How far predictions are off from measurements they have not seen.

    \b
    Examples:
      python lab/accuracy.py                                     the stored figures
      python lab/accuracy.py --write report.md                   the report
      python lab/accuracy.py --data measured --calibrate         fit anew from measurements
    """
    from accuracy_study.scores import stored_scores
    from potluck.core.codec import encode

    if calibrate and data is None:
        raise click.UsageError("--calibrate needs --data")
    scores = stored_scores() if data is None else _study(data, calibrate)
    if write is not None:
        write.write_text(report(scores), encoding="utf-8")
    if as_json:
        emit_json({"scores": [encode(score) for score in scores]})
        return
    _show(scores)


def _study(folder: Path, save: bool) -> tuple[Score, ...]:
    from accuracy_study.calibrate import calibrate
    from accuracy_study.scores import save_calibration, save_scores
    from accuracy_study.study import StepCheck, expected_errors, study
    from potluck.catalog import gpus, models, nodes

    sheet = {name: gpus.gpu(name) for name in gpus.names()}
    check = StepCheck(models.model("Llama-3.1-8B"), nodes.node_type("RTX4090"))
    with progress(STEPS) as text:
        scores = study(folder, sheet, check, text)
        if save:
            text("fitting")
            save_calibration(calibrate(folder, sheet, expected_errors(scores)))
            save_scores(scores)
        runs = folder / RUNS
        if runs.is_file():
            study_table(runs, scores, save, text)
    return scores


def _show(scores: tuple[Score, ...]) -> None:
    for question in ("calibrated", "GPU left out", "model left out"):
        rows = [
            (s.kind, s.gpu, s.harness, s.group, f"{s.rows:,}", percent(s.median), percent(s.p90))
            for s in scores
            if s.question == question
        ]
        columns = ("work", "GPU", "measured by", "model", "rows", "median error", "9 in 10 within")
        table(f"Prediction error, {question}", columns, rows)
    _show_whole_runs()


def _show_whole_runs() -> None:
    """Throughput and times of serving runs, left out by configuration and by GPU, and how often bars hold."""
    from accuracy_study.scores import stored_runs

    study, rows = stored_runs(), []
    for score in (s for s in study.scores if s.kind and not s.engine):
        name, held = f"{score.kind}, {score.metric}", study.coverage[f"{score.metric}, {score.kind}"]
        rows.append(
            (
                METRIC_WORDS[score.metric],
                score.kind,
                score.runs,
                percent(score.median),
                percent(held),
                percent(study.carried[name]),
                percent(study.carried[f"{name}: within"]),
            )
        )
    left = ("configurations left out", "within bars", "GPU's operators left out", "within bars")
    table("Median error of whole serving runs on H100", ("figure", "models", "runs", *left), rows)
    choices = [(name, f"{value:.3f}") for name, value in study.ranking.items()]
    table("Choosing by cost per token, configurations left out", ("measure", "mean"), choices)


def study_table(
    path: Path, scores: tuple[Score, ...], save: bool, report_progress: Callable[[str], None]
) -> None:
    """Fit hosts and clients to a table of runs, score what was left out, and keep it."""
    from accuracy_study.scores import save_runs
    from accuracy_study.serving import carried_over, possible, study_runs
    from accuracy_study.study import deviations
    from potluck.cli.engine.run_tables import placed, read_runs
    from potluck.perf.error_bars import ErrorBars

    table_read = read_runs(path)
    result = [item for item in map(placed, table_read.runs) if possible(item)]
    study, errors = study_runs(
        result, table_read.left_out + len(table_read.runs) - len(result), report_progress
    )
    if save:
        bars = ErrorBars(result[0].node.gpu.name, errors, deviations(scores))
        save_runs(replace(study, carried=carried_over(result, study.engines, bars)), bars)
