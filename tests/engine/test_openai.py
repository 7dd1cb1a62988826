"""OpenAI's endpoints: what clients of theirs expect, streamed or not."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import pytest
from engine_models import prompt
from loop_helpers import harness
from server_helpers import NAME, Client, engine_client, letter_tokenizer, letters_of, make_service

from potluck.api.tokenizer import ModelTokenizer, plain_chat
from potluck.core.errors import InputError
from potluck.core.values.sampling import Sampling

TEXT = letters_of(prompt(40))
OUTPUT = 12


@pytest.fixture(scope="module")
def expected() -> str:
    return letters_of(harness("hybrid").answer(prompt(40), OUTPUT))


def completion_body(text: object = TEXT, **fields: object) -> dict[str, object]:
    return {"model": NAME, "prompt": text, "temperature": 0, "max_tokens": OUTPUT, **fields}


def chat_body(**fields: object) -> dict[str, object]:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    return {"model": NAME, "messages": messages, "temperature": 0, **fields}


async def test_completion_is_the_same_streamed_or_not(expected: str) -> None:
    async with engine_client(make_service()) as one:
        status, whole = await one.post("/v1/completions", completion_body())
        assert status == 200
        assert whole["object"] == "text_completion"
        assert whole["id"].startswith("cmpl-")
        assert whole["choices"] == [
            {"index": 0, "finish_reason": "length", "logprobs": None, "text": expected}
        ]
        assert whole["usage"]["prompt_tokens"] == 40
        assert whole["usage"]["completion_tokens"] == OUTPUT
        assert whole["usage"]["total_tokens"] == 40 + OUTPUT
        body = completion_body(stream=True, stream_options={"include_usage": True})
        status, parts = await one.post("/v1/completions", body)
        assert status == 200
        assert {part["id"] for part in parts} == {parts[0]["id"]}
        assert "".join(choice["text"] for part in parts for choice in part["choices"]) == expected
        ends = [c["finish_reason"] for part in parts for c in part["choices"] if c["finish_reason"]]
        assert ends == ["length"]
        assert parts[-1]["choices"] == []
        assert parts[-1]["usage"]["completion_tokens"] == OUTPUT
        assert parts[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


async def test_completion_accepts_texts_tokens_and_lists_of_either(expected: str) -> None:
    async with engine_client(make_service()) as one:
        for form in (TEXT, prompt(40), [TEXT], [prompt(40)]):
            _, reply = await one.post("/v1/completions", completion_body(form))
            assert reply["choices"][0]["text"] == expected
        _, reply = await one.post("/v1/completions", completion_body([TEXT, "abc"], n=2))
        texts = [choice["text"] for choice in reply["choices"]]
        assert texts[:2] == [expected, expected]
        assert texts[2] == texts[3]
        assert reply["usage"]["prompt_tokens"] == 43
        assert reply["usage"]["completion_tokens"] == 4 * OUTPUT
        _, parts = await one.post("/v1/completions", completion_body([TEXT, "abc"], n=2, stream=True))
        for index, text in enumerate(texts):
            result = [c["text"] for part in parts for c in part["choices"] if c["index"] == index]
            assert "".join(result) == text


async def test_chat_uses_its_template_and_response_shape() -> None:
    shown = "Be kind.\n\nUser: Hello\nAssistant:"
    tokens = letter_tokenizer().encode(shown.replace("\n", ""))
    assert (
        plain_chat([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]) == shown
    )

    async with engine_client(make_service()) as one:
        status, whole = await one.post("/v1/chat/completions", chat_body(max_completion_tokens=8))
        assert status == 200
        assert whole["object"] == "chat.completion"
        message = whole["choices"][0]["message"]
        assert message["role"] == "assistant"
        # The letters have no newline; what the tokenizer does not know it leaves out.
        assert message["content"] == letters_of(harness("hybrid").answer(tokens, 8))
        _, parts = await one.post("/v1/chat/completions", chat_body(max_tokens=8, stream=True))
        assert {part["object"] for part in parts} == {"chat.completion.chunk"}
        assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == message["content"]
        assert parts[-1]["choices"][0]["finish_reason"] == "length"
        pieces = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
        body = chat_body(max_tokens=8)
        body["messages"] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": pieces}]
        assert (await one.post("/v1/chat/completions", body))[1]["choices"] == whole["choices"]
        # Without a limit there is as much as fits.
        _, whole = await one.post("/v1/chat/completions", chat_body(ignore_eos=True))
        assert whole["usage"]["total_tokens"] == 512


async def test_stop_strings_end_the_answer_and_are_not_shown(expected: str) -> None:
    stop = expected[4:7]
    kept = expected[: expected.index(stop)]

    async with engine_client(make_service()) as one:
        body = completion_body(stop=["no such thing", stop], max_tokens=200)
        _, whole = await one.post("/v1/completions", body)
        assert whole["choices"][0]["text"] == kept
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == len(kept) + len(stop)
        _, parts = await one.post("/v1/completions", {**body, "stream": True})
        assert "".join(part["choices"][0]["text"] for part in parts) == kept
        # A stop string that only begins is shown in the end.
        _, whole = await one.post("/v1/completions", completion_body(stop=expected[-2:] + "!!"))
        assert whole["choices"][0]["text"] == expected
        await one.until_idle()
        assert one.service.counters.ended == {"stop": 2, "length": 1}


async def test_seed_makes_sampling_reproducible() -> None:
    async with engine_client(make_service()) as one:

        async def drawn(**fields: object) -> list[str]:
            _, reply = await one.post(
                "/v1/completions", completion_body(temperature=1.5, max_tokens=20, **fields)
            )
            return [choice["text"] for choice in reply["choices"]]

        assert await drawn(seed=1) == await drawn(seed=1)
        assert await drawn(seed=1) != await drawn(seed=2)
        assert len(set(await drawn(seed=1, n=4))) == 4
        assert await drawn() != await drawn()
        sampling = Sampling(temperature=1.5, seed=1)
        assert await drawn(seed=1) == [
            letters_of(harness("hybrid").answer(prompt(40), 20, sampling=sampling))
        ]


async def test_log_probabilities_have_both_response_shapes(expected: str) -> None:
    async with engine_client(make_service()) as one:
        _, whole = await one.post("/v1/completions", completion_body(logprobs=3))
        logs = whole["choices"][0]["logprobs"]
        assert "".join(logs["tokens"]) == expected
        assert logs["text_offset"] == list(range(OUTPUT))
        for token, value, top in zip(
            logs["tokens"], logs["token_logprobs"], logs["top_logprobs"], strict=True
        ):
            assert len(top) == 3
            assert top[token] == max(top.values()) == value < 0
        _, parts = await one.post("/v1/completions", completion_body(logprobs=3, stream=True))
        result = [part["choices"][0]["logprobs"] for part in parts]
        assert [log["tokens"][0] for log in result if log] == logs["tokens"]
        assert [log["text_offset"][0] for log in result if log] == logs["text_offset"]
        _, whole = await one.post(
            "/v1/chat/completions", chat_body(max_tokens=2, logprobs=True, top_logprobs=2)
        )
        first = whole["choices"][0]["logprobs"]["content"][0]
        assert first["top_logprobs"][0]["token"] == first["token"]
        assert bytes(first["bytes"]).decode() == first["token"]


async def test_completion_logprobs_at_high_temperature_always_list_the_sampled_token() -> None:
    async with engine_client(make_service()) as one:
        for count in (0, 1, 3):
            body = completion_body(logprobs=count, temperature=2, seed=5, max_tokens=24, ignore_eos=True)
            _, whole = await one.post("/v1/completions", body)
            _, parts = await one.post("/v1/completions", {**body, "stream": True})
            streamed = [part["choices"][0]["logprobs"] for part in parts]
            whole_logs = whole["choices"][0]["logprobs"]
            outside = 0
            for logs in (whole_logs, *(log for log in streamed if log)):
                rows = zip(logs["tokens"], logs["token_logprobs"], logs["top_logprobs"], strict=True)
                for token, logprob, top in rows:
                    assert top[token] == logprob
                    assert count <= len(top) <= count + 1
                    assert len(top) > 0
                    outside += len(top) == count + 1
            assert outside, "some sampled tokens are not among the most likely ones"
            tops = [top for log in streamed if log for top in log["top_logprobs"]]
            assert tops == whole_logs["top_logprobs"]


async def test_engine_stream_usage_is_sent_only_with_include_usage() -> None:
    async with engine_client(make_service()) as one:
        for include, continuous in ((False, True), (True, False), (True, True)):
            options = {"include_usage": include, "continuous_usage_stats": continuous}
            _, parts = await one.post("/v1/completions", completion_body(stream=True, stream_options=options))
            chunks = [part for part in parts if part["choices"]]
            assert len(parts) - len(chunks) == include
            assert all(("usage" in part) == include for part in chunks)
            assert all((part.get("usage") is not None) == (include and continuous) for part in chunks)
        for body in (
            completion_body(stream_options={"include_usage": True}),
            completion_body(stream_options={}, stream=False),
        ):
            status, reply = await one.post("/v1/completions", body)
            assert (status, reply["error"]["param"]) == (400, "stream_options")


async def exchange(address: str, head: bytes) -> tuple[bytes, dict[str, str], bytes]:
    """Send a request's head over a socket of its own; returns status line, headers and body of the answer."""
    url = urlsplit(address)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(head + b"Connection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    first, *lines = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
    headers = dict(line.decode().lower().split(": ", 1) for line in lines)
    return first, headers, answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("line", "host", "status"),
    [
        ("GET http://127.0.0.1:1234/v1/models", "x", 200),
        ("GET HTTP://LOCALHOST/health?a=b", "evil.example", 200),
        ("GET https://localhost/health", "x", 200),
        ("GET http://[::1]:80/health", "x", 200),
        ("GET http://127.0.0.1", "x", 200),
        ("GET http://127.0.0.1?a=b", "x", 200),
        ("GET http://evil.example/v1/models", "127.0.0.1", 403),
        ("GET http://user@127.0.0.1/v1/models", "127.0.0.1", 400),
        ("GET ftp://127.0.0.1/v1/models", "127.0.0.1", 400),
        ("GET http://127.0.0.1:99999/", "127.0.0.1", 400),
        ("GET http:///v1/models", "127.0.0.1", 400),
        ("CONNECT 127.0.0.1:80", "127.0.0.1", 400),
        ("OPTIONS *", "127.0.0.1", 404),
        ("OPTIONS http://127.0.0.1", "x", 404),
        ("GET /v1/models", "127.0.0.1", 200),
        ("GET /v1/nothing", "127.0.0.1", 404),
    ],
)
async def test_engine_request_target_in_absolute_form_replaces_host(
    line: str, host: str, status: int
) -> None:
    async with engine_client(make_service()) as one:
        head = f"{line} HTTP/1.1\r\nHost: {host}\r\n".encode()
        first, headers, _ = await exchange(one.url, head)
    assert int(first.split()[1]) == status
    assert "server" not in headers


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("completions", completion_body(model="gpt"), 404, "unknown 'gpt'"),
    ("completions", completion_body(bogus=1), 400, "bogus"),
    ("completions", completion_body(None), 400, "prompt"),
    ("completions", completion_body([]), 400, "prompt"),
    ("completions", completion_body([1, 2, 200]), 400, "vocabulary"),
    ("completions", completion_body([1, -2]), 400, "vocabulary"),
    ("completions", completion_body([[1], "x", 3]), 400, "prompt[2]"),
    ("completions", completion_body(""), 400, "prompt"),
    ("completions", completion_body("a" * 501), 400, "512"),
    ("completions", completion_body("a" * 3000), 400, "512"),
    ("completions", completion_body(max_tokens=0), 400, "max_tokens"),
    ("completions", completion_body(max_tokens="many"), 400, "max_tokens"),
    ("completions", completion_body(max_tokens=1.5), 400, "max_tokens"),
    ("completions", completion_body(temperature=-1), 400, "temperature"),
    ("completions", completion_body(top_p=0), 400, "top_p"),
    ("completions", completion_body(n=0), 400, "n"),
    ("completions", completion_body(n=1000), 400, "n"),
    ("completions", completion_body(stop=""), 400, "stop"),
    ("completions", completion_body(stop=["x"] * 20), 400, "stop"),
    ("completions", completion_body(echo=True), 400, "echo"),
    ("completions", completion_body(logprobs=50), 400, "logprobs"),
    ("completions", completion_body(presence_penalty=2.5), 400, "presence_penalty: must be -2 to 2"),
    ("completions", completion_body(frequency_penalty="much"), 400, "frequency_penalty"),
    ("completions", completion_body(repetition_penalty=0), 400, "repetition_penalty: must be above 0"),
    (
        "completions",
        completion_body(logit_bias={"1": 101}),
        400,
        "logit_bias: must be -100 to 100, is 101 for token 1",
    ),
    (
        "completions",
        completion_body(logit_bias={"9999": 1}),
        400,
        "logit_bias: token 9999 is not in the vocabulary",
    ),
    (
        "completions",
        completion_body(logit_bias={"the": 1}),
        400,
        "logit_bias: 'the' is not the number of a token",
    ),
    ("completions", completion_body(logit_bias=[1]), 400, "logit_bias: must be an object"),
    ("completions", completion_body([["a"]]), 400, "prompt[0]"),
    ("chat/completions", chat_body(messages=[]), 400, "messages"),
    ("chat/completions", chat_body(messages=[{"role": "king", "content": "x"}]), 400, "role"),
    ("chat/completions", chat_body(messages=[{"role": "user"}]), 400, "content"),
    ("chat/completions", chat_body(tools=[{"type": "function"}]), 400, "tools"),
    (
        "chat/completions",
        chat_body(response_format={"type": "json_object"}),
        400,
        "response_format: only text",
    ),
    (
        "chat/completions",
        chat_body(response_format={"type": "xml"}),
        400,
        "response_format: must have a type of",
    ),
    ("chat/completions", chat_body(response_format={"type": "json_schema"}), 400, "must have a json_schema"),
    ("chat/completions", chat_body(top_logprobs=2), 400, "top_logprobs"),
    ("chat/completions", chat_body(messages=[{"role": "user", "content": "x" * 3000}]), 400, "512"),
]


