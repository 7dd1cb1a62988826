"""A sender and a fetch over real sockets, when nothing goes wrong; faults have a file of their own."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from kv_helpers import (
    ABOUT,
    BOUND,
    FINGERPRINT,
    REQUEST,
    SMALL,
    SMALL_LINKS,
    TOKENS_HASH,
    chunk_value,
    fetch,
    sample_chunks,
    transfer_ends,
    wait_until,
)

import potluck
from potluck.core.errors import CapacityError, FormatError, InputError
from potluck.kv import checksum, kv_connection, peer_connections, shared_memory
from potluck.kv.chunks import KvChunk, KvManifest, TransferError
from potluck.kv.fetch import FetchRequest, KvFetch
from potluck.kv.frames import SharedMemoryOffer
from potluck.kv.handles import new_handle
from potluck.kv.kv_sender import KvSender
from potluck.kv.peer_connections import LinkLimits, PeerConnections, client_context, server_context


@pytest.mark.parametrize("degree", [1, 2, 5])
@pytest.mark.parametrize("shared", [False, True])
def test_every_chunk_arrives_unchanged(degree: int, shared: bool) -> None:
    chunks = sample_chunks(1, 9)
    with transfer_ends(shared_memory=shared) as pair:
        for _ in range(3):  # Connections, buffers and shared memory are used again.
            handle, transfer = pair.send(chunks)
            fetched, got = pair.fetch(handle, degree=degree)
            assert got == {chunk.layer: chunk_value(chunk) for chunk in chunks}
            assert (fetched.manifest, fetched.lost_connections) == (ABOUT, 0)
            assert fetched.shared_memory == shared
            assert fetched.moved_bytes == sum(len(p.data) + len(p.parameters) for p in chunks)
            assert transfer.wait(30) == "fetched"
            assert pair.sender.held_bytes == 0
        assert wait_until(lambda: pair.sender.connections <= degree)


def test_receiver_that_comes_before_its_sender_gets_each_layer_when_it_is_made() -> None:
    chunks = sample_chunks(2, 6)
    handle, received, opened = new_handle(), threading.Event(), threading.Event()
    with transfer_ends() as pair:

        def send() -> None:
            time.sleep(0.25)  # More than a beat.

            def open_up(have: int) -> KvManifest:
                opened.set()
                return ABOUT

            transfer = pair.sender.offer(handle, BOUND, open_up, 5.0)
            assert opened.wait(30)
            for chunk in chunks:
                transfer.put(chunk)
                assert received.wait(30)
                received.clear()
            transfer.finish()

        sender = threading.Thread(target=send)
        sender.start()
        _, got = pair.fetch(handle, lambda _: received.set())
        sender.join()
        assert got == {chunk.layer: chunk_value(chunk) for chunk in chunks}


def test_slow_sender_is_kept_alive_by_heartbeats() -> None:
    with transfer_ends() as pair:
        handle, transfer = pair.offer()

        def send() -> None:
            time.sleep(2 * SMALL.lease_s)
            transfer.put(sample_chunks()[0])
            transfer.finish()

        sender = threading.Thread(target=send)
        sender.start()
        fetched, _ = pair.fetch(handle)
        sender.join()
        assert (fetched.chunks, fetched.lost_connections) == (1, 0)


def test_slow_engine_delays_no_other_transfer_and_is_not_timed_out() -> None:
    with transfer_ends() as pair:
        handle, over = new_handle(), threading.Event()

        def opened(have: int) -> KvManifest:
            time.sleep(2 * SMALL.silence_s)
            return ABOUT

        def bustle() -> None:
            while not over.wait(0.01):
                pair.offer()[1].finish()

        other = threading.Thread(target=bustle)
        other.start()

        def offer() -> None:
            pair.sender.offer(handle, BOUND, opened, 9.0).finish()

        timer = threading.Timer(1.5 * SMALL.silence_s, offer)
        timer.start()
        try:
            fetched, _ = pair.fetch(handle)
        finally:
            over.set()
            other.join()
            timer.join()
        assert (fetched.chunks, fetched.lost_connections) == (0, 0)


def test_sender_learns_how_many_tokens_the_receiver_has() -> None:
    heard: list[int] = []
    with transfer_ends() as pair:
        handle = new_handle()

        def opened(have: int) -> KvManifest:
            heard.append(have)
            return replace(ABOUT, start=have)

        pair.sender.offer(handle, BOUND, opened, 5.0).finish()
        fetch_request = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH, have=17)
        about: list[KvManifest] = []
        fetch(pair.links, pair.address, fetch_request, about.append, lambda _: None, degree=3)
        assert heard == [17]
        assert about == [replace(ABOUT, start=17)]


def test_slow_sink_limits_bytes_in_flight_to_the_window() -> None:
    """The window is kept: no more than it is ever in the receiver's memory, however fast the sender is."""
    chunks = [replace(sample_chunks(n, 1)[0], layer=n) for n in range(24)]
    size = len(chunks[0].data)
    limits = replace(SMALL_LINKS, window_bytes=3 * size)
    most = 0
    with transfer_ends(link_limits=limits) as pair:

        def sink(_: KvChunk) -> None:
            nonlocal most
            time.sleep(0.005)
            most = max(most, pair.links.buffers.out_bytes)

        handle, _ = pair.send(chunks)
        _, got = pair.fetch(handle, sink)
        assert len(got) == 24
        assert size <= most <= 3 * size


