"""A kept prefix on its way from one engine's prefix cache to another's, by the names of its blocks alone.

What crosses is what a hand-over of these tokens would bring: keys, values and latents of the blocks that the receiver
lacks, and what windows and states have at the end. The receiver has no tokens to check it by, only names, which stand
for them; so it believes in what its peers say of the tokens, and in nothing else: layers, parts, shapes, formats and
values are checked as they come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import FormatError
from potluck.core.replica.blocks import HASH_BYTES
from potluck.core.values.model import FullAttention, LatentAttention, LinearAttention, Model
from potluck.kv.chunks import KvChunk
from potluck.kv.codec_layout import Part

FORMATS = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number."""
INFINITE_BFLOAT16 = 0x7F80
"""The exponent of what is not finite."""


def chain_hash(names: Sequence[int]) -> str:
    """What stands in a manifest where other hand-overs have the hash of their tokens."""
    named = b"".join(name.to_bytes(HASH_BYTES, "little") for name in names)
    return hashlib.sha256(b"prefix " + named).hexdigest()


def expected_parts(
    model: Model, start: int, stop: int
) -> dict[tuple[int, Part], tuple[int, tuple[int, ...]]]:
    """(layer, part) to the first token and the shape of what must come for blocks [start, stop)."""
    found: dict[tuple[int, Part], tuple[int, tuple[int, ...]]] = {}
    for place, layer in enumerate(model.layers):
        kind = layer.attention
        if isinstance(kind, LatentAttention):
            shape = (stop - start, 1, kind.kv_lora_rank + kind.qk_rope_head_dim)
            found[place, "latent"] = start, shape
        elif isinstance(kind, FullAttention):
            first = start if kind.window is None else max(0, stop - kind.window + 1)
            found[place, "kv"] = first, (stop - first, 2, kind.kv_heads, kind.head_dim)
        elif isinstance(kind, LinearAttention):
            found[place, "conv"] = stop, (kind.conv_kernel - 1, kind.conv_channels)
            found[place, "memory"] = stop, (kind.value_heads, kind.key_head_dim, kind.value_head_dim)
    return found


class PrefixReceiver(Protocol):
    """What takes the parcels of a prefix as they come; the cache that made it knows the rest."""

    @property
    def stop(self) -> int: ...

    def accept(self, parcel: KvChunk) -> None: ...


class ReceivedPrefix:
    """The parcels of tokens [start, stop) as they come, in any order."""

    def __init__(self, model: Model, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self._missing = expected_parts(model, start, stop)
        self._parcels: dict[int, list[KvChunk]] = {}
        self._format = ""

    def accept(self, parcel: KvChunk) -> None:
        """Check a parcel and keep a copy of it."""
        where = f"prefix: layer {parcel.layer} {parcel.part}"
        expected = self._missing.get((parcel.layer, parcel.part))
        if expected is None:
            raise FormatError(where, "is not expected, or came before")
        if parcel.codec != "raw":
            raise FormatError(where, f"came as {parcel.codec}; what is kept for others must be exact")
        if (parcel.first, parcel.stop, tuple(parcel.shape)) != (expected[0], self.stop, expected[1]):
            said = f"[{parcel.first}, {parcel.stop}) {list(parcel.shape)}"
            raise FormatError(where, f"is {said}, expected [{expected[0]}, {self.stop}) {list(expected[1])}")
        fixed = "float32" if parcel.part == "memory" else self._format
        if parcel.dtype not in FORMATS or (fixed and parcel.dtype != fixed):
            raise FormatError(where, f"is {parcel.dtype}, expected {fixed or ' or '.join(FORMATS)}")
        self._format = self._format or ("" if parcel.part == "memory" else parcel.dtype)
        if len(parcel.data) != prod(expected[1]) * FORMATS[parcel.dtype]:
            raise FormatError(where, f"has {len(parcel.data)} bytes, which its shape has not")
        raw = np.frombuffer(parcel.data, dtype=np.uint8).copy()
        if not _all_finite(raw, parcel.dtype):
            raise FormatError(where, "has values that are not finite")
        self._parcels.setdefault(parcel.layer, []).append(replace(parcel, data=memoryview(raw.data)))
        del self._missing[parcel.layer, parcel.part]

    def finish(self) -> None:
        if self._missing:
            layer, part = min(self._missing)
            raise FormatError(
                "prefix", f"{len(self._missing)} parcels are missing, the first is layer {layer} {part}"
            )

    def read(self, layer: int, start: int, stop: int) -> tuple[KvChunk, ...]:
        """What came of a layer, of one that keeps every token only [start, stop)."""
        found = []
        for parcel in self._parcels[layer]:
            if parcel.first == self.start < start and parcel.shape[0] == self.stop - self.start:
                skipped = len(parcel.data) // parcel.shape[0] * (start - self.start)
                shape = (stop - start, *parcel.shape[1:])
                parcel = replace(parcel, first=start, shape=shape, data=memoryview(parcel.data)[skipped:])
            found.append(parcel)
        return tuple(found)


def _all_finite(raw: NDArray[np.uint8], dtype: str) -> bool:
    if dtype == "bfloat16":
        return bool(((raw.view("<u2") & INFINITE_BFLOAT16) != INFINITE_BFLOAT16).all())
    return bool(np.isfinite(raw.view(dtype)).all())
