"""Whoever asked for a segment that hands on hears what became of its receiver."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import Any

import pytest
from engine_models import prompt
from face_kit import TRIAL, Client, face, make_service, played
from loop_kit import desk

from potluck.engine.memory.handover import token_hash
from potluck.engine.server.engine_service import RequestLimits
from potluck.kv.frames import ChunkPiece, FrameReader, Hello, TransferOpening, frame
from potluck.kv.handles import bound_to, new_handle, new_session
from potluck.kv.kv_sender import SenderLimits

TOKENS = prompt(90)
QUICK = RequestLimits(handover_s=5.0, attach_s=0.3, lease_s=0.3, deadline_s=20.0)
KV = replace(TRIAL, sender=SenderLimits(lease_s=0.3, beat_s=0.1))


def greeted(engine: Client, handle: str, stop: int) -> socket.socket:
    """A receiver by hand: it asks for the cache of a segment."""
    host, _, port = engine.kv.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    bound = bound_to("r", engine.service.fingerprint, token_hash(TOKENS[:stop]))
    connection.sendall(frame(Hello(new_session(), bound, handle, 0, 1 << 20, 1 << 20, 3000)))
    return connection


def hear(connection: socket.socket, kind: type) -> None:
    reader = FrameReader()
    while not any(isinstance(message, kind) for message, _ in reader.feed(connection.recv(1 << 16))):
        pass


async def _died(engine: Client, after: type | None) -> list[dict[str, Any]]:
    """What a poster is told whose receiver attaches, hears so much, and is killed."""
    handle = new_handle()
    posted = asyncio.create_task(engine.segment(TOKENS, stop=50, handle=handle))
    connection = await asyncio.to_thread(greeted, engine, handle, 50)
    if after is not None:
        await asyncio.to_thread(hear, connection, after)
    connection.close()
    status, lines = await posted
    assert status == 200
    return lines  # type: ignore[no-any-return]


@pytest.mark.parametrize("after", [TransferOpening, ChunkPiece])
def test_a_receiver_that_dies_is_told_of_to_whoever_asked(after: type) -> None:
    async def scenario() -> None:
        async with face(make_service(limits=QUICK, kv=KV)) as one:
            lines = await _died(one, after)
            assert (lines[-1]["ended"], lines[-1]["code"]) == ("error", "receiver_gone")
            assert "heard of no more" in lines[-1]["problem"]
            assert lines[-1]["prompt_tokens"] == len(TOKENS)
            await one.until_idle()

    played(scenario)


def test_nothing_is_computed_for_a_receiver_that_is_gone() -> None:
    """It dies while the prompt still waits for its turn: the poster hears of it before that comes."""

    async def scenario() -> None:
        async with face(make_service(limits=QUICK, kv=KV, max_running=1)) as one:
            others = [
                asyncio.create_task(one.segment(TOKENS, max_tokens=400, ignore_eos=True)) for _ in range(3)
            ]
            while not (await one.get("/status"))[1]["waiting"]:
                await asyncio.sleep(0.01)
            lines = await _died(one, TransferOpening)
            assert (lines[-1]["ended"], lines[-1]["code"]) == ("error", "receiver_gone")
            assert not any("computed" in line for line in lines)
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await one.until_idle()

    played(scenario)


def test_a_cache_that_nobody_comes_for_is_told_of_too() -> None:
    async def scenario() -> None:
        async with face(make_service(limits=QUICK, kv=KV)) as one:
            _, lines = await one.segment(TOKENS, stop=50)
            assert (lines[-1]["ended"], lines[-1]["code"]) == ("error", "not_fetched")
            assert [next(iter(line)) for line in lines] == ["handle", "computed", "ended"]

    played(scenario)


def test_a_receiver_that_fails_is_told_of_and_one_that_does_not_is_not() -> None:
    expected = desk("hybrid").answer(TOKENS, 3)

    async def scenario() -> None:
        async with (
            face(make_service(limits=QUICK, kv=KV)) as one,
            face(make_service(kind="window", limits=QUICK)) as other,
            face(make_service(limits=QUICK)) as two,
        ):
            for engine, ended in ((other, "error"), (two, "handed_on")):
                handle = new_handle()
                source = {"kv": one.kv, "handle": handle}
                (_, sent), (status, got) = await asyncio.gather(
                    one.segment(TOKENS, stop=50, handle=handle),
                    engine.segment(TOKENS, start=50, max_tokens=3, source=source),
                )
                assert sent[-1]["ended"] == ended
                if engine is two:
                    assert "code" not in sent[-1]
                    assert [line["token"] for line in got[:-1]] == expected
                else:  # Another model's engine is never given this cache.
                    assert status == 424
                    assert sent[-1]["code"] == "not_fetched"

    played(scenario)
