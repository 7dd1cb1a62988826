"""KV that leaves: read out of vLLM's blocks layer by layer, and sent by a KV sender.

A layer is read as soon as it was computed, into the host's memory; so blocks are free when the request is done,
whether or not its receiver has come. Where there is no room in the host's memory, blocks stay as they are, and are
read later, or given up when the handle's time is over.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from potluck.core.errors import InputError, PotluckError
from potluck.core.values.kv_layout import KvCut, Span
from potluck.kv.chunks import KvChunk, KvManifest
from potluck.kv.codec_layout import CODED, ITEM_BYTES, STATES, Codec, Part
from potluck.kv.handles import bound_to
from potluck.kv.kv_codec import packed
from potluck.kv.kv_sender import KvSender, OutgoingTransfer, State
from potluck.vllm.transfer_scheduler import ReadBlocks, SendOffer
from potluck.vllm.vllm_blocks import ONE, TORCH, Tables, VllmLayer, scaled

SWITCH_S = 0.0002
"""Whoever launches kernels lets other threads run at each, and should not be long in getting its turn back."""
PAGE_BYTES, SLOTS, PAGES, PORTERS = 1 << 23, 16, 48, 2
Coding = tuple[Part, Codec]


@dataclass(frozen=True, slots=True)
class Copying:
    """`soon`: somebody waits for it; `coding`: as a GPU's codec makes it."""

    soon: bool = False
    coding: Coding | None = None


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows that are, or will be, in the host's memory."""

    rows: int
    values: Future[Tensor]
    copied: torch.cuda.Event | None  # When it has come, nothing on the device is needed any more.


@dataclass(slots=True)
class _HostSlot:
    room: Tensor
    copied: torch.cuda.Event


