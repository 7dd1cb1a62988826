"""Compiling inner loops with numba, and keeping the machine code on disk.

numba looks for a folder that it can write to: `NUMBA_CACHE_DIR` when that is set, else `__pycache__` beside
the module, else (a package installed read-only) the user's cache folder. Where none can be written to, the
functions are compiled anew in every process: slower to start, otherwise the same.

Compiled functions must not create arrays: they work on what their caller gives them. So nothing has to be
counted as used or freed, which otherwise takes more time than the search itself. numba's switch for that is
not a documented one; without it the functions are three times slower and give the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import options

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function on its first call; it lets other threads run meanwhile."""
    chosen: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    if hasattr(options.DefaultOptions, "_nrt"):
        chosen["_nrt"] = False
    try:
        fast = numba.njit(cache=True, **chosen)(function)
    except RuntimeError:  # numba's word for having found no folder
        fast = numba.njit(**chosen)(function)
    return cast(Callable[P, R], fast)
