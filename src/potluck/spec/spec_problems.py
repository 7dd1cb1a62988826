"""What is wrong with a spec: every complaint with its file, line and field, raised together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from potluck.core.errors import InputError

Loc = tuple[str | int, ...]
"""Where a value stands: keys and list positions from the root."""

SHOWN = 50
"""More complaints than this help nobody; the rest is counted."""


@dataclass(frozen=True, slots=True)
class SpecProblem:
    """One complaint; `line` counts from 1 and is 0 when the file as a whole is meant."""

    file: str
    line: int
    field: str
    problem: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.field}: {self.problem}" if self.field else f"{place}: {self.problem}"


class SpecError(InputError):
    """A spec that cannot be used. `str` is one line per problem."""

    def __init__(self, problems: Sequence[SpecProblem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line))
        lines = [str(problem) for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"{self.problems[0].file}: and {len(self.problems) - SHOWN} more")
        super().__init__("", "\n".join(lines))


@dataclass(slots=True)
class SpecProblems:
    """Collects complaints while a spec is read; `lines` has the line of every location."""

    file: str
    lines: dict[Loc, int] = field(default_factory=dict)
    found: list[SpecProblem] = field(default_factory=list)
    _seen: set[SpecProblem] = field(default_factory=set)

    def add(self, loc: Loc, problem: str) -> None:
        """Note a complaint; the same one twice counts once."""
        complaint = SpecProblem(self.file, self.line_of(loc), field_path(loc), one_line(problem))
        if complaint not in self._seen:
            self._seen.add(complaint)
            self.found.append(complaint)

    def line_of(self, loc: Loc) -> int:
        """The line of the value, or of the nearest thing around it when it is missing."""
        while loc and loc not in self.lines:
            loc = loc[:-1]
        return self.lines.get(loc, 1)

    def raise_any(self) -> None:
        if self.found:
            raise SpecError(self.found)


def field_path(loc: Iterable[str | int]) -> str:
    """`models[0].slo.ttft_ms`."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = len(part) <= 60 and part.replace("-", "_").isidentifier()
            name = part if plain else shown(part)
            text += f".{name}" if text else name
    return text


def shown(value: object) -> str:
    """A value as an error shows it: on one line and short."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def one_line(text: str) -> str:
    """Errors are printed line by line, so a message must not break one, whatever a name contains."""
    return "".join(char if char.isprintable() else " " for char in text)
