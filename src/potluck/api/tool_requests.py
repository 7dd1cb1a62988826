"""Tools and template variables in the bodies of chats, read for engines that run segments (docs/engine.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from potluck.api.chat_templates import RESERVED_VARIABLES
from potluck.api.json_schema_limits import check_json_schema, check_json_schema_text
from potluck.core.errors import FormatError, InputError

TOOLS_MAX_COUNT = 128
TOOLS_MAX_CHARS = 1 << 18
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})
TEMPLATE_VARIABLES_MAX_COUNT = 64
TEMPLATE_VARIABLES_MAX_CHARS = 1 << 14
TEMPLATE_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
CALLS_MAX_COUNT = 128
CALL_ID_MAX_CHARS = 256
TEMPLATED = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
"""Fields that are read here; engines such as vLLM get them in the client's own body."""


class TemplateFields(NamedTuple):
    """These fields as a `ChatRequest` has them."""

    tools: str = ""
    """A JSON list, as the template gets it; empty where the model is offered none."""
    tool_choice: str = "auto"
    """`auto`, or `required` where a schema forces a call."""
    parallel_tool_calls: bool = True
    chat_template_kwargs: str = ""
    """A JSON object, or empty."""


def take_template_fields(body: dict[str, object]) -> tuple[TemplateFields, str]:
    """Take the fields out of a body; also returns the JSON schema of a call that `tool_choice` forces, or ""."""
    tools, choice, parallel, variables = (body.pop(name, None) for name in TEMPLATED)
    text = _variables(variables)
    functions = _functions(tools)
    names = _allowed_names(choice, functions)
    if not functions or choice == "none":
        return TemplateFields(chat_template_kwargs=text), ""
    if not isinstance(parallel, bool | None):
        raise FormatError("parallel_tool_calls", "must be true or false")
    shown = _bounded_json(
        [{"type": "function", "function": function} for function in functions], "tools", TOOLS_MAX_CHARS
    )
    for place, function in enumerate(functions):
        if function["name"] in names and "parameters" in function:
            check_json_schema(function["parameters"], f"tools[{place}].function.parameters")
    schema = _forced_schema([function for function in functions if function["name"] in names])
    if schema:
        check_json_schema_text(schema, "tool_choice")
    return TemplateFields(shown, "required" if names else "auto", parallel is not False, text), schema


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _bounded_json(value: object, field: str, max_chars: int) -> str:
    """The value as JSON. One that is too long is refused before it is written, which takes one long C call."""
    if min_json_chars(value, max_chars) > max_chars or len(text := _compact(value)) > max_chars:
        raise InputError(field, f"has more than {max_chars} characters as JSON")
    return text


def min_json_chars(value: object, max_chars: int) -> int:
    """A lower bound of the value's length as JSON; counting stops once it is above `max_chars`."""
    pending, chars = [value], 0
    while pending and chars <= max_chars:
        item = pending.pop()
        chars += 1
        if isinstance(item, str):
            chars += len(item)
        elif isinstance(item, int):
            chars += item.bit_length() // 4
        elif isinstance(item, dict):
            chars += sum(len(name) for name in item) + len(item)
            pending += islice(item.values(), max_chars)
        elif isinstance(item, list):
            chars += len(item)
            pending += islice(item, max_chars)
    return chars


