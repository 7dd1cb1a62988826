"""Hand-overs through the face: whose handle it is, where caches may come from, and senders that are wrong."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from engine_models import DENSE, KINDS, LINEAR, prompt, stack
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_helpers import FrameReader
from loop_helpers import harness
from mock_helpers import MockLoopHarness, mock_service
from server_helpers import TRIAL, Client, engine_client, make_service, run_async, tokens_in

from potluck.core.errors import InputError
from potluck.core.values.kv import wire_of
from potluck.core.values.model import FullAttention
from potluck.core.values.types import Codec, Link
from potluck.engine.compute.handover import IncomingHandover
from potluck.engine.loop.jobs import NOT_FETCHED, LayerSent
from potluck.engine.server import kv_connector
from potluck.engine.server.http_connection import RequestLimits
from potluck.engine.server.kv_connector import KvSettings
from potluck.kv.chunks import KvManifest, token_hash
from potluck.kv.fetch import GroupFetch
from potluck.kv.frames import ChunkPiece, Hello, TransferOpening, frame
from potluck.kv.handles import bound_to, new_handle, new_session
from potluck.kv.kv_sender import KvSender, SenderLimits
from potluck.perf.memory import kv_bytes
from potluck.perf.transfer import crossing_bytes

TOKENS, OUTPUT = prompt(90), 10
QUICK = RequestLimits(handover_s=2.0, attach_s=0.3, lease_s=0.3, deadline_s=20.0)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return harness("hybrid").answer(TOKENS, OUTPUT)


@pytest.fixture(params=["in the loop", "beside it"])
def _where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the thread that receives a chunk writes it, too."""
    made = IncomingHandover.__init__

    def beside(self: IncomingHandover, *args: Any) -> None:
        made(self, *args)
        self.beside = request.param == "beside it"

    monkeypatch.setattr(IncomingHandover, "__init__", beside)


async def test_transfer_handle_is_valid_for_one_request_only() -> None:
    async with (
        engine_client(make_service(limits=RequestLimits(attach_s=0.3))) as one,
        engine_client(make_service()) as two,
    ):
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


def fetch_thread_count() -> int:
    return sum(thread.name.startswith("kv-in") for thread in threading.enumerate())


@pytest.mark.usefixtures("_where")
@pytest.mark.parametrize("sends", [False, True])
async def test_disconnected_client_stops_its_kv_transfer(sends: bool) -> None:
    """A receiver whose cache never comes, or a sender whose receiver is there already: nobody waits for them."""

    async with engine_client(make_service()) as one, engine_client(make_service()) as two:
        handle = new_handle()
        source = {"kv": one.kv, "handle": handle}
        receiver = asyncio.create_task(two.segment(TOKENS, start=50, max_tokens=1, source=source))
        while not fetch_thread_count():
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
            if not fetch_thread_count():
                break
            await asyncio.sleep(0.01)
        assert not fetch_thread_count()


