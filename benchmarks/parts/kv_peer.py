"""One side of benchmarks/kv_transfer.py: a process that is told on standard input what to do, a line of JSON each.

The bare side of the comparison is here too: sockets that stay connected, whole chunks in one call, receiving into
memory that was used before, no frames, no checksums.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from potluck.kv.chunks import KvChunk, KvManifest
from potluck.kv.fetch import FetchRequest, KvFetch
from potluck.kv.handles import bound_to
from potluck.kv.kv_sender import KvSender, OutgoingTransfer
from potluck.kv.peer_connections import PeerConnections

FINGERPRINT, TOKEN_HASH, REQUEST = "f" * 32, "ab" * 32, "benchmark"
HEADS, DIM, ITEM_BYTES = 8, 128, 2
BLOCK_BYTES = 1 << 23
"""What the bare side sends and receives in one call: as large as our chunks, which is where it is fastest."""


def layer_bytes(tokens: int) -> int:
    """Of one layer of Llama 3.1 8B: keys and values of 8 heads of 128 numbers of 16 bits."""
    return tokens * 2 * HEADS * DIM * ITEM_BYTES


class Peer:
    def __init__(self, host: str, shared_memory: bool) -> None:
        self._sender = KvSender(host, shared_memory=shared_memory)
        self._links: PeerConnections | None = None
        self._shared = shared_memory
        self._host = host
        self._bare: list[socket.socket] = []
        self._memory = np.zeros(0, dtype=np.uint8)
        self._transfers: list[OutgoingTransfer] = []
        self._computed_s = 0.0

    def _room(self, size: int) -> memoryview:
        if len(self._memory) < size:
            self._memory = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        return self._memory.data[:size]

    def port(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"port": self._sender.address[1], "cpu_s": time.process_time()}

    def offer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A cache, `when` "ready" before it is asked for, "attached" once it is, or "layers" as each is computed."""
        tokens, layers, when = asked["tokens"], asked["layers"], asked["when"]
        size = layer_bytes(tokens)
        memory = self._room(size * layers)
        chunks = [
            KvChunk(n, "kv", 0, tokens, "bfloat16", (tokens, 2, HEADS, DIM), memory[n * size :][:size])
            for n in range(layers)
        ]
        begin = threading.Event()

        def opened(_have: int) -> KvManifest:
            begin.set()
            return KvManifest(FINGERPRINT, 0, tokens, TOKEN_HASH)

        bound = bound_to(REQUEST, FINGERPRINT, TOKEN_HASH)
        transfer = self._sender.offer(asked["handle"], bound, opened, 120.0)

        def fill() -> None:
            if when != "ready":
                begin.wait(60)
            start_s = time.monotonic()
            for n, chunk in enumerate(chunks, 1):
                if when in ("layers", "bulk"):
                    late_s = start_s + n * asked["layer_s"] - time.monotonic()
                    if late_s > 0:
                        time.sleep(late_s)
                if when != "bulk":
                    transfer.put(chunk)
            self._computed_s = time.monotonic()
            if when == "bulk":
                for chunk in chunks:
                    transfer.put(chunk)
            transfer.finish()

        if when == "ready":
            fill()
        else:
            threading.Thread(target=fill, daemon=True).start()
        self._transfers.append(transfer)
        return {}

    def sent(self, _: dict[str, Any]) -> dict[str, Any]:
        state = self._transfers.pop().wait(30)
        return {"state": state, "computed_s": self._computed_s, "cpu_s": time.process_time()}

    def bare_connect(self, asked: dict[str, Any]) -> dict[str, Any]:
        address = (asked["host"], asked["port"])
        return self._keep(socket.create_connection(address, timeout=20) for _ in range(asked["degree"]))

    def _keep(self, sockets: Iterable[socket.socket]) -> dict[str, Any]:
        for old in self._bare:
            old.close()
        self._bare = list(sockets)
        for new in self._bare:
            new.settimeout(None)
        return {}

    def bare_send(self, asked: dict[str, Any]) -> dict[str, Any]:
        def work(one: socket.socket, view: memoryview) -> None:
            one.recv(1)
            for at in range(0, len(view), BLOCK_BYTES):
                one.sendall(view[at : at + BLOCK_BYTES])

        self._each(work, self._room(asked["bytes"]))
        return {"cpu_s": time.process_time()}

    def fetch(self, asked: dict[str, Any]) -> dict[str, Any]:
        address = (asked["host"], asked["port"])
        if self._links is None:
            self._links = PeerConnections([address], shared_memory=self._shared)
        fetch_request = FetchRequest(asked["handle"], REQUEST, FINGERPRINT, TOKEN_HASH)
        sizes: list[int] = []
        start_s, cpu_s = time.monotonic(), time.process_time()
        fetching = KvFetch(self._links, address, fetch_request, degree=asked["degree"], deadline_s=120.0)
        fetching.run(lambda _: None, lambda chunk: sizes.append(len(chunk.data)))
        end_s = time.monotonic()
        spent_s = time.process_time() - cpu_s
        return {"wall_s": end_s - start_s, "end_s": end_s, "cpu_s": spent_s, "bytes": sum(sizes)}

    def bare_listen(self, _: dict[str, Any]) -> dict[str, Any]:
        self._listener = socket.create_server((self._host, 0), backlog=64)
        return {"port": self._listener.getsockname()[1]}

    def bare_accept(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._listener.settimeout(20)
        return self._keep(self._listener.accept()[0] for _ in range(asked["degree"]))

    def bare_receive(self, asked: dict[str, Any]) -> dict[str, Any]:
        def work(one: socket.socket, view: memoryview) -> None:
            one.send(b"!")
            at = 0
            while at < len(view):
                recv = one.recv_into(view[at : at + BLOCK_BYTES], 0, socket.MSG_WAITALL)
                if not recv:
                    raise ConnectionError("the bare sender is gone")
                at += recv

        memory = self._room(asked["bytes"])
        start_s, cpu_s = time.monotonic(), time.process_time()
        self._each(work, memory)
        return {"wall_s": time.monotonic() - start_s, "cpu_s": time.process_time() - cpu_s}

    def _each(self, work: Callable[[socket.socket, memoryview], None], memory: memoryview) -> None:
        share = len(memory) // len(self._bare)
        threads = [
            threading.Thread(target=work, args=(one, memory[n * share : (n + 1) * share]))
            for n, one in enumerate(self._bare)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main() -> int:
    peer = Peer(sys.argv[1], sys.argv[2] == "shared")
    for line in sys.stdin:
        asked = json.loads(line)
        do: Callable[[dict[str, Any]], dict[str, Any]] = getattr(peer, asked["do"])
        sys.stdout.write(json.dumps(do(asked)) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
