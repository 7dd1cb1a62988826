"""Hand-overs through the face: whose handle it is, where caches may come from, and senders that are wrong."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from engine_models import prompt
from face_kit import face, make_service, played, tokens_in
from loop_kit import desk

from potluck.engine.memory.handover import KvManifest, token_hash
from potluck.engine.server.engine_service import RequestLimits
from potluck.engine.server.kv_connector import KvSettings
from potluck.gateway.registry.health import LASTS_S, granted
from potluck.gateway.values import Address, Endpoint
from potluck.kv.handles import bound_to, new_handle
from potluck.kv.kv_sender import KvSender, SenderLimits

TOKENS, OUTPUT = prompt(90), 10
QUICK = RequestLimits(handover_s=2.0, attach_s=0.3, lease_s=0.3, deadline_s=20.0)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return desk("hybrid").answer(TOKENS, OUTPUT)


def test_a_handle_is_good_for_one_request_only() -> None:
    async def scenario() -> None:
        async with face(make_service(limits=RequestLimits(attach_s=0.3))) as one, face(make_service()) as two:
            handle = new_handle()
            segment = asyncio.create_task(one.segment(TOKENS, stop=50, handle=handle))
            source = {"kv": one.kv, "handle": handle}
            right = {"start": 50, "max_tokens": 1, "source": source}
            await asyncio.sleep(0.2)
            for tokens, wrong in (
                (TOKENS, {"source": {**source, "handle": new_handle()}}),
                (TOKENS, {"request": "s"}),
                (TOKENS[1:], {}),
            ):
                status, body = await two.segment(tokens, **(right | wrong))
                assert (status, body["error"]["code"]) == (424, "hand_over")
                assert "is unknown, has expired, was used" in body["error"]["message"]
            assert (await two.segment(TOKENS, **right))[0] == 200
            assert (await segment)[1][-1]["ended"] == "handed_on"
            assert (await two.segment(TOKENS, **right))[0] == 424

    played(scenario)


def fetching() -> int:
    return sum(thread.name.startswith("kv-in") for thread in threading.enumerate())


@pytest.mark.parametrize("sends", [False, True])
def test_who_leaves_stops_its_hand_over(sends: bool) -> None:
    """A receiver whose cache never comes, or a sender whose receiver is there already: nobody waits for them."""

    async def scenario() -> None:
        async with face(make_service()) as one, face(make_service()) as two:
            handle = new_handle()
            source = {"kv": one.kv, "handle": handle}
            receiver = asyncio.create_task(two.segment(TOKENS, start=50, max_tokens=1, source=source))
            while not fetching():
                await asyncio.sleep(0.01)
            if sends:
                sender = asyncio.create_task(one.segment(prompt(400), stop=390, handle=handle, request="s"))
                await asyncio.sleep(0.1)
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
            receiver.cancel()
            await asyncio.gather(receiver, return_exceptions=True)
            await one.until_idle()
            await two.until_idle()
            for _ in range(6000):
                if not fetching():
                    break
                await asyncio.sleep(0.01)
            assert not fetching()

    played(scenario)


def test_status_says_where_caches_are_and_how_links_fare() -> None:
    async def scenario() -> None:
        async with face(make_service(prefix_cache_bytes=0)) as one, face(make_service()) as two:
            source = {"kv": one.kv, "handle": new_handle()}
            await asyncio.gather(
                one.segment(TOKENS, stop=64, handle=source["handle"]),
                two.segment(TOKENS, start=64, max_tokens=OUTPUT, source=source),
            )
            (_, sender), (_, receiver) = await one.get("/status"), await two.get("/status")
            assert sender["kv"] == one.kv
            (out,), (back,) = sender["links"], receiver["links"]
            assert out["moved_bytes"] == back["moved_bytes"] > 0
            assert out["peer"] == "127.0.0.1"
            assert back["peer"] == one.kv

    played(scenario)


def test_an_engine_keeps_to_what_it_is_granted() -> None:
    async def scenario() -> None:
        async with face(make_service("full", limits=QUICK)) as one:
            grant = {"link": "a->b", "peers": ["10.0.0.5", "0:0::1"], "bytes_per_s": 1e9}
            status, told = await one.put("/grants", {"grants": [grant], "lasts_s": 30})
            assert (status, told) == (200, {"grants": [grant | {"peers": ["10.0.0.5", "::1"]}]})
            for wrong in (
                {"grants": [grant]},
                {"grants": [grant], "lasts_s": 0},
                {"grants": grant, "lasts_s": 30},
                {"grants": [grant | {"peers": []}], "lasts_s": 30},
                {"grants": [grant | {"bytes_per_s": -1}], "lasts_s": 30},
                {"grants": [grant | {"more": 1}], "lasts_s": 30},
                {"grant": [], "lasts_s": 30},
            ):
                assert (await one.put("/grants", wrong))[0] == 400, wrong
            assert (await one.get("/grants"))[1] == told
            ends = [
                Endpoint(name, "m", name, Address(host, 1), kv=f"{host}:1")
                for name, host in (("a", "10.0.0.4"), ("b", "10.0.0.5"))
            ]
            (given,) = granted(ends, {("a", "b"): 8.0}, {}).values()  # what a gateway would say
            status, told = await one.put("/grants", {"grants": given, "lasts_s": LASTS_S})
            assert (status, told["grants"]) == (200, [{**grant, "peers": ["10.0.0.5"], "bytes_per_s": 9e8}])
            assert (await one.put("/grants", {"grants": [], "lasts_s": 30}))[1] == {"grants": []}

    played(scenario)


def test_a_cache_is_only_fetched_from_peers_and_nobody_learns_who_listens() -> None:
    async def scenario() -> None:
        service = make_service("full", limits=QUICK, kv=KvSettings(fleet=(("10.9.9.9", 1234),)))
        async with face(service) as one:

            async def asked(kv: str) -> tuple[int, Any]:
                source = {"kv": kv, "handle": new_handle()}
                return await one.segment(TOKENS, start=50, max_tokens=OUTPUT, source=source)

            for kv in (
                "nowhere",
                "127.0.0.1:x",
                "127.0.0.1:99999",
                "127.0.0.1:0",
                "::1:80",
                "a\nb:80",
                "x" * 300,
            ):
                status, body = await asked(kv)
                assert (status, body["error"]["param"]) == (400, "source.kv"), kv
            with socket.create_server(("127.0.0.1", 0)) as open_port, socket.socket() as closed_port:
                closed_port.bind(("127.0.0.1", 0))
                open_at, closed_at = (
                    f"127.0.0.1:{each.getsockname()[1]}" for each in (open_port, closed_port)
                )
                strangers = [open_at, closed_at, one.kv, "10.1.2.3:80", "example.org:80", "10.9.9.9:1235"]
                said = [await asked(kv) for kv in strangers]
                assert {status for status, _ in said} == {403}
                assert len({body["error"]["message"] for _, body in said}) == 1
                assert said[0][1]["error"]["code"] == "not_a_peer"
                open_port.settimeout(0)
                with pytest.raises(BlockingIOError):
                    open_port.accept()
                # The list is whole each time, and the same again changes nothing.
                for _ in range(2):
                    status, told = await one.put("/peers", {"peers": [closed_at, closed_at, "[0:0::1]:80"]})
                    assert (status, told) == (
                        200,
                        {"peers": [closed_at, "[::1]:80"], "always": ["10.9.9.9:1234"]},
                    )
                assert (await one.get("/peers"))[1] == told
                assert (await asked(closed_at))[0] == 502
                assert (await asked(open_at))[0] == 403
                await one.put("/peers", {"peers": []})
                assert (await asked(closed_at))[0] == 403
            for wrong in (
                {"peers": ["host"]},
                {"peers": "x:1"},
                {"pears": []},
                {},
                {"peers": ["h:1"] * 4097},
            ):
                assert (await one.put("/peers", wrong))[0] == 400
            assert (await one.get("/peers"))[1]["peers"] == []
            await one.until_idle()

    played(scenario)


def wrong_sender(damage: str, handle: str) -> tuple[KvSender, str]:
    """A sender that is wrong in one way."""
    other = desk("hybrid" if damage != "shape" else "window")
    key = other.submit(TOKENS, stop=50)
    about = other.loop.attach(key, 0, 0.0)
    other.run()
    parcels = other.parcels(key)
    fingerprint = desk("hybrid").executor.fingerprint
    bound = bound_to("r", fingerprint, about.token_hash)
    said = {
        "model": KvManifest("0" * 32, 0, 50, about.token_hash),
        "hash": KvManifest(fingerprint, 0, 50, token_hash(TOKENS[1:51])),
    }.get(damage, KvManifest(fingerprint, 0, 50, about.token_hash))

    def opened(have: int) -> KvManifest:
        if damage == "refusal":
            raise ValueError("no")
        return said

    sender = KvSender(limits=SenderLimits(attach_s=0.3))
    if damage != "unknown":
        transfer = sender.offer(handle, bound, opened, 10.0)
        for parcel in parcels[damage == "missing" :]:
            transfer.put(parcel)
        transfer.finish()
    return sender, f"127.0.0.1:{sender.address[1]}"


@contextmanager
def rude(answer: bytes) -> Iterator[str]:
    """Somebody at a port who says something else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