@pytest.mark.usefixtures("_where")
@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
async def test_kv_transfer_has_the_planned_bytes_and_is_reported_in_status(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the connections of the plan's wire, in as many bytes as planner and simulator count, states whole."""
    config = stack((LINEAR, DENSE), (FullAttention(4, 2, 64, 64), DENSE))
    monkeypatch.setitem(KINDS, "reckoned", config)
    opened: list[int] = []
    spy = lambda *args, degree, **more: opened.append(degree) or GroupFetch(*args, degree=degree, **more)  # noqa: E731
    monkeypatch.setattr(kv_connector, "GroupFetch", spy)
    wire, tokens, service = wire_of(Link("far", "near", 10.0, 0.018)), prompt(300), {"prefix_cache_bytes": 0}
    async with (
        engine_client(make_service("reckoned", **service)) as one,
        engine_client(make_service("reckoned")) as two,
    ):
        source = {"kv": one.kv, "handle": new_handle(), "connections": wire.connections}
        _, (_, body) = await asyncio.gather(
            one.segment(tokens, stop=256, handle=source["handle"], codec="raw" if codec == "fp16" else codec),
            two.segment(tokens, start=256, max_tokens=OUTPUT, source=source),
        )
        if codec == "fp16":
            assert tokens_in(body) == harness("reckoned").answer(tokens, OUTPUT)
        (_, sender), (_, receiver) = await one.get("/status"), await two.get("/status")
        assert sender["kv"] == one.kv
        (out,), (back,) = sender["links"], receiver["links"]
        wide = replace(
            config.model, kv_bits=32.0
        )  # as a CPU has numbers; the convolution's inputs have 16 more
        reckoned = crossing_bytes(wide, float(kv_bytes(wide, 256.0)), codec) + 3 * LINEAR.conv_channels * 2
        assert out["moved_bytes"] == back["moved_bytes"] == pytest.approx(reckoned, rel=0.01)
        assert opened == [wire.connections] == [6]
        assert (out["peer"], back["peer"]) == ("127.0.0.1", one.kv)


async def test_kv_is_fetched_only_from_peers_and_ports_are_not_probed() -> None:
    service = make_service("full", limits=QUICK, kv=KvSettings(fleet=(("10.9.9.9", 1234),)))
    async with engine_client(service) as one:

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
            open_at, closed_at = (f"127.0.0.1:{item.getsockname()[1]}" for item in (open_port, closed_port))
            strangers = [open_at, closed_at, one.kv, "10.1.2.3:80", "example.org:80", "10.9.9.9:1235"]
            text = [await asked(kv) for kv in strangers]
            assert {status for status, _ in text} == {403}
            assert len({body["error"]["message"] for _, body in text}) == 1
            assert text[0][1]["error"]["code"] == "not_a_peer"
            open_port.settimeout(0)
            with pytest.raises(BlockingIOError):
                open_port.accept()
            # The list is whole each time, and the same again changes nothing.
            for _ in range(2):
                status, message = await one.put("/peers", {"peers": [closed_at, closed_at, "[0:0::1]:80"]})
                assert (status, message) == (
                    200,
                    {"peers": [closed_at, "[::1]:80"], "always": ["10.9.9.9:1234"]},
                )
            assert (await one.get("/peers"))[1] == message
            assert (await asked(closed_at))[0] == 502
            assert (await asked(open_at))[0] == 403
            await one.put("/peers", {"peers": []})
            assert (await asked(closed_at))[0] == 403
        for wrong in ({"peers": ["host"]}, {"peers": "x:1"}, {"pears": []}, {}, {"peers": ["h:1"] * 4097}):
            assert (await one.put("/peers", wrong))[0] == 400
        assert (await one.get("/peers"))[1]["peers"] == []
        await one.until_idle()


def wrong_sender(damage: str, handle: str) -> tuple[KvSender, str]:
    other = harness("hybrid" if damage != "shape" else "window")
    key = other.submit(TOKENS, stop=50)
    about = other.loop.attach(key, 0, 0.0)
    other.run()
    chunks = other.chunks(key)
    fingerprint = harness("hybrid").executor.fingerprint
    bound = bound_to("r", fingerprint, about.token_hash)
    text = {
        "model": KvManifest("0" * 32, 0, 50, about.token_hash),
        "hash": KvManifest(fingerprint, 0, 50, token_hash(TOKENS[1:51])),
    }.get(damage, KvManifest(fingerprint, 0, 50, about.token_hash))

    def opened(have: int) -> KvManifest:
        if damage == "refusal":
            raise ValueError("no")
        return text

    sender = KvSender(limits=SenderLimits(attach_s=0.3))
    if damage != "unknown":
        transfer = sender.offer(handle, bound, opened, 10.0)
        for chunk in chunks[damage == "missing" :]:
            transfer.put(chunk)
        transfer.finish()
    return sender, f"127.0.0.1:{sender.address[1]}"


@contextmanager
def raw_server(answer: bytes) -> Iterator[str]:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", ["model", "hash", "shape", "missing", "noise", "cut", "refusal", "unknown", "nobody"]
)
@pytest.mark.usefixtures("_where")
def test_damaged_kv_transfer_is_refused_and_the_engine_continues(damage: str, expected: list[int]) -> None:
    async def scenario(kv: str, handle: str) -> None:
        async with engine_client(make_service(limits=QUICK, prefix_cache_bytes=0)) as one:
            source = {"kv": kv, "handle": handle}
            status, body = await one.segment(TOKENS, start=50, max_tokens=OUTPUT, source=source)
            assert status == STATUS.get(damage, 422), body
            assert body["error"]["message"].startswith("hand-over")
            assert "\n" not in body["error"]["message"]
            await one.until_idle()
            assert tokens_in((await one.segment(TOKENS, max_tokens=OUTPUT))[1]) == expected

    handle = new_handle()
    if damage in ("noise", "cut"):
        with raw_server(b"not a cache at all, but some text" if damage == "noise" else b"") as kv:
            run_async(lambda: scenario(kv, handle))
        return
    sender, kv = wrong_sender(damage, handle)
    if damage == "nobody":
        sender.close()
    run_async(lambda: scenario(kv, handle))
    sender.close()


