"""Parcels under every codec, of every part and dtype."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from codec_reference import decode_reference, encode_reference, from_floats

from potluck.core.errors import FormatError, InputError
from potluck.kv.chunks import KvChunk
from potluck.kv.codec_layout import STATES
from potluck.kv.kv_codec import Codec, Part, encode, packed, restored, sizes

SHAPES: dict[Part, tuple[int, ...]] = {
    "kv": (130, 2, 2, 40),
    "latent": (33, 1, 24),
    "conv": (3, 40),
    "memory": (4, 16, 70),
}


def parcel(part: Part, dtype: str) -> KvChunk:
    shape = SHAPES[part]
    values = np.random.default_rng(3).standard_normal(prod(shape)).astype(np.float32)
    return KvChunk(1, part, 0, shape[0], dtype, shape, from_floats(values, dtype))


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("part", SHAPES)
def test_there_and_back(part: Part, dtype: str, codec: Codec) -> None:
    """States cross whole whatever the codec; those that an older sender put into 8 bits are still read."""
    one = parcel(part, dtype)
    sent = packed(one, codec)
    if part in STATES and codec != "raw":
        assert sent is one
        found = encode(one.data, part, dtype, one.shape, codec)
        sent = replace(one, data=found.payload, codec=codec, parameters=found.parameters)
    size = sizes(part, dtype, one.shape, codec)
    assert (len(sent.parameters), len(sent.data)) == (size.parameter_bytes, size.payload_bytes)
    got = restored(sent)
    if codec == "raw":
        assert got.data is one.data
        expected = bytes(one.data)
    else:
        about = (part, dtype, one.shape, codec)
        expected = decode_reference(*encode_reference(bytes(one.data), *about), *about)
    assert replace(got, data=bytes(got.data)) == replace(one, data=expected)
    out = bytearray(len(one.data))
    restored(sent, out)
    assert out == expected


def test_what_is_packed_is_not_packed_again_and_what_is_wrong_is_refused() -> None:
    sent = packed(parcel("kv", "float16"), "int4")
    assert packed(sent, "int4") is sent
    with pytest.raises(InputError, match="already"):
        packed(sent, "int8")
    with pytest.raises(FormatError):
        restored(replace(sent, codec="int8"))
    with pytest.raises(FormatError):
        restored(replace(sent, parameters=b"\xff" * len(sent.parameters)))
