"""Compiling inner loops with numba, and keeping the machine code on disk.

numba looks for a folder that it can write to: `NUMBA_CACHE_DIR` when that is set, else `__pycache__` beside
the module, else (a package installed read-only) the user's cache folder. Where none can be written to, the
functions are compiled anew in every process: slower to start, otherwise the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from numba import njit

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function on its first call; it lets other threads run meanwhile."""
    try:
        fast = njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # numba's word for having found no folder
        fast = njit(nogil=True, error_model="numpy")(function)
    return cast(Callable[P, R], fast)
