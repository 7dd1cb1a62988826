"""KV that comes: fetched in a thread, checked, and written into the blocks that vLLM has taken for it.

Whatever goes wrong, the request is told to have failed: vLLM computes what it does not hold itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from potluck.core.errors import FormatError, PotluckError
from potluck.kv.assembly import MissingParts
from potluck.kv.chunks import KvChunk, KvManifest, TransferError
from potluck.kv.fetch import FetchRequest, KvFetch
from potluck.kv.kv_codec import restored
from potluck.kv.peer_connections import Address, PeerConnections
from potluck.vllm.send_worker import Told
from potluck.vllm.transfer_scheduler import FetchOrder, PlaceBlocks, WorkerNews, address_of
from potluck.vllm.vllm_blocks import VllmLayer

log = logging.getLogger("vllm.potluck")  # vLLM writes down what is said below its own name
MOST_AT_ONCE = 128
DEGREE = 2
"""Connections per fetch."""
TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class IncomingKv:
    """One request's KV on its way in."""

    def __init__(self, ask: FetchOrder, taking: ReceiveWorker) -> None:
        self.ask, self._receiving = ask, taking
        self._until_s = time.monotonic() + ask.within_s
        self._changed = threading.Condition()
        self.place: PlaceBlocks | None = None
        self.cancelled = False
        self._fetching: KvFetch | None = None
        self.lossy = False
        self._pieces = MissingParts({})
        self.moved_bytes, self.wall_s = 0, 0.0

    def put(self, place: PlaceBlocks) -> None:
        with self._changed:
            self.place = place
            self._changed.notify_all()

    def cancel(self) -> None:
        with self._changed:
            self.cancelled = True
            if self._fetching is not None:
                self._fetching.cancel()
            self._changed.notify_all()

    # Its thread.

    def run(self, links: PeerConnections, fingerprint: str, rank: int) -> None:
        ask = self.ask
        wanted = FetchRequest(ask.handle, ask.request, fingerprint, ask.token_hash, ask.have)
        host, port = address_of(ask.kv)
        left_s = max(0.1, self._until_s - time.monotonic())
        fetching = KvFetch(links, (host, port + rank), wanted, degree=DEGREE, deadline_s=left_s)
        with self._changed:
            if self.cancelled:
                raise TransferError("hand-over: was cancelled")
            self._fetching = fetching
        completed = fetching.run(self._opened, self._sink)
        self.moved_bytes, self.wall_s = completed.moved_bytes, completed.wall_s
        if self.wanted:
            self._pieces.must_be_whole()

    @property
    def wanted(self) -> bool:
        """Whether it goes into blocks."""
        return self.place is not None and bool(self.place.tables)

    def _opened(self, about: KvManifest) -> None:
        """Something has come: only now is there a place for it."""
        if about.stop != self.ask.stop:
            raise FormatError("hand-over", f"ends at {about.stop}, {self.ask.stop} tokens were asked for")
        self._receiving.come(self.ask.key)
        with self._changed:
            while self.place is None and not self.cancelled and time.monotonic() < self._until_s:
                self._changed.wait(self._until_s - time.monotonic())
            if self.place is None or self.cancelled:
                raise TransferError("hand-over: no blocks were taken for it")
        layers = self._receiving.layers
        self._pieces = MissingParts(
            {
                (number, layer.shape.part): (layer.first(about.start, about.stop), about.stop)
                for number, layer in layers.items()
            }
        )

    def _sink(self, parcel: KvChunk) -> None:
        place = self.place
        if place is None or not place.tables:
            return
        self._pieces.take(parcel)
        layer = self._receiving.layers[parcel.layer]
        shape = layer.shape
        if parcel.dtype != shape.dtype or tuple(parcel.shape) != shape.of(parcel.stop - parcel.first):
            raise FormatError(
                f"hand-over: layer {parcel.layer}",
                f"is {parcel.dtype} {list(parcel.shape)}, expected {shape.dtype} "
                f"{list(shape.of(parcel.stop - parcel.first))}",
            )
        self.lossy = self.lossy or parcel.codec != "raw"
        data = np.frombuffer(restored(parcel).data, np.uint8)
        if not data.flags.writeable:
            data = data.copy()
        values = torch.from_numpy(data).view(TORCH[parcel.dtype]).view(parcel.shape)
        first = max(parcel.first, place.first)
        if first < parcel.stop:
            with self._changed:
                if self.cancelled:
                    raise TransferError("hand-over: was cancelled")
            layer.write(place.tables, first, values[first - parcel.first :])