@pytest.mark.parametrize("codec", ["int8", "int4"])
async def test_lossy_kv_is_accepted_and_never_becomes_a_prefix(codec: str, expected: list[int]) -> None:
    async with engine_client(make_service()) as one, engine_client(make_service()) as two:
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
        assert (await one.get("/status"))[1]["links"]
        status, body = await one.segment(TOKENS, max_tokens=1, codec=codec)
        assert status == 400
        assert body["error"]["message"].startswith("codec: ")
        status, _ = await one.segment(TOKENS, stop=70, codec="int3")
        assert status == 400


@pytest.mark.parametrize(("second", "status"), [("raw", 424), ("int8", 200)])
async def test_lossy_kv_is_passed_on_only_with_a_lossy_codec(second: str, status: int) -> None:
    """Else the third engine would take it for exact, and give it to others."""

    async with (
        engine_client(make_service()) as one,
        engine_client(make_service()) as two,
        engine_client(make_service()) as three,
    ):
        first, then = new_handle(), new_handle()
        answers = await asyncio.gather(
            one.segment(TOKENS, stop=40, handle=first, codec="int4"),
            two.segment(
                TOKENS, start=40, stop=70, handle=then, codec=second, source={"kv": one.kv, "handle": first}
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


LONG_TOKENS = prompt(90)
SHORT_LEASES = RequestLimits(handover_s=5.0, attach_s=0.3, lease_s=0.3, deadline_s=20.0)
KV = replace(TRIAL, sender=SenderLimits(lease_s=0.3, beat_s=0.1))


def greet_sender(engine: Client, handle: str, stop: int) -> socket.socket:
    host, _, port = engine.kv.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    bound = bound_to("r", engine.service.fingerprint, token_hash(LONG_TOKENS[:stop]))
    connection.sendall(frame(Hello(new_session(), bound, handle, 0, 1 << 20, 1 << 20, 3000)))
    return connection


def read_until(connection: socket.socket, kind: type) -> None:
    reader = FrameReader()
    while not any(isinstance(message, kind) for message, _ in reader.feed(connection.recv(1 << 16))):
        pass


async def _lines_after_receiver_death(engine: Client, after: type | None) -> list[dict[str, Any]]:
    """What a poster is told whose receiver attaches, hears so much, and is killed."""
    handle = new_handle()
    posted = asyncio.create_task(engine.segment(LONG_TOKENS, stop=50, handle=handle))
    connection = await asyncio.to_thread(greet_sender, engine, handle, 50)
    if after is not None:
        await asyncio.to_thread(read_until, connection, after)
    connection.close()
    status, lines = await posted
    assert status == 200
    return lines  # type: ignore[no-any-return]


@pytest.mark.parametrize("after", [TransferOpening, ChunkPiece])
async def test_dead_receiver_is_reported_to_the_client_of_the_sender(after: type) -> None:
    async with engine_client(make_service(limits=SHORT_LEASES, kv=KV)) as one:
        lines = await _lines_after_receiver_death(one, after)
        assert (lines[-1]["ended"], lines[-1]["code"]) == ("error", "receiver_gone")
        assert "heard of no more" in lines[-1]["problem"]
        assert lines[-1]["prompt_tokens"] == len(LONG_TOKENS)
        await one.until_idle()


async def test_queued_prefill_of_a_dead_receiver_is_not_computed() -> None:
    """It dies while the prompt still waits for its turn: the poster hears of it before that comes."""

    async with engine_client(make_service(limits=SHORT_LEASES, kv=KV, max_running=1)) as one:
        others = [
            asyncio.create_task(one.segment(LONG_TOKENS, max_tokens=400, ignore_eos=True)) for _ in range(3)
        ]
        while not (await one.get("/status"))[1]["waiting"]:
            await asyncio.sleep(0.01)
        lines = await _lines_after_receiver_death(one, TransferOpening)
        assert (lines[-1]["ended"], lines[-1]["code"]) == ("error", "receiver_gone")
        assert not any("computed" in line for line in lines)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await one.until_idle()


async def test_unfetched_cache_is_reported_to_its_client() -> None:
    async with engine_client(make_service(limits=SHORT_LEASES, kv=KV)) as one:
        _, lines = await one.segment(LONG_TOKENS, stop=50)
        assert (lines[-1]["ended"], lines[-1]["code"]) == ("error", "not_fetched")
        assert [next(iter(line)) for line in lines] == ["handle", "computed", "ended"]


async def test_failed_receiver_is_reported_and_a_successful_one_is_not() -> None:
    expected = harness("hybrid").answer(LONG_TOKENS, 3)

    async with (
        engine_client(make_service(limits=SHORT_LEASES, kv=KV)) as one,
        engine_client(make_service(kind="window", limits=SHORT_LEASES)) as other,
        engine_client(make_service(limits=SHORT_LEASES)) as two,
    ):
        for engine, ended in ((other, "error"), (two, "handed_on")):
            handle = new_handle()
            source = {"kv": one.kv, "handle": handle}
            (_, sent), (status, got) = await asyncio.gather(
                one.segment(LONG_TOKENS, stop=50, handle=handle),
                engine.segment(LONG_TOKENS, start=50, max_tokens=3, source=source),
            )
            assert sent[-1]["ended"] == ended
            if engine is two:
                assert "code" not in sent[-1]
                assert [line["token"] for line in got[:-1]] == expected
            else:  # Another model's engine is never given this cache.
                assert status == 424
                assert sent[-1]["code"] == "not_fetched"


FETCHES = 2  # That an engine has at once.
RING_OUTPUT = 3


class TransferLeg:
    """A request that is computed at one harness and answered at another."""

    def __init__(self, sender: MockLoopHarness, receiver: MockLoopHarness, tokens: Sequence[int]) -> None:
        self.sender, self.receiver = sender, receiver
        whole = len(tokens) - 1
        self.source = sender.submit(tokens, stop=whole)
        self.target = receiver.submit(tokens, RING_OUTPUT, start=whole)
        self.about: KvManifest | None = None
        self.expected = False
        self.taken = 0

    @property
    def fetched(self) -> bool:
        """Take a step of the fetch; whether it is over."""
        if self.about is None:
            have = self.receiver.have[self.target]
            self.about = self.sender.loop.attach(self.source, have, self.sender.now_s)
        sent = [event for event in self.sender.said.get(self.source, []) if isinstance(event, LayerSent)]
        if sent and not self.expected:
            self.expected = self.receiver.loop.expect(self.target, self.about) is not None
        if not self.expected:
            return False
        for event in sent[self.taken :]:
            for chunk in event.chunks:
                self.receiver.loop.accept(self.target, chunk)
        self.taken = len(sent)
        if sent[-1].last:
            self.receiver.loop.arrived(self.target)
        return sent[-1].last


def run_all(harnesses: list[MockLoopHarness], hops: list[TransferLeg]) -> bool:
    lines = {brain_loop: [hop for hop in hops if hop.receiver is brain_loop] for brain_loop in harnesses}
    still = 0
    while still < 50:
        busy = [brain_loop.turn() for brain_loop in harnesses]
        for line in lines.values():
            for hop in line[:FETCHES]:
                if hop.fetched:
                    line.remove(hop)
                    busy.append(True)
        still = 0 if any(busy) else still + 1
    return not any(lines.values()) and all(brain_loop.loop.idle for brain_loop in harnesses)


def harnesses_of(count: int, **fields: int) -> list[MockLoopHarness]:
    return [MockLoopHarness(**fields) for _ in range(count)]  # type: ignore[arg-type]


def host_copied_legs(brain_loop: MockLoopHarness, hops: list[TransferLeg]) -> list[TransferLeg]:
    """Those whose chunks went out, though nobody came."""
    return [
        hop
        for hop in hops
        if any(isinstance(event, LayerSent) for event in brain_loop.said.get(hop.source, ()))
    ]


def test_ring_of_transfers_fetched_in_reverse_order_completes() -> None:
    """Those that are fetched first are computed last: they wait for rows of caches that nobody fetches yet."""
    harnesses = harnesses_of(3)
    hops = [
        TransferLeg(harnesses[place % 3], harnesses[(place + 1) % 3], prompt(40 + place, seed=place))
        for place in range(45)
    ]
    assert run_all(harnesses, hops[::-1])
    assert all(hop.receiver.end(hop.target).reason == "length" for hop in hops)
    for brain_loop in harnesses:
        brain_loop.loop.check()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=60),
    st.integers(0, 1 << 16),
    st.sampled_from([20, 60, 1000]),
)
def test_random_transfers_between_engines_all_complete(
    pairs: list[tuple[int, int]], seed: int, blocks: int
) -> None:
    chance, harnesses = Random(seed), harnesses_of(4, blocks=blocks)
    hops = [
        TransferLeg(
            harnesses[first], harnesses[(first + step) % 4], prompt(chance.randint(20, 250), seed=place)
        )
        for place, (first, step) in enumerate(pairs)
    ]
    chance.shuffle(hops)
    assert run_all(harnesses, hops)
    assert all(hop.receiver.end(hop.target).reason == "length" for hop in hops)
    for brain_loop in harnesses:
        brain_loop.loop.check()


