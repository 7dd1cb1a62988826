"""How parts are cut into groups, and what each codec takes: all that sender and receiver agree on beforehand.

A part is one or two matrices. Keys and latents have groups of 128 tokens down each column (channel), values
groups of 64 along each row. Parameters are, matrix by matrix, all lows and then all scales, as bfloat16. The
payload is, matrix by matrix, the numbers: down columns 128 rows (or what is left) after another, each row by row;
along rows each row by itself. With 4 bits, numbers i and ceil(n / 2) + i of a group of n share byte i, the first in
the lower half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

import numpy as np

from potluck.core.errors import FormatError, PotluckError

Codec = Literal["raw", "int8", "int4"]
Part = Literal["kv", "latent", "conv", "memory"]
STATES: frozenset[Part] = frozenset({"conv", "memory"})
"""Of linear layers: they cross as they are, since all later tokens build on them."""

CODEC_IDS: dict[Codec, int] = {"raw": 0, "int8": 1, "int4": 2}
CODECS: dict[int, Codec] = {number: name for name, number in CODEC_IDS.items()}
ITEM_BYTES = {"float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "uint8": 1}
"""`uint8`: bytes that only both ends understand, a state of unlike formats."""
CODED = ("float16", "bfloat16", "float32")  # What codecs take; numbers of 8 bits cross as they are.
FINITE = {"float16": 0x7BFF, "bfloat16": 0x7F7F, "float32": 0x7F7FFFFF}
"""The bits of the greatest finite number."""
LEVELS: dict[int, int] = {4: 15, 8: 255}  # The last number that so many bits hold.
COLUMN_GROUP = 128
ROW_GROUP = 64
MOST_ELEMENTS = 1 << 40


@dataclass(frozen=True, slots=True)
class CodecSizes:
    parameter_bytes: int
    payload_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.payload_bytes


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """What is quantised in one way: rows `stride` elements apart, from `offset` on."""

    down: bool  # Whether groups run down the columns.
    rows: int
    columns: int
    stride: int
    offset: int
    bits: int

    @property
    def groups(self) -> tuple[int, int]:
        """The shape of its lows, and of its scales."""
        if self.down:
            return _ceil(self.rows, COLUMN_GROUP), self.columns
        return self.rows, _ceil(self.columns, ROW_GROUP)

    @property
    def payload_bytes(self) -> int:
        if self.bits == 8:
            return self.rows * self.columns
        if self.down:
            return _packed(self.rows, COLUMN_GROUP) * self.columns
        return self.rows * _packed(self.columns, ROW_GROUP)


def sizes(part: Part, dtype: str, shape: Sequence[int], codec: Codec) -> CodecSizes:
    whole_bytes = raw_bytes(part, dtype, shape, codec)
    matrices = layout(part, shape, codec)
    if matrices is None:
        return CodecSizes(0, whole_bytes)
    parameters = sum(4 * prod(matrix.groups) for matrix in matrices)
    return CodecSizes(parameters, sum(matrix.payload_bytes for matrix in matrices))


def layout(part: Part, shape: Sequence[int], codec: Codec) -> tuple[QuantizedMatrix, ...] | None:
    """The matrices that are quantised, in the order of their parameters and bytes; None where nothing is."""
    if codec == "raw":
        return None
    bits = 8 if codec == "int8" else 4
    if part == "kv":
        tokens, width = shape[0], prod(shape[2:])
        keys = QuantizedMatrix(True, tokens, width, 2 * width, 0, bits)
        return keys, QuantizedMatrix(False, tokens, width, 2 * width, width, bits)
    width = prod(shape[1:])
    return (QuantizedMatrix(True, shape[0], width, width, 0, bits),)


def share_of(levels: int) -> np.float32:
    """1 / levels, rounded up: the greatest of a group then never needs a step more than there is."""
    return np.float32(np.nextafter(np.float32(1 / levels), np.float32(1)))


def raw_bytes(
    part: Part,
    dtype: str,
    shape: Sequence[int],
    codec: Codec,
    error: Callable[[str, str], PotluckError] = FormatError,
) -> int:
    known = dtype in (ITEM_BYTES if codec == "raw" else CODED if part not in STATES else ())
    if part not in get_args(Part) or not known or codec not in CODEC_IDS:
        raise error("codec", f"knows no {codec!r} of {dtype!r} for {part!r}")
    least = {"kv": 3, "latent": 2}.get(part, 1)
    sound = len(shape) >= least and all(isinstance(size, int) and size >= 0 for size in shape)
    if not sound or (part == "kv" and shape[1] != 2) or prod(shape) > MOST_ELEMENTS:
        raise error(f"codec: {part}", f"cannot have the shape {list(shape)}")
    return prod(shape) * ITEM_BYTES[dtype]


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


def _packed(count: int, group: int) -> int:
    """Bytes for so many 4-bit numbers, each group rounded up."""
    return count // group * (group // 2) + (count % group + 1) // 2
