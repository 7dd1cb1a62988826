"""An outbox and a fetch over real sockets, when nothing goes wrong; faults have a file of their own."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from kv_kit import (
    ABOUT,
    BOUND,
    FINGERPRINT,
    REQUEST,
    SMALL,
    SMALL_LINKS,
    TOKENS_HASH,
    ends,
    made,
    plain,
    until,
)

from potluck.core.errors import CapacityError, FormatError, InputError
from potluck.kv.chunks import KvChunk, KvManifest, TransferError
from potluck.kv.fetch import FetchRequest, KvFetch, fetch
from potluck.kv.handles import new_handle
from potluck.kv.kv_sender import KvSender
from potluck.kv.peer_connections import PeerConnections


@pytest.mark.parametrize("degree", [1, 2, 5])
@pytest.mark.parametrize("shared", [False, True])
def test_every_parcel_comes_as_it_was_put(degree: int, shared: bool) -> None:
    parcels = made(1, 9)
    with ends(shared_memory=shared) as pair:
        for _ in range(3):  # Connections, buffers and shared memory are used again.
            handle, transfer = pair.send(parcels)
            fetched, got = pair.fetch(handle, degree=degree)
            assert got == {parcel.layer: plain(parcel) for parcel in parcels}
            assert (fetched.manifest, fetched.lost_connections) == (ABOUT, 0)
            assert fetched.shared_memory == shared
            assert fetched.moved_bytes == sum(len(p.data) + len(p.parameters) for p in parcels)
            assert transfer.wait(30) == "fetched"
            assert pair.sender.held_bytes == 0
        assert until(lambda: pair.sender.connections <= degree)


def test_a_receiver_may_come_before_its_sender_and_gets_each_layer_as_it_is_made() -> None:
    parcels = made(2, 6)
    handle, came, opened = new_handle(), threading.Event(), threading.Event()
    with ends() as pair:

        def send() -> None:
            time.sleep(0.25)  # More than a beat.

            def open_up(have: int) -> KvManifest:
                opened.set()
                return ABOUT

            transfer = pair.sender.offer(handle, BOUND, open_up, 5.0)
            assert opened.wait(30)
            for parcel in parcels:
                transfer.put(parcel)
                assert came.wait(30)
                came.clear()
            transfer.finish()

        sender = threading.Thread(target=send)
        sender.start()
        _, got = pair.fetch(handle, lambda _: came.set())
        sender.join()
        assert got == {parcel.layer: plain(parcel) for parcel in parcels}


def test_a_sender_may_take_longer_than_anybodys_patience_for_silence() -> None:
    with ends() as pair:
        handle, transfer = pair.offer()

        def send() -> None:
            time.sleep(2 * SMALL.lease_s)
            transfer.put(made()[0])
            transfer.finish()

        sender = threading.Thread(target=send)
        sender.start()
        fetched, _ = pair.fetch(handle)
        sender.join()
        assert (fetched.parcels, fetched.lost_connections) == (1, 0)


def test_an_engine_may_think_longer_than_that_and_others_may_be_busy_meanwhile() -> None:
    with ends() as pair:
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
        assert (fetched.parcels, fetched.lost_connections) == (0, 0)


def test_the_sender_learns_what_the_receiver_has() -> None:
    heard: list[int] = []
    with ends() as pair:
        handle = new_handle()

        def opened(have: int) -> KvManifest:
            heard.append(have)
            return replace(ABOUT, start=have)

        pair.sender.offer(handle, BOUND, opened, 5.0).finish()
        wanted = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH, have=17)
        about: list[KvManifest] = []
        fetch(pair.links, pair.address, wanted, about.append, lambda _: None, degree=3)
        assert heard == [17]
        assert about == [replace(ABOUT, start=17)]


def test_a_slow_sink_holds_the_sender_back() -> None:
    """The window is kept: no more than it is ever in the receiver's memory, however fast the sender is."""
    parcels = [replace(made(n, 1)[0], layer=n) for n in range(24)]
    size = len(parcels[0].data)
    limits = replace(SMALL_LINKS, window_bytes=3 * size)
    most = 0
    with ends(link_limits=limits) as pair:

        def sink(_: KvChunk) -> None:
            nonlocal most
            time.sleep(0.005)
            most = max(most, pair.links.buffers.out_bytes)

        handle, _ = pair.send(parcels)
        _, got = pair.fetch(handle, sink)
        assert len(got) == 24
        assert size <= most <= 3 * size


