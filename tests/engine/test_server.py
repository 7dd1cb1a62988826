"""The engine's own endpoints: segments, hand-overs, roles, draining, keys, limits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from engine_models import EXACT, VOCAB, prompt
from loop_helpers import harness
from server_helpers import NAME, Client, engine_client, make_service, run_async, tokens_in

from potluck.core.replica.blocks import block_hashes
from potluck.core.routing.prefix_index import PrefixIndex
from potluck.core.state.events import CacheReported
from potluck.engine.server.http_connection import RequestLimits
from potluck.kv import prefix_pool
from potluck.kv.handles import new_handle

TOKENS, OUTPUT = prompt(90), 10
QUICK = RequestLimits(
    handover_s=2.0, attach_s=0.3, lease_s=0.3, deadline_s=20.0, body_bytes=20_000, open_requests=6
)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return harness("hybrid").answer(TOKENS, OUTPUT)


async def transfer_pair(sender: Client, receiver: Client, cut: int, **fields: object) -> tuple[Any, Any]:
    handle = new_handle()
    source = {"kv": sender.kv, "handle": handle}
    return await asyncio.gather(
        sender.segment(TOKENS, stop=cut, handle=handle),
        receiver.segment(TOKENS, start=cut, max_tokens=OUTPUT, source=source, **fields),
    )


async def test_request_segments_on_two_engines_answer_like_one(expected: list[int]) -> None:
    async with engine_client(make_service()) as one, engine_client(make_service()) as two:
        status, lines = await one.segment(TOKENS, max_tokens=OUTPUT)
        assert status == 200
        assert tokens_in(lines) == expected
        assert lines[-1]["ended"] == "length"
        assert lines[-1]["output_tokens"] == OUTPUT
        for cut in (1, 33, 64, 90):
            (a, sent), (b, got) = await transfer_pair(one, two, cut)
            assert (a, b) == (200, 200)
            assert tokens_in(got) == expected
            assert sent[-1]["ended"] == "handed_on"
        await one.until_idle()
        await two.until_idle()


async def test_engine_role_does_not_limit_what_an_engine_can_do(expected: list[int]) -> None:
    async with engine_client(make_service()) as one:
        running = asyncio.create_task(one.segment(TOKENS, max_tokens=200, ignore_eos=True))
        while not (await one.get("/status"))[1]["running"]:
            await asyncio.sleep(0.01)
        assert (await one.post("/role", {"role": "prefill"}))[1]["role"] == "prefill"
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
        assert (await one.post("/role", {"role": "mixed"}))[1]["role"] == "mixed"
        assert (await one.get("/role"))[1]["role"] == "mixed"
        for wrong in ({"role": "king"}, {}, {"role": "mixed", "bogus": 1}):
            assert (await one.post("/role", wrong))[0] == 400


async def test_draining_engine_refuses_new_requests_and_finishes_running_ones() -> None:
    async with engine_client(make_service()) as one:
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


async def test_disconnected_client_cancels_its_segment() -> None:
    async with engine_client(make_service()) as one:
        body = {"request": "r", "model": NAME, "tokens": TOKENS, "max_tokens": 400, "ignore_eos": True}
        async with one.session.post(one.url + "/segments", json=body) as reply:
            await reply.content.readline()
            reply.close()
        await one.until_idle()
        counters = one.service.counters
        assert counters.ended == {"cancelled": 1}
        assert counters.output_tokens < 400


async def test_unfetched_cache_is_freed_after_its_lease() -> None:
    async with engine_client(make_service(limits=QUICK)) as one:
        status, lines = await one.segment(TOKENS, stop=50)
        assert status == 200
        assert [next(iter(line)) for line in lines] == ["handle", "computed", "ended"]
        assert "lease" in lines[-1]["problem"]
        late = {"kv": one.kv, "handle": lines[0]["handle"]}
        status, body = await one.segment(TOKENS, start=50, max_tokens=1, source=late)
        assert (status, body["error"]["code"]) == (424, "hand_over")
        await one.until_idle()


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


async def test_invalid_segments_are_refused_in_one_line() -> None:
    async with engine_client(make_service(limits=QUICK)) as one:
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


async def test_too_many_requests_are_refused_and_a_deadline_ends_one() -> None:
    limits = RequestLimits(open_requests=2, deadline_s=1.5, handover_s=30)

    async with engine_client(make_service(limits=limits)) as one:
        # Two that wait until their caches are fetched, which nobody does.
        slow = [asyncio.create_task(one.segment(TOKENS, stop=50)) for _ in range(2)]
        while one.service.open_requests < 2:
            await asyncio.sleep(0.01)
        status, body = await one.segment(TOKENS, max_tokens=1)
        assert (status, body["error"]["code"]) == (429, "overloaded")
        lines = [(await task)[1] for task in slow]
        assert all("longer than" in line[-1]["problem"] for line in lines)
        await one.until_idle()
        assert one.service.counters.ended == {"error": 2}


async def test_api_key_protects_every_path_but_health() -> None:
    async with engine_client(make_service(), key="a secret") as one:
        assert (await one.get("/status"))[0] == 200
        one.headers = {"Authorization": "Bearer another"}
        for path in ("/status", "/v1/models", "/metrics", "/role"):
            status, body = await one.get(path)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert (await one.post("/v1/completions", {"model": NAME, "prompt": "x"}))[0] == 401
        assert (await one.get("/health"))[0] == 200


async def test_status_and_metrics_count_requests_tokens_and_prefix_hits() -> None:
    async with engine_client(make_service()) as one:
        await one.segment(TOKENS, max_tokens=OUTPUT, ignore_eos=True)
        await one.segment(TOKENS, max_tokens=OUTPUT, ignore_eos=True)
        await one.until_idle()
        _, status = await one.get("/status")
        assert (status["output_tokens"], status["free_blocks"]) == (2 * OUTPUT, status["total_blocks"])
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


async def test_failed_engine_loop_answers_every_request_with_an_error() -> None:
    async with engine_client(make_service()) as one:

        def broken(*_: object) -> object:
            raise KeyError("a bug")

        one.service.driver._loop.executor.begin = broken  # type: ignore[method-assign, attr-defined]
        status, body = await one.segment(TOKENS, max_tokens=5)
        assert status == 500
        assert "a bug" in body["error"]["message"]
        status, body = await one.get("/health")
        assert (status, body["status"]) == (503, "failed")
        assert (await one.segment(TOKENS, max_tokens=5))[0] == 503


SALTED_TOKENS = prompt(70)


@pytest.mark.parametrize("kind", ["full-fancy", "hybrid"])
async def test_equal_prefixes_are_shared_only_under_the_same_salt(kind: str) -> None:
    service = make_service(kind)
    async with engine_client(service) as one:

        async def cached(**fields: object) -> int:
            status, lines = await one.segment(SALTED_TOKENS, max_tokens=3, **fields)
            assert status == 200
            answers.append(tokens_in(lines))
            result: int = lines[-1]["cached_tokens"]
            return result

        async def completed(**fields: object) -> int:
            asked = {"model": NAME, "prompt": SALTED_TOKENS, "max_tokens": 3, "temperature": 0, **fields}
            status, body = await one.post("/v1/completions", asked)
            assert status == 200
            outcome: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            return outcome

        answers: list[Any] = []
        assert await cached() == 0
        held = await cached()
        assert held >= 64
        assert await cached(salt="acme") == 0
        assert await cached(salt="acme") == held
        assert await cached(salt="Acme") == 0
        assert await completed(cache_salt="acme") == held
        assert await completed(cache_salt="other") == 0
        assert await cached(salt="other") == held
        assert await cached(salt="") == held
        assert all(answer == answers[0] for answer in answers)
        # Whoever keeps an index of it finds the blocks under the names that they have with the salt.
        _, report = await one.get("/cache")
        there = {int(name, 16) for item in report["reports"] for name in item["added"]}
        for salt in ("", "acme", "Acme", "other"):
            assert set(block_hashes(SALTED_TOKENS, service.fingerprint, salt=salt)) <= there
        status, body = await one.segment(SALTED_TOKENS, max_tokens=1, salt="x" * 201)
        assert status == 400
        assert "salt: must have at most 200" in body["error"]["message"]


LOST_TOKENS, LOST_OUTPUT, LEAST = prompt(40), 24, 14
ENDS = list(range(0, VOCAB, 3))  # So many that an answer ends soon once it may.


def token_lines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "token" in line]


@pytest.mark.skipif(not EXACT, reason="needs products that are exact")
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("full-fancy", {"temperature": 1.1, "seed": 11, "logprobs": 2}),
        ("hybrid", {"temperature": 0.0, "logprobs": 3}),
        ("hybrid", {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": -5}),
    ],
)
async def test_resumed_request_continues_with_the_same_tokens(kind: str, way: dict[str, Any]) -> None:
    async with (
        engine_client(make_service(kind)) as one,
        engine_client(make_service(kind, prefix_cache_bytes=0)) as two,
    ):

        def rest(k: int, so_far: list[int]) -> dict[str, Any]:
            """What is left to ask for once k tokens are there."""
            left = {"max_tokens": LOST_OUTPUT - k, "min_tokens": max(0, LEAST - k)}
            return {"tokens": LOST_TOKENS + so_far[:k], "sampling": way, "end_tokens": ENDS, **left}

        _, lines = await one.segment(**rest(0, []))
        whole, last = token_lines(lines), lines[-1]
        tokens = tokens_in(lines)
        assert len(tokens) >= LEAST
        assert not set(tokens[: LEAST - 1]) & set(ENDS)
        for k in (1, LEAST - 1, LEAST, len(tokens) - 1):
            if k >= len(tokens):
                continue
            for engine in (one, two):
                _, again = await engine.segment(**rest(k, tokens))
                assert token_lines(again) == whole[k:], k
                assert again[-1]["ended"] == last["ended"]
        # The same over a hand-over, cut within what was streamed.
        asked, source = rest(6, tokens), {"kv": one.kv, "handle": new_handle()}
        cut = {"tokens": asked["tokens"], "stop": 43, "handle": source["handle"]}
        _, (_, again) = await asyncio.gather(
            one.segment(**cut), two.segment(**asked, start=43, source=source)
        )
        assert token_lines(again) == whole[6:]


def read_cache_reports(answer: dict[str, Any], replica: str) -> list[CacheReported]:
    return [
        CacheReported(
            replica,
            report["sequence"],
            *(
                tuple(int(name, 16) for name in report[kind])
                for kind in ("added", "removed", "marked", "unmarked")
            ),
            answer["epoch"],
            report["whole"],
        )
        for report in answer["reports"]
    ]


@pytest.mark.parametrize("kind", ["full", "hybrid"])
async def test_prefix_index_follows_the_cache_reports_of_an_engine(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_pool, "MOST_REPORTS", 2)

    index, quick, seen = PrefixIndex(), PrefixIndex(), 0
    service = make_service(kind)
    async with engine_client(service) as engine:
        for number in range(5):
            tokens = prompt(70 + 16 * number)
            status, lines = await engine.segment(tokens, max_tokens=2)
            assert status == 200
            assert len(tokens_in(lines)) == 2
            _, answer = await engine.get(f"/cache?epoch={service.feed.epoch}&after={seen}")
            for report in read_cache_reports(answer, "e"):
                assert not quick.apply(report, "here")
                seen = report.sequence
            whole = len(tokens) // 16
            hashes = block_hashes(tokens, service.fingerprint)
            exact = kind == "hybrid"
            assert quick.held_by("e", hashes, exact=exact) >= whole - 1
        # One who comes later than reports are kept, or knows another epoch, gets all at once.
        for query in ("", "?after=1", f"?epoch={service.feed.epoch}&after=1", "?epoch=1&after=3"):
            _, answer = await engine.get(f"/cache{query}")
            (report,) = read_cache_reports(answer, "e")
            assert report.whole
            assert not index.apply(report, "here")
        assert index.blocks_by_replica() == quick.blocks_by_replica()
        for query in ("?after=x", "?after=-1", "?since=3", "?epoch=" + "9" * 40):
            status, _ = await engine.get(f"/cache{query}")
            assert status == 400


def test_prefix_cache_on_disk_survives_a_restart(tmp_path: Path) -> None:
    async def scenario(expected: int) -> None:
        service = make_service("full", prefix_cache_dir=tmp_path)
        async with engine_client(service) as engine:
            await engine.segment(prompt(20), max_tokens=1)
            _, lines = await engine.segment(prompt(90), max_tokens=2)
            assert lines[-1]["cached_tokens"] >= expected

    run_async(lambda: scenario(0))
    assert any(path.is_file() for path in tmp_path.rglob("*"))
    run_async(lambda: scenario(64))