def test_sender_memory_is_bounded_and_put_waits_for_room() -> None:
    chunk = sample_chunks()[0]
    with transfer_ends(limits=replace(SMALL, most_bytes=2 * len(chunk.data))) as pair:
        handle, transfer = pair.offer()
        transfer.put(chunk)
        transfer.put(replace(chunk, layer=1))
        with pytest.raises(CapacityError, match="no room"):
            transfer.put(replace(chunk, layer=2))

        def rest() -> None:
            transfer.put(replace(chunk, layer=2), wait_s=5.0)
            transfer.finish()

        thread = threading.Thread(target=rest)
        thread.start()
        _, got = pair.fetch(handle)
        thread.join()
        assert sorted(got) == [0, 1, 2]


def test_transfer_waiting_for_its_receiver_does_not_block_memory_of_others() -> None:
    """The row is free when the other's cache is whole: each would wait for the other."""
    chunk = sample_chunks()[0]
    with transfer_ends(limits=replace(SMALL, most_bytes=2 * len(chunk.data))) as pair:
        handle, mine = pair.offer()
        waiting, other = pair.offer()
        mine.put(chunk)
        other.put(chunk)

        def rest() -> None:
            assert wait_until(lambda: mine.parts[0].takes(1 << 40))
            other.put(replace(chunk, layer=1))
            mine.put(replace(chunk, layer=1), wait_s=5.0)
            mine.finish()
            other.finish()

        thread = threading.Thread(target=rest)
        thread.start()
        assert sorted(pair.fetch(handle)[1]) == [0, 1]
        thread.join()
        assert sorted(pair.fetch(waiting)[1]) == [0, 1]


