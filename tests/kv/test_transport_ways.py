"""Other ways for the same protocol: shared memory within a machine, TLS between sites."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from kv_kit import ABOUT, BOUND, FINGERPRINT, REQUEST, SMALL, SMALL_LINKS, TOKENS_HASH, made, plain

from potluck.core.errors import InputError
from potluck.kv import shared_memory
from potluck.kv.chunks import TransferError
from potluck.kv.fetch import FetchRequest, fetch
from potluck.kv.frames import SharedMemoryOffer
from potluck.kv.handles import new_handle
from potluck.kv.kv_sender import KvSender
from potluck.kv.peer_connections import PeerConnections, client_context, server_context

# Shared memory.


def test_shared_memory_is_only_used_by_who_can_prove_to_see_it() -> None:
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


def test_if_one_side_will_not_share_the_network_is_used() -> None:
    sender = KvSender(limits=SMALL, shared_memory=False)
    links = PeerConnections([sender.address], limits=SMALL_LINKS, shared_memory=True)
    try:
        handle = new_handle()
        transfer = sender.offer(handle, BOUND, lambda have: ABOUT, 5.0)
        transfer.put(made()[0])
        transfer.finish()
        wanted = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH)
        fetched = fetch(links, sender.address, wanted, lambda _: None, lambda _: None)
        assert (fetched.parcels, fetched.shared_memory) == (1, False)
    finally:
        links.close()
        sender.close()


# TLS.


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


def secured(folder: Path, server: str, client: str) -> tuple[KvSender, PeerConnections]:
    def of(name: str, make: type[ssl.SSLContext] | object) -> ssl.SSLContext:
        chosen = server_context if make == "server" else client_context
        return chosen(folder / f"{name}.pem", folder / f"{name}.key", folder / "fleet.pem")

    sender = KvSender(limits=SMALL, tls=of(server, "server"))
    return sender, PeerConnections([sender.address], limits=SMALL_LINKS, tls=of(client, "client"))


def test_tls_carries_the_same_protocol(certificates: Path) -> None:
    sender, links = secured(certificates, "fleet", "fleet")
    parcels = made(4, 9)
    try:
        for _ in range(2):
            handle = new_handle()
            transfer = sender.offer(handle, BOUND, lambda have: ABOUT, 5.0)
            for parcel in parcels:
                transfer.put(parcel)
            transfer.finish()
            got: dict[int, tuple[object, ...]] = {}
            wanted = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH)
            fetched = fetch(
                links,
                sender.address,
                wanted,
                lambda _: None,
                lambda parcel, got=got: got.__setitem__(parcel.layer, plain(parcel)),  # type: ignore[misc]
                degree=2,
            )
            assert got == {parcel.layer: plain(parcel) for parcel in parcels}
            assert fetched.lost_connections == 0
            assert not fetched.shared_memory
    finally:
        links.close()
        sender.close()


@pytest.mark.parametrize(("server", "client"), [("stranger", "fleet"), ("fleet", "stranger")])
def test_tls_refuses_strangers_on_either_side(certificates: Path, server: str, client: str) -> None:
    sender, links = secured(certificates, server, client)
    try:
        handle = new_handle()
        sender.offer(handle, BOUND, lambda have: ABOUT, 5.0).finish()
        wanted = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH)
        with pytest.raises(TransferError, match="lost"):
            fetch(links, sender.address, wanted, lambda _: None, lambda _: None, degree=1, deadline_s=3.0)
    finally:
        links.close()
        sender.close()


def test_bad_certificate_files_are_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tls"):
        server_context(tmp_path / "a", tmp_path / "b", tmp_path / "c")


def test_shared_memory_is_bounded_and_what_is_closed_counts_no_more() -> None:
    limits = replace(SMALL_LINKS, shared_bytes=3 * SMALL_LINKS.slots * SMALL_LINKS.chunk_bytes)
    links = PeerConnections([], limits=limits)
    made = [links.share() for _ in range(4)]
    try:
        assert [each is not None for each in made] == [True, True, True, False]
        assert made[0] is not None
        made[0].close()
        made.append(links.share())
        assert made[-1] is not None
    finally:
        for each in made:
            if each is not None and not each.closed:
                each.close()
        links.close()
