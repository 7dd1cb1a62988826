"""The engine's tests: one thread each, since they run beside others, and the strict mode of products set early."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import potluck.engine  # noqa: F401  before the first product of this process, whoever's test that is in


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
