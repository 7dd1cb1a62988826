"""Compiling the engine's inner loops: as `kv/compiled.py` does, with liberties that change no result from run to run.

A product followed by a sum becomes one instruction with one rounding, and sums may be cut into vectors, but in a way
that depends on their length alone: the same numbers always give the same bits.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import cast

from numba.extending import intrinsic

from potluck.kv.compiled import Function
from potluck.kv.compiled import compiled as kv_compiled


def compiled(function: Function) -> Function:
    """Compile a function on its first call. It must not create arrays, and lets other threads run meanwhile."""
    fast = kv_compiled(function, fastmath={"contract", "reassoc", "nsz", "arcp"})
    # numba looks only at the file that a function stands in, but what is called from other files becomes part of it.
    cache_file = getattr(getattr(fast, "_cache", None), "_cache_file", None)
    if cache_file is not None and hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _stamp()
    return fast


@cache
def _stamp() -> tuple[tuple[str, float, int], ...]:
    """Of all files in this folder; code compiled from others than these is compiled anew."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple((file.name, file.stat().st_mtime, file.stat().st_size) for file in files)


def instruction(function: Function) -> Function:
    """Something that compiled functions can use and that is written in the compiler's own language: `function` takes
    the types of its arguments, or their values where those are written out, and says how to generate it."""
    return cast(Function, intrinsic(prefer_literal=True)(function))
