"""The official OpenAI client, load generators and invalid requests over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError, RateLimitError
from openai_helpers import (
    CARDS,
    NAME,
    SERVER,
    FakeDriver,
    FakeMeter,
    HandlerHarness,
    answering_with,
    sampled_letters,
)

from potluck.api.http import server_tls
from potluck.cli.engine.engine import described
from potluck.core.errors import InputError
from potluck.core.state.actions import Refuse
from potluck.engine import shipped_model
from potluck.engine.model.config import read_config
from potluck.gateway.http.server import open_port
from potluck.gateway.openai.handler import ClientHandler
from potluck.gateway.openai.requests import read_card
from potluck.gateway.values import AnswerSink, ChoiceRequest
from potluck.gateway.workers.worker import model_card

ANSWER = "Hello, you there"


@asynccontextmanager
async def openai_client(
    script: Callable[[ChoiceRequest, AnswerSink], None],
) -> AsyncIterator[tuple[AsyncOpenAI, FakeDriver]]:
    driver = FakeDriver(script)
    listener = await open_port(ClientHandler(CARDS, driver, FakeMeter()), "127.0.0.1", 0)
    try:
        async with AsyncOpenAI(base_url=listener.address + "/v1", api_key="none", max_retries=0) as client:
            yield client, driver
    finally:
        await listener.close(1.0)


def answering_later(text: str) -> Callable[[ChoiceRequest, AnswerSink], None]:
    """As an engine would: token by token, in turns of the event loop."""

    def script(asked: ChoiceRequest, answer: AnswerSink) -> None:
        left = sampled_letters(text)[: asked.max_output_tokens]

        def step() -> None:
            if not left:
                answer.finished("stop" if len(text) < asked.max_output_tokens else "length", 2)
            elif not answer.tokens([left.pop(0)]):
                asyncio.get_running_loop().call_soon(step)

        asyncio.get_running_loop().call_soon(step)

    return script


def test_openai_client_gets_models_completions_and_chats() -> None:
    async def scenario() -> None:
        async with openai_client(answering_later(ANSWER)) as (client, driver):
            assert [model.id async for model in client.models.list()] == [NAME, SERVER]
            assert (await client.models.retrieve(NAME)).id == NAME
            whole = await client.completions.create(model=NAME, prompt="Hi", max_tokens=9, logprobs=2)
            assert whole.choices[0].text == ANSWER[:9]
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 9
            assert whole._request_id is not None
            chat: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]}
            answer = await client.chat.completions.create(
                **chat, max_completion_tokens=5, n=2, seed=3, user="me", service_tier="flex", store=False
            )
            assert [choice.message.content for choice in answer.choices] == ["Hello"] * 2
            assert driver.asked[-1].request_class == "batch"
            stream = await client.chat.completions.create(
                **chat, stream=True, stream_options={"include_usage": True}, stop=["you"]
            )
            parts = [part async for part in stream]
            texts = [part.choices[0].delta.content or "" for part in parts if part.choices]
            assert "".join(texts) == "Hello, "
            assert parts[-1].usage is not None
            with pytest.raises(BadRequestError) as bad:
                await client.chat.completions.create(**chat, presence_penalty=3)
            assert bad.value.param == "presence_penalty"
            with pytest.raises(NotFoundError):
                await client.models.retrieve("gpt")
            with pytest.raises(BadRequestError):
                await client.embeddings.create(model=NAME, input="x")

    asyncio.run(scenario())


def test_openai_client_raises_the_matching_errors() -> None:
    async def scenario() -> None:
        def script(asked: ChoiceRequest, answer: AnswerSink) -> None:
            if asked.stream:
                answer.tokens(sampled_letters("ab"))
                answer.refused(Refuse(asked.id, "retries", "two engines died"))
            else:
                answer.refused(Refuse(asked.id, "overloaded", "all are busy", 7.0))

        async with openai_client(script) as (client, _):
            with pytest.raises(RateLimitError) as busy:
                await client.completions.create(model=NAME, prompt="Hi")
            assert busy.value.response.headers["retry-after"] == "7"
            with pytest.raises(APIError, match="two engines died"):
                async for _ in await client.completions.create(model=NAME, prompt="Hi", stream=True):
                    pass

    asyncio.run(scenario())


def test_gateway_serves_https_with_a_certificate(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes a certificate, is not there")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)

    async def scenario() -> None:
        door = ClientHandler(CARDS, FakeDriver(), FakeMeter())
        listener = await open_port(door, "127.0.0.1", 0, tls=server_tls(certificate, key))
        try:
            trusting = ssl.create_default_context(cafile=str(certificate))
            async with (
                ClientSession() as session,
                session.get(listener.address + "/health", ssl=trusting) as reply,
            ):
                assert listener.address.startswith("https://")
                assert (reply.status, await reply.json()) == (200, {"status": "ok"})
        finally:
            await listener.close(1.0)

    asyncio.run(scenario())
    with pytest.raises(InputError, match="--tls"):
        server_tls(certificate, certificate)


@pytest.mark.parametrize(
    ("line", "host", "status"),
    [
        ("GET http://127.0.0.1:1234/v1/models", "evil.example", 200),
        ("GET https://LOCALHOST/v1/models/tiny", "evil.example", 200),
        ("GET http://127.0.0.1/ready?model=nothing", "x", 404),
        ("GET http://evil.example/v1/models", "127.0.0.1", 403),
        ("POST http://evil.example/v1/completions", "127.0.0.1", 403),
        ("GET http://127.0.0.1", "x", 404),
        ("OPTIONS *", "127.0.0.1", 404),
        ("CONNECT 127.0.0.1:80", "127.0.0.1", 400),
        ("GET http://127.0.0.1:x/", "127.0.0.1", 400),
    ],
)
def test_gateway_checks_host_of_absolute_target_instead_of_host_header(
    line: str, host: str, status: int
) -> None:
    async def scenario() -> None:
        listener = await open_port(ClientHandler(CARDS, FakeDriver(), FakeMeter()), "127.0.0.1", 0)
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(listener.address.rpartition(":")[2])
            )
            plain = "GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            writer.write(f"{plain}{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            statuses = re.findall(rb"HTTP/1\.1 (\d+) ", await reader.read())
            writer.close()
        finally:
            await listener.close(1.0)
        assert [int(one) for one in statuses] == [200, status]

    asyncio.run(scenario())


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
WORDS = """
prompt messages n stop stream stream_options max_tokens max_completion_tokens temperature top_p top_k seed logprobs
top_logprobs stop_token_ids min_tokens ignore_eos priority service_tier prompt_cache_key best_of response_format tools
logit_bias add_special_tokens user text
"""
FIELDS = st.sampled_from(WORDS.split())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/ready"]),
    st.sampled_from([NAME, SERVER, "gpt", 5]),
    st.dictionaries(FIELDS, ODD, max_size=5),
    st.booleans(),
    st.dictionaries(
        st.sampled_from(
            ["x-potluck-class", "x-potluck-deadline-ms", "x-potluck-exact", "x-request-id", "origin"]
        ),
        st.text(st.characters(codec="latin-1"), max_size=9),
        max_size=2,
    ),
)
def test_no_body_is_answered_with_500(
    path: str, model: object, fields: dict[str, Any], valid: bool, headers: dict[str, str]
) -> None:
    def script(asked: ChoiceRequest, answer: AnswerSink) -> None:
        json.dumps([asked.id, asked.prompt, asked.max_output_tokens])
        answer.tokens(sampled_letters("ab"))
        answer.finished("stop", 0)

    scenario = HandlerHarness(script)
    body: dict[str, Any] = {"model": model, **fields}
    if valid:
        message = [{"role": "user", "content": "Hi"}]
        body |= {"prompt": "x"} if path == "/v1/completions" else {"messages": message}
    result = scenario.ask(path, json.dumps(body).encode(), **headers)
    assert result.status is not None
    assert result.status < 500
    assert result.over
    assert scenario.door.open == 0
    assert result.sent["x-request-id"]


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=60), st.sampled_from(["/v1/completions", "/v1/chat/completions"]))
def test_invalid_body_on_any_path_gets_a_4xx_answer(body: bytes, path: str) -> None:
    result = HandlerHarness(answering_with("x")).ask(path, body)
    assert result.status is not None
    assert 400 <= result.status < 500


AIPERF = {
    "x_request_id": "fbb98d15-17b3-4463-9b06-bc02798bca34",
    "x_correlation_id": "76f94f1e-efee-4704-9652-b0062ffab021",
    "x_session_affinity": "76f94f1e-efee-4704-9652-b0062ffab021",
    "accept": "text/event-stream",
}
USAGE = {"include_usage": True}
ASKED: dict[str, dict[str, Any]] = {
    "guidellm": {"ignore_eos": True, "stream_options": {**USAGE, "continuous_usage_stats": True}},
    "aiperf": {"ignore_eos": True, "stream_options": USAGE},
    "vllm": {"ignore_eos": True, "stream_options": USAGE, "repetition_penalty": 1.0, "logprobs": None},
}


@pytest.mark.parametrize("who", ASKED)
@pytest.mark.parametrize("chat", [True, False])
def test_request_bodies_of_load_generators_are_answered(who: str, chat: bool) -> None:
    resolved = HandlerHarness(answering_with("abcde"))
    content = "1 2 3" if who == "aiperf" else [{"type": "text", "text": "1 2 3"}]
    asked = {"messages": [{"role": "user", "content": content}]} if chat else {"prompt": "1 2 3"}
    most = {"max_completion_tokens" if chat else "max_tokens": 5}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    headers = AIPERF if who == "aiperf" else {}
    result = resolved.ask(path, {"model": NAME, "stream": True, **asked, **most, **ASKED[who]}, **headers)
    assert result.status == 200
    *parts, last = result.events
    assert last["usage"]["completion_tokens"] == 5
    if who == "guidellm":
        assert [part["usage"]["completion_tokens"] for part in parts] == [1, 2, 3, 4, 5, 5]
    if headers:
        assert result.sent["x-request-id"] == AIPERF["x_request_id"]
    assert (resolved.driver.asked[0].max_output_tokens, resolved.driver.asked[0].ignore_eos) == (5, True)


def test_unsupported_openai_paths_are_refused() -> None:
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/audio/speech", "/v1/images/generations"):
        result = HandlerHarness().ask(path, {"model": NAME, "input": "Hi"})
        assert (result.status, result.json["error"]["code"]) == (400, "unsupported")
    for path in ("/v1/responses", "/v1/files", "/metrics", "/tokenize"):  # load generators try the last two
        assert HandlerHarness().ask(path, method="GET").status == 404


@pytest.mark.parametrize("model", ["words", "words-hybrid"])
def test_shipped_models_have_the_same_card_as_in_the_engine(model: str) -> None:
    folder = shipped_model().parent / model
    card, config = read_card(model, folder), read_config(folder, described(folder))
    assert card.context_tokens == config.model.max_context_tokens
    assert card.vocab == config.model.vocab
    assert card.ends == frozenset(config.eos_tokens)
    acts_as = model_card(model, 131_072, 0, False, folder, tokenizer_only=True)
    assert (acts_as.context_tokens, acts_as.vocab) == (131_072, card.vocab), (
        "of its files only the tokenizer counts"
    )