def test_unfetched_cache_leaves_its_row_only_when_another_request_waits() -> None:
    sender, receiver = harnesses_of(2)
    hops = [TransferLeg(sender, receiver, prompt(100, seed=place)) for place in range(3)]
    sender.run()
    assert host_copied_legs(sender, hops) == []
    sender.now_s += 61.0
    sender.turn()
    assert sender.end(hops[0].source).code == NOT_FETCHED
    more = [TransferLeg(sender, receiver, prompt(100, seed=10 + place)) for place in range(9)]
    sender.run()
    gone = host_copied_legs(sender, more)
    assert len(gone) >= len(more) - 3
    about = sender.loop.attach(gone[0].source, 16, sender.now_s)
    assert (about.start, about.stop) == (0, 99)
    with pytest.raises(InputError, match="handle"):
        sender.loop.attach(gone[0].source, 16, sender.now_s)


def test_host_copies_of_unfetched_caches_are_bounded() -> None:
    sender, receiver = harnesses_of(2)
    sender.loop.host_kv.max_bytes = 1
    hops = [TransferLeg(sender, receiver, prompt(100, seed=place)) for place in range(9)]
    sender.run()
    gone = host_copied_legs(sender, hops)
    assert len(gone) == 1  # the bound is asked before the next one
    sender.loop.host_kv.take(gone[0].source)
    sender.run()
    assert len(host_copied_legs(sender, hops)) == 2


