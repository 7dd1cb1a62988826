"""Limits on JSON schemas and patterns, and the path at which each is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.api.grammar_fields import check_grammar_fields
from potluck.api.json_schema_limits import (
    JSON_SCHEMA_MAX_BYTES,
    JSON_SCHEMA_MAX_COUNT,
    JSON_SCHEMA_MAX_DEPTH,
    JSON_SCHEMA_MAX_LENGTH,
    check_json_schema,
    check_json_schema_text,
)
from potluck.api.openai_requests import schema_of
from potluck.api.regex_limits import PATTERN_MAX_ATOMS, PATTERN_MAX_CHARS, check_pattern
from potluck.api.segments import segment_of
from potluck.core.errors import InputError

Schema = dict[str, Any]
HUGE = 1_000_000_000


def nested_schema(depth: int, leaf: Schema, wrap: Callable[[Schema], Schema]) -> Schema:
    for _ in range(depth):
        leaf = wrap(leaf)
    return leaf


def exponential_schema(levels: int, twice: Callable[[Schema], Schema]) -> Schema:
    """Each definition names the one before twice."""
    names = {f"a{n}": twice({"$ref": f"#/$defs/a{n - 1}"}) for n in range(1, levels)}
    return {"$defs": {"a0": {"type": "string"}, **names}, "$ref": f"#/$defs/a{levels - 1}"}


REFUSED: dict[str, tuple[Schema, str]] = {
    "minItems": (
        {"type": "array", "items": {"type": "null"}, "minItems": HUGE},
        "f.minItems: must be at most",
    ),
    "float count": ({"type": "array", "minItems": 1e9}, "f.minItems: must be at most 10000, is 1000000000"),
    "number too large to print": ({"maxItems": 10**290}, "f.maxItems: must be at most 10000, is 1e+290"),
    "minLength": ({"type": "string", "minLength": HUGE}, "f.minLength: must be at most"),
    "maxLength": (
        {"properties": {"a b": {"maxLength": HUGE}}},
        "f.properties.'a b'.maxLength: must be at most",
    ),
    "minProperties": ({"minProperties": HUGE}, "f.minProperties: must be at most"),
    "minContains": ({"contains": {}, "minContains": HUGE}, "f.minContains: must be at most"),
    "under not": ({"not": {"items": {"maxItems": HUGE}}}, "f.not.items.maxItems: must be at most"),
    "in a tuple": ({"items": [{}, {"maxItems": HUGE}]}, "f.items[1].maxItems: must be at most"),
    "many counts": ({"anyOf": [{"minItems": 9_000} for _ in range(30)]}, "add up to more than 100000"),
    "many lengths": ({"anyOf": [{"maxLength": 90_000} for _ in range(30)]}, "add up to more than 2000000"),
    "items cubed": (
        nested_schema(3, {"type": "null"}, lambda inner: {"items": inner, "minItems": 1000}),
        "stands for more than 10000000",
    ),
    "items through references": (
        {
            "$defs": {"row": {"items": {"type": "null"}, "maxItems": 9_000}},
            "items": {"items": {"$ref": "#/$defs/row"}, "maxItems": 9_000},
        },
        "stands for more than 10000000",
    ),
    "doubled allOf": (
        exponential_schema(26, lambda one: {"allOf": [one, one]}),
        "stands for more than 10000000",
    ),
    "doubled properties": (
        exponential_schema(26, lambda one: {"properties": {"x": one, "y": one}}),
        "f.$defs.a22: stands for more than 10000000",
    ),
    "nested properties": (
        nested_schema(3000, {}, lambda inner: {"properties": {"a": inner}}),
        f"nested deeper than {JSON_SCHEMA_MAX_DEPTH}",
    ),
    "deep data": ({"const": nested_schema(3000, {}, lambda inner: {"a": inner})}, "nested deeper than"),
    "pattern": ({"pattern": "^a{1000000}$"}, "f.pattern: has more than 10000 characters and classes"),
    "nested pattern": ({"items": {"pattern": "(a{1000}){1000}"}}, "f.items.pattern: has more than 10000"),
    "patternProperties": (
        {"patternProperties": {"(a{999}){999}": {}}},
        "f.patternProperties.'(a{999}){999}'",
    ),
    "propertyNames": ({"propertyNames": {"pattern": "b{99999}"}}, "f.propertyNames.pattern: has more than"),
    "many patterns": ({"anyOf": [{"pattern": "a{9000}"} for _ in range(9)]}, "patterns have more than 50000"),
    "pattern of a number": ({"pattern": 3}, "f.pattern: must be text"),
    "reference to itself": ({"$ref": "#"}, "f: refers to itself without an item or property"),
    "references in a circle": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        "refers to itself without an item or property",
    ),
    "choice of itself": ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "refers to itself"),
    "remote reference": ({"$ref": "https://example.com/a.json#/b"}, "f.$ref: names another document"),
    "reference to a file": ({"items": {"$ref": "other.json"}}, "f.items.$ref: names another document"),
    "reference to nothing": ({"$ref": "#/$defs/none"}, "f.$ref: names no schema in this one"),
    "reference to a number": ({"minItems": 1, "$ref": "#/minItems"}, "names no schema in this one"),
    "unknown keyword that is named": ({"x-foo": {"maxItems": HUGE}, "$ref": "#/x-foo"}, "f.'x-foo'.maxItems"),
    "data that is named": ({"default": [{"maxItems": HUGE}], "$ref": "#/default/0"}, "f.default[0].maxItems"),
    "escaped pointer": ({"$defs": {"a/b": {"maxItems": HUGE}}, "$ref": "#/%24defs/a~1b"}, "maxItems"),
    "anchor": (
        {"x": {"$anchor": "k", "minItems": HUGE}, "not": {"$ref": "#/x"}, "if": {"$ref": "#k"}},
        "minItems",
    ),
    "another base": (
        {"properties": {"a": {"$id": "https://example.com/a"}}},
        "f.properties.a.$id: is only possible",
    ),
    "enum": ({"enum": list(range(6_000))}, "f.enum: the schema has more than 5000 values"),
    "properties": ({"properties": {f"p{n}": {} for n in range(1_001)}}, "more than 1000 properties"),
    "values": ({"examples": [0] * 30_000}, "has more than 20000 values"),
    "text": ({"title": "x" * JSON_SCHEMA_MAX_BYTES}, f"at most {JSON_SCHEMA_MAX_BYTES} are taken"),
    "text after escapes": ({"title": "\u00e9" * 20_000}, f"at most {JSON_SCHEMA_MAX_BYTES} are taken"),
    "multipleOf": ({"multipleOf": 1_000_003}, "f.multipleOf: must be at most 100000"),
    "small multipleOf": ({"multipleOf": 0.1234567}, "f.multipleOf: must be at most 100000"),
    "whole number": ({"minimum": 10**400}, "f.minimum: is a number of more than 1000 bits"),
    "infinite": ({"maximum": float("inf")}, "f.maximum: must be a finite number"),
    "format": ({"format": "x" * 65}, "f.format: must have at most 64 characters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_schema_beyond_a_limit_is_refused_at_its_path(name: str) -> None:
    schema, says = REFUSED[name]
    with pytest.raises(InputError) as caught:
        check_json_schema(schema, "f")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert caught.value.field.startswith("f")


TREE: Schema = {
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 50}},
}
ACCEPTED: dict[str, Schema] = {
    "nothing": {},
    "tree": TREE,
    "tree by its own name": {"$id": "https://example.com/t", "items": {"$ref": "https://example.com/t#"}},
    "linked list": {
        "$defs": {"n": {"anyOf": [{"type": "null"}, {"properties": {"next": {"$ref": "#/$defs/n"}}}]}},
        "$ref": "#/$defs/n",
    },
    "two that name each other": {
        "$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"items": {"$ref": "#/$defs/a"}}},
        "$ref": "#/$defs/a",
    },
    "names of keywords as properties": {
        "properties": {
            "minItems": {"const": HUGE},
            "$ref": {"type": "string"},
            "pattern": {"default": {"maxLength": HUGE}},
            "properties": {"enum": [{"minItems": HUGE}]},
        },
        "examples": [{"maxLength": HUGE, "$ref": "https://example.com"}],
    },
    "limits exactly": {"minItems": JSON_SCHEMA_MAX_COUNT, "maxLength": JSON_SCHEMA_MAX_LENGTH},
    "orders with lines": nested_schema(
        2, {"type": "integer"}, lambda inner: {"items": inner, "maxItems": 1000}
    ),
    "decimal places": {"multipleOf": 0.01},
    "round multipleOf": {"multipleOf": 1_000_000},
    "repeated definition": exponential_schema(12, lambda one: {"properties": {"x": one, "y": one}}),
    "flags and fragments": {"properties": {"a": {"$id": "#/properties/a"}}, "additionalProperties": False},
    "booleans": {"items": True, "not": False, "$defs": {"a": True}, "contains": {"$ref": "#/$defs/a"}},
    "odd counts, which engines refuse": {
        "minItems": "3",
        "maxItems": None,
        "minLength": -1,
        "maxLength": True,
    },
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_schema_within_limits_is_accepted(name: str) -> None:
    check_json_schema(ACCEPTED[name], "f")


@pytest.mark.parametrize(
    ("pattern", "atoms"),
    [
        ("abc", 3),
        ("a{3}", 3),
        ("a{2,5}", 5),
        ("a{7,}", 7),
        ("a{ 4 }", 4),
        ("(ab){5}c", 11),
        ("((a{2}){3}){4}", 24),
        ("a{10}{10}", 100),
        ("(a|b{5}){3}", 18),
        (r"\{100000}", 8),
        (r"\p{L}{9}", 9),
        ("[a-z{99999}]{3}", 3),
        ("[]a]{3}", 5),
        ("[a[b]]{3}", 4),
        ("[[:alpha:]]{2}", 3),
        (r"[\]{99999}]", 1),
        ("(?<name>ab){4}", 8),
        ("(?:ab){4}(?i)", 8),
        ("a{x}", 4),
        (")a{2}", 3),
        ("[a", 1),
        (r"[\]{9}]{2}", 2),
        ("a*b+?", 2),
    ],
)
def test_pattern_size_counts_repetitions(pattern: str, atoms: int) -> None:
    assert check_pattern(pattern, "f") == atoms


@pytest.mark.parametrize(
    "pattern",
    [
        "a{1000000}",
        "a{99999999999999999999}",
        "a{1,1000000}",
        "a{,1000000}",
        "a{ 1000000 }",
        "(a{1000}){1000}",
        "((a{1000}){1000}){1000}",
        "a{1000}{1000}",
        "(?:[a-z]{100}-){101}",
        "[[a]{20000}",
        "[^]{20000}",
        "(x[])]a{1000}){1000}",
        "(x[a[b])]a{1000}){1000}",
        "(" * 51 + ")" * 51,
        "(?<" * 1300,
        "x" * (PATTERN_MAX_CHARS + 1),
    ],
)
def test_pattern_beyond_the_limits_is_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="^f: "):
        check_pattern(pattern, "f")


def problem_of(check: Callable[[], object]) -> str:
    try:
        check()
    except InputError as error:
        return str(error)
    return ""


@given(st.text(alphabet="ab01239{},()[]?*+|\\^$:<>P ", max_size=200))
def test_any_text_as_a_pattern_is_measured_or_refused(pattern: str) -> None:
    problem = problem_of(lambda: check_pattern(pattern, "f"))
    assert not problem or problem.startswith("f: ")
    assert problem or 0 <= check_pattern(pattern, "f") <= PATTERN_MAX_ATOMS


KEYS = "items properties $ref $defs allOf anyOf minItems maxItems pattern enum $id not a"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(KEYS.split()),
            inner | st.sampled_from(["#", "#/$defs/a", "#/items", "#a", "x#y"]),
            max_size=5,
        )
    ),
    max_leaves=40,
)


@given(st.dictionaries(st.sampled_from(["items", "properties", "$ref", "$defs", "allOf", "$anchor"]), JSON))
def test_any_json_schema_is_accepted_or_refused_in_one_line(schema: Schema) -> None:
    assert "\n" not in problem_of(lambda: check_json_schema(schema, "f"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "the schema cannot be used"),
        ("[" * 20_000, "the schema cannot be used"),
        ("[]", "must be an object"),
        (" " * 70_000, "at most 65536 are taken"),
        ('{"minItems":NaN}', "must be a finite number"),
        ('{"minItems":1000000000}', "minItems: must be at most"),
    ],
)
def test_invalid_schema_text_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        check_json_schema_text(text, "f")
    check_json_schema_text("true", "f")


BOMB = {"type": "array", "items": {"type": "null"}, "minItems": HUGE}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": BOMB, "end": "</a>"}],
    "triggers": ["<a>"],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": BOMB}}
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BOMB}}},
        "response_format.json_schema.schema.minItems",
    ),
    "structural tag": ({"response_format": TAG}, "response_format.structures[0].schema.minItems"),
    "tag as text": (
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        "structural_tag.structures[0]",
    ),
    "outputs": ({"structured_outputs": {"json": BOMB}}, "structured_outputs.json.minItems"),
    "outputs as text": (
        {"structured_outputs": {"json": json.dumps(BOMB)}},
        "structured_outputs.json.minItems",
    ),
    "regex": ({"structured_outputs": {"regex": "a{999999}"}}, "structured_outputs.regex"),
    "choice": ({"structured_outputs": {"choice": ["a"] * 9_000}}, "structured_outputs.choice"),
    "grammar": ({"structured_outputs": {"grammar": 'root ::= "a"{999999}'}}, "structured_outputs.grammar"),
    "lark": ({"guided_grammar": 'start: "a"~1..999999'}, "guided_grammar"),
    "guided_json": ({"guided_json": json.dumps(BOMB)}, "guided_json.minItems"),
    "guided_regex": ({"guided_regex": "(a{999}){999}"}, "guided_regex"),
    "required tool": ({"tools": [TOOL], "tool_choice": "required"}, "tools[0].function.parameters.minItems"),
    "named tool": ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tools[0].function.parameters"),
    "strict tool": (
        {"tools": [{"function": {**TOOL["function"], "strict": True}}]},  # type: ignore[dict-item]
        "tools[0].function.parameters.minItems",
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_that_makes_a_grammar_is_checked(name: str) -> None:
    body, field = FIELDS[name]
    with pytest.raises(InputError) as caught:
        check_grammar_fields(body)
    assert str(caught.value).startswith(field) or field in caught.value.field


def test_only_requests_with_their_own_grammar_are_marked() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": TREE}}
    assert check_grammar_fields({"response_format": schema})
    assert check_grammar_fields({"structured_outputs": {"regex": "a+"}})
    assert check_grammar_fields({"tools": [{"function": {"parameters": TREE}}], "tool_choice": "required"})
    for body in (
        {},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {}},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": []},
    ):
        assert not check_grammar_fields(body)


def test_grammars_in_client_and_segment_bodies_are_checked() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": BOMB}}
    with pytest.raises(InputError, match="minItems: must be at most"):
        schema_of(form)
    segment = {"request": "r", "model": "m", "tokens": [1], "max_tokens": 1}
    with pytest.raises(InputError, match=r"sampling\.json_schema\.minItems: must be at most"):
        segment_of({**segment, "sampling": {"json_schema": json.dumps(BOMB)}})
    own = {"path": "/v1/chat/completions", "body": {"response_format": form}}
    with pytest.raises(InputError, match="minItems: must be at most"):
        segment_of({**segment, "own": own})
