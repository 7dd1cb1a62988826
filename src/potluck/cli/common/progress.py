"""A progress bar on stderr for work that takes seconds; silent where there is no terminal for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from potluck.cli.common.render import unstyled

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@dataclass(frozen=True, slots=True)
class ProgressBar:
    """Calling it names the stage under way, one of those that were foreseen."""

    shown: Progress
    task: TaskID

    def __call__(self, stage: str) -> None:
        self.shown.update(self.task, description=stage, advance=1)

    def far(self, done: int, total: int) -> None:
        """How far the stage under way has got, for one that counts; from here on the bar is that stage's."""
        self.shown.update(self.task, completed=done, total=total)


@contextmanager
def progress(total: int) -> Iterator[ProgressBar]:
    """Yields what names the stage under way; `total` is roughly how many there will be."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console, hidden = Console(stderr=True), not sys.stderr.isatty() or unstyled()
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        yield ProgressBar(bar, bar.add_task("starting", total=total))
