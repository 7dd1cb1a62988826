"""What commands print: JSON, tables, paragraphs and numbers with their units.

It fits the terminal or COLUMNS: text is folded between words, figures never are, and a table that is too wide is
printed in parts that repeat the first column. In a pipe without COLUMNS nothing is folded.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

import click

from potluck.core.figures import digits
from potluck.core.figures import usd as usd

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


T = TypeVar("T")
LEAST_WIDTH, WIDEST = 40, 200
LEAST_TEXT, LEAST_WORD = 18, 20
"""To what a column of words, or of one long word, is folded before a table is printed in parts."""
PADDING = 3  # Of a column, with the line that is not drawn between two.
_FIGURE = re.compile(r"(?<=\d) (?=(?:%|[mµ]?s\b|min\b|h\b))")  # Between a figure and its unit no line ends.
_NUMBER = re.compile(r"[-+$]*[0-9][0-9.,]*( \S+|%)?\Z")


def emit_json(value: object) -> None:
    click.echo(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False))


def unstyled() -> bool:
    """Whether NO_COLOR (https://no-color.org) or a dumb terminal forbids escape codes."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def bold(text: str) -> str:
    """For a terminal; click leaves the codes out where output goes into a pipe."""
    return text if unstyled() else click.style(text, bold=True)


def paragraph(text: str, indent: str = "") -> None:
    """A line of words, folded where it is too long; with an empty one below where it ends in a new line."""
    fold = textwrap.TextWrapper(_width(), indent, 2 * indent, break_on_hyphens=False, break_long_words=False)
    click.echo(fold.fill(_FIGURE.sub("\xa0", text)).replace("\xa0", " "))
    if text.endswith("\n"):
        click.echo()


@dataclass(frozen=True, slots=True)
class _Column:
    head: str
    cells: list[str]

    @property
    def numeric(self) -> bool:
        filled = [cell for cell in self.cells if cell not in ("", "-")]
        return bool(filled) and all(_NUMBER.match(cell) for cell in filled)

    @property
    def widest(self) -> int:
        return max(len(line) for text in (self.head, *self.cells) for line in text.split("\n"))

    @property
    def least(self) -> int:
        """How narrow it may get: figures stay whole, words are folded."""
        cells = max(map(len, self.cells), default=0)
        words = max((len(word) for text in self.cells for word in text.split()), default=0)
        head = max((len(word) for word in self.head.split()), default=0)
        return max(head, cells if self.numeric else min(cells, max(LEAST_TEXT, min(words, LEAST_WORD))))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout. Columns of numbers, with or without a unit, stand to the right."""
    width = _width()
    made = [
        _Column(head, ["" if row[place] is None else str(row[place]) for row in rows])
        for place, head in enumerate(columns)
    ]
    lines = [bold("\n".join(_folded(title, width)))] if title else []
    for part in _parts(made, width):
        lines += [*_grid(part, width), ""]
    click.echo("\n".join(lines))


def table_of(title: str, items: Iterable[T], columns: Mapping[str, Callable[[T], object]]) -> None:
    """A table with a row for each item; columns are heads with what makes their cells."""
    table(title, list(columns), [[cell(item) for cell in columns.values()] for item in items])


def _parts(columns: list[_Column], width: int) -> list[list[_Column]]:
    """The columns, or groups of them that fit, each with the first; numbered where that does not tell rows apart."""

    def takes(part: list[_Column]) -> int:
        return sum(item.least + PADDING for item in part)

    if takes(columns) <= width:
        return [columns]
    first = columns[0]
    known, rows = [first], len(first.cells)
    if len(set(first.cells)) < rows:
        known = [_Column("#", [str(number) for number in range(1, rows + 1)]), first]
    parts = [known]
    for column in columns[1:]:
        if takes([*parts[-1], column]) > width and len(parts[-1]) > len(known):
            parts.append(known)
        parts[-1] = [*parts[-1], column]
    return parts


def _grid(columns: list[_Column], width: int) -> list[str]:
    """The lines of a table: heads, a line, and rows as high as their cells."""
    widths = _widths(columns, width)
    heads, *rows = (
        [_folded(cell, room) for cell, room in zip(row, widths, strict=True)]
        for row in zip(*([column.head, *column.cells] for column in columns), strict=True)
    )
    right = [column.numeric for column in columns]
    high = max(map(len, heads))
    heads = [[""] * (high - len(head)) + head for head in heads]
    lines = [bold(line) for line in _lines(heads, widths, right)]
    lines.append("─" * min(sum(widths) + PADDING * len(widths) - 1, width))
    for row in rows:
        lines += _lines(row, widths, right)
    return lines


def _widths(columns: list[_Column], width: int) -> list[int]:
    """As wide as what they hold; where that is too much, heads of figures are folded, then the widest words."""
    room = width - PADDING * len(columns) + 2
    if sum(column.widest for column in columns) <= room:
        return [column.widest for column in columns]
    least = [min(column.least, width - 2) for column in columns]
    words = [low if column.numeric else 1 for low, column in zip(least, columns, strict=True)]
    widths = [low if column.numeric else column.widest for low, column in zip(least, columns, strict=True)]
    for floor in (least, words):
        spare = [place for place, low in enumerate(floor) if widths[place] > low]
        while sum(widths) > room and spare:
            widths[max(reversed(spare), key=widths.__getitem__)] -= 1
            spare = [place for place, low in enumerate(floor) if widths[place] > low]
    return widths


def _lines(cells: list[list[str]], widths: list[int], right: list[bool]) -> list[str]:
    places = list(zip(cells, widths, right, strict=True))
    lines = []
    for row in range(max(len(cell) for cell in cells)):
        parts = ((cell[row] if row < len(cell) else "", room, to_right) for cell, room, to_right in places)
        shown = (part.rjust(room) if to_right else part.ljust(room) for part, room, to_right in parts)
        lines.append(f" {(' ' * PADDING).join(shown)}".rstrip())
    return lines


def _folded(text: str, width: int) -> list[str]:
    """Lines of at most so many letters, between words where that is possible."""
    if len(text) <= width and "\n" not in text:
        return [text]
    lines = text.split("\n")
    return [part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]]


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal():
        return max(LEAST_WIDTH, int(columns))
    if sys.stdout.isatty():
        return max(LEAST_WIDTH, os.get_terminal_size(sys.stdout.fileno()).columns)
    return WIDEST


def count(value: float) -> str:
    """`1,234,567`; three digits below a hundred when it is not whole."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return digits(value)


def short(value: float) -> str:
    """`8.03 B`: large counts, such as parameters or FLOPs, in thousands' steps."""
    return _in_steps(value, ("T", "B", "M", "K")) or count(value)


def bytes_(value_bytes: float) -> str:
    """`16.1 GB`, decimal as GPU makers count."""
    return _in_steps(value_bytes, ("TB", "GB", "MB", "kB")) or f"{value_bytes:.0f} B"


def _in_steps(value: float, units: Sequence[str]) -> str:
    for limit, unit in zip((1e12, 1e9, 1e6, 1e3), units, strict=True):
        if abs(value) >= limit * 0.9995:
            return f"{digits(value / limit)} {unit}"
    return ""


def percent(share: float, below: float | None = None) -> str:
    """`37.4 %`; with more digits where that looks like what it is below."""
    text = f"{digits(share * 100)} %"
    if below is None or share >= below:
        return text
    for places in range(2, 7):
        if text != f"{digits(below * 100)} %" and float(text[:-2]) < below * 100:
            break
        text = f"{share * 100:.{places}f} %"
    return text


@dataclass(frozen=True, slots=True)
class ProgressBar:
    """Calling it with a stage's name starts that stage."""

    shown: Progress
    task: TaskID

    def __call__(self, stage: str) -> None:
        self.shown.update(self.task, description=stage, advance=1)

    def far(self, done: int, total: int) -> None:
        """Show progress within the current stage; the bar then measures that stage alone."""
        self.shown.update(self.task, completed=done, total=total)


@contextmanager
def progress(total: int) -> Iterator[ProgressBar]:
    """Yields a progress bar that is called with the name of each stage; `total` is about the number of stages.

    A bar in a terminal; elsewhere a line on stderr every `REPORT_INTERVAL_S` seconds.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console, hidden = Console(stderr=True), not sys.stderr.isatty() or unstyled()
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        progress_bar, ended = ProgressBar(bar, bar.add_task("starting", total=total)), threading.Event()
        reporter = threading.Thread(target=_report_stages, args=(progress_bar, ended), daemon=True)
        if hidden:
            reporter.start()
        try:
            yield progress_bar
        finally:
            ended.set()


REPORT_INTERVAL_S = 15.0


def _report_stages(progress_bar: ProgressBar, ended: threading.Event) -> None:
    began_s = time.monotonic()
    while not ended.wait(REPORT_INTERVAL_S):
        stage = progress_bar.shown.tasks[0].description
        click.echo(f"{stage}, {time.monotonic() - began_s:.0f} s so far", err=True)


DONE, NO, BAD_INPUT, MISSED, BUG, INTERRUPTED = 0, 1, 2, 3, 70, 130
MEANINGS = (
    (DONE, "done"),
    (
        NO,
        "failed: `replay` differs, a planned replica got no request, `export --check` failed, or broken pipe",
    ),
    (BAD_INPUT, "bad input or infeasible: the error line names the field and the fix"),
    (
        MISSED,
        "done, but an SLO is missed or not all demand is met (`plan`, `simulate`, `bench --slo`)",
    ),
    (BUG, "internal error (POTLUCK_DEBUG=1 prints the traceback)"),
    (INTERRUPTED, "interrupted"),
)


def missed() -> NoReturn:
    """Exit with the code for a missed SLO, after all output."""
    sys.stdout.flush()
    sys.exit(MISSED)
