"""Compiled functions work wherever their machine code can be kept, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import pytest

from potluck.native.machine_code import compiled
from potluck.native.machine_code import compiler_options as options


def add(a: int, b: int) -> int:
    return a + b


def test_a_compiled_function_gives_the_same() -> None:
    assert compiled(add)(2, 3) == add(2, 3)


def test_without_the_undocumented_switch_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = numba.njit, []

    def njit(**chosen: Any) -> Callable[..., Any]:
        asked.append(chosen)
        return real(**(chosen | {"cache": False}))

    monkeypatch.delattr(options.DefaultOptions, "_nrt")
    monkeypatch.setattr(numba, "njit", njit)
    compiled(add)
    assert "_nrt" not in asked[0]
