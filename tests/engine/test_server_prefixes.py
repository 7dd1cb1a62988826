"""A kept prefix is copied from one engine to another by the names of its blocks, and nothing is left of it if not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_models import KINDS, prompt, runner
from server_helpers import NAME, TRIAL, Client, face, make_service, tokens_in
from test_memory import computed, keep
from test_server import read

from potluck.core.errors import CapacityError, FormatError, InputError
from potluck.core.replica.blocks import block_hashes
from potluck.core.routing.prefix_index import PrefixIndex
from potluck.engine.memory.prefix_cache import PrefixCache, ReceivedPrefix
from potluck.engine.server.http_connection import RequestLimits
from potluck.engine.server.kv_connector import KvSettings
from potluck.kv.chunks import KvChunk
from potluck.kv.handles import new_handle
from potluck.kv.kv_sender import SenderLimits

TOKENS, OUTPUT = prompt(90), 8
PATIENT = RequestLimits(handover_s=3.0, attach_s=0.1)
QUICK = RequestLimits(handover_s=3.0, attach_s=0.2, lease_s=0.5)


def names(engine: Client, tokens: list[int], salt: str = "") -> list[str]:
    return [f"{name:032x}" for name in block_hashes(tokens, engine.service.fingerprint, salt=salt)]


async def lent(engine: Client, named: list[str], **more: object) -> tuple[int, Any]:
    return await engine.post("/prefixes/lend", {"request": "m", "model": NAME, "blocks": named, **more})


async def fetched(engine: Client, blocks: list[str], loan: dict[str, Any], **more: object) -> tuple[int, Any]:
    source = {"kv": loan["kv"], "handle": loan["handle"]}
    asked = {"request": "m", "model": NAME, "blocks": blocks, "source": source, **more}
    return await engine.post("/prefixes/fetch", asked)


async def nothing_left(*engines: Client) -> None:
    for engine in engines:
        await engine.until_idle()
        for _ in range(300):
            sender = engine.service.kv_connector.sender  # type: ignore[union-attr]
            if not (engine.service.lent or engine.service.fetching or sender.transfers or sender.held_bytes):
                break
            await asyncio.sleep(0.01)
        assert (engine.service.lent, engine.service.fetching) == (0, 0)
        assert (sender.transfers, sender.held_bytes) == (0, 0)


NAMED = ["full-fancy", "hybrid", "latent", "long-window"]
"""Models of which some layer keeps every token, so that there are blocks with names."""


@pytest.mark.parametrize("kind", NAMED)
async def test_copied_prefix_is_used_and_gives_the_same_tokens(kind: str) -> None:
    async with face(make_service(kind)) as one, face(make_service(kind)) as two:
        _, lines = await one.segment(TOKENS, max_tokens=OUTPUT, salt="acme")
        expected = tokens_in(lines)
        _, again = await one.segment(TOKENS, max_tokens=OUTPUT, salt="acme")
        wanted = [*names(one, TOKENS, "acme"), "ab" * 16]
        status, loan = await lent(one, wanted, codec="int4")
        assert status == 200
        assert loan["tokens"] == 16 * loan["blocks"] >= 64
        status, moved = await fetched(two, wanted, loan)
        blocks = wanted[: loan["blocks"]]
        assert (status, moved["tokens"]) == (200, loan["tokens"])
        assert moved["moved_bytes"] > 0
        _, answer = await two.segment(TOKENS, max_tokens=OUTPUT, salt="acme")
        assert tokens_in(answer) == expected == tokens_in(again)
        assert answer[-1]["cached_tokens"] == loan["tokens"]
        _, other = await two.segment(TOKENS, max_tokens=OUTPUT)
        assert (tokens_in(other), other[-1]["cached_tokens"]) == (expected, 0)
        index = PrefixIndex()
        for report in read((await two.get("/cache"))[1], "two"):
            index.apply(report, "here")
        exact = await two.service.hub.ask(lambda loop, _: loop.prefixes.exact)
        assert index.held_by("two", [int(name, 16) for name in blocks], exact=exact) == len(blocks)
        # What is there already does not come again, and no handle is needed for that.
        assert (await fetched(two, blocks, loan))[1] == {**moved, "moved_bytes": 0}
        # Who has as much as is lent gets its last block again, and is none the worse.
        _, loan = await lent(one, wanted)
        assert (await fetched(two, wanted, loan))[1]["tokens"] == moved["tokens"]
        await nothing_left(one, two)


async def test_only_missing_blocks_of_a_prefix_are_copied() -> None:
    async with face(make_service("full")) as one, face(make_service("full")) as two:
        expected = tokens_in((await one.segment(TOKENS, max_tokens=OUTPUT))[1])
        await two.segment(TOKENS[:35], max_tokens=1)
        blocks = names(one, TOKENS)
        _, loan = await lent(one, blocks)
        _, moved = await fetched(two, blocks, loan)
        async with face(make_service("full")) as three:
            _, loan = await lent(one, blocks)
            _, whole = await fetched(three, blocks, loan)
        assert moved["moved_bytes"] * 5 == whole["moved_bytes"] * 3
        _, lines = await two.segment(TOKENS, max_tokens=OUTPUT)
        assert (tokens_in(lines), lines[-1]["cached_tokens"]) == (expected, 80)
        await nothing_left(one, two)


async def test_prefix_copy_needs_its_handle_request_and_blocks() -> None:
    async with (
        face(make_service("full", limits=PATIENT)) as one,
        face(make_service("full", limits=PATIENT)) as two,
    ):
        await one.segment(TOKENS, max_tokens=1)
        blocks = names(one, TOKENS)
        assert (await lent(one, names(one, TOKENS, "else")))[1]["error"]["code"] == "not_held"
        handle = new_handle()
        status, loan = await lent(one, blocks, handle=handle)
        assert (status, loan["handle"]) == (200, handle)
        for wrong, more in (
            (blocks, {"request": "n"}),
            (blocks[:-1], {}),
            (blocks, {"source": {"kv": one.kv, "handle": new_handle()}}),
        ):
            status, body = await fetched(two, wrong, loan, **more)
            assert (status, body["error"]["code"]) == (424, "hand_over")
        assert (await fetched(two, blocks, loan))[0] == 200
        await nothing_left(one, two)


async def test_invalid_prefix_requests_are_refused_in_one_line() -> None:
    limits = RequestLimits(prefix_moves=1, lease_s=0.4)
    stranger = make_service("full", kv=KvSettings())
    async with face(make_service("full", limits=limits)) as one, face(stranger) as two:
        await one.segment(TOKENS, max_tokens=1)
        blocks = names(one, TOKENS)
        for wrong in (
            {"blocks": []},
            {"blocks": ["x"]},
            {"blocks": [1]},
            {"blocks": blocks + blocks[:1]},
            {"blocks": blocks * 99},
            {"codec": "zip"},
            {"handle": "short"},
            {"request": ""},
            {"bogus": 1},
            {"source": {"kv": one.kv, "handle": new_handle()}},
        ):
            status, body = await lent(one, blocks, **wrong)
            assert status == 400, wrong
            assert "\n" not in body["error"]["message"]
        assert (await lent(one, blocks, model="other"))[0] == 404
        _, loan = await lent(one, blocks)
        assert (await lent(one, blocks))[0] == 429
        status, body = await fetched(two, blocks, loan)
        assert (status, body["error"]["code"]) == (403, "not_a_peer")
        assert (await two.post("/prefixes/fetch", {"request": "m", "model": NAME, "blocks": blocks}))[
            0
        ] == 400
        await nothing_left(one)  # Nobody came for the loan, and it is over.
        assert (await lent(one, blocks))[0] == 200
        await one.post("/drain", {})
    async with face(make_service("full", prefix_cache_bytes=0)) as none:
        assert (await lent(none, blocks))[0] == 404
        assert (await fetched(none, blocks, loan))[1]["error"]["code"] == "no_cache"


async def test_prefix_evicted_before_its_fetch_is_reported_without_effect() -> None:
    async with (
        face(make_service("full", limits=QUICK)) as one,
        face(make_service("full", limits=QUICK)) as two,
    ):
        await one.segment(TOKENS, max_tokens=1)
        blocks = names(one, TOKENS)
        _, loan = await lent(one, blocks)
        last = int(blocks[-1], 16)

        def lose(loop: Any, _: float) -> None:
            pool = loop.prefixes._pool
            for gone in pool.index.drop(last):
                del pool._sums[gone.name]

        await one.service.hub.ask(lose)
        status, body = await fetched(two, blocks, loan)
        assert status == 424
        assert "is no longer held here" in body["error"]["message"]
        assert (await two.get("/cache"))[1]["reports"][0]["added"] == []
        await nothing_left(one, two)


@pytest.mark.parametrize("who", ["source", "target"])
async def test_failed_prefix_copy_leaves_nothing_behind(who: str) -> None:
    slow = KvSettings(fleet=TRIAL.fleet, sender=SenderLimits(lease_s=0.3))
    one, two = make_service("full", limits=QUICK, kv=slow), make_service("full", limits=QUICK)
    async with face(one) as source, face(two) as target:
        await source.segment(TOKENS, max_tokens=1)
        blocks = names(source, TOKENS)
        _, loan = await lent(source, blocks)
        held = asyncio.Event()

        def due_s(chunk: Any) -> float:
            held.set()
            return time.monotonic() + 30

        one.kv_transfer.due_s = due_s  # type: ignore[method-assign]
        fetching = asyncio.create_task(fetched(target, blocks, loan))
        async with asyncio.timeout(120):
            await held.wait()
        if who == "source":
            await source.opened.close()
            status, _ = await fetching
            assert status in (424, 502)
            await nothing_left(target)
        else:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            await nothing_left(target)
            await nothing_left(source)
        assert (await target.get("/cache"))[1]["reports"][0]["added"] == []


CONFIG, LENGTH = KINDS["hybrid"], 48


@pytest.fixture(scope="module")
def lent_moved() -> tuple[tuple[int, ...], list[KvChunk]]:
    """Names, and the chunks of all of them."""
    engine, tokens = runner(CONFIG, rows=2, blocks=40), prompt(LENGTH)
    cache = PrefixCache(CONFIG, 10_000_000, "m")
    keep(cache, engine, computed(engine, tokens), tokens)
    names = block_hashes(tokens, "m")
    assert (cache.held(names), cache.lacks_from(names)) == (LENGTH, LENGTH - 16)
    with pytest.raises(InputError, match="no longer held"):
        cache.lend((*names, 5), 0)
    return names, cache.lend(names, 0)


def test_received_prefix_is_kept_and_can_be_copied_on(lent_moved: Any) -> None:
    names, chunks = lent_moved
    cache, received = PrefixCache(CONFIG, 10_000_000, "m"), ReceivedPrefix(CONFIG.model, 0, LENGTH)
    for chunk in reversed(chunks):
        received.accept(chunk)
    assert cache.adopt(names, received) == LENGTH
    assert sorted(map(plain, cache.lend(names, 0))) == sorted(map(plain, chunks))
    assert set(cache.changes().added) == set(names)
    cache.verify()
    late = ReceivedPrefix(CONFIG.model, 32, LENGTH)
    for chunk in cache.lend(names, 32):
        late.accept(chunk)
    with pytest.raises(CapacityError, match="gone meanwhile"):
        PrefixCache(CONFIG, 10_000_000, "m").adopt(names, late)
    assert cache.adopt(names, late) == LENGTH


def plain(chunk: KvChunk) -> tuple[Any, ...]:
    return chunk.layer, chunk.part, chunk.first, chunk.stop, chunk.shape, bytes(chunk.data)


def test_invalid_prefix_chunks_are_refused(lent_moved: Any) -> None:
    _, chunks = lent_moved
    tokens = next(chunk for chunk in chunks if chunk.part == "kv" and chunk.first == 0)
    holes = np.frombuffer(tokens.data, np.float32).copy()
    holes[3] = np.nan
    for wrong, says in (
        (replace(tokens, layer=99), "not expected"),
        (replace(tokens, first=16), "expected [0, 48)"),
        (replace(tokens, shape=(1, *tokens.shape[1:])), "expected [0, 48)"),
        (replace(tokens, dtype="int64"), "is int64"),
        (replace(tokens, codec="int8"), "must be exact"),
        (replace(tokens, data=bytes(tokens.data)[:-1]), "bytes"),
        (replace(tokens, data=holes.tobytes()), "not finite"),
    ):
        with pytest.raises(FormatError) as caught:
            ReceivedPrefix(CONFIG.model, 0, LENGTH).accept(wrong)
        assert says in str(caught.value)
    for dtype, good, bad in (
        ("float16", 0x7BFF, 0x7C00),
        ("bfloat16", 0x7F7F, 0xFF80),
        ("bfloat16", 1, 0x7FC0),
    ):
        numbers = np.full(len(tokens.data) // 4, good, "<u2")
        ReceivedPrefix(CONFIG.model, 0, LENGTH).accept(replace(tokens, dtype=dtype, data=numbers.tobytes()))
        numbers[-1] = bad
        with pytest.raises(FormatError, match="not finite"):
            ReceivedPrefix(CONFIG.model, 0, LENGTH).accept(
                replace(tokens, dtype=dtype, data=numbers.tobytes())
            )
    received_prefix = ReceivedPrefix(CONFIG.model, 0, LENGTH)
    received_prefix.accept(tokens)
    with pytest.raises(FormatError, match="came before"):
        received_prefix.accept(tokens)
    with pytest.raises(FormatError, match="chunks are missing"):
        PrefixCache(CONFIG, 10_000_000, "m").adopt(lent_moved[0], received_prefix)
