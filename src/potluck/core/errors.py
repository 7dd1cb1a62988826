"""The one exception tree. Every message names the field and the fix in one line, as it is shown to the user.

PotluckError
├── InputError          what a person wrote is wrong: exit code 2, HTTP 400
│   ├── UnknownNameError    a name that no catalog or file defines
│   └── FormatError         a file of another version or shape
└── CapacityError       the input is sound, but the hardware cannot do it"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PotluckError(Exception):
    """Root of everything Potluck raises on purpose."""


class InputError(PotluckError):
    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}" if field else problem)


COMPARED_CHARS = 200
"""Of a name that is compared with known ones and shown: a client's may have megabytes."""


class UnknownNameError(InputError):
    """A name that is not known where it was used; suggests the nearest ones that are."""

    def __init__(self, field: str, name: str, known: Iterable[str]) -> None:
        self.name = name
        shown = name[:COMPARED_CHARS]
        super().__init__(field, f"unknown {shown!r}{did_you_mean(shown, known)}")


class FormatError(InputError):
    """A stored file does not have the shape or version this release reads."""


class CapacityError(PotluckError):
    """The request is well formed but no hardware in question can carry it out."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when something near exists, else the choices when they are few."""
    choices = sorted(set(known))
    lowered = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name[:COMPARED_CHARS].lower(), lowered, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {lowered[near[0]]!r}?"
    if 0 < len(choices) <= 12:
        return f"; known are {', '.join(choices)}"
    return ""
