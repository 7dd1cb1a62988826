"""Engines that pretend behind HTTP: the face of a real one, hand-overs with pretended bytes, and no torch."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner
from mock_helpers import A100, FAST, LLAMA, mock_service
from server_helpers import Client, engine_client, make_service, tokens_in

from potluck.api.tokenizer import ModelTokenizer
from potluck.cli.main import cli
from potluck.engine import shipped_model
from potluck.engine.compute.emulated import emulated_blocks
from potluck.engine.serve import serve_all
from potluck.engine.server.http_connection import RequestLimits
from potluck.kv.fetch import KvFetch
from potluck.kv.handles import new_handle
from potluck.perf.memory import kv_bytes
from potluck.perf.transfer import alpha_beta

TOKENS = [token % 4000 for token in range(7, 7 + 13 * 90, 13)]
GREEDY = {"max_tokens": 10}


async def transfer_tokens(one: Client, two: Client, stop: int, **fields: object) -> tuple[list[int], Any]:
    """Prefill at one, decode at the other: the tokens, and the sender's end."""
    handle = new_handle()
    sender = asyncio.create_task(one.segment(TOKENS, stop=stop, handle=handle, **fields))
    status, lines = await two.segment(TOKENS, start=stop, source={"kv": one.kv, "handle": handle}, **GREEDY)
    assert status == 200, lines
    return tokens_in(lines), (await sender)[1][-1]