def test_the_outbox_is_bounded_and_put_waits_for_room() -> None:
    parcel = made()[0]
    size = len(parcel.data)
    with ends(limits=replace(SMALL, most_bytes=2 * size)) as pair:
        handle, transfer = pair.offer()
        transfer.put(parcel)
        transfer.put(replace(parcel, layer=1))
        with pytest.raises(CapacityError, match="no room"):
            transfer.put(replace(parcel, layer=2))

        def rest() -> None:
            transfer.put(replace(parcel, layer=2), wait_s=5.0)
            transfer.finish()

        thread = threading.Thread(target=rest)
        thread.start()
        _, got = pair.fetch(handle)
        thread.join()
        assert sorted(got) == [0, 1, 2]


def test_many_fetches_at_once_keep_to_themselves() -> None:
    problems: list[Exception] = []
    with ends() as pair:

        def one(seed: int) -> None:
            parcels = made(seed, 5)
            try:
                handle, _ = pair.send(parcels)
                _, got = pair.fetch(handle, degree=2)
                assert got == {parcel.layer: plain(parcel) for parcel in parcels}
            except Exception as error:
                problems.append(error)

        threads = [threading.Thread(target=one, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []


def test_links_are_reported_on() -> None:
    parcels = made(1, 9)
    moved = sum(len(p.data) + len(p.parameters) for p in parcels)
    with ends() as pair:
        handle, _ = pair.send(parcels)
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


def test_it_listens_on_loopback_and_connects_only_to_its_fleet() -> None:
    with ends() as pair:
        assert pair.sender.address[0] == "127.0.0.1"
        wanted = FetchRequest(new_handle(), REQUEST, FINGERPRINT, TOKENS_HASH)
        for stranger in (("127.0.0.1", 1), ("localhost", pair.address[1]), ("10.0.0.1", 80)):
            with pytest.raises(InputError, match="not an address of this fleet"):
                fetch(pair.links, stranger, wanted, lambda _: None, lambda _: None)
        pair.links.allow([])
        with pytest.raises(InputError, match="not an address of this fleet"):
            fetch(pair.links, pair.address, wanted, lambda _: None, lambda _: None)


def test_idle_connections_are_closed_and_dead_ones_not_used() -> None:
    with ends(link_limits=replace(SMALL_LINKS, idle_s=0.2), limits=replace(SMALL, idle_s=0.1)) as pair:
        for pause_s in (0.0, 0.15, 0.3):
            handle, _ = pair.send(made())
            fetched, _ = pair.fetch(handle, degree=2)
            assert fetched.lost_connections == 0
            time.sleep(pause_s)
        assert until(lambda: pair.sender.connections == 0)


def test_it_speaks_ipv6_too() -> None:
    try:
        sender = KvSender("::1", limits=SMALL)
    except OSError:
        pytest.skip("no IPv6 here")
    links = PeerConnections([sender.address], limits=SMALL_LINKS)
    handle = new_handle()
    sender.offer(handle, BOUND, lambda have: ABOUT, 5.0).finish()
    wanted = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH)
    assert fetch(links, sender.address, wanted, lambda _: None, lambda _: None).parcels == 0
    links.close()
    sender.close()


def test_a_fleet_may_name_hosts() -> None:
    links = PeerConnections([("10.0.0.7", 0)])
    assert links.checked(("10.0.0.7", 4711)) == ("10.0.0.7", 4711)
    with pytest.raises(InputError):
        links.checked(("10.0.0.8", 4711))


def test_a_fetch_can_be_cancelled_and_an_offer_withdrawn() -> None:
    with ends() as pair:
        handle, transfer = pair.offer()
        wanted = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH)
        fetching = KvFetch(pair.links, pair.address, wanted, degree=2)
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


def test_a_degree_beyond_the_limit_is_refused() -> None:
    with ends() as pair:
        for degree in (0, 17):
            with pytest.raises(InputError, match="degree"):
                pair.fetch(new_handle(), degree=degree)


def test_a_sender_that_fails_says_why() -> None:
    with ends() as pair:
        handle, transfer = pair.offer()
        transfer.put(made()[0])
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


def test_a_sink_that_raises_ends_the_fetch_and_later_the_shipment() -> None:
    with ends() as pair:
        handle, transfer = pair.send(made(1, 9))

        def sink(parcel: KvChunk) -> None:
            raise InputError("row", "was closed")

        with pytest.raises(InputError, match="was closed"):
            pair.fetch(handle, sink)
        assert transfer.wait(30) == "gone"
        assert until(lambda: pair.sender.transfers == 0)


def test_a_cache_of_other_tokens_or_another_model_is_not_taken() -> None:
    for about in (
        replace(ABOUT, fingerprint="x" * 32),
        replace(ABOUT, token_hash="00" * 32),
        replace(ABOUT, start=1),
    ):
        with ends() as pair:
            handle, transfer = pair.offer(about=about)
            transfer.finish()
            with pytest.raises(FormatError, match=r"another model|behind"):
                pair.fetch(handle)
