"""The spec reference: fields of the schema with type, range, default, and the words of `docs/spec-fields.yaml`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from potluck.core.state.policy import Policy
from potluck.core.values.service import RequestClass
from potluck.core.values.types import Gpu
from potluck.spec import schema
from potluck.spec.schema import AT, Written

WORDS = Path(__file__).parent.parent.parent / "docs" / "spec-fields.yaml"
VALUES = {"PolicyIn": Policy, "ClassIn": RequestClass, "GpuIn": Gpu}
"""Where the meaning and the default of a section's fields stand, if not in the schema."""

INTRO = """\
# Spec reference

What may be written in `potluck.yaml`. `potluck init` writes a commented example, `potluck check` says what is wrong
with a file, line by line, and shows what it says. Unknown fields are refused. Paths are relative to the spec.

This page is made of the schema when the site is built; every example on it is read by that schema.
"""


@dataclass(frozen=True, slots=True)
class FieldText:
    name: str
    others: tuple[str, ...]
    says: str
    kind: str
    default: str
    example: dict[str, Any]


def sections() -> list[type[Written]]:
    """Every mapping of the schema, outermost first, as `spec-fields.yaml` has them."""
    return [section(name) for name in words()]


def section(name: str) -> type[Written]:
    result = getattr(schema, name, None)
    if isinstance(result, type) and issubclass(result, Written):
        return result
    raise KeyError(f"{WORDS.name}: {name} is no section of the schema")


def all_sections() -> set[str]:
    kinds = [kind for kind in vars(schema).values() if isinstance(kind, type)]
    result = {kind.__name__ for kind in kinds if issubclass(kind, Written)}
    roots = {"Written", "FleetSpecIn"}  # what all are made of; the same as SpecIn
    return result - roots


@cache
def words() -> dict[str, Any]:
    result = yaml.safe_load(WORDS.read_text("utf-8"))
    assert isinstance(result, dict)
    return result


def written_name(name: str, field: FieldInfo) -> tuple[str, ...]:
    """How a field is written: its first name, then others that are understood."""
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        return tuple(str(choice) for choice in alias.choices)
    return (str(alias or name),)


def field_names(kind: type[Written]) -> dict[str, str]:
    """Fields as they are written, to their names in the schema."""
    return {
        written_name(name, field)[0]: name
        for name, field in kind.model_fields.items()
        if field.validation_alias != AT
    }


@cache
def docstrings(kind: type) -> dict[str, str]:
    """The text below each attribute of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    result: dict[str, str] = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        named = isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
        if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            result[before.target.id] = " ".join(str(after.value.value).split())
    return result


def rows(kind: type[Written]) -> list[FieldText]:
    """The fields of one section; words that are missing everywhere are an error."""
    word = words()[kind.__name__]["fields"]
    shapes = kind.model_json_schema(by_alias=True)
    value = VALUES.get(kind.__name__)
    defaults = {item.name: item.default for item in fields(value)} if value else {}
    field_texts = []
    for written, name in field_names(kind).items():
        field = kind.model_fields[name]
        says = word[written].get("says") or docstrings(value or kind).get(name)
        if not says:
            raise KeyError(f"{WORDS.name}: {kind.__name__}.{written} needs `says`")
        names = written_name(name, field)
        shape = shapes["properties"][written]
        default = "needed" if field.is_required() else _default(field, defaults.get(name))
        example = word[written]["example"]
        field_texts.append(FieldText(written, names[1:], says, _kind(shape), default, example))
    return field_texts


def _default(field: FieldInfo, value: object) -> str:
    written = field.default if field.default_factory is None else None
    shown = value if written is None else written
    if shown is None or shown == () or isinstance(shown, tuple):
        return ""
    return f"`{str(shown).lower() if isinstance(shown, bool) else _number(shown)}`"


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e5 else str(value).removesuffix(".0")


def _kind(shape: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in shape:
        return _section_link(shape["$ref"].rpartition("/")[2])
    for key in ("anyOf", "oneOf"):
        if key in shape:
            return " or ".join(_kind(item) for item in shape[key] if item.get("type") != "null")
    if "const" in shape:
        return f"`{shape['const']}`"
    if "enum" in shape:
        return "one of " + ", ".join(f"`{item}`" for item in shape["enum"])
    if shape.get("type") == "array":
        least, most = shape.get("minItems"), shape.get("maxItems")
        many = f"{least} " if least and least == most else ""
        many = f"{least} to {most} " if least and most and least != most else many
        return f"list of {many}{_kind(shape.get('items', {}))}"
    if shape.get("type") == "object":
        return f"names, each with {_kind(shape.get('additionalProperties', {}))}"
    return _plain(shape)


def _plain(shape: dict[str, Any]) -> str:
    kind = {"number": "number", "integer": "whole number", "string": "text", "boolean": "true or false"}
    text = kind.get(shape.get("type", ""), "number or matrix")
    bounds = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "up to"}
    limits = [f"{word} {shape[key]:,g}" for key, word in bounds.items() if key in shape]
    return f"{text} {', '.join(limits)}" if limits else text


def _section_link(name: str) -> str:
    return f"[{name_of(name)}](#{anchor(name)})"


def name_of(name: str) -> str:
    return str(words()[name]["at"]).rpartition(".")[2].removesuffix("[]")


def anchor(name: str) -> str:
    return f"spec-{name.removesuffix('In').lower()}"


def shown(example: dict[str, Any]) -> str:
    text = yaml.safe_dump(example, default_flow_style=True, sort_keys=False, width=10**6).strip()
    return text.removeprefix("{").removesuffix("}") if len(example) == 1 else text


def pages() -> dict[str, str]:
    parts = [INTRO]
    for kind in sections():
        name = kind.__name__
        lines = [f"({anchor(name)})=", f"## {words()[name]['at']}", "", inspect.getdoc(kind) or "", ""]
        lines += ["| field | what it is |", "|---|---|"]
        for row in rows(kind):
            also = f"<br>also {', '.join(f'`{other}`' for other in row.others)}" if row.others else ""
            default = f"; default {row.default}" if row.default else ""
            default = "; needed" if row.default == "needed" else default
            text = f"{row.says}<br>*{row.kind}{default}*<br>`{shown(row.example)}`"
            cells = (item.replace("|", "\\|") for item in (f"`{row.name}`{also}", text))
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    return {"reference/spec.md": "\n".join(parts)}