class HostCopies:
    """One worker's, for its one device; called in the thread that computes."""

    def __init__(self, device: torch.device) -> None:
        self._slots: deque[_HostSlot] = deque()
        self._pages: deque[Tensor] = deque()
        if device.type == "cuda":
            if "OMP_NUM_THREADS" not in os.environ:
                # As vLLM has it where it has several workers: threads of copies on the host hold up who launches.
                torch.set_num_threads(1)
            sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
            self._stream = torch.cuda.Stream(device)
            room = torch.empty(SLOTS, PAGE_BYTES, dtype=torch.uint8, device=device)
            self._slots.extend(_HostSlot(item, torch.cuda.Event()) for item in room)
            self._porters = ThreadPoolExecutor(PORTERS, thread_name_prefix="potluck-kv-host")
            threading.Thread(target=self._pin, name="potluck-kv-pin", daemon=True).start()

    def _pin(self) -> None:
        for _ in range(PAGES):
            self._pages.append(torch.empty(PAGE_BYTES, dtype=torch.uint8, pin_memory=True))

    def room_for(self, size: int) -> bool:
        return not self._slots or len(self._pages) * PAGE_BYTES >= size + PAGE_BYTES

    def copies(self, layer: VllmLayer, read: ReadBlocks, first: int, copying: Copying) -> list[HostRows]:
        """Of tokens [first, read.upto), if there is room for them; in parts."""
        if not self._slots:
            there: Future[Tensor] = Future()
            there.set_result(values := layer.read(read.tables, first, read.upto).cpu())
            return [HostRows(len(values), there, None)]
        if layer.shape.part == "memory":
            return [self._copy(layer, read.tables, (first, read.upto), 1, copying)]
        rows = max(1, PAGE_BYTES // layer.shape.token_bytes)
        spans = [(start, min(start + rows, read.upto)) for start in range(first, read.upto, rows)]
        return [self._copy(layer, read.tables, span, span[1] - span[0], copying) for span in spans]

    def _copy(self, layer: VllmLayer, tables: Tables, span: Span, rows: int, copying: Copying) -> HostRows:
        computing, slot = torch.cuda.current_stream(layer.blocks.device), self._slots[0]
        shape, dtype = layer.shape.of(rows), TORCH[layer.shape.dtype]
        self._slots.rotate(-1)
        computing.wait_event(slot.copied)
        if copying.coding is None:
            lies = slot.room[: rows * layer.shape.token_bytes]
            layer.read_into(lies.view(dtype).view(shape), tables, *span)
        else:
            from potluck.kv import gpu_kernels

            lies = slot.room[: gpu_kernels.room_bytes(copying.coding[0], shape, copying.coding[1])]
            gpu_kernels.encode(layer.read(tables, *span), *copying.coding, lies)
            dtype, shape = lies.dtype, tuple(lies.shape)
        page = self._pages.popleft()  # Not before: what cannot be read takes none.
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            page[: lies.nbytes].copy_(lies, non_blocking=True)
            slot.copied = torch.cuda.Event()
            slot.copied.record(self._stream)
        # A small part would keep a whole page from others.
        move = self._lend if copying.soon and lies.nbytes >= PAGE_BYTES // 4 else self._move
        moved = self._porters.submit(move, page, dtype, shape, slot.copied)
        return HostRows(rows, moved, slot.copied)

    def _lend(
        self, page: Tensor, dtype: torch.dtype, shape: tuple[int, ...], copied: torch.cuda.Event
    ) -> Tensor:
        """The page itself; it comes back when nobody refers to it. To touch new memory would hold the driver up."""
        lent = page.numpy()[: math.prod(shape) * dtype.itemsize]
        weakref.finalize(lent, self._pages.append, page)
        copied.synchronize()
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _move(
        self, page: Tensor, dtype: torch.dtype, shape: tuple[int, ...], copied: torch.cuda.Event
    ) -> Tensor:
        values = torch.empty(shape, dtype=dtype)
        try:
            copied.synchronize()
            values.view(-1).view(torch.uint8).copy_(page[: values.nbytes])
        finally:
            self._pages.append(page)
        return values

    def close(self) -> None:
        if self._slots:
            self._porters.shutdown(wait=False, cancel_futures=True)


MOST_ASIDE_BYTES = 1 << 32
PUMPS = 32
COPY_S = 60.0  # How long a GPU may take to compute and copy what was launched.
Told = Callable[[dict[str, object]], None]
"""Whoever wants to know how it went; called in any thread, and returns at once."""


@dataclass(slots=True)
class _Piece:
    """Tokens [first, stop) of a layer, on their way into the host's memory."""

    layer: int
    first: int
    stop: int
    size: int  # Bytes.
    values: Future[Tensor]
    coding: Coding | None = None


@dataclass(slots=True)
class OutgoingKv:
    offer: SendOffer
    transfer: OutgoingTransfer | None = None
    read_to: dict[int, int] = field(default_factory=dict)
    """By layer."""
    pieces: deque[_Piece] = field(default_factory=deque)
    copying: list[torch.cuda.Event] = field(default_factory=list)
    have: int | None = None
    """What the receiver has already, once it has come."""
    kept: ReadBlocks | None = None
    pumping: bool = False
    finished: bool = False
    """Whether all of it is in the send queue."""
    over: bool = False
    offered: threading.Event = field(default_factory=threading.Event)
    """Whether `transfer` is known: a receiver may come before."""


class SendWorker:
    def __init__(
        self, sender: KvSender, layers: Mapping[int, VllmLayer], fingerprint: str, told: Told
    ) -> None:
        self._sender, self._layers, self._fingerprint, self._told = sender, layers, fingerprint, told
        self.most_aside_bytes = MOST_ASIDE_BYTES
        self._lock = threading.Lock()
        self._outgoing: dict[str, OutgoingKv] = {}
        self._aside_bytes = 0
        self._finished: set[str] = set()
        devices = {layer.blocks.device for layer in layers.values()}
        self._hosting = HostCopies(next(iter(devices)) if len(devices) == 1 else torch.device("cpu"))
        self._pumps = ThreadPoolExecutor(PUMPS, thread_name_prefix="potluck-kv-give")

    @property
    def open(self) -> int:
        return len(self._outgoing)

    @property
    def aside_bytes(self) -> int:
        return self._aside_bytes

    # vLLM's thread.

    def offer(self, offer: SendOffer) -> None:
        outgoing_kv = OutgoingKv(offer, read_to=dict.fromkeys(self._layers, 0))
        bound = bound_to(offer.request, self._fingerprint, offer.token_hash)
        with self._lock:
            self._outgoing[offer.key] = outgoing_kv

        def opened(have: int) -> KvManifest:
            outgoing_kv.offered.wait()
            assert outgoing_kv.transfer is not None
            cut = outgoing_kv.transfer.cut
            if cut.whole_windows and any(layer.windowed for layer in self._layers.values()):
                raise InputError("hand-over", "is wanted with all of its windows, which are not kept here")
            with self._lock:
                outgoing_kv.have = min(have, offer.stop - 1)
            self._pump(outgoing_kv)
            return KvManifest(self._fingerprint, outgoing_kv.have, offer.stop, offer.token_hash)

        def closed(state: State) -> None:
            self._forget(
                outgoing_kv
            )  # The sender holds its lock here, and nobody here asks for that under ours.
            transfer = outgoing_kv.transfer
            self._told(
                {
                    "gave": offer.handle,
                    "state": state,
                    "claimed": transfer is not None and transfer.claimed,
                    "problem": transfer.problem if transfer is not None else "",
                }
            )

        try:
            outgoing_kv.transfer = self._sender.offer(offer.handle, bound, opened, offer.lasts_s, closed)
        except PotluckError as error:
            outgoing_kv.over = True
            self._told({"gave": offer.handle, "state": "failed", "claimed": False, "problem": str(error)})
        finally:
            outgoing_kv.offered.set()

    def lossy(self, key: str) -> None:
        """What it was computed from had come in fewer bits."""
        outgoing_kv = self._outgoing.get(key)
        if outgoing_kv is None or outgoing_kv.transfer is None:
            return
        if outgoing_kv.offer.codec == "raw":
            outgoing_kv.transfer.fail("a cache that came in fewer bits can only be handed on under a codec")

    def read_layer(self, layer: int, reads: Iterable[ReadBlocks]) -> None:
        """A layer was computed."""
        for read in reads:
            outgoing_kv = self._outgoing.get(read.key)
            if outgoing_kv is not None and self._read(outgoing_kv, layer, read):
                self._pump(outgoing_kv)

    def keep(self, read: ReadBlocks) -> None:
        """A request is done."""
        outgoing_kv = self._outgoing.get(read.key)
        if outgoing_kv is None:
            self._finished.add(read.key)
        else:
            outgoing_kv.kept = read

    def drop(self, key: str) -> None:
        """A request ended before its KV was there."""
        with self._lock:
            outgoing_kv = self._outgoing.pop(key, None)
        if outgoing_kv is not None:
            self._forget(outgoing_kv)
            if outgoing_kv.transfer is not None:
                outgoing_kv.transfer.fail("the request ended before its cache was computed")

    def done(self) -> set[str]:
        """Requests whose blocks may go."""
        if not self._outgoing and not self._finished:
            return set()
        texts, self._finished = self._finished, set()
        for key, outgoing_kv in list(self._outgoing.items()):
            kept = outgoing_kv.kept
            if kept is None:
                continue
            if sum(self._read(outgoing_kv, layer, kept) for layer in self._layers):
                self._pump(outgoing_kv)
            whole = all(upto >= kept.upto for upto in outgoing_kv.read_to.values())
            if not outgoing_kv.over and not (whole and all(event.query() for event in outgoing_kv.copying)):
                continue
            with self._lock:
                del self._outgoing[key]
            if outgoing_kv.over:
                self._forget(outgoing_kv)
            texts.add(key)
            self._pump(outgoing_kv)
        return texts

    def close(self) -> None:
        self._sender.close()
        self._pumps.shutdown(wait=False, cancel_futures=True)
        self._hosting.close()

    def _read(self, outgoing_kv: OutgoingKv, layer: int, read: ReadBlocks) -> bool:
        """What was not read yet of a layer, if there is room for it; whether there was something."""
        vllm_layer = self._layers[layer]
        start = max(outgoing_kv.read_to[layer], outgoing_kv.have or 0)
        first = vllm_layer.first(start, outgoing_kv.offer.stop, whole=vllm_layer.keeps_all)
        if outgoing_kv.over or read.upto <= first:
            return False
        size = (read.upto - first) * vllm_layer.shape.token_bytes
        with self._lock:
            if self._aside_bytes + size > self.most_aside_bytes or not self._hosting.room_for(size):
                return False
            self._aside_bytes += size
        coding = self._coding(outgoing_kv, vllm_layer)
        try:
            copies = self._hosting.copies(
                vllm_layer, read, first, Copying(outgoing_kv.have is not None, coding)
            )
        except PotluckError as error:  # There was no room before, and a window has passed since.
            with self._lock:
                self._aside_bytes -= size
            if outgoing_kv.transfer is not None:
                outgoing_kv.transfer.fail(" ".join(str(error).split()))
            return False
        outgoing_kv.copying.extend(host_rows.copied for host_rows in copies if host_rows.copied is not None)
        with self._lock:
            if outgoing_kv.over:
                self._aside_bytes -= size
                return False
            for copy in copies:
                stop = first + copy.rows
                piece = _Piece(
                    layer, first, stop, copy.rows * vllm_layer.shape.token_bytes, copy.values, coding
                )
                outgoing_kv.pieces.append(piece)
                first = stop
            outgoing_kv.read_to[layer] = read.upto
        return True

    def _coding(self, outgoing_kv: OutgoingKv, layer: VllmLayer) -> Coding | None:
        """How the GPU makes a layer small, where it is known that its receiver takes it as a whole."""
        transfer, codec, shape = outgoing_kv.transfer, outgoing_kv.offer.codec, layer.shape
        if (
            codec == "raw"
            or outgoing_kv.have is None
            or transfer is None
            or layer.blocks.device.type != "cuda"
        ):
            return None
        plain = shape.dtype in CODED and shape.part not in STATES and layer.scales == ONE
        heads = shape.heads if shape.part == "kv" else 1
        whole = transfer.takes_whole(shape.dtype, (layer.head, layer.head + heads))
        return (shape.part, codec) if plain and whole and layer.window is None else None

    # Any thread.

    def _pump(self, outgoing_kv: OutgoingKv) -> None:
        with self._lock:
            if outgoing_kv.pumping or outgoing_kv.have is None:
                return
            outgoing_kv.pumping = True
        self._pumps.submit(self._send, outgoing_kv)

    def _send(self, outgoing_kv: OutgoingKv) -> None:
        transfer, offer = outgoing_kv.transfer, outgoing_kv.offer
        assert transfer is not None
        try:
            while (piece := self._next(outgoing_kv)) is not None:
                chunk = self._chunk(piece, outgoing_kv.have or 0, offer.stop, transfer.cut)
                for part, cut in transfer.cuts(chunk) if chunk is not None else ():
                    transfer.put(_small(cut, offer.codec), offer.lasts_s, part)
            with self._lock:
                whole = all(upto >= offer.stop for upto in outgoing_kv.read_to.values())
                # Another thread that has a piece in hand finishes it.
                idle = not (outgoing_kv.pumping or outgoing_kv.pieces)
                last = whole and idle and not (outgoing_kv.finished or outgoing_kv.over)
                outgoing_kv.finished = outgoing_kv.finished or last
            if last:
                transfer.finish()
        except (PotluckError, TimeoutError, CancelledError, RuntimeError) as error:
            transfer.fail(" ".join(str(error).split()) or "was not copied out of the GPU")
            self._forget(outgoing_kv)

    def _next(self, outgoing_kv: OutgoingKv) -> _Piece | None:
        with self._lock:
            if outgoing_kv.over or not outgoing_kv.pieces:
                outgoing_kv.pumping = False
                return None
            piece = outgoing_kv.pieces.popleft()
            self._aside_bytes -= piece.size
            return piece

    def _chunk(self, piece: _Piece, have: int, stop: int, cut: KvCut) -> KvChunk | None:
        values, layer = piece.values.result(COPY_S), self._layers[piece.layer]
        if piece.coding is not None:
            from potluck.kv import gpu_kernels

            shape = layer.shape.of(piece.stop - piece.first)
            place = (piece.layer, piece.coding[0], piece.first, piece.stop, layer.shape.dtype, shape)
            return gpu_kernels.coded(KvChunk(*place, b"", head=layer.head), piece.coding[1], values)
        whole = cut.whole_windows and layer.keeps_all
        first = max(piece.first, layer.first(have, stop, whole=whole))
        if first >= piece.stop:
            return None
        values = _as_wanted(values[first - piece.first :], layer, cut.dtype)
        name = str(values.dtype).removeprefix("torch.")
        data = memoryview(values.contiguous().view(-1).view(torch.uint8).numpy().data).cast("B")
        shape = layer.shape.of(piece.stop - first)
        return KvChunk(piece.layer, layer.shape.part, first, piece.stop, name, shape, data, head=layer.head)

    def _forget(self, outgoing_kv: OutgoingKv) -> None:
        with self._lock:
            outgoing_kv.over = True
            self._aside_bytes -= sum(piece.size for piece in outgoing_kv.pieces)
            outgoing_kv.pieces.clear()


def _as_wanted(values: Tensor, layer: VllmLayer, dtype: str) -> Tensor:
    """In the receiver's format where that is the smaller one. Scales are the sender's own affair: what a receiver
    without the same ones gets is multiplied."""
    if layer.scales != ONE and dtype and ITEM_BYTES[dtype] > 1:
        values = scaled(values.float(), layer.scales).to(torch.bfloat16)
    if dtype and ITEM_BYTES[dtype] < values.dtype.itemsize:
        values = values.to(TORCH[dtype])
    return values


def _small(chunk: KvChunk, codec: Codec) -> KvChunk:
    """Under a codec. Numbers of 8 bits are small already, unless 4 are wanted."""
    if ITEM_BYTES[chunk.dtype] > 1 or codec == "raw" or chunk.part in STATES:
        return packed(chunk, codec)
    if codec == "int8":
        return chunk
    values = torch.frombuffer(chunk.data, dtype=torch.uint8).view(TORCH[chunk.dtype]).to(torch.bfloat16)
    data = memoryview(values.view(torch.uint8).numpy().data).cast("B")
    return packed(replace(chunk, dtype="bfloat16", data=data), codec)
