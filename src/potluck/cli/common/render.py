"""What commands print: JSON, tables and numbers with their units.

Tables go to stdout through rich, without colour and never narrower than MIN_WIDTH when stdout is not a
terminal, so that output in a pipe or a log is whole.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Sequence

import click

from potluck.core.figures import digits

MIN_WIDTH = 100
PIPE_WIDTH = 140
WIDEST = 200
LISTING_WIDTH = 80
"""Of listings whose last column is folded, in a terminal and in a pipe alike."""
LEAST_LAST = 20
_NUMBER = re.compile(r"[-+$]*[0-9][0-9.,]*( \S+|%)?\Z")


def emit_json(value: object) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout. Columns of numbers, with or without a unit, stand to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    for i, column in enumerate(columns):
        filled = [row[i] for row in cells if row[i] not in ("", "-")]
        numeric = bool(filled) and all(_NUMBER.match(cell) for cell in filled)
        grid.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        # Text, not markup: a name may hold square brackets.
        grid.add_row(*(Text(cell) for cell in row))
    # In a pipe nothing is folded that a script might look for, within reason.
    needed = Console(width=WIDEST).measure(grid).maximum
    width = _width() if sys.stdout.isatty() else max(_width(), min(needed, WIDEST))
    console = Console(file=sys.stdout, width=width, highlight=False, soft_wrap=False)
    console.print(grid)
    console.print()


def narrow(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout with one space between columns and no lines, for names that leave little room."""
    cells = [list(columns), *[["" if cell is None else str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    right = [
        bool(rows) and all(_NUMBER.match(row[place]) or row[place] in ("", "-") for row in cells[1:])
        for place in range(len(columns))
    ]
    for row in cells:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        click.echo(" ".join(padded).rstrip())
    click.echo()


def listing(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of 80 columns whose last column, of long names, is folded between words."""
    widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns) - 1)]
    room = max(LISTING_WIDTH - sum(widths) - 2 * len(widths), LEAST_LAST)
    click.echo(title)
    for row in (columns, *rows):
        first = "  ".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True))
        for place, part in enumerate(textwrap.wrap(row[-1], room, break_on_hyphens=False) or [""]):
            click.echo(f"{first if not place else ' ' * len(first)}  {part}".rstrip())
    click.echo()


def _width() -> int:
    if sys.stdout.isatty():
        return max(MIN_WIDTH, os.get_terminal_size(sys.stdout.fileno()).columns)
    columns = os.environ.get("COLUMNS", "")
    return max(MIN_WIDTH, int(columns) if columns.isdecimal() else PIPE_WIDTH)


def count(value: float) -> str:
    """`1,234,567`; three digits below a hundred when it is not whole."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return digits(value)


def short(value: float) -> str:
    """`8.03 B`: large counts, such as parameters or FLOPs, in thousands' steps."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= limit * 0.9995:
            return f"{digits(value / limit)} {unit}"
    return count(value)


def usd(value_usd: float) -> str:
    """`$2.69`; small prices keep three digits."""
    if value_usd == 0 or abs(value_usd) >= 0.1:
        return f"${value_usd:,.2f}"
    return f"${value_usd:.3g}"


def bytes_(value_bytes: float) -> str:
    """`16.1 GB`, decimal as GPU makers count."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value_bytes) >= limit * 0.9995:
            return f"{digits(value_bytes / limit)} {unit}"
    return f"{value_bytes:.0f} B"


def percent(share: float) -> str:
    """`37.4 %`."""
    return f"{digits(share * 100)} %"