def test_concurrent_fetches_do_not_mix() -> None:
    problems: list[Exception] = []
    with transfer_ends() as pair:

        def one(seed: int) -> None:
            chunks = sample_chunks(seed, 5)
            try:
                handle, _ = pair.send(chunks)
                _, got = pair.fetch(handle, degree=2)
                assert got == {chunk.layer: chunk_value(chunk) for chunk in chunks}
            except Exception as error:
                problems.append(error)

        threads = [threading.Thread(target=one, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []


def test_connections_of_a_link_are_reported_with_bytes_and_rtt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "potluck.kv.fetch.GRACE_S", 10.0
    )  # A busy machine would have its connections closed before.
    chunks = sample_chunks(1, 9)
    moved = sum(len(p.data) + len(p.parameters) for p in chunks)
    with transfer_ends() as pair:
        handle, _ = pair.send(chunks)
        pair.fetch(handle, degree=2)
        (incoming,) = pair.links.reports()
        assert 1 <= incoming.connections <= 2
        assert incoming.moved_bytes == moved
        assert incoming.goodput_bytes_per_s > 0
        assert incoming.rtt_s > 0
        (outgoing,) = pair.sender.links()
        assert outgoing.moved_bytes == moved
        assert outgoing.goodput_bytes_per_s > 0
        assert (outgoing.sent_again_bytes, outgoing.queue_bytes) == (0, 0)


def test_sender_listens_on_loopback_and_receiver_connects_only_to_its_fleet() -> None:
    with transfer_ends() as pair:
        assert pair.sender.address[0] == "127.0.0.1"
        fetch_request = FetchRequest(new_handle(), REQUEST, FINGERPRINT, TOKENS_HASH)
        for stranger in (("127.0.0.1", 1), ("localhost", pair.address[1]), ("10.0.0.1", 80)):
            with pytest.raises(InputError, match="not an address of this fleet"):
                fetch(pair.links, stranger, fetch_request, lambda _: None, lambda _: None)
        pair.links.allow([])
        with pytest.raises(InputError, match="not an address of this fleet"):
            fetch(pair.links, pair.address, fetch_request, lambda _: None, lambda _: None)


def test_idle_connections_are_closed_and_dead_ones_not_reused() -> None:
    with transfer_ends(
        link_limits=replace(SMALL_LINKS, idle_s=0.2), limits=replace(SMALL, idle_s=0.1)
    ) as pair:
        for pause_s in (0.0, 0.15, 0.3):
            handle, _ = pair.send(sample_chunks())
            fetched, _ = pair.fetch(handle, degree=2)
            assert fetched.lost_connections == 0
            time.sleep(pause_s)
        assert wait_until(lambda: pair.sender.connections == 0)


def test_transfer_works_over_ipv6() -> None:
    try:
        sender = KvSender("::1", limits=SMALL)
    except OSError:
        pytest.skip("no IPv6 here")
    peer_connections = PeerConnections([sender.address], limits=SMALL_LINKS)
    handle = new_handle()
    sender.offer(handle, BOUND, lambda have: ABOUT, 5.0).finish()
    fetch_request = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH)
    assert fetch(peer_connections, sender.address, fetch_request, lambda _: None, lambda _: None).chunks == 0
    peer_connections.close()
    sender.close()


def test_fleet_address_may_be_a_host_without_a_port() -> None:
    peer_connections = PeerConnections([("10.0.0.7", 0)])
    assert peer_connections.checked(("10.0.0.7", 4711)) == ("10.0.0.7", 4711)
    with pytest.raises(InputError):
        peer_connections.checked(("10.0.0.8", 4711))


def test_fetch_can_be_cancelled_and_an_offer_withdrawn() -> None:
    with transfer_ends() as pair:
        handle, transfer = pair.offer()
        fetch_request = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH)
        fetching = KvFetch(pair.links, pair.address, fetch_request, degree=2)
        timer = threading.Timer(0.2, fetching.cancel)
        timer.start()
        with pytest.raises(TransferError, match="cancelled"):
            fetching.run(lambda _: None, lambda _: None)
        timer.join()
        other, unclaimed = pair.offer()
        pair.sender.withdraw(other)
        assert unclaimed.state == "gone"
        pair.sender.withdraw(handle)
        assert transfer.state == "attached"


def test_fetch_degree_beyond_the_limit_is_refused() -> None:
    with transfer_ends() as pair:
        for degree in (0, 33):
            with pytest.raises(InputError, match="degree"):
                pair.fetch(new_handle(), degree=degree)


