"""KV that comes: fetched in a thread, checked, and written into the blocks that vLLM has taken for it.

Whatever goes wrong, the request is told to have failed: vLLM computes what it does not hold itself.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256

import numpy as np
import torch

from potluck.core.errors import FormatError, InputError, PotluckError
from potluck.core.values.kv_layout import Address, KvAddress, KvSourceWorker, copies_of, kv_address, sources
from potluck.kv.assembly import MissingParts
from potluck.kv.chunks import KvChunk, KvManifest, TransferError
from potluck.kv.codec_layout import ITEM_BYTES
from potluck.kv.fetch import FetchRequest, GroupFetch
from potluck.kv.handles import bound_to
from potluck.kv.kv_codec import restored
from potluck.kv.kv_sender import KvSender
from potluck.kv.peer_connections import PeerConnections, ReceiveBuffers
from potluck.vllm.send_worker import SWITCH_S, Told
from potluck.vllm.transfer_scheduler import FetchOrder, PlaceBlocks, WorkerNews
from potluck.vllm.vllm_blocks import ONE, TORCH, ModelShard, VllmLayer

log = logging.getLogger("vllm.potluck")  # vLLM writes down what is said below its own name
MOST_AT_ONCE = 128
WAKE_S = 0.25


class IncomingKv:
    """One request's KV on its way in, from all workers that have some of it."""

    def __init__(self, order: FetchOrder, receive_worker: ReceiveWorker) -> None:
        self.ask, self._receiving = order, receive_worker
        self._until_s = time.monotonic() + order.within_s
        self._changed = threading.Condition()
        self.place: PlaceBlocks | None = None
        self.cancelled = False
        self._sources: list[KvSourceWorker] = []
        self._pieces: dict[int, MissingParts] = {}  # By source.
        self._fetch: GroupFetch | None = None
        self._relay: CopyRelay | None = None
        self.lossy = False
        self.moved_bytes, self.wall_s = 0, 0.0

    def put(self, place: PlaceBlocks) -> None:
        with self._changed:
            self.place = place
            self._changed.notify_all()

    def cancel(self) -> None:
        with self._changed:
            self.cancelled = True
            if self._fetch is not None:
                self._fetch.cancel()
            self._changed.notify_all()

    # Its threads.

    def run(self) -> None:
        order, receive_worker = self.ask, self._receiving
        addressed = receive_worker.sources(order.kv)
        self._sources = [source for _, source in addressed]
        wanted = [(address, self._wanted(source)) for address, source in addressed]
        left_s = max(0.1, self._until_s - time.monotonic())
        fetch = GroupFetch(receive_worker.links, wanted, degree=order.connections, deadline_s=left_s)
        with self._changed:
            if self.cancelled:
                raise TransferError("hand-over: was cancelled")
            self._fetch = fetch
        self._relay, problem = receive_worker.relay(order), "the request has ended"
        try:
            completed = fetch.run(self._opened, self._sink)
            problem = ""
        except Exception as error:
            problem = " ".join(str(error).split())
            raise
        finally:
            if self._relay is not None:
                self._relay.end(problem)
        copies = any(source.copy for source in self._sources)
        self.moved_bytes, self.wall_s = 0 if copies else completed.moved_bytes, completed.wall_s
        if self.wanted:
            for pieces in self._pieces.values():
                pieces.must_be_whole()

    def _wanted(self, source: KvSourceWorker) -> FetchRequest:
        order, receive_worker = self.ask, self._receiving
        handle, session = order.handle, order.session
        if source.copy:
            handle, session = copy_handle(handle, receive_worker.shard.rank), b""
        mark, tokens = receive_worker.fingerprint, order.token_hash
        return FetchRequest(handle, order.request, mark, tokens, order.have, source.cut, session)

    @property
    def wanted(self) -> bool:
        """Whether it goes into blocks."""
        return self.place is not None and bool(self.place.tables)

    def _opened(self, place: int, manifest: KvManifest) -> None:
        """Something has come: only when all of it has begun to come is there a place for it."""
        cut, receive_worker = self._sources[place].cut, self._receiving
        if cut.nothing:
            return
        if manifest.stop != self.ask.stop:
            raise FormatError("hand-over", f"ends at {manifest.stop}, {self.ask.stop} tokens were asked for")
        if self._relay is not None:
            self._relay.opened(manifest)
        pieces = MissingParts(
            {
                (number, layer.shape.part): (
                    layer.first(manifest.start, manifest.stop, whole=layer.keeps_all),
                    manifest.stop,
                )
                for number, layer in receive_worker.layers.items()
                if cut.layers[0] <= number < cut.layers[1]
            }
        )
        with self._changed:
            self._pieces[place] = pieces
            if len(self._pieces) == sum(not source.cut.nothing for source in self._sources):
                receive_worker.come(self.ask.key)
            while self.place is None and not self.cancelled and time.monotonic() < self._until_s:
                if self._fetch is not None and self._fetch.failed:
                    break
                self._changed.wait(min(WAKE_S, self._until_s - time.monotonic()))
            if self.place is None or self.cancelled:
                raise TransferError("hand-over: no blocks were taken for it")

    def _sink(self, source: int, chunk: KvChunk) -> None:
        if self._relay is not None:
            self._relay.put(chunk)
        place = self.place
        if place is None or not place.tables:
            return
        self._pieces[source].take(chunk)
        layer, heads = self._receiving.layers[chunk.layer], self._sources[source].cut.heads
        first, stop = heads if heads != (0, 0) else (layer.head, layer.head + layer.shape.heads)
        shape = layer.shape.of(chunk.stop - chunk.first, stop - first if chunk.part != "latent" else None)
        if tuple(chunk.shape) != shape or (chunk.part != "latent" and chunk.head != first):
            raise FormatError(
                f"hand-over: layer {chunk.layer}",
                f"is {list(chunk.shape)} from head {chunk.head} on, expected {list(shape)} from {first} on",
            )
        # What was computed in fewer bits than here is not what would be computed here.
        narrower = ITEM_BYTES[chunk.dtype] < ITEM_BYTES[layer.shape.dtype]
        self.lossy = self.lossy or chunk.codec != "raw" or narrower
        start = max(chunk.first, place.first)
        if start < chunk.stop:
            with self._changed:
                if self.cancelled:
                    raise TransferError("hand-over: was cancelled")
            head = None if chunk.part == "latent" else chunk.head
            with torch.inference_mode():  # of each thread
                values = _values(chunk, layer.blocks.device)[start - chunk.first :]
                layer.write(place.tables, start, values, head)