async def test_ring_of_engines_over_http_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three engines with a few rows and fewer fetches at once; who is fetched first is computed last."""
    monkeypatch.setattr(kv_connector, "MOST_AT_ONCE", 2)

    async with AsyncExitStack() as stack:
        ring = [
            await stack.enter_async_context(
                engine_client(mock_service(max_running=4, handover_rows=4, prefix_cache_bytes=0))
            )
            for _ in range(3)
        ]
        computed, answered = [], []
        for place in range(24):
            first, second = ring[place % 3], ring[(place + 1) % 3]
            tokens, handle, name = prompt(60, seed=place), new_handle(), f"r{place}"
            computed.append(first.segment(tokens, request=name, stop=59, handle=handle))
            source = {"kv": first.kv, "handle": handle}
            answered.append(
                second.segment(tokens, request=name, start=59, max_tokens=4, ignore_eos=True, source=source)
            )
        replies = await asyncio.gather(*computed, *reversed(answered))
        assert {status for status, _ in replies} == {200}
        assert all(lines[-1]["ended"] == "handed_on" for _, lines in replies[:24])
        assert all(len(tokens_in(lines)) == 4 for _, lines in replies[24:])
        for engine in ring:
            await engine.until_idle()


async def test_full_send_queue_does_not_block_requests_that_have_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The receiver has room for one; the sender has memory for two, and fewer threads than caches to send."""
    monkeypatch.setattr(kv_connector, "MOST_AT_ONCE", 12)
    limits, kv = (
        RequestLimits(handover_s=60.0, attach_s=60.0),
        replace(TRIAL, sender=SenderLimits(most_bytes=40_000)),
    )
    sender = make_service("full", limits, kv=kv, prefix_cache_bytes=0, chunk_tokens=64, handover_rows=24)
    window = replace(TRIAL, links=replace(TRIAL.links, window_bytes=20_000))
    receiver = make_service("full", limits, kv=window, handover_rows=2, prefix_cache_bytes=0)
    async with engine_client(sender) as one, engine_client(receiver) as two:
        one.service.connector._puts._max_workers = 2
        asked = []
        for place in range(10):
            tokens, name = prompt(100 if place else 450, seed=place), f"r{place}"
            cut, source = len(tokens) - 1, {"kv": one.kv, "handle": new_handle()}
            asked.append(one.segment(tokens, request=name, stop=cut, handle=source["handle"]))
            asked.append(two.segment(tokens, request=name, start=cut, max_tokens=4, source=source))
        replies = await asyncio.gather(*asked)
        assert [body for status, body in replies if status != 200] == []
        assert tokens_in(replies[1][1]) == harness("full").answer(prompt(450, seed=0), 4)
