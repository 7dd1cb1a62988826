"""OpenAI request bodies: accepted and refused fields, and defaults taken from the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.api.http import refusal
from potluck.api.openai_requests import (
    KNOWN,
    PENALTIES,
    SILENT,
    TOOLS,
    ChatRequest,
    CompletionRequest,
    EngineAbilities,
    chat_of,
    completion_of,
    sampling_of,
)
from potluck.core.errors import InputError, PotluckError
from potluck.core.values.sampling import Sampling, SamplingDefaults

PLAIN = EngineAbilities()
SAID = [{"role": "user", "content": "Hello"}]


def completion(abilities: EngineAbilities = PLAIN, **fields: object) -> CompletionRequest:
    return completion_of({"model": "m", "prompt": "x", **fields}, abilities)[0]


def chat(abilities: EngineAbilities = PLAIN, **fields: object) -> tuple[ChatRequest, list[dict[str, Any]]]:
    return chat_of({"model": "m", "messages": SAID, **fields}, abilities)


HARMLESS: list[dict[str, object]] = [
    *({name: value} for name, values in KNOWN.items() for value in values),
    *({name: "whatever"} for name in SILENT),
    *({name: None} for name in (*KNOWN, *SILENT, "n", "stop", "seed", "temperature", "stream_options")),
    {"response_format": {"type": "text"}},
    {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": True}},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
    {"n": 1, "logprobs": None},
    {"presence_penalty": 0.0, "repetition_penalty": 1.0, "frequency_penalty": -0.0},
    {"stop": []},
    {"top_k": -1},
]


def test_neutral_openai_fields_change_nothing() -> None:
    bare, bare_chat = completion(), chat()[0]
    for fields in HARMLESS:
        for asked, plain in ((completion(**fields), bare), (chat(**fields)[0], bare_chat)):
            stream = replace(asked, stream=False, stream_options=plain.stream_options)
            assert replace(stream, top_k=None) == plain, fields
    assert completion(best_of=1) == bare
    assert completion(best_of=2, n=2).n == 2


REFUSED: list[tuple[str, dict[str, object]]] = [
    ("bogus", {"bogus": 0}),
    ("type", {"type": "CompletionRequest"}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("repetition_penalty", {"repetition_penalty": 1.1}),
    ("presence_penalty", {"presence_penalty": False}),
    ("logit_bias", {"logit_bias": {"5": 1}}),
    ("echo", {"echo": True}),
    ("store", {"store": True}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("response_format", {"response_format": "text"}),
    ("response_format", {"response_format": {"type": ["text"]}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("service_tier", {"service_tier": "priority"}),
    ("cache_salt", {"cache_salt": ""}),
    ("cache_salt", {"cache_salt": "x" * 201}),
    ("cache_salt", {"cache_salt": 1}),
    ("n", {"n": 0}),
    ("n", {"n": 65}),
    ("n", {"n": True}),
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 0}),
    ("min_p", {"min_p": 2}),
    ("seed", {"seed": 1 << 63}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop_token_ids", {"stop_token_ids": [1] * 257}),
    ("stop_token_ids[1]", {"stop_token_ids": [1, "2"]}),
    ("max_tokens", {"max_tokens": 0}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 17, "max_tokens": 16}),
    ("stream_options.bogus", {"stream": True, "stream_options": {"bogus": True}}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream_options": {}, "stream": False}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED)
def test_unsupported_openai_field_is_refused_by_name(param: str, fields: dict[str, object]) -> None:
    for ask in (completion, chat):
        with pytest.raises(InputError) as caught:
            ask(**fields)
        text = refusal(caught.value)
        assert text is not None
        assert (text.status, text.param) == (400, param)
        assert "\n" not in str(text)


def test_fields_of_only_one_endpoint_are_refused_by_the_other() -> None:
    for fields, param in (
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ):
        with pytest.raises(InputError) as caught:
            completion(**fields)
        assert caught.value.field == param
    for fields, param in (
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"best_of": 1}, "best_of"),
    ):
        with pytest.raises(InputError) as caught:
            chat(**fields)
        assert caught.value.field == param


def test_fields_that_an_engine_supports_are_accepted() -> None:
    abilities = EngineAbilities(
        fields=frozenset(PENALTIES | TOOLS), formats=frozenset({"text", "json_object"})
    )
    completion(abilities, presence_penalty=0.5, repetition_penalty=1.1)
    called = {"role": "assistant", "tool_calls": [{"id": "c1"}]}
    answered = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    fields = {"tools": [{"type": "function"}], "response_format": {"type": "json_object"}}
    _, messages = chat(abilities, messages=[*SAID, called, answered], **fields)
    assert messages[1:] == [{**called, "content": ""}, answered]
    for wrong in ({"echo": True}, {"response_format": {"type": "json_schema"}}):
        with pytest.raises(InputError):
            completion(abilities, **wrong)
    with pytest.raises(InputError):
        chat(messages=[*SAID, called])
    with pytest.raises(InputError):
        chat(messages=[answered])
    with pytest.raises(InputError, match="no field"):
        EngineAbilities(fields=frozenset({"bogus"}))


def test_message_text_is_accepted_in_all_its_forms() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo", "cache_control": {}}]
    text: list[object] = [
        {"role": "developer", "content": "Be kind.", "name": "Ann"},
        {"role": "user", "content": parts},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "refusal": "no", "tool_calls": [], "audio": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "annotations": []},
    ]
    _, messages = chat(messages=text)
    assert [message["content"] for message in messages] == ["Be kind.", "Hello", "", "", "no"]
    assert [message.get("name") for message in messages] == ["Ann", None, None, None, None]


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ("messages[0]", "hello"),
        ("messages[0].role", {"content": "x"}),
        ("messages[0].role", {"role": ["user"], "content": "x"}),
        ("messages[0].content", {"role": "user"}),
        ("messages[0].content", {"role": "user", "content": 5}),
        ("messages[0].content[0]", {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
        ("messages[0].content[0]", {"role": "user", "content": ["x"]}),
        ("messages[0].content[0].text", {"role": "user", "content": [{"type": "text"}]}),
        ("messages[0].content[0].x", {"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}),
        ("messages[0].mood", {"role": "user", "content": "x", "mood": "good"}),
        ("messages[0].'a\\nb'", {"role": "user", "content": "x", "a\nb": 1}),
        ("messages[0].name", {"role": "user", "content": "x", "name": 5}),
        ("messages[0].tool_calls", {"role": "assistant", "tool_calls": [{}]}),
        ("messages[0].audio", {"role": "assistant", "audio": {"id": "a"}}),
    ],
)
def test_invalid_message_is_refused_with_its_position(param: str, message: object) -> None:
    with pytest.raises(InputError) as caught:
        chat(messages=[message])
    assert caught.value.field == param


def test_unset_sampling_fields_come_from_the_model_defaults() -> None:
    model = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)
    assert sampling_of(completion(), model, seed=5) == Sampling(0.6, 20, 0.95, 0.1, 5)
    set_all = completion(temperature=0, top_k=0, top_p=1, min_p=0)
    assert sampling_of(set_all, model, seed=5, logprobs=3) == Sampling(0.0, 0, 1.0, 0.0, 5, 3)
    assert sampling_of(chat(top_k=-1)[0], model, seed=0).top_k == 0
    assert sampling_of(chat(temperature=None)[0], SamplingDefaults(), seed=0) == Sampling(1.0)
    with pytest.raises(InputError, match="top_p"):
        SamplingDefaults(top_p=0)


FIELDS = [
    *KNOWN,
    *SILENT,
    "model",
    "prompt",
    "messages",
    "n",
    "stop",
    "stream_options",
    "best_of",
    "logprobs",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5), st.booleans())
def test_any_openai_body_is_read_or_refused_in_one_line(body: dict[str, object], talks: bool) -> None:
    potluck_error: PotluckError | None = None
    try:
        if talks:
            chat_of({"model": "m", "messages": SAID, **body}, PLAIN)
        else:
            completion_of({"model": "m", "prompt": "x", **body}, PLAIN)
    except PotluckError as error:
        potluck_error = refusal(error)
        assert potluck_error is not None
    assert "\n" not in str(potluck_error)
