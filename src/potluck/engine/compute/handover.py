"""A sequence's cache as bytes, layer by layer, and back into another runner.

What crosses is exactly what the receiver needs to go on at token `stop`: keys and values (or latents) of the tokens
[start, stop) that it lacks, of windows only what a query at `stop` can still see, of linear layers the state after
`stop` tokens. Any cut will do, also inside a block. A layer can be sent as soon as it was computed, step by step
where a prompt takes several:

    sender      runner.step(works, on_layer=lambda layer: send(pack(runner, row, layer, start, stop, whole)))
    receiver    arrival = IncomingHandover(runner, row, manifest, tokens)
                arrival.accept(chunk)          for each, in any order
                arrival.finish()

Data is C-contiguous and little-endian. The receiver believes nothing: model, tokens, layers, shapes, formats and
values are checked, and whatever is wrong is one error; the row can then be closed, and the runner lives on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from potluck.core.errors import FormatError, InputError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.engine.compute.batch_layout import on_device
from potluck.engine.compute.executor import check_manifest
from potluck.engine.memory.kv_cache import LinearStates, Pages
from potluck.engine.memory.pinned import PIECE_BYTES, PinnedPool
from potluck.engine.memory.prefix_cache import expected_parts
from potluck.kv.chunks import KvChunk, KvManifest, token_hash
from potluck.kv.codec_layout import CODED, STATES, Codec, Part, sizes

if TYPE_CHECKING:
    from potluck.engine.compute.runner import Runner
from potluck.core.values.model import Model
from potluck.kv.assembly import MissingParts, Range, first_needed

T = TypeVar("T")
ALIGNED_BYTES = 256


def ranges(model: Model, start: int, stop: int) -> dict[tuple[int, str], Range]:
    """What each layer of a model hands over of the tokens [start, stop), by layer and part."""
    parts = expected_parts(model, start, stop).items()
    return {key: (max(start, first), stop) for key, (first, _) in parts}


@dataclass(frozen=True, slots=True)
class _Expected:
    part: Part
    first: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def manifest(runner: Runner, tokens: Sequence[int], start: int, stop: int) -> KvManifest:
    return KvManifest(runner.fingerprint, start, stop, token_hash(tokens[:stop]))


def pack(
    runner: Runner, row: int, layer: int, start: int, stop: int, whole: int | None = None
) -> tuple[KvChunk, ...]:
    """What a layer has of a row's tokens [start, stop). States exist at the row's present length only. Of a hand-over
    up to `whole`, beyond `stop`: what its receiver will need of them, which may be nothing."""
    parts = read_out(RowSlots(runner, row), [layer], start, stop, whole)
    return tuple(chunk for chunks in parts for chunk in chunks())


class RowSlots:
    """Where a row's tokens lie, which is the same in all layers of a group."""

    def __init__(self, runner: Runner, row: int) -> None:
        self.runner, self.row = runner, row
        self._found: dict[tuple[int, int, int], Tensor] = {}

    def of(self, pages: Pages, first: int, stop: int) -> Tensor:
        if (slots := self._found.get((pages.group, first, stop))) is None:
            places = np.arange(first, stop)
            blocks = self.runner.tables.table(pages.group)[self.row, places // BLOCK_TOKENS]
            if not blocks.all():
                raise InputError(f"row {self.row}", f"no longer holds all of the tokens [{first}, {stop})")
            slots = on_device(blocks * BLOCK_TOKENS + places % BLOCK_TOKENS, self.runner.device)
            self._found[pages.group, first, stop] = slots
        return slots


def read_out(
    slots: RowSlots,
    layers: Sequence[int],
    start: int,
    stop: int,
    whole: int | None = None,
    codec: Codec = "raw",
) -> list[Callable[[], tuple[KvChunk, ...]]]:
    """As `pack` for each layer; what is returned waits for some of them. A GPU gathers them now, in the order of its
    steps, makes them small under a codec, and copies them to the host beside the steps that come, layers together; a
    CPU leaves codecs to whoever sends it. A chunk that no codec takes, since something is not finite, has no data."""
    pieces = [part for layer in layers for part in _leaving_parts(slots, layer, start, stop, whole, codec)]
    copies = slots.runner.copies
    if copies is None:
        return [partial(_gathered, slots, [part]) for part in pieces]
    return [_beside(slots, some, copies) for some in batches(pieces, lambda part: part.size)]


@dataclass(frozen=True, slots=True)
class _LeavingPart:
    """A chunk that leaves, still without its data; `size`: bytes of it on the host."""

    chunk: KvChunk
    wanted: _Expected
    codec: Codec
    size: int


def _leaving_parts(
    slots: RowSlots, layer: int, start: int, stop: int, whole: int | None, codec: Codec
) -> Iterator[_LeavingPart]:
    runner, row = slots.runner, slots.row
    kept, held = runner.cache.layer(layer), runner.tables.lengths[row]
    last = whole in (None, stop)
    if not 0 <= start < stop <= held or (isinstance(kept, LinearStates) and last and stop != held):
        raise InputError(f"row {row}", f"holds {held} tokens; layer {layer} cannot give [{start}, {stop})")
    for item in _expected(runner, layer, start, stop, whole):
        name = str(item.dtype).removeprefix("torch.")
        chunk = KvChunk(layer, item.part, item.first, stop, name, item.shape, b"")
        if runner.copies is None or codec == "raw" or item.part in STATES or name not in CODED:
            yield _LeavingPart(chunk, item, "raw", item.dtype.itemsize * prod(item.shape))
        else:
            from potluck.kv import gpu_kernels

            yield _LeavingPart(chunk, item, codec, gpu_kernels.room_bytes(item.part, item.shape, codec))


def batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """In their order, of together at most `PIECE_BYTES`, or one."""
    some: list[T] = []
    total = 0
    for item in items:
        if some and total + size(item) > PIECE_BYTES:
            yield some
            some, total = [], 0
        some.append(item)
        total += -(-size(item) // ALIGNED_BYTES) * ALIGNED_BYTES
    if some:
        yield some


def _gathered(slots: RowSlots, pieces: Sequence[_LeavingPart]) -> tuple[KvChunk, ...]:
    return tuple(_with_data(part, _read(slots, part)) for part in pieces)


@torch.inference_mode()
def _beside(
    slots: RowSlots, pieces: Sequence[_LeavingPart], copy_stream: torch.cuda.Stream
) -> Callable[[], tuple[KvChunk, ...]]:
    """All of them into one room on the GPU, and from there to the host in one copy."""
    ends = list(accumulate(-(-part.size // ALIGNED_BYTES) * ALIGNED_BYTES for part in pieces))
    room = torch.empty(ends[-1], dtype=torch.uint8, device=slots.runner.device)
    places = [slice(at, at + part.size) for at, part in zip((0, *ends), pieces, strict=False)]
    for part, place in zip(pieces, places, strict=True):
        if part.codec == "raw":
            _read(slots, part, room[place])
        else:
            from potluck.kv import gpu_kernels

            gpu_kernels.encode(_read(slots, part).contiguous(), part.chunk.part, part.codec, room[place])
    here, ready = slots.runner.leaving.take(ends[-1]), torch.cuda.Event()  # type: ignore[no-untyped-call]
    copy_stream.wait_stream(torch.cuda.current_stream())
    with on_stream(copy_stream):
        here.copy_(room, non_blocking=True)
        ready.record()
    room.record_stream(copy_stream)

    def wait() -> tuple[KvChunk, ...]:
        ready.synchronize()
        return tuple(_with_data(part, here[place]) for part, place in zip(pieces, places, strict=True))

    return wait


def _with_data(part: _LeavingPart, tensor: Tensor) -> KvChunk:
    if part.codec == "raw":
        data = memoryview(tensor.contiguous().view(torch.uint8).numpy().data).cast("B")
        return replace(part.chunk, data=data)
    from potluck.kv import gpu_kernels

    with suppress(InputError):
        return gpu_kernels.coded(part.chunk, part.codec, tensor)
    return part.chunk


def _expected(
    runner: Runner, layer: int, start: int, stop: int, whole: int | None = None
) -> tuple[_Expected, ...]:
    whole = stop if whole is None else whole
    pages = runner.cache.layer(layer)
    if isinstance(pages, LinearStates):
        if stop < whole:
            return ()
        return (
            _Expected("conv", stop, pages.conv.dtype, tuple(pages.conv.shape[1:])),
            _Expected("memory", stop, pages.memory.dtype, tuple(pages.memory.shape[1:])),
        )
    first = first_needed(start, whole, runner.tables.groups[pages.group].window)
    if first >= stop:
        return ()
    shape = (
        (stop - first, pages.heads, pages.dim)
        if pages.parts == 1
        else (stop - first, 2, pages.heads, pages.dim)
    )
    return (_Expected("latent" if pages.parts == 1 else "kv", first, pages.entries.dtype, shape),)


@torch.inference_mode()
def _read(slots: RowSlots, part: _LeavingPart, room: Tensor | None = None) -> Tensor:
    """Into these bytes, if any are given."""
    linear_states, expected = slots.runner.cache.layer(part.chunk.layer), part.wanted
    out = None if room is None else room.view(expected.dtype)
    if isinstance(linear_states, LinearStates):
        state = (linear_states.conv if expected.part == "conv" else linear_states.memory)[slots.row]
        return state.clone() if out is None else out.view(expected.shape).copy_(state)
    places = slots.of(linear_states, expected.first, part.chunk.stop)
    return linear_states.read(places, None if out is None else out.view(len(places), -1)).view(expected.shape)


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class IncomingHandover:
    """A hand-over on its way into a row, which must hold the tokens [0, start) already. On a GPU chunks may come in
    any thread (`beside`). They are copied and checked on one stream beside the steps, and written on another, which
    waits for whatever used the blocks before, and which steps wait for once all is there."""

    def __init__(self, runner: Runner, row: int, manifest: KvManifest, tokens: Sequence[int]) -> None:
        if sys.byteorder != "little":
            raise InputError("hand-over", "needs a little-endian machine")
        check_manifest(manifest, runner.fingerprint, runner.tables.lengths[row], tokens)
        runner.tables.grow(row, manifest.stop, since=manifest.stop)
        self._runner, self._row, self._about = runner, row, manifest
        self._slots = RowSlots(runner, row)
        layers = range(runner.config.model.layer_count)
        self._wanted: dict[tuple[int, str], _Expected] = {
            (layer, expected.part): expected
            for layer in layers
            for expected in _expected(runner, layer, manifest.start, manifest.stop)
        }
        self._pieces = MissingParts({key: (item.first, manifest.stop) for key, item in self._wanted.items()})
        self._lock, self._over = threading.Lock(), False
        self.beside = runner.device.type == "cuda"
        self._copies = self._writes = None
        if self.beside:
            self._copies, self._writes = (torch.cuda.Stream(runner.device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._writes.wait_stream(torch.cuda.current_stream())
        self._batch_of: dict[int, _Batch] = {}
        """By layer: those that are brought to the GPU together."""
        if self.beside:
            together = [(layer, item) for (layer, _), item in self._wanted.items() if item.part not in STATES]
            for some in batches(together, lambda one: one[1].dtype.itemsize * prod(one[1].shape)):
                made = _Batch(dict(some), runner.arriving)
                self._batch_of |= dict.fromkeys(made.wanted, made)

    @torch.inference_mode()
    def accept(self, chunk: KvChunk) -> None:
        where = f"hand-over: layer {chunk.layer} {chunk.part}"
        wanted = self._wanted.get((chunk.layer, chunk.part))
        if wanted is None:
            raise FormatError(where, "is not expected")
        expected = wanted if wanted.part in ("conv", "memory") else _piece(wanted, chunk)
        dtype = str(expected.dtype).removeprefix("torch.")
        if chunk.dtype != dtype or tuple(chunk.shape) != expected.shape:
            raise FormatError(
                where, f"is {chunk.dtype} {list(chunk.shape)}, expected {dtype} {list(expected.shape)}"
            )
        size = sizes(chunk.part, dtype, expected.shape, chunk.codec).payload_bytes
        if len(chunk.data) != size:
            raise FormatError(where, f"has {len(chunk.data)} bytes, expected {size}")
        with self._lock:
            if self._over:
                raise InputError("hand-over", "the request has ended")
            self._pieces.take(chunk)
        batch = self._batch_of.get(chunk.layer) if chunk.codec == "raw" else None
        if batch is None:
            tensor = _values(chunk, self._runner.device, expected.dtype, self._copies)
            self._take_in(tensor, [(chunk.layer, expected, tensor)])
        elif batch.takes(chunk):
            with on_stream(self._copies):
                room = batch.host.to(self._runner.device, non_blocking=True).view(expected.dtype)
            self._take_in(room, batch.cut(room))
            batch.host = torch.empty(0)  # It was waited for: another may have the memory.

    def _take_in(self, room: Tensor, parts: Sequence[tuple[int, _Expected, Tensor]]) -> None:
        """Checked, and then written: one that is not finite would spread through masked positions to sequences
        beside it."""
        with on_stream(self._copies):
            if not torch.isfinite(room).all().item():
                layer = next(layer for layer, _, values in parts if not torch.isfinite(values).all().item())
                raise FormatError(
                    f"hand-over: layer {layer} {parts[0][1].part}", "has values that are not finite"
                )
        with self._lock:
            if self._over:
                raise InputError("hand-over", "the request has ended")
            if self._writes is not None and self._copies is not None:
                self._writes.wait_stream(self._copies)
                room.record_stream(self._writes)
            with on_stream(self._writes):
                for layer, item, values in parts:
                    self._write(layer, item, values.view(item.shape))

    def _write(self, layer: int, expected: _Expected, tensor: Tensor) -> None:
        linear_states, row = self._runner.cache.layer(layer), self._row
        if isinstance(linear_states, LinearStates):
            (linear_states.conv if expected.part == "conv" else linear_states.memory)[row].copy_(tensor)
        else:
            slots = self._slots.of(linear_states, expected.first, expected.first + expected.shape[0])
            linear_states.write(slots, tensor.view(len(slots), -1))

    def finish(self) -> None:
        self._pieces.must_be_whole()
        self.end()
        self._runner.tables.advance(self._row, self._about.stop)
        self._runner.tables.trim(self._row)

    def end(self) -> None:
        """Nothing is written any more, and what was comes before the steps from now on: the row may be closed."""
        with self._lock:
            self._over = True
        if self._writes is not None:
            torch.cuda.current_stream().wait_stream(self._writes)


class _Batch:
    """Layers of one format that come by themselves and go to the GPU together: to launch something for each would
    keep the thread that launches steps from Python's lock."""

    def __init__(self, wanted: dict[int, _Expected], pool: PinnedPool) -> None:
        self.wanted, self._pool = wanted, pool
        sizes = [item.dtype.itemsize * prod(item.shape) for item in wanted.values()]
        self._ends = dict(zip(wanted, accumulate(sizes), strict=True))
        self._left, self._lock = sum(sizes), threading.Lock()
        self.host = torch.empty(0, dtype=torch.uint8)

    def takes(self, chunk: KvChunk) -> bool:
        """Whether all is there with it."""
        expected = self.wanted[chunk.layer]
        with self._lock:
            if not len(self.host):
                self.host = self._pool.take(self._left, waits=True)
        missing = expected.first + expected.shape[0] - chunk.first  # tokens of the layer from its first on
        at = self._ends[chunk.layer] - missing * expected.dtype.itemsize * prod(expected.shape[1:])
        np.copyto(self.host.numpy()[at : at + len(chunk.data)], np.frombuffer(chunk.data, np.uint8))
        with self._lock:
            self._left -= len(chunk.data)
            return not self._left

    def cut(self, room: Tensor) -> list[tuple[int, _Expected, Tensor]]:
        parts = torch.split(room, [prod(item.shape) for item in self.wanted.values()])
        return [(layer, item, part) for (layer, item), part in zip(self.wanted.items(), parts, strict=True)]


def _values(
    chunk: KvChunk, device: torch.device, dtype: torch.dtype, copy_stream: torch.cuda.Stream | None
) -> Tensor:
    if device.type == "cuda":
        from potluck.kv import gpu_kernels

        with on_stream(copy_stream):
            if chunk.codec == "raw":
                return gpu_kernels.uploaded(device, len(chunk.data), (0, chunk.data)).view(dtype)
            return gpu_kernels.restored(chunk, device)
    raw = np.frombuffer(chunk.data, np.uint8)
    return torch.from_numpy(raw if raw.flags.writeable else raw.copy()).view(dtype)


def _piece(expected: _Expected, chunk: KvChunk) -> _Expected:
    """What the tokens that a chunk says it is of should look like."""
    tokens = max(0, chunk.stop - chunk.first)
    return replace(expected, first=chunk.first, shape=(tokens, *expected.shape[1:]))
