"""Caches between engines: what this one hands on waits in an outbox, what it goes on with is fetched (potluck.kv).

The transport has threads, the face has asyncio, the loop has a thread of its own. A receiver that attaches asks the
loop from its connection's thread; the parcels then come through the request's channel and are put into the shipment
off the event loop. A fetch runs in a thread, asks the loop for each parcel, and is cancelled with its request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from potluck.core.errors import InputError, PotluckError
from potluck.engine.loop.loop_thread import LoopThread
from potluck.engine.loop.messages import NOT_FETCHED, JobEnded
from potluck.engine.server.channels import RequestChannel
from potluck.engine.server.kv_transfer import KvTransfer
from potluck.kv.chunks import KvChunk, KvManifest, TransferError
from potluck.kv.codec_layout import Codec
from potluck.kv.fetch import FetchRequest, FetchResult, KvFetch
from potluck.kv.kv_sender import BandwidthGrant, KvSender, OutgoingTransfer, SenderLimits, State
from potluck.kv.peer_connections import (
    Address,
    LinkLimits,
    LinkReport,
    PeerConnections,
    client_context,
    server_context,
)

MOST_AT_ONCE = 128
"""Fetches, and apart from these parcels being put; others wait for their turn."""
ASK_S = 60.0
"""The loop answers between two steps."""
Read = Callable[[int], tuple[KvManifest, list[KvChunk]]]
"""What goes to a receiver that has so many tokens already; called in a thread that may wait."""
RECEIVER_GONE = "receiver_gone"

T = TypeVar("T")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class KvNotDelivered:
    """Why a cache that was offered did not reach its receiver: a word to act on, and a line."""

    code: str
    problem: str


Fate = asyncio.Future[KvNotDelivered | None]
"""Of a cache that is handed on; None once it was fetched."""


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """Files for TLS: this engine's certificate and key, and the authority that signed the fleet's."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, slots=True)
class KvSettings:
    """Where caches are fetched from this engine, and from where it may fetch."""

    host: str = "127.0.0.1"
    port: int = 0
    fleet: tuple[Address, ...] = ()
    """From whom caches may always come; a port of 0 stands for any."""
    degree: int = 2
    """Connections per fetch."""
    identity: TlsIdentity | None = None
    sender: SenderLimits = field(default_factory=SenderLimits)
    links: LinkLimits = field(default_factory=LinkLimits)
    shared_memory: bool = True
    """Between engines of one machine."""