@pytest.mark.parametrize(("codec", "late_s"), [("raw", 0.0), ("int4", 0.0), ("int4", 0.3)])
async def test_mock_kv_transfers_give_equal_tokens_and_report_emulated_bytes(
    codec: str, late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the answer is over before the connections that brought the cache have ended."""
    ended = KvFetch._stop
    monkeypatch.setattr(KvFetch, "_stop", lambda fetch: (time.sleep(late_s), ended(fetch)))
    async with engine_client(mock_service()) as one, engine_client(mock_service()) as two:
        expected = tokens_in((await one.segment(TOKENS, **GREEDY))[1])
        tokens, end = await transfer_tokens(one, two, 70, codec=codec)
        assert (tokens, end["ended"]) == (expected, "handed_on")
        await one.until_idle()
        await two.until_idle()
        share = 1.0 if codec == "raw" else 0.2734
        moved = kv_bytes(LLAMA, 70) * share
        sent = (await one.get("/status"))[1]
        # The receiver counts when the transfer has been closed, which may be after the request has ended.
        async with asyncio.timeout(30.0):
            while not (got := (await two.get("/status"))[1])["links"][0]["moved_bytes"]:
                await asyncio.sleep(0.01)
        assert sent["links"][0]["moved_bytes"] == pytest.approx(moved, rel=1e-2)
        assert got["links"][0]["moved_bytes"] == pytest.approx(moved, rel=1e-2)
        card = alpha_beta(A100.network_gbps).beta_bytes_per_s * FAST
        assert sent["links"][0]["goodput_bytes_per_s"] == pytest.approx(card)
        assert one.service.counters.sent_bytes == two.service.counters.received_bytes
        assert one.service.counters.sent_bytes == pytest.approx(kv_bytes(LLAMA, 70), abs=8)


async def test_mock_engine_refuses_lossy_prefixes_and_kv_of_another_model() -> None:
    """What came in fewer bits does not become a prefix; and a sender of another model is not understood."""

    other = mock_service(mean_output=30)
    async with engine_client(mock_service(RequestLimits(attach_s=0.3))) as one, engine_client(other) as two:
        handle = new_handle()
        sender = asyncio.create_task(one.segment(TOKENS, stop=70, handle=handle))
        status, body = await two.segment(TOKENS, start=70, source={"kv": one.kv, "handle": handle}, **GREEDY)
        assert (status, body["error"]["code"]) == (424, "hand_over")
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
    async with engine_client(mock_service()) as one, engine_client(mock_service()) as two:
        await transfer_tokens(one, two, 70, codec="int8")
        assert (await two.get("/cache"))[1]["reports"][0]["added"] == []
        await transfer_tokens(one, two, 70)
        assert len((await two.get("/cache"))[1]["reports"][0]["added"]) == 6


def document_shape(value: object) -> object:
    """The shape of a JSON document: keys all the way down, and kinds of values."""
    if isinstance(value, dict):
        return {key: document_shape(item) for key, item in value.items() if key != "notes"}
    if isinstance(value, list):
        return [document_shape(item) for item in value[:1]]
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )


async def test_mock_status_cache_and_metrics_equal_those_of_a_real_engine() -> None:
    result = []
    for make in (lambda: make_service("full"), mock_service):
        tokens = [token % 90 for token in range(64)]
        async with engine_client(make()) as client:
            ends = (await client.segment(tokens, max_tokens=4))[1][-1]
            assert (await client.segment(tokens, max_tokens=4))[1][-1]["cached_tokens"] == 48
            pages = {path: (await client.get(path))[1] for path in ("/status", "/cache", "/role", "/health")}
            names = {
                line.split("{")[0]
                for line in (await client.get("/metrics"))[1].splitlines()
                if line and not line.startswith("#") and "emulated" not in line
            }
            result.append((document_shape(ends), document_shape(pages), names))
            assert len(pages["/cache"]["reports"][0]["added"]) == 4
            if make is mock_service:
                assert pages["/status"]["total_blocks"] == emulated_blocks(LLAMA, A100, 1)
                assert pages["/status"]["prefix_bytes"] == 4 * 16 * 131072
    assert result[0] == result[1]


async def test_mock_drain_roles_and_text_equal_those_of_a_real_engine() -> None:
    async with engine_client(mock_service()) as client:
        asked = {"model": "tiny", "prompt": "Call me", "max_tokens": 9, "seed": 3, "stream": True}
        events = (await client.post("/v1/completions", asked))[1]
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text.strip()
        assert "\ufffd" not in text
        assert (await client.post("/v1/completions", {**asked, "stream": False}))[1]["choices"][0] == {
            "index": 0, "finish_reason": "length", "logprobs": None, "text": text,
        }  # fmt: skip
        await client.post("/role", {"role": "prefill"})
        assert (await client.post("/v1/completions", asked))[0] == 409
        await client.post("/drain", {})
        assert (await client.segment([1, 2, 3], stop=2))[0] == 503
        assert (await client.get("/status"))[1]["state"] == "drained"


async def test_engine_with_exit_on_drain_ends_after_its_last_request() -> None:
    service, text = mock_service(), asyncio.Queue[str]()
    service.ends_drained = True
    serving = asyncio.create_task(serve_all([service], "127.0.0.1", 0, api_key=None, ready=text.put_nowait))
    url = await text.get()
    asked = {"model": "tiny", "prompt": "Call me", "max_tokens": 200}
    async with aiohttp.ClientSession() as session:
        answer = asyncio.create_task(session.post(f"{url}/v1/completions", json=asked))
        while not service.open_requests:
            await asyncio.sleep(0.001)
        await session.post(f"{url}/drain", json={})
        again = await session.post(f"{url}/drain", json={"resume": True})
        assert again.status == 409, "somebody counts on its end"
        assert (await (await answer).json())["usage"]["completion_tokens"] == 200
    await asyncio.wait_for(serving, 30)


async def test_disconnected_clients_free_all_mock_rows() -> None:
    async with engine_client(mock_service()) as client:
        tasks = [asyncio.create_task(client.segment([n + 1] * 50, max_tokens=5000)) for n in range(12)]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.until_idle()


def test_plain_tokens_are_whole_pieces_of_text() -> None:
    tokenizer = ModelTokenizer.read(shipped_model())
    assert tokenizer is not None
    some = tokenizer.plain_tokens(100)
    assert 20 < len(some) <= 100
    assert len(tokenizer.plain_tokens(10**6)) > 3000
    assert all(tokenizer.token_text(token).strip("\ufffd ") for token in some)


PROCESS = """
import asyncio, json, sys
from potluck.cli.main import cli
from potluck.engine import serve
import potluck.engine.server.engine_app

async def once(services, host, port, *, api_key, ready, names, tls):
    import aiohttp
    from potluck.engine.server.engine_app import open_server
    faces = [await open_server(each, host, port) for each in services]
    async with aiohttp.ClientSession() as session:
        body = {"request": "r", "model": "words", "tokens": list(range(50)), "stop": 40, "codec": "int8",
                "handle": "h" * 32}
        first = asyncio.create_task(session.post(faces[0].address + "/segments", json=body))
        source = {"kv": services[0].kv_connector.address, "handle": "h" * 32}
        body = {k: v for k, v in body.items() if k not in ("stop", "codec", "handle")}
        body |= {"start": 40, "source": source, "max_tokens": 4}
        async with session.post(faces[1].address + "/segments", json=body) as reply:
            lines = (await reply.text()).splitlines()
        (await first).close()
    for face in faces:
        await face.close()
    heavy = ("torch", "numba", "scipy", "pandas", "safetensors", "highspy")
    print(json.dumps([len(lines), [name for name in heavy if name in sys.modules]]))

serve.serve_all = once
sys.argv = ["potluck", "engine", "serve", "--emulate", "A100:llama-3.1-8b", "--mock", "--count", "2",
            "--port", "0", "--kv-from", "127.0.0.1", "--speed-up", "20"]
cli()
"""


def test_mock_engine_does_not_import_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], check=True, capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout) == [5, []]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--mock"], "--mock: needs --emulate"),
        (
            ["--mock", "--emulate", "A100:llama-3.1-8b", "--threads", "2"],
            "--threads: is not for mock engines",
        ),
        (["--mock", "--emulate", "A100:llama-3.1-8b", "--count", "0"], "--count: must be 1 to 256, is 0"),
        (["--mock", "--emulate", "T4:llama-3.1-8b"], "does not fit"),
        (["--count", "2"], "--count: is only for mock engines"),
        (["--mean-output", "9"], "--mean-output: is only for mock engines"),
    ],
)
def test_incompatible_serve_options_are_refused(flags: list[str], says: str) -> None:
    result = CliRunner().invoke(cli, ["engine", "serve", *flags])
    assert says in (result.output + str(result.exception))


async def test_pace_of_a_mock_engine_can_be_changed_and_of_a_real_one_not() -> None:
    async with engine_client(mock_service()) as one, engine_client(make_service()) as real:
        status, text = await one.post("/pace", {"pace": 3})
        assert (status, text) == (200, {"pace": 3})
        for wrong in ({"pace": 0}, {"pace": "fast"}, {}, {"pace": 2, "more": 1}):
            status, text = await one.post("/pace", wrong)
            assert (status, "pace" in text["error"]["message"]) == (400, True)
        status, text = await real.post("/pace", {"pace": 3})
        assert (status, "only be changed in a mock engine" in text["error"]["message"]) == (400, True)
        status, text = await one.post("/network", {"gbps": 0.5})
        assert (status, text) == (200, {"gbps": 0.5})
        for wrong in ({"gbps": 0}, {"pace": 1}, {}):
            assert (await one.post("/network", wrong))[0] == 400
        assert (await real.post("/network", {"gbps": 1}))[0] == 400