def _values(chunk: KvChunk, device: torch.device) -> torch.Tensor:
    """What was sent in fewer bits is restored where it goes."""
    if device.type == "cuda" and chunk.codec != "raw":
        from potluck.kv import gpu_kernels

        return gpu_kernels.restored(chunk, device)
    data = np.frombuffer(restored(chunk).data, np.uint8)
    if not data.flags.writeable:
        data = data.copy()
    # Waited for: the memory is used again.
    return torch.from_numpy(data).to(device).view(TORCH[chunk.dtype]).view(chunk.shape)


class CopyRelay:
    """Passes what comes on to the workers that hold the same heads, so that it crosses the network once."""

    def __init__(self, sender: KvSender, order: FetchOrder, fingerprint: str, ranks: Iterable[int]) -> None:
        self._fingerprint, self._token_hash, self._wait_s = fingerprint, order.token_hash, order.within_s
        self._about: Future[KvManifest] = Future()
        bound = bound_to(order.request, fingerprint, order.token_hash)
        self._transfers = [
            sender.offer(copy_handle(order.handle, rank), bound, self._manifest, order.within_s)
            for rank in ranks
        ]

    def _manifest(self, have: int) -> KvManifest:
        return self._about.result(self._wait_s)

    def opened(self, manifest: KvManifest) -> None:
        if not self._about.done():
            self._about.set_result(manifest)

    def put(self, chunk: KvChunk) -> None:
        own = replace(chunk, data=bytes(chunk.data), parameters=bytes(chunk.parameters))
        for transfer in self._transfers:
            transfer.put(own, self._wait_s)

    def end(self, problem: str) -> None:
        if not self._about.done():
            self._about.set_exception(TransferError(problem or "hand-over: has not begun"))
        for transfer in self._transfers:
            if problem:
                transfer.fail(problem[:200])
            else:
                transfer.finish()


def copy_handle(handle: str, rank: int) -> str:
    """What a worker asks another of its instance for."""
    return sha256(f"copy {rank} of {handle}".encode()).hexdigest()


