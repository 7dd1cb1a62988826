"""OpenAI's own client, unchanged, against the engine's port: it is understood, and understands."""

from __future__ import annotations

import pytest
from engine_models import prompt
from face_kit import NAME, face, make_service, played, spell
from loop_kit import desk
from openai import AsyncOpenAI, BadRequestError, NotFoundError, PermissionDeniedError

from potluck.core.values.sampling import Sampling

TEXT, OUTPUT = spell(prompt(40)), 12


def test_openais_client_is_served() -> None:
    expected = spell(desk("full").answer(prompt(40), OUTPUT))

    async def scenario() -> None:
        async with (
            face(make_service("full"), key="k" * 20) as one,
            AsyncOpenAI(base_url=one.url + "/v1", api_key="k" * 20, max_retries=0) as client,
        ):
            assert [model.id async for model in client.models.list()] == [NAME]
            assert (await client.models.retrieve(NAME)).id == NAME
            asked = {"model": NAME, "prompt": TEXT, "temperature": 0.0, "max_tokens": OUTPUT}
            whole = await client.completions.create(**asked, logprobs=2)  # type: ignore[call-overload]
            assert whole.choices[0].text == expected
            assert whole._request_id.startswith("req-")
            assert len(whole.choices[0].logprobs.tokens) == OUTPUT
            parts = await client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
            assert "".join([part.choices[0].text async for part in parts]) == expected
            said = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}, {"role": "assistant"}]
            chat = {"model": NAME, "messages": said, "max_completion_tokens": 8, "seed": 3, "n": 2}
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

    played(scenario)


GUIDELLM = {
    "model": NAME,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_completion_tokens": 6,
    "ignore_eos": True,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "1 0 Finish want almost"}]}],
}
"""As guidellm 0.8.1 sends it."""


def test_guidellms_body_gets_the_usage_so_far_in_every_part() -> None:
    async def scenario() -> None:
        async with face(make_service("full")) as one:
            status, parts = await one.post("/v1/chat/completions", GUIDELLM)
            assert status == 200
            counts = [part["usage"]["completion_tokens"] for part in parts]
            assert counts == sorted(counts)
            assert (counts[0], counts[-1], len(set(counts))) == (1, 6, 6)
            assert len({part["usage"]["prompt_tokens"] for part in parts}) == 1
            assert parts[-1]["choices"] == []

    played(scenario)


def test_ends_that_clients_set() -> None:
    """min_tokens holds ends back, stop_token_ids add some, and what ended an answer is shown where asked for."""
    plain = desk("hybrid").answer(prompt(40), OUTPUT)
    at = next(place for place in range(2, OUTPUT - 2) if plain[place] not in plain[:place])
    end = plain[at]

    async def scenario() -> None:
        async with face(make_service("hybrid")) as one:

            async def asked(**fields: object) -> tuple[str, str, int]:
                body = {"model": NAME, "prompt": TEXT, "temperature": 0, "max_tokens": OUTPUT, **fields}
                status, reply = await one.post("/v1/completions", body)
                assert status == 200, reply
                choice = reply["choices"][0]
                return choice["text"], choice["finish_reason"], reply["usage"]["completion_tokens"]

            assert await asked(stop_token_ids=[end]) == (spell(plain[:at]), "stop", at + 1)
            shown = {"stop_token_ids": [end], "include_stop_str_in_output": True}
            assert await asked(**shown) == (spell(plain[: at + 1]), "stop", at + 1)
            assert (await asked(stop_token_ids=[99_999]))[0] == spell(plain)
            stop = spell(plain[at : at + 2])
            shown = {"stop": stop, "include_stop_str_in_output": True}
            assert await asked(**shown) == (spell(plain[: at + 2]), "stop", at + 2)
            assert (await asked(stop=stop, min_tokens=at + 2))[2] > at + 2
            # The end that would have been drawn is not; nothing else of the model is touched.
            held = Sampling(barred=(end,), barred_before=40 + at + 3)
            text, _, count = await asked(stop_token_ids=[end], min_tokens=at + 3)
            assert text == spell(desk("hybrid").answer(prompt(40), OUTPUT, sampling=held)[:count])
            assert count >= at + 3
            assert text[:at] == spell(plain[:at])
            assert text[at] != spell([end])
            status, lines = await one.segment(
                prompt(40), max_tokens=OUTPUT, end_tokens=[end], min_tokens=at + 3
            )
            assert (status, len(lines) - 1) == (200, count)

    played(scenario)