def _functions(tools: object) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise FormatError("tools", "must be a list of functions")
    if len(tools) > TOOLS_MAX_COUNT:
        raise InputError("tools", f"at most {TOOLS_MAX_COUNT}, got {len(tools)}")
    functions = [_function(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    if len({function["name"] for function in functions}) < len(functions):
        raise InputError("tools", "names a function twice")
    return functions


def _function(tool: object, where: str) -> dict[str, Any]:
    if (
        not isinstance(tool, dict)
        or tool.get("type") != "function"
        or not tool.keys() <= {"type", "function"}
    ):
        raise FormatError(where, 'must have the type "function" and a function, and no more')
    function, where = tool.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        raise FormatError(where, "must be an object with a name")
    if not function.keys() <= FUNCTION_KEYS:
        raise FormatError(where, f"unknown key {min(function.keys() - FUNCTION_KEYS)[:60]!r}")
    name = function.get("name")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise FormatError(f"{where}.name", "must be 1 to 64 letters, digits, dots, dashes and underscores")
    for key, kind, expected in (
        ("description", str, "text"),
        ("parameters", dict, "an object: a JSON schema"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(function.get(key), kind | None):
            raise FormatError(f"{where}.{key}", f"must be {expected}")
    return {key: value for key, value in function.items() if value is not None}


def _allowed_names(choice: object, functions: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The functions of which one must be called; none where the model may answer as it likes."""
    if choice is None or choice in ("none", "auto"):
        return frozenset()
    if not functions:
        raise InputError("tool_choice", "needs tools to choose from")
    names = frozenset(function["name"] for function in functions)
    if choice == "required":
        return names
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(name, str):
        raise FormatError("tool_choice", "must be none, auto, required, or a function with its name")
    if name not in names:
        raise InputError("tool_choice", f"names {name[:64]!r}, which is none of the tools")
    return frozenset({name})


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function that names no parameters: as OpenAI has it, it takes none."""


def _forced_schema(functions: Sequence[Mapping[str, Any]]) -> str:
    """Of an object that calls one of some functions; their own schemas are kept apart, since they may have names."""
    if not functions:
        return ""
    calls, definitions = [], {}
    for place, function in enumerate(functions):
        root = f"#/$defs/{place}"
        parameters = function.get("parameters", NO_PARAMETERS)
        own = {
            key: value for key, value in parameters.items() if key != "$id"
        }  # references begin with # then
        definitions[str(place)] = _moved(own, root)
        properties = {"name": {"const": function["name"]}, "arguments": {"$ref": root}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return _compact({"anyOf": calls, "$defs": definitions})


NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
VALUES = frozenset({"const", "enum", "default", "examples"})


def _moved(schema: Any, root: str) -> Any:
    """A schema that stands at `root` of another one: references to its own parts follow it there."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            result[key] = root + value[1:]
        elif key in NAMED_SCHEMAS and isinstance(value, dict):
            result[key] = {name: _moved(item, root) for name, item in value.items()}
        else:
            result[key] = value if key in VALUES else _moved(value, root)
    return result


def forced_call_problem(problem: str) -> str:
    """What an engine says of a `response_format` that it cannot keep, where `tool_choice` asked for it."""
    return f"tool_choice: no call can be forced here; {problem.removeprefix('response_format: ')}"


def _variables(value: object) -> str:
    field = "chat_template_kwargs"
    if value is None or value == {}:
        return ""
    if not isinstance(value, dict):
        raise FormatError(field, "must be an object of template variables")
    if len(value) > TEMPLATE_VARIABLES_MAX_COUNT:
        raise InputError(field, f"at most {TEMPLATE_VARIABLES_MAX_COUNT} variables, got {len(value)}")
    for name in value:
        if not TEMPLATE_VARIABLE.fullmatch(name):
            raise FormatError(field, f"{name[:64]!r} is not the name of a variable")
        if name in RESERVED_VARIABLES:
            raise InputError(f"{field}.{name}", "is set by the server; leave it out")
    return _bounded_json(value, field, TEMPLATE_VARIABLES_MAX_CHARS)


def checked_call_field(key: str, value: object, role: str, where: str) -> object:
    """A field of a message about calls: `tool_calls` of an assistant, `tool_call_id` of a tool's answer."""
    if key == "tool_call_id" and role == "tool":
        return _call_id(value, where)
    if key == "tool_calls" and role == "assistant":
        if not isinstance(value, list) or len(value) > CALLS_MAX_COUNT:
            raise FormatError(where, f"must be a list of at most {CALLS_MAX_COUNT} calls")
        return [_call(call, f"{where}[{place}]") for place, call in enumerate(value)]
    line = "is not supported; send tool_calls" if key == "function_call" else f"is not for the role {role}"
    raise InputError(where, line)


def _call_id(value: object, where: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= CALL_ID_MAX_CHARS:
        raise FormatError(where, f"must be text of 1 to {CALL_ID_MAX_CHARS} characters")
    return value


def _call(call: object, where: str) -> dict[str, object]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise FormatError(where, 'must be a call of type "function"')
    if not call.keys() <= {"id", "type", "function", "index"}:
        raise FormatError(
            where, f"unknown key {min(call.keys() - {'id', 'type', 'function', 'index'})[:60]!r}"
        )
    function = call.get("function")
    if not isinstance(function, dict) or not function.keys() <= {"name", "arguments"}:
        raise FormatError(f"{where}.function", "must have a name and arguments, and no more")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise FormatError(f"{where}.function.name", "must be the name of a function")
    if not isinstance(arguments, str | dict | None):
        raise FormatError(f"{where}.function.arguments", "must be JSON as text")
    return {
        "id": _call_id(call.get("id"), f"{where}.id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
