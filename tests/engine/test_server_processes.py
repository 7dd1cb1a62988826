"""`potluck engine serve`: a second process takes over a request, and start-up errors are one line."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import ClientSession
from click.testing import CliRunner
from engine_models import KINDS, prompt
from loop_helpers import harness
from openai import AsyncOpenAI, BadRequestError, NotFoundError, PermissionDeniedError
from reference_model import ReferenceModel
from server_helpers import NAME, Client, engine_client, letter_tokenizer, letters_of, make_service, tokens_in

from potluck.cli.engine.engine import serve
from potluck.cli.engine.listening import api_key
from potluck.cli.main import run
from potluck.core.errors import InputError
from potluck.core.values.sampling import Sampling
from potluck.engine.model.checkpoint import RandomSource, save
from potluck.engine.model.config import write_config
from potluck.kv.handles import new_handle

TOKENS, OUTPUT = prompt(90), 10


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine in a process of its own, with the same made-up weights as ours, and other chunks."""
    folder = tmp_path_factory.mktemp("engine") / NAME
    folder.mkdir()
    write_config(folder, KINDS["hybrid"])
    letter_tokenizer()._tokenizer.save(str(folder / "tokenizer.json"))
    options = ["--random-weights", "7", "--port", "0", "--max-tokens", "512", "--threads", "1", "--json"]
    options += ["--chunk-tokens", "7", "--prefix-cache-mb", "0", "--kv-from", "127.0.0.1"]
    command = [sys.executable, "-m", "potluck.cli.main", "engine", "serve", "--model", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()
        assert process.wait(20) == 0


async def test_request_is_transferred_between_two_processes_both_ways(address: str) -> None:
    expected = harness("hybrid").answer(TOKENS, OUTPUT)

    async with engine_client(make_service(prefix_cache_bytes=0)) as here, ClientSession() as session:
        there = Client(here.service, session, address, None)
        there.kv = (await there.get("/status"))[1]["kv"]
        ways = [(here, there), (there, here)]
        cuts = (1, 2, 15, 16, 17, 31, 41, 64, 89, 90)
        for (sender, receiver), cut in itertools.product(ways, cuts):
            handle = new_handle()
            source = {"kv": sender.kv, "handle": handle}
            (a, sent), (b, got) = await asyncio.gather(
                sender.segment(TOKENS, stop=cut, handle=handle),
                receiver.segment(TOKENS, start=cut, max_tokens=OUTPUT, source=source),
            )
            assert (a, b) == (200, 200), (sent, got)
            assert tokens_in(got) == expected
        # One process cuts, the other goes on, the first ends; with others beside them.
        for first, second in ((20, 70), (16, 17), (3, 89)):
            one, two = new_handle(), new_handle()
            from_one, from_two = {"kv": here.kv, "handle": one}, {"kv": there.kv, "handle": two}
            *_, (status, lines) = await asyncio.gather(
                *(here.segment(prompt(30, place), max_tokens=9) for place in range(4)),
                *(there.segment(prompt(50, place), max_tokens=9) for place in range(4)),
                here.segment(TOKENS, stop=first, handle=one),
                there.segment(TOKENS, start=first, stop=second, source=from_one, handle=two),
                here.segment(TOKENS, start=second, max_tokens=OUTPUT, source=from_two),
            )
            assert status == 200, lines
            assert tokens_in(lines) == expected
        _, status = await there.get("/status")
        assert (status["running"], status["waiting"]) == (0, 0)
        assert status["free_blocks"] == status["total_blocks"]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    config = KINDS["full"]
    save(tmp_path / "m", config, ReferenceModel(config, RandomSource(1)).tensors())
    return tmp_path / "m"


@pytest.mark.parametrize("damage", ["cut", "header", "missing", "config", "json"])
def test_damaged_model_is_a_start_up_error_in_one_line(
    stored: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = stored / "model.safetensors"
    raw = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(raw[: len(raw) // 2])
    elif damage == "header":
        weights.write_bytes(b"\xff" * 50 + raw[50:])
    elif damage == "missing":
        weights.unlink()
    elif damage == "config":
        shutil.rmtree(stored)
    else:
        (stored / "config.json").write_text("{")
    assert run(["engine", "serve", "--model", str(stored), "--port", "0"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("potluck: error: ")
    assert len(shown.splitlines()) == 1


def test_api_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POTLUCK_API_KEY", raising=False)
    assert api_key(None) is None
    monkeypatch.setenv("POTLUCK_API_KEY", "one")
    assert api_key(None) == "one"
    (tmp_path / "key").write_text("two\n")
    assert api_key(tmp_path / "key") == "two"
    (tmp_path / "key").write_text("\n")
    with pytest.raises(InputError, match="empty"):
        api_key(tmp_path / "key")
    with pytest.raises(InputError, match="cannot be read"):
        api_key(tmp_path / "none")
    assert "POTLUCK_API_KEY" in CliRunner().invoke(serve, ["--help"]).output


TEXT, CLIENT_OUTPUT = letters_of(prompt(40)), 12


async def test_openai_client_gets_completions_chats_and_errors() -> None:
    expected = letters_of(harness("full").answer(prompt(40), CLIENT_OUTPUT))

    async with (
        engine_client(make_service("full"), key="k" * 20) as one,
        AsyncOpenAI(base_url=one.url + "/v1", api_key="k" * 20, max_retries=0) as client,
    ):
        assert [model.id async for model in client.models.list()] == [NAME]
        assert (await client.models.retrieve(NAME)).id == NAME
        asked = {"model": NAME, "prompt": TEXT, "temperature": 0.0, "max_tokens": CLIENT_OUTPUT}
        whole = await client.completions.create(**asked, logprobs=2)  # type: ignore[call-overload]
        assert whole.choices[0].text == expected
        assert whole._request_id.startswith("req-")
        assert len(whole.choices[0].logprobs.tokens) == CLIENT_OUTPUT
        parts = await client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
        assert "".join([part.choices[0].text async for part in parts]) == expected
        line = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}, {"role": "assistant"}]
        chat = {"model": NAME, "messages": line, "max_completion_tokens": 8, "seed": 3, "n": 2}
        answer = await client.chat.completions.create(  # type: ignore[call-overload]
            **chat,
            user="somebody",
            metadata={"a": "b"},
            store=False,
            response_format={"type": "text"},
            modalities=["text"],
            logit_bias={},
            presence_penalty=0,
            parallel_tool_calls=True,
            tool_choice="none",
            service_tier="auto",
            extra_body={"top_k": 5, "min_tokens": 8, "repetition_penalty": 1.0},
        )
        assert len(answer.choices) == 2
        assert answer.usage.completion_tokens == 16
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            **chat,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 5, "min_tokens": 8},
        )
        texts, usages = ["", ""], []
        async for part in stream:
            for choice in part.choices:
                texts[choice.index] += choice.delta.content or ""
            usages.append(part.usage)
        assert texts == [choice.message.content for choice in answer.choices]
        assert usages[-1].completion_tokens == 16
        assert set(usages[:-1]) == {None}
        with pytest.raises(BadRequestError) as bad:
            await client.chat.completions.create(**chat, presence_penalty=3)  # type: ignore[call-overload]
        assert bad.value.param == "presence_penalty"
        with pytest.raises(NotFoundError) as missing:
            await client.models.retrieve("gpt")
        assert missing.value.code == "model_not_found"
        with pytest.raises(PermissionDeniedError):
            await client.completions.create(**asked, extra_headers={"Origin": "http://x"})  # type: ignore[call-overload]


GUIDELLM = {
    "model": NAME,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_completion_tokens": 6,
    "ignore_eos": True,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "1 0 Finish want almost"}]}],
}
"""As guidellm 0.8.1 sends it."""


