"""KV between engines: what this one hands on waits in a sender, what it goes on with is fetched (potluck.kv).

The transport has threads, the server has asyncio, the loop has a thread of its own. A receiver that attaches asks the
loop from its connection's thread; the chunks then come through the request's channel and are put into the transfer
off the event loop. A fetch runs in a thread, asks the loop for each chunk, and is cancelled with its request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from potluck.core.errors import CapacityError, InputError, PotluckError
from potluck.core.values.kv import MOST_CONNECTIONS
from potluck.core.values.kv_layout import Address, KvAddress, KvLayout, sources, written
from potluck.engine.compute.emulated import EmulatedNic
from potluck.engine.loop.jobs import NOT_FETCHED, JobEnded
from potluck.engine.loop.loop_thread import LoopThread
from potluck.engine.server.request_channels import RequestChannel
from potluck.kv import peer_connections
from potluck.kv.checksum import SMALL_BYTES
from potluck.kv.chunks import HeadJoin, KvChunk, KvManifest, TransferError, lesser
from potluck.kv.codec_layout import ITEM_BYTES, STATES, Codec
from potluck.kv.fetch import FetchRequest, FetchResult, GroupFetch
from potluck.kv.handles import new_session
from potluck.kv.kv_codec import packed, restored
from potluck.kv.kv_sender import KvSender, OutgoingTransfer, SenderLimits, State, TransferPart


def converted(chunk: KvChunk, dtype: str) -> KvChunk:
    """A raw chunk in another format."""
    import torch  # engines that make tokens up need none

    values = torch.frombuffer(bytearray(chunk.data), dtype=torch.uint8).view(getattr(torch, chunk.dtype))
    data = values.to(getattr(torch, dtype)).view(torch.uint8).numpy().data
    return replace(chunk, dtype=dtype, data=memoryview(data).cast("B"))


class KvTransfer:
    """How chunks go over the wire: as they are, but in the time of an emulated GPU's card, if there is one. A mock
    engine's (`mock_transfer.py`) stand for others."""

    _on_gpu = False
    light = False  # Whether chunks are so small that no thread is needed for them.

    def __init__(
        self, nic: EmulatedNic | None = None, dtype: str = "", heads: int = 1, on_gpu: bool = False
    ) -> None:
        """`dtype`: what KV is kept as here; `heads`: the model's KV heads, 1 where it has latents; `on_gpu`: whether
        caches are made small and restored there."""
        self._nic, self.dtype, self.heads, self._on_gpu = nic, dtype, heads, on_gpu

    def early(self, transfer: OutgoingTransfer, codec: Codec) -> Codec:
        """Under what a cache may be read out already: its receiver takes it as it is here."""
        whole = self._on_gpu and transfer.takes_whole(self.dtype, (0, self.heads))
        return codec if whole else "raw"

    def wanted(self, chunk: KvChunk, dtype: str) -> KvChunk:
        """In the receiver's format, where that is the smaller one."""
        if not dtype or ITEM_BYTES[dtype] >= ITEM_BYTES[chunk.dtype] or chunk.part in STATES:
            return chunk
        return converted(chunk, dtype)

    def kept(self, chunk: KvChunk) -> KvChunk:
        """In the format that is kept here."""
        if not self.dtype or chunk.dtype == self.dtype or chunk.part == "memory":
            return chunk
        return converted(chunk, self.dtype)

    def kv_bytes(self, chunk: KvChunk) -> int:
        return len(chunk.data) + len(chunk.parameters)

    def packed(self, chunk: KvChunk, codec: Codec) -> KvChunk:
        return packed(chunk, codec)

    def restored(self, chunk: KvChunk, whole: bool = False) -> KvChunk:
        """`whole`: nothing else is done with it before it is written where it belongs."""
        return chunk if self._on_gpu and whole and chunk.dtype == self.dtype else restored(chunk)

    def due_s(self, chunk: KvChunk) -> float | None:
        """When a chunk that is handed in now may go, by the monotonic clock; None: at once."""
        return None if self._nic is None else self._nic.due_s(chunk)

    def leaves(self, peer: str, chunk: KvChunk) -> KvChunk:
        return chunk

    def here_s(self, peer: str, chunk: KvChunk) -> float | None:
        """When a chunk that came from there is here, by the monotonic clock; None: at once. Called in any thread."""
        return None

    def fetched(self, peer: str, kv_bytes: int, wall_s: float) -> None:
        """A cache came whole from there."""

    def told(self, report: peer_connections.LinkReport) -> peer_connections.LinkReport:
        return report


