"""The engine's tests: one thread each, since they run beside others, and the strict mode of products set early.

A test that is a coroutine has an event loop of its own.
"""

from __future__ import annotations

import asyncio
import inspect
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


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**given))
    return True