class KvConnector:
    """Made within the event loop that serves the face."""

    def __init__(
        self, settings: KvSettings, driver: LoopThread, kv_transfer: KvTransfer, handover_s: float
    ) -> None:
        self._settings, self._driver, self._freight, self._handover_s = (
            settings,
            driver,
            kv_transfer,
            handover_s,
        )
        self._loop = asyncio.get_running_loop()
        identity, tls = settings.identity, None
        if identity is not None:
            files = (identity.certificate, identity.key, identity.authority)
            tls = server_context(*files), client_context(*files)
        try:
            self._outbox = KvSender(
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
        self._links = PeerConnections(
            settings.fleet,
            limits=settings.links,
            tls=tls[1] if tls else None,
            shared_memory=settings.shared_memory,
        )
        self._fetches = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="potluck-kv-in")
        self._puts = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="potluck-kv-out")
        """Fetches wait for what others put, who may wait for what is put here."""
        self._shipments: dict[str, OutgoingTransfer] = {}
        self._carrying: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Where others fetch from this engine."""
        host, port = self._outbox.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def reports(self) -> tuple[LinkReport, ...]:
        """How the links fare, both ways."""
        return tuple(map(self._freight.told, self._outbox.links() + self._links.reports()))

    # What is handed on.

    def granted(self, grants: Iterable[BandwidthGrant], now_s: float) -> None:
        """What may be sent over which links from now on."""
        self._outbox.granted(grants, now_s)

    @property
    def grants(self) -> tuple[BandwidthGrant, ...]:
        return self._outbox.grants

    def offer(
        self,
        handle: str,
        bound: bytes,
        channel: RequestChannel,
        lasts_s: float,
        codec: Codec = "raw",
        whose: tuple[str, float] = ("", 1.0),
    ) -> Fate:
        """`whose`: a tenant and its weight, for links that are shared out."""
        fate: Fate = self._loop.create_future()

        def opened(have: int) -> KvManifest:
            about = self._driver.ask(lambda loop, now_s: loop.attach(channel.key, have, now_s)).result(ASK_S)
            self._loop.call_soon_threadsafe(self._begin, channel, transfer, codec)
            return about

        def closed(state: State) -> None:
            found = None if state == "fetched" else self._undelivered(transfer, state)
            with suppress(RuntimeError):  # The event loop is closed: nobody is left to be told.
                self._loop.call_soon_threadsafe(_settle, fate, found)

        transfer = self._outbox.offer(handle, bound, opened, lasts_s, closed, *whose)
        self._shipments[handle] = transfer
        return fate

    def _undelivered(self, transfer: OutgoingTransfer, state: State) -> KvNotDelivered:
        if state == "failed":
            return KvNotDelivered("hand_over", transfer.problem)
        if not transfer.claimed:
            return KvNotDelivered(NOT_FETCHED, "nobody fetched the cache while its handle was good")
        lease_s = self._settings.sender.lease_s
        return KvNotDelivered(RECEIVER_GONE, f"the receiver came, and was heard of no more for {lease_s:g} s")

    def lend(self, handle: str, bound: bytes, read: Read, lasts_s: float, over: Callable[[], None]) -> None:
        """Something that is kept can be fetched, once, within a time. It is read when the receiver comes."""

        def opened(have: int) -> KvManifest:
            about, parcels = read(have)
            self._loop.call_soon_threadsafe(lambda: self._send_off(self._put(transfer, parcels)))
            return about

        def closed(state: State) -> None:
            with suppress(RuntimeError):  # The event loop is closed: nobody counts any more.
                self._loop.call_soon_threadsafe(over)

        transfer = self._outbox.offer(handle, bound, opened, lasts_s, closed)

    async def _put(self, transfer: OutgoingTransfer, parcels: list[KvChunk]) -> None:
        try:
            async with asyncio.timeout(self._handover_s):
                for parcel in parcels:
                    await self._hand_in(transfer, parcel)
                transfer.finish()
        except (PotluckError, TimeoutError) as error:
            transfer.fail(" ".join(str(error).split()) or f"it took longer than {self._handover_s:g} s")

    def withdraw(self, handle: str, channel: RequestChannel) -> None:
        """The request has ended here: what was read out still goes, and nobody new may attach."""
        transfer = self._shipments.pop(handle)
        self._driver.ask(lambda loop, _: loop.aside.taken(channel.key))
        if channel.ended is None or channel.ended.problem:
            transfer.fail(channel.ended.problem if channel.ended else "the request was cancelled")
        self._outbox.withdraw(handle)

    def _begin(self, channel: RequestChannel, transfer: OutgoingTransfer, codec: Codec) -> None:
        self._send_off(self._carry(channel, transfer, codec))

    def _send_off(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, channel: RequestChannel, transfer: OutgoingTransfer, codec: Codec) -> None:
        """From the channel into the shipment, until the last."""
        try:
            async with asyncio.timeout(self._handover_s):
                while not transfer.over:
                    event = await channel.parcels.get()
                    if isinstance(event, JobEnded):
                        transfer.fail(event.problem or event.reason)
                        return
                    if codec == "raw" and not event.exact:
                        # The next receiver would take it for exact, and keep it for others.
                        transfer.fail("a cache that came in fewer bits can only be handed on under a codec")
                        return
                    for parcel in event.parcels:
                        await self._hand_in(transfer, parcel, codec)
                    if event.last:
                        transfer.finish()
                        return
        except (PotluckError, TimeoutError) as error:
            transfer.fail(" ".join(str(error).split()) or f"it took longer than {self._handover_s:g} s")

    async def _hand_in(self, transfer: OutgoingTransfer, parcel: KvChunk, codec: Codec = "raw") -> None:
        """Into the shipment, when its turn has come on the network card."""
        kv_transfer = self._freight
        if codec != "raw":
            parcel = await self._apart(kv_transfer.packed, parcel, codec)
        due_s = kv_transfer.due_s(parcel)
        if due_s is not None:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        parcel = kv_transfer.leaves(transfer.peer, parcel)
        await self._apart(transfer.put, parcel, self._handover_s)

    async def _apart(self, call: Callable[[KvChunk, A], T], parcel: KvChunk, more: A) -> T:
        """Off the event loop, unless it takes no time."""
        if self._freight.light:
            return call(parcel, more)
        return await self._loop.run_in_executor(self._puts, call, parcel, more)

    # What is fetched.

    def allow(self, fleet: Iterable[Address]) -> None:
        """From now on, only from these."""
        self._links.allow(fleet)

    async def fetch(
        self,
        address: Address,
        wanted: FetchRequest,
        begin: Callable[[KvManifest], Awaitable[None]],
        accept: Callable[[KvChunk], Future[None]],
        whole: Callable[[], Future[None]] | None = None,
    ) -> FetchResult:
        """Bring a cache here: `begin` is awaited in the event loop, `accept` and `whole` are called in a thread."""
        waiting: list[Future[None]] = []

        def opened(about: KvManifest) -> None:
            waiting.append(asyncio.run_coroutine_threadsafe(_whole(begin(about)), self._loop))
            _result(waiting[0], self._handover_s)

        moved_bytes, last_s, peer = 0, 0.0, f"{address[0]}:{address[1]}"
        taken: list[Future[None]] = []

        def sink(parcel: KvChunk) -> None:
            nonlocal moved_bytes, last_s
            moved_bytes += self._freight.kv_bytes(parcel)
            last_s = self._freight.here_s(peer, parcel) or 0.0
            if self._freight.light:  # a copy costs less than to wait for each
                own = replace(parcel, data=bytes(parcel.data), parameters=bytes(parcel.parameters))
                taken.append(accept(own))
            else:
                _result(accept(parcel), ASK_S)

        def complete() -> None:
            time.sleep(max(0.0, last_s - time.monotonic()))
            for future in taken:
                _result(future, ASK_S)
            if whole is not None:
                _result(whole(), ASK_S)

        degree = self._settings.degree
        fetching = KvFetch(self._links, address, wanted, degree=degree, deadline_s=self._handover_s)
        running = self._loop.run_in_executor(self._fetches, fetching.run, opened, sink, complete)
        try:
            found = await asyncio.shield(running)
            self._freight.fetched(peer, moved_bytes, found.wall_s)
            return replace(found, moved_bytes=moved_bytes)
        except asyncio.CancelledError:
            fetching.cancel()
            for future in waiting:
                future.cancel()
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # It was asked to fail.
            raise

    async def close(self) -> None:
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        self._links.close()
        await asyncio.to_thread(self._outbox.close)
        for pool in (self._fetches, self._puts):
            pool.shutdown(wait=False, cancel_futures=True)


def _settle(fate: Fate, found: KvNotDelivered | None) -> None:
    if not fate.done():
        fate.set_result(found)


async def _whole(what: Awaitable[None]) -> None:
    await what


def _result(future: Future[None], within_s: float) -> None:
    try:
        future.result(within_s)
    except CancelledError as error:
        raise TransferError("hand-over: the request has ended") from error