class ReceiveWorker:
    def __init__(
        self, links: PeerConnections, layers: Mapping[int, VllmLayer], fingerprint: str, rank: int, told: Told
    ) -> None:
        self.links, self.layers = links, layers
        self._fingerprint, self._rank, self._told = fingerprint, rank, told
        self._lock = threading.Lock()
        self._incoming: dict[str, IncomingKv] = {}
        self._news = WorkerNews()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._counts: dict[str, int] = {}
        self._stirred = threading.Event()
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="potluck-kv-take")

    @property
    def open(self) -> int:
        return len(self._incoming)

    def allow(self, fleet: frozenset[Address]) -> None:
        self.links.allow({(host, port + self._rank if port else 0) for host, port in fleet})

    # vLLM's thread.

    def ask(self, ask: FetchOrder) -> None:
        arrival = IncomingKv(ask, self)
        with self._lock:
            self._incoming[ask.key] = arrival
        self._threads.submit(self._run, arrival)

    def put(self, place: PlaceBlocks) -> None:
        with self._lock:
            arrival = self._incoming.get(place.key)
            if arrival is not None:
                arrival.put(place)
            elif place.tables:  # It failed while blocks were taken for it.
                self._lost(place)

    def cancel(self, key: str) -> None:
        arrival = self._incoming.get(key)
        if arrival is not None:
            arrival.cancel()

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose KV is here, or will not be; and those of them whose KV will not."""
        if not self._received:
            return set(), set()
        with self._lock:
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
            return received, failed

    def news(self) -> WorkerNews | None:
        if not self._news:
            return None
        with self._lock:
            worker_news, self._news = self._news, WorkerNews()
            return worker_news

    def counts(self) -> dict[str, int]:
        """What came, since this was last asked."""
        if not self._counts:
            return {}
        with self._lock:
            numbers, self._counts = self._counts, {}
            return numbers

    def rest(self, most_s: float) -> None:
        """Until there is news, while vLLM has nothing to compute: else it asks a thousand times a second."""
        if self._incoming and self._stirred.wait(most_s):
            self._stirred.clear()

    def close(self) -> None:
        for arrival in list(self._incoming.values()):
            arrival.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.links.close()

    # Their threads.

    def come(self, key: str) -> None:
        with self._lock:
            self._news.come[key] = 1
        self._stirred.set()

    def _run(self, arrival: IncomingKv) -> None:
        problem = ""
        try:
            with torch.inference_mode():
                arrival.run(self.links, self._fingerprint, self._rank)
            for device in {layer.blocks.device for layer in self.layers.values()}:
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
        except (PotluckError, OSError, ValueError, RuntimeError) as error:
            problem = " ".join(str(error).split()) or type(error).__name__
        ask = arrival.ask
        if problem and not arrival.cancelled:
            log.warning("KV of %s from %s did not come, and is computed: %s", ask.key, ask.kv, problem)
        with self._lock:
            del self._incoming[ask.key]
            place = arrival.place
            if problem:
                self._count("failed_fetches", 1)
            else:
                self._count("received_bytes", arrival.moved_bytes)
                self._count("received_tokens", ask.stop - ask.have)
            if arrival.lossy:
                self._news.lossy.add(ask.key)
            if place is None and problem:
                self._news.failed.add(ask.key)
            elif place is not None and place.tables and problem and not arrival.cancelled:
                self._lost(place)
            elif place is not None and place.tables:
                self._received.add(ask.key)
        self._stirred.set()
        self._told(
            {
                "took": ask.handle,
                "kv": ask.kv,
                "problem": problem,
                "moved_bytes": arrival.moved_bytes,
                "wall_s": arrival.wall_s,
                "tokens": ask.stop - ask.have,
            }
        )

    def _count(self, name: str, more: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + more

    def _lost(self, place: PlaceBlocks) -> None:
        """Nobody knows which of its blocks were written."""
        self._failed.add(place.key)
        self._received.add(place.key)