class ReceiveWorker:
    def __init__(
        self,
        peer_connections: PeerConnections,
        sender: KvSender,
        layers: Mapping[int, VllmLayer],
        fingerprint: str,
        shard: ModelShard,
        told: Told,
    ) -> None:
        """`sender`: of this worker; others of its instance listen at the ports around its own."""
        self.links, self.layers, self.fingerprint, self.shard = peer_connections, layers, fingerprint, shard
        self.whole_windows = any(layer.keeps_all for layer in layers.values())
        self._sender, self._told = sender, told
        if any(layer.blocks.device.type == "cuda" for layer in layers.values()):
            from potluck.kv import gpu_kernels

            sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
            peer_connections.buffers = ReceiveBuffers(peer_connections.limits.keep_bytes, gpu_kernels.pinned)
        plain = all(layer.scales == ONE for layer in layers.values())
        dtypes = {layer.shape.dtype for layer in layers.values() if layer.shape.part != "memory"}
        self._dtype = dtypes.pop() if plain and len(dtypes) == 1 else ""
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

    def allow(self, fleet: Iterable[KvAddress]) -> None:
        own = {self._sibling(rank) for rank in range(self.shard.tensor_size)}
        self.links.allow({worker for address in fleet for worker in address.workers} | own)

    def _sibling(self, tensor_rank: int) -> Address:
        host, port = self._sender.address
        return host, port - self.shard.tensor_rank + tensor_rank

    # Its fetches' threads.

    def sources(self, kv: str) -> list[tuple[Address, KvSourceWorker]]:
        address, shard = kv_address(kv), self.shard
        result, heads = [], shard.heads
        alike = shard.states and address.layout.tensor == shard.tensor_size
        if alike:
            heads = shard.tensor_size  # each worker has all of the one of the same rank
        elif shard.states and not self._can_cut_states(address.layout.tensor):
            raise InputError(
                "hand-over", "states like this model's cross between equal tensor parallelism alone"
            )
        for source in sources(address.layout, shard.layout, shard.rank, heads):
            at = (
                self._sibling(source.rank % shard.tensor_size) if source.copy else address.worker(source.rank)
            )
            spans = (0, 0) if alike else source.cut.heads
            cut = replace(source.cut, heads=spans, dtype=self._dtype, whole_windows=self.whole_windows)
            result.append((at, source if source.copy else replace(source, cut=cut)))
        return result

    def _can_cut_states(self, tensor: int) -> bool:
        """Whether they lie by KV heads, here and with such a tensor parallelism, and each head is on one worker."""
        heads, own = self.shard.heads, self.shard.tensor_size
        states = [layer.shape for layer in self.layers.values() if layer.shape.part == "memory"]
        return heads % tensor == heads % own == 0 and all(state.heads == heads // own for state in states)

    def relay(self, order: FetchOrder) -> CopyRelay | None:
        """For the first of the workers that hold the same heads."""
        copies = copies_of(self.shard.heads, self.shard.tensor_size)
        if copies == 1 or self.shard.states or self.shard.tensor_rank % copies:
            return None
        ranks = range(self.shard.rank + 1, self.shard.rank + copies)
        return CopyRelay(self._sender, order, self.fingerprint, ranks)

    # vLLM's thread.

    def ask(self, order: FetchOrder) -> None:
        incoming_kv = IncomingKv(order, self)
        with self._lock:
            self._incoming[order.key] = incoming_kv
        self._threads.submit(self._run, incoming_kv)

    def put(self, place: PlaceBlocks) -> None:
        with self._lock:
            incoming_kv = self._incoming.get(place.key)
            if incoming_kv is not None:
                incoming_kv.put(place)
            elif place.tables:  # It failed while blocks were taken for it.
                self._lost(place)

    def cancel(self, key: str) -> None:
        incoming_kv = self._incoming.get(key)
        if incoming_kv is not None:
            incoming_kv.cancel()

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
        for incoming_kv in list(self._incoming.values()):
            incoming_kv.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.links.close()

    # Their threads.

    def come(self, key: str) -> None:
        with self._lock:
            self._news.come[key] = 1
        self._stirred.set()

    def _run(self, incoming_kv: IncomingKv) -> None:
        problem = ""
        try:
            incoming_kv.run()
            for device in {layer.blocks.device for layer in self.layers.values()}:
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
        except (PotluckError, OSError, ValueError, RuntimeError) as error:
            problem = " ".join(str(error).split()) or type(error).__name__
        order = incoming_kv.ask
        if problem and not incoming_kv.cancelled:
            log.warning("KV of %s from %s did not come, and is computed: %s", order.key, order.kv, problem)
        with self._lock:
            del self._incoming[order.key]
            place = incoming_kv.place
            if problem:
                self._count("failed_fetches", 1)
            else:
                self._count("received_bytes", incoming_kv.moved_bytes)
                self._count("received_tokens", order.stop - order.have)
            if incoming_kv.lossy:
                self._news.lossy.add(order.key)
            if place is None and problem:
                self._news.failed.add(order.key)
            elif place is not None and place.tables and problem and not incoming_kv.cancelled:
                self._lost(place)
            elif place is not None and place.tables:
                self._received.add(order.key)
        self._stirred.set()
        self._told(
            {
                "took": order.handle,
                "kv": order.kv,
                "problem": problem,
                "moved_bytes": incoming_kv.moved_bytes,
                "wall_s": incoming_kv.wall_s,
                "tokens": order.stop - order.have,
            }
        )

    def _count(self, name: str, more: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + more

    def _lost(self, place: PlaceBlocks) -> None:
        """Nobody knows which of its blocks were written."""
        self._failed.add(place.key)
        self._received.add(place.key)
