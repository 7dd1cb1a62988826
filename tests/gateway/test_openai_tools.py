"""Tool calls over segment engines: prompts, and parsing of engine tokens."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI, BadRequestError
from openai_helpers import (
    END,
    LETTERS,
    FakeDriver,
    FakeExchange,
    FakeMeter,
    HandlerHarness,
    answering_with,
    sampled_letters,
)
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from potluck.api.tokenizer import ModelTokenizer
from potluck.core.values.sampling import SampledToken
from potluck.gateway.http.server import open_port
from potluck.gateway.openai.handler import ClientHandler
from potluck.gateway.openai.kept_answers import KeptAnswer, KeptAnswers
from potluck.gateway.openai.requests import ModelCard
from potluck.gateway.values import AnswerSink, ChoiceRequest

NAME = "tiny"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}:{% endfor %}"
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %};{% endfor %}{{ mood }}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Köln"}}</tool_call>'
ARGUMENTS = '{"place": "Köln"}'
TWO = f"Let me see. {CALL} {CALL}"


def tokenizer(special: tuple[str, ...] = ()) -> ModelTokenizer:
    made = Tokenizer(BPE(vocab={letter: place for place, letter in enumerate(LETTERS)}, merges=[]))
    made.add_tokens([AddedToken(text, special=True) for text in special])
    made.decoder = Fuse()
    return ModelTokenizer(made, TEMPLATE)


def cards(special: tuple[str, ...] = ()) -> dict[str, ModelCard]:
    model_tokenizer = tokenizer(special)
    return {NAME: ModelCard(NAME, 4096, model_tokenizer, ends=frozenset({END}), vocab=model_tokenizer.vocab)}


def tools_harness(script: Any = None, special: tuple[str, ...] = (), **fields: Any) -> HandlerHarness:
    return HandlerHarness(script, cards=cards(special), **fields)


def prompt_of(asked: ChoiceRequest) -> str:
    return "".join(LETTERS[token] for token in asked.prompt)


def collected_choices(exchange: FakeExchange) -> list[dict[str, Any]]:
    """The choices of an answer, streamed or not, in the shape of one that is not."""
    if not exchange.streamed:
        shown: list[dict[str, Any]] = exchange.json["choices"]
        return [{"message": choice["message"], "finish_reason": choice["finish_reason"]} for choice in shown]
    result: dict[int, dict[str, Any]] = {}
    for part in exchange.events:
        for choice in part["choices"]:
            made = result.setdefault(
                choice["index"], {"message": {"content": "", "refusal": None}, "finish_reason": None}
            )
            message, delta = made["message"], choice["delta"]
            message["content"] += delta.get("content") or ""
            if "role" in delta:
                assert "role" not in message
                message["role"] = delta["role"]
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in piece:
                    assert piece["index"] == len(calls)
                    calls.append(
                        {"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])}
                    )
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            assert made["finish_reason"] is None, "nothing comes after the end"
            made["finish_reason"] = choice["finish_reason"]
    for made in result.values():
        if made["message"].get("tool_calls") and not made["message"]["content"]:
            made["message"]["content"] = None
    return [result[index] for index in sorted(result)]


def called_functions(message: dict[str, Any]) -> list[dict[str, str]]:
    return [call["function"] for call in message.get("tool_calls", ())]


KOELN = {"name": "weather", "arguments": ARGUMENTS}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_tool_calls_are_parsed_from_engine_tokens(n: int, logprobs: bool, stream: bool) -> None:
    resolved = tools_harness(answering_with(TWO, "stop", cached=1))
    options = {"stream_options": {"include_usage": True}} if stream else {}
    result = resolved.chat("Hi", tools=[WEATHER], n=n, stream=stream, logprobs=logprobs, **options)
    assert result.status == 200
    assert [prompt_of(asked) for asked in resolved.driver.asked] == ["weather:Hi;"] * n
    assert not any(asked.own for asked in resolved.driver.asked)
    answers = collected_choices(result)
    assert len(answers) == n
    for answer in answers:
        assert answer["message"]["content"] == "Let me see. "
        assert answer["message"]["role"] == "assistant"
        assert called_functions(answer["message"]) == [KOELN, KOELN]
        assert answer["finish_reason"] == "tool_calls"
    ids = [call["id"] for answer in answers for call in answer["message"]["tool_calls"]]
    assert len(set(ids)) == 2 * n
    assert all(name.startswith("call_") for name in ids)
    usage = result.events[-1]["usage"] if stream else result.json["usage"]
    assert usage["completion_tokens"] == n * len(TWO)
    assert (resolved.meter.told[0].outcome, resolved.meter.told[0].output_tokens) == ("stop", n * len(TWO))
    if logprobs:
        parts = (
            [part["choices"][0] for part in result.events if part["choices"]]
            if stream
            else result.json["choices"]
        )
        logged = [
            entry["token"] for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]
        ]
        assert sorted(logged) == sorted(TWO * n), "every token is listed, whatever it became"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call_without_text_has_null_content(stream: bool) -> None:
    (answer,) = collected_choices(
        tools_harness(answering_with(CALL + " ", "stop")).chat(tools=[WEATHER], stream=stream)
    )
    assert answer["message"]["content"] is None
    assert called_functions(answer["message"]) == [KOELN]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "reason", "calls", "content", "finish"),
    [
        ("no call", "stop", 0, "no call", "stop"),
        ("  ", "stop", 0, "  ", "stop"),
        (CALL[:-1], "stop", 0, CALL[:-1], "stop"),
        (CALL[:30], "length", 0, CALL[:30], "length"),
        (CALL + CALL[:30], "length", 1, CALL[:30], "length"),
        (CALL, "length", 1, None, "length"),
        (
            f"<tool_call>weather()</tool_call>{CALL}",
            "stop",
            1,
            "<tool_call>weather()</tool_call>",
            "tool_calls",
        ),
    ],
)
def test_unfinished_and_invalid_tool_calls_are_content(
    text: str, reason: str, calls: int, content: str | None, finish: str, stream: bool
) -> None:
    (answer,) = collected_choices(
        tools_harness(answering_with(text, reason)).chat(tools=[WEATHER], stream=stream)
    )
    assert len(called_functions(answer["message"])) == calls
    assert answer["message"]["content"] == content
    assert answer["finish_reason"] == finish


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call_tags_without_tools_are_text(stream: bool) -> None:
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
        resolved = tools_harness(answering_with(CALL, "stop"))
        (answer,) = collected_choices(resolved.chat("Hi", stream=stream, **fields))
        assert answer["message"]["content"] == CALL
        assert "tool_calls" not in answer["message"]
        assert answer["finish_reason"] == "stop"
        assert prompt_of(resolved.driver.asked[0]) == "Hi;"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "content", "finish"),
    [("</tool_call>", CALL[: -len("</tool_call>")], "stop"), ("END", None, "tool_calls")],
)
def test_stop_strings_end_answers_with_tools(
    stop: str, content: str | None, finish: str, stream: bool
) -> None:
    (answer,) = collected_choices(
        tools_harness(answering_with(f"{CALL}END more", "stop")).chat(
            tools=[WEATHER], stop=stop, stream=stream
        )
    )
    assert (answer["message"]["content"], answer["finish_reason"]) == (content, finish)


def test_text_is_streamed_before_a_tool_call_is_complete() -> None:
    resolved = tools_harness()
    result = resolved.chat(tools=[WEATHER], stream=True)
    answer = resolved.driver.answer
    answer.tokens(sampled_letters("Hello "))
    assert b'"content":"Hello "' in result.data
    answer.tokens(sampled_letters("you" + CALL[:-1]))
    assert b'"content":"you"' in result.data
    assert b"tool_call" not in result.data
    answer.tokens(sampled_letters(CALL[-1]))
    assert b'"tool_calls":[{"index":0,"id":"call_' in result.data
    assert b'finish_reason":"' not in result.data
    answer.finished("stop", 0)
    kinds = [sorted(part["choices"][0]["delta"]) for part in result.events]
    assert kinds == [["content", "role"], ["content"], ["tool_calls"], ["tool_calls"], []]
    heads = [part["choices"][0]["delta"]["tool_calls"][0] for part in result.events[2:4]]
    assert heads[0]["function"] == {"name": "weather", "arguments": ""}
    assert heads[1] == {"index": 0, "function": {"arguments": ARGUMENTS}}


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls_false_gives_one_call(stream: bool) -> None:
    result = tools_harness(answering_with(TWO, "stop")).chat(
        tools=[WEATHER], parallel_tool_calls=False, stream=stream
    )
    assert called_functions(collected_choices(result)[0]["message"]) == [KOELN]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call_tags_that_are_special_tokens_are_parsed(stream: bool) -> None:
    special = ("<tool_call>", "</tool_call>")
    first, last = (len(LETTERS) + place for place in range(2))
    inner = sampled_letters(CALL.removeprefix(special[0]).removesuffix(special[1]))

    def script(asked: ChoiceRequest, answer: AnswerSink) -> None:
        for choice in (SampledToken(first), *inner, SampledToken(last), SampledToken(END)):
            answer.tokens([choice])
        answer.finished("stop", 0)

    (answer,) = collected_choices(tools_harness(script, special).chat(tools=[WEATHER], stream=stream))
    assert called_functions(answer["message"]) == [KOELN]
    assert answer["message"]["content"] is None
    (answer,) = collected_choices(tools_harness(script, special).chat(stream=stream))
    assert answer["message"]["content"] == CALL.removeprefix(special[0]).removesuffix(special[1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_tool_call_is_sampled_under_its_schema(choice: object, stream: bool) -> None:
    text = '{"name":"weather","arguments":{"place":"Bonn"}}'
    resolved = tools_harness(answering_with(text, "stop"))
    (answer,) = collected_choices(resolved.chat("Hi", tools=[WEATHER], tool_choice=choice, stream=stream))
    assert called_functions(answer["message"]) == [{"name": "weather", "arguments": '{"place": "Bonn"}'}]
    assert (answer["message"]["content"], answer["finish_reason"]) == (None, "tool_calls")
    (asked,) = resolved.driver.asked
    assert json.loads(asked.sampling.json_schema)["$defs"]["0"] == WEATHER["function"]["parameters"]  # type: ignore[index]
    assert prompt_of(asked) == "weather:Hi;"
    (answer,) = collected_choices(
        tools_harness(answering_with(text[:30], "length")).chat(
            "Hi", tools=[WEATHER], tool_choice=choice, stream=stream
        )
    )
    assert (answer["message"]["content"], answer["finish_reason"]) == (text[:30], "length")


def test_engine_that_cannot_force_a_call_is_reported_for_tool_choice() -> None:
    error = {
        "message": "response_format: only text is possible",
        "type": "t",
        "param": "response_format",
        "code": "c",
    }

    def script(asked: ChoiceRequest, answer: AnswerSink) -> None:
        answer.relay_whole(400, b"application/json", json.dumps({"error": error}).encode())

    for stream in (False, True):
        result = tools_harness(script).chat(tools=[WEATHER], tool_choice="required", stream=stream)
        shown = result.json["error"]
        assert (result.status, shown["param"], shown["code"]) == (400, "tool_choice", "c")
        assert shown["message"] == "tool_choice: no call can be forced here; only text is possible"


def test_messages_with_calls_and_template_variables_reach_the_prompt() -> None:
    resolved = tools_harness(answering_with("ok", "stop"))
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "warm"},
    ]
    body = {"model": NAME, "messages": messages, "chat_template_kwargs": {"mood": "calm"}}
    assert resolved.ask("/v1/chat/completions", body).status == 200
    assert prompt_of(resolved.driver.asked[0]) == "Hi;(weather);warm;calm"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"echo": True}, "echo"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_unsupported_tool_fields_are_400_with_their_name(fields: dict[str, Any], param: str) -> None:
    resolved = tools_harness()
    result = resolved.chat(**fields)
    assert (result.status, result.json["error"]["param"]) == (400, param)
    assert resolved.driver.asked == []


def test_prompt_for_plain_servers_has_tools_where_segment_engines_may_take_over() -> None:
    plain = {NAME: ModelCard(NAME, 4096, tokenizer(), plain=True)}
    for tools, prompt in (([WEATHER], "weather:Hi;"), (["strange"], "Hi;"), ([], "Hi;")):
        resolved = HandlerHarness(answering_with(CALL, "stop"), cards=plain)
        (answer,) = collected_choices(resolved.chat("Hi", tools=tools))
        assert prompt_of(resolved.driver.asked[0]) == prompt
        assert json.loads(resolved.driver.asked[0].body)["tools"] == tools, "the body goes on as it came"
        assert called_functions(answer["message"]) == ([KOELN] if tools == [WEATHER] else [])


def test_completions_and_models_without_a_tool_template_refuse_tools() -> None:
    resolved = tools_harness()
    for fields in ({"tools": [WEATHER]}, {"chat_template_kwargs": {"a": 1}}, {"tool_choice": "required"}):
        assert resolved.complete("x", **fields).json["error"]["param"] == next(iter(fields))
    plain = HandlerHarness()
    for fields in ({"tools": [WEATHER]}, {"chat_template_kwargs": {"a": 1}}):
        assert plain.chat(**fields).json["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("died_after", [0, 20, len(CALL) - 1, len(CALL), len(TWO) - 1])
def test_kept_answer_with_tool_calls_is_the_same_after_its_process_died(
    died_after: int, stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[int] = []
    init = KeptAnswer.__init__

    def noted(self: KeptAnswer, owner: KeptAnswers, path: Path, file: int, had: Any) -> None:
        files.append(file)
        init(self, owner, path, file, had)

    monkeypatch.setattr(KeptAnswer, "__init__", noted)

    def worker(script: Any = None) -> HandlerHarness:
        return tools_harness(script, kept_answers=KeptAnswers(tmp_path, lambda delay_s, call: None))

    def ask(one: HandlerHarness) -> FakeExchange:
        return one.chat("Hi", {"idempotency_key": "once"}, tools=[WEATHER], stream=stream, temperature=0)

    first = worker()
    broken = ask(first)
    for letter in sampled_letters(TWO[:died_after]):
        first.driver.answer.tokens([letter])
    os.close(files.pop())  # as by a death: the lock is gone
    rest = worker(answering_with(TWO[died_after:], "stop"))
    again = ask(rest)
    (answer,) = collected_choices(again)
    assert called_functions(answer["message"]) == [KOELN, KOELN]
    assert answer["message"]["content"] == "Let me see. "
    replayed = ask(worker(answering_with("never")))
    assert collected_choices(replayed) == [answer], "ids included"
    if stream and died_after:
        assert again.data.startswith(broken.data), "the client that was cut off has the beginning of it"


@given(st.lists(st.integers(1, len(TWO)), max_size=6), st.booleans())
def test_any_split_of_tokens_gives_the_same_tool_calls(sizes: list[int], stream: bool) -> None:
    resolved = tools_harness()
    result = resolved.chat(tools=[WEATHER], stream=stream)
    left = sampled_letters(TWO)
    for size in [*sizes, len(TWO)]:
        if left:
            resolved.driver.answer.tokens(left[:size])
        left = left[size:]
    resolved.driver.answer.finished("stop", 0)
    (answer,) = collected_choices(result)
    assert (answer["message"]["content"], called_functions(answer["message"])) == (
        "Let me see. ",
        [KOELN, KOELN],
    )


@asynccontextmanager
async def openai_client(text: str) -> AsyncIterator[AsyncOpenAI]:
    handler = ClientHandler(cards(), FakeDriver(answering_with(text, "stop")), FakeMeter())
    listener = await open_port(handler, "127.0.0.1", 0)
    try:
        async with AsyncOpenAI(base_url=listener.address + "/v1", api_key="none", max_retries=0) as client:
            yield client
    finally:
        await listener.close(1.0)


def test_openai_client_parses_streamed_and_whole_tool_calls() -> None:
    async def scenario() -> None:
        async with openai_client(TWO) as client:
            asked: dict[str, Any] = {
                "model": NAME,
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": [WEATHER],
            }
            whole = await client.chat.completions.create(**asked, n=2)
            for choice in whole.choices:
                assert choice.finish_reason == "tool_calls"
                assert choice.message.tool_calls is not None
                assert [call.function.arguments for call in choice.message.tool_calls] == [ARGUMENTS] * 2  # type: ignore[union-attr]
            async with client.chat.completions.stream(**asked) as stream:
                final = await stream.get_final_completion()
            (choice,) = final.choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Let me see. "
            assert choice.message.tool_calls is not None
            assert [call.function.arguments for call in choice.message.tool_calls] == [ARGUMENTS] * 2
            # The answer goes back with the results, as agents send it.
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": "12"}
                for call in choice.message.tool_calls
            ]
            said = whole.choices[0].message.model_dump(exclude_unset=True)
            again = await client.chat.completions.create(
                **{**asked, "messages": [*asked["messages"], said, *results]}
            )
            assert again.choices[0].message.tool_calls
            with pytest.raises(BadRequestError) as refused:
                await client.chat.completions.create(**{**asked, "tools": [{"type": "function"}]})
            assert refused.value.param == "tools[0].function"

    asyncio.run(scenario())
