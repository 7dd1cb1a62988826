"""Fields of OpenAI's API that make an engine compile a grammar, checked before any engine gets them.

Requests that go to an engine as they came (tools, stock vLLM, servers of plain OpenAI) are compiled in that engine's
process, which has no limits of its own: an engine that ran out of memory there would take all its requests along.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from potluck.api.json_schema_limits import (
    JSON_SCHEMA_MAX_COUNT,
    JSON_SCHEMA_MAX_ENUM_VALUES,
    check_json_schema,
    check_json_schema_text,
)
from potluck.api.regex_limits import check_pattern
from potluck.core.errors import InputError

GRAMMAR_MAX_CHARS = 1 << 16
STRUCTURE_MAX_DEPTH = 64
GRAMMAR_COUNTS = re.compile(r"(?:[{,~]|\.\.)\s*(\d+)")
"""Repetitions of EBNF (`{2,5}`) and Lark (`~ 2..5`)."""
PLAIN_FORMATS = (None, "text", "json_object")
"""Types of response_format whose grammar, if any, is the same for all clients."""
GRAMMAR_FIELDS = frozenset(
    {
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_whitespace_pattern",
        "json_schema",
        "regex",
        "ebnf",
        "grammar",
        "tools",
    }
)
"""Of OpenAI, vLLM, and of llama.cpp and SGLang, which have theirs beside OpenAI's."""
SCHEMA_FIELDS = frozenset({"schema", "json_schema"})
"""Of a structural tag: what stands under these is a JSON schema."""


def check_grammar_fields(body: Mapping[str, Any]) -> bool:
    """Whether a body asks for a grammar of its own; raises InputError where one is beyond the limits."""
    return any(
        [
            _check_response_format(body.get("response_format")),
            _check_structured_outputs(body.get("structured_outputs")),
            _check_schema(body.get("guided_json"), "guided_json"),
            _check_regex(body.get("guided_regex"), "guided_regex"),
            _check_choices(body.get("guided_choice"), "guided_choice"),
            _check_grammar(body.get("guided_grammar"), "guided_grammar"),
            _check_regex(body.get("guided_whitespace_pattern"), "guided_whitespace_pattern"),
            _check_schema(body.get("json_schema"), "json_schema"),
            _check_regex(body.get("regex"), "regex"),
            _check_grammar(body.get("ebnf"), "ebnf"),
            _check_grammar(body.get("grammar"), "grammar"),
            _check_tools(body),
        ]
    )


def _check_response_format(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    # llama.cpp takes a schema with json_object, and TGI with `json`, where its `regex` has a pattern.
    asked = [_check_schema(value.get("schema"), "response_format.schema")]
    if value.get("type") == "regex":
        asked.append(_check_regex(value.get("value"), "response_format.value"))
    else:
        asked.append(_check_schema(value.get("value"), "response_format.value"))
    if value.get("type") in PLAIN_FORMATS:
        return any(asked)
    given = value.get("json_schema")
    if value.get("type") == "json_schema" and isinstance(given, dict):
        _check_schema(given.get("schema"), "response_format.json_schema.schema")
    else:
        _check_structure(value, "response_format")
    return True


def _check_structured_outputs(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    field = "structured_outputs"
    asked = [
        _check_schema(value.get("json"), f"{field}.json"),
        _check_regex(value.get("regex"), f"{field}.regex"),
        _check_choices(value.get("choice"), f"{field}.choice"),
        _check_grammar(value.get("grammar"), f"{field}.grammar"),
        _check_regex(value.get("whitespace_pattern"), f"{field}.whitespace_pattern"),
    ]
    tag = value.get("structural_tag")
    if tag is not None:
        if isinstance(tag, str):
            try:
                tag = json.loads(tag) if len(tag) <= GRAMMAR_MAX_CHARS else None
            except (ValueError, RecursionError):
                tag = None
            if tag is None:
                line = f"must be JSON of at most {GRAMMAR_MAX_CHARS} characters"
                raise InputError(f"{field}.structural_tag", line)
        _check_structure(tag, f"{field}.structural_tag")
        asked.append(True)
    return any(asked)


def _check_schema(value: object, field: str) -> bool:
    if isinstance(value, dict):
        check_json_schema(value, field)
    elif isinstance(value, str):
        check_json_schema_text(value, field)
    return value is not None


def _check_regex(value: object, field: str) -> bool:
    if value is not None:
        check_pattern(value, field)
    return value is not None


def _check_choices(value: object, field: str) -> bool:
    if isinstance(value, list):
        if len(value) > JSON_SCHEMA_MAX_ENUM_VALUES:
            raise InputError(
                field, f"has {len(value)} choices; at most {JSON_SCHEMA_MAX_ENUM_VALUES} are taken"
            )
        chars = sum(len(item) for item in value if isinstance(item, str))
        if chars > GRAMMAR_MAX_CHARS:
            raise InputError(field, f"has {chars} characters; at most {GRAMMAR_MAX_CHARS} are taken")
    return value is not None


def _check_grammar(value: object, field: str) -> bool:
    if isinstance(value, str):
        if len(value) > GRAMMAR_MAX_CHARS:
            raise InputError(field, f"has {len(value)} characters; at most {GRAMMAR_MAX_CHARS} are taken")
        for count in GRAMMAR_COUNTS.finditer(value):
            digits = count[1].lstrip("0")
            if len(digits) > 9 or int(digits or 0) > JSON_SCHEMA_MAX_COUNT:
                raise InputError(
                    field, f"repeats {digits[:20]} times; at most {JSON_SCHEMA_MAX_COUNT} are taken"
                )
    return value is not None


def _check_structure(value: object, field: str) -> None:
    """Schemas, patterns and grammars inside a structural tag, wherever they stand."""
    left: list[tuple[object, str, int]] = [(value, field, 1)]
    while left:
        item, where, depth = left.pop()
        if depth > STRUCTURE_MAX_DEPTH:
            raise InputError(field, f"is nested deeper than {STRUCTURE_MAX_DEPTH} objects and lists")
        if isinstance(item, list):
            left += [(inner, f"{where}[{place}]", depth + 1) for place, inner in enumerate(item)]
        elif isinstance(item, dict):
            for name, inner in item.items():
                inside = f"{where}.{name[:60]}"
                if name in SCHEMA_FIELDS and isinstance(inner, dict):
                    check_json_schema(inner, inside)
                elif name == "pattern":
                    _check_regex(inner, inside)
                elif name == "grammar":
                    _check_grammar(inner, inside)
                elif isinstance(inner, dict | list):
                    left.append((inner, inside, depth + 1))


def _check_tools(body: Mapping[str, Any]) -> bool:
    """Parameters of tools become a grammar where a call is asked for, or a tool is strict; else they are text."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not isinstance(tools, list):
        return False
    asked = False
    forced = choice == "required" or isinstance(choice, dict)
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and (forced or function.get("strict")):
            _check_schema(function.get("parameters"), f"tools[{place}].function.parameters")
            asked = True
    return asked
