"""The engine's own endpoints: segments, hand-overs, roles, draining, keys, limits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from engine_models import EXACT, VOCAB, prompt
from face_kit import NAME, Client, face, make_service, played, tokens_in
from loop_kit import desk

from potluck.engine.server.engine_service import RequestLimits
from potluck.kv.handles import new_handle

TOKENS, OUTPUT = prompt(90), 10
QUICK = RequestLimits(
    handover_s=2.0, attach_s=0.3, lease_s=0.3, deadline_s=20.0, body_bytes=20_000, open_requests=6
)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return desk("hybrid").answer(TOKENS, OUTPUT)


async def pair(sender: Client, receiver: Client, cut: int, **fields: object) -> tuple[Any, Any]:
    """Both segments at once, as a gateway sends them."""
    handle = new_handle()
    source = {"kv": sender.kv, "handle": handle}
    return await asyncio.gather(
        sender.segment(TOKENS, stop=cut, handle=handle),
        receiver.segment(TOKENS, start=cut, max_tokens=OUTPUT, source=source, **fields),
    )


def test_segments_across_two_faces_answer_as_one(expected: list[int]) -> None:
    async def scenario() -> None:
        async with face(make_service()) as one, face(make_service()) as two:
            status, lines = await one.segment(TOKENS, max_tokens=OUTPUT)
            assert status == 200
            assert tokens_in(lines) == expected
            assert lines[-1]["ended"] == "length"
            assert lines[-1]["output_tokens"] == OUTPUT
            for cut in (1, 33, 64, 90):
                (a, sent), (b, got) = await pair(one, two, cut)
                assert (a, b) == (200, 200)
                assert tokens_in(got) == expected
                assert sent[-1]["ended"] == "handed_on"
            await one.until_idle()
            await two.until_idle()

    played(scenario)


def test_a_role_says_what_an_engine_is_for_not_what_it_can_do(expected: list[int]) -> None:
    async def scenario() -> None:
        async with face(make_service()) as one:
            running = asyncio.create_task(one.segment(TOKENS, max_tokens=200, ignore_eos=True))
            while not (await one.get("/status"))[1]["running"]:
                await asyncio.sleep(0.01)
            assert (await one.post("/role", {"action": "init", "role": "prefill"}))[1]["role"] == "mixed"
            assert (await one.post("/role", {"action": "activate"}))[1]["role"] == "prefill"
            asked = {"model": NAME, "prompt": TOKENS, "max_tokens": OUTPUT}
            status, body = await one.post("/v1/completions", asked)
            assert (status, body["error"]["code"]) == (409, "role")
            assert tokens_in((await one.segment(TOKENS, max_tokens=OUTPUT))[1]) == expected
            status, lines = await running
            assert tokens_in(lines)[:OUTPUT] == expected
            assert (await one.post("/role", {"role": "decode"}))[1]["role"] == "decode"
            source = {"kv": one.kv, "handle": new_handle()}
            (_, first), (_, rest) = await asyncio.gather(
                one.segment(TOKENS, stop=40, handle=source["handle"]),
                one.segment(TOKENS, start=40, max_tokens=OUTPUT, source=source),
            )
            assert (first[-1]["ended"], tokens_in(rest)) == ("handed_on", expected)
            assert tokens_in((await one.segment(TOKENS, max_tokens=OUTPUT))[1]) == expected
            assert (await one.post("/role", {"action": "stop"}))[1]["role"] == "mixed"
            assert (await one.get("/role"))[1]["next"] is None
            for wrong in ({"role": "king"}, {"action": "activate"}, {"action": "x"}, {"bogus": 1}):
                assert (await one.post("/role", wrong))[0] == 400

    played(scenario)


def test_draining_refuses_new_ones_and_ends() -> None:
    async def scenario() -> None:
        async with face(make_service()) as one:
            running = asyncio.create_task(one.segment(TOKENS, max_tokens=100, ignore_eos=True))
            while not (await one.get("/status"))[1]["running"]:
                await asyncio.sleep(0.01)
            assert (await one.post("/drain", {}))[1]["state"] == "draining"
            status, body = await one.segment(TOKENS, max_tokens=1)
            assert (status, body["error"]["code"]) == (503, "draining")
            assert (await running)[0] == 200
            await one.until_idle()
            report = (await one.get("/status"))[1]
            assert report["state"] == "drained"
            assert report["exact"] == EXACT
            assert report["products"] in ("plain", "pairs", "strips")
            assert (await one.get("/health")) == (200, {"status": "draining"})
            await one.post("/drain", {"resume": True})
            assert (await one.segment(TOKENS, max_tokens=1))[0] == 200

    played(scenario)


def test_a_client_that_leaves_cancels() -> None:
    async def scenario() -> None:
        async with face(make_service()) as one:
            body = {"request": "r", "model": NAME, "tokens": TOKENS, "max_tokens": 400, "ignore_eos": True}
            async with one.session.post(one.url + "/segments", json=body) as reply:
                await reply.content.readline()
                reply.close()
            await one.until_idle()
            counters = one.service.counters
            assert counters.ended == {"cancelled": 1}
            assert counters.output_tokens < 400

    played(scenario)


def test_a_cache_that_nobody_fetches_is_let_go() -> None:
    async def scenario() -> None:
        async with face(make_service(limits=QUICK)) as one:
            status, lines = await one.segment(TOKENS, stop=50)
            assert status == 200
            assert [next(iter(line)) for line in lines] == ["handle", "computed", "ended"]
            assert "lease" in lines[-1]["problem"]
            late = {"kv": one.kv, "handle": lines[0]["handle"]}
            status, body = await one.segment(TOKENS, start=50, max_tokens=1, source=late)
            assert (status, body["error"]["code"]) == (424, "hand_over")
            await one.until_idle()

    played(scenario)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tokens": []}, "token"),
    ({"tokens": "abc"}, "tokens"),
    ({"tokens": [1, 2.5]}, "tokens"),
    ({"tokens": [1, VOCAB]}, "vocabulary"),
    ({"tokens": [1, -1]}, "vocabulary"),
    ({"tokens": prompt(600)}, "512"),
    ({"model": "other"}, "unknown 'other'"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"start": 3}, "source"),
    ({"stop": 1000}, "stop"),
    ({"stop": 3, "handle": "short"}, "handle"),
    ({"stop": 1, "start": 2, "source": {"kv": "127.0.0.1:1", "handle": "x" * 40}}, "stop"),
    ({"sampling": {"temperature": -1}}, "temperature"),
    ({"sampling": {"temprature": 1}}, "temperature"),
    ({"bogus": 1}, "unknown key"),
    ({"request": ""}, "request"),
]


def test_wrong_segments_are_refused_in_one_line() -> None:
    async def scenario() -> None:
        async with face(make_service(limits=QUICK)) as one:
            for fields, says in WRONG:
                body = {"request": "r", "model": NAME, "tokens": [1, 2, 3], "max_tokens": 4, **fields}
                if "stop" in fields:
                    del body["max_tokens"]
                status, reply = await one.post("/segments", body)
                assert status in (400, 404), fields
                assert says in reply["error"]["message"], reply
            assert (await one.post("/segments", b"{"))[0] == 400
            assert (await one.post("/segments", b"[" * 5000))[0] == 400
            assert (await one.post("/segments", b"[1]"))[0] == 400
            status, reply = await one.post("/segments", b" " * 30_000)
            assert (status, reply["error"]["type"]) == (413, "invalid_request_error")
            status, reply = await one.get("/nowhere")
            assert (status, reply["error"]["type"]) == (404, "invalid_request_error")
            assert (await one.get("/segments"))[0] == 405
            await one.until_idle()

    played(scenario)


def test_too_many_requests_are_told_so_and_a_deadline_ends_one() -> None:
    limits = RequestLimits(open_requests=2, deadline_s=1.5, handover_s=30)

    async def scenario() -> None:
        async with face(make_service(limits=limits)) as one:
            # Two that wait until their caches are fetched, which nobody does.
            slow = [asyncio.create_task(one.segment(TOKENS, stop=50)) for _ in range(2)]
            while one.service.open_requests < 2:
                await asyncio.sleep(0.01)
            status, body = await one.segment(TOKENS, max_tokens=1)
            assert (status, body["error"]["code"]) == (429, "overloaded")
            lines = [(await task)[1] for task in slow]
            assert all("longer than" in found[-1]["problem"] for found in lines)
            await one.until_idle()
            assert one.service.counters.ended == {"error": 2}

    played(scenario)


def test_a_key_opens_everything_but_health() -> None:
    async def scenario() -> None:
        async with face(make_service(), key="a secret") as one:
            assert (await one.get("/status"))[0] == 200
            one.headers = {"Authorization": "Bearer another"}
            for path in ("/status", "/v1/models", "/metrics", "/role"):
                status, body = await one.get(path)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            assert (await one.post("/v1/completions", {"model": NAME, "prompt": "x"}))[0] == 401
            assert (await one.get("/health"))[0] == 200

    played(scenario)


def test_status_and_metrics_say_what_happened() -> None:
    async def scenario() -> None:
        async with face(make_service()) as one:
            await one.segment(TOKENS, max_tokens=OUTPUT, ignore_eos=True)
            await one.segment(TOKENS, max_tokens=OUTPUT, ignore_eos=True)
            _, status = await one.get("/status")
            assert status["output_tokens"] == 2 * OUTPUT
            assert status["free_blocks"] == status["total_blocks"]
            assert status["steps"] > 0
            assert 0 < status["prefix_hit_share"] < 1
            assert (status["state"], status["role"], status["running"], status["waiting"]) == (
                "ready",
                "mixed",
                0,
                0,
            )
            _, text = await one.get("/metrics")
            values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            names = '{engine="0",model_name="tiny"}'
            assert float(values[f"vllm:generation_tokens_total{names}"]) == 2 * OUTPUT
            assert float(values[f"vllm:prompt_tokens_total{names}"]) == 2 * len(TOKENS)
            assert float(values[f"vllm:time_to_first_token_seconds_count{names}"]) == 2
            assert float(values[f"vllm:inter_token_latency_seconds_count{names}"]) == 2 * (OUTPUT - 1)
            assert float(values[f"vllm:kv_cache_usage_perc{names}"]) == 0
            assert json.dumps(status)

    played(scenario)


def test_a_loop_that_fails_answers_everybody() -> None:
    async def scenario() -> None:
        async with face(make_service()) as one:

            def broken(*_: object) -> object:
                raise KeyError("a bug")

            one.service.driver._loop.executor.step = broken  # type: ignore[method-assign, attr-defined]
            status, body = await one.segment(TOKENS, max_tokens=5)
            assert status == 500
            assert "a bug" in body["error"]["message"]
            status, body = await one.get("/health")
            assert (status, body["status"]) == (503, "failed")
            assert (await one.segment(TOKENS, max_tokens=5))[0] == 503

    played(scenario)