def test_sender_failure_reaches_the_receiver_with_its_reason() -> None:
    with transfer_ends() as pair:
        handle, transfer = pair.offer()
        transfer.put(sample_chunks()[0])
        transfer.fail("the engine ran out of blocks")
        with pytest.raises(TransferError, match="ran out of blocks"):
            pair.fetch(handle)
        handle = new_handle()

        def opened(have: int) -> KvManifest:
            raise CapacityError("no such row")

        failed = pair.sender.offer(handle, BOUND, opened, 5.0)
        with pytest.raises(TransferError, match="no such row"):
            pair.fetch(handle)
        assert failed.wait(30) == "failed"


def test_exception_in_the_sink_ends_the_fetch_and_frees_the_transfer() -> None:
    with transfer_ends() as pair:
        handle, transfer = pair.send(sample_chunks(1, 9))

        def sink(chunk: KvChunk) -> None:
            raise InputError("row", "was closed")

        with pytest.raises(InputError, match="was closed"):
            pair.fetch(handle, sink)
        assert transfer.wait(30) == "gone"
        assert wait_until(lambda: pair.sender.transfers == 0)


def test_kv_of_other_tokens_or_another_model_is_refused() -> None:
    for manifest in (
        replace(ABOUT, fingerprint="x" * 32),
        replace(ABOUT, token_hash="00" * 32),
        replace(ABOUT, start=1),
    ):
        with transfer_ends() as pair:
            handle, transfer = pair.offer(manifest=manifest)
            transfer.finish()
            with pytest.raises(FormatError, match=r"another model|behind"):
                pair.fetch(handle)


def test_shared_memory_is_used_only_after_a_proof_of_access() -> None:
    slots = shared_memory.create(2, 4096)
    if slots is None:
        pytest.skip("no shared memory here")
    try:
        joined = shared_memory.join(slots.shared, 4096)
        assert joined is not None
        joined.slot(3, 5)[:] = b"hello"
        assert bytes(slots.slot(1, 5)) == b"hello"
        joined.close()
        assert shared_memory.join(replace(slots.shared, proof=bytes(16)), 4096) is None
        assert shared_memory.join(slots.shared, 8192) is None
        assert shared_memory.join(SharedMemoryOffer(bytes(16), bytes(16), 2), 4096) is None
        path = shared_memory.FOLDER / f"potluck-kv-{slots.shared.name.hex()}"
        path.chmod(0o666)
        assert shared_memory.join(slots.shared, 4096) is None
        slots.forget_name()
        assert not path.exists()
    finally:
        slots.close()


def test_transfer_uses_the_network_if_one_side_disables_shared_memory() -> None:
    sender = KvSender(limits=SMALL, shared_memory=False)
    peer_connections = PeerConnections([sender.address], limits=SMALL_LINKS, shared_memory=True)
    try:
        handle = new_handle()
        transfer = sender.offer(handle, BOUND, lambda have: ABOUT, 5.0)
        transfer.put(sample_chunks()[0])
        transfer.finish()
        fetch_request = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH)
        fetched = fetch(peer_connections, sender.address, fetch_request, lambda _: None, lambda _: None)
        assert (fetched.chunks, fetched.shared_memory) == (1, False)
    finally:
        peer_connections.close()
        sender.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority with a certificate for 127.0.0.1, and a stranger's."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("fleet", "stranger"):
        words = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name}"
        words += f" -addext subjectAltName=IP:127.0.0.1 -keyout {name}.key -out {name}.pem"
        try:
            subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("openssl cannot make certificates here")
    return folder


def tls_ends(folder: Path, server: str, client: str) -> tuple[KvSender, PeerConnections]:
    def of(name: str, make: type[ssl.SSLContext] | object) -> ssl.SSLContext:
        chosen = server_context if make == "server" else client_context
        return chosen(folder / f"{name}.pem", folder / f"{name}.key", folder / "fleet.pem")

    sender = KvSender(limits=SMALL, tls=of(server, "server"))
    return sender, PeerConnections([sender.address], limits=SMALL_LINKS, tls=of(client, "client"))


