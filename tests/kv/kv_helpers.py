"""What the tests of the transport share: chunks of every kind, a pair of ends, a proxy that does harm."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from potluck.core.errors import FormatError
from potluck.kv import shared_memory
from potluck.kv.chunks import KvChunk, KvManifest
from potluck.kv.codec_layout import sizes
from potluck.kv.fetch import FetchRequest, FetchResult, KvFetch
from potluck.kv.frames import PREFIX, Message, read_head, read_prefix
from potluck.kv.handles import bound_to, new_handle
from potluck.kv.kv_sender import KvSender, OutgoingTransfer, SenderLimits
from potluck.kv.peer_connections import LinkLimits, PeerConnections

FINGERPRINT, TOKENS_HASH, REQUEST = "0123456789abcdef" * 2, "5a" * 32, "r-1"
ABOUT = KvManifest(FINGERPRINT, 0, 33, TOKENS_HASH)
BOUND = bound_to(REQUEST, FINGERPRINT, TOKENS_HASH)

SMALL = SenderLimits(
    piece_bytes=4096,
    most_bytes=1 << 24,
    hello_s=0.5,
    attach_s=1.0,
    silence_s=0.5,
    beat_s=0.1,
    lease_s=0.6,
    most_unacked=8,
    idle_s=2.0,
)
SMALL_LINKS = LinkLimits(
    window_bytes=1 << 17, piece_bytes=4096, keep_bytes=1 << 18, connect_s=0.5, stall_s=0.5, silence_s=1.0
)


def sample_chunks(seed: int = 0, layers: int = 6) -> list[KvChunk]:
    """Chunks of all parts, of sizes on and off the grid of pieces, one of them empty."""
    draw = random.Random(seed)
    kv_chunks = []
    shapes = [("kv", (33, 2, 4, 16)), ("latent", (33, 1, 24)), ("conv", (3, 40)), ("memory", (4, 16, 16))]
    for layer in range(layers):
        part, shape = shapes[layer % len(shapes)]
        dtype = ("float32", "bfloat16", "float16")[layer % 3]
        codec = {1: "int8", 4: "int4", 5: "int4"}.get(layer % 8, "raw")
        size = sizes(part, dtype, shape, codec)  # type: ignore[arg-type]
        kv_chunks.append(
            KvChunk(
                layer,
                part,  # type: ignore[arg-type]
                0,
                33,
                dtype,
                shape,
                draw.randbytes(size.payload_bytes),
                codec,  # type: ignore[arg-type]
                draw.randbytes(size.parameter_bytes),
            )
        )
    kv_chunks.append(KvChunk(layers, "kv", 33, 33, "float16", (0, 2, 4, 16), b""))
    return kv_chunks


def chunk_value(chunk: KvChunk) -> tuple[object, ...]:
    """A chunk's value, with its bytes taken out of the buffer."""
    return (
        *(chunk.layer, chunk.part, chunk.first, chunk.stop, chunk.dtype, chunk.shape, chunk.codec),
        bytes(chunk.parameters),
        bytes(chunk.data),
    )


@dataclass
class TransferEnds:
    sender: KvSender
    links: PeerConnections
    address: tuple[str, int]
    made: list[KvChunk] = field(default_factory=list)

    def offer(self, lasts_s: float = 10.0, manifest: KvManifest = ABOUT) -> tuple[str, OutgoingTransfer]:
        handle = new_handle()
        return handle, self.sender.offer(handle, BOUND, lambda have: manifest, lasts_s)

    def send(self, chunks: list[KvChunk], lasts_s: float = 10.0) -> tuple[str, OutgoingTransfer]:
        handle, transfer = self.offer(lasts_s)
        for chunk in chunks:
            transfer.put(chunk)
        transfer.finish()
        return handle, transfer

    def fetch(
        self,
        handle: str,
        sink: Callable[[KvChunk], None] | None = None,
        *,
        degree: int = 3,
        deadline_s: float = 5.0,
        request: str = REQUEST,
    ) -> tuple[FetchResult, dict[int, tuple[object, ...]]]:
        got: dict[int, tuple[object, ...]] = {}

        def keep(chunk: KvChunk) -> None:
            assert chunk.layer not in got
            got[chunk.layer] = chunk_value(chunk)
            if sink is not None:
                sink(chunk)

        fetch_request = FetchRequest(handle, request, FINGERPRINT, TOKENS_HASH)
        kv_manifests: list[KvManifest] = []
        more = {"degree": degree, "deadline_s": deadline_s}
        fetched = fetch(self.links, self.address, fetch_request, kv_manifests.append, keep, **more)
        assert kv_manifests == [ABOUT]
        return fetched, got


