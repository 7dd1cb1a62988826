"""Compiling inner loops with numba, and keeping the machine code on disk.

numba looks for a folder that it can write to: `NUMBA_CACHE_DIR` when that is set, else `__pycache__` beside the
module, else the user's cache folder. Where there is none, functions are compiled anew in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba.core import options

Function = Callable[..., Any]


def compiled(function: Function, *signatures: str, arrays: bool = False, **more: Any) -> Function:
    """Compile a function, now for the signatures named, else on its first call. Other threads run while it does.

    Without `arrays` it must not create any; then nothing has to be counted as used or freed.
    """
    chosen: dict[str, Any] = {"nogil": True, "error_model": "numpy", **more}
    if not arrays and hasattr(options.DefaultOptions, "_nrt"):
        chosen["_nrt"] = False
    types = list(signatures) or None
    try:
        fast: Function = numba.njit(types, cache=True, **chosen)(function)
    except RuntimeError:  # numba's word for having found no folder
        fast = numba.njit(types, **chosen)(function)
    return fast
