"""Tools at the engine's own OpenAI port, with a model whose made-up answer spells the call of a tool."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engine_models import KINDS
from loop_helpers import harness
from openai import AsyncOpenAI, BadRequestError
from server_helpers import NAME, TRIAL, engine_client, letter_tokenizer, make_service
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from potluck.api.tokenizer import ModelTokenizer
from potluck.catalog.huggingface import read_model
from potluck.engine import shipped_model
from potluck.engine.model.config import write_config
from potluck.engine.serve import EngineSettings, assemble
from potluck.engine.server.engine_service import EngineService

PROMPT = "abcab"
"""What the template makes of any conversation without template variables; the answer to it repeats no token."""
TEMPLATE = "{% if tools and messages[-1].role == 'nobody' %}{{ tools }}{% endif %}" + PROMPT + "{{ mood }}"
PIECES = (
    "See",
    ": ",
    "<tool_",
    'call>{"na',
    'me": "weather", ',
    '"arguments": {"place": "Kö',
    'ln"}}',
    "</tool_call>",
)
ARGUMENTS = {"place": "Köln"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Köln", "Bonn"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
HELLO = [{"role": "user", "content": "Hello"}]


def tokenizer_for_answer(pieces: tuple[str, ...] = PIECES) -> tuple[Tokenizer, int]:
    """A tokenizer under which the model's answer to PROMPT is made of these pieces, and the token behind them."""
    plain = letter_tokenizer()
    answer = harness("hybrid").answer(plain.encode(PROMPT), len(pieces) + 1)
    assert len(set(answer) | set(plain.encode(PROMPT))) == len(pieces) + 4, "no token comes twice"
    said = dict(zip(answer, pieces, strict=False))
    vocabulary = {said.get(token, text): token for text, token in plain._tokenizer.get_vocab().items()}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = Fuse()
    return tokenizer, answer[len(pieces)]


def service(pieces: tuple[str, ...] = PIECES) -> tuple[EngineService, int]:
    tokenizer, end = tokenizer_for_answer(pieces)
    made = make_service()
    made.text = ModelTokenizer(tokenizer, TEMPLATE)
    return made, end


def chat(end: int, **fields: object) -> dict[str, object]:
    body = {"model": NAME, "messages": HELLO, "temperature": 0, "max_tokens": 20, "stop_token_ids": [end]}
    return {**body, "tools": [WEATHER, CLOCK], **fields}


async def test_engine_parses_tool_calls_from_its_answer() -> None:
    made, end = service()
    async with engine_client(made) as one:
        for logprobs in (False, True):
            _, whole = await one.post("/v1/chat/completions", chat(end, n=2, logprobs=logprobs))
            for choice in whole["choices"]:
                message = choice["message"]
                assert (message["content"], choice["finish_reason"]) == ("See: ", "tool_calls")
                (call,) = message["tool_calls"]
                assert call["function"]["name"] == "weather"
                assert json.loads(call["function"]["arguments"]) == ARGUMENTS
                if logprobs:
                    entries = choice["logprobs"]["content"]
                    assert [entry["token"] for entry in entries[:-1]] == list(PIECES)
            ids = {choice["message"]["tool_calls"][0]["id"] for choice in whole["choices"]}
            assert len(ids) == 2
            _, parts = await one.post("/v1/chat/completions", chat(end, stream=True, logprobs=logprobs))
            deltas = [part["choices"][0]["delta"] for part in parts]
            assert "".join(delta.get("content") or "" for delta in deltas) == "See: "
            pieces = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
            assert pieces[0]["function"] == {"name": "weather", "arguments": ""}
            assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == ARGUMENTS
            assert [part["choices"][0]["finish_reason"] for part in parts][-2:] == [None, "tool_calls"]
        _, cut = await one.post("/v1/chat/completions", chat(end, max_tokens=7))
        assert cut["choices"][0]["message"]["content"] == "".join(PIECES[:7])
        assert cut["choices"][0]["finish_reason"] == "length"
        _, plain = await one.post("/v1/chat/completions", chat(end, tool_choice="none"))
        assert plain["choices"][0]["message"]["content"] == "".join(PIECES)
        _, stopped = await one.post("/v1/chat/completions", chat(end, stop="</tool"))
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert "tool_calls" not in stopped["choices"][0]["message"]


