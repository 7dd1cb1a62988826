"""A part of a layer's cache made small for the wire, and back: as it is, in 8 bits, or in 4.

    parameters, payload = encode(data, part, dtype, shape, codec)
    data = decode(parameters, payload, part, dtype, shape, codec)

Both lengths follow from part, dtype, shape and codec (`sizes`), so a receiver can check them before it takes memory.

A few channels of keys are much larger than the others, at all tokens; values have no such order. So keys (and
latents, which are keys as well) are quantised per channel over 128 tokens, values per token over 64 channels, as
THUNDERSERVE does after KIVI. A group has its least number and its step as bfloat16 beside it: that suits any range,
and 4 bits come to 27.3 % of 16 (keys 26.6 %, values 28.1 %). Half of the step is the largest error; docs/kv.md has
figures.

States of linear layers are never sent in fewer bits: a small part of the cache, on which all later tokens build.

Lossy codecs refuse what is not finite, and what they restore is always finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from potluck.core.errors import FormatError, InputError
from potluck.kv.chunks import Buffer, KvChunk
from potluck.kv.codec_layout import (
    COLUMN_GROUP,
    FINITE,
    LEVELS,
    STATES,
    Codec,
    CodecSizes,
    Part,
    QuantizedMatrix,
    layout,
    raw_bytes,
    share_of,
    sizes,
)

STORED: dict[str, type[np.generic]] = {"float16": np.uint16, "bfloat16": np.int16, "float32": np.float32}
"""As what the kernels read them."""


@dataclass(frozen=True, slots=True)
class EncodedPart:
    parameters: Buffer
    payload: Buffer


def encode(data: Buffer, part: Part, dtype: str, shape: Sequence[int], codec: Codec) -> EncodedPart:
    """Raw: the data itself. Otherwise new memory; InputError when something is not finite."""
    whole_bytes = raw_bytes(part, dtype, shape, codec, InputError)
    view = memoryview(data).cast("B")
    if len(view) != whole_bytes:
        raise InputError(
            f"codec: {part}", f"has {len(view)} bytes, {dtype} {list(shape)} needs {whole_bytes}"
        )
    matrices = layout(part, shape, codec)
    if matrices is None:
        return EncodedPart(b"", view)
    expected = sizes(part, dtype, shape, codec)
    source = _readable(view, STORED[dtype])
    parameters = np.empty(expected.parameter_bytes // 2, np.uint16)
    payload = np.empty(expected.payload_bytes, np.uint8)
    for matrix, lows, scales, out in _cut(matrices, parameters, payload):
        if lows.size and not _quantise(source, matrix, FINITE[dtype], lows, scales, out):
            raise InputError(f"codec: {part}", "has values that are not finite, or too far apart for float32")
    return EncodedPart(parameters.data.cast("B"), payload.data)


def decode(
    parameters: Buffer,
    payload: Buffer,
    part: Part,
    dtype: str,
    shape: Sequence[int],
    codec: Codec,
    out: bytearray | memoryview | None = None,
) -> memoryview:
    """The restored data, in `out` when that is given. Raw without `out` is the payload itself."""
    cut = _checked(parameters, payload, part, dtype, shape, codec)
    if codec == "raw":
        return _into(memoryview(payload).cast("B"), out)
    target = _writable(out, prod(shape), STORED[dtype])
    for matrix, lows, scales, source in cut:
        if lows.size:
            _restore(source, matrix, lows, scales, target)
    if target.base is not None:  # it is `out` itself
        return target.data.cast("B")
    return _into(target.data.cast("B"), out)


def check_coded(chunk: KvChunk) -> None:
    """FormatError when it is not what its codec makes, or would be restored to something that is not finite."""
    _checked(chunk.parameters, chunk.data, chunk.part, chunk.dtype, chunk.shape, chunk.codec)


def load() -> None:
    """Load the compiled loops now, so that the first hand-over does not wait for them."""
    from potluck.kv import cpu_kernels  # noqa: F401


def warm(dtypes: Sequence[str] = tuple(STORED)) -> None:
    """Compile, so that the first hand-over does not wait for it."""
    for dtype in dtypes:
        for codec in ("int8", "int4"):
            data = bytes(2 * 2 * np.dtype(STORED[dtype]).itemsize)
            encoded_part = encode(data, "kv", dtype, (2, 2, 1, 1), codec)
            decode(encoded_part.parameters, encoded_part.payload, "kv", dtype, (2, 2, 1, 1), codec)


def _quantise(source: Any, matrix: QuantizedMatrix, finite: int, lows: Any, scales: Any, out: Any) -> bool:
    from potluck.kv import cpu_kernels

    m = matrix
    share = share_of(LEVELS[m.bits])
    if not m.down:
        result = cpu_kernels.encode_rows(
            source, m.rows, m.columns, m.stride, m.offset, share, finite, lows, scales, out, m.bits == 4
        )
        return bool(result)
    ints, floats = np.empty((2, cpu_kernels.WIDTH), np.int32), np.empty((2, cpu_kernels.WIDTH), np.float32)
    return bool(
        cpu_kernels.encode_columns(
            source,
            m.rows,
            m.columns,
            m.stride,
            m.offset,
            COLUMN_GROUP,
            share,
            finite,
            lows,
            scales,
            out,
            m.bits == 4,
            ints,
            floats,
        )
    )


def _restore(source: Any, matrix: QuantizedMatrix, lows: Any, scales: Any, target: Any) -> None:
    from potluck.kv import cpu_kernels

    m = matrix
    if not m.down:
        cpu_kernels.decode_rows(
            source, m.rows, m.columns, lows, scales, m.bits == 4, target, m.stride, m.offset
        )
        return
    floats = np.empty((2, cpu_kernels.WIDTH), np.float32)
    cpu_kernels.decode_columns(
        source, m.rows, m.columns, lows, scales, COLUMN_GROUP, m.bits == 4, target, m.stride, m.offset, floats
    )


def _cut(
    matrices: tuple[QuantizedMatrix, ...], parameters: Any, payload: Any
) -> list[tuple[QuantizedMatrix, Any, Any, Any]]:
    cut = []
    at, place = 0, 0
    for matrix in matrices:
        count = prod(matrix.groups)
        lows = parameters[at : at + count].reshape(matrix.groups)
        scales = parameters[at + count : at + 2 * count].reshape(matrix.groups)
        cut.append((matrix, lows, scales, payload[place : place + matrix.payload_bytes]))
        at += 2 * count
        place += matrix.payload_bytes
    return cut


def _checked(
    parameters: Buffer, payload: Buffer, part: Part, dtype: str, shape: Sequence[int], codec: Codec
) -> list[tuple[QuantizedMatrix, Any, Any, Any]]:
    """Cut into matrices, each with lows, scales and numbers."""
    expected = sizes(part, dtype, shape, codec)
    have = CodecSizes(memoryview(parameters).nbytes, memoryview(payload).nbytes)
    if have != expected:
        raise FormatError(
            f"codec: {part}",
            f"{codec} has {have.parameter_bytes} + {have.payload_bytes} bytes, "
            f"expected {expected.parameter_bytes} + {expected.payload_bytes}",
        )
    values = _readable(memoryview(parameters).cast("B"), np.uint16)
    packs = _readable(memoryview(payload).cast("B"), np.uint8)
    cut = _cut(layout(part, shape, codec) or (), values, packs)
    for matrix, lows, scales, _ in cut:
        _check(part, lows, scales, LEVELS[matrix.bits])
    return cut


def _check(part: Part, lows: Any, scales: Any, levels: int) -> None:
    """No parameters, whoever made them, may restore something that is not finite."""
    low = (lows.astype(np.uint32) << 16).view(np.float32)
    scale = (scales.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        top = low + np.float32(levels) * scale
    if not (np.isfinite(low).all() and np.isfinite(top).all() and (scale >= 0).all()):
        raise FormatError(f"codec: {part}", "has parameters that are not finite, or steps below zero")


def _readable(view: memoryview, kind: type[np.generic]) -> npt.NDArray[Any]:
    """An aligned array that cannot be written to: numba compiles anew for every other kind."""
    readable = np.require(np.frombuffer(view, kind), requirements="A")
    readable.flags.writeable = False
    return readable


def _writable(out: bytearray | memoryview | None, count: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    """An array over `out` itself where that can be, else a new one."""
    if out is not None and memoryview(out).nbytes == count * np.dtype(kind).itemsize:
        writable = np.frombuffer(memoryview(out).cast("B"), kind)
        if writable.flags.writeable and writable.flags.aligned:
            return writable
    return np.empty(count, kind)


def _into(view: memoryview, out: bytearray | memoryview | None) -> memoryview:
    if out is None:
        return view
    target = memoryview(out).cast("B")
    if len(target) != len(view):
        raise InputError("codec: out", f"has {len(target)} bytes, needs {len(view)}")
    target[:] = view
    return target


def packed(chunk: KvChunk, codec: Codec) -> KvChunk:
    """A raw chunk under a codec, a state as it is; InputError when something is not finite."""
    if chunk.codec == codec or chunk.part in STATES:
        return chunk
    if chunk.codec != "raw":
        raise InputError("codec", f"layer {chunk.layer} {chunk.part} is {chunk.codec} already")
    encoded_part = encode(chunk.data, chunk.part, chunk.dtype, chunk.shape, codec)
    return replace(chunk, data=encoded_part.payload, codec=codec, parameters=encoded_part.parameters)


def restored(chunk: KvChunk, out: bytearray | memoryview | None = None) -> KvChunk:
    """A raw chunk again, in `out` when that is given; FormatError when it is not what a codec makes."""
    if chunk.codec == "raw" and out is None:
        return chunk
    data = decode(chunk.parameters, chunk.data, chunk.part, chunk.dtype, chunk.shape, chunk.codec, out)
    return replace(chunk, data=data, codec="raw", parameters=b"")