STATUS = {"refusal": 424, "unknown": 424, "nobody": 502, "cut": 502}


@pytest.mark.parametrize(
    "damage", ["model", "hash", "shape", "missing", "noise", "cut", "refusal", "unknown", "nobody"]
)
def test_a_damaged_hand_over_is_refused_and_the_engine_lives_on(damage: str, expected: list[int]) -> None:
    async def scenario(kv: str, handle: str) -> None:
        async with face(make_service(limits=QUICK, prefix_cache_bytes=0)) as one:
            source = {"kv": kv, "handle": handle}
            status, body = await one.segment(TOKENS, start=50, max_tokens=OUTPUT, source=source)
            assert status == STATUS.get(damage, 422), body
            assert body["error"]["message"].startswith("hand-over")
            assert "\n" not in body["error"]["message"]
            await one.until_idle()
            assert tokens_in((await one.segment(TOKENS, max_tokens=OUTPUT))[1]) == expected

    handle = new_handle()
    if damage in ("noise", "cut"):
        with rude(b"not a cache at all, but some text" if damage == "noise" else b"") as kv:
            played(lambda: scenario(kv, handle))
        return
    sender, kv = wrong_sender(damage, handle)
    if damage == "nobody":
        sender.close()
    played(lambda: scenario(kv, handle))
    sender.close()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_cache_may_cross_in_fewer_bits_and_never_becomes_a_prefix(codec: str, expected: list[int]) -> None:
    async def scenario() -> None:
        async with face(make_service()) as one, face(make_service()) as two:
            for sent in (codec, "raw"):
                handle = new_handle()
                source = {"kv": one.kv, "handle": handle}
                (a, _), (b, got) = await asyncio.gather(
                    one.segment(TOKENS, stop=70, handle=handle, codec=sent),
                    two.segment(TOKENS, start=70, max_tokens=OUTPUT, source=source),
                )
                assert (a, b) == (200, 200)
                assert len(tokens_in(got)) == OUTPUT
                # What came in fewer bits was not kept: the second time nothing is known of the prompt.
                assert got[-1]["cached_tokens"] == 0
            assert tokens_in(got) == expected
            links = (await one.get("/status"))[1]["links"]
            assert links
            status, body = await one.segment(TOKENS, max_tokens=1, codec=codec)
            assert status == 400
            assert body["error"]["message"].startswith("codec: ")
            status, _ = await one.segment(TOKENS, stop=70, codec="int3")
            assert status == 400

    played(scenario)


@pytest.mark.parametrize(("second", "status"), [("raw", 424), ("int8", 200)])
def test_what_came_in_fewer_bits_goes_on_only_as_such(second: str, status: int) -> None:
    """Else the third engine would take it for exact, and give it to others."""

    async def scenario() -> None:
        async with face(make_service()) as one, face(make_service()) as two, face(make_service()) as three:
            first, then = new_handle(), new_handle()
            answers = await asyncio.gather(
                one.segment(TOKENS, stop=40, handle=first, codec="int4"),
                two.segment(
                    TOKENS,
                    start=40,
                    stop=70,
                    handle=then,
                    codec=second,
                    source={"kv": one.kv, "handle": first},
                ),
                three.segment(TOKENS, start=70, max_tokens=OUTPUT, source={"kv": two.kv, "handle": then}),
            )
            assert answers[2][0] == status
            if status == 424:
                assert "fewer bits" in answers[2][1]["error"]["message"]
            for engine in (one, two, three):
                await engine.until_idle()
            _, lines = await three.segment(TOKENS, max_tokens=1)
            assert lines[-1]["cached_tokens"] == 0

    played(scenario)
