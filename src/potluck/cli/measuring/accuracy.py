"""`potluck accuracy`: how far the performance model is off, and the command that calibrates it anew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.cli.common.progress import progress
from potluck.cli.common.render import emit_json, percent, table

if TYPE_CHECKING:
    from accuracy.study import Score

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
@click.option(
    "--score",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Table of serving runs that you measured (CSV, JSON, Parquet): how far predictions are from them.",
)
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the report (Markdown).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def accuracy(
    data: Path | None, calibrate: bool, score: Path | None, write: Path | None, as_json: bool
) -> None:
    """How far predictions are off from measurements they have not seen.

    \b
    Examples:
      potluck accuracy                                     the stored figures
      potluck accuracy --write docs/accuracy.md            the report
      potluck accuracy --score runs.csv                    your own runs; exit code 1 where bars do not hold
      potluck accuracy --data measured --calibrate         fit anew from measurements
    """
    from accuracy.scores import stored_scores

    from potluck.core.codec import encode

    if calibrate and data is None:
        raise click.UsageError("--calibrate needs --data")
    if score is not None:
        if data is not None or write is not None:
            raise click.UsageError("--score goes with --json alone")
        from potluck.cli.measuring.run_tables import score as score_table

        raise SystemExit(score_table(score, as_json))
    scores = stored_scores() if data is None else _study(data, calibrate)
    if write is not None:
        from potluck.cli.measuring.accuracy_report import report

        write.write_text(report(scores), encoding="utf-8")
    if as_json:
        emit_json({"scores": [encode(score) for score in scores]})
        return
    _show(scores)


def _study(folder: Path, save: bool) -> tuple[Score, ...]:
    from accuracy.calibrate import calibrate
    from accuracy.scores import save_calibration, save_scores
    from accuracy.study import StepCheck, expected_errors, study

    from potluck.catalog import gpus, models, nodes
    from potluck.cli.measuring.run_tables import study_table

    sheet = {name: gpus.gpu(name) for name in gpus.names()}
    check = StepCheck(models.model("Llama-3.1-8B"), nodes.node_type("RTX4090"))
    with progress(STEPS) as said:
        scores = study(folder, sheet, check, said)
        if save:
            said("fitting")
            save_calibration(calibrate(folder, sheet, expected_errors(scores)))
            save_scores(scores)
        runs = folder / RUNS
        if runs.is_file():
            study_table(runs, scores, save, said)
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
