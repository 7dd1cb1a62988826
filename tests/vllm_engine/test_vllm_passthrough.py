"""Pass-through requests at the adapter: vLLM's events, prompts, errors and adapters."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from adapter_kit import HANDLE, running_adapter, streamed, three_tokens
from aiohttp import web


async def called(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    assert (body["return_token_ids"], body["n"], body["tools"]) == (True, 1, ["t"])
    text = {"tool_calls": [{"index": 0}]}
    if not body.get("stream"):
        choice = {"index": 0, "message": text, "token_ids": [5, 6], "finish_reason": "tool_calls"}
        return web.json_response(
            {"choices": [choice], "usage": {"prompt_tokens": 81}, "prompt_token_ids": [1]}
        )
    assert body["stream_options"] == {"include_usage": True}
    return await streamed(
        request,
        {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [1]},
        {"choices": [{"index": 0, "delta": text, "token_ids": [5, 6], "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 81, "prompt_tokens_details": {"cached_tokens": 70}}},
    )


@pytest.mark.parametrize("stream", [True, False])
def test_passthrough_request_streams_vllm_events_beside_its_tokens(tmp_path: Path, stream: bool) -> None:
    async def play() -> None:
        async with running_adapter(tmp_path, called) as stand:
            own = {
                "path": "/v1/chat/completions",
                "body": {"messages": [1], "tools": ["t"], "stream": stream},
            }
            status, lines = await stand.lines(own=own)
            assert (status, [line["token"] for line in lines if "token" in line]) == (200, [5, 6])
            text = [line["said"] for line in lines if "said" in line]
            assert not any("token_ids" in str(item) for item in text), "those are ours"
            assert "tool_calls" in str(text)
            end = lines[-1]
            assert (end["ended"], end["prompt_tokens"], end["output_tokens"]) == ("stop", 81, 2)

    asyncio.run(play())


def test_kv_is_fetched_if_vllm_renders_the_same_prompt_else_its_prompt_is_returned(tmp_path: Path) -> None:
    taken: list[object] = []

    async def noted(request: web.Request) -> web.StreamResponse:
        taken.append((await request.json()).get("kv_transfer_params"))
        return await called(request)

    async def play() -> None:
        async with running_adapter(tmp_path, noted) as stand:
            await stand.client.put("/peers", json={"peers": ["10.0.0.5:9000"]})
            source = {"kv": "10.0.0.5:9000", "handle": HANDLE, "connections": 6}
            for messages, start in ((1, 70), (2, 70), (2, 90)):
                body = {"messages": ["x"] * messages, "tools": ["t"], "stream": True}
                own = {"path": "/v1/chat/completions", "body": body}
                _, lines = await stand.lines(own=own, start=start, source=source)
                if (messages, start) == (2, 70):
                    assert lines[-1]["ended"] == "stop"
                else:
                    assert lines[0] == {"prompt": [9] * 100 if messages == 1 else [*range(80), 7]}
                    assert lines[-1]["code"] == "other_prompt"
            assert taken == [{"potluck": {"request": "r", "take": {**source, "stop": 70, "within_s": 120.0}}}]

    asyncio.run(play())


def test_adapters_are_served_and_reported_in_status(tmp_path: Path) -> None:
    async def play() -> None:
        async with running_adapter(tmp_path, three_tokens) as stand:
            document = await (await stand.client.get("/status")).json()
            assert (document["own"], document["adapters"], document["max_tokens"]) == (True, ["lora"], 99)
            assert (await stand.lines(model="lora", max_tokens=3))[0] == 200

    asyncio.run(play())


def test_slow_vllm_answer_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.vllm.adapter.adapter_segments.ALIVE_S", 0.05)

    over = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await over.wait()
        error = {"message": "no such grammar", "param": "tools", "code": 400}
        return web.json_response({"error": error}, status=400)

    async def play() -> None:
        async with running_adapter(tmp_path, slow) as stand:
            own = {"path": "/v1/chat/completions", "body": {"messages": [1]}}
            asking = asyncio.ensure_future(stand.asked(own=own).__aenter__())
            while not asking.done():
                stand.service.connector_events.steps.add(5, 1, 0.0)
                await asyncio.sleep(0.01)
            async with await asking as answer:
                assert (answer.status, *json.loads(await answer.content.readline())) == (200, "steps")
                over.set()
                lines = [json.loads(line) async for line in answer.content]
            refused = [line["refused"] for line in lines if "refused" in line]
            assert [item["error"]["param"] for item in refused] == ["tools"]
            assert lines[-1]["ended"] == "error"

    asyncio.run(play())


def test_vllm_400_reaches_the_client_unchanged(tmp_path: Path) -> None:
    async def wrong(request: web.Request) -> web.StreamResponse:
        error = {"message": "no such grammar", "param": "response_format", "code": 400}
        return web.json_response({"error": error}, status=400)

    async def play() -> None:
        async with running_adapter(tmp_path, wrong) as stand:
            status, lines = await stand.lines(own={"path": "/v1/chat/completions", "body": {"messages": [1]}})
            error = lines[0]["error"]
            assert (status, error["message"], error["param"]) == (400, "no such grammar", "response_format")

    asyncio.run(play())


def test_schemas_beyond_the_limits_do_not_reach_vllm(tmp_path: Path) -> None:
    reached: list[object] = []

    async def noted(request: web.Request) -> web.StreamResponse:
        reached.append(await request.json())
        return await three_tokens(request)

    schema = {"type": "array", "items": {"type": "null"}, "minItems": 1_000_000_000}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    async def play() -> None:
        async with running_adapter(tmp_path, noted) as stand:
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            for wrong in ({"response_format": form}, {"structured_outputs": {"json": schema}}):
                async with stand.client.post("/v1/chat/completions", json={**body, **wrong}) as answer:
                    assert (answer.status, "minItems" in await answer.text()) == (400, True)
                own = {"path": "/v1/chat/completions", "body": {**body, **wrong}}
                assert (await stand.lines(own=own))[0] == 400
            assert (await stand.lines(sampling={"json_schema": json.dumps(schema)}, max_tokens=3))[0] == 400
        assert reached == []

    asyncio.run(play())