async def test_invalid_request_gets_the_openai_error_shape_streamed_or_not() -> None:
    async with engine_client(make_service()) as one:
        for path, body, expected_status, says in WRONG:
            for stream in (False, True):
                status, reply = await one.post(f"/v1/{path}", {**body, "stream": stream})
                assert status == expected_status, (body, reply)
                assert set(reply["error"]) == {"message", "type", "param", "code"}
                assert says in reply["error"]["message"], reply
                assert reply["error"]["type"] == "invalid_request_error"
                assert "\n" not in reply["error"]["message"]
        await one.until_idle()
        assert (await one.post("/v1/completions", completion_body()))[0] == 200


async def test_model_without_tokenizer_is_listed_and_takes_tokens() -> None:
    async with engine_client(make_service(text=False)) as one:
        _, listed = await one.get("/v1/models")
        assert [entry["id"] for entry in listed["data"]] == [NAME]
        assert (await one.post("/v1/completions", completion_body()))[0] == 400
        status, reply = await one.post("/v1/completions", completion_body(prompt(40)))
        assert status == 200
        assert reply["usage"]["completion_tokens"] == OUTPUT


async def disconnect(one: Client, stream: bool) -> None:
    body = completion_body(max_tokens=400, ignore_eos=True, stream=stream)
    post = one.session.post(one.url + "/v1/completions", json=body)
    if stream:
        async with post as reply:
            await reply.content.readline()
            reply.close()
        return
    task = asyncio.ensure_future(post.__aenter__())
    while await one.service.hub.ask(lambda loop, _: loop.idle):
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_disconnected_client_cancels_its_request() -> None:
    async with engine_client(make_service()) as one:
        for stream in (True, False):
            await disconnect(one, stream)
            await one.until_idle()
            while one.service.open_requests:
                await asyncio.sleep(0.01)
        assert one.service.counters.ended == {"cancelled": 2}


def test_model_chat_template_is_used_in_a_sandbox() -> None:
    base = letter_tokenizer()
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}"
    own = ModelTokenizer(base._tokenizer, template, {"eos_token": "!"})
    assert own.chat([{"role": "user", "content": "hi"}]) == "<user>hi!"
    for bad in (
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ 1 / 0 }}{{",
        "{{ 'a' + 1 }}",
    ):
        with pytest.raises(InputError, match="messages"):
            ModelTokenizer(base._tokenizer, bad).chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template", ["{{ 1 // 0 }}", "{{ messages[9].role.x }}", "{% nonsense %}", "{{ raise_exception('no') }}"]
)
def test_chat_template_error_is_refused_in_one_line(template: str) -> None:
    with pytest.raises(InputError, match="messages"):
        ModelTokenizer(letter_tokenizer()._tokenizer, template).chat([{"role": "user", "content": "Hello"}])


def test_chat_template_may_use_loop_controls() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    )
    text = [{"role": "user", "content": word} for word in ("one", "two")]
    assert ModelTokenizer(letter_tokenizer()._tokenizer, template).chat(text) == "one"
