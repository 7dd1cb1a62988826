"""Where the calibration and its errors are kept: two JSON files that ship with the package."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from pathlib import Path

from potluck.core.codec import dumps, loads
from potluck.perf.calibration import CALIBRATION_VERSION, FORMAT, Calibration, bundled
from potluck.perf.study.accuracy import Score

SCORES_FORMAT = "potluck.accuracy"


@lru_cache(maxsize=1)
def stored_scores() -> tuple[Score, ...]:
    """The errors that were found when the bundled calibration was made."""
    text = resources.files("potluck.perf").joinpath("data/accuracy.json").read_text(encoding="utf-8")
    return loads(tuple[Score, ...], text, format_name=SCORES_FORMAT, version=CALIBRATION_VERSION)


def save_scores(scores: tuple[Score, ...], folder: Path | None = None) -> None:
    """Write the errors beside the calibration."""
    text = dumps(scores, format_name=SCORES_FORMAT, version=CALIBRATION_VERSION, indent=None)
    _folder(folder).joinpath("accuracy.json").write_text(text, encoding="utf-8")
    stored_scores.cache_clear()


def save_calibration(calibration: Calibration, folder: Path | None = None) -> None:
    """Write the calibration that the package loads."""
    text = dumps(calibration, format_name=FORMAT, version=CALIBRATION_VERSION, indent=None)
    _folder(folder).joinpath("calibration.json").write_text(text, encoding="utf-8")
    bundled.cache_clear()


def _folder(folder: Path | None) -> Path:
    return Path(__file__).parents[1] / "data" if folder is None else folder
