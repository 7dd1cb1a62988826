"""`logit_bias` and `response_format`, as how tokens are drawn: pairs of tokens and biases, and a JSON schema."""

from __future__ import annotations

import json

from potluck.core.errors import FormatError, InputError

LONGEST_SCHEMA = 1 << 16
"""Characters, as JSON without blanks."""
ANY_OBJECT = '{"type":"object"}'
"""What `json_object` asks for."""
FORMATS = ("text", "json_object", "json_schema")
SCHEMA_KEYS = frozenset({"name", "description", "schema", "strict"})


def bias_of(value: object) -> tuple[tuple[int, float], ...]:
    """OpenAI's `{"token": bias}`, tokens as texts; by token."""
    if not isinstance(value, dict):
        raise FormatError("logit_bias", 'must be an object of tokens and biases, such as {"50": -100}')
    found = []
    for name, bias in value.items():
        if not (name.isascii() and name.isdigit()) or len(name) > 10:
            raise FormatError("logit_bias", f"{name[:40]!r} is not the number of a token")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise FormatError("logit_bias", f"must be a number for token {name}")
        found.append((int(name), float(bias)))
    return tuple(sorted(found))


def schema_of(value: object) -> str:
    """The schema of `response_format`, as JSON in the order of the client; empty for text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str) or kind not in FORMATS:
        raise FormatError("response_format", f"must have a type of {', '.join(FORMATS)}")
    if kind != "json_schema":
        if set(value) != {"type"}:
            raise FormatError("response_format", f"has nothing beside its type {kind}")
        return ANY_OBJECT if kind == "json_object" else ""
    given = value.get("json_schema")
    if set(value) != {"type", "json_schema"} or not isinstance(given, dict):
        raise FormatError("response_format", "of type json_schema must have a json_schema and no more")
    unknown = given.keys() - SCHEMA_KEYS
    if unknown:
        raise FormatError("response_format.json_schema", f"unknown key {min(unknown)[:60]}")
    for name, wanted in (("name", str), ("description", str), ("strict", bool)):
        if given.get(name) is not None and not isinstance(given[name], wanted):
            raise FormatError(f"response_format.json_schema.{name}", f"must be {_called(wanted)}")
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise FormatError("response_format.json_schema.schema", "must be an object: a JSON schema")
    text = json.dumps(schema, separators=(",", ":"))
    if len(text) > LONGEST_SCHEMA:
        line = f"has {len(text)} characters, at most {LONGEST_SCHEMA} are taken"
        raise InputError("response_format.json_schema.schema", line)
    return text


def _called(kind: type) -> str:
    return "text" if kind is str else "true or false"