def fetch(
    peer_connections: PeerConnections,
    address: tuple[str, int],
    fetch_request: FetchRequest,
    opened: Callable[[KvManifest], None],
    sink: Callable[[KvChunk], None],
    **more: Any,
) -> FetchResult:
    return KvFetch(peer_connections, address, fetch_request, **more).run(opened, sink)


@contextlib.contextmanager
def transfer_ends(
    limits: SenderLimits = SMALL,
    link_limits: LinkLimits = SMALL_LINKS,
    shared_memory: bool = False,
    harm: Harm | None = None,
    answer_harm: Harm | None = None,
) -> Iterator[TransferEnds]:
    """A sender and links to it, and afterwards the proof that nothing is left of them."""
    fds, threads, files = _fds(), threading.active_count(), _shared_files()
    sender = KvSender(limits=limits, shared_memory=shared_memory)
    proxy = Proxy(sender.address, harm, answer_harm) if harm or answer_harm else None
    address = proxy.address if proxy else sender.address
    peer_connections = PeerConnections([address], limits=link_limits, shared_memory=shared_memory)
    pair = TransferEnds(sender, peer_connections, address)
    try:
        yield pair
    finally:
        peer_connections.close()
        sender.close()
        if proxy is not None:
            proxy.close()
    assert sender.held_bytes == 0
    assert peer_connections.buffers.out_bytes == 0
    # Threads that were told to end close what they have a moment later.
    assert wait_until(lambda: threading.active_count() <= threads)
    assert wait_until(lambda: _fds() <= fds)
    assert wait_until(lambda: _shared_files() <= files)


def _fds() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def _shared_files() -> int:
    return len(list(shared_memory.FOLDER.glob("potluck-kv-*")))


Harm = Callable[[int, int, bytes], bytes | None]
"""Told the connection's number, how many bytes went before, and the next ones: what goes on. None cuts it."""


class Proxy:
    """Between receiver and sender; does harm to what the sender says, and to what the receiver answers."""

    def __init__(self, target: tuple[str, int], harm: Harm | None, answer_harm: Harm | None = None) -> None:
        self._target, self._harm, self._answer_harm = target, harm, answer_harm
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self.connections = 0
        self._run(self._accept)

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        self._listener.settimeout(0.05)
        while not self._closed.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            near.settimeout(None)
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            number, self.connections = self.connections, self.connections + 1
            self._run(self._pump, near, far, self._answer_harm, number)
            self._run(self._pump, far, near, self._harm, number)

    def _pump(self, source: socket.socket, target: socket.socket, harm: Harm | None, number: int) -> None:
        went = 0
        try:
            while data := source.recv(1 << 14):
                passed = data if harm is None else harm(number, went, data)
                if passed is None:
                    break
                went += len(data)
                target.sendall(passed)
        except OSError:
            pass  # The other direction, or the test's end, closed it.
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed.set()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in [*self._sockets, self._listener]:
            one.close()


def wait_until(what: Callable[[], bool], most_s: float = 60.0) -> bool:
    end_s = time.monotonic() + most_s
    while not what():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


class FrameReader:
    """Bytes in, messages out, each with its data."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[Message, bytes]]:
        self._buffer += data
        result: list[tuple[Message, bytes]] = []
        while len(self._buffer) >= PREFIX.size:
            raw = bytes(self._buffer[: PREFIX.size])
            prefix = read_prefix(raw)
            body = PREFIX.size + prefix.head_bytes
            if len(self._buffer) < body:
                break
            message = read_head(raw, prefix, bytes(self._buffer[PREFIX.size : body]))
            if len(self._buffer) < body + prefix.data_bytes:
                break
            result.append((message, bytes(self._buffer[body : body + prefix.data_bytes])))
            del self._buffer[: body + prefix.data_bytes]
        return result

    def close(self) -> None:
        """The stream has ended: it must not do so within a frame."""
        if self._buffer:
            raise FormatError("hand-over", "was cut short")