ROOM_S = 0.02  # Between two looks for room in the send queue.
MOST_AT_ONCE = 512  # Fetches, and apart from these chunks being put; others wait for their turn.
ASK_S = 60.0  # The loop answers between two steps.
Read = Callable[[int], tuple[KvManifest, list[KvChunk]]]
"""What goes to a receiver that has so many tokens already; called in a thread that may wait."""
RECEIVER_GONE = "receiver_gone"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KvNotDelivered:
    """Why a cache that was offered did not reach its receiver: a word to act on, and a line."""

    code: str
    problem: str


Fate = asyncio.Future[KvNotDelivered | None]  # Of a cache that is handed on; None once it was fetched.


@dataclass(frozen=True, slots=True)
class KvSettings:
    """Where caches are fetched from this engine, and from where it may fetch."""

    host: str = "127.0.0.1"
    port: int = 0
    fleet: tuple[Address, ...] = ()
    """From whom caches may always come; a port of 0 stands for any."""
    most_connections: int = MOST_CONNECTIONS
    """Of one fetch; a mock engine's few bytes need no more than one."""
    identity: tuple[Path, Path, Path] | None = None
    """For TLS: this engine's certificate and key, and the authority that signed the fleet's."""
    sender: SenderLimits = field(default_factory=SenderLimits)
    links: peer_connections.LinkLimits = field(default_factory=peer_connections.LinkLimits)
    shared_memory: bool = True
    """Between engines of one machine."""


def _put(transfer: OutgoingTransfer, cuts: Sequence[tuple[TransferPart, KvChunk]]) -> int:
    """How many of them there was room for."""
    for count, (part, chunk) in enumerate(cuts):
        try:
            if not part.takes(len(chunk.data) + len(chunk.parameters)):
                return count
            transfer.put(chunk, part=part)
        except CapacityError:
            return count
    return len(cuts)


