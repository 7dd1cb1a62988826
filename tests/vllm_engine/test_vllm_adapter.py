"""The adapter over a fake vLLM: segments, errors, transfers, draining."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from adapter_kit import HANDLE, running_adapter, streamed, three_tokens
from aiohttp import web

from potluck.api.http import HttpRefusal
from potluck.api.segments import segment_of
from potluck.core.errors import InputError
from potluck.core.replica.blocks import block_hashes
from potluck.core.routing.prefix_index import PrefixIndex
from potluck.gateway.registry.engine_client import read_cache
from potluck.vllm.adapter.adapter_service import summed
from potluck.vllm.adapter.vllm_process import GpuShape, VllmProcess, VllmSettings, command, environment
from potluck.vllm.adapter.vllm_requests import PromptPart, VllmEventReader, body_of, heard_of, refusal_of


def part(**more: object) -> PromptPart:
    return PromptPart(*segment_of({"request": "r", "model": "m", "tokens": list(range(100)), **more}))


def test_decode_segment_is_sent_to_vllm_with_its_sampling_and_kv_source() -> None:
    source = {"kv": "10.0.0.5:9000", "handle": HANDLE, "connections": 6}
    sampling = {"temperature": 0.5, "top_k": 3, "seed": 7, "logprobs": 2}
    asked = part(start=70, source=source, max_tokens=9, sampling=sampling, end_tokens=[4], salt="s")
    body = body_of(asked, None, 1.0, 60.0)
    assert body["prompt"] == list(range(100))
    assert body["kv_transfer_params"] == {
        "potluck": {"request": "r", "take": {**source, "stop": 70, "within_s": 60.0}}
    }
    expected = {
        "max_tokens": 9,
        "seed": 7,
        "stop_token_ids": [4],
        "cache_salt": "s",
        "top_k": 3,
        "logprobs": 2,
    }
    assert {name: body[name] for name in expected} == expected


def test_prefill_segment_leaves_its_last_token_to_the_decode_engine() -> None:
    body = body_of(part(stop=100, codec="int8"), HANDLE, 9.0, 60.0)
    assert (len(body["prompt"]), body["max_tokens"]) == (99, 1)  # type: ignore[arg-type]
    give = {"handle": HANDLE, "stop": 99, "codec": "int8", "lasts_s": 9.0}
    assert body["kv_transfer_params"] == {"potluck": {"request": "r", "give": give}}


def test_penalties_biases_and_formats_are_translated_only_if_set() -> None:
    way = {
        "presence_penalty": 1.5,
        "repetition_penalty": 1.1,
        "logit_bias": [[7, -100.0]],
        "json_schema": "{}",
    }
    text = {
        "presence_penalty": 1.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -100.0},
        "structured_outputs": {"json": "{}"},
    }
    body = body_of(part(max_tokens=3, sampling=way), None, 1.0, 60.0)
    assert {name: body[name] for name in text} == text
    assert "frequency_penalty" not in body
    assert not text.keys() & body_of(part(max_tokens=3), None, 1.0, 60.0).keys()


def test_aggregated_request_has_no_kv_transfer_params() -> None:
    assert "kv_transfer_params" not in body_of(part(max_tokens=3), None, 1.0, 60.0)


def test_vllm_stream_events_are_read_for_any_chunking() -> None:
    logprobs = {"token_logprobs": [-1.5], "top_logprobs": [{"token_id:9": -1.0, "token_id:5": -1.5}]}
    text = [
        {"choices": [{"token_ids": [5], "logprobs": logprobs, "finish_reason": None}]},
        {"choices": [{"token_ids": [6, 7], "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 64}}},
    ]
    data = b"".join(b"data: " + json.dumps(item).encode() + b"\n\n" for item in text) + b"data: [DONE]\n\n"
    events, result = VllmEventReader(), []
    for place in range(0, len(data), 7):
        result += map(heard_of, events.feed(data[place : place + 7]))
    assert [line for heard in result for line in heard.lines] == [
        {"token": 5, "logprob": -1.5, "top": [[9, -1.0], [5, -1.5]]},
        {"token": 6},
        {"token": 7},
    ]
    assert [heard.reason for heard in result] == [None, "length", None]
    assert result[-1].cached_tokens == 64
    with pytest.raises(HttpRefusal, match="engine is dead"):
        VllmEventReader().feed(b'data: {"error": {"message": "engine is dead"}}\n\n')


@pytest.mark.parametrize(("count", "top"), [(0, []), (1, [[9, -1.0]]), (2, [[9, -1.0], [4, -1.25]])])
def test_vllm_top_logprobs_without_sampled_token_has_requested_count(count: int, top: list[object]) -> None:
    listed = {"token_id:5": -1.5, "token_id:9": -1.0, "token_id:4": -1.25}
    said = {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-1.5], "top_logprobs": [listed]}}]}
    assert heard_of(said, count).lines == ({"token": 5, "logprob": -1.5, "top": top},)


@pytest.mark.parametrize(
    ("status", "said", "means"),
    [
        (400, b'{"error": {"message": "maximum context length is 9"}}', (400, "context_length_exceeded")),
        (400, b'{"error": {"message": "bad"}}', (400, None)),
        (404, b'{"error": {"message": "no model"}}', (404, "model_not_found")),
        (500, b"oops", (503, "try_again")),
    ],
)
def test_vllm_errors_map_to_engine_refusals(status: int, said: bytes, means: tuple[int, str | None]) -> None:
    refusal = refusal_of(status, said)
    assert (refusal.status, refusal.code) == means


def test_layout_is_translated_to_vllm_flags() -> None:
    shape = GpuShape(2, (20, 12))
    tls = (Path("/c.pem"), Path("/c.key"), Path("/ca.pem"))
    settings = VllmSettings(
        "dir", "m", "py", shape, token_budget=512, kv_port=9000, kv_tls=tls, more=("--x",)
    )
    words = command(settings, 8000, Path("channel"))
    for flag, value in (
        ("--tensor-parallel-size", "2"),
        ("--pipeline-parallel-size", "2"),
        ("--max-num-batched-tokens", "512"),
    ):
        assert words[words.index(flag) + 1] == value
    assert words[-1] == "--x"
    load = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert load["tls"] == ["/c.pem", "/c.key", "/ca.pem"]
    assert environment(settings)["VLLM_PP_LAYER_PARTITION"] == "20,12"
    assert (shape.workers, GpuShape(4).workers) == (4, 4)
    with pytest.raises(InputError, match="every stage needs a layer"):
        GpuShape(1, (20, 0))


def test_vllm_metrics_are_summed_over_labels() -> None:
    text = '# HELP x\nx{engine="0"} 2.0\nx{engine="1"} 3.5\ny 1\nz{a="b"} NaN?\n'
    assert summed(text) == {"x": 5.5, "y": 1.0}


async def empty(request: web.Request) -> web.StreamResponse:
    """As vLLM answers while it shuts down."""
    return await streamed(request, {"choices": [{"token_ids": [], "finish_reason": "abort"}]})


def test_adapter_streams_tokens_and_a_consistent_end(tmp_path: Path) -> None:
    async def play() -> None:
        async with running_adapter(tmp_path, three_tokens) as stand:
            status, lines = await stand.lines(max_tokens=3)
            assert (status, [line.get("token") for line in lines[:-1]]) == (200, [5, 6, 7])
            end = {
                name: lines[-1][name] for name in ("ended", "prompt_tokens", "cached_tokens", "output_tokens")
            }
            assert end == {"ended": "length", "prompt_tokens": 100, "cached_tokens": 32, "output_tokens": 3}
            document = await (await stand.client.get("/status")).json()
            assert (document["state"], document["free_blocks"], document["total_blocks"]) == (
                "ready",
                100,
                100,
            )
            async with stand.service.admitted(40):
                document = await (await stand.client.get("/status")).json()
                assert (document["free_blocks"], document["todo_tokens"], document["waiting"]) == (75, 40, 1)
            document = await (await stand.client.get("/status")).json()
            assert (document["kv"], document["fingerprint"], document["todo_tokens"]) == (
                "127.0.0.1:9000",
                "vllm-1",
                0,
            )

    asyncio.run(play())


def test_empty_vllm_answer_is_an_error_and_draining_refuses_first(tmp_path: Path) -> None:
    async def play() -> None:
        async with running_adapter(tmp_path, empty) as stand:
            status, lines = await stand.lines(max_tokens=3)
            assert (status, lines[0]["error"]["code"]) == (503, "try_again")
            await stand.client.post("/drain", json={})
            status, lines = await stand.lines(max_tokens=3)
            assert (status, lines[0]["error"]["code"]) == (503, "draining")
            assert stand.service.state == "drained"
            await stand.client.post("/drain", json={"resume": True})
            assert stand.service.state == "ready"

    asyncio.run(play())


@pytest.mark.parametrize(
    ("told", "ended", "code"),
    [
        ({"state": "fetched", "claimed": True, "problem": ""}, "handed_on", None),
        ({"state": "gone", "claimed": True, "problem": ""}, "error", "receiver_gone"),
        ({"state": "gone", "claimed": False, "problem": ""}, "error", "not_fetched"),
        ({"state": "failed", "claimed": True, "problem": "no room"}, "error", "hand_over"),
    ],
)
def test_prefill_segment_reports_the_outcome_of_its_transfer(
    tmp_path: Path, told: dict[str, object], ended: str, code: str | None
) -> None:
    async def play() -> None:
        async with running_adapter(tmp_path, three_tokens) as stand:
            asking = asyncio.ensure_future(stand.lines(stop=70, handle=HANDLE))
            while not stand.service.prompt_tokens:
                await asyncio.sleep(0.01)
            stand.channel.tell({"gave": HANDLE, **told})
            status, lines = await asking
            assert (status, lines[0]) == (200, {"handle": HANDLE, "tokens": 70})
            assert lines[1] == {"computed": 70, "handle": HANDLE}
            assert (lines[-1]["ended"], lines[-1].get("code")) == (ended, code)

    asyncio.run(play())


def test_missing_receiver_is_reported_within_the_transfer_time(tmp_path: Path) -> None:
    async def play() -> None:
        async with running_adapter(tmp_path, three_tokens, handover_s=0.2) as stand:
            _, lines = await stand.lines(stop=70, handle=HANDLE)
            assert lines[-1]["code"] == "not_fetched"

    asyncio.run(play())


def test_kv_is_fetched_only_from_peers_known_to_the_connector(tmp_path: Path) -> None:
    async def play() -> None:
        async with running_adapter(tmp_path, three_tokens) as stand:
            source = {"kv": "10.0.0.5:9000", "handle": HANDLE}
            status, lines = await stand.lines(start=50, source=source, max_tokens=3)
            assert (status, lines[0]["error"]["code"]) == (403, "not_a_peer")
            await stand.client.put("/peers", json={"peers": ["10.0.0.5:9000"]})
            status, lines = await stand.lines(start=50, source=source, max_tokens=3)
            assert (status, lines[-1]["ended"]) == (200, "length")
            for _ in range(3000):
                if stand.heard and stand.heard[-1] == {"peers": ["10.0.0.5:9000"]}:
                    return
                await asyncio.sleep(0.02)
            raise AssertionError(stand.heard)

    asyncio.run(play())


def test_invalid_segment_is_refused_by_field(tmp_path: Path) -> None:
    async def play() -> None:
        async with running_adapter(tmp_path, three_tokens) as stand:
            for body, status, names in (
                ({"max_tokens": 0}, 400, "max_tokens"),
                ({"max_tokens": 3, "zzz": 1}, 400, "zzz"),
                ({"model": "n", "max_tokens": 3}, 404, "model"),
                ({"stop": 70, "handle": "short"}, 400, "handle"),
                ({"tokens": [], "max_tokens": 3}, 400, "tokens"),
            ):
                result, lines = await stand.lines(**body)  # type: ignore[arg-type]
                assert (result, names in lines[0]["error"]["message"]) == (status, True), lines
            assert (await stand.client.post("/role", json={"role": "cook"})).status == 400
            assert (await (await stand.client.post("/role", json={"role": "prefill"})).json())[
                "role"
            ] == "prefill"
            assert (await stand.client.post("/v1/completions", json={})).status == 409

    asyncio.run(play())


def test_cached_vllm_blocks_are_reported_until_evicted(tmp_path: Path) -> None:
    tokens = list(range(96))

    async def play() -> None:
        async with running_adapter(tmp_path, three_tokens) as stand:
            index, sequence, epoch = PrefixIndex(), 0, -1

            async def held() -> int:
                """As a gateway asks, every now and then."""
                nonlocal sequence, epoch
                body = await (await stand.client.get(f"/cache?epoch={max(0, epoch)}&after={sequence}")).read()
                epoch, reports = read_cache("r", body)
                for report in reports:
                    index.apply(report, "here")
                    sequence = report.sequence
                return index.held_by("r", block_hashes(tokens, "vllm-1", salt="s"))

            assert await held() == 0
            stand.channel.soon("cache", ("+", ["a", "b"], None, tokens[:64], 32, "s"))
            stand.channel.soon("steps", (64, 1, 0.0))
            stand.channel.soon("cache", ("+", ["c"], "b", tokens[64:], 32, ""))
            await eventually(held, 6)
            assert (
                stand.service.connector_events.steps.count,
                stand.service.connector_events.steps.tokens,
            ) == (1, 64)
            stand.channel.soon("cache", ("-", ["c"]))
            await eventually(held, 4)
            stand.channel.soon("cache", ("0",))
            await eventually(held, 0)
            assert (await stand.client.get("/cache?since=3")).status == 400

    asyncio.run(play())


async def eventually(ask: Callable[[], Awaitable[int]], expected: int) -> None:
    for _ in range(3000):
        if await ask() == expected:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"did not become {expected}")


LAST_LINES = """(VllmWorker-0 pid=1) ERROR [multiproc_executor.py:953]     raise ValueError(
(VllmWorker-0 pid=1) ERROR [multiproc_executor.py:953] ValueError: Available memory is less than desired
Traceback (most recent call last):
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_failed_vllm_start_reports_the_causing_log_line(tmp_path: Path) -> None:
    python, lines = tmp_path / "python", tmp_path / "lines"
    lines.write_text(LAST_LINES)
    python.write_text(f"#!/bin/sh\ncat {lines}\nexit 1\n")
    python.chmod(0o755)

    async def last_words() -> str:
        process = VllmProcess(VllmSettings("dir", "m", str(python)), tmp_path / "channel")
        await process.start()
        await process.wait()
        return process.last_words()

    assert asyncio.run(last_words()) == "ValueError: Available memory is less than desired"
