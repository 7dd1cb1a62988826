"""What a reproduction says: rows of one figure each, the paper's beside ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ProgressReporter = Callable[[str], None]  # Called with what runs next.


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `published` is None where the paper prints no number."""

    experiment: str
    setting: str
    metric: str
    unit: str
    published: float | None
    ours: float
    note: str = ""

    @property
    def off(self) -> float | None:
        """How far ours is from the published figure, as a share of it."""
        return None if not self.published else self.ours / self.published - 1.0


class Rows(list[Row]):
    """Rows of one experiment, mostly with one note."""

    def __init__(self, experiment: str, note: str = "") -> None:
        self.experiment, self.note = experiment, note

    def add(
        self, setting: str, figure: str, published: float | None, ours: float, note: str | None = None
    ) -> None:
        """One more; `figure` is what it is and, after the last comma, its unit."""
        metric, unit = figure.rsplit(", ", 1)
        self.append(
            Row(self.experiment, setting, metric, unit, published, ours, self.note if note is None else note)
        )


@dataclass(frozen=True, slots=True)
class Line:
    """A curve of a plot."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure of a paper, drawn from our runs."""

    name: str
    x: str
    y: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A paper's experiments."""

    paper: str
    rows: tuple[Row, ...]
    plots: tuple[Plot, ...] = ()


def quiet(text: str) -> None:
    """Says nothing."""


def inversions(
    published: dict[str, float], ours: dict[str, float], tie: float = 0.0
) -> list[tuple[str, str]]:
    """Pairs (a, b) that the paper has a above b, by more than `tie` of b, and ours has not."""
    return [
        (a, b)
        for a in published
        for b in published
        if published[a] > published[b] * (1.0 + tie) and ours[a] <= ours[b]
    ]
