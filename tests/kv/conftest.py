"""Shared memory of these tests lies in a folder of its own, so that leaks of others are not taken for ours."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.kv import shared_memory


@pytest.fixture(scope="session", autouse=True)
def own_shared_memory() -> Iterator[None]:
    if not shared_memory.FOLDER.is_dir():
        yield
        return
    with (
        tempfile.TemporaryDirectory(prefix="potluck-test-", dir=shared_memory.FOLDER) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(shared_memory, "FOLDER", Path(folder))
        yield
