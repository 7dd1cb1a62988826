"""Parcels under a codec, and back: what a sender does before the wire and a receiver behind it."""

from __future__ import annotations

from dataclasses import replace

from potluck.core.errors import InputError
from potluck.kv.chunks import KvChunk
from potluck.kv.codec.codec_layout import STATES
from potluck.kv.codec.convert import Codec, decode, encode


def packed(parcel: KvChunk, codec: Codec) -> KvChunk:
    """A raw parcel under a codec; InputError when it cannot be, since something is not finite.

    States stay as they are: all later tokens build on them, and they do not grow with the prompt.
    """
    if parcel.codec == codec or parcel.part in STATES:
        return parcel
    if parcel.codec != "raw":
        raise InputError("codec", f"layer {parcel.layer} {parcel.part} is {parcel.codec} already")
    found = encode(parcel.data, parcel.part, parcel.dtype, parcel.shape, codec)
    return replace(parcel, data=found.payload, codec=codec, parameters=found.parameters)


def restored(parcel: KvChunk, out: bytearray | memoryview | None = None) -> KvChunk:
    """A raw parcel again, in `out` when that is given; FormatError when it is not what a codec makes."""
    if parcel.codec == "raw" and out is None:
        return parcel
    data = decode(parcel.parameters, parcel.data, parcel.part, parcel.dtype, parcel.shape, parcel.codec, out)
    return replace(parcel, data=data, codec="raw", parameters=b"")