class KvConnector:
    """Made within the event loop that serves HTTP."""

    def __init__(
        self, settings: KvSettings, loop_thread: LoopThread, kv_transfer: KvTransfer, handover_s: float
    ) -> None:
        self._settings, self._driver = settings, loop_thread
        self._transfer, self._handover_s = kv_transfer, handover_s
        self._loop = asyncio.get_running_loop()
        files, tls = settings.identity, None
        if files is not None:
            tls = peer_connections.server_context(*files), peer_connections.client_context(*files)
        try:
            self.sender = KvSender(
                settings.host,
                settings.port,
                limits=settings.sender,
                tls=tls[0] if tls else None,
                shared_memory=settings.shared_memory,
            )
        except OSError as error:
            raise InputError(
                "--kv-port", f"{settings.host}:{settings.port} cannot be used ({error.strerror or error})"
            ) from error
        self.links = peer_connections.PeerConnections(
            settings.fleet,
            limits=settings.links,
            tls=tls[1] if tls else None,
            shared_memory=settings.shared_memory,
        )
        self._fetches = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="potluck-kv-in")
        self._puts = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="potluck-kv-out")
        """Fetches wait for what others put, who may wait for what is put here."""
        self._outgoing: dict[str, OutgoingTransfer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._senders: dict[str, str] = {}  # A worker's address to that of its engine.

    @property
    def address(self) -> str:
        """Where others fetch from this engine."""
        return written(self.sender.address)

    def reports(self) -> tuple[peer_connections.LinkReport, ...]:
        """Workers of one sender count as that one."""
        by_sender: dict[str, peer_connections.LinkReport] = {}
        for report in self.links.reports():
            name = self._senders.get(report.peer, report.peer)
            before = by_sender.get(name)
            by_sender[name] = replace(report, peer=name) if before is None else _both(before, report)
        return tuple(map(self._transfer.told, (*self.sender.links(), *by_sender.values())))

    # What is handed on.

    def offer(
        self,
        handle: str,
        bound: bytes,
        channel: RequestChannel,
        lasts_s: float,
        codec: Codec = "raw",
    ) -> Fate:
        fate: Fate = self._loop.create_future()

        def opened(have: int) -> KvManifest:
            early = self._transfer.early(transfer, codec)
            asked = self._driver.ask(lambda loop, now_s: loop.attach(channel.key, have, now_s, early))
            manifest = asked.result(ASK_S)
            self._loop.call_soon_threadsafe(lambda: self._send_off(self._carry(channel, transfer, codec)))
            return manifest

        def closed(state: State) -> None:
            undelivered = None if state == "fetched" else self._undelivered(transfer, state)
            self._driver.ask(lambda loop, _: loop.delivered(channel.key))
            with suppress(RuntimeError):  # The event loop is closed: nobody is left to be told.
                self._loop.call_soon_threadsafe(_settle, fate, undelivered)

        transfer = self.sender.offer(handle, bound, opened, lasts_s, closed)
        self._outgoing[handle] = transfer
        return fate

    def _undelivered(self, transfer: OutgoingTransfer, state: State) -> KvNotDelivered:
        if state == "failed":
            return KvNotDelivered("hand_over", transfer.problem)
        if not transfer.claimed:
            return KvNotDelivered(NOT_FETCHED, "nobody fetched the cache while its handle was good")
        lease_s = self._settings.sender.lease_s
        return KvNotDelivered(RECEIVER_GONE, f"the receiver came, and was heard of no more for {lease_s:g} s")

    def _failed(self, transfer: OutgoingTransfer, error: Exception) -> None:
        transfer.fail(" ".join(str(error).split()) or f"it took longer than {self._handover_s:g} s")

    def withdraw(self, handle: str, channel: RequestChannel) -> None:
        """The request has ended here: what was read out still goes, and nobody new may attach."""
        transfer = self._outgoing.pop(handle)
        self._driver.ask(lambda loop, _: loop.host_kv.take(channel.key))
        if channel.ended is None or channel.ended.problem:
            transfer.fail(channel.ended.problem if channel.ended else "the request was cancelled")
        self.sender.withdraw(handle)

    def _send_off(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, channel: RequestChannel, transfer: OutgoingTransfer, codec: Codec) -> None:
        try:
            async with asyncio.timeout(self._handover_s):
                while not transfer.over:
                    event = await channel.chunks.get()
                    if isinstance(event, JobEnded):
                        transfer.fail(event.problem or event.reason)
                        return
                    if codec == "raw" and not event.exact:
                        # The next receiver would take it for exact, and keep it for others.
                        transfer.fail("a cache that came in fewer bits can only be handed on under a codec")
                        return
                    await self._hand_in(transfer, event.chunks, codec)
                    if event.last:
                        transfer.finish()
                        return
        except (PotluckError, TimeoutError) as error:
            self._failed(transfer, error)

    async def _hand_in(
        self, transfer: OutgoingTransfer, chunks: Sequence[KvChunk], codec: Codec = "raw"
    ) -> None:
        """Into the transfer, for each of the receiver's workers, when its turn has come on the network card."""
        cuts: list[tuple[TransferPart, KvChunk]] = []
        for chunk in chunks:
            if not len(chunk.data) and chunk.shape:
                raise InputError(f"codec: {chunk.part}", "has values that are not finite")
            for part, cut in transfer.cuts(self._transfer.wanted(chunk, transfer.cut.dtype)):
                if codec != "raw":
                    cut = await self._apart([cut], partial(self._transfer.packed, cut, codec))
                due_s = self._transfer.due_s(cut)
                if due_s is not None:
                    await self._put_all(transfer, cuts)
                    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                cuts.append((part, self._transfer.leaves(transfer.peer, cut)))
        await self._put_all(transfer, cuts)

    async def _put_all(self, transfer: OutgoingTransfer, cuts: list[tuple[TransferPart, KvChunk]]) -> None:
        """As there is room. No thread waits for it: threads are few, and whoever is to make room may need one."""
        while cuts:
            done = await self._apart([cut for _, cut in cuts], partial(_put, transfer, cuts))
            del cuts[:done]
            if cuts:
                await asyncio.sleep(ROOM_S)

    async def _apart(self, chunks: Sequence[KvChunk], call: Callable[[], T]) -> T:
        """Off the event loop, unless what is done with these takes no time."""
        if self._transfer.light and sum(len(chunk.data) for chunk in chunks) <= SMALL_BYTES:
            return call()
        return await self._loop.run_in_executor(self._puts, call)

    async def fetch(
        self,
        address: KvAddress,
        fetch_request: FetchRequest,
        connections: int,
        begin: Callable[[KvManifest], Coroutine[None, None, None]],
        accept: Callable[[KvChunk, bool], Future[None]],
        whole: Callable[[], Future[None]] | None = None,
    ) -> FetchResult:
        """Bring a cache here: `begin` is awaited in the event loop, `accept` (with whether it is exact) and `whole`
        are called in a thread. A sender's workers each have some of it; here it is put together."""
        waiting: list[Future[None]] = []
        lock = threading.Lock()
        parts = self._sources(address, fetch_request)
        if len(self._senders) > peer_connections.MOST_SENDERS:
            self._senders.clear()
        self._senders |= {written(worker): str(address) for worker, _ in parts}
        join = HeadJoin([request.cut.heads for _, request in parts if not request.cut.nothing])
        one = len(parts) == 1

        def opened(place: int, manifest: KvManifest) -> None:
            with lock:
                if not waiting and not parts[place][1].cut.nothing:
                    waiting.append(asyncio.run_coroutine_threadsafe(begin(manifest), self._loop))
            for future in waiting:
                _result(future, self._handover_s)

        moved_bytes, last_s, peer = 0, 0.0, str(address)
        taken: list[Future[None]] = []

        def sink(_: int, chunk: KvChunk) -> None:
            nonlocal moved_bytes, last_s
            with lock:
                moved_bytes += self._transfer.kv_bytes(chunk)
                last_s = self._transfer.here_s(peer, chunk) or 0.0
                if self._transfer.light:  # a copy costs less than to wait for each
                    own = replace(chunk, data=bytes(chunk.data), parameters=bytes(chunk.parameters))
                    taken.append(accept(self._transfer.restored(own), chunk.codec == "raw"))
                    return
                exact = chunk.codec == "raw" and not lesser(chunk, self._transfer.dtype)
                for joined in join.take(self._transfer.restored(chunk, whole=one)):
                    _result(accept(self._transfer.kept(joined), exact), ASK_S)

        def complete() -> None:
            time.sleep(max(0.0, last_s - time.monotonic()))
            for future in taken:
                _result(future, ASK_S)
            if whole is not None:
                _result(whole(), ASK_S)

        degree = min(connections, self._settings.most_connections)
        fetching = GroupFetch(self.links, parts, degree=degree, deadline_s=self._handover_s)
        running = self._loop.run_in_executor(self._fetches, fetching.run, opened, sink, complete)
        try:
            fetch_result = await asyncio.shield(running)
            self._transfer.fetched(peer, moved_bytes, fetch_result.wall_s)
            return replace(fetch_result, moved_bytes=moved_bytes)
        except asyncio.CancelledError:
            fetching.cancel()
            for future in waiting:
                future.cancel()
            await asyncio.wait([running])
            if not running.cancelled() and running.exception() is None:  # Else it failed, as it was asked to.
                self._transfer.fetched(peer, moved_bytes, running.result().wall_s)  # All was here before.
            raise

    def _sources(self, address: KvAddress, fetch_request: FetchRequest) -> list[tuple[Address, FetchRequest]]:
        session = new_session()
        return [
            (
                address.worker(source.rank),
                replace(fetch_request, session=session, cut=replace(source.cut, dtype=self._transfer.dtype)),
            )
            for source in sources(address.layout, KvLayout(), 0, self._transfer.heads)
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.links.close()
        await asyncio.to_thread(self.sender.close)
        for pool in (self._fetches, self._puts):
            pool.shutdown(wait=False, cancel_futures=True)


def _both(
    first_report: peer_connections.LinkReport, second_report: peer_connections.LinkReport
) -> peer_connections.LinkReport:
    """Of two workers that send at once."""
    return peer_connections.LinkReport(
        first_report.peer,
        first_report.connections + second_report.connections,
        first_report.goodput_bytes_per_s + second_report.goodput_bytes_per_s,
        first_report.moved_bytes + second_report.moved_bytes,
        first_report.sent_again_bytes + second_report.sent_again_bytes,
        max(first_report.rtt_s, second_report.rtt_s),
        min(first_report.least_rtt_s, second_report.least_rtt_s),
        first_report.retransmits + second_report.retransmits,
        first_report.queue_bytes + second_report.queue_bytes,
    )


def _settle(fate: Fate, not_delivered: KvNotDelivered | None) -> None:
    if not fate.done():
        fate.set_result(not_delivered)


def _result(future: Future[None], within_s: float) -> None:
    try:
        future.result(within_s)
    except CancelledError as error:
        raise TransferError("hand-over: the request has ended") from error
