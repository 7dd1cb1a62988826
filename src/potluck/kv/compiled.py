"""Compiling the inner loops of kv and engine (`native/machine_code.py`)."""

from __future__ import annotations

from typing import Any

from numba.core import options

from potluck.native.machine_code import Function, machine_code

__all__ = ["Function", "compiled"]


def compiled(function: Function, *signatures: str, arrays: bool = False, **more: Any) -> Function:
    """Compile a function, now for the signatures named, else on its first call. Other threads run while it does.

    Without `arrays` it must not create any; then nothing has to be counted as used or freed.
    """
    chosen: dict[str, Any] = {"nogil": True, "error_model": "numpy", **more}
    if not arrays and hasattr(options.DefaultOptions, "_nrt"):
        chosen["_nrt"] = False
    fast: Function = machine_code(function, signatures, **chosen)
    return fast
