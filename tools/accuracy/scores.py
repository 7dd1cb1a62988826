"""Writes the calibration that ships with the package, and keeps its errors beside this study."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from accuracy.serving import RunStudy
from accuracy.study import Score
from potluck.core.codec import dumps, loads
from potluck.core.errors import InputError
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
from potluck.perf.timers.engine_host import FORMAT as HOSTS_FORMAT
from potluck.perf.timers.engine_host import OWN_FORMAT, OwnCluster, hosts, own_cluster, own_path

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


def save_cluster(cluster: OwnCluster, path: Path | None = None) -> Path:
    """Keep what was fitted to one's own runs, where every command looks for it or in a file."""
    target = path or own_path()
    if target is None:
        raise InputError("--out", "is needed: there is no home to keep it in")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(dumps(cluster, format_name=OWN_FORMAT, version=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(str(target), f"cannot be written ({error.strerror})") from error
    own_cluster.cache_clear()
    return target


@lru_cache(maxsize=1)
def stored_runs() -> RunStudy:
    """What was found with whole serving runs."""
    text = (DATA / "runs.json").read_text(encoding="utf-8")
    return loads(RunStudy, text, format_name=RUNS_FORMAT, version=CALIBRATION_VERSION)


def save_runs(study: RunStudy, bars: ErrorBars, folder: Path | None = None) -> None:
    """Write what was learnt from serving runs: hosts, errors and scores."""
    unseen = [item for item in study.engines if item.kind == "dense" and not item.version]
    newest = {item.engine: replace(item.host, request_s=item.client.request_s) for item in unseen}
    for name, value, form, place in (
        ("hosts", newest, HOSTS_FORMAT, SHIPPED),
        ("bars", bars, BARS_FORMAT, SHIPPED),
        ("runs", study, RUNS_FORMAT, DATA),
    ):
        text = dumps(value, format_name=form, version=CALIBRATION_VERSION, indent=None)
        (folder or place).joinpath(f"{name}.json").write_text(text + "\n", encoding="utf-8")
    for cached in (hosts, bundled_bars, stored_runs):
        cached.cache_clear()
