"""A progress bar on stderr for work that takes seconds; silent when stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function that names the stage under way; `total` is roughly how many there will be."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("starting", total=total)

        def said(stage: str) -> None:
            bar.update(task, description=stage, advance=1)

        yield said
