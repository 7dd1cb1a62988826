"""Unusable machine code on disk costs a compilation, never a failed start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest

from potluck.native.machine_code import machine_code


def double(number):  # type: ignore[no-untyped-def]
    return number + number


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def compiled_afresh() -> Any:
    """As in a process of its own: nothing is known but what lies on disk."""
    fast = machine_code(double, nogil=True)
    assert fast(21) == 42
    return fast


def from_disk(fast: Any) -> bool:
    return sum(fast.stats.cache_hits.values()) == 1


def files(folder: Path, ending: str) -> list[Path]:
    paths = list(folder.rglob(f"*.{ending}"))
    assert paths
    return paths


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


def make_empty(file: Path) -> None:
    file.write_bytes(b"")


def rename_class(file: Path) -> None:
    """Names a class that is no longer there, as after a new version."""
    file.write_bytes(b"cpotluck.native.machine_code\n_Gone\n.")


def garble(file: Path) -> None:
    file.write_bytes(bytes(byte ^ 0x55 for byte in file.read_bytes()))


@pytest.mark.parametrize("damage", [truncate, make_empty, rename_class, garble])
@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_damaged_machine_code_file_is_recompiled(
    folder: Path, ending: str, damage: Callable[[Path], None]
) -> None:
    assert not from_disk(compiled_afresh())
    assert from_disk(compiled_afresh())
    for file in files(folder, ending):
        damage(file)
    assert not from_disk(compiled_afresh())
    assert from_disk(compiled_afresh())


def test_eagerly_compiled_code_survives_a_damaged_file(folder: Path) -> None:
    for _ in range(2):
        assert machine_code(double, ["int64(int64)"], nogil=True)(4) == 8
        for file in files(folder, "nbi"):
            rename_class(file)


def test_full_disk_does_not_prevent_compilation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.caching import IndexDataCacheFile

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "_open_for_write", full)
    compiled_afresh()
    assert not list(folder.rglob("*.nbi"))


def test_missing_cache_folder_compiles_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.dispatcher import Dispatcher

    def none(self: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(Dispatcher, "enable_caching", none)
    assert not from_disk(compiled_afresh())


def test_every_numba_version_has_its_own_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments with unlike versions may share one source."""
    compiled_afresh()
    with monkeypatch.context() as patch:
        patch.setattr(numba, "__version__", "0.0")
        assert not from_disk(compiled_afresh())
    assert from_disk(compiled_afresh())
