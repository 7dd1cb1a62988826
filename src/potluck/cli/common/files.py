"""Files that commands read and write: told by name when something is wrong, and before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import click

from potluck.core.errors import InputError, PotluckError

T = TypeVar("T")
PATH, FILE = click.Path(path_type=Path), click.Path(dir_okay=False, path_type=Path)
FOLDER, EXISTING = (
    click.Path(file_okay=False, path_type=Path),
    click.Path(exists=True, dir_okay=False, path_type=Path),
)
"""Types of options: `EXISTING` is a file that must be there."""
Command = TypeVar("Command", bound=Callable[..., object])
MAX_FILE_BYTES = 256 << 20
"""Of a file that is read as a whole; plans, profiles and markets take a few MB at most."""


def option_group(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Options that several commands have, as one decorator."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def positive(field: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise InputError(field, f"must be positive, is {value:g}")
    return value


def require_writable(option: str, path: Path | None) -> None:
    """Refuse a place that cannot be written to, while that still costs nothing."""
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        raise InputError(option, f"there is no folder {str(folder)!r}; make it first")
    if path.is_dir():
        raise InputError(option, f"{str(path)!r} is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(option, f"{str(path)!r} may not be written")


def read_bytes(path: Path, option: str = "") -> bytes:
    """All of a file; what cannot be read is said with its name, and with the option that named it."""
    where = f"{option}: {path}" if option else str(path)
    try:
        with path.open("rb") as file:
            received = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(where, f"cannot be read: {error.strerror or error}") from error
    if len(received) > MAX_FILE_BYTES:
        raise InputError(where, f"is larger than {MAX_FILE_BYTES >> 20} MiB; name another file")
    return received


def read_text(path: Path, option: str = "") -> str:
    try:
        return read_bytes(path, option).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{option}: {path}" if option else str(path), "is not text in UTF-8") from error


def write_text(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(option, f"{path} cannot be written ({error.strerror or error})") from error


def named(path: Path, read: Callable[[str], T], option: str = "") -> T:
    """What a text file holds; whatever is wrong with it is said with its name."""
    text = read_text(path, option)
    try:
        return read(text)
    except PotluckError as error:
        # A parser that knows no name speaks of its "file".
        nameless = isinstance(error, InputError) and error.field == "file"
        problem = error.problem if isinstance(error, InputError) and nameless else str(error)
        raise InputError(f"{option}: {path}" if option else str(path), problem) from error


@dataclass(slots=True)
class OutputFiles:
    """Files that are written at the end. Where one cannot be, the command goes on, and `complain` says why."""

    wrong: list[InputError] = field(default_factory=list)

    def __call__(self, option: str, path: Path | None, write: Callable[[Path], object]) -> None:
        if path is None:
            return
        try:
            _whole(path, write)
        except OSError as error:
            problem = f"{path}: {error.strerror or 'cannot be written'}"
            self.wrong.append(InputError(option, f"{problem}; what was computed is printed"))

    def text(self, option: str, path: Path | None, text: Callable[[], str]) -> None:
        self(option, path, lambda to: to.write_text(text(), encoding="utf-8"))

    def complain(self) -> None:
        if self.wrong:
            raise InputError(self.wrong[0].field, "; ".join(error.problem for error in self.wrong))


def _whole(path: Path, write: Callable[[Path], object]) -> None:
    """All of it or nothing: what was there before stays until the new one is complete."""
    if path.exists() and not path.is_file():
        write(path)  # a device or a pipe
        return
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        write(part)
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
