"""Values as JSON has them: fields of a plan and of what commands print, from the code's own dataclasses."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docsite.spec_fields import docstrings
from potluck.core.values.plan import PLAN_VERSION, Plan
from potluck.perf.timers.profile import PROFILE_FORMAT, PROFILE_VERSION, Profile
from potluck.runtime.brain_log import FORMAT as LOG_FORMAT
from potluck.runtime.brain_log import VERSION as LOG_VERSION
from potluck.sim.results.metrics import RunSummary

FORMATS = {"potluck.plan": PLAN_VERSION, PROFILE_FORMAT: PROFILE_VERSION, LOG_FORMAT: LOG_VERSION}
ROOTS: tuple[tuple[str, type], ...] = (
    ("The plan file", Plan),
    ("What `potluck simulate --json` prints", RunSummary),
    ("The profile file", Profile),
)
INTRO = """\
# Values in JSON

What plan files, simulations and profiles hold, made of the code when the site is built; [formats](../formats.md) has
the files and their versions. Every object also has `type`, its name here. Names end in their unit.
"""


def pages() -> dict[str, str]:
    seen: set[type] = set()
    parts = [INTRO]
    for title, root in ROOTS:
        parts.append(f"## {title}\n")
        parts += [_section(kind) for kind in _below(root, seen)]
    return {"reference/values.md": "\n".join(parts)}


def _below(kind: type, seen: set[type]) -> Iterator[type]:
    """A dataclass and all that its fields are made of, each once."""
    if kind in seen:
        return
    seen.add(kind)
    yield kind
    for hint in get_type_hints(kind).values():
        for inner in _classes(hint):
            yield from _below(inner, seen)


def _classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for inner in get_args(hint):
        yield from _classes(inner)


def _section(kind: type) -> str:
    hints, message = get_type_hints(kind), docstrings(kind)
    text = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    lines = [f"(value-{kind.__name__.lower()})=", f"### {kind.__name__}", "", text, ""]
    lines += ["| field | what it is | kind | default |", "|---|---|---|---|"]
    for field in fields(kind):
        cells = (f"`{field.name}`", message.get(field.name, ""), _kind(hints[field.name]), _default(field))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _kind(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if item is type(None) else _kind(item) for item in inner)
    if origin is Literal:
        return ", ".join(f"`{item}`" for item in inner)
    if origin is tuple:
        shown = [_kind(item) for item in inner if item is not ...]
        return f"list of {shown[0]}" if ... in inner else "list: " + ", ".join(shown)
    if origin is dict or (origin is not None and issubclass(origin, dict)):
        return f"{_kind(inner[0])} to {_kind(inner[1])}"
    if isinstance(hint, type) and is_dataclass(hint):
        return f"[{hint.__name__}](#value-{hint.__name__.lower()})"
    names = {float: "number", int: "whole number", str: "text", bool: "true or false"}
    return names.get(hint, "values") if isinstance(hint, type) else "values"


def _default(field: Field[Any]) -> str:
    if field.default is MISSING or field.default in ((), "", None):
        return ""
    return f"`{field.default}`"