def test_transfer_works_over_tls(certificates: Path) -> None:
    sender, peer_connections = tls_ends(certificates, "fleet", "fleet")
    chunks = sample_chunks(4, 9)
    try:
        for _ in range(2):
            handle = new_handle()
            transfer = sender.offer(handle, BOUND, lambda have: ABOUT, 5.0)
            for chunk in chunks:
                transfer.put(chunk)
            transfer.finish()
            got: dict[int, tuple[object, ...]] = {}
            fetch_request = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH)
            fetched = fetch(
                peer_connections,
                sender.address,
                fetch_request,
                lambda _: None,
                lambda chunk, got=got: got.__setitem__(chunk.layer, chunk_value(chunk)),  # type: ignore[misc]
                degree=2,
            )
            assert got == {chunk.layer: chunk_value(chunk) for chunk in chunks}
            assert fetched.lost_connections == 0
            assert not fetched.shared_memory
    finally:
        peer_connections.close()
        sender.close()


@pytest.mark.parametrize(("server", "client"), [("stranger", "fleet"), ("fleet", "stranger")])
def test_tls_refuses_unknown_certificates_on_either_side(
    certificates: Path, server: str, client: str
) -> None:
    sender, peer_connections = tls_ends(certificates, server, client)
    try:
        handle = new_handle()
        sender.offer(handle, BOUND, lambda have: ABOUT, 5.0).finish()
        fetch_request = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH)
        with pytest.raises(TransferError, match="lost"):
            fetch(
                peer_connections,
                sender.address,
                fetch_request,
                lambda _: None,
                lambda _: None,
                degree=1,
                deadline_s=3.0,
            )
    finally:
        peer_connections.close()
        sender.close()


def test_invalid_certificate_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tls"):
        server_context(tmp_path / "a", tmp_path / "b", tmp_path / "c")


def test_shared_memory_is_bounded_and_closed_segments_are_not_counted() -> None:
    limits = replace(SMALL_LINKS, shared_bytes=3 * SMALL_LINKS.slots * SMALL_LINKS.piece_bytes)
    peer_connections = PeerConnections([], limits=limits)
    made = [peer_connections.share() for _ in range(4)]
    try:
        assert [entry is not None for entry in made] == [True, True, True, False]
        assert made[0] is not None
        made[0].close()
        made.append(peer_connections.share())
        assert made[-1] is not None
    finally:
        for item in made:
            if item is not None and not item.closed:
                item.close()
        peer_connections.close()


