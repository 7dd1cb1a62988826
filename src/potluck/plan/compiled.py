"""Compiling the planner's inner loops (`native/machine_code.py`).

Compiled functions must not create arrays: they work on what their caller gives them. So nothing has to be
counted as used or freed, which otherwise takes more time than the search itself. numba's switch for that is
not a documented one; without it the functions are three times slower and give the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from numba.core import options

from potluck.native.machine_code import machine_code

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function on its first call; it lets other threads run meanwhile."""
    chosen: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    if hasattr(options.DefaultOptions, "_nrt"):
        chosen["_nrt"] = False
    return cast(Callable[P, R], machine_code(function, **chosen))
