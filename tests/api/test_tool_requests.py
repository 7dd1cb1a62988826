"""Tools and template variables in requests: accepted and refused fields."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from chat_templates import TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from potluck.api import tool_requests
from potluck.api.chat_templates import RESERVED_VARIABLES, ChatTemplates
from potluck.api.http import parse_object, refusal
from potluck.api.openai_requests import ChatRequest, EngineAbilities, Message, chat_of, chat_prompt
from potluck.api.tokenizer import ModelTokenizer
from potluck.api.tool_requests import (
    TEMPLATE_VARIABLES_MAX_CHARS,
    TEMPLATE_VARIABLES_MAX_COUNT,
    TOOLS_MAX_CHARS,
    TOOLS_MAX_COUNT,
    min_json_chars,
)
from potluck.core.errors import InputError, PotluckError

ABLE = EngineAbilities(draws=True)
HELLO = {"role": "user", "content": "Hello"}
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Bonn"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "12"}


def chat(**fields: object) -> tuple[ChatRequest, list[Message]]:
    return chat_of({"model": "m", "messages": [HELLO], **fields}, ABLE)


def tokenizer(template: str | None) -> ModelTokenizer:
    return ModelTokenizer(Tokenizer(WordLevel({"a": 0}, unk_token="a")), template)


def named_choice(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def function_tool(**function: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", **function}}


REFUSED: list[tuple[str, dict[str, object]]] = [
    ("tools", {"tools": {}}),
    ("tools", {"tools": "[]"}),
    ("tools", {"tools": [WEATHER, WEATHER]}),
    ("tools", {"tools": [function_tool(name=f"f{place}") for place in range(TOOLS_MAX_COUNT + 1)]}),
    ("tools", {"tools": [function_tool(description="x" * TOOLS_MAX_CHARS)]}),
    ("tools[0]", {"tools": [1]}),
    ("tools[0]", {"tools": [{"type": "web_search"}]}),
    ("tools[0]", {"tools": [{**WEATHER, "more": 1}]}),
    ("tools[1].function", {"tools": [CLOCK, {"type": "function"}]}),
    ("tools[0].function", {"tools": [function_tool(more=1)]}),
    ("tools[0].function.name", {"tools": [function_tool(name="a b")]}),
    ("tools[0].function.name", {"tools": [function_tool(name="x" * 65)]}),
    ("tools[0].function.name", {"tools": [function_tool(name=None)]}),
    ("tools[0].function.description", {"tools": [function_tool(description=1)]}),
    ("tools[0].function.parameters", {"tools": [function_tool(parameters=[])]}),
    ("tools[0].function.strict", {"tools": [function_tool(strict="yes")]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": named_choice("weather"), "tools": []}),
    ("tool_choice", {"tool_choice": "maybe", "tools": [CLOCK]}),
    ("tool_choice", {"tool_choice": named_choice("weather"), "tools": [CLOCK]}),
    ("tool_choice", {"tool_choice": {"type": "allowed_tools"}, "tools": [CLOCK]}),
    ("tool_choice", {"tool_choice": {"function": {"name": "clock"}}, "tools": [CLOCK]}),
    ("tool_choice", {"tool_choice": ["auto"], "tools": [CLOCK]}),
    ("parallel_tool_calls", {"parallel_tool_calls": 1, "tools": [CLOCK]}),
    ("response_format", {"response_format": {"type": "json_object"}, "tools": [CLOCK]}),
    ("response_format", {"response_format": {"type": "json_object"}, "tools": [CLOCK], "tool_choice": "required"}),
    ("ignore_eos", {"ignore_eos": True, "tools": [CLOCK], "tool_choice": "required"}),
    ("chat_template_kwargs", {"chat_template_kwargs": []}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a b": 1}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"_a": 1}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"x" * 65: 1}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a": "x" * TEMPLATE_VARIABLES_MAX_CHARS}}),
    ("chat_template_kwargs", {
        "chat_template_kwargs": {f"a{place}": 1 for place in range(TEMPLATE_VARIABLES_MAX_COUNT + 1)}
    }),
    *((f"chat_template_kwargs.{name}", {"chat_template_kwargs": {name: 1}}) for name in sorted(RESERVED_VARIABLES)),
    ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": {"name": "f"}}),
    ("echo", {"echo": True}),
    ("reasoning_effort", {"reasoning_effort": "high"}),
    ("template", {"template": {}}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "fields"), REFUSED)
def test_invalid_tool_fields_are_refused_with_their_name(param: str, fields: dict[str, object]) -> None:
    with pytest.raises(InputError) as caught:
        chat(**fields)
    refused = refusal(caught.value)
    assert refused is not None
    assert (refused.status, refused.param) == (400, param)
    assert "\n" not in str(refused)


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ("messages[0].role", {"role": "function", "name": "f", "content": "x"}),
        ("messages[0].tool_call_id", {"role": "tool", "content": "x"}),
        ("messages[0].tool_call_id", {"role": "tool", "content": "x", "tool_call_id": 5}),
        ("messages[0].tool_call_id", {"role": "tool", "content": "x", "tool_call_id": "x" * 257}),
        ("messages[0].tool_call_id", {"role": "user", "content": "x", "tool_call_id": "c1"}),
        ("messages[0].content", {"role": "tool", "tool_call_id": "c1"}),
        ("messages[0].function_call", {"role": "assistant", "function_call": {"name": "f", "arguments": ""}}),
        ("messages[0].tool_calls", {"role": "user", "content": "x", "tool_calls": [CALL]}),
        ("messages[0].tool_calls", {"role": "assistant", "tool_calls": {"a": 1}}),
        ("messages[0].tool_calls", {"role": "assistant", "tool_calls": [CALL] * 129}),
        ("messages[0].tool_calls[0]", {"role": "assistant", "tool_calls": [1]}),
        ("messages[0].tool_calls[0]", {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}),
        ("messages[0].tool_calls[0]", {"role": "assistant", "tool_calls": [{**CALL, "more": 1}]}),
        ("messages[0].tool_calls[0].id", {"role": "assistant", "tool_calls": [{**CALL, "id": None}]}),
        ("messages[0].tool_calls[0].function", {"role": "assistant", "tool_calls": [{"id": "c"}]}),
        ("messages[0].tool_calls[0].function.name", {
            "role": "assistant", "tool_calls": [{**CALL, "function": {"name": 5}}]}),
        ("messages[0].tool_calls[0].function.arguments", {
            "role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": 5}}]}),
    ],
)  # fmt: skip
def test_invalid_tool_calls_in_messages_are_refused_with_their_position(param: str, message: object) -> None:
    with pytest.raises(InputError) as caught:
        chat(messages=[message])
    assert caught.value.field == param


def test_tools_that_are_not_offered_change_nothing() -> None:
    plain = chat()[0]
    for fields in (
        {"tools": []},
        {"tools": None, "tool_choice": None, "chat_template_kwargs": None, "parallel_tool_calls": None},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"tool_choice": "auto", "parallel_tool_calls": False, "chat_template_kwargs": {}},
    ):
        assert chat(**fields)[0] == plain
        assert plain.shown.tool_calls == ""


def test_templates_get_tools_as_they_were_sent() -> None:
    request, _ = chat(tools=[WEATHER, {**CLOCK, "function": {**CLOCK["function"], "strict": None}}])  # type: ignore[dict-item]
    assert json.loads(request.tools) == [WEATHER, CLOCK]
    assert (request.shown.tool_calls, request.shown.parallel_tool_calls) == ("tagged", True)
    assert not chat(tools=[CLOCK], parallel_tool_calls=False)[0].shown.parallel_tool_calls
    assert chat(tools=[CLOCK], tool_choice="required")[0].shown.tool_calls == "bare"


REFERRING = {
    "type": "object",
    "properties": {
        "next": {"$ref": "#"},
        "place": {"$ref": "#/$defs/Place"},
        "$ref": {"const": {"$ref": "#/$defs/Place"}},
    },
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"Place": {"enum": ["Bonn"]}},
}


def test_forced_call_schema_allows_only_calls_of_allowed_tools() -> None:
    tools = [CLOCK, function_tool(parameters=REFERRING)]
    every: dict[str, Any] = json.loads(chat(tools=tools, tool_choice="required")[0].response_format)
    only: dict[str, Any] = json.loads(chat(tools=tools, tool_choice=named_choice("f"))[0].response_format)
    call = {"name": "f", "arguments": {"place": "Bonn", "next": {"place": "Bonn"}}}
    for schema in (every, only):
        jsonschema.validate(call, schema)
        jsonschema.validate(
            {**call, "arguments": {"place": "Bonn", "$ref": {"$ref": "#/$defs/Place"}}}, schema
        )
        for wrong in (
            {},
            {"place": "Rome"},
            {"place": "Bonn", "next": {"place": "Rome"}},
            {"place": "Bonn", "x": 1},
        ):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({**call, "arguments": wrong}, schema)
    jsonschema.validate({"name": "clock", "arguments": {}}, every)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "clock", "arguments": {}}, only)


TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.place }}){% endfor %};"
    "{% endfor %}"
    "{{ mood }}{{ enable_thinking }}"
)


LARGE_PARAMETERS: list[tuple[str, dict[str, object]]] = [
    ("minItems", {"type": "array", "items": {"type": "null"}, "minItems": 10**9}),
    ("maxLength", {"type": "string", "maxLength": 10**9}),
    ("pattern", {"type": "string", "pattern": "(a{1,1000}){1,1000}"}),
    ("$ref", {"$ref": "http://elsewhere/schema"}),
]


@pytest.mark.parametrize(("keyword", "schema"), LARGE_PARAMETERS)
@pytest.mark.parametrize("choice", ["required", named_choice("clock")])
def test_parameters_of_a_forced_call_are_within_schema_limits(
    keyword: str, schema: dict[str, object], choice: object
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tools = [WEATHER, function_tool(name="clock", parameters=parameters)]
    place = f"tools[1].function.parameters.properties.a.{keyword}"
    with pytest.raises(InputError) as error:
        chat(tools=tools, tool_choice=choice)
    assert error.value.field == place
    assert chat(tools=tools)[0].shown.tool_calls == "tagged", "it is text in the prompt"
    assert chat(tools=tools, tool_choice=named_choice("weather"))[0].response_format


def test_forced_call_with_parameters_beyond_schema_limits_is_refused() -> None:
    tools = [
        function_tool(
            name=f"f{n}", parameters={"type": "object", "properties": {"a": {"enum": ["x" * 60_000]}}}
        )
        for n in range(2)
    ]
    assert chat(tools=tools, tool_choice=named_choice("f0"))[0].response_format
    with pytest.raises(InputError) as error:
        chat(tools=tools, tool_choice="required")
    assert error.value.field == "tool_choice"
    with pytest.raises(InputError, match="refers to itself"):
        chat(tools=[function_tool(name="f", parameters={"$ref": "#"})], tool_choice="required")


def test_forced_call_accepts_parameters_with_an_id() -> None:
    part = {"$id": "https://tools/weather", "$defs": {"a": {"enum": ["x"]}}, "type": "object"}
    parameters = {**part, "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
    asked, _ = chat(tools=[function_tool(name="f", parameters=parameters)], tool_choice="required")
    schema = json.loads(asked.response_format)
    jsonschema.validate({"name": "f", "arguments": {"a": "x"}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "f", "arguments": {"a": "y"}}, schema)


def test_prompt_has_tools_calls_and_template_variables() -> None:
    request, messages = chat(
        tools=[WEATHER],
        messages=[HELLO, CALLED, RESULT],
        chat_template_kwargs={"mood": "gay", "enable_thinking": False},
    )
    expected = "[weather]user:Hello;assistant:(weather Bonn);tool:12;gayFalse"
    assert chat_prompt(tokenizer(TEMPLATE), request, messages) == expected
    assert messages[1]["tool_calls"] == [CALL], "the messages stay as they were"
    request, messages = chat(tools=[WEATHER], tool_choice="none")
    assert chat_prompt(tokenizer(TEMPLATE), request, messages) == "user:Hello;"
    request, messages = chat(tools=[WEATHER], tool_choice="required")
    assert chat_prompt(tokenizer(TEMPLATE), request, messages) == "[weather]user:Hello;"


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        (None, {"tools": [WEATHER]}, "tools"),
        ("{{ messages[0].content }}", {"tools": [WEATHER]}, "tools"),
        ("{# tools #}{{ 'tools' }}", {"tools": [WEATHER]}, "tools"),
        ("{% set tools = 1 %}", {"tools": [WEATHER]}, "tools"),
        ("{{ messages[0].content }}", {"messages": [HELLO, CALLED, RESULT]}, "messages"),
        (None, {"messages": [HELLO, CALLED, RESULT]}, "messages"),
        (None, {"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs"),
    ],
)
def test_template_that_ignores_a_field_is_refused_by_the_field(
    template: str | None, fields: dict[str, Any], param: str
) -> None:
    request, messages = chat(**fields)
    with pytest.raises(InputError) as caught:
        chat_prompt(tokenizer(template), request, messages)
    assert caught.value.field == param


def test_published_templates_are_recognised_as_using_tools() -> None:
    texts = {name: text for name, text in TEMPLATES.items() if isinstance(text, str)}
    users = {name for name, text in texts.items() if ChatTemplates({"default": text}).uses_tools()}
    assert users == {name for name, text in texts.items() if "tools" in text}
    assert 0 < len(users) < len(texts)
    templates = ChatTemplates({"default": "{{ messages }}", "tool_use": "{{ tools }}"})
    assert templates.uses_tools()


def test_deeply_nested_arguments_of_earlier_calls_are_accepted() -> None:
    deep = {**CALL, "function": {"name": "f", "arguments": "[" * 100_000}}
    request, messages = chat(messages=[HELLO, {"role": "assistant", "tool_calls": [deep]}])
    assert "assistant:(f )" in chat_prompt(tokenizer(TEMPLATE), request, messages)


KEYS = ["type", "function", "name", "parameters", "id", "arguments", "x"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.floats(allow_nan=False) | st.text(max_size=4)
    | st.sampled_from(["function", "required", "auto", "f"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
FIELDS = ["tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "response_format"]


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), JSON)
def test_any_tool_fields_give_a_prompt_or_one_error_line(body: dict[str, object], calls: object) -> None:
    message = {"role": "assistant", "tool_calls": calls}
    try:
        whole = parse_object(
            json.dumps({"model": "m", "messages": [HELLO, message, RESULT], **body}).encode()
        )
        request, messages = chat_of(whole, ABLE)
        chat_prompt(tokenizer(TEMPLATE), request, messages)
    except PotluckError as error:
        refused = refusal(error)
        assert refused is not None
        assert "\n" not in str(refused)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=JSON_VALUES, max_chars=st.integers(0, 200))
def test_lower_bound_of_json_length_never_exceeds_the_written_length(value: object, max_chars: int) -> None:
    assert min_json_chars(value, max_chars) <= len(
        json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"default": "x" * TOOLS_MAX_CHARS},
        {"enum": [1] * TOOLS_MAX_CHARS},
        {"enum": [1 << (4 * TOOLS_MAX_CHARS)]},
    ],
    ids=["text", "list", "number"],
)
def test_tools_that_are_too_long_are_refused_before_they_are_written_as_json(
    parameters: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = []
    monkeypatch.setattr(tool_requests, "_compact", lambda value: written.append(value) or "")
    with pytest.raises(InputError, match="tools: has more than"):
        chat(tools=[function_tool(parameters=parameters)])
    assert written == []
