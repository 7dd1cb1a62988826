"""The codec once more in plain NumPy, slow and short: what the kernels are compared with, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from potluck.kv.codec_layout import (
    COLUMN_GROUP,
    LEVELS,
    ROW_GROUP,
    Codec,
    Part,
    QuantizedMatrix,
    layout,
    share_of,
)

Floats = npt.NDArray[np.float32]
NORMAL = np.float32(2.0**-126)


def encode_reference(
    data: bytes, part: Part, dtype: str, shape: Sequence[int], codec: Codec
) -> tuple[bytes, bytes]:
    """(parameters, payload) of finite data under a lossy codec."""
    numbers = to_floats(data, dtype)
    parameters, payload = [], []
    for matrix in layout(part, shape, codec) or ():
        table = _table(numbers, matrix)
        groups = [_group(values, matrix.bits) for values in _groups(table, matrix)]
        lows = np.array([low for low, _, _ in groups], np.float32)
        scales = np.array([scale for _, scale, _ in groups], np.float32)
        parameters += [brain_bits(lows), brain_bits(scales)]
        packs = [q for _, _, q in groups]
        payload.append(_woven(packs, matrix) if matrix.down else b"".join(q.tobytes() for q in packs))
    return b"".join(part.tobytes() for part in parameters), b"".join(payload)


def decode_reference(
    parameters: bytes, payload: bytes, part: Part, dtype: str, shape: Sequence[int], codec: Codec
) -> bytes:
    target = np.zeros(prod(shape), np.float32)
    at, place = 0, 0
    values = (np.frombuffer(parameters, np.uint16).astype(np.uint32) << 16).view(np.float32)
    for matrix in layout(part, shape, codec) or ():
        count = prod(matrix.groups)
        lows, scales = values[at : at + count], values[at + count : at + 2 * count]
        table = np.zeros((matrix.rows, matrix.columns), np.float32)
        packs = np.frombuffer(payload[place : place + matrix.payload_bytes], np.uint8)
        for number, (where, q) in enumerate(_unwoven(packs, matrix)):
            table[where] = lows[number] + q.astype(np.float32) * scales[number]
        rows = matrix.offset + matrix.stride * np.arange(matrix.rows)[:, None]
        target[rows + np.arange(matrix.columns)] = table
        at += 2 * count
        place += matrix.payload_bytes
    return from_floats(target, dtype)


def to_floats(data: bytes, dtype: str) -> Floats:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype).astype(np.float32)


def from_floats(numbers: Floats, dtype: str) -> bytes:
    """The nearest of a kind, ties to even, at most the last finite one."""
    if dtype == "float32":
        return numbers.tobytes()
    if dtype == "float16":
        return np.clip(numbers, -65504, 65504).astype(np.float16).tobytes()
    bits = numbers.view(np.uint32)
    size = ((bits & 0x7FFFFFFF) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return bytes((np.minimum(size, 0x7F7F) | ((bits >> 16) & 0x8000)).astype(np.uint16))


def brain_bits(numbers: Floats) -> npt.NDArray[np.uint16]:
    """Of numbers that are bfloat16 already."""
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def _table(numbers: Floats, matrix: QuantizedMatrix) -> Floats:
    rows = matrix.offset + matrix.stride * np.arange(matrix.rows)[:, None]
    floats: Floats = numbers[rows + np.arange(matrix.columns)]
    return floats


def _spans(matrix: QuantizedMatrix) -> list[Any]:
    """Where the groups lie, in order."""
    if matrix.down:
        starts = range(0, matrix.rows, COLUMN_GROUP)
        return [np.s_[a : a + COLUMN_GROUP, c] for a in starts for c in range(matrix.columns)]
    starts = range(0, matrix.columns, ROW_GROUP)
    return [np.s_[r, a : a + ROW_GROUP] for r in range(matrix.rows) for a in starts]


def _groups(table: Floats, matrix: QuantizedMatrix) -> list[Floats]:
    return [table[span] for span in _spans(matrix)]


def _group(values: Floats, bits: int) -> tuple[np.float32, np.float32, npt.NDArray[np.uint8]]:
    levels = LEVELS[bits]
    least = min(values, key=lambda value: (value, not np.signbit(value)))
    low, spread = _down(least), np.float32(0)
    spread = values.max() - low
    scale = _up(max(spread * share_of(levels), NORMAL)) if spread > 0 else np.float32(0)
    inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
    q = ((values - low) * inverse + np.float32(0.5)).astype(np.int32)
    assert q.min(initial=0) >= 0
    assert q.max(initial=0) <= levels
    if bits == 8:
        return low, scale, q.astype(np.uint8)
    half = (len(q) + 1) // 2
    packed = q[:half].copy()
    packed[: len(q) - half] |= q[half:] << 4
    return low, scale, packed.astype(np.uint8)


def _down(number: np.float32) -> np.float32:
    bits = int(number.view(np.uint32))
    size = bits & 0x7FFFFFFF
    size = (size + 0xFFFF if bits >> 31 else size) & 0x7FFF0000
    return np.uint32(size | bits & 0x80000000).view(np.float32)


def _up(number: np.float32) -> np.float32:
    return np.uint32((int(np.float32(number).view(np.uint32)) + 0xFFFF) & 0xFFFF0000).view(np.float32)


def _woven(groups: list[npt.NDArray[np.uint8]], matrix: QuantizedMatrix) -> bytes:
    """Groups of neighbouring columns, row by row."""
    width = matrix.columns
    spans = [groups[at : at + width] for at in range(0, len(groups), width)] if width else []
    return b"".join(np.stack(span, axis=1).tobytes() for span in spans)


def _unwoven(
    packs: npt.NDArray[np.uint8], matrix: QuantizedMatrix
) -> list[tuple[Any, npt.NDArray[np.uint8]]]:
    """(where a group lies, its numbers)."""
    unwoven, at = [], 0
    for number, span in enumerate(_spans(matrix)):
        count = len(np.empty((matrix.rows, matrix.columns), np.uint8)[span])
        size = count if matrix.bits == 8 else (count + 1) // 2
        if matrix.down:
            column = number % matrix.columns
            bytes_ = packs[at : at + size * matrix.columns].reshape(size, matrix.columns)[:, column]
            at += size * matrix.columns if column == matrix.columns - 1 else 0
        else:
            bytes_ = packs[at : at + size]
            at += size
        both = bytes_ if matrix.bits == 8 else np.concatenate([bytes_ & 15, bytes_ >> 4])[:count]
        unwoven.append((span, both))
    return unwoven
