"""Compiled functions work with and without a folder for their machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import pytest

from potluck.native.machine_code import compiled
from potluck.native.machine_code import compiler_options as options


def add(a: int, b: int) -> int:
    return a + b


def test_compiled_function_returns_the_same_as_the_plain_function() -> None:
    assert compiled(add)(2, 3) == add(2, 3)


def test_function_is_compiled_when_numba_lacks_the_nrt_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = numba.njit, []

    def njit(**chosen: Any) -> Callable[..., Any]:
        asked.append(chosen)
        return real(**(chosen | {"cache": False}))

    monkeypatch.delattr(options.DefaultOptions, "_nrt")
    monkeypatch.setattr(numba, "njit", njit)
    compiled(add)
    assert "_nrt" not in asked[0]
