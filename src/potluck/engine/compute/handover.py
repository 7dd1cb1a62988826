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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from potluck.core.errors import FormatError, InputError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.engine.compute.batch_layout import on_device
from potluck.engine.compute.executor import check_manifest
from potluck.engine.memory.kv_cache import Kept, LinearStates, Pages
from potluck.engine.memory.prefix_cache import expected_parts
from potluck.kv.chunks import KvChunk, KvManifest, token_hash
from potluck.kv.codec_layout import CODED, STATES, Codec, Part, sizes

if TYPE_CHECKING:
    from potluck.engine.compute.runner import Runner
from potluck.core.values.model import Model
from potluck.kv.assembly import MissingParts, Range, first_needed


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
    return read_out(RowSlots(runner, row), layer, start, stop, whole)()


class RowSlots:
    """Where a row's tokens lie, which is the same in all layers of a group."""

    def __init__(self, runner: Runner, row: int) -> None:
        self.runner, self.row = runner, row
        self._found: dict[tuple[int, int, int], Tensor] = {}

    def of(self, kept: Pages, first: int, stop: int) -> Tensor:
        if (slots := self._found.get((kept.group, first, stop))) is None:
            places = np.arange(first, stop)
            blocks = self.runner.tables.table(kept.group)[self.row, places // BLOCK_TOKENS]
            if not blocks.all():
                raise InputError(f"row {self.row}", f"no longer holds all of the tokens [{first}, {stop})")
            slots = on_device(blocks * BLOCK_TOKENS + places % BLOCK_TOKENS, self.runner.device)
            self._found[kept.group, first, stop] = slots
        return slots


def read_out(
    slots: RowSlots, layer: int, start: int, stop: int, whole: int | None = None, codec: Codec = "raw"
) -> Callable[[], tuple[KvChunk, ...]]:
    """As `pack`, but what is returned waits for it. A GPU gathers it now, in the order of its steps, makes it small
    under a codec, and copies it to the host beside the steps that come; a CPU leaves codecs to whoever sends it. A
    chunk that no codec takes, since something in it is not finite, has no data."""
    runner, row = slots.runner, slots.row
    kept, held = runner.cache.layer(layer), runner.tables.lengths[row]
    last = whole in (None, stop)
    if not 0 <= start < stop <= held or (isinstance(kept, LinearStates) and last and stop != held):
        raise InputError(f"row {row}", f"holds {held} tokens; layer {layer} cannot give [{start}, {stop})")
    expected = _expected(runner, layer, start, stop, whole)
    tensors = [_read(slots, kept, item, stop) for item in expected]
    names = [str(item.dtype).removeprefix("torch.") for item in expected]
    about = [
        KvChunk(layer, item.part, item.first, stop, name, tuple(tensor.shape), b"")
        for item, name, tensor in zip(expected, names, tensors, strict=True)
    ]
    if runner.copies is not None and codec != "raw":
        tensors = [_coded(tensor, chunk, codec) for tensor, chunk in zip(tensors, about, strict=True)]
    waits = [_to_host(tensor, runner.copies) for tensor in tensors]
    return lambda: tuple(
        _with_data(chunk, codec, wait(), item.dtype)
        for chunk, item, wait in zip(about, expected, waits, strict=True)
    )


@torch.inference_mode()
def _coded(tensor: Tensor, chunk: KvChunk, codec: Codec) -> Tensor:
    if chunk.part in STATES or chunk.dtype not in CODED:
        return tensor
    from potluck.kv import gpu_kernels

    size = gpu_kernels.room_bytes(chunk.part, chunk.shape, codec)
    room = torch.empty(size, dtype=torch.uint8, device=tensor.device)
    gpu_kernels.encode(tensor.contiguous(), chunk.part, codec, room)
    return room


def _with_data(chunk: KvChunk, codec: Codec, tensor: Tensor, dtype: torch.dtype) -> KvChunk:
    if tensor.dtype == dtype:
        data = memoryview(tensor.contiguous().view(torch.uint8).numpy().data).cast("B")
        return replace(chunk, data=data)
    from potluck.kv import gpu_kernels

    with suppress(InputError):
        return gpu_kernels.coded(chunk, codec, tensor)
    return chunk


@torch.inference_mode()
def _to_host(tensor: Tensor, copies: torch.cuda.Stream | None) -> Callable[[], Tensor]:
    if copies is None:
        return lambda: tensor
    here, ready = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    copies.wait_stream(torch.cuda.current_stream())
    with on_stream(copies):
        here.copy_(tensor, non_blocking=True)
        ready.record()
    tensor.record_stream(copies)

    def wait() -> Tensor:
        ready.synchronize()
        return here

    return wait


def _expected(
    runner: Runner, layer: int, start: int, stop: int, whole: int | None = None
) -> tuple[_Expected, ...]:
    whole = stop if whole is None else whole
    kept = runner.cache.layer(layer)
    if isinstance(kept, LinearStates):
        if stop < whole:
            return ()
        return (
            _Expected("conv", stop, kept.conv.dtype, tuple(kept.conv.shape[1:])),
            _Expected("memory", stop, kept.memory.dtype, tuple(kept.memory.shape[1:])),
        )
    first = first_needed(start, whole, runner.tables.groups[kept.group].window)
    if first >= stop:
        return ()
    shape = (
        (stop - first, kept.heads, kept.dim) if kept.parts == 1 else (stop - first, 2, kept.heads, kept.dim)
    )
    return (_Expected("latent" if kept.parts == 1 else "kv", first, kept.entries.dtype, shape),)


@torch.inference_mode()
def _read(slots: RowSlots, kept: Kept, expected: _Expected, stop: int) -> Tensor:
    if isinstance(kept, LinearStates):
        return (kept.conv if expected.part == "conv" else kept.memory)[slots.row].clone()
    return kept.read(slots.of(kept, expected.first, stop)).view(expected.shape)


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class IncomingHandover:
    """A hand-over on its way into a row, which must hold the tokens [0, start) already. On a GPU chunks may come in
    any thread (`beside`). They are copied and checked on one stream beside the steps, and written on another, which
    waits for whatever used the blocks before, and which steps wait for once all is there."""

    def __init__(self, runner: Runner, row: int, about: KvManifest, tokens: Sequence[int]) -> None:
        if sys.byteorder != "little":
            raise InputError("hand-over", "needs a little-endian machine")
        check_manifest(about, runner.fingerprint, runner.tables.lengths[row], tokens)
        runner.tables.grow(row, about.stop, since=about.stop)
        self._runner, self._row, self._about = runner, row, about
        self._slots = RowSlots(runner, row)
        layers = range(runner.stack.first, runner.stack.last)
        self._wanted: dict[tuple[int, str], _Expected] = {
            (layer, expected.part): expected
            for layer in layers
            for expected in _expected(runner, layer, about.start, about.stop)
        }
        self._pieces = MissingParts({key: (item.first, about.stop) for key, item in self._wanted.items()})
        self._lock, self._over = threading.Lock(), False
        self.beside = runner.device.type == "cuda"
        self._copies = self._writes = None
        if self.beside:
            self._copies, self._writes = (torch.cuda.Stream(runner.device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._writes.wait_stream(torch.cuda.current_stream())
        with on_stream(self._copies):
            self._finite = torch.ones((), dtype=torch.bool, device=runner.device)

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
            with on_stream(self._copies):
                tensor = _values(chunk, self._runner.device, expected.dtype)
                self._finite = self._finite & torch.isfinite(tensor).all()
                # One that is not finite would spread through masked positions to sequences beside it.
                tensor = torch.nan_to_num(tensor, 0.0, 0.0, 0.0).view(expected.shape)
                if (not self._pieces.missing or not self.beside) and not self._finite.item():
                    raise FormatError(where, "has values that are not finite")
            if self._writes is not None and self._copies is not None:
                self._writes.wait_stream(self._copies)
                tensor.record_stream(self._writes)
            with on_stream(self._writes):
                self._write(chunk, expected, tensor)

    def _write(self, chunk: KvChunk, expected: _Expected, tensor: Tensor) -> None:
        kept, row = self._runner.cache.layer(chunk.layer), self._row
        if isinstance(kept, LinearStates):
            (kept.conv if expected.part == "conv" else kept.memory)[row].copy_(tensor)
        else:
            slots = self._slots.of(kept, chunk.first, chunk.stop)
            kept.write(slots, tensor.view(len(slots), -1))

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


def _values(chunk: KvChunk, device: torch.device, dtype: torch.dtype) -> Tensor:
    if device.type == "cuda":
        from potluck.kv import gpu_kernels

        values: Tensor
        if chunk.codec == "raw":
            values = gpu_kernels.uploaded(device, len(chunk.data), (0, chunk.data)).view(dtype)
        else:
            values = gpu_kernels.restored(chunk, device)
        return values
    raw = np.frombuffer(chunk.data, np.uint8)
    return torch.from_numpy(raw if raw.flags.writeable else raw.copy()).view(dtype)


def _piece(wanted: _Expected, chunk: KvChunk) -> _Expected:
    """What the tokens that a chunk says it is of should look like."""
    tokens = max(0, chunk.stop - chunk.first)
    return replace(wanted, first=chunk.first, shape=(tokens, *wanted.shape[1:]))