async def test_engine_refuses_tool_fields_with_their_names() -> None:
    _, end = service()
    for plain, fields, param in (
        (False, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (False, {"tools": [CLOCK, CLOCK]}, "tools"),
        (False, {"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        (False, {"tool_choice": "required"}, "tool_choice"),  # no token ends this model's answers
        (False, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        (False, {"reasoning_effort": "low"}, "reasoning_effort"),
        (False, {"echo": True}, "echo"),
        (True, {}, "tools"),
        (True, {"tools": None, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ):
        async with engine_client(make_service() if plain else service()[0]) as one:
            for stream in (False, True):
                status, reply = await one.post(
                    "/v1/chat/completions",
                    chat(end, stream=stream, **fields),  # type: ignore[arg-type]
                )
                assert (status, reply["error"]["param"]) == (400, param), (fields, reply)


async def test_template_variables_change_the_prompt() -> None:
    made, end = service()
    async with engine_client(made) as one:
        counts = []
        for more in ({}, {"chat_template_kwargs": {"mood": "aaa"}}):
            _, reply = await one.post("/v1/chat/completions", chat(end, tools=None, max_tokens=1, **more))
            counts.append(reply["usage"]["prompt_tokens"])
        assert counts == [5, 8]


@pytest.mark.slow
async def test_forced_tool_call_is_valid_under_the_function_schema() -> None:
    pytest.importorskip("llguidance")
    folder = shipped_model()
    made = assemble(
        folder,
        read_model(folder),
        EngineSettings(max_running=8, max_tokens=512, threads=1),
        name=NAME,
        kv=TRIAL,
    )
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{% endif %}"
    assert made.text is not None
    made.text = ModelTokenizer(made.text._tokenizer, template)
    named = {"type": "function", "function": {"name": "weather"}}
    async with engine_client(made) as one:
        for choice, seed in (("required", 1), (named, 2)):
            body = chat(0, tool_choice=choice, temperature=1, seed=seed, max_tokens=150, stop_token_ids=[])
            _, whole = await one.post("/v1/chat/completions", body)
            (answer,) = whole["choices"]
            assert (answer["message"]["content"], answer["finish_reason"]) == (None, "tool_calls")
            (call,) = answer["message"]["tool_calls"]
            if choice == named or call["function"]["name"] == "weather":
                jsonschema.validate(
                    json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"]
                )
            else:
                assert call["function"]["name"] == "clock"
        await one.until_idle()


@pytest.mark.slow
async def test_openai_client_reads_tool_calls_of_an_engine_process(tmp_path: Path) -> None:
    folder = tmp_path / NAME
    folder.mkdir()
    write_config(folder, KINDS["hybrid"])
    tokenizer, end = tokenizer_for_answer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    options = ["--random-weights", "7", "--port", "0", "--max-tokens", "512", "--threads", "1", "--json"]
    command = [sys.executable, "-m", "potluck.cli.main", "engine", "serve", "--model", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(await asyncio.to_thread(process.stdout.readline))["url"]
            async with AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
                asked: dict[str, Any] = {"model": NAME, "messages": HELLO, "tools": [WEATHER, CLOCK]}
                asked |= {"temperature": 0, "max_tokens": 20, "extra_body": {"stop_token_ids": [end]}}
                whole = await client.chat.completions.create(**asked)
                async with client.chat.completions.stream(**asked) as stream:
                    streamed = await stream.get_final_completion()
                for completion in (whole, streamed):
                    message = completion.choices[0].message
                    assert completion.choices[0].finish_reason == "tool_calls"
                    assert message.content == "See: "
                    assert message.tool_calls is not None
                    (call,) = message.tool_calls
                    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)  # type: ignore[union-attr]
                result = {"role": "tool", "tool_call_id": call.id, "content": "12 °C"}
                said = message.model_dump(exclude_unset=True, exclude={"parsed"})
                said["tool_calls"] = [call.model_dump(include={"id", "type", "function"})]
                again = {**asked, "messages": [*HELLO, {**said, "refusal": None}, result]}
                again["messages"][1]["tool_calls"][0]["function"].pop("parsed_arguments", None)
                assert (await client.chat.completions.create(**again)).choices[0].message.tool_calls
                with pytest.raises(BadRequestError) as refused:
                    await client.chat.completions.create(**asked, reasoning_effort="low")
                assert refused.value.param == "reasoning_effort"
        finally:
            process.terminate()
            assert process.wait(20) == 0