CHUNKS = sample_chunks(3, 8)
RIGHT = {chunk.layer: chunk_value(chunk) for chunk in CHUNKS}
SLACK_S = 2.5
OWNER = """
import sys
from pathlib import Path
from potluck.kv import shared_memory
shared_memory.FOLDER = Path(sys.argv[1])
slots = shared_memory.create(2, 4096)
print(slots.shared.name.hex(), flush=True)
sys.stdin.read()
"""
SENDER = """
import sys
from kv_helpers import ABOUT, BOUND, SMALL
from potluck.kv.kv_sender import KvSender
sender = KvSender(limits=SMALL)
sender.offer(sys.argv[1], BOUND, lambda have: ABOUT, 60.0)
print(sender.address[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def child_process(code: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    paths = [str(Path(potluck.__file__).parent.parent), str(Path(__file__).parent)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def test_shared_memory_of_a_killed_receiver_is_removed() -> None:
    mine = shared_memory.create(2, 4096)
    if mine is None:
        pytest.skip("no shared memory here")
    with child_process(OWNER, str(shared_memory.FOLDER)) as (process, name):
        theirs = shared_memory.FOLDER / f"potluck-kv-{name}"
        own = shared_memory.FOLDER / f"potluck-kv-{mine.shared.name.hex()}"
        other = shared_memory.FOLDER / "potluck-other"
        other.touch()
        assert theirs.exists()
        PeerConnections([], limits=SMALL_LINKS).close()
        assert own.exists()
        assert theirs.exists()
        process.kill()
        process.wait()
        assert theirs.exists()  # The kernel ends processes, not names.
        PeerConnections([], limits=SMALL_LINKS).close()
        assert not theirs.exists()
        assert own.exists()
        assert other.exists()
        other.unlink()
    joined = shared_memory.join(mine.shared, 4096)
    assert joined is not None
    joined.close()
    mine.close()


def test_long_lived_receiver_removes_stale_shared_memory_and_no_other_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not shared_memory.FOLDER.is_dir():
        pytest.skip("no shared memory here")
    peer_connections = PeerConnections([], limits=SMALL_LINKS)
    left = shared_memory.FOLDER / f"potluck-kv-{'0' * 32}"
    left.touch(0o600)
    link = shared_memory.FOLDER / f"potluck-kv-{'1' * 32}"
    link.symlink_to(left)
    monkeypatch.setattr("potluck.kv.peer_connections.SWEEP_S", 0.0)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert shared_memory.sweep() == 0
    assert left.exists()
    monkeypatch.undo()
    monkeypatch.setattr("potluck.kv.peer_connections.SWEEP_S", 0.0)
    slots = peer_connections.share()
    assert slots is not None
    assert not left.exists()
    assert link.is_symlink()
    link.unlink()
    slots.close()
    peer_connections.close()


def test_frozen_sender_is_detected_within_the_silence_limit() -> None:
    handle = new_handle()
    with child_process(SENDER, handle) as (process, port):
        address = ("127.0.0.1", int(port))
        peer_connections = PeerConnections([address], limits=SMALL_LINKS, shared_memory=False)
        stopped: list[float] = []

        def stop() -> None:
            process.send_signal(signal.SIGSTOP)
            stopped.append(time.monotonic())

        timer = threading.Timer(0.5, stop)
        timer.start()
        fetch_request = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH)
        with pytest.raises(TransferError, match="the sender said nothing for 1 s"):
            fetch(
                peer_connections,
                address,
                fetch_request,
                lambda _: None,
                lambda _: None,
                degree=2,
                deadline_s=60.0,
            )
        assert time.monotonic() - stopped[0] < SMALL_LINKS.silence_s + SLACK_S
        timer.join()
        peer_connections.close()


def test_silent_connection_is_replaced_before_the_fetch_fails() -> None:
    def harm(connection: int, went: int, data: bytes) -> bytes:
        return b"" if connection == 0 else data  # What the first one says is lost, all of it.

    # A machine that has much to do may be late with the second one too.
    limits, link_limits = replace(SMALL, lease_s=30.0), replace(SMALL_LINKS, silence_s=30.0)
    with transfer_ends(limits, link_limits, harm=harm) as pair:
        handle, _ = pair.send(CHUNKS)
        fetched, got = pair.fetch(handle, degree=1, deadline_s=30.0)
        assert got == RIGHT
        assert fetched.lost_connections >= 1
    with pytest.raises(InputError, match="stall_s"):
        LinkLimits(stall_s=5.0, silence_s=5.0)


@pytest.mark.parametrize("degree", [1, 3])
def test_transfer_works_without_linux_specific_features(
    degree: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "nowhere")
    monkeypatch.setattr(peer_connections, "TCP_INFO", None)
    monkeypatch.setattr(checksum, "NATIVE", False)
    monkeypatch.setattr(kv_connection, "_DONTWAIT", 0)
    monkeypatch.setattr(kv_connection, "_WAITALL", 0)
    monkeypatch.setattr(kv_connection, "_USER_TIMEOUT", None)
    with transfer_ends(shared_memory=True) as pair:
        handle, transfer = pair.send(CHUNKS)
        fetched, got = pair.fetch(handle, degree=degree)
        assert got == RIGHT
        assert not fetched.shared_memory
        assert transfer.wait(30) == "fetched"
        assert all(link.rtt_s == 0.0 for link in (*pair.sender.links(), *pair.links.reports()))
    monkeypatch.undo()
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert shared_memory.create(2, 4096) is None
