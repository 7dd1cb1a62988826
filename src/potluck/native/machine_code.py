"""Functions that numba compiles, and their machine code on disk.

numba looks for a folder that it can write to: `NUMBA_CACHE_DIR` when that is set, else `__pycache__` beside the
module, else (a package installed read-only) the user's cache folder. Where there is none, functions are compiled anew
in every process: slower to start, otherwise the same.

What lies there may be of no use: cut short by a full disk, or written when some class had another name. numba lets
such errors through. Here they cost a compilation: the index of that function begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
from numba.core import caching
from numba.core import options as compiler_options

Function = Callable[..., Any]


def compiled(function: Function, *signatures: str, arrays: bool = False, **more: Any) -> Function:
    """Compile an inner loop, now for the signatures named, else on its first call. Other threads run while it does.

    Without `arrays` it must not create any; then nothing has to be counted as used or freed.
    """
    chosen: dict[str, Any] = {"nogil": True, "error_model": "numpy", **more}
    if not arrays and hasattr(compiler_options.DefaultOptions, "_nrt"):
        chosen["_nrt"] = False
    fast: Function = machine_code(function, signatures, **chosen)
    return fast


def machine_code(function: Function, signatures: Sequence[str] = (), **options: Any) -> Any:
    """A compiled function. With signatures it is compiled now, for these alone; else on its first call."""
    fast = numba.njit(**options)(function)
    try:
        fast.enable_caching()
    except RuntimeError:
        pass  # numba's word for having found no folder: it goes without
    else:
        fast._cache._cache_file = _file_of_this_version(fast._cache)
        fast._cache = _Forgiving(fast._cache)
    for signature in signatures:
        fast.compile(signature)
    if signatures:
        fast.disable_compile()
    return fast


def _file_of_this_version(cache: Any) -> Any:
    """numba has one file for all its versions, and begins it anew where another wrote it: two environments that share
    a source would both compile at every start."""
    name = f"{cache._impl.filename_base}-{numba.__version__}"
    file: Any = caching.IndexDataCacheFile
    return file(cache.cache_path, name, cache._impl.locator.get_source_stamp())


class _Forgiving:
    """numba's cache of one function, which begins anew where it cannot be read and gives up where it cannot be
    written."""

    def __init__(self, cache: Any) -> None:
        self._given = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The compiled code, or None for none that is of use."""
        try:
            return self._given.load_overload(signature, context)
        except Exception:  # whatever unpickling and linking of damaged files may raise
            self._writing(self._given.flush)
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        self._writing(lambda: self._given.save_overload(signature, data))

    def _writing(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError:
            self._given.disable()
