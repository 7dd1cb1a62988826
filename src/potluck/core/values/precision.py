"""Formats in which weights are stored and multiplied.

A model says in which format its weights and its experts are; which units of a GPU multiply them, and whether inputs
are made small first, is `perf.operators.formats`'s to say.
"""

from __future__ import annotations

from typing import Final, Literal

from potluck.core.errors import UnknownNameError

Format = Literal["bf16", "fp16", "fp32", "fp8", "fp8_block", "int8", "int4", "mxfp4", "nvfp4"]
FORMAT_BITS: Final[dict[Format, float]] = {
    "bf16": 16.0,
    "fp16": 16.0,
    "fp32": 32.0,
    "fp8": 8.0,
    "fp8_block": 8.0,
    "int8": 8.0,
    "int4": 4.156,
    "mxfp4": 4.25,
    "nvfp4": 4.5,
}
"""Bits of a stored weight, scales included: int4 has 16 + 4 for 128 weights, MXFP4 8 for 32, NVFP4 8 for 16."""
ChosenFormat = Literal["bf16", "fp8", "fp8_block", "int8", "int4", "mxfp4", "nvfp4"]
CHOSEN: Final[tuple[Format, ...]] = ("bf16", "fp8", "fp8_block", "int8", "int4", "mxfp4", "nvfp4")
"""Formats that a person may ask for by name."""


def format_of_bits(bits: float) -> Format:
    """The usual format of so many bits, where nothing says which."""
    if bits > 16.0:
        return "fp32"
    if bits > 8.5:
        return "bf16"
    if bits > 5.0:
        return "fp8"
    if bits == FORMAT_BITS["mxfp4"]:
        return "mxfp4"
    return "nvfp4" if bits == FORMAT_BITS["nvfp4"] else "int4"


def format_named(name: str, field: str = "weights") -> Format:
    """The format of that name; an unknown one is an error that suggests the nearest."""
    for known in CHOSEN:
        if name == known:
            return known
    raise UnknownNameError(field, name, CHOSEN)
