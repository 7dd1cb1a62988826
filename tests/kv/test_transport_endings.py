"""How a hand-over ends for whoever is killed, stands still, or runs where the kernel offers less."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kv_kit import FINGERPRINT, REQUEST, SMALL_LINKS, TOKENS_HASH, ends, made, plain

import potluck
from potluck.core.errors import InputError
from potluck.kv import checksum, kv_connection, peer_connections, shared_memory
from potluck.kv.chunks import TransferError
from potluck.kv.fetch import FetchRequest, fetch
from potluck.kv.handles import new_handle
from potluck.kv.peer_connections import LinkLimits, PeerConnections

PARCELS = made(3, 8)
RIGHT = {parcel.layer: plain(parcel) for parcel in PARCELS}
SLACK_S = 2.5


# Processes that are killed, and that stand still.

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
from kv_kit import ABOUT, BOUND, SMALL
from potluck.kv.kv_sender import KvSender
sender = KvSender(limits=SMALL)
sender.offer(sys.argv[1], BOUND, lambda have: ABOUT, 60.0)
print(sender.address[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def child(code: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and the first line that it says."""
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


def test_memory_of_a_killed_receiver_is_swept_and_of_a_living_one_is_not() -> None:
    mine = shared_memory.create(2, 4096)
    if mine is None:
        pytest.skip("no shared memory here")
    with child(OWNER, str(shared_memory.FOLDER)) as (process, name):
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


def test_long_lived_receivers_sweep_too_and_others_files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    if not shared_memory.FOLDER.is_dir():
        pytest.skip("no shared memory here")
    links = PeerConnections([], limits=SMALL_LINKS)
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
    slots = links.share()
    assert slots is not None
    assert not left.exists()
    assert link.is_symlink()
    link.unlink()
    slots.close()
    links.close()


def test_a_sender_that_stands_still_is_noticed_in_time() -> None:
    handle = new_handle()
    with child(SENDER, handle) as (process, port):
        address = ("127.0.0.1", int(port))
        links = PeerConnections([address], limits=SMALL_LINKS, shared_memory=False)
        stopped: list[float] = []

        def stop() -> None:
            process.send_signal(signal.SIGSTOP)
            stopped.append(time.monotonic())

        timer = threading.Timer(0.5, stop)
        timer.start()
        wanted = FetchRequest(handle, REQUEST, FINGERPRINT, TOKENS_HASH)
        with pytest.raises(TransferError, match="the sender said nothing for 1 s"):
            fetch(links, address, wanted, lambda _: None, lambda _: None, degree=2, deadline_s=60.0)
        assert time.monotonic() - stopped[0] < SMALL_LINKS.silence_s + SLACK_S
        timer.join()
        links.close()


def test_a_lone_connection_that_says_nothing_is_replaced_before_the_fetch_is_given_up() -> None:
    def harm(connection: int, went: int, data: bytes) -> bytes:
        return b"" if connection == 0 else data  # What the first one says is lost, all of it.

    with ends(harm=harm) as pair:
        handle, _ = pair.send(PARCELS)
        fetched, got = pair.fetch(handle, degree=1)
        assert got == RIGHT
        assert fetched.lost_connections == 1
    with pytest.raises(InputError, match="stall_s"):
        LinkLimits(stall_s=5.0, silence_s=5.0)


# Where the kernel offers less.


@pytest.mark.parametrize("degree", [1, 3])
def test_nothing_is_needed_that_only_linux_has(
    degree: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "nowhere")
    monkeypatch.setattr(peer_connections, "TCP_INFO", None)
    monkeypatch.setattr(checksum, "NATIVE", False)
    monkeypatch.setattr(kv_connection, "_DONTWAIT", 0)
    monkeypatch.setattr(kv_connection, "_WAITALL", 0)
    monkeypatch.setattr(kv_connection, "_USER_TIMEOUT", None)
    with ends(shared_memory=True) as pair:
        handle, transfer = pair.send(PARCELS)
        fetched, got = pair.fetch(handle, degree=degree)
        assert got == RIGHT
        assert not fetched.shared_memory
        assert transfer.wait(30) == "fetched"
        assert all(link.rtt_s == 0.0 for link in (*pair.sender.links(), *pair.links.reports()))
    monkeypatch.undo()
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert shared_memory.create(2, 4096) is None