async def test_guidellm_request_gets_continuous_usage_in_every_part() -> None:
    async with engine_client(make_service("full")) as one:
        status, parts = await one.post("/v1/chat/completions", GUIDELLM)
        assert status == 200
        counts = [part["usage"]["completion_tokens"] for part in parts]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1], len(set(counts))) == (1, 6, 6)
        assert len({part["usage"]["prompt_tokens"] for part in parts}) == 1
        assert parts[-1]["choices"] == []


async def test_min_tokens_stop_token_ids_and_include_stop_are_honoured() -> None:
    """min_tokens holds ends back, stop_token_ids add some, and what ended an answer is shown where asked for."""
    plain = harness("hybrid").answer(prompt(40), CLIENT_OUTPUT)
    at = next(place for place in range(2, CLIENT_OUTPUT - 2) if plain[place] not in plain[:place])
    end = plain[at]

    async with engine_client(make_service("hybrid")) as one:

        async def asked(**fields: object) -> tuple[str, str, int]:
            body = {"model": NAME, "prompt": TEXT, "temperature": 0, "max_tokens": CLIENT_OUTPUT, **fields}
            status, reply = await one.post("/v1/completions", body)
            assert status == 200, reply
            choice = reply["choices"][0]
            return choice["text"], choice["finish_reason"], reply["usage"]["completion_tokens"]

        assert await asked(stop_token_ids=[end]) == (letters_of(plain[:at]), "stop", at + 1)
        shown = {"stop_token_ids": [end], "include_stop_str_in_output": True}
        assert await asked(**shown) == (letters_of(plain[: at + 1]), "stop", at + 1)
        assert (await asked(stop_token_ids=[99_999]))[0] == letters_of(plain)
        stop = letters_of(plain[at : at + 2])
        shown = {"stop": stop, "include_stop_str_in_output": True}
        assert await asked(**shown) == (letters_of(plain[: at + 2]), "stop", at + 2)
        assert (await asked(stop=stop, min_tokens=at + 2))[2] > at + 2
        # The end that would have been drawn is not; nothing else of the model is touched.
        held = Sampling(barred=(end,), barred_before=40 + at + 3)
        text, _, count = await asked(stop_token_ids=[end], min_tokens=at + 3)
        assert text == letters_of(harness("hybrid").answer(prompt(40), CLIENT_OUTPUT, sampling=held)[:count])
        assert count >= at + 3
        assert text[:at] == letters_of(plain[:at])
        assert text[at] != letters_of([end])
        status, lines = await one.segment(
            prompt(40), max_tokens=CLIENT_OUTPUT, end_tokens=[end], min_tokens=at + 3
        )
        assert (status, len(lines) - 1) == (200, count)
