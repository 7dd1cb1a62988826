"""Writes the calibration that ships with the package, and keeps its errors beside this study."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from accuracy_study.serving import RunStudy
from accuracy_study.study import Score
from potluck.core.codec import dumps, loads
from potluck.perf import DATA as SHIPPED
from potluck.perf.error_bars import FORMAT as BARS_FORMAT
from potluck.perf.error_bars import ErrorBars, bundled_bars
from potluck.perf.operators.calibration import (
    CALIBRATION_VERSION,
    FORMAT,
    Calibration,
    bundled,
    bundled_curves,
)
from potluck.perf.timers.engine_host import FORMAT as ENGINES_FORMAT
from potluck.perf.timers.engine_host import engines

SCORES_FORMAT = "potluck.accuracy"
RUNS_FORMAT = "potluck.runs"
DATA = Path(__file__).parent / "data"


@lru_cache(maxsize=1)
def stored_scores() -> tuple[Score, ...]:
    """The errors that were found when the bundled calibration was made."""
    text = (DATA / "accuracy.json").read_text(encoding="utf-8")
    return loads(tuple[Score, ...], text, format_name=SCORES_FORMAT, version=CALIBRATION_VERSION)


def save_scores(scores: tuple[Score, ...], folder: Path | None = None) -> None:
    """Write the errors beside the calibration."""
    text = dumps(scores, format_name=SCORES_FORMAT, version=CALIBRATION_VERSION, indent=None)
    (folder or DATA).joinpath("accuracy.json").write_text(text, encoding="utf-8")
    stored_scores.cache_clear()


def save_calibration(calibration: Calibration, folder: Path | None = None) -> None:
    """Write the calibration that the package loads."""
    text = dumps(calibration, format_name=FORMAT, version=CALIBRATION_VERSION, indent=None)
    (folder or SHIPPED).joinpath("calibration.json").write_text(text, encoding="utf-8")
    bundled.cache_clear()
    bundled_curves.cache_clear()


@lru_cache(maxsize=1)
def stored_runs() -> RunStudy:
    """What was found with whole serving runs, the engines as they ship."""
    text = (DATA / "runs.json").read_text(encoding="utf-8")
    study = loads(RunStudy, text, format_name=RUNS_FORMAT, version=CALIBRATION_VERSION)
    return replace(study, engines=engines())


def save_runs(study: RunStudy, bars: ErrorBars, folder: Path | None = None) -> None:
    """Write what was learnt from serving runs: engines, errors and scores."""
    for name, value, form, place in (
        ("engines", study.engines, ENGINES_FORMAT, SHIPPED),
        ("bars", bars, BARS_FORMAT, SHIPPED),
        ("runs", replace(study, engines=()), RUNS_FORMAT, DATA),
    ):
        text = dumps(value, format_name=form, version=CALIBRATION_VERSION, indent=None)
        (folder or place).joinpath(f"{name}.json").write_text(text + "\n", encoding="utf-8")
    for cached in (engines, bundled_bars, stored_runs):
        cached.cache_clear()
